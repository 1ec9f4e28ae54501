/* SPDX-License-Identifier: Apache-2.0 */
/* Two partial results of attention become one. */
#include <inttypes.h>

#include "client/src/detail.h"
#include "client/src/model.h"

int oscar_merge(struct oscar_model *model, struct oscar_stream *stream, uint32_t rows, const struct oscar_partial *into,
                const struct oscar_partial *other) {
    int r = oscar_model_check(model);
    if (r < 0)
        return r;
    struct oscar_attachment *attachment = model->client->attachment;
    if (into == NULL || other == NULL || into->out == NULL || into->lse == NULL || other->out == NULL ||
        other->lse == NULL)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "merge: a partial result, its out or its lse is NULL");
    if (stream != NULL && stream->attachment != attachment)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "the stream was opened by another client");
    if (rows == 0)
        return 0;
    const struct oscar_geometry *geometry = &model->info.geometry;
    const struct oscar_merge_args args = {.rows = rows,
                                          .heads = geometry->query_heads,
                                          .head_dim = geometry->head_dim,
                                          .dtype = geometry->dtype,
                                          .out = into->out,
                                          .out_row_stride = into->row_stride,
                                          .out_head_stride = into->head_stride,
                                          .lse = into->lse,
                                          .other_out = other->out,
                                          .other_row_stride = other->row_stride,
                                          .other_head_stride = other->head_stride,
                                          .other_lse = other->lse};
    struct oscar_stream_impl *queue;
    r = oscar_queue_begin(attachment, stream, &queue);
    if (r < 0)
        return r;
    r = attachment->ops->merge(queue, &args);
    oscar_queue_end(attachment, queue);
    return r < 0 ? oscar_work_failed(attachment, r, "merge of %" PRIu32 " rows", rows) : 0;
}
