/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The instruction sets that the host backend has code for. One binary holds all of them; the best one that the CPU runs is
 * taken, or the one that the environment variable OSCAR_HOST_LEVEL names (portable, avx2, avx512). Results that go into a
 * page are the same bytes at every level.
 */
#ifndef OSCAR_KERNELS_HOST_LEVEL_H
#define OSCAR_KERNELS_HOST_LEVEL_H

#include <stdbool.h>

#include "proto/cause.h"

enum host_level {
    HOST_PORTABLE = 0, /* what the compiler's baseline gives */
    HOST_AVX2 = 1,     /* AVX2, FMA, F16C */
    HOST_AVX512 = 2,   /* AVX-512 F, BW, DQ, VL and VNNI, besides HOST_AVX2's */
    HOST_LEVELS = 3,
};

const char *host_level_name(enum host_level level); /* "portable", "avx2", "avx512" */
bool host_level_supported(enum host_level level);   /* by this CPU and its operating system, and built in */
enum host_level host_level_best(void);
/* BF16 dot products (AVX512_BF16), which not every HOST_AVX512 machine has. */
bool host_level_bf16(void);

/* The level to use now: OSCAR_HOST_LEVEL, or the best. OSCAR_ERR_CONFIG when the variable is not one of the names,
 * OSCAR_ERR_UNSUPPORTED when this CPU lacks what it asks for. */
int host_level_current(enum host_level *ret, struct oscar_cause *cause);

#endif
