/* SPDX-License-Identifier: Apache-2.0 */
/* Rotations R of rows, x' = x R, d by d, row-major. */
#ifndef OSCAR_CALIB_ROTATION_H
#define OSCAR_CALIB_ROTATION_H

#include <stdint.h>

#include "proto/cause.h"

/* The normalised Sylvester Hadamard matrix. */
void rotation_hadamard(uint32_t d, double *ret);

/*
 * R = U H P of the published method: the columns of U are the eigenvectors of the symmetric `target`, by falling eigenvalue
 * and with their largest element positive; H spreads each over all columns; P orders the columns by bit reversal. Rounded to
 * fp32, as the file holds it. `ret_eigenvalues` [d], falling. OSCAR_ERR_CALIBRATION when the target has no decomposition.
 */
int rotation_from_target(const double *target, uint32_t d, float *ret, double *ret_eigenvalues,
                         struct oscar_cause *cause);

/* Eigenvalues of a symmetric matrix that count beside the largest: below 1e-10 of it they are rounding. */
uint32_t rotation_rank(const double *eigenvalues, uint32_t d);

/* Eigenvalues alone, falling. */
int rotation_eigenvalues(const double *target, uint32_t d, double *ret, struct oscar_cause *cause);

#endif
