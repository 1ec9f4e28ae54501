/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Messages as plain C structs, and their encoding by protobuf-c, whose generated types stay behind wire*.c. Decoding validates:
 * unknown or absent bodies, wrong digest sizes, over-long strings and too many elements are OSCAR_ERR_PROTOCOL. Strings are
 * bounded arrays, so a decoded message owns no memory. Decoding takes memory only from a bounded arena on the stack.
 */
#ifndef OSCAR_PROTO_WIRE_H
#define OSCAR_PROTO_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/cause.h"
#include "proto/digest.h"
#include "proto/frame.h"
#include "proto/page.h"

#define OSCAR_LEASE_SECRET_BYTES 16U
#define OSCAR_MAX_COPIES 8U
#define OSCAR_MAX_METRICS 512U
#define OSCAR_MAX_SNAPSHOT_PAGES 256U

enum oscar_verb {
    OSCAR_HELLO = 2,
    OSCAR_MODEL_OPEN = 3,
    OSCAR_MODEL_CLOSE = 4,
    OSCAR_PROBE = 5,
    OSCAR_LEASE_ADOPT = 6,
    OSCAR_LEASE_CLOSE = 7,
    OSCAR_SEQ_OPEN = 8,
    OSCAR_SEQ_WAIT = 9,
    OSCAR_SEQ_EXTEND = 10,
    OSCAR_SEQ_RESERVE = 11,
    OSCAR_SEQ_ADVANCE = 12,
    OSCAR_SEQ_FORK = 13,
    OSCAR_SEQ_CLOSE = 14,
    OSCAR_PING = 15,
    OSCAR_VERBS = 16,
};
const char *oscar_verb_name(enum oscar_verb verb); /* "seq_open"; "unknown" */

struct oscar_request {
    uint64_t id;
    enum oscar_verb verb;
    union {
        struct {
            uint32_t major, minor;
            uint64_t features;
            char client_name[OSCAR_NAME_BYTES];
            char group[OSCAR_NAME_BYTES];
        } hello;
        struct {
            struct oscar_identity identity; /* calibration and tenant are left zero: the daemon fills them in */
            char calibration[OSCAR_NAME_BYTES];
        } model_open;
        struct {
            uint64_t model;
        } model_close;
        struct {
            uint64_t model;
            uint32_t tokens;
            bool lease;
        } probe;
        struct {
            uint64_t model;
            uint8_t secret[OSCAR_LEASE_SECRET_BYTES];
        } lease_adopt;
        struct {
            uint64_t lease;
        } lease_close;
        struct {
            uint64_t model;
            uint32_t tokens;
            bool dense_tail;
        } seq_open;
        struct {
            uint64_t seq;
            uint32_t timeout_ms;
        } seq_wait;
        struct {
            uint64_t seq;
            uint32_t tokens;
            uint64_t fence;
        } seq_extend;
        struct {
            uint64_t seq;
            uint32_t tokens;
        } seq_reserve;
        struct {
            uint64_t seq;
            uint32_t tokens;
            uint64_t fence;
        } seq_advance;
        struct {
            uint64_t seq;
            uint64_t fence;
        } seq_fork;
        struct {
            uint64_t seq;
            uint64_t fence;
        } seq_close;
    };
};

struct oscar_arena_info {
    uint64_t page_bytes;
    uint32_t chunk_pages;
    uint64_t max_pages;
};

struct oscar_page_copy {
    oscar_page_ref from, to;
    uint32_t page;
    uint32_t rows;
};

struct oscar_reply {
    uint64_t id;
    /* Of the request that it answers, on the wire too. Model_close, lease_close, seq_close and ping have no body in a
     * reply; an error has none either. */
    enum oscar_verb verb;
    int error; /* 0 or a negative enum oscar_error, perhaps one that a newer minor version added */
    char cause[OSCAR_CAUSE_BYTES];
    union {
        struct {
            uint32_t major, minor;
            uint64_t features, incarnation, session;
            char backend[OSCAR_NAME_BYTES], device[OSCAR_NAME_BYTES], tenant[OSCAR_NAME_BYTES],
                version[OSCAR_NAME_BYTES];
            uint64_t window_bytes, fence_bytes;
        } hello;
        struct {
            uint64_t model;
            struct oscar_digest model_digest, calibration_digest;
            uint64_t calibration_bytes, turns_bytes;
            uint32_t turns_pages;
            struct oscar_arena_info arenas[OSCAR_FORMS];
        } model_open;
        struct {
            uint32_t hit_tokens, in_flight_tokens;
            uint64_t lease; /* 0: none asked for */
            uint8_t secret[OSCAR_LEASE_SECRET_BYTES];
        } probe;
        struct {
            uint64_t lease;
            uint32_t hit_tokens;
        } lease_adopt;
        struct {
            uint64_t seq;
            uint32_t fence_slot, hit_tokens, in_flight_tokens, updates;
        } seq_open;
        struct {
            uint32_t available_tokens;
        } seq_wait;
        struct {
            uint32_t hit_tokens, in_flight_tokens, updates;
        } seq_extend;
        struct {
            uint32_t reserved_tokens, updates;
        } seq_reserve;
        struct {
            uint32_t committed_tokens, sealed_tokens, updates;
        } seq_advance;
        struct {
            uint64_t seq;
            uint32_t fence_slot, committed_tokens, updates, copies;
            struct oscar_page_copy copy[OSCAR_MAX_COPIES];
        } seq_fork;
    };
};

struct oscar_chunk_info {
    uint64_t model;
    enum oscar_form form;
    uint32_t index;
    uint64_t generation;
    uint64_t bytes;
    bool writable;
};

enum oscar_notice_kind { OSCAR_NOTICE_CHUNKS = 1, OSCAR_NOTICE_CHUNKS_GONE = 2 };

struct oscar_notice {
    enum oscar_notice_kind kind;
    uint32_t chunks;
    struct oscar_chunk_info chunk[OSCAR_MAX_RECORD_FDS]; /* GONE: bytes and writable are unused */
};

/* Encoders write at most `capacity` bytes: 0, OSCAR_ERR_LIMIT when it does not fit, OSCAR_ERR_INVALID for a verb, kind or
 * count that does not exist or a text without its terminator. Decoders: 0 or OSCAR_ERR_PROTOCOL, `ret` untouched on failure.
 * The caller matches a reply by its id and checks that `verb` is the one that it asked for. */
int oscar_request_encode(const struct oscar_request *request, uint8_t *buffer, size_t capacity, size_t *ret_bytes);
int oscar_request_decode(const uint8_t *bytes, size_t size, struct oscar_request *ret, struct oscar_cause *cause);
int oscar_reply_encode(const struct oscar_reply *reply, uint8_t *buffer, size_t capacity, size_t *ret_bytes);
int oscar_reply_decode(const uint8_t *bytes, size_t size, struct oscar_reply *ret, struct oscar_cause *cause);
int oscar_notice_encode(const struct oscar_notice *notice, uint8_t *buffer, size_t capacity, size_t *ret_bytes);
int oscar_notice_decode(const uint8_t *bytes, size_t size, struct oscar_notice *ret, struct oscar_cause *cause);

/* --- administration and events (nanomsg) --- */

enum oscar_admin_verb {
    OSCAR_ADMIN_STATS = 2,
    OSCAR_ADMIN_FLUSH = 3,
    OSCAR_ADMIN_VERSION = 4,
    OSCAR_ADMIN_SNAPSHOT = 5
};

struct oscar_admin_request {
    uint64_t id;
    enum oscar_admin_verb verb;
    bool flush_model; /* FLUSH: only `model` */
    struct oscar_digest model;
    uint64_t cursor; /* SNAPSHOT */
};

enum oscar_event_kind {
    OSCAR_EVENT_STORED = 1,
    OSCAR_EVENT_COMPRESSED = 2,
    OSCAR_EVENT_REMOVED = 3,
    OSCAR_EVENT_CLEARED = 4
};

struct oscar_event {
    uint64_t incarnation, sequence;
    enum oscar_event_kind kind;
    bool has_model;                          /* CLEARED of everything has none */
    struct oscar_digest model, page, parent; /* page and parent: not for CLEARED */
    uint32_t depth;
    enum oscar_form form;
};

struct oscar_metric {
    char name[OSCAR_NAME_BYTES], labels[OSCAR_NAME_BYTES], unit[32], help[OSCAR_NAME_BYTES];
    bool counter;
    uint64_t value;
};

struct oscar_admin_reply {
    uint64_t id;
    enum oscar_admin_verb verb;
    int error;
    char cause[OSCAR_CAUSE_BYTES];
    struct {
        uint64_t pages_freed, bytes_freed, pages_deferred, bytes_deferred;
    } flush;
    struct {
        char version[OSCAR_NAME_BYTES], backend[OSCAR_NAME_BYTES], device[OSCAR_NAME_BYTES], io_engine[32];
        uint32_t major, minor;
        uint64_t incarnation;
    } version;
    struct {
        uint64_t incarnation, sequence, next_cursor;
    } snapshot;
    uint32_t metrics;            /* STATS */
    struct oscar_metric *metric; /* decode: malloced, freed by oscar_admin_reply_free; encode: the caller's */
    uint32_t events;             /* SNAPSHOT */
    struct oscar_event *event;
};

#define OSCAR_MAX_ADMIN_BYTES (1U << 20) /* of an administration message */

/* Buffers of any size: encoders allocate *ret_buffer (free()). */
int oscar_admin_request_encode(const struct oscar_admin_request *request, uint8_t **ret_buffer, size_t *ret_bytes);
int oscar_admin_request_decode(const uint8_t *bytes, size_t size, struct oscar_admin_request *ret,
                               struct oscar_cause *cause);
int oscar_admin_reply_encode(const struct oscar_admin_reply *reply, uint8_t **ret_buffer, size_t *ret_bytes);
int oscar_admin_reply_decode(const uint8_t *bytes, size_t size, struct oscar_admin_reply *ret,
                             struct oscar_cause *cause);
void oscar_admin_reply_free(struct oscar_admin_reply *reply);
int oscar_event_encode(const struct oscar_event *event, uint8_t *buffer, size_t capacity, size_t *ret_bytes);
int oscar_event_decode(const uint8_t *bytes, size_t size, struct oscar_event *ret, struct oscar_cause *cause);

#endif
