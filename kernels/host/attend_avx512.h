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

/* The four columns of a group as blocks of four lanes: block m holds column m's value in every lane. */
ATTEND_INLINE __m512 attend_blocks(const float *values, uint32_t n) {
    const __m512i spread = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    __m512 first = _mm512_castps128_ps512(_mm_maskz_loadu_ps((__mmask8)((1U << n) - 1), values));
    return _mm512_permutexvar_ps(spread, first);
}

ATTEND_INLINE void attend_store_blocks(float *values, uint32_t n, __m512 blocks) {
    const __m512i gather = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    __m128 first = _mm512_castps512_ps128(_mm512_permutexvar_ps(gather, blocks));
    _mm_mask_storeu_ps(values, (__mmask8)((1U << n) - 1), first);
}

/* Column m's value in all lanes; m must be a constant once inlined. */
#define ATTEND_OF_BLOCK(blocks, m)                                                                                     \
    ((m) == 0   ? _mm512_shuffle_f32x4(blocks, blocks, 0x00)                                                           \
     : (m) == 1 ? _mm512_shuffle_f32x4(blocks, blocks, 0x55)                                                           \
     : (m) == 2 ? _mm512_shuffle_f32x4(blocks, blocks, 0xAA)                                                           \
                : _mm512_shuffle_f32x4(blocks, blocks, 0xFF))

/* Sums (or maxima) over each of four vectors, as blocks: one chain of shuffles for the four columns. */
ATTEND_INLINE __m512 attend_fold(const __m512 of[ATTEND_GROUP], bool largest) {
#define FOLD(x, y) (largest ? _mm512_max_ps(x, y) : _mm512_add_ps(x, y))
    __m512 a = FOLD(_mm512_shuffle_f32x4(of[0], of[1], 0x44), _mm512_shuffle_f32x4(of[0], of[1], 0xEE));
    __m512 b = FOLD(_mm512_shuffle_f32x4(of[2], of[3], 0x44), _mm512_shuffle_f32x4(of[2], of[3], 0xEE));
    __m512 c = FOLD(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
    c = FOLD(c, _mm512_permute_ps(c, 0x4E));
    return FOLD(c, _mm512_permute_ps(c, 0xB1));
#undef FOLD
}

/* A bit for each of the page's rows that column `c` sees. */
ATTEND_INLINE uint64_t attend_seen(const struct attend_columns *columns, uint32_t c, uint32_t first) {
    uint32_t rows = attend_rows(columns, c, first);
    return rows == OSCAR_PAGE_TOKENS ? ~UINT64_C(0) : (UINT64_C(1) << rows) - 1;
}

/* What a column has so far moves to a new, larger max. Rare after the first pages. */
static __attribute__((noinline)) void attend_raise(const struct attend_columns *columns, uint32_t c, float max,
                                                   const struct attend_partial *partial) {
    float *out = partial->out + (size_t)c * columns->d, shrink = exp2f(partial->max[c] - max);
    for (uint32_t i = 0; i < columns->d; i += 16)
        _mm512_storeu_ps(out + i, _mm512_mul_ps(_mm512_loadu_ps(out + i), _mm512_set1_ps(shrink)));
    partial->sum[c] *= shrink;
    partial->max[c] = max;
}

/* Scores of a page for n columns from c0 on, rows in order; of rows that a column does not see they may be anything. They
 * become 2^(score - max) * scale (a value a row, or NULL for 1), and 0 for rows not seen; sums and maxima of the columns go on.
 * Returns the largest result of each column as blocks. All columns go side by side, for the latency of the reductions. */
ATTEND_INLINE __m512 attend_softmax(const struct attend_columns *columns, uint32_t c0, uint32_t n, uint32_t first,
                                    const struct attend_partial *partial, const float *scale,
                                    float scores[ATTEND_GROUP][OSCAR_PAGE_TOKENS]) {
    const __m512 nothing = _mm512_set1_ps(-INFINITY), zero = _mm512_setzero_ps();
    uint64_t seen[ATTEND_GROUP];
    __m512 top[ATTEND_GROUP] = {nothing, nothing, nothing, nothing}, sum[ATTEND_GROUP] = {zero, zero, zero, zero};
#pragma GCC unroll 4
    for (uint32_t m = 0; m < n; m++) {
        seen[m] = attend_seen(columns, c0 + m, first);
#pragma GCC unroll 4
        for (uint32_t i = 0; i < 4; i++)
            top[m] = _mm512_mask_max_ps(top[m], (__mmask16)(seen[m] >> (16 * i)), top[m],
                                        _mm512_loadu_ps(scores[m] + 16 * i));
    }
    __m512 page_max = attend_fold(top, true), max = attend_blocks(partial->max + c0, n);
    __mmask16 raised = _mm512_cmp_ps_mask(page_max, max, _CMP_GT_OQ) & (__mmask16)((1U << (4 * n)) - 1);
    if (raised != 0) {
        float maxima[ATTEND_GROUP];
        attend_store_blocks(maxima, ATTEND_GROUP, page_max);
        for (uint32_t m = 0; m < n; m++)
            if ((raised >> (4 * m) & 1) != 0)
                attend_raise(columns, c0 + m, maxima[m], partial);
        max = attend_blocks(partial->max + c0, n);
    }
#pragma GCC unroll 4
    for (uint32_t m = 0; m < n; m++) {
        __m512 column_max = ATTEND_OF_BLOCK(max, m);
        top[m] = zero;
#pragma GCC unroll 4
        for (uint32_t i = 0; i < 4; i++) {
            __m512 score = _mm512_loadu_ps(scores[m] + 16 * i);
            __m512 weight = attend_exp2((__mmask16)(seen[m] >> (16 * i)), _mm512_sub_ps(score, column_max));
            sum[m] = _mm512_add_ps(sum[m], weight);
            if (scale != NULL)
                weight = _mm512_mul_ps(weight, _mm512_loadu_ps(scale + 16 * i));
            top[m] = _mm512_max_ps(top[m], weight);
            _mm512_storeu_ps(scores[m] + 16 * i, weight);
        }
    }
    __m512 sums = _mm512_add_ps(attend_blocks(partial->sum + c0, n), attend_fold(sum, false));
    attend_store_blocks(partial->sum + c0, n, sums);
    return attend_fold(top, true);
}

ATTEND_INLINE void attend_prefetch(const struct attend_page *page) {
    for (uint32_t byte = 0; byte < page->ahead_bytes; byte += 64)
        _mm_prefetch((const char *)page->ahead + byte, _MM_HINT_T0);
}

#endif
