/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The store's metadata: arrays of fixed records, linked by index, in one memfd, so that it outlives the process and a later engine
 * can adopt what its chunks hold. What can be derived (hash table, heap, lists of sequences) is private memory and rebuilt.
 *
 * The file is sparse: each array has its place for its largest size and is backed as it grows.
 *
 * What a crash leaves is decided by `state` alone, which is always written last when a record comes to life and first when it
 * dies (release order):
 *   node FREE    nothing else in the record counts
 *   node DENSE   parent, depth, model, tokens, digest and `dense` are valid and the page's bytes are complete: a node is made
 *                only after the fence and the inspection. `final` does not count, whatever it holds: packing was under way
 *   node FINAL   `final` is valid and its bytes are complete; `dense` may still name a slot that readers were leaving
 *   chunk FREE / USED, model FREE / USED likewise.
 * Slots that no living node names are free (sink, packed) or are the business of the chunk's owner (dense). Pins, references,
 * children, window holders and heap position are counts of the running engine: the next one starts them anew.
 */
#ifndef OSCAR_DAEMON_STORE_META_H
#define OSCAR_DAEMON_STORE_META_H

#include <stdint.h>

#include "proto/digest.h"
#include "proto/page.h"

#define META_MAGIC UINT32_C(0x4d53434f) /* "OSCM" */
#define META_VERSION 1U
#define META_MAX_NODES (1U << 24)
#define META_MAX_MODELS 256U
#define META_MAX_CHUNKS (1U << 20)

#define NODE_NONE UINT32_MAX

enum node_state { NODE_FREE = 0, NODE_DENSE = 1, NODE_FINAL = 2 };

enum node_flag {
    NODE_LINKED = 1,      /* can be found */
    NODE_PACK_QUEUED = 2, /* stands in the pack queue */
    NODE_PACKING = 4,     /* a job reads its dense slot and writes its final one */
};

/* A sealed page: what a walk and the eviction touch. */
struct node {
    uint64_t chain;     /* seeded hash of the whole path: the key of the hash table */
    uint64_t last_used; /* the store's tick; a parent's counts only once its children are gone */
    uint32_t parent;    /* NODE_NONE for page 0 of a path; the next free node while FREE */
    uint32_t dense;     /* slot in the dense arena, or SLOT_NONE */
    uint32_t final;     /* slot in the sink arena (depth 0) or the packed one, or SLOT_NONE */
    uint32_t children;
    uint32_t pins;             /* sequences and leases whose deepest page this is */
    uint32_t dense_references; /* page tables that name the dense slot */
    uint32_t recent_holders;   /* those of them that have it in their recent window */
    uint32_t heap_position;    /* in the heap of evictable pages, or HEAP_NONE */
    uint32_t older, newer;     /* list of all pages that can be found, in the order of publishing */
    uint16_t depth;            /* page index in its path */
    uint16_t model;
    uint8_t state;
    uint8_t flags;
    uint8_t pack_failures;
    uint8_t reserved;
};
_Static_assert(sizeof(struct node) == 64, "one cache line");

/* What only a confirmed look-up, an event or a snapshot touch. */
struct node_cold {
    uint32_t tokens[OSCAR_PAGE_TOKENS];
    struct oscar_digest digest;
    uint64_t born; /* number of its publishing: a parent's is below its children's */
};

struct meta_model {
    uint32_t state; /* 0 free, 1 used */
    uint32_t generation;
    struct oscar_digest digest;
    struct oscar_identity identity;
};

struct meta_chunk {
    uint32_t state; /* 0 free, 1 used */
    uint32_t model;
    uint32_t form;
    uint32_t index;
    uint64_t generation;
    uint64_t bytes;
    uint64_t owner; /* number of the client whose process may write it, 0: none */
};

struct meta_header {
    uint32_t magic, version;
    uint32_t node_bytes, cold_bytes, model_bytes, chunk_bytes; /* sizes of the records above */
    uint64_t incarnation;                                      /* random: of this file's life */
    uint64_t generation;                                       /* larger than that of every chunk so far */
    uint32_t nodes, models, chunks;                            /* records ever used */
    uint32_t reserved;
};

struct meta {
    int fd;
    uint8_t *base;
    struct meta_header *header;
    struct meta_model *model;
    struct meta_chunk *chunk;
    struct node *node;
    struct node_cold *cold;
    uint32_t free_node;  /* first of a list linked through `parent` */
    uint32_t nodes_live; /* taken and not given back */
    uint32_t nodes_backed, chunks_backed;
};

int meta_open(struct meta *meta, struct oscar_cause *cause);
void meta_close(struct meta *meta);

/* A FREE node to be filled in; OSCAR_ERR_NO_MEMORY, OSCAR_ERR_LIMIT. */
int meta_node_take(struct meta *meta, uint32_t *ret_node, struct oscar_cause *cause);
void meta_node_give(struct meta *meta, uint32_t node);
/* A filled-in chunk record. */
int meta_chunk_take(struct meta *meta, const struct meta_chunk *chunk, uint32_t *ret_record, struct oscar_cause *cause);
void meta_chunk_give(struct meta *meta, uint32_t record);

static inline void meta_node_state(struct meta *meta, uint32_t node, enum node_state state) {
    __atomic_store_n(&meta->node[node].state, (uint8_t)state, __ATOMIC_RELEASE);
}

/* Memory behind the file. */
uint64_t meta_bytes(const struct meta *meta);

#endif
