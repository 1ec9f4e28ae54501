/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The only memory that decoding a message takes: a buffer of fixed size. protobuf-c keeps every field of what it reads, also the
 * unknown ones, so a record of 64 KiB could make it allocate megabytes; here it gets "no memory" and refuses the message.
 */
#ifndef OSCAR_PROTO_WIRE_ARENA_H
#define OSCAR_PROTO_WIRE_ARENA_H

#include <protobuf-c/protobuf-c.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/cause.h"

#define OSCAR_WIRE_ALIGNMENT 16U

struct oscar_wire_arena {
    ProtobufCAllocator allocator; /* its data is the arena: it must not move once initialised */
    uint8_t *memory;              /* aligned to OSCAR_WIRE_ALIGNMENT, the caller's */
    size_t capacity;
    size_t used;
};

void oscar_wire_arena_init(struct oscar_wire_arena *arena, void *memory, size_t capacity);

/* The message, in the arena (nothing to free), or NULL: malformed, or larger than the arena. */
ProtobufCMessage *oscar_wire_unpack(struct oscar_wire_arena *arena, const ProtobufCMessageDescriptor *descriptor,
                                    const uint8_t *bytes, size_t size);

/* OSCAR_ERR_LIMIT when the message does not fit. */
int oscar_wire_pack(const ProtobufCMessage *message, uint8_t *buffer, size_t capacity, size_t *ret_bytes);

#endif
