/* SPDX-License-Identifier: Apache-2.0 */
#include "client/src/pages.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "client/src/detail.h"
#include "proto/cleanup.h"

#define MIN_CAPACITY 16U

static void table_free(void *thing) {
    struct oscar_table *table = thing;
    oscar_model_memory_unref(table->memory);
    free(table);
}

static struct oscar_table *table_new(struct oscar_model_memory *memory, uint32_t capacity) {
    struct oscar_table *table = calloc(1, sizeof(*table) + (size_t)capacity * sizeof(table->entry[0]));
    if (table == NULL)
        return NULL;
    table->memory = oscar_model_memory_ref(memory);
    table->capacity = capacity;
    return table;
}

int oscar_pages_open(struct oscar_pages *pages, const struct oscar_model *model) {
    *pages = (struct oscar_pages){.mappings = &model->client->mappings, .attachment = model->client->attachment};
    pages->retired = malloc(sizeof(*pages->retired));
    pages->table = table_new(model->memory, MIN_CAPACITY);
    if (pages->retired != NULL && pages->table != NULL)
        return 0;
    free(pages->retired);
    if (pages->table != NULL)
        table_free(pages->table);
    *pages = (struct oscar_pages){0};
    return oscar_fail(oscar_detail(), OSCAR_ERR_NO_MEMORY, "no memory for a page table");
}

/* With the lock of the mappings. */
static void count_reference(const struct oscar_pages *pages, oscar_page_ref ref, int difference) {
    if (ref != 0)
        oscar_mapping_slot(pages->table->memory->mapping, ref)->references += (uint32_t)difference;
}

void oscar_pages_close(struct oscar_pages *pages, struct oscar_stream *stream) {
    if (pages->table == NULL)
        return;
    pthread_mutex_lock(&pages->mappings->lock);
    for (uint32_t i = 0; i < pages->table->capacity; i++)
        count_reference(pages, pages->table->entry[i], -1);
    pthread_mutex_unlock(&pages->mappings->lock);
    oscar_retire(pages->attachment, stream, pages->retired, table_free, pages->table);
    *pages = (struct oscar_pages){0};
}

/* --- updates ------------------------------------------------------------------------------------------------------ */

/* The forms in which a page may stand below the tail: the sink is page 0 and nothing else. */
static bool form_fits(uint32_t page, unsigned form) {
    return form == OSCAR_FORM_DENSE || form == (page == 0 ? (unsigned)OSCAR_FORM_SINK : (unsigned)OSCAR_FORM_PACKED);
}

/* With the lock of the mappings. */
static int check_update(const struct oscar_pages *pages, const struct oscar_page_update *update, uint32_t tail,
                        uint32_t limit) {
    struct oscar_cause *detail = oscar_detail();
    oscar_page_ref ref = update->ref;
    if (update->page >= limit || update->reserved != 0)
        return oscar_fail(detail, OSCAR_ERR_PROTOCOL, "update of page %" PRIu32 " of %" PRIu32, update->page, limit);
    if (ref == 0)
        return update->page >= tail
                   ? 0
                   : oscar_fail(detail, OSCAR_ERR_PROTOCOL, "page %" PRIu32 " is taken away below the tail at %" PRIu32,
                                update->page, tail);
    unsigned form = oscar_page_ref_form(ref);
    const struct oscar_chunk_slot *slot = oscar_mapping_slot(pages->table->memory->mapping, ref);
    if (slot == NULL || ref != oscar_page_ref_make((enum oscar_form)form, oscar_page_ref_id(ref)))
        return oscar_fail(detail, OSCAR_ERR_PROTOCOL, "page %" PRIu32 ": reference %#" PRIx64 " names no page",
                          update->page, ref);
    if (slot->failure < 0)
        return oscar_fail(detail, slot->failure == OSCAR_ERR_INVALID ? OSCAR_ERR_PROTOCOL : slot->failure,
                          "page %" PRIu32 ": its chunk could not be mapped: %s", update->page,
                          pages->table->memory->mapping->failure.text);
    if (!slot->mapped)
        return oscar_fail(detail, OSCAR_ERR_PROTOCOL,
                          "page %" PRIu32 ": reference %#" PRIx64 " lies in no mapped chunk", update->page, ref);
    if (update->page < tail ? !form_fits(update->page, form) : form != OSCAR_FORM_DENSE || !slot->writable)
        return oscar_fail(detail, OSCAR_ERR_PROTOCOL, "page %" PRIu32 ": form %u%s does not fit the tail at %" PRIu32,
                          update->page, form, slot->writable ? ", writable," : "", tail);
    return 0;
}

/* With the lock of the mappings. */
static int check_updates(const struct oscar_pages *pages, const struct oscar_page_update *update, uint32_t updates,
                         uint32_t tail, uint32_t limit) {
    for (uint32_t i = 0; i < updates; i++) {
        int r = check_update(pages, &update[i], tail, limit);
        if (r < 0)
            return r;
    }
    return 0;
}

/* Whether the table can take the updates as it is; and how many entries it must have. */
static bool fits_in_place(const struct oscar_pages *pages, const struct oscar_page_update *update, uint32_t updates,
                          const struct oscar_stream *stream, uint32_t *ret_capacity) {
    bool lags = oscar_stream_lags(stream), in_place = true;
    uint32_t capacity = pages->table->capacity;
    for (uint32_t i = 0; i < updates; i++) {
        if (update[i].page >= capacity)
            capacity = update[i].page + 1;
        else if (lags && update[i].page < pages->table->capacity && pages->table->entry[update[i].page] != 0)
            in_place = false;
    }
    if (capacity > pages->table->capacity) {
        in_place = false;
        capacity =
            capacity < pages->table->capacity * 2 ? pages->table->capacity * 2 : capacity; /* it is going to grow on */
    }
    *ret_capacity = capacity;
    return in_place;
}

/* With the lock of the mappings. Cannot fail. */
static void apply(struct oscar_pages *pages, const struct oscar_page_update *update, uint32_t updates) {
    oscar_page_ref *entry = pages->table->entry;
    for (uint32_t i = 0; i < updates; i++) {
        uint32_t page = update[i].page;
        count_reference(pages, update[i].ref, 1);
        count_reference(pages, entry[page], -1);
        entry[page] = update[i].ref;
        if (page < pages->valid && update[i].ref == 0)
            pages->valid = page;
        if (page < pages->first_dense)
            pages->first_dense = page;
    }
    while (pages->valid < pages->table->capacity && entry[pages->valid] != 0)
        pages->valid++;
    while (pages->first_dense < pages->valid && oscar_page_ref_form(entry[pages->first_dense]) != OSCAR_FORM_DENSE)
        pages->first_dense++;
}

int oscar_pages_update(struct oscar_pages *pages, const struct oscar_page_update *update, uint32_t updates,
                       uint32_t tail, uint32_t limit, struct oscar_stream *stream) {
    if (updates == 0)
        return 0;
    struct oscar_table *old = NULL;
    struct oscar_retired *retired = NULL;
    pthread_mutex_lock(&pages->mappings->lock);
    int r = check_updates(pages, update, updates, tail, limit);
    uint32_t capacity;
    if (r == 0 && !fits_in_place(pages, update, updates, stream, &capacity)) {
        struct oscar_table *table = table_new(pages->table->memory, capacity);
        retired = malloc(sizeof(*retired));
        if (table == NULL || retired == NULL) {
            r = oscar_fail(oscar_detail(), OSCAR_ERR_NO_MEMORY, "no memory for a page table of %" PRIu32 " pages",
                           capacity);
            if (table != NULL)
                table_free(table);
            free(retired);
        } else {
            old = pages->table;
            memcpy(table->entry, old->entry, old->capacity * sizeof(old->entry[0]));
            pages->table = table;
        }
    }
    if (r == 0)
        apply(pages, update, updates);
    pthread_mutex_unlock(&pages->mappings->lock);
    if (old != NULL)
        oscar_retire(pages->attachment, stream, retired, table_free, old);
    return r;
}

bool oscar_pages_writable(const struct oscar_pages *pages, uint32_t page) {
    pthread_mutex_lock(&pages->mappings->lock);
    bool writable = oscar_mapping_slot(pages->table->memory->mapping, pages->table->entry[page])->writable;
    pthread_mutex_unlock(&pages->mappings->lock);
    return writable;
}

uint32_t oscar_pages_packed(const struct oscar_pages *pages, uint32_t count) {
    uint32_t packed = 0;
    for (uint32_t i = 0; i < count && i < pages->valid; i++)
        packed += oscar_page_ref_form(pages->table->entry[i]) == OSCAR_FORM_PACKED;
    return packed;
}
