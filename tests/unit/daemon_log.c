/* SPDX-License-Identifier: Apache-2.0 */
/* The log: one clean line an event, and never a reason to stop. */
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/log.h"
#include "tests/support/cmocka_order.h"

static char path[] = "/tmp/oscard-log-XXXXXX";

static void open_log(enum log_level level, enum log_format format, const char *file) {
    struct oscar_cause cause = {0};
    if (log_open(level, format, file, &cause) < 0)
        fail_msg("%s", cause.text);
}

/* The lines written since the last call, and the file is empty again. */
static const char *written(void) {
    static char text[16384];
    FILE *file = fopen(path, "re");
    assert_non_null(file);
    text[fread(text, 1, sizeof(text) - 1, file)] = '\0';
    fclose(file);
    assert_int_equal(truncate(path, 0), 0);
    return text;
}

static void a_line_has_level_event_and_fields(void **state) {
    (void)state;
    open_log(LOG_LEVEL_INFO, LOG_FORMAT_TEXT, path);
    log_info("client connected", log_number("session", 7), log_text("name", "a"), log_number("delta", -3));
    const char *line = written();
    assert_non_null(strstr(line, "Z info client connected session=7 name=a delta=-3\n"));
    assert_int_equal(line[4], '-');
    log_warning("without fields");
    assert_non_null(strstr(written(), "Z warning without fields\n"));
    log_debug("not important enough");
    assert_string_equal(written(), "");
}

static void values_cannot_forge_lines_or_fields(void **state) {
    (void)state;
    open_log(LOG_LEVEL_DEBUG, LOG_FORMAT_TEXT, path);
    log_error("event", log_text("a", "x y=z"), log_text("b", "say \"no\" \\"), log_text("c", ""), log_text("d", NULL),
              log_text("e", "one\ntwo\033[2J\xff"));
    assert_non_null(strstr(written(), "event a=\"x y=z\" b=\"say \\\"no\\\" \\\\\" c=\"\" d=\"\" e=one?two?[2J?\n"));
}

static void json_lines_are_json(void **state) {
    (void)state;
    open_log(LOG_LEVEL_INFO, LOG_FORMAT_JSON, path);
    log_info("event", log_number("n", -5), log_text("text", "a \"b\"\n\xff"));
    json_error_t error;
    json_t *line = json_loads(written(), 0, &error);
    assert_non_null(line);
    assert_string_equal(json_string_value(json_object_get(line, "event")), "event");
    assert_string_equal(json_string_value(json_object_get(line, "level")), "info");
    assert_int_equal(json_integer_value(json_object_get(line, "n")), -5);
    assert_string_equal(json_string_value(json_object_get(line, "text")), "a \"b\"??");
    assert_non_null(json_object_get(line, "time"));
    json_decref(line);
}

static void a_long_line_is_cut_to_one_line(void **state) {
    (void)state;
    static char text[10000];
    memset(text, 'x', sizeof(text) - 1);
    for (enum log_format format = LOG_FORMAT_TEXT; format <= LOG_FORMAT_JSON; format++) {
        open_log(LOG_LEVEL_INFO, format, path);
        log_info("long", log_text("a", text), log_text("b", text), log_text("c", text));
        const char *line = written();
        size_t length = strlen(line);
        assert_in_range(length, 100, 4096);
        assert_ptr_equal(strchr(line, '\n'), line + length - 1);
    }
}

static void what_a_full_disk_does_not_take_is_counted(void **state) {
    (void)state;
    uint64_t before = log_lines_dropped();
    open_log(LOG_LEVEL_INFO, LOG_FORMAT_TEXT, "/dev/full");
    for (unsigned i = 0; i < 5; i++)
        log_info("lost");
    assert_int_equal(log_lines_dropped(), before + 5);
    open_log(LOG_LEVEL_INFO, LOG_FORMAT_TEXT, path);
    log_info("found");
    const char *text = written();
    assert_non_null(strstr(text, "log lines were dropped lines=5\n"));
    assert_non_null(strstr(text, "found\n"));
    log_info("again");
    assert_null(strstr(written(), "dropped"));
}

static void a_full_pipe_does_not_block(void **state) {
    (void)state;
    int ends[2], saved = dup(STDERR_FILENO);
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    assert_true(dup2(ends[1], STDERR_FILENO) >= 0);
    open_log(LOG_LEVEL_INFO, LOG_FORMAT_TEXT, NULL);
    uint64_t before = log_lines_dropped();
    for (unsigned i = 0; i < 10000 && log_lines_dropped() == before; i++)
        log_info("into a pipe that nobody reads");
    bool dropped = log_lines_dropped() > before;
    assert_true(dup2(saved, STDERR_FILENO) >= 0);
    close(saved);
    close(ends[0]);
    close(ends[1]);
    assert_true(dropped);
}

static void a_file_that_cannot_be_opened_is_named(void **state) {
    (void)state;
    open_log(LOG_LEVEL_INFO, LOG_FORMAT_TEXT, path);
    struct oscar_cause cause = {0};
    assert_int_equal(log_open(LOG_LEVEL_INFO, LOG_FORMAT_TEXT, "/nonexistent/log", &cause), OSCAR_ERR_IO);
    assert_non_null(strstr(cause.text, "/nonexistent/log"));
    log_info("as before");
    assert_non_null(strstr(written(), "as before"));
}

static void a_limit_lets_some_lines_through_and_counts_the_rest(void **state) {
    (void)state;
    struct log_limit limit = {.lines_max = 3};
    uint64_t suppressed = 99, now = 1000, second = UINT64_C(1000000000);
    for (unsigned i = 0; i < 3; i++) {
        assert_true(log_limit_pass(&limit, now, &suppressed));
        assert_int_equal(suppressed, 0);
    }
    for (unsigned i = 0; i < 7; i++)
        assert_false(log_limit_pass(&limit, now + i * second, &suppressed));
    assert_true(log_limit_pass(&limit, now + 10 * second, &suppressed));
    assert_int_equal(suppressed, 7);
    assert_null(log_suppressed(0).key);
    assert_string_equal(log_suppressed(7).key, "suppressed");
}

static int make_file(void **state) {
    (void)state;
    int fd = mkstemp(path);
    return fd < 0 ? -1 : close(fd);
}

static int remove_file(void **state) {
    (void)state;
    log_close();
    return unlink(path);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_line_has_level_event_and_fields),
        cmocka_unit_test(values_cannot_forge_lines_or_fields),
        cmocka_unit_test(json_lines_are_json),
        cmocka_unit_test(a_long_line_is_cut_to_one_line),
        cmocka_unit_test(what_a_full_disk_does_not_take_is_counted),
        cmocka_unit_test(a_full_pipe_does_not_block),
        cmocka_unit_test(a_file_that_cannot_be_opened_is_named),
        cmocka_unit_test(a_limit_lets_some_lines_through_and_counts_the_rest),
    };
    return cmocka_run_group_tests(tests, make_file, remove_file);
}
