/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A worker's rows of K and V, rotated, to the rows of dense pages; and the check of what dense pages hold.
 *
 * Rows are numbered through: 0 .. tokens - 1 of a store, or those of all items of a batch one after the other. A block's
 * blockIdx.x says which head of K or V, and of a matrix which columns; blocks along y share the rows. Each group of lanes finds
 * its own row's place, so that rows of many sequences go through one block and a matrix is fetched once for all of them.
 */
#include "oscar/error.h"

#include "kernels/cuda/rotate.cuh"
#include "kernels/cuda/store_params.h"
#include "proto/page.h"

/* BF16 bits of the greatest magnitude that is not above OSCAR_MAX_ROW_MAGNITUDE (64,768; the next one is 65,024). Added to a
 * magnitude, the distance from there to 0x7FFF reaches bit 15 where it is greater: NaN and Inf are. */
#define GREATEST 0x477DU
#define DISTANCE ((0x7FFFU - GREATEST) * 0x10001U)
#define EXCESS_BITS 0x80008000U

static __device__ __forceinline__ uint32_t excess(uint32_t pair) { return (pair & 0x7FFF7FFFU) + DISTANCE; }

struct place {
    const uint16_t *from;
    uint8_t *to; /* NULL: there is no such row */
};

/* The item that holds the row: first where it is if all have as many, as in a decode step. */
static __device__ uint32_t find_item(const struct cuda_batch_view &batch, uint32_t row) {
    uint32_t low = 0, high = batch.header->items, each = batch.header->rows / high;
    if (each > 0) {
        uint32_t guess = min(row / each, high - 1);
        const struct cuda_batch_item *item = &batch.items[guess];
        if (item->first_row <= row && row - item->first_row < item->rows)
            return guess;
    }
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (batch.items[middle].first_row <= row)
            low = middle;
        else
            high = middle;
    }
    return low;
}

template <int D>
static __device__ __forceinline__ struct place find_row(const struct cuda_store_params &params, uint32_t side_head,
                                                        uint32_t row, uint32_t rows) {
    struct place place = {nullptr, nullptr};
    if (row >= rows)
        return place;
    uint32_t side = side_head % 2, head = side_head / 2;
    const struct cuda_store_side &from = params.side[side];
    uint64_t page;
    uint32_t page_row;
    int64_t token = row;
    place.from = from.data + head * from.head_stride;
    if (params.batch.header) {
        const struct cuda_batch_item *item = &params.batch.items[find_item(params.batch, row)];
        token = row - item->first_row;
        place.from += side ? item->v_offset : item->k_offset;
        uint32_t position = item->tokens - item->rows + static_cast<uint32_t>(token);
        page_row = position % OSCAR_PAGE_TOKENS;
        /* The dense run ends with the item's last page. */
        uint32_t behind = (item->tokens - 1) / OSCAR_PAGE_TOKENS - position / OSCAR_PAGE_TOKENS;
        if (behind >= item->dense_pages)
            return place;
        cuda_page entry = params.batch.entries[item->dense_first + item->dense_pages - 1 - behind];
        if (cuda_page_index(entry) != position / OSCAR_PAGE_TOKENS)
            return place;
        page = cuda_page_address(entry);
    } else {
        page = params.pages[(params.first_row + row) / OSCAR_PAGE_TOKENS];
        page_row = (params.first_row + row) % OSCAR_PAGE_TOKENS;
    }
    place.from += token * from.token_stride;
    place.to = reinterpret_cast<uint8_t *>(page) + params.layer_offset +
               (static_cast<uint64_t>(head) * 2 * OSCAR_PAGE_TOKENS + side * OSCAR_PAGE_TOKENS + page_row) * (2 * D);
    return place;
}

/* Chunks of 8 elements, LANES of them apart, from any address of an element; zeros where there is no row. */
template <int CHUNKS, int LANES>
static __device__ __forceinline__ void load_row(uint4 (&x)[CHUNKS], const struct place &place) {
    const uint16_t *from = place.from + threadIdx.x % LANES * 8;
    uint32_t offset = reinterpret_cast<uintptr_t>(from) % sizeof(uint4);
    if (!place.to) {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
            x[c] = make_uint4(0, 0, 0, 0);
    } else if (offset == 0) {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
            x[c] = __ldcs(reinterpret_cast<const uint4 *>(from) + LANES * c);
    } else if (offset % sizeof(uint32_t) == 0) {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const uint32_t *pairs = reinterpret_cast<const uint32_t *>(from) + LANES * 4 * c;
            x[c] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
    } else {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const uint16_t *elements = from + LANES * 8 * c;
            uint32_t pairs[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                pairs[i] = elements[2 * i] | static_cast<uint32_t>(elements[2 * i + 1]) << 16;
            x[c] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
    }
}

static __device__ __forceinline__ uint32_t store_pairs(uint8_t *to, const uint32_t (&pairs)[4]) {
    if (to)
        *reinterpret_cast<uint4 *>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    return excess(pairs[0]) | excess(pairs[1]) | excess(pairs[2]) | excess(pairs[3]);
}

/* Rows of one head, by `slices` blocks of THREADS threads of which this is number `slice`. Returns what excess() found. */
template <int D, class TYPE, int THREADS>
static __device__ __forceinline__ uint32_t store_hadamard(const struct cuda_store_params &params, uint32_t side_head,
                                                          uint32_t rows, uint32_t slice, uint32_t slices) {
    constexpr int lanes = D == 256 ? 8 : 4;
    constexpr int chunks = D / lanes / 8;
    constexpr uint32_t tile = THREADS / lanes;
    uint32_t found = 0;
    for (uint32_t first = slice * tile; first < rows; first += slices * tile) {
        struct place place = find_row<D>(params, side_head, first + threadIdx.x / lanes, rows);
        uint4 packed[chunks];
        load_row<chunks, lanes>(packed, place);
        float x[chunks * 8];
#pragma unroll
        for (int c = 0; c < chunks; c++) {
            const uint32_t pairs[4] = {packed[c].x, packed[c].y, packed[c].z, packed[c].w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float2 both = TYPE::unpack(pairs[i]);
                x[8 * c + 2 * i] = both.x;
                x[8 * c + 2 * i + 1] = both.y;
            }
        }
        rotate_hadamard<D, lanes>(x);
        uint8_t *to = place.to ? place.to + threadIdx.x % lanes * 16 : nullptr;
#pragma unroll
        for (int c = 0; c < chunks; c++) {
            uint32_t pairs[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                pairs[i] = rotate_bf16::pack(x[8 * c + 2 * i], x[8 * c + 2 * i + 1]);
            found |= store_pairs(to ? to + lanes * 16 * c : nullptr, pairs);
        }
    }
    return found;
}

/* The same with a matrix, for columns first_column .. + params.columns - 1: a warp takes TILES * 16 rows at a time. */
template <int D, class TYPE, int THREADS>
static __device__ __forceinline__ uint32_t store_matrix(const struct cuda_store_params &params, const float *matrix,
                                                        uint32_t side_head, uint32_t first_column, uint32_t rows,
                                                        uint32_t slice, uint32_t slices) {
    extern __shared__ uint4 entries[];
    constexpr int tiles = D == 256 ? 1 : 2;
    constexpr uint32_t warps = THREADS / 32;
    rotate_matrix_load<D, TYPE, THREADS>(entries, matrix, first_column, params.columns);
    __syncthreads();
    uint32_t found = 0, lane = threadIdx.x % 32;
    for (uint32_t first = (slice * warps + threadIdx.x / 32) * tiles * 16; first < rows;
         first += slices * warps * tiles * 16) {
        uint4 x[tiles][2][D / 32];
        uint8_t *to[tiles][2];
#pragma unroll
        for (int m = 0; m < tiles; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                struct place place = find_row<D>(params, side_head, first + 16 * m + 8 * half + lane / 4, rows);
                load_row<D / 32, 4>(x[m][half], place);
                to[m][half] = place.to ? place.to + first_column * 2 + lane % 4 * 16 : nullptr;
            }
#pragma unroll 1
        for (uint32_t chunk = 0; chunk < params.columns / CUDA_STORE_CHUNK; chunk++) {
            float sum[tiles][4][4];
            rotate_matrix<D, TYPE, tiles>(sum, entries, chunk, x);
#pragma unroll
            for (int m = 0; m < tiles; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    uint32_t pairs[4];
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        pairs[j] = rotate_bf16::pack(sum[m][j][2 * half], sum[m][j][2 * half + 1]);
                    found |= store_pairs(to[m][half] ? to[m][half] + chunk * CUDA_STORE_CHUNK * 2 : nullptr, pairs);
                }
        }
    }
    return found;
}

static __device__ __forceinline__ uint32_t count_rows(const struct cuda_store_params &params) {
    return params.batch.header ? params.batch.header->rows : params.tokens;
}

static __device__ __forceinline__ void report(int32_t *status, uint32_t found) {
    if (found & EXCESS_BITS && status)
        *status = OSCAR_ERR_NOT_FINITE;
}

/* All heads are rotated by the Hadamard transform. */
template <int D, class TYPE>
static __device__ __forceinline__ void store_all_hadamard(const struct cuda_store_params &params) {
    report(params.status,
           store_hadamard<D, TYPE, CUDA_STORE_THREADS>(params, blockIdx.x, count_rows(params), blockIdx.y, gridDim.y));
}

/* Some heads have a matrix: blockIdx.x counts columns / params.columns blocks a head of K or V, which share the rows where it
 * has none. */
template <int D, class TYPE> static __device__ __forceinline__ void store_any(const struct cuda_store_params &params) {
    uint32_t blocks = D / params.columns, side_head = blockIdx.x / blocks, block = blockIdx.x % blocks;
    const struct cuda_head *head = &params.heads[side_head / 2];
    const float *matrix = side_head % 2 ? head->rotation_v : head->rotation_k;
    uint32_t rows = count_rows(params), found;
    if (matrix)
        found = store_matrix<D, TYPE, CUDA_ROTATE_THREADS>(params, matrix, side_head, block * params.columns, rows,
                                                           blockIdx.y, gridDim.y);
    else
        found = store_hadamard<D, TYPE, CUDA_ROTATE_THREADS>(params, side_head, rows, blockIdx.y * blocks + block,
                                                             gridDim.y * blocks);
    report(params.status, found);
}

#define STORE_KERNELS(D, TYPE)                                                                                         \
    extern "C" __global__ void __launch_bounds__(CUDA_STORE_THREADS)                                                   \
        store_hadamard_##D##_##TYPE(const __grid_constant__ struct cuda_store_params params) {                         \
        store_all_hadamard<D, rotate_##TYPE>(params);                                                                  \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(CUDA_ROTATE_THREADS)                                                  \
        store_any_##D##_##TYPE(const __grid_constant__ struct cuda_store_params params) {                              \
        store_any<D, rotate_##TYPE>(params);                                                                           \
    }

STORE_KERNELS(64, bf16)
STORE_KERNELS(64, fp16)
STORE_KERNELS(128, bf16)
STORE_KERNELS(128, fp16)
STORE_KERNELS(256, bf16)
STORE_KERNELS(256, fp16)

/* Block (x, p) reads piece x of page p. */
extern "C" __global__ void __launch_bounds__(CUDA_INSPECT_THREADS)
    store_inspect(const __grid_constant__ struct cuda_inspect_params params) {
    constexpr int loads = CUDA_INSPECT_BYTES / CUDA_INSPECT_THREADS / sizeof(uint4);
    const uint4 *from = reinterpret_cast<const uint4 *>(params.pages[blockIdx.y]) +
                        static_cast<uint64_t>(blockIdx.x) * loads * CUDA_INSPECT_THREADS + threadIdx.x;
    uint4 words[loads];
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < loads; i++)
        words[i] = __ldcs(from + i * CUDA_INSPECT_THREADS);
#pragma unroll
    for (int i = 0; i < loads; i++)
        found |= excess(words[i].x) | excess(words[i].y) | excess(words[i].z) | excess(words[i].w);
    report(&params.status[blockIdx.y], found);
}
