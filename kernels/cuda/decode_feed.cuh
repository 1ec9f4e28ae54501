/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How a warp's units come to it: they follow each other through its segments, in two slots by turns, so that one is copied while the
 * one before it is summed up. Segments and units: decode.cu.
 */
#ifndef OSCAR_KERNELS_CUDA_DECODE_FEED_CUH
#define OSCAR_KERNELS_CUDA_DECODE_FEED_CUH

#include "kernels/cuda/decode_dense.cuh"

struct segment {
    uint32_t item, block;
};

struct notes {
    struct sight sight;       /* of the segment that is summed up */
    struct segment now;       /* the same */
    struct segment to_come;   /* of the first unit that the feed has not looked at, */
    struct segment parked[2]; /* the two parts that a warp may park, */
    uint32_t slot[2];         /* and their addresses; 0: there is none */
    uint32_t unit_to_come;    /* and that unit's number in it */
    uint32_t whole;           /* the segment that is summed up began with this warp */
};
static_assert(sizeof(struct notes) == CUDA_DECODE_NOTES_BYTES, "as the host counts them");

static __device__ __forceinline__ bool same_segment(const struct segment &a, const struct segment &b) {
    return a.item == b.item && a.block == b.block;
}

static __device__ __forceinline__ uint32_t dense_units(const struct cuda_batch_item &item) {
    return (item.dense_tokens + CUDA_DECODE_TILE - 1) / CUDA_DECODE_TILE;
}

/* A segment without tokens has an empty unit. */
static __device__ __forceinline__ uint32_t segment_units(const struct cuda_batch_item &item) {
    return max(item.packed_pages + dense_units(item), 1);
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

/* What is to know of a unit in a slot: its first position, and these. */
#define UNIT_DENSE 0x80000000U
#define UNIT_EMPTY 0x40000000U
#define UNIT_LAST 0x20000000U   /* of its segment */
#define UNIT_CUT 0x10000000U    /* not all columns see all of it */
#define UNIT_PARITY 0x08000000U /* of the phase of the slot's barrier that its copy ends */
#define UNIT_POSITION 0x07FFFFFFU

/* Behind a slot's bytes lie the barrier of its copies and the tag of its unit. */
template <int D> static __device__ __forceinline__ uint32_t slot_tag(uint32_t slot) {
    return slot + CUDA_DECODE_SLOT_BYTES(D) + 8;
}

/* Opens the barriers of a warp's slots; called by all of its lanes, once. By one lane: where each opened its own slot, nvcc 13.0 used the
 * stack pointer's register for the addresses. */
template <int D> static __device__ __forceinline__ void slots_open(uint32_t first) {
    if ((threadIdx.x & 31) == 0) {
#pragma unroll
        for (uint32_t i = 0; i < CUDA_DECODE_SLOTS; i++) {
            const uint32_t slot = first + i * CUDA_DECODE_SLOT_PITCH(D);
#if CUDA_BULK_COPIES
            barrier_open(slot + CUDA_DECODE_SLOT_BYTES(D));
#endif
            store_shared(slot_tag<D>(slot), UNIT_PARITY);
        }
#if CUDA_BULK_COPIES
        barriers_opened();
#endif
    }
    __syncwarp();
}

/* Of 32 units at a time each lane knows one. The lane is counted from the end: that of the warp's last unit is 0. */
struct feed {
    uint64_t from; /* address of the lane's unit */
    uint32_t tag;
    uint32_t left; /* of the warp's units: those to come */
};

/* Every lane finds its unit. */
template <int D, int C>
static __device__ __forceinline__ void feed_look(feed &feed, const struct cuda_decode_params &params, uint32_t record,
                                                 struct notes &notes) {
    const uint32_t lane = threadIdx.x & 31, first = (feed.left - 1) % 32;
    struct segment at = notes.to_come;
    uint32_t unit = notes.unit_to_come + first - lane;
    __syncwarp();
    if (lane > first)
        return;
    const struct cuda_batch_item *item = &params.batch.items[at.item];
    uint32_t units = segment_units(*item);
    while (unit >= units) {
        unit -= units;
        at = next_segment<C>(params, at);
        item = &params.batch.items[at.item];
        units = segment_units(*item);
    }
    uint32_t tokens, tag = unit + 1 == units ? UNIT_LAST : 0;
    if (unit < item->packed_pages) {
        cuda_page page = __ldg(params.batch.entries + item->packed_first + unit);
        feed.from = cuda_page_address(page) + static_cast<uint64_t>(record) * CUDA_DECODE_SLOT_BYTES(D);
        tag += cuda_page_index(page) * 64;
        tokens = 64;
    } else if (item->dense_tokens > 0) {
        uint32_t tile = unit - item->packed_pages, in_page = tile % 8 * CUDA_DECODE_TILE;
        cuda_page page = __ldg(params.batch.entries + item->dense_first + tile / 8);
        feed.from = cuda_page_address(page) + static_cast<uint64_t>(record) * (256 * D) + in_page * (2 * D);
        tag += (cuda_page_index(page) * 64 + in_page) | UNIT_DENSE;
        tokens = CUDA_DECODE_TILE;
    } else {
        tag |= UNIT_EMPTY;
        tokens = 0;
    }
    feed.tag = tag | ((tag & UNIT_POSITION) + tokens > item->tokens - item->rows + 1 ? UNIT_CUT : 0);
    if (lane == 0) {
        notes.to_come = at;
        notes.unit_to_come = unit + 1;
    }
}

/* Copies the next unit into a slot that held one of tag `before`. */
template <int D> static __device__ __forceinline__ void feed_slot(feed &feed, uint32_t slot, uint32_t before) {
    constexpr uint32_t rows =
        CUDA_DECODE_TILE * 2 * D; /* bytes of a dense unit's K, and of its V, 64 rows further on */
    const uint32_t asks = --feed.left % 32;
    const uint64_t from = __shfl_sync(WARP_LANES, feed.from, asks);
    const uint32_t tag = __shfl_sync(WARP_LANES, feed.tag, asks);
#if CUDA_BULK_COPIES
    const uint32_t barrier = slot + CUDA_DECODE_SLOT_BYTES(D);
    if (one_lane()) {
        store_shared(slot_tag<D>(slot), tag | (~before & UNIT_PARITY));
        if (tag < UNIT_EMPTY) {
            barrier_expect(barrier, CUDA_DECODE_SLOT_BYTES(D));
            copy_bulk(slot, from, CUDA_DECODE_SLOT_BYTES(D), barrier);
        } else if (tag & UNIT_DENSE) {
            barrier_expect(barrier, 2 * rows);
            copy_bulk(slot, from, rows, barrier);
            copy_bulk(slot + rows, from + 128 * D, rows, barrier);
        } else {
            barrier_expect(barrier, 0);
        }
    }
#else
    const uint32_t lane = threadIdx.x & 31;
    if (lane == 0)
        store_shared(slot_tag<D>(slot), tag);
    if (tag < UNIT_EMPTY)
        for (uint32_t at = 16 * lane; at < CUDA_DECODE_SLOT_BYTES(D); at += 512)
            copy_16(slot + at, from + at);
    else if (tag & UNIT_DENSE)
        for (uint32_t at = 16 * lane; at < rows; at += 512) {
            copy_16(slot + at, from + at);
            copy_16(slot + rows + at, from + 128 * D + at);
        }
#endif
}

#endif
