/* SPDX-License-Identifier: Apache-2.0 */
/* The epoll engine, for kernels and containers without io_uring: readiness, one receive buffer, and a timerfd for the
 * deadline. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "daemon/loop/engine.h"
#include "proto/cleanup.h"

#define BATCH 64

/* What an event is about: the low bit of its data. The timerfd has the value 0. */
#define TAG_LINK UINT64_C(1)

struct epoll_engine {
    int epoll, timer;
    uint64_t timer_at_ns;
    _Alignas(struct cmsghdr) uint8_t control[OSCAR_RECORD_CONTROL_BYTES];
    uint8_t buffer[OSCAR_MAX_RECORD_BYTES];
};

static int epoll_open(struct loop *loop, struct oscar_cause *cause) {
    _cleanup_close_ int epoll = epoll_create1(EPOLL_CLOEXEC);
    if (epoll < 0)
        return oscar_fail(cause, OSCAR_ERR_LIMIT, "epoll_create1: %m");
    _cleanup_close_ int timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (timer < 0)
        return oscar_fail(cause, OSCAR_ERR_LIMIT, "timerfd_create: %m");
    struct epoll_event event = {.events = EPOLLIN};
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, timer, &event) < 0)
        return oscar_fail(cause, OSCAR_ERR_LIMIT, "epoll_ctl: %m");
    struct epoll_engine *engine = calloc(1, sizeof(*engine));
    if (engine == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the event loop");
    engine->epoll = TAKE_FD(epoll);
    engine->timer = TAKE_FD(timer);
    loop->engine = engine;
    return 0;
}

static void epoll_close(struct loop *loop) {
    struct epoll_engine *engine = loop->engine;
    close(engine->epoll);
    close(engine->timer);
    free(engine);
}

static int control(struct loop *loop, int operation, int fd, uint32_t events, void *pointer, uint64_t tag) {
    struct epoll_engine *engine = loop->engine;
    struct epoll_event event = {.events = events, .data.u64 = (uint64_t)(uintptr_t)pointer | tag};
    return epoll_ctl(engine->epoll, operation, fd, &event) < 0 ? OSCAR_ERR_LIMIT : 0;
}

static int epoll_watch(struct loop *loop, struct loop_source *source) {
    return control(loop, EPOLL_CTL_ADD, source->fd, EPOLLIN, source, 0);
}

static void epoll_unwatch(struct loop *loop, struct loop_source *source) {
    (void)control(loop, EPOLL_CTL_DEL, source->fd, 0, source, 0);
}

static int epoll_link_open(struct loop *loop, struct loop_link *link) {
    return control(loop, EPOLL_CTL_ADD, link->socket, EPOLLIN, link, TAG_LINK);
}

static void epoll_link_free(struct loop *loop, struct loop_link *link) {
    (void)loop;
    (void)link;
}

/* `engine_data` is only a mark here: the socket is full and EPOLLOUT is asked for. */
static void want_writable(struct loop *loop, struct loop_link *link, bool want) {
    if ((link->engine_data != NULL) == want)
        return;
    link->engine_data = want ? link : NULL;
    (void)control(loop, EPOLL_CTL_MOD, link->socket,
                  (loop_link_receives(link) ? (uint32_t)EPOLLIN : 0U) | (want ? (uint32_t)EPOLLOUT : 0U), link,
                  TAG_LINK);
}

static void send_queue(struct loop *loop, struct loop_link *link) {
    while (!link->finished && !link->cut && link->queue != NULL) {
        if (sendmsg(link->socket, &link->queue->message, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) {
            loop_link_sent(link);
            continue;
        }
        if (errno == EINTR)
            continue;
        if (errno == EAGAIN) {
            want_writable(loop, link, true);
            return;
        }
        loop_link_send_failed(link, errno);
    }
    if (!link->finished)
        want_writable(loop, link, false);
}

static void epoll_link_send(struct loop *loop, struct loop_link *link) {
    if (link->engine_data == NULL)
        send_queue(loop, link);
}

static void epoll_link_stop(struct loop *loop, struct loop_link *link) {
    (void)control(loop, EPOLL_CTL_DEL, link->socket, 0, link, TAG_LINK);
}

static void receive(struct loop *loop, struct loop_link *link) {
    struct epoll_engine *engine = loop->engine;
    struct iovec iov = {engine->buffer, sizeof(engine->buffer)};
    struct msghdr message = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = engine->control, .msg_controllen = sizeof(engine->control)};
    ssize_t length = recvmsg(link->socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (length < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (length < 0)
        loop_link_lose(link, "the peer closed the connection");
    else
        (void)loop_link_received(link, &message, (size_t)length);
}

static void link_event(struct loop *loop, struct loop_link *link, uint32_t events) {
    if (link->finished)
        return;
    if (events & EPOLLOUT)
        send_queue(loop, link);
    if (link->finished)
        return;
    if (!loop_link_receives(link)) {
        /* Only what is queued keeps it; a hang-up says that nobody will read that. */
        if (events & (EPOLLHUP | EPOLLERR))
            loop_link_lose(link, "the peer closed the connection");
        else if (events & EPOLLIN)
            (void)control(loop, EPOLL_CTL_MOD, link->socket, link->engine_data != NULL ? (uint32_t)EPOLLOUT : 0U, link,
                          TAG_LINK);
        return;
    }
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR))
        receive(loop, link);
}

static void arm_timer(struct epoll_engine *engine, uint64_t at_ns) {
    if (engine->timer_at_ns == at_ns)
        return;
    struct itimerspec when = {0};
    if (at_ns != LOOP_NO_DEADLINE)
        when.it_value = (struct timespec){(time_t)(at_ns / 1000000000), (long)(at_ns % 1000000000)};
    if (timerfd_settime(engine->timer, TFD_TIMER_ABSTIME, &when, NULL) == 0)
        engine->timer_at_ns = at_ns;
}

static int epoll_turn(struct loop *loop, uint64_t deadline_ns, struct oscar_cause *cause) {
    struct epoll_engine *engine = loop->engine;
    struct epoll_event events[BATCH];
    bool waits = deadline_ns > 0;
    if (waits)
        arm_timer(engine, deadline_ns);
    int count = epoll_wait(engine->epoll, events, BATCH, waits ? -1 : 0);
    if (count < 0 && errno != EINTR)
        return oscar_fail(cause, OSCAR_ERR_INTERNAL, "epoll_wait: %m");
    loop_woken(loop);
    for (int i = 0; i < count; i++) {
        uint64_t data = events[i].data.u64;
        if (data == 0) {
            uint64_t expirations;
            (void)!read(engine->timer, &expirations, sizeof(expirations));
            engine->timer_at_ns = 0;
        } else if (data & TAG_LINK) {
            link_event(loop, (struct loop_link *)(uintptr_t)(data & ~TAG_LINK), events[i].events);
        } else {
            loop_source_ready((struct loop_source *)(uintptr_t)data);
        }
    }
    return 0;
}

const struct loop_engine_ops loop_epoll_ops = {
    .name = "epoll",
    .open = epoll_open,
    .close = epoll_close,
    .watch = epoll_watch,
    .unwatch = epoll_unwatch,
    .link_open = epoll_link_open,
    .link_send = epoll_link_send,
    .link_stop = epoll_link_stop,
    .link_free = epoll_link_free,
    .turn = epoll_turn,
};
