/* SPDX-License-Identifier: Apache-2.0 */
#include "client/src/lease.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/src/detail.h"
#include "proto/cleanup.h"

_Static_assert(OSCAR_LEASE_SECRET == OSCAR_LEASE_SECRET_BYTES, "the API's secret is the wire's");

static bool lease_undo(struct oscar_call *call) {
    uint64_t lease = call->request.verb == OSCAR_PROBE ? call->reply.probe.lease : call->reply.lease_adopt.lease;
    call->request.verb = OSCAR_LEASE_CLOSE;
    call->request.lease_close.lease = lease;
    return lease != 0; /* a lease of nothing has no handle */
}

/* Takes the call over, to close the lease by undoing it. On failure it is the caller's still. */
static int lease_new(struct oscar_model *model, struct oscar_call **call, const uint8_t *secret, bool named,
                     struct oscar_lease **ret) {
    struct oscar_lease *lease = calloc(1, sizeof(*lease));
    if (lease == NULL)
        return oscar_fail(oscar_detail(), OSCAR_ERR_NO_MEMORY, "no memory for a lease");
    lease->model = model;
    lease->named = named;
    memcpy(lease->secret, secret, sizeof(lease->secret));
    lease->closing = TAKE_PTR(*call);
    pthread_mutex_lock(&model->client->lock);
    LIST_INSERT_HEAD(&model->leases, lease, in_model);
    pthread_mutex_unlock(&model->client->lock);
    *ret = lease;
    return 0;
}

static int check_hit(uint32_t hit, uint32_t in_flight, uint32_t count) {
    if (hit % OSCAR_PAGE_TOKENS != 0 || hit > in_flight || in_flight > count)
        return oscar_fail(oscar_detail(), OSCAR_ERR_PROTOCOL,
                          "probe: hit of %" PRIu32 ", %" PRIu32 " in flight, for %" PRIu32 " tokens", hit, in_flight,
                          count);
    return 0;
}

int oscar_probe(struct oscar_model *model, const uint32_t *tokens, uint32_t count,
                struct oscar_probe_result *ret_result, struct oscar_lease **ret_lease) {
    int r = oscar_model_check(model);
    if (r < 0)
        return r;
    if ((tokens == NULL && count > 0) || ret_result == NULL)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "probe: %s",
                          ret_result == NULL ? "ret_result: NULL" : "tokens: NULL");
    if (count > OSCAR_MAX_SEQUENCE_TOKENS)
        return oscar_fail(oscar_detail(), OSCAR_ERR_LIMIT, "%" PRIu32 " tokens: at most %u", count,
                          OSCAR_MAX_SEQUENCE_TOKENS);
    struct oscar_client *client = model->client;
    uint64_t deadline = oscar_client_deadline(client);
    _cleanup_call_ struct oscar_call *call = oscar_call_new(client->connection, OSCAR_PROBE);
    if (call == NULL)
        return OSCAR_ERR_NO_MEMORY;
    call->request.probe.model = model->memory->mapping->model;
    call->request.probe.tokens = count;
    call->request.probe.lease = ret_lease != NULL;
    call->undo = lease_undo;
    r = oscar_call_window(call, tokens, count, deadline);
    if (r == 0)
        r = oscar_call_run(call, deadline);
    if (r < 0)
        return r;
    const struct oscar_probe_result result = {call->reply.probe.hit_tokens, call->reply.probe.in_flight_tokens};
    r = check_hit(result.hit_tokens, result.in_flight_tokens, count);
    if (r == 0 && ret_lease != NULL)
        r = lease_new(model, &call, call->reply.probe.secret, call->reply.probe.lease != 0, ret_lease);
    if (r == 0)
        *ret_result = result;
    return r;
}

int oscar_lease_secret(const struct oscar_lease *lease, uint8_t ret_secret[OSCAR_LEASE_SECRET]) {
    if (lease == NULL || ret_secret == NULL)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "lease_secret: %s",
                          lease == NULL ? "lease: NULL" : "ret_secret: NULL");
    if (!lease->named)
        return oscar_fail(oscar_detail(), OSCAR_ERR_NOT_FOUND,
                          "the lease pins nothing: its hit was 0, so nobody can adopt it");
    memcpy(ret_secret, lease->secret, OSCAR_LEASE_SECRET);
    return 0;
}

int oscar_lease_adopt(struct oscar_model *model, const uint8_t secret[OSCAR_LEASE_SECRET],
                      struct oscar_lease **ret_lease, uint32_t *ret_hit_tokens) {
    int r = oscar_model_check(model);
    if (r < 0)
        return r;
    if (secret == NULL || ret_lease == NULL)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "lease_adopt: %s",
                          secret == NULL ? "secret: NULL" : "ret_lease: NULL");
    _cleanup_call_ struct oscar_call *call = oscar_call_new(model->client->connection, OSCAR_LEASE_ADOPT);
    if (call == NULL)
        return OSCAR_ERR_NO_MEMORY;
    call->request.lease_adopt.model = model->memory->mapping->model;
    memcpy(call->request.lease_adopt.secret, secret, OSCAR_LEASE_SECRET);
    call->undo = lease_undo;
    r = oscar_call_run(call, oscar_client_deadline(model->client));
    uint32_t hit = r == 0 ? call->reply.lease_adopt.hit_tokens : 0;
    if (r == 0)
        r = check_hit(hit, hit, OSCAR_MAX_SEQUENCE_TOKENS);
    if (r == 0)
        r = lease_new(model, &call, secret, true, ret_lease);
    if (r == 0 && ret_hit_tokens != NULL)
        *ret_hit_tokens = hit;
    return r;
}

static void leave(struct oscar_lease *lease) {
    pthread_mutex_lock(&lease->model->client->lock);
    LIST_REMOVE(lease, in_model);
    pthread_mutex_unlock(&lease->model->client->lock);
}

void oscar_lease_end(struct oscar_lease *lease, uint64_t deadline) {
    leave(lease);
    oscar_call_undo(lease->closing, deadline);
    free(lease);
}

void oscar_lease_close(struct oscar_lease *lease) {
    if (lease != NULL && getpid() == lease->model->client->pid)
        oscar_lease_end(lease, oscar_client_deadline(lease->model->client));
}
