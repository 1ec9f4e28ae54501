/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers for benchmarks, the same in each run: about normally distributed, with standard deviation 1. */
#ifndef OSCAR_TESTS_BENCH_NOISE_H
#define OSCAR_TESTS_BENCH_NOISE_H

#include <stdint.h>

static inline float bench_noise(uint64_t *state) {
    float sum = 0;
    for (unsigned i = 0; i < 12; i++) {
        *state = *state * UINT64_C(6364136223846793005) + 1442695040888963407U;
        sum += (float)(*state >> 40) * 0x1p-24F;
    }
    return sum - 6;
}

#endif
