/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/serve/peer.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Linux 6.5 */
#endif

static bool hung_up(int socket) {
    struct pollfd state = {.fd = socket, .events = POLLRDHUP};
    return poll(&state, 1, 0) == 1 && (state.revents & (POLLHUP | POLLRDHUP | POLLERR)) != 0;
}

int peer_read(int socket, struct peer *ret) {
    struct ucred credentials;
    socklen_t length = sizeof(credentials);
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) < 0)
        return -1;
    struct peer peer = {.pid = credentials.pid, .uid = credentials.uid, .gid = credentials.gid, .pidfd = -1};
    length = sizeof(peer.pidfd);
    if (getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &peer.pidfd, &length) < 0) {
        peer.pidfd = -1;
        if (errno == EMFILE || errno == ENFILE || errno == ENOMEM)
            return -1; /* without it this client's memory could not be kept until its process has exited */
        if (errno == ESRCH || errno == EINVAL)
            peer.exited = true; /* the kernel knows the question, and the process no more */
        else if (errno == ENOPROTOOPT && peer.pid > 0) {
            /* By number: the number may have gone to another process by now, unless the connection still stands, which
             * the process that made it held open when we looked. */
            peer.pidfd = (int)syscall(SYS_pidfd_open, peer.pid, 0);
            if (peer.pidfd < 0 && errno != ESRCH && errno != ENOSYS)
                return -1;
            peer.exited = (peer.pidfd < 0 && errno == ESRCH) || hung_up(socket);
            if (peer.exited && peer.pidfd >= 0) {
                close(peer.pidfd);
                peer.pidfd = -1;
            }
        }
    }
    struct stat status;
    if (peer.pidfd >= 0 && fstat(peer.pidfd, &status) == 0)
        peer.pidfd_inode = status.st_ino;
    *ret = peer;
    return 0;
}
