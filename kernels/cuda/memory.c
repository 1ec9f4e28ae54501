/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chunks and ranges. A chunk is one allocation of the driver's virtual memory management, exported once as a POSIX descriptor, which
 * holds the memory by itself: it outlives its owner. An importer chooses its own access, so a mapping without writing stops mistakes,
 * not an attacker who holds the descriptor. share_ipc.c has the other form.
 */
#include "kernels/cuda/memory.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
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

struct mapping {
    uint64_t offset, bytes;
    CUdeviceptr ipc; /* where the driver put it; 0: at its offset in the range */
};

struct oscar_range {
    struct oscar_device *device;
    CUdeviceptr address;
    uint64_t bytes;
    pthread_rwlock_t lock;    /* of what follows */
    struct mapping *mappings; /* by rising offset; they do not overlap */
    size_t count, capacity;
    atomic_size_t elsewhere; /* how many do not lie at their offset */
};

size_t cuda_granularity(const struct oscar_device *device) { return device->granularity; }

static int check_size(const struct oscar_device *device, uint64_t bytes, const char *what, struct oscar_cause *cause) {
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

static CUmemAllocationProp vmm_properties(const struct oscar_device *device) {
    return (CUmemAllocationProp){
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device->device},
    };
}

static int vmm_map(struct oscar_device *device, CUdeviceptr address, uint64_t bytes,
                   CUmemGenericAllocationHandle memory, bool writable, struct oscar_cause *cause) {
    const struct cuda_driver *driver = device->driver;
    CUresult result = driver->cuMemMap(address, bytes, 0, memory, 0);
    if (result == CUDA_ERROR_INVALID_VALUE)
        return oscar_fail(cause, OSCAR_ERR_INVALID, "cuMemMap: the chunk does not have %" PRIu64 " bytes", bytes);
    int r = cuda_device_result(device, result, "cuMemMap", cause);
    if (r < 0)
        return r;
    CUmemAccessDesc access = {
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device->device},
        .flags = writable ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ,
    };
    r = cuda_device_result(device, driver->cuMemSetAccess(address, bytes, &access, 1), "cuMemSetAccess", cause);
    if (r < 0)
        (void)driver->cuMemUnmap(address, bytes);
    return r;
}

static int vmm_import(struct oscar_device *device, int fd, CUmemGenericAllocationHandle *ret,
                      struct oscar_cause *cause) {
    CUresult result = device->driver->cuMemImportFromShareableHandle(ret, (void *)(intptr_t)fd,
                                                                     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (result == CUDA_ERROR_INVALID_VALUE || result == CUDA_ERROR_INVALID_HANDLE ||
        result == CUDA_ERROR_OPERATING_SYSTEM)
        return oscar_fail(cause, OSCAR_ERR_INVALID, "descriptor %d is not one of device memory", fd);
    return cuda_device_result(device, result, "cuMemImportFromShareableHandle", cause);
}

/* --- chunks ----------------------------------------------------------------------------------------------------------------- */

/* Takes apart as much as there is. In the context, or without one where the device is lost. */
static void chunk_discard(struct oscar_chunk *chunk) {
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
    r = vmm_map(device, address, chunk->bytes, chunk->memory, true, cause);
    chunk->mapped = r == 0;
    return r;
}

static int chunk_allocate(struct oscar_chunk *chunk, struct oscar_cause *cause) {
    struct oscar_device *device = chunk->device;
    const struct cuda_driver *driver = device->driver;
    CUmemAllocationProp properties = vmm_properties(device);
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

/* Inside cuda_enter. */
static int chunk_make(struct oscar_device *device, enum oscar_share share, uint64_t bytes, struct oscar_chunk **ret,
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
        r = cuda_settle(device, device->service, cause);
    if (r < 0) {
        chunk_discard(chunk);
        return r;
    }
    *ret = chunk;
    return 0;
}

int cuda_chunk_create(struct oscar_device *device, uint64_t bytes, struct oscar_chunk **ret,
                      struct oscar_cause *cause) {
    int r = check_size(device, bytes, "chunk", cause);
    if (r == 0)
        r = cuda_enter(device, cause);
    if (r < 0)
        return r;
    r = chunk_make(device, device->share, bytes, ret, cause);
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
    int r = vmm_import(chunk->device, chunk->fd, &chunk->memory, cause);
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
    int r = check_size(device, bytes, "chunk", cause);
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
            chunk_discard(chunk);
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
    chunk_discard(chunk);
    if (inside)
        cuda_leave(device);
}

/* --- ranges ----------------------------------------------------------------------------------------------------------------- */

/* Where the driver reserves no addresses nothing can be mapped at one either: the range is then a name for what lies elsewhere. */
static int range_addresses(struct oscar_range *range, struct oscar_cause *cause) {
    struct oscar_device *device = range->device;
    if (!device->vmm) {
        void *address = mmap(NULL, range->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (address == MAP_FAILED)
            return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no addresses for %" PRIu64 " bytes: %m", range->bytes);
        range->address = (CUdeviceptr)address;
        return 0;
    }
    int r = cuda_enter(device, cause);
    if (r < 0)
        return r;
    r = cuda_device_result(device, device->driver->cuMemAddressReserve(&range->address, range->bytes, 0, 0, 0),
                           "cuMemAddressReserve", cause);
    cuda_leave(device);
    return r;
}

int cuda_range_reserve(struct oscar_device *device, uint64_t bytes, struct oscar_range **ret,
                       struct oscar_cause *cause) {
    int r = check_size(device, bytes, "range", cause);
    if (r < 0)
        return r;
    struct oscar_range *range = calloc(1, sizeof(*range));
    if (!range)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a range");
    range->device = device;
    range->bytes = bytes;
    r = range_addresses(range, cause);
    if (r < 0) {
        free(range);
        return r;
    }
    pthread_rwlock_init(&range->lock, NULL);
    *ret = range;
    return 0;
}

uint8_t *cuda_range_address(const struct oscar_range *range) { return (uint8_t *)range->address; }

/* Index of the first mapping that ends after `offset`. */
static size_t mapping_after(const struct oscar_range *range, uint64_t offset) {
    size_t low = 0, high = range->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (range->mappings[middle].offset + range->mappings[middle].bytes <= offset)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

uint8_t *cuda_range_locate(const struct oscar_range *range, uint64_t offset) {
    CUdeviceptr found = range->address + offset;
    if (atomic_load_explicit(&range->elsewhere, memory_order_acquire) == 0)
        return (uint8_t *)found;
    pthread_rwlock_t *lock = &((struct oscar_range *)(uintptr_t)range)->lock;
    pthread_rwlock_rdlock(lock);
    size_t i = mapping_after(range, offset);
    if (i < range->count && range->mappings[i].offset <= offset && range->mappings[i].ipc)
        found = range->mappings[i].ipc + (offset - range->mappings[i].offset);
    pthread_rwlock_unlock(lock);
    return (uint8_t *)found;
}

static int check_span(const struct oscar_range *range, uint64_t offset, uint64_t bytes, struct oscar_cause *cause) {
    uint64_t unit = range->device->granularity;
    if (bytes == 0 || bytes % unit != 0 || offset % unit != 0 || bytes > range->bytes || offset > range->bytes - bytes)
        return oscar_fail(cause, OSCAR_ERR_INVALID,
                          "%" PRIu64 " bytes at %" PRIu64 " do not lie on multiples of %" PRIu64
                          " inside a range of %" PRIu64 " bytes",
                          bytes, offset, unit, range->bytes);
    return 0;
}

static void unmap_one(struct oscar_range *range, const struct mapping *mapping) {
    const struct cuda_driver *driver = range->device->driver;
    if (mapping->ipc) {
        (void)driver->cuIpcCloseMemHandle(mapping->ipc);
        atomic_fetch_sub(&range->elsewhere, 1);
    } else {
        (void)driver->cuMemUnmap(range->address + mapping->offset, mapping->bytes);
    }
}

/* Under the lock, in the context. The driver unmaps whole mappings only. */
static int unmap_span(struct oscar_range *range, uint64_t offset, uint64_t bytes, struct oscar_cause *cause) {
    size_t first = mapping_after(range, offset), end = first;
    while (end < range->count && range->mappings[end].offset < offset + bytes) {
        const struct mapping *mapping = &range->mappings[end++];
        if (mapping->offset < offset || mapping->offset + mapping->bytes > offset + bytes)
            return oscar_fail(cause, OSCAR_ERR_INVALID,
                              "%" PRIu64 " bytes at %" PRIu64 " cut through a chunk that is mapped at %" PRIu64, bytes,
                              offset, mapping->offset);
    }
    for (size_t i = first; i < end; i++)
        unmap_one(range, &range->mappings[i]);
    if (end > first)
        memmove(&range->mappings[first], &range->mappings[end], (range->count - end) * sizeof(*range->mappings));
    range->count -= end - first;
    return 0;
}

static int make_room(struct oscar_range *range, struct oscar_cause *cause) {
    if (range->count < range->capacity)
        return 0;
    size_t capacity = range->capacity ? range->capacity * 2 : 16;
    struct mapping *mappings = realloc(range->mappings, capacity * sizeof(*mappings));
    if (!mappings)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a range's list");
    range->mappings = mappings;
    range->capacity = capacity;
    return 0;
}

static int map_memory(struct oscar_range *range, const struct mapping *mapping, CUmemGenericAllocationHandle memory,
                      bool writable, struct oscar_cause *cause) {
    int r = unmap_span(range, mapping->offset, mapping->bytes, cause);
    return r < 0 ? r
                 : vmm_map(range->device, range->address + mapping->offset, mapping->bytes, memory, writable, cause);
}

/* Imports `fd` and maps it in the place of what is there; what `fd` is not stays mapped. Under the lock, in the context. */
static int map_descriptor(struct oscar_range *range, struct mapping *mapping, int fd, bool writable,
                          struct oscar_cause *cause) {
    struct oscar_device *device = range->device;
    struct cuda_ipc_handle handle;
    if (cuda_ipc_read(fd, &handle)) {
        int r = cuda_ipc_map(device, &handle, mapping->bytes, &mapping->ipc, cause);
        if (r < 0)
            return r;
        r = unmap_span(range, mapping->offset, mapping->bytes, cause);
        if (r < 0)
            (void)device->driver->cuIpcCloseMemHandle(mapping->ipc);
        else
            atomic_fetch_add(&range->elsewhere, 1);
        return r;
    }
    if (!device->vmm)
        return oscar_fail(cause, OSCAR_ERR_UNSUPPORTED,
                          "%s cannot map descriptors of device memory: let the daemon share by IPC handles",
                          device->id);
    CUmemGenericAllocationHandle memory;
    int r = vmm_import(device, fd, &memory, cause);
    if (r < 0)
        return r;
    r = map_memory(range, mapping, memory, writable, cause);
    (void)device->driver->cuMemRelease(memory); /* the mapping keeps it */
    return r;
}

static void insert(struct oscar_range *range, const struct mapping *mapping) {
    size_t at = mapping_after(range, mapping->offset);
    memmove(&range->mappings[at + 1], &range->mappings[at], (range->count - at) * sizeof(*mapping));
    range->mappings[at] = *mapping;
    range->count++;
}

int cuda_range_map(struct oscar_range *range, uint64_t offset, uint64_t bytes, int fd, bool writable,
                   struct oscar_cause *cause) {
    int r = check_span(range, offset, bytes, cause);
    if (r == 0)
        r = cuda_enter(range->device, cause);
    if (r < 0)
        return r;
    struct mapping mapping = {.offset = offset, .bytes = bytes};
    pthread_rwlock_wrlock(&range->lock);
    r = make_room(range, cause);
    if (r == 0)
        r = map_descriptor(range, &mapping, fd, writable, cause);
    if (r == 0)
        insert(range, &mapping);
    pthread_rwlock_unlock(&range->lock);
    cuda_leave(range->device);
    return r;
}

int cuda_range_unmap(struct oscar_range *range, uint64_t offset, uint64_t bytes) {
    int r = check_span(range, offset, bytes, NULL);
    if (r == 0)
        r = cuda_enter(range->device, NULL);
    if (r < 0)
        return r;
    pthread_rwlock_wrlock(&range->lock);
    r = unmap_span(range, offset, bytes, NULL);
    pthread_rwlock_unlock(&range->lock);
    cuda_leave(range->device);
    return r;
}

void cuda_range_free(struct oscar_range *range) {
    if (!range)
        return;
    struct oscar_device *device = range->device;
    bool inside = cuda_enter(device, NULL) == 0;
    for (size_t i = 0; i < range->count; i++)
        unmap_one(range, &range->mappings[i]);
    if (device->vmm)
        (void)device->driver->cuMemAddressFree(range->address, range->bytes);
    else
        munmap((void *)range->address, range->bytes);
    if (inside)
        cuda_leave(device);
    pthread_rwlock_destroy(&range->lock);
    free(range->mappings);
    free(range);
}

/* --- which form, and whether it works --------------------------------------------------------------------------------------- */

static int try_form(struct oscar_device *device, enum oscar_share share, struct oscar_cause *cause) {
    struct oscar_chunk *chunk;
    int r = chunk_make(device, share, device->granularity, &chunk, cause);
    if (r == 0)
        chunk_discard(chunk);
    return r;
}

static int has_attribute(struct oscar_device *device, CUdevice_attribute attribute, const char *lack,
                         struct oscar_cause *cause) {
    int value;
    int r = cuda_device_result(device, device->driver->cuDeviceGetAttribute(&value, attribute, device->device),
                               "cuDeviceGetAttribute", cause);
    return r < 0 || value ? r : oscar_fail(cause, OSCAR_ERR_UNSUPPORTED, "%s", lack);
}

static int try_descriptors(struct oscar_device *device, struct oscar_cause *cause) {
    int r = has_attribute(device, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                          "the driver has no virtual memory management here", cause);
    if (r < 0)
        return r;
    device->vmm = true;
    CUmemAllocationProp properties = vmm_properties(device);
    r = has_attribute(device, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                      "the driver gives no descriptors of device memory here", cause);
    if (r == 0)
        r = cuda_device_result(device,
                               device->driver->cuMemGetAllocationGranularity(&device->granularity, &properties,
                                                                             CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                               "cuMemGetAllocationGranularity", cause);
    return r < 0 ? r : try_form(device, OSCAR_SHARE_VMM, cause);
}

int cuda_share_choose(struct oscar_device *device, enum oscar_share wanted, struct oscar_cause *ret_why,
                      struct oscar_cause *cause) {
    struct oscar_cause lack = {""};
    device->granularity = CUDA_IPC_GRANULARITY;
    device->share = OSCAR_SHARE_VMM;
    int r = try_descriptors(device, &lack);
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
    return r < 0 ? r : cuda_settle(device, device->service, cause);
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
        r = cuda_settle(device, device->service, cause);
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
        r = cuda_range_map(range, 0, bytes, fd, false, cause);
    if (r == 0)
        r = cuda_enter(device, cause);
    if (r < 0)
        return r;
    CUdeviceptr reader = device->share == OSCAR_SHARE_VMM ? range->address : chunk->address;
    r = compare(device, chunk->address, reader, bytes, cause);
    cuda_leave(device);
    return r;
}
