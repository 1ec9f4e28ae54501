/* SPDX-License-Identifier: Apache-2.0 */
/* All that a pickle may name, and what comes of it: storages, tensors and ordered dicts of PyTorch. */
#include <inttypes.h>
#include <stdlib.h>

#include "calib/pickle_machine.h"

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

int machine_push_global(struct machine *machine, const struct pickle_text *module, const struct pickle_text *name) {
    for (size_t i = 0; i < sizeof(globals) / sizeof(globals[0]); i++)
        if (pickle_text_equal(module, globals[i].module) && pickle_text_equal(name, globals[i].name))
            return machine_push_new(machine, &(struct pickle_value){.kind = PICKLE_GLOBAL, .global = &globals[i]});
    return refuse(machine, OSCAR_ERR_UNSUPPORTED, "calls %.*s.%.*s: refused",
                  module->length < 80 ? (int)module->length : 80, module->bytes,
                  name->length < 80 ? (int)name->length : 80, name->bytes);
}

static const struct pickle_value *item(const struct pickle_value *value, size_t index, enum pickle_kind kind) {
    const struct pickle_value *found = value->items.at[index];
    return found->kind == kind ? found : NULL;
}

/* ('storage', class, key, device, elements) */
int machine_push_storage(struct machine *machine) {
    struct pickle_value *id;
    int r = machine_pop(machine, &id);
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
    return machine_push_new(machine, &(struct pickle_value){.kind = PICKLE_STORAGE, .storage = found});
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
        return machine_out_of_memory(machine);
    *kept = tensor;
    int r = machine_push_new(machine, &(struct pickle_value){.kind = PICKLE_TENSOR, .tensor = kept});
    if (r < 0)
        free(kept);
    return r;
}

int machine_call(struct machine *machine) {
    struct pickle_value *arguments, *callee;
    int r = machine_pop(machine, &arguments);
    if (r < 0)
        return r;
    r = machine_pop(machine, &callee);
    if (r < 0)
        return r;
    if (callee->kind != PICKLE_GLOBAL || arguments->kind != PICKLE_TUPLE)
        return refuse(machine, OSCAR_ERR_CORRUPT, "a call of what cannot be called");
    if (callee->global->role == REBUILD_TENSOR)
        return rebuild_tensor(machine, arguments);
    if (callee->global->role == ORDERED_DICT && arguments->items.count == 0)
        return machine_push_empty(machine, PICKLE_DICT);
    return refuse(machine, OSCAR_ERR_UNSUPPORTED, "calls %s.%s with %zu arguments: refused", callee->global->module,
                  callee->global->name, arguments->items.count);
}
