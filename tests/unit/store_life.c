/* SPDX-License-Identifier: Apache-2.0 */
/* The life of a page: reserved, sealed, shared, packed, and what its readers are told. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
/* cmocka needs the headers above */
#include <cmocka.h>

#include "proto/geometry.h"
#include "tests/support/store_rig.h"

#define PAGE OSCAR_PAGE_TOKENS

static struct rig rig;
static struct rig_client *a, *b;
static uint32_t tokens[40 * PAGE];

static int setup(void **state) {
    (void)state;
    rig_open(&rig, &(struct rig_options){0});
    a = rig_client_new(&rig, "g");
    b = rig_client_new(&rig, "g");
    rig_tokens(1, 0, 40 * PAGE, tokens);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    rig_client_free(a);
    rig_client_free(b);
    rig_close(&rig);
    return 0;
}

static struct rig_seq *open_seq(struct rig_client *client, uint32_t count, uint32_t expected_hit) {
    struct rig_seq *seq = NULL;
    assert_int_equal(rig_seq_open(client, tokens, count, false, &seq), 0);
    assert_int_equal(seq->committed, expected_hit);
    return seq;
}

static void compute(struct rig_seq *seq, uint32_t count) {
    assert_int_equal(rig_seq_compute(seq, tokens + seq->committed, count), 0);
}

static uint64_t waiting(const struct rig_client *client) {
    return ((const struct oscar_window_header *)client->window)->updates_waiting;
}

static void a_computed_prefix_is_found_by_another_client(void **state) {
    (void)state;
    struct rig_seq *writer = open_seq(a, 20 * PAGE, 0);
    compute(writer, 20 * PAGE - 10);
    assert_int_equal(rig_metric(&rig, "oscar_pages_sealed_total", ""), 19);

    struct rig_seq *reader = open_seq(b, 20 * PAGE, 19 * PAGE);
    rig_seq_check(reader);
    assert_int_equal(rig_seq_form(reader, 0), OSCAR_FORM_SINK);
    for (uint32_t page = 1; page < 15; page++)
        assert_int_equal(rig_seq_form(reader, page), OSCAR_FORM_PACKED);
    for (uint32_t page = 15; page < 19; page++)
        assert_int_equal(rig_seq_form(reader, page), OSCAR_FORM_DENSE);
    rig_seq_close(writer, true);
    rig_seq_check(reader);
    rig_seq_close(reader, true);
    rig_settle(&rig);
    assert_int_equal(rig_metric(&rig, "oscar_pages", "form=\"packed\""), 18);
    assert_int_equal(rig_metric(&rig, "oscar_pages", "form=\"dense\""), 0);
}

static void a_hit_never_exceeds_the_prompt_rounded_down_to_pages(void **state) {
    (void)state;
    rig_cache(a, tokens, 3);
    assert_int_equal(rig_probe(b, tokens, 3 * PAGE), 3 * PAGE);
    assert_int_equal(rig_probe(b, tokens, 3 * PAGE - 1), 2 * PAGE);
    assert_int_equal(rig_probe(b, tokens, PAGE - 1), 0);
    assert_int_equal(rig_probe(b, tokens, 0), 0);
}

static void a_page_is_not_visible_before_its_fence(void **state) {
    (void)state;
    struct rig_seq *writer = open_seq(a, 2 * PAGE, 0);
    assert_int_equal(rig_seq_reserve(writer, 2 * PAGE), 0);
    assert_int_equal(rig_seq_advance(writer, tokens, 2 * PAGE), 0);
    rig_settle(&rig);
    assert_true(store_poll_pending(rig.store));
    assert_int_equal(rig_probe(b, tokens, 2 * PAGE), 0);
    /* One short of the fence is not reached. */
    atomic_store(&a->fences[writer->fence_slot], writer->fence - 1);
    rig_settle(&rig);
    assert_int_equal(rig_probe(b, tokens, 2 * PAGE), 0);
    rig_seq_signal(writer);
    rig_settle(&rig);
    assert_int_equal(rig_probe(b, tokens, 2 * PAGE), 2 * PAGE);
    rig_seq_close(writer, true);
}

static void a_page_is_not_visible_before_it_has_been_inspected(void **state) {
    (void)state;
    struct rig_seq *writer = open_seq(a, 2 * PAGE, 0);
    assert_int_equal(rig_seq_reserve(writer, 2 * PAGE), 0);
    fake_device_hold(&rig.device, true);
    assert_int_equal(rig_seq_advance(writer, tokens, 2 * PAGE), 0);
    rig_seq_signal(writer);
    rig_poll(&rig);
    rig_poll(&rig);
    assert_int_equal(rig_probe(b, tokens, 2 * PAGE), 0);
    fake_device_hold(&rig.device, false);
    rig_settle(&rig);
    assert_int_equal(rig_probe(b, tokens, 2 * PAGE), 2 * PAGE);
    rig_seq_close(writer, true);
}

static void a_page_that_is_dense_already_is_shared_and_the_duplicate_goes_back(void **state) {
    (void)state;
    struct rig_seq *first = open_seq(a, 0, 0), *second = open_seq(b, 0, 0);
    compute(first, 3 * PAGE);
    uint64_t before = rig_metric(&rig, "oscar_memory_used_bytes", "form=\"dense\"");
    uint64_t told = waiting(b);
    compute(second, 3 * PAGE);
    assert_int_equal(rig_metric(&rig, "oscar_pages_deduplicated_total", ""), 3);
    assert_int_equal(waiting(b), told + 1);
    assert_int_equal(rig_seq_advance(second, NULL, 0), 0);
    for (uint32_t page = 1; page < 3; page++)
        assert_int_equal(second->page[page], first->page[page]);
    assert_int_equal(rig_seq_form(second, 0), OSCAR_FORM_SINK);
    rig_settle(&rig);
    rig_seq_check(second);
    rig_seq_signal(second);
    assert_int_equal(rig_seq_advance(first, NULL, 0), 0);
    rig_seq_signal(first);
    rig_settle(&rig);
    rig_seq_check(second);
    /* Two dense pages are left for both; page 0 is a sink. */
    assert_true(rig_metric(&rig, "oscar_memory_used_bytes", "form=\"dense\"") < before);
    rig_seq_close(first, true);
    rig_seq_close(second, true);
}

static void a_page_that_is_packed_already_stays_private_until_it_leaves_the_window(void **state) {
    (void)state;
    rig_cache(a, tokens, 3);
    struct rig_seq *seq = NULL;
    /* Computed from the beginning as if it had not been there: opened with an empty prompt. */
    assert_int_equal(rig_seq_open(b, tokens, 0, false, &seq), 0);
    compute(seq, 3 * PAGE);
    assert_int_equal(rig_seq_advance(seq, NULL, 0), 0);
    rig_seq_signal(seq);
    assert_int_equal(rig_seq_form(seq, 0), OSCAR_FORM_SINK); /* the sink is in nobody's window */
    assert_int_equal(rig_seq_form(seq, 1), OSCAR_FORM_DENSE);
    assert_int_equal(rig_seq_form(seq, 2), OSCAR_FORM_DENSE);
    compute(seq, 3 * PAGE); /* 6 pages: page 1 has left the last 4 */
    assert_int_equal(rig_seq_form(seq, 1), OSCAR_FORM_PACKED);
    assert_int_equal(rig_seq_form(seq, 2), OSCAR_FORM_DENSE);
    rig_seq_check(seq);
    rig_seq_close(seq, true);
}

static void a_page_leaves_dense_memory_only_after_its_reader_has_passed_a_fence(void **state) {
    (void)state;
    struct rig_seq *writer = open_seq(a, 12 * PAGE, 0);
    compute(writer, 8 * PAGE);
    uint64_t used = rig_metric(&rig, "oscar_memory_used_bytes", "form=\"dense\"");
    assert_int_equal(rig_seq_form(writer, 1), OSCAR_FORM_DENSE); /* packed by now, but nobody told the sequence */
    rig_seq_check(writer);
    assert_int_equal(rig_seq_advance(writer, NULL, 0), 0);
    assert_int_equal(rig_seq_form(writer, 1), OSCAR_FORM_PACKED);
    rig_settle(&rig);
    /* The update was given; work in flight may still read the dense page: it is not reused by this client's next reserve. */
    assert_int_equal(rig_metric(&rig, "oscar_memory_used_bytes", "form=\"dense\""), used);
    assert_int_equal(rig_seq_reserve(writer, 4 * PAGE), 0);
    rig_seq_check(writer);
    used = rig_metric(&rig, "oscar_memory_used_bytes", "form=\"dense\"");
    rig_seq_signal(writer);
    rig_settle(&rig);
    assert_int_equal(rig_metric(&rig, "oscar_memory_used_bytes", "form=\"dense\""),
                     used - 4 * oscar_dense_page_bytes(&rig.identity.geometry));
    rig_seq_close(writer, true);
}

static void a_reader_that_joins_shares_the_dense_window_and_keeps_it_dense(void **state) {
    (void)state;
    struct rig_seq *writer = open_seq(a, 0, 0);
    compute(writer, 8 * PAGE);
    struct rig_seq *reader = open_seq(b, 8 * PAGE, 8 * PAGE);
    rig_seq_close(writer, true);
    rig_settle(&rig);
    for (uint32_t page = 4; page < 8; page++)
        assert_int_equal(rig_seq_form(reader, page), OSCAR_FORM_DENSE);
    assert_int_equal(rig_metric(&rig, "oscar_pages", "form=\"dense\""), 4);
    rig_seq_check(reader);
    rig_seq_close(reader, true);
    rig_settle(&rig);
    assert_int_equal(rig_metric(&rig, "oscar_pages", "form=\"dense\""), 0);
}

static void pages_that_wait_for_packing_are_read_dense_and_then_replaced(void **state) {
    (void)state;
    struct rig_seq *writer = open_seq(a, 0, 0);
    assert_int_equal(rig_seq_reserve(writer, 10 * PAGE), 0);
    assert_int_equal(rig_seq_advance(writer, tokens, 10 * PAGE), 0);
    rig_seq_signal(writer);
    fake_device_fail(&rig.device, FAKE_PACK, 1, 1, OSCAR_ERR_DEVICE);
    fake_device_fail(&rig.device, FAKE_COPY, 1, 0, OSCAR_ERR_DEVICE);
    rig_poll(&rig);
    pool_wait(rig.store->pool);
    fake_device_hold(&rig.device, true);
    rig_poll(&rig); /* published; packing is under way and held up */
    struct rig_seq *reader = open_seq(b, 10 * PAGE, 10 * PAGE);
    for (uint32_t page = 0; page < 10; page++)
        assert_int_equal(rig_seq_form(reader, page), OSCAR_FORM_DENSE);
    fake_device_hold(&rig.device, false);
    rig_settle(&rig); /* failed attempts are repeated */
    assert_true(rig_metric(&rig, "oscar_pack_failures_total", "") > 0);
    assert_int_equal(waiting(b), 1);
    assert_int_equal(rig_seq_advance(reader, NULL, 0), 0);
    assert_int_equal(rig_seq_form(reader, 0), OSCAR_FORM_SINK);
    for (uint32_t page = 1; page < 6; page++)
        assert_int_equal(rig_seq_form(reader, page), OSCAR_FORM_PACKED);
    for (uint32_t page = 6; page < 10; page++)
        assert_int_equal(rig_seq_form(reader, page), OSCAR_FORM_DENSE);
    rig_seq_check(reader);
    rig_seq_check(writer);
    rig_seq_close(writer, true);
    rig_seq_close(reader, true);
}

static void a_dense_tail_cuts_the_hit_where_the_window_is_packed(void **state) {
    (void)state;
    rig_cache(a, tokens, 10);
    struct rig_seq *seq = NULL;
    assert_int_equal(rig_seq_open(b, tokens, 10 * PAGE, true, &seq), 0);
    assert_int_equal(seq->committed, 6 * PAGE);
    compute(seq, 4 * PAGE);
    for (uint32_t page = 6; page < 10; page++)
        assert_int_equal(rig_seq_form(seq, page), OSCAR_FORM_DENSE);
    rig_seq_close(seq, true);
    rig_settle(&rig);
    assert_int_equal(rig_seq_open(b, tokens, 3 * PAGE, true, &seq), 0);
    assert_int_equal(seq->committed, 0);
    rig_seq_close(seq, true);
    /* Only the sink: no packed page before its end. */
    assert_int_equal(rig_seq_open(b, tokens, PAGE, true, &seq), 0);
    assert_int_equal(seq->committed, PAGE);
    rig_seq_close(seq, true);
}

static void a_dense_tail_is_not_cut_while_somebody_has_the_window_dense(void **state) {
    (void)state;
    struct rig_seq *writer = open_seq(a, 0, 0), *seq = NULL;
    compute(writer, 10 * PAGE);
    assert_int_equal(rig_seq_open(b, tokens, 10 * PAGE, true, &seq), 0);
    assert_int_equal(seq->committed, 10 * PAGE);
    rig_seq_close(seq, true);
    rig_seq_close(writer, true);
}

static void a_closed_sequence_still_publishes_what_it_had_advanced(void **state) {
    (void)state;
    struct rig_seq *writer = open_seq(a, 0, 0);
    assert_int_equal(rig_seq_reserve(writer, 3 * PAGE), 0);
    assert_int_equal(rig_seq_advance(writer, tokens, 3 * PAGE), 0);
    uint32_t slot = writer->fence_slot;
    uint64_t fence = writer->fence;
    rig_seq_close(writer, false);
    rig_settle(&rig);
    assert_int_equal(rig_probe(b, tokens, 3 * PAGE), 0);
    atomic_store(&a->fences[slot], fence);
    rig_settle(&rig);
    assert_int_equal(rig_probe(b, tokens, 3 * PAGE), 3 * PAGE);
    assert_int_not_equal(rig_metric(&rig, "oscar_memory_used_bytes", "form=\"dense\""), 0);
    atomic_store(&a->fences[slot], fence + 2);
    rig_settle(&rig);
    assert_int_equal(rig_metric(&rig, "oscar_memory_used_bytes", "form=\"dense\""), 0);
}

static void a_rejected_page_fails_its_sequence_and_nothing_of_it_is_published(void **state) {
    (void)state;
    struct rig_seq *writer = open_seq(a, 0, 0);
    assert_int_equal(rig_seq_reserve(writer, 6 * PAGE), 0);
    assert_int_equal(rig_seq_advance(writer, tokens, 4 * PAGE), 0);
    rig_address(a, writer->page[2])[0] = FAKE_NOT_FINITE;
    rig_seq_signal(writer);
    rig_settle(&rig);
    assert_int_equal(rig_seq_advance(writer, tokens, 1), OSCAR_ERR_NOT_FINITE);
    assert_int_equal(rig_seq_reserve(writer, 10 * PAGE), OSCAR_ERR_NOT_FINITE);
    struct rig_seq *child;
    assert_int_equal(rig_seq_fork(writer, &child), OSCAR_ERR_NOT_FINITE);
    assert_true(rig_probe(b, tokens, 4 * PAGE) <= 2 * PAGE);
    assert_int_equal(rig_metric(&rig, "oscar_pages_rejected_total", ""), 1);
    rig_seq_close(writer, true);
    rig_settle(&rig);
    assert_int_equal(rig_metric(&rig, "oscar_memory_used_bytes", "form=\"dense\""), 0);
}

static void two_sequences_with_a_common_prefix_and_different_tails_never_share_a_tail(void **state) {
    (void)state;
    for (uint32_t shared = 1; shared < 8 * PAGE; shared += 37) {
        uint32_t other[8 * PAGE];
        memcpy(other, tokens, sizeof other);
        rig_tokens(1000 + shared, shared, 8 * PAGE - shared, other + shared);
        rig_cache(a, other, 8);
        assert_int_equal(rig_probe(b, other, 8 * PAGE), 8 * PAGE);
        struct rig_seq *seq = NULL;
        assert_int_equal(rig_seq_open(b, other, 8 * PAGE, false, &seq), 0);
        rig_seq_check(seq);
        rig_seq_close(seq, true);
    }
    rig_cache(a, tokens, 8);
    struct rig_seq *seq = open_seq(b, 8 * PAGE, 8 * PAGE);
    rig_seq_check(seq);
    rig_seq_close(seq, true);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(a_computed_prefix_is_found_by_another_client),
        TEST(a_hit_never_exceeds_the_prompt_rounded_down_to_pages),
        TEST(a_page_is_not_visible_before_its_fence),
        TEST(a_page_is_not_visible_before_it_has_been_inspected),
        TEST(a_page_that_is_dense_already_is_shared_and_the_duplicate_goes_back),
        TEST(a_page_that_is_packed_already_stays_private_until_it_leaves_the_window),
        TEST(a_page_leaves_dense_memory_only_after_its_reader_has_passed_a_fence),
        TEST(a_reader_that_joins_shares_the_dense_window_and_keeps_it_dense),
        TEST(pages_that_wait_for_packing_are_read_dense_and_then_replaced),
        TEST(a_dense_tail_cuts_the_hit_where_the_window_is_packed),
        TEST(a_dense_tail_is_not_cut_while_somebody_has_the_window_dense),
        TEST(a_closed_sequence_still_publishes_what_it_had_advanced),
        TEST(a_rejected_page_fails_its_sequence_and_nothing_of_it_is_published),
        TEST(two_sequences_with_a_common_prefix_and_different_tails_never_share_a_tail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
