/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/kernel_fixture.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/number.h"
#include "proto/geometry.h"

enum host_level kernel_levels[HOST_LEVELS] = {HOST_PORTABLE, HOST_AVX2, HOST_AVX512};

enum host_level kernel_level_or_skip(void **state) {
    enum host_level level = *(enum host_level *)*state;
    if (!host_level_supported(level)) {
        print_message("this CPU does not run %s\n", host_level_name(level));
        skip();
    }
    return level;
}

struct kernel_random kernel_random_open(void) {
    const char *given = getenv("OSCAR_TEST_SEED");
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t seed = given ? strtoull(given, NULL, 0) : (uint64_t)now.tv_sec * 1000000007 + (uint64_t)now.tv_nsec;
    print_message("OSCAR_TEST_SEED=%" PRIu64 "\n", seed);
    return (struct kernel_random){.state = seed};
}

uint64_t kernel_random_next(struct kernel_random *random) { /* splitmix64 */
    uint64_t z = random->state += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

uint32_t kernel_random_below(struct kernel_random *random, uint32_t bound) {
    return (uint32_t)(kernel_random_next(random) % bound);
}

double kernel_random_uniform(struct kernel_random *random) {
    return (double)(kernel_random_next(random) >> 11) * 0x1p-53;
}

double kernel_random_normal(struct kernel_random *random) {
    double radius = sqrt(-2.0 * log(1.0 - kernel_random_uniform(random)));
    return radius * cos(6.283185307179586 * kernel_random_uniform(random));
}

void kernel_random_bytes(struct kernel_random *random, void *bytes, size_t count) {
    uint8_t *to = bytes;
    for (size_t i = 0; i < count; i++)
        to[i] = (uint8_t)kernel_random_next(random);
}

static void *own(struct kernel_model *model, size_t bytes) {
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    assert_non_null(memory);
    model->owned[model->owned_count++] = memory;
    return memory;
}

/* Orthonormal rows by Gram-Schmidt, twice for accuracy. */
static void fill_orthogonal(struct kernel_random *random, uint32_t d, float *matrix) {
    double *rows = malloc(sizeof(double) * d * d);
    assert_non_null(rows);
    for (uint32_t i = 0; i < d; i++) {
        double *row = rows + (size_t)i * d;
        for (uint32_t j = 0; j < d; j++)
            row[j] = kernel_random_normal(random);
        for (uint32_t pass = 0; pass < 2; pass++)
            for (uint32_t other = 0; other <= i; other++) {
                const double *with = rows + (size_t)other * d;
                double product = 0.0;
                for (uint32_t j = 0; j < d; j++)
                    product += row[j] * with[j];
                double factor = other == i ? 1.0 - 1.0 / sqrt(product) : product;
                for (uint32_t j = 0; j < d; j++)
                    row[j] -= factor * with[j];
            }
        for (uint32_t j = 0; j < d; j++)
            matrix[(size_t)i * d + j] = (float)row[j];
    }
    free(rows);
}

static float *random_floats(struct kernel_random *random, struct kernel_model *model, size_t count, double size) {
    float *values = own(model, count * sizeof(*values));
    for (size_t i = 0; i < count; i++)
        values[i] = (float)(size * kernel_random_normal(random));
    return values;
}

static void fill_head(struct kernel_random *random, struct kernel_model *model,
                      const struct kernel_model_options *options, struct oscar_head_calibration *head) {
    uint32_t d = options->head_dim;
    *head = (struct oscar_head_calibration){.rank_k = options->rank_k, .rank_v = options->rank_v};
    if (options->matrix) {
        float *both = own(model, 2 * sizeof(float) * d * d);
        fill_orthogonal(random, d, both);
        fill_orthogonal(random, d, both + (size_t)d * d);
        head->rotation_k = both;
        head->rotation_v = both + (size_t)d * d;
    }
    if (options->feedback != 0.0) {
        float *l = random_floats(random, model, (size_t)d * d, options->feedback);
        for (uint32_t i = 0; i < d; i++) {
            l[(size_t)i * d + i] = 1.0F;
            memset(l + (size_t)i * d + i + 1, 0, sizeof(float) * (d - i - 1));
        }
        head->feedback = l;
    }
    if (!options->centre)
        return;
    float *centre = random_floats(random, model, (size_t)d * (1 + 2 * (size_t)options->pairs), options->centre_size);
    head->centre_static = centre;
    head->centre_cos = centre + d;
    head->centre_sin = centre + d + (size_t)options->pairs * d;
    head->pairs = options->pairs;
    int32_t *pair = own(model, sizeof(*pair) * OSCAR_MAX_PAIRS);
    for (uint32_t i = 0; i < options->pairs; i++) /* distinct, in no order */
        pair[i] = (int32_t)((i * 5 + 3) % (options->head_dim / 2));
    head->centre_pair = pair;
}

struct kernel_model *kernel_model_open(struct kernel_random *random, const struct kernel_model_options *options) {
    struct kernel_model *model = calloc(1, sizeof(*model));
    assert_non_null(model);
    model->geometry = (struct oscar_geometry){
        .layers = options->layers,
        .query_heads = 2 * options->kv_heads,
        .kv_heads = options->kv_heads,
        .head_dim = options->head_dim,
        .dtype = options->dtype ? options->dtype : OSCAR_BF16,
        .page_tokens = OSCAR_PAGE_TOKENS,
        .sink_tokens = OSCAR_SINK_TOKENS,
        .recent_tokens = OSCAR_RECENT_TOKENS,
    };
    assert_int_equal(oscar_geometry_check(&model->geometry, NULL), 0);
    uint32_t heads = options->layers * options->kv_heads;
    struct oscar_calibration *calibration = &model->calibration;
    calibration->layers = options->layers;
    calibration->kv_heads = options->kv_heads;
    calibration->head_dim = options->head_dim;
    calibration->rotation_k = options->matrix ? OSCAR_ROTATION_MATRIX : OSCAR_ROTATION_HADAMARD;
    calibration->rotation_v = calibration->rotation_k;
    calibration->heads = own(model, heads * sizeof(*calibration->heads));
    assert_true(heads * 3 + 4 <= sizeof(model->owned) / sizeof(model->owned[0]));
    for (uint32_t i = 0; i < heads; i++)
        fill_head(random, model, options, &calibration->heads[i]);
    if (!options->centre || options->pairs == 0)
        return model;
    calibration->frequencies = options->head_dim / 2;
    double *omega = own(model, calibration->frequencies * sizeof(*omega));
    for (uint32_t i = 0; i < calibration->frequencies; i++)
        omega[i] = pow(10000.0, -(double)i / calibration->frequencies);
    calibration->omega = omega;
    size_t bytes = oscar_turns_bytes(calibration, options->turn_pages);
    void *turns = own(model, bytes);
    oscar_turns_fill(calibration, options->turn_pages, turns);
    assert_int_equal(oscar_calibration_attach_turns(calibration, turns, bytes, options->turn_pages), 0);
    return model;
}

void kernel_model_close(struct kernel_model *model) {
    for (uint32_t i = 0; i < model->owned_count; i++)
        free(model->owned[i]);
    free(model);
}

static uint16_t bounded(double value) { return oscar_bf16_from_float((float)fmax(fmin(value, 64000.0), -64000.0)); }

static double sign(struct kernel_random *random) { return kernel_random_next(random) % 2 ? 1.0 : -1.0; }

void kernel_row_fill(struct kernel_random *random, enum kernel_row_kind kind, uint32_t d, uint16_t *ret_row) {
    double size = exp(2.0 * kernel_random_normal(random));
    uint32_t chosen = kernel_random_below(random, d);
    for (uint32_t j = 0; j < d; j++) {
        double value = size * kernel_random_normal(random);
        switch (kind) {
        case KERNEL_ROW_OUTLIERS:
            value *= kernel_random_below(random, 16) == 0 ? 100.0 : 1.0;
            break;
        case KERNEL_ROW_TIES:
            value = ((int)kernel_random_below(random, 7) - 3) * 0.5;
            break;
        case KERNEL_ROW_ZERO:
            value = 0.0;
            break;
        case KERNEL_ROW_SIGNED_ZEROS:
            value = kernel_random_below(random, 8) == 0 ? value : 0.0 * sign(random);
            break;
        case KERNEL_ROW_CONSTANT:
            value = size;
            break;
        case KERNEL_ROW_SUBNORMAL:
            ret_row[j] = (uint16_t)(kernel_random_next(random) & 0x807F);
            continue;
        case KERNEL_ROW_ONE_HUGE:
            value = j == chosen ? 64000.0 * sign(random) : value * 1e-3;
            break;
        case KERNEL_ROW_POWERS:
            do
                ret_row[j] = (uint16_t)kernel_random_next(random);
            while (!(fabsf(oscar_bf16_to_float(ret_row[j])) <= OSCAR_MAX_ROW_MAGNITUDE));
            continue;
        case KERNEL_ROW_ONE_SIGN:
            value = chosen % 2 ? fabs(value) : -fabs(value);
            break;
        case KERNEL_ROW_ONE_MAGNITUDE:
            value = size * sign(random);
            break;
        default:
            break;
        }
        ret_row[j] = bounded(value);
    }
    if (kind == KERNEL_ROW_CONSTANT && kernel_random_next(random) % 2)
        for (uint32_t j = 0; j < d; j++)
            ret_row[j] ^= 0x8000;
}

uint8_t *kernel_dense_page(struct kernel_random *random, const struct oscar_geometry *geometry, bool adversarial) {
    size_t bytes = oscar_dense_page_bytes(geometry);
    uint8_t *page = aligned_alloc(64, bytes);
    assert_non_null(page);
    for (size_t at = 0; at < bytes; at += (size_t)2 * geometry->head_dim) {
        enum kernel_row_kind kind = adversarial ? kernel_random_below(random, KERNEL_ROW_KINDS) : KERNEL_ROW_NORMAL;
        kernel_row_fill(random, kind, geometry->head_dim, (uint16_t *)(page + at));
    }
    return page;
}

int32_t kernel_pack_page(enum host_level level, const struct oscar_geometry *geometry,
                         const struct oscar_calibration *calibration, const uint8_t *dense, uint64_t position,
                         uint8_t *packed) {
    struct host_pool *pool;
    int32_t status = 12345;
    struct oscar_pack_item item = {.dense = dense, .packed = packed, .position = position, .status = &status};
    assert_int_equal(host_pool_open(1, &pool, NULL), 0);
    assert_int_equal(host_pack(pool, level, geometry, calibration, &item, 1), 0);
    host_pool_close(pool);
    return status;
}
