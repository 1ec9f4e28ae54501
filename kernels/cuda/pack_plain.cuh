/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows that are coded as they lie, rounded to nearest: V, and K without a centre and without feedback. A block takes
 * one side of one record, a thread (of head size 256 two) a row, as bit planes in registers: the clip rank, the codes
 * and both byte orders of the page come from them. Logic operations, eight an element, bound it as much as the memory.
 */
#ifndef OSCAR_KERNELS_CUDA_PACK_PLAIN_CUH
#define OSCAR_KERNELS_CUDA_PACK_PLAIN_CUH

#include "kernels/cuda/pack_common.cuh"

/*
 * Which dims stand in a group of 32, eight neighbouring ones (a vector) at a time, so that the group's codes are whole
 * words of the page: of K the words (w, t) and (w, t + 1) of a row, group = 2w + t/2; of V half of the bits
 * (i = 4a .. 4a + 3) of all halves (r, g), group = 2r + a.
 */
template <int D> __device__ __forceinline__ int plain_vector(bool side_v, int group, int j) {
    constexpr int W = D / 64;
    return side_v ? W * (4 * (group & 1) + j) + (group >> 1) : 2 * W * j + group;
}

/* Element e of vector j becomes bit 16 (e & 1) + 8 (e >> 1 & 1) + 2j + (e >> 2) of the planes. */
__device__ __forceinline__ void plain_place(uint32_t (&words)[PLANES], int j, uint4 vector) {
    words[2 * j] = vector.x;
    words[2 * j + 8] = vector.y;
    words[2 * j + 1] = vector.z;
    words[2 * j + 9] = vector.w;
}

/* The codes of a group's 32 elements, those with e < 4 in ret[0] and the others in ret[1]: element (e, j) at bits
 * 16 (e & 1) + 8 (e >> 1 & 1) + 2j and the next one. */
__device__ __forceinline__ void plain_codes(const uint32_t (&planes)[PLANES], const struct plane_edge (&edge)[3],
                                            uint32_t (&ret)[2]) {
    uint32_t one = planes_at_least(planes, edge[0]);
    uint32_t high = planes_at_least(planes, edge[1]);
    uint32_t three = planes_at_least(planes, edge[2]);
    uint32_t low = one ^ high ^ three;
    ret[0] = bits_chosen(0x55555555U, low, high << 1);
    ret[1] = bits_chosen(0x55555555U, low >> 1, high);
}

template <int D> __device__ __forceinline__ void pack_plain(const struct cuda_pack_params &params) {
    constexpr int W = D / 64;
    constexpr int LANES = D > 128 ? 2 : 1; /* that share a row */
    constexpr int GROUPS = D / 32 / LANES; /* of a lane */
    constexpr int THREADS = CUDA_PACK_PLAIN_THREADS(D);
    constexpr int STRIDE = 2 * D + 16; /* of a row in shared memory: neighbours begin in other banks */
    uint4 *shared = (uint4 *)block_memory();
    char *rows = (char *)shared;
    const int thread = threadIdx.x;
    const uint32_t record = blockIdx.x, item = blockIdx.y;
    const bool side_v = blockIdx.z == 0;
    const struct cuda_head &head = params.calibration.heads[record];
    if (!side_v && (head.feedback || head.centre_static))
        return;

    const uint8_t *from = params.dense[item] + (size_t)record * (256 * D) + (side_v ? 128 * D : 0) + thread * 16;
    char *to_row = rows + thread / (D / 8) * STRIDE + thread % (D / 8) * 16;
#pragma unroll
    for (int i = 0; i < 8 * D / THREADS; i++)
        copy_16(to_row + i * (THREADS / (D / 8) * STRIDE), from + i * (THREADS * 16));
    const uint32_t rank = side_v ? head.rank_v : head.rank_k;
    copies_arrive();
    __syncthreads();

    const int row = thread / LANES;
    const int first_group = thread % LANES * GROUPS;
    uint32_t planes[GROUPS][PLANES];
    uint32_t lows, highs;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int at = plain_vector<D>(side_v, first_group + g, j);
            plain_place(planes[g], j, *(const uint4 *)(rows + row * STRIDE + at * 16));
        }
        if (g == 0)
            lows = highs = planes[0][0];
#pragma unroll
        for (int i = 0; i < PLANES; i++) {
            lows = bfloat_least(lows, planes[g][i]);
            highs = bfloat_greatest(highs, planes[g][i]);
        }
        planes_make(planes[g]);
    }
    if (LANES == 2) {
        lows = bfloat_least(lows, __shfl_xor_sync(0xFFFFFFFFU, lows, 1));
        highs = bfloat_greatest(highs, __shfl_xor_sync(0xFFFFFFFFU, highs, 1));
    }
    float low = __uint_as_float(bfloat_least(lows, lows << 16) & 0xFFFF0000U);
    float high = __uint_as_float(bfloat_greatest(highs, highs << 16) & 0xFFFF0000U);

    uint32_t candidates[GROUPS];
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
        candidates[g] = ~0U;
    uint32_t from_top = D - rank;
    uint32_t threshold = planes_select<15, LANES>(planes, candidates, from_top);
    struct quantiser quantiser;
    bool fits = quantiser_make(low, high, __uint_as_float(threshold << 16), &quantiser);
    if (!(fits && isfinite(low) && isfinite(high)))
        params.status[item] = OSCAR_ERR_NOT_FINITE;
    const struct plane_edge edge[3] = {planes_edge(quantiser_edge(&quantiser, 1)),
                                       planes_edge(quantiser_edge(&quantiser, 2)),
                                       planes_edge(quantiser_edge(&quantiser, 3))};

    __syncthreads(); /* the rows are in registers: their place takes the codes */
    uint32_t tile = row / 16;
#pragma unroll
    for (int g = 0; g < GROUPS; g += 2) {
        uint32_t a[2], b[2];
        plain_codes(planes[g], edge, a);
        plain_codes(planes[g + 1], edge, b);
        int group = first_group + g;
        if (side_v) {
            uint32_t half = row / 8 % 2, t = row / 2 % 4;
            char *to = rows + (tile * 32 + t) * (8 * W) + half * (4 * W) + (group >> 1) * 4 + row % 2 * 2;
#pragma unroll
            for (int pair = 0; pair < 4; pair++) { /* of g */
                uint32_t two = __byte_perm(a[pair >> 1], b[pair >> 1], pair & 1 ? 0x7351 : 0x6240);
                *(uint16_t *)(to + 2 * pair * (4 * 8 * W)) = (uint16_t)two;
                *(uint16_t *)(to + (2 * pair + 1) * (4 * 8 * W)) = (uint16_t)(two >> 16);
            }
        } else {
            uint32_t half = row / 8 % 2, line = row % 8;
            char *to = rows + (tile * 32 + 4 * line) * (8 * W) + half * (4 * W) + (group >> 1) * 4;
#pragma unroll
            for (int t = 0; t < 4; t++)
                *(uint32_t *)(to + t * (8 * W)) = __byte_perm(t < 2 ? a[t % 2] : b[t % 2], 0, 0x3120);
        }
    }
    uint8_t *packed = params.packed[item] + (size_t)record * PACKED_RECORD_BYTES(D);
    if (thread % LANES == 0)
        *(uint32_t *)(packed + scale_offset(D, row) + (side_v ? 4 : 0)) = quantiser.bits;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < D / THREADS; i++)
        ((uint4 *)(packed + (side_v ? 16 * D : 0)))[i * THREADS + thread] = shared[i * THREADS + thread];
}

#endif
