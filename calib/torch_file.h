/* SPDX-License-Identifier: Apache-2.0 */
/* A file of torch.save(): a zip archive of one pickle and the storages that its tensors are views into. Nothing in it is run. */
#ifndef OSCAR_CALIB_TORCH_FILE_H
#define OSCAR_CALIB_TORCH_FILE_H

#include "calib/pickle.h"
#include "proto/cause.h"

struct torch_file;

/* `bytes` must outlive the object. Errors as those of zip_read() and pickle_parse(). */
int torch_file_parse(const void *bytes, size_t size, struct torch_file **ret, struct oscar_cause *cause);
void torch_file_free(struct torch_file *file); /* NULL is fine */

const struct pickle_value *torch_file_root(const struct torch_file *file);

/* All elements of a tensor of floats, row-major, as binary32; `ret` has room for `elements`, which must be their number.
 * OSCAR_ERR_UNSUPPORTED (integers), OSCAR_ERR_CORRUPT (no storage of that size). */
int torch_file_read(struct torch_file *file, const struct pickle_tensor *tensor, float *ret, uint64_t elements,
                    struct oscar_cause *cause);

#endif
