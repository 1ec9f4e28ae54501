/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The io_uring engine. Records complete into a link's own buffer; a turn submits all that was prepared and waits, in
 * one call.
 *
 * A record goes out with MSG_DONTWAIT first: such a send completes while it is submitted, so that its completion can be
 * waited for together with the next event and costs no turn of its own. Only when the socket is full is it sent again
 * without that flag.
 */
#include <errno.h>
#include <liburing.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "daemon/loop/engine.h"

#define RING_ENTRIES 512U
#define RING_COMPLETIONS 8192U
#define BATCH 128U

/* What a completion is about: the low bits of its user data; the rest is the pointer. */
enum tag { TAG_NONE, TAG_SOURCE, TAG_RECEIVE, TAG_SEND };
#define TAG_MASK UINT64_C(7)

struct uring {
    struct io_uring ring;
    unsigned inline_sends;   /* MSG_DONTWAIT sends whose completion has not been taken yet */
    unsigned queues_waiting; /* links that can go on sending as soon as theirs has been taken */
};

struct uring_link {
    struct msghdr message;
    struct iovec iov;
    bool sending, send_inline, send_more;
    _Alignas(struct cmsghdr) uint8_t control[OSCAR_RECORD_CONTROL_BYTES];
    uint8_t buffer[OSCAR_MAX_RECORD_BYTES];
};

static const struct {
    int opcode;
    const char *name;
} needed_opcodes[] = {
    {IORING_OP_RECVMSG, "RECVMSG"},
    {IORING_OP_SENDMSG, "SENDMSG"},
    {IORING_OP_POLL_ADD, "POLL_ADD"},
    {IORING_OP_ASYNC_CANCEL, "ASYNC_CANCEL"},
};

static int setup_failed(int error, struct oscar_cause *cause) {
    if (error == EPERM)
        return oscar_fail(
            cause, OSCAR_ERR_UNSUPPORTED,
            "io_uring is forbidden here (EPERM): allow it in the container's seccomp profile and by sysctl "
            "kernel.io_uring_disabled=0, or set [daemon] io_engine = epoll");
    if (error == ENOSYS)
        return oscar_fail(
            cause, OSCAR_ERR_UNSUPPORTED,
            "this kernel has no io_uring (ENOSYS): use Linux 5.11 or later, or set [daemon] io_engine = epoll");
    if (error == ENOMEM) {
        struct rlimit limit = {0};
        (void)getrlimit(RLIMIT_MEMLOCK, &limit);
        return oscar_fail(
            cause, OSCAR_ERR_NO_MEMORY,
            "no memory for io_uring (ENOMEM; RLIMIT_MEMLOCK is %llu bytes): raise LimitMEMLOCK= or ulimit -l, "
            "or set [daemon] io_engine = epoll",
            (unsigned long long)limit.rlim_cur);
    }
    return oscar_fail(cause, OSCAR_ERR_UNSUPPORTED, "io_uring_queue_init: %s; set [daemon] io_engine = epoll",
                      strerror(error));
}

static int check_opcodes(struct io_uring *ring, struct oscar_cause *cause) {
    struct io_uring_probe *probe = io_uring_get_probe_ring(ring);
    if (probe == NULL)
        return oscar_fail(cause, OSCAR_ERR_UNSUPPORTED,
                          "this kernel's io_uring cannot be probed: use Linux 5.11 or later");
    const char *missing = NULL;
    for (size_t i = 0; i < sizeof(needed_opcodes) / sizeof(needed_opcodes[0]); i++)
        if (!io_uring_opcode_supported(probe, needed_opcodes[i].opcode))
            missing = needed_opcodes[i].name;
    io_uring_free_probe(probe);
    if (missing != NULL)
        return oscar_fail(cause, OSCAR_ERR_UNSUPPORTED, "this kernel's io_uring lacks %s: use Linux 5.11 or later",
                          missing);
    if ((ring->features & IORING_FEAT_EXT_ARG) == 0 || (ring->features & IORING_FEAT_NODROP) == 0)
        return oscar_fail(cause, OSCAR_ERR_UNSUPPORTED,
                          "this kernel's io_uring cannot wait with a timeout: use Linux 5.11 or later");
    return 0;
}

static int uring_open(struct loop *loop, struct oscar_cause *cause) {
    struct uring *uring = calloc(1, sizeof(*uring));
    if (uring == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the event loop");
    /* Completions are handled when the loop asks for them, by its own thread (Linux 6.1); older kernels do without. */
    struct io_uring_params params = {
        .flags = IORING_SETUP_CQSIZE | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
        .cq_entries = RING_COMPLETIONS,
    };
    int r = io_uring_queue_init_params(RING_ENTRIES, &uring->ring, &params);
    if (r == -EINVAL) {
        params = (struct io_uring_params){.flags = IORING_SETUP_CQSIZE, .cq_entries = RING_COMPLETIONS};
        r = io_uring_queue_init_params(RING_ENTRIES, &uring->ring, &params);
    }
    if (r < 0) {
        free(uring);
        return setup_failed(-r, cause);
    }
    r = check_opcodes(&uring->ring, cause);
    if (r < 0) {
        io_uring_queue_exit(&uring->ring);
        free(uring);
        return r;
    }
    (void)io_uring_register_ring_fd(&uring->ring); /* saves a descriptor look-up a call; not needed */
    loop->engine = uring;
    return 0;
}

static void uring_close(struct loop *loop) {
    struct uring *uring = loop->engine;
    io_uring_queue_exit(&uring->ring);
    free(uring);
}

/* A free entry of the submission queue, which is sent off when it is full. NULL if the kernel takes none of it. */
static struct io_uring_sqe *entry(struct loop *loop, enum tag tag, void *pointer) {
    struct uring *uring = loop->engine;
    struct io_uring_sqe *sqe = io_uring_get_sqe(&uring->ring);
    if (sqe == NULL) {
        (void)io_uring_submit(&uring->ring);
        sqe = io_uring_get_sqe(&uring->ring);
        if (sqe == NULL)
            return NULL;
    }
    io_uring_prep_nop(sqe);
    sqe->user_data = (uint64_t)(uintptr_t)pointer | (uint64_t)tag;
    return sqe;
}

/* The prep functions clear user_data. */
#define PREPARE(sqe, prepare, ...)                                                                                     \
    do {                                                                                                               \
        uint64_t user_data_ = (sqe)->user_data;                                                                        \
        prepare(sqe, __VA_ARGS__);                                                                                     \
        (sqe)->user_data = user_data_;                                                                                 \
    } while (0)

static int uring_watch(struct loop *loop, struct loop_source *source) {
    /* One shot, armed again after each callback: that is level-triggered, and costs no call of its own. */
    struct io_uring_sqe *sqe = entry(loop, TAG_SOURCE, source);
    if (sqe == NULL)
        return OSCAR_ERR_LIMIT;
    PREPARE(sqe, io_uring_prep_poll_add, source->fd, POLLIN);
    source->in_flight++;
    return 0;
}

static void uring_unwatch(struct loop *loop, struct loop_source *source) {
    if (source->in_flight == 0)
        return;
    /* Not POLL_REMOVE: that one fails while a wake-up is being handled, and a wake-up that finds nothing (somebody has
     * read the eventfd) goes on waiting. A cancellation sticks. */
    struct io_uring_sqe *sqe = entry(loop, TAG_NONE, NULL);
    if (sqe != NULL)
        PREPARE(sqe, io_uring_prep_cancel64, (uint64_t)(uintptr_t)source | TAG_SOURCE, 0);
}

static bool receive(struct loop *loop, struct loop_link *link) {
    struct uring_link *data = link->engine_data;
    struct io_uring_sqe *sqe = entry(loop, TAG_RECEIVE, link);
    if (sqe == NULL)
        return false;
    data->iov = (struct iovec){data->buffer, sizeof(data->buffer)};
    data->message = (struct msghdr){
        .msg_iov = &data->iov, .msg_iovlen = 1, .msg_control = data->control, .msg_controllen = sizeof(data->control)};
    PREPARE(sqe, io_uring_prep_recvmsg, link->socket, &data->message, MSG_CMSG_CLOEXEC);
    link->in_flight++;
    return true;
}

static int uring_link_open(struct loop *loop, struct loop_link *link) {
    struct uring_link *data = malloc(sizeof(*data)); /* not cleared: most links never fill their buffer */
    if (data == NULL)
        return OSCAR_ERR_NO_MEMORY;
    data->sending = data->send_inline = data->send_more = false;
    link->engine_data = data;
    return receive(loop, link) ? 0 : OSCAR_ERR_LIMIT;
}

static void uring_link_free(struct loop *loop, struct loop_link *link) {
    (void)loop;
    free(link->engine_data);
}

static void send_head(struct loop *loop, struct loop_link *link, bool send_inline) {
    struct uring *uring = loop->engine;
    struct uring_link *data = link->engine_data;
    struct io_uring_sqe *sqe = entry(loop, TAG_SEND, link);
    if (sqe == NULL) {
        loop_link_send_failed(link, ENOBUFS);
        return;
    }
    PREPARE(sqe, io_uring_prep_sendmsg, link->socket, &link->queue->message,
            (unsigned)(MSG_NOSIGNAL | (send_inline ? MSG_DONTWAIT : 0)));
    data->sending = true;
    data->send_inline = send_inline;
    uring->inline_sends += send_inline;
    link->in_flight++;
}

static void uring_link_send(struct loop *loop, struct loop_link *link) {
    struct uring *uring = loop->engine;
    struct uring_link *data = link->engine_data;
    if (!data->sending) {
        send_head(loop, link, true);
    } else if (data->send_inline && !data->send_more) {
        data->send_more = true;
        uring->queues_waiting++;
    }
}

static void uring_link_stop(struct loop *loop, struct loop_link *link) {
    /* shutdown() completes the receive and any send; nothing is left to cancel. */
    (void)loop;
    (void)link;
}

static void send_completed(struct loop *loop, struct loop_link *link, int result) {
    struct uring *uring = loop->engine;
    struct uring_link *data = link->engine_data;
    bool was_inline = data->send_inline;
    uring->inline_sends -= was_inline;
    uring->queues_waiting -= data->send_more;
    data->sending = data->send_more = false;
    if (link->finished)
        return;
    if (result == -EAGAIN && was_inline) {
        send_head(loop, link, false);
    } else if (result < 0) {
        loop_link_send_failed(link, -result);
    } else {
        loop_link_sent(link);
        if (link->queue != NULL && !link->finished)
            send_head(loop, link, true);
        if (data->sending && link->queue->next != NULL) {
            data->send_more = true;
            uring->queues_waiting++;
        }
    }
}

static void receive_completed(struct loop *loop, struct loop_link *link, int result) {
    struct uring_link *data = link->engine_data;
    bool again = result == -EINTR || result == -EAGAIN;
    if (result < 0 && !again)
        loop_link_lose(link, "the peer closed the connection");
    else if (!again)
        again = loop_link_received(link, &data->message, (size_t)result);
    if (again && loop_link_receives(link) && !receive(loop, link))
        loop_link_lose(link, "the kernel takes no more operations");
}

static void source_completed(struct loop *loop, struct loop_source *source, int result) {
    if (result < 0)
        return; /* cancelled, or a descriptor that cannot be watched: it would fail again and again */
    loop_source_ready(source);
    if (!source->removed)
        (void)uring_watch(loop, source);
}

static void dispatch(struct loop *loop, uint64_t user_data, int result) {
    void *pointer = (void *)(uintptr_t)(user_data & ~TAG_MASK);
    switch ((enum tag)(user_data & TAG_MASK)) {
    case TAG_SOURCE:
        ((struct loop_source *)pointer)->in_flight--;
        source_completed(loop, pointer, result);
        break;
    case TAG_RECEIVE:
        ((struct loop_link *)pointer)->in_flight--;
        receive_completed(loop, pointer, result);
        break;
    case TAG_SEND:
        ((struct loop_link *)pointer)->in_flight--;
        send_completed(loop, pointer, result);
        break;
    case TAG_NONE:
        break;
    }
}

static int submit_and_wait(struct loop *loop, uint64_t deadline_ns) {
    struct uring *uring = loop->engine;
    struct io_uring *ring = &uring->ring;
    loop_woken(loop);
    if (deadline_ns <= loop->now_ns && uring->inline_sends == 0)
        return io_uring_submit_and_get_events(ring);
    /* The inline sends complete in any case; the one more is the event that is waited for. (When the loop is freed
     * there may be no such event any more: then the sends alone.) */
    bool event = deadline_ns > loop->now_ns && uring->queues_waiting == 0 && !(loop->freed && uring->inline_sends > 0);
    unsigned wait = uring->inline_sends + event;
    if (deadline_ns == LOOP_NO_DEADLINE || deadline_ns <= loop->now_ns)
        return io_uring_submit_and_wait(ring, wait);
    uint64_t wait_ns = deadline_ns - loop->now_ns;
    struct __kernel_timespec timeout = {.tv_sec = (long long)(wait_ns / 1000000000),
                                        .tv_nsec = (long long)(wait_ns % 1000000000)};
    struct io_uring_cqe *first;
    return io_uring_submit_and_wait_timeout(ring, &first, wait, &timeout, NULL);
}

static int uring_turn(struct loop *loop, uint64_t deadline_ns, struct oscar_cause *cause) {
    struct uring *uring = loop->engine;
    int r = submit_and_wait(loop, deadline_ns);
    /* EBUSY and EAGAIN: completions have to be taken first. */
    if (r < 0 && r != -ETIME && r != -EINTR && r != -EBUSY && r != -EAGAIN)
        return oscar_fail(cause, OSCAR_ERR_INTERNAL, "io_uring_enter: %s", strerror(-r));
    loop_woken(loop);
    struct io_uring_cqe *completions[BATCH];
    struct {
        uint64_t user_data;
        int result;
    } batch[BATCH];
    unsigned count = io_uring_peek_batch_cqe(&uring->ring, completions, BATCH);
    for (unsigned i = 0; i < count; i++) {
        batch[i].user_data = completions[i]->user_data;
        batch[i].result = completions[i]->res;
    }
    io_uring_cq_advance(&uring->ring, count);
    for (unsigned i = 0; i < count; i++)
        dispatch(loop, batch[i].user_data, batch[i].result);
    return 0;
}

const struct loop_engine_ops loop_uring_ops = {
    .name = "io_uring",
    .open = uring_open,
    .close = uring_close,
    .watch = uring_watch,
    .unwatch = uring_unwatch,
    .link_open = uring_link_open,
    .link_send = uring_link_send,
    .link_stop = uring_link_stop,
    .link_free = uring_link_free,
    .turn = uring_turn,
};
