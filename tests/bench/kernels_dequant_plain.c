/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The dequantising loop as one writes it in C: a record's codes become floats in a buffer, then attention is two matrix products
 * over that buffer. The compiler vectorises it; this file is built once for each instruction set, as DEQUANT_PLAIN.
 */
#include <math.h>
#include <string.h>

#include "kernels/number.h"
#include "tests/bench/kernels_dequant.h"

#define MOST_DIM 128U
#define TOKENS OSCAR_PAGE_TOKENS

static void dequantise_keys(const uint8_t *record, uint32_t d, float key[TOKENS][MOST_DIM]) {
    const uint32_t *words = (const uint32_t *)(const void *)record;
    const uint16_t *scales = (const uint16_t *)(const void *)(record + oscar_packed_scales_offset(d));
    uint32_t w = d / 64;
    for (uint32_t token = 0; token < TOKENS; token++) {
        uint32_t tile = token / 16, g = token % 8, half = token % 16 / 8;
        const uint16_t *own = scales + oscar_packed_scale_offset(token) / sizeof(*scales);
        float scale = oscar_fp16_to_float(own[0]), zero = oscar_fp16_to_float(own[1]);
        for (uint32_t t = 0; t < 4; t++)
            for (uint32_t u = 0; u < w; u++) {
                uint32_t word = words[(tile * 32 + 4 * g + t) * 2 * w + half * w + u];
                for (uint32_t f = 0; f < 4; f++)
                    for (uint32_t k = 0; k < 4; k++)
                        key[token][16 * (w * f + u) + 4 * t + k] =
                            ((float)(word >> (8 * k + 2 * f) & 3) - zero) * scale;
            }
    }
}

static void dequantise_values(const uint8_t *record, uint32_t d, float value[TOKENS][MOST_DIM]) {
    const uint32_t *words = (const uint32_t *)(const void *)(record + oscar_packed_v_offset(d));
    const uint16_t *scales = (const uint16_t *)(const void *)(record + oscar_packed_scales_offset(d));
    uint32_t w = d / 64;
    for (uint32_t token = 0; token < TOKENS; token++) {
        uint32_t tile = token / 16, half = token % 16 / 8, t = token % 8 / 2, shift = token % 2 * 16;
        const uint16_t *own = scales + oscar_packed_scale_offset(token) / sizeof(*scales);
        float scale = oscar_fp16_to_float(own[2]), zero = oscar_fp16_to_float(own[3]);
        for (uint32_t g = 0; g < 8; g++)
            for (uint32_t r = 0; r < w; r++) {
                uint32_t word = words[(tile * 32 + 4 * g + t) * 2 * w + half * w + r] >> shift;
                for (uint32_t i = 0; i < 8; i++)
                    value[token][8 * (w * i + r) + g] = ((float)(word >> (2 * i) & 3) - zero) * scale;
            }
    }
}

static void attend_page(uint32_t d, const float *q, float key[TOKENS][MOST_DIM], float value[TOKENS][MOST_DIM],
                        float *max, float *sum, float *out) {
    float weight[TOKENS], highest = *max;
    for (uint32_t token = 0; token < TOKENS; token++) {
        float score = 0;
        for (uint32_t i = 0; i < d; i++)
            score += q[i] * key[token][i];
        weight[token] = score;
        highest = score > highest ? score : highest;
    }
    float rescale = exp2f(*max - highest);
    *max = highest;
    *sum *= rescale;
    for (uint32_t i = 0; i < d; i++)
        out[i] *= rescale;
    for (uint32_t token = 0; token < TOKENS; token++) {
        weight[token] = exp2f(weight[token] - highest);
        *sum += weight[token];
    }
    for (uint32_t token = 0; token < TOKENS; token++)
        for (uint32_t i = 0; i < d; i++)
            out[i] += weight[token] * value[token][i];
}

void DEQUANT_PLAIN(const struct oscar_attend_args *args, const float *q, float *out) {
    const struct oscar_geometry *geometry = args->geometry;
    const struct oscar_arena_view *arena = &args->arenas[OSCAR_FORM_PACKED];
    static _Thread_local float key[TOKENS][MOST_DIM], value[TOKENS][MOST_DIM];
    uint32_t d = geometry->head_dim, group = geometry->query_heads / geometry->kv_heads;
    for (uint32_t head = 0; head < geometry->kv_heads; head++) {
        size_t offset = ((size_t)args->layer * geometry->kv_heads + head) * oscar_packed_record_bytes(d);
        float max[DEQUANT_MOST_GROUP], sum[DEQUANT_MOST_GROUP] = {0};
        for (uint32_t h = 0; h < group; h++)
            max[h] = -1e30F;
        memset(out + (size_t)head * group * d, 0, sizeof(*out) * group * d);
        for (uint32_t page = 0; page < args->item->tokens / TOKENS; page++) {
            const uint8_t *record = arena->base + oscar_page_ref_id(args->item->pages[page]) * arena->stride + offset;
            dequantise_keys(record, d, key);
            dequantise_values(record, d, value);
            for (uint32_t h = 0; h < group; h++)
                attend_page(d, q + ((size_t)head * group + h) * d, key, value, &max[h], &sum[h],
                            out + ((size_t)head * group + h) * d);
        }
        for (uint32_t h = 0; h < group; h++)
            for (uint32_t i = 0; i < d; i++)
                out[((size_t)head * group + h) * d + i] /= sum[h];
    }
}
