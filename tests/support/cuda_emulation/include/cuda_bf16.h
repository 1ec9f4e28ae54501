/* SPDX-License-Identifier: Apache-2.0 */
/* In place of CUDA's header: what the kernels use of it. */
#ifndef OSCAR_TESTS_CUDA_EMULATION_BF16_H
#define OSCAR_TESTS_CUDA_EMULATION_BF16_H

#include "proto/half.h"

struct __nv_bfloat16 {
    unsigned short bits;
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
static inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {oscar_bfloat_from_float(x)}; }
static inline float __bfloat162float(__nv_bfloat16 x) { return oscar_float_from_bfloat(x.bits); }
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
static inline __nv_bfloat162 __hsub2(__nv_bfloat162 a, __nv_bfloat162 b) {
    return __floats2bfloat162_rn(__bfloat162float(a.x) - __bfloat162float(b.x),
                                 __bfloat162float(a.y) - __bfloat162float(b.y));
}

#endif
