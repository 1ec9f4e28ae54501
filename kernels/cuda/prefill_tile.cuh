/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of prefill.cu share: sizes, a block's shared memory, a lane's registers, and small steps of arithmetic. */
#ifndef OSCAR_KERNELS_CUDA_PREFILL_TILE_CUH
#define OSCAR_KERNELS_CUDA_PREFILL_TILE_CUH

#include "oscar/geometry.h"

#include "kernels/cuda/prefill_params.h"
#include "kernels/cuda/rotate.cuh"

#define TOKENS 64       /* of a page */
#define COLUMNS 64      /* of a tile */
#define THREADS 128     /* of a block */
#define WARP_COLUMNS 16 /* of a warp */
#define STAGES 4        /* packed records in shared memory or on their way there */
#define ROW_LANES 8     /* that share a row outside the matrix instructions, as in rotate.cuh */
#define WARP 0xFFFFFFFFU

/* Finite queries stay finite, as on the host: no rotation, centre or logit of rows in range overflows from here. */
#define MAX_QUERY 1e29F
#define UNIT_EXPONENT 14   /* a column's largest query element or centre term lies below 2^14 of its unit */
#define CODE_UNIT 0x1p-24F /* of a code in the lowest bits of an FP16 number */
#define LN_2 0.6931471805599453F

static_assert(TOKENS == OSCAR_PAGE_TOKENS && COLUMNS == CUDA_PREFILL_COLUMNS && THREADS == CUDA_PREFILL_THREADS, "");

/* A block's work. */
struct tile {
    const struct cuda_batch_item *item;
    uint32_t kv_head, first_column;
};

template <int D> struct shape {
    static constexpr int words = D / 64;      /* of K of one token, and of V of one half of a tile, in a lane */
    static constexpr int row_floats = D + 4;  /* a column's row in shared memory */
    static constexpr int code_bytes = 16 * D; /* of a side */
    static constexpr int record_bytes = 2 * code_bytes + 512;
    static constexpr int dense_bytes = 4 * TOKENS * D;
    static constexpr int k_stride = 2 * D + 32, v_stride = 2 * D + 16; /* of a dense row in shared memory */
};

template <int D> struct __align__(16) shared {
    /* A column's row: q as fp32, then its upper and lower FP16 terms, then its output as fp32. */
    float rows[COLUMNS][shape<D>::row_floats];
    union {
        uint8_t record[STAGES][shape<D>::record_bytes];
        struct {
            uint8_t k[TOKENS][shape<D>::k_stride];
            uint8_t v[TOKENS][shape<D>::v_stride];
        } dense;
    };
    /* By page parity: of each token K's scale and zero, V's scale relative to the page's unit, V's zero. */
    float2 k_scale[2][TOKENS];
    float v_scale[2][TOKENS];
    __half v_zero[2][TOKENS];
    /* A column's alpha and beta, and cos and sin of a page's rows, of each pair. */
    float2 turn[COLUMNS][CUDA_MAX_PAIRS + 4];
    __half2 row_turn[TOKENS][CUDA_MAX_PAIRS + 4];
    float unit[COLUMNS], sigma[COLUMNS], sum[COLUMNS];
    float v_unit[2];
    uint32_t index[STAGES];
    uint32_t frequency[CUDA_MAX_PAIRS];
    uint32_t scan[THREADS / 32];
    uint32_t found[2];
};

/* What a lane knows of its two columns. */
struct columns {
    float unit[2], sigma[2], sum[2];
    uint32_t visible[2];  /* positions below it are seen */
    uint32_t least, most; /* visible to all columns of the warp, to one of them */
    uint32_t pairs;
};

template <int D> struct partial {
    float out[D / 8][4];  /* dims 8j + 2t, 8j + 2t + 1 of column g, then of column g + 8 */
    float max[2], sum[2]; /* sum: of the lane's own tokens */
};

static __device__ __forceinline__ float power_of_2(int exponent) { return __int_as_float((exponent + 127) << 23); }

/* The smallest e with x < 2^e, of a finite x > 0; never below `least`. */
static __device__ __forceinline__ int exponent_above(float x, int least) {
    return max((__float_as_int(x) >> 23) - 126, least);
}

template <int LANES> static __device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
    for (int h = 1; h < LANES; h *= 2)
        x += __shfl_xor_sync(WARP, x, h);
    return x;
}

template <int LANES> static __device__ __forceinline__ float lanes_max(float x) {
#pragma unroll
    for (int h = 1; h < LANES; h *= 2)
        x = fmaxf(x, __shfl_xor_sync(WARP, x, h));
    return x;
}

#endif
