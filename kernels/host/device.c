/* SPDX-License-Identifier: Apache-2.0 */
/* The host backend's table, and the device that stands for this machine's processor. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include "kernels/host/memory.h"
#include "kernels/host/stream.h"

#define DEVICE_ID "host"

static int device_open(const struct oscar_device_options *options, struct oscar_device **ret,
                       struct oscar_cause *cause) {
    const char *id = options ? options->id : NULL;
    if (id && *id && strcmp(id, DEVICE_ID) != 0)
        return oscar_fail(cause, OSCAR_ERR_NOT_FOUND, "the host backend has one device, \"%s\", not \"%.64s\"",
                          DEVICE_ID, id);
    enum host_level level;
    int r = host_level_current(&level, cause);
    if (r < 0)
        return r;
    struct oscar_device *device = calloc(1, sizeof(*device));
    if (!device)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a device");
    device->level = level;
    snprintf(device->summary, sizeof(device->summary), "host, %s%s, %ld cores", host_level_name(level),
             level == HOST_AVX512 && host_level_bf16() ? " with BF16" : "", sysconf(_SC_NPROCESSORS_ONLN));
    *ret = device;
    return 0;
}

static void device_close(struct oscar_device *device) { free(device); }

static const char *device_id(const struct oscar_device *device) {
    (void)device;
    return DEVICE_ID;
}

static const char *device_summary(const struct oscar_device *device) { return device->summary; }

static enum oscar_share device_share(const struct oscar_device *device) {
    (void)device;
    return OSCAR_SHARE_VMM;
}

static int memory_info(struct oscar_device *device, uint64_t *ret_free, uint64_t *ret_total,
                       struct oscar_cause *cause) {
    (void)device;
    struct sysinfo info;
    if (sysinfo(&info) < 0)
        return oscar_fail(cause, OSCAR_ERR_DEVICE, "sysinfo: %m");
    *ret_free = (uint64_t)info.freeram * info.mem_unit;
    *ret_total = (uint64_t)info.totalram * info.mem_unit;
    return 0;
}

/* Kernels of the host read a calibration where it is. */
static int calibration_load(struct oscar_device *device, const struct oscar_geometry *geometry,
                            const struct oscar_calibration *calibration, struct oscar_cause *cause) {
    (void)device;
    (void)geometry;
    (void)calibration;
    (void)cause;
    return 0;
}

static void calibration_unload(struct oscar_device *device, const struct oscar_calibration *calibration) {
    (void)device;
    (void)calibration;
}

/* Fence slots are ordinary shared memory here: there is nothing to register. */
static int fences_register(struct oscar_device *device, void *memory, size_t bytes, struct oscar_cause *cause) {
    (void)device;
    (void)bytes;
    if (!memory || (uintptr_t)memory % _Alignof(oscar_fence_slot) != 0)
        return oscar_fail(cause, OSCAR_ERR_INVALID, "fence slots must be 8-byte aligned");
    return 0;
}

static void fences_unregister(struct oscar_device *device, void *memory) {
    (void)device;
    (void)memory;
}

static const struct oscar_device_ops host_ops = {
    .name = "host",
    .device_open = device_open,
    .device_close = device_close,
    .device_id = device_id,
    .device_summary = device_summary,
    .device_share = device_share,
    .granularity = host_granularity,
    .memory_info = memory_info,
    .self_test = host_self_test,
    .chunk_create = host_chunk_create,
    .chunk_export = host_chunk_export,
    .chunk_descriptor = host_chunk_descriptor,
    .chunk_adopt = host_chunk_adopt,
    .chunk_address = host_chunk_address,
    .chunk_free = host_chunk_free,
    .range_reserve = host_range_reserve,
    .range_address = host_range_address,
    .range_locate = host_range_locate,
    .range_map = host_range_map,
    .range_unmap = host_range_unmap,
    .range_free = host_range_free,
    .calibration_load = calibration_load,
    .calibration_unload = calibration_unload,
    .stream_open = host_stream_open,
    .stream_close = host_stream_close,
    .stream_wait = host_stream_wait,
    .stream_status = host_stream_status,
    .stream_call = host_stream_call,
    .fences_register = fences_register,
    .fences_unregister = fences_unregister,
    .fence_signal = host_fence_signal,
    .copy = host_enqueue_copy,
    .store = host_enqueue_store,
    .inspect = host_enqueue_inspect,
    .pack = host_enqueue_pack,
    .attend = host_enqueue_attend,
    .merge = host_enqueue_merge,
    .batch_open = host_batch_open,
    .batch_close = host_batch_close,
    .batch_update = host_batch_update,
    .batch_store = host_batch_store,
    .batch_attend = host_batch_attend,
};

const struct oscar_device_ops *oscar_device_host(void) { return &host_ops; }
