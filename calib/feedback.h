/* SPDX-License-Identifier: Apache-2.0 */
/* The feedback factor of K: how the rounding error of one dimension is made good in the next ones. */
#ifndef OSCAR_CALIB_FEEDBACK_H
#define OSCAR_CALIB_FEEDBACK_H

#include <stdint.h>

#include "proto/cause.h"

/* L of Rᵀ C R + lambda * tr / d * I = L D Lᵀ, unit lower triangular, fp32; all [d][d]. Without any queries (C = 0) L is I.
 * OSCAR_ERR_CALIBRATION when the matrix is not positive definite. */
int feedback_factor(const double *covariance, const double *rotation, uint32_t d, double lambda, float *ret,
                    struct oscar_cause *cause);

#endif
