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

/* 2^x for x <= 0 (or a little above), relative error 1.1e-7: minimax polynomial of 2^f on [-1/2, 1/2]; below -126 it stays 2^-126. */
ATTEND_INLINE __m256 attend_exp2(__m256 x) {
    x = _mm256_max_ps(x, _mm256_set1_ps(-126.0F));
    __m256 whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 f = _mm256_sub_ps(x, whole);
    __m256 y = _mm256_set1_ps(0x1.5bba1p-10F);
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(0x1.3cea88p-7F));
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(0x1.c6b752p-5F));
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(0x1.ebf9bcp-3F));
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(0x1.62e42ap-1F));
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(1.0F));
    __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(y, _mm256_castsi256_ps(exponent));
}

ATTEND_INLINE float attend_sum(__m256 x) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

ATTEND_INLINE float attend_largest(__m256 x) {
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}

/* All ones in the lanes of rows 8i .. 8i + 7 that lie below `rows`. */
ATTEND_INLINE __m256 attend_seen(uint32_t rows, uint32_t i) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32((int32_t)rows - (int32_t)(8 * i)), lane));
}

/* Scores of a page and column, rows in order; those from `rows` on may be anything. They become 2^(score - max), the rest 0;
 * what the column has so far moves to the new max. */
ATTEND_INLINE void attend_softmax(const struct attend_columns *columns, uint32_t c, uint32_t rows,
                                  const struct attend_partial *partial, float score[OSCAR_PAGE_TOKENS]) {
    if (rows == 0) {
        memset(score, 0, sizeof(float) * OSCAR_PAGE_TOKENS);
        return;
    }
    __m256 top = _mm256_set1_ps(-INFINITY), sum = _mm256_setzero_ps();
    for (uint32_t i = 0; i < 8; i++)
        top = _mm256_max_ps(top, _mm256_blendv_ps(top, _mm256_loadu_ps(score + 8 * i), attend_seen(rows, i)));
    float page_max = attend_largest(top), max = partial->max[c];
    if (page_max > max) {
        float *out = partial->out + (size_t)c * columns->d, shrink = exp2f(max - page_max);
        for (uint32_t i = 0; i < columns->d; i += 8)
            _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_loadu_ps(out + i), _mm256_set1_ps(shrink)));
        partial->sum[c] *= shrink;
        partial->max[c] = max = page_max;
    }
    for (uint32_t i = 0; i < 8; i++) {
        __m256 weight = attend_exp2(_mm256_sub_ps(_mm256_loadu_ps(score + 8 * i), _mm256_set1_ps(max)));
        weight = _mm256_and_ps(weight, attend_seen(rows, i));
        sum = _mm256_add_ps(sum, weight);
        _mm256_storeu_ps(score + 8 * i, weight);
    }
    partial->sum[c] += attend_sum(sum);
}

#endif
