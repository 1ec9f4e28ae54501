/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/rotate.h"

#include "kernels/host/level_code.h"

void oscar_rotate(enum host_level level, const float *matrix, uint32_t d, bool back, uint32_t rows, const float *x,
                  size_t x_stride, float *y, size_t y_stride) {
    host_level_code(level)->rotate(matrix, d, back, rows, x, x_stride, y, y_stride);
}
