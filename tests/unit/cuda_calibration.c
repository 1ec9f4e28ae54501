/* SPDX-License-Identifier: Apache-2.0 */
/* A calibration's copy in device memory, byte by byte: the fake device's memory can be read here. */
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/backend.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/kernel_fixture.h"

static const struct oscar_device_ops *ops;
static struct fake_cuda *fake;
static struct oscar_device *device;
static struct kernel_random random_state;

static int open_device(void **state) {
    (void)state;
    ops = oscar_device_cuda();
    fake = fake_cuda_reset();
    return ops->device_open(NULL, &device, NULL);
}

static int close_device(void **state) {
    (void)state;
    ops->device_close(device);
    return atomic_load(&fake->live);
}

static int open_random(void **state) {
    (void)state;
    random_state = kernel_random_open();
    return 0;
}

static void assert_copied(const void *copy, const void *source, size_t bytes) {
    if (!source) {
        assert_null(copy);
        return;
    }
    assert_non_null(copy);
    assert_ptr_not_equal(copy, source);
    assert_int_equal((uintptr_t)copy % 256, 0);
    assert_memory_equal(copy, source, bytes);
}

static void assert_head(const struct cuda_head *copy, const struct oscar_head_calibration *head, uint32_t d) {
    size_t matrix = (size_t)d * d * sizeof(float), row = d * sizeof(float);
    assert_copied(copy->rotation_k, head->rotation_k, matrix);
    assert_copied(copy->rotation_v, head->rotation_v, matrix);
    assert_copied(copy->feedback, head->feedback, matrix);
    assert_copied(copy->centre_static, head->centre_static, row);
    if (head->pairs > 0) {
        assert_copied(copy->centre_cos, head->centre_cos, head->pairs * row);
        assert_copied(copy->centre_sin, head->centre_sin, head->pairs * row);
    }
    assert_int_equal(copy->pairs, head->pairs);
    for (uint32_t i = 0; i < head->pairs; i++)
        assert_int_equal(copy->centre_pair[i], head->centre_pair[i]);
    assert_int_equal(copy->rank_k, head->rank_k);
    assert_int_equal(copy->rank_v, head->rank_v);
}

static void assert_view(const struct cuda_calibration_view *view, const struct oscar_calibration *calibration,
                        const struct kernel_model_options *options) {
    assert_int_equal(view->layers, calibration->layers);
    assert_int_equal(view->kv_heads, calibration->kv_heads);
    assert_int_equal(view->head_dim, calibration->head_dim);
    assert_int_equal(view->pages, calibration->turns.pages);
    assert_int_equal(view->frequencies, calibration->frequencies);
    assert_int_equal(view->max_pairs, options->pairs);
    assert_int_equal(view->any_centre, options->centre);
    assert_int_equal(view->any_feedback, options->feedback > 0);
    assert_int_equal(view->hadamard_k, !options->matrix);
    assert_int_equal(view->hadamard_v, !options->matrix);
    size_t turn = (size_t)calibration->frequencies * 2 * sizeof(float);
    assert_copied(view->page_turn, calibration->turns.page_turn, calibration->turns.pages * turn);
    assert_copied(view->row_turn, calibration->turns.row_turn, OSCAR_TURN_ROWS * turn);
    for (uint32_t i = 0; i < calibration->layers * calibration->kv_heads; i++)
        assert_head(&view->heads[i], &calibration->heads[i], calibration->head_dim);
}

static void every_part_of_a_calibration_is_copied(void **state) {
    (void)state;
    static const struct kernel_model_options cases[] = {
        {.layers = 3, .kv_heads = 2, .head_dim = 64, .rank_k = 60, .rank_v = 58},
        {.layers = 2, .kv_heads = 3, .head_dim = 128, .matrix = true, .feedback = 0.1, .rank_k = 127, .rank_v = 0},
        {.layers = 1, .kv_heads = 2, .head_dim = 128, .centre = true, .centre_size = 2.0, .rank_k = 1, .rank_v = 2},
        {.layers = 2,
         .kv_heads = 2,
         .head_dim = 256,
         .matrix = true,
         .feedback = 0.1,
         .centre = true,
         .centre_size = 1.0,
         .pairs = OSCAR_MAX_PAIRS,
         .turn_pages = 9,
         .rank_k = 200,
         .rank_v = 100},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        struct kernel_model *model = kernel_model_open(&random_state, &cases[i]);
        struct oscar_cause cause = {""};
        if (ops->calibration_load(device, &model->geometry, &model->calibration, &cause) < 0)
            fail_msg("%s", cause.text);
        const struct cuda_calibration *copy = cuda_calibration_find(device, &model->calibration);
        assert_non_null(copy);
        assert_view(&copy->view, &model->calibration, &cases[i]);
        ops->calibration_unload(device, &model->calibration);
        assert_null(cuda_calibration_find(device, &model->calibration));
        kernel_model_close(model);
    }
}

static void a_calibration_stays_until_its_last_unload(void **state) {
    (void)state;
    struct kernel_model_options options = {.layers = 1, .kv_heads = 1, .head_dim = 64, .rank_k = 60, .rank_v = 60};
    struct kernel_model *first = kernel_model_open(&random_state, &options);
    struct kernel_model *second = kernel_model_open(&random_state, &options);
    int live = atomic_load(&fake->live);
    assert_int_equal(ops->calibration_load(device, &first->geometry, &first->calibration, NULL), 0);
    assert_int_equal(ops->calibration_load(device, &second->geometry, &second->calibration, NULL), 0);
    assert_int_equal(ops->calibration_load(device, &first->geometry, &first->calibration, NULL), 0);
    assert_int_equal(atomic_load(&fake->live), live + 2);
    const struct cuda_calibration *copy = cuda_calibration_find(device, &first->calibration);
    ops->calibration_unload(device, &first->calibration);
    assert_ptr_equal(cuda_calibration_find(device, &first->calibration), copy);
    ops->calibration_unload(device, &first->calibration);
    assert_null(cuda_calibration_find(device, &first->calibration));
    ops->calibration_unload(device, &first->calibration); /* nothing to unload */
    assert_non_null(cuda_calibration_find(device, &second->calibration));
    ops->calibration_unload(device, &second->calibration);
    kernel_model_close(first);
    kernel_model_close(second);
}

static void a_calibration_of_another_shape_is_refused(void **state) {
    (void)state;
    struct kernel_model_options options = {.layers = 2, .kv_heads = 2, .head_dim = 64, .rank_k = 60, .rank_v = 60};
    struct kernel_model *model = kernel_model_open(&random_state, &options);
    uint32_t *fields[] = {&model->geometry.layers, &model->geometry.kv_heads, &model->geometry.head_dim};
    for (size_t i = 0; i < sizeof(fields) / sizeof(*fields); i++) {
        struct oscar_cause cause = {""};
        *fields[i] *= 2;
        assert_int_equal(ops->calibration_load(device, &model->geometry, &model->calibration, &cause),
                         OSCAR_ERR_INVALID);
        assert_non_null(strstr(cause.text, "the calibration is for 2x2 heads of 64"));
        *fields[i] /= 2;
    }
    assert_null(cuda_calibration_find(device, &model->calibration));
    kernel_model_close(model);
}

#define ON_DEVICE(test) cmocka_unit_test_setup_teardown(test, open_device, close_device)

int main(void) {
    const struct CMUnitTest tests[] = {
        ON_DEVICE(every_part_of_a_calibration_is_copied),
        ON_DEVICE(a_calibration_stays_until_its_last_unload),
        ON_DEVICE(a_calibration_of_another_shape_is_refused),
    };
    return cmocka_run_group_tests(tests, open_random, NULL);
}
