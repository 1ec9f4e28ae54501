/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chunks. A chunk is one allocation of the driver's virtual memory management, exported once as a POSIX descriptor, which
 * holds the memory by itself: it outlives its owner. An importer chooses its own access, so a mapping without writing stops
 * mistakes, not an attacker who holds the descriptor. share_ipc.c has the other form.
 */
#include "kernels/cuda/memory.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/cleanup.h"

struct oscar_chunk {
    struct oscar_device *device;
    CUdeviceptr address; /* 0: none yet */
    uint64_t bytes;
    int fd; /* carries the memory (VMM) or its handle (IPC) */
    enum oscar_share share;
    bool allocated, mapped; /* VMM */
    CUmemGenericAllocationHandle memory;
};

size_t cuda_granularity(const struct oscar_device *device) { return device->granularity; }

int cuda_check_size(const struct oscar_device *device, uint64_t bytes, const char *what, struct oscar_cause *cause) {
    if (bytes == 0 || bytes % device->granularity != 0 || bytes > (uint64_t)PTRDIFF_MAX)
        return oscar_fail(cause, OSCAR_ERR_INVALID, "%s of %" PRIu64 " bytes: not a multiple of %zu", what, bytes,
                          device->granularity);
    return 0;
}

int cuda_memory_info(struct oscar_device *device, uint64_t *ret_free, uint64_t *ret_total, struct oscar_cause *cause) {
    size_t available, total;
    int r = cuda_enter(device, cause);
    if (r < 0)
        return r;
    r = cuda_device_result(device, device->driver->cuMemGetInfo(&available, &total), "cuMemGetInfo", cause);
    cuda_leave(device);
    if (r < 0)
        return r;
    *ret_free = available;
    *ret_total = total;
    return 0;
}

/* --- virtual memory management ---------------------------------------------------------------------------------------------- */

CUmemAllocationProp cuda_vmm_properties(const struct oscar_device *device) {
    return (CUmemAllocationProp){
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device->device},
    };
}

int cuda_vmm_map(struct oscar_device *device, CUdeviceptr address, uint64_t bytes, CUmemGenericAllocationHandle memory,
                 struct oscar_cause *cause) {
    CUresult result = device->driver->cuMemMap(address, bytes, 0, memory, 0);
    if (result == CUDA_ERROR_INVALID_VALUE ||
        result == CUDA_ERROR_NOT_SUPPORTED) /* the driver maps all of it or nothing */
        return oscar_fail(cause, OSCAR_ERR_INVALID, "cuMemMap: the chunk does not have %" PRIu64 " bytes", bytes);
    return cuda_device_result(device, result, "cuMemMap", cause);
}

int cuda_vmm_access(struct oscar_device *device, CUdeviceptr address, uint64_t bytes, bool writable,
                    struct oscar_cause *cause) {
    CUmemAccessDesc access = {
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device->device},
        .flags = writable ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ,
    };
    return cuda_device_result(device, device->driver->cuMemSetAccess(address, bytes, &access, 1), "cuMemSetAccess",
                              cause);
}

int cuda_vmm_import(struct oscar_device *device, int fd, CUmemGenericAllocationHandle *ret, struct oscar_cause *cause) {
    CUresult result = device->driver->cuMemImportFromShareableHandle(ret, (void *)(intptr_t)fd,
                                                                     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (result == CUDA_ERROR_INVALID_VALUE || result == CUDA_ERROR_INVALID_HANDLE ||
        result == CUDA_ERROR_OPERATING_SYSTEM || result == CUDA_ERROR_UNKNOWN) /* of any other kind of file */
        return oscar_fail(cause, OSCAR_ERR_INVALID, "descriptor %d is not one of device memory", fd);
    return cuda_device_result(device, result, "cuMemImportFromShareableHandle", cause);
}

/* --- chunks ----------------------------------------------------------------------------------------------------------------- */

void cuda_chunk_discard(struct oscar_chunk *chunk) {
    const struct cuda_driver *driver = chunk->device->driver;
    if (chunk->share == OSCAR_SHARE_IPC) {
        if (chunk->address)
            (void)driver->cuMemFree(chunk->address);
    } else {
        if (chunk->mapped)
            (void)driver->cuMemUnmap(chunk->address, chunk->bytes);
        if (chunk->address)
            (void)driver->cuMemAddressFree(chunk->address, chunk->bytes);
        if (chunk->allocated)
            (void)driver->cuMemRelease(chunk->memory);
    }
    if (chunk->fd >= 0)
        close(chunk->fd);
    free(chunk);
}

static int chunk_new(struct oscar_device *device, enum oscar_share share, uint64_t bytes, struct oscar_chunk **ret,
                     struct oscar_cause *cause) {
    struct oscar_chunk *chunk = malloc(sizeof(*chunk));
    if (!chunk)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a chunk");
    *chunk = (struct oscar_chunk){.device = device, .bytes = bytes, .fd = -1, .share = share};
    *ret = chunk;
    return 0;
}

static int chunk_map(struct oscar_chunk *chunk, struct oscar_cause *cause) {
    struct oscar_device *device = chunk->device;
    CUdeviceptr address;
    int r = cuda_device_result(device, device->driver->cuMemAddressReserve(&address, chunk->bytes, 0, 0, 0),
                               "cuMemAddressReserve", cause);
    if (r < 0)
        return r;
    chunk->address = address;
    r = cuda_vmm_map(device, address, chunk->bytes, chunk->memory, cause);
    chunk->mapped = r == 0;
    return r < 0 ? r : cuda_vmm_access(device, address, chunk->bytes, true, cause);
}

static int chunk_allocate(struct oscar_chunk *chunk, struct oscar_cause *cause) {
    struct oscar_device *device = chunk->device;
    const struct cuda_driver *driver = device->driver;
    CUmemAllocationProp properties = cuda_vmm_properties(device);
    int r = cuda_device_result(device, driver->cuMemCreate(&chunk->memory, chunk->bytes, &properties, 0), "cuMemCreate",
                               cause);
    if (r < 0)
        return r;
    chunk->allocated = true;
    int fd;
    r = cuda_device_result(
        device, driver->cuMemExportToShareableHandle(&fd, chunk->memory, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
        "cuMemExportToShareableHandle", cause);
    if (r < 0)
        return r;
    chunk->fd = fd;
    if (fcntl(fd, F_SETFD, FD_CLOEXEC) < 0)
        return oscar_fail(cause, OSCAR_ERR_DEVICE, "cuMemExportToShareableHandle gave no descriptor: %m");
    return chunk_map(chunk, cause);
}

int cuda_chunk_make(struct oscar_device *device, enum oscar_share share, uint64_t bytes, struct oscar_chunk **ret,
                    struct oscar_cause *cause) {
    struct oscar_chunk *chunk;
    int r = chunk_new(device, share, bytes, &chunk, cause);
    if (r < 0)
        return r;
    r = share == OSCAR_SHARE_IPC ? cuda_ipc_create(device, bytes, &chunk->address, &chunk->fd, cause)
                                 : chunk_allocate(chunk, cause);
    if (r == 0)
        r = cuda_device_result(device, device->driver->cuMemsetD8Async(chunk->address, 0, bytes, device->service),
                               "cuMemsetD8Async", cause);
    if (r == 0)
        r = cuda_settle(device, device->service, "zeroing a chunk", cause);
    if (r < 0) {
        cuda_chunk_discard(chunk);
        return r;
    }
    *ret = chunk;
    return 0;
}

int cuda_chunk_create(struct oscar_device *device, uint64_t bytes, struct oscar_chunk **ret,
                      struct oscar_cause *cause) {
    int r = cuda_check_size(device, bytes, "chunk", cause);
    if (r == 0)
        r = cuda_enter(device, cause);
    if (r < 0)
        return r;
    r = cuda_chunk_make(device, device->share, bytes, ret, cause);
    cuda_leave(device);
    return r;
}

static int duplicate(const struct oscar_chunk *chunk, int *ret_fd, struct oscar_cause *cause) {
    int fd = fcntl(chunk->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return oscar_fail(cause, OSCAR_ERR_LIMIT, "chunk descriptor cannot be duplicated: %m");
    *ret_fd = fd;
    return 0;
}

/* Neither form can keep an importer from mapping it for writing. */
int cuda_chunk_export(struct oscar_chunk *chunk, bool writable, int *ret_fd, struct oscar_cause *cause) {
    (void)writable;
    return duplicate(chunk, ret_fd, cause);
}

static int dies_with_its_owner(struct oscar_cause *cause) {
    return oscar_fail(cause, OSCAR_ERR_UNSUPPORTED,
                      "a chunk shared by IPC handles dies with its owner: share by descriptors (vmm) to keep chunks");
}

int cuda_chunk_descriptor(struct oscar_chunk *chunk, int *ret_fd, struct oscar_cause *cause) {
    if (chunk->share == OSCAR_SHARE_IPC)
        return dies_with_its_owner(cause);
    return duplicate(chunk, ret_fd, cause);
}

/* Inside cuda_enter. */
static int chunk_import(struct oscar_chunk *chunk, struct oscar_cause *cause) {
    int r = cuda_vmm_import(chunk->device, chunk->fd, &chunk->memory, cause);
    if (r < 0)
        return r;
    chunk->allocated = true;
    return chunk_map(chunk, cause);
}

int cuda_chunk_adopt(struct oscar_device *device, int fd_taken, uint64_t bytes, struct oscar_chunk **ret,
                     struct oscar_cause *cause) {
    _cleanup_close_ int fd = fd_taken;
    struct cuda_ipc_handle handle;
    if (cuda_ipc_read(fd, &handle))
        return dies_with_its_owner(cause);
    int r = cuda_check_size(device, bytes, "chunk", cause);
    if (r == 0)
        r = cuda_enter(device, cause);
    if (r < 0)
        return r;
    struct oscar_chunk *chunk;
    r = chunk_new(device, OSCAR_SHARE_VMM, bytes, &chunk, cause);
    if (r == 0) {
        chunk->fd = TAKE_FD(fd);
        r = chunk_import(chunk, cause);
        if (r < 0)
            cuda_chunk_discard(chunk);
    }
    cuda_leave(device);
    if (r < 0)
        return r;
    *ret = chunk;
    return 0;
}

uint8_t *cuda_chunk_address(const struct oscar_chunk *chunk) { return (uint8_t *)chunk->address; }

/* Importers' mappings keep the memory of the first form. */
void cuda_chunk_free(struct oscar_chunk *chunk) {
    if (!chunk)
        return;
    struct oscar_device *device = chunk->device;
    bool inside = cuda_enter(device, NULL) == 0;
    cuda_chunk_discard(chunk);
    if (inside)
        cuda_leave(device);
}
