/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One record on a Unix SOCK_SEQPACKET socket: a 16-byte header, a protobuf payload, and descriptors as SCM_RIGHTS.
 *
 *   bytes 0..3  magic "OSC1"
 *   byte  4     kind (enum oscar_record_kind)
 *   byte  5     number of descriptors, 0..OSCAR_MAX_RECORD_FDS
 *   bytes 6..7  zero
 *   bytes 8..11 payload length, little-endian: exactly the record's length less 16
 *   bytes 12..15 zero
 *
 * A record that is cut (MSG_TRUNC), whose control data is cut (MSG_CTRUNC), or whose header does not say exactly what arrived
 * is OSCAR_ERR_PROTOCOL; every descriptor that came with it is closed. So is a request with a descriptor: the daemon takes
 * none from anybody. A record of size 0 is the end of the connection: OSCAR_ERR_DISCONNECTED.
 */
#ifndef OSCAR_PROTO_FRAME_H
#define OSCAR_PROTO_FRAME_H

#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "proto/cause.h"

#define OSCAR_RECORD_HEADER_BYTES 16U
#define OSCAR_MAX_RECORD_BYTES (64U << 10)
#define OSCAR_MAX_RECORD_PAYLOAD_BYTES (OSCAR_MAX_RECORD_BYTES - OSCAR_RECORD_HEADER_BYTES)
#define OSCAR_MAX_RECORD_FDS 200U
#define OSCAR_RECORD_CONTROL_BYTES CMSG_SPACE(sizeof(int) * 253)

enum oscar_record_kind { OSCAR_RECORD_REQUEST = 1, OSCAR_RECORD_REPLY = 2, OSCAR_RECORD_NOTICE = 3 };

/* Writes the header for a payload that follows it. */
void oscar_record_header(uint8_t ret_header[OSCAR_RECORD_HEADER_BYTES], enum oscar_record_kind kind, unsigned fds,
                         uint32_t payload_bytes);

/* A received record after all checks. */
struct oscar_record {
    enum oscar_record_kind kind;
    const uint8_t *payload; /* into the caller's buffer */
    uint32_t payload_bytes;
    unsigned fds;
    int fd[OSCAR_MAX_RECORD_FDS]; /* close-on-exec, owned by the caller */
};

/* Checks what one recvmsg() (flags: MSG_CMSG_CLOEXEC) brought: `message` as filled in by the kernel, `length` its result;
 * the whole record lies in its first iovec (one of OSCAR_MAX_RECORD_BYTES can hold any).
 * On failure every descriptor that came is closed. */
int oscar_record_parse(const struct msghdr *message, size_t length, struct oscar_record *ret,
                       struct oscar_cause *cause);
/* Leaves those alone that are -1: taken. */
void oscar_record_close_fds(struct oscar_record *record);

/* Prepares a msghdr for sendmsg(): control data for `fds` into `control` (>= OSCAR_RECORD_CONTROL_BYTES, aligned for a
 * struct cmsghdr; not touched without descriptors). */
void oscar_record_message(struct msghdr *ret, struct iovec *iov, size_t iovs, void *control, const int *fd,
                          unsigned fds);

/* Blocking-socket convenience for the client: send one whole record. 0, OSCAR_ERR_DISCONNECTED, OSCAR_ERR_TIMEOUT (after
 * timeout_ms, < 0 forever), OSCAR_ERR_LIMIT, OSCAR_ERR_IO. */
int oscar_record_send(int socket, enum oscar_record_kind kind, const void *payload, uint32_t bytes, const int *fd,
                      unsigned fds, int timeout_ms, struct oscar_cause *cause);

#endif
