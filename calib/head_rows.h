/* SPDX-License-Identifier: Apache-2.0 */
/* One KV head's rows of one sequence in memory, and queries of its group at chosen places. */
#ifndef OSCAR_CALIB_HEAD_ROWS_H
#define OSCAR_CALIB_HEAD_ROWS_H

#include "calib/activations.h"
#include "calib/attention.h"

struct head_rows {
    struct attention_rows rows;
    float *k, *v; /* as captured */
    double *k_wide, *v_wide;
    const struct activations *activations;
    const struct layer_activations *layer;
    const struct sequence *sequence;
    uint32_t kv_head, group;
};

int head_rows_read(const struct activations *activations, const struct layer_activations *layer,
                   const struct sequence *sequence, uint32_t kv_head, struct head_rows *ret, struct oscar_cause *cause);
void head_rows_clear(struct head_rows *rows);

/* The attention of the queries at rows `at` [queries], ascending, of all heads of the group. */
int head_rows_probe(const struct head_rows *rows, const uint32_t *at, uint32_t queries, double softmax_scale,
                    struct attention_probe *ret, struct oscar_cause *cause);
/* Queries that one probe over `keys` keys may have, so that it stays in a hundred MB. At least 1. */
uint32_t head_rows_queries(const struct head_rows *rows, uint32_t keys);

/* The first row of the quarter of a sequence that is held out of a fit. */
uint64_t sequence_held_out(const struct sequence *sequence);
/* At most `most` rows of `from` .. `to` - 1, evenly spread, ascending; returns their number. */
uint32_t spread_queries(uint32_t from, uint32_t to, uint32_t most, uint32_t *ret);

#endif
