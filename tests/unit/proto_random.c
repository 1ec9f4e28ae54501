/* SPDX-License-Identifier: Apache-2.0 */
#include "proto_random.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "proto/window.h"

static uint64_t state_;

void random_seed(void) {
    const char *given = getenv("OSCAR_TEST_SEED");
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    state_ = given != NULL ? strtoull(given, NULL, 0) : (uint64_t)now.tv_sec * 1000000007U + (uint64_t)now.tv_nsec;
    (void)fprintf(stderr, "seed: OSCAR_TEST_SEED=%" PRIu64 "\n", state_);
}

/* splitmix64 */
uint64_t random_u64(void) {
    uint64_t z = state_ += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

uint32_t random_below(uint32_t limit) { return (uint32_t)(random_u64() % limit); }

uint64_t random_number(void) {
    switch (random_below(4)) {
    case 0:
        return random_below(3);
    case 1:
        return UINT64_MAX - random_below(2);
    default:
        return random_u64() >> random_below(64);
    }
}

void random_text(char *ret, size_t capacity, bool full) {
    static const char *const characters[] = {"a", "Z", "7", "-", " ", "é", "€", "\xf0\x9f\x92\xa1"};
    size_t length = full ? capacity - 1 : random_below((uint32_t)capacity), at = 0;
    memset(ret, 0, capacity);
    while (at < length) {
        const char *next = characters[random_below(8)];
        size_t bytes = strlen(next);
        if (bytes > length - at) {
            next = "x";
            bytes = 1;
        }
        memcpy(ret + at, next, bytes);
        at += bytes;
    }
}

void random_bytes(void *ret, size_t size) {
    for (size_t i = 0; i < size; i++)
        ((uint8_t *)ret)[i] = (uint8_t)random_u64();
}

/* Of at most `limit`; with `full` the largest, which takes the most bytes on the wire. */
static uint32_t count(uint32_t limit, bool full) { return full ? limit : random_below(limit + 1); }

static uint64_t number(bool full) { return full ? UINT64_MAX : random_number(); }

void random_request(enum oscar_verb verb, bool full, struct oscar_request *ret) {
    memset(ret, 0, sizeof(*ret));
    ret->id = number(full);
    ret->verb = verb;
    switch (verb) {
    case OSCAR_HELLO:
        ret->hello.major = (uint32_t)number(full);
        ret->hello.minor = (uint32_t)number(full);
        ret->hello.features = number(full);
        random_text(ret->hello.client_name, OSCAR_NAME_BYTES, full);
        random_text(ret->hello.group, OSCAR_NAME_BYTES, full);
        break;
    case OSCAR_MODEL_OPEN: {
        struct oscar_identity *identity = &ret->model_open.identity;
        random_bytes(identity->weights.bytes, OSCAR_DIGEST_BYTES);
        random_bytes(identity->rope.bytes, OSCAR_DIGEST_BYTES);
        identity->geometry = (struct oscar_geometry){
            (uint32_t)number(full), (uint32_t)number(full), (uint32_t)number(full), (uint32_t)number(full),
            (uint32_t)number(full), (uint32_t)number(full), (uint32_t)number(full), (uint32_t)number(full)};
        identity->format = (uint32_t)number(full);
        identity->layout = (uint32_t)number(full);
        identity->shard_rank = (uint32_t)number(full);
        identity->shard_size = (uint32_t)number(full);
        random_text(identity->revision, OSCAR_NAME_BYTES, full);
        random_text(identity->adapter, OSCAR_NAME_BYTES, full);
        random_text(ret->model_open.calibration, OSCAR_NAME_BYTES, full);
        break;
    }
    case OSCAR_MODEL_CLOSE:
        ret->model_close.model = number(full);
        break;
    case OSCAR_PROBE:
        ret->probe.model = number(full);
        ret->probe.tokens = (uint32_t)number(full);
        ret->probe.lease = full || random_below(2) != 0;
        break;
    case OSCAR_LEASE_ADOPT:
        ret->lease_adopt.model = number(full);
        random_bytes(ret->lease_adopt.secret, OSCAR_LEASE_SECRET_BYTES);
        break;
    case OSCAR_LEASE_CLOSE:
        ret->lease_close.lease = number(full);
        break;
    case OSCAR_SEQ_OPEN:
        ret->seq_open.model = number(full);
        ret->seq_open.tokens = (uint32_t)number(full);
        ret->seq_open.dense_tail = full || random_below(2) != 0;
        break;
    case OSCAR_SEQ_WAIT:
        ret->seq_wait.seq = number(full);
        ret->seq_wait.timeout_ms = (uint32_t)number(full);
        break;
    case OSCAR_SEQ_EXTEND:
        ret->seq_extend.seq = number(full);
        ret->seq_extend.tokens = (uint32_t)number(full);
        ret->seq_extend.fence = number(full);
        break;
    case OSCAR_SEQ_RESERVE:
        ret->seq_reserve.seq = number(full);
        ret->seq_reserve.tokens = (uint32_t)number(full);
        break;
    case OSCAR_SEQ_ADVANCE:
        ret->seq_advance.seq = number(full);
        ret->seq_advance.tokens = (uint32_t)number(full);
        ret->seq_advance.fence = number(full);
        break;
    case OSCAR_SEQ_FORK:
        ret->seq_fork.seq = number(full);
        ret->seq_fork.fence = number(full);
        break;
    case OSCAR_SEQ_CLOSE:
        ret->seq_close.seq = number(full);
        ret->seq_close.fence = number(full);
        break;
    default:
        break;
    }
}

static void random_model_open_reply(bool full, struct oscar_reply *ret) {
    ret->model_open.model = number(full);
    random_bytes(ret->model_open.model_digest.bytes, OSCAR_DIGEST_BYTES);
    random_bytes(ret->model_open.calibration_digest.bytes, OSCAR_DIGEST_BYTES);
    ret->model_open.calibration_bytes = number(full);
    ret->model_open.turns_bytes = number(full);
    ret->model_open.turns_pages = count(OSCAR_MAX_SEQUENCE_PAGES, full);
    for (unsigned form = 0; form < OSCAR_FORMS; form++) {
        ret->model_open.arenas[form].page_bytes = number(full);
        ret->model_open.arenas[form].chunk_pages = (uint32_t)number(full);
        ret->model_open.arenas[form].max_pages = full ? OSCAR_PAGE_ID_MASK + 1 : random_number() & OSCAR_PAGE_ID_MASK;
    }
}

static void random_fork_reply(bool full, struct oscar_reply *ret) {
    ret->seq_fork.seq = number(full);
    ret->seq_fork.fence_slot = count(OSCAR_FENCE_SLOTS - 1, full);
    ret->seq_fork.committed_tokens = count(OSCAR_MAX_SEQUENCE_TOKENS, full);
    ret->seq_fork.updates = count(OSCAR_MAX_UPDATES, full);
    ret->seq_fork.copies = count(OSCAR_MAX_COPIES, full);
    for (uint32_t i = 0; i < ret->seq_fork.copies; i++) {
        ret->seq_fork.copy[i].from = number(full);
        ret->seq_fork.copy[i].to = number(full);
        ret->seq_fork.copy[i].page = count(OSCAR_MAX_SEQUENCE_PAGES - 1, full);
        ret->seq_fork.copy[i].rows = count(OSCAR_PAGE_TOKENS, full);
    }
}

void random_reply(enum oscar_verb verb, bool full, struct oscar_reply *ret) {
    memset(ret, 0, sizeof(*ret));
    ret->id = number(full);
    ret->verb = verb;
    switch (verb) {
    case OSCAR_HELLO:
        ret->hello.major = (uint32_t)number(full);
        ret->hello.minor = (uint32_t)number(full);
        ret->hello.features = number(full);
        ret->hello.incarnation = number(full);
        ret->hello.session = number(full);
        random_text(ret->hello.backend, OSCAR_NAME_BYTES, full);
        random_text(ret->hello.device, OSCAR_NAME_BYTES, full);
        random_text(ret->hello.tenant, OSCAR_NAME_BYTES, full);
        random_text(ret->hello.version, OSCAR_NAME_BYTES, full);
        ret->hello.window_bytes = number(full);
        ret->hello.fence_bytes = number(full);
        break;
    case OSCAR_MODEL_OPEN:
        random_model_open_reply(full, ret);
        break;
    case OSCAR_PROBE:
        ret->probe.hit_tokens = count(OSCAR_MAX_SEQUENCE_TOKENS, full);
        ret->probe.in_flight_tokens = count(OSCAR_MAX_SEQUENCE_TOKENS, full);
        ret->probe.lease = number(full);
        if (ret->probe.lease != 0)
            random_bytes(ret->probe.secret, OSCAR_LEASE_SECRET_BYTES);
        break;
    case OSCAR_LEASE_ADOPT:
        ret->lease_adopt.lease = number(full);
        ret->lease_adopt.hit_tokens = count(OSCAR_MAX_SEQUENCE_TOKENS, full);
        break;
    case OSCAR_SEQ_OPEN:
        ret->seq_open.seq = number(full);
        ret->seq_open.fence_slot = count(OSCAR_FENCE_SLOTS - 1, full);
        ret->seq_open.hit_tokens = count(OSCAR_MAX_SEQUENCE_TOKENS, full);
        ret->seq_open.in_flight_tokens = count(OSCAR_MAX_SEQUENCE_TOKENS, full);
        ret->seq_open.updates = count(OSCAR_MAX_UPDATES, full);
        break;
    case OSCAR_SEQ_WAIT:
        ret->seq_wait.available_tokens = count(OSCAR_MAX_SEQUENCE_TOKENS, full);
        break;
    case OSCAR_SEQ_EXTEND:
        ret->seq_extend.hit_tokens = count(OSCAR_MAX_SEQUENCE_TOKENS, full);
        ret->seq_extend.in_flight_tokens = count(OSCAR_MAX_SEQUENCE_TOKENS, full);
        ret->seq_extend.updates = count(OSCAR_MAX_UPDATES, full);
        break;
    case OSCAR_SEQ_RESERVE:
        ret->seq_reserve.reserved_tokens = count(OSCAR_MAX_SEQUENCE_TOKENS, full);
        ret->seq_reserve.updates = count(OSCAR_MAX_UPDATES, full);
        break;
    case OSCAR_SEQ_ADVANCE:
        ret->seq_advance.committed_tokens = count(OSCAR_MAX_SEQUENCE_TOKENS, full);
        ret->seq_advance.sealed_tokens = count(OSCAR_MAX_SEQUENCE_TOKENS, full);
        ret->seq_advance.updates = count(OSCAR_MAX_UPDATES, full);
        break;
    case OSCAR_SEQ_FORK:
        random_fork_reply(full, ret);
        break;
    default:
        break;
    }
}

void random_notice(enum oscar_notice_kind kind, bool full, struct oscar_notice *ret) {
    memset(ret, 0, sizeof(*ret));
    ret->kind = kind;
    ret->chunks = full ? OSCAR_MAX_RECORD_FDS : 1 + random_below(OSCAR_MAX_RECORD_FDS);
    for (uint32_t i = 0; i < ret->chunks; i++) {
        ret->chunk[i].model = number(full);
        ret->chunk[i].form = (enum oscar_form)count(OSCAR_FORMS - 1, full);
        ret->chunk[i].index = (uint32_t)number(full);
        ret->chunk[i].generation = number(full);
        if (kind == OSCAR_NOTICE_CHUNKS) {
            ret->chunk[i].bytes = number(full);
            ret->chunk[i].writable = full || random_below(2) != 0;
        }
    }
}

void random_event(enum oscar_event_kind kind, bool full, struct oscar_event *ret) {
    memset(ret, 0, sizeof(*ret));
    ret->incarnation = number(full);
    ret->sequence = number(full);
    ret->kind = kind;
    ret->has_model = full || kind != OSCAR_EVENT_CLEARED || random_below(2) != 0;
    if (ret->has_model) {
        random_bytes(ret->model.bytes, OSCAR_DIGEST_BYTES);
        ret->model.bytes[0] |= 1;
    }
    if (kind == OSCAR_EVENT_CLEARED)
        return;
    random_bytes(ret->page.bytes, OSCAR_DIGEST_BYTES);
    random_bytes(ret->parent.bytes, OSCAR_DIGEST_BYTES);
    ret->depth = count(OSCAR_MAX_SEQUENCE_PAGES - 1, full);
    ret->form = (enum oscar_form)count(OSCAR_FORMS - 1, full);
}

void random_admin_request(enum oscar_admin_verb verb, struct oscar_admin_request *ret) {
    memset(ret, 0, sizeof(*ret));
    ret->id = random_number();
    ret->verb = verb;
    if (verb == OSCAR_ADMIN_SNAPSHOT)
        ret->cursor = random_number();
    if (verb == OSCAR_ADMIN_FLUSH && random_below(2) != 0) {
        ret->flush_model = true;
        random_bytes(ret->model.bytes, OSCAR_DIGEST_BYTES);
    }
}

void random_admin_reply(enum oscar_admin_verb verb, bool full, struct oscar_admin_reply *ret) {
    memset(ret, 0, sizeof(*ret));
    ret->id = number(full);
    ret->verb = verb;
    switch (verb) {
    case OSCAR_ADMIN_STATS:
        ret->metrics = full ? OSCAR_MAX_METRICS : random_below(20);
        ret->metric = calloc((size_t)ret->metrics + 1, sizeof(*ret->metric));
        for (uint32_t i = 0; i < ret->metrics; i++) {
            struct oscar_metric *metric = &ret->metric[i];
            random_text(metric->name, sizeof(metric->name), full);
            random_text(metric->labels, sizeof(metric->labels), full);
            random_text(metric->unit, sizeof(metric->unit), full);
            random_text(metric->help, sizeof(metric->help), full);
            metric->counter = full || random_below(2) != 0;
            metric->value = number(full);
        }
        break;
    case OSCAR_ADMIN_FLUSH:
        ret->flush.pages_freed = number(full);
        ret->flush.bytes_freed = number(full);
        ret->flush.pages_deferred = number(full);
        ret->flush.bytes_deferred = number(full);
        break;
    case OSCAR_ADMIN_VERSION:
        random_text(ret->version.version, OSCAR_NAME_BYTES, full);
        random_text(ret->version.backend, OSCAR_NAME_BYTES, full);
        random_text(ret->version.device, OSCAR_NAME_BYTES, full);
        random_text(ret->version.io_engine, sizeof(ret->version.io_engine), full);
        ret->version.major = (uint32_t)number(full);
        ret->version.minor = (uint32_t)number(full);
        ret->version.incarnation = number(full);
        break;
    case OSCAR_ADMIN_SNAPSHOT:
        ret->snapshot.incarnation = number(full);
        ret->snapshot.sequence = number(full);
        ret->snapshot.next_cursor = number(full);
        ret->events = full ? OSCAR_MAX_SNAPSHOT_PAGES : random_below(20);
        ret->event = calloc((size_t)ret->events + 1, sizeof(*ret->event));
        for (uint32_t i = 0; i < ret->events; i++)
            random_event(OSCAR_EVENT_STORED, full, &ret->event[i]);
        break;
    }
}

size_t random_damage(uint8_t *bytes, size_t size, size_t capacity) {
    for (uint32_t changes = 1 + random_below(4); changes > 0 && size > 0; changes--) {
        size_t at = random_below((uint32_t)size);
        switch (random_below(5)) {
        case 0:
            bytes[at] ^= (uint8_t)(1U << random_below(8));
            break;
        case 1:
            bytes[at] = (uint8_t)random_u64();
            break;
        case 2:
            size = at;
            break;
        case 3:
            if (size < capacity) {
                memmove(bytes + at + 1, bytes + at, size - at);
                bytes[at] = (uint8_t)random_u64();
                size++;
            }
            break;
        default:
            memmove(bytes + at, bytes + at + 1, size - at - 1);
            size--;
            break;
        }
    }
    return size;
}
