/* SPDX-License-Identifier: Apache-2.0 */
/* Flushes, and what subscribers are told. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
/* cmocka needs the headers above */
#include <cmocka.h>

#include "proto/geometry.h"
#include "tests/support/store_oracle.h"

#define PAGE OSCAR_PAGE_TOKENS

static struct rig rig;
static struct rig_client *a, *b;
static struct oracle oracle;
static uint32_t tokens[20 * PAGE];

static int setup(void **state) {
    (void)state;
    rig_open(&rig, &(struct rig_options){0});
    a = rig_client_new(&rig, "g");
    b = rig_client_new(&rig, "g");
    oracle_open(&oracle, &a->digest);
    rig_tokens(1, 0, 20 * PAGE, tokens);
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

static struct store_flush flush_all(void) {
    struct store_flush flush;
    store_flush(rig.store, NULL, &flush);
    rig_verify(&rig);
    return flush;
}

static void a_flush_frees_what_nobody_reads(void **state) {
    (void)state;
    rig_cache(a, tokens, 10);
    uint64_t bytes =
        oscar_dense_page_bytes(&rig.identity.geometry) + 9 * oscar_packed_page_bytes(&rig.identity.geometry);
    struct store_flush flush = flush_all();
    assert_int_equal(flush.pages_freed, 10);
    assert_true(flush.bytes_freed >= bytes);
    assert_int_equal(flush.pages_deferred, 0);
    assert_int_equal(rig_probe(b, tokens, 10 * PAGE), 0);
    assert_int_equal(rig_metric(&rig, "oscar_memory_used_bytes", "form=\"packed\""), 0);
    assert_int_equal(rig_metric(&rig, "oscar_pages_flushed_total", ""), 10);
    assert_int_equal(rig_metric(&rig, "oscar_pages_evicted_total", ""), 0);
    flush = flush_all();
    assert_int_equal(flush.pages_freed, 0);
}

static void a_flush_takes_no_page_from_under_a_reader(void **state) {
    (void)state;
    rig_cache(a, tokens, 10);
    uint32_t other[4 * PAGE];
    rig_tokens(2, 0, 4 * PAGE, other);
    rig_cache(a, other, 4);
    struct rig_seq *reader = NULL;
    assert_int_equal(rig_seq_open(b, tokens, 8 * PAGE, false, &reader), 0);
    struct store_flush flush = flush_all();
    assert_int_equal(flush.pages_deferred, 8);
    assert_int_equal(flush.pages_freed, 2 + 4);
    assert_int_equal(rig_metric(&rig, "oscar_pages_deferred", ""), 8);
    assert_int_equal(rig_probe(a, tokens, 10 * PAGE), 0); /* unlinked now */
    rig_seq_check(reader);
    rig_seq_close(reader, true); /* freed after the last reader */
    rig_settle(&rig);
    assert_int_equal(rig_metric(&rig, "oscar_pages_deferred", ""), 0);
    assert_int_equal(rig_metric(&rig, "oscar_memory_used_bytes", "form=\"packed\""), 0);
}

static void a_reader_in_flight_keeps_flushed_pages_until_its_fence(void **state) {
    (void)state;
    rig_cache(a, tokens, 8);
    struct rig_seq *reader = NULL;
    assert_int_equal(rig_seq_open(b, tokens, 8 * PAGE, false, &reader), 0);
    (void)flush_all();
    uint32_t slot = reader->fence_slot;
    rig_seq_close(reader, false);
    rig_settle(&rig);
    assert_int_equal(rig_metric(&rig, "oscar_pages_deferred", ""), 8);
    atomic_store(&b->fences[slot], 2);
    rig_settle(&rig);
    assert_int_equal(rig_metric(&rig, "oscar_pages_deferred", ""), 0);
}

static void a_flushed_sequence_goes_on_and_a_new_one_begins_anew(void **state) {
    (void)state;
    struct rig_seq *old = NULL, *fresh = NULL;
    assert_int_equal(rig_seq_open(a, tokens, 0, false, &old), 0);
    assert_int_equal(rig_seq_compute(old, tokens, 8 * PAGE), 0);
    (void)flush_all();
    assert_int_equal(rig_seq_compute(old, tokens + 8 * PAGE, 8 * PAGE), 0);
    assert_int_equal(rig_seq_advance(old, NULL, 0), 0);
    assert_int_equal(rig_seq_form(old, 10), OSCAR_FORM_PACKED); /* still compressed, though never found */
    rig_seq_check(old);
    assert_int_equal(rig_probe(b, tokens, 16 * PAGE), 0);
    assert_int_equal(rig_seq_open(b, tokens, 16 * PAGE, false, &fresh), 0);
    assert_int_equal(rig_seq_compute(fresh, tokens, 16 * PAGE), 0);
    assert_int_equal(rig_probe(a, tokens, 16 * PAGE), 16 * PAGE);
    rig_seq_close(old, true);
    rig_settle(&rig);
    rig_seq_check(fresh);
    assert_int_equal(rig_metric(&rig, "oscar_pages_deferred", ""), 0);
    rig_seq_close(fresh, true);
}

static void a_flush_of_one_model_leaves_the_others(void **state) {
    (void)state;
    rig_cache(a, tokens, 4);
    strcpy(rig.identity.adapter, "lora");
    struct rig_client *other = rig_client_new(&rig, "g");
    rig_cache(other, tokens, 6);
    struct store_flush flush;
    store_flush(rig.store, &other->digest, &flush);
    rig_verify(&rig);
    assert_int_equal(flush.pages_freed, 6);
    assert_int_equal(rig_probe(a, tokens, 4 * PAGE), 4 * PAGE);
    assert_int_equal(rig_probe(other, tokens, 4 * PAGE), 0);
    store_flush(rig.store, &(struct oscar_digest){.bytes = {9}}, &flush);
    assert_int_equal(flush.pages_freed + flush.pages_deferred, 0);
    assert_int_equal(rig.event[rig.events - 1].kind, OSCAR_EVENT_CLEARED);
    assert_memory_equal(&rig.event[rig.events - 1].model, &other->digest, sizeof other->digest);
    rig_client_free(other);
}

static void a_flush_while_pages_are_being_packed_waits_for_the_device(void **state) {
    (void)state;
    struct rig_seq *seq = NULL;
    assert_int_equal(rig_seq_open(a, tokens, 0, false, &seq), 0);
    assert_int_equal(rig_seq_reserve(seq, 8 * PAGE), 0);
    assert_int_equal(rig_seq_advance(seq, tokens, 8 * PAGE), 0);
    rig_seq_signal(seq);
    rig_poll(&rig);
    pool_wait(rig.store->pool);
    fake_device_hold(&rig.device, true);
    rig_poll(&rig);
    rig_seq_close(seq, true);
    struct store_flush flush = flush_all();
    assert_int_equal(flush.pages_freed + flush.pages_deferred, 8);
    assert_true(flush.pages_deferred > 0);
    fake_device_hold(&rig.device, false);
    rig_settle(&rig);
    assert_int_equal(rig_metric(&rig, "oscar_pages_deferred", ""), 0);
    assert_int_equal(rig_metric(&rig, "oscar_memory_used_bytes", "form=\"dense\""), 0);
    assert_int_equal(rig_metric(&rig, "oscar_memory_used_bytes", "form=\"packed\""), 0);
}

static void a_subscriber_rebuilds_the_tree_from_events_alone(void **state) {
    (void)state;
    for (uint32_t seed = 0; seed < 40; seed++) {
        uint32_t path[12 * PAGE], shared = seed * 17 % (12 * PAGE);
        memcpy(path, tokens, sizeof path);
        rig_tokens(100 + seed, shared, 12 * PAGE - shared, path + shared);
        rig_cache(seed % 2 ? a : b, path, 12);
        oracle_follow(&oracle, &rig);
        oracle_check_snapshot(&oracle, &rig, 1 + seed);
        if (seed == 25) {
            (void)flush_all();
            oracle_follow(&oracle, &rig);
            assert_int_equal(oracle.pages, 0);
        }
    }
    assert_true(oracle.pages > 50);
}

static void a_snapshot_goes_on_behind_a_page_that_was_removed_meanwhile(void **state) {
    (void)state;
    rig_cache(a, tokens, 10);
    struct oscar_event events[4];
    uint64_t cursor = 0;
    assert_int_equal(store_snapshot(rig.store, 0, events, 4, &cursor), 4);
    /* The page that the cursor names, and all behind it, go; others come. */
    while (rig_probe(b, tokens, 10 * PAGE) > 3 * PAGE)
        assert_true(tree_evict(rig.store));
    uint32_t other[2 * PAGE];
    rig_tokens(3, 0, 2 * PAGE, other);
    rig_cache(a, other, 2);
    assert_int_equal(store_snapshot(rig.store, cursor, events, 4, &cursor), 2);
    assert_int_equal(cursor, 0);
    assert_int_equal(events[0].depth, 0);
    assert_int_equal(events[1].depth, 1);
    cursor = UINT64_MAX; /* nonsense */
    assert_int_equal(store_snapshot(rig.store, cursor, events, 4, &cursor), 0);
    assert_int_equal(cursor, 0);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(a_flush_frees_what_nobody_reads),
        TEST(a_flush_takes_no_page_from_under_a_reader),
        TEST(a_reader_in_flight_keeps_flushed_pages_until_its_fence),
        TEST(a_flushed_sequence_goes_on_and_a_new_one_begins_anew),
        TEST(a_flush_of_one_model_leaves_the_others),
        TEST(a_flush_while_pages_are_being_packed_waits_for_the_device),
        TEST(a_subscriber_rebuilds_the_tree_from_events_alone),
        TEST(a_snapshot_goes_on_behind_a_page_that_was_removed_meanwhile),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
