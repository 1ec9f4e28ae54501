/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/wire_field.h"

#include <inttypes.h>
#include <string.h>

#include "proto/text.h"

static int take(const char *name, const char *text, size_t length, char *ret, size_t capacity,
                struct oscar_cause *cause) {
    if (length >= capacity)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "%s has %zu bytes: at most %zu", name, length, capacity - 1);
    if (!oscar_text_valid(text, length))
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "%s is not UTF-8 without control characters", name);
    memcpy(ret, text, length);
    ret[length] = '\0';
    return OSCAR_OK;
}

int oscar_wire_take_text(const char *name, const ProtobufCBinaryData *field, char *ret, size_t capacity,
                         struct oscar_cause *cause) {
    if (field->len == 0) { /* its data may be NULL */
        ret[0] = '\0';
        return OSCAR_OK;
    }
    return take(name, (const char *)field->data, field->len, ret, capacity, cause);
}

int oscar_wire_take_string(const char *name, const char *field, char *ret, size_t capacity, struct oscar_cause *cause) {
    return take(name, field, strlen(field), ret, capacity, cause);
}

int oscar_wire_take_bytes(const char *name, const ProtobufCBinaryData *field, void *ret, size_t size,
                          struct oscar_cause *cause) {
    if (field->len != size)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "%s has %zu bytes: must have %zu", name, field->len, size);
    if (size != 0) /* without bytes there may be no data */
        memcpy(ret, field->data, size);
    return OSCAR_OK;
}

int oscar_wire_take_optional(const char *name, const ProtobufCBinaryData *field, void *ret, size_t size,
                             struct oscar_cause *cause) {
    return field->len == 0 ? OSCAR_OK : oscar_wire_take_bytes(name, field, ret, size, cause);
}

int oscar_wire_take_count(const char *name, uint32_t field, uint32_t limit, uint32_t *ret, struct oscar_cause *cause) {
    if (field > limit)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "%s is %" PRIu32 ": at most %" PRIu32, name, field, limit);
    *ret = field;
    return OSCAR_OK;
}

bool oscar_wire_give_text(const char *text, size_t capacity, ProtobufCBinaryData *ret) {
    size_t length = strnlen(text, capacity);
    *ret = oscar_wire_give_bytes(text, length);
    return length < capacity;
}

bool oscar_wire_give_string(const char *text, size_t capacity, char **ret) {
    *ret = (char *)(uintptr_t)text;
    return memchr(text, '\0', capacity) != NULL;
}
