/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cuda/pack.cu"

#include "tests/support/cuda_emulation/modules/module.h"

#define KERNEL(kernel) EMULATED_KERNEL(#kernel, kernel)

EMULATED_MODULE("pack", 0, KERNEL(pack_plain_64), KERNEL(pack_plain_128), KERNEL(pack_plain_256),
                KERNEL(pack_shaped_64), KERNEL(pack_shaped_128), KERNEL(pack_shaped_256))
