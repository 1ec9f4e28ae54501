/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the programs of tests/gpu stand on: the backend that OSCAR_TEST_BACKEND names ("cuda" when it is unset; "host" proves the
 * test itself where there is no GPU), its memory shared as OSCAR_TEST_SHARE says ("ipc", or by descriptors), two streams, and
 * device memory that is poison until it is written. Whatever fails here fails the test.
 */
#ifndef OSCAR_TESTS_GPU_RIG_H
#define OSCAR_TESTS_GPU_RIG_H

#include "tests/support/kernel_fixture.h"

struct rig {
    const struct oscar_device_ops *ops;
    struct oscar_device *device;
    struct oscar_stream_impl *synchronous, *asynchronous;
    struct rig_memory *memories;
    struct host_pool *pool; /* by rig_pool() */
};

bool rig_on_gpu(void); /* whether the backend under test is cuda */
/* Whether OSCAR_TEST_SMALL is set: under compute-sanitizer and emulated on a CPU kernels are a hundred times slower, so what is
 * done in bulk, or takes many GiB, is to be small. */
bool rig_small(void);

struct rig *rig_open(void);
void rig_close(struct rig *rig); /* with all memory */

/* Device memory of `bytes` bytes, each 0xFF, so that floats of every width are NaN. It begins at a multiple of 256 bytes, and what
 * follows its end, rounded up to such a multiple, faults (cuda) or is seen by the address sanitizer (host). */
void *rig_alloc(struct rig *rig, size_t bytes);
void rig_free(struct rig *rig, void *address); /* NULL is fine */
void rig_poison(struct rig *rig, void *memory, size_t bytes);

/* Between host and device memory, done when they return. */
void rig_write(struct rig *rig, void *memory, const void *bytes, size_t count);
void rig_read(struct rig *rig, void *ret_bytes, const void *memory, size_t count);

/* Device memory that holds a copy of the bytes. */
void *rig_upload(struct rig *rig, const void *bytes, size_t count);

/* The calibration outlives it; unloaded by ops->calibration_unload. */
void rig_calibration_load(struct rig *rig, const struct oscar_geometry *geometry,
                          const struct oscar_calibration *calibration);

/* Threads on all processors, for what is to be expected: a GPU should not wait for that. For one caller at a time. */
struct host_pool *rig_pool(struct rig *rig);

/* Waits for a stream and returns what its work came to; fails when that takes a minute. */
int rig_wait(struct rig *rig, struct oscar_stream_impl *stream);

#endif
