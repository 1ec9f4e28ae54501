/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rotation of rows: y = x R, or back: y = x Rᵀ (R is orthogonal). The order of every sum is fixed here, so that each level
 * of the host backend gives the same bits:
 *
 *   matrix, forward   y_j starts at 0 and takes fma(x_i, R[i][j], y_j) for i = 0 .. d-1
 *   matrix, back      16 sums a_l start at 0; a_l takes fma(x_j, R[i][j], a_l) for j = l, l+16, ..; then
 *                     a_l += a_(l+8) (l < 8), a_l += a_(l+4) (l < 4), a_l += a_(l+2), a_l += a_(l+1); y_i = a_0
 *   Hadamard          stages h = 1, 2, 4, .. d/2 of (a, b) -> (a + b, a - b) over elements h apart, then one
 *                     multiplication by (float)(1 / sqrt(d)); forward and back are the same
 */
#ifndef OSCAR_KERNELS_ROTATE_H
#define OSCAR_KERNELS_ROTATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/host/level.h"

/* `rows` rows of d = 64, 128 or 256 floats, `x_stride` and `y_stride` floats from row to row; x == y with equal strides is
 * allowed. `matrix` [d][d] row-major (any alignment of a float), or NULL for the normalised Sylvester Hadamard matrix. */
void oscar_rotate(enum host_level level, const float *matrix, uint32_t d, bool back, uint32_t rows, const float *x,
                  size_t x_stride, float *y, size_t y_stride);

#endif
