/* SPDX-License-Identifier: Apache-2.0 */
/* Packing: every level of the host backend against the oracle, to the bit. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/number.h"
#include "kernels/reference.h"
#include "proto/geometry.h"
#include "tests/support/kernel_fixture.h"

struct pack_case {
    uint32_t head_dim;
    double feedback;
    bool centre;
    double centre_size;
    uint32_t pairs;
    uint32_t rank_k, rank_v;
};

/* clang-format off */
static const struct pack_case pack_cases[] = {
    /* nearest */
    {64, 0.0, false, 0.0, 0, 61, 58},
    {128, 0.0, false, 0.0, 0, 122, 117},
    {256, 0.0, false, 0.0, 0, 245, 235},
    /* all of it */
    {64, 0.2, true, 1.0, 4, 61, 58},
    {128, 0.1, true, 1.0, 16, 122, 117},
    {256, 0.1, true, 1.0, 8, 245, 235},
    /* a constant centre; no clip */
    {128, 0.2, true, 3.0, 0, 127, 127},
    /* badly conditioned: the centre dwarfs the row, values run to infinity, or to NaN, which counts as code 0 */
    {128, 30.0, true, 2000.0, 16, 120, 112},
    {64, 1e6, false, 0.0, 0, 63, 0},
    {64, 1e38, false, 0.0, 0, 61, 58},
    /* ranks that no calibration would choose */
    {128, 0.1, true, 1.0, 3, 64, 5},
    {256, 0.5, true, 0.01, 16, 0, 128},
};
/* clang-format on */

static void packed_bytes_equal_the_oracle(void **state) {
    enum host_level level = kernel_level_or_skip(state);
    struct kernel_random random = kernel_random_open();
    for (size_t i = 0; i < sizeof(pack_cases) / sizeof(pack_cases[0]); i++) {
        const struct pack_case *c = &pack_cases[i];
        struct kernel_model *model =
            kernel_model_open(&random, &(struct kernel_model_options){.layers = 1,
                                                                      .kv_heads = 2,
                                                                      .head_dim = c->head_dim,
                                                                      .feedback = c->feedback,
                                                                      .centre = c->centre,
                                                                      .centre_size = c->centre_size,
                                                                      .pairs = c->pairs,
                                                                      .turn_pages = 16384,
                                                                      .rank_k = c->rank_k,
                                                                      .rank_v = c->rank_v});
        size_t bytes = oscar_packed_page_bytes(&model->geometry);
        uint8_t *expected = malloc(bytes);
        uint8_t *packed = malloc(bytes);
        for (uint32_t round = 0; round < 6; round++) {
            uint8_t *dense = kernel_dense_page(&random, &model->geometry, round % 2 == 0);
            uint64_t position = (uint64_t)kernel_random_below(&random, round < 3 ? 4 : 16384) * OSCAR_PAGE_TOKENS;
            int32_t status = 12345;
            kernel_random_bytes(&random, expected, bytes);
            kernel_random_bytes(&random, packed, bytes);
            assert_int_equal(oscar_reference_pack(&model->geometry, &model->calibration,
                                                  &(struct oscar_pack_item){dense, expected, position, &status}, 1),
                             0);
            assert_int_equal(status, 0);
            assert_int_equal(kernel_pack_page(level, &model->geometry, &model->calibration, dense, position, packed),
                             0);
            assert_memory_equal(packed, expected, bytes);
            free(dense);
        }
        free(expected);
        free(packed);
        kernel_model_close(model);
    }
}

/* What the oracle and the level make of one page of one head. */
static void expect_the_oracles_bytes(enum host_level level, const struct kernel_model *model, const uint8_t *dense) {
    size_t bytes = oscar_packed_page_bytes(&model->geometry);
    uint8_t *expected = malloc(bytes);
    uint8_t *packed = malloc(bytes);
    int32_t status = 1;
    struct oscar_pack_item item = {dense, expected, 0, &status};
    assert_int_equal(oscar_reference_pack(&model->geometry, &model->calibration, &item, 1), 0);
    assert_int_equal(status, 0);
    assert_int_equal(kernel_pack_page(level, &model->geometry, &model->calibration, dense, 0, packed), 0);
    assert_memory_equal(packed, expected, bytes);
    free(expected);
    free(packed);
}

/*
 * Rows that tell one order of operations from another, where random rows do not. A page of zeros less a centre is any
 * binary32 row. Its least and greatest element give the scale; the others lie on the edges between codes and one step
 * beside them, so a quotient that is off by its last bit gives another code. The top element lies where a code stands, so
 * that its error is a rounding error, and L makes it large: an error that is not made by one fma gives other codes below.
 */
static void elements_at_the_edges_of_codes_are_rounded_as_the_oracle_does(void **state) {
    enum host_level level = kernel_level_or_skip(state);
    struct kernel_random random = kernel_random_open();
    const uint32_t d = 64;
    struct kernel_model *model = kernel_model_open(&random, &(struct kernel_model_options){.layers = 1,
                                                                                           .kv_heads = 1,
                                                                                           .head_dim = d,
                                                                                           .feedback = 1.0,
                                                                                           .centre = true,
                                                                                           .centre_size = 1.0,
                                                                                           .rank_k = d - 1,
                                                                                           .rank_v = d - 1});
    struct oscar_head_calibration *head = &model->calibration.heads[0];
    float *centre = (float *)(uintptr_t)head->centre_static;
    float *feedback = (float *)(uintptr_t)head->feedback;
    uint8_t *dense = calloc(1, oscar_dense_page_bytes(&model->geometry));
    for (uint32_t round = 0; round < 400; round++) {
        float scale = oscar_fp16_to_float((uint16_t)(0x2000 + kernel_random_below(&random, 0x2000)));
        bool lifted = round % 2 != 0; /* zero is not 0 */
        float low = lifted ? -scale * (0.1F + (float)kernel_random_uniform(&random)) : 0.0F;
        float zero = oscar_fp16_to_float(oscar_fp16_from_float(-low / scale));
        for (uint32_t j = 0; j < d; j++) {
            float edge = ((float)(j % 3) + 0.5F - zero) * scale;
            float x = j / 3 % 3 == 0 ? edge : nextafterf(edge, j / 3 % 3 == 1 ? 1e9F : -1e9F);
            centre[j] = -x;
        }
        centre[3] = -low;
        centre[7] = -(low + 3.0F * scale);
        centre[d - 1] = -(2.0F - zero) * scale;
        for (uint32_t i = 0; i < d; i++)
            for (uint32_t j = 0; j < i; j++)
                feedback[(size_t)i * d + j] = i == d - 1 && lifted ? 0x1p24F : 0.0F;
        head->feedback = round % 4 < 2 ? NULL : feedback;
        expect_the_oracles_bytes(level, model, dense);
    }
    head->feedback = feedback; /* it is the model's to free */
    free(dense);
    kernel_model_close(model);
}

/* Scale 1, zero 0.5 and an element just below zero, as in kernels_codec.c: one addition would give another code. */
static void every_way_of_rounding_makes_the_two_additions_left_to_right(void **state) {
    enum host_level level = kernel_level_or_skip(state);
    struct kernel_random random = kernel_random_open();
    struct kernel_model *model = kernel_model_open(
        &random, &(struct kernel_model_options){
                     .layers = 1, .kv_heads = 1, .head_dim = 64, .feedback = 0.0, .rank_k = 63, .rank_v = 63});
    float identity[64 * 64] = {0};
    for (uint32_t i = 0; i < 64; i++)
        identity[i * 64 + i] = 1.0F;
    float centre[64] = {0};
    uint16_t *dense = calloc(1, oscar_dense_page_bytes(&model->geometry));
    for (uint32_t row = 0; row < 128; row++) { /* K and V */
        dense[row * 64] = 0xBF00;
        dense[row * 64 + 1] = 0x4020;
        dense[row * 64 + 2 + row % 62] = 0xB320;
    }
    for (uint32_t way = 0; way < 4; way++) {
        model->calibration.heads[0].feedback = way % 2 ? identity : NULL;
        model->calibration.heads[0].centre_static = way / 2 ? centre : NULL;
        expect_the_oracles_bytes(level, model, (const uint8_t *)dense);
    }
    free(dense);
    kernel_model_close(model);
}

static void a_scale_that_overflows_fails_its_page(void **state) {
    enum host_level level = kernel_level_or_skip(state);
    struct kernel_random random = kernel_random_open();
    struct kernel_model *model = kernel_model_open(
        &random,
        &(struct kernel_model_options){.layers = 1, .kv_heads = 1, .head_dim = 64, .rank_k = 63, .rank_v = 63});
    uint8_t packed[32 * 64 + 512];
    for (uint32_t side = 0; side < 2; side++) {
        uint16_t *dense = (uint16_t *)kernel_dense_page(&random, &model->geometry, false);
        size_t at = (size_t)side * 64 * 64 + kernel_random_below(&random, 64 * 64);
        memset(dense + at / 64 * 64, 0, 64 * sizeof(*dense)); /* its row's minimum is 0, whatever was drawn */
        dense[at] = 0x483F;                                   /* 195584: a scale of 65195 and some */
        assert_int_equal(kernel_pack_page(level, &model->geometry, &model->calibration, (uint8_t *)dense, 0, packed),
                         0);
        dense[at] = 0x4840; /* 196608 */
        assert_int_equal(kernel_pack_page(level, &model->geometry, &model->calibration, (uint8_t *)dense, 0, packed),
                         OSCAR_ERR_NOT_FINITE);
        free(dense);
    }
    kernel_model_close(model);
}

static void every_clip_rank_is_exact(void **state) {
    enum host_level level = kernel_level_or_skip(state);
    struct kernel_random random = kernel_random_open();
    struct kernel_model *model =
        kernel_model_open(&random, &(struct kernel_model_options){.layers = 1, .kv_heads = 1, .head_dim = 64});
    size_t bytes = oscar_packed_page_bytes(&model->geometry);
    uint8_t *expected = malloc(bytes);
    uint8_t *packed = malloc(bytes);
    for (uint32_t rank = 0; rank < 64; rank++) {
        uint8_t *dense = kernel_dense_page(&random, &model->geometry, true);
        int32_t status;
        model->calibration.heads[0].rank_k = rank;
        model->calibration.heads[0].rank_v = 63 - rank;
        assert_int_equal(oscar_reference_pack(&model->geometry, &model->calibration,
                                              &(struct oscar_pack_item){dense, expected, 0, &status}, 1),
                         0);
        assert_int_equal(kernel_pack_page(level, &model->geometry, &model->calibration, dense, 0, packed), 0);
        assert_memory_equal(packed, expected, bytes);
        free(dense);
    }
    free(expected);
    free(packed);
    kernel_model_close(model);
}

static void one_bad_element_anywhere_fails_its_page_and_no_other(void **state) {
    enum host_level level = kernel_level_or_skip(state);
    struct kernel_random random = kernel_random_open();
    struct kernel_model *model = kernel_model_open(
        &random, &(struct kernel_model_options){
                     .layers = 2, .kv_heads = 2, .head_dim = 64, .feedback = 0.1, .rank_k = 61, .rank_v = 30});
    const uint16_t bad[] = {0x7F80, 0xFF80, 0x7FC0, 0xFF81};
    size_t dense_bytes = oscar_dense_page_bytes(&model->geometry);
    uint8_t *packed = malloc(3 * oscar_packed_page_bytes(&model->geometry));
    for (uint32_t round = 0; round < 24; round++) {
        uint8_t *dense[3];
        int32_t status[3];
        struct oscar_pack_item item[3];
        for (uint32_t i = 0; i < 3; i++) {
            dense[i] = kernel_dense_page(&random, &model->geometry, true);
            item[i] = (struct oscar_pack_item){dense[i], packed + i * oscar_packed_page_bytes(&model->geometry), 0,
                                               &status[i]};
        }
        ((uint16_t *)dense[1])[kernel_random_below(&random, (uint32_t)dense_bytes / 2)] = bad[round % 4];
        struct host_pool *pool;
        assert_int_equal(host_pool_open(2, &pool, NULL), 0);
        assert_int_equal(host_pack(pool, level, &model->geometry, &model->calibration, item, 3), 0);
        assert_int_equal(host_inspect(pool, level, &model->geometry, dense[0]), 0);
        assert_int_equal(host_inspect(pool, level, &model->geometry, dense[1]), OSCAR_ERR_NOT_FINITE);
        host_pool_close(pool);
        assert_int_equal(status[0], 0);
        assert_int_equal(status[1], OSCAR_ERR_NOT_FINITE);
        assert_int_equal(status[2], 0);
        for (uint32_t i = 0; i < 3; i++)
            free(dense[i]);
    }
    free(packed);
    kernel_model_close(model);
}

/* The largest elements that inspect lets pass, against the largest centre that a calibration may have. */
static void a_page_that_passed_inspection_always_packs(void **state) {
    enum host_level level = kernel_level_or_skip(state);
    struct kernel_random random = kernel_random_open();
    struct kernel_model *model = kernel_model_open(&random, &(struct kernel_model_options){.layers = 1,
                                                                                           .kv_heads = 1,
                                                                                           .head_dim = 64,
                                                                                           .centre = true,
                                                                                           .centre_size = 1.0,
                                                                                           .rank_k = 63,
                                                                                           .rank_v = 63});
    float *centre = (float *)(uintptr_t)model->calibration.heads[0].centre_static;
    uint8_t *dense = kernel_dense_page(&random, &model->geometry, false);
    uint8_t *packed = malloc(oscar_packed_page_bytes(&model->geometry));
    for (uint32_t i = 0; i < 2 * 64 * 64; i++)
        ((uint16_t *)dense)[i] = i % 2 ? 0x477D : 0xC77D; /* +-64768: the next is 65024 */
    for (uint32_t j = 0; j < 64; j++)
        centre[j] = j % 2 ? -OSCAR_MAX_CENTRE_MAGNITUDE : OSCAR_MAX_CENTRE_MAGNITUDE;
    struct host_pool *pool;
    assert_int_equal(host_pool_open(1, &pool, NULL), 0);
    assert_int_equal(host_inspect(pool, level, &model->geometry, dense), 0);
    assert_int_equal(kernel_pack_page(level, &model->geometry, &model->calibration, dense, 0, packed), 0);
    ((uint16_t *)dense)[77] = 0xC77E;
    assert_int_equal(host_inspect(pool, level, &model->geometry, dense), OSCAR_ERR_NOT_FINITE);
    host_pool_close(pool);
    free(dense);
    free(packed);
    kernel_model_close(model);
}

static void threads_and_batches_do_not_change_a_byte(void **state) {
    enum host_level level = kernel_level_or_skip(state);
    struct kernel_random random = kernel_random_open();
    struct kernel_model *model = kernel_model_open(&random, &(struct kernel_model_options){.layers = 2,
                                                                                           .kv_heads = 2,
                                                                                           .head_dim = 128,
                                                                                           .feedback = 0.1,
                                                                                           .centre = true,
                                                                                           .centre_size = 1.0,
                                                                                           .pairs = 8,
                                                                                           .turn_pages = 32,
                                                                                           .rank_k = 122,
                                                                                           .rank_v = 117});
    const uint32_t pages = 11;
    size_t bytes = oscar_packed_page_bytes(&model->geometry);
    uint8_t *alone = malloc(bytes);
    uint8_t *together = malloc(pages * bytes);
    uint8_t *dense[11];
    int32_t status[11];
    struct oscar_pack_item item[11];
    for (uint32_t i = 0; i < pages; i++) {
        dense[i] = kernel_dense_page(&random, &model->geometry, true);
        item[i] = (struct oscar_pack_item){dense[i], together + i * bytes, (uint64_t)(i * 3 % 32) * OSCAR_PAGE_TOKENS,
                                           &status[i]};
    }
    struct host_pool *pool;
    assert_int_equal(host_pool_open(3, &pool, NULL), 0);
    assert_int_equal(host_pack(pool, level, &model->geometry, &model->calibration, item, pages), 0);
    host_pool_close(pool);
    for (uint32_t i = 0; i < pages; i++) {
        assert_int_equal(status[i], 0);
        assert_int_equal(
            kernel_pack_page(level, &model->geometry, &model->calibration, dense[i], item[i].position, alone), 0);
        assert_memory_equal(together + i * bytes, alone, bytes);
        free(dense[i]);
    }
    free(alone);
    free(together);
    kernel_model_close(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        KERNEL_LEVEL_TESTS(packed_bytes_equal_the_oracle),
        KERNEL_LEVEL_TESTS(elements_at_the_edges_of_codes_are_rounded_as_the_oracle_does),
        KERNEL_LEVEL_TESTS(every_way_of_rounding_makes_the_two_additions_left_to_right),
        KERNEL_LEVEL_TESTS(a_scale_that_overflows_fails_its_page),
        KERNEL_LEVEL_TESTS(every_clip_rank_is_exact),
        KERNEL_LEVEL_TESTS(one_bad_element_anywhere_fails_its_page_and_no_other),
        KERNEL_LEVEL_TESTS(a_page_that_passed_inspection_always_packs),
        KERNEL_LEVEL_TESTS(threads_and_batches_do_not_change_a_byte),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
