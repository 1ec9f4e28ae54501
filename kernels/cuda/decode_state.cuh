/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a warp has of a segment: its columns' queries, which tokens they see, and the sums so far. Units are added to it by
 * decode_packed.cuh (a packed page) and decode_dense.cuh (8 tokens of a dense one).
 *
 * Scores have tokens as rows and query columns as columns, results have dims as rows. With 4 columns a lane works for column t, with
 * 8 for columns 2t and 2t + 1. Logits are to base 2 and relative to a reference m of each column, which moves only when
 * something outgrows it, so that sums are rarely rescaled. Sums over the tokens of a unit stay in the matrix unit; sums
 * over units are added to registers.
 */
#ifndef OSCAR_KERNELS_CUDA_DECODE_STATE_CUH
#define OSCAR_KERNELS_CUDA_DECODE_STATE_CUH

#include "kernels/cuda/decode_query.cuh"

#define NO_REFERENCE (-1e30F)
#define HIGHEST 60.0F /* of the log2 of a weight relative to the reference: floats have room */

template <int D, int C> struct state {
    static constexpr int lane_columns = C / 4;
    float sum[D / 16][2][lane_columns]; /* of dims dim_of(i, half), in units of the reference */
    float m[lane_columns];
    float l[lane_columns], z[lane_columns]; /* the lane's tokens' shares of the sums of p, and of p s z */
};

template <int D, int C> static __device__ __forceinline__ void state_open(state<D, C> &state) {
#pragma unroll
    for (int e = 0; e < C / 4; e++) {
        state.m[e] = NO_REFERENCE;
        state.l[e] = state.z[e] = 0.0F;
#pragma unroll
        for (int i = 0; i < D / 16; i++)
            state.sum[i][0][e] = state.sum[i][1][e] = 0.0F;
    }
}

/* The first of the 8 dims, one a lane's g, that row half `half` of result tile i holds. */
template <int D> static __device__ __forceinline__ constexpr int dim_of(int i, int half) {
    return D == 64 ? 8 * i + 32 * half : 16 * i + 8 * half;
}

/* Which tokens a segment's columns see: column c those below limit(c). It lies in shared memory until somebody asks. */
struct sight {
    uint32_t first_limit; /* of query row 0 */
    uint32_t last_row;    /* a column that no query stands for counts to it */
    uint32_t first_column;
    uint32_t group;
    template <int C> __device__ __forceinline__ uint32_t limit(int e) const {
        uint32_t column = first_column + (rare_lane() & 3) * (C / 4) + e;
        return first_limit + min(column / group, last_row);
    }
};

static __device__ __forceinline__ struct sight sight_load(uint32_t address) {
    uint4 words = load_shared4(address);
    return sight{words.x, words.y, words.z, words.w};
}

template <int D, int C> struct query {
    uint32_t word[C / 4][D / 16];
    float sum[C / 4], scale[C / 4], sigma[C / 4];
};

template <int D, int C, int P> static __device__ __forceinline__ void query_load(query<D, C> &query, uint32_t area) {
    using shape = query_area<D, C, P>;
    const int lane = static_cast<int>(rare_lane());
#pragma unroll
    for (int n = 0; n < C / 4; n++)
#pragma unroll
        for (int i = 0; i < D / 64; i++) {
            uint4 words = load_shared4(area + shape::word(n, 4 * i, lane));
            query.word[n][4 * i] = words.x;
            query.word[n][4 * i + 1] = words.y;
            query.word[n][4 * i + 2] = words.z;
            query.word[n][4 * i + 3] = words.w;
        }
#pragma unroll
    for (int e = 0; e < C / 4; e++) {
        uint32_t at = area + 4 * ((lane & 3) * (C / 4) + e);
        query.sum[e] = __uint_as_float(load_shared(at + shape::sums));
        query.scale[e] = __uint_as_float(load_shared(at + shape::scales));
        query.sigma[e] = __uint_as_float(load_shared(at + shape::sigmas));
    }
}

static __device__ __forceinline__ float greatest_of_rows(float x) {
    x = fmaxf(x, __shfl_xor_sync(WARP_LANES, x, 4));
    x = fmaxf(x, __shfl_xor_sync(WARP_LANES, x, 8));
    return fmaxf(x, __shfl_xor_sync(WARP_LANES, x, 16));
}

/* Moves column e's reference where `greatest`, the log2 of its greatest weight, asks for it. */
template <int D, int C>
static __device__ __forceinline__ void move_reference(state<D, C> &state, int e, float greatest, float highest) {
    float m = state.m[e];
    if (greatest > -INFINITY && (m == NO_REFERENCE || greatest - m > highest))
        m = greatest;
    float factor = exp2_approx(state.m[e] - m);
    state.m[e] = m;
    state.l[e] *= factor;
    state.z[e] *= factor;
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        state.sum[i][0][e] *= factor;
        state.sum[i][1][e] *= factor;
    }
}

#endif
