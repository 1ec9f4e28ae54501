/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "proto/cleanup.h"

#define PREFIX_BYTES 8U

struct tensor {
    const char *name; /* a key of the JSON header */
    struct oscar_tensor_view view;
    uint64_t begin; /* in the data */
};

struct oscar_safetensors {
    json_t *header; /* keeps the names and metadata alive */
    const json_t *metadata;
    size_t tensors;
    struct tensor *tensor;  /* in the order of their data */
    struct tensor **byname; /* sorted for look-ups */
    void *mapping;          /* NULL, or what oscar_safetensors_open() mapped */
    size_t mapping_bytes;
};

static const struct {
    const char *name;
    uint32_t bytes;
} types[] = {
    [OSCAR_TENSOR_U8] = {"U8", 1},   [OSCAR_TENSOR_I32] = {"I32", 4},   [OSCAR_TENSOR_I64] = {"I64", 8},
    [OSCAR_TENSOR_F16] = {"F16", 2}, [OSCAR_TENSOR_BF16] = {"BF16", 2}, [OSCAR_TENSOR_F32] = {"F32", 4},
    [OSCAR_TENSOR_F64] = {"F64", 8},
};
#define TYPES (sizeof(types) / sizeof(types[0]))

const char *oscar_tensor_type_name(enum oscar_tensor_type type) {
    return (size_t)type < TYPES ? types[type].name : "unknown";
}

uint32_t oscar_tensor_type_bytes(enum oscar_tensor_type type) { return (size_t)type < TYPES ? types[type].bytes : 0; }

static int parse_type(const char *name, const json_t *value, enum oscar_tensor_type *ret, struct oscar_cause *cause) {
    const char *text = json_string_value(value);
    for (size_t i = 0; text != NULL && i < TYPES; i++) {
        if (strcmp(text, types[i].name) == 0) {
            *ret = (enum oscar_tensor_type)i;
            return OSCAR_OK;
        }
    }
    return oscar_fail(cause, OSCAR_ERR_CORRUPT, "tensor %.80s: dtype %.20s is not supported", name,
                      text != NULL ? text : "(no string)");
}

/* Fills in dims, shape and elements, each product checked. */
static int parse_shape(const char *name, const json_t *value, struct oscar_tensor_view *view,
                       struct oscar_cause *cause) {
    if (!json_is_array(value) || json_array_size(value) > OSCAR_SAFETENSORS_MAX_DIMS)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "tensor %.80s: shape is not a list of at most %u sizes", name,
                          OSCAR_SAFETENSORS_MAX_DIMS);
    uint64_t elements = 1;
    view->dims = (uint32_t)json_array_size(value);
    for (uint32_t i = 0; i < view->dims; i++) {
        const json_t *size = json_array_get(value, i);
        if (!json_is_integer(size) || json_integer_value(size) < 0)
            return oscar_fail(cause, OSCAR_ERR_CORRUPT, "tensor %.80s: size %" PRIu32 " of its shape is not a count",
                              name, i);
        view->shape[i] = (uint64_t)json_integer_value(size);
        if (__builtin_mul_overflow(elements, view->shape[i], &elements))
            return oscar_fail(cause, OSCAR_ERR_CORRUPT, "tensor %.80s: its shape overflows 64 bits", name);
    }
    view->elements = elements;
    return OSCAR_OK;
}

static int parse_offsets(const char *name, const json_t *value, uint64_t *ret_begin, uint64_t *ret_end,
                         struct oscar_cause *cause) {
    const json_t *begin = json_array_get(value, 0), *end = json_array_get(value, 1);
    if (json_array_size(value) != 2 || !json_is_integer(begin) || !json_is_integer(end) ||
        json_integer_value(begin) < 0 || json_integer_value(end) < json_integer_value(begin))
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "tensor %.80s: data_offsets is not a range [begin, end]", name);
    *ret_begin = (uint64_t)json_integer_value(begin);
    *ret_end = (uint64_t)json_integer_value(end);
    return OSCAR_OK;
}

static int parse_tensor(const char *name, json_t *value, const uint8_t *data, uint64_t data_bytes, struct tensor *ret,
                        struct oscar_cause *cause) {
    static const char *const fields[] = {"dtype", "shape", "data_offsets"};
    int r;
    if (!json_is_object(value))
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "tensor %.80s: its entry is not an object", name);
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        if (json_object_get(value, fields[i]) == NULL)
            return oscar_fail(cause, OSCAR_ERR_CORRUPT, "tensor %.80s: %s is missing", name, fields[i]);
    }
    if (json_object_size(value) != sizeof(fields) / sizeof(fields[0]))
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "tensor %.80s: it has fields besides dtype, shape and data_offsets",
                          name);

    struct oscar_tensor_view *view = &ret->view;
    uint64_t end = 0, bytes;
    ret->name = name;
    if ((r = parse_type(name, json_object_get(value, "dtype"), &view->type, cause)) < 0)
        return r;
    if ((r = parse_shape(name, json_object_get(value, "shape"), view, cause)) < 0)
        return r;
    if ((r = parse_offsets(name, json_object_get(value, "data_offsets"), &ret->begin, &end, cause)) < 0)
        return r;
    if (__builtin_mul_overflow(view->elements, types[view->type].bytes, &bytes))
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "tensor %.80s: its size overflows 64 bits", name);
    if (end > data_bytes)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "tensor %.80s: ends at byte %" PRIu64 " of %" PRIu64 " of data",
                          name, end, data_bytes);
    if (end - ret->begin != bytes)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT,
                          "tensor %.80s: data_offsets span %" PRIu64 " bytes, its shape needs %" PRIu64, name,
                          end - ret->begin, bytes);
    view->bytes = bytes;
    view->data = data + ret->begin;
    return OSCAR_OK;
}

/* Empty tensors stand before the data that begins where they do. */
static int compare_data(const void *left, const void *right) {
    const struct tensor *a = left, *b = right;
    if (a->begin != b->begin)
        return a->begin < b->begin ? -1 : 1;
    if ((a->view.bytes == 0) != (b->view.bytes == 0))
        return a->view.bytes == 0 ? -1 : 1;
    return strcmp(a->name, b->name);
}

static int compare_names(const void *left, const void *right) {
    struct tensor *const *a = left, *const *b = right;
    return strcmp((*a)->name, (*b)->name);
}

/* The data must be covered exactly: an overlap would let one tensor rewrite another's meaning, a hole could hide content. */
static int check_cover(const struct oscar_safetensors *file, uint64_t data_bytes, struct oscar_cause *cause) {
    uint64_t at = 0;
    for (size_t i = 0; i < file->tensors; i++) {
        const struct tensor *tensor = &file->tensor[i];
        if (tensor->begin < at)
            return oscar_fail(cause, OSCAR_ERR_CORRUPT, "tensor %.80s: overlaps tensor %.80s", tensor->name,
                              file->tensor[i - 1].name);
        if (tensor->begin > at)
            return oscar_fail(cause, OSCAR_ERR_CORRUPT, "%" PRIu64 " bytes of data before tensor %.80s belong to none",
                              tensor->begin - at, tensor->name);
        at = tensor->begin + tensor->view.bytes;
    }
    if (at != data_bytes)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "the last %" PRIu64 " bytes of data belong to no tensor",
                          data_bytes - at);
    return OSCAR_OK;
}

static int parse_metadata(struct oscar_safetensors *file, json_t *value, struct oscar_cause *cause) {
    const char *key;
    json_t *text;
    if (!json_is_object(value))
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "__metadata__ is not an object");
    json_object_foreach(value, key, text) {
        if (!json_is_string(text))
            return oscar_fail(cause, OSCAR_ERR_CORRUPT, "metadata %.80s is not a string", key);
    }
    file->metadata = value;
    return OSCAR_OK;
}

static int parse_header(struct oscar_safetensors *file, const uint8_t *data, uint64_t data_bytes,
                        struct oscar_cause *cause) {
    const char *key;
    json_t *value;
    int r;
    size_t entries = json_object_size(file->header);
    file->tensor = calloc(entries + 1, sizeof(*file->tensor));
    file->byname = calloc(entries + 1, sizeof(struct tensor *));
    if (file->tensor == NULL || file->byname == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for %zu tensors", entries);
    json_object_foreach(file->header, key, value) {
        if (strcmp(key, "__metadata__") == 0)
            r = parse_metadata(file, value, cause);
        else
            r = parse_tensor(key, value, data, data_bytes, &file->tensor[file->tensors++], cause);
        if (r < 0)
            return r;
    }
    qsort(file->tensor, file->tensors, sizeof(*file->tensor), compare_data);
    for (size_t i = 0; i < file->tensors; i++)
        file->byname[i] = &file->tensor[i];
    qsort(file->byname, file->tensors, sizeof(struct tensor *), compare_names);
    return check_cover(file, data_bytes, cause);
}

static void cleanup_file(struct oscar_safetensors **file) { oscar_safetensors_free(*file); }

int oscar_safetensors_parse(const void *bytes, size_t size, struct oscar_safetensors **ret, struct oscar_cause *cause) {
    const uint8_t *start = bytes;
    uint64_t header_bytes = 0;
    int r;
    if (size < PREFIX_BYTES)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "%zu bytes are no safetensors file: its length field has 8", size);
    for (unsigned i = 0; i < PREFIX_BYTES; i++)
        header_bytes |= (uint64_t)start[i] << (8 * i);
    if (header_bytes > OSCAR_SAFETENSORS_MAX_HEADER_BYTES)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT,
                          "no safetensors file: a header of %" PRIu64 " bytes (at most %" PRIu64 ")", header_bytes,
                          OSCAR_SAFETENSORS_MAX_HEADER_BYTES);
    if (header_bytes > size - PREFIX_BYTES)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "cut: a header of %" PRIu64 " bytes in %zu bytes", header_bytes,
                          size);
    /* The format lets a header begin with nothing but the brace; jansson would skip blanks. */
    if (header_bytes == 0 || start[PREFIX_BYTES] != '{')
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "no safetensors file: the header does not begin with a brace");

    _cleanup_(cleanup_file) struct oscar_safetensors *file = calloc(1, sizeof(*file));
    if (file == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a safetensors file");
    json_error_t error;
    file->header = json_loadb((const char *)start + PREFIX_BYTES, header_bytes, JSON_REJECT_DUPLICATES, &error);
    if (file->header == NULL && json_error_code(&error) == json_error_out_of_memory)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a header of %" PRIu64 " bytes", header_bytes);
    if (file->header == NULL)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "header byte %d: %.*s", error.position, JSON_ERROR_TEXT_LENGTH,
                          error.text);
    uint64_t data_offset = PREFIX_BYTES + header_bytes;
    if ((r = parse_header(file, start + data_offset, size - data_offset, cause)) < 0)
        return r;
    *ret = TAKE_PTR(file);
    return OSCAR_OK;
}

void oscar_safetensors_free(struct oscar_safetensors *file) {
    if (file == NULL)
        return;
    json_decref(file->header);
    free(file->tensor);
    free(file->byname);
    if (file->mapping != NULL)
        (void)munmap(file->mapping, file->mapping_bytes);
    free(file);
}

int oscar_safetensors_open(const char *path, struct oscar_safetensors **ret, struct oscar_cause *cause) {
    struct stat status;
    _cleanup_close_ int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not block the caller */
    if (fd < 0)
        return oscar_fail(cause, errno == ENOENT ? OSCAR_ERR_NOT_FOUND : OSCAR_ERR_IO, "%s: %m", path);
    if (fstat(fd, &status) < 0)
        return oscar_fail(cause, OSCAR_ERR_IO, "%s: %m", path);
    if (!S_ISREG(status.st_mode))
        return oscar_fail(cause, OSCAR_ERR_IO, "%s: not a regular file", path);
    if (status.st_size == 0)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "%s: empty", path);
    size_t size = (size_t)status.st_size;
    void *mapping = mmap(NULL, size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (mapping == MAP_FAILED)
        return oscar_fail(cause, OSCAR_ERR_IO, "%s: mmap: %m", path);
    int r = oscar_safetensors_parse(mapping, size, ret, cause);
    if (r < 0) {
        (void)munmap(mapping, size);
        return r;
    }
    (*ret)->mapping = mapping;
    (*ret)->mapping_bytes = size;
    return OSCAR_OK;
}

int oscar_safetensors_find(const struct oscar_safetensors *file, const char *name, struct oscar_tensor_view *ret) {
    struct tensor key = {.name = name};
    struct tensor *pointer = &key;
    struct tensor **found = bsearch(&pointer, file->byname, file->tensors, sizeof(struct tensor *), compare_names);
    if (found == NULL)
        return OSCAR_ERR_NOT_FOUND;
    *ret = (*found)->view;
    return OSCAR_OK;
}

const char *oscar_safetensors_metadata(const struct oscar_safetensors *file, const char *key) {
    return json_string_value(json_object_get(file->metadata, key));
}

const char *oscar_safetensors_name(const struct oscar_safetensors *file, size_t index) {
    return index < file->tensors ? file->tensor[index].name : NULL;
}
