/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A driver library without a GPU (libfake_cuda.so, given to the backend by OSCAR_CUDA_DRIVER): devices that can be told to lack
 * something, memory that is memfds, streams that are threads, and no kernels but those of tests/gpu/probe.cu, or, as
 * libemulated_cuda.so, all of them (tests/support/cuda_emulation). It insists on what the real one does: a current context, whole
 * mappings, and no handle opened where it was made. FAKE_CUDA_CAPABILITY (90) and FAKE_CUDA_PROCESSORS (4) say what its devices
 * are, FAKE_CUDA_DELAY_US (0) by how much, at most, a stream is late with each command.
 */
#ifndef OSCAR_TESTS_FAKE_CUDA_H
#define OSCAR_TESTS_FAKE_CUDA_H

#include <cuda.h>
#include <stdatomic.h>
#include <stdbool.h>

#define FAKE_DEVICES 3
#define FAKE_ATTRIBUTES 256

struct fake_device {
    unsigned char uuid[16];
    char name[64];
    int attribute[FAKE_ATTRIBUTES];
};

struct fake_cuda {
    CUresult init;
    int version;
    int devices; /* visible ones, in the order of `visible` */
    int visible[FAKE_DEVICES];
    struct fake_device device[FAKE_DEVICES];

    const char *failing; /* this function fails with `failure`; NULL: none */
    unsigned fail_at;    /* or the k-th call that may fail; 0: none */
    CUresult failure;
    const char *counting; /* calls of this function are counted in `counted`; NULL: of none */
    atomic_uint counted;
    CUresult sticky;      /* every call that needs a context fails with it */
    bool capturing;       /* all streams are */
    bool private_imports; /* an imported handle is of other memory */

    int priority;       /* of the stream that was made last */
    const char *failed; /* the function that failed last */
    atomic_uint calls;  /* that may fail: not those that give something back, nor queries, whose number varies */
    atomic_int live; /* contexts, memory, mappings, streams, events, modules, registrations: what was not given back */
    atomic_int entered;   /* contexts pushed and not popped */
    atomic_int unrelaxed; /* calls that a capture elsewhere in the process forbids, made without leave */
};

/* The library's own state, in the program that has loaded it by OSCAR_CUDA_DRIVER, which this sets; as a new machine: two
 * GPUs that have everything. */
struct fake_cuda *fake_cuda_reset(void);

#endif
