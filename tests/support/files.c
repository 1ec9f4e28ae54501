/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/files.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/cmocka_order.h"

uint8_t *file_read(const char *path, size_t *ret_size) {
    FILE *file = fopen(path, "re");
    assert_non_null(file);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    long size = ftell(file);
    assert_true(size >= 0);
    rewind(file);
    uint8_t *bytes = malloc((size_t)size + 1);
    assert_non_null(bytes);
    assert_int_equal(fread(bytes, 1, (size_t)size, file), (size_t)size);
    assert_int_equal(fclose(file), 0);
    bytes[size] = 0;
    *ret_size = (size_t)size;
    return bytes;
}

void file_write(const char *path, const void *bytes, size_t size) {
    FILE *file = fopen(path, "we");
    assert_non_null(file);
    if (size > 0)
        assert_int_equal(fwrite(bytes, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

void file_assert_same(const char *left, const char *right) {
    size_t sizes[2];
    uint8_t *a = file_read(left, &sizes[0]);
    uint8_t *b = file_read(right, &sizes[1]);
    assert_int_equal(sizes[0], sizes[1]);
    assert_memory_equal(a, b, sizes[0]);
    free(a);
    free(b);
}

uint8_t *exact_copy(const void *bytes, size_t size) {
    uint8_t *copy = malloc(size > 0 ? size : 1);
    assert_non_null(copy);
    if (size > 0)
        memcpy(copy, bytes, size);
    return copy;
}
