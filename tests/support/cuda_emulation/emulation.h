/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernels of kernels/cuda, the very sources, on a CPU: compiled as C++ with what nvcc would supply (language.h, include/), and
 * run by the fake driver (libemulated_cuda.so, given to the backend by OSCAR_CUDA_DRIVER).
 *
 * A block's threads are fibers that switch where they meet: at warp-wide instructions, barriers and waits. Blocks run one after
 * another, in random order, as do a block's warps and a warp's lanes (OSCAR_EMULATION_SEED repeats one). A warp runs until it
 * waits for another. Asynchronous copies happen as late as they may, when somebody waits for them, and until then what they will
 * overwrite is poison, as all shared memory is when a block begins.
 *
 * A fault ends the process and names kernel, block, thread and line: lanes of a warp that meet at different lines, threads that
 * never meet, addresses outside the block's shared memory, addresses that are nobody's or misaligned in loads and copies that
 * have a name (__ldg, cp.async, ...), barriers of copies that were not opened, copies nobody waited for. Plain loads and stores
 * are for the guard page behind shared memory, the ends of mappings, and the sanitizers.
 *
 * What it cannot show: how fast it is; what nvcc makes of the source; the weak order of memory among running blocks; the last bits
 * of ex2.approx and lg2.approx and of a matrix unit's sums (here: exact, then cut to fp32). x86-64 only.
 */
#ifndef OSCAR_TESTS_CUDA_EMULATION_H
#define OSCAR_TESTS_CUDA_EMULATION_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

struct emulated_kernel {
    const char *name;
    void (*call)(const void *params); /* one thread of it */
    size_t params_bytes;              /* kernels have one parameter */
};

struct emulated_module {
    const char *name; /* of its image */
    int architecture; /* 0: the same for all */
    const struct emulated_kernel *kernels;
    size_t count;
    struct emulated_module *next;
};

/* By a module's constructor. */
void emulation_add(struct emulated_module *module);

/* In the module of that name; NULL: there is none. */
const struct emulated_kernel *emulation_find(const char *name, int architecture, const char *kernel);

struct emulated_launch {
    const struct emulated_kernel *kernel;
    unsigned grid[3], block[3];
    size_t shared_bytes;
    bool (*is_known)(const void *address); /* whether the device has memory there */
    const void *params;
};

/* Runs all blocks. One launch at a time: others wait. */
void emulation_run(const struct emulated_launch *to_run);

#ifdef __cplusplus
}
#endif

#endif
