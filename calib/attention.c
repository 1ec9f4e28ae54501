/* SPDX-License-Identifier: Apache-2.0 */
#include "calib/attention.h"

#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "oscar/geometry.h"

uint32_t attention_packed_begin(uint64_t first_position) {
    uint64_t position = first_position < OSCAR_SINK_TOKENS ? OSCAR_SINK_TOKENS : first_position;
    position = (position + OSCAR_PAGE_TOKENS - 1) / OSCAR_PAGE_TOKENS * OSCAR_PAGE_TOKENS;
    return (uint32_t)(position - first_position);
}

uint32_t attention_packed_end(uint64_t first_position, uint32_t row) {
    uint32_t begin = attention_packed_begin(first_position);
    uint64_t tokens = first_position + row + 1;
    if (tokens < OSCAR_RECENT_TOKENS)
        return begin;
    uint64_t position = (tokens - OSCAR_RECENT_TOKENS) / OSCAR_PAGE_TOKENS * OSCAR_PAGE_TOKENS;
    return position > first_position + begin ? (uint32_t)(position - first_position) : begin;
}

void attention_probe_clear(struct attention_probe *probe) {
    free(probe->end);
    free(probe->q);
    *probe = (struct attention_probe){0};
}

/* rows of x [n][d] times the rows of y [m][d]: ret[n][stride] */
static void products(const double *x, uint32_t n, const double *y, uint32_t m, uint32_t d, double *ret, size_t stride) {
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)n, (int)m, (int)d, 1.0, x, (int)d, y, (int)d, 0.0, ret,
                (int)stride);
}

/* ret [n][d] = factor * ret + weights [n][m] (a stride apart) times values [m][d] */
static void weigh(const double *weights, size_t stride, uint32_t n, uint32_t m, const double *values, uint32_t d,
                  double factor, double *ret) {
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)n, (int)d, (int)m, 1.0, weights, (int)stride, values,
                (int)d, factor, ret, (int)d);
}

/* Logits become weights; returns the logarithm of the sum of their exponentials. `to` may be `logits`. */
static double softmax(const double *logits, uint32_t end, uint32_t keys, double *to) {
    double most = logits[0];
    for (uint32_t i = 1; i < end; i++)
        most = logits[i] > most ? logits[i] : most;
    double sum = 0;
    for (uint32_t i = 0; i < end; i++) {
        to[i] = exp(logits[i] - most);
        sum += to[i];
    }
    for (uint32_t i = 0; i < end; i++)
        to[i] /= sum;
    memset(to + end, 0, (keys - end) * sizeof(*to));
    return most + log(sum);
}

static int allocate(struct attention_probe *probe, uint32_t d, struct oscar_cause *cause) {
    size_t rows = probe->rows;
    probe->end = malloc(2 * rows * sizeof(*probe->end));
    probe->q = calloc(rows, ((size_t)4 * probe->keys + (size_t)3 * d + 1) * sizeof(*probe->q));
    if (probe->end == NULL || probe->q == NULL) {
        attention_probe_clear(probe);
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the attention of %zu queries", rows);
    }
    probe->packed_end = probe->end + rows;
    probe->output = probe->q + rows * d;
    probe->other_output = probe->output + rows * d;
    probe->logits = probe->other_output + rows * d;
    probe->weights = probe->logits + rows * probe->keys;
    probe->other = probe->weights + rows * probe->keys;
    probe->packed = probe->other + rows * probe->keys;
    probe->whole = probe->packed + rows * probe->keys;
    return 0;
}

int attention_probe(const struct attention_rows *rows, const uint32_t *at, uint32_t queries, uint32_t group,
                    const float *q, double softmax_scale, struct attention_probe *ret, struct oscar_cause *cause) {
    struct attention_probe probe = {
        .rows = queries * group,
        .keys = at[queries - 1] + 1,
        .packed_begin = attention_packed_begin(rows->first_position),
        .packed_most = attention_packed_end(rows->first_position, at[queries - 1]),
    };
    int r = allocate(&probe, rows->d, cause);
    if (r < 0)
        return r;
    for (uint32_t i = 0; i < probe.rows; i++) {
        probe.end[i] = at[i / group] + 1;
        probe.packed_end[i] = attention_packed_end(rows->first_position, at[i / group]);
    }
    for (size_t i = 0; i < (size_t)probe.rows * rows->d; i++)
        probe.q[i] = softmax_scale * (double)q[i];
    products(probe.q, probe.rows, rows->k, probe.keys, rows->d, probe.logits, probe.keys);
    for (size_t i = 0; i < probe.rows; i++)
        probe.whole[i] =
            softmax(probe.logits + i * probe.keys, probe.end[i], probe.keys, probe.weights + i * probe.keys);
    weigh(probe.weights, probe.keys, probe.rows, probe.keys, rows->v, rows->d, 0.0, probe.output);
    *ret = probe;
    return 0;
}

/* probe->other becomes the weights of the changed K. */
static void measure_k(const struct attention_rows *rows, struct attention_probe *probe,
                      const struct attention_change *change, struct attention_error *sum) {
    const size_t keys = probe->keys;
    const uint32_t begin = probe->packed_begin;
    if (change->k_dense != NULL)
        products(probe->q, probe->rows, change->k_dense, probe->keys, rows->d, probe->other, keys);
    else
        memcpy(probe->other, probe->logits, probe->rows * keys * sizeof(*probe->other));
    if (change->k_packed != NULL && probe->packed_most > begin)
        products(probe->q, probe->rows, change->k_packed + (size_t)begin * rows->d, probe->packed_most - begin, rows->d,
                 probe->packed + begin, keys);
    for (uint32_t i = 0; i < probe->rows; i++) {
        const double *logits = probe->logits + i * keys;
        const double *weights = probe->weights + i * keys;
        double *other = probe->other + i * keys;
        if (change->k_packed != NULL && probe->packed_end[i] > begin)
            memcpy(other + begin, probe->packed + i * keys + begin, (probe->packed_end[i] - begin) * sizeof(*other));
        for (uint32_t j = begin; j < probe->packed_end[i]; j++)
            sum->logit += (other[j] - logits[j]) * (other[j] - logits[j]);
        sum->logits += probe->packed_end[i] - begin;
        /* KL = sum p (log p - log p'), and log p = logit - the logarithm of the sum. */
        double mean = 0;
        for (uint32_t j = 0; j < probe->end[i]; j++)
            mean += weights[j] * (logits[j] - other[j]);
        sum->divergence += mean + softmax(other, probe->end[i], probe->keys, other) - probe->whole[i];
    }
    sum->queries += probe->rows;
}

void attention_measure(const struct attention_rows *rows, struct attention_probe *probe,
                       const struct attention_change *change, struct attention_error *sum) {
    const size_t keys = probe->keys;
    const uint32_t d = rows->d;
    const uint32_t begin = probe->packed_begin;
    if (change->k_packed != NULL || change->k_dense != NULL)
        measure_k(rows, probe, change, sum);
    else
        memcpy(probe->other, probe->weights, probe->rows * keys * sizeof(*probe->other));
    double add = 0.0;
    if (change->v_packed != NULL && probe->packed_most > begin) {
        /* The weights of packed tokens go over to a matrix of their own. */
        const size_t width = probe->packed_most - begin;
        for (uint32_t i = 0; i < probe->rows; i++) {
            double *from = probe->other + i * keys + begin;
            double *to = probe->packed + i * keys + begin;
            size_t count = probe->packed_end[i] - begin;
            memcpy(to, from, count * sizeof(*to));
            memset(to + count, 0, (width - count) * sizeof(*to));
            memset(from, 0, count * sizeof(*from));
        }
        weigh(probe->packed + begin, keys, probe->rows, (uint32_t)width, change->v_packed + (size_t)begin * d, d, 0.0,
              probe->other_output);
        add = 1.0;
    }
    weigh(probe->other, keys, probe->rows, probe->keys, change->v_dense != NULL ? change->v_dense : rows->v, d, add,
          probe->other_output);
    for (size_t i = 0; i < (size_t)probe->rows * d; i++) {
        double error = probe->other_output[i] - probe->output[i];
        sum->output += error * error;
        sum->output_norm += probe->output[i] * probe->output[i];
    }
}

void attention_error_add(struct attention_error *sum, const struct attention_error *other) {
    sum->logit += other->logit;
    sum->logits += other->logits;
    sum->output += other->output;
    sum->output_norm += other->output_norm;
    sum->divergence += other->divergence;
    sum->queries += other->queries;
}
