/* SPDX-License-Identifier: Apache-2.0 */
/* Attention with many query rows against the float64 oracle, fresh random batches each time. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/attend_scene.h"

#define BOUND 1e-3 /* of a row's largest output, besides the rounding of the output type */

static uint64_t state;
static struct rig *rig;

/* Of a long context. */
static uint32_t tokens_of(uint32_t tokens) { return rig_small() ? tokens / 50 : tokens; }

/* Of tokens, rows or trials that are many. */
static uint32_t many(uint32_t count, uint32_t small) { return rig_small() ? small : count; }

static void check(struct fixture *fixture, const struct oscar_batch_limits *limits) {
    struct scene *scene = scene_open(rig, fixture, limits);
    scene_attend(scene, fixture_pick(&state, 2) == 0 ? rig->synchronous : rig->asynchronous);
    double error = scene_check(scene, BOUND);
    print_message("head size %u, group %u, pairs %d: error %.2g\n", fixture->options.head_dim, fixture->options.group,
                  fixture->options.pairs, error);
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
    static const uint32_t groups[] = {1, 2, 3, 4, 6, 8, 16};
    for (uint32_t d = 64; d <= 256; d *= 2)
        for (size_t g = 0; g < sizeof(groups) / sizeof(groups[0]); g++) {
            struct fixture_options options = plain(d, groups[g]);
            options.kv_heads = 1 + g % 3;
            options.layers = 3 - g % 3;
            struct fixture *fixture = fixture_open(&state, &options, 16);
            uint32_t rows = 17 + fixture_pick(&state, many(60, 10));
            fixture_add(fixture, &state, rows + fixture_pick(&state, many(400, 100)), rows);
            check(fixture, NULL);
        }
}

static void prompts_without_a_prefix_match_around_a_page(void **unused) {
    (void)unused;
    static const uint32_t tokens[] = {17, 63, 64, 65, 127, 129, 320};
    for (uint32_t d = 64; d <= 256; d *= 2) {
        struct fixture_options options = plain(d, 3);
        options.kv_heads = 1;
        struct fixture *fixture = fixture_open(&state, &options, 16);
        for (size_t i = 0; i < sizeof(tokens) / sizeof(tokens[0]); i++)
            fixture_add(fixture, &state, tokens[i], tokens[i]);
        check(fixture, NULL);
    }
}

/* Decode rows, prefill rows and items without a token in one batch, whose limits allow far more. */
static void decode_and_prefill_share_a_batch(void **unused) {
    (void)unused;
    const struct oscar_batch_limits limits = {.items = 300, .rows = 4096, .pages = 20000};
    for (uint32_t trial = 0; trial < many(6, 3); trial++) {
        struct fixture_options options = plain(64U << trial % 3, 1 + fixture_pick(&state, 8));
        options.pairs = (int)fixture_pick(&state, 18) - 1;
        options.forms = (enum fixture_forms)fixture_pick(&state, 3);
        struct fixture *fixture = fixture_open(&state, &options, 32);
        fixture_add(fixture, &state, 1 + fixture_pick(&state, 500), 1);
        fixture_add(fixture, &state, 64 * 3, 17);
        fixture_add(fixture, &state, 0, 1 + fixture_pick(&state, 100));
        fixture_add(fixture, &state, 16 + fixture_pick(&state, 300), 16);
        fixture_add(fixture, &state, 300 + fixture_pick(&state, 300), 17 + fixture_pick(&state, many(200, 40)));
        fixture_add(fixture, &state, 64 * 4 + 1, 65);
        check(fixture, trial % 2 == 0 ? &limits : NULL);
    }
}

static void centres_turn_with_the_position(void **unused) {
    (void)unused;
    static const int pairs[] = {0, 1, 4, 7, 8, 9, 16};
    for (size_t i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++) {
        struct fixture_options options = plain(64U << i % 3, 1 + fixture_pick(&state, 5));
        options.pairs = pairs[i];
        options.forms = FIXTURE_MIXED;
        struct fixture *fixture = fixture_open(&state, &options, 64);
        uint32_t rows = 17 + fixture_pick(&state, 40);
        fixture_add(fixture, &state, many(1000, 100) + fixture_pick(&state, many(2500, 400)), rows);
        check(fixture, NULL);
    }
}

static void a_prefix_of_thousands_of_packed_tokens_matches(void **unused) {
    (void)unused;
    struct fixture_options options = plain(128, 4);
    options.kv_heads = options.layers = 1;
    options.pairs = 8;
    options.forms = FIXTURE_MIXED;
    options.distinct = 12;
    struct fixture *fixture = fixture_open(&state, &options, 160);
    fixture_add(fixture, &state, 100 + tokens_of(7000 + fixture_pick(&state, 3000)), 100);
    fixture_add(fixture, &state, many(2000, 200) + fixture_pick(&state, 1000), 17);
    check(fixture, NULL);
}

/* Few distinct pages, but each stands at many positions. The oracle, which takes its time, answers for the last row only. */
static void a_million_positions_match(void **unused) {
    (void)unused;
    const uint32_t rows = 17;
    struct fixture_options options = plain(64, 1);
    options.pairs = 8;
    options.kv_heads = options.layers = 1;
    options.forms = FIXTURE_PACKED;
    options.query_size = 0.5F;
    struct fixture *fixture = fixture_open(&state, &options, 15700);
    fixture_add(fixture, &state, tokens_of(1000003), rows);
    struct scene *scene = scene_open(rig, fixture, NULL);
    scene_attend(scene, rig->synchronous);
    struct oscar_attend_item *item = &fixture->item[0];
    item->rows = 1;
    item->q = (const uint16_t *)item->q + (rows - 1) * item->q_row_stride;
    item->out = (uint16_t *)item->out + (rows - 1) * item->out_row_stride;
    item->lse += (size_t)(rows - 1) * fixture->geometry.query_heads;
    print_message("error %.2g\n", scene_check(scene, BOUND));
    scene_close(scene);
    fixture_close(fixture);
}

static void a_uniform_softmax_over_a_long_context_is_exact(void **unused) {
    (void)unused;
    struct fixture_options options = plain(128, 1);
    options.kv_heads = options.layers = 1;
    options.forms = FIXTURE_PACKED;
    options.query_size = 0.01F;
    options.distinct = 9;
    struct fixture *fixture = fixture_open(&state, &options, 1700);
    fixture_add(fixture, &state, tokens_of(102377), 17);
    check(fixture, NULL);
}

/* Softmaxes that few tokens share, and K and V whose sizes lie far from one: bounds are relative to what comes out. */
static void sharp_softmaxes_match(void **unused) {
    (void)unused;
    static const float sizes[][2] = {{0.25F, 4}, {3, 1}, {30, 0.2F}, {3000, 0.001F}, {0.0001F, 20000}};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct fixture_options options = plain(64U << i % 3, 2);
        options.dtype = OSCAR_BF16;
        options.key_size = sizes[i][0];
        options.query_size = sizes[i][1];
        struct fixture *fixture = fixture_open(&state, &options, 16);
        fixture_add(fixture, &state, 300 + fixture_pick(&state, many(500, 100)),
                    17 + fixture_pick(&state, many(100, 20)));
        check(fixture, NULL);
    }
}

static void random_batches_match(void **unused) {
    (void)unused;
    for (uint32_t trial = 0; trial < many(20, 4); trial++) {
        struct fixture_options options = plain(64U << fixture_pick(&state, 3), 1 + fixture_pick(&state, 9));
        options.kv_heads = 1 + fixture_pick(&state, 3);
        options.layers = 1 + fixture_pick(&state, 3);
        options.pairs = (int)fixture_pick(&state, 18) - 1;
        options.forms = (enum fixture_forms)fixture_pick(&state, 3);
        options.key_size = 0.25F * (float)(1 + fixture_pick(&state, 8));
        struct fixture *fixture = fixture_open(&state, &options, 32);
        uint32_t items = 1 + fixture_pick(&state, 3);
        for (uint32_t i = 0; i < items; i++) {
            uint32_t rows = 17 + fixture_pick(&state, many(150, 60));
            fixture_add(fixture, &state, rows + fixture_pick(&state, many(600, 200)), rows);
        }
        check(fixture, NULL);
    }
}

static void results_repeat_bit_for_bit(void **unused) {
    (void)unused;
    struct fixture_options options = plain(128, 4);
    options.pairs = 8;
    options.forms = FIXTURE_MIXED;
    struct fixture *fixture = fixture_open(&state, &options, 64);
    fixture_add(fixture, &state, many(3000, 400), many(300, 80));
    fixture_add(fixture, &state, 700, 40);
    struct scene *scene = scene_open(rig, fixture, NULL);
    scene_check_repeats(scene, rig->asynchronous, many(3, 2));
    scene_close(scene);
    fixture_close(fixture);
}

/* The largest finite queries and rows: whatever the softmax makes of them, it is a number. */
static void finite_inputs_never_give_nan(void **unused) {
    (void)unused;
    struct fixture_options options = plain(128, 4);
    options.dtype = OSCAR_BF16;
    options.key_size = 8000;
    options.query_size = 3e37F;
    options.pairs = 4;
    struct fixture *fixture = fixture_open(&state, &options, 16);
    fixture_add(fixture, &state, 500, 30);
    struct scene *scene = scene_open(rig, fixture, NULL);
    scene_attend(scene, rig->synchronous);
    for (uint32_t row = 0; row < 30; row++)
        for (uint32_t head = 0; head < fixture->geometry.query_heads; head++)
            for (uint32_t i = 0; i < 128; i++)
                assert_true(isfinite(fixture_out(fixture, &fixture->item[0], row, head, i)));
    scene_close(scene);
    fixture_close(fixture);
}

int main(void) {
    rig = rig_open();
    state = fixture_seed();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_head_size_and_group_matches_the_oracle),
        cmocka_unit_test(prompts_without_a_prefix_match_around_a_page),
        cmocka_unit_test(decode_and_prefill_share_a_batch),
        cmocka_unit_test(centres_turn_with_the_position),
        cmocka_unit_test(a_prefix_of_thousands_of_packed_tokens_matches),
        cmocka_unit_test(a_million_positions_match),
        cmocka_unit_test(a_uniform_softmax_over_a_long_context_is_exact),
        cmocka_unit_test(sharp_softmaxes_match),
        cmocka_unit_test(random_batches_match),
        cmocka_unit_test(results_repeat_bit_for_bit),
        cmocka_unit_test(finite_inputs_never_give_nan),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    rig_close(rig);
    return failed;
}
