/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decode attention over a ragged batch, for one head size (DECODE_HEAD_DIM).
 *
 * A segment is one (item, block of 4 or 8 query columns); a unit is what one slot of shared memory takes of it: a packed page, or 8
 * tokens of a dense one, which have as many bytes. A KV head's units, segment after segment, are divided evenly among its
 * slices, a slice's among the warps of one block (the plan: decode_plan.c). So no block meets two KV heads at once.
 *
 * A warp works for itself: it copies its units to its own ring of slots, some units ahead, and sums them up in registers, with no
 * barrier of the block in between. It finishes segments that are all its own; of the first and the last one it may have parts,
 * which it parks: decode_merge.cuh. What it needs only where segments meet stays in shared memory (struct notes), so that the
 * registers are there for the units.
 */
#include "kernels/cuda/decode_merge.cuh"

struct segment {
    uint32_t item, block;
};

struct notes {
    struct sight sight;       /* of the segment that is summed up */
    struct segment now;       /* the same */
    struct segment to_come;   /* of the unit to come */
    struct segment parked[2]; /* the two parts that a warp may park, */
    uint32_t slot[2];         /* and their addresses; 0: there is none */
    uint32_t padding[2];
};
static_assert(sizeof(struct notes) == CUDA_DECODE_NOTES_BYTES, "as the host counts them");

/* Shared memory, as counted by CUDA_DECODE_SHARED_BYTES: rings, queries, table, barrier and position of each slot, notes. */
template <int D, int C, int P> struct shared_plan {
    uint32_t warps, stages;
    static __device__ __forceinline__ uint32_t base() { return shared_address(block_memory()); }
    __device__ __forceinline__ uint32_t ring(uint32_t warp) const {
        return base() + warp * stages * CUDA_DECODE_SLOT_BYTES(D);
    }
    __device__ __forceinline__ uint32_t queries(uint32_t i) const {
        return ring(warps) + i * CUDA_DECODE_QUERY_BYTES(D, C, P);
    }
    __device__ __forceinline__ uint32_t table() const { return queries(CUDA_DECODE_QUERIES(C)); }
    __device__ __forceinline__ uint32_t barriers(uint32_t warp) const {
        return table() + CUDA_DECODE_TABLE_BYTES(P) + warp * stages * 16;
    }
    __device__ __forceinline__ struct notes *notes(uint32_t warp) const {
        return reinterpret_cast<struct notes *>(block_memory() + (barriers(warps) - base())) + warp;
    }
    /* The segments whose queries are prepared; without one it is that of no item. */
    __device__ __forceinline__ struct segment *prepared() const {
        return reinterpret_cast<struct segment *>(notes(CUDA_DECODE_MAX_WARPS));
    }
};

static __device__ __forceinline__ bool same_segment(const struct segment &a, const struct segment &b) {
    return a.item == b.item && a.block == b.block;
}

static __device__ __forceinline__ uint32_t dense_units(const struct cuda_batch_item &item) {
    return (item.dense_tokens + CUDA_DECODE_TILE - 1) / CUDA_DECODE_TILE;
}

/* Items of more rows are prefilled. */
template <int C>
static __device__ __forceinline__ struct segment next_segment(const struct cuda_decode_params &params,
                                                              struct segment segment) {
    const struct cuda_batch_item *items = params.batch.items;
    if (++segment.block * C < items[segment.item].rows * params.group)
        return segment;
    do
        segment.item++;
    while (items[segment.item].rows > CUDA_MAX_DECODE_ROWS || items[segment.item].rows == 0);
    segment.block = 0;
    return segment;
}

/* --- units on their way --- */

#define FEED_PACKED (-1)
#define FEED_NOTHING (-2)

struct feed {
    uint32_t left;          /* units to come for the warp */
    uint32_t run;           /* of them in a row of one kind */
    int tile;               /* of a dense page, or one of the two above */
    const cuda_page *entry; /* of the unit to come */
    cuda_page page;
};

/* Stands before unit `unit` of the segment. */
static __device__ __forceinline__ void feed_stand(feed &feed, const struct cuda_batch_view &batch,
                                                  const struct cuda_batch_item &item, uint32_t unit) {
    uint32_t dense = dense_units(item);
    if (unit < item.packed_pages) {
        feed.tile = FEED_PACKED;
        feed.run = item.packed_pages - unit;
        feed.entry = batch.entries + item.packed_first + unit;
    } else if (dense > 0) {
        unit -= item.packed_pages;
        feed.tile = static_cast<int>(unit % 8);
        feed.run = dense - unit;
        feed.entry = batch.entries + item.dense_first + unit / 8;
    } else {
        feed.tile = FEED_NOTHING;
        feed.run = 1;
        return;
    }
    feed.page = __ldg(feed.entry);
}

/* Copies the unit to come into a slot, whose barrier hears of it, and goes on to the next one. */
template <int D, int C>
static __device__ __forceinline__ void feed_slot(feed &feed, const struct cuda_decode_params &params, uint32_t record,
                                                 struct segment &segment, uint32_t slot, uint32_t barrier) {
    using shape = dense_slot<D>;
    uint32_t lane = threadIdx.x & 31, position = cuda_page_index(feed.page) * 64;
    uint64_t page = cuda_page_address(feed.page);
    if (feed.tile == FEED_PACKED) {
        uint64_t from = page + static_cast<uint64_t>(record) * CUDA_DECODE_SLOT_BYTES(D);
#if CUDA_BULK_COPIES
        if (lane == 0) {
            store_shared(barrier + 8, position);
            barrier_expect(barrier, CUDA_DECODE_SLOT_BYTES(D));
            copy_bulk(slot, from, CUDA_DECODE_SLOT_BYTES(D), barrier);
        }
#else
        for (uint32_t at = 16 * lane; at < CUDA_DECODE_SLOT_BYTES(D); at += 512)
            copy_16(slot + at, from + at);
#endif
    } else if (feed.tile >= 0) {
        uint64_t from = page + static_cast<uint64_t>(record) * (256 * D) + feed.tile * (CUDA_DECODE_TILE * 2 * D);
        position += feed.tile * CUDA_DECODE_TILE;
#if CUDA_BULK_COPIES
        uint32_t token = lane % CUDA_DECODE_TILE;
        if (lane == 0) {
            store_shared(barrier + 8, position);
            barrier_expect(barrier, CUDA_DECODE_TILE * 4 * D);
        }
        __syncwarp();
        if (lane < CUDA_DECODE_TILE)
            copy_bulk(slot + token * shape::k_pitch, from + token * (2 * D), 2 * D, barrier);
        else if (lane < 2 * CUDA_DECODE_TILE)
            copy_bulk(slot + shape::v + token * shape::v_pitch, from + 128 * D + token * (2 * D), 2 * D, barrier);
#else
        for (uint32_t at = 16 * lane; at < CUDA_DECODE_TILE * 2 * D; at += 512) {
            uint32_t token = at / (2 * D), in_row = at % (2 * D);
            copy_16(slot + token * shape::k_pitch + in_row, from + at);
            copy_16(slot + shape::v + token * shape::v_pitch + in_row, from + 128 * D + at);
        }
#endif
    } else {
#if CUDA_BULK_COPIES
        if (lane == 0)
            barrier_expect(barrier, 0);
#endif
    }
#if !CUDA_BULK_COPIES
    if (lane == 0)
        store_shared(barrier + 8, position);
#endif
    if (--feed.left == 0)
        return;
    if (--feed.run > 0) {
        if (feed.tile == FEED_PACKED || ++feed.tile == CUDA_DECODE_TILE) {
            feed.tile = feed.tile == FEED_PACKED ? FEED_PACKED : 0;
            feed.entry++;
        }
        feed.page = __ldg(feed.entry);
        return;
    }
    /* The segment's dense run, or the next segment. */
    struct segment at = segment;
    const struct cuda_batch_item *item = &params.batch.items[at.item];
    uint32_t unit = item->packed_pages;
    if (feed.tile != FEED_PACKED || item->dense_tokens == 0) {
        at = next_segment<C>(params, at);
        item = &params.batch.items[at.item];
        unit = 0;
        __syncwarp();
        segment = at;
        __syncwarp();
    }
    feed_stand(feed, params.batch, *item, unit);
}

/* --- the block --- */

/* Merges what the warps parked. Lane 2w + i looks at part i of warp w; parts of one segment follow each other. */
template <int D, int C, int P>
static __device__ __forceinline__ void finish_block(const struct cuda_decode_params &params,
                                                    const shared_plan<D, C, P> &plan, uint32_t kv_head,
                                                    uint32_t slice) {
    const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const struct cuda_decode_slice spans = params.slices[slice];
    struct segment segment = {0, 0};
    uint32_t slot = 0;
    if (lane < 2 * plan.warps) {
        segment = plan.notes(lane / 2)->parked[lane % 2];
        slot = plan.notes(lane / 2)->slot[lane % 2];
    }
    const uint32_t there = __ballot_sync(WARP_LANES, slot != 0);
    const uint32_t earlier = there & ((1U << lane) - 1);
    const int before = earlier ? 31 - __clz(static_cast<int>(earlier)) : 0;
    const struct segment previous = {__shfl_sync(WARP_LANES, segment.item, before),
                                     __shfl_sync(WARP_LANES, segment.block, before)};
    const uint32_t leaders = __ballot_sync(WARP_LANES, slot != 0 && (!earlier || !same_segment(previous, segment)));
    uint32_t task = 0;
    for (uint32_t left = leaders; left != 0; left &= left - 1) {
        const int leader = __ffs(static_cast<int>(left)) - 1;
        const uint32_t later = left & (left - 1);
        const uint32_t members = there & ~((1U << leader) - 1) & (later ? (later & -later) - 1 : 0xFFFFFFFFU);
        const struct segment of = {__shfl_sync(WARP_LANES, segment.item, leader),
                                   __shfl_sync(WARP_LANES, segment.block, leader)};
        /* Only a slice's first and last segment extend beyond it. */
        const bool first = same_segment(of, plan.prepared()[0]);
        const uint32_t from = first ? spans.first_from : later ? slice : spans.last_from;
        const uint32_t to = first ? spans.first_to : later ? slice : spans.last_to;
        for (int c = 0; c < C; c++, task++)
            if (task % plan.warps == warp)
                finish_parts<D, C>(params, kv_head, slice, from, to, of.item, of.block, c, members, slot);
    }
}

template <int D, int C, int P> static __device__ __forceinline__ void decode(const struct cuda_decode_params &params) {
    const shared_plan<D, C, P> plan = {blockDim.x / 32, params.stages};
    const uint32_t warp = __shfl_sync(WARP_LANES, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
    const uint32_t ring = plan.ring(warp), barriers = plan.barriers(warp);
    struct notes &notes = *plan.notes(warp);
#if CUDA_BULK_COPIES
    /* By one lane: where each opened its own, nvcc 13.0 used the stack pointer's register for the addresses. */
    if (lane == 0) {
        for (uint32_t i = 0; i < plan.stages; i++)
            barrier_open(barriers + 16 * i);
        barriers_opened();
    }
    __syncwarp();
    uint32_t phases = 0;
#endif

    for (uint32_t work = blockIdx.x; work < params.kv_heads * params.slice_count; work += gridDim.x) {
        const uint32_t kv_head = work / params.slice_count, slice = work % params.slice_count;
        const uint32_t record = params.first_record + kv_head;
        uint32_t units; /* of this warp */
        struct feed feed = {0, 0, FEED_NOTHING, nullptr, 0};

        auto fill = [&](uint32_t i) {
            if (feed.left > 0)
                feed_slot<D, C>(feed, params, record, notes.to_come, ring + i * CUDA_DECODE_SLOT_BYTES(D),
                                barriers + 16 * i);
#if !CUDA_BULK_COPIES
            copies_commit();
#endif
            __syncwarp(); /* all lanes may ask for its position */
        };
        /* Where the segment's query is prepared; 0: nowhere. */
        auto area_of = [&](const struct segment &segment) -> uint32_t {
            for (uint32_t i = 0; i < CUDA_DECODE_QUERIES(C); i++)
                if (same_segment(segment, plan.prepared()[i]))
                    return plan.queries(i);
            return 0;
        };

        {
            /* Every lane looks at one warp's start. The segments with which most warps begin are prepared together. */
            const struct cuda_decode_start start = params.starts[slice * plan.warps + min(lane, plan.warps - 1)];
            if (__all_sync(WARP_LANES, start.units == 0))
                continue;
            const struct segment first = {__shfl_sync(WARP_LANES, start.item, 0),
                                          __shfl_sync(WARP_LANES, start.block, 0)};
            const struct segment own = {__shfl_sync(WARP_LANES, start.item, warp),
                                        __shfl_sync(WARP_LANES, start.block, warp)};
            const uint32_t others =
                __ballot_sync(WARP_LANES, start.units > 0 && !same_segment({start.item, start.block}, first));
            const int from = others ? __ffs(static_cast<int>(others)) - 1 : 0;
            const struct segment other = {__shfl_sync(WARP_LANES, start.item, from),
                                          __shfl_sync(WARP_LANES, start.block, from)};
            const bool two = CUDA_DECODE_QUERIES(C) > 1 && others != 0;
            const uint32_t unit = __shfl_sync(WARP_LANES, start.unit, warp);
            units = __shfl_sync(WARP_LANES, start.units, warp);
            notes.to_come = own;
            notes.now = own;
            notes.slot[0] = notes.slot[1] = 0;
            notes.padding[0] = unit;
            __syncwarp();
            feed.left = units;
            feed_stand(feed, params.batch, params.batch.items[own.item], unit);
            for (uint32_t i = 0; i < plan.stages; i++)
                fill(i);
            if (threadIdx.x == 0) {
                plan.prepared()[0] = first;
                if (CUDA_DECODE_QUERIES(C) > 1)
                    plan.prepared()[1] = two ? other : segment{0xFFFFFFFF, 0};
            }
            for (uint32_t task = warp; task < (two ? 2U : 1U) * C; task += plan.warps) {
                const struct segment &of = task < C ? first : other;
                column_write<D, C, P>(column_make<D, C, P>(params, kv_head, of.item, of.block, task % C),
                                      plan.queries(task / C), task % C);
            }
            if constexpr (P > 0)
                table_fill<P>(params, params.heads[kv_head], plan.table());
        }
        __syncthreads();

        uint32_t packed_left = 0, units_left = 0, tokens = 0, lowest = 0;
        bool whole = false;
        query<D, C> query;
        centre<C, P> centre;
        state<D, C> state;
        /* Begins with unit `unit` of the segment in the notes. */
        auto enter = [&](uint32_t unit) {
            const struct segment segment = notes.now;
            uint32_t area = area_of(segment);
            if (area == 0) {
                query_make<D, C, P>(params, kv_head, segment.item, segment.block, query, centre);
            } else {
                query_load<D, C, P>(query, area);
                centre_load<D, C, P>(centre, area);
            }
            const struct cuda_batch_item &item = params.batch.items[segment.item];
            tokens = item.tokens;
            const struct sight sight = {tokens - item.rows + 1, item.rows - 1, segment.block * C, params.group};
            notes.sight = sight;
            lowest = sight.first_limit + min(sight.first_column / params.group, sight.last_row);
            packed_left = item.packed_pages > unit ? item.packed_pages - unit : 0;
            units_left = max(item.packed_pages + dense_units(item), 1) - unit;
            whole = unit == 0;
            state_open<D, C>(state);
            __syncwarp();
        };

        uint32_t slot = 0, reserved = plan.stages;
        if (units > 0)
            enter(notes.padding[0]);
        centre_open<C, P>(centre, params, params.heads[kv_head]);
        for (; units > 0; units--) {
            const uint32_t at = ring + slot * CUDA_DECODE_SLOT_BYTES(D), barrier = barriers + 16 * slot;
            const uint32_t position = load_shared(barrier + 8);
            if (P > 0 && packed_left > 0)
                centre_fetch<C, P>(centre, params, position / 64);
#if CUDA_BULK_COPIES
            barrier_wait(barrier, phases >> slot & 1);
            phases ^= 1U << slot;
#else
            copies_wait(reserved < plan.stages ? plan.stages - 2 : plan.stages - 1);
            __syncwarp();
#endif
            if (packed_left > 0) {
                packed_left--;
                attend_packed<D, C, P>(state, query, centre, plan.table(), at, shared_address(&notes.sight), position,
                                       position + 64 > lowest);
            } else if (tokens > 0) {
                attend_dense<D, C>(state, query, at, shared_address(&notes.sight), position,
                                   min(tokens - position, CUDA_DECODE_TILE), position + CUDA_DECODE_TILE > lowest);
            }
            __syncwarp();

            bool stays = false;
            if (--units_left == 0) {
                park<D, C>(state, at);
                __syncwarp();
                if (whole) {
                    for (int c = 0; c < C; c++)
                        finish_parts<D, C>(params, kv_head, slice, slice, slice, notes.now.item, notes.now.block, c, 1,
                                           at);
                } else {
                    stays = true;
                    reserved = slot;
                    if (lane == 0) {
                        notes.parked[0] = notes.now;
                        notes.slot[0] = at;
                    }
                }
                __syncwarp();
                copies_follow_stores();
                if (units > 1) {
                    const struct segment next = next_segment<C>(params, notes.now);
                    __syncwarp();
                    notes.now = next;
                    __syncwarp();
                    enter(0);
                }
            } else if (units == 1) {
                stays = true;
                park<D, C>(state, at);
                if (lane == 0) {
                    notes.parked[1] = notes.now;
                    notes.slot[1] = at;
                }
            }
            if (!stays)
                fill(slot);
            slot = slot + 1 == plan.stages ? 0 : slot + 1;
            if (slot == reserved)
                slot = slot + 1 == plan.stages ? 0 : slot + 1;
        }
        __syncthreads();
        finish_block<D, C, P>(params, plan, kv_head, slice);
        copies_follow_stores();
        __syncthreads();
    }
}

#define DECODE_KERNEL(columns, pairs)                                                                                  \
    extern "C" __global__ void __launch_bounds__(DECODE_HEAD_DIM == 256 ? 256 : 512, 1)                                \
        decode_##columns##_##pairs(const __grid_constant__ struct cuda_decode_params params) {                         \
        decode<DECODE_HEAD_DIM, columns, pairs>(params);                                                               \
    }

DECODE_KERNEL(4, 0)
DECODE_KERNEL(4, 8)
DECODE_KERNEL(4, 16)
DECODE_KERNEL(8, 0)
DECODE_KERNEL(8, 8)
DECODE_KERNEL(8, 16)
