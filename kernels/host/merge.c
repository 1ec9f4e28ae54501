/* SPDX-License-Identifier: Apache-2.0 */
/* Two partial attention results over disjoint tokens become one. */
#include <math.h>
#include <string.h>

#include "kernels/host/host.h"
#include "kernels/number.h"

/* (row, head) pairs of one task. */
#define PAIRS_A_TASK 64U

struct merge_weights {
    float out, other; /* sum to 1, or are both 0; a side of weight 0 is not read */
    float lse;
};

static struct merge_weights weigh(float lse, float other_lse) {
    float max = fmaxf(lse, other_lse);
    if (max == -INFINITY)
        return (struct merge_weights){0, 0, -INFINITY};
    float out = expf(lse - max), other = expf(other_lse - max), sum = out + other;
    return (struct merge_weights){out / sum, other / sum, max + logf(sum)};
}

static float element(bool bf16, uint16_t bits) { return bf16 ? oscar_bf16_to_float(bits) : oscar_fp16_to_float(bits); }

/* A side without tokens may hold anything, NaN too. */
static void merge_pair(const struct oscar_merge_args *args, uint32_t row, uint32_t head) {
    uint16_t *out = (uint16_t *)args->out + row * args->out_row_stride + head * args->out_head_stride;
    const uint16_t *other =
        (const uint16_t *)args->other_out + row * args->other_row_stride + head * args->other_head_stride;
    size_t index = (size_t)row * args->heads + head;
    struct merge_weights weights = weigh(args->lse[index], args->other_lse[index]);
    bool bf16 = args->dtype == OSCAR_BF16;
    for (uint32_t i = 0; i < args->head_dim; i++) {
        float sum = weights.out != 0 ? weights.out * element(bf16, out[i]) : 0;
        sum += weights.other != 0 ? weights.other * element(bf16, other[i]) : 0;
        out[i] = bf16 ? oscar_bf16_from_float(sum) : oscar_fp16_from_float(sum);
    }
    args->lse[index] = weights.lse;
}

static void merge_task(void *argument, uint32_t task, uint32_t worker) {
    const struct oscar_merge_args *args = argument;
    (void)worker;
    uint64_t pairs = (uint64_t)args->rows * args->heads, first = (uint64_t)task * PAIRS_A_TASK;
    for (uint64_t pair = first; pair < first + PAIRS_A_TASK && pair < pairs; pair++)
        merge_pair(args, (uint32_t)(pair / args->heads), (uint32_t)(pair % args->heads));
}

void host_merge(struct host_pool *pool, const struct oscar_merge_args *args) {
    struct oscar_merge_args copy = *args;
    uint64_t tasks = ((uint64_t)args->rows * args->heads + PAIRS_A_TASK - 1) / PAIRS_A_TASK;
    host_pool_run(pool, (uint32_t)tasks, merge_task, &copy);
}
