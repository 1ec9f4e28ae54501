/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the product makes of one KV head's rows: rotated in fp32, rounded to BF16, packed page by page by the host backend's
 * own code (the bytes of kernels/codec.h), read and turned back. Results are rows in the captured rows' space.
 */
#ifndef OSCAR_CALIB_QUANTISE_H
#define OSCAR_CALIB_QUANTISE_H

#include <stdint.h>

#include "proto/calibration.h"

struct quantiser;

/* For the rows of one sequence, [tokens][d] each. `calibration` gives head size and turn tables (attached, for the whole
 * sequence), `head` all else; both must live on, and `head`'s ranks may be changed between calls. */
int quantiser_new(const struct oscar_calibration *calibration, const struct oscar_head_calibration *head,
                  uint64_t first_position, uint32_t tokens, const float *k, const float *v, struct quantiser **ret,
                  struct oscar_cause *cause);
void quantiser_free(struct quantiser *quantiser); /* NULL is fine */
void quantiser_cleanup(struct quantiser **quantiser);

/* Rows as dense pages hold them, [tokens][d]. */
void quantiser_dense(struct quantiser *quantiser, double *ret_k, double *ret_v);
/* Rows of all pages that can be packed, at their places in [tokens][d]; other rows are left as they are.
 * OSCAR_ERR_NOT_FINITE when the page does not pack. */
int quantiser_packed(struct quantiser *quantiser, double *ret_k, double *ret_v, struct oscar_cause *cause);

#endif
