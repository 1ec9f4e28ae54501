/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/frame.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <poll.h>
#include <stdbool.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* What the kernel can deliver with one message (SCM_MAX_FD): room for all, since whatever came must be closed. */
#define KERNEL_MAX_FDS 253U

static const uint8_t magic[4] = {'O', 'S', 'C', '1'};

static void store_u32(uint8_t *bytes, uint32_t value) {
    for (unsigned i = 0; i < 4; i++)
        bytes[i] = (uint8_t)(value >> (8 * i));
}

static uint32_t load_u32(const uint8_t *bytes) {
    return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
}

void oscar_record_header(uint8_t ret_header[OSCAR_RECORD_HEADER_BYTES], enum oscar_record_kind kind, unsigned fds,
                         uint32_t payload_bytes) {
    memset(ret_header, 0, OSCAR_RECORD_HEADER_BYTES);
    memcpy(ret_header, magic, sizeof(magic));
    ret_header[4] = (uint8_t)kind;
    ret_header[5] = (uint8_t)fds;
    store_u32(ret_header + 8, payload_bytes);
}

static void close_fds(const int *fd, unsigned fds) {
    int saved = errno;
    for (unsigned i = 0; i < fds; i++)
        if (fd[i] >= 0)
            (void)close(fd[i]);
    errno = saved;
}

/* All descriptors of the message, from every control message that has some. */
static unsigned collect_fds(const struct msghdr *message, int ret[KERNEL_MAX_FDS]) {
    unsigned fds = 0;
    struct msghdr *header = (struct msghdr *)(uintptr_t)message; /* CMSG_NXTHDR takes no const, and changes nothing */
    for (struct cmsghdr *control = CMSG_FIRSTHDR(header); control != NULL; control = CMSG_NXTHDR(header, control)) {
        if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS || control->cmsg_len < CMSG_LEN(0))
            continue;
        size_t count = (control->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count && fds < KERNEL_MAX_FDS; i++)
            memcpy(&ret[fds++], CMSG_DATA(control) + i * sizeof(int), sizeof(int));
    }
    return fds;
}

static int check_record(const struct msghdr *message, size_t length, unsigned fds, struct oscar_cause *cause) {
    if (length == 0)
        return oscar_fail(cause, OSCAR_ERR_DISCONNECTED, "the peer closed the connection");
    if ((message->msg_flags & MSG_TRUNC) != 0 || message->msg_iovlen < 1 || length > message->msg_iov[0].iov_len)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "record is longer than %u bytes and was cut",
                          OSCAR_MAX_RECORD_BYTES);
    if ((message->msg_flags & MSG_CTRUNC) != 0)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL,
                          "control data was cut: descriptors are lost (raise RLIMIT_NOFILE?)");
    if (length < OSCAR_RECORD_HEADER_BYTES)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "record of %zu bytes has no header of %u", length,
                          OSCAR_RECORD_HEADER_BYTES);
    const uint8_t *header = message->msg_iov[0].iov_base;
    if (memcmp(header, magic, sizeof(magic)) != 0)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL,
                          "record does not begin with OSC1: is the peer a client of oscard?");
    if (header[4] < OSCAR_RECORD_REQUEST || header[4] > OSCAR_RECORD_NOTICE)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "record has the unknown kind %u", header[4]);
    if (header[6] != 0 || header[7] != 0 || load_u32(header + 12) != 0)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "record has reserved header bytes that are not zero");
    if (load_u32(header + 8) != length - OSCAR_RECORD_HEADER_BYTES)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "record says %" PRIu32 " payload bytes and has %zu",
                          load_u32(header + 8), length - OSCAR_RECORD_HEADER_BYTES);
    if (header[5] != fds || fds > OSCAR_MAX_RECORD_FDS)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "record says %u descriptors and has %u (at most %u)", header[5],
                          fds, OSCAR_MAX_RECORD_FDS);
    if (header[4] == OSCAR_RECORD_REQUEST && fds != 0)
        return oscar_fail(cause, OSCAR_ERR_PROTOCOL, "request with %u descriptors: none is ever taken from a client",
                          fds);
    return OSCAR_OK;
}

int oscar_record_parse(const struct msghdr *message, size_t length, struct oscar_record *ret,
                       struct oscar_cause *cause) {
    int fd[KERNEL_MAX_FDS];
    unsigned fds = collect_fds(message, fd);
    int r = check_record(message, length, fds, cause);
    if (r < 0) {
        close_fds(fd, fds);
        return r;
    }
    const uint8_t *header = message->msg_iov[0].iov_base;
    ret->kind = (enum oscar_record_kind)header[4];
    ret->payload = header + OSCAR_RECORD_HEADER_BYTES;
    ret->payload_bytes = (uint32_t)(length - OSCAR_RECORD_HEADER_BYTES);
    ret->fds = fds;
    memcpy(ret->fd, fd, fds * sizeof(int));
    return OSCAR_OK;
}

void oscar_record_close_fds(struct oscar_record *record) {
    close_fds(record->fd, record->fds);
    record->fds = 0;
}

void oscar_record_message(struct msghdr *ret, struct iovec *iov, size_t iovs, void *control, const int *fd,
                          unsigned fds) {
    *ret = (struct msghdr){.msg_iov = iov, .msg_iovlen = iovs};
    if (fds == 0)
        return;
    size_t bytes = fds * sizeof(int);
    memset(control, 0, CMSG_SPACE(bytes));
    ret->msg_control = control;
    ret->msg_controllen = CMSG_SPACE(bytes);
    struct cmsghdr *header = CMSG_FIRSTHDR(ret);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(bytes);
    memcpy(CMSG_DATA(header), fd, bytes);
}

static int64_t now_ms(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Milliseconds for poll(), -1 for ever; past the deadline 0, which is one last look. */
static int rest_ms(int64_t deadline) {
    if (deadline < 0)
        return -1;
    int64_t rest = deadline - now_ms();
    return rest < 0 ? 0 : rest > INT_MAX ? INT_MAX : (int)rest;
}

static int send_error(int error, struct oscar_cause *cause) {
    switch (error) {
    case EPIPE:
    case ECONNRESET:
    case ENOTCONN:
        return oscar_fail(cause, OSCAR_ERR_DISCONNECTED, "the peer closed the connection");
    default:
        return oscar_fail(cause, OSCAR_ERR_IO, "sendmsg: %s", strerror(error));
    }
}

int oscar_record_send(int socket, enum oscar_record_kind kind, const void *payload, uint32_t bytes, const int *fd,
                      unsigned fds, int timeout_ms, struct oscar_cause *cause) {
    uint8_t header[OSCAR_RECORD_HEADER_BYTES];
    _Alignas(struct cmsghdr) uint8_t control[OSCAR_RECORD_CONTROL_BYTES];
    struct iovec iov[2] = {{header, sizeof(header)}, {(void *)(uintptr_t)payload, bytes}};
    struct msghdr message;
    if (bytes > OSCAR_MAX_RECORD_PAYLOAD_BYTES || fds > OSCAR_MAX_RECORD_FDS)
        return oscar_fail(cause, OSCAR_ERR_LIMIT, "a record of %" PRIu32 " bytes and %u descriptors: at most %u and %u",
                          bytes, fds, OSCAR_MAX_RECORD_PAYLOAD_BYTES, OSCAR_MAX_RECORD_FDS);
    oscar_record_header(header, kind, fds, bytes);
    oscar_record_message(&message, iov, 2, control, fd, fds);
    int64_t deadline = timeout_ms < 0 ? -1 : now_ms() + timeout_ms;
    for (;;) {
        /* A record is sent as a whole or not at all. */
        if (sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0)
            return OSCAR_OK;
        if (errno == EINTR)
            continue;
        if (errno != EAGAIN)
            return send_error(errno, cause);
        struct pollfd wait = {.fd = socket, .events = POLLOUT};
        int ready = poll(&wait, 1, rest_ms(deadline));
        if (ready == 0)
            return oscar_fail(cause, OSCAR_ERR_TIMEOUT, "the peer took no record for %d ms", timeout_ms);
        if (ready < 0 && errno != EINTR)
            return oscar_fail(cause, OSCAR_ERR_IO, "poll: %m");
    }
}
