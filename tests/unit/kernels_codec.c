/* SPDX-License-Identifier: Apache-2.0 */
/* The codec: golden vectors made by another hand, given by the oracle and by every level, and the oracle's edges. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/codec.h"
#include "kernels/number.h"
#include "proto/safetensors.h"
#include "tests/support/kernel_fixture.h"

#define MAX_DIM 256U

/* ---- golden vectors ---- */

#define GOLDEN_ROWS 384U

static const char *const golden_names[] = {"d64-m0", "d64-m16", "d128-m0", "d128-m8", "d128-m16", "d256-m8"};
#define GOLDEN_FILES (sizeof(golden_names) / sizeof(golden_names[0]))

/* A file as a model of one layer and one head, and its tensors in aligned copies. */
struct golden {
    uint32_t d;
    struct oscar_geometry geometry;
    struct oscar_calibration calibration;
    struct oscar_head_calibration head;
    uint16_t *rows;
    int64_t *positions;
    float *centre;
    uint16_t *scale, *zero;
    uint8_t *nearest, *feedback;
    void *owned[24];
    uint32_t owned_count;
};

static void *golden_own(struct golden *golden, size_t bytes) {
    void *memory = aligned_alloc(64, (bytes + 64) / 64 * 64);
    assert_non_null(memory);
    golden->owned[golden->owned_count++] = memory;
    return memory;
}

static void *golden_tensor(struct golden *golden, const struct oscar_safetensors *file, const char *name,
                           uint64_t *ret_elements) {
    struct oscar_tensor_view view;
    assert_int_equal(oscar_safetensors_find(file, name, &view), 0);
    void *copy = golden_own(golden, view.bytes);
    if (view.bytes > 0)
        memcpy(copy, view.data, view.bytes);
    if (ret_elements)
        *ret_elements = view.elements;
    return copy;
}

static struct golden *golden_open(const char *name) {
    struct golden *golden = calloc(1, sizeof(*golden));
    assert_non_null(golden);
    char path[512];
    snprintf(path, sizeof(path), OSCAR_TEST_DATA "/golden/codec-%s.safetensors", name);
    struct oscar_safetensors *file;
    struct oscar_cause cause = {0};
    if (oscar_safetensors_open(path, &file, &cause) < 0)
        fail_msg("%s: %s", path, cause.text);
    uint64_t elements, frequencies;
    golden->rows = golden_tensor(golden, file, "rows", &elements);
    golden->d = (uint32_t)(elements / GOLDEN_ROWS);
    golden->positions = golden_tensor(golden, file, "positions", NULL);
    golden->centre = golden_tensor(golden, file, "centre", NULL);
    golden->scale = golden_tensor(golden, file, "scale", NULL);
    golden->zero = golden_tensor(golden, file, "zero", NULL);
    golden->nearest = golden_tensor(golden, file, "codes_nearest", NULL);
    golden->feedback = golden_tensor(golden, file, "codes_feedback", NULL);
    uint32_t rank = (uint32_t) * (int32_t *)golden_tensor(golden, file, "rank", NULL);
    golden->calibration.omega = golden_tensor(golden, file, "omega", &frequencies);
    int32_t *pair = golden_own(golden, sizeof(*pair) * (frequencies + 1));
    for (uint32_t i = 0; i < frequencies; i++)
        pair[i] = (int32_t)i;
    golden->head = (struct oscar_head_calibration){
        .feedback = golden_tensor(golden, file, "feedback_factor", NULL),
        .centre_static = golden_tensor(golden, file, "centre_static", NULL),
        .centre_cos = golden_tensor(golden, file, "centre_a", NULL),
        .centre_sin = golden_tensor(golden, file, "centre_b", NULL),
        .centre_pair = pair,
        .pairs = (uint32_t)frequencies,
        .rank_k = rank,
        .rank_v = rank,
    };
    golden->geometry = (struct oscar_geometry){
        1, 1, 1, golden->d, OSCAR_BF16, OSCAR_PAGE_TOKENS, OSCAR_SINK_TOKENS, OSCAR_RECENT_TOKENS};
    struct oscar_calibration *calibration = &golden->calibration;
    calibration->layers = calibration->kv_heads = 1;
    calibration->head_dim = golden->d;
    calibration->frequencies = (uint32_t)frequencies;
    calibration->heads = &golden->head;
    if (frequencies > 0) {
        const uint32_t pages = 1U << 14; /* positions below 2^20 */
        size_t bytes = oscar_turns_bytes(calibration, pages);
        void *turns = golden_own(golden, bytes);
        oscar_turns_fill(calibration, pages, turns);
        assert_int_equal(oscar_calibration_attach_turns(calibration, turns, bytes, pages), 0);
    }
    oscar_safetensors_free(file);
    return golden;
}

static void golden_close(struct golden *golden) {
    for (uint32_t i = 0; i < golden->owned_count; i++)
        free(golden->owned[i]);
    free(golden);
}

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

static void expect_packed_row(const uint8_t *packed, uint32_t d, unsigned side, uint32_t token, uint16_t scale,
                              uint16_t zero, const uint8_t *codes) {
    uint16_t pair[2];
    memcpy(pair, packed + oscar_packed_scales_offset(d) + oscar_packed_scale_offset(token) + side * sizeof(pair),
           sizeof(pair));
    assert_int_equal(pair[0], scale);
    assert_int_equal(pair[1], zero);
    for (uint32_t j = 0; j < d; j++)
        assert_int_equal(oscar_packed_code_get(packed, d, side, token, j), codes[j]);
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
            expect_packed_row(packed, d, 0, token, golden->scale[row], golden->zero[row], codes);
            if (golden->head.pairs == 0)
                expect_packed_row(packed, d, 1, token, golden->scale[row], golden->zero[row],
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
