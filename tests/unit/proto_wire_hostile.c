/* SPDX-License-Identifier: Apache-2.0 */
/* Messages that no encoder of ours writes: protobuf by hand, and a decoder that runs out of memory at every step. */
#include <malloc.h>
#include <stdlib.h>
#include <string.h>

#include "proto/oscar.pb-c.h"
#include "proto/window.h"
#include "proto/wire.h"
#include "proto/wire_arena.h"
#include "proto_random.h"
#include "proto_test.h"

/* --- protobuf by hand --- */

struct text {
    uint8_t bytes[OSCAR_MAX_RECORD_PAYLOAD_BYTES];
    size_t size;
};

static void put_varint(struct text *text, uint64_t value) {
    do {
        assert_true(text->size < sizeof(text->bytes));
        text->bytes[text->size++] = (uint8_t)((value & 0x7f) | (value >= 0x80 ? 0x80 : 0));
        value >>= 7;
    } while (value != 0);
}

static void put_number(struct text *text, uint32_t field, uint64_t value) {
    put_varint(text, (uint64_t)field << 3);
    put_varint(text, value);
}

static void put_bytes(struct text *text, uint32_t field, const void *bytes, size_t size) {
    put_varint(text, (uint64_t)field << 3 | 2);
    put_varint(text, size);
    assert_true(size <= sizeof(text->bytes) - text->size);
    if (size != 0)
        memcpy(text->bytes + text->size, bytes, size);
    text->size += size;
}

static void put_message(struct text *text, uint32_t field, const struct text *message) {
    put_bytes(text, field, message->bytes, message->size);
}

static struct text body, whole, third;

static void clear(void) { body.size = whole.size = third.size = 0; }

static int decode_request(uint32_t verb, struct oscar_cause *cause) {
    static struct oscar_request request;
    whole.size = 0;
    put_number(&whole, 1, 7);
    put_message(&whole, verb, &body);
    return oscar_request_decode(whole.bytes, whole.size, &request, cause);
}

/* With the field numbers of Reply: `reply_body` of its oneof, the verb in 14. */
static int decode_reply(uint32_t verb, uint32_t reply_body, struct oscar_cause *cause) {
    static struct oscar_reply reply;
    whole.size = 0;
    put_number(&whole, 1, 7);
    put_message(&whole, reply_body, &body);
    put_number(&whole, 14, verb);
    return oscar_reply_decode(whole.bytes, whole.size, &reply, cause);
}

/* --- tests --- */

static void a_request_without_a_known_body_is_refused(void **state) {
    (void)state;
    struct oscar_cause cause;
    struct oscar_request request;
    clear();
    put_number(&whole, 1, 7);
    assert_int_equal(oscar_request_decode(whole.bytes, whole.size, &request, &cause), OSCAR_ERR_PROTOCOL);
    assert_int_equal(oscar_request_decode(whole.bytes, 0, &request, &cause), OSCAR_ERR_PROTOCOL);
    assert_int_equal(decode_request(OSCAR_VERBS, &cause), OSCAR_ERR_PROTOCOL);
    assert_int_equal(decode_request(1000000, &cause), OSCAR_ERR_PROTOCOL);
    assert_int_equal(decode_request(OSCAR_PING, &cause), OSCAR_OK);
}

static void texts_that_are_too_long_are_refused(void **state) {
    (void)state;
    struct oscar_cause cause;
    char text[4000];
    memset(text, 'x', sizeof(text));
    static const size_t sizes[] = {OSCAR_NAME_BYTES, OSCAR_NAME_BYTES + 1, sizeof(text)};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        clear();
        put_bytes(&body, 4, text, sizes[i]);
        assert_int_equal(decode_request(OSCAR_HELLO, &cause), OSCAR_ERR_PROTOCOL);
        assert_non_null(strstr(cause.text, "client_name"));
    }
    clear();
    put_bytes(&body, 4, text, OSCAR_NAME_BYTES - 1);
    assert_int_equal(decode_request(OSCAR_HELLO, &cause), OSCAR_OK);
}

static void texts_with_a_nul_or_without_utf8_are_refused(void **state) {
    (void)state;
    static const char *const bad[] = {"main\0other", "a\nb", "a\x1b[2J", "\xc3", "\xff\xfe"};
    static const size_t sizes[] = {10, 3, 5, 1, 2};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct oscar_cause cause;
        clear();
        put_bytes(&body, 2, bad[i], sizes[i]);
        assert_int_equal(decode_request(OSCAR_MODEL_OPEN, &cause), OSCAR_ERR_PROTOCOL);
        assert_non_null(strstr(cause.text, "revision"));
    }
}

static void digests_of_another_size_are_refused(void **state) {
    (void)state;
    uint8_t bytes[64] = {1};
    for (size_t size = 1; size <= sizeof(bytes); size++) {
        clear();
        put_bytes(&body, 1, bytes, size);
        assert_int_equal(decode_request(OSCAR_MODEL_OPEN, NULL),
                         size == OSCAR_DIGEST_BYTES ? OSCAR_OK : OSCAR_ERR_PROTOCOL);
        clear();
        put_bytes(&body, 2, bytes, size);
        assert_int_equal(decode_request(OSCAR_LEASE_ADOPT, NULL),
                         size == OSCAR_LEASE_SECRET_BYTES ? OSCAR_OK : OSCAR_ERR_PROTOCOL);
    }
    clear();
    assert_int_equal(decode_request(OSCAR_LEASE_ADOPT, NULL), OSCAR_ERR_PROTOCOL); /* a secret of size 0 */
}

static void a_model_without_its_fields_is_left_to_the_identity_check(void **state) {
    (void)state;
    struct oscar_request request;
    struct oscar_cause cause;
    clear();
    put_message(&whole, OSCAR_MODEL_OPEN, &body);
    memset(&request, 0xa5, sizeof(request));
    assert_int_equal(oscar_request_decode(whole.bytes, whole.size, &request, NULL), OSCAR_OK);
    request.model_open.identity.format = OSCAR_IDENTITY_FORMAT;
    assert_int_equal(oscar_identity_check(&request.model_open.identity, &cause), OSCAR_ERR_IDENTITY);
    assert_non_null(strstr(cause.text, "weights"));
}

static void of_two_bodies_the_last_counts(void **state) {
    (void)state;
    struct oscar_request request;
    clear();
    put_number(&body, 1, 11);
    put_message(&whole, OSCAR_SEQ_CLOSE, &body);
    put_message(&whole, OSCAR_LEASE_CLOSE, &body);
    assert_int_equal(oscar_request_decode(whole.bytes, whole.size, &request, NULL), OSCAR_OK);
    assert_int_equal(request.verb, OSCAR_LEASE_CLOSE);
    assert_int_equal(request.lease_close.lease, 11);
}

static void a_reply_is_refused_when_body_verb_and_error_disagree(void **state) {
    (void)state;
    struct oscar_reply reply;
    clear();
    assert_int_equal(decode_reply(OSCAR_SEQ_OPEN, 8, NULL), OSCAR_OK);
    assert_int_equal(decode_reply(OSCAR_SEQ_FORK, 8, NULL), OSCAR_ERR_PROTOCOL);
    assert_int_equal(decode_reply(OSCAR_PING, 8, NULL), OSCAR_ERR_PROTOCOL);
    assert_int_equal(decode_reply(0, 8, NULL), OSCAR_ERR_PROTOCOL);
    assert_int_equal(decode_reply(OSCAR_VERBS, 8, NULL), OSCAR_ERR_PROTOCOL);
    assert_int_equal(decode_reply(UINT32_MAX, 8, NULL), OSCAR_ERR_PROTOCOL);
    put_number(&whole, 2, 2 * 3 - 1); /* zigzag of -3, after a body */
    assert_int_equal(oscar_reply_decode(whole.bytes, whole.size, &reply, NULL), OSCAR_ERR_PROTOCOL);
    clear();
    put_number(&whole, 2, 2 * 3); /* error +3 */
    put_number(&whole, 14, OSCAR_PING);
    assert_int_equal(oscar_reply_decode(whole.bytes, whole.size, &reply, NULL), OSCAR_ERR_PROTOCOL);
    clear();
    put_number(&whole, 14, OSCAR_SEQ_OPEN); /* no error, no body */
    assert_int_equal(oscar_reply_decode(whole.bytes, whole.size, &reply, NULL), OSCAR_ERR_PROTOCOL);
}

static void an_error_of_a_newer_minor_version_is_passed_on(void **state) {
    (void)state;
    struct oscar_reply reply;
    clear();
    put_number(&whole, 2, 2 * 4000 - 1);
    put_number(&whole, 14, OSCAR_SEQ_OPEN);
    assert_int_equal(oscar_reply_decode(whole.bytes, whole.size, &reply, NULL), OSCAR_OK);
    assert_int_equal(reply.error, -4000);
}

static void fields_of_a_newer_minor_version_are_ignored(void **state) {
    (void)state;
    struct oscar_request request;
    struct oscar_cause cause;
    clear();
    put_number(&body, 1, 5);
    put_number(&body, 99, 1);
    put_bytes(&body, 100, "something new", 13);
    assert_int_equal(decode_request(OSCAR_SEQ_OPEN, &cause), OSCAR_OK);
    put_bytes(&whole, 77, "and here", 8);
    assert_int_equal(oscar_request_decode(whole.bytes, whole.size, &request, &cause), OSCAR_OK);
    assert_int_equal(request.seq_open.model, 5);
}

static void counts_that_a_client_would_index_with_are_bounded(void **state) {
    (void)state;
    static const struct {
        uint32_t verb, body, field;
        uint64_t limit;
    } counts[] = {
        {OSCAR_SEQ_OPEN, 8, 2, OSCAR_FENCE_SLOTS - 1}, {OSCAR_SEQ_OPEN, 8, 3, OSCAR_MAX_SEQUENCE_TOKENS},
        {OSCAR_SEQ_OPEN, 8, 5, OSCAR_MAX_UPDATES},     {OSCAR_SEQ_WAIT, 9, 1, OSCAR_MAX_SEQUENCE_TOKENS},
        {OSCAR_SEQ_EXTEND, 10, 3, OSCAR_MAX_UPDATES},  {OSCAR_SEQ_RESERVE, 11, 1, OSCAR_MAX_SEQUENCE_TOKENS},
        {OSCAR_SEQ_RESERVE, 11, 2, OSCAR_MAX_UPDATES}, {OSCAR_SEQ_ADVANCE, 12, 1, OSCAR_MAX_SEQUENCE_TOKENS},
        {OSCAR_SEQ_ADVANCE, 12, 3, OSCAR_MAX_UPDATES}, {OSCAR_SEQ_FORK, 13, 2, OSCAR_FENCE_SLOTS - 1},
        {OSCAR_SEQ_FORK, 13, 4, OSCAR_MAX_UPDATES},
    };
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        clear();
        put_number(&body, counts[i].field, counts[i].limit);
        assert_int_equal(decode_reply(counts[i].verb, counts[i].body, NULL), OSCAR_OK);
        clear();
        put_number(&body, counts[i].field, counts[i].limit + 1);
        assert_int_equal(decode_reply(counts[i].verb, counts[i].body, NULL), OSCAR_ERR_PROTOCOL);
    }
}

static void a_fork_reply_with_too_many_copies_is_refused(void **state) {
    (void)state;
    clear();
    for (uint32_t i = 0; i < OSCAR_MAX_COPIES; i++)
        put_message(&body, 5, &third);
    assert_int_equal(decode_reply(OSCAR_SEQ_FORK, 13, NULL), OSCAR_OK);
    put_message(&body, 5, &third);
    assert_int_equal(decode_reply(OSCAR_SEQ_FORK, 13, NULL), OSCAR_ERR_PROTOCOL);
    clear();
    put_number(&third, 4, OSCAR_PAGE_TOKENS + 1); /* rows */
    put_message(&body, 5, &third);
    assert_int_equal(decode_reply(OSCAR_SEQ_FORK, 13, NULL), OSCAR_ERR_PROTOCOL);
}

static void a_notice_of_no_or_too_many_chunks_or_unknown_form_is_refused(void **state) {
    (void)state;
    static struct oscar_notice notice;
    for (uint32_t kind = 1; kind <= 2; kind++) {
        for (uint32_t chunks = 0; chunks <= OSCAR_MAX_RECORD_FDS + 1; chunks++) {
            clear();
            for (uint32_t i = 0; i < chunks; i++)
                put_message(&body, 1, &third);
            put_message(&whole, kind, &body);
            int expected = chunks >= 1 && chunks <= OSCAR_MAX_RECORD_FDS ? OSCAR_OK : OSCAR_ERR_PROTOCOL;
            assert_int_equal(oscar_notice_decode(whole.bytes, whole.size, &notice, NULL), expected);
        }
        clear();
        put_number(&third, 2, OSCAR_FORMS);
        put_message(&body, 1, &third);
        put_message(&whole, kind, &body);
        assert_int_equal(oscar_notice_decode(whole.bytes, whole.size, &notice, NULL), OSCAR_ERR_PROTOCOL);
    }
}

static size_t heap_bytes(void) {
    struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd;
}

static void a_full_record_of_unknown_fields_is_refused_without_taking_heap(void **state) {
    (void)state;
    static struct oscar_request request;
    static struct oscar_reply reply;
    static struct oscar_notice notice;
    clear();
    while (whole.size + 3 <= sizeof(whole.bytes))
        put_number(&whole, 100, 1); /* 3 bytes that protobuf-c keeps as an object */
    size_t before = heap_bytes();
    assert_int_equal(oscar_request_decode(whole.bytes, whole.size, &request, NULL), OSCAR_ERR_PROTOCOL);
    assert_int_equal(oscar_reply_decode(whole.bytes, whole.size, &reply, NULL), OSCAR_ERR_PROTOCOL);
    assert_int_equal(oscar_notice_decode(whole.bytes, whole.size, &notice, NULL), OSCAR_ERR_PROTOCOL);
    assert_true(heap_bytes() == before);
}

static void deep_nesting_costs_no_stack(void **state) {
    (void)state;
    static struct oscar_request request;
    /* A field that we know as a message, whose content is that field again, and so on: nothing in our schema recurs. */
    for (uint32_t field = 1; field < OSCAR_VERBS; field++) {
        clear();
        for (size_t depth = 0; depth < 15000; depth++) {
            put_varint(&whole, (uint64_t)field << 3 | 2);
            put_varint(&whole, 40000);
        }
        int r = oscar_request_decode(whole.bytes, whole.size, &request, NULL);
        assert_int_equal(r, OSCAR_ERR_PROTOCOL);
    }
    clear();
    static const uint8_t end_group = 4;
    for (size_t i = 0; i < sizeof(whole.bytes); i++)
        whole.bytes[i] = (uint8_t)(15 << 3 | 3); /* start of a group */
    whole.bytes[sizeof(whole.bytes) - 1] = (uint8_t)(15 << 3 | end_group);
    assert_int_equal(oscar_request_decode(whole.bytes, sizeof(whole.bytes), &request, NULL), OSCAR_ERR_PROTOCOL);
}

static void every_schema_message_contains_no_message_of_its_own_kind(void **state) {
    (void)state;
    /* Depth-first over the generated descriptors: a message that contains itself would never end. */
    const ProtobufCMessageDescriptor *roots[] = {
        &oscar__v1__request__descriptor,       &oscar__v1__reply__descriptor,       &oscar__v1__notice__descriptor,
        &oscar__v1__admin_request__descriptor, &oscar__v1__admin_reply__descriptor, &oscar__v1__event__descriptor};
    for (size_t root = 0; root < sizeof(roots) / sizeof(roots[0]); root++) {
        struct {
            const ProtobufCMessageDescriptor *message;
            unsigned next;
        } path[8] = {{roots[root], 0}};
        unsigned depth = 1;
        while (depth > 0) {
            if (path[depth - 1].next == path[depth - 1].message->n_fields) {
                depth--;
                continue;
            }
            const ProtobufCFieldDescriptor *field = &path[depth - 1].message->fields[path[depth - 1].next++];
            if (field->type != PROTOBUF_C_TYPE_MESSAGE)
                continue;
            assert_true(depth < 4);
            path[depth].message = field->descriptor;
            path[depth++].next = 0;
        }
    }
}

/* protobuf-c under an allocator that fails at every step in turn: no crash, and in the end it succeeds. */
static void decoding_survives_an_arena_of_any_size(void **state) {
    (void)state;
    static struct oscar_notice notice;
    static _Alignas(OSCAR_WIRE_ALIGNMENT) uint8_t memory[65536];
    static uint8_t bytes[OSCAR_MAX_RECORD_PAYLOAD_BYTES];
    struct oscar_request request;
    struct oscar_reply reply;
    size_t size[3] = {0};
    random_request(OSCAR_MODEL_OPEN, true, &request);
    random_reply(OSCAR_SEQ_FORK, true, &reply);
    random_notice(OSCAR_NOTICE_CHUNKS, true, &notice);
    const ProtobufCMessageDescriptor *descriptors[3] = {&oscar__v1__request__descriptor, &oscar__v1__reply__descriptor,
                                                        &oscar__v1__notice__descriptor};
    for (int kind = 0; kind < 3; kind++) {
        int r = kind == 0   ? oscar_request_encode(&request, bytes, sizeof(bytes), &size[0])
                : kind == 1 ? oscar_reply_encode(&reply, bytes, sizeof(bytes), &size[1])
                            : oscar_notice_encode(&notice, bytes, sizeof(bytes), &size[2]);
        assert_int_equal(r, OSCAR_OK);
        size_t capacity = 0;
        struct oscar_wire_arena arena;
        for (;; capacity += 16) {
            assert_true(capacity <= sizeof(memory));
            oscar_wire_arena_init(&arena, memory, capacity);
            if (oscar_wire_unpack(&arena, descriptors[kind], bytes, size[kind]) != NULL)
                break;
            assert_true(arena.used <= capacity);
        }
        print_message("kind %d: %zu bytes need an arena of %zu\n", kind, size[kind], capacity);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_request_without_a_known_body_is_refused),
        cmocka_unit_test(texts_that_are_too_long_are_refused),
        cmocka_unit_test(texts_with_a_nul_or_without_utf8_are_refused),
        cmocka_unit_test(digests_of_another_size_are_refused),
        cmocka_unit_test(a_model_without_its_fields_is_left_to_the_identity_check),
        cmocka_unit_test(of_two_bodies_the_last_counts),
        cmocka_unit_test(a_reply_is_refused_when_body_verb_and_error_disagree),
        cmocka_unit_test(an_error_of_a_newer_minor_version_is_passed_on),
        cmocka_unit_test(fields_of_a_newer_minor_version_are_ignored),
        cmocka_unit_test(counts_that_a_client_would_index_with_are_bounded),
        cmocka_unit_test(a_fork_reply_with_too_many_copies_is_refused),
        cmocka_unit_test(a_notice_of_no_or_too_many_chunks_or_unknown_form_is_refused),
        cmocka_unit_test(a_full_record_of_unknown_fields_is_refused_without_taking_heap),
        cmocka_unit_test(deep_nesting_costs_no_stack),
        cmocka_unit_test(every_schema_message_contains_no_message_of_its_own_kind),
        cmocka_unit_test(decoding_survives_an_arena_of_any_size),
    };
    random_seed();
    return cmocka_run_group_tests_name("proto_wire_hostile", tests, NULL, NULL);
}
