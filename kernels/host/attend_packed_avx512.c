/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A packed page at the AVX-512 VNNI level, in integers: vpdpbusd takes four codes of a token against four dims of the query's
 * high and low bytes, vpdpwssd two tokens of a dim against two 16-bit weights.
 *
 * A record's words are transposed first, once for all columns of the block (attend_unpack_avx512.h), so that the query's bytes
 * and the weights are broadcast from memory, and no sum is ever taken across a vector in the inner loops.
 */
#include "kernels/host/attend_avx512.h"
#include "kernels/host/attend_unpack_avx512.h"

#define TOKENS OSCAR_PAGE_TOKENS

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
    float turned[ATTEND_GROUP][2][OSCAR_MAX_PAIRS] = {{{0}}};
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
