/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nanomsg 1.1.5 asserts where it should fail; what is known to trip it is kept away from it: a regular file at its path
 * (endpoint_claim() refuses it; nanomsg would delete it), and closing a socket in a directory that has become
 * read-only.
 */
#include "daemon/serve/admin.h"

#include <libgen.h>
#include <nanomsg/nn.h>
#include <nanomsg/pubsub.h>
#include <nanomsg/reqrep.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/serve/state.h"
#include "proto/cleanup.h"
#include "proto/version.h"

#define REQUEST_BYTES_MAX 4096 /* of the largest request there is, several times over */
#define EVENT_BYTES_MAX 512
#define REQUESTS_A_TURN 8 /* the loop belongs to the workers */

struct outlet {
    struct endpoint *endpoint;
    int socket; /* nanomsg's; -1: none */
};

struct admin {
    struct serve *serve;
    struct outlet requests, events;
    struct loop_source *watch;
    uint64_t sequence;
    struct oscar_metric metric[OSCAR_MAX_METRICS];
    struct oscar_event event[OSCAR_MAX_SNAPSHOT_PAGES];
};

static void answer_stats(struct admin *admin, const struct oscar_admin_request *request,
                         struct oscar_admin_reply *reply) {
    (void)request;
    uint32_t count = serve_metrics(admin->serve, admin->metric, OSCAR_MAX_METRICS);
    count += store_metrics(admin->serve->store, admin->metric + count, OSCAR_MAX_METRICS - count);
    reply->metric = admin->metric;
    reply->metrics = count;
}

static void answer_flush(struct admin *admin, const struct oscar_admin_request *request,
                         struct oscar_admin_reply *reply) {
    struct store_flush flush = {0};
    store_flush(admin->serve->store, request->flush_model ? &request->model : NULL, &flush);
    reply->flush.pages_freed = flush.pages_freed;
    reply->flush.bytes_freed = flush.bytes_freed;
    reply->flush.pages_deferred = flush.pages_deferred;
    reply->flush.bytes_deferred = flush.bytes_deferred;
    log_info("cache flushed on request", log_number("pages_freed", (int64_t)flush.pages_freed),
             log_number("pages_deferred", (int64_t)flush.pages_deferred));
}

static void answer_version(struct admin *admin, const struct oscar_admin_request *request,
                           struct oscar_admin_reply *reply) {
    (void)request;
    const struct serve *serve = admin->serve;
    snprintf(reply->version.version, sizeof(reply->version.version), "%s", OSCAR_VERSION_STRING);
    snprintf(reply->version.backend, sizeof(reply->version.backend), "%s", serve->ops->name);
    snprintf(reply->version.device, sizeof(reply->version.device), "%s", serve->ops->device_id(serve->device));
    snprintf(reply->version.io_engine, sizeof(reply->version.io_engine), "%s", loop_engine_name(serve->loop));
    reply->version.major = OSCAR_PROTOCOL_MAJOR;
    reply->version.minor = OSCAR_PROTOCOL_MINOR;
    reply->version.incarnation = serve->incarnation;
}

static void answer_snapshot(struct admin *admin, const struct oscar_admin_request *request,
                            struct oscar_admin_reply *reply) {
    uint64_t next = 0;
    reply->events = store_snapshot(admin->serve->store, request->cursor, admin->event, OSCAR_MAX_SNAPSHOT_PAGES, &next);
    reply->event = admin->event;
    reply->snapshot.incarnation = admin->serve->incarnation;
    reply->snapshot.sequence = admin->sequence;
    reply->snapshot.next_cursor = next;
}

typedef void answer_function(struct admin *admin, const struct oscar_admin_request *request,
                             struct oscar_admin_reply *reply);
static answer_function *const answers[] = {
    [OSCAR_ADMIN_STATS] = answer_stats,
    [OSCAR_ADMIN_FLUSH] = answer_flush,
    [OSCAR_ADMIN_VERSION] = answer_version,
    [OSCAR_ADMIN_SNAPSHOT] = answer_snapshot,
};

static void answer(struct admin *admin, const uint8_t *bytes, size_t size) {
    struct oscar_admin_request request = {0};
    struct oscar_admin_reply reply = {0};
    struct oscar_cause cause = {0};
    int r = oscar_admin_request_decode(bytes, size, &request, &cause);
    reply.id = request.id;
    reply.verb = request.verb;
    if (r < 0) {
        reply.verb =
            OSCAR_ADMIN_VERSION; /* a reply has one; this is what a requester of another version needs to ask */
        reply.error = r;
        memcpy(reply.cause, cause.text, sizeof(reply.cause));
        admin->serve->counters.protocol_errors++;
    } else {
        answers[request.verb](admin, &request, &reply);
    }
    _cleanup_free_ uint8_t *buffer = NULL;
    size_t length = 0;
    r = oscar_admin_reply_encode(&reply, &buffer, &length);
    if (r < 0) {
        log_error("administration reply cannot be encoded", log_text("error", oscar_error_name(r)));
        return;
    }
    (void)nn_send(admin->requests.socket, buffer, length, NN_DONTWAIT); /* a requester that has gone needs none */
}

static void requests_ready(void *arg) {
    struct admin *admin = arg;
    for (int i = 0; i < REQUESTS_A_TURN; i++) {
        uint8_t bytes[REQUEST_BYTES_MAX];
        int size = nn_recv(admin->requests.socket, bytes, sizeof(bytes), NN_DONTWAIT);
        if (size < 0)
            return;
        admin->serve->counters.admin_requests++;
        /* nanomsg cuts a longer message to the buffer and returns its whole length. */
        answer(admin, bytes, (size_t)size <= sizeof(bytes) ? (size_t)size : 0);
    }
}

void admin_publish(struct admin *admin, const struct oscar_event *event) {
    struct oscar_event numbered = *event;
    numbered.incarnation = admin->serve->incarnation;
    numbered.sequence = ++admin->sequence;
    uint8_t bytes[EVENT_BYTES_MAX];
    size_t size;
    admin->serve->counters.events++;
    if (oscar_event_encode(&numbered, bytes, sizeof(bytes), &size) < 0 ||
        nn_send(admin->events.socket, bytes, size, NN_DONTWAIT) < 0)
        admin->serve->counters.events_failed++;
}

static int outlet_open(const struct config *config, const char *path, int protocol, struct outlet *ret,
                       struct oscar_cause *cause) {
    int r = endpoint_claim(path, &ret->endpoint, cause);
    if (r < 0)
        return r;
    ret->socket = nn_socket(AF_SP, protocol);
    if (ret->socket < 0)
        return oscar_fail(cause, OSCAR_ERR_IO, "nanomsg socket: %s", nn_strerror(nn_errno()));
    /* A requester never waits for us, and a message of another size than ours is refused before it is taken in. */
    int most = REQUEST_BYTES_MAX;
    if (protocol == NN_REP)
        (void)nn_setsockopt(ret->socket, NN_SOL_SOCKET, NN_RCVMAXSIZE, &most, sizeof(most));
    char address[sizeof(((struct sockaddr_un *)NULL)->sun_path) + 8];
    snprintf(address, sizeof(address), "ipc://%s", path);
    mode_t mask = umask(0177);
    r = nn_bind(ret->socket, address);
    umask(mask);
    if (r < 0)
        return oscar_fail(cause, OSCAR_ERR_IO, "cannot bind %.100s: %s", path, nn_strerror(nn_errno()));
    return endpoint_adopt(ret->endpoint, (mode_t)config->admin_mode, config->admin_group, cause);
}

static void outlet_close(struct outlet *outlet) {
    if (outlet->socket >= 0) {
        char path[sizeof(((struct sockaddr_un *)NULL)->sun_path)];
        snprintf(path, sizeof(path), "%s", endpoint_path(outlet->endpoint));
        if (access(dirname(path), W_OK | X_OK) == 0)
            (void)nn_close(outlet->socket);
        else
            log_warning("a socket's directory cannot be written any more, the socket is left to the process's end",
                        log_text("socket", endpoint_path(outlet->endpoint)));
    }
    outlet->socket = -1;
    endpoint_release(outlet->endpoint);
    outlet->endpoint = NULL;
}

int admin_open(struct serve *serve, struct admin **ret, struct oscar_cause *cause) {
    struct admin *admin = calloc(1, sizeof(*admin));
    if (admin == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for administration");
    admin->serve = serve;
    admin->requests.socket = admin->events.socket = -1;
    int ready;
    size_t length = sizeof(ready);
    int r = outlet_open(serve->config, serve->config->admin_requests, NN_REP, &admin->requests, cause);
    if (r == 0)
        r = outlet_open(serve->config, serve->config->admin_events, NN_PUB, &admin->events, cause);
    if (r == 0 && nn_getsockopt(admin->requests.socket, NN_SOL_SOCKET, NN_RCVFD, &ready, &length) < 0)
        r = oscar_fail(cause, OSCAR_ERR_IO, "nanomsg descriptor: %s", nn_strerror(nn_errno()));
    if (r == 0) {
        r = loop_watch(serve->loop, ready, requests_ready, admin, &admin->watch);
        if (r < 0)
            oscar_fail(cause, r, "the administration socket cannot be watched: %s", oscar_error_text(r));
    }
    if (r < 0) {
        admin_close(admin);
        return r;
    }
    *ret = admin;
    return 0;
}

void admin_close(struct admin *admin) {
    if (admin == NULL)
        return;
    loop_remove(admin->serve->loop, admin->watch);
    outlet_close(&admin->requests);
    outlet_close(&admin->events);
    free(admin);
}
