/* SPDX-License-Identifier: Apache-2.0 */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/store/state.h"
#include "proto/geometry.h"

#define JOBS_A_THREAD 2U
#define MAX_PACK_FAILURES 3U

static void pack_run(struct pool_job *job, void *stream) {
    struct pack_job *pack = (struct pack_job *)job;
    const struct oscar_device_ops *ops = pack->store->options.ops;
    if (pack->pages > 0) {
        int r = ops->pack(stream, &pack->model->identity.geometry, pack->model->calibration, pack->item, pack->pages);
        for (uint32_t i = 0; i < pack->pages && r < 0; i++)
            pack->status[i] = r;
    }
    for (uint32_t i = PACK_BATCH - pack->sinks; i < PACK_BATCH; i++)
        pack->status[i] = ops->copy(stream, pack->item[i].packed, pack->item[i].dense, pack->dense_bytes);
}

static bool queue_reserve(struct pack_queue *queue) {
    assert(queue->count <= queue->capacity);
    if (queue->count < queue->capacity)
        return true;
    uint32_t capacity = queue->capacity ? queue->capacity * 2 : 256;
    uint32_t *node = malloc(capacity * sizeof *node);
    if (!node)
        return false;
    for (uint32_t i = 0; i < queue->count; i++)
        node[i] = queue->node[(queue->first + i) % queue->capacity];
    free(queue->node);
    *queue = (struct pack_queue){.node = node, .count = queue->count, .capacity = capacity};
    return true;
}

void pack_want(struct store *store, uint32_t index) {
    struct node *node = node_at(store, index);
    struct pack_queue *queue = &store->pack_queue;
    if (node->state != NODE_DENSE || node->recent_holders > 0 || node->pack_failures >= MAX_PACK_FAILURES ||
        (node->flags & (NODE_PACK_QUEUED | NODE_PACKING)))
        return;
    if (!queue_reserve(queue))
        return; /* it stays dense: served as before, only larger */
    queue->node[(queue->first + queue->count++) % queue->capacity] = index;
    node->flags |= NODE_PACK_QUEUED;
    store->pack_waiting++;
}

/* Next page to pack, no longer in the queue; NODE_NONE. */
static uint32_t queue_shift(struct store *store) {
    struct pack_queue *queue = &store->pack_queue;
    while (queue->count > 0) {
        uint32_t index = queue->node[queue->first];
        struct node *node = node_at(store, index);
        queue->first = (queue->first + 1) % queue->capacity;
        queue->count--;
        /* Freed meanwhile, and perhaps used for another page. */
        if (node->state == NODE_FREE || !(node->flags & NODE_PACK_QUEUED))
            continue;
        node->flags &= (uint8_t)~NODE_PACK_QUEUED;
        store->pack_waiting--;
        /* Somebody holds it as recent again: it comes back when they have left it. */
        if (node->recent_holders > 0)
            continue;
        return index;
    }
    return NODE_NONE;
}

static void queue_unshift(struct store *store, uint32_t index) {
    struct pack_queue *queue = &store->pack_queue;
    queue->first = (queue->first + queue->capacity - 1) % queue->capacity;
    queue->node[queue->first] = index;
    queue->count++;
    node_at(store, index)->flags |= NODE_PACK_QUEUED;
    store->pack_waiting++;
}

/* Gives the page a slot for its final form and a place in the job: 0, or as space_take. */
static int job_add(struct pack_job *pack, uint32_t index) {
    struct store *store = pack->store;
    struct node *node = node_at(store, index);
    enum oscar_form form = node_final_form(node);
    uint32_t slot;
    /* It must not be evicted to make room for itself, nor read while it is. */
    node->flags |= NODE_PACKING;
    tree_settle(store, index);
    int r = space_take(store, &pack->model->arena[form], &pack->model->shared[form], 1, &slot, NULL);
    if (r != 0) {
        node->flags &= (uint8_t)~NODE_PACKING;
        tree_settle(store, index);
        return r;
    }
    uint32_t at = form == OSCAR_FORM_SINK ? PACK_BATCH - ++pack->sinks : pack->pages++;
    pack->node[at] = index;
    pack->slot[at] = slot;
    pack->item[at] = (struct oscar_pack_item){
        .dense = arena_address(&pack->model->arena[OSCAR_FORM_DENSE], node->dense),
        .packed = arena_address(&pack->model->arena[form], slot),
        .position = (uint64_t)node->depth * OSCAR_PAGE_TOKENS,
        .status = &pack->status[at],
    };
    return 0;
}

bool pack_possible(const struct store *store) {
    return !store->pack_starved && !store->pack_parked && store->pack_waiting > 0 &&
           store->pack_running < store->options.pack_threads * JOBS_A_THREAD;
}

void pack_dispatch(struct store *store) {
    while (pack_possible(store)) {
        struct pack_job *pack = calloc(1, sizeof *pack);
        if (!pack)
            return;
        pack->job.run = pack_run;
        pack->store = store;
        while (pack->pages + pack->sinks < PACK_BATCH && !store->pack_starved && !store->pack_parked) {
            uint32_t index = queue_shift(store);
            if (index == NODE_NONE)
                break;
            struct store_model *model = model_at(store, node_at(store, index)->model);
            if (!pack->model)
                pack->model = model;
            int r = OSCAR_ERR_BUSY; /* another model's pages make a job of their own */
            if (pack->model == model) {
                r = job_add(pack, index);
                store->pack_parked = r == OSCAR_PARKED;
                store->pack_starved = r < 0;
            }
            if (r == 0)
                continue;
            /* Evictions that were tried in vain may have freed it: it was unlinked by a flush and had no other reader. */
            if (node_at(store, index)->state == NODE_DENSE)
                queue_unshift(store, index);
            if (pack->model != model)
                break;
        }
        if (pack->pages + pack->sinks == 0) {
            free(pack);
            return;
        }
        pack->dense_bytes = oscar_dense_page_bytes(&pack->model->identity.geometry);
        store->pack_running++;
        LIST_INSERT_HEAD(&store->packing, pack, in_store);
        pool_submit(store->pool, &pack->job, POOL_ORDINARY);
    }
}

static void page_finished(struct pack_job *pack, uint32_t i) {
    struct store *store = pack->store;
    struct node *node = node_at(store, pack->node[i]);
    node->flags &= (uint8_t)~NODE_PACKING;
    if (pack->status[i] < 0) {
        store_note_failure(store, pack->status[i], "packing pages", NULL);
        store->count.pack_failures++;
        node->pack_failures++;
        space_drop(store, &pack->model->arena[node_final_form(node)], pack->slot[i]);
        pack_want(store, pack->node[i]);
    } else {
        node->final = pack->slot[i];
        meta_node_state(&store->meta, pack->node[i], NODE_FINAL);
        store->count.packs++;
        store->form_pages[OSCAR_FORM_DENSE]--;
        store->form_pages[node_final_form(node)]++;
        if (node->flags & NODE_LINKED)
            event_page(store, OSCAR_EVENT_COMPRESSED, pack->node[i]);
    }
    tree_settle(store, pack->node[i]);
}

void pack_finished(struct pool_job *job) {
    struct pack_job *pack = (struct pack_job *)job;
    for (uint32_t i = 0; i < pack->pages; i++)
        page_finished(pack, i);
    for (uint32_t i = PACK_BATCH - pack->sinks; i < PACK_BATCH; i++)
        page_finished(pack, i);
    pack->store->pack_running--;
    LIST_REMOVE(pack, in_store);
    pack->model->has_new_forms = true;
    free(pack);
}
