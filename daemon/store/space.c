/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/store/state.h"

/* Part of the budget that is left to dense chunks: pages come and go there with every prefill, and to win a chunk back from a full
 * cache costs as many evictions as it takes until one happens to be empty. */
#define DENSE_SHARE 8

/* What the packed forms of all dense pages will take beyond the packed slots that are free (as if all were of this model). */
static uint64_t packing_needs(const struct store *store, const struct arena *dense) {
    const struct memory *memory = &store->memory;
    const struct arena *packed = &model_at(store, dense->model)->arena[OSCAR_FORM_PACKED];
    uint64_t pages = memory->used_bytes[OSCAR_FORM_DENSE] / dense->shape.stride, needs = pages * packed->shape.stride;
    uint64_t unused = memory->chunk_bytes[OSCAR_FORM_PACKED] - memory->used_bytes[OSCAR_FORM_PACKED];
    return needs > unused ? needs - unused : 0;
}

/* What is to stay free beside a new chunk of the arena, so that no page has to go for what comes next. */
static uint64_t headroom(const struct store *store, const struct arena *arena) {
    return arena->form == OSCAR_FORM_DENSE ? packing_needs(store, arena)
                                           : store->memory.options.budget_bytes / DENSE_SHARE;
}

/* Whether a chunk may be added without a thought for what is cached: only where nothing is, or where packing will not have to evict
 * for what is dense by then. */
static bool may_grow(const struct store *store, const struct arena *arena) {
    const struct memory *memory = &store->memory;
    uint64_t unused = memory->options.budget_bytes - memory->total_bytes + memory->empty_bytes + memory->freeing_bytes;
    return store->heap.count == 0 || unused >= arena_chunk_bytes(arena) + headroom(store, arena);
}

/* Pages that the store itself keeps dense for now: they wait for their seal or for packing. */
static uint64_t pages_on_their_way(const struct store *store) {
    uint64_t pages = store->pack_waiting;
    const struct seq *seq;
    TAILQ_FOREACH(seq, &store->watched, in_watch) { pages += seal_under_way(seq); }
    return pages;
}

/* Writers that are faster than sealing and packing must wait for them, not fill the budget with dense pages and push out what is cached:
 * while pages of the size of the dense share are on their way, a dense slot comes only from what gets free. */
static bool packing_makes_room(const struct store *store, const struct arena *arena) {
    return arena->form == OSCAR_FORM_DENSE && !store->pack_starved &&
           pages_on_their_way(store) * arena->shape.stride >= store->memory.options.budget_bytes / DENSE_SHARE;
}

/* The next chunk is ordered when the last one is nearly full, so that nobody has to wait for it, if there is plenty of room. */
static void order_ahead(struct store *store, struct arena *arena, struct share *share) {
    const struct memory *memory = &store->memory;
    uint64_t unused = memory->options.budget_bytes - memory->total_bytes;
    uint64_t spare = memory->options.budget_bytes / DENSE_SHARE;
    uint32_t left = 0;
    const struct chunk *chunk;
    TAILQ_FOREACH(chunk, &share->open, in_share) {
        left += chunk_free_slots(chunk);
        if (left > arena->shape.chunk_pages / 4)
            return;
    }
    if (share->making == 0 && share->failure == 0 &&
        unused >= arena_chunk_bytes(arena) + headroom(store, arena) + spare && !packing_makes_room(store, arena))
        (void)arena_grow(arena, share, true, NULL); /* it will be tried again when it is needed */
}

/* After a chunk could not be made though the budget allows it. One chunk given back may help, and where the device is full, with what
 * others have there, pages are evicted for that. If it does not help, the cache is not thrown away for a device that fails. */
static int after_failure(struct store *store, struct share *share, struct oscar_cause *cause) {
    int r = share->failure;
    share->failure = 0;
    while (!share->retried) {
        share->retried = memory_reclaim(&store->memory);
        if (share->retried)
            return OSCAR_PARKED;
        if (r != OSCAR_ERR_NO_SPACE || !tree_evict(store))
            break;
    }
    share->retried = false;
    return oscar_fail(cause, r, "%s", share->cause.text);
}

/* As soon as the chunks that are being freed have been, there will be room for so many slots. */
static bool will_fit(const struct memory *memory, const struct arena *arena, uint32_t slots) {
    uint64_t chunks = (slots + arena->shape.chunk_pages - 1) / arena->shape.chunk_pages;
    return memory->options.budget_bytes - memory->total_bytes + memory->freeing_bytes >=
           chunks * arena_chunk_bytes(arena);
}

int space_take(struct store *store, struct arena *arena, struct share *share, uint32_t wanted, uint32_t *ret_slot,
               struct oscar_cause *cause) {
    struct memory *memory = &store->memory;
    for (;;) {
        uint32_t slot = arena_take(arena, share);
        if (slot != SLOT_NONE) {
            share->retried = false;
            if (wanted == 1)
                order_ahead(store, arena, share);
            *ret_slot = slot;
            return 0;
        }
        if (packing_makes_room(store, arena))
            return oscar_fail(cause, OSCAR_ERR_NO_SPACE, "%llu pages wait to be packed, which makes room: try again",
                              (unsigned long long)pages_on_their_way(store));
        if (share->failure != 0 && share->making == 0)
            return after_failure(store, share, cause);
        if (share->making * arena->shape.chunk_pages >= wanted || (share->failure != 0 && share->making > 0))
            return OSCAR_PARKED;
        if (may_grow(store, arena)) {
            int r = arena_grow(arena, share, false, cause);
            if (r == 0)
                continue;
            if (r != OSCAR_ERR_NO_SPACE)
                return r;
            if (memory->freeing_bytes > 0 && will_fit(memory, arena, wanted - share->making * arena->shape.chunk_pages))
                return OSCAR_PARKED;
            if (memory_reclaim(memory))
                continue;
        }
        if (tree_evict(store))
            continue;
        if (memory_moves(memory))
            return OSCAR_PARKED;
        return oscar_fail(cause, OSCAR_ERR_NO_SPACE, "%llu of %llu bytes are in use, and nothing more can be evicted",
                          (unsigned long long)memory->total_bytes, (unsigned long long)memory->options.budget_bytes);
    }
}

void space_drop(struct store *store, struct arena *arena, uint32_t slot) {
    if (arena_drop(arena, slot))
        store->pack_starved = false;
}

int space_chunk_made(void *arg, struct chunk *chunk, struct oscar_cause *cause) {
    struct store *store = arg;
    const struct meta_chunk record = {
        .model = chunk->arena->model,
        .form = (uint32_t)chunk->arena->form,
        .index = chunk->index,
        .generation = chunk->generation,
        .bytes = chunk->bytes,
        .owner = chunk->share->owner,
    };
    return meta_chunk_take(&store->meta, &record, &chunk->record, cause);
}

void space_chunk_gone(void *arg, struct chunk *chunk) {
    struct store *store = arg;
    struct store_client *client;
    LIST_FOREACH(client, &store->clients, in_store) { client_chunk_gone(client, chunk); }
    meta_chunk_give(&store->meta, chunk->record);
}
