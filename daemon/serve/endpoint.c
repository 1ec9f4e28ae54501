/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/serve/endpoint.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "proto/cleanup.h"

struct endpoint {
    char path[sizeof(((struct sockaddr_un *)NULL)->sun_path)];
    char lock_path[sizeof(((struct sockaddr_un *)NULL)->sun_path) + 8];
    int lock;
    bool ours; /* device and inode are those of the socket that we made */
    dev_t device;
    ino_t inode;
};

const char *endpoint_path(const struct endpoint *endpoint) { return endpoint->path; }

int endpoint_directory(const char *path, struct oscar_cause *cause) {
    if (mkdir(path, 0755) == 0)
        return 0;
    struct stat status;
    if (errno == EEXIST && stat(path, &status) == 0 && S_ISDIR(status.st_mode))
        return 0;
    if (errno == EEXIST)
        return oscar_fail(cause, OSCAR_ERR_IO, "%.150s is not a directory: remove it, or set [daemon] runtime_dir",
                          path);
    return oscar_fail(cause, OSCAR_ERR_IO,
                      "cannot make directory %.120s: %m: make its parent, or set [daemon] runtime_dir", path);
}

/* The lock counts only if it is on the file that stands there now: its holder removes it when it leaves. */
static int take_lock(struct endpoint *endpoint, struct oscar_cause *cause) {
    for (;;) {
        _cleanup_close_ int fd =
            open(endpoint->lock_path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
        if (fd < 0 && errno == ENOENT)
            return oscar_fail(cause, OSCAR_ERR_IO,
                              "the directory of %.120s does not exist: make it, or choose another path",
                              endpoint->path);
        if (fd < 0)
            return oscar_fail(cause, OSCAR_ERR_IO, "cannot open %.120s: %m: check the directory and its permissions",
                              endpoint->lock_path);
        if (flock(fd, LOCK_EX | LOCK_NB) < 0) {
            if (errno == EWOULDBLOCK)
                return oscar_fail(cause, OSCAR_ERR_BUSY,
                                  "another daemon serves %.120s: stop it, or choose another socket and runtime_dir",
                                  endpoint->path);
            return oscar_fail(cause, OSCAR_ERR_IO, "cannot lock %.120s: %m", endpoint->lock_path);
        }
        struct stat held, standing;
        if (fstat(fd, &held) == 0 && stat(endpoint->lock_path, &standing) == 0 && held.st_dev == standing.st_dev &&
            held.st_ino == standing.st_ino) {
            endpoint->lock = TAKE_FD(fd);
            return 0;
        }
    }
}

/* A killed process's io_uring lets go of its listening socket a moment later than the process itself goes. */
static bool listener_lives(int connected) {
    struct ucred listener;
    socklen_t length = sizeof(listener);
    if (getsockopt(connected, SOL_SOCKET, SO_PEERCRED, &listener, &length) < 0 || listener.pid <= 0)
        return true; /* in a PID namespace that we do not see */
    _cleanup_close_ int pidfd = (int)syscall(SYS_pidfd_open, listener.pid, 0);
    struct pollfd exited = {.fd = pidfd, .events = POLLIN};
    return pidfd < 0 ? errno != ESRCH : poll(&exited, 1, 0) != 1;
}

/* Something listens there although nobody holds the lock: a process that is not an oscard of this version. */
static bool is_served(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, path, strlen(path));
    static const int types[] = {SOCK_SEQPACKET, SOCK_STREAM};
    for (size_t i = 0; i < 2; i++) {
        _cleanup_close_ int fd = socket(AF_UNIX, types[i] | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd < 0)
            continue;
        if (connect(fd, (struct sockaddr *)&address, sizeof(address)) == 0 ? listener_lives(fd) : errno == EAGAIN)
            return true;
    }
    return false;
}

static int remove_stale(const struct endpoint *endpoint, struct oscar_cause *cause) {
    struct stat status;
    if (lstat(endpoint->path, &status) < 0) {
        if (errno == ENOENT)
            return 0;
        return oscar_fail(cause, OSCAR_ERR_IO, "cannot look at %.150s: %m", endpoint->path);
    }
    if (!S_ISSOCK(status.st_mode))
        return oscar_fail(cause, OSCAR_ERR_IO,
                          "%.120s exists and is not a socket: remove it yourself, or choose another path",
                          endpoint->path);
    if (is_served(endpoint->path))
        return oscar_fail(cause, OSCAR_ERR_BUSY, "another process serves %.120s: stop it, or choose another path",
                          endpoint->path);
    if (unlink(endpoint->path) < 0 && errno != ENOENT)
        return oscar_fail(cause, OSCAR_ERR_IO, "cannot remove the stale socket %.120s: %m", endpoint->path);
    return 0;
}

int endpoint_claim(const char *path, struct endpoint **ret, struct oscar_cause *cause) {
    _cleanup_free_ struct endpoint *endpoint = calloc(1, sizeof(*endpoint));
    if (endpoint == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a socket");
    if (strlen(path) >= sizeof(endpoint->path))
        return oscar_fail(cause, OSCAR_ERR_CONFIG, "socket path %.120s... is too long", path);
    memcpy(endpoint->path, path, strlen(path));
    snprintf(endpoint->lock_path, sizeof(endpoint->lock_path), "%s.lock", path);
    int r = take_lock(endpoint, cause);
    if (r < 0)
        return r;
    r = remove_stale(endpoint, cause);
    if (r < 0) {
        endpoint_release(TAKE_PTR(endpoint));
        return r;
    }
    *ret = TAKE_PTR(endpoint);
    return 0;
}

static int find_group(const char *name, gid_t *ret, struct oscar_cause *cause) {
    char *end;
    unsigned long number = strtoul(name, &end, 10);
    const struct group *group = getgrnam(name);
    if (group == NULL && (*end != '\0' || number >= UINT32_MAX))
        return oscar_fail(cause, OSCAR_ERR_CONFIG, "no group \"%.60s\": correct socket_group or [admin] group", name);
    *ret = group != NULL ? group->gr_gid : (gid_t)number;
    return 0;
}

int endpoint_adopt(struct endpoint *endpoint, mode_t mode, const char *group, struct oscar_cause *cause) {
    struct stat status;
    if (lstat(endpoint->path, &status) < 0 || !S_ISSOCK(status.st_mode))
        return oscar_fail(cause, OSCAR_ERR_IO, "socket %.150s is gone already", endpoint->path);
    endpoint->ours = true;
    endpoint->device = status.st_dev;
    endpoint->inode = status.st_ino;
    if (group[0] != '\0') {
        gid_t gid;
        int r = find_group(group, &gid, cause);
        if (r < 0)
            return r;
        if (lchown(endpoint->path, (uid_t)-1, gid) < 0)
            return oscar_fail(cause, OSCAR_ERR_IO, "cannot give %.100s to group %.40s: %m", endpoint->path, group);
    }
    if (chmod(endpoint->path, mode) < 0)
        return oscar_fail(cause, OSCAR_ERR_IO, "cannot set the mode of %.120s: %m", endpoint->path);
    return 0;
}

int endpoint_listen(struct endpoint *endpoint, mode_t mode, const char *group, int *ret_fd, struct oscar_cause *cause) {
    _cleanup_close_ int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return oscar_fail(cause, OSCAR_ERR_IO, "cannot make a socket: %m");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, endpoint->path, sizeof(endpoint->path));
    /* Nobody may connect before mode and group are right. */
    mode_t mask = umask(0777);
    int r = bind(fd, (struct sockaddr *)&address, sizeof(address));
    umask(mask);
    if (r < 0)
        return oscar_fail(cause, OSCAR_ERR_IO, "cannot bind %.120s: %m", endpoint->path);
    r = endpoint_adopt(endpoint, mode, group, cause);
    if (r < 0)
        return r;
    if (listen(fd, SOMAXCONN) < 0)
        return oscar_fail(cause, OSCAR_ERR_IO, "cannot listen at %.120s: %m", endpoint->path);
    *ret_fd = TAKE_FD(fd);
    return 0;
}

void endpoint_release(struct endpoint *endpoint) {
    if (endpoint == NULL)
        return;
    struct stat status;
    if (endpoint->ours && lstat(endpoint->path, &status) == 0 && status.st_dev == endpoint->device &&
        status.st_ino == endpoint->inode)
        (void)unlink(endpoint->path);
    (void)unlink(endpoint->lock_path); /* while it is held */
    close(endpoint->lock);
    free(endpoint);
}
