/* SPDX-License-Identifier: Apache-2.0 */
/* Vector pieces that packed and dense pages share at the AVX-512 level. */
#ifndef OSCAR_KERNELS_HOST_ATTEND_AVX512_H
#define OSCAR_KERNELS_HOST_ATTEND_AVX512_H

#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels/host/attend.h"

/* Inner loops are written once and compiled for each number of columns and each head size. */
#define ATTEND_INLINE static inline __attribute__((always_inline))

/* 2^x for x <= 0 (or a little above), relative error 1.1e-7: minimax polynomial of 2^f on [-1/2, 1/2]. Lanes outside `mask` give 0. */
ATTEND_INLINE __m512 attend_exp2(__mmask16 mask, __m512 x) {
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(0x1.5bba1p-10F);
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0x1.3cea88p-7F));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0x1.c6b752p-5F));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0x1.ebf9bcp-3F));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0x1.62e42ap-1F));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0F));
    return _mm512_maskz_scalef_ps(mask, y, whole);
}

/* Scores of a page and column, rows in order; those from `rows` on may be anything. They become 2^(score - max), the rest 0;
 * what the column has so far moves to the new max. False when the column sees no row of the page. */
ATTEND_INLINE bool attend_softmax(const struct attend_columns *columns, uint32_t c, uint32_t rows,
                                  const struct attend_partial *partial, __m512 score[4]) {
    uint64_t seen = rows == OSCAR_PAGE_TOKENS ? ~UINT64_C(0) : (UINT64_C(1) << rows) - 1;
    const __m512 nothing = _mm512_set1_ps(-INFINITY);
    __m512 top = nothing;
    if (rows == 0)
        return false;
    for (uint32_t i = 0; i < 4; i++)
        top = _mm512_mask_max_ps(top, (__mmask16)(seen >> (16 * i)), top, score[i]);
    float page_max = _mm512_reduce_max_ps(top), max = partial->max[c];
    if (page_max > max) {
        float *out = partial->out + (size_t)c * columns->d, shrink = exp2f(max - page_max);
        for (uint32_t i = 0; i < columns->d; i += 16)
            _mm512_storeu_ps(out + i, _mm512_mul_ps(_mm512_loadu_ps(out + i), _mm512_set1_ps(shrink)));
        partial->sum[c] *= shrink;
        partial->max[c] = max = page_max;
    }
    __m512 sum = _mm512_setzero_ps();
    for (uint32_t i = 0; i < 4; i++) {
        score[i] = attend_exp2((__mmask16)(seen >> (16 * i)), _mm512_sub_ps(score[i], _mm512_set1_ps(max)));
        sum = _mm512_add_ps(sum, score[i]);
    }
    partial->sum[c] += _mm512_reduce_add_ps(sum);
    return true;
}

ATTEND_INLINE void attend_prefetch(const struct attend_page *page) {
    for (uint32_t byte = 0; byte < page->ahead_bytes; byte += 64)
        _mm_prefetch((const char *)page->ahead + byte, _MM_HINT_T0);
}

#endif
