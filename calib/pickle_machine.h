/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What runs a pickle: a stack and numbered memories, both of values. Between pickle.c, which knows the opcodes, and
 * pickle_torch.c, which knows what may be called.
 */
#ifndef OSCAR_CALIB_PICKLE_MACHINE_H
#define OSCAR_CALIB_PICKLE_MACHINE_H

#include "calib/pickle.h"

struct pickle {
    struct pickle_value *values; /* all of them, last first */
    const struct pickle_value *root;
};

struct machine {
    const uint8_t *bytes;
    size_t size, at, opcode_at;
    struct pickle *pickle;
    struct pickle_items stack, memo;
    struct oscar_cause *cause;
};

extern struct pickle_value machine_mark; /* stands on the stack where MARK was; only its address counts */

/* --- failures ----------------------------------------------------------------------------------------------------- */

/* A macro, as oscar_fail() is one: whoever compiles it sees that the value is the error. */
#define refuse(machine, error, format, ...)                                                                            \
    oscar_fail((machine)->cause, error, "pickle byte %zu: " format, (machine)->opcode_at, ##__VA_ARGS__)

static inline int machine_out_of_memory(const struct machine *machine) {
    return oscar_fail(machine->cause, OSCAR_ERR_NO_MEMORY, "no memory for a pickle");
}

/* --- values (pickle_machine.c) ------------------------------------------------------------------------------------ */

bool machine_items_add(struct pickle_items *items, struct pickle_value *value); /* false: no memory */

int machine_push(struct machine *machine, struct pickle_value *value);
/* A new value on the stack, a copy of `like` but for its place in the list. What it owns goes to the pickle, unless
 * that fails. */
int machine_push_new(struct machine *machine, const struct pickle_value *like);
int machine_push_kind(struct machine *machine, enum pickle_kind kind, int64_t integer);
int machine_push_empty(struct machine *machine, enum pickle_kind kind);
/* Never a mark: an opcode takes what was pushed since the last one. */
int machine_pop(struct machine *machine, struct pickle_value **ret);
int machine_top(struct machine *machine, struct pickle_value **ret);
/* The number of values above the last mark. They stay; the mark, too. */
int machine_above_mark(const struct machine *machine, size_t *ret);

/* --- bytes of the pickle (pickle_machine.c) ----------------------------------------------------------------------- */

int machine_take(struct machine *machine, uint64_t count, const uint8_t **ret);
/* A number of `width` bytes, at most 8, little-endian. */
int machine_take_number(struct machine *machine, unsigned width, uint64_t *ret);
/* Up to the next line break, which is taken, too. */
int machine_take_line(struct machine *machine, struct pickle_text *ret);

/* --- names and calls (pickle_torch.c) ----------------------------------------------------------------------------- */

int machine_push_global(struct machine *machine, const struct pickle_text *module, const struct pickle_text *name);
/* The storage that the tuple on top stands for. */
int machine_push_storage(struct machine *machine);
/* Of the callee and its arguments on top. */
int machine_call(struct machine *machine);

#endif
