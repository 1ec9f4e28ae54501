/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/serve/window.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "proto/cleanup.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U /* Linux 6.3 */
#endif

static int shared_memory(const char *name, uint64_t bytes, int *ret_fd, void **ret_memory, struct oscar_cause *cause) {
    _cleanup_close_ int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    if (fd < 0 && errno == EINVAL)
        fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return oscar_fail(cause, OSCAR_ERR_LIMIT, "memfd_create: %m");
    if (ftruncate(fd, (off_t)bytes) < 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "cannot set up shared memory: %m");
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "cannot map shared memory: %m");
    *ret_fd = TAKE_FD(fd);
    *ret_memory = memory;
    return 0;
}

int window_new(struct window *ret, struct oscar_cause *cause) {
    struct window window = WINDOW_NONE;
    void *memory;
    int r = shared_memory("oscard-window", OSCAR_WINDOW_BYTES, &window.window_fd, &memory, cause);
    if (r < 0)
        return r;
    window.header = memory;
    window.header->magic = OSCAR_WINDOW_MAGIC;
    window.header->version = OSCAR_WINDOW_VERSION;
    r = shared_memory("oscard-fences", OSCAR_FENCE_BYTES, &window.fence_fd, &memory, cause);
    if (r < 0) {
        window_free(&window);
        return r;
    }
    window.fences = memory;
    *ret = window;
    return 0;
}

void window_close_fds(struct window *window) {
    if (window->window_fd >= 0)
        close(window->window_fd);
    if (window->fence_fd >= 0)
        close(window->fence_fd);
    window->window_fd = window->fence_fd = -1;
}

void window_free(struct window *window) {
    window_close_fds(window);
    if (window->header != NULL)
        (void)munmap(window->header, OSCAR_WINDOW_BYTES);
    if (window->fences != NULL)
        (void)munmap(window->fences, OSCAR_FENCE_BYTES);
    *window = WINDOW_NONE;
}
