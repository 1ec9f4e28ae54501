/* SPDX-License-Identifier: Apache-2.0 */
/* The workers' socket: accepting, and noticing that somebody has removed it. */
#include <errno.h>
#include <libgen.h>
#include <stdio.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/serve/state.h"

#define ACCEPT_BATCH 16
#define ACCEPT_RETRY_NS UINT64_C(100000000)

static int accept_watch(struct serve *serve);

/* Out of descriptors or memory: the waiting client keeps the socket readable, so look away for a moment. */
static void accept_pause(struct serve *serve, int error) {
    uint64_t suppressed;
    if (log_limit_pass(&serve->accept_failures, loop_now_ns(serve->loop), &suppressed))
        log_warning("client cannot be accepted, trying again", log_text("cause", strerror(error)),
                    log_text("remedy", "raise LimitNOFILE= or ulimit -n"), log_suppressed(suppressed));
    loop_remove(serve->loop, serve->listener_watch);
    serve->listener_watch = NULL;
    loop_timer_set(serve->loop, serve->listener_retry, loop_now_ns(serve->loop) + ACCEPT_RETRY_NS);
}

static void accept_retry(void *arg) {
    struct serve *serve = arg;
    if (accept_watch(serve) < 0)
        loop_timer_set(serve->loop, serve->listener_retry, loop_now_ns(serve->loop) + ACCEPT_RETRY_NS);
}

static void accept_ready(void *arg) {
    struct serve *serve = arg;
    for (int i = 0; i < ACCEPT_BATCH; i++) {
        int fd = accept4(serve->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        int r = fd >= 0 ? session_accept(serve, fd) : -errno;
        if (r == -EMFILE || r == -ENFILE || r == -ENOBUFS || r == -ENOMEM)
            accept_pause(serve, -r);
        if (r < 0 && r != -ECONNABORTED && r != -EINTR)
            return;
    }
}

static int accept_watch(struct serve *serve) {
    return loop_watch(serve->loop, serve->listener, accept_ready, serve, &serve->listener_watch);
}

static void directory_changed(void *arg) {
    struct serve *serve = arg;
    _Alignas(struct inotify_event) char events[4096];
    while (read(serve->directory_events, events, sizeof(events)) > 0)
        ;
    if (access(endpoint_path(serve->worker_endpoint), F_OK) == 0)
        return;
    log_warning("the socket has been removed: connected clients go on, new ones cannot connect",
                log_text("socket", endpoint_path(serve->worker_endpoint)), log_text("remedy", "restart oscard"));
    loop_remove(serve->loop, serve->directory_watch);
    serve->directory_watch = NULL;
}

/* Only to say so in the log: without inotify that line is missing, no more. */
static void watch_directory(struct serve *serve) {
    char path[sizeof(((struct sockaddr_un *)NULL)->sun_path)];
    snprintf(path, sizeof(path), "%s", endpoint_path(serve->worker_endpoint));
    serve->directory_events = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    if (serve->directory_events < 0)
        return;
    if (inotify_add_watch(serve->directory_events, dirname(path),
                          IN_DELETE | IN_MOVED_FROM | IN_DELETE_SELF | IN_MOVE_SELF) < 0)
        return;
    (void)loop_watch(serve->loop, serve->directory_events, directory_changed, serve, &serve->directory_watch);
}

int listener_open(struct serve *serve, struct oscar_cause *cause) {
    const struct config *config = serve->config;
    int r = endpoint_listen(serve->worker_endpoint, (mode_t)config->socket_mode, config->socket_group, &serve->listener,
                            cause);
    if (r < 0)
        return r;
    r = loop_timer(serve->loop, accept_retry, serve, &serve->listener_retry);
    if (r == 0)
        r = accept_watch(serve);
    if (r < 0)
        return oscar_fail(cause, r, "the socket cannot be watched: %s", oscar_error_text(r));
    watch_directory(serve);
    return 0;
}

void listener_close(struct serve *serve) {
    loop_remove(serve->loop, serve->directory_watch);
    loop_remove(serve->loop, serve->listener_watch);
    loop_remove(serve->loop, serve->listener_retry);
    serve->directory_watch = serve->listener_watch = serve->listener_retry = NULL;
    if (serve->directory_events >= 0)
        close(serve->directory_events);
    if (serve->listener >= 0)
        close(serve->listener);
    serve->directory_events = serve->listener = -1;
    endpoint_release(serve->worker_endpoint);
    serve->worker_endpoint = NULL;
}
