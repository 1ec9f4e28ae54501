/* SPDX-License-Identifier: Apache-2.0 */
#include "calib/torch_file.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "calib/zip.h"
#include "proto/cleanup.h"
#include "proto/half.h"

#define PICKLE_NAME "/data.pkl"
#define MAX_NAME_BYTES 512U

struct torch_file {
    struct zip *zip;
    struct pickle *pickle;
    char root[MAX_NAME_BYTES]; /* the archive's one folder */
};

/* The folder that holds the pickle: it has the name that the file had when it was saved. */
static int find_root(struct torch_file *file, struct oscar_cause *cause) {
    const char *name;
    size_t length;
    for (size_t i = 0; (name = zip_name(file->zip, i, &length)) != NULL; i++) {
        const size_t tail = strlen(PICKLE_NAME);
        if (length <= tail || length - tail >= sizeof(file->root) || memchr(name, '\0', length) != NULL ||
            memcmp(name + length - tail, PICKLE_NAME, tail) != 0)
            continue;
        memcpy(file->root, name, length - tail);
        return 0;
    }
    return oscar_fail(cause, OSCAR_ERR_CORRUPT, "a zip archive without data.pkl: no file of torch.save()");
}

static int read_member(struct torch_file *file, const char *name, struct zip_data *ret, struct oscar_cause *cause) {
    char full[2 * MAX_NAME_BYTES];
    (void)snprintf(full, sizeof(full), "%s/%s", file->root, name);
    return zip_read(file->zip, full, ret, cause);
}

/* Files of older versions do not say: they were written on little-endian machines as good as always. */
static int check_byte_order(struct torch_file *file, struct oscar_cause *cause) {
    struct zip_data order;
    int r = read_member(file, "byteorder", &order, NULL);
    if (r == OSCAR_ERR_NOT_FOUND || (r == 0 && order.size == 6 && memcmp(order.bytes, "little", 6) == 0))
        return 0;
    return oscar_fail(cause, OSCAR_ERR_UNSUPPORTED, "its numbers are not little-endian");
}

static void torch_file_cleanup(struct torch_file **file) { torch_file_free(*file); }

int torch_file_parse(const void *bytes, size_t size, struct torch_file **ret, struct oscar_cause *cause) {
    struct zip_data pickle;
    _cleanup_(torch_file_cleanup) struct torch_file *file = calloc(1, sizeof(*file));
    if (file == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a file");
    int r = zip_parse(bytes, size, &file->zip, cause);
    if (r == 0)
        r = find_root(file, cause);
    if (r == 0)
        r = check_byte_order(file, cause);
    if (r == 0)
        r = read_member(file, "data.pkl", &pickle, cause);
    if (r == 0)
        r = pickle_parse(pickle.bytes, pickle.size, &file->pickle, cause);
    if (r < 0)
        return r;
    *ret = TAKE_PTR(file);
    return 0;
}

void torch_file_free(struct torch_file *file) {
    if (file == NULL)
        return;
    pickle_free(file->pickle);
    zip_free(file->zip);
    free(file);
}

const struct pickle_value *torch_file_root(const struct torch_file *file) { return pickle_root(file->pickle); }

/* --- tensors ------------------------------------------------------------------------------------------------------ */

static uint16_t get16(const uint8_t *at) {
    uint16_t value;
    memcpy(&value, at, sizeof(value));
    return value;
}

static float element(enum oscar_tensor_type type, const uint8_t *at) {
    float single;
    double wide;
    switch (type) {
    case OSCAR_TENSOR_F16:
        return oscar_float_from_half(get16(at));
    case OSCAR_TENSOR_BF16:
        return oscar_float_from_bfloat(get16(at));
    case OSCAR_TENSOR_F64:
        memcpy(&wide, at, sizeof(wide));
        return (float)wide;
    default:
        memcpy(&single, at, sizeof(single));
        return single;
    }
}

static int find_storage(struct torch_file *file, const struct pickle_storage *storage, struct zip_data *ret,
                        struct oscar_cause *cause) {
    char name[MAX_NAME_BYTES];
    uint64_t bytes;
    int length = snprintf(name, sizeof(name), "data/%.*s", storage->key.length < 64 ? (int)storage->key.length : 64,
                          storage->key.bytes);
    if (length < 0 || (size_t)length != strlen("data/") + storage->key.length)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "a storage with the name %s", name);
    int r = read_member(file, name, ret, cause);
    if (r < 0)
        return r;
    if (__builtin_mul_overflow(storage->elements, oscar_tensor_type_bytes(storage->type), &bytes) || bytes > ret->size)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "storage %s has %zu bytes: too few for %" PRIu64 " elements of %s",
                          name, ret->size, storage->elements, oscar_tensor_type_name(storage->type));
    return 0;
}

static uint64_t count_elements(const struct pickle_tensor *tensor) {
    uint64_t count = 1;
    for (uint32_t i = 0; i < tensor->dims; i++)
        if (__builtin_mul_overflow(count, tensor->shape[i], &count))
            return UINT64_MAX;
    return count;
}

int torch_file_read(struct torch_file *file, const struct pickle_tensor *tensor, float *ret, uint64_t elements,
                    struct oscar_cause *cause) {
    const enum oscar_tensor_type type = tensor->storage.type;
    const uint32_t width = oscar_tensor_type_bytes(type);
    uint64_t index[PICKLE_MAX_DIMS] = {0}, at = tensor->offset;
    struct zip_data storage;
    if (type != OSCAR_TENSOR_F16 && type != OSCAR_TENSOR_BF16 && type != OSCAR_TENSOR_F32 && type != OSCAR_TENSOR_F64)
        return oscar_fail(cause, OSCAR_ERR_UNSUPPORTED, "a tensor of %s: expected floats",
                          oscar_tensor_type_name(type));
    if (count_elements(tensor) != elements)
        return oscar_fail(cause, OSCAR_ERR_INVALID, "a tensor that has not %" PRIu64 " elements", elements);
    int r = find_storage(file, &tensor->storage, &storage, cause);
    if (r < 0)
        return r;
    for (uint64_t n = 0; n < elements; n++) {
        ret[n] = element(type, storage.bytes + at * width);
        for (uint32_t i = tensor->dims; i-- > 0;) { /* one step on, as a counter with a digit a dimension */
            at += tensor->stride[i];
            if (++index[i] < tensor->shape[i])
                break;
            at -= index[i] * tensor->stride[i];
            index[i] = 0;
        }
    }
    return 0;
}
