/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/kernels_pack.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "oscar/device.h"

#include "kernels/number.h"
#include "proto/geometry.h"
#include "tests/bench/noise.h"
#include "tests/bench/samples.h"

#define ROUNDS 9U
#define WARM 1U
#define PAGES 4U

struct bench {
    struct oscar_geometry geometry;
    struct oscar_calibration calibration;
    struct oscar_head_calibration *head;
    float *feedback; /* [d][d], unit lower triangular */
    uint16_t *rows;  /* K, then V: [64 * PAGES][kv_heads][d] */
    uint8_t *dense, *packed;
    uint64_t dense_bytes, packed_bytes; /* of a page */
    const struct oscar_device_ops *ops;
    struct oscar_device *device;
    struct oscar_stream_impl *stream;
};

static void must(int result, const char *what) {
    if (result < 0) {
        fprintf(stderr, "kernels_bench: %s: %s\n", what, oscar_error_text(result));
        exit(1);
    }
}

static void *take(size_t bytes) {
    void *memory = NULL;
    if (posix_memalign(&memory, 4096, bytes) != 0)
        must(OSCAR_ERR_NO_MEMORY, "pages");
    memset(memory, 0, bytes);
    return memory;
}

static void open_bench(struct bench *bench) {
    static const uint32_t d = 128, layers = 4, kv_heads = 8;
    uint64_t state = 42;
    *bench = (struct bench){.ops = oscar_device_host()};
    bench->geometry = (struct oscar_geometry){.layers = layers,
                                              .query_heads = 32,
                                              .kv_heads = kv_heads,
                                              .head_dim = d,
                                              .dtype = OSCAR_BF16,
                                              .page_tokens = OSCAR_PAGE_TOKENS,
                                              .sink_tokens = OSCAR_SINK_TOKENS,
                                              .recent_tokens = OSCAR_RECENT_TOKENS};
    bench->dense_bytes = oscar_dense_page_bytes(&bench->geometry);
    bench->packed_bytes = oscar_packed_page_bytes(&bench->geometry);
    bench->dense = take(bench->dense_bytes * PAGES);
    bench->packed = take(bench->packed_bytes * PAGES);
    size_t elements = (size_t)OSCAR_PAGE_TOKENS * PAGES * kv_heads * d;
    bench->rows = take(2 * elements * sizeof(uint16_t));
    for (size_t i = 0; i < 2 * elements; i++)
        bench->rows[i] = oscar_bf16_from_float(bench_noise(&state));
    bench->feedback = take(sizeof(float) * d * d);
    for (uint32_t i = 0; i < d; i++) {
        for (uint32_t j = 0; j < i; j++)
            bench->feedback[i * d + j] = 0.05F * bench_noise(&state);
        bench->feedback[i * d + i] = 1;
    }
    bench->head = take(sizeof(*bench->head) * layers * kv_heads);
    for (uint32_t h = 0; h < layers * kv_heads; h++) {
        bench->head[h].rank_k = 122; /* int(0.96 d) and int(0.92 d) */
        bench->head[h].rank_v = 117;
    }
    bench->calibration = (struct oscar_calibration){.layers = layers,
                                                    .kv_heads = kv_heads,
                                                    .head_dim = d,
                                                    .rotation_k = OSCAR_ROTATION_HADAMARD,
                                                    .rotation_v = OSCAR_ROTATION_HADAMARD,
                                                    .heads = bench->head};
    struct oscar_stream_options options = {.threads = 1};
    must(bench->ops->device_open(NULL, &bench->device, NULL), "device");
    must(bench->ops->stream_open(bench->device, &options, &bench->stream, NULL), "stream");
}

static void close_bench(struct bench *bench) {
    bench->ops->stream_close(bench->stream);
    bench->ops->device_close(bench->device);
    free(bench->dense);
    free(bench->packed);
    free(bench->rows);
    free(bench->feedback);
    free(bench->head);
}

static void store_all(struct bench *bench) {
    int64_t token_stride = (int64_t)bench->geometry.kv_heads * bench->geometry.head_dim;
    const uint16_t *v = bench->rows + OSCAR_PAGE_TOKENS * PAGES * token_stride;
    uint8_t *pages[PAGES];
    for (uint32_t p = 0; p < PAGES; p++)
        pages[p] = bench->dense + bench->dense_bytes * p;
    for (uint32_t layer = 0; layer < bench->geometry.layers; layer++) {
        struct oscar_store_args args = {.geometry = &bench->geometry,
                                        .calibration = &bench->calibration,
                                        .layer = layer,
                                        .tokens = OSCAR_PAGE_TOKENS * PAGES,
                                        .pages = pages,
                                        .k = {bench->rows, token_stride, bench->geometry.head_dim},
                                        .v = {v, token_stride, bench->geometry.head_dim}};
        must(bench->ops->store(bench->stream, &args), "store");
    }
    must(bench->ops->stream_wait(bench->stream, UINT64_C(60000000000)), "store");
}

static void pack_all(struct bench *bench, bool feedback) {
    struct oscar_pack_item items[PAGES];
    int32_t status[PAGES];
    for (uint32_t h = 0; h < bench->geometry.layers * bench->geometry.kv_heads; h++)
        bench->head[h].feedback = feedback ? bench->feedback : NULL;
    for (uint32_t p = 0; p < PAGES; p++)
        items[p] =
            (struct oscar_pack_item){bench->dense + bench->dense_bytes * p, bench->packed + bench->packed_bytes * p,
                                     (uint64_t)(p + 1) * OSCAR_PAGE_TOKENS, &status[p]};
    must(bench->ops->pack(bench->stream, &bench->geometry, &bench->calibration, items, PAGES), "pack");
    must(bench->ops->stream_wait(bench->stream, UINT64_C(60000000000)), "pack");
    for (uint32_t p = 0; p < PAGES; p++)
        must(status[p], "pack");
}

void bench_pack(struct report *report) {
    struct bench bench;
    struct samples store, nearest, feedback;
    samples_init(&store, ROUNDS);
    samples_init(&nearest, ROUNDS);
    samples_init(&feedback, ROUNDS);
    open_bench(&bench);
    for (uint32_t round = 0; round < WARM + ROUNDS; round++) {
        uint64_t times[4] = {bench_now_ns()};
        store_all(&bench);
        times[1] = bench_now_ns();
        pack_all(&bench, false);
        times[2] = bench_now_ns();
        pack_all(&bench, true);
        times[3] = bench_now_ns();
        if (round < WARM)
            continue;
        samples_add(&store, times[1] - times[0]);
        samples_add(&nearest, times[2] - times[1]);
        samples_add(&feedback, times[3] - times[2]);
    }
    double rows = (double)OSCAR_PAGE_TOKENS * PAGES * bench.geometry.layers * bench.geometry.kv_heads;
    double dense = (double)bench.dense_bytes * PAGES, packed = (double)bench.packed_bytes * PAGES;
    double store_s = samples_percentile_ms(&store, 50) * 1e-3, nearest_s = samples_percentile_ms(&nearest, 50) * 1e-3;
    double feedback_s = samples_percentile_ms(&feedback, 50) * 1e-3;
    report_row(report, "store_hadamard_rows", rows / store_s, "rows/s");
    report_row(report, "store_hadamard_rate", 2 * dense / store_s * 1e-9, "GB/s");
    report_row(report, "pack_nearest_rows", rows / nearest_s, "rows/s");
    report_row(report, "pack_nearest_rate", (dense + packed) / nearest_s * 1e-9, "GB/s");
    report_row(report, "pack_feedback_rows", rows / feedback_s, "rows/s");
    report_row(report, "pack_feedback_rate", (dense + packed) / feedback_s * 1e-9, "GB/s");
    report_row(report, "pack_feedback_over_nearest", feedback_s / nearest_s, "x time");
    report_row(report, "packed_bits_d128", (double)bench.packed_bytes * 16 / (double)bench.dense_bytes,
               "bits an element");
    close_bench(&bench);
    samples_free(&store);
    samples_free(&nearest);
    samples_free(&feedback);
}
