/* SPDX-License-Identifier: Apache-2.0 */
/* Launches of prefill.cu. */
#include <stdlib.h>

#include "kernels/cuda/backend.h"
#include "kernels/cuda/prefill_params.h"

#define LOG2_E 1.4426950408889634
#define DIMS 3U

extern const unsigned char oscar_cuda_image_prefill[];

static const char *const names[DIMS] = {"prefill_64", "prefill_128", "prefill_256"};

struct cuda_prefill {
    CUmodule module;
    CUfunction function[DIMS];
    uint32_t blocks[DIMS]; /* that run at once */
};

static uint32_t function_of(uint32_t head_dim) { return head_dim == 64 ? 0 : head_dim == 128 ? 1 : 2; }

static int measure(struct oscar_device *device, uint32_t function, struct oscar_cause *cause) {
    struct cuda_prefill *prefill = device->prefill;
    uint32_t bytes = CUDA_PREFILL_SHARED_BYTES(64U << function);
    int a_processor = 0;
    int r = cuda_shared_limit(device, prefill->function[function], names[function], bytes, cause);
    if (r == 0)
        r = cuda_device_result(device,
                               device->driver->cuOccupancyMaxActiveBlocksPerMultiprocessor(
                                   &a_processor, prefill->function[function], CUDA_PREFILL_THREADS, bytes),
                               "cuOccupancyMaxActiveBlocksPerMultiprocessor", cause);
    prefill->blocks[function] = (uint32_t)(device->processors * (a_processor > 1 ? a_processor : 1));
    return r;
}

int cuda_prefill_open(struct oscar_device *device, struct oscar_cause *cause) {
    struct cuda_prefill *prefill = calloc(1, sizeof(*prefill));
    if (!prefill)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the kernels of prefill");
    device->prefill = prefill;
    int r = cuda_image_load(device, oscar_cuda_image_prefill, names, DIMS, &prefill->module, prefill->function, cause);
    for (uint32_t i = 0; r == 0 && i < DIMS; i++)
        r = measure(device, i, cause);
    return r;
}

void cuda_prefill_close(struct oscar_device *device) {
    if (device->prefill && device->prefill->module)
        (void)device->driver->cuModuleUnload(device->prefill->module);
    free(device->prefill);
    device->prefill = NULL;
}

/* The most tiles that a batch of these limits can have, or the most blocks that run at once where those are fewer. */
static uint32_t blocks_for(const struct oscar_batch_impl *batch, uint32_t most) {
    const struct oscar_geometry *geometry = &batch->geometry;
    uint64_t columns = (uint64_t)batch->limits.rows * (geometry->query_heads / geometry->kv_heads);
    uint64_t tiles = (columns + CUDA_PREFILL_COLUMNS - 1) / CUDA_PREFILL_COLUMNS * geometry->kv_heads;
    return tiles < most && tiles * batch->limits.items < most ? (uint32_t)(tiles * batch->limits.items) : most;
}

int cuda_prefill_enqueue(struct oscar_stream_impl *stream, struct oscar_batch_impl *batch,
                         const struct cuda_calibration *calibration, const struct oscar_batch_attend_args *args) {
    struct oscar_device *device = stream->device;
    const struct oscar_geometry *geometry = &batch->geometry;
    const struct cuda_calibration_view *view = &calibration->view;
    if (batch->limits.rows <= OSCAR_MAX_DECODE_ROWS)
        return 0;
    size_t first_record = (size_t)args->layer * geometry->kv_heads;
    uint32_t function = function_of(geometry->head_dim);
    struct cuda_prefill_params params = {
        .batch = batch->view,
        .heads = view->heads + first_record,
        .page_turn = view->page_turn,
        .row_turn = view->row_turn,
        .q = args->q,
        .out = args->out,
        .lse = args->lse,
        .packed_offset = first_record * oscar_packed_record_bytes(geometry->head_dim),
        .dense_offset = first_record * oscar_dense_record_bytes(geometry->head_dim),
        .frequencies = view->frequencies,
        .kv_heads = geometry->kv_heads,
        .group = geometry->query_heads / geometry->kv_heads,
        .bf16 = geometry->dtype == OSCAR_BF16,
        .log2_scale = (float)(args->softmax_scale * LOG2_E),
    };
    return cuda_device_result(device,
                              device->driver->cuLaunchKernel(device->prefill->function[function],
                                                             blocks_for(batch, device->prefill->blocks[function]), 1, 1,
                                                             CUDA_PREFILL_THREADS, 1, 1,
                                                             CUDA_PREFILL_SHARED_BYTES(geometry->head_dim),
                                                             stream->stream, (void *[]){&params}, NULL),
                              names[function], NULL);
}
