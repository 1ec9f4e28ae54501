/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/peer.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>
#include <unistd.h>

#include "proto/version.h"

#define RECEIVE_MS 30000

int peer_connect(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0) {
        int saved = errno;
        close(fd);
        errno = saved;
        return -1;
    }
    return fd;
}

bool peer_send_raw(int socket, const void *bytes, size_t size, const int *fd, unsigned fds) {
    _Alignas(struct cmsghdr) uint8_t control[OSCAR_RECORD_CONTROL_BYTES];
    struct iovec iov = {(void *)(uintptr_t)bytes, size};
    struct msghdr message;
    oscar_record_message(&message, &iov, 1, control, fd, fds);
    ssize_t sent;
    do
        sent = sendmsg(socket, &message, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent == (ssize_t)size;
}

bool peer_send(int socket, enum oscar_record_kind kind, const void *payload, size_t size, const int *fd, unsigned fds) {
    static uint8_t bytes[OSCAR_MAX_RECORD_BYTES];
    oscar_record_header(bytes, kind, fds, (uint32_t)size);
    memcpy(bytes + OSCAR_RECORD_HEADER_BYTES, payload, size);
    return peer_send_raw(socket, bytes, OSCAR_RECORD_HEADER_BYTES + size, fd, fds);
}

bool peer_send_request(int socket, const struct oscar_request *request) {
    uint8_t payload[4096];
    size_t size;
    if (oscar_request_encode(request, payload, sizeof(payload), &size) < 0) {
        fprintf(stderr, "a test's request cannot be encoded\n");
        abort();
    }
    return peer_send(socket, OSCAR_RECORD_REQUEST, payload, size, NULL, 0);
}

bool peer_receive(int socket, struct peer_record *ret) {
    static uint8_t buffer[OSCAR_MAX_RECORD_BYTES];
    _Alignas(struct cmsghdr) uint8_t control[OSCAR_RECORD_CONTROL_BYTES];
    struct pollfd state = {.fd = socket, .events = POLLIN};
    int ready;
    do
        ready = poll(&state, 1, RECEIVE_MS);
    while (ready < 0 && errno == EINTR);
    if (ready != 1) {
        fprintf(stderr, "nothing came within %d ms\n", RECEIVE_MS);
        abort();
    }
    struct iovec iov = {buffer, sizeof(buffer)};
    struct msghdr message = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
    ssize_t length = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    if (length <= 0)
        return false;
    struct oscar_record record;
    struct oscar_cause cause = {0};
    int r = oscar_record_parse(&message, (size_t)length, &record, &cause);
    if (r == 0 && record.kind == OSCAR_RECORD_REPLY)
        r = oscar_reply_decode(record.payload, record.payload_bytes, &ret->reply, &cause);
    else if (r == 0 && record.kind == OSCAR_RECORD_NOTICE)
        r = oscar_notice_decode(record.payload, record.payload_bytes, &ret->notice, &cause);
    if (r < 0) {
        fprintf(stderr, "the daemon sent nonsense: %s\n", cause.text);
        abort();
    }
    ret->kind = record.kind;
    ret->fds = record.fds;
    memcpy(ret->fd, record.fd, record.fds * sizeof(int));
    return true;
}

void peer_close_fds(struct peer_record *record) {
    for (unsigned i = 0; i < record->fds; i++)
        close(record->fd[i]);
    record->fds = 0;
}

bool peer_call(int socket, const struct oscar_request *request, struct oscar_reply *ret) {
    if (!peer_send_request(socket, request))
        return false;
    struct peer_record record;
    do {
        if (!peer_receive(socket, &record))
            return false;
        peer_close_fds(&record);
    } while (record.kind != OSCAR_RECORD_REPLY || record.reply.id != request->id);
    *ret = record.reply;
    return true;
}

struct oscar_request peer_hello_request(uint64_t id, const char *name) {
    struct oscar_request request = {.id = id, .verb = OSCAR_HELLO};
    request.hello.major = OSCAR_PROTOCOL_MAJOR;
    request.hello.minor = OSCAR_PROTOCOL_MINOR;
    snprintf(request.hello.client_name, sizeof(request.hello.client_name), "%s", name);
    snprintf(request.hello.group, sizeof(request.hello.group), "tests");
    return request;
}

int peer_connect_greeted(const char *path, const char *name) {
    int fd = peer_connect(path);
    struct oscar_request request = peer_hello_request(1, name);
    struct peer_record record = {0};
    if (fd < 0 || !peer_send_request(fd, &request) || !peer_receive(fd, &record))
        return -1;
    bool greeted = record.kind == OSCAR_RECORD_REPLY && record.reply.error == 0 && record.fds == 2;
    peer_close_fds(&record);
    if (greeted)
        return fd;
    close(fd);
    return -1;
}

bool peer_ping(int socket) {
    static uint64_t id = 1000000;
    struct oscar_request request = {.id = ++id, .verb = OSCAR_PING};
    struct oscar_reply reply;
    return peer_call(socket, &request, &reply) && reply.error == 0;
}
