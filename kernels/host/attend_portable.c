/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention in plain C: the level that runs everywhere, and the one to read first. Scale and zero of a packed page touch no
 * element: a column's score is scale * (q . codes - zero * sum(q)), its output sum(p * scale * code) - sum(p * scale * zero).
 */
#include <math.h>
#include <string.h>

#include "kernels/host/attend.h"
#include "kernels/number.h"

#define TOKENS OSCAR_PAGE_TOKENS

struct scales {
    float scale_k[TOKENS], zero_k[TOKENS], scale_v[TOKENS], zero_v[TOKENS];
};

/* Rows from `rows` on stay zero: what they hold in the page is nobody's. */
static void unpack_scales(const uint8_t *scales, uint32_t rows, struct scales *ret) {
    memset(ret, 0, sizeof(*ret));
    for (uint32_t t = 0; t < rows; t++) {
        uint16_t half[4];
        memcpy(half, scales + oscar_packed_scale_offset(t), sizeof(half));
        ret->scale_k[t] = oscar_fp16_to_float(half[0]);
        ret->zero_k[t] = oscar_fp16_to_float(half[1]);
        ret->scale_v[t] = oscar_fp16_to_float(half[2]);
        ret->zero_v[t] = oscar_fp16_to_float(half[3]);
    }
}

/* codes [64][d]. A shift of a whole word puts code f of its four bytes, four neighbouring dims, into their low bits. */
static void unpack_k(const uint8_t *k, uint32_t d, uint8_t *codes) {
    uint32_t w_count = d / 64;
    for (uint32_t tile = 0; tile < 4; tile++)
        for (uint32_t lane = 0; lane < 32; lane++)
            for (uint32_t w = 0; w < 2 * w_count; w++, k += 4) {
                uint32_t token = tile * 16 + lane / 4 + w / w_count * 8, word;
                uint8_t *row = codes + (size_t)token * d + 16 * (w % w_count) + lane % 4 * 4;
                memcpy(&word, k, sizeof(word));
                for (uint32_t f = 0; f < 4; f++) {
                    uint32_t four = word >> (2 * f) & 0x03030303U;
                    memcpy(row + (size_t)16 * w_count * f, &four, sizeof(four));
                }
            }
}

/* codes [64][d]: the 16-bit halves of one token first, in the order of dims, then the codes of all of them. */
static void unpack_v(const uint8_t *v, uint32_t d, float *codes) {
    uint32_t w_count = d / 64;
    for (uint32_t token = 0; token < TOKENS; token++) {
        uint32_t tile = token / 16, h = token / 8 % 2, t = token / 2 % 4, u = token % 2;
        const uint8_t *first =
            v + (size_t)256 * w_count * tile + (size_t)8 * w_count * t + (size_t)4 * w_count * h + 2 * u;
        int32_t half[32];
        for (uint32_t g = 0; g < 8; g++)
            for (uint32_t r = 0; r < w_count; r++) {
                const uint8_t *at = first + (size_t)32 * w_count * g + (size_t)4 * r;
                half[8 * r + g] = at[0] | at[1] << 8;
            }
        for (uint32_t i = 0; i < 8; i++)
            for (uint32_t x = 0; x < 8 * w_count; x++)
                codes[(size_t)token * d + 8 * w_count * i + x] = (float)(half[x] >> (2 * i) & 3);
    }
}

/* Logits of K's centre for a page's rows: (alpha, beta) turned by the page's first position, against the row table. */
static void centre_scores(const struct attend_columns *columns, uint32_t c, const struct attend_page *page,
                          float *scores) {
    for (uint32_t t = 0; t < TOKENS; t++)
        scores[t] = columns->sigma[c];
    for (uint32_t i = 0; i < columns->pairs; i++) {
        const float *turn = page->turn + (size_t)columns->pair[i] * 2;
        const float *row_cos = columns->row_turn + (size_t)(2 * i) * TOKENS, *row_sin = row_cos + TOKENS;
        float alpha = columns->alpha[c][i], beta = columns->beta[c][i];
        float with_cos = alpha * turn[0] + beta * turn[1], with_sin = beta * turn[0] - alpha * turn[1];
        for (uint32_t t = 0; t < TOKENS; t++)
            scores[t] += with_cos * row_cos[t] + with_sin * row_sin[t];
    }
}

/* Scores of the first `rows` rows become 2^(score - max), the rest 0; the column's sums so far move to the new max. */
static void softmax(const struct attend_columns *columns, uint32_t c, uint32_t rows, float *scores,
                    const struct attend_partial *partial) {
    float *out = partial->out + (size_t)c * columns->d, max = partial->max[c], sum = 0;
    for (uint32_t t = 0; t < rows; t++)
        max = scores[t] > max ? scores[t] : max;
    if (max > partial->max[c]) {
        float shrink = exp2f(partial->max[c] - max);
        for (uint32_t i = 0; i < columns->d; i++)
            out[i] *= shrink;
        partial->sum[c] *= shrink;
        partial->max[c] = max;
    }
    for (uint32_t t = 0; t < rows; t++) {
        scores[t] = exp2f(scores[t] - max);
        sum += scores[t];
    }
    for (uint32_t t = rows; t < TOKENS; t++)
        scores[t] = 0;
    partial->sum[c] += sum;
}

static void packed(const struct attend_columns *columns, const struct attend_page *page,
                   const struct attend_partial *partial) {
    uint32_t d = columns->d;
    struct scales scales;
    uint8_t codes_k[TOKENS * 256];
    int16_t q[256];
    float codes_v[TOKENS * 256];
    unpack_scales(page->record + oscar_packed_scales_offset(d), page->rows, &scales);
    unpack_k(page->record, d, codes_k);
    unpack_v(page->record + oscar_packed_v_offset(d), d, codes_v);

    for (uint32_t c = 0; c < columns->count; c++) {
        uint32_t rows = attend_rows(columns, c, page->first);
        if (rows == 0)
            continue;
        const int8_t *high = columns->high + (size_t)c * d, *low = columns->low + (size_t)c * d;
        float scores[TOKENS] = {0};
        if (columns->centred)
            centre_scores(columns, c, page, scores);
        for (uint32_t i = 0; i < d; i++)
            q[i] = (int16_t)(high[i] * 256 + low[i]);
        for (uint32_t t = 0; t < rows; t++) {
            int32_t dot = 0; /* at most 256 * 3 * 2^15 */
            for (uint32_t i = 0; i < d; i++)
                dot += q[i] * codes_k[(size_t)t * d + i];
            scores[t] += ((float)dot - scales.zero_k[t] * columns->sum[c]) * scales.scale_k[t] * columns->step[c];
        }
        softmax(columns, c, rows, scores, partial);
        float sums[256] = {0}, zeros = 0; /* of this page alone, so that a long sequence adds page by page */
        for (uint32_t t = 0; t < rows; t++) {
            float weight = scores[t] * scales.scale_v[t];
            zeros += weight * scales.zero_v[t];
            for (uint32_t i = 0; i < d; i++)
                sums[i] += weight * codes_v[(size_t)t * d + i];
        }
        for (uint32_t i = 0; i < d; i++)
            partial->out[(size_t)c * d + i] += sums[i] - zeros;
    }
}

static void dense(const struct attend_columns *columns, const struct attend_page *page,
                  const struct attend_partial *partial) {
    uint32_t d = columns->d;
    const uint16_t *k = (const uint16_t *)(const void *)page->record, *v = k + (size_t)TOKENS * d;
    for (uint32_t c = 0; c < columns->count; c++) {
        uint32_t rows = attend_rows(columns, c, page->first);
        if (rows == 0)
            continue;
        const float *q = columns->q + (size_t)c * d;
        float scores[TOKENS], sums[256] = {0};
        for (uint32_t t = 0; t < rows; t++) {
            float dot[8] = {0}; /* eight sums, so that the compiler can use vectors */
            for (uint32_t i = 0; i < d; i += 8)
                for (uint32_t j = 0; j < 8; j++)
                    dot[j] += q[i + j] * oscar_bf16_to_float(k[(size_t)t * d + i + j]);
            scores[t] = ((dot[0] + dot[4]) + (dot[1] + dot[5])) + ((dot[2] + dot[6]) + (dot[3] + dot[7]));
        }
        softmax(columns, c, rows, scores, partial);
        for (uint32_t t = 0; t < rows; t++)
            for (uint32_t i = 0; i < d; i++)
                sums[i] += scores[t] * oscar_bf16_to_float(v[(size_t)t * d + i]);
        for (uint32_t i = 0; i < d; i++)
            partial->out[(size_t)c * d + i] += sums[i];
    }
}

const struct attend_kernels attend_kernels_portable = {.packed = packed, .dense = dense};
