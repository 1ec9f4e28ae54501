/* SPDX-License-Identifier: Apache-2.0 */
/* Whole files, and bytes whose end is watched. Whatever fails here fails the test. */
#ifndef OSCAR_TESTS_FILES_H
#define OSCAR_TESTS_FILES_H

#include <stddef.h>
#include <stdint.h>

/* Malloced, with a zero byte behind. */
uint8_t *file_read(const char *path, size_t *ret_size);
void file_write(const char *path, const void *bytes, size_t size);
void file_assert_same(const char *left, const char *right);

/* Malloced in exactly this size: a read past the end is seen by the address sanitizer. */
uint8_t *exact_copy(const void *bytes, size_t size);

#endif
