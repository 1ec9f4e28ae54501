/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cuda/prefill.cu"

#include "tests/support/cuda_emulation/modules/module.h"

EMULATED_MODULE("prefill", 0, EMULATED_KERNEL("prefill_64", prefill_64), EMULATED_KERNEL("prefill_128", prefill_128),
                EMULATED_KERNEL("prefill_256", prefill_256))
