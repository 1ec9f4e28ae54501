/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/store/table.h"

#include <stdlib.h>

#define FIRST_ENTRIES 1024U
#define MOVE_STEP 16U

int table_open(struct table *table, struct oscar_cause *cause) {
    *table = (struct table){.now.mask = FIRST_ENTRIES - 1};
    table->now.entry = calloc(FIRST_ENTRIES, sizeof *table->now.entry);
    if (!table->now.entry)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the hash table");
    return 0;
}

void table_close(struct table *table) {
    free(table->now.entry);
    free(table->old.entry);
    *table = (struct table){0};
}

static void half_put(struct table_half *half, uint64_t chain, uint32_t node) {
    uint64_t at = chain & half->mask;
    while (half->entry[at].node != 0)
        at = (at + 1) & half->mask;
    half->entry[at] = (struct table_entry){.tag = (uint32_t)(chain >> 32), .node = node + 1};
    half->used++;
}

static void move_some(struct table *table, const struct node *nodes, uint64_t entries) {
    while (table->old.entry && entries-- > 0) {
        struct table_entry *entry = &table->old.entry[table->moved];
        if (entry->node != 0 && entry->node != TABLE_MOVED) {
            half_put(&table->now, nodes[entry->node - 1].chain, entry->node - 1);
            table->old.used--;
            entry->node = TABLE_MOVED;
        }
        if (++table->moved > table->old.mask) {
            free(table->old.entry);
            table->old = (struct table_half){0};
        }
    }
}

int table_reserve(struct table *table, struct oscar_cause *cause) {
    /* Below 5/8 full a miss looks at few entries; while entries are moving the new half has room by construction: it is twice
     * the old one, and all of it is moved before as many insertions have come as would fill it. */
    if (table->old.entry || (uint64_t)(table->now.used + 1) * 8 <= (table->now.mask + 1) * 5)
        return 0;
    uint64_t entries = (table->now.mask + 1) * 2;
    struct table_entry *larger = calloc(entries, sizeof *larger);
    if (!larger)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the hash table");
    table->old = table->now;
    table->now = (struct table_half){.entry = larger, .mask = entries - 1};
    table->moved = 0;
    return 0;
}

void table_insert(struct table *table, const struct node *nodes, uint32_t node) {
    move_some(table, nodes, MOVE_STEP);
    half_put(&table->now, nodes[node].chain, node);
}

/* Closes the gap that a removal leaves, so that no later look-up stops short. */
static void half_take(struct table_half *half, const struct node *nodes, uint64_t gap) {
    half->used--;
    for (uint64_t at = (gap + 1) & half->mask; half->entry[at].node != 0; at = (at + 1) & half->mask) {
        uint64_t home = nodes[half->entry[at].node - 1].chain & half->mask;
        if (((at - home) & half->mask) >= ((at - gap) & half->mask)) {
            half->entry[gap] = half->entry[at];
            gap = at;
        }
    }
    half->entry[gap].node = 0;
}

static bool half_find(const struct table_half *half, uint64_t chain, uint32_t node, uint64_t *ret_at) {
    if (!half->entry)
        return false;
    for (uint64_t at = chain & half->mask; half->entry[at].node != 0; at = (at + 1) & half->mask)
        if (half->entry[at].node == node + 1) {
            *ret_at = at;
            return true;
        }
    return false;
}

void table_remove(struct table *table, const struct node *nodes, uint32_t node) {
    uint64_t chain = nodes[node].chain, at;
    if (half_find(&table->now, chain, node, &at)) {
        half_take(&table->now, nodes, at);
        return;
    }
    if (half_find(&table->old, chain, node, &at)) {
        table->old.entry[at].node = TABLE_MOVED;
        table->old.used--;
    }
}

uint32_t table_scan_next(const struct table *table, uint64_t chain, struct table_scan *scan) {
    for (;;) {
        const struct table_half *half = scan->in_old ? &table->old : &table->now;
        const struct table_entry *entry = &half->entry[scan->at];
        if (entry->node == 0) {
            if (scan->in_old || !table->old.entry)
                return NODE_NONE;
            scan->in_old = true;
            scan->at = chain & table->old.mask;
            continue;
        }
        scan->at = (scan->at + 1) & half->mask;
        if (entry->tag == scan->tag && entry->node != TABLE_MOVED)
            return entry->node - 1;
    }
}

uint64_t table_bytes(const struct table *table) {
    return (table->now.mask + 1 + (table->old.entry ? table->old.mask + 1 : 0)) * sizeof(struct table_entry);
}
