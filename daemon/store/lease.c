/* SPDX-License-Identifier: Apache-2.0 */
#include <sodium.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/store/state.h"
#include "proto/cleanup.h"

static struct lease_list *bucket(struct store *store, const uint8_t secret[OSCAR_LEASE_SECRET_BYTES]) {
    uint32_t key;
    memcpy(&key, secret, sizeof key);
    return &store->lease_bucket[key % LEASE_BUCKETS];
}

static int lease_new(struct store_client *client, struct store_model *model, const struct walk *walk,
                     struct lease **ret, struct oscar_cause *cause) {
    struct store *store = client->store;
    if (client->open_leases >= store->options.max_leases)
        return oscar_fail(cause, OSCAR_ERR_LIMIT, "%u leases are open on this connection", client->open_leases);
    _cleanup_free_ struct lease *lease = calloc(1, sizeof *lease);
    if (!lease)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a lease");
    int r = handle_take(&store->leases, lease, &lease->handle, cause);
    if (r < 0)
        return r;
    lease->client = client;
    lease->model = model;
    lease->pages = walk->hits;
    lease->node = walk->hits > 0 ? store->walk_node[walk->hits - 1] : NODE_NONE;
    tree_pin(store, lease->node);
    randombytes_buf(lease->secret, sizeof lease->secret);
    LIST_INSERT_HEAD(&client->leases, lease, in_client);
    LIST_INSERT_HEAD(bucket(store, lease->secret), lease, in_bucket);
    client->open_leases++;
    *ret = TAKE_PTR(lease);
    return 0;
}

void lease_free(struct lease *lease) {
    struct store *store = lease->client->store;
    tree_unpin(store, lease->node);
    handle_give(&store->leases, lease->handle);
    lease->client->open_leases--;
    LIST_REMOVE(lease, in_client);
    LIST_REMOVE(lease, in_bucket);
    free(lease);
}

int lease_request_probe(struct store_client *client, const struct oscar_request *request, uint64_t now_ns,
                        struct oscar_reply *ret, struct oscar_cause *cause) {
    (void)now_ns;
    struct store *store = client->store;
    struct binding *binding = NULL;
    int r = model_get(store, client, request->probe.model, &binding, cause);
    if (r < 0)
        return r;
    if (request->probe.tokens > OSCAR_MAX_SEQUENCE_TOKENS)
        return oscar_fail(cause, OSCAR_ERR_LIMIT, "%u tokens: a sequence has at most %u", request->probe.tokens,
                          OSCAR_MAX_SEQUENCE_TOKENS);
    struct walk walk;
    tree_walk(store, binding->model, client_tokens(client), request->probe.tokens / OSCAR_PAGE_TOKENS, &walk);
    struct lease *lease = NULL;
    if (request->probe.lease) {
        r = lease_new(client, binding->model, &walk, &lease, cause);
        if (r < 0)
            return r;
    }
    uint64_t promise;
    uint32_t in_flight = flight_find(store, binding->model, client_tokens(client), &walk, &promise);
    store->count.probes++;
    ret->probe.hit_tokens = walk.hits * OSCAR_PAGE_TOKENS;
    ret->probe.in_flight_tokens = in_flight * OSCAR_PAGE_TOKENS;
    ret->probe.lease = lease ? lease->handle : 0;
    if (lease)
        memcpy(ret->probe.secret, lease->secret, sizeof ret->probe.secret);
    return 0;
}

int lease_request_adopt(struct store_client *client, const struct oscar_request *request, uint64_t now_ns,
                        struct oscar_reply *ret, struct oscar_cause *cause) {
    (void)now_ns;
    struct store *store = client->store;
    struct binding *binding = NULL;
    int r = model_get(store, client, request->lease_adopt.model, &binding, cause);
    if (r < 0)
        return r;
    struct lease *lease;
    LIST_FOREACH(lease, bucket(store, request->lease_adopt.secret), in_bucket) {
        if (sodium_memcmp(lease->secret, request->lease_adopt.secret, sizeof lease->secret) == 0)
            break;
    }
    if (!lease || lease->model != binding->model || strcmp(lease->client->group_key, client->group_key) != 0)
        return oscar_fail(cause, OSCAR_ERR_NOT_FOUND, "no lease of this client group and model has that secret");
    if (lease->client != client && client->open_leases >= store->options.max_leases)
        return oscar_fail(cause, OSCAR_ERR_LIMIT, "%u leases are open on this connection", client->open_leases);
    /* A new name, so that the old owner's is stale. */
    uint64_t handle;
    r = handle_take(&store->leases, lease, &handle, cause);
    if (r < 0)
        return r;
    handle_give(&store->leases, lease->handle);
    lease->handle = handle;
    lease->client->open_leases--;
    client->open_leases++;
    lease->client = client;
    LIST_REMOVE(lease, in_client);
    LIST_INSERT_HEAD(&client->leases, lease, in_client);
    ret->lease_adopt.lease = handle;
    ret->lease_adopt.hit_tokens = lease->pages * OSCAR_PAGE_TOKENS;
    return 0;
}

int lease_request_close(struct store_client *client, const struct oscar_request *request, uint64_t now_ns,
                        struct oscar_reply *ret, struct oscar_cause *cause) {
    (void)now_ns;
    (void)ret;
    int error;
    struct lease *lease = handle_get(&client->store->leases, request->lease_close.lease, &error);
    if (!lease)
        return oscar_fail(cause, error, "no lease 0x%llx", (unsigned long long)request->lease_close.lease);
    if (lease->client != client)
        return oscar_fail(cause, OSCAR_ERR_NOT_FOUND, "lease 0x%llx is not of this connection",
                          (unsigned long long)request->lease_close.lease);
    lease_free(lease);
    return 0;
}
