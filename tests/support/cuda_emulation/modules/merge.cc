/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cuda/merge.cu"

#include "tests/support/cuda_emulation/modules/module.h"

EMULATED_MODULE("merge", 0, EMULATED_KERNEL("merge", merge))
