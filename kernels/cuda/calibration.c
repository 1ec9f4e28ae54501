/* SPDX-License-Identifier: Apache-2.0 */
/* A calibration's copy in device memory: one allocation with the heads, the turn tables and each head's matrices. */
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/backend.h"
#include "proto/cleanup.h"
#include "proto/half.h"

#define ALIGNMENT 256U

/* The copy as it is laid out and filled on the host. Without bytes it only measures. */
struct image {
    uint8_t *bytes;
    CUdeviceptr address; /* where it will lie */
    uint64_t used;
};

/* Appends `bytes` bytes from `source` and returns their device address; NULL stays NULL. */
static const void *append(struct image *image, const void *source, size_t bytes) {
    if (!source || bytes == 0)
        return NULL;
    uint64_t at = image->used;
    image->used += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (image->bytes)
        memcpy(image->bytes + at, source, bytes);
    return (const void *)(uintptr_t)(image->address + at);
}

static const void *append_centre_table(struct image *image, const struct oscar_turns *turns,
                                       const struct oscar_head_calibration *head) {
    uint32_t word[CUDA_CENTRE_TABLE_WORDS] = {0};
    if (head->pairs == 0)
        return NULL;
    for (uint32_t i = 0; i < CUDA_CENTRE_TABLE_WORDS; i++) {
        uint32_t part = i % 4, lane = i / 4 % 32, tile = i / 128 % 4, step = i / 512;
        uint32_t token = 16 * tile + lane / 4 + 8 * (part % 2), pair = 8 * step + lane % 4 + 4 * (part / 2);
        if (pair >= head->pairs)
            continue;
        const float *turn =
            turns->row_turn + 2 * ((size_t)token * turns->frequencies + (uint32_t)head->centre_pair[pair]);
        word[i] = oscar_half_from_float(turn[0]) | (uint32_t)oscar_half_from_float(turn[1]) << 16;
    }
    return append(image, word, sizeof(word));
}

static struct cuda_head append_head(struct image *image, const struct oscar_turns *turns,
                                    const struct oscar_head_calibration *head, uint32_t d) {
    size_t row = d * sizeof(float);
    struct cuda_head copy = {
        .rotation_k = append(image, head->rotation_k, d * row),
        .rotation_v = append(image, head->rotation_v, d * row),
        .feedback = append(image, head->feedback, d * row),
        .centre_static = append(image, head->centre_static, row),
        .centre_cos = append(image, head->centre_cos, head->pairs * row),
        .centre_sin = append(image, head->centre_sin, head->pairs * row),
        .centre_table = append_centre_table(image, turns, head),
        .pairs = head->pairs,
        .rank_k = head->rank_k,
        .rank_v = head->rank_v,
    };
    for (uint32_t i = 0; i < head->pairs; i++)
        copy.centre_pair[i] = head->centre_pair[i];
    return copy;
}

static void summarise(const struct oscar_calibration *calibration, uint32_t heads, struct cuda_calibration_view *view) {
    view->hadamard_k = view->hadamard_v = 1;
    for (uint32_t i = 0; i < heads; i++) {
        const struct oscar_head_calibration *head = &calibration->heads[i];
        view->max_pairs = head->pairs > view->max_pairs ? head->pairs : view->max_pairs;
        view->any_centre |= head->centre_static != NULL;
        view->any_feedback |= head->feedback != NULL;
        view->hadamard_k &= head->rotation_k == NULL;
        view->hadamard_v &= head->rotation_v == NULL;
    }
}

/* Lays the copy out and returns the view of it. */
static struct cuda_calibration_view lay_out(struct image *image, const struct oscar_calibration *calibration,
                                            struct cuda_head *heads) {
    uint32_t count = calibration->layers * calibration->kv_heads;
    const struct oscar_turns *turns = &calibration->turns;
    size_t turn = (size_t)turns->frequencies * 2 * sizeof(float);
    uint64_t heads_at = image->used;
    struct cuda_calibration_view view = {
        .heads = append(image, heads, count * sizeof(*heads)), /* its place; filled in below */
        .page_turn = append(image, turns->page_turn, turns->pages * turn),
        .row_turn = append(image, turns->row_turn, OSCAR_TURN_ROWS * turn),
        .layers = calibration->layers,
        .kv_heads = calibration->kv_heads,
        .head_dim = calibration->head_dim,
        .pages = turns->pages,
        .frequencies = turns->frequencies,
    };
    for (uint32_t i = 0; i < count; i++)
        heads[i] = append_head(image, turns, &calibration->heads[i], calibration->head_dim);
    if (image->bytes)
        memcpy(image->bytes + heads_at, heads, count * sizeof(*heads));
    summarise(calibration, count, &view);
    return view;
}

/* Inside cuda_enter. */
static int upload(struct oscar_device *device, const struct image *image, struct oscar_cause *cause) {
    int r = cuda_device_result(
        device, device->driver->cuMemcpyAsync(image->address, (CUdeviceptr)image->bytes, image->used, device->service),
        "cuMemcpyAsync of a calibration", cause);
    return r < 0 ? r : cuda_settle(device, device->service, "copying a calibration", cause);
}

/* Inside cuda_enter. */
static int copy_to_device(struct oscar_device *device, struct cuda_calibration *copy, struct oscar_cause *cause) {
    const struct oscar_calibration *host = copy->host;
    _cleanup_free_ struct cuda_head *heads = calloc((size_t)host->layers * host->kv_heads, sizeof(*heads));
    if (!heads)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a calibration's heads");
    struct image measured = {0};
    (void)lay_out(&measured, host, heads);
    _cleanup_free_ uint8_t *bytes = calloc(1, measured.used);
    if (!bytes)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a calibration's copy");
    int r = cuda_device_result(device, device->driver->cuMemAlloc(&copy->memory, measured.used),
                               "cuMemAlloc for a calibration", cause);
    if (r < 0)
        return r;
    struct image image = {.bytes = bytes, .address = copy->memory};
    copy->view = lay_out(&image, host, heads);
    r = upload(device, &image, cause);
    if (r < 0)
        (void)device->driver->cuMemFree(copy->memory);
    return r;
}

/* Under the lock. */
static struct cuda_calibration **find(struct oscar_device *device, const struct oscar_calibration *host) {
    struct cuda_calibration **at = &device->calibrations;
    while (*at && (*at)->host != host)
        at = &(*at)->next;
    return at;
}

const struct cuda_calibration *cuda_calibration_find(struct oscar_device *device,
                                                     const struct oscar_calibration *host) {
    pthread_mutex_lock(&device->lock);
    const struct cuda_calibration *found = *find(device, host);
    pthread_mutex_unlock(&device->lock);
    return found;
}

/* Under the lock, inside cuda_enter. */
static int load(struct oscar_device *device, const struct oscar_calibration *host, struct oscar_cause *cause) {
    struct cuda_calibration **at = find(device, host);
    if (*at) {
        (*at)->references++;
        return 0;
    }
    _cleanup_free_ struct cuda_calibration *copy = calloc(1, sizeof(*copy));
    if (!copy)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a calibration");
    copy->host = host;
    copy->references = 1;
    int r = copy_to_device(device, copy, cause);
    if (r < 0)
        return r;
    *at = TAKE_PTR(copy);
    return 0;
}

int cuda_calibration_load(struct oscar_device *device, const struct oscar_geometry *geometry,
                          const struct oscar_calibration *calibration, struct oscar_cause *cause) {
    if (calibration->layers != geometry->layers || calibration->kv_heads != geometry->kv_heads ||
        calibration->head_dim != geometry->head_dim)
        return oscar_fail(cause, OSCAR_ERR_INVALID,
                          "the calibration is for %ux%u heads of %u, the model has %ux%u of %u", calibration->layers,
                          calibration->kv_heads, calibration->head_dim, geometry->layers, geometry->kv_heads,
                          geometry->head_dim);
    int r = cuda_enter(device, cause);
    if (r < 0)
        return r;
    pthread_mutex_lock(&device->lock);
    r = load(device, calibration, cause);
    pthread_mutex_unlock(&device->lock);
    cuda_leave(device);
    return r;
}

void cuda_calibration_unload(struct oscar_device *device, const struct oscar_calibration *calibration) {
    bool inside = cuda_enter(device, NULL) == 0;
    pthread_mutex_lock(&device->lock);
    struct cuda_calibration **at = find(device, calibration);
    struct cuda_calibration *copy = *at;
    if (copy && --copy->references == 0) {
        *at = copy->next;
        (void)device->driver->cuMemFree(copy->memory);
        free(copy);
    }
    pthread_mutex_unlock(&device->lock);
    if (inside)
        cuda_leave(device);
}
