/* SPDX-License-Identifier: Apache-2.0 */
/* Every count is made again from what it counts. */
#include <stdlib.h>
#include <string.h>

#include "daemon/store/state.h"
#include "proto/cleanup.h"

struct tally {
    uint32_t children, pins, dense_references, recent_holders;
};

#define BROKEN(...) return oscar_fail(cause, OSCAR_ERR_CORRUPT, __VA_ARGS__)

static int verify_node(const struct store *store, uint32_t index, const struct tally *tally,
                       struct oscar_cause *cause) {
    const struct node *node = node_at(store, index);
    if (!store->models.object[node->model])
        BROKEN("page %u has no model", index);
    const struct store_model *model = model_at(store, node->model);
    if (node->state != NODE_DENSE && node->state != NODE_FINAL)
        BROKEN("page %u has state %u", index, node->state);
    if (node->children != tally->children || node->pins != tally->pins ||
        node->dense_references != tally->dense_references || node->recent_holders != tally->recent_holders)
        BROKEN("page %u counts %u children, %u pins, %u dense, %u recent; there are %u, %u, %u, %u", index,
               node->children, node->pins, node->dense_references, node->recent_holders, tally->children, tally->pins,
               tally->dense_references, tally->recent_holders);
    if ((node->state == NODE_DENSE && node->dense == SLOT_NONE) ||
        (node->state == NODE_FINAL && node->final == SLOT_NONE))
        BROKEN("page %u has no slot for its form", index);
    if (node->state == NODE_FINAL && node->dense != SLOT_NONE && node->dense_references == 0)
        BROKEN("page %u keeps a dense slot that nobody reads", index);
    if (node->recent_holders > node->dense_references)
        BROKEN("page %u has %u recent holders of %u dense references", index, node->recent_holders,
               node->dense_references);
    if ((node->flags & NODE_PACK_QUEUED) && (node->state != NODE_DENSE || (node->flags & NODE_PACKING)))
        BROKEN("page %u waits for packing in vain", index);
    /* What is dense, out of every window and not given up is on its way to its final form. */
    if (node->state == NODE_DENSE && node->recent_holders == 0 && node->pack_failures == 0 &&
        !(node->flags & (NODE_PACK_QUEUED | NODE_PACKING)))
        BROKEN("page %u is dense, in nobody's window and not queued", index);

    const struct node *parent = node->parent == NODE_NONE ? NULL : node_at(store, node->parent);
    if (parent ? parent->state == NODE_FREE || parent->depth + 1 != node->depth || parent->model != node->model
               : node->depth != 0)
        BROKEN("page %u at depth %u has a wrong parent", index, node->depth);
    if (parent && (node->flags & NODE_LINKED) && !(parent->flags & NODE_LINKED))
        BROKEN("page %u can be found and its parent cannot", index);
    const struct node_cold *cold = &store->meta.cold[index];
    if (node->chain != tree_chain(store, parent ? parent->chain : model->root_chain, cold->tokens))
        BROKEN("page %u has the wrong chain hash", index);
    struct oscar_digest digest;
    oscar_chain_digest(parent ? &store->meta.cold[node->parent].digest : &model->digest, cold->tokens, &digest);
    if (memcmp(&digest, &cold->digest, sizeof digest) != 0)
        BROKEN("page %u has the wrong digest", index);

    uint32_t found = tree_child(store, model, node->parent, node->chain, cold->tokens);
    if ((node->flags & NODE_LINKED) ? found != index : found == index)
        BROKEN("page %u is %s", index, found == index ? "found and should not be" : "not found or shadowed");
    bool idle = node->children == 0 && node->pins == 0 && node->dense_references == 0 && !(node->flags & NODE_PACKING);
    if (idle && !(node->flags & NODE_LINKED))
        BROKEN("page %u is unlinked, unused and not freed", index);
    if (idle != (node->heap_position != HEAP_NONE))
        BROKEN("page %u is %sidle and %sevictable", index, idle ? "" : "not ", idle ? "not " : "");
    return 0;
}

static int verify_heap(const struct store *store, struct oscar_cause *cause) {
    const struct heap *heap = &store->heap;
    for (uint32_t i = 0; i < heap->count; i++) {
        const struct node *node = node_at(store, heap->node[i]);
        if (node->heap_position != i || (i > 0 && node_at(store, heap->node[(i - 1) / 2])->last_used > node->last_used))
            BROKEN("the eviction order is broken at %u", i);
    }
    return 0;
}

static int verify_order(const struct store *store, struct oscar_cause *cause) {
    uint64_t count = 0, born = 0;
    uint32_t before = NODE_NONE;
    for (uint32_t node = store->oldest; node != NODE_NONE; before = node, node = node_at(store, node)->newer) {
        if (node_at(store, node)->older != before || store->meta.cold[node].born <= born || ++count > store->linked)
            BROKEN("the list of pages is broken at %u", node);
        born = store->meta.cold[node].born;
    }
    if (count != store->linked || before != store->newest)
        BROKEN("%llu pages are listed, %llu counted", (unsigned long long)count, (unsigned long long)store->linked);
    if ((uint64_t)store->table.now.used + store->table.old.used != count)
        BROKEN("%u + %u pages are in the table, %llu can be found", store->table.now.used, store->table.old.used,
               (unsigned long long)count);
    return 0;
}

/* Slots in use, by arena, as the pages and the sequences have them. */
struct slots {
    const struct arena *arena;
    uint16_t *reference;
    uint32_t count;
};

static struct slots *slots_of(struct slots *slots, const struct arena *arena) {
    while (slots->arena && slots->arena != arena)
        slots++;
    return slots;
}

static int slot_add(struct slots *all, const struct arena *arena, uint32_t slot, struct oscar_cause *cause) {
    struct slots *slots = slots_of(all, arena);
    if (!slots->arena || slot >= slots->count || !arena->chunk[slot / arena->shape.chunk_pages])
        BROKEN("slot %u of form %u does not exist", slot, arena->form);
    slots->reference[slot]++;
    return 0;
}

static int verify_seq(const struct seq *seq, struct tally *tally, struct slots *slots, struct oscar_cause *cause) {
    const struct store *store = seq->client->store;
    const struct arena *arena = &seq->model->arena[OSCAR_FORM_DENSE];
    if (seq->deepest != NODE_NONE)
        tally[seq->deepest].pins++;
    if (seq->deepest == NODE_NONE ? seq->path_pages != 0 : node_at(store, seq->deepest)->depth + 1U != seq->path_pages)
        BROKEN("sequence 0x%llx has a path of %u pages", (unsigned long long)seq->handle, seq->path_pages);
    if (seq->committed_tokens > seq->room_pages * OSCAR_PAGE_TOKENS || seq->path_pages > seq->room_pages)
        BROKEN("sequence 0x%llx has %u tokens in %u pages", (unsigned long long)seq->handle, seq->committed_tokens,
               seq->room_pages);
    int r = 0;
    uint32_t own = 0;
    for (uint32_t i = 0; i < seq->denses && r == 0; i++) {
        const struct dense_entry *entry = &seq->dense[i];
        if (i > 0 && seq->dense[i - 1].page >= entry->page)
            BROKEN("the page table of sequence 0x%llx is out of order", (unsigned long long)seq->handle);
        bool published = entry->kind == DENSE_PRIVATE || entry->kind == DENSE_SHARED;
        if (published != (entry->page < seq->path_pages) || (entry->recent && entry->page < seq->window_page) ||
            (entry->recent && entry->page == 0))
            BROKEN("page %u of sequence 0x%llx is out of place", entry->page, (unsigned long long)seq->handle);
        own += !published;
        if (entry->kind == DENSE_SHARED) {
            tally[entry->node].dense_references++;
            tally[entry->node].recent_holders += entry->recent;
            if (node_at(store, entry->node)->dense != entry->slot)
                BROKEN("page %u of sequence 0x%llx names another slot than the tree", entry->page,
                       (unsigned long long)seq->handle);
        } else {
            r = slot_add(slots, arena, entry->slot, cause);
        }
        if (published &&
            (node_at(store, entry->node)->state == NODE_FREE || node_at(store, entry->node)->depth != entry->page))
            BROKEN("page %u of sequence 0x%llx is another one in the tree", entry->page,
                   (unsigned long long)seq->handle);
    }
    if (own != seq->room_pages - seq->path_pages)
        BROKEN("sequence 0x%llx has %u of %u unpublished pages", (unsigned long long)seq->handle, own,
               seq->room_pages - seq->path_pages);
    for (uint32_t i = 0; i < seq->retireds && r == 0; i++) {
        if (i > 0 && seq->retired[i - 1].fence > seq->retired[i].fence)
            BROKEN("sequence 0x%llx retires slots out of order", (unsigned long long)seq->handle);
        if (seq->retired[i].node != NODE_NONE)
            tally[seq->retired[i].node].dense_references++;
        else
            r = slot_add(slots, arena, seq->retired[i].slot, cause);
    }
    for (uint32_t i = 0; i < seq->holds && r == 0; i++)
        r = slot_add(slots, arena, seq->hold[i], cause);
    return r;
}

static int verify_slots(const struct slots *slots, struct oscar_cause *cause) {
    for (; slots->arena; slots++)
        for (uint32_t slot = 0; slot < slots->count; slot++) {
            const struct chunk *chunk = slots->arena->chunk[slot / slots->arena->shape.chunk_pages];
            unsigned counted =
                chunk ? chunk->reference[slot % slots->arena->shape.chunk_pages] & (unsigned)~CHUNK_QUARANTINED : 0;
            if (counted != slots->reference[slot])
                BROKEN("slot %u of form %u counts %u references, there are %u", slot, slots->arena->form, counted,
                       slots->reference[slot]);
        }
    return 0;
}

static void slots_free(struct slots **slots) {
    for (uint32_t i = 0; *slots && (*slots)[i].arena; i++)
        free((*slots)[i].reference);
    free(*slots);
}

static int slots_make(const struct store *store, struct slots **ret) {
    uint32_t arenas = 0;
    const struct arena *arena;
    LIST_FOREACH(arena, &store->memory.arenas, in_memory) { arenas++; }
    _cleanup_(slots_free) struct slots *slots = calloc(arenas + 1, sizeof *slots);
    if (!slots)
        return OSCAR_ERR_NO_MEMORY;
    arenas = 0;
    LIST_FOREACH(arena, &store->memory.arenas, in_memory) {
        struct slots *one = &slots[arenas++];
        one->count = arena->capacity * arena->shape.chunk_pages;
        one->reference = calloc(one->count + 1, sizeof *one->reference);
        if (!one->reference)
            return OSCAR_ERR_NO_MEMORY;
        one->arena = arena;
    }
    *ret = TAKE_PTR(slots);
    return 0;
}

/* Slots that a job fills belong to nobody else yet. */
static int verify_packing(const struct store *store, struct slots *slots, struct oscar_cause *cause) {
    uint32_t jobs = 0;
    const struct pack_job *pack;
    LIST_FOREACH(pack, &store->packing, in_store) {
        jobs++;
        for (uint32_t i = 0; i < PACK_BATCH; i++) {
            if (i >= pack->pages && i < PACK_BATCH - pack->sinks)
                continue;
            const struct node *node = node_at(store, pack->node[i]);
            if (node->state != NODE_DENSE || !(node->flags & NODE_PACKING))
                BROKEN("page %u is being packed and does not know", pack->node[i]);
            int r = slot_add(slots, &pack->model->arena[node_final_form(node)], pack->slot[i], cause);
            if (r < 0)
                return r;
        }
    }
    if (jobs != store->pack_running)
        BROKEN("%u pack jobs run, %u are counted", jobs, store->pack_running);
    return 0;
}

static int verify_nodes(const struct store *store, struct tally *tally, struct slots *slots,
                        struct oscar_cause *cause) {
    uint64_t live = 0, queued = 0, form_pages[OSCAR_FORMS] = {0};
    uint32_t model_nodes[META_MAX_MODELS] = {0};
    for (uint32_t i = 0; i < store->meta.header->nodes; i++)
        if (node_at(store, i)->state != NODE_FREE && node_at(store, i)->parent != NODE_NONE)
            tally[node_at(store, i)->parent].children++;
    for (uint32_t i = 0; i < store->meta.header->nodes; i++) {
        const struct node *node = node_at(store, i);
        if (node->state == NODE_FREE)
            continue;
        int r = verify_node(store, i, &tally[i], cause);
        const struct store_model *model = model_at(store, node->model);
        if (r == 0 && node->dense != SLOT_NONE)
            r = slot_add(slots, &model->arena[OSCAR_FORM_DENSE], node->dense, cause);
        if (r == 0 && node->state == NODE_FINAL)
            r = slot_add(slots, &model->arena[node_final_form(node)], node->final, cause);
        if (r < 0)
            return r;
        live++;
        queued += (node->flags & NODE_PACK_QUEUED) != 0;
        form_pages[node->state == NODE_FINAL ? node_final_form(node) : OSCAR_FORM_DENSE]++;
        model_nodes[node->model]++;
    }
    if (live != store->meta.nodes_live || queued != store->pack_waiting ||
        memcmp(form_pages, store->form_pages, sizeof form_pages) != 0)
        BROKEN("%llu pages, %llu to be packed, or their forms are miscounted", (unsigned long long)live,
               (unsigned long long)queued);
    for (uint32_t i = 0; i < store->models.capacity; i++)
        if (store->models.object[i] && model_at(store, i)->nodes != model_nodes[i])
            BROKEN("model %u has %u pages and counts %u", i, model_nodes[i], model_at(store, i)->nodes);
    return 0;
}

static int verify_clients(const struct store *store, struct tally *tally, struct slots *slots,
                          struct oscar_cause *cause) {
    const struct store_client *client;
    LIST_FOREACH(client, &store->clients, in_store) {
        uint32_t open = 0, leases = 0;
        const struct seq *seq;
        LIST_FOREACH(seq, &client->seqs, in_client) {
            int r = verify_seq(seq, tally, slots, cause);
            if (r < 0)
                return r;
            open += !seq->closing;
        }
        const struct lease *lease;
        LIST_FOREACH(lease, &client->leases, in_client) {
            leases++;
            if (lease->node != NODE_NONE)
                tally[lease->node].pins++;
        }
        if (open != client->open_seqs || leases != client->open_leases)
            BROKEN("client %u has %u sequences and %u leases and counts %u and %u", client->number, open, leases,
                   client->open_seqs, client->open_leases);
    }
    return 0;
}

int store_verify(const struct store *store, struct oscar_cause *cause) {
    int r = memory_verify(&store->memory, cause);
    if (r == 0)
        r = verify_heap(store, cause);
    if (r == 0)
        r = verify_order(store, cause);
    if (r < 0)
        return r;
    _cleanup_free_ struct tally *tally = calloc(store->meta.header->nodes + 1, sizeof *tally);
    _cleanup_(slots_free) struct slots *slots = NULL;
    if (!tally || slots_make(store, &slots) < 0)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the verification");
    r = verify_clients(store, tally, slots, cause);
    if (r == 0)
        r = verify_packing(store, slots, cause);
    if (r == 0)
        r = verify_nodes(store, tally, slots, cause);
    if (r == 0)
        r = verify_slots(slots, cause);
    return r;
}
