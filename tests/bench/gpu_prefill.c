/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Prefill attention on the GPU: many query rows, causal over their own tokens in BF16 pages, after a prefix in INT2 pages. The
 * operations counted are two products over what each row sees.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/calibration.h"
#include "proto/geometry.h"
#include "tests/bench/gpu_bench.h"

#define LAYERS 2U /* each run reads another one */

struct prefill_shape {
    uint32_t rows, prefix; /* whole pages */
};

struct prefill_bench {
    struct gpu_bench *gpu;
    struct prefill_shape shape;
    struct oscar_geometry geometry;
    struct oscar_calibration *calibration;
    struct oscar_arena_view arenas[OSCAR_FORMS];
    void *q, *out;
    float *lse;
    struct oscar_batch_impl *batch;
};

/* Random codes; scales and zeros of rows of deviation 1. */
static uint8_t *make_packed(struct prefill_bench *bench, uint64_t bytes) {
    uint32_t d = bench->geometry.head_dim;
    uint64_t state = 42;
    uint8_t *pages = malloc(bytes);
    if (!pages)
        gpu_must(OSCAR_ERR_NO_MEMORY, "prefill");
    for (uint64_t i = 0; i < bytes; i += sizeof(uint32_t)) {
        state = state * UINT64_C(6364136223846793005) + 1442695040888963407U;
        uint32_t word = (uint32_t)(state >> 32);
        if (i % oscar_packed_record_bytes(d) >= oscar_packed_scales_offset(d))
            word = (0x3A00U + (word & 0x1FFU)) | (0x3C00U + (word >> 9 & 0x3FFU)) << 16;
        memcpy(pages + i, &word, sizeof(word));
    }
    uint8_t *memory = gpu_upload(bench->gpu, pages, bytes);
    free(pages);
    return memory;
}

static void *make_normal(struct prefill_bench *bench, uint64_t elements, uint64_t seed) {
    void *memory = gpu_alloc(bench->gpu, elements * sizeof(uint16_t));
    gpu_fill_normal(bench->gpu, memory, elements, seed);
    return memory;
}

static void make_pages(struct prefill_bench *bench, oscar_page_ref *table) {
    uint64_t dense_bytes = oscar_dense_page_bytes(&bench->geometry);
    uint64_t packed_bytes = oscar_packed_page_bytes(&bench->geometry);
    uint32_t packed = bench->shape.prefix / OSCAR_PAGE_TOKENS, dense = bench->shape.rows / OSCAR_PAGE_TOKENS;
    bench->arenas[OSCAR_FORM_DENSE] = (struct oscar_arena_view){
        .base = make_normal(bench, dense * dense_bytes / sizeof(uint16_t), 1), .stride = dense_bytes};
    if (packed > 0)
        bench->arenas[OSCAR_FORM_PACKED] =
            (struct oscar_arena_view){.base = make_packed(bench, packed * packed_bytes), .stride = packed_bytes};
    for (uint32_t p = 0; p < packed + dense; p++)
        table[p] =
            p < packed ? oscar_page_ref_make(OSCAR_FORM_PACKED, p) : oscar_page_ref_make(OSCAR_FORM_DENSE, p - packed);
}

static void make_batch(struct prefill_bench *bench) {
    const struct oscar_device_ops *ops = bench->gpu->ops;
    const struct prefill_shape *shape = &bench->shape;
    uint32_t heads = bench->geometry.query_heads, d = bench->geometry.head_dim;
    uint32_t tokens = shape->prefix + shape->rows, pages = tokens / OSCAR_PAGE_TOKENS;
    uint64_t elements = (uint64_t)shape->rows * heads * d;
    bench->q = make_normal(bench, elements, 2);
    bench->out = gpu_alloc(bench->gpu, elements * sizeof(uint16_t));
    bench->lse = gpu_alloc(bench->gpu, sizeof(float) * shape->rows * heads);
    oscar_page_ref *table = calloc(pages, sizeof(*table));
    if (!table)
        gpu_must(OSCAR_ERR_NO_MEMORY, "prefill");
    make_pages(bench, table);
    struct oscar_batch_limits limits = {.items = 1, .rows = shape->rows, .pages = pages};
    struct oscar_batch_item item = {.pages = table,
                                    .tokens = tokens,
                                    .rows = shape->rows,
                                    .q_row_stride = (int64_t)heads * d,
                                    .q_head_stride = d,
                                    .out_row_stride = (int64_t)heads * d,
                                    .out_head_stride = d};
    gpu_must(ops->batch_open(bench->gpu->device, &bench->geometry, &limits, &bench->batch, NULL), "batch");
    gpu_must(ops->batch_update(bench->gpu->stream, bench->batch, bench->arenas, &item, 1), "batch");
    gpu_wait(bench->gpu);
    free(table);
}

static int attend(struct oscar_stream_impl *stream, void *argument, uint32_t variant) {
    struct prefill_bench *bench = argument;
    struct oscar_batch_attend_args args = {.calibration = bench->calibration,
                                           .layer = variant,
                                           .softmax_scale = 1 / sqrtf((float)bench->geometry.head_dim),
                                           .q = bench->q,
                                           .out = bench->out,
                                           .lse = bench->lse};
    return bench->gpu->ops->batch_attend(stream, bench->batch, &args);
}

static void bench_shape(struct gpu_bench *gpu, const struct prefill_shape *shape) {
    struct prefill_bench bench = {.gpu = gpu, .shape = *shape};
    bench.geometry = (struct oscar_geometry){.layers = LAYERS,
                                             .query_heads = 32,
                                             .kv_heads = 8,
                                             .head_dim = 128,
                                             .dtype = OSCAR_BF16,
                                             .page_tokens = OSCAR_PAGE_TOKENS,
                                             .sink_tokens = OSCAR_SINK_TOKENS,
                                             .recent_tokens = OSCAR_RECENT_TOKENS};
    gpu_must(oscar_calibration_default(&bench.geometry, &bench.calibration, NULL), "calibration");
    gpu_must(gpu->ops->calibration_load(gpu->device, &bench.geometry, bench.calibration, NULL), "calibration");
    make_batch(&bench);
    double ms = gpu_time_graph(gpu, attend, &bench, LAYERS);
    double operations = 4.0 * shape->rows * bench.geometry.query_heads * bench.geometry.head_dim *
                        (shape->prefix + (shape->rows + 1) / 2.0);
    char name[64];
    snprintf(name, sizeof(name), "prefill_r%u_c%u_h32_8_d128", shape->rows, shape->prefix);
    report_row(gpu->report, name, ms, "ms");
    snprintf(name, sizeof(name), "prefill_r%u_c%u_h32_8_d128_rate", shape->rows, shape->prefix);
    report_row(gpu->report, name, operations / ms * 1e-9, "TFLOP/s");
    gpu->ops->batch_close(bench.batch);
    gpu->ops->calibration_unload(gpu->device, bench.calibration);
    oscar_calibration_free(bench.calibration);
    gpu_free(gpu, (void *)bench.arenas[OSCAR_FORM_DENSE].base);
    if (bench.arenas[OSCAR_FORM_PACKED].base)
        gpu_free(gpu, (void *)bench.arenas[OSCAR_FORM_PACKED].base);
    gpu_free(gpu, bench.q);
    gpu_free(gpu, bench.out);
    gpu_free(gpu, bench.lse);
}

void bench_gpu_prefill(struct gpu_bench *bench) {
    static const struct prefill_shape shapes[] = {{2048, 102400}, {4096, 0}};
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++)
        bench_shape(bench, &shapes[i]);
}
