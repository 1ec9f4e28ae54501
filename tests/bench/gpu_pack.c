/* SPDX-License-Identifier: Apache-2.0 */
/* Packing on the GPU: 102,400 tokens of 36 layers and 8 KV heads of 128 in one call, which is 17 GB. */
#include <stdlib.h>
#include <string.h>

#include "proto/calibration.h"
#include "proto/geometry.h"
#include "tests/bench/gpu_bench.h"
#include "tests/bench/noise.h"

#define PAGES 1600U
#define PAIRS 16U
#define FILL_BYTES (UINT64_C(1) << 28) /* random, repeated over the pages */

struct pack_bench {
    struct oscar_geometry geometry;
    struct oscar_calibration calibration;
    struct oscar_head_calibration *heads;
    float *feedback; /* [d][d], unit lower triangular */
    float *centre;   /* static, then cos and sin of each pair */
    int32_t pair[PAIRS];
    void *turns;
    uint8_t *dense, *packed; /* device */
    uint64_t dense_bytes, packed_bytes;
    struct oscar_pack_item item[PAGES];
    int32_t status[PAGES];
};

static void *take(size_t bytes) {
    void *memory = NULL;
    if (posix_memalign(&memory, 64, bytes) != 0)
        gpu_must(OSCAR_ERR_NO_MEMORY, "pack");
    memset(memory, 0, bytes);
    return memory;
}

static void make_calibration(struct pack_bench *bench) {
    static const uint32_t layers = 36, kv_heads = 8, d = 128;
    static double omega[PAIRS];
    uint64_t state = 42;
    bench->geometry = (struct oscar_geometry){.layers = layers,
                                              .query_heads = 32,
                                              .kv_heads = kv_heads,
                                              .head_dim = d,
                                              .dtype = OSCAR_BF16,
                                              .page_tokens = OSCAR_PAGE_TOKENS,
                                              .sink_tokens = OSCAR_SINK_TOKENS,
                                              .recent_tokens = OSCAR_RECENT_TOKENS};
    bench->feedback = take(sizeof(float) * d * d);
    for (uint32_t i = 0; i < d; i++) {
        for (uint32_t j = 0; j < i; j++)
            bench->feedback[i * d + j] = 0.05F * bench_noise(&state);
        bench->feedback[i * d + i] = 1;
    }
    bench->centre = take(sizeof(float) * d * (1 + 2 * PAIRS));
    for (uint32_t i = 0; i < d * (1 + 2 * PAIRS); i++)
        bench->centre[i] = bench_noise(&state);
    for (uint32_t i = 0; i < PAIRS; i++) {
        omega[i] = 1.0 / (1 + 7 * i);
        bench->pair[i] = (int32_t)i;
    }
    bench->heads = take(sizeof(*bench->heads) * layers * kv_heads);
    bench->calibration = (struct oscar_calibration){.layers = layers,
                                                    .kv_heads = kv_heads,
                                                    .head_dim = d,
                                                    .rotation_k = OSCAR_ROTATION_HADAMARD,
                                                    .rotation_v = OSCAR_ROTATION_HADAMARD,
                                                    .frequencies = PAIRS,
                                                    .omega = omega,
                                                    .heads = bench->heads};
    size_t bytes = oscar_turns_bytes(&bench->calibration, PAGES);
    bench->turns = take(bytes);
    oscar_turns_fill(&bench->calibration, PAGES, bench->turns);
    gpu_must(oscar_calibration_attach_turns(&bench->calibration, bench->turns, bytes, PAGES), "turns");
}

static void make_pages(struct gpu_bench *gpu, struct pack_bench *bench) {
    bench->dense_bytes = oscar_dense_page_bytes(&bench->geometry);
    bench->packed_bytes = oscar_packed_page_bytes(&bench->geometry);
    const uint64_t bytes = bench->dense_bytes * PAGES;
    bench->dense = gpu_alloc(gpu, bytes);
    bench->packed = gpu_alloc(gpu, bench->packed_bytes * PAGES);
    gpu_fill_normal(gpu, bench->dense, FILL_BYTES / sizeof(uint16_t), 1);
    for (uint64_t done = FILL_BYTES; done < bytes; done += FILL_BYTES)
        gpu_must(gpu->ops->copy(gpu->stream, bench->dense + done, bench->dense,
                                bytes - done < FILL_BYTES ? bytes - done : FILL_BYTES),
                 "copy");
    for (uint32_t p = 0; p < PAGES; p++)
        bench->item[p] =
            (struct oscar_pack_item){bench->dense + p * bench->dense_bytes, bench->packed + p * bench->packed_bytes,
                                     (uint64_t)p * OSCAR_PAGE_TOKENS, &bench->status[p]};
}

static int pack_all(struct oscar_stream_impl *stream, void *argument, uint32_t variant) {
    struct pack_bench *bench = argument;
    (void)variant;
    return oscar_device_cuda()->pack(stream, &bench->geometry, &bench->calibration, bench->item, PAGES);
}

/* ms of a call with such heads. */
static double time_pack(struct gpu_bench *gpu, struct pack_bench *bench, bool feedback, uint32_t pairs) {
    const uint32_t d = bench->geometry.head_dim, count = bench->geometry.layers * bench->geometry.kv_heads;
    for (uint32_t h = 0; h < count; h++)
        bench->heads[h] = (struct oscar_head_calibration){
            .feedback = feedback ? bench->feedback : NULL,
            .centre_static = pairs > 0 ? bench->centre : NULL,
            .centre_cos = pairs > 0 ? bench->centre + d : NULL,
            .centre_sin = pairs > 0 ? bench->centre + d + (size_t)PAIRS * d : NULL,
            .centre_pair = bench->pair,
            .pairs = pairs,
            .rank_k = 122, /* int(0.96 d) and int(0.92 d) */
            .rank_v = 117,
        };
    gpu_must(gpu->ops->calibration_load(gpu->device, &bench->geometry, &bench->calibration, NULL), "calibration");
    double ms = gpu_time_calls(gpu, pack_all, bench, 1);
    gpu_must(gpu->ops->stream_wait(gpu->stream, UINT64_C(60000000000)), "pack");
    for (uint32_t p = 0; p < PAGES; p++)
        gpu_must(bench->status[p], "a page's status");
    gpu->ops->calibration_unload(gpu->device, &bench->calibration);
    return ms;
}

void bench_gpu_pack(struct gpu_bench *gpu) {
    struct pack_bench *bench = take(sizeof(*bench));
    make_calibration(bench);
    make_pages(gpu, bench);
    const double bytes = (double)(bench->dense_bytes + bench->packed_bytes) * PAGES;
    double nearest = time_pack(gpu, bench, false, 0);
    report_row(gpu->report, "pack_nearest", nearest, "ms");
    report_row(gpu->report, "pack_nearest_rate", bytes / nearest * 1e-6, "GB/s");
    report_row(gpu->report, "pack_nearest_of_floor", 100 * bytes / gpu->copy_bytes_ms / nearest, "%");
    /* Of a call with feedback V takes half of a nearest one. */
    report_row(gpu->report, "pack_feedback_k", time_pack(gpu, bench, true, 0) - nearest / 2, "ms");
    report_row(gpu->report, "pack_feedback_k_8_pairs", time_pack(gpu, bench, true, 8) - nearest / 2, "ms");
    report_row(gpu->report, "pack_feedback_k_16_pairs", time_pack(gpu, bench, true, 16) - nearest / 2, "ms");
    report_row(gpu->report, "pack_nearest_k_16_pairs", time_pack(gpu, bench, false, 16) - nearest / 2, "ms");
    gpu_free(gpu, bench->dense);
    gpu_free(gpu, bench->packed);
    free(bench->turns);
    free(bench->feedback);
    free(bench->centre);
    free(bench->heads);
    free(bench);
}
