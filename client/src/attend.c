/* SPDX-License-Identifier: Apache-2.0 */
/* A ragged batch, checked before the launch: no kernel reads a page that is not there. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "client/src/detail.h"
#include "client/src/seq.h"
#include "proto/cleanup.h"

#define ITEMS_ON_STACK 32U

int oscar_seq_check_query(const struct oscar_seq *seq, const struct oscar_model *model, uint32_t tokens, uint32_t rows,
                          uint32_t index) {
    if (seq == NULL || seq->model != model)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "query %" PRIu32 ": %s", index,
                          seq == NULL ? "seq: NULL" : "its sequence is of another model");
    uint32_t stored = seq->reserved > seq->committed ? seq->reserved : seq->committed;
    if (tokens > stored || oscar_pages_of(tokens) > seq->pages.valid)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID,
                          "query %" PRIu32 ": %" PRIu32 " tokens, there is room for %" PRIu32, index, tokens, stored);
    if (rows > tokens)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID,
                          "query %" PRIu32 ": %" PRIu32 " rows over %" PRIu32 " tokens", index, rows, tokens);
    return 0;
}

static uint32_t tokens_of(const struct oscar_attend_query *query) {
    return query->tokens > 0 || query->seq == NULL ? query->tokens : query->seq->committed;
}

static int check_query(const struct oscar_model *model, const struct oscar_attend_query *query, uint32_t index) {
    int r = oscar_seq_check_query(query->seq, model, tokens_of(query), query->rows, index);
    if (r < 0)
        return r;
    if (query->rows > 0 && (query->q == NULL || query->out == NULL))
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "query %" PRIu32 ": q or out is NULL", index);
    return 0;
}

static void fill_item(const struct oscar_attend_query *query, struct oscar_attend_item *ret) {
    *ret = (struct oscar_attend_item){.pages = query->seq->pages.table->entry,
                                      .tokens = tokens_of(query),
                                      .rows = query->rows,
                                      .q = query->q,
                                      .q_row_stride = query->q_row_stride,
                                      .q_head_stride = query->q_head_stride,
                                      .out = query->out,
                                      .out_row_stride = query->out_row_stride,
                                      .out_head_stride = query->out_head_stride,
                                      .lse = query->lse};
}

/* A sequence that appears twice has one page table: all refreshes come before the first item is made. */
static int prepare(const struct oscar_model *model, struct oscar_stream *stream,
                   const struct oscar_attend_query *queries, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        int r = check_query(model, &queries[i], i);
        if (r == 0)
            r = oscar_seq_use_stream(queries[i].seq, stream);
        if (r < 0)
            return r;
    }
    for (uint32_t i = 0; i < count; i++)
        if (queries[i].seq->failed == 0)
            oscar_seq_refresh(queries[i].seq);
    return 0;
}

int oscar_attend(struct oscar_model *model, struct oscar_stream *stream, uint32_t layer, float softmax_scale,
                 const struct oscar_attend_query *queries, uint32_t count) {
    int r = oscar_model_check(model);
    if (r < 0)
        return r;
    const struct oscar_geometry *geometry = &model->info.geometry;
    if (layer >= geometry->layers || (queries == NULL && count > 0) || !isfinite(softmax_scale))
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "layer %" PRIu32 " of %" PRIu32 "%s", layer,
                          geometry->layers,
                          layer < geometry->layers ? ", queries: NULL or a softmax_scale that is not finite" : "");
    r = prepare(model, stream, queries, count);
    if (r < 0 || count == 0)
        return r;

    struct oscar_attend_item on_stack[ITEMS_ON_STACK], *item = on_stack;
    _cleanup_free_ struct oscar_attend_item *on_heap = NULL;
    if (count > ITEMS_ON_STACK) {
        on_heap = item = malloc(count * sizeof(*on_heap));
        if (on_heap == NULL)
            return oscar_fail(oscar_detail(), OSCAR_ERR_NO_MEMORY, "no memory for %" PRIu32 " queries", count);
    }
    for (uint32_t i = 0; i < count; i++)
        fill_item(&queries[i], &item[i]);
    struct oscar_attend_args args = {.geometry = geometry,
                                     .calibration = model->memory->calibration,
                                     .layer = layer,
                                     .softmax_scale =
                                         softmax_scale != 0 ? softmax_scale : 1.0F / sqrtf((float)geometry->head_dim),
                                     .items = count,
                                     .item = item};
    oscar_mapping_view(model->memory->mapping, args.arenas);
    struct oscar_attachment *attachment = model->client->attachment;
    struct oscar_stream_impl *queue;
    r = oscar_queue_begin(attachment, stream, &queue);
    if (r < 0)
        return r;
    r = attachment->ops->attend(queue, &args);
    oscar_queue_end(attachment, queue);
    return r < 0 ? oscar_work_failed(attachment, r, "attend over layer %" PRIu32, layer) : 0;
}
