/* SPDX-License-Identifier: Apache-2.0 */
/* A daemon that is silent, late, or gone: every call ends in its time, and what comes late harms nobody. */
#include <stdlib.h>
#include <string.h>

#include "tests/unit/client_fixture.h"

struct silent_case {
    enum oscar_verb verb;
    int (*call)(struct client_world *world, struct oscar_seq *seq);
};

static int call_ping(struct client_world *world, struct oscar_seq *seq) {
    (void)seq;
    return oscar_client_ping(world->client);
}

static int call_model_open(struct client_world *world, struct oscar_seq *seq) {
    (void)seq;
    struct oscar_model *model;
    return open_model(world->client, &model);
}

static int call_probe(struct client_world *world, struct oscar_seq *seq) {
    (void)seq;
    struct oscar_probe_result result;
    struct oscar_lease *lease;
    return oscar_probe(world->model, some_tokens(), 256, &result, &lease);
}

static int call_adopt(struct client_world *world, struct oscar_seq *seq) {
    (void)seq;
    static const uint8_t secret[OSCAR_LEASE_SECRET];
    struct oscar_lease *lease;
    return oscar_lease_adopt(world->model, secret, &lease, NULL);
}

static int call_seq_open(struct client_world *world, struct oscar_seq *seq) {
    (void)seq;
    struct oscar_seq *other;
    return oscar_seq_open(world->model, some_tokens(), 256, 0, &other);
}

static int call_reserve(struct client_world *world, struct oscar_seq *seq) {
    (void)world;
    return oscar_seq_reserve(seq, 512);
}

static int call_advance(struct client_world *world, struct oscar_seq *seq) {
    (void)world;
    return oscar_seq_advance(seq, NULL, some_tokens(), 64);
}

static int call_fork(struct client_world *world, struct oscar_seq *seq) {
    (void)world;
    struct oscar_seq *child;
    return oscar_seq_fork(seq, NULL, &child);
}

static const struct silent_case silent_cases[] = {
    {OSCAR_PING, call_ping},           {OSCAR_MODEL_OPEN, call_model_open}, {OSCAR_PROBE, call_probe},
    {OSCAR_LEASE_ADOPT, call_adopt},   {OSCAR_SEQ_OPEN, call_seq_open},     {OSCAR_SEQ_RESERVE, call_reserve},
    {OSCAR_SEQ_ADVANCE, call_advance}, {OSCAR_SEQ_FORK, call_fork},
};

static void every_call_ends_within_its_deadline_and_all_goes_on_afterwards(void **state) {
    struct client_world *world = *state;
    fake_oscard_set_hit(world->fake, 128, 128);
    for (size_t i = 0; i < sizeof(silent_cases) / sizeof(silent_cases[0]); i++) {
        const struct silent_case *silent = &silent_cases[i];
        struct oscar_seq *seq = written_seq(world->model, 192, 0);
        fake_oscard_hold(world->fake, silent->verb);
        oscar_client_set_timeout(world->client, SHORT_MS);
        double start = now_ms();
        assert_code(OSCAR_ERR_TIMEOUT, silent->call(world, seq));
        assert_true(now_ms() - start < SHORT_MS + MARGIN_MS);
        assert_non_null(strstr(oscar_error_detail(), oscar_verb_name(silent->verb)));

        fake_oscard_let_go(world->fake, silent->verb);
        oscar_client_set_timeout(world->client, LONG_MS);
        assert_ok(oscar_client_ping(world->client));
        assert_ok(oscar_seq_advance(seq, NULL, NULL, 0));
        oscar_seq_close(seq);
    }
}

static void a_late_reply_is_not_taken_for_that_of_a_later_request(void **state) {
    struct client_world *world = *state;
    struct oscar_probe_result result;
    fake_oscard_set_hit(world->fake, 256, 256);
    fake_oscard_hold(world->fake, OSCAR_PROBE);
    oscar_client_set_timeout(world->client, SHORT_MS);
    assert_code(OSCAR_ERR_TIMEOUT, oscar_probe(world->model, some_tokens(), 1024, &result, NULL));
    fake_oscard_let_go(world->fake, OSCAR_PROBE);
    oscar_client_set_timeout(world->client, LONG_MS);
    assert_ok(oscar_probe(world->model, some_tokens(), 64, &result, NULL)); /* a shorter question, a shorter answer */
    assert_int_equal(result.hit_tokens, 64);
}

static void the_window_belongs_to_a_late_reply_until_it_comes(void **state) {
    struct client_world *world = *state;
    struct oscar_probe_result result;
    struct oscar_seq *seq = written_seq(world->model, 128, 0);
    fake_oscard_hold(world->fake, OSCAR_PROBE);
    oscar_client_set_timeout(world->client, SHORT_MS);
    assert_code(OSCAR_ERR_TIMEOUT, oscar_probe(world->model, some_tokens(), 64, &result, NULL));
    unsigned advances = fake_oscard_count(world->fake, OSCAR_SEQ_ADVANCE);
    assert_code(OSCAR_ERR_TIMEOUT, oscar_seq_advance(seq, NULL, some_tokens(), 64));
    oscar_client_set_timeout(world->client, LONG_MS);
    assert_ok(oscar_client_ping(world->client)); /* it needs no window */
    assert_int_equal(fake_oscard_count(world->fake, OSCAR_SEQ_ADVANCE), advances);
    fake_oscard_let_go(world->fake, OSCAR_PROBE);
    assert_ok(oscar_seq_advance(seq, NULL, NULL, 0)); /* tells the tokens that were committed meanwhile */
    assert_int_equal(fake_oscard_last(world->fake, OSCAR_SEQ_ADVANCE).seq_advance.tokens, 64);
    assert_memory_equal(fake_oscard_tokens(world->fake, OSCAR_SEQ_ADVANCE), some_tokens(), 64 * sizeof(uint32_t));
}

static void an_advance_that_ran_out_of_time_is_caught_up_with(void **state) {
    struct client_world *world = *state;
    struct oscar_seq *seq = written_seq(world->model, 256, 0);
    fake_oscard_hold(world->fake, OSCAR_SEQ_ADVANCE);
    oscar_client_set_timeout(world->client, SHORT_MS);
    assert_code(OSCAR_ERR_TIMEOUT, oscar_seq_advance(seq, NULL, some_tokens(), 70));
    assert_int_equal(seq_info(seq).committed_tokens, 70);
    assert_int_equal(seq_info(seq).sealed_tokens, 0);
    uint64_t fence = atomic_load(fake_oscard_fence(world->fake, 0));
    assert_int_equal(fence, 2); /* of the request; the updates of its reply are not taken over yet */
    assert_code(OSCAR_ERR_TIMEOUT, oscar_seq_advance(seq, NULL, some_tokens() + 70, 64));
    assert_true(fake_oscard_wait(world->fake, OSCAR_SEQ_ADVANCE, 1));
    assert_int_equal(fake_oscard_count(world->fake, OSCAR_SEQ_ADVANCE), 1);
    assert_int_equal(seq_info(seq).committed_tokens, 134);

    fake_oscard_let_go(world->fake, OSCAR_SEQ_ADVANCE);
    oscar_client_set_timeout(world->client, LONG_MS);
    assert_ok(oscar_seq_advance(seq, NULL, some_tokens() + 134, 1));
    struct oscar_request last = fake_oscard_last(world->fake, OSCAR_SEQ_ADVANCE);
    assert_int_equal(last.seq_advance.tokens, 65); /* each token once */
    assert_memory_equal(fake_oscard_tokens(world->fake, OSCAR_SEQ_ADVANCE), some_tokens() + 70, 65 * sizeof(uint32_t));
    assert_int_equal(last.seq_advance.fence, 4);
    assert_int_equal(atomic_load(fake_oscard_fence(world->fake, 0)), 5);
    assert_int_equal(seq_info(seq).committed_tokens, 135);
    assert_int_equal(seq_info(seq).sealed_tokens, 128);
}

static void what_a_late_reply_has_made_is_undone(void **state) {
    struct client_world *world = *state;
    fake_oscard_set_hit(world->fake, 128, 128);
    struct oscar_seq *seq = NULL;
    struct oscar_probe_result result;
    struct oscar_lease *lease = NULL;
    struct oscar_model *model = NULL;

    oscar_client_set_timeout(world->client, SHORT_MS);
    fake_oscard_hold(world->fake, OSCAR_SEQ_OPEN);
    assert_code(OSCAR_ERR_TIMEOUT, oscar_seq_open(world->model, some_tokens(), 256, 0, &seq));
    assert_null(seq);
    fake_oscard_let_go(world->fake, OSCAR_SEQ_OPEN);
    oscar_client_set_timeout(world->client, LONG_MS);
    assert_ok(oscar_client_ping(world->client)); /* the window is free for the next question */
    oscar_client_set_timeout(world->client, SHORT_MS);
    fake_oscard_hold(world->fake, OSCAR_PROBE);
    assert_code(OSCAR_ERR_TIMEOUT, oscar_probe(world->model, some_tokens(), 256, &result, &lease));
    assert_null(lease);
    fake_oscard_let_go(world->fake, OSCAR_PROBE);
    fake_oscard_hold(world->fake, OSCAR_MODEL_OPEN);
    assert_code(OSCAR_ERR_TIMEOUT, open_model(world->client, &model));
    assert_null(model);
    fake_oscard_let_go(world->fake, OSCAR_MODEL_OPEN);

    oscar_client_set_timeout(world->client, LONG_MS);
    assert_ok(oscar_client_ping(world->client)); /* takes in the late replies */
    assert_true(fake_oscard_wait(world->fake, OSCAR_SEQ_CLOSE, 1));
    assert_true(fake_oscard_wait(world->fake, OSCAR_LEASE_CLOSE, 1));
    assert_true(fake_oscard_wait(world->fake, OSCAR_MODEL_CLOSE, 1));
    struct oscar_request close = fake_oscard_last(world->fake, OSCAR_SEQ_CLOSE);
    assert_int_equal(close.seq_close.fence, 2);
    assert_true(fake_oscard_fence_then(world->fake, OSCAR_SEQ_CLOSE) >= 2);
    assert_int_equal(fake_oscard_last(world->fake, OSCAR_LEASE_CLOSE).lease_close.lease, 0x500000001);
    assert_int_equal(fake_oscard_last(world->fake, OSCAR_MODEL_CLOSE).model_close.model, FAKE_MODEL);
    assert_ok(oscar_probe(world->model, some_tokens(), 256, &result, NULL)); /* the first open still stands */
}

static void a_model_whose_chunks_do_not_come_in_time_is_closed_again(void **state) {
    struct client_world *world = *state;
    struct oscar_model *model = NULL;
    struct oscar_probe_result result;
    fake_oscard_hold(world->fake, OSCAR_PING); /* what is sent in front of its answer has come with it */
    oscar_client_set_timeout(world->client, SHORT_MS);
    assert_code(OSCAR_ERR_TIMEOUT, open_model(world->client, &model));
    assert_null(model);
    assert_non_null(strstr(oscar_error_detail(), "chunks"));
    assert_true(fake_oscard_wait(world->fake, OSCAR_MODEL_CLOSE, 1));
    fake_oscard_let_go(world->fake, OSCAR_PING);
    oscar_client_set_timeout(world->client, LONG_MS);
    assert_ok(oscar_client_ping(world->client));
    assert_ok(oscar_probe(world->model, some_tokens(), 256, &result, NULL)); /* the first open still stands */
}

static void a_reply_that_nobody_asked_for_is_dropped(void **state) {
    struct client_world *world = *state;
    const struct oscar_reply stray = {.id = 99999, .verb = OSCAR_PING};
    fake_oscard_send(world->fake, &stray);
    assert_ok(oscar_client_ping(world->client));
}

static void a_daemon_that_dies_is_noticed_at_once(void **state) {
    struct client_world *world = *state;
    uint16_t out[QUERY_HEADS * HEAD_DIM];
    struct oscar_seq *seq = written_seq(world->model, 128, 64), *other;
    struct oscar_probe_result result;
    fake_oscard_die_at(world->fake, OSCAR_PROBE);
    double start = now_ms();
    assert_code(OSCAR_ERR_DISCONNECTED, oscar_probe(world->model, some_tokens(), 64, &result, NULL));
    assert_code(OSCAR_ERR_DISCONNECTED, oscar_client_ping(world->client));
    assert_code(OSCAR_ERR_DISCONNECTED, oscar_seq_open(world->model, some_tokens(), 64, 0, &other));
    assert_code(OSCAR_ERR_DISCONNECTED, oscar_seq_reserve(seq, 4096));
    assert_true(now_ms() - start < MARGIN_MS);

    /* What is mapped can be read and written on. */
    assert_ok(attend_once(world->model, seq, 0, out));
    assert_ok(store_value(seq, NULL, 0, 64, 32, 2.0F));
    assert_ok(attend_once(world->model, seq, 96, out));
    assert_code(OSCAR_ERR_DISCONNECTED, oscar_seq_advance(seq, NULL, some_tokens(), 64));
    assert_int_equal(seq_info(seq).committed_tokens, 128);
    oscar_seq_close(seq);
    assert_true(now_ms() - start < MARGIN_MS);
}

static void many_calls_to_a_silent_daemon_leave_nothing_behind(void **state) {
    struct client_world *world = *state;
    fake_oscard_hold(world->fake, OSCAR_PING);
    oscar_client_set_timeout(world->client, 1);
    for (unsigned i = 0; i < 100; i++)
        assert_code(OSCAR_ERR_TIMEOUT, oscar_client_ping(world->client));
    oscar_client_set_timeout(world->client, LONG_MS);
    fake_oscard_let_go(world->fake, OSCAR_PING);
    assert_ok(oscar_client_ping(world->client));
    fake_oscard_hold(world->fake, OSCAR_SEQ_ADVANCE); /* one under way when all is closed */
    struct oscar_seq *seq = written_seq(world->model, 64, 0);
    oscar_client_set_timeout(world->client, SHORT_MS);
    assert_code(OSCAR_ERR_TIMEOUT, oscar_seq_advance(seq, NULL, some_tokens(), 64));
}

int main(void) {
#define WORLD_TEST(name) cmocka_unit_test_setup_teardown(name, world_setup, world_teardown)
    const struct CMUnitTest tests[] = {
        WORLD_TEST(every_call_ends_within_its_deadline_and_all_goes_on_afterwards),
        WORLD_TEST(a_late_reply_is_not_taken_for_that_of_a_later_request),
        WORLD_TEST(the_window_belongs_to_a_late_reply_until_it_comes),
        WORLD_TEST(an_advance_that_ran_out_of_time_is_caught_up_with),
        WORLD_TEST(what_a_late_reply_has_made_is_undone),
        WORLD_TEST(a_model_whose_chunks_do_not_come_in_time_is_closed_again),
        WORLD_TEST(a_reply_that_nobody_asked_for_is_dropped),
        WORLD_TEST(a_daemon_that_dies_is_noticed_at_once),
        WORLD_TEST(many_calls_to_a_silent_daemon_leave_nothing_behind),
    };
    return cmocka_run_group_tests_name("client_deadline", tests, NULL, NULL);
}
