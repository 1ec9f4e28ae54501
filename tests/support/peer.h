/* SPDX-License-Identifier: Apache-2.0 */
/* A raw peer of the daemon: sends any bytes with any descriptors, reads records, and checks nothing on its own. */
#ifndef OSCAR_TESTS_SUPPORT_PEER_H
#define OSCAR_TESTS_SUPPORT_PEER_H

#include <stdbool.h>

#include "proto/wire.h"

struct peer_record {
    enum oscar_record_kind kind;
    struct oscar_reply reply;   /* kind REPLY */
    struct oscar_notice notice; /* kind NOTICE */
    unsigned fds;
    int fd[OSCAR_MAX_RECORD_FDS];
};

/* A connected SEQPACKET socket, or -1 with errno. */
int peer_connect(const char *path);
/* One record as it is, without a header of ours. False when the other end is gone. */
bool peer_send_raw(int socket, const void *bytes, size_t size, const int *fd, unsigned fds);
/* A whole record of a kind; a request. */
bool peer_send(int socket, enum oscar_record_kind kind, const void *payload, size_t size, const int *fd, unsigned fds);
bool peer_send_request(int socket, const struct oscar_request *request);
/* The next record, within 10 s; false at the end of the connection. The caller closes its descriptors (peer_close_fds).
 * */
bool peer_receive(int socket, struct peer_record *ret);
void peer_close_fds(struct peer_record *record);
/* Sends a request and reads records until its reply; notices before it are counted, and their descriptors closed. */
bool peer_call(int socket, const struct oscar_request *request, struct oscar_reply *ret);

/* A HELLO of this version, and the greeting: connects, sends it, checks the reply and its two descriptors. */
struct oscar_request peer_hello_request(uint64_t id, const char *name);
int peer_connect_greeted(const char *path, const char *name);
/* A ping goes round: the connection serves. */
bool peer_ping(int socket);

#endif
