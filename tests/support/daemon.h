/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A real oscard for a test: started in a private directory under /tmp, killed with the test. The event loop's engine
 * follows OSCARD_DAEMON_IO_ENGINE, so a suite runs under either; $OSCAR_TEST_OSCARD is started in its place where it is set. What goes
 * wrong here ends the test program with a message.
 */
#ifndef OSCAR_TESTS_SUPPORT_DAEMON_H
#define OSCAR_TESTS_SUPPORT_DAEMON_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

struct test_daemon {
    char base[64];                          /* the private directory */
    char directory[72];                     /* its runtime directory: where the sockets are */
    char socket[96], admin[96], events[96]; /* paths; the last two are nanomsg ipc sockets */
    char log[72];                           /* the daemon's stderr */
    pid_t pid;
    int pidfd;
    int notify; /* where it says that it is ready */
    const char *const *extra_args;
    void (*before_exec)(const struct test_daemon *daemon); /* called in the child, after fork; NULL */
};

/* The backend that daemons of tests run on: $OSCAR_TEST_BACKEND, else "host". */
const char *daemon_backend(void);

/* Starts the daemon and returns when it has said that it is ready. `extra_args` (flags, NULL at the end; or NULL)
 * outlive it. The budget is 256 MiB and the backend daemon_backend() unless they say otherwise. */
struct test_daemon *daemon_start(const char *const *extra_args);
struct test_daemon *daemon_start_prepared(const char *const *extra_args,
                                          void (*before_exec)(const struct test_daemon *daemon));

/* SIGTERM; the exit status must be 0 and the runtime directory empty. Frees it. */
void daemon_stop(struct test_daemon *daemon);

/* SIGTERM; returns the status as waitpid() has it. */
int daemon_terminate(struct test_daemon *daemon);
/* The same for one that ends by itself. */
int daemon_await_exit(struct test_daemon *daemon);

/* Both as a cmocka test's or group's setup and teardown: its state is the daemon, started without extra arguments. */
int daemon_setup(void **state);
int daemon_teardown(void **state);

/* Stops it until daemon_resume(); when the first returns, it stands still in all its threads. */
void daemon_pause(const struct test_daemon *daemon);
void daemon_resume(const struct test_daemon *daemon);

/* SIGKILL, and wait; then again from the same directory. */
void daemon_kill(struct test_daemon *daemon);
void daemon_start_again(struct test_daemon *daemon);

/* The log so far, to be freed; and how often a text is in it. */
char *daemon_log(const struct test_daemon *daemon);
unsigned daemon_log_count(const struct test_daemon *daemon, const char *text);
/* Waits (up to 30 s) until the log holds a text. */
void daemon_log_wait(const struct test_daemon *daemon, const char *text);
/* Open descriptors of the daemon. */
unsigned daemon_descriptors(const struct test_daemon *daemon);

/* Runs oscard to its end with these arguments and returns its exit status; stdout and stderr (cut) into `ret_output`.
 * */
int daemon_run(const char *const *args, char *ret_output, size_t capacity);

#endif
