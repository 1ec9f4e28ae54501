/* SPDX-License-Identifier: Apache-2.0 */
/* Built once a level: rows of a worker to rotated BF16 rows of a page, and the check of what a page holds. */
#include "kernels/host/level_functions.h"

#define MAX_DIM 256U
#define BLOCK_ROWS 8U

/* Magnitude bits of a BF16 element compare as the magnitudes do, and NaN and Inf are above every limit. */
LANES_INLINE bool in_range(vi greatest_bf16) {
    return (uint32_t)vi_reduce_max(greatest_bf16) << 16 <= oscar_float_bits(OSCAR_MAX_ROW_MAGNITUDE);
}

bool HOST_NAME(level_store)(const struct host_store_rows *rows) {
    float x[BLOCK_ROWS * MAX_DIM] __attribute__((aligned(64)));
    uint32_t d = rows->d;
    vi greatest = vi_set(0);
    for (uint32_t first = 0; first < rows->rows; first += BLOCK_ROWS) {
        uint32_t count = rows->rows - first < BLOCK_ROWS ? rows->rows - first : BLOCK_ROWS;
        for (uint32_t r = 0; r < count; r++) {
            const uint16_t *from = rows->from + (int64_t)(first + r) * rows->from_stride;
            if (rows->dtype == OSCAR_BF16)
                for (uint32_t j = 0; j < d; j += LANES)
                    vf_store(x + (size_t)r * MAX_DIM + j, vf_from_bf16(from + j));
            else
                for (uint32_t j = 0; j < d; j += LANES)
                    vf_store(x + (size_t)r * MAX_DIM + j, vf_from_fp16(from + j));
        }
        HOST_NAME(level_rotate)(rows->matrix, d, false, count, x, MAX_DIM, x, MAX_DIM);
        for (uint32_t r = 0; r < count; r++) {
            uint16_t *to = rows->to + (size_t)(first + r) * d;
            for (uint32_t j = 0; j < d; j += LANES) {
                vi bits = vf_to_bf16_bits(vf_load(x + (size_t)r * MAX_DIM + j));
                greatest = vi_max(greatest, bits & 0x7FFF);
                vi_store_u16(to + j, bits);
            }
        }
    }
    return in_range(greatest);
}

bool HOST_NAME(level_inspect)(const uint16_t *from, size_t elements) {
    vi greatest = vi_set(0);
    /* Two elements a lane: magnitudes are below 2^15, so a signed maximum of the upper one is not disturbed by the lower. */
    vi greatest_upper = vi_set(0);
    for (size_t i = 0; i < elements; i += (size_t)2 * LANES) {
        vi pair = vi_load(from + i);
        greatest = vi_max(greatest, pair & 0x7FFF);
        greatest_upper = vi_max(greatest_upper, pair & 0x7FFF0000);
    }
    return in_range(vi_max(greatest, greatest_upper >> 16));
}
