/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What one warp does with one unit of a segment: a packed page, or 8 tokens of a dense one, in a slot of shared memory.
 *
 * Scores have tokens as rows and query columns as columns, results have dims as rows. With 4 columns a lane works for column t, with
 * 8 for columns 2t and 2t + 1. Logits are to base 2 and relative to a reference m of each column, which moves only when
 * something outgrows it, so that sums are rarely rescaled. Sums over the tokens of a unit stay in the matrix unit, which
 * truncates; sums over units are added to registers.
 *
 * Packed (kernels and bytes: proto/page.h): logits are s_t (q c_t - z_t sum q), with codes as bytes and q in 16-bit fixed point:
 * exact. Probabilities times the scale of V enter in two FP16 terms, codes of V as FP16 subnormals: code * 4^j * 2^-24.
 *
 * Dense: q as the same fixed point, whose bytes BF16 holds; probabilities in two BF16 terms.
 */
#ifndef OSCAR_KERNELS_CUDA_DECODE_UNITS_CUH
#define OSCAR_KERNELS_CUDA_DECODE_UNITS_CUH

#include "kernels/cuda/decode_query.cuh"
#include "proto/page.h"

#define NO_REFERENCE (-1e30F)
/* log2 of what a weight (a probability times a scale) may be relative to the reference, and of what the greatest one is made
 * when the reference moves: FP16 holds the greatest and resolves 2^-28 of it. */
#define HIGHEST 14.0F
#define HEADROOM 4.0F
#define HIGHEST_DENSE 60.0F /* BF16 has room */

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
        uint32_t column = first_column + (threadIdx.x & 3) * (C / 4) + e;
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
    int lane = threadIdx.x & 31;
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

/* --- the rotating centre ---
 *
 * A pair adds a cos(w p) + b sin(w p) to the logit at position p = 64 page + r: C cos(w r) + S sin(w r), with (C, S) turned by the
 * page's angle. One m16n8k16 takes 8 pairs over 16 tokens: A the row turns, exact in FP16, from a table in shared memory; B
 * (C, S) in two FP16 terms. 4 columns: high and low terms in neighbouring columns; even g turn pair t, odd g pair t + 4, and
 * they exchange. 8 columns: two instructions, and a lane turns both pairs. */

template <int C, int P> struct centre {
    static constexpr int steps = P / 8, own = steps * (C / 4);
    float2 base[own > 0 ? own : 1]; /* (a, b) of the pairs that the lane turns */
    float2 turn[own > 0 ? own : 1]; /* of the page to come */
    int frequency[own > 0 ? own : 1];
    uint32_t high[own > 0 ? own : 1][C / 4], low[own > 0 ? own : 1][C / 4];
};

template <int C> static __device__ __forceinline__ int own_pair(int i) {
    int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    return C == 4 ? 8 * i + t + 4 * (g & 1) : 8 * (i / 2) + t + 4 * (i & 1);
}

template <int D, int C, int P> static __device__ __forceinline__ void centre_load(centre<C, P> &centre, uint32_t area) {
    int g = (threadIdx.x & 31) >> 2;
#pragma unroll
    for (int i = 0; i < centre.own; i++) {
        uint2 base = load_shared2(area + query_area<D, C, P>::turns + 8 * (P * (C == 4 ? g / 2 : g) + own_pair<C>(i)));
        centre.base[i] = make_float2(__uint_as_float(base.x), __uint_as_float(base.y));
    }
}

/* Which turns the lane needs. */
template <int C, int P>
static __device__ __forceinline__ void centre_open(centre<C, P> &centre, const struct cuda_decode_params &params,
                                                   const struct cuda_head &head) {
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

/* B of this page. */
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

/* The table of a head: [step][tile][lane] A fragments. Called by all threads of a block. */
template <int P>
static __device__ __forceinline__ void table_fill(const struct cuda_decode_params &params, const struct cuda_head &head,
                                                  uint32_t table) {
    for (int i = threadIdx.x; i < 64 * P; i += blockDim.x) {
        int part = i & 3, lane = i >> 2 & 31, tile = i >> 7 & 3, step = i >> 9;
        int token = tile * 16 + lane / 4 + 8 * (part & 1), pair = 8 * step + (lane & 3) + 4 * (part >> 1);
        float2 turn = make_float2(0.0F, 0.0F);
        if (pair < head.pairs)
            turn = __ldg(reinterpret_cast<const float2 *>(params.row_turn) + token * params.frequencies +
                         head.centre_pair[pair]);
        store_shared(table + 4 * i, half_pair(turn.x, turn.y));
    }
}

/* Makes a segment's query in registers, where nobody made it in shared memory. */
template <int D, int C, int P>
static __device__ __forceinline__ void query_make(const struct cuda_decode_params &params, uint32_t kv_head,
                                                  uint32_t item, uint32_t block, query<D, C> &query,
                                                  centre<C, P> &centre) {
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll 1
    for (int c = 0; c < C; c++) {
        const column<D> column = column_make<D, C, P>(params, kv_head, item, block, c);
        bool mine = (C == 4 ? g / 2 : g) == c; /* B's column */
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            uint32_t high = __shfl_sync(WARP_LANES, column.high[i / 8], 4 * (i % 8) + t);
            uint32_t low = __shfl_sync(WARP_LANES, column.low[i / 8], 4 * (i % 8) + t);
            if (mine) {
                query.word[0][i] = C == 4 && (g & 1) ? low : high;
                if (C == 8)
                    query.word[C / 8][i] = low;
            }
        }
#pragma unroll
        for (int e = 0; e < C / 4; e++)
            if (t * (C / 4) + e == c) {
                query.sum[e] = column.sum;
                query.scale[e] = column.scale;
                query.sigma[e] = column.sigma;
            }
#pragma unroll
        for (int i = 0; i < centre.own; i++) {
            float2 base = make_float2(__shfl_sync(WARP_LANES, column.turn, 2 * own_pair<C>(i)),
                                      __shfl_sync(WARP_LANES, column.turn, 2 * own_pair<C>(i) + 1));
            if (mine)
                centre.base[i] = base;
        }
    }
}

/* --- packed pages --- */

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

/* Codes of field f (0..3) of four bytes. A mask in place of the shift would give them times 4 in every other field, at a
 * quarter of the query's resolution there: too coarse. */
static __device__ __forceinline__ constexpr uint32_t field(uint32_t word, int f) {
    return word >> (2 * f) & 0x03030303U;
}

/* Products of the query with the codes of K of `Tiles` 16-token tiles: [tile][row half][lane's column]. */
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
    for (int step = 0; step < 2 * W; step++) {
        /* Two blocks of 16 dims: neighbours of one field, or, where a row is one word, two fields of it. */
        int f0 = W == 1 ? step : step / (W / 2), f1 = W == 1 ? step + 2 : f0;
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

static __device__ __forceinline__ float greatest_of_rows(float x) {
    x = fmaxf(x, __shfl_xor_sync(WARP_LANES, x, 4));
    x = fmaxf(x, __shfl_xor_sync(WARP_LANES, x, 8));
    return fmaxf(x, __shfl_xor_sync(WARP_LANES, x, 16));
}

/* Moves column e's reference where `greatest`, the log2 of its greatest weight, asks for it. */
template <int D, int C>
static __device__ __forceinline__ void move_reference(state<D, C> &state, int e, float greatest, float highest,
                                                      float headroom) {
    float m = state.m[e];
    if (greatest > -INFINITY && (m == NO_REFERENCE || greatest - m > highest))
        m = greatest - headroom;
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
    __device__ __forceinline__ void get(int tile, int half, float (&weight)[columns]) const {
        float2 x = half_floats(pair[tile][half][0]), y = half_floats(pair[tile][half][columns - 1]);
        const float first[2] = {x.x, x.y}, second[2] = {C == 4 ? x.y : y.x, y.y};
#pragma unroll
        for (int e = 0; e < columns; e++) /* where the first is infinite, the second is NaN */
            weight[e] = fmaxf(first[e], first[e] + second[e]);
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

/* Takes out the tokens that a column does not see. Their scales may never have been written. */
template <int D, int C>
static __device__ __forceinline__ void hide(weights<C> &weights, uint32_t slot, uint32_t sights, uint32_t position,
                                            float &greatest) {
    const struct sight sight = sight_load(sights);
    greatest = 0.0F;
#pragma unroll
    for (int e = 0; e < C / 4; e++)
        weights.sum[e] = weights.zeros[e] = 0.0F;
#pragma unroll
    for (int tile = 0; tile < 4; tile++) {
        float2 k[2], v[2];
        float weight[C / 4];
        load_scales(slot + 32 * D, tile, k, v);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t token = position + 16 * tile + 8 * half + ((threadIdx.x & 31) >> 2);
            weights.get(tile, half, weight);
#pragma unroll
            for (int e = 0; e < C / 4; e++) {
                bool visible = token < sight.limit<C>(e);
                weight[e] = visible ? weight[e] : 0.0F;
                weights.sum[e] += visible ? __fdividef(weight[e], v[half].x) : 0.0F;
                weights.zeros[e] += visible ? weight[e] * v[half].y : 0.0F;
                greatest = fmaxf(greatest, weight[e]);
            }
            weights.set(tile, half, weight);
        }
    }
}

/* Moves the references to where the page's weights are. */
template <int D, int C, int P>
static __device__ __forceinline__ void follow(state<D, C> &state, const query<D, C> &query, const centre<C, P> &centre,
                                              uint32_t table, uint32_t slot, uint32_t sights, uint32_t position) {
    const float nothing[4] = {0.0F, 0.0F, 0.0F, 0.0F};
    const struct sight sight = sight_load(sights);
    float greatest[C / 4];
#pragma unroll
    for (int e = 0; e < C / 4; e++)
        greatest[e] = -INFINITY;
#pragma unroll 1
    for (int tile = 0; tile < 4; tile++) {
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
                if (position + 16 * tile + 8 * half + ((threadIdx.x & 31) >> 2) < sight.limit<C>(e))
                    greatest[e] = fmaxf(greatest[e], logit + log2_approx(v[half].x));
            }
    }
#pragma unroll
    for (int e = 0; e < C / 4; e++)
        move_reference<D, C>(state, e, greatest_of_rows(greatest[e]), HIGHEST - 2.0F, HEADROOM);
}

/* The weights of a page's tokens relative to the references; returns the greatest. */
template <int D, int C, int P>
static __device__ __forceinline__ float weigh(const state<D, C> &state, const query<D, C> &query, centre<C, P> &centre,
                                              uint32_t table, uint32_t slot, weights<C> &weights) {
    constexpr int columns = C / 4, together = 4 / columns; /* tiles, by the registers that there are */
    float greatest = 0.0F, base[columns];
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
        if (first == 0)
            centre_turn<C, P>(centre); /* now the turns have come */
#pragma unroll
        for (int tile = first; tile < first + together; tile++) {
            float2 k[2], v[2];
            float d[4], weight[columns];
            load_scales(slot + 32 * D, tile, k, v);
            if constexpr (P > 0)
                centre_tile<C, P>(centre, table, tile, d, c);
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int e = 0; e < columns; e++) {
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
static __device__ __forceinline__ void attend_packed(state<D, C> &state, const query<D, C> &query, centre<C, P> &centre,
                                                     uint32_t table, uint32_t slot, uint32_t sights, uint32_t position,
                                                     bool cut) {
    const float highest = static_cast<float>(1 << static_cast<int>(HIGHEST));
    weights<C> weights;
    for (bool moved = false;; moved = true) {
        float greatest = weigh<D, C, P>(state, query, centre, table, slot, weights);
        if (cut)
            hide<D, C>(weights, slot, sights, position, greatest);
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
                for (int half = 0; half < 2; half++) {
                    float weight[C / 4];
                    weights.get(tile, half, weight);
#pragma unroll
                    for (int e = 0; e < C / 4; e++)
                        weight[e] = fminf(weight[e], highest);
                    weights.set(tile, half, weight);
                }
            break;
        }
        follow<D, C, P>(state, query, centre, table, slot, sights, position);
    }
#pragma unroll
    for (int e = 0; e < C / 4; e++) {
        state.l[e] += weights.sum[e];
        state.z[e] += weights.zeros[e];
    }
    add_values<D, C>(state, slot, weights);
}

/* --- dense tiles: in a slot 8 rows of K, then 8 of V, a little apart so that no two rows begin in the same bank --- */

template <int D> struct dense_slot {
    static constexpr int k_pitch = 2 * D + 32, v_pitch = 2 * D + 16, v = CUDA_DECODE_TILE * k_pitch;
};

/* Two signed bytes in the low bytes of two half words, as BF16. 7 bits added to the exponent of 128 give 128 + x; the sign bit
 * does the same to what is taken off. */
static __device__ __forceinline__ uint32_t bytes_to_bfloat(uint32_t bytes) {
    uint32_t with = (bytes & 0x007F007FU) | 0x43004300U, off = (bytes & 0x00800080U) | 0x43004300U;
    __nv_bfloat162 difference =
        __hsub2(*reinterpret_cast<__nv_bfloat162 *>(&with), *reinterpret_cast<__nv_bfloat162 *>(&off));
    return *reinterpret_cast<uint32_t *>(&difference);
}

/* `count` tokens (1..8) from `position` on. */
template <int D, int C>
static __device__ __forceinline__ void attend_dense(state<D, C> &state, const query<D, C> &query, uint32_t slot,
                                                    uint32_t sights, uint32_t position, uint32_t count, bool cut) {
    constexpr int columns = C / 4, tiles = D / 16;
    using shape = dense_slot<D>;
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    float c[columns][4] = {};
#pragma unroll
    for (int block = 0; block < D / 16; block++) {
        uint2 k = load_shared2(slot + g * shape::k_pitch + 32 * block + 8 * t);
#pragma unroll
        for (int n = 0; n < columns; n++) {
            uint32_t bytes = query.word[n][block];
            multiply_bfloat(c[n], k.x, 0, k.y, 0, bytes_to_bfloat(__byte_perm(bytes, 0, 0x4140)),
                            bytes_to_bfloat(__byte_perm(bytes, 0, 0x4342)));
        }
    }
    float logit[columns], p[columns];
    bool high = false;
#pragma unroll
    for (int e = 0; e < columns; e++) {
        float product = C == 4 ? fmaf(c[0][0], 256.0F, c[0][1]) : fmaf(c[0][e], 256.0F, c[columns - 1][e]);
        logit[e] = product * query.scale[e];
        if (g >= count)
            logit[e] = -INFINITY;
    }
    if (cut) {
        const struct sight sight = sight_load(sights);
#pragma unroll
        for (int e = 0; e < columns; e++)
            if (position + g >= sight.limit<C>(e))
                logit[e] = -INFINITY;
    }
#pragma unroll
    for (int e = 0; e < columns; e++)
        high |= logit[e] - state.m[e] > HIGHEST_DENSE;
    if (__any_sync(WARP_LANES, high))
#pragma unroll
        for (int e = 0; e < columns; e++)
            move_reference<D, C>(state, e, greatest_of_rows(logit[e]), HIGHEST_DENSE, 0.0F);
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
    uint32_t written = (2 * t < count ? 0x0000FFFFU : 0U) | (2 * t + 1 < count ? 0xFFFF0000U : 0U);
    int matrix = lane >> 3;
#pragma unroll
    for (int i = 0; i < tiles; i += 2) {
        uint32_t v[4];
        int dim = dim_of<D>(i, 0) + (D == 64 ? 8 * (matrix >> 1) + 32 * (matrix & 1) : 8 * matrix);
        load_transposed(v, slot + shape::v + (lane & 7) * shape::v_pitch + 2 * dim);
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
