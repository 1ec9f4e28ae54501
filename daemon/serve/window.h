/* SPDX-License-Identifier: Apache-2.0 */
/* The two shared memories of a connection (proto/window.h), made by the daemon and sent with the HELLO reply. */
#ifndef OSCAR_DAEMON_SERVE_WINDOW_H
#define OSCAR_DAEMON_SERVE_WINDOW_H

#include "oscar/device.h"

#include "proto/window.h"

struct window {
    int window_fd, fence_fd; /* -1 once sent */
    struct oscar_window_header *header;
    oscar_fence_slot *fences;
};

#define WINDOW_NONE ((struct window){.window_fd = -1, .fence_fd = -1})

/* Sparse memfds of fixed size: the client can neither cut them under the daemon nor let them grow. */
int window_new(struct window *ret, struct oscar_cause *cause);
void window_close_fds(struct window *window); /* the mappings stay */
void window_free(struct window *window);

#endif
