/* SPDX-License-Identifier: Apache-2.0 */
/* The centre of K of one head: a mean that turns with RoPE in some pairs, and stands still in the other dimensions. */
#ifndef OSCAR_CALIB_CENTRE_H
#define OSCAR_CALIB_CENTRE_H

#include "calib/moments.h"
#include "calib/rope.h"
#include "proto/calibration.h"

/* Pairs whose turning mean takes more energy out of K than a constant does, the most gainful first, at most `most` of them.
 * Returns their number. */
uint32_t centre_choose(const struct moments *moments, const struct rope *rope, uint32_t most,
                       int32_t ret[OSCAR_MAX_PAIRS]);

/*
 * The centre's rows in the space of `rotation` [d][d]: ret_static [d], ret_cos and ret_sin [pairs][d]. Of `pair` [pairs] the
 * first `turning` turn; the rest only fill up, by rows of zeros, to the number that the layer's heads share.
 */
int centre_make(const struct moments *moments, const struct rope *rope, const int32_t *pair, uint32_t turning,
                uint32_t pairs, uint32_t d, const double *rotation, float *ret_static, float *ret_cos, float *ret_sin,
                struct oscar_cause *cause);

/* Adds to `pair`, of which `count` are there, pairs that are not in it yet until there are `wanted`. */
void centre_fill(int32_t *pair, uint32_t count, uint32_t wanted);

#endif
