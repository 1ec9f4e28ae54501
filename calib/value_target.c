/* SPDX-License-Identifier: Apache-2.0 */
#include "calib/value_target.h"

#include <cblas.h>
#include <math.h>
#include <stdlib.h>

#include "calib/attention.h"
#include "calib/head_rows.h"
#include "calib/moments.h"
#include "proto/cleanup.h"

#define QUERIES 1024U /* of a layer and KV head, over all its sequences */

/* Adds the probe's queries, each by what the output loses by errors of its packed tokens' logits. */
static int add_costs(const struct attention_rows *rows, struct attention_probe *probe, struct query_cost *cost,
                     struct oscar_cause *cause) {
    const uint32_t d = rows->d;
    const uint32_t begin = probe->packed_begin;
    const uint32_t count = probe->packed_most - begin;
    if (count == 0)
        return 0;
    const double *values = rows->v + (size_t)begin * d;
    _cleanup_free_ double *energy = calloc(count, sizeof(*energy));
    if (energy == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the values of a head");
    for (size_t t = 0; t < count; t++)
        energy[t] = cblas_ddot((int)d, values + t * d, 1, values + t * d, 1);
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)probe->rows, (int)count, (int)d, 1.0, probe->output,
                (int)d, values, (int)d, 0.0, probe->other, (int)count);
    for (size_t i = 0; i < probe->rows; i++) {
        const double *output = probe->output + i * d;
        const double *weights = probe->weights + i * probe->keys + begin;
        const double *products = probe->other + i * count;
        const double own = cblas_ddot((int)d, output, 1, output, 1);
        double sum = 0;
        for (uint32_t t = 0; t < probe->packed_end[i] - begin; t++)
            sum += weights[t] * weights[t] * (energy[t] - 2 * products[t] + own);
        sum = sum > 0 ? sum : 0;
        cost->weight += sum;
        cost->square += sum * sum;
        for (uint32_t j = 0; j < d; j++)
            probe->other_output[i * d + j] = sqrt(sum) * probe->q[i * d + j];
    }
    covariance_add_wide(cost->sum, d, probe->other_output, probe->rows);
    return 0;
}

/* Adds the outputs, and the costs, of the queries at rows `at` of the sequence. */
static int add_outputs(const struct head_rows *rows, const uint32_t *at, uint32_t queries, double softmax_scale,
                       double *target, struct query_cost *cost, struct oscar_cause *cause) {
    int r = 0;
    for (uint32_t done = 0, count; r == 0 && done < queries; done += count) {
        count = head_rows_queries(rows, at[queries - 1] + 1);
        count = queries - done < count ? queries - done : count;
        struct attention_probe probe = {0};
        r = head_rows_probe(rows, at + done, count, softmax_scale, &probe, cause);
        if (r == 0) {
            covariance_add_wide(target, rows->rows.d, probe.output, probe.rows);
            r = add_costs(&rows->rows, &probe, cost, cause);
        }
        attention_probe_clear(&probe);
    }
    return r;
}

int value_target_scores(const struct activations *activations, const struct layer_activations *layer, uint32_t kv_head,
                        double softmax_scale, double *const target[2], struct query_cost cost[2],
                        struct oscar_cause *cause) {
    const uint64_t tokens = activations_tokens(layer);
    int r = 0;
    for (size_t i = 0; r == 0 && i < layer->sequences; i++) {
        const struct sequence *sequence = &layer->sequence[i];
        const uint32_t middle = (uint32_t)sequence_held_out(sequence);
        const uint32_t share = (uint32_t)(((uint64_t)QUERIES * sequence->tokens + tokens - 1) / tokens);
        uint32_t at[2][QUERIES];
        uint32_t fitted = spread_queries(0, middle, share - share / 4, at[0]);
        uint32_t held_out = spread_queries(middle, (uint32_t)sequence->tokens, (share + 3) / 4, at[1]);
        struct head_rows rows = {0};
        r = head_rows_read(activations, layer, sequence, kv_head, &rows, cause);
        if (r == 0)
            r = add_outputs(&rows, at[0], fitted, softmax_scale, target[0], &cost[0], cause);
        if (r == 0)
            r = add_outputs(&rows, at[1], held_out, softmax_scale, target[1], &cost[1], cause);
        head_rows_clear(&rows);
    }
    return r;
}

struct proxy_block {
    float *k, *v;
    double *wide, *product, *weight;
};

static void proxy_add(const struct proxy_block *block, uint32_t d, size_t count, const double *covariance,
                      double *target) {
    for (size_t i = 0; i < count * d; i++)
        block->wide[i] = (double)block->k[i];
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)count, (int)d, (int)d, 1.0, block->wide, (int)d,
                covariance, (int)d, 0.0, block->product, (int)d);
    for (size_t i = 0; i < count; i++) {
        double weight = cblas_ddot((int)d, block->wide + i * d, 1, block->product + i * d, 1);
        block->weight[i] = sqrt(weight > 0 ? weight : 0);
    }
    covariance_add(target, d, block->v, block->weight, count, block->wide);
}

int value_target_proxy(const struct activations *activations, const struct layer_activations *layer, uint32_t kv_head,
                       const double *covariance, double *const target[2], struct oscar_cause *cause) {
    const uint32_t d = activations->head_dim;
    const uint32_t most = covariance_block_rows(d);
    const size_t elements = (size_t)most * d;
    _cleanup_free_ float *narrow = malloc(2 * elements * sizeof(*narrow));
    _cleanup_free_ double *wide = malloc((2 * elements + most) * sizeof(*wide));
    if (narrow == NULL || wide == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a block of rows");
    struct proxy_block block = {narrow, narrow + elements, wide, wide + elements, wide + 2 * elements};
    int r = 0;
    for (size_t i = 0; r == 0 && i < layer->sequences; i++) {
        const struct sequence *sequence = &layer->sequence[i];
        const uint64_t middle = sequence_held_out(sequence);
        for (uint64_t from = 0, count; r == 0 && from < sequence->tokens; from += count) {
            uint64_t end = from < middle ? middle : sequence->tokens;
            count = end - from < most ? end - from : most;
            r = activations_read(activations, layer, sequence, ACTIVATION_K, kv_head, from, count, block.k, d, cause);
            if (r == 0)
                r = activations_read(activations, layer, sequence, ACTIVATION_V, kv_head, from, count, block.v, d,
                                     cause);
            if (r == 0)
                proxy_add(&block, d, count, covariance, target[from < middle ? 0 : 1]);
        }
    }
    return r;
}
