/* SPDX-License-Identifier: Apache-2.0 */
/* Links: what both engines share of a connection's life. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/loop/engine.h"
#include "proto/cleanup.h"

#define LINK_DRAIN_RECORDS 64 /* unread records taken out before a socket is closed */

static void outgoing_free(struct loop_outgoing *outgoing) {
    for (unsigned i = 0; i < outgoing->fds; i++)
        close(outgoing->fd[i]);
    free(outgoing);
}

static void link_list_add(struct loop_link **list, struct loop_link *link) {
    link->next = *list;
    if (*list != NULL)
        (*list)->link_to = &link->next;
    *list = link;
    link->link_to = list;
}

static void link_list_remove(struct loop_link *link) {
    *link->link_to = link->next;
    if (link->next != NULL)
        link->next->link_to = link->link_to;
}

int loop_link_open(struct loop *loop, int socket, const struct loop_link_handlers *handlers, void *arg,
                   struct loop_link **ret) {
    _cleanup_close_ int fd = socket;
    _cleanup_free_ struct loop_link *link = calloc(1, sizeof(*link));
    if (link == NULL)
        return OSCAR_ERR_NO_MEMORY;
    link->loop = loop;
    link->socket = fd;
    link->handlers = *handlers;
    link->arg = arg;
    link->queue_end = &link->queue;
    int r = loop->ops->link_open(loop, link);
    if (r < 0) {
        loop->ops->link_free(loop, link);
        return r;
    }
    (void)TAKE_FD(fd);
    link_list_add(&loop->links, link);
    *ret = TAKE_PTR(link);
    return 0;
}

static unsigned descriptors_in(const struct msghdr *message) {
    unsigned count = 0;
    struct msghdr *walked = (struct msghdr *)message; /* CMSG_NXTHDR wants it so; nothing is written */
    for (struct cmsghdr *part = CMSG_FIRSTHDR(walked); part != NULL; part = CMSG_NXTHDR(walked, part))
        if (part->cmsg_level == SOL_SOCKET && part->cmsg_type == SCM_RIGHTS)
            count += (unsigned)((part->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    return count;
}

bool loop_link_received(struct loop_link *link, const struct msghdr *message, size_t length) {
    struct oscar_record record;
    struct oscar_cause cause = {0};
    link->loop->descriptors_received += descriptors_in(message);
    int r = oscar_record_parse(message, length, &record, &cause); /* closes every descriptor of what it refuses */
    if (r == OSCAR_ERR_DISCONNECTED) {
        loop_link_lose(link, "the peer closed the connection");
        return false;
    }
    if (r < 0) {
        if (loop_link_receives(link)) {
            link->handlers.garbage(link->arg, &cause);
            loop_link_lose(link, "protocol violation");
        }
        return false;
    }
    if (loop_link_receives(link))
        link->handlers.record(link->arg, &record);
    oscar_record_close_fds(&record);
    return loop_link_receives(link);
}

void loop_link_lose(struct loop_link *link, const char *why) {
    if (link->closed) {
        /* Nobody to tell; what is queued cannot leave a socket whose other end is gone. */
        if (!link->finished)
            loop_link_finish(link);
        return;
    }
    if (link->lost_why != NULL)
        return;
    link->lost_why = why;
    link->next_lost = link->loop->lost_links;
    link->loop->lost_links = link;
}

void loop_links_tell_lost(struct loop *loop) {
    while (loop->lost_links != NULL) {
        struct loop_link *link = loop->lost_links;
        loop->lost_links = link->next_lost;
        if (link->closed)
            continue;
        link->lost_told = true;
        link->handlers.gone(link->arg, link->lost_why);
    }
}

void loop_link_send_failed(struct loop_link *link, int error) {
    link->cut = true;
    loop_link_lose(link, error == EPIPE || error == ECONNRESET ? "the peer closed the connection"
                         : error == ETOOMANYREFS ? "the kernel refuses to pass more descriptors (too many in flight)"
                                                 : "a record could not be sent");
}

void loop_link_sent(struct loop_link *link) {
    struct loop_outgoing *outgoing = link->queue;
    link->queue = outgoing->next;
    if (link->queue == NULL)
        link->queue_end = &link->queue;
    link->queued--;
    outgoing_free(outgoing);
    if (link->closed && !link->finished && link->queue == NULL)
        loop_link_finish(link);
}

static int outgoing_new(enum oscar_record_kind kind, const void *payload, uint32_t bytes, const int *fd, unsigned fds,
                        struct loop_outgoing **ret) {
    size_t record_bytes = (OSCAR_RECORD_HEADER_BYTES + (size_t)bytes + 15) & ~(size_t)15;
    size_t control_bytes = fds > 0 ? (OSCAR_RECORD_CONTROL_BYTES + 15) & ~(size_t)15 : 0;
    struct loop_outgoing *outgoing = malloc(sizeof(*outgoing) + record_bytes + control_bytes + fds * sizeof(int));
    if (outgoing == NULL)
        return OSCAR_ERR_NO_MEMORY;
    outgoing->next = NULL;
    outgoing->control = outgoing->bytes + record_bytes;
    outgoing->fd = (int *)(void *)(outgoing->bytes + record_bytes + control_bytes);
    for (outgoing->fds = 0; outgoing->fds < fds; outgoing->fds++) {
        outgoing->fd[outgoing->fds] = fcntl(fd[outgoing->fds], F_DUPFD_CLOEXEC, 3);
        if (outgoing->fd[outgoing->fds] < 0) {
            outgoing_free(outgoing);
            return OSCAR_ERR_LIMIT;
        }
    }
    oscar_record_header(outgoing->bytes, kind, fds, bytes);
    if (bytes > 0)
        memcpy(outgoing->bytes + OSCAR_RECORD_HEADER_BYTES, payload, bytes);
    outgoing->iov = (struct iovec){outgoing->bytes, OSCAR_RECORD_HEADER_BYTES + (size_t)bytes};
    oscar_record_message(&outgoing->message, &outgoing->iov, 1, outgoing->control, outgoing->fd, fds);
    *ret = outgoing;
    return 0;
}

int loop_link_send(struct loop_link *link, enum oscar_record_kind kind, const void *payload, uint32_t bytes,
                   const int *fd, unsigned fds) {
    if (link->lost_told || link->closed || link->cut)
        return OSCAR_ERR_DISCONNECTED;
    if (bytes > OSCAR_MAX_RECORD_PAYLOAD_BYTES || fds > OSCAR_MAX_RECORD_FDS)
        return OSCAR_ERR_INVALID;
    if (link->queued >= LOOP_LINK_QUEUE_RECORDS) {
        link->cut = true;
        loop_link_lose(link, "the peer does not read: its queue is full");
        return OSCAR_ERR_LIMIT;
    }
    struct loop_outgoing *outgoing;
    int r = outgoing_new(kind, payload, bytes, fd, fds, &outgoing);
    if (r < 0) {
        /* The peer would wait for this record for ever. */
        link->cut = true;
        loop_link_lose(link, r == OSCAR_ERR_LIMIT ? "out of descriptors" : "out of memory");
        return r;
    }
    *link->queue_end = outgoing;
    link->queue_end = &outgoing->next;
    link->queued++;
    link->loop->ops->link_send(link->loop, link);
    return 0;
}

void loop_link_finish(struct loop_link *link) {
    link->finished = true;
    loop_remove(link->loop, link->linger);
    link->linger = NULL;
    /* Completes whatever the engine has in flight on this socket; what the peer has not read yet stays readable. */
    (void)shutdown(link->socket, SHUT_RDWR);
    link->loop->ops->link_stop(link->loop, link);
    link_list_remove(link);
    link_list_add(&link->loop->dead_links, link);
}

static void linger_over(void *arg) { loop_link_finish(arg); }

void loop_link_close(struct loop_link *link, bool flush) {
    if (link == NULL || link->closed)
        return;
    link->closed = true;
    struct loop *loop = link->loop;
    if (flush && !link->cut && link->queue != NULL && loop_timer(loop, linger_over, link, &link->linger) == 0)
        loop_timer_set(loop, link->linger, loop->now_ns + LOOP_LINGER_NS);
    else
        loop_link_finish(link);
}

uint64_t loop_descriptors_received(const struct loop *loop) { return loop->descriptors_received; }

bool loop_links_flushing(const struct loop *loop) {
    for (const struct loop_link *link = loop->links; link != NULL; link = link->next)
        if (link->closed)
            return true;
    return false;
}

/* A socket that is closed with records unread gives its peer ECONNRESET before the reply that explains why. */
static void drain(int socket) {
    for (int i = 0; i < LINK_DRAIN_RECORDS; i++) {
        uint8_t byte;
        if (recv(socket, &byte, 1, MSG_DONTWAIT | MSG_TRUNC) <= 0)
            return;
    }
}

void loop_links_reap(struct loop *loop) {
    for (struct loop_link *link = loop->dead_links, *next; link != NULL; link = next) {
        next = link->next;
        if (link->in_flight > 0)
            continue;
        link_list_remove(link);
        drain(link->socket);
        close(link->socket);
        while (link->queue != NULL) {
            struct loop_outgoing *outgoing = link->queue;
            link->queue = outgoing->next;
            outgoing_free(outgoing);
        }
        loop->ops->link_free(loop, link);
        free(link);
    }
}
