/* SPDX-License-Identifier: Apache-2.0 */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/store/state.h"

/* A slot of the child's own, into which the client copies the first `rows` rows of the parent's; `copies` more are wanted, this one
 * included. */
static int copy_page(struct seq *child, const struct dense_entry *from, uint32_t rows, enum dense_kind kind,
                     uint32_t copies, struct oscar_page_update *ret_update, struct oscar_page_copy *ret_copy,
                     struct oscar_cause *cause) {
    struct arena *arena = &child->model->arena[OSCAR_FORM_DENSE];
    uint32_t slot;
    int r = space_take(child->client->store, arena, &child->binding->dense, copies, &slot, cause);
    if (r != 0)
        return r;
    struct dense_entry *entry = seq_dense_insert(child, from->page, slot, from->node, kind);
    entry->recent = kind == DENSE_PRIVATE;
    r = client_announce_dense(child->client, child->binding, slot, cause);
    if (r < 0)
        return r; /* the child goes, and its slot with it */
    arena_hold(arena, from->slot);
    child->hold[child->holds++] = from->slot;
    *ret_update = (struct oscar_page_update){.page = from->page, .ref = oscar_page_ref_make(OSCAR_FORM_DENSE, slot)};
    *ret_copy = (struct oscar_page_copy){
        .from = oscar_page_ref_make(OSCAR_FORM_DENSE, from->slot),
        .to = ret_update->ref,
        .page = from->page,
        .rows = rows,
    };
    return 0;
}

static int fill_child(struct seq *child, const struct seq *parent, struct oscar_reply *ret, struct oscar_cause *cause) {
    struct store *store = child->client->store;
    struct oscar_page_update *updates = client_updates(child->client);
    uint32_t pages = parent->path_pages, window = seq_window(pages), node = parent->deepest;
    for (uint32_t page = pages; page-- > 0; node = node_at(store, node)->parent)
        store->walk_node[page] = node;
    assert(node == NODE_NONE);

    int r = seq_map_path(child, store->walk_node, 0, pages, window, updates, cause);
    if (r == 0)
        r = seq_dense_reserve(child, RECENT_PAGES + 1, cause);
    if (r < 0)
        return r;
    child->deepest = parent->deepest;
    tree_pin(store, child->deepest);
    child->path_pages = child->hit_pages = child->room_pages = child->token_page = pages;
    child->window_page = window;

    /* What the parent has to itself in the window: the tree holds it packed only, the child's window is BF16 like the parent's. */
    const struct dense_entry *from[RECENT_PAGES];
    uint32_t privates = 0, copies = 0, rows = parent->committed_tokens % OSCAR_PAGE_TOKENS;
    for (uint32_t page = window; page < pages; page++) {
        const struct dense_entry *entry = seq_dense_find(parent, page);
        if (entry && entry->kind == DENSE_PRIVATE && !seq_dense_find(child, page))
            from[privates++] = entry;
    }
    for (; copies < privates; copies++) {
        r = copy_page(child, from[copies], OSCAR_PAGE_TOKENS, DENSE_PRIVATE, privates - copies + (rows > 0),
                      &updates[from[copies]->page], &ret->seq_fork.copy[copies], cause);
        if (r != 0)
            return r;
    }
    if (rows > 0) {
        child->tokens = malloc(OSCAR_PAGE_TOKENS * sizeof *child->tokens);
        if (!child->tokens)
            return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for token ids");
        child->token_capacity = OSCAR_PAGE_TOKENS;
        memcpy(child->tokens, parent->tokens + (size_t)(pages - parent->token_page) * OSCAR_PAGE_TOKENS,
               rows * sizeof *child->tokens);
        r = copy_page(child, seq_dense_find(parent, pages), rows, DENSE_TAIL, 1, &updates[pages],
                      &ret->seq_fork.copy[copies++], cause);
        if (r != 0)
            return r;
        child->room_pages++;
    }
    child->committed_tokens = parent->committed_tokens;
    ret->seq_fork.updates = child->room_pages;
    ret->seq_fork.copies = copies;
    return 0;
}

int fork_make(struct seq *parent, struct oscar_reply *ret, struct oscar_cause *cause) {
    if (parent->failure != 0)
        return oscar_fail(cause, parent->failure, "page %u of the sequence could not be sealed", parent->failed_page);
    struct seq *child;
    int r = seq_new(parent->client, parent->binding, &child, cause);
    if (r < 0)
        return r;
    r = fill_child(child, parent, ret, cause);
    if (r != 0) {
        seq_close(child, 0);
        (void)seq_end_if_done(child);
        return r;
    }
    if (child->holds > 0)
        seq_watch(child);
    parent->client->store->count.forks++;
    ret->seq_fork.seq = child->handle;
    ret->seq_fork.fence_slot = child->fence_slot;
    ret->seq_fork.committed_tokens = child->committed_tokens;
    return 0;
}

int fork_request(struct store_client *client, const struct oscar_request *request, uint64_t now_ns,
                 struct oscar_reply *ret, struct oscar_cause *cause) {
    (void)now_ns;
    struct seq *seq = NULL;
    int r = seq_get(client->store, client, request->seq_fork.seq, &seq, cause);
    if (r == 0)
        r = seq_fence_check(seq, request->seq_fork.fence, cause);
    if (r < 0)
        return r;
    if (seq->wait != WAIT_NONE)
        return oscar_fail(cause, OSCAR_ERR_STATE, "the sequence waits already");
    int made = OSCAR_PARKED;
    space_forgive(&seq->binding->dense);
    /* Copying what is still being written would be the client's stream's business, sharing it is not possible yet. */
    if (!seal_pending(seq))
        made = fork_make(seq, ret, cause);
    if (made >= 0)
        seq->fence = request->seq_fork.fence;
    if (made == OSCAR_PARKED)
        flight_park(seq, WAIT_FORK, request->id, 0);
    return made;
}
