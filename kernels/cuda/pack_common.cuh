/* SPDX-License-Identifier: Apache-2.0 */
/* What both pack kernels need: copies into shared memory, the place of a row's scale. */
#ifndef OSCAR_KERNELS_CUDA_PACK_COMMON_CUH
#define OSCAR_KERNELS_CUDA_PACK_COMMON_CUH

#include "oscar/error.h"

#include "kernels/cuda/pack_params.h"
#include "kernels/cuda/planes.cuh"
#include "kernels/cuda/quantiser.cuh"

#define PACKED_RECORD_BYTES(d) (32 * (d) + 512)

/* Of {scale K, zero K, scale V, zero V} in a packed record. */
__device__ __forceinline__ uint32_t scale_offset(int d, uint32_t row) {
    return 32 * d + row / 16 * 128 + row % 8 * 16 + row / 8 % 2 * 8;
}

/* 16 bytes to shared memory, past the registers; there after copies_arrive() and a barrier. */
__device__ __forceinline__ void copy_async(void *shared, const void *global) {
    uint32_t to = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}

__device__ __forceinline__ void copies_arrive() { asm volatile("cp.async.wait_all;" ::: "memory"); }

#endif
