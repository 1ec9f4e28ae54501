/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/device_memory.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>

#include "oscar/device.h"

#define HEAP_BYTES (UINT64_C(96) << 20)
#define ALIGNMENT 256U

/* A part of the allocation: all of them together are the whole of it, in order. On the host one of its own, from malloc(), so that a
 * sanitizer sees its bounds. */
struct part {
    struct device_buffer buffer; /* the first member: a buffer is its part */
    size_t room;                 /* bytes of the part */
    bool used;
    TAILQ_ENTRY(part) in_memory;
};

TAILQ_HEAD(parts, part);

struct device_memory {
    const struct oscar_device_ops *ops;
    struct oscar_device *device;
    struct oscar_stream_impl *stream; /* synchronous */
    struct oscar_chunk *chunk;        /* the allocation; NULL on the host */
    pthread_mutex_t lock;
    struct parts parts;
};

static int complain(int error, const char *what, const char *cause) {
    fprintf(stderr, "device memory: %s: %s%s%s\n", what, oscar_error_text(error), cause[0] != 0 ? ": " : "", cause);
    return error;
}

static struct part *part_new(struct device_memory *memory, uint8_t *data, size_t room) {
    struct part *part = calloc(1, sizeof(*part));
    if (part != NULL) {
        part->buffer = (struct device_buffer){.data = data, .memory = memory};
        part->room = room;
    }
    return part;
}

static int allocate(struct device_memory *memory, struct oscar_cause *cause) {
    if (memory->ops == oscar_device_host())
        return 0;
    uint64_t granularity = memory->ops->granularity(memory->device);
    uint64_t bytes = (HEAP_BYTES + granularity - 1) / granularity * granularity;
    int r = memory->ops->chunk_create(memory->device, bytes, &memory->chunk, cause);
    if (r < 0)
        return r;
    struct part *all = part_new(memory, memory->ops->chunk_address(memory->chunk), bytes);
    if (all == NULL)
        return OSCAR_ERR_NO_MEMORY;
    TAILQ_INSERT_HEAD(&memory->parts, all, in_memory);
    return 0;
}

int device_memory_open(const char *backend, const char *device, struct device_memory **ret) {
    struct oscar_cause cause = {{0}};
    struct device_memory *memory = calloc(1, sizeof(*memory));
    if (memory == NULL)
        return complain(OSCAR_ERR_NO_MEMORY, backend, "");
    pthread_mutex_init(&memory->lock, NULL);
    TAILQ_INIT(&memory->parts);
    int r = oscar_device_find(backend, &memory->ops, &cause);
    if (r == 0)
        r = memory->ops->device_open(&(struct oscar_device_options){.id = device}, &memory->device, &cause);
    if (r == 0)
        r = memory->ops->stream_open(memory->device, &(struct oscar_stream_options){.threads = 1}, &memory->stream,
                                     &cause);
    if (r == 0)
        r = allocate(memory, &cause);
    if (r < 0) {
        device_memory_close(memory);
        return complain(r, backend, cause.text);
    }
    *ret = memory;
    return 0;
}

void device_memory_close(struct device_memory *memory) {
    if (memory == NULL)
        return;
    for (struct part *part; (part = TAILQ_FIRST(&memory->parts)) != NULL;) {
        TAILQ_REMOVE(&memory->parts, part, in_memory);
        free(part);
    }
    if (memory->chunk != NULL)
        memory->ops->chunk_free(memory->chunk);
    if (memory->stream != NULL)
        memory->ops->stream_close(memory->stream);
    if (memory->device != NULL)
        memory->ops->device_close(memory->device);
    pthread_mutex_destroy(&memory->lock);
    free(memory);
}

/* With the lock: the first part that is large enough, cut to size. */
static struct part *take(struct device_memory *memory, size_t room) {
    struct part *part;
    TAILQ_FOREACH(part, &memory->parts, in_memory) {
        if (!part->used && part->room >= room)
            break;
    }
    if (part == NULL)
        return NULL;
    if (part->room > room) {
        struct part *rest = part_new(memory, (uint8_t *)part->buffer.data + room, part->room - room);
        if (rest == NULL)
            return NULL;
        TAILQ_INSERT_AFTER(&memory->parts, part, rest, in_memory);
        part->room = room;
    }
    part->used = true;
    return part;
}

static struct part *take_from_host(struct device_memory *memory, size_t bytes) {
    void *data = malloc(bytes);
    struct part *part = data != NULL ? part_new(memory, data, bytes) : NULL;
    if (part == NULL)
        free(data);
    return part;
}

struct device_buffer *device_buffer_new(struct device_memory *memory, size_t bytes) {
    size_t room = bytes == 0 ? ALIGNMENT : (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    pthread_mutex_lock(&memory->lock);
    struct part *part = memory->chunk == NULL ? take_from_host(memory, bytes) : take(memory, room);
    pthread_mutex_unlock(&memory->lock);
    if (part == NULL) {
        (void)complain(OSCAR_ERR_NO_MEMORY, "a buffer", "");
        return NULL;
    }
    part->buffer.bytes = bytes;
    return &part->buffer;
}

/* With the lock: `part` and the one behind it become one where both are free. */
static void join(struct parts *parts, struct part *part) {
    struct part *next = part != NULL ? TAILQ_NEXT(part, in_memory) : NULL;
    if (next == NULL || part->used || next->used)
        return;
    part->room += next->room;
    TAILQ_REMOVE(parts, next, in_memory);
    free(next);
}

void device_buffer_free(void *buffer) {
    struct part *part = buffer;
    if (part == NULL)
        return;
    struct device_memory *memory = part->buffer.memory;
    if (memory->chunk == NULL) {
        free(part->buffer.data);
        free(part);
        return;
    }
    pthread_mutex_lock(&memory->lock);
    part->used = false;
    join(&memory->parts, part);
    join(&memory->parts, TAILQ_PREV(part, parts, in_memory));
    pthread_mutex_unlock(&memory->lock);
}

int device_memory_copy(struct device_memory *memory, void *to, const void *from, size_t bytes) {
    int r = memory->ops->copy(memory->stream, to, from, bytes);
    return r < 0 ? complain(r, "a copy", "") : 0;
}

int device_buffer_write(struct device_buffer *buffer, const void *from) {
    return device_memory_copy(buffer->memory, buffer->data, from, buffer->bytes);
}

int device_buffer_read(const struct device_buffer *buffer, void *to) {
    return device_memory_copy(buffer->memory, to, buffer->data, buffer->bytes);
}
