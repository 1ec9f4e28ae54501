/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/wire_event.h"

#include <inttypes.h>
#include <string.h>

#include "proto/wire_arena.h"
#include "proto/wire_field.h"

/* Three digests and a few numbers; the rest is room for fields that a newer minor version adds. */
#define ARENA_BYTES 4096U

bool oscar_wire_give_event(const struct oscar_event *event, Oscar__V1__Event *ret) {
    if (event->kind < OSCAR_EVENT_STORED || event->kind > OSCAR_EVENT_CLEARED || event->form >= OSCAR_FORMS)
        return false;
    bool of_page = event->kind != OSCAR_EVENT_CLEARED;
    oscar__v1__event__init(ret);
    ret->incarnation = event->incarnation;
    ret->sequence = event->sequence;
    ret->kind = (Oscar__V1__EventKind)event->kind;
    if (of_page || event->has_model)
        ret->model = oscar_wire_give_bytes(event->model.bytes, OSCAR_DIGEST_BYTES);
    if (of_page) {
        ret->page = oscar_wire_give_bytes(event->page.bytes, OSCAR_DIGEST_BYTES);
        ret->parent = oscar_wire_give_bytes(event->parent.bytes, OSCAR_DIGEST_BYTES);
        ret->depth = event->depth;
        ret->form = event->form;
    }
    return true;
}

int oscar_wire_take_event(const Oscar__V1__Event *message, struct oscar_event *ret, struct oscar_cause *cause) {
    struct oscar_event event;
    int r;
    if ((int)message->kind < OSCAR_EVENT_STORED || (int)message->kind > OSCAR_EVENT_CLEARED)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "event %" PRIu64 " has kind %d, which this version does not know",
                          message->sequence, (int)message->kind);
    memset(&event, 0, sizeof(event));
    event.incarnation = message->incarnation;
    event.sequence = message->sequence;
    event.kind = (enum oscar_event_kind)message->kind;
    event.has_model = message->model.len != 0;
    bool of_page = event.kind != OSCAR_EVENT_CLEARED;
    if ((of_page || event.has_model) &&
        (r = oscar_wire_take_bytes("model", &message->model, event.model.bytes, OSCAR_DIGEST_BYTES, cause)) < 0)
        return r;
    if (of_page) {
        uint32_t form = 0;
        if ((r = oscar_wire_take_bytes("page", &message->page, event.page.bytes, OSCAR_DIGEST_BYTES, cause)) < 0 ||
            (r = oscar_wire_take_bytes("parent", &message->parent, event.parent.bytes, OSCAR_DIGEST_BYTES, cause)) <
                0 ||
            (r = oscar_wire_take_count("depth", message->depth, OSCAR_MAX_SEQUENCE_PAGES - 1, &event.depth, cause)) <
                0 ||
            (r = oscar_wire_take_count("form", message->form, OSCAR_FORMS - 1, &form, cause)) < 0)
            return r;
        event.form = (enum oscar_form)form;
    }
    *ret = event;
    return OSCAR_OK;
}

int oscar_event_encode(const struct oscar_event *event, uint8_t *buffer, size_t capacity, size_t *ret_bytes) {
    Oscar__V1__Event message;
    if (!oscar_wire_give_event(event, &message))
        return OSCAR_ERR_INVALID;
    return oscar_wire_pack(&message.base, buffer, capacity, ret_bytes);
}

int oscar_event_decode(const uint8_t *bytes, size_t size, struct oscar_event *ret, struct oscar_cause *cause) {
    _Alignas(OSCAR_WIRE_ALIGNMENT) uint8_t memory[ARENA_BYTES];
    struct oscar_wire_arena arena;
    oscar_wire_arena_init(&arena, memory, sizeof(memory));
    const Oscar__V1__Event *message =
        (const Oscar__V1__Event *)oscar_wire_unpack(&arena, &oscar__v1__event__descriptor, bytes, size);
    if (message == NULL)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "an event of %zu bytes is malformed or too large", size);
    return oscar_wire_take_event(message, ret, cause);
}
