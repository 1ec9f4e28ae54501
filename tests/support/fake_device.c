/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/fake_device.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct oscar_chunk {
    struct oscar_device *device;
    uint8_t *memory;
    uint64_t bytes;
};

static struct oscar_device *current;

void fake_device_init(struct oscar_device *device) {
    *device = (struct oscar_device){.granularity = 4096};
    (void)pthread_mutex_init(&device->mutex, NULL);
    (void)pthread_cond_init(&device->opened, NULL);
    current = device;
}

void fake_device_fini(struct oscar_device *device) {
    (void)pthread_cond_destroy(&device->opened);
    (void)pthread_mutex_destroy(&device->mutex);
    current = NULL;
}

void fake_device_hold(struct oscar_device *device, bool hold) {
    (void)pthread_mutex_lock(&device->mutex);
    device->closed = hold;
    (void)pthread_cond_broadcast(&device->opened);
    (void)pthread_mutex_unlock(&device->mutex);
}

void fake_device_fail(struct oscar_device *device, enum fake_call call, uint64_t k, uint64_t more, int error) {
    (void)pthread_mutex_lock(&device->mutex);
    device->calls[call] = 0;
    device->fail_at[call] = k;
    device->fail_count[call] = more;
    device->error = error;
    (void)pthread_mutex_unlock(&device->mutex);
}

static int enter(struct oscar_device *device, enum fake_call call) {
    (void)pthread_mutex_lock(&device->mutex);
    uint64_t number = ++device->calls[call], first = device->fail_at[call];
    int r = first != 0 && number >= first && number <= first + device->fail_count[call] ? device->error : 0;
    while (device->closed && call >= FAKE_INSPECT)
        (void)pthread_cond_wait(&device->opened, &device->mutex);
    (void)pthread_mutex_unlock(&device->mutex);
    return r;
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
    device->chunks++;
    device->bytes += bytes;
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
    chunk->device->chunks--;
    chunk->device->bytes -= chunk->bytes;
    free(chunk->memory);
    free(chunk);
}

static int inspect(struct oscar_stream_impl *stream, const struct oscar_geometry *geometry, const uint8_t *const *pages,
                   uint32_t count, int32_t *status) {
    (void)stream;
    (void)geometry;
    int r = enter(current, FAKE_INSPECT);
    for (uint32_t i = 0; i < count; i++)
        status[i] = pages[i][0] == FAKE_NOT_FINITE ? OSCAR_ERR_NOT_FINITE : 0;
    return r;
}

static int pack(struct oscar_stream_impl *stream, const struct oscar_geometry *geometry,
                const struct oscar_calibration *calibration, const struct oscar_pack_item *item, uint32_t items) {
    (void)stream;
    (void)geometry;
    (void)calibration;
    int r = enter(current, FAKE_PACK);
    for (uint32_t i = 0; i < items && r == 0; i++) {
        memcpy(item[i].packed, item[i].dense, FAKE_TAG_BYTES);
        *item[i].status = 0;
    }
    return r;
}

static int copy(struct oscar_stream_impl *stream, void *destination, const void *source, uint64_t bytes) {
    (void)stream;
    int r = enter(current, FAKE_COPY);
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
        .copy = copy,
        .inspect = inspect,
        .pack = pack,
    };
    return &ops;
}
