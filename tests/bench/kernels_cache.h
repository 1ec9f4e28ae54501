/* SPDX-License-Identifier: Apache-2.0 */
/* A cache of random packed pages in the real page-major layout of a whole model, far larger than the processor's caches, and
 * one decode step over it. */
#ifndef OSCAR_TESTS_BENCH_KERNELS_CACHE_H
#define OSCAR_TESTS_BENCH_KERNELS_CACHE_H

#include <stdint.h>

#include "oscar/device.h"

struct bench_shape {
    const char *name;
    uint32_t layers, query_heads, kv_heads, head_dim, tokens;
};

struct bench_cache {
    struct oscar_geometry geometry;
    struct oscar_calibration calibration; /* Hadamard, no centre until bench_cache_centre */
    struct oscar_attend_args args;
    struct oscar_attend_item item; /* one query row over all tokens */
    uint8_t *packed;               /* the arena */
    uint64_t page_bytes;
    void *owned[16];
    unsigned owned_count;
};

/* Exits the program when memory is out. */
struct bench_cache *bench_cache_open(const struct bench_shape *shape);
/* Gives K of every head a centre with `pairs` rotating pairs, or takes it away with -1. */
void bench_cache_centre(struct bench_cache *cache, int pairs);
void bench_cache_close(struct bench_cache *cache);

/* Bytes of packed records that one step of one layer reads. */
uint64_t bench_cache_step_bytes(const struct bench_cache *cache);
/* Reads those bytes and returns something that depends on all of them. */
uint64_t bench_cache_read(const struct bench_cache *cache, uint32_t layer);

#endif
