/* SPDX-License-Identifier: Apache-2.0 */
/* Rows that were never written hold anything, NaN included; attention over the tokens before them must not see it. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "tests/integration/e2e_daemon.h"
#include "tests/integration/e2e_model.h"

static const uint32_t lengths[] = {0, 1, 63, 64, 65, 127, 128, 129, 320, 321, 383, 385};

/* Fills every uncommitted row of the reserved pages with NaN, as a kernel of the worker's own might leave it. */
static void poison(struct e2e_worker *worker, struct oscar_seq *seq, uint32_t from, uint32_t to) {
    uint16_t nan[OSCAR_PAGE_TOKENS * 64];
    memset(nan, 0xff, sizeof(nan)); /* BF16 0xffff is a NaN */
    REQUIRE(worker->geometry.head_dim == 64);
    for (uint32_t layer = 0; layer < worker->geometry.layers; layer++) {
        for (uint32_t head = 0; head < worker->geometry.kv_heads; head++) {
            for (uint32_t position = from; position < to;) {
                void *k, *v;
                uint32_t rows;
                MUST(oscar_seq_rows(seq, layer, head, position, &k, &v, &rows));
                REQUIRE(rows >= 1 && rows <= OSCAR_PAGE_TOKENS - position % OSCAR_PAGE_TOKENS);
                e2e_write(worker, k, nan, (size_t)rows * 64 * sizeof(nan[0]));
                e2e_write(worker, v, nan, (size_t)rows * 64 * sizeof(nan[0]));
                position += rows;
            }
        }
    }
}

static void rows_behind_the_last_token_are_never_read(void **state) {
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        struct e2e_worker worker;
        struct text text = {0};
        uint32_t tokens = lengths[i], room = (tokens / OSCAR_PAGE_TOKENS + 2) * OSCAR_PAGE_TOKENS;
        text_append(&text, 100 + i, room);
        e2e_worker_open(&worker, e2e_socket(*state), "poisoner");
        struct oscar_seq *seq = e2e_open(&worker, &text, tokens, 0);
        MUST(oscar_seq_reserve(seq, room));
        poison(&worker, seq, 0, room);
        if (tokens > 0) {
            e2e_store(&worker, seq, NULL, &text, 0, tokens);
            e2e_check_all(&worker, seq, &text, tokens); /* stored, not committed */
            MUST(oscar_seq_advance(seq, NULL, text.ids, tokens));
        }
        e2e_check_all(&worker, seq, &text, tokens);
        /* A shorter look at the same pages. */
        for (uint32_t shorter = tokens; shorter > 0; shorter /= 2)
            e2e_check_all(&worker, seq, &text, shorter);
        e2e_worker_close(&worker);
        text_free(&text);
    }
}

static void attention_over_nothing_is_zero_with_no_weight(void **state) {
    struct e2e_worker worker;
    struct text text = {0};
    e2e_worker_open(&worker, e2e_socket(*state), "empty");
    struct oscar_seq *seq = e2e_open(&worker, &text, 0, 0);
    uint16_t q[4 * 64] = {0}, out[4 * 64];
    float lse[4] = {0};
    memset(out, 0xff, sizeof(out));
    struct oscar_attend_query query = {.seq = seq,
                                       .tokens = 0,
                                       .rows = 1,
                                       .q = q,
                                       .q_row_stride = 256,
                                       .q_head_stride = 64,
                                       .out = out,
                                       .out_row_stride = 256,
                                       .out_head_stride = 64,
                                       .lse = lse};
    int r = oscar_attend(worker.model, NULL, 0, 0, &query, 1);
    /* A query row stands at a position, so one more row than tokens is a mistake; no rows are none. */
    assert_int_equal(r, OSCAR_ERR_INVALID);
    query.rows = 0;
    MUST(oscar_attend(worker.model, NULL, 0, 0, &query, 1));
    e2e_worker_close(&worker);
}

static void rejected_drafts_are_written_over(void **state) {
    struct e2e_worker worker;
    struct text draft = {0}, text = {0};
    text_append(&draft, 1, 60);
    text_append(&draft, 2, 10);
    text_append(&text, 1, 60);
    text_append(&text, 3, 100);
    e2e_worker_open(&worker, e2e_socket(*state), "drafter");
    struct oscar_seq *seq = e2e_open(&worker, &draft, 60, 0);
    e2e_extend(&worker, seq, &draft, 60);
    MUST(oscar_seq_reserve(seq, 100));
    e2e_store(&worker, seq, NULL, &draft, 60, 10);
    e2e_check_all(&worker, seq, &draft, 70);
    e2e_store(&worker, seq, NULL, &text, 60, 100);
    /* Below the committed length nothing is written. */
    e2e_store(&worker, seq, NULL, &text, 0, 20);
    MUST(oscar_seq_advance(seq, NULL, text.ids + 60, 100));
    e2e_check_all(&worker, seq, &text, 160);
    e2e_worker_close(&worker);
    text_free(&draft);
    text_free(&text);
}

static void a_fork_shares_what_was_and_not_what_comes(void **state) {
    struct e2e_worker worker;
    struct text left = {0}, right = {0};
    text_append(&left, 1, 410);
    text_append(&left, 2, 300);
    text_append(&right, 1, 410);
    text_append(&right, 3, 300);
    e2e_worker_open(&worker, e2e_socket(*state), "forker");
    struct oscar_seq *seq = e2e_open(&worker, &left, 410, 0), *fork;
    e2e_extend(&worker, seq, &left, 410);
    MUST(oscar_seq_fork(seq, NULL, &fork));
    assert_int_equal(e2e_info(fork).committed_tokens, 410);
    for (uint32_t tokens = 410; tokens <= 710; tokens += 50) {
        e2e_extend(&worker, seq, &left, tokens);
        e2e_extend(&worker, fork, &right, tokens);
        e2e_check_all(&worker, seq, &left, tokens);
        e2e_check_all(&worker, fork, &right, tokens);
    }
    oscar_seq_close(seq);
    e2e_check_all(&worker, fork, &right, 710);
    e2e_worker_close(&worker);
    text_free(&left);
    text_free(&right);
}

static int start(void **state) { return e2e_start(state, "64M"); }
static int stop(void **state) { return e2e_stop(state); }

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(rows_behind_the_last_token_are_never_read, start, stop),
        cmocka_unit_test_setup_teardown(attention_over_nothing_is_zero_with_no_weight, start, stop),
        cmocka_unit_test_setup_teardown(rejected_drafts_are_written_over, start, stop),
        cmocka_unit_test_setup_teardown(a_fork_shares_what_was_and_not_what_comes, start, stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
