/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The vectors that the level sources compute with: LANES floats (vf) or 32-bit integers (vi) in one register. Arithmetic,
 * comparisons and shuffles are the compiler's vector extensions; this file adds what these lack. Every operation rounds as
 * the same scalar operation does, so a source that uses them gives the same bits at every level.
 */
#ifndef OSCAR_KERNELS_HOST_LANES_H
#define OSCAR_KERNELS_HOST_LANES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels/host/level.h"
#include "kernels/number.h"

#if HOST_LEVEL > 0
#include <immintrin.h>
#endif

#if HOST_LEVEL == 2
#define LANES 16
#elif HOST_LEVEL == 1
#define LANES 8
#else
#define LANES 4
#endif

#define HOST_JOIN_(name, suffix) name##_##suffix
#define HOST_JOIN(name, suffix) HOST_JOIN_(name, suffix)
#define HOST_NAME(name) HOST_JOIN(name, HOST_LEVEL_SUFFIX) /* the level's own name of an external symbol */

#define LANES_INLINE static inline __attribute__((always_inline))

#if defined(__clang__)
#define LANES_UNROLL _Pragma("clang loop unroll(full)")
#else
#define LANES_UNROLL _Pragma("GCC unroll 32")
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vw __attribute__((vector_size(4 * LANES)));
typedef int16_t vs __attribute__((vector_size(4 * LANES))); /* twice as many 16-bit integers */
typedef uint16_t vu __attribute__((vector_size(4 * LANES)));

LANES_INLINE vf vf_load(const float *from) {
    vf value;
    memcpy(&value, from, sizeof(value));
    return value;
}
LANES_INLINE void vf_store(float *to, vf value) { memcpy(to, &value, sizeof(value)); }
LANES_INLINE vi vi_load(const void *from) {
    vi value;
    memcpy(&value, from, sizeof(value));
    return value;
}
LANES_INLINE void vi_store(void *to, vi value) { memcpy(to, &value, sizeof(value)); }
LANES_INLINE vi vf_bits(vf value) { return (vi)value; }
LANES_INLINE vf vf_from_bits(vi bits) { return (vf)bits; }
LANES_INLINE vf vf_from_int(vi value) { return __builtin_convertvector(value, vf); }

/* min and max as the SSE instructions have it: the second operand where one is NaN or both are zero. */
#if HOST_LEVEL == 2

LANES_INLINE vf vf_set(float value) { return (vf)_mm512_set1_ps(value); }
LANES_INLINE vi vi_set(int32_t value) { return (vi)_mm512_set1_epi32(value); }
LANES_INLINE vf vf_fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
LANES_INLINE vf vf_fnma(vf a, vf b, vf c) { return (vf)_mm512_fnmadd_ps((__m512)a, (__m512)b, (__m512)c); }
LANES_INLINE vf vf_min(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
LANES_INLINE vf vf_max(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
LANES_INLINE vi vi_min(vi a, vi b) { return (vi)_mm512_min_epi32((__m512i)a, (__m512i)b); }
LANES_INLINE vi vi_max(vi a, vi b) { return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b); }
/* 1 where a >= b is added to `count`. */
LANES_INLINE vi vi_count_ge(vi count, vi a, vi b) {
    return (vi)_mm512_mask_sub_epi32((__m512i)count, _mm512_cmpge_epi32_mask((__m512i)a, (__m512i)b), (__m512i)count,
                                     _mm512_set1_epi32(-1));
}
/* Towards zero, as an integer and as a float; the value must fit an integer. */
LANES_INLINE vi vf_truncate(vf value) { return (vi)_mm512_cvttps_epi32((__m512)value); }
LANES_INLINE vf vf_whole(vf value) {
    return (vf)_mm512_roundscale_ps((__m512)value, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
}
LANES_INLINE vs vs_min(vs a, vs b) { return (vs)_mm512_min_epi16((__m512i)a, (__m512i)b); }
LANES_INLINE vs vs_max(vs a, vs b) { return (vs)_mm512_max_epi16((__m512i)a, (__m512i)b); }
LANES_INLINE vu vu_min(vu a, vu b) { return (vu)_mm512_min_epu16((__m512i)a, (__m512i)b); }
LANES_INLINE vu vu_max(vu a, vu b) { return (vu)_mm512_max_epu16((__m512i)a, (__m512i)b); }
LANES_INLINE vs vs_count_ge(vs count, vs a, vs b) {
    return (vs)_mm512_mask_sub_epi16((__m512i)count, _mm512_cmpge_epi16_mask((__m512i)a, (__m512i)b), (__m512i)count,
                                     _mm512_set1_epi16(-1));
}
LANES_INLINE void vf_to_fp16(vf value, uint16_t *to) {
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
LANES_INLINE vf vf_from_fp16(const uint16_t *from) {
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}
LANES_INLINE vi vi_load_u16(const uint16_t *from) {
    return (vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
}
/* The low 16 bits of each lane. */
LANES_INLINE void vi_store_u16(uint16_t *to, vi value) {
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16((__m512i)value));
}
LANES_INLINE int32_t vi_reduce_max(vi value) { return _mm512_reduce_max_epi32((__m512i)value); }

#elif HOST_LEVEL == 1

LANES_INLINE vf vf_set(float value) { return (vf)_mm256_set1_ps(value); }
LANES_INLINE vi vi_set(int32_t value) { return (vi)_mm256_set1_epi32(value); }
LANES_INLINE vf vf_fma(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
LANES_INLINE vf vf_fnma(vf a, vf b, vf c) { return (vf)_mm256_fnmadd_ps((__m256)a, (__m256)b, (__m256)c); }
LANES_INLINE vf vf_min(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
LANES_INLINE vf vf_max(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
LANES_INLINE vi vi_min(vi a, vi b) { return (vi)_mm256_min_epi32((__m256i)a, (__m256i)b); }
LANES_INLINE vi vi_max(vi a, vi b) { return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b); }
LANES_INLINE vi vf_truncate(vf value) { return (vi)_mm256_cvttps_epi32((__m256)value); }
LANES_INLINE vf vf_whole(vf value) {
    return (vf)_mm256_round_ps((__m256)value, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
}
LANES_INLINE vs vs_min(vs a, vs b) { return (vs)_mm256_min_epi16((__m256i)a, (__m256i)b); }
LANES_INLINE vs vs_max(vs a, vs b) { return (vs)_mm256_max_epi16((__m256i)a, (__m256i)b); }
LANES_INLINE vu vu_min(vu a, vu b) { return (vu)_mm256_min_epu16((__m256i)a, (__m256i)b); }
LANES_INLINE vu vu_max(vu a, vu b) { return (vu)_mm256_max_epu16((__m256i)a, (__m256i)b); }
LANES_INLINE void vf_to_fp16(vf value, uint16_t *to) {
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
LANES_INLINE vf vf_from_fp16(const uint16_t *from) {
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
}
LANES_INLINE vi vi_load_u16(const uint16_t *from) {
    return (vi)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
}
LANES_INLINE void vi_store_u16(uint16_t *to, vi value) {
    __m256i low = _mm256_and_si256((__m256i)value, _mm256_set1_epi32(0xFFFF));
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0xD8);
    _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(packed));
}

#else

LANES_INLINE vf vf_set(float value) { return (vf){value, value, value, value}; }
LANES_INLINE vi vi_set(int32_t value) { return (vi){value, value, value, value}; }
LANES_INLINE vf vf_fma(vf a, vf b, vf c) {
    for (int i = 0; i < LANES; i++)
        c[i] = fmaf(a[i], b[i], c[i]);
    return c;
}
LANES_INLINE vf vf_fnma(vf a, vf b, vf c) { return vf_fma(-a, b, c); }
LANES_INLINE vi vi_select(vi mask, vi yes, vi no) { return (yes & mask) | (no & ~mask); }
LANES_INLINE vf vf_min(vf a, vf b) { return (vf)vi_select((vi)(a < b), (vi)a, (vi)b); }
LANES_INLINE vf vf_max(vf a, vf b) { return (vf)vi_select((vi)(a > b), (vi)a, (vi)b); }
LANES_INLINE vi vi_min(vi a, vi b) { return vi_select(a < b, a, b); }
LANES_INLINE vi vi_max(vi a, vi b) { return vi_select(a > b, a, b); }
LANES_INLINE vi vf_truncate(vf value) { return __builtin_convertvector(value, vi); }
LANES_INLINE vf vf_whole(vf value) { return vf_from_int(vf_truncate(value)); }
LANES_INLINE vs vs_select(vs mask, vs yes, vs no) { return (yes & mask) | (no & ~mask); }
LANES_INLINE vs vs_min(vs a, vs b) { return vs_select(a < b, a, b); }
LANES_INLINE vs vs_max(vs a, vs b) { return vs_select(a > b, a, b); }
LANES_INLINE vu vu_min(vu a, vu b) { return (vu)vs_select((vs)(a < b), (vs)a, (vs)b); }
LANES_INLINE vu vu_max(vu a, vu b) { return (vu)vs_select((vs)(a > b), (vs)a, (vs)b); }
LANES_INLINE void vf_to_fp16(vf value, uint16_t *to) {
    for (int i = 0; i < LANES; i++)
        to[i] = oscar_fp16_from_float(value[i]);
}
LANES_INLINE vf vf_from_fp16(const uint16_t *from) {
    vf value;
    for (int i = 0; i < LANES; i++)
        value[i] = oscar_fp16_to_float(from[i]);
    return value;
}
LANES_INLINE vi vi_load_u16(const uint16_t *from) { return (vi){from[0], from[1], from[2], from[3]}; }
LANES_INLINE void vi_store_u16(uint16_t *to, vi value) {
    for (int i = 0; i < LANES; i++)
        to[i] = (uint16_t)value[i];
}

#endif

#if HOST_LEVEL < 2

LANES_INLINE vi vi_count_ge(vi count, vi a, vi b) { return count + 1 + (vi)(b > a); }
LANES_INLINE vs vs_count_ge(vs count, vs a, vs b) { return count + 1 + (vs)(b > a); }
LANES_INLINE int32_t vi_reduce_max(vi value) {
    int32_t greatest = value[0];
    for (int i = 1; i < LANES; i++)
        greatest = value[i] > greatest ? value[i] : greatest;
    return greatest;
}

#endif

LANES_INLINE vf vf_from_bf16(const uint16_t *from) { return vf_from_bits(vi_load_u16(from) << 16); }

/* Round to nearest even in integers: hardware BF16 conversions flush subnormals. A NaN becomes a quiet NaN. */
LANES_INLINE vi vf_to_bf16_bits(vf value) {
    vw bits = (vw)value;
    vw nan = (vw)((bits & 0x7FFFFFFFU) > (vw)vi_set(0x7F800000));
    vw rounded = bits + 0x7FFFU + ((bits >> 16) & 1U);
    vw kept = bits | 0x400000U;
    return (vi)(((rounded & ~nan) | (kept & nan)) >> 16);
}

#endif
