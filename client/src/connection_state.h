/* SPDX-License-Identifier: Apache-2.0 */
/* The inside of a connection: connection.c waits and receives, call.c sends. Nobody else includes this. */
#ifndef OSCAR_CLIENT_CONNECTION_STATE_H
#define OSCAR_CLIENT_CONNECTION_STATE_H

#include <pthread.h>

#include "client/src/connection.h"

struct oscar_connection {
    int socket;
    struct oscar_window_header *window;
    int (*notice)(void *arg, const struct oscar_notice *notice, struct oscar_record *record, struct oscar_cause *cause);
    void *notice_arg;

    pthread_mutex_t lock; /* guards what follows */
    pthread_condattr_t clock;
    struct waiter *waiters;
    struct oscar_call *sent;   /* their replies have not come */
    struct oscar_call *unsent; /* undoing requests that did not fit the socket */
    uint64_t last_id;
    bool receiving; /* some thread is the receiver */
    bool window_taken;
    int error; /* once negative, the connection is over */
    struct oscar_cause cause;

    /* The receiver's. */
    uint8_t record[OSCAR_MAX_RECORD_BYTES];
    _Alignas(struct cmsghdr) uint8_t control[OSCAR_RECORD_CONTROL_BYTES];
};

struct waiter; /* a thread that waits */

/* --- with the lock --- */

/* Wakes those whose wait is over. */
void oscar_connection_wake(struct oscar_connection *connection);
/* Receives, or waits for the thread that does, until ready(arg) holds; gives the lock up in between. 0, OSCAR_ERR_TIMEOUT, or the
 * connection's error. */
int oscar_connection_wait(struct oscar_connection *connection, bool (*ready)(const void *arg), const void *arg,
                          uint64_t deadline);
/* Takes a call out of the list of those that were sent. False when it is not there; then it is not looked into. */
bool oscar_call_unlink(struct oscar_connection *connection, const struct oscar_call *call);
/* Gives up the window where the call has it. */
void oscar_call_give_window(struct oscar_call *call);

/* --- without it --- */

/* Copies the updates of a reply out of the window, where that has not been done. False when memory is out. */
bool oscar_call_copy_updates(struct oscar_call *call);
/* Ends the connection: every call under way and every later one gets `error`. */
void oscar_connection_lose(struct oscar_connection *connection, int error, const struct oscar_cause *cause);
/* Gives up what came with the reply; and frees the call as well. */
void oscar_call_drop_reply(struct oscar_call *call);
void oscar_call_free(struct oscar_call *call);

#endif
