/* SPDX-License-Identifier: Apache-2.0 */
/* Vector pieces that packed and dense pages share at the AVX2 level. */
#ifndef OSCAR_KERNELS_HOST_ATTEND_AVX2_H
#define OSCAR_KERNELS_HOST_ATTEND_AVX2_H

#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels/host/attend.h"

/* Inner loops are written once and compiled for each number of columns and each head size. */
#define ATTEND_INLINE static inline __attribute__((always_inline))

/* Scores rise this far above a column's max before it moves, so that few pages rescale what is there; floats lose nothing by
 * it. */
#define ATTEND_RAISE 8.0F

/* 2^x for x <= ATTEND_RAISE (or a little above), relative error 1.1e-7: minimax polynomial of 2^f on [-1/2, 1/2]; below -126
 * it stays 2^-126. */
ATTEND_INLINE __m256 attend_exp2(__m256 x) {
    x = _mm256_max_ps(x, _mm256_set1_ps(-126.0F));
    /* At this size a float's step is 1: the sum rounds x, and its lowest bits are the integer. */
    const __m256 rounder = _mm256_set1_ps(0x1.8p23F);
    __m256 rounded = _mm256_add_ps(x, rounder);
    __m256 f = _mm256_sub_ps(x, _mm256_sub_ps(rounded, rounder));
    __m256 y = _mm256_set1_ps(0x1.5bba1p-10F);
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(0x1.3cea88p-7F));
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(0x1.c6b752p-5F));
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(0x1.ebf9bcp-3F));
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(0x1.62e42ap-1F));
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(1.0F));
    __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(rounded), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), exponent));
}

ATTEND_INLINE float attend_sum(__m256 x) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

/* Sums (or maxima) over each of four vectors, one a lane. */
ATTEND_INLINE __m128 attend_fold(const __m256 of[ATTEND_GROUP], bool largest) {
#define FOLD(x, y) (largest ? _mm256_max_ps(x, y) : _mm256_add_ps(x, y))
    __m256 a = FOLD(_mm256_unpacklo_ps(of[0], of[1]), _mm256_unpackhi_ps(of[0], of[1]));
    __m256 b = FOLD(_mm256_unpacklo_ps(of[2], of[3]), _mm256_unpackhi_ps(of[2], of[3]));
    __m256 low = _mm256_shuffle_ps(a, b, 0x44), high = _mm256_shuffle_ps(a, b, 0xEE);
    __m256 c = FOLD(low, high);
#undef FOLD
    __m128 lower = _mm256_castps256_ps128(c), upper = _mm256_extractf128_ps(c, 1);
    return largest ? _mm_max_ps(lower, upper) : _mm_add_ps(lower, upper);
}

/* Masks the first n of four columns' values, a lane each. */
ATTEND_INLINE __m128i attend_lanes(uint32_t n) {
    return _mm_cmpgt_epi32(_mm_set1_epi32((int32_t)n), _mm_setr_epi32(0, 1, 2, 3));
}

/* All ones in the lanes of rows 8i .. 8i + 7 that lie below `rows`. */
ATTEND_INLINE __m256 attend_seen(uint32_t rows, uint32_t i) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32((int32_t)rows - (int32_t)(8 * i)), lane));
}

/* What a column has so far moves to a new, larger max. Rare after the first page. */
static __attribute__((noinline)) void attend_raise(const struct attend_columns *columns, uint32_t c, float max,
                                                   const struct attend_partial *partial) {
    float *out = partial->out + (size_t)c * columns->d, shrink = exp2f(partial->max[c] - max);
    for (uint32_t i = 0; i < columns->d; i += 8)
        _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_loadu_ps(out + i), _mm256_set1_ps(shrink)));
    partial->sum[c] *= shrink;
    partial->max[c] = max;
}

ATTEND_INLINE __m128 attend_softmax_of(const struct attend_columns *columns, uint32_t c0, uint32_t n,
                                       const uint32_t *rows, bool whole, const struct attend_partial *partial,
                                       const float *scale, float scores[ATTEND_GROUP][OSCAR_PAGE_TOKENS]) {
    const __m256 nothing = _mm256_set1_ps(-INFINITY), zero = _mm256_setzero_ps();
    const __m128i lanes = attend_lanes(n);
    __m256 top[ATTEND_GROUP] = {nothing, nothing, nothing, nothing}, sum[ATTEND_GROUP] = {zero, zero, zero, zero};
#pragma GCC unroll 4
    for (uint32_t m = 0; m < n; m++)
#pragma GCC unroll 8
        for (uint32_t i = 0; i < 8; i++) {
            __m256 score = _mm256_loadu_ps(scores[m] + 8 * i);
            if (!whole)
                score = _mm256_blendv_ps(nothing, score, attend_seen(rows[m], i));
            top[m] = _mm256_max_ps(top[m], score);
        }
    float maxima[ATTEND_GROUP];
    _mm_storeu_ps(maxima, attend_fold(top, true));
#pragma GCC unroll 4
    for (uint32_t m = 0; m < n; m++)
        if (maxima[m] > partial->max[c0 + m] + ATTEND_RAISE)
            attend_raise(columns, c0 + m, maxima[m], partial);
#pragma GCC unroll 4
    for (uint32_t m = 0; m < n; m++) {
        __m256 column_max = _mm256_set1_ps(partial->max[c0 + m]);
        top[m] = zero;
        for (uint32_t i = 0; i < 8; i++) {
            __m256 weight = attend_exp2(_mm256_sub_ps(_mm256_loadu_ps(scores[m] + 8 * i), column_max));
            if (!whole)
                weight = _mm256_and_ps(weight, attend_seen(rows[m], i));
            sum[m] = _mm256_add_ps(sum[m], weight);
            if (scale != NULL)
                weight = _mm256_mul_ps(weight, _mm256_loadu_ps(scale + 8 * i));
            top[m] = _mm256_max_ps(top[m], weight);
            _mm256_storeu_ps(scores[m] + 8 * i, weight);
        }
    }
    __m128 sums = _mm_add_ps(_mm_maskload_ps(partial->sum + c0, lanes), attend_fold(sum, false));
    _mm_maskstore_ps(partial->sum + c0, lanes, sums);
    return attend_fold(top, true);
}

/* Scores of a page for n columns from c0 on, rows in order; of rows that a column does not see they may be anything. They
 * become 2^(score - max) * scale (a value a row, or NULL for 1), and 0 for rows not seen; sums and maxima of the columns go on.
 * Returns the largest result of each column. All columns go side by side, for the latency of the reductions. */
ATTEND_INLINE __m128 attend_softmax(const struct attend_columns *columns, uint32_t c0, uint32_t n, uint32_t first,
                                    const struct attend_partial *partial, const float *scale,
                                    float scores[ATTEND_GROUP][OSCAR_PAGE_TOKENS]) {
    uint32_t rows[ATTEND_GROUP] = {0}, least = OSCAR_PAGE_TOKENS;
    for (uint32_t m = 0; m < n; m++) {
        rows[m] = attend_rows(columns, c0 + m, first);
        least = rows[m] < least ? rows[m] : least;
    }
    if (least == OSCAR_PAGE_TOKENS)
        return attend_softmax_of(columns, c0, n, rows, true, partial, scale, scores);
    return attend_softmax_of(columns, c0, n, rows, false, partial, scale, scores);
}

#endif
