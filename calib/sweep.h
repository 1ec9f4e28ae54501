/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which rank to clip at, and how good a kind of rotation is: by the attention output's error at held-out queries. K's
 * rank is chosen by the errors of all rows in the metric of the feedback, which is of more queries than are measured.
 */
#ifndef OSCAR_CALIB_SWEEP_H
#define OSCAR_CALIB_SWEEP_H

#include "calib/fit_layer.h"

/* The rank that a ratio of the head size means. */
uint32_t sweep_rank(double ratio, uint32_t d);

/* Fills in ranks, one a head and side, and errors of each kind of `fit`, whose other parts do not know the held-out
 * tokens. `metric` [kv_heads][d][d] is of K's errors. With ranks given and one kind nothing is measured.
 * OSCAR_ERR_INVALID when no sequence is long enough. */
int sweep_layer(const struct layer_fitter *fitter, const struct layer_activations *layer, const double *metric,
                struct layer_fit *fit, struct oscar_cause *cause);

#endif
