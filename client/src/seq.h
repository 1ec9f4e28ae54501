/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A sequence: its page table, its fence, and the one request of it that may be under way.
 *
 * Fences. `fence` is the last even value that a request carried. Before a request is sent the stream is told to raise the counter
 * to it: then all that the request speaks of has been done. After the reply's updates have been taken over it is told to raise it
 * to fence + 1: from then on no work reads what was replaced. Closing carries one more even value: nothing of the sequence is
 * read any more.
 *
 * A request whose caller ran out of time stays in `call`. The daemon may have acted on it, so nothing else may be asked for the
 * sequence before its reply has been taken over: every later call settles it first. So a daemon that was stopped and goes on
 * (SIGCONT) is caught up with, in order, whatever was given up in between.
 */
#ifndef OSCAR_CLIENT_SEQ_H
#define OSCAR_CLIENT_SEQ_H

#include "client/src/batch.h"
#include "client/src/model.h"
#include "client/src/pages.h"

struct oscar_seq {
    struct oscar_model *model;
    LIST_ENTRY(oscar_seq) in_model;
    uint64_t handle;
    oscar_fence_slot *fence_slot;
    uint64_t fence;
    struct oscar_stream *stream; /* of the last call that took one: a reference, or NULL */
    struct oscar_pages pages;
    LIST_HEAD(, oscar_batch_place) places; /* in the batches that were set to it */

    uint32_t hit, in_flight;
    uint32_t committed; /* as the worker sees it */
    uint32_t told;      /* of these, what the daemon has confirmed */
    uint32_t reserved, sealed;
    uint32_t *pending; /* [committed - told] ids, oldest first */
    uint32_t pending_capacity;

    uint32_t *open_tokens; /* [open_count] while somebody else computes them and this sequence can wait for that */
    uint32_t open_count;
    bool touched; /* something was stored: it can no longer wait */
    bool waiting; /* inside oscar_seq_wait(): the hit may grow */

    uint64_t updates_seen;   /* the window's counter when updates were last asked for */
    struct oscar_call *call; /* under way, or done and not taken over */
    struct oscar_call *closing;
    int failed; /* why it can only be closed */
    struct oscar_cause failed_cause;
};

/* Every public call begins with it: NULL, a forked child, a sequence that has failed. */
int oscar_seq_check(const struct oscar_seq *seq);
/* Checks the stream and notes it as the sequence's. */
int oscar_seq_use_stream(struct oscar_seq *seq, struct oscar_stream *stream);

/* Makes the object of a SEQ_OPEN or SEQ_FORK reply; the call goes over to it, to undo the open when it is closed. On failure
 * the call is the caller's still. */
int oscar_seq_new(struct oscar_model *model, struct oscar_call **call, uint64_t handle, uint32_t fence_slot,
                  struct oscar_seq **ret);
/* The undo of these two verbs. */
bool oscar_seq_undo(struct oscar_call *call);

/* Waits for what is under way and takes it over. 0 when nothing is under way any more, whatever became of it. */
int oscar_seq_settle(struct oscar_seq *seq, uint64_t deadline);
/* Sends a request of the sequence (nothing else is under way; takes `call`), waits for it and takes the reply over. */
int oscar_seq_request(struct oscar_seq *seq, struct oscar_call *call, uint64_t deadline);
/* Takes over a reply that is there. OSCAR_ERR_NO_MEMORY leaves it where it is. */
int oscar_seq_take(struct oscar_seq *seq);
/* Sends without waiting. */
int oscar_seq_post(struct oscar_seq *seq, struct oscar_call *call);

/* Enqueues the raising of the counter to the next even value, for a request that carries `seq->fence`. */
int oscar_seq_signal(struct oscar_seq *seq);
/* Enqueues the raising to `seq->fence` + 1: the updates of that request's reply have been taken over. */
int oscar_seq_signal_taken(struct oscar_seq *seq);
/* Its pages or its committed length have changed: batches that were set to it are stale. batch.c */
void oscar_seq_overtake(struct oscar_seq *seq);
/* Something is stored: the tokens of the open are no longer needed. wait.c */
void oscar_seq_touch(struct oscar_seq *seq);
/* Asks for what is new: SeqAdvance of all pending tokens. advance.c */
int oscar_seq_advance_now(struct oscar_seq *seq, uint64_t deadline);
/* SeqAdvance of 0 tokens, without waiting, where updates wait that concern a page of this sequence. advance.c */
void oscar_seq_refresh(struct oscar_seq *seq);

/* One for each verb that oscar_seq_request() may carry: the reply is a success. */
int oscar_seq_take_advance(struct oscar_seq *seq, struct oscar_call *call);
int oscar_seq_take_reserve(struct oscar_seq *seq, struct oscar_call *call);
int oscar_seq_take_extend(struct oscar_seq *seq, struct oscar_call *call);

/* Whether its pages can be attended over up to `tokens` tokens, the last `rows` of them as queries: OSCAR_ERR_INVALID. Query `index`
 * of the call, for the thread's detail. attend.c */
int oscar_seq_check_query(const struct oscar_seq *seq, const struct oscar_model *model, uint32_t tokens, uint32_t rows,
                          uint32_t index);

/* Closes it here and, until the deadline, in the daemon. */
void oscar_seq_end(struct oscar_seq *seq, uint64_t deadline);

static inline uint32_t oscar_pages_of(uint32_t tokens) { return (tokens + OSCAR_PAGE_TOKENS - 1) / OSCAR_PAGE_TOKENS; }

#endif
