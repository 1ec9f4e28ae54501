/* SPDX-License-Identifier: Apache-2.0 */
/* Pickles and the archives they come in: what torch.save() writes is read, what calls anything is refused, nothing crashes. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "calib/pickle.h"
#include "calib/torch_file.h"
#include "calib/zip.h"
#include "calib_archive.h"
#include "proto_random.h"
#include "proto_test.h"
#include "tests/support/files.h"

static struct oscar_cause cause;

static int parse(const void *bytes, size_t size) {
    struct pickle *pickle = NULL;
    uint8_t *copy = exact_copy(bytes, size);
    cause.text[0] = '\0';
    int r = pickle_parse(copy, size, &pickle, &cause);
    assert_true((r == 0) == (pickle != NULL));
    pickle_free(pickle);
    free(copy);
    return r;
}

static int parse_file(const void *bytes, size_t size) {
    struct torch_file *file = NULL;
    uint8_t *copy = exact_copy(bytes, size);
    cause.text[0] = '\0';
    int r = torch_file_parse(copy, size, &file, &cause);
    torch_file_free(file);
    free(copy);
    return r;
}

static void assert_reason(const char *reason) {
    if (strstr(cause.text, reason) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", cause.text, reason);
}

/* --- pickles ------------------------------------------------------------------------------------------------------ */

static void values_of_every_kind_are_read(void **state) {
    (void)state;
    static const char bytes[] = "\x80\x02}q\0(X\3\0\0\0intJ\xfd\xff\xff\xff"
                                "X\4\0\0\0long\x8a\6\0\x10\xa5\xd4\xe8\0"
                                "X\3\0\0\0neg\x8a\1\xff"
                                "X\5\0\0\0floatG\x3f\xf8\0\0\0\0\0\0"
                                "X\4\0\0\0trueq\1\x88"
                                "X\4\0\0\0noneN"
                                "X\4\0\0\0list](K\1M\1\2e"
                                "\x8c\5tuple(K\1K\2K\3K\4t"
                                "X\4\0\0\0selfh\0"
                                "X\3\0\0\0intK\7"
                                "u.";
    struct pickle *pickle = NULL;
    assert_int_equal(pickle_parse(bytes, sizeof(bytes) - 1, &pickle, &cause), OSCAR_OK);
    const struct pickle_value *root = pickle_root(pickle);
    assert_int_equal(root->kind, PICKLE_DICT);
    assert_int_equal(pickle_get(root, "int")->integer, 7); /* the later of two */
    assert_int_equal(pickle_get(root, "long")->integer, 1000000000000);
    assert_int_equal(pickle_get(root, "neg")->integer, -1);
    assert_true(pickle_get(root, "float")->number == 1.5);
    assert_true(pickle_get(root, "true")->kind == PICKLE_BOOL && pickle_get(root, "true")->integer == 1);
    assert_int_equal(pickle_get(root, "none")->kind, PICKLE_NONE);
    const struct pickle_value *list = pickle_get(root, "list"), *tuple = pickle_get(root, "tuple");
    assert_true(list->kind == PICKLE_LIST && list->items.count == 2 && list->items.at[1]->integer == 513);
    assert_true(tuple->kind == PICKLE_TUPLE && tuple->items.count == 4 && tuple->items.at[3]->integer == 4);
    assert_ptr_equal(pickle_get(root, "self"), root);
    assert_null(pickle_get(root, "absent"));
    assert_null(pickle_get(list, "int"));
    assert_null(pickle_get(NULL, "int"));
    pickle_free(pickle);
    pickle_free(NULL);
}

static void a_pickle_that_calls_something_is_refused_by_its_name(void **state) {
    (void)state;
#define CALL(bytes, reason)                                                                                            \
    { bytes, sizeof(bytes) - 1, reason }
    static const struct {
        const char *bytes;
        size_t size;
        const char *reason;
    } calls[] = {
        CALL("\x80\2cos\nsystem\nX\2\0\0\0ls\x85R.", "pickle byte 2: calls os.system: refused"),
        CALL("\x80\4\x8c\5posix\x8c\6system\x93\x8c\2ls\x85R.", "pickle byte 17: calls posix.system: refused"),
        CALL("\x80\2c__builtin__\neval\n.", "calls __builtin__.eval: refused"),
        CALL("\x80\2ctorch._utils\n_rebuild_parameter\n.", "calls torch._utils._rebuild_parameter: refused"),
        CALL("\x80\2ctorch\nload\n.", "calls torch.load: refused"),
        CALL("\x80\2ccollections\nOrderedDict.update\n.", "calls collections.OrderedDict.update: refused"),
        CALL("\x80\2ccollections\nOrderedDict\n]\x85R.", "calls collections.OrderedDict with 1 arguments: refused"),
        CALL("\x80\2ctorch\nFloatStorage\n)R.", "calls torch.FloatStorage with 0 arguments: refused"),
        CALL("\x80\2ccollections\nOrderedDict\n)R}b.", "opcode BUILD: refused"),
        CALL("\x80\2ccollections\nOrderedDict\n)\x81.", "opcode NEWOBJ: refused"),
        CALL("\x80\4ccollections\nOrderedDict\n)}\x92.", "opcode NEWOBJ_EX: refused"),
        CALL("(X\2\0\0\0lsios\nsystem\n.", "opcode INST: refused"),
        CALL("(cos\nsystem\no.", "calls os.system: refused"),
        CALL("(ccollections\nOrderedDict\no.", "opcode OBJ: refused"),
        CALL("\x80\2\x82\1.", "opcode EXT1: refused"),
        CALL("\x80\2\xfe.", "opcode 0xfe: refused"),
        CALL("\x80\6N.", "protocol 6"),
        CALL("\x80\2\x8a\x09zzzzzzzzz.", "an integer of 9 bytes"),
        CALL("cos\x1b[31m\nsystem\n.", "calls os?[31m.system: refused"),
    };
    for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
        assert_int_equal(parse(calls[i].bytes, calls[i].size), OSCAR_ERR_UNSUPPORTED);
        assert_reason(calls[i].reason);
    }
}

static void a_wrong_pickle_is_refused_with_its_place(void **state) {
    (void)state;
    static const struct {
        const char *bytes;
        size_t size;
        const char *reason;
    } wrong[] = {
        CALL("", "pickle byte 0: cut"),
        CALL(".", "pickle byte 0: nothing on the stack"),
        CALL("N", "pickle byte 1: cut"),
        CALL("NN.", "something left over"),
        CALL("N.N", "something left over"),
        CALL("(N.", "something left over"),
        CALL("(.", "nothing on the stack"),
        CALL("Nt.", "no mark on the stack"),
        CALL("e.", "no mark on the stack"),
        CALL("N(Ne.", "no list to add to"),
        CALL("](NNu.", "no dict to add to"),
        CALL("}(NNe.", "no list to add to"),
        CALL("}(Nu.", "a key without a value"),
        CALL("}Ns.", "no dict to add to"),
        CALL("}(Ns.", "nothing on the stack"),
        CALL("}N(s.", "nothing on the stack"),
        CALL("(e.", "no list to add to"),
        CALL("N\x86.", "nothing on the stack"),
        CALL("(N\x86.", "nothing on the stack"),
        CALL("(q\0.", "nothing on the stack"),
        CALL("h\0.", "memory 0 was never set"),
        CALL("Nq\2h\1.", "memory 1 was never set"),
        CALL("Nr\xff\xff\xff\xff.", "memory 4294967295 in a pickle of 7 bytes"),
        CALL("X\xff\xff\xff\xffzz.", "4294967295 bytes wanted, 3 left"),
        CALL("cos", "cut in a name"),
        CALL("NQ.", "no storage of PyTorch"),
        CALL("(NNNNNtQ.", "no storage of PyTorch"),
        CALL("NNR.", "a call of what cannot be called"),
        CALL("ccollections\nOrderedDict\n]R.", "a call of what cannot be called"),
        CALL("ctorch._utils\n_rebuild_tensor_v2\n)R.", "a tensor of 0 arguments"),
        CALL("ctorch._utils\n_rebuild_tensor_v2\n(NNNNNNtR.", "a tensor without a storage"),
        CALL("NN\x93.", "a name that is no text"),
    };
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        assert_int_equal(parse(wrong[i].bytes, wrong[i].size), OSCAR_ERR_CORRUPT);
        assert_reason(wrong[i].reason);
    }
}

static struct archive_tensor good_tensor(void) {
    return (struct archive_tensor){
        .storage = "FloatStorage", .key = "0", .elements = 24, .dims = 2, .shape = {4, 6}, .stride = {6, 1}};
}

static int parse_tensor(const struct archive_tensor *tensor) {
    struct bytes bytes = {0};
    pickle_add_tensor(&bytes, tensor, false);
    pickle_op(&bytes, ".");
    int r = parse(bytes.at, bytes.size);
    bytes_clear(&bytes);
    return r;
}

static void a_tensor_that_reaches_over_its_storage_is_refused(void **state) {
    (void)state;
    const int64_t most = INT64_MAX, huge = 1000000000000000000;
    const struct {
        int64_t elements, offset, shape[2], stride[2];
        int expected;
    } cases[] = {
        {24, 0, {4, 6}, {6, 1}, OSCAR_OK},
        {24, 0, {6, 4}, {1, 6}, OSCAR_OK},
        {23, 0, {4, 6}, {6, 1}, OSCAR_ERR_CORRUPT},
        {24, 1, {4, 6}, {6, 1}, OSCAR_ERR_CORRUPT},
        {24, 0, {5, 6}, {6, 1}, OSCAR_ERR_CORRUPT},
        {24, 0, {4, 6}, {7, 1}, OSCAR_ERR_CORRUPT},
        {24, 0, {4, 6}, {-6, 1}, OSCAR_ERR_CORRUPT},
        {24, 0, {-4, 6}, {6, 1}, OSCAR_ERR_CORRUPT},
        {24, -1, {4, 6}, {6, 1}, OSCAR_ERR_CORRUPT},
        {-24, 0, {4, 6}, {6, 1}, OSCAR_ERR_CORRUPT},
        {24, most, {4, 6}, {6, 1}, OSCAR_ERR_CORRUPT},
        {24, 0, {most, most}, {most, most}, OSCAR_ERR_CORRUPT},
        {24, 0, {3, 2}, {most, 1}, OSCAR_ERR_CORRUPT},
        {24, 0, {huge, 6}, {6, 1}, OSCAR_ERR_CORRUPT},
        {24, most, {0, 6}, {6, 1}, OSCAR_OK},     /* it has no elements */
        {24, 23, {huge, huge}, {0, 0}, OSCAR_OK}, /* all of them are one */
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct archive_tensor tensor = good_tensor();
        tensor.elements = cases[i].elements;
        tensor.offset = cases[i].offset;
        memcpy(tensor.shape, cases[i].shape, sizeof(cases[i].shape));
        memcpy(tensor.stride, cases[i].stride, sizeof(cases[i].stride));
        int r = parse_tensor(&tensor);
        if (r != cases[i].expected)
            fail_msg("case %zu: %d: %s", i, r, cause.text);
    }
}

static void a_pickle_cut_at_any_byte_is_refused(void **state) {
    (void)state;
    struct bytes bytes = {0};
    struct archive_tensor tensor = good_tensor();
    pickle_op(&bytes, "\x80\2}(");
    pickle_add_text(&bytes, "tensor");
    pickle_add_tensor(&bytes, &tensor, true);
    pickle_add_int(&bytes, 1000000000000000000);
    pickle_add_tensor(&bytes, &tensor, false);
    pickle_op(&bytes, "u.");
    assert_int_equal(parse(bytes.at, bytes.size), OSCAR_OK);
    for (size_t cut = 0; cut < bytes.size; cut++)
        assert_int_equal(parse(bytes.at, cut), OSCAR_ERR_CORRUPT);
    bytes_clear(&bytes);
}

/* What costs a reader by recursion its stack, or one that trusts its input its memory. */
static void deep_and_large_pickles_do_no_harm(void **state) {
    (void)state;
    const size_t depth = 1000000;
    static const struct {
        const char *open, *close;
        int expected;
    } cases[] = {
        {"]", "a", OSCAR_OK},  {"(", "t", OSCAR_OK}, {"(", "", OSCAR_ERR_CORRUPT}, {"N", "\x86", OSCAR_ERR_CORRUPT},
        {"](", "e", OSCAR_OK},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct bytes bytes = {0};
        for (size_t n = 0; n < depth; n++)
            pickle_op(&bytes, cases[i].open);
        for (size_t n = strcmp(cases[i].open, "]") == 0 ? 1 : 0; n < depth; n++)
            pickle_op(&bytes, cases[i].close);
        pickle_op(&bytes, ".");
        assert_int_equal(parse(bytes.at, bytes.size), cases[i].expected);
        bytes_clear(&bytes);
    }
    uint8_t *bytes = calloc(PICKLE_MAX_BYTES + 1, 1);
    assert_non_null(bytes);
    assert_int_equal(parse(bytes, PICKLE_MAX_BYTES + 1), OSCAR_ERR_UNSUPPORTED);
    free(bytes);
}

/* --- archives ----------------------------------------------------------------------------------------------------- */

static void make_file(struct bytes *ret, bool wide) {
    float rotations[3 * 16];
    for (unsigned i = 0; i < 3 * 16; i++)
        rotations[i] = (float)i;
    rotation_file_write(&(struct rotation_file){.layers = 3, .d = 4, .rotations = rotations, .wide = wide}, ret);
}

static void a_file_cut_at_any_byte_is_refused(void **state) {
    (void)state;
    for (int wide = 0; wide < 2; wide++) {
        struct bytes file;
        make_file(&file, wide != 0);
        assert_int_equal(parse_file(file.at, file.size), OSCAR_OK);
        for (size_t cut = 0; cut < file.size; cut++)
            assert_int_equal(parse_file(file.at, cut), OSCAR_ERR_CORRUPT);
        bytes_clear(&file);
    }
}

static void a_damaged_file_is_refused_or_legal(void **state) {
    (void)state;
    for (int round = 0; round < 20000; round++) {
        struct bytes file;
        make_file(&file, round % 2 != 0);
        int r = parse_file(file.at, random_damage(file.at, file.size, file.size));
        if (r != OSCAR_OK && r != OSCAR_ERR_CORRUPT && r != OSCAR_ERR_UNSUPPORTED)
            fail_msg("%d: %s", r, cause.text);
        bytes_clear(&file);
    }
}

/* The same for pickles, whose CRC a damaged file would not pass. */
static void a_damaged_pickle_is_refused_or_legal(void **state) {
    (void)state;
    for (int round = 0; round < 100000; round++) {
        struct bytes bytes = {0};
        struct archive_tensor tensor = good_tensor();
        pickle_op(&bytes, "\x80\2}(");
        pickle_add_text(&bytes, "t");
        pickle_add_tensor(&bytes, &tensor, round % 2 != 0);
        pickle_op(&bytes, "]q\1(K\1K\2eh\1u.");
        int r = parse(bytes.at, random_damage(bytes.at, bytes.size, bytes.size));
        if (r != OSCAR_OK && r != OSCAR_ERR_CORRUPT && r != OSCAR_ERR_UNSUPPORTED)
            fail_msg("%d: %s", r, cause.text);
        bytes_clear(&bytes);
    }
}

static int parse_archive(struct archive *archive) {
    struct bytes file;
    archive_write(archive, &file);
    archive_clear(archive);
    int r = parse_file(file.at, file.size);
    bytes_clear(&file);
    return r;
}

static void what_an_archive_must_not_be(void **state) {
    (void)state;
    struct archive archive = {0};
    bytes_add(archive_add(&archive, "x/data.pkl"), "N.", 2);
    assert_int_equal(parse_archive(&archive), OSCAR_OK);

    bytes_add(archive_add(&archive, "x/data.pickle"), "N.", 2);
    assert_int_equal(parse_archive(&archive), OSCAR_ERR_CORRUPT);
    assert_reason("without data.pkl");

    bytes_add(archive_add(&archive, "x/data.pkl"), "N.", 2);
    archive.member[0].method = 8;
    assert_int_equal(parse_archive(&archive), OSCAR_ERR_UNSUPPORTED);
    assert_reason("x/data.pkl is compressed");

    bytes_add(archive_add(&archive, "x/data.pkl"), "N.", 2);
    archive.member[0].crc_error = 1;
    assert_int_equal(parse_archive(&archive), OSCAR_ERR_CORRUPT);
    assert_reason("CRC-32");

    bytes_add(archive_add(&archive, "x/data.pkl"), "N.", 2);
    bytes_add(archive_add(&archive, "x/data.pkl"), "}.", 2);
    assert_int_equal(parse_archive(&archive), OSCAR_ERR_CORRUPT);
    assert_reason("x/data.pkl occurs twice");

    bytes_add(archive_add(&archive, "x/data.pkl"), "N.", 2);
    bytes_add(archive_add(&archive, "x/byteorder"), "big", 3);
    assert_int_equal(parse_archive(&archive), OSCAR_ERR_UNSUPPORTED);
    assert_reason("little-endian");

    assert_int_equal(parse_file("\x80\2\x8a\nl\xfc\x9c\x46\xf9 j\xa8P\x19.", 14), OSCAR_ERR_CORRUPT);
    assert_reason("PyTorch 1.6");
}

/* A directory's sizes and offsets, each in turn of 10^18 and the like. */
static void sizes_that_no_file_has_are_refused(void **state) {
    (void)state;
    static const uint64_t huge[] = {1000000000000000000, UINT64_MAX, UINT64_MAX - 21, UINT64_C(1) << 63, 4096};
    struct bytes file;
    struct archive archive = {.wide = true};
    bytes_add(archive_add(&archive, "x/data.pkl"), "N.", 2);
    archive_write(&archive, &file);
    archive_clear(&archive);
    const size_t end64 = file.size - 22 - 20 - 56, extra = end64 - 24;
    const size_t at[] = {extra, extra + 8, extra + 16, end64 + 32, end64 + 40, end64 + 48, file.size - 22 - 12};
    assert_int_equal(parse_file(file.at, file.size), OSCAR_OK);
    for (size_t i = 0; i < sizeof(at) / sizeof(at[0]); i++)
        for (size_t j = 0; j < sizeof(huge) / sizeof(huge[0]); j++) {
            uint64_t kept;
            memcpy(&kept, file.at + at[i], sizeof(kept));
            memcpy(file.at + at[i], &huge[j], sizeof(kept));
            assert_int_equal(parse_file(file.at, file.size), OSCAR_ERR_CORRUPT);
            memcpy(file.at + at[i], &kept, sizeof(kept));
        }
    bytes_clear(&file);
}

/* --- tensors ------------------------------------------------------------------------------------------------------ */

static int read_tensor(const struct archive_tensor *tensor, const void *data, size_t size, float *ret,
                       uint64_t elements) {
    struct archive archive = {0};
    struct bytes bytes;
    struct torch_file *file = NULL;
    struct bytes *pickle = archive_add(&archive, "x/data.pkl");
    pickle_add_tensor(pickle, tensor, false);
    pickle_op(pickle, ".");
    bytes_add(archive_add(&archive, "x/data/0"), data, size);
    archive_write(&archive, &bytes);
    archive_clear(&archive);
    assert_int_equal(torch_file_parse(bytes.at, bytes.size, &file, &cause), OSCAR_OK);
    assert_int_equal(torch_file_root(file)->kind, PICKLE_TENSOR);
    int r = torch_file_read(file, torch_file_root(file)->tensor, ret, elements, &cause);
    torch_file_free(file);
    bytes_clear(&bytes);
    return r;
}

static void tensors_are_read_through_their_strides(void **state) {
    (void)state;
    float data[24], read[24];
    for (unsigned i = 0; i < 24; i++)
        data[i] = (float)i + 0.5F;
    struct archive_tensor tensor = good_tensor();
    assert_int_equal(read_tensor(&tensor, data, sizeof(data), read, 24), OSCAR_OK);
    assert_memory_equal(read, data, sizeof(data));
    tensor = (struct archive_tensor){.storage = "FloatStorage",
                                     .key = "0",
                                     .elements = 24,
                                     .offset = 1,
                                     .dims = 4,
                                     .shape = {2, 3, 1, 2},
                                     .stride = {1, 7, 100, 2}};
    assert_int_equal(read_tensor(&tensor, data, sizeof(data), read, 12), OSCAR_OK);
    for (unsigned i = 0; i < 2; i++)
        for (unsigned j = 0; j < 3; j++)
            for (unsigned k = 0; k < 2; k++)
                assert_true(read[(i * 3 + j) * 2 + k] == data[1 + i + 7 * j + 2 * k]);
}

static void types_of_numbers_become_singles(void **state) {
    (void)state;
    static const double doubles[] = {1.0 + 0x1p-40, -0x1p-200};
    static const uint16_t halves[] = {0x3c01, 0x8001}, bfloats[] = {0x3f81, 0xc2f7};
    float read[2];
    struct archive_tensor tensor = {.key = "0", .elements = 2, .dims = 1, .shape = {2}, .stride = {1}};
    tensor.storage = "DoubleStorage";
    assert_int_equal(read_tensor(&tensor, doubles, sizeof(doubles), read, 2), OSCAR_OK);
    assert_true(read[0] == 1.0F && read[1] == 0.0F);
    tensor.storage = "HalfStorage";
    assert_int_equal(read_tensor(&tensor, halves, sizeof(halves), read, 2), OSCAR_OK);
    assert_true(read[0] == 1.0F + 0x1p-10F && read[1] == -0x1p-24F);
    tensor.storage = "BFloat16Storage";
    assert_int_equal(read_tensor(&tensor, bfloats, sizeof(bfloats), read, 2), OSCAR_OK);
    assert_true(read[0] == 1.0F + 0x1p-7F && read[1] == -123.5F);
    tensor.storage = "LongStorage";
    assert_int_equal(read_tensor(&tensor, doubles, sizeof(doubles), read, 2), OSCAR_ERR_UNSUPPORTED);
    assert_reason("I64: expected floats");
}

static void a_storage_must_be_there_with_all_its_elements(void **state) {
    (void)state;
    float data[24] = {0}, read[24];
    struct archive_tensor tensor = good_tensor();
    assert_int_equal(read_tensor(&tensor, data, sizeof(data) - 1, read, 24), OSCAR_ERR_CORRUPT);
    assert_reason("too few for 24 elements of F32");
    assert_int_equal(read_tensor(&tensor, data, sizeof(data), read, 23), OSCAR_ERR_INVALID);
    tensor.elements = 1000000000000000000;
    assert_int_equal(read_tensor(&tensor, data, sizeof(data), read, 24), OSCAR_ERR_CORRUPT);
    tensor.elements = INT64_MAX;
    assert_int_equal(read_tensor(&tensor, data, sizeof(data), read, 24), OSCAR_ERR_CORRUPT);
    tensor = good_tensor();
    tensor.key = "1";
    assert_int_equal(read_tensor(&tensor, data, sizeof(data), read, 24), OSCAR_ERR_NOT_FOUND);
    tensor.key = "../../../../../../../../../../../../../../../../../../../../../../../../etc/passwd";
    assert_int_equal(read_tensor(&tensor, data, sizeof(data), read, 24), OSCAR_ERR_CORRUPT);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_of_every_kind_are_read),
        cmocka_unit_test(a_pickle_that_calls_something_is_refused_by_its_name),
        cmocka_unit_test(a_wrong_pickle_is_refused_with_its_place),
        cmocka_unit_test(a_tensor_that_reaches_over_its_storage_is_refused),
        cmocka_unit_test(a_pickle_cut_at_any_byte_is_refused),
        cmocka_unit_test(deep_and_large_pickles_do_no_harm),
        cmocka_unit_test(a_damaged_pickle_is_refused_or_legal),
        cmocka_unit_test(a_file_cut_at_any_byte_is_refused),
        cmocka_unit_test(a_damaged_file_is_refused_or_legal),
        cmocka_unit_test(what_an_archive_must_not_be),
        cmocka_unit_test(sizes_that_no_file_has_are_refused),
        cmocka_unit_test(tensors_are_read_through_their_strides),
        cmocka_unit_test(types_of_numbers_become_singles),
        cmocka_unit_test(a_storage_must_be_there_with_all_its_elements),
    };
    random_seed();
    return cmocka_run_group_tests_name("calib_pickle", tests, NULL, NULL);
}
