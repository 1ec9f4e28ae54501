/* SPDX-License-Identifier: Apache-2.0 */
#include "calib/pickle.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

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

/* All that a pickle may name. */
enum role { ORDERED_DICT, REBUILD_TENSOR, STORAGE };

struct pickle_global {
    const char *module, *name;
    enum role role;
    enum oscar_tensor_type type; /* of a storage */
};

static const struct pickle_global globals[] = {
    {"collections", "OrderedDict", ORDERED_DICT, 0},      {"torch._utils", "_rebuild_tensor_v2", REBUILD_TENSOR, 0},
    {"torch", "FloatStorage", STORAGE, OSCAR_TENSOR_F32}, {"torch", "DoubleStorage", STORAGE, OSCAR_TENSOR_F64},
    {"torch", "HalfStorage", STORAGE, OSCAR_TENSOR_F16},  {"torch", "BFloat16Storage", STORAGE, OSCAR_TENSOR_BF16},
    {"torch", "ByteStorage", STORAGE, OSCAR_TENSOR_U8},   {"torch", "IntStorage", STORAGE, OSCAR_TENSOR_I32},
    {"torch", "LongStorage", STORAGE, OSCAR_TENSOR_I64},
};

struct pickle {
    struct pickle_value *values; /* all of them, last first */
    const struct pickle_value *root;
};

/* What runs a pickle: a stack and numbered memories, both of values. */
struct machine {
    const uint8_t *bytes;
    size_t size, at, opcode_at;
    struct pickle *pickle;
    struct pickle_items stack, memo;
    struct oscar_cause *cause;
};

static struct pickle_value mark; /* stands on the stack where MARK was; only its address counts */

/* --- failures ----------------------------------------------------------------------------------------------------- */

/* A macro, as oscar_fail() is one: whoever compiles it sees that the value is the error. */
#define refuse(machine, error, format, ...)                                                                            \
    oscar_fail((machine)->cause, error, "pickle byte %zu: " format, (machine)->opcode_at, ##__VA_ARGS__)

static int out_of_memory(const struct machine *machine) {
    return oscar_fail(machine->cause, OSCAR_ERR_NO_MEMORY, "no memory for a pickle");
}

/* --- values ------------------------------------------------------------------------------------------------------- */

static bool items_add(struct pickle_items *items, struct pickle_value *value) {
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

static int push(struct machine *machine, struct pickle_value *value) {
    return items_add(&machine->stack, value) ? 0 : out_of_memory(machine);
}

/* A new value on the stack, a copy of `like` but for its place in the list. What it owns goes to the pickle, unless it fails. */
static int push_new(struct machine *machine, const struct pickle_value *like) {
    struct pickle_value *value = malloc(sizeof(*value));
    if (value == NULL || push(machine, value) < 0) {
        free(value);
        return out_of_memory(machine);
    }
    *value = *like;
    value->next = machine->pickle->values;
    machine->pickle->values = value;
    return 0;
}

static int push_kind(struct machine *machine, enum pickle_kind kind, int64_t integer) {
    return push_new(machine, &(struct pickle_value){.kind = kind, .integer = integer});
}

static int push_empty(struct machine *machine, enum pickle_kind kind) {
    return push_new(machine, &(struct pickle_value){.kind = kind, .items = {0}});
}

/* Never a mark: an opcode takes what was pushed since the last one. */
static int pop(struct machine *machine, struct pickle_value **ret) {
    struct pickle_items *stack = &machine->stack;
    if (stack->count == 0 || stack->at[stack->count - 1] == &mark)
        return refuse(machine, OSCAR_ERR_CORRUPT, "nothing on the stack for this opcode");
    *ret = stack->at[--stack->count];
    return 0;
}

static int top(struct machine *machine, struct pickle_value **ret) {
    int r = pop(machine, ret);
    if (r == 0)
        machine->stack.count++;
    return r;
}

/* The number of values above the last mark. They stay; the mark, too. */
static int above_mark(const struct machine *machine, size_t *ret) {
    const struct pickle_items *stack = &machine->stack;
    for (size_t count = 0; count < stack->count; count++)
        if (stack->at[stack->count - 1 - count] == &mark) {
            *ret = count;
            return 0;
        }
    return refuse(machine, OSCAR_ERR_CORRUPT, "no mark on the stack for this opcode");
}

/* --- bytes of the pickle ------------------------------------------------------------------------------------------ */

static int take(struct machine *machine, uint64_t count, const uint8_t **ret) {
    if (count > machine->size - machine->at)
        return refuse(machine, OSCAR_ERR_CORRUPT, "cut: %" PRIu64 " bytes wanted, %zu left", count,
                      machine->size - machine->at);
    *ret = machine->bytes + machine->at;
    machine->at += (size_t)count;
    return 0;
}

/* A number of `width` bytes, at most 8, little-endian. */
static int take_number(struct machine *machine, unsigned width, uint64_t *ret) {
    const uint8_t *bytes;
    int r = take(machine, width, &bytes);
    if (r < 0)
        return r;
    *ret = 0;
    for (unsigned i = 0; i < width; i++)
        *ret |= (uint64_t)bytes[i] << (8 * i);
    return 0;
}

/* Up to the next line break, which is taken, too. */
static int take_line(struct machine *machine, struct pickle_text *ret) {
    const uint8_t *start = machine->bytes + machine->at;
    const uint8_t *end = memchr(start, '\n', machine->size - machine->at);
    if (end == NULL)
        return refuse(machine, OSCAR_ERR_CORRUPT, "cut in a name");
    *ret = (struct pickle_text){(const char *)start, (size_t)(end - start)};
    machine->at += ret->length + 1;
    return 0;
}

/* --- opcodes ------------------------------------------------------------------------------------------------------ */

static int integer(struct machine *machine, unsigned width, bool with_sign) {
    uint64_t value;
    int r = take_number(machine, width, &value);
    if (r < 0)
        return r;
    if (with_sign && width > 0 && width < 8 && (value >> (8 * width - 1)) != 0)
        value |= UINT64_MAX << (8 * width);
    return push_kind(machine, PICKLE_INT, (int64_t)value);
}

static int long_integer(struct machine *machine) {
    uint64_t width;
    int r = take_number(machine, 1, &width);
    if (r < 0)
        return r;
    if (width > 8)
        return refuse(machine, OSCAR_ERR_UNSUPPORTED, "an integer of %" PRIu64 " bytes", width);
    return integer(machine, (unsigned)width, true);
}

static int floating(struct machine *machine) {
    uint64_t bits;
    double number;
    int r = take_number(machine, 8, &bits);
    if (r < 0)
        return r;
    bits = __builtin_bswap64(bits); /* the one number in a pickle that is big-endian */
    memcpy(&number, &bits, sizeof(number));
    return push_new(machine, &(struct pickle_value){.kind = PICKLE_FLOAT, .number = number});
}

static int text(struct machine *machine, unsigned width) {
    uint64_t length;
    const uint8_t *bytes;
    int r = take_number(machine, width, &length);
    if (r == 0)
        r = take(machine, length, &bytes);
    if (r < 0)
        return r;
    return push_new(machine,
                    &(struct pickle_value){.kind = PICKLE_TEXT, .text = {(const char *)bytes, (size_t)length}});
}

/* The `count` values on top, in a tuple. */
static int tuple(struct machine *machine, size_t count) {
    struct pickle_value value = {.kind = PICKLE_TUPLE, .items = {.count = count, .capacity = count}};
    struct pickle_items *stack = &machine->stack;
    size_t free_to_take = 0;
    while (free_to_take < count && free_to_take < stack->count && stack->at[stack->count - 1 - free_to_take] != &mark)
        free_to_take++;
    if (free_to_take < count)
        return refuse(machine, OSCAR_ERR_CORRUPT, "nothing on the stack for this opcode");
    value.items.at = calloc(count + 1, sizeof(struct pickle_value *));
    if (value.items.at == NULL)
        return out_of_memory(machine);
    stack->count -= count;
    memcpy(value.items.at, stack->at + stack->count, count * sizeof(struct pickle_value *));
    int r = push_new(machine, &value);
    if (r < 0)
        free(value.items.at);
    return r;
}

static int tuple_from_mark(struct machine *machine) {
    size_t count;
    int r = above_mark(machine, &count);
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
        stack->at[stack->count - 1 - below] == &mark)
        return refuse(machine, OSCAR_ERR_CORRUPT, "no %s to add to", kind == PICKLE_DICT ? "dict" : "list");
    if (kind == PICKLE_DICT && count % 2 != 0)
        return refuse(machine, OSCAR_ERR_CORRUPT, "a key without a value");
    struct pickle_items *items = &stack->at[stack->count - 1 - below]->items;
    for (size_t i = stack->count - count; i < stack->count; i++) {
        if (stack->at[i] == &mark)
            return refuse(machine, OSCAR_ERR_CORRUPT, "nothing on the stack for this opcode");
        if (!items_add(items, stack->at[i]))
            return out_of_memory(machine);
    }
    stack->count -= below;
    return 0;
}

static int add_from_mark(struct machine *machine, enum pickle_kind kind) {
    size_t count;
    int r = above_mark(machine, &count);
    return r < 0 ? r : add_items(machine, kind, count, true);
}

/* Numbers of memories count from 0 in every pickle that was made by a pickler, so none is as large as the pickle. */
static int put(struct machine *machine, uint64_t index) {
    struct pickle_value *value;
    int r = top(machine, &value);
    if (r < 0)
        return r;
    if (index >= machine->size)
        return refuse(machine, OSCAR_ERR_CORRUPT, "memory %" PRIu64 " in a pickle of %zu bytes", index, machine->size);
    while (machine->memo.count <= index)
        if (!items_add(&machine->memo, NULL))
            return out_of_memory(machine);
    machine->memo.at[index] = value;
    return 0;
}

static int put_numbered(struct machine *machine, unsigned width) {
    uint64_t index;
    int r = take_number(machine, width, &index);
    return r < 0 ? r : put(machine, index);
}

static int get(struct machine *machine, unsigned width) {
    uint64_t index;
    int r = take_number(machine, width, &index);
    if (r < 0)
        return r;
    if (index >= machine->memo.count || machine->memo.at[index] == NULL)
        return refuse(machine, OSCAR_ERR_CORRUPT, "memory %" PRIu64 " was never set", index);
    return push(machine, machine->memo.at[index]);
}

/* --- names and calls ---------------------------------------------------------------------------------------------- */

static int push_global(struct machine *machine, const struct pickle_text *module, const struct pickle_text *name) {
    for (size_t i = 0; i < sizeof(globals) / sizeof(globals[0]); i++)
        if (pickle_text_equal(module, globals[i].module) && pickle_text_equal(name, globals[i].name))
            return push_new(machine, &(struct pickle_value){.kind = PICKLE_GLOBAL, .global = &globals[i]});
    return refuse(machine, OSCAR_ERR_UNSUPPORTED, "calls %.*s.%.*s: refused",
                  module->length < 80 ? (int)module->length : 80, module->bytes,
                  name->length < 80 ? (int)name->length : 80, name->bytes);
}

static int global_by_lines(struct machine *machine) {
    struct pickle_text module, name;
    int r = take_line(machine, &module);
    if (r == 0)
        r = take_line(machine, &name);
    return r < 0 ? r : push_global(machine, &module, &name);
}

static int global_by_stack(struct machine *machine) {
    struct pickle_value *module, *name;
    int r = pop(machine, &name);
    if (r == 0)
        r = pop(machine, &module);
    if (r < 0)
        return r;
    if (module->kind != PICKLE_TEXT || name->kind != PICKLE_TEXT)
        return refuse(machine, OSCAR_ERR_CORRUPT, "a name that is no text");
    return push_global(machine, &module->text, &name->text);
}

static const struct pickle_value *item(const struct pickle_value *value, size_t index, enum pickle_kind kind) {
    const struct pickle_value *found = value->items.at[index];
    return found->kind == kind ? found : NULL;
}

/* ('storage', class, key, device, elements) */
static int storage(struct machine *machine) {
    struct pickle_value *id;
    int r = pop(machine, &id);
    if (r < 0)
        return r;
    if (id->kind != PICKLE_TUPLE || id->items.count != 5)
        return refuse(machine, OSCAR_ERR_CORRUPT, "what lies outside the pickle is no storage of PyTorch");
    const struct pickle_value *word = item(id, 0, PICKLE_TEXT), *class = item(id, 1, PICKLE_GLOBAL);
    const struct pickle_value *key = item(id, 2, PICKLE_TEXT), *elements = item(id, 4, PICKLE_INT);
    if (word == NULL || !pickle_text_equal(&word->text, "storage") || class == NULL || class->global->role != STORAGE ||
        key == NULL || elements == NULL || elements->integer < 0)
        return refuse(machine, OSCAR_ERR_CORRUPT, "what lies outside the pickle is no storage of PyTorch");
    struct pickle_storage found = {key->text, class->global->type, (uint64_t)elements->integer};
    return push_new(machine, &(struct pickle_value){.kind = PICKLE_STORAGE, .storage = found});
}

/* Sizes or strides; their number, or -1. */
static int read_sizes(const struct pickle_value *value, uint64_t ret[PICKLE_MAX_DIMS]) {
    if (value->kind != PICKLE_TUPLE || value->items.count > PICKLE_MAX_DIMS)
        return -1;
    for (size_t i = 0; i < value->items.count; i++) {
        const struct pickle_value *size = item(value, i, PICKLE_INT);
        if (size == NULL || size->integer < 0)
            return -1;
        ret[i] = (uint64_t)size->integer;
    }
    return (int)value->items.count;
}

/* True when every element lies in the storage. */
static bool within(const struct pickle_tensor *tensor) {
    uint64_t last = tensor->offset, step;
    for (uint32_t i = 0; i < tensor->dims; i++)
        if (tensor->shape[i] == 0)
            return true;
    for (uint32_t i = 0; i < tensor->dims; i++)
        if (__builtin_mul_overflow(tensor->shape[i] - 1, tensor->stride[i], &step) ||
            __builtin_add_overflow(last, step, &last))
            return false;
    return last < tensor->storage.elements;
}

/* (storage, offset, sizes, strides, requires_grad, hooks[, metadata]) */
static int rebuild_tensor(struct machine *machine, const struct pickle_value *arguments) {
    struct pickle_tensor tensor = {0};
    if (arguments->items.count < 6 || arguments->items.count > 7)
        return refuse(machine, OSCAR_ERR_CORRUPT, "a tensor of %zu arguments: expected 6 or 7", arguments->items.count);
    const struct pickle_value *from = item(arguments, 0, PICKLE_STORAGE), *offset = item(arguments, 1, PICKLE_INT);
    int dims = read_sizes(arguments->items.at[2], tensor.shape);
    int strides = read_sizes(arguments->items.at[3], tensor.stride);
    if (from == NULL || offset == NULL || offset->integer < 0 || dims < 0 || strides != dims)
        return refuse(machine, OSCAR_ERR_CORRUPT,
                      "a tensor without a storage, an offset, or at most %u sizes and strides", PICKLE_MAX_DIMS);
    tensor.storage = from->storage;
    tensor.offset = (uint64_t)offset->integer;
    tensor.dims = (uint32_t)dims;
    if (!within(&tensor))
        return refuse(machine, OSCAR_ERR_CORRUPT, "a tensor reaches over the %" PRIu64 " elements of its storage",
                      tensor.storage.elements);
    struct pickle_tensor *kept = malloc(sizeof(*kept));
    if (kept == NULL)
        return out_of_memory(machine);
    *kept = tensor;
    int r = push_new(machine, &(struct pickle_value){.kind = PICKLE_TENSOR, .tensor = kept});
    if (r < 0)
        free(kept);
    return r;
}

static int reduce(struct machine *machine) {
    struct pickle_value *arguments, *callee;
    int r = pop(machine, &arguments);
    if (r == 0)
        r = pop(machine, &callee);
    if (r < 0)
        return r;
    if (callee->kind != PICKLE_GLOBAL || arguments->kind != PICKLE_TUPLE)
        return refuse(machine, OSCAR_ERR_CORRUPT, "a call of what cannot be called");
    if (callee->global->role == REBUILD_TENSOR)
        return rebuild_tensor(machine, arguments);
    if (callee->global->role == ORDERED_DICT && arguments->items.count == 0)
        return push_empty(machine, PICKLE_DICT);
    return refuse(machine, OSCAR_ERR_UNSUPPORTED, "calls %s.%s with %zu arguments: refused", callee->global->module,
                  callee->global->name, arguments->items.count);
}

/* --- the machine -------------------------------------------------------------------------------------------------- */

static int protocol(struct machine *machine) {
    uint64_t version;
    int r = take_number(machine, 1, &version);
    if (r == 0 && version > HIGHEST_PROTOCOL)
        return refuse(machine, OSCAR_ERR_UNSUPPORTED, "protocol %" PRIu64, version);
    return r;
}

static int frame(struct machine *machine) {
    uint64_t length;
    return take_number(machine, 8, &length); /* a hint for readers of streams */
}

static int step(struct machine *machine, uint8_t opcode) {
    switch ((enum opcode)opcode) {
    case OP_PROTO:
        return protocol(machine);
    case OP_FRAME:
        return frame(machine);
    case OP_MARK:
        return push(machine, &mark);
    case OP_NONE:
        return push_kind(machine, PICKLE_NONE, 0);
    case OP_NEWTRUE:
        return push_kind(machine, PICKLE_BOOL, 1);
    case OP_NEWFALSE:
        return push_kind(machine, PICKLE_BOOL, 0);
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
        return push_empty(machine, PICKLE_TUPLE);
    case OP_TUPLE1:
    case OP_TUPLE2:
    case OP_TUPLE3:
        return tuple(machine, (size_t)opcode - OP_TUPLE1 + 1);
    case OP_TUPLE:
        return tuple_from_mark(machine);
    case OP_EMPTY_LIST:
        return push_empty(machine, PICKLE_LIST);
    case OP_APPEND:
        return add_items(machine, PICKLE_LIST, 1, false);
    case OP_APPENDS:
        return add_from_mark(machine, PICKLE_LIST);
    case OP_EMPTY_DICT:
        return push_empty(machine, PICKLE_DICT);
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
        return storage(machine);
    case OP_REDUCE:
        return reduce(machine);
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
        int r = take(machine, 1, &opcode);
        if (r == 0 && *opcode == OP_STOP)
            break;
        if (r == 0)
            r = step(machine, *opcode);
        if (r < 0)
            return r;
    }
    int r = pop(machine, &root);
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
