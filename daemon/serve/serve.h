/* SPDX-License-Identifier: Apache-2.0 */
/* Serving: connections, their requests, administration and events, on one loop around one store. */
#ifndef OSCAR_DAEMON_SERVE_H
#define OSCAR_DAEMON_SERVE_H

#include "oscar/device.h"

#include "daemon/config.h"
#include "daemon/loop.h"
#include "proto/cause.h"

struct serve;

/* All outlive the server. Signals are blocked by the caller: threads are started here. */
struct serve_options {
    struct loop *loop;
    const struct config *config;
    const struct oscar_device_ops *ops;
    struct oscar_device *device;
    uint64_t budget_bytes, device_bytes; /* of device memory that the cache may take, and that there is */
};

/* How many descriptors the process may come to hold: those of clients and chunks, and its own. */
uint64_t serve_descriptors(const struct serve_options *options);
/* Takes the sockets' paths, makes the store and begins to listen. OSCAR_ERR_BUSY: another daemon serves them;
 * OSCAR_ERR_IO: the sockets cannot be made. */
int serve_new(const struct serve_options *options, struct serve **ret, struct oscar_cause *cause);
/* Accepts nothing more, lets replies out that are on their way, and stops the loop when they are. */
void serve_drain(struct serve *serve);
/* The device failed, or has not returned from a call: that is why the loop has ended. */
bool serve_has_failed(const struct serve *serve);
/* Gives the sockets' paths back and nothing else: threads may never return from the device, and what they hold stays theirs. The process
 * is to end by _exit. */
void serve_abandon(struct serve *serve);
void serve_free(struct serve *serve); /* NULL is fine; before the loop is freed */

#endif
