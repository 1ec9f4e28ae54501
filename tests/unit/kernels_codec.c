/* SPDX-License-Identifier: Apache-2.0 */
/* The codec: golden vectors made by another hand, given by the oracle and by every level, and the oracle's edges. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/codec.h"
#include "kernels/number.h"
#include "tests/support/golden_codec.h"

#define MAX_DIM 256U

/* ---- golden vectors ---- */

static void the_oracle_gives_the_golden_vectors(void **state) {
    (void)state;
    for (size_t name = 0; name < GOLDEN_FILES; name++) {
        struct golden *golden = golden_open(golden_names[name]);
        uint32_t d = golden->d;
        for (uint32_t row = 0; row < GOLDEN_ROWS; row++) {
            float centre[MAX_DIM], x[MAX_DIM];
            uint8_t codes[MAX_DIM];
            struct oscar_row_scale scale;
            oscar_codec_centre(&golden->calibration, &golden->head, (uint64_t)golden->positions[row], centre);
            assert_memory_equal(centre, golden->centre + (size_t)row * d, d * sizeof(float));
            for (uint32_t j = 0; j < d; j++)
                x[j] = oscar_bf16_to_float(golden->rows[(size_t)row * d + j]) - centre[j];
            assert_int_equal(oscar_codec_row(x, d, golden->head.rank_k, NULL, &scale, codes), 0);
            assert_int_equal(scale.scale, golden->scale[row]);
            assert_int_equal(scale.zero, golden->zero[row]);
            assert_memory_equal(codes, golden->nearest + (size_t)row * d, d);
            assert_int_equal(oscar_codec_row(x, d, golden->head.rank_k, golden->head.feedback, &scale, codes), 0);
            assert_memory_equal(codes, golden->feedback + (size_t)row * d, d);
        }
        golden_close(golden);
    }
}

/* Every golden row at its row of a page of its position, among other rows; as V too where it has no centre to lose. */
static void golden_rows_pack_to_golden_codes_wherever_they_lie(void **state) {
    enum host_level level = kernel_level_or_skip(state);
    struct kernel_random random = kernel_random_open();
    for (size_t name = 0; name < GOLDEN_FILES; name++) {
        struct golden *golden = golden_open(golden_names[name]);
        uint32_t d = golden->d;
        const float *feedback = golden->head.feedback;
        uint8_t *packed = malloc(oscar_packed_record_bytes(d));
        assert_non_null(packed);
        for (uint32_t row = 0; row < GOLDEN_ROWS; row++) {
            uint8_t *dense = kernel_dense_page(&random, &golden->geometry, true);
            uint64_t position = (uint64_t)golden->positions[row];
            uint32_t token = (uint32_t)(position % OSCAR_PAGE_TOKENS);
            for (uint32_t side = 0; side < 2; side++)
                memcpy(dense + ((size_t)side * OSCAR_PAGE_TOKENS + token) * d * 2, golden->rows + (size_t)row * d,
                       (size_t)d * 2);
            bool with_feedback = row % 2 == 0;
            golden->head.feedback = with_feedback ? feedback : NULL;
            assert_int_equal(
                kernel_pack_page(level, &golden->geometry, &golden->calibration, dense, position - token, packed), 0);
            const uint8_t *codes = (with_feedback ? golden->feedback : golden->nearest) + (size_t)row * d;
            golden_expect_row(packed, d, 0, token, golden->scale[row], golden->zero[row], codes);
            if (golden->head.pairs == 0)
                golden_expect_row(packed, d, 1, token, golden->scale[row], golden->zero[row],
                                  golden->nearest + (size_t)row * d);
            free(dense);
        }
        free(packed);
        golden_close(golden);
    }
}

/* ---- the oracle's edges ---- */

static void a_row_that_is_not_finite_is_refused_and_leaves_the_outputs_alone(void **state) {
    (void)state;
    const float bad[] = {NAN, -NAN, INFINITY, -INFINITY};
    for (uint32_t i = 0; i < 8; i++) {
        float x[64];
        for (uint32_t j = 0; j < 64; j++)
            x[j] = (float)j - 30.0F;
        x[i < 4 ? 0 : 63] = bad[i % 4];
        struct oscar_row_scale scale = {0xAAAA, 0xBBBB};
        uint8_t codes[64];
        memset(codes, 0xCC, sizeof(codes));
        assert_int_equal(oscar_codec_row(x, 64, 40, NULL, &scale, codes), OSCAR_ERR_NOT_FINITE);
        assert_int_equal(scale.scale, 0xAAAA);
        assert_int_equal(scale.zero, 0xBBBB);
        for (uint32_t j = 0; j < 64; j++)
            assert_int_equal(codes[j], 0xCC);
    }
}

static void a_scale_that_overflows_is_refused_and_the_largest_is_not(void **state) {
    (void)state;
    float x[64] = {0};
    struct oscar_row_scale scale;
    uint8_t codes[64];
    x[5] = 65519.0F * 3.0F; /* rounds to 65504 */
    assert_int_equal(oscar_codec_row(x, 64, 63, NULL, &scale, codes), 0);
    assert_int_equal(scale.scale, 0x7BFF);
    x[5] = 65520.0F * 3.0F; /* half way to the next: infinite */
    assert_int_equal(oscar_codec_row(x, 64, 63, NULL, &scale, codes), OSCAR_ERR_NOT_FINITE);
}

static void a_minimum_of_zero_has_one_sign_whatever_zeros_the_row_holds(void **state) {
    (void)state;
    for (uint32_t first = 0; first < 2; first++) {
        float x[64];
        for (uint32_t j = 0; j < 64; j++)
            x[j] = (j + first) % 2 ? 0.0F : -0.0F;
        x[40] = 3.0F;
        struct oscar_row_scale scale;
        uint8_t codes[64];
        assert_int_equal(oscar_codec_row(x, 64, 63, NULL, &scale, codes), 0);
        assert_int_equal(scale.zero, 0x8000);
    }
}

/* Scale 1, zero 0.5 and an element just below zero: two roundings lift it over the step, one would not. */
static void the_two_additions_of_rounding_are_made_left_to_right(void **state) {
    (void)state;
    float x[64];
    for (uint32_t j = 0; j < 64; j++)
        x[j] = 0.0F;
    x[0] = -0.5F;
    x[1] = 2.5F;
    x[2] = oscar_float_from_bits(0xB3200000);
    struct oscar_row_scale scale;
    uint8_t codes[64];
    assert_int_equal(oscar_codec_row(x, 64, 63, NULL, &scale, codes), 0);
    assert_int_equal(scale.scale, 0x3C00);
    assert_int_equal(scale.zero, 0x3800);
    assert_int_equal(codes[2], 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_oracle_gives_the_golden_vectors),
        KERNEL_LEVEL_TESTS(golden_rows_pack_to_golden_codes_wherever_they_lie),
        cmocka_unit_test(a_row_that_is_not_finite_is_refused_and_leaves_the_outputs_alone),
        cmocka_unit_test(a_scale_that_overflows_is_refused_and_the_largest_is_not),
        cmocka_unit_test(a_minimum_of_zero_has_one_sign_whatever_zeros_the_row_holds),
        cmocka_unit_test(the_two_additions_of_rounding_are_made_left_to_right),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
