/* SPDX-License-Identifier: Apache-2.0 */
#include "calib/moments.h"

#include <cblas.h>
#include <stdlib.h>

#include "oscar/geometry.h"

#include "proto/cleanup.h"

#define BLOCK_ELEMENTS 65536U

uint32_t covariance_block_rows(uint32_t d) { return BLOCK_ELEMENTS / d; }

int moments_init(struct moments *moments, uint32_t d, struct oscar_cause *cause) {
    double *memory = calloc((size_t)d * (d + 2), sizeof(*memory));
    if (memory == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a covariance");
    *moments =
        (struct moments){.query = memory, .turned = memory + (size_t)d * d, .unturned = memory + (size_t)d * (d + 1)};
    return 0;
}

void moments_clear(struct moments *moments) {
    free(moments->query);
    *moments = (struct moments){0};
}

void covariance_add_wide(double *target, uint32_t d, const double *rows, size_t count) {
    cblas_dsyrk(CblasRowMajor, CblasLower, CblasTrans, (int)d, (int)count, 1.0, rows, (int)d, 1.0, target, (int)d);
}

void covariance_add(double *target, uint32_t d, const float *rows, const double *weights, size_t count, double *block) {
    for (size_t i = 0; i < count; i++) {
        double weight = weights != NULL ? weights[i] : 1.0;
        for (uint32_t j = 0; j < d; j++)
            block[i * d + j] = weight * (double)rows[i * d + j];
    }
    covariance_add_wide(target, d, block, count);
}

void covariance_finish(double *target, uint32_t d, double factor) {
    for (uint32_t i = 0; i < d; i++)
        for (uint32_t j = 0; j <= i; j++) {
            double value = target[(size_t)i * d + j] * factor;
            target[(size_t)i * d + j] = value;
            target[(size_t)j * d + i] = value;
        }
}

static void add_keys(struct moments *moments, const struct rope *rope, uint32_t d, uint64_t position, const float *rows,
                     uint64_t count) {
    uint64_t skip = position < OSCAR_SINK_TOKENS ? OSCAR_SINK_TOKENS - position : 0;
    if (skip >= count)
        return;
    rows += skip * d;
    count -= skip;
    for (uint64_t i = 0; i < count; i++)
        for (uint32_t j = 0; j < d; j++)
            moments->turned[j] += (double)rows[i * d + j];
    rope_add_unturned(rope, position + skip, rows, count, d, moments->unturned);
    moments->tokens += count;
}

int moments_add(struct moments *moments, const struct activations *activations, const struct rope *rope,
                const struct layer_activations *layer, const struct sequence *sequence, uint32_t kv_head, uint64_t from,
                uint64_t to, struct oscar_cause *cause) {
    const uint32_t d = activations->head_dim;
    const uint32_t group = activations->query_heads / activations->kv_heads;
    const uint32_t rows = covariance_block_rows(d);
    _cleanup_free_ float *narrow = malloc((size_t)rows * d * sizeof(*narrow));
    _cleanup_free_ double *wide = malloc((size_t)rows * d * sizeof(*wide));
    int r;
    if (narrow == NULL || wide == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a block of rows");
    for (uint64_t count; from < to; from += count) {
        count = to - from < rows ? to - from : rows;
        for (uint32_t i = 0; i < group; i++) {
            if ((r = activations_read(activations, layer, sequence, ACTIVATION_Q, kv_head * group + i, from, count,
                                      narrow, d, cause)) < 0)
                return r;
            covariance_add(moments->query, d, narrow, NULL, count, wide);
        }
        moments->query_rows += count * group;
        if ((r = activations_read(activations, layer, sequence, ACTIVATION_K, kv_head, from, count, narrow, d, cause)) <
            0)
            return r;
        add_keys(moments, rope, d, sequence->first_position + from, narrow, count);
    }
    return 0;
}

void moments_join(struct moments *sum, const struct moments *other, uint32_t d) {
    cblas_daxpy((int)(d * (d + 2)), 1.0, other->query, 1, sum->query, 1);
    sum->query_rows += other->query_rows;
    sum->tokens += other->tokens;
}
