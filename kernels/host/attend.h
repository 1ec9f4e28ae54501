/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside attention on the host: the plan (attend.c) cuts a batch into blocks of query columns and chunks of pages; the
 * functions below take one page against one block. A column is one query row of one query head of a KV head's group.
 *
 * All scores are in units of log2: the queries carry softmax_scale * log2(e), so the softmax uses 2^x.
 */
#ifndef OSCAR_KERNELS_HOST_ATTEND_H
#define OSCAR_KERNELS_HOST_ATTEND_H

#include <stdbool.h>
#include <stdint.h>

#include "oscar/device.h"

#include "kernels/host/level.h"

#define ATTEND_COLUMNS 32U      /* of one block: their state stays in the second cache level beside a page */
#define ATTEND_GROUP 4U         /* columns that the inner loops take at a time */
#define ATTEND_P_UNIT 32767.0F  /* what the largest p * scale of a page is worth in 16-bit fixed point */
#define ATTEND_P_NOTHING 1e-30F /* a page whose largest p * scale is below adds nothing to what 32 bits can hold */

/* One block's queries, rotated and scaled. Arrays hold one entry (or row) a column. */
struct attend_columns {
    uint32_t d;
    uint32_t count;                   /* 1..ATTEND_COLUMNS */
    uint32_t visible[ATTEND_COLUMNS]; /* the column sees positions below it */
    float *q;                         /* [count][d] */
    int8_t *high, *low;               /* [count][d]: q = step * (256 high + low), for packed pages */
    float step[ATTEND_COLUMNS];
    float sum[ATTEND_COLUMNS];                    /* of 256 high + low over the row */
    bool centred;                                 /* K of packed pages has a centre */
    uint32_t pairs;                               /* its rotating pairs */
    const int32_t *pair;                          /* [pairs] indices into a page's turn */
    const float *row_turn;                        /* [pairs]{[64] cos, [64] sin} of the rows of a page */
    float sigma[ATTEND_COLUMNS];                  /* q . s' */
    float alpha[ATTEND_COLUMNS][OSCAR_MAX_PAIRS]; /* q . a'_i, zeros from `pairs` on */
    float beta[ATTEND_COLUMNS][OSCAR_MAX_PAIRS];  /* q . b'_i */
};

/* One page's record of the block's KV head. */
struct attend_page {
    const uint8_t *record;
    uint32_t first;       /* position of row 0 */
    uint32_t rows;        /* rows that some column of the block sees, 1..64: the others may hold anything */
    const float *turn;    /* [frequencies]{cos, sin} of the page's first position, where the block has pairs */
    const uint8_t *ahead; /* a record to prefetch meanwhile, or NULL */
    uint32_t ahead_bytes;
};

/* What a chunk of pages gave a block: sums relative to 2^max. Begins as zeros with max = -inf. */
struct attend_partial {
    float *out; /* [count][d]: sum of 2^(score - max) * v, rotated */
    float *max; /* [count] */
    float *sum; /* [count]: of 2^(score - max) */
};

struct attend_kernels {
    void (*packed)(const struct attend_columns *columns, const struct attend_page *page,
                   const struct attend_partial *partial);
    void (*dense)(const struct attend_columns *columns, const struct attend_page *page,
                  const struct attend_partial *partial);
};

void attend_dense_avx2(const struct attend_columns *columns, const struct attend_page *page,
                       const struct attend_partial *partial);
void attend_dense_avx512(const struct attend_columns *columns, const struct attend_page *page,
                         const struct attend_partial *partial);

extern const struct attend_kernels attend_kernels_portable;
extern const struct attend_kernels attend_kernels_avx2;
extern const struct attend_kernels attend_kernels_avx512;

/* Rows of the page that column `c` sees, 0..64. */
static inline uint32_t attend_rows(const struct attend_columns *columns, uint32_t c, uint32_t first) {
    uint32_t visible = columns->visible[c];
    if (visible <= first)
        return 0;
    return visible - first < OSCAR_PAGE_TOKENS ? visible - first : OSCAR_PAGE_TOKENS;
}

#endif
