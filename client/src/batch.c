/* SPDX-License-Identifier: Apache-2.0 */
#include "client/src/batch.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "client/src/detail.h"
#include "client/src/options.h"
#include "client/src/seq.h"
#include "proto/cleanup.h"

/* --- opening and closing ------------------------------------------------------------------------------------------ */

static void batch_free(void *thing) {
    struct oscar_batch *batch = thing;
    if (batch->impl != NULL)
        batch->memory->mapping->attachment->ops->batch_close(batch->impl);
    if (batch->memory != NULL)
        oscar_model_memory_unref(batch->memory);
    free(batch->retired);
    free(batch->item);
    free(batch);
}

static void cleanup_batch(struct oscar_batch **batch) {
    if (*batch != NULL)
        batch_free(*batch);
}

static void use_contiguous(int64_t *row_stride, int64_t *head_stride, uint32_t heads, uint32_t head_dim) {
    if (*head_stride == 0)
        *head_stride = head_dim;
    if (*row_stride == 0)
        *row_stride = (int64_t)heads * head_dim;
}

static int check_params(const struct oscar_batch_params *params, const struct oscar_model *model) {
    if (params->max_seqs == 0 || params->max_seqs > OSCAR_MAX_ATTEND_ITEMS || params->max_rows == 0 ||
        params->max_rows > model->max_tokens || params->max_tokens == 0 ||
        params->max_tokens > (uint64_t)params->max_seqs * model->max_tokens)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID,
                          "a batch of %" PRIu32 " sequences (of 1 to %u), %" PRIu32 " rows and %" PRIu64
                          " tokens: a sequence has at most %" PRIu32,
                          params->max_seqs, OSCAR_MAX_ATTEND_ITEMS, params->max_rows, params->max_tokens,
                          model->max_tokens);
    return 0;
}

static int make_batch(struct oscar_model *model, const struct oscar_batch_params *params, struct oscar_batch **ret) {
    size_t bytes = sizeof(struct oscar_batch) + params->max_seqs * sizeof(struct oscar_batch_place);
    _cleanup_(cleanup_batch) struct oscar_batch *batch = calloc(1, bytes);
    if (batch != NULL) {
        batch->retired = malloc(sizeof(*batch->retired));
        batch->item = calloc(params->max_seqs, sizeof(*batch->item));
    }
    if (batch == NULL || batch->retired == NULL || batch->item == NULL)
        return oscar_fail(oscar_detail(), OSCAR_ERR_NO_MEMORY, "no memory for a batch of %" PRIu32 " sequences",
                          params->max_seqs);
    batch->model = model;
    batch->params = *params;
    batch->memory = oscar_model_memory_ref(model->memory);
    atomic_init(&batch->stale, true);
    /* Each sequence's last page may be begun. */
    const struct oscar_batch_limits limits = {.items = params->max_seqs,
                                              .rows = params->max_rows,
                                              .pages = params->max_tokens / OSCAR_PAGE_TOKENS + params->max_seqs};
    const struct oscar_attachment *attachment = model->client->attachment;
    int r =
        attachment->ops->batch_open(attachment->device, &model->info.geometry, &limits, &batch->impl, oscar_detail());
    if (r < 0)
        return r;
    *ret = TAKE_PTR(batch);
    return 0;
}

int oscar_batch_open(struct oscar_model *model, const struct oscar_batch_params *params,
                     struct oscar_batch **ret_batch) {
    int r = oscar_model_check(model);
    if (r < 0)
        return r;
    struct oscar_batch_params given;
    r = oscar_options_read(params, sizeof(given), sizeof(given), "oscar_batch_params", &given);
    if (r == 0 && ret_batch == NULL)
        r = oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "ret_batch: NULL");
    if (r == 0)
        r = check_params(&given, model);
    if (r < 0)
        return r;
    const struct oscar_geometry *geometry = &model->info.geometry;
    use_contiguous(&given.q_row_stride, &given.q_head_stride, geometry->query_heads, geometry->head_dim);
    use_contiguous(&given.out_row_stride, &given.out_head_stride, geometry->query_heads, geometry->head_dim);
    use_contiguous(&given.k_row_stride, &given.k_head_stride, geometry->kv_heads, geometry->head_dim);
    use_contiguous(&given.v_row_stride, &given.v_head_stride, geometry->kv_heads, geometry->head_dim);
    struct oscar_batch *batch;
    r = make_batch(model, &given, &batch);
    if (r < 0)
        return r;
    pthread_mutex_lock(&model->client->lock);
    LIST_INSERT_HEAD(&model->batches, batch, in_model);
    pthread_mutex_unlock(&model->client->lock);
    *ret_batch = batch;
    return 0;
}

static void leave_sequences(struct oscar_batch *batch) {
    for (uint32_t i = 0; i < batch->places; i++)
        if (batch->place[i].seq != NULL)
            LIST_REMOVE(&batch->place[i], in_seq);
    batch->places = 0;
}

void oscar_batch_end(struct oscar_batch *batch) {
    struct oscar_client *client = batch->model->client;
    pthread_mutex_lock(&client->lock);
    LIST_REMOVE(batch, in_model);
    pthread_mutex_unlock(&client->lock);
    leave_sequences(batch);
    struct oscar_stream *stream = batch->stream;
    oscar_retire(client->attachment, stream, TAKE_PTR(batch->retired), batch_free, batch);
    oscar_stream_unref(stream);
    oscar_retired_sweep(client->attachment);
}

void oscar_batch_close(struct oscar_batch *batch) {
    if (batch != NULL && getpid() == batch->model->client->pid)
        oscar_batch_end(batch);
}

/* --- what makes it stale ------------------------------------------------------------------------------------------ */

void oscar_seq_overtake(struct oscar_seq *seq) {
    struct oscar_batch_place *place;
    LIST_FOREACH(place, &seq->places, in_seq)
    atomic_store_explicit(&place->batch->stale, true, memory_order_relaxed);
}

void oscar_seq_leave_batches(struct oscar_seq *seq) {
    oscar_seq_overtake(seq);
    while (!LIST_EMPTY(&seq->places)) {
        struct oscar_batch_place *place = LIST_FIRST(&seq->places);
        LIST_REMOVE(place, in_seq);
        place->seq = NULL;
    }
}

/* --- setting ------------------------------------------------------------------------------------------------------ */

static int check_batch(const struct oscar_batch *batch) {
    return batch != NULL ? oscar_model_check(batch->model)
                         : oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "batch: NULL");
}

static int use_stream(struct oscar_batch *batch, struct oscar_stream *stream) {
    if (stream == batch->stream)
        return 0;
    if (stream != NULL && stream->attachment != batch->model->client->attachment)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "the stream was opened by another client");
    oscar_stream_unref(batch->stream);
    batch->stream = oscar_stream_ref(stream);
    return 0;
}

static uint32_t tokens_of(const struct oscar_batch_entry *entry) {
    return entry->tokens > 0 ? entry->tokens : entry->seq->committed + entry->rows;
}

static bool is_storable(const struct oscar_batch_entry *entry) {
    return entry->rows == 0 || tokens_of(entry) - entry->rows >= entry->seq->committed;
}

static int check_entry(const struct oscar_batch *batch, const struct oscar_batch_entry *entry, uint32_t index) {
    if (entry->seq == NULL)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "entry %" PRIu32 ": seq: NULL", index);
    if (entry->rows > batch->params.max_rows)
        return oscar_fail(oscar_detail(), OSCAR_ERR_LIMIT, "entry %" PRIu32 ": %" PRIu32 " rows, opened for %" PRIu32,
                          index, entry->rows, batch->params.max_rows);
    int r = oscar_seq_check_query(entry->seq, batch->model, tokens_of(entry), entry->rows, index);
    if (r == 0 && batch->stores && !is_storable(entry))
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID,
                          "entry %" PRIu32 ": its rows begin at position %" PRIu32 ", and %" PRIu32
                          " tokens are committed: a batch that stores writes uncommitted ones only",
                          index, tokens_of(entry) - entry->rows, entry->seq->committed);
    return r;
}

static int check_entries(const struct oscar_batch *batch, const struct oscar_batch_entry *entries, uint32_t count) {
    if (entries == NULL && count > 0)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "entries: NULL");
    if (count > batch->params.max_seqs)
        return oscar_fail(oscar_detail(), OSCAR_ERR_LIMIT, "%" PRIu32 " sequences, the batch was opened for %" PRIu32,
                          count, batch->params.max_seqs);
    uint64_t tokens = 0;
    for (uint32_t i = 0; i < count; i++) {
        int r = check_entry(batch, &entries[i], i);
        if (r < 0)
            return r;
        tokens += tokens_of(&entries[i]);
    }
    if (tokens > batch->params.max_tokens)
        return oscar_fail(oscar_detail(), OSCAR_ERR_LIMIT, "%" PRIu64 " tokens, the batch was opened for %" PRIu64,
                          tokens, batch->params.max_tokens);
    return 0;
}

static struct oscar_batch_item make_item(const struct oscar_batch *batch, const struct oscar_batch_entry *entry,
                                         uint32_t first_row) {
    const struct oscar_batch_params *params = &batch->params;
    int64_t first = first_row;
    return (struct oscar_batch_item){.pages = entry->seq->pages.table->entry,
                                     .tokens = tokens_of(entry),
                                     .rows = entry->rows,
                                     .q_offset = first * params->q_row_stride,
                                     .q_row_stride = params->q_row_stride,
                                     .q_head_stride = params->q_head_stride,
                                     .out_offset = first * params->out_row_stride,
                                     .out_row_stride = params->out_row_stride,
                                     .out_head_stride = params->out_head_stride,
                                     .lse_offset = first * batch->model->info.geometry.query_heads,
                                     .k_offset = first * params->k_row_stride,
                                     .v_offset = first * params->v_row_stride};
}

static void touch_sequences(const struct oscar_batch *batch) {
    for (uint32_t i = 0; i < batch->places; i++)
        if (batch->place[i].seq != NULL)
            oscar_seq_touch(batch->place[i].seq);
}

static int update(struct oscar_batch *batch, const struct oscar_batch_entry *entries, uint32_t count) {
    leave_sequences(batch);
    batch->storable = true;
    uint32_t rows = 0;
    for (uint32_t i = 0; i < count; i++) {
        batch->item[i] = make_item(batch, &entries[i], rows);
        batch->storable = batch->storable && is_storable(&entries[i]);
        rows += entries[i].rows;
    }
    struct oscar_arena_view arenas[OSCAR_FORMS];
    oscar_mapping_view(batch->memory->mapping, arenas);
    struct oscar_attachment *attachment = batch->model->client->attachment;
    struct oscar_stream_impl *queue;
    int r = oscar_queue_begin(attachment, batch->stream, &queue);
    if (r < 0)
        return r;
    r = attachment->ops->batch_update(queue, batch->impl, arenas, batch->item, count);
    oscar_queue_end(attachment, queue);
    if (r < 0)
        return oscar_work_failed(attachment, r, "batch of %" PRIu32 " sequences", count);
    for (uint32_t i = 0; i < count; i++) {
        batch->place[i] = (struct oscar_batch_place){.batch = batch, .seq = entries[i].seq};
        LIST_INSERT_HEAD(&entries[i].seq->places, &batch->place[i], in_seq);
    }
    batch->places = count;
    return 0;
}

int oscar_batch_set(struct oscar_batch *batch, struct oscar_stream *stream, const struct oscar_batch_entry *entries,
                    uint32_t count) {
    int r = check_batch(batch);
    if (r == 0)
        r = check_entries(batch, entries, count);
    if (r == 0)
        r = use_stream(batch, stream);
    for (uint32_t i = 0; r == 0 && i < count; i++)
        r = oscar_seq_use_stream(entries[i].seq, stream);
    if (r < 0)
        return r;
    for (uint32_t i = 0; i < count; i++)
        if (entries[i].seq->failed == 0)
            oscar_seq_refresh(entries[i].seq);
    atomic_store_explicit(&batch->stale, true, memory_order_relaxed);
    r = update(batch, entries, count);
    if (r < 0)
        return r;
    atomic_store_explicit(&batch->stale, false, memory_order_relaxed);
    if (batch->stores)
        touch_sequences(batch);
    return 0;
}

/* --- the work of a step ------------------------------------------------------------------------------------------- */

static int begin(struct oscar_batch *batch, struct oscar_stream *stream, uint32_t layer,
                 struct oscar_stream_impl **ret) {
    int r = check_batch(batch);
    if (r < 0)
        return r;
    const struct oscar_geometry *geometry = &batch->model->info.geometry;
    if (layer >= geometry->layers)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "layer %" PRIu32 " of %" PRIu32, layer, geometry->layers);
    if (atomic_load_explicit(&batch->stale, memory_order_relaxed))
        return oscar_fail(oscar_detail(), OSCAR_ERR_STATE,
                          "the batch is stale: call oscar_batch_set after the last other call on its sequences");
    r = use_stream(batch, stream);
    return r < 0 ? r : oscar_queue_begin(batch->model->client->attachment, stream, ret);
}

static int end(const struct oscar_batch *batch, const struct oscar_stream_impl *queue, int r, const char *what,
               uint32_t layer) {
    struct oscar_attachment *attachment = batch->model->client->attachment;
    oscar_queue_end(attachment, queue);
    return r < 0 ? oscar_work_failed(attachment, r, "%s, layer %" PRIu32, what, layer) : 0;
}

int oscar_batch_store(struct oscar_batch *batch, struct oscar_stream *stream, uint32_t layer, const void *k,
                      const void *v) {
    if (k == NULL || v == NULL)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "K or V: NULL");
    struct oscar_stream_impl *queue;
    int r = begin(batch, stream, layer, &queue);
    if (r < 0)
        return r;
    if (!batch->storable) {
        oscar_queue_end(batch->model->client->attachment, queue);
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID,
                          "some rows of the batch are committed: what is computed again goes through oscar_seq_store");
    }
    batch->stores = true;
    touch_sequences(batch);
    const struct oscar_batch_params *params = &batch->params;
    const struct oscar_batch_store_args args = {.calibration = batch->memory->calibration,
                                                .layer = layer,
                                                .k = {k, params->k_row_stride, params->k_head_stride},
                                                .v = {v, params->v_row_stride, params->v_head_stride}};
    r = oscar_model_ops(batch->model)->batch_store(queue, batch->impl, &args);
    return end(batch, queue, r, "batch store", layer);
}

int oscar_batch_attend(struct oscar_batch *batch, struct oscar_stream *stream, uint32_t layer, float softmax_scale,
                       const void *q, void *out, float *lse) {
    if (q == NULL || out == NULL || !isfinite(softmax_scale))
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "q or out: NULL, or a softmax_scale that is not finite");
    struct oscar_stream_impl *queue;
    int r = begin(batch, stream, layer, &queue);
    if (r < 0)
        return r;
    const float usual = 1.0F / sqrtf((float)batch->model->info.geometry.head_dim);
    const struct oscar_batch_attend_args args = {.calibration = batch->memory->calibration,
                                                 .layer = layer,
                                                 .softmax_scale = softmax_scale != 0 ? softmax_scale : usual,
                                                 .q = q,
                                                 .out = out,
                                                 .lse = lse};
    r = oscar_model_ops(batch->model)->batch_attend(queue, batch->impl, &args);
    return end(batch, queue, r, "batch attend", layer);
}
