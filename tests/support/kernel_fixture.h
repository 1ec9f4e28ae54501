/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of the kernels share: seeded random numbers, models with made-up calibrations, rows that are hard to code. */
#ifndef OSCAR_TESTS_KERNEL_FIXTURE_H
#define OSCAR_TESTS_KERNEL_FIXTURE_H

/* cmocka.h does not include what it needs. clang-format must not sort it first. */
/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

#include "kernels/host/host.h"

struct kernel_random {
    uint64_t state;
};

/* Seeded by OSCAR_TEST_SEED, else by the clock; prints the seed, so that a failure can be repeated. */
struct kernel_random kernel_random_open(void);
uint64_t kernel_random_next(struct kernel_random *random);
uint32_t kernel_random_below(struct kernel_random *random, uint32_t bound);
double kernel_random_uniform(struct kernel_random *random); /* 0..1 */
double kernel_random_normal(struct kernel_random *random);
void kernel_random_bytes(struct kernel_random *random, void *bytes, size_t count);

struct kernel_model_options {
    uint32_t layers, kv_heads, head_dim;
    uint32_t dtype;  /* 0: OSCAR_BF16 */
    bool matrix;     /* random orthogonal rotations; false: Hadamard */
    double feedback; /* size of L's off-diagonals; 0: nearest rounding */
    bool centre;     /* K has a centre, of this size, and this many pairs of it turn */
    double centre_size;
    uint32_t pairs;
    uint32_t turn_pages; /* pages of the turn tables */
    uint32_t rank_k, rank_v;
};

struct kernel_model {
    struct oscar_geometry geometry;
    struct oscar_calibration calibration;
    void *owned[64];
    uint32_t owned_count;
};

struct kernel_model *kernel_model_open(struct kernel_random *random, const struct kernel_model_options *options);
void kernel_model_close(struct kernel_model *model);

/* Kinds of BF16 rows, each finite and within OSCAR_MAX_ROW_MAGNITUDE. */
enum kernel_row_kind {
    KERNEL_ROW_NORMAL,
    KERNEL_ROW_OUTLIERS,
    KERNEL_ROW_TIES, /* few distinct values */
    KERNEL_ROW_ZERO,
    KERNEL_ROW_SIGNED_ZEROS, /* with a few numbers among them */
    KERNEL_ROW_CONSTANT,
    KERNEL_ROW_SUBNORMAL,
    KERNEL_ROW_ONE_HUGE,
    KERNEL_ROW_POWERS,        /* random exponents over the whole range */
    KERNEL_ROW_ONE_MAGNITUDE, /* random signs */
    KERNEL_ROW_ONE_SIGN,
    KERNEL_ROW_KINDS,
};
void kernel_row_fill(struct kernel_random *random, enum kernel_row_kind kind, uint32_t d, uint16_t *ret_row);
/* A dense page of such rows, 64-byte aligned; the caller frees it. */
uint8_t *kernel_dense_page(struct kernel_random *random, const struct oscar_geometry *geometry, bool adversarial);

/* Packs one page on one thread and returns its status. */
int32_t kernel_pack_page(enum host_level level, const struct oscar_geometry *geometry,
                         const struct oscar_calibration *calibration, const uint8_t *dense, uint64_t position,
                         uint8_t *packed);

/* Three entries of a test array, one a level; the test's state is the level's number. */
#define KERNEL_LEVEL_TESTS(function)                                                                                   \
    {#function "[portable]", function, NULL, NULL, &kernel_levels[HOST_PORTABLE]},                                     \
        {#function "[avx2]", function, NULL, NULL, &kernel_levels[HOST_AVX2]}, {                                       \
#function "[avx512]", function, NULL, NULL, &kernel_levels[HOST_AVX512]                                        \
    }
extern enum host_level kernel_levels[HOST_LEVELS];
/* The level of this run; the test is skipped, and says so, where the CPU lacks it. */
enum host_level kernel_level_or_skip(void **state);

#endif
