/* SPDX-License-Identifier: Apache-2.0 */
/* Requests, replies and notices: what is encoded is decoded, and what is damaged is refused. */
#include <stdlib.h>
#include <string.h>

#include "proto/wire.h"
#include "proto_random.h"
#include "proto_test.h"

#define ROUNDS 200

static uint8_t buffer[OSCAR_MAX_RECORD_PAYLOAD_BYTES];

/* A copy of exactly `size` bytes on the heap: reading past it is an error that the sanitizer sees. */
static uint8_t *exact_copy(const uint8_t *bytes, size_t size) {
    uint8_t *copy = malloc(size != 0 ? size : 1);
    assert_non_null(copy);
    memcpy(copy, bytes, size);
    return copy;
}

static void every_request_makes_the_round_trip(void **state) {
    (void)state;
    for (unsigned verb = OSCAR_HELLO; verb < OSCAR_VERBS; verb++) {
        for (int round = 0; round < ROUNDS; round++) {
            struct oscar_request sent, received;
            size_t bytes = 0;
            random_request((enum oscar_verb)verb, false, &sent);
            memset(&received, 0xa5, sizeof(received));
            assert_int_equal(oscar_request_encode(&sent, buffer, sizeof(buffer), &bytes), OSCAR_OK);
            assert_int_equal(oscar_request_decode(buffer, bytes, &received, NULL), OSCAR_OK);
            assert_memory_equal(&sent, &received, sizeof(sent));
        }
    }
}

static void every_reply_makes_the_round_trip(void **state) {
    (void)state;
    for (unsigned verb = OSCAR_HELLO; verb < OSCAR_VERBS; verb++) {
        for (int round = 0; round < ROUNDS; round++) {
            struct oscar_reply sent, received;
            size_t bytes = 0;
            random_reply((enum oscar_verb)verb, false, &sent);
            memset(&received, 0xa5, sizeof(received));
            assert_int_equal(oscar_reply_encode(&sent, buffer, sizeof(buffer), &bytes), OSCAR_OK);
            assert_int_equal(oscar_reply_decode(buffer, bytes, &received, NULL), OSCAR_OK);
            assert_memory_equal(&sent, &received, sizeof(sent));
        }
    }
}

static void an_error_reply_keeps_its_cause_and_has_no_body(void **state) {
    (void)state;
    for (unsigned verb = OSCAR_HELLO; verb < OSCAR_VERBS; verb++) {
        struct oscar_reply sent, received;
        size_t bytes = 0;
        random_reply((enum oscar_verb)verb, true, &sent);
        sent.error = OSCAR_ERR_NO_SPACE;
        random_text(sent.cause, OSCAR_CAUSE_BYTES, true);
        assert_int_equal(oscar_reply_encode(&sent, buffer, sizeof(buffer), &bytes), OSCAR_OK);
        assert_int_equal(oscar_reply_decode(buffer, bytes, &received, NULL), OSCAR_OK);
        assert_true(received.id == sent.id);
        assert_int_equal(received.verb, verb);
        assert_int_equal(received.error, OSCAR_ERR_NO_SPACE);
        assert_string_equal(received.cause, sent.cause);
        assert_int_equal(received.seq_open.seq, 0);
    }
}

static void assert_chunks_equal(const struct oscar_notice *left, const struct oscar_notice *right) {
    assert_int_equal(left->kind, right->kind);
    assert_int_equal(left->chunks, right->chunks);
    for (uint32_t i = 0; i < left->chunks; i++) {
        assert_true(left->chunk[i].model == right->chunk[i].model);
        assert_int_equal(left->chunk[i].form, right->chunk[i].form);
        assert_int_equal(left->chunk[i].index, right->chunk[i].index);
        assert_true(left->chunk[i].generation == right->chunk[i].generation);
        assert_true(left->chunk[i].bytes == right->chunk[i].bytes);
        assert_int_equal(left->chunk[i].writable, right->chunk[i].writable);
    }
}

static void every_notice_makes_the_round_trip(void **state) {
    (void)state;
    for (unsigned kind = OSCAR_NOTICE_CHUNKS; kind <= OSCAR_NOTICE_CHUNKS_GONE; kind++) {
        for (int round = 0; round < ROUNDS; round++) {
            struct oscar_notice sent, received;
            size_t bytes = 0;
            random_notice((enum oscar_notice_kind)kind, false, &sent);
            assert_int_equal(oscar_notice_encode(&sent, buffer, sizeof(buffer), &bytes), OSCAR_OK);
            assert_int_equal(oscar_notice_decode(buffer, bytes, &received, NULL), OSCAR_OK);
            assert_chunks_equal(&sent, &received);
        }
    }
}

static void the_largest_messages_fit_a_record_and_the_arena(void **state) {
    (void)state;
    struct oscar_notice notice, notice_received;
    size_t bytes = 0;
    for (unsigned verb = OSCAR_HELLO; verb < OSCAR_VERBS; verb++) {
        struct oscar_request request, request_received;
        struct oscar_reply reply, reply_received;
        random_request((enum oscar_verb)verb, true, &request);
        assert_int_equal(oscar_request_encode(&request, buffer, sizeof(buffer), &bytes), OSCAR_OK);
        assert_int_equal(oscar_request_decode(buffer, bytes, &request_received, NULL), OSCAR_OK);
        random_reply((enum oscar_verb)verb, true, &reply);
        assert_int_equal(oscar_reply_encode(&reply, buffer, sizeof(buffer), &bytes), OSCAR_OK);
        assert_int_equal(oscar_reply_decode(buffer, bytes, &reply_received, NULL), OSCAR_OK);
    }
    for (unsigned kind = OSCAR_NOTICE_CHUNKS; kind <= OSCAR_NOTICE_CHUNKS_GONE; kind++) {
        random_notice((enum oscar_notice_kind)kind, true, &notice);
        assert_int_equal(oscar_notice_encode(&notice, buffer, sizeof(buffer), &bytes), OSCAR_OK);
        assert_int_equal(oscar_notice_decode(buffer, bytes, &notice_received, NULL), OSCAR_OK);
        assert_chunks_equal(&notice, &notice_received);
    }
}

static void a_message_that_does_not_fit_is_not_written(void **state) {
    (void)state;
    struct oscar_request request;
    struct oscar_reply reply;
    struct oscar_notice notice;
    size_t bytes = 0, unused = 77;
    random_request(OSCAR_MODEL_OPEN, true, &request);
    random_reply(OSCAR_SEQ_FORK, true, &reply);
    random_notice(OSCAR_NOTICE_CHUNKS, true, &notice);
    buffer[0] = 0x5a;
    assert_int_equal(oscar_request_encode(&request, buffer, 0, &unused), OSCAR_ERR_LIMIT);
    assert_int_equal(oscar_reply_encode(&reply, buffer, 0, &unused), OSCAR_ERR_LIMIT);
    assert_int_equal(oscar_notice_encode(&notice, buffer, 0, &unused), OSCAR_ERR_LIMIT);
    assert_int_equal(buffer[0], 0x5a);
    assert_int_equal(unused, 77);
    assert_int_equal(oscar_request_encode(&request, buffer, sizeof(buffer), &bytes), OSCAR_OK);
    assert_int_equal(oscar_request_encode(&request, buffer, bytes - 1, &unused), OSCAR_ERR_LIMIT);
    assert_int_equal(oscar_request_encode(&request, buffer, bytes, &unused), OSCAR_OK);
}

static void what_cannot_be_said_is_not_encoded(void **state) {
    (void)state;
    struct oscar_request request;
    struct oscar_reply reply;
    struct oscar_notice notice;
    size_t bytes;
    const unsigned verbs[] = {0, 1, OSCAR_VERBS, 1000};
    for (size_t i = 0; i < sizeof(verbs) / sizeof(verbs[0]); i++) {
        random_request(OSCAR_PING, false, &request);
        request.verb = (enum oscar_verb)verbs[i];
        assert_int_equal(oscar_request_encode(&request, buffer, sizeof(buffer), &bytes), OSCAR_ERR_INVALID);
        random_reply(OSCAR_PING, false, &reply);
        reply.verb = (enum oscar_verb)verbs[i];
        assert_int_equal(oscar_reply_encode(&reply, buffer, sizeof(buffer), &bytes), OSCAR_ERR_INVALID);
    }
    random_request(OSCAR_HELLO, true, &request);
    memset(request.hello.group, 'x', OSCAR_NAME_BYTES); /* no terminator */
    assert_int_equal(oscar_request_encode(&request, buffer, sizeof(buffer), &bytes), OSCAR_ERR_INVALID);
    random_reply(OSCAR_PING, false, &reply);
    reply.error = 1;
    assert_int_equal(oscar_reply_encode(&reply, buffer, sizeof(buffer), &bytes), OSCAR_ERR_INVALID);
    random_reply(OSCAR_SEQ_FORK, true, &reply);
    reply.seq_fork.copies = OSCAR_MAX_COPIES + 1;
    assert_int_equal(oscar_reply_encode(&reply, buffer, sizeof(buffer), &bytes), OSCAR_ERR_INVALID);
    random_notice(OSCAR_NOTICE_CHUNKS, true, &notice);
    notice.chunks = OSCAR_MAX_RECORD_FDS + 1;
    assert_int_equal(oscar_notice_encode(&notice, buffer, sizeof(buffer), &bytes), OSCAR_ERR_INVALID);
    notice.chunks = 0;
    assert_int_equal(oscar_notice_encode(&notice, buffer, sizeof(buffer), &bytes), OSCAR_ERR_INVALID);
}

static void a_message_cut_at_any_byte_is_refused(void **state) {
    (void)state;
    struct oscar_cause cause;
    size_t bytes = 0;
    for (unsigned verb = OSCAR_HELLO; verb < OSCAR_VERBS; verb++) {
        struct oscar_request request;
        struct oscar_reply reply;
        random_request((enum oscar_verb)verb, false, &request);
        assert_int_equal(oscar_request_encode(&request, buffer, sizeof(buffer), &bytes), OSCAR_OK);
        for (size_t cut = 0; cut < bytes; cut++) {
            uint8_t *copy = exact_copy(buffer, cut);
            assert_int_equal(oscar_request_decode(copy, cut, &request, &cause), OSCAR_ERR_PROTOCOL);
            assert_true(cause.text[0] != '\0');
            free(copy);
        }
        random_reply((enum oscar_verb)verb, false, &reply);
        assert_int_equal(oscar_reply_encode(&reply, buffer, sizeof(buffer), &bytes), OSCAR_OK);
        for (size_t cut = 0; cut < bytes; cut++) {
            uint8_t *copy = exact_copy(buffer, cut);
            assert_int_equal(oscar_reply_decode(copy, cut, &reply, &cause), OSCAR_ERR_PROTOCOL);
            free(copy);
        }
    }
    struct oscar_notice notice;
    random_notice(OSCAR_NOTICE_CHUNKS, false, &notice);
    notice.chunks = 3;
    assert_int_equal(oscar_notice_encode(&notice, buffer, sizeof(buffer), &bytes), OSCAR_OK);
    for (size_t cut = 0; cut < bytes; cut++) {
        uint8_t *copy = exact_copy(buffer, cut);
        assert_int_equal(oscar_notice_decode(copy, cut, &notice, &cause), OSCAR_ERR_PROTOCOL);
        free(copy);
    }
}

/* Whatever a damaged message still says is legal: it can be encoded again. */
static void a_damaged_message_is_refused_or_legal(void **state) {
    (void)state;
    static uint8_t damaged[4096];
    static struct oscar_notice notice;
    for (int round = 0; round < 20000; round++) {
        struct oscar_request request;
        struct oscar_reply reply;
        enum oscar_verb verb = (enum oscar_verb)(OSCAR_HELLO + random_below(OSCAR_VERBS - OSCAR_HELLO));
        size_t bytes = 0, unused;
        random_request(verb, false, &request);
        assert_int_equal(oscar_request_encode(&request, damaged, sizeof(damaged), &bytes), OSCAR_OK);
        bytes = random_damage(damaged, bytes, sizeof(damaged));
        uint8_t *copy = exact_copy(damaged, bytes);
        int r = oscar_request_decode(copy, bytes, &request, NULL);
        assert_true(r == OSCAR_ERR_PROTOCOL ||
                    (r == OSCAR_OK && oscar_request_encode(&request, buffer, sizeof(buffer), &unused) == OSCAR_OK));
        r = oscar_reply_decode(copy, bytes, &reply, NULL); /* of another kind */
        assert_true(r == OSCAR_OK || r == OSCAR_ERR_PROTOCOL);
        r = oscar_notice_decode(copy, bytes, &notice, NULL);
        assert_true(r == OSCAR_OK || r == OSCAR_ERR_PROTOCOL);
        free(copy);

        random_reply(verb, false, &reply);
        assert_int_equal(oscar_reply_encode(&reply, damaged, sizeof(damaged), &bytes), OSCAR_OK);
        bytes = random_damage(damaged, bytes, sizeof(damaged));
        copy = exact_copy(damaged, bytes);
        r = oscar_reply_decode(copy, bytes, &reply, NULL);
        assert_true(r == OSCAR_ERR_PROTOCOL ||
                    (r == OSCAR_OK && oscar_reply_encode(&reply, buffer, sizeof(buffer), &unused) == OSCAR_OK));
        free(copy);
    }
}

static void a_damaged_notice_is_refused_or_legal(void **state) {
    (void)state;
    static uint8_t damaged[OSCAR_MAX_RECORD_PAYLOAD_BYTES];
    static struct oscar_notice notice;
    for (int round = 0; round < 2000; round++) {
        size_t bytes = 0, unused;
        random_notice(random_below(2) != 0 ? OSCAR_NOTICE_CHUNKS : OSCAR_NOTICE_CHUNKS_GONE, false, &notice);
        assert_int_equal(oscar_notice_encode(&notice, damaged, sizeof(damaged), &bytes), OSCAR_OK);
        bytes = random_damage(damaged, bytes, sizeof(damaged));
        uint8_t *copy = exact_copy(damaged, bytes);
        int r = oscar_notice_decode(copy, bytes, &notice, NULL);
        assert_true(r == OSCAR_ERR_PROTOCOL ||
                    (r == OSCAR_OK && oscar_notice_encode(&notice, buffer, sizeof(buffer), &unused) == OSCAR_OK));
        free(copy);
    }
}

static void verbs_have_names(void **state) {
    (void)state;
    for (unsigned verb = OSCAR_HELLO; verb < OSCAR_VERBS; verb++)
        assert_string_not_equal(oscar_verb_name((enum oscar_verb)verb), "unknown");
    assert_string_equal(oscar_verb_name(OSCAR_SEQ_OPEN), "seq_open");
    assert_string_equal(oscar_verb_name((enum oscar_verb)0), "unknown");
    assert_string_equal(oscar_verb_name(OSCAR_VERBS), "unknown");
    assert_string_equal(oscar_verb_name((enum oscar_verb) - 1), "unknown");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_request_makes_the_round_trip),
        cmocka_unit_test(every_reply_makes_the_round_trip),
        cmocka_unit_test(an_error_reply_keeps_its_cause_and_has_no_body),
        cmocka_unit_test(every_notice_makes_the_round_trip),
        cmocka_unit_test(the_largest_messages_fit_a_record_and_the_arena),
        cmocka_unit_test(a_message_that_does_not_fit_is_not_written),
        cmocka_unit_test(what_cannot_be_said_is_not_encoded),
        cmocka_unit_test(a_message_cut_at_any_byte_is_refused),
        cmocka_unit_test(a_damaged_message_is_refused_or_legal),
        cmocka_unit_test(a_damaged_notice_is_refused_or_legal),
        cmocka_unit_test(verbs_have_names),
    };
    random_seed();
    return cmocka_run_group_tests_name("proto_wire", tests, NULL, NULL);
}
