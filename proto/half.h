/* SPDX-License-Identifier: Apache-2.0 */
/*
 * IEEE binary16 and bfloat16 as bits, rounded to nearest even, subnormals kept. Written out because _Float16 is not
 * available in every compiler that builds this project, and because the result must not depend on one.
 */
#ifndef OSCAR_PROTO_HALF_H
#define OSCAR_PROTO_HALF_H

#include <stdint.h>
#include <string.h>

static inline uint32_t oscar_float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static inline float oscar_bits_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* Overflow gives infinity, a NaN stays a (quiet) NaN. */
static inline uint16_t oscar_half_from_float(float value) {
    uint32_t bits = oscar_float_bits(value);
    uint32_t sign = (bits >> 16) & 0x8000U;
    uint32_t magnitude = bits & 0x7fffffffU;
    if (magnitude > 0x7f800000U)
        return (uint16_t)(sign | 0x7e00U | ((magnitude >> 13) & 0x1ffU));
    if (magnitude >= 0x477ff000U) /* 65520: half way to the value after 65504 */
        return (uint16_t)(sign | 0x7c00U);
    if (magnitude >= 0x38800000U) { /* 2^-14: normal */
        uint32_t rounded = magnitude + 0xfffU + ((magnitude >> 13) & 1U);
        return (uint16_t)(sign | ((rounded - 0x38000000U) >> 13));
    }
    if (magnitude < 0x33000000U) /* below 2^-25: zero (2^-25 itself is a tie and goes to even, below) */
        return (uint16_t)sign;
    uint32_t shift = 126U - (magnitude >> 23); /* 14..24: brings the significand to units of 2^-24 */
    uint32_t significand = (magnitude & 0x7fffffU) | 0x800000U;
    uint32_t result = significand >> shift;
    uint32_t rest = significand & ((1U << shift) - 1U);
    uint32_t half = 1U << (shift - 1U);
    if (rest > half || (rest == half && (result & 1U) != 0))
        result++;
    return (uint16_t)(sign | result);
}

static inline float oscar_float_from_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000U) << 16;
    uint32_t exponent = (half >> 10) & 0x1fU;
    uint32_t fraction = half & 0x3ffU;
    if (exponent == 0x1fU)
        return oscar_bits_float(sign | 0x7f800000U | (fraction << 13));
    if (exponent != 0)
        return oscar_bits_float(sign | ((exponent + 112U) << 23) | (fraction << 13));
    float value = (float)fraction * 0x1p-24F; /* exact */
    return oscar_bits_float(sign | oscar_float_bits(value));
}

static inline uint16_t oscar_bfloat_from_float(float value) {
    uint32_t bits = oscar_float_bits(value);
    if ((bits & 0x7fffffffU) > 0x7f800000U)
        return (uint16_t)((bits >> 16) | 0x40U);
    return (uint16_t)((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

static inline float oscar_float_from_bfloat(uint16_t bfloat) { return oscar_bits_float((uint32_t)bfloat << 16); }

#endif
