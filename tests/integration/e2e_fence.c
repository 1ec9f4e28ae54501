/* SPDX-License-Identifier: Apache-2.0 */
/* Nothing is seen before its bytes are there, and nothing is reused while somebody may read it: fences, with slow streams. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "tests/integration/e2e_daemon.h"
#include "tests/integration/e2e_hold.h"
#include "tests/integration/e2e_model.h"
#include "tests/support/worker_process.h"

#define WAIT_MS 30000
#define CHURN 128U
#define LOOKS 50U /* round trips in which something must not happen */

struct hit {
    struct e2e_worker *worker;
    const struct text *text;
    uint32_t tokens;
};

static bool hits(void *argument) {
    const struct hit *hit = argument;
    return e2e_probe(hit->worker, hit->text, hit->text->count) == hit->tokens;
}

static void a_page_is_not_visible_before_its_fence(void **state) {
    struct e2e_worker writer, other;
    struct e2e_hold hold;
    struct text text = {0};
    text_append(&text, 1, 256);
    e2e_worker_open(&writer, e2e_socket(*state), "writer");
    e2e_worker_open(&other, e2e_socket(*state), "other");
    e2e_hold_open(&hold, writer.client);
    struct oscar_seq *seq = e2e_open(&writer, &text, text.count, 0);
    e2e_hold_up(&hold);
    MUST(oscar_seq_reserve(seq, text.count));
    for (uint32_t first = 0; first < text.count; first += 64) {
        e2e_store(&writer, seq, hold.stream, &text, first, 64);
        MUST(oscar_seq_advance(seq, hold.stream, text.ids + first, 64));
    }
    assert_int_equal(e2e_info(seq).committed_tokens, text.count);
    /* All is said and nothing is done: a look-up finds nothing, but knows that it is coming. */
    for (unsigned i = 0; i < LOOKS; i++) {
        struct oscar_probe_result result;
        MUST(oscar_probe(other.model, text.ids, text.count, &result, NULL));
        assert_int_equal(result.hit_tokens, 0);
        assert_int_equal(result.in_flight_tokens, text.count);
    }
    struct oscar_seq *early = e2e_open(&other, &text, text.count, 0);
    assert_int_equal(e2e_info(early).hit_tokens, 0);
    oscar_seq_close(early);

    e2e_hold_release(&hold);
    struct hit all = {&other, &text, text.count};
    assert_true(wait_until(hits, &all, WAIT_MS));
    struct oscar_seq *late = e2e_open(&other, &text, text.count, 0);
    e2e_check_all(&other, late, &text, text.count);
    e2e_hold_close(&hold);
    e2e_worker_close(&writer);
    e2e_worker_close(&other);
    text_free(&text);
}

/* One aimed query a position, enqueued on a stream: what they read is looked at when the stream has passed. */
struct flight {
    uint32_t tokens;
    struct device_buffer *q, *out;
};

static struct flight take_off(struct e2e_worker *worker, struct oscar_seq *seq, struct oscar_stream *stream,
                              const struct text *text, uint32_t tokens) {
    const struct oscar_geometry *geometry = &worker->geometry;
    size_t head = geometry->head_dim, row = head * geometry->query_heads;
    uint16_t *q = malloc(tokens * row * sizeof(*q));
    assert_non_null(q);
    for (uint32_t i = 0; i < tokens; i++) {
        for (uint32_t h = 0; h < geometry->query_heads; h++)
            e2e_aim(worker, text, 1, h, i, q + i * row + h * head);
    }
    struct flight flight = {tokens, e2e_buffer(worker, q, tokens * row), e2e_buffer_poisoned(worker, tokens * row)};
    free(q);
    struct oscar_attend_query query = {.seq = seq,
                                       .tokens = tokens,
                                       .rows = tokens,
                                       .q = flight.q->data,
                                       .q_row_stride = (int64_t)row,
                                       .q_head_stride = (int64_t)head,
                                       .out = flight.out->data,
                                       .out_row_stride = (int64_t)row,
                                       .out_head_stride = (int64_t)head};
    MUST(oscar_attend(worker->model, stream, 1, 0, &query, 1));
    return flight;
}

static void land(struct e2e_worker *worker, const struct text *text, struct flight *flight) {
    const struct oscar_geometry *geometry = &worker->geometry;
    size_t head = geometry->head_dim, row = head * geometry->query_heads;
    uint16_t *out = malloc(flight->tokens * row * sizeof(*out));
    assert_non_null(out);
    e2e_buffer_read(flight->out, out);
    for (uint32_t i = 0; i < flight->tokens; i++) {
        for (uint32_t h = 0; h < geometry->query_heads; h++)
            e2e_is_int2(worker, text, 1, h, i, out + i * row + h * head);
    }
    free(out);
    device_buffer_free(flight->q);
    device_buffer_free(flight->out);
}

/* Fills the whole cache with other texts, several times over: there are 64 MiB in them. */
static void churn(struct e2e_worker *worker, uint64_t seed, unsigned texts) {
    for (unsigned i = 0; i < texts; i++) {
        struct text other = {0};
        text_append(&other, seed + i, 512);
        struct oscar_seq *seq = e2e_open(worker, &other, other.count, 0);
        int r = e2e_extend_or_full(worker, seq, &other, other.count);
        if (r != OSCAR_ERR_NO_SPACE)
            MUST(r);
        oscar_seq_close(seq);
        text_free(&other);
    }
}

static void a_page_is_not_reused_while_a_reader_is_in_flight(void **state) {
    struct e2e_worker writer, reader;
    struct e2e_hold hold;
    struct text text = {0};
    text_append(&text, 1, 1024);
    e2e_worker_open(&writer, e2e_socket(*state), "writer");
    e2e_worker_open(&reader, e2e_socket(*state), "reader");
    e2e_hold_open(&hold, reader.client);
    struct oscar_seq *written = e2e_open(&writer, &text, 256, 0);
    e2e_extend(&writer, written, &text, 256);
    struct oscar_seq *read = e2e_open(&reader, &text, 256, 0);
    assert_int_equal(e2e_info(read).hit_tokens, 256);
    assert_int_equal(e2e_info(read).packed_tokens, 0);

    e2e_hold_up(&hold);
    struct flight flight = take_off(&reader, read, hold.stream, &text, 256);
    /* The reader goes on, too: the fences that would let go of the dense pages are enqueued behind the reads. */
    MUST(oscar_seq_reserve(read, 768));
    e2e_store(&reader, read, hold.stream, &text, 256, 768);
    for (uint32_t first = 256; first < 1024; first += 64)
        MUST(oscar_seq_advance(read, hold.stream, text.ids + first, 64));
    e2e_extend(&writer, written, &text, 1024);
    churn(&writer, 1000, CHURN);
    e2e_hold_release(&hold);
    MUST(oscar_stream_wait(hold.stream, WAIT_MS));
    land(&reader, &text, &flight);
    e2e_check_all(&reader, read, &text, 1024);
    e2e_hold_close(&hold);
    e2e_worker_close(&reader);
    e2e_worker_close(&writer);
    text_free(&text);
}

/* close() returns at once; what the stream still reads must outlive it. */
static void a_closed_sequence_keeps_its_pages_until_its_stream_has_passed(void **state) {
    struct e2e_worker writer, reader;
    struct e2e_hold hold;
    struct text text = {0};
    text_append(&text, 1, 640);
    e2e_worker_open(&writer, e2e_socket(*state), "writer");
    e2e_worker_open(&reader, e2e_socket(*state), "reader");
    e2e_hold_open(&hold, reader.client);
    struct oscar_seq *written = e2e_open(&writer, &text, text.count, 0);
    e2e_extend(&writer, written, &text, text.count);
    oscar_seq_close(written);
    struct oscar_seq *read = e2e_open(&reader, &text, text.count, 0);
    assert_int_equal(e2e_info(read).hit_tokens, text.count);
    e2e_hold_up(&hold);
    struct flight flight = take_off(&reader, read, hold.stream, &text, text.count);
    oscar_seq_close(read); /* its fence goes where the last call of the sequence went */
    churn(&writer, 2000, CHURN);
    e2e_hold_release(&hold);
    MUST(oscar_stream_wait(hold.stream, WAIT_MS));
    land(&reader, &text, &flight);
    e2e_hold_close(&hold);
    e2e_worker_close(&reader);
    e2e_worker_close(&writer);
    text_free(&text);
}

static int start(void **state) { return e2e_start(state, "6M"); }
static int stop(void **state) { return e2e_stop(state); }

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_page_is_not_visible_before_its_fence, start, stop),
        cmocka_unit_test_setup_teardown(a_page_is_not_reused_while_a_reader_is_in_flight, start, stop),
        cmocka_unit_test_setup_teardown(a_closed_sequence_keeps_its_pages_until_its_stream_has_passed, start, stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
