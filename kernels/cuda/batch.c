/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Batches. What a step's kernels read lies in one piece of device memory: header | plan of decode | items | entries. An update
 * writes it to pinned memory and copies what is used of it; there are two such copies, so that a step is prepared while
 * the one before is on its way.
 */
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/backend.h"
#include "proto/geometry.h"

#define COPIES 2U
#define ALIGNMENT 256U

struct cuda_staging {
    struct {
        uint8_t *memory; /* pinned */
        CUevent copied;
    } copy[COPIES];
    uint32_t next;
    size_t items_at, entries_at; /* bytes from the start */
    /* What the latest update asked for: later calls are checked against it at once. */
    uint32_t longest_pages; /* of one item */
    bool storable;          /* the rows of every item lie in dense pages */
};

static size_t round_up(size_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

static uint32_t pages_of(uint32_t tokens) {
    return (uint32_t)(((uint64_t)tokens + OSCAR_PAGE_TOKENS - 1) / OSCAR_PAGE_TOKENS);
}

/* --- opening ---------------------------------------------------------------------------------------------------------------- */

static void take_apart(struct oscar_batch_impl *batch) {
    const struct cuda_driver *driver = batch->device->driver;
    for (uint32_t i = 0; i < COPIES; i++) {
        if (batch->staging->copy[i].copied)
            (void)driver->cuEventDestroy(batch->staging->copy[i].copied);
        if (batch->staging->copy[i].memory)
            (void)driver->cuMemFreeHost(batch->staging->copy[i].memory);
    }
    const CUdeviceptr memory[] = {batch->memory, batch->decode_scratch};
    for (uint32_t i = 0; i < sizeof(memory) / sizeof(*memory); i++)
        if (memory[i])
            (void)driver->cuMemFree(memory[i]);
}

void cuda_batch_close(struct oscar_batch_impl *batch) {
    if (!batch)
        return;
    struct oscar_device *device = batch->device;
    bool inside = cuda_enter(device, NULL) == 0;
    if (!atomic_load(&device->hangs)) {
        take_apart(batch);
        free(batch->staging);
        free(batch);
    }
    if (inside)
        cuda_leave(device);
}

static int zeroed(struct oscar_device *device, uint64_t bytes, CUdeviceptr *ret, struct oscar_cause *cause) {
    if (bytes == 0)
        return 0;
    int r = cuda_device_result(device, device->driver->cuMemAlloc(ret, bytes), "cuMemAlloc for a batch", cause);
    return r < 0 ? r
                 : cuda_device_result(device, device->driver->cuMemsetD8Async(*ret, 0, bytes, device->service),
                                      "cuMemsetD8Async", cause);
}

static int open_copies(struct oscar_batch_impl *batch, size_t bytes, struct oscar_cause *cause) {
    struct oscar_device *device = batch->device;
    int r = 0;
    for (uint32_t i = 0; r == 0 && i < COPIES; i++) {
        void *memory;
        r = cuda_device_result(device, device->driver->cuMemHostAlloc(&memory, bytes, CU_MEMHOSTALLOC_PORTABLE),
                               "cuMemHostAlloc for a batch", cause);
        if (r < 0)
            return r;
        batch->staging->copy[i].memory = memory;
        r = cuda_device_result(device,
                               device->driver->cuEventCreate(&batch->staging->copy[i].copied, CU_EVENT_DISABLE_TIMING),
                               "cuEventCreate", cause);
    }
    return r;
}

/* Inside cuda_enter. */
static int make_memory(struct oscar_batch_impl *batch, struct oscar_cause *cause) {
    struct oscar_device *device = batch->device;
    struct cuda_staging *staging = batch->staging;
    cuda_decode_prepare(batch);
    size_t plan_at = round_up(sizeof(struct cuda_batch_header));
    staging->items_at = plan_at + round_up(cuda_decode_plan_bytes(&batch->decode_shape));
    staging->entries_at = staging->items_at + round_up(batch->limits.items * sizeof(struct cuda_batch_item));
    size_t bytes = staging->entries_at + batch->limits.pages * sizeof(cuda_page);
    int r = zeroed(device, bytes, &batch->memory, cause);
    if (r == 0)
        r = zeroed(device, cuda_decode_scratch_bytes(batch), &batch->decode_scratch, cause);
    if (r == 0)
        r = open_copies(batch, bytes, cause);
    if (r == 0)
        r = cuda_settle(device, device->service, "zeroing a batch", cause);
    batch->decode_plan = batch->memory + plan_at;
    batch->view = (struct cuda_batch_view){
        .header = (const struct cuda_batch_header *)batch->memory,
        .items = (const struct cuda_batch_item *)(batch->memory + staging->items_at),
        .entries = (const cuda_page *)(batch->memory + staging->entries_at),
    };
    return r;
}

int cuda_batch_open(struct oscar_device *device, const struct oscar_geometry *geometry,
                    const struct oscar_batch_limits *limits, struct oscar_batch_impl **ret, struct oscar_cause *cause) {
    int r = oscar_geometry_check(geometry, cause);
    if (r < 0)
        return r;
    if (limits->items == 0 || limits->items > OSCAR_MAX_ATTEND_ITEMS || limits->rows == 0 ||
        limits->rows > OSCAR_MAX_SEQUENCE_TOKENS || limits->pages > (uint64_t)limits->items * OSCAR_MAX_SEQUENCE_PAGES)
        return oscar_fail(cause, OSCAR_ERR_INVALID, "no batch has %u items of %u rows and %llu pages", limits->items,
                          limits->rows, (unsigned long long)limits->pages);
    struct oscar_batch_impl *batch = calloc(1, sizeof(*batch));
    struct cuda_staging *staging = calloc(1, sizeof(*staging));
    if (!batch || !staging) {
        free(batch);
        free(staging);
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a batch");
    }
    batch->device = device;
    batch->geometry = *geometry;
    batch->limits = *limits;
    batch->staging = staging;
    staging->storable = true;
    r = cuda_enter(device, cause);
    if (r == 0) {
        r = make_memory(batch, cause);
        cuda_leave(device);
    }
    if (r < 0) {
        cuda_batch_close(batch);
        return r;
    }
    *ret = batch;
    return 0;
}

/* --- updates ---------------------------------------------------------------------------------------------------------------- */

static int check_item(const struct oscar_batch_item *item) {
    if (item->tokens > OSCAR_MAX_SEQUENCE_TOKENS || (item->tokens > 0 && item->rows > item->tokens))
        return OSCAR_ERR_INVALID;
    for (uint32_t p = 0; p < pages_of(item->tokens); p++)
        if (item->pages[p] >> 63 == 0 || oscar_page_ref_form(item->pages[p]) >= OSCAR_FORMS)
            return OSCAR_ERR_INVALID;
    return 0;
}

static int check_items(const struct oscar_batch_impl *batch, const struct oscar_batch_item *item, uint32_t items) {
    uint64_t pages = 0;
    if (items > batch->limits.items)
        return OSCAR_ERR_LIMIT;
    for (uint32_t i = 0; i < items; i++) {
        int r = check_item(&item[i]);
        if (r < 0)
            return r;
        pages += pages_of(item[i].tokens);
        if (item[i].rows > batch->limits.rows || pages > batch->limits.pages)
            return OSCAR_ERR_LIMIT;
    }
    return 0;
}

static bool is_storable(const struct oscar_batch_item *item) {
    uint32_t rows = item->tokens > 0 ? item->rows : 0, pages = pages_of(item->tokens);
    for (uint32_t p = rows > 0 ? (item->tokens - rows) / OSCAR_PAGE_TOKENS : pages; p < pages; p++)
        if (oscar_page_ref_form(item->pages[p]) != OSCAR_FORM_DENSE)
            return false;
    return true;
}

static uint64_t page_address(const struct oscar_arena_view *arena, oscar_page_ref ref) {
    uint64_t offset = oscar_page_ref_id(ref) * arena->stride;
    return (uintptr_t)(arena->range ? cuda_range_locate(arena->range, offset) : arena->base + offset);
}

/* Resolves an item's pages to its two runs of entries, which begin at `first`. */
static int fill_item(const struct oscar_arena_view arenas[OSCAR_FORMS], const struct oscar_batch_item *item,
                     uint64_t first, cuda_page *entries, struct cuda_batch_item *ret) {
    uint32_t pages = pages_of(item->tokens), packed = 0;
    for (uint32_t p = 0; p < pages; p++)
        packed += oscar_page_ref_form(item->pages[p]) == OSCAR_FORM_PACKED;
    uint64_t next[2] = {first + packed, first}; /* of the dense run, of the packed one */
    uint32_t dense_tokens = 0;
    for (uint32_t p = 0; p < pages; p++) {
        unsigned form = oscar_page_ref_form(item->pages[p]);
        uint64_t address = page_address(&arenas[form], item->pages[p]);
        if (address % ALIGNMENT != 0)
            return OSCAR_ERR_INVALID;
        uint32_t held = item->tokens - p * OSCAR_PAGE_TOKENS;
        if (form != OSCAR_FORM_PACKED)
            dense_tokens += held < OSCAR_PAGE_TOKENS ? held : OSCAR_PAGE_TOKENS;
        entries[next[form == OSCAR_FORM_PACKED]++] = cuda_page_make(address, p);
    }
    *ret = (struct cuda_batch_item){
        .tokens = item->tokens,
        .rows = item->rows,
        .packed_pages = packed,
        .dense_pages = pages - packed,
        .dense_tokens = dense_tokens,
        .packed_first = first,
        .dense_first = first + packed,
        .q_offset = item->q_offset,
        .q_row_stride = item->q_row_stride,
        .q_head_stride = item->q_head_stride,
        .out_offset = item->out_offset,
        .out_row_stride = item->out_row_stride,
        .out_head_stride = item->out_head_stride,
        .lse_offset = item->lse_offset,
        .k_offset = item->k_offset,
        .v_offset = item->v_offset,
    };
    return 0;
}

/* Writes the batch as the kernels see it; the number of entries is returned by reference. */
static int fill(struct oscar_batch_impl *batch, uint8_t *memory, const struct oscar_arena_view arenas[OSCAR_FORMS],
                const struct oscar_batch_item *item, uint32_t items, uint64_t *ret_pages) {
    struct cuda_batch_item *to = (void *)(memory + batch->staging->items_at);
    cuda_page *entries = (void *)(memory + batch->staging->entries_at);
    uint32_t rows = 0, longest = 0;
    uint64_t pages = 0;
    bool storable = true;
    for (uint32_t i = 0; i < items; i++) {
        int r = fill_item(arenas, &item[i], pages, entries, &to[i]);
        if (r < 0)
            return r;
        to[i].first_row = rows;
        rows += item[i].rows;
        pages += pages_of(item[i].tokens);
        longest = pages_of(item[i].tokens) > longest ? pages_of(item[i].tokens) : longest;
        storable = storable && is_storable(&item[i]);
    }
    *(struct cuda_batch_header *)(void *)memory = (struct cuda_batch_header){.items = items, .rows = rows};
    cuda_decode_plan(&batch->decode_shape, batch->geometry.query_heads / batch->geometry.kv_heads, to, items,
                     memory + (batch->decode_plan - batch->memory));
    batch->staging->longest_pages = longest;
    batch->staging->storable = storable;
    *ret_pages = pages;
    return 0;
}

static int copy_part(struct oscar_stream_impl *stream, struct oscar_batch_impl *batch, const uint8_t *memory, size_t at,
                     size_t bytes) {
    if (bytes == 0)
        return 0;
    return cuda_device_result(
        stream->device,
        stream->device->driver->cuMemcpyAsync(batch->memory + at, (CUdeviceptr)(memory + at), bytes, stream->stream),
        "cuMemcpyAsync of a batch", NULL);
}

/* Inside the stream's context. */
static int update(struct oscar_stream_impl *stream, struct oscar_batch_impl *batch,
                  const struct oscar_arena_view arenas[OSCAR_FORMS], const struct oscar_batch_item *item,
                  uint32_t items) {
    struct cuda_staging *staging = batch->staging;
    if (cuda_stream_capturing(stream))
        return OSCAR_ERR_STATE;
    int r = check_items(batch, item, items);
    if (r < 0)
        return r;
    uint8_t *memory = staging->copy[staging->next].memory;
    CUevent copied = staging->copy[staging->next].copied;
    uint64_t pages = 0;
    r = cuda_event_wait(stream->device, copied, CUDA_PATIENCE_NS, NULL); /* of the update before the last one */
    if (r == 0)
        r = fill(batch, memory, arenas, item, items, &pages);
    if (r == 0)
        r = copy_part(stream, batch, memory, 0, staging->items_at + items * sizeof(struct cuda_batch_item));
    if (r == 0)
        r = copy_part(stream, batch, memory, staging->entries_at, pages * sizeof(cuda_page));
    if (r == 0)
        r = cuda_device_result(stream->device, stream->device->driver->cuEventRecord(copied, stream->stream),
                               "cuEventRecord", NULL);
    if (r == 0)
        staging->next = (staging->next + 1) % COPIES;
    return r;
}

int cuda_batch_update(struct oscar_stream_impl *stream, struct oscar_batch_impl *batch,
                      const struct oscar_arena_view arenas[OSCAR_FORMS], const struct oscar_batch_item *item,
                      uint32_t items) {
    int r = cuda_work_begin(stream);
    return r < 0 ? r : cuda_work_end(stream, update(stream, batch, arenas, item, items));
}

uint32_t cuda_batch_longest_pages(const struct oscar_batch_impl *batch) { return batch->staging->longest_pages; }

bool cuda_batch_storable(const struct oscar_batch_impl *batch) { return batch->staging->storable; }
