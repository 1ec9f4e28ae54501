/* SPDX-License-Identifier: Apache-2.0 */
/* Every function of the driver that the other files do not have: there, so that the backend loads, and not supported. */
#include "kernels/cuda/driver.h"

__attribute__((used)) static CUresult not_supported(void) { return CUDA_ERROR_NOT_SUPPORTED; }

#define TEXT_(name) #name
#define TEXT(name) TEXT_(name)
#define WEAK(name) __asm__(".weak " TEXT(name) "\n.set " TEXT(name) ", not_supported\n");
CUDA_DRIVER_FUNCTIONS(WEAK)
