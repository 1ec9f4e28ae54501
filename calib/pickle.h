/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A reader of pickles that runs nothing: texts, numbers, lists, tuples and dicts, and of all that a pickle can call only what
 * torch.save() needs for tensors and ordered dicts. Anything else is refused by its name. Memory is a small multiple of the
 * pickle's size, whatever it says.
 */
#ifndef OSCAR_CALIB_PICKLE_H
#define OSCAR_CALIB_PICKLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/cause.h"
#include "proto/safetensors.h"

#define PICKLE_MAX_BYTES (UINT32_C(4) << 20) /* of a pickle; a rotation file of 512 layers has 150,000 */
#define PICKLE_MAX_DIMS 8U

enum pickle_kind {
    PICKLE_NONE,
    PICKLE_BOOL,
    PICKLE_INT,
    PICKLE_FLOAT,
    PICKLE_TEXT,
    PICKLE_TUPLE,
    PICKLE_LIST,
    PICKLE_DICT,
    PICKLE_GLOBAL,  /* something that is not called */
    PICKLE_STORAGE, /* what a tensor lies in */
    PICKLE_TENSOR,
};

struct pickle_text {
    const char *bytes; /* in the pickle, not terminated */
    size_t length;
};

struct pickle_items {
    struct pickle_value **at; /* of a dict: key, value, key, value, .. */
    size_t count, capacity;
};

/* Elements of one type under a name of the archive. */
struct pickle_storage {
    struct pickle_text key;
    enum oscar_tensor_type type;
    uint64_t elements;
};

/* A view into a storage, and within it: offset and strides count elements. */
struct pickle_tensor {
    struct pickle_storage storage;
    uint64_t offset;
    uint32_t dims;
    uint64_t shape[PICKLE_MAX_DIMS];
    uint64_t stride[PICKLE_MAX_DIMS];
};

struct pickle_value {
    enum pickle_kind kind;
    union {
        int64_t integer; /* BOOL, INT */
        double number;
        struct pickle_text text;
        struct pickle_items items; /* TUPLE, LIST, DICT */
        const struct pickle_global *global;
        struct pickle_storage storage;
        struct pickle_tensor *tensor;
    };
    struct pickle_value *next; /* the pickle's values, for the end */
};

struct pickle;

/*
 * `bytes` must outlive the object. OSCAR_ERR_CORRUPT (no pickle), OSCAR_ERR_UNSUPPORTED (it calls something, or has an opcode
 * that a file of tensors does not need), both with the place; OSCAR_ERR_NO_MEMORY.
 */
int pickle_parse(const void *bytes, size_t size, struct pickle **ret, struct oscar_cause *cause);
void pickle_free(struct pickle *pickle); /* NULL is fine */

/* What was pickled. A container may be part of itself. */
const struct pickle_value *pickle_root(const struct pickle *pickle);

/* The value of a text key; NULL where there is none, or `value` is no dict (or NULL). */
const struct pickle_value *pickle_get(const struct pickle_value *value, const char *key);

bool pickle_text_equal(const struct pickle_text *text, const char *other);

#endif
