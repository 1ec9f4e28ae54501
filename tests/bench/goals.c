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
    /* calibration: rows of the covariance pass against those that a dgemm could multiply */
    {"covariance_d64_of_dgemm", REPORT_AT_LEAST, 70},
    {"covariance_d128_of_dgemm", REPORT_AT_LEAST, 70},
    {"covariance_d256_of_dgemm", REPORT_AT_LEAST, 70},
    /* attention on a GPU, 32 query heads and 8 KV heads of 128: against PyTorch's BF16 attention in the same run, and against what a
     * copy of as many bytes takes */
    {"decode_b1_c32768_h32_8_d128_over_sdpa", REPORT_AT_LEAST, 2.6},
    {"decode_b1_c102400_h32_8_d128_over_sdpa", REPORT_AT_LEAST, 3.7},
    {"decode_b8_c102400_h32_8_d128_over_sdpa", REPORT_AT_LEAST, 5.8},
    {"decode_b32_c32768_h32_8_d128_over_sdpa", REPORT_AT_LEAST, 5.9},
    {"decode_b1_c102400_h32_8_d128_of_copy", REPORT_AT_LEAST, 45},
    {"decode_b8_c102400_h32_8_d128_of_copy", REPORT_AT_LEAST, 84},
    {"decode_b32_c32768_h32_8_d128_of_copy", REPORT_AT_LEAST, 86},
    {"decode_b32_c102400_h32_8_d128_of_copy", REPORT_AT_LEAST, 93},
    {"decode_b1_c32768_h32_8_d128_8_pairs_cost", REPORT_AT_MOST, 8},
    {"decode_b1_c102400_h32_8_d128_8_pairs_cost", REPORT_AT_MOST, 8},
    {"decode_b8_c102400_h32_8_d128_8_pairs_cost", REPORT_AT_MOST, 3},
    {"decode_b32_c32768_h32_8_d128_8_pairs_cost", REPORT_AT_MOST, 3},
    {"decode_b32_c102400_h32_8_d128_8_pairs_cost", REPORT_AT_MOST, 3},
    {"decode_b1_c32768_h32_8_d128_16_pairs_cost", REPORT_AT_MOST, 12},
    {"decode_b1_c102400_h32_8_d128_16_pairs_cost", REPORT_AT_MOST, 12},
    {"decode_b8_c102400_h32_8_d128_16_pairs_cost", REPORT_AT_MOST, 6},
    {"decode_b32_c32768_h32_8_d128_16_pairs_cost", REPORT_AT_MOST, 6},
    {"decode_b32_c102400_h32_8_d128_16_pairs_cost", REPORT_AT_MOST, 6},
    /* store and pack on a GPU: against a copy of as many bytes; K of 102,400 tokens, 8 heads of 128, 36 layers */
    {"store_of_copy", REPORT_AT_LEAST, 60},
    {"pack_nearest_of_floor", REPORT_AT_LEAST, 70},
    {"pack_feedback_k", REPORT_AT_MOST, 30},
    /* processes that share a GPU */
    {"attach_32_gib", REPORT_AT_MOST, 5},
    {"attach_100k_to_attention", REPORT_AT_MOST, 2},
    {"attach_100k_copied", REPORT_AT_MOST, 0},
    {"share_copies", REPORT_AT_MOST, 1},
    {"share_copies_mps", REPORT_AT_MOST, 1},
    {"packing_cost_own_pages", REPORT_AT_MOST, 3},
    {"packing_cost_own_pages_mps", REPORT_AT_MOST, 3},
    {"packing_cost_beside_prefill", REPORT_AT_MOST, 3},
    {"packing_cost_beside_prefill_mps", REPORT_AT_MOST, 3},
    {NULL, REPORT_AT_LEAST, 0},
};
