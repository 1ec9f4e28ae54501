/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows of K and V to dense pages, and the inspection of pages. The oracles: Hadamard rotation is the host's to the bit; a row
 * rotated by a matrix lies within the bounds below of its float64 value. All memory is poison before.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/number.h"
#include "kernels/rotate.h"
#include "proto/geometry.h"
#include "tests/gpu/graph.h"

#define POISON 0xFF
#define MAX_DIM 256U

/* |sum - exact| <= SUM_ERROR * sum |x_i R_ij|: R in two 16-bit terms (bf16: 2^-18), fp32 sums that may be cut instead of rounded. */
#define SUM_ERROR 0x1p-16
#define BF16_ERROR 0x1p-8    /* of rounding, relative to the result */
#define LEAST_ERROR 0x1p-133 /* the smallest BF16 */

static struct rig *rig;
static struct kernel_random source;

static int open_rig(void **state) {
    (void)state;
    rig = rig_open();
    source = kernel_random_open();
    return 0;
}

static int close_rig(void **state) {
    (void)state;
    rig_close(rig);
    return 0;
}

static uint32_t below(uint32_t bound) { return kernel_random_below(&source, bound); }

/* ---- models, tensors and pages ---- */

enum kind { HADAMARD, MATRIX, MIXED /* K by matrices, V by Hadamard */, KINDS };

static struct kernel_model *open_model(uint32_t d, uint32_t layers, uint32_t kv_heads, uint32_t dtype, enum kind kind) {
    struct kernel_model *model = kernel_model_open(&source, &(struct kernel_model_options){.layers = layers,
                                                                                           .kv_heads = kv_heads,
                                                                                           .head_dim = d,
                                                                                           .dtype = dtype,
                                                                                           .matrix = kind != HADAMARD,
                                                                                           .rank_k = d - 1,
                                                                                           .rank_v = d - 1});
    if (kind == MIXED) {
        model->calibration.rotation_v = OSCAR_ROTATION_HADAMARD;
        for (uint32_t i = 0; i < layers * kv_heads; i++)
            model->calibration.heads[i].rotation_v = NULL;
    }
    rig_calibration_load(rig, &model->geometry, &model->calibration);
    return model;
}

static void close_model(struct kernel_model *model) {
    rig->ops->calibration_unload(rig->device, &model->calibration);
    kernel_model_close(model);
}

/* A worker's fused tensor: [token][K heads, gap, V heads], on the host and on the device. */
struct tensor {
    uint16_t *host, *device;
    size_t elements;
    int64_t first_k, first_v; /* elements from the start */
    int64_t token_stride, head_stride;
};

static uint16_t worker_bits(uint32_t dtype, uint16_t bf16) {
    return dtype == OSCAR_BF16 ? bf16 : oscar_fp16_from_float(oscar_bf16_to_float(bf16));
}

static uint16_t *tensor_row(const struct tensor *tensor, bool is_v, uint32_t head, uint32_t token) {
    return tensor->host + (is_v ? tensor->first_v : tensor->first_k) + token * tensor->token_stride +
           head * tensor->head_stride;
}

/* `unit`: strides and offsets are multiples of it: 8 for loads of 16 bytes, 2 for those of 4. */
static struct tensor tensor_open(const struct oscar_geometry *geometry, uint32_t tokens, uint32_t unit) {
    uint32_t heads = geometry->kv_heads, d = geometry->head_dim;
    struct tensor tensor = {.first_k = unit * below(8), .head_stride = d + unit * below(4)};
    int64_t side = tensor.head_stride * heads;
    tensor.first_v = tensor.first_k + side + unit * below(4);
    tensor.token_stride = 2 * side + unit * (3 + below(8));
    tensor.elements = (size_t)(tensor.first_v + tensor.token_stride * tokens);
    tensor.host = malloc(tensor.elements * sizeof(uint16_t));
    assert_non_null(tensor.host);
    memset(tensor.host, POISON, tensor.elements * sizeof(uint16_t));
    for (uint32_t token = 0; token < tokens; token++)
        for (uint32_t i = 0; i < 2 * heads; i++) {
            uint16_t *row = tensor_row(&tensor, i % 2 != 0, i / 2, token);
            kernel_row_fill(&source, below(KERNEL_ROW_KINDS), d, row);
            for (uint32_t j = 0; j < d; j++)
                row[j] = worker_bits(geometry->dtype, row[j]);
        }
    tensor.device = rig_upload(rig, tensor.host, tensor.elements * sizeof(uint16_t));
    return tensor;
}

static void tensor_upload(struct tensor *tensor) {
    rig_write(rig, tensor->device, tensor->host, tensor->elements * sizeof(uint16_t));
}

static void tensor_close(struct tensor *tensor) {
    rig_free(rig, tensor->device);
    free(tensor->host);
}

static struct oscar_rows rows_of(const struct tensor *tensor, const uint16_t *data, bool is_v) {
    return (struct oscar_rows){data + (is_v ? tensor->first_v : tensor->first_k), tensor->token_stride,
                               tensor->head_stride};
}

/* An arena of dense pages on the device, and what is expected in it. */
struct arena {
    uint64_t page_bytes;
    uint32_t slots;
    uint8_t *device, *expected;
    uint32_t *order; /* the slots, shuffled */
};

static struct arena arena_open(const struct oscar_geometry *geometry, uint32_t slots) {
    struct arena arena = {.page_bytes = oscar_dense_page_bytes(geometry), .slots = slots};
    arena.device = rig_alloc(rig, arena.page_bytes * slots);
    arena.expected = malloc(arena.page_bytes * slots);
    arena.order = malloc(slots * sizeof(*arena.order));
    assert_non_null(arena.expected);
    assert_non_null(arena.order);
    memset(arena.expected, POISON, arena.page_bytes * slots);
    for (uint32_t i = 0; i < slots; i++) {
        uint32_t other = below(i + 1);
        arena.order[i] = arena.order[other];
        arena.order[other] = i;
    }
    return arena;
}

static void arena_close(struct arena *arena) {
    rig_free(rig, arena->device);
    free(arena->expected);
    free(arena->order);
}

/* Stores on the host, into what is expected; returns its result. */
static int expect(const struct kernel_model *model, struct oscar_store_args args, const struct tensor *tensor,
                  uint8_t **pages) {
    struct host_pool *pool;
    args.geometry = &model->geometry;
    args.calibration = &model->calibration;
    args.pages = pages;
    args.k.data = (const uint16_t *)args.k.data - tensor->device + tensor->host;
    args.v.data = (const uint16_t *)args.v.data - tensor->device + tensor->host;
    assert_int_equal(host_pool_open(1, &pool, NULL), 0);
    int r = host_store(pool, HOST_PORTABLE, &args);
    host_pool_close(pool);
    return r;
}

/* ---- checks ---- */

static float worker_float(uint32_t dtype, uint16_t bits) {
    return dtype == OSCAR_BF16 ? oscar_bf16_to_float(bits) : oscar_fp16_to_float(bits);
}

/* A stored row against its float64 value. */
static void check_matrix_row(const float *matrix, uint32_t d, uint32_t dtype, const uint16_t *from,
                             const uint16_t *found) {
    double exact[MAX_DIM] = {0}, magnitude[MAX_DIM] = {0};
    for (uint32_t i = 0; i < d; i++) {
        double x = worker_float(dtype, from[i]);
        for (uint32_t j = 0; j < d; j++) {
            exact[j] += x * matrix[(size_t)i * d + j];
            magnitude[j] += fabs(x * matrix[(size_t)i * d + j]);
        }
    }
    for (uint32_t j = 0; j < d; j++) {
        double sum_error = SUM_ERROR * magnitude[j];
        double error = fabs(oscar_bf16_to_float(found[j]) - exact[j]);
        if (!(error <= sum_error + BF16_ERROR * (fabs(exact[j]) + sum_error) + LEAST_ERROR))
            fail_msg("d %u, type %u: element %u is %g instead of %g; sum of magnitudes %g", d, dtype, j,
                     (double)oscar_bf16_to_float(found[j]), exact[j], magnitude[j]);
    }
}

/* All of the arena against what is expected, but for rows of `tokens` tokens that a matrix rotated into args' pages: those
 * against float64. */
static void check_store(const struct kernel_model *model, const struct oscar_store_args *args,
                        const struct tensor *tensor, const struct arena *arena) {
    uint32_t d = model->geometry.head_dim, heads = model->geometry.kv_heads;
    uint8_t *found = malloc(arena->page_bytes * arena->slots);
    assert_non_null(found);
    rig_read(rig, found, arena->device, arena->page_bytes * arena->slots);
    for (uint32_t token = 0; token < args->tokens; token++)
        for (uint32_t i = 0; i < 2 * heads; i++) {
            const struct oscar_head_calibration *head = oscar_calibration_head(&model->calibration, args->layer, i / 2);
            const float *matrix = i % 2 ? head->rotation_v : head->rotation_k;
            if (!matrix)
                continue;
            uint32_t row = (args->first_row + token) % 64 + i % 2 * 64;
            size_t at = (size_t)(args->pages[(args->first_row + token) / 64] - arena->device) +
                        ((size_t)args->layer * heads + i / 2) * oscar_dense_record_bytes(d) + (size_t)row * 2 * d;
            check_matrix_row(matrix, d, model->geometry.dtype, tensor_row(tensor, i % 2 != 0, i / 2, token),
                             (const uint16_t *)(found + at));
            memcpy(arena->expected + at, found + at, (size_t)2 * d);
        }
    assert_memory_equal(found, arena->expected, arena->page_bytes * arena->slots);
    free(found);
}

/* ---- store ---- */

static void check_one_store(struct kernel_model *model, uint32_t tokens, uint32_t first_row, uint32_t unit) {
    uint32_t pages = (first_row + tokens + 63) / 64;
    struct tensor tensor = tensor_open(&model->geometry, tokens, unit);
    struct arena arena = arena_open(&model->geometry, pages + 2);
    uint8_t **page = calloc(2 * (size_t)pages, sizeof(*page)), **expected_page = page + pages;
    assert_non_null(page);
    for (uint32_t p = 0; p < pages; p++) {
        page[p] = arena.device + arena.order[p] * arena.page_bytes;
        expected_page[p] = arena.expected + arena.order[p] * arena.page_bytes;
    }
    struct oscar_store_args args = {.geometry = &model->geometry,
                                    .calibration = &model->calibration,
                                    .layer = below(model->geometry.layers),
                                    .tokens = tokens,
                                    .first_row = first_row,
                                    .pages = page,
                                    .k = rows_of(&tensor, tensor.device, false),
                                    .v = rows_of(&tensor, tensor.device, true)};
    int r = rig->ops->store(rig->synchronous, &args);
    assert_int_equal(r, expect(model, args, &tensor, expected_page));
    check_store(model, &args, &tensor, &arena);
    free(page);
    arena_close(&arena);
    tensor_close(&tensor);
}

static void stored_rows_are_the_rotated_rows_and_nothing_else_changes(void **state) {
    (void)state;
    for (uint32_t c = 0; c < 3 * 2 * KINDS; c++) {
        struct kernel_model *model = open_model(64U << c % 3, 2, 1 + below(c % 3 == 2 ? 2 : 3),
                                                c / 3 % 2 ? OSCAR_FP16 : OSCAR_BF16, (enum kind)(c / 6));
        const uint32_t lengths[] = {1, 63, 64, 65, 100 + below(400)}, units[] = {8, 2, 1};
        for (uint32_t i = 0; i < 5; i++)
            check_one_store(model, lengths[i], below(4) == 0 ? 0 : below(64), units[below(3)]);
        close_model(model);
    }
}

static void a_store_may_span_more_pages_than_one_launch_takes(void **state) {
    (void)state;
    for (enum kind kind = HADAMARD; kind <= MATRIX; kind++) {
        struct kernel_model *model = open_model(64, 1, 1, OSCAR_BF16, kind);
        check_one_store(model, 64 * (rig_small() ? 260 : 530) + below(64), 1 + below(63), 8);
        close_model(model);
    }
}

static void a_row_out_of_range_is_reported_and_written(void **state) {
    (void)state;
    /* Row 0 of K: the first element, all others 0, so that each rotated one is this, divided by 8 or 16, and with a sign. The
     * greatest magnitude allowed is 64,768; what follows is 65,024. */
    const struct {
        float value;
        bool in_range;
    } cases[] = {{64768.0F, true},  {65024.0F, false}, {-65024.0F, false}, {-64768.0F, true},
                 {0x1p100F, false}, {INFINITY, false}, {NAN, false}};
    for (uint32_t c = 0; c < 2 * sizeof(cases) / sizeof(cases[0]); c++) {
        uint32_t d = c % 2 ? 64 : 256;
        float value = cases[c / 2].value;
        int outcome = cases[c / 2].in_range ? 0 : OSCAR_ERR_NOT_FINITE;
        struct kernel_model *model = open_model(d, 1, 1, OSCAR_BF16, HADAMARD);
        struct tensor tensor = tensor_open(&model->geometry, 3, 8);
        uint16_t *row = tensor_row(&tensor, false, 0, 0);
        memset(tensor.host, 0, tensor.elements * sizeof(uint16_t));
        row[0] = oscar_bf16_from_float(value * (d == 64 ? 8.0F : 16.0F));
        tensor_row(&tensor, false, 0, 1)[0] = 0x3F80;
        tensor_upload(&tensor);
        struct arena arena = arena_open(&model->geometry, 1);
        struct oscar_store_args args = {.geometry = &model->geometry,
                                        .calibration = &model->calibration,
                                        .tokens = 3,
                                        .pages = &arena.device,
                                        .k = rows_of(&tensor, tensor.device, false),
                                        .v = rows_of(&tensor, tensor.device, true)};
        assert_int_equal(rig->ops->store(rig->synchronous, &args), outcome);
        assert_int_equal(rig->ops->stream_status(rig->synchronous), 0);
        assert_int_equal(rig->ops->store(rig->asynchronous, &args), 0);
        assert_int_equal(rig_wait(rig, rig->asynchronous), outcome);
        assert_int_equal(rig->ops->stream_status(rig->asynchronous), 0);
        uint16_t written[2 * MAX_DIM];
        rig_read(rig, written, arena.device, (size_t)2 * 2 * d);
        for (uint32_t j = 0; j < d; j++) {
            float found = oscar_bf16_to_float(written[j]);
            assert_true(isnan(value) ? isnan(found) != 0 && written[j] != 0xFFFF : found == (float)value);
            assert_true(oscar_bf16_to_float(written[d + j]) == (d == 64 ? 0.125F : 0.0625F));
        }
        arena_close(&arena);
        tensor_close(&tensor);
        close_model(model);
    }
}

static void a_matrix_spreads_what_is_not_finite_and_it_is_reported(void **state) {
    (void)state;
    const uint16_t bad[2][4] = {{0x7F80, 0xFF80, 0x7FC0, 0x7F00}, {0x7C00, 0xFC00, 0x7E00, 0x7E01}};
    for (uint32_t c = 0; c < 12; c++) {
        bool fp16 = c / 3 % 2 != 0, is_v = below(2) != 0;
        struct kernel_model *model = open_model(64U << c % 3, 1, 2, fp16 ? OSCAR_FP16 : OSCAR_BF16, MATRIX);
        uint32_t d = model->geometry.head_dim, tokens = 200, head = below(2), token = below(tokens);
        struct tensor tensor = tensor_open(&model->geometry, tokens, 8);
        for (uint32_t t = 0; t < tokens; t++) /* all other rows are small */
            for (uint32_t i = 0; i < 4; i++)
                for (uint32_t j = 0; j < d; j++)
                    tensor_row(&tensor, i % 2 != 0, i / 2, t)[j] = (uint16_t)(0x3000 | below(0x400));
        tensor_row(&tensor, is_v, head, token)[below(d)] = bad[fp16][below(4)];
        tensor_upload(&tensor);
        struct arena arena = arena_open(&model->geometry, 4);
        uint8_t *pages[4];
        for (uint32_t p = 0; p < 4; p++)
            pages[p] = arena.device + p * arena.page_bytes;
        struct oscar_store_args args = {.geometry = &model->geometry,
                                        .calibration = &model->calibration,
                                        .tokens = tokens,
                                        .pages = pages,
                                        .k = rows_of(&tensor, tensor.device, false),
                                        .v = rows_of(&tensor, tensor.device, true)};
        assert_int_equal(rig->ops->store(rig->synchronous, &args), OSCAR_ERR_NOT_FINITE);
        int32_t status[4];
        const uint8_t *inspected[4] = {pages[0], pages[1], pages[2], pages[3]};
        /* The last page's other rows are poison, and only there. */
        assert_int_equal(rig->ops->inspect(rig->synchronous, &model->geometry, inspected, 4, status), 0);
        for (uint32_t p = 0; p < 4; p++)
            assert_int_equal(status[p], p == token / 64 || p == 3 ? OSCAR_ERR_NOT_FINITE : 0);
        arena_close(&arena);
        tensor_close(&tensor);
        close_model(model);
    }
}

static void arguments_out_of_range_are_refused_at_once(void **state) {
    (void)state;
    struct kernel_model *model = open_model(64, 2, 1, OSCAR_BF16, HADAMARD);
    struct tensor tensor = tensor_open(&model->geometry, 1, 8);
    struct arena arena = arena_open(&model->geometry, 1);
    const struct oscar_store_args good = {.geometry = &model->geometry,
                                          .calibration = &model->calibration,
                                          .tokens = 1,
                                          .pages = &arena.device,
                                          .k = rows_of(&tensor, tensor.device, false),
                                          .v = rows_of(&tensor, tensor.device, true)};
    struct oscar_geometry other = model->geometry;
    other.layers = 3;
    struct oscar_store_args bad[4] = {good, good, good, good};
    bad[0].layer = 2;
    bad[1].first_row = 64;
    bad[2].tokens = OSCAR_MAX_SEQUENCE_TOKENS + 1;
    bad[3].geometry = &other;
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(rig->ops->store(rig->synchronous, &bad[i]), OSCAR_ERR_INVALID);
        assert_int_equal(rig->ops->store(rig->asynchronous, &bad[i]), OSCAR_ERR_INVALID);
    }
    int32_t status = 1;
    const uint8_t *page = arena.device;
    other.head_dim = 65;
    assert_int_equal(rig->ops->inspect(rig->synchronous, &other, &page, 1, &status), OSCAR_ERR_INVALID);
    struct oscar_store_args none = good;
    none.tokens = 0;
    assert_int_equal(rig->ops->store(rig->synchronous, &none), 0);
    assert_int_equal(rig_wait(rig, rig->asynchronous), 0);
    check_store(model, &none, &tensor, &arena); /* all poison */
    arena_close(&arena);
    tensor_close(&tensor);
    close_model(model);
}

/* ---- addresses beyond 2^32 ---- */

/* A page of 2 GiB whose last record is written, at 4 GiB of its chunk, and a second token 4 GiB behind the first. */
static void offsets_go_beyond_32_bits(void **state) {
    (void)state;
    if (rig_small())
        skip();
    const struct oscar_geometry geometry = {.layers = 512,
                                            .query_heads = 128,
                                            .kv_heads = 128,
                                            .head_dim = 128,
                                            .dtype = OSCAR_BF16,
                                            .page_tokens = OSCAR_PAGE_TOKENS,
                                            .sink_tokens = OSCAR_SINK_TOKENS,
                                            .recent_tokens = OSCAR_RECENT_TOKENS};
    uint64_t page_bytes = oscar_dense_page_bytes(&geometry), four_gib = UINT64_C(1) << 32;
    assert_int_equal(page_bytes, UINT64_C(1) << 31);
    struct oscar_calibration *calibration;
    assert_int_equal(oscar_calibration_default(&geometry, &calibration, NULL), 0);
    rig_calibration_load(rig, &geometry, calibration);
    struct oscar_chunk *chunk;
    assert_int_equal(rig->ops->chunk_create(rig->device, four_gib + page_bytes, &chunk, NULL), 0);
    uint8_t *memory = rig->ops->chunk_address(chunk), *page = memory + four_gib;
    const size_t tensor_bytes = (size_t)2 * 128 * 128 * sizeof(uint16_t); /* one token: K and V of 128 heads */
    uint16_t *rows = malloc(2 * tensor_bytes);
    assert_non_null(rows);
    for (uint32_t i = 0; i < 4 * 128; i++)
        kernel_row_fill(&source, KERNEL_ROW_NORMAL, 128, rows + (size_t)i * 128);
    rig_write(rig, memory, rows, tensor_bytes);
    rig_write(rig, memory + four_gib, (const uint8_t *)rows + tensor_bytes, tensor_bytes);
    struct oscar_store_args args = {.geometry = &geometry,
                                    .calibration = calibration,
                                    .layer = 511,
                                    .tokens = 2,
                                    .first_row = 62,
                                    .pages = &page,
                                    .k = {memory, INT64_C(1) << 31, 128},
                                    .v = {memory + tensor_bytes / 2, INT64_C(1) << 31, 128}};
    assert_int_equal(rig->ops->store(rig->synchronous, &args), 0);
    for (uint32_t i = 0; i < 2 * 128; i++) {
        uint16_t found[2 * 128];
        uint32_t head = i / 2, side = i % 2;
        size_t record = ((size_t)511 * 128 + head) * oscar_dense_record_bytes(128);
        rig_read(rig, found, page + record + (side * 64 + 62) * (size_t)256, sizeof(found));
        for (uint32_t token = 0; token < 2; token++) {
            float x[128];
            for (uint32_t j = 0; j < 128; j++)
                x[j] = oscar_bf16_to_float(rows[((size_t)token * 256 + side * 128 + head) * 128 + j]);
            oscar_rotate(HOST_PORTABLE, NULL, 128, false, 1, x, 128, x, 128);
            for (uint32_t j = 0; j < 128; j++)
                assert_int_equal(found[token * 128 + j], oscar_bf16_from_float(x[j]));
        }
    }
    free(rows);
    rig->ops->chunk_free(chunk);
    rig->ops->calibration_unload(rig->device, calibration);
    oscar_calibration_free(calibration);
}

/* ---- batches ---- */

#define BATCH_ITEMS 40U
#define BATCH_ROWS 90U
#define BATCH_PAGES 6U /* of an item, at most */

/* A batch whose items have their tail pages in one dense arena; what comes before is packed or sink and never touched. */
struct batch {
    struct kernel_model *model;
    struct oscar_batch_impl *batch;
    struct arena arena;
    struct tensor tensor;
    struct oscar_batch_store_args args;
    struct oscar_batch_item item[BATCH_ITEMS];
    oscar_page_ref pages[BATCH_ITEMS][BATCH_PAGES];
    uint32_t items;
};

static void batch_open(struct batch *batch, uint32_t d, enum kind kind, bool decode) {
    *batch = (struct batch){.model = open_model(d, 2, 2, below(2) ? OSCAR_BF16 : OSCAR_FP16, kind)};
    struct oscar_batch_limits limits = {BATCH_ITEMS, decode ? 1 : BATCH_ROWS, (uint64_t)BATCH_ITEMS * BATCH_PAGES};
    assert_int_equal(rig->ops->batch_open(rig->device, &batch->model->geometry, &limits, &batch->batch, NULL), 0);
    batch->arena = arena_open(&batch->model->geometry, BATCH_ITEMS * BATCH_PAGES);
    batch->tensor = tensor_open(&batch->model->geometry, BATCH_ITEMS * BATCH_ROWS, below(2) ? 8 : 1);
    batch->args = (struct oscar_batch_store_args){.calibration = &batch->model->calibration,
                                                  .layer = below(2),
                                                  .k = rows_of(&batch->tensor, batch->tensor.device, false),
                                                  .v = rows_of(&batch->tensor, batch->tensor.device, true)};
}

static void batch_close(struct batch *batch) {
    rig->ops->batch_close(batch->batch);
    arena_close(&batch->arena);
    tensor_close(&batch->tensor);
    close_model(batch->model);
}

/* Draws items of `rows` rows at most (all of as many when `even`), and makes the batch these. */
static void batch_draw(struct batch *batch, struct oscar_stream_impl *stream, uint32_t rows, bool even) {
    batch->items = even ? BATCH_ITEMS : below(BATCH_ITEMS + 1);
    uint32_t slot = 0;
    for (uint32_t i = 0; i < batch->items; i++) {
        uint32_t count = even ? rows : below(rows + 1), tokens = count + below(64 * BATCH_PAGES - count + 1);
        uint32_t first = (tokens - count) / 64;
        for (uint32_t p = 0; p < (tokens + 63) / 64; p++) {
            bool dense = (count > 0 && p >= first) || (p > 0 && below(3) == 0);
            batch->pages[i][p] = oscar_page_ref_make(dense    ? OSCAR_FORM_DENSE
                                                     : p == 0 ? OSCAR_FORM_SINK
                                                              : OSCAR_FORM_PACKED,
                                                     dense ? batch->arena.order[slot++] : p);
        }
        /* An item's rows lie anywhere in the tensor, its K not at the same place as its V. */
        batch->item[i] = (struct oscar_batch_item){.pages = batch->pages[i],
                                                   .tokens = tokens,
                                                   .rows = count,
                                                   .k_offset = (int64_t)(i * BATCH_ROWS) * batch->tensor.token_stride,
                                                   .v_offset = (int64_t)((BATCH_ITEMS - 1 - i) * BATCH_ROWS) *
                                                               batch->tensor.token_stride};
    }
    const struct oscar_arena_view view = {batch->arena.device, batch->arena.page_bytes, NULL};
    const struct oscar_arena_view arenas[OSCAR_FORMS] = {view, view, view};
    assert_int_equal(rig->ops->batch_update(stream, batch->batch, arenas, batch->item, batch->items), 0);
}

static void batch_enqueue(struct oscar_stream_impl *stream, void *argument) {
    struct batch *batch = argument;
    assert_int_equal(rig->ops->batch_store(stream, batch->batch, &batch->args), 0);
}

/* What was stored, against one store an item. The pages are poison again afterwards. */
static int batch_check(struct batch *batch) {
    int result = 0;
    const struct oscar_geometry *geometry = &batch->model->geometry;
    uint32_t d = geometry->head_dim;
    size_t bytes = batch->arena.page_bytes * batch->arena.slots;
    uint8_t *found = malloc(bytes);
    assert_non_null(found);
    rig_read(rig, found, batch->arena.device, bytes);
    memset(batch->arena.expected, POISON, bytes);
    for (uint32_t i = 0; i < batch->items; i++) {
        const struct oscar_batch_item *item = &batch->item[i];
        if (item->rows == 0)
            continue;
        uint32_t first = item->tokens - item->rows;
        uint8_t *pages[BATCH_PAGES];
        for (uint32_t p = first / 64; p < (item->tokens + 63) / 64; p++)
            pages[p - first / 64] = batch->arena.expected + oscar_page_ref_id(item->pages[p]) * batch->arena.page_bytes;
        struct oscar_store_args args = {.layer = batch->args.layer,
                                        .tokens = item->rows,
                                        .first_row = first % 64,
                                        .k = batch->args.k,
                                        .v = batch->args.v};
        args.k.data = (const uint16_t *)args.k.data + item->k_offset;
        args.v.data = (const uint16_t *)args.v.data + item->v_offset;
        int r = expect(batch->model, args, &batch->tensor, pages);
        result = r < 0 ? r : result;
        for (uint32_t row = 0; row < item->rows; row++)
            for (uint32_t h = 0; h < 2 * geometry->kv_heads; h++) {
                const struct oscar_head_calibration *head =
                    oscar_calibration_head(&batch->model->calibration, args.layer, h / 2);
                const float *matrix = h % 2 ? head->rotation_v : head->rotation_k;
                if (!matrix)
                    continue;
                size_t at = (size_t)(pages[(first % 64 + row) / 64] - batch->arena.expected) +
                            ((size_t)args.layer * geometry->kv_heads + h / 2) * oscar_dense_record_bytes(d) +
                            ((first + row) % 64 + h % 2 * 64) * (size_t)2 * d;
                check_matrix_row(matrix, d, geometry->dtype,
                                 tensor_row(&batch->tensor, h % 2 != 0, h / 2, row) +
                                     (h % 2 ? item->v_offset : item->k_offset),
                                 (const uint16_t *)(found + at));
                memcpy(batch->arena.expected + at, found + at, (size_t)2 * d);
            }
    }
    assert_memory_equal(found, batch->arena.expected, bytes);
    rig_poison(rig, batch->arena.device, bytes);
    free(found);
    return result;
}

static void a_batch_is_stored_as_its_items_are(void **state) {
    (void)state;
    for (uint32_t c = 0; c < 3 * KINDS; c++) {
        struct batch batch;
        batch_open(&batch, 64U << c % 3, (enum kind)(c / 3), false);
        for (uint32_t round = 0; round < 4; round++) {
            batch_draw(&batch, rig->synchronous, 1 + below(BATCH_ROWS), round % 2 != 0);
            int r = rig->ops->batch_store(rig->synchronous, batch.batch, &batch.args);
            assert_int_equal(r, batch_check(&batch));
        }
        batch_close(&batch);
    }
}

static void a_recorded_batch_store_runs_with_what_the_batch_holds_then(void **state) {
    (void)state;
    for (uint32_t c = 0; c < 2 * KINDS; c++) {
        struct batch batch;
        bool decode = c % 2 == 0;
        batch_open(&batch, 128, (enum kind)(c / 2), decode);
        struct graph *graph = graph_record(rig, batch_enqueue, &batch);
        for (uint32_t round = 0; round < 4; round++) {
            batch_draw(&batch, graph_stream(graph), decode ? 1 : BATCH_ROWS, decode);
            graph_run(graph);
            int r = rig_wait(rig, graph_stream(graph));
            assert_int_equal(r, batch_check(&batch));
        }
        graph_free(graph);
        batch_close(&batch);
    }
}

/* ---- inspect ---- */

static void a_page_with_one_bad_element_is_found_among_many(void **state) {
    (void)state;
    const uint16_t bad[] = {0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x477E, 0xC77E}, good[] = {0x477D, 0xC77D};
    for (uint32_t c = 0; c < 6; c++) {
        struct kernel_model *model = open_model(64U << c % 3, 1 + below(3), 1 + below(3), OSCAR_BF16, HADAMARD);
        uint32_t count = c < 3 ? 1 + below(20) : 300;
        struct arena arena = arena_open(&model->geometry, count);
        size_t elements = arena.page_bytes / sizeof(uint16_t);
        uint8_t *page = kernel_dense_page(&source, &model->geometry, true);
        const uint8_t **pages = calloc(count, sizeof(*pages));
        int32_t *status = malloc((count + 1) * sizeof(*status)), *expected = calloc(count + 1, sizeof(*expected));
        assert_true(pages && status && expected);
        memset(status, POISON, (count + 1) * sizeof(*status));
        expected[count] = -1; /* what follows is not written */
        for (uint32_t p = 0; p < count; p++) {
            size_t at = p % 3 == 0 ? 0 : p % 3 == 1 ? elements - 1 : below((uint32_t)elements);
            uint16_t was = ((uint16_t *)page)[at];
            expected[p] = below(3) == 0 ? OSCAR_ERR_NOT_FINITE : 0;
            ((uint16_t *)page)[at] = expected[p] < 0 ? bad[below(6)] : good[below(2)];
            pages[p] = arena.device + arena.order[p] * arena.page_bytes;
            rig_write(rig, arena.device + arena.order[p] * arena.page_bytes, page, arena.page_bytes);
            ((uint16_t *)page)[at] = was;
        }
        assert_int_equal(rig->ops->inspect(rig->synchronous, &model->geometry, pages, count, status), 0);
        assert_memory_equal(status, expected, (count + 1) * sizeof(*status));
        assert_int_equal(rig->ops->inspect(rig->asynchronous, &model->geometry, pages, count, status), 0);
        assert_int_equal(rig_wait(rig, rig->asynchronous), 0);
        assert_memory_equal(status, expected, (count + 1) * sizeof(*status));
        assert_int_equal(rig->ops->inspect(rig->synchronous, &model->geometry, pages, 0, status), 0);
        free(page);
        free(pages);
        free(status);
        free(expected);
        arena_close(&arena);
        close_model(model);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stored_rows_are_the_rotated_rows_and_nothing_else_changes),
        cmocka_unit_test(a_store_may_span_more_pages_than_one_launch_takes),
        cmocka_unit_test(a_row_out_of_range_is_reported_and_written),
        cmocka_unit_test(a_matrix_spreads_what_is_not_finite_and_it_is_reported),
        cmocka_unit_test(arguments_out_of_range_are_refused_at_once),
        cmocka_unit_test(offsets_go_beyond_32_bits),
        cmocka_unit_test(a_page_with_one_bad_element_is_found_among_many),
        cmocka_unit_test(a_batch_is_stored_as_its_items_are),
        cmocka_unit_test(a_recorded_batch_store_runs_with_what_the_batch_holds_then),
    };
    return cmocka_run_group_tests(tests, open_rig, close_rig);
}
