/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/pack_cases.h"

/* clang-format off */
const struct kernel_model_options pack_cases[PACK_CASES] = {
    /* nearest, as the rows lie */
    {.head_dim = 64, .rank_k = 61, .rank_v = 58},
    {.head_dim = 128, .rank_k = 122, .rank_v = 117},
    {.head_dim = 256, .rank_k = 245, .rank_v = 235},
    /* nearest with a centre */
    {.head_dim = 64, .centre = true, .centre_size = 1.0, .pairs = 16, .rank_k = 61, .rank_v = 58},
    {.head_dim = 128, .centre = true, .centre_size = 1.0, .pairs = 1, .rank_k = 122, .rank_v = 117},
    {.head_dim = 256, .centre = true, .centre_size = 1.0, .pairs = 8, .rank_k = 245, .rank_v = 235},
    /* feedback without a centre */
    {.head_dim = 64, .feedback = 0.2, .rank_k = 61, .rank_v = 58},
    {.head_dim = 128, .feedback = 0.1, .rank_k = 122, .rank_v = 117},
    {.head_dim = 256, .feedback = 0.1, .rank_k = 245, .rank_v = 235},
    /* all of it */
    {.head_dim = 64, .feedback = 0.2, .centre = true, .centre_size = 1.0, .pairs = 8, .rank_k = 61, .rank_v = 58},
    {.head_dim = 128, .feedback = 0.1, .centre = true, .centre_size = 1.0, .pairs = 16, .rank_k = 122, .rank_v = 117},
    {.head_dim = 128, .feedback = 0.1, .centre = true, .centre_size = 1.0, .pairs = 8, .rank_k = 122, .rank_v = 117},
    {.head_dim = 256, .feedback = 0.1, .centre = true, .centre_size = 1.0, .pairs = 16, .rank_k = 245, .rank_v = 235},
    /* a constant centre; no clip */
    {.head_dim = 128, .feedback = 0.2, .centre = true, .centre_size = 3.0, .rank_k = 127, .rank_v = 127},
    /* badly conditioned: the centre dwarfs the row, values run to infinity, or to NaN, which counts as code 0 */
    {.head_dim = 128, .feedback = 30.0, .centre = true, .centre_size = 2e3, .pairs = 16, .rank_k = 120, .rank_v = 112},
    {.head_dim = 64, .feedback = 1e6, .rank_k = 63, .rank_v = 0},
    {.head_dim = 128, .feedback = 1e38, .rank_k = 122, .rank_v = 117},
    {.head_dim = 256, .feedback = 1e38, .centre = true, .centre_size = 1.0, .rank_k = 122, .rank_v = 117},
    /* ranks that no calibration would choose */
    {.head_dim = 128, .feedback = 0.1, .centre = true, .centre_size = 1.0, .pairs = 3, .rank_k = 64, .rank_v = 5},
    {.head_dim = 256, .feedback = 0.5, .centre = true, .centre_size = 0.01, .pairs = 16, .rank_k = 0, .rank_v = 128},
};
/* clang-format on */

struct kernel_model *pack_case_open(struct kernel_random *random, const struct kernel_model_options *options) {
    struct kernel_model_options whole = *options;
    whole.layers = 2;
    whole.kv_heads = 3;
    whole.turn_pages = 16384; /* positions to 2^20 */
    return kernel_model_open(random, &whole);
}
