/* SPDX-License-Identifier: Apache-2.0 */
/* Safetensors files: right ones are read in place, wrong ones are refused with a reason. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/safetensors.h"
#include "proto_random.h"
#include "proto_tensor_file.h"
#include "proto_test.h"
#include "tests/support/files.h"

static const uint8_t data[32] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};

static struct oscar_cause cause;

static int parse(const uint8_t *bytes, size_t size) {
    struct oscar_safetensors *file = NULL;
    uint8_t *copy = exact_copy(bytes, size);
    cause.text[0] = '\0';
    int r = oscar_safetensors_parse(copy, size, &file, &cause);
    if (r == OSCAR_OK)
        oscar_safetensors_free(file);
    else
        assert_null(file);
    free(copy);
    return r;
}

static int parse_header(const char *header, size_t data_bytes) {
    size_t size;
    uint8_t *bytes = tensor_file_raw(header, data, data_bytes, &size);
    int r = parse(bytes, size);
    free(bytes);
    return r;
}

static void a_file_is_read_in_place(void **state) {
    (void)state;
    static const char header[] = "{\"__metadata__\":{\"who\":\"me\"},"
                                 "\"b\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[8,16]},"
                                 "\"a\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[0,8]},"
                                 "\"none\":{\"dtype\":\"U8\",\"shape\":[3,0],\"data_offsets\":[8,8]}}";
    size_t size;
    uint8_t *bytes = tensor_file_raw(header, data, 16, &size);
    struct oscar_safetensors *file = NULL;
    struct oscar_tensor_view view;
    assert_int_equal(oscar_safetensors_parse(bytes, size, &file, NULL), OSCAR_OK);
    assert_string_equal(oscar_safetensors_metadata(file, "who"), "me");
    assert_null(oscar_safetensors_metadata(file, "what"));
    assert_int_equal(oscar_safetensors_find(file, "b", &view), OSCAR_OK);
    assert_int_equal(view.type, OSCAR_TENSOR_F32);
    assert_int_equal(view.dims, 2);
    assert_true(view.shape[0] == 2 && view.shape[1] == 1 && view.elements == 2 && view.bytes == 8);
    assert_ptr_equal(view.data, bytes + size - 8);
    assert_int_equal(oscar_safetensors_find(file, "a", &view), OSCAR_OK);
    assert_true(view.dims == 0 && view.elements == 1 && view.bytes == 8);
    assert_int_equal(oscar_safetensors_find(file, "none", &view), OSCAR_OK);
    assert_true(view.elements == 0 && view.bytes == 0);
    assert_int_equal(oscar_safetensors_find(file, "__metadata__", &view), OSCAR_ERR_NOT_FOUND);
    assert_int_equal(oscar_safetensors_find(file, "", &view), OSCAR_ERR_NOT_FOUND);
    /* In the order of their data. */
    assert_string_equal(oscar_safetensors_name(file, 0), "a");
    assert_string_equal(oscar_safetensors_name(file, 1), "none");
    assert_string_equal(oscar_safetensors_name(file, 2), "b");
    assert_null(oscar_safetensors_name(file, 3));
    oscar_safetensors_free(file);
    free(bytes);
}

static void a_file_without_tensors_or_metadata_is_fine(void **state) {
    (void)state;
    struct oscar_safetensors *file = NULL;
    assert_int_equal(parse_header("{}", 0), OSCAR_OK);
    size_t size;
    uint8_t *bytes = tensor_file_raw("{}", NULL, 0, &size);
    assert_int_equal(oscar_safetensors_parse(bytes, size, &file, NULL), OSCAR_OK);
    assert_null(oscar_safetensors_metadata(file, "x"));
    assert_null(oscar_safetensors_name(file, 0));
    oscar_safetensors_free(file);
    oscar_safetensors_free(NULL);
    free(bytes);
}

#define TENSOR(name, type, shape, offsets)                                                                             \
    "\"" name "\":{\"dtype\":\"" type "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

static void wrong_headers_are_refused_with_their_reason(void **state) {
    (void)state;
    static const struct {
        const char *header;
        size_t data_bytes;
        const char *reason;
    } wrong[] = {
        {"", 0, "brace"},
        {"[]", 0, "brace"},
        {" {}", 0, "brace"},
        {"{", 0, "header byte"},
        {"{}x", 0, "header byte"},
        {"{\"a\":1}", 0, "not an object"},
        {"{\"\xff\":1}", 0, "header byte"},
        {"{\"a\\u0000b\":1}", 0, "header byte"},
        {"{" TENSOR("a", "U8", "[4]", "[0,4]") "}", 3, "ends at byte 4 of 3"},
        {"{" TENSOR("a", "U8", "[4]", "[0,4]") "}", 5, "belong to no tensor"},
        {"{" TENSOR("a", "U8", "[4]", "[1,5]") "}", 5, "belong to none"},
        {"{" TENSOR("a", "U8", "[4]", "[0,3]") "}", 3, "needs 4"},
        {"{" TENSOR("a", "U8", "[4]", "[4,0]") "}", 4, "not a range"},
        {"{" TENSOR("a", "U8", "[4]", "[-4,0]") "}", 4, "not a range"},
        {"{" TENSOR("a", "U8", "[4]", "[0,4,5]") "}", 4, "not a range"},
        {"{" TENSOR("a", "U8", "[4]", "[0]") "}", 4, "not a range"},
        {"{" TENSOR("a", "U8", "[4]", "4") "}", 4, "not a range"},
        {"{" TENSOR("a", "U8", "[4]", "[0,4.0]") "}", 4, "not a range"},
        {"{" TENSOR("a", "U8", "[4]", "[0,99999999999999999999]") "}", 4, "header byte"},
        {"{" TENSOR("a", "U8", "[9223372036854775807]", "[0,9223372036854775807]") "}", 4, "ends at byte"},
        {"{" TENSOR("a", "U8", "[4]", "[0,4]") "," TENSOR("b", "U8", "[4]", "[2,6]") "}", 6, "overlaps"},
        {"{" TENSOR("a", "U8", "[4]", "[0,4]") "," TENSOR("b", "U8", "[4]", "[0,4]") "}", 4, "overlaps"},
        {"{" TENSOR("a", "U8", "[4]", "[0,4]") "," TENSOR("b", "U8", "[4]", "[5,9]") "}", 9, "belong to none"},
        {"{" TENSOR("a", "U8", "[4]", "[0,4]") "," TENSOR("a", "U8", "[4]", "[4,8]") "}", 8, "duplicate"},
        {"{" TENSOR("a", "U8", "[0]", "[3,3]") "}", 0, "ends at byte"},
        {"{" TENSOR("a", "U8", "[2,-2]", "[0,4]") "}", 4, "not a count"},
        {"{" TENSOR("a", "U8", "[2,\"2\"]", "[0,4]") "}", 4, "not a count"},
        {"{" TENSOR("a", "U8", "4", "[0,4]") "}", 4, "not a list"},
        {"{" TENSOR("a", "U8", "[1,1,1,1,1,1,1,1,4]", "[0,4]") "}", 4, "not a list"},
        {"{" TENSOR("a", "U8", "[4294967296,4294967296]", "[0,0]") "}", 0, "overflows"},
        {"{" TENSOR("a", "F64", "[4611686018427387904]", "[0,0]") "}", 0, "overflows"},
        {"{" TENSOR("a", "F8_E4M3", "[4]", "[0,4]") "}", 4, "F8_E4M3"},
        {"{\"a\":{\"dtype\":7,\"shape\":[4],\"data_offsets\":[0,4]}}", 4, "dtype"},
        {"{\"a\":{\"shape\":[4],\"data_offsets\":[0,4]}}", 4, "dtype is missing"},
        {"{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,4]}}", 4, "shape is missing"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4]}}", 4, "data_offsets is missing"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4],\"x\":1}}", 4, "besides"},
        {"{\"__metadata__\":[]}", 0, "__metadata__"},
        {"{\"__metadata__\":{\"k\":1}}", 0, "metadata k"},
    };
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        assert_int_equal(parse_header(wrong[i].header, wrong[i].data_bytes), OSCAR_ERR_CORRUPT);
        if (strstr(cause.text, wrong[i].reason) == NULL)
            fail_msg("%s: \"%s\" does not say \"%s\"", wrong[i].header, cause.text, wrong[i].reason);
    }
}

static void header_lengths_are_checked(void **state) {
    (void)state;
    static const uint64_t lengths[] = {3,
                                       100,
                                       OSCAR_SAFETENSORS_MAX_HEADER_BYTES,
                                       OSCAR_SAFETENSORS_MAX_HEADER_BYTES + 1,
                                       UINT64_C(1000000000000000000),
                                       UINT64_MAX,
                                       UINT64_MAX - 7};
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        uint8_t bytes[10] = {[8] = '{', [9] = '}'};
        for (unsigned j = 0; j < 8; j++)
            bytes[j] = (uint8_t)(lengths[i] >> (8 * j));
        assert_int_equal(parse(bytes, sizeof(bytes)), OSCAR_ERR_CORRUPT);
    }
}

static void a_file_cut_at_any_byte_is_refused(void **state) {
    (void)state;
    size_t size;
    uint8_t *bytes = tensor_file_raw("{" TENSOR("a", "U8", "[4]", "[0,4]") "}", data, 4, &size);
    assert_int_equal(parse(bytes, size), OSCAR_OK);
    for (size_t cut = 0; cut < size; cut++)
        assert_int_equal(parse(bytes, cut), OSCAR_ERR_CORRUPT);
    free(bytes);
}

static void deep_nesting_is_refused_without_a_crash(void **state) {
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        const size_t depth = 200000;
        const char *open = kind == 0 ? "[" : "{\"a\":";
        char *header = malloc(depth * strlen(open) + 16);
        assert_non_null(header);
        strcpy(header, "{\"a\":");
        char *at = header + strlen(header);
        for (size_t i = 0; i < depth; i++)
            at = stpcpy(at, open);
        assert_int_equal(parse_header(header, 0), OSCAR_ERR_CORRUPT);
        assert_non_null(strstr(cause.text, "depth"));
        free(header);
    }
}

static void a_damaged_file_is_refused_or_legal(void **state) {
    (void)state;
    static const char header[] = "{\"__metadata__\":{\"k\":\"v\"}," TENSOR("a", "U8", "[4]", "[0,4]") "," TENSOR(
        "b", "F32", "[1,3]", "[4,16]") "}";
    for (int round = 0; round < 20000; round++) {
        size_t size;
        uint8_t *bytes = tensor_file_raw(header, data, 16, &size);
        int r = parse(bytes, random_damage(bytes, size, size));
        assert_true(r == OSCAR_OK || r == OSCAR_ERR_CORRUPT);
        free(bytes);
    }
}

static void a_file_on_disk_is_mapped(void **state) {
    (void)state;
    char directory[] = "/tmp/oscar-test-XXXXXX", path[64], fifo[64];
    struct oscar_safetensors *file = NULL;
    struct oscar_tensor_view view;
    size_t size;
    assert_non_null(mkdtemp(directory));
    (void)snprintf(path, sizeof(path), "%s/file", directory);
    (void)snprintf(fifo, sizeof(fifo), "%s/fifo", directory);
    assert_int_equal(oscar_safetensors_open(path, &file, &cause), OSCAR_ERR_NOT_FOUND);
    assert_int_equal(oscar_safetensors_open(directory, &file, &cause), OSCAR_ERR_IO);
    assert_int_equal(mkfifo(fifo, 0600), 0);
    assert_int_equal(oscar_safetensors_open(fifo, &file, &cause), OSCAR_ERR_IO);
    file_write(path, NULL, 0);
    assert_int_equal(oscar_safetensors_open(path, &file, &cause), OSCAR_ERR_CORRUPT);
    uint8_t *bytes = tensor_file_raw("{" TENSOR("a", "U8", "[4]", "[0,4]") "}", data, 4, &size);
    file_write(path, bytes, size);
    assert_int_equal(oscar_safetensors_open(path, &file, &cause), OSCAR_OK);
    assert_int_equal(oscar_safetensors_find(file, "a", &view), OSCAR_OK);
    assert_memory_equal(view.data, data, 4);
    oscar_safetensors_free(file);
    free(bytes);
    (void)unlink(path);
    (void)unlink(fifo);
    (void)rmdir(directory);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_file_is_read_in_place),
        cmocka_unit_test(a_file_without_tensors_or_metadata_is_fine),
        cmocka_unit_test(wrong_headers_are_refused_with_their_reason),
        cmocka_unit_test(header_lengths_are_checked),
        cmocka_unit_test(a_file_cut_at_any_byte_is_refused),
        cmocka_unit_test(deep_nesting_is_refused_without_a_crash),
        cmocka_unit_test(a_damaged_file_is_refused_or_legal),
        cmocka_unit_test(a_file_on_disk_is_mapped),
    };
    random_seed();
    return cmocka_run_group_tests_name("proto_safetensors", tests, NULL, NULL);
}
