/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tokens are committed here at once and told to the daemon when there is a reason to speak to it: a page has filled, or it has
 * something to tell. A daemon that does not answer takes nothing back: what it was not told stays pending.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "client/src/detail.h"
#include "client/src/seq.h"

int oscar_seq_take_advance(struct oscar_seq *seq, struct oscar_call *call) {
    const struct oscar_reply *reply = &call->reply;
    uint32_t tokens = call->request.seq_advance.tokens, told = seq->told + tokens;
    uint32_t committed = reply->seq_advance.committed_tokens, sealed = reply->seq_advance.sealed_tokens;
    if (committed != told || sealed > committed || sealed % OSCAR_PAGE_TOKENS != 0)
        return oscar_fail(oscar_detail(), OSCAR_ERR_PROTOCOL,
                          "seq_advance: %" PRIu32 " tokens committed, %" PRIu32 " of them sealed, where %" PRIu32
                          " were told",
                          committed, sealed, told);
    int r = oscar_pages_update(&seq->pages, call->update, call->updates, told / OSCAR_PAGE_TOKENS,
                               oscar_pages_of(seq->reserved), seq->stream);
    if (r < 0)
        return r;
    if (seq->pages.valid < oscar_pages_of(seq->reserved))
        return oscar_fail(oscar_detail(), OSCAR_ERR_PROTOCOL, "seq_advance: the page table ends at page %" PRIu32,
                          seq->pages.valid);
    seq->told = told;
    seq->sealed = sealed;
    if (tokens > 0)
        memmove(seq->pending, seq->pending + tokens, (seq->committed - told) * sizeof(*seq->pending));
    return 0;
}

static struct oscar_call *advance_call(struct oscar_seq *seq, uint32_t tokens, uint64_t deadline, int *ret) {
    struct oscar_client *client = seq->model->client;
    uint64_t seen = oscar_client_updates_waiting(client);
    struct oscar_call *call = oscar_call_new(client->connection, OSCAR_SEQ_ADVANCE);
    if (call == NULL) {
        *ret = OSCAR_ERR_NO_MEMORY;
        return NULL;
    }
    *ret = oscar_call_window(call, seq->pending, tokens, deadline);
    if (*ret == 0)
        *ret = oscar_seq_signal(seq);
    if (*ret < 0) {
        oscar_call_release(call);
        return NULL;
    }
    call->request.seq_advance.seq = seq->handle;
    call->request.seq_advance.tokens = tokens;
    call->request.seq_advance.fence = seq->fence;
    seq->updates_seen = seen; /* what was raised later is asked for again */
    return call;
}

int oscar_seq_advance_now(struct oscar_seq *seq, uint64_t deadline) {
    int r;
    struct oscar_call *call = advance_call(seq, seq->committed - seq->told, deadline, &r);
    return call != NULL ? oscar_seq_request(seq, call, deadline) : r;
}

/* A page of this sequence can be offered as packed once it has left the recent window. */
static bool has_page_to_exchange(const struct oscar_seq *seq) {
    return ((uint64_t)seq->pages.first_dense + 1) * OSCAR_PAGE_TOKENS + OSCAR_RECENT_TOKENS <= seq->told;
}

void oscar_seq_refresh(struct oscar_seq *seq) {
    struct oscar_client *client = seq->model->client;
    if (seq->call == NULL && (oscar_client_updates_waiting(client) == seq->updates_seen || !has_page_to_exchange(seq)))
        return;
    struct oscar_cause kept = *oscar_detail(); /* none of what fails here is a failure of the caller's */
    int r = 0;
    if (seq->call != NULL) {
        oscar_connection_poll(client->connection);
        if (oscar_call_done(seq->call))
            (void)oscar_seq_take(seq);
    } else {
        uint64_t seen = seq->updates_seen;
        struct oscar_call *call = advance_call(seq, 0, 0, &r);
        if (call != NULL)
            r = oscar_seq_post(seq, call);
        if (r < 0)
            seq->updates_seen = seen;
    }
    *oscar_detail() = kept;
}

static int make_room(struct oscar_seq *seq, uint64_t count) {
    uint64_t needed = seq->committed - seq->told + count;
    if (needed <= seq->pending_capacity)
        return 0;
    uint64_t capacity = needed + OSCAR_PAGE_TOKENS;
    uint32_t *pending = realloc(seq->pending, capacity * sizeof(*pending));
    if (pending == NULL)
        return oscar_fail(oscar_detail(), OSCAR_ERR_NO_MEMORY, "no memory for %" PRIu64 " tokens", needed);
    seq->pending = pending;
    seq->pending_capacity = (uint32_t)capacity;
    return 0;
}

/* A request under way is settled as well: its reply may have come. */
static bool has_reason_to_speak(const struct oscar_seq *seq) {
    return seq->committed / OSCAR_PAGE_TOKENS > seq->told / OSCAR_PAGE_TOKENS ||
           oscar_client_updates_waiting(seq->model->client) != seq->updates_seen;
}

int oscar_seq_advance(struct oscar_seq *seq, struct oscar_stream *stream, const uint32_t *tokens, uint32_t count) {
    int r = oscar_seq_check(seq);
    if (r < 0)
        return r;
    if (tokens == NULL && count > 0)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "tokens: NULL");
    if (count > seq->reserved - seq->committed)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID,
                          "%" PRIu32 " tokens after %" PRIu32 " go beyond the %" PRIu32 " that are reserved", count,
                          seq->committed, seq->reserved);
    r = make_room(seq, count);
    if (r == 0)
        r = oscar_seq_use_stream(seq, stream);
    if (r < 0)
        return r;
    if (count > 0) {
        memcpy(seq->pending + (seq->committed - seq->told), tokens, (size_t)count * sizeof(*tokens));
        seq->committed += count;
        oscar_seq_overtake(seq);
        oscar_seq_touch(seq);
    }
    if (seq->call == NULL && count > 0 && !has_reason_to_speak(seq))
        return 0;
    uint64_t deadline = oscar_client_deadline(seq->model->client);
    r = oscar_seq_settle(seq, deadline);
    if (r == 0 && (count == 0 || has_reason_to_speak(seq)))
        r = oscar_seq_advance_now(seq, deadline);
    /* The tokens are committed, and what memory was missing for is done by a later call: no failure of this one. */
    return r == OSCAR_ERR_NO_MEMORY && count > 0 ? 0 : r;
}
