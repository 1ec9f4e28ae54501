/* SPDX-License-Identifier: Apache-2.0 */
/* Batches of the host backend: what attend and store do with them, when an update counts, and what is refused. */
#include <math.h>
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>

#include "attend_fixture.h"
#include "kernels/number.h"
#include "proto/geometry.h"

#define BOUND 5e-4 /* of attention against the oracle, as in attend_oracle.c */

static uint64_t state;
static const struct oscar_device_ops *ops;
static struct oscar_device *device;

static struct oscar_stream_impl *open_stream(bool asynchronous) {
    struct oscar_stream_impl *stream;
    struct oscar_stream_options options = {.threads = 2, .asynchronous = asynchronous};
    assert_int_equal(ops->stream_open(device, &options, &stream, NULL), 0);
    return stream;
}

/* A gate that holds a stream up until the test lets it through. */
static void gate_pass(void *argument) {
    while (sem_wait((sem_t *)argument) != 0) {
    }
}

static struct oscar_batch_impl *open_batch(const struct oscar_geometry *geometry, uint32_t items, uint32_t rows,
                                           uint64_t pages) {
    struct oscar_batch_impl *batch;
    struct oscar_batch_limits limits = {.items = items, .rows = rows, .pages = pages};
    assert_int_equal(ops->batch_open(device, geometry, &limits, &batch, NULL), 0);
    return batch;
}

static struct fixture *open_scene(uint32_t trial) {
    static const uint32_t sizes[] = {64, 128, 256};
    struct fixture_options options = {.head_dim = sizes[trial % 3],
                                      .group = 1 + fixture_pick(&state, 5),
                                      .kv_heads = 2,
                                      .layers = 2,
                                      .dtype = trial % 2 == 0 ? OSCAR_BF16 : OSCAR_FP16,
                                      .pairs = trial % 4 == 0 ? -1 : (int)fixture_pick(&state, 9),
                                      .matrix = trial % 2 != 0,
                                      .forms = trial % 2 != 0 ? FIXTURE_MIXED : FIXTURE_RANDOM,
                                      .distinct = 3,
                                      .key_size = 1,
                                      .query_size = 1};
    struct fixture *fixture = fixture_open(&state, &options, 16);
    fixture_add(fixture, &state, 64 + fixture_pick(&state, 600), 1);
    fixture_add(fixture, &state, 0, 2);
    fixture_add(fixture, &state, 130 + fixture_pick(&state, 300), 1 + fixture_pick(&state, 40));
    return fixture;
}

/* The fixture's items over tensors: `q` and `out` hold what lies at the items' addresses from there on; NULL, NULL for none. */
static void make_items(const struct fixture *fixture, const void *q, const void *out, const float *lse,
                       struct oscar_batch_item *ret_item) {
    for (uint32_t i = 0; i < fixture->args.items; i++) {
        const struct oscar_attend_item *item = &fixture->item[i];
        ret_item[i] = (struct oscar_batch_item){
            .pages = item->pages,
            .tokens = item->tokens,
            .rows = item->rows,
            .q_offset = ((intptr_t)item->q - (intptr_t)q) / (intptr_t)sizeof(uint16_t),
            .q_row_stride = item->q_row_stride,
            .q_head_stride = item->q_head_stride,
            .out_offset = ((intptr_t)item->out - (intptr_t)out) / (intptr_t)sizeof(uint16_t),
            .out_row_stride = item->out_row_stride,
            .out_head_stride = item->out_head_stride,
            .lse_offset = ((intptr_t)item->lse - (intptr_t)lse) / (intptr_t)sizeof(float),
        };
    }
}

static struct oscar_batch_attend_args attend_args(const struct fixture *fixture) {
    return (struct oscar_batch_attend_args){.calibration = &fixture->calibration,
                                            .layer = fixture->args.layer,
                                            .softmax_scale = fixture->args.softmax_scale};
}

static void check_results(struct fixture *fixture) {
    for (uint32_t i = 0; i < fixture->args.items; i++) {
        double lse_error, error = fixture_error(fixture, i, &lse_error);
        if (!(error <= BOUND) || !(lse_error <= 5 * BOUND))
            fail_msg("item %u: error %g, of lse %g", i, error, lse_error);
    }
}

static void attending_to_a_batch_matches_the_oracle(void **unused) {
    (void)unused;
    for (uint32_t trial = 0; trial < 12; trial++) {
        struct oscar_stream_impl *stream = trial % 3 == 0 ? NULL : open_stream(trial % 3 == 1);
        struct fixture *fixture = open_scene(trial);
        struct oscar_batch_impl *batch = open_batch(&fixture->geometry, 3, 40, 32);
        struct oscar_batch_item item[3];
        struct oscar_batch_attend_args args = attend_args(fixture);
        if (trial % 2 == 0) { /* tensors, which offsets may leave: the items' memory is not one allocation */
            args.q = fixture->item[1].q;
            args.out = fixture->item[2].out;
        }
        args.lse = fixture->item[0].lse;
        make_items(fixture, args.q, args.out, args.lse, item);
        assert_int_equal(ops->batch_update(stream, batch, fixture->args.arenas, item, 3), 0);
        assert_int_equal(ops->batch_attend(stream, batch, &args), 0);
        assert_int_equal(ops->stream_wait(stream, UINT64_MAX), 0);
        check_results(fixture);
        for (uint32_t i = 0; i < 3; i++) { /* the same without log-sum-exps */
            memset(fixture->item[i].lse, 0xFF, sizeof(float) * fixture->item[i].rows * fixture->geometry.query_heads);
            memset(fixture->item[i].out, 0xFF, fixture_out_elements(fixture, &fixture->item[i]) * sizeof(uint16_t));
        }
        args.lse = NULL;
        assert_int_equal(ops->batch_attend(stream, batch, &args), 0);
        assert_int_equal(ops->stream_wait(stream, UINT64_MAX), 0);
        for (uint32_t i = 0; i < 3; i++) {
            assert_true(isnan(fixture->item[i].lse[0]));
            fixture->item[i].lse = NULL;
        }
        check_results(fixture);
        ops->stream_close(stream);
        ops->batch_close(batch);
        fixture_close(fixture);
    }
}

static void work_sees_the_batch_as_it_was_when_it_was_enqueued(void **unused) {
    (void)unused;
    struct oscar_stream_impl *stream = open_stream(true);
    sem_t gate;
    sem_init(&gate, 0, 0);
    struct fixture *fixture = open_scene(1);
    struct oscar_batch_impl *batch = open_batch(&fixture->geometry, 2, 40, 32);
    struct oscar_batch_attend_args args = attend_args(fixture);
    args.lse = fixture->item[0].lse;
    struct oscar_arena_view arenas[OSCAR_FORMS];
    struct oscar_batch_item item[3];
    oscar_page_ref pages[3][16];
    make_items(fixture, NULL, NULL, args.lse, item);
    for (uint32_t i = 0; i < 3; i++) {
        memcpy(pages[i], item[i].pages, (item[i].tokens + 63) / 64 * sizeof(pages[i][0]));
        item[i].pages = pages[i];
    }
    memcpy(arenas, fixture->args.arenas, sizeof(arenas));

    assert_int_equal(ops->stream_call(stream, gate_pass, &gate), 0);
    assert_int_equal(ops->batch_update(stream, batch, arenas, item, 2), 0);
    assert_int_equal(ops->batch_attend(stream, batch, &args), 0);
    assert_int_equal(ops->batch_update(stream, batch, arenas, item + 2, 1), 0);
    assert_int_equal(ops->batch_attend(stream, batch, &args), 0);
    assert_int_equal(ops->batch_update(stream, batch, arenas, NULL, 0), 0);
    assert_int_equal(ops->batch_attend(stream, batch, &args), 0);
    memset(item, 0xFF, sizeof(item)); /* all of it was copied */
    memset(pages, 0xFF, sizeof(pages));
    memset(arenas, 0xFF, sizeof(arenas));
    memset(&args, 0xFF, sizeof(args));
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(*(const uint16_t *)fixture->item[i].out, 0x7E5A); /* nothing has run */
    sem_post(&gate);
    assert_int_equal(ops->stream_wait(stream, UINT64_MAX), 0);
    check_results(fixture);
    ops->stream_close(stream);
    ops->batch_close(batch);
    fixture_close(fixture);
    sem_destroy(&gate);
}

/* ---- store ---- */

struct tensors {
    uint16_t *data;
    struct oscar_rows k, v;
};

static struct tensors open_tensors(const struct oscar_geometry *geometry, uint32_t tokens) {
    int64_t head_stride = geometry->head_dim + 8, token_stride = head_stride * geometry->kv_heads * 2 + 16;
    size_t elements = (size_t)token_stride * tokens;
    struct tensors tensors = {.data = malloc(elements * sizeof(uint16_t))};
    assert_non_null(tensors.data);
    for (size_t i = 0; i < elements; i++)
        tensors.data[i] = geometry->dtype == OSCAR_BF16 ? oscar_bf16_from_float(fixture_normal(&state))
                                                        : oscar_fp16_from_float(fixture_normal(&state));
    tensors.k = (struct oscar_rows){tensors.data, token_stride, head_stride};
    tensors.v = (struct oscar_rows){tensors.data + head_stride * geometry->kv_heads, token_stride, head_stride};
    return tensors;
}

/* Three items whose rows follow each other in one tensor; their last pages are dense and their own. */
static void storing_a_batch_is_storing_its_items(void **unused) {
    (void)unused;
    for (uint32_t trial = 0; trial < 12; trial++) {
        struct oscar_stream_impl *stream = trial % 3 == 0 ? NULL : open_stream(trial % 3 == 1);
        struct fixture *fixture = open_scene(trial);
        const struct oscar_geometry *geometry = &fixture->geometry;
        const struct oscar_arena_view *dense = &fixture->args.arenas[OSCAR_FORM_DENSE];
        struct oscar_batch_impl *batch = open_batch(geometry, 3, 200, 32);
        struct oscar_batch_item item[3] = {0};
        oscar_page_ref table[3][8];
        uint32_t rows[3], total = 0;
        for (uint32_t i = 0; i < 3; i++) {
            uint32_t tokens = i == 1 ? 0 : 70 + fixture_pick(&state, 130);
            rows[i] = i == 1 ? 3 : 1 + fixture_pick(&state, trial % 2 == 0 ? 4 : tokens - 65);
            for (uint32_t p = 0; p < 8; p++)
                table[i][p] = oscar_page_ref_make(p == 0 ? OSCAR_FORM_SINK : OSCAR_FORM_DENSE, 3 * i + p - 1);
            table[i][0] = oscar_page_ref_make(OSCAR_FORM_SINK, 0);
            item[i] = (struct oscar_batch_item){.pages = table[i], .tokens = tokens, .rows = rows[i]};
            total += rows[i];
        }
        struct tensors tensors = open_tensors(geometry, total);
        struct oscar_batch_store_args args = {
            .calibration = &fixture->calibration, .layer = 1, .k = tensors.k, .v = tensors.v};
        for (uint32_t i = 0, before = 0; i < 3; before += rows[i++])
            item[i].k_offset = item[i].v_offset = before * tensors.k.token_stride;
        size_t bytes = dense->stride * fixture->pages[OSCAR_FORM_DENSE];
        uint8_t *as_it_was = malloc(bytes), *expected = malloc(bytes);
        assert_true(as_it_was && expected);
        memcpy(as_it_was, dense->base, bytes);
        for (uint32_t i = 0; i < 3; i += 2) {
            uint32_t first = item[i].tokens - rows[i];
            uint8_t *pages[8];
            for (uint32_t p = first / 64; p < 4; p++)
                pages[p - first / 64] = (uint8_t *)dense->base + oscar_page_ref_id(table[i][p]) * dense->stride;
            struct oscar_store_args one = {.geometry = geometry,
                                           .calibration = &fixture->calibration,
                                           .layer = 1,
                                           .tokens = rows[i],
                                           .first_row = first % 64,
                                           .pages = pages,
                                           .k = {(const uint16_t *)tensors.k.data + item[i].k_offset,
                                                 tensors.k.token_stride, tensors.k.head_stride},
                                           .v = {(const uint16_t *)tensors.v.data + item[i].v_offset,
                                                 tensors.v.token_stride, tensors.v.head_stride}};
            assert_int_equal(ops->store(NULL, &one), 0);
        }
        memcpy(expected, dense->base, bytes);
        assert_memory_not_equal(expected, as_it_was, bytes);
        memcpy((uint8_t *)dense->base, as_it_was, bytes);
        assert_int_equal(ops->batch_update(stream, batch, fixture->args.arenas, item, 3), 0);
        assert_int_equal(ops->batch_store(stream, batch, &args), 0);
        assert_int_equal(ops->stream_wait(stream, UINT64_MAX), 0);
        assert_memory_equal(dense->base, expected, bytes);
        if (stream) { /* a row out of range is the work's failure */
            tensors.data[0] = geometry->dtype == OSCAR_BF16 ? 0x7F80 : 0x7C00;
            int r = ops->batch_store(stream, batch, &args), later = ops->stream_wait(stream, UINT64_MAX);
            assert_int_equal(trial % 3 == 1 ? later : r, OSCAR_ERR_NOT_FINITE);
        }
        free(as_it_was);
        free(expected);
        free(tensors.data);
        ops->stream_close(stream);
        ops->batch_close(batch);
        fixture_close(fixture);
    }
}

/* ---- refusals ---- */

static void a_batch_beyond_its_limits_is_refused_and_stays_as_it_was(void **unused) {
    (void)unused;
    struct fixture *fixture = open_scene(1);
    struct oscar_batch_impl *batch = open_batch(&fixture->geometry, 2, 5, 4);
    oscar_page_ref table[8];
    for (uint32_t p = 0; p < 8; p++)
        table[p] = oscar_page_ref_make(OSCAR_FORM_PACKED, 0);
    struct oscar_batch_item item[3] = {{.pages = table, .tokens = 128, .rows = 1},
                                       {.pages = table, .tokens = 128, .rows = 1},
                                       {.pages = table, .tokens = 0, .rows = 1}};
    const struct oscar_arena_view *arenas = fixture->args.arenas;
    assert_int_equal(ops->batch_update(NULL, batch, arenas, item, 2), 0);
    assert_int_equal(ops->batch_update(NULL, batch, arenas, item, 3), OSCAR_ERR_LIMIT);
    item[1].tokens = 129;
    assert_int_equal(ops->batch_update(NULL, batch, arenas, item, 2), OSCAR_ERR_LIMIT);
    item[1].tokens = 128;
    item[1].rows = 6;
    assert_int_equal(ops->batch_update(NULL, batch, arenas, item, 2), OSCAR_ERR_LIMIT);
    item[1].tokens = 4;
    item[1].rows = 5;
    assert_int_equal(ops->batch_update(NULL, batch, arenas, item, 2), OSCAR_ERR_INVALID);
    item[1].rows = 4;
    table[1] = 0;
    assert_int_equal(ops->batch_update(NULL, batch, arenas, item, 2), OSCAR_ERR_INVALID);
    table[1] = oscar_page_ref_make((enum oscar_form)3, 0);
    assert_int_equal(ops->batch_update(NULL, batch, arenas, item, 2), OSCAR_ERR_INVALID);
    ops->batch_close(batch);
    ops->batch_close(NULL);
    fixture_close(fixture);
}

static void limits_that_no_batch_has_are_refused(void **unused) {
    (void)unused;
    struct fixture *fixture = open_scene(0);
    struct oscar_batch_impl *batch;
    static const struct oscar_batch_limits bad[] = {{0, 1, 1},
                                                    {1, 0, 1},
                                                    {OSCAR_MAX_ATTEND_ITEMS + 1, 1, 1},
                                                    {1, OSCAR_MAX_SEQUENCE_TOKENS + 1, 1},
                                                    {1, 1, OSCAR_MAX_SEQUENCE_PAGES + 1}};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(ops->batch_open(device, &fixture->geometry, &bad[i], &batch, NULL), OSCAR_ERR_INVALID);
    struct oscar_geometry geometry = fixture->geometry;
    geometry.head_dim = 96;
    assert_int_equal(ops->batch_open(device, &geometry, &(struct oscar_batch_limits){1, 1, 1}, &batch, NULL),
                     OSCAR_ERR_GEOMETRY);
    fixture_close(fixture);
}

static void work_that_does_not_fit_the_batch_is_refused_at_once(void **unused) {
    (void)unused;
    struct oscar_stream_impl *stream = open_stream(true);
    struct fixture *fixture = open_scene(1);
    struct oscar_batch_impl *batch = open_batch(&fixture->geometry, 1, 2, 32);
    oscar_page_ref table[32];
    for (uint32_t p = 0; p < 32; p++)
        table[p] = oscar_page_ref_make(p == 2 ? OSCAR_FORM_DENSE : OSCAR_FORM_PACKED, 0);
    struct oscar_batch_item item = {.pages = table, .tokens = 129, .rows = 2};
    struct oscar_batch_attend_args attend = attend_args(fixture);
    struct oscar_batch_store_args store = {.calibration = &fixture->calibration};
    assert_int_equal(ops->batch_update(stream, batch, fixture->args.arenas, &item, 1), 0);
    assert_int_equal(ops->batch_store(stream, batch, &store), OSCAR_ERR_INVALID); /* row 0 lies in a packed page */
    attend.layer = store.layer = fixture->geometry.layers;
    assert_int_equal(ops->batch_store(stream, batch, &store), OSCAR_ERR_INVALID);
    assert_int_equal(ops->batch_attend(stream, batch, &attend), OSCAR_ERR_INVALID);
    attend.layer = 0;
    struct oscar_calibration other = fixture->calibration;
    other.head_dim *= 2;
    attend.calibration = &other;
    assert_int_equal(ops->batch_attend(stream, batch, &attend), OSCAR_ERR_INVALID);
    other = fixture->calibration;
    other.frequencies = 1;
    other.turns.pages = 2;
    assert_int_equal(ops->batch_attend(stream, batch, &attend), OSCAR_ERR_INVALID);
    assert_int_equal(ops->stream_wait(stream, UINT64_MAX), 0);
    ops->stream_close(stream);
    ops->batch_close(batch);
    fixture_close(fixture);
}

int main(void) {
    state = fixture_seed();
    ops = oscar_device_host();
    if (ops->device_open(NULL, &device, NULL) < 0)
        return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(attending_to_a_batch_matches_the_oracle),
        cmocka_unit_test(work_sees_the_batch_as_it_was_when_it_was_enqueued),
        cmocka_unit_test(storing_a_batch_is_storing_its_items),
        cmocka_unit_test(a_batch_beyond_its_limits_is_refused_and_stays_as_it_was),
        cmocka_unit_test(limits_that_no_batch_has_are_refused),
        cmocka_unit_test(work_that_does_not_fit_the_batch_is_refused_at_once),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    ops->device_close(device);
    return failed;
}
