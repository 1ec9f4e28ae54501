/* SPDX-License-Identifier: Apache-2.0 */
#include "attend_fixture.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/number.h"
#include "kernels/reference.h"

#define POISON 0x7E5AU /* a NaN in both types */

uint64_t fixture_seed(void) {
    const char *text = getenv("OSCAR_TEST_SEED");
    uint64_t seed = text != NULL ? strtoull(text, NULL, 0) : (uint64_t)time(NULL) * 2654435761U;
    seed = seed != 0 ? seed : 1;
    print_message("OSCAR_TEST_SEED=%llu\n", (unsigned long long)seed);
    return seed;
}

uint64_t fixture_random(uint64_t *state) {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * UINT64_C(2685821657736338717);
}

uint32_t fixture_pick(uint64_t *state, uint32_t bound) {
    return (uint32_t)((fixture_random(state) >> 32) * bound >> 32);
}

static double uniform(uint64_t *state) { return ((double)(fixture_random(state) >> 11) + 0.5) * 0x1p-53; }

float fixture_normal(uint64_t *state) {
    double radius = sqrt(-2 * log(uniform(state)));
    return (float)(radius * cos(6.283185307179586 * uniform(state)));
}

static void *own(struct fixture *fixture, size_t bytes) {
    void *memory = calloc(1, bytes > 0 ? bytes : 1);
    assert_non_null(memory);
    assert_true(fixture->owned_count < sizeof(fixture->owned) / sizeof(fixture->owned[0]));
    fixture->owned[fixture->owned_count++] = memory;
    return memory;
}

/* --- calibration --- */

/* Gram-Schmidt over random rows, in double. */
static float *random_rotation(struct fixture *fixture, uint64_t *state) {
    uint32_t d = fixture->options.head_dim;
    double *rows = malloc(sizeof(double) * d * d);
    float *matrix = own(fixture, sizeof(float) * d * d);
    assert_non_null(rows);
    for (uint32_t i = 0; i < d; i++) {
        double *row = rows + (size_t)i * d, norm = 0;
        for (uint32_t k = 0; k < d; k++)
            row[k] = fixture_normal(state);
        for (uint32_t j = 0; j < i; j++) {
            double dot = 0;
            for (uint32_t k = 0; k < d; k++)
                dot += row[k] * rows[(size_t)j * d + k];
            for (uint32_t k = 0; k < d; k++)
                row[k] -= dot * rows[(size_t)j * d + k];
        }
        for (uint32_t k = 0; k < d; k++)
            norm += row[k] * row[k];
        for (uint32_t k = 0; k < d; k++) {
            row[k] /= sqrt(norm);
            matrix[(size_t)i * d + k] = (float)row[k];
        }
    }
    free(rows);
    return matrix;
}

static void make_turns(struct fixture *fixture, uint32_t pages) {
    struct oscar_calibration *calibration = &fixture->calibration;
    uint32_t frequencies = fixture->options.head_dim / 2;
    double *omega = own(fixture, sizeof(double) * frequencies);
    float *page_turn = own(fixture, sizeof(float) * 2 * frequencies * pages);
    float *row_turn = own(fixture, sizeof(float) * 2 * frequencies * OSCAR_PAGE_TOKENS);
    for (uint32_t f = 0; f < frequencies; f++) {
        omega[f] = pow(10000.0, -2.0 * f / fixture->options.head_dim);
        for (uint32_t p = 0; p < pages; p++) {
            page_turn[((size_t)p * frequencies + f) * 2] = (float)cos(omega[f] * 64 * p);
            page_turn[((size_t)p * frequencies + f) * 2 + 1] = (float)sin(omega[f] * 64 * p);
        }
        for (uint32_t r = 0; r < OSCAR_PAGE_TOKENS; r++) {
            float *turn = row_turn + ((size_t)r * frequencies + f) * 2;
            turn[0] = oscar_fp16_to_float(oscar_fp16_from_float((float)cos(omega[f] * r)));
            turn[1] = oscar_fp16_to_float(oscar_fp16_from_float((float)sin(omega[f] * r)));
        }
    }
    calibration->frequencies = frequencies;
    calibration->omega = omega;
    calibration->turns = (struct oscar_turns){page_turn, row_turn, pages, frequencies};
}

static float *random_rows(struct fixture *fixture, uint64_t *state, uint32_t rows, float size) {
    size_t count = (size_t)rows * fixture->options.head_dim;
    float *values = own(fixture, sizeof(float) * count);
    for (size_t i = 0; i < count; i++)
        values[i] = size * fixture_normal(state);
    return values;
}

static void make_calibration(struct fixture *fixture, uint64_t *state, uint32_t pages) {
    const struct fixture_options *options = &fixture->options;
    struct oscar_calibration *calibration = &fixture->calibration;
    uint32_t heads = options->layers * options->kv_heads;
    calibration->layers = options->layers;
    calibration->kv_heads = options->kv_heads;
    calibration->head_dim = options->head_dim;
    calibration->rotation_k = calibration->rotation_v =
        options->matrix ? OSCAR_ROTATION_MATRIX : OSCAR_ROTATION_HADAMARD;
    calibration->heads = own(fixture, sizeof(*calibration->heads) * heads);
    if (options->pairs > 0)
        make_turns(fixture, pages);
    const float *rotation_k = options->matrix ? random_rotation(fixture, state) : NULL;
    const float *rotation_v = options->matrix ? random_rotation(fixture, state) : NULL;
    for (uint32_t h = 0; h < heads; h++) {
        struct oscar_head_calibration *head = &calibration->heads[h];
        head->rotation_k = rotation_k;
        head->rotation_v = rotation_v;
        head->rank_k = head->rank_v = options->head_dim - 1;
        if (options->pairs < 0)
            continue;
        head->pairs = (uint32_t)options->pairs;
        head->centre_static = random_rows(fixture, state, 1, 1.0F);
        head->centre_cos = random_rows(fixture, state, head->pairs, 0.7F);
        head->centre_sin = random_rows(fixture, state, head->pairs, 0.7F);
        int32_t *pair = own(fixture, sizeof(int32_t) * OSCAR_MAX_PAIRS);
        for (uint32_t i = 0; i < head->pairs; i++) /* distinct, in no order */
            pair[i] = (int32_t)((i * 7 + h * 3) % (options->head_dim / 2));
        head->centre_pair = pair;
    }
}

/* --- pages --- */

static void fill_dense(const struct fixture *fixture, uint64_t *state, uint8_t *page, uint32_t rows) {
    uint32_t d = fixture->options.head_dim;
    for (uint32_t record = 0; record < fixture->options.layers * fixture->options.kv_heads; record++) {
        uint16_t *elements = (uint16_t *)(void *)(page + record * oscar_dense_record_bytes(d));
        for (uint32_t side = 0; side < 2; side++)
            for (uint32_t t = 0; t < OSCAR_PAGE_TOKENS; t++)
                for (uint32_t i = 0; i < d; i++) {
                    float size = side == 0 ? fixture->options.key_size : 1;
                    elements[((size_t)side * OSCAR_PAGE_TOKENS + t) * d + i] =
                        t < rows ? oscar_bf16_from_float(size * fixture_normal(state)) : 0xFFFFU;
                }
    }
}

static void fill_packed(const struct fixture *fixture, uint64_t *state, uint8_t *page, uint32_t rows) {
    uint32_t d = fixture->options.head_dim;
    for (uint32_t record = 0; record < fixture->options.layers * fixture->options.kv_heads; record++) {
        uint8_t *bytes = page + record * oscar_packed_record_bytes(d);
        for (size_t i = 0; i < oscar_packed_scales_offset(d); i++)
            bytes[i] = (uint8_t)(fixture_random(state) >> 40);
        for (uint32_t t = 0; t < OSCAR_PAGE_TOKENS; t++) {
            uint16_t half[4] = {0xFFFFU, 0xFFFFU, 0xFFFFU, 0xFFFFU};
            if (t < rows) {
                half[0] = oscar_fp16_from_float(fixture->options.key_size * (float)(0.5 + uniform(state)));
                half[1] = oscar_fp16_from_float((float)(1 + uniform(state)));
                half[2] = oscar_fp16_from_float((float)(0.2 + 1.6 * uniform(state)));
                half[3] = oscar_fp16_from_float((float)(1 + uniform(state)));
            }
            memcpy(bytes + oscar_packed_scales_offset(d) + oscar_packed_scale_offset(t), half, sizeof(half));
        }
    }
}

static oscar_page_ref new_page(struct fixture *fixture, uint64_t *state, enum oscar_form form, uint32_t rows) {
    assert_true(fixture->used[form] < fixture->pages[form]);
    uint64_t id = fixture->used[form]++;
    uint8_t *page = fixture->arena[form] + id * fixture->args.arenas[form].stride;
    if (form == OSCAR_FORM_PACKED)
        fill_packed(fixture, state, page, rows);
    else
        fill_dense(fixture, state, page, rows);
    return oscar_page_ref_make(form, id);
}

static enum oscar_form form_of(const struct fixture *fixture, uint64_t *state, uint32_t page, uint32_t pages) {
    if (fixture->options.forms == FIXTURE_PACKED)
        return OSCAR_FORM_PACKED;
    if (page == 0)
        return OSCAR_FORM_SINK;
    if (fixture->options.forms == FIXTURE_MIXED)
        return page + 5 >= pages ? OSCAR_FORM_DENSE : OSCAR_FORM_PACKED;
    return fixture_pick(state, 2) == 0 ? OSCAR_FORM_DENSE : OSCAR_FORM_PACKED;
}

struct fixture *fixture_open(uint64_t *state, const struct fixture_options *options, uint32_t most_pages) {
    struct fixture *fixture = calloc(1, sizeof(*fixture));
    assert_non_null(fixture);
    fixture->options = *options;
    fixture->geometry = (struct oscar_geometry){.layers = options->layers,
                                                .query_heads = options->kv_heads * options->group,
                                                .kv_heads = options->kv_heads,
                                                .head_dim = options->head_dim,
                                                .dtype = options->dtype,
                                                .page_tokens = OSCAR_PAGE_TOKENS,
                                                .sink_tokens = OSCAR_SINK_TOKENS,
                                                .recent_tokens = OSCAR_RECENT_TOKENS};
    make_calibration(fixture, state, most_pages);
    fixture->args = (struct oscar_attend_args){.geometry = &fixture->geometry,
                                               .calibration = &fixture->calibration,
                                               .layer = options->layers - 1,
                                               .softmax_scale = 1.0F / sqrtf((float)options->head_dim),
                                               .item = fixture->item};
    size_t records = (size_t)options->layers * options->kv_heads;
    for (uint32_t form = 0; form < OSCAR_FORMS; form++) {
        size_t record = form == OSCAR_FORM_PACKED ? oscar_packed_record_bytes(options->head_dim)
                                                  : oscar_dense_record_bytes(options->head_dim);
        fixture->page_bytes[form] = records * record;
        fixture->pages[form] = options->distinct + FIXTURE_ITEMS;
        uint64_t stride = fixture->page_bytes[form] + 64U * form; /* an arena may pad its pages */
        fixture->arena[form] = own(fixture, stride * fixture->pages[form]);
        fixture->args.arenas[form] = (struct oscar_arena_view){.base = fixture->arena[form], .stride = stride};
        for (uint32_t i = 0; i < options->distinct; i++)
            new_page(fixture, state, (enum oscar_form)form, OSCAR_PAGE_TOKENS);
    }
    return fixture;
}

void fixture_add(struct fixture *fixture, uint64_t *state, uint32_t tokens, uint32_t rows) {
    assert_true(fixture->args.items < FIXTURE_ITEMS && (tokens == 0 || tokens >= rows));
    const struct fixture_options *options = &fixture->options;
    struct oscar_attend_item *item = &fixture->item[fixture->args.items++];
    uint32_t pages = (tokens + OSCAR_PAGE_TOKENS - 1) / OSCAR_PAGE_TOKENS, d = options->head_dim;
    oscar_page_ref *table = own(fixture, sizeof(*table) * pages);
    for (uint32_t p = 0; p < pages; p++) {
        enum oscar_form form = form_of(fixture, state, p, pages);
        if (p + 1 == pages)
            table[p] = new_page(fixture, state, form, tokens - p * OSCAR_PAGE_TOKENS);
        else
            table[p] = oscar_page_ref_make(form, fixture_pick(state, options->distinct));
    }
    item->pages = table;
    item->tokens = tokens;
    item->rows = rows;
    item->q_head_stride = d + fixture_pick(state, 2) * 8;
    item->q_row_stride = item->q_head_stride * fixture->geometry.query_heads + fixture_pick(state, 2) * 24;
    item->out_head_stride = d + fixture_pick(state, 2) * 3;
    item->out_row_stride = item->out_head_stride * fixture->geometry.query_heads + fixture_pick(state, 2) * 5;
    size_t elements = (size_t)(rows * item->q_row_stride);
    uint16_t *q = own(fixture, elements * sizeof(*q));
    for (size_t i = 0; i < elements; i++) {
        float value = options->query_size * fixture_normal(state);
        q[i] = options->dtype == OSCAR_BF16 ? oscar_bf16_from_float(value) : oscar_fp16_from_float(value);
    }
    item->q = q;
    item->out = own(fixture, (size_t)(rows * item->out_row_stride) * sizeof(uint16_t));
    item->lse = own(fixture, sizeof(float) * rows * fixture->geometry.query_heads);
    fixture_poison_outputs(fixture);
}

void fixture_close(struct fixture *fixture) {
    for (uint32_t i = 0; i < fixture->owned_count; i++)
        free(fixture->owned[i]);
    free(fixture);
}

/* --- results --- */

size_t fixture_out_elements(const struct fixture *fixture, const struct oscar_attend_item *item) {
    (void)fixture;
    return (size_t)(item->rows * item->out_row_stride);
}

void fixture_poison_outputs(struct fixture *fixture) {
    for (uint32_t i = 0; i < fixture->args.items; i++) {
        struct oscar_attend_item *item = &fixture->item[i];
        for (size_t e = 0; e < fixture_out_elements(fixture, item); e++)
            ((uint16_t *)item->out)[e] = POISON;
        for (size_t e = 0; item->lse != NULL && e < (size_t)item->rows * fixture->geometry.query_heads; e++)
            item->lse[e] = NAN;
    }
}

double fixture_out(const struct fixture *fixture, const struct oscar_attend_item *item, uint32_t row, uint32_t head,
                   uint32_t dim) {
    uint16_t bits = ((const uint16_t *)item->out)[row * item->out_row_stride + head * item->out_head_stride + dim];
    return fixture->options.dtype == OSCAR_BF16 ? oscar_bf16_to_float(bits) : oscar_fp16_to_float(bits);
}

static void ask_oracle(struct fixture *fixture, uint32_t index) {
    const struct oscar_attend_item *item = &fixture->item[index];
    size_t rows = (size_t)item->rows * fixture->geometry.query_heads;
    fixture->expected[index] = own(fixture, sizeof(double) * rows * fixture->options.head_dim);
    fixture->expected_lse[index] = own(fixture, sizeof(double) * rows);
    assert_int_equal(
        oscar_reference_attend(&fixture->args, item, fixture->expected[index], fixture->expected_lse[index]), 0);
}

double fixture_error(struct fixture *fixture, uint32_t index, double *ret_lse_error) {
    uint32_t d = fixture->options.head_dim, heads = fixture->geometry.query_heads;
    const struct oscar_attend_item *item = &fixture->item[index];
    if (fixture->expected[index] == NULL)
        ask_oracle(fixture, index);
    const double *out = fixture->expected[index], *lse = fixture->expected_lse[index];
    double rounding = fixture->options.dtype == OSCAR_BF16 ? 0x1p-8 : 0x1p-11, worst = 0, worst_lse = 0;
    for (uint32_t row = 0; row < item->rows; row++)
        for (uint32_t head = 0; head < heads; head++) {
            size_t at = (size_t)row * heads + head;
            double largest = 0, error = 0;
            for (uint32_t i = 0; i < d; i++) {
                double expected = out[at * d + i];
                double off = fabs(fixture_out(fixture, item, row, head, i) - expected);
                off -= fabs(expected) * rounding + 0x1p-25; /* half a unit of the output type */
                largest = fmax(largest, fabs(expected));
                error = off > error || isnan(off) ? off : error;
            }
            if (error > 0 || isnan(error))
                worst = !(error / largest <= worst) ? error / largest : worst;
            if (item->lse != NULL && lse[at] != (double)item->lse[at]) /* equal infinities too */
                worst_lse = !(fabs(lse[at] - item->lse[at]) <= worst_lse) ? fabs(lse[at] - item->lse[at]) : worst_lse;
        }
    *ret_lse_error = worst_lse;
    return worst;
}

static void check_gaps(const struct fixture *fixture, const struct oscar_attend_item *item) {
    uint32_t d = fixture->options.head_dim;
    for (uint32_t row = 0; row < item->rows; row++)
        for (int64_t e = 0; e < item->out_row_stride; e++)
            if (e / item->out_head_stride >= fixture->geometry.query_heads || e % item->out_head_stride >= d)
                assert_int_equal(((const uint16_t *)item->out)[row * item->out_row_stride + e], POISON);
}

void fixture_check(struct fixture *fixture, struct host_pool *pool, enum host_level level, double bound) {
    fixture_poison_outputs(fixture);
    assert_int_equal(host_attend(pool, level, &fixture->args), 0);
    for (uint32_t i = 0; i < fixture->args.items; i++) {
        const struct oscar_attend_item *item = &fixture->item[i];
        double lse_error, error = fixture_error(fixture, i, &lse_error);
        if (!(error <= bound) || !(lse_error <= 5 * bound))
            fail_msg("level %s: error %.3g, of lse %.3g: head size %u, group %u, pairs %d, forms %d, tokens %u, rows "
                     "%u, type %u",
                     host_level_name(level), error, lse_error, fixture->options.head_dim, fixture->options.group,
                     fixture->options.pairs, (int)fixture->options.forms, item->tokens, item->rows,
                     fixture->options.dtype);
        check_gaps(fixture, item);
    }
}
