/* SPDX-License-Identifier: Apache-2.0 */
/* Conversions between the 16-bit float formats and binary32: round to nearest even, subnormals kept, NaN stays NaN. */
#ifndef OSCAR_KERNELS_NUMBER_H
#define OSCAR_KERNELS_NUMBER_H

#include <stdint.h>
#include <string.h>

static inline uint32_t oscar_float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static inline float oscar_float_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static inline float oscar_bf16_to_float(uint16_t bits) { return oscar_float_from_bits((uint32_t)bits << 16); }

static inline uint16_t oscar_bf16_from_float(float value) {
    uint32_t bits = oscar_float_bits(value);
    if ((bits & 0x7FFFFFFFU) > 0x7F800000U)
        return (uint16_t)((bits >> 16) | 0x40U); /* the quiet bit, so that a cut payload does not become Inf */
    return (uint16_t)((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

static inline float oscar_fp16_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000U) << 16;
    uint32_t magnitude = half & 0x7FFFU;
    if (magnitude >= 0x7C00U)
        return oscar_float_from_bits(sign | 0x7F800000U | ((magnitude & 0x3FFU) << 13));
    if (magnitude >= 0x0400U)
        return oscar_float_from_bits(sign | ((magnitude << 13) + ((127U - 15U) << 23)));
    /* Subnormal or zero: magnitude * 2^-24, exact in binary32; the sign goes on as a bit so that -0 stays -0. */
    return oscar_float_from_bits(sign | oscar_float_bits((float)magnitude * 0x1p-24F));
}

static inline uint16_t oscar_fp16_from_float(float value) {
    uint32_t bits = oscar_float_bits(value);
    uint32_t sign = (bits >> 16) & 0x8000U;
    uint32_t magnitude = bits & 0x7FFFFFFFU;
    if (magnitude > 0x7F800000U)
        return (uint16_t)(sign | 0x7E00U | ((magnitude >> 13) & 0x3FFU));
    if (magnitude >= 0x47800000U) /* 65536 and above; what rounds up to it carries into the exponent below */
        return (uint16_t)(sign | 0x7C00U);
    if (magnitude >= 0x38800000U) { /* 2^-14: a normal binary16 */
        uint32_t rounded = magnitude + 0xFFFU + ((magnitude >> 13) & 1U);
        return (uint16_t)(sign | ((rounded - ((127U - 15U) << 23)) >> 13));
    }
    if (magnitude < 0x33000000U) /* below 2^-25 */
        return (uint16_t)sign;
    uint32_t shift = 126U - (magnitude >> 23); /* 14..24 bits to drop from the 24-bit significand */
    uint32_t significand = (magnitude & 0x7FFFFFU) | 0x800000U;
    uint32_t half = (uint32_t)1 << (shift - 1U);
    uint32_t kept = significand >> shift;
    uint32_t rest = significand & ((half << 1) - 1U);
    if (rest > half || (rest == half && (kept & 1U) != 0))
        kept++;
    return (uint16_t)(sign | kept);
}

#endif
