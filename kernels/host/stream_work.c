/* SPDX-License-Identifier: Apache-2.0 */
/* The work that a stream takes: checks of the arguments, their copies, and the call of the function that does it. */
#include <stdatomic.h>
#include <string.h>

#include "kernels/host/host.h"
#include "kernels/host/stream.h"
#include "proto/geometry.h"

int host_submit(struct oscar_stream_impl *stream, host_command_function *function, const void *payload, size_t bytes) {
    void *copy;
    struct host_command *command = host_command_make(function, bytes, &copy);
    if (!command)
        return OSCAR_ERR_NO_MEMORY;
    memcpy(copy, payload, bytes);
    return host_stream_submit(stream, command);
}

/* ---- host calls, fences, copies ---- */

struct call_command {
    void (*function)(void *);
    void *argument;
};

static int run_call(const struct host_runner *runner, void *payload) {
    const struct call_command *call = payload;
    (void)runner;
    call->function(call->argument);
    return 0;
}

int host_stream_call(struct oscar_stream_impl *stream, void (*function)(void *), void *argument) {
    return host_submit(stream, run_call, &(struct call_command){function, argument}, sizeof(struct call_command));
}

struct fence_command {
    oscar_fence_slot *slot;
    uint64_t value;
};

static int run_fence(const struct host_runner *runner, void *payload) {
    const struct fence_command *fence = payload;
    (void)runner;
    /* A fence only rises; its stream is its only writer, so there is nothing to race with. */
    if (atomic_load_explicit(fence->slot, memory_order_relaxed) < fence->value)
        atomic_store_explicit(fence->slot, fence->value, memory_order_release);
    return 0;
}

int host_fence_signal(struct oscar_stream_impl *stream, oscar_fence_slot *slot, uint64_t value) {
    return host_submit(stream, run_fence, &(struct fence_command){slot, value}, sizeof(struct fence_command));
}

struct copy_command {
    void *destination;
    const void *source;
    uint64_t bytes;
};

static int run_copy(const struct host_runner *runner, void *payload) {
    const struct copy_command *copy = payload;
    (void)runner;
    memcpy(copy->destination, copy->source, copy->bytes);
    return 0;
}

int host_enqueue_copy(struct oscar_stream_impl *stream, void *destination, const void *source, uint64_t bytes) {
    return host_submit(stream, run_copy, &(struct copy_command){destination, source, bytes},
                       sizeof(struct copy_command));
}

/* ---- store, inspect, pack, attend, merge ---- */

bool host_calibration_fits(const struct oscar_calibration *calibration, const struct oscar_geometry *geometry) {
    return oscar_geometry_check(geometry, NULL) == 0 && calibration->layers == geometry->layers &&
           calibration->kv_heads == geometry->kv_heads && calibration->head_dim == geometry->head_dim;
}

struct store_command {
    struct oscar_geometry geometry;
    struct oscar_store_args args;
    uint8_t *pages[];
};

static int run_store(const struct host_runner *runner, void *payload) {
    const struct store_command *store = payload;
    return host_store(runner->pool, runner->level, &store->args);
}

int host_enqueue_store(struct oscar_stream_impl *stream, const struct oscar_store_args *args) {
    if (!host_calibration_fits(args->calibration, args->geometry) || args->layer >= args->geometry->layers ||
        args->first_row >= OSCAR_PAGE_TOKENS || args->tokens > OSCAR_MAX_SEQUENCE_TOKENS)
        return OSCAR_ERR_INVALID;
    size_t pages = (args->first_row + args->tokens + OSCAR_PAGE_TOKENS - 1) / OSCAR_PAGE_TOKENS;
    struct store_command *store;
    void *payload;
    struct host_command *command =
        host_command_make(run_store, sizeof(*store) + pages * sizeof(store->pages[0]), &payload);
    if (!command)
        return OSCAR_ERR_NO_MEMORY;
    store = payload;
    store->geometry = *args->geometry;
    store->args = *args;
    store->args.geometry = &store->geometry;
    store->args.pages = store->pages;
    if (pages > 0)
        memcpy(store->pages, args->pages, pages * sizeof(store->pages[0]));
    return host_stream_submit(stream, command);
}

struct inspect_command {
    struct oscar_geometry geometry;
    int32_t *status;
    uint32_t count;
    const uint8_t *pages[];
};

static int run_inspect(const struct host_runner *runner, void *payload) {
    const struct inspect_command *inspect = payload;
    for (uint32_t i = 0; i < inspect->count; i++)
        inspect->status[i] = host_inspect(runner->pool, runner->level, &inspect->geometry, inspect->pages[i]);
    return 0;
}

int host_enqueue_inspect(struct oscar_stream_impl *stream, const struct oscar_geometry *geometry,
                         const uint8_t *const *pages, uint32_t count, int32_t *status) {
    if (oscar_geometry_check(geometry, NULL) < 0 || count > OSCAR_MAX_PACK_ITEMS)
        return OSCAR_ERR_INVALID;
    struct inspect_command *inspect;
    void *payload;
    struct host_command *command =
        host_command_make(run_inspect, sizeof(*inspect) + count * sizeof(inspect->pages[0]), &payload);
    if (!command)
        return OSCAR_ERR_NO_MEMORY;
    inspect = payload;
    inspect->geometry = *geometry;
    inspect->status = status;
    inspect->count = count;
    if (count > 0)
        memcpy(inspect->pages, pages, count * sizeof(inspect->pages[0]));
    return host_stream_submit(stream, command);
}

struct pack_command {
    struct oscar_geometry geometry;
    const struct oscar_calibration *calibration;
    uint32_t items;
    struct oscar_pack_item item[];
};

static int run_pack(const struct host_runner *runner, void *payload) {
    const struct pack_command *pack = payload;
    return host_pack(runner->pool, runner->level, &pack->geometry, pack->calibration, pack->item, pack->items);
}

int host_enqueue_pack(struct oscar_stream_impl *stream, const struct oscar_geometry *geometry,
                      const struct oscar_calibration *calibration, const struct oscar_pack_item *item, uint32_t items) {
    if (!host_calibration_fits(calibration, geometry) || items > OSCAR_MAX_PACK_ITEMS)
        return OSCAR_ERR_INVALID;
    for (uint32_t i = 0; i < items; i++)
        if (item[i].position % OSCAR_PAGE_TOKENS != 0 ||
            (calibration->frequencies > 0 && item[i].position / OSCAR_PAGE_TOKENS >= calibration->turns.pages))
            return OSCAR_ERR_INVALID;
    struct pack_command *pack;
    void *payload;
    struct host_command *command = host_command_make(run_pack, sizeof(*pack) + items * sizeof(pack->item[0]), &payload);
    if (!command)
        return OSCAR_ERR_NO_MEMORY;
    pack = payload;
    pack->geometry = *geometry;
    pack->calibration = calibration;
    pack->items = items;
    if (items > 0)
        memcpy(pack->item, item, items * sizeof(pack->item[0]));
    return host_stream_submit(stream, command);
}

struct attend_command {
    struct oscar_geometry geometry;
    struct oscar_attend_args args;
    struct oscar_attend_item item[];
};

static int run_attend(const struct host_runner *runner, void *payload) {
    const struct attend_command *attend = payload;
    return host_attend(runner->pool, runner->level, &attend->args);
}

/* Packed pages may lie anywhere in the sequence, so every page's turn must be there. */
static bool item_fits(const struct oscar_attend_item *item, const struct oscar_calibration *calibration) {
    uint64_t pages = ((uint64_t)item->tokens + OSCAR_PAGE_TOKENS - 1) / OSCAR_PAGE_TOKENS;
    return item->tokens <= OSCAR_MAX_SEQUENCE_TOKENS && (item->tokens == 0 || item->rows <= item->tokens) &&
           (calibration->frequencies == 0 || pages <= calibration->turns.pages);
}

int host_enqueue_attend(struct oscar_stream_impl *stream, const struct oscar_attend_args *args) {
    if (!host_calibration_fits(args->calibration, args->geometry) || args->layer >= args->geometry->layers ||
        args->items > OSCAR_MAX_ATTEND_ITEMS)
        return OSCAR_ERR_INVALID;
    for (uint32_t i = 0; i < args->items; i++)
        if (!item_fits(&args->item[i], args->calibration))
            return OSCAR_ERR_INVALID;
    struct attend_command *attend;
    void *payload;
    struct host_command *command =
        host_command_make(run_attend, sizeof(*attend) + args->items * sizeof(attend->item[0]), &payload);
    if (!command)
        return OSCAR_ERR_NO_MEMORY;
    attend = payload;
    attend->geometry = *args->geometry;
    attend->args = *args;
    attend->args.geometry = &attend->geometry;
    attend->args.item = attend->item;
    if (args->items > 0)
        memcpy(attend->item, args->item, args->items * sizeof(attend->item[0]));
    return host_stream_submit(stream, command);
}

static int run_merge(const struct host_runner *runner, void *payload) {
    host_merge(runner->pool, payload);
    return 0;
}

int host_enqueue_merge(struct oscar_stream_impl *stream, const struct oscar_merge_args *args) {
    if ((args->dtype != OSCAR_BF16 && args->dtype != OSCAR_FP16) ||
        (args->head_dim != 64 && args->head_dim != 128 && args->head_dim != 256) ||
        args->rows > OSCAR_MAX_SEQUENCE_TOKENS || args->heads > OSCAR_MAX_KV_HEADS * OSCAR_MAX_GROUP)
        return OSCAR_ERR_INVALID;
    return host_submit(stream, run_merge, args, sizeof(*args));
}
