/* SPDX-License-Identifier: Apache-2.0 */
#include <assert.h>
#include <stdlib.h>

#include "daemon/store/state.h"

#define INSPECT_BATCH 16U

struct inspect_job {
    struct pool_job job;
    struct seq *seq; /* lives until its jobs are done */
    const struct oscar_device_ops *ops;
    struct oscar_geometry geometry;
    uint32_t first_page, pages;
    const uint8_t *dense[INSPECT_BATCH];
    int32_t status[INSPECT_BATCH];
};

static void inspect_run(struct pool_job *job, void *stream) {
    struct inspect_job *inspect = (struct inspect_job *)job;
    int r = inspect->ops->inspect(stream, &inspect->geometry, inspect->dense, inspect->pages, inspect->status);
    for (uint32_t i = 0; i < inspect->pages && r < 0; i++)
        inspect->status[i] = r;
}

bool seal_is_job(const struct pool_job *job) { return job->run == inspect_run; }

/* Once the client has gone, only pages whose fence had been reached are still pending: its counters are not looked at again. */
static bool is_complete(const struct seq *seq, const struct dense_entry *entry) {
    return seq->client->gone || seq_reached(seq, entry->fence);
}

static bool may_inspect(const struct seq *seq, const struct dense_entry *entry) {
    return entry->kind == DENSE_PENDING && is_complete(seq, entry);
}

/* The first unpublished full page's entry and those after it are the sequence's own and have consecutive pages. */
static struct dense_entry *first_unpublished(const struct seq *seq) {
    return seq->path_pages < seq->room_pages ? seq_dense_find(seq, seq->path_pages) : NULL;
}

uint32_t seal_reach(const struct seq *seq) {
    const struct dense_entry *entry = first_unpublished(seq), *end = entry ? seq->dense + seq->denses : NULL;
    uint32_t reach = seq->path_pages;
    if (seq->failure == 0)
        for (; entry && entry < end && entry->kind != DENSE_TAIL; entry++)
            reach = entry->page + 1;
    return reach;
}

uint32_t seal_under_way(const struct seq *seq) {
    const struct dense_entry *first = first_unpublished(seq);
    if (!first || seq->failure != 0)
        return 0;
    /* Fences rise with the pages, so those that are reached come first. */
    uint32_t low = 0, high = seq_full_pages(seq) - seq->path_pages;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (first[middle].kind == DENSE_PENDING && !is_complete(seq, &first[middle]))
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

void seal_start(struct seq *seq) {
    struct store *store = seq->client->store;
    struct dense_entry *entry = first_unpublished(seq), *end = entry ? seq->dense + seq->denses : NULL;
    if (!entry || seq->failure != 0)
        return;
    while (entry < end && (entry->kind == DENSE_INSPECT || entry->kind == DENSE_INSPECTED))
        entry++;
    while (entry < end && may_inspect(seq, entry)) {
        struct inspect_job *inspect = malloc(sizeof *inspect);
        if (!inspect)
            return; /* still pending: tried again by the next poll */
        *inspect = (struct inspect_job){
            .job.run = inspect_run,
            .seq = seq,
            .ops = store->options.ops,
            .geometry = seq->model->identity.geometry,
            .first_page = entry->page,
        };
        while (inspect->pages < INSPECT_BATCH && entry < end && may_inspect(seq, entry)) {
            inspect->dense[inspect->pages++] = arena_address(&seq->model->arena[OSCAR_FORM_DENSE], entry->slot);
            entry->kind = DENSE_INSPECT;
            entry++;
        }
        seq->inspecting++;
        store->inspects_running++;
        pool_submit(store->pool, &inspect->job, POOL_URGENT);
    }
}

void seal_finished(struct pool_job *job) {
    struct inspect_job *inspect = (struct inspect_job *)job;
    struct seq *seq = inspect->seq;
    struct store *store = seq->client->store;

    seq->inspecting--;
    store->inspects_running--;
    for (uint32_t i = 0; i < inspect->pages; i++) {
        uint32_t page = inspect->first_page + i;
        if (inspect->status[i] == 0) {
            seq_dense_find(seq, page)->kind = DENSE_INSPECTED;
            continue;
        }
        store_note_failure(store, inspect->status[i], "inspecting pages", NULL);
        store->count.inspect_failures++;
        if (seq->failure == 0 || page < seq->failed_page) {
            seq->failure = inspect->status[i];
            seq->failed_page = page;
        }
    }
    free(inspect);
    if (seq->failure != 0) {
        flight_end(seq);
        flight_wake(store);
        if (seq->client->gone)
            seq_quarantine(seq);
    }
    seq_watch(seq);
}

/* True when the page was published. */
static bool publish_next(struct seq *seq) {
    struct store *store = seq->client->store;
    struct dense_entry *entry = first_unpublished(seq);
    if (!entry || entry->kind != DENSE_INSPECTED)
        return false;

    uint32_t page = entry->page, parent = seq->deepest, node = NODE_NONE;
    const uint32_t *tokens = seq->tokens + (size_t)(page - seq->token_page) * OSCAR_PAGE_TOKENS;
    uint64_t chain =
        tree_chain(store, parent == NODE_NONE ? seq->model->root_chain : node_at(store, parent)->chain, tokens);
    /* Below a page that a flush has unlinked nothing can be found, so nothing is looked for and nothing is linked. */
    bool linked = parent == NODE_NONE || (node_at(store, parent)->flags & NODE_LINKED);
    if (linked)
        node = tree_child(store, seq->model, parent, chain, tokens);
    entry->recent = page >= seq->window_page;
    if (node != NODE_NONE) {
        entry->kind = DENSE_PRIVATE;
        if (seq->client->gone)
            arena_quarantine(&seq->model->arena[OSCAR_FORM_DENSE], entry->slot);
        store->count.duplicates++;
    } else {
        if (tree_insert(store, seq->model, parent, chain, tokens, entry->slot, linked, &node, NULL) < 0)
            return false; /* no process memory for metadata: tried again by the next poll */
        tree_dense_reference(store, node, entry->recent);
        entry->kind = DENSE_SHARED;
        store->count.seals++;
    }
    entry->node = node;
    tree_pin(store, node);
    tree_unpin(store, parent);
    seq->deepest = node;
    seq->path_pages++;
    if (!entry->recent)
        pack_want(store, node);
    flight_published(seq, page, chain);
    return true;
}

void seal_publish(struct seq *seq, uint32_t limit) {
    uint32_t published = 0;
    /* What comes before a page that failed is as good as if that page had never been. */
    while ((seq->failure == 0 || seq->path_pages < seq->failed_page) && published < limit && publish_next(seq))
        published++;
    if (published == 0)
        return;
    struct store *store = seq->client->store;
    flight_wake(store);
    if (published == limit)
        pool_kick(store->pool);
    seq_notice(seq);
}
