/* SPDX-License-Identifier: Apache-2.0 */
/* Structs that grow at their end and begin with their size: how those of an older or a newer caller are read and written. */
#ifndef OSCAR_CLIENT_OPTIONS_H
#define OSCAR_CLIENT_OPTIONS_H

#include <stddef.h>

/* Reads the caller's struct into `ret` of `size` bytes: fields that an older caller does not have are zero. A size below
 * `required` is OSCAR_ERR_INVALID; a newer caller's fields that are in use are OSCAR_ERR_UNSUPPORTED. `what` names the struct. */
int oscar_options_read(const void *options, size_t required, size_t size, const char *what, void *ret);

/* Writes as much of `info` as the caller's struct holds, and zeros to what this library does not know; its `size` stays. */
int oscar_info_write(const void *info, size_t size, const char *what, void *ret);

#endif
