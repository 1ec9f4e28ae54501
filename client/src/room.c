/* SPDX-License-Identifier: Apache-2.0 */
/* Room for the tokens to come: pages of this sequence's own, reserved all or none. */
#include <inttypes.h>

#include "client/src/detail.h"
#include "client/src/seq.h"

int oscar_seq_take_reserve(struct oscar_seq *seq, struct oscar_call *call) {
    /* The daemon counts from what it has been told, which has not changed since the request was made. */
    uint32_t asked = seq->told + call->request.seq_reserve.tokens, reserved = call->reply.seq_reserve.reserved_tokens;
    if (reserved < asked || reserved > OSCAR_MAX_SEQUENCE_TOKENS)
        return oscar_fail(oscar_detail(), OSCAR_ERR_PROTOCOL,
                          "seq_reserve: room up to %" PRIu32 " where %" PRIu32 " was asked for", reserved, asked);
    int r = oscar_pages_update(&seq->pages, call->update, call->updates, seq->told / OSCAR_PAGE_TOKENS,
                               oscar_pages_of(reserved), seq->stream);
    if (r < 0)
        return r;
    if (seq->pages.valid < oscar_pages_of(reserved))
        return oscar_fail(oscar_detail(), OSCAR_ERR_PROTOCOL, "seq_reserve: %" PRIu32 " pages for %" PRIu32 " tokens",
                          seq->pages.valid, reserved);
    if (reserved > seq->reserved)
        seq->reserved = reserved;
    return 0;
}

int oscar_seq_reserve(struct oscar_seq *seq, uint32_t tokens) {
    int r = oscar_seq_check(seq);
    if (r < 0)
        return r;
    uint64_t wanted = (uint64_t)seq->committed + tokens;
    if (wanted > seq->model->max_tokens)
        return oscar_fail(oscar_detail(), OSCAR_ERR_LIMIT, "%" PRIu64 " tokens: at most %" PRIu32, wanted,
                          seq->model->max_tokens);
    if (wanted <= seq->reserved)
        return 0;
    uint64_t deadline = oscar_client_deadline(seq->model->client);
    r = oscar_seq_settle(seq, deadline);
    if (r < 0 || wanted <= seq->reserved)
        return r;
    struct oscar_call *call = oscar_call_new(seq->model->client->connection, OSCAR_SEQ_RESERVE);
    if (call == NULL)
        return OSCAR_ERR_NO_MEMORY;
    call->request.seq_reserve.seq = seq->handle;
    call->request.seq_reserve.tokens = (uint32_t)wanted - seq->told;
    r = oscar_call_window(call, NULL, 0, deadline);
    if (r < 0) {
        oscar_call_release(call);
        return r;
    }
    return oscar_seq_request(seq, call, deadline);
}
