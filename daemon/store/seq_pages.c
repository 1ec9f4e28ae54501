/* SPDX-License-Identifier: Apache-2.0 */
#include <assert.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/store/state.h"

int seq_dense_reserve(struct seq *seq, uint32_t more, struct oscar_cause *cause) {
    if (seq->dense_capacity - seq->denses >= more)
        return 0;
    uint32_t capacity = seq->dense_capacity * 2 > seq->denses + more ? seq->dense_capacity * 2 : seq->denses + more;
    struct dense_entry *larger = realloc(seq->dense, capacity * sizeof *larger);
    if (!larger)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a page table");
    seq->dense = larger;
    seq->dense_capacity = capacity;
    return 0;
}

/* Index of the first entry whose page is not below `page`. */
static uint32_t dense_from(const struct seq *seq, uint32_t page) {
    uint32_t low = 0, high = seq->denses;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (seq->dense[middle].page < page)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct dense_entry *seq_dense_find(const struct seq *seq, uint32_t page) {
    uint32_t i = dense_from(seq, page);
    return i < seq->denses && seq->dense[i].page == page ? &seq->dense[i] : NULL;
}

struct dense_entry *seq_dense_insert(struct seq *seq, uint32_t page, uint32_t slot, uint32_t node,
                                     enum dense_kind kind) {
    assert(seq->denses < seq->dense_capacity);
    uint32_t at = seq->denses > 0 && seq->dense[seq->denses - 1].page >= page ? dense_from(seq, page) : seq->denses;
    struct dense_entry *entry = &seq->dense[at];
    memmove(entry + 1, entry, (seq->denses - at) * sizeof *entry);
    *entry = (struct dense_entry){.page = page, .slot = slot, .node = node, .kind = kind};
    seq->denses++;
    return entry;
}

void seq_dense_release(struct seq *seq, const struct dense_entry *entry) {
    struct store *store = seq->client->store;
    if (entry->kind != DENSE_SHARED) {
        space_drop(store, &seq->model->arena[OSCAR_FORM_DENSE], entry->slot);
        return;
    }
    if (entry->recent)
        tree_recent_release(store, entry->node);
    tree_dense_release(store, entry->node);
}

void seq_slide(struct seq *seq, uint32_t page) {
    if (page <= seq->window_page)
        return;
    for (uint32_t i = dense_from(seq, seq->window_page); i < seq->denses && seq->dense[i].page < page; i++) {
        struct dense_entry *entry = &seq->dense[i];
        if (!entry->recent)
            continue;
        entry->recent = false;
        if (entry->kind == DENSE_SHARED)
            tree_recent_release(seq->client->store, entry->node);
    }
    seq->window_page = page;
}

int seq_map_path(struct seq *seq, const uint32_t *nodes, uint32_t from, uint32_t to, uint32_t window,
                 struct oscar_page_update *ret_updates, struct oscar_cause *cause) {
    struct store *store = seq->client->store;
    uint32_t denses = 0;
    for (uint32_t page = from; page < to; page++) {
        const struct node *node = node_at(store, nodes[page]);
        if (node->state == NODE_FINAL && (page < window || node->dense == SLOT_NONE))
            continue;
        denses++;
        int r = client_announce_dense(seq->client, seq->binding, node->dense, cause);
        if (r < 0)
            return r;
    }
    int r = client_announce_shared(seq->client, seq->binding, cause);
    if (r == 0)
        r = seq_dense_reserve(seq, denses, cause);
    if (r < 0)
        return r;

    for (uint32_t page = from; page < to; page++, ret_updates++) {
        const struct node *node = node_at(store, nodes[page]);
        bool dense = node->state == NODE_DENSE || (page >= window && node->dense != SLOT_NONE);
        *ret_updates = (struct oscar_page_update){
            .page = page,
            .ref = dense ? oscar_page_ref_make(OSCAR_FORM_DENSE, node->dense)
                         : oscar_page_ref_make(node_final_form(node), node->final),
        };
        if (!dense)
            continue;
        struct dense_entry *entry = seq_dense_insert(seq, page, node->dense, nodes[page], DENSE_SHARED);
        entry->recent = page >= window;
        tree_dense_reference(store, nodes[page], entry->recent);
    }
    return 0;
}

static int retired_reserve(struct seq *seq, uint32_t more, struct oscar_cause *cause) {
    if (seq->retired_capacity - seq->retireds >= more)
        return 0;
    uint32_t capacity = seq->retireds + more;
    struct retired *larger = realloc(seq->retired, capacity * sizeof *larger);
    if (!larger)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a page table");
    seq->retired = larger;
    seq->retired_capacity = capacity;
    return 0;
}

enum due { DUE_NOTHING, DUE_FINAL, DUE_SHARED };

static enum due entry_due(const struct store *store, const struct dense_entry *entry) {
    if (entry->kind != DENSE_PRIVATE && entry->kind != DENSE_SHARED)
        return DUE_NOTHING;
    const struct node *node = node_at(store, entry->node);
    if (node->state == NODE_FINAL)
        return entry->recent ? DUE_NOTHING : DUE_FINAL;
    /* The tree's dense copy serves as well as ours: one of them is enough. */
    return entry->kind == DENSE_PRIVATE ? DUE_SHARED : DUE_NOTHING;
}

int seq_updates(struct seq *seq, uint64_t fence, struct oscar_page_update *ret_updates, uint32_t *ret_count,
                struct oscar_cause *cause) {
    struct store *store = seq->client->store;
    uint32_t due = 0;
    seq->notice = false; /* it has asked: should it get nothing now, it is told again */
    for (uint32_t i = 0; i < seq->denses; i++) {
        enum due what = entry_due(store, &seq->dense[i]);
        if (what == DUE_NOTHING)
            continue;
        due++;
        uint32_t slot = what == DUE_SHARED ? node_at(store, seq->dense[i].node)->dense : SLOT_NONE;
        int r = slot == SLOT_NONE ? 0 : client_announce_dense(seq->client, seq->binding, slot, cause);
        if (r < 0)
            return r;
    }
    *ret_count = due;
    if (due == 0)
        return 0;
    int r = client_announce_shared(seq->client, seq->binding, cause);
    if (r == 0)
        r = retired_reserve(seq, due, cause);
    if (r < 0)
        return r;

    uint32_t kept = 0;
    for (uint32_t i = 0; i < seq->denses; i++) {
        struct dense_entry entry = seq->dense[i];
        enum due what = entry_due(store, &entry);
        if (what == DUE_NOTHING) {
            seq->dense[kept++] = entry;
            continue;
        }
        const struct node *node = node_at(store, entry.node);
        seq->retired[seq->retireds++] = (struct retired){
            .fence = fence,
            .slot = entry.slot,
            .node = entry.kind == DENSE_SHARED ? entry.node : NODE_NONE,
        };
        oscar_page_ref ref;
        if (what == DUE_FINAL) {
            ref = oscar_page_ref_make(node_final_form(node), node->final);
        } else {
            ref = oscar_page_ref_make(OSCAR_FORM_DENSE, node->dense);
            entry.kind = DENSE_SHARED;
            entry.slot = node->dense;
            tree_dense_reference(store, entry.node, entry.recent);
            seq->dense[kept++] = entry;
        }
        *ret_updates++ = (struct oscar_page_update){.page = entry.page, .ref = ref};
    }
    seq->denses = kept;
    seq_watch(seq);
    return 0;
}

void seq_notice(struct seq *seq) {
    struct store_client *client = seq->client;
    if (seq->notice || seq->closing || client->gone)
        return;
    for (uint32_t i = 0; i < seq->denses && !seq->notice; i++)
        seq->notice = entry_due(client->store, &seq->dense[i]) != DUE_NOTHING;
    if (seq->notice)
        atomic_store_explicit(&client->window->updates_waiting, ++client->notices, memory_order_release);
}

void seq_retired_release(struct seq *seq) {
    struct store *store = seq->client->store;
    bool over = seq->client->exited || (seq->closing && seq_reached(seq, seq->close_fence));
    uint32_t done = 0;
    while (done < seq->retireds && (over || seq_reached(seq, seq->retired[done].fence))) {
        const struct retired *retired = &seq->retired[done++];
        if (retired->node == NODE_NONE)
            space_drop(store, &seq->model->arena[OSCAR_FORM_DENSE], retired->slot);
        else
            tree_dense_release(store, retired->node);
    }
    if (done > 0) {
        seq->retireds -= done;
        memmove(seq->retired, seq->retired + done, seq->retireds * sizeof *seq->retired);
    }
    /* The fork's stream has copied from them before it raised its counter for the first time. */
    if (seq->holds > 0 && (over || seq_reached(seq, 1)))
        while (seq->holds > 0)
            space_drop(store, &seq->model->arena[OSCAR_FORM_DENSE], seq->hold[--seq->holds]);
}
