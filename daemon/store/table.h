/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Node indexes by chain hash: open addressing, linear probing, eight bytes an entry. It grows by moving a few entries with every
 * insertion from the old half to the new one, so that no single call pays for a million.
 */
#ifndef OSCAR_DAEMON_STORE_TABLE_H
#define OSCAR_DAEMON_STORE_TABLE_H

#include <stdbool.h>

#include "daemon/store/meta.h"

struct table_entry {
    uint32_t tag;  /* upper half of the chain hash */
    uint32_t node; /* index + 1; 0: empty; TABLE_MOVED: was here, look on */
};

#define TABLE_MOVED UINT32_MAX

struct table_half {
    struct table_entry *entry;
    uint64_t mask;
    uint32_t used;
};

struct table {
    struct table_half now, old; /* old.entry is NULL unless entries are being moved */
    uint64_t moved;             /* entries of old before this one are gone */
};

int table_open(struct table *table, struct oscar_cause *cause);
void table_close(struct table *table);

/* Makes sure that the next insertion finds room. */
int table_reserve(struct table *table, struct oscar_cause *cause);
void table_insert(struct table *table, const struct node *nodes, uint32_t node);
void table_remove(struct table *table, const struct node *nodes, uint32_t node);

/* Nodes with this chain hash's tag, one after the other; NODE_NONE at the end. The caller confirms them. */
struct table_scan {
    uint64_t at;
    uint32_t tag;
    bool in_old;
};
static inline void table_prefetch(const struct table *table, uint64_t chain) {
    __builtin_prefetch(&table->now.entry[chain & table->now.mask]);
}
static inline void table_scan_begin(const struct table *table, uint64_t chain, struct table_scan *ret) {
    *ret = (struct table_scan){.at = chain & table->now.mask, .tag = (uint32_t)(chain >> 32)};
}
uint32_t table_scan_next(const struct table *table, uint64_t chain, struct table_scan *scan);

uint64_t table_bytes(const struct table *table);

#endif
