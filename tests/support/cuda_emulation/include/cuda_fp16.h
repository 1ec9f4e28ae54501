/* SPDX-License-Identifier: Apache-2.0 */
/* In place of CUDA's header: what the kernels use of it. */
#ifndef OSCAR_TESTS_CUDA_EMULATION_FP16_H
#define OSCAR_TESTS_CUDA_EMULATION_FP16_H

#include "proto/half.h"

struct __half {
    unsigned short bits;
};
struct alignas(4) __half2 {
    __half x, y;
};

static inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
static inline unsigned short __half_as_ushort(__half x) { return x.bits; }
static inline __half __float2half_rn(float x) { return {oscar_half_from_float(x)}; }
static inline float __half2float(__half x) { return oscar_float_from_half(x.bits); }
static inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
static inline float2 __half22float2(__half2 pair) { return {__half2float(pair.x), __half2float(pair.y)}; }

#endif
