/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A worker's tensors without a model: the captured Q, K and V rows of a real one (format: calib/capture/README.md), position by
 * position, and the exact attention over them that every output is compared with. Needs nothing but the file, so that a
 * program on the public API alone can use it.
 */
#ifndef OSCAR_TESTS_SUPPORT_REPLAY_H
#define OSCAR_TESTS_SUPPORT_REPLAY_H

#include <stddef.h>
#include <stdint.h>

#include "oscar/geometry.h"

struct replay;

/* Loads a capture. 0 or a negative oscar error; `ret_why` (`size` bytes) then holds the reason. */
int replay_open(const char *path, struct replay **ret, char *ret_why, size_t size);
void replay_free(struct replay *replay); /* NULL is fine */

/* Another text from position `at` on: positions at, at + 1, .. take the tokens and rows of positions source, source + 1, .. with
 * Q and K turned to where they stand now (RoPE), so that two sessions share the first `at` tokens and go separate ways. The
 * replay then ends source - at tokens earlier. OSCAR_ERR_INVALID unless at < source < tokens, and before the first use of
 * replay_exact only. */
int replay_branch(struct replay *replay, uint32_t at, uint32_t source);

const struct oscar_geometry *replay_geometry(const struct replay *replay);
uint32_t replay_tokens(const struct replay *replay);
const uint32_t *replay_token_ids(const struct replay *replay);
const char *replay_model(const struct replay *replay); /* the model's name, for a report */
/* 32 bytes that name the weights, from the file's metadata. */
const uint8_t *replay_weights_digest(const struct replay *replay);

/* BF16 rows from `position` on: Q [tokens][query_heads][head_dim], K and V [tokens][kv_heads][head_dim]. */
const uint16_t *replay_q(const struct replay *replay, uint32_t layer, uint32_t position);
const uint16_t *replay_k(const struct replay *replay, uint32_t layer, uint32_t position);
const uint16_t *replay_v(const struct replay *replay, uint32_t layer, uint32_t position);

/* Causal attention of the query rows of one position over positions 0 .. position, in float64, scaled by 1/sqrt(head_dim):
 * ret_out [query_heads][head_dim]. */
void replay_exact(const struct replay *replay, uint32_t layer, uint32_t position, double *ret_out);

/* ||row - exact|| / ||exact|| of one BF16 output row of `dims` elements. */
double replay_relative_error(const uint16_t *row, const double *exact, uint32_t dims);

#endif
