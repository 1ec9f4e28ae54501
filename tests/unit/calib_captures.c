/* SPDX-License-Identifier: Apache-2.0 */
/* Captures in files: however they are spread, their rows are the same; and what bad ones get. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "calib/activations.h"
#include "calib_fixture.h"
#include "proto/half.h"
#include "tests/support/files.h"

static const struct calib_model model = {
    .layers = 3, .query_heads = 4, .kv_heads = 2, .d = 64, .rope_base = 1e4, .bias = 3};

static struct activations *open_all(const char *const *paths, size_t count) {
    struct oscar_cause cause = {0};
    struct activations *activations = NULL;
    if (activations_open(paths, count, &activations, &cause) != 0)
        fail_msg("%s", cause.text);
    return activations;
}

/* Every row of a layer is the model's, by position. */
static void assert_rows(const struct activations *activations, uint32_t layer, uint64_t first, uint64_t tokens) {
    struct oscar_cause cause = {0};
    const struct layer_activations *found = activations_layer(activations, layer);
    assert_non_null(found);
    assert_int_equal(found->sequences, 1);
    assert_int_equal(found->sequence->tokens, tokens);
    assert_int_equal(found->sequence->first_position, first);
    for (enum activation part = ACTIVATION_Q; part < ACTIVATION_PARTS; part++)
        for (uint32_t head = 0; head < (part == ACTIVATION_Q ? model.query_heads : model.kv_heads); head++) {
            float *rows = malloc(tokens * model.d * sizeof(*rows));
            assert_non_null(rows);
            uint64_t from = tokens / 3; /* from the middle, too */
            assert_int_equal(
                activations_read(activations, found, found->sequence, part, head, 0, from, rows, model.d, &cause), 0);
            assert_int_equal(activations_read(activations, found, found->sequence, part, head, from, tokens - from,
                                              rows + from * model.d, model.d, &cause),
                             0);
            for (uint64_t token = 0; token < tokens; token++) {
                float expected[64];
                calib_row(&model, layer, "qkv"[part], first + token, head, expected);
                assert_memory_equal(rows + token * model.d, expected, sizeof(expected));
            }
            free(rows);
        }
}

static void rows_are_read_whatever_their_type(void **unused) {
    (void)unused;
    static const enum oscar_tensor_type types[] = {OSCAR_TENSOR_BF16, OSCAR_TENSOR_F32};
    for (size_t i = 0; i < 2; i++) {
        const char *path = calib_path("typed.safetensors");
        calib_write_capture(path, &model, &(struct calib_cut){.to = 3, .tokens = 20, .type = types[i]});
        struct activations *activations = open_all(&path, 1);
        for (uint32_t layer = 0; layer < 3; layer++)
            assert_rows(activations, layer, 0, 20);
        activations_free(activations);
    }
}

/* Every half there is that is finite, sixty-four a row. */
static void count_halves(float *row, uint32_t layer, char part, uint64_t position, uint32_t head, uint32_t d) {
    (void)layer;
    (void)part;
    (void)head;
    for (uint32_t i = 0; i < d; i++) {
        uint16_t bits = (uint16_t)(position * d + i);
        row[i] = (bits & 0x7c00U) == 0x7c00U ? 0 : oscar_float_from_half(bits);
    }
}

static void every_half_is_read_exactly(void **unused) {
    (void)unused;
    const char *path = calib_path("halves.safetensors");
    const struct calib_model small = {.layers = 1, .query_heads = 1, .kv_heads = 1, .d = 64, .rope_base = 1e4};
    struct oscar_cause cause = {0};
    calib_write_capture(path, &small,
                        &(struct calib_cut){.to = 1, .tokens = 1024, .type = OSCAR_TENSOR_F16, .change = count_halves});
    struct activations *activations = open_all(&path, 1);
    const struct layer_activations *layer = activations_layer(activations, 0);
    for (uint32_t token = 0; token < 1024; token++) {
        float row[64];
        float expected[64];
        count_halves(expected, 0, 'k', token, 0, 64);
        assert_int_equal(
            activations_read(activations, layer, layer->sequence, ACTIVATION_K, 0, token, 1, row, 64, &cause), 0);
        for (uint32_t i = 0; i < 64; i++)
            assert_int_equal(oscar_float_bits(row[i]), oscar_float_bits(expected[i]));
    }
    activations_free(activations);
}

static void layers_may_lie_in_any_files(void **unused) {
    (void)unused;
    assert_int_equal(mkdir(calib_path("spread"), 0777), 0);
    calib_write_capture(calib_path("spread/b.safetensors"), &model,
                        &(struct calib_cut){.from = 0, .to = 1, .tokens = 50, .type = OSCAR_TENSOR_BF16});
    calib_write_capture(calib_path("spread/a.safetensors"), &model,
                        &(struct calib_cut){.from = 1, .to = 3, .tokens = 50, .type = OSCAR_TENSOR_F32});
    calib_write_capture(calib_path("spread/notes.txt"), &model,
                        &(struct calib_cut){.from = 0, .to = 1, .tokens = 5, .type = OSCAR_TENSOR_F32});
    const char *path = calib_path("spread");
    struct activations *activations = open_all(&path, 1);
    assert_int_equal(activations->files, 2);
    assert_string_equal(activation_file_name(activations->file[0]), "a.safetensors");
    assert_string_equal(activations->model, "made \"up\"");
    assert_int_equal(activations->model_layers, 3);
    for (uint32_t layer = 0; layer < 3; layer++)
        assert_rows(activations, layer, 0, 50);
    assert_null(activations_layer(activations, 3));
    activations_free(activations);
}

static void a_file_that_goes_on_is_of_the_same_sequence_and_another_is_not(void **unused) {
    (void)unused;
    static const uint64_t first[] = {10, 40, 41, 0, 100};
    static const uint64_t tokens[] = {30, 1, 20, 25, 7};
    const char *paths[5];
    for (size_t i = 0; i < 5; i++) {
        char name[32];
        (void)snprintf(name, sizeof(name), "part%zu.safetensors", i);
        paths[i] = calib_path(name);
        calib_write_capture(
            paths[i], &model,
            &(struct calib_cut){.to = 1, .first = first[i], .tokens = tokens[i], .type = OSCAR_TENSOR_BF16});
    }
    struct activations *activations = open_all(paths, 3);
    assert_rows(activations, 0, 10, 51);
    activations_free(activations);
    activations = open_all(paths, 5);
    const struct layer_activations *layer = activations_layer(activations, 0);
    assert_int_equal(layer->sequences, 3);
    assert_int_equal(layer->sequence[1].first_position, 0);
    assert_int_equal(layer->sequence[2].first_position, 100);
    assert_int_equal(activations_tokens(layer), 83);
    assert_int_equal(activations_positions(layer), 107);
    activations_free(activations);
}

/* --- what bad input gets ------------------------------------------------------------------------------------------ */

static void assert_refused(const char *path, int error, const char *words) {
    struct oscar_cause cause = {0};
    struct activations *activations = NULL;
    int r = activations_open(&path, 1, &activations, &cause);
    if (r != error || strstr(cause.text, words) == NULL)
        fail_msg("%s: found %d \"%s\", expected %d \"%s\"", path, r, cause.text, error, words);
    assert_null(activations);
}

/* A file of a header and zeros; its length as claimed, or with 0 as it is. */
static const char *raw(const char *header, uint64_t claimed, size_t data_bytes) {
    const char *path = calib_path("raw.safetensors");
    FILE *file = fopen(path, "we");
    assert_non_null(file);
    uint64_t length = claimed != 0 ? claimed : strlen(header);
    for (unsigned i = 0; i < 8; i++)
        (void)fputc((int)(length >> (8 * i) & 0xff), file);
    (void)fputs(header, file);
    for (size_t i = 0; i < data_bytes; i++)
        (void)fputc(0, file);
    assert_int_equal(fclose(file), 0);
    return path;
}

#define TENSOR(name, type, shape, begin, end)                                                                          \
    "\"layers.0." name "\":{\"dtype\":\"" type "\",\"shape\":" shape ",\"data_offsets\":[" begin "," end "]}"

static void files_that_are_none_are_named(void **unused) {
    (void)unused;
    assert_refused(calib_path("nowhere"), OSCAR_ERR_NOT_FOUND, "nowhere");
    assert_int_equal(mkdir(calib_path("empty"), 0777), 0);
    assert_refused(calib_path("empty"), OSCAR_ERR_NOT_FOUND, "holds no .safetensors file");
    file_write(calib_path("nothing"), NULL, 0);
    assert_refused(calib_path("nothing"), OSCAR_ERR_CORRUPT, "it is empty");
    assert_refused("/dev/null", OSCAR_ERR_CORRUPT, "not a regular file");
    assert_refused(raw("{", 1000, 0), OSCAR_ERR_CORRUPT, "raw.safetensors");
    assert_refused(raw("{\"a\":", 0, 0), OSCAR_ERR_CORRUPT, "raw.safetensors");
    assert_refused(raw("{}", UINT64_C(1000000000000000000), 0), OSCAR_ERR_CORRUPT, "raw.safetensors");
    assert_refused(raw("{}", UINT64_MAX, 0), OSCAR_ERR_CORRUPT, "raw.safetensors");
    assert_refused(raw("{}", 0, 0), OSCAR_ERR_NOT_FOUND, "this is no capture");
    assert_refused(
        raw("{" TENSOR("k", "F32", "[1,1,64]", "0", "256") "," TENSOR("v", "F32", "[1,1,64]", "128", "384") "}", 0,
            384),
        OSCAR_ERR_CORRUPT, "overlaps");
    assert_refused(raw("{" TENSOR("k", "F32", "[1,1,64]", "0", "256") "}", 0, 100), OSCAR_ERR_CORRUPT, "ends at byte");
    assert_refused(raw("{" TENSOR("k", "F32", "[4611686018427387904,4,64]", "0", "256") "}", 0, 256), OSCAR_ERR_CORRUPT,
                   "overflows");
}

static void tensors_that_do_not_fit_are_named(void **unused) {
    (void)unused;
    assert_refused(
        raw("{" TENSOR("k", "F32", "[1,1,64]", "0", "256") "," TENSOR("v", "F32", "[1,1,64]", "256", "512") "}", 0,
            512),
        OSCAR_ERR_NOT_FOUND, "layers.0.q is missing");
    assert_refused(raw("{" TENSOR("v", "F32", "[1,1,64]", "0", "256") "}", 0, 256), OSCAR_ERR_NOT_FOUND,
                   "layers.0.q is missing");
    assert_refused(raw("{" TENSOR("k", "F32", "[1,64]", "0", "256") "," TENSOR(
                           "q", "F32", "[1,1,64]", "256", "512") "," TENSOR("v", "F32", "[1,1,64]", "512", "768") "}",
                       0, 768),
                   OSCAR_ERR_CORRUPT, "layers.0.k: expected the shape [token, head, dim]");
    assert_refused(raw("{" TENSOR("k", "F32", "[0,1,64]", "0", "0") "," TENSOR(
                           "q", "F32", "[0,1,64]", "0", "0") "," TENSOR("v", "F32", "[0,1,64]", "0", "0") "}",
                       0, 0),
                   OSCAR_ERR_CORRUPT, "none of them 0");
    assert_refused(raw("{" TENSOR("k", "I32", "[1,1,64]", "0", "256") "," TENSOR(
                           "q", "F32", "[1,1,64]", "256", "512") "," TENSOR("v", "F32", "[1,1,64]", "512", "768") "}",
                       0, 768),
                   OSCAR_ERR_CORRUPT, "expected F16, BF16 or F32, found I32");
    assert_refused(raw("{" TENSOR("k", "F32", "[1,1,64]", "0", "256") "," TENSOR(
                           "q", "F32", "[1,1,64]", "256", "512") "," TENSOR("v", "F32", "[2,1,64]", "512", "1024") "}",
                       0, 1024),
                   OSCAR_ERR_GEOMETRY, "layers.0.v has the shape [2, 1, 64]");
    assert_refused(
        raw("{" TENSOR("k", "F32", "[1,2,64]", "0", "512") "," TENSOR("q", "F32", "[1,3,64]", "512", "1280") "," TENSOR(
                "v", "F32", "[1,2,64]", "1280", "1792") "}",
            0, 1792),
        OSCAR_ERR_GEOMETRY, "3 query heads are not a multiple of 2 KV heads");
    assert_refused(raw("{" TENSOR("k", "F32", "[1,1,96]", "0", "384") "," TENSOR(
                           "q", "F32", "[1,1,96]", "384", "768") "," TENSOR("v", "F32", "[1,1,96]", "768", "1152") "}",
                       0, 1152),
                   OSCAR_ERR_GEOMETRY, "head_dim is 96");
    assert_refused(raw("{\"__metadata__\":{\"first_position\":\"-3\"}}", 0, 0), OSCAR_ERR_CORRUPT, "first_position");
    assert_refused(raw("{\"__metadata__\":{\"rope_base\":\"large\"}}", 0, 0), OSCAR_ERR_CORRUPT, "rope_base");
    assert_refused(raw("{\"__metadata__\":{\"rope_pairs\":\"odd\"}}", 0, 0), OSCAR_ERR_CORRUPT, "rope_pairs");
    assert_refused(raw("{\"__metadata__\":{\"model_layers\":\"1000000\"}}", 0, 0), OSCAR_ERR_CORRUPT, "model_layers");
    assert_refused(raw("{\"rope.omega\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 0, 4),
                   OSCAR_ERR_CORRUPT, "rope.omega");
}

static void a_layer_of_another_shape_is_named(void **unused) {
    (void)unused;
    struct calib_model wider = model;
    struct oscar_cause cause = {0};
    struct activations *activations = NULL;
    wider.query_heads = 8;
    const char *paths[] = {calib_path("narrow.safetensors"), calib_path("wide.safetensors")};
    calib_write_capture(paths[0], &model, &(struct calib_cut){.to = 1, .tokens = 3, .type = OSCAR_TENSOR_F32});
    calib_write_capture(paths[1], &wider,
                        &(struct calib_cut){.from = 1, .to = 2, .tokens = 3, .type = OSCAR_TENSOR_F32});
    assert_int_equal(activations_open(paths, 2, &activations, &cause), OSCAR_ERR_GEOMETRY);
    assert_non_null(strstr(cause.text, "layer 1 has 8 query heads"));
}

static float poison;

static void poison_one(float *row, uint32_t layer, char part, uint64_t position, uint32_t head, uint32_t d) {
    if (layer == 1 && part == 'v' && position == 17 && head == 1)
        row[d - 1] = poison;
}

static void a_value_that_is_not_finite_is_named_with_its_place(void **unused) {
    (void)unused;
    static const enum oscar_tensor_type types[] = {OSCAR_TENSOR_BF16, OSCAR_TENSOR_F16, OSCAR_TENSOR_F32};
    for (size_t i = 0; i < 6; i++) {
        struct oscar_cause cause = {0};
        float rows[20 * 64];
        const char *path = calib_path("poison.safetensors");
        poison = i % 2 == 0 ? NAN : -INFINITY;
        calib_write_capture(path, &model,
                            &(struct calib_cut){.to = 2, .tokens = 20, .type = types[i / 2], .change = poison_one});
        struct activations *activations = open_all(&path, 1);
        const struct layer_activations *layer = activations_layer(activations, 1);
        assert_int_equal(
            activations_read(activations, layer, layer->sequence, ACTIVATION_V, 1, 0, 17, rows, 64, &cause), 0);
        assert_int_equal(
            activations_read(activations, layer, layer->sequence, ACTIVATION_V, 1, 0, 20, rows, 64, &cause),
            OSCAR_ERR_NOT_FINITE);
        assert_non_null(strstr(cause.text, "layers.1.v: token 17, head 1 holds a NaN or infinity"));
        activations_free(activations);
    }
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_are_read_whatever_their_type),
        cmocka_unit_test(every_half_is_read_exactly),
        cmocka_unit_test(layers_may_lie_in_any_files),
        cmocka_unit_test(a_file_that_goes_on_is_of_the_same_sequence_and_another_is_not),
        cmocka_unit_test(files_that_are_none_are_named),
        cmocka_unit_test(tensors_that_do_not_fit_are_named),
        cmocka_unit_test(a_layer_of_another_shape_is_named),
        cmocka_unit_test(a_value_that_is_not_finite_is_named_with_its_place),
    };
    calib_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
