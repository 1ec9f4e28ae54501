/* SPDX-License-Identifier: Apache-2.0 */
/* A branch: sealed pages are shared at once, the unsealed tail is copied on the stream. */
#include <inttypes.h>

#include "client/src/detail.h"
#include "client/src/seq.h"
#include "proto/cleanup.h"

/* The source must be a page of the parent, the destination a page of the child's own. Not only the last page is copied: a full
 * one is too while its seal is under way. */
static int check_copy(const struct oscar_seq *parent, const struct oscar_seq *child,
                      const struct oscar_page_copy *copy) {
    uint32_t page = copy->page;
    if (page >= parent->pages.valid || page >= child->pages.valid || copy->from != parent->pages.table->entry[page] ||
        copy->to != child->pages.table->entry[page] || copy->rows > OSCAR_PAGE_TOKENS ||
        oscar_page_ref_form(copy->from) == OSCAR_FORM_PACKED || !oscar_pages_writable(&child->pages, page))
        return oscar_fail(oscar_detail(), OSCAR_ERR_PROTOCOL, "seq_fork: copy of %" PRIu32 " rows to page %" PRIu32,
                          copy->rows, page);
    return 0;
}

/* Pages are copied as a whole: one transfer, and what lies beyond the rows is written before it is read. */
static int enqueue_copies(const struct oscar_seq *parent, const struct oscar_seq *child,
                          const struct oscar_reply *reply) {
    const struct oscar_mapping *mapping = parent->model->memory->mapping;
    uint64_t bytes = parent->model->info.dense_page_bytes;
    for (uint32_t i = 0; i < reply->seq_fork.copies; i++) {
        const struct oscar_page_copy *copy = &reply->seq_fork.copy[i];
        int r = check_copy(parent, child, copy);
        if (r < 0)
            return r;
        struct oscar_attachment *attachment = parent->model->client->attachment;
        struct oscar_stream_impl *queue;
        r = oscar_queue_begin(attachment, child->stream, &queue);
        if (r < 0)
            return r;
        r = attachment->ops->copy(queue, oscar_mapping_page(mapping, copy->to), oscar_mapping_page(mapping, copy->from),
                                  bytes);
        oscar_queue_end(attachment, queue);
        if (r < 0)
            return oscar_work_failed(attachment, r, "copy of page %" PRIu32, copy->page);
    }
    return 0;
}

/* The child knows what the parent has told; the parent's table is as it was. */
static int fill_child(const struct oscar_seq *parent, struct oscar_seq *child) {
    struct oscar_call *call = child->closing;
    uint32_t committed = call->reply.seq_fork.committed_tokens;
    if (committed != parent->told)
        return oscar_fail(oscar_detail(), OSCAR_ERR_PROTOCOL, "seq_fork: %" PRIu32 " tokens of %" PRIu32, committed,
                          parent->told);
    child->hit = child->in_flight = child->committed = child->told = child->reserved = committed;
    child->sealed = parent->sealed;
    child->touched = true;
    int r = oscar_call_updates(call);
    if (r == 0)
        r = oscar_pages_update(&child->pages, call->update, call->updates, committed / OSCAR_PAGE_TOKENS,
                               oscar_pages_of(committed), NULL);
    if (r == 0 && child->pages.valid < oscar_pages_of(committed))
        r = oscar_fail(oscar_detail(), OSCAR_ERR_PROTOCOL, "seq_fork: %" PRIu32 " pages for %" PRIu32 " tokens",
                       child->pages.valid, committed);
    return r == 0 ? enqueue_copies(parent, child, &call->reply) : r;
}

static int make_child(struct oscar_seq *parent, struct oscar_call **call, uint64_t seen, struct oscar_seq **ret) {
    const struct oscar_reply *reply = &(*call)->reply;
    struct oscar_seq *child;
    int r = oscar_seq_new(parent->model, call, reply->seq_fork.seq, reply->seq_fork.fence_slot, &child);
    if (r < 0)
        return r;
    child->updates_seen = seen;
    r = oscar_seq_use_stream(child, parent->stream);
    if (r == 0)
        r = fill_child(parent, child);
    if (r == 0)
        r = oscar_seq_signal_taken(parent);
    if (r == 0) /* the sources of the copies are held until then */
        r = oscar_seq_signal_taken(child);
    if (r < 0) {
        oscar_seq_end(child, oscar_client_deadline(parent->model->client));
        return r;
    }
    oscar_call_drop_updates(child->closing);
    *ret = child;
    return 0;
}

int oscar_seq_fork(struct oscar_seq *seq, struct oscar_stream *stream, struct oscar_seq **ret_seq) {
    int r = oscar_seq_check(seq);
    if (r == 0)
        r = ret_seq != NULL ? oscar_seq_use_stream(seq, stream)
                            : oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "ret_seq: NULL");
    if (r < 0)
        return r;
    struct oscar_client *client = seq->model->client;
    uint64_t deadline = oscar_client_deadline(client), seen = oscar_client_updates_waiting(client);
    r = oscar_seq_settle(seq, deadline);
    if (r == 0 && seq->committed > seq->told)
        r = oscar_seq_advance_now(seq, deadline);
    if (r < 0)
        return r;
    _cleanup_call_ struct oscar_call *call = oscar_call_new(client->connection, OSCAR_SEQ_FORK);
    if (call == NULL)
        return OSCAR_ERR_NO_MEMORY;
    r = oscar_call_window(call, NULL, 0, deadline);
    if (r == 0)
        r = oscar_seq_signal(seq);
    if (r < 0)
        return r;
    call->request.seq_fork.seq = seq->handle;
    call->request.seq_fork.fence = seq->fence;
    call->arg = client;
    call->undo = oscar_seq_undo;
    r = oscar_call_run(call, deadline);
    return r < 0 ? r : make_child(seq, &call, seen, ret_seq);
}
