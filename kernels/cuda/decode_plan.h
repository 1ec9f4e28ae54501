/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The plan of decode attention: which units each warp of the grid sums up. Plain C over plain structs; it touches no device. The
 * grid depends on the device and a batch's limits alone, the plan on its items, so that a graph stays valid when they
 * change. Units and segments: decode.cu.
 */
#ifndef OSCAR_KERNELS_CUDA_DECODE_PLAN_H
#define OSCAR_KERNELS_CUDA_DECODE_PLAN_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/cuda/decode_params.h"

struct cuda_decode_shape {
    uint32_t columns; /* of a segment: 4 or 8 */
    uint32_t warps;   /* of a block */
    uint32_t slices;  /* of a KV head */
    uint32_t blocks;
};

/* `rows`: the most that an item decoded here has; `group`: query heads a KV head. */
struct cuda_decode_shape cuda_decode_shape_of(uint32_t processors, uint32_t shared_bytes, uint32_t head_dim,
                                              uint32_t kv_heads, uint32_t group, uint32_t rows);

/* Bytes of a plan: the warps' starts, then the slices. */
static inline size_t cuda_decode_starts_bytes(const struct cuda_decode_shape *shape) {
    return (size_t)shape->slices * shape->warps * sizeof(struct cuda_decode_start);
}
static inline size_t cuda_decode_plan_bytes(const struct cuda_decode_shape *shape) {
    return cuda_decode_starts_bytes(shape) + shape->slices * sizeof(struct cuda_decode_slice);
}

/* Writes the plan of these items. Those of more than OSCAR_MAX_DECODE_ROWS rows are left out. */
void cuda_decode_plan(const struct cuda_decode_shape *shape, uint32_t group, const struct cuda_batch_item *item,
                      uint32_t items, void *ret_plan);

#endif
