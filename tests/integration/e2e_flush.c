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

static uint32_t rows_of(const struct e2e_worker *worker) {
    return worker->geometry.layers * worker->geometry.query_heads;
}

/* One writes, the other one reads, and nothing stays. */
static void write_and_read(const struct test_daemon *daemon, struct e2e_worker *writer, struct e2e_worker *reader,
                           uint64_t seed) {
    struct text text = {0};
    text_append(&text, seed, 320);
    struct oscar_seq *written = e2e_open(writer, &text, text.count, 0);
    e2e_extend(writer, written, &text, text.count);
    struct oscar_seq *read = e2e_open(reader, &text, text.count, 0);
    assert_int_equal(e2e_info(read).hit_tokens, text.count);
    struct e2e_seen seen = e2e_check_all(reader, read, &text, text.count);
    assert_int_equal(seen.bf16 + seen.int2, text.count * rows_of(reader));
    oscar_seq_close(written);
    oscar_seq_close(read);
    e2e_wait_metric(daemon, E2E_ENDING, 0);
    e2e_flush(daemon);
    e2e_wait_metric(daemon, E2E_USED, 0);
    text_free(&text);
}

/* All the memory that there is becomes another model's. */
static void take_all(const struct test_daemon *daemon, struct e2e_worker *worker) {
    struct oscar_seq *seq;
    uint32_t tokens = 0;
    int r;
    MUST(oscar_seq_open(worker->model, NULL, 0, 0, &seq));
    while ((r = oscar_seq_reserve(seq, tokens + OSCAR_PAGE_TOKENS)) == 0)
        tokens += OSCAR_PAGE_TOKENS;
    assert_int_equal(r, OSCAR_ERR_NO_SPACE);
    assert_true(tokens > 0);
    oscar_seq_close(seq);
    e2e_wait_metric(daemon, E2E_USED, 0);
}

/* The place of a chunk that was given back is used again by another allocation, of a later generation: who had the first one mapped
 * must not go on reading there. */
static void chunks_that_are_made_anew_are_mapped_anew(void **state) {
    struct oscar_geometry other = e2e_geometry();
    struct e2e_worker writer, reader, taker;
    other.layers++;
    e2e_worker_open(&writer, e2e_socket(*state), "writer");
    e2e_worker_open(&reader, e2e_socket(*state), "reader");
    e2e_worker_open_geometry(&taker, e2e_socket(*state), "taker", &other);
    int64_t announced = 0;
    for (uint64_t round = 1; round <= 6; round++) {
        write_and_read(*state, &writer, &reader, round);
        int64_t now = e2e_metric(*state, "oscard_chunks_announced_total");
        assert_true(now > announced); /* they are other chunks each time */
        take_all(*state, &taker);
        announced = e2e_metric(*state, "oscard_chunks_announced_total");
        assert_true(announced > now);
    }
    e2e_worker_close(&writer);
    e2e_worker_close(&reader);
    e2e_worker_close(&taker);
}

static int start(void **state) { return e2e_start(state, "64M"); }
static int start_small(void **state) { return e2e_start(state, "3M"); }
static int stop(void **state) { return e2e_stop(state); }

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_flush_defers_what_a_reader_uses_and_says_so, start, stop),
        cmocka_unit_test_setup_teardown(a_flush_under_a_lease_is_deferred_until_it_closes, start, stop),
        cmocka_unit_test_setup_teardown(flushes_at_any_moment_disturb_nobody, start, stop),
        cmocka_unit_test_setup_teardown(chunks_that_are_made_anew_are_mapped_anew, start_small, stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
