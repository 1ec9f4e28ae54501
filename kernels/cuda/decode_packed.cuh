/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A packed page in a slot of shared memory (kernels and bytes: proto/page.h). Logits are s_t (q c_t - z_t sum q), with codes as bytes
 * and q in 16-bit fixed point: exact. Probabilities times the scale of V enter in two FP16 terms, codes of V as FP16
 * subnormals: code * 4^j * 2^-24.
 */
#ifndef OSCAR_KERNELS_CUDA_DECODE_PACKED_CUH
#define OSCAR_KERNELS_CUDA_DECODE_PACKED_CUH

#include "kernels/cuda/decode_centre.cuh"
#include "kernels/cuda/decode_state.cuh"
#include "proto/page.h"

/* log2 of what a weight (a probability times a scale) may be relative to the reference, and of what the greatest one is made
 * when the reference moves: FP16 holds the greatest and resolves 2^-28 of it. */
#define HIGHEST 14.0F
#define HEADROOM 4.0F

/* `words` consecutive words of shared memory. */
template <int Words> static __device__ __forceinline__ void load_words(uint32_t (&x)[Words], uint32_t address) {
    if constexpr (Words == 2) {
        uint2 words = load_shared2(address);
        x[0] = words.x;
        x[1] = words.y;
    } else {
#pragma unroll
        for (int i = 0; i < Words; i += 4) {
            uint4 words = load_shared4(address + 4 * i);
            x[i] = words.x;
            x[i + 1] = words.y;
            x[i + 2] = words.z;
            x[i + 3] = words.w;
        }
    }
}

/* Codes of field f (0..3) of four bytes; those of odd fields times 4. */
static __device__ __forceinline__ constexpr uint32_t field(uint32_t word, int f) {
    return word >> (4 * (f / 2)) & (f % 2 == 0 ? 0x03030303U : 0x0C0C0C0CU);
}

/* Four times the products of the query with the codes of K of `Tiles` 16-token tiles: [tile][row half][lane's column]. */
template <int D, int C, int Tiles>
static __device__ __forceinline__ void multiply_keys(const query<D, C> &query, uint32_t slot, int first,
                                                     float (&product)[Tiles][2][C / 4]) {
    constexpr int W = D / 64, columns = C / 4;
    uint32_t k[Tiles][2 * W];
    int c[Tiles][columns][4] = {};
#pragma unroll
    for (int tile = 0; tile < Tiles; tile++)
        load_words(k[tile], slot + ((first + tile) * 32 + (threadIdx.x & 31)) * (8 * W));
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
#pragma unroll
        for (int step = 0; step < W; step++) {
            /* Two blocks of 16 dims: neighbours of one field, or, where a row is one word, two fields of it. */
            int f0 = W == 1 ? odd : odd + 2 * (step / (W / 2)), f1 = W == 1 ? odd + 2 : f0;
            int w0 = W == 1 ? 0 : step % (W / 2) * 2, w1 = W == 1 ? 0 : w0 + 1;
#pragma unroll
            for (int tile = 0; tile < Tiles; tile++) {
                uint32_t a0 = field(k[tile][w0], f0), a1 = field(k[tile][W + w0], f0), a2 = field(k[tile][w1], f1),
                         a3 = field(k[tile][W + w1], f1);
#pragma unroll
                for (int n = 0; n < columns; n++)
                    multiply_codes(c[tile][n], a0, a1, a2, a3, query.word[n][W * f0 + w0], query.word[n][W * f1 + w1]);
            }
        }
        if (odd == 0)
#pragma unroll
            for (int tile = 0; tile < Tiles; tile++)
#pragma unroll
                for (int n = 0; n < columns; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        c[tile][n][i] *= 4; /* as those of odd fields will be */
    }
#pragma unroll
    for (int tile = 0; tile < Tiles; tile++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int e = 0; e < columns; e++) {
                int high = C == 4 ? c[tile][0][2 * half] : c[tile][0][2 * half + e];
                int low = C == 4 ? c[tile][0][2 * half + 1] : c[tile][columns - 1][2 * half + e];
                product[tile][half][e] = static_cast<float>(high * 256 + low);
            }
}

/* Scale and zero of the lane's tokens 16 tile + 8 half + g. */
static __device__ __forceinline__ void load_scales(uint32_t slot_scales, int tile, float2 (&k)[2], float2 (&v)[2]) {
    uint4 words = load_shared4(slot_scales + tile * 128 + ((threadIdx.x & 31) >> 2) * 16);
    k[0] = half_floats(words.x);
    v[0] = half_floats(words.y);
    k[1] = half_floats(words.z);
    v[1] = half_floats(words.w);
}

/* What V is weighed with: a page's probabilities times its scales, each as two FP16 terms, the second what the first cuts off; and
 * sums over the lane's tokens, of the probabilities and of the weighted zeros. One register holds, of one row half, with 4
 * columns the lane's column's two terms, with 8 one term of its two columns. */
template <int C> struct weights {
    static constexpr int columns = C / 4;
    uint32_t pair[4][2][columns];
    float sum[columns], zeros[columns];
    __device__ __forceinline__ void set(int tile, int half, const float (&weight)[columns]) {
        float first[columns], second[columns];
#pragma unroll
        for (int e = 0; e < columns; e++) {
            first[e] = __uint_as_float(__float_as_uint(weight[e]) & 0xFFFFE000U); /* FP16's bits of it */
            second[e] = weight[e] - first[e];
        }
        if constexpr (C == 4) {
            pair[tile][half][0] = half_pair(first[0], second[0]);
        } else {
            pair[tile][half][0] = half_pair(first[0], first[1]);
            pair[tile][half][1] = half_pair(second[0], second[1]);
        }
    }
    /* Where the first term is infinite, the second is NaN. */
    __device__ __forceinline__ void limit(int tile, int half, float highest) {
        float2 first = half_floats(pair[tile][half][0]);
        float weight[columns];
#pragma unroll
        for (int e = 0; e < columns; e++)
            weight[e] = fminf(e == 0 ? first.x : first.y, highest);
        set(tile, half, weight);
    }
};

/* Adds the weighted codes of V. 4 columns: of the result's columns 2t and 2t + 1, which a lane has, one is of first terms, the other
 * of second ones. 8 columns: an instruction for each term. */
template <int D, int C>
static __device__ __forceinline__ void add_values(state<D, C> &state, uint32_t slot, const weights<C> &weights) {
    constexpr int W = D / 64, columns = C / 4;
    /* Dims at a time: all, or the fields of the low bytes, then those of the high ones, where registers are short. */
    constexpr int passes = W > 1 && C == 8 ? 2 : 1, tiles = D / 16 / passes;
    uint32_t b[4][columns][2];
#pragma unroll
    for (int tile = 0; tile < 4; tile++)
#pragma unroll
        for (int i = 0; i < columns; i++) {
            b[tile][i][0] = transpose(weights.pair[tile][0][i]);
            b[tile][i][1] = transpose(weights.pair[tile][1][i]);
        }
#pragma unroll
    for (int pass = 0; pass < passes; pass++) {
        float fresh[tiles][4] = {};
#pragma unroll
        for (int tile = 0; tile < 4; tile++) {
            uint32_t codes[2 * W];
            load_words(codes, slot + 16 * D + (tile * 32 + (threadIdx.x & 31)) * (8 * W));
#pragma unroll
            for (int high = pass; high < (passes == 2 ? pass + 1 : 2); high++) {
                uint32_t word[2 * W];
#pragma unroll
                for (int i = 0; i < 2 * W; i++)
                    word[i] = high ? codes[i] >> 8 : codes[i];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    uint32_t mask = 0x00030003U << (2 * j);
#pragma unroll
                    for (int i = 0; i < columns; i++)
                        if constexpr (W == 1) {
                            if (high == 0)
                                multiply_half(fresh[j], word[0] & mask, codes[0] >> 8 & mask, word[1] & mask,
                                              codes[1] >> 8 & mask, b[tile][i][0], b[tile][i][1]);
                        } else {
#pragma unroll
                            for (int r = 0; r < W; r += 2)
                                multiply_half(fresh[W / 2 * (passes == 2 ? j : j + 4 * high) + r / 2], word[r] & mask,
                                              word[r + 1] & mask, word[W + r] & mask, word[W + r + 1] & mask,
                                              b[tile][i][0], b[tile][i][1]);
                        }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < tiles; i++) {
            int j = (W == 1 ? i : i / (W / 2)) & 3;
            float unit = 16777216.0F / static_cast<float>(1 << (2 * j));
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int e = 0; e < columns; e++) {
                    float sum = C == 4 ? fresh[i][2 * half] + fresh[i][2 * half + 1] : fresh[i][2 * half + e];
                    state.sum[pass * tiles + i][half][e] = fmaf(sum, unit, state.sum[pass * tiles + i][half][e]);
                }
        }
    }
}

/* Moves the references to where the weights of a page's first `tiles` times 16 tokens are. */
template <int D, int C, int P>
static __device__ __forceinline__ void follow(state<D, C> &state, const query<D, C> &query, const centre<C, P> &centre,
                                              uint32_t table, uint32_t slot, uint32_t sights, uint32_t position,
                                              int tiles) {
    const float nothing[4] = {0.0F, 0.0F, 0.0F, 0.0F};
    const struct sight sight = sight_load(sights);
    float greatest[C / 4];
#pragma unroll
    for (int e = 0; e < C / 4; e++)
        greatest[e] = -INFINITY;
#pragma unroll 1
    for (int tile = 0; tile < tiles; tile++) {
        float product[1][2][C / 4];
        float2 k[2], v[2];
        float d[4] = {};
        multiply_keys<D, C, 1>(query, slot, tile, product);
        load_scales(slot + 32 * D, tile, k, v);
        if constexpr (P > 0)
            centre_tile<C, P>(centre, table, tile, d, nothing);
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int e = 0; e < C / 4; e++) {
                float centred = fmaf(-k[half].y, query.sum[e], product[0][half][e]);
                float added = query.sigma[e] + (C == 4 ? d[2 * half] + d[2 * half + 1] : d[2 * half + e]);
                float logit = fmaf(centred, k[half].x * query.scale[e], added);
                if (position + 16 * tile + 8 * half + (rare_lane() >> 2) < sight.limit<C>(e))
                    greatest[e] = fmaxf(greatest[e], logit + log2_approx(v[half].x));
            }
    }
#pragma unroll
    for (int e = 0; e < C / 4; e++)
        move_reference<D, C>(state, e, greatest_of_rows(greatest[e]), HIGHEST - 2.0F, HEADROOM);
}

/* The weights of a page's tokens relative to the references; returns the greatest. Tokens that a column does not see weigh nothing:
 * what lies there may never have been written. */
template <int D, int C, int P, bool CUT>
static __device__ __forceinline__ float weigh(const state<D, C> &state, const query<D, C> &query,
                                              const centre<C, P> &centre, uint32_t table, uint32_t slot,
                                              uint32_t sights, uint32_t position, weights<C> &weights) {
    constexpr int columns = C / 4, together = C == 4 && P == 0 ? 4 : 2; /* tiles, by the registers that there are */
    float greatest = 0.0F, base[columns];
    int seen[columns]; /* of the lane's row of 16: its tokens below that */
    if (CUT) {
        const struct sight sight = sight_load(sights);
#pragma unroll
        for (int e = 0; e < columns; e++)
            seen[e] = static_cast<int>(sight.limit<C>(e) - position - (rare_lane() >> 2));
    }
#pragma unroll
    for (int e = 0; e < columns; e++) {
        base[e] = query.sigma[e] - state.m[e];
        weights.sum[e] = weights.zeros[e] = 0.0F;
    }
    const float c[4] = {base[0], C == 4 ? 0.0F : base[columns - 1], base[0], C == 4 ? 0.0F : base[columns - 1]};
#pragma unroll
    for (int first = 0; first < 4; first += together) {
        float product[together][2][columns];
        multiply_keys<D, C, together>(query, slot, first, product);
#pragma unroll
        for (int tile = first; tile < first + together; tile++) {
            float2 k[2], v[2];
            float d[4];
            load_scales(slot + 32 * D, tile, k, v);
            if constexpr (P > 0)
                centre_tile<C, P>(centre, table, tile, d, c);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float weight[columns] = {};
#pragma unroll
                for (int e = 0; e < columns; e++) {
                    if (CUT && 16 * tile + 8 * half >= seen[e])
                        continue;
                    float centred = fmaf(-k[half].y, query.sum[e], product[tile - first][half][e]);
                    float logit = fmaf(centred, k[half].x * query.scale[e], P > 0 ? d[2 * half + e] : base[e]);
                    if (P > 0 && C == 4)
                        logit += d[2 * half + 1];
                    float p = exp2_approx(logit);
                    weights.sum[e] += p;
                    weight[e] = p * v[half].x;
                    weights.zeros[e] = fmaf(weight[e], v[half].y, weights.zeros[e]);
                    greatest = fmaxf(greatest, weight[e]);
                }
                weights.set(tile, half, weight);
            }
        }
    }
    return greatest;
}

/* A packed page from `position` on; `cut`: not all columns see all of it. */
template <int D, int C, int P>
static __device__ __forceinline__ void attend_packed(state<D, C> &state, const query<D, C> &query,
                                                     const centre<C, P> &centre, uint32_t table, uint32_t slot,
                                                     uint32_t sights, uint32_t position, bool cut) {
    const float highest = static_cast<float>(1 << static_cast<int>(HIGHEST));
    weights<C> weights;
    for (bool moved = false;; moved = true) {
        float greatest = cut ? weigh<D, C, P, true>(state, query, centre, table, slot, sights, position, weights)
                             : weigh<D, C, P, false>(state, query, centre, table, slot, sights, position, weights);
        if (!__any_sync(WARP_LANES, greatest > highest))
            break;
        if (moved) { /* logits so large that a float does not resolve them: any finite result will do */
#pragma unroll
            for (int e = 0; e < C / 4; e++) {
                weights.sum[e] = fminf(weights.sum[e], highest);
                weights.zeros[e] = 0.0F;
            }
#pragma unroll
            for (int tile = 0; tile < 4; tile++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    weights.limit(tile, half, highest);
            break;
        }
        follow<D, C, P>(state, query, centre, table, slot, sights, position, 4);
    }
#pragma unroll
    for (int e = 0; e < C / 4; e++) {
        state.l[e] += weights.sum[e];
        state.z[e] += weights.zeros[e];
    }
    add_values<D, C>(state, slot, weights);
}

#endif
