/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/wire_arena.h"

static void *arena_alloc(void *data, size_t size) {
    struct oscar_wire_arena *arena = data;
    size_t rest = arena->capacity - arena->used;
    if (size > rest)
        return NULL;
    size_t rounded = (size + OSCAR_WIRE_ALIGNMENT - 1) & ~(size_t)(OSCAR_WIRE_ALIGNMENT - 1);
    void *result = arena->memory + arena->used;
    arena->used += rounded < rest ? rounded : rest;
    return result;
}

static void arena_free(void *data, void *pointer) {
    (void)data; /* what it gave goes with it as a whole */
    (void)pointer;
}

void oscar_wire_arena_init(struct oscar_wire_arena *arena, void *memory, size_t capacity) {
    arena->allocator = (ProtobufCAllocator){.alloc = arena_alloc, .free = arena_free, .allocator_data = arena};
    arena->memory = memory;
    arena->capacity = capacity;
    arena->used = 0;
}

ProtobufCMessage *oscar_wire_unpack(struct oscar_wire_arena *arena, const ProtobufCMessageDescriptor *descriptor,
                                    const uint8_t *bytes, size_t size) {
    return protobuf_c_message_unpack(descriptor, &arena->allocator, size, bytes);
}

int oscar_wire_pack(const ProtobufCMessage *message, uint8_t *buffer, size_t capacity, size_t *ret_bytes) {
    size_t bytes = protobuf_c_message_get_packed_size(message);
    if (bytes > capacity)
        return OSCAR_ERR_LIMIT;
    *ret_bytes = protobuf_c_message_pack(message, buffer);
    return OSCAR_OK;
}
