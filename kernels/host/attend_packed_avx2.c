/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A packed page at the AVX2 level, in integers: vpmaddubsw takes codes of a token against the query's high and low bytes and
 * adds up in 16 bits, which hold 32 such steps; vpmaddwd takes two tokens of a dim against two 16-bit weights.
 *
 * A record's words are transposed first, once for all columns of the block: for K a vector holds the same word of eight tokens,
 * for V the same token pair of eight dims. So the query's bytes and the weights are broadcast from memory, and no sum is ever
 * taken across a vector in the inner loops.
 */
#include "kernels/host/attend_avx2.h"

#define TOKENS OSCAR_PAGE_TOKENS
#define STEPS 32U /* of vpmaddubsw before 16 bits may overflow: 32 * 2 * 3 * 128 < 2^15 */

struct unpacked {
    /* [tile, half][4w + t]: word w of lane t, eight tokens of the tile; its codes f stand for dims 16(Wf + w) + 4t + k */
    __m256i k[8][16];
    /* [i / 4][r][tile, half h, lane t]: two tokens in each word; its codes i stand for dims 8(Wi + r) + 0..7 */
    __m256i v[2][4][32];
    float scale_k[TOKENS], zero_k[TOKENS], scale_v[TOKENS], zero_v[TOKENS];
};

/* --- transposition --- */

/* Four words of g and of g + 4, beside each other. */
ATTEND_INLINE __m256i load_pair(const uint8_t *g, size_t to_fourth) {
    __m256i lower = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)g));
    return _mm256_inserti128_si256(lower, _mm_loadu_si128((const __m128i *)(const void *)(g + to_fourth)), 1);
}

/* From four words of eight g, `stride` bytes apart: four vectors of one word each, in the order of g. */
ATTEND_INLINE void transpose(const uint8_t *from, size_t stride, __m256i ret[4]) {
    __m256i row0 = load_pair(from, 4 * stride), row1 = load_pair(from + stride, 4 * stride);
    __m256i row2 = load_pair(from + 2 * stride, 4 * stride), row3 = load_pair(from + 3 * stride, 4 * stride);
    __m256i a = _mm256_unpacklo_epi32(row0, row1), b = _mm256_unpackhi_epi32(row0, row1);
    __m256i c = _mm256_unpacklo_epi32(row2, row3), d = _mm256_unpackhi_epi32(row2, row3);
    ret[0] = _mm256_unpacklo_epi64(a, c);
    ret[1] = _mm256_unpackhi_epi64(a, c);
    ret[2] = _mm256_unpacklo_epi64(b, d);
    ret[3] = _mm256_unpackhi_epi64(b, d);
}

/* Word x + y of every g: lane t = word / 2W, half (h of V) = word / W % 2, w (r of V) = word % W. */
ATTEND_INLINE void unpack_keys(const uint8_t *record, uint32_t w, struct unpacked *ret) {
    __m256i words[4];
    for (uint32_t tile = 0; tile < 4; tile++, record += (size_t)256 * w)
#pragma GCC unroll 8
        for (uint32_t x = 0; x < 8 * w; x += 4) {
            transpose(record + (size_t)4 * x, (size_t)32 * w, words);
#pragma GCC unroll 4
            for (uint32_t word = x; word < x + 4; word++)
                ret->k[tile * 2 + word / w % 2][word % w * 4 + word / (2 * w)] = words[word % 4];
        }
}

ATTEND_INLINE void unpack_values(const uint8_t *record, uint32_t w, struct unpacked *ret) {
    __m256i words[4];
    record += oscar_packed_v_offset(64 * w);
    for (uint32_t tile = 0; tile < 4; tile++, record += (size_t)256 * w)
#pragma GCC unroll 8
        for (uint32_t x = 0; x < 8 * w; x += 4) {
            transpose(record + (size_t)4 * x, (size_t)32 * w, words);
#pragma GCC unroll 4
            for (uint32_t word = x; word < x + 4; word++) {
                uint32_t pair = tile * 8 + word / w % 2 * 4 + word / (2 * w);
                ret->v[0][word % w][pair] = words[word % 4];
                ret->v[1][word % w][pair] = _mm256_srli_epi32(words[word % 4], 8);
            }
        }
}

/* Scales and zeros by token; rows that no column sees become zeros, whatever they hold. */
ATTEND_INLINE void unpack_scales(const uint8_t *scales, uint32_t rows, struct unpacked *ret) {
    for (uint32_t tile = 0; tile < 4; tile++, scales += 128) {
        __m128i row[8];
        for (uint32_t g = 0; g < 8; g++)
            row[g] = _mm_loadu_si128((const __m128i *)(const void *)(scales + (size_t)16 * g));
        for (uint32_t half = 0; half < 2; half++) {
            __m128i pair[4], quad[4];
            for (uint32_t i = 0; i < 4; i++)
                pair[i] = half == 0 ? _mm_unpacklo_epi16(row[2 * i], row[2 * i + 1])
                                    : _mm_unpackhi_epi16(row[2 * i], row[2 * i + 1]);
            for (uint32_t i = 0; i < 2; i++) { /* scale and zero of K, then of V, for four tokens */
                quad[i] = _mm_unpacklo_epi32(pair[2 * i], pair[2 * i + 1]);
                quad[2 + i] = _mm_unpackhi_epi32(pair[2 * i], pair[2 * i + 1]);
            }
            __m256 seen = attend_seen(rows, tile * 2 + half);
            uint32_t t = tile * 16 + half * 8;
            __m256 value = _mm256_cvtph_ps(_mm_unpacklo_epi64(quad[0], quad[1]));
            _mm256_storeu_ps(ret->scale_k + t, _mm256_and_ps(value, seen));
            value = _mm256_cvtph_ps(_mm_unpackhi_epi64(quad[0], quad[1]));
            _mm256_storeu_ps(ret->zero_k + t, _mm256_and_ps(value, seen));
            value = _mm256_cvtph_ps(_mm_unpacklo_epi64(quad[2], quad[3]));
            _mm256_storeu_ps(ret->scale_v + t, _mm256_and_ps(value, seen));
            value = _mm256_cvtph_ps(_mm_unpackhi_epi64(quad[2], quad[3]));
            _mm256_storeu_ps(ret->zero_v + t, _mm256_and_ps(value, seen));
        }
    }
}

/* --- scores --- */

/* Logits of K's centre: (alpha, beta) turned by the page's first position, against the row table. */
static void centre_scores(const struct attend_columns *columns, const struct attend_page *page, uint32_t c,
                          float *scores) {
    float turned[2][OSCAR_MAX_PAIRS];
    for (uint32_t i = 0; i < columns->pairs; i++) {
        const float *turn = page->turn + (size_t)columns->pair[i] * 2;
        float alpha = columns->alpha[c][i], beta = columns->beta[c][i];
        turned[0][i] = alpha * turn[0] + beta * turn[1];
        turned[1][i] = beta * turn[0] - alpha * turn[1];
    }
    for (uint32_t t = 0; t < TOKENS; t += 32) { /* four sums hide the latency of one */
        __m256 s0 = _mm256_set1_ps(columns->sigma[c]), s1 = s0, s2 = s0, s3 = s0;
        for (uint32_t i = 0; i < 2 * columns->pairs; i++) {
            const float *row = columns->row_turn + (size_t)i * TOKENS + t;
            __m256 factor = _mm256_set1_ps(turned[i % 2][i / 2]);
            s0 = _mm256_fmadd_ps(factor, _mm256_loadu_ps(row), s0);
            s1 = _mm256_fmadd_ps(factor, _mm256_loadu_ps(row + 8), s1);
            s2 = _mm256_fmadd_ps(factor, _mm256_loadu_ps(row + 16), s2);
            s3 = _mm256_fmadd_ps(factor, _mm256_loadu_ps(row + 24), s3);
        }
        _mm256_storeu_ps(scores + t, s0);
        _mm256_storeu_ps(scores + t + 8, s1);
        _mm256_storeu_ps(scores + t + 16, s2);
        _mm256_storeu_ps(scores + t + 24, s3);
    }
}

ATTEND_INLINE __m256i broadcast_word(const void *at) {
    int32_t word;
    memcpy(&word, at, sizeof(word));
    return _mm256_set1_epi32(word);
}

/* Sums of one column over a vector of eight tokens, two 16-bit ones a token. Named variables and not an array, which the
 * compilers of today would spill. */
struct score_sums {
    __m256i high, low;
};

/* Additions in place. Of intrinsics the compilers make trees of sums, or copies, that do not fit sixteen registers. */
#define ADD_16(sum, x) __asm__ volatile("vpaddw %1, %0, %0" : "+x"(sum) : "x"(x))
#define ADD_32(sum, x) __asm__ volatile("vpaddd %1, %0, %0" : "+x"(sum) : "x"(x))

ATTEND_INLINE void score_codes(struct score_sums *sums, __m256i code, const int8_t *high, const int8_t *low) {
    ADD_16(sums->high, _mm256_maddubs_epi16(code, broadcast_word(high)));
    ADD_16(sums->low, _mm256_maddubs_epi16(code, broadcast_word(low)));
}

ATTEND_INLINE void score_columns(uint32_t n, uint32_t w, uint32_t f, __m256i word, const int8_t *high,
                                 const int8_t *low, struct score_sums *s0, struct score_sums *s1, struct score_sums *s2,
                                 struct score_sums *s3) {
    __m256i code = _mm256_and_si256(word, _mm256_set1_epi8(3));
    size_t at = (size_t)16 * w * f, d = (size_t)64 * w;
    score_codes(s0, code, high + at, low + at);
    if (n > 1)
        score_codes(s1, code, high + d + at, low + d + at);
    if (n > 2)
        score_codes(s2, code, high + 2 * d + at, low + 2 * d + at);
    if (n > 3)
        score_codes(s3, code, high + 3 * d + at, low + 3 * d + at);
}

ATTEND_INLINE __m256i widen(struct score_sums sums) {
    return _mm256_add_epi32(_mm256_madd_epi16(sums.high, _mm256_set1_epi16(256)),
                            _mm256_madd_epi16(sums.low, _mm256_set1_epi16(1)));
}

/* Scores of eight tokens from their sums; with a centre they are added to what is there. */
ATTEND_INLINE void finish_scores(const struct attend_columns *columns, uint32_t c, uint32_t t,
                                 const struct unpacked *codes, __m256i sum, float *scores) {
    __m256 dot = _mm256_cvtepi32_ps(sum), step = _mm256_set1_ps(columns->step[c]);
    dot = _mm256_fnmadd_ps(_mm256_loadu_ps(codes->zero_k + t), _mm256_set1_ps(columns->sum[c]), dot);
    dot = _mm256_mul_ps(dot, _mm256_loadu_ps(codes->scale_k + t));
    if (columns->centred)
        dot = _mm256_fmadd_ps(dot, step, _mm256_loadu_ps(scores + t));
    else
        dot = _mm256_mul_ps(dot, step);
    _mm256_storeu_ps(scores + t, dot);
}

/* Scores of eight tokens for n columns; W = d / 64. */
ATTEND_INLINE void score_tokens(const struct attend_columns *columns, uint32_t c0, uint32_t n, uint32_t w,
                                uint32_t eighth, const struct unpacked *codes, float scores[ATTEND_GROUP][TOKENS]) {
    const int8_t *high = columns->high + (size_t)c0 * 64 * w, *low = columns->low + (size_t)c0 * 64 * w;
    const __m256i zero = _mm256_setzero_si256();
    __m256i t0 = zero, t1 = zero, t2 = zero, t3 = zero;
    uint32_t words = STEPS / 4 < 4 * w ? STEPS / 4 : 4 * w; /* four steps a word */
#pragma GCC unroll 1
    for (uint32_t first = 0; first < 4 * w; first += words) {
        struct score_sums s0 = {zero, zero}, s1 = s0, s2 = s0, s3 = s0;
#pragma GCC unroll 1
        for (uint32_t j = first; j < first + words; j++, high += 4, low += 4) {
            __m256i word = codes->k[eighth][j];
            score_columns(n, w, 0, word, high, low, &s0, &s1, &s2, &s3);
            score_columns(n, w, 1, _mm256_srli_epi32(word, 2), high, low, &s0, &s1, &s2, &s3);
            score_columns(n, w, 2, _mm256_srli_epi32(word, 4), high, low, &s0, &s1, &s2, &s3);
            score_columns(n, w, 3, _mm256_srli_epi32(word, 6), high, low, &s0, &s1, &s2, &s3);
        }
        t0 = _mm256_add_epi32(t0, widen(s0));
        t1 = _mm256_add_epi32(t1, widen(s1));
        t2 = _mm256_add_epi32(t2, widen(s2));
        t3 = _mm256_add_epi32(t3, widen(s3));
    }
    finish_scores(columns, c0, eighth * 8, codes, t0, scores[0]);
    if (n > 1)
        finish_scores(columns, c0 + 1, eighth * 8, codes, t1, scores[1]);
    if (n > 2)
        finish_scores(columns, c0 + 2, eighth * 8, codes, t2, scores[2]);
    if (n > 3)
        finish_scores(columns, c0 + 3, eighth * 8, codes, t3, scores[3]);
}

/* --- weights and output --- */

/* 16-bit weights of one column: fixed * unit = 2^(score - max) * scale V. Relative to the page's largest, so that a sink
 * elsewhere takes nothing from them. */
struct weights {
    int16_t fixed[ATTEND_GROUP][TOKENS];
    float unit[ATTEND_GROUP][4]; /* divided by 4^i */
    float zeros[ATTEND_GROUP];   /* sum of 2^(score - max) * scale * zero, of the rounded weights */
};

ATTEND_INLINE __m256i round_weights(__m256 inverse, const float *weight, const float *zero, __m256 *zeros) {
    __m256i fixed = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(weight), inverse));
    *zeros = _mm256_fmadd_ps(_mm256_cvtepi32_ps(fixed), _mm256_loadu_ps(zero), *zeros);
    return fixed;
}

ATTEND_INLINE void weigh_columns(const struct attend_columns *columns, uint32_t c0, uint32_t n, uint32_t w,
                                 const struct attend_page *page, const struct attend_partial *partial,
                                 struct unpacked *codes, float scores[ATTEND_GROUP][TOKENS], struct weights *ret) {
    const __m256 zero = _mm256_setzero_ps();
    const __m128 unit = _mm_set1_ps(ATTEND_P_UNIT);
    __m256 zeros[ATTEND_GROUP] = {zero, zero, zero, zero};
    float inverse[ATTEND_GROUP];
    __m128 most = attend_softmax(columns, c0, n, page->first, partial, codes->scale_v, scores);
    __m128 something = _mm_cmpge_ps(most, _mm_set1_ps(ATTEND_P_NOTHING)), units = _mm_div_ps(most, unit);
    units = _mm_and_ps(units, something);
    _mm_storeu_ps(inverse, _mm_and_ps(_mm_div_ps(unit, most), something));
    if (c0 == 0) /* only now: it fills the time that the folds and divisions take */
        unpack_values(page->record, w, codes);
#pragma GCC unroll 4
    for (uint32_t m = 0; m < n; m++) {
        __m256 column_inverse = _mm256_set1_ps(inverse[m]);
        for (uint32_t t = 0; t < TOKENS; t += 16) {
            __m256i lower = round_weights(column_inverse, scores[m] + t, codes->zero_v + t, &zeros[m]);
            __m256i upper = round_weights(column_inverse, scores[m] + t + 8, codes->zero_v + t + 8, &zeros[m]);
            __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(lower, upper), 0xD8);
            _mm256_storeu_si256((__m256i *)(void *)(ret->fixed[m] + t), both);
        }
    }
    const __m128 undo = _mm_setr_ps(1, 0x1p-2F, 0x1p-4F, 0x1p-6F);
    _mm_storeu_ps(ret->unit[0], _mm_mul_ps(_mm_shuffle_ps(units, units, 0x00), undo));
    _mm_storeu_ps(ret->unit[1], _mm_mul_ps(_mm_shuffle_ps(units, units, 0x55), undo));
    _mm_storeu_ps(ret->unit[2], _mm_mul_ps(_mm_shuffle_ps(units, units, 0xAA), undo));
    _mm_storeu_ps(ret->unit[3], _mm_mul_ps(_mm_shuffle_ps(units, units, 0xFF), undo));
    _mm_storeu_ps(ret->zeros, _mm_mul_ps(attend_fold(zeros, false), units));
}

struct value_sums { /* of two codes of a word */
    __m256i code0, code1;
};

ATTEND_INLINE void add_codes(struct value_sums *sums, __m256i code0, __m256i code1, const int16_t *weights) {
    __m256i weight = broadcast_word(weights);
    ADD_32(sums->code0, _mm256_madd_epi16(code0, weight));
    ADD_32(sums->code1, _mm256_madd_epi16(code1, weight));
}

ATTEND_INLINE void finish_code(__m256i sum, const float *unit, __m256 zeros, float *out) {
    __m256 before = _mm256_sub_ps(_mm256_loadu_ps(out), zeros);
    _mm256_storeu_ps(out, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_broadcast_ss(unit), before));
}

ATTEND_INLINE void finish_column(uint32_t w, struct value_sums sums, const float unit[2], const float *zeros,
                                 float *out) {
    __m256 column_zeros = _mm256_broadcast_ss(zeros);
    finish_code(sums.code0, unit, column_zeros, out);
    finish_code(sums.code1, unit + 1, column_zeros, out + (size_t)8 * w);
}

/* Adds the page's values to n columns, two codes of every word a pass. Their masked bits are code * 4^i of the byte's code i,
 * which the unit undoes at the end. */
ATTEND_INLINE void add_values(uint32_t c0, uint32_t n, uint32_t w, const struct unpacked *codes,
                              const struct weights *weights, const uint8_t *ahead,
                              const struct attend_partial *partial) {
    const __m256i zero = _mm256_setzero_si256();
#pragma GCC unroll 1
    for (uint32_t pass = 0; pass < 4 * w; pass++) {
        uint32_t r = pass / 4, i = pass % 4 * 2;
        const __m256i *words = codes->v[i / 4][r];
        __m256i mask0 = _mm256_set1_epi32(i % 4 == 0 ? 0x00030003 : 0x00300030);
        __m256i mask1 = _mm256_set1_epi32(i % 4 == 0 ? 0x000C000C : 0x00C000C0);
        struct value_sums s0 = {zero, zero}, s1 = s0, s2 = s0, s3 = s0;
        /* The codes of the page after the next, a few lines a pass: all at once they would wait for each other. */
        for (uint32_t line = 0; line < 512; line += 64)
            _mm_prefetch((const char *)ahead + (size_t)512 * pass + line, _MM_HINT_T0);
#pragma GCC unroll 1
        for (uint32_t four = 0; four < 32; four += 4) {
#pragma GCC unroll 4
            for (uint32_t pair = four; pair < four + 4; pair++) {
                __m256i code0 = _mm256_and_si256(words[pair], mask0), code1 = _mm256_and_si256(words[pair], mask1);
                add_codes(&s0, code0, code1, weights->fixed[0] + (size_t)2 * pair);
                if (n > 1)
                    add_codes(&s1, code0, code1, weights->fixed[1] + (size_t)2 * pair);
                if (n > 2)
                    add_codes(&s2, code0, code1, weights->fixed[2] + (size_t)2 * pair);
                if (n > 3)
                    add_codes(&s3, code0, code1, weights->fixed[3] + (size_t)2 * pair);
            }
        }
        float *out = partial->out + (size_t)c0 * 64 * w + (size_t)8 * (w * i + r);
        finish_column(w, s0, weights->unit[0] + i % 4, &weights->zeros[0], out);
        if (n > 1)
            finish_column(w, s1, weights->unit[1] + i % 4, &weights->zeros[1], out + (size_t)64 * w);
        if (n > 2)
            finish_column(w, s2, weights->unit[2] + i % 4, &weights->zeros[2], out + (size_t)128 * w);
        if (n > 3)
            finish_column(w, s3, weights->unit[3] + i % 4, &weights->zeros[3], out + (size_t)192 * w);
    }
}

/* --- a page --- */

ATTEND_INLINE void attend_group(const struct attend_columns *columns, const struct attend_page *page, uint32_t c0,
                                uint32_t n, uint32_t w, struct unpacked *codes, const struct attend_partial *partial) {
    const uint8_t *ahead = page->ahead != NULL && c0 == 0 ? page->ahead : page->record;
    float scores[ATTEND_GROUP][TOKENS];
    struct weights weights;
    if (columns->centred)
        for (uint32_t m = 0; m < n; m++)
            centre_scores(columns, page, c0 + m, scores[m]);
#pragma GCC unroll 1
    for (uint32_t eighth = 0; eighth < 8; eighth++)
        score_tokens(columns, c0, n, w, eighth, codes, scores);
    weigh_columns(columns, c0, n, w, page, partial, codes, scores, &weights);
    add_values(c0, n, w, codes, &weights, ahead, partial);
}

ATTEND_INLINE void attend_block(const struct attend_columns *columns, const struct attend_page *page, uint32_t w,
                                const struct attend_partial *partial) {
    struct unpacked codes;
    uint32_t c = 0;
    unpack_scales(page->record + oscar_packed_scales_offset(64 * w), page->rows, &codes);
    unpack_keys(page->record, w, &codes);
    for (; c + 4 <= columns->count; c += 4)
        attend_group(columns, page, c, 4, w, &codes, partial);
    switch (columns->count - c) {
    case 3:
        attend_group(columns, page, c, 3, w, &codes, partial);
        break;
    case 2:
        attend_group(columns, page, c, 2, w, &codes, partial);
        break;
    case 1:
        attend_group(columns, page, c, 1, w, &codes, partial);
        break;
    default:
        break;
    }
}

static void packed(const struct attend_columns *columns, const struct attend_page *page,
                   const struct attend_partial *partial) {
    for (uint32_t byte = 0; page->ahead != NULL && byte < OSCAR_SCALES_BYTES; byte += 64)
        _mm_prefetch((const char *)page->ahead + oscar_packed_scales_offset(columns->d) + byte, _MM_HINT_T0);
    if (columns->d == 64)
        attend_block(columns, page, 1, partial);
    else if (columns->d == 128)
        attend_block(columns, page, 2, partial);
    else
        attend_block(columns, page, 4, partial);
}

const struct attend_kernels attend_kernels_avx2 = {.packed = packed, .dense = attend_dense_avx2};
