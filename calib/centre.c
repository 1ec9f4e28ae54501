/* SPDX-License-Identifier: Apache-2.0 */
#include "calib/centre.h"

#include <cblas.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "proto/cleanup.h"

/* Taking a mean of squared length s out of every row takes s out of the mean square. */
static double gain(const struct moments *moments, const struct rope *rope, uint32_t pair) {
    uint32_t x;
    uint32_t y;
    rope_pair_dims(rope, pair, &x, &y);
    const double *turning = moments->unturned;
    const double *constant = moments->turned;
    return turning[x] * turning[x] + turning[y] * turning[y] - constant[x] * constant[x] - constant[y] * constant[y];
}

uint32_t centre_choose(const struct moments *moments, const struct rope *rope, uint32_t most,
                       int32_t ret[OSCAR_MAX_PAIRS]) {
    bool taken[ROPE_MAX_PAIRS] = {false};
    uint32_t count = 0;
    for (; count < most; count++) {
        double best = 0;
        uint32_t pair = rope->pairs;
        for (uint32_t i = 0; i < rope->pairs; i++)
            if (!taken[i] && gain(moments, rope, i) > best) {
                best = gain(moments, rope, i);
                pair = i;
            }
        if (pair == rope->pairs)
            break;
        taken[pair] = true;
        ret[count] = (int32_t)pair;
    }
    return count;
}

void centre_fill(int32_t *pair, uint32_t count, uint32_t wanted) {
    for (int32_t candidate = 0; count < wanted; candidate++) {
        bool used = false;
        for (uint32_t i = 0; i < count; i++)
            used = used || pair[i] == candidate;
        if (!used)
            pair[count++] = candidate;
    }
}

/* ret = row * rotation, rounded */
static void rotate_row(const double *row, const double *rotation, uint32_t d, double *scratch, float *ret) {
    cblas_dgemv(CblasRowMajor, CblasTrans, (int)d, (int)d, 1.0, rotation, (int)d, row, 1, 0.0, scratch, 1);
    for (uint32_t j = 0; j < d; j++)
        ret[j] = (float)scratch[j];
}

int centre_make(const struct moments *moments, const struct rope *rope, const int32_t *pair, uint32_t turning,
                uint32_t pairs, uint32_t d, const double *rotation, float *ret_static, float *ret_cos, float *ret_sin,
                struct oscar_cause *cause) {
    _cleanup_free_ double *memory = calloc((size_t)3 * d, sizeof(*memory));
    if (memory == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a centre");
    double *still = memory;
    double *row = memory + d;
    double *scratch = memory + (size_t)2 * d;
    double tokens = (double)moments->tokens;
    for (uint32_t j = 0; j < d; j++)
        still[j] = moments->turned[j] / tokens;
    memset(ret_cos, 0, (size_t)pairs * d * sizeof(*ret_cos));
    memset(ret_sin, 0, (size_t)pairs * d * sizeof(*ret_sin));
    for (uint32_t i = 0; i < turning; i++) {
        uint32_t x;
        uint32_t y;
        rope_pair_dims(rope, (uint32_t)pair[i], &x, &y);
        still[x] = still[y] = 0;
        memset(row, 0, d * sizeof(*row));
        row[x] = moments->unturned[x] / tokens;
        row[y] = moments->unturned[y] / tokens;
        rotate_row(row, rotation, d, scratch, ret_cos + (size_t)i * d);
        double quarter = row[x]; /* (x, y) a quarter turn on: (-y, x) */
        row[x] = -row[y];
        row[y] = quarter;
        rotate_row(row, rotation, d, scratch, ret_sin + (size_t)i * d);
    }
    rotate_row(still, rotation, d, scratch, ret_static);
    return 0;
}
