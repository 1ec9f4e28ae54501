/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/worker_process.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define POLL_INTERVAL_NS 1000000 /* between two looks at a condition: short beside every deadline, long beside a look */

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

int line_tell(struct line_pipe *pipe, const char *format, ...) {
    char line[LINE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof(line) - 1, format, arguments);
    va_end(arguments);
    if (length < 0 || (size_t)length >= sizeof(line) - 1)
        return -EMSGSIZE;
    line[length++] = '\n';
    for (int sent = 0; sent < length;) {
        ssize_t n = write(pipe->out, line + sent, (size_t)(length - sent));
        if (n < 0 && errno != EINTR)
            return -errno;
        sent += n < 0 ? 0 : (int)n;
    }
    return 0;
}

int line_hear(struct line_pipe *pipe, char *ret_line, size_t size, int timeout_ms) {
    for (int64_t end = now_ms() + timeout_ms;;) {
        char *newline = memchr(pipe->buffer, '\n', pipe->filled);
        if (newline != NULL) {
            size_t length = (size_t)(newline - pipe->buffer);
            if (length >= size)
                return -EMSGSIZE;
            memcpy(ret_line, pipe->buffer, length);
            ret_line[length] = 0;
            pipe->filled -= length + 1;
            memmove(pipe->buffer, newline + 1, pipe->filled);
            return 0;
        }
        if (pipe->filled == sizeof(pipe->buffer))
            return -EMSGSIZE;
        int64_t left = end - now_ms();
        struct pollfd ready = {.fd = pipe->in, .events = POLLIN};
        int r = poll(&ready, 1, left > 0 ? (int)left : 0);
        if (r < 0)
            return -errno;
        if (r == 0)
            return -ETIMEDOUT;
        ssize_t n = read(pipe->in, pipe->buffer + pipe->filled, sizeof(pipe->buffer) - pipe->filled);
        if (n <= 0)
            return n < 0 ? -errno : -EPIPE;
        pipe->filled += (size_t)n;
    }
}

static void close_both(int fd[2]) {
    close(fd[0]);
    close(fd[1]);
}

/* In the child: the process must not outlive the one that steers it, not even one that died before this line. */
static void die_with(pid_t parent) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(127);
}

/* Forks with a pipe each way: 0 in the parent, 1 in the child, or -errno. */
static int fork_with_pipes(struct worker_process *worker, const char *name) {
    int down[2], up[2];
    memset(worker, 0, sizeof(*worker));
    if (pipe2(down, O_CLOEXEC) < 0)
        return -errno;
    if (pipe2(up, O_CLOEXEC) < 0) {
        int r = -errno;
        close_both(down);
        return r;
    }
    fflush(NULL);
    pid_t parent = getpid(), pid = fork();
    if (pid < 0) {
        int r = -errno;
        close_both(down);
        close_both(up);
        return r;
    }
    worker->name = name;
    if (pid == 0) {
        die_with(parent);
        close(down[1]);
        close(up[0]);
        worker->pipe.in = down[0];
        worker->pipe.out = up[1];
        return 1;
    }
    close(down[0]);
    close(up[1]);
    worker->pid = pid;
    worker->pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    worker->pipe.in = up[0];
    worker->pipe.out = down[1];
    return 0;
}

int worker_start(struct worker_process *worker, const char *name, const char *const argv[]) {
    int r = fork_with_pipes(worker, name);
    if (r <= 0)
        return r;
    if (dup2(worker->pipe.in, STDIN_FILENO) >= 0 && dup2(worker->pipe.out, STDOUT_FILENO) >= 0)
        execv(argv[0], (char *const *)argv); /* const for want of a better prototype: execv does not write */
    fprintf(stderr, "%s: cannot run %s: %s\n", name, argv[0], strerror(errno));
    _exit(127);
}

int worker_fork(struct worker_process *worker, const char *name, int (*body)(struct line_pipe *pipe, void *argument),
                void *argument) {
    int r = fork_with_pipes(worker, name);
    if (r <= 0)
        return r;
    int status = body(&worker->pipe, argument);
    fflush(NULL);
    _exit(status);
}

/* --- a function in a program that begins anew --- */

#define ORDER "OSCAR_TEST_SPAWN" /* in its environment: "body,pipe in,pipe out,argument" */
#define MAX_ARGUMENT 512U

typedef int spawned_body(struct line_pipe *pipe, void *argument);

/* The program lies elsewhere in memory each time: functions are told by their distance from one of them. */
static intptr_t distance_of(spawned_body *body) { return (intptr_t)body - (intptr_t)worker_spawn; }

int worker_spawn(struct worker_process *worker, const char *name, spawned_body *body, const void *argument,
                 size_t bytes) {
    if (bytes > MAX_ARGUMENT)
        return -EMSGSIZE;
    int r = fork_with_pipes(worker, name);
    if (r <= 0)
        return r;
    char order[64 + 2 * MAX_ARGUMENT];
    int length =
        snprintf(order, sizeof(order), "%" PRIdPTR ",%d,%d,", distance_of(body), worker->pipe.in, worker->pipe.out);
    for (size_t i = 0; i < bytes; i++)
        length += snprintf(order + length, sizeof(order) - (size_t)length, "%02x", ((const uint8_t *)argument)[i]);
    char *const argv[] = {(char *)(uintptr_t)name, NULL};
    if (setenv(ORDER, order, 1) == 0 && fcntl(worker->pipe.in, F_SETFD, 0) == 0 &&
        fcntl(worker->pipe.out, F_SETFD, 0) == 0)
        execv("/proc/self/exe", argv);
    fprintf(stderr, "%s: cannot begin anew: %s\n", name, strerror(errno));
    _exit(127);
}

/* Instead of main(). */
__attribute__((constructor)) static void run_spawned(void) {
    const char *order = getenv(ORDER);
    if (order == NULL)
        return;
    static struct line_pipe pipe;
    static _Alignas(16) uint8_t argument[MAX_ARGUMENT];
    intptr_t distance;
    int at = 0;
    if (sscanf(order, "%" SCNdPTR ",%d,%d,%n", &distance, &pipe.in, &pipe.out, &at) != 3 || at == 0)
        _exit(127);
    for (size_t i = 0; i < MAX_ARGUMENT && sscanf(order + at + 2 * i, "%2hhx", &argument[i]) == 1; i++)
        ;
    unsetenv(ORDER);
    spawned_body *body = (spawned_body *)((intptr_t)worker_spawn + distance); /* NOLINT(performance-no-int-to-ptr) */
    int status = body(&pipe, argument);
    fflush(NULL);
    _exit(status);
}

int worker_signal(struct worker_process *worker, int signal) {
    return worker->pid > 0 && kill(worker->pid, signal) == 0 ? 0 : -ESRCH;
}

int worker_wait(struct worker_process *worker, int timeout_ms, int *ret_status) {
    if (worker->pid <= 0)
        return -ECHILD;
    int64_t end = now_ms() + timeout_ms;
    struct pollfd exited = {.fd = worker->pidfd, .events = POLLIN};
    int r;
    do {
        int64_t left = end - now_ms();
        r = poll(&exited, 1, left > 0 ? (int)left : 0);
    } while (r < 0 && errno == EINTR);
    if (r <= 0)
        return r < 0 ? -errno : -ETIMEDOUT;
    int status;
    if (waitpid(worker->pid, &status, 0) != worker->pid)
        return -errno;
    worker->pid = 0;
    if (ret_status != NULL)
        *ret_status = status;
    return 0;
}

void worker_end(struct worker_process *worker) {
    if (worker->name == NULL)
        return;
    if (worker->pid > 0) {
        kill(worker->pid, SIGKILL);
        while (waitpid(worker->pid, NULL, 0) < 0 && errno == EINTR)
            ;
    }
    close(worker->pidfd);
    close(worker->pipe.in);
    close(worker->pipe.out);
    memset(worker, 0, sizeof(*worker));
}

bool wait_until(bool (*condition)(void *argument), void *argument, int timeout_ms) {
    const struct timespec interval = {.tv_nsec = POLL_INTERVAL_NS};
    for (int64_t end = now_ms() + timeout_ms; !condition(argument);) {
        if (now_ms() >= end)
            return false;
        nanosleep(&interval, NULL);
    }
    return true;
}
