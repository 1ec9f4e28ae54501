/* SPDX-License-Identifier: Apache-2.0 */
/* Storing and inspecting on the GPU: 8 KV heads of 128 out of a fused tensor with 32 query heads, each layer's its own. */
#include <stdlib.h>
#include <string.h>

#include "proto/calibration.h"
#include "proto/geometry.h"
#include "tests/bench/gpu_bench.h"

#define LAYERS 16U
#define LAYERS_A_RUN 4U /* in one graph: a model's layers follow each other without a pause, too */
#define VARIANTS (LAYERS / LAYERS_A_RUN)
#define TOKENS 8192U
#define PAGES (TOKENS / OSCAR_PAGE_TOKENS)
#define QUERY_HEADS 32U
#define KV_HEADS 8U
#define HEAD_DIM 128U
#define TOKEN_STRIDE ((QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM)
#define SEQUENCES 64U

struct store_bench {
    struct oscar_geometry geometry;
    struct oscar_calibration calibration;
    struct oscar_head_calibration heads[LAYERS * KV_HEADS];
    float *matrix;
    uint16_t *rows; /* device: [LAYERS][TOKENS][TOKEN_STRIDE] */
    uint8_t *dense; /* device: [PAGES] */
    uint64_t page_bytes;
    uint8_t *pages[PAGES];
    struct oscar_batch_impl *batch;
    int32_t status[PAGES];
};

static struct oscar_rows rows_of(const struct store_bench *bench, uint32_t layer, uint32_t head) {
    return (struct oscar_rows){bench->rows + ((size_t)layer * TOKENS * TOKEN_STRIDE) + (size_t)head * HEAD_DIM,
                               TOKEN_STRIDE, HEAD_DIM};
}

static int store_prefill(struct oscar_stream_impl *stream, void *argument, uint32_t variant) {
    struct store_bench *bench = argument;
    int r = 0;
    for (uint32_t layer = variant * LAYERS_A_RUN; r == 0 && layer < (variant + 1) * LAYERS_A_RUN; layer++)
        r = oscar_device_cuda()->store(stream,
                                       &(struct oscar_store_args){.geometry = &bench->geometry,
                                                                  .calibration = &bench->calibration,
                                                                  .layer = layer,
                                                                  .tokens = TOKENS,
                                                                  .pages = bench->pages,
                                                                  .k = rows_of(bench, layer, QUERY_HEADS),
                                                                  .v = rows_of(bench, layer, QUERY_HEADS + KV_HEADS)});
    return r;
}

static int store_step(struct oscar_stream_impl *stream, void *argument, uint32_t variant) {
    struct store_bench *bench = argument;
    int r = 0;
    for (uint32_t layer = variant * LAYERS_A_RUN; r == 0 && layer < (variant + 1) * LAYERS_A_RUN; layer++)
        r = oscar_device_cuda()->batch_store(
            stream, bench->batch,
            &(struct oscar_batch_store_args){.calibration = &bench->calibration,
                                             .layer = layer,
                                             .k = rows_of(bench, layer, QUERY_HEADS),
                                             .v = rows_of(bench, layer, QUERY_HEADS + KV_HEADS)});
    return r;
}

static int inspect(struct oscar_stream_impl *stream, void *argument, uint32_t variant) {
    struct store_bench *bench = argument;
    (void)variant;
    return oscar_device_cuda()->inspect(stream, &bench->geometry, (const uint8_t *const *)bench->pages, PAGES,
                                        bench->status);
}

/* A decode step's batch: the sequences have one page each, and one new token in it. */
static void open_batch(struct gpu_bench *gpu, struct store_bench *bench) {
    static oscar_page_ref refs[SEQUENCES];
    static struct oscar_batch_item items[SEQUENCES];
    struct oscar_batch_limits limits = {SEQUENCES, 1, SEQUENCES};
    gpu_must(gpu->ops->batch_open(gpu->device, &bench->geometry, &limits, &bench->batch, NULL), "batch");
    for (uint32_t i = 0; i < SEQUENCES; i++) {
        refs[i] = oscar_page_ref_make(OSCAR_FORM_DENSE, i);
        items[i] = (struct oscar_batch_item){.pages = &refs[i],
                                             .tokens = 1 + i % OSCAR_PAGE_TOKENS,
                                             .rows = 1,
                                             .k_offset = (int64_t)i * TOKEN_STRIDE,
                                             .v_offset = (int64_t)i * TOKEN_STRIDE};
    }
    const struct oscar_arena_view view = {bench->dense, bench->page_bytes, NULL};
    const struct oscar_arena_view arenas[OSCAR_FORMS] = {view, view, view};
    gpu_must(gpu->ops->batch_update(gpu->stream, bench->batch, arenas, items, SEQUENCES), "batch");
}

static void open_bench(struct gpu_bench *gpu, struct store_bench *bench) {
    bench->geometry = (struct oscar_geometry){.layers = LAYERS,
                                              .query_heads = QUERY_HEADS,
                                              .kv_heads = KV_HEADS,
                                              .head_dim = HEAD_DIM,
                                              .dtype = OSCAR_BF16,
                                              .page_tokens = OSCAR_PAGE_TOKENS,
                                              .sink_tokens = OSCAR_SINK_TOKENS,
                                              .recent_tokens = OSCAR_RECENT_TOKENS};
    bench->calibration =
        (struct oscar_calibration){.layers = LAYERS, .kv_heads = KV_HEADS, .head_dim = HEAD_DIM, .heads = bench->heads};
    bench->page_bytes = oscar_dense_page_bytes(&bench->geometry);
    bench->rows = gpu_alloc(gpu, (uint64_t)LAYERS * TOKENS * TOKEN_STRIDE * sizeof(uint16_t));
    bench->dense = gpu_alloc(gpu, PAGES * bench->page_bytes);
    gpu_fill_normal(gpu, bench->rows, (uint64_t)LAYERS * TOKENS * TOKEN_STRIDE, 1);
    gpu_fill_normal(gpu, bench->dense, PAGES * bench->page_bytes / sizeof(uint16_t), 2);
    for (uint32_t p = 0; p < PAGES; p++)
        bench->pages[p] = bench->dense + p * bench->page_bytes;
    /* Any orthogonal matrix will do: a reflection I - 2 u u', u = 1 / sqrt(d). */
    bench->matrix = malloc(sizeof(float) * HEAD_DIM * HEAD_DIM);
    if (bench->matrix == NULL)
        gpu_must(OSCAR_ERR_NO_MEMORY, "matrix");
    for (uint32_t i = 0; i < HEAD_DIM * HEAD_DIM; i++)
        bench->matrix[i] = (i % (HEAD_DIM + 1) == 0 ? 1.0F : 0.0F) - 2.0F / HEAD_DIM;
    open_batch(gpu, bench);
}

struct kind {
    const char *prefill, *prefill_rate, *prefill_of_copy, *step;
    bool matrix;
};

static void measure_kind(struct gpu_bench *gpu, struct store_bench *bench, const struct kind *kind) {
    const float *matrix = kind->matrix ? bench->matrix : NULL;
    for (uint32_t h = 0; h < LAYERS * KV_HEADS; h++)
        bench->heads[h] = (struct oscar_head_calibration){
            .rotation_k = matrix, .rotation_v = matrix, .rank_k = HEAD_DIM - 1, .rank_v = HEAD_DIM - 1};
    bench->calibration.rotation_k = bench->calibration.rotation_v =
        kind->matrix ? OSCAR_ROTATION_MATRIX : OSCAR_ROTATION_HADAMARD;
    gpu_must(gpu->ops->calibration_load(gpu->device, &bench->geometry, &bench->calibration, NULL), "calibration");
    const double bytes = 2.0 * 2 * KV_HEADS * HEAD_DIM * sizeof(uint16_t) * TOKENS; /* K and V, read and written */
    double prefill = gpu_time_graph(gpu, store_prefill, bench, VARIANTS) / LAYERS_A_RUN;
    double step = gpu_time_graph(gpu, store_step, bench, VARIANTS) / LAYERS_A_RUN;
    report_row(gpu->report, kind->prefill, prefill * 1e3, "us");
    report_row(gpu->report, kind->prefill_rate, bytes / prefill * 1e-6, "GB/s");
    report_row(gpu->report, kind->prefill_of_copy, 100 * bytes / gpu->copy_bytes_ms / prefill, "%");
    report_row(gpu->report, kind->step, step * 1e3, "us");
    gpu_must(gpu->ops->stream_status(gpu->stream), "stored rows");
    gpu->ops->calibration_unload(gpu->device, &bench->calibration);
}

void bench_gpu_store(struct gpu_bench *gpu) {
    static const struct kind kinds[] = {
        {"store", "store_rate", "store_of_copy", "store_step_64", false},
        {"store_matrix", "store_matrix_rate", "store_matrix_of_copy", "store_matrix_step_64", true},
    };
    struct store_bench *bench = calloc(1, sizeof(*bench));
    if (bench == NULL)
        gpu_must(OSCAR_ERR_NO_MEMORY, "store");
    open_bench(gpu, bench);
    for (uint32_t i = 0; i < 2; i++)
        measure_kind(gpu, bench, &kinds[i]);
    double inspected = gpu_time_calls(gpu, inspect, bench, 1);
    const uint64_t page_bytes = PAGES * bench->page_bytes;
    const double bytes = (double)page_bytes;
    report_row(gpu->report, "inspect_128_pages", inspected * 1e3, "us");
    report_row(gpu->report, "inspect_rate", bytes / inspected * 1e-6, "GB/s");
    report_row(gpu->report, "inspect_of_read", 100 * bytes / gpu->read_bytes_ms / inspected, "%");
    for (uint32_t p = 0; p < PAGES; p++)
        gpu_must(bench->status[p], "a page's status");
    gpu->ops->batch_close(bench->batch);
    gpu_free(gpu, bench->rows);
    gpu_free(gpu, bench->dense);
    free(bench->matrix);
    free(bench);
}
