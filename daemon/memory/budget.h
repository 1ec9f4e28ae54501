/* SPDX-License-Identifier: Apache-2.0 */
/*
 * All device memory of a store: one budget over the chunks of all arenas, and the list of chunks that could be given back. What
 * may be thrown away to make room is the store's decision, not this room's.
 */
#ifndef OSCAR_DAEMON_MEMORY_BUDGET_H
#define OSCAR_DAEMON_MEMORY_BUDGET_H

#include "daemon/memory/chunk.h"

struct memory_options {
    const struct oscar_device_ops *ops;
    struct oscar_device *device;
    uint64_t budget_bytes; /* of all chunks together */
    uint64_t chunk_bytes;  /* aim of one chunk; at least one page */
    uint64_t generation;   /* of the first chunk */
    void *arg;
    /* A chunk was made: the callee sets chunk->record. A failure takes it back. */
    int (*chunk_made)(void *arg, struct chunk *chunk, struct oscar_cause *cause);
    /* A chunk is about to be freed. */
    void (*chunk_gone)(void *arg, struct chunk *chunk);
};

struct memory {
    struct memory_options options;
    uint64_t granularity;
    uint64_t generation; /* of the next chunk */
    uint64_t total_bytes;
    uint64_t empty_bytes; /* of the chunks in `empty` */
    uint64_t chunk_bytes[OSCAR_FORMS];
    uint64_t used_bytes[OSCAR_FORMS]; /* of slots in use */
    uint64_t quarantined_bytes;       /* only dense slots can be */
    TAILQ_HEAD(chunk_list, chunk) empty;
    LIST_HEAD(arena_list, arena) arenas;
};

void memory_open(struct memory *memory, const struct memory_options *options);
/* Frees the chunk that has been empty for longest, whoever owns it. False when there is none. */
bool memory_reclaim(struct memory *memory);
/* free + used + quarantined = pages for each chunk, lists and sums as they must be: 0 or OSCAR_ERR_CORRUPT. */
int memory_verify(const struct memory *memory, struct oscar_cause *cause);

#endif
