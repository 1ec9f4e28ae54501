/* SPDX-License-Identifier: Apache-2.0 */
/* What both pack kernels need. */
#ifndef OSCAR_KERNELS_CUDA_PACK_COMMON_CUH
#define OSCAR_KERNELS_CUDA_PACK_COMMON_CUH

#include "oscar/error.h"

#include "kernels/cuda/instructions.cuh"
#include "kernels/cuda/pack_params.h"
#include "kernels/cuda/planes.cuh"
#include "kernels/cuda/quantiser.cuh"

#define PACKED_RECORD_BYTES(d) (32 * (d) + 512)

/* Of {scale K, zero K, scale V, zero V} in a packed record. */
__device__ __forceinline__ uint32_t scale_offset(int d, uint32_t row) {
    return 32 * d + row / 16 * 128 + row % 8 * 16 + row / 8 % 2 * 8;
}

#endif
