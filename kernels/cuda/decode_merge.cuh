/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Partial results. A warp parks what it has of a segment in one of its slots: o of each column [columns][D + padding], then m and
 * l [columns]. Parked parts of one segment are merged in the order of the warps, one warp a column; where a segment
 * extends over several slices, the result goes to global memory and who arrives last merges in the order of the slices.
 */
#ifndef OSCAR_KERNELS_CUDA_DECODE_MERGE_CUH
#define OSCAR_KERNELS_CUDA_DECODE_MERGE_CUH

#include "kernels/cuda/decode_state.cuh"

/* Padding so that the lanes that write together fall in different banks. */
template <int D, int C> struct parked {
    static constexpr int pitch = D + (C == 4 ? 8 : 4), m = C * pitch, l = m + C;
    static_assert(4 * (l + C) <= CUDA_DECODE_SLOT_BYTES(D), "a slot holds it");
};

template <int D, int C> static __device__ __forceinline__ void park(const state<D, C> &state, uint32_t slot) {
    using shape = parked<D, C>;
    const int lane = static_cast<int>(rare_lane()), g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int e = 0; e < C / 4; e++) {
        float l = state.l[e], z = state.z[e];
#pragma unroll
        for (int h = 4; h < 32; h *= 2) {
            l += __shfl_xor_sync(WARP_LANES, l, h);
            z += __shfl_xor_sync(WARP_LANES, z, h);
        }
        int column = t * (C / 4) + e;
        if (g == 0) {
            store_shared(slot + 4 * (shape::m + column), state.m[e]);
            store_shared(slot + 4 * (shape::l + column), l);
        }
#pragma unroll
        for (int i = 0; i < D / 16; i++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                store_shared(slot + 4 * (column * shape::pitch + dim_of<D>(i, half) + g), state.sum[i][half][e] - z);
    }
}

static __device__ __forceinline__ float greatest_of_warp(float x) {
#pragma unroll
    for (int h = 16; h > 0; h /= 2)
        x = fmaxf(x, __shfl_xor_sync(WARP_LANES, x, h));
    return x;
}

/* Column c of the parts in the slots that lanes `members` name, in their order. */
template <int D, int C>
static __device__ __forceinline__ void merge_parts(uint32_t members, uint32_t slot, int c, float (&o)[row<D>::values],
                                                   float &m, float &l) {
    using shape = parked<D, C>;
    const int lane = static_cast<int>(rare_lane());
    bool mine = members >> lane & 1;
    float part_m = NO_REFERENCE, part_l = 0.0F;
    if (mine) {
        part_m = __uint_as_float(load_shared(slot + 4 * (shape::m + c)));
        part_l = __uint_as_float(load_shared(slot + 4 * (shape::l + c)));
    }
    m = greatest_of_warp(part_m);
    float factor = mine ? exp2_approx(part_m - m) : 0.0F;
    l = sum_over_warp(factor * part_l);
#pragma unroll
    for (int i = 0; i < row<D>::values; i++)
        o[i] = 0.0F;
    constexpr int ahead = D == 256 ? 6 : 12; /* parts on their way together */
    for (uint32_t left = members; left != 0;) {
        float4 values[ahead][row<D>::chunks];
        float share[ahead];
#pragma unroll
        for (int x = 0; x < ahead; x++) {
            int from = left != 0 ? __ffs(static_cast<int>(left)) - 1 : __ffs(static_cast<int>(members)) - 1;
            float its = __shfl_sync(WARP_LANES, factor, from);
            uint32_t at = __shfl_sync(WARP_LANES, slot, from) + 4 * (c * shape::pitch + row<D>::own(lane));
            share[x] = left != 0 ? its : 0.0F;
            left &= left - 1;
#pragma unroll
            for (int chunk = 0; chunk < row<D>::chunks; chunk++)
                values[x][chunk] = load_shared_floats(at + 512 * chunk);
        }
#pragma unroll
        for (int x = 0; x < ahead; x++)
            add_row<D>(o, share[x], values[x]);
    }
}

/* Where slice `slice` of a head keeps its part of a segment that begins in slice `from`: one that came from an earlier slice, or
 * one that goes on to a later one. */
template <int D, int C>
static __device__ __forceinline__ float *partial_of(const struct cuda_decode_params &params, uint32_t kv_head,
                                                    uint32_t slice, uint32_t from, int c) {
    uint64_t index = ((static_cast<uint64_t>(kv_head) * params.slice_count + slice) * 2 + (slice == from)) * C + c;
    return params.partials + index * CUDA_DECODE_PARTIAL_FLOATS(D);
}

/* Leaves a slice's part of column c; the last of slices from .. to merges all of them and returns true. */
template <int D, int C>
static __device__ __forceinline__ bool merge_slices(const struct cuda_decode_params &params, uint32_t kv_head,
                                                    uint32_t slice, uint32_t from, uint32_t to, int c,
                                                    float (&o)[row<D>::values], float &m, float &l) {
    constexpr int ahead = D == 256 ? 8 : 16; /* parts on their way together */
    const int lane = static_cast<int>(rare_lane()), own = row<D>::own(lane);
    float *mine = partial_of<D, C>(params, kv_head, slice, from, c);
    if (lane < row<D>::lanes)
#pragma unroll
        for (int chunk = 0; chunk < row<D>::chunks; chunk++)
            __stcg(reinterpret_cast<float4 *>(mine + own + 128 * chunk),
                   make_float4(o[4 * chunk], o[4 * chunk + 1], o[4 * chunk + 2], o[4 * chunk + 3]));
    if (lane == 0)
        __stcg(reinterpret_cast<float2 *>(mine + D), make_float2(m, l));
    __syncwarp();
    uint32_t *counter = params.arrivals + (static_cast<uint64_t>(kv_head) * params.slice_count + from) * C + c;
    uint32_t before = 0;
    if (lane == 0) {
        before = arrive(counter);
        if (before == to - from)
            *counter = 0;
    }
    before = __shfl_sync(WARP_LANES, before, 0);
    if (before != to - from)
        return false;
    m = NO_REFERENCE;
    l = 0.0F;
#pragma unroll
    for (int i = 0; i < row<D>::values; i++)
        o[i] = 0.0F;
#pragma unroll 1
    for (uint32_t first = from; first <= to; first += ahead) {
        float4 values[ahead][row<D>::chunks];
        float2 part = make_float2(NO_REFERENCE, 0.0F);
        if (lane < ahead && first + lane <= to)
            part =
                __ldcg(reinterpret_cast<const float2 *>(partial_of<D, C>(params, kv_head, first + lane, from, c) + D));
#pragma unroll
        for (int x = 0; x < ahead; x++)
#pragma unroll
            for (int chunk = 0; chunk < row<D>::chunks; chunk++)
                values[x][chunk] = __ldcg(reinterpret_cast<const float4 *>(
                    partial_of<D, C>(params, kv_head, min(first + x, to), from, c) + own + 128 * chunk));
        const float m_before = m;
        m = fmaxf(m, greatest_of_warp(part.x));
        const float shrink = exp2_approx(m_before - m), factor = first + lane <= to ? exp2_approx(part.x - m) : 0.0F;
        l = fmaf(l, shrink, sum_over_warp(factor * part.y));
#pragma unroll
        for (int i = 0; i < row<D>::values; i++)
            o[i] *= shrink;
#pragma unroll
        for (int x = 0; x < ahead; x++)
            add_row<D>(o, __shfl_sync(WARP_LANES, factor, x), values[x]);
    }
    return true;
}

/* Merges the parts of column c of a segment that lanes `members` know the slots of, and, where it extends over more slices than
 * this one, the slices' parts, and finishes the result by finish(place, o, m, l). */
template <int D, int C, typename Finish>
static __device__ __forceinline__ void
finish_parts(const struct cuda_decode_params &params, uint32_t kv_head, uint32_t slice, uint32_t from, uint32_t to,
             uint32_t item, uint32_t block, int c, uint32_t members, uint32_t slot, Finish finish) {
    const struct result_place place = result_place_of(params, kv_head, item, block * C + c);
    float o[row<D>::values], m, l;
    merge_parts<D, C>(members, slot, c, o, m, l);
    if (from == to || merge_slices<D, C>(params, kv_head, slice, from, to, c, o, m, l))
        finish(place, o, m, l);
}

#endif
