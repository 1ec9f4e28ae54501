/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One allocation of device memory, divided into slots of one page each. A slot is free, used or quarantined (its owner has gone,
 * but a kernel of it may still write there); free + used + quarantined = pages, always. A used slot counts its references: the
 * one of its owner and those of readers that outlast the owner (the sources of a fork's copies).
 */
#ifndef OSCAR_DAEMON_MEMORY_CHUNK_H
#define OSCAR_DAEMON_MEMORY_CHUNK_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "oscar/device.h"

#include "daemon/pool.h"

#define SLOT_NONE UINT32_MAX

struct arena;
struct memory;
struct share;

struct chunk {
    struct pool_job job; /* makes it, or frees it (making.c) */
    struct memory *memory;
    struct arena *arena; /* NULL while it is freed */
    struct share *share; /* whose slots these are; NULL: the owner's process has exited, freed as soon as it is empty */
    struct oscar_chunk *device;
    uint8_t *address;
    int reader_fd, writer_fd; /* for the processes that map it; -1: nobody but the daemon writes to it */
    uint64_t generation;      /* never the same for two chunks of a store */
    uint64_t bytes;
    bool ahead;      /* ordered before anybody needs it */
    uint32_t index;  /* in the arena: its slots are index * pages + 0 .. pages - 1 */
    uint32_t record; /* in the metadata */
    uint32_t pages, used, quarantined;
    uint32_t hint;               /* no word of `free` below it has a bit */
    uint64_t *free;              /* bit set: the slot is free */
    uint16_t *reference;         /* of a slot; CHUNK_QUARANTINED may be set */
    TAILQ_ENTRY(chunk) in_share; /* while it has a free slot and an owner */
    TAILQ_ENTRY(chunk) in_empty; /* while nothing is used or quarantined */
    LIST_ENTRY(chunk) in_memory; /* while it is being made or freed */
    int failure;                 /* of its making, with ... */
    struct oscar_cause cause;
};

#define CHUNK_QUARANTINED UINT16_C(0x8000)

/* Only the book-keeping of slots; the device memory is the business of arena.c and making.c. */
int chunk_slots_make(struct chunk *chunk, uint32_t pages);
void chunk_slots_free(struct chunk *chunk);

/* Lowest free slot of the chunk, which has one; its reference count is 1. */
uint32_t chunk_slot_take(struct chunk *chunk);
void chunk_slot_hold(struct chunk *chunk, uint32_t slot);
/* True when that was the last reference and the slot is free now. */
bool chunk_slot_drop(struct chunk *chunk, uint32_t slot, bool *ret_was_quarantined);
/* True if the slot was not quarantined before. */
bool chunk_slot_quarantine(struct chunk *chunk, uint32_t slot);

static inline uint32_t chunk_free_slots(const struct chunk *chunk) {
    return chunk->pages - chunk->used - chunk->quarantined;
}

#endif
