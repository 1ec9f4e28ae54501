/* SPDX-License-Identifier: Apache-2.0 */
/* oscar-calib import: published rotations become a calibration file with the same numbers, or are refused and leave none. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "calib/calibration_file.h"
#include "calib/options.h"
#include "calib_archive.h"
#include "proto/safetensors.h"
#include "proto_random.h"
#include "proto_test.h"
#include "tests/support/files.h"

#define LAYERS 3U
#define HEADS 2U
#define DIM 64U
#define MATRIX ((size_t)DIM * DIM)

static struct oscar_cause cause;
static char folder[] = "/tmp/oscar-test-XXXXXX";
static char k_path[64], v_path[64], output[64];

/* --- files -------------------------------------------------------------------------------------------------------- */

/* A random mirror: orthogonal, and no element like another one. */
static void mirror(float *ret) {
    double normal[DIM], square = 0;
    for (unsigned i = 0; i < DIM; i++) {
        normal[i] = (double)random_below(2000001) / 1e6 - 1.0;
        square += normal[i] * normal[i];
    }
    for (unsigned i = 0; i < DIM; i++)
        for (unsigned j = 0; j < DIM; j++)
            ret[(size_t)i * DIM + j] = (float)((i == j ? 1.0 : 0.0) - 2.0 * normal[i] * normal[j] / square);
}

static float *mirrors(unsigned count) {
    float *matrices = malloc(count * MATRIX * sizeof(*matrices));
    assert_non_null(matrices);
    for (unsigned i = 0; i < count; i++)
        mirror(matrices + i * MATRIX);
    return matrices;
}

static void write_rotations(const char *path, const struct rotation_file *file) {
    struct bytes bytes;
    rotation_file_write(file, &bytes);
    file_write(path, bytes.at, bytes.size);
    bytes_clear(&bytes);
}

static struct calib_options usual(void) {
    return (struct calib_options){
        .fit = {.model = "a model"}, .output = output, .k_file = k_path, .v_file = v_path, .kv_heads = HEADS};
}

static int import(const struct calib_options *options) {
    (void)unlink(output);
    cause.text[0] = '\0';
    int r = calib_import(options, &cause);
    assert_true((r == 0) == (access(output, F_OK) == 0));
    return r;
}

static void assert_refused(const struct calib_options *options, int error, const char *reason) {
    int r = import(options);
    if (r != error || strstr(cause.text, reason) == NULL)
        fail_msg("%d, \"%s\": expected %d, \"%s\"", r, cause.text, error, reason);
}

/* That the file holds these rotations, [layers][heads][d][d] where there are several a layer, else [layers][d][d]. */
static void assert_holds(const float *k, unsigned k_heads, const float *v, unsigned v_heads) {
    struct calibration_file file;
    assert_int_equal(calibration_file_open(output, true, &file, &cause), OSCAR_OK);
    const struct oscar_calibration *calibration = file.calibration;
    assert_true(calibration->layers == LAYERS && calibration->kv_heads == HEADS && calibration->head_dim == DIM);
    for (unsigned layer = 0; layer < LAYERS; layer++)
        for (unsigned h = 0; h < HEADS; h++) {
            const struct oscar_head_calibration *head = oscar_calibration_head(calibration, layer, h);
            const float *want_k = k + ((size_t)layer * k_heads + (k_heads > 1 ? h : 0)) * MATRIX;
            const float *want_v = v + ((size_t)layer * v_heads + (v_heads > 1 ? h : 0)) * MATRIX;
            assert_memory_equal(head->rotation_k, want_k, MATRIX * sizeof(float));
            assert_memory_equal(head->rotation_v, want_v, MATRIX * sizeof(float));
            assert_true(head->centre_static == NULL && head->feedback == NULL);
        }
    calibration_file_close(&file);
}

/* --- what is imported --------------------------------------------------------------------------------------------- */

static void both_formats_are_imported_bit_for_bit(void **state) {
    (void)state;
    float *k = mirrors(LAYERS), *v = mirrors(LAYERS * HEADS);
    struct calib_options options = usual();
    for (unsigned form = 0; form < 32; form++) {
        struct rotation_file file = {.layers = LAYERS,
                                     .d = DIM,
                                     .text_keys = (form & 1) != 0,
                                     .transposed = (form & 2) != 0,
                                     .shared = (form & 4) != 0,
                                     .protocol_4 = (form & 8) != 0,
                                     .wide = (form & 16) != 0};
        file.rotations = k;
        file.objective = "qqt_r_h_pbr";
        write_rotations(k_path, &file);
        file.rotations = v;
        file.heads = HEADS;
        file.objective = "sst_r_h_pbr";
        write_rotations(v_path, &file);
        if (import(&options) != 0)
            fail_msg("form %u: %s", form, cause.text);
        assert_holds(k, 1, v, HEADS);
    }
    free(k);
    free(v);
}

static void the_file_says_what_it_was_made_of(void **state) {
    (void)state;
    float *k = mirrors(LAYERS);
    struct oscar_safetensors *file = NULL;
    struct rotation_file rotations = {.layers = LAYERS,
                                      .d = DIM,
                                      .rotations = k,
                                      .objective = "qqt_r_h_pbr",
                                      .model = "Qwen/Qwen3-8B",
                                      .kv_heads = HEADS};
    struct calib_options options = usual();
    write_rotations(k_path, &rotations);
    rotations.objective = "sst_r_h_pbr";
    rotations.model = NULL;
    write_rotations(v_path, &rotations);
    options.fit.model = NULL;
    options.kv_heads = 0;
    assert_int_equal(import(&options), OSCAR_OK);
    assert_int_equal(oscar_safetensors_open(output, &file, &cause), OSCAR_OK);
    assert_string_equal(oscar_safetensors_metadata(file, "oscar.model"), "Qwen/Qwen3-8B");
    assert_string_equal(oscar_safetensors_metadata(file, "oscar.targets"), "k qqt_r_h_pbr, v sst_r_h_pbr");
    assert_string_equal(oscar_safetensors_metadata(file, "oscar.clip"), "ratios K 0.96, V 0.92");
    assert_non_null(strstr(oscar_safetensors_metadata(file, "oscar.sources"), "k.pt "));
    assert_null(oscar_safetensors_metadata(file, "oscar.source_layers"));
    oscar_safetensors_free(file);
    free(k);
}

static void clip_ratios_become_ranks(void **state) {
    (void)state;
    float *k = mirrors(LAYERS);
    struct calib_options options = usual();
    struct calibration_file file;
    write_rotations(k_path, &(struct rotation_file){.layers = LAYERS, .d = DIM, .rotations = k});
    write_rotations(v_path, &(struct rotation_file){.layers = LAYERS, .d = DIM, .rotations = k});
    for (unsigned given = 0; given < 2; given++) {
        options.fit.clip_given = given != 0;
        options.fit.clip_k = 0.9;
        options.fit.clip_v = 1.0;
        assert_int_equal(import(&options), OSCAR_OK);
        assert_int_equal(calibration_file_open(output, true, &file, &cause), OSCAR_OK);
        const struct oscar_head_calibration *head = oscar_calibration_head(file.calibration, LAYERS - 1, HEADS - 1);
        assert_int_equal(head->rank_k, given != 0 ? 57 : 61);
        assert_int_equal(head->rank_v, given != 0 ? 63 : 58);
        calibration_file_close(&file);
    }
    free(k);
}

static void one_file_can_be_of_both_sides(void **state) {
    (void)state;
    float *k = mirrors(LAYERS);
    const char *argument = k_path;
    struct calib_options options = usual();
    options.k_file = options.v_file = NULL;
    options.arguments = &argument;
    options.argument_count = 1;
    write_rotations(k_path, &(struct rotation_file){.layers = LAYERS, .d = DIM, .rotations = k});
    assert_int_equal(import(&options), OSCAR_OK);
    assert_holds(k, 1, k, 1);
    write_rotations(k_path,
                    &(struct rotation_file){.layers = LAYERS, .d = DIM, .rotations = k, .objective = "qqt_r_h_pbr"});
    assert_refused(&options, OSCAR_ERR_INVALID, "objective qqt_r_h_pbr is of K alone");
    free(k);
}

static void chosen_layers_are_numbered_anew(void **state) {
    (void)state;
    float *all = mirrors(8), *chosen = malloc(LAYERS * MATRIX * sizeof(*chosen));
    struct calib_options options = usual();
    static const unsigned numbers[LAYERS] = {7, 0, 3};
    assert_non_null(chosen);
    for (unsigned i = 0; i < LAYERS; i++)
        memcpy(chosen + i * MATRIX, all + numbers[i] * MATRIX, MATRIX * sizeof(*chosen));
    write_rotations(k_path, &(struct rotation_file){.layers = 8, .d = DIM, .rotations = all});
    write_rotations(v_path, &(struct rotation_file){.layers = 8, .d = DIM, .rotations = all});
    options.fit.layers = "7,0,3";
    assert_int_equal(import(&options), OSCAR_OK);
    assert_holds(chosen, 1, chosen, 1);
    options.fit.layers = "7,8";
    assert_refused(&options, OSCAR_ERR_NOT_FOUND, "--layers 7,8: layer 8 is missing");
    options.fit.layers = "7,";
    assert_refused(&options, OSCAR_ERR_INVALID, "--layers 7,: not a list");
    options.fit.layers = "99999999999999999999";
    assert_refused(&options, OSCAR_ERR_INVALID, "not a list");
    free(all);
    free(chosen);
}

/* tests/data/torch/make_rotations.py */
static void expected_rotation(unsigned seed, float *ret) {
    memset(ret, 0, MATRIX * sizeof(*ret));
    for (unsigned row = 0; row < DIM; row++)
        ret[(size_t)row * DIM + (row * (2 * seed + 5) + seed) % DIM] = (row * 7 + seed) % 3 == 0 ? -1.0F : 1.0F;
}

static void files_of_pytorch_itself_are_imported(void **state) {
    (void)state;
    static float expected[MATRIX];
    struct calib_options options = usual();
    struct calibration_file file;
    const char *argument = OSCAR_TEST_DATA "/torch"; /* a folder as the zoo has it */
    options.k_file = options.v_file = NULL;
    options.arguments = &argument;
    options.argument_count = 1;
    if (import(&options) != 0)
        fail_msg("%s", cause.text);
    assert_int_equal(calibration_file_open(output, true, &file, &cause), OSCAR_OK);
    assert_int_equal(file.calibration->layers, 2);
    for (unsigned layer = 0; layer < 2; layer++)
        for (unsigned h = 0; h < HEADS; h++) {
            const struct oscar_head_calibration *head = oscar_calibration_head(file.calibration, layer, h);
            expected_rotation(layer, expected);
            assert_memory_equal(head->rotation_k, expected, sizeof(expected));
            expected_rotation(10 + 2 * layer + h, expected);
            assert_memory_equal(head->rotation_v, expected, sizeof(expected));
        }
    calibration_file_close(&file);
}

/* --- what is refused ---------------------------------------------------------------------------------------------- */

static void what_is_no_rotation_is_refused(void **state) {
    (void)state;
    float *k = mirrors(LAYERS);
    struct calib_options options = usual();
    const struct rotation_file good = {.layers = LAYERS, .d = DIM, .rotations = k};
    write_rotations(v_path, &good);
    k[2 * MATRIX + 5] += 0.01F;
    write_rotations(k_path, &good);
    assert_refused(&options, OSCAR_ERR_CALIBRATION, "layers.2.k.rotation: head 0 is not orthogonal");
    k[2 * MATRIX + 5] = NAN;
    write_rotations(k_path, &good);
    assert_refused(&options, OSCAR_ERR_CALIBRATION, "layers.2.k.rotation: element 5 of head 0 is not finite");
    mirror(k + 2 * MATRIX);
    struct rotation_file bad = good;
    bad.storage = "BFloat16Storage"; /* rounded so far that it is no rotation any more */
    write_rotations(k_path, &bad);
    assert_refused(&options, OSCAR_ERR_CALIBRATION, "is not orthogonal");
    bad.storage = "IntStorage";
    write_rotations(k_path, &bad);
    assert_refused(&options, OSCAR_ERR_UNSUPPORTED, "layer 0: a tensor of I32: expected floats");
    free(k);
}

static void files_that_do_not_go_together_are_refused(void **state) {
    (void)state;
    float *k = mirrors(LAYERS * HEADS);
    struct calib_options options = usual();
    struct rotation_file file = {.layers = LAYERS, .d = DIM, .rotations = k};
    write_rotations(k_path, &file);
    write_rotations(v_path, &file);
    options.kv_heads = 0;
    assert_refused(&options, OSCAR_ERR_INVALID, "how many KV heads there are: --kv-heads N");
    options = usual();
    options.fit.model = NULL;
    assert_refused(&options, OSCAR_ERR_INVALID, "of which model they are: --model NAME");
    options = usual();
    file.heads = HEADS;
    write_rotations(v_path, &file);
    options.kv_heads = 4;
    assert_refused(&options, OSCAR_ERR_INVALID, "v.pt is of a model with 2 KV heads, not 4");
    options = usual();
    file = (struct rotation_file){.layers = LAYERS - 1, .d = DIM, .rotations = k};
    write_rotations(v_path, &file);
    assert_refused(&options, OSCAR_ERR_NOT_FOUND, "layer 2 of 3 is missing");
    file = (struct rotation_file){.layers = LAYERS, .d = DIM / 2, .rotations = k};
    write_rotations(v_path, &file);
    assert_refused(&options, OSCAR_ERR_INVALID, "K has 64 dims, V 32");
    write_rotations(k_path, &file);
    assert_refused(&options, OSCAR_ERR_GEOMETRY, "head_dim");
    file = (struct rotation_file){.layers = LAYERS, .d = DIM, .rotations = k, .objective = "sst_r_h_pbr"};
    write_rotations(k_path, &file);
    assert_refused(&options, OSCAR_ERR_INVALID, "k.pt: objective sst_r_h_pbr is of V alone");
    file = (struct rotation_file){.layers = LAYERS, .d = DIM, .rotations = k, .model = "one", .kv_heads = HEADS};
    write_rotations(k_path, &file);
    file.model = "another";
    write_rotations(v_path, &file);
    assert_refused(&options, OSCAR_ERR_INVALID, "of model one, V's of another");
    free(k);
}

/* A file with this pickle; tensors are [64, 64] of a storage that is there. */
static void write_pickle(const char *path, const struct bytes *pickle) {
    struct archive archive = {0};
    struct bytes file;
    float *matrix = mirrors(1);
    bytes_add(archive_add(&archive, "x/data.pkl"), pickle->at, pickle->size);
    bytes_add(archive_add(&archive, "x/data/0"), matrix, MATRIX * sizeof(*matrix));
    archive_write(&archive, &file);
    file_write(path, file.at, file.size);
    bytes_clear(&file);
    archive_clear(&archive);
    free(matrix);
}

/* What `layers` holds, in turn: keys, and T for a rotation of `shape`, D for a dict without one. */
static void refuse_layers(const char *keys, const int64_t shape[2], int error, const char *reason) {
    struct calib_options options = usual();
    struct bytes pickle = {0};
    struct archive_tensor tensor = {.storage = "FloatStorage",
                                    .key = "0",
                                    .elements = MATRIX,
                                    .dims = 2,
                                    .shape = {shape[0], shape[1]},
                                    .stride = {1, 1}};
    pickle_op(&pickle, "}(");
    pickle_add_text(&pickle, "layers");
    pickle_op(&pickle, "}(");
    for (const char *at = keys; *at != '\0'; at += 2) {
        if (*at == '-')
            pickle_add_int(&pickle, -1);
        else if (*at == 'x')
            pickle_add_text(&pickle, "x");
        else if (*at == 'h')
            pickle_add_int(&pickle, 1000000000000000000);
        else if (*at == 't')
            pickle_add_text(&pickle, "0");
        else
            pickle_add_int(&pickle, *at - '0');
        pickle_op(&pickle, "}");
        if (at[1] == 'T') {
            pickle_add_text(&pickle, "rotation");
            pickle_add_tensor(&pickle, &tensor, false);
            pickle_op(&pickle, "s");
        }
    }
    pickle_op(&pickle, "uu.");
    write_pickle(k_path, &pickle);
    bytes_clear(&pickle);
    assert_refused(&options, error, reason);
}

static void layers_that_make_no_sense_are_refused(void **state) {
    (void)state;
    static const int64_t good[2] = {DIM, DIM}, flat[2] = {DIM, DIM - 1}, large[2] = {1024, 1024};
    refuse_layers("", good, OSCAR_ERR_CORRUPT, "no dict `layers`");
    refuse_layers("0D", good, OSCAR_ERR_CORRUPT, "layer 0 has no tensor `rotation`");
    refuse_layers("0T0T", good, OSCAR_ERR_CORRUPT, "layer 0 occurs twice");
    refuse_layers("0TtT", good, OSCAR_ERR_CORRUPT, "layer 0 occurs twice");
    refuse_layers("-T", good, OSCAR_ERR_CORRUPT, "a key that is no layer below 512");
    refuse_layers("xT", good, OSCAR_ERR_CORRUPT, "a key that is no layer below 512");
    refuse_layers("hT", good, OSCAR_ERR_CORRUPT, "a key that is no layer below 512");
    refuse_layers("0T", flat, OSCAR_ERR_CORRUPT, "layer 0: rotation is not [d, d] or [heads, d, d]");
    refuse_layers("0T", large, OSCAR_ERR_CORRUPT, "layer 0: rotation is not [d, d] or [heads, d, d]");
}

static void a_file_that_is_something_else_is_refused(void **state) {
    (void)state;
    struct calib_options options = usual();
    struct bytes pickle = {0};
    pickle_op(&pickle, "cos\nsystem\n");
    pickle_add_text(&pickle, "touch pwned");
    pickle_op(&pickle, "\x85R.");
    write_pickle(k_path, &pickle);
    assert_refused(&options, OSCAR_ERR_UNSUPPORTED, "k.pt: pickle byte 0: calls os.system: refused");
    bytes_clear(&pickle);
    pickle_op(&pickle, "].");
    write_pickle(k_path, &pickle);
    assert_refused(&options, OSCAR_ERR_CORRUPT, "no dict `layers`");
    bytes_clear(&pickle);
    pickle_op(&pickle, "}");
    pickle_add_text(&pickle, "format_version");
    pickle_op(&pickle, "K\3s.");
    write_pickle(k_path, &pickle);
    assert_refused(&options, OSCAR_ERR_UNSUPPORTED, "format_version 3: expected 1 or 2");
    bytes_clear(&pickle);
    file_write(k_path, pickle.at, pickle.size);
    assert_refused(&options, OSCAR_ERR_CORRUPT, "empty, or not a regular file");
    options.k_file = folder;
    assert_refused(&options, OSCAR_ERR_CORRUPT, "empty, or not a regular file");
    options.k_file = "/nowhere/k.pt";
    assert_refused(&options, OSCAR_ERR_NOT_FOUND, "/nowhere/k.pt: No such file");
}

static void refuse_folder(const struct calib_options *options, int error, const char *reason) {
    assert_refused(options, error, reason);
    assert_non_null(strstr(cause.text, folder));
}

static void a_folder_must_hold_one_file_of_each_side(void **state) {
    (void)state;
    float *k = mirrors(LAYERS);
    const char *argument = folder;
    struct calib_options options = usual();
    char path[4][64];
    static const char *const names[4] = {"k_rotation.pt", "v_rotation_sst_r_h_pbr.pt", "k_rotation_hadamard.pt",
                                         "k_rotation.pt.part"};
    for (unsigned i = 0; i < 4; i++)
        (void)snprintf(path[i], sizeof(path[i]), "%s/%s", folder, names[i]);
    options.k_file = options.v_file = NULL;
    options.arguments = &argument;
    options.argument_count = 1;
    (void)unlink(k_path);
    (void)unlink(v_path);
    refuse_folder(&options, OSCAR_ERR_NOT_FOUND, "holds no k_rotation*.pt");
    const struct rotation_file rotations = {.layers = LAYERS, .d = DIM, .rotations = k};
    write_rotations(path[0], &rotations);
    write_rotations(path[3], &rotations); /* of another name: it does not count */
    refuse_folder(&options, OSCAR_ERR_NOT_FOUND, "holds no v_rotation*.pt");
    write_rotations(path[1], &rotations);
    assert_int_equal(import(&options), OSCAR_OK);
    assert_holds(k, 1, k, 1);
    write_rotations(path[2], &rotations);
    refuse_folder(&options, OSCAR_ERR_INVALID, "holds k_rotation.pt and k_rotation_hadamard.pt: name the files");
    for (unsigned i = 0; i < 4; i++)
        assert_int_equal(unlink(path[i]), 0);
    free(k);
}

static int make_folder(void **state) {
    (void)state;
    if (mkdtemp(folder) == NULL)
        return -1;
    (void)snprintf(k_path, sizeof(k_path), "%s/k.pt", folder);
    (void)snprintf(v_path, sizeof(v_path), "%s/v.pt", folder);
    (void)snprintf(output, sizeof(output), "%s/output.safetensors", folder);
    return 0;
}

static int remove_folder(void **state) {
    (void)state;
    (void)unlink(k_path);
    (void)unlink(v_path);
    (void)unlink(output);
    return rmdir(folder); /* a refused import leaves nothing else behind */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(both_formats_are_imported_bit_for_bit),
        cmocka_unit_test(the_file_says_what_it_was_made_of),
        cmocka_unit_test(clip_ratios_become_ranks),
        cmocka_unit_test(one_file_can_be_of_both_sides),
        cmocka_unit_test(chosen_layers_are_numbered_anew),
        cmocka_unit_test(files_of_pytorch_itself_are_imported),
        cmocka_unit_test(a_folder_must_hold_one_file_of_each_side),
        cmocka_unit_test(what_is_no_rotation_is_refused),
        cmocka_unit_test(files_that_do_not_go_together_are_refused),
        cmocka_unit_test(layers_that_make_no_sense_are_refused),
        cmocka_unit_test(a_file_that_is_something_else_is_refused),
    };
    random_seed();
    return cmocka_run_group_tests_name("calib_import", tests, make_folder, remove_folder);
}
