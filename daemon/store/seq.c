/* SPDX-License-Identifier: Apache-2.0 */
#include <assert.h>
#include <stdlib.h>

#include "daemon/store/state.h"
#include "proto/cleanup.h"

int seq_get(struct store *store, struct store_client *client, uint64_t handle, struct seq **ret,
            struct oscar_cause *cause) {
    int error;
    struct seq *seq = handle_get(&store->seqs, handle, &error);
    if (!seq)
        return oscar_fail(cause, error, "sequence 0x%llx %s", (unsigned long long)handle,
                          error == OSCAR_ERR_STALE ? "was closed" : "does not exist");
    if (seq->client != client)
        return oscar_fail(cause, OSCAR_ERR_NOT_FOUND, "sequence 0x%llx is not of this connection",
                          (unsigned long long)handle);
    *ret = seq;
    return 0;
}

int seq_new(struct store_client *client, struct binding *binding, struct seq **ret, struct oscar_cause *cause) {
    struct store *store = client->store;
    if (client->open_seqs >= store->options.max_sequences)
        return oscar_fail(cause, OSCAR_ERR_LIMIT, "%u sequences are open on this connection", client->open_seqs);
    _cleanup_free_ struct seq *seq = calloc(1, sizeof *seq);
    if (!seq)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a sequence");
    seq->client = client;
    seq->model = binding->model;
    seq->binding = binding;
    seq->deepest = NODE_NONE;
    seq->window_page = seq_window(0);
    seq->close_fence = UINT64_MAX;
    int r = handle_take(&store->seqs, seq, &seq->handle, cause);
    if (r < 0)
        return r;
    r = client_fence_take(client, &seq->fence_slot, cause);
    if (r < 0) {
        handle_give(&store->seqs, seq->handle);
        return r;
    }
    LIST_INSERT_HEAD(&client->seqs, seq, in_client);
    LIST_INSERT_HEAD(&seq->model->seqs, seq, in_model);
    client->open_seqs++;
    *ret = TAKE_PTR(seq);
    return 0;
}

bool seq_reached(const struct seq *seq, uint64_t fence) {
    return oscar_fence_reached(&seq->client->fences[seq->fence_slot], fence);
}

int seq_fence_check(const struct seq *seq, uint64_t fence, struct oscar_cause *cause) {
    if (fence % 2 != 0 || fence <= seq->fence || fence > UINT64_MAX - 4)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "fence %llu after %llu: must be even and larger",
                          (unsigned long long)fence, (unsigned long long)seq->fence);
    return 0;
}

void seq_watch(struct seq *seq) {
    if (seq->watched)
        return;
    seq->watched = true;
    TAILQ_INSERT_TAIL(&seq->client->store->watched, seq, in_watch);
}

void seq_close(struct seq *seq, uint64_t close_fence) {
    struct store *store = seq->client->store;
    flight_cancel(seq, OSCAR_ERR_STATE, "the sequence was closed");
    seq->closing = true;
    seq->close_fence = close_fence;
    handle_give(&store->seqs, seq->handle);
    seq->client->open_seqs--;
    seq_slide(seq, UINT32_MAX);
    flight_shrink(seq);
    seq_watch(seq);
}

void seq_quarantine(struct seq *seq) {
    struct arena *arena = &seq->model->arena[OSCAR_FORM_DENSE];
    for (uint32_t i = 0; i < seq->denses; i++) {
        const struct dense_entry *entry = &seq->dense[i];
        bool may_be_published = seq->failure == 0 && entry->kind != DENSE_TAIL && entry->kind != DENSE_PRIVATE;
        if (entry->kind != DENSE_SHARED && !may_be_published)
            arena_quarantine(arena, entry->slot);
    }
    for (uint32_t i = 0; i < seq->retireds; i++)
        if (seq->retired[i].node == NODE_NONE)
            arena_quarantine(arena, seq->retired[i].slot);
}

void seq_abandon(struct seq *seq) {
    if (!seq->closing)
        seq_close(seq, UINT64_MAX);
    /* Nobody will say any more whether the rest of the work was enqueued at all. */
    for (uint32_t i = 0; i < seq->denses; i++)
        if (seq->dense[i].kind == DENSE_PENDING && !seq_reached(seq, seq->dense[i].fence))
            seq->dense[i].kind = DENSE_TAIL;
    seq_quarantine(seq);
    flight_shrink(seq);
}

bool seq_end_if_done(struct seq *seq) {
    struct store_client *client = seq->client;
    struct store *store = client->store;
    if (!seq->closing || seq->inspecting > 0 || seal_pending(seq) ||
        !(client->exited || seq_reached(seq, seq->close_fence)))
        return false;

    flight_end(seq);
    for (uint32_t i = 0; i < seq->denses; i++)
        seq_dense_release(seq, &seq->dense[i]);
    seq->denses = 0;
    seq_retired_release(seq);
    tree_unpin(store, seq->deepest);
    client_fence_give(client, seq->fence_slot);
    if (seq->watched)
        TAILQ_REMOVE(&store->watched, seq, in_watch);
    LIST_REMOVE(seq, in_client);
    LIST_REMOVE(seq, in_model);
    free(seq->dense);
    free(seq->retired);
    free(seq->tokens);
    free(seq->flight.chain);
    free(seq);
    return true;
}

bool seq_proceed(struct seq *seq, uint32_t limit) {
    seq_retired_release(seq);
    seal_start(seq);
    seal_publish(seq, limit);
    if (seq_end_if_done(seq))
        return true;
    bool waits = seq->closing || seq->retireds > 0 || seq->holds > 0 || seal_pending(seq);
    if (waits)
        seq_watch(seq);
    else if (seq->watched) {
        seq->watched = false;
        TAILQ_REMOVE(&seq->client->store->watched, seq, in_watch);
    }
    return false;
}
