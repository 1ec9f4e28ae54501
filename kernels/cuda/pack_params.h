/* SPDX-License-Identifier: Apache-2.0 */
/* What pack.c hands to the kernels of pack.cu: plain C, read by both compilers. */
#ifndef OSCAR_KERNELS_CUDA_PACK_PARAMS_H
#define OSCAR_KERNELS_CUDA_PACK_PARAMS_H

#include "kernels/cuda/layout.h"

#define CUDA_PACK_ITEMS 128 /* pages of one launch: kernel parameters end at 4 KB */

struct cuda_pack_params {
    struct cuda_calibration_view calibration;
    int32_t *status; /* a word an item, zero before */
    uint32_t items;
    uint32_t page[CUDA_PACK_ITEMS]; /* position / 64 */
    const uint8_t *dense[CUDA_PACK_ITEMS];
    uint8_t *packed[CUDA_PACK_ITEMS];
};

/* The kernels, by head size (64, 128, 256), and how they are launched. A record is layer * kv_heads + head. */

/* pack_plain_D: rows that are coded as they lie. Grid (records, items, sides); sides 1: V; 2: V, and K of the heads
 * without a centre and without feedback. */
#define CUDA_PACK_PLAIN_THREADS(d) ((d) <= 128 ? 64 : 128)
#define CUDA_PACK_PLAIN_SHARED(d) (64 * (2 * (d) + 16))

/* pack_shaped_D: K of the heads with a centre or feedback. Grid (items, records), D threads. */
#define CUDA_PACK_SHAPED_THREADS(d) (d)
#define CUDA_PACK_SHAPED_SHARED(d) (4 * (64 * (d) + 3 * 8 * (d) + 64 * ((d) / 16) + 4 * 64))

#endif
