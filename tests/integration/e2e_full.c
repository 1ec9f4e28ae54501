/* SPDX-License-Identifier: Apache-2.0 */
/* A cache that is full and stays full: evictions go on, "no space" means that all is in use, and it passes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <cmocka.h>

#include "tests/integration/e2e_daemon.h"
#include "tests/integration/e2e_model.h"

#define BUDGET "6M"
#define TEXTS 150U
#define TEXT_TOKENS 512U

static struct text make_text(uint64_t seed, uint32_t tokens) {
    struct text text = {0};
    text_append(&text, seed, tokens);
    return text;
}

/* What is used lies in chunks, and all chunks together are within the budget. */
static void bytes_add_up(void **state) {
    static const char *const forms[] = {"sink", "dense", "packed"};
    struct oscar_admin_reply metrics = e2e_metrics(*state);
    for (unsigned i = 0; i < 3; i++) {
        char used[64], chunks[64];
        snprintf(used, sizeof(used), "oscar_memory_used_bytes{form=\"%s\"}", forms[i]);
        snprintf(chunks, sizeof(chunks), "oscar_memory_chunk_bytes{form=\"%s\"}", forms[i]);
        assert_true(e2e_metric_of(&metrics, used) >= 0);
        assert_true(e2e_metric_of(&metrics, used) <= e2e_metric_of(&metrics, chunks));
    }
    assert_true(e2e_metric_of(&metrics, "oscar_memory_chunk_bytes") <=
                e2e_metric_of(&metrics, "oscar_memory_budget_bytes"));
    oscar_admin_reply_free(&metrics);
}

static void a_full_cache_evicts_steadily_and_refuses_nobody_for_long(void **state) {
    struct e2e_worker worker;
    e2e_worker_open(&worker, e2e_socket(*state), "long lived");
    int64_t evictions = 0;
    for (unsigned i = 0; i < e2e_scale() * TEXTS; i++) {
        struct text text = make_text(100 + i, TEXT_TOKENS);
        struct oscar_seq *seq = e2e_open(&worker, &text, text.count, 0);
        e2e_extend(&worker, seq, &text, text.count);
        e2e_check_some(&worker, seq, &text, text.count, &(uint64_t){i}, 6);
        oscar_seq_close(seq);
        if (i % (25 * e2e_scale()) == 25 * e2e_scale() - 1) {
            bytes_add_up(state);
            int64_t now = e2e_metric(*state, "oscar_pages_evicted_total");
            assert_true(i < 50 * e2e_scale() || now > evictions); /* not frozen */
            evictions = now;
            /* The one just stored is the last to go. */
            assert_int_equal(e2e_probe(&worker, &text, text.count), text.count);
        }
        text_free(&text);
    }
    e2e_worker_close(&worker);
}

static void no_space_is_said_only_when_all_is_in_use_and_passes(void **state) {
    enum { HELD = 64 };
    struct e2e_worker worker;
    struct text text[HELD] = {{0}};
    struct oscar_seq *seq[HELD];
    unsigned held = 0;
    e2e_worker_open(&worker, e2e_socket(*state), "holder");
    for (unsigned round = 0; round < 3; round++) {
        int r = 0;
        for (held = 0; held < HELD; held++) {
            text[held] = make_text(1000 * (round + 1) + held, TEXT_TOKENS);
            seq[held] = e2e_open(&worker, &text[held], TEXT_TOKENS, 0);
            r = e2e_extend_or_full(&worker, seq[held], &text[held], TEXT_TOKENS);
            if (r < 0)
                break;
        }
        assert_int_equal(r, OSCAR_ERR_NO_SPACE);
        assert_true(held >= 4);
        bytes_add_up(state);
        /* Refused as a whole, and again, and nothing of it is lost or kept. */
        uint32_t committed = e2e_info(seq[held]).committed_tokens, reserved = e2e_info(seq[held]).reserved_tokens;
        for (unsigned i = 0; i < 20; i++)
            REFUSED(oscar_seq_reserve(seq[held], 100000), OSCAR_ERR_NO_SPACE);
        assert_int_equal(e2e_info(seq[held]).committed_tokens, committed);
        assert_int_equal(e2e_info(seq[held]).reserved_tokens, reserved);
        e2e_check_all(&worker, seq[held], &text[held], committed);
        for (unsigned i = 0; i < held; i++)
            e2e_check_some(&worker, seq[i], &text[i], TEXT_TOKENS, &(uint64_t){i}, 8);
        /* One gives way: the one that was refused goes on. */
        oscar_seq_close(seq[0]);
        text_free(&text[0]);
        e2e_extend(&worker, seq[held], &text[held], committed + 128 <= TEXT_TOKENS ? committed + 128 : TEXT_TOKENS);
        for (unsigned i = 1; i <= held; i++) {
            oscar_seq_close(seq[i]);
            text_free(&text[i]);
        }
    }
    e2e_worker_close(&worker);
}

static void a_lease_keeps_its_pages_however_long_others_press(void **state) {
    struct e2e_worker holder, other;
    struct text text = make_text(1, TEXT_TOKENS);
    e2e_worker_open(&holder, e2e_socket(*state), "holder");
    e2e_worker_open(&other, e2e_socket(*state), "other");
    struct oscar_seq *seq = e2e_open(&holder, &text, text.count, 0);
    e2e_extend(&holder, seq, &text, text.count);
    struct oscar_lease *lease;
    struct oscar_probe_result result;
    MUST(oscar_probe(holder.model, text.ids, text.count, &result, &lease));
    assert_int_equal(result.hit_tokens, text.count);
    oscar_seq_close(seq);
    for (unsigned i = 0; i < 60 * e2e_scale(); i++) {
        struct text churn = make_text(5000 + i, TEXT_TOKENS);
        struct oscar_seq *theirs = e2e_open(&other, &churn, churn.count, 0);
        e2e_extend(&other, theirs, &churn, churn.count);
        oscar_seq_close(theirs);
        text_free(&churn);
    }
    seq = e2e_open(&holder, &text, text.count, 0);
    assert_int_equal(e2e_info(seq).hit_tokens, text.count);
    e2e_check_all(&holder, seq, &text, text.count);
    oscar_seq_close(seq);
    oscar_lease_close(lease);
    /* Given back, they go like all others. */
    for (unsigned i = 0; i < 60 * e2e_scale(); i++) {
        struct text churn = make_text(6000 + i, TEXT_TOKENS);
        struct oscar_seq *theirs = e2e_open(&other, &churn, churn.count, 0);
        e2e_extend(&other, theirs, &churn, churn.count);
        oscar_seq_close(theirs);
        text_free(&churn);
    }
    assert_int_equal(e2e_probe(&holder, &text, text.count), 0);
    e2e_worker_close(&holder);
    e2e_worker_close(&other);
    text_free(&text);
}

static void a_storm_of_probes_pins_nothing(void **state) {
    struct e2e_worker worker;
    struct text text = make_text(1, TEXT_TOKENS);
    e2e_worker_open(&worker, e2e_socket(*state), "prober");
    struct oscar_seq *seq = e2e_open(&worker, &text, text.count, 0);
    e2e_extend(&worker, seq, &text, text.count);
    oscar_seq_close(seq);
    for (unsigned i = 0; i < 5000; i++)
        assert_int_equal(e2e_probe(&worker, &text, text.count), text.count);
    e2e_flush(*state);
    e2e_wait_metric(*state, E2E_USED, 0);
    assert_int_equal(e2e_probe(&worker, &text, text.count), 0);
    e2e_worker_close(&worker);
    text_free(&text);
}

/* More often than the cache has room for: what a connection held comes back with its end, not with its process's. */
static void a_client_that_is_closed_gives_back_what_it_had_while_its_process_lives_on(void **state) {
    struct text text = make_text(1, 256);
    for (unsigned i = 0; i < 30; i++) {
        struct e2e_worker worker;
        e2e_worker_open(&worker, e2e_socket(*state), "short lived");
        struct oscar_seq *seq = e2e_open(&worker, &text, text.count, 0);
        MUST(oscar_seq_reserve(seq, 512));
        e2e_worker_close(&worker); /* with its model and sequence open */
    }
    e2e_wait_metric(*state, E2E_USED, 0);
    e2e_wait_metric(*state, E2E_QUARANTINED, 0);
    text_free(&text);
}

static int start(void **state) { return e2e_start(state, BUDGET); }
static int stop(void **state) { return e2e_stop(state); }

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_full_cache_evicts_steadily_and_refuses_nobody_for_long, start, stop),
        cmocka_unit_test_setup_teardown(no_space_is_said_only_when_all_is_in_use_and_passes, start, stop),
        cmocka_unit_test_setup_teardown(a_lease_keeps_its_pages_however_long_others_press, start, stop),
        cmocka_unit_test_setup_teardown(a_storm_of_probes_pins_nothing, start, stop),
        cmocka_unit_test_setup_teardown(a_client_that_is_closed_gives_back_what_it_had_while_its_process_lives_on,
                                        start, stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
