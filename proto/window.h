/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two memfds that the daemon makes for each connection and sends with the HELLO reply (sealed against resizing):
 *
 * The window carries what does not fit a record. Client to daemon: token ids (u32), from tokens_offset. Daemon to client: page
 * table updates, from updates_offset. It belongs to one request at a time: the client fills in tokens, sends the request, and
 * has taken the updates out before it sends the next request that uses the window. Either side treats what the other wrote as
 * hostile: counts come from the record and are bounds-checked, values are copied once and then checked.
 *
 * The fences: an array of 64-bit counters, one a sequence (fence_slot of its open), raised by the client's stream only.
 * A request of a sequence carries an even value `fence`, larger than all before: the daemon may rely on everything that the
 * request speaks of once the counter is >= fence. After taking over the updates of its reply the client's stream raises the
 * counter to fence + 1: from then on nothing that it replaced is read any more.
 */
#ifndef OSCAR_PROTO_WINDOW_H
#define OSCAR_PROTO_WINDOW_H

#include <stdatomic.h>
#include <stdint.h>

#include "oscar/geometry.h"

#include "proto/page.h"

#define OSCAR_WINDOW_MAGIC UINT32_C(0x5743534f) /* "OSCW" */
#define OSCAR_WINDOW_VERSION 1U
#define OSCAR_WINDOW_TOKENS_OFFSET UINT64_C(4096)
#define OSCAR_WINDOW_UPDATES_OFFSET (OSCAR_WINDOW_TOKENS_OFFSET + (uint64_t)OSCAR_MAX_SEQUENCE_TOKENS * 4)
#define OSCAR_MAX_UPDATES (OSCAR_MAX_SEQUENCE_PAGES + 64U)
#define OSCAR_WINDOW_BYTES (OSCAR_WINDOW_UPDATES_OFFSET + (uint64_t)OSCAR_MAX_UPDATES * 16)
#define OSCAR_FENCE_SLOTS 16384U /* sequences a connection */
#define OSCAR_FENCE_BYTES ((uint64_t)OSCAR_FENCE_SLOTS * 8)

struct oscar_window_header {
    uint32_t magic;
    uint32_t version;
    /* Raised by the daemon whenever some sequence of this connection has updates waiting: the client then sends a
     * SeqAdvance of 0 tokens for the sequences that it is about to use. */
    _Atomic uint64_t updates_waiting;
};

/* Entry `page` of the sequence's page table is `ref` from now on (0: the entry is gone). */
struct oscar_page_update {
    uint32_t page;
    uint32_t reserved; /* 0 */
    oscar_page_ref ref;
};

#endif
