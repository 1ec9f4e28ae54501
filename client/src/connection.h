/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One socket to the daemon, shared by all threads of a client: requests out, replies matched to them by id, notices handled in
 * the order of the socket, before the reply that follows them.
 *
 * There is no receiving thread. Of the threads that wait, one receives for all (the receiver); when its own wait is over it
 * hands the role to another one. So a reply is taken in by whatever thread happens to wait, and the work that must keep the
 * order of the socket (mapping chunks, registering a model) runs there, in that order.
 *
 * Life of a call: new -> (window taken) -> sent -> done -> released. It lives on the heap because its caller may run out of time
 * first: a call released before its reply has come is abandoned. It then stays in the list until the late reply arrives, which
 * is matched by its id, harms nobody and is undone where it made something (`undo`): a sequence that nobody will ever hold is
 * closed again. A reply whose id nobody asked for is dropped with its descriptors.
 *
 * The window is one request's at a time: from the moment its tokens are written until its reply has come, because the daemon
 * reads and writes it in between whether the caller still waits or not. An abandoned call therefore keeps the window; the next
 * call that needs it waits, within its own deadline, for the late reply. Only the end of the connection frees it earlier.
 */
#ifndef OSCAR_CLIENT_CONNECTION_H
#define OSCAR_CLIENT_CONNECTION_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#include "proto/window.h"
#include "proto/wire.h"

struct oscar_connection;

#define OSCAR_CALL_FDS 2U

enum oscar_call_state { OSCAR_CALL_NEW, OSCAR_CALL_SENT, OSCAR_CALL_DONE };

struct oscar_call {
    struct oscar_request request; /* the caller's; the id is filled in when it is sent */

    /* Valid once it is done. */
    int error; /* 0, the daemon's answer, or why no answer can come any more; the text is reply.cause */
    struct oscar_reply reply;
    unsigned fds;
    int fd[OSCAR_CALL_FDS]; /* closed on release where they were not taken */
    uint32_t updates;
    struct oscar_page_update *update; /* [updates] unchecked, see oscar_call_updates(); freed on release */

    /* Runs when a successful reply arrives, in the order of the socket, in whatever thread receives; may be NULL. */
    void (*arrived)(struct oscar_call *call);
    /* What to do about a success that nobody keeps: turns `request` into the one that undoes it and says whether it is to be
     * sent. The caller sets it to NULL when the result must not be undone. May be NULL. */
    bool (*undo)(struct oscar_call *call);
    /* Frees `arg` when the call is freed: after the answer to the request that undoes it, where there is one. May be NULL. */
    void (*dispose)(struct oscar_call *call);
    void *arg; /* for all three */

    /* The connection's own. */
    struct oscar_connection *connection;
    struct oscar_call *next;
    _Atomic int state; /* enum oscar_call_state */
    bool window, abandoned;
};

/* Takes the socket in any case. */
int oscar_connection_new(int socket, struct oscar_connection **ret);
/* Closes the socket; calls still pending must have been released by their owners before. NULL is fine. */
void oscar_connection_free(struct oscar_connection *connection);
/* In a forked child: closes this process's descriptor and touches nothing else. */
void oscar_connection_close_fd(struct oscar_connection *connection);

/* The window of the HELLO reply, which outlives the connection. */
void oscar_connection_set_window(struct oscar_connection *connection, struct oscar_window_header *window);
/* Handles a notice, taking the record's descriptors; a failure ends the connection. Set before the first call. */
void oscar_connection_set_notice(struct oscar_connection *connection,
                                 int (*notice)(void *arg, const struct oscar_notice *notice,
                                               struct oscar_record *record, struct oscar_cause *cause),
                                 void *arg);

/* NULL when memory is out. */
struct oscar_call *oscar_call_new(struct oscar_connection *connection, enum oscar_verb verb);
/* Takes the window for `call` and copies `count` tokens into it. A deadline of 0 does not wait. Sets the thread's detail. */
int oscar_call_window(struct oscar_call *call, const uint32_t *tokens, uint32_t count, uint64_t deadline);
/* On failure the call has not been sent and never will be. A deadline of 0 does not wait. Sets the thread's detail. */
int oscar_call_send(struct oscar_call *call, uint64_t deadline);
/* Waits until it is done: its error. OSCAR_ERR_TIMEOUT with the call still under way when the time is over. Sets the detail. */
int oscar_call_wait(struct oscar_call *call, uint64_t deadline);
/* Both: for a call that is released afterwards in any case. */
int oscar_call_run(struct oscar_call *call, uint64_t deadline);
static inline bool oscar_call_done(const struct oscar_call *call) {
    return atomic_load_explicit(&call->state, memory_order_acquire) == OSCAR_CALL_DONE;
}
/* Sees to it that the updates of a call that is done are in `update`. They are copied out of the window when the reply comes;
 * where memory is out, they stay there, with the window, until this call succeeds: OSCAR_ERR_NO_MEMORY. Sets the detail. */
int oscar_call_updates(struct oscar_call *call);
/* Frees the updates of a call that is kept. */
static inline void oscar_call_drop_updates(struct oscar_call *call) {
    free(call->update);
    call->update = NULL;
    call->updates = 0;
}
/* In any state; see above. NULL is fine. */
void oscar_call_release(struct oscar_call *call);
/* Releases a call that is done, waiting until the deadline for the request that undoes it to be answered. Leaves the thread's
 * detail as it is. */
void oscar_call_undo(struct oscar_call *call, uint64_t deadline);
static inline void oscar_cleanup_call(struct oscar_call **call) { oscar_call_release(*call); }
#define _cleanup_call_ __attribute__((cleanup(oscar_cleanup_call)))

/* Takes in what has arrived, without waiting, unless another thread is doing so already. */
void oscar_connection_poll(struct oscar_connection *connection);

#endif
