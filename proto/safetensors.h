/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A reader of safetensors files in memory: u64 little-endian header length, JSON header (parsed by jansson), data.
 * Every size and offset is bounds-checked, overlaps and holes are refused, nothing is copied: tensors point into the bytes.
 */
#ifndef OSCAR_PROTO_SAFETENSORS_H
#define OSCAR_PROTO_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "proto/cause.h"

#define OSCAR_SAFETENSORS_MAX_HEADER_BYTES (UINT64_C(4) << 20) /* 30,000 tensors; parsed it takes 20 times as much */
#define OSCAR_SAFETENSORS_MAX_DIMS 8U

enum oscar_tensor_type {
    OSCAR_TENSOR_U8,
    OSCAR_TENSOR_I32,
    OSCAR_TENSOR_I64,
    OSCAR_TENSOR_F16,
    OSCAR_TENSOR_BF16,
    OSCAR_TENSOR_F32,
    OSCAR_TENSOR_F64,
};

struct oscar_tensor_view {
    enum oscar_tensor_type type;
    uint32_t dims;
    uint64_t shape[OSCAR_SAFETENSORS_MAX_DIMS];
    uint64_t elements;
    uint64_t bytes;
    const void *data; /* into the file's bytes; aligned only as the file aligns it */
};

/* "F32"; and the bytes of one element. */
const char *oscar_tensor_type_name(enum oscar_tensor_type type);
uint32_t oscar_tensor_type_bytes(enum oscar_tensor_type type);

struct oscar_safetensors; /* opaque */

/* `bytes` must outlive the object. OSCAR_ERR_CORRUPT with the reason, OSCAR_ERR_NO_MEMORY. */
int oscar_safetensors_parse(const void *bytes, size_t size, struct oscar_safetensors **ret, struct oscar_cause *cause);
void oscar_safetensors_free(struct oscar_safetensors *file); /* NULL is fine */

/* Maps and parses a file read-only; the mapping is owned by the object. OSCAR_ERR_IO / OSCAR_ERR_NOT_FOUND / as parse. For tools:
 * who cuts the file meanwhile kills the reader (SIGBUS), so a daemon reads it into memory of its own and parses that. */
int oscar_safetensors_open(const char *path, struct oscar_safetensors **ret, struct oscar_cause *cause);

/* OSCAR_ERR_NOT_FOUND without a cause when there is no such tensor. */
int oscar_safetensors_find(const struct oscar_safetensors *file, const char *name, struct oscar_tensor_view *ret);
/* NULL when the key is absent. */
const char *oscar_safetensors_metadata(const struct oscar_safetensors *file, const char *key);
/* Tensors in file order, for tools: name NULL past the end. */
const char *oscar_safetensors_name(const struct oscar_safetensors *file, size_t index);

#endif
