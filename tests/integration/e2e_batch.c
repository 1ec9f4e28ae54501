/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decoding by batches: steps of several sequences at a time store and attend as one by one, a batch that its sequences have overtaken
 * is refused, and on a GPU one captured graph serves all the steps.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <cmocka.h>

#include "kernels/number.h"
#include "tests/integration/e2e_daemon.h"
#include "tests/integration/e2e_graph.h"
#include "tests/integration/e2e_model.h"

#define WAIT_MS 30000
#define SEQUENCES 4U
#define MAX_ROWS 3U
#define MAX_TOKENS 900U
#define STEPS 90U  /* more than a page: pages fill, are exchanged and packed meanwhile */
#define BOUND 1e-2 /* of the distance of two ways to the same row: roundings of BF16 */
#define LSE_BOUND 1e-3F

/* Where the sequences begin: nothing, the end of a page, its begin, and with a history that is packed already. */
static const uint32_t beginnings[SEQUENCES] = {1, 64, 127, 700};

/* Tensors of a step for all layers, as wide as K and V that are views of one fused tensor. */
struct tensors {
    struct device_buffer *q, *out, *lse, *kv;
};

struct decoder {
    struct e2e_worker worker;
    struct text text[SEQUENCES];
    struct oscar_seq *seq[SEQUENCES];
    struct oscar_batch *batch;
    struct tensors device;
    uint16_t *q, *out, *kv;
    float *lse;
    size_t q_row, kv_row;     /* elements of a row */
    size_t q_layer, kv_layer; /* elements of a layer: MAX_ROWS * SEQUENCES rows */
    uint32_t compared;        /* rows */
};

static uint64_t take_seed(void) {
    const char *given = getenv("OSCAR_TEST_SEED");
    uint64_t seed = given != NULL ? strtoull(given, NULL, 0) : (uint64_t)time(NULL);
    print_message("seed %llu (OSCAR_TEST_SEED)\n", (unsigned long long)seed);
    return seed;
}

static void *new_array(size_t count, size_t size) {
    void *array = calloc(count, size);
    if (array == NULL)
        e2e_fail("no memory for %zu elements", count);
    return array;
}

static void open_decoder(struct decoder *decoder, const struct test_daemon *daemon, uint64_t seed) {
    memset(decoder, 0, sizeof(*decoder));
    struct e2e_worker *worker = &decoder->worker;
    e2e_worker_open(worker, e2e_socket(daemon), "decoder");
    const struct oscar_geometry *geometry = &worker->geometry;
    decoder->q_row = (size_t)geometry->query_heads * geometry->head_dim;
    decoder->kv_row = (size_t)2 * geometry->kv_heads * geometry->head_dim;
    decoder->q_layer = SEQUENCES * MAX_ROWS * decoder->q_row;
    decoder->kv_layer = SEQUENCES * MAX_ROWS * decoder->kv_row;
    size_t q = geometry->layers * decoder->q_layer, kv = geometry->layers * decoder->kv_layer;
    decoder->q = new_array(q, sizeof(*decoder->q));
    decoder->out = new_array(q, sizeof(*decoder->out));
    decoder->kv = new_array(kv, sizeof(*decoder->kv));
    decoder->lse = new_array(q, sizeof(*decoder->lse));
    decoder->device = (struct tensors){e2e_buffer_poisoned(worker, q), e2e_buffer_poisoned(worker, q),
                                       e2e_buffer_poisoned(worker, 2 * q), e2e_buffer_poisoned(worker, kv)};
    for (uint32_t i = 0; i < SEQUENCES; i++) {
        text_append(&decoder->text[i], seed + i, MAX_TOKENS + STEPS * MAX_ROWS);
        decoder->seq[i] = e2e_open(worker, &decoder->text[i], beginnings[i], 0);
        e2e_extend(worker, decoder->seq[i], &decoder->text[i], beginnings[i]);
    }
    struct oscar_batch_params params = {.size = sizeof(params),
                                        .max_seqs = SEQUENCES,
                                        .max_rows = MAX_ROWS,
                                        .max_tokens = SEQUENCES * (MAX_TOKENS + STEPS * MAX_ROWS),
                                        .k_row_stride = (int64_t)decoder->kv_row,
                                        .v_row_stride = (int64_t)decoder->kv_row};
    MUST(oscar_batch_open(worker->model, &params, &decoder->batch));
}

static void close_decoder(struct decoder *decoder) {
    oscar_batch_close(decoder->batch);
    device_buffer_free(decoder->device.q);
    device_buffer_free(decoder->device.out);
    device_buffer_free(decoder->device.lse);
    device_buffer_free(decoder->device.kv);
    e2e_worker_close(&decoder->worker);
    for (uint32_t i = 0; i < SEQUENCES; i++)
        text_free(&decoder->text[i]);
    free(decoder->q);
    free(decoder->out);
    free(decoder->kv);
    free(decoder->lse);
}

/* One step: these sequences, in this order, with so many new tokens each. */
struct step {
    uint32_t count;
    struct oscar_batch_entry entry[SEQUENCES];
    uint32_t index[SEQUENCES];     /* of the sequence */
    uint32_t committed[SEQUENCES]; /* before */
    uint32_t packed[SEQUENCES];    /* tokens that the batch reads as INT2 */
};

static struct step draw_step(const struct decoder *decoder, uint64_t *random, uint32_t max_rows) {
    struct step step = {0};
    uint32_t first = (uint32_t)(e2e_random(random) % SEQUENCES);
    step.count = 1 + (uint32_t)(e2e_random(random) % SEQUENCES);
    for (uint32_t i = 0; i < step.count; i++) {
        step.index[i] = (first + i) % SEQUENCES;
        struct oscar_seq *seq = decoder->seq[step.index[i]];
        step.committed[i] = e2e_info(seq).committed_tokens;
        step.entry[i].seq = seq;
        step.entry[i].rows = 1 + (uint32_t)(e2e_random(random) % max_rows);
    }
    return step;
}

/* Query row i of a sequence aims at some position that it may see; the tensors go to the device. */
static void fill_tensors(struct decoder *decoder, const struct step *step, uint64_t *random,
                         uint32_t aims[SEQUENCES * MAX_ROWS]) {
    const struct oscar_geometry *geometry = &decoder->worker.geometry;
    size_t d = geometry->head_dim;
    uint32_t row = 0;
    for (uint32_t i = 0; i < step->count; i++) {
        const struct text *text = &decoder->text[step->index[i]];
        for (uint32_t r = 0; r < step->entry[i].rows; r++, row++) {
            uint32_t position = step->committed[i] + r;
            /* Often itself: a row that was stored in this very step. */
            aims[row] = e2e_random(random) % 3 == 0 ? position : (uint32_t)(e2e_random(random) % (position + 1));
            for (uint32_t layer = 0; layer < geometry->layers; layer++) {
                uint16_t *q = decoder->q + layer * decoder->q_layer + row * decoder->q_row;
                uint16_t *kv = decoder->kv + layer * decoder->kv_layer + row * decoder->kv_row;
                for (uint32_t h = 0; h < geometry->query_heads; h++)
                    e2e_aim(&decoder->worker, text, layer, h, aims[row], q + h * d);
                for (uint32_t h = 0; h < 2 * geometry->kv_heads; h++)
                    e2e_row(&decoder->worker, text, layer, h % geometry->kv_heads, h / geometry->kv_heads, position,
                            kv + h * d);
            }
        }
    }
    memset(decoder->out, 0xff, decoder->device.out->bytes);
    MUST(device_buffer_write(decoder->device.q, decoder->q));
    MUST(device_buffer_write(decoder->device.kv, decoder->kv));
    MUST(device_buffer_write(decoder->device.out, decoder->out));
}

/* The calls of a step, which a graph can capture: all layers. */
static void enqueue_step(struct oscar_stream *stream, void *argument) {
    struct decoder *decoder = argument;
    const struct oscar_geometry *geometry = &decoder->worker.geometry;
    uint16_t *kv = decoder->device.kv->data;
    for (uint32_t layer = 0; layer < geometry->layers; layer++) {
        const uint16_t *k = kv + layer * decoder->kv_layer;
        MUST(oscar_batch_store(decoder->batch, stream, layer, k, k + (size_t)geometry->kv_heads * geometry->head_dim));
        MUST(oscar_batch_attend(decoder->batch, stream, layer, 0,
                                (uint16_t *)decoder->device.q->data + layer * decoder->q_layer,
                                (uint16_t *)decoder->device.out->data + layer * decoder->q_layer,
                                (float *)decoder->device.lse->data + layer * decoder->q_layer / geometry->head_dim));
    }
}

static double distance(const uint16_t *a, const uint16_t *b, size_t d) {
    double difference = 0, norm = 0;
    for (size_t i = 0; i < d; i++) {
        double x = (double)oscar_bf16_to_float(a[i]), y = (double)oscar_bf16_to_float(b[i]);
        difference += (x - y) * (x - y);
        norm += y * y;
    }
    return isnan(difference) ? INFINITY : sqrt(difference / norm);
}

/* Every row is the one that its query aimed at, and what oscar_attend gives for the same sequences. */
static void check_outputs(struct decoder *decoder, const struct step *step, const uint32_t aims[SEQUENCES * MAX_ROWS]) {
    struct e2e_worker *worker = &decoder->worker;
    const struct oscar_geometry *geometry = &worker->geometry;
    size_t d = geometry->head_dim;
    MUST(device_buffer_read(decoder->device.out, decoder->out));
    MUST(device_buffer_read(decoder->device.lse, decoder->lse));
    uint32_t row = 0;
    for (uint32_t i = 0; i < step->count; row += step->entry[i].rows, i++) {
        uint32_t rows = step->entry[i].rows;
        struct device_buffer *single = e2e_buffer_poisoned(worker, rows * decoder->q_row);
        struct device_buffer *single_lse = e2e_buffer_poisoned(worker, (size_t)2 * rows * geometry->query_heads);
        uint16_t *out = new_array(rows * decoder->q_row, sizeof(*out));
        float *lse = new_array((size_t)rows * geometry->query_heads, sizeof(*lse));
        for (uint32_t layer = 0; layer < geometry->layers; layer++) {
            const struct oscar_attend_query query = {.seq = step->entry[i].seq,
                                                     .tokens = step->committed[i] + rows,
                                                     .rows = rows,
                                                     .q = (uint16_t *)decoder->device.q->data +
                                                          layer * decoder->q_layer + row * decoder->q_row,
                                                     .q_row_stride = (int64_t)decoder->q_row,
                                                     .q_head_stride = (int64_t)d,
                                                     .out = single->data,
                                                     .out_row_stride = (int64_t)decoder->q_row,
                                                     .out_head_stride = (int64_t)d,
                                                     .lse = single_lse->data};
            MUST(oscar_attend(worker->model, NULL, layer, 0, &query, 1));
            e2e_buffer_read(single, out);
            MUST(device_buffer_read(single_lse, lse));
            for (uint32_t r = 0; r < rows; r++) {
                for (uint32_t h = 0; h < geometry->query_heads; h++) {
                    const uint16_t *ours = decoder->out + layer * decoder->q_layer + (row + r) * decoder->q_row + h * d;
                    const uint16_t *theirs = out + r * decoder->q_row + h * d;
                    float sum = decoder->lse[layer * decoder->q_layer / d + (row + r) * geometry->query_heads + h];
                    e2e_is_int2(worker, &decoder->text[step->index[i]], layer, h, aims[row + r], ours);
                    float single_sum = lse[r * geometry->query_heads + h];
                    if (e2e_info(query.seq).packed_tokens != step->packed[i])
                        continue; /* oscar_attend has taken over a page that was packed meanwhile */
                    decoder->compared++;
                    if (!(distance(ours, theirs, d) <= BOUND) || !(fabsf(sum - single_sum) <= LSE_BOUND))
                        e2e_fail("layer %u, row %u, head %u: off by %g, log-sum-exp %g and %g", layer, row + r, h,
                                 distance(ours, theirs, d), (double)sum, (double)single_sum);
                }
            }
        }
        device_buffer_free(single);
        device_buffer_free(single_lse);
        free(out);
        free(lse);
    }
}

/* Reserve, set, the step's work, check, advance. `graph` NULL: the calls themselves. */
static void decode(struct decoder *decoder, struct oscar_stream *stream, struct step *step, uint64_t *random,
                   struct e2e_graph *graph) {
    uint32_t aims[SEQUENCES * MAX_ROWS];
    for (uint32_t i = 0; i < step->count; i++)
        MUST(oscar_seq_reserve(step->entry[i].seq, step->entry[i].rows));
    MUST(oscar_batch_set(decoder->batch, stream, step->entry, step->count));
    for (uint32_t i = 0; i < step->count; i++)
        step->packed[i] = e2e_info(step->entry[i].seq).packed_tokens;
    fill_tensors(decoder, step, random, aims);
    if (graph != NULL)
        e2e_graph_run(graph);
    else
        enqueue_step(stream, decoder);
    if (stream != NULL)
        MUST(oscar_stream_wait(stream, WAIT_MS));
    check_outputs(decoder, step, aims);
    for (uint32_t i = 0; i < step->count; i++)
        MUST(oscar_seq_advance(step->entry[i].seq, stream, decoder->text[step->index[i]].ids + step->committed[i],
                               step->entry[i].rows));
}

static void check_all(struct decoder *decoder) {
    assert_true(decoder->compared > 0);
    for (uint32_t i = 0; i < SEQUENCES; i++)
        e2e_check_all(&decoder->worker, decoder->seq[i], &decoder->text[i], e2e_info(decoder->seq[i]).committed_tokens);
}

static void steps_by_batch_store_and_attend_as_one_by_one(void **state) {
    struct decoder decoder;
    uint64_t random = take_seed();
    open_decoder(&decoder, *state, random);
    for (unsigned i = 0; i < STEPS; i++) {
        struct step step = draw_step(&decoder, &random, MAX_ROWS);
        decode(&decoder, NULL, &step, &random, NULL);
    }
    check_all(&decoder);
    close_decoder(&decoder);
}

static void steps_by_batch_follow_each_other_on_a_stream(void **state) {
    struct decoder decoder;
    struct oscar_stream *stream;
    struct oscar_stream_params params = {.size = sizeof(params), .threads = 2, .asynchronous = 1};
    uint64_t random = take_seed();
    open_decoder(&decoder, *state, random);
    MUST(oscar_stream_open(decoder.worker.client, &params, &stream));
    for (unsigned i = 0; i < STEPS; i++) {
        struct step step = draw_step(&decoder, &random, MAX_ROWS);
        decode(&decoder, stream, &step, &random, NULL);
    }
    check_all(&decoder);
    close_decoder(&decoder); /* behind what is enqueued */
    oscar_stream_close(stream);
}

static int try_store(struct decoder *decoder) {
    const uint16_t *kv = decoder->device.kv->data;
    return oscar_batch_store(decoder->batch, NULL, 0, kv, kv);
}

static int try_attend(struct decoder *decoder) {
    return oscar_batch_attend(decoder->batch, NULL, 0, 0, decoder->device.q->data, decoder->device.out->data, NULL);
}

static void set_one(struct decoder *decoder, uint32_t index) {
    const struct oscar_batch_entry entry = {.seq = decoder->seq[index], .rows = 1};
    MUST(oscar_batch_set(decoder->batch, NULL, &entry, 1));
}

static void a_batch_that_was_overtaken_is_refused(void **state) {
    struct decoder decoder;
    uint64_t random = take_seed();
    uint32_t aims[SEQUENCES * MAX_ROWS];
    open_decoder(&decoder, *state, random);
    struct step step = {.count = 1, .index = {1}, .committed = {beginnings[1]}, .entry = {{decoder.seq[1], 1, 0}}};
    MUST(oscar_seq_reserve(decoder.seq[1], 100));
    MUST(oscar_seq_reserve(decoder.seq[2], 100));
    fill_tensors(&decoder, &step, &random, aims);
    REFUSED(try_attend(&decoder), OSCAR_ERR_STATE); /* never set */

    set_one(&decoder, 1);
    MUST(try_store(&decoder));
    MUST(oscar_seq_advance(decoder.seq[2], NULL, decoder.text[2].ids + beginnings[2], 0)); /* not in the batch */
    MUST(try_attend(&decoder));
    /* An advance makes the stored row a committed one. */
    MUST(oscar_seq_advance(decoder.seq[1], NULL, decoder.text[1].ids + beginnings[1], 1));
    REFUSED(try_store(&decoder), OSCAR_ERR_STATE);
    REFUSED(try_attend(&decoder), OSCAR_ERR_STATE);
    set_one(&decoder, 1);
    MUST(try_attend(&decoder));
    /* New pages. */
    MUST(oscar_seq_reserve(decoder.seq[1], 300));
    REFUSED(try_attend(&decoder), OSCAR_ERR_STATE);
    /* The end of the sequence; others are set afterwards. */
    set_one(&decoder, 1);
    oscar_seq_close(decoder.seq[1]);
    REFUSED(try_attend(&decoder), OSCAR_ERR_STATE);
    set_one(&decoder, 2);
    MUST(try_attend(&decoder));
    close_decoder(&decoder);
}

static void what_does_not_fit_a_batch_is_refused(void **state) {
    struct decoder decoder;
    uint64_t random = take_seed();
    uint32_t aims[SEQUENCES * MAX_ROWS];
    open_decoder(&decoder, *state, random);
    struct oscar_seq *seq = decoder.seq[3];
    const struct step step = {.count = 1, .index = {3}, .committed = {beginnings[3]}, .entry = {{seq, 1, 0}}};
    fill_tensors(&decoder, &step, &random, aims);
    struct oscar_batch_entry many[SEQUENCES + 1];
    for (uint32_t i = 0; i <= SEQUENCES; i++)
        many[i] = (struct oscar_batch_entry){seq, 0, 1};
    REFUSED(oscar_batch_set(decoder.batch, NULL, many, SEQUENCES + 1), OSCAR_ERR_LIMIT);
    REFUSED(oscar_batch_set(decoder.batch, NULL, &(struct oscar_batch_entry){seq, MAX_ROWS + 1, 0}, 1),
            OSCAR_ERR_LIMIT);
    REFUSED(oscar_batch_set(decoder.batch, NULL, &(struct oscar_batch_entry){NULL, 1, 0}, 1), OSCAR_ERR_INVALID);
    REFUSED(oscar_batch_set(decoder.batch, NULL, NULL, 1), OSCAR_ERR_INVALID);
    /* Beyond the reserved length, and more rows than tokens. */
    uint32_t room = e2e_info(seq).reserved_tokens;
    REFUSED(oscar_batch_set(decoder.batch, NULL, &(struct oscar_batch_entry){seq, 1, room + 1}, 1), OSCAR_ERR_INVALID);
    REFUSED(oscar_batch_set(decoder.batch, NULL, &(struct oscar_batch_entry){seq, 3, 2}, 1), OSCAR_ERR_INVALID);
    REFUSED(oscar_batch_set(decoder.batch, NULL, &(struct oscar_batch_entry){seq, 1, UINT32_MAX}, 1),
            OSCAR_ERR_INVALID);
    /* Committed rows can be attended with, not stored. */
    MUST(oscar_batch_set(decoder.batch, NULL, &(struct oscar_batch_entry){seq, 1, 600}, 1));
    MUST(try_attend(&decoder));
    REFUSED(try_store(&decoder), OSCAR_ERR_INVALID);
    MUST(oscar_seq_reserve(seq, 1));
    set_one(&decoder, 3);
    MUST(try_store(&decoder));
    REFUSED(oscar_batch_set(decoder.batch, NULL, &(struct oscar_batch_entry){seq, 1, 600}, 1), OSCAR_ERR_INVALID);
    MUST(oscar_batch_set(decoder.batch, NULL, NULL, 0)); /* a step of nothing */
    MUST(try_attend(&decoder));
    const struct oscar_batch_params too_many = {.size = sizeof(too_many), .max_seqs = 1, .max_rows = 1};
    struct oscar_batch *batch;
    REFUSED(oscar_batch_open(decoder.worker.model, &too_many, &batch), OSCAR_ERR_INVALID);
    close_decoder(&decoder);
}

/* The halves of a sequence, attended over apart and merged, are the whole. */
static void partial_results_merge_to_the_whole(void **state) {
    struct decoder decoder;
    uint64_t random = take_seed();
    open_decoder(&decoder, *state, random);
    struct e2e_worker *worker = &decoder.worker;
    const struct oscar_geometry *geometry = &worker->geometry;
    struct device_buffer *q = decoder.device.q, *out[2], *lse[2];
    uint16_t merged[4 * 64];
    for (unsigned i = 0; i < 2; i++) {
        out[i] = e2e_buffer_poisoned(worker, decoder.q_row);
        lse[i] = e2e_buffer_poisoned(worker, (size_t)2 * geometry->query_heads);
    }
    REQUIRE(decoder.q_row == sizeof(merged) / sizeof(merged[0]));
    for (unsigned round = 0; round < 20; round++) {
        /* Two sequences that share no token stand for the two halves: the query aims at one of them, so that is what comes out. */
        unsigned aimed = (unsigned)(e2e_random(&random) % 2);
        uint32_t position = (uint32_t)(e2e_random(&random) % beginnings[aimed + 2]);
        for (uint32_t h = 0; h < geometry->query_heads; h++)
            e2e_aim(worker, &decoder.text[aimed + 2], 1, h, position, decoder.q + (size_t)h * geometry->head_dim);
        MUST(device_buffer_write(q, decoder.q));
        for (unsigned i = 0; i < 2; i++) {
            const struct oscar_attend_query query = {.seq = decoder.seq[i + 2],
                                                     .rows = 1,
                                                     .q = q->data,
                                                     .q_head_stride = geometry->head_dim,
                                                     .out = out[i]->data,
                                                     .out_head_stride = geometry->head_dim,
                                                     .lse = lse[i]->data};
            MUST(oscar_attend(worker->model, NULL, 1, 0, &query, 1));
        }
        const struct oscar_partial partial[2] = {
            {out[0]->data, (int64_t)decoder.q_row, geometry->head_dim, lse[0]->data},
            {out[1]->data, (int64_t)decoder.q_row, geometry->head_dim, lse[1]->data}};
        MUST(oscar_merge(worker->model, NULL, 1, &partial[0], &partial[1]));
        e2e_buffer_read(out[0], merged);
        for (uint32_t h = 0; h < geometry->query_heads; h++)
            e2e_is_int2(worker, &decoder.text[aimed + 2], 1, h, position, merged + (size_t)h * geometry->head_dim);
    }
    REFUSED(oscar_merge(worker->model, NULL, 1, &(struct oscar_partial){0}, &(struct oscar_partial){0}),
            OSCAR_ERR_INVALID);
    for (unsigned i = 0; i < 2; i++) {
        device_buffer_free(out[i]);
        device_buffer_free(lse[i]);
    }
    close_decoder(&decoder);
}

/* The grid of a captured launch does not depend on lengths: they are drawn anew in each step, and so are the sequences. */
static void a_captured_graph_serves_every_step(void **state) {
    struct decoder decoder;
    uint64_t random = take_seed();
    open_decoder(&decoder, *state, random);
    struct e2e_graph *graph = e2e_graph_open(decoder.worker.client, enqueue_step, &decoder);
    struct oscar_stream *stream = e2e_graph_stream(graph);
    struct step step = draw_step(&decoder, &random, MAX_ROWS);
    for (uint32_t i = 0; i < step.count; i++)
        MUST(oscar_seq_reserve(step.entry[i].seq, MAX_ROWS));
    MUST(oscar_batch_set(decoder.batch, stream, step.entry, step.count));
    e2e_graph_record(graph);
    for (unsigned i = 0; i < STEPS; i++) {
        step = draw_step(&decoder, &random, MAX_ROWS);
        decode(&decoder, stream, &step, &random, graph);
    }
    check_all(&decoder);
    e2e_graph_close(graph);
    close_decoder(&decoder);
}

static int start(void **state) { return e2e_start(state, "64M"); }
static int stop(void **state) { return e2e_stop(state); }

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(steps_by_batch_store_and_attend_as_one_by_one, start, stop),
        cmocka_unit_test_setup_teardown(steps_by_batch_follow_each_other_on_a_stream, start, stop),
        cmocka_unit_test_setup_teardown(a_batch_that_was_overtaken_is_refused, start, stop),
        cmocka_unit_test_setup_teardown(what_does_not_fit_a_batch_is_refused, start, stop),
        cmocka_unit_test_setup_teardown(partial_results_merge_to_the_whole, start, stop),
        cmocka_unit_test_setup_teardown(a_captured_graph_serves_every_step, start, stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
