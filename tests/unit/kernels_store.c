/* SPDX-License-Identifier: Apache-2.0 */
/* Rotation and store: against float64, and every level the same bytes. */
#include <fenv.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/number.h"
#include "kernels/reference.h"
#include "kernels/rotate.h"
#include "proto/geometry.h"
#include "tests/support/kernel_fixture.h"

#define MAX_DIM 256U

static const uint32_t dims[] = {64, 128, 256};

static struct kernel_model *open_model(struct kernel_random *random, uint32_t d, uint32_t kv_heads, uint32_t dtype,
                                       bool matrix) {
    return kernel_model_open(random, &(struct kernel_model_options){.layers = 2,
                                                                    .kv_heads = kv_heads,
                                                                    .head_dim = d,
                                                                    .dtype = dtype,
                                                                    .matrix = matrix,
                                                                    .rank_k = d - 1,
                                                                    .rank_v = d - 1});
}

/* ---- rotation ---- */

static double rotated(const float *matrix, uint32_t d, bool back, const float *x, uint32_t j) {
    double sum = 0.0;
    for (uint32_t i = 0; i < d; i++) {
        double element = matrix ? (double)(back ? matrix[j * d + i] : matrix[i * d + j])
                                : (__builtin_popcount(i & j) % 2 ? -1.0 : 1.0) / sqrt((double)d);
        sum += x[i] * element;
    }
    return sum;
}

static void a_rotation_is_the_product_with_its_matrix_and_back_with_its_transpose(void **state) {
    enum host_level level = kernel_level_or_skip(state);
    struct kernel_random random = kernel_random_open();
    for (uint32_t c = 0; c < 12; c++) {
        uint32_t d = dims[c % 3];
        bool back = c / 3 % 2 != 0;
        struct kernel_model *model = open_model(&random, d, 1, OSCAR_BF16, c >= 6);
        const float *matrix = model->calibration.heads[0].rotation_k;
        float x[7][MAX_DIM + 5], y[7][MAX_DIM];
        for (uint32_t r = 0; r < 7; r++)
            for (uint32_t j = 0; j < d; j++)
                x[r][j] = (float)kernel_random_normal(&random);
        oscar_rotate(level, matrix, d, back, 7, x[0], MAX_DIM + 5, y[0], MAX_DIM);
        for (uint32_t r = 0; r < 7; r++)
            for (uint32_t j = 0; j < d; j++)
                assert_true(fabs(y[r][j] - rotated(matrix, d, back, x[r], j)) < 1e-5);
        kernel_model_close(model);
    }
}

static void rotating_back_undoes_a_rotation_in_place(void **state) {
    enum host_level level = kernel_level_or_skip(state);
    struct kernel_random random = kernel_random_open();
    for (uint32_t c = 0; c < 6; c++) {
        uint32_t d = dims[c % 3];
        struct kernel_model *model = open_model(&random, d, 1, OSCAR_BF16, c >= 3);
        float x[5 * MAX_DIM], y[5 * MAX_DIM];
        for (uint32_t i = 0; i < 5 * d; i++)
            x[i] = y[i] = (float)kernel_random_normal(&random);
        oscar_rotate(level, model->calibration.heads[0].rotation_k, d, false, 5, y, d, y, d);
        oscar_rotate(level, model->calibration.heads[0].rotation_k, d, true, 5, y, d, y, d);
        for (uint32_t i = 0; i < 5 * d; i++)
            assert_true(fabsf(x[i] - y[i]) < 2e-5F);
        kernel_model_close(model);
    }
}

static void every_level_rotates_to_the_same_bits(void **state) {
    enum host_level level = kernel_level_or_skip(state);
    struct kernel_random random = kernel_random_open();
    for (uint32_t c = 0; c < 12; c++) {
        uint32_t d = dims[c % 3];
        bool back = c / 3 % 2 != 0;
        struct kernel_model *model = open_model(&random, d, 1, OSCAR_BF16, c >= 6);
        const float *matrix = model->calibration.heads[0].rotation_k;
        float x[6 * MAX_DIM], y[6 * MAX_DIM], expected[6 * MAX_DIM];
        for (uint32_t i = 0; i < 6 * d; i++)
            x[i] = (float)(kernel_random_normal(&random) * exp(10.0 * kernel_random_normal(&random)));
        for (uint32_t rows = 1; rows <= 6; rows++) {
            oscar_rotate(HOST_PORTABLE, matrix, d, back, rows, x, d, expected, d);
            oscar_rotate(level, matrix, d, back, rows, x, d, y, d);
            assert_memory_equal(y, expected, rows * d * sizeof(float));
        }
        kernel_model_close(model);
    }
}

/* ---- store ---- */

/* A worker's fused tensor: [token][K heads, gap, V heads], padded rows. */
struct tensor {
    uint16_t *data;
    struct oscar_rows k, v;
};

static struct tensor tensor_open(struct kernel_random *random, const struct oscar_geometry *geometry, uint32_t tokens) {
    uint32_t d = geometry->head_dim;
    int64_t head_stride = d + 3;
    int64_t token_stride = head_stride * (2 * geometry->kv_heads + 1) + 5;
    size_t elements = (size_t)token_stride * tokens + 1;
    struct tensor tensor = {.data = malloc(elements * sizeof(uint16_t))};
    assert_non_null(tensor.data);
    for (size_t i = 0; i < elements; i++) {
        float value = (float)kernel_random_normal(random);
        tensor.data[i] = geometry->dtype == OSCAR_BF16 ? oscar_bf16_from_float(value) : oscar_fp16_from_float(value);
    }
    tensor.k = (struct oscar_rows){tensor.data, token_stride, head_stride};
    tensor.v = (struct oscar_rows){tensor.data + head_stride * (geometry->kv_heads + 1), token_stride, head_stride};
    return tensor;
}

static int store_at(enum host_level level, uint32_t threads, const struct oscar_store_args *args) {
    struct host_pool *pool;
    assert_int_equal(host_pool_open(threads, &pool, NULL), 0);
    int r = host_store(pool, level, args);
    host_pool_close(pool);
    return r;
}

/* Monotone in the value, so that the distance of neighbours is 1. */
static int32_t bf16_rank(uint16_t bits) { return bits & 0x8000 ? -(int32_t)(bits & 0x7FFF) : (int32_t)bits; }

static void stored_rows_are_the_rotated_rows_where_they_belong_and_nothing_else_changes(void **state) {
    enum host_level level = kernel_level_or_skip(state);
    struct kernel_random random = kernel_random_open();
    for (uint32_t c = 0; c < 24; c++) {
        uint32_t d = dims[c % 3];
        uint32_t first_row = c % 4 == 0 ? 0 : kernel_random_below(&random, 64);
        uint32_t tokens = c % 5 == 0 ? 1 : kernel_random_below(&random, 4 * 64 - 63 + 1); /* four pages at most */
        struct kernel_model *model =
            open_model(&random, d, 1 + c % 3, c % 2 ? OSCAR_FP16 : OSCAR_BF16, d < 256 && c % 4 < 2);
        struct tensor tensor = tensor_open(&random, &model->geometry, tokens);
        uint32_t pages = (first_row + tokens + 63) / 64;
        size_t bytes = oscar_dense_page_bytes(&model->geometry);
        uint8_t *page[4], *expected[4], *portable[4];
        for (uint32_t p = 0; p < 4; p++) {
            page[p] = malloc(bytes);
            expected[p] = malloc(bytes);
            portable[p] = malloc(bytes);
            kernel_random_bytes(&random, page[p], bytes);
            memcpy(expected[p], page[p], bytes);
            memcpy(portable[p], page[p], bytes);
        }
        struct oscar_store_args args = {.geometry = &model->geometry,
                                        .calibration = &model->calibration,
                                        .layer = c % 2,
                                        .tokens = tokens,
                                        .first_row = first_row,
                                        .pages = page,
                                        .k = tensor.k,
                                        .v = tensor.v};
        assert_int_equal(store_at(level, 1 + c % 3, &args), 0);
        args.pages = portable;
        assert_int_equal(store_at(HOST_PORTABLE, 1, &args), 0);
        args.pages = expected;
        assert_int_equal(oscar_reference_store(&args), 0);
        for (uint32_t p = 0; p < 4; p++) {
            assert_memory_equal(page[p], portable[p],
                                bytes); /* so untouched bytes are equal to the oracle's, or off below */
            const uint16_t *a = (const uint16_t *)page[p], *b = (const uint16_t *)expected[p];
            for (size_t i = 0; i < bytes / 2; i++)
                if (a[i] !=
                    b[i]) { /* a sum may round to the neighbour; near zero cancellation leaves an absolute error */
                    assert_true(p < pages);
                    float difference = fabsf(oscar_bf16_to_float(a[i]) - oscar_bf16_to_float(b[i]));
                    assert_true(abs(bf16_rank(a[i]) - bf16_rank(b[i])) <= 1 || difference < 2e-5F);
                }
            free(page[p]);
            free(expected[p]);
            free(portable[p]);
        }
        free(tensor.data);
        kernel_model_close(model);
    }
}

/* With R the identity a stored element is the worker's, rounded: every binary16 number, as FP16 and, cut, as BF16. */
static void every_element_is_rounded_to_the_nearest_even_bf16(void **state) {
    enum host_level level = kernel_level_or_skip(state);
    struct kernel_random random = kernel_random_open();
    float identity[64 * 64] = {0};
    for (uint32_t i = 0; i < 64; i++)
        identity[i * 64 + i] = 1.0F;
    for (uint32_t dtype = OSCAR_BF16; dtype <= OSCAR_FP16; dtype++) {
        struct kernel_model *model = open_model(&random, 64, 1, dtype, false);
        model->calibration.heads[0].rotation_k = model->calibration.heads[0].rotation_v = identity;
        uint8_t *page = malloc(oscar_dense_page_bytes(&model->geometry));
        for (uint32_t first = 0; first < 0x10000; first += 64) {
            uint16_t row[64];
            for (uint32_t j = 0; j < 64; j++)
                row[j] = (uint16_t)(first + j);
            struct oscar_store_args args = {.geometry = &model->geometry,
                                            .calibration = &model->calibration,
                                            .tokens = 1,
                                            .pages = &page,
                                            .k = {row, 64, 64},
                                            .v = {row, 64, 64}};
            int r = store_at(level, 1, &args);
            bool in_range = true, finite = true;
            uint16_t expected[64];
            for (uint32_t j = 0; j < 64; j++) {
                float value = dtype == OSCAR_BF16 ? oscar_bf16_to_float(row[j]) : oscar_fp16_to_float(row[j]);
                finite &= isfinite(value) != 0;
                expected[j] = value == 0.0F ? 0 : oscar_bf16_from_float(value); /* the sum starts at +0 */
                in_range &= fabsf(oscar_bf16_to_float(expected[j])) <= OSCAR_MAX_ROW_MAGNITUDE;
            }
            assert_int_equal(r, in_range ? 0 : OSCAR_ERR_NOT_FINITE);
            if (finite) /* else NaN reaches every element: 0 times Inf */
                assert_memory_equal(page, expected, sizeof(expected));
        }
        free(page);
        kernel_model_close(model);
    }
}

static void an_element_out_of_range_is_reported(void **state) {
    enum host_level level = kernel_level_or_skip(state);
    struct kernel_random random = kernel_random_open();
    const uint16_t bad[] = {0x7F80, 0x7FC0, 0xFF81, 0x7F00,
                            0x4980}; /* Inf, NaNs, 1.7e38, 2^20: the rotated row is out of range */
    for (uint32_t c = 0; c < 20; c++) {
        struct kernel_model *model = open_model(&random, 64, 2, OSCAR_BF16, c % 2 != 0);
        struct tensor tensor = tensor_open(&random, &model->geometry, 3);
        uint8_t *page = malloc(oscar_dense_page_bytes(&model->geometry));
        struct oscar_store_args args = {.geometry = &model->geometry,
                                        .calibration = &model->calibration,
                                        .tokens = 3,
                                        .pages = &page,
                                        .k = tensor.k,
                                        .v = tensor.v};
        assert_int_equal(store_at(level, 1, &args), 0);
        const struct oscar_rows *side = c % 4 < 2 ? &tensor.k : &tensor.v;
        size_t at = (size_t)((const uint16_t *)side->data - tensor.data) +
                    kernel_random_below(&random, 3) * (size_t)side->token_stride +
                    kernel_random_below(&random, 2) * (size_t)side->head_stride + kernel_random_below(&random, 64);
        tensor.data[at] = bad[c % 5];
        assert_int_equal(store_at(level, 1, &args), OSCAR_ERR_NOT_FINITE);
        free(page);
        free(tensor.data);
        kernel_model_close(model);
    }
}

static void a_caller_that_flushes_subnormals_stores_the_same_bytes(void **state) {
    (void)state;
#if defined(__x86_64__)
    struct kernel_random random = kernel_random_open();
    struct kernel_model *model = open_model(&random, 64, 1, OSCAR_BF16, false);
    uint16_t row[2][64];
    for (uint32_t j = 0; j < 64; j++) {
        row[0][j] = (uint16_t)(kernel_random_next(&random) & 0x807F);
        row[1][j] = (uint16_t)(kernel_random_next(&random) & 0x807F);
    }
    uint8_t *page = calloc(1, oscar_dense_page_bytes(&model->geometry));
    uint8_t *flushed = calloc(1, oscar_dense_page_bytes(&model->geometry));
    struct oscar_store_args args = {.geometry = &model->geometry,
                                    .calibration = &model->calibration,
                                    .tokens = 1,
                                    .pages = &page,
                                    .k = {row[0], 64, 64},
                                    .v = {row[1], 64, 64}};
    assert_int_equal(oscar_device_host()->store(NULL, &args), 0);
    args.pages = &flushed;
    unsigned mode = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(mode | 0x8040); /* flush to zero, denormals are zero */
    int r = oscar_device_host()->store(NULL, &args);
    unsigned after = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(mode);
    assert_int_equal(r, 0);
    assert_int_equal(after & 0x8040, 0x8040); /* and it is the caller's mode again */
    assert_memory_equal(page, flushed, oscar_dense_page_bytes(&model->geometry));
    assert_true(((uint16_t *)page)[0] % 0x8000 != 0);
    free(page);
    free(flushed);
    kernel_model_close(model);
#else
    skip();
#endif
}

int main(void) {
    const struct CMUnitTest tests[] = {
        KERNEL_LEVEL_TESTS(a_rotation_is_the_product_with_its_matrix_and_back_with_its_transpose),
        KERNEL_LEVEL_TESTS(rotating_back_undoes_a_rotation_in_place),
        KERNEL_LEVEL_TESTS(every_level_rotates_to_the_same_bits),
        KERNEL_LEVEL_TESTS(stored_rows_are_the_rotated_rows_where_they_belong_and_nothing_else_changes),
        KERNEL_LEVEL_TESTS(every_element_is_rounded_to_the_nearest_even_bf16),
        KERNEL_LEVEL_TESTS(an_element_out_of_range_is_reported),
        cmocka_unit_test(a_caller_that_flushes_subnormals_stores_the_same_bytes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
