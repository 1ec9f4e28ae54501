/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Batches of the host backend. The items of a batch change in stream order, as a command of their own, so that work enqueued
 * before an update still reads what was there; page references are looked up when the work runs.
 */
#include <stdlib.h>
#include <string.h>

#include "kernels/host/host.h"
#include "kernels/host/stream.h"
#include "proto/cleanup.h"
#include "proto/geometry.h"

struct oscar_batch_impl {
    struct oscar_geometry geometry;
    struct oscar_batch_limits limits;
    /* What the latest call of update asked for: later calls are checked against it at once. */
    uint32_t longest_pages; /* of one item */
    bool storable;          /* the rows of every item lie in dense pages */
    /* The batch as the stream's work sees it. */
    struct oscar_arena_view arenas[OSCAR_FORMS];
    uint32_t items;
    struct oscar_batch_item *item;    /* [limits.items], their tables in `pages` */
    oscar_page_ref *pages;            /* [limits.pages] */
    struct oscar_attend_item *attend; /* [limits.items], filled by each batch_attend */
    uint8_t **store_pages;            /* [pages that limits.rows rows can touch], filled for each item of batch_store */
};

static uint32_t pages_of(uint32_t tokens) {
    return (uint32_t)(((uint64_t)tokens + OSCAR_PAGE_TOKENS - 1) / OSCAR_PAGE_TOKENS);
}

/* An offset may be an address divided by the size of an element, over no tensor at all. */
static void *at(const void *tensor, int64_t offset, size_t element_bytes) {
    return (void *)((uintptr_t)tensor + (uintptr_t)offset * element_bytes);
}

void host_batch_close(struct oscar_batch_impl *batch) {
    if (!batch)
        return;
    free(batch->item);
    free(batch->pages);
    free(batch->attend);
    free(batch->store_pages);
    free(batch);
}

static void batch_cleanup(struct oscar_batch_impl **batch) { host_batch_close(*batch); }

int host_batch_open(struct oscar_device *device, const struct oscar_geometry *geometry,
                    const struct oscar_batch_limits *limits, struct oscar_batch_impl **ret, struct oscar_cause *cause) {
    (void)device;
    int r = oscar_geometry_check(geometry, cause);
    if (r < 0)
        return r;
    if (limits->items == 0 || limits->items > OSCAR_MAX_ATTEND_ITEMS || limits->rows == 0 ||
        limits->rows > OSCAR_MAX_SEQUENCE_TOKENS || limits->pages > (uint64_t)limits->items * OSCAR_MAX_SEQUENCE_PAGES)
        return oscar_fail(cause, OSCAR_ERR_INVALID, "no batch has %u items of %u rows and %llu pages", limits->items,
                          limits->rows, (unsigned long long)limits->pages);
    _cleanup_(batch_cleanup) struct oscar_batch_impl *batch = calloc(1, sizeof(*batch));
    if (!batch)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a batch");
    batch->geometry = *geometry;
    batch->limits = *limits;
    batch->storable = true;
    batch->item = calloc(limits->items, sizeof(*batch->item));
    batch->pages = calloc(limits->pages + 1, sizeof(*batch->pages));
    batch->attend = calloc(limits->items, sizeof(*batch->attend));
    batch->store_pages = calloc((size_t)pages_of(limits->rows) + 1, sizeof(*batch->store_pages));
    if (!batch->item || !batch->pages || !batch->attend || !batch->store_pages)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a batch of %u items and %llu pages", limits->items,
                          (unsigned long long)limits->pages);
    *ret = TAKE_PTR(batch);
    return 0;
}

/* ---- update ---- */

struct update_command {
    struct oscar_batch_impl *batch;
    struct oscar_arena_view arenas[OSCAR_FORMS];
    uint32_t items;
    uint64_t pages;
    struct oscar_batch_item item[]; /* then their page tables, one after the other */
};

static oscar_page_ref *command_pages(struct update_command *update) {
    return (oscar_page_ref *)(void *)&update->item[update->items];
}

static int run_update(const struct host_runner *runner, void *payload) {
    struct update_command *update = payload;
    struct oscar_batch_impl *batch = update->batch;
    (void)runner;
    memcpy(batch->arenas, update->arenas, sizeof(batch->arenas));
    memcpy(batch->item, update->item, update->items * sizeof(batch->item[0]));
    memcpy(batch->pages, command_pages(update), update->pages * sizeof(batch->pages[0]));
    batch->items = update->items;
    const oscar_page_ref *pages = batch->pages;
    for (uint32_t i = 0; i < batch->items; i++) {
        batch->item[i].pages = pages;
        pages += pages_of(batch->item[i].tokens);
    }
    return 0;
}

/* The first page that holds one of the item's rows; the end of its table when it has none. */
static uint32_t first_stored_page(const struct oscar_batch_item *item) {
    return item->tokens == 0 || item->rows == 0 ? pages_of(item->tokens)
                                                : (item->tokens - item->rows) / OSCAR_PAGE_TOKENS;
}

static int check_pages(const struct oscar_batch_item *item, bool *storable) {
    for (uint32_t p = 0; p < pages_of(item->tokens); p++) {
        oscar_page_ref ref = item->pages[p];
        if (ref >> 63 == 0 || oscar_page_ref_form(ref) >= OSCAR_FORMS)
            return OSCAR_ERR_INVALID;
        if (p >= first_stored_page(item) && oscar_page_ref_form(ref) != OSCAR_FORM_DENSE)
            *storable = false;
    }
    return 0;
}

int host_batch_update(struct oscar_stream_impl *stream, struct oscar_batch_impl *batch,
                      const struct oscar_arena_view arenas[OSCAR_FORMS], const struct oscar_batch_item *item,
                      uint32_t items) {
    uint64_t pages = 0;
    uint32_t longest = 0;
    bool storable = true;
    if (items > batch->limits.items)
        return OSCAR_ERR_LIMIT;
    for (uint32_t i = 0; i < items; i++) {
        if (item[i].tokens > OSCAR_MAX_SEQUENCE_TOKENS || (item[i].tokens > 0 && item[i].rows > item[i].tokens))
            return OSCAR_ERR_INVALID;
        pages += pages_of(item[i].tokens);
        if (item[i].rows > batch->limits.rows || pages > batch->limits.pages)
            return OSCAR_ERR_LIMIT;
        int r = check_pages(&item[i], &storable);
        if (r < 0)
            return r;
        longest = pages_of(item[i].tokens) > longest ? pages_of(item[i].tokens) : longest;
    }
    void *payload;
    size_t bytes = sizeof(struct update_command) + items * sizeof(item[0]) + pages * sizeof(oscar_page_ref);
    struct host_command *command = host_command_make(run_update, bytes, &payload);
    if (!command)
        return OSCAR_ERR_NO_MEMORY;
    struct update_command *update = payload;
    update->batch = batch;
    memcpy(update->arenas, arenas, sizeof(update->arenas));
    update->items = items;
    update->pages = pages;
    oscar_page_ref *table = command_pages(update);
    for (uint32_t i = 0; i < items; i++) {
        update->item[i] = item[i];
        for (uint32_t p = 0; p < pages_of(item[i].tokens); p++)
            *table++ = item[i].pages[p];
    }
    batch->longest_pages = longest;
    batch->storable = storable;
    return host_stream_submit(stream, command);
}

/* ---- store ---- */

struct store_command {
    struct oscar_batch_impl *batch;
    struct oscar_batch_store_args args;
};

static struct oscar_rows rows_at(const struct oscar_rows *rows, int64_t offset) {
    return (struct oscar_rows){at(rows->data, offset, sizeof(uint16_t)), rows->token_stride, rows->head_stride};
}

static int store_item(const struct host_runner *runner, const struct oscar_batch_impl *batch,
                      const struct oscar_batch_store_args *args, const struct oscar_batch_item *item) {
    const struct oscar_arena_view *arena = &batch->arenas[OSCAR_FORM_DENSE];
    uint32_t first = first_stored_page(item);
    for (uint32_t p = first; p < pages_of(item->tokens); p++)
        batch->store_pages[p - first] = (uint8_t *)arena->base + oscar_page_ref_id(item->pages[p]) * arena->stride;
    return host_store(runner->pool, runner->level,
                      &(struct oscar_store_args){.geometry = &batch->geometry,
                                                 .calibration = args->calibration,
                                                 .layer = args->layer,
                                                 .tokens = item->tokens == 0 ? 0 : item->rows,
                                                 .first_row = (item->tokens - item->rows) % OSCAR_PAGE_TOKENS,
                                                 .pages = batch->store_pages,
                                                 .k = rows_at(&args->k, item->k_offset),
                                                 .v = rows_at(&args->v, item->v_offset)});
}

static int run_store(const struct host_runner *runner, void *payload) {
    const struct store_command *store = payload;
    int result = 0;
    for (uint32_t i = 0; i < store->batch->items; i++) {
        int r = store_item(runner, store->batch, &store->args, &store->batch->item[i]);
        result = result < 0 ? result : r;
    }
    return result;
}

int host_batch_store(struct oscar_stream_impl *stream, struct oscar_batch_impl *batch,
                     const struct oscar_batch_store_args *args) {
    if (!host_calibration_fits(args->calibration, &batch->geometry) || args->layer >= batch->geometry.layers ||
        !batch->storable)
        return OSCAR_ERR_INVALID;
    return host_submit(stream, run_store, &(struct store_command){batch, *args}, sizeof(struct store_command));
}

/* ---- attend ---- */

struct attend_command {
    struct oscar_batch_impl *batch;
    struct oscar_batch_attend_args args;
};

static int run_attend(const struct host_runner *runner, void *payload) {
    const struct attend_command *attend = payload;
    const struct oscar_batch_attend_args *args = &attend->args;
    struct oscar_batch_impl *batch = attend->batch;
    for (uint32_t i = 0; i < batch->items; i++) {
        const struct oscar_batch_item *item = &batch->item[i];
        batch->attend[i] = (struct oscar_attend_item){.pages = item->pages,
                                                      .tokens = item->tokens,
                                                      .rows = item->rows,
                                                      .q = at(args->q, item->q_offset, sizeof(uint16_t)),
                                                      .q_row_stride = item->q_row_stride,
                                                      .q_head_stride = item->q_head_stride,
                                                      .out = at(args->out, item->out_offset, sizeof(uint16_t)),
                                                      .out_row_stride = item->out_row_stride,
                                                      .out_head_stride = item->out_head_stride,
                                                      .lse = args->lse ? args->lse + item->lse_offset : NULL};
    }
    struct oscar_attend_args work = {.geometry = &batch->geometry,
                                     .calibration = args->calibration,
                                     .layer = args->layer,
                                     .softmax_scale = args->softmax_scale,
                                     .items = batch->items,
                                     .item = batch->attend};
    memcpy(work.arenas, batch->arenas, sizeof(work.arenas));
    return host_attend(runner->pool, runner->level, &work);
}

int host_batch_attend(struct oscar_stream_impl *stream, struct oscar_batch_impl *batch,
                      const struct oscar_batch_attend_args *args) {
    const struct oscar_calibration *calibration = args->calibration;
    if (!host_calibration_fits(calibration, &batch->geometry) || args->layer >= batch->geometry.layers ||
        (calibration->frequencies > 0 && batch->longest_pages > calibration->turns.pages))
        return OSCAR_ERR_INVALID;
    return host_submit(stream, run_attend, &(struct attend_command){batch, *args}, sizeof(struct attend_command));
}
