/* SPDX-License-Identifier: Apache-2.0 */
#include "calib/pickle.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "calib/pickle_machine.h"
#include "proto/cleanup.h"

/* Opcodes that are understood. Their names are those of Python's pickletools. */
enum opcode {
    OP_PROTO = 0x80,
    OP_FRAME = 0x95,
    OP_STOP = '.',
    OP_MARK = '(',
    OP_NONE = 'N',
    OP_NEWTRUE = 0x88,
    OP_NEWFALSE = 0x89,
    OP_BININT = 'J',
    OP_BININT1 = 'K',
    OP_BININT2 = 'M',
    OP_LONG1 = 0x8a,
    OP_BINFLOAT = 'G',
    OP_BINUNICODE = 'X',
    OP_SHORT_BINUNICODE = 0x8c,
    OP_EMPTY_TUPLE = ')',
    OP_TUPLE1 = 0x85,
    OP_TUPLE2 = 0x86,
    OP_TUPLE3 = 0x87,
    OP_TUPLE = 't',
    OP_EMPTY_LIST = ']',
    OP_APPEND = 'a',
    OP_APPENDS = 'e',
    OP_EMPTY_DICT = '}',
    OP_SETITEM = 's',
    OP_SETITEMS = 'u',
    OP_BINPUT = 'q',
    OP_LONG_BINPUT = 'r',
    OP_MEMOIZE = 0x94,
    OP_BINGET = 'h',
    OP_LONG_BINGET = 'j',
    OP_GLOBAL = 'c',
    OP_STACK_GLOBAL = 0x93,
    OP_BINPERSID = 'Q',
    OP_REDUCE = 'R',
};

/* Those that are refused by name: they make objects or call. The rest are refused by number. */
static const char *const refused[256] = {
    ['b'] = "BUILD", ['i'] = "INST",  ['o'] = "OBJ",    [0x81] = "NEWOBJ",  [0x92] = "NEWOBJ_EX",     ['P'] = "PERSID",
    [0x82] = "EXT1", [0x83] = "EXT2", [0x84] = "EXT4",  ['B'] = "BINBYTES", ['C'] = "SHORT_BINBYTES", [0x8b] = "LONG4",
    ['I'] = "INT",   ['L'] = "LONG",  ['S'] = "STRING", ['V'] = "UNICODE",  ['F'] = "FLOAT",          ['d'] = "DICT",
    ['l'] = "LIST",  ['2'] = "DUP",   ['0'] = "POP",
};

#define HIGHEST_PROTOCOL 5U

/* --- opcodes ------------------------------------------------------------------------------------------------------ */

static int integer(struct machine *machine, unsigned width, bool with_sign) {
    uint64_t value;
    int r = machine_take_number(machine, width, &value);
    if (r < 0)
        return r;
    if (with_sign && width > 0 && width < 8 && (value >> (8 * width - 1)) != 0)
        value |= UINT64_MAX << (8 * width);
    return machine_push_kind(machine, PICKLE_INT, (int64_t)value);
}

static int long_integer(struct machine *machine) {
    uint64_t width;
    int r = machine_take_number(machine, 1, &width);
    if (r < 0)
        return r;
    if (width > 8)
        return refuse(machine, OSCAR_ERR_UNSUPPORTED, "an integer of %" PRIu64 " bytes", width);
    return integer(machine, (unsigned)width, true);
}

static int floating(struct machine *machine) {
    uint64_t bits;
    double number;
    int r = machine_take_number(machine, 8, &bits);
    if (r < 0)
        return r;
    bits = __builtin_bswap64(bits); /* the one number in a pickle that is big-endian */
    memcpy(&number, &bits, sizeof(number));
    return machine_push_new(machine, &(struct pickle_value){.kind = PICKLE_FLOAT, .number = number});
}

static int text(struct machine *machine, unsigned width) {
    uint64_t length;
    const uint8_t *bytes;
    int r = machine_take_number(machine, width, &length);
    if (r == 0)
        r = machine_take(machine, length, &bytes);
    if (r < 0)
        return r;
    return machine_push_new(machine,
                            &(struct pickle_value){.kind = PICKLE_TEXT, .text = {(const char *)bytes, (size_t)length}});
}

/* The `count` values on top, in a tuple. */
static int tuple(struct machine *machine, size_t count) {
    struct pickle_value value = {.kind = PICKLE_TUPLE, .items = {.count = count, .capacity = count}};
    struct pickle_items *stack = &machine->stack;
    size_t free_to_take = 0;
    while (free_to_take < count && free_to_take < stack->count &&
           stack->at[stack->count - 1 - free_to_take] != &machine_mark)
        free_to_take++;
    if (free_to_take < count)
        return refuse(machine, OSCAR_ERR_CORRUPT, "nothing on the stack for this opcode");
    value.items.at = calloc(count + 1, sizeof(struct pickle_value *));
    if (value.items.at == NULL)
        return machine_out_of_memory(machine);
    stack->count -= count;
    memcpy(value.items.at, stack->at + stack->count, count * sizeof(struct pickle_value *));
    int r = machine_push_new(machine, &value);
    if (r < 0)
        free(value.items.at);
    return r;
}

static int tuple_from_mark(struct machine *machine) {
    size_t count;
    int r = machine_above_mark(machine, &count);
    if (r < 0)
        return r;
    /* The mark makes room for the tuple: what is above it moves down by one. */
    struct pickle_value **first = machine->stack.at + machine->stack.count - count;
    memmove(first - 1, first, count * sizeof(struct pickle_value *));
    machine->stack.count--;
    return tuple(machine, count);
}

/* Adds the `count` values on top to the container below them; with `marked` a mark lies between. */
static int add_items(struct machine *machine, enum pickle_kind kind, size_t count, bool marked) {
    struct pickle_items *stack = &machine->stack;
    size_t below = count + (marked ? 1 : 0);
    if (stack->count <= below || stack->at[stack->count - 1 - below]->kind != kind ||
        stack->at[stack->count - 1 - below] == &machine_mark)
        return refuse(machine, OSCAR_ERR_CORRUPT, "no %s to add to", kind == PICKLE_DICT ? "dict" : "list");
    if (kind == PICKLE_DICT && count % 2 != 0)
        return refuse(machine, OSCAR_ERR_CORRUPT, "a key without a value");
    struct pickle_items *items = &stack->at[stack->count - 1 - below]->items;
    for (size_t i = stack->count - count; i < stack->count; i++) {
        if (stack->at[i] == &machine_mark)
            return refuse(machine, OSCAR_ERR_CORRUPT, "nothing on the stack for this opcode");
        if (!machine_items_add(items, stack->at[i]))
            return machine_out_of_memory(machine);
    }
    stack->count -= below;
    return 0;
}

static int add_from_mark(struct machine *machine, enum pickle_kind kind) {
    size_t count;
    int r = machine_above_mark(machine, &count);
    return r < 0 ? r : add_items(machine, kind, count, true);
}

/* Numbers of memories count from 0 in every pickle that was made by a pickler, so none is as large as the pickle. */
static int put(struct machine *machine, uint64_t index) {
    struct pickle_value *value;
    int r = machine_top(machine, &value);
    if (r < 0)
        return r;
    if (index >= machine->size)
        return refuse(machine, OSCAR_ERR_CORRUPT, "memory %" PRIu64 " in a pickle of %zu bytes", index, machine->size);
    while (machine->memo.count <= index)
        if (!machine_items_add(&machine->memo, NULL))
            return machine_out_of_memory(machine);
    machine->memo.at[index] = value;
    return 0;
}

static int put_numbered(struct machine *machine, unsigned width) {
    uint64_t index;
    int r = machine_take_number(machine, width, &index);
    return r < 0 ? r : put(machine, index);
}

static int get(struct machine *machine, unsigned width) {
    uint64_t index;
    int r = machine_take_number(machine, width, &index);
    if (r < 0)
        return r;
    if (index >= machine->memo.count || machine->memo.at[index] == NULL)
        return refuse(machine, OSCAR_ERR_CORRUPT, "memory %" PRIu64 " was never set", index);
    return machine_push(machine, machine->memo.at[index]);
}

static int global_by_lines(struct machine *machine) {
    struct pickle_text module, name;
    int r = machine_take_line(machine, &module);
    if (r == 0)
        r = machine_take_line(machine, &name);
    return r < 0 ? r : machine_push_global(machine, &module, &name);
}

static int global_by_stack(struct machine *machine) {
    struct pickle_value *module, *name;
    int r = machine_pop(machine, &name);
    if (r < 0)
        return r;
    r = machine_pop(machine, &module);
    if (r < 0)
        return r;
    if (module->kind != PICKLE_TEXT || name->kind != PICKLE_TEXT)
        return refuse(machine, OSCAR_ERR_CORRUPT, "a name that is no text");
    return machine_push_global(machine, &module->text, &name->text);
}

/* --- the machine -------------------------------------------------------------------------------------------------- */

static int protocol(struct machine *machine) {
    uint64_t version;
    int r = machine_take_number(machine, 1, &version);
    if (r == 0 && version > HIGHEST_PROTOCOL)
        return refuse(machine, OSCAR_ERR_UNSUPPORTED, "protocol %" PRIu64, version);
    return r;
}

static int frame(struct machine *machine) {
    uint64_t length;
    return machine_take_number(machine, 8, &length); /* a hint for readers of streams */
}

static int step(struct machine *machine, uint8_t opcode) {
    switch ((enum opcode)opcode) {
    case OP_PROTO:
        return protocol(machine);
    case OP_FRAME:
        return frame(machine);
    case OP_MARK:
        return machine_push(machine, &machine_mark);
    case OP_NONE:
        return machine_push_kind(machine, PICKLE_NONE, 0);
    case OP_NEWTRUE:
        return machine_push_kind(machine, PICKLE_BOOL, 1);
    case OP_NEWFALSE:
        return machine_push_kind(machine, PICKLE_BOOL, 0);
    case OP_BININT:
        return integer(machine, 4, true);
    case OP_BININT1:
        return integer(machine, 1, false);
    case OP_BININT2:
        return integer(machine, 2, false);
    case OP_LONG1:
        return long_integer(machine);
    case OP_BINFLOAT:
        return floating(machine);
    case OP_BINUNICODE:
        return text(machine, 4);
    case OP_SHORT_BINUNICODE:
        return text(machine, 1);
    case OP_EMPTY_TUPLE:
        return machine_push_empty(machine, PICKLE_TUPLE);
    case OP_TUPLE1:
    case OP_TUPLE2:
    case OP_TUPLE3:
        return tuple(machine, (size_t)opcode - OP_TUPLE1 + 1);
    case OP_TUPLE:
        return tuple_from_mark(machine);
    case OP_EMPTY_LIST:
        return machine_push_empty(machine, PICKLE_LIST);
    case OP_APPEND:
        return add_items(machine, PICKLE_LIST, 1, false);
    case OP_APPENDS:
        return add_from_mark(machine, PICKLE_LIST);
    case OP_EMPTY_DICT:
        return machine_push_empty(machine, PICKLE_DICT);
    case OP_SETITEM:
        return add_items(machine, PICKLE_DICT, 2, false);
    case OP_SETITEMS:
        return add_from_mark(machine, PICKLE_DICT);
    case OP_BINPUT:
        return put_numbered(machine, 1);
    case OP_LONG_BINPUT:
        return put_numbered(machine, 4);
    case OP_MEMOIZE:
        return put(machine, machine->memo.count);
    case OP_BINGET:
        return get(machine, 1);
    case OP_LONG_BINGET:
        return get(machine, 4);
    case OP_GLOBAL:
        return global_by_lines(machine);
    case OP_STACK_GLOBAL:
        return global_by_stack(machine);
    case OP_BINPERSID:
        return machine_push_storage(machine);
    case OP_REDUCE:
        return machine_call(machine);
    case OP_STOP:
        break; /* run() has seen it */
    }
    if (refused[opcode] != NULL)
        return refuse(machine, OSCAR_ERR_UNSUPPORTED, "opcode %s: refused", refused[opcode]);
    return refuse(machine, OSCAR_ERR_UNSUPPORTED, "opcode 0x%02x: refused", opcode);
}

static int run(struct machine *machine) {
    struct pickle_value *root;
    for (;;) {
        const uint8_t *opcode;
        machine->opcode_at = machine->at;
        int r = machine_take(machine, 1, &opcode);
        if (r == 0 && *opcode == OP_STOP)
            break;
        if (r == 0)
            r = step(machine, *opcode);
        if (r < 0)
            return r;
    }
    int r = machine_pop(machine, &root);
    if (r < 0)
        return r;
    if (machine->stack.count > 0 || machine->at < machine->size)
        return refuse(machine, OSCAR_ERR_CORRUPT, "the end, with something left over");
    machine->pickle->root = root;
    return 0;
}

static void pickle_cleanup(struct pickle **pickle) { pickle_free(*pickle); }

int pickle_parse(const void *bytes, size_t size, struct pickle **ret, struct oscar_cause *cause) {
    if (size > PICKLE_MAX_BYTES)
        return oscar_fail(cause, OSCAR_ERR_UNSUPPORTED, "a pickle of %zu bytes: at most %" PRIu32, size,
                          PICKLE_MAX_BYTES);
    _cleanup_(pickle_cleanup) struct pickle *pickle = calloc(1, sizeof(*pickle));
    if (pickle == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a pickle");
    struct machine machine = {.bytes = bytes, .size = size, .pickle = pickle, .cause = cause};
    int r = run(&machine);
    free(machine.stack.at);
    free(machine.memo.at);
    if (r < 0)
        return r;
    *ret = TAKE_PTR(pickle);
    return 0;
}

void pickle_free(struct pickle *pickle) {
    if (pickle == NULL)
        return;
    while (pickle->values != NULL) {
        struct pickle_value *value = pickle->values;
        pickle->values = value->next;
        if (value->kind == PICKLE_TUPLE || value->kind == PICKLE_LIST || value->kind == PICKLE_DICT)
            free(value->items.at);
        else if (value->kind == PICKLE_TENSOR)
            free(value->tensor);
        free(value);
    }
    free(pickle);
}

const struct pickle_value *pickle_root(const struct pickle *pickle) { return pickle->root; }

bool pickle_text_equal(const struct pickle_text *text, const char *other) {
    return text->length == strlen(other) && memcmp(text->bytes, other, text->length) == 0;
}

const struct pickle_value *pickle_get(const struct pickle_value *value, const char *key) {
    if (value == NULL || value->kind != PICKLE_DICT)
        return NULL;
    for (size_t i = value->items.count; i > 0; i -= 2) { /* of two equal keys Python keeps the last */
        const struct pickle_value *found = value->items.at[i - 2];
        if (found->kind == PICKLE_TEXT && pickle_text_equal(&found->text, key))
            return value->items.at[i - 1];
    }
    return NULL;
}
