/* SPDX-License-Identifier: Apache-2.0 */
/* Launches of store.cu: rows of K and V to dense pages, and the inspection of pages. */
#include <stdlib.h>

#include "kernels/cuda/backend.h"
#include "kernels/cuda/store_params.h"
#include "proto/geometry.h"

extern const unsigned char oscar_cuda_image_store[];

#define DIMS 3U
#define DTYPES 2U
#define FUNCTIONS (2 * DIMS * DTYPES + 1)
#define INSPECT (FUNCTIONS - 1)

#define INSPECT_BLOCKS 32U /* a multiprocessor: many small ones, so that all of them are busy to the end */

/* [any rotation][head size][dtype], then the inspection. */
static const char *const names[FUNCTIONS] = {
    "store_hadamard_64_bf16",  "store_hadamard_64_fp16",  "store_hadamard_128_bf16", "store_hadamard_128_fp16",
    "store_hadamard_256_bf16", "store_hadamard_256_fp16", "store_any_64_bf16",       "store_any_64_fp16",
    "store_any_128_bf16",      "store_any_128_fp16",      "store_any_256_bf16",      "store_any_256_fp16",
    "store_inspect",
};

struct cuda_store {
    CUmodule module;
    CUfunction function[FUNCTIONS];
};

static uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }
static uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

/* How much a block that multiplies with matrices takes at once: what shared memory has room for. */
struct share {
    uint32_t columns, threads;
};

static struct share matrix_share(const struct oscar_device *device, uint32_t d) {
    struct share share = {smaller(d, 128), CUDA_ROTATE_THREADS(d)};
    while (share.threads > 128 && CUDA_ROTATE_BYTES(d, share.columns, share.threads) > (uint32_t)device->shared_bytes)
        share.threads /= 2;
    while (CUDA_ROTATE_BYTES(d, share.columns, share.threads) > (uint32_t)device->shared_bytes)
        share.columns /= 2;
    return share;
}

int cuda_store_open(struct oscar_device *device, struct oscar_cause *cause) {
    struct cuda_store *store = calloc(1, sizeof(*store));
    if (!store)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the kernels of store");
    device->store = store;
    int r = cuda_image_load(device, oscar_cuda_image_store, names, FUNCTIONS, &store->module, store->function, cause);
    for (uint32_t i = DIMS * DTYPES; r == 0 && i < INSPECT; i++) {
        uint32_t d = 64U << i / DTYPES % DIMS;
        struct share share = matrix_share(device, d);
        r = cuda_shared_limit(device, store->function[i], names[i], CUDA_ROTATE_BYTES(d, share.columns, share.threads),
                              cause);
    }
    return r;
}

void cuda_store_close(struct oscar_device *device) {
    if (device->store && device->store->module)
        (void)device->driver->cuModuleUnload(device->store->module);
    free(device->store);
    device->store = NULL;
}

static int launch(struct oscar_stream_impl *stream, uint32_t function, uint32_t x, uint32_t y, uint32_t threads,
                  uint32_t shared_bytes, void *params) {
    struct oscar_device *device = stream->device;
    return cuda_device_result(device,
                              device->driver->cuLaunchKernel(device->store->function[function], x, y, 1, threads, 1, 1,
                                                             shared_bytes, stream->stream, (void *[]){params}, NULL),
                              names[function], NULL);
}

/* The kernel of this geometry and calibration, launched for at most `rows` rows. */
static int launch_rows(struct oscar_stream_impl *stream, const struct oscar_geometry *geometry,
                       const struct cuda_calibration_view *view, uint64_t rows, struct cuda_store_params *params) {
    const struct oscar_device *device = stream->device;
    uint32_t d = geometry->head_dim, sides = 2 * geometry->kv_heads, processors = (uint32_t)device->processors;
    uint32_t function = (d == 64 ? 0 : d == 128 ? 1 : 2) * DTYPES + (geometry->dtype == OSCAR_FP16);
    if (view->hadamard_k && view->hadamard_v) {
        uint32_t tile = CUDA_STORE_THREADS / CUDA_STORE_LANES(d);
        uint64_t tiles = (rows + tile - 1) / tile, most = larger(1, processors * 16 / sides);
        return launch(stream, function, sides, (uint32_t)(tiles < most ? tiles : most), CUDA_STORE_THREADS, 0, params);
    }
    /* One block a multiprocessor. With few rows the columns of a matrix are divided as far as there are blocks for them: most of
     * the time goes into fetching it. */
    struct share share = matrix_share(device, d);
    uint32_t tile = share.threads / 32 * CUDA_ROTATE_TILES(d) * 16;
    uint64_t tiles = (rows + tile - 1) / tile;
    params->columns = share.columns;
    while (params->columns > CUDA_STORE_CHUNK && 2 * tiles * sides * (d / params->columns) <= processors)
        params->columns /= 2;
    uint32_t blocks = sides * (d / params->columns), most = larger(1, processors / blocks);
    return launch(stream, DIMS * DTYPES + function, blocks, (uint32_t)(tiles < most ? tiles : most), share.threads,
                  CUDA_ROTATE_BYTES(d, params->columns, share.threads), params);
}

static bool fits(const struct cuda_calibration *calibration, const struct oscar_geometry *geometry, uint32_t layer) {
    return calibration && calibration->view.layers == geometry->layers &&
           calibration->view.kv_heads == geometry->kv_heads && calibration->view.head_dim == geometry->head_dim &&
           layer < geometry->layers;
}

static struct cuda_store_params params_of(struct oscar_stream_impl *stream, const struct oscar_geometry *geometry,
                                          const struct cuda_calibration *calibration, uint32_t layer,
                                          const struct oscar_rows *k, const struct oscar_rows *v) {
    size_t first_record = (size_t)layer * geometry->kv_heads;
    return (struct cuda_store_params){
        .heads = calibration->view.heads + first_record,
        .side = {{k->data, k->token_stride, k->head_stride}, {v->data, v->token_stride, v->head_stride}},
        .status = (int32_t *)cuda_stream_failure(stream),
        .layer_offset = first_record * oscar_dense_record_bytes(geometry->head_dim),
    };
}

static int store(struct oscar_stream_impl *stream, const struct oscar_store_args *args) {
    const struct oscar_geometry *geometry = args->geometry;
    const struct cuda_calibration *calibration = cuda_calibration_find(stream->device, args->calibration);
    if (oscar_geometry_check(geometry, NULL) < 0 || !fits(calibration, geometry, args->layer) ||
        args->first_row >= OSCAR_PAGE_TOKENS || args->tokens > OSCAR_MAX_SEQUENCE_TOKENS)
        return OSCAR_ERR_INVALID;
    struct cuda_store_params params = params_of(stream, geometry, calibration, args->layer, &args->k, &args->v);
    params.first_row = args->first_row;
    uint8_t *const *pages = args->pages;
    for (uint32_t left = args->tokens; left > 0; left -= params.tokens) {
        params.tokens = smaller(left, CUDA_STORE_PAGES * OSCAR_PAGE_TOKENS - params.first_row);
        uint32_t count = (params.first_row + params.tokens + OSCAR_PAGE_TOKENS - 1) / OSCAR_PAGE_TOKENS;
        for (uint32_t p = 0; p < count; p++)
            params.pages[p] = (uint64_t)pages[p];
        int r = launch_rows(stream, geometry, &calibration->view, params.tokens, &params);
        if (r < 0)
            return r;
        pages += count;
        for (uint32_t side = 0; side < 2; side++)
            params.side[side].data += params.tokens * params.side[side].token_stride;
        params.first_row = 0;
    }
    return 0;
}

int cuda_store(struct oscar_stream_impl *stream, const struct oscar_store_args *args) {
    int r = cuda_work_begin(stream);
    return r < 0 ? r : cuda_work_end(stream, store(stream, args));
}

static int batch_store(struct oscar_stream_impl *stream, struct oscar_batch_impl *batch,
                       const struct oscar_batch_store_args *args) {
    const struct oscar_geometry *geometry = &batch->geometry;
    const struct cuda_calibration *calibration = cuda_calibration_find(stream->device, args->calibration);
    if (!fits(calibration, geometry, args->layer) || !cuda_batch_storable(batch))
        return OSCAR_ERR_INVALID;
    struct cuda_store_params params = params_of(stream, geometry, calibration, args->layer, &args->k, &args->v);
    params.batch = batch->view;
    return launch_rows(stream, geometry, &calibration->view, (uint64_t)batch->limits.items * batch->limits.rows,
                       &params);
}

int cuda_batch_store(struct oscar_stream_impl *stream, struct oscar_batch_impl *batch,
                     const struct oscar_batch_store_args *args) {
    int r = cuda_work_begin(stream);
    return r < 0 ? r : cuda_work_end(stream, batch_store(stream, batch, args));
}

static int inspect_pieces(struct oscar_stream_impl *stream, uint32_t pieces, const uint8_t *const *pages,
                          uint32_t count, CUdeviceptr words) {
    uint32_t most = (uint32_t)stream->device->processors * INSPECT_BLOCKS;
    for (uint32_t first = 0; first < count; first += CUDA_STORE_PAGES) {
        struct cuda_inspect_params params = {.status = (int32_t *)words + first, .pieces = pieces};
        uint32_t piece = smaller(count - first, CUDA_STORE_PAGES);
        for (uint32_t p = 0; p < piece; p++)
            params.pages[p] = (uint64_t)pages[first + p];
        int r =
            launch(stream, INSPECT, smaller(pieces, larger(1, most / piece)), piece, CUDA_INSPECT_THREADS, 0, &params);
        if (r < 0)
            return r;
    }
    return 0;
}

static int inspect(struct oscar_stream_impl *stream, const struct oscar_geometry *geometry, const uint8_t *const *pages,
                   uint32_t count, int32_t *status) {
    if (oscar_geometry_check(geometry, NULL) < 0 || count > OSCAR_MAX_PACK_ITEMS)
        return OSCAR_ERR_INVALID;
    if (count == 0)
        return 0;
    struct cuda_status *words;
    CUdeviceptr address;
    int r = cuda_status_take(stream, count, &words, &address);
    if (r < 0)
        return r;
    int32_t *target[OSCAR_MAX_PACK_ITEMS];
    for (uint32_t i = 0; i < count; i++)
        target[i] = &status[i];
    r = inspect_pieces(stream, (uint32_t)(oscar_dense_page_bytes(geometry) / CUDA_INSPECT_BYTES), pages, count,
                       address);
    int delivered = cuda_status_deliver(stream, words, r < 0 ? NULL : target, false);
    return r < 0 ? r : delivered;
}

int cuda_inspect(struct oscar_stream_impl *stream, const struct oscar_geometry *geometry, const uint8_t *const *pages,
                 uint32_t count, int32_t *status) {
    int r = cuda_work_begin(stream);
    return r < 0 ? r : cuda_work_end(stream, inspect(stream, geometry, pages, count, status));
}
