/* SPDX-License-Identifier: Apache-2.0 */
/* Single flight: waiting for a prefix that another worker computes, and taking over what has become of it. */
#include <inttypes.h>
#include <stdlib.h>

#include "client/src/detail.h"
#include "client/src/seq.h"

static void forget_tokens(struct oscar_seq *seq) {
    free(seq->open_tokens);
    seq->open_tokens = NULL;
    seq->open_count = 0;
}

void oscar_seq_touch(struct oscar_seq *seq) {
    seq->touched = true;
    forget_tokens(seq);
}

int oscar_seq_take_extend(struct oscar_seq *seq, struct oscar_call *call) {
    uint32_t hit = call->reply.seq_extend.hit_tokens, in_flight = call->reply.seq_extend.in_flight_tokens;
    uint32_t count = call->request.seq_extend.tokens;
    if (hit < seq->hit || hit % OSCAR_PAGE_TOKENS != 0 || hit > count || in_flight < hit || in_flight > count)
        return oscar_fail(oscar_detail(), OSCAR_ERR_PROTOCOL,
                          "seq_extend: hit of %" PRIu32 " after %" PRIu32 ", %" PRIu32 " in flight, for %" PRIu32
                          " tokens",
                          hit, seq->hit, in_flight, count);
    /* The daemon counts from the longer hit now, and a caller that was told of a timeout counts from the shorter one. */
    if (!seq->waiting && hit > seq->hit)
        return oscar_fail(oscar_detail(), OSCAR_ERR_STALE,
                          "a wait that had run out of time found %" PRIu32 " tokens after all: open the sequence again",
                          hit);
    uint32_t pages = hit / OSCAR_PAGE_TOKENS, reserved = seq->reserved > hit ? seq->reserved : hit;
    int r = oscar_pages_update(&seq->pages, call->update, call->updates, pages, oscar_pages_of(reserved), seq->stream);
    if (r < 0)
        return r;
    if (seq->pages.valid < oscar_pages_of(reserved))
        return oscar_fail(oscar_detail(), OSCAR_ERR_PROTOCOL, "seq_extend: %" PRIu32 " pages for %" PRIu32 " tokens",
                          seq->pages.valid, reserved);
    seq->hit = seq->committed = seq->told = seq->sealed = hit;
    seq->reserved = reserved;
    seq->in_flight = in_flight;
    if (in_flight == hit)
        forget_tokens(seq);
    return 0;
}

static int extend(struct oscar_seq *seq, uint64_t deadline) {
    struct oscar_call *call = oscar_call_new(seq->model->client->connection, OSCAR_SEQ_EXTEND);
    if (call == NULL)
        return OSCAR_ERR_NO_MEMORY;
    int r = oscar_call_window(call, seq->open_tokens, seq->open_count, deadline);
    if (r == 0)
        r = oscar_seq_signal(seq);
    if (r < 0) {
        oscar_call_release(call);
        return r;
    }
    call->request.seq_extend.seq = seq->handle;
    call->request.seq_extend.tokens = seq->open_count;
    call->request.seq_extend.fence = seq->fence;
    return oscar_seq_request(seq, call, deadline);
}

/* The daemon keeps the time; a daemon that is silent beyond it is given up after the client's own timeout. */
static int wait_for_writer(struct oscar_seq *seq, uint32_t timeout_ms, bool *ret_answered) {
    struct oscar_client *client = seq->model->client;
    _cleanup_call_ struct oscar_call *call = oscar_call_new(client->connection, OSCAR_SEQ_WAIT);
    if (call == NULL)
        return OSCAR_ERR_NO_MEMORY;
    call->request.seq_wait.seq = seq->handle;
    call->request.seq_wait.timeout_ms = timeout_ms;
    int r = oscar_call_run(call, oscar_client_deadline(client) + timeout_ms * OSCAR_NS_PER_MS);
    *ret_answered = oscar_call_done(call);
    return r;
}

static int wait_and_extend(struct oscar_seq *seq, uint32_t timeout_ms) {
    struct oscar_client *client = seq->model->client;
    int r = oscar_seq_settle(seq, oscar_client_deadline(client));
    if (r < 0 || seq->open_tokens == NULL)
        return r;
    bool answered = false;
    int waited = wait_for_writer(seq, timeout_ms, &answered);
    if (waited < 0 && (waited != OSCAR_ERR_TIMEOUT || !answered))
        return waited;
    r = extend(seq, oscar_client_deadline(client));
    if (r == 0 && waited < 0 && seq->in_flight > seq->hit)
        return oscar_fail(oscar_detail(), waited,
                          "seq_wait: %" PRIu32 " of %" PRIu32 " tokens are there after %" PRIu32 " ms", seq->hit,
                          seq->in_flight, timeout_ms);
    return r;
}

int oscar_seq_wait(struct oscar_seq *seq, uint32_t timeout_ms) {
    int r = oscar_seq_check(seq);
    if (r < 0)
        return r;
    if (seq->touched)
        return oscar_fail(oscar_detail(), OSCAR_ERR_STATE,
                          "the sequence has stored tokens of its own: there is nothing to wait for");
    seq->waiting = true;
    r = wait_and_extend(seq, timeout_ms);
    seq->waiting = false;
    return r;
}
