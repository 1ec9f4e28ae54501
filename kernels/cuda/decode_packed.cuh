/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A packed page in a slot of shared memory (kernels and bytes: proto/page.h). Logits are s_t (q c_t - z_t sum q), with codes as bytes
 * and q in 16-bit fixed point: exact. Codes of V are bytes, too: times 4^j, with those of two dims next to each other. What they are
 * weighed with, probabilities times scales, becomes 16-bit fixed point in units of the page's greatest weight of a column: so a page
 * of small weights is as exact as any.
 */
#ifndef OSCAR_KERNELS_CUDA_DECODE_PACKED_CUH
#define OSCAR_KERNELS_CUDA_DECODE_PACKED_CUH

#include "kernels/cuda/decode_centre.cuh"
#include "kernels/cuda/decode_state.cuh"
#include "proto/page.h"

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

/* Scales and zeros of the lane's tokens 16 tile + 8 half + g: {scale of K, zero of K, scale of V, zero of V} of each half. */
static __device__ __forceinline__ uint4 load_scales(uint32_t slot_scales, int tile) {
    return load_shared4(slot_scales + tile * 128 + ((threadIdx.x & 31) >> 2) * 16);
}

/* What V is weighed with: a page's probabilities times its scales, of the lane's tokens 16 tile + 8 half + g; and the sum of the
 * probabilities. */
template <int C> struct weights {
    static constexpr int columns = C / 4;
    float weight[4][2][columns];
    float sum[columns], greatest[columns];
};

#define WEIGHT_BELOW (65535.0F / 65536.0F) /* so that the greatest weight's fixed point is no more than 65535 */
#define WEIGHT_LEAST 0x0F800000U /* no scale overflows from there: what is less is nothing beside the reference */

/* The scale that makes 16-bit fixed point of a page's weights; returns what one unit of it weighs. */
static __device__ __forceinline__ float weight_scale(float greatest, float &scale) {
    const uint32_t exponent = max(__float_as_uint(greatest) & 0x7F800000U, WEIGHT_LEAST);
    scale = __uint_as_float((269U << 23) - exponent) * WEIGHT_BELOW;
    return __uint_as_float(exponent - (15U << 23)) * (1.0F / WEIGHT_BELOW);
}

/* Weights as B: of a lane's register the bytes 0 and 2 are those of tokens 2t and 2t + 1. 4 columns: B's column 2c is the high byte of
 * column c, 2c + 1 its low byte. 8 columns: a register of high bytes, then one of low ones. Adds the tokens' zeros, as heavy as
 * their bytes: so what rounding does to a weight meets code - zero. */
template <int C>
static __device__ __forceinline__ void weight_bytes(const float (&weight)[C / 4], const float (&scale)[C / 4],
                                                    float zero, uint32_t (&b)[C / 4], float (&zeros)[C / 4]) {
    /* A float from there on has its integer in the low bits: two bytes, and a third one of zero. */
    const float point = 0x1p23F;
    uint32_t fixed[C / 4];
#pragma unroll
    for (int e = 0; e < C / 4; e++) {
        const float x = fmaf(weight[e], scale[e], point);
        zeros[e] = fmaf(x - point, zero, zeros[e]);
        fixed[e] = __float_as_uint(x);
    }
    if constexpr (C == 4) {
        b[0] = transpose(__byte_perm(fixed[0], 0, 0x2021));
    } else {
        b[0] = transpose(__byte_perm(fixed[0], fixed[1], 0x6521));
        b[1] = transpose(__byte_perm(fixed[0], fixed[1], 0x6420));
    }
}

/* Adds the weighted codes of V: one register of them is multiplied with the weights at its even bytes, and at its odd ones. */
template <int D, int C>
static __device__ __forceinline__ void add_values(state<D, C> &state, uint32_t slot, const weights<C> &weights) {
    constexpr int W = D / 64, columns = C / 4;
    constexpr int passes = W > 1 && C == 8 ? 2 : 1, fields = 4 / passes; /* at a time, where registers are short */
    constexpr int tiles = D / 16 / passes, terms = columns;              /* 8 columns: high bytes and low ones apart */
    float scale[columns], unit[columns];
    uint32_t b[4][2][columns];
#pragma unroll
    for (int e = 0; e < columns; e++)
        unit[e] = weight_scale(greatest_of_rows(weights.greatest[e]), scale[e]);
    float zeros[columns] = {};
#pragma unroll
    for (int tile = 0; tile < 4; tile++) {
        const uint4 scales = load_scales(slot + 32 * D, tile);
        weight_bytes<C>(weights.weight[tile][0], scale, half_high(scales.y), b[tile][0], zeros);
        weight_bytes<C>(weights.weight[tile][1], scale, half_high(scales.w), b[tile][1], zeros);
    }
#pragma unroll
    for (int e = 0; e < columns; e++)
        state.z[e] = fmaf(zeros[e], unit[e], state.z[e]);
#pragma unroll
    for (int pass = 0; pass < passes; pass++) {
        int fresh[terms][2][tiles / 2][4] = {}; /* [even and odd bytes][tile] */
#pragma unroll
        for (int tile = 0; tile < 4; tile++) {
            uint32_t codes[2 * W];
            load_words(codes, slot + 16 * D + (tile * 32 + (threadIdx.x & 31)) * (8 * W));
#pragma unroll
            for (int i = 0; i < tiles / 2; i++) {
                /* A's rows g and g + 8: where a row of codes is one word, two fields of it. */
                const int field = pass * fields + (W == 1 ? 2 * i : i / (W / 2)), r = W == 1 ? 0 : 2 * (i % (W / 2));
                const uint32_t mask = 0x03030303U << (2 * field), mask8 = W == 1 ? mask << 2 : mask;
                const int r8 = W == 1 ? r : r + 1;
                const uint32_t a0 = codes[r] & mask, a1 = codes[r8] & mask8, a2 = codes[W + r] & mask,
                               a3 = codes[W + r8] & mask8;
#pragma unroll
                for (int term = 0; term < terms; term++)
#pragma unroll
                    for (int odd = 0; odd < 2; odd++)
                        multiply_bytes(fresh[term][odd][i], a0, a1, a2, a3, b[tile][0][term] << (8 * odd),
                                       b[tile][1][term] << (8 * odd));
            }
        }
#pragma unroll
        for (int odd = 0; odd < 2; odd++)
#pragma unroll
            for (int i = 0; i < tiles / 2; i++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int field = pass * fields + (W == 1 ? 2 * i + half : i / (W / 2));
#pragma unroll
                    for (int e = 0; e < columns; e++) {
                        const int high = fresh[0][odd][i][C == 4 ? 2 * half : 2 * half + e];
                        const int low = fresh[terms - 1][odd][i][C == 4 ? 2 * half + 1 : 2 * half + e];
                        float &sum = W == 1 ? state.sum[field][odd][e]
                                            : state.sum[W / 2 * (field + 4 * odd) + i % (W / 2)][half][e];
                        sum = fmaf(static_cast<float>(high * 256 + low),
                                   unit[e] * (1.0F / static_cast<float>(1 << (2 * field))), sum);
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
        float d[4] = {};
        multiply_keys<D, C, 1>(query, slot, tile, product);
        const uint4 scales = load_scales(slot + 32 * D, tile);
        const float2 k[2] = {half_floats(scales.x), half_floats(scales.z)};
        const float v[2] = {half_low(scales.y), half_low(scales.w)};
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
                    greatest[e] = fmaxf(greatest[e], logit + log2_approx(v[half]));
            }
    }
#pragma unroll
    for (int e = 0; e < C / 4; e++)
        move_reference<D, C>(state, e, greatest_of_rows(greatest[e]), HIGHEST - 2.0F);
}

/* The weights of a page's tokens relative to the references. Tokens that a column does not see weigh nothing:
 * what lies there may never have been written. */
template <int D, int C, int P, bool CUT>
static __device__ __forceinline__ void weigh(const state<D, C> &state, const query<D, C> &query,
                                             const centre<C, P> &centre, uint32_t table, uint32_t slot, uint32_t sights,
                                             uint32_t position, weights<C> &weights) {
    constexpr int columns = C / 4, together = C == 4 && P == 0 ? 4 : 2; /* tiles, by the registers that there are */
    float base[columns];
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
        weights.sum[e] = weights.greatest[e] = 0.0F;
    }
    const float c[4] = {base[0], C == 4 ? 0.0F : base[columns - 1], base[0], C == 4 ? 0.0F : base[columns - 1]};
#pragma unroll
    for (int first = 0; first < 4; first += together) {
        float product[together][2][columns];
        multiply_keys<D, C, together>(query, slot, first, product);
#pragma unroll
        for (int tile = first; tile < first + together; tile++) {
            float d[4];
            const uint4 scales = load_scales(slot + 32 * D, tile);
            const float2 k[2] = {half_floats(scales.x), half_floats(scales.z)};
            const float v[2] = {half_low(scales.y), half_low(scales.w)};
            if constexpr (P > 0)
                centre_tile<C, P>(centre, table, tile, d, c);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float(&weight)[columns] = weights.weight[tile][half];
#pragma unroll
                for (int e = 0; e < columns; e++) {
                    weight[e] = 0.0F;
                    if (CUT && 16 * tile + 8 * half >= seen[e])
                        continue;
                    float centred = fmaf(-k[half].y, query.sum[e], product[tile - first][half][e]);
                    float logit = fmaf(centred, k[half].x * query.scale[e], P > 0 ? d[2 * half + e] : base[e]);
                    if (P > 0 && C == 4)
                        logit += d[2 * half + 1];
                    float p = exp2_approx(logit);
                    weights.sum[e] += p;
                    weight[e] = p * v[half];
                    weights.greatest[e] = fmaxf(weights.greatest[e], weight[e]);
                }
            }
        }
    }
}

/* Makes zeros of V's scales and zeros of the tokens that no column sees, which may never have been written: nothing else would make
 * nothing of a NaN there. */
template <int D>
static __device__ __forceinline__ void blank_values(uint32_t slot, const struct sight &sight, uint32_t position) {
    __syncwarp(); /* other lanes have read them */
    for (uint32_t token = rare_lane(); token < 64; token += 32)
        if (position + token >= sight.first_limit + sight.last_row)
            store_shared(slot + 32 * D + token / 16 * 128 + token % 8 * 16 + token / 8 % 2 * 8 + 4, 0U);
    copies_follow_stores();
    __syncwarp();
}

/* A packed page from `position` on; `cut`: not all columns see all of it. */
template <int D, int C, int P>
static __device__ __forceinline__ void attend_packed(state<D, C> &state, const query<D, C> &query,
                                                     const centre<C, P> &centre, uint32_t table, uint32_t slot,
                                                     uint32_t sights, uint32_t position, bool cut) {
    const float highest = __uint_as_float((127U + static_cast<uint32_t>(HIGHEST)) << 23);
    weights<C> weights;
    if (cut)
        blank_values<D>(slot, sight_load(sights), position);
    for (bool moved = false;; moved = true) {
        if (cut)
            weigh<D, C, P, true>(state, query, centre, table, slot, sights, position, weights);
        else
            weigh<D, C, P, false>(state, query, centre, table, slot, sights, position, weights);
        if (!__any_sync(WARP_LANES, weights.greatest[0] > highest || weights.greatest[C / 4 - 1] > highest))
            break;
        if (moved) { /* logits so large that a float does not resolve them: any finite result will do */
#pragma unroll
            for (int e = 0; e < C / 4; e++) {
                weights.sum[e] = fminf(weights.sum[e], highest);
                weights.greatest[e] = fminf(weights.greatest[e], highest);
#pragma unroll
                for (int tile = 0; tile < 4; tile++)
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        weights.weight[tile][half][e] = fminf(weights.weight[tile][half][e], highest);
            }
            break;
        }
        follow<D, C, P>(state, query, centre, table, slot, sights, position, 4);
    }
#pragma unroll
    for (int e = 0; e < C / 4; e++) {
        state.l[e] += weights.sum[e];
    }
    add_values<D, C>(state, slot, weights);
}

#endif
