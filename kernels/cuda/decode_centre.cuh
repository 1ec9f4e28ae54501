/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rotating centre of K: a pair adds a cos(w p) + b sin(w p) to the logit at position p = 64 page + r: C cos(w r) + S sin(w r),
 * with (C, S) turned by the page's angle. One m16n8k16 takes 8 pairs over 16 tokens: A the row turns, exact in FP16, from a
 * table in shared memory; B (C, S) in two FP16 terms. 4 columns: high and low terms in neighbouring columns; even g turn pair
 * t, odd g pair t + 4, and they exchange. 8 columns: two instructions, and a lane turns both pairs.
 */
#ifndef OSCAR_KERNELS_CUDA_DECODE_CENTRE_CUH
#define OSCAR_KERNELS_CUDA_DECODE_CENTRE_CUH

#include "kernels/cuda/decode_query.cuh"

template <int C, int P> struct centre {
    static constexpr int steps = P / 8, own = steps * (C / 4);
    float2 base[own > 0 ? own : 1]; /* (a, b) of the pairs that the lane turns */
    float2 turn[own > 0 ? own : 1]; /* of the page to come */
    int frequency[own > 0 ? own : 1];
    uint32_t high[own > 0 ? own : 1][C / 4], low[own > 0 ? own : 1][C / 4];
};

template <int C> static __device__ __forceinline__ int own_pair(int i) {
    const int g = static_cast<int>(rare_lane() >> 2), t = static_cast<int>(rare_lane() & 3);
    return C == 4 ? 8 * i + t + 4 * (g & 1) : 8 * (i / 2) + t + 4 * (i & 1);
}

template <int D, int C, int P> static __device__ __forceinline__ void centre_load(centre<C, P> &centre, uint32_t area) {
    const int g = static_cast<int>(rare_lane() >> 2);
#pragma unroll
    for (int i = 0; i < centre.own; i++) {
        uint2 base = load_shared2(area + query_area<D, C, P>::turns + 8 * (P * (C == 4 ? g / 2 : g) + own_pair<C>(i)));
        centre.base[i] = make_float2(__uint_as_float(base.x), __uint_as_float(base.y));
    }
}

/* Which turns the lane needs. */
template <int C, int P>
static __device__ __forceinline__ void centre_open(centre<C, P> &centre, const struct cuda_head &head) {
#pragma unroll
    for (int i = 0; i < centre.own; i++) {
        int pair = own_pair<C>(i);
        centre.frequency[i] = pair < head.pairs ? head.centre_pair[pair] : 0;
    }
}

/* Asks for the turns of a page. */
template <int C, int P>
static __device__ __forceinline__ void centre_fetch(centre<C, P> &centre, const struct cuda_decode_params &params,
                                                    uint32_t page) {
    const float2 *turns =
        reinterpret_cast<const float2 *>(params.page_turn) + static_cast<uint64_t>(page) * params.frequencies;
#pragma unroll
    for (int i = 0; i < centre.own; i++)
        centre.turn[i] = __ldg(turns + centre.frequency[i]);
}

/* Makes B of the page whose turns came last. */
template <int C, int P> static __device__ __forceinline__ void centre_turn(centre<C, P> &centre) {
    bool odd = threadIdx.x & 4;
#pragma unroll
    for (int i = 0; i < centre.own; i++) {
        float2 from = centre.base[i], by = centre.turn[i];
        float c = fmaf(from.x, by.x, from.y * by.y), s = fmaf(from.y, by.x, -(from.x * by.y));
        uint32_t high = half_pair(c, s);
        float2 kept = half_floats(high);
        uint32_t low = half_pair(c - kept.x, s - kept.y);
        if (C == 4) {
            uint32_t other = __shfl_xor_sync(WARP_LANES, odd ? high : low, 4);
            centre.high[i][0] = odd ? other : high; /* B's first register: pair t */
            centre.low[i][0] = odd ? low : other;   /* its second: pair t + 4 */
        } else {
            centre.high[i / 2][i & 1] = high;
            centre.low[i / 2][i & 1] = low;
        }
    }
}

/* d = the pairs' logits of 16 tokens, plus c. */
template <int C, int P>
static __device__ __forceinline__ void centre_tile(const centre<C, P> &centre, uint32_t table, int tile, float (&d)[4],
                                                   const float (&c)[4]) {
#pragma unroll
    for (int step = 0; step < centre.steps; step++) {
        uint4 a = load_shared4(table + ((step * 4 + tile) * 32 + (threadIdx.x & 31)) * 16);
        if (step == 0)
            multiply_half(d, a, centre.high[0][0], C == 4 ? centre.low[0][0] : centre.high[0][C / 4 - 1], c);
        else
            multiply_half(d, a.x, a.y, a.z, a.w, centre.high[step][0],
                          C == 4 ? centre.low[step][0] : centre.high[step][C / 4 - 1]);
        if (C == 8)
            multiply_half(d, a.x, a.y, a.z, a.w, centre.low[step][0], centre.low[step][C / 4 - 1]);
    }
}

/* The head's table goes to shared memory by 16 bytes a thread; where a block has too few, they go on. */
static __device__ __forceinline__ uint4 table_read(const struct cuda_head &head, uint32_t i) {
    return head.centre_table ? __ldg(reinterpret_cast<const uint4 *>(head.centre_table) + i) : uint4{};
}

/* `first`: what the thread has read of it before. */
template <int P>
static __device__ __forceinline__ void table_fill(const struct cuda_head &head, uint4 first, uint32_t table) {
    for (uint32_t i = threadIdx.x; i < CUDA_DECODE_TABLE_BYTES(P) / 16; i += blockDim.x)
        store_shared4(table + 16 * i, i == threadIdx.x ? first : table_read(head, i));
}

#endif
