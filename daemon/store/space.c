/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/store/state.h"

/* Part of the budget that is left to dense chunks: pages come and go there with every prefill, and to win a chunk back from a full
 * cache costs as many evictions as it takes until one happens to be empty. */
#define DENSE_SHARE 8

static bool may_grow(const struct store *store, const struct arena *arena) {
    const struct memory *memory = &store->memory;
    uint64_t unused = memory->options.budget_bytes - memory->total_bytes + memory->empty_bytes;
    return arena->form == OSCAR_FORM_DENSE || store->heap.count == 0 ||
           unused >= arena->shape.stride * arena->shape.chunk_pages + memory->options.budget_bytes / DENSE_SHARE;
}

/* A writer that is faster than packing must wait for it, not push out what is cached: beyond the share of dense chunks nothing is
 * evicted for a dense slot while dense pages are on their way out. */
static bool packing_makes_room(const struct store *store, const struct arena *arena) {
    const struct memory *memory = &store->memory;
    return arena->form == OSCAR_FORM_DENSE && !store->pack_starved &&
           (store->pack_running > 0 || store->pack_waiting > 0) &&
           memory->used_bytes[OSCAR_FORM_DENSE] >= memory->options.budget_bytes / DENSE_SHARE;
}

int space_take(struct store *store, struct arena *arena, struct share *share, uint32_t *ret_slot,
               struct oscar_cause *cause) {
    bool refused = false; /* the device has no memory for a chunk that the budget allows */
    for (;;) {
        uint32_t slot = arena_take(arena, share);
        if (slot != SLOT_NONE) {
            *ret_slot = slot;
            return 0;
        }
        if (may_grow(store, arena)) {
            int r = arena_grow(arena, share, cause);
            if (r == 0)
                continue;
            /* One chunk given back may help. If it does not, the cache is not thrown away for a device that fails. */
            if (r != OSCAR_ERR_NO_SPACE && (refused || !memory_reclaim(&store->memory)))
                return r;
            if (r != OSCAR_ERR_NO_SPACE) {
                refused = true;
                continue;
            }
            if (memory_reclaim(&store->memory))
                continue;
        }
        if (packing_makes_room(store, arena))
            return oscar_fail(cause, OSCAR_ERR_NO_SPACE, "%llu pages are being packed, which makes room: try again",
                              (unsigned long long)(store->pack_waiting + store->pack_running));
        if (!tree_evict(store))
            return oscar_fail(
                cause, OSCAR_ERR_NO_SPACE, "%llu of %llu bytes are in use, and nothing more can be evicted",
                (unsigned long long)store->memory.total_bytes, (unsigned long long)store->memory.options.budget_bytes);
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
