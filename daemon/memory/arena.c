/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/arena.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "proto/cleanup.h"

int arena_shape_for(const struct memory *memory, enum oscar_form form, uint64_t page_bytes, struct arena_shape *ret,
                    struct oscar_cause *cause) {
    /* A client maps chunk i at i * chunk_pages * stride, which must fall on the device's granularity (a power of two). Where
     * the pages alone do not add up to whole granules, the number of pages with the least padding is taken. */
    uint64_t chunk_bytes =
        form == OSCAR_FORM_PACKED ? memory->options.packed_chunk_bytes : memory->options.dense_chunk_bytes;
    uint64_t aim = (chunk_bytes > memory->granularity ? chunk_bytes : memory->granularity) / page_bytes;
    uint32_t most = aim < 1 ? 1 : aim > (1U << 20) ? 1U << 20 : (uint32_t)aim;
    struct arena_shape best = {.stride = UINT64_MAX};
    for (uint32_t pages = most; pages >= (most + 1) / 2; pages--) {
        uint64_t factor = pages & -pages; /* largest power of two in it */
        uint64_t unit = factor >= memory->granularity ? 1 : memory->granularity / factor;
        uint64_t stride = (page_bytes + unit - 1) / unit * unit;
        if (stride < best.stride)
            best = (struct arena_shape){.stride = stride, .chunk_pages = pages};
        if (stride == page_bytes)
            break;
    }
    assert(best.chunk_pages > 0);
    uint64_t chunks = memory->options.budget_bytes / (best.stride * best.chunk_pages);
    if (chunks == 0)
        return oscar_fail(cause, OSCAR_ERR_NO_SPACE, "a chunk of %llu bytes does not fit the budget of %llu",
                          (unsigned long long)(best.stride * best.chunk_pages),
                          (unsigned long long)memory->options.budget_bytes);
    uint64_t limit = (SLOT_NONE - 1) / best.chunk_pages; /* slot numbers have 32 bits */
    best.max_chunks = (uint32_t)(chunks < limit ? chunks : limit);
    *ret = best;
    return 0;
}

void arena_open(struct arena *arena, struct memory *memory, enum oscar_form form, uint32_t model,
                const struct arena_shape *shape) {
    *arena = (struct arena){.memory = memory, .form = form, .model = model, .shape = *shape};
    LIST_INSERT_HEAD(&memory->arenas, arena, in_memory);
}

void arena_close(struct arena *arena) {
    assert(arena->making == 0);
    for (uint32_t i = 0; i < arena->capacity; i++)
        if (arena->chunk[i])
            arena_chunk_free(arena->chunk[i]);
    LIST_REMOVE(arena, in_memory);
    free(arena->chunk);
    arena->chunk = NULL;
    arena->capacity = 0;
}

static void empty_insert(struct chunk *chunk) {
    struct memory *memory = chunk->arena->memory;
    TAILQ_INSERT_TAIL(&memory->empty, chunk, in_empty);
    memory->empty_bytes += chunk->bytes;
}

static void empty_remove(struct chunk *chunk) {
    struct memory *memory = chunk->arena->memory;
    TAILQ_REMOVE(&memory->empty, chunk, in_empty);
    memory->empty_bytes -= chunk->bytes;
}

void share_open(struct share *share, uint32_t owner) {
    *share = (struct share){.owner = owner};
    TAILQ_INIT(&share->open);
}

void share_close(struct share *share, struct arena *arena) {
    struct chunk *made;
    LIST_FOREACH(made, &arena->memory->making, in_memory) {
        if (made->share == share)
            made->share = NULL;
    }
    for (uint32_t i = 0; i < arena->capacity; i++) {
        struct chunk *chunk = arena->chunk[i];
        if (!chunk || chunk->share != share)
            continue;
        if (chunk_free_slots(chunk) == chunk->pages) {
            arena_chunk_free(chunk);
            continue;
        }
        if (chunk_free_slots(chunk) > 0)
            TAILQ_REMOVE(&share->open, chunk, in_share);
        chunk->share = NULL;
    }
}

uint32_t arena_take(struct arena *arena, struct share *share) {
    struct chunk *chunk = TAILQ_FIRST(&share->open);
    if (!chunk)
        return SLOT_NONE;
    if (chunk_free_slots(chunk) == chunk->pages)
        empty_remove(chunk);
    uint32_t slot = chunk_slot_take(chunk);
    if (chunk_free_slots(chunk) == 0)
        TAILQ_REMOVE(&share->open, chunk, in_share);
    arena->memory->used_bytes[arena->form] += arena->shape.stride;
    return chunk->index * chunk->pages + slot;
}

/* Room in the list for all chunks, those that are being made and one more. */
static int list_reserve(struct arena *arena, struct oscar_cause *cause) {
    uint32_t needed = arena->chunks + arena->making + 1;
    if (needed > arena->shape.max_chunks)
        return oscar_fail(cause, OSCAR_ERR_NO_SPACE, "all %u chunks of the form are in use", arena->shape.max_chunks);
    if (needed <= arena->capacity)
        return 0;
    uint32_t capacity = arena->capacity ? arena->capacity * 2 : 8;
    if (capacity > arena->shape.max_chunks)
        capacity = arena->shape.max_chunks;
    struct chunk **more = realloc(arena->chunk, capacity * sizeof(struct chunk *));
    if (!more)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the list of chunks");
    memset(more + arena->capacity, 0, (capacity - arena->capacity) * sizeof(struct chunk *));
    arena->chunk = more;
    arena->capacity = capacity;
    return 0;
}

int arena_grow(struct arena *arena, struct share *share, bool ahead, struct oscar_cause *cause) {
    const struct memory *memory = arena->memory;
    if (arena_chunk_bytes(arena) > memory->options.budget_bytes - memory->total_bytes)
        return oscar_fail(cause, OSCAR_ERR_NO_SPACE, "%llu of %llu bytes are in use",
                          (unsigned long long)memory->total_bytes, (unsigned long long)memory->options.budget_bytes);
    int r = list_reserve(arena, cause);
    if (r < 0)
        return r;
    _cleanup_free_ struct chunk *chunk = calloc(1, sizeof *chunk);
    if (!chunk || chunk_slots_make(chunk, arena->shape.chunk_pages) < 0)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a chunk's slots");
    chunk->arena = arena;
    chunk->share = share;
    chunk->ahead = ahead;
    chunk->bytes = arena_chunk_bytes(arena);
    chunk_make(TAKE_PTR(chunk));
    return 0;
}

int arena_chunk_add(struct chunk *chunk, struct oscar_cause *cause) {
    struct arena *arena = chunk->arena;
    struct memory *memory = arena->memory;
    uint32_t index = 0;
    while (arena->chunk[index])
        index++;
    chunk->index = index;
    chunk->generation = memory->generation;
    int r = memory->options.chunk_made(memory->options.arg, chunk, cause);
    if (r < 0) {
        chunk_free(chunk);
        return r;
    }
    memory->generation++;
    memory->chunk_bytes[arena->form] += chunk->bytes;
    arena->chunks++;
    arena->epoch++;
    arena->chunk[index] = chunk;
    TAILQ_INSERT_TAIL(&chunk->share->open, chunk, in_share);
    empty_insert(chunk);
    return 0;
}

void arena_hold(struct arena *arena, uint32_t slot) {
    chunk_slot_hold(arena_chunk(arena, slot), slot % arena->shape.chunk_pages);
}

bool arena_drop(struct arena *arena, uint32_t slot) {
    struct memory *memory = arena->memory;
    struct chunk *chunk = arena_chunk(arena, slot);
    bool was_full = chunk_free_slots(chunk) == 0, was_quarantined;
    if (!chunk_slot_drop(chunk, slot % arena->shape.chunk_pages, &was_quarantined))
        return false;
    if (was_quarantined)
        memory->quarantined_bytes -= arena->shape.stride;
    else
        memory->used_bytes[arena->form] -= arena->shape.stride;
    if (was_full && chunk->share)
        TAILQ_INSERT_TAIL(&chunk->share->open, chunk, in_share);
    if (chunk_free_slots(chunk) == chunk->pages) {
        empty_insert(chunk);
        if (!chunk->share)
            arena_chunk_free(chunk);
    }
    return true;
}

void arena_quarantine(struct arena *arena, uint32_t slot) {
    if (!chunk_slot_quarantine(arena_chunk(arena, slot), slot % arena->shape.chunk_pages))
        return;
    arena->memory->used_bytes[arena->form] -= arena->shape.stride;
    arena->memory->quarantined_bytes += arena->shape.stride;
}

uint8_t *arena_address(const struct arena *arena, uint32_t slot) {
    return arena_chunk(arena, slot)->address + slot % arena->shape.chunk_pages * arena->shape.stride;
}

void arena_chunk_free(struct chunk *chunk) {
    struct arena *arena = chunk->arena;
    struct memory *memory = arena->memory;
    assert(chunk_free_slots(chunk) == chunk->pages);

    memory->options.chunk_gone(memory->options.arg, chunk);
    empty_remove(chunk);
    if (chunk->share)
        TAILQ_REMOVE(&chunk->share->open, chunk, in_share);
    arena->chunk[chunk->index] = NULL;
    arena->chunks--;
    memory->chunk_bytes[arena->form] -= chunk->bytes;
    chunk_free(chunk);
}
