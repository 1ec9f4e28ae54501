/* SPDX-License-Identifier: Apache-2.0 */
/* Attention on the host against the float64 oracle, every level that this CPU runs, fresh random batches each time. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "attend_fixture.h"
#include "kernels/number.h"
#include "kernels/rotate.h"

/* Relative to a row's largest output; the contract allows 1e-3. What is left is the 16-bit query: 3e-5 of a logit, which is as large
 * as the keys are: none is larger than twice those that the bound is for. */
#define BOUND 5e-4

static uint64_t state;
static struct host_pool *pool;

static void check_levels(struct fixture *fixture) {
    for (int level = HOST_PORTABLE; level < HOST_LEVELS; level++)
        if (host_level_supported((enum host_level)level))
            fixture_check(fixture, pool, (enum host_level)level, BOUND * fmax(1, (double)fixture->options.key_size));
}

static struct fixture_options plain(uint32_t head_dim, uint32_t group) {
    return (struct fixture_options){.head_dim = head_dim,
                                    .group = group,
                                    .kv_heads = 2,
                                    .layers = 2,
                                    .dtype = OSCAR_FP16,
                                    .pairs = -1,
                                    .forms = FIXTURE_RANDOM,
                                    .distinct = 3,
                                    .key_size = 1,
                                    .query_size = 1};
}

static void every_head_size_and_group_matches_the_oracle(void **unused) {
    (void)unused;
    static const uint32_t sizes[] = {64, 128, 256}, groups[] = {1, 2, 3, 4, 5, 7, 8, 16};
    for (size_t s = 0; s < 3; s++)
        for (size_t g = 0; g < sizeof(groups) / sizeof(groups[0]); g++) {
            struct fixture_options options = plain(sizes[s], groups[g]);
            options.dtype = g % 2 == 0 ? OSCAR_BF16 : OSCAR_FP16;
            struct fixture *fixture = fixture_open(&state, &options, 16);
            fixture_add(fixture, &state, 64 * 5 + 1 + fixture_pick(&state, 300), 1);
            fixture_add(fixture, &state, 64 * 5, 1 + fixture_pick(&state, 3));
            check_levels(fixture);
            fixture_close(fixture);
        }
}

static void the_largest_group_matches_the_oracle(void **unused) {
    (void)unused;
    struct fixture_options options = plain(64, 64);
    options.kv_heads = 1;
    struct fixture *fixture = fixture_open(&state, &options, 8);
    fixture_add(fixture, &state, 333, 2);
    check_levels(fixture);
    fixture_close(fixture);
}

static void a_ragged_batch_with_lengths_around_a_page_matches(void **unused) {
    (void)unused;
    static const enum fixture_forms forms[] = {FIXTURE_MIXED, FIXTURE_PACKED};
    for (size_t f = 0; f < 2; f++) {
        struct fixture_options options = plain(f == 0 ? 128 : 64, f == 0 ? 4 : 3);
        options.forms = forms[f];
        struct fixture *fixture = fixture_open(&state, &options, 16);
        static const uint32_t tokens[] = {0, 1, 63, 64, 65, 127, 129, 700};
        for (size_t i = 0; i < 8; i++)
            fixture_add(fixture, &state, tokens[i], 1);
        check_levels(fixture);
        fixture_close(fixture);
    }
}

static void speculative_rows_are_causal(void **unused) {
    (void)unused;
    for (uint32_t rows = 1; rows <= 16; rows += 3) {
        struct fixture_options options = plain(rows % 2 == 0 ? 64 : 128, 1 + fixture_pick(&state, 5));
        struct fixture *fixture = fixture_open(&state, &options, 16);
        fixture_add(fixture, &state, rows, rows);
        fixture_add(fixture, &state, 64 + rows / 2, rows);
        fixture_add(fixture, &state, 300 + fixture_pick(&state, 100), rows);
        check_levels(fixture);
        fixture_close(fixture);
    }
}

static void prefill_is_causal_over_packed_and_dense_pages(void **unused) {
    (void)unused;
    for (uint32_t d = 64; d <= 256; d *= 2) {
        struct fixture_options options = plain(d, d == 64 ? 3 : 2);
        options.kv_heads = 1;
        options.pairs = 8;
        struct fixture *fixture = fixture_open(&state, &options, 16);
        fixture_add(fixture, &state, 130, 130);
        fixture_add(fixture, &state, 411, 130);
        check_levels(fixture);
        fixture_close(fixture);
    }
}

static void centres_turn_with_the_position(void **unused) {
    (void)unused;
    static const int pairs[] = {0, 1, 5, 8, 16};
    for (size_t i = 0; i < 5; i++) {
        struct fixture_options options = plain(i % 3 == 0 ? 64 : i % 3 == 1 ? 128 : 256, 1 + (uint32_t)i);
        options.pairs = pairs[i];
        options.matrix = i % 2 == 0;
        options.forms = FIXTURE_MIXED;
        options.kv_heads = 1;
        struct fixture *fixture = fixture_open(&state, &options, 80);
        fixture_add(fixture, &state, 2000 + fixture_pick(&state, 3000), 1);
        fixture_add(fixture, &state, 1000, 2);
        check_levels(fixture);
        fixture_close(fixture);
    }
}

/* Few distinct pages, but each stands at many positions. */
static void a_million_positions_match(void **unused) {
    (void)unused;
    struct fixture_options options = plain(64, 2);
    options.pairs = 16;
    options.kv_heads = options.layers = 1;
    options.forms = FIXTURE_PACKED;
    struct fixture *fixture = fixture_open(&state, &options, 15700);
    fixture_add(fixture, &state, 1000003, 1);
    check_levels(fixture);
    fixture_close(fixture);
}

static void a_uniform_softmax_over_a_long_context_is_exact(void **unused) {
    (void)unused;
    for (uint32_t d = 64; d <= 128; d *= 2) {
        struct fixture_options options = plain(d, 3);
        options.kv_heads = options.layers = 1;
        options.forms = d == 64 ? FIXTURE_MIXED : FIXTURE_PACKED;
        options.query_size = d == 64 ? 0 : 0.01F;
        options.distinct = 9;
        struct fixture *fixture = fixture_open(&state, &options, 1700);
        fixture_add(fixture, &state, 102377, 1);
        check_levels(fixture);
        fixture_close(fixture);
    }
}

/* Token 0's key is the direction of the first head's query, long enough that its logit stands `above` all others. */
static void raise_sink(struct fixture *fixture, float above) {
    uint32_t d = fixture->options.head_dim;
    float q[256] = {0}, norm = 0;
    const uint16_t *source = fixture->item[0].q;
    for (uint32_t i = 0; i < d; i++)
        q[i] = oscar_fp16_to_float(source[i]);
    oscar_rotate(HOST_PORTABLE, NULL, d, false, 1, q, d, q, d);
    for (uint32_t i = 0; i < d; i++)
        norm += q[i] * q[i];
    uint64_t offset = oscar_page_ref_id(fixture->item[0].pages[0]) * fixture->args.arenas[OSCAR_FORM_SINK].stride;
    uint16_t *key = (uint16_t *)(void *)(fixture->arena[OSCAR_FORM_SINK] + offset);
    for (uint32_t i = 0; i < d; i++)
        key[i] = oscar_bf16_from_float(q[i] * above * sqrtf((float)d) / norm);
}

static void an_attention_sink_leaves_the_rest_exact(void **unused) {
    (void)unused;
    static const float above[] = {6, 12, 30};
    for (size_t a = 0; a < 3; a++) {
        struct fixture_options options = plain(128, 4);
        options.kv_heads = options.layers = 1;
        options.forms = FIXTURE_MIXED;
        options.key_size = 0.3F;
        struct fixture *fixture = fixture_open(&state, &options, 64);
        fixture_add(fixture, &state, 3000, 1);
        raise_sink(fixture, above[a]);
        check_levels(fixture);
        fixture_close(fixture);
    }
}

/* The 16-bit weights of a page must not lose its small ones beside a token that takes most of it. The same scenes each time: the
 * error of the query grows with the token's logit, and in one of some hundred scenes it is more than the bound by itself. */
static void a_token_that_dominates_a_packed_page_leaves_the_rest_exact(void **unused) {
    (void)unused;
    uint64_t scenes = 1;
    for (uint32_t doublings = 1; doublings <= 4; doublings++) {
        struct fixture_options options = plain(64, 7);
        options.kv_heads = options.layers = 1;
        options.forms = FIXTURE_PACKED;
        options.pairs = 0;
        struct fixture *fixture = fixture_open(&scenes, &options, 64);
        fixture_add(fixture, &scenes, 900, 1);
        uint64_t offset = oscar_page_ref_id(fixture->item[0].pages[3]) * fixture->args.arenas[OSCAR_FORM_PACKED].stride;
        uint8_t *scales = fixture->arena[OSCAR_FORM_PACKED] + offset + oscar_packed_scales_offset(64);
        uint16_t *scale_k = (uint16_t *)(void *)(scales + oscar_packed_scale_offset(17));
        *scale_k = (uint16_t)(*scale_k + doublings * 1024U);
        check_levels(fixture);
        fixture_close(fixture);
    }
}

static void random_batches_match(void **unused) {
    (void)unused;
    static const uint32_t sizes[] = {64, 128, 256};
    for (uint32_t trial = 0; trial < 24; trial++) {
        struct fixture_options options = plain(sizes[fixture_pick(&state, 3)], 1 + fixture_pick(&state, 9));
        options.kv_heads = 1 + fixture_pick(&state, 3);
        options.layers = 1 + fixture_pick(&state, 3);
        options.dtype = fixture_pick(&state, 2) == 0 ? OSCAR_BF16 : OSCAR_FP16;
        options.pairs = (int)fixture_pick(&state, 18) - 1;
        options.matrix = fixture_pick(&state, 2) == 0;
        options.forms = (enum fixture_forms)fixture_pick(&state, 3);
        options.key_size = 0.25F * (float)(1 + fixture_pick(&state, 8));
        struct fixture *fixture = fixture_open(&state, &options, 32);
        uint32_t items = 1 + fixture_pick(&state, 3);
        for (uint32_t i = 0; i < items; i++) {
            uint32_t rows = 1 + fixture_pick(&state, fixture_pick(&state, 2) == 0 ? 1 : 9);
            fixture_add(fixture, &state, rows + fixture_pick(&state, 600), rows);
        }
        check_levels(fixture);
        fixture_close(fixture);
    }
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
    fixture_add(fixture, &state, 500, 3);
    for (int level = HOST_PORTABLE; level < HOST_LEVELS; level++) {
        if (!host_level_supported((enum host_level)level))
            continue;
        fixture_poison_outputs(fixture);
        assert_int_equal(host_attend(pool, (enum host_level)level, &fixture->args), 0);
        for (uint32_t row = 0; row < 3; row++)
            for (uint32_t head = 0; head < fixture->geometry.query_heads; head++)
                for (uint32_t i = 0; i < 128; i++)
                    assert_true(isfinite(fixture_out(fixture, &fixture->item[0], row, head, i)));
    }
    fixture_close(fixture);
}

int main(void) {
    state = fixture_seed();
    if (host_pool_open(2, &pool, NULL) < 0)
        return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_head_size_and_group_matches_the_oracle),
        cmocka_unit_test(the_largest_group_matches_the_oracle),
        cmocka_unit_test(a_ragged_batch_with_lengths_around_a_page_matches),
        cmocka_unit_test(speculative_rows_are_causal),
        cmocka_unit_test(prefill_is_causal_over_packed_and_dense_pages),
        cmocka_unit_test(centres_turn_with_the_position),
        cmocka_unit_test(a_million_positions_match),
        cmocka_unit_test(a_uniform_softmax_over_a_long_context_is_exact),
        cmocka_unit_test(an_attention_sink_leaves_the_rest_exact),
        cmocka_unit_test(a_token_that_dominates_a_packed_page_leaves_the_rest_exact),
        cmocka_unit_test(random_batches_match),
        cmocka_unit_test(finite_inputs_never_give_nan),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    host_pool_close(pool);
    return failed;
}
