/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pages of one model in one form: chunks at indexes 0, 1, .. and slots numbered across them, so that for whoever maps chunk i
 * at i * chunk bytes, slot s lies at s * stride.
 */
#ifndef OSCAR_DAEMON_MEMORY_ARENA_H
#define OSCAR_DAEMON_MEMORY_ARENA_H

#include "daemon/memory/budget.h"

struct arena_shape {
    uint64_t stride; /* from page to page: the page's bytes, padded so that chunk_pages of them are whole granules */
    uint32_t chunk_pages;
    uint32_t max_chunks; /* more never fit the budget */
};

/* Who may take slots from a set of chunks: everybody (sink, packed) or one client (dense). */
struct share {
    struct chunk_list open; /* chunks with a free slot; the first is filled up first, so that the others drain */
    uint32_t owner;         /* number of the client, 0 for everybody */
    uint32_t making;        /* chunks that are being made for it */
    int failure;            /* of the last one that could not be made, with its cause, until somebody takes it up */
    bool retried;           /* after such a failure, with a chunk given back before */
    struct oscar_cause cause;
};

struct arena {
    struct memory *memory;
    enum oscar_form form;
    uint32_t model;
    struct arena_shape shape;
    struct chunk **chunk; /* by index; NULL where there is none */
    uint32_t capacity, chunks;
    uint32_t making; /* chunks that are not there yet */
    uint64_t epoch;  /* raised with each new chunk */
    LIST_ENTRY(arena) in_memory;
};

/* OSCAR_ERR_NO_SPACE when not even one chunk fits the budget. */
int arena_shape_for(const struct memory *memory, enum oscar_form form, uint64_t page_bytes, struct arena_shape *ret,
                    struct oscar_cause *cause);
void arena_open(struct arena *arena, struct memory *memory, enum oscar_form form, uint32_t model,
                const struct arena_shape *shape);
/* All slots must be free, and nothing being made. */
void arena_close(struct arena *arena);

void share_open(struct share *share, uint32_t owner);
/* The owner is gone for good: its empty chunks are freed now, the others as soon as they are empty. */
void share_close(struct share *share, struct arena *arena);

/* A free slot of the share's chunks, or SLOT_NONE. */
uint32_t arena_take(struct arena *arena, struct share *share);
/* Begins to make one more chunk: OSCAR_ERR_NO_SPACE when the budget has no room for it. `ahead`: nobody needs it yet, so that the
 * share does not keep its failure. */
int arena_grow(struct arena *arena, struct share *share, bool ahead, struct oscar_cause *cause);
void arena_hold(struct arena *arena, uint32_t slot);
/* True when the slot is free now. */
bool arena_drop(struct arena *arena, uint32_t slot);
void arena_quarantine(struct arena *arena, uint32_t slot);

static inline struct chunk *arena_chunk(const struct arena *arena, uint32_t slot) {
    return arena->chunk[slot / arena->shape.chunk_pages];
}
uint8_t *arena_address(const struct arena *arena, uint32_t slot);

static inline uint64_t arena_chunk_bytes(const struct arena *arena) {
    return arena->shape.stride * arena->shape.chunk_pages;
}

/* --- between arena.c and making.c --- */

/* A chunk that was made becomes part of its arena: 0, or why it cannot; then it is freed. */
int arena_chunk_add(struct chunk *chunk, struct oscar_cause *cause);
/* Takes an empty chunk out of its arena and begins to give it back to the device. */
void arena_chunk_free(struct chunk *chunk);
/* Begins to make a chunk whose arena and share are set, or to free one that is in no arena. */
void chunk_make(struct chunk *chunk);
void chunk_free(struct chunk *chunk);

#endif
