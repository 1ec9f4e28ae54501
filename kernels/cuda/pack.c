/* SPDX-License-Identifier: Apache-2.0 */
/* Launches of pack.cu: dense pages to packed ones. */
#include <stdlib.h>

#include "kernels/cuda/backend.h"
#include "kernels/cuda/pack_params.h"
#include "proto/geometry.h"

extern const unsigned char oscar_cuda_image_pack[];

#define DIMS 3U
#define FUNCTIONS (2 * DIMS)

/* [kernel][head size] */
static const char *const names[FUNCTIONS] = {
    "pack_plain_64", "pack_plain_128", "pack_plain_256", "pack_shaped_64", "pack_shaped_128", "pack_shaped_256",
};

struct cuda_pack {
    CUmodule module;
    CUfunction function[FUNCTIONS];
};

static uint32_t shared_bytes(uint32_t function) {
    uint32_t d = 64U << function % DIMS;
    return function < DIMS ? CUDA_PACK_PLAIN_SHARED(d) : CUDA_PACK_SHAPED_SHARED(d);
}

int cuda_pack_open(struct oscar_device *device, struct oscar_cause *cause) {
    struct cuda_pack *pack = calloc(1, sizeof(*pack));
    if (!pack)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the kernels of pack");
    device->pack = pack;
    int r = cuda_image_load(device, oscar_cuda_image_pack, names, FUNCTIONS, &pack->module, pack->function, cause);
    for (uint32_t i = 0; r == 0 && i < FUNCTIONS; i++)
        r = cuda_shared_limit(device, pack->function[i], names[i], shared_bytes(i), cause);
    return r;
}

void cuda_pack_close(struct oscar_device *device) {
    if (device->pack && device->pack->module)
        (void)device->driver->cuModuleUnload(device->pack->module);
    free(device->pack);
    device->pack = NULL;
}

struct grid {
    uint32_t x, y, z, threads;
};

static int launch(struct oscar_stream_impl *stream, uint32_t function, struct grid grid,
                  struct cuda_pack_params *params) {
    struct oscar_device *device = stream->device;
    return cuda_device_result(device,
                              device->driver->cuLaunchKernel(device->pack->function[function], grid.x, grid.y, grid.z,
                                                             grid.threads, 1, 1, shared_bytes(function), stream->stream,
                                                             (void *[]){params}, NULL),
                              names[function], NULL);
}

/* Whether K of some head is coded as it lies. */
static bool any_plain(const struct oscar_calibration *calibration) {
    for (uint32_t i = 0; i < calibration->layers * calibration->kv_heads; i++)
        if (!calibration->heads[i].centre_static && !calibration->heads[i].feedback)
            return true;
    return false;
}

/* The kernels once for every CUDA_PACK_ITEMS items; word i of `status` is item i's. */
static int launch_all(struct oscar_stream_impl *stream, const struct cuda_calibration *calibration,
                      const struct oscar_pack_item *item, uint32_t items, CUdeviceptr status) {
    const struct cuda_calibration_view *view = &calibration->view;
    const uint32_t d = view->head_dim, records = view->layers * view->kv_heads;
    const uint32_t size = d == 64 ? 0 : d == 128 ? 1 : 2;
    const uint32_t sides = any_plain(calibration->host) ? 2 : 1;
    struct cuda_pack_params params = {.calibration = *view};
    int r = 0;
    for (uint32_t first = 0; r == 0 && first < items; first += params.items) {
        params.items = items - first < CUDA_PACK_ITEMS ? items - first : CUDA_PACK_ITEMS;
        params.status = (int32_t *)status + first;
        for (uint32_t i = 0; i < params.items; i++) {
            params.page[i] = (uint32_t)(item[first + i].position / OSCAR_PAGE_TOKENS);
            params.dense[i] = item[first + i].dense;
            params.packed[i] = item[first + i].packed;
        }
        r = launch(stream, size, (struct grid){records, params.items, sides, CUDA_PACK_PLAIN_THREADS(d)}, &params);
        if (r == 0 && (view->any_centre || view->any_feedback))
            r = launch(stream, DIMS + size, (struct grid){params.items, records, 1, CUDA_PACK_SHAPED_THREADS(d)},
                       &params);
    }
    return r;
}

static int pack(struct oscar_stream_impl *stream, const struct oscar_geometry *geometry,
                const struct oscar_calibration *host, const struct oscar_pack_item *item, uint32_t items) {
    const struct cuda_calibration *calibration = cuda_calibration_find(stream->device, host);
    if (oscar_geometry_check(geometry, NULL) < 0 || !calibration || calibration->view.layers != geometry->layers ||
        calibration->view.kv_heads != geometry->kv_heads || calibration->view.head_dim != geometry->head_dim ||
        items > OSCAR_MAX_PACK_ITEMS)
        return OSCAR_ERR_INVALID;
    for (uint32_t i = 0; i < items; i++)
        if (item[i].position % OSCAR_PAGE_TOKENS != 0 ||
            (calibration->view.frequencies > 0 && item[i].position / OSCAR_PAGE_TOKENS >= calibration->view.pages))
            return OSCAR_ERR_INVALID;
    if (items == 0)
        return 0;
    struct cuda_status *words;
    CUdeviceptr address;
    int r = cuda_status_take(stream, items, &words, &address);
    if (r < 0)
        return r;
    int32_t *target[OSCAR_MAX_PACK_ITEMS];
    for (uint32_t i = 0; i < items; i++)
        target[i] = item[i].status;
    r = launch_all(stream, calibration, item, items, address);
    int delivered = cuda_status_deliver(stream, words, r < 0 ? NULL : target, false);
    return r < 0 ? r : delivered;
}

int cuda_pack(struct oscar_stream_impl *stream, const struct oscar_geometry *geometry,
              const struct oscar_calibration *calibration, const struct oscar_pack_item *item, uint32_t items) {
    int r = cuda_work_begin(stream);
    return r < 0 ? r : cuda_work_end(stream, pack(stream, geometry, calibration, item, items));
}
