/* SPDX-License-Identifier: Apache-2.0 */
/* A full store: eviction, back-pressure, and what fails half-way. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
/* cmocka needs the headers above */
#include <cmocka.h>

#include "tests/support/store_oracle.h"

#define PAGE OSCAR_PAGE_TOKENS

static struct rig rig;
static struct rig_client *a, *b;
static struct oracle oracle;

static void start(const struct rig_options *options) {
    rig_open(&rig, options);
    a = rig_client_new(&rig, "g");
    b = rig_client_new(&rig, "g");
    oracle_open(&oracle, &a->digest);
}

static int setup(void **state) {
    (void)state;
    start(&(struct rig_options){.budget_pages = 32, .chunk_pages = 2});
    return 0;
}

static int teardown(void **state) {
    (void)state;
    rig_client_free(a);
    rig_client_free(b);
    oracle_close(&oracle);
    rig_close(&rig);
    return 0;
}

static void cache(uint32_t seed, uint32_t pages) {
    uint32_t tokens[64 * PAGE];
    rig_tokens(seed, 0, pages * PAGE, tokens);
    rig_cache(a, tokens, pages);
}

static uint32_t cached(uint32_t seed, uint32_t pages) {
    uint32_t tokens[64 * PAGE];
    rig_tokens(seed, 0, pages * PAGE, tokens);
    return rig_probe(b, tokens, pages * PAGE) / PAGE;
}

static struct rig_seq *pin(struct rig_client *client, uint32_t seed, uint32_t pages) {
    uint32_t tokens[64 * PAGE];
    struct rig_seq *seq = NULL;
    rig_tokens(seed, 0, pages * PAGE, tokens);
    assert_int_equal(rig_seq_open(client, tokens, pages * PAGE, false, &seq), 0);
    assert_int_equal(seq->committed, pages * PAGE);
    return seq;
}

static void a_full_store_evicts_steadily_and_refuses_nothing(void **state) {
    (void)state;
    for (uint32_t seed = 1; seed <= 200; seed++) {
        cache(seed, 8);
        assert_int_equal(cached(seed, 8), 8);
        oracle_follow(&oracle, &rig); /* checks that no removal leaves a hole */
    }
    assert_true(rig_metric(&rig, "oscar_pages_evicted_total", "") > 1000);
    assert_int_equal(rig_metric(&rig, "oscar_no_space_total", ""), 0);
    assert_int_equal(cached(1, 8), 0);
    /* The most recent are those that stay. */
    assert_int_equal(cached(199, 8), 8);
}

static void no_space_is_said_only_when_all_is_pinned_and_never_for_longer(void **state) {
    (void)state;
    struct rig_seq *seq[64];
    uint32_t seqs = 0, seed = 1;
    for (;; seed++) {
        uint32_t tokens[4 * PAGE];
        rig_tokens(seed, 0, 4 * PAGE, tokens);
        assert_int_equal(rig_seq_open(a, tokens, 4 * PAGE, false, &seq[seqs]), 0);
        int r = rig_seq_compute(seq[seqs++], tokens, 4 * PAGE);
        if (r == OSCAR_ERR_NO_SPACE)
            break;
        assert_int_equal(r, 0);
        assert_true(seqs < 64);
    }
    assert_int_equal(rig_metric(&rig, "oscar_pages_evictable", ""), 0);
    assert_int_equal(rig_metric(&rig, "oscar_no_space_total", ""), 1);
    /* All or nothing: what the refused reserve had taken was given back. */
    assert_int_equal(seq[seqs - 1]->reserved, 0);
    for (uint32_t i = 0; i < seqs; i++)
        rig_seq_check(seq[i]);
    /* Still full an hour later, still alive. */
    for (uint32_t second = 0; second < 3600; second++) {
        rig.now_ns += UINT64_C(1000000000);
        store_poll(rig.store, rig.now_ns);
    }
    uint32_t tokens[4 * PAGE];
    rig_tokens(seed, 0, 4 * PAGE, tokens);
    assert_int_equal(rig_seq_compute(seq[seqs - 1], tokens, 4 * PAGE), OSCAR_ERR_NO_SPACE);
    rig_seq_close(seq[0], true);
    rig_seq_close(seq[1], true);
    rig_settle(&rig);
    assert_int_equal(rig_seq_compute(seq[seqs - 1], tokens, 4 * PAGE), 0);
    for (uint32_t i = 2; i < seqs; i++) {
        rig_seq_check(seq[i]);
        rig_seq_close(seq[i], true);
    }
}

static void an_open_sequence_is_not_evicted_however_long_it_is_idle(void **state) {
    (void)state;
    cache(1, 8);
    struct rig_seq *seq = pin(b, 1, 8);
    rig.now_ns += UINT64_C(30) * 86400 * 1000000000;
    rig_poll(&rig);
    for (uint32_t seed = 2; seed < 40; seed++)
        cache(seed, 8);
    assert_true(rig_metric(&rig, "oscar_pages_evicted_total", "") > 0);
    rig_seq_check(seq);
    assert_int_equal(cached(1, 8), 8);
    rig_seq_close(seq, true);
}

static void an_eviction_never_leaves_a_hole(void **state) {
    (void)state;
    for (uint32_t seed = 1; seed < 60; seed++) {
        cache(seed, 8);
        oracle_follow(&oracle, &rig);
        for (uint32_t other = seed > 6 ? seed - 6 : 1; other <= seed; other++) {
            uint32_t tokens[8 * PAGE], hit = cached(other, 8);
            rig_tokens(other, 0, 8 * PAGE, tokens);
            assert_int_equal(hit, oracle_hit(&oracle, tokens, 8));
            for (uint32_t page = hit; page < 8; page++)
                assert_int_equal(cached(other, page + 1), hit);
        }
    }
}

static void a_storm_of_probes_pins_nothing_and_keeps_nothing_young(void **state) {
    (void)state;
    cache(1, 8);
    for (uint32_t seed = 2; seed < 60; seed++) {
        for (uint32_t i = 0; i < 100; i++)
            (void)cached(1, 8);
        cache(seed, 8);
    }
    assert_int_equal(cached(1, 8), 0);
    assert_int_equal(rig_metric(&rig, "oscar_no_space_total", ""), 0);
}

static void opening_a_prefix_again_keeps_it(void **state) {
    (void)state;
    cache(1, 4);
    for (uint32_t seed = 2; seed < 60; seed++) {
        rig_seq_close(pin(b, 1, 4), true);
        cache(seed, 8);
    }
    assert_int_equal(cached(1, 4), 4);
}

static void a_page_that_finds_no_room_stays_dense_until_there_is_some(void **state) {
    (void)state;
    teardown(state);
    /* Room for two chunks of two dense pages and one of each other form. */
    start(&(struct rig_options){.budget_pages = 8, .chunk_pages = 2});
    uint32_t tokens[6 * PAGE], other[2 * PAGE];
    rig_tokens(1, 0, 6 * PAGE, tokens);
    rig_tokens(2, 0, 2 * PAGE, other);
    struct rig_seq *filler = NULL, *seq = NULL;
    assert_int_equal(rig_seq_open(b, other, 0, false, &filler), 0);
    assert_int_equal(rig_seq_reserve(filler, 2 * PAGE), 0);
    assert_int_equal(rig_seq_open(a, tokens, 0, false, &seq), 0);
    assert_int_equal(rig_seq_compute(seq, tokens, 6 * PAGE), 0);
    assert_int_equal(rig_metric(&rig, "oscar_pages_packed_total", ""), 0);
    assert_int_equal(rig_metric(&rig, "oscar_pages_waiting_for_packing", ""), 2);
    rig_seq_check(seq);
    rig_seq_close(filler, true);
    rig_settle(&rig);
    assert_int_equal(rig_metric(&rig, "oscar_pages_waiting_for_packing", ""), 1); /* one chunk was to be had */
    rig_seq_close(seq, true);
}

static void a_reserve_fails_as_a_whole_at_whatever_chunk(void **state) {
    (void)state;
    uint32_t tokens[12 * PAGE];
    rig_tokens(1, 0, 12 * PAGE, tokens);
    for (enum fake_call call = FAKE_CHUNK_CREATE; call <= FAKE_CHUNK_EXPORT; call++)
        for (uint64_t k = 1; k <= 6; k++) {
            struct rig_seq *seq = NULL;
            struct rig_client *client = rig_client_new(&rig, "g");
            assert_int_equal(rig_seq_open(client, tokens, 0, false, &seq), 0);
            uint64_t before = rig_metric(&rig, "oscar_memory_used_bytes", "form=\"dense\"");
            fake_device_fail(&rig.device, call, k, 1, OSCAR_ERR_DEVICE);
            assert_int_equal(rig_seq_reserve(seq, 12 * PAGE), OSCAR_ERR_DEVICE);
            assert_int_equal(rig_metric(&rig, "oscar_memory_used_bytes", "form=\"dense\""), before);
            fake_device_fail(&rig.device, call, 0, 0, 0);
            assert_int_equal(rig_seq_compute(seq, tokens, 12 * PAGE), 0);
            rig_seq_check(seq);
            rig_seq_close(seq, true);
            rig_settle(&rig);
            rig_client_free(client);
            struct store_flush flush;
            store_flush(rig.store, NULL, &flush);
            assert_int_equal(flush.pages_deferred, 0);
            while (memory_reclaim(&rig.store->memory))
                ;
            rig_verify(&rig);
            rig_settle(&rig);
            assert_int_equal(fake_device_bytes(&rig.device), 0);
        }
}

static void packed_pages_leave_room_for_dense_ones(void **state) {
    (void)state;
    for (uint32_t seed = 1; seed <= 100; seed++)
        cache(seed, 8);
    uint64_t evicted = rig_metric(&rig, "oscar_pages_evicted_total", "");
    assert_true(evicted > 0);
    /* An eighth of 32 pages, by a client that has no chunk yet. */
    struct rig_seq *seq = NULL;
    assert_int_equal(rig_seq_open(b, NULL, 0, false, &seq), 0);
    assert_int_equal(rig_seq_reserve(seq, 4 * PAGE), 0);
    assert_int_equal(rig_metric(&rig, "oscar_pages_evicted_total", ""), evicted);
    rig_seq_close(seq, true);
}

static void a_writer_that_outruns_packing_waits_for_it_and_evicts_nothing(void **state) {
    (void)state;
    cache(1, 8);
    uint32_t tokens[12 * PAGE];
    rig_tokens(3, 0, 12 * PAGE, tokens);
    fake_device_hold(&rig.device, true);
    struct rig_seq *seq = NULL;
    assert_int_equal(rig_seq_open(a, tokens, 12 * PAGE, false, &seq), 0);
    assert_int_equal(rig_seq_reserve(seq, 12 * PAGE), 0);
    assert_int_equal(rig_seq_advance(seq, tokens, 12 * PAGE), 0);
    rig_seq_signal(seq);
    int r = 0;
    while (r == 0)
        r = rig_seq_reserve(seq, seq->reserved - seq->committed + PAGE);
    assert_int_equal(r, OSCAR_ERR_NO_SPACE);
    assert_true(seq->reserved <= 14 * PAGE); /* what was free in its chunks: the budget had room for more */
    assert_int_equal(rig_metric(&rig, "oscar_pages_evicted_total", ""), 0);
    assert_int_equal(cached(1, 8), 8);
    fake_device_hold(&rig.device, false);
    rig_settle(&rig);
    assert_int_equal(rig_seq_reserve(seq, seq->reserved - seq->committed + PAGE), 0);
    assert_int_equal(cached(1, 8), 8);
    rig_seq_close(seq, true);
}

static void a_failing_device_does_not_empty_the_cache(void **state) {
    (void)state;
    cache(1, 8);
    cache(2, 8);
    struct rig_client *client = rig_client_new(&rig, "g");
    struct rig_seq *seq = NULL;
    assert_int_equal(rig_seq_open(client, NULL, 0, false, &seq), 0);
    fake_device_fail(&rig.device, FAKE_CHUNK_CREATE, 1, 1000, OSCAR_ERR_NO_MEMORY);
    assert_int_equal(rig_seq_reserve(seq, 4 * PAGE), OSCAR_ERR_NO_MEMORY);
    assert_int_equal(cached(1, 8), 8);
    assert_int_equal(cached(2, 8), 8);
    fake_device_fail(&rig.device, FAKE_CHUNK_CREATE, 0, 0, 0);
    rig_client_free(client);
    rig_seq_forget(seq);
}

static void a_device_that_is_full_before_the_budget_is_gets_one_chunk_back(void **state) {
    (void)state;
    for (uint32_t seed = 1; seed <= 4; seed++)
        cache(seed, 8);
    rig_settle(&rig);
    while (memory_reclaim(&rig.store->memory)) /* what is left is in use */
        rig_settle(&rig);
    struct rig_client *client = rig_client_new(&rig, "g");
    struct rig_seq *seq = NULL;
    assert_int_equal(rig_seq_open(client, NULL, 0, false, &seq), 0);
    fake_device_fail(&rig.device, FAKE_CHUNK_CREATE, 1, 0, OSCAR_ERR_NO_SPACE);
    assert_int_equal(rig_seq_reserve(seq, PAGE), 0);
    uint64_t evicted = rig_metric(&rig, "oscar_pages_evicted_total", "");
    assert_true(evicted > 0 && evicted < 32);
    /* It stays full: whoever asks is told so, and costs no more than that one chunk. */
    fake_device_fail(&rig.device, FAKE_CHUNK_CREATE, 1, 1000, OSCAR_ERR_NO_SPACE);
    assert_int_equal(rig_seq_reserve(seq, 8 * PAGE), OSCAR_ERR_NO_SPACE);
    assert_true(cached(1, 8) + cached(2, 8) + cached(3, 8) + cached(4, 8) > 0);
    fake_device_fail(&rig.device, FAKE_CHUNK_CREATE, 0, 0, 0);
    rig_seq_close(seq, true);
    rig_settle(&rig);
    rig_client_free(client);
}

static void each_step_of_a_seal_may_fail_and_nothing_leaks(void **state) {
    (void)state;
    uint32_t tokens[10 * PAGE];
    for (enum fake_call call = FAKE_INSPECT; call < FAKE_CALLS; call++)
        for (uint64_t k = 1; k <= 10; k++) {
            rig_tokens(100 * call + (uint32_t)k, 0, 10 * PAGE, tokens);
            struct rig_seq *seq = NULL;
            assert_int_equal(rig_seq_open(a, tokens, 10 * PAGE, false, &seq), 0);
            fake_device_fail(&rig.device, call, k, 0, OSCAR_ERR_DEVICE);
            assert_int_equal(rig_seq_compute(seq, tokens, 10 * PAGE), 0);
            uint32_t hit = rig_probe(b, tokens, 10 * PAGE) / PAGE;
            struct rig_seq *reader = NULL;
            if (call == FAKE_INSPECT) {
                assert_int_equal(hit, k == 1 ? 0 : 10); /* all ten are looked at in one call, or none is */
                assert_int_equal(rig_seq_advance(seq, NULL, 0), k == 1 ? OSCAR_ERR_DEVICE : 0);
            } else {
                assert_int_equal(hit, 10); /* served from its dense form, packed by the next attempt */
            }
            assert_int_equal(rig_seq_open(b, tokens, hit * PAGE, false, &reader), 0);
            rig_seq_check(reader);
            rig_seq_close(reader, true);
            rig_seq_close(seq, true);
            rig_settle(&rig);
            fake_device_fail(&rig.device, call, 0, 0, 0);
            assert_int_equal(rig_metric(&rig, "oscar_memory_used_bytes", "form=\"dense\""), 0);
        }
}

static void a_blocked_device_holds_up_no_request(void **state) {
    (void)state;
    cache(1, 8);
    fake_device_hold(&rig.device, true);
    uint32_t tokens[4 * PAGE];
    rig_tokens(2, 0, 4 * PAGE, tokens);
    struct rig_seq *writer = NULL, *reader;
    assert_int_equal(rig_seq_open(a, tokens, 0, false, &writer), 0);
    assert_int_equal(rig_seq_reserve(writer, 4 * PAGE), 0);
    assert_int_equal(rig_seq_advance(writer, tokens, 4 * PAGE), 0);
    rig_seq_signal(writer);
    for (int i = 0; i < 60; i++) {
        rig.now_ns += UINT64_C(1000000000);
        rig_poll(&rig);
        reader = pin(b, 1, 8);
        rig_seq_check(reader);
        rig_seq_close(reader, true);
    }
    struct store_flush flush;
    store_flush(rig.store, NULL, &flush);
    rig_verify(&rig);
    assert_int_equal(cached(1, 8), 0);
    assert_int_equal(cached(2, 4), 0);
    fake_device_hold(&rig.device, false);
    rig_settle(&rig);
    assert_int_equal(cached(2, 4), 4);
    rig_seq_close(writer, true);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(a_full_store_evicts_steadily_and_refuses_nothing),
        TEST(no_space_is_said_only_when_all_is_pinned_and_never_for_longer),
        TEST(an_open_sequence_is_not_evicted_however_long_it_is_idle),
        TEST(an_eviction_never_leaves_a_hole),
        TEST(a_storm_of_probes_pins_nothing_and_keeps_nothing_young),
        TEST(opening_a_prefix_again_keeps_it),
        TEST(a_page_that_finds_no_room_stays_dense_until_there_is_some),
        TEST(a_reserve_fails_as_a_whole_at_whatever_chunk),
        TEST(packed_pages_leave_room_for_dense_ones),
        TEST(a_writer_that_outruns_packing_waits_for_it_and_evicts_nothing),
        TEST(a_failing_device_does_not_empty_the_cache),
        TEST(a_device_that_is_full_before_the_budget_is_gets_one_chunk_back),
        TEST(each_step_of_a_seal_may_fail_and_nothing_leaks),
        TEST(a_blocked_device_holds_up_no_request),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
