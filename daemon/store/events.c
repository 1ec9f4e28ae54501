/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a subscriber is told, such that it can rebuild the tree of pages that can be found: STORED after a page's parent was, REMOVED
 * before its parent is, and a snapshot that lists parents first.
 */
#include "daemon/store/state.h"

static void page_event(const struct store *store, enum oscar_event_kind kind, uint32_t index, struct oscar_event *ret) {
    const struct node *node = node_at(store, index);
    const struct store_model *model = model_at(store, node->model);
    *ret = (struct oscar_event){
        .kind = kind,
        .has_model = true,
        .model = model->digest,
        .page = store->meta.cold[index].digest,
        .parent = node->parent == NODE_NONE ? model->digest : store->meta.cold[node->parent].digest,
        .depth = node->depth,
        .form = node->state == NODE_FINAL ? node_final_form(node) : OSCAR_FORM_DENSE,
    };
}

void event_page(struct store *store, enum oscar_event_kind kind, uint32_t index) {
    struct oscar_event event;
    page_event(store, kind, index, &event);
    store->options.hooks.event(store->options.hooks.arg, &event);
}

void event_cleared(struct store *store, const struct store_model *model) {
    struct oscar_event event = {.kind = OSCAR_EVENT_CLEARED, .has_model = model != NULL};
    if (model)
        event.model = model->digest;
    store->options.hooks.event(store->options.hooks.arg, &event);
}

/* A cursor names the last page that was listed: its number of publishing, and where it lies, so that going on costs nothing. */
#define CURSOR_NODE_BITS 24
_Static_assert(META_MAX_NODES <= 1U << CURSOR_NODE_BITS, "a node's index fits a cursor");

static uint32_t snapshot_resume(const struct store *store, uint64_t cursor) {
    uint64_t born = cursor >> CURSOR_NODE_BITS;
    uint32_t index = (uint32_t)(cursor & ((1U << CURSOR_NODE_BITS) - 1));
    if (index < store->meta.header->nodes && (node_at(store, index)->flags & NODE_LINKED) &&
        store->meta.cold[index].born == born)
        return node_at(store, index)->newer;
    /* Removed since: go on with the first that was published later. */
    uint32_t node = store->oldest;
    while (node != NODE_NONE && store->meta.cold[node].born <= born)
        node = node_at(store, node)->newer;
    return node;
}

uint32_t store_snapshot(struct store *store, uint64_t cursor, struct oscar_event *ret_events, uint32_t capacity,
                        uint64_t *ret_next) {
    uint32_t node = cursor == 0 ? store->oldest : snapshot_resume(store, cursor), count = 0;
    uint64_t next = 0;
    for (; node != NODE_NONE && count < capacity; node = node_at(store, node)->newer) {
        page_event(store, OSCAR_EVENT_STORED, node, &ret_events[count++]);
        next = store->meta.cold[node].born << CURSOR_NODE_BITS | node;
    }
    *ret_next = node == NODE_NONE ? 0 : next;
    return count;
}
