/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes safetensors files: metadata and tensors are named one by one, then saved at once. The same calls give the same
 * bytes. What fails on the way (memory) is kept and reported by tensor_writer_save().
 */
#ifndef OSCAR_CALIB_TENSOR_WRITER_H
#define OSCAR_CALIB_TENSOR_WRITER_H

#include <stdint.h>

#include "proto/cause.h"
#include "proto/safetensors.h"

struct tensor_writer;

int tensor_writer_new(struct tensor_writer **ret, struct oscar_cause *cause);
void tensor_writer_free(struct tensor_writer *writer); /* NULL is fine */
void tensor_writer_cleanup(struct tensor_writer **writer);

__attribute__((format(printf, 3, 4))) void tensor_writer_metadata(struct tensor_writer *writer, const char *key,
                                                                  const char *format, ...);
/* `data` must live until the file is saved. A reader maps the file, so elements of 8 bytes come before those of 4. */
void tensor_writer_add(struct tensor_writer *writer, const char *name, enum oscar_tensor_type type, uint32_t dims,
                       const uint64_t *shape, const void *data);

/* The file appears under its name when it is complete and on the disk. OSCAR_ERR_IO, OSCAR_ERR_NO_MEMORY. */
int tensor_writer_save(struct tensor_writer *writer, const char *path, struct oscar_cause *cause);

#endif
