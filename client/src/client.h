/* SPDX-License-Identifier: Apache-2.0 */
/* The client: the connection, and the models that were opened through it. */
#ifndef OSCAR_CLIENT_CLIENT_H
#define OSCAR_CLIENT_CLIENT_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "oscar/oscar.h"

#include "client/src/attachment.h"
#include "client/src/connection.h"
#include "client/src/mapping.h"

#define OSCAR_DEFAULT_TIMEOUT_MS 5000U

struct oscar_client {
    pid_t pid; /* of the process that opened it: a forked child must not use it */
    _Atomic uint32_t timeout_ms;
    struct oscar_client_info info;
    struct oscar_connection *connection;
    struct oscar_attachment *attachment;
    struct oscar_window_header *window; /* OSCAR_WINDOW_BYTES, shared with the daemon */
    struct oscar_mappings mappings;
    pthread_mutex_t lock; /* guards the list of models and those of their sequences and leases */
    struct oscar_model *models;
};

/* Every public call begins with it: OSCAR_ERR_INVALID for NULL, OSCAR_ERR_STATE in a forked child. */
int oscar_client_check(const struct oscar_client *client);

/* When a call that begins now must have ended. */
uint64_t oscar_client_deadline(const struct oscar_client *client);

static inline uint64_t oscar_client_updates_waiting(const struct oscar_client *client) {
    return atomic_load_explicit(&client->window->updates_waiting, memory_order_acquire);
}

/* Connects to a worker socket within the deadline. Sets the thread's detail. */
int oscar_socket_connect(const char *path, uint64_t deadline, int *ret_socket);

/*
 * Grows the process's table of descriptors by what one record can bring. The kernel would do so when they come, in the middle of opening a
 * model, and with threads in the process it waits for an RCU grace period then, 10 ms and more.
 */
void oscar_descriptors_make_room(void);

/* HELLO and what comes of it: fills in info, attachment and window of a client that has its connection. */
int oscar_handshake(struct oscar_client *client, const char *name, const char *group, uint64_t deadline);

/* Maps `bytes` bytes of a descriptor that the daemon sent; it must be of at least that size and sealed against shrinking. */
int oscar_map_descriptor(int fd, uint64_t bytes, int protection, const char *what, void **ret);

#endif
