/* SPDX-License-Identifier: Apache-2.0 */
/* The codec and packing: golden vectors, and every level against the oracle to the bit. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/codec.h"
#include "kernels/number.h"
#include "kernels/reference.h"
#include "proto/geometry.h"
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

/* Runs one page on one thread at the level. */
static int32_t pack_at(enum host_level level, const struct oscar_geometry *geometry,
                       const struct oscar_calibration *calibration, const uint8_t *dense, uint64_t position,
                       uint8_t *packed) {
    struct host_pool *pool;
    int32_t status = 12345;
    struct oscar_pack_item item = {.dense = dense, .packed = packed, .position = position, .status = &status};
    assert_int_equal(host_pool_open(1, &pool, NULL), 0);
    assert_int_equal(host_pack(pool, level, geometry, calibration, &item, 1), 0);
    host_pool_close(pool);
    return status;
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
            assert_int_equal(pack_at(level, &golden->geometry, &golden->calibration, dense, position - token, packed),
                             0);
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

/* ---- levels against the oracle ---- */

struct pack_case {
    uint32_t head_dim;
    double feedback;
    bool centre;
    double centre_size;
    uint32_t pairs;
    uint32_t rank_k, rank_v;
};

static const struct pack_case pack_cases[] = {
    {64, 0.0, false, 0.0, 0, 61, 58}, /* nearest */
    {128, 0.0, false, 0.0, 0, 122, 117},     {256, 0.0, false, 0.0, 0, 245, 235},
    {64, 0.2, true, 1.0, 4, 61, 58}, /* all of it */
    {128, 0.1, true, 1.0, 16, 122, 117},     {256, 0.1, true, 1.0, 8, 245, 235},
    {128, 0.2, true, 3.0, 0, 127, 127},      /* constant centre; no clip */
    {128, 30.0, true, 2000.0, 16, 120, 112}, /* badly conditioned: values run to infinity and the centre dwarfs the row */
    {64, 1e6, false, 0.0, 0, 63, 0},         /* clipped to the smallest magnitude */
    {128, 0.1, true, 1.0, 3, 64, 5},         /* ranks that no calibration would choose */
    {256, 0.5, true, 0.01, 16, 0, 128},
};

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
            assert_int_equal(pack_at(level, &model->geometry, &model->calibration, dense, position, packed), 0);
            assert_memory_equal(packed, expected, bytes);
            free(dense);
        }
        free(expected);
        free(packed);
        kernel_model_close(model);
    }
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
        assert_int_equal(pack_at(level, &model->geometry, &model->calibration, dense, 0, packed), 0);
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
    assert_int_equal(pack_at(level, &model->geometry, &model->calibration, dense, 0, packed), 0);
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
        assert_int_equal(pack_at(level, &model->geometry, &model->calibration, dense[i], item[i].position, alone), 0);
        assert_memory_equal(together + i * bytes, alone, bytes);
        free(dense[i]);
    }
    free(alone);
    free(together);
    kernel_model_close(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_oracle_gives_the_golden_vectors),
        cmocka_unit_test(a_row_that_is_not_finite_is_refused_and_leaves_the_outputs_alone),
        cmocka_unit_test(a_scale_that_overflows_is_refused_and_the_largest_is_not),
        cmocka_unit_test(a_minimum_of_zero_has_one_sign_whatever_zeros_the_row_holds),
        cmocka_unit_test(the_two_additions_of_rounding_are_made_left_to_right),
        KERNEL_LEVEL_TESTS(golden_rows_pack_to_golden_codes_wherever_they_lie),
        KERNEL_LEVEL_TESTS(packed_bytes_equal_the_oracle),
        KERNEL_LEVEL_TESTS(every_clip_rank_is_exact),
        KERNEL_LEVEL_TESTS(one_bad_element_anywhere_fails_its_page_and_no_other),
        KERNEL_LEVEL_TESTS(a_page_that_passed_inspection_always_packs),
        KERNEL_LEVEL_TESTS(threads_and_batches_do_not_change_a_byte),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
