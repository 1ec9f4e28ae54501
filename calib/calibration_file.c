/* SPDX-License-Identifier: Apache-2.0 */
#include "calib/calibration_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "proto/cleanup.h"
#include "proto/geometry.h"
#include "proto/safetensors.h"

void calibration_file_close(struct calibration_file *file) {
    oscar_calibration_free(file->calibration);
    if (file->bytes != NULL)
        (void)munmap(file->bytes, file->size);
    *file = (struct calibration_file){0};
}

static int map(const char *path, struct calibration_file *file, struct oscar_cause *cause) {
    _cleanup_close_ int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (fd < 0 || fstat(fd, &status) < 0)
        return oscar_fail(cause, errno == ENOENT ? OSCAR_ERR_NOT_FOUND : OSCAR_ERR_IO, "cannot read %s: %m", path);
    if (!S_ISREG(status.st_mode) || status.st_size == 0)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "%s: not a safetensors file: %s", path,
                          S_ISREG(status.st_mode) ? "it is empty" : "not a regular file");
    void *bytes = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (bytes == MAP_FAILED)
        return oscar_fail(cause, OSCAR_ERR_IO, "cannot map %s: %m", path);
    file->bytes = bytes;
    file->size = (size_t)status.st_size;
    return 0;
}

/* 0 for what is missing or no number: the geometry's check then says which. */
static uint32_t number(const struct oscar_safetensors *tensors, const char *key) {
    const char *text = oscar_safetensors_metadata(tensors, key);
    unsigned long value = text != NULL ? strtoul(text, NULL, 10) : 0;
    return value < UINT32_MAX ? (uint32_t)value : UINT32_MAX;
}

static int parse(const struct calibration_file *file, bool verify, struct oscar_calibration **ret,
                 struct oscar_cause *cause) {
    struct oscar_safetensors *tensors = NULL;
    int r = oscar_safetensors_parse(file->bytes, file->size, &tensors, cause);
    if (r < 0)
        return r;
    struct oscar_geometry geometry = {
        .layers = number(tensors, "oscar.layers"),
        .query_heads = number(tensors, "oscar.kv_heads"),
        .kv_heads = number(tensors, "oscar.kv_heads"),
        .head_dim = number(tensors, "oscar.head_dim"),
        .dtype = OSCAR_BF16,
        .page_tokens = OSCAR_PAGE_TOKENS,
        .sink_tokens = OSCAR_SINK_TOKENS,
        .recent_tokens = OSCAR_RECENT_TOKENS,
    };
    bool ours = oscar_safetensors_metadata(tensors, "oscar.format") != NULL;
    oscar_safetensors_free(tensors);
    if (!ours)
        return oscar_fail(cause, OSCAR_ERR_CALIBRATION, "no calibration: metadata oscar.format is missing");
    if ((r = oscar_geometry_check(&geometry, cause)) < 0)
        return r;
    return oscar_calibration_parse(file->bytes, file->size, &geometry, verify, ret, cause);
}

int calibration_file_open(const char *path, bool verify, struct calibration_file *ret, struct oscar_cause *cause) {
    struct calibration_file file = {0};
    struct oscar_cause inner = {0};
    int r = map(path, &file, cause);
    if (r < 0)
        return r;
    if ((r = parse(&file, verify, &file.calibration, &inner)) < 0) {
        calibration_file_close(&file);
        return oscar_fail(cause, r, "%.100s: %.150s", path, inner.text);
    }
    *ret = file;
    return 0;
}
