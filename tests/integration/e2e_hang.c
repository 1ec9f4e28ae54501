/* SPDX-License-Identifier: Apache-2.0 */
/* A device that hangs or fails under a daemon with workers: what is still answered, and how the daemon ends. */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <sysexits.h>
#include <unistd.h>
/* cmocka needs the headers above */
#include <cmocka.h>

#include "tests/integration/e2e_daemon.h"
#include "tests/integration/e2e_model.h"

#define TOKENS 640U
#define CALL_MS 30000U /* more than any answer takes that needs no device */
#define PATIENCE "60"  /* of the watchdog, in seconds, where it is not to bite */

static char control_path[64]; /* what hanging_oscard.c looks at */
static int control = -1;

static const char *flags[] = {"--memory-chunk", "1M", "--device-watchdog-seconds", NULL, NULL};

/* A worker with a sequence that has nothing yet. */
struct scene {
    struct test_daemon *daemon;
    struct e2e_worker worker;
    struct text text;
    struct oscar_seq *seq;
};

static struct scene begin(void **state, const char *watchdog_seconds) {
    snprintf(control_path, sizeof(control_path), "/tmp/oscar-hang-XXXXXX");
    control = mkostemp(control_path, O_CLOEXEC);
    assert_true(control >= 0);
    setenv("OSCAR_TEST_DEVICE", control_path, 1);
    setenv("OSCAR_TEST_OSCARD", OSCAR_BUILD_DIR "/tests/integration/hanging_oscard", 1);
    flags[3] = watchdog_seconds;
    struct scene scene = {.daemon = *state = daemon_start(flags)};
    text_append(&scene.text, 1, TOKENS);
    e2e_worker_open(&scene.worker, scene.daemon->socket, "worker");
    scene.seq = e2e_open(&scene.worker, &scene.text, TOKENS, 0);
    return scene;
}

static void end(struct scene *scene) {
    oscar_seq_close(scene->seq);
    e2e_worker_close(&scene->worker);
    text_free(&scene->text);
}

/* The daemon is over: the next one must end in its own time. */
static void start_again(struct test_daemon *daemon) {
    flags[3] = PATIENCE;
    daemon_start_again(daemon);
}

static int stop(void **state) {
    daemon_stop(*state);
    close(control);
    unlink(control_path);
    return 0;
}

/* The device hangs, and the sequence waits in vain for its chunk. */
static void hang(const struct scene *scene) {
    assert_int_equal(flock(control, LOCK_EX), 0);
    oscar_client_set_timeout(scene->worker.client, 50);
    REFUSED(oscar_seq_reserve(scene->seq, TOKENS), OSCAR_ERR_TIMEOUT);
    oscar_client_set_timeout(scene->worker.client, CALL_MS);
}

static void come_back(void) { assert_int_equal(flock(control, LOCK_UN), 0); }

/* The daemon is expected to have ended by itself, and to have left no socket behind: then the next one starts as the first. */
static void check_end(struct test_daemon *daemon, const char *cause) {
    int status = daemon_await_exit(daemon);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), EX_OSERR);
    assert_int_equal(daemon_log_count(daemon, "the device has failed"), 1);
    assert_int_equal(daemon_log_count(daemon, cause), 1);
    assert_int_equal(access(daemon->socket, F_OK), -1);
    assert_int_equal(access(daemon->admin, F_OK), -1);
}

static void cache(struct e2e_worker *worker, const struct text *text) {
    struct oscar_seq *seq = e2e_open(worker, text, TOKENS, 0);
    e2e_extend(worker, seq, text, TOKENS);
    oscar_seq_close(seq);
}

static void while_the_device_hangs_all_is_answered_that_needs_none(void **state) {
    struct scene scene = begin(state, PATIENCE);
    struct test_daemon *daemon = scene.daemon;
    struct e2e_worker reader;
    struct text cached = {0};
    text_append(&cached, 2, TOKENS);
    e2e_worker_open(&reader, daemon->socket, "reader");
    cache(&reader, &cached);
    e2e_wait_metric(daemon, E2E_ENDING, 0);
    e2e_wait_metric(daemon, E2E_PACKED, 9);

    hang(&scene);
    oscar_client_set_timeout(reader.client, CALL_MS);
    for (uint32_t round = 0; round < 30; round++) {
        assert_int_equal(e2e_probe(&reader, &cached, TOKENS), TOKENS);
        struct oscar_seq *hit = e2e_open(&reader, &cached, TOKENS, 0);
        assert_int_equal(e2e_info(hit).hit_tokens, TOKENS);
        e2e_check_some(&reader, hit, &cached, TOKENS, &(uint64_t){round}, 4);
        oscar_seq_close(hit);
        assert_true(e2e_metric(daemon, E2E_USED) > 0);
    }
    e2e_wait_metric(daemon, E2E_ENDING, 0);
    assert_int_equal(e2e_flush(daemon).flush.pages_freed, 10);
    assert_int_equal(e2e_probe(&reader, &cached, TOKENS), 0);

    come_back(); /* what waited goes on */
    e2e_extend(&scene.worker, scene.seq, &scene.text, TOKENS);
    e2e_check_all(&scene.worker, scene.seq, &scene.text, TOKENS);
    e2e_worker_close(&reader);
    text_free(&cached);
    end(&scene);
}

static void a_device_that_does_not_come_back_ends_the_daemon(void **state) {
    struct scene scene = begin(state, "1");
    struct oscar_probe_result result;
    hang(&scene);
    check_end(scene.daemon, "has not returned for 1 s");
    REFUSED(oscar_probe(scene.worker.model, scene.text.ids, TOKENS, &result, NULL), OSCAR_ERR_DISCONNECTED);
    come_back();
    start_again(scene.daemon);
    end(&scene);
}

static void a_device_that_hangs_does_not_keep_the_daemon_from_ending(void **state) {
    struct scene scene = begin(state, "3");
    hang(&scene);
    int status = daemon_terminate(scene.daemon);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), EX_OSERR);
    assert_int_equal(daemon_log_count(scene.daemon, "the device has failed"), 0);
    assert_int_equal(access(scene.daemon->socket, F_OK), -1);
    come_back();
    start_again(scene.daemon);
    end(&scene);
}

static void a_device_that_fails_ends_the_daemon_with_a_status_of_its_own(void **state) {
    struct scene scene = begin(state, PATIENCE);
    assert_int_equal(oscar_seq_reserve(scene.seq, TOKENS), 0);
    assert_int_equal(write(control, "x", 1), 1);
    e2e_store(&scene.worker, scene.seq, NULL, &scene.text, 0, TOKENS);
    MUST(oscar_seq_advance(scene.seq, NULL, scene.text.ids, TOKENS));
    check_end(scene.daemon, "inspecting pages");
    assert_int_equal(ftruncate(control, 0), 0);
    start_again(scene.daemon);
    end(&scene);
}

static void a_daemon_that_was_stopped_for_longer_does_not_take_its_device_for_hanging(void **state) {
    struct scene scene = begin(state, "2");
    hang(&scene); /* a call for memory is under way */
    daemon_pause(scene.daemon);
    usleep(2500 * 1000); /* what is tested is this time itself */
    come_back();
    daemon_resume(scene.daemon);
    e2e_extend(&scene.worker, scene.seq, &scene.text, TOKENS);
    e2e_check_all(&scene.worker, scene.seq, &scene.text, TOKENS);
    daemon_kill(scene.daemon);
    start_again(scene.daemon);
    end(&scene);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(while_the_device_hangs_all_is_answered_that_needs_none, stop),
        cmocka_unit_test_teardown(a_device_that_does_not_come_back_ends_the_daemon, stop),
        cmocka_unit_test_teardown(a_device_that_hangs_does_not_keep_the_daemon_from_ending, stop),
        cmocka_unit_test_teardown(a_device_that_fails_ends_the_daemon_with_a_status_of_its_own, stop),
        cmocka_unit_test_teardown(a_daemon_that_was_stopped_for_longer_does_not_take_its_device_for_hanging, stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
