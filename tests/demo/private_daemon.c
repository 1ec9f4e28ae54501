/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/demo/private_daemon.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define READY_MS 20000
#define STOP_MS 20000
#define OUTPUT_BYTES (256U << 10)

struct launch {
    const struct private_daemon *daemon;
    const char *config, *log;
};

static int complain(const char *what, const char *which) {
    fprintf(stderr, "%s: %s %s: %s\n", program_invocation_short_name, what, which, strerror(errno));
    return -1;
}

static void path_in(const struct private_daemon *daemon, const char *name, char ret_path[96]) {
    snprintf(ret_path, 96, "%s/%s", daemon->directory, name);
}

static int write_config(const struct private_daemon *daemon, const char *path) {
    FILE *file = fopen(path, "we");
    if (file == NULL)
        return complain("cannot write", path);
    fprintf(file, "[daemon]\nruntime_dir = %s\n%s", daemon->directory,
            daemon->settings != NULL ? daemon->settings : "");
    return fclose(file) == 0 ? 0 : complain("cannot write", path);
}

static int run_daemon(struct line_pipe *pipe, void *argument) {
    const struct launch *launch = argument;
    const struct private_daemon *daemon = launch->daemon;
    (void)pipe;
    int log = open(launch->log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (log >= 0 && dup2(log, STDOUT_FILENO) >= 0 && dup2(log, STDERR_FILENO) >= 0)
        execl(daemon->oscard, daemon->oscard, "--config", launch->config, (char *)NULL);
    return 127;
}

static void show_log(const struct private_daemon *daemon) {
    char path[96], line[512];
    path_in(daemon, "log", path);
    FILE *log = fopen(path, "re");
    while (log != NULL && fgets(line, sizeof(line), log) != NULL)
        fprintf(stderr, "  %s", line);
    if (log != NULL)
        fclose(log);
}

/* The daemon's end of the systemd readiness protocol: one datagram that holds READY=1. */
static int open_notify(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof(address)) < 0) {
        complain("cannot listen on", path);
        close(fd);
        return -1;
    }
    return fd;
}

static int wait_ready(const struct private_daemon *daemon, int notify) {
    struct pollfd events[2] = {{.fd = notify, .events = POLLIN}, {.fd = daemon->process.pidfd, .events = POLLIN}};
    for (;;) {
        int r = poll(events, 2, READY_MS);
        if (r <= 0 || events[1].revents != 0) {
            fprintf(stderr, "%s: %s\n", program_invocation_short_name,
                    r == 0  ? "the daemon does not become ready"
                    : r < 0 ? "interrupted"
                            : "the daemon has ended");
            show_log(daemon);
            return -1;
        }
        char message[512];
        ssize_t length = recv(notify, message, sizeof(message) - 1, 0);
        if (length > 0) {
            message[length] = 0;
            if (strstr(message, "READY=1") != NULL)
                return 0;
        }
    }
}

static int make_directory(struct private_daemon *daemon) {
    const char *base = getenv("TMPDIR");
    int length =
        snprintf(daemon->directory, sizeof(daemon->directory), "%s/oscar-XXXXXX", base != NULL ? base : "/tmp");
    if (length >= (int)sizeof(daemon->directory) || mkdtemp(daemon->directory) == NULL) {
        daemon->directory[0] = 0;
        return complain("cannot make a directory in", base != NULL ? base : "/tmp");
    }
    path_in(daemon, "worker.sock", daemon->socket);
    path_in(daemon, "admin.ipc", daemon->admin_socket);
    return 0;
}

int private_daemon_start(struct private_daemon *daemon) {
    char config[96], log[96], notify_path[96];
    if (make_directory(daemon) < 0)
        return -1;
    path_in(daemon, "oscard.conf", config);
    path_in(daemon, "log", log);
    path_in(daemon, "notify", notify_path);
    if (write_config(daemon, config) < 0)
        return -1;
    int notify = open_notify(notify_path);
    if (notify < 0)
        return -1;
    setenv("NOTIFY_SOCKET", notify_path, 1);
    struct launch launch = {daemon, config, log};
    int r = worker_fork(&daemon->process, "oscard", run_daemon, &launch);
    unsetenv("NOTIFY_SOCKET");
    if (r < 0) {
        errno = -r;
        complain("cannot start", daemon->oscard);
    } else {
        r = wait_ready(daemon, notify);
    }
    close(notify);
    if (r < 0)
        worker_end(&daemon->process);
    return r < 0 ? -1 : 0;
}

int private_daemon_stop(struct private_daemon *daemon) {
    int status = -1;
    if (daemon->process.pid == 0)
        return -1; /* it never started, and that was said */
    if (worker_signal(&daemon->process, SIGTERM) == 0 && worker_wait(&daemon->process, STOP_MS, &status) == 0 &&
        WIFEXITED(status) && WEXITSTATUS(status) == 0) {
        worker_end(&daemon->process);
        return 0;
    }
    fprintf(stderr, "%s: the daemon did not end well on SIGTERM (status %#x)\n", program_invocation_short_name, status);
    show_log(daemon);
    return -1;
}

/* The directory is flat: configuration, log and sockets. */
static void remove_directory(const char *path) {
    DIR *directory = opendir(path);
    if (directory == NULL)
        return;
    for (const struct dirent *entry; (entry = readdir(directory)) != NULL;) {
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            unlinkat(dirfd(directory), entry->d_name, 0);
    }
    closedir(directory);
    if (rmdir(path) < 0)
        complain("cannot remove", path);
}

void private_daemon_end(struct private_daemon *daemon) {
    worker_end(&daemon->process);
    if (daemon->directory[0] != 0)
        remove_directory(daemon->directory);
    daemon->directory[0] = 0;
}

static ssize_t read_all(int fd, char *output, size_t size) {
    size_t filled = 0;
    for (;;) {
        if (filled == size - 1)
            return -1;
        ssize_t n = read(fd, output + filled, size - 1 - filled);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            output[filled] = 0;
            return n < 0 ? -1 : (ssize_t)filled;
        }
        filled += (size_t)n;
    }
}

int private_daemon_ctl(struct private_daemon *daemon, const char *verb, const char *option, char *ret_output,
                       size_t size) {
    const char *argv[] = {daemon->oscarctl, "--socket", daemon->admin_socket, verb, option, NULL};
    struct worker_process ctl;
    int status, r = worker_start(&ctl, "oscarctl", argv);
    if (r < 0) {
        errno = -r;
        return complain("cannot run", daemon->oscarctl);
    }
    if (read_all(ctl.pipe.in, ret_output, size) < 0 || worker_wait(&ctl, STOP_MS, &status) < 0 || status != 0) {
        fprintf(stderr, "%s: oscarctl %s failed\n", program_invocation_short_name, verb);
        r = -1;
    }
    worker_end(&ctl);
    return r;
}

json_t *private_daemon_stats(struct private_daemon *daemon) {
    char *output = malloc(OUTPUT_BYTES);
    json_t *stats = NULL;
    if (output != NULL && private_daemon_ctl(daemon, "stats", "--json", output, OUTPUT_BYTES) == 0) {
        json_error_t error;
        stats = json_loads(output, 0, &error);
        if (stats == NULL)
            fprintf(stderr, "%s: oscarctl stats --json: %s\n", program_invocation_short_name, error.text);
    }
    free(output);
    return stats;
}

int64_t private_daemon_metric(const json_t *stats, const char *name) {
    const json_t *value = json_object_get(stats, name);
    return json_is_integer(value) ? (int64_t)json_integer_value(value) : -1;
}
