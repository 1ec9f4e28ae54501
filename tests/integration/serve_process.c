/* SPDX-License-Identifier: Apache-2.0 */
/* Clients that are processes: stopped, killed, forked. What the kernel says about them counts, not what they say. */
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/support/cmocka_order.h"
#include "tests/support/daemon.h"
#include "tests/support/peer.h"

#define PINGS 500U
#define PATIENCE_MS 30000U

static unsigned baseline; /* descriptors of the daemon before the first client */

static double now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

/* A child that runs `body` and tells `1` through the pipe; then it waits to be killed. */
static pid_t child(void (*body)(const char *path), const char *path) {
    int told[2];
    assert_int_equal(pipe(told), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        body(path);
        if (write(told[1], "1", 1) != 1)
            _exit(1);
        for (;;)
            pause();
    }
    close(told[1]);
    char byte;
    assert_int_equal(read(told[0], &byte, 1), 1);
    close(told[0]);
    return pid;
}

static void end_child(pid_t pid) {
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
}

static void connect_only(const char *path) {
    if (peer_connect(path) < 0)
        _exit(1);
}

static void send_hello_and_stop(const char *path) {
    int fd = peer_connect(path);
    struct oscar_request request = peer_hello_request(1, "stopped");
    if (fd < 0 || !peer_send_request(fd, &request))
        _exit(1);
}

static void connect_and_greet(const char *path) {
    if (peer_connect_greeted(path, "child") < 0)
        _exit(1);
}

static void stopped_peers_mid_handshake_cost_others_nothing(void **state) {
    const struct test_daemon *daemon = *state;
    pid_t stopped[16];
    for (unsigned i = 0; i < 16; i++) {
        stopped[i] = child(i % 2 == 0 ? connect_only : send_hello_and_stop, daemon->socket);
        assert_int_equal(kill(stopped[i], SIGSTOP), 0);
    }
    int fd = peer_connect_greeted(daemon->socket, "at work");
    assert_true(fd >= 0);
    double begin = now_ms(); /* a wait on one of them would have no end */
    for (unsigned i = 0; i < PINGS; i++)
        assert_true(peer_ping(fd));
    print_message("a round trip beside 16 stopped peers takes %.3f ms\n", (now_ms() - begin) / PINGS);
    close(fd);
    for (unsigned i = 0; i < 16; i++)
        end_child(stopped[i]);
}

static void a_killed_client_is_noticed_at_once(void **state) {
    const struct test_daemon *daemon = *state;
    for (unsigned i = 0; i < 10; i++) {
        pid_t pid = child(connect_and_greet, daemon->socket);
        char line[64];
        snprintf(line, sizeof(line), "name=child pid=%d ", (int)pid);
        assert_int_equal(daemon_log_count(daemon, line), 1);
        end_child(pid);
        snprintf(line, sizeof(line), "pid=%d why", (int)pid);
        daemon_log_wait(daemon, line);
    }
    for (unsigned i = 0; i < PATIENCE_MS && daemon_descriptors(daemon) > baseline; i++)
        poll(NULL, 0, 1);
    assert_true(daemon_descriptors(daemon) <= baseline);
}

/* Connects, then forks a child that keeps the socket. */
static void greet_and_leave_a_child(const char *path) {
    if (peer_connect_greeted(path, "parent") < 0)
        _exit(1);
    pid_t grandchild = fork();
    if (grandchild == 0) {
        (void)prctl(PR_SET_PDEATHSIG, 0);
        (void)alarm(20); /* should the test die */
        for (;;)
            pause();
    }
}

static void a_forked_child_that_holds_the_socket_does_not_keep_its_parent_alive(void **state) {
    const struct test_daemon *daemon = *state;
    (void)prctl(PR_SET_CHILD_SUBREAPER, 1);
    pid_t pid = child(greet_and_leave_a_child, daemon->socket);
    end_child(pid);
    char line[64];
    snprintf(line, sizeof(line), "pid=%d why=\"its process has exited\"", (int)pid);
    daemon_log_wait(daemon, line);
    /* The grandchild is ours now. */
    char command[64];
    snprintf(command, sizeof(command), "/proc/self/task/%d/children", (int)getpid());
    FILE *file = fopen(command, "re");
    assert_non_null(file);
    for (int grandchild; fscanf(file, "%d", &grandchild) == 1;)
        if (grandchild != daemon->pid) {
            (void)kill(grandchild, SIGKILL);
            (void)waitpid(grandchild, NULL, 0);
        }
    fclose(file);
}

static void a_client_that_is_silent_is_left_alone(void **state) {
    const struct test_daemon *daemon = *state;
    int fd = peer_connect_greeted(daemon->socket, "silent");
    assert_true(fd >= 0);
    for (unsigned i = 0; i < 50; i++) {
        int other = peer_connect_greeted(daemon->socket, "busy");
        assert_true(other >= 0);
        close(other);
    }
    assert_true(peer_ping(fd));
    close(fd);
}

static int start(void **state) {
    *state = daemon_start(NULL);
    baseline = daemon_descriptors(*state);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stopped_peers_mid_handshake_cost_others_nothing),
        cmocka_unit_test(a_killed_client_is_noticed_at_once),
        cmocka_unit_test(a_forked_child_that_holds_the_socket_does_not_keep_its_parent_alive),
        cmocka_unit_test(a_client_that_is_silent_is_left_alone),
    };
    return cmocka_run_group_tests(tests, start, daemon_teardown);
}
