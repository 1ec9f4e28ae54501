/* SPDX-License-Identifier: Apache-2.0 */
/* Who is at the other end of a socket, by the kernel's word. */
#ifndef OSCAR_DAEMON_SERVE_PEER_H
#define OSCAR_DAEMON_SERVE_PEER_H

#include <stdbool.h>
#include <sys/types.h>

struct peer {
    pid_t pid; /* 0 when it is in a PID namespace that we do not see */
    uid_t uid;
    gid_t gid;
    /* With `pid` it tells processes apart: of its own for each on Linux 6.9, where pid may be 0 for many; else the same
     * for all. */
    ino_t pidfd_inode;
    int pidfd; /* readable when the process has exited; -1: `exited`, or this kernel has none */
    bool exited;
};

/* -1 with errno when the kernel does not say who it is, or there is no descriptor left to watch it by. */
int peer_read(int socket, struct peer *ret);

#endif
