/* SPDX-License-Identifier: Apache-2.0 */
/* The turn tables and the conversions to half precision, against golden centres made by another program. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/calibration.h"
#include "proto/half.h"
#include "proto/page.h"
#include "proto/safetensors.h"
#include "proto_test.h"

static struct oscar_tensor_view tensor(const struct oscar_safetensors *file, const char *name) {
    struct oscar_tensor_view view;
    assert_int_equal(oscar_safetensors_find(file, name, &view), OSCAR_OK);
    return view;
}

static float f32_at(const struct oscar_tensor_view *view, size_t index) {
    float value;
    memcpy(&value, (const uint8_t *)view->data + 4 * index, 4);
    return value;
}

/* The centre by CALIBRATION.md, with the tables as they come from oscar_turns_fill. */
static void golden_centres_follow_from_the_tables(void **state) {
    (void)state;
    static const char *const names[] = {"codec-d64-m16", "codec-d128-m8", "codec-d128-m16", "codec-d256-m8"};
    for (size_t n = 0; n < sizeof(names) / sizeof(names[0]); n++) {
        char path[256];
        struct oscar_safetensors *file = NULL;
        (void)snprintf(path, sizeof(path), OSCAR_TEST_DATA "/golden/%s.safetensors", names[n]);
        assert_int_equal(oscar_safetensors_open(path, &file, NULL), OSCAR_OK);
        struct oscar_tensor_view positions = tensor(file, "positions"), omega = tensor(file, "omega"),
                                 shift = tensor(file, "centre_static"), a = tensor(file, "centre_a"),
                                 b = tensor(file, "centre_b"), centre = tensor(file, "centre");
        uint32_t m = (uint32_t)omega.elements, d = (uint32_t)shift.elements;
        int64_t position[1024], last = 0;
        double frequency[OSCAR_MAX_FREQUENCIES];
        assert_true(positions.elements <= 1024 && m <= OSCAR_MAX_FREQUENCIES);
        memcpy(position, positions.data, positions.bytes);
        memcpy(frequency, omega.data, omega.bytes);
        for (size_t i = 0; i < positions.elements; i++)
            last = position[i] > last ? position[i] : last;

        struct oscar_calibration calibration = {.frequencies = m, .omega = frequency};
        uint32_t pages = (uint32_t)(last / OSCAR_PAGE_TOKENS) + 1;
        size_t bytes = oscar_turns_bytes(&calibration, pages);
        assert_true(bytes == (size_t)(pages + OSCAR_TURN_ROWS) * m * 2 * sizeof(float));
        void *memory = malloc(bytes);
        assert_non_null(memory);
        oscar_turns_fill(&calibration, pages, memory);
        assert_int_equal(oscar_calibration_attach_turns(&calibration, memory, bytes - 1, pages), OSCAR_ERR_INVALID);
        assert_int_equal(oscar_calibration_attach_turns(&calibration, memory, bytes, pages), OSCAR_OK);
        for (size_t i = 0; i < positions.elements; i++) {
            const float *e = calibration.turns.page_turn + (size_t)(position[i] / OSCAR_PAGE_TOKENS) * m * 2;
            const float *t = calibration.turns.row_turn + (size_t)(position[i] % OSCAR_PAGE_TOKENS) * m * 2;
            for (uint32_t k = 0; k < d; k++) {
                float c = f32_at(&shift, k);
                for (uint32_t j = 0; j < m; j++) {
                    float turn_cos = fmaf(e[2 * j], t[2 * j], -(e[2 * j + 1] * t[2 * j + 1]));
                    float turn_sin = fmaf(e[2 * j + 1], t[2 * j], e[2 * j] * t[2 * j + 1]);
                    c = fmaf(turn_cos, f32_at(&a, (size_t)j * d + k), c);
                    c = fmaf(turn_sin, f32_at(&b, (size_t)j * d + k), c);
                }
                assert_true(oscar_float_bits(c) == oscar_float_bits(f32_at(&centre, i * d + k)));
            }
        }
        free(memory);
        oscar_safetensors_free(file);
    }
}

static void a_table_of_more_pages_begins_with_the_shorter_one(void **state) {
    (void)state;
    static const double omega[3] = {1.0, 0.1, 1e-4};
    static float few[(64 + 10) * 3 * 2], many[(64 + 100) * 3 * 2];
    struct oscar_calibration calibration = {.frequencies = 3, .omega = omega};
    assert_int_equal(oscar_turns_bytes(&calibration, 10), sizeof(few));
    assert_int_equal(oscar_turns_bytes(&calibration, 100), sizeof(many));
    oscar_turns_fill(&calibration, 10, few);
    oscar_turns_fill(&calibration, 100, many);
    assert_memory_equal(few, many, sizeof(few));
    for (size_t i = 0; i < 64 * 3 * 2; i++) /* every row's turn is a half */
        assert_true(oscar_float_from_half(oscar_half_from_float(few[i])) == few[i]);
    assert_true(few[0] == 1.0F && few[1] == 0.0F);
}

static void the_largest_table_does_not_wrap(void **state) {
    (void)state;
    struct oscar_calibration calibration = {.frequencies = OSCAR_MAX_FREQUENCIES};
    assert_true(oscar_turns_bytes(&calibration, OSCAR_MAX_SEQUENCE_PAGES) == (size_t)(65536 + 64) * 128 * 8);
    assert_true(oscar_turns_bytes(&calibration, UINT32_MAX) == ((size_t)UINT32_MAX + 64) * 128 * 8);
}

static void every_half_survives_the_round_trip(void **state) {
    (void)state;
    for (uint32_t half = 0; half < 0x10000; half++) {
        float value = oscar_float_from_half((uint16_t)half);
        uint16_t back = oscar_half_from_float(value);
        if ((half & 0x7fff) > 0x7c00) /* a NaN comes back as a quiet one */
            assert_true((back & 0x7e00) == 0x7e00);
        else
            assert_int_equal(back, half);
    }
}

/* Each float between two halves goes to the nearer, a tie to the even one: tried around every midpoint. */
static void floats_round_to_the_nearest_even_half(void **state) {
    (void)state;
    for (uint32_t half = 0; half < 0x7c00; half++) {
        double low = (double)oscar_float_from_half((uint16_t)half);
        double high = half == 0x7bff ? 65536.0 : (double)oscar_float_from_half((uint16_t)(half + 1));
        float middle = (float)((low + high) / 2); /* exact */
        uint16_t even = (uint16_t)(half & 1 ? half + 1 : half);
        assert_int_equal(oscar_half_from_float(middle), even);
        assert_int_equal(oscar_half_from_float(-middle), even | 0x8000);
        assert_int_equal(oscar_half_from_float(nextafterf(middle, 0.0F)), half);
        assert_int_equal(oscar_half_from_float(nextafterf(middle, INFINITY)), half + 1);
    }
    assert_int_equal(oscar_half_from_float(INFINITY), 0x7c00);
    assert_int_equal(oscar_half_from_float(-3.4e38F), 0xfc00);
    assert_int_equal(oscar_half_from_float(1e-45F), 0);
    assert_int_equal(oscar_half_from_float(-0.0F), 0x8000);
}

static void bfloats_round_to_the_nearest_even(void **state) {
    (void)state;
    for (uint32_t bfloat = 0; bfloat < 0x7f80; bfloat++) {
        float value = oscar_float_from_bfloat((uint16_t)bfloat);
        assert_int_equal(oscar_bfloat_from_float(value), bfloat);
        float middle = oscar_bits_float(bfloat << 16 | 0x8000);
        assert_int_equal(oscar_bfloat_from_float(middle), bfloat & 1 ? bfloat + 1 : bfloat);
        assert_int_equal(oscar_bfloat_from_float(oscar_bits_float(bfloat << 16 | 0x7fff)), bfloat);
        assert_int_equal(oscar_bfloat_from_float(oscar_bits_float(bfloat << 16 | 0x8001)), bfloat + 1);
    }
    assert_int_equal(oscar_bfloat_from_float(INFINITY), 0x7f80);
    assert_true((oscar_bfloat_from_float(NAN) & 0x7fff) > 0x7f80);
    assert_true((oscar_bfloat_from_float(oscar_bits_float(0x7f800001)) & 0x7fff) >
                0x7f80); /* does not become infinity */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden_centres_follow_from_the_tables),
        cmocka_unit_test(a_table_of_more_pages_begins_with_the_shorter_one),
        cmocka_unit_test(the_largest_table_does_not_wrap),
        cmocka_unit_test(every_half_survives_the_round_trip),
        cmocka_unit_test(floats_round_to_the_nearest_even_half),
        cmocka_unit_test(bfloats_round_to_the_nearest_even),
    };
    return cmocka_run_group_tests_name("proto_turns", tests, NULL, NULL);
}
