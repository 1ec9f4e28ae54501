/* SPDX-License-Identifier: Apache-2.0 */
/*
 * All device memory of a store: one budget over the chunks of all arenas, and the list of chunks that could be given back. What
 * may be thrown away to make room is the store's decision, not this room's.
 *
 * The device is asked for memory, and given it back, by jobs in the pool (making.c); the accounts here are one thread's. A chunk
 * counts against the budget from the moment it is ordered until the device has it back.
 */
#ifndef OSCAR_DAEMON_MEMORY_BUDGET_H
#define OSCAR_DAEMON_MEMORY_BUDGET_H

#include "daemon/memory/chunk.h"

struct memory_options {
    const struct oscar_device_ops *ops;
    struct oscar_device *device;
    uint64_t budget_bytes;                          /* of all chunks together */
    uint64_t packed_chunk_bytes, dense_chunk_bytes; /* as in struct store_options */
    uint64_t generation;                            /* of the first chunk */
    struct pool *pool;                              /* outlives all chunks */
    void *arg;
    /* A chunk was made: the callee sets chunk->record. A failure takes it back. */
    int (*chunk_made)(void *arg, struct chunk *chunk, struct oscar_cause *cause);
    /* A chunk is about to be freed. */
    void (*chunk_gone)(void *arg, struct chunk *chunk);
};

struct memory {
    struct memory_options options;
    uint64_t granularity;
    uint64_t generation;  /* of the next chunk */
    uint64_t total_bytes; /* of all chunks, those included that are being made or freed: */
    uint64_t making_bytes, freeing_bytes;
    uint64_t empty_bytes; /* of the chunks in `empty` */
    uint64_t chunk_bytes[OSCAR_FORMS];
    uint64_t used_bytes[OSCAR_FORMS]; /* of slots in use */
    uint64_t quarantined_bytes;       /* only dense slots can be */
    TAILQ_HEAD(chunk_list, chunk) empty;
    LIST_HEAD(arena_list, arena) arenas;
    LIST_HEAD(chunk_order, chunk) making, freeing;
};

void memory_open(struct memory *memory, const struct memory_options *options);
/* Begins to free the chunk that has been empty for longest, whoever owns it. False when there is none. */
bool memory_reclaim(struct memory *memory);
/* Chunks are being made or freed: what cannot be had now may be there when one of these jobs has finished. */
static inline bool memory_moves(const struct memory *memory) {
    return memory->making_bytes + memory->freeing_bytes > 0;
}

/* A finished job of the pool that is one of ours. */
bool memory_is_job(const struct pool_job *job);
/* Takes its result over: a chunk more, or its bytes given back. The device's failure, which the share keeps, too. */
int memory_finished(struct pool_job *job, struct oscar_cause *cause);
/* free + used + quarantined = pages for each chunk, lists and sums as they must be: 0 or OSCAR_ERR_CORRUPT. */
int memory_verify(const struct memory *memory, struct oscar_cause *cause);

#endif
