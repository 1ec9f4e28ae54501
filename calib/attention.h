/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Causal attention of chosen queries over one KV head's rows in fp64, and what it makes of other K and V rows in the places
 * that the product packs: page-wise all but the sink (positions 0..63) and the last 256 tokens of each query.
 */
#ifndef OSCAR_CALIB_ATTENTION_H
#define OSCAR_CALIB_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

#include "proto/cause.h"

/* One KV head's rows of one sequence. */
struct attention_rows {
    uint64_t first_position;
    uint32_t tokens, d;
    const double *k, *v; /* [tokens][d] */
};

struct attention_probe {
    uint32_t rows;          /* queries * group */
    uint32_t keys;          /* that the last of the queries sees */
    uint32_t packed_begin;  /* row of the first token that can be packed */
    uint32_t packed_most;   /* row after the last token that is packed for some query; packed_begin: none */
    uint32_t *end;          /* [rows]: keys that a query sees */
    uint32_t *packed_end;   /* [rows]: row after the last token that is packed for it */
    double *q;              /* [rows][d], scaled */
    double *logits;         /* [rows][keys] */
    double *weights;        /* [rows][keys], 0 from `end` on */
    double *output;         /* [rows][d] */
    double *whole;          /* [rows]: logarithm of the sum of the logits' exponentials */
    double *other, *packed; /* [rows][keys], to work in */
    double *other_output;   /* [rows][d] */
};

/* Row of the first token of a sequence that can be packed: page-aligned and outside the sink; and for a query at row `row`, the
 * row after the last one. */
uint32_t attention_packed_begin(uint64_t first_position);
uint32_t attention_packed_end(uint64_t first_position, uint32_t row);

/* `at` [queries] are rows of the sequence, ascending; q [queries][group][d], unscaled. */
int attention_probe(const struct attention_rows *rows, const uint32_t *at, uint32_t queries, uint32_t group,
                    const float *q, double softmax_scale, struct attention_probe *ret, struct oscar_cause *cause);
void attention_probe_clear(struct attention_probe *probe);

/* Other rows, [tokens][d] each, in the captured rows' place. Packed NULL: nothing is packed, all is dense; dense NULL: as captured. */
struct attention_change {
    const double *k_packed, *k_dense, *v_packed, *v_dense;
};

struct attention_error {
    double logit, logits;       /* squares of the error of packed tokens' logits, their number */
    double output, output_norm; /* squares of the output's error and of the output */
    double divergence, queries; /* KL of the distribution from the captured one's in nats, number of queries */
};

/* Adds what the change does to *sum. */
void attention_measure(const struct attention_rows *rows, struct attention_probe *probe,
                       const struct attention_change *change, struct attention_error *sum);
void attention_error_add(struct attention_error *sum, const struct attention_error *other);

#endif
