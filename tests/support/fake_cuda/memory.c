/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of the fake driver: memfds, mapped where the caller or the kernel chooses. */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/support/fake_cuda/inside.h"

#define GRANULARITY ((size_t)2 << 20)
#define MEMFD_NAME "fake-cuda"

/* Device memory is a memfd. An allocation or an imported handle is this; a mapping holds no more than the kernel's reference. */
struct memory {
    int fd;
    size_t bytes;
};

/* An address range that is reserved, allocated, registered, or opened from a handle. */
struct region {
    struct region *next;
    void *address;
    size_t bytes;
    struct memory memory; /* fd -1: none of its own */
    unsigned mappings;    /* in a reserved one */
};

static pthread_mutex_t regions_lock = PTHREAD_MUTEX_INITIALIZER;
static struct region *regions;

static CUresult region_add(void *address, size_t bytes, struct memory memory) {
    struct region *region = malloc(sizeof(*region));
    if (!region)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&regions_lock);
    *region = (struct region){.next = regions, .address = address, .bytes = bytes, .memory = memory};
    regions = region;
    pthread_mutex_unlock(&regions_lock);
    fake_born();
    return CUDA_SUCCESS;
}

/* The region that holds the address; NULL: nobody's. */
static struct region *region_of(const void *address) {
    pthread_mutex_lock(&regions_lock);
    struct region *region = regions;
    while (region && ((const char *)address < (char *)region->address ||
                      (const char *)address >= (char *)region->address + region->bytes))
        region = region->next;
    pthread_mutex_unlock(&regions_lock);
    return region;
}

bool fake_is_known(const void *address) { return region_of(address) != NULL; }

static CUresult region_remove(void *address) {
    pthread_mutex_lock(&regions_lock);
    struct region **at = &regions;
    while (*at && (*at)->address != address)
        at = &(*at)->next;
    struct region *region = *at;
    if (region)
        *at = region->next;
    pthread_mutex_unlock(&regions_lock);
    if (!region)
        return CUDA_ERROR_INVALID_VALUE;
    if (region->memory.fd >= 0)
        close(region->memory.fd);
    free(region);
    fake_gone();
    return CUDA_SUCCESS;
}

/* New memory is full of junk, as it may be on a GPU. */
static CUresult memory_new(size_t bytes, struct memory *ret) {
    int fd = memfd_create(MEMFD_NAME, MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) < 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    const char junk[] = "junk";
    for (size_t at = 0; at < bytes; at += 4096)
        if (pwrite(fd, junk, sizeof(junk), (off_t)at) != (ssize_t)sizeof(junk))
            return CUDA_ERROR_OUT_OF_MEMORY;
    *ret = (struct memory){.fd = fd, .bytes = bytes};
    return CUDA_SUCCESS;
}

static void *map_shared(int fd, size_t bytes) {
    void *address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return address == MAP_FAILED ? NULL : address;
}

EXPORT CUresult cuMemGetInfo(size_t *available, size_t *total) {
    IN_CONTEXT();
    *available = (size_t)12 << 30;
    *total = (size_t)16 << 30;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAlloc(CUdeviceptr *address, size_t bytes) {
    IN_CONTEXT();
    fake_unsafe_in_capture();
    struct memory memory;
    TRY(memory_new(bytes, &memory));
    *address = (CUdeviceptr)map_shared(memory.fd, bytes);
    return region_add((void *)*address, bytes, memory);
}

EXPORT CUresult cuMemFree(CUdeviceptr address) {
    struct region *region = region_of((void *)address);
    if (!region)
        return CUDA_ERROR_INVALID_VALUE;
    munmap(region->address, region->bytes);
    return region_remove((void *)address);
}

/* pid and descriptor, which the other process opens again. */
struct handle_bytes {
    int pid, fd;
    size_t bytes;
};

EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    IN_CONTEXT();
    struct region *region = region_of((void *)address);
    if (!region || region->memory.fd < 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct handle_bytes bytes = {.pid = (int)getpid(), .fd = region->memory.fd, .bytes = region->bytes};
    memset(handle, 0, sizeof(*handle));
    memcpy(handle, &bytes, sizeof(bytes));
    return CUDA_SUCCESS;
}

EXPORT CUresult cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags) {
    (void)flags;
    IN_CONTEXT();
    fake_unsafe_in_capture();
    struct handle_bytes bytes;
    memcpy(&bytes, &handle, sizeof(bytes));
    if (bytes.pid == (int)getpid())
        return CUDA_ERROR_INVALID_CONTEXT;
    char path[64];
    (void)snprintf(path, sizeof(path), "/proc/%d/fd/%d", bytes.pid, bytes.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return CUDA_ERROR_INVALID_HANDLE;
    *address = (CUdeviceptr)map_shared(fd, bytes.bytes);
    close(fd); /* a mapping needs no file of its process any more */
    return region_add((void *)*address, bytes.bytes, (struct memory){.fd = -1, .bytes = bytes.bytes});
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr address) { return cuMemFree(address); }

EXPORT CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *properties,
                                              CUmemAllocationGranularity_flags option) {
    (void)properties;
    (void)option;
    MAY_FAIL();
    *granularity = GRANULARITY;
    return CUDA_SUCCESS;
}

static CUresult handle_new(struct memory memory, CUmemGenericAllocationHandle *ret) {
    struct memory *held = malloc(sizeof(*held));
    if (!held)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *held = memory;
    *ret = (CUmemGenericAllocationHandle)(uintptr_t)held;
    fake_born();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                            unsigned long long flags) {
    (void)flags;
    MAY_FAIL();
    fake_unsafe_in_capture();
    if (bytes % GRANULARITY != 0 || properties->requestedHandleTypes != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    struct memory memory;
    TRY(memory_new(bytes, &memory));
    return handle_new(memory, handle);
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    struct memory *memory = (struct memory *)(uintptr_t)handle;
    close(memory->fd);
    free(memory);
    fake_gone();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemExportToShareableHandle(void *ret, CUmemGenericAllocationHandle handle,
                                             CUmemAllocationHandleType type, unsigned long long flags) {
    (void)flags;
    MAY_FAIL();
    int fd = type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ? dup(((struct memory *)(uintptr_t)handle)->fd) : -1;
    if (fd < 0)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(ret, &fd, sizeof(fd));
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *os_handle,
                                               CUmemAllocationHandleType type) {
    (void)type;
    MAY_FAIL();
    fake_unsafe_in_capture();
    char path[64], target[64] = "";
    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", (int)(intptr_t)os_handle);
    struct stat status;
    if (readlink(path, target, sizeof(target) - 1) < 0 || !strstr(target, "memfd:" MEMFD_NAME) ||
        fstat((int)(intptr_t)os_handle, &status) < 0)
        return CUDA_ERROR_UNKNOWN;
    if (fake_cuda.private_imports) {
        int fd = memfd_create(MEMFD_NAME, MFD_CLOEXEC);
        return ftruncate(fd, status.st_size) == 0 ? handle_new((struct memory){fd, (size_t)status.st_size}, handle)
                                                  : CUDA_ERROR_OUT_OF_MEMORY;
    }
    int fd = fcntl((int)(intptr_t)os_handle, F_DUPFD_CLOEXEC, 0);
    return handle_new((struct memory){.fd = fd, .bytes = (size_t)status.st_size}, handle);
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr wanted,
                                    unsigned long long flags) {
    (void)alignment;
    (void)wanted;
    (void)flags;
    MAY_FAIL();
    void *reserved = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *address = (CUdeviceptr)reserved;
    return region_add(reserved, bytes, (struct memory){.fd = -1});
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    struct region *region = region_of((void *)address);
    if (!region || region->mappings > 0 || region->bytes != bytes)
        return CUDA_ERROR_INVALID_VALUE;
    munmap((void *)address, bytes);
    return region_remove((void *)address);
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags) {
    (void)flags;
    MAY_FAIL();
    fake_unsafe_in_capture();
    const struct memory *memory = (const struct memory *)(uintptr_t)handle;
    struct region *region = region_of((void *)address);
    if (!region || offset != 0 || memory->bytes != bytes)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (mmap((void *)address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->fd, 0) == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    region->mappings++;
    fake_born();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count) {
    MAY_FAIL();
    int protection = PROT_READ | (access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_WRITE : 0);
    return count == 1 && mprotect((void *)address, bytes, protection) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    struct region *region = region_of((void *)address);
    if (!region || region->mappings == 0)
        return CUDA_ERROR_INVALID_VALUE;
    (void)mmap((void *)address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    region->mappings--;
    fake_gone();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned int flags) {
    (void)flags;
    IN_CONTEXT();
    fake_unsafe_in_capture();
    *address = malloc(bytes);
    if (!*address)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memset(*address, 0xFF, bytes);
    return region_add(*address, bytes, (struct memory){.fd = -1});
}

EXPORT CUresult cuMemFreeHost(void *address) {
    TRY(region_remove(address));
    free(address);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostRegister(void *address, size_t bytes, unsigned int flags) {
    (void)flags;
    IN_CONTEXT();
    fake_unsafe_in_capture();
    if (region_of(address))
        return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    return region_add(address, bytes, (struct memory){.fd = -1});
}

EXPORT CUresult cuMemHostUnregister(void *address) { return region_remove(address); }

EXPORT CUresult cuMemHostGetDevicePointer(CUdeviceptr *device, void *address, unsigned int flags) {
    (void)flags;
    IN_CONTEXT();
    if (!region_of(address))
        return CUDA_ERROR_INVALID_VALUE;
    *device = (CUdeviceptr)address;
    return CUDA_SUCCESS;
}
