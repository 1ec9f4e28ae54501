/* SPDX-License-Identifier: Apache-2.0 */
/* Starting, being killed, starting again; sockets and directories that are not as they should be; the log. */
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <sysexits.h>
#include <unistd.h>

#include "tests/support/cmocka_order.h"
#include "tests/support/daemon.h"
#include "tests/support/descriptors.h"
#include "tests/support/peer.h"

#define RUN(output, ...) daemon_run((const char *const[]){__VA_ARGS__, NULL}, output, sizeof(output))

static void expect_text(const char *output, const char *text) {
    if (strstr(output, text) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", output, text);
}

static void a_daemon_leaves_nothing_behind(void **state) {
    (void)state;
    struct test_daemon *daemon = daemon_start(NULL);
    int fd = peer_connect_greeted(daemon->socket, "left");
    assert_true(fd >= 0);
    daemon_log_wait(daemon, "info ready");
    daemon_stop(daemon); /* checks status and directory */
    struct peer_record record;
    assert_false(peer_receive(fd, &record));
    close(fd);
}

/* Else its loop stands still while the table grows beside threads. */
static void a_daemon_has_room_for_many_descriptors_at_once(void **state) {
    (void)state;
    struct test_daemon *daemon = daemon_start(NULL);
    struct rlimit limit;
    assert_int_equal(prlimit(daemon->pid, RLIMIT_NOFILE, NULL, &limit), 0);
    assert_true(descriptor_table_places(daemon->pid) >= (limit.rlim_cur < 4096 ? limit.rlim_cur : 4096));
    daemon_stop(daemon);
}

static void a_second_daemon_on_the_same_socket_is_refused(void **state) {
    (void)state;
    struct test_daemon *daemon = daemon_start(NULL);
    char output[2048];
    assert_int_equal(RUN(output, "--runtime-dir", daemon->directory, "--budget", "64M"), EX_TEMPFAIL);
    expect_text(output, "another daemon serves");
    expect_text(output, daemon->socket);
    /* Another socket, but the same directory: its administration sockets are taken. */
    char other[128];
    snprintf(other, sizeof(other), "%s/other.sock", daemon->base);
    assert_int_equal(RUN(output, "--runtime-dir", daemon->directory, "--socket", other, "--budget", "64M"),
                     EX_TEMPFAIL);
    expect_text(output, "admin.ipc");
    assert_int_equal(access(other, F_OK), -1);
    int fd = peer_connect_greeted(daemon->socket, "still served");
    assert_true(fd >= 0);
    close(fd);
    daemon_stop(daemon);
}

static void two_daemons_in_two_directories_are_both_fine(void **state) {
    (void)state;
    struct test_daemon *one = daemon_start(NULL), *two = daemon_start(NULL);
    int first = peer_connect_greeted(one->socket, "one"), second = peer_connect_greeted(two->socket, "two");
    assert_true(first >= 0 && second >= 0);
    assert_true(peer_ping(first));
    daemon_stop(one);
    assert_true(peer_ping(second));
    close(first);
    close(second);
    daemon_stop(two);
}

static void a_killed_daemon_is_started_again_without_cleaning_up(void **state) {
    (void)state;
    struct test_daemon *daemon = daemon_start(NULL);
    for (unsigned i = 0; i < 3; i++) {
        int fd = peer_connect_greeted(daemon->socket, "survivor");
        assert_true(fd >= 0);
        daemon_kill(daemon);
        struct peer_record record;
        assert_false(peer_receive(fd, &record));
        close(fd);
        assert_int_equal(access(daemon->socket, F_OK), 0); /* what it left */
        daemon_start_again(daemon);
        fd = peer_connect_greeted(daemon->socket, "again");
        assert_true(fd >= 0);
        close(fd);
    }
    daemon_stop(daemon);
}

static void what_is_not_a_socket_is_not_touched(void **state) {
    (void)state;
    static const char *const names[] = {"worker.sock", "admin.ipc", "events.ipc"};
    char base[] = "/tmp/oscard-test-XXXXXX", path[128], output[2048];
    assert_non_null(mkdtemp(base));
    for (unsigned i = 0; i < 6; i++) {
        snprintf(path, sizeof(path), "%s/%s", base, names[i % 3]);
        if (i < 3)
            assert_int_equal(close(open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600)), 0);
        else
            assert_int_equal(mkdir(path, 0700), 0);
        assert_int_equal(RUN(output, "--runtime-dir", base, "--budget", "64M"), EX_CANTCREAT);
        expect_text(output, "is not a socket");
        expect_text(output, path);
        assert_int_equal(access(path, F_OK), 0);
        assert_int_equal(i < 3 ? unlink(path) : rmdir(path), 0);
    }
    assert_int_equal(rmdir(base), 0); /* and nothing else was left by the refused starts */
}

static void a_socket_that_something_else_serves_is_refused(void **state) {
    (void)state;
    char base[] = "/tmp/oscard-test-XXXXXX", output[2048];
    assert_non_null(mkdtemp(base));
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof(address.sun_path), "%s/worker.sock", base);
    static const int types[] = {SOCK_STREAM, SOCK_SEQPACKET};
    for (unsigned i = 0; i < 2; i++) {
        int fd = socket(AF_UNIX, types[i] | SOCK_CLOEXEC, 0);
        assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
        assert_int_equal(listen(fd, 1), 0);
        assert_int_equal(RUN(output, "--runtime-dir", base, "--budget", "64M"), EX_TEMPFAIL);
        expect_text(output, "another process serves");
        close(fd);
        assert_int_equal(unlink(address.sun_path), 0);
    }
    assert_int_equal(rmdir(base), 0);
}

static void a_missing_directory_is_named(void **state) {
    (void)state;
    char output[2048];
    assert_int_equal(RUN(output, "--runtime-dir", "/nonexistent/oscard", "--budget", "64M"), EX_CANTCREAT);
    expect_text(output, "/nonexistent/oscard");
    expect_text(output, "runtime_dir");
    char base[] = "/tmp/oscard-test-XXXXXX";
    assert_non_null(mkdtemp(base));
    assert_int_equal(RUN(output, "--runtime-dir", base, "--socket", "/nonexistent/worker.sock", "--budget", "64M"),
                     EX_CANTCREAT);
    expect_text(output, "the directory of /nonexistent/worker.sock does not exist");
    assert_int_equal(rmdir(base), 0);
}

static void connected_clients_survive_the_loss_of_the_directory(void **state) {
    (void)state;
    struct test_daemon *daemon = daemon_start(NULL);
    int fd = peer_connect_greeted(daemon->socket, "inside");
    assert_true(fd >= 0);
    static const char *const names[] = {"worker.sock",      "admin.ipc",      "events.ipc",
                                        "worker.sock.lock", "admin.ipc.lock", "events.ipc.lock"};
    for (unsigned i = 0; i < 6; i++) {
        char path[128];
        snprintf(path, sizeof(path), "%s/%s", daemon->directory, names[i]);
        assert_int_equal(unlink(path), 0);
    }
    assert_int_equal(rmdir(daemon->directory), 0);
    daemon_log_wait(daemon, "the socket has been removed");
    assert_true(peer_ping(fd));
    assert_int_equal(daemon_log_count(daemon, "the socket has been removed"), 1);
    close(fd);
    daemon_stop(daemon);
}

static void health_is_a_round_trip_through_the_loop(void **state) {
    (void)state;
    struct test_daemon *daemon = daemon_start(NULL);
    int fd = peer_connect_greeted(daemon->socket, "health");
    assert_true(peer_ping(fd));
    daemon_pause(daemon);
    struct oscar_request ping = {.id = 7, .verb = OSCAR_PING};
    assert_true(peer_send_request(fd, &ping));
    uint8_t byte;
    /* A stopped loop does not answer, whatever the socket says. */
    struct timeval wait = {.tv_usec = 50000};
    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait)), 0);
    assert_int_equal(recv(fd, &byte, 1, 0), -1);
    daemon_resume(daemon);
    struct peer_record record;
    assert_true(peer_receive(fd, &record));
    assert_int_equal(record.reply.id, 7);
    close(fd);
    daemon_stop(daemon);
}

static void a_full_disk_costs_log_lines_and_nothing_else(void **state) {
    (void)state;
    static const char *const args[] = {"--daemon-log-file", "/dev/full", NULL};
    struct test_daemon *daemon = daemon_start(args);
    for (unsigned i = 0; i < 5; i++) {
        int fd = peer_connect_greeted(daemon->socket, "unlogged");
        assert_true(fd >= 0);
        assert_true(peer_ping(fd));
        close(fd);
    }
    daemon_stop(daemon);
}

static void hangup_opens_the_log_anew(void **state) {
    (void)state;
    char path[] = "/tmp/oscard-log-XXXXXX", moved[64];
    assert_int_equal(close(mkstemp(path)), 0);
    const char *const args[] = {"--daemon-log-file", path, "--daemon-log-format", "json", NULL};
    struct test_daemon *daemon = daemon_start(args);
    snprintf(moved, sizeof(moved), "%s.1", path);
    assert_int_equal(rename(path, moved), 0);
    assert_int_equal(kill(daemon->pid, SIGHUP), 0);
    /* Signals are taken before later requests: once this client is served, the file is there. */
    int fd = peer_connect_greeted(daemon->socket, "after");
    assert_true(peer_ping(fd));
    close(fd);
    daemon_stop(daemon);
    char line[4096];
    FILE *file = fopen(path, "re");
    assert_non_null(file);
    assert_non_null(fgets(line, sizeof(line), file));
    assert_true(line[0] == '{');
    fclose(file);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(unlink(moved), 0);
}

static void configuration_errors_exit_with_78_and_usage_with_64(void **state) {
    (void)state;
    char output[16384];
    assert_int_equal(RUN(output, "--budget", "lots"), EX_CONFIG);
    expect_text(output, "flag --budget");
    assert_int_equal(RUN(output, "--config", "/nonexistent.conf"), EX_CONFIG);
    assert_int_equal(RUN(output, "--check-config", "--limits-clients", "0"), EX_CONFIG);
    assert_int_equal(RUN(output, "--frobnicate"), EX_USAGE);
    /* With a GPU or without. */
    assert_int_equal(RUN(output, "--backend", "cuda", "--device", "GPU-00000000-0000-0000-0000-000000000000",
                         "--runtime-dir", "/tmp"),
                     EX_UNAVAILABLE);
    assert_int_equal(RUN(output, "--backend", "host", "--budget", "4096T", "--runtime-dir", "/tmp"), EX_CONFIG);
    expect_text(output, "[memory] budget of 4503599627370496 bytes: host has ");
    assert_int_equal(RUN(output, "--check-config", "--backend", "cuda", "--gpu-memory", "60%"), 0);
    expect_text(output, "gpu_memory = 60%");
    assert_int_equal(RUN(output, "--check-config", "--budget", "7M"), 0);
    expect_text(output, "budget = 7M");
    assert_int_equal(RUN(output, "--print-config"), 0);
    expect_text(output, "#budget = 25%");
    assert_int_equal(RUN(output, "--version"), 0);
    expect_text(output, "protocol 1.");
    assert_int_equal(RUN(output, "--help"), 0);
    expect_text(output, "OSCARD_MEMORY_BUDGET");
}

/* What the default profile of a container does. */
static void forbid_io_uring(const struct test_daemon *daemon) {
    (void)daemon;
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | 1 /* EPERM */),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof(filter) / sizeof(filter[0]), filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
        _exit(125);
    unsetenv("OSCARD_DAEMON_IO_ENGINE");
}

static void forbidden_io_uring_falls_back_to_epoll_with_one_line(void **state) {
    (void)state;
    struct test_daemon *daemon = daemon_start_prepared(NULL, forbid_io_uring);
    int fd = peer_connect_greeted(daemon->socket, "epoll");
    assert_true(fd >= 0);
    assert_true(peer_ping(fd));
    assert_int_equal(daemon_log_count(daemon, "io_uring cannot be used"), 1);
    assert_int_equal(daemon_log_count(daemon, "EPERM"), 1);
    assert_int_equal(daemon_log_count(daemon, "io_engine=epoll"), 1);
    close(fd);
    daemon_stop(daemon);
}

static void io_uring_that_is_insisted_on_is_an_error_where_it_is_forbidden(void **state) {
    (void)state;
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        char output[2048];
        forbid_io_uring(NULL);
        int status = RUN(output, "--runtime-dir", "/tmp", "--budget", "64M", "--io-engine", "io_uring");
        _exit(strstr(output, "seccomp") != NULL ? status : 1);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), EX_UNAVAILABLE);
}

static void few_descriptors(const struct test_daemon *daemon) {
    (void)daemon;
    struct rlimit limit = {48, 48};
    if (setrlimit(RLIMIT_NOFILE, &limit) < 0)
        _exit(125);
}

static void out_of_descriptors_others_are_served_and_later_all(void **state) {
    (void)state;
    struct test_daemon *daemon = daemon_start_prepared(NULL, few_descriptors);
    int first = peer_connect_greeted(daemon->socket, "first"), crowd[60];
    assert_true(first >= 0);
    for (unsigned i = 0; i < 60; i++)
        assert_true((crowd[i] = peer_connect(daemon->socket)) >= 0);
    daemon_log_wait(daemon, "more open files than the process may have"); /* said at start, before anybody comes */
    daemon_log_wait(daemon, "client cannot be accepted");
    assert_true(peer_ping(first));
    for (unsigned i = 0; i < 60; i++)
        close(crowd[i]);
    /* Who comes now waits in the socket's queue until there is room: not longer. */
    int last = -1;
    for (unsigned i = 0; i < 100 && last < 0; i++)
        last = peer_connect_greeted(daemon->socket, "last");
    assert_true(last >= 0);
    assert_true(peer_ping(last));
    assert_true(peer_ping(first));
    close(last);
    close(first);
    daemon_stop(daemon);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_daemon_leaves_nothing_behind),
        cmocka_unit_test(a_daemon_has_room_for_many_descriptors_at_once),
        cmocka_unit_test(a_second_daemon_on_the_same_socket_is_refused),
        cmocka_unit_test(two_daemons_in_two_directories_are_both_fine),
        cmocka_unit_test(a_killed_daemon_is_started_again_without_cleaning_up),
        cmocka_unit_test(what_is_not_a_socket_is_not_touched),
        cmocka_unit_test(a_socket_that_something_else_serves_is_refused),
        cmocka_unit_test(a_missing_directory_is_named),
        cmocka_unit_test(connected_clients_survive_the_loss_of_the_directory),
        cmocka_unit_test(health_is_a_round_trip_through_the_loop),
        cmocka_unit_test(a_full_disk_costs_log_lines_and_nothing_else),
        cmocka_unit_test(hangup_opens_the_log_anew),
        cmocka_unit_test(configuration_errors_exit_with_78_and_usage_with_64),
        cmocka_unit_test(forbidden_io_uring_falls_back_to_epoll_with_one_line),
        cmocka_unit_test(io_uring_that_is_insisted_on_is_an_error_where_it_is_forbidden),
        cmocka_unit_test(out_of_descriptors_others_are_served_and_later_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
