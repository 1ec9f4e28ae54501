/* SPDX-License-Identifier: Apache-2.0 */
/* What must hold of attention on the host whatever the values: same bits again, for any number of threads, and outputs that
 * merge by their log-sum-exp. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attend_fixture.h"

static uint64_t state;

struct outputs {
    void *out[FIXTURE_ITEMS];
    float *lse[FIXTURE_ITEMS];
};

static struct outputs run(struct fixture *fixture, uint32_t threads, enum host_level level) {
    struct host_pool *pool = NULL;
    struct outputs outputs = {0};
    assert_int_equal(host_pool_open(threads, &pool, NULL), 0);
    fixture_poison_outputs(fixture);
    assert_int_equal(host_attend(pool, level, &fixture->args), 0);
    host_pool_close(pool);
    for (uint32_t i = 0; i < fixture->args.items; i++) {
        const struct oscar_attend_item *item = &fixture->item[i];
        size_t bytes = fixture_out_elements(fixture, item) * sizeof(uint16_t);
        size_t lse_bytes = sizeof(float) * item->rows * fixture->geometry.query_heads;
        outputs.out[i] = malloc(bytes);
        outputs.lse[i] = malloc(lse_bytes);
        assert_non_null(outputs.out[i]);
        assert_non_null(outputs.lse[i]);
        memcpy(outputs.out[i], item->out, bytes);
        memcpy(outputs.lse[i], item->lse, lse_bytes);
    }
    return outputs;
}

static void free_outputs(struct outputs *outputs) {
    for (uint32_t i = 0; i < FIXTURE_ITEMS; i++) {
        free(outputs->out[i]);
        free(outputs->lse[i]);
    }
}

static void assert_same(const struct fixture *fixture, const struct outputs *a, const struct outputs *b) {
    for (uint32_t i = 0; i < fixture->args.items; i++) {
        const struct oscar_attend_item *item = &fixture->item[i];
        assert_memory_equal(a->out[i], b->out[i], fixture_out_elements(fixture, item) * sizeof(uint16_t));
        assert_memory_equal(a->lse[i], b->lse[i], sizeof(float) * item->rows * fixture->geometry.query_heads);
    }
}

static struct fixture_options options_of(uint32_t head_dim, uint32_t group) {
    return (struct fixture_options){.head_dim = head_dim,
                                    .group = group,
                                    .kv_heads = 2,
                                    .layers = 1,
                                    .dtype = OSCAR_FP16,
                                    .pairs = 4,
                                    .forms = FIXTURE_MIXED,
                                    .distinct = 4,
                                    .key_size = 1,
                                    .query_size = 1};
}

static void the_number_of_threads_does_not_change_a_bit(void **unused) {
    (void)unused;
    for (uint32_t d = 64; d <= 256; d *= 2) {
        struct fixture_options options = options_of(d, 3);
        struct fixture *fixture = fixture_open(&state, &options, 128);
        fixture_add(fixture, &state, 7001, 1);
        fixture_add(fixture, &state, 700, 40);
        fixture_add(fixture, &state, 33, 1);
        for (int level = HOST_PORTABLE; level < HOST_LEVELS; level++) {
            if (!host_level_supported((enum host_level)level))
                continue;
            struct outputs one = run(fixture, 1, (enum host_level)level);
            static const uint32_t threads[] = {1, 2, 3, 8};
            for (size_t t = 0; t < 4; t++) {
                struct outputs other = run(fixture, threads[t], (enum host_level)level);
                assert_same(fixture, &one, &other);
                free_outputs(&other);
            }
            free_outputs(&one);
        }
        fixture_close(fixture);
    }
}

/* An item's result is its own: neither the rest of the batch nor waves of blocks move a bit. */
static void a_batch_gives_each_item_what_it_gets_alone(void **unused) {
    (void)unused;
    struct fixture_options options = options_of(64, 16);
    options.kv_heads = 1;
    struct fixture *fixture = fixture_open(&state, &options, 128);
    fixture_add(fixture, &state, 5000, 1);
    fixture_add(fixture, &state, 1100, 1060); /* more blocks than one wave takes */
    fixture_add(fixture, &state, 129, 2);
    enum host_level level = host_level_best();
    struct outputs together = run(fixture, 2, level);
    const struct oscar_attend_args whole = fixture->args;
    for (uint32_t i = 0; i < whole.items; i++) {
        const struct oscar_attend_item item = fixture->item[i];
        struct oscar_attend_args alone = whole;
        struct host_pool *pool = NULL;
        alone.items = 1;
        alone.item = &item;
        assert_int_equal(host_pool_open(1, &pool, NULL), 0);
        fixture_poison_outputs(fixture);
        assert_int_equal(host_attend(pool, level, &alone), 0);
        host_pool_close(pool);
        assert_memory_equal(item.out, together.out[i], fixture_out_elements(fixture, &item) * sizeof(uint16_t));
    }
    free_outputs(&together);
    fixture_close(fixture);
}

/* Attention over the first half's pages and over the second half's, merged by log-sum-exp, is attention over all. */
static void halves_merge_by_their_log_sum_exp(void **unused) {
    (void)unused;
    for (int level = HOST_PORTABLE; level < HOST_LEVELS; level++) {
        if (!host_level_supported((enum host_level)level))
            continue;
        struct fixture_options options = options_of(64, 5);
        options.pairs = -1; /* a centre depends on the position, which the second half would not have alone */
        options.forms = FIXTURE_RANDOM;
        struct fixture *fixture = fixture_open(&state, &options, 64);
        fixture_add(fixture, &state, 64 * 20 + 17, 1);
        struct oscar_attend_item whole = fixture->item[0];
        uint32_t heads = fixture->geometry.query_heads;
        struct outputs all = run(fixture, 2, (enum host_level)level);
        fixture->item[0].tokens = 64 * 9;
        struct outputs first = run(fixture, 2, (enum host_level)level);
        fixture->item[0].tokens = whole.tokens - 64 * 9;
        fixture->item[0].pages = whole.pages + 9;
        struct outputs second = run(fixture, 2, (enum host_level)level);
        for (uint32_t h = 0; h < heads; h++) {
            double a = first.lse[0][h], b = second.lse[0][h], top = fmax(a, b);
            double lse = top + log(exp(a - top) + exp(b - top));
            assert_true(fabs(lse - (double)all.lse[0][h]) < 1e-4);
            for (uint32_t i = 0; i < 64; i++) {
                size_t at = h * (size_t)whole.out_head_stride + i;
                double merged = 0;
                memcpy(whole.out, first.out[0], fixture_out_elements(fixture, &whole) * 2);
                merged += exp(a - lse) * fixture_out(fixture, &whole, 0, h, i);
                memcpy(whole.out, second.out[0], fixture_out_elements(fixture, &whole) * 2);
                merged += exp(b - lse) * fixture_out(fixture, &whole, 0, h, i);
                ((uint16_t *)whole.out)[at] = ((const uint16_t *)all.out[0])[at];
                assert_true(fabs(merged - fixture_out(fixture, &whole, 0, h, i)) < 2e-3);
            }
        }
        free_outputs(&all);
        free_outputs(&first);
        free_outputs(&second);
        fixture_close(fixture);
    }
}

static void an_item_without_tokens_gives_zeros_and_no_weight(void **unused) {
    (void)unused;
    struct fixture_options options = options_of(128, 3);
    struct fixture *fixture = fixture_open(&state, &options, 8);
    fixture_add(fixture, &state, 0, 2);
    struct outputs outputs = run(fixture, 1, host_level_best());
    for (uint32_t row = 0; row < 2; row++)
        for (uint32_t h = 0; h < fixture->geometry.query_heads; h++) {
            assert_true(isinf(outputs.lse[0][row * fixture->geometry.query_heads + h]));
            assert_true(outputs.lse[0][row * fixture->geometry.query_heads + h] < 0);
            for (uint32_t i = 0; i < 128; i++)
                assert_true(fixture_out(fixture, &fixture->item[0], row, h, i) == 0);
        }
    free_outputs(&outputs);
    fixture_close(fixture);
}

static void the_log_sum_exp_may_be_left_out(void **unused) {
    (void)unused;
    struct fixture_options options = options_of(64, 3);
    struct fixture *fixture = fixture_open(&state, &options, 8);
    fixture_add(fixture, &state, 300, 2);
    fixture->item[0].lse = NULL;
    struct host_pool *pool = NULL;
    assert_int_equal(host_pool_open(1, &pool, NULL), 0);
    fixture_check(fixture, pool, host_level_best(), 1e-3);
    host_pool_close(pool);
    fixture_close(fixture);
}

static void a_turn_table_that_is_too_short_is_refused(void **unused) {
    (void)unused;
    struct fixture_options options = options_of(64, 3);
    struct fixture *fixture = fixture_open(&state, &options, 4);
    fixture_add(fixture, &state, 4 * 64 + 1, 1);
    struct host_pool *pool = NULL;
    assert_int_equal(host_pool_open(1, &pool, NULL), 0);
    assert_int_equal(host_attend(pool, HOST_PORTABLE, &fixture->args), OSCAR_ERR_INVALID);
    host_pool_close(pool);
    fixture_close(fixture);
}

int main(void) {
    state = fixture_seed();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_number_of_threads_does_not_change_a_bit),
        cmocka_unit_test(a_batch_gives_each_item_what_it_gets_alone),
        cmocka_unit_test(halves_merge_by_their_log_sum_exp),
        cmocka_unit_test(an_item_without_tokens_gives_zeros_and_no_weight),
        cmocka_unit_test(the_log_sum_exp_may_be_left_out),
        cmocka_unit_test(a_turn_table_that_is_too_short_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
