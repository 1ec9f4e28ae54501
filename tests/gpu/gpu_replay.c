/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A real model's K and V (the committed capture, tests/support/replay.h) under the default calibration and a fitted one: rows are
 * the oracle's (where a matrix rotates them, but for the rounding of its sums), their codes are to the bit, and attention over
 * sink, packed pages and window errs as much as the oracle's does.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/number.h"
#include "kernels/reference.h"
#include "proto/geometry.h"
#include "tests/gpu/rig.h"
#include "tests/support/replay.h"

#define FOLDER OSCAR_TEST_DATA "/smollm2-135m/"
#define MAX_PAGES 16U
#define SINK_PAGES (OSCAR_SINK_TOKENS / OSCAR_PAGE_TOKENS)
#define RECENT_PAGES (OSCAR_RECENT_TOKENS / OSCAR_PAGE_TOKENS)
#define DECODE_ROWS 4U
#define PREFILL_ROWS 20U /* too many to be decoded */

/* Of a row's length: its numbers and the weights of V are rounded to BF16 or better, and errors add up over the tokens. */
#define ROW_BOUND 0.02
#define MEAN_BOUND 0.01 /* how far the mean error may be from the oracle's, as a part of it */

/* The pages as one side has them: dense ones, and packed ones in the places of the same numbers. */
struct pages {
    uint8_t *dense, *packed;
    size_t dense_bytes, packed_bytes; /* of one */
};

struct scene {
    struct rig *rig;
    struct replay *replay;
    const struct oscar_geometry *geometry;
    struct oscar_calibration *calibration;
    void *file, *turns;
    uint32_t count; /* of pages, all full */
    struct pages device, oracle;
    oscar_page_ref table[MAX_PAGES];
};

static void *read_file(const char *path, size_t *ret_size) {
    FILE *file = fopen(path, "re");
    assert_non_null(file);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    long size = ftell(file);
    assert_true(size > 0);
    rewind(file);
    void *bytes = malloc((size_t)size);
    assert_non_null(bytes);
    assert_int_equal(fread(bytes, 1, (size_t)size, file), size);
    fclose(file);
    *ret_size = (size_t)size;
    return bytes;
}

/* `name` NULL: the default. */
static void open_calibration(struct scene *scene, const char *name) {
    struct oscar_cause cause = {""};
    if (!name) {
        assert_int_equal(oscar_calibration_default(scene->geometry, &scene->calibration, &cause), 0);
        return;
    }
    size_t size;
    scene->file = read_file(name, &size);
    if (oscar_calibration_parse(scene->file, size, scene->geometry, 1, &scene->calibration, &cause) < 0)
        fail_msg("%s: %s", name, cause.text);
    size_t bytes = oscar_turns_bytes(scene->calibration, MAX_PAGES);
    scene->turns = malloc(bytes);
    assert_non_null(scene->turns);
    oscar_turns_fill(scene->calibration, MAX_PAGES, scene->turns);
    assert_int_equal(oscar_calibration_attach_turns(scene->calibration, scene->turns, bytes, MAX_PAGES), 0);
}

static bool is_packed(const struct scene *scene, uint32_t page) {
    return page >= SINK_PAGES && page < scene->count - RECENT_PAGES;
}

static void scene_open(struct scene *scene, const char *calibration) {
    *scene = (struct scene){.rig = rig_open()};
    char why[256];
    if (replay_open(FOLDER "capture.safetensors", &scene->replay, why, sizeof(why)) < 0)
        fail_msg("%s", why);
    scene->geometry = replay_geometry(scene->replay);
    scene->count = rig_small() ? SINK_PAGES + 1 + RECENT_PAGES : MAX_PAGES;
    assert_true(scene->count * OSCAR_PAGE_TOKENS <= replay_tokens(scene->replay));
    open_calibration(scene, calibration);
    rig_calibration_load(scene->rig, scene->geometry, scene->calibration);
    size_t dense = oscar_dense_page_bytes(scene->geometry), packed = oscar_packed_page_bytes(scene->geometry);
    scene->device = (struct pages){rig_alloc(scene->rig, scene->count * dense),
                                   rig_alloc(scene->rig, scene->count * packed), dense, packed};
    scene->oracle = (struct pages){calloc(scene->count, dense), calloc(scene->count, packed), dense, packed};
    assert_non_null(scene->oracle.dense);
    assert_non_null(scene->oracle.packed);
    for (uint32_t p = 0; p < scene->count; p++)
        scene->table[p] = oscar_page_ref_make(p < SINK_PAGES        ? OSCAR_FORM_SINK
                                              : is_packed(scene, p) ? OSCAR_FORM_PACKED
                                                                    : OSCAR_FORM_DENSE,
                                              p);
}

static void scene_close(struct scene *scene) {
    scene->rig->ops->calibration_unload(scene->rig->device, scene->calibration);
    oscar_calibration_free(scene->calibration);
    replay_free(scene->replay);
    free(scene->oracle.dense);
    free(scene->oracle.packed);
    free(scene->turns);
    free(scene->file);
    rig_close(scene->rig);
}

/* --- store and pack ------------------------------------------------------------------------------------------------ */

static void store(struct scene *scene, uint32_t layer) {
    const struct oscar_geometry *geometry = scene->geometry;
    uint8_t *device[MAX_PAGES], *oracle[MAX_PAGES];
    for (uint32_t p = 0; p < scene->count; p++) {
        device[p] = scene->device.dense + p * scene->device.dense_bytes;
        oracle[p] = scene->oracle.dense + p * scene->oracle.dense_bytes;
    }
    uint32_t tokens = scene->count * OSCAR_PAGE_TOKENS;
    int64_t row = (int64_t)geometry->kv_heads * geometry->head_dim;
    const uint16_t *k = replay_k(scene->replay, layer, 0), *v = replay_v(scene->replay, layer, 0);
    struct oscar_store_args args = {.geometry = geometry,
                                    .calibration = scene->calibration,
                                    .layer = layer,
                                    .tokens = tokens,
                                    .pages = oracle,
                                    .k = {k, row, geometry->head_dim},
                                    .v = {v, row, geometry->head_dim}};
    assert_int_equal(oscar_reference_store(&args), 0);
    size_t bytes = tokens * (size_t)row * sizeof(*k);
    void *k_device = rig_upload(scene->rig, k, bytes), *v_device = rig_upload(scene->rig, v, bytes);
    args.pages = device;
    args.k.data = k_device;
    args.v.data = v_device;
    assert_int_equal(scene->rig->ops->store(scene->rig->synchronous, &args), 0);
    assert_int_equal(rig_wait(scene->rig, scene->rig->synchronous), 0);
    rig_free(scene->rig, k_device);
    rig_free(scene->rig, v_device);
}

static uint32_t list_packed(const struct scene *scene, const struct pages *pages, struct oscar_pack_item *ret_items,
                            int32_t *status) {
    uint32_t items = 0;
    for (uint32_t p = 0; p < scene->count; p++)
        if (is_packed(scene, p)) {
            status[items] = 1;
            ret_items[items] = (struct oscar_pack_item){.dense = pages->dense + p * pages->dense_bytes,
                                                        .packed = pages->packed + p * pages->packed_bytes,
                                                        .position = (uint64_t)p * OSCAR_PAGE_TOKENS,
                                                        .status = &status[items]};
            items++;
        }
    return items;
}

static void pack(struct scene *scene) {
    struct oscar_pack_item item[MAX_PAGES];
    int32_t status[MAX_PAGES];
    uint32_t items = list_packed(scene, &scene->oracle, item, status);
    assert_true(items > 0);
    assert_int_equal(oscar_reference_pack(scene->geometry, scene->calibration, item, items), 0);
    items = list_packed(scene, &scene->device, item, status);
    const struct oscar_device_ops *ops = scene->rig->ops;
    assert_int_equal(ops->pack(scene->rig->synchronous, scene->geometry, scene->calibration, item, items), 0);
    assert_int_equal(rig_wait(scene->rig, scene->rig->synchronous), 0);
    for (uint32_t i = 0; i < items; i++)
        assert_int_equal(status[i], 0);
}

/* Of a row's element: one step of BF16, and what sums of d products may be off where they cancel out. */
static float row_bound(enum oscar_rotation rotation, float expected, float largest, uint32_t d) {
    return rotation == OSCAR_ROTATION_HADAMARD ? 0
                                               : ldexpf(fabsf(expected), -7) + ldexpf(sqrtf((float)d) * largest, -16);
}

static void expect_row(const struct scene *scene, const uint16_t *found, const uint16_t *expected,
                       enum oscar_rotation rotation) {
    uint32_t d = scene->geometry->head_dim;
    float largest = 0;
    for (uint32_t i = 0; i < d; i++)
        largest = fmaxf(largest, fabsf(oscar_bf16_to_float(expected[i])));
    for (uint32_t i = 0; i < d; i++) {
        float is = oscar_bf16_to_float(found[i]), must = oscar_bf16_to_float(expected[i]);
        if (!(fabsf(is - must) <= row_bound(rotation, must, largest, d)))
            fail_msg("element %u of a stored row is %.9g, not %.9g", i, (double)is, (double)must);
    }
}

/* From here on the oracle has the rows that the device has stored, so that their codes can be compared. */
static void expect_rows(struct scene *scene) {
    uint32_t d = scene->geometry->head_dim;
    size_t bytes = scene->count * scene->device.dense_bytes, side = (size_t)OSCAR_PAGE_TOKENS * d;
    uint16_t *found = malloc(bytes), *expected = (uint16_t *)scene->oracle.dense;
    assert_non_null(found);
    rig_read(scene->rig, found, scene->device.dense, bytes);
    for (size_t at = 0; at < bytes / sizeof(*found); at += d) /* records are all K rows of a page, then all V rows */
        expect_row(scene, found + at, expected + at,
                   at / side % 2 == 0 ? scene->calibration->rotation_k : scene->calibration->rotation_v);
    memcpy(scene->oracle.dense, found, bytes);
    free(found);
}

static void expect_codes(struct scene *scene) {
    size_t bytes = scene->device.packed_bytes;
    uint8_t *found = malloc(bytes);
    assert_non_null(found);
    for (uint32_t p = 0; p < scene->count; p++) {
        if (!is_packed(scene, p))
            continue;
        rig_read(scene->rig, found, scene->device.packed + p * bytes, bytes);
        assert_memory_equal(found, scene->oracle.packed + p * bytes, bytes);
    }
    free(found);
}

/* --- attention ----------------------------------------------------------------------------------------------------- */

struct errors {
    double device, oracle; /* sums of the rows' errors against exact attention over unrotated K and V in BF16 */
    double apart;          /* the largest difference between the two, as a part of the row */
    uint32_t rows;
};

static struct oscar_attend_args attend_args(const struct scene *scene, const struct pages *pages, uint32_t layer,
                                            const struct oscar_attend_item *item) {
    struct oscar_arena_view dense = {.base = pages->dense, .stride = pages->dense_bytes};
    return (struct oscar_attend_args){
        .geometry = scene->geometry,
        .calibration = scene->calibration,
        .arenas = {[OSCAR_FORM_SINK] = dense,
                   [OSCAR_FORM_DENSE] = dense,
                   [OSCAR_FORM_PACKED] = {.base = pages->packed, .stride = pages->packed_bytes}},
        .layer = layer,
        .softmax_scale = 1.0F / sqrtf((float)scene->geometry->head_dim),
        .items = 1,
        .item = item,
    };
}

static void count_row(struct scene *scene, const uint16_t *found, const double *expected, const double *exact,
                      struct errors *errors) {
    uint16_t rounded[256];
    for (uint32_t i = 0; i < scene->geometry->head_dim; i++)
        rounded[i] = oscar_bf16_from_float((float)expected[i]);
    errors->device += replay_relative_error(found, exact, scene->geometry->head_dim);
    errors->oracle += replay_relative_error(rounded, exact, scene->geometry->head_dim);
    errors->apart = fmax(errors->apart, replay_relative_error(found, expected, scene->geometry->head_dim));
    errors->rows++;
}

/* The last `rows` positions attend over all tokens before them. */
static void attend(struct scene *scene, uint32_t layer, uint32_t rows, struct errors *errors) {
    uint32_t tokens = scene->count * OSCAR_PAGE_TOKENS, heads = scene->geometry->query_heads;
    uint32_t d = scene->geometry->head_dim;
    size_t elements = (size_t)rows * heads * d, bytes = elements * sizeof(uint16_t);
    const uint16_t *q = replay_q(scene->replay, layer, tokens - rows);
    struct oscar_attend_item item = {.pages = scene->table,
                                     .tokens = tokens,
                                     .rows = rows,
                                     .q = q,
                                     .q_row_stride = (int64_t)heads * d,
                                     .q_head_stride = d,
                                     .out_row_stride = (int64_t)heads * d,
                                     .out_head_stride = d};
    double *expected = malloc(elements * sizeof(*expected)), *exact = malloc((size_t)heads * d * sizeof(*exact));
    uint16_t *found = malloc(bytes);
    assert_true(expected && exact && found);
    struct oscar_attend_args args = attend_args(scene, &scene->oracle, layer, &item);
    assert_int_equal(oscar_reference_attend(&args, &item, expected, NULL), 0);
    void *q_device = rig_upload(scene->rig, q, bytes), *out = rig_alloc(scene->rig, bytes);
    item.q = q_device;
    item.out = out;
    args = attend_args(scene, &scene->device, layer, &item);
    assert_int_equal(scene->rig->ops->attend(scene->rig->synchronous, &args), 0);
    assert_int_equal(rig_wait(scene->rig, scene->rig->synchronous), 0);
    rig_read(scene->rig, found, out, bytes);
    for (uint32_t row = 0; row < rows; row++) {
        replay_exact(scene->replay, layer, tokens - rows + row, exact);
        for (uint32_t h = 0; h < heads; h++) {
            size_t at = ((size_t)row * heads + h) * d;
            count_row(scene, found + at, expected + at, exact + (size_t)h * d, errors);
        }
    }
    rig_free(scene->rig, q_device);
    rig_free(scene->rig, out);
    free(expected);
    free(exact);
    free(found);
}

/* --- */

static void replay(const char *calibration) {
    struct scene scene;
    scene_open(&scene, calibration);
    for (uint32_t layer = 0; layer < scene.geometry->layers; layer++)
        store(&scene, layer);
    expect_rows(&scene);
    pack(&scene);
    expect_codes(&scene);
    struct errors errors = {0};
    for (uint32_t layer = 0; layer < scene.geometry->layers; layer++) {
        attend(&scene, layer, DECODE_ROWS, &errors);
        attend(&scene, layer, PREFILL_ROWS, &errors);
    }
    double device = errors.device / errors.rows, oracle = errors.oracle / errors.rows;
    print_message("mean error of %u rows %.5f, of the oracle %.5f; furthest apart %.5f\n", errors.rows, device, oracle,
                  errors.apart);
    assert_true(oracle > 0 && fabs(device - oracle) <= MEAN_BOUND * oracle);
    assert_true(errors.apart <= ROW_BOUND);
    scene_close(&scene);
}

static void under_the_default_calibration(void **state) {
    (void)state;
    replay(NULL);
}

static void under_a_fitted_calibration(void **state) {
    (void)state;
    replay(FOLDER "calibration-0-15-29.safetensors");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(under_the_default_calibration),
        cmocka_unit_test(under_a_fitted_calibration),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
