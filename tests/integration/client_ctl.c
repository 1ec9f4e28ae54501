/* SPDX-License-Identifier: Apache-2.0 */
/* oscarctl as an operator and a program run it: what it prints, how it ends, and that it never hangs. */
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/integration/client_scene.h"

#define SEED 21U
#define TOKENS 192U
#define PROGRAM OSCAR_BUILD_DIR "/client/oscarctl"
#define MAX_ARGS 12

static const char *const flags[] = {"--memory-chunk", "1M", NULL};

static int start(void **state) {
    *state = daemon_start(flags);
    return 0;
}

static int stop(void **state) {
    daemon_stop(*state);
    return 0;
}

/* Runs it to its end with the daemon's directory and up to three more arguments: the exit status, and what it printed. */
static int run(const struct test_daemon *daemon, const char *const *args, char *ret_output, size_t size) {
    const char *argv[MAX_ARGS] = {PROGRAM, "--runtime-dir", daemon->directory};
    for (size_t i = 0; args[i] != NULL; i++)
        argv[3 + i] = args[i];
    struct worker_process process;
    int status;
    assert_int_equal(worker_start(&process, "oscarctl", argv), 0);
    size_t filled = 0;
    for (;;) {
        ssize_t n = read(process.pipe.in, ret_output + filled, size - 1 - filled);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            break;
        filled += (size_t)n;
    }
    ret_output[filled] = '\0';
    assert_int_equal(worker_wait(&process, ANSWER_MS, &status), 0);
    worker_end(&process);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static char output[1 << 18];
#define RUN(daemon, ...) run(daemon, (const char *const[]){__VA_ARGS__, NULL}, output, sizeof(output))

static json_t *parsed(void) {
    json_error_t error;
    json_t *value = json_loads(output, 0, &error);
    if (value == NULL)
        fail_msg("%s: %s", error.text, output);
    return value;
}

static long long number(const json_t *object, const char *key) {
    const json_t *value = json_object_get(object, key);
    if (!json_is_integer(value))
        fail_msg("no number %s", key);
    return json_integer_value(value);
}

static struct oscar_seq *write_some(struct scene *scene, const struct test_daemon *daemon) {
    scene_open(scene, daemon->socket, NULL);
    struct oscar_seq *seq = scene_seq(scene, SEED, 0, 0);
    scene_write(scene, seq, SEED, TOKENS);
    scene_await_hit(scene, SEED, TOKENS, TOKENS);
    return seq;
}

static void stats_are_a_table_for_people_and_an_object_for_programs(void **state) {
    struct test_daemon *daemon = *state;
    struct scene scene;
    (void)write_some(&scene, daemon);
    assert_int_equal(RUN(daemon, "stats"), 0);
    assert_non_null(strstr(output, "memory\n"));
    assert_non_null(strstr(output, "256.0 MiB"));
    assert_int_equal(RUN(daemon, "stats", "--json"), 0);
    json_t *stats = parsed();
    assert_int_equal(number(stats, "oscar_pages_sealed_total"), 3);
    assert_int_equal(number(stats, "oscar_memory_budget_bytes"), 256 << 20);
    assert_int_equal(number(stats, "oscar_pages"), number(stats, "oscar_pages{form=\"sink\"}") +
                                                       number(stats, "oscar_pages{form=\"dense\"}") +
                                                       number(stats, "oscar_pages{form=\"packed\"}"));
    json_decref(stats);
    scene_close(&scene);
}

static void flush_says_what_is_freed_and_what_must_wait(void **state) {
    struct test_daemon *daemon = *state;
    struct scene scene;
    struct oscar_seq *seq = write_some(&scene, daemon);
    struct oscar_model_info info = OSCAR_INIT(struct oscar_model_info);
    MUST(oscar_model_info(scene.model, &info));
    char model[65];
    for (size_t i = 0; i < 32; i++)
        (void)snprintf(model + 2 * i, 3, "%02x", info.model_digest[i]);

    char other[65];
    memcpy(other, model, sizeof(other));
    other[0] = other[0] == '0' ? '1' : '0';
    assert_int_equal(RUN(daemon, "flush", "--json", "--model", other), 0); /* not of this one */
    json_t *flush = parsed();
    assert_int_equal(number(flush, "pages_freed") + number(flush, "pages_deferred"), 0);
    json_decref(flush);
    assert_int_equal(RUN(daemon, "flush", "--json", "--model", model), 0);
    flush = parsed();
    assert_int_equal(number(flush, "pages_deferred"), 3); /* the sequence reads them */
    json_decref(flush);
    scene_await_hit(&scene, SEED, TOKENS, 0);
    free(scene_attend(&scene, seq, SEED, 0, TOKENS, 1));
    assert_int_equal(RUN(daemon, "flush"), 0);
    assert_non_null(strstr(output, "deferred"));
    scene_close(&scene);
}

static void version_tells_both_ends(void **state) {
    struct test_daemon *daemon = *state;
    assert_int_equal(RUN(daemon, "version", "--json"), 0);
    json_t *version = parsed();
    const json_t *theirs = json_object_get(version, "daemon");
    assert_string_equal(json_string_value(json_object_get(theirs, "backend")), "host");
    assert_string_equal(json_string_value(json_object_get(theirs, "version")),
                        json_string_value(json_object_get(json_object_get(version, "client"), "version")));
    json_decref(version);
    assert_int_equal(RUN(daemon, "version"), 0);
    assert_non_null(strstr(output, "oscard "));
}

static void wrong_usage_is_status_2(void **state) {
    struct test_daemon *daemon = *state;
    assert_int_equal(RUN(daemon, "--json"), 2);
    assert_int_equal(RUN(daemon, "burn"), 2);
    assert_int_equal(RUN(daemon, "stats", "flush"), 2);
    assert_int_equal(RUN(daemon, "stats", "--model", "12"), 2);
    assert_int_equal(RUN(daemon, "flush", "--model", "12"), 2);
    assert_int_equal(RUN(daemon, "stats", "--timeout", "soon"), 2);
    assert_int_equal(RUN(daemon, "--help"), 0);
    assert_non_null(strstr(output, "flush"));
}

static void no_daemon_is_said_at_once_and_a_stopped_one_within_the_timeout(void **state) {
    struct test_daemon *daemon = *state;
    daemon_pause(daemon);
    assert_int_equal(RUN(daemon, "stats", "--timeout", "50"), 4);
    daemon_resume(daemon);
    assert_int_equal(RUN(daemon, "stats"), 0);
    daemon_kill(daemon);
    assert_int_equal(RUN(daemon, "stats"), 3); /* its socket is still there */
    daemon_start_again(daemon);
    assert_int_equal(RUN(daemon, "stats"), 0);
}

/* --- events ------------------------------------------------------------------------------------------------------------ */

static json_t *next_event(struct worker_process *process, const char *kind) {
    char line[2048];
    assert_int_equal(line_hear(&process->pipe, line, sizeof(line), ANSWER_MS), 0);
    json_t *event = json_loads(line, 0, NULL);
    assert_non_null(event);
    if (strcmp(json_string_value(json_object_get(event, "event")), kind) != 0)
        fail_msg("%s where %s was expected", line, kind);
    return event;
}

static void events_follow_the_cache_and_a_gap_is_healed_by_a_snapshot(void **state) {
    struct test_daemon *daemon = *state;
    struct scene scene;
    struct worker_process process;
    const char *const follow[] = {PROGRAM, "events", "--socket", daemon->admin, NULL};
    assert_int_equal(worker_start(&process, "oscarctl", follow), 0);
    json_decref(next_event(&process, "following"));

    struct oscar_seq *seq = write_some(&scene, daemon);
    char page[65] = "";
    for (int depth = 0; depth < 3; depth++) {
        json_t *event = next_event(&process, "stored");
        assert_int_equal(number(event, "depth"), depth);
        if (depth > 0)
            assert_string_equal(json_string_value(json_object_get(event, "parent")), page);
        (void)snprintf(page, sizeof(page), "%s", json_string_value(json_object_get(event, "page")));
        json_decref(event);
    }
    oscar_seq_close(seq);
    scene_close(&scene);
    for (int i = 0; i < 3; i++)
        json_decref(next_event(&process, "compressed"));

    /* Another daemon at the same place: another incarnation. What was known is void, and what is there comes as a snapshot. */
    daemon_kill(daemon);
    daemon_start_again(daemon);
    json_t *event = NULL;
    for (uint32_t text = 0; event == NULL; text++) { /* the first events may come before nanomsg has connected again */
        char line[2048];
        scene_open(&scene, daemon->socket, NULL);
        seq = scene_seq(&scene, SEED + text, 0, 0);
        scene_write(&scene, seq, SEED + text, OSCAR_PAGE_TOKENS);
        scene_await_hit(&scene, SEED + text, OSCAR_PAGE_TOKENS, OSCAR_PAGE_TOKENS);
        scene_close(&scene);
        if (line_hear(&process.pipe, line, sizeof(line), 50) == 0)
            event = json_loads(line, 0, NULL);
    }
    assert_string_equal(json_string_value(json_object_get(event, "event")), "resync");
    json_decref(event);
    event = next_event(&process, "stored");
    assert_true(json_is_true(json_object_get(event, "snapshot")));
    json_decref(event);
    worker_end(&process);

    assert_int_equal(RUN(daemon, "events", "--snapshot"), 0);
    assert_non_null(strstr(output, "\"snapshot\":true"));
}

int main(void) {
#define CTL_TEST(name) cmocka_unit_test_setup_teardown(name, start, stop)
    const struct CMUnitTest tests[] = {
        CTL_TEST(stats_are_a_table_for_people_and_an_object_for_programs),
        CTL_TEST(flush_says_what_is_freed_and_what_must_wait),
        CTL_TEST(version_tells_both_ends),
        CTL_TEST(wrong_usage_is_status_2),
        CTL_TEST(no_daemon_is_said_at_once_and_a_stopped_one_within_the_timeout),
        CTL_TEST(events_follow_the_cache_and_a_gap_is_healed_by_a_snapshot),
    };
    return cmocka_run_group_tests_name("client_ctl", tests, NULL, NULL);
}
