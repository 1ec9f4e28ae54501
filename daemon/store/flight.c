/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Single flight. A sequence that misses pages promises them, unless somebody has promised the first of them already: then it is
 * told so, and may wait. Promises are hints by hash: what is really there is found by a walk, and nothing hangs on a broken one.
 */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/store/state.h"

static struct seq_list *bucket(struct store *store, uint64_t chain) {
    return &store->promise_bucket[(chain ^ chain >> 32) % PROMISE_BUCKETS];
}

static uint64_t promise_key(const struct promise *promise) { return promise->chain[promise->next - promise->first]; }

uint32_t flight_find(struct store *store, const struct store_model *model, const uint32_t *tokens, struct walk *walk,
                     uint64_t *ret_promise) {
    *ret_promise = 0;
    if (walk->hits == walk->pages)
        return walk->hits;
    /* The walk has hashed at least the page that it missed. */
    uint64_t key = store->walk_chain[walk->hits];
    struct seq *seq = NULL;
    LIST_FOREACH(seq, bucket(store, key), promise.in_bucket) {
        const struct promise *promise = &seq->promise;
        if (promise->next != walk->hits || promise_key(promise) != key || seq->model != model)
            continue;
        tree_walk_hashes(store, model, tokens, walk);
        uint32_t page = walk->hits, end = promise->first + promise->count;
        while (page < walk->pages && page < end && promise->chain[page - promise->first] == store->walk_chain[page])
            page++;
        *ret_promise = promise->handle;
        return page;
    }
    return walk->hits;
}

static void flight_forget(struct seq *seq) {
    free(seq->flight.chain);
    seq->flight = (struct flight){0};
}

uint32_t flight_join(struct seq *seq, const uint32_t *tokens, struct walk *walk) {
    struct store *store = seq->client->store;
    flight_end(seq);
    flight_forget(seq);

    uint64_t found;
    uint32_t end = flight_find(store, seq->model, tokens, walk, &found);
    uint32_t first = found ? seq->path_pages : walk->hits;
    if (!found) {
        tree_walk_hashes(store, seq->model, tokens, walk);
        end = walk->pages;
    }
    /* A hint: without memory for it there is none. */
    uint64_t *chain = end > first ? malloc((end - first) * sizeof *chain) : NULL;
    if (!chain)
        return seq->path_pages;
    memcpy(chain, store->walk_chain + first, (end - first) * sizeof *chain);
    if (found) {
        seq->flight = (struct flight){.promise = found, .chain = chain, .first = first, .count = end - first};
        return end;
    }
    struct promise promise = {.chain = chain, .first = first, .count = end - first, .next = first};
    if (handle_take(&store->promises, seq, &promise.handle, NULL) < 0) {
        free(chain);
        return seq->path_pages;
    }
    seq->promise = promise;
    LIST_INSERT_HEAD(bucket(store, promise_key(&promise)), seq, promise.in_bucket);
    return seq->path_pages;
}

void flight_published(struct seq *seq, uint32_t page, uint64_t chain) {
    struct promise *promise = &seq->promise;
    if (!promise->handle || page < promise->next)
        return;
    /* The worker may have gone another way than the prompt of its open. */
    if (promise_key(promise) != chain || ++promise->next == promise->first + promise->count) {
        flight_end(seq);
        return;
    }
    LIST_REMOVE(seq, promise.in_bucket);
    LIST_INSERT_HEAD(bucket(seq->client->store, promise_key(promise)), seq, promise.in_bucket);
}

void flight_shrink(struct seq *seq) {
    struct promise *promise = &seq->promise;
    if (!promise->handle)
        return;
    uint32_t reach = seal_reach(seq);
    if (reach <= promise->next)
        flight_end(seq);
    else if (reach < promise->first + promise->count)
        promise->count = reach - promise->first;
    flight_wake(seq->client->store);
}

void flight_end(struct seq *seq) {
    struct promise *promise = &seq->promise;
    if (!promise->handle)
        return;
    LIST_REMOVE(seq, promise.in_bucket);
    handle_give(&seq->client->store->promises, promise->handle);
    free(promise->chain);
    *promise = (struct promise){0};
    flight_wake(seq->client->store);
}

void flight_wake(struct store *store) {
    if (store->wake || TAILQ_EMPTY(&store->waiting))
        return;
    store->wake = true;
    pool_kick(store->pool);
}

/* Whether there is still something to wait for. */
static bool flight_under_way(const struct seq *seq) {
    int error;
    if (!seq->flight.promise)
        return false;
    const struct seq *other = handle_get(&seq->client->store->promises, seq->flight.promise, &error);
    if (!other)
        return false;
    uint32_t end = seq->flight.first + seq->flight.count, promised = other->promise.first + other->promise.count;
    return other->promise.next < (end < promised ? end : promised);
}

/* Up to which page an extend would find pages now, as far as the hashes say. */
static uint32_t flight_available(const struct seq *seq) {
    const struct store *store = seq->client->store;
    uint32_t parent = seq->deepest, page = seq->path_pages;
    for (uint32_t i = 0; i < seq->flight.count && page == seq->flight.first + i; i++) {
        uint64_t chain = seq->flight.chain[i];
        struct table_scan scan;
        table_scan_begin(&store->table, chain, &scan);
        uint32_t node;
        while ((node = table_scan_next(&store->table, chain, &scan)) != NODE_NONE)
            if (node_at(store, node)->chain == chain && node_at(store, node)->parent == parent)
                break;
        if (node == NODE_NONE)
            break;
        parent = node;
        page++;
    }
    return page;
}

int flight_request_wait(struct store_client *client, const struct oscar_request *request, uint64_t now_ns,
                        struct oscar_reply *ret, struct oscar_cause *cause) {
    struct store *store = client->store;
    struct seq *seq = NULL;
    int r = seq_get(store, client, request->seq_wait.seq, &seq, cause);
    if (r < 0)
        return r;
    if (seq->wait != WAIT_NONE)
        return oscar_fail(cause, OSCAR_ERR_STATE, "the sequence waits already");
    if (!flight_under_way(seq)) {
        ret->seq_wait.available_tokens = flight_available(seq) * OSCAR_PAGE_TOKENS;
        return 0;
    }
    if (request->seq_wait.timeout_ms == 0)
        return oscar_fail(cause, OSCAR_ERR_TIMEOUT, "the prefix is still being computed");
    flight_park(seq, WAIT_FLIGHT, request->id, now_ns + request->seq_wait.timeout_ms * UINT64_C(1000000));
    store->count.flight_waits++;
    return OSCAR_PARKED;
}

void flight_park(struct seq *seq, enum wait_kind kind, uint64_t request_id, uint64_t deadline_ns) {
    seq->wait = kind;
    seq->wait_request = request_id;
    seq->wait_deadline = deadline_ns;
    if (kind != WAIT_FLIGHT)
        seq->client->in_window = seq;
    TAILQ_INSERT_TAIL(&seq->client->store->waiting, seq, in_wait);
}

static void answer(struct seq *seq, struct oscar_reply *reply) {
    struct store_client *client = seq->client;
    struct store *store = client->store;
    reply->id = seq->wait_request;
    reply->verb = seq->wait == WAIT_FORK    ? OSCAR_SEQ_FORK
                  : seq->wait == WAIT_SPACE ? OSCAR_SEQ_RESERVE
                                            : OSCAR_SEQ_WAIT;
    store->count.no_space += reply->error == OSCAR_ERR_NO_SPACE;
    if (seq->wait != WAIT_FLIGHT)
        client->in_window = NULL;
    TAILQ_REMOVE(&store->waiting, seq, in_wait);
    seq->wait = WAIT_NONE;
    if (!client->gone)
        store->options.hooks.waiter_done(store->options.hooks.arg, client->arg, reply->id, reply);
}

void flight_cancel(struct seq *seq, int error, const char *why) {
    if (seq->wait == WAIT_NONE)
        return;
    if (seq->wait == WAIT_SPACE)
        seq_room_drop(seq, seq->wait_first);
    struct oscar_reply reply = {.error = error};
    (void)strncpy(reply.cause, why, sizeof reply.cause - 1);
    answer(seq, &reply);
}

/* A fork or a reserve. */
static void go_on(struct seq *seq) {
    if (seq->wait == WAIT_FORK && seq->failure == 0 && seal_pending(seq))
        return;
    struct oscar_reply reply = {0};
    struct oscar_cause cause = {0};
    int r = seq->wait == WAIT_FORK ? fork_make(seq, &reply, &cause) : seq_reserve_again(seq, &reply, &cause);
    if (r == OSCAR_PARKED)
        return;
    reply.error = r;
    if (r < 0)
        memcpy(reply.cause, cause.text, sizeof reply.cause);
    answer(seq, &reply);
}

static void time_over(struct seq *seq) {
    if (seq->wait == WAIT_FLIGHT)
        seq->client->store->count.flight_timeouts++;
    flight_cancel(seq, OSCAR_ERR_TIMEOUT,
                  seq->wait == WAIT_FLIGHT ? "the prefix is still being computed"
                                           : "the device has not given the memory yet: see the daemon's log");
}

void flight_poll(struct store *store, uint64_t now_ns) {
    bool wake = store->wake;
    store->wake = false;
    for (struct seq *seq = TAILQ_FIRST(&store->waiting), *next; seq; seq = next) {
        next = TAILQ_NEXT(seq, in_wait);
        if (wake && seq->wait != WAIT_FLIGHT) {
            go_on(seq);
        } else if (wake && !flight_under_way(seq)) {
            struct oscar_reply reply = {.seq_wait.available_tokens = flight_available(seq) * OSCAR_PAGE_TOKENS};
            answer(seq, &reply);
        }
        if (seq->wait != WAIT_NONE && seq->wait_deadline != 0 && now_ns >= seq->wait_deadline)
            time_over(seq);
    }
}

uint64_t store_next_deadline(const struct store *store) {
    uint64_t next = 0;
    const struct seq *seq;
    TAILQ_FOREACH(seq, &store->waiting, in_wait) {
        if (seq->wait_deadline != 0 && (next == 0 || seq->wait_deadline < next))
            next = seq->wait_deadline;
    }
    return next;
}
