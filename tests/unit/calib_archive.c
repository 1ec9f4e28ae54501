/* SPDX-License-Identifier: Apache-2.0 */
#include "calib_archive.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/half.h"

/* --- bytes -------------------------------------------------------------------------------------------------------- */

void bytes_add(struct bytes *bytes, const void *more, size_t size) {
    if (size > bytes->capacity - bytes->size) {
        bytes->capacity = 2 * bytes->capacity + size;
        bytes->at = realloc(bytes->at, bytes->capacity);
        if (bytes->at == NULL)
            abort();
    }
    if (size > 0)
        memcpy(bytes->at + bytes->size, more, size);
    bytes->size += size;
}

void bytes_add_number(struct bytes *bytes, uint64_t value, unsigned width) {
    for (unsigned i = 0; i < width; i++)
        bytes_add(bytes, &(uint8_t){(uint8_t)(value >> (8 * i))}, 1);
}

void bytes_clear(struct bytes *bytes) {
    free(bytes->at);
    *bytes = (struct bytes){0};
}

/* --- zip ---------------------------------------------------------------------------------------------------------- */

struct bytes *archive_add(struct archive *archive, const char *name) {
    if (archive->members == ARCHIVE_MAX_MEMBERS)
        abort();
    size_t at = archive->members++;
    (void)snprintf(archive->member[at].name, sizeof(archive->member[at].name), "%s", name);
    return &archive->member[at].data;
}

void archive_clear(struct archive *archive) {
    for (size_t i = 0; i < archive->members; i++)
        bytes_clear(&archive->member[i].data);
    *archive = (struct archive){0};
}

/* Bit by bit, unlike the reader's. */
static uint32_t crc32_of(const struct bytes *bytes) {
    uint32_t crc = UINT32_MAX;
    for (size_t i = 0; i < bytes->size; i++) {
        crc ^= bytes->at[i];
        for (unsigned bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ ((crc & 1U) != 0 ? 0xedb88320U : 0);
    }
    return ~crc;
}

/* As PyTorch does it: no sizes here, and the data at a multiple of 64. */
static void add_local(struct bytes *bytes, const char *name) {
    size_t length = strlen(name), padding = (64 - (bytes->size + 30 + length + 4) % 64) % 64;
    bytes_add_number(bytes, 0x04034b50, 4);
    for (unsigned i = 4; i < 26; i++)
        bytes_add_number(bytes, 0, 1);
    bytes_add_number(bytes, length, 2);
    bytes_add_number(bytes, 4 + padding, 2);
    bytes_add(bytes, name, length);
    bytes_add(bytes, "FB", 2);
    bytes_add_number(bytes, padding, 2);
    for (size_t i = 0; i < padding; i++)
        bytes_add(bytes, "Z", 1);
}

static void add_entry(struct bytes *bytes, const struct archive *archive, size_t index, uint64_t offset) {
    const struct bytes *data = &archive->member[index].data;
    const char *name = archive->member[index].name;
    bytes_add_number(bytes, 0x02014b50, 4);
    bytes_add_number(bytes, 0, 6);
    bytes_add_number(bytes, archive->member[index].method, 2);
    bytes_add_number(bytes, 0, 4);
    bytes_add_number(bytes, crc32_of(data) ^ archive->member[index].crc_error, 4);
    bytes_add_number(bytes, archive->wide ? UINT32_MAX : data->size, 4);
    bytes_add_number(bytes, archive->wide ? UINT32_MAX : data->size, 4);
    bytes_add_number(bytes, strlen(name), 2);
    bytes_add_number(bytes, archive->wide ? 34 : 0, 2);
    bytes_add_number(bytes, 0, 8);
    bytes_add_number(bytes, 0, 2);
    bytes_add_number(bytes, archive->wide ? UINT32_MAX : offset, 4);
    bytes_add(bytes, name, strlen(name));
    if (archive->wide) {
        bytes_add(bytes, "\x55\x54\x02\x00zz\x01\x00\x18\x00", 10); /* another extra field stands first */
        bytes_add_number(bytes, data->size, 8);
        bytes_add_number(bytes, data->size, 8);
        bytes_add_number(bytes, offset, 8);
    }
}

void archive_write(const struct archive *archive, struct bytes *ret) {
    uint64_t offset[ARCHIVE_MAX_MEMBERS];
    *ret = (struct bytes){0};
    for (size_t i = 0; i < archive->members; i++) {
        offset[i] = ret->size;
        add_local(ret, archive->member[i].name);
        bytes_add(ret, archive->member[i].data.at, archive->member[i].data.size);
    }
    uint64_t directory = ret->size;
    for (size_t i = 0; i < archive->members; i++)
        add_entry(ret, archive, i, offset[i]);
    uint64_t size = ret->size - directory, end = ret->size;
    if (archive->wide) {
        bytes_add_number(ret, 0x06064b50, 4);
        bytes_add_number(ret, 44, 8);
        bytes_add_number(ret, 0, 8);
        bytes_add_number(ret, 0, 4);
        bytes_add_number(ret, archive->members, 8);
        bytes_add_number(ret, archive->members, 8);
        bytes_add_number(ret, size, 8);
        bytes_add_number(ret, directory, 8);
        bytes_add_number(ret, 0x07064b50, 4);
        bytes_add_number(ret, 0, 4);
        bytes_add_number(ret, end, 8);
        bytes_add_number(ret, 1, 4);
    }
    bytes_add_number(ret, 0x06054b50, 4);
    bytes_add_number(ret, 0, 4);
    bytes_add_number(ret, archive->wide ? UINT16_MAX : archive->members, 2);
    bytes_add_number(ret, archive->wide ? UINT16_MAX : archive->members, 2);
    bytes_add_number(ret, archive->wide ? UINT32_MAX : size, 4);
    bytes_add_number(ret, archive->wide ? UINT32_MAX : directory, 4);
    bytes_add_number(ret, 0, 2);
}

/* --- pickles ------------------------------------------------------------------------------------------------------ */

void pickle_op(struct bytes *pickle, const char *opcodes) { bytes_add(pickle, opcodes, strlen(opcodes)); }

void pickle_add_text(struct bytes *pickle, const char *text) {
    pickle_op(pickle, "X");
    bytes_add_number(pickle, strlen(text), 4);
    pickle_op(pickle, text);
}

void pickle_add_int(struct bytes *pickle, int64_t value) {
    if (value >= 0 && value <= UINT8_MAX) {
        pickle_op(pickle, "K");
        bytes_add_number(pickle, (uint64_t)value, 1);
    } else if (value >= 0 && value <= UINT16_MAX) {
        pickle_op(pickle, "M");
        bytes_add_number(pickle, (uint64_t)value, 2);
    } else if (value >= INT32_MIN && value <= INT32_MAX) {
        pickle_op(pickle, "J");
        bytes_add_number(pickle, (uint64_t)value, 4);
    } else {
        pickle_op(pickle, "\x8a\x08");
        bytes_add_number(pickle, (uint64_t)value, 8);
    }
}

static void add_global(struct bytes *pickle, const char *module, const char *name, bool by_stack) {
    char lines[128];
    if (by_stack) {
        pickle_add_text(pickle, module);
        pickle_op(pickle, "\x8c");
        bytes_add_number(pickle, strlen(name), 1);
        pickle_op(pickle, name);
        pickle_op(pickle, "\x93");
        return;
    }
    (void)snprintf(lines, sizeof(lines), "c%s\n%s\n", module, name);
    pickle_op(pickle, lines);
}

static void add_sizes(struct bytes *pickle, const int64_t *sizes, unsigned count) {
    static const char *const close[] = {")", "\x85", "\x86", "\x87"};
    if (count > 3)
        pickle_op(pickle, "(");
    for (unsigned i = 0; i < count; i++)
        pickle_add_int(pickle, sizes[i]);
    pickle_op(pickle, count > 3 ? "t" : close[count]);
}

void pickle_add_tensor(struct bytes *pickle, const struct archive_tensor *tensor, bool by_stack) {
    add_global(pickle, "torch._utils", "_rebuild_tensor_v2", by_stack);
    pickle_op(pickle, "((");
    pickle_add_text(pickle, "storage");
    add_global(pickle, "torch", tensor->storage, by_stack);
    pickle_add_text(pickle, tensor->key);
    pickle_add_text(pickle, "cpu");
    pickle_add_int(pickle, tensor->elements);
    pickle_op(pickle, "tQ");
    pickle_add_int(pickle, tensor->offset);
    add_sizes(pickle, tensor->shape, tensor->dims);
    add_sizes(pickle, tensor->stride, tensor->dims);
    pickle_op(pickle, "\x89");
    add_global(pickle, "collections", "OrderedDict", by_stack);
    pickle_op(pickle, ")RtR");
}

/* --- files of rotations --------------------------------------------------------------------------------------------- */

static void add_element(struct bytes *bytes, const char *storage, float value) {
    double wide = value;
    if (strcmp(storage, "DoubleStorage") == 0)
        bytes_add(bytes, &wide, sizeof(wide));
    else if (strcmp(storage, "HalfStorage") == 0)
        bytes_add_number(bytes, oscar_half_from_float(value), 2);
    else if (strcmp(storage, "BFloat16Storage") == 0)
        bytes_add_number(bytes, oscar_bfloat_from_float(value), 2);
    else
        bytes_add(bytes, &value, sizeof(value));
}

static void add_matrices(struct bytes *bytes, const struct rotation_file *file, const char *storage, unsigned layer) {
    const unsigned d = file->d, heads = file->heads > 0 ? file->heads : 1;
    for (unsigned h = 0; h < heads; h++) {
        const float *matrix = file->rotations + ((size_t)layer * heads + h) * d * d;
        for (unsigned i = 0; i < d; i++)
            for (unsigned j = 0; j < d; j++)
                add_element(bytes, storage, file->transposed ? matrix[(size_t)j * d + i] : matrix[(size_t)i * d + j]);
    }
}

static void add_layer(struct bytes *pickle, const struct rotation_file *file, const char *storage, unsigned layer) {
    const int64_t d = file->d, heads = file->heads > 0 ? file->heads : 1, elements = heads * d * d;
    char number[16];
    (void)snprintf(number, sizeof(number), "%u", layer);
    struct archive_tensor tensor = {.storage = storage,
                                    .key = file->shared ? "0" : number,
                                    .elements = file->shared ? file->layers * elements : elements,
                                    .offset = file->shared ? layer * elements : 0,
                                    .dims = file->heads > 0 ? 3 : 2};
    int64_t *shape = tensor.shape, *stride = tensor.stride;
    if (file->heads > 0) {
        *shape++ = heads;
        *stride++ = d * d;
    }
    shape[0] = shape[1] = d;
    stride[0] = file->transposed ? 1 : d;
    stride[1] = file->transposed ? d : 1;
    if (file->text_keys)
        pickle_add_text(pickle, number);
    else
        pickle_add_int(pickle, layer);
    pickle_op(pickle, "}(");
    pickle_add_text(pickle, "layer_id");
    pickle_add_int(pickle, layer);
    pickle_add_text(pickle, "rotation");
    pickle_add_tensor(pickle, &tensor, file->protocol_4);
    pickle_op(pickle, "u");
}

static void add_calibration(struct bytes *pickle, const struct rotation_file *file) {
    pickle_add_text(pickle, "calibration");
    pickle_op(pickle, "}(");
    pickle_add_text(pickle, "model_path");
    pickle_add_text(pickle, file->model);
    pickle_add_text(pickle, "global_kv_heads");
    pickle_add_int(pickle, file->kv_heads);
    pickle_add_text(pickle, "created_at_unix");
    pickle_op(pickle, "G");
    bytes_add(pickle, "\x3f\xf8\0\0\0\0\0\0", 8);
    pickle_add_text(pickle, "model_revision");
    pickle_op(pickle, "N");
    pickle_add_text(pickle, "post_rope");
    pickle_op(pickle, "\x88u");
}

static const char *storage_of(const struct rotation_file *file) {
    return file->storage != NULL ? file->storage : "FloatStorage";
}

void rotation_file_pickle(const struct rotation_file *file, struct bytes *pickle) {
    bytes_add(pickle, file->protocol_4 ? "\x80\x04" : "\x80\x02", 2);
    if (file->protocol_4) {
        pickle_op(pickle, "\x95");
        bytes_add_number(pickle, 1000, 8);
    }
    pickle_op(pickle, "}");
    bytes_add(pickle, file->protocol_4 ? "\x94" : "q\0", file->protocol_4 ? 1 : 2);
    pickle_op(pickle, "(");
    pickle_add_text(pickle, "format_version");
    pickle_add_int(pickle, file->heads > 0 ? 2 : 1);
    pickle_add_text(pickle, "objective");
    pickle_add_text(pickle, file->objective != NULL ? file->objective : "hadamard");
    if (file->model != NULL)
        add_calibration(pickle, file);
    pickle_add_text(pickle, "layers");
    pickle_op(pickle, "}(");
    for (unsigned layer = 0; layer < file->layers; layer++)
        add_layer(pickle, file, storage_of(file), layer);
    pickle_op(pickle, "uu.");
}

void rotation_file_write(const struct rotation_file *file, struct bytes *ret) {
    static struct archive archive;
    archive.wide = file->wide;
    rotation_file_pickle(file, archive_add(&archive, "some name/data.pkl"));
    bytes_add(archive_add(&archive, "some name/byteorder"), "little", 6);
    struct bytes *data = NULL;
    for (unsigned layer = 0; layer < file->layers; layer++) {
        char name[32];
        (void)snprintf(name, sizeof(name), "some name/data/%u", layer);
        if (data == NULL || !file->shared)
            data = archive_add(&archive, name);
        add_matrices(data, file, storage_of(file), layer);
    }
    archive_write(&archive, ret);
    archive_clear(&archive);
}
