/* SPDX-License-Identifier: Apache-2.0 */
#include "proto_tensor_file.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto_test.h"

static uint8_t *assemble(const char *header, size_t header_bytes, size_t padding, const void *data, size_t data_bytes,
                         size_t *ret_bytes) {
    uint8_t *file = malloc(8 + header_bytes + padding + data_bytes + 1);
    assert_non_null(file);
    for (unsigned i = 0; i < 8; i++)
        file[i] = (uint8_t)((header_bytes + padding) >> (8 * i));
    memcpy(file + 8, header, header_bytes);
    memset(file + 8 + header_bytes, ' ', padding);
    if (data_bytes != 0)
        memcpy(file + 8 + header_bytes + padding, data, data_bytes);
    *ret_bytes = 8 + header_bytes + padding + data_bytes;
    return file;
}

uint8_t *tensor_file_raw(const char *header, const void *data, size_t data_bytes, size_t *ret_bytes) {
    size_t bytes = strlen(header);
    return assemble(header, bytes, (8 - bytes % 8) % 8, data, data_bytes, ret_bytes);
}

void *tensor_file_add(struct tensor_file *file, const char *name, enum oscar_tensor_type type, uint32_t dims,
                      const uint64_t *shape) {
    size_t bytes = oscar_tensor_type_bytes(type), at = file->tensors++;
    assert_true(at < TENSOR_FILE_MAX_ENTRIES);
    (void)snprintf(file->tensor[at].name, sizeof(file->tensor[at].name), "%s", name);
    file->tensor[at].type = type;
    file->tensor[at].dims = dims;
    for (uint32_t i = 0; i < dims; i++) {
        file->tensor[at].shape[i] = shape[i];
        bytes *= shape[i];
    }
    file->tensor[at].bytes = bytes;
    file->tensor[at].data = calloc(bytes + 1, 1);
    assert_non_null(file->tensor[at].data);
    return file->tensor[at].data;
}

static size_t find(const struct tensor_file *file, const char *name) {
    for (size_t i = 0; i < file->tensors; i++) {
        if (strcmp(file->tensor[i].name, name) == 0)
            return i;
    }
    fail_msg("no tensor %s", name);
    return 0;
}

void *tensor_file_data(struct tensor_file *file, const char *name) { return file->tensor[find(file, name)].data; }

void tensor_file_drop(struct tensor_file *file, const char *name) {
    size_t at = find(file, name);
    free(file->tensor[at].data);
    file->tensors--;
    memmove(&file->tensor[at], &file->tensor[at + 1], (file->tensors - at) * sizeof(file->tensor[0]));
}

void tensor_file_metadata(struct tensor_file *file, const char *key, const char *value) {
    size_t at = 0;
    while (at < file->keys && strcmp(file->metadata[at].key, key) != 0)
        at++;
    if (value == NULL) {
        assert_true(at < file->keys);
        file->metadata[at] = file->metadata[--file->keys];
        return;
    }
    if (at == file->keys)
        file->keys++;
    (void)snprintf(file->metadata[at].key, sizeof(file->metadata[at].key), "%s", key);
    (void)snprintf(file->metadata[at].value, sizeof(file->metadata[at].value), "%s", value);
}

uint8_t *tensor_file_write(const struct tensor_file *file, size_t *ret_bytes) {
    char *header = NULL;
    size_t header_bytes = 0, data_bytes = 0;
    FILE *out = open_memstream(&header, &header_bytes);
    assert_non_null(out);
    (void)fprintf(out, "{\"__metadata__\":{");
    for (size_t i = 0; i < file->keys; i++)
        (void)fprintf(out, "%s\"%s\":\"%s\"", i == 0 ? "" : ",", file->metadata[i].key, file->metadata[i].value);
    (void)fprintf(out, "}");
    for (size_t i = 0; i < file->tensors; i++) {
        (void)fprintf(out, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", file->tensor[i].name,
                      oscar_tensor_type_name(file->tensor[i].type));
        for (uint32_t j = 0; j < file->tensor[i].dims; j++)
            (void)fprintf(out, "%s%" PRIu64, j == 0 ? "" : ",", file->tensor[i].shape[j]);
        (void)fprintf(out, "],\"data_offsets\":[%zu,%zu]}", data_bytes, data_bytes + file->tensor[i].bytes);
        data_bytes += file->tensor[i].bytes;
    }
    (void)fprintf(out, "}");
    (void)fclose(out);
    uint8_t *data = malloc(data_bytes + 1);
    assert_non_null(data);
    for (size_t i = 0, at = 0; i < file->tensors; i++) {
        memcpy(data + at, file->tensor[i].data, file->tensor[i].bytes);
        at += file->tensor[i].bytes;
    }
    size_t padding = (8 - header_bytes % 8) % 8 + file->misalign;
    uint8_t *result = assemble(header, header_bytes, padding, data, data_bytes, ret_bytes);
    free(data);
    free(header);
    return result;
}

void tensor_file_clear(struct tensor_file *file) {
    for (size_t i = 0; i < file->tensors; i++)
        free(file->tensor[i].data);
    memset(file, 0, sizeof(*file));
}
