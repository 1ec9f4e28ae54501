/* SPDX-License-Identifier: Apache-2.0 */
/* Two partial results over disjoint tokens become one. One warp a (row, head). */
#include "kernels/cuda/decode_params.h"
#include "kernels/cuda/instructions.cuh"

static __device__ __forceinline__ float element_float(uint16_t bits, bool fp16) {
    return fp16 ? half_floats(bits).x : bfloat_floats(bits).x;
}
static __device__ __forceinline__ uint16_t element_bits(float value, bool fp16) {
    return static_cast<uint16_t>(fp16 ? half_pair(value, 0.0F) : bfloat_pair(value, 0.0F));
}

extern "C" __global__ void __launch_bounds__(CUDA_MERGE_THREADS)
    merge(const __grid_constant__ struct cuda_merge_params params) {
    uint64_t column = blockIdx.x * static_cast<uint64_t>(CUDA_MERGE_THREADS / 32) + threadIdx.x / 32;
    uint32_t lane = threadIdx.x & 31;
    if (column >= static_cast<uint64_t>(params.rows) * params.heads)
        return;
    int64_t row = static_cast<int64_t>(column / params.heads), head = static_cast<int64_t>(column % params.heads);
    uint16_t *out =
        reinterpret_cast<uint16_t *>(params.out) + row * params.out_row_stride + head * params.out_head_stride;
    const uint16_t *other = reinterpret_cast<const uint16_t *>(params.other_out) + row * params.other_row_stride +
                            head * params.other_head_stride;
    float lse = params.lse[column], other_lse = params.other_lse[column];
    float greatest = fmaxf(lse, other_lse);
    bool any = greatest > -INFINITY;
    float weight = any ? expf(lse - greatest) : 0.0F, other_weight = any ? expf(other_lse - greatest) : 0.0F;
    float sum = weight + other_weight;
    float inverse = any ? 1.0F / sum : 0.0F;
    for (uint32_t i = lane; i < params.head_dim; i += 32) {
        /* Where there was no token the rows may hold anything. */
        float mine = weight > 0.0F ? weight * element_float(out[i], params.fp16) : 0.0F;
        float theirs = other_weight > 0.0F ? other_weight * element_float(other[i], params.fp16) : 0.0F;
        out[i] = element_bits((mine + theirs) * inverse, params.fp16);
    }
    __syncwarp();
    if (lane == 0)
        params.lse[column] = any ? greatest + logf(sum) : -INFINITY;
}
