/* SPDX-License-Identifier: Apache-2.0 */
/* Which form of sharing works here, and the self test of it. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/cuda/memory.h"
#include "proto/cleanup.h"

static int try_form(struct oscar_device *device, enum oscar_share share, struct oscar_cause *cause) {
    struct oscar_chunk *chunk;
    int r = cuda_chunk_make(device, share, device->granularity, &chunk, cause);
    if (r == 0)
        cuda_chunk_discard(chunk);
    return r;
}

static int has_attribute(struct oscar_device *device, CUdevice_attribute attribute, const char *lack,
                         struct oscar_cause *cause) {
    int value;
    int r = cuda_device_result(device, device->driver->cuDeviceGetAttribute(&value, attribute, device->device),
                               "cuDeviceGetAttribute", cause);
    return r < 0 || value ? r : oscar_fail(cause, OSCAR_ERR_UNSUPPORTED, "%s", lack);
}

/* Who wants handles learns what ranges and granularity there are, and no memory is made of the first form. */
static int try_descriptors(struct oscar_device *device, enum oscar_share wanted, struct oscar_cause *cause) {
    int r = has_attribute(device, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                          "the driver has no virtual memory management here", cause);
    if (r < 0)
        return r;
    device->vmm = true;
    CUmemAllocationProp properties = cuda_vmm_properties(device);
    r = has_attribute(device, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                      "the driver gives no descriptors of device memory here", cause);
    if (r == 0)
        r = cuda_device_result(device,
                               device->driver->cuMemGetAllocationGranularity(&device->granularity, &properties,
                                                                             CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                               "cuMemGetAllocationGranularity", cause);
    return r < 0 || wanted == OSCAR_SHARE_IPC ? r : try_form(device, OSCAR_SHARE_VMM, cause);
}

int cuda_share_choose(struct oscar_device *device, enum oscar_share wanted, struct oscar_cause *ret_why,
                      struct oscar_cause *cause) {
    struct oscar_cause lack = {""};
    device->granularity = CUDA_IPC_GRANULARITY;
    device->share = OSCAR_SHARE_VMM;
    int r = try_descriptors(device, wanted, &lack);
    if (r == 0 && wanted != OSCAR_SHARE_IPC)
        return 0;
    if (device->granularity % CUDA_IPC_GRANULARITY != 0)
        device->granularity = CUDA_IPC_GRANULARITY;
    if (r == OSCAR_ERR_DEVICE && atomic_load(&device->lost))
        return oscar_fail(cause, r, "%s", lack.text);
    if (wanted == OSCAR_SHARE_VMM)
        return oscar_fail(cause, OSCAR_ERR_UNSUPPORTED, "%s: %s: share by IPC handles (ipc), or use the host backend",
                          device->id, lack.text);
    device->share = OSCAR_SHARE_IPC;
    struct oscar_cause second = {""};
    r = try_form(device, OSCAR_SHARE_IPC, &second);
    if (r < 0)
        return oscar_fail(cause, OSCAR_ERR_UNSUPPORTED, "%s cannot share memory: %.90s; %.90s", device->id, lack.text,
                          second.text);
    if (wanted == OSCAR_SHARE_AUTO)
        *ret_why = lack;
    return 0;
}

/* Inside cuda_enter: the bytes at `address` as they are now. */
static int read_back(struct oscar_device *device, CUdeviceptr address, uint8_t *ret, size_t bytes,
                     struct oscar_cause *cause) {
    CUresult result = device->driver->cuMemcpyAsync((CUdeviceptr)ret, address, bytes, device->service);
    int r = cuda_device_result(device, result, "cuMemcpyAsync", cause);
    return r < 0 ? r : cuda_settle(device, device->service, "self test: reading", cause);
}

/* Every 8 bytes of a chunk are others, and no chunk that was made before has them. */
static void fill_pattern(uint8_t *bytes, size_t count) {
    static atomic_uint_least64_t runs;
    uint64_t seed = atomic_fetch_add(&runs, 1) + ((uint64_t)getpid() << 32);
    for (uint64_t i = 0; i < count / sizeof(i); i++) {
        uint64_t word = (seed + i) * UINT64_C(0x9E3779B97F4A7C15);
        memcpy(bytes + i * sizeof(word), &word, sizeof(word));
    }
}

/* Inside cuda_enter: what the owner writes is what `reader` reads. */
static int compare(struct oscar_device *device, CUdeviceptr owner, CUdeviceptr reader, size_t bytes,
                   struct oscar_cause *cause) {
    _cleanup_free_ uint8_t *written = malloc(bytes);
    _cleanup_free_ uint8_t *read = calloc(1, bytes);
    if (!written || !read)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the self test");
    int r = read_back(device, reader, read, bytes, cause);
    for (size_t i = 0; r == 0 && i < bytes; i++)
        if (read[i] != 0)
            return oscar_fail(cause, OSCAR_ERR_DEVICE, "self test: a new chunk is not zero");
    fill_pattern(written, bytes);
    if (r == 0)
        r = cuda_device_result(device,
                               device->driver->cuMemcpyAsync(owner, (CUdeviceptr)written, bytes, device->service),
                               "cuMemcpyAsync", cause);
    if (r == 0)
        r = cuda_settle(device, device->service, "self test: writing", cause);
    if (r == 0)
        r = read_back(device, reader, read, bytes, cause);
    if (r == 0 && memcmp(written, read, bytes) != 0)
        return oscar_fail(cause, OSCAR_ERR_DEVICE, "self test: a mapped chunk does not read as it was written");
    return r;
}

static void discard_chunk(struct oscar_chunk **chunk) { cuda_chunk_free(*chunk); }
static void discard_range(struct oscar_range **range) { cuda_range_free(*range); }

/* An IPC handle cannot be opened by the process that made it: of that form only what the owner does is tested. */
int cuda_self_test(struct oscar_device *device, struct oscar_cause *cause) {
    const uint64_t bytes = device->granularity;
    _cleanup_(discard_chunk) struct oscar_chunk *chunk = NULL;
    _cleanup_(discard_range) struct oscar_range *range = NULL;
    _cleanup_close_ int fd = -1;
    int r = cuda_chunk_create(device, bytes, &chunk, cause);
    if (r == 0)
        r = cuda_chunk_export(chunk, false, &fd, cause);
    if (r == 0)
        r = cuda_range_reserve(device, bytes, &range, cause);
    struct cuda_ipc_handle handle;
    if (r == 0 && device->share == OSCAR_SHARE_IPC && !cuda_ipc_read(fd, &handle))
        return oscar_fail(cause, OSCAR_ERR_DEVICE, "self test: the descriptor of a chunk carries no IPC handle");
    if (r == 0 && device->share == OSCAR_SHARE_VMM)
        r = cuda_range_map(range, &(struct oscar_range_chunk){.bytes = bytes, .fd = fd}, 1, cause);
    if (r == 0)
        r = cuda_enter(device, cause);
    if (r < 0)
        return r;
    CUdeviceptr owner = (CUdeviceptr)cuda_chunk_address(chunk);
    CUdeviceptr reader = device->share == OSCAR_SHARE_VMM ? (CUdeviceptr)cuda_range_address(range) : owner;
    r = compare(device, owner, reader, bytes, cause);
    cuda_leave(device);
    return r;
}
