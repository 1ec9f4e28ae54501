/* SPDX-License-Identifier: Apache-2.0 */
/* The demo as its users see it: its last line, its exit status, and that it leaves nothing behind. */
#include <dirent.h>
#include <errno.h>
#include <jansson.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

#include "tests/support/worker_process.h"

#define DEMO_MS 300000 /* generous, for a sanitizer build on a busy machine */

static char directory[64]; /* the demo's TMPDIR */

static unsigned entries(void) {
    DIR *stream = opendir(directory);
    unsigned count = 0;
    assert_non_null(stream);
    for (const struct dirent *entry; (entry = readdir(stream)) != NULL;)
        count += entry->d_name[0] != '.';
    closedir(stream);
    return count;
}

static void start_demo(struct worker_process *demo, const char *option, const char *value) {
    const char *argv[] = {DEMO_PROGRAM, "--json", option, value, NULL};
    assert_int_equal(worker_start(demo, "demo", argv), 0);
}

/* Reads to the end: the last line, and the status of waitpid(). */
static int finish(struct worker_process *demo, char *ret_last, size_t size) {
    char line[LINE_BYTES];
    int r, status;
    ret_last[0] = 0;
    while ((r = line_hear(&demo->pipe, line, sizeof(line), DEMO_MS)) == 0)
        snprintf(ret_last, size, "%s", line);
    assert_int_equal(r, -EPIPE);
    assert_int_equal(worker_wait(demo, DEMO_MS, &status), 0);
    worker_end(demo);
    return status;
}

struct key {
    const char *name;
    json_type type;
};

static const struct key keys[] = {
    {"backend", JSON_STRING},
    {"device", JSON_STRING},
    {"workers", JSON_INTEGER},
    {"prefix_tokens", JSON_INTEGER},
    {"hit_tokens", JSON_INTEGER},
    {"bytes_stored", JSON_INTEGER},
    {"bytes_bf16_private", JSON_INTEGER},
    {"dedup_ratio", JSON_REAL},
    {"rel_err_mean", JSON_REAL},
    {"rel_err_max", JSON_REAL},
    {"rel_err_dense_max", JSON_REAL},
    {"attach_us_p50", JSON_REAL},
    {"bits_per_element", JSON_REAL},
    {"leaked_bytes", JSON_INTEGER},
    {"survived_kill", JSON_TRUE},
    {"calibration", JSON_STRING},
    {"calibration_bytes", JSON_INTEGER},
    {"hadamard", JSON_OBJECT},
};

static const struct key keys_beside[] = {
    {"bytes_stored", JSON_INTEGER}, {"bits_per_element", JSON_REAL},  {"rel_err_mean", JSON_REAL},
    {"rel_err_max", JSON_REAL},     {"rel_err_dense_max", JSON_REAL}, {"attach_us_p50", JSON_REAL},
};

static void assert_has_keys(const json_t *object, const struct key *expected, size_t count) {
    assert_int_equal(json_object_size(object), count);
    for (size_t i = 0; i < count; i++) {
        const json_t *value = json_object_get(object, expected[i].name);
        if (value == NULL || json_typeof(value) != expected[i].type)
            fail_msg("%s is not there, or of another type", expected[i].name);
    }
}

static double number(const json_t *object, const char *key) { return json_number_value(json_object_get(object, key)); }

/* The fitted calibration errs clearly less, in the same bytes. */
static void assert_fitted_is_better(const json_t *fitted) {
    const json_t *hadamard = json_object_get(fitted, "hadamard");
    assert_true(number(fitted, "rel_err_mean") > 0);
    assert_true(2 * number(fitted, "rel_err_mean") < number(hadamard, "rel_err_mean"));
    assert_true(number(fitted, "rel_err_max") < number(hadamard, "rel_err_max"));
    assert_true(number(fitted, "bits_per_element") <= number(hadamard, "bits_per_element"));
    assert_true(number(fitted, "bytes_stored") <= number(hadamard, "bytes_stored"));
    assert_true(number(fitted, "calibration_bytes") > 0);
}

static void its_last_line_holds_these_keys_and_all_is_well(void **state) {
    (void)state;
    struct worker_process demo;
    char last[LINE_BYTES];
    start_demo(&demo, NULL, NULL);
    assert_int_equal(finish(&demo, last, sizeof(last)), 0);
    json_error_t error;
    json_t *line = json_loads(last, 0, &error);
    assert_non_null(line);
    assert_has_keys(line, keys, sizeof(keys) / sizeof(keys[0]));
    assert_has_keys(json_object_get(line, "hadamard"), keys_beside, sizeof(keys_beside) / sizeof(keys_beside[0]));
    assert_int_equal(json_integer_value(json_object_get(line, "hit_tokens")),
                     json_integer_value(json_object_get(line, "prefix_tokens")));
    assert_int_equal(json_integer_value(json_object_get(line, "leaked_bytes")), 0);
    assert_true(json_real_value(json_object_get(line, "dedup_ratio")) > 2);
    assert_fitted_is_better(line);
    json_decref(line);
    assert_int_equal(entries(), 0);
}

static bool has_begun(void *argument) {
    (void)argument;
    return entries() > 0;
}

static void an_interrupted_demo_leaves_nothing_behind(void **state) {
    (void)state;
    struct worker_process demo;
    char last[LINE_BYTES];
    start_demo(&demo, NULL, NULL);
    assert_true(wait_until(has_begun, NULL, DEMO_MS));
    assert_int_equal(worker_signal(&demo, SIGINT), 0);
    int status = finish(&demo, last, sizeof(last));
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) != 0);
    assert_int_equal(entries(), 0);
}

static void a_daemon_that_does_not_start_is_a_failure_that_leaves_nothing_behind(void **state) {
    (void)state;
    struct worker_process demo;
    char last[LINE_BYTES];
    start_demo(&demo, "--daemon", "/bin/false");
    int status = finish(&demo, last, sizeof(last));
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 1);
    assert_int_equal(entries(), 0);
    static const char *const files[] = {"--capture", "--calibration"};
    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
        start_demo(&demo, files[i], "/absent");
        status = finish(&demo, last, sizeof(last));
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 2);
        assert_int_equal(entries(), 0);
    }
}

/* The calibration of all layers of the model does not fit the three that were captured: the daemon refuses it by name. */
static void a_calibration_of_another_shape_is_a_failure_that_leaves_nothing_behind(void **state) {
    (void)state;
    struct worker_process demo;
    char last[LINE_BYTES];
    start_demo(&demo, "--calibration", OSCAR_TEST_DATA "/smollm2-135m/calibration.safetensors");
    int status = finish(&demo, last, sizeof(last));
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 1);
    assert_int_equal(entries(), 0);
}

static int make_directory(void **state) {
    (void)state;
    snprintf(directory, sizeof(directory), "/tmp/oscar-demo-test-XXXXXX");
    return mkdtemp(directory) != NULL ? setenv("TMPDIR", directory, 1) : -1;
}

static int remove_directory(void **state) {
    (void)state;
    return rmdir(directory);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(its_last_line_holds_these_keys_and_all_is_well),
        cmocka_unit_test(an_interrupted_demo_leaves_nothing_behind),
        cmocka_unit_test(a_daemon_that_does_not_start_is_a_failure_that_leaves_nothing_behind),
        cmocka_unit_test(a_calibration_of_another_shape_is_a_failure_that_leaves_nothing_behind),
    };
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
