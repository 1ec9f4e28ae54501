/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A backend without kernels for tests of the store. A page's first 32 bytes are its tag: packing and copying carry it over, so
 * that a reader can tell whose page it looks at. Each kind of call can be made to fail from its k-th call on, and work can be held
 * up in the worker threads. It stops the test when a call comes from the thread that initialised it, when two threads use a stream
 * at once, or when work comes without a stream.
 */
#ifndef OSCAR_TESTS_FAKE_DEVICE_H
#define OSCAR_TESTS_FAKE_DEVICE_H

#include <pthread.h>

#include "oscar/device.h"

#define FAKE_TAG_BYTES 32U

enum fake_call {
    FAKE_CALIBRATION_LOAD,
    FAKE_CHUNK_CREATE,
    FAKE_CHUNK_EXPORT,
    FAKE_INSPECT,
    FAKE_PACK,
    FAKE_COPY,
    FAKE_CALLS,
};

struct oscar_device {
    pthread_mutex_t mutex;
    pthread_cond_t opened;
    bool closed;        /* inspect, pack and copy wait */
    bool memory_closed; /* so do the others, and the freeing of chunks */
    uint64_t calls[FAKE_CALLS];
    uint64_t fail_at[FAKE_CALLS];    /* the call with this number (from 1) fails ... */
    uint64_t fail_count[FAKE_CALLS]; /* ... and so many after it; 0 and 0: none */
    int error;
    size_t granularity;
    uint32_t chunks; /* alive */
    uint64_t bytes;
    uint32_t calibrations; /* loaded */
    uint32_t streams;      /* open */
    pthread_t loop; /* the thread that must not be held up: no call is made from there but for device and stream */
};

void fake_device_init(struct oscar_device *device);
void fake_device_fini(struct oscar_device *device);
const struct oscar_device_ops *fake_device_ops(void);
void fake_device_hold(struct oscar_device *device, bool hold);
void fake_device_hold_memory(struct oscar_device *device, bool hold);
/* Of the chunks that there are now. */
uint64_t fake_device_bytes(struct oscar_device *device);
/* From now on the k-th call and `more` after it fail with `error`. */
void fake_device_fail(struct oscar_device *device, enum fake_call call, uint64_t k, uint64_t more, int error);

/* A page with this first byte does not pass the inspection. */
#define FAKE_NOT_FINITE 0xff

#endif
