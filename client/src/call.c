/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "client/src/connection_state.h"
#include "client/src/detail.h"
#include "proto/cleanup.h"

#define MAX_REQUEST_BYTES 4096U

void oscar_call_drop_reply(struct oscar_call *call) {
    for (; call->fds > 0; call->fds--)
        oscar_cleanup_close(&call->fd[call->fds - 1]);
    oscar_call_drop_updates(call);
}

void oscar_call_free(struct oscar_call *call) {
    if (call->dispose != NULL)
        call->dispose(call);
    oscar_call_drop_reply(call);
    free(call);
}

int oscar_call_updates(struct oscar_call *call) {
    if (!oscar_call_copy_updates(call))
        return oscar_fail(oscar_detail(), OSCAR_ERR_NO_MEMORY, "no memory for %" PRIu32 " page table updates",
                          call->updates);
    pthread_mutex_lock(&call->connection->lock);
    if (call->window) {
        oscar_call_give_window(call);
        oscar_connection_wake(call->connection);
    }
    pthread_mutex_unlock(&call->connection->lock);
    return 0;
}

struct oscar_call *oscar_call_new(struct oscar_connection *connection, enum oscar_verb verb) {
    struct oscar_call *call = calloc(1, sizeof(*call));
    if (call == NULL) {
        (void)oscar_fail(oscar_detail(), OSCAR_ERR_NO_MEMORY, "no memory for a request");
        return NULL;
    }
    call->connection = connection;
    call->request.verb = verb;
    return call;
}

static int timed_out(const struct oscar_call *call, const char *what) {
    return oscar_fail(oscar_detail(), OSCAR_ERR_TIMEOUT, "%s: %s in time", oscar_verb_name(call->request.verb), what);
}

static bool window_is_free(const void *arg) { return !((const struct oscar_connection *)arg)->window_taken; }

int oscar_call_window(struct oscar_call *call, const uint32_t *tokens, uint32_t count, uint64_t deadline) {
    struct oscar_connection *connection = call->connection;
    pthread_mutex_lock(&connection->lock);
    int r = oscar_connection_wait(connection, window_is_free, connection, deadline);
    if (r == 0)
        connection->window_taken = call->window = true;
    else if (r != OSCAR_ERR_TIMEOUT)
        *oscar_detail() = connection->cause;
    pthread_mutex_unlock(&connection->lock);
    if (r == OSCAR_ERR_TIMEOUT)
        return timed_out(call, "an earlier request did not leave the window");
    if (r == 0 && count > 0)
        memcpy((char *)connection->window + OSCAR_WINDOW_TOKENS_OFFSET, tokens, (size_t)count * sizeof(*tokens));
    return r;
}

/* Sends without touching the call afterwards: its reply may be there at once. */
static int transmit(struct oscar_call *call, bool abandoned, uint64_t deadline, struct oscar_cause *cause) {
    struct oscar_connection *connection = call->connection;
    uint8_t payload[MAX_REQUEST_BYTES];
    size_t bytes;
    pthread_mutex_lock(&connection->lock);
    int r = connection->error;
    if (r < 0) {
        *cause = connection->cause;
    } else {
        call->request.id = ++connection->last_id;
        r = oscar_request_encode(&call->request, payload, sizeof(payload), &bytes);
        if (r < 0)
            (void)oscar_fail(cause, r, "%s cannot be encoded: is a text not UTF-8?",
                             oscar_verb_name(call->request.verb));
    }
    if (r == 0) {
        call->abandoned = abandoned;
        call->next = connection->sent;
        connection->sent = call;
        atomic_store_explicit(&call->state, OSCAR_CALL_SENT, memory_order_relaxed);
    }
    pthread_mutex_unlock(&connection->lock);
    if (r < 0)
        return r;

    uint64_t now = oscar_clock_ns();
    uint64_t left_ms = deadline > now ? (deadline - now + OSCAR_NS_PER_MS - 1) / OSCAR_NS_PER_MS : 0;
    r = oscar_record_send(connection->socket, OSCAR_RECORD_REQUEST, payload, (uint32_t)bytes, NULL, 0,
                          left_ms > INT_MAX ? INT_MAX : (int)left_ms, cause);
    if (r == 0)
        return 0;
    /* No reply can have taken it out of the list, but the end of the connection can: then an abandoned one is freed already. */
    pthread_mutex_lock(&connection->lock);
    bool listed = oscar_call_unlink(connection, call);
    if (listed) {
        atomic_store_explicit(&call->state, OSCAR_CALL_NEW, memory_order_relaxed);
        call->abandoned = false;
        oscar_call_give_window(call);
        oscar_connection_wake(connection);
    }
    pthread_mutex_unlock(&connection->lock);
    if (!listed && abandoned)
        return 0;
    if (r != OSCAR_ERR_TIMEOUT)
        oscar_connection_lose(connection, r, cause);
    return r;
}

/* Undoing requests go out as soon as the socket takes them; nobody waits for their replies. */
static void send_unsent(struct oscar_connection *connection) {
    for (;;) {
        pthread_mutex_lock(&connection->lock);
        struct oscar_call *call = connection->unsent;
        if (call != NULL)
            connection->unsent = call->next;
        pthread_mutex_unlock(&connection->lock);
        if (call == NULL)
            return;
        int r = transmit(call, true, 0, &(struct oscar_cause){0});
        if (r == OSCAR_ERR_TIMEOUT) {
            pthread_mutex_lock(&connection->lock);
            call->next = connection->unsent;
            connection->unsent = call;
            pthread_mutex_unlock(&connection->lock);
            return;
        }
        if (r < 0)
            oscar_call_free(call);
    }
}

int oscar_call_send(struct oscar_call *call, uint64_t deadline) {
    send_unsent(call->connection);
    int r = transmit(call, false, deadline, oscar_detail());
    if (r == OSCAR_ERR_TIMEOUT)
        return timed_out(call, "the daemon did not take the request");
    return r;
}

static bool call_is_done(const void *arg) { return oscar_call_done(arg); }

int oscar_call_wait(struct oscar_call *call, uint64_t deadline) {
    struct oscar_connection *connection = call->connection;
    pthread_mutex_lock(&connection->lock);
    int r = oscar_connection_wait(connection, call_is_done, call, deadline);
    pthread_mutex_unlock(&connection->lock);
    if (r < 0)
        return timed_out(call, "no answer");
    if (call->error < 0)
        return oscar_fail(oscar_detail(), call->error, "%s: %s", oscar_verb_name(call->request.verb),
                          call->reply.cause[0] != '\0' ? call->reply.cause : oscar_error_text(call->error));
    return 0;
}

int oscar_call_run(struct oscar_call *call, uint64_t deadline) {
    int r = oscar_call_send(call, deadline);
    return r < 0 ? r : oscar_call_wait(call, deadline);
}

/* Turns a success into the request that undoes it; false when there is nothing to undo. */
static bool becomes_undo(struct oscar_call *call) {
    if (call->error < 0 || call->undo == NULL || !call->undo(call))
        return false;
    oscar_call_drop_reply(call);
    call->arrived = NULL;
    call->undo = NULL;
    atomic_store_explicit(&call->state, OSCAR_CALL_NEW, memory_order_relaxed);
    return true;
}

void oscar_call_release(struct oscar_call *call) {
    if (call == NULL)
        return;
    struct oscar_connection *connection = call->connection;
    pthread_mutex_lock(&connection->lock);
    int state = atomic_load_explicit(&call->state, memory_order_relaxed);
    if (state == OSCAR_CALL_SENT) {
        call->abandoned = true;
        pthread_mutex_unlock(&connection->lock);
        return;
    }
    oscar_call_give_window(call);
    oscar_connection_wake(connection);
    pthread_mutex_unlock(&connection->lock);

    if (state != OSCAR_CALL_DONE || !becomes_undo(call)) {
        oscar_call_free(call);
        return;
    }
    pthread_mutex_lock(&connection->lock);
    call->next = connection->unsent;
    connection->unsent = call;
    pthread_mutex_unlock(&connection->lock);
    send_unsent(connection);
}

void oscar_call_undo(struct oscar_call *call, uint64_t deadline) {
    struct oscar_connection *connection = call->connection;
    if (!becomes_undo(call)) {
        oscar_call_free(call);
        return;
    }
    send_unsent(connection);
    int r = transmit(call, false, deadline, &(struct oscar_cause){0});
    pthread_mutex_lock(&connection->lock);
    if (r == 0) {
        (void)oscar_connection_wait(connection, call_is_done, call, deadline);
    } else if (r == OSCAR_ERR_TIMEOUT) {
        call->next = connection->unsent;
        connection->unsent = call;
        call = NULL;
    }
    pthread_mutex_unlock(&connection->lock);
    oscar_call_release(call);
}
