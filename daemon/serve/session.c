/* SPDX-License-Identifier: Apache-2.0 */
/* A connection's life: accepted, greeted, ended, and its process's exit. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/serve/state.h"
#include "proto/cleanup.h"

/*
 * A connection takes a place under [limits] clients by its HELLO. All connections together are that many and these more; at
 * that bound a new one takes the room of the one that has been silent longest. These are several times what the listener
 * accepts in a turn of the loop: who has said HELLO is heard before it would be their turn.
 */
#define MORE_CONNECTIONS 64U

static void session_free(struct session *session) {
    struct serve *serve = session->serve;
    *session->link_to = session->next;
    if (session->next != NULL)
        session->next->link_to = session->link_to;
    loop_remove(serve->loop, session->exit_watch);
    if (session->peer.pidfd >= 0)
        close(session->peer.pidfd);
    window_free(&session->window);
    free(session);
}

/* Nothing of the client can read or write pages any more. The session goes when the store has let go of it, too. */
static void process_over(struct session *session) {
    loop_remove(session->serve->loop, session->exit_watch);
    session->exit_watch = NULL;
    if (session->client != NULL)
        store_client_exited(session->serve->store, session->client);
    else
        session_free(session);
}

void session_over(void *arg, void *client_arg) {
    (void)arg;
    session_free(client_arg);
}

unsigned session_quarantined(const struct session *session) {
    unsigned count = 0;
    for (const struct session *other = session->serve->sessions; other != NULL; other = other->next)
        count += other->link == NULL && other->peer.pid == session->peer.pid &&
                 other->peer.pidfd_inode == session->peer.pidfd_inode;
    return count;
}

static void silent_remove(struct session *session) {
    TAILQ_REMOVE(&session->serve->silent, session, in_silent);
    session->serve->silent_count--;
}

static void end_connection(struct session *session, const char *why, bool flush) {
    struct serve *serve = session->serve;
    if (session->state == SESSION_NEW)
        silent_remove(session);
    else
        serve->clients--;
    uint64_t suppressed;
    if (session->client != NULL && log_limit_pass(&serve->departures, loop_now_ns(serve->loop), &suppressed))
        log_info("client gone", log_number("session", (int64_t)session->id), log_number("pid", session->peer.pid),
                 log_text("why", why), log_suppressed(suppressed));
    loop_link_close(session->link, flush);
    session->link = NULL;
    models_forget(session);
    announce_forget(session);
    window_close_fds(&session->window);
    if (session->client != NULL)
        store_client_gone(serve->store, session->client);
}

void session_end(struct session *session, const char *why, bool flush) {
    end_connection(session, why, flush);
    /* A process that lives may still read and write pages through its mappings, if it has opened a model. */
    if (session->exit_watch == NULL || !session->has_opened_model)
        process_over(session);
}

static void process_exit_seen(void *arg) {
    struct session *session = arg;
    /* A forked child may keep the socket open: it is not the client. */
    if (session->link != NULL)
        end_connection(session, "its process has exited", false);
    process_over(session);
}

void session_reply(struct session *session, const struct oscar_reply *reply, const int *fd, unsigned fds) {
    struct serve *serve = session->serve;
    if (session->link == NULL)
        return;
    size_t bytes;
    int r = oscar_reply_encode(reply, serve->payload, sizeof(serve->payload), &bytes);
    if (r < 0) {
        log_error("reply cannot be encoded", log_text("verb", oscar_verb_name(reply->verb)),
                  log_text("error", oscar_error_name(r)));
        return;
    }
    if (reply->error < 0)
        serve->counters.request_errors++;
    r = loop_link_send(session->link, OSCAR_RECORD_REPLY, serve->payload, (uint32_t)bytes, fd, fds);
    if (r == OSCAR_ERR_LIMIT)
        serve->counters.queue_overflows++; /* the loop reports the loss */
}

void session_reply_error(struct session *session, uint64_t request_id, enum oscar_verb verb, int error,
                         const char *text) {
    struct oscar_reply reply = {.id = request_id, .verb = verb, .error = error};
    memcpy(reply.cause, text, strnlen(text, sizeof(reply.cause) - 1));
    session_reply(session, &reply, NULL, 0);
}

static void log_violation(struct session *session, const struct oscar_cause *cause) {
    struct serve *serve = session->serve;
    uint64_t suppressed;
    serve->counters.protocol_errors++;
    if (log_limit_pass(&serve->violations, loop_now_ns(serve->loop), &suppressed))
        log_warning("client broke the protocol", log_number("session", (int64_t)session->id),
                    log_number("pid", session->peer.pid), log_number("uid", session->peer.uid),
                    log_text("cause", cause->text), log_suppressed(suppressed));
}

void session_violation(struct session *session, const struct oscar_request *request, int error,
                       const struct oscar_cause *cause) {
    log_violation(session, cause);
    if (request != NULL)
        session_reply_error(session, request->id, request->verb, error, cause->text);
    session_end(session, "it broke the protocol", true);
}

static void link_record(void *arg, const struct oscar_record *record) {
    struct session *session = arg;
    struct oscar_request request = {0};
    struct oscar_cause cause = {0};
    int r =
        record->kind == OSCAR_RECORD_REQUEST
            ? oscar_request_decode(record->payload, record->payload_bytes, &request, &cause)
            : oscar_fail(&cause, OSCAR_ERR_PROTOCOL, "a record of kind %d: clients send requests", (int)record->kind);
    if (r == 0 && request.id == 0)
        r = oscar_fail(&cause, OSCAR_ERR_PROTOCOL, "a request without an id");
    if (r < 0)
        session_violation(session, NULL, r, &cause);
    else
        verbs_handle(session, &request);
}

static void link_garbage(void *arg, const struct oscar_cause *cause) { log_violation(arg, cause); }

static void link_gone(void *arg, const char *why) { session_end(arg, why, true); }

static const struct loop_link_handlers link_handlers = {
    .record = link_record,
    .garbage = link_garbage,
    .gone = link_gone,
};

static void log_refusal(struct serve *serve, const struct peer *peer, const char *what) {
    uint64_t suppressed;
    if (log_limit_pass(&serve->refusals, loop_now_ns(serve->loop), &suppressed))
        log_warning("client refused", log_number("pid", peer->pid), log_number("uid", peer->uid),
                    log_text("cause", what), log_suppressed(suppressed));
}

static int session_new(struct serve *serve, int socket, const struct peer *peer, struct session **ret) {
    _cleanup_close_ int fd = socket;
    _cleanup_free_ struct session *session = calloc(1, sizeof(*session));
    if (session == NULL)
        return OSCAR_ERR_NO_MEMORY;
    session->serve = serve;
    session->peer = *peer;
    session->window = WINDOW_NONE;
    if (peer->pidfd >= 0) {
        int r = loop_watch(serve->loop, peer->pidfd, process_exit_seen, session, &session->exit_watch);
        if (r < 0)
            return r;
    }
    int r = loop_link_open(serve->loop, TAKE_FD(fd), &link_handlers, session, &session->link);
    if (r < 0) {
        loop_remove(serve->loop, session->exit_watch);
        return r;
    }
    session->next = serve->sessions;
    if (serve->sessions != NULL)
        serve->sessions->link_to = &session->next;
    serve->sessions = session;
    session->link_to = &serve->sessions;
    *ret = TAKE_PTR(session);
    return 0;
}

int session_take_place(struct session *session, struct oscar_cause *cause) {
    struct serve *serve = session->serve;
    if (serve->clients >= serve->config->clients) {
        serve->counters.refused_clients++;
        log_refusal(serve, &session->peer, "[limits] clients is reached");
        return oscar_fail(cause, OSCAR_ERR_LIMIT,
                          "the daemon has as many clients as [limits] clients allows (%llu): close some, or raise it",
                          (unsigned long long)serve->config->clients);
    }
    silent_remove(session);
    session->state = SESSION_READY;
    serve->clients++;
    return 0;
}

/* There is one where the bound is reached: the others have places, which are fewer. */
static void drop_silent(struct serve *serve) {
    struct session *session = TAILQ_FIRST(&serve->silent);
    serve->counters.dropped_silent++;
    log_refusal(serve, &session->peer, "it was silent, and others connect");
    session_end(session, "it was silent", false);
}

int session_accept(struct serve *serve, int socket) {
    _cleanup_close_ int fd = socket;
    struct peer peer;
    serve->counters.connections++;
    if (peer_read(fd, &peer) < 0)
        return -errno;
    if (serve->clients + serve->silent_count >= serve->config->clients + MORE_CONNECTIONS)
        drop_silent(serve);
    struct session *session = NULL;
    int r = session_new(serve, TAKE_FD(fd), &peer, &session);
    if (r < 0) {
        log_refusal(serve, &peer, oscar_error_text(r));
        if (peer.pidfd >= 0)
            close(peer.pidfd);
        return 0;
    }
    session->id = ++serve->last_session;
    session->state = SESSION_NEW;
    TAILQ_INSERT_TAIL(&serve->silent, session, in_silent);
    serve->silent_count++;
    config_tenant_of(serve->config, peer.uid, session->tenant);
    return 0;
}

void session_end_all(struct serve *serve) {
    for (struct session *session = serve->sessions, *next; session != NULL; session = next) {
        next = session->next;
        process_exit_seen(session);
    }
}
