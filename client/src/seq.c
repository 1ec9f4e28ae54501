/* SPDX-License-Identifier: Apache-2.0 */
#include "client/src/seq.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/src/detail.h"
#include "client/src/options.h"
#include "proto/cleanup.h"

int oscar_seq_check(const struct oscar_seq *seq) {
    if (seq == NULL)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "seq: NULL");
    int r = oscar_client_check(seq->model->client);
    if (r < 0 || seq->failed == 0)
        return r;
    *oscar_detail() = seq->failed_cause;
    return seq->failed;
}

int oscar_seq_use_stream(struct oscar_seq *seq, struct oscar_stream *stream) {
    if (stream == seq->stream)
        return 0;
    if (stream != NULL && stream->attachment != seq->model->client->attachment)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "the stream was opened by another client");
    oscar_stream_unref(seq->stream);
    seq->stream = oscar_stream_ref(stream);
    return 0;
}

/* --- opening ------------------------------------------------------------------------------------------------------ */

static oscar_fence_slot *fence_slot(const struct oscar_attachment *attachment, uint32_t slot) {
    return slot < OSCAR_FENCE_SLOTS ? &attachment->fences[slot] : NULL;
}

/* A slot that was used before goes on from where it stands: its counter never falls. */
static uint64_t fence_base(oscar_fence_slot *slot) {
    return (atomic_load_explicit(slot, memory_order_acquire) + 1) & ~UINT64_C(1);
}

bool oscar_seq_undo(struct oscar_call *call) {
    struct oscar_client *client = call->arg;
    bool fork = call->request.verb == OSCAR_SEQ_FORK;
    uint64_t handle = fork ? call->reply.seq_fork.seq : call->reply.seq_open.seq;
    oscar_fence_slot *slot =
        fence_slot(client->attachment, fork ? call->reply.seq_fork.fence_slot : call->reply.seq_open.fence_slot);
    if (slot == NULL)
        return false;
    uint64_t fence = fence_base(slot) + 2;
    atomic_store_explicit(slot, fence, memory_order_release); /* nothing was ever enqueued for it */
    call->request.verb = OSCAR_SEQ_CLOSE;
    call->request.seq_close.seq = handle;
    call->request.seq_close.fence = fence;
    return true;
}

int oscar_seq_new(struct oscar_model *model, struct oscar_call **call, uint64_t handle, uint32_t slot,
                  struct oscar_seq **ret) {
    struct oscar_client *client = model->client;
    if (fence_slot(client->attachment, slot) == NULL)
        return oscar_fail(oscar_detail(), OSCAR_ERR_PROTOCOL, "fence slot %" PRIu32 " of %u", slot, OSCAR_FENCE_SLOTS);
    _cleanup_free_ struct oscar_seq *seq = calloc(1, sizeof(*seq));
    if (seq == NULL)
        return oscar_fail(oscar_detail(), OSCAR_ERR_NO_MEMORY, "no memory for a sequence");
    int r = oscar_pages_open(&seq->pages, model);
    if (r < 0)
        return r;
    seq->model = model;
    seq->handle = handle;
    seq->fence_slot = fence_slot(client->attachment, slot);
    seq->fence = fence_base(seq->fence_slot);
    seq->closing = TAKE_PTR(*call);
    pthread_mutex_lock(&client->lock);
    LIST_INSERT_HEAD(&model->seqs, seq, in_model);
    pthread_mutex_unlock(&client->lock);
    *ret = TAKE_PTR(seq);
    return 0;
}

static int check_open_reply(const struct oscar_reply *reply, uint32_t count) {
    uint32_t hit = reply->seq_open.hit_tokens, in_flight = reply->seq_open.in_flight_tokens;
    if (hit % OSCAR_PAGE_TOKENS != 0 || hit > count || in_flight < hit || in_flight > count)
        return oscar_fail(oscar_detail(), OSCAR_ERR_PROTOCOL,
                          "seq_open: hit of %" PRIu32 " and %" PRIu32 " in flight for %" PRIu32 " tokens", hit,
                          in_flight, count);
    return 0;
}

/* Tokens are kept for as long as somebody else's computation of them can be waited for. */
static int keep_tokens(struct oscar_seq *seq, const uint32_t *tokens, uint32_t count) {
    if (tokens == NULL || seq->in_flight <= seq->hit)
        return 0;
    seq->open_tokens = malloc((size_t)count * sizeof(*tokens));
    if (seq->open_tokens == NULL)
        return oscar_fail(oscar_detail(), OSCAR_ERR_NO_MEMORY, "no memory for %" PRIu32 " tokens", count);
    memcpy(seq->open_tokens, tokens, (size_t)count * sizeof(*tokens));
    seq->open_count = count;
    return 0;
}

static int take_open(struct oscar_model *model, struct oscar_call **call, const uint32_t *tokens, uint32_t count,
                     uint64_t updates_seen, struct oscar_seq **ret) {
    const struct oscar_reply reply = (*call)->reply;
    int r = check_open_reply(&reply, count);
    if (r < 0)
        return r;
    struct oscar_seq *seq;
    r = oscar_seq_new(model, call, reply.seq_open.seq, reply.seq_open.fence_slot, &seq);
    if (r < 0)
        return r;
    uint32_t hit_pages = reply.seq_open.hit_tokens / OSCAR_PAGE_TOKENS;
    seq->hit = seq->committed = seq->told = seq->reserved = seq->sealed = reply.seq_open.hit_tokens;
    seq->in_flight = reply.seq_open.in_flight_tokens;
    seq->updates_seen = updates_seen;
    r = oscar_call_updates(seq->closing);
    if (r == 0)
        r = oscar_pages_update(&seq->pages, seq->closing->update, seq->closing->updates, hit_pages, hit_pages, NULL);
    if (r == 0 && seq->pages.valid < hit_pages)
        r = oscar_fail(oscar_detail(), OSCAR_ERR_PROTOCOL, "seq_open: %" PRIu32 " pages for a hit of %" PRIu32,
                       seq->pages.valid, hit_pages);
    oscar_call_drop_updates(seq->closing);
    if (r == 0)
        r = keep_tokens(seq, tokens, count);
    if (r < 0) {
        oscar_seq_end(seq, oscar_client_deadline(model->client));
        return r;
    }
    *ret = seq;
    return 0;
}

int oscar_seq_open(struct oscar_model *model, const uint32_t *tokens, uint32_t count, uint32_t flags,
                   struct oscar_seq **ret_seq) {
    int r = oscar_model_check(model);
    if (r < 0)
        return r;
    if ((tokens == NULL && count > 0) || (flags & ~(uint32_t)OSCAR_SEQ_DENSE_TAIL) != 0 || ret_seq == NULL)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "seq_open: %s",
                          ret_seq == NULL               ? "ret_seq: NULL"
                          : tokens == NULL && count > 0 ? "tokens: NULL"
                                                        : "unknown flags");
    if (count > model->max_tokens)
        return oscar_fail(oscar_detail(), OSCAR_ERR_LIMIT, "%" PRIu32 " tokens: at most %" PRIu32, count,
                          model->max_tokens);
    struct oscar_client *client = model->client;
    oscar_retired_sweep(client->attachment);
    uint64_t deadline = oscar_client_deadline(client), seen = oscar_client_updates_waiting(client);
    _cleanup_call_ struct oscar_call *call = oscar_call_new(client->connection, OSCAR_SEQ_OPEN);
    if (call == NULL)
        return OSCAR_ERR_NO_MEMORY;
    call->request.seq_open.model = model->memory->mapping->model;
    call->request.seq_open.tokens = count;
    call->request.seq_open.dense_tail = (flags & OSCAR_SEQ_DENSE_TAIL) != 0;
    call->arg = client;
    call->undo = oscar_seq_undo;
    r = oscar_call_window(call, tokens, count, deadline);
    if (r == 0)
        r = oscar_call_run(call, deadline);
    return r < 0 ? r : take_open(model, &call, tokens, count, seen, ret_seq);
}

/* --- one request at a time ---------------------------------------------------------------------------------------- */

static const struct {
    int (*take)(struct oscar_seq *seq, struct oscar_call *call);
    bool fenced;
} takers[OSCAR_VERBS] = {
    [OSCAR_SEQ_ADVANCE] = {oscar_seq_take_advance, true},
    [OSCAR_SEQ_RESERVE] = {oscar_seq_take_reserve, false},
    [OSCAR_SEQ_EXTEND] = {oscar_seq_take_extend, true},
};

/* After these nothing of the sequence will ever work again. */
static bool is_final(int error) {
    return error == OSCAR_ERR_NOT_FINITE || error == OSCAR_ERR_STALE || error == OSCAR_ERR_NOT_FOUND ||
           error == OSCAR_ERR_PROTOCOL;
}

/* Where nothing lags, all that the value speaks of is done already: no backend, and no memory, is needed to say so. */
static int signal_fence(struct oscar_seq *seq, uint64_t value) {
    if (!oscar_stream_lags(seq->stream)) {
        atomic_store_explicit(seq->fence_slot, value, memory_order_release);
        return 0;
    }
    int r = oscar_model_ops(seq->model)->fence_signal(seq->stream->impl, seq->fence_slot, value);
    return r < 0 ? oscar_work_failed(seq->model->client->attachment, r, "the fence on the stream") : 0;
}

int oscar_seq_signal(struct oscar_seq *seq) {
    int r = signal_fence(seq, seq->fence + 2);
    if (r == 0)
        seq->fence += 2;
    return r;
}

int oscar_seq_signal_taken(struct oscar_seq *seq) { return signal_fence(seq, seq->fence + 1); }

int oscar_seq_take(struct oscar_seq *seq) {
    struct oscar_call *call = seq->call;
    enum oscar_verb verb = call->request.verb;
    int r = oscar_call_wait(call, 0); /* does not wait: sets the detail of an error */
    bool final = is_final(r);
    if (r == 0) {
        r = oscar_call_updates(call);
        if (r == 0)
            r = takers[verb].take(seq, call);
        if (r == OSCAR_ERR_NO_MEMORY)
            return r;  /* nothing has changed: the next call tries again */
        final = r < 0; /* the daemon has gone on, and this side cannot follow */
        if (call->updates > 0)
            oscar_seq_overtake(seq);
        if (r == 0 && takers[verb].fenced)
            r = oscar_seq_signal_taken(seq);
    }
    if (final) {
        seq->failed = r;
        seq->failed_cause = *oscar_detail();
    }
    oscar_call_release(TAKE_PTR(seq->call));
    return r;
}

int oscar_seq_settle(struct oscar_seq *seq, uint64_t deadline) {
    if (seq->call == NULL)
        return 0;
    int r = oscar_call_wait(seq->call, deadline);
    if (!oscar_call_done(seq->call))
        return r;
    r = oscar_seq_take(seq);
    return seq->call != NULL || seq->failed < 0 ? r : 0;
}

int oscar_seq_post(struct oscar_seq *seq, struct oscar_call *call) {
    int r = oscar_call_send(call, 0);
    if (r < 0)
        oscar_call_release(call);
    else
        seq->call = call;
    return r;
}

int oscar_seq_request(struct oscar_seq *seq, struct oscar_call *call, uint64_t deadline) {
    int r = oscar_call_send(call, deadline);
    if (r < 0) {
        oscar_call_release(call);
        return r;
    }
    seq->call = call;
    r = oscar_call_wait(call, deadline);
    return oscar_call_done(call) ? oscar_seq_take(seq) : r;
}

/* --- closing ------------------------------------------------------------------------------------------------------ */

/* Everything but the message. Enqueued work may still read pages: the fence and the end of the table are enqueued behind it. */
static void leave(struct oscar_seq *seq) {
    struct oscar_client *client = seq->model->client;
    pthread_mutex_lock(&client->lock);
    LIST_REMOVE(seq, in_model);
    pthread_mutex_unlock(&client->lock);
    oscar_call_release(seq->call);
    oscar_seq_leave_batches(seq);
    if (oscar_seq_signal(seq) < 0) /* then the daemon keeps the pages until this connection ends */
        seq->fence += 2;
    oscar_pages_close(&seq->pages, seq->stream);
}

static void seq_free(struct oscar_seq *seq) {
    struct oscar_attachment *attachment = seq->model->client->attachment;
    oscar_stream_unref(seq->stream);
    free(seq->pending);
    free(seq->open_tokens);
    free(seq);
    oscar_retired_sweep(attachment);
}

static bool as_it_stands(struct oscar_call *call) { return call->request.verb == OSCAR_SEQ_CLOSE; }

void oscar_seq_end(struct oscar_seq *seq, uint64_t deadline) {
    leave(seq);
    seq->closing->undo = as_it_stands;
    seq->closing->request.verb = OSCAR_SEQ_CLOSE;
    seq->closing->request.seq_close.seq = seq->handle;
    seq->closing->request.seq_close.fence = seq->fence;
    oscar_call_undo(seq->closing, deadline);
    seq_free(seq);
}

void oscar_seq_close(struct oscar_seq *seq) {
    if (seq != NULL && getpid() == seq->model->client->pid)
        oscar_seq_end(seq, oscar_client_deadline(seq->model->client));
}

/* --- looking ------------------------------------------------------------------------------------------------------ */

int oscar_seq_info(const struct oscar_seq *seq, struct oscar_seq_info *ret_info) {
    if (seq == NULL)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "seq: NULL");
    const struct oscar_seq_info info = {
        .size = sizeof(info),
        .hit_tokens = seq->hit,
        .in_flight_tokens = seq->in_flight,
        .committed_tokens = seq->committed,
        .reserved_tokens = seq->reserved,
        .sealed_tokens = seq->sealed,
        .packed_tokens = oscar_pages_packed(&seq->pages, seq->committed / OSCAR_PAGE_TOKENS) * OSCAR_PAGE_TOKENS};
    return oscar_info_write(&info, sizeof(info), "oscar_seq_info", ret_info);
}
