/* SPDX-License-Identifier: Apache-2.0 */
/* Replies: one row a verb that has a body in its reply. Errors, and the other verbs, go without one. */
#include <inttypes.h>
#include <string.h>

#include "proto/oscar.pb-c.h"
#include "proto/text.h"
#include "proto/window.h"
#include "proto/wire.h"
#include "proto/wire_arena.h"
#include "proto/wire_field.h"

/* A HelloReply with texts of full length takes under 2 KiB; the rest is room for fields that a newer minor version adds. */
#define ARENA_BYTES 8192U

union body {
    Oscar__V1__HelloReply hello;
    struct {
        Oscar__V1__ModelOpenReply open;
        Oscar__V1__ArenaInfo arena[OSCAR_FORMS];
        Oscar__V1__ArenaInfo *arenas[OSCAR_FORMS];
    } model_open;
    Oscar__V1__ProbeReply probe;
    Oscar__V1__LeaseAdoptReply lease_adopt;
    Oscar__V1__SeqOpenReply seq_open;
    Oscar__V1__SeqWaitReply seq_wait;
    Oscar__V1__SeqExtendReply seq_extend;
    Oscar__V1__SeqReserveReply seq_reserve;
    Oscar__V1__SeqAdvanceReply seq_advance;
    struct {
        Oscar__V1__SeqForkReply fork;
        Oscar__V1__PageCopy copy[OSCAR_MAX_COPIES];
        Oscar__V1__PageCopy *copies[OSCAR_MAX_COPIES];
    } seq_fork;
};

/* Counts that the client will index with are bounded here, once. */
static int take_tokens(const char *name, uint32_t field, uint32_t *ret, struct oscar_cause *cause) {
    return oscar_wire_take_count(name, field, OSCAR_MAX_SEQUENCE_TOKENS, ret, cause);
}

static int take_updates(uint32_t field, uint32_t *ret, struct oscar_cause *cause) {
    return oscar_wire_take_count("updates", field, OSCAR_MAX_UPDATES, ret, cause);
}

static int take_slot(uint32_t field, uint32_t *ret, struct oscar_cause *cause) {
    return oscar_wire_take_count("fence_slot", field, OSCAR_FENCE_SLOTS - 1, ret, cause);
}

/* --- hello --- */

static bool give_hello(const struct oscar_reply *reply, union body *body) {
    Oscar__V1__HelloReply *hello = &body->hello;
    oscar__v1__hello_reply__init(hello);
    hello->major = reply->hello.major;
    hello->minor = reply->hello.minor;
    hello->features = reply->hello.features;
    hello->incarnation = reply->hello.incarnation;
    hello->session = reply->hello.session;
    hello->window_bytes = reply->hello.window_bytes;
    hello->fence_bytes = reply->hello.fence_bytes;
    return oscar_wire_give_string(reply->hello.backend, OSCAR_NAME_BYTES, &hello->backend) &&
           oscar_wire_give_string(reply->hello.device, OSCAR_NAME_BYTES, &hello->device) &&
           oscar_wire_give_string(reply->hello.tenant, OSCAR_NAME_BYTES, &hello->tenant) &&
           oscar_wire_give_string(reply->hello.version, OSCAR_NAME_BYTES, &hello->version);
}

static int take_hello(const Oscar__V1__Reply *message, struct oscar_reply *ret, struct oscar_cause *cause) {
    const Oscar__V1__HelloReply *hello = message->hello;
    int r;
    ret->hello.major = hello->major;
    ret->hello.minor = hello->minor;
    ret->hello.features = hello->features;
    ret->hello.incarnation = hello->incarnation;
    ret->hello.session = hello->session;
    ret->hello.window_bytes = hello->window_bytes;
    ret->hello.fence_bytes = hello->fence_bytes;
    if ((r = oscar_wire_take_string("backend", hello->backend, ret->hello.backend, OSCAR_NAME_BYTES, cause)) < 0)
        return r;
    if ((r = oscar_wire_take_string("device", hello->device, ret->hello.device, OSCAR_NAME_BYTES, cause)) < 0)
        return r;
    if ((r = oscar_wire_take_string("tenant", hello->tenant, ret->hello.tenant, OSCAR_NAME_BYTES, cause)) < 0)
        return r;
    return oscar_wire_take_string("version", hello->version, ret->hello.version, OSCAR_NAME_BYTES, cause);
}

/* --- model_open --- */

static bool give_model_open(const struct oscar_reply *reply, union body *body) {
    Oscar__V1__ModelOpenReply *open = &body->model_open.open;
    oscar__v1__model_open_reply__init(open);
    open->model = reply->model_open.model;
    open->model_digest = oscar_wire_give_bytes(reply->model_open.model_digest.bytes, OSCAR_DIGEST_BYTES);
    open->calibration_digest = oscar_wire_give_bytes(reply->model_open.calibration_digest.bytes, OSCAR_DIGEST_BYTES);
    open->calibration_bytes = reply->model_open.calibration_bytes;
    open->turns_bytes = reply->model_open.turns_bytes;
    open->turns_pages = reply->model_open.turns_pages;
    for (unsigned form = 0; form < OSCAR_FORMS; form++) {
        const struct oscar_arena_info *info = &reply->model_open.arenas[form];
        Oscar__V1__ArenaInfo *arena = &body->model_open.arena[form];
        oscar__v1__arena_info__init(arena);
        arena->form = form;
        arena->page_bytes = info->page_bytes;
        arena->chunk_pages = info->chunk_pages;
        arena->max_pages = info->max_pages;
        body->model_open.arenas[form] = arena;
    }
    open->arenas = body->model_open.arenas;
    open->n_arenas = OSCAR_FORMS;
    return true;
}

static int take_model_open(const Oscar__V1__Reply *message, struct oscar_reply *ret, struct oscar_cause *cause) {
    const Oscar__V1__ModelOpenReply *open = message->model_open;
    unsigned seen = 0;
    int r;
    ret->model_open.model = open->model;
    ret->model_open.calibration_bytes = open->calibration_bytes;
    ret->model_open.turns_bytes = open->turns_bytes;
    if ((r = oscar_wire_take_bytes("model_digest", &open->model_digest, ret->model_open.model_digest.bytes,
                                   OSCAR_DIGEST_BYTES, cause)) < 0)
        return r;
    if ((r = oscar_wire_take_bytes("calibration_digest", &open->calibration_digest,
                                   ret->model_open.calibration_digest.bytes, OSCAR_DIGEST_BYTES, cause)) < 0)
        return r;
    if ((r = oscar_wire_take_count("turns_pages", open->turns_pages, OSCAR_MAX_SEQUENCE_PAGES,
                                   &ret->model_open.turns_pages, cause)) < 0)
        return r;
    for (size_t i = 0; i < open->n_arenas; i++) {
        const Oscar__V1__ArenaInfo *arena = open->arenas[i];
        if (arena->form >= OSCAR_FORMS || (seen & (1U << arena->form)) != 0)
            return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "arena of form %" PRIu32 " is unknown or given twice",
                              arena->form);
        seen |= 1U << arena->form;
        if (arena->max_pages > OSCAR_PAGE_ID_MASK + 1)
            return oscar_fail(cause, OSCAR_ERR_PROTOCOL,
                              "arena of form %" PRIu32 " has %" PRIu64 " pages: ids have 40 bits", arena->form,
                              arena->max_pages);
        ret->model_open.arenas[arena->form].page_bytes = arena->page_bytes;
        ret->model_open.arenas[arena->form].chunk_pages = arena->chunk_pages;
        ret->model_open.arenas[arena->form].max_pages = arena->max_pages;
    }
    if (seen != (1U << OSCAR_FORMS) - 1)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "model_open reply without an arena for each form");
    return OSCAR_OK;
}

/* --- probe and leases --- */

static bool give_probe(const struct oscar_reply *reply, union body *body) {
    oscar__v1__probe_reply__init(&body->probe);
    body->probe.hit_tokens = reply->probe.hit_tokens;
    body->probe.in_flight_tokens = reply->probe.in_flight_tokens;
    body->probe.lease = reply->probe.lease;
    if (reply->probe.lease != 0)
        body->probe.lease_secret = oscar_wire_give_bytes(reply->probe.secret, OSCAR_LEASE_SECRET_BYTES);
    return true;
}

static int take_probe(const Oscar__V1__Reply *message, struct oscar_reply *ret, struct oscar_cause *cause) {
    const Oscar__V1__ProbeReply *probe = message->probe;
    int r;
    ret->probe.lease = probe->lease;
    if ((r = take_tokens("hit_tokens", probe->hit_tokens, &ret->probe.hit_tokens, cause)) < 0 ||
        (r = take_tokens("in_flight_tokens", probe->in_flight_tokens, &ret->probe.in_flight_tokens, cause)) < 0)
        return r;
    return oscar_wire_take_bytes("lease_secret", &probe->lease_secret, ret->probe.secret,
                                 probe->lease != 0 ? OSCAR_LEASE_SECRET_BYTES : 0, cause);
}

static bool give_lease_adopt(const struct oscar_reply *reply, union body *body) {
    oscar__v1__lease_adopt_reply__init(&body->lease_adopt);
    body->lease_adopt.lease = reply->lease_adopt.lease;
    body->lease_adopt.hit_tokens = reply->lease_adopt.hit_tokens;
    return true;
}

static int take_lease_adopt(const Oscar__V1__Reply *message, struct oscar_reply *ret, struct oscar_cause *cause) {
    ret->lease_adopt.lease = message->lease_adopt->lease;
    return take_tokens("hit_tokens", message->lease_adopt->hit_tokens, &ret->lease_adopt.hit_tokens, cause);
}

/* --- sequences --- */

static bool give_seq_open(const struct oscar_reply *reply, union body *body) {
    oscar__v1__seq_open_reply__init(&body->seq_open);
    body->seq_open.seq = reply->seq_open.seq;
    body->seq_open.fence_slot = reply->seq_open.fence_slot;
    body->seq_open.hit_tokens = reply->seq_open.hit_tokens;
    body->seq_open.in_flight_tokens = reply->seq_open.in_flight_tokens;
    body->seq_open.updates = reply->seq_open.updates;
    return true;
}

static int take_seq_open(const Oscar__V1__Reply *message, struct oscar_reply *ret, struct oscar_cause *cause) {
    const Oscar__V1__SeqOpenReply *open = message->seq_open;
    int r;
    ret->seq_open.seq = open->seq;
    if ((r = take_slot(open->fence_slot, &ret->seq_open.fence_slot, cause)) < 0 ||
        (r = take_tokens("hit_tokens", open->hit_tokens, &ret->seq_open.hit_tokens, cause)) < 0 ||
        (r = take_tokens("in_flight_tokens", open->in_flight_tokens, &ret->seq_open.in_flight_tokens, cause)) < 0)
        return r;
    return take_updates(open->updates, &ret->seq_open.updates, cause);
}

static bool give_seq_wait(const struct oscar_reply *reply, union body *body) {
    oscar__v1__seq_wait_reply__init(&body->seq_wait);
    body->seq_wait.available_tokens = reply->seq_wait.available_tokens;
    return true;
}

static int take_seq_wait(const Oscar__V1__Reply *message, struct oscar_reply *ret, struct oscar_cause *cause) {
    return take_tokens("available_tokens", message->seq_wait->available_tokens, &ret->seq_wait.available_tokens, cause);
}

static bool give_seq_extend(const struct oscar_reply *reply, union body *body) {
    oscar__v1__seq_extend_reply__init(&body->seq_extend);
    body->seq_extend.hit_tokens = reply->seq_extend.hit_tokens;
    body->seq_extend.in_flight_tokens = reply->seq_extend.in_flight_tokens;
    body->seq_extend.updates = reply->seq_extend.updates;
    return true;
}

static int take_seq_extend(const Oscar__V1__Reply *message, struct oscar_reply *ret, struct oscar_cause *cause) {
    const Oscar__V1__SeqExtendReply *extend = message->seq_extend;
    int r;
    if ((r = take_tokens("hit_tokens", extend->hit_tokens, &ret->seq_extend.hit_tokens, cause)) < 0 ||
        (r = take_tokens("in_flight_tokens", extend->in_flight_tokens, &ret->seq_extend.in_flight_tokens, cause)) < 0)
        return r;
    return take_updates(extend->updates, &ret->seq_extend.updates, cause);
}

static bool give_seq_reserve(const struct oscar_reply *reply, union body *body) {
    oscar__v1__seq_reserve_reply__init(&body->seq_reserve);
    body->seq_reserve.reserved_tokens = reply->seq_reserve.reserved_tokens;
    body->seq_reserve.updates = reply->seq_reserve.updates;
    return true;
}

static int take_seq_reserve(const Oscar__V1__Reply *message, struct oscar_reply *ret, struct oscar_cause *cause) {
    const Oscar__V1__SeqReserveReply *reserve = message->seq_reserve;
    int r = take_tokens("reserved_tokens", reserve->reserved_tokens, &ret->seq_reserve.reserved_tokens, cause);
    if (r < 0)
        return r;
    return take_updates(reserve->updates, &ret->seq_reserve.updates, cause);
}

static bool give_seq_advance(const struct oscar_reply *reply, union body *body) {
    oscar__v1__seq_advance_reply__init(&body->seq_advance);
    body->seq_advance.committed_tokens = reply->seq_advance.committed_tokens;
    body->seq_advance.sealed_tokens = reply->seq_advance.sealed_tokens;
    body->seq_advance.updates = reply->seq_advance.updates;
    return true;
}

static int take_seq_advance(const Oscar__V1__Reply *message, struct oscar_reply *ret, struct oscar_cause *cause) {
    const Oscar__V1__SeqAdvanceReply *advance = message->seq_advance;
    int r;
    if ((r = take_tokens("committed_tokens", advance->committed_tokens, &ret->seq_advance.committed_tokens, cause)) <
            0 ||
        (r = take_tokens("sealed_tokens", advance->sealed_tokens, &ret->seq_advance.sealed_tokens, cause)) < 0)
        return r;
    return take_updates(advance->updates, &ret->seq_advance.updates, cause);
}

static bool give_seq_fork(const struct oscar_reply *reply, union body *body) {
    Oscar__V1__SeqForkReply *fork = &body->seq_fork.fork;
    if (reply->seq_fork.copies > OSCAR_MAX_COPIES)
        return false;
    oscar__v1__seq_fork_reply__init(fork);
    fork->seq = reply->seq_fork.seq;
    fork->fence_slot = reply->seq_fork.fence_slot;
    fork->committed_tokens = reply->seq_fork.committed_tokens;
    fork->updates = reply->seq_fork.updates;
    for (uint32_t i = 0; i < reply->seq_fork.copies; i++) {
        Oscar__V1__PageCopy *copy = &body->seq_fork.copy[i];
        oscar__v1__page_copy__init(copy);
        copy->from = reply->seq_fork.copy[i].from;
        copy->to = reply->seq_fork.copy[i].to;
        copy->page = reply->seq_fork.copy[i].page;
        copy->rows = reply->seq_fork.copy[i].rows;
        body->seq_fork.copies[i] = copy;
    }
    fork->copies = body->seq_fork.copies;
    fork->n_copies = reply->seq_fork.copies;
    return true;
}

static int take_seq_fork(const Oscar__V1__Reply *message, struct oscar_reply *ret, struct oscar_cause *cause) {
    const Oscar__V1__SeqForkReply *fork = message->seq_fork;
    int r;
    ret->seq_fork.seq = fork->seq;
    if ((r = take_slot(fork->fence_slot, &ret->seq_fork.fence_slot, cause)) < 0 ||
        (r = take_tokens("committed_tokens", fork->committed_tokens, &ret->seq_fork.committed_tokens, cause)) < 0 ||
        (r = take_updates(fork->updates, &ret->seq_fork.updates, cause)) < 0)
        return r;
    if (fork->n_copies > OSCAR_MAX_COPIES)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "seq_fork reply has %zu copies: at most %u", fork->n_copies,
                          OSCAR_MAX_COPIES);
    ret->seq_fork.copies = (uint32_t)fork->n_copies;
    for (size_t i = 0; i < fork->n_copies; i++) {
        struct oscar_page_copy *copy = &ret->seq_fork.copy[i];
        copy->from = fork->copies[i]->from;
        copy->to = fork->copies[i]->to;
        if ((r = oscar_wire_take_count("page", fork->copies[i]->page, OSCAR_MAX_SEQUENCE_PAGES - 1, &copy->page,
                                       cause)) < 0 ||
            (r = oscar_wire_take_count("rows", fork->copies[i]->rows, OSCAR_PAGE_TOKENS, &copy->rows, cause)) < 0)
            return r;
    }
    return OSCAR_OK;
}

/* --- the table --- */

static const struct {
    Oscar__V1__Reply__BodyCase body;
    bool (*give)(const struct oscar_reply *reply, union body *body);
    int (*take)(const Oscar__V1__Reply *message, struct oscar_reply *ret, struct oscar_cause *cause);
} verbs[OSCAR_VERBS] = {
    [OSCAR_HELLO] = {OSCAR__V1__REPLY__BODY_HELLO, give_hello, take_hello},
    [OSCAR_MODEL_OPEN] = {OSCAR__V1__REPLY__BODY_MODEL_OPEN, give_model_open, take_model_open},
    [OSCAR_PROBE] = {OSCAR__V1__REPLY__BODY_PROBE, give_probe, take_probe},
    [OSCAR_LEASE_ADOPT] = {OSCAR__V1__REPLY__BODY_LEASE_ADOPT, give_lease_adopt, take_lease_adopt},
    [OSCAR_SEQ_OPEN] = {OSCAR__V1__REPLY__BODY_SEQ_OPEN, give_seq_open, take_seq_open},
    [OSCAR_SEQ_WAIT] = {OSCAR__V1__REPLY__BODY_SEQ_WAIT, give_seq_wait, take_seq_wait},
    [OSCAR_SEQ_EXTEND] = {OSCAR__V1__REPLY__BODY_SEQ_EXTEND, give_seq_extend, take_seq_extend},
    [OSCAR_SEQ_RESERVE] = {OSCAR__V1__REPLY__BODY_SEQ_RESERVE, give_seq_reserve, take_seq_reserve},
    [OSCAR_SEQ_ADVANCE] = {OSCAR__V1__REPLY__BODY_SEQ_ADVANCE, give_seq_advance, take_seq_advance},
    [OSCAR_SEQ_FORK] = {OSCAR__V1__REPLY__BODY_SEQ_FORK, give_seq_fork, take_seq_fork},
};

static bool known_verb(uint32_t verb) { return verb >= OSCAR_HELLO && verb < OSCAR_VERBS; }

int oscar_reply_encode(const struct oscar_reply *reply, uint8_t *buffer, size_t capacity, size_t *ret_bytes) {
    Oscar__V1__Reply message = OSCAR__V1__REPLY__INIT;
    union body body;
    if (!known_verb(reply->verb) || reply->error > 0)
        return OSCAR_ERR_INVALID;
    message.id = reply->id;
    message.verb = reply->verb;
    message.error = reply->error;
    if (reply->error != 0 && !oscar_wire_give_string(reply->cause, OSCAR_CAUSE_BYTES, &message.cause))
        return OSCAR_ERR_INVALID;
    if (reply->error == 0 && verbs[reply->verb].give != NULL) {
        if (!verbs[reply->verb].give(reply, &body))
            return OSCAR_ERR_INVALID;
        message.body_case = verbs[reply->verb].body;
        message.hello = &body.hello; /* every body begins at the union's address */
    }
    return oscar_wire_pack(&message.base, buffer, capacity, ret_bytes);
}

static int check_body(const Oscar__V1__Reply *message, struct oscar_cause *cause) {
    if (!known_verb(message->verb))
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL,
                          "reply %" PRIu64 " answers verb %" PRIu32 ", which this version does not know", message->id,
                          message->verb);
    if (message->error > 0)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "reply %" PRIu64 " has error %" PRId32 ": errors are negative",
                          message->id, message->error);
    /* Absent is the body's case too (0 in the table), and the only one that an error may have. */
    if (message->body_case != (message->error == 0 ? verbs[message->verb].body : OSCAR__V1__REPLY__BODY__NOT_SET))
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "reply %" PRIu64 " to %s has body %d", message->id,
                          oscar_verb_name((enum oscar_verb)message->verb), (int)message->body_case);
    return OSCAR_OK;
}

int oscar_reply_decode(const uint8_t *bytes, size_t size, struct oscar_reply *ret, struct oscar_cause *cause) {
    _Alignas(OSCAR_WIRE_ALIGNMENT) uint8_t memory[ARENA_BYTES];
    struct oscar_wire_arena arena;
    int r;
    oscar_wire_arena_init(&arena, memory, sizeof(memory));
    const Oscar__V1__Reply *message =
        (const Oscar__V1__Reply *)oscar_wire_unpack(&arena, &oscar__v1__reply__descriptor, bytes, size);
    if (message == NULL)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "a reply of %zu bytes is malformed or too large", size);
    if ((r = check_body(message, cause)) < 0)
        return r;
    struct oscar_reply reply;
    memset(&reply, 0, sizeof(reply)); /* also the bytes of the body that this verb does not use */
    reply.id = message->id;
    reply.verb = (enum oscar_verb)message->verb;
    reply.error = message->error;
    size_t length = strlen(message->cause);
    if (length >= OSCAR_CAUSE_BYTES)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "cause has %zu bytes: at most %u", length, OSCAR_CAUSE_BYTES - 1);
    memcpy(reply.cause, message->cause, length + 1);
    oscar_text_clean(reply.cause, length);
    if (message->body_case != OSCAR__V1__REPLY__BODY__NOT_SET &&
        (r = verbs[reply.verb].take(message, &reply, cause)) < 0)
        return r;
    *ret = reply;
    return OSCAR_OK;
}
