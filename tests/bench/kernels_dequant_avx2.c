/* SPDX-License-Identifier: Apache-2.0 */
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "tests/bench/kernels_dequant.h"

#define INLINE static inline __attribute__((always_inline))
#define GROUP DEQUANT_MOST_GROUP

/* A g of a tile is W vectors: W = 2: vector x holds lanes t = 2x, 2x + 1 of words (half, w); W = 1: lanes t = 0..3 of words half. */
struct head_state {
    __m256 out[GROUP][8][8];  /* [head][g][code]: partial sums in the order of the record's lanes */
    __m256 q[GROUP][2][4][4]; /* [head][x][f][k] in the same order */
    float max[GROUP], sum[GROUP];
};

INLINE __m256 exp2_ps(__m256 x) {
    x = _mm256_max_ps(x, _mm256_set1_ps(-126.0F));
    __m256 whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 f = _mm256_sub_ps(x, whole), y = _mm256_set1_ps(0x1.5bba1p-10F);
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(0x1.3cea88p-7F));
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(0x1.c6b752p-5F));
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(0x1.ebf9bcp-3F));
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(0x1.62e42ap-1F));
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(1.0F));
    __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(y, _mm256_castsi256_ps(exponent));
}

INLINE uint32_t key_dim(uint32_t w, uint32_t x, uint32_t lane, uint32_t f, uint32_t k) {
    return w == 2 ? 16 * (2 * f + lane % 2) + 4 * (2 * x + lane / 4) + k : 16 * f + lane / 2 * 4 + k;
}

/* Half (0: token g, 1: token g + 8) of a lane of K; token of a lane of V is 8h + 2t + u. */
INLINE __m256i half_index(uint32_t w) {
    return w == 2 ? _mm256_setr_epi32(0, 0, 1, 1, 0, 0, 1, 1) : _mm256_setr_epi32(0, 1, 0, 1, 0, 1, 0, 1);
}

static void load_scales(const uint8_t *scales, float ret[4][64]) {
    for (uint32_t tile = 0; tile < 4; tile++, scales += 128) {
        __m128i row[8];
        for (uint32_t g = 0; g < 8; g++)
            row[g] = _mm_loadu_si128((const __m128i *)(const void *)(scales + (size_t)16 * g));
        for (uint32_t half = 0; half < 2; half++) {
            __m128i pair[4], quad[4];
            for (uint32_t i = 0; i < 4; i++)
                pair[i] = half == 0 ? _mm_unpacklo_epi16(row[2 * i], row[2 * i + 1])
                                    : _mm_unpackhi_epi16(row[2 * i], row[2 * i + 1]);
            for (uint32_t i = 0; i < 2; i++) {
                quad[i] = _mm_unpacklo_epi32(pair[2 * i], pair[2 * i + 1]);
                quad[2 + i] = _mm_unpackhi_epi32(pair[2 * i], pair[2 * i + 1]);
            }
            uint32_t t = tile * 16 + half * 8;
            _mm256_storeu_ps(ret[0] + t, _mm256_cvtph_ps(_mm_unpacklo_epi64(quad[0], quad[1])));
            _mm256_storeu_ps(ret[1] + t, _mm256_cvtph_ps(_mm_unpackhi_epi64(quad[0], quad[1])));
            _mm256_storeu_ps(ret[2] + t, _mm256_cvtph_ps(_mm_unpacklo_epi64(quad[2], quad[3])));
            _mm256_storeu_ps(ret[3] + t, _mm256_cvtph_ps(_mm_unpackhi_epi64(quad[2], quad[3])));
        }
    }
}

/* Sums of one head over two g. Named variables and not an array, which the compilers of today would spill. */
struct key_sums {
    __m256 first, second;
};

INLINE void score_values(struct key_sums *sums, __m256 first, __m256 second, const __m256 *q) {
    sums->first = _mm256_fmadd_ps(first, *q, sums->first);
    sums->second = _mm256_fmadd_ps(second, *q, sums->second);
}

/* The sums over the lanes of token g and of token g + 8. */
INLINE void finish_keys(uint32_t w, __m256 sum, float *scores) {
    __m128 both = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
    if (w == 2)
        both = _mm_hadd_ps(both, both); /* lanes half, w */
    else
        both = _mm_add_ps(both, _mm_movehl_ps(both, both)); /* lanes t & 1, half */
    scores[0] = _mm_cvtss_f32(both);
    scores[8] = _mm_cvtss_f32(_mm_movehdup_ps(both));
}

INLINE void score_page(const uint8_t *record, uint32_t w, uint32_t n, float scales[4][64],
                       const struct head_state *state, float scores[GROUP][64]) {
    const __m256 table = _mm256_setr_ps(0, 1, 2, 3, 0, 1, 2, 3), zero = _mm256_setzero_ps();
    const __m256i half = half_index(w);
#pragma GCC unroll 1
    for (uint32_t tile = 0; tile < 4; tile++)
#pragma GCC unroll 1
        for (uint32_t g = 0; g < 8; g += 2) { /* two at once share the loads of q */
            struct key_sums s0 = {zero, zero}, s1 = s0, s2 = s0, s3 = s0;
            const float *scale = scales[0] + 16 * tile + g, *offset = scales[1] + 16 * tile + g;
            __m256 scale0 = _mm256_permutevar8x32_ps(_mm256_setr_ps(scale[0], scale[8], 0, 0, 0, 0, 0, 0), half);
            __m256 scale1 = _mm256_permutevar8x32_ps(_mm256_setr_ps(scale[1], scale[9], 0, 0, 0, 0, 0, 0), half);
            __m256 offset0 = _mm256_permutevar8x32_ps(_mm256_setr_ps(offset[0], offset[8], 0, 0, 0, 0, 0, 0), half);
            __m256 offset1 = _mm256_permutevar8x32_ps(_mm256_setr_ps(offset[1], offset[9], 0, 0, 0, 0, 0, 0), half);
            offset0 = _mm256_mul_ps(offset0, scale0);
            offset1 = _mm256_mul_ps(offset1, scale1);
            const uint8_t *from = record + (size_t)256 * w * tile + (size_t)32 * w * g;
#pragma GCC unroll 2
            for (uint32_t x = 0; x < w; x++) {
                __m256i word0 = _mm256_loadu_si256((const __m256i *)(const void *)(from + (size_t)32 * x));
                __m256i word1 = _mm256_loadu_si256((const __m256i *)(const void *)(from + (size_t)32 * (w + x)));
#pragma GCC unroll 16
                for (uint32_t i = 0; i < 16;
                     i++) { /* byte k, code f; the permutation reads three bits, the table repeats */
                    __m256 value0 = _mm256_fmsub_ps(_mm256_permutevar8x32_ps(table, word0), scale0, offset0);
                    __m256 value1 = _mm256_fmsub_ps(_mm256_permutevar8x32_ps(table, word1), scale1, offset1);
                    word0 = _mm256_srli_epi32(word0, 2);
                    word1 = _mm256_srli_epi32(word1, 2);
                    score_values(&s0, value0, value1, &state->q[0][x][i % 4][i / 4]);
                    if (n > 1)
                        score_values(&s1, value0, value1, &state->q[1][x][i % 4][i / 4]);
                    if (n > 2)
                        score_values(&s2, value0, value1, &state->q[2][x][i % 4][i / 4]);
                    if (n > 3)
                        score_values(&s3, value0, value1, &state->q[3][x][i % 4][i / 4]);
                }
            }
            uint32_t t = 16 * tile + g;
            finish_keys(w, s0.first, scores[0] + t), finish_keys(w, s0.second, scores[0] + t + 1);
            if (n > 1)
                finish_keys(w, s1.first, scores[1] + t), finish_keys(w, s1.second, scores[1] + t + 1);
            if (n > 2)
                finish_keys(w, s2.first, scores[2] + t), finish_keys(w, s2.second, scores[2] + t + 1);
            if (n > 3)
                finish_keys(w, s3.first, scores[3] + t), finish_keys(w, s3.second, scores[3] + t + 1);
        }
}

INLINE float reduce(__m256 x, bool largest) {
    float lanes[8], result;
    _mm256_storeu_ps(lanes, x);
    result = lanes[0];
    for (uint32_t i = 1; i < 8; i++)
        result = largest ? (lanes[i] > result ? lanes[i] : result) : result + lanes[i];
    return result;
}

INLINE void softmax_page(uint32_t m, float scores[64], struct head_state *state) {
    __m256 top = _mm256_loadu_ps(scores), sum = _mm256_setzero_ps();
    for (uint32_t t = 8; t < 64; t += 8)
        top = _mm256_max_ps(top, _mm256_loadu_ps(scores + t));
    float max = reduce(top, true);
    if (max > state->max[m]) {
        __m256 shrink = _mm256_set1_ps(exp2f(state->max[m] - max));
        for (uint32_t g = 0; g < 8; g++)
            for (uint32_t i = 0; i < 8; i++)
                state->out[m][g][i] = _mm256_mul_ps(state->out[m][g][i], shrink);
        state->sum[m] *= _mm256_cvtss_f32(shrink);
        state->max[m] = max;
    }
    for (uint32_t t = 0; t < 64; t += 8) {
        __m256 weight = exp2_ps(_mm256_sub_ps(_mm256_loadu_ps(scores + t), _mm256_set1_ps(state->max[m])));
        sum = _mm256_add_ps(sum, weight);
        _mm256_storeu_ps(scores + t, weight);
    }
    state->sum[m] += reduce(sum, false);
}

/* Eight lanes of V: x as in K, words (h, r) or h. Tokens 8h + 2t + u of a tile, in the order of the lanes. */
INLINE __m256 spread(uint32_t w, uint32_t x, uint32_t u, const float *tile) {
    if (w == 2) {
        const float *at = tile + 4 * x + u;
        return _mm256_setr_ps(at[0], at[0], at[8], at[8], at[2], at[2], at[10], at[10]);
    }
    return _mm256_setr_ps(tile[u], tile[8 + u], tile[2 + u], tile[10 + u], tile[4 + u], tile[12 + u], tile[6 + u],
                          tile[14 + u]);
}

struct value_sums { /* of one head, two codes */
    __m256 code0, code1;
};

INLINE void add_values(struct value_sums *sums, __m256 value0, __m256 value1, const __m256 *weight) {
    sums->code0 = _mm256_fmadd_ps(value0, *weight, sums->code0);
    sums->code1 = _mm256_fmadd_ps(value1, *weight, sums->code1);
}

INLINE struct value_sums load_sums(const __m256 *from) { return (struct value_sums){from[0], from[1]}; }

INLINE void store_sums(struct value_sums sums, __m256 *to) { to[0] = sums.code0, to[1] = sums.code1; }

INLINE void add_page(const uint8_t *values, const char *ahead, uint32_t w, uint32_t n, float scales[4][64],
                     float scores[GROUP][64], struct head_state *state) {
    const __m256 table = _mm256_setr_ps(0, 1, 2, 3, 0, 1, 2, 3);
    __m256 scale[4][2][2], offset[4][2][2], weight[4][2][2][GROUP]; /* [tile][x][u] */
    for (uint32_t tile = 0; tile < 4; tile++)
        for (uint32_t x = 0; x < w; x++)
            for (uint32_t u = 0; u < 2; u++) {
                scale[tile][x][u] = spread(w, x, u, scales[2] + 16 * tile);
                offset[tile][x][u] = _mm256_mul_ps(scale[tile][x][u], spread(w, x, u, scales[3] + 16 * tile));
                for (uint32_t m = 0; m < n; m++)
                    weight[tile][x][u][m] = spread(w, x, u, scores[m] + 16 * tile);
            }
#pragma GCC unroll 1
    for (uint32_t g = 0; g < 8; g++)
#pragma GCC unroll 1
        for (uint32_t i = 0; i < 8; i += 2) { /* eight sums stay in registers */
            struct value_sums s0 = load_sums(&state->out[0][g][i]), s1 = load_sums(&state->out[1][g][i]);
            struct value_sums s2 = load_sums(&state->out[2][g][i]), s3 = load_sums(&state->out[3][g][i]);
            for (uint32_t line = 0; line < 64 * w;
                 line += 64) /* codes of the page after the next, a few lines at a time */
                _mm_prefetch(ahead + (size_t)64 * w * (4 * g + i / 2) + line, _MM_HINT_T0);
            __m128i shift = _mm_cvtsi32_si128((int)(2 * i));
#pragma GCC unroll 1
            for (uint32_t tile = 0; tile < 4; tile++)
#pragma GCC unroll 2
                for (uint32_t x = 0; x < w; x++) {
                    const uint8_t *from = values + (size_t)256 * w * tile + (size_t)32 * (w * g + x);
                    __m256i word = _mm256_srl_epi32(_mm256_loadu_si256((const __m256i *)(const void *)from), shift);
#pragma GCC unroll 2
                    for (uint32_t u = 0; u < 2; u++) {
                        __m256 code0 = _mm256_permutevar8x32_ps(table, word);
                        __m256 code1 = _mm256_permutevar8x32_ps(table, _mm256_srli_epi32(word, 2));
                        __m256 value0 = _mm256_fmsub_ps(code0, scale[tile][x][u], offset[tile][x][u]);
                        __m256 value1 = _mm256_fmsub_ps(code1, scale[tile][x][u], offset[tile][x][u]);
                        add_values(&s0, value0, value1, &weight[tile][x][u][0]);
                        if (n > 1)
                            add_values(&s1, value0, value1, &weight[tile][x][u][1]);
                        if (n > 2)
                            add_values(&s2, value0, value1, &weight[tile][x][u][2]);
                        if (n > 3)
                            add_values(&s3, value0, value1, &weight[tile][x][u][3]);
                        word = _mm256_srli_epi32(word, 16);
                    }
                }
            store_sums(s0, &state->out[0][g][i]);
            store_sums(s1, &state->out[1][g][i]);
            store_sums(s2, &state->out[2][g][i]);
            store_sums(s3, &state->out[3][g][i]);
        }
}

static void finish_head(uint32_t w, uint32_t m, const struct head_state *state, float *out) {
    memset(out, 0, sizeof(float) * 64 * w);
    for (uint32_t g = 0; g < 8; g++)
        for (uint32_t i = 0; i < 8; i++) {
            float lanes[8];
            _mm256_storeu_ps(lanes, state->out[m][g][i]);
            for (uint32_t lane = 0; lane < 8; lane++)
                out[8 * (w * i + (w == 2 ? lane % 2 : 0)) + g] += lanes[lane] / state->sum[m];
        }
}

INLINE void attend(const struct oscar_attend_args *args, uint32_t w, uint32_t n, const float *q, float *out) {
    uint32_t d = 64 * w, pages = args->item->tokens / OSCAR_PAGE_TOKENS;
    size_t bytes = oscar_packed_record_bytes(d);
    const struct oscar_arena_view *arena = &args->arenas[OSCAR_FORM_PACKED];
    struct head_state state;
    for (uint32_t head = 0; head < args->geometry->kv_heads; head++) {
        const uint8_t *records = arena->base + ((size_t)args->layer * args->geometry->kv_heads + head) * bytes;
        memset(&state, 0, sizeof(state));
        for (uint32_t m = 0; m < n; m++) {
            state.max[m] = -INFINITY;
            for (uint32_t i = 0; i < 16 * w; i++) { /* x, f, k */
                float lanes[8];
                for (uint32_t lane = 0; lane < 8; lane++)
                    lanes[lane] = q[(size_t)(head * n + m) * d + key_dim(w, i / 16, lane, i / 4 % 4, i % 4)];
                state.q[m][i / 16][i / 4 % 4][i % 4] = _mm256_loadu_ps(lanes);
            }
        }
        for (uint32_t p = 0; p < pages; p++) {
            const uint8_t *record = records + oscar_page_ref_id(args->item->pages[p]) * arena->stride;
            const char *ahead = (const char *)records;
            float scales[4][64], scores[GROUP][64];
            ahead += oscar_page_ref_id(args->item->pages[p + 2 < pages ? p + 2 : p]) * arena->stride;
            for (size_t i = 0; i < OSCAR_SCALES_BYTES; i += 64)
                _mm_prefetch(ahead + oscar_packed_scales_offset(d) + i, _MM_HINT_T0);
            load_scales(record + oscar_packed_scales_offset(d), scales);
            score_page(record, w, n, scales, &state, scores);
            for (uint32_t m = 0; m < n; m++)
                softmax_page(m, scores[m], &state);
            add_page(record + oscar_packed_v_offset(d), ahead, w, n, scales, scores, &state);
        }
        for (uint32_t m = 0; m < n; m++)
            finish_head(w, m, &state, out + (size_t)(head * n + m) * d);
    }
}

void dequant_attend_avx2(const struct oscar_attend_args *args, const float *q, float *out) {
    uint32_t w = args->geometry->head_dim / 64, n = args->geometry->query_heads / args->geometry->kv_heads;
    if (w == 2 && n == 4)
        attend(args, 2, 4, q, out);
    else if (w == 1 && n == 3)
        attend(args, 1, 3, q, out);
}
