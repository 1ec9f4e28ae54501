/* SPDX-License-Identifier: Apache-2.0 */
/* Starting again after the worst, and two daemons on one host. */
#include <dirent.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

#include "tests/integration/e2e_daemon.h"
#include "tests/integration/e2e_model.h"
#include "tests/support/worker_process.h"

#define ANSWER_MS 30000
#define TOKENS 600U
#define OTHER_USER 65534U

static unsigned entries_of(const char *path) {
    DIR *directory = opendir(path);
    unsigned count = 0;
    while (directory != NULL && readdir(directory) != NULL)
        count++;
    if (directory != NULL)
        closedir(directory);
    return count;
}

static int write_for_ever(struct line_pipe *pipe, void *argument) {
    (void)argument;
    e2e_child();
    fclose(stderr); /* it will lose its daemon, which is no news */
    struct e2e_worker worker;
    e2e_worker_open(&worker, NULL, "writer");
    for (uint64_t seed = 1;; seed++) {
        struct text text = {0};
        text_append(&text, seed, TOKENS);
        struct oscar_seq *seq = e2e_open(&worker, &text, TOKENS, 0);
        e2e_extend(&worker, seq, &text, TOKENS);
        oscar_seq_close(seq);
        text_free(&text);
        if (line_tell(pipe, "stored") < 0)
            return 0;
    }
}

static void use_it(const struct test_daemon *daemon) {
    struct e2e_worker worker;
    struct text text = {0};
    text_append(&text, 1, TOKENS);
    e2e_worker_open(&worker, e2e_socket(daemon), "user");
    struct oscar_seq *seq = e2e_open(&worker, &text, TOKENS, 0);
    e2e_extend(&worker, seq, &text, TOKENS);
    e2e_check_all(&worker, seq, &text, TOKENS);
    e2e_worker_close(&worker);
    text_free(&text);
}

static void after_a_kill_of_everything_it_starts_with_nothing_to_clean_by_hand(void **state) {
    struct test_daemon *daemon = *state;
    unsigned shared_memory = entries_of("/dev/shm");
    for (unsigned round = 0; round < 3; round++) {
        struct worker_process writer;
        char line[64];
        assert_int_equal(worker_spawn(&writer, "writer", write_for_ever, NULL, 0), 0);
        assert_int_equal(line_hear(&writer.pipe, line, sizeof(line), ANSWER_MS), 0);
        daemon_kill(daemon);
        worker_end(&writer);
        assert_int_equal(entries_of("/dev/shm"), shared_memory);
        daemon_start_again(daemon);
        use_it(daemon);
    }
}

static void a_worker_whose_daemon_was_killed_is_told_and_lives(void **state) {
    struct test_daemon *daemon = *state;
    struct e2e_worker worker;
    struct text text = {0};
    text_append(&text, 1, TOKENS);
    e2e_worker_open(&worker, e2e_socket(daemon), "survivor");
    struct oscar_seq *seq = e2e_open(&worker, &text, TOKENS, 0);
    e2e_extend(&worker, seq, &text, TOKENS);
    daemon_kill(daemon);
    /* The memory is mapped: what is there is there. */
    e2e_check_all(&worker, seq, &text, TOKENS);
    REFUSED(oscar_client_ping(worker.client), OSCAR_ERR_DISCONNECTED);
    REFUSED(oscar_seq_reserve(seq, 2000), OSCAR_ERR_DISCONNECTED);
    e2e_check_all(&worker, seq, &text, TOKENS);
    struct oscar_client_options options = {.size = sizeof(options), .socket = e2e_socket(daemon), .timeout_ms = 2000};
    struct oscar_client *client;
    REFUSED(oscar_client_open(&options, &client), OSCAR_ERR_NOT_RUNNING);
    daemon_start_again(daemon);
    use_it(daemon);
    e2e_worker_close(&worker);
    text_free(&text);
}

/* Another oscard for the same directory: it must not become ready. */
static int run_second(const struct test_daemon *daemon, char *ret_text, size_t size) {
    const char *const args[] = {"--daemon-runtime-dir", daemon->directory, NULL};
    return daemon_run(args, ret_text, size);
}

static void a_second_daemon_at_the_same_socket_is_refused_in_words(void **state) {
    struct test_daemon *daemon = *state;
    char text[4096];
    assert_int_not_equal(run_second(daemon, text, sizeof(text)), 0);
    assert_non_null(strstr(text, daemon->directory));
    use_it(daemon); /* the first one has not noticed */
}

static void a_file_in_the_sockets_place_is_left_alone_and_refused_in_words(void **state) {
    struct test_daemon *daemon = *state;
    char path[128], text[4096];
    daemon_kill(daemon);
    unlink(daemon->socket);
    snprintf(path, sizeof(path), "%s", daemon->socket);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL, 0600);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, "mine", 4), 4);
    close(fd);
    assert_int_not_equal(run_second(daemon, text, sizeof(text)), 0);
    assert_non_null(strstr(text, "worker.sock"));
    struct stat found;
    assert_int_equal(stat(path, &found), 0);
    assert_int_equal(found.st_size, 4);
    unlink(path);
    daemon_start_again(daemon);
}

static void two_daemons_at_two_sockets_know_nothing_of_each_other(void **state) {
    struct test_daemon *other = daemon_start(NULL);
    struct e2e_worker worker[2];
    struct text text = {0};
    text_append(&text, 1, TOKENS);
    e2e_worker_open(&worker[0], e2e_socket(*state), "here");
    e2e_worker_open(&worker[1], e2e_socket(other), "there");
    struct oscar_seq *seq = e2e_open(&worker[0], &text, TOKENS, 0);
    e2e_extend(&worker[0], seq, &text, TOKENS);
    assert_int_equal(e2e_probe(&worker[0], &text, TOKENS), TOKENS / 64 * 64);
    assert_int_equal(e2e_probe(&worker[1], &text, TOKENS), 0);
    seq = e2e_open(&worker[1], &text, TOKENS, 0);
    e2e_extend(&worker[1], seq, &text, TOKENS);
    e2e_check_all(&worker[1], seq, &text, TOKENS);
    e2e_worker_close(&worker[0]);
    e2e_worker_close(&worker[1]);
    daemon_stop(other);
    text_free(&text);
}

/* In the child, still root: gives the daemon's directory away and becomes another user. */
static void become_another_user(const struct test_daemon *daemon) {
    if (chown(daemon->base, OTHER_USER, OTHER_USER) < 0 || chown(getenv("NOTIFY_SOCKET"), OTHER_USER, OTHER_USER) < 0 ||
        setgid(OTHER_USER) < 0 || setuid(OTHER_USER) < 0)
        _exit(126);
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* lost with the old user */
}

static void another_user_has_a_daemon_of_their_own(void **state) {
    if (geteuid() != 0)
        skip();
    struct test_daemon *theirs = daemon_start_prepared(NULL, become_another_user);
    struct stat found;
    assert_int_equal(stat(theirs->socket, &found), 0);
    assert_int_equal(found.st_uid, OTHER_USER);
    use_it(*state);
    use_it(theirs);
    daemon_stop(theirs);
}

static int start(void **state) { return e2e_start(state, "32M"); }

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(after_a_kill_of_everything_it_starts_with_nothing_to_clean_by_hand, start,
                                        e2e_stop),
        cmocka_unit_test_setup_teardown(a_worker_whose_daemon_was_killed_is_told_and_lives, start, e2e_stop),
        cmocka_unit_test_setup_teardown(a_second_daemon_at_the_same_socket_is_refused_in_words, start, e2e_stop),
        cmocka_unit_test_setup_teardown(a_file_in_the_sockets_place_is_left_alone_and_refused_in_words, start,
                                        e2e_stop),
        cmocka_unit_test_setup_teardown(two_daemons_at_two_sockets_know_nothing_of_each_other, start, e2e_stop),
        cmocka_unit_test_setup_teardown(another_user_has_a_daemon_of_their_own, start, e2e_stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
