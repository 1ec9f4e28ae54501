/* SPDX-License-Identifier: Apache-2.0 */
/*
 * 8 tokens of a dense page in a slot of shared memory: 8 rows of K, then 8 of V, as they lie in the page. Rows begin in the same
 * bank, but set apart each would be a copy of its own, and 16 small copies cost more. q is the fixed point of packed
 * pages, whose bytes BF16 holds; probabilities enter in two BF16 terms.
 */
#ifndef OSCAR_KERNELS_CUDA_DECODE_DENSE_CUH
#define OSCAR_KERNELS_CUDA_DECODE_DENSE_CUH

#include "kernels/cuda/decode_state.cuh"

/* Two signed bytes in the low bytes of two half words, as BF16. 7 bits added to the exponent of 128 give 128 + x; the sign bit
 * does the same to what is taken off. */
static __device__ __forceinline__ uint32_t bytes_to_bfloat(uint32_t bytes) {
    uint32_t with = (bytes & 0x007F007FU) | 0x43004300U, off = (bytes & 0x00800080U) | 0x43004300U;
    __nv_bfloat162 difference =
        __hsub2(*reinterpret_cast<__nv_bfloat162 *>(&with), *reinterpret_cast<__nv_bfloat162 *>(&off));
    return *reinterpret_cast<uint32_t *>(&difference);
}

/* Up to 8 tokens from `position` on: those that the item has. */
template <int D, int C>
static __device__ __forceinline__ void attend_dense(state<D, C> &state, const query<D, C> &query, uint32_t slot,
                                                    uint32_t sights, uint32_t position) {
    constexpr int columns = C / 4, tiles = D / 16;
    constexpr int pitch = 2 * D, values = CUDA_DECODE_TILE * pitch; /* bytes */
    const int lane = static_cast<int>(rare_lane()), g = lane >> 2, t = lane & 3;
    float c[columns][4] = {};
#pragma unroll
    for (int block = 0; block < D / 16; block++) {
        uint2 k = load_shared2(slot + g * pitch + 32 * block + 8 * t);
#pragma unroll
        for (int n = 0; n < columns; n++) {
            uint32_t bytes = query.word[n][block];
            multiply_bfloat(c[n], k.x, 0, k.y, 0, bytes_to_bfloat(__byte_perm(bytes, 0, 0x4140)),
                            bytes_to_bfloat(__byte_perm(bytes, 0, 0x4342)));
        }
    }
    const struct sight sight = sight_load(sights);
    float logit[columns], p[columns];
    bool high = false;
#pragma unroll
    for (int e = 0; e < columns; e++) {
        float high_byte = C == 4 ? c[0][0] : c[0][e], low_byte = C == 4 ? c[0][1] : c[columns - 1][e];
        logit[e] = fmaf(high_byte, 1024.0F, 4 * low_byte) * query.scale[e];
        if (position + g >= sight.limit<C>(e))
            logit[e] = -INFINITY;
    }
#pragma unroll
    for (int e = 0; e < columns; e++)
        high |= logit[e] - state.m[e] > HIGHEST;
    if (__any_sync(WARP_LANES, high))
#pragma unroll
        for (int e = 0; e < columns; e++)
            move_reference<D, C>(state, e, greatest_of_rows(logit[e]), HIGHEST);
    uint32_t
        b[2]; /* 4 columns: B's column 2c is the first term of column c, 2c + 1 the second. 8: one register a term. */
#pragma unroll
    for (int e = 0; e < columns; e++) {
        p[e] = exp2_approx(logit[e] - state.m[e]);
        state.l[e] += p[e];
    }
    uint32_t first = bfloat_pair(p[0], p[columns - 1]);
    float2 kept = bfloat_floats(first);
    if (C == 4) {
        b[0] = transpose(bfloat_pair(p[0], p[0] - kept.x));
        b[1] = 0;
    } else {
        b[0] = transpose(first);
        b[1] = transpose(bfloat_pair(p[0] - kept.x, p[columns - 1] - kept.y));
    }
    /* Rows that were never written may be NaN, which no probability makes 0. */
    const uint32_t tokens = sight.first_limit + sight.last_row - position;
    uint32_t written = (2 * t < tokens ? 0x0000FFFFU : 0U) | (2 * t + 1 < tokens ? 0xFFFF0000U : 0U);
    int matrix = lane >> 3;
#pragma unroll
    for (int i = 0; i < tiles; i += 2) {
        uint32_t v[4];
        int dim = dim_of<D>(i, 0) + (D == 64 ? 8 * (matrix >> 1) + 32 * (matrix & 1) : 8 * matrix);
        load_transposed(v, slot + values + (lane & 7) * pitch + 2 * dim);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            float fresh[4] = {};
            uint32_t a0 = v[2 * n] & written, a1 = v[2 * n + 1] & written;
            multiply_bfloat(fresh, a0, a1, b[0]);
            if (C == 8)
                multiply_bfloat(fresh, a0, a1, b[1]);
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int e = 0; e < columns; e++)
                    state.sum[i + n][half][e] += C == 4 ? fresh[2 * half] + fresh[2 * half + 1] : fresh[2 * half + e];
        }
    }
}

#endif
