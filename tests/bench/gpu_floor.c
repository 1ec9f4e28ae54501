/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/gpu_bench.h"

#define FLOOR_BYTES (UINT64_C(4) << 30) /* many times the L2 cache */
#define BLOCK_THREADS 512U
#define BLOCKS_A_PROCESSOR 4U

extern const char oscar_cuda_image_gpu_floor[];

static CUfunction floor_read, fill_normal;

static void load(struct gpu_bench *bench) {
    static const char *const names[] = {"floor_read", "fill_normal"};
    CUmodule module; /* lives as long as the program */
    CUfunction functions[2];
    struct oscar_cause cause = {""};
    if (floor_read != NULL)
        return;
    gpu_must(cuda_image_load(bench->device, oscar_cuda_image_gpu_floor, names, 2, &module, functions, &cause),
             "kernels of the benchmark");
    floor_read = functions[0];
    fill_normal = functions[1];
}

static void launch(struct gpu_bench *bench, CUfunction function, void **arguments) {
    uint32_t blocks = BLOCKS_A_PROCESSOR * (uint32_t)bench->device->processors;
    gpu_must_driver(bench->device->driver->cuLaunchKernel(function, blocks, 1, 1, BLOCK_THREADS, 1, 1, 0, bench->native,
                                                          arguments, NULL),
                    "launch");
}

void gpu_fill_normal(struct gpu_bench *bench, void *memory, uint64_t elements, uint64_t seed) {
    load(bench);
    launch(bench, fill_normal, (void *[]){&memory, &elements, &seed});
}

struct floors {
    struct gpu_bench *bench;
    uint8_t *memory; /* FLOOR_BYTES */
    uint32_t *trace;
};

static int read_all(struct oscar_stream_impl *stream, void *argument, uint32_t variant) {
    struct floors *floors = argument;
    uint64_t words = FLOOR_BYTES / 16;
    (void)stream;
    (void)variant;
    launch(floors->bench, floor_read, (void *[]){&floors->memory, &words, &floors->trace});
    return 0;
}

static int copy_half(struct oscar_stream_impl *stream, void *argument, uint32_t variant) {
    struct floors *floors = argument;
    (void)variant;
    return floors->bench->ops->copy(stream, floors->memory + FLOOR_BYTES / 2, floors->memory, FLOOR_BYTES / 2);
}

void bench_gpu_floor(struct gpu_bench *bench) {
    struct floors floors = {.bench = bench, .memory = gpu_alloc(bench, FLOOR_BYTES), .trace = gpu_alloc(bench, 16)};
    gpu_fill_normal(bench, floors.memory, FLOOR_BYTES / 2, 1);
    bench->read_bytes_ms = (double)FLOOR_BYTES / gpu_time_graph(bench, read_all, &floors, 1);
    /* In a graph the driver leaves the copy to an engine that makes two thirds of this. */
    bench->copy_bytes_ms = (double)FLOOR_BYTES / gpu_time_calls(bench, copy_half, &floors, 1);
    report_row(bench->report, "floor_read_rate", bench->read_bytes_ms * 1e-6, "GB/s");
    report_row(bench->report, "floor_copy_rate", bench->copy_bytes_ms * 1e-6, "GB/s");
    gpu_free(bench, floors.memory);
    gpu_free(bench, floors.trace);
}
