/* SPDX-License-Identifier: Apache-2.0 */
/* Writes what torch.save() writes, right and wrong: zip archives, pickles, and files of rotations. */
#ifndef OSCAR_TESTS_CALIB_ARCHIVE_H
#define OSCAR_TESTS_CALIB_ARCHIVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes that grow; `at` is malloced. */
struct bytes {
    uint8_t *at;
    size_t size, capacity;
};

void bytes_add(struct bytes *bytes, const void *more, size_t size);
void bytes_add_number(struct bytes *bytes, uint64_t value, unsigned width); /* little-endian */
void bytes_clear(struct bytes *bytes);

/* --- zip ---------------------------------------------------------------------------------------------------------- */

#define ARCHIVE_MAX_MEMBERS 16

struct archive {
    struct {
        char name[64];
        struct bytes data;
        uint16_t method;
        uint32_t crc_error; /* is xored in */
    } member[ARCHIVE_MAX_MEMBERS];
    size_t members;
    bool wide; /* zip64: sizes and offsets stand where those of 64 bits do */
};

/* A member, to be filled. */
struct bytes *archive_add(struct archive *archive, const char *name);
void archive_write(const struct archive *archive, struct bytes *ret);
void archive_clear(struct archive *archive);

/* --- pickles ------------------------------------------------------------------------------------------------------ */

void pickle_op(struct bytes *pickle, const char *opcodes); /* as they are */
void pickle_add_text(struct bytes *pickle, const char *text);
void pickle_add_int(struct bytes *pickle, int64_t value);

struct archive_tensor {
    const char *storage; /* "FloatStorage" */
    const char *key;
    int64_t elements, offset;
    unsigned dims;
    int64_t shape[4], stride[4];
};

/* The call that makes a tensor; `by_stack`: its names are pushed first, as in protocol 4. */
void pickle_add_tensor(struct bytes *pickle, const struct archive_tensor *tensor, bool by_stack);

/* --- files of rotations --------------------------------------------------------------------------------------------- */

/* How one is written. Zeros are the plain form: format 1, floats, layers by number, each with a storage of its own. */
struct rotation_file {
    unsigned layers, d;
    unsigned heads;         /* 0: format 1 */
    const float *rotations; /* [layers][heads][d][d] */
    const char *objective;
    const char *model;   /* NULL: none is told, nor the KV heads */
    int kv_heads;        /* told beside the model */
    const char *storage; /* NULL: FloatStorage */
    bool text_keys;      /* layers by text */
    bool transposed;     /* the storage holds columns, and strides say so */
    bool shared;         /* all layers are views into one storage */
    bool protocol_4, wide;
};

void rotation_file_write(const struct rotation_file *file, struct bytes *ret);
/* Its pickle alone, added to `pickle`. */
void rotation_file_pickle(const struct rotation_file *file, struct bytes *pickle);

#endif
