/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "daemon/store/state.h"

static uint64_t page_bytes(const struct store *store, const struct node *node) {
    const struct store_model *model = model_at(store, node->model);
    uint64_t bytes = 0;
    if (node->dense != SLOT_NONE)
        bytes += model->arena[OSCAR_FORM_DENSE].shape.stride;
    if (node->state == NODE_FINAL)
        bytes += model->arena[node_final_form(node)].shape.stride;
    return bytes;
}

void store_flush(struct store *store, const struct oscar_digest *digest, struct store_flush *ret) {
    const struct store_model *only = NULL;
    *ret = (struct store_flush){0};
    if (digest) {
        only = model_find(store, digest);
        if (!only)
            return;
    }
    /* Children were published after their parents: from the newest on, every page comes before its parent. */
    for (uint32_t index = store->newest, older; index != NODE_NONE; index = older) {
        const struct node *node = node_at(store, index);
        older = node->older;
        if (only && node->model != only->index)
            continue;
        uint64_t bytes = page_bytes(store, node);
        if (node->heap_position != HEAP_NONE) {
            ret->pages_freed++;
            ret->bytes_freed += bytes;
            tree_free_leaf(store, index);
        } else {
            ret->pages_deferred++;
            ret->bytes_deferred += bytes;
            tree_unlink(store, index);
        }
    }
    if (ret->pages_freed + ret->pages_deferred == 0)
        return;
    store->count.flushed += ret->pages_freed + ret->pages_deferred;
    event_cleared(store, only);

    /* What is computed below an unlinked page will not be found by those who wait for it. */
    struct store_client *client;
    struct seq *seq;
    LIST_FOREACH(client, &store->clients, in_store) {
        LIST_FOREACH(seq, &client->seqs, in_client) {
            if (seq->deepest != NODE_NONE && !(node_at(store, seq->deepest)->flags & NODE_LINKED))
                flight_end(seq);
        }
    }
}
