/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of K and V to dense pages, by calls of their own and by batches; and the inspection of pages. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/number.h"
#include "kernels/rotate.h"
#include "proto/geometry.h"
#include "tests/gpu/graph.h"
#include "tests/gpu/store_scene.h"

static struct rig *rig;
static struct kernel_random source;

static uint32_t below(uint32_t bound) { return kernel_random_below(&source, bound); }

/* ---- store ---- */

static void check_one_store(struct kernel_model *model, uint32_t tokens, uint32_t first_row, uint32_t unit) {
    uint32_t pages = (first_row + tokens + 63) / 64;
    struct tensor tensor = tensor_open(rig, &source, &model->geometry, tokens, unit);
    struct arena arena = arena_open(rig, &source, &model->geometry, pages + 2);
    uint8_t **page = calloc(pages, sizeof(*page));
    assert_non_null(page);
    for (uint32_t p = 0; p < pages; p++)
        page[p] = arena_page(&arena, arena.order[p]);
    struct oscar_store_args args = {.geometry = &model->geometry,
                                    .calibration = &model->calibration,
                                    .layer = below(model->geometry.layers),
                                    .tokens = tokens,
                                    .first_row = first_row,
                                    .pages = page,
                                    .k = tensor_rows(&tensor, false),
                                    .v = tensor_rows(&tensor, true)};
    int r = rig->ops->store(rig->synchronous, &args);
    uint8_t *found = arena_read(rig, &arena);
    assert_int_equal(r, arena_expect(rig, &arena, found, model, &args, &tensor));
    arena_check(&arena, found);
    free(found);
    free(page);
    arena_close(rig, &arena);
    tensor_close(rig, &tensor);
}

static void stored_rows_are_the_rotated_rows_and_nothing_else_changes(void **state) {
    (void)state;
    for (uint32_t c = 0; c < 3 * 2 * STORE_KINDS; c++) {
        struct kernel_model *model = store_model_open(rig, &source, 64U << c % 3, 2, 1 + below(c % 3 == 2 ? 2 : 3),
                                                      c / 3 % 2 ? OSCAR_FP16 : OSCAR_BF16, (enum store_kind)(c / 6));
        const uint32_t lengths[] = {1, 63, 64, 65, 100 + below(400)}, units[] = {8, 2, 1};
        for (uint32_t i = 0; i < 5; i++)
            check_one_store(model, lengths[i], below(4) == 0 ? 0 : below(64), units[below(3)]);
        store_model_close(rig, model);
    }
}

static void a_store_may_span_more_pages_than_one_launch_takes(void **state) {
    (void)state;
    for (enum store_kind kind = HADAMARD; kind <= MATRIX; kind++) {
        struct kernel_model *model = store_model_open(rig, &source, 64, 1, 1, OSCAR_BF16, kind);
        check_one_store(model, 64 * (rig_small() ? 260 : 530) + below(64), 1 + below(63), 8);
        store_model_close(rig, model);
    }
}

static void a_row_out_of_range_is_reported_and_written(void **state) {
    (void)state;
    /* Row 0 of K: the first element, all others 0, so that each rotated one is this, divided by 8 or 16, and with a sign. The
     * greatest magnitude allowed is 64,768; what follows is 65,024. */
    const struct {
        float value;
        bool in_range;
    } cases[] = {{64768.0F, true},  {65024.0F, false}, {-65024.0F, false}, {-64768.0F, true},
                 {0x1p100F, false}, {INFINITY, false}, {NAN, false}};
    for (uint32_t c = 0; c < 2 * sizeof(cases) / sizeof(cases[0]); c++) {
        uint32_t d = c % 2 ? 64 : 256;
        float value = cases[c / 2].value;
        int outcome = cases[c / 2].in_range ? 0 : OSCAR_ERR_NOT_FINITE;
        struct kernel_model *model = store_model_open(rig, &source, d, 1, 1, OSCAR_BF16, HADAMARD);
        struct tensor tensor = tensor_open(rig, &source, &model->geometry, 3, 8);
        uint16_t *row = tensor_row(&tensor, false, 0, 0);
        memset(tensor.host, 0, tensor.elements * sizeof(uint16_t));
        row[0] = oscar_bf16_from_float(value * (d == 64 ? 8.0F : 16.0F));
        tensor_row(&tensor, false, 0, 1)[0] = 0x3F80;
        tensor_upload(rig, &tensor);
        struct arena arena = arena_open(rig, &source, &model->geometry, 1);
        struct oscar_store_args args = {.geometry = &model->geometry,
                                        .calibration = &model->calibration,
                                        .tokens = 3,
                                        .pages = &arena.device,
                                        .k = tensor_rows(&tensor, false),
                                        .v = tensor_rows(&tensor, true)};
        assert_int_equal(rig->ops->store(rig->synchronous, &args), outcome);
        assert_int_equal(rig->ops->stream_status(rig->synchronous), 0);
        assert_int_equal(rig->ops->store(rig->asynchronous, &args), 0);
        assert_int_equal(rig_wait(rig, rig->asynchronous), outcome);
        assert_int_equal(rig->ops->stream_status(rig->asynchronous), 0);
        uint16_t written[2 * 256];
        rig_read(rig, written, arena.device, (size_t)2 * 2 * d);
        for (uint32_t j = 0; j < d; j++) {
            float found = oscar_bf16_to_float(written[j]);
            assert_true(isnan(value) ? isnan(found) != 0 && written[j] != 0xFFFF : found == (float)value);
            assert_true(oscar_bf16_to_float(written[d + j]) == (d == 64 ? 0.125F : 0.0625F));
        }
        arena_close(rig, &arena);
        tensor_close(rig, &tensor);
        store_model_close(rig, model);
    }
}

static void a_matrix_spreads_what_is_not_finite_and_it_is_reported(void **state) {
    (void)state;
    const uint16_t bad[2][4] = {{0x7F80, 0xFF80, 0x7FC0, 0x7F00}, {0x7C00, 0xFC00, 0x7E00, 0x7E01}};
    for (uint32_t c = 0; c < 12; c++) {
        bool fp16 = c / 3 % 2 != 0, is_v = below(2) != 0;
        struct kernel_model *model =
            store_model_open(rig, &source, 64U << c % 3, 1, 2, fp16 ? OSCAR_FP16 : OSCAR_BF16, MATRIX);
        uint32_t d = model->geometry.head_dim, tokens = 200, head = below(2), token = below(tokens);
        struct tensor tensor = tensor_open(rig, &source, &model->geometry, tokens, 8);
        for (uint32_t t = 0; t < tokens; t++) /* all other rows are small */
            for (uint32_t i = 0; i < 4; i++)
                for (uint32_t j = 0; j < d; j++)
                    tensor_row(&tensor, i % 2 != 0, i / 2, t)[j] = (uint16_t)(0x3000 | below(0x400));
        tensor_row(&tensor, is_v, head, token)[below(d)] = bad[fp16][below(4)];
        tensor_upload(rig, &tensor);
        struct arena arena = arena_open(rig, &source, &model->geometry, 4);
        uint8_t *pages[4];
        for (uint32_t p = 0; p < 4; p++)
            pages[p] = arena_page(&arena, p);
        struct oscar_store_args args = {.geometry = &model->geometry,
                                        .calibration = &model->calibration,
                                        .tokens = tokens,
                                        .pages = pages,
                                        .k = tensor_rows(&tensor, false),
                                        .v = tensor_rows(&tensor, true)};
        assert_int_equal(rig->ops->store(rig->synchronous, &args), OSCAR_ERR_NOT_FINITE);
        int32_t status[4];
        const uint8_t *inspected[4] = {pages[0], pages[1], pages[2], pages[3]};
        /* The last page's other rows are poison, and only there. */
        assert_int_equal(rig->ops->inspect(rig->synchronous, &model->geometry, inspected, 4, status), 0);
        for (uint32_t p = 0; p < 4; p++)
            assert_int_equal(status[p], p == token / 64 || p == 3 ? OSCAR_ERR_NOT_FINITE : 0);
        arena_close(rig, &arena);
        tensor_close(rig, &tensor);
        store_model_close(rig, model);
    }
}

static void arguments_out_of_range_are_refused_at_once(void **state) {
    (void)state;
    struct kernel_model *model = store_model_open(rig, &source, 64, 2, 1, OSCAR_BF16, HADAMARD);
    struct tensor tensor = tensor_open(rig, &source, &model->geometry, 1, 8);
    struct arena arena = arena_open(rig, &source, &model->geometry, 1);
    const struct oscar_store_args good = {.geometry = &model->geometry,
                                          .calibration = &model->calibration,
                                          .tokens = 1,
                                          .pages = &arena.device,
                                          .k = tensor_rows(&tensor, false),
                                          .v = tensor_rows(&tensor, true)};
    struct oscar_geometry other = model->geometry;
    other.layers = 3;
    struct oscar_store_args bad[4] = {good, good, good, good};
    bad[0].layer = 2;
    bad[1].first_row = 64;
    bad[2].tokens = OSCAR_MAX_SEQUENCE_TOKENS + 1;
    bad[3].geometry = &other;
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(rig->ops->store(rig->synchronous, &bad[i]), OSCAR_ERR_INVALID);
        assert_int_equal(rig->ops->store(rig->asynchronous, &bad[i]), OSCAR_ERR_INVALID);
    }
    int32_t status = 1;
    const uint8_t *page = arena.device;
    other.head_dim = 65;
    assert_int_equal(rig->ops->inspect(rig->synchronous, &other, &page, 1, &status), OSCAR_ERR_INVALID);
    struct oscar_store_args none = good;
    none.tokens = 0;
    assert_int_equal(rig->ops->store(rig->synchronous, &none), 0);
    assert_int_equal(rig_wait(rig, rig->asynchronous), 0);
    uint8_t *found = arena_read(rig, &arena);
    arena_check(&arena, found); /* all poison */
    free(found);
    arena_close(rig, &arena);
    tensor_close(rig, &tensor);
    store_model_close(rig, model);
}

/* ---- addresses beyond 2^32 ---- */

/* A page of 2 GiB whose last record is written, at 4 GiB of its chunk, and a second token 4 GiB behind the first. */
static void offsets_go_beyond_32_bits(void **state) {
    (void)state;
    if (rig_small())
        skip();
    const struct oscar_geometry geometry = {.layers = 512,
                                            .query_heads = 128,
                                            .kv_heads = 128,
                                            .head_dim = 128,
                                            .dtype = OSCAR_BF16,
                                            .page_tokens = OSCAR_PAGE_TOKENS,
                                            .sink_tokens = OSCAR_SINK_TOKENS,
                                            .recent_tokens = OSCAR_RECENT_TOKENS};
    uint64_t page_bytes = oscar_dense_page_bytes(&geometry), four_gib = UINT64_C(1) << 32;
    assert_int_equal(page_bytes, UINT64_C(1) << 31);
    struct oscar_calibration *calibration;
    assert_int_equal(oscar_calibration_default(&geometry, &calibration, NULL), 0);
    rig_calibration_load(rig, &geometry, calibration);
    struct oscar_chunk *chunk;
    assert_int_equal(rig->ops->chunk_create(rig->device, four_gib + page_bytes, &chunk, NULL), 0);
    uint8_t *memory = rig->ops->chunk_address(chunk), *page = memory + four_gib;
    const size_t tensor_bytes = (size_t)2 * 128 * 128 * sizeof(uint16_t); /* one token: K and V of 128 heads */
    uint16_t *rows = malloc(2 * tensor_bytes);
    assert_non_null(rows);
    for (uint32_t i = 0; i < 4 * 128; i++)
        kernel_row_fill(&source, KERNEL_ROW_NORMAL, 128, rows + (size_t)i * 128);
    rig_write(rig, memory, rows, tensor_bytes);
    rig_write(rig, memory + four_gib, (const uint8_t *)rows + tensor_bytes, tensor_bytes);
    struct oscar_store_args args = {.geometry = &geometry,
                                    .calibration = calibration,
                                    .layer = 511,
                                    .tokens = 2,
                                    .first_row = 62,
                                    .pages = &page,
                                    .k = {memory, INT64_C(1) << 31, 128},
                                    .v = {memory + tensor_bytes / 2, INT64_C(1) << 31, 128}};
    assert_int_equal(rig->ops->store(rig->synchronous, &args), 0);
    for (uint32_t i = 0; i < 2 * 128; i++) {
        uint16_t found[2 * 128];
        uint32_t head = i / 2, side = i % 2;
        size_t record = ((size_t)511 * 128 + head) * oscar_dense_record_bytes(128);
        rig_read(rig, found, page + record + (side * 64 + 62) * (size_t)256, sizeof(found));
        for (uint32_t token = 0; token < 2; token++) {
            float x[128];
            for (uint32_t j = 0; j < 128; j++)
                x[j] = oscar_bf16_to_float(rows[((size_t)token * 256 + side * 128 + head) * 128 + j]);
            oscar_rotate(HOST_PORTABLE, NULL, 128, false, 1, x, 128, x, 128);
            for (uint32_t j = 0; j < 128; j++)
                assert_int_equal(found[token * 128 + j], oscar_bf16_from_float(x[j]));
        }
    }
    free(rows);
    rig->ops->chunk_free(chunk);
    rig->ops->calibration_unload(rig->device, calibration);
    oscar_calibration_free(calibration);
}

/* ---- batches ---- */

#define BATCH_ITEMS 40U
#define BATCH_ROWS 90U
#define BATCH_PAGES 6U /* of an item, at most */

/* A batch whose items have their tail pages in one dense arena; what comes before is packed or sink and never touched. */
struct batch {
    struct kernel_model *model;
    struct oscar_batch_impl *batch;
    struct arena arena;
    struct tensor tensor;
    struct oscar_batch_store_args args;
    struct oscar_batch_item item[BATCH_ITEMS];
    oscar_page_ref pages[BATCH_ITEMS][BATCH_PAGES];
    uint32_t items;
};

static void batch_open(struct batch *batch, uint32_t d, enum store_kind kind, bool decode) {
    *batch = (struct batch){.model = store_model_open(rig, &source, d, 2, 2, below(2) ? OSCAR_BF16 : OSCAR_FP16, kind)};
    struct oscar_batch_limits limits = {BATCH_ITEMS, decode ? 1 : BATCH_ROWS, (uint64_t)BATCH_ITEMS * BATCH_PAGES};
    assert_int_equal(rig->ops->batch_open(rig->device, &batch->model->geometry, &limits, &batch->batch, NULL), 0);
    batch->arena = arena_open(rig, &source, &batch->model->geometry, BATCH_ITEMS * BATCH_PAGES);
    batch->tensor = tensor_open(rig, &source, &batch->model->geometry, BATCH_ITEMS * BATCH_ROWS, below(2) ? 8 : 1);
    batch->args = (struct oscar_batch_store_args){.calibration = &batch->model->calibration,
                                                  .layer = below(2),
                                                  .k = tensor_rows(&batch->tensor, false),
                                                  .v = tensor_rows(&batch->tensor, true)};
}

static void batch_close(struct batch *batch) {
    rig->ops->batch_close(batch->batch);
    arena_close(rig, &batch->arena);
    tensor_close(rig, &batch->tensor);
    store_model_close(rig, batch->model);
}

static void batch_update(struct batch *batch, struct oscar_stream_impl *stream, const struct oscar_batch_item *item,
                         uint32_t items) {
    const struct oscar_arena_view view = {batch->arena.device, batch->arena.page_bytes, NULL};
    const struct oscar_arena_view arenas[OSCAR_FORMS] = {view, view, view};
    assert_int_equal(rig->ops->batch_update(stream, batch->batch, arenas, item, items), 0);
}

/* Draws items of `rows` rows at most (all of as many when `even`), and makes the batch these. */
static void batch_draw(struct batch *batch, struct oscar_stream_impl *stream, uint32_t rows, bool even) {
    batch->items = even ? BATCH_ITEMS : below(BATCH_ITEMS + 1);
    uint32_t slot = 0;
    for (uint32_t i = 0; i < batch->items; i++) {
        uint32_t count = even ? rows : below(rows + 1), tokens = count + below(64 * BATCH_PAGES - count + 1);
        uint32_t first = (tokens - count) / 64;
        for (uint32_t p = 0; p < (tokens + 63) / 64; p++) {
            bool dense = (count > 0 && p >= first) || (p > 0 && below(3) == 0);
            batch->pages[i][p] = oscar_page_ref_make(dense    ? OSCAR_FORM_DENSE
                                                     : p == 0 ? OSCAR_FORM_SINK
                                                              : OSCAR_FORM_PACKED,
                                                     dense ? batch->arena.order[slot++] : p);
        }
        /* An item's rows lie anywhere in the tensor, its K not at the same place as its V. */
        batch->item[i] = (struct oscar_batch_item){.pages = batch->pages[i],
                                                   .tokens = tokens,
                                                   .rows = count,
                                                   .k_offset = (int64_t)(i * BATCH_ROWS) * batch->tensor.token_stride,
                                                   .v_offset = (int64_t)((BATCH_ITEMS - 1 - i) * BATCH_ROWS) *
                                                               batch->tensor.token_stride};
    }
    batch_update(batch, stream, batch->item, batch->items);
}

static void batch_enqueue(struct oscar_stream_impl *stream, void *argument) {
    struct batch *batch = argument;
    assert_int_equal(rig->ops->batch_store(stream, batch->batch, &batch->args), 0);
}

/* What was stored, against one store an item. The pages are poison again afterwards. */
static int batch_check(struct batch *batch) {
    int result = 0;
    uint8_t *found = arena_read(rig, &batch->arena);
    for (uint32_t i = 0; i < batch->items; i++) {
        const struct oscar_batch_item *item = &batch->item[i];
        if (item->rows == 0)
            continue;
        uint32_t first = item->tokens - item->rows;
        uint8_t *pages[BATCH_PAGES];
        for (uint32_t p = first / 64; p < (item->tokens + 63) / 64; p++)
            pages[p - first / 64] = arena_page(&batch->arena, (uint32_t)oscar_page_ref_id(item->pages[p]));
        struct oscar_store_args args = {.layer = batch->args.layer,
                                        .tokens = item->rows,
                                        .first_row = first % 64,
                                        .pages = pages,
                                        .k = batch->args.k,
                                        .v = batch->args.v};
        args.k.data = (const uint16_t *)args.k.data + item->k_offset;
        args.v.data = (const uint16_t *)args.v.data + item->v_offset;
        int r = arena_expect(rig, &batch->arena, found, batch->model, &args, &batch->tensor);
        result = r < 0 ? r : result;
    }
    arena_check(&batch->arena, found);
    arena_poison(rig, &batch->arena);
    free(found);
    return result;
}

static void a_batch_is_stored_as_its_items_are(void **state) {
    (void)state;
    for (uint32_t c = 0; c < 3 * STORE_KINDS; c++) {
        struct batch batch;
        batch_open(&batch, 64U << c % 3, (enum store_kind)(c / 3), false);
        for (uint32_t round = 0; round < 4; round++) {
            batch_draw(&batch, rig->synchronous, 1 + below(BATCH_ROWS), round % 2 != 0);
            int r = rig->ops->batch_store(rig->synchronous, batch.batch, &batch.args);
            assert_int_equal(r, batch_check(&batch));
        }
        batch_close(&batch);
    }
}

static void a_recorded_batch_store_runs_with_what_the_batch_holds_then(void **state) {
    (void)state;
    for (uint32_t c = 0; c < 2 * STORE_KINDS; c++) {
        struct batch batch;
        bool decode = c % 2 == 0;
        batch_open(&batch, 128, (enum store_kind)(c / 2), decode);
        struct graph *graph = graph_record(rig, batch_enqueue, &batch);
        for (uint32_t round = 0; round < 4; round++) {
            batch_draw(&batch, graph_stream(graph), decode ? 1 : BATCH_ROWS, decode);
            graph_run(graph);
            int r = rig_wait(rig, graph_stream(graph));
            assert_int_equal(r, batch_check(&batch));
        }
        graph_free(graph);
        batch_close(&batch);
    }
}

static void rows_in_a_page_that_is_not_dense_are_refused(void **state) {
    (void)state;
    struct batch batch;
    batch_open(&batch, 64, HADAMARD, false);
    const oscar_page_ref sink = oscar_page_ref_make(OSCAR_FORM_SINK, 0),
                         dense = oscar_page_ref_make(OSCAR_FORM_DENSE, 1),
                         packed = oscar_page_ref_make(OSCAR_FORM_PACKED, 2);
    const struct {
        oscar_page_ref pages[3];
        uint32_t tokens, rows;
        int outcome;
    } cases[] = {
        {{sink, packed, dense}, 129, 1, 0},
        {{sink, packed, dense}, 129, 2, OSCAR_ERR_INVALID}, /* the first row lies in the page before */
        {{sink, packed, dense}, 192, 64, 0},
        {{sink, dense, packed}, 129, 1, OSCAR_ERR_INVALID},
        {{sink, packed, packed}, 129, 0, 0},
        {{sink}, 64, 1, OSCAR_ERR_INVALID},
        {{sink}, 0, 5, 0},
        {{dense}, 64, 64, 0},
    };
    for (uint32_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        const struct oscar_batch_item item = {
            .pages = cases[c].pages, .tokens = cases[c].tokens, .rows = cases[c].rows};
        batch_update(&batch, rig->asynchronous, &item, 1);
        assert_int_equal(rig->ops->batch_store(rig->asynchronous, batch.batch, &batch.args), cases[c].outcome);
        (void)rig_wait(rig, rig->asynchronous); /* a row of the tensor may be out of range */
    }
    batch_close(&batch);
}

/* ---- inspect ---- */

static void a_page_with_one_bad_element_is_found_among_many(void **state) {
    (void)state;
    const uint16_t bad[] = {0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x477E, 0xC77E}, good[] = {0x477D, 0xC77D};
    for (uint32_t c = 0; c < 6; c++) {
        struct kernel_model *model =
            store_model_open(rig, &source, 64U << c % 3, 1 + below(3), 1 + below(3), OSCAR_BF16, HADAMARD);
        uint32_t count = c < 3 ? 1 + below(20) : 300;
        struct arena arena = arena_open(rig, &source, &model->geometry, count);
        size_t elements = arena.page_bytes / sizeof(uint16_t);
        uint8_t *page = kernel_dense_page(&source, &model->geometry, true);
        const uint8_t **pages = calloc(count, sizeof(*pages));
        int32_t *status = malloc((count + 1) * sizeof(*status)), *expected = calloc(count + 1, sizeof(*expected));
        assert_true(pages && status && expected);
        memset(status, 0xFF, (count + 1) * sizeof(*status));
        expected[count] = -1; /* what follows is not written */
        for (uint32_t p = 0; p < count; p++) {
            size_t at = p % 3 == 0 ? 0 : p % 3 == 1 ? elements - 1 : below((uint32_t)elements);
            uint16_t was = ((uint16_t *)page)[at];
            expected[p] = below(3) == 0 ? OSCAR_ERR_NOT_FINITE : 0;
            ((uint16_t *)page)[at] = expected[p] < 0 ? bad[below(6)] : good[below(2)];
            pages[p] = arena_page(&arena, arena.order[p]);
            rig_write(rig, arena_page(&arena, arena.order[p]), page, arena.page_bytes);
            ((uint16_t *)page)[at] = was;
        }
        assert_int_equal(rig->ops->inspect(rig->synchronous, &model->geometry, pages, count, status), 0);
        assert_memory_equal(status, expected, (count + 1) * sizeof(*status));
        assert_int_equal(rig->ops->inspect(rig->asynchronous, &model->geometry, pages, count, status), 0);
        assert_int_equal(rig_wait(rig, rig->asynchronous), 0);
        assert_memory_equal(status, expected, (count + 1) * sizeof(*status));
        assert_int_equal(rig->ops->inspect(rig->synchronous, &model->geometry, pages, 0, status), 0);
        free(page);
        free(pages);
        free(status);
        free(expected);
        arena_close(rig, &arena);
        store_model_close(rig, model);
    }
}

int main(void) {
    rig = rig_open();
    source = kernel_random_open();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stored_rows_are_the_rotated_rows_and_nothing_else_changes),
        cmocka_unit_test(a_store_may_span_more_pages_than_one_launch_takes),
        cmocka_unit_test(a_row_out_of_range_is_reported_and_written),
        cmocka_unit_test(a_matrix_spreads_what_is_not_finite_and_it_is_reported),
        cmocka_unit_test(arguments_out_of_range_are_refused_at_once),
        cmocka_unit_test(offsets_go_beyond_32_bits),
        cmocka_unit_test(a_page_with_one_bad_element_is_found_among_many),
        cmocka_unit_test(a_batch_is_stored_as_its_items_are),
        cmocka_unit_test(a_recorded_batch_store_runs_with_what_the_batch_holds_then),
        cmocka_unit_test(rows_in_a_page_that_is_not_dense_are_refused),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    rig_close(rig);
    return failed;
}
