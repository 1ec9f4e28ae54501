/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A path at which a socket is to stand, claimed for this process: a lock file beside it (PATH.lock) says that a daemon
 * lives, so that what a killed one left behind can be told from what another one serves.
 */
#ifndef OSCAR_DAEMON_SERVE_ENDPOINT_H
#define OSCAR_DAEMON_SERVE_ENDPOINT_H

#include <sys/types.h>

#include "proto/cause.h"

struct endpoint;

/*
 * Claims `path` and removes a socket that nobody serves any more. OSCAR_ERR_BUSY when a live process serves it,
 * OSCAR_ERR_IO when something else than a socket stands there or the directory is missing or not writable.
 */
int endpoint_claim(const char *path, struct endpoint **ret, struct oscar_cause *cause);
/* A listening SOCK_SEQPACKET socket there, with this mode and group ("" keeps the process's own). Non-blocking; the
 * caller's. */
int endpoint_listen(struct endpoint *endpoint, mode_t mode, const char *group, int *ret_fd, struct oscar_cause *cause);
/* Sets mode and group of a socket that somebody else (nanomsg) has bound there under umask 0177, and remembers it as
 * ours. */
int endpoint_adopt(struct endpoint *endpoint, mode_t mode, const char *group, struct oscar_cause *cause);
const char *endpoint_path(const struct endpoint *endpoint);
/* Removes the socket, if it is still ours, and the lock. NULL is fine. */
void endpoint_release(struct endpoint *endpoint);

/* Makes a directory whose parent exists; 0 if it is there. */
int endpoint_directory(const char *path, struct oscar_cause *cause);

#endif
