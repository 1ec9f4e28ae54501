/* SPDX-License-Identifier: Apache-2.0 */
/* One page in shared memory against the 16 columns of a warp: scores, softmax, values. */
#ifndef OSCAR_KERNELS_CUDA_PREFILL_PRODUCTS_CUH
#define OSCAR_KERNELS_CUDA_PREFILL_PRODUCTS_CUH

#include "kernels/cuda/prefill_tile.cuh"

/* --- scores ----------------------------------------------------------------------------------------------------------------- */

/* Both terms of the warp's queries in one step of 16 dims. */
template <int D>
static __device__ __forceinline__ void load_query(uint32_t (&upper)[4], uint32_t (&lower)[4],
                                                  const struct shared<D> &mem, int step) {
    uint32_t lane = threadIdx.x % 32;
    uint32_t address =
        shared_address(mem.rows[threadIdx.x / 32 * WARP_COLUMNS + lane % 16]) + lane / 16 * 16 + step * 32;
    load_matrices(upper, address);
    load_matrices(lower, address + 2 * D);
}

/* score[n]: tokens 8n + 2t, 8n + 2t + 1 of column g, then of column g + 8; in units of CODE_UNIT * scale K. */
template <int D>
static __device__ __forceinline__ void packed_products(float (&score)[8][4], const struct shared<D> &mem,
                                                       const uint8_t *record) {
    constexpr int words = shape<D>::words;
    constexpr int many = D == 256 ? 4 : 8; /* tiles of 8 tokens at a time */
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int first = 0; first < 8; first += many) {
        uint32_t word[many][words];
#pragma unroll
        for (int n = 0; n < many; n += 2) {
            const uint32_t *from =
                reinterpret_cast<const uint32_t *>(record) + ((first + n) / 2 * 32 + lane) * 2 * words;
            if constexpr (words == 1) {
                uint2 two = *reinterpret_cast<const uint2 *>(from);
                word[n][0] = two.x;
                word[n + 1][0] = two.y;
            } else {
#pragma unroll
                for (int w = 0; w < 2 * words; w += 4) {
                    uint4 four = *reinterpret_cast<const uint4 *>(from + w);
                    word[n + w / words][w % words] = four.x;
                    word[n + (w + 1) / words][(w + 1) % words] = four.y;
                    word[n + (w + 2) / words][(w + 2) % words] = four.z;
                    word[n + (w + 3) / words][(w + 3) % words] = four.w;
                }
            }
        }
#pragma unroll
        for (int w = 0; w < words; w++) {
            uint32_t low[many], high[many];
#pragma unroll
            for (int n = 0; n < many; n++) {
                low[n] = __byte_perm(word[n][w], 0, 0x4140);
                high[n] = __byte_perm(word[n][w], 0, 0x4342);
            }
#pragma unroll
            for (int f = 0; f < 4; f++) {
                const uint32_t mask = 0x00030003U << 2 * f;
                uint32_t upper[4], lower[4];
                load_query<D>(upper, lower, mem, words * f + w);
#pragma unroll
                for (int n = 0; n < many; n++)
                    rotate_fp16::multiply(score[first + n], upper, low[n] & mask, high[n] & mask);
#pragma unroll
                for (int n = 0; n < many; n++)
                    rotate_fp16::multiply(score[first + n], lower, low[n] & mask, high[n] & mask);
            }
        }
    }
}

template <int D>
static __device__ __forceinline__ void dense_products(float (&score)[8][4], const struct shared<D> &mem) {
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
        uint32_t upper[4], lower[4];
        load_query<D>(upper, lower, mem, step);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            uint2 k = *reinterpret_cast<const uint2 *>(&mem.dense.k[8 * n + lane / 4][32 * step + lane % 4 * 8]);
            rotate_fp16::multiply(score[n], upper, k.x, k.y);
            rotate_fp16::multiply(score[n], lower, k.x, k.y);
        }
    }
}

/* Adds the turning part of the centre, in units of the columns. */
template <int D>
static __device__ __forceinline__ void add_centre(float (&score)[8][4], const struct shared<D> &mem,
                                                  const float2 (&page_turn)[4], uint32_t pairs) {
    uint32_t lane = threadIdx.x % 32, column = threadIdx.x / 32 * WARP_COLUMNS + lane / 4;
#pragma unroll
    for (int eight = 0; eight < 2; eight++) {
        if (8 * eight >= pairs)
            break;
        uint32_t upper[4], lower[4];
#pragma unroll
        for (int i = 0; i < 4; i++) { /* column g and g + 8 of pair t, then of pair t + 4 */
            float2 of = mem.turn[column + i % 2 * 8][8 * eight + i / 2 * 4 + lane % 4],
                   by = page_turn[2 * eight + i / 2];
            float c = fmaf(of.x, by.x, of.y * by.y), s = fmaf(of.y, by.x, -(of.x * by.y));
            upper[i] = rotate_fp16::pack(c, s);
            float2 taken = rotate_fp16::unpack(upper[i]);
            lower[i] = rotate_fp16::pack(c - taken.x, s - taken.y);
        }
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const __half2 *table = &mem.row_turn[8 * n + lane / 4][8 * eight + lane % 4];
            uint32_t b0 = *reinterpret_cast<const uint32_t *>(table);
            uint32_t b1 = *reinterpret_cast<const uint32_t *>(table + 4);
            rotate_fp16::multiply(score[n], upper, b0, b1);
            rotate_fp16::multiply(score[n], lower, b0, b1);
        }
    }
}

/* Products to scores in units of the columns. */
template <int D>
static __device__ __forceinline__ void scale_products(float (&score)[8][4], const struct shared<D> &mem,
                                                      uint32_t parity, const float (&sum)[2], const float (&sigma)[2]) {
#pragma unroll
    for (int n = 0; n < 8; n++) {
        /* {scale, zero} of two tokens */
        float4 k = *reinterpret_cast<const float4 *>(&mem.k_scale[parity][8 * n + threadIdx.x % 4 * 2]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            score[n][2 * half] = fmaf(fmaf(-k.y, sum[half], score[n][2 * half]), k.x, sigma[half]);
            score[n][2 * half + 1] = fmaf(fmaf(-k.w, sum[half], score[n][2 * half + 1]), k.z, sigma[half]);
        }
    }
}

/* p * scale V as A operands of two terms: [i] is that of tokens 16i .. 16i + 15. */
struct weights {
    uint32_t upper[4][4], lower[4][4];
};

/* Scores to weights. What the columns have so far moves to their new max. */
template <int D>
static __device__ __forceinline__ void soften(struct weights &weights, float (&score)[8][4], struct partial<D> &partial,
                                              const struct columns &columns, const struct shared<D> &mem,
                                              uint32_t parity, uint32_t position) {
    uint32_t token = threadIdx.x % 4 * 2;
    if (position + TOKENS > columns.least) {
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (position + 8 * n + token + i % 2 >= columns.visible[i / 2])
                    score[n][i] = -INFINITY;
    }
    float shrink[2], base[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float top = -INFINITY;
#pragma unroll
        for (int n = 0; n < 8; n++)
            top = fmaxf(top, fmaxf(score[n][2 * half], score[n][2 * half + 1]));
        float max = fmaxf(partial.max[half], lanes_max<4>(top) * columns.unit[half]);
        base[half] = max == -INFINITY ? 0 : max; /* a column that sees nothing yet */
        shrink[half] = exp2_approx(partial.max[half] - base[half]);
        partial.max[half] = max;
        partial.sum[half] *= shrink[half];
    }
    if (__any_sync(WARP, shrink[0] != 1 || shrink[1] != 1)) {
#pragma unroll
        for (int j = 0; j < D / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                partial.out[j][i] *= shrink[i / 2];
    }
#pragma unroll
    for (int n = 0; n < 8; n++) {
        float2 v = *reinterpret_cast<const float2 *>(&mem.v_scale[parity][8 * n + token]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float a = exp2_approx(fmaf(columns.unit[half], score[n][2 * half], -base[half]));
            float b = exp2_approx(fmaf(columns.unit[half], score[n][2 * half + 1], -base[half]));
            partial.sum[half] += a + b;
            uint32_t upper = rotate_fp16::pack(a * v.x, b * v.y);
            float2 taken = rotate_fp16::unpack(upper);
            weights.upper[n / 2][n % 2 * 2 + half] = upper;
            weights.lower[n / 2][n % 2 * 2 + half] = rotate_fp16::pack(fmaf(a, v.x, -taken.x), fmaf(b, v.y, -taken.y));
        }
    }
}

/* --- values ----------------------------------------------------------------------------------------------------------------- */

template <int D>
static __device__ __forceinline__ void add_packed_values(struct partial<D> &partial, const struct weights &weights,
                                                         const struct shared<D> &mem, const uint8_t *record,
                                                         uint32_t parity) {
    constexpr int words = shape<D>::words;
    uint32_t lane = threadIdx.x % 32;
    float zero[4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const __half *from = &mem.v_zero[parity][16 * i + lane % 4 * 2];
        uint32_t b0 = lane < 4 ? *reinterpret_cast<const uint32_t *>(from) : 0;
        uint32_t b1 = lane < 4 ? *reinterpret_cast<const uint32_t *>(from + 8) : 0;
        rotate_fp16::multiply(zero, weights.upper[i], b0, b1);
        rotate_fp16::multiply(zero, weights.lower[i], b0, b1);
    }
    /* Column 0 of the product, which the first lane of four has. */
    float first[2] = {-CODE_UNIT * __shfl_sync(WARP, zero[0], lane & ~3U),
                      -CODE_UNIT * __shfl_sync(WARP, zero[2], lane & ~3U)};
    float unit = mem.v_unit[parity] / CODE_UNIT;
    uint32_t word[4][2 * words];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t *from =
            reinterpret_cast<const uint32_t *>(record + shape<D>::code_bytes) + (i * 32 + lane) * 2 * words;
        if constexpr (words == 1) {
            uint2 two = *reinterpret_cast<const uint2 *>(from);
            word[i][0] = two.x;
            word[i][1] = two.y;
        } else {
#pragma unroll
            for (int w = 0; w < 2 * words; w += 4) {
                uint4 four = *reinterpret_cast<const uint4 *>(from + w);
                word[i][w] = four.x;
                word[i][w + 1] = four.y;
                word[i][w + 2] = four.z;
                word[i][w + 3] = four.w;
            }
        }
    }
#pragma unroll
    for (int r = 0; r < words; r++)
#pragma unroll
        for (int upper = 0; upper < 2; upper++) { /* the byte that holds the codes */
            float sum[4][4];
#pragma unroll
            for (int f = 0; f < 4; f++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    sum[f][i] = first[i / 2] * power_of_2(2 * f);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t low = word[i][r] >> 8 * upper, high = word[i][words + r] >> 8 * upper;
#pragma unroll
                for (int f = 0; f < 4; f++) {
                    const uint32_t mask = 0x00030003U << 2 * f;
                    rotate_fp16::multiply(sum[f], weights.upper[i], low & mask, high & mask);
                    rotate_fp16::multiply(sum[f], weights.lower[i], low & mask, high & mask);
                }
            }
#pragma unroll
            for (int f = 0; f < 4; f++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float &out = partial.out[words * (4 * upper + f) + r][i];
                    out = fmaf(sum[f][i], unit * power_of_2(-2 * f), out);
                }
        }
}

template <int D>
static __device__ __forceinline__ void add_dense_values(struct partial<D> &partial, const struct weights &weights,
                                                        const struct shared<D> &mem) {
    uint32_t lane = threadIdx.x % 32;
    float unit = mem.v_unit[0];
#pragma unroll
    for (int j = 0; j < D / 8; j += 2) {
        float sum[2][4] = {};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t v[4];
            load_transposed(v, shared_address(&mem.dense.v[16 * i + lane % 16][16 * j + lane / 16 * 16]));
            rotate_fp16::multiply(sum[0], weights.upper[i], v[0], v[1]);
            rotate_fp16::multiply(sum[1], weights.upper[i], v[2], v[3]);
            rotate_fp16::multiply(sum[0], weights.lower[i], v[0], v[1]);
            rotate_fp16::multiply(sum[1], weights.lower[i], v[2], v[3]);
        }
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                partial.out[j + k][i] = fmaf(sum[k][i], unit, partial.out[j + k][i]);
    }
}

#endif
