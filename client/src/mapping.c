/* SPDX-License-Identifier: Apache-2.0 */
#include "client/src/mapping.h"

#include <inttypes.h>
#include <stdlib.h>
#include <unistd.h>

#include "proto/cleanup.h"

#define MAX_ARENA_BYTES (UINT64_C(1) << 45) /* of address space */
#define MAX_ARENA_CHUNKS (UINT64_C(1) << 22)

static const char *const form_names[OSCAR_FORMS] = {"sink", "dense", "packed"};

void oscar_mappings_init(struct oscar_mappings *mappings) { pthread_mutex_init(&mappings->lock, NULL); }

void oscar_mappings_destroy(struct oscar_mappings *mappings) { pthread_mutex_destroy(&mappings->lock); }

/* --- chunks ------------------------------------------------------------------------------------------------------- */

struct oscar_chunk_slot *oscar_mapping_slot(const struct oscar_mapping *mapping, oscar_page_ref ref) {
    unsigned form = oscar_page_ref_form(ref);
    if (form >= OSCAR_FORMS || oscar_page_ref_id(ref) >= mapping->arenas[form].max_pages)
        return NULL;
    const struct oscar_arena *arena = &mapping->arenas[form];
    return &arena->chunk[oscar_page_ref_id(ref) / arena->chunk_pages];
}

/* What a notice says about a chunk must fit the arenas that the model's reply has described. */
static int check_place(const struct oscar_mapping *mapping, const struct oscar_chunk_info *info,
                       struct oscar_cause *cause) {
    if ((unsigned)info->form >= OSCAR_FORMS)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "chunk of form %d", (int)info->form);
    if (info->index >= mapping->arenas[info->form].chunks || info->generation == 0)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "%s chunk %" PRIu32 " of %" PRIu32 ", generation %" PRIu64,
                          form_names[info->form], info->index, mapping->arenas[info->form].chunks, info->generation);
    return 0;
}

void oscar_mapping_view(const struct oscar_mapping *mapping, struct oscar_arena_view ret_arenas[OSCAR_FORMS]) {
    for (unsigned form = 0; form < OSCAR_FORMS; form++) {
        struct oscar_range *range = mapping->arenas[form].range;
        ret_arenas[form] = (struct oscar_arena_view){.base = mapping->attachment->ops->range_address(range),
                                                     .stride = mapping->arenas[form].page_bytes,
                                                     .range = range};
    }
}

/* The map_awaited behind it maps it, together with others; until then its descriptor stays open. */
static int await_chunk(struct oscar_mapping *mapping, const struct oscar_chunk_info *info, int fd,
                       struct oscar_cause *cause) {
    int r = check_place(mapping, info, cause);
    if (r < 0)
        return r;
    struct oscar_arena *arena = &mapping->arenas[info->form];
    struct oscar_chunk_slot *slot = &arena->chunk[info->index];
    if (info->bytes != arena->chunk_bytes || (info->writable && info->form != OSCAR_FORM_DENSE))
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "%s chunk %" PRIu32 ": %" PRIu64 " bytes for %" PRIu64 "%s",
                          form_names[info->form], info->index, info->bytes, arena->chunk_bytes,
                          info->writable ? ", writable" : "");
    if (info->generation < slot->generation)
        return 0; /* overtaken by a newer one */
    if (slot->references > 0 && (info->generation != slot->generation || info->writable != slot->writable))
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL,
                          "%s chunk %" PRIu32 " is replaced under %" PRIu32 " page table entries",
                          form_names[info->form], info->index, slot->references);
    if (slot->mapped && info->generation == slot->generation && info->writable == slot->writable)
        return 0; /* it is there, and work may be reading it */
    slot->generation = info->generation;
    slot->writable = info->writable;
    slot->fd = fd;
    if (arena->awaited == 0 || info->index < arena->first_awaited)
        arena->first_awaited = info->index;
    if (arena->awaited == 0 || info->index > arena->last_awaited)
        arena->last_awaited = info->index;
    arena->awaited += !slot->awaited;
    slot->awaited = true;
    return 0;
}

static struct oscar_range_chunk place_of(const struct oscar_arena *arena, uint32_t index) {
    return (struct oscar_range_chunk){.offset = index * arena->chunk_bytes,
                                      .bytes = arena->chunk_bytes,
                                      .fd = arena->chunk[index].fd,
                                      .writable = arena->chunk[index].writable};
}

static int map_together(const struct oscar_arena *arena, const struct oscar_device_ops *ops,
                        struct oscar_cause *cause) {
    _cleanup_free_ struct oscar_range_chunk *chunk = calloc(arena->awaited, sizeof(*chunk));
    if (chunk == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the places of %" PRIu32 " chunks", arena->awaited);
    uint32_t chunks = 0;
    for (uint32_t i = arena->first_awaited; i <= arena->last_awaited; i++)
        if (arena->chunk[i].awaited)
            chunk[chunks++] = place_of(arena, i);
    return ops->range_map(arena->range, chunk, chunks, cause);
}

/* A chunk that cannot be mapped fails the sequence that is sent to it, neither the connection nor the other chunks: where
 * they cannot be mapped together, each is tried alone. */
static void map_arena(struct oscar_arena *arena, const struct oscar_device_ops *ops, struct oscar_cause *ret_failure) {
    if (arena->awaited == 0)
        return;
    int together = map_together(arena, ops, ret_failure);
    for (uint32_t i = arena->first_awaited; i <= arena->last_awaited; i++) {
        struct oscar_chunk_slot *slot = &arena->chunk[i];
        if (!slot->awaited)
            continue;
        struct oscar_range_chunk place = place_of(arena, i);
        slot->failure = together < 0 ? ops->range_map(arena->range, &place, 1, ret_failure) : 0;
        slot->mapped = slot->failure == 0;
        slot->awaited = false;
    }
    arena->awaited = 0;
}

static void map_awaited(struct oscar_mapping *mapping) {
    for (unsigned form = 0; form < OSCAR_FORMS; form++)
        map_arena(&mapping->arenas[form], mapping->attachment->ops, &mapping->failure);
}

static int unmap_chunk(const struct oscar_mapping *mapping, const struct oscar_chunk_info *info,
                       struct oscar_cause *cause) {
    int r = check_place(mapping, info, cause);
    if (r < 0)
        return r;
    const struct oscar_arena *arena = &mapping->arenas[info->form];
    struct oscar_chunk_slot *slot = &arena->chunk[info->index];
    if (info->generation != slot->generation || !slot->mapped)
        return 0; /* speaks of an older chunk */
    if (slot->references > 0)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL,
                          "%s chunk %" PRIu32 " is taken from under %" PRIu32 " page table entries",
                          form_names[info->form], info->index, slot->references);
    slot->mapped = slot->writable = false;
    /* Where that fails, the memory stays mapped and nobody looks at it. */
    (void)mapping->attachment->ops->range_unmap(arena->range, info->index * arena->chunk_bytes, arena->chunk_bytes);
    return 0;
}

/* --- notices ------------------------------------------------------------------------------------------------------ */

static struct oscar_mapping *find(const struct oscar_mappings *mappings, uint64_t model) {
    struct oscar_mapping *mapping = mappings->first;
    while (mapping != NULL && mapping->model != model)
        mapping = mapping->next;
    return mapping;
}

int oscar_mappings_notice(void *arg, const struct oscar_notice *notice, struct oscar_record *record,
                          struct oscar_cause *cause) {
    struct oscar_mappings *mappings = arg;
    bool gone = notice->kind == OSCAR_NOTICE_CHUNKS_GONE;
    if (record->fds != (gone ? 0U : notice->chunks)) {
        unsigned fds = record->fds;
        oscar_record_close_fds(record);
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "%u descriptors with a notice of %" PRIu32 " chunks", fds,
                          notice->chunks);
    }
    int r = 0;
    pthread_mutex_lock(&mappings->lock);
    for (uint32_t i = 0; i < notice->chunks && r == 0; i++) {
        const struct oscar_chunk_info *info = &notice->chunk[i];
        struct oscar_mapping *mapping = find(mappings, info->model);
        if (mapping != NULL)
            r = gone ? unmap_chunk(mapping, info, cause) : await_chunk(mapping, info, record->fd[i], cause);
    }
    for (struct oscar_mapping *mapping = mappings->first; mapping != NULL; mapping = mapping->next)
        map_awaited(mapping);
    pthread_mutex_unlock(&mappings->lock);
    oscar_record_close_fds(record);
    return r;
}

/* --- one model ---------------------------------------------------------------------------------------------------- */

static uint64_t form_bytes(const struct oscar_geometry *geometry, unsigned form) {
    return form == OSCAR_FORM_PACKED ? oscar_packed_page_bytes(geometry) : oscar_dense_page_bytes(geometry);
}

static int open_arena(const struct oscar_attachment *attachment, enum oscar_form form,
                      const struct oscar_geometry *geometry, const struct oscar_arena_info *info,
                      struct oscar_arena *ret, struct oscar_cause *cause) {
    uint64_t page_bytes = form_bytes(geometry, form);
    if (info->page_bytes < page_bytes || info->page_bytes % 16 != 0 || info->page_bytes > OSCAR_MAX_PAGE_BYTES * 2 ||
        info->chunk_pages == 0 || info->max_pages == 0 || info->max_pages > OSCAR_PAGE_ID_MASK)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL,
                          "%s arena: pages of %" PRIu64 " bytes where %" PRIu64 " are needed, %" PRIu32
                          " a chunk, %" PRIu64 " in all",
                          form_names[form], info->page_bytes, page_bytes, info->chunk_pages, info->max_pages);
    uint64_t chunk_bytes = info->page_bytes * info->chunk_pages; /* both fit 32 bits, about */
    uint64_t chunks = (info->max_pages - 1) / info->chunk_pages + 1;
    uint64_t granularity = attachment->ops->granularity(attachment->device);
    if (chunk_bytes % granularity != 0 || chunks > MAX_ARENA_CHUNKS || chunk_bytes > MAX_ARENA_BYTES / chunks)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL,
                          "%s arena: %" PRIu64 " chunks of %" PRIu64 " bytes, not a multiple of %" PRIu64
                          " or too many",
                          form_names[form], chunks, chunk_bytes, granularity);
    struct oscar_chunk_slot *chunk = calloc(chunks, sizeof(*chunk));
    if (chunk == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "%s arena: no memory for %" PRIu64 " chunks", form_names[form],
                          chunks);
    struct oscar_range *range;
    int r = attachment->ops->range_reserve(attachment->device, chunks * chunk_bytes, &range, cause);
    if (r < 0) {
        free(chunk);
        return r;
    }
    *ret = (struct oscar_arena){.range = range,
                                .page_bytes = info->page_bytes,
                                .chunk_bytes = chunk_bytes,
                                .max_pages = info->max_pages,
                                .chunk_pages = info->chunk_pages,
                                .chunks = (uint32_t)chunks,
                                .chunk = chunk};
    return 0;
}

struct oscar_mapping *oscar_mapping_ref(struct oscar_mapping *mapping) {
    atomic_fetch_add_explicit(&mapping->references, 1, memory_order_relaxed);
    return mapping;
}

void oscar_mapping_unref(struct oscar_mapping *mapping) {
    if (mapping == NULL || atomic_fetch_sub_explicit(&mapping->references, 1, memory_order_acq_rel) != 1)
        return;
    for (unsigned form = 0; form < OSCAR_FORMS; form++)
        if (mapping->arenas[form].range != NULL) {
            mapping->attachment->ops->range_free(mapping->arenas[form].range);
            free(mapping->arenas[form].chunk);
        }
    oscar_attachment_unref(mapping->attachment);
    free(mapping);
}

static void cleanup_mapping(struct oscar_mapping **mapping) { oscar_mapping_unref(*mapping); }

static int make_mapping(struct oscar_attachment *attachment, const struct oscar_geometry *geometry,
                        const struct oscar_reply *reply, struct oscar_mapping **ret, struct oscar_cause *cause) {
    _cleanup_(cleanup_mapping) struct oscar_mapping *mapping = calloc(1, sizeof(*mapping));
    if (mapping == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a model");
    atomic_init(&mapping->references, 1);
    mapping->attachment = oscar_attachment_ref(attachment);
    mapping->model = reply->model_open.model;
    for (unsigned form = 0; form < OSCAR_FORMS; form++) {
        int r = open_arena(attachment, (enum oscar_form)form, geometry, &reply->model_open.arenas[form],
                           &mapping->arenas[form], cause);
        if (r < 0)
            return r;
    }
    *ret = TAKE_PTR(mapping);
    return 0;
}

/* Whether a model that is open already is the one of this reply. */
static bool has_arenas(const struct oscar_mapping *mapping, const struct oscar_geometry *geometry,
                       const struct oscar_reply *reply) {
    for (unsigned form = 0; form < OSCAR_FORMS; form++) {
        const struct oscar_arena *arena = &mapping->arenas[form];
        const struct oscar_arena_info *info = &reply->model_open.arenas[form];
        if (info->page_bytes != arena->page_bytes || info->chunk_pages != arena->chunk_pages ||
            info->max_pages != arena->max_pages || arena->page_bytes < form_bytes(geometry, form))
            return false;
    }
    return true;
}

int oscar_mapping_open(struct oscar_mappings *mappings, struct oscar_attachment *attachment,
                       const struct oscar_geometry *geometry, const struct oscar_reply *reply,
                       struct oscar_mapping **ret, struct oscar_cause *cause) {
    /* Only the receiver comes here, so nobody else adds a mapping between the look and the insertion. */
    pthread_mutex_lock(&mappings->lock);
    struct oscar_mapping *known = find(mappings, reply->model_open.model);
    bool same = known != NULL && has_arenas(known, geometry, reply);
    if (same) {
        known->opens++;
        *ret = oscar_mapping_ref(known);
    }
    pthread_mutex_unlock(&mappings->lock);
    if (known != NULL)
        return same ? 0 : oscar_fail(cause, OSCAR_ERR_PROTOCOL, "the model's handle belongs to another model");

    _cleanup_(cleanup_mapping) struct oscar_mapping *mapping = NULL;
    int r = make_mapping(attachment, geometry, reply, &mapping, cause);
    if (r < 0)
        return r;
    pthread_mutex_lock(&mappings->lock);
    mapping->opens = 1;
    mapping->next = mappings->first;
    mappings->first = mapping;
    pthread_mutex_unlock(&mappings->lock);
    *ret = TAKE_PTR(mapping);
    return 0;
}

void oscar_mapping_close(struct oscar_mappings *mappings, struct oscar_mapping *mapping) {
    pthread_mutex_lock(&mappings->lock);
    if (--mapping->opens == 0) {
        struct oscar_mapping **link = &mappings->first;
        while (*link != mapping)
            link = &(*link)->next;
        *link = mapping->next;
    }
    pthread_mutex_unlock(&mappings->lock);
    oscar_mapping_unref(mapping);
}
