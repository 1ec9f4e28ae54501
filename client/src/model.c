/* SPDX-License-Identifier: Apache-2.0 */
#include "client/src/model.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client/src/batch.h"
#include "client/src/detail.h"
#include "client/src/lease.h"
#include "client/src/options.h"
#include "client/src/seq.h"
#include "proto/cleanup.h"

void oscar_geometry_init(struct oscar_geometry *geometry, uint32_t layers, uint32_t query_heads, uint32_t kv_heads,
                         uint32_t head_dim, uint32_t dtype) {
    *geometry = (struct oscar_geometry){.layers = layers,
                                        .query_heads = query_heads,
                                        .kv_heads = kv_heads,
                                        .head_dim = head_dim,
                                        .dtype = dtype,
                                        .page_tokens = OSCAR_PAGE_TOKENS,
                                        .sink_tokens = OSCAR_SINK_TOKENS,
                                        .recent_tokens = OSCAR_RECENT_TOKENS};
}

int oscar_model_check(const struct oscar_model *model) {
    return model != NULL ? oscar_client_check(model->client)
                         : oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "model: NULL");
}

/* --- what enqueued work reads ------------------------------------------------------------------------------------- */

struct oscar_model_memory *oscar_model_memory_ref(struct oscar_model_memory *memory) {
    atomic_fetch_add_explicit(&memory->references, 1, memory_order_relaxed);
    return memory;
}

void oscar_model_memory_unref(struct oscar_model_memory *memory) {
    if (memory == NULL || atomic_fetch_sub_explicit(&memory->references, 1, memory_order_acq_rel) != 1)
        return;
    if (memory->loaded) {
        const struct oscar_attachment *attachment = memory->mapping->attachment;
        attachment->ops->calibration_unload(attachment->device, memory->calibration);
    }
    oscar_calibration_free(memory->calibration);
    if (memory->file != NULL)
        (void)munmap(memory->file, memory->file_bytes);
    if (memory->turns != NULL)
        (void)munmap(memory->turns, memory->turns_bytes);
    oscar_mapping_unref(memory->mapping);
    free(memory);
}

static void cleanup_memory(struct oscar_model_memory **memory) { oscar_model_memory_unref(*memory); }

/* The descriptors of the reply: the calibration file unless it is the default, then the turn tables if it has some. */
static int map_calibration(const struct oscar_call *call, struct oscar_model_memory *memory) {
    const struct oscar_reply *reply = &call->reply;
    unsigned expected = (reply->model_open.calibration_bytes > 0) + (reply->model_open.turns_bytes > 0), next = 0;
    if (call->fds != expected || reply->model_open.calibration_bytes > SIZE_MAX ||
        reply->model_open.turns_bytes > SIZE_MAX)
        return oscar_fail(oscar_detail(), OSCAR_ERR_PROTOCOL, "model_open: %u descriptors where %u are expected",
                          call->fds, expected);
    int r = 0;
    if (reply->model_open.calibration_bytes > 0) {
        memory->file_bytes = reply->model_open.calibration_bytes;
        r = oscar_map_descriptor(call->fd[next++], memory->file_bytes, PROT_READ, "calibration", &memory->file);
    }
    if (r == 0 && reply->model_open.turns_bytes > 0) {
        memory->turns_bytes = reply->model_open.turns_bytes;
        r = oscar_map_descriptor(call->fd[next], memory->turns_bytes, PROT_READ, "turn tables", &memory->turns);
    }
    return r;
}

static int read_calibration(const struct oscar_call *call, const struct oscar_geometry *geometry,
                            struct oscar_model_memory *memory) {
    const struct oscar_reply *reply = &call->reply;
    struct oscar_cause *detail = oscar_detail();
    int r = memory->file != NULL
                ? oscar_calibration_parse(memory->file, memory->file_bytes, geometry, 0, &memory->calibration, detail)
                : oscar_calibration_default(geometry, &memory->calibration, detail);
    if (r < 0)
        return r;
    if (memcmp(&memory->calibration->digest, &reply->model_open.calibration_digest,
               sizeof(memory->calibration->digest)) != 0)
        return oscar_fail(detail, OSCAR_ERR_PROTOCOL, "the calibration that came is not the one that the daemon names");
    if (memory->calibration->frequencies == 0)
        return 0;
    uint32_t pages = reply->model_open.turns_pages;
    if (pages == 0 || memory->turns == NULL || oscar_turns_bytes(memory->calibration, pages) > memory->turns_bytes)
        return oscar_fail(detail, OSCAR_ERR_PROTOCOL, "turn tables of %zu bytes for %" PRIu32 " pages",
                          memory->turns_bytes, pages);
    r = oscar_calibration_attach_turns(memory->calibration, memory->turns, memory->turns_bytes, pages);
    return r < 0 ? oscar_fail(detail, r, "turn tables of %zu bytes do not fit the calibration", memory->turns_bytes)
                 : 0;
}

static int load_calibration(const struct oscar_geometry *geometry, struct oscar_model_memory *memory) {
    const struct oscar_attachment *attachment = memory->mapping->attachment;
    int r = attachment->ops->calibration_load(attachment->device, geometry, memory->calibration, oscar_detail());
    memory->loaded = r == 0;
    return r;
}

/* --- opening ------------------------------------------------------------------------------------------------------ */

/*
 * What the receiver needs to register the mapping before the notices that follow the reply. It stays with the call, and so does
 * the mapping, until the daemon has answered the MODEL_CLOSE that undoes the open: should another thread open the same model
 * while that is under way, the daemon may count it as open all the time and announce none of its chunks again.
 */
struct opening {
    struct oscar_client *client;
    struct oscar_geometry geometry;
    struct oscar_mapping *mapping;
    int error;
    struct oscar_cause cause;
};

static void model_arrived(struct oscar_call *call) {
    struct opening *opening = call->arg;
    opening->error = oscar_mapping_open(&opening->client->mappings, opening->client->attachment, &opening->geometry,
                                        &call->reply, &opening->mapping, &opening->cause);
}

static void opening_dispose(struct oscar_call *call) {
    struct opening *opening = call->arg;
    if (opening->mapping != NULL)
        oscar_mapping_close(&opening->client->mappings, opening->mapping);
    free(opening);
}

static bool model_undo(struct oscar_call *call) {
    uint64_t model = call->reply.model_open.model;
    call->request.verb = OSCAR_MODEL_CLOSE;
    call->request.model_close.model = model;
    return true;
}

static int put_name(char ret[OSCAR_NAME_BYTES], const char *text, const char *field) {
    if (text == NULL || text[0] == '\0')
        return oscar_fail(oscar_detail(), OSCAR_ERR_IDENTITY, "%s is required", field);
    if (strlen(text) >= OSCAR_NAME_BYTES)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "%s has %zu bytes: at most %u", field, strlen(text),
                          OSCAR_NAME_BYTES - 1);
    (void)snprintf(ret, OSCAR_NAME_BYTES, "%s", text);
    return 0;
}

static int fill_identity(const struct oscar_model_options *options, struct oscar_request *request) {
    struct oscar_identity *identity = &request->model_open.identity;
    if (options->weights_digest == NULL || options->rope_digest == NULL)
        return oscar_fail(oscar_detail(), OSCAR_ERR_IDENTITY, "%s is required",
                          options->weights_digest == NULL ? "weights_digest" : "rope_digest");
    identity->format = OSCAR_IDENTITY_FORMAT;
    identity->layout = OSCAR_LAYOUT_ID;
    identity->geometry = options->geometry;
    identity->shard_rank = options->shard_rank;
    identity->shard_size = options->shard_size > 0 ? options->shard_size : 1;
    memcpy(identity->weights.bytes, options->weights_digest, sizeof(identity->weights.bytes));
    memcpy(identity->rope.bytes, options->rope_digest, sizeof(identity->rope.bytes));
    int r = oscar_geometry_check(&options->geometry, oscar_detail());
    if (r == 0)
        r = put_name(identity->revision, options->revision, "revision");
    if (r == 0)
        r = put_name(identity->adapter, options->adapter != NULL ? options->adapter : "none", "adapter");
    if (r == 0)
        r = put_name(request->model_open.calibration, options->calibration != NULL ? options->calibration : "default",
                     "calibration");
    return r;
}

static void fill_info(struct oscar_model *model, const struct oscar_geometry *geometry,
                      const struct oscar_reply *reply) {
    struct oscar_model_info *info = &model->info;
    info->size = sizeof(*info);
    info->geometry = *geometry;
    memcpy(info->model_digest, reply->model_open.model_digest.bytes, sizeof(info->model_digest));
    memcpy(info->calibration_digest, reply->model_open.calibration_digest.bytes, sizeof(info->calibration_digest));
    info->dense_page_bytes = oscar_dense_page_bytes(geometry);
    info->packed_page_bytes = oscar_packed_page_bytes(geometry);
    const struct oscar_turns *turns = &model->memory->calibration->turns;
    model->max_tokens = OSCAR_MAX_SEQUENCE_TOKENS;
    if (turns->frequencies > 0 && turns->pages < OSCAR_MAX_SEQUENCE_PAGES)
        model->max_tokens = turns->pages * OSCAR_PAGE_TOKENS;
}

/* The chunks come right behind the reply, so that none has to wait for it with its descriptor open; and the answer to this comes
 * behind them. Whoever has a model open then finds all of it mapped. */
static int await_chunks(struct oscar_client *client, uint64_t deadline) {
    _cleanup_call_ struct oscar_call *ping = oscar_call_new(client->connection, OSCAR_PING);
    if (ping == NULL)
        return OSCAR_ERR_NO_MEMORY;
    int r = oscar_call_run(ping, deadline);
    return r == OSCAR_ERR_TIMEOUT ? oscar_fail(oscar_detail(), r, "model_open: not all chunks came in time") : r;
}

/* Sends the request and waits. On success the mapping is in `memory`; the call still undoes the open when it is released. */
static int ask(struct oscar_client *client, struct oscar_call *call, struct oscar_model_memory *memory) {
    struct opening *opening = calloc(1, sizeof(*opening));
    if (opening == NULL)
        return oscar_fail(oscar_detail(), OSCAR_ERR_NO_MEMORY, "no memory for a model");
    *opening = (struct opening){.client = client, .geometry = call->request.model_open.identity.geometry};
    call->arg = opening;
    call->arrived = model_arrived;
    call->undo = model_undo;
    call->dispose = opening_dispose;
    uint64_t deadline = oscar_client_deadline(client);
    int r = oscar_call_run(call, deadline);
    if (r < 0)
        return r;
    if (opening->error < 0)
        return oscar_fail(oscar_detail(), opening->error, "%s", opening->cause.text);
    r = await_chunks(client, deadline);
    if (r < 0)
        return r;
    memory->mapping = oscar_mapping_ref(opening->mapping);
    return 0;
}

int oscar_model_open(struct oscar_client *client, const struct oscar_model_options *options,
                     struct oscar_model **ret_model) {
    int r = oscar_client_check(client);
    if (r < 0)
        return r;
    struct oscar_model_options given;
    r = oscar_options_read(options, offsetof(struct oscar_model_options, calibration), sizeof(given),
                           "oscar_model_options", &given);
    if (r < 0)
        return r;
    _cleanup_(cleanup_memory) struct oscar_model_memory *memory = calloc(1, sizeof(*memory));
    if (memory != NULL)
        atomic_init(&memory->references, 1);
    _cleanup_free_ struct oscar_model *model = calloc(1, sizeof(*model));
    if (memory == NULL || model == NULL)
        return oscar_fail(oscar_detail(), OSCAR_ERR_NO_MEMORY, "no memory for a model");
    _cleanup_call_ struct oscar_call *call = oscar_call_new(client->connection, OSCAR_MODEL_OPEN);
    if (call == NULL)
        return OSCAR_ERR_NO_MEMORY;
    r = fill_identity(&given, &call->request);
    if (r == 0)
        r = ask(client, call, memory);
    if (r == 0)
        r = map_calibration(call, memory);
    if (r == 0)
        r = read_calibration(call, &given.geometry, memory);
    if (r == 0)
        r = load_calibration(&given.geometry, memory);
    if (r < 0)
        return r;

    model->client = client;
    model->memory = TAKE_PTR(memory);
    fill_info(model, &given.geometry, &call->reply);
    model->closing = TAKE_PTR(call);
    pthread_mutex_lock(&client->lock);
    model->next = client->models;
    client->models = model;
    pthread_mutex_unlock(&client->lock);
    *ret_model = TAKE_PTR(model);
    return 0;
}

/* --- closing ------------------------------------------------------------------------------------------------------ */

static void unlink_model(struct oscar_model *model) {
    pthread_mutex_lock(&model->client->lock);
    struct oscar_model **link = &model->client->models;
    while (*link != model)
        link = &(*link)->next;
    *link = model->next;
    pthread_mutex_unlock(&model->client->lock);
}

void oscar_model_end(struct oscar_model *model, uint64_t deadline) {
    while (!LIST_EMPTY(&model->batches))
        oscar_batch_end(LIST_FIRST(&model->batches));
    while (!LIST_EMPTY(&model->seqs))
        oscar_seq_end(LIST_FIRST(&model->seqs), deadline);
    while (!LIST_EMPTY(&model->leases))
        oscar_lease_end(LIST_FIRST(&model->leases), deadline);
    unlink_model(model);
    oscar_call_undo(model->closing, deadline);
    oscar_model_memory_unref(model->memory);
    free(model);
}

void oscar_model_close(struct oscar_model *model) {
    if (model != NULL && getpid() == model->client->pid)
        oscar_model_end(model, oscar_client_deadline(model->client));
}

/* --- looking ------------------------------------------------------------------------------------------------------ */

int oscar_model_info(const struct oscar_model *model, struct oscar_model_info *ret_info) {
    int r = oscar_model_check(model);
    return r < 0 ? r : oscar_info_write(&model->info, sizeof(model->info), "oscar_model_info", ret_info);
}

int oscar_model_rotation(const struct oscar_model *model, uint32_t layer, uint32_t kv_head, unsigned side,
                         float *ret_matrix) {
    int r = oscar_model_check(model);
    if (r < 0)
        return r;
    const struct oscar_geometry *geometry = &model->info.geometry;
    if (layer >= geometry->layers || kv_head >= geometry->kv_heads || side > 1 || ret_matrix == NULL)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID,
                          "layer %" PRIu32 " of %" PRIu32 ", KV head %" PRIu32 " of %" PRIu32 ", side %u of 2", layer,
                          geometry->layers, kv_head, geometry->kv_heads, side);
    const struct oscar_head_calibration *head = oscar_calibration_head(model->memory->calibration, layer, kv_head);
    const float *matrix = side == 0 ? head->rotation_k : head->rotation_v;
    size_t d = geometry->head_dim;
    if (matrix != NULL) {
        memcpy(ret_matrix, matrix, d * d * sizeof(*matrix));
        return 0;
    }
    float scale = (float)(1.0 / sqrt((double)d));
    for (size_t i = 0; i < d;
         i++) /* the Sylvester matrix: an entry's sign is the parity of the bits that i and j share */
        for (size_t j = 0; j < d; j++)
            ret_matrix[i * d + j] = __builtin_parityll(i & j) != 0 ? -scale : scale;
    return 0;
}
