/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A dense page at the AVX-512 level: BF16 becomes binary32 by a shift, exactly, and all sums are fused multiply-adds.
 */
#include "kernels/host/attend_avx512.h"

#define TOKENS OSCAR_PAGE_TOKENS

ATTEND_INLINE __m512 load_bf16(const uint16_t *at) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)at)), 16));
}

/* Sums of sixteen vectors: lane l of the result is the sum over vector l. */
ATTEND_INLINE __m512 sum_each(__m512 row[16]) {
    __m512 pair[8], quad[4];
    for (uint32_t i = 0; i < 8; i++) /* [i] and [i + 8] in alternating 128-bit halves of pairs of blocks */
        pair[i] = _mm512_add_ps(_mm512_shuffle_f32x4(row[i], row[i + 8], 0x44),
                                _mm512_shuffle_f32x4(row[i], row[i + 8], 0xEE));
    for (uint32_t i = 0; i < 4; i++) /* blocks: row i, i + 4, i + 8, i + 12 */
        quad[i] = _mm512_add_ps(_mm512_shuffle_f32x4(pair[i], pair[i + 4], 0x88),
                                _mm512_shuffle_f32x4(pair[i], pair[i + 4], 0xDD));
    __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(quad[0], quad[2]), _mm512_unpackhi_ps(quad[0], quad[2]));
    __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(quad[1], quad[3]), _mm512_unpackhi_ps(quad[1], quad[3]));
    __m512 sums = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    /* block k, word j: row j + 4k', where blocks came in the order 0, 8, 4, 12 */
    return _mm512_shuffle_f32x4(sums, sums, 0xD8);
}

/* Scores of four tokens at a time for n columns: sums along the head, sixteen of them reduced together. */
ATTEND_INLINE void score_rows(const struct attend_columns *columns, uint32_t c0, uint32_t n, uint32_t rows,
                              const uint16_t *k, float scores[ATTEND_GROUP][TOKENS]) {
    uint32_t d = columns->d;
    const float *q = columns->q + (size_t)c0 * d;
#pragma GCC unroll 1
    for (uint32_t t = 0; t < rows; t += 4) { /* rows past the last may be read, their scores are not */
        __m512 sum[16];
#pragma GCC unroll 16
        for (uint32_t i = 0; i < 16; i++)
            sum[i] = _mm512_setzero_ps();
#pragma GCC unroll 1
        for (uint32_t i = 0; i < d; i += 16) {
            __m512 key[4];
#pragma GCC unroll 4
            for (uint32_t r = 0; r < 4; r++)
                key[r] = load_bf16(k + (size_t)(t + r) * d + i);
#pragma GCC unroll 4
            for (uint32_t m = 0; m < n; m++) {
                __m512 query = _mm512_loadu_ps(q + (size_t)m * d + i);
#pragma GCC unroll 4
                for (uint32_t r = 0; r < 4; r++)
                    sum[4 * m + r] = _mm512_fmadd_ps(query, key[r], sum[4 * m + r]);
            }
        }
        __m512 all = sum_each(sum);
        _mm_storeu_ps(scores[0] + t, _mm512_castps512_ps128(all));
        if (n > 1)
            _mm_storeu_ps(scores[1] + t, _mm512_extractf32x4_ps(all, 1));
        if (n > 2)
            _mm_storeu_ps(scores[2] + t, _mm512_extractf32x4_ps(all, 2));
        if (n > 3)
            _mm_storeu_ps(scores[3] + t, _mm512_extractf32x4_ps(all, 3));
    }
}

/* Adds the page's values to n columns' outputs, 64 dims at a time. Rows that a column does not see weigh 0; rows that no
 * column sees are not read, for 0 times NaN is NaN. */
ATTEND_INLINE void add_rows(const struct attend_columns *columns, uint32_t c0, uint32_t n, uint32_t rows,
                            const uint16_t *v, float weights[ATTEND_GROUP][TOKENS],
                            const struct attend_partial *partial) {
    uint32_t d = columns->d;
#pragma GCC unroll 1
    for (uint32_t i = 0; i < d; i += 64) {
        __m512 sum[ATTEND_GROUP][4];
#pragma GCC unroll 4
        for (uint32_t m = 0; m < n; m++)
#pragma GCC unroll 4
            for (uint32_t part = 0; part < 4; part++)
                sum[m][part] = _mm512_setzero_ps();
#pragma GCC unroll 1
        for (uint32_t t = 0; t < rows; t++) {
            __m512 value[4];
#pragma GCC unroll 4
            for (uint32_t part = 0; part < 4; part++)
                value[part] = load_bf16(v + (size_t)t * d + i + (size_t)16 * part);
#pragma GCC unroll 4
            for (uint32_t m = 0; m < n; m++) {
                __m512 weight = _mm512_set1_ps(weights[m][t]);
#pragma GCC unroll 4
                for (uint32_t part = 0; part < 4; part++)
                    sum[m][part] = _mm512_fmadd_ps(weight, value[part], sum[m][part]);
            }
        }
#pragma GCC unroll 4
        for (uint32_t m = 0; m < n; m++)
#pragma GCC unroll 4
            for (uint32_t part = 0; part < 4; part++) {
                float *out = partial->out + (size_t)(c0 + m) * d + i + (size_t)16 * part;
                _mm512_storeu_ps(out, _mm512_add_ps(_mm512_loadu_ps(out), sum[m][part]));
            }
    }
}

ATTEND_INLINE void attend_group(const struct attend_columns *columns, const struct attend_page *page, uint32_t c0,
                                uint32_t n, const struct attend_partial *partial) {
    const uint16_t *k = (const uint16_t *)(const void *)page->record, *v = k + (size_t)TOKENS * columns->d;
    float scores[ATTEND_GROUP][TOKENS] = {{0}};
    score_rows(columns, c0, n, page->rows, k, scores);
    attend_softmax(columns, c0, n, page->first, partial, NULL, scores);
    add_rows(columns, c0, n, page->rows, v, scores, partial);
}

void attend_dense_avx512(const struct attend_columns *columns, const struct attend_page *page,
                         const struct attend_partial *partial) {
    uint32_t c = 0;
    attend_prefetch(page);
    for (; c + 4 <= columns->count; c += 4)
        attend_group(columns, page, c, 4, partial);
    switch (columns->count - c) {
    case 3:
        attend_group(columns, page, c, 3, partial);
        break;
    case 2:
        attend_group(columns, page, c, 2, partial);
        break;
    case 1:
        attend_group(columns, page, c, 1, partial);
        break;
    default:
        break;
    }
}
