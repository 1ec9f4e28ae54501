/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A packed page at the AVX-512 VNNI level, in integers: vpdpbusd takes four codes of a token against four dims of the query's
 * high and low bytes, vpdpwssd two tokens of a dim against two 16-bit weights.
 *
 * A record's words are transposed first, once for all columns of the block: for K a vector holds the same word of sixteen
 * tokens, for V the same token pair of sixteen dims. So the query's bytes and the weights are broadcast from memory, and no sum
 * is ever taken across a vector in the inner loops.
 */
#include "kernels/host/attend_avx512.h"

#define TOKENS OSCAR_PAGE_TOKENS

struct unpacked {
    /* [tile][4w + t]: word w of lane t, tokens 0..15 of the tile; its codes f stand for dims 16(Wf + w) + 4t + k */
    __m512i k[4][16];
    /* [vector][tile, half h, lane t]: two tokens in each word, dims in order. d = 64: dims 8i + g below code 8(i + 4) + g,
     * i = 0..3; d = 128: dims 16i + 0..15; d = 256: dims 32i + 16 * vector + 0..15, i = 0..7. */
    __m512i v[2][32];
    float scale_k[TOKENS], zero_k[TOKENS], scale_v[TOKENS], zero_v[TOKENS];
    float turn[2][OSCAR_MAX_PAIRS]; /* of the page's first position: cos, sin */
};

/* --- transposition --- */

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

/* d = 64: a vector of the record is two g, each 4 lanes t of 2 words (half). gathers[t / 2] after the first step: [t & 1][half][g & 3]
 * of g = 0..3 and of g = 4..7. */
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
    uint64_t seen = rows == TOKENS ? ~UINT64_C(0) : (UINT64_C(1) << rows) - 1;
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

/* --- scores --- */

/* The page's turn of each of the block's pairs, zeros from the last pair on. Long before it is read, for stores so small do not
 * reach a wide load until they are in the cache. */
ATTEND_INLINE void gather_turn(const struct attend_columns *columns, const struct attend_page *page,
                               struct unpacked *ret) {
    memset(ret->turn, 0, sizeof(ret->turn));
    for (uint32_t i = 0; i < columns->pairs; i++) {
        ret->turn[0][i] = page->turn[(size_t)columns->pair[i] * 2];
        ret->turn[1][i] = page->turn[(size_t)columns->pair[i] * 2 + 1];
    }
}

struct centre_sums { /* of one column over the page's four tiles */
    __m512 tile0, tile1, tile2, tile3;
};

ATTEND_INLINE void add_pair(struct centre_sums *sums, float factor, __m512 row0, __m512 row1, __m512 row2,
                            __m512 row3) {
    __m512 factors = _mm512_set1_ps(factor);
    sums->tile0 = _mm512_fmadd_ps(factors, row0, sums->tile0);
    sums->tile1 = _mm512_fmadd_ps(factors, row1, sums->tile1);
    sums->tile2 = _mm512_fmadd_ps(factors, row2, sums->tile2);
    sums->tile3 = _mm512_fmadd_ps(factors, row3, sums->tile3);
}

ATTEND_INLINE struct centre_sums begin_centre(float sigma) {
    __m512 value = _mm512_set1_ps(sigma);
    return (struct centre_sums){value, value, value, value};
}

ATTEND_INLINE void finish_centre(struct centre_sums sums, float *scores) {
    _mm512_storeu_ps(scores, sums.tile0);
    _mm512_storeu_ps(scores + 16, sums.tile1);
    _mm512_storeu_ps(scores + 32, sums.tile2);
    _mm512_storeu_ps(scores + 48, sums.tile3);
}

/* Logits of K's centre: (alpha, beta) turned by the page's first position, against the row table. */
ATTEND_INLINE void centre_scores(const struct attend_columns *columns, uint32_t c0, uint32_t n,
                                 const struct unpacked *codes, float scores[ATTEND_GROUP][TOKENS]) {
    float turned[ATTEND_GROUP][2][OSCAR_MAX_PAIRS];
    __m512 turn_cos = _mm512_loadu_ps(codes->turn[0]), turn_sin = _mm512_loadu_ps(codes->turn[1]);
    for (uint32_t m = 0; m < n; m++) {
        __m512 alpha = _mm512_loadu_ps(columns->alpha[c0 + m]), beta = _mm512_loadu_ps(columns->beta[c0 + m]);
        _mm512_storeu_ps(turned[m][0], _mm512_fmadd_ps(alpha, turn_cos, _mm512_mul_ps(beta, turn_sin)));
        _mm512_storeu_ps(turned[m][1], _mm512_fmsub_ps(beta, turn_cos, _mm512_mul_ps(alpha, turn_sin)));
    }
    const float *sigma = columns->sigma + c0;
    struct centre_sums s0 = begin_centre(sigma[0]), s1 = s0, s2 = s0, s3 = s0;
    if (n > 1)
        s1 = begin_centre(sigma[1]);
    if (n > 2)
        s2 = begin_centre(sigma[2]);
    if (n > 3)
        s3 = begin_centre(sigma[3]);
#pragma GCC unroll 1
    for (uint32_t i = 0; i < 2 * columns->pairs; i++) {
        const float *row = columns->row_turn + (size_t)i * TOKENS;
        __m512 row0 = _mm512_loadu_ps(row), row1 = _mm512_loadu_ps(row + 16);
        __m512 row2 = _mm512_loadu_ps(row + 32), row3 = _mm512_loadu_ps(row + 48);
        add_pair(&s0, turned[0][i % 2][i / 2], row0, row1, row2, row3);
        if (n > 1)
            add_pair(&s1, turned[1][i % 2][i / 2], row0, row1, row2, row3);
        if (n > 2)
            add_pair(&s2, turned[2][i % 2][i / 2], row0, row1, row2, row3);
        if (n > 3)
            add_pair(&s3, turned[3][i % 2][i / 2], row0, row1, row2, row3);
    }
    finish_centre(s0, scores[0]);
    if (n > 1)
        finish_centre(s1, scores[1]);
    if (n > 2)
        finish_centre(s2, scores[2]);
    if (n > 3)
        finish_centre(s3, scores[3]);
}

ATTEND_INLINE __m512i broadcast_word(const void *at) {
    int32_t word;
    memcpy(&word, at, sizeof(word));
    return _mm512_set1_epi32(word);
}

/*
 * The inner loops keep four sets of sums in registers, as named variables: an array is spilled by the compilers of today. Four
 * columns have a set each. Fewer columns spread over the sets in turn, since one set is too few to hide an instruction's latency;
 * the sets of a column are added at the end. `turn` counts the steps.
 */
#define SET_OF(n, m, turn) ((n) == 1 ? (turn) % 4 : (n) == 2 ? (m) + (turn) % 2 * 2 : (m))
#define PICK(set, s0, s1, s2, s3) ((set) == 0 ? (s0) : (set) == 1 ? (s1) : (set) == 2 ? (s2) : (s3))

struct score_sums { /* of two tiles */
    __m512i high0, high1, low0, low1;
};

ATTEND_INLINE void score_codes(struct score_sums *sums, __m512i code0, __m512i code1, const int8_t *high,
                               const int8_t *low) {
    __m512i q_high = broadcast_word(high), q_low = broadcast_word(low);
    sums->high0 = _mm512_dpbusd_epi32(sums->high0, code0, q_high);
    sums->high1 = _mm512_dpbusd_epi32(sums->high1, code1, q_high);
    sums->low0 = _mm512_dpbusd_epi32(sums->low0, code0, q_low);
    sums->low1 = _mm512_dpbusd_epi32(sums->low1, code1, q_low);
}

ATTEND_INLINE void score_columns(uint32_t n, uint32_t w, uint32_t f, __m512i word0, __m512i word1, const int8_t *high,
                                 const int8_t *low, struct score_sums *s0, struct score_sums *s1, struct score_sums *s2,
                                 struct score_sums *s3) {
    const __m512i two_bits = _mm512_set1_epi8(3);
    __m512i code0 = _mm512_and_si512(word0, two_bits), code1 = _mm512_and_si512(word1, two_bits);
    size_t at = (size_t)16 * w * f, d = (size_t)64 * w;
    score_codes(PICK(SET_OF(n, 0, f), s0, s1, s2, s3), code0, code1, high + at, low + at);
    if (n > 1)
        score_codes(PICK(SET_OF(n, 1, f), s0, s1, s2, s3), code0, code1, high + d + at, low + d + at);
    if (n > 2)
        score_codes(s2, code0, code1, high + 2 * d + at, low + 2 * d + at);
    if (n > 3)
        score_codes(s3, code0, code1, high + 3 * d + at, low + 3 * d + at);
}

/* Two lines of the page after the next at each step of the loops: many at once would wait for each other. */
ATTEND_INLINE void prefetch_lines(const uint8_t *ahead) {
    _mm_prefetch((const char *)ahead, _MM_HINT_T0);
    _mm_prefetch((const char *)ahead + 64, _MM_HINT_T0);
}

ATTEND_INLINE void add_score_sums(struct score_sums *to, const struct score_sums *from) {
    to->high0 = _mm512_add_epi32(to->high0, from->high0);
    to->high1 = _mm512_add_epi32(to->high1, from->high1);
    to->low0 = _mm512_add_epi32(to->low0, from->low0);
    to->low1 = _mm512_add_epi32(to->low1, from->low1);
}

/* Scores of sixteen tokens from their sums; with a centre they are added to what is there. */
ATTEND_INLINE void finish_scores(const struct attend_columns *columns, uint32_t c, uint32_t t,
                                 const struct unpacked *codes, __m512i high, __m512i low, float *scores) {
    __m512 dot = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
    __m512 step = _mm512_set1_ps(columns->step[c]);
    dot = _mm512_fnmadd_ps(_mm512_loadu_ps(codes->zero_k + t), _mm512_set1_ps(columns->sum[c]), dot);
    dot = _mm512_mul_ps(dot, _mm512_loadu_ps(codes->scale_k + t));
    if (columns->centred)
        dot = _mm512_fmadd_ps(dot, step, _mm512_loadu_ps(scores + t));
    else
        dot = _mm512_mul_ps(dot, step);
    _mm512_storeu_ps(scores + t, dot);
}

/* Scores of two tiles for n columns; W = d / 64. */
ATTEND_INLINE void score_tiles(const struct attend_columns *columns, uint32_t c0, uint32_t n, uint32_t w, uint32_t tile,
                               const struct unpacked *codes, const uint8_t *ahead, float scores[ATTEND_GROUP][TOKENS]) {
    const int8_t *high = columns->high + (size_t)c0 * 64 * w, *low = columns->low + (size_t)c0 * 64 * w;
    const __m512i zero = _mm512_setzero_si512();
    struct score_sums s0 = {zero, zero, zero, zero}, s1 = s0, s2 = s0, s3 = s0;
#pragma GCC unroll 1
    for (uint32_t j = 0; j < 4 * w; j++, high += 4, low += 4, ahead += 128) {
        prefetch_lines(ahead);
        __m512i word0 = codes->k[tile][j], word1 = codes->k[tile + 1][j];
        score_columns(n, w, 0, word0, word1, high, low, &s0, &s1, &s2, &s3);
        score_columns(n, w, 1, _mm512_srli_epi32(word0, 2), _mm512_srli_epi32(word1, 2), high, low, &s0, &s1, &s2, &s3);
        score_columns(n, w, 2, _mm512_srli_epi32(word0, 4), _mm512_srli_epi32(word1, 4), high, low, &s0, &s1, &s2, &s3);
        score_columns(n, w, 3, _mm512_srli_epi32(word0, 6), _mm512_srli_epi32(word1, 6), high, low, &s0, &s1, &s2, &s3);
    }
    if (n <= 2) {
        add_score_sums(&s0, &s2);
        add_score_sums(&s1, &s3);
    }
    if (n == 1)
        add_score_sums(&s0, &s1);
    uint32_t t = tile * 16;
    finish_scores(columns, c0, t, codes, s0.high0, s0.low0, scores[0]);
    finish_scores(columns, c0, t + 16, codes, s0.high1, s0.low1, scores[0]);
    if (n > 1) {
        finish_scores(columns, c0 + 1, t, codes, s1.high0, s1.low0, scores[1]);
        finish_scores(columns, c0 + 1, t + 16, codes, s1.high1, s1.low1, scores[1]);
    }
    if (n > 2) {
        finish_scores(columns, c0 + 2, t, codes, s2.high0, s2.low0, scores[2]);
        finish_scores(columns, c0 + 2, t + 16, codes, s2.high1, s2.low1, scores[2]);
    }
    if (n > 3) {
        finish_scores(columns, c0 + 3, t, codes, s3.high0, s3.low0, scores[3]);
        finish_scores(columns, c0 + 3, t + 16, codes, s3.high1, s3.low1, scores[3]);
    }
}

/* --- weights and output --- */

/* 16-bit weights of one column: fixed * unit = 2^(score - max) * scale V. Relative to the page's largest, so that a sink
 * elsewhere takes nothing from them. */
struct weights {
    int16_t fixed[ATTEND_GROUP][TOKENS];
    float unit[ATTEND_GROUP];
    float zeros[ATTEND_GROUP]; /* sum of 2^(score - max) * scale * zero, of the rounded weights */
};

ATTEND_INLINE void weigh_columns(const struct attend_columns *columns, uint32_t c0, uint32_t n, uint32_t first,
                                 const struct attend_partial *partial, const struct unpacked *codes,
                                 float scores[ATTEND_GROUP][TOKENS], struct weights *ret) {
    const __m512 zero = _mm512_setzero_ps(), unit = _mm512_set1_ps(ATTEND_P_UNIT);
    __m512 zeros[ATTEND_GROUP] = {zero, zero, zero, zero};
    __m512 most = attend_softmax(columns, c0, n, first, partial, codes->scale_v, scores);
    __mmask16 something = _mm512_cmp_ps_mask(most, _mm512_set1_ps(ATTEND_P_NOTHING), _CMP_GE_OQ);
    __m512 inverse = _mm512_maskz_div_ps(something, unit, most), units = _mm512_maskz_div_ps(something, most, unit);
#pragma GCC unroll 4
    for (uint32_t m = 0; m < n; m++) {
        __m512 column_inverse = ATTEND_OF_BLOCK(inverse, m);
#pragma GCC unroll 4
        for (uint32_t i = 0; i < 4; i++) {
            __m512i fixed = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(scores[m] + 16 * i), column_inverse));
            zeros[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(fixed), _mm512_loadu_ps(codes->zero_v + 16 * i), zeros[m]);
            _mm256_storeu_si256((__m256i *)(void *)(ret->fixed[m] + 16 * i), _mm512_cvtepi32_epi16(fixed));
        }
    }
    attend_store_blocks(ret->unit, n, units);
    attend_store_blocks(ret->zeros, n, _mm512_mul_ps(attend_fold(zeros, false), units));
}

struct value_sums { /* of four codes of a word: their masked bits are code * 4^i */
    __m512i code0, code1, code2, code3;
};

ATTEND_INLINE void add_codes(struct value_sums *sums, __m512i word, const int16_t *weights) {
    __m512i weight = broadcast_word(weights);
    sums->code0 = _mm512_dpwssd_epi32(sums->code0, _mm512_and_si512(word, _mm512_set1_epi32(0x00030003)), weight);
    sums->code1 = _mm512_dpwssd_epi32(sums->code1, _mm512_and_si512(word, _mm512_set1_epi32(0x000C000C)), weight);
    sums->code2 = _mm512_dpwssd_epi32(sums->code2, _mm512_and_si512(word, _mm512_set1_epi32(0x00300030)), weight);
    sums->code3 = _mm512_dpwssd_epi32(sums->code3, _mm512_and_si512(word, _mm512_set1_epi32(0x00C000C0)), weight);
}

ATTEND_INLINE void add_columns(uint32_t n, uint32_t turn, __m512i word, const struct weights *weights, uint32_t pair,
                               struct value_sums *s0, struct value_sums *s1, struct value_sums *s2,
                               struct value_sums *s3) {
    add_codes(PICK(SET_OF(n, 0, turn), s0, s1, s2, s3), word, weights->fixed[0] + (size_t)2 * pair);
    if (n > 1)
        add_codes(PICK(SET_OF(n, 1, turn), s0, s1, s2, s3), word, weights->fixed[1] + (size_t)2 * pair);
    if (n > 2)
        add_codes(s2, word, weights->fixed[2] + (size_t)2 * pair);
    if (n > 3)
        add_codes(s3, word, weights->fixed[3] + (size_t)2 * pair);
}

ATTEND_INLINE void add_value_sums(struct value_sums *to, const struct value_sums *from) {
    to->code0 = _mm512_add_epi32(to->code0, from->code0);
    to->code1 = _mm512_add_epi32(to->code1, from->code1);
    to->code2 = _mm512_add_epi32(to->code2, from->code2);
    to->code3 = _mm512_add_epi32(to->code3, from->code3);
}

/* Adds sum * unit - zeros to the sixteen outputs of code i of pass `pass`. */
ATTEND_INLINE void finish_code(uint32_t w, uint32_t pass, uint32_t i, __m512i sum, float unit, float zeros,
                               float *out) {
    uint32_t vector = pass / 2, code = i + pass % 2 * 4;
    __m512 value = _mm512_fmsub_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(unit), _mm512_set1_ps(zeros));
    if (w == 1) {
        float *lower = out + (size_t)8 * i, *upper = out + (size_t)8 * (i + 4);
        _mm256_storeu_ps(lower, _mm256_add_ps(_mm256_loadu_ps(lower), _mm512_castps512_ps256(value)));
        _mm256_storeu_ps(upper, _mm256_add_ps(_mm256_loadu_ps(upper), _mm512_extractf32x8_ps(value, 1)));
    } else {
        out += w == 2 ? 16 * code : 32 * code + 16 * vector;
        _mm512_storeu_ps(out, _mm512_add_ps(_mm512_loadu_ps(out), value));
    }
}

ATTEND_INLINE void finish_column(uint32_t w, uint32_t pass, const struct value_sums *sums, float unit, float zeros,
                                 float *out) {
    finish_code(w, pass, 0, sums->code0, unit, zeros, out);
    finish_code(w, pass, 1, sums->code1, unit / 4, zeros, out);
    finish_code(w, pass, 2, sums->code2, unit / 16, zeros, out);
    finish_code(w, pass, 3, sums->code3, unit / 64, zeros, out);
}

/* Adds the page's values to n columns, four codes of every word a pass. */
ATTEND_INLINE void add_values(uint32_t c0, uint32_t n, uint32_t w, const struct unpacked *codes,
                              const struct weights *weights, const uint8_t *ahead,
                              const struct attend_partial *partial) {
#pragma GCC unroll 1
    for (uint32_t pass = 0; pass < w; pass++) {
        const __m512i *words = codes->v[pass / 2];
        __m128i shift = _mm_cvtsi32_si128(pass % 2 != 0 ? 8 : 0);
        const __m512i zero = _mm512_setzero_si512();
        struct value_sums s0 = {zero, zero, zero, zero}, s1 = s0, s2 = s0, s3 = s0;
#pragma GCC unroll 1
        for (uint32_t pair = 0; pair < 32; pair += 4, ahead += 128) {
            prefetch_lines(ahead);
            __m512i word0 = words[pair], word1 = words[pair + 1], word2 = words[pair + 2], word3 = words[pair + 3];
            if (w > 1) {
                word0 = _mm512_srl_epi32(word0, shift);
                word1 = _mm512_srl_epi32(word1, shift);
                word2 = _mm512_srl_epi32(word2, shift);
                word3 = _mm512_srl_epi32(word3, shift);
            }
            add_columns(n, 0, word0, weights, pair, &s0, &s1, &s2, &s3);
            add_columns(n, 1, word1, weights, pair + 1, &s0, &s1, &s2, &s3);
            add_columns(n, 2, word2, weights, pair + 2, &s0, &s1, &s2, &s3);
            add_columns(n, 3, word3, weights, pair + 3, &s0, &s1, &s2, &s3);
        }
        if (n <= 2) {
            add_value_sums(&s0, &s2);
            add_value_sums(&s1, &s3);
        }
        if (n == 1)
            add_value_sums(&s0, &s1);
        float *out = partial->out + (size_t)c0 * 64 * w;
        finish_column(w, pass, &s0, weights->unit[0], weights->zeros[0], out);
        if (n > 1)
            finish_column(w, pass, &s1, weights->unit[1], weights->zeros[1], out + (size_t)64 * w);
        if (n > 2)
            finish_column(w, pass, &s2, weights->unit[2], weights->zeros[2], out + (size_t)128 * w);
        if (n > 3)
            finish_column(w, pass, &s3, weights->unit[3], weights->zeros[3], out + (size_t)192 * w);
    }
}

/* --- a page --- */

ATTEND_INLINE void attend_group(const struct attend_columns *columns, const struct attend_page *page, uint32_t c0,
                                uint32_t n, uint32_t w, const struct unpacked *codes,
                                const struct attend_partial *partial) {
    const uint8_t *ahead = page->ahead != NULL && c0 == 0 ? page->ahead : page->record;
    float scores[ATTEND_GROUP][TOKENS];
    struct weights weights;
    if (columns->centred)
        centre_scores(columns, c0, n, codes, scores);
#pragma GCC unroll 1
    for (uint32_t tile = 0; tile < 4; tile += 2) /* K is prefetched here, V below */
        score_tiles(columns, c0, n, w, tile, codes, ahead + (size_t)256 * w * tile, scores);
    weigh_columns(columns, c0, n, page->first, partial, codes, scores, &weights);
    add_values(c0, n, w, codes, &weights, ahead + (size_t)1024 * w, partial);
}

ATTEND_INLINE void attend_block(const struct attend_columns *columns, const struct attend_page *page, uint32_t w,
                                const struct unpacked *codes, const struct attend_partial *partial) {
    uint32_t c = 0;
    for (; c + 4 <= columns->count; c += 4)
        attend_group(columns, page, c, 4, w, codes, partial);
    switch (columns->count - c) {
    case 3:
        attend_group(columns, page, c, 3, w, codes, partial);
        break;
    case 2:
        attend_group(columns, page, c, 2, w, codes, partial);
        break;
    case 1:
        attend_group(columns, page, c, 1, w, codes, partial);
        break;
    default:
        break;
    }
}

static void packed(const struct attend_columns *columns, const struct attend_page *page,
                   const struct attend_partial *partial) {
    struct unpacked codes;
    for (uint32_t byte = 0; page->ahead != NULL && byte < OSCAR_SCALES_BYTES; byte += 64)
        _mm_prefetch((const char *)page->ahead + oscar_packed_scales_offset(columns->d) + byte, _MM_HINT_T0);
    if (columns->centred)
        gather_turn(columns, page, &codes);
    unpack_scales(page->record + oscar_packed_scales_offset(columns->d), page->rows, &codes);
    switch (columns->d) {
    case 64:
        unpack_64(page->record, &codes);
        attend_block(columns, page, 1, &codes, partial);
        break;
    case 128:
        unpack_128(page->record, &codes);
        attend_block(columns, page, 2, &codes, partial);
        break;
    default:
        unpack_256(page->record, &codes);
        attend_block(columns, page, 4, &codes, partial);
        break;
    }
}

const struct attend_kernels attend_kernels_avx512 = {.packed = packed, .dense = attend_dense_avx512};
