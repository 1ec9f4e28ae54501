/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The store: the prefix tree, the life of a page, sequences, leases, eviction. One thread, no lock, no socket, no clock of its own:
 * `serve` calls it with plain structs, and it calls back through struct store_hooks. It never blocks and never calls the device:
 * packing, inspecting and copying of pages, and all that makes, frees or exports device memory run in the pool (daemon/pool.h), and
 * their completions come back through store_poll.
 *
 * Handles (sequences, leases, models) are 64-bit: index | generation << 32; a stale one is OSCAR_ERR_STALE, another client's is
 * OSCAR_ERR_NOT_FOUND.
 *
 * Hooks are called from within the store's functions and must not call back into it. waiter_done comes from store_poll, and from
 * store_request where that ends a parked call: a close, a sequence that goes on, or the window being used while a fork or a reserve
 * is parked (the window belongs to one request at a time, so whoever uses it again has given that one up).
 *
 * A fork's copies: the sources in its reply stay what they are until the child's fence counter is >= 1 (the client's stream raises it
 * to 1 behind the copies) or the child's close is through.
 *
 * MODEL_CLOSE closes the model's sequences as a SEQ_CLOSE with their last fence + 2 would.
 */
#ifndef OSCAR_DAEMON_STORE_H
#define OSCAR_DAEMON_STORE_H

#include <stdbool.h>
#include <stdint.h>

#include "oscar/device.h"

#include "proto/digest.h"
#include "proto/window.h"
#include "proto/wire.h"

struct store;
struct store_client; /* one connection */
struct store_model;

struct store_hooks {
    void *arg;
    /* A chunk that `client` must map before it sees a reply that refers to it. Called before such a reply's values are returned;
     * `fd` is the store's: duplicated by the callee. */
    void (*chunk_announce)(void *arg, void *client_arg, const struct oscar_chunk_info *info, int fd);
    void (*chunk_gone)(void *arg, void *client_arg, const struct oscar_chunk_info *info);
    /* A parked call is over: `reply` is complete but for its id. */
    void (*waiter_done)(void *arg, void *client_arg, uint64_t request_id, const struct oscar_reply *reply);
    /* The client has exited and nothing of it is in flight any more: client_arg is not used again. Called once, from
     * store_client_exited or a later call; NULL: nobody wants to know. */
    void (*client_over)(void *arg, void *client_arg);
    /* incarnation and sequence number are filled in by the callee */
    void (*event)(void *arg, const struct oscar_event *event);
    /* store_model_open calls that returned OSCAR_PARKED are to be made again (not from here). */
    void (*models_changed)(void *arg);
    /* OSCAR_ERR_DEVICE from the device, for the first time: all that it does from here on is in doubt. What failed is not published.
     * NULL: nobody wants to know. */
    void (*device_failed)(void *arg, const struct oscar_cause *cause);
};

struct store_options {
    const struct oscar_device_ops *ops;
    struct oscar_device *device;
    uint64_t budget_bytes;                          /* of all chunks together */
    uint64_t packed_chunk_bytes, dense_chunk_bytes; /* aims of a chunk, the latter of sinks, too; at least one page */
    uint32_t pack_threads;
    uint32_t max_sequences, max_leases; /* of one client */
    uint64_t hash_seed;                 /* secret; tests force one */
    bool hash_collide;                  /* tests: every page hash is the same */
    struct store_hooks hooks;
};

int store_new(const struct store_options *options, struct store **ret, struct oscar_cause *cause);
void store_free(struct store *store); /* waits for the pool */

/* Readable when store_poll has work to do: finished jobs, calls that can be answered, what a poll before put off. */
int store_event_fd(const struct store *store);
/* Something waits for a poll of which no event tells: a sequence for its client's counter, or pages that a request has left to be packed
 * (a request wakes no thread itself: that would delay its reply). Then the caller polls by timer. */
bool store_poll_pending(const struct store *store);
/* A bounded amount of work; to be called on that event, that timer and at store_next_deadline. */
void store_poll(struct store *store, uint64_t now_ns);

#define OSCAR_PARKED 1 /* the answer comes later */

/* --- models: shared by all clients that open the same identity; calibration is owned by the store from here on --- */

/* Finds or makes the model (identity complete, tenant and calibration digest filled in). OSCAR_PARKED: the device is being given its
 * calibration; call again, without one, when hooks.models_changed has said so. Calibration (NULL is fine for a known model) and
 * `calibration_fd`/`turns_fd` (memfds to be sent to clients, or -1) are taken in every case: on failure, and if the model exists already,
 * they are freed. The memory that the calibration lies in must stay for as long as the store does. ret_fd: the calibration's bytes, then
 * the turn tables, *ret_fds of them; they are the store's, the caller duplicates them. arenas[].page_bytes is the distance from page to
 * page: the page's bytes, padded where whole chunks would not fall on the device's granularity otherwise.
 * OSCAR_ERR_NO_SPACE when the budget cannot hold one chunk of each form. */
int store_model_open(struct store *store, struct store_client *client, const struct oscar_identity *identity,
                     struct oscar_calibration *calibration, int calibration_fd, int turns_fd,
                     struct oscar_reply *ret_reply, int ret_fd[2], unsigned *ret_fds, struct oscar_cause *cause);
/* When the reply has been sent: announces what others already have of the model, so that the client maps it now and not in its first
 * sequence. Where memory is out, the rest is announced with the first reply that refers to it. */
void store_model_announce(struct store *store, struct store_client *client, uint64_t handle);
int store_model_close(struct store *store, struct store_client *client, uint64_t handle, struct oscar_cause *cause);

/* --- clients --- */

/* `window`, `fences`: the daemon's mappings of the client's memfds; they stay until store_client_exited has returned (nothing
 * looks at them later, though inspections of its pages may still run). `group_key` names who may adopt its leases (user, tenant
 * and group). OSCAR_ERR_NO_MEMORY, OSCAR_ERR_LIMIT (a key that is too long). */
int store_client_new(struct store *store, void *client_arg, void *window, oscar_fence_slot *fences,
                     const char *group_key, struct store_client **ret);
/* The connection ended: sequences and leases close now; whatever its process may still read or write is quarantined until ... */
void store_client_gone(struct store *store, struct store_client *client);
/* ... its process has exited (pidfd): then the quarantine ends and the client is freed. Without a pidfd call both. After `gone` no
 * hook but client_over is called for it. */
void store_client_exited(struct store *store, struct store_client *client);

/* --- the verbs: request in, reply out (error codes by return value, reply untouched then). OSCAR_PARKED: the reply comes by
 * waiter_done. `request` is one of PROBE .. SEQ_CLOSE. Tokens are read from, and updates written to, the client's window. --- */
int store_request(struct store *store, struct store_client *client, const struct oscar_request *request,
                  uint64_t now_ns, struct oscar_reply *ret_reply, struct oscar_cause *cause);
/* The number of the device's piece of work that has been running for longest, 0 for none (pool_oldest). */
uint64_t store_oldest_work(const struct store *store);
/* Next time at which a parked call must be timed out (store_poll does it), 0 for none. */
uint64_t store_next_deadline(const struct store *store);

/* --- operators --- */

struct store_flush {
    uint64_t pages_freed, bytes_freed, pages_deferred, bytes_deferred;
};
void store_flush(struct store *store, const struct oscar_digest *digest /* of a model; NULL: all */,
                 struct store_flush *ret);
/* Fills at most `capacity` events (kind STORED, form as now) of pages that can be found, from `cursor` on, parents first;
 * *ret_next 0 at the end. */
uint32_t store_snapshot(struct store *store, uint64_t cursor, struct oscar_event *ret_events, uint32_t capacity,
                        uint64_t *ret_next);
/* The metrics of metrics.h. */
uint32_t store_metrics(const struct store *store, struct oscar_metric *ret, uint32_t capacity);
/* Every invariant (free + used = total, reference counts, tree links, heap order, states): 0 or OSCAR_ERR_CORRUPT with the
 * first violation. Tests call it after every operation. */
int store_verify(const struct store *store, struct oscar_cause *cause);

#endif
