/* SPDX-License-Identifier: Apache-2.0 */
/* Error codes, their texts, and causes. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "oscar/error.h"

#include "proto/cause.h"
#include "proto/text.h"
#include "proto_test.h"

static const struct {
    int value;
    const char *name;
} table[] = {
#define ROW(name, value, text, remedy) {value, #name},
    OSCAR_ERROR_TABLE(ROW)
#undef ROW
};
#define ROWS (sizeof(table) / sizeof(table[0]))

static void every_error_has_its_own_value_and_texts(void **state) {
    (void)state;
    for (size_t i = 0; i < ROWS; i++) {
        assert_true(table[i].value < 0);
        assert_string_equal(oscar_error_name(table[i].value), table[i].name);
        assert_true(strlen(oscar_error_text(table[i].value)) > 0);
        assert_true(strlen(oscar_error_remedy(table[i].value)) > 0);
        for (size_t j = 0; j < i; j++) {
            assert_int_not_equal(table[i].value, table[j].value);
            assert_string_not_equal(oscar_error_text(table[i].value), oscar_error_text(table[j].value));
        }
    }
}

static void values_have_no_gap(void **state) {
    (void)state;
    for (size_t i = 0; i < ROWS; i++)
        assert_int_equal(table[i].value, -(int)(i + 1));
}

static void a_value_outside_the_table_is_unknown(void **state) {
    (void)state;
    const int outside[] = {1, INT32_MAX, -(int)ROWS - 1, INT32_MIN, -1000};
    for (size_t i = 0; i < sizeof(outside) / sizeof(outside[0]); i++) {
        assert_string_equal(oscar_error_name(outside[i]), "UNKNOWN");
        assert_string_equal(oscar_error_text(outside[i]), "unknown error");
        assert_true(strlen(oscar_error_remedy(outside[i])) > 0);
    }
    assert_string_equal(oscar_error_name(OSCAR_OK), "OK");
}

static void a_cause_is_optional(void **state) {
    (void)state;
    assert_int_equal(oscar_fail(NULL, OSCAR_ERR_IO, "nobody reads %d", 1), OSCAR_ERR_IO);
}

static void a_cause_is_cut_to_fit(void **state) {
    (void)state;
    struct oscar_cause cause;
    assert_int_equal(oscar_fail(&cause, OSCAR_ERR_IO, "%0300d", 7), OSCAR_ERR_IO);
    assert_int_equal(strlen(cause.text), OSCAR_CAUSE_BYTES - 1);
}

static void a_cause_that_is_cut_inside_a_character_stays_utf8(void **state) {
    (void)state;
    struct oscar_cause cause;
    char text[300];
    for (size_t i = 0; i + 2 < sizeof(text); i += 2)
        memcpy(text + i, "é", 3);
    (void)oscar_fail(&cause, OSCAR_ERR_IO, "%s", text);
    assert_true(oscar_text_valid(cause.text, strlen(cause.text)));
}

static void a_cause_is_one_clean_line(void **state) {
    (void)state;
    struct oscar_cause cause;
    (void)oscar_fail(&cause, OSCAR_ERR_IO, "file %s",
                     "a\nb\x1b[31m\xff\xc0\xaf"
                     "c");
    assert_string_equal(cause.text, "file a?b?[31m???c");
}

static void a_cause_can_quote_errno_and_keeps_it(void **state) {
    (void)state;
    struct oscar_cause cause;
    errno = ENOENT;
    (void)oscar_fail(&cause, OSCAR_ERR_IO, "x: %m");
    assert_int_equal(errno, ENOENT);
    assert_string_equal(cause.text, "x: No such file or directory");
}

static void texts_are_utf8_without_control_characters(void **state) {
    (void)state;
    static const char *const good[] = {
        "", "plain", "équipe", "\xe2\x82\xac", "\xf0\x9f\x92\xa1", "\xc2\xa0", "\xf4\x8f\xbf\xbf", "\xed\x9f\xbf"};
    static const char *const bad[] = {"\t",
                                      "\x7f",
                                      "\x80",
                                      "\xc2",
                                      "\xc0\x80",
                                      "\xc1\xbf",
                                      "\xe0\x80\x80",
                                      "\xed\xa0\x80",
                                      "\xf0\x80\x80\x80",
                                      "\xf4\x90\x80\x80",
                                      "\xf5\x80\x80\x80",
                                      "\xe2\x82",
                                      "\xc2\x85",
                                      "a\xff"};
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++)
        assert_true(oscar_text_valid(good[i], strlen(good[i])));
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_false(oscar_text_valid(bad[i], strlen(bad[i])));
    assert_false(oscar_text_valid("a\0b", 3));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_error_has_its_own_value_and_texts),
        cmocka_unit_test(values_have_no_gap),
        cmocka_unit_test(a_value_outside_the_table_is_unknown),
        cmocka_unit_test(a_cause_is_optional),
        cmocka_unit_test(a_cause_is_cut_to_fit),
        cmocka_unit_test(a_cause_that_is_cut_inside_a_character_stays_utf8),
        cmocka_unit_test(a_cause_is_one_clean_line),
        cmocka_unit_test(a_cause_can_quote_errno_and_keeps_it),
        cmocka_unit_test(texts_are_utf8_without_control_characters),
    };
    return cmocka_run_group_tests_name("proto_error", tests, NULL, NULL);
}
