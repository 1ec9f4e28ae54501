/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pages of a model in this process: one reserved address range for each form, into which the daemon's notices map chunks.
 *
 * A chunk is writable only where the daemon says so, and only a dense one can be: the tail of this connection's own
 * sequences. Every page that a sequence's table names is counted in its chunk, so that a chunk under a page table is never
 * taken away, whatever the daemon says: attention reads no unmapped page.
 */
#ifndef OSCAR_CLIENT_MAPPING_H
#define OSCAR_CLIENT_MAPPING_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "client/src/attachment.h"
#include "proto/geometry.h"
#include "proto/wire.h"

struct oscar_chunk_slot {
    uint64_t generation; /* of the last chunk that was announced here; 0: none yet */
    bool mapped, writable;
    bool awaited;        /* between its announcement and its mapping, both under one hold of the lock */
    int fd;              /* of the awaited chunk; whoever announces it closes it when it is mapped */
    int failure;         /* why it could not be mapped, or 0 */
    uint32_t references; /* entries of page tables that lie in it */
};

struct oscar_arena {
    struct oscar_range *range;
    uint64_t page_bytes, chunk_bytes, max_pages;
    uint32_t chunk_pages, chunks;
    struct oscar_chunk_slot *chunk;                /* [chunks] */
    uint32_t awaited, first_awaited, last_awaited; /* how many are, and where the first and the last one lie */
};

struct oscar_mapping {
    _Atomic unsigned references;
    struct oscar_attachment *attachment;
    uint64_t model; /* the daemon's handle */
    unsigned opens; /* of the model by this client; guarded by the lock of the mappings */
    struct oscar_arena arenas[OSCAR_FORMS];
    struct oscar_cause failure; /* of the last chunk that could not be mapped; guarded by the lock of the mappings */
    struct oscar_mapping *next; /* in the list of those that notices can reach */
};

/* The mappings of one client. */
struct oscar_mappings {
    pthread_mutex_t lock; /* guards the list and every chunk slot */
    struct oscar_mapping *first;
};

void oscar_mappings_init(struct oscar_mappings *mappings);
void oscar_mappings_destroy(struct oscar_mappings *mappings);

/* The handler of notices, `arg` = the mappings: no descriptor outlives the record that brought it. Chunks of a model that is not
 * open, because it has been closed meanwhile, are passed over. OSCAR_ERR_PROTOCOL. */
int oscar_mappings_notice(void *arg, const struct oscar_notice *notice, struct oscar_record *record,
                          struct oscar_cause *cause);

/* Makes the mapping of a MODEL_OPEN reply, whose chunks come behind it; a second open of a model that the client has open gives the
 * same mapping. To be called in the order of the socket. */
int oscar_mapping_open(struct oscar_mappings *mappings, struct oscar_attachment *attachment,
                       const struct oscar_geometry *geometry, const struct oscar_reply *reply,
                       struct oscar_mapping **ret, struct oscar_cause *cause);
struct oscar_mapping *oscar_mapping_ref(struct oscar_mapping *mapping);
void oscar_mapping_unref(struct oscar_mapping *mapping); /* NULL is fine */
/* Gives up one open: notices no longer reach the mapping after the last. */
void oscar_mapping_close(struct oscar_mappings *mappings, struct oscar_mapping *mapping);

/* With mappings->lock. The slot of a page, or NULL where the reference lies outside its arena. */
struct oscar_chunk_slot *oscar_mapping_slot(const struct oscar_mapping *mapping, oscar_page_ref ref);

/* Where a page lies; only for references that a page table holds. */
static inline uint8_t *oscar_mapping_page(const struct oscar_mapping *mapping, oscar_page_ref ref) {
    const struct oscar_arena *arena = &mapping->arenas[oscar_page_ref_form(ref)];
    return mapping->attachment->ops->range_locate(arena->range, oscar_page_ref_id(ref) * arena->page_bytes);
}

/* The arenas as the backend's work takes them. */
void oscar_mapping_view(const struct oscar_mapping *mapping, struct oscar_arena_view ret_arenas[OSCAR_FORMS]);

#endif
