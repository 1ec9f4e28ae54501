/* SPDX-License-Identifier: Apache-2.0 */
/* First and second moments of one KV head's rows, summed in fp64 in one pass over them. */
#ifndef OSCAR_CALIB_MOMENTS_H
#define OSCAR_CALIB_MOMENTS_H

#include "calib/activations.h"
#include "calib/rope.h"

struct moments {
    double *query;  /* [d][d], lower triangle until moments_finish(): sum of qᵀ q over the rows of the head's group */
    double *turned; /* [d]: sum of K as it is captured, after RoPE, of tokens outside the sink */
    double *unturned; /* [d]: the same before RoPE */
    uint64_t query_rows, tokens;
};

int moments_init(struct moments *moments, uint32_t d, struct oscar_cause *cause);
void moments_clear(struct moments *moments);

/* Takes in rows `from` to `to` of a sequence. OSCAR_ERR_NOT_FINITE. */
int moments_add(struct moments *moments, const struct activations *activations, const struct rope *rope,
                const struct layer_activations *layer, const struct sequence *sequence, uint32_t kv_head, uint64_t from,
                uint64_t to, struct oscar_cause *cause);
/* sum += other */
void moments_join(struct moments *sum, const struct moments *other, uint32_t d);

/* target (lower triangle) += weight_i² x_iᵀ x_i over `count` rows, weights NULL: 1; `block` has room for count * d doubles. */
void covariance_add(double *target, uint32_t d, const float *rows, const double *weights, size_t count, double *block);
/* The same of rows that are fp64 already. */
void covariance_add_wide(double *target, uint32_t d, const double *rows, size_t count);
/* Copies the lower triangle to the upper one and multiplies by `factor`. */
void covariance_finish(double *target, uint32_t d, double factor);

/* Rows that a pass takes at a time: in fp64 they stay in a level-2 cache. */
uint32_t covariance_block_rows(uint32_t d);

#endif
