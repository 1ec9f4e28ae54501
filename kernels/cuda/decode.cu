/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decode attention over a ragged batch, for one head size (DECODE_HEAD_DIM).
 *
 * A segment is one (item, block of 4 or 8 query columns); a unit is what one slot of shared memory takes of it: a packed page, or 8
 * tokens of a dense one, which have as many bytes. A KV head's units, segment after segment, are divided evenly among its
 * slices, a slice's among the warps of one block (the plan: decode_plan.c). So no block meets two KV heads at once.
 *
 * A warp works for itself: it copies its units to slots of its own, one ahead, and sums them up in registers, with no
 * barrier of the block in between. It asks for one when the one before it has come: more on their way would only queue up at
 * the memory, which then serves some processors much sooner than others. It finishes segments that are all its own; of
 * the first and the last one it may have parts, which it parks: decode_merge.cuh. What it needs only where segments meet
 * stays in shared memory (struct notes), so that the registers are there for the units.
 */
#include "kernels/cuda/decode_feed.cuh"
#include "kernels/cuda/decode_merge.cuh"
#include "kernels/cuda/decode_packed.cuh"

struct block_notes {
    struct segment prepared[CUDA_DECODE_MOST_QUERIES]; /* those whose queries are prepared; of no item: none */
    uint32_t first_from, first_to, last_from, last_to; /* of the slice */
    /* Results that wait, where the rotated columns were, until all warps rotate them back by a matrix: their addresses; 0: none. */
    uint64_t waiting[CUDA_DECODE_MOST_COLUMNS];
};
static_assert(sizeof(struct block_notes) == CUDA_DECODE_BLOCK_NOTES_BYTES, "as the host counts them");

/* Shared memory, as counted by CUDA_DECODE_SHARED_BYTES: slots, each with its barrier and tag behind it, queries, their columns
 * rotated, table, notes. */
template <int D, int C, int P> struct shared_plan {
    uint32_t warps;
    static __device__ __forceinline__ uint32_t base() { return shared_address(block_memory()); }
    __device__ __forceinline__ uint32_t slots(uint32_t warp) const {
        return base() + warp * CUDA_DECODE_SLOTS * CUDA_DECODE_SLOT_PITCH(D);
    }
    __device__ __forceinline__ uint32_t queries(uint32_t i) const {
        return slots(warps) + i * CUDA_DECODE_QUERY_BYTES(D, C, P);
    }
    __device__ __forceinline__ uint32_t rotated(uint32_t i) const {
        return queries(CUDA_DECODE_QUERIES(C)) + i * CUDA_DECODE_ROTATED_BYTES(D, C);
    }
    __device__ __forceinline__ uint32_t table() const { return rotated(CUDA_DECODE_QUERIES(C)); }
    __device__ __forceinline__ struct notes *notes(uint32_t warp) const {
        return reinterpret_cast<struct notes *>(block_memory() + (table() + CUDA_DECODE_TABLE_BYTES(P) - base())) +
               warp;
    }
    __device__ __forceinline__ struct block_notes *block_notes() const {
        return reinterpret_cast<struct block_notes *>(notes(CUDA_DECODE_MAX_WARPS));
    }
};

/* Makes a segment's query in registers, where nobody made it in shared memory. */
template <int D, int C, int P>
static __device__ __forceinline__ void query_make(const struct cuda_decode_params &params, uint32_t kv_head,
                                                  uint32_t item, uint32_t block, query<D, C> &query,
                                                  centre<C, P> &centre) {
    const int lane = static_cast<int>(rare_lane()), g = lane >> 2, t = lane & 3;
#pragma unroll 1
    for (int c = 0; c < C; c++) {
        const column<D> column = column_make<D, P>(params, kv_head, column_read<D, C>(params, kv_head, item, block, c));
        bool mine = (C == 4 ? g / 2 : g) == c; /* B's column */
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            uint32_t high = __shfl_sync(WARP_LANES, column.high[i / 8], 4 * (i % 8) + t);
            uint32_t low = __shfl_sync(WARP_LANES, column.low[i / 8], 4 * (i % 8) + t);
            if (mine) {
                query.word[0][i] = C == 4 && (g & 1) ? low : high;
                if (C == 8)
                    query.word[C / 8][i] = low;
            }
        }
#pragma unroll
        for (int e = 0; e < C / 4; e++)
            if (t * (C / 4) + e == c) {
                query.sum[e] = column.sum;
                query.scale[e] = column.scale;
                query.sigma[e] = column.sigma;
            }
#pragma unroll
        for (int i = 0; i < centre.own; i++) {
            float2 base = make_float2(__shfl_sync(WARP_LANES, column.turn, 2 * own_pair<C>(i)),
                                      __shfl_sync(WARP_LANES, column.turn, 2 * own_pair<C>(i) + 1));
            if (mine)
                centre.base[i] = base;
        }
    }
}

/* Merges what the warps parked. Lane 2w + i looks at part i of warp w; parts of one segment follow each other. */
template <int D, int C, int P>
static __device__ __forceinline__ void finish_block(const struct cuda_decode_params &params,
                                                    const shared_plan<D, C, P> &plan, uint32_t kv_head,
                                                    uint32_t slice) {
    const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const struct block_notes spans = *plan.block_notes();
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
    const float *const matrix = params.heads[kv_head].rotation_v;
    constexpr uint32_t most = CUDA_DECODE_QUERIES(C) * C; /* that may wait */
    auto waits_at = [&](uint32_t i) { return plan.rotated(0) + i * (4 * D); };
    uint32_t column = warp; /* of the leader's columns the warp's next one */
    for (uint32_t left = leaders, done = 0; left != 0; left &= left - 1, done += C) {
        const int leader = __ffs(static_cast<int>(left)) - 1;
        const uint32_t later = left & (left - 1);
        const uint32_t members = there & ~((1U << leader) - 1) & (later ? (later & -later) - 1 : 0xFFFFFFFFU);
        const struct segment of = {__shfl_sync(WARP_LANES, segment.item, leader),
                                   __shfl_sync(WARP_LANES, segment.block, leader)};
        /* Only a slice's first and last segment extend beyond it. */
        const bool first = same_segment(of, spans.prepared[0]);
        const uint32_t from = first ? spans.first_from : later ? slice : spans.last_from;
        const uint32_t to = first ? spans.first_to : later ? slice : spans.last_to;
        for (; column < C; column += plan.warps)
            finish_parts<D, C>(params, kv_head, slice, from, to, of.item, of.block, static_cast<int>(column), members,
                               slot, [&](const result_place &place, float(&o)[row<D>::values], float m, float l) {
                                   const uint32_t i = done + column;
                                   if (!matrix || !place.there || i >= most) {
                                       finish_column<D>(params, place, o, m, l);
                                       return;
                                   }
                                   column_divide<D>(params, place, o, m, l);
                                   column_leave<D>(o, waits_at(i));
                                   if (lane == 0)
                                       plan.block_notes()->waiting[i] = place.out;
                               });
        column -= C;
    }
    if (!matrix)
        return;
    __syncthreads();
    for (uint32_t task = warp; task < most * (D / 32); task += plan.warps) {
        const uint32_t i = task / (D / 32);
        const uint64_t to = plan.block_notes()->waiting[i];
        if (to == 0)
            continue;
        float o[row<D>::values];
#pragma unroll
        for (int chunk = 0; chunk < row<D>::chunks; chunk++) {
            const float4 x = load_shared_floats(waits_at(i) + 4 * row<D>::own(lane) + 512 * chunk);
            o[4 * chunk] = x.x;
            o[4 * chunk + 1] = x.y;
            o[4 * chunk + 2] = x.z;
            o[4 * chunk + 3] = x.w;
        }
        write_rotated<D>(params, to, matrix, o, 32 * static_cast<int>(task % (D / 32)));
    }
}

template <int D, int C, int P> static __device__ __forceinline__ void decode(const struct cuda_decode_params &params) {
    const shared_plan<D, C, P> plan = {blockDim.x / 32};
    const uint32_t warp = __shfl_sync(WARP_LANES, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
    struct notes &notes = *plan.notes(warp);
    auto tag_of = [&](uint32_t at) { return load_shared(slot_tag<D>(at)); };

    for (uint32_t work = blockIdx.x; work < params.kv_heads * params.slice_count; work += gridDim.x) {
        const uint32_t kv_head = work / params.slice_count, slice = work % params.slice_count;
        const uint32_t record = params.first_record + kv_head;
        /* Slots: of the unit to sum up, of the one after it, and one that is free until one of them is parked in. */
        uint32_t at = plan.slots(warp), next = at + CUDA_DECODE_SLOT_PITCH(D), spare = next + CUDA_DECODE_SLOT_PITCH(D);
        struct feed feed = {};
        centre<C, P> centre;

        auto fill = [&](uint32_t at, uint32_t before) {
            if (feed.left > 0) {
                feed_slot<D>(feed, at, before);
                if (feed.left % 32 == 0 && feed.left > 0)
                    feed_look<D, C>(feed, params, record, notes);
            }
            __syncwarp(); /* all lanes may ask for its tag */
        };
        /* Notes what the warp's next units belong to. */
        auto begin = [&](const struct segment &segment) {
            const struct cuda_batch_item &item = params.batch.items[segment.item];
            notes.now = segment;
            notes.sight = {item.tokens - item.rows + 1, item.rows - 1, segment.block * C, params.group};
        };
        /* Asks for the turns of the page whose tag is in the slot; of one that waits to be filled, for some page's. */
        auto fetch = [&](uint32_t at) { centre_fetch<C, P>(centre, params, (tag_of(at) & UNIT_POSITION) / 64); };
        /* Where the segment's query is prepared; 0: nowhere. */
        auto area_of = [&](const struct segment &segment) -> uint32_t {
            for (uint32_t i = 0; i < CUDA_DECODE_QUERIES(C); i++)
                if (same_segment(segment, plan.block_notes()->prepared[i]))
                    return plan.queries(i);
            return 0;
        };

        uint32_t left; /* units to sum up */
        {
            /* All that lies far away is asked for before anything is known of it: what waits for something waits once. */
            const struct cuda_decode_start start = params.starts[slice * plan.warps + warp];
            const struct cuda_decode_slice &of = params.slices[slice];
            const struct cuda_head &head = params.heads[kv_head];
            const uint32_t first_item = of.query[0].item, second_item = of.query[1].item;
            uint32_t task = warp % (CUDA_DECODE_QUERIES(C) * C);
            int64_t column = column_first(params, kv_head, of.query[task / C], task % C);
            bool there = task % C < of.query[task / C].columns;
            const bool together = head.rotation_k; /* all warps rotate: a matrix has as many bytes as 14 pages */
            const float *const centred = head.centre_static;
            const uint32_t centre_work = centred ? head.pairs + 1 : 0;
            if (work == blockIdx.x)
                slots_open<D>(at);
            if (first_item == CUDA_DECODE_NO_ITEM)
                continue;
            struct raw_column<D> raw = column_load<D>(params, column, there);
            const bool two = CUDA_DECODE_QUERIES(C) > 1 && second_item != CUDA_DECODE_NO_ITEM;
            const uint32_t tasks = (two ? 2U : 1U) * C;
            centre_rows<D> rows = {};
            if (warp < centre_work)
                rows = centre_read<D>(head, warp);
            left = __shfl_sync(WARP_LANES, start.units, 0); /* in a register of the warp */
            notes.whole = start.unit == 0;
            notes.to_come = {start.item, start.block};
            notes.unit_to_come = start.unit;
            notes.slot[0] = notes.slot[1] = 0;
            __syncwarp();
            if (threadIdx.x == 0)
                *plan.block_notes() = {{{of.query[0].item, of.query[0].block}, {of.query[1].item, of.query[1].block}},
                                       of.first_from,
                                       of.first_to,
                                       of.last_from,
                                       of.last_to,
                                       {}};
            feed.left = left;
            if (left > 0) {
                feed_look<D, C>(feed, params, record, notes);
                begin({start.item, start.block});
            }
            uint4 table_share = {};
            if constexpr (P > 0) {
                if (threadIdx.x < CUDA_DECODE_TABLE_BYTES(P) / 16)
                    table_share = table_read(head, threadIdx.x);
                centre_open<C, P>(centre, head);
            }
            auto parts = [&](uint32_t task) {
                return rotation_parts<D>{plan.slots(task % plan.warps), task / plan.warps * plan.warps,
                                         together ? plan.warps : 0};
            };
            if (__builtin_expect(together, false)) {
                for (uint32_t i = 0; i < tasks / C; i++)
                    rotate_share<D, C>(params, kv_head, of.query[i], warp, plan.warps,
                                       [&](uint32_t c) { return parts(i * C + c); });
                __syncthreads();
            }
            /* The warps that make the queries do so before they ask for pages, behind which what they need would wait. */
            for (task = warp; task < tasks; task += plan.warps) {
                const struct cuda_decode_query &query = of.query[task / C];
                if (task != warp)
                    raw = column_load<D>(params, column_first(params, kv_head, query, task % C),
                                         task % C < query.columns);
                float x[row<D>::values];
                if (together) {
                    column_gather<D>(parts(task), x);
                } else {
                    column_floats<D>(params, raw, x);
                    rotate_hadamard<D, row<D>::lanes, 4>(x, lane);
                }
                column_write<D, C, P>(column_fix<D>(params, x), plan.queries(task / C), task % C);
                if (centred)
                    column_leave<D>(x, plan.rotated(task / C) + task % C * (4 * D));
            }
            __syncwarp(); /* all lanes have read the parts of a rotation, which lay in slots */
            copies_follow_stores();
            if constexpr (P > 0)
                table_fill<P>(head, table_share, plan.table());
            /* One page is asked for before the queries are waited for, the next one after it: asking takes long. */
            fill(at, tag_of(at));
            __syncthreads();
            for (uint32_t i = warp; i < centre_work; i += plan.warps) {
                if (i != warp)
                    rows = centre_read<D>(head, i);
                for (uint32_t query = 0; query < tasks / C; query++)
                    centre_share<D, C, P>(params, rows, i, plan.rotated(query), plan.queries(query));
            }
            if (centre_work > 0)
                __syncthreads();
        }
        fill(next, tag_of(next));
        if constexpr (P > 0)
            fetch(at);

        query<D, C> query;
        state<D, C> state;
        /* Begins with the segment in the notes. */
        auto enter = [&]() {
            const struct segment segment = notes.now;
            uint32_t area = area_of(segment);
            if (area == 0) {
                query_make<D, C, P>(params, kv_head, segment.item, segment.block, query, centre);
            } else {
                query_load<D, C, P>(query, area);
                centre_load<D, C, P>(centre, area);
            }
            state_open<D, C>(state);
        };

        auto await = [&](uint32_t at, uint32_t tag) {
#if CUDA_BULK_COPIES
            barrier_wait(at + CUDA_DECODE_SLOT_BYTES(D), tag / UNIT_PARITY & 1);
#else
            copies_arrive();
            __syncwarp();
#endif
        };
        const uint32_t table = plan.table(), sights = shared_address(&notes.sight);
        while (left > 0) {
            enter();
            uint32_t tag = tag_of(at);
            await(at, tag);
            /* Some tokens tell where the references belong: without any, the page would be summed up twice. */
            if (tag < UNIT_EMPTY) {
                centre_turn<C, P>(centre);
                follow<D, C, P>(state, query, centre, table, at, sights, tag & UNIT_POSITION, 1);
            }
            for (;;) {
                if constexpr (P > 0) {
                    centre_turn<C, P>(centre);
                    fetch(next);
                }
                if (tag < UNIT_EMPTY)
                    attend_packed<D, C, P>(state, query, centre, table, at, sights, tag & UNIT_POSITION,
                                           tag & UNIT_CUT);
                else if (tag & UNIT_DENSE)
                    attend_dense<D, C>(state, query, at, sights, tag & UNIT_POSITION);
                __syncwarp();
                left--;
                if ((tag & UNIT_LAST) || left == 0)
                    break;
                const uint32_t next_tag = tag_of(next), done = at;
                await(next, next_tag);
                fill(done, tag);
                at = next;
                next = done;
                tag = next_tag;
            }

            park<D, C>(state, at);
            __syncwarp();
            const bool stays = !(tag & UNIT_LAST) || !notes.whole;
            if (stays) {
                const int part = tag & UNIT_LAST ? 0 : 1;
                if (lane == 0) {
                    notes.parked[part] = notes.now;
                    notes.slot[part] = at;
                }
            } else {
                for (int c = 0; c < C; c++)
                    finish_parts<D, C>(params, kv_head, slice, slice, slice, notes.now.item, notes.now.block, c, 1, at,
                                       [&](const result_place &place, float(&o)[row<D>::values], float m, float l) {
                                           finish_column<D>(params, place, o, m, l);
                                       });
            }
            __syncwarp();
            copies_follow_stores();
            if (left > 0) {
                const struct segment following = next_segment<C>(params, notes.now);
                const uint32_t done = stays ? spare : at;
                __syncwarp();
                begin(following);
                notes.whole = 1;
                __syncwarp();
                fill(done, tag_of(done));
                at = next;
                next = done;
            }
        }
        __syncthreads();
        finish_block<D, C, P>(params, plan, kv_head, slice);
        copies_follow_stores();
        __syncthreads();
    }
}

#define DECODE_KERNEL(columns, pairs)                                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * CUDA_DECODE_WARPS(DECODE_HEAD_DIM), 1)                           \
        decode_##columns##_##pairs(const __grid_constant__ struct cuda_decode_params params) {                         \
        decode<DECODE_HEAD_DIM, columns, pairs>(params);                                                               \
    }

DECODE_KERNEL(4, 0)
DECODE_KERNEL(4, 8)
DECODE_KERNEL(4, 16)
DECODE_KERNEL(8, 0)
DECODE_KERNEL(8, 8)
DECODE_KERNEL(8, 16)
