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
#include "kernels/span.h"
#include "proto/cleanup.h"

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

/* --- the list --------------------------------------------------------------------------------------------------------------- */

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

static void unmap_one(struct oscar_range *range, const struct mapping *mapping) {
    const struct cuda_driver *driver = range->device->driver;
    if (mapping->ipc) {
        (void)driver->cuIpcCloseMemHandle(mapping->ipc);
        atomic_fetch_sub(&range->elsewhere, 1);
    } else {
        (void)driver->cuMemUnmap(range->address + mapping->offset, mapping->bytes);
    }
}

/* Under the lock. The driver unmaps whole mappings only. */
static int check_cuts(const struct oscar_range *range, uint64_t offset, uint64_t bytes, struct oscar_cause *cause) {
    for (size_t i = mapping_after(range, offset); i < range->count && range->mappings[i].offset < offset + bytes; i++) {
        const struct mapping *mapping = &range->mappings[i];
        if (mapping->offset < offset || mapping->offset + mapping->bytes > offset + bytes)
            return oscar_fail(cause, OSCAR_ERR_INVALID,
                              "%" PRIu64 " bytes at %" PRIu64 " cut through a chunk that is mapped at %" PRIu64, bytes,
                              offset, mapping->offset);
    }
    return 0;
}

/* Under the lock, in the context, after check_cuts. */
static void unmap_span(struct oscar_range *range, uint64_t offset, uint64_t bytes) {
    size_t first = mapping_after(range, offset), end = first;
    for (; end < range->count && range->mappings[end].offset < offset + bytes; end++)
        unmap_one(range, &range->mappings[end]);
    if (end > first)
        memmove(&range->mappings[first], &range->mappings[end], (range->count - end) * sizeof(*range->mappings));
    range->count -= end - first;
}

/* --- mapping ---------------------------------------------------------------------------------------------------------------- */

/* A chunk on its way into the range. */
struct arrival {
    struct mapping mapping;
    bool writable;
    CUmemGenericAllocationHandle memory; /* unless it came by an IPC handle: that one is mapped already */
};

static int import_chunk(struct oscar_device *device, const struct oscar_range_chunk *chunk, struct arrival *ret,
                        struct oscar_cause *cause) {
    struct cuda_ipc_handle handle;
    *ret = (struct arrival){.mapping = {.offset = chunk->offset, .bytes = chunk->bytes}, .writable = chunk->writable};
    if (cuda_ipc_read(chunk->fd, &handle))
        return cuda_ipc_map(device, &handle, chunk->bytes, &ret->mapping.ipc, cause);
    if (!device->vmm)
        return oscar_fail(cause, OSCAR_ERR_UNSUPPORTED,
                          "%s cannot map descriptors of device memory: let the daemon share by IPC handles",
                          device->id);
    return cuda_vmm_import(device, chunk->fd, &ret->memory, cause);
}

/* Where memory is mapped, the mapping keeps it; else it is given back by this. */
static void drop_imports(struct oscar_device *device, const struct arrival *arrival, uint32_t count, bool mapped) {
    for (uint32_t i = 0; i < count; i++)
        if (!arrival[i].mapping.ipc)
            (void)device->driver->cuMemRelease(arrival[i].memory);
        else if (!mapped)
            (void)device->driver->cuIpcCloseMemHandle(arrival[i].mapping.ipc);
}

static int import_chunks(struct oscar_device *device, const struct oscar_range_chunk *chunk, uint32_t chunks,
                         struct arrival *ret, struct oscar_cause *cause) {
    for (uint32_t i = 0; i < chunks; i++) {
        int r = import_chunk(device, &chunk[i], &ret[i], cause);
        if (r < 0) {
            drop_imports(device, ret, i, false);
            return r;
        }
    }
    return 0;
}

/* Where the run of neighbours with equal access that begins with `i` ends. */
static uint32_t run_end(const struct arrival *arrival, uint32_t count, uint32_t i) {
    for (i++; i < count; i++) {
        const struct arrival *before = &arrival[i - 1];
        if (arrival[i].mapping.ipc || arrival[i].writable != before->writable ||
            arrival[i].mapping.offset != before->mapping.offset + before->mapping.bytes)
            break;
    }
    return i;
}

static int make_accessible(const struct oscar_range *range, const struct arrival *arrival, uint32_t count,
                           struct oscar_cause *cause) {
    int r = 0;
    for (uint32_t i = 0, end; r == 0 && i < count; i = end) {
        const struct mapping *first = &arrival[i].mapping;
        end = run_end(arrival, count, i);
        const struct mapping *last = &arrival[end - 1].mapping;
        if (!first->ipc)
            r = cuda_vmm_access(range->device, range->address + first->offset,
                                last->offset + last->bytes - first->offset, arrival[i].writable, cause);
    }
    return r;
}

static int map_memory(struct oscar_range *range, const struct arrival *arrival, uint32_t count,
                      struct oscar_cause *cause) {
    uint32_t mapped = 0;
    int r = 0;
    for (; r == 0 && mapped < count; mapped += r == 0)
        if (!arrival[mapped].mapping.ipc)
            r = cuda_vmm_map(range->device, range->address + arrival[mapped].mapping.offset,
                             arrival[mapped].mapping.bytes, arrival[mapped].memory, cause);
    if (r == 0)
        r = make_accessible(range, arrival, count, cause);
    for (uint32_t i = 0; r < 0 && i < mapped; i++)
        if (!arrival[i].mapping.ipc)
            unmap_one(range, &arrival[i].mapping);
    return r;
}

/* Under the lock. There is room, and both lists rise. */
static void insert(struct oscar_range *range, const struct arrival *arrival, uint32_t count) {
    size_t old = range->count, at = old + count;
    range->count = at;
    while (count > 0) {
        bool newer = old == 0 || range->mappings[old - 1].offset < arrival[count - 1].mapping.offset;
        range->mappings[--at] = newer ? arrival[--count].mapping : range->mappings[--old];
        if (newer && range->mappings[at].ipc)
            atomic_fetch_add(&range->elsewhere, 1);
    }
}

/* Under the lock, in the context. */
static int replace(struct oscar_range *range, const struct arrival *arrival, uint32_t count,
                   struct oscar_cause *cause) {
    int r = 0;
    for (uint32_t i = 0; r == 0 && i < count; i++)
        r = check_cuts(range, arrival[i].mapping.offset, arrival[i].mapping.bytes, cause);
    for (uint32_t i = 0; r == 0 && i < count; i++)
        unmap_span(range, arrival[i].mapping.offset, arrival[i].mapping.bytes);
    if (r == 0)
        r = map_memory(range, arrival, count, cause);
    if (r == 0)
        insert(range, arrival, count);
    return r;
}

/* Under the lock. */
static int make_room(struct oscar_range *range, uint32_t count, struct oscar_cause *cause) {
    size_t needed = range->count + count, capacity = range->capacity ? range->capacity : 16;
    while (capacity < needed)
        capacity *= 2;
    if (capacity == range->capacity)
        return 0;
    struct mapping *mappings = realloc(range->mappings, capacity * sizeof(*mappings));
    if (!mappings)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a range's list");
    range->mappings = mappings;
    range->capacity = capacity;
    return 0;
}

/* In the context. */
static int map_chunks(struct oscar_range *range, const struct oscar_range_chunk *chunk, uint32_t chunks,
                      struct oscar_cause *cause) {
    _cleanup_free_ struct arrival *arrival = calloc(chunks, sizeof(*arrival));
    if (!arrival)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for %" PRIu32 " chunks", chunks);
    int r = import_chunks(range->device, chunk, chunks, arrival, cause);
    if (r < 0)
        return r;
    pthread_rwlock_wrlock(&range->lock);
    r = make_room(range, chunks, cause);
    if (r == 0)
        r = replace(range, arrival, chunks, cause);
    pthread_rwlock_unlock(&range->lock);
    drop_imports(range->device, arrival, chunks, r == 0);
    return r;
}

int cuda_range_map(struct oscar_range *range, const struct oscar_range_chunk *chunk, uint32_t chunks,
                   struct oscar_cause *cause) {
    int r = span_check_chunks(chunk, chunks, range->device->granularity, range->bytes, cause);
    if (r == 0)
        r = cuda_enter(range->device, cause);
    if (r < 0)
        return r;
    r = map_chunks(range, chunk, chunks, cause);
    cuda_leave(range->device);
    return r;
}

/* --- unmapping -------------------------------------------------------------------------------------------------------------- */

int cuda_range_unmap(struct oscar_range *range, uint64_t offset, uint64_t bytes) {
    int r = span_check(offset, bytes, range->device->granularity, range->bytes, NULL);
    if (r == 0)
        r = cuda_enter(range->device, NULL);
    if (r < 0)
        return r;
    pthread_rwlock_wrlock(&range->lock);
    r = check_cuts(range, offset, bytes, NULL);
    if (r == 0)
        unmap_span(range, offset, bytes);
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
