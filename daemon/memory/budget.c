/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/budget.h"

#include "daemon/memory/arena.h"

void memory_open(struct memory *memory, const struct memory_options *options) {
    *memory = (struct memory){
        .options = *options,
        .granularity = options->ops->granularity(options->device),
        .generation = options->generation,
    };
    TAILQ_INIT(&memory->empty);
    LIST_INIT(&memory->arenas);
    LIST_INIT(&memory->making);
    LIST_INIT(&memory->freeing);
}

bool memory_reclaim(struct memory *memory) {
    struct chunk *chunk = TAILQ_FIRST(&memory->empty);
    if (!chunk)
        return false;
    arena_chunk_free(chunk);
    return true;
}

static int chunk_verify(const struct chunk *chunk, struct oscar_cause *cause) {
    const struct arena *arena = chunk->arena;
    uint32_t used = 0, quarantined = 0, unused = 0;
    for (uint32_t i = 0; i < chunk->pages; i++) {
        bool is_free = (chunk->free[i / 64] >> (i % 64)) & 1;
        uint16_t reference = chunk->reference[i];
        if (is_free != (reference == 0) || reference == CHUNK_QUARANTINED)
            return oscar_fail(cause, OSCAR_ERR_CORRUPT, "chunk %u of form %u: slot %u is %s with %u references",
                              chunk->index, arena->form, i, is_free ? "free" : "used", reference);
        if (is_free && i / 64 < chunk->hint)
            return oscar_fail(cause, OSCAR_ERR_CORRUPT, "chunk %u of form %u: free slot %u lies before the hint",
                              chunk->index, arena->form, i);
        if (is_free)
            unused++;
        else if (reference & CHUNK_QUARANTINED)
            quarantined++;
        else
            used++;
    }
    if (used != chunk->used || quarantined != chunk->quarantined || unused + used + quarantined != chunk->pages)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "chunk %u of form %u: %u free + %u used + %u quarantined, %u pages",
                          chunk->index, arena->form, unused, chunk->used, chunk->quarantined, chunk->pages);

    bool listed = false;
    const struct chunk *other;
    if (chunk->share) {
        TAILQ_FOREACH(other, &chunk->share->open, in_share) { listed |= other == chunk; }
    }
    if (listed != (chunk->share && unused > 0))
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "chunk %u of form %u with %u free slots is %s its share's list",
                          chunk->index, arena->form, unused, listed ? "in" : "not in");
    return 0;
}

/* What is on its way to the device or from it, and that arenas and shares know of theirs. */
static int orders_verify(const struct memory *memory, struct oscar_cause *cause) {
    uint64_t making = 0, freeing = 0;
    const struct chunk *chunk;
    LIST_FOREACH(chunk, &memory->freeing, in_memory) { freeing += chunk->bytes; }
    LIST_FOREACH(chunk, &memory->making, in_memory) {
        uint32_t of_arena = 0, of_share = 0;
        const struct chunk *other;
        LIST_FOREACH(other, &memory->making, in_memory) {
            of_arena += other->arena == chunk->arena;
            of_share += other->share == chunk->share;
        }
        if (of_arena != chunk->arena->making || (chunk->share && of_share != chunk->share->making))
            return oscar_fail(cause, OSCAR_ERR_CORRUPT, "form %u counts %u chunks that are being made, there are %u",
                              chunk->arena->form, chunk->arena->making, of_arena);
        making += chunk->bytes;
    }
    if (making != memory->making_bytes || freeing != memory->freeing_bytes)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "bytes of chunks that are being made or freed are miscounted");
    return 0;
}

int memory_verify(const struct memory *memory, struct oscar_cause *cause) {
    int r = orders_verify(memory, cause);
    if (r < 0)
        return r;
    uint64_t total = memory->making_bytes + memory->freeing_bytes, quarantined = 0;
    uint64_t chunk_bytes[OSCAR_FORMS] = {0}, used_bytes[OSCAR_FORMS] = {0};
    uint64_t empty_bytes = 0;
    uint32_t empty = 0, listed = 0;
    const struct arena *arena;
    LIST_FOREACH(arena, &memory->arenas, in_memory) {
        uint32_t chunks = 0;
        for (uint32_t i = 0; i < arena->capacity; i++) {
            const struct chunk *chunk = arena->chunk[i];
            if (!chunk)
                continue;
            if (chunk->index != i || chunk->arena != arena || chunk->pages != arena->shape.chunk_pages)
                return oscar_fail(cause, OSCAR_ERR_CORRUPT, "chunk %u of form %u is not where it says", i, arena->form);
            r = chunk_verify(chunk, cause);
            if (r < 0)
                return r;
            if (chunk->used + chunk->quarantined == 0 && !chunk->share)
                return oscar_fail(cause, OSCAR_ERR_CORRUPT, "chunk %u of form %u has neither owner nor pages", i,
                                  arena->form);
            empty += chunk->used + chunk->quarantined == 0;
            chunks++;
            total += chunk->bytes;
            chunk_bytes[arena->form] += chunk->bytes;
            used_bytes[arena->form] += chunk->used * arena->shape.stride;
            quarantined += chunk->quarantined * arena->shape.stride;
        }
        if (chunks != arena->chunks)
            return oscar_fail(cause, OSCAR_ERR_CORRUPT, "form %u has %u chunks and counts %u", arena->form, chunks,
                              arena->chunks);
    }
    const struct chunk *chunk;
    TAILQ_FOREACH(chunk, &memory->empty, in_empty) {
        if (chunk->used + chunk->quarantined != 0)
            return oscar_fail(cause, OSCAR_ERR_CORRUPT, "chunk %u is listed as empty and is not", chunk->index);
        listed++;
        empty_bytes += chunk->bytes;
    }
    if (listed != empty || empty_bytes != memory->empty_bytes)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "%u chunks are empty, %u are listed", empty, listed);
    if (total != memory->total_bytes || quarantined != memory->quarantined_bytes ||
        total > memory->options.budget_bytes)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "%llu bytes of chunks, %llu counted, %llu allowed",
                          (unsigned long long)total, (unsigned long long)memory->total_bytes,
                          (unsigned long long)memory->options.budget_bytes);
    for (unsigned form = 0; form < OSCAR_FORMS; form++)
        if (chunk_bytes[form] != memory->chunk_bytes[form] || used_bytes[form] != memory->used_bytes[form])
            return oscar_fail(cause, OSCAR_ERR_CORRUPT, "form %u: bytes of chunks or of used slots are miscounted",
                              form);
    return 0;
}
