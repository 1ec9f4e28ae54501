/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a worker may get wrong. Each is an error with its cause in words, to the one who made it; nothing is lost, and a witness
 * that reads its own pages all along does not notice.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "kernels/number.h"
#include "tests/integration/e2e_daemon.h"
#include "tests/integration/e2e_model.h"

#define TOKENS 400U

struct scene {
    struct test_daemon *daemon;
    struct e2e_worker witness, worker;
    struct text text, other;
    struct oscar_seq *witnessed;
};

static int set_scene(void **state, int (*start)(void **state)) {
    struct scene *scene = calloc(1, sizeof(*scene));
    void *daemon = NULL;
    if (scene == NULL || start(&daemon) != 0)
        return -1;
    scene->daemon = daemon;
    text_append(&scene->text, 1, TOKENS);
    text_append(&scene->other, 2, TOKENS);
    e2e_worker_open(&scene->witness, e2e_socket(daemon), "witness");
    e2e_worker_open(&scene->worker, e2e_socket(daemon), "worker");
    scene->witnessed = e2e_open(&scene->witness, &scene->text, TOKENS, 0);
    e2e_extend(&scene->witness, scene->witnessed, &scene->text, TOKENS);
    *state = scene;
    return 0;
}

static int end_scene(void **state) {
    struct scene *scene = *state;
    e2e_check_all(&scene->witness, scene->witnessed, &scene->text, TOKENS);
    MUST(oscar_client_ping(scene->worker.client));
    e2e_worker_close(&scene->witness);
    e2e_worker_close(&scene->worker);
    e2e_wait_metric(scene->daemon, "oscar_sequences", 0);
    e2e_wait_metric(scene->daemon, E2E_ENDING, 0);
    e2e_flush(scene->daemon);
    e2e_wait_metric(scene->daemon, E2E_USED, 0);
    text_free(&scene->text);
    text_free(&scene->other);
    void *daemon = scene->daemon;
    free(scene);
    return e2e_stop(&daemon);
}

/* --- K and V --- */

#define ROWS_ELEMENTS ((size_t)64 * 2 * 64) /* 64 tokens, 2 heads of 64 */

static int store_values(struct e2e_worker *worker, struct oscar_seq *seq, const uint16_t value, unsigned side) {
    static uint16_t rows[2][ROWS_ELEMENTS];
    memset(rows, 0, sizeof(rows));
    rows[side][(size_t)17 * 2 * 64 + 64 + 5] = value;
    struct device_buffer *buffer = e2e_buffer(worker, rows[0], 2 * ROWS_ELEMENTS);
    const uint16_t *data = buffer->data;
    struct oscar_tensor k = {data, 2 * 64, 64}, v = {data + ROWS_ELEMENTS, 2 * 64, 64};
    int r = oscar_seq_store(seq, NULL, 1, 0, 64, &k, &v);
    device_buffer_free(buffer);
    return r;
}

static void values_out_of_range_are_refused_at_the_store(void **state) {
    struct scene *scene = *state;
    const uint16_t nan = 0x7fc0, infinity = 0x7f80, minus_infinity = 0xff80, huge = 0x7f7f;
    const uint16_t bad[] = {nan, infinity, minus_infinity, huge};
    for (unsigned side = 0; side < 2; side++) {
        for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
            struct oscar_seq *seq = e2e_open(&scene->worker, &scene->other, TOKENS, 0);
            MUST(oscar_seq_reserve(seq, TOKENS));
            REFUSED(store_values(&scene->worker, seq, bad[i], side), OSCAR_ERR_NOT_FINITE);
            /* Written again, they are right. */
            e2e_store(&scene->worker, seq, NULL, &scene->other, 0, TOKENS);
            MUST(oscar_seq_advance(seq, NULL, scene->other.ids, TOKENS));
            e2e_check_all(&scene->worker, seq, &scene->other, TOKENS);
            oscar_seq_close(seq);
            e2e_wait_metric(scene->daemon, E2E_ENDING, 0); /* what it has advanced is sealed first */
            e2e_flush(scene->daemon);
        }
    }
}

/* A worker's own kernel goes past the store's check; then the page does not seal. */
static void a_page_with_nan_is_never_published(void **state) {
    struct scene *scene = *state;
    struct oscar_seq *seq = e2e_open(&scene->worker, &scene->other, TOKENS, 0);
    MUST(oscar_seq_reserve(seq, TOKENS));
    e2e_store(&scene->worker, seq, NULL, &scene->other, 0, TOKENS);
    void *k, *v;
    uint32_t rows;
    MUST(oscar_seq_rows(seq, 1, 1, 130, &k, &v, &rows));
    e2e_write(&scene->worker, (uint16_t *)v + 3, &(uint16_t){0x7fc0}, sizeof(uint16_t));
    int r = oscar_seq_advance(seq, NULL, scene->other.ids, TOKENS);
    for (unsigned i = 0; r == 0 && i < 100000; i++)
        r = oscar_seq_advance(seq, NULL, NULL, 0);
    REFUSED(r, OSCAR_ERR_NOT_FINITE);
    /* Page 2 is not there, and nothing behind it. */
    assert_true(e2e_probe(&scene->worker, &scene->other, TOKENS) <= 128);
    oscar_seq_close(seq);
    seq = e2e_open(&scene->worker, &scene->other, TOKENS, 0);
    assert_true(e2e_info(seq).hit_tokens <= 128);
    e2e_extend(&scene->worker, seq, &scene->other, TOKENS);
    e2e_check_all(&scene->worker, seq, &scene->other, TOKENS);
    oscar_seq_close(seq);
}

/* --- counts --- */

static void counts_of_nothing_and_of_far_too_much_are_answered(void **state) {
    struct scene *scene = *state;
    struct oscar_model *model = scene->worker.model;
    const uint32_t *ids = scene->other.ids;
    const uint32_t far_too_many[] = {OSCAR_MAX_SEQUENCE_TOKENS + 1, UINT32_C(1) << 31, UINT32_MAX};
    struct oscar_probe_result result;
    struct oscar_seq *seq, *none;
    MUST(oscar_probe(model, NULL, 0, &result, NULL));
    assert_int_equal(result.hit_tokens, 0);
    MUST(oscar_seq_open(model, NULL, 0, 0, &seq));
    MUST(oscar_seq_reserve(seq, 0));
    MUST(oscar_seq_advance(seq, NULL, NULL, 0));
    struct oscar_lease *lease;
    MUST(oscar_probe(model, NULL, 0, &result, &lease));
    oscar_lease_close(lease);
    uint32_t *longest = calloc(OSCAR_MAX_SEQUENCE_TOKENS, sizeof(*longest));
    assert_non_null(longest);
    MUST(oscar_probe(model, longest, OSCAR_MAX_SEQUENCE_TOKENS, &result, NULL));
    assert_int_equal(result.hit_tokens, 0);
    MUST(oscar_seq_open(model, longest, OSCAR_MAX_SEQUENCE_TOKENS, 0, &none));
    oscar_seq_close(none);
    free(longest);
    for (size_t i = 0; i < sizeof(far_too_many) / sizeof(far_too_many[0]); i++) {
        uint32_t count = far_too_many[i];
        REFUSED(oscar_probe(model, ids, count, &result, NULL), OSCAR_ERR_LIMIT);
        REFUSED(oscar_seq_open(model, ids, count, 0, &none), OSCAR_ERR_LIMIT);
        REFUSED(oscar_seq_reserve(seq, count), OSCAR_ERR_LIMIT);
        assert_true(oscar_seq_advance(seq, NULL, ids, count) < 0);
        struct oscar_tensor tensor = {ids, 128, 64};
        assert_true(oscar_seq_store(seq, NULL, 0, 0, count, &tensor, &tensor) < 0);
        assert_true(oscar_seq_store(seq, NULL, 0, count, 1, &tensor, &tensor) < 0);
    }
    /* More than there is room for. */
    MUST(oscar_seq_reserve(seq, 10));
    uint32_t reserved = e2e_info(seq).reserved_tokens;
    struct oscar_tensor tensor = {ids, 128, 64};
    assert_int_equal(oscar_seq_store(seq, NULL, 0, reserved, 1, &tensor, &tensor), OSCAR_ERR_NO_SPACE);
    assert_int_equal(oscar_seq_store(seq, NULL, 7, 0, 1, &tensor, &tensor), OSCAR_ERR_INVALID);
    oscar_seq_close(seq);
}

/* --- geometry --- */

static void geometries_that_overflow_or_cannot_be_are_refused(void **state) {
    struct scene *scene = *state;
    static const struct {
        uint32_t layers, query_heads, kv_heads, head_dim, dtype, page, sink, recent;
    } bad[] = {
        {0, 4, 2, 64, OSCAR_BF16, 64, 64, 256},
        {513, 4, 2, 64, OSCAR_BF16, 64, 64, 256},
        {UINT32_MAX, 4, 2, 64, OSCAR_BF16, 64, 64, 256},
        {2, 0, 2, 64, OSCAR_BF16, 64, 64, 256},
        {2, 4, 0, 64, OSCAR_BF16, 64, 64, 256},
        {2, 5, 2, 64, OSCAR_BF16, 64, 64, 256},
        {2, 257, 257, 64, OSCAR_BF16, 64, 64, 256},
        {2, 65, 1, 64, OSCAR_BF16, 64, 64, 256},
        {2, 4, 2, 96, OSCAR_BF16, 64, 64, 256},
        {2, 4, 2, 0, OSCAR_BF16, 64, 64, 256},
        {2, 4, 2, 64, 7, 64, 64, 256},
        {2, 4, 2, 64, OSCAR_BF16, 32, 64, 256},
        {2, 4, 2, 64, OSCAR_BF16, 64, 0, 256},
        {2, 4, 2, 64, OSCAR_BF16, 64, 64, 0},
        {512, 256, 256, 256, OSCAR_BF16, 64, 64, 256}, /* 8 GiB a page */
        {UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct oscar_geometry geometry = {bad[i].layers, bad[i].query_heads, bad[i].kv_heads, bad[i].head_dim,
                                          bad[i].dtype,  bad[i].page,        bad[i].sink,     bad[i].recent};
        struct oscar_model_options options = e2e_model_options(&geometry);
        struct oscar_model *model;
        REFUSED(oscar_model_open(scene->worker.client, &options, &model), OSCAR_ERR_GEOMETRY);
    }
}

static void a_model_whose_page_exceeds_the_budget_is_refused(void **state) {
    struct scene *scene = *state;
    struct oscar_geometry geometry;
    oscar_geometry_init(&geometry, 128, 8, 8, 128, OSCAR_BF16); /* 32 MiB a page */
    struct oscar_model_options options = e2e_model_options(&geometry);
    struct oscar_model *model;
    REFUSED(oscar_model_open(scene->worker.client, &options, &model), OSCAR_ERR_NO_SPACE);
}

/* --- calibrations --- */

/* A calibration file of kind `matrix` for two layers of two heads: a scaled identity as the rotation, one a layer. */
static void write_calibration(const char *name, uint32_t layers, uint32_t d, float scale, float extra) {
    char header[4096], path[512];
    uint64_t at = 0, matrix = (uint64_t)d * d * 4;
    int length =
        snprintf(header, sizeof(header),
                 "{\"__metadata__\":{\"oscar.format\":\"1\",\"oscar.model\":\"test\",\"oscar.method\":\"test\","
                 "\"oscar.layers\":\"%u\",\"oscar.kv_heads\":\"2\",\"oscar.head_dim\":\"%u\","
                 "\"oscar.rotation_k\":\"matrix\",\"oscar.rotation_v\":\"matrix\"}",
                 layers, d);
    for (uint32_t layer = 0; layer < layers; layer++) {
        for (unsigned side = 0; side < 2; side++, at += matrix)
            length += snprintf(
                header + length, sizeof(header) - (size_t)length,
                ",\"layers.%u.%c.rotation\":{\"dtype\":\"F32\",\"shape\":[1,%u,%u],\"data_offsets\":[%llu,%llu]}",
                layer, "kv"[side], d, d, (unsigned long long)at, (unsigned long long)(at + matrix));
        for (unsigned side = 0; side < 2; side++, at += 8)
            length += snprintf(header + length, sizeof(header) - (size_t)length,
                               ",\"layers.%u.%c.rank\":{\"dtype\":\"I32\",\"shape\":[2],\"data_offsets\":[%llu,%llu]}",
                               layer, "kv"[side], (unsigned long long)at, (unsigned long long)(at + 8));
    }
    length += snprintf(header + length, sizeof(header) - (size_t)length, "}");
    while (length % 8 != 0)
        header[length++] = ' ';
    snprintf(path, sizeof(path), "%s/%s.safetensors", e2e_calibrations(), name);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    uint64_t header_bytes = (uint64_t)length;
    fwrite(&header_bytes, 8, 1, file);
    fwrite(header, 1, (size_t)length, file);
    for (uint32_t layer = 0; layer < layers; layer++) {
        for (unsigned side = 0; side < 2; side++) {
            for (uint32_t i = 0; i < d * d; i++) {
                float value = i % (d + 1) == 0 ? scale : 0;
                if (i == 1)
                    value += extra;
                fwrite(&value, 4, 1, file);
            }
        }
        const int32_t rank[4] = {60, 60, 58, 58};
        fwrite(rank, 4, 4, file);
    }
    assert_int_equal(fclose(file), 0);
}

static void calibrations_that_do_not_fit_are_refused(void **state) {
    struct scene *scene = *state;
    static const struct {
        const char *name;
        uint32_t layers, d;
        float scale, extra;
        int expected;
    } files[] = {
        {"good", 2, 64, 1, 0, 0},
        {"stretched", 2, 64, 1.001F, 0, OSCAR_ERR_CALIBRATION},
        {"skewed", 2, 64, 1, 0.01F, OSCAR_ERR_CALIBRATION},
        {"zero", 2, 64, 0, 0, OSCAR_ERR_CALIBRATION},
        {"nan", 2, 64, 1, NAN, OSCAR_ERR_CALIBRATION},
        {"another_size", 2, 128, 1, 0, OSCAR_ERR_CALIBRATION},
        {"fewer_layers", 1, 64, 1, 0, OSCAR_ERR_CALIBRATION},
    };
    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
        write_calibration(files[i].name, files[i].layers, files[i].d, files[i].scale, files[i].extra);
        struct oscar_model_options options = e2e_model_options(&scene->worker.geometry);
        struct oscar_model *model = NULL;
        options.calibration = files[i].name;
        int r = oscar_model_open(scene->worker.client, &options, &model);
        if (r != files[i].expected || (r < 0 && oscar_error_detail()[0] == 0))
            fail_msg("%s: %s: %s", files[i].name, oscar_error_name(r), oscar_error_detail());
        if (r == 0) {
            struct oscar_probe_result result;
            MUST(oscar_probe(model, scene->text.ids, TOKENS, &result, NULL));
            assert_int_equal(result.hit_tokens, 0); /* what was stored in another rotation is another model's */
            oscar_model_close(model);
        }
    }
    static const char *const absent[] = {"no_such_file", "../oscard", "/etc/passwd"};
    for (size_t i = 0; i < sizeof(absent) / sizeof(absent[0]); i++) {
        struct oscar_model_options options = e2e_model_options(&scene->worker.geometry);
        struct oscar_model *model;
        options.calibration = absent[i];
        int r = oscar_model_open(scene->worker.client, &options, &model);
        if ((r != OSCAR_ERR_CALIBRATION && r != OSCAR_ERR_NOT_FOUND) || oscar_error_detail()[0] == 0)
            fail_msg("calibration \"%s\": %s: %s", absent[i], oscar_error_name(r), oscar_error_detail());
    }
}

/* --- the order of calls --- */

static void calls_out_of_order_are_refused(void **state) {
    struct scene *scene = *state;
    struct oscar_seq *seq = e2e_open(&scene->worker, &scene->other, TOKENS, 0);
    uint16_t q[4 * 64] = {0}, out[4 * 64];
    struct oscar_attend_query query = {.seq = seq,
                                       .tokens = 5,
                                       .rows = 1,
                                       .q = q,
                                       .q_row_stride = 256,
                                       .q_head_stride = 64,
                                       .out = out,
                                       .out_row_stride = 256,
                                       .out_head_stride = 64};
    assert_true(oscar_attend(scene->worker.model, NULL, 0, 0, &query, 1) < 0); /* nothing is stored */
    assert_true(oscar_seq_advance(seq, NULL, scene->other.ids, 1) < 0);        /* nothing is reserved */
    void *k, *v;
    uint32_t rows;
    assert_true(oscar_seq_rows(seq, 0, 0, 0, &k, &v, &rows) < 0);
    query.seq = scene->witnessed; /* another model object's sequence */
    query.tokens = TOKENS;
    assert_true(oscar_attend(scene->worker.model, NULL, 0, 0, &query, 1) < 0);
    const uint8_t secret[OSCAR_LEASE_SECRET] = {0};
    struct oscar_lease *lease;
    uint32_t hit;
    REFUSED(oscar_lease_adopt(scene->worker.model, secret, &lease, &hit), OSCAR_ERR_NOT_FOUND);
    oscar_seq_close(seq);
}

static int start_daemon(void **state) { return e2e_start(state, "16M"); }
static int start(void **state) { return set_scene(state, start_daemon); }

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(values_out_of_range_are_refused_at_the_store, start, end_scene),
        cmocka_unit_test_setup_teardown(a_page_with_nan_is_never_published, start, end_scene),
        cmocka_unit_test_setup_teardown(counts_of_nothing_and_of_far_too_much_are_answered, start, end_scene),
        cmocka_unit_test_setup_teardown(geometries_that_overflow_or_cannot_be_are_refused, start, end_scene),
        cmocka_unit_test_setup_teardown(a_model_whose_page_exceeds_the_budget_is_refused, start, end_scene),
        cmocka_unit_test_setup_teardown(calibrations_that_do_not_fit_are_refused, start, end_scene),
        cmocka_unit_test_setup_teardown(calls_out_of_order_are_refused, start, end_scene),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
