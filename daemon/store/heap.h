/* SPDX-License-Identifier: Apache-2.0 */
/* The evictable pages, the one unused for longest first: a binary heap of node indexes; each node knows its position. */
#ifndef OSCAR_DAEMON_STORE_HEAP_H
#define OSCAR_DAEMON_STORE_HEAP_H

#include "daemon/store/meta.h"

#define HEAP_NONE UINT32_MAX

struct heap {
    uint32_t *node;
    uint32_t count, capacity;
};

/* Makes room for `nodes` nodes in all, so that insertions cannot fail. */
int heap_reserve(struct heap *heap, uint32_t nodes, struct oscar_cause *cause);
void heap_close(struct heap *heap);
void heap_insert(struct heap *heap, struct node *nodes, uint32_t node);
void heap_remove(struct heap *heap, struct node *nodes, uint32_t node);
/* The node's last_used has changed. */
void heap_update(struct heap *heap, struct node *nodes, uint32_t node);

#endif
