/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A row's scale and zero, and where its codes change, in the operations of kernels/codec.c: fp32, IEEE division,
 * compiled without contraction.
 */
#ifndef OSCAR_KERNELS_CUDA_QUANTISER_CUH
#define OSCAR_KERNELS_CUDA_QUANTISER_CUH

#include <cuda_fp16.h>
#include <stdint.h>

struct quantiser {
    uint32_t bits; /* scale | zero << 16, as the page has them */
    float scale, zero;
};

/* False where the scale overflows binary16. `low` and `high` are the row's least and greatest element. */
__device__ __forceinline__ bool quantiser_make(float low, float high, float threshold, struct quantiser *ret) {
    low = (low > -threshold ? low : -threshold) + 0.0F; /* a minimum of -0 counts as +0 */
    high = high < threshold ? high : threshold;
    float step = (high - low) / 3.0F;
    step = fmaxf(step, threshold * 0x1p-10F);
    step = fmaxf(step, 0x1p-24F);
    __half scale = __float2half_rn(step);
    ret->scale = __half2float(scale);
    __half zero = __float2half_rn(-low / ret->scale);
    ret->zero = __half2float(zero);
    ret->bits = __half_as_ushort(scale) | (uint32_t)__half_as_ushort(zero) << 16;
    return __half_as_ushort(scale) < 0x7C00U;
}

/*
 * The least binary32 x whose code is at least `code` (1 to 3), so that coding is comparing. The oracle's code of x is
 * floor(RN(RN(RN(x / scale) + zero) + 0.5)), which rises with x; its roundings are undone from the outside in:
 *
 *   the sum with 0.5 is >= code where its first operand is >= code - 0.5, or for code 1, 0.5 - 2^-25, which ties and
 *   goes to 1;
 *   that operand, a sum rounded, is so where the exact sum is at or above the middle between that number and the one
 *   before (for code 1, above it: the tie goes to the even one before);
 *   so the quotient must be >= `above`, and x / scale lie above the middle between `above` and the number before. The
 *   scale times that middle is no binary32 number: its significand is an odd one of 25 bits times the scale's.
 *
 * Every intermediate here is exact in binary64; checked against the oracle by tests/gpu/gpu_pack.c.
 */
__device__ __forceinline__ float quantiser_edge(const struct quantiser *q, int code) {
    const double middle = code == 1 ? 0.5 - 3 * 0x1p-26 : code == 2 ? 1.5 - 0x1p-24 : 2.5 - 0x1p-23;
    double least = middle - (double)q->zero;
    float above = __double2float_ru(least);
    int up = above > 0 ? 1 : -1; /* to the next greater number, in steps of its bits; never 0 */
    if (code == 1 && (double)above == least)
        above = __int_as_float(__float_as_int(above) + up);
    float before = __int_as_float(__float_as_int(above) - up);
    return __double2float_ru(((double)above + (double)before) * 0.5 * (double)q->scale);
}

#endif
