/* SPDX-License-Identifier: Apache-2.0 */
/* Administration: requests of oscarctl and the daemon's replies, which may be long lists. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "proto/cleanup.h"
#include "proto/oscar.pb-c.h"
#include "proto/text.h"
#include "proto/wire.h"
#include "proto/wire_arena.h"
#include "proto/wire_event.h"
#include "proto/wire_field.h"

#define REQUEST_ARENA_BYTES 4096U
/* OSCAR_MAX_METRICS metrics with texts of full length take 0.3 MiB, a snapshot less; the rest is room for new fields. */
#define REPLY_ARENA_BYTES (UINT32_C(512) << 10)

static int pack(const ProtobufCMessage *message, uint8_t **ret_buffer, size_t *ret_bytes) {
    size_t capacity = protobuf_c_message_get_packed_size(message);
    if (capacity > OSCAR_MAX_ADMIN_BYTES)
        return OSCAR_ERR_LIMIT;
    uint8_t *buffer = malloc(capacity + 1); /* never of size 0 */
    if (buffer == NULL)
        return OSCAR_ERR_NO_MEMORY;
    *ret_bytes = protobuf_c_message_pack(message, buffer);
    *ret_buffer = buffer;
    return OSCAR_OK;
}

/* --- requests --- */

int oscar_admin_request_encode(const struct oscar_admin_request *request, uint8_t **ret_buffer, size_t *ret_bytes) {
    Oscar__V1__AdminRequest message = OSCAR__V1__ADMIN_REQUEST__INIT;
    Oscar__V1__StatsQuery stats = OSCAR__V1__STATS_QUERY__INIT;
    Oscar__V1__FlushQuery flush = OSCAR__V1__FLUSH_QUERY__INIT;
    Oscar__V1__VersionQuery version = OSCAR__V1__VERSION_QUERY__INIT;
    Oscar__V1__SnapshotQuery snapshot = OSCAR__V1__SNAPSHOT_QUERY__INIT;
    message.id = request->id;
    message.body_case = (Oscar__V1__AdminRequest__BodyCase)request->verb; /* verbs are the field numbers */
    switch (request->verb) {
    case OSCAR_ADMIN_STATS:
        message.stats = &stats;
        break;
    case OSCAR_ADMIN_FLUSH:
        if (request->flush_model)
            flush.model = oscar_wire_give_bytes(request->model.bytes, OSCAR_DIGEST_BYTES);
        message.flush = &flush;
        break;
    case OSCAR_ADMIN_VERSION:
        message.version = &version;
        break;
    case OSCAR_ADMIN_SNAPSHOT:
        snapshot.cursor = request->cursor;
        message.snapshot = &snapshot;
        break;
    default:
        return OSCAR_ERR_INVALID;
    }
    return pack(&message.base, ret_buffer, ret_bytes);
}

int oscar_admin_request_decode(const uint8_t *bytes, size_t size, struct oscar_admin_request *ret,
                               struct oscar_cause *cause) {
    _Alignas(OSCAR_WIRE_ALIGNMENT) uint8_t memory[REQUEST_ARENA_BYTES];
    struct oscar_wire_arena arena;
    int r;
    oscar_wire_arena_init(&arena, memory, sizeof(memory));
    const Oscar__V1__AdminRequest *message =
        (const Oscar__V1__AdminRequest *)oscar_wire_unpack(&arena, &oscar__v1__admin_request__descriptor, bytes, size);
    if (message == NULL)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "an admin request of %zu bytes is malformed or too large", size);
    struct oscar_admin_request request;
    memset(&request, 0, sizeof(request));
    request.id = message->id;
    request.verb = (enum oscar_admin_verb)message->body_case;
    switch (message->body_case) {
    case OSCAR__V1__ADMIN_REQUEST__BODY_STATS:
    case OSCAR__V1__ADMIN_REQUEST__BODY_VERSION:
        break;
    case OSCAR__V1__ADMIN_REQUEST__BODY_FLUSH:
        request.flush_model = message->flush->model.len != 0;
        if ((r = oscar_wire_take_optional("model", &message->flush->model, request.model.bytes, OSCAR_DIGEST_BYTES,
                                          cause)) < 0)
            return r;
        break;
    case OSCAR__V1__ADMIN_REQUEST__BODY_SNAPSHOT:
        request.cursor = message->snapshot->cursor;
        break;
    default:
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "admin request %" PRIu64 " has no body that this version knows",
                          message->id);
    }
    *ret = request;
    return OSCAR_OK;
}

/* --- replies: encoding --- */

static int encode_stats(Oscar__V1__AdminReply *message, const struct oscar_admin_reply *reply, uint8_t **ret_buffer,
                        size_t *ret_bytes) {
    Oscar__V1__StatsReply stats = OSCAR__V1__STATS_REPLY__INIT;
    if (reply->metrics > OSCAR_MAX_METRICS)
        return OSCAR_ERR_INVALID;
    _cleanup_free_ Oscar__V1__Metric *metric = calloc((size_t)reply->metrics + 1, sizeof(*metric));
    _cleanup_free_ Oscar__V1__Metric **pointer = calloc((size_t)reply->metrics + 1, sizeof(Oscar__V1__Metric *));
    if (metric == NULL || pointer == NULL)
        return OSCAR_ERR_NO_MEMORY;
    for (uint32_t i = 0; i < reply->metrics; i++) {
        const struct oscar_metric *from = &reply->metric[i];
        oscar__v1__metric__init(&metric[i]);
        if (!oscar_wire_give_string(from->name, sizeof(from->name), &metric[i].name) ||
            !oscar_wire_give_string(from->labels, sizeof(from->labels), &metric[i].labels) ||
            !oscar_wire_give_string(from->unit, sizeof(from->unit), &metric[i].unit) ||
            !oscar_wire_give_string(from->help, sizeof(from->help), &metric[i].help))
            return OSCAR_ERR_INVALID;
        metric[i].counter = from->counter;
        metric[i].value = from->value;
        pointer[i] = &metric[i];
    }
    stats.n_metrics = reply->metrics;
    stats.metrics = pointer;
    message->body_case = OSCAR__V1__ADMIN_REPLY__BODY_STATS;
    message->stats = &stats;
    return pack(&message->base, ret_buffer, ret_bytes);
}

static int encode_flush(Oscar__V1__AdminReply *message, const struct oscar_admin_reply *reply, uint8_t **ret_buffer,
                        size_t *ret_bytes) {
    Oscar__V1__FlushReply flush = OSCAR__V1__FLUSH_REPLY__INIT;
    flush.pages_freed = reply->flush.pages_freed;
    flush.bytes_freed = reply->flush.bytes_freed;
    flush.pages_deferred = reply->flush.pages_deferred;
    flush.bytes_deferred = reply->flush.bytes_deferred;
    message->body_case = OSCAR__V1__ADMIN_REPLY__BODY_FLUSH;
    message->flush = &flush;
    return pack(&message->base, ret_buffer, ret_bytes);
}

static int encode_version(Oscar__V1__AdminReply *message, const struct oscar_admin_reply *reply, uint8_t **ret_buffer,
                          size_t *ret_bytes) {
    Oscar__V1__VersionReply version = OSCAR__V1__VERSION_REPLY__INIT;
    version.major = reply->version.major;
    version.minor = reply->version.minor;
    version.incarnation = reply->version.incarnation;
    if (!oscar_wire_give_string(reply->version.version, sizeof(reply->version.version), &version.version) ||
        !oscar_wire_give_string(reply->version.backend, sizeof(reply->version.backend), &version.backend) ||
        !oscar_wire_give_string(reply->version.device, sizeof(reply->version.device), &version.device) ||
        !oscar_wire_give_string(reply->version.io_engine, sizeof(reply->version.io_engine), &version.io_engine))
        return OSCAR_ERR_INVALID;
    message->body_case = OSCAR__V1__ADMIN_REPLY__BODY_VERSION;
    message->version = &version;
    return pack(&message->base, ret_buffer, ret_bytes);
}

static int encode_snapshot(Oscar__V1__AdminReply *message, const struct oscar_admin_reply *reply, uint8_t **ret_buffer,
                           size_t *ret_bytes) {
    Oscar__V1__SnapshotReply snapshot = OSCAR__V1__SNAPSHOT_REPLY__INIT;
    if (reply->events > OSCAR_MAX_SNAPSHOT_PAGES)
        return OSCAR_ERR_INVALID;
    _cleanup_free_ Oscar__V1__Event *event = calloc((size_t)reply->events + 1, sizeof(*event));
    _cleanup_free_ Oscar__V1__Event **pointer = calloc((size_t)reply->events + 1, sizeof(Oscar__V1__Event *));
    if (event == NULL || pointer == NULL)
        return OSCAR_ERR_NO_MEMORY;
    for (uint32_t i = 0; i < reply->events; i++) {
        if (!oscar_wire_give_event(&reply->event[i], &event[i]))
            return OSCAR_ERR_INVALID;
        pointer[i] = &event[i];
    }
    snapshot.incarnation = reply->snapshot.incarnation;
    snapshot.sequence = reply->snapshot.sequence;
    snapshot.next_cursor = reply->snapshot.next_cursor;
    snapshot.n_pages = reply->events;
    snapshot.pages = pointer;
    message->body_case = OSCAR__V1__ADMIN_REPLY__BODY_SNAPSHOT;
    message->snapshot = &snapshot;
    return pack(&message->base, ret_buffer, ret_bytes);
}

/* --- replies: decoding --- */

static int take_stats(const Oscar__V1__AdminReply *message, struct oscar_admin_reply *ret, struct oscar_cause *cause) {
    const Oscar__V1__StatsReply *stats = message->stats;
    int r;
    if (stats->n_metrics > OSCAR_MAX_METRICS)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "%zu metrics: at most %u", stats->n_metrics, OSCAR_MAX_METRICS);
    _cleanup_free_ struct oscar_metric *metric = calloc(stats->n_metrics + 1, sizeof(*metric));
    if (metric == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for %zu metrics", stats->n_metrics);
    for (size_t i = 0; i < stats->n_metrics; i++) {
        const Oscar__V1__Metric *from = stats->metrics[i];
        struct oscar_metric *to = &metric[i];
        if ((r = oscar_wire_take_string("metric name", from->name, to->name, sizeof(to->name), cause)) < 0 ||
            (r = oscar_wire_take_string("metric labels", from->labels, to->labels, sizeof(to->labels), cause)) < 0 ||
            (r = oscar_wire_take_string("metric unit", from->unit, to->unit, sizeof(to->unit), cause)) < 0 ||
            (r = oscar_wire_take_string("metric help", from->help, to->help, sizeof(to->help), cause)) < 0)
            return r;
        to->counter = from->counter != 0;
        to->value = from->value;
    }
    ret->metrics = (uint32_t)stats->n_metrics;
    ret->metric = TAKE_PTR(metric);
    return OSCAR_OK;
}

static int take_flush(const Oscar__V1__AdminReply *message, struct oscar_admin_reply *ret, struct oscar_cause *cause) {
    (void)cause;
    ret->flush.pages_freed = message->flush->pages_freed;
    ret->flush.bytes_freed = message->flush->bytes_freed;
    ret->flush.pages_deferred = message->flush->pages_deferred;
    ret->flush.bytes_deferred = message->flush->bytes_deferred;
    return OSCAR_OK;
}

static int take_version(const Oscar__V1__AdminReply *message, struct oscar_admin_reply *ret,
                        struct oscar_cause *cause) {
    const Oscar__V1__VersionReply *from = message->version;
    int r;
    ret->version.major = from->major;
    ret->version.minor = from->minor;
    ret->version.incarnation = from->incarnation;
    if ((r = oscar_wire_take_string("version", from->version, ret->version.version, sizeof(ret->version.version),
                                    cause)) < 0 ||
        (r = oscar_wire_take_string("backend", from->backend, ret->version.backend, sizeof(ret->version.backend),
                                    cause)) < 0 ||
        (r = oscar_wire_take_string("device", from->device, ret->version.device, sizeof(ret->version.device), cause)) <
            0)
        return r;
    return oscar_wire_take_string("io_engine", from->io_engine, ret->version.io_engine, sizeof(ret->version.io_engine),
                                  cause);
}

static int take_snapshot(const Oscar__V1__AdminReply *message, struct oscar_admin_reply *ret,
                         struct oscar_cause *cause) {
    const Oscar__V1__SnapshotReply *snapshot = message->snapshot;
    int r;
    if (snapshot->n_pages > OSCAR_MAX_SNAPSHOT_PAGES)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "%zu pages in a snapshot reply: at most %u", snapshot->n_pages,
                          OSCAR_MAX_SNAPSHOT_PAGES);
    _cleanup_free_ struct oscar_event *event = calloc(snapshot->n_pages + 1, sizeof(*event));
    if (event == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for %zu pages", snapshot->n_pages);
    for (size_t i = 0; i < snapshot->n_pages; i++) {
        if ((r = oscar_wire_take_event(snapshot->pages[i], &event[i], cause)) < 0)
            return r;
    }
    ret->snapshot.incarnation = snapshot->incarnation;
    ret->snapshot.sequence = snapshot->sequence;
    ret->snapshot.next_cursor = snapshot->next_cursor;
    ret->events = (uint32_t)snapshot->n_pages;
    ret->event = TAKE_PTR(event);
    return OSCAR_OK;
}

/* --- replies: the table --- */

static const struct {
    Oscar__V1__AdminReply__BodyCase body;
    int (*encode)(Oscar__V1__AdminReply *message, const struct oscar_admin_reply *reply, uint8_t **ret_buffer,
                  size_t *ret_bytes);
    int (*take)(const Oscar__V1__AdminReply *message, struct oscar_admin_reply *ret, struct oscar_cause *cause);
} verbs[] = {
    [OSCAR_ADMIN_STATS] = {OSCAR__V1__ADMIN_REPLY__BODY_STATS, encode_stats, take_stats},
    [OSCAR_ADMIN_FLUSH] = {OSCAR__V1__ADMIN_REPLY__BODY_FLUSH, encode_flush, take_flush},
    [OSCAR_ADMIN_VERSION] = {OSCAR__V1__ADMIN_REPLY__BODY_VERSION, encode_version, take_version},
    [OSCAR_ADMIN_SNAPSHOT] = {OSCAR__V1__ADMIN_REPLY__BODY_SNAPSHOT, encode_snapshot, take_snapshot},
};

static bool known_verb(uint32_t verb) { return verb >= OSCAR_ADMIN_STATS && verb <= OSCAR_ADMIN_SNAPSHOT; }

int oscar_admin_reply_encode(const struct oscar_admin_reply *reply, uint8_t **ret_buffer, size_t *ret_bytes) {
    Oscar__V1__AdminReply message = OSCAR__V1__ADMIN_REPLY__INIT;
    if (!known_verb(reply->verb) || reply->error > 0)
        return OSCAR_ERR_INVALID;
    message.id = reply->id;
    message.verb = reply->verb;
    message.error = reply->error;
    if (reply->error == 0)
        return verbs[reply->verb].encode(&message, reply, ret_buffer, ret_bytes);
    if (!oscar_wire_give_string(reply->cause, OSCAR_CAUSE_BYTES, &message.cause))
        return OSCAR_ERR_INVALID;
    return pack(&message.base, ret_buffer, ret_bytes);
}

static int take_reply(const Oscar__V1__AdminReply *message, struct oscar_admin_reply *ret, struct oscar_cause *cause) {
    if (!known_verb(message->verb) || message->error > 0 ||
        message->body_case != (message->error == 0 ? verbs[message->verb].body : OSCAR__V1__ADMIN_REPLY__BODY__NOT_SET))
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL,
                          "admin reply %" PRIu64 ": verb %" PRIu32 ", error %" PRId32 " and body %d do not go together",
                          message->id, message->verb, message->error, (int)message->body_case);
    size_t length = strlen(message->cause);
    if (length >= OSCAR_CAUSE_BYTES)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "cause has %zu bytes: at most %u", length, OSCAR_CAUSE_BYTES - 1);
    struct oscar_admin_reply reply;
    memset(&reply, 0, sizeof(reply));
    reply.id = message->id;
    reply.verb = (enum oscar_admin_verb)message->verb;
    reply.error = message->error;
    memcpy(reply.cause, message->cause, length + 1);
    oscar_text_clean(reply.cause, length);
    if (message->error == 0) {
        int r = verbs[reply.verb].take(message, &reply, cause);
        if (r < 0)
            return r;
    }
    *ret = reply;
    return OSCAR_OK;
}

int oscar_admin_reply_decode(const uint8_t *bytes, size_t size, struct oscar_admin_reply *ret,
                             struct oscar_cause *cause) {
    struct oscar_wire_arena arena;
    if (size > OSCAR_MAX_ADMIN_BYTES)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "an admin reply of %zu bytes: at most %u", size,
                          OSCAR_MAX_ADMIN_BYTES);
    _cleanup_free_ void *memory = malloc(REPLY_ARENA_BYTES);
    if (memory == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory to read an admin reply");
    oscar_wire_arena_init(&arena, memory, REPLY_ARENA_BYTES);
    const Oscar__V1__AdminReply *message =
        (const Oscar__V1__AdminReply *)oscar_wire_unpack(&arena, &oscar__v1__admin_reply__descriptor, bytes, size);
    if (message == NULL)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "an admin reply of %zu bytes is malformed or too large", size);
    return take_reply(message, ret, cause);
}

void oscar_admin_reply_free(struct oscar_admin_reply *reply) {
    free(reply->metric);
    free(reply->event);
    reply->metric = NULL;
    reply->event = NULL;
    reply->metrics = reply->events = 0;
}
