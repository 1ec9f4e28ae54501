/* SPDX-License-Identifier: Apache-2.0 */
/* Merging two partial attention results on the host: against float64, and what attention itself gives in two parts. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attend_fixture.h"
#include "kernels/number.h"
#include "kernels/reference.h"

#define POISON 0x7E5AU /* a NaN in both types */

static uint64_t state;
static const struct oscar_device_ops *ops;

static float value_of(uint32_t dtype, uint16_t bits) {
    return dtype == OSCAR_BF16 ? oscar_bf16_to_float(bits) : oscar_fp16_to_float(bits);
}

static uint16_t bits_of(uint32_t dtype, float value) {
    return dtype == OSCAR_BF16 ? oscar_bf16_from_float(value) : oscar_fp16_from_float(value);
}

/* One side: strides that leave gaps, log-sum-exps from far below to far above, and some rows without tokens, whose outputs
 * are poison. */
struct side {
    int64_t row_stride, head_stride;
    size_t elements;
    uint16_t *out;
    float *lse;
};

static struct side side_open(const struct oscar_merge_args *args) {
    struct side side = {.head_stride = args->head_dim + fixture_pick(&state, 3)};
    side.row_stride = side.head_stride * args->heads + fixture_pick(&state, 9);
    side.elements = (size_t)(side.row_stride * args->rows);
    side.out = malloc(side.elements * sizeof(*side.out));
    side.lse = malloc(sizeof(*side.lse) * args->rows * args->heads);
    assert_true(side.out && side.lse);
    for (size_t i = 0; i < side.elements; i++)
        side.out[i] = POISON;
    float spread = fixture_pick(&state, 2) == 0 ? 1.0F : 60.0F;
    for (uint32_t row = 0; row < args->rows; row++)
        for (uint32_t head = 0; head < args->heads; head++) {
            bool nothing = fixture_pick(&state, 5) == 0;
            side.lse[row * args->heads + head] = nothing ? -INFINITY : 300.0F + spread * fixture_normal(&state);
            for (uint32_t i = 0; i < args->head_dim && !nothing; i++)
                side.out[row * side.row_stride + head * side.head_stride + i] =
                    bits_of(args->dtype, 3.0F * fixture_normal(&state));
        }
    return side;
}

static void side_close(struct side *side) {
    free(side->out);
    free(side->lse);
}

/* Half a unit of the output type, and the float sums. */
static bool close_to(uint32_t dtype, double expected, double got) {
    double rounding = dtype == OSCAR_BF16 ? 0x1p-8 : 0x1p-11;
    return fabs(got - expected) <= fabs(expected) * rounding * 1.001 + 1e-5;
}

static void check_merge(struct oscar_stream_impl *stream, const struct oscar_merge_args *args,
                        const struct side *before) {
    size_t pairs = (size_t)args->rows * args->heads;
    double *out64 = malloc(pairs * args->head_dim * sizeof(*out64));
    double *lse64 = malloc(pairs * sizeof(*lse64));
    assert_true(out64 && lse64);
    oscar_reference_merge(args, out64, lse64);
    assert_int_equal(ops->merge(stream, args), 0);
    assert_int_equal(ops->stream_wait(stream, UINT64_MAX), 0);
    const uint16_t *out = args->out;
    for (size_t e = 0; e < before->elements; e++) {
        int64_t row = (int64_t)e / before->row_stride, rest = (int64_t)e % before->row_stride;
        int64_t head = rest / before->head_stride, i = rest % before->head_stride;
        if (head >= args->heads || i >= args->head_dim) {
            assert_int_equal(out[e], POISON);
            continue;
        }
        double expected = out64[((size_t)row * args->heads + (size_t)head) * args->head_dim + (size_t)i];
        if (!close_to(args->dtype, expected, value_of(args->dtype, out[e])))
            fail_msg("row %lld, head %lld, element %lld: %g instead of %g", (long long)row, (long long)head,
                     (long long)i, value_of(args->dtype, out[e]), expected);
    }
    for (size_t i = 0; i < pairs; i++)
        assert_true(lse64[i] == args->lse[i] || fabs(lse64[i] - args->lse[i]) <= 1e-4);
    free(out64);
    free(lse64);
}

static void a_merge_weighs_both_sides_by_their_log_sum_exp(void **unused) {
    (void)unused;
    static const uint32_t sizes[] = {64, 128, 256};
    struct oscar_device *device;
    struct oscar_stream_impl *stream;
    assert_int_equal(ops->device_open(NULL, &device, NULL), 0);
    for (uint32_t trial = 0; trial < 24; trial++) {
        struct oscar_stream_options options = {.threads = 1 + trial % 3, .asynchronous = trial % 2 != 0};
        assert_int_equal(ops->stream_open(device, &options, &stream, NULL), 0);
        struct oscar_merge_args args = {.rows = 1 + fixture_pick(&state, 40),
                                        .heads = 1 + fixture_pick(&state, 12),
                                        .head_dim = sizes[trial % 3],
                                        .dtype = trial % 4 < 2 ? OSCAR_BF16 : OSCAR_FP16};
        struct side own = side_open(&args), other = side_open(&args);
        args.out = own.out;
        args.out_row_stride = own.row_stride;
        args.out_head_stride = own.head_stride;
        args.lse = own.lse;
        args.other_out = other.out;
        args.other_row_stride = other.row_stride;
        args.other_head_stride = other.head_stride;
        args.other_lse = other.lse;
        check_merge(stream, &args, &own);
        side_close(&own);
        side_close(&other);
        ops->stream_close(stream);
    }
    ops->device_close(device);
}

/* Item 0 is a sequence; items 1 and 2 its pages before and from some page on. Without a centre a page does not know where it
 * stands. */
static void attention_in_two_parts_is_attention_to_all(void **unused) {
    (void)unused;
    for (uint32_t trial = 0; trial < 6; trial++) {
        struct fixture_options options = {.head_dim = trial % 2 == 0 ? 64 : 128,
                                          .group = 3,
                                          .kv_heads = 2,
                                          .layers = 1,
                                          .dtype = OSCAR_FP16,
                                          .pairs = -1,
                                          .matrix = trial % 3 == 0,
                                          .forms = FIXTURE_RANDOM,
                                          .distinct = 3,
                                          .key_size = 1,
                                          .query_size = 1};
        struct fixture *fixture = fixture_open(&state, &options, 16);
        uint32_t pages = 1 + fixture_pick(&state, 6), tokens = 64 * pages + 1 + fixture_pick(&state, 300);
        fixture_add(fixture, &state, tokens, 1);
        fixture_add(fixture, &state, 64 * pages, 1);
        fixture_add(fixture, &state, tokens - 64 * pages, 1);
        struct oscar_attend_item *item = fixture->item;
        item[1].pages = item[0].pages;
        item[2].pages = item[0].pages + pages;
        for (uint32_t i = 1; i < 3; i++) {
            item[i].q = item[0].q;
            item[i].q_row_stride = item[0].q_row_stride;
            item[i].q_head_stride = item[0].q_head_stride;
        }
        assert_int_equal(ops->attend(NULL, &fixture->args), 0);
        double lse_error, bound = 3 * 0x1p-11 + 5e-4; /* three roundings, and attention's own */
        assert_true(fixture_error(fixture, 0, &lse_error) <= bound);
        struct oscar_merge_args args = {.rows = 1,
                                        .heads = fixture->geometry.query_heads,
                                        .head_dim = options.head_dim,
                                        .dtype = options.dtype,
                                        .out = item[1].out,
                                        .out_row_stride = item[1].out_row_stride,
                                        .out_head_stride = item[1].out_head_stride,
                                        .lse = item[1].lse,
                                        .other_out = item[2].out,
                                        .other_row_stride = item[2].out_row_stride,
                                        .other_head_stride = item[2].out_head_stride,
                                        .other_lse = item[2].lse};
        assert_int_equal(ops->merge(NULL, &args), 0);
        item[0].out = item[1].out;
        item[0].out_row_stride = item[1].out_row_stride;
        item[0].out_head_stride = item[1].out_head_stride;
        item[0].lse = item[1].lse;
        assert_true(fixture_error(fixture, 0, &lse_error) <= bound);
        assert_true(lse_error <= 2e-3);
        fixture_close(fixture);
    }
}

static void a_merge_of_an_unknown_type_or_size_is_refused(void **unused) {
    (void)unused;
    struct oscar_merge_args args = {.rows = 0, .heads = 1, .head_dim = 64, .dtype = OSCAR_BF16};
    assert_int_equal(ops->merge(NULL, &args), 0);
    args.dtype = 3;
    assert_int_equal(ops->merge(NULL, &args), OSCAR_ERR_INVALID);
    args.dtype = OSCAR_FP16;
    args.head_dim = 96;
    assert_int_equal(ops->merge(NULL, &args), OSCAR_ERR_INVALID);
}

int main(void) {
    state = fixture_seed();
    ops = oscar_device_host();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_merge_weighs_both_sides_by_their_log_sum_exp),
        cmocka_unit_test(attention_in_two_parts_is_attention_to_all),
        cmocka_unit_test(a_merge_of_an_unknown_type_or_size_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
