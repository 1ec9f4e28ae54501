/* SPDX-License-Identifier: Apache-2.0 */
/* Calibrations: found by name and by digest, read once, sealed, and refused by name. */
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/serve/calibrations.h"
#include "tests/support/calibration_file.h"
#include "tests/support/cmocka_order.h"

#define PAGES 100U

struct fixture {
    char directory[64], path[128];
    struct calibrations *calibrations;
    uint64_t last_ticket;
};

static struct calibrations_result load(struct fixture *fixture, const char *name) {
    struct oscar_cause cause = {0};
    struct calibrations_result result = {0};
    int r = calibrations_load(fixture->calibrations, name, &calibration_file_geometry, ++fixture->last_ticket, &cause);
    if (r < 0)
        fail_msg("%s", cause.text);
    struct pollfd ready = {.fd = calibrations_event_fd(fixture->calibrations), .events = POLLIN};
    assert_int_equal(poll(&ready, 1, 20000), 1);
    assert_true(calibrations_take(fixture->calibrations, &result));
    assert_int_equal(result.ticket, fixture->last_ticket);
    struct calibrations_result none;
    assert_false(calibrations_take(fixture->calibrations, &none));
    assert_int_equal(poll(&ready, 1, 0), 0); /* nothing more to take: silent */
    return result;
}

static const char *path_of(struct fixture *fixture, const char *name) {
    snprintf(fixture->path, sizeof(fixture->path), "%s/%s", fixture->directory, name);
    return fixture->path;
}

static void expect_loaded(struct calibrations_result *result, const struct oscar_digest *digest, bool read) {
    if (result->error < 0)
        fail_msg("%s", result->cause.text);
    assert_memory_equal(&result->calibration->digest, digest, sizeof(*digest));
    assert_int_equal(result->read, read);
    calibrations_result_free(result);
}

static void expect_refused(struct fixture *fixture, const char *name, int error, const char *text) {
    struct calibrations_result result = load(fixture, name);
    assert_int_equal(result.error, error);
    assert_null(result.calibration);
    assert_int_equal(result.file_fd, -1);
    assert_int_equal(result.turns_fd, -1);
    if (strstr(result.cause.text, text) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", result.cause.text, text);
}

static void the_default_needs_no_file(void **state) {
    struct calibrations_result result = load(*state, "default");
    assert_int_equal(result.error, 0);
    assert_int_equal(result.file_fd, -1);
    assert_int_equal(result.turns_fd, -1);
    struct oscar_digest digest = result.calibration->digest;
    calibrations_result_free(&result);
    result = load(*state, "");
    expect_loaded(&result, &digest, false);
}

static void a_file_is_found_with_and_without_its_suffix_and_read_once(void **state) {
    struct fixture *fixture = *state;
    struct oscar_digest digest = calibration_file_write(path_of(fixture, "llama.safetensors"), 0);
    static const char *const names[] = {"llama", "llama.safetensors", "llama"};
    for (unsigned i = 0; i < 3; i++) {
        struct calibrations_result result = load(fixture, names[i]);
        expect_loaded(&result, &digest, i == 0);
    }
}

static void a_file_is_found_by_its_digest(void **state) {
    struct fixture *fixture = *state;
    char hex[2 * OSCAR_DIGEST_BYTES + 1];
    (void)calibration_file_write(path_of(fixture, "one.safetensors"), 1);
    struct oscar_digest digest = calibration_file_write(path_of(fixture, "two"), 2);
    oscar_digest_hex(&digest, hex);
    struct calibrations_result result = load(fixture, hex);
    expect_loaded(&result, &digest, true);
    result = load(fixture, hex);
    expect_loaded(&result, &digest, false);
    hex[0] = hex[0] == '0' ? '1' : '0';
    expect_refused(fixture, hex, OSCAR_ERR_NOT_FOUND, hex);
}

static void a_file_that_was_replaced_is_read_again(void **state) {
    struct fixture *fixture = *state;
    struct oscar_digest first = calibration_file_write(path_of(fixture, "moving"), 3);
    struct calibrations_result result = load(fixture, "moving");
    expect_loaded(&result, &first, true);
    char other[160];
    snprintf(other, sizeof(other), "%s/other", fixture->directory);
    struct oscar_digest second = calibration_file_write(other, 4);
    assert_int_equal(rename(other, path_of(fixture, "moving")), 0);
    result = load(fixture, "moving");
    expect_loaded(&result, &second, true);
}

static void what_clients_get_cannot_be_changed(void **state) {
    struct fixture *fixture = *state;
    (void)calibration_file_write(path_of(fixture, "sealed"), 5);
    struct calibrations_result result = load(fixture, "sealed");
    assert_int_equal(result.error, 0);
    const int fds[] = {result.file_fd, result.turns_fd};
    const size_t sizes[] = {0, oscar_turns_bytes(result.calibration, PAGES)};
    for (unsigned i = 0; i < 2; i++) {
        struct stat status;
        assert_int_equal(fstat(fds[i], &status), 0);
        if (i == 1)
            assert_int_equal(status.st_size, sizes[i]);
        assert_int_equal(fcntl(fds[i], F_GET_SEALS), F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL);
        assert_true(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fds[i], 0) == MAP_FAILED);
        assert_true(pwrite(fds[i], "x", 1, 0) < 0);
    }
    assert_int_equal(result.calibration->turns.pages, PAGES);
    assert_int_equal(result.calibration->turns.frequencies, 32);
    calibrations_result_free(&result);
}

static void files_that_are_none_are_refused_by_name(void **state) {
    struct fixture *fixture = *state;
    calibration_file_write_bad(path_of(fixture, "skewed.safetensors"));
    expect_refused(fixture, "skewed", OSCAR_ERR_CALIBRATION, "layers.1.v.rotation");
    assert_int_equal(close(open(path_of(fixture, "empty"), O_CREAT | O_WRONLY | O_CLOEXEC, 0600)), 0);
    expect_refused(fixture, "empty", OSCAR_ERR_CALIBRATION, "empty file");
    assert_int_equal(mkdir(path_of(fixture, "folder"), 0700), 0);
    expect_refused(fixture, "folder", OSCAR_ERR_CALIBRATION, "not a regular file");
    assert_int_equal(mkfifo(path_of(fixture, "pipe"), 0600), 0);
    expect_refused(fixture, "pipe", OSCAR_ERR_CALIBRATION, "not a regular file");
    FILE *text = fopen(path_of(fixture, "text"), "we");
    assert_true(fputs("not a safetensors file", text) >= 0 && fclose(text) == 0);
    struct calibrations_result result = load(fixture, "text");
    assert_int_equal(result.error, OSCAR_ERR_CORRUPT);
    expect_refused(fixture, "missing", OSCAR_ERR_NOT_FOUND, "missing");
}

static void names_that_leave_the_directory_are_refused_at_once(void **state) {
    struct fixture *fixture = *state;
    static const char *const names[] = {"../llama", "/etc/passwd", ".hidden", "a/b", ".."};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        struct oscar_cause cause = {0};
        int r = calibrations_load(fixture->calibrations, names[i], &calibration_file_geometry, 1, &cause);
        assert_int_equal(r, OSCAR_ERR_CALIBRATION);
        assert_non_null(strstr(cause.text, names[i]));
    }
}

static void what_is_not_taken_is_freed_with_the_rest(void **state) {
    struct fixture *fixture = *state;
    (void)calibration_file_write(path_of(fixture, "left"), 6);
    for (unsigned i = 0; i < 20; i++) {
        struct oscar_cause cause;
        assert_int_equal(calibrations_load(fixture->calibrations, "left", &calibration_file_geometry, i, &cause), 0);
    }
}

static int set_up(void **state) {
    struct fixture *fixture = calloc(1, sizeof(*fixture));
    struct oscar_cause cause;
    snprintf(fixture->directory, sizeof(fixture->directory), "/tmp/oscard-test-XXXXXX");
    *state = fixture;
    return mkdtemp(fixture->directory) != NULL
               ? calibrations_new(fixture->directory, PAGES, &fixture->calibrations, &cause)
               : -1;
}

static int tear_down(void **state) {
    struct fixture *fixture = *state;
    static const char *const names[] = {"llama.safetensors",
                                        "one.safetensors",
                                        "two",
                                        "moving",
                                        "sealed",
                                        "skewed.safetensors",
                                        "empty",
                                        "folder",
                                        "pipe",
                                        "text",
                                        "left"};
    calibrations_free(fixture->calibrations);
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (unlink(path_of(fixture, names[i])) < 0)
            (void)rmdir(fixture->path);
    int r = rmdir(fixture->directory);
    free(fixture);
    return r;
}

#define TEST(behaviour) cmocka_unit_test_setup_teardown(behaviour, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(the_default_needs_no_file),
        TEST(a_file_is_found_with_and_without_its_suffix_and_read_once),
        TEST(a_file_is_found_by_its_digest),
        TEST(a_file_that_was_replaced_is_read_again),
        TEST(what_clients_get_cannot_be_changed),
        TEST(files_that_are_none_are_refused_by_name),
        TEST(names_that_leave_the_directory_are_refused_at_once),
        TEST(what_is_not_taken_is_freed_with_the_rest),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
