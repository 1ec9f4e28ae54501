/* SPDX-License-Identifier: Apache-2.0 */
/*
 * For level sources: the 64 BF16 rows of one side of a dense record laid across the lanes. Two neighbouring dims of a row
 * stay together in one 32-bit lane, as they lie in the page: pairs[dim / 2][row], the even dim in the low half.
 */
#ifndef OSCAR_KERNELS_HOST_LEVEL_ROWS_H
#define OSCAR_KERNELS_HOST_LEVEL_ROWS_H

#include "kernels/host/lanes.h"
#include "proto/page.h"

#define ROWS OSCAR_PAGE_TOKENS
#define MAX_DIM 256U

LANES_INLINE vf pair_even(vi pair) { return vf_from_bits(pair << 16); }
LANES_INLINE vf pair_odd(vi pair) { return vf_from_bits(pair & -65536); }

#if HOST_LEVEL > 0

/* Transposes blocks of 8 rows by 8 pairs. */
static void load_pairs(const uint16_t *from, uint32_t d, uint32_t *pairs) {
    for (uint32_t row = 0; row < ROWS; row += 8)
        for (uint32_t dim = 0; dim < d; dim += 16) {
            __m256i line[8];
            __m256i quad[8];
            LANES_UNROLL
            for (uint32_t r = 0; r < 8; r++)
                line[r] = _mm256_loadu_si256((const __m256i *)(from + (size_t)(row + r) * d + dim));
            LANES_UNROLL
            for (uint32_t r = 0; r < 8; r += 4) {
                __m256i low_01 = _mm256_unpacklo_epi32(line[r], line[r + 1]);
                __m256i high_01 = _mm256_unpackhi_epi32(line[r], line[r + 1]);
                __m256i low_23 = _mm256_unpacklo_epi32(line[r + 2], line[r + 3]);
                __m256i high_23 = _mm256_unpackhi_epi32(line[r + 2], line[r + 3]);
                quad[r] = _mm256_unpacklo_epi64(low_01, low_23);
                quad[r + 1] = _mm256_unpackhi_epi64(low_01, low_23);
                quad[r + 2] = _mm256_unpacklo_epi64(high_01, high_23);
                quad[r + 3] = _mm256_unpackhi_epi64(high_01, high_23);
            }
            uint32_t *to = pairs + (size_t)(dim / 2) * ROWS + row;
            LANES_UNROLL
            for (uint32_t p = 0; p < 4; p++) {
                _mm256_storeu_si256((__m256i *)(to + (size_t)p * ROWS),
                                    _mm256_permute2x128_si256(quad[p], quad[p + 4], 0x20));
                _mm256_storeu_si256((__m256i *)(to + (size_t)(p + 4) * ROWS),
                                    _mm256_permute2x128_si256(quad[p], quad[p + 4], 0x31));
            }
        }
}

#else

static void load_pairs(const uint16_t *from, uint32_t d, uint32_t *pairs) {
    for (uint32_t dim = 0; dim < d; dim += 2)
        for (uint32_t row = 0; row < ROWS; row++)
            pairs[(size_t)(dim / 2) * ROWS + row] =
                from[(size_t)row * d + dim] | (uint32_t)from[(size_t)row * d + dim + 1] << 16;
}

#endif

#endif
