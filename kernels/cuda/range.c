/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ranges: addresses reserved once, in which imported chunks are mapped at their offsets; a list says what is mapped where. Memory
 * behind an IPC handle comes to lie elsewhere.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "kernels/cuda/memory.h"

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
    int r = cuda_check_size(device, bytes, "range", cause);
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
    return r < 0
               ? r
               : cuda_vmm_map(range->device, range->address + mapping->offset, mapping->bytes, memory, writable, cause);
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
    int r = cuda_vmm_import(device, fd, &memory, cause);
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
