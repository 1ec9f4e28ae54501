/* SPDX-License-Identifier: Apache-2.0 */
/* Parameters of the kernels in prefill.cu: plain C, the same bytes for gcc and nvcc. Pointers are device addresses. */
#ifndef OSCAR_KERNELS_CUDA_PREFILL_PARAMS_H
#define OSCAR_KERNELS_CUDA_PREFILL_PARAMS_H

#include "kernels/cuda/layout.h"

#define CUDA_PREFILL_COLUMNS 64U  /* of one tile: pairs of a query row and a query head of one KV head's group */
#define CUDA_PREFILL_THREADS 128U /* of a block */
/* Shared memory of a block: queries, pages on their way, and what is there once a column or a token. */
#define CUDA_PREFILL_SHARED_BYTES(d)                                                                                   \
    (CUDA_PREFILL_COLUMNS * (4U * (d) + 16U) + 64U * (4U * (d) + 48U) + CUDA_PREFILL_COLUMNS * 172U + 64U * 108U + 256U)

struct cuda_prefill_params {
    struct cuda_batch_view batch;
    const struct cuda_head *heads; /* of the layer */
    const float *page_turn, *row_turn;
    const uint16_t *q;
    uint16_t *out;
    float *lse;             /* NULL: none is written */
    uint64_t packed_offset; /* of the layer's first record, bytes from the start of a page */
    uint64_t dense_offset;
    uint32_t frequencies;
    uint32_t kv_heads, group;
    uint32_t bf16;    /* type of q and out; else FP16 */
    float log2_scale; /* softmax_scale * log2(e) */
};

#endif
