/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/store/state.h"

int space_take(struct store *store, struct arena *arena, struct share *share, uint32_t *ret_slot,
               struct oscar_cause *cause) {
    bool may_grow = true;
    int failure = OSCAR_ERR_NO_SPACE;
    for (;;) {
        uint32_t slot = arena_take(arena, share);
        if (slot != SLOT_NONE) {
            *ret_slot = slot;
            return 0;
        }
        if (may_grow) {
            failure = arena_grow(arena, share, cause);
            if (failure == 0)
                continue;
            /* A device without memory for a chunk that the budget allows is not asked again before it got one back. */
            may_grow = false;
        }
        if (memory_reclaim(&store->memory)) {
            may_grow = true;
            continue;
        }
        if (!tree_evict(store)) {
            if (failure == OSCAR_ERR_NO_SPACE) {
                return oscar_fail(cause, failure, "%llu of %llu bytes are in use, and nothing more can be evicted",
                                  (unsigned long long)store->memory.total_bytes,
                                  (unsigned long long)store->memory.options.budget_bytes);
            }
            return failure;
        }
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
    LIST_FOREACH(client, &store->clients, in_store)
    client_chunk_gone(client, chunk);
    meta_chunk_give(&store->meta, chunk->record);
}
