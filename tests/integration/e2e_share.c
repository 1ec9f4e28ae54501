/* SPDX-License-Identifier: Apache-2.0 */
/* The main job with several processes: what one stores, the others read in place, and nothing else. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/wait.h>
#include <cmocka.h>

#include "tests/integration/e2e_daemon.h"
#include "tests/integration/e2e_model.h"
#include "tests/support/worker_process.h"

#define ANSWER_MS 30000
#define PREFIX 640U
/* Pages of the prefix that have left the window of a sequence that ends with it, less the sink. */
#define PREFIX_PACKED ((PREFIX - OSCAR_RECENT_TOKENS - OSCAR_SINK_TOKENS) / OSCAR_PAGE_TOKENS)

/* Stores a text and stays, with its sequence open, until it is killed. */
static int write_and_stay(struct line_pipe *pipe, void *argument) {
    const uint32_t *tokens = argument;
    e2e_child();
    struct e2e_worker worker;
    struct text text = {0};
    text_append(&text, 1, *tokens);
    e2e_worker_open(&worker, NULL, "writer");
    struct oscar_seq *seq = e2e_open(&worker, &text, text.count, 0);
    e2e_extend(&worker, seq, &text, text.count);
    line_tell(pipe, "stored");
    char line[64];
    line_hear(pipe, line, sizeof(line), ANSWER_MS);
    return 0;
}

/* `tokens`: how many it has when it stops and waits. */
static void start_writer(struct worker_process *writer, uint32_t tokens) {
    char line[64];
    assert_int_equal(worker_spawn(writer, "writer", write_and_stay, &tokens, sizeof(tokens)), 0);
    assert_int_equal(line_hear(&writer->pipe, line, sizeof(line), ANSWER_MS), 0);
    assert_string_equal(line, "stored");
}

static void another_process_reads_in_place_what_the_first_stored(void **state) {
    struct worker_process writer;
    start_writer(&writer, PREFIX);
    e2e_wait_metric(*state, E2E_PACKED, PREFIX_PACKED);

    struct e2e_worker worker;
    struct text text = {0};
    text_append(&text, 1, PREFIX);
    e2e_worker_open(&worker, e2e_socket(*state), "reader");
    struct oscar_seq *seq = e2e_open(&worker, &text, PREFIX, 0);
    assert_int_equal(e2e_info(seq).hit_tokens, PREFIX);
    struct e2e_seen seen = e2e_check_all(&worker, seq, &text, PREFIX);
    /* Page 0 is the sink, the last 256 tokens are the writer's window, what lies between is INT2. */
    uint32_t rows = worker.geometry.layers * worker.geometry.query_heads;
    assert_int_equal(seen.bf16, (OSCAR_SINK_TOKENS + OSCAR_RECENT_TOKENS) * rows);
    assert_int_equal(seen.int2, (PREFIX - OSCAR_SINK_TOKENS - OSCAR_RECENT_TOKENS) * rows);
    e2e_worker_close(&worker);
    worker_end(&writer);
    text_free(&text);
}

static void a_reader_goes_on_when_the_writer_is_killed_in_the_middle_of_a_page(void **state) {
    struct worker_process writer;
    start_writer(&writer, PREFIX + 70);
    struct e2e_worker worker;
    struct text text = {0};
    text_append(&text, 1, PREFIX);
    text_append(&text, 2, 200);
    e2e_worker_open(&worker, e2e_socket(*state), "reader");
    struct oscar_seq *seq = e2e_open(&worker, &text, PREFIX, 0);
    e2e_extend(&worker, seq, &text, PREFIX + 30);
    worker_end(&writer);
    e2e_wait_metric(*state, "oscard_clients", 1);
    for (uint32_t tokens = PREFIX + 31; tokens <= PREFIX + 200; tokens += 13) {
        e2e_extend(&worker, seq, &text, tokens);
        e2e_check_all(&worker, seq, &text, tokens);
    }
    /* One who comes later finds what the dead one had sealed. */
    struct text theirs = {0};
    text_append(&theirs, 1, PREFIX + 70);
    struct oscar_seq *late = e2e_open(&worker, &theirs, theirs.count, 0);
    assert_int_equal(e2e_info(late).hit_tokens, PREFIX + 64);
    e2e_check_all(&worker, late, &theirs, PREFIX + 64);
    e2e_worker_close(&worker);
    text_free(&theirs);
    text_free(&text);
}

static void workers_with_the_same_prefix_hold_one_copy(void **state) {
    struct e2e_worker worker[4];
    struct oscar_seq *seq[4];
    struct text text = {0};
    text_append(&text, 3, PREFIX);
    for (unsigned i = 0; i < 4; i++) {
        e2e_worker_open(&worker[i], e2e_socket(*state), "sharer");
        seq[i] = e2e_open(&worker[i], &text, PREFIX, 0);
        assert_int_equal(e2e_info(seq[i]).hit_tokens, i == 0 ? 0 : PREFIX);
        e2e_extend(&worker[i], seq[i], &text, PREFIX);
    }
    e2e_wait_metric(*state, E2E_PACKED, PREFIX_PACKED);
    assert_int_equal(e2e_metric(*state, E2E_SINK), 1);
    assert_int_equal(e2e_metric(*state, E2E_DENSE), OSCAR_RECENT_TOKENS / OSCAR_PAGE_TOKENS);
    for (unsigned i = 0; i < 4; i++)
        e2e_worker_close(&worker[i]);
    text_free(&text);
}

static void workers_that_store_the_same_text_at_once_end_with_one_copy(void **state) {
    struct e2e_worker worker[3];
    struct oscar_seq *seq[3];
    struct text text = {0};
    text_append(&text, 4, PREFIX);
    for (unsigned i = 0; i < 3; i++) {
        e2e_worker_open(&worker[i], e2e_socket(*state), "sharer");
        seq[i] = e2e_open(&worker[i], &text, PREFIX, 0);
    }
    for (uint32_t tokens = 32; tokens <= PREFIX; tokens += 32) {
        for (unsigned i = 0; i < 3; i++) {
            e2e_extend(&worker[i], seq[i], &text, tokens);
            e2e_check_all(&worker[i], seq[i], &text, tokens);
        }
    }
    e2e_wait_metric(*state, E2E_PACKED, PREFIX_PACKED);
    for (unsigned i = 0; i < 3; i++)
        e2e_worker_close(&worker[i]);
    text_free(&text);
}

static void sessions_with_a_common_prefix_and_other_tails_never_get_a_wrong_page(void **state) {
    enum { SESSIONS = 24, TRUNK = 400 };
    uint64_t random = 11;
    struct text text[SESSIONS] = {{0}};
    struct e2e_worker worker;
    e2e_worker_open(&worker, e2e_socket(*state), "sessions");
    for (unsigned i = 0; i < SESSIONS; i++) {
        /* Part of a common trunk, then a tail of the session's own, of any length. */
        text_append(&text[i], 5, TRUNK);
        struct text whole = text[i];
        text[i] = text_copy(&whole, (uint32_t)(e2e_random(&random) % TRUNK));
        text_free(&whole);
        text_append(&text[i], 100 + i, (uint32_t)(e2e_random(&random) % 300));
        uint32_t expected = 0;
        for (unsigned j = 0; j < i; j++) {
            uint32_t common = text_common_pages(&text[i], &text[j]) * OSCAR_PAGE_TOKENS;
            expected = common > expected ? common : expected;
        }
        struct oscar_seq *seq = e2e_open(&worker, &text[i], text[i].count, 0);
        uint32_t hit = e2e_info(seq).hit_tokens;
        if (hit != expected)
            fail_msg("session %u of %u tokens: hit %u instead of %u", i, text[i].count, hit, expected);
        e2e_extend(&worker, seq, &text[i], text[i].count);
        e2e_check_all(&worker, seq, &text[i], text[i].count);
        if (i % 2 == 0)
            oscar_seq_close(seq);
    }
    e2e_worker_close(&worker);
    for (unsigned i = 0; i < SESSIONS; i++)
        text_free(&text[i]);
}

/* What is packed of the window is computed anew by who asks for it, and then read as in a private run. */
static void a_dense_tail_is_computed_anew_and_read_in_bf16(void **state) {
    struct e2e_worker worker;
    struct text text = {0};
    text_append(&text, 6, PREFIX);
    e2e_worker_open(&worker, e2e_socket(*state), "tail");
    struct oscar_seq *seq = e2e_open(&worker, &text, PREFIX, 0);
    e2e_extend(&worker, seq, &text, PREFIX);
    oscar_seq_close(seq);
    e2e_wait_metric(*state, E2E_PACKED, PREFIX / OSCAR_PAGE_TOKENS - 1); /* nobody's window any more */
    seq = e2e_open(&worker, &text, PREFIX, 0);
    assert_int_equal(e2e_info(seq).hit_tokens, PREFIX);
    uint32_t rows = worker.geometry.layers * worker.geometry.query_heads;
    assert_int_equal(e2e_check_all(&worker, seq, &text, PREFIX).bf16, OSCAR_SINK_TOKENS * rows);
    oscar_seq_close(seq);

    seq = e2e_open(&worker, &text, PREFIX, OSCAR_SEQ_DENSE_TAIL);
    assert_int_equal(e2e_info(seq).hit_tokens, PREFIX - OSCAR_RECENT_TOKENS);
    e2e_extend(&worker, seq, &text, PREFIX);
    assert_int_equal(e2e_check_all(&worker, seq, &text, PREFIX).bf16, (OSCAR_SINK_TOKENS + OSCAR_RECENT_TOKENS) * rows);
    /* The pages were there: nothing new was published. */
    assert_int_equal(e2e_metric(*state, "oscar_pages_sealed_total"), PREFIX / OSCAR_PAGE_TOKENS);
    e2e_worker_close(&worker);
    text_free(&text);
}

static void each_sequence_of_a_ragged_batch_reads_its_own(void **state) {
    enum { SEQUENCES = 5 };
    static const uint32_t lengths[SEQUENCES] = {1, 64, 65, 500, 700};
    struct e2e_worker worker;
    struct text text[SEQUENCES] = {{0}};
    struct oscar_attend_query query[SEQUENCES];
    uint16_t q[SEQUENCES][4 * 64], out[SEQUENCES][4 * 64];
    e2e_worker_open(&worker, e2e_socket(*state), "batch");
    struct device_buffer *queries = e2e_buffer(&worker, q[0], sizeof(q) / sizeof(q[0][0]));
    struct device_buffer *outputs = e2e_buffer_poisoned(&worker, sizeof(out) / sizeof(out[0][0]));
    for (unsigned i = 0; i < SEQUENCES; i++) {
        text_append(&text[i], 60, lengths[i] < 300 ? lengths[i] : 300); /* some of it in common */
        text_append(&text[i], 70 + i, lengths[i] - text[i].count);
        query[i] = (struct oscar_attend_query){.seq = e2e_open(&worker, &text[i], lengths[i], 0),
                                               .rows = 1,
                                               .q = (const uint16_t *)queries->data + (size_t)i * 4 * 64,
                                               .q_row_stride = 256,
                                               .q_head_stride = 64,
                                               .out = (uint16_t *)outputs->data + (size_t)i * 4 * 64,
                                               .out_row_stride = 256,
                                               .out_head_stride = 64};
        e2e_extend(&worker, query[i].seq, &text[i], lengths[i]);
    }
    for (uint32_t step = 0; step < 700; step += 7) {
        for (unsigned i = 0; i < SEQUENCES; i++) {
            for (uint32_t h = 0; h < 4; h++)
                e2e_aim(&worker, &text[i], 1, h, step % lengths[i], &q[i][h * 64]);
        }
        MUST(device_buffer_write(queries, q));
        MUST(oscar_attend(worker.model, NULL, 1, 0, query, SEQUENCES));
        e2e_buffer_read(outputs, out[0]);
        for (unsigned i = 0; i < SEQUENCES; i++) {
            for (uint32_t h = 0; h < 4; h++)
                e2e_is_int2(&worker, &text[i], 1, h, step % lengths[i], &out[i][h * 64]);
        }
    }
    device_buffer_free(queries);
    device_buffer_free(outputs);
    e2e_worker_close(&worker);
    for (unsigned i = 0; i < SEQUENCES; i++)
        text_free(&text[i]);
}

static int start(void **state) { return e2e_start(state, "64M"); }
static int stop(void **state) { return e2e_stop(state); }

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(another_process_reads_in_place_what_the_first_stored, start, stop),
        cmocka_unit_test_setup_teardown(a_reader_goes_on_when_the_writer_is_killed_in_the_middle_of_a_page, start,
                                        stop),
        cmocka_unit_test_setup_teardown(workers_with_the_same_prefix_hold_one_copy, start, stop),
        cmocka_unit_test_setup_teardown(workers_that_store_the_same_text_at_once_end_with_one_copy, start, stop),
        cmocka_unit_test_setup_teardown(sessions_with_a_common_prefix_and_other_tails_never_get_a_wrong_page, start,
                                        stop),
        cmocka_unit_test_setup_teardown(a_dense_tail_is_computed_anew_and_read_in_bf16, start, stop),
        cmocka_unit_test_setup_teardown(each_sequence_of_a_ragged_batch_reads_its_own, start, stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
