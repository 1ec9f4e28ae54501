/* SPDX-License-Identifier: Apache-2.0 */
/* oscard: puts the parts together, in order, and takes them apart in reverse. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sysexits.h>
#include <unistd.h>

#include "oscar/device.h"

#include "daemon/config.h"
#include "daemon/log.h"
#include "daemon/loop.h"
#include "daemon/notify.h"
#include "daemon/serve/serve.h"
#include "proto/cleanup.h"
#include "proto/version.h"

#define DESCRIPTORS_AHEAD 4096U /* places in the process's table of them, 8 bytes each */

struct daemon {
    struct config *config;
    struct loop *loop;
    const struct oscar_device_ops *ops;
    struct oscar_device *device;
    struct serve *serve;
    int signals;
    struct loop_source *signal_watch, *watchdog;
    uint64_t watchdog_ns;
};

/* What --help says about the exit status. */
static const struct {
    int error, status;
} exit_statuses[] = {
    {OSCAR_ERR_INVALID, EX_USAGE},         {OSCAR_ERR_CONFIG, EX_CONFIG},
    {OSCAR_ERR_BUSY, EX_TEMPFAIL},         {OSCAR_ERR_UNSUPPORTED, EX_UNAVAILABLE},
    {OSCAR_ERR_NOT_FOUND, EX_UNAVAILABLE}, {OSCAR_ERR_DEVICE, EX_UNAVAILABLE},
    {OSCAR_ERR_IO, EX_CANTCREAT},
};

static int exit_status(int error) {
    for (size_t i = 0; i < sizeof(exit_statuses) / sizeof(exit_statuses[0]); i++)
        if (exit_statuses[i].error == error)
            return exit_statuses[i].status;
    return EX_SOFTWARE;
}

static void signal_ready(void *arg) {
    struct daemon *daemon = arg;
    struct signalfd_siginfo info;
    while (read(daemon->signals, &info, sizeof(info)) == sizeof(info)) {
        if (info.ssi_signo == SIGHUP) {
            struct oscar_cause cause = {0};
            int r = log_reopen(&cause);
            if (r < 0)
                log_warning("log file cannot be opened anew", log_failure(r, &cause));
            continue;
        }
        log_info("stopping", log_text("signal", strsignal((int)info.ssi_signo)), log_number("sender", info.ssi_pid));
        notify_send("STOPPING=1");
        serve_drain(daemon->serve);
    }
}

static void watchdog_due(void *arg) {
    struct daemon *daemon = arg;
    notify_send("WATCHDOG=1"); /* from the loop: it proves that requests are being answered */
    loop_timer_set(daemon->loop, daemon->watchdog, loop_now_ns(daemon->loop) + daemon->watchdog_ns / 2);
}

/* Descriptors: a few a client, one a chunk, and copies of those while they are announced. Their table is grown before there are threads:
 * with them the kernel waits for an RCU grace period each time, 10 ms and more, which the loop would stand still. */
static void make_room_for_descriptors(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
        return;
    limit.rlim_cur = limit.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &limit);
    rlim_t places = limit.rlim_cur < DESCRIPTORS_AHEAD ? limit.rlim_cur : DESCRIPTORS_AHEAD;
    int last = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, (int)places - 1);
    if (last >= 0)
        close(last);
}

static void set_limits(void) {
    make_room_for_descriptors();
    (void)prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL,
                0UL); /* fences are looked at every 50 us: as much again would be added */
}

/* Before any thread is started, so that signals come to the loop and nowhere else. */
static int open_signals(struct daemon *daemon, struct oscar_cause *cause) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGHUP);
    (void)signal(SIGPIPE, SIG_IGN);
    if (sigprocmask(SIG_BLOCK, &set, NULL) < 0)
        return oscar_fail(cause, OSCAR_ERR_INTERNAL, "sigprocmask: %m");
    daemon->signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (daemon->signals < 0)
        return oscar_fail(cause, OSCAR_ERR_INTERNAL, "signalfd: %m");
    return 0;
}

static int watch(struct daemon *daemon, struct oscar_cause *cause) {
    int r = loop_watch(daemon->loop, daemon->signals, signal_ready, daemon, &daemon->signal_watch);
    daemon->watchdog_ns = notify_watchdog_ns();
    if (r == 0 && daemon->watchdog_ns > 0) {
        r = loop_timer(daemon->loop, watchdog_due, daemon, &daemon->watchdog);
        if (r == 0)
            loop_timer_set(daemon->loop, daemon->watchdog, loop_now_ns(daemon->loop));
    }
    return r < 0 ? oscar_fail(cause, r, "signals cannot be watched: %s", oscar_error_text(r)) : 0;
}

/* What of the device's memory the cache may take. Others use a GPU, too: that little is free now is worth a line, no more. */
static int budget_bytes(const struct daemon *daemon, uint64_t *ret, uint64_t *ret_total, struct oscar_cause *cause) {
    const struct config *config = daemon->config;
    bool gpu = daemon->ops != oscar_device_host() && (config->gpu_memory.bytes > 0 || config->gpu_memory.percent > 0);
    const struct config_size *size = gpu ? &config->gpu_memory : &config->budget;
    uint64_t unused, total;
    int r = daemon->ops->memory_info(daemon->device, &unused, &total, cause);
    if (r < 0)
        return r;
    uint64_t bytes = config_size_bytes(size, total);
    if (bytes > total)
        return oscar_fail(cause, OSCAR_ERR_CONFIG, "[memory] %s of %" PRIu64 " bytes: %s has %" PRIu64 ": lower it",
                          gpu ? "gpu_memory" : "budget", bytes, daemon->ops->device_id(daemon->device), total);
    if (bytes > unused && daemon->ops != oscar_device_host())
        log_warning("less of the device's memory is free than the cache may take",
                    log_number("free_bytes", (int64_t)unused), log_number("budget_bytes", (int64_t)bytes));
    *ret = bytes;
    *ret_total = total;
    return 0;
}

/* Finds the device and looks whether sharing its memory works: better known now than by the first worker. */
static int open_device(struct daemon *daemon, struct oscar_cause *cause) {
    const struct config *config = daemon->config;
    const struct oscar_device_options options = {.id = config->device, .share = (enum oscar_share)config->share};
    int r = oscar_device_find(config->backend, &daemon->ops, cause);
    if (r < 0)
        return r;
    if (cause->text[0] != '\0')
        log_info("no GPU is used", log_text("cause", cause->text));
    cause->text[0] = '\0';
    r = daemon->ops->device_open(&options, &daemon->device, cause);
    return r < 0 ? r : daemon->ops->self_test(daemon->device, cause);
}

static void tell_device(const struct daemon *daemon, uint64_t total) {
    log_info("device", log_text("summary", daemon->ops->device_summary(daemon->device)),
             log_text("id", daemon->ops->device_id(daemon->device)), log_number("memory_bytes", (int64_t)total));
    if (daemon->ops->device_share(daemon->device) == OSCAR_SHARE_IPC)
        log_warning("workers get the GPU's memory by IPC handles: a stray write of theirs reaches pages of others, and "
                    "the memory dies "
                    "with the daemon");
}

/* Better said now than when a client or a chunk is refused. */
static void tell_descriptors(const struct serve_options *options) {
    struct rlimit limit;
    uint64_t needed = serve_descriptors(options);
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < needed)
        log_warning("all clients and chunks that are configured need more open files than the process may have",
                    log_number("limit", (int64_t)limit.rlim_cur), log_number("needed", (int64_t)needed),
                    log_text("remedy", "raise LimitNOFILE= or ulimit -Hn, or lower [limits] clients"));
}

static void tell_ready(const struct daemon *daemon, uint64_t budget) {
    log_info("ready", log_text("version", OSCAR_VERSION_STRING), log_text("socket", daemon->config->socket),
             log_text("backend", daemon->ops->device_summary(daemon->device)),
             log_number("budget_bytes", (int64_t)budget), log_text("io_engine", loop_engine_name(daemon->loop)));
    char state[512];
    snprintf(state, sizeof(state), "READY=1\nSTATUS=serving %s", daemon->config->socket);
    notify_send(state);
}

static int start(struct daemon *daemon, struct oscar_cause *cause) {
    const struct config *config = daemon->config;
    set_limits();
    int r = log_open((enum log_level)config->log_level, (enum log_format)config->log_format, config->log_file, cause);
    if (r == 0)
        r = open_signals(daemon, cause);
    if (r == 0)
        r = loop_new((enum loop_engine)config->io_engine, &daemon->loop, cause);
    if (r == 0)
        r = open_device(daemon, cause);
    uint64_t budget = 0, total = 0;
    if (r == 0)
        r = budget_bytes(daemon, &budget, &total, cause);
    if (r < 0)
        return r;
    tell_device(daemon, total);
    struct serve_options options = {
        .loop = daemon->loop,
        .config = config,
        .ops = daemon->ops,
        .device = daemon->device,
        .budget_bytes = budget,
        .device_bytes = total,
    };
    tell_descriptors(&options);
    r = serve_new(&options, &daemon->serve, cause);
    if (r == 0)
        r = watch(daemon, cause);
    if (r == 0)
        tell_ready(daemon, budget);
    return r;
}

static void end_at_once(int signal) {
    (void)signal;
    _exit(EX_OSERR);
}

static void stop(struct daemon *daemon) {
    /* What the device has begun is waited for, but no longer than while serving. */
    if (signal(SIGALRM, end_at_once) != SIG_ERR)
        (void)alarm((unsigned)daemon->config->watchdog_seconds);
    if (daemon->loop != NULL) {
        loop_remove(daemon->loop, daemon->signal_watch);
        loop_remove(daemon->loop, daemon->watchdog);
    }
    serve_free(daemon->serve);
    if (daemon->device != NULL)
        daemon->ops->device_close(daemon->device);
    loop_free(daemon->loop);
    if (daemon->signals >= 0)
        close(daemon->signals);
    log_close();
    config_free(daemon->config);
}

static int print(enum config_action action) {
    if (action == CONFIG_HELP)
        config_print_help(stdout);
    else if (action == CONFIG_PRINT)
        config_print_sample(stdout);
    else
        printf("oscard " OSCAR_VERSION_STRING ", protocol %u.%u\n", OSCAR_PROTOCOL_MAJOR, OSCAR_PROTOCOL_MINOR);
    return fflush(stdout) == 0 ? EXIT_SUCCESS : EX_IOERR;
}

int main(int argc, char *argv[]) {
    struct daemon daemon = {.signals = -1};
    struct oscar_cause cause = {0};
    enum config_action action;
    int r = config_load(argc, argv, environ, &daemon.config, &action, &cause);
    if (r < 0) {
        log_error("cannot start", log_failure(r, &cause));
        return exit_status(r);
    }
    if (daemon.config == NULL)
        return print(action);
    if (action == CONFIG_CHECK) {
        config_print_effective(daemon.config, stdout);
        config_free(daemon.config);
        return fflush(stdout) == 0 ? EXIT_SUCCESS : EX_IOERR;
    }
    r = start(&daemon, &cause);
    if (r < 0)
        log_error("cannot start", log_failure(r, &cause));
    if (r == 0) {
        r = loop_run(daemon.loop, &cause);
        if (r < 0)
            log_error("the event loop failed", log_failure(r, &cause));
    }
    if (r == 0 && serve_has_failed(daemon.serve)) {
        /* No way back: a thread may be in a call that does not return. Whatever was being written is gone with the process. */
        serve_abandon(daemon.serve);
        log_close();
        _exit(EX_OSERR);
    }
    if (r == 0)
        log_info("stopped");
    stop(&daemon);
    return r == 0 ? EXIT_SUCCESS : exit_status(r);
}
