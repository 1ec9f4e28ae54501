/* SPDX-License-Identifier: Apache-2.0 */
/* Kinds of calibrations that a page is packed by: each head size, with and without centre and feedback, and what is badly
 * conditioned. */
#ifndef OSCAR_TESTS_GPU_PACK_CASES_H
#define OSCAR_TESTS_GPU_PACK_CASES_H

#include "tests/support/kernel_fixture.h"

#define PACK_CASES 20U
extern const struct kernel_model_options pack_cases[PACK_CASES];

/* A model of 2 layers and 3 heads, for positions below 2^20. */
struct kernel_model *pack_case_open(struct kernel_random *random, const struct kernel_model_options *options);

#endif
