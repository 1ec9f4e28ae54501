/* SPDX-License-Identifier: Apache-2.0 */
/* Between probe.c and probe.cu. */
#ifndef OSCAR_TESTS_GPU_PROBE_PARAMS_H
#define OSCAR_TESTS_GPU_PROBE_PARAMS_H

#include <stdint.h>

#define PROBE_LONGEST_NS (UINT64_C(20) * 1000 * 1000 * 1000)

/* In memory that the host and the device see. */
struct probe_gate {
    uint32_t arrived, open;
};

#endif
