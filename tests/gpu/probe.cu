/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels of probe.h: one thread each. */
#include "tests/gpu/probe_params.h"

extern "C" __global__ void probe_write_kernel(uint64_t *address, uint64_t value) { *address = value; }

static __device__ uint64_t now_ns() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

extern "C" __global__ void probe_hold_kernel(volatile probe_gate *gate) {
    uint64_t start = now_ns();
    gate->arrived = 1;
    __threadfence_system();
    while (!gate->open && now_ns() - start < PROBE_LONGEST_NS)
        ;
}
