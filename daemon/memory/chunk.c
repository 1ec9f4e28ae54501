/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/chunk.h"

#include <assert.h>
#include <stdlib.h>

int chunk_slots_make(struct chunk *chunk, uint32_t pages) {
    uint32_t words = (pages + 63) / 64;
    chunk->free = calloc(words, sizeof *chunk->free);
    chunk->reference = calloc(pages, sizeof *chunk->reference);
    if (!chunk->free || !chunk->reference) {
        chunk_slots_free(chunk);
        return OSCAR_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < pages; i++)
        chunk->free[i / 64] |= UINT64_C(1) << (i % 64);
    chunk->pages = pages;
    return 0;
}

void chunk_slots_free(struct chunk *chunk) {
    free(chunk->free);
    free(chunk->reference);
    chunk->free = NULL;
    chunk->reference = NULL;
}

uint32_t chunk_slot_take(struct chunk *chunk) {
    assert(chunk_free_slots(chunk) > 0);
    uint32_t word = chunk->hint;
    while (chunk->free[word] == 0)
        word++;
    chunk->hint = word;
    uint32_t slot = word * 64 + (uint32_t)__builtin_ctzll(chunk->free[word]);
    chunk->free[word] &= chunk->free[word] - 1;
    chunk->reference[slot] = 1;
    chunk->used++;
    return slot;
}

void chunk_slot_hold(struct chunk *chunk, uint32_t slot) {
    assert((chunk->reference[slot] & ~CHUNK_QUARANTINED) > 0);
    chunk->reference[slot]++;
}

bool chunk_slot_drop(struct chunk *chunk, uint32_t slot, bool *ret_was_quarantined) {
    uint16_t count = chunk->reference[slot] & (uint16_t)~CHUNK_QUARANTINED;
    assert(count > 0);
    if (count > 1) {
        chunk->reference[slot]--;
        return false;
    }
    *ret_was_quarantined = (chunk->reference[slot] & CHUNK_QUARANTINED) != 0;
    if (*ret_was_quarantined)
        chunk->quarantined--;
    else
        chunk->used--;
    chunk->reference[slot] = 0;
    chunk->free[slot / 64] |= UINT64_C(1) << (slot % 64);
    if (slot / 64 < chunk->hint)
        chunk->hint = slot / 64;
    return true;
}

bool chunk_slot_quarantine(struct chunk *chunk, uint32_t slot) {
    assert(chunk->reference[slot] > 0);
    if (chunk->reference[slot] & CHUNK_QUARANTINED)
        return false;
    chunk->reference[slot] |= CHUNK_QUARANTINED;
    chunk->used--;
    chunk->quarantined++;
    return true;
}
