/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A batch: the backend's copy of the page tables and lengths of one step's sequences. What it copied may be exchanged behind its
 * back, so each sequence knows its places in batches and marks them stale when it changes. A graph that was captured from the
 * batch's calls looks at none of this.
 */
#ifndef OSCAR_CLIENT_BATCH_H
#define OSCAR_CLIENT_BATCH_H

#include <stdatomic.h>
#include <stdbool.h>
#include <sys/queue.h>

#include "client/src/attachment.h"

struct oscar_seq;

struct oscar_batch_place {
    struct oscar_batch *batch;
    struct oscar_seq *seq; /* NULL once it is closed */
    LIST_ENTRY(oscar_batch_place) in_seq;
};

struct oscar_batch {
    struct oscar_model *model;
    LIST_ENTRY(oscar_batch) in_model;
    struct oscar_batch_params params;  /* with strides, none of them 0 */
    struct oscar_model_memory *memory; /* a reference: what enqueued work reads */
    struct oscar_batch_impl *impl;
    struct oscar_batch_item *item; /* [max_seqs] */
    struct oscar_stream *stream;   /* of the last call: a reference, or NULL */
    struct oscar_retired *retired; /* for its end, made beforehand */
    bool storable;                 /* all rows are uncommitted */
    bool stores;                   /* it has been stored with: a graph may do so again */
    _Atomic bool stale;            /* not set, or a sequence has changed since; set by the sequences' threads */
    uint32_t places;
    struct oscar_batch_place place[]; /* [max_seqs]; the first `places` are in their sequences' lists */
};

/* Unlinks it from its model and its sequences, and retires it on its stream. */
void oscar_batch_end(struct oscar_batch *batch);

/* The sequence is closed: its places are no longer in its list. */
void oscar_seq_leave_batches(struct oscar_seq *seq);

#endif
