/* SPDX-License-Identifier: Apache-2.0 */
#define XXH_INLINE_ALL
#include <sodium.h>
#include <stdlib.h>
#include <xxhash.h>

#include "daemon/store/state.h"

/* What one poll does at most, so that the loop stays responsive; the rest is done by the next one, at once. */
#define POLL_SEQUENCES 1024U
#define POLL_PAGES 128U /* of one sequence */

/* One a thread, so that no two jobs wait for each other's work: whoever calls waits for its own in the call. */
static int streams_open(struct store *store, struct oscar_cause *cause) {
    const struct oscar_stream_options options = {.threads = 1, .low_priority = true};
    uint32_t threads = store->options.pack_threads < POOL_MAX_THREADS ? store->options.pack_threads : POOL_MAX_THREADS;
    int r = 0;
    for (uint32_t i = 0; i < threads && r == 0; i++)
        r = store->options.ops->stream_open(store->options.device, &options, &store->stream[i], cause);
    return r;
}

static void streams_close(struct store *store) {
    for (uint32_t i = 0; i < POOL_MAX_THREADS; i++)
        if (store->stream[i])
            store->options.ops->stream_close(store->stream[i]);
}

int store_new(const struct store_options *options, struct store **ret, struct oscar_cause *cause) {
    if (sodium_init() < 0)
        return oscar_fail(cause, OSCAR_ERR_INTERNAL, "libsodium does not start");
    struct store *store = calloc(1, sizeof *store);
    if (!store)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the store");
    store->options = *options;
    store->oldest = store->newest = NODE_NONE;
    LIST_INIT(&store->clients);
    TAILQ_INIT(&store->watched);
    TAILQ_INIT(&store->waiting);
    XXH3_generateSecret_fromSeed(store->hash_secret, options->hash_seed);

    int r = meta_open(&store->meta, cause);
    if (r == 0)
        r = table_open(&store->table, cause);
    if (r == 0)
        r = streams_open(store, cause);
    if (r == 0)
        r = pool_open(options->pack_threads, (void *const *)store->stream, &store->pool, cause);
    if (r == 0) {
        const struct memory_options memory = {
            .ops = options->ops,
            .device = options->device,
            .budget_bytes = options->budget_bytes,
            .packed_chunk_bytes = options->packed_chunk_bytes,
            .dense_chunk_bytes = options->dense_chunk_bytes,
            .generation = store->meta.header->generation,
            .pool = store->pool,
            .arg = store,
            .chunk_made = space_chunk_made,
            .chunk_gone = space_chunk_gone,
        };
        memory_open(&store->memory, &memory);
    }
    if (r < 0) {
        pool_close(store->pool);
        streams_close(store);
        table_close(&store->table);
        meta_close(&store->meta);
        free(store);
        return r;
    }
    *ret = store;
    return 0;
}

static void tell_new_forms(struct store *store) {
    for (uint32_t i = 0; i < store->models.capacity; i++) {
        struct store_model *model = model_at(store, i);
        if (!model || !model->has_new_forms)
            continue;
        model->has_new_forms = false;
        struct seq *seq;
        LIST_FOREACH(seq, &model->seqs, in_model) { seq_notice(seq); }
    }
}

void store_note_failure(struct store *store, int result, const char *what, const struct oscar_cause *cause) {
    if (result != OSCAR_ERR_DEVICE || store->device_failed)
        return;
    store->device_failed = true;
    struct oscar_cause text;
    (void)oscar_fail(&text, result, "%s: %.200s", what, cause ? cause->text : oscar_error_text(result));
    if (store->options.hooks.device_failed)
        store->options.hooks.device_failed(store->options.hooks.arg, &text);
}

/* Whoever has waited for a chunk, or for the room that another one took, may go on. */
static void memory_job_finished(struct store *store, struct pool_job *job) {
    struct oscar_cause cause;
    store_note_failure(store, memory_finished(job, &cause), "memory of the device", &cause);
    store->pack_parked = false;
    flight_wake(store);
}

static void take_finished(struct store *store) {
    for (struct pool_job *job = pool_take(store->pool), *next; job; job = next) {
        next = job->next;
        if (memory_is_job(job))
            memory_job_finished(store, job);
        else if (model_is_job(job))
            model_finished(job);
        else if (seal_is_job(job))
            seal_finished(job);
        else
            pack_finished(job);
    }
    tell_new_forms(store);
}

void store_free(struct store *store) {
    if (!store)
        return;
    pool_wait(store->pool);
    take_finished(store);
    struct store_client *client;
    while ((client = LIST_FIRST(&store->clients))) {
        /* Nothing is published any more: what has been inspected or could be is dropped. */
        struct seq *seq;
        LIST_FOREACH(seq, &client->seqs, in_client) {
            if (seq->failure == 0)
                seq->failure = OSCAR_ERR_DISCONNECTED;
        }
        store_client_exited(store, client);
    }
    while (tree_evict(store))
        ;
    for (uint32_t i = 0; i < store->models.capacity; i++)
        if (store->models.object[i])
            model_free(store->models.object[i]);
    pool_wait(store->pool);
    take_finished(store); /* the device has its memory back */
    pool_close(store->pool);
    streams_close(store);
    free(store->pack_queue.node);
    handle_table_close(&store->models);
    handle_table_close(&store->seqs);
    handle_table_close(&store->leases);
    handle_table_close(&store->promises);
    heap_close(&store->heap);
    table_close(&store->table);
    meta_close(&store->meta);
    free(store);
}

uint64_t store_oldest_work(const struct store *store) { return pool_oldest(store->pool); }

int store_event_fd(const struct store *store) { return pool_event_fd(store->pool); }

bool store_poll_pending(const struct store *store) { return !TAILQ_EMPTY(&store->watched) || pack_possible(store); }

void store_poll(struct store *store, uint64_t now_ns) {
    take_finished(store);
    struct seq *seq, *last = TAILQ_LAST(&store->watched, seq_queue);
    uint32_t looked_at = 0;
    while ((seq = TAILQ_FIRST(&store->watched))) {
        struct store_client *client = seq->client;
        bool was_last = seq == last;
        /* Whoever goes on waiting goes to the end. */
        TAILQ_REMOVE(&store->watched, seq, in_watch);
        seq->watched = false;
        if (seq_proceed(seq, POLL_PAGES))
            client_free_if_done(client);
        if (was_last || ++looked_at == POLL_SEQUENCES)
            break;
    }
    pack_dispatch(store);
    flight_poll(store, now_ns);
}

typedef int handler(struct store_client *client, const struct oscar_request *request, uint64_t now_ns,
                    struct oscar_reply *ret, struct oscar_cause *cause);

static const struct {
    handler *handle;
    bool window; /* its tokens or updates lie there */
} verbs[OSCAR_VERBS] = {
    [OSCAR_PROBE] = {lease_request_probe, true},
    [OSCAR_LEASE_ADOPT] = {lease_request_adopt, false},
    [OSCAR_LEASE_CLOSE] = {lease_request_close, false},
    [OSCAR_SEQ_OPEN] = {seq_request_open, true},
    [OSCAR_SEQ_WAIT] = {flight_request_wait, false},
    [OSCAR_SEQ_EXTEND] = {seq_request_extend, true},
    [OSCAR_SEQ_RESERVE] = {seq_request_reserve, true},
    [OSCAR_SEQ_ADVANCE] = {seq_request_advance, true},
    [OSCAR_SEQ_FORK] = {fork_request, true},
    [OSCAR_SEQ_CLOSE] = {seq_request_close, false},
};

int store_request(struct store *store, struct store_client *client, const struct oscar_request *request,
                  uint64_t now_ns, struct oscar_reply *ret_reply, struct oscar_cause *cause) {
    if ((unsigned)request->verb >= OSCAR_VERBS || !verbs[request->verb].handle || client->gone)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "verb %d is not the store's", (int)request->verb);
    /* The window belongs to one request at a time: whoever uses it again has given up the one that was parked. */
    if (client->in_window && verbs[request->verb].window)
        flight_cancel(client->in_window, OSCAR_ERR_STATE, "the window was used for another call meanwhile");

    struct oscar_reply reply = {.id = request->id, .verb = request->verb};
    struct oscar_cause failure; /* what failed on the way is nobody's business if the request did not */
    int r = verbs[request->verb].handle(client, request, now_ns, &reply, &failure);
    if (r < 0 && cause)
        *cause = failure;
    if (r == OSCAR_ERR_NO_SPACE)
        store->count.no_space++;
    if (r == 0)
        *ret_reply = reply;
    return r;
}
