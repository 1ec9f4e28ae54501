/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bit planes: 32 elements of 16 bits each as 16 words, word b with bit b of every element. In this form the exact clip
 * rank is a radix selection that counts bits, and comparing 32 elements with one number takes one operation a bit.
 */
#ifndef OSCAR_KERNELS_CUDA_PLANES_CUH
#define OSCAR_KERNELS_CUDA_PLANES_CUH

#include <stdint.h>

#include "kernels/cuda/instructions.cuh"

#define PLANES 16
#define SIGN_PLANE 15

/* words[i] holds two elements; afterwards bit i of words[b] is bit b of the low one, bit 16 + i of the high one. */
__device__ __forceinline__ void planes_make(uint32_t (&words)[PLANES]) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint32_t low = words[i], high = words[i + 8];
        words[i] = __byte_perm(low, high, 0x6240);
        words[i + 8] = __byte_perm(low, high, 0x7351);
    }
#pragma unroll
    for (int apart = 4; apart > 0; apart /= 2) {
        const uint32_t mask = apart == 4 ? 0x0F0F0F0FU : apart == 2 ? 0x33333333U : 0x55555555U;
#pragma unroll
        for (int i = 0; i < PLANES; i++)
            if ((i & apart) == 0) {
                uint32_t low = words[i], high = words[i + apart];
                words[i] = bits_chosen(mask, low, high << apart);
                words[i + apart] = bits_chosen(mask, low >> apart, high);
            }
    }
}

/* The lowest BITS bits of the candidate that is the `from_top`-th greatest (from 1) of them, by these bits; afterwards
 * the candidates are those with the same bits and `from_top` counts among them. A row lies in LANES neighbouring
 * lanes. */
template <int BITS, int LANES, int GROUPS>
__device__ __forceinline__ uint32_t planes_select(const uint32_t (&planes)[GROUPS][PLANES],
                                                  uint32_t (&candidates)[GROUPS], uint32_t &from_top) {
    uint32_t value = 0, beyond = from_top - 1; /* candidates that are greater */
#pragma unroll
    for (int b = BITS - 1; b >= 0; b--) {
        uint32_t count = 0;
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
            count += __popc(candidates[g] & planes[g][b]);
#pragma unroll
        for (int apart = 1; apart < LANES; apart *= 2)
            count += __shfl_xor_sync(0xFFFFFFFFU, count, apart);
        uint32_t rest = beyond - count; /* below 0: the bit is one */
        uint32_t ones = (uint32_t)((int32_t)rest >> 31);
        value |= ones & 1U << b;
        beyond = min(rest, beyond);
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
            candidates[g] &= ~(planes[g][b] ^ ones);
    }
    from_top = beyond + 1;
    return value;
}

/* A BF16 number that 32 elements are compared with; `magnitude` as planes_edge() says. */
struct plane_edge {
    uint32_t magnitude;
    uint32_t negative; /* 0 or ~0 */
};

/* For x >= edge with x of BF16. Not zero: an edge lies between codes, and no BF16 number does. */
__device__ __forceinline__ struct plane_edge planes_edge(float edge) {
    uint32_t bits = __float_as_uint(edge);
    bool negative = (bits >> 31) != 0;
    /* Above zero: magnitudes from the edge's, rounded up, on. Below: a negative x fails from the next magnitude on. */
    uint32_t magnitude = negative ? ((bits & 0x7FFFFFFFU) >> 16) + 1 : (bits + 0xFFFFU) >> 16;
    return {magnitude, negative ? ~0U : 0};
}

__device__ __forceinline__ uint32_t planes_at_least(const uint32_t (&planes)[PLANES], struct plane_edge edge) {
    uint32_t beyond = ~0U; /* magnitude >= edge.magnitude, by the bits seen so far */
#pragma unroll
    for (int b = 0; b < SIGN_PLANE; b++) {
        uint32_t bit = (uint32_t)((int32_t)(edge.magnitude << (31 - b)) >> 31);
        beyond = (planes[b] & beyond) | (~bit & (planes[b] | beyond));
    }
    uint32_t sign = planes[SIGN_PLANE];
    return (edge.negative & ~(sign & beyond)) | (~edge.negative & ~sign & beyond);
}

#endif
