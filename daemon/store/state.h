/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The store's state: what its files share. One thread owns all of it; jobs in the pool touch only their own struct and the device
 * memory that it names. Files and their subjects:
 *
 *   meta, table, heap   records in the memfd, the hash index, the eviction order
 *   tree                walk, insert, references, what is evictable
 *   space               a slot of device memory, by eviction if need be
 *   model, client       namespaces and connections; which chunks a client has been told of
 *   seq                 page tables: open, reserve, advance, close, and the updates that they are given
 *   seal, pack          pending -> inspected -> published; dense -> final form
 *   flight, lease, fork promises and those who wait for them; pins that travel; copies of sequences
 *   flush, events, metrics, verify
 */
#ifndef OSCAR_DAEMON_STORE_STATE_H
#define OSCAR_DAEMON_STORE_STATE_H

#include <sys/queue.h>

#include "daemon/memory/arena.h"
#include "daemon/pool.h"
#include "daemon/store/heap.h"
#include "daemon/store/meta.h"
#include "daemon/store/store.h"
#include "daemon/store/table.h"

#define RECENT_PAGES (OSCAR_RECENT_TOKENS / OSCAR_PAGE_TOKENS)

struct seq;

/* --- handles: index | generation << 32; a generation is never 0, so neither is a handle --- */

struct handle_table {
    void **object;
    uint32_t *generation;
    uint32_t *free; /* stack of indexes */
    uint32_t capacity, frees;
};

int handle_take(struct handle_table *table, void *object, uint64_t *ret_handle, struct oscar_cause *cause);
/* NULL with OSCAR_ERR_STALE for a handle that was, OSCAR_ERR_NOT_FOUND for one that never was. */
void *handle_get(const struct handle_table *table, uint64_t handle, int *ret_error);
void handle_give(struct handle_table *table, uint64_t handle);
void handle_table_close(struct handle_table *table);

/* --- models --- */

enum model_state {
    MODEL_LOADING, /* the device is being given the calibration: opens wait */
    MODEL_READY,
    MODEL_REFUSED, /* it did not take it (`failure`): the next open that brings a calibration tries again */
};

/* Gives a calibration to the device, or takes it back. */
struct calibration_job {
    struct pool_job job;
    const struct oscar_device_ops *ops;
    struct oscar_device *device;
    struct store_model *model;
    struct oscar_geometry geometry;
    struct oscar_calibration *calibration;
    int result;
    struct oscar_cause cause;
};

struct store_model {
    struct store *store;
    uint32_t index;
    enum model_state state;
    int failure;
    struct oscar_cause cause;
    uint64_t handle;
    struct oscar_identity identity;
    struct oscar_digest digest;
    const struct oscar_calibration *calibration; /* work's */
    struct calibration_job *work;
    int calibration_fd, turns_fd;
    uint64_t calibration_bytes, turns_bytes;
    uint64_t root_chain; /* the "parent's chain hash" of page 0 */
    struct arena arena[OSCAR_FORMS];
    struct share shared[OSCAR_FORMS]; /* of sink and packed chunks; the dense entry is unused */
    uint32_t nodes;                   /* pages of it, found or not */
    uint32_t clients;                 /* that have it open */
    bool has_new_forms;               /* pages were packed: sequences that read them dense are to be told */
    LIST_HEAD(seq_list, seq) seqs;
};

/* --- clients --- */

/* One client's view of one model. It stays until the client is gone: the process has the chunks mapped. */
struct binding {
    struct store_model *model;
    uint32_t opens;
    struct share dense;               /* its writable chunks */
    uint64_t *announced[OSCAR_FORMS]; /* by chunk index: the generation that the client was told of, or 0 */
    uint32_t capacity[OSCAR_FORMS];   /* of `announced` */
    uint64_t epoch[OSCAR_FORMS];      /* of the arena when all its chunks had been announced (sink, packed) */
    LIST_ENTRY(binding) in_client;
};

LIST_HEAD(binding_list, binding);
LIST_HEAD(lease_list, lease);

struct store_client {
    struct store *store;
    void *arg; /* the hooks' */
    struct oscar_window_header *window;
    oscar_fence_slot *fences;
    char group_key[3 * OSCAR_NAME_BYTES];
    uint32_t number; /* never 0, never again */
    bool gone, exited;
    struct seq *in_window; /* its fork or reserve is parked, whose reply will need the window */
    uint32_t open_seqs, open_leases;
    uint64_t notices;      /* what updates_waiting in the window says: not read back from there */
    uint32_t fence_cursor; /* slots are handed out in turn, so that a freed one rests for as long as possible */
    uint64_t fence_used[OSCAR_FENCE_SLOTS / 64];
    struct binding_list bindings;
    struct seq_list seqs; /* closing ones too */
    struct lease_list leases;
    LIST_ENTRY(store_client) in_store;
};

/* --- sequences --- */

/* An entry of a page table that names a dense slot; all others follow from the path (its nodes' final forms). */
enum dense_kind {
    DENSE_TAIL,      /* reserved or partly filled: the sequence's own slot */
    DENSE_PENDING,   /* full: its fence has not been reached */
    DENSE_INSPECT,   /* an inspection runs */
    DENSE_INSPECTED, /* may be published as soon as its parent is */
    DENSE_PRIVATE,   /* the page is in the tree with bytes of its own (`node`); this slot is still the sequence's */
    DENSE_SHARED,    /* the slot is the node's; counted in its dense_references */
};

struct dense_entry {
    uint32_t page;
    uint32_t slot;
    uint32_t node; /* PRIVATE, SHARED; else NODE_NONE */
    uint8_t kind;
    bool recent;    /* SHARED: counted in the node's recent_holders; PRIVATE: in the recent window */
    uint64_t fence; /* PENDING: complete once the sequence's counter has reached it */
};

/* A slot that the client was told to leave: released once its counter has reached `fence`. */
struct retired {
    uint64_t fence;
    uint32_t slot;
    uint32_t node; /* SHARED: whose reference; NODE_NONE: the sequence's own slot */
};

/* The full pages that a sequence will compute: a hint for others who miss the same ones. */
struct promise {
    uint64_t handle; /* 0: nothing promised */
    uint64_t *chain; /* of pages first .. first + count - 1 */
    uint32_t first, count;
    uint32_t next; /* page to be published next: the promise is found by its chain hash */
    LIST_ENTRY(seq) in_bucket;
};

/* What a sequence relies on of another one's promise. */
struct flight {
    uint64_t promise; /* handle, 0: nothing */
    uint64_t *chain;  /* of pages first .. first + count - 1, beginning behind its own hit */
    uint32_t first, count;
};

enum wait_kind {
    WAIT_NONE,
    WAIT_FLIGHT, /* for a prefix that another one computes */
    WAIT_FORK,   /* for its own seals, or for a chunk */
    WAIT_SPACE,  /* its reserve, for a chunk */
};

struct seq {
    struct store_client *client;
    struct store_model *model;
    struct binding *binding;
    uint64_t handle;
    uint32_t fence_slot;
    bool dense_tail;
    int failure;  /* a page did not pass its inspection (failed_page): the sequence can only be closed */
    bool closing; /* its handle is stale; it lives until its readers are done */
    bool notice;  /* updates wait and the client has been told */
    bool watched; /* in the store's list of sequences that wait for fences or publishing */
    uint32_t failed_page;
    uint32_t deepest;    /* last published page of its path: pinned; NODE_NONE for an empty path */
    uint32_t path_pages; /* published pages */
    uint32_t hit_pages;  /* of its open or last extend */
    uint32_t committed_tokens;
    uint32_t room_pages;  /* of its page table: positions below room_pages * 64 have a slot or a node */
    uint32_t window_page; /* pages from here on are in the recent window */
    uint64_t fence;       /* of its last request that carried one */
    uint64_t close_fence;
    uint32_t inspecting;       /* jobs under way */
    struct dense_entry *dense; /* sorted by page */
    uint32_t denses, dense_capacity;
    struct retired *retired; /* in the order of their fences */
    uint32_t retireds, retired_capacity;
    uint32_t *tokens; /* ids of positions token_page * 64 .. committed_tokens - 1 */
    uint32_t token_page, token_capacity;
    /* Sources of its copies as a fork: kept until its counter reaches 1 or it is closed. */
    uint32_t hold[OSCAR_MAX_COPIES];
    uint32_t holds;
    struct promise promise;
    struct flight flight;
    enum wait_kind wait;
    uint64_t wait_request;
    uint64_t wait_deadline;          /* 0: none */
    uint32_t wait_pages, wait_first; /* WAIT_SPACE: the room that it is to have, and that it had */
    LIST_ENTRY(seq) in_client;
    LIST_ENTRY(seq) in_model;
    TAILQ_ENTRY(seq) in_watch;
    TAILQ_ENTRY(seq) in_wait;
};

struct lease {
    struct store_client *client;
    struct store_model *model;
    uint64_t handle;
    uint32_t node; /* pinned; NODE_NONE: a hit of 0 */
    uint32_t pages;
    uint8_t secret[OSCAR_LEASE_SECRET_BYTES];
    LIST_ENTRY(lease) in_client;
    LIST_ENTRY(lease) in_bucket;
};

/* --- packing --- */

#define PACK_BATCH 8U

/* Pages of one model: packed ones by one call, page 0 of a path by a copy to its sink. */
struct pack_job {
    struct pool_job job;
    struct store *store;
    struct store_model *model;
    uint64_t dense_bytes;
    uint32_t pages, sinks;
    uint32_t node[PACK_BATCH]; /* packed ones from the front, sinks from the back */
    uint32_t slot[PACK_BATCH];
    int32_t status[PACK_BATCH];
    struct oscar_pack_item item[PACK_BATCH];
    LIST_ENTRY(pack_job) in_store;
};

/* --- the store --- */

#define PROMISE_BUCKETS 4096U
#define LEASE_BUCKETS 1024U

struct store_counters {
    uint64_t opens, open_hits;           /* sequences opened, those with a hit */
    uint64_t queried_tokens, hit_tokens; /* of opens; hits of extends too */
    uint64_t probes;
    uint64_t seals, duplicates; /* pages published as new / found in the tree */
    uint64_t inspect_failures;
    uint64_t packs, pack_failures;
    uint64_t evictions, flushed; /* pages removed to make room / by flushes */
    uint64_t no_space;           /* requests answered so */
    uint64_t forks, flight_waits, flight_timeouts;
};

struct store {
    struct store_options options;
    struct meta meta;
    struct table table;
    struct heap heap;
    struct memory memory;
    struct pool *pool;
    struct oscar_stream_impl *stream[POOL_MAX_THREADS]; /* of the pool's threads */
    bool device_failed;
    uint8_t hash_secret[192];
    uint64_t tick; /* order of uses */
    uint64_t born;
    uint32_t oldest, newest; /* pages that can be found, in the order of publishing */
    uint64_t linked;
    /* Pages, found or not, by the form in which they serve: the best that they have. */
    uint64_t form_pages[OSCAR_FORMS];
    struct handle_table models, seqs, leases, promises;
    LIST_HEAD(client_list, store_client) clients;
    uint32_t client_count, client_number;
    TAILQ_HEAD(seq_queue, seq) watched, waiting;
    bool wake; /* somebody who waits may go on: look at them in the next poll */
    struct seq_list promise_bucket[PROMISE_BUCKETS];
    struct lease_list lease_bucket[LEASE_BUCKETS];
    struct pack_queue {
        uint32_t *node; /* ring; an entry whose node is not PACK_QUEUED any more is skipped */
        uint32_t first, count, capacity;
    } pack_queue;
    uint64_t pack_waiting; /* nodes with PACK_QUEUED */
    uint32_t pack_running; /* jobs */
    LIST_HEAD(pack_list, pack_job) packing;
    bool pack_starved; /* no slot could be had: tried again when something is freed */
    bool pack_parked;  /* its chunk is being made: tried again when that is done */
    uint32_t inspects_running;
    struct store_counters count;
    /* Scratch of the walk of the current request: nodes that were hit, chain hashes of all full pages. */
    uint32_t walk_node[OSCAR_MAX_SEQUENCE_PAGES];
    uint64_t walk_chain[OSCAR_MAX_SEQUENCE_PAGES];
};

static inline struct node *node_at(const struct store *store, uint32_t node) { return &store->meta.node[node]; }
static inline struct store_model *model_at(const struct store *store, uint32_t index) {
    return store->models.object[index];
}
static inline uint32_t seq_full_pages(const struct seq *seq) { return seq->committed_tokens / OSCAR_PAGE_TOKENS; }
static inline enum oscar_form node_final_form(const struct node *node) {
    return node->depth == 0 ? OSCAR_FORM_SINK : OSCAR_FORM_PACKED;
}

/* --- store.c --- */

/* Of whatever the device was asked for: the hook is called for the first time that it failed as a device. `cause` may be NULL. */
void store_note_failure(struct store *store, int result, const char *what, const struct oscar_cause *cause);

/* --- tree.c --- */

struct walk {
    uint32_t pages;  /* full pages in the request */
    uint32_t hits;   /* store->walk_node[0 .. hits - 1] */
    uint32_t hashed; /* store->walk_chain[0 .. hashed - 1] */
};

/* Copies each full page's ids out of the (hostile) window once and follows the tree as far as it goes. Touches nothing. */
void tree_walk(struct store *store, const struct store_model *model, const uint32_t *tokens, uint32_t pages,
               struct walk *ret);
/* Chain hashes of the pages that the walk did not come to. */
void tree_walk_hashes(struct store *store, const struct store_model *model, const uint32_t *tokens, struct walk *walk);
uint64_t tree_chain(const struct store *store, uint64_t parent_chain, const uint32_t tokens[OSCAR_PAGE_TOKENS]);
uint32_t tree_child(const struct store *store, const struct store_model *model, uint32_t parent, uint64_t chain,
                    const uint32_t tokens[OSCAR_PAGE_TOKENS]);
/* A new DENSE page that takes over `dense`; `linked` false: not to be found. It has no reference yet: tree_settle it then. */
int tree_insert(struct store *store, struct store_model *model, uint32_t parent, uint64_t chain,
                const uint32_t tokens[OSCAR_PAGE_TOKENS], uint32_t dense, bool linked, uint32_t *ret_node,
                struct oscar_cause *cause);
void tree_pin(struct store *store, uint32_t node); /* and stamps it as used; NODE_NONE is fine */
void tree_unpin(struct store *store, uint32_t node);
void tree_dense_reference(struct store *store, uint32_t node, bool recent);
void tree_dense_release(struct store *store, uint32_t node);
void tree_recent_release(struct store *store, uint32_t node);
/* After any change of a node: gives the dense slot back if nobody needs it, makes the node evictable or not, frees it if it
 * is unlinked and unreferenced. */
void tree_settle(struct store *store, uint32_t index);
/* Takes it out of look-up, snapshot and eviction. */
void tree_unlink(struct store *store, uint32_t index);
/* Frees the evictable page that has been unused for longest. False when there is none. */
bool tree_evict(struct store *store);
/* Unlinks and frees an evictable page. */
void tree_free_leaf(struct store *store, uint32_t index);

/* --- space.c --- */

/* One slot for somebody who wants so many in all (chunks for them are made at once). OSCAR_PARKED: chunks are being made or freed for
 * it, try again when one of them is done; OSCAR_ERR_NO_SPACE when everything that could be evicted was; or the device's failure. */
int space_take(struct store *store, struct arena *arena, struct share *share, uint32_t wanted, uint32_t *ret_slot,
               struct oscar_cause *cause);
/* Before the first attempt of a request: what the device refused earlier is tried again. */
static inline void space_forgive(struct share *share) { share->failure = 0; }
void space_drop(struct store *store, struct arena *arena, uint32_t slot);
int space_chunk_made(void *arg, struct chunk *chunk, struct oscar_cause *cause);
void space_chunk_gone(void *arg, struct chunk *chunk);

/* --- model.c, client.c --- */

int model_get(struct store *store, struct store_client *client, uint64_t handle, struct binding **ret,
              struct oscar_cause *cause);
struct store_model *model_find(const struct store *store, const struct oscar_digest *digest); /* or NULL */
void model_free(struct store_model *model);
bool model_is_job(const struct pool_job *job);
void model_finished(struct pool_job *job);
/* The client is told of every sink and packed chunk of the model that it does not know yet. */
int client_announce_shared(struct store_client *client, struct binding *binding, struct oscar_cause *cause);
/* Likewise of the chunk in which a dense slot lies. */
int client_announce_dense(struct store_client *client, struct binding *binding, uint32_t slot,
                          struct oscar_cause *cause);
void client_chunk_gone(struct store_client *client, const struct chunk *chunk);
int client_fence_take(struct store_client *client, uint32_t *ret_slot, struct oscar_cause *cause);
void client_fence_give(struct store_client *client, uint32_t slot);
void client_free_if_done(struct store_client *client);
static inline struct oscar_page_update *client_updates(const struct store_client *client) {
    return (struct oscar_page_update *)((uint8_t *)client->window + OSCAR_WINDOW_UPDATES_OFFSET);
}
static inline const uint32_t *client_tokens(const struct store_client *client) {
    return (const uint32_t *)((const uint8_t *)client->window + OSCAR_WINDOW_TOKENS_OFFSET);
}

/* --- seq.c --- */

int seq_get(struct store *store, struct store_client *client, uint64_t handle, struct seq **ret,
            struct oscar_cause *cause);
/* An empty sequence. */
int seq_new(struct store_client *client, struct binding *binding, struct seq **ret, struct oscar_cause *cause);
/* Its counter has reached `fence`. */
bool seq_reached(const struct seq *seq, uint64_t fence);
/* Even, and larger than all before. */
int seq_fence_check(const struct seq *seq, uint64_t fence, struct oscar_cause *cause);
/* From now on it takes no request; its readers are done once its counter has reached `close_fence`. */
void seq_close(struct seq *seq, uint64_t close_fence);
/* Its client has gone. */
void seq_abandon(struct seq *seq);
/* Its client has gone, and its process may still write to its own slots that will not be published. */
void seq_quarantine(struct seq *seq);
/* Frees it if nothing holds it any more. */
bool seq_end_if_done(struct seq *seq);
void seq_watch(struct seq *seq);
/* Does what its counter allows by now: releases, inspections, at most `limit` publications, its end (then true). */
bool seq_proceed(struct seq *seq, uint32_t limit);

/* --- seq_pages.c: the page table of a sequence --- */

int seq_dense_reserve(struct seq *seq, uint32_t more, struct oscar_cause *cause);
struct dense_entry *seq_dense_find(const struct seq *seq, uint32_t page); /* or NULL */
/* After seq_dense_reserve. */
struct dense_entry *seq_dense_insert(struct seq *seq, uint32_t page, uint32_t slot, uint32_t node,
                                     enum dense_kind kind);
/* Gives the entry's slot or reference back; the entry is the caller's to remove. */
void seq_dense_release(struct seq *seq, const struct dense_entry *entry);
/* First page of the recent window behind `pages` full pages. Page 0 is never in it: it is the sink. */
static inline uint32_t seq_window(uint32_t pages) { return pages > RECENT_PAGES ? pages - RECENT_PAGES : 1; }
/* Moves the start of the window to `page`: pages that leave it are no longer held as recent. */
void seq_slide(struct seq *seq, uint32_t page);
/* Entries [from, to) of a path of nodes, dense where the page is only dense or is in the window from `window` on, else in final form: all
 * or nothing. */
int seq_map_path(struct seq *seq, const uint32_t *nodes, uint32_t from, uint32_t to, uint32_t window,
                 struct oscar_page_update *ret_updates, struct oscar_cause *cause);
/* Entries that have a better form now; what they leave is retired at `fence`. */
int seq_updates(struct seq *seq, uint64_t fence, struct oscar_page_update *ret_updates, uint32_t *ret_count,
                struct oscar_cause *cause);
/* Tells the client, once, if there are such entries. */
void seq_notice(struct seq *seq);
void seq_retired_release(struct seq *seq);

/* --- seq_request.c --- */

int seq_request_open(struct store_client *client, const struct oscar_request *request, uint64_t now_ns,
                     struct oscar_reply *ret, struct oscar_cause *cause);
int seq_request_extend(struct store_client *client, const struct oscar_request *request, uint64_t now_ns,
                       struct oscar_reply *ret, struct oscar_cause *cause);
int seq_request_reserve(struct store_client *client, const struct oscar_request *request, uint64_t now_ns,
                        struct oscar_reply *ret, struct oscar_cause *cause);
/* Goes on with a parked reserve: OSCAR_PARKED, or it is over, with its reply or its error. */
int seq_reserve_again(struct seq *seq, struct oscar_reply *ret, struct oscar_cause *cause);
/* Gives back the room that it has beyond so many pages, of which the client has not been told. */
void seq_room_drop(struct seq *seq, uint32_t pages);
int seq_request_advance(struct store_client *client, const struct oscar_request *request, uint64_t now_ns,
                        struct oscar_reply *ret, struct oscar_cause *cause);
int seq_request_close(struct store_client *client, const struct oscar_request *request, uint64_t now_ns,
                      struct oscar_reply *ret, struct oscar_cause *cause);

/* --- seal.c --- */

/* Starts the inspection of full pages whose fence has been reached. */
void seal_start(struct seq *seq);
/* Publishes what has passed, in order, at most `limit` pages. */
void seal_publish(struct seq *seq, uint32_t limit);
void seal_finished(struct pool_job *job);
bool seal_is_job(const struct pool_job *job);
/* Up to which page its path may still grow without another request. */
uint32_t seal_reach(const struct seq *seq);
/* How many of its unpublished full pages wait for the store alone: their fence has been reached. */
uint32_t seal_under_way(const struct seq *seq);
static inline bool seal_pending(const struct seq *seq) { return seal_reach(seq) > seq->path_pages; }

/* --- pack.c --- */

void pack_want(struct store *store, uint32_t index);
bool pack_possible(const struct store *store); /* pack_dispatch would find something to do */
void pack_dispatch(struct store *store);
void pack_finished(struct pool_job *job);

/* --- flight.c: promises, and requests that are parked --- */

/* After a walk: up to which page (>= walk->hits) the missing ones are promised, and by which promise (0: none). */
uint32_t flight_find(struct store *store, const struct store_model *model, const uint32_t *tokens, struct walk *walk,
                     uint64_t *ret_promise);
/* After its open or extend: `seq` relies on the promise that covers what the walk missed, or makes it. Returns up to which page
 * it has pages or others compute them. */
uint32_t flight_join(struct seq *seq, const uint32_t *tokens, struct walk *walk);
/* Page `page` with this chain hash was published by `seq`. */
void flight_published(struct seq *seq, uint32_t page, uint64_t chain);
/* `seq` will add nothing to what it has committed. */
void flight_shrink(struct seq *seq);
void flight_end(struct seq *seq);
/* Those who wait are looked at in the next poll. */
void flight_wake(struct store *store);
int flight_request_wait(struct store_client *client, const struct oscar_request *request, uint64_t now_ns,
                        struct oscar_reply *ret, struct oscar_cause *cause);
void flight_park(struct seq *seq, enum wait_kind kind, uint64_t request_id, uint64_t deadline_ns);
/* Answers those that can go on or whose time is over. */
void flight_poll(struct store *store, uint64_t now_ns);
/* Ends the call that is parked on `seq`, if any, with an error. */
void flight_cancel(struct seq *seq, int error, const char *why);

/* --- fork.c --- */

int fork_request(struct store_client *client, const struct oscar_request *request, uint64_t now_ns,
                 struct oscar_reply *ret, struct oscar_cause *cause);
/* Makes the child of a parent that has nothing pending. OSCAR_PARKED: nothing was done, a chunk for it is being made. */
int fork_make(struct seq *parent, struct oscar_reply *ret, struct oscar_cause *cause);

/* --- lease.c --- */

int lease_request_probe(struct store_client *client, const struct oscar_request *request, uint64_t now_ns,
                        struct oscar_reply *ret, struct oscar_cause *cause);
int lease_request_adopt(struct store_client *client, const struct oscar_request *request, uint64_t now_ns,
                        struct oscar_reply *ret, struct oscar_cause *cause);
int lease_request_close(struct store_client *client, const struct oscar_request *request, uint64_t now_ns,
                        struct oscar_reply *ret, struct oscar_cause *cause);
void lease_free(struct lease *lease);

/* --- events.c --- */

void event_page(struct store *store, enum oscar_event_kind kind, uint32_t index);
void event_cleared(struct store *store, const struct store_model *model); /* NULL: all */

#endif
