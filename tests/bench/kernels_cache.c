/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/kernels_cache.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/number.h"

static uint64_t random_state = UINT64_C(0x9E3779B97F4A7C15);

static uint64_t random_bits(void) {
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return random_state * UINT64_C(2685821657736338717);
}

static float random_uniform(void) { return (float)(random_bits() >> 40) * 0x1p-24F; }

static float random_normal(void) {
    float sum = 0;
    for (unsigned i = 0; i < 12; i++)
        sum += random_uniform();
    return sum - 6;
}

static void *own(struct bench_cache *cache, size_t bytes) {
    void *memory = NULL;
    if (cache->owned_count == sizeof(cache->owned) / sizeof(cache->owned[0]) ||
        posix_memalign(&memory, 4096, bytes > 0 ? bytes : 1) != 0) {
        fprintf(stderr, "kernels_bench: out of memory\n");
        exit(1);
    }
    memset(memory, 0, bytes);
    cache->owned[cache->owned_count++] = memory;
    return memory;
}

static void fill_record(uint8_t *record, uint32_t head_dim) {
    size_t codes = oscar_packed_scales_offset(head_dim);
    for (size_t i = 0; i < codes; i += 8) {
        uint64_t bits = random_bits();
        memcpy(record + i, &bits, 8);
    }
    for (uint32_t t = 0; t < OSCAR_PAGE_TOKENS; t++) { /* as rows of deviation 1 have them */
        const float values[4] = {0.7F + 0.5F * random_uniform(), 1.2F + 0.6F * random_uniform(),
                                 0.7F + 0.5F * random_uniform(), 1.2F + 0.6F * random_uniform()};
        uint16_t half[4];
        for (unsigned i = 0; i < 4; i++)
            half[i] = oscar_fp16_from_float(values[i]);
        memcpy(record + codes + oscar_packed_scale_offset(t), half, sizeof(half));
    }
}

struct bench_cache *bench_cache_open(const struct bench_shape *shape) {
    struct bench_cache *cache = calloc(1, sizeof(*cache));
    if (cache == NULL) {
        fprintf(stderr, "kernels_bench: out of memory\n");
        exit(1);
    }
    uint32_t pages = (shape->tokens + OSCAR_PAGE_TOKENS - 1) / OSCAR_PAGE_TOKENS, d = shape->head_dim;
    size_t records = (size_t)shape->layers * shape->kv_heads;
    cache->geometry = (struct oscar_geometry){.layers = shape->layers,
                                              .query_heads = shape->query_heads,
                                              .kv_heads = shape->kv_heads,
                                              .head_dim = d,
                                              .dtype = OSCAR_FP16,
                                              .page_tokens = OSCAR_PAGE_TOKENS,
                                              .sink_tokens = OSCAR_SINK_TOKENS,
                                              .recent_tokens = OSCAR_RECENT_TOKENS};
    cache->page_bytes = records * oscar_packed_record_bytes(d);
    cache->packed = own(cache, cache->page_bytes * pages);
    for (size_t r = 0; r < records * pages; r++)
        fill_record(cache->packed + r * oscar_packed_record_bytes(d), d);
    cache->calibration =
        (struct oscar_calibration){.layers = shape->layers,
                                   .kv_heads = shape->kv_heads,
                                   .head_dim = d,
                                   .rotation_k = OSCAR_ROTATION_HADAMARD,
                                   .rotation_v = OSCAR_ROTATION_HADAMARD,
                                   .heads = own(cache, sizeof(struct oscar_head_calibration) * records)};
    for (size_t h = 0; h < records; h++)
        cache->calibration.heads[h].rank_k = cache->calibration.heads[h].rank_v = d - 1;

    oscar_page_ref *table = own(cache, sizeof(*table) * pages);
    for (uint32_t p = 0; p < pages;
         p++) /* pages of a sequence lie anywhere: here, in the order of a multiplicative walk */
        table[p] = oscar_page_ref_make(OSCAR_FORM_PACKED, (uint64_t)p * 7919 % pages);
    uint16_t *q = own(cache, sizeof(uint16_t) * shape->query_heads * d);
    for (size_t i = 0; i < (size_t)shape->query_heads * d; i++)
        q[i] = oscar_fp16_from_float(random_normal());
    cache->item = (struct oscar_attend_item){.pages = table,
                                             .tokens = shape->tokens,
                                             .rows = 1,
                                             .q = q,
                                             .q_row_stride = (int64_t)shape->query_heads * d,
                                             .q_head_stride = d,
                                             .out = own(cache, sizeof(uint16_t) * shape->query_heads * d),
                                             .out_row_stride = (int64_t)shape->query_heads * d,
                                             .out_head_stride = d,
                                             .lse = own(cache, sizeof(float) * shape->query_heads)};
    cache->args = (struct oscar_attend_args){.geometry = &cache->geometry,
                                             .calibration = &cache->calibration,
                                             .softmax_scale = 1.0F / sqrtf((float)d),
                                             .items = 1,
                                             .item = &cache->item};
    cache->args.arenas[OSCAR_FORM_PACKED] =
        (struct oscar_arena_view){.base = cache->packed, .stride = cache->page_bytes};
    return cache;
}

static void make_turns(struct bench_cache *cache) {
    uint32_t frequencies = cache->geometry.head_dim / 2;
    uint32_t pages = (cache->item.tokens + OSCAR_PAGE_TOKENS - 1) / OSCAR_PAGE_TOKENS;
    float *page_turn = own(cache, sizeof(float) * 2 * frequencies * pages);
    float *row_turn = own(cache, sizeof(float) * 2 * frequencies * OSCAR_PAGE_TOKENS);
    for (uint32_t f = 0; f < frequencies; f++) {
        double omega = pow(1e6, -2.0 * f / cache->geometry.head_dim);
        for (uint32_t p = 0; p < pages; p++) {
            page_turn[((size_t)p * frequencies + f) * 2] = (float)cos(omega * 64 * p);
            page_turn[((size_t)p * frequencies + f) * 2 + 1] = (float)sin(omega * 64 * p);
        }
        for (uint32_t r = 0; r < OSCAR_PAGE_TOKENS; r++) {
            float *turn = row_turn + ((size_t)r * frequencies + f) * 2;
            turn[0] = oscar_fp16_to_float(oscar_fp16_from_float((float)cos(omega * r)));
            turn[1] = oscar_fp16_to_float(oscar_fp16_from_float((float)sin(omega * r)));
        }
    }
    cache->calibration.frequencies = frequencies;
    cache->calibration.turns = (struct oscar_turns){page_turn, row_turn, pages, frequencies};
}

void bench_cache_centre(struct bench_cache *cache, int pairs) {
    size_t heads = (size_t)cache->geometry.layers * cache->geometry.kv_heads, d = cache->geometry.head_dim;
    if (cache->calibration.frequencies == 0) {
        make_turns(cache);
        float *rows = own(cache, sizeof(float) * d * (2 * OSCAR_MAX_PAIRS + 1));
        int32_t *pair = own(cache, sizeof(int32_t) * OSCAR_MAX_PAIRS);
        for (size_t i = 0; i < d * (2 * OSCAR_MAX_PAIRS + 1); i++)
            rows[i] = 0.5F * random_normal();
        for (uint32_t i = 0; i < OSCAR_MAX_PAIRS; i++)
            pair[i] = (int32_t)(i * 2);
        for (size_t h = 0; h < heads; h++) {
            cache->calibration.heads[h].centre_static = rows;
            cache->calibration.heads[h].centre_cos = rows + d;
            cache->calibration.heads[h].centre_sin = rows + d * (OSCAR_MAX_PAIRS + 1);
            cache->calibration.heads[h].centre_pair = pair;
        }
    }
    const float *rows = cache->owned[cache->owned_count - 2];
    for (size_t h = 0; h < heads; h++) {
        cache->calibration.heads[h].centre_static = pairs < 0 ? NULL : rows;
        cache->calibration.heads[h].pairs = pairs < 0 ? 0 : (uint32_t)pairs;
    }
}

void bench_cache_close(struct bench_cache *cache) {
    for (unsigned i = 0; i < cache->owned_count; i++)
        free(cache->owned[i]);
    free(cache);
}

uint64_t bench_cache_step_bytes(const struct bench_cache *cache) {
    uint64_t pages = (cache->item.tokens + OSCAR_PAGE_TOKENS - 1) / OSCAR_PAGE_TOKENS;
    return pages * cache->geometry.kv_heads * oscar_packed_record_bytes(cache->geometry.head_dim);
}

/* In the order in which attention goes on one thread: page by page, all heads of the layer, the next pages prefetched. */
uint64_t bench_cache_read(const struct bench_cache *cache, uint32_t layer) {
    uint32_t pages = (cache->item.tokens + OSCAR_PAGE_TOKENS - 1) / OSCAR_PAGE_TOKENS;
    size_t bytes = cache->geometry.kv_heads * oscar_packed_record_bytes(cache->geometry.head_dim);
    const uint8_t *records = cache->packed + layer * bytes;
    uint64_t sum[8] = {0};
    for (uint32_t p = 0; p < pages; p++) {
        const uint8_t *record = records + oscar_page_ref_id(cache->item.pages[p]) * cache->page_bytes;
        const uint8_t *ahead = records;
        ahead += oscar_page_ref_id(cache->item.pages[p + 1 < pages ? p + 1 : p]) * cache->page_bytes;
        for (size_t i = 0; i < bytes; i += 64) {
            uint64_t words[8];
            __builtin_prefetch(ahead + i);
            memcpy(words, record + i, sizeof(words));
            for (unsigned k = 0; k < 8; k++)
                sum[k] += words[k];
        }
    }
    return sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
}
