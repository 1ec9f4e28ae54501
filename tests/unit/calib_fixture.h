/* SPDX-License-Identifier: Apache-2.0 */
/* Small captures of a made-up model, and random numbers. */
#ifndef OSCAR_TESTS_CALIB_FIXTURE_H
#define OSCAR_TESTS_CALIB_FIXTURE_H

/* clang-format off */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
/* clang-format on */

#include <stdbool.h>

#include "proto/safetensors.h"

/* Seeds from the clock, or from OSCAR_TEST_SEED, and prints the seed. */
void calib_seed(void);
double calib_uniform(void); /* -1 .. 1 */
double calib_normal(void);

/* A folder of the test's own, removed with all in it at the end of the program. */
const char *calib_folder(void);
/* PATH in it, in one of 64 buffers that are used in turn. */
const char *calib_path(const char *name);

/* What a made-up model gives: per layer a K with a bias that RoPE has turned, correlated queries, V with structure. The same
 * (layer, head, position) has the same row in every capture. */
struct calib_model {
    uint32_t layers, query_heads, kv_heads, d;
    double rope_base;
    double bias; /* of K, beside noise of 1 */
};

/* Tokens first .. first + tokens - 1 of layers from .. to - 1. */
struct calib_cut {
    uint32_t from, to;
    uint64_t first, tokens;
    enum oscar_tensor_type type;
    void (*change)(float *row, uint32_t layer, char part, uint64_t position, uint32_t head, uint32_t d); /* or NULL */
    const char *no_tensor; /* this one is left out */
    bool no_rope;          /* nothing is said about it */
};
void calib_write_capture(const char *path, const struct calib_model *model, const struct calib_cut *cut);

/* One row of the made-up model. */
void calib_row(const struct calib_model *model, uint32_t layer, char part, uint64_t position, uint32_t head,
               float *ret);

#endif
