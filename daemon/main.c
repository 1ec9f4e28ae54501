/* SPDX-License-Identifier: Apache-2.0 */
/* oscard: puts the parts together, in order, and takes them apart in reverse. */
#include <errno.h>
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
    {OSCAR_ERR_INVALID, EX_USAGE},           {OSCAR_ERR_CONFIG, EX_CONFIG},      {OSCAR_ERR_BUSY, EX_TEMPFAIL},
    {OSCAR_ERR_UNSUPPORTED, EX_UNAVAILABLE}, {OSCAR_ERR_DEVICE, EX_UNAVAILABLE}, {OSCAR_ERR_IO, EX_CANTCREAT},
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

static void set_limits(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max; /* descriptors: a few a client, one a chunk */
        (void)setrlimit(RLIMIT_NOFILE, &limit);
    }
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

static uint64_t budget_bytes(const struct config *config) {
    uint64_t memory = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    return config_size_bytes(&config->budget, memory);
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
        r = oscar_device_find(config->backend, &daemon->ops, cause);
    if (r == 0)
        r = daemon->ops->device_open(NULL, &daemon->device, cause);
    if (r < 0)
        return r;
    struct serve_options options = {
        .loop = daemon->loop,
        .config = config,
        .ops = daemon->ops,
        .device = daemon->device,
        .budget_bytes = budget_bytes(config),
    };
    r = serve_new(&options, &daemon->serve, cause);
    if (r == 0)
        r = watch(daemon, cause);
    if (r == 0)
        tell_ready(daemon, options.budget_bytes);
    return r;
}

static void stop(struct daemon *daemon) {
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
    if (r == 0)
        log_info("stopped");
    stop(&daemon);
    return r == 0 ? EXIT_SUCCESS : exit_status(r);
}
