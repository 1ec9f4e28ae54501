/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A packed record as the AVX-512 loops want it: its words transposed, so that for K a vector holds the same word of sixteen
 * tokens and for V the same token pair of sixteen dims; scales and zeros by token.
 */
#ifndef OSCAR_KERNELS_HOST_ATTEND_UNPACK_AVX512_H
#define OSCAR_KERNELS_HOST_ATTEND_UNPACK_AVX512_H

#include "kernels/host/attend_avx512.h"

struct unpacked {
    /* [tile][4w + t]: word w of lane t, tokens 0..15 of the tile; its codes f stand for dims 16(Wf + w) + 4t + k */
    __m512i k[4][16];
    /* [vector][tile, half h, lane t]: two tokens in each word. d = 64: lanes 0..7 hold dims 8i + g at code i = 0..3, lanes
     * 8..15 dims 8(i + 4) + g there; d = 128: dims 16i + 0..15, i = 0..7; d = 256: dims 32i + 16 * vector + 0..15. */
    __m512i v[2][32];
    float scale_k[OSCAR_PAGE_TOKENS], zero_k[OSCAR_PAGE_TOKENS], scale_v[OSCAR_PAGE_TOKENS], zero_v[OSCAR_PAGE_TOKENS];
    float turn[2][OSCAR_MAX_PAIRS]; /* of the page's first position: cos, sin */
};

/* 4 x 4 transposition of 128-bit blocks. */
ATTEND_INLINE void transpose_blocks(__m512i row[4]) {
    __m512i a = _mm512_shuffle_i32x4(row[0], row[1], 0x44), b = _mm512_shuffle_i32x4(row[0], row[1], 0xEE);
    __m512i c = _mm512_shuffle_i32x4(row[2], row[3], 0x44), d = _mm512_shuffle_i32x4(row[2], row[3], 0xEE);
    row[0] = _mm512_shuffle_i32x4(a, c, 0x88);
    row[1] = _mm512_shuffle_i32x4(a, c, 0xDD);
    row[2] = _mm512_shuffle_i32x4(b, d, 0x88);
    row[3] = _mm512_shuffle_i32x4(b, d, 0xDD);
}

/* 4 x 4 transposition of 32-bit words in each 128-bit block. */
ATTEND_INLINE void transpose_words(__m512i row[4]) {
    __m512i a = _mm512_unpacklo_epi32(row[0], row[1]), b = _mm512_unpackhi_epi32(row[0], row[1]);
    __m512i c = _mm512_unpacklo_epi32(row[2], row[3]), d = _mm512_unpackhi_epi32(row[2], row[3]);
    row[0] = _mm512_unpacklo_epi64(a, c);
    row[1] = _mm512_unpackhi_epi64(a, c);
    row[2] = _mm512_unpacklo_epi64(b, d);
    row[3] = _mm512_unpackhi_epi64(b, d);
}

/* d = 64: a vector of the record is two g, each with 4 lanes t of 2 words (half). lower, of g = 0..3, and upper, of g = 4..7:
 * [t / 2] with words in the order t % 2, half, g % 4. */
ATTEND_INLINE void gather_64(const uint8_t *tile, __m512i lower[2], __m512i upper[2]) {
    const __m512i even = _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
    const __m512i odd = _mm512_setr_epi32(4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31);
    __m512i row[4];
    for (uint32_t i = 0; i < 4; i++)
        row[i] = _mm512_loadu_si512(tile + (size_t)64 * i);
    lower[0] = _mm512_permutex2var_epi32(row[0], even, row[1]);
    lower[1] = _mm512_permutex2var_epi32(row[0], odd, row[1]);
    upper[0] = _mm512_permutex2var_epi32(row[2], even, row[3]);
    upper[1] = _mm512_permutex2var_epi32(row[2], odd, row[3]);
}

ATTEND_INLINE void unpack_64(const uint8_t *record, struct unpacked *ret) {
    const __m512i both_halves[2] = {
        _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23),
        _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31),
    };
    const __m512i one_half[4] = {
        _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 0, 1, 2, 3, 16, 17, 18, 19),
        _mm512_setr_epi32(4, 5, 6, 7, 20, 21, 22, 23, 4, 5, 6, 7, 20, 21, 22, 23),
        _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 8, 9, 10, 11, 24, 25, 26, 27),
        _mm512_setr_epi32(12, 13, 14, 15, 28, 29, 30, 31, 12, 13, 14, 15, 28, 29, 30, 31),
    };
    /* The upper eight lanes take the second byte of each token's half: codes 4..7 beside codes 0..3. */
    const __m512i shift = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 8, 8, 8, 8, 8, 8, 8, 8);
    for (uint32_t tile = 0; tile < 4; tile++) {
        __m512i lower[2], upper[2];
        gather_64(record + (size_t)256 * tile, lower, upper);
        for (uint32_t t = 0; t < 4; t++)
            ret->k[tile][t] = _mm512_permutex2var_epi32(lower[t / 2], both_halves[t % 2], upper[t / 2]);
        gather_64(record + 1024 + (size_t)256 * tile, lower, upper);
        for (uint32_t t = 0; t < 4; t++)
            for (uint32_t h = 0; h < 2; h++) {
                __m512i word = _mm512_permutex2var_epi32(lower[t / 2], one_half[t % 2 * 2 + h], upper[t / 2]);
                ret->v[0][tile * 8 + h * 4 + t] = _mm512_srlv_epi32(word, shift);
            }
    }
}

/* d = 128: a vector of the record is one g, a block is one lane t: words (half, w) of K, (h, r) of V. */
ATTEND_INLINE void unpack_128(const uint8_t *record, struct unpacked *ret) {
    const __m512i first_of_pairs = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 2, 6, 10, 14, 18, 22, 26, 30);
    const __m512i first_pair = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    const __m512i second_of_pairs = _mm512_or_si512(first_of_pairs, _mm512_set1_epi32(1));
    const __m512i second_pair = _mm512_or_si512(first_pair, _mm512_set1_epi32(2));
    for (uint32_t tile = 0; tile < 8; tile++) { /* four of K, four of V */
        __m512i lower[4], upper[4];             /* g = 0..3, g = 4..7; then lanes t */
        for (uint32_t g = 0; g < 4; g++) {
            lower[g] = _mm512_loadu_si512(record + (size_t)512 * tile + (size_t)64 * g);
            upper[g] = _mm512_loadu_si512(record + (size_t)512 * tile + (size_t)64 * (g + 4));
        }
        transpose_blocks(lower);
        transpose_blocks(upper);
        for (uint32_t t = 0; t < 4; t++) {
            if (tile < 4) {
                ret->k[tile][t] = _mm512_permutex2var_epi32(lower[t], first_of_pairs, upper[t]);
                ret->k[tile][4 + t] = _mm512_permutex2var_epi32(lower[t], second_of_pairs, upper[t]);
            } else {
                ret->v[0][(tile - 4) * 8 + t] = _mm512_permutex2var_epi32(lower[t], first_pair, upper[t]);
                ret->v[0][(tile - 4) * 8 + 4 + t] = _mm512_permutex2var_epi32(lower[t], second_pair, upper[t]);
            }
        }
    }
}

/* d = 256: a g is two vectors (lanes t = 0, 1 and 2, 3), a block is one half of one lane: words w of K, r of V. */
ATTEND_INLINE void unpack_256(const uint8_t *record, struct unpacked *ret) {
    const __m512i even_blocks = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i odd_blocks = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    for (uint32_t tile = 0; tile < 8; tile++) {
        for (uint32_t pair = 0; pair < 2; pair++) {
            __m512i word[2][4]; /* [g / 4][word]: blocks (t & 1, half) of g = 0..3 or 4..7 */
            for (uint32_t upper = 0; upper < 2; upper++) {
                for (uint32_t g = 0; g < 4; g++)
                    word[upper][g] = _mm512_loadu_si512(record + (size_t)1024 * tile + (size_t)128 * (4 * upper + g) +
                                                        (size_t)64 * pair);
                transpose_words(word[upper]);
            }
            if (tile < 4) {
                for (uint32_t w = 0; w < 4; w++) {
                    ret->k[tile][4 * w + 2 * pair] = _mm512_permutex2var_epi64(word[0][w], even_blocks, word[1][w]);
                    ret->k[tile][4 * w + 2 * pair + 1] = _mm512_permutex2var_epi64(word[0][w], odd_blocks, word[1][w]);
                }
                continue;
            }
            for (uint32_t vector = 0; vector < 2; vector++) {
                __m512i row[4] = {word[0][2 * vector], word[1][2 * vector], word[0][2 * vector + 1],
                                  word[1][2 * vector + 1]};
                transpose_blocks(row);
                for (uint32_t block = 0; block < 4; block++)
                    ret->v[vector][(tile - 4) * 8 + block % 2 * 4 + 2 * pair + block / 2] = row[block];
            }
        }
    }
}

/* Scales and zeros by token; rows that no column sees become zeros, whatever they hold. */
ATTEND_INLINE void unpack_scales(const uint8_t *scales, uint32_t rows, struct unpacked *ret) {
    /* token = 8 half + g of a tile; halves of 16 bits at 8g + 4 half + {scale K, zero K, scale V, zero V} */
    const __m512i order = _mm512_set_epi16(61, 53, 45, 37, 29, 21, 13, 5, 57, 49, 41, 33, 25, 17, 9, 1, 60, 52, 44, 36,
                                           28, 20, 12, 4, 56, 48, 40, 32, 24, 16, 8, 0);
    uint64_t seen = rows == OSCAR_PAGE_TOKENS ? ~UINT64_C(0) : (UINT64_C(1) << rows) - 1;
    for (uint32_t tile = 0; tile < 4; tile++, scales += 128) {
        __m512i first = _mm512_loadu_si512(scales), second = _mm512_loadu_si512(scales + 64);
        __m512i k = _mm512_permutex2var_epi16(first, order, second);
        __m512i v = _mm512_permutex2var_epi16(first, _mm512_add_epi16(order, _mm512_set1_epi16(2)), second);
        __mmask16 mask = (__mmask16)(seen >> (16 * tile));
        _mm512_storeu_ps(ret->scale_k + 16 * tile, _mm512_maskz_cvtph_ps(mask, _mm512_castsi512_si256(k)));
        _mm512_storeu_ps(ret->zero_k + 16 * tile, _mm512_maskz_cvtph_ps(mask, _mm512_extracti64x4_epi64(k, 1)));
        _mm512_storeu_ps(ret->scale_v + 16 * tile, _mm512_maskz_cvtph_ps(mask, _mm512_castsi512_si256(v)));
        _mm512_storeu_ps(ret->zero_v + 16 * tile, _mm512_maskz_cvtph_ps(mask, _mm512_extracti64x4_epi64(v, 1)));
    }
}

#endif
