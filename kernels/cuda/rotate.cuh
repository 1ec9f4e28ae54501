/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rotation of rows y = x R on the device.
 *
 * A row of D elements lies over LANES consecutive lanes of a warp, in chunks of 8 or 4: register 8c + i of lane t is element
 * 8 (LANES c + t) + i. So a row is read and written 16 or 8 bytes a lane.
 *
 * Hadamard: the stages and the last multiplication of kernels/rotate.h in their order, so the result is the host's to the bit.
 *
 * Matrix: m16n8k16 matrix instructions. R is split into two 16-bit terms, x's 16 bits are exact, sums are fp32: y_j is off by at
 * most 2^-16 sum |x_i R_ij| (found: a tenth of that), far below what BF16 rounds away. Which column is which n of the instruction
 * is free: chosen such that the result goes to memory 16 bytes a lane, in the arrangement above with LANES = 4.
 */
#ifndef OSCAR_KERNELS_CUDA_ROTATE_CUH
#define OSCAR_KERNELS_CUDA_ROTATE_CUH

#include "kernels/cuda/instructions.cuh"

#define ROTATE_WARP 0xFFFFFFFFU

/* `lane`: or any number that is the same but for multiples of LANES. */
template <int D, int LANES, int CHUNK = 8>
static __device__ __forceinline__ void rotate_hadamard(float (&x)[D / LANES], uint32_t lane = threadIdx.x) {
    constexpr int registers = D / LANES;
    static_assert(registers >= CHUNK, "no chunk is parted");
#pragma unroll
    for (int h = 1; h < CHUNK; h *= 2)
#pragma unroll
        for (int i = 0; i < registers; i++)
            if ((i & h) == 0) {
                float a = x[i], b = x[i + h];
                x[i] = a + b;
                x[i + h] = a - b;
            }
#pragma unroll
    for (int h = 1; h < LANES; h *= 2) {
        float sign = lane & h ? -1.0F : 1.0F;
#pragma unroll
        for (int i = 0; i < registers; i++)
            x[i] = fmaf(x[i], sign, __shfl_xor_sync(ROTATE_WARP, x[i], h)); /* the product is exact: one rounding */
    }
#pragma unroll
    for (int h = CHUNK; h < registers; h *= 2)
#pragma unroll
        for (int i = 0; i < registers; i++)
            if ((i & h) == 0) {
                float a = x[i], b = x[i + h];
                x[i] = a + b;
                x[i + h] = a - b;
            }
    constexpr float factor = D == 64 ? 0.125F : D == 128 ? 0.08838834764831845F : 0.0625F;
#pragma unroll
    for (int i = 0; i < registers; i++)
        x[i] *= factor;
}

/* An element of a worker's tensor, and the bits of two. */
static __device__ __forceinline__ float worker_float(uint32_t bits, bool fp16) {
    return fp16 ? half_floats(bits).x : __uint_as_float(bits << 16);
}
static __device__ __forceinline__ uint32_t worker_pair(float low, float high, bool fp16) {
    return fp16 ? half_pair(low, high) : bfloat_pair(low, high);
}

/* The two 16-bit types of worker tensors. */
struct rotate_bf16 {
    static constexpr float scale =
        1.0F; /* of the two terms of R: no element of an orthogonal matrix is greater than 1 */
    static __device__ __forceinline__ float2 unpack(uint32_t pair) { return bfloat_floats(pair); }
    static __device__ __forceinline__ uint32_t pack(float low, float high) { return bfloat_pair(low, high); }
    static __device__ __forceinline__ void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        multiply_bfloat(sum, a[0], a[1], a[2], a[3], b0, b1);
    }
};

struct rotate_fp16 {
    static constexpr float scale = 32768.0F; /* keeps small elements from losing bits to FP16's narrow exponent */
    static __device__ __forceinline__ float2 unpack(uint32_t pair) { return half_floats(pair); }
    static __device__ __forceinline__ uint32_t pack(float low, float high) { return half_pair(low, high); }
    static __device__ __forceinline__ void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        multiply_half(sum, a[0], a[1], a[2], a[3], b0, b1);
    }
};

/*
 * B operands of 32 columns ("a chunk") and 16 elements of the sum ("a step"): 4 instructions' worth, one entry a lane and
 * instruction: both registers of the upper terms, then of the lower ones. Instruction j's lane 4g + t holds rows 2t, 2t + 1,
 * 2t + 8, 2t + 9 of the step and column 8 (g / 2) + 2j + g % 2 of the chunk. The entry's place is swizzled so that writing meets
 * few banks twice.
 */
template <int D> static __device__ __forceinline__ int rotate_entry(int chunk, int step, int j, int lane) {
    return ((chunk * (D / 16) + step) * 4 + j) * 32 + (lane ^ j);
}

/* Columns first .. first + columns - 1 of R (row-major, D columns) to `entries`, D * columns / 4 of them, by the whole block,
 * which must meet at a barrier before it multiplies. `columns` is 32, 64 or 128. */
template <int D, class TYPE>
static __device__ __forceinline__ void rotate_matrix_load(uint4 *entries, const float *__restrict__ matrix,
                                                          uint32_t first, uint32_t columns) {
    constexpr int batch = 8; /* of entries a thread, fetched together */
    uint32_t shift = 31 - __clz(columns), count = D * columns / 4;
    for (uint32_t done = threadIdx.x; done < count; done += batch * blockDim.x) {
        float element[batch][4];
#pragma unroll
        for (int b = 0; b < batch; b++) {
            uint32_t i = min(done + b * blockDim.x, count - 1), step = i >> shift >> 2, t = i >> shift & 3;
            const float *from = matrix + (16 * step + 2 * t) * D + first + (i & (columns - 1));
#pragma unroll
            for (int e = 0; e < 4; e++)
                element[b][e] = __ldg(from + (8 * (e / 2) + e % 2) * D) * TYPE::scale;
        }
#pragma unroll
        for (int b = 0; b < batch; b++) {
            uint32_t i = done + b * blockDim.x, step = i >> shift >> 2, t = i >> shift & 3;
            uint32_t column = i & (columns - 1), n = column % 32, g = 2 * (n / 8) + n % 2, upper[2], lower[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float x = element[b][2 * half], y = element[b][2 * half + 1];
                upper[half] = TYPE::pack(x, y);
                float2 taken = TYPE::unpack(upper[half]);
                lower[half] = TYPE::pack(x - taken.x, y - taken.y);
            }
            if (i < count)
                entries[rotate_entry<D>(column / 32, step, n % 8 / 2, 4 * g + t)] =
                    make_uint4(upper[0], upper[1], lower[0], lower[1]);
        }
    }
}

/* One chunk of 32 columns of y for TILES * 16 rows, whose A operands are x. sum[m][j]: columns 8t + 2j, 8t + 2j + 1 of the chunk,
 * of row 16m + g and then of row 16m + 8 + g, in lane 4g + t. */
template <int D, class TYPE, int TILES>
static __device__ __forceinline__ void rotate_matrix(float (&sum)[TILES][4][4], const uint4 *entries, int chunk,
                                                     const uint32_t (&x)[TILES][D / 16][4]) {
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                sum[m][j][i] = 0.0F;
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
#pragma unroll
        for (int pair = 0; pair < 4; pair += 2) { /* so that no instruction waits for the one before it */
            uint4 b[2];
#pragma unroll
            for (int j = 0; j < 2; j++)
                b[j] = entries[rotate_entry<D>(chunk, step, pair + j, threadIdx.x % 32)];
#pragma unroll
            for (int i = 0; i < 2 * TILES; i++)
                TYPE::multiply(sum[i / 2][pair + i % 2], x[i / 2][step], b[i % 2].z, b[i % 2].w);
#pragma unroll
            for (int i = 0; i < 2 * TILES; i++)
                TYPE::multiply(sum[i / 2][pair + i % 2], x[i / 2][step], b[i % 2].x, b[i % 2].y);
        }
    }
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                sum[m][j][i] *= 1.0F / TYPE::scale;
}

#endif
