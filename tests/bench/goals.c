/* SPDX-License-Identifier: Apache-2.0 */
/* What the benchmarks must reach. A goal is a ratio within one run where it can be, so that it holds on any machine. */
#include "tests/bench/report.h"

const struct report_goal report_goals[] = {
    /* attention on the host: integers in place of dequantising, one KV head's token, same instruction set */
    {"d128_vnni_over_dequant", REPORT_AT_LEAST, 5},
    {"d64_vnni_over_dequant", REPORT_AT_LEAST, 5},
    {"d128_avx2_over_dequant", REPORT_AT_LEAST, 2},
    {"d64_avx2_over_dequant", REPORT_AT_LEAST, 2},
    {"d128_attend_error", REPORT_AT_MOST, 1e-3},
    {"d64_attend_error", REPORT_AT_MOST, 1e-3},
    /* packed pages */
    {"packed_bits_d128", REPORT_AT_MOST, 2.26},
    /* the control plane, with a million pages in the cache; 100k: a sequence of 100,000 tokens */
    {"seq_open_100k_hit_p50", REPORT_AT_MOST, 0.30},
    {"seq_open_100k_hit_p99", REPORT_AT_MOST, 0.60},
    {"seq_open_100k_hit_over_floor", REPORT_AT_MOST, 2},
    {"seq_close_100k_p50", REPORT_AT_MOST, 0.05},
    {"seq_advance_page_p50", REPORT_AT_MOST, 0.03},
    {"metadata_per_million_tokens", REPORT_AT_MOST, 16},
    {"copies_of_64k_prefix_8_workers", REPORT_AT_MOST, 1},
    {NULL, REPORT_AT_LEAST, 0},
};
