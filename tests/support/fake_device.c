/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/fake_device.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct oscar_chunk {
    struct oscar_device *device;
    uint8_t *memory;
    uint64_t bytes;
};

struct oscar_stream_impl {
    struct oscar_device *device;
    _Atomic bool busy;
};

void fake_device_init(struct oscar_device *device) {
    *device = (struct oscar_device){.granularity = 4096, .loop = pthread_self()};
    (void)pthread_mutex_init(&device->mutex, NULL);
    (void)pthread_cond_init(&device->opened, NULL);
}

void fake_device_fini(struct oscar_device *device) {
    (void)pthread_cond_destroy(&device->opened);
    (void)pthread_mutex_destroy(&device->mutex);
}

void fake_device_hold(struct oscar_device *device, bool hold) {
    (void)pthread_mutex_lock(&device->mutex);
    device->closed = hold;
    (void)pthread_cond_broadcast(&device->opened);
    (void)pthread_mutex_unlock(&device->mutex);
}

void fake_device_hold_memory(struct oscar_device *device, bool hold) {
    (void)pthread_mutex_lock(&device->mutex);
    device->memory_closed = hold;
    (void)pthread_cond_broadcast(&device->opened);
    (void)pthread_mutex_unlock(&device->mutex);
}

uint64_t fake_device_bytes(struct oscar_device *device) {
    (void)pthread_mutex_lock(&device->mutex);
    uint64_t bytes = device->bytes;
    (void)pthread_mutex_unlock(&device->mutex);
    return bytes;
}

void fake_device_fail(struct oscar_device *device, enum fake_call call, uint64_t k, uint64_t more, int error) {
    (void)pthread_mutex_lock(&device->mutex);
    device->calls[call] = 0;
    device->fail_at[call] = k;
    device->fail_count[call] = more;
    device->error = error;
    (void)pthread_mutex_unlock(&device->mutex);
}

/* With the mutex held. */
static void pass(struct oscar_device *device, const bool *closed) {
    if (pthread_equal(pthread_self(), device->loop))
        abort();
    while (*closed)
        (void)pthread_cond_wait(&device->opened, &device->mutex);
}

static int enter(struct oscar_device *device, enum fake_call call) {
    (void)pthread_mutex_lock(&device->mutex);
    uint64_t number = ++device->calls[call], first = device->fail_at[call];
    int r = first != 0 && number >= first && number <= first + device->fail_count[call] ? device->error : 0;
    pass(device, call >= FAKE_INSPECT ? &device->closed : &device->memory_closed);
    (void)pthread_mutex_unlock(&device->mutex);
    return r;
}

static int stream_open(struct oscar_device *device, const struct oscar_stream_options *options,
                       struct oscar_stream_impl **ret, struct oscar_cause *cause) {
    (void)cause;
    if (options->asynchronous || !options->low_priority)
        abort();
    *ret = calloc(1, sizeof **ret);
    (*ret)->device = device;
    device->streams++;
    return 0;
}

static void stream_close(struct oscar_stream_impl *stream) {
    stream->device->streams--;
    free(stream);
}

static int enter_stream(struct oscar_stream_impl *stream, enum fake_call call) {
    if (atomic_exchange(&stream->busy, true))
        abort();
    int r = enter(stream->device, call);
    atomic_store(&stream->busy, false);
    return r;
}

static int calibration_load(struct oscar_device *device, const struct oscar_geometry *geometry,
                            const struct oscar_calibration *calibration, struct oscar_cause *cause) {
    (void)geometry;
    (void)calibration;
    int r = enter(device, FAKE_CALIBRATION_LOAD);
    if (r < 0)
        return oscar_fail(cause, r, "made to fail");
    (void)pthread_mutex_lock(&device->mutex);
    device->calibrations++;
    (void)pthread_mutex_unlock(&device->mutex);
    return 0;
}

static void calibration_unload(struct oscar_device *device, const struct oscar_calibration *calibration) {
    (void)calibration;
    (void)pthread_mutex_lock(&device->mutex);
    pass(device, &device->memory_closed);
    device->calibrations--;
    (void)pthread_mutex_unlock(&device->mutex);
}

static size_t granularity(const struct oscar_device *device) { return device->granularity; }

static int chunk_create(struct oscar_device *device, uint64_t bytes, struct oscar_chunk **ret,
                        struct oscar_cause *cause) {
    int r = enter(device, FAKE_CHUNK_CREATE);
    if (r < 0)
        return oscar_fail(cause, r, "made to fail");
    struct oscar_chunk *chunk = calloc(1, sizeof *chunk);
    chunk->memory = calloc(1, bytes);
    chunk->device = device;
    chunk->bytes = bytes;
    (void)pthread_mutex_lock(&device->mutex);
    device->chunks++;
    device->bytes += bytes;
    (void)pthread_mutex_unlock(&device->mutex);
    *ret = chunk;
    return 0;
}

static int chunk_export(struct oscar_chunk *chunk, bool writable, int *ret_fd, struct oscar_cause *cause) {
    (void)writable;
    int r = enter(chunk->device, FAKE_CHUNK_EXPORT);
    if (r < 0)
        return oscar_fail(cause, r, "made to fail");
    *ret_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    return 0;
}

static uint8_t *chunk_address(const struct oscar_chunk *chunk) { return chunk->memory; }

static void chunk_free(struct oscar_chunk *chunk) {
    if (!chunk)
        return;
    struct oscar_device *device = chunk->device;
    (void)pthread_mutex_lock(&device->mutex);
    pass(device, &device->memory_closed);
    device->chunks--;
    device->bytes -= chunk->bytes;
    (void)pthread_mutex_unlock(&device->mutex);
    free(chunk->memory);
    free(chunk);
}

static int inspect(struct oscar_stream_impl *stream, const struct oscar_geometry *geometry, const uint8_t *const *pages,
                   uint32_t count, int32_t *status) {
    (void)geometry;
    int r = enter_stream(stream, FAKE_INSPECT);
    for (uint32_t i = 0; i < count; i++)
        status[i] = pages[i][0] == FAKE_NOT_FINITE ? OSCAR_ERR_NOT_FINITE : 0;
    return r;
}

static int pack(struct oscar_stream_impl *stream, const struct oscar_geometry *geometry,
                const struct oscar_calibration *calibration, const struct oscar_pack_item *item, uint32_t items) {
    (void)geometry;
    if (!calibration)
        abort();
    int r = enter_stream(stream, FAKE_PACK);
    for (uint32_t i = 0; i < items && r == 0; i++) {
        memcpy(item[i].packed, item[i].dense, FAKE_TAG_BYTES);
        *item[i].status = 0;
    }
    return r;
}

static int copy(struct oscar_stream_impl *stream, void *destination, const void *source, uint64_t bytes) {
    int r = enter_stream(stream, FAKE_COPY);
    if (r == 0)
        memcpy(destination, source, bytes);
    return r;
}

const struct oscar_device_ops *fake_device_ops(void) {
    static const struct oscar_device_ops ops = {
        .name = "fake",
        .granularity = granularity,
        .chunk_create = chunk_create,
        .chunk_export = chunk_export,
        .chunk_address = chunk_address,
        .chunk_free = chunk_free,
        .calibration_load = calibration_load,
        .calibration_unload = calibration_unload,
        .stream_open = stream_open,
        .stream_close = stream_close,
        .copy = copy,
        .inspect = inspect,
        .pack = pack,
    };
    return &ops;
}
