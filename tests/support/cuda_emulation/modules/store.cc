/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cuda/store.cu"

#include "tests/support/cuda_emulation/modules/module.h"

#define BOTH(kernel) EMULATED_KERNEL(#kernel "_bf16", kernel##_bf16), EMULATED_KERNEL(#kernel "_fp16", kernel##_fp16)

EMULATED_MODULE("store", 0, BOTH(store_hadamard_64), BOTH(store_hadamard_128), BOTH(store_hadamard_256),
                BOTH(store_any_64), BOTH(store_any_128), BOTH(store_any_256),
                EMULATED_KERNEL("store_inspect", store_inspect))
