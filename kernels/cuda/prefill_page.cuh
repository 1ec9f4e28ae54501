/* SPDX-License-Identifier: Apache-2.0 */
/* Pages in shared memory: packed records as they are with their scales unpacked, dense ones brought to the same form. */
#ifndef OSCAR_KERNELS_CUDA_PREFILL_PAGE_CUH
#define OSCAR_KERNELS_CUDA_PREFILL_PAGE_CUH

#include "kernels/cuda/prefill_tile.cuh"

/* V's scales relative to their largest as a power of two. By whole warps that have those of all tokens: lane l brings tokens
 * 16 (l / 8) + l % 8 and that + 8, and writes them where they are its own. */
template <int D>
static __device__ __forceinline__ void write_v_scales(struct shared<D> &mem, uint32_t parity, const float (&scale)[2],
                                                      bool own) {
    uint32_t lane = threadIdx.x % 32, token = lane / 8 * 16 + lane % 8;
    uint32_t largest = __reduce_max_sync(WARP, max(__float_as_uint(scale[0]), __float_as_uint(scale[1])));
    int exponent = exponent_above(__uint_as_float(largest), -120);
    if (own) {
        mem.v_scale[parity][token] = scale[0] * power_of_2(-exponent);
        mem.v_scale[parity][token + 8] = scale[1] * power_of_2(-exponent);
    }
    if (threadIdx.x == 0)
        mem.v_unit[parity] = power_of_2(exponent);
}

/* Starts the copy of a record. */
template <int D>
static __device__ __forceinline__ void fetch_packed(struct shared<D> &mem, uint32_t stage, cuda_page page,
                                                    uint64_t offset) {
    const uint8_t *from = reinterpret_cast<const uint8_t *>(cuda_page_address(page) + offset);
    uint8_t *to = mem.record[stage];
#pragma unroll
    for (uint32_t i = 16 * threadIdx.x; i < shape<D>::record_bytes; i += 16 * THREADS)
        copy_16(to + i, from + i);
    if (threadIdx.x == 0)
        mem.index[stage] = cuda_page_index(page);
}

/* The scales of a record that is there, each warp for a quarter of the tokens. Rows that no token has written may hold anything:
 * they become zeros. */
template <int D>
static __device__ __forceinline__ void prepare_packed(struct shared<D> &mem, uint32_t stage, uint32_t parity,
                                                      uint32_t rows) {
    uint32_t lane = threadIdx.x % 32, token = lane / 8 * 16 + lane % 8;
    uint4 raw = *reinterpret_cast<const uint4 *>(mem.record[stage] + 2 * shape<D>::code_bytes + 16 * lane);
    uint32_t k[2] = {token < rows ? raw.x : 0, token + 8 < rows ? raw.z : 0};
    uint32_t v[2] = {token < rows ? raw.y : 0, token + 8 < rows ? raw.w : 0};
    float v_scale[2] = {rotate_fp16::unpack(v[0]).x, rotate_fp16::unpack(v[1]).x};
    bool own = lane / 8 == threadIdx.x / 32;
    if (own) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float2 of = rotate_fp16::unpack(k[i]);
            mem.k_scale[parity][token + 8 * i] = make_float2(of.x / CODE_UNIT, of.y);
            mem.v_zero[parity][token + 8 * i] = __ushort_as_half(static_cast<uint16_t>(v[i] >> 16));
        }
    }
    write_v_scales<D>(mem, parity, v_scale, own);
}

/* A dense row's 16 elements of one lane, FP16 in units of a power of two such that the row's largest is just below 2^15; of K
 * divided by 4^3 / 4^f. Returns the unit of V. */
template <int D, bool K>
static __device__ __forceinline__ float convert_row(uint8_t *row, const uint4 (&from)[2], bool written, uint32_t part) {
    uint32_t word[8] = {from[0].x, from[0].y, from[0].z, from[0].w, from[1].x, from[1].y, from[1].z, from[1].w};
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        word[i] = written ? word[i] : 0;
        float2 two = rotate_bf16::unpack(word[i]);
        largest = fmaxf(largest, fmaxf(fabsf(two.x), fabsf(two.y)));
    }
    int exponent = exponent_above(lanes_max<D / 16>(largest), -100) - 15;
    float inverse = power_of_2(-exponent - (K ? 2 * (3 - static_cast<int>(part) / shape<D>::words) : 0));
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float2 two = rotate_bf16::unpack(word[i]);
        word[i] = rotate_fp16::pack(two.x * inverse, two.y * inverse);
    }
    reinterpret_cast<uint4 *>(row)[2 * part] = make_uint4(word[0], word[1], word[2], word[3]);
    reinterpret_cast<uint4 *>(row)[2 * part + 1] = make_uint4(word[4], word[5], word[6], word[7]);
    return power_of_2(exponent + (K ? 6 : 0));
}

/* A dense page in the same form, by the whole block, which ends it with a barrier. */
template <int D>
static __device__ void prepare_dense(struct shared<D> &mem, cuda_page page, uint64_t offset, uint32_t rows) {
    constexpr int lanes = D / 16; /* of a row */
    const uint8_t *from = reinterpret_cast<const uint8_t *>(cuda_page_address(page) + offset);
    uint32_t part = threadIdx.x % lanes;
#pragma unroll
    for (uint32_t token = threadIdx.x / lanes; token < TOKENS; token += THREADS / lanes) {
        const uint4 *k = reinterpret_cast<const uint4 *>(from + token * 2 * D) + 2 * part;
        const uint4 *v = k + TOKENS * D / 8;
        uint4 two_k[2] = {k[0], k[1]}, two_v[2] = {v[0], v[1]};
        float k_unit = convert_row<D, true>(mem.dense.k[token], two_k, token < rows, part);
        float v_unit = convert_row<D, false>(mem.dense.v[token], two_v, token < rows, part);
        if (part == 0) {
            mem.k_scale[0][token] = make_float2(k_unit, 0);
            mem.v_scale[0][token] = v_unit;
        }
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        uint32_t token = threadIdx.x / 8 * 16 + threadIdx.x % 8;
        float scale[2] = {mem.v_scale[0][token], mem.v_scale[0][token + 8]};
        write_v_scales<D>(mem, 0, scale, true);
    }
    __syncthreads();
}

#endif
