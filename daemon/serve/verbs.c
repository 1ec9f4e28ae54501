/* SPDX-License-Identifier: Apache-2.0 */
/* Requests: which are allowed when, and who answers them. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "daemon/serve/state.h"
#include "proto/version.h"

/* Fills in the reply's body: 0, OSCAR_PARKED (answered later), or an error. Descriptors that go with it: at most 2, not
 * taken. */
struct answer {
    struct oscar_reply reply;
    int fd[2];
    unsigned fds;
    bool ends; /* the connection, after this reply */
};
typedef int verb_handler(struct session *session, const struct oscar_request *request, struct answer *answer,
                         struct oscar_cause *cause);

static int greet(struct session *session, const struct oscar_request *request, struct oscar_cause *cause) {
    struct serve *serve = session->serve;
    int r = window_new(&session->window, cause);
    if (r < 0)
        return r;
    char group_key[3 * OSCAR_NAME_BYTES];
    snprintf(group_key, sizeof(group_key), "%u/%s/%s", session->peer.uid, session->tenant, request->hello.group);
    r = store_client_new(serve->store, session, session->window.header, session->window.fences, group_key,
                         &session->client);
    if (r < 0) {
        window_free(&session->window);
        return oscar_fail(cause, r, "this client cannot be taken: %s", oscar_error_text(r));
    }
    memcpy(session->client_name, request->hello.client_name, sizeof(session->client_name));
    serve->counters.hellos++;
    uint64_t suppressed;
    if (log_limit_pass(&serve->arrivals, loop_now_ns(serve->loop), &suppressed))
        log_info("client connected", log_number("session", (int64_t)session->id),
                 log_text("name", session->client_name), log_number("pid", session->peer.pid),
                 log_number("uid", session->peer.uid), log_text("tenant", session->tenant), log_suppressed(suppressed));
    return 0;
}

static uint32_t lower(uint32_t a, uint32_t b) { return a < b ? a : b; }

static int handle_hello(struct session *session, const struct oscar_request *request, struct answer *answer,
                        struct oscar_cause *cause) {
    struct serve *serve = session->serve;
    if (request->hello.major != OSCAR_PROTOCOL_MAJOR) {
        serve->counters.version_refused++;
        answer->ends = true;
        return oscar_fail(cause, OSCAR_ERR_VERSION,
                          "the client speaks protocol %u.%u, this daemon (oscard " OSCAR_VERSION_STRING
                          ") %u.%u: install a client "
                          "library of major version %u",
                          request->hello.major, request->hello.minor, OSCAR_PROTOCOL_MAJOR, OSCAR_PROTOCOL_MINOR,
                          OSCAR_PROTOCOL_MAJOR);
    }
    int r = session_take_place(session, cause);
    if (r == 0)
        r = greet(session, request, cause);
    if (r < 0) {
        answer->ends = true;
        return r;
    }
    struct oscar_reply *reply = &answer->reply;
    reply->hello.major = OSCAR_PROTOCOL_MAJOR;
    reply->hello.minor = lower(request->hello.minor, OSCAR_PROTOCOL_MINOR);
    reply->hello.features = request->hello.features & OSCAR_FEATURES;
    reply->hello.incarnation = serve->incarnation;
    reply->hello.session = session->id;
    reply->hello.window_bytes = OSCAR_WINDOW_BYTES;
    reply->hello.fence_bytes = OSCAR_FENCE_BYTES;
    snprintf(reply->hello.backend, OSCAR_NAME_BYTES, "%s", serve->ops->name);
    snprintf(reply->hello.device, OSCAR_NAME_BYTES, "%s", serve->ops->device_id(serve->device));
    snprintf(reply->hello.tenant, OSCAR_NAME_BYTES, "%s", session->tenant);
    snprintf(reply->hello.version, OSCAR_NAME_BYTES, "%s", OSCAR_VERSION_STRING);
    answer->fd[0] = session->window.window_fd;
    answer->fd[1] = session->window.fence_fd;
    answer->fds = 2;
    return 0;
}

static int handle_ping(struct session *session, const struct oscar_request *request, struct answer *answer,
                       struct oscar_cause *cause) {
    (void)session;
    (void)request;
    (void)answer;
    (void)cause;
    return 0;
}

static int handle_model_open(struct session *session, const struct oscar_request *request, struct answer *answer,
                             struct oscar_cause *cause) {
    (void)answer;
    return models_open(session, request, cause);
}

static int handle_model_close(struct session *session, const struct oscar_request *request, struct answer *answer,
                              struct oscar_cause *cause) {
    (void)answer;
    return store_model_close(session->serve->store, session->client, request->model_close.model, cause);
}

static int handle_in_store(struct session *session, const struct oscar_request *request, struct answer *answer,
                           struct oscar_cause *cause) {
    struct serve *serve = session->serve;
    return store_request(serve->store, session->client, request, loop_now_ns(serve->loop), &answer->reply, cause);
}

#define IN(state) (1U << (state))

static const struct {
    verb_handler *handle;
    unsigned states; /* in which it is allowed */
    bool parks;      /* may be answered later */
} verbs[OSCAR_VERBS] = {
    [OSCAR_HELLO] = {handle_hello, IN(SESSION_NEW), false},
    [OSCAR_MODEL_OPEN] = {handle_model_open, IN(SESSION_READY), true},
    [OSCAR_MODEL_CLOSE] = {handle_model_close, IN(SESSION_READY), false},
    [OSCAR_PROBE] = {handle_in_store, IN(SESSION_READY), false},
    [OSCAR_LEASE_ADOPT] = {handle_in_store, IN(SESSION_READY), false},
    [OSCAR_LEASE_CLOSE] = {handle_in_store, IN(SESSION_READY), false},
    [OSCAR_SEQ_OPEN] = {handle_in_store, IN(SESSION_READY), false},
    [OSCAR_SEQ_WAIT] = {handle_in_store, IN(SESSION_READY), true},
    [OSCAR_SEQ_EXTEND] = {handle_in_store, IN(SESSION_READY), false},
    [OSCAR_SEQ_RESERVE] = {handle_in_store, IN(SESSION_READY), true},
    [OSCAR_SEQ_ADVANCE] = {handle_in_store, IN(SESSION_READY), false},
    [OSCAR_SEQ_FORK] = {handle_in_store, IN(SESSION_READY), true},
    [OSCAR_SEQ_CLOSE] = {handle_in_store, IN(SESSION_READY), false},
    [OSCAR_PING] = {handle_ping, IN(SESSION_READY), false},
};

static const char *const not_allowed[SESSION_STATES] = {
    [SESSION_NEW] = "the first request of a connection is hello",
    [SESSION_READY] = "hello has been said already",
};

void verbs_handle(struct session *session, const struct oscar_request *request) {
    struct serve *serve = session->serve;
    struct oscar_cause cause = {0};
    serve->counters.requests[request->verb]++;
    if ((verbs[request->verb].states & IN(session->state)) == 0) {
        oscar_fail(&cause, OSCAR_ERR_STATE, "%s: %s", oscar_verb_name(request->verb), not_allowed[session->state]);
        session_violation(session, request, OSCAR_ERR_STATE, &cause);
        return;
    }
    if (verbs[request->verb].parks && session->parked >= SERVE_MAX_PARKED) {
        oscar_fail(&cause, OSCAR_ERR_LIMIT, "%u requests of this connection wait for their answer: at most %u",
                   session->parked, SERVE_MAX_PARKED);
        session_reply_error(session, request->id, request->verb, OSCAR_ERR_LIMIT, cause.text);
        return;
    }
    pump_hasten(serve);
    struct answer answer = {.reply = {.id = request->id, .verb = request->verb}};
    int r = verbs[request->verb].handle(session, request, &answer, &cause);
    announce_flush(session);
    if (r == OSCAR_PARKED) {
        session->parked++;
        return;
    }
    answer.reply.id = request->id;
    answer.reply.verb = request->verb;
    if (r < 0)
        session_reply_error(session, request->id, request->verb, r, cause.text);
    else
        session_reply(session, &answer.reply, answer.fd, answer.fds);
    if (answer.fds > 0)
        window_close_fds(&session->window);
    if (answer.ends)
        session_end(session, "it was refused", true);
}
