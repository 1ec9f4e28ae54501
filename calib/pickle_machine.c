/* SPDX-License-Identifier: Apache-2.0 */
#include "calib/pickle_machine.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

struct pickle_value machine_mark;

/* --- values ------------------------------------------------------------------------------------------------------- */

bool machine_items_add(struct pickle_items *items, struct pickle_value *value) {
    if (items->count == items->capacity) {
        size_t capacity = items->capacity == 0 ? 4 : 2 * items->capacity;
        struct pickle_value **grown = reallocarray(items->at, capacity, sizeof(struct pickle_value *));
        if (grown == NULL)
            return false;
        items->at = grown;
        items->capacity = capacity;
    }
    items->at[items->count++] = value;
    return true;
}

int machine_push(struct machine *machine, struct pickle_value *value) {
    return machine_items_add(&machine->stack, value) ? 0 : machine_out_of_memory(machine);
}

int machine_push_new(struct machine *machine, const struct pickle_value *like) {
    struct pickle_value *value = malloc(sizeof(*value));
    if (value == NULL || machine_push(machine, value) < 0) {
        free(value);
        return machine_out_of_memory(machine);
    }
    *value = *like;
    value->next = machine->pickle->values;
    machine->pickle->values = value;
    return 0;
}

int machine_push_kind(struct machine *machine, enum pickle_kind kind, int64_t integer) {
    return machine_push_new(machine, &(struct pickle_value){.kind = kind, .integer = integer});
}

int machine_push_empty(struct machine *machine, enum pickle_kind kind) {
    return machine_push_new(machine, &(struct pickle_value){.kind = kind, .items = {0}});
}

int machine_pop(struct machine *machine, struct pickle_value **ret) {
    struct pickle_items *stack = &machine->stack;
    if (stack->count == 0 || stack->at[stack->count - 1] == &machine_mark)
        return refuse(machine, OSCAR_ERR_CORRUPT, "nothing on the stack for this opcode");
    *ret = stack->at[--stack->count];
    return 0;
}

int machine_top(struct machine *machine, struct pickle_value **ret) {
    int r = machine_pop(machine, ret);
    if (r == 0)
        machine->stack.count++;
    return r;
}

int machine_above_mark(const struct machine *machine, size_t *ret) {
    const struct pickle_items *stack = &machine->stack;
    for (size_t count = 0; count < stack->count; count++)
        if (stack->at[stack->count - 1 - count] == &machine_mark) {
            *ret = count;
            return 0;
        }
    return refuse(machine, OSCAR_ERR_CORRUPT, "no mark on the stack for this opcode");
}

/* --- bytes of the pickle ------------------------------------------------------------------------------------------ */

int machine_take(struct machine *machine, uint64_t count, const uint8_t **ret) {
    if (count > machine->size - machine->at)
        return refuse(machine, OSCAR_ERR_CORRUPT, "cut: %" PRIu64 " bytes wanted, %zu left", count,
                      machine->size - machine->at);
    *ret = machine->bytes + machine->at;
    machine->at += (size_t)count;
    return 0;
}

int machine_take_number(struct machine *machine, unsigned width, uint64_t *ret) {
    const uint8_t *bytes;
    int r = machine_take(machine, width, &bytes);
    if (r < 0)
        return r;
    *ret = 0;
    for (unsigned i = 0; i < width; i++)
        *ret |= (uint64_t)bytes[i] << (8 * i);
    return 0;
}

int machine_take_line(struct machine *machine, struct pickle_text *ret) {
    const uint8_t *start = machine->bytes + machine->at;
    const uint8_t *end = memchr(start, '\n', machine->size - machine->at);
    if (end == NULL)
        return refuse(machine, OSCAR_ERR_CORRUPT, "cut in a name");
    *ret = (struct pickle_text){(const char *)start, (size_t)(end - start)};
    machine->at += ret->length + 1;
    return 0;
}
