/* SPDX-License-Identifier: Apache-2.0 */
/* The report, on a layer of a real model with K biases: its figures, its three forms, and what it refuses. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "calib/options.h"
#include "calib/parallel.h"
#include "calib_fixture.h"
#include "tests/support/files.h"

#define REAL OSCAR_TEST_DATA "/qwen2.5-coder-0.5b/"

static const char *const capture = REAL "capture.safetensors";

/* What a report prints; malloced. */
static char *run(const struct calib_options *options) {
    struct oscar_cause cause = {0};
    const char *path = calib_path("printed");
    size_t size;
    (void)fflush(stdout);
    int saved = dup(STDOUT_FILENO);
    assert_true(saved >= 0);
    assert_non_null(freopen(path, "we", stdout));
    int r = calib_report(options, &cause);
    (void)fflush(stdout);
    assert_true(dup2(saved, STDOUT_FILENO) >= 0);
    (void)close(saved);
    if (r != 0)
        fail_msg("%s", cause.text);
    char *text = (char *)file_read(path, &size);
    return text;
}

static struct calib_options judge(void) {
    struct calib_options options = {.fit = fit_defaults(),
                                    .calibration = REAL "ours.safetensors",
                                    .arguments = &capture,
                                    .argument_count = 1,
                                    .json = true};
    options.fit.threads = 1;
    return options;
}

/* A figure of a line of JSON. */
static double figure(const char *text, const char *method, const char *layer, const char *key) {
    char line[96];
    (void)snprintf(line, sizeof(line), "{\"method\":\"%s\",\"layer\":%s,", method, layer);
    const char *at = strstr(text, line);
    if (at == NULL)
        fail_msg("no %s", line);
    (void)snprintf(line, sizeof(line), "\"%s\":", key);
    at = strstr(at, line);
    assert_non_null(at);
    return strtod(at + strlen(line), NULL);
}

static void ours_is_a_tenth_of_the_published_methods_error(void **unused) {
    (void)unused;
    struct calib_options options = judge();
    options.baselines[0] = "oscar-head=" REAL "oscar-head.safetensors";
    options.baselines_given = 1;
    char *text = run(&options);
    static const char *const keys[] = {"logit_error", "output_error", "kl"};
    for (size_t i = 0; i < 3; i++) {
        double dense = figure(text, "bf16", "8", keys[i]);
        double ours = figure(text, "ours", "8", keys[i]);
        double published = figure(text, "oscar-head", "8", keys[i]);
        printf("%s: BF16 %g, ours %g, published %g, hadamard %g, naive %g\n", keys[i], dense, ours, published,
               figure(text, "hadamard", "8", keys[i]), figure(text, "naive", "8", keys[i]));
        assert_true(dense > 0);
        assert_true(ours > 0 && ours <= 0.1 * published);
        assert_true(figure(text, "ours", "null", keys[i]) == ours); /* the mean of one layer */
    }
    assert_true(figure(text, "ours", "8", "kl") < 0.01);
    free(text);
}

static void the_published_method_can_be_fitted_for_it(void **unused) {
    (void)unused;
    struct calib_options options = judge();
    options.fit_on = capture; /* on the same text: its best case */
    char *text = run(&options);
    assert_true(figure(text, "ours", "8", "output_error") <= 0.1 * figure(text, "oscar-head", "8", "output_error"));
    assert_true(figure(text, "ours", "8", "output_error") <= 0.1 * figure(text, "oscar-layer", "8", "output_error"));
    free(text);
}

static void it_is_a_table_and_a_picture_too(void **unused) {
    (void)unused;
    struct calib_options options = judge();
    size_t size;
    options.json = false;
    options.svg = calib_path("report.svg");
    char *text = run(&options);
    assert_non_null(strstr(text, "error of the attention output"));
    assert_non_null(strstr(text, "layer         bf16        naive     hadamard         ours\n"));
    free(text);
    char *picture = (char *)file_read(options.svg, &size);
    assert_memory_equal(picture, "<svg ", 5);
    assert_non_null(strstr(picture, "Qwen2.5"));
    assert_non_null(strstr(picture, ">ours</text>"));
    assert_null(strstr(picture, "nan"));
    assert_null(strstr(picture, "inf"));
    assert_non_null(strstr(picture, "</svg>\n"));
    free(picture);
}

static void assert_refused(const struct calib_options *options, int error, const char *words) {
    struct oscar_cause cause = {0};
    int r = calib_report(options, &cause);
    if (r != error || strstr(cause.text, words) == NULL)
        fail_msg("found %d \"%s\", expected %d \"%s\"", r, cause.text, error, words);
}

static void what_does_not_belong_together_is_named(void **unused) {
    (void)unused;
    const struct calib_model wide = {.layers = 1, .query_heads = 4, .kv_heads = 2, .d = 128, .rope_base = 1e4};
    const struct calib_model narrow = {.layers = 1, .query_heads = 4, .kv_heads = 2, .d = 64, .rope_base = 1e4};
    struct calib_options options = judge();
    const char *path = calib_path("other.safetensors");
    options.arguments = &path;
    calib_write_capture(path, &wide, &(struct calib_cut){.to = 1, .tokens = 400, .type = OSCAR_TENSOR_BF16});
    assert_refused(&options, OSCAR_ERR_GEOMETRY, "2 KV heads of 64 dims, the capture has 2 of 128");
    options = judge();
    options.calibration = capture;
    assert_refused(&options, OSCAR_ERR_CALIBRATION, "oscar.format is missing");
    options = judge();
    options.arguments = &path;
    calib_write_capture(path, &narrow, &(struct calib_cut){.to = 1, .tokens = 400, .type = OSCAR_TENSOR_BF16});
    assert_refused(&options, OSCAR_ERR_IDENTITY,
                   "is made for the model Qwen2.5 Coder 0.5B Instruct AWQ, the capture is of made \"up\"");
    options.fit.model = "Qwen2.5 Coder 0.5B Instruct AWQ";
    assert_refused(&options, OSCAR_ERR_NOT_FOUND, "none of the file's layers");
    options = judge();
    options.svg = "/nowhere/report.svg";
    assert_refused(&options, OSCAR_ERR_IO, "cannot write /nowhere/report.svg");
    const struct calib_options plain = {
        .output = calib_path("plain"), .hadamard_layers = 1, .kv_heads = 2, .hadamard_head_dim = 64};
    struct oscar_cause cause = {0};
    assert_int_equal(calib_hadamard(&plain, &cause), 0);
    options = judge();
    options.calibration = plain.output;
    options.arguments = &path;
    calib_write_capture(path, &narrow, &(struct calib_cut){.to = 1, .tokens = 383, .type = OSCAR_TENSOR_BF16});
    assert_refused(&options, OSCAR_ERR_INVALID, "no sequence is long enough");
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(ours_is_a_tenth_of_the_published_methods_error),
        cmocka_unit_test(the_published_method_can_be_fitted_for_it),
        cmocka_unit_test(it_is_a_table_and_a_picture_too),
        cmocka_unit_test(what_does_not_belong_together_is_named),
    };
    calib_seed();
    parallel_quiet_blas();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
