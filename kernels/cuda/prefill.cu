/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention with many query rows.
 *
 * A block takes one tile: up to 64 columns (a column is a query row of one query head of a KV head's group) of one item against
 * all pages that they see, first the packed ones, then the dense ones. A warp has 16 columns, 4 lanes one: lane 4g + t has
 * columns g and g + 8. Blocks walk over the tiles of all items; nothing is shared between blocks and nothing is left in memory
 * but results.
 *
 * Matrix instructions are m16n8k16 with 16 columns as rows.
 *   Scores: the rotated query is scaled to a common power of two (the column's unit) and split into two FP16 terms, so that it
 *     carries 22 bits. K is a B operand whose codes come out of the page's own byte order with one mask each: the FP16 number
 *     code * 4^f * 2^-24 (f = dim / 16 / (D / 64) is the code's place in its byte), exact. The 4^f is taken out of the query.
 *   Centre: one more product, of (C, S) of each column and pair against the table of a page's rows.
 *   Values: p * scale, relative to the page's largest scale, is two FP16 terms too; V's codes are B operands as K's are. The sum
 *     of p * scale * zero is a column of the same product, so that both see the same rounding; it is where the accumulators
 *     begin. They are taken over into the output after every page: a matrix unit's own sums lose bits.
 *   Dense pages are brought to the same form: rows of FP16 with a power of two as scale, zero 0.
 */
#include "kernels/cuda/prefill_page.cuh"
#include "kernels/cuda/prefill_products.cuh"
#include "kernels/cuda/prefill_query.cuh"

/* --- work ------------------------------------------------------------------------------------------------------------------- */

static __device__ uint32_t tiles_of(const struct cuda_prefill_params &params, uint32_t i) {
    if (i >= params.batch.header->items || params.batch.items[i].rows <= CUDA_MAX_DECODE_ROWS)
        return 0;
    return (params.batch.items[i].rows * params.group + COLUMNS - 1) / COLUMNS * params.kv_heads;
}

/* Where a block's walk over the tiles of all items stands: at a window of as many items as it has threads. */
struct walk {
    uint32_t first_item;
    uint64_t tiles_before;
};

/* The tile of that number, which never falls from call to call; false behind the last one. By the whole block. */
template <int D>
static __device__ bool find_tile(const struct cuda_prefill_params &params, struct shared<D> &mem, struct walk &walk,
                                 uint64_t number, struct tile &ret) {
    for (; walk.first_item < params.batch.header->items; walk.first_item += THREADS) {
        uint32_t tiles = tiles_of(params, walk.first_item + threadIdx.x), upto = tiles;
#pragma unroll
        for (int h = 1; h < 32; h *= 2) {
            uint32_t before = __shfl_up_sync(WARP, upto, h);
            upto += threadIdx.x % 32 >= h ? before : 0;
        }
        __syncthreads();
        if (threadIdx.x % 32 == 31)
            mem.scan[threadIdx.x / 32] = upto;
        __syncthreads();
        uint32_t total = 0;
        for (uint32_t warp = 0; warp < THREADS / 32; warp++) {
            upto += warp < threadIdx.x / 32 ? mem.scan[warp] : 0;
            total += mem.scan[warp];
        }
        if (number - walk.tiles_before >= total) {
            walk.tiles_before += total;
            continue;
        }
        uint32_t wanted = static_cast<uint32_t>(number - walk.tiles_before);
        if (wanted < upto && wanted >= upto - tiles) {
            mem.found[0] = walk.first_item + threadIdx.x;
            mem.found[1] = tiles - 1 - (wanted - (upto - tiles)); /* those that see most pages first */
        }
        __syncthreads();
        ret.item = &params.batch.items[mem.found[0]];
        ret.kv_head = mem.found[1] % params.kv_heads;
        ret.first_column = mem.found[1] / params.kv_heads * COLUMNS;
        return true;
    }
    return false;
}

/* How many pages of a run begin below a position. */
static __device__ uint32_t pages_below(const cuda_page *entries, uint32_t pages, uint32_t position) {
    if (pages == 0 || cuda_page_index(entries[pages - 1]) * TOKENS < position)
        return pages;
    uint32_t low = 0, high = pages - 1;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (cuda_page_index(entries[middle]) * TOKENS < position)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* --- the walk over the pages ------------------------------------------------------------------------------------------------ */

template <int D>
static __device__ __forceinline__ void attend_packed(const struct cuda_prefill_params &params, struct shared<D> &mem,
                                                     const struct columns &columns, struct partial<D> &partial,
                                                     uint32_t stage, uint32_t parity) {
    uint32_t index = mem.index[stage], position = index * TOKENS;
    if (position >= columns.most)
        return;
    float2 page_turn[4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i / 2 * 8 < columns.pairs)
            page_turn[i] = *reinterpret_cast<const float2 *>(
                params.page_turn +
                (static_cast<uint64_t>(index) * params.frequencies + mem.frequency[4 * i + threadIdx.x % 4]) * 2);
    float score[8][4] = {};
    struct weights weights;
    packed_products<D>(score, mem, mem.record[stage]);
    scale_products<D>(score, mem, parity, columns.sum, columns.sigma);
    if (columns.pairs > 0)
        add_centre<D>(score, mem, page_turn, columns.pairs);
    soften<D>(weights, score, partial, columns, mem, parity, position);
    add_packed_values<D>(partial, weights, mem, mem.record[stage], parity);
}

static __device__ __forceinline__ uint32_t rows_of(const struct cuda_batch_item &item, uint32_t index) {
    return min(item.tokens - index * TOKENS, static_cast<uint32_t>(TOKENS));
}

template <int D>
static __device__ void walk_packed(const struct cuda_prefill_params &params, struct shared<D> &mem,
                                   const struct tile &tile, uint32_t end, const struct columns &columns,
                                   struct partial<D> &partial) {
    const struct cuda_batch_item &item = *tile.item;
    const cuda_page *entries = params.batch.entries + item.packed_first;
    uint32_t pages = pages_below(entries, item.packed_pages, end);
    uint64_t offset = params.packed_offset + tile.kv_head * shape<D>::record_bytes;
    if (pages == 0)
        return;
    for (uint32_t p = 0; p < STAGES - 1; p++) {
        if (p < pages)
            fetch_packed<D>(mem, p, entries[p], offset);
        copies_commit();
    }
    cuda_page next = STAGES - 1 < pages ? entries[STAGES - 1] : 0;
    copies_wait<STAGES - 2>();
    __syncthreads();
    prepare_packed<D>(mem, 0, 0, rows_of(item, mem.index[0]));
    for (uint32_t p = 0; p < pages; p++) {
        copies_wait<STAGES - 3>();
        __syncthreads(); /* page p is prepared, page p + 1 is there, page p - 1 is done with */
        if (p + STAGES - 1 < pages) {
            fetch_packed<D>(mem, (p + STAGES - 1) % STAGES, next, offset);
            next = p + STAGES < pages ? entries[p + STAGES] : 0;
        }
        copies_commit();
        if (p + 1 < pages)
            prepare_packed<D>(mem, (p + 1) % STAGES, (p + 1) % 2, rows_of(item, mem.index[(p + 1) % STAGES]));
        attend_packed<D>(params, mem, columns, partial, p % STAGES, p % 2);
    }
    copies_wait<0>();
    __syncthreads();
}

template <int D>
static __device__ void walk_dense(const struct cuda_prefill_params &params, struct shared<D> &mem,
                                  const struct tile &tile, uint32_t end, const struct columns &columns,
                                  struct partial<D> &partial) {
    const float nothing[2] = {0, 0};
    const struct cuda_batch_item &item = *tile.item;
    const cuda_page *entries = params.batch.entries + item.dense_first;
    uint32_t pages = pages_below(entries, item.dense_pages, end);
    uint64_t offset = params.dense_offset + static_cast<uint64_t>(tile.kv_head) * shape<D>::dense_bytes;
    for (uint32_t p = 0; p < pages; p++) {
        uint32_t index = cuda_page_index(entries[p]), position = index * TOKENS;
        prepare_dense<D>(mem, entries[p], offset, rows_of(item, index));
        if (position < columns.most) {
            float score[8][4] = {};
            struct weights weights;
            dense_products<D>(score, mem);
            scale_products<D>(score, mem, 0, nothing, nothing);
            soften<D>(weights, score, partial, columns, mem, 0, position);
            add_dense_values<D>(partial, weights, mem);
        }
        __syncthreads();
    }
}

/* Positions that a column of the item sees; columns behind the last one see what that sees. */
static __device__ uint32_t visible_to(const struct cuda_prefill_params &params, const struct cuda_batch_item &item,
                                      uint32_t column) {
    uint32_t row = min(column / params.group, item.rows - 1);
    return item.tokens == 0 ? 0 : item.tokens - (item.rows - 1 - row);
}

template <int D>
static __device__ void attend_tile(const struct cuda_prefill_params &params, struct shared<D> &mem,
                                   const struct tile &tile) {
    const struct cuda_batch_item &item = *tile.item;
    const struct cuda_head &head = params.heads[tile.kv_head];
    prepare_queries<D>(params, head, mem, tile);

    uint32_t warp_column = threadIdx.x / 32 * WARP_COLUMNS;
    struct columns columns;
    columns.pairs = head.pairs;
    columns.least = visible_to(params, item, tile.first_column + warp_column);
    columns.most = visible_to(params, item, tile.first_column + warp_column + WARP_COLUMNS - 1);
    struct partial<D> partial = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t column = warp_column + threadIdx.x % 32 / 4 + 8 * half;
        columns.visible[half] = visible_to(params, item, tile.first_column + column);
        columns.unit[half] = mem.unit[column];
        columns.sigma[half] = mem.sigma[column];
        columns.sum[half] = mem.sum[column];
        partial.max[half] = -INFINITY;
    }
    uint32_t end = visible_to(params, item, tile.first_column + COLUMNS - 1);
    walk_packed<D>(params, mem, tile, end, columns, partial);
    walk_dense<D>(params, mem, tile, end, columns, partial);
    write_outputs<D>(params, head, mem, tile, partial);
}

template <int D> static __device__ __forceinline__ void prefill(const struct cuda_prefill_params &params) {
    static_assert(sizeof(struct shared<D>) <= CUDA_PREFILL_SHARED_BYTES(D), "the host asks for what the kernel uses");
    struct shared<D> &mem = *reinterpret_cast<struct shared<D> *>(block_memory());
    struct walk walk = {0, 0};
    struct tile tile;
    for (uint64_t number = blockIdx.x; find_tile<D>(params, mem, walk, number, tile); number += gridDim.x)
        attend_tile<D>(params, mem, tile);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
    prefill_64(const __grid_constant__ struct cuda_prefill_params params) {
    prefill<64>(params);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    prefill_128(const __grid_constant__ struct cuda_prefill_params params) {
    prefill<128>(params);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill_256(const __grid_constant__ struct cuda_prefill_params params) {
    prefill<256>(params);
}
