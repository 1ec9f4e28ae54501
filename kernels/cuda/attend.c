/* SPDX-License-Identifier: Apache-2.0 */
/* Attention: over a batch, and over items given once, for which the stream has a batch of its own. */
#include <stdlib.h>

#include "kernels/cuda/backend.h"
#include "proto/cleanup.h"
#include "proto/geometry.h"

static int attend_batch(struct oscar_stream_impl *stream, struct oscar_batch_impl *batch,
                        const struct oscar_batch_attend_args *args) {
    const struct oscar_geometry *geometry = &batch->geometry;
    const struct cuda_calibration *calibration = cuda_calibration_find(stream->device, args->calibration);
    if (!calibration || calibration->view.layers != geometry->layers ||
        calibration->view.kv_heads != geometry->kv_heads || calibration->view.head_dim != geometry->head_dim ||
        args->layer >= geometry->layers ||
        (calibration->view.frequencies > 0 && cuda_batch_longest_pages(batch) > calibration->view.pages))
        return OSCAR_ERR_INVALID;
    int r = cuda_decode_enqueue(stream, batch, calibration, args);
    return r < 0 ? r : cuda_prefill_enqueue(stream, batch, calibration, args);
}

int cuda_batch_attend(struct oscar_stream_impl *stream, struct oscar_batch_impl *batch,
                      const struct oscar_batch_attend_args *args) {
    int r = cuda_work_begin(stream);
    return r < 0 ? r : cuda_work_end(stream, attend_batch(stream, batch, args));
}

/* --- items given once ------------------------------------------------------------------------------------------------------- */

static bool same_geometry(const struct oscar_geometry *a, const struct oscar_geometry *b) {
    return a->layers == b->layers && a->query_heads == b->query_heads && a->kv_heads == b->kv_heads &&
           a->head_dim == b->head_dim && a->dtype == b->dtype;
}

static struct oscar_batch_limits limits_of(const struct oscar_attend_args *args) {
    struct oscar_batch_limits limits = {.items = 1, .rows = 1};
    for (uint32_t i = 0; i < args->items; i++) {
        limits.rows = args->item[i].rows > limits.rows ? args->item[i].rows : limits.rows;
        limits.pages += ((uint64_t)args->item[i].tokens + OSCAR_PAGE_TOKENS - 1) / OSCAR_PAGE_TOKENS;
    }
    while (limits.items < args->items) /* doubled, so that it rarely grows */
        limits.items *= 2;
    uint64_t pages = 1024;
    while (pages < limits.pages)
        pages *= 2;
    limits.pages = pages;
    return limits;
}

/* Makes the stream's batch large enough. */
static int grow(struct oscar_stream_impl *stream, const struct oscar_attend_args *args) {
    struct oscar_batch_limits wanted = limits_of(args);
    struct oscar_batch_impl *batch = stream->batch;
    if (batch && same_geometry(&batch->geometry, args->geometry) && batch->limits.items >= wanted.items &&
        batch->limits.rows >= wanted.rows && batch->limits.pages >= wanted.pages)
        return 0;
    if (batch) {
        int r = cuda_settle(stream->device, stream->stream, "work of a stream", NULL);
        if (r < 0)
            return r;
        stream->batch = NULL;
        cuda_batch_close(batch);
    }
    while ((uint64_t)wanted.items * OSCAR_MAX_SEQUENCE_PAGES < wanted.pages)
        wanted.items *= 2;
    return cuda_batch_open(stream->device, args->geometry, &wanted, &stream->batch, NULL);
}

/* Offset of an address from a base, in elements. */
static int64_t offset_of(const void *address, const void *base, size_t element_bytes) {
    return ((intptr_t)address - (intptr_t)base) / (intptr_t)element_bytes;
}

/* Those items that want a log-sum-exp, or those that do not: a batch writes all of them or none. */
static int attend_items(struct oscar_stream_impl *stream, const struct oscar_attend_args *args, bool with_lse,
                        struct oscar_batch_item *item) {
    uint32_t items = 0;
    float *lse = NULL;
    for (uint32_t i = 0; i < args->items; i++) {
        const struct oscar_attend_item *from = &args->item[i];
        if ((from->lse != NULL) != with_lse)
            continue;
        lse = lse ? lse : from->lse;
        item[items++] = (struct oscar_batch_item){
            .pages = from->pages,
            .tokens = from->tokens,
            .rows = from->rows,
            .q_offset = offset_of(from->q, NULL, sizeof(uint16_t)),
            .q_row_stride = from->q_row_stride,
            .q_head_stride = from->q_head_stride,
            .out_offset = offset_of(from->out, NULL, sizeof(uint16_t)),
            .out_row_stride = from->out_row_stride,
            .out_head_stride = from->out_head_stride,
            .lse_offset = with_lse ? offset_of(from->lse, lse, sizeof(float)) : 0,
        };
    }
    if (items == 0)
        return 0;
    int r = cuda_batch_update(stream, stream->batch, args->arenas, item, items);
    struct oscar_batch_attend_args batch_args = {
        .calibration = args->calibration,
        .layer = args->layer,
        .softmax_scale = args->softmax_scale,
        .lse = lse,
    };
    return r < 0 ? r : attend_batch(stream, stream->batch, &batch_args);
}

static int attend(struct oscar_stream_impl *stream, const struct oscar_attend_args *args) {
    if (cuda_stream_capturing(stream))
        return OSCAR_ERR_STATE;
    if (oscar_geometry_check(args->geometry, NULL) < 0 || args->items > OSCAR_MAX_ATTEND_ITEMS)
        return OSCAR_ERR_INVALID;
    for (uint32_t i = 0; i < args->items; i++)
        if (args->item[i].tokens > OSCAR_MAX_SEQUENCE_TOKENS || args->item[i].rows > OSCAR_MAX_SEQUENCE_TOKENS)
            return OSCAR_ERR_INVALID;
    _cleanup_free_ struct oscar_batch_item *item = calloc(args->items + (size_t)1, sizeof(*item));
    if (!item)
        return OSCAR_ERR_NO_MEMORY;
    int r = grow(stream, args);
    if (r == 0)
        r = attend_items(stream, args, false, item);
    return r < 0 ? r : attend_items(stream, args, true, item);
}

int cuda_attend(struct oscar_stream_impl *stream, const struct oscar_attend_args *args) {
    int r = cuda_work_begin(stream);
    return r < 0 ? r : cuda_work_end(stream, attend(stream, args));
}
