/* SPDX-License-Identifier: Apache-2.0 */
/* Launches of decode.cu and merge.cu. */
#include <math.h>
#include <stdlib.h>

#include "kernels/cuda/backend.h"
#include "kernels/cuda/decode_params.h"

extern const unsigned char oscar_cuda_image_decode_64[], oscar_cuda_image_decode_128[], oscar_cuda_image_decode_256[];
extern const unsigned char oscar_cuda_image_merge[];

#define LOG2_E 1.4426950408889634
#define DIMS 3U
#define KERNELS 6U /* of a head size: [4 or 8 columns][0, 8 or 16 pairs] */

static const char *const names[KERNELS] = {"decode_4_0", "decode_4_8", "decode_4_16",
                                           "decode_8_0", "decode_8_8", "decode_8_16"};

struct cuda_decode {
    CUmodule module[DIMS], merge_module;
    CUfunction function[DIMS][KERNELS], merge;
};

static int load(struct oscar_device *device, struct oscar_cause *cause) {
    const unsigned char *const images[DIMS] = {oscar_cuda_image_decode_64, oscar_cuda_image_decode_128,
                                               oscar_cuda_image_decode_256};
    static const char *const merge = "merge";
    struct cuda_decode *decode = device->decode;
    int r = cuda_image_load(device, oscar_cuda_image_merge, &merge, 1, &decode->merge_module, &decode->merge, cause);
    for (uint32_t d = 0; r == 0 && d < DIMS; d++) {
        r = cuda_image_load(device, images[d], names, KERNELS, &decode->module[d], decode->function[d], cause);
        for (uint32_t i = 0; r == 0 && i < KERNELS; i++)
            r = cuda_shared_limit(device, decode->function[d][i], names[i], (uint32_t)device->shared_bytes, cause);
    }
    return r;
}

int cuda_decode_open(struct oscar_device *device, struct oscar_cause *cause) {
    device->decode = calloc(1, sizeof(*device->decode));
    if (!device->decode)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the kernels of decode");
    return load(device, cause);
}

void cuda_decode_close(struct oscar_device *device) {
    if (!device->decode)
        return;
    for (uint32_t d = 0; d < DIMS; d++)
        if (device->decode->module[d])
            (void)device->driver->cuModuleUnload(device->decode->module[d]);
    if (device->decode->merge_module)
        (void)device->driver->cuModuleUnload(device->decode->merge_module);
    free(device->decode);
    device->decode = NULL;
}

/* --- attention -------------------------------------------------------------------------------------------------------------- */

/* Columns that each slice of each KV head may leave two parts of. */
static uint64_t slice_columns(const struct oscar_geometry *geometry, const struct cuda_decode_shape *shape) {
    return (uint64_t)geometry->kv_heads * shape->slices * shape->columns;
}

static uint64_t partials_bytes(const struct oscar_geometry *geometry, const struct cuda_decode_shape *shape) {
    return 2 * slice_columns(geometry, shape) * CUDA_DECODE_PARTIAL_FLOATS(geometry->head_dim) * sizeof(float);
}

uint64_t cuda_decode_scratch_bytes(const struct oscar_batch_impl *batch) {
    return partials_bytes(&batch->geometry, &batch->decode_shape) +
           slice_columns(&batch->geometry, &batch->decode_shape) * sizeof(uint32_t);
}

void cuda_decode_prepare(struct oscar_batch_impl *batch) {
    const struct oscar_geometry *geometry = &batch->geometry;
    batch->decode_shape = cuda_decode_shape_of(
        (uint32_t)batch->device->processors, (uint32_t)batch->device->shared_bytes, geometry->head_dim,
        geometry->kv_heads, geometry->query_heads / geometry->kv_heads, batch->limits.rows);
}

int cuda_decode_enqueue(struct oscar_stream_impl *stream, struct oscar_batch_impl *batch,
                        const struct cuda_calibration *calibration, const struct oscar_batch_attend_args *args) {
    struct oscar_device *device = stream->device;
    const struct oscar_geometry *geometry = &batch->geometry;
    const struct cuda_calibration_view *view = &calibration->view;
    const struct cuda_decode_shape *shape = &batch->decode_shape;
    uint32_t d = geometry->head_dim, pairs = view->max_pairs == 0 ? 0 : view->max_pairs <= 8 ? 8 : 16;
    uint32_t kernel = (shape->columns == 4 ? 0 : KERNELS / 2) + pairs / 8;
    struct cuda_decode_params params = {
        .batch = batch->view,
        .starts = (const struct cuda_decode_start *)batch->decode_plan,
        .slices = (const struct cuda_decode_slice *)(batch->decode_plan + cuda_decode_starts_bytes(shape)),
        .heads = view->heads + (size_t)args->layer * geometry->kv_heads,
        .page_turn = view->page_turn,
        .q = (uintptr_t)args->q,
        .out = (uintptr_t)args->out,
        .lse = (uintptr_t)args->lse,
        .partials = (float *)batch->decode_scratch,
        .arrivals = (uint32_t *)(batch->decode_scratch + partials_bytes(geometry, shape)),
        .first_record = args->layer * geometry->kv_heads,
        .kv_heads = geometry->kv_heads,
        .group = geometry->query_heads / geometry->kv_heads,
        .slice_count = shape->slices,
        .frequencies = view->frequencies,
        .fp16 = geometry->dtype == OSCAR_FP16,
        .has_lse = args->lse != NULL,
        .scale = (float)(args->softmax_scale * LOG2_E),
    };
    return cuda_device_result(
        device,
        device->driver->cuLaunchKernel(device->decode->function[d == 64    ? 0
                                                                : d == 128 ? 1
                                                                           : 2][kernel],
                                       shape->blocks, 1, 1, 32 * shape->warps, 1, 1,
                                       CUDA_DECODE_SHARED_BYTES(d, shape->columns, pairs, shape->warps), stream->stream,
                                       (void *[]){&params}, NULL),
        names[kernel], NULL);
}

/* --- merging two results ---------------------------------------------------------------------------------------------------- */

static int merge(struct oscar_stream_impl *stream, const struct oscar_merge_args *args) {
    if ((args->dtype != OSCAR_BF16 && args->dtype != OSCAR_FP16) ||
        (args->head_dim != 64 && args->head_dim != 128 && args->head_dim != 256) ||
        args->rows > OSCAR_MAX_SEQUENCE_TOKENS || args->heads > CUDA_MERGE_MAX_HEADS)
        return OSCAR_ERR_INVALID;
    if (args->rows == 0 || args->heads == 0)
        return 0;
    struct oscar_device *device = stream->device;
    struct cuda_merge_params params = {
        .out = (uintptr_t)args->out,
        .other_out = (uintptr_t)args->other_out,
        .lse = args->lse,
        .other_lse = args->other_lse,
        .out_row_stride = args->out_row_stride,
        .out_head_stride = args->out_head_stride,
        .other_row_stride = args->other_row_stride,
        .other_head_stride = args->other_head_stride,
        .rows = args->rows,
        .heads = args->heads,
        .head_dim = args->head_dim,
        .fp16 = args->dtype == OSCAR_FP16,
    };
    uint64_t columns = (uint64_t)args->rows * args->heads;
    uint32_t blocks = (uint32_t)((columns + CUDA_MERGE_THREADS / 32 - 1) / (CUDA_MERGE_THREADS / 32));
    return cuda_device_result(device,
                              device->driver->cuLaunchKernel(device->decode->merge, blocks, 1, 1, CUDA_MERGE_THREADS, 1,
                                                             1, 0, stream->stream, (void *[]){&params}, NULL),
                              "merge", NULL);
}

int cuda_merge(struct oscar_stream_impl *stream, const struct oscar_merge_args *args) {
    int r = cuda_work_begin(stream);
    return r < 0 ? r : cuda_work_end(stream, merge(stream, args));
}
