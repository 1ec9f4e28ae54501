/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA backend's table, and an opened GPU. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/backend.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/select.h"

/* After these the context fails every call, until the process ends. */
static bool stays(CUresult result) {
    switch (result) {
    case CUDA_ERROR_DEINITIALIZED:
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_CONTAINED:
    case CUDA_ERROR_MPS_CLIENT_TERMINATED:
    case CUDA_ERROR_EXTERNAL_DEVICE:
        return true;
    default:
        return false;
    }
}

int cuda_device_result(struct oscar_device *device, CUresult result, const char *what, struct oscar_cause *cause) {
    if (stays(result))
        atomic_store(&device->lost, true);
    return cuda_result(device->driver, result, what, cause);
}

/* A capture that was begun with the global mode forbids others calls to every thread of the process, and is spoiled by them;
 * ours do not concern what it captures. Calls between enter and leave may nest. */
static _Thread_local struct {
    unsigned depth;
    CUstreamCaptureMode outer;
} entered;

int cuda_enter(struct oscar_device *device, struct oscar_cause *cause) {
    if (atomic_load(&device->lost))
        return oscar_fail(cause, OSCAR_ERR_DEVICE, "%s failed earlier and serves this process no more: restart it",
                          device->id);
    int r = cuda_device_result(device, device->driver->cuCtxPushCurrent(device->context), "cuCtxPushCurrent", cause);
    if (r < 0)
        return r;
    if (entered.depth++ == 0) {
        entered.outer = CU_STREAM_CAPTURE_MODE_RELAXED;
        (void)device->driver->cuThreadExchangeStreamCaptureMode(&entered.outer);
    }
    return 0;
}

void cuda_leave(struct oscar_device *device) {
    if (--entered.depth == 0)
        (void)device->driver->cuThreadExchangeStreamCaptureMode(&entered.outer);
    CUcontext ours;
    (void)device->driver->cuCtxPopCurrent(&ours);
}

static int kernel_result(struct oscar_device *device, CUresult result, const char *call, const char *kernel,
                         struct oscar_cause *cause) {
    char what[96];
    (void)snprintf(what, sizeof(what), "%s %s", call, kernel);
    return cuda_device_result(device, result, what, cause);
}

int cuda_image_load(struct oscar_device *device, const void *image, const char *const *names, uint32_t count,
                    CUmodule *ret_module, CUfunction *ret_functions, struct oscar_cause *cause) {
    const struct cuda_driver *driver = device->driver;
    CUmodule module;
    int r = kernel_result(device, driver->cuModuleLoadData(&module, image), "cuModuleLoadData for", names[0], cause);
    for (uint32_t i = 0; r == 0 && i < count; i++) {
        r = kernel_result(device, driver->cuModuleGetFunction(&ret_functions[i], module, names[i]),
                          "cuModuleGetFunction of", names[i], cause);
        if (r < 0)
            (void)driver->cuModuleUnload(module);
    }
    if (r < 0)
        return r;
    *ret_module = module;
    return 0;
}

int cuda_shared_limit(struct oscar_device *device, CUfunction function, const char *name, uint32_t bytes,
                      struct oscar_cause *cause) {
    CUresult result =
        device->driver->cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, (int)bytes);
    return kernel_result(device, result, "cuFuncSetAttribute of", name, cause);
}

/* --- opening ---------------------------------------------------------------------------------------------------------------- */

static int read_attributes(struct oscar_device *device, struct oscar_cause *cause) {
    const struct {
        CUdevice_attribute attribute;
        int *value;
    } wanted[] = {
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, &device->major},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, &device->minor},
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, &device->processors},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, &device->shared_bytes},
        {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, &device->l2_bytes},
    };
    int r = 0;
    for (size_t i = 0; r == 0 && i < sizeof(wanted) / sizeof(*wanted); i++)
        r = cuda_device_result(
            device, device->driver->cuDeviceGetAttribute(wanted[i].value, wanted[i].attribute, device->device),
            "cuDeviceGetAttribute", cause);
    return r;
}

static int service_open(struct oscar_device *device, struct oscar_cause *cause) {
    int highest;
    int r = cuda_device_result(device, device->driver->cuCtxGetStreamPriorityRange(&device->lowest_priority, &highest),
                               "cuCtxGetStreamPriorityRange", cause);
    if (r < 0)
        return r;
    /* Smaller is more urgent. One step, so that a worker's streams precede the daemon's under MPS. */
    device->priority = device->lowest_priority > highest ? device->lowest_priority - 1 : highest;
    return cuda_device_result(
        device,
        device->driver->cuStreamCreateWithPriority(&device->service, CU_STREAM_NON_BLOCKING, device->lowest_priority),
        "cuStreamCreateWithPriority", cause);
}

static void service_close(struct oscar_device *device) {
    if (device->service)
        (void)device->driver->cuStreamDestroy(device->service);
}

/* What is opened with a device, in this order, and closed in the reverse one. Close is fine after a failed open. */
static const struct part {
    int (*open)(struct oscar_device *device, struct oscar_cause *cause);
    void (*close)(struct oscar_device *device);
} parts[] = {
    {service_open, service_close},         {cuda_store_open, cuda_store_close},     {cuda_pack_open, cuda_pack_close},
    {cuda_decode_open, cuda_decode_close}, {cuda_prefill_open, cuda_prefill_close},
};

static void close_parts(struct oscar_device *device) {
    for (size_t i = sizeof(parts) / sizeof(*parts); i-- > 0;)
        parts[i].close(device);
}

static int open_parts(struct oscar_device *device, struct oscar_cause *cause) {
    int r = 0;
    for (size_t i = 0; r == 0 && i < sizeof(parts) / sizeof(*parts); i++)
        r = parts[i].open(device, cause);
    return r;
}

static int describe(struct oscar_device *device, const struct oscar_cause *why, struct oscar_cause *cause) {
    char name[96] = "";
    size_t bytes = 0;
    int r = cuda_device_result(device, device->driver->cuDeviceGetName(name, sizeof(name), device->device),
                               "cuDeviceGetName", cause);
    if (r == 0)
        r = cuda_device_result(device, device->driver->cuDeviceTotalMem(&bytes, device->device), "cuDeviceTotalMem",
                               cause);
    if (r == 0)
        (void)snprintf(device->summary, sizeof(device->summary),
                       "cuda, %s, sm_%d%d, %d multiprocessors, %zu MiB, %s%s%s", name, device->major, device->minor,
                       device->processors, bytes >> 20,
                       device->share == OSCAR_SHARE_VMM ? "shared by descriptors" : "shared by IPC handles",
                       why->text[0] ? " because " : "", why->text);
    return r;
}

/* With the context retained. */
static int open_in_context(struct oscar_device *device, const struct oscar_device_options *options,
                           struct oscar_cause *cause) {
    int r = cuda_enter(device, cause);
    if (r < 0)
        return r;
    struct oscar_cause why = {""};
    r = open_parts(device, cause);
    if (r == 0)
        r = cuda_share_choose(device, options->share, &why, cause);
    if (r == 0)
        r = describe(device, &why, cause);
    if (r < 0)
        close_parts(device);
    cuda_leave(device);
    return r;
}

static int device_open(const struct oscar_device_options *options, struct oscar_device **ret,
                       struct oscar_cause *cause) {
    static const struct oscar_device_options none;
    if (!options)
        options = &none;
    struct oscar_device *device = calloc(1, sizeof(*device));
    if (!device)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a device");
    int r = cuda_driver_load(&device->driver, cause);
    if (r == 0)
        r = cuda_device_select(device->driver, options->id, &device->device, cause);
    if (r == 0)
        r = cuda_device_name(device->driver, device->device, device->id, cause);
    if (r == 0)
        r = read_attributes(device, cause);
    if (r == 0)
        r = cuda_result(device->driver, device->driver->cuDevicePrimaryCtxRetain(&device->context, device->device),
                        "cuDevicePrimaryCtxRetain", cause);
    if (r < 0) {
        free(device);
        return r;
    }
    pthread_mutex_init(&device->lock, NULL);
    r = open_in_context(device, options, cause);
    if (r < 0) {
        (void)device->driver->cuDevicePrimaryCtxRelease(device->device);
        pthread_mutex_destroy(&device->lock);
        free(device);
        return r;
    }
    *ret = device;
    return 0;
}

/* The driver fails what is given back to a lost context, which is fine. Where work hangs it might wait for that: then all of it is
 * left to the end of the process. */
static void device_close(struct oscar_device *device) {
    if (!device || atomic_load(&device->hangs))
        return;
    bool inside = cuda_enter(device, NULL) == 0;
    close_parts(device);
    if (inside)
        cuda_leave(device);
    (void)device->driver->cuDevicePrimaryCtxRelease(device->device);
    pthread_mutex_destroy(&device->lock);
    free(device);
}

static const char *device_id(const struct oscar_device *device) { return device->id; }

static const char *device_summary(const struct oscar_device *device) { return device->summary; }

static enum oscar_share device_share(const struct oscar_device *device) { return device->share; }

static const struct oscar_device_ops cuda_ops = {
    .name = "cuda",
    .device_open = device_open,
    .device_close = device_close,
    .device_id = device_id,
    .device_summary = device_summary,
    .device_share = device_share,
    .granularity = cuda_granularity,
    .memory_info = cuda_memory_info,
    .self_test = cuda_self_test,
    .chunk_create = cuda_chunk_create,
    .chunk_export = cuda_chunk_export,
    .chunk_descriptor = cuda_chunk_descriptor,
    .chunk_adopt = cuda_chunk_adopt,
    .chunk_address = cuda_chunk_address,
    .chunk_free = cuda_chunk_free,
    .range_reserve = cuda_range_reserve,
    .range_address = cuda_range_address,
    .range_locate = cuda_range_locate,
    .range_map = cuda_range_map,
    .range_unmap = cuda_range_unmap,
    .range_free = cuda_range_free,
    .calibration_load = cuda_calibration_load,
    .calibration_unload = cuda_calibration_unload,
    .stream_open = cuda_stream_open,
    .stream_close = cuda_stream_close,
    .stream_wait = cuda_stream_wait,
    .stream_status = cuda_stream_status,
    .stream_call = cuda_stream_call,
    .fences_register = cuda_fences_register,
    .fences_unregister = cuda_fences_unregister,
    .fence_signal = cuda_fence_signal,
    .copy = cuda_copy,
    .store = cuda_store,
    .inspect = cuda_inspect,
    .pack = cuda_pack,
    .attend = cuda_attend,
    .merge = cuda_merge,
    .batch_open = cuda_batch_open,
    .batch_close = cuda_batch_close,
    .batch_update = cuda_batch_update,
    .batch_store = cuda_batch_store,
    .batch_attend = cuda_batch_attend,
};

const struct oscar_device_ops *oscar_device_cuda(void) { return &cuda_ops; }
