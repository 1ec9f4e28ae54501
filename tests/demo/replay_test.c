/* SPDX-License-Identifier: Apache-2.0 */
/* The replay of captured activations: what the demo's errors are measured against must itself be right. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "oscar/error.h"

#include "kernels/number.h"
#include "kernels/reference.h"
#include "tests/support/replay.h"

#define CAPTURE OSCAR_TEST_DATA "/smollm2-135m/capture.safetensors"

static struct replay *open_capture(void) {
    struct replay *replay;
    char why[256] = "";
    if (replay_open(CAPTURE, &replay, why, sizeof(why)) < 0)
        fail_msg("%s", why);
    return replay;
}

static void the_capture_is_the_model_that_its_description_says(void **state) {
    (void)state;
    struct replay *replay = open_capture();
    const struct oscar_geometry *geometry = replay_geometry(replay);
    assert_int_equal(geometry->layers, 3);
    assert_int_equal(geometry->query_heads, 9);
    assert_int_equal(geometry->kv_heads, 3);
    assert_int_equal(geometry->head_dim, 64);
    assert_int_equal(replay_tokens(replay), 1024);
    replay_free(replay);
}

static float *floats(const uint16_t *rows, size_t count) {
    float *values = malloc(count * sizeof(*values));
    assert_non_null(values);
    for (size_t i = 0; i < count; i++)
        values[i] = oscar_bf16_to_float(rows[i]);
    return values;
}

static void exact_attention_equals_the_oracle(void **state) {
    (void)state;
    struct replay *replay = open_capture();
    const struct oscar_geometry *geometry = replay_geometry(replay);
    const uint32_t positions[] = {0, 1, 63, 64, 639, 1023};
    double *ours = malloc(sizeof(double) * geometry->query_heads * geometry->head_dim);
    double *oracle = malloc(sizeof(double) * geometry->query_heads * geometry->head_dim);
    assert_non_null(ours);
    assert_non_null(oracle);
    for (uint32_t layer = 0; layer < geometry->layers; layer++) {
        size_t kv_elements = (size_t)replay_tokens(replay) * geometry->kv_heads * geometry->head_dim;
        float *k = floats(replay_k(replay, layer, 0), kv_elements),
              *v = floats(replay_v(replay, layer, 0), kv_elements);
        for (size_t i = 0; i < sizeof(positions) / sizeof(positions[0]); i++) {
            size_t elements = (size_t)geometry->query_heads * geometry->head_dim;
            float *q = floats(replay_q(replay, layer, positions[i]), elements);
            assert_int_equal(oscar_reference_exact(geometry, k, v, positions[i] + 1, q, 1, 0.125F, oracle, NULL), 0);
            replay_exact(replay, layer, positions[i], ours);
            for (size_t e = 0; e < elements; e++)
                assert_true(fabs(ours[e] - oracle[e]) <= 1e-9 * (1 + fabs(oracle[e])));
            free(q);
        }
        free(k);
        free(v);
    }
    free(ours);
    free(oracle);
    replay_free(replay);
}

/* RoPE: the product of a query and a key depends on how far apart they stand, so moving both changes nothing but rounding. */
static void a_branch_keeps_the_products_of_its_own_rows(void **state) {
    (void)state;
    struct replay *replay = open_capture(), *branch = open_capture();
    const struct oscar_geometry *geometry = replay_geometry(replay);
    const uint32_t at = 640, source = 832, d = geometry->head_dim;
    assert_int_equal(replay_branch(branch, at, source), 0);
    assert_int_equal(replay_tokens(branch), 832);
    assert_memory_equal(replay_token_ids(branch), replay_token_ids(replay), at * sizeof(uint32_t));
    assert_memory_equal(replay_token_ids(branch) + at, replay_token_ids(replay) + source, 192 * sizeof(uint32_t));
    for (uint32_t layer = 0; layer < geometry->layers; layer++) {
        assert_memory_equal(replay_v(branch, layer, at), replay_v(replay, layer, source), 2 * d * geometry->kv_heads);
        for (uint32_t i = 0; i < 64; i++) {
            const uint16_t *q0 = replay_q(replay, layer, source + 100), *k0 = replay_k(replay, layer, source + i);
            const uint16_t *q1 = replay_q(branch, layer, at + 100), *k1 = replay_k(branch, layer, at + i);
            double before = 0, after = 0, size_q = 0, size_k = 0;
            for (uint32_t j = 0; j < d; j++) {
                before += (double)oscar_bf16_to_float(q0[j]) * oscar_bf16_to_float(k0[j]);
                after += (double)oscar_bf16_to_float(q1[j]) * oscar_bf16_to_float(k1[j]);
                size_q += pow(oscar_bf16_to_float(q0[j]), 2);
                size_k += pow(oscar_bf16_to_float(k0[j]), 2);
            }
            assert_true(fabs(before - after) <= 0x1p-8 * sqrt(size_q * size_k));
        }
    }
    replay_free(replay);
    replay_free(branch);
}

static void a_file_that_is_no_capture_is_refused_in_words(void **state) {
    (void)state;
    struct replay *replay = NULL;
    char why[256] = "";
    assert_true(replay_open(OSCAR_TEST_DATA "/golden/codec-d64-m0.safetensors", &replay, why, sizeof(why)) < 0);
    assert_null(replay);
    assert_true(strlen(why) > 0);
    assert_true(replay_open(OSCAR_TEST_DATA "/absent", &replay, why, sizeof(why)) < 0);
}

static void errors_are_relative_to_the_exact_row(void **state) {
    (void)state;
    const uint16_t row[2] = {oscar_bf16_from_float(3), oscar_bf16_from_float(4)};
    const double same[2] = {3, 4}, other[2] = {0, 4}, zero[2] = {0, 0};
    const uint16_t broken[2] = {0x7fc0, 0}, zeros[2] = {0, 0};
    assert_true(replay_relative_error(row, same, 2) < 1e-12);
    assert_true(fabs(replay_relative_error(row, other, 2) - 0.75) < 1e-12);
    assert_true(isinf(replay_relative_error(broken, same, 2)));
    assert_true(replay_relative_error(zeros, zero, 2) < 1e-12);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_capture_is_the_model_that_its_description_says),
        cmocka_unit_test(exact_attention_equals_the_oracle),
        cmocka_unit_test(a_branch_keeps_the_products_of_its_own_rows),
        cmocka_unit_test(a_file_that_is_no_capture_is_refused_in_words),
        cmocka_unit_test(errors_are_relative_to_the_exact_row),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
