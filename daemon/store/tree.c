/* SPDX-License-Identifier: Apache-2.0 */
#define XXH_INLINE_ALL
#define XXH_NO_PREFETCH /* it reaches beyond a page, where gcc 13 sees an array overrun */
#include <assert.h>
#include <string.h>
#include <xxhash.h>

#include "daemon/store/state.h"

/* How far the walk's steps run ahead of each other, in pages: hashing (and asking for the table entry) before fetching the node,
 * fetching the node before comparing. Each gap hides one access to memory that no cache holds. */
#define HASH_AHEAD 16U
#define FETCH_AHEAD 8U
#define RING 32U

static uint64_t page_hash(const struct store *store, const uint32_t tokens[OSCAR_PAGE_TOKENS]) {
    return XXH3_64bits_withSecret(tokens, OSCAR_PAGE_TOKENS * sizeof *tokens, store->hash_secret,
                                  sizeof store->hash_secret);
}

uint64_t tree_chain(const struct store *store, uint64_t parent_chain, const uint32_t tokens[OSCAR_PAGE_TOKENS]) {
    if (store->options.hash_collide)
        return UINT64_C(0x5ca1ab1e);
    /* Not cryptographic: look-ups confirm. Mixed so that the order of pages counts. */
    uint64_t x =
        (parent_chain + UINT64_C(0x9e3779b97f4a7c15)) * UINT64_C(0xbf58476d1ce4e5b9) ^ page_hash(store, tokens);
    x = (x ^ (x >> 32)) * UINT64_C(0xd6e8feb86659fd93);
    return x ^ (x >> 32);
}

static bool is_child(const struct store *store, const struct store_model *model, uint32_t node, uint32_t parent,
                     const uint32_t tokens[OSCAR_PAGE_TOKENS]) {
    const struct node *candidate = node_at(store, node);
    return candidate->parent == parent && candidate->model == model->index &&
           memcmp(store->meta.cold[node].tokens, tokens, sizeof store->meta.cold[node].tokens) == 0;
}

uint32_t tree_child(const struct store *store, const struct store_model *model, uint32_t parent, uint64_t chain,
                    const uint32_t tokens[OSCAR_PAGE_TOKENS]) {
    struct table_scan scan;
    table_scan_begin(&store->table, chain, &scan);
    uint32_t node;
    while ((node = table_scan_next(&store->table, chain, &scan)) != NODE_NONE)
        if (is_child(store, model, node, parent, tokens))
            break;
    return node;
}

void tree_walk(struct store *store, const struct store_model *model, const uint32_t *tokens, uint32_t pages,
               struct walk *ret) {
    /* The client may write to the window all the while: what is hashed and what is compared must be one copy. */
    uint32_t copy[RING][OSCAR_PAGE_TOKENS];
    uint32_t candidate[RING];
    uint32_t hashed = 0, fetched = 0, hits = 0, parent = NODE_NONE;
    uint64_t chain = model->root_chain;

    for (; hits < pages; hits++) {
        for (; hashed < pages && hashed < hits + HASH_AHEAD; hashed++) {
            uint32_t *page = copy[hashed % RING];
            memcpy(page, tokens + (size_t)hashed * OSCAR_PAGE_TOKENS, sizeof copy[0]);
            chain = tree_chain(store, chain, page);
            store->walk_chain[hashed] = chain;
            table_prefetch(&store->table, chain);
        }
        for (; fetched < hashed && fetched < hits + FETCH_AHEAD; fetched++) {
            struct table_scan scan;
            uint64_t key = store->walk_chain[fetched];
            table_scan_begin(&store->table, key, &scan);
            uint32_t node = table_scan_next(&store->table, key, &scan);
            candidate[fetched % RING] = node;
            if (node == NODE_NONE)
                continue;
            __builtin_prefetch(node_at(store, node));
            for (size_t line = 0; line < sizeof store->meta.cold[node].tokens + 64; line += 64)
                __builtin_prefetch((const uint8_t *)store->meta.cold[node].tokens + line);
        }
        uint32_t node = candidate[hits % RING];
        const uint32_t *page = copy[hits % RING];
        if (node == NODE_NONE)
            break;
        if (!is_child(store, model, node, parent, page)) {
            node = tree_child(store, model, parent, store->walk_chain[hits], page);
            if (node == NODE_NONE)
                break;
        }
        store->walk_node[hits] = node;
        parent = node;
    }
    *ret = (struct walk){.pages = pages, .hits = hits, .hashed = hashed};
}

void tree_walk_hashes(struct store *store, const struct store_model *model, const uint32_t *tokens, struct walk *walk) {
    uint64_t chain = walk->hashed > 0 ? store->walk_chain[walk->hashed - 1] : model->root_chain;
    for (; walk->hashed < walk->pages; walk->hashed++) {
        uint32_t page[OSCAR_PAGE_TOKENS];
        memcpy(page, tokens + (size_t)walk->hashed * OSCAR_PAGE_TOKENS, sizeof page);
        chain = tree_chain(store, chain, page);
        store->walk_chain[walk->hashed] = chain;
    }
}

static enum oscar_form form_of(const struct node *node) {
    return node->state == NODE_FINAL ? node_final_form(node) : OSCAR_FORM_DENSE;
}

int tree_insert(struct store *store, struct store_model *model, uint32_t parent, uint64_t chain,
                const uint32_t tokens[OSCAR_PAGE_TOKENS], uint32_t dense, bool linked, uint32_t *ret_node,
                struct oscar_cause *cause) {
    int r = table_reserve(&store->table, cause);
    if (r == 0)
        r = heap_reserve(&store->heap, store->meta.nodes_live + 1, cause);
    uint32_t index;
    if (r == 0)
        r = meta_node_take(&store->meta, &index, cause);
    if (r != 0)
        return r;

    struct node_cold *cold = &store->meta.cold[index];
    memcpy(cold->tokens, tokens, sizeof cold->tokens);
    oscar_chain_digest(parent == NODE_NONE ? &model->digest : &store->meta.cold[parent].digest, tokens, &cold->digest);
    cold->born = ++store->born;
    struct node *node = node_at(store, index);
    *node = (struct node){
        .chain = chain,
        .last_used = ++store->tick,
        .parent = parent,
        .dense = dense,
        .final = SLOT_NONE,
        .heap_position = HEAP_NONE,
        .older = NODE_NONE,
        .newer = NODE_NONE,
        .depth = (uint16_t)(parent == NODE_NONE ? 0 : node_at(store, parent)->depth + 1),
        .model = (uint16_t)model->index,
        .flags = linked ? NODE_LINKED : 0,
    };
    meta_node_state(&store->meta, index, NODE_DENSE);

    model->nodes++;
    store->form_pages[OSCAR_FORM_DENSE]++;
    if (linked) {
        table_insert(&store->table, store->meta.node, index);
        node->older = store->newest;
        if (store->newest == NODE_NONE)
            store->oldest = index;
        else
            node_at(store, store->newest)->newer = index;
        store->newest = index;
        store->linked++;
        event_page(store, OSCAR_EVENT_STORED, index);
    }
    if (parent != NODE_NONE) {
        node_at(store, parent)->children++;
        tree_settle(store, parent);
    }
    *ret_node = index;
    return 0;
}

void tree_pin(struct store *store, uint32_t node) {
    if (node == NODE_NONE)
        return;
    node_at(store, node)->pins++;
    tree_settle(store, node);
    node_at(store, node)->last_used = ++store->tick;
}

void tree_unpin(struct store *store, uint32_t node) {
    if (node == NODE_NONE)
        return;
    assert(node_at(store, node)->pins > 0);
    node_at(store, node)->last_used = ++store->tick;
    node_at(store, node)->pins--;
    tree_settle(store, node);
}

void tree_dense_reference(struct store *store, uint32_t node, bool recent) {
    node_at(store, node)->dense_references++;
    node_at(store, node)->recent_holders += recent;
    tree_settle(store, node);
}

void tree_recent_release(struct store *store, uint32_t node) {
    assert(node_at(store, node)->recent_holders > 0);
    if (--node_at(store, node)->recent_holders == 0)
        pack_want(store, node);
}

void tree_dense_release(struct store *store, uint32_t node) {
    assert(node_at(store, node)->dense_references > 0);
    node_at(store, node)->dense_references--;
    tree_settle(store, node);
}

void tree_unlink(struct store *store, uint32_t index) {
    struct node *node = node_at(store, index);
    if (!(node->flags & NODE_LINKED))
        return;
    node->flags &= (uint8_t)~NODE_LINKED;
    table_remove(&store->table, store->meta.node, index);
    if (node->heap_position != HEAP_NONE)
        heap_remove(&store->heap, store->meta.node, index);
    if (node->older == NODE_NONE)
        store->oldest = node->newer;
    else
        node_at(store, node->older)->newer = node->newer;
    if (node->newer == NODE_NONE)
        store->newest = node->older;
    else
        node_at(store, node->newer)->older = node->older;
    node->older = node->newer = NODE_NONE;
    store->linked--;
}

/* An unlinked, unreferenced page. Its parent has one child less and is the caller's to settle. */
static void node_free(struct store *store, uint32_t index) {
    struct node *node = node_at(store, index);
    struct store_model *model = model_at(store, node->model);
    uint32_t dense = node->dense, final = node->state == NODE_FINAL ? node->final : SLOT_NONE;
    enum oscar_form final_form = node_final_form(node);

    if (node->flags & NODE_PACK_QUEUED)
        store->pack_waiting--;
    store->form_pages[form_of(node)]--;
    model->nodes--;
    if (node->parent != NODE_NONE) {
        struct node *parent = node_at(store, node->parent);
        parent->children--;
        if (parent->last_used < node->last_used)
            parent->last_used = node->last_used;
    }
    /* The record dies before its slots can be used again. */
    meta_node_give(&store->meta, index);
    if (dense != SLOT_NONE)
        space_drop(store, &model->arena[OSCAR_FORM_DENSE], dense);
    if (final != SLOT_NONE)
        space_drop(store, &model->arena[final_form], final);
}

void tree_settle(struct store *store, uint32_t index) {
    while (index != NODE_NONE) {
        struct node *node = node_at(store, index);
        if (node->dense != SLOT_NONE && node->dense_references == 0 && node->state == NODE_FINAL &&
            !(node->flags & NODE_PACKING)) {
            uint32_t slot = node->dense;
            node->dense = SLOT_NONE;
            space_drop(store, &model_at(store, node->model)->arena[OSCAR_FORM_DENSE], slot);
        }
        bool idle =
            node->children == 0 && node->pins == 0 && node->dense_references == 0 && !(node->flags & NODE_PACKING);
        if (idle && !(node->flags & NODE_LINKED)) {
            uint32_t parent = node->parent;
            node_free(store, index);
            index = parent;
            continue;
        }
        if (idle && node->heap_position == HEAP_NONE)
            heap_insert(&store->heap, store->meta.node, index);
        else if (!idle && node->heap_position != HEAP_NONE)
            heap_remove(&store->heap, store->meta.node, index);
        return;
    }
}

void tree_free_leaf(struct store *store, uint32_t index) {
    assert(node_at(store, index)->heap_position != HEAP_NONE);
    tree_unlink(store, index);
    tree_settle(store, index);
}

bool tree_evict(struct store *store) {
    if (store->heap.count == 0)
        return false;
    uint32_t index = store->heap.node[0];
    event_page(store, OSCAR_EVENT_REMOVED, index);
    store->count.evictions++;
    tree_free_leaf(store, index);
    return true;
}
