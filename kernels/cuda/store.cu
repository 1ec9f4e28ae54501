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

/* Rows of one head, by `slices` blocks of which this is number `slice`. Returns what excess() found. */
template <int D, class TYPE>
static __device__ __forceinline__ uint32_t store_hadamard(const struct cuda_store_params &params, uint32_t side_head,
                                                          uint32_t rows, uint32_t slice, uint32_t slices) {
    constexpr int lanes = CUDA_STORE_LANES(D);
    constexpr int chunks = D / lanes / 8;
    uint32_t tile = blockDim.x / lanes, found = 0;
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

/* Shared memory of one warp: the rows that come next, and the place of each. */
template <int D> struct matrix_rows {
    static constexpr int tiles = CUDA_ROTATE_TILES(D);
    uint4 *x; /* [16 * tiles][D / 8], a row's swizzled so that 8 rows of the same columns lie in different banks */
    struct place *place; /* [16 * tiles] */

    static __device__ __forceinline__ int unit(int row, int i) { return row * (D / 8) + (i ^ row % 8); }

    /* Starts fetching the rows from number `first` on. */
    __device__ __forceinline__ void fetch(const struct cuda_store_params &params, uint32_t side_head, uint32_t first,
                                          uint32_t rows) const {
        int lane = threadIdx.x % 32, t = lane % 4;
        if (lane < 16 * tiles)
            place[lane] = find_row<D>(params, side_head, first + lane, rows);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2 * tiles; i++) {
            int row = 8 * i + lane / 4;
            struct place from = place[row];
            if (from.to && reinterpret_cast<uintptr_t>(from.from) % sizeof(uint4) == 0) {
#pragma unroll
                for (int c = 0; c < D / 32; c++)
                    copy_16(&x[unit(row, 4 * c + t)], from.from + 32 * c + 8 * t);
            } else {
                uint4 loaded[D / 32];
                load_row<D / 32, 4>(loaded, from);
#pragma unroll
                for (int c = 0; c < D / 32; c++)
                    x[unit(row, 4 * c + t)] = loaded[c];
            }
        }
        copies_commit();
    }

    /* A operands, and where row 8i + g goes. */
    __device__ __forceinline__ void take(uint32_t (&ret_x)[tiles][D / 16][4], uint8_t *(&ret_to)[2 * tiles]) const {
        int lane = threadIdx.x % 32;
        copies_wait<0>();
        __syncwarp();
#pragma unroll
        for (int m = 0; m < tiles; m++)
#pragma unroll
            for (int step = 0; step < D / 16; step++)
                load_matrices(ret_x[m][step], shared_address(&x[unit(16 * m + lane % 16, 2 * step + lane / 16)]));
#pragma unroll
        for (int i = 0; i < 2 * tiles; i++)
            ret_to[i] = place[8 * i + lane / 4].to;
        __syncwarp(); /* all of it has been read before it is written again */
    }
};

/* The same with a matrix, for columns first_column .. + params.columns - 1. */
template <int D, class TYPE>
static __device__ __forceinline__ uint32_t store_matrix(const struct cuda_store_params &params, const float *matrix,
                                                        uint32_t side_head, uint32_t first_column, uint32_t rows,
                                                        uint32_t slice, uint32_t slices) {
    uint4 *entries = reinterpret_cast<uint4 *>(block_memory());
    constexpr int tiles = CUDA_ROTATE_TILES(D);
    constexpr uint32_t tile = 16 * tiles;
    uint32_t warps = blockDim.x / 32, warp = threadIdx.x / 32, found = 0;
    uint4 *all_x = entries + D * params.columns / 4, *all_places = all_x + warps * tile * (D / 8);
    struct matrix_rows<D> next;
    next.x = all_x + warp * tile * (D / 8);
    next.place = reinterpret_cast<struct place *>(all_places) + warp * tile;
    uint32_t first = (slice * warps + warp) * tile, step = slices * warps * tile;
    next.fetch(params, side_head, first, rows);
    rotate_matrix_load<D, TYPE>(entries, matrix, first_column, params.columns);
    __syncthreads();
    for (; first < rows; first += step) {
        uint32_t x[tiles][D / 16][4];
        uint8_t *to[2 * tiles];
        next.take(x, to);
        next.fetch(params, side_head, first + step, rows);
#pragma unroll 1
        for (uint32_t chunk = 0; chunk < params.columns / CUDA_STORE_CHUNK; chunk++) {
            uint32_t at = (first_column + chunk * CUDA_STORE_CHUNK) * 2 + threadIdx.x % 4 * 16;
            float sum[tiles][4][4];
            rotate_matrix<D, TYPE, tiles>(sum, entries, chunk, x);
#pragma unroll
            for (int i = 0; i < 2 * tiles; i++) {
                uint32_t pairs[4];
#pragma unroll
                for (int j = 0; j < 4; j++)
                    pairs[j] = rotate_bf16::pack(sum[i / 2][j][i % 2 * 2], sum[i / 2][j][i % 2 * 2 + 1]);
                found |= store_pairs(to[i] ? to[i] + at : nullptr, pairs);
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
    report(params.status, store_hadamard<D, TYPE>(params, blockIdx.x, count_rows(params), blockIdx.y, gridDim.y));
}

/* Some heads have a matrix: blockIdx.x counts columns / params.columns blocks a head of K or V, which share the rows where it
 * has none. */
template <int D, class TYPE> static __device__ __forceinline__ void store_any(const struct cuda_store_params &params) {
    uint32_t blocks = D / params.columns, side_head = blockIdx.x / blocks, block = blockIdx.x % blocks;
    const struct cuda_head *head = &params.heads[side_head / 2];
    const float *matrix = side_head % 2 ? head->rotation_v : head->rotation_k;
    uint32_t rows = count_rows(params), found;
    if (matrix)
        found = store_matrix<D, TYPE>(params, matrix, side_head, block * params.columns, rows, blockIdx.y, gridDim.y);
    else
        found = store_hadamard<D, TYPE>(params, side_head, rows, blockIdx.y * blocks + block, gridDim.y * blocks);
    report(params.status, found);
}

#define STORE_KERNELS(D, TYPE)                                                                                         \
    extern "C" __global__ void __launch_bounds__(CUDA_STORE_THREADS)                                                   \
        store_hadamard_##D##_##TYPE(const __grid_constant__ struct cuda_store_params params) {                         \
        store_all_hadamard<D, rotate_##TYPE>(params);                                                                  \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(CUDA_ROTATE_THREADS(D))                                               \
        store_any_##D##_##TYPE(const __grid_constant__ struct cuda_store_params params) {                              \
        store_any<D, rotate_##TYPE>(params);                                                                           \
    }

STORE_KERNELS(64, bf16)
STORE_KERNELS(64, fp16)
STORE_KERNELS(128, bf16)
STORE_KERNELS(128, fp16)
STORE_KERNELS(256, bf16)
STORE_KERNELS(256, fp16)

/* Blocks (.., p) read page p. */
extern "C" __global__ void __launch_bounds__(CUDA_INSPECT_THREADS)
    store_inspect(const __grid_constant__ struct cuda_inspect_params params) {
    constexpr int loads = CUDA_INSPECT_BYTES / CUDA_INSPECT_THREADS / sizeof(uint4);
    const uint4 *page = reinterpret_cast<const uint4 *>(params.pages[blockIdx.y]) + threadIdx.x;
    uint32_t found = 0;
    for (uint32_t piece = blockIdx.x; piece < params.pieces; piece += gridDim.x) {
        const uint4 *from = page + static_cast<uint64_t>(piece) * loads * CUDA_INSPECT_THREADS;
        uint4 words[loads];
#pragma unroll
        for (int i = 0; i < loads; i++)
            words[i] = __ldcs(from + i * CUDA_INSPECT_THREADS);
#pragma unroll
        for (int i = 0; i < loads; i++)
            found |= excess(words[i].x) | excess(words[i].y) | excess(words[i].z) | excess(words[i].w);
    }
    report(&params.status[blockIdx.y], found);
}
