/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/store/heap.h"

#include <stdlib.h>

int heap_reserve(struct heap *heap, uint32_t nodes, struct oscar_cause *cause) {
    if (nodes <= heap->capacity)
        return 0;
    uint32_t capacity = heap->capacity ? heap->capacity * 2 : 1024;
    if (capacity < nodes)
        capacity = nodes;
    uint32_t *more = realloc(heap->node, (size_t)capacity * sizeof *more);
    if (!more)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the eviction order");
    heap->node = more;
    heap->capacity = capacity;
    return 0;
}

void heap_close(struct heap *heap) {
    free(heap->node);
    *heap = (struct heap){0};
}

static void put(struct heap *heap, struct node *nodes, uint32_t at, uint32_t node) {
    heap->node[at] = node;
    nodes[node].heap_position = at;
}

static void rise(struct heap *heap, struct node *nodes, uint32_t at, uint32_t node) {
    while (at > 0) {
        uint32_t above = heap->node[(at - 1) / 2];
        if (nodes[above].last_used <= nodes[node].last_used)
            break;
        put(heap, nodes, at, above);
        at = (at - 1) / 2;
    }
    put(heap, nodes, at, node);
}

static void sink(struct heap *heap, struct node *nodes, uint32_t at, uint32_t node) {
    for (uint32_t below; (below = 2 * at + 1) < heap->count; at = below) {
        if (below + 1 < heap->count && nodes[heap->node[below + 1]].last_used < nodes[heap->node[below]].last_used)
            below++;
        if (nodes[heap->node[below]].last_used >= nodes[node].last_used)
            break;
        put(heap, nodes, at, heap->node[below]);
    }
    put(heap, nodes, at, node);
}

void heap_insert(struct heap *heap, struct node *nodes, uint32_t node) { rise(heap, nodes, heap->count++, node); }

void heap_remove(struct heap *heap, struct node *nodes, uint32_t node) {
    uint32_t at = nodes[node].heap_position;
    uint32_t last = heap->node[--heap->count];
    nodes[node].heap_position = HEAP_NONE;
    if (last == node)
        return;
    put(heap, nodes, at, last);
    heap_update(heap, nodes, last);
}

void heap_update(struct heap *heap, struct node *nodes, uint32_t node) {
    uint32_t at = nodes[node].heap_position;
    if (at > 0 && nodes[heap->node[(at - 1) / 2]].last_used > nodes[node].last_used)
        rise(heap, nodes, at, node);
    else
        sink(heap, nodes, at, node);
}
