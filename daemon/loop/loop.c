/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/loop.h"

#include <stdlib.h>
#include <time.h>

#include "daemon/log.h"
#include "daemon/loop/engine.h"
#include "proto/cleanup.h"

static int open_engine(struct loop *loop, const struct loop_engine_ops *ops, struct oscar_cause *cause) {
    int r = ops->open(loop, cause);
    if (r == 0)
        loop->ops = ops;
    return r;
}

int loop_new(enum loop_engine engine, struct loop **ret, struct oscar_cause *cause) {
    _cleanup_free_ struct loop *loop = calloc(1, sizeof(*loop));
    if (loop == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the event loop");
    int r;
    if (engine == LOOP_AUTO) {
        struct oscar_cause reason = {0};
        r = open_engine(loop, &loop_uring_ops, &reason);
        if (r < 0) {
            log_warning("io_uring cannot be used, going on with epoll", log_text("cause", reason.text));
            r = open_engine(loop, &loop_epoll_ops, cause);
        }
    } else {
        r = open_engine(loop, engine == LOOP_IO_URING ? &loop_uring_ops : &loop_epoll_ops, cause);
    }
    if (r < 0)
        return r;
    loop_woken(loop);
    *ret = TAKE_PTR(loop);
    return 0;
}

static bool operations_in_flight(const struct loop *loop) {
    for (const struct loop_link *link = loop->dead_links; link != NULL; link = link->next)
        if (link->in_flight > 0)
            return true;
    for (const struct loop_source *source = loop->dead_sources; source != NULL; source = source->next)
        if (source->in_flight > 0)
            return true;
    return false;
}

static void source_move(struct loop_source *source, struct loop_source **list) {
    *source->link_to = source->next;
    if (source->next != NULL)
        source->next->link_to = source->link_to;
    source->next = *list;
    if (*list != NULL)
        (*list)->link_to = &source->next;
    *list = source;
    source->link_to = list;
}

static void sources_reap(struct loop *loop) {
    for (struct loop_source *source = loop->dead_sources, *next; source != NULL; source = next) {
        next = source->next;
        if (source->in_flight > 0)
            continue;
        *source->link_to = next;
        if (next != NULL)
            next->link_to = source->link_to;
        free(source);
    }
}

void loop_free(struct loop *loop) {
    if (loop == NULL)
        return;
    loop->freed = true;
    while (loop->links != NULL) {
        loop->links->closed = true; /* also one that is still sending */
        loop_link_finish(loop->links);
    }
    while (loop->sources != NULL)
        loop_remove(loop, loop->sources);
    /* The kernel may still write into a buffer whose receive has not completed: wait for the cancellations. */
    while (operations_in_flight(loop) && loop->ops->turn(loop, LOOP_NO_DEADLINE, NULL) == 0)
        ;
    loop_links_reap(loop);
    sources_reap(loop);
    loop->ops->close(loop);
    free(loop->timers);
    free(loop);
}

const char *loop_engine_name(const struct loop *loop) { return loop->ops->name; }

void loop_stop(struct loop *loop) { loop->stopped = true; }

uint64_t loop_now_ns(const struct loop *loop) { return loop->now_ns; }

void loop_on_idle(struct loop *loop, void (*idle)(void *arg), void *arg) {
    loop->idle = idle;
    loop->idle_arg = arg;
}

void loop_woken(struct loop *loop) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    loop->now_ns = (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

int loop_run(struct loop *loop, struct oscar_cause *cause) {
    loop->stopped = false;
    for (;;) {
        if (loop->idle != NULL)
            loop->idle(loop->idle_arg);
        if (loop->stopped)
            return 0;
        uint64_t deadline = loop->lost_links != NULL ? 0 : loop_timers_deadline(loop);
        int r = loop->ops->turn(loop, deadline, cause);
        if (r < 0)
            return r;
        loop_timers_run(loop);
        loop_links_tell_lost(loop);
        loop_links_reap(loop);
        sources_reap(loop);
    }
}

static int source_new(struct loop *loop, int fd, void (*call)(void *arg), void *arg, struct loop_source **ret) {
    struct loop_source *source = calloc(1, sizeof(*source));
    if (source == NULL)
        return OSCAR_ERR_NO_MEMORY;
    *source = (struct loop_source){.loop = loop, .fd = fd, .call = call, .arg = arg, .next = loop->sources};
    if (loop->sources != NULL)
        loop->sources->link_to = &source->next;
    loop->sources = source;
    source->link_to = &loop->sources;
    *ret = source;
    return 0;
}

int loop_watch(struct loop *loop, int fd, void (*readable)(void *arg), void *arg, struct loop_source **ret) {
    struct loop_source *source;
    int r = source_new(loop, fd, readable, arg, &source);
    if (r < 0)
        return r;
    r = loop->ops->watch(loop, source);
    if (r < 0) {
        source->removed = true;
        source_move(source, &loop->dead_sources);
        return r;
    }
    *ret = source;
    return 0;
}

int loop_timer(struct loop *loop, void (*expired)(void *arg), void *arg, struct loop_source **ret) {
    /* Room in the heap is made here, so that arming a timer cannot fail. */
    if (loop->timers_total == loop->timers_capacity) {
        size_t capacity = loop->timers_capacity == 0 ? 64 : loop->timers_capacity * 2;
        struct loop_source **grown = realloc(loop->timers, capacity * sizeof(struct loop_source *));
        if (grown == NULL)
            return OSCAR_ERR_NO_MEMORY;
        loop->timers = grown;
        loop->timers_capacity = capacity;
    }
    int r = source_new(loop, -1, expired, arg, ret);
    if (r == 0)
        loop->timers_total++;
    return r;
}

void loop_remove(struct loop *loop, struct loop_source *source) {
    if (source == NULL || source->removed)
        return;
    source->removed = true;
    if (source->fd >= 0) {
        loop->ops->unwatch(loop, source);
    } else {
        loop_timer_disarm(loop, source);
        loop->timers_total--;
    }
    source_move(source, &loop->dead_sources);
}

void loop_source_ready(struct loop_source *source) {
    if (!source->removed)
        source->call(source->arg);
}
