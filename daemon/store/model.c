/* SPDX-License-Identifier: Apache-2.0 */
#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "daemon/store/state.h"
#include "proto/cleanup.h"
#include "proto/geometry.h"

static void calibration_cleanup(struct oscar_calibration **calibration) { oscar_calibration_free(*calibration); }

struct store_model *model_find(const struct store *store, const struct oscar_digest *digest) {
    for (uint32_t i = 0; i < store->models.capacity; i++) {
        struct store_model *model = model_at(store, i);
        if (model && memcmp(&model->digest, digest, sizeof *digest) == 0)
            return model;
    }
    return NULL;
}

static void load_run(struct pool_job *job, void *context) {
    (void)context;
    struct calibration_job *load = (struct calibration_job *)job;
    load->result = load->ops->calibration_load(load->device, &load->geometry, load->calibration, &load->cause);
}

static void unload_run(struct pool_job *job, void *context) {
    (void)context;
    struct calibration_job *unload = (struct calibration_job *)job;
    unload->ops->calibration_unload(unload->device, unload->calibration);
}

bool model_is_job(const struct pool_job *job) { return job->run == load_run || job->run == unload_run; }

void model_finished(struct pool_job *job) {
    struct calibration_job *done = (struct calibration_job *)job;
    if (done->job.run == unload_run) {
        oscar_calibration_free(done->calibration);
        free(done);
        return;
    }
    struct store_model *model = done->model;
    struct store *store = model->store;
    store_note_failure(store, done->result, "loading a calibration", &done->cause);
    model->state = done->result == 0 ? MODEL_READY : MODEL_REFUSED;
    model->failure = done->result;
    model->cause = done->cause;
    if (store->options.hooks.models_changed)
        store->options.hooks.models_changed(store->options.hooks.arg);
}

/* The model has one job, made with it: so nothing can fail when the calibration goes. */
static void model_load(struct store_model *model) {
    model->state = MODEL_LOADING;
    model->work->job.run = load_run;
    pool_submit(model->store->pool, &model->work->job, POOL_MEMORY);
}

void model_free(struct store_model *model) {
    struct store *store = model->store;
    assert(model->nodes == 0 && LIST_EMPTY(&model->seqs) && model->state != MODEL_LOADING);
    for (unsigned form = 0; form < OSCAR_FORMS; form++)
        arena_close(&model->arena[form]);
    if (model->state == MODEL_READY) {
        model->work->job.run = unload_run;
        pool_submit(store->pool, &model->work->job, POOL_MEMORY);
    } else {
        oscar_calibration_free(model->work->calibration);
        free(model->work);
    }
    oscar_cleanup_close(&model->calibration_fd);
    oscar_cleanup_close(&model->turns_fd);
    __atomic_store_n(&store->meta.model[model->index].state, 0U, __ATOMIC_RELEASE);
    handle_give(&store->models, model->handle);
    free(model);
}

/* Nothing is cached of it, nobody has it open, and nothing is on its way for it. */
static bool is_idle(const struct store *store, const struct store_model *model) {
    bool idle = model->nodes == 0 && LIST_EMPTY(&model->seqs) && model->state != MODEL_LOADING;
    for (unsigned form = 0; form < OSCAR_FORMS; form++)
        idle = idle && model->arena[form].making == 0;
    const struct store_client *client;
    const struct binding *binding;
    LIST_FOREACH(client, &store->clients, in_store) {
        LIST_FOREACH(binding, &client->bindings, in_client) { idle = idle && binding->model != model; }
    }
    return idle;
}

/* Room for one more: a model that nobody has open and of which nothing is cached is forgotten. */
static int make_room(struct store *store, struct oscar_cause *cause) {
    if (store->models.capacity < META_MAX_MODELS || store->models.frees > 0)
        return 0;
    for (uint32_t i = 0; i < store->models.capacity; i++) {
        struct store_model *model = model_at(store, i);
        if (is_idle(store, model)) {
            model_free(model);
            return 0;
        }
    }
    return oscar_fail(cause, OSCAR_ERR_LIMIT, "all %u models are in use", META_MAX_MODELS);
}

static uint64_t fd_bytes(int fd) {
    struct stat st;
    return fd >= 0 && fstat(fd, &st) == 0 ? (uint64_t)st.st_size : 0;
}

static uint64_t chain_root(const struct store *store, const struct oscar_digest *digest) {
    /* The digest is a hash already; the page hashes bring in the secret. */
    uint64_t root;
    memcpy(&root, digest->bytes, sizeof root);
    return root ^ store->options.hash_seed;
}

/* Takes the calibration if it succeeds. */
static int model_new(struct store *store, const struct oscar_identity *identity, const struct oscar_digest *digest,
                     struct oscar_calibration *calibration, struct store_model **ret, struct oscar_cause *cause) {
    int r = make_room(store, cause);
    if (r < 0)
        return r;

    struct arena_shape shape[OSCAR_FORMS];
    uint64_t together = 0;
    for (unsigned form = 0; form < OSCAR_FORMS; form++) {
        uint64_t bytes = form == OSCAR_FORM_PACKED ? oscar_packed_page_bytes(&identity->geometry)
                                                   : oscar_dense_page_bytes(&identity->geometry);
        r = arena_shape_for(&store->memory, (enum oscar_form)form, bytes, &shape[form], cause);
        if (r < 0)
            return r;
        together += shape[form].stride * shape[form].chunk_pages;
    }
    if (together > store->options.budget_bytes)
        return oscar_fail(cause, OSCAR_ERR_NO_SPACE, "one chunk of each form needs %llu bytes, the budget is %llu",
                          (unsigned long long)together, (unsigned long long)store->options.budget_bytes);

    _cleanup_free_ struct store_model *model = calloc(1, sizeof *model);
    _cleanup_free_ struct calibration_job *work = calloc(1, sizeof *work);
    if (!model || !work)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a model");
    r = handle_take(&store->models, model, &model->handle, cause);
    if (r < 0)
        return r;
    model->store = store;
    model->index = (uint32_t)model->handle;
    model->identity = *identity;
    model->digest = *digest;
    model->calibration_fd = model->turns_fd = -1;
    model->root_chain = chain_root(store, digest);
    LIST_INIT(&model->seqs);
    model->calibration = calibration;
    *work = (struct calibration_job){
        .ops = store->options.ops,
        .device = store->options.device,
        .model = model,
        .geometry = identity->geometry,
        .calibration = calibration,
    };
    model->work = TAKE_PTR(work);
    for (unsigned form = 0; form < OSCAR_FORMS; form++) {
        arena_open(&model->arena[form], &store->memory, form, model->index, &shape[form]);
        share_open(&model->shared[form], 0);
    }

    struct meta_model *record = &store->meta.model[model->index];
    record->generation = (uint32_t)(model->handle >> 32);
    record->digest = *digest;
    record->identity = *identity;
    __atomic_store_n(&record->state, 1U, __ATOMIC_RELEASE);
    if (model->index >= store->meta.header->models)
        store->meta.header->models = model->index + 1;
    *ret = TAKE_PTR(model);
    return 0;
}

static struct binding *binding_find(const struct store_client *client, const struct store_model *model) {
    struct binding *binding = NULL;
    LIST_FOREACH(binding, &client->bindings, in_client) {
        if (binding->model == model)
            return binding;
    }
    return NULL;
}

int store_model_open(struct store *store, struct store_client *client, const struct oscar_identity *identity,
                     struct oscar_calibration *calibration_taken, int calibration_fd_taken, int turns_fd_taken,
                     struct oscar_reply *ret_reply, int ret_fd[2], unsigned *ret_fds, struct oscar_cause *cause) {
    _cleanup_(calibration_cleanup) struct oscar_calibration *calibration = calibration_taken;
    _cleanup_close_ int calibration_fd = calibration_fd_taken, turns_fd = turns_fd_taken;

    int r = oscar_identity_check(identity, cause);
    if (r < 0)
        return r;
    struct oscar_digest digest;
    oscar_model_digest(identity, &digest);
    struct store_model *model = model_find(store, &digest);
    if (!model && !calibration)
        return oscar_fail(cause, OSCAR_ERR_CALIBRATION, "the model is new and comes without a calibration");

    if (!model) {
        r = model_new(store, identity, &digest, calibration, &model, cause);
        if (r < 0)
            return r;
        TAKE_PTR(calibration);
        model->calibration_fd = TAKE_FD(calibration_fd);
        model->turns_fd = TAKE_FD(turns_fd);
        model->calibration_bytes = fd_bytes(model->calibration_fd);
        model->turns_bytes = fd_bytes(model->turns_fd);
        model_load(model);
    } else if (model->state == MODEL_REFUSED && calibration) {
        model_load(model);
    }
    if (model->state == MODEL_LOADING)
        return OSCAR_PARKED;
    if (model->state == MODEL_REFUSED)
        return oscar_fail(cause, model->failure, "%s", model->cause.text);

    struct binding *binding = binding_find(client, model);
    if (!binding) {
        binding = calloc(1, sizeof *binding);
        if (!binding)
            return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the client's view of the model");
        binding->model = model;
        share_open(&binding->dense, client->number);
        LIST_INSERT_HEAD(&client->bindings, binding, in_client);
    }
    if (binding->opens++ == 0)
        model->clients++;

    *ret_fds = 0;
    if (model->calibration_fd >= 0)
        ret_fd[(*ret_fds)++] = model->calibration_fd;
    if (model->turns_fd >= 0)
        ret_fd[(*ret_fds)++] = model->turns_fd;
    ret_reply->verb = OSCAR_MODEL_OPEN;
    ret_reply->model_open.model = model->handle;
    ret_reply->model_open.model_digest = model->digest;
    ret_reply->model_open.calibration_digest = model->identity.calibration;
    ret_reply->model_open.calibration_bytes = model->calibration_bytes;
    ret_reply->model_open.turns_bytes = model->turns_bytes;
    ret_reply->model_open.turns_pages = model->calibration->turns.pages;
    for (unsigned form = 0; form < OSCAR_FORMS; form++) {
        const struct arena_shape *shape = &model->arena[form].shape;
        ret_reply->model_open.arenas[form] = (struct oscar_arena_info){
            .page_bytes = shape->stride,
            .chunk_pages = shape->chunk_pages,
            .max_pages = (uint64_t)shape->max_chunks * shape->chunk_pages,
        };
    }
    return 0;
}

void store_model_announce(struct store *store, struct store_client *client, uint64_t handle) {
    struct binding *binding = NULL;
    if (model_get(store, client, handle, &binding, NULL) == 0)
        (void)client_announce_shared(client, binding, NULL);
}

int model_get(struct store *store, struct store_client *client, uint64_t handle, struct binding **ret,
              struct oscar_cause *cause) {
    int error;
    struct store_model *model = handle_get(&store->models, handle, &error);
    assert(model || error < 0);
    if (!model)
        return oscar_fail(cause, error, "no model 0x%llx", (unsigned long long)handle);
    struct binding *binding = binding_find(client, model);
    if (!binding || binding->opens == 0)
        return oscar_fail(cause, OSCAR_ERR_NOT_FOUND, "model 0x%llx is not open on this connection",
                          (unsigned long long)handle);
    *ret = binding;
    return 0;
}

int store_model_close(struct store *store, struct store_client *client, uint64_t handle, struct oscar_cause *cause) {
    struct binding *binding = NULL;
    int r = model_get(store, client, handle, &binding, cause);
    if (r < 0)
        return r;
    if (--binding->opens > 0)
        return 0;
    for (struct lease *lease = LIST_FIRST(&client->leases), *next; lease; lease = next) {
        next = LIST_NEXT(lease, in_client);
        if (lease->model == binding->model)
            lease_free(lease);
    }
    for (struct seq *seq = LIST_FIRST(&client->seqs), *next; seq; seq = next) {
        next = LIST_NEXT(seq, in_client);
        if (seq->model == binding->model && !seq->closing)
            seq_close(seq, seq->fence + 2);
    }
    binding->model->clients--;
    /* The process unmaps the model's ranges: should it come again, it must be told everything again. */
    for (unsigned form = 0; form < OSCAR_FORMS; form++) {
        if (binding->capacity[form] > 0)
            memset(binding->announced[form], 0, binding->capacity[form] * sizeof *binding->announced[form]);
        binding->epoch[form] = 0;
    }
    return 0;
}
