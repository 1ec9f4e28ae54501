/* SPDX-License-Identifier: Apache-2.0 */
/* Administration messages and events. */
#include <stdlib.h>
#include <string.h>

#include "proto/wire.h"
#include "proto_random.h"
#include "proto_test.h"

static void assert_events_equal(const struct oscar_event *left, const struct oscar_event *right) {
    assert_true(left->incarnation == right->incarnation && left->sequence == right->sequence);
    assert_int_equal(left->kind, right->kind);
    assert_int_equal(left->has_model, right->has_model);
    assert_memory_equal(&left->model, &right->model, 3 * sizeof(left->model));
    assert_int_equal(left->depth, right->depth);
    assert_int_equal(left->form, right->form);
}

static void assert_replies_equal(const struct oscar_admin_reply *left, const struct oscar_admin_reply *right) {
    struct oscar_admin_reply a = *left, b = *right;
    assert_int_equal(left->metrics, right->metrics);
    for (uint32_t i = 0; i < left->metrics; i++) {
        assert_string_equal(left->metric[i].name, right->metric[i].name);
        assert_string_equal(left->metric[i].labels, right->metric[i].labels);
        assert_string_equal(left->metric[i].unit, right->metric[i].unit);
        assert_string_equal(left->metric[i].help, right->metric[i].help);
        assert_int_equal(left->metric[i].counter, right->metric[i].counter);
        assert_true(left->metric[i].value == right->metric[i].value);
    }
    assert_int_equal(left->events, right->events);
    for (uint32_t i = 0; i < left->events; i++)
        assert_events_equal(&left->event[i], &right->event[i]);
    a.metric = b.metric = NULL;
    a.event = b.event = NULL;
    assert_memory_equal(&a, &b, sizeof(a));
}

static void every_admin_request_makes_the_round_trip(void **state) {
    (void)state;
    for (unsigned verb = OSCAR_ADMIN_STATS; verb <= OSCAR_ADMIN_SNAPSHOT; verb++) {
        for (int round = 0; round < 100; round++) {
            struct oscar_admin_request sent, received;
            uint8_t *buffer = NULL;
            size_t bytes = 0;
            random_admin_request((enum oscar_admin_verb)verb, &sent);
            assert_int_equal(oscar_admin_request_encode(&sent, &buffer, &bytes), OSCAR_OK);
            assert_int_equal(oscar_admin_request_decode(buffer, bytes, &received, NULL), OSCAR_OK);
            assert_memory_equal(&sent, &received, sizeof(sent));
            for (size_t cut = 0; cut < bytes; cut++)
                assert_int_equal(oscar_admin_request_decode(buffer, cut, &received, NULL), OSCAR_ERR_PROTOCOL);
            free(buffer);
        }
    }
}

static void every_admin_reply_makes_the_round_trip(void **state) {
    (void)state;
    for (unsigned verb = OSCAR_ADMIN_STATS; verb <= OSCAR_ADMIN_SNAPSHOT; verb++) {
        for (int round = 0; round < 50; round++) {
            struct oscar_admin_reply sent, received;
            uint8_t *buffer = NULL;
            size_t bytes = 0;
            random_admin_reply((enum oscar_admin_verb)verb, round == 0, &sent);
            assert_int_equal(oscar_admin_reply_encode(&sent, &buffer, &bytes), OSCAR_OK);
            assert_int_equal(oscar_admin_reply_decode(buffer, bytes, &received, NULL), OSCAR_OK);
            assert_replies_equal(&sent, &received);
            free(buffer);
            oscar_admin_reply_free(&received);
            oscar_admin_reply_free(&sent);
        }
    }
}

static void an_admin_error_keeps_its_cause(void **state) {
    (void)state;
    struct oscar_admin_reply sent = {
        .id = 3, .verb = OSCAR_ADMIN_FLUSH, .error = OSCAR_ERR_PERMISSION, .cause = "not you"};
    struct oscar_admin_reply received;
    uint8_t *buffer = NULL;
    size_t bytes = 0;
    assert_int_equal(oscar_admin_reply_encode(&sent, &buffer, &bytes), OSCAR_OK);
    assert_int_equal(oscar_admin_reply_decode(buffer, bytes, &received, NULL), OSCAR_OK);
    assert_replies_equal(&sent, &received);
    free(buffer);
}

static void a_damaged_admin_message_is_refused_or_legal(void **state) {
    (void)state;
    for (int round = 0; round < 3000; round++) {
        struct oscar_admin_reply reply;
        struct oscar_admin_request request;
        uint8_t *buffer = NULL;
        size_t bytes = 0;
        random_admin_reply((enum oscar_admin_verb)(OSCAR_ADMIN_STATS + random_below(4)), false, &reply);
        assert_int_equal(oscar_admin_reply_encode(&reply, &buffer, &bytes), OSCAR_OK);
        oscar_admin_reply_free(&reply);
        bytes = random_damage(buffer, bytes, bytes);
        uint8_t *copy = malloc(bytes != 0 ? bytes : 1);
        assert_non_null(copy);
        memcpy(copy, buffer, bytes);
        free(buffer);
        int r = oscar_admin_reply_decode(copy, bytes, &reply, NULL);
        assert_true(r == OSCAR_OK || r == OSCAR_ERR_PROTOCOL);
        if (r == OSCAR_OK) {
            assert_int_equal(oscar_admin_reply_encode(&reply, &buffer, &bytes), OSCAR_OK);
            free(buffer);
            oscar_admin_reply_free(&reply);
        }
        r = oscar_admin_request_decode(copy, bytes, &request, NULL);
        assert_true(r == OSCAR_OK || r == OSCAR_ERR_PROTOCOL);
        free(copy);
    }
}

static void admin_messages_are_bounded(void **state) {
    (void)state;
    struct oscar_admin_reply reply;
    uint8_t *bytes = calloc(OSCAR_MAX_ADMIN_BYTES + 1, 1), *buffer;
    size_t size;
    assert_non_null(bytes);
    for (size_t i = 0; i + 3 <= OSCAR_MAX_ADMIN_BYTES; i += 3)
        memcpy(bytes + i, "\xa0\x06\x01", 3); /* field 100 = 1 */
    assert_int_equal(oscar_admin_reply_decode(bytes, OSCAR_MAX_ADMIN_BYTES / 3 * 3, &reply, NULL), OSCAR_ERR_PROTOCOL);
    assert_int_equal(oscar_admin_reply_decode(bytes, OSCAR_MAX_ADMIN_BYTES + 1, &reply, NULL), OSCAR_ERR_PROTOCOL);
    random_admin_reply(OSCAR_ADMIN_STATS, true, &reply);
    reply.metrics = OSCAR_MAX_METRICS + 1;
    assert_int_equal(oscar_admin_reply_encode(&reply, &buffer, &size), OSCAR_ERR_INVALID);
    oscar_admin_reply_free(&reply);
    free(bytes);
}

static void every_event_makes_the_round_trip(void **state) {
    (void)state;
    for (unsigned kind = OSCAR_EVENT_STORED; kind <= OSCAR_EVENT_CLEARED; kind++) {
        for (int round = 0; round < 100; round++) {
            struct oscar_event sent, received;
            uint8_t buffer[512];
            size_t bytes = 0;
            random_event((enum oscar_event_kind)kind, false, &sent);
            assert_int_equal(oscar_event_encode(&sent, buffer, sizeof(buffer), &bytes), OSCAR_OK);
            assert_int_equal(oscar_event_decode(buffer, bytes, &received, NULL), OSCAR_OK);
            assert_events_equal(&sent, &received);
        }
    }
}

static void an_event_of_a_page_has_all_its_digests(void **state) {
    (void)state;
    struct oscar_event event;
    uint8_t buffer[512];
    size_t bytes = 0;
    random_event(OSCAR_EVENT_REMOVED, true, &event);
    assert_int_equal(oscar_event_encode(&event, buffer, sizeof(buffer), &bytes), OSCAR_OK);
    for (size_t cut = 0; cut < bytes; cut++) {
        int r = oscar_event_decode(buffer, cut, &event, NULL);
        /* Only depth and form, the last two, may be absent: they are 0 then. */
        assert_true(r == OSCAR_ERR_PROTOCOL || (r == OSCAR_OK && cut + 6 >= bytes));
    }
}

static void an_unknown_event_is_refused(void **state) {
    (void)state;
    struct oscar_event event;
    uint8_t buffer[512];
    size_t bytes;
    random_event(OSCAR_EVENT_STORED, true, &event);
    event.kind = (enum oscar_event_kind)5;
    assert_int_equal(oscar_event_encode(&event, buffer, sizeof(buffer), &bytes), OSCAR_ERR_INVALID);
    assert_int_equal(oscar_event_decode((const uint8_t *)"\x18\x05", 2, &event, NULL), OSCAR_ERR_PROTOCOL);
    assert_int_equal(oscar_event_decode((const uint8_t *)"", 0, &event, NULL), OSCAR_ERR_PROTOCOL);
    assert_int_equal(oscar_event_decode((const uint8_t *)"\x18\x04", 2, &event, NULL), OSCAR_OK);
    assert_false(event.has_model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_admin_request_makes_the_round_trip),
        cmocka_unit_test(every_admin_reply_makes_the_round_trip),
        cmocka_unit_test(an_admin_error_keeps_its_cause),
        cmocka_unit_test(a_damaged_admin_message_is_refused_or_legal),
        cmocka_unit_test(admin_messages_are_bounded),
        cmocka_unit_test(every_event_makes_the_round_trip),
        cmocka_unit_test(an_event_of_a_page_has_all_its_digests),
        cmocka_unit_test(an_unknown_event_is_refused),
    };
    random_seed();
    return cmocka_run_group_tests_name("proto_admin", tests, NULL, NULL);
}
