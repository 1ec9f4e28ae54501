/* SPDX-License-Identifier: Apache-2.0 */
/* One module for each head size and way of copying (__CUDA_ARCH__): their kernels have the same names, which MODULE makes
 * different ones. */
#define JOINED_(a, b) a##_##b
#define JOINED(a, b) JOINED_(a, b)
#define decode_4_0 JOINED(decode_4_0, MODULE)
#define decode_4_8 JOINED(decode_4_8, MODULE)
#define decode_4_16 JOINED(decode_4_16, MODULE)
#define decode_8_0 JOINED(decode_8_0, MODULE)
#define decode_8_8 JOINED(decode_8_8, MODULE)
#define decode_8_16 JOINED(decode_8_16, MODULE)

#include "kernels/cuda/decode.cu"

#include "tests/support/cuda_emulation/modules/module.h"

#define TEXT_(text) #text
#define TEXT(text) TEXT_(text)

EMULATED_MODULE("decode_" TEXT(DECODE_HEAD_DIM), __CUDA_ARCH__ / 10, EMULATED_KERNEL("decode_4_0", decode_4_0),
                EMULATED_KERNEL("decode_4_8", decode_4_8), EMULATED_KERNEL("decode_4_16", decode_4_16),
                EMULATED_KERNEL("decode_8_0", decode_8_0), EMULATED_KERNEL("decode_8_8", decode_8_8),
                EMULATED_KERNEL("decode_8_16", decode_8_16))
