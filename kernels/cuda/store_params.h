/* SPDX-License-Identifier: Apache-2.0 */
/* Parameters of the kernels in store.cu: plain C, the same bytes for gcc and nvcc. Pointers are device addresses. */
#ifndef OSCAR_KERNELS_CUDA_STORE_PARAMS_H
#define OSCAR_KERNELS_CUDA_STORE_PARAMS_H

#include "kernels/cuda/layout.h"

#define CUDA_STORE_PAGES 256           /* of one launch */
#define CUDA_STORE_THREADS 512         /* of a block, Hadamard */
#define CUDA_STORE_LANES(d) ((d) / 16) /* of a row there */
/* Of a block that multiplies with a matrix of d columns: threads at most, groups of 16 rows that a warp takes at a time, bytes of
 * shared memory for `columns` columns of the matrix (two terms) and for the rows that come next. */
#define CUDA_ROTATE_THREADS(d) ((d) == 256 ? 256 : 512)
#define CUDA_ROTATE_TILES(d) ((d) == 256 ? 1 : 2)
#define CUDA_ROTATE_BYTES(d, columns, threads) ((d) * (columns)*4 + CUDA_ROTATE_TILES(d) * ((d) + 8) * (threads))
#define CUDA_STORE_CHUNK 32      /* columns of a matrix: a block takes a multiple of them */
#define CUDA_INSPECT_THREADS 256 /* of a block */
#define CUDA_INSPECT_BYTES 16384 /* of a page that one block reads: they divide every page */

struct cuda_store_side {
    const uint16_t *data;
    int64_t token_stride, head_stride; /* elements */
};

struct cuda_store_params {
    const struct cuda_head *heads;  /* of the layer */
    struct cuda_store_side side[2]; /* K, V */
    struct cuda_batch_view batch;   /* where the rows go; header NULL: into `pages` */
    int32_t *status;                /* receives OSCAR_ERR_NOT_FINITE; NULL: nobody is told */
    uint64_t layer_offset;          /* of the layer's first record, bytes from the start of a page */
    uint32_t columns;               /* of a matrix that one block takes */
    uint32_t first_row, tokens;     /* as in struct oscar_store_args; unused with a batch */
    uint32_t padding;
    uint64_t pages[CUDA_STORE_PAGES];
};

struct cuda_inspect_params {
    int32_t *status; /* [pages] receives OSCAR_ERR_NOT_FINITE */
    uint32_t pieces; /* of CUDA_INSPECT_BYTES bytes in a page */
    uint32_t padding;
    uint64_t pages[CUDA_STORE_PAGES];
};

#endif
