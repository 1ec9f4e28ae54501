/* SPDX-License-Identifier: Apache-2.0 */
/*
 * oscard on a host device that a test can make hang or fail from outside, by the file that $OSCAR_TEST_DEVICE names: while somebody
 * has an exclusive lock on it (flock), no call for memory or pages returns; when there is something in it, they fail as a GPU does
 * whose context is lost.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "oscar/device.h"

static struct oscar_device_ops hanging;

/* 0, or OSCAR_ERR_DEVICE. */
static int obey(void) {
    struct stat status;
    int fd = open(getenv("OSCAR_TEST_DEVICE"), O_RDONLY | O_CLOEXEC); /* a lock is of one opening of the file */
    if (fd < 0 || flock(fd, LOCK_SH) < 0 || fstat(fd, &status) < 0)
        abort();
    (void)close(fd);
    return status.st_size > 0 ? OSCAR_ERR_DEVICE : 0;
}

static int chunk_create(struct oscar_device *device, uint64_t bytes, struct oscar_chunk **ret,
                        struct oscar_cause *cause) {
    int r = obey();
    return r < 0 ? oscar_fail(cause, r, "as the test wants it")
                 : oscar_device_host()->chunk_create(device, bytes, ret, cause);
}

static int inspect(struct oscar_stream_impl *stream, const struct oscar_geometry *geometry, const uint8_t *const *dense,
                   uint32_t pages, int32_t *status) {
    int r = obey();
    return r < 0 ? r : oscar_device_host()->inspect(stream, geometry, dense, pages, status);
}

static int pack(struct oscar_stream_impl *stream, const struct oscar_geometry *geometry,
                const struct oscar_calibration *calibration, const struct oscar_pack_item *item, uint32_t items) {
    int r = obey();
    return r < 0 ? r : oscar_device_host()->pack(stream, geometry, calibration, item, items);
}

/* In place of the library's, which is linked only where this name is missing. */
int oscar_device_find(const char *name, const struct oscar_device_ops **ret, struct oscar_cause *cause) {
    (void)name;
    (void)cause;
    hanging = *oscar_device_host();
    hanging.chunk_create = chunk_create;
    hanging.inspect = inspect;
    hanging.pack = pack;
    *ret = &hanging;
    return 0;
}
