/* SPDX-License-Identifier: Apache-2.0 */
/* Requests: one row a verb, with what turns its plain struct into the generated one and back. */
#include <inttypes.h>
#include <string.h>

#include "proto/oscar.pb-c.h"
#include "proto/wire.h"
#include "proto/wire_arena.h"
#include "proto/wire_field.h"

/* A ModelOpen with texts of full length takes under 1.5 KiB; the rest is room for fields that a newer minor version adds. */
#define ARENA_BYTES 8192U

union body {
    Oscar__V1__Hello hello;
    struct {
        Oscar__V1__ModelOpen open;
        Oscar__V1__Geometry geometry;
    } model_open;
    Oscar__V1__ModelClose model_close;
    Oscar__V1__Probe probe;
    Oscar__V1__LeaseAdopt lease_adopt;
    Oscar__V1__LeaseClose lease_close;
    Oscar__V1__SeqOpen seq_open;
    Oscar__V1__SeqWait seq_wait;
    Oscar__V1__SeqExtend seq_extend;
    Oscar__V1__SeqReserve seq_reserve;
    Oscar__V1__SeqAdvance seq_advance;
    Oscar__V1__SeqFork seq_fork;
    Oscar__V1__SeqClose seq_close;
    Oscar__V1__Ping ping;
};

/* --- hello and model_open: the two with texts --- */

static bool give_hello(const struct oscar_request *request, union body *body) {
    oscar__v1__hello__init(&body->hello);
    body->hello.major = request->hello.major;
    body->hello.minor = request->hello.minor;
    body->hello.features = request->hello.features;
    return oscar_wire_give_text(request->hello.client_name, OSCAR_NAME_BYTES, &body->hello.client_name) &&
           oscar_wire_give_text(request->hello.group, OSCAR_NAME_BYTES, &body->hello.group);
}

static int take_hello(const Oscar__V1__Request *message, struct oscar_request *ret, struct oscar_cause *cause) {
    const Oscar__V1__Hello *hello = message->hello;
    int r;
    ret->hello.major = hello->major;
    ret->hello.minor = hello->minor;
    ret->hello.features = hello->features;
    if ((r = oscar_wire_take_text("client_name", &hello->client_name, ret->hello.client_name, OSCAR_NAME_BYTES,
                                  cause)) < 0)
        return r;
    return oscar_wire_take_text("group", &hello->group, ret->hello.group, OSCAR_NAME_BYTES, cause);
}

static bool give_model_open(const struct oscar_request *request, union body *body) {
    const struct oscar_identity *identity = &request->model_open.identity;
    Oscar__V1__ModelOpen *open = &body->model_open.open;
    Oscar__V1__Geometry *geometry = &body->model_open.geometry;
    oscar__v1__model_open__init(open);
    oscar__v1__geometry__init(geometry);
    geometry->layers = identity->geometry.layers;
    geometry->query_heads = identity->geometry.query_heads;
    geometry->kv_heads = identity->geometry.kv_heads;
    geometry->head_dim = identity->geometry.head_dim;
    geometry->dtype = identity->geometry.dtype;
    geometry->page_tokens = identity->geometry.page_tokens;
    geometry->sink_tokens = identity->geometry.sink_tokens;
    geometry->recent_tokens = identity->geometry.recent_tokens;
    open->geometry = geometry;
    open->weights = oscar_wire_give_bytes(identity->weights.bytes, OSCAR_DIGEST_BYTES);
    open->rope = oscar_wire_give_bytes(identity->rope.bytes, OSCAR_DIGEST_BYTES);
    open->layout = identity->layout;
    open->shard_rank = identity->shard_rank;
    open->shard_size = identity->shard_size;
    open->format = identity->format;
    return oscar_wire_give_text(identity->revision, OSCAR_NAME_BYTES, &open->revision) &&
           oscar_wire_give_text(identity->adapter, OSCAR_NAME_BYTES, &open->adapter) &&
           oscar_wire_give_text(request->model_open.calibration, OSCAR_NAME_BYTES, &open->calibration);
}

/* What is missing stays zero: oscar_identity_check() refuses it by name, as an answer and not as the end of the connection. */
static int take_model_open(const Oscar__V1__Request *message, struct oscar_request *ret, struct oscar_cause *cause) {
    const Oscar__V1__ModelOpen *open = message->model_open;
    struct oscar_identity *identity = &ret->model_open.identity;
    int r;
    if (open->geometry != NULL) {
        identity->geometry = (struct oscar_geometry){
            .layers = open->geometry->layers,
            .query_heads = open->geometry->query_heads,
            .kv_heads = open->geometry->kv_heads,
            .head_dim = open->geometry->head_dim,
            .dtype = open->geometry->dtype,
            .page_tokens = open->geometry->page_tokens,
            .sink_tokens = open->geometry->sink_tokens,
            .recent_tokens = open->geometry->recent_tokens,
        };
    }
    identity->layout = open->layout;
    identity->shard_rank = open->shard_rank;
    identity->shard_size = open->shard_size;
    identity->format = open->format;
    if ((r = oscar_wire_take_optional("weights", &open->weights, identity->weights.bytes, OSCAR_DIGEST_BYTES, cause)) <
        0)
        return r;
    if ((r = oscar_wire_take_optional("rope", &open->rope, identity->rope.bytes, OSCAR_DIGEST_BYTES, cause)) < 0)
        return r;
    if ((r = oscar_wire_take_text("revision", &open->revision, identity->revision, OSCAR_NAME_BYTES, cause)) < 0)
        return r;
    if ((r = oscar_wire_take_text("adapter", &open->adapter, identity->adapter, OSCAR_NAME_BYTES, cause)) < 0)
        return r;
    return oscar_wire_take_text("calibration", &open->calibration, ret->model_open.calibration, OSCAR_NAME_BYTES,
                                cause);
}

/* --- verbs of plain numbers --- */

static bool give_model_close(const struct oscar_request *request, union body *body) {
    oscar__v1__model_close__init(&body->model_close);
    body->model_close.model = request->model_close.model;
    return true;
}

static int take_model_close(const Oscar__V1__Request *message, struct oscar_request *ret, struct oscar_cause *cause) {
    (void)cause;
    ret->model_close.model = message->model_close->model;
    return OSCAR_OK;
}

static bool give_probe(const struct oscar_request *request, union body *body) {
    oscar__v1__probe__init(&body->probe);
    body->probe.model = request->probe.model;
    body->probe.tokens = request->probe.tokens;
    body->probe.lease = request->probe.lease;
    return true;
}

static int take_probe(const Oscar__V1__Request *message, struct oscar_request *ret, struct oscar_cause *cause) {
    (void)cause;
    ret->probe.model = message->probe->model;
    ret->probe.tokens = message->probe->tokens;
    ret->probe.lease = message->probe->lease != 0;
    return OSCAR_OK;
}

static bool give_lease_adopt(const struct oscar_request *request, union body *body) {
    oscar__v1__lease_adopt__init(&body->lease_adopt);
    body->lease_adopt.model = request->lease_adopt.model;
    body->lease_adopt.secret = oscar_wire_give_bytes(request->lease_adopt.secret, OSCAR_LEASE_SECRET_BYTES);
    return true;
}

static int take_lease_adopt(const Oscar__V1__Request *message, struct oscar_request *ret, struct oscar_cause *cause) {
    ret->lease_adopt.model = message->lease_adopt->model;
    return oscar_wire_take_bytes("secret", &message->lease_adopt->secret, ret->lease_adopt.secret,
                                 OSCAR_LEASE_SECRET_BYTES, cause);
}

static bool give_lease_close(const struct oscar_request *request, union body *body) {
    oscar__v1__lease_close__init(&body->lease_close);
    body->lease_close.lease = request->lease_close.lease;
    return true;
}

static int take_lease_close(const Oscar__V1__Request *message, struct oscar_request *ret, struct oscar_cause *cause) {
    (void)cause;
    ret->lease_close.lease = message->lease_close->lease;
    return OSCAR_OK;
}

static bool give_seq_open(const struct oscar_request *request, union body *body) {
    oscar__v1__seq_open__init(&body->seq_open);
    body->seq_open.model = request->seq_open.model;
    body->seq_open.tokens = request->seq_open.tokens;
    body->seq_open.dense_tail = request->seq_open.dense_tail;
    return true;
}

static int take_seq_open(const Oscar__V1__Request *message, struct oscar_request *ret, struct oscar_cause *cause) {
    (void)cause;
    ret->seq_open.model = message->seq_open->model;
    ret->seq_open.tokens = message->seq_open->tokens;
    ret->seq_open.dense_tail = message->seq_open->dense_tail != 0;
    return OSCAR_OK;
}

static bool give_seq_wait(const struct oscar_request *request, union body *body) {
    oscar__v1__seq_wait__init(&body->seq_wait);
    body->seq_wait.seq = request->seq_wait.seq;
    body->seq_wait.timeout_ms = request->seq_wait.timeout_ms;
    return true;
}

static int take_seq_wait(const Oscar__V1__Request *message, struct oscar_request *ret, struct oscar_cause *cause) {
    (void)cause;
    ret->seq_wait.seq = message->seq_wait->seq;
    ret->seq_wait.timeout_ms = message->seq_wait->timeout_ms;
    return OSCAR_OK;
}

static bool give_seq_extend(const struct oscar_request *request, union body *body) {
    oscar__v1__seq_extend__init(&body->seq_extend);
    body->seq_extend.seq = request->seq_extend.seq;
    body->seq_extend.tokens = request->seq_extend.tokens;
    body->seq_extend.fence = request->seq_extend.fence;
    return true;
}

static int take_seq_extend(const Oscar__V1__Request *message, struct oscar_request *ret, struct oscar_cause *cause) {
    (void)cause;
    ret->seq_extend.seq = message->seq_extend->seq;
    ret->seq_extend.tokens = message->seq_extend->tokens;
    ret->seq_extend.fence = message->seq_extend->fence;
    return OSCAR_OK;
}

static bool give_seq_reserve(const struct oscar_request *request, union body *body) {
    oscar__v1__seq_reserve__init(&body->seq_reserve);
    body->seq_reserve.seq = request->seq_reserve.seq;
    body->seq_reserve.tokens = request->seq_reserve.tokens;
    return true;
}

static int take_seq_reserve(const Oscar__V1__Request *message, struct oscar_request *ret, struct oscar_cause *cause) {
    (void)cause;
    ret->seq_reserve.seq = message->seq_reserve->seq;
    ret->seq_reserve.tokens = message->seq_reserve->tokens;
    return OSCAR_OK;
}

static bool give_seq_advance(const struct oscar_request *request, union body *body) {
    oscar__v1__seq_advance__init(&body->seq_advance);
    body->seq_advance.seq = request->seq_advance.seq;
    body->seq_advance.tokens = request->seq_advance.tokens;
    body->seq_advance.fence = request->seq_advance.fence;
    return true;
}

static int take_seq_advance(const Oscar__V1__Request *message, struct oscar_request *ret, struct oscar_cause *cause) {
    (void)cause;
    ret->seq_advance.seq = message->seq_advance->seq;
    ret->seq_advance.tokens = message->seq_advance->tokens;
    ret->seq_advance.fence = message->seq_advance->fence;
    return OSCAR_OK;
}

static bool give_seq_fork(const struct oscar_request *request, union body *body) {
    oscar__v1__seq_fork__init(&body->seq_fork);
    body->seq_fork.seq = request->seq_fork.seq;
    body->seq_fork.fence = request->seq_fork.fence;
    return true;
}

static int take_seq_fork(const Oscar__V1__Request *message, struct oscar_request *ret, struct oscar_cause *cause) {
    (void)cause;
    ret->seq_fork.seq = message->seq_fork->seq;
    ret->seq_fork.fence = message->seq_fork->fence;
    return OSCAR_OK;
}

static bool give_seq_close(const struct oscar_request *request, union body *body) {
    oscar__v1__seq_close__init(&body->seq_close);
    body->seq_close.seq = request->seq_close.seq;
    body->seq_close.fence = request->seq_close.fence;
    return true;
}

static int take_seq_close(const Oscar__V1__Request *message, struct oscar_request *ret, struct oscar_cause *cause) {
    (void)cause;
    ret->seq_close.seq = message->seq_close->seq;
    ret->seq_close.fence = message->seq_close->fence;
    return OSCAR_OK;
}

static bool give_ping(const struct oscar_request *request, union body *body) {
    (void)request;
    oscar__v1__ping__init(&body->ping);
    return true;
}

static int take_ping(const Oscar__V1__Request *message, struct oscar_request *ret, struct oscar_cause *cause) {
    (void)message;
    (void)ret;
    (void)cause;
    return OSCAR_OK;
}

/* --- the table --- */

static const struct {
    const char *name;
    bool (*give)(const struct oscar_request *request, union body *body);
    int (*take)(const Oscar__V1__Request *message, struct oscar_request *ret, struct oscar_cause *cause);
} verbs[OSCAR_VERBS] = {
    [OSCAR_HELLO] = {"hello", give_hello, take_hello},
    [OSCAR_MODEL_OPEN] = {"model_open", give_model_open, take_model_open},
    [OSCAR_MODEL_CLOSE] = {"model_close", give_model_close, take_model_close},
    [OSCAR_PROBE] = {"probe", give_probe, take_probe},
    [OSCAR_LEASE_ADOPT] = {"lease_adopt", give_lease_adopt, take_lease_adopt},
    [OSCAR_LEASE_CLOSE] = {"lease_close", give_lease_close, take_lease_close},
    [OSCAR_SEQ_OPEN] = {"seq_open", give_seq_open, take_seq_open},
    [OSCAR_SEQ_WAIT] = {"seq_wait", give_seq_wait, take_seq_wait},
    [OSCAR_SEQ_EXTEND] = {"seq_extend", give_seq_extend, take_seq_extend},
    [OSCAR_SEQ_RESERVE] = {"seq_reserve", give_seq_reserve, take_seq_reserve},
    [OSCAR_SEQ_ADVANCE] = {"seq_advance", give_seq_advance, take_seq_advance},
    [OSCAR_SEQ_FORK] = {"seq_fork", give_seq_fork, take_seq_fork},
    [OSCAR_SEQ_CLOSE] = {"seq_close", give_seq_close, take_seq_close},
    [OSCAR_PING] = {"ping", give_ping, take_ping},
};

const char *oscar_verb_name(enum oscar_verb verb) {
    return (size_t)verb < OSCAR_VERBS && verbs[verb].name != NULL ? verbs[verb].name : "unknown";
}

int oscar_request_encode(const struct oscar_request *request, uint8_t *buffer, size_t capacity, size_t *ret_bytes) {
    if ((size_t)request->verb >= OSCAR_VERBS || verbs[request->verb].give == NULL)
        return OSCAR_ERR_INVALID;
    Oscar__V1__Request message = OSCAR__V1__REQUEST__INIT;
    union body body;
    if (!verbs[request->verb].give(request, &body))
        return OSCAR_ERR_INVALID;
    message.id = request->id;
    message.body_case = (Oscar__V1__Request__BodyCase)request->verb; /* verbs are the field numbers */
    message.hello = &body.hello;                                     /* every body begins at the union's address */
    return oscar_wire_pack(&message.base, buffer, capacity, ret_bytes);
}

int oscar_request_decode(const uint8_t *bytes, size_t size, struct oscar_request *ret, struct oscar_cause *cause) {
    _Alignas(OSCAR_WIRE_ALIGNMENT) uint8_t memory[ARENA_BYTES];
    struct oscar_wire_arena arena;
    oscar_wire_arena_init(&arena, memory, sizeof(memory));
    const Oscar__V1__Request *message =
        (const Oscar__V1__Request *)oscar_wire_unpack(&arena, &oscar__v1__request__descriptor, bytes, size);
    if (message == NULL)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "a request of %zu bytes is malformed or too large", size);
    if ((size_t)message->body_case >= OSCAR_VERBS || verbs[message->body_case].take == NULL)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "request %" PRIu64 " has no body that this version knows",
                          message->id);
    struct oscar_request request;
    memset(&request, 0, sizeof(request)); /* also the bytes of the body that this verb does not use */
    request.id = message->id;
    request.verb = (enum oscar_verb)message->body_case;
    int r = verbs[request.verb].take(message, &request, cause);
    if (r < 0)
        return r;
    *ret = request;
    return OSCAR_OK;
}
