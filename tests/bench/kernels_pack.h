/* SPDX-License-Identifier: Apache-2.0 */
/* Rows about writing pages: store, inspect and pack through the host backend's table, and what a packed page costs. */
#ifndef OSCAR_TESTS_BENCH_KERNELS_PACK_H
#define OSCAR_TESTS_BENCH_KERNELS_PACK_H

#include "tests/bench/report.h"

/* A row is one token of one KV head and layer, K and V. Exits the program on a failure. */
void bench_pack(struct report *report);

#endif
