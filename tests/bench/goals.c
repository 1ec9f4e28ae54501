/* SPDX-License-Identifier: Apache-2.0 */
/* What the benchmarks must reach. A goal is a ratio within one run where it can be, so that it holds on any machine. */
#include "tests/bench/report.h"

const struct report_goal report_goals[] = {
    /* attention on the host: integers in place of dequantising, one KV head's token, same instruction set */
    {"d128_vnni_over_dequant", REPORT_AT_LEAST, 5},
    {"d64_vnni_over_dequant", REPORT_AT_LEAST, 5},
    {"d128_avx2_over_dequant", REPORT_AT_LEAST, 2},
    {"d64_avx2_over_dequant", REPORT_AT_LEAST, 2},
    {"attend_error", REPORT_AT_MOST, 1e-3},
    /* packed pages */
    {"packed_bits_d128", REPORT_AT_MOST, 2.26},
    {NULL, REPORT_AT_LEAST, 0},
};
