/* SPDX-License-Identifier: Apache-2.0 */
#include "calib/head_rows.h"

#include <stdlib.h>

#include "proto/cleanup.h"

#define PROBE_ELEMENTS (UINT32_C(1) << 22) /* of one of a probe's four matrices */

uint64_t sequence_held_out(const struct sequence *sequence) { return sequence->tokens - sequence->tokens / 4; }

uint32_t spread_queries(uint32_t from, uint32_t to, uint32_t most, uint32_t *ret) {
    uint64_t rows = to - from;
    uint32_t count = rows < most ? (uint32_t)rows : most;
    for (uint64_t i = 0; i < count; i++)
        ret[i] = from + (uint32_t)((2 * i + 1) * rows / (2 * (uint64_t)count));
    return count;
}

void head_rows_clear(struct head_rows *rows) {
    free(rows->k);
    free(rows->k_wide);
    *rows = (struct head_rows){0};
}

int head_rows_read(const struct activations *activations, const struct layer_activations *layer,
                   const struct sequence *sequence, uint32_t kv_head, struct head_rows *ret,
                   struct oscar_cause *cause) {
    const uint32_t d = activations->head_dim;
    const size_t elements = (size_t)sequence->tokens * d;
    struct head_rows rows = {.activations = activations,
                             .layer = layer,
                             .sequence = sequence,
                             .kv_head = kv_head,
                             .group = activations->query_heads / activations->kv_heads};
    rows.k = malloc(2 * elements * sizeof(*rows.k));
    rows.k_wide = malloc(2 * elements * sizeof(*rows.k_wide));
    if (rows.k == NULL || rows.k_wide == NULL) {
        head_rows_clear(&rows);
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the rows of a head");
    }
    rows.v = rows.k + elements;
    rows.v_wide = rows.k_wide + elements;
    int r =
        activations_read(activations, layer, sequence, ACTIVATION_K, kv_head, 0, sequence->tokens, rows.k, d, cause);
    if (r == 0)
        r = activations_read(activations, layer, sequence, ACTIVATION_V, kv_head, 0, sequence->tokens, rows.v, d,
                             cause);
    if (r < 0) {
        head_rows_clear(&rows);
        return r;
    }
    for (size_t i = 0; i < 2 * elements; i++)
        rows.k_wide[i] = (double)rows.k[i];
    rows.rows = (struct attention_rows){.first_position = sequence->first_position,
                                        .tokens = (uint32_t)sequence->tokens,
                                        .d = d,
                                        .k = rows.k_wide,
                                        .v = rows.v_wide};
    *ret = rows;
    return 0;
}

uint32_t head_rows_queries(const struct head_rows *rows, uint32_t keys) {
    uint32_t queries = PROBE_ELEMENTS / keys / rows->group;
    return queries > 0 ? queries : 1;
}

int head_rows_probe(const struct head_rows *rows, const uint32_t *at, uint32_t queries, double softmax_scale,
                    struct attention_probe *ret, struct oscar_cause *cause) {
    const uint32_t d = rows->rows.d;
    const size_t stride = (size_t)rows->group * d;
    _cleanup_free_ float *q = malloc(queries * stride * sizeof(*q));
    if (q == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the queries of a head");
    int r = 0;
    for (uint32_t i = 0; r == 0 && i < queries; i++)
        for (uint32_t g = 0; r == 0 && g < rows->group; g++)
            r = activations_read(rows->activations, rows->layer, rows->sequence, ACTIVATION_Q,
                                 rows->kv_head * rows->group + g, at[i], 1, q + i * stride + (size_t)g * d, d, cause);
    return r < 0 ? r : attention_probe(&rows->rows, at, queries, rows->group, q, softmax_scale, ret, cause);
}
