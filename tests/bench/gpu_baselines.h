/* SPDX-License-Identifier: Apache-2.0 */
/* The BF16 baselines of attention, which a Python program measures (gpu_baselines.py) while this one waits. */
#ifndef OSCAR_TESTS_BENCH_GPU_BASELINES_H
#define OSCAR_TESTS_BENCH_GPU_BASELINES_H

#include "tests/bench/report.h"

/* Reports a row for each baseline, without a value where there is no PyTorch, which one line on standard error then says. */
void gpu_baselines_measure(struct report *report);

#endif
