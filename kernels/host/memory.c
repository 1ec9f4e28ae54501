/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A chunk is a memfd that is sealed against resizing, so that whoever maps it can never be sent a SIGBUS by a truncation.
 * It is sparse: pages of it exist once they are written.
 */
#include "kernels/host/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/span.h"
#include "proto/cleanup.h"

struct oscar_chunk {
    uint8_t *address;
    uint64_t bytes;
    int fd;
};

struct oscar_range {
    uint8_t *address;
    uint64_t bytes;
};

size_t host_granularity(const struct oscar_device *device) {
    (void)device;
    return (size_t)sysconf(_SC_PAGESIZE);
}

static int check_size(uint64_t bytes, const char *what, struct oscar_cause *cause) {
    uint64_t page = host_granularity(NULL);
    if (bytes == 0 || bytes % page != 0 || bytes > (uint64_t)PTRDIFF_MAX)
        return oscar_fail(cause, OSCAR_ERR_INVALID, "%s of %" PRIu64 " bytes: not a multiple of %" PRIu64, what, bytes,
                          page);
    return 0;
}

/* Maps nothing: the addresses stay reserved, and nobody else's mapping can come to lie there. */
static bool reserve_again(const struct oscar_range *range, uint64_t offset, uint64_t bytes) {
    return mmap(range->address + offset, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
                0) != MAP_FAILED;
}

/* With errno as mmap left it. */
static int map_failure(const char *what, uint64_t bytes, struct oscar_cause *cause) {
    int code = errno == EACCES || errno == EPERM ? OSCAR_ERR_PERMISSION : OSCAR_ERR_NO_MEMORY;
    return oscar_fail(cause, code, "%s of %" PRIu64 " bytes cannot be mapped: %m", what, bytes);
}

/* Maps `fd` (taken in any case) read-write as the owner does. */
static int chunk_take(int fd_taken, uint64_t bytes, struct oscar_chunk **ret, struct oscar_cause *cause) {
    _cleanup_close_ int fd = fd_taken;
    _cleanup_free_ struct oscar_chunk *chunk = malloc(sizeof(*chunk));
    if (!chunk)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a chunk");
    void *address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (address == MAP_FAILED)
        return map_failure("chunk", bytes, cause);
    *chunk = (struct oscar_chunk){.address = address, .bytes = bytes, .fd = TAKE_FD(fd)};
    *ret = TAKE_PTR(chunk);
    return 0;
}

int host_chunk_create(struct oscar_device *device, uint64_t bytes, struct oscar_chunk **ret,
                      struct oscar_cause *cause) {
    (void)device;
    int r = check_size(bytes, "chunk", cause);
    if (r < 0)
        return r;
    _cleanup_close_ int fd = memfd_create("oscar-chunk", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return oscar_fail(cause, OSCAR_ERR_LIMIT, "memfd_create: %m");
    /* Who holds a read-only descriptor could otherwise open it again for writing through /proc/self/fd. */
    if (fchmod(fd, 0600) < 0 || ftruncate(fd, (off_t)bytes) < 0 ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "chunk of %" PRIu64 " bytes: %m", bytes);
    return chunk_take(TAKE_FD(fd), bytes, ret, cause);
}

/* The descriptor's memory must be there for as long as it is mapped: large enough, and sealed against shrinking. */
static int check_descriptor(int fd, uint64_t bytes, struct oscar_cause *cause) {
    struct stat status;
    if (fstat(fd, &status) < 0)
        return oscar_fail(cause, OSCAR_ERR_INVALID, "chunk descriptor %d: %m", fd);
    if (!S_ISREG(status.st_mode) || status.st_size < 0 || (uint64_t)status.st_size < bytes)
        return oscar_fail(cause, OSCAR_ERR_INVALID, "chunk descriptor has %lld bytes where %" PRIu64 " are needed",
                          (long long)status.st_size, bytes);
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK))
        return oscar_fail(cause, OSCAR_ERR_INVALID, "chunk descriptor is not a memfd that is sealed against shrinking");
    return 0;
}

int host_chunk_adopt(struct oscar_device *device, int fd_taken, uint64_t bytes, struct oscar_chunk **ret,
                     struct oscar_cause *cause) {
    (void)device;
    _cleanup_close_ int fd = fd_taken;
    int r = check_size(bytes, "chunk", cause);
    if (r < 0)
        return r;
    r = check_descriptor(fd, bytes, cause);
    if (r < 0)
        return r;
    struct stat status;
    if (fstat(fd, &status) < 0 || (uint64_t)status.st_size != bytes)
        return oscar_fail(cause, OSCAR_ERR_INVALID, "chunk descriptor does not have the %" PRIu64 " bytes of its chunk",
                          bytes);
    return chunk_take(TAKE_FD(fd), bytes, ret, cause);
}

static int duplicate(const struct oscar_chunk *chunk, int *ret_fd, struct oscar_cause *cause) {
    int fd = fcntl(chunk->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return oscar_fail(cause, OSCAR_ERR_LIMIT, "chunk descriptor cannot be duplicated: %m");
    *ret_fd = fd;
    return 0;
}

int host_chunk_export(struct oscar_chunk *chunk, bool writable, int *ret_fd, struct oscar_cause *cause) {
    if (writable)
        return duplicate(chunk, ret_fd, cause);
    /* A duplicate shares the open mode; only a new opening of the same file can be read-only. */
    char path[64];
    snprintf(path, sizeof(path), "/proc/self/fd/%d", chunk->fd);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return oscar_fail(cause, OSCAR_ERR_IO, "read-only descriptor: %s: %m (is /proc mounted?)", path);
    *ret_fd = fd;
    return 0;
}

int host_chunk_descriptor(struct oscar_chunk *chunk, int *ret_fd, struct oscar_cause *cause) {
    return duplicate(chunk, ret_fd, cause);
}

uint8_t *host_chunk_address(const struct oscar_chunk *chunk) { return chunk->address; }

void host_chunk_free(struct oscar_chunk *chunk) {
    if (!chunk)
        return;
    /* Importers may keep their mapping for as long as they like; the memory behind it goes back now. Where a file system
     * cannot do that, it goes back with the last mapping. */
    (void)fallocate(chunk->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)chunk->bytes);
    munmap(chunk->address, chunk->bytes);
    close(chunk->fd);
    free(chunk);
}

int host_range_reserve(struct oscar_device *device, uint64_t bytes, struct oscar_range **ret,
                       struct oscar_cause *cause) {
    (void)device;
    int r = check_size(bytes, "range", cause);
    if (r < 0)
        return r;
    _cleanup_free_ struct oscar_range *range = malloc(sizeof(*range));
    if (!range)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a range");
    void *address = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED)
        return map_failure("range", bytes, cause);
    *range = (struct oscar_range){.address = address, .bytes = bytes};
    *ret = TAKE_PTR(range);
    return 0;
}

uint8_t *host_range_address(const struct oscar_range *range) { return range->address; }

uint8_t *host_range_locate(const struct oscar_range *range, uint64_t offset) { return range->address + offset; }

int host_range_map(struct oscar_range *range, const struct oscar_range_chunk *chunk, uint32_t chunks,
                   struct oscar_cause *cause) {
    int r = span_check_chunks(chunk, chunks, host_granularity(NULL), range->bytes, cause);
    for (uint32_t i = 0; r == 0 && i < chunks; i++)
        r = check_descriptor(chunk[i].fd, chunk[i].bytes, cause);
    if (r < 0)
        return r;
    for (uint32_t i = 0; i < chunks; i++) {
        int protection = PROT_READ | (chunk[i].writable ? PROT_WRITE : 0);
        if (mmap(range->address + chunk[i].offset, chunk[i].bytes, protection, MAP_SHARED | MAP_NORESERVE | MAP_FIXED,
                 chunk[i].fd, 0) != MAP_FAILED)
            continue;
        r = map_failure("chunk", chunk[i].bytes, cause);
        for (uint32_t k = 0; k <= i; k++) /* of this one, too: a failed MAP_FIXED may have unmapped what was there */
            (void)reserve_again(range, chunk[k].offset, chunk[k].bytes);
        return r;
    }
    return 0;
}

int host_range_unmap(struct oscar_range *range, uint64_t offset, uint64_t bytes) {
    int r = span_check(offset, bytes, host_granularity(NULL), range->bytes, NULL);
    if (r < 0)
        return r;
    return reserve_again(range, offset, bytes) ? 0 : OSCAR_ERR_NO_MEMORY;
}

void host_range_free(struct oscar_range *range) {
    if (!range)
        return;
    munmap(range->address, range->bytes);
    free(range);
}

static void discard_chunk(struct oscar_chunk **chunk) { host_chunk_free(*chunk); }
static void discard_range(struct oscar_range **range) { host_range_free(*range); }

/* What one side writes the other one reads, and a reader's descriptor cannot be mapped for writing. */
int host_self_test(struct oscar_device *device, struct oscar_cause *cause) {
    const uint64_t bytes = host_granularity(device);
    _cleanup_(discard_chunk) struct oscar_chunk *chunk = NULL;
    _cleanup_(discard_range) struct oscar_range *range = NULL;
    _cleanup_close_ int fd = -1;
    int r = host_chunk_create(device, bytes, &chunk, cause);
    if (r == 0)
        r = host_chunk_export(chunk, false, &fd, cause);
    if (r == 0)
        r = host_range_reserve(device, bytes, &range, cause);
    if (r == 0)
        r = host_range_map(range, &(struct oscar_range_chunk){.bytes = bytes, .fd = fd}, 1, cause);
    if (r < 0)
        return r;
    memset(chunk->address, 0xA5, bytes);
    if (memcmp(chunk->address, range->address, bytes) != 0)
        return oscar_fail(cause, OSCAR_ERR_DEVICE, "self test: a mapped chunk does not read as it was written");
    if (host_range_map(range, &(struct oscar_range_chunk){.bytes = bytes, .fd = fd, .writable = true}, 1, NULL) == 0)
        return oscar_fail(cause, OSCAR_ERR_DEVICE, "self test: a reader could map a chunk for writing");
    return 0;
}
