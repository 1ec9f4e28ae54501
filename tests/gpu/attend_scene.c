/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/attend_scene.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/reference.h"

#define PAGE_ALIGNMENT 256U
#define POISON 0xFFFFU  /* what rig_alloc leaves in every element: a NaN */
#define ORACLE_ROWS 16U /* that one thread asks for at a time */

static void *own(struct scene *scene, void *memory) {
    assert_true(scene->owned_count < sizeof(scene->owned) / sizeof(scene->owned[0]));
    scene->owned[scene->owned_count++] = memory;
    return memory;
}

/* An arena of the fixture, its pages where device pages may begin and apart from each other. */
static void copy_arena(struct scene *scene, uint32_t form) {
    const struct fixture *fixture = scene->fixture;
    uint64_t pages = fixture->used[form], bytes = fixture->page_bytes[form];
    uint64_t stride = (bytes + PAGE_ALIGNMENT) / PAGE_ALIGNMENT * PAGE_ALIGNMENT;
    uint8_t *memory = own(scene, rig_alloc(scene->rig, pages * stride));
    for (uint64_t p = 0; p < pages; p++)
        rig_write(scene->rig, memory + p * stride, fixture->arena[form] + p * fixture->args.arenas[form].stride, bytes);
    scene->arenas[form] = (struct oscar_arena_view){.base = memory, .stride = stride};
}

/* Items follow each other in one tensor, a few elements apart. */
static void place_items(struct scene *scene) {
    const struct fixture *fixture = scene->fixture;
    for (uint32_t i = 0; i < fixture->args.items; i++) {
        const struct oscar_attend_item *from = &fixture->item[i];
        scene->item[i] = (struct oscar_batch_item){.pages = from->pages,
                                                   .tokens = from->tokens,
                                                   .rows = from->rows,
                                                   .q_offset = (int64_t)scene->q_elements,
                                                   .q_row_stride = from->q_row_stride,
                                                   .q_head_stride = from->q_head_stride,
                                                   .out_offset = (int64_t)scene->out_elements,
                                                   .out_row_stride = from->out_row_stride,
                                                   .out_head_stride = from->out_head_stride,
                                                   .lse_offset = (int64_t)scene->lse_elements};
        scene->q_elements += (size_t)(from->rows * from->q_row_stride) + i % 4 * 8;
        scene->out_elements += fixture_out_elements(fixture, from) + 2 * i + i % 2;
        scene->lse_elements += (size_t)from->rows * fixture->geometry.query_heads + i;
    }
}

static void copy_tensors(struct scene *scene) {
    uint16_t *q = own(scene, rig_alloc(scene->rig, scene->q_elements * sizeof(*q)));
    scene->out = own(scene, rig_alloc(scene->rig, scene->out_elements * sizeof(*scene->out)));
    scene->lse = own(scene, rig_alloc(scene->rig, scene->lse_elements * sizeof(*scene->lse)));
    for (uint32_t i = 0; i < scene->fixture->args.items; i++) {
        const struct oscar_attend_item *from = &scene->fixture->item[i];
        rig_write(scene->rig, q + scene->item[i].q_offset, from->q,
                  (size_t)(from->rows * from->q_row_stride) * sizeof(*q));
    }
    scene->args = (struct oscar_batch_attend_args){.calibration = &scene->fixture->calibration,
                                                   .layer = scene->fixture->args.layer,
                                                   .softmax_scale = scene->fixture->args.softmax_scale,
                                                   .q = q,
                                                   .out = scene->out,
                                                   .lse = scene->lse};
}

struct scene *scene_open(struct rig *rig, struct fixture *fixture, const struct oscar_batch_limits *limits) {
    struct scene *scene = calloc(1, sizeof(*scene));
    assert_non_null(scene);
    scene->rig = rig;
    scene->fixture = fixture;
    for (uint32_t form = 0; form < OSCAR_FORMS; form++)
        copy_arena(scene, form);
    place_items(scene);
    copy_tensors(scene);
    struct oscar_batch_limits needed = {.items = fixture->args.items};
    for (uint32_t i = 0; i < fixture->args.items; i++) {
        needed.rows = fixture->item[i].rows > needed.rows ? fixture->item[i].rows : needed.rows;
        needed.pages += (fixture->item[i].tokens + OSCAR_PAGE_TOKENS - 1) / OSCAR_PAGE_TOKENS;
    }
    struct oscar_cause cause = {""};
    rig_calibration_load(rig, &fixture->geometry, &fixture->calibration);
    if (rig->ops->batch_open(rig->device, &fixture->geometry, limits ? limits : &needed, &scene->batch, &cause) < 0)
        fail_msg("%s", cause.text);
    return scene;
}

void scene_close(struct scene *scene) {
    scene->rig->ops->batch_close(scene->batch);
    scene->rig->ops->calibration_unload(scene->rig->device, &scene->fixture->calibration);
    for (uint32_t i = 0; i < scene->owned_count; i++)
        rig_free(scene->rig, scene->owned[i]);
    free(scene);
}

void scene_attend(struct scene *scene, struct oscar_stream_impl *stream) {
    struct rig *rig = scene->rig;
    struct fixture *fixture = scene->fixture;
    rig_poison(rig, scene->out, scene->out_elements * sizeof(*scene->out));
    rig_poison(rig, scene->lse, scene->lse_elements * sizeof(*scene->lse));
    assert_int_equal(rig->ops->batch_update(stream, scene->batch, scene->arenas, scene->item, fixture->args.items), 0);
    assert_int_equal(rig->ops->batch_attend(stream, scene->batch, &scene->args), 0);
    assert_int_equal(rig_wait(rig, stream), 0);
    for (uint32_t i = 0; i < fixture->args.items; i++) {
        struct oscar_attend_item *item = &fixture->item[i];
        rig_read(rig, item->out, scene->out + scene->item[i].out_offset,
                 fixture_out_elements(fixture, item) * sizeof(*scene->out));
        rig_read(rig, item->lse, scene->lse + scene->item[i].lse_offset,
                 (size_t)item->rows * fixture->geometry.query_heads * sizeof(*scene->lse));
    }
}

static void check_gaps(const struct scene *scene) {
    const struct fixture *fixture = scene->fixture;
    for (uint32_t i = 0; i < fixture->args.items; i++) {
        const struct oscar_attend_item *item = &fixture->item[i];
        for (uint32_t row = 0; row < item->rows; row++)
            for (int64_t e = 0; e < item->out_row_stride; e++)
                if (e / item->out_head_stride >= fixture->geometry.query_heads ||
                    e % item->out_head_stride >= fixture->options.head_dim)
                    assert_int_equal(((const uint16_t *)item->out)[row * item->out_row_stride + e], POISON);
    }
}

/* --- the oracle, by all processors --- */

struct oracle_work {
    struct fixture *fixture;
    uint32_t before[FIXTURE_ITEMS + 1]; /* slices of the items before */
    atomic_int result;
};

/* Some rows of an item are an item of fewer tokens. */
static int ask_for_slice(struct fixture *fixture, uint32_t i, uint32_t slice) {
    const struct oscar_attend_item *item = &fixture->item[i];
    uint32_t first = slice * ORACLE_ROWS, heads = fixture->geometry.query_heads;
    uint32_t rows = item->rows - first < ORACLE_ROWS ? item->rows - first : ORACLE_ROWS;
    struct oscar_attend_item part = *item;
    part.q = (const uint16_t *)item->q + first * item->q_row_stride;
    part.rows = rows;
    part.tokens = item->tokens == 0 ? 0 : item->tokens - (item->rows - first - rows);
    size_t at = (size_t)first * heads;
    return oscar_reference_attend(&fixture->args, &part, fixture->expected[i] + at * fixture->options.head_dim,
                                  fixture->expected_lse[i] + at);
}

static void ask(void *argument, uint32_t slice, uint32_t worker) {
    struct oracle_work *work = argument;
    (void)worker;
    uint32_t i = 0;
    while (work->before[i + 1] <= slice)
        i++;
    int r = ask_for_slice(work->fixture, i, slice - work->before[i]);
    if (r < 0)
        atomic_store(&work->result, r);
}

static double *own_results(struct fixture *fixture, size_t count) {
    assert_true(fixture->owned_count < sizeof(fixture->owned) / sizeof(fixture->owned[0]));
    double *results = calloc(count, sizeof(*results));
    assert_non_null(results);
    fixture->owned[fixture->owned_count++] = results;
    return results;
}

/* Gives the fixture what it would ask for item by item. */
static void ask_oracle(struct scene *scene) {
    struct fixture *fixture = scene->fixture;
    struct oracle_work work = {.fixture = fixture};
    for (uint32_t i = 0; i < FIXTURE_ITEMS; i++) {
        work.before[i + 1] = work.before[i];
        if (i >= fixture->args.items || fixture->expected[i])
            continue;
        size_t results = (size_t)fixture->item[i].rows * fixture->geometry.query_heads;
        fixture->expected[i] = own_results(fixture, results * fixture->options.head_dim);
        fixture->expected_lse[i] = own_results(fixture, results);
        work.before[i + 1] += (fixture->item[i].rows + ORACLE_ROWS - 1) / ORACLE_ROWS;
    }
    host_pool_run(rig_pool(scene->rig), work.before[FIXTURE_ITEMS], ask, &work);
    assert_int_equal(work.result, 0);
}

double scene_check(struct scene *scene, double bound) {
    struct fixture *fixture = scene->fixture;
    ask_oracle(scene);
    double worst = 0;
    for (uint32_t i = 0; i < fixture->args.items; i++) {
        const struct oscar_attend_item *item = &fixture->item[i];
        double lse_error, error = fixture_error(fixture, i, &lse_error);
        if (!(error <= bound) || !(lse_error <= 5 * bound))
            fail_msg(
                "error %.3g, of lse %.3g: head size %u, group %u, KV heads %u, pairs %d, matrix %d, forms %d, item "
                "%u of %u tokens and %u rows, type %u",
                error, lse_error, fixture->options.head_dim, fixture->options.group, fixture->options.kv_heads,
                fixture->options.pairs, fixture->options.matrix, (int)fixture->options.forms, i, item->tokens,
                item->rows, fixture->options.dtype);
        worst = error > worst ? error : worst;
    }
    check_gaps(scene);
    return worst;
}

void scene_check_repeats(struct scene *scene, struct oscar_stream_impl *stream, uint32_t times) {
    const struct fixture *fixture = scene->fixture;
    uint16_t *first[FIXTURE_ITEMS];
    size_t bytes[FIXTURE_ITEMS];
    scene_attend(scene, stream);
    for (uint32_t i = 0; i < fixture->args.items; i++) {
        bytes[i] = fixture_out_elements(fixture, &fixture->item[i]) * sizeof(uint16_t);
        first[i] = malloc(bytes[i]);
        assert_non_null(first[i]);
        memcpy(first[i], fixture->item[i].out, bytes[i]);
    }
    for (uint32_t again = 0; again < times; again++) {
        scene_attend(scene, stream);
        for (uint32_t i = 0; i < fixture->args.items; i++)
            assert_memory_equal(first[i], fixture->item[i].out, bytes[i]);
    }
    for (uint32_t i = 0; i < fixture->args.items; i++)
        free(first[i]);
}
