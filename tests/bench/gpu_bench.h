/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the modules of gpu_bench, and the workers of gpu_share, stand on: the opened GPU, memory full of random values or of what
 * the caller gives, and times of work on the GPU. Each module reports its own rows; what fails ends the program with a line that
 * says why.
 */
#ifndef OSCAR_TESTS_BENCH_GPU_BENCH_H
#define OSCAR_TESTS_BENCH_GPU_BENCH_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/cuda/backend.h"
#include "tests/bench/report.h"

struct gpu_bench {
    struct report *report;
    const struct oscar_device_ops *ops;
    struct oscar_device *device;
    struct oscar_stream_impl *stream;    /* asynchronous; what is timed runs here */
    CUstream native;                     /* the same stream */
    double copy_bytes_ms, read_bytes_ms; /* measured first: bytes a ms, of a copy read and written ones together */
};

/* The default device, its context current in this thread until gpu_close. */
void gpu_open(struct gpu_bench *bench);
void gpu_close(struct gpu_bench *bench);

/* Enqueues one variant of the timed work: variants have different inputs, all of them together far larger than the L2 cache. */
typedef int gpu_work(struct oscar_stream_impl *stream, void *argument, uint32_t variant);

/* Median ms of one run over all variants in turn, each captured as a graph; the GPU never waits for the next launch. */
double gpu_time_graph(struct gpu_bench *bench, gpu_work *work, void *argument, uint32_t variants);
/* The same for work that cannot be captured, between events around each call. */
double gpu_time_calls(struct gpu_bench *bench, gpu_work *work, void *argument, uint32_t variants);

void gpu_wait(struct gpu_bench *bench);                   /* for all work of the stream */
void *gpu_alloc(struct gpu_bench *bench, uint64_t bytes); /* not initialised */
void *gpu_upload(struct gpu_bench *bench, const void *bytes, uint64_t count);
/* BF16 elements, normally distributed with standard deviation 1; another seed, other values. */
void gpu_fill_normal(struct gpu_bench *bench, void *memory, uint64_t elements, uint64_t seed);
void gpu_read(struct gpu_bench *bench, void *ret_bytes, const void *memory, uint64_t count);
void gpu_free(struct gpu_bench *bench, void *memory);

/* Ends the program where `result` is an error of ours, or of the driver's. */
void gpu_must(int result, const char *what);
void gpu_must_driver(CUresult result, const char *what);

/* The modules. Baselines come before attention, which is reported in relation to them. */
void bench_gpu_floor(struct gpu_bench *bench); /* sets the two rates */
void bench_gpu_store(struct gpu_bench *gpu);
void bench_gpu_pack(struct gpu_bench *gpu);
void bench_gpu_decode(struct gpu_bench *gpu);
void bench_gpu_prefill(struct gpu_bench *bench);

/* Median ms of SDPA over a BF16 cache of this shape by PyTorch's fastest kernel and layout; NaN where it was not measured. */
double gpu_baseline_ms(uint32_t batch, uint32_t context, uint32_t query_heads, uint32_t kv_heads, uint32_t head_dim);

#endif
