/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Between the loop's common part (loop.c, link.c, timers.c) and its two engines (loop_uring.c, loop_epoll.c).
 *
 * Memory. A source or link that its owner has removed stays allocated until the engine has no operation in flight that
 * points at it: each engine counts them in `in_flight`, and loop_reap() frees what has come down to zero after every
 * batch.
 */
#ifndef OSCAR_DAEMON_LOOP_ENGINE_H
#define OSCAR_DAEMON_LOOP_ENGINE_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "daemon/loop.h"

#define LOOP_NO_DEADLINE UINT64_MAX
#define LOOP_LINGER_NS UINT64_C(2000000000) /* a peer that does not read its last replies for so long loses them */

struct loop_source {
    struct loop *loop;
    struct loop_source *next, **link_to; /* in loop->sources or loop->dead_sources */
    void (*call)(void *arg);
    void *arg;
    int fd;             /* -1: a timer */
    uint64_t at_ns;     /* timer: when; 0 disarmed */
    size_t heap_index;  /* timer: its place in loop->timers when armed */
    unsigned in_flight; /* watch: engine operations that point here */
    bool removed;
};

/* One record on its way out. */
struct loop_outgoing {
    struct loop_outgoing *next;
    struct msghdr message;
    struct iovec iov;
    unsigned fds;
    int *fd;
    void *control;
    uint8_t bytes[];
};

struct loop_link {
    struct loop *loop;
    struct loop_link *next, **link_to; /* in loop->links or loop->dead_links */
    struct loop_link *next_lost;
    int socket;
    struct loop_link_handlers handlers;
    void *arg;
    struct loop_outgoing *queue, **queue_end;
    unsigned queued;
    unsigned in_flight; /* engine operations that point here */
    struct loop_source *linger;
    const char *lost_why; /* set: nothing is received or queued any more */
    bool lost_told;       /* `gone` has been called */
    bool closed;          /* by its owner: no callback any more */
    bool finished;        /* and the engine is giving it up */
    bool cut;             /* the socket does not take records any more */
    void *engine_data;
};

struct loop_engine_ops {
    const char *name;
    int (*open)(struct loop *loop, struct oscar_cause *cause);
    void (*close)(struct loop *loop); /* with no operation in flight */
    int (*watch)(struct loop *loop, struct loop_source *source);
    void (*unwatch)(struct loop *loop, struct loop_source *source);
    int (*link_open)(struct loop *loop, struct loop_link *link);
    /* The queue is not empty: send from it, in order, what the socket takes, and the rest when it takes more. */
    void (*link_send)(struct loop *loop, struct loop_link *link);
    /* The socket has been shut down: let go of it. */
    void (*link_stop)(struct loop *loop, struct loop_link *link);
    void (*link_free)(struct loop *loop, struct loop_link *link); /* engine_data */
    /* Waits for events until deadline_ns (0: does not wait), calls loop_woken(), then handles one batch of them. */
    int (*turn)(struct loop *loop, uint64_t deadline_ns, struct oscar_cause *cause);
};

extern const struct loop_engine_ops loop_uring_ops, loop_epoll_ops;

struct loop {
    const struct loop_engine_ops *ops;
    void *engine;
    uint64_t now_ns;
    bool stopped, freed;
    uint64_t descriptors_received;
    void (*idle)(void *arg);
    void *idle_arg;
    struct loop_source *sources, *dead_sources;
    struct loop_link *links, *dead_links, *lost_links;
    struct loop_source **timers; /* binary heap by at_ns */
    size_t timers_count, timers_capacity, timers_total;
};

/* --- for the engines --- */

void loop_woken(struct loop *loop);                 /* reads the clock */
void loop_source_ready(struct loop_source *source); /* readable: the callback, unless it was removed */
/* What recvmsg() brought: parses it and calls back. True when more may be received. */
bool loop_link_received(struct loop_link *link, const struct msghdr *message, size_t length);
void loop_link_sent(struct loop_link *link); /* the head of the queue is out */
/* `why` is static. The owner is told before the loop waits again. */
void loop_link_lose(struct loop_link *link, const char *why);
/* A send failed with `error` (positive errno): the queue is given up. */
void loop_link_send_failed(struct loop_link *link, int error);
static inline bool loop_link_receives(const struct loop_link *link) { return link->lost_why == NULL && !link->closed; }

/* --- between the common files --- */

void loop_links_tell_lost(struct loop *loop);
void loop_links_reap(struct loop *loop);
void loop_link_finish(struct loop_link *link);
uint64_t loop_timers_deadline(const struct loop *loop);
void loop_timers_run(struct loop *loop);
void loop_timer_disarm(struct loop *loop, struct loop_source *timer);

#endif
