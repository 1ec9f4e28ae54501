/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/src/connection_state.h"
#include "client/src/detail.h"
#include "proto/cleanup.h"

/* A thread that waits for something that the receiver may bring about. */
struct waiter {
    bool (*ready)(const void *arg);
    const void *arg;
    pthread_cond_t woken;
    struct waiter *next;
};

/* What a successful reply of a verb may bring along besides its body. */
static const struct {
    unsigned fds;
    size_t updates; /* where in struct oscar_reply their number stands; 0: none */
} traits[OSCAR_VERBS] = {
    [OSCAR_HELLO] = {.fds = 2},
    [OSCAR_MODEL_OPEN] = {.fds = 2},
    [OSCAR_SEQ_OPEN] = {.updates = offsetof(struct oscar_reply, seq_open.updates)},
    [OSCAR_SEQ_EXTEND] = {.updates = offsetof(struct oscar_reply, seq_extend.updates)},
    [OSCAR_SEQ_RESERVE] = {.updates = offsetof(struct oscar_reply, seq_reserve.updates)},
    [OSCAR_SEQ_ADVANCE] = {.updates = offsetof(struct oscar_reply, seq_advance.updates)},
    [OSCAR_SEQ_FORK] = {.updates = offsetof(struct oscar_reply, seq_fork.updates)},
};

int oscar_connection_new(int socket, struct oscar_connection **ret) {
    struct oscar_connection *connection = malloc(sizeof(*connection));
    if (connection == NULL) {
        (void)close(socket);
        return oscar_fail(oscar_detail(), OSCAR_ERR_NO_MEMORY, "no memory for a connection");
    }
    memset(connection, 0, offsetof(struct oscar_connection, record));
    connection->socket = socket;
    pthread_mutex_init(&connection->lock, NULL);
    pthread_condattr_init(&connection->clock);
    pthread_condattr_setclock(&connection->clock, CLOCK_MONOTONIC);
    *ret = connection;
    return 0;
}

static void calls_free(struct oscar_call *call) {
    while (call != NULL) {
        struct oscar_call *next = call->next;
        oscar_call_free(call);
        call = next;
    }
}

void oscar_connection_free(struct oscar_connection *connection) {
    if (connection == NULL)
        return;
    calls_free(connection->sent);
    calls_free(connection->unsent);
    (void)close(connection->socket);
    pthread_condattr_destroy(&connection->clock);
    pthread_mutex_destroy(&connection->lock);
    free(connection);
}

void oscar_connection_close_fd(struct oscar_connection *connection) {
    if (connection->socket >= 0)
        (void)close(connection->socket);
    connection->socket = -1;
}

void oscar_connection_set_window(struct oscar_connection *connection, struct oscar_window_header *window) {
    connection->window = window;
}

void oscar_connection_set_notice(struct oscar_connection *connection,
                                 int (*notice)(void *arg, const struct oscar_notice *notice,
                                               struct oscar_record *record, struct oscar_cause *cause),
                                 void *arg) {
    connection->notice = notice;
    connection->notice_arg = arg;
}

/* --- waiting ------------------------------------------------------------------------------------------------------ */

/* Wakes those whose wait is over. With the lock. */
void oscar_connection_wake(struct oscar_connection *connection) {
    for (struct waiter *waiter = connection->waiters; waiter != NULL; waiter = waiter->next)
        if (connection->error < 0 || waiter->ready(waiter->arg))
            pthread_cond_signal(&waiter->woken);
}

/* Wakes one to be the next receiver, where there is none. With the lock. */
static void hand_on(struct oscar_connection *connection) {
    if (!connection->receiving && connection->waiters != NULL)
        pthread_cond_signal(&connection->waiters->woken);
}

static void wait_for_receiver(struct oscar_connection *connection, struct waiter *self, uint64_t deadline) {
    struct timespec until = {.tv_sec = (time_t)(deadline / 1000000000U), .tv_nsec = (long)(deadline % 1000000000U)};
    pthread_cond_init(&self->woken, &connection->clock);
    self->next = connection->waiters;
    connection->waiters = self;
    (void)pthread_cond_timedwait(&self->woken, &connection->lock, &until);
    struct waiter **link = &connection->waiters;
    while (*link != self)
        link = &(*link)->next;
    *link = self->next;
    pthread_cond_destroy(&self->woken);
}

static bool receive(struct oscar_connection *connection, uint64_t deadline);

/* With the lock, which is given up in between. 0, OSCAR_ERR_TIMEOUT, or the connection's error. */
int oscar_connection_wait(struct oscar_connection *connection, bool (*ready)(const void *arg), const void *arg,
                          uint64_t deadline) {
    struct waiter self = {.ready = ready, .arg = arg};
    int r;
    for (;;) {
        if (ready(arg)) {
            r = 0;
            break;
        }
        if (connection->error < 0) {
            r = connection->error;
            break;
        }
        if (oscar_clock_ns() >= deadline) {
            r = OSCAR_ERR_TIMEOUT;
            break;
        }
        if (connection->receiving) {
            wait_for_receiver(connection, &self, deadline);
            continue;
        }
        connection->receiving = true;
        pthread_mutex_unlock(&connection->lock);
        (void)receive(connection, deadline);
        pthread_mutex_lock(&connection->lock);
        connection->receiving = false;
    }
    hand_on(connection);
    return r;
}

/* Ends the connection: every call under way and every later one gets `error`. */
void oscar_connection_lose(struct oscar_connection *connection, int error, const struct oscar_cause *cause) {
    struct oscar_call *abandoned = NULL;
    pthread_mutex_lock(&connection->lock);
    if (connection->error == 0) {
        connection->cause = *cause;
        connection->error = error;
        (void)shutdown(connection->socket, SHUT_RDWR);
    }
    while (connection->sent != NULL) {
        struct oscar_call *call = connection->sent;
        connection->sent = call->next;
        call->error = connection->error;
        memcpy(call->reply.cause, connection->cause.text, sizeof(call->reply.cause));
        if (call->abandoned) {
            call->next = abandoned;
            abandoned = call;
        } else {
            atomic_store_explicit(&call->state, OSCAR_CALL_DONE, memory_order_release);
        }
    }
    oscar_connection_wake(connection);
    pthread_mutex_unlock(&connection->lock);
    calls_free(abandoned);
}

/* --- receiving ---------------------------------------------------------------------------------------------------- */

static struct oscar_call *find_sent(struct oscar_connection *connection, uint64_t id) {
    pthread_mutex_lock(&connection->lock);
    struct oscar_call *call = connection->sent;
    while (call != NULL && call->request.id != id)
        call = call->next;
    pthread_mutex_unlock(&connection->lock);
    return call;
}

/* With the lock. False when it is not in the list; then it is not looked into. */
bool oscar_call_unlink(struct oscar_connection *connection, const struct oscar_call *call) {
    struct oscar_call **link = &connection->sent;
    while (*link != NULL && *link != call)
        link = &(*link)->next;
    if (*link == NULL)
        return false;
    *link = call->next;
    return true;
}

/* With the lock. */
void oscar_call_give_window(struct oscar_call *call) {
    if (call->window)
        call->connection->window_taken = false;
    call->window = false;
}

static int count_updates(const struct oscar_call *call, uint32_t *ret, struct oscar_cause *cause) {
    size_t where = traits[call->request.verb].updates;
    uint32_t updates = 0;
    if (where != 0)
        memcpy(&updates, (const char *)&call->reply + where, sizeof(updates));
    if (updates > 0 && (!call->window || updates > OSCAR_MAX_UPDATES))
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "%s: %" PRIu32 " updates in a window of %u",
                          oscar_verb_name(call->request.verb), updates, OSCAR_MAX_UPDATES);
    *ret = updates;
    return 0;
}

/* Out of the window, so that the next request can have it. False when memory is out. */
bool oscar_call_copy_updates(struct oscar_call *call) {
    if (call->updates == 0 || call->update != NULL)
        return true;
    call->update = malloc(call->updates * sizeof(*call->update));
    if (call->update == NULL)
        return false;
    memcpy(call->update, (const char *)call->connection->window + OSCAR_WINDOW_UPDATES_OFFSET,
           call->updates * sizeof(*call->update));
    return true;
}

/* The call cannot vanish meanwhile: it is in the list, and only this thread takes it out. */
static int take_reply(struct oscar_connection *connection, struct oscar_record *record, struct oscar_cause *cause) {
    struct oscar_reply reply;
    int r = oscar_reply_decode(record->payload, record->payload_bytes, &reply, cause);
    if (r < 0)
        return r;
    struct oscar_call *call = find_sent(connection, reply.id);
    if (call == NULL)
        return 0;
    if (reply.verb != call->request.verb)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "reply %" PRIu64 " is of %s, asked for was %s", reply.id,
                          oscar_verb_name(reply.verb), oscar_verb_name(call->request.verb));
    if (record->fds > (reply.error == 0 ? traits[reply.verb].fds : 0U))
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "%s: %u descriptors with the reply", oscar_verb_name(reply.verb),
                          record->fds);
    if (reply.error > 0)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "%s: error %d in the reply", oscar_verb_name(reply.verb),
                          reply.error);

    call->reply = reply;
    call->error = reply.error;
    for (; call->fds < record->fds; call->fds++)
        call->fd[call->fds] = TAKE_FD(record->fd[call->fds]);
    record->fds = 0;
    if (call->error == 0 && (r = count_updates(call, &call->updates, cause)) < 0)
        return r;
    bool copied = oscar_call_copy_updates(call);
    if (call->error == 0 && call->arrived != NULL)
        call->arrived(call);

    pthread_mutex_lock(&connection->lock);
    (void)oscar_call_unlink(connection, call);
    if (copied)
        oscar_call_give_window(call);
    bool abandoned = call->abandoned;
    call->abandoned = false;
    atomic_store_explicit(&call->state, OSCAR_CALL_DONE, memory_order_release);
    oscar_connection_wake(connection);
    pthread_mutex_unlock(&connection->lock);
    if (abandoned)
        oscar_call_release(call);
    return 0;
}

static int take_notice(struct oscar_connection *connection, struct oscar_record *record, struct oscar_cause *cause) {
    struct oscar_notice notice;
    int r = oscar_notice_decode(record->payload, record->payload_bytes, &notice, cause);
    if (r < 0)
        return r;
    if (connection->notice == NULL)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "a notice before the handshake");
    return connection->notice(connection->notice_arg, &notice, record, cause);
}

static int take_record(struct oscar_connection *connection, struct oscar_record *record, struct oscar_cause *cause) {
    switch (record->kind) {
    case OSCAR_RECORD_REPLY:
        return take_reply(connection, record, cause);
    case OSCAR_RECORD_NOTICE:
        return take_notice(connection, record, cause);
    default:
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "a record of kind %d from the daemon", (int)record->kind);
    }
}

static bool readable(int socket, uint64_t deadline) {
    uint64_t now = oscar_clock_ns(), left = deadline > now ? deadline - now : 0;
    struct timespec timeout = {.tv_sec = (time_t)(left / 1000000000U), .tv_nsec = (long)(left % 1000000000U)};
    struct pollfd entry = {.fd = socket, .events = POLLIN};
    return ppoll(&entry, 1, &timeout, NULL) > 0;
}

/* Takes in one record, or waits for one until the deadline: whether there was one. By the receiver, without the lock. */
static bool receive(struct oscar_connection *connection, uint64_t deadline) {
    if (!readable(connection->socket, deadline))
        return false;
    struct iovec iov = {.iov_base = connection->record, .iov_len = sizeof(connection->record)};
    struct msghdr message = {.msg_iov = &iov,
                             .msg_iovlen = 1,
                             .msg_control = connection->control,
                             .msg_controllen = sizeof(connection->control)};
    ssize_t length = recvmsg(connection->socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (length < 0 && (errno == EAGAIN || errno == EINTR))
        return false;
    struct oscar_cause cause = {0};
    if (length < 0) {
        oscar_connection_lose(connection, oscar_fail(&cause, OSCAR_ERR_DISCONNECTED, "receiving from the daemon: %m"),
                              &cause);
        return false;
    }
    struct oscar_record record = {0};
    int r = oscar_record_parse(&message, (size_t)length, &record, &cause);
    if (r == 0) {
        r = take_record(connection, &record, &cause);
        oscar_record_close_fds(&record);
    }
    if (length == 0) /* whatever the parser says about it: this is how the end looks */
        r = oscar_fail(&cause, OSCAR_ERR_DISCONNECTED, "the daemon has closed the connection");
    if (r < 0)
        oscar_connection_lose(connection, r, &cause);
    return r == 0;
}

void oscar_connection_poll(struct oscar_connection *connection) {
    pthread_mutex_lock(&connection->lock);
    bool mine = !connection->receiving && connection->error == 0;
    if (mine) {
        connection->receiving = true;
        pthread_mutex_unlock(&connection->lock);
        while (receive(connection, 0)) {
        }
        pthread_mutex_lock(&connection->lock);
        connection->receiving = false;
        hand_on(connection);
    }
    pthread_mutex_unlock(&connection->lock);
}
