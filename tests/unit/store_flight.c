/* SPDX-License-Identifier: Apache-2.0 */
/* Single flight and forks: prefixes that are being computed, and sequences that branch. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
/* cmocka needs the headers above */
#include <cmocka.h>

#include "tests/support/store_rig.h"

#define PAGE OSCAR_PAGE_TOKENS

static struct rig rig;
static struct rig_client *a, *b;
static uint32_t tokens[20 * PAGE];

static int setup(void **state) {
    (void)state;
    rig_open(&rig, &(struct rig_options){0});
    a = rig_client_new(&rig, "g");
    b = rig_client_new(&rig, "g");
    rig_tokens(1, 0, 20 * PAGE, tokens);
    return 0;
}

static int teardown(void **state) {
    (void)state;
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

static void the_second_is_told_what_the_first_is_computing(void **state) {
    (void)state;
    struct rig_seq *first = open_seq(a, 10 * PAGE), *second = open_seq(b, 20 * PAGE);
    assert_int_equal(first->in_flight, 0); /* nobody else */
    assert_int_equal(second->committed, 0);
    assert_int_equal(second->in_flight, 10 * PAGE);
    assert_int_equal(rig_seq_compute(first, tokens, 4 * PAGE), 0);
    struct rig_seq *third = open_seq(b, 8 * PAGE);
    assert_int_equal(third->committed, 4 * PAGE);
    assert_int_equal(third->in_flight, 8 * PAGE);

    uint32_t other[8 * PAGE];
    memcpy(other, tokens, sizeof other);
    other[6 * PAGE + 1] ^= 1;
    memcpy(b->window + OSCAR_WINDOW_TOKENS_OFFSET, other, sizeof other);
    struct oscar_request request = {.verb = OSCAR_PROBE, .probe = {b->model, 8 * PAGE, false}};
    struct oscar_reply reply = {0};
    assert_int_equal(rig_request(b, &request, &reply), 0);
    assert_int_equal(reply.probe.hit_tokens, 4 * PAGE);
    assert_int_equal(reply.probe.in_flight_tokens, 6 * PAGE); /* only what is common */
    rig_seq_close(first, true);
    rig_seq_close(second, true);
    rig_seq_close(third, true);
}

static void who_waits_gets_the_prefix_when_it_is_sealed(void **state) {
    (void)state;
    struct rig_seq *first = open_seq(a, 8 * PAGE), *second = open_seq(b, 10 * PAGE);
    uint32_t available;
    assert_int_equal(rig_seq_wait(second, 1000, &available), OSCAR_PARKED);
    assert_int_equal(rig_metric(&rig, "oscar_flight_waiting", ""), 1);
    assert_int_equal(rig_seq_compute(first, tokens, 4 * PAGE), 0);
    assert_null(rig_answered(b, 0));
    assert_int_equal(rig_seq_compute(first, tokens + 4 * PAGE, 4 * PAGE), 0);
    const struct oscar_reply *reply = rig_answered(b, 0);
    assert_non_null(reply);
    assert_int_equal(reply->error, 0);
    assert_int_equal(reply->seq_wait.available_tokens, 8 * PAGE);
    assert_int_equal(rig_metric(&rig, "oscar_flight_waiting", ""), 0);

    assert_int_equal(rig_seq_extend(second, tokens, 10 * PAGE), 0);
    assert_int_equal(second->committed, 8 * PAGE);
    rig_seq_check(second);
    assert_int_equal(rig_seq_compute(second, tokens + 8 * PAGE, 2 * PAGE), 0);
    assert_int_equal(rig_seq_extend(second, tokens, 20 * PAGE), OSCAR_ERR_STATE);
    rig_seq_check(second);
    rig_seq_close(first, true);
    rig_seq_close(second, true);
}

static void waiting_ends_at_its_deadline_and_leaves_the_sequence_usable(void **state) {
    (void)state;
    struct rig_seq *first = open_seq(a, 8 * PAGE), *second = open_seq(b, 8 * PAGE);
    uint32_t available;
    assert_int_equal(rig_seq_wait(second, 0, &available), OSCAR_ERR_TIMEOUT);
    assert_int_equal(rig_seq_wait(second, 10, &available), OSCAR_PARKED);
    assert_int_equal(store_next_deadline(rig.store), rig.now_ns + 10000000);
    rig.now_ns += 9999999;
    rig_poll(&rig);
    assert_null(rig_answered(b, 0));
    rig.now_ns += 1;
    rig_poll(&rig);
    assert_int_equal(rig_answered(b, 0)->error, OSCAR_ERR_TIMEOUT);
    assert_int_equal(store_next_deadline(rig.store), 0);
    assert_int_equal(rig_metric(&rig, "oscar_flight_timeouts_total", ""), 1);
    assert_int_equal(rig_seq_compute(second, tokens, 8 * PAGE), 0);
    rig_seq_check(second);
    rig_seq_close(first, true);
    rig_seq_close(second, true);
}

static void a_promise_that_is_given_up_wakes_those_who_wait(void **state) {
    (void)state;
    for (int how = 0; how < 4; how++) {
        struct rig_seq *first = open_seq(a, 8 * PAGE), *second = open_seq(b, 8 * PAGE);
        uint32_t available;
        assert_int_equal(rig_seq_wait(second, 1000000, &available), OSCAR_PARKED);
        if (how == 0) {
            rig_seq_close(first, true);
        } else if (how == 1) { /* goes another way than its prompt */
            uint32_t other[2 * PAGE];
            rig_tokens(99, 0, 2 * PAGE, other);
            assert_int_equal(rig_seq_compute(first, other, 2 * PAGE), 0);
            assert_non_null(rig_answered(b, 0));
            rig_seq_close(first, true);
        } else if (how == 2) { /* fails */
            assert_int_equal(rig_seq_reserve(first, PAGE), 0);
            assert_int_equal(rig_seq_advance(first, tokens, PAGE), 0);
            rig_address(a, first->page[0])[0] = FAKE_NOT_FINITE;
            rig_seq_signal(first);
            rig_settle(&rig);
            rig_seq_close(first, true);
        } else { /* dies */
            rig_seq_forget(first);
            rig_client_free(a);
            a = NULL;
        }
        rig_settle(&rig);
        const struct oscar_reply *reply = rig_answered(b, 0);
        assert_non_null(reply);
        assert_int_equal(reply->error, 0);
        assert_int_equal(reply->seq_wait.available_tokens, 0);
        assert_int_equal(rig_seq_extend(second, tokens, 8 * PAGE), 0);
        assert_int_equal(second->in_flight, 0); /* it is the one who computes it now */
        if (a) {
            struct rig_seq *third = open_seq(a, 8 * PAGE);
            assert_int_equal(third->in_flight, 8 * PAGE);
            rig_seq_close(third, true);
        }
        rig_seq_close(second, true);
        rig_settle(&rig);
        b->answers = 0;
    }
}

static void a_promiser_that_closes_early_still_counts_for_what_it_has_advanced(void **state) {
    (void)state;
    struct rig_seq *first = open_seq(a, 8 * PAGE), *second = open_seq(b, 8 * PAGE);
    uint32_t available, slot = first->fence_slot;
    assert_int_equal(rig_seq_reserve(first, 5 * PAGE), 0);
    assert_int_equal(rig_seq_advance(first, tokens, 5 * PAGE), 0);
    assert_int_equal(rig_seq_wait(second, 1000, &available), OSCAR_PARKED);
    rig_seq_close(first, false);
    rig_settle(&rig);
    assert_null(rig_answered(b, 0));
    atomic_store(&a->fences[slot], 100);
    rig_settle(&rig);
    assert_int_equal(rig_answered(b, 0)->seq_wait.available_tokens, 5 * PAGE);
    rig_seq_close(second, true);
}

static void closing_a_sequence_ends_its_wait(void **state) {
    (void)state;
    struct rig_seq *first = open_seq(a, 8 * PAGE), *second = open_seq(b, 8 * PAGE);
    uint32_t available;
    assert_int_equal(rig_seq_wait(second, 1000, &available), OSCAR_PARKED);
    uint64_t id = b->request_id;
    assert_int_equal(rig_seq_wait(second, 1000, &available), OSCAR_ERR_STATE);
    rig_seq_close(second, true);
    assert_int_equal(rig_answered(b, id)->error, OSCAR_ERR_STATE);
    rig_seq_close(first, true);
}

static void a_flush_wakes_those_who_wait_below_it(void **state) {
    (void)state;
    struct rig_seq *first = open_seq(a, 8 * PAGE);
    assert_int_equal(rig_seq_compute(first, tokens, 4 * PAGE), 0);
    struct rig_seq *second = open_seq(b, 8 * PAGE);
    uint32_t available;
    assert_int_equal(rig_seq_wait(second, 1000, &available), OSCAR_PARKED);
    struct store_flush flush;
    store_flush(rig.store, NULL, &flush);
    rig_settle(&rig);
    assert_int_equal(rig_answered(b, 0)->seq_wait.available_tokens, 4 * PAGE); /* its own: nothing more will come */
    assert_int_equal(rig_seq_extend(second, tokens, 8 * PAGE), 0);
    assert_int_equal(second->committed, 4 * PAGE);
    rig_seq_check(second);
    rig_seq_close(first, true);
    rig_seq_close(second, true);
}

static void a_fork_shares_sealed_pages_and_copies_the_tail(void **state) {
    (void)state;
    struct rig_seq *parent = open_seq(a, 0), *child = NULL;
    assert_int_equal(rig_seq_compute(parent, tokens, 10 * PAGE + 7), 0);
    assert_int_equal(rig_seq_fork(parent, &child), 0);
    assert_int_equal(child->committed, 10 * PAGE + 7);
    assert_int_equal(rig_seq_form(child, 5), OSCAR_FORM_PACKED);
    for (uint32_t page = 6; page < 10; page++)
        assert_int_equal(child->page[page], parent->page[page]);
    assert_int_not_equal(child->page[10], parent->page[10]);
    rig_seq_check(child);
    /* They part: each computes its own continuation. */
    uint32_t other[2 * PAGE];
    rig_tokens(7, 0, 2 * PAGE, other);
    assert_int_equal(rig_seq_compute(child, other, 2 * PAGE), 0);
    assert_int_equal(rig_seq_compute(parent, tokens + parent->committed, 2 * PAGE), 0);
    rig_seq_check(child);
    rig_seq_check(parent);
    assert_int_equal(rig_probe(b, tokens, 12 * PAGE), 12 * PAGE);
    assert_int_equal(rig_probe(b, child->tokens, 12 * PAGE), 12 * PAGE);
    rig_seq_close(parent, true);
    rig_seq_check(child);
    rig_seq_close(child, true);
}

static void the_sources_of_a_fork_are_kept_until_its_first_fence(void **state) {
    (void)state;
    struct rig_seq *parent = open_seq(a, 0), *child = NULL;
    assert_int_equal(rig_seq_compute(parent, tokens, PAGE + 7), 0);
    assert_int_equal(rig_seq_advance(parent, NULL, 0), 0); /* page 0 is a sink by now */
    rig_seq_signal(parent);
    rig_settle(&rig);
    assert_int_equal(rig_seq_fork(parent, &child), 0);
    rig_settle(&rig);
    uint64_t used = rig_metric(&rig, "oscar_memory_used_bytes", "form=\"dense\"");
    rig_seq_close(parent, true);
    rig_settle(&rig);
    assert_int_equal(rig_metric(&rig, "oscar_memory_used_bytes", "form=\"dense\""), used);
    atomic_store(&a->fences[child->fence_slot], 1);
    rig_settle(&rig);
    assert_true(rig_metric(&rig, "oscar_memory_used_bytes", "form=\"dense\"") < used);
    rig_seq_close(child, true);
}

static void a_fork_copies_what_its_parent_has_dense_to_itself(void **state) {
    (void)state;
    rig_cache(b, tokens, 3); /* packed in the tree */
    struct rig_seq *parent = open_seq(a, 0), *child = NULL;
    assert_int_equal(rig_seq_compute(parent, tokens, 3 * PAGE), 0);
    assert_int_equal(rig_seq_form(parent, 2), OSCAR_FORM_DENSE);
    assert_int_equal(rig_seq_fork(parent, &child), 0);
    for (uint32_t page = 1; page < 3; page++) {
        assert_int_equal(rig_seq_form(child, page), OSCAR_FORM_DENSE);
        assert_int_not_equal(child->page[page], parent->page[page]);
    }
    rig_seq_check(child);
    rig_seq_close(parent, true);
    assert_int_equal(rig_seq_compute(child, tokens + 3 * PAGE, 5 * PAGE), 0);
    rig_seq_check(child);
    assert_int_equal(rig_seq_advance(child, NULL, 0), 0);
    assert_int_equal(rig_seq_form(child, 1), OSCAR_FORM_PACKED);
    rig_seq_close(child, true);
}

static void a_fork_waits_for_what_its_parent_has_not_sealed(void **state) {
    (void)state;
    struct rig_seq *parent = open_seq(a, 0), *child = NULL;
    assert_int_equal(rig_seq_reserve(parent, 3 * PAGE), 0);
    assert_int_equal(rig_seq_advance(parent, tokens, 3 * PAGE), 0);
    assert_int_equal(rig_seq_fork(parent, &child), OSCAR_PARKED);
    rig_settle(&rig);
    assert_null(rig_answered(a, 0));
    rig_seq_signal(parent);
    rig_settle(&rig);
    const struct oscar_reply *reply = rig_answered(a, 0);
    assert_non_null(reply);
    assert_int_equal(reply->error, 0);
    child = rig_seq_forked(parent, reply);
    rig_seq_check(child);
    rig_seq_close(child, true);
    rig_seq_close(parent, true);
}

static void a_parked_fork_is_given_up_by_the_next_use_of_the_window(void **state) {
    (void)state;
    struct rig_seq *parent = open_seq(a, 0), *child = NULL;
    assert_int_equal(rig_seq_reserve(parent, 3 * PAGE), 0);
    assert_int_equal(rig_seq_advance(parent, tokens, 3 * PAGE), 0);
    assert_int_equal(rig_seq_fork(parent, &child), OSCAR_PARKED);
    uint64_t id = a->request_id;
    (void)rig_probe(a, tokens, PAGE);
    assert_int_equal(rig_answered(a, id)->error, OSCAR_ERR_STATE);
    rig_seq_signal(parent);
    rig_settle(&rig);
    assert_int_equal(a->answers, 1);
    assert_int_equal(rig_metric(&rig, "oscar_sequences", ""), 1);
    rig_seq_close(parent, true);
}

static void a_sequence_that_goes_on_is_forked_at_its_new_length_only(void **state) {
    (void)state;
    struct rig_seq *parent = open_seq(a, 0), *child = NULL;
    assert_int_equal(rig_seq_reserve(parent, 4 * PAGE), 0);
    assert_int_equal(rig_seq_advance(parent, tokens, 3 * PAGE), 0);
    assert_int_equal(rig_seq_fork(parent, &child), OSCAR_PARKED);
    uint64_t id = a->request_id;
    assert_int_equal(rig_seq_advance(parent, tokens + 3 * PAGE, 5), 0);
    assert_int_equal(rig_answered(a, id)->error, OSCAR_ERR_STATE);
    rig_seq_signal(parent);
    rig_settle(&rig);
    assert_int_equal(a->answers, 1); /* no late answer of the old length */
    assert_int_equal(rig_seq_fork(parent, &child), 0);
    assert_int_equal(child->committed, 3 * PAGE + 5);
    rig_seq_check(child);
    rig_seq_close(child, true);
    rig_seq_close(parent, true);
}

static void a_fork_for_which_there_is_no_room_changes_nothing(void **state) {
    (void)state;
    teardown(state);
    rig_open(&rig, &(struct rig_options){.budget_pages = 12, .chunk_pages = 2});
    a = rig_client_new(&rig, "g");
    b = rig_client_new(&rig, "g");
    struct rig_seq *parent = open_seq(a, 0), *child = NULL, *filler = open_seq(b, 0);
    assert_int_equal(rig_seq_compute(parent, tokens, 2 * PAGE + 7), 0);
    while (rig_seq_reserve(filler, filler->reserved + 2 * PAGE) == 0)
        ;
    while (rig_seq_reserve(parent, parent->reserved - parent->committed + PAGE) == 0)
        ;
    assert_int_equal(rig_seq_fork(parent, &child), OSCAR_ERR_NO_SPACE);
    assert_int_equal(rig_metric(&rig, "oscar_sequences", ""), 2);
    rig_seq_close(filler, true);
    rig_settle(&rig);
    assert_int_equal(rig_seq_fork(parent, &child), 0);
    rig_seq_check(child);
    rig_seq_close(child, true);
    rig_seq_close(parent, true);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(the_second_is_told_what_the_first_is_computing),
        TEST(who_waits_gets_the_prefix_when_it_is_sealed),
        TEST(waiting_ends_at_its_deadline_and_leaves_the_sequence_usable),
        TEST(a_promise_that_is_given_up_wakes_those_who_wait),
        TEST(a_promiser_that_closes_early_still_counts_for_what_it_has_advanced),
        TEST(closing_a_sequence_ends_its_wait),
        TEST(a_flush_wakes_those_who_wait_below_it),
        TEST(a_fork_shares_sealed_pages_and_copies_the_tail),
        TEST(the_sources_of_a_fork_are_kept_until_its_first_fence),
        TEST(a_fork_copies_what_its_parent_has_dense_to_itself),
        TEST(a_fork_waits_for_what_its_parent_has_not_sealed),
        TEST(a_parked_fork_is_given_up_by_the_next_use_of_the_window),
        TEST(a_sequence_that_goes_on_is_forked_at_its_new_length_only),
        TEST(a_fork_for_which_there_is_no_room_changes_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
