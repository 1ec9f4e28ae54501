/* SPDX-License-Identifier: Apache-2.0 */
/* Writes safetensors files in memory, right ones and wrong ones. */
#ifndef OSCAR_TESTS_PROTO_TENSOR_FILE_H
#define OSCAR_TESTS_PROTO_TENSOR_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "proto/safetensors.h"

/* A file of a header as given (padded with blanks to a multiple of 8) and `data`; malloced. */
uint8_t *tensor_file_raw(const char *header, const void *data, size_t data_bytes, size_t *ret_bytes);

#define TENSOR_FILE_MAX_ENTRIES 256

/* A file to be: tensors may be changed, dropped and added before it is written. */
struct tensor_file {
    struct {
        char name[96];
        enum oscar_tensor_type type;
        uint32_t dims;
        uint64_t shape[8];
        void *data;
        size_t bytes;
    } tensor[TENSOR_FILE_MAX_ENTRIES];
    struct {
        char key[64], value[64];
    } metadata[32];
    size_t tensors, keys;
    size_t misalign; /* blanks that the header has beyond the padding: all data is out of its alignment */
};

/* Zeroed data of the shape, to be filled in. */
void *tensor_file_add(struct tensor_file *file, const char *name, enum oscar_tensor_type type, uint32_t dims,
                      const uint64_t *shape);
void *tensor_file_data(struct tensor_file *file, const char *name);
void tensor_file_drop(struct tensor_file *file, const char *name);
/* Sets, or with NULL drops, a metadata key. */
void tensor_file_metadata(struct tensor_file *file, const char *key, const char *value);
uint8_t *tensor_file_write(const struct tensor_file *file, size_t *ret_bytes);
void tensor_file_clear(struct tensor_file *file);

#endif
