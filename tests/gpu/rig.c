/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/rig.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ALIGNMENT 256U
#define POISON 0xFF
#define POISON_BYTES ((size_t)1 << 20)
#define MOST_THREADS 64

struct rig_memory {
    struct rig_memory *next;
    void *address;
    struct oscar_chunk *chunk; /* NULL on the host */
};

static const uint64_t patience_ns = UINT64_C(60) * 1000 * 1000 * 1000;

static const char *backend(void) {
    const char *given = getenv("OSCAR_TEST_BACKEND");
    return given && *given ? given : "cuda";
}

bool rig_small(void) {
    const char *given = getenv("OSCAR_TEST_SMALL");
    return given && *given;
}

bool rig_on_gpu(void) { return strcmp(backend(), "cuda") == 0; }

static struct oscar_stream_impl *open_stream(struct rig *rig, bool asynchronous) {
    struct oscar_stream_options options = {.threads = 2, .asynchronous = asynchronous};
    struct oscar_stream_impl *stream = NULL;
    struct oscar_cause cause = {""};
    if (rig->ops->stream_open(rig->device, &options, &stream, &cause) < 0)
        fail_msg("stream_open: %s", cause.text);
    return stream;
}

static enum oscar_share share(void) {
    const char *given = getenv("OSCAR_TEST_SHARE");
    return given && strcmp(given, "ipc") == 0 ? OSCAR_SHARE_IPC : OSCAR_SHARE_AUTO;
}

struct rig *rig_open(void) {
    struct rig *rig = calloc(1, sizeof(*rig));
    assert_non_null(rig);
    struct oscar_cause cause = {""};
    struct oscar_device_options options = {.share = share()};
    if (oscar_device_find(backend(), &rig->ops, &cause) < 0 ||
        rig->ops->device_open(&options, &rig->device, &cause) < 0)
        fail_msg("backend %s: %s", backend(), cause.text);
    print_message("%s\n", rig->ops->device_summary(rig->device));
    rig->synchronous = open_stream(rig, false);
    rig->asynchronous = open_stream(rig, true);
    return rig;
}

void rig_close(struct rig *rig) {
    while (rig->memories)
        rig_free(rig, rig->memories->address);
    rig->ops->stream_close(rig->asynchronous);
    rig->ops->stream_close(rig->synchronous);
    rig->ops->device_close(rig->device);
    host_pool_close(rig->pool);
    free(rig);
}

static size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

static void *device_memory(struct rig *rig, size_t bytes, struct oscar_chunk **ret_chunk) {
    size_t whole = round_up(bytes, rig->ops->granularity(rig->device));
    struct oscar_cause cause = {""};
    if (rig->ops->chunk_create(rig->device, whole, ret_chunk, &cause) < 0)
        fail_msg("%zu bytes of device memory: %s", whole, cause.text);
    return rig->ops->chunk_address(*ret_chunk) + (whole - round_up(bytes, ALIGNMENT));
}

void *rig_alloc(struct rig *rig, size_t bytes) {
    if (bytes == 0)
        bytes = 1;
    struct rig_memory *memory = calloc(1, sizeof(*memory));
    assert_non_null(memory);
    memory->address =
        rig_on_gpu() ? device_memory(rig, bytes, &memory->chunk) : aligned_alloc(ALIGNMENT, round_up(bytes, ALIGNMENT));
    assert_non_null(memory->address);
    memory->next = rig->memories;
    rig->memories = memory;
    rig_poison(rig, memory->address, round_up(bytes, ALIGNMENT));
    return memory->address;
}

void rig_free(struct rig *rig, void *address) {
    if (!address)
        return;
    struct rig_memory **at = &rig->memories;
    while (*at && (*at)->address != address)
        at = &(*at)->next;
    struct rig_memory *memory = *at;
    assert_non_null(memory);
    *at = memory->next;
    if (memory->chunk)
        rig->ops->chunk_free(memory->chunk);
    else
        free(memory->address);
    free(memory);
}

static void copy(struct rig *rig, void *destination, const void *source, size_t count) {
    int r = rig->ops->copy(rig->synchronous, destination, source, count);
    if (r < 0)
        fail_msg("copy of %zu bytes: %s", count, oscar_error_text(r));
}

void rig_poison(struct rig *rig, void *memory, size_t bytes) {
    size_t done = bytes < POISON_BYTES ? bytes : POISON_BYTES;
    uint8_t *poison = malloc(POISON_BYTES);
    assert_non_null(poison);
    memset(poison, POISON, POISON_BYTES);
    copy(rig, memory, poison, done);
    free(poison);
    while (done < bytes) { /* what is done doubles, without leaving the device */
        size_t more = bytes - done < done ? bytes - done : done;
        copy(rig, (uint8_t *)memory + done, memory, more);
        done += more;
    }
}

void rig_write(struct rig *rig, void *memory, const void *bytes, size_t count) { copy(rig, memory, bytes, count); }

void rig_read(struct rig *rig, void *ret_bytes, const void *memory, size_t count) {
    copy(rig, ret_bytes, memory, count);
}

void *rig_upload(struct rig *rig, const void *bytes, size_t count) {
    void *memory = rig_alloc(rig, count);
    rig_write(rig, memory, bytes, count);
    return memory;
}

struct host_pool *rig_pool(struct rig *rig) {
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    uint32_t threads = processors < 1 ? 1 : processors > MOST_THREADS ? MOST_THREADS : (uint32_t)processors;
    if (!rig->pool && host_pool_open(threads, &rig->pool, NULL) < 0)
        fail_msg("%u threads cannot be made", threads);
    return rig->pool;
}

int rig_wait(struct rig *rig, struct oscar_stream_impl *stream) {
    int r = rig->ops->stream_wait(stream, patience_ns);
    if (r == OSCAR_ERR_TIMEOUT)
        fail_msg("work of a stream is not done after a minute");
    return r;
}

void rig_calibration_load(struct rig *rig, const struct oscar_geometry *geometry,
                          const struct oscar_calibration *calibration) {
    struct oscar_cause cause = {""};
    if (rig->ops->calibration_load(rig->device, geometry, calibration, &cause) < 0)
        fail_msg("calibration_load: %s", cause.text);
}
