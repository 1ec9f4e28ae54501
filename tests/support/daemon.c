/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/daemon.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/descriptors.h"

#define OSCARD OSCAR_BUILD_DIR "/daemon/oscard"
#define DEADLINE_MS 30000 /* of a start, a stop or a line of the log on a busy machine, with sanitizers */
#define MAX_ARGS 64

#define DIE(...) die(__FILE__, __LINE__, __VA_ARGS__)
__attribute__((noreturn, format(printf, 3, 4))) static void die(const char *file, int line, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "%s:%d: ", file, line);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    abort();
}

static bool wait_readable(int fd, int timeout_ms) {
    struct pollfd state = {.fd = fd, .events = POLLIN};
    int r;
    do
        r = poll(&state, 1, timeout_ms);
    while (r < 0 && errno == EINTR);
    return r == 1;
}

static void open_notify(struct test_daemon *daemon) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof(address.sun_path), "%.60s/notify", daemon->base);
    daemon->notify = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (daemon->notify < 0 || bind(daemon->notify, (struct sockaddr *)&address, sizeof(address)) < 0)
        DIE("notify socket: %m");
}

const char *daemon_backend(void) {
    const char *backend = getenv("OSCAR_TEST_BACKEND");
    return backend != NULL && backend[0] != '\0' ? backend : "host";
}

__attribute__((noreturn)) static void exec_daemon(const struct test_daemon *daemon) {
    const char *program = getenv("OSCAR_TEST_OSCARD") != NULL ? getenv("OSCAR_TEST_OSCARD") : OSCARD;
    const char *args[MAX_ARGS] = {program,     "--daemon-runtime-dir", daemon->directory, "--budget", "256M",
                                  "--backend", daemon_backend()};
    size_t count = 7;
    for (const char *const *extra = daemon->extra_args; extra != NULL && *extra != NULL && count < MAX_ARGS - 1;
         extra++)
        args[count++] = *extra;
    char notify[80];
    snprintf(notify, sizeof(notify), "%s/notify", daemon->base);
    setenv("NOTIFY_SOCKET", notify, 1);
    unsetenv("JOURNAL_STREAM");
    int log = open(daemon->log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (log < 0 || dup2(log, STDERR_FILENO) < 0)
        _exit(126);
    close(log);
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (daemon->before_exec != NULL)
        daemon->before_exec(daemon);
    execv(program, (char *const *)(void *)args);
    _exit(127);
}

static void show_log(const struct test_daemon *daemon) {
    char *log = daemon_log(daemon);
    fprintf(stderr, "%s", log);
    free(log);
}

static void launch(struct test_daemon *daemon) {
    pid_t pid = fork();
    if (pid < 0)
        DIE("fork: %m");
    if (pid == 0)
        exec_daemon(daemon);
    daemon->pid = pid;
    daemon->pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (daemon->pidfd < 0)
        DIE("pidfd_open: %m");
    char state[512] = "";
    struct pollfd states[] = {{.fd = daemon->notify, .events = POLLIN}, {.fd = daemon->pidfd, .events = POLLIN}};
    while (strstr(state, "READY=1") == NULL) {
        int r = poll(states, 2, DEADLINE_MS);
        if (r < 0 && errno == EINTR)
            continue;
        if (r <= 0 || (states[0].revents & POLLIN) == 0) {
            show_log(daemon);
            DIE(r <= 0 ? "the daemon does not become ready" : "the daemon exited before it was ready");
        }
        ssize_t length = recv(daemon->notify, state, sizeof(state) - 1, 0);
        state[length > 0 ? length : 0] = '\0';
    }
}

struct test_daemon *daemon_start_prepared(const char *const *extra_args,
                                          void (*before_exec)(const struct test_daemon *daemon)) {
    struct test_daemon *daemon = calloc(1, sizeof(*daemon));
    if (daemon == NULL)
        DIE("no memory");
    snprintf(daemon->base, sizeof(daemon->base), "/tmp/oscard-test-XXXXXX");
    if (mkdtemp(daemon->base) == NULL)
        DIE("mkdtemp: %m");
    snprintf(daemon->directory, sizeof(daemon->directory), "%s/run", daemon->base);
    snprintf(daemon->socket, sizeof(daemon->socket), "%s/worker.sock", daemon->directory);
    snprintf(daemon->admin, sizeof(daemon->admin), "%s/admin.ipc", daemon->directory);
    snprintf(daemon->events, sizeof(daemon->events), "%s/events.ipc", daemon->directory);
    snprintf(daemon->log, sizeof(daemon->log), "%s/log", daemon->base);
    daemon->extra_args = extra_args;
    daemon->before_exec = before_exec;
    open_notify(daemon);
    launch(daemon);
    return daemon;
}

struct test_daemon *daemon_start(const char *const *extra_args) {
    return daemon_start_prepared(extra_args, NULL);
}

int daemon_await_exit(struct test_daemon *daemon) {
    if (!wait_readable(daemon->pidfd, DEADLINE_MS)) {
        show_log(daemon);
        DIE("the daemon does not exit");
    }
    int status = 0;
    if (waitpid(daemon->pid, &status, 0) != daemon->pid)
        DIE("waitpid: %m");
    close(daemon->pidfd);
    daemon->pid = 0;
    daemon->pidfd = -1;
    return status;
}

/* The name of some entry of a directory, or an empty text. */
static void first_entry(const char *directory, char *ret_name, size_t capacity) {
    ret_name[0] = '\0';
    DIR *stream = opendir(directory);
    for (struct dirent *entry; stream != NULL && (entry = readdir(stream)) != NULL;)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            snprintf(ret_name, capacity, "%s", entry->d_name);
    if (stream != NULL)
        closedir(stream);
}

static void remove_flat(const char *directory) {
    char name[256], path[512];
    for (first_entry(directory, name, sizeof(name)); name[0] != '\0'; first_entry(directory, name, sizeof(name))) {
        snprintf(path, sizeof(path), "%s/%s", directory, name);
        if (unlink(path) < 0 && rmdir(path) < 0)
            break;
    }
    (void)rmdir(directory);
}

int daemon_terminate(struct test_daemon *daemon) {
    if (kill(daemon->pid, SIGTERM) < 0)
        DIE("kill: %m");
    return daemon_await_exit(daemon);
}

void daemon_stop(struct test_daemon *daemon) {
    if (daemon->pid > 0) {
        int status = daemon_terminate(daemon);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
            show_log(daemon);
            DIE("the daemon ended with status 0x%x", status);
        }
        char name[256];
        first_entry(daemon->directory, name, sizeof(name));
        if (name[0] != '\0')
            DIE("the daemon left %s in its directory", name);
    }
    close(daemon->notify);
    remove_flat(daemon->directory);
    remove_flat(daemon->base);
    free(daemon);
}

int daemon_setup(void **state) {
    *state = daemon_start(NULL);
    return 0;
}

int daemon_teardown(void **state) {
    daemon_stop(*state);
    return 0;
}

void daemon_pause(const struct test_daemon *daemon) {
    int status;
    if (kill(daemon->pid, SIGSTOP) < 0 || waitpid(daemon->pid, &status, WUNTRACED) != daemon->pid ||
        !WIFSTOPPED(status))
        DIE("the daemon does not stop: %m");
}

void daemon_resume(const struct test_daemon *daemon) {
    if (kill(daemon->pid, SIGCONT) < 0)
        DIE("kill: %m");
}

void daemon_kill(struct test_daemon *daemon) {
    if (kill(daemon->pid, SIGKILL) < 0)
        DIE("kill: %m");
    (void)daemon_await_exit(daemon);
}

void daemon_start_again(struct test_daemon *daemon) { launch(daemon); }

char *daemon_log(const struct test_daemon *daemon) {
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes), *in = fopen(daemon->log, "re");
    if (out == NULL)
        DIE("no memory");
    for (int c; in != NULL && (c = fgetc(in)) != EOF;)
        fputc(c, out);
    if (in != NULL)
        fclose(in);
    fclose(out);
    return text;
}

unsigned daemon_log_count(const struct test_daemon *daemon, const char *text) {
    char *log = daemon_log(daemon);
    unsigned count = 0;
    for (const char *at = log; (at = strstr(at, text)) != NULL; at += strlen(text))
        count++;
    free(log);
    return count;
}

void daemon_log_wait(const struct test_daemon *daemon, const char *text) {
    int events = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    if (events < 0 || inotify_add_watch(events, daemon->log, IN_MODIFY) < 0)
        DIE("inotify: %m");
    while (daemon_log_count(daemon, text) == 0) {
        char buffer[4096];
        if (!wait_readable(events, DEADLINE_MS)) {
            show_log(daemon);
            DIE("the daemon does not log \"%s\"", text);
        }
        while (read(events, buffer, sizeof(buffer)) > 0)
            ;
    }
    close(events);
}

unsigned daemon_descriptors(const struct test_daemon *daemon) { return descriptors_of(daemon->pid); }

int daemon_run(const char *const *args, char *ret_output, size_t capacity) {
    int output[2];
    if (pipe2(output, O_CLOEXEC) < 0)
        DIE("pipe: %m");
    pid_t pid = fork();
    if (pid < 0)
        DIE("fork: %m");
    if (pid == 0) {
        const char *all[MAX_ARGS] = {OSCARD};
        for (size_t i = 0; args[i] != NULL && i < MAX_ARGS - 2; i++)
            all[i + 1] = args[i];
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        unsetenv("NOTIFY_SOCKET");
        unsetenv("JOURNAL_STREAM");
        if (dup2(output[1], STDOUT_FILENO) < 0 || dup2(output[1], STDERR_FILENO) < 0)
            _exit(126);
        execv(OSCARD, (char *const *)(void *)all);
        _exit(127);
    }
    close(output[1]);
    size_t used = 0;
    char rest[4096];
    for (;;) {
        bool full = used + 1 >= capacity;
        ssize_t length = read(output[0], full ? rest : ret_output + used, full ? sizeof(rest) : capacity - 1 - used);
        if (length <= 0)
            break;
        used += full ? 0 : (size_t)length;
    }
    ret_output[used] = '\0';
    close(output[0]);
    int status = 0;
    if (waitpid(pid, &status, 0) != pid)
        DIE("waitpid: %m");
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
