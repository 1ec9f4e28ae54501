/* SPDX-License-Identifier: Apache-2.0 */
/* What each level has code for: one table of functions a level, filled in by the level sources. */
#ifndef OSCAR_KERNELS_HOST_LEVEL_CODE_H
#define OSCAR_KERNELS_HOST_LEVEL_CODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "oscar/device.h"

#include "kernels/host/level.h"

/* One head's rows of K or V on their way into a page. */
struct host_store_rows {
    const uint16_t *from; /* element (row, dim) at from[row * from_stride + dim] */
    int64_t from_stride;
    uint16_t *to; /* BF16, d elements a row, rows adjacent */
    uint32_t rows;
    uint32_t d;
    uint32_t dtype;      /* of `from`, enum oscar_dtype */
    const float *matrix; /* NULL: Hadamard */
};

#define HOST_STORE_MAX_ROWS OSCAR_PAGE_TOKENS

struct host_pack_scratch; /* level_pack.c's; host_level_code.pack_scratch_bytes() bytes, 64-byte aligned */

struct host_level_code {
    /* As oscar_rotate(). */
    void (*rotate)(const float *matrix, uint32_t d, bool back, uint32_t rows, const float *x, size_t x_stride, float *y,
                   size_t y_stride);
    /* False when a stored element is NaN or beyond OSCAR_MAX_ROW_MAGNITUDE. */
    bool (*store)(const struct host_store_rows *rows);
    /* The same check of `elements` BF16 elements (a multiple of 64) of a dense page. */
    bool (*inspect)(const uint16_t *from, size_t elements);

    size_t (*pack_scratch_bytes)(void);
    /* Takes up a head: what follows packs pages of it. */
    void (*pack_begin)(struct host_pack_scratch *scratch, const struct oscar_calibration *calibration,
                       const struct oscar_head_calibration *head);
    /* One page's record. False when a row is not finite; the record is then undefined. */
    bool (*pack)(struct host_pack_scratch *scratch, const uint8_t *dense_record, uint64_t position,
                 uint8_t *packed_record);
};

const struct host_level_code *host_level_code(enum host_level level);

#endif
