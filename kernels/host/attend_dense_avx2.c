/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A dense page at the AVX2 level: BF16 becomes binary32 by a shift, exactly, and all sums are fused multiply-adds.
 */
#include "kernels/host/attend_avx2.h"

#define TOKENS OSCAR_PAGE_TOKENS

ATTEND_INLINE __m256 load_bf16(const uint16_t *at) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)at)), 16));
}

/* One column's sums against two keys. Named variables and not an array, which the compilers of today would spill. */
struct key_sums {
    __m256 first, second;
};

ATTEND_INLINE void score_keys(struct key_sums *sums, __m256 first, __m256 second, const float *q) {
    __m256 query = _mm256_loadu_ps(q);
    sums->first = _mm256_fmadd_ps(query, first, sums->first);
    sums->second = _mm256_fmadd_ps(query, second, sums->second);
}

ATTEND_INLINE void finish_keys(struct key_sums sums, float *scores) {
    scores[0] = attend_sum(sums.first);
    scores[1] = attend_sum(sums.second);
}

ATTEND_INLINE void score_rows(const struct attend_columns *columns, uint32_t c0, uint32_t n, uint32_t rows,
                              const uint16_t *k, float scores[ATTEND_GROUP][TOKENS]) {
    size_t d = columns->d;
    const float *q = columns->q + c0 * d;
#pragma GCC unroll 1
    for (uint32_t t = 0; t < rows; t += 2) { /* the row past the last may be read, its score is not */
        const __m256 zero = _mm256_setzero_ps();
        struct key_sums s0 = {zero, zero}, s1 = s0, s2 = s0, s3 = s0;
#pragma GCC unroll 1
        for (size_t i = 0; i < d; i += 8) {
            __m256 first = load_bf16(k + t * d + i), second = load_bf16(k + (t + 1) * d + i);
            score_keys(&s0, first, second, q + i);
            if (n > 1)
                score_keys(&s1, first, second, q + d + i);
            if (n > 2)
                score_keys(&s2, first, second, q + 2 * d + i);
            if (n > 3)
                score_keys(&s3, first, second, q + 3 * d + i);
        }
        finish_keys(s0, scores[0] + t);
        if (n > 1)
            finish_keys(s1, scores[1] + t);
        if (n > 2)
            finish_keys(s2, scores[2] + t);
        if (n > 3)
            finish_keys(s3, scores[3] + t);
    }
}

struct row_sums { /* of one column, sixteen dims */
    __m256 first, second;
};

ATTEND_INLINE void add_row(struct row_sums *sums, __m256 first, __m256 second, float weight) {
    sums->first = _mm256_fmadd_ps(_mm256_set1_ps(weight), first, sums->first);
    sums->second = _mm256_fmadd_ps(_mm256_set1_ps(weight), second, sums->second);
}

ATTEND_INLINE void finish_rows(struct row_sums sums, float *out) {
    _mm256_storeu_ps(out, _mm256_add_ps(_mm256_loadu_ps(out), sums.first));
    _mm256_storeu_ps(out + 8, _mm256_add_ps(_mm256_loadu_ps(out + 8), sums.second));
}

/* Adds the page's values to n columns' outputs, sixteen dims at a time. Rows that a column does not see weigh 0; rows that no
 * column sees are not read, for 0 times NaN is NaN. */
ATTEND_INLINE void add_rows(const struct attend_columns *columns, uint32_t c0, uint32_t n, uint32_t rows,
                            const uint16_t *v, float weights[ATTEND_GROUP][TOKENS],
                            const struct attend_partial *partial) {
    size_t d = columns->d;
#pragma GCC unroll 1
    for (size_t i = 0; i < d; i += 16) {
        const __m256 zero = _mm256_setzero_ps();
        struct row_sums s0 = {zero, zero}, s1 = s0, s2 = s0, s3 = s0;
#pragma GCC unroll 1
        for (uint32_t t = 0; t < rows; t++) {
            __m256 first = load_bf16(v + t * d + i), second = load_bf16(v + t * d + i + 8);
            add_row(&s0, first, second, weights[0][t]);
            if (n > 1)
                add_row(&s1, first, second, weights[1][t]);
            if (n > 2)
                add_row(&s2, first, second, weights[2][t]);
            if (n > 3)
                add_row(&s3, first, second, weights[3][t]);
        }
        float *out = partial->out + c0 * d + i;
        finish_rows(s0, out);
        if (n > 1)
            finish_rows(s1, out + d);
        if (n > 2)
            finish_rows(s2, out + 2 * d);
        if (n > 3)
            finish_rows(s3, out + 3 * d);
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

void attend_dense_avx2(const struct attend_columns *columns, const struct attend_page *page,
                       const struct attend_partial *partial) {
    uint32_t c = 0;
    for (uint32_t byte = 0; byte < page->ahead_bytes; byte += 64)
        _mm_prefetch((const char *)page->ahead + byte, _MM_HINT_T0);
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
