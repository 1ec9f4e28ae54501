/* SPDX-License-Identifier: Apache-2.0 */
/* The plan and the parameters of the kernels in decode.cu: plain C, the same bytes for gcc and nvcc. Pointers are device
 * addresses. decode.cu says what the words mean. */
#ifndef OSCAR_KERNELS_CUDA_DECODE_PARAMS_H
#define OSCAR_KERNELS_CUDA_DECODE_PARAMS_H

#include "kernels/cuda/layout.h"

#define CUDA_DECODE_TILE 8       /* tokens of a unit of a dense page */
#define CUDA_DECODE_MAX_WARPS 12 /* of a block; two parts each are looked at by a lane each */
/* Of a block; d = head size: the fewer, the more registers each has, and the less is on its way from memory. */
#define CUDA_DECODE_WARPS(d) ((d) == 256 ? 8U : 12U)
#define CUDA_DECODE_SLOTS 3U       /* of a warp: two take units in turn, one waits until one of them is parked in */
#define CUDA_DECODE_MAX_SLICES 256 /* of a KV head */
#define CUDA_DECODE_MOST_COLUMNS 8 /* of a segment */
#define CUDA_DECODE_MOST_QUERIES 2
#define CUDA_DECODE_QUERIES(c) ((c) == 4 ? 2U : 1U) /* segments whose queries a block prepares together */

/* Where a warp's units begin, and how many they are. */
struct cuda_decode_start {
    uint32_t item, block; /* the segment */
    uint32_t unit, units;
};

/* A segment whose query a block prepares, with all that is to know to read it: what would be read first is far away. */
struct cuda_decode_query {
    uint32_t item, block; /* item CUDA_DECODE_NO_ITEM: there is none */
    uint32_t columns;     /* that query rows stand for */
    uint32_t padding;
    int64_t head_stride; /* of q, in elements */
    /* Where the columns of KV head 0 begin in q, in elements; behind the last one, that again. */
    int64_t column[CUDA_DECODE_MOST_COLUMNS];
};
#define CUDA_DECODE_NO_ITEM 0xFFFFFFFFU

struct cuda_decode_slice {
    uint32_t first_from, first_to, last_from,
        last_to; /* slices over which the segments of its first and last unit extend */
    struct cuda_decode_query query[CUDA_DECODE_MOST_QUERIES]; /* the segments with which most of its warps begin */
};

struct cuda_decode_params {
    struct cuda_batch_view batch;
    const struct cuda_decode_start *starts; /* [slices][warps] */
    const struct cuda_decode_slice *slices; /* [slices] */
    const struct cuda_head *heads;          /* of the layer: [kv_heads] */
    const float *page_turn;                 /* of the calibration */
    uint64_t q, out;                        /* addresses; 0: offsets count from there */
    uint64_t lse;                           /* address; unused where has_lse is 0 */
    float *partials;          /* [kv_heads][slices][2][columns]{o [d], m, l, padding to a multiple of 4} */
    uint32_t *arrivals;       /* [kv_heads][slices][columns], zero between launches */
    uint32_t first_record;    /* of the layer in a page */
    uint32_t kv_heads, group; /* group: query heads a KV head */
    uint32_t slice_count;     /* of a KV head */
    uint32_t frequencies;
    uint32_t fp16; /* q and out are FP16, else BF16 */
    uint32_t has_lse;
    float scale; /* of the softmax, times log2(e) */
};

/* Bytes of shared memory; d = head size, c = columns, p = pairs that the kernel is made for. */
#define CUDA_DECODE_SLOT_BYTES(d) (32U * (d) + 512U)
#define CUDA_DECODE_SLOT_PITCH(d) (CUDA_DECODE_SLOT_BYTES(d) + 16U) /* with its barrier and tag */
#define CUDA_DECODE_QUERY_BYTES(d, c, p) (2U * (c) * (d) + 12U * (c) + 8U * (c) * (p))
#define CUDA_DECODE_ROTATED_BYTES(d, c) (4U * (c) * (d)) /* of a query's columns */
#define CUDA_DECODE_TABLE_BYTES(p) (256U * (p))
#define CUDA_DECODE_NOTES_BYTES 64U       /* of a warp */
#define CUDA_DECODE_BLOCK_NOTES_BYTES 96U /* of a block */
#define CUDA_DECODE_SHARED_BYTES(d, c, p, warps)                                                                       \
    ((warps)*CUDA_DECODE_SLOTS * CUDA_DECODE_SLOT_PITCH(d) + CUDA_DECODE_TABLE_BYTES(p) +                              \
     CUDA_DECODE_QUERIES(c) * (CUDA_DECODE_QUERY_BYTES(d, c, p) + CUDA_DECODE_ROTATED_BYTES(d, c)) +                   \
     CUDA_DECODE_MAX_WARPS * CUDA_DECODE_NOTES_BYTES + CUDA_DECODE_BLOCK_NOTES_BYTES)

/* Floats of one column's partial result. */
#define CUDA_DECODE_PARTIAL_FLOATS(d) ((d) + 4U)

#define CUDA_MERGE_THREADS 256
#define CUDA_MERGE_MAX_HEADS (256U * 64U)

struct cuda_merge_params {
    uint64_t out, other_out;
    float *lse;
    const float *other_lse;
    int64_t out_row_stride, out_head_stride, other_row_stride, other_head_stride; /* elements */
    uint32_t rows, heads, head_dim, fp16;
};

#endif
