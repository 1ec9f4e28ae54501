/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention with few query rows, and merging, against the float64 oracle, fresh random batches each time. Errors are the largest
 * in a row over that row's largest output, less the rounding of the output type.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/number.h"
#include "tests/gpu/attend_scene.h"
#include "tests/gpu/graph.h"

#define BOUND 1e-3

static uint64_t state;
static struct rig *rig;

static struct oscar_stream_impl *any_stream(void) {
    return fixture_pick(&state, 2) == 0 ? rig->synchronous : rig->asynchronous;
}

/* Of tokens, items or trials that are many. */
static uint32_t many(uint32_t count, uint32_t small) { return rig_small() ? small : count; }

static void check(struct fixture *fixture, const struct oscar_batch_limits *limits) {
    struct scene *scene = scene_open(rig, fixture, limits);
    scene_attend(scene, any_stream());
    double error = scene_check(scene, BOUND);
    print_message("head size %u, group %u, pairs %d, matrix %d, keys of %g, queries of %g: error %.2g\n",
                  fixture->options.head_dim, fixture->options.group, fixture->options.pairs, fixture->options.matrix,
                  (double)fixture->options.key_size, (double)fixture->options.query_size, error);
    scene_close(scene);
    fixture_close(fixture);
}

static struct fixture_options plain(uint32_t head_dim, uint32_t group) {
    return (struct fixture_options){.head_dim = head_dim,
                                    .group = group,
                                    .kv_heads = 2,
                                    .layers = 2,
                                    .dtype = fixture_pick(&state, 2) == 0 ? OSCAR_BF16 : OSCAR_FP16,
                                    .pairs = -1,
                                    .matrix = fixture_pick(&state, 2) == 0,
                                    .forms = FIXTURE_RANDOM,
                                    .distinct = 4,
                                    .key_size = 1,
                                    .query_size = 1};
}

static void every_head_size_and_group_matches_the_oracle(void **unused) {
    (void)unused;
    static const uint32_t groups[] = {1, 2, 3, 4, 5, 8, 16, 64};
    for (uint32_t d = 64; d <= 256; d *= 2)
        for (size_t g = 0; g < sizeof(groups) / sizeof(groups[0]); g++) {
            struct fixture_options options = plain(d, groups[g]);
            options.kv_heads = 1 + g % 3;
            options.layers = 3 - g % 3;
            struct fixture *fixture = fixture_open(&state, &options, 16);
            fixture_add(fixture, &state, 1 + fixture_pick(&state, many(700, 200)), 1);
            check(fixture, NULL);
        }
}

static void lengths_around_a_page_match(void **unused) {
    (void)unused;
    static const uint32_t tokens[] = {0, 1, 63, 64, 65, 7, 129, 500};
    for (uint32_t d = 64; d <= 256; d *= 2)
        for (int forms = FIXTURE_MIXED; forms <= FIXTURE_PACKED; forms++) {
            struct fixture_options options = plain(d, 4);
            options.forms = (enum fixture_forms)forms;
            struct fixture *fixture = fixture_open(&state, &options, 16);
            for (size_t i = 0; i < sizeof(tokens) / sizeof(tokens[0]); i++)
                fixture_add(fixture, &state, tokens[i], 1);
            check(fixture, NULL);
        }
}

/* More slices than units, so that most warps have nothing to do. */
static void a_short_sequence_leaves_most_warps_idle(void **unused) {
    (void)unused;
    static const uint32_t tokens[] = {1, 8, 100, 200};
    for (uint32_t d = 64; d <= 256; d *= 2)
        for (size_t i = 0; i < sizeof(tokens) / sizeof(tokens[0]); i++) {
            struct fixture_options options = plain(d, 1);
            options.kv_heads = 8;
            options.forms = FIXTURE_MIXED;
            struct fixture *fixture = fixture_open(&state, &options, 16);
            fixture_add(fixture, &state, tokens[i], 1);
            check(fixture, NULL);
        }
}

/* Also where the rows' limits lie in several packed pages. */
static void rows_see_no_later_token(void **unused) {
    (void)unused;
    for (uint32_t rows = 1; rows <= OSCAR_MAX_DECODE_ROWS; rows++) {
        struct fixture_options options = plain(64U << rows % 3, 1 + fixture_pick(&state, 8));
        options.forms = rows % 4 == 0 ? FIXTURE_RANDOM : FIXTURE_PACKED;
        options.pairs = rows % 2 == 0 ? -1 : (int)rows;
        struct fixture *fixture = fixture_open(&state, &options, 16);
        fixture_add(fixture, &state, rows, rows);
        fixture_add(fixture, &state, rows + fixture_pick(&state, 64), rows);
        fixture_add(fixture, &state, 64 * (1 + fixture_pick(&state, 4)) + rows / 2, rows);
        fixture_add(fixture, &state, 64 + fixture_pick(&state, 600), 1 + fixture_pick(&state, rows));
        check(fixture, NULL);
    }
}

static void centres_turn_with_the_position(void **unused) {
    (void)unused;
    static const int pairs[] = {0, 1, 4, 7, 8, 9, 16};
    for (size_t i = 0; i < 2 * sizeof(pairs) / sizeof(pairs[0]); i++) {
        struct fixture_options options = plain(64U << i % 3, i % 2 == 0 ? 4 : 8);
        options.pairs = pairs[i / 2];
        options.forms = FIXTURE_MIXED;
        struct fixture *fixture = fixture_open(&state, &options, 64);
        fixture_add(fixture, &state, many(1000, 200) + fixture_pick(&state, many(2500, 600)),
                    1 + fixture_pick(&state, 3));
        fixture_add(fixture, &state, 1 + fixture_pick(&state, 300), 1);
        check(fixture, NULL);
    }
}

/* Few distinct pages, but each stands at many positions. */
static void a_million_positions_match(void **unused) {
    (void)unused;
    struct fixture_options options = plain(64, 1);
    options.pairs = 8;
    options.kv_heads = options.layers = 1;
    options.forms = FIXTURE_PACKED;
    options.query_size = 0.5F;
    struct fixture *fixture = fixture_open(&state, &options, 15700);
    fixture_add(fixture, &state, many(1000003, 20003), 1);
    check(fixture, NULL);
}

static void a_uniform_softmax_over_a_long_context_is_exact(void **unused) {
    (void)unused;
    for (uint32_t d = 64; d <= 128; d *= 2) {
        struct fixture_options options = plain(d, 4);
        options.kv_heads = options.layers = 1;
        options.forms = d == 64 ? FIXTURE_PACKED : FIXTURE_MIXED;
        options.query_size = 0.01F;
        options.distinct = 9;
        options.matrix = false;
        struct fixture *fixture = fixture_open(&state, &options, 1700);
        fixture_add(fixture, &state, many(102377, 5377), 1);
        check(fixture, NULL);
    }
}

/* Softmaxes that few tokens share, and K and V whose sizes lie far from one: bounds are relative to what comes out. */
static void sharp_softmaxes_match(void **unused) {
    (void)unused;
    static const float sizes[][2] = {{0.25F, 4}, {3, 1}, {30, 0.2F}, {3000, 0.001F}, {0.0001F, 20000}};
    for (size_t i = 0; i < 3 * sizeof(sizes) / sizeof(sizes[0]); i += many(1, 2)) {
        struct fixture_options options = plain(64U << i % 3, i % 2 == 0 ? 2 : 7);
        options.dtype = OSCAR_BF16;
        options.key_size = sizes[i / 3][0];
        options.query_size = sizes[i / 3][1];
        struct fixture *fixture = fixture_open(&state, &options, 16);
        fixture_add(fixture, &state, 300 + fixture_pick(&state, 500), 1 + fixture_pick(&state, 4));
        check(fixture, NULL);
    }
}

static void check_random_batch(bool small, bool with_limits) {
    struct fixture_options options = plain(64U << fixture_pick(&state, 3), 1 + fixture_pick(&state, 9));
    options.kv_heads = 1 + fixture_pick(&state, 5);
    options.layers = 1 + fixture_pick(&state, 3);
    options.pairs = (int)fixture_pick(&state, 18) - 1;
    options.forms = (enum fixture_forms)fixture_pick(&state, 3);
    options.key_size = 0.25F * (float)(1 + fixture_pick(&state, 8));
    struct fixture *fixture = fixture_open(&state, &options, 80);
    uint32_t items = 1 + fixture_pick(&state, FIXTURE_ITEMS);
    for (uint32_t i = 0; i < items; i++) {
        uint32_t rows = 1 + fixture_pick(&state, fixture_pick(&state, 2) == 0 ? 1 : OSCAR_MAX_DECODE_ROWS);
        uint32_t most = fixture_pick(&state, 4) == 0 ? (small ? 600 : 5000) : (small ? 150 : 400);
        fixture_add(fixture, &state, rows + fixture_pick(&state, most), rows);
    }
    const struct oscar_batch_limits limits = {.items = 4096, .rows = OSCAR_MAX_DECODE_ROWS, .pages = 100000};
    check(fixture, with_limits ? &limits : NULL);
}

static void random_batches_match(void **unused) {
    (void)unused;
    for (uint32_t trial = 0; trial < many(40, 10); trial++)
        check_random_batch(rig_small(), trial % 2 == 0);
}

/* A batch with rows of V that nearly cancel, for which weights in one FP16 term are too coarse. */
static void values_that_nearly_cancel_match(void **unused) {
    (void)unused;
    uint64_t drawn = state;
    state = UINT64_C(8811630344804151368);
    check_random_batch(true, false);
    state = drawn;
}

/* --- results as bits -------------------------------------------------------------------------------------------------------- */

static void results_repeat_bit_for_bit(void **unused) {
    (void)unused;
    struct fixture_options options = plain(128, 4);
    options.pairs = 8;
    options.forms = FIXTURE_MIXED;
    struct fixture *fixture = fixture_open(&state, &options, 700);
    fixture_add(fixture, &state, many(41234, 1234), 1);
    fixture_add(fixture, &state, 700, 5);
    struct scene *scene = scene_open(rig, fixture, NULL);
    scene_check_repeats(scene, rig->asynchronous, many(20, 3));
    scene_close(scene);
    fixture_close(fixture);
}

/* The fixture's items, each many times over in one batch: warps go from segment to segment. */
static void crowds_of_short_items_match(void **unused) {
    (void)unused;
    const uint32_t crowds[] = {many(30, 9), many(257, 20), many(2000, 40)};
    for (size_t trial = 0; trial < 2 * sizeof(crowds) / sizeof(crowds[0]); trial++) {
        struct fixture_options options = plain(64U << trial % 3, trial % 2 == 0 ? 3 : 8);
        options.pairs = (int)(trial * 3) - 1;
        struct fixture *fixture = fixture_open(&state, &options, 80);
        for (uint32_t i = 0; i < FIXTURE_ITEMS; i++)
            fixture_add(fixture, &state,
                        i == 0 ? 0 : 3 + fixture_pick(&state, i == 1 ? many(3000, 300) : many(300, 100)), 1 + i % 3);
        struct scene *scene = scene_open(rig, fixture, NULL);
        uint32_t crowd = crowds[trial / 2];
        struct oscar_batch_limits limits = {.items = crowd, .rows = 3, .pages = (uint64_t)crowd * 50};
        struct oscar_batch_impl *batch;
        assert_int_equal(rig->ops->batch_open(rig->device, &fixture->geometry, &limits, &batch, NULL), 0);
        struct oscar_batch_item *item = calloc(crowd, sizeof(*item));
        assert_non_null(item);
        uint16_t *out = rig_alloc(rig, crowd * scene->out_elements * sizeof(*out));
        float *lse = rig_alloc(rig, crowd * scene->lse_elements * sizeof(*lse));
        for (uint32_t i = 0; i < crowd; i++) {
            item[i] = scene->item[i % FIXTURE_ITEMS];
            item[i].out_offset += i * (int64_t)scene->out_elements;
            item[i].lse_offset += i * (int64_t)scene->lse_elements;
        }
        struct oscar_batch_attend_args args = scene->args;
        args.out = out;
        args.lse = lse;
        assert_int_equal(rig->ops->batch_update(rig->asynchronous, batch, scene->arenas, item, crowd), 0);
        assert_int_equal(rig->ops->batch_attend(rig->asynchronous, batch, &args), 0);
        assert_int_equal(rig_wait(rig, rig->asynchronous), 0);
        for (uint32_t i = 0; i < crowd; i++) {
            struct oscar_attend_item *to = &fixture->item[i % FIXTURE_ITEMS];
            rig_read(rig, to->out, out + item[i].out_offset, fixture_out_elements(fixture, to) * sizeof(*out));
            rig_read(rig, to->lse, lse + item[i].lse_offset,
                     (size_t)to->rows * fixture->geometry.query_heads * sizeof(*lse));
            double lse_error, error = fixture_error(fixture, i % FIXTURE_ITEMS, &lse_error);
            if (!(error <= BOUND) || !(lse_error <= 5 * BOUND))
                fail_msg("item %u of %u: error %.3g, of lse %.3g", i, crowd, error, lse_error);
        }
        rig->ops->batch_close(batch);
        rig_free(rig, out);
        rig_free(rig, lse);
        free(item);
        scene_close(scene);
        fixture_close(fixture);
    }
}

struct recorded {
    struct scene *scene;
};

static void record_attend(struct oscar_stream_impl *stream, void *argument) {
    struct recorded *recorded = argument;
    assert_int_equal(rig->ops->batch_attend(stream, recorded->scene->batch, &recorded->scene->args), 0);
}

/* One recording, whose batch becomes other items between its runs. */
static void a_recording_follows_its_batch(void **unused) {
    (void)unused;
    struct fixture_options options = plain(128, 4);
    options.pairs = 3;
    struct fixture *fixture = fixture_open(&state, &options, 80);
    for (uint32_t i = 0; i < FIXTURE_ITEMS; i++)
        fixture_add(fixture, &state, 1 + fixture_pick(&state, i % 2 == 0 ? many(5000, 500) : 300), 1);
    const struct oscar_batch_limits limits = {.items = 64, .rows = 1, .pages = 4096};
    struct recorded recorded = {scene_open(rig, fixture, &limits)};
    struct scene *scene = recorded.scene;
    struct graph *graph = graph_record(rig, record_attend, &recorded);
    for (uint32_t run = 0; run < many(12, 6); run++) {
        uint32_t items = fixture_pick(&state, FIXTURE_ITEMS + 1),
                 first = fixture_pick(&state, FIXTURE_ITEMS + 1 - items);
        rig_poison(rig, scene->out, scene->out_elements * sizeof(*scene->out));
        rig_poison(rig, scene->lse, scene->lse_elements * sizeof(*scene->lse));
        assert_int_equal(
            rig->ops->batch_update(graph_stream(graph), scene->batch, scene->arenas, scene->item + first, items), 0);
        graph_run(graph);
        assert_int_equal(rig_wait(rig, graph_stream(graph)), 0);
        for (uint32_t i = first; i < first + items; i++) {
            struct oscar_attend_item *to = &fixture->item[i];
            rig_read(rig, to->out, scene->out + scene->item[i].out_offset,
                     fixture_out_elements(fixture, to) * sizeof(*scene->out));
            rig_read(rig, to->lse, scene->lse + scene->item[i].lse_offset,
                     fixture->geometry.query_heads * sizeof(*scene->lse));
            double lse_error, error = fixture_error(fixture, i, &lse_error);
            if (!(error <= BOUND) || !(lse_error <= 5 * BOUND))
                fail_msg("run %u, item %u of %u: error %.3g, of lse %.3g", run, i, items, error, lse_error);
        }
    }
    graph_free(graph);
    scene_close(scene);
    fixture_close(fixture);
}

/* --- places ------------------------------------------------------------------------------------------------------------------- */

/* Page ids whose offsets need more than 32 bits; on the host, where all of it would be touched, fewer. */
static void pages_lie_beyond_four_gigabytes(void **unused) {
    (void)unused;
    struct fixture_options options = plain(128, 4);
    options.kv_heads = 8;
    options.layers = 4;
    options.forms = FIXTURE_MIXED;
    struct fixture *fixture = fixture_open(&state, &options, 16);
    fixture_add(fixture, &state, 900, 2);
    struct scene *scene = scene_open(rig, fixture, NULL);
    uint8_t *pools[OSCAR_FORMS];
    for (uint32_t form = 0; form < OSCAR_FORMS; form++) {
        const struct oscar_arena_view *from = &scene->arenas[form];
        uint64_t skipped = (rig_on_gpu() && !rig_small() ? UINT64_C(9) << 29 : UINT64_C(1) << 22) / from->stride;
        uint64_t bytes = fixture->used[form] * from->stride;
        pools[form] = rig_alloc(rig, skipped * from->stride + bytes);
        assert_int_equal(rig->ops->copy(rig->synchronous, pools[form] + skipped * from->stride, from->base, bytes), 0);
        oscar_page_ref *pages = (oscar_page_ref *)fixture->item[0].pages;
        for (uint32_t p = 0; p < 15; p++)
            if (oscar_page_ref_form(pages[p]) == form)
                pages[p] = oscar_page_ref_make((enum oscar_form)form, oscar_page_ref_id(pages[p]) + skipped);
        scene->arenas[form].base = pools[form];
    }
    scene_attend(scene, any_stream());
    struct oscar_arena_view host[OSCAR_FORMS];
    memcpy(host, fixture->args.arenas, sizeof(host));
    for (uint32_t form = 0; form < OSCAR_FORMS; form++) /* the oracle's pages stay where they are */
        fixture->args.arenas[form].base -= (rig_on_gpu() && !rig_small() ? UINT64_C(9) << 29 : UINT64_C(1) << 22) /
                                           scene->arenas[form].stride * host[form].stride;
    scene_check(scene, BOUND);
    for (uint32_t form = 0; form < OSCAR_FORMS; form++)
        rig_free(rig, pools[form]);
    scene_close(scene);
    fixture_close(fixture);
}

/* By addresses instead of a batch; one item wants no log-sum-exp. */
static void items_given_once_match(void **unused) {
    (void)unused;
    for (uint32_t trial = 0; trial < 6; trial++) {
        struct fixture_options options = plain(64U << trial % 3, 1 + fixture_pick(&state, 6));
        struct fixture *fixture = fixture_open(&state, &options, 80);
        for (uint32_t i = 0; i < 4; i++)
            fixture_add(fixture, &state, i == 2 ? 0 : 16 + fixture_pick(&state, 900), 1 + fixture_pick(&state, 3));
        struct scene *scene = scene_open(rig, fixture, NULL);
        struct oscar_attend_item item[4];
        for (uint32_t i = 0; i < 4; i++) {
            item[i] = fixture->item[i];
            item[i].q = (const uint16_t *)scene->args.q + scene->item[i].q_offset;
            item[i].out = scene->out + scene->item[i].out_offset;
            item[i].lse = i == 1 ? NULL : scene->lse + scene->item[i].lse_offset;
        }
        struct oscar_attend_args args = fixture->args;
        memcpy(args.arenas, scene->arenas, sizeof(args.arenas));
        args.item = item;
        struct oscar_stream_impl *stream = any_stream();
        assert_int_equal(rig->ops->attend(stream, &args), 0);
        assert_int_equal(rig_wait(rig, stream), 0);
        for (uint32_t i = 0; i < 4; i++) {
            struct oscar_attend_item *to = &fixture->item[i];
            size_t lses = (size_t)to->rows * fixture->geometry.query_heads;
            rig_read(rig, to->out, item[i].out, fixture_out_elements(fixture, to) * sizeof(uint16_t));
            rig_read(rig, to->lse, scene->lse + scene->item[i].lse_offset, lses * sizeof(float));
            if (i == 1) {
                for (size_t e = 0; e < lses; e++)
                    assert_true(isnan(to->lse[e]));
                to->lse = NULL;
            }
        }
        scene_check(scene, BOUND);
        scene_close(scene);
        fixture_close(fixture);
    }
}

/* --- merging ------------------------------------------------------------------------------------------------------------------ */

struct half_result {
    int64_t row_stride, head_stride;
    size_t elements;
    uint16_t *out;
    float *lse;
};

static struct half_result draw_result(uint32_t rows, uint32_t heads, uint32_t d, uint32_t dtype) {
    struct half_result half = {.head_stride = d + fixture_pick(&state, 9)};
    half.row_stride = half.head_stride * heads + fixture_pick(&state, 9);
    half.elements = (size_t)(half.row_stride * rows);
    half.out = malloc(half.elements * sizeof(*half.out));
    half.lse = malloc((size_t)rows * heads * sizeof(*half.lse));
    assert_true(half.out && half.lse);
    for (size_t i = 0; i < half.elements; i++) {
        float value = fixture_normal(&state);
        half.out[i] = dtype == OSCAR_BF16 ? oscar_bf16_from_float(value) : oscar_fp16_from_float(value);
    }
    for (size_t i = 0; i < (size_t)rows * heads; i++)
        half.lse[i] = fixture_pick(&state, 4) == 0 ? -INFINITY : 30 * fixture_normal(&state);
    /* Rows over no token may hold anything. */
    for (uint32_t row = 0; row < rows; row++)
        for (uint32_t head = 0; head < heads; head++)
            if (isinf(half.lse[(size_t)row * heads + head]))
                memset(half.out + row * half.row_stride + head * half.head_stride, 0xFF, d * sizeof(uint16_t));
    return half;
}

static double element(uint16_t bits, uint32_t dtype) {
    return dtype == OSCAR_BF16 ? oscar_bf16_to_float(bits) : oscar_fp16_to_float(bits);
}

static void check_merged(const struct half_result *a, const struct half_result *b, const uint16_t *out,
                         const float *lse, uint32_t rows, uint32_t heads, uint32_t d, uint32_t dtype) {
    double unit = dtype == OSCAR_BF16 ? 0x1p-8 : 0x1p-11;
    for (uint32_t row = 0; row < rows; row++)
        for (uint32_t head = 0; head < heads; head++) {
            size_t at = (size_t)row * heads + head;
            double most = a->lse[at] > b->lse[at] ? a->lse[at] : b->lse[at];
            double wa = isinf(most) ? 0 : exp(a->lse[at] - most), wb = isinf(most) ? 0 : exp(b->lse[at] - most);
            double expected_lse = isinf(most) ? -INFINITY : most + log(wa + wb);
            if (isinf(most))
                assert_true(isinf(lse[at]) && lse[at] < 0);
            else
                assert_true(fabs(lse[at] - expected_lse) <= 1e-5 * (1 + fabs(expected_lse)));
            for (uint32_t i = 0; i < d; i++) {
                size_t ia = (size_t)(row * a->row_stride + head * a->head_stride + i);
                size_t ib = (size_t)(row * b->row_stride + head * b->head_stride + i);
                double expected =
                    (wa > 0 ? wa * element(a->out[ia], dtype) : 0) + (wb > 0 ? wb * element(b->out[ib], dtype) : 0);
                expected = isinf(most) ? 0 : expected / (wa + wb);
                assert_true(fabs(element(out[ia], dtype) - expected) <= fabs(expected) * unit + 1e-4);
            }
        }
}

static void two_results_merge_into_one(void **unused) {
    (void)unused;
    for (uint32_t trial = 0; trial < 30; trial++) {
        uint32_t rows = 1 + fixture_pick(&state, 40), heads = 1 + fixture_pick(&state, 33);
        uint32_t d = 64U << trial % 3, dtype = trial % 2 == 0 ? OSCAR_BF16 : OSCAR_FP16;
        struct half_result a = draw_result(rows, heads, d, dtype), b = draw_result(rows, heads, d, dtype);
        size_t lse_bytes = (size_t)rows * heads * sizeof(float);
        uint16_t *out = rig_upload(rig, a.out, a.elements * sizeof(*out));
        uint16_t *other = rig_upload(rig, b.out, b.elements * sizeof(*other));
        float *lse = rig_upload(rig, a.lse, lse_bytes), *other_lse = rig_upload(rig, b.lse, lse_bytes);
        struct oscar_merge_args args = {.rows = rows,
                                        .heads = heads,
                                        .head_dim = d,
                                        .dtype = dtype,
                                        .out = out,
                                        .out_row_stride = a.row_stride,
                                        .out_head_stride = a.head_stride,
                                        .lse = lse,
                                        .other_out = other,
                                        .other_row_stride = b.row_stride,
                                        .other_head_stride = b.head_stride,
                                        .other_lse = other_lse};
        struct oscar_stream_impl *stream = any_stream();
        assert_int_equal(rig->ops->merge(stream, &args), 0);
        assert_int_equal(rig_wait(rig, stream), 0);
        uint16_t *merged = malloc(a.elements * sizeof(*merged));
        float *merged_lse = malloc(lse_bytes);
        assert_true(merged && merged_lse);
        rig_read(rig, merged, out, a.elements * sizeof(*merged));
        rig_read(rig, merged_lse, lse, lse_bytes);
        check_merged(&a, &b, merged, merged_lse, rows, heads, d, dtype);
        void *const host[] = {a.out, a.lse, b.out, b.lse, merged, merged_lse};
        for (size_t i = 0; i < sizeof(host) / sizeof(host[0]); i++)
            free(host[i]);
        rig_free(rig, out);
        rig_free(rig, other);
        rig_free(rig, lse);
        rig_free(rig, other_lse);
    }
}

int main(void) {
    rig = rig_open();
    state = fixture_seed();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_head_size_and_group_matches_the_oracle),
        cmocka_unit_test(lengths_around_a_page_match),
        cmocka_unit_test(a_short_sequence_leaves_most_warps_idle),
        cmocka_unit_test(rows_see_no_later_token),
        cmocka_unit_test(centres_turn_with_the_position),
        cmocka_unit_test(a_million_positions_match),
        cmocka_unit_test(a_uniform_softmax_over_a_long_context_is_exact),
        cmocka_unit_test(sharp_softmaxes_match),
        cmocka_unit_test(random_batches_match),
        cmocka_unit_test(values_that_nearly_cancel_match),
        cmocka_unit_test(results_repeat_bit_for_bit),
        cmocka_unit_test(crowds_of_short_items_match),
        cmocka_unit_test(a_recording_follows_its_batch),
        cmocka_unit_test(pages_lie_beyond_four_gigabytes),
        cmocka_unit_test(items_given_once_match),
        cmocka_unit_test(two_results_merge_into_one),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    rig_close(rig);
    return failed;
}
