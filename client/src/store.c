/* SPDX-License-Identifier: Apache-2.0 */
/* Writing K and V of uncommitted tokens into the sequence's own dense pages. */
#include <inttypes.h>
#include <stdlib.h>

#include "client/src/detail.h"
#include "client/src/seq.h"
#include "proto/cleanup.h"

#define PAGES_ON_STACK 16U

static uint8_t *page_address(const struct oscar_seq *seq, uint32_t page) {
    return oscar_mapping_page(seq->model->memory->mapping, seq->pages.table->entry[page]);
}

int oscar_seq_store(struct oscar_seq *seq, struct oscar_stream *stream, uint32_t layer, uint32_t first, uint32_t count,
                    const struct oscar_tensor *k, const struct oscar_tensor *v) {
    int r = oscar_seq_check(seq);
    if (r < 0)
        return r;
    const struct oscar_geometry *geometry = &seq->model->info.geometry;
    if (layer >= geometry->layers || k == NULL || v == NULL || k->data == NULL || v->data == NULL)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "layer %" PRIu32 " of %" PRIu32 "%s", layer,
                          geometry->layers, layer < geometry->layers ? ", K or V: NULL" : "");
    uint64_t end = (uint64_t)first + count;
    if (end > seq->reserved && count > 0)
        return oscar_fail(oscar_detail(), OSCAR_ERR_NO_SPACE,
                          "positions up to %" PRIu64 ", reserved are %" PRIu32 " tokens", end, seq->reserved);
    uint32_t begin = first > seq->committed ? first : seq->committed;
    if (count == 0 || end <= begin)
        return 0;
    r = oscar_seq_use_stream(seq, stream);
    if (r < 0)
        return r;

    uint8_t *on_stack[PAGES_ON_STACK], **address = on_stack;
    uint32_t first_page = begin / OSCAR_PAGE_TOKENS, pages = oscar_pages_of((uint32_t)end) - first_page;
    _cleanup_free_ uint8_t **on_heap = NULL;
    if (pages > PAGES_ON_STACK) {
        on_heap = address = malloc(pages * sizeof(*on_heap));
        if (on_heap == NULL)
            return oscar_fail(oscar_detail(), OSCAR_ERR_NO_MEMORY, "no memory for %" PRIu32 " pages", pages);
    }
    for (uint32_t i = 0; i < pages; i++)
        address[i] = page_address(seq, first_page + i);
    int64_t skipped = (int64_t)begin - first;
    const struct oscar_store_args args = {
        .geometry = geometry,
        .calibration = seq->model->memory->calibration,
        .layer = layer,
        .tokens = (uint32_t)end - begin,
        .first_row = begin % OSCAR_PAGE_TOKENS,
        .pages = address,
        .k = {(const uint16_t *)k->data + skipped * k->token_stride, k->token_stride, k->head_stride},
        .v = {(const uint16_t *)v->data + skipped * v->token_stride, v->token_stride, v->head_stride}};
    oscar_seq_touch(seq);
    struct oscar_attachment *attachment = seq->model->client->attachment;
    struct oscar_stream_impl *queue;
    r = oscar_queue_begin(attachment, stream, &queue);
    if (r < 0)
        return r;
    r = attachment->ops->store(queue, &args);
    oscar_queue_end(attachment, queue);
    return r < 0 ? oscar_work_failed(attachment, r, "store of positions %" PRIu32 " to %" PRIu64 ", layer %" PRIu32,
                                     begin, end - 1, layer)
                 : 0;
}

int oscar_seq_rows(struct oscar_seq *seq, uint32_t layer, uint32_t kv_head, uint32_t position, void **ret_k,
                   void **ret_v, uint32_t *ret_rows) {
    int r = oscar_seq_check(seq);
    if (r < 0)
        return r;
    const struct oscar_geometry *geometry = &seq->model->info.geometry;
    if (layer >= geometry->layers || kv_head >= geometry->kv_heads || ret_k == NULL || ret_v == NULL ||
        ret_rows == NULL)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID,
                          "layer %" PRIu32 " of %" PRIu32 ", KV head %" PRIu32 " of %" PRIu32, layer, geometry->layers,
                          kv_head, geometry->kv_heads);
    if (position < seq->committed)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID,
                          "position %" PRIu32 " is committed: %" PRIu32 " tokens are", position, seq->committed);
    if (position >= seq->reserved)
        return oscar_fail(oscar_detail(), OSCAR_ERR_NO_SPACE, "position %" PRIu32 ", reserved are %" PRIu32 " tokens",
                          position, seq->reserved);
    oscar_seq_touch(seq);
    uint32_t row = position % OSCAR_PAGE_TOKENS, rows = OSCAR_PAGE_TOKENS - row;
    size_t row_bytes = (size_t)geometry->head_dim * sizeof(uint16_t);
    uint8_t *record = page_address(seq, position / OSCAR_PAGE_TOKENS) +
                      ((size_t)layer * geometry->kv_heads + kv_head) * oscar_dense_record_bytes(geometry->head_dim);
    *ret_k = record + row * row_bytes;
    *ret_v = record + (OSCAR_PAGE_TOKENS + row) * row_bytes;
    *ret_rows = rows < seq->reserved - position ? rows : seq->reserved - position;
    return 0;
}
