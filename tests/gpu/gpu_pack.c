/* SPDX-License-Identifier: Apache-2.0 */
/* Packing: whatever the rows, the packed bytes are the oracle's. Packed pages are poison before. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/number.h"
#include "kernels/reference.h"
#include "proto/geometry.h"
#include "tests/gpu/pack_cases.h"
#include "tests/gpu/rig.h"
#include "tests/support/golden_codec.h"

static struct rig *rig;
static struct kernel_random source;

static uint32_t below(uint32_t bound) { return kernel_random_below(&source, bound); }

static void load(const struct kernel_model *model) { rig_calibration_load(rig, &model->geometry, &model->calibration); }

static void unload(const struct kernel_model *model) { rig->ops->calibration_unload(rig->device, &model->calibration); }

static struct oscar_head_calibration *head_of(struct kernel_model *model, uint32_t i) {
    return &model->calibration.heads[i];
}

static uint32_t heads_of(const struct kernel_model *model) { return model->geometry.layers * model->geometry.kv_heads; }

/* ---- a call of pack, and what must come of it ---- */

#define MAX_PAGES 300U

struct batch {
    const struct kernel_model *model;
    uint32_t pages;
    uint8_t *dense[MAX_PAGES]; /* on the host */
    uint64_t position[MAX_PAGES];
    size_t dense_bytes, packed_bytes; /* of a page */
    uint8_t *device_dense, *device_packed;
    struct oscar_pack_item item[MAX_PAGES];
    int32_t status[MAX_PAGES];
};

static void batch_open(struct batch *batch, const struct kernel_model *model, uint32_t pages, bool adversarial) {
    *batch = (struct batch){.model = model, .pages = pages};
    batch->dense_bytes = oscar_dense_page_bytes(&model->geometry);
    batch->packed_bytes = oscar_packed_page_bytes(&model->geometry);
    uint32_t turns = model->calibration.frequencies > 0 ? model->calibration.turns.pages : 1U << 20;
    for (uint32_t p = 0; p < pages; p++) {
        batch->dense[p] = kernel_dense_page(&source, &model->geometry, adversarial);
        batch->position[p] = (uint64_t)below(p % 2 ? turns : 4) * OSCAR_PAGE_TOKENS;
    }
}

static void batch_close(struct batch *batch) {
    for (uint32_t p = 0; p < batch->pages; p++)
        free(batch->dense[p]);
    rig_free(rig, batch->device_dense);
    rig_free(rig, batch->device_packed);
}

/* The pages lie in device memory in an order of their own, `apart` bytes between those of the two halves. */
static void batch_place(struct batch *batch, size_t apart) {
    batch->device_dense = rig_alloc(rig, batch->pages * batch->dense_bytes + apart);
    batch->device_packed = rig_alloc(rig, batch->pages * batch->packed_bytes + apart);
    for (uint32_t p = 0; p < batch->pages; p++) {
        size_t place = batch->pages - 1 - p, beyond = place >= batch->pages / 2 ? apart : 0;
        uint8_t *dense = batch->device_dense + place * batch->dense_bytes + beyond;
        rig_write(rig, dense, batch->dense[p], batch->dense_bytes);
        batch->status[p] = 12345;
        batch->item[p] = (struct oscar_pack_item){
            .dense = dense,
            .packed = batch->device_packed + place * batch->packed_bytes + beyond,
            .position = batch->position[p],
            .status = &batch->status[p],
        };
    }
}

static int batch_pack(struct batch *batch, struct oscar_stream_impl *stream) {
    return rig->ops->pack(stream, &batch->model->geometry, &batch->model->calibration, batch->item, batch->pages);
}

/* What differs first, in the words of the page. */
static void explain(const struct batch *batch, uint32_t page, const uint8_t *packed, const uint8_t *expected) {
    uint32_t d = batch->model->geometry.head_dim;
    size_t record_bytes = oscar_packed_record_bytes(d), at = 0;
    while (packed[at] == expected[at])
        at++;
    size_t record = at / record_bytes, in = at % record_bytes, scales = oscar_packed_scales_offset(d);
    const char *part = in >= scales ? "scales" : in >= oscar_packed_v_offset(d) ? "codes of V" : "codes of K";
    fail_msg("head size %u, page %u of %u at position %" PRIu64 ", head %zu, %s: byte %zu is %02x, not %02x", d, page,
             batch->pages, batch->position[page], record, part, in, packed[at], expected[at]);
}

struct expected {
    const struct batch *batch;
    uint8_t *packed; /* of all pages */
    int result[MAX_PAGES];
    int32_t status[MAX_PAGES];
};

static void expect_page(void *argument, uint32_t page, uint32_t worker) {
    struct expected *expected = argument;
    const struct batch *batch = expected->batch;
    (void)worker;
    struct oscar_pack_item item = {batch->dense[page], expected->packed + page * batch->packed_bytes,
                                   batch->position[page], &expected->status[page]};
    expected->result[page] = oscar_reference_pack(&batch->model->geometry, &batch->model->calibration, &item, 1);
}

static void batch_expect_oracle(const struct batch *batch) {
    struct expected expected = {.batch = batch, .packed = calloc(batch->pages, batch->packed_bytes)};
    uint8_t *packed = malloc(batch->packed_bytes);
    assert_true(packed && expected.packed);
    host_pool_run(rig_pool(rig), batch->pages, expect_page, &expected);
    for (uint32_t p = 0; p < batch->pages; p++) {
        const uint8_t *page = expected.packed + p * batch->packed_bytes;
        assert_int_equal(expected.result[p], 0);
        assert_int_equal(batch->status[p], expected.status[p]);
        if (expected.status[p] != 0)
            continue;
        rig_read(rig, packed, batch->item[p].packed, batch->packed_bytes);
        if (memcmp(packed, page, batch->packed_bytes) != 0)
            explain(batch, p, packed, page);
    }
    free(packed);
    free(expected.packed);
}

static void expect_oracle(const struct kernel_model *model, uint32_t pages, bool adversarial) {
    struct batch batch;
    batch_open(&batch, model, pages, adversarial);
    batch_place(&batch, 0);
    assert_int_equal(batch_pack(&batch, rig->synchronous), 0);
    batch_expect_oracle(&batch);
    batch_close(&batch);
}

/* ---- the tests ---- */

static void packed_bytes_equal_the_oracle(void **state) {
    (void)state;
    for (size_t i = 0; i < PACK_CASES; i++) {
        struct kernel_model *model = pack_case_open(&source, &pack_cases[i]);
        load(model);
        for (uint32_t pages = 1; pages < (rig_small() ? 3 : 5); pages++)
            expect_oracle(model, pages, pages > 1);
        unload(model);
        kernel_model_close(model);
    }
}

/* Each head of a model may have a centre, feedback, both or neither, and its own clip ranks. */
static void heads_are_packed_each_by_its_own_calibration(void **state) {
    (void)state;
    for (size_t i = 0; i < PACK_CASES; i++) {
        if (!pack_cases[i].centre || pack_cases[i].feedback == 0.0)
            continue;
        struct kernel_model *model = pack_case_open(&source, &pack_cases[i]);
        for (uint32_t h = 0; h < heads_of(model); h++) {
            struct oscar_head_calibration *head = head_of(model, h);
            if (h % 4 == 1 || h % 4 == 2)
                head->feedback = NULL;
            if (h % 4 == 2 || h % 4 == 3) {
                head->centre_static = head->centre_cos = head->centre_sin = NULL;
                head->pairs = 0;
            }
            head->pairs = head->pairs > 0 ? below(head->pairs + 1) : 0;
            head->rank_k = below(pack_cases[i].head_dim);
            head->rank_v = below(pack_cases[i].head_dim);
        }
        load(model);
        expect_oracle(model, 3, true);
        unload(model);
        kernel_model_close(model);
    }
}

static void every_clip_rank_is_exact(void **state) {
    (void)state;
    for (uint32_t d = 64; d <= 256; d *= 2)
        for (uint32_t centre = 0; centre < 2; centre++) {
            struct kernel_model *model = kernel_model_open(
                &source, &(struct kernel_model_options){
                             .layers = 4, .kv_heads = 4, .head_dim = d, .centre = centre, .centre_size = 1.0});
            for (uint32_t first = 0; first < (rig_small() ? 16 : d); first += heads_of(model)) {
                for (uint32_t h = 0; h < heads_of(model); h++) {
                    head_of(model, h)->rank_k = first + h;
                    head_of(model, h)->rank_v = d - 1 - (first + h);
                }
                load(model);
                expect_oracle(model, 1, true);
                unload(model);
            }
            kernel_model_close(model);
        }
}

/*
 * Rows that tell one order of operations from another, where random rows do not. A page of zeros less a centre is any
 * binary32 row. Its least and greatest element give the scale; the others lie on the edges between codes and one step
 * beside them, so a comparison that is off by a last bit gives another code. The top element lies where a code stands,
 * so that its error is a rounding error, and L makes it large: an error that is not made by one fma gives other codes
 * below.
 */
static void make_edges(struct kernel_model *model, struct oscar_head_calibration *head, bool lifted) {
    const uint32_t d = model->geometry.head_dim;
    float *centre = (float *)(uintptr_t)head->centre_static;
    float *feedback = (float *)(uintptr_t)head->feedback;
    float scale = oscar_fp16_to_float((uint16_t)(0x2000 + below(0x2000)));
    float low = lifted ? -scale * (0.1F + (float)kernel_random_uniform(&source)) : 0.0F; /* else zero is 0 */
    float zero = oscar_fp16_to_float(oscar_fp16_from_float(-low / scale));
    for (uint32_t j = 0; j < d; j++) {
        float edge = ((float)(j % 3) + 0.5F - zero) * scale;
        centre[j] = -(j / 3 % 3 == 0 ? edge : nextafterf(edge, j / 3 % 3 == 1 ? 1e9F : -1e9F));
    }
    centre[3] = -low;
    centre[7] = -(low + 3.0F * scale);
    centre[d - 1] = -(2.0F - zero) * scale;
    for (uint32_t i = 0; i < d; i++)
        for (uint32_t j = 0; j < i; j++)
            feedback[(size_t)i * d + j] = i == d - 1 && lifted ? 0x1p24F : 0.0F;
}

static void elements_at_the_edges_of_codes_are_rounded_as_the_oracle_does(void **state) {
    (void)state;
    struct kernel_model *model = kernel_model_open(&source, &(struct kernel_model_options){.layers = 4,
                                                                                           .kv_heads = 4,
                                                                                           .head_dim = 64,
                                                                                           .feedback = 1.0,
                                                                                           .centre = true,
                                                                                           .centre_size = 1.0,
                                                                                           .rank_k = 63,
                                                                                           .rank_v = 63});
    const float *feedback[16];
    for (uint32_t h = 0; h < 16; h++)
        feedback[h] = head_of(model, h)->feedback;
    for (uint32_t round = 0; round < (rig_small() ? 2 : 40); round++) {
        for (uint32_t h = 0; h < 16; h++) {
            head_of(model, h)->feedback = feedback[h];
            make_edges(model, head_of(model, h), h % 2 != 0);
            head_of(model, h)->feedback = h % 4 < 2 ? NULL : feedback[h];
        }
        struct batch batch;
        batch_open(&batch, model, 1, false);
        memset(batch.dense[0], 0, batch.dense_bytes);
        load(model);
        batch_place(&batch, 0);
        assert_int_equal(batch_pack(&batch, rig->synchronous), 0);
        batch_expect_oracle(&batch);
        unload(model);
        batch_close(&batch);
    }
    kernel_model_close(model);
}

/*
 * BF16 rows on the edges of codes: with a scale of a power of two and a zero of few bits the edges are BF16 numbers,
 * and the rows hold these, their neighbours and numbers near zero. Scale 1, zero 0.5 and an element just below zero are
 * among them, where one addition instead of two would give another code.
 */
static void bf16_rows_on_edges_are_rounded_as_the_oracle_does(void **state) {
    (void)state;
    static const float zeros[] = {0.5F, 1.5F, 2.5F, 0.0F, 1.0F, 0.25F, 1.75F, -0.5F, 3.0F, 2.0F};
    for (uint32_t d = 64; d <= 256; d *= 2) {
        struct kernel_model *model = kernel_model_open(
            &source, &(struct kernel_model_options){
                         .layers = 1, .kv_heads = 2, .head_dim = d, .feedback = 0.5, .rank_k = d - 1, .rank_v = d - 1});
        head_of(model, 0)->feedback = NULL;
        load(model);
        struct batch batch;
        batch_open(&batch, model, 4, false);
        for (uint32_t p = 0; p < batch.pages; p++) {
            uint16_t *rows = (uint16_t *)batch.dense[p];
            for (size_t row = 0; row < batch.dense_bytes / 2 / d; row++, rows += d) {
                float scale = ldexpf(1.0F, (int)below(20) - 10), zero = zeros[row % 10];
                for (uint32_t j = 0; j < d; j++) {
                    float edge = ((float)below(3) + 0.5F - zero) * scale;
                    rows[j] = (uint16_t)(oscar_bf16_from_float(edge) + below(3) - 1);
                    if (edge == 0.0F || below(8) == 0)
                        rows[j] = oscar_bf16_from_float(ldexpf(below(2) ? scale : -scale, -(int)below(30)));
                }
                rows[below(d / 2)] = oscar_bf16_from_float(-zero * scale);
                rows[d / 2 + below(d / 2)] = oscar_bf16_from_float((3.0F - zero) * scale);
            }
        }
        batch_place(&batch, 0);
        assert_int_equal(batch_pack(&batch, rig->synchronous), 0);
        batch_expect_oracle(&batch);
        batch_close(&batch);
        unload(model);
        kernel_model_close(model);
    }
}

/* Every golden row at its row of a page of its position, among other rows; as V too where it has no centre to lose. */
static void golden_rows_pack_to_golden_codes(void **state) {
    (void)state;
    for (size_t name = 0; name < GOLDEN_FILES * 2; name++) {
        struct golden *golden = golden_open(golden_names[name / 2]);
        const bool with_feedback = name % 2;
        const uint32_t d = golden->d;
        if (!with_feedback)
            golden->head.feedback = NULL;
        struct kernel_model model = {.geometry = golden->geometry, .calibration = golden->calibration};
        uint8_t *packed = malloc(oscar_packed_record_bytes(d));
        assert_non_null(packed);
        load(&model);
        for (uint32_t first = 0; first < GOLDEN_ROWS; first += MAX_PAGES) {
            struct batch batch;
            uint32_t rows = GOLDEN_ROWS - first < MAX_PAGES ? GOLDEN_ROWS - first : MAX_PAGES;
            batch_open(&batch, &model, rows, true);
            for (uint32_t i = 0; i < rows; i++) {
                uint32_t token = (uint32_t)(golden->positions[first + i] % OSCAR_PAGE_TOKENS);
                batch.position[i] = (uint64_t)golden->positions[first + i] - token;
                for (uint32_t side = 0; side < 2; side++)
                    memcpy(batch.dense[i] + ((size_t)side * OSCAR_PAGE_TOKENS + token) * d * 2,
                           golden->rows + (size_t)(first + i) * d, (size_t)d * 2);
            }
            batch_place(&batch, 0);
            assert_int_equal(batch_pack(&batch, rig->synchronous), 0);
            for (uint32_t i = 0; i < rows; i++) {
                uint32_t row = first + i, token = (uint32_t)(golden->positions[row] % OSCAR_PAGE_TOKENS);
                const uint8_t *nearest = golden->nearest + (size_t)row * d;
                const uint8_t *codes = with_feedback ? golden->feedback + (size_t)row * d : nearest;
                assert_int_equal(batch.status[i], 0);
                rig_read(rig, packed, batch.item[i].packed, batch.packed_bytes);
                golden_expect_row(packed, d, 0, token, golden->scale[row], golden->zero[row], codes);
                if (golden->head.pairs == 0)
                    golden_expect_row(packed, d, 1, token, golden->scale[row], golden->zero[row], nearest);
            }
            batch_close(&batch);
        }
        unload(&model);
        free(packed);
        golden_close(golden);
    }
}

static void a_bad_element_anywhere_fails_its_page_and_no_other(void **state) {
    (void)state;
    const uint16_t bad[] = {0x7F80, 0xFF80, 0x7FC0, 0xFF81, 0x7F7F /* finite, its scale is not */};
    for (uint32_t round = 0; round < (rig_small() ? 6 : 30); round++) {
        uint32_t d = 64U << round % 3;
        struct kernel_model *model = kernel_model_open(&source, &(struct kernel_model_options){.layers = 2,
                                                                                               .kv_heads = 2,
                                                                                               .head_dim = d,
                                                                                               .feedback = 0.1,
                                                                                               .centre = true,
                                                                                               .centre_size = 1.0,
                                                                                               .rank_k = d - 1,
                                                                                               .rank_v = d - 1});
        for (uint32_t h = 0; h < 4; h++)
            if (round % 2 == 0) {
                head_of(model, h)->feedback = NULL;
                head_of(model, h)->centre_static = NULL;
            }
        load(model);
        struct batch batch;
        batch_open(&batch, model, 5, true);
        uint32_t victim = below(5);
        ((uint16_t *)batch.dense[victim])[below((uint32_t)batch.dense_bytes / 2)] = bad[round % 5];
        batch_place(&batch, 0);
        assert_int_equal(batch_pack(&batch, rig->synchronous), 0);
        for (uint32_t p = 0; p < 5; p++)
            assert_int_equal(batch.status[p], p == victim ? OSCAR_ERR_NOT_FINITE : 0);
        batch_expect_oracle(&batch);
        batch_close(&batch);
        unload(model);
        kernel_model_close(model);
    }
}

static void a_scale_that_just_fits_is_packed(void **state) {
    (void)state;
    struct kernel_model *model = kernel_model_open(
        &source,
        &(struct kernel_model_options){.layers = 1, .kv_heads = 1, .head_dim = 64, .rank_k = 63, .rank_v = 63});
    load(model);
    for (uint32_t side = 0; side < 2; side++) {
        struct batch batch;
        batch_open(&batch, model, 2, false);
        for (uint32_t p = 0; p < 2; p++) {
            uint16_t *dense = (uint16_t *)batch.dense[p];
            size_t at = (size_t)side * 64 * 64 + below(64 * 64);
            memset(dense + at / 64 * 64, 0, 64 * sizeof(*dense)); /* its row's minimum is 0, whatever was drawn */
            dense[at] = p == 0 ? 0x483F : 0x4840;                 /* 195584: a scale of 65195 and some; 196608 */
        }
        batch_place(&batch, 0);
        assert_int_equal(batch_pack(&batch, rig->synchronous), 0);
        assert_int_equal(batch.status[0], 0);
        assert_int_equal(batch.status[1], OSCAR_ERR_NOT_FINITE);
        batch_expect_oracle(&batch);
        batch_close(&batch);
    }
    unload(model);
    kernel_model_close(model);
}

/* Elements near the end of binary32's range, whose quotients are infinite, are clipped like others. */
static void huge_elements_that_are_clipped_are_packed(void **state) {
    (void)state;
    for (uint32_t round = 0; round < (rig_small() ? 3 : 8); round++) {
        struct kernel_model_options options = pack_cases[round];
        options.rank_k = options.rank_v = options.head_dim / 2;
        struct kernel_model *model = pack_case_open(&source, &options);
        load(model);
        struct batch batch;
        batch_open(&batch, model, 3, true);
        for (uint32_t p = 0; p < batch.pages; p++)
            for (size_t at = 0; at < batch.dense_bytes / 2; at += 1 + below(16))
                ((uint16_t *)batch.dense[p])[at] = (uint16_t)(0x7F7F | below(2) << 15);
        batch_place(&batch, 0);
        assert_int_equal(batch_pack(&batch, rig->synchronous), 0);
        for (uint32_t p = 0; p < batch.pages; p++)
            assert_int_equal(batch.status[p], 0);
        batch_expect_oracle(&batch);
        batch_close(&batch);
        unload(model);
        kernel_model_close(model);
    }
}

/* More pages than one launch takes, in a stream; each page's status is there when the stream has passed. */
static void many_pages_are_packed_in_one_call(void **state) {
    (void)state;
    struct kernel_model *model = kernel_model_open(&source, &(struct kernel_model_options){.layers = 1,
                                                                                           .kv_heads = 1,
                                                                                           .head_dim = 64,
                                                                                           .feedback = 0.1,
                                                                                           .centre = true,
                                                                                           .centre_size = 1.0,
                                                                                           .pairs = 4,
                                                                                           .turn_pages = 1000,
                                                                                           .rank_k = 61,
                                                                                           .rank_v = 58});
    load(model);
    struct batch batch;
    batch_open(&batch, model, MAX_PAGES - 1, true);
    ((uint16_t *)batch.dense[131])[below(2 * 64 * 64)] = 0x7FC0;
    batch_place(&batch, 0);
    assert_int_equal(batch_pack(&batch, rig->asynchronous), 0);
    assert_int_equal(rig_wait(rig, rig->asynchronous), 0);
    assert_int_equal(batch.status[131], OSCAR_ERR_NOT_FINITE);
    batch_expect_oracle(&batch);
    batch_close(&batch);
    unload(model);
    kernel_model_close(model);
}

static void pages_lie_more_than_4_gib_apart(void **state) {
    (void)state;
    struct kernel_model *model = pack_case_open(&source, &pack_cases[10]);
    load(model);
    struct batch batch;
    batch_open(&batch, model, 4, true);
    batch_place(&batch, rig_on_gpu() && !rig_small() ? (size_t)5 << 30 : (size_t)5 << 20);
    assert_int_equal(batch_pack(&batch, rig->synchronous), 0);
    batch_expect_oracle(&batch);
    batch_close(&batch);
    unload(model);
    kernel_model_close(model);
}

static void arguments_out_of_range_are_refused_at_once(void **state) {
    (void)state;
    struct kernel_model *model = pack_case_open(&source, &pack_cases[9]);
    load(model);
    struct batch batch;
    batch_open(&batch, model, 2, false);
    batch_place(&batch, 0);
    const struct oscar_geometry *geometry = &model->geometry;
    assert_int_equal(rig->ops->pack(rig->asynchronous, geometry, &model->calibration, batch.item, 0), 0);
    assert_int_equal(
        rig->ops->pack(rig->asynchronous, geometry, &model->calibration, batch.item, OSCAR_MAX_PACK_ITEMS + 1),
        OSCAR_ERR_INVALID);
    struct oscar_geometry other = *geometry;
    other.layers++;
    assert_int_equal(rig->ops->pack(rig->asynchronous, &other, &model->calibration, batch.item, 2), OSCAR_ERR_INVALID);
    batch.item[1].position = 63;
    assert_int_equal(batch_pack(&batch, rig->asynchronous), OSCAR_ERR_INVALID);
    batch.item[1].position = (uint64_t)model->calibration.turns.pages * OSCAR_PAGE_TOKENS;
    assert_int_equal(batch_pack(&batch, rig->asynchronous), OSCAR_ERR_INVALID);
    assert_int_equal(rig_wait(rig, rig->asynchronous), 0);
    batch_close(&batch);
    unload(model);
    kernel_model_close(model);
}

int main(void) {
    rig = rig_open();
    source = kernel_random_open();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(packed_bytes_equal_the_oracle),
        cmocka_unit_test(heads_are_packed_each_by_its_own_calibration),
        cmocka_unit_test(every_clip_rank_is_exact),
        cmocka_unit_test(elements_at_the_edges_of_codes_are_rounded_as_the_oracle_does),
        cmocka_unit_test(bf16_rows_on_edges_are_rounded_as_the_oracle_does),
        cmocka_unit_test(golden_rows_pack_to_golden_codes),
        cmocka_unit_test(a_bad_element_anywhere_fails_its_page_and_no_other),
        cmocka_unit_test(a_scale_that_just_fits_is_packed),
        cmocka_unit_test(huge_elements_that_are_clipped_are_packed),
        cmocka_unit_test(many_pages_are_packed_in_one_call),
        cmocka_unit_test(pages_lie_more_than_4_gib_apart),
        cmocka_unit_test(arguments_out_of_range_are_refused_at_once),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    rig_close(rig);
    return failed;
}
