/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "client/src/client.h"
#include "client/src/detail.h"
#include "proto/cleanup.h"

static int connect_failure(const char *path, int error) {
    static const struct {
        int error, code;
        const char *text;
    } failures[] = {
        {ENOENT, OSCAR_ERR_NOT_RUNNING, "there is no socket"},
        {ENOTDIR, OSCAR_ERR_NOT_RUNNING, "there is no such directory"},
        {ECONNREFUSED, OSCAR_ERR_NOT_RUNNING, "nobody listens there"},
        {EPROTOTYPE, OSCAR_ERR_NOT_RUNNING, "not the socket of oscard's workers"},
        {EACCES, OSCAR_ERR_PERMISSION, "no access"},
        {EPERM, OSCAR_ERR_PERMISSION, "no access"},
        {EAGAIN, OSCAR_ERR_TIMEOUT, "the daemon accepts nobody"},
    };
    for (size_t i = 0; i < sizeof(failures) / sizeof(failures[0]); i++)
        if (failures[i].error == error)
            return oscar_fail(oscar_detail(), failures[i].code, "%s: %s", path, failures[i].text);
    return oscar_fail(oscar_detail(), OSCAR_ERR_IO, "%s: %s", path, strerror(error));
}

int oscar_socket_connect(const char *path, uint64_t deadline, int *ret_socket) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t length = strlen(path);
    if (length == 0 || length >= sizeof(address.sun_path))
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "socket path of %zu bytes: 1 to %zu are possible", length,
                          sizeof(address.sun_path) - 1);
    memcpy(address.sun_path, path, length + 1);
    _cleanup_close_ int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return oscar_fail(oscar_detail(), OSCAR_ERR_LIMIT, "socket: %m");
    for (;;) {
        /* With a full backlog connect() waits for as long as sending may. */
        uint64_t now = oscar_clock_ns(), left_us = deadline > now ? (deadline - now) / 1000 + 1 : 1;
        struct timeval timeout = {.tv_sec = (time_t)(left_us / 1000000), .tv_usec = (suseconds_t)(left_us % 1000000)};
        if (setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout)) < 0)
            return oscar_fail(oscar_detail(), OSCAR_ERR_IO, "SO_SNDTIMEO: %m");
        if (connect(fd, (const struct sockaddr *)&address,
                    (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length + 1)) == 0)
            break;
        if (errno != EINTR)
            return connect_failure(path, errno);
    }
    *ret_socket = TAKE_FD(fd);
    return 0;
}

void oscar_descriptors_make_room(void) {
    _cleanup_close_ int lowest = eventfd(0, EFD_CLOEXEC);
    if (lowest < 0)
        return;
    /* The kernel never shrinks the table. Fails where RLIMIT_NOFILE forbids so many: then there is nothing to grow for. */
    _cleanup_close_ int highest = fcntl(lowest, F_DUPFD_CLOEXEC, lowest + (int)OSCAR_MAX_RECORD_FDS);
    (void)highest;
}

int oscar_map_descriptor(int fd, uint64_t bytes, int protection, const char *what, void **ret) {
    struct stat status;
    if (fstat(fd, &status) < 0 || !S_ISREG(status.st_mode) || status.st_size < 0 || (uint64_t)status.st_size < bytes)
        return oscar_fail(oscar_detail(), OSCAR_ERR_PROTOCOL, "%s: its descriptor holds less than %llu bytes", what,
                          (unsigned long long)bytes);
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) /* else a cut file would kill this process by SIGBUS */
        return oscar_fail(oscar_detail(), OSCAR_ERR_PROTOCOL, "%s: its descriptor is not sealed against shrinking",
                          what);
    void *memory = mmap(NULL, bytes, protection, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED)
        return oscar_fail(oscar_detail(), OSCAR_ERR_NO_MEMORY, "%s: mapping %llu bytes: %m", what,
                          (unsigned long long)bytes);
    *ret = memory;
    return 0;
}
