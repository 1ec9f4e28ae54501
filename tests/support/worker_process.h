/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Another process that a test or the demo steers by lines of text: a program, or a function of the test itself.
 * It dies with its parent (PR_SET_PDEATHSIG) and is reaped by worker_end(), however the test went.
 */
#ifndef OSCAR_TESTS_SUPPORT_WORKER_PROCESS_H
#define OSCAR_TESTS_SUPPORT_WORKER_PROCESS_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#define LINE_BYTES 8192U

/* Both ends of a conversation in lines. */
struct line_pipe {
    int in, out;
    size_t filled;
    char buffer[LINE_BYTES];
};

/* Sends one line (the newline is added). 0 or -errno. */
__attribute__((format(printf, 2, 3))) int line_tell(struct line_pipe *pipe, const char *format, ...);
/* The next line without its newline. 0, -ETIMEDOUT, -EINTR (a signal came), -EPIPE at the end, -EMSGSIZE. */
int line_hear(struct line_pipe *pipe, char *ret_line, size_t size, int timeout_ms);

struct worker_process {
    const char *name;
    pid_t pid; /* 0: none */
    int pidfd;
    struct line_pipe pipe;
};

/* Runs argv[0] with the line pipe as its standard input and output. 0 or -errno. */
int worker_start(struct worker_process *worker, const char *name, const char *const argv[]);
/* Runs body(pipe, argument) in a child of the calling (single-threaded) process; its result is the exit status. */
int worker_fork(struct worker_process *worker, const char *name, int (*body)(struct line_pipe *pipe, void *argument),
                void *argument);
/* The same in a process that begins anew, with this program: one that uses a GPU cannot do so after fork(). It gets a copy of the
 * argument, `bytes` bytes without pointers. */
int worker_spawn(struct worker_process *worker, const char *name, int (*body)(struct line_pipe *pipe, void *argument),
                 const void *argument, size_t bytes);
int worker_signal(struct worker_process *worker, int signal);
/* Waits for the exit and reaps: 0 with the status of waitpid(), -ETIMEDOUT, -ECHILD. */
int worker_wait(struct worker_process *worker, int timeout_ms, int *ret_status);
/* Kills the process if it still runs, reaps it, closes the pipe. Fine for a worker that never started (all zero). */
void worker_end(struct worker_process *worker);

/* Asks again and again until condition(argument) holds; false after timeout_ms. For what no event tells. */
bool wait_until(bool (*condition)(void *argument), void *argument, int timeout_ms);

#endif
