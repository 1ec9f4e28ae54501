/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The daemon's one event loop: io_uring, or epoll behind the same interface where io_uring is refused. One thread;
 * callbacks run from loop_run only, and may add and remove sources, their own included. Nothing in a callback blocks.
 */
#ifndef OSCAR_DAEMON_LOOP_H
#define OSCAR_DAEMON_LOOP_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/cause.h"
#include "proto/frame.h"

struct loop;
struct loop_source; /* a watched descriptor or a timer */
struct loop_link;   /* one SEQPACKET connection: records in, records out */

enum loop_engine { LOOP_AUTO, LOOP_IO_URING, LOOP_EPOLL };

/* AUTO falls back to epoll with one log line that says why. */
int loop_new(enum loop_engine engine, struct loop **ret, struct oscar_cause *cause);
void loop_free(struct loop *loop);
const char *loop_engine_name(const struct loop *loop);      /* "io_uring", "epoll" */
int loop_run(struct loop *loop, struct oscar_cause *cause); /* until loop_stop; 0 or a negative error */
void loop_stop(struct loop *loop);
uint64_t loop_now_ns(const struct loop *loop); /* CLOCK_MONOTONIC, read once a wake-up */

/* Calls back whenever `fd` is readable (level-triggered in effect). Does not own fd. */
int loop_watch(struct loop *loop, int fd, void (*readable)(void *arg), void *arg, struct loop_source **ret);
/* A one-shot timer, initially disarmed; (re)armed by loop_timer_set with an absolute loop_now_ns() time; 0 disarms. */
int loop_timer(struct loop *loop, void (*expired)(void *arg), void *arg, struct loop_source **ret);
int loop_timer_set(struct loop *loop, struct loop_source *timer, uint64_t at_ns);
void loop_remove(struct loop *loop, struct loop_source *source); /* NULL is fine; no callback afterwards */
/* Called once after each batch of callbacks, before the loop waits again. */
void loop_on_idle(struct loop *loop, void (*idle)(void *arg), void *arg);

struct loop_link_handlers {
    /* One record, already checked; descriptors in it are closed by the link after the callback. */
    void (*record)(void *arg, const struct oscar_record *record);
    /* A record that was no record (cut, wrong header, ...). The link closes after the callback. */
    void (*garbage)(void *arg, const struct oscar_cause *cause);
    /* The peer has gone, the queue overflowed or garbage came: last callback; the owner must call loop_link_close. */
    void (*gone)(void *arg, const char *why);
};

#define LOOP_LINK_QUEUE_RECORDS 64U /* unsent records a connection may have: one more, and it is cut off */

/* Takes the connected socket. */
int loop_link_open(struct loop *loop, int socket, const struct loop_link_handlers *handlers, void *arg,
                   struct loop_link **ret);
/* Queues one record; bytes are copied, descriptors duplicated (the caller keeps its own). OSCAR_ERR_LIMIT when the
 * queue is full (the link is then lost), OSCAR_ERR_DISCONNECTED after `gone`. */
int loop_link_send(struct loop_link *link, enum oscar_record_kind kind, const void *payload, uint32_t bytes,
                   const int *fd, unsigned fds);
/* Sends what is queued if `flush` (for two seconds at most), then closes; no callback afterwards. */
void loop_link_close(struct loop_link *link, bool flush);
/* Descriptors that peers have sent on all links so far; every one was closed. */
uint64_t loop_descriptors_received(const struct loop *loop);
/* Some link that was closed with `flush` is still sending. */
bool loop_links_flushing(const struct loop *loop);

#endif
