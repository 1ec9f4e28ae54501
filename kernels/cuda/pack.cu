/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dense pages to packed ones, byte for byte as kernels/codec.c makes them: no contraction, no flush to zero, IEEE
 * division (the image is compiled with --fmad=false). Two kernels over the same items; pack_params.h says which rows
 * each takes.
 */
#include "kernels/cuda/pack_plain.cuh"
#include "kernels/cuda/pack_shaped.cuh"

#define PACK_KERNELS(d)                                                                                                \
    extern "C" __global__ void __launch_bounds__(CUDA_PACK_PLAIN_THREADS(d))                                           \
        pack_plain_##d(const __grid_constant__ struct cuda_pack_params params) {                                       \
        pack_plain<d>(params);                                                                                         \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(CUDA_PACK_SHAPED_THREADS(d), 512 / (d))                               \
        pack_shaped_##d(const __grid_constant__ struct cuda_pack_params params) {                                      \
        pack_shaped<d>(params);                                                                                        \
    }

PACK_KERNELS(64)
PACK_KERNELS(128)
PACK_KERNELS(256)
