/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The codec of one row (one token, one KV head, K or V) in plain C: the oracle that every path equals to the bit.
 * Formulas: proto/CALIBRATION.md. fp32, IEEE division, no contraction except where fma is written.
 */
#ifndef OSCAR_KERNELS_CODEC_H
#define OSCAR_KERNELS_CODEC_H

#include <stdint.h>

#include "proto/calibration.h"

struct oscar_row_scale {
    uint16_t scale, zero; /* IEEE binary16 bits */
};

/* c'(position) of K, d values; zeros when the head has no centre. */
void oscar_codec_centre(const struct oscar_calibration *calibration, const struct oscar_head_calibration *head,
                        uint64_t position, float *ret_centre);

/* x: the row with its centre taken out, d values. `feedback` NULL: nearest rounding. codes: d bytes 0..3.
 * OSCAR_ERR_NOT_FINITE when x holds NaN or Inf or the scale overflows binary16 (outputs untouched). */
int oscar_codec_row(const float *x, uint32_t d, uint32_t rank, const float *feedback, struct oscar_row_scale *ret_scale,
                    uint8_t *ret_codes);

#endif
