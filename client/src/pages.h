/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The page table of a sequence. What the daemon says about it is checked entry by entry before it counts: attention follows
 * these references without another look.
 *
 * Enqueued work reads the table when it runs. So where a stream may lag, an entry in use is never changed in place: the table
 * is copied, and the old one is retired on the stream.
 */
#ifndef OSCAR_CLIENT_PAGES_H
#define OSCAR_CLIENT_PAGES_H

#include "client/src/model.h"
#include "proto/window.h"

struct oscar_table {
    struct oscar_model_memory *memory; /* a reference: the pages that the entries name */
    uint32_t capacity;
    oscar_page_ref entry[]; /* [capacity], 0: no page */
};

struct oscar_pages {
    struct oscar_mappings *mappings;
    struct oscar_attachment *attachment;
    struct oscar_table *table;
    struct oscar_retired *retired; /* for the end of the table, made beforehand */
    uint32_t valid;                /* entries below it are pages */
    uint32_t first_dense;          /* lowest entry that is dense; `valid` when there is none */
};

int oscar_pages_open(struct oscar_pages *pages, const struct oscar_model *model);
/* Retires the table on the stream. No reference of it counts from here on. A zeroed struct is fine. */
void oscar_pages_close(struct oscar_pages *pages, struct oscar_stream *stream);

/*
 * Applies updates, all or none. Entries below `tail` must be pages, those from it on must be writable dense ones (this
 * sequence's own) or none; nothing may lie at `limit` or beyond. OSCAR_ERR_PROTOCOL for what breaks these rules or names a page
 * that is not mapped; OSCAR_ERR_NO_MEMORY (may be tried again). Sets the thread's detail.
 */
int oscar_pages_update(struct oscar_pages *pages, const struct oscar_page_update *update, uint32_t updates,
                       uint32_t tail, uint32_t limit, struct oscar_stream *stream);

/* Whether this process may write to a page of the table. */
bool oscar_pages_writable(const struct oscar_pages *pages, uint32_t page);

/* How many of the first `count` pages are packed. */
uint32_t oscar_pages_packed(const struct oscar_pages *pages, uint32_t count);

#endif
