/* SPDX-License-Identifier: Apache-2.0 */
/* A store whose device takes its time, refuses, fails or hangs: who waits, who does not, and what is left afterwards. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
/* cmocka needs the headers above */
#include <cmocka.h>

#include "tests/support/store_rig.h"

#define PAGE OSCAR_PAGE_TOKENS
#define SECOND_NS UINT64_C(1000000000)

static struct rig rig;
static struct rig_client *a, *b;
static uint32_t tokens[20 * PAGE];

static void start(const struct rig_options *options) {
    rig_open(&rig, options);
    a = rig_client_new(&rig, "g");
    b = rig_client_new(&rig, "g");
    rig_tokens(1, 0, 20 * PAGE, tokens);
}

static int setup(void **state) {
    (void)state;
    start(&(struct rig_options){.budget_pages = 64, .chunk_pages = 4});
    return 0;
}

static int teardown(void **state) {
    (void)state;
    fake_device_hold(&rig.device, false);
    fake_device_hold_memory(&rig.device, false);
    if (a)
        rig_client_free(a);
    rig_client_free(b);
    rig_close(&rig);
    return 0;
}

static struct rig_seq *open_seq(struct rig_client *client, uint32_t count) {
    struct rig_seq *seq = NULL;
    assert_int_equal(rig_seq_open(client, tokens, count, false, &seq), 0);
    return seq;
}

/* The device gives no memory for now; requests that need some are left parked. */
static void hold_memory(void) {
    rig.patient = true;
    fake_device_hold_memory(&rig.device, true);
}

static void give_memory(void) {
    fake_device_hold_memory(&rig.device, false);
    rig_settle(&rig);
}

static uint64_t dense_used(void) { return rig_metric(&rig, "oscar_memory_used_bytes", "form=\"dense\""); }
static uint64_t moving(void) { return rig_metric(&rig, "oscar_memory_moving_bytes", ""); }

static uint64_t all_chunks(void) {
    return rig_metric(&rig, "oscar_memory_chunk_bytes", "form=\"sink\"") +
           rig_metric(&rig, "oscar_memory_chunk_bytes", "form=\"dense\"") +
           rig_metric(&rig, "oscar_memory_chunk_bytes", "form=\"packed\"");
}

static void who_needs_a_chunk_waits_for_it_and_nobody_else_does(void **state) {
    (void)state;
    rig_cache(b, tokens, 8);
    hold_memory();
    struct rig_seq *writer = open_seq(a, 0);
    assert_int_equal(rig_seq_reserve(writer, 3 * PAGE), OSCAR_PARKED);
    assert_true(moving() > 0);
    for (int i = 0; i < 4; i++) {
        rig.now_ns += SECOND_NS;
        rig_poll(&rig);
        struct rig_seq *reader = open_seq(b, 8 * PAGE);
        assert_int_equal(reader->committed, 8 * PAGE);
        rig_seq_check(reader);
        rig_seq_close(reader, true);
        assert_int_equal(rig_probe(b, tokens, 8 * PAGE), 8 * PAGE);
    }
    struct store_flush flush;
    store_flush(rig.store, NULL, &flush);
    rig_verify(&rig);
    assert_int_equal(rig_probe(b, tokens, 8 * PAGE), 0);
    assert_null(rig_answered(a, 0));

    give_memory();
    const struct oscar_reply *reply = rig_answered(a, 0);
    assert_non_null(reply);
    assert_int_equal(reply->error, 0);
    assert_int_equal(reply->verb, OSCAR_SEQ_RESERVE);
    assert_int_equal(reply->seq_reserve.updates, 3);
    assert_int_equal(reply->seq_reserve.reserved_tokens, 3 * PAGE);
    rig_seq_close(writer, true);
}

static void memory_that_does_not_come_is_not_waited_for_for_ever(void **state) {
    (void)state;
    hold_memory();
    struct rig_seq *seq = open_seq(a, 0);
    assert_int_equal(rig_seq_reserve(seq, 6 * PAGE), OSCAR_PARKED);
    uint64_t deadline = store_next_deadline(rig.store);
    assert_in_range(deadline, rig.now_ns + SECOND_NS, rig.now_ns + 10 * SECOND_NS);
    rig.now_ns = deadline;
    rig_poll(&rig);
    assert_int_equal(rig_answered(a, 0)->error, OSCAR_ERR_TIMEOUT);
    assert_int_equal(store_next_deadline(rig.store), 0);
    assert_int_equal(dense_used(), 0);
    give_memory();
    rig.patient = false;
    assert_int_equal(rig_seq_compute(seq, tokens, 6 * PAGE), 0); /* in the chunks that have come meanwhile */
    rig_seq_check(seq);
    rig_seq_close(seq, true);
}

static void a_parked_reserve_is_given_up_by_the_next_use_of_the_window(void **state) {
    (void)state;
    struct rig_seq *seq = open_seq(a, 0);
    assert_int_equal(rig_seq_reserve(seq, 3 * PAGE), 0); /* one slot of its chunk is left, and perhaps a chunk ahead */
    rig_settle(&rig);
    uint64_t used = dense_used();
    hold_memory();
    assert_int_equal(rig_seq_reserve(seq, 20 * PAGE), OSCAR_PARKED);
    assert_true(dense_used() > used); /* what there was is held for it */
    uint64_t id = a->request_id;
    (void)rig_probe(a, tokens, PAGE);
    assert_int_equal(rig_answered(a, id)->error, OSCAR_ERR_STATE);
    assert_int_equal(dense_used(), used);
    give_memory();
    assert_int_equal(a->answers, 1);
    rig_seq_close(seq, true);
}

static void a_client_that_goes_leaves_nothing_of_what_was_made_for_it(void **state) {
    (void)state;
    for (int exits = 0; exits < 2; exits++) {
        if (!a)
            a = rig_client_new(&rig, "g");
        hold_memory();
        struct rig_seq *seq = open_seq(a, 0);
        assert_int_equal(rig_seq_reserve(seq, 6 * PAGE), OSCAR_PARKED);
        rig_client_gone(a);
        if (exits)
            rig_client_exited(a);
        give_memory();
        if (!exits)
            rig_client_exited(a);
        rig_settle(&rig);
        rig.patient = false;
        rig_seq_forget(seq);
        a = NULL;
        assert_int_equal(all_chunks() + moving(), 0);
        assert_int_equal(fake_device_bytes(&rig.device), 0);
    }
}

static void a_fork_waits_for_a_chunk_too(void **state) {
    (void)state;
    struct rig_seq *parent = open_seq(a, 0), *child = NULL;
    assert_int_equal(rig_seq_compute(parent, tokens, PAGE + 7), 0);
    hold_memory();
    int r = 0;
    while (r == 0) /* all that its chunks have */
        r = rig_seq_reserve(parent, parent->reserved - parent->committed + PAGE);
    assert_int_equal(r, OSCAR_PARKED);
    assert_int_equal(rig_seq_fork(parent, &child), OSCAR_PARKED);
    rig_poll(&rig);
    assert_null(rig_answered(a, 0));
    give_memory();
    assert_non_null(rig_answered(a, 0));
    assert_int_equal(rig_answered(a, 0)->error, 0);
    child = rig_seq_forked(parent, rig_answered(a, 0));
    rig_seq_check(child);
    rig_seq_close(child, true);
    rig_seq_close(parent, true);
}

static void the_next_chunk_is_there_before_it_is_needed(void **state) {
    (void)state;
    struct rig_seq *seq = open_seq(a, 0);
    assert_int_equal(rig_seq_reserve(seq, 4 * PAGE), 0); /* the whole of a chunk */
    rig_settle(&rig);
    hold_memory();
    assert_int_equal(rig_seq_reserve(seq, 8 * PAGE), 0);
    give_memory();
    rig_seq_close(seq, true);
}

static void no_chunk_is_made_ahead_for_a_writer_that_outruns_packing(void **state) {
    (void)state;
    fake_device_hold(&rig.device, true);
    struct rig_seq *seq = open_seq(a, 0);
    int r = 0;
    while (r == 0 && seq->committed < 20 * PAGE) {
        r = rig_seq_reserve(seq, PAGE);
        if (r == 0)
            r = rig_seq_advance(seq, tokens + seq->committed, PAGE);
        rig_seq_signal(seq);
        while (memory_moves(&rig.store->memory))
            rig_poll(&rig);
    }
    assert_int_equal(r, OSCAR_ERR_NO_SPACE);
    /* An eighth of the budget is on its way; beyond it the writer gets what its last chunk has. */
    assert_in_range(seq->committed / PAGE, 8, 12);
    fake_device_hold(&rig.device, false);
    rig_settle(&rig);
    assert_int_equal(rig_seq_reserve(seq, PAGE), 0);
    rig_seq_close(seq, true);
}

static void no_chunk_is_made_ahead_where_the_budget_is_short(void **state) {
    (void)state;
    teardown(state);
    start(&(struct rig_options){.budget_pages = 12, .chunk_pages = 4});
    struct rig_seq *seq = open_seq(a, 0);
    assert_int_equal(rig_seq_reserve(seq, 8 * PAGE), 0);
    rig_settle(&rig);
    uint64_t page = dense_used() / 8;
    assert_int_equal(all_chunks() + moving(), 8 * page);
    rig_seq_close(seq, true);
}

static void memory_counts_from_its_order_until_the_device_has_it_back(void **state) {
    (void)state;
    uint64_t budget = rig_metric(&rig, "oscar_memory_budget_bytes", "");
    struct rig_seq *seq = open_seq(a, 0), *other = open_seq(b, 0);
    hold_memory();
    assert_int_equal(rig_seq_reserve(seq, 20 * PAGE), OSCAR_PARKED);
    assert_int_equal(fake_device_bytes(&rig.device), 0);
    uint64_t ordered = moving();
    assert_true(ordered > 0);
    assert_int_equal(rig_seq_reserve(other, 20 * PAGE), OSCAR_PARKED);
    assert_true(moving() > ordered && moving() <= budget);
    give_memory();
    assert_int_equal(moving(), 0);
    assert_int_equal(fake_device_bytes(&rig.device), all_chunks());
    rig_seq_close(other, true);
    rig_settle(&rig);

    uint64_t before = all_chunks();
    fake_device_hold_memory(&rig.device, true);
    while (memory_reclaim(&rig.store->memory))
        rig_verify(&rig);
    assert_true(all_chunks() < before);
    assert_int_equal(all_chunks() + moving(), before);
    assert_int_equal(fake_device_bytes(&rig.device), before);
    give_memory();
    assert_int_equal(moving(), 0);
    assert_int_equal(fake_device_bytes(&rig.device), all_chunks());
    rig_seq_close(seq, true);
}

static void nobody_is_told_no_space_while_a_chunk_is_on_its_way_back(void **state) {
    (void)state;
    teardown(state);
    start(&(struct rig_options){.budget_pages = 12, .chunk_pages = 4});
    struct rig_seq *filler = open_seq(b, 0), *seq = open_seq(a, 0);
    assert_int_equal(rig_seq_reserve(filler, 12 * PAGE), 0);
    assert_int_equal(rig_seq_reserve(seq, PAGE), OSCAR_ERR_NO_SPACE);
    rig_seq_close(filler, true);
    rig_settle(&rig);
    hold_memory();
    assert_int_equal(rig_seq_reserve(seq, PAGE), OSCAR_PARKED); /* a chunk of the other client's is freed for it */
    assert_int_equal(rig_metric(&rig, "oscar_no_space_total", ""), 1);
    give_memory();
    assert_int_equal(rig_answered(a, 0)->error, 0);
    rig_seq_close(seq, true);
}

static void a_failure_of_an_order_that_nobody_waits_for_is_nobodys(void **state) {
    (void)state;
    struct rig_seq *seq = open_seq(a, 0);
    fake_device_fail(&rig.device, FAKE_CHUNK_CREATE, 2, 0, OSCAR_ERR_NO_MEMORY);
    assert_int_equal(rig_seq_reserve(seq, 4 * PAGE), 0);
    rig_settle(&rig);
    assert_int_equal(rig_seq_reserve(seq, 8 * PAGE), 0);
    rig_seq_close(seq, true);
}

static void a_device_that_fails_is_reported_once_and_publishes_nothing(void **state) {
    (void)state;
    for (enum fake_call call = FAKE_CHUNK_CREATE; call < FAKE_CALLS; call++) {
        rig.store->device_failed = false;
        rig.device_failures = 0;
        struct rig_seq *seq = open_seq(a, 0);
        fake_device_fail(&rig.device, call, 1, 1000, OSCAR_ERR_DEVICE);
        int r = rig_seq_compute(seq, tokens, 8 * PAGE);
        assert_int_equal(r, call <= FAKE_CHUNK_EXPORT ? OSCAR_ERR_DEVICE : 0);
        assert_int_equal(rig.device_failures, 1);
        if (call == FAKE_PACK)
            assert_int_equal(rig_metric(&rig, "oscar_pages", "form=\"packed\""), 0);
        if (call == FAKE_COPY)
            assert_int_equal(rig_metric(&rig, "oscar_pages", "form=\"sink\""), 0);
        if (call <= FAKE_INSPECT)
            assert_int_equal(rig_probe(b, tokens, 8 * PAGE), 0);
        fake_device_fail(&rig.device, call, 0, 0, 0);
        rig_seq_close(seq, true);
        rig_settle(&rig);
        struct store_flush flush;
        store_flush(rig.store, NULL, &flush);
        while (memory_reclaim(&rig.store->memory))
            ;
        rig_settle(&rig);
    }
}

static void a_model_is_open_when_the_device_has_its_calibration(void **state) {
    (void)state;
    struct oscar_identity other = rig.identity;
    other.weights.bytes[0] ^= 2;
    struct oscar_reply reply = {0};
    struct oscar_cause cause = {0};
    int fd[2];
    unsigned fds;
    for (int refused = 1; refused >= 0; refused--) {
        struct oscar_calibration *calibration = NULL;
        assert_int_equal(oscar_calibration_default(&other.geometry, &calibration, NULL), 0);
        fake_device_fail(&rig.device, FAKE_CALIBRATION_LOAD, (uint64_t)refused, 0, OSCAR_ERR_NO_SPACE);
        fake_device_hold_memory(&rig.device, true);
        uint32_t before = rig.models_changed;
        for (int i = 0; i < 3; i++) { /* the second comes with a calibration of its own, the third asks again */
            struct rig_client *client = i == 1 ? b : a;
            struct oscar_calibration *mine = calibration;
            if (i > 0)
                mine = NULL;
            if (i == 1)
                assert_int_equal(oscar_calibration_default(&other.geometry, &mine, NULL), 0);
            assert_int_equal(
                store_model_open(rig.store, client->client, &other, mine, -1, -1, &reply, fd, &fds, &cause),
                OSCAR_PARKED);
        }
        rig_poll(&rig);
        assert_int_equal(rig.models_changed, before);
        give_memory();
        assert_int_equal(rig.models_changed, before + 1);
        int expected = refused ? OSCAR_ERR_NO_SPACE : 0;
        assert_int_equal(rig_model_open(a, &other, NULL, &reply, &cause), expected);
        assert_int_equal(rig_model_open(b, &other, NULL, &reply, &cause), expected);
        assert_int_equal(rig.device.calibrations, refused ? 1 : 2);
    }
}

static void a_call_that_hangs_is_seen_and_holds_up_no_look_up(void **state) {
    (void)state;
    rig_cache(b, tokens, 8);
    assert_int_equal(store_oldest_work(rig.store), 0);
    fake_device_hold(&rig.device, true);
    fake_device_hold_memory(&rig.device, true);
    struct rig_seq *seq = open_seq(a, 0);
    rig.patient = true;
    assert_int_equal(rig_seq_reserve(seq, PAGE), OSCAR_PARKED);
    uint64_t work = store_oldest_work(rig.store);
    assert_int_not_equal(work, 0);
    for (int second = 0; second < 60; second++) {
        rig.now_ns += SECOND_NS;
        rig_poll(&rig);
        assert_int_equal(store_oldest_work(rig.store), work);
        assert_int_equal(rig_probe(b, tokens, 8 * PAGE), 8 * PAGE);
    }
    fake_device_hold(&rig.device, false);
    give_memory();
    assert_int_equal(store_oldest_work(rig.store), 0);
    rig_seq_close(seq, true);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(who_needs_a_chunk_waits_for_it_and_nobody_else_does),
        TEST(memory_that_does_not_come_is_not_waited_for_for_ever),
        TEST(a_parked_reserve_is_given_up_by_the_next_use_of_the_window),
        TEST(a_client_that_goes_leaves_nothing_of_what_was_made_for_it),
        TEST(a_fork_waits_for_a_chunk_too),
        TEST(the_next_chunk_is_there_before_it_is_needed),
        TEST(no_chunk_is_made_ahead_for_a_writer_that_outruns_packing),
        TEST(no_chunk_is_made_ahead_where_the_budget_is_short),
        TEST(memory_counts_from_its_order_until_the_device_has_it_back),
        TEST(nobody_is_told_no_space_while_a_chunk_is_on_its_way_back),
        TEST(a_failure_of_an_order_that_nobody_waits_for_is_nobodys),
        TEST(a_device_that_fails_is_reported_once_and_publishes_nothing),
        TEST(a_model_is_open_when_the_device_has_its_calibration),
        TEST(a_call_that_hangs_is_seen_and_holds_up_no_look_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
