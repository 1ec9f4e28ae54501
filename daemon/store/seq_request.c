/* SPDX-License-Identifier: Apache-2.0 */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/store/state.h"

/* So long a reserve waits for memory that the device has been asked for: far longer than a device that works takes. */
#define SPACE_WAIT_NS UINT64_C(5000000000)

/* The hit that a sequence is given of what was found: with a dense tail it ends where the last pages before its end are BF16. */
static uint32_t usable_hit(const struct store *store, const struct walk *walk, bool dense_tail) {
    if (!dense_tail)
        return walk->hits;
    for (uint32_t page = seq_window(walk->hits); page < walk->hits; page++)
        if (node_at(store, store->walk_node[page])->dense == SLOT_NONE)
            return walk->hits > RECENT_PAGES ? walk->hits - RECENT_PAGES : 0;
    return walk->hits;
}

static int tokens_check(uint32_t tokens, struct oscar_cause *cause) {
    if (tokens > OSCAR_MAX_SEQUENCE_TOKENS)
        return oscar_fail(cause, OSCAR_ERR_LIMIT, "%u tokens: a sequence has at most %u", tokens,
                          OSCAR_MAX_SEQUENCE_TOKENS);
    return 0;
}

/* The sequence takes over walk_node[0 .. hit - 1], of which it has path_pages already. */
static int take_hit(struct seq *seq, uint32_t hit, struct oscar_page_update *ret_updates, struct oscar_cause *cause) {
    struct store *store = seq->client->store;
    uint32_t window = seq_window(hit);
    int r = seq_map_path(seq, store->walk_node, seq->path_pages, hit, window, ret_updates, cause);
    if (r < 0)
        return r;
    uint32_t before = seq->deepest;
    if (hit > 0) {
        seq->deepest = store->walk_node[hit - 1];
        tree_pin(store, seq->deepest);
    }
    tree_unpin(store, before);
    seq->path_pages = seq->hit_pages = seq->room_pages = seq->token_page = hit;
    seq->committed_tokens = hit * OSCAR_PAGE_TOKENS;
    seq_slide(seq, window);
    return 0;
}

int seq_request_open(struct store_client *client, const struct oscar_request *request, uint64_t now_ns,
                     struct oscar_reply *ret, struct oscar_cause *cause) {
    (void)now_ns;
    struct store *store = client->store;
    struct binding *binding = NULL;
    int r = model_get(store, client, request->seq_open.model, &binding, cause);
    if (r == 0)
        r = tokens_check(request->seq_open.tokens, cause);
    if (r < 0)
        return r;

    const uint32_t *tokens = client_tokens(client);
    struct walk walk;
    tree_walk(store, binding->model, tokens, request->seq_open.tokens / OSCAR_PAGE_TOKENS, &walk);
    uint32_t hit = usable_hit(store, &walk, request->seq_open.dense_tail);

    struct seq *seq = NULL;
    r = seq_new(client, binding, &seq, cause);
    if (r < 0)
        return r;
    seq->dense_tail = request->seq_open.dense_tail;
    r = take_hit(seq, hit, client_updates(client), cause);
    if (r < 0) {
        seq_close(seq, 0);
        (void)seq_end_if_done(seq);
        return r;
    }
    uint32_t in_flight = flight_join(seq, tokens, &walk);
    store->count.opens++;
    store->count.open_hits += hit > 0;
    store->count.queried_tokens += request->seq_open.tokens;
    store->count.hit_tokens += seq->committed_tokens;

    ret->seq_open.seq = seq->handle;
    ret->seq_open.fence_slot = seq->fence_slot;
    ret->seq_open.hit_tokens = seq->committed_tokens;
    ret->seq_open.in_flight_tokens = in_flight * OSCAR_PAGE_TOKENS;
    ret->seq_open.updates = hit;
    return 0;
}

int seq_request_extend(struct store_client *client, const struct oscar_request *request, uint64_t now_ns,
                       struct oscar_reply *ret, struct oscar_cause *cause) {
    (void)now_ns;
    struct store *store = client->store;
    struct seq *seq = NULL;
    int r = seq_get(store, client, request->seq_extend.seq, &seq, cause);
    if (r == 0)
        r = seq_fence_check(seq, request->seq_extend.fence, cause);
    if (r == 0)
        r = tokens_check(request->seq_extend.tokens, cause);
    if (r < 0)
        return r;
    if (seq->wait != WAIT_NONE || seq->committed_tokens != seq->path_pages * OSCAR_PAGE_TOKENS ||
        seq->room_pages != seq->path_pages || seq->hit_pages != seq->path_pages)
        return oscar_fail(cause, OSCAR_ERR_STATE,
                          "a sequence is extended before its first reserve, and not while it waits");

    const uint32_t *tokens = client_tokens(client);
    struct walk walk;
    tree_walk(store, seq->model, tokens, request->seq_extend.tokens / OSCAR_PAGE_TOKENS, &walk);
    uint32_t before = seq->path_pages, hit = usable_hit(store, &walk, seq->dense_tail);
    /* What it has stays as it is: should those pages have been flushed and computed anew meanwhile, they are another path. */
    bool longer = hit > before && (before == 0 || store->walk_node[before - 1] == seq->deepest);
    r = longer ? take_hit(seq, hit, client_updates(client), cause) : 0;
    if (r < 0)
        return r;
    uint32_t mapped = seq->path_pages - before, updates = 0;
    seq->fence = request->seq_extend.fence;
    /* Without them the entries stay as they are: the next request tries again. */
    if (seq_updates(seq, seq->fence + 1, client_updates(client) + mapped, &updates, NULL) < 0)
        updates = 0;
    uint32_t in_flight = flight_join(seq, tokens, &walk);
    store->count.hit_tokens += mapped * OSCAR_PAGE_TOKENS;

    ret->seq_extend.hit_tokens = seq->committed_tokens;
    ret->seq_extend.in_flight_tokens = in_flight * OSCAR_PAGE_TOKENS;
    ret->seq_extend.updates = mapped + updates;
    return 0;
}

void seq_room_drop(struct seq *seq, uint32_t pages) {
    for (; seq->room_pages > pages; seq->room_pages--)
        space_drop(seq->client->store, &seq->model->arena[OSCAR_FORM_DENSE], seq->dense[--seq->denses].slot);
}

/* Takes the rest of the room, and when it is complete shows it to the client. All or nothing, unless OSCAR_PARKED: then it keeps what
 * it has so far. */
static int room_take(struct seq *seq, uint32_t first, uint32_t pages, struct oscar_reply *ret,
                     struct oscar_cause *cause) {
    struct store_client *client = seq->client;
    struct arena *arena = &seq->model->arena[OSCAR_FORM_DENSE];
    int r = 0;
    while (seq->room_pages < pages && r == 0) {
        uint32_t slot;
        r = space_take(client->store, arena, &seq->binding->dense, pages - seq->room_pages, &slot, cause);
        if (r == 0)
            (void)seq_dense_insert(seq, seq->room_pages++, slot, NODE_NONE, DENSE_TAIL);
    }
    struct oscar_page_update *updates = client_updates(client);
    for (uint32_t page = first; page < pages && r == 0; page++) {
        uint32_t slot = seq_dense_find(seq, page)->slot;
        *updates++ = (struct oscar_page_update){.page = page, .ref = oscar_page_ref_make(OSCAR_FORM_DENSE, slot)};
        r = client_announce_dense(client, seq->binding, slot, cause);
    }
    if (r < 0)
        seq_room_drop(seq, first);
    if (r == 0) {
        ret->seq_reserve.reserved_tokens = seq->room_pages * OSCAR_PAGE_TOKENS;
        ret->seq_reserve.updates = seq->room_pages - first;
    }
    return r;
}

int seq_request_reserve(struct store_client *client, const struct oscar_request *request, uint64_t now_ns,
                        struct oscar_reply *ret, struct oscar_cause *cause) {
    struct store *store = client->store;
    struct seq *seq = NULL;
    int r = seq_get(store, client, request->seq_reserve.seq, &seq, cause);
    if (r < 0)
        return r;
    if (request->seq_reserve.tokens > OSCAR_MAX_SEQUENCE_TOKENS - seq->committed_tokens)
        return oscar_fail(cause, OSCAR_ERR_LIMIT, "%u tokens after %u: a sequence has at most %u",
                          request->seq_reserve.tokens, seq->committed_tokens, OSCAR_MAX_SEQUENCE_TOKENS);
    if (seq->failure != 0)
        return oscar_fail(cause, seq->failure, "page %u of the sequence could not be sealed", seq->failed_page);

    uint32_t tokens = seq->committed_tokens + request->seq_reserve.tokens;
    uint32_t pages = (tokens + OSCAR_PAGE_TOKENS - 1) / OSCAR_PAGE_TOKENS;
    uint32_t first = seq->room_pages;
    r = pages > first ? seq_dense_reserve(seq, pages - first, cause) : 0;
    if (r < 0)
        return r;
    space_forgive(&seq->binding->dense);
    r = room_take(seq, first, pages, ret, cause);
    if (r == OSCAR_PARKED) {
        flight_cancel(seq, OSCAR_ERR_STATE, "the sequence went on while a call on it was parked");
        seq->wait_first = first;
        seq->wait_pages = pages;
        flight_park(seq, WAIT_SPACE, request->id, now_ns + SPACE_WAIT_NS);
    }
    return r;
}

int seq_reserve_again(struct seq *seq, struct oscar_reply *ret, struct oscar_cause *cause) {
    if (seq->failure == 0)
        return room_take(seq, seq->wait_first, seq->wait_pages, ret, cause);
    seq_room_drop(seq, seq->wait_first);
    return oscar_fail(cause, seq->failure, "page %u of the sequence could not be sealed", seq->failed_page);
}

/* Takes the ids of `count` tokens behind the committed ones out of the window. */
static int tokens_append(struct seq *seq, uint32_t count, struct oscar_cause *cause) {
    if (count == 0)
        return 0;
    /* Those of published pages are in the tree by now. */
    uint32_t begin = seq->token_page * OSCAR_PAGE_TOKENS, have = seq->committed_tokens - begin;
    uint32_t drop = (seq->path_pages - seq->token_page) * OSCAR_PAGE_TOKENS;
    if (drop > 0) {
        have -= drop;
        memmove(seq->tokens, seq->tokens + drop, have * sizeof *seq->tokens);
        seq->token_page = seq->path_pages;
    }
    uint32_t need = have + count;
    if (need > seq->token_capacity || (need < seq->token_capacity / 8 && seq->token_capacity > 1024)) {
        uint32_t capacity = (need + 255) / 256 * 256;
        uint32_t *resized = realloc(seq->tokens, capacity * sizeof *resized);
        if (!resized)
            return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for token ids");
        seq->tokens = resized;
        seq->token_capacity = capacity;
    }
    memcpy(seq->tokens + have, client_tokens(seq->client), count * sizeof *seq->tokens);
    return 0;
}

int seq_request_advance(struct store_client *client, const struct oscar_request *request, uint64_t now_ns,
                        struct oscar_reply *ret, struct oscar_cause *cause) {
    (void)now_ns;
    struct store *store = client->store;
    uint32_t count = request->seq_advance.tokens;
    struct seq *seq = NULL;
    int r = seq_get(store, client, request->seq_advance.seq, &seq, cause);
    if (r == 0)
        r = seq_fence_check(seq, request->seq_advance.fence, cause);
    if (r == 0)
        r = tokens_check(count, cause);
    if (r < 0)
        return r;
    if (seq->failure != 0)
        return oscar_fail(cause, seq->failure, "page %u of the sequence could not be sealed", seq->failed_page);
    if (count > seq->room_pages * OSCAR_PAGE_TOKENS - seq->committed_tokens)
        return oscar_fail(cause, OSCAR_ERR_STATE, "%u tokens after %u, but room for %u is reserved", count,
                          seq->committed_tokens, seq->room_pages * OSCAR_PAGE_TOKENS);

    r = tokens_append(seq, count, cause);
    if (r < 0)
        return r;
    uint32_t full = seq_full_pages(seq);
    seq->fence = request->seq_advance.fence;
    seq->committed_tokens += count;
    if (count > 0)
        flight_cancel(seq, OSCAR_ERR_STATE, "the sequence went on while a call on it was parked");
    for (uint32_t page = full; page < seq_full_pages(seq); page++) {
        struct dense_entry *entry = seq_dense_find(seq, page);
        entry->kind = DENSE_PENDING;
        entry->fence = seq->fence;
    }
    seq_slide(seq, seq_window(seq_full_pages(seq)));
    seq_watch(seq); /* inspections begin with the next poll: a thread woken now would delay the reply */

    uint32_t updates = 0;
    if (seq_updates(seq, seq->fence + 1, client_updates(client), &updates, NULL) < 0)
        updates = 0;
    ret->seq_advance.committed_tokens = seq->committed_tokens;
    ret->seq_advance.sealed_tokens = seq->path_pages * OSCAR_PAGE_TOKENS;
    ret->seq_advance.updates = updates;
    return 0;
}

int seq_request_close(struct store_client *client, const struct oscar_request *request, uint64_t now_ns,
                      struct oscar_reply *ret, struct oscar_cause *cause) {
    (void)now_ns;
    (void)ret;
    struct seq *seq = NULL;
    int r = seq_get(client->store, client, request->seq_close.seq, &seq, cause);
    if (r == 0)
        r = seq_fence_check(seq, request->seq_close.fence, cause);
    if (r < 0)
        return r;
    seq_close(seq, request->seq_close.fence);
    (void)seq_proceed(seq, 0);
    return 0;
}
