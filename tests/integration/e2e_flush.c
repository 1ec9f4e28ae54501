/* SPDX-License-Identifier: Apache-2.0 */
/* A flush under readers: what nobody uses goes at once, the rest when its last reader has gone, and no reader notices. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "tests/integration/e2e_daemon.h"
#include "tests/integration/e2e_model.h"

#define TOKENS 640U
#define DENSE_PAGE (64 << 10)

static void a_flush_defers_what_a_reader_uses_and_says_so(void **state) {
    struct e2e_worker reader, other;
    struct text read = {0}, unused = {0};
    text_append(&read, 1, TOKENS + 100);
    text_append(&unused, 2, TOKENS);
    e2e_worker_open(&reader, e2e_socket(*state), "reader");
    e2e_worker_open(&other, e2e_socket(*state), "other");
    struct oscar_seq *seq = e2e_open(&other, &unused, TOKENS, 0);
    e2e_extend(&other, seq, &unused, TOKENS);
    oscar_seq_close(seq);
    seq = e2e_open(&reader, &read, TOKENS, 0);
    e2e_extend(&reader, seq, &read, TOKENS);
    /* 640 tokens: the sink, 5 INT2 pages and 4 in BF16; without a reader the sink and 9 INT2 pages. */
    e2e_settle(seq, 5 * 64);
    e2e_wait_metric(*state, E2E_PACKED, 5 + 9);
    e2e_wait_metric(*state, E2E_USED_DENSE, 4 * DENSE_PAGE);
    int64_t before = e2e_metric(*state, E2E_USED);

    struct oscar_admin_reply reply = e2e_flush(*state);
    assert_int_equal(reply.flush.pages_freed, 10);
    assert_int_equal(reply.flush.pages_deferred, 10);
    assert_int_equal(e2e_metric(*state, E2E_USED), before - reply.flush.bytes_freed);
    assert_int_equal(reply.flush.bytes_deferred, before - reply.flush.bytes_freed);

    /* Nobody finds them any more; the reader reads on, and writes on. */
    assert_int_equal(e2e_probe(&other, &read, TOKENS), 0);
    assert_int_equal(e2e_probe(&other, &unused, TOKENS), 0);
    e2e_check_all(&reader, seq, &read, TOKENS);
    e2e_extend(&reader, seq, &read, TOKENS + 100);
    e2e_check_all(&reader, seq, &read, TOKENS + 100);

    /* Another worker may store the same text anew while the old pages are still there. */
    struct oscar_seq *anew = e2e_open(&other, &read, TOKENS, 0);
    assert_int_equal(e2e_info(anew).hit_tokens, 0);
    e2e_extend(&other, anew, &read, TOKENS);
    e2e_check_all(&other, anew, &read, TOKENS);
    e2e_check_all(&reader, seq, &read, TOKENS + 100);

    oscar_seq_close(seq);
    oscar_seq_close(anew);
    e2e_flush(*state);
    e2e_wait_metric(*state, E2E_USED, 0);
    e2e_worker_close(&reader);
    e2e_worker_close(&other);
    text_free(&read);
    text_free(&unused);
}

static void a_flush_under_a_lease_is_deferred_until_it_closes(void **state) {
    struct e2e_worker worker;
    struct text text = {0};
    text_append(&text, 1, TOKENS);
    e2e_worker_open(&worker, e2e_socket(*state), "leaser");
    struct oscar_seq *seq = e2e_open(&worker, &text, TOKENS, 0);
    e2e_extend(&worker, seq, &text, TOKENS);
    struct oscar_lease *lease;
    struct oscar_probe_result result;
    MUST(oscar_probe(worker.model, text.ids, TOKENS, &result, &lease));
    oscar_seq_close(seq);
    e2e_wait_metric(*state, E2E_PACKED, 9);
    e2e_wait_metric(*state, E2E_USED_DENSE, 0);
    struct oscar_admin_reply reply = e2e_flush(*state);
    assert_int_equal(reply.flush.pages_freed, 0);
    assert_int_equal(reply.flush.pages_deferred, 10);
    assert_true(e2e_metric(*state, E2E_USED) > 0);
    oscar_lease_close(lease);
    e2e_wait_metric(*state, E2E_USED, 0);
    e2e_worker_close(&worker);
    text_free(&text);
}

static void flushes_at_any_moment_disturb_nobody(void **state) {
    struct e2e_worker worker;
    struct text text = {0};
    text_append(&text, 3, 900);
    e2e_worker_open(&worker, e2e_socket(*state), "worker");
    struct oscar_seq *seq = e2e_open(&worker, &text, text.count, 0);
    uint64_t random = 9;
    for (uint32_t tokens = 0; tokens < text.count;) {
        uint32_t more = (uint32_t)(e2e_random(&random) % 90) + 1;
        tokens = tokens + more < text.count ? tokens + more : text.count;
        e2e_extend(&worker, seq, &text, tokens);
        e2e_flush(*state);
        e2e_check_some(&worker, seq, &text, tokens, &random, 12);
    }
    e2e_check_all(&worker, seq, &text, text.count);
    e2e_worker_close(&worker);
    text_free(&text);
}

static int start(void **state) { return e2e_start(state, "64M"); }
static int stop(void **state) { return e2e_stop(state); }

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_flush_defers_what_a_reader_uses_and_says_so, start, stop),
        cmocka_unit_test_setup_teardown(a_flush_under_a_lease_is_deferred_until_it_closes, start, stop),
        cmocka_unit_test_setup_teardown(flushes_at_any_moment_disturb_nobody, start, stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
