/* SPDX-License-Identifier: Apache-2.0 */
/* Fields that many messages have: texts, digests and references, between the plain structs and the generated types. */
#ifndef OSCAR_PROTO_WIRE_FIELD_H
#define OSCAR_PROTO_WIRE_FIELD_H

#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/cause.h"
#include "proto/digest.h"

/* Decoding. `name` is the field's name for the cause; all return 0 or OSCAR_ERR_PROTOCOL. */

/* A text from a client, shorter than `capacity`, UTF-8 without control characters. */
int oscar_wire_take_text(const char *name, const ProtobufCBinaryData *field, char *ret, size_t capacity,
                         struct oscar_cause *cause);
/* A text from the daemon. */
int oscar_wire_take_string(const char *name, const char *field, char *ret, size_t capacity, struct oscar_cause *cause);
/* Exactly `size` bytes. */
int oscar_wire_take_bytes(const char *name, const ProtobufCBinaryData *field, void *ret, size_t size,
                          struct oscar_cause *cause);
/* Exactly `size` bytes, or none: then `ret` stays as it is. */
int oscar_wire_take_optional(const char *name, const ProtobufCBinaryData *field, void *ret, size_t size,
                             struct oscar_cause *cause);
/* A number that must be at most `limit`. */
int oscar_wire_take_count(const char *name, uint32_t field, uint32_t limit, uint32_t *ret, struct oscar_cause *cause);

/* Encoding. The field points into the struct, nothing is copied; false: the text has no terminator. */

bool oscar_wire_give_text(const char *text, size_t capacity, ProtobufCBinaryData *ret);
bool oscar_wire_give_string(const char *text, size_t capacity, char **ret);

static inline ProtobufCBinaryData oscar_wire_give_bytes(const void *bytes, size_t size) {
    return (ProtobufCBinaryData){.len = size, .data = (uint8_t *)(uintptr_t)bytes};
}

#endif
