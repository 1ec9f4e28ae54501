/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Structures that the host side writes and the kernels read: plain C, the same bytes for gcc and nvcc. Pointers are device
 * addresses.
 */
#ifndef OSCAR_KERNELS_CUDA_LAYOUT_H
#define OSCAR_KERNELS_CUDA_LAYOUT_H

#include <stdint.h>

#define CUDA_MAX_PAIRS 16
#define CUDA_MAX_DECODE_ROWS 16 /* = OSCAR_MAX_DECODE_ROWS */

/* One (layer, KV head) of a calibration; formulas and shapes as in proto/calibration.h. */
struct cuda_head {
    const float *rotation_k, *rotation_v; /* [d][d], NULL: Hadamard */
    const float *feedback;                /* L [d][d], NULL: nearest */
    const float *centre_static;           /* s' [d], NULL: no centre */
    const float *centre_cos, *centre_sin; /* [pairs][d] */
    const uint32_t *centre_table; /* decode's: the row turns of its pairs (decode_centre.cuh); NULL: it has none */
    uint32_t pairs;
    uint32_t rank_k, rank_v;
    int32_t centre_pair[CUDA_MAX_PAIRS]; /* index into the frequencies */
};

/* Words of a centre table, in the order of A fragments: [step of 8 pairs][tile of 16 tokens][lane 4g + t][4]. Word i of a lane is
 * {cos, sin} in FP16, of token g + 8 (i & 1) of the tile and pair t + 4 (i >> 1) of the step. Pairs beyond the head's are zeros. */
#define CUDA_CENTRE_TABLE_WORDS (CUDA_MAX_PAIRS / 8 * 4 * 32 * 4)

struct cuda_calibration_view {
    const struct cuda_head *heads; /* [layers * kv_heads] */
    const float *page_turn;        /* [pages][frequencies][2] cos, sin; fp32 */
    const float *row_turn;         /* [64][frequencies][2]; values that fp16 holds */
    uint32_t layers, kv_heads, head_dim;
    uint32_t pages, frequencies;
    uint32_t max_pairs;  /* of any head; 0 with no centre or a constant one */
    uint32_t any_centre; /* 1: some head has a centre */
    uint32_t any_feedback;
    uint32_t hadamard_k, hadamard_v; /* 1: that side's rotation is the Hadamard transform in every head */
};

/* A page of a batch: where its bytes lie and which page of its sequence it is (its first position / 64). Pages begin at
 * multiples of 256 bytes. */
typedef uint64_t cuda_page;
#define CUDA_PAGE_ADDRESS_BITS 43 /* of address / 256 */
#define cuda_page_make(address, index) (((uint64_t)(address) >> 8) | ((uint64_t)(index) << CUDA_PAGE_ADDRESS_BITS))
#define cuda_page_address(page) (((page) & ((UINT64_C(1) << CUDA_PAGE_ADDRESS_BITS) - 1)) << 8)
#define cuda_page_index(page) ((uint32_t)((page) >> CUDA_PAGE_ADDRESS_BITS))

/* An item of a batch. Its pages are two runs of entries: the packed ones and the dense ones (sink included), each by rising
 * index; together they hold positions 0 .. tokens - 1, and nothing beyond them is read. Offsets in elements as in struct
 * oscar_batch_item. */
struct cuda_batch_item {
    uint32_t tokens, rows;
    uint32_t first_row; /* query rows of the items before it */
    uint32_t packed_pages, dense_pages;
    uint32_t dense_tokens;              /* in dense pages */
    uint64_t packed_first, dense_first; /* index of the run's first entry */
    int64_t q_offset, q_row_stride, q_head_stride;
    int64_t out_offset, out_row_stride, out_head_stride;
    int64_t lse_offset;
    int64_t k_offset, v_offset;
};

struct cuda_batch_header {
    uint32_t items; /* now; kernels are launched for the limits and look here */
    uint32_t rows;  /* of all items */
    uint32_t padding[2];
};

struct cuda_batch_view {
    const struct cuda_batch_header *header;
    const struct cuda_batch_item *items; /* [limits.items] */
    const cuda_page *entries;            /* [limits.pages] */
};

#endif
