/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decode attention on the GPU: one query row an item, BF16 sink and recent window, INT2 history, over the pages of a model of 36
 * layers in random order; each run reads another layer. Bytes are those of the pages that a call reads.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/calibration.h"
#include "proto/geometry.h"
#include "tests/bench/gpu_bench.h"

#define MOST_PAIRS 16U
#define RECENT_PAGES 5U /* the last one is half full */
#define TEMPLATE_PAGES 4U

struct decode_shape {
    uint32_t batch, context, query_heads, kv_heads, head_dim, layers;
};

struct decode_bench {
    struct gpu_bench *gpu;
    struct decode_shape shape;
    struct oscar_geometry geometry;
    struct oscar_calibration calibration;
    struct oscar_head_calibration *heads;
    float *centre, *matrix;
    void *turns;
    uint64_t state; /* of the random numbers */
    struct oscar_arena_view arenas[OSCAR_FORMS];
    void *q, *out;
    float *lse;
    struct oscar_batch_impl *batch;
};

static void *take(size_t bytes) {
    void *memory = calloc(1, bytes);
    if (!memory)
        gpu_must(OSCAR_ERR_NO_MEMORY, "decode");
    return memory;
}

static uint32_t draw(struct decode_bench *bench) {
    bench->state = bench->state * UINT64_C(6364136223846793005) + 1442695040888963407U;
    return (uint32_t)(bench->state >> 32);
}

static float noise(struct decode_bench *bench) {
    float sum = 0;
    for (unsigned i = 0; i < 12; i++)
        sum += (float)(draw(bench) >> 8) * 0x1p-24F;
    return sum - 6;
}

static uint32_t pages_of(const struct decode_shape *shape) { return shape->context / OSCAR_PAGE_TOKENS; }
static uint32_t tokens_of(const struct decode_shape *shape) { return shape->context - OSCAR_PAGE_TOKENS / 2; }
static uint32_t packed_pages(const struct decode_shape *shape) { return pages_of(shape) - 1 - RECENT_PAGES; }

static double bytes_of(const struct decode_shape *shape) {
    double packed = (double)packed_pages(shape) * (double)oscar_packed_record_bytes(shape->head_dim);
    double dense = (double)(tokens_of(shape) - packed_pages(shape) * OSCAR_PAGE_TOKENS) * 4 * shape->head_dim;
    return (packed + dense) * shape->kv_heads * shape->batch;
}

/* --- the model --- */

static void make_calibration(struct decode_bench *bench) {
    static double omega[MOST_PAIRS];
    uint32_t d = bench->geometry.head_dim, pages = pages_of(&bench->shape);
    for (uint32_t i = 0; i < MOST_PAIRS; i++)
        omega[i] = pow(1e-6, i / 16.0);
    bench->centre = take(sizeof(float) * d * (1 + 2 * MOST_PAIRS));
    for (uint32_t i = 0; i < d * (1 + 2 * MOST_PAIRS); i++)
        bench->centre[i] = noise(bench);
    bench->matrix = take(sizeof(float) * d * d);
    for (uint32_t i = 0; i < d * d; i++)
        bench->matrix[i] = noise(bench) / sqrtf((float)d);
    bench->heads = take(sizeof(*bench->heads) * bench->geometry.layers * bench->geometry.kv_heads);
    bench->calibration = (struct oscar_calibration){.layers = bench->geometry.layers,
                                                    .kv_heads = bench->geometry.kv_heads,
                                                    .head_dim = d,
                                                    .rotation_k = OSCAR_ROTATION_HADAMARD,
                                                    .rotation_v = OSCAR_ROTATION_HADAMARD,
                                                    .frequencies = MOST_PAIRS,
                                                    .omega = omega,
                                                    .heads = bench->heads};
    size_t bytes = oscar_turns_bytes(&bench->calibration, pages);
    bench->turns = take(bytes);
    oscar_turns_fill(&bench->calibration, pages, bench->turns);
    gpu_must(oscar_calibration_attach_turns(&bench->calibration, bench->turns, bytes, pages), "turns");
}

static void set_heads(struct decode_bench *bench, uint32_t pairs, bool matrix) {
    static const int32_t pair[MOST_PAIRS] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    uint32_t d = bench->geometry.head_dim;
    for (uint32_t h = 0; h < bench->geometry.layers * bench->geometry.kv_heads; h++)
        bench->heads[h] = (struct oscar_head_calibration){
            .rotation_k = matrix ? bench->matrix : NULL,
            .rotation_v = matrix ? bench->matrix : NULL,
            .centre_static = pairs > 0 ? bench->centre : NULL,
            .centre_cos = pairs > 0 ? bench->centre + d : NULL,
            .centre_sin = pairs > 0 ? bench->centre + d + (size_t)MOST_PAIRS * d : NULL,
            .centre_pair = pair,
            .pairs = pairs,
            .rank_k = d - 1,
            .rank_v = d - 1,
        };
}

/* `pages` pages that repeat the template's. */
static uint8_t *repeat_pages(struct decode_bench *bench, const uint8_t *template, uint64_t page_bytes, uint64_t pages) {
    uint64_t bytes = pages * page_bytes,
             done = TEMPLATE_PAGES * page_bytes < bytes ? TEMPLATE_PAGES * page_bytes : bytes;
    uint8_t *memory = gpu_alloc(bench->gpu, bytes);
    gpu_must(bench->gpu->ops->copy(bench->gpu->stream, memory, template, done), "copy");
    gpu_wait(bench->gpu);
    for (uint64_t more; done < bytes; done += more) {
        more = bytes - done < done ? bytes - done : done;
        gpu_must(bench->gpu->ops->copy(bench->gpu->stream, memory + done, memory, more), "copy");
    }
    return memory;
}

/* Random codes; scales and zeros of rows of deviation 1. */
static uint8_t *make_packed(struct decode_bench *bench, uint64_t page_bytes, uint64_t pages) {
    uint32_t d = bench->geometry.head_dim;
    size_t record_bytes = oscar_packed_record_bytes(d);
    uint8_t *template = take(TEMPLATE_PAGES * page_bytes);
    for (uint64_t i = 0; i < TEMPLATE_PAGES * page_bytes; i += sizeof(uint32_t)) {
        uint32_t word = draw(bench);
        if (i % record_bytes >= oscar_packed_scales_offset(d))
            word = (0x3A00U + (word & 0x1FFU)) | (0x3C00U + (word >> 9 & 0x3FFU)) << 16;
        memcpy(template + i, &word, sizeof(word));
    }
    uint8_t *memory = repeat_pages(bench, template, page_bytes, pages);
    free(template);
    return memory;
}

static uint8_t *make_dense(struct decode_bench *bench, uint64_t page_bytes, uint64_t pages) {
    uint8_t *memory = gpu_alloc(bench->gpu, pages * page_bytes);
    gpu_fill_normal(bench->gpu, memory, pages * page_bytes / sizeof(uint16_t), bench->state);
    return memory;
}

static void make_arenas(struct decode_bench *bench) {
    uint64_t dense_bytes = oscar_dense_page_bytes(&bench->geometry),
             packed_bytes = oscar_packed_page_bytes(&bench->geometry);
    uint64_t batch = bench->shape.batch;
    bench->arenas[OSCAR_FORM_SINK] =
        (struct oscar_arena_view){.base = make_dense(bench, dense_bytes, batch), .stride = dense_bytes};
    bench->arenas[OSCAR_FORM_DENSE] =
        (struct oscar_arena_view){.base = make_dense(bench, dense_bytes, batch * RECENT_PAGES), .stride = dense_bytes};
    bench->arenas[OSCAR_FORM_PACKED] = (struct oscar_arena_view){
        .base = make_packed(bench, packed_bytes, batch * packed_pages(&bench->shape)), .stride = packed_bytes};
}

/* --- the batch --- */

/* A random order of 0 .. count - 1. */
static uint32_t *shuffle(struct decode_bench *bench, uint32_t count) {
    uint32_t *order = take(sizeof(*order) * count);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t j = draw(bench) % (i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    return order;
}

static void make_batch(struct decode_bench *bench) {
    const struct decode_shape *shape = &bench->shape;
    uint32_t pages = pages_of(shape), packed = packed_pages(shape), heads = shape->query_heads, d = shape->head_dim;
    struct oscar_batch_limits limits = {.items = shape->batch, .rows = 1, .pages = (uint64_t)shape->batch * pages};
    gpu_must(bench->gpu->ops->batch_open(bench->gpu->device, &bench->geometry, &limits, &bench->batch, NULL), "batch");
    uint64_t elements = (uint64_t)shape->batch * heads * d;
    bench->q = gpu_alloc(bench->gpu, elements * sizeof(uint16_t));
    gpu_fill_normal(bench->gpu, bench->q, elements, 3);
    bench->out = gpu_alloc(bench->gpu, elements * sizeof(uint16_t));
    bench->lse = gpu_alloc(bench->gpu, sizeof(float) * shape->batch * heads);
    uint32_t *order = shuffle(bench, shape->batch * packed);
    oscar_page_ref *table = take(sizeof(*table) * shape->batch * pages);
    struct oscar_batch_item *item = take(sizeof(*item) * shape->batch);
    for (uint32_t i = 0; i < shape->batch; i++) {
        for (uint32_t p = 0; p < pages; p++)
            table[i * pages + p] = p == 0 ? oscar_page_ref_make(OSCAR_FORM_SINK, i)
                                   : p <= packed
                                       ? oscar_page_ref_make(OSCAR_FORM_PACKED, order[i * packed + p - 1])
                                       : oscar_page_ref_make(OSCAR_FORM_DENSE, i * RECENT_PAGES + p - 1 - packed);
        item[i] = (struct oscar_batch_item){.pages = table + (size_t)i * pages,
                                            .tokens = tokens_of(shape),
                                            .rows = 1,
                                            .q_offset = (int64_t)i * heads * d,
                                            .q_head_stride = d,
                                            .out_offset = (int64_t)i * heads * d,
                                            .out_head_stride = d,
                                            .lse_offset = (int64_t)i * heads};
    }
    gpu_must(bench->gpu->ops->batch_update(bench->gpu->stream, bench->batch, bench->arenas, item, shape->batch),
             "batch");
    gpu_wait(bench->gpu);
    free(order);
    free(table);
    free(item);
}

static int attend(struct oscar_stream_impl *stream, void *argument, uint32_t variant) {
    struct decode_bench *bench = argument;
    struct oscar_batch_attend_args args = {.calibration = &bench->calibration,
                                           .layer = variant,
                                           .softmax_scale = 1 / sqrtf((float)bench->geometry.head_dim),
                                           .q = bench->q,
                                           .out = bench->out,
                                           .lse = bench->lse};
    return bench->gpu->ops->batch_attend(stream, bench->batch, &args);
}

static double time_attend(struct decode_bench *bench, uint32_t pairs, bool matrix) {
    const struct oscar_device_ops *ops = bench->gpu->ops;
    set_heads(bench, pairs, matrix);
    gpu_must(ops->calibration_load(bench->gpu->device, &bench->geometry, &bench->calibration, NULL), "calibration");
    double ms = gpu_time_graph(bench->gpu, attend, bench, bench->geometry.layers);
    gpu_wait(bench->gpu);
    ops->calibration_unload(bench->gpu->device, &bench->calibration);
    return ms;
}

/* --- the rows --- */

static void row(struct decode_bench *bench, const char *what, double value, const char *unit) {
    const struct decode_shape *shape = &bench->shape;
    char name[128];
    snprintf(name, sizeof(name), "decode_b%u_c%u_h%u_%u_d%u%s", shape->batch, shape->context, shape->query_heads,
             shape->kv_heads, shape->head_dim, what);
    report_row(bench->gpu->report, name, value, unit);
}

static void measure(struct decode_bench *bench) {
    const struct decode_shape *shape = &bench->shape;
    double ms = time_attend(bench, 0, false);
    row(bench, "", ms, "ms");
    row(bench, "_of_copy", 100 * bytes_of(shape) / bench->gpu->copy_bytes_ms / ms, "%");
    row(bench, "_over_sdpa",
        gpu_baseline_ms(shape->batch, shape->context, shape->query_heads, shape->kv_heads, shape->head_dim) / ms, "x");
    row(bench, "_8_pairs_cost", 100 * (time_attend(bench, 8, false) / ms - 1), "%");
    row(bench, "_16_pairs_cost", 100 * (time_attend(bench, 16, false) / ms - 1), "%");
    row(bench, "_matrix_cost", 100 * (time_attend(bench, 0, true) / ms - 1), "%");
}

static void bench_shape(struct gpu_bench *gpu, const struct decode_shape *shape) {
    struct decode_bench *bench = take(sizeof(*bench));
    bench->gpu = gpu;
    bench->shape = *shape;
    bench->state = 42;
    bench->geometry = (struct oscar_geometry){.layers = shape->layers,
                                              .query_heads = shape->query_heads,
                                              .kv_heads = shape->kv_heads,
                                              .head_dim = shape->head_dim,
                                              .dtype = OSCAR_BF16,
                                              .page_tokens = OSCAR_PAGE_TOKENS,
                                              .sink_tokens = OSCAR_SINK_TOKENS,
                                              .recent_tokens = OSCAR_RECENT_TOKENS};
    make_calibration(bench);
    make_arenas(bench);
    make_batch(bench);
    measure(bench);
    gpu->ops->batch_close(bench->batch);
    for (uint32_t form = 0; form < OSCAR_FORMS; form++)
        gpu_free(gpu, (void *)bench->arenas[form].base);
    gpu_free(gpu, bench->q);
    gpu_free(gpu, bench->out);
    gpu_free(gpu, bench->lse);
    free(bench->turns);
    free(bench->heads);
    free(bench->centre);
    free(bench->matrix);
    free(bench);
}

void bench_gpu_decode(struct gpu_bench *gpu) {
    static const struct decode_shape shapes[] = {
        {1, 32768, 32, 8, 128, 36},  {1, 102400, 32, 8, 128, 36},  {8, 102400, 32, 8, 128, 36},
        {32, 32768, 32, 8, 128, 36}, {32, 102400, 32, 8, 128, 36}, {8, 102400, 64, 8, 128, 36},
        {32, 102400, 9, 3, 64, 30},  {32, 102400, 8, 1, 256, 26},
    };
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++)
        bench_shape(gpu, &shapes[i]);
}
