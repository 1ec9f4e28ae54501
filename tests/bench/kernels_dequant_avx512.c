/* SPDX-License-Identifier: Apache-2.0 */
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "tests/bench/kernels_dequant.h"

#define INLINE static inline __attribute__((always_inline))
#define GROUP DEQUANT_MOST_GROUP

struct head_state {
    __m512 out[GROUP][8][8]; /* [head][vector of a tile][code]: partial sums in the order of the record's lanes */
    __m512 q[GROUP][4][4];   /* [head][f][k] in the same order */
    float max[GROUP], sum[GROUP];
};

INLINE __m512 exp2_ps(__m512 x) {
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_sub_ps(x, whole), y = _mm512_set1_ps(0x1.5bba1p-10F);
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0x1.3cea88p-7F));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0x1.c6b752p-5F));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0x1.ebf9bcp-3F));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0x1.62e42ap-1F));
    return _mm512_scalef_ps(_mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0F)), whole);
}

/* The token (of a tile) that lane l of vector `row` holds: W = 2: lanes (t, half, w) of g = row; W = 1: (g & 1, t, half). */
INLINE uint32_t key_token(uint32_t w, uint32_t row, uint32_t lane) {
    return w == 2 ? lane / 2 % 2 * 8 + row : lane % 2 * 8 + 2 * row + lane / 8;
}

INLINE uint32_t key_dim(uint32_t w, uint32_t lane, uint32_t f, uint32_t k) {
    return w == 2 ? 16 * (2 * f + lane % 2) + lane / 4 * 4 + k : 16 * f + lane / 2 % 4 * 4 + k;
}

/* Two-source permutation that takes the bit `bit` of the lane number out: even lanes of it, or odd ones. */
INLINE __m512i halves_index(uint32_t bit, uint32_t odd) {
    int32_t index[16];
    for (uint32_t i = 0; i < 16; i++) {
        uint32_t kept = i % 8, low = kept & ((1U << bit) - 1), high = kept >> bit << (bit + 1);
        index[i] = (int32_t)(high | odd << bit | low | (i / 8) << 4);
    }
    return _mm512_loadu_si512(index);
}

INLINE __m512 fold(__m512 a, __m512 b, __m512i even, __m512i odd) {
    return _mm512_add_ps(_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b));
}

/* Sums of the vectors of a tile over the lanes that share a token, in the order of tokens. */
INLINE __m512 fold_tile(uint32_t w, __m512 *sum, const __m512i index[5]) {
    if (w == 2) { /* bits of a lane: t1 t0 half w */
        for (uint32_t i = 0; i < 4; i++)
            sum[i] = fold(sum[i], sum[i + 4], index[0], index[1]); /* takes w out: src t1 t0 half */
        for (uint32_t i = 0; i < 2; i++)
            sum[i] = fold(sum[i], sum[i + 2], index[2], index[3]); /* t0: src1 src0 t1 half */
        sum[0] = fold(sum[0], sum[1], index[2], index[3]);         /* t1: src2 src1 src0 half */
    } else {                                                       /* g0 t1 t0 half */
        for (uint32_t i = 0; i < 2; i++)
            sum[i] = fold(sum[i], sum[i + 2], index[2], index[3]); /* t0: src0 g0 t1 half */
        sum[0] = fold(sum[0], sum[1], index[2], index[3]);         /* t1: src1 src0 g0 half */
    }
    return _mm512_permutexvar_ps(index[4], sum[0]);
}

INLINE void load_scales(const uint8_t *scales, float ret[4][64]) {
    const __m512i order = _mm512_set_epi16(61, 53, 45, 37, 29, 21, 13, 5, 57, 49, 41, 33, 25, 17, 9, 1, 60, 52, 44, 36,
                                           28, 20, 12, 4, 56, 48, 40, 32, 24, 16, 8, 0);
    for (uint32_t tile = 0; tile < 4; tile++, scales += 128) {
        __m512i first = _mm512_loadu_si512(scales), second = _mm512_loadu_si512(scales + 64);
        __m512i k = _mm512_permutex2var_epi16(first, order, second);
        __m512i v = _mm512_permutex2var_epi16(first, _mm512_add_epi16(order, _mm512_set1_epi16(2)), second);
        _mm512_storeu_ps(ret[0] + 16 * tile, _mm512_cvtph_ps(_mm512_castsi512_si256(k)));
        _mm512_storeu_ps(ret[1] + 16 * tile, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(k, 1)));
        _mm512_storeu_ps(ret[2] + 16 * tile, _mm512_cvtph_ps(_mm512_castsi512_si256(v)));
        _mm512_storeu_ps(ret[3] + 16 * tile, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(v, 1)));
    }
}

struct indices {
    __m512i key_token[8], value_token[2], fold[5];
};

static void make_indices(uint32_t w, struct indices *ret) {
    uint32_t rows = 4 * w;
    for (uint32_t row = 0; row < rows; row++) {
        int32_t token[16];
        for (uint32_t lane = 0; lane < 16; lane++)
            token[lane] = (int32_t)key_token(w, row, lane);
        ret->key_token[row] = _mm512_loadu_si512(token);
    }
    for (uint32_t u = 0; u < 2; u++) {
        int32_t token[16];
        for (uint32_t lane = 0; lane < 16; lane++) { /* W = 2: lanes (t, h, r); W = 1: (g & 1, t, h) */
            uint32_t h = w == 2 ? lane / 2 % 2 : lane % 2, t = w == 2 ? lane / 4 : lane / 2 % 4;
            token[lane] = (int32_t)(8 * h + 2 * t + u);
        }
        ret->value_token[u] = _mm512_loadu_si512(token);
    }
    for (uint32_t odd = 0; odd < 2; odd++) {
        ret->fold[odd] = halves_index(0, odd);
        ret->fold[2 + odd] = halves_index(1, odd);
    }
    int32_t order[16];
    for (uint32_t token = 0; token < 16;
         token++) { /* W = 2: lane src2 src1 src0 half = g0, g1, g2; W = 1: g1, g2, g0 */
        uint32_t half = token / 8, g = token % 8;
        order[token] = (int32_t)(w == 2 ? (g & 1) << 3 | (g >> 1 & 1) << 2 | (g >> 2) << 1 | half
                                        : (g >> 1 & 1) << 3 | (g >> 2) << 2 | (g & 1) << 1 | half);
    }
    ret->fold[4] = _mm512_loadu_si512(order);
}

/* Sums of one head over two vectors. Named variables and not an array, which the compilers of today would spill. */
struct key_sums {
    __m512 first, second;
};

INLINE void score_values(struct key_sums *sums, __m512 first, __m512 second, const __m512 *q) {
    sums->first = _mm512_fmadd_ps(first, *q, sums->first);
    sums->second = _mm512_fmadd_ps(second, *q, sums->second);
}

INLINE void score_page(const uint8_t *record, uint32_t w, uint32_t n, const struct indices *indices,
                       float scales[4][64], const struct head_state *state, float scores[GROUP][64]) {
    const __m512 table = _mm512_set_ps(3, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 0);
    for (uint32_t tile = 0; tile < 4; tile++) {
        __m512 sum[GROUP][8];
        __m512 all_scales = _mm512_loadu_ps(scales[0] + 16 * tile), all_zeros = _mm512_loadu_ps(scales[1] + 16 * tile);
#pragma GCC unroll 1
        for (uint32_t row = 0; row < 4 * w; row += 2) { /* two vectors at once share the loads of q */
            const uint8_t *from = record + (size_t)256 * w * tile + (size_t)64 * row;
            __m512i word0 = _mm512_loadu_si512(from), word1 = _mm512_loadu_si512(from + 64);
            __m512 scale0 = _mm512_permutexvar_ps(indices->key_token[row], all_scales);
            __m512 scale1 = _mm512_permutexvar_ps(indices->key_token[row + 1], all_scales);
            __m512 offset0 = _mm512_mul_ps(scale0, _mm512_permutexvar_ps(indices->key_token[row], all_zeros));
            __m512 offset1 = _mm512_mul_ps(scale1, _mm512_permutexvar_ps(indices->key_token[row + 1], all_zeros));
            const __m512 zero = _mm512_setzero_ps();
            struct key_sums s0 = {zero, zero}, s1 = s0, s2 = s0, s3 = s0;
#pragma GCC unroll 16
            for (uint32_t i = 0; i < 16;
                 i++) { /* byte k, code f; the permutation reads four bits, the table repeats after two */
                __m512 value0 = _mm512_fmsub_ps(_mm512_permutexvar_ps(word0, table), scale0, offset0);
                __m512 value1 = _mm512_fmsub_ps(_mm512_permutexvar_ps(word1, table), scale1, offset1);
                word0 = _mm512_srli_epi32(word0, 2);
                word1 = _mm512_srli_epi32(word1, 2);
                score_values(&s0, value0, value1, &state->q[0][i % 4][i / 4]);
                if (n > 1)
                    score_values(&s1, value0, value1, &state->q[1][i % 4][i / 4]);
                if (n > 2)
                    score_values(&s2, value0, value1, &state->q[2][i % 4][i / 4]);
                if (n > 3)
                    score_values(&s3, value0, value1, &state->q[3][i % 4][i / 4]);
            }
            sum[0][row] = s0.first, sum[0][row + 1] = s0.second;
            sum[1][row] = s1.first, sum[1][row + 1] = s1.second;
            sum[2][row] = s2.first, sum[2][row + 1] = s2.second;
            sum[3][row] = s3.first, sum[3][row + 1] = s3.second;
        }
        for (uint32_t m = 0; m < n; m++)
            _mm512_storeu_ps(scores[m] + 16 * tile, fold_tile(w, sum[m], indices->fold));
    }
}

INLINE void softmax_page(uint32_t w, uint32_t m, float scores[64], struct head_state *state) {
    __m512 score[4], top, sum = _mm512_setzero_ps();
    for (uint32_t i = 0; i < 4; i++)
        score[i] = _mm512_loadu_ps(scores + 16 * i);
    top = _mm512_max_ps(_mm512_max_ps(score[0], score[1]), _mm512_max_ps(score[2], score[3]));
    float max = _mm512_reduce_max_ps(top);
    if (max > state->max[m]) {
        __m512 shrink = _mm512_set1_ps(exp2f(state->max[m] - max));
        for (uint32_t row = 0; row < 4 * w; row++)
            for (uint32_t i = 0; i < 8; i++)
                state->out[m][row][i] = _mm512_mul_ps(state->out[m][row][i], shrink);
        state->sum[m] *= _mm512_cvtss_f32(shrink);
        state->max[m] = max;
    }
    for (uint32_t i = 0; i < 4; i++) {
        score[i] = exp2_ps(_mm512_sub_ps(score[i], _mm512_set1_ps(state->max[m])));
        sum = _mm512_add_ps(sum, score[i]);
        _mm512_storeu_ps(scores + 16 * i, score[i]);
    }
    state->sum[m] += _mm512_reduce_add_ps(sum);
}

struct value_sums { /* of one head, four codes */
    __m512 code0, code1, code2, code3;
};

INLINE void add_values(struct value_sums *sums, __m512 v0, __m512 v1, __m512 v2, __m512 v3, const __m512 *weight) {
    sums->code0 = _mm512_fmadd_ps(v0, *weight, sums->code0);
    sums->code1 = _mm512_fmadd_ps(v1, *weight, sums->code1);
    sums->code2 = _mm512_fmadd_ps(v2, *weight, sums->code2);
    sums->code3 = _mm512_fmadd_ps(v3, *weight, sums->code3);
}

INLINE struct value_sums load_sums(const __m512 *from) {
    return (struct value_sums){from[0], from[1], from[2], from[3]};
}

INLINE void store_sums(struct value_sums sums, __m512 *to) {
    to[0] = sums.code0, to[1] = sums.code1, to[2] = sums.code2, to[3] = sums.code3;
}

INLINE void add_page(const uint8_t *values, const char *ahead, uint32_t w, uint32_t n, const struct indices *indices,
                     float scales[4][64], float scores[GROUP][64], struct head_state *state) {
    const __m512 table = _mm512_set_ps(3, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 0);
    __m512 scale[4][2], offset[4][2], weight[4][2][GROUP];
    for (uint32_t tile = 0; tile < 4; tile++)
        for (uint32_t u = 0; u < 2; u++) {
            __m512i token = indices->value_token[u];
            scale[tile][u] = _mm512_permutexvar_ps(token, _mm512_loadu_ps(scales[2] + 16 * tile));
            __m512 zero = _mm512_permutexvar_ps(token, _mm512_loadu_ps(scales[3] + 16 * tile));
            offset[tile][u] = _mm512_mul_ps(scale[tile][u], zero);
            for (uint32_t m = 0; m < n; m++)
                weight[tile][u][m] = _mm512_permutexvar_ps(token, _mm512_loadu_ps(scores[m] + 16 * tile));
        }
#pragma GCC unroll 1
    for (uint32_t row = 0; row < 4 * w; row++)
#pragma GCC unroll 1
        for (uint32_t i = 0; i < 8; i += 4) { /* sixteen sums stay in registers */
            struct value_sums s0 = load_sums(&state->out[0][row][i]), s1 = load_sums(&state->out[1][row][i]);
            struct value_sums s2 = load_sums(&state->out[2][row][i]), s3 = load_sums(&state->out[3][row][i]);
            for (uint32_t line = 0; line < 256;
                 line += 64) /* codes of the page after the next, a few lines at a time */
                _mm_prefetch(ahead + (size_t)256 * (2 * row + i / 4) + line, _MM_HINT_T0);
#pragma GCC unroll 1
            for (uint32_t tile = 0; tile < 4; tile++) {
                __m512i word = _mm512_loadu_si512(values + (size_t)256 * w * tile + (size_t)64 * row);
                word = _mm512_srl_epi32(word, _mm_cvtsi32_si128((int)(2 * i)));
#pragma GCC unroll 2
                for (uint32_t u = 0; u < 2; u++) {
                    __m512 code0 = _mm512_permutexvar_ps(word, table);
                    __m512 code1 = _mm512_permutexvar_ps(_mm512_srli_epi32(word, 2), table);
                    __m512 code2 = _mm512_permutexvar_ps(_mm512_srli_epi32(word, 4), table);
                    __m512 code3 = _mm512_permutexvar_ps(_mm512_srli_epi32(word, 6), table);
                    __m512 value0 = _mm512_fmsub_ps(code0, scale[tile][u], offset[tile][u]);
                    __m512 value1 = _mm512_fmsub_ps(code1, scale[tile][u], offset[tile][u]);
                    __m512 value2 = _mm512_fmsub_ps(code2, scale[tile][u], offset[tile][u]);
                    __m512 value3 = _mm512_fmsub_ps(code3, scale[tile][u], offset[tile][u]);
                    add_values(&s0, value0, value1, value2, value3, &weight[tile][u][0]);
                    if (n > 1)
                        add_values(&s1, value0, value1, value2, value3, &weight[tile][u][1]);
                    if (n > 2)
                        add_values(&s2, value0, value1, value2, value3, &weight[tile][u][2]);
                    if (n > 3)
                        add_values(&s3, value0, value1, value2, value3, &weight[tile][u][3]);
                    word = _mm512_srli_epi32(word, 16);
                }
            }
            store_sums(s0, &state->out[0][row][i]);
            store_sums(s1, &state->out[1][row][i]);
            store_sums(s2, &state->out[2][row][i]);
            store_sums(s3, &state->out[3][row][i]);
        }
}

static void finish_head(uint32_t w, uint32_t m, const struct head_state *state, float *out) {
    memset(out, 0, sizeof(float) * 64 * w);
    for (uint32_t row = 0; row < 4 * w; row++)
        for (uint32_t i = 0; i < 8; i++) {
            float lanes[16];
            _mm512_storeu_ps(lanes, state->out[m][row][i]);
            for (uint32_t lane = 0; lane < 16; lane++) {
                uint32_t dim = w == 2 ? 8 * (2 * i + lane % 2) + row : 8 * i + 2 * row + lane / 8;
                out[dim] += lanes[lane] / state->sum[m];
            }
        }
}

INLINE void attend(const struct oscar_attend_args *args, uint32_t w, uint32_t n, const float *q, float *out) {
    uint32_t d = 64 * w, pages = args->item->tokens / OSCAR_PAGE_TOKENS;
    size_t bytes = oscar_packed_record_bytes(d);
    const struct oscar_arena_view *arena = &args->arenas[OSCAR_FORM_PACKED];
    struct indices indices;
    struct head_state state;
    make_indices(w, &indices);
    for (uint32_t head = 0; head < args->geometry->kv_heads; head++) {
        const uint8_t *records = arena->base + ((size_t)args->layer * args->geometry->kv_heads + head) * bytes;
        memset(&state, 0, sizeof(state));
        for (uint32_t m = 0; m < n; m++) {
            state.max[m] = -INFINITY;
            for (uint32_t f = 0; f < 4; f++)
                for (uint32_t k = 0; k < 4; k++) {
                    float lanes[16];
                    for (uint32_t lane = 0; lane < 16; lane++)
                        lanes[lane] = q[(size_t)(head * n + m) * d + key_dim(w, lane, f, k)];
                    state.q[m][f][k] = _mm512_loadu_ps(lanes);
                }
        }
        for (uint32_t p = 0; p < pages; p++) {
            const uint8_t *record = records + oscar_page_ref_id(args->item->pages[p]) * arena->stride;
            float scales[4][64], scores[GROUP][64];
            const char *ahead =
                (const char *)records + oscar_page_ref_id(args->item->pages[p + 2 < pages ? p + 2 : p]) * arena->stride;
            for (size_t i = 0; i < OSCAR_SCALES_BYTES; i += 64)
                _mm_prefetch(ahead + oscar_packed_scales_offset(d) + i, _MM_HINT_T0);
            load_scales(record + oscar_packed_scales_offset(d), scales);
            score_page(record, w, n, &indices, scales, &state, scores);
            for (uint32_t m = 0; m < n; m++)
                softmax_page(w, m, scores[m], &state);
            add_page(record + oscar_packed_v_offset(d), ahead, w, n, &indices, scales, scores, &state);
        }
        for (uint32_t m = 0; m < n; m++)
            finish_head(w, m, &state, out + (size_t)(head * n + m) * d);
    }
}

void dequant_attend_avx512(const struct oscar_attend_args *args, const float *q, float *out) {
    uint32_t w = args->geometry->head_dim / 64, n = args->geometry->query_heads / args->geometry->kv_heads;
    if (w == 2 && n == 4)
        attend(args, 2, 4, q, out);
    else if (w == 1 && n == 3)
        attend(args, 1, 3, q, out);
}
