/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The second form of sharing, for systems without descriptors of device memory: cuMemAlloc and classic IPC handles. What is lost:
 * readers can write, the memory dies with its owner, and nobody else can hold or adopt it.
 */
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/cuda/memory.h"
#include "proto/cleanup.h"

/* The bytes of the descriptor's file; both ends are on one machine. */
struct record {
    char magic[8];
    uint64_t bytes;
    char device[48];
    CUipcMemHandle handle;
};

static const char magic[8] = {'O', 'S', 'C', 'A', 'R', 'I', 'P', '1'};

#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL)

static int record_make(const struct record *record, int *ret_fd, struct oscar_cause *cause) {
    _cleanup_close_ int fd = memfd_create("oscar-ipc-handle", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return oscar_fail(cause, OSCAR_ERR_LIMIT, "memfd_create: %m");
    if (pwrite(fd, record, sizeof(*record), 0) != (ssize_t)sizeof(*record) || fcntl(fd, F_ADD_SEALS, SEALS) < 0)
        return oscar_fail(cause, OSCAR_ERR_IO, "a memfd for an IPC handle: %m");
    *ret_fd = TAKE_FD(fd);
    return 0;
}

int cuda_ipc_create(struct oscar_device *device, uint64_t bytes, CUdeviceptr *ret, int *ret_fd,
                    struct oscar_cause *cause) {
    const struct cuda_driver *driver = device->driver;
    CUdeviceptr address;
    int r = cuda_device_result(device, driver->cuMemAlloc(&address, bytes), "cuMemAlloc", cause);
    if (r < 0)
        return r;
    struct record record = {.bytes = bytes};
    memcpy(record.magic, magic, sizeof(magic));
    memcpy(record.device, device->id, sizeof(record.device));
    r = cuda_device_result(device, driver->cuIpcGetMemHandle(&record.handle, address), "cuIpcGetMemHandle", cause);
    if (r == 0)
        r = record_make(&record, ret_fd, cause);
    if (r < 0) {
        (void)driver->cuMemFree(address);
        return r;
    }
    *ret = address;
    return 0;
}

bool cuda_ipc_read(int fd, struct cuda_ipc_handle *ret) {
    struct record record;
    struct stat status;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & SEALS) != SEALS || fstat(fd, &status) < 0 || status.st_size != (off_t)sizeof(record) ||
        pread(fd, &record, sizeof(record), 0) != (ssize_t)sizeof(record) ||
        memcmp(record.magic, magic, sizeof(magic)) != 0)
        return false;
    *ret = (struct cuda_ipc_handle){.handle = record.handle, .bytes = record.bytes};
    memcpy(ret->device, record.device, sizeof(ret->device) - 1);
    return true;
}

int cuda_ipc_map(struct oscar_device *device, const struct cuda_ipc_handle *handle, uint64_t bytes, CUdeviceptr *ret,
                 struct oscar_cause *cause) {
    if (strcmp(handle->device, device->id) != 0)
        return oscar_fail(cause, OSCAR_ERR_INVALID, "the chunk lies on %.47s, and this is %s", handle->device,
                          device->id);
    if (handle->bytes < bytes)
        return oscar_fail(cause, OSCAR_ERR_INVALID,
                          "the chunk's IPC handle is for %" PRIu64 " bytes where %" PRIu64 " are needed", handle->bytes,
                          bytes);
    CUresult result = device->driver->cuIpcOpenMemHandle(ret, handle->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    if (result == CUDA_ERROR_INVALID_CONTEXT)
        return oscar_fail(cause, OSCAR_ERR_INVALID, "an IPC handle does not open in the process that made it");
    if (result == CUDA_ERROR_INVALID_HANDLE || result == CUDA_ERROR_INVALID_VALUE)
        return oscar_fail(cause, OSCAR_ERR_STALE, "the chunk's IPC handle does not open: its owner is gone");
    return cuda_device_result(device, result, "cuIpcOpenMemHandle", cause);
}
