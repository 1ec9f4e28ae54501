/* SPDX-License-Identifier: Apache-2.0 */
/* Names of this level's functions, for the sources that are built once a level. */
#ifndef OSCAR_KERNELS_HOST_LEVEL_FUNCTIONS_H
#define OSCAR_KERNELS_HOST_LEVEL_FUNCTIONS_H

#include "kernels/host/lanes.h"
#include "kernels/host/level_code.h"

extern const struct host_level_code HOST_NAME(host_code);

void HOST_NAME(level_rotate)(const float *matrix, uint32_t d, bool back, uint32_t rows, const float *x, size_t x_stride,
                             float *y, size_t y_stride);
bool HOST_NAME(level_store)(const struct host_store_rows *rows);
bool HOST_NAME(level_inspect)(const uint16_t *from, size_t elements);
size_t HOST_NAME(level_pack_scratch_bytes)(void);
void HOST_NAME(level_pack_begin)(struct host_pack_scratch *scratch, const struct oscar_calibration *calibration,
                                 const struct oscar_head_calibration *head);
bool HOST_NAME(level_pack)(struct host_pack_scratch *scratch, const uint8_t *dense_record, uint64_t position,
                           uint8_t *packed_record);

#endif
