/* SPDX-License-Identifier: Apache-2.0 */
/* A fit made again gives the same file, and one that was interrupted is taken up. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "calib/parallel.h"
#include "calib_fits.h"
#include "tests/support/files.h"

static void the_same_input_gives_the_same_bytes(void **unused) {
    (void)unused;
    struct fit_options options = fits_defaults();
    fits_make(&fits_capture, 1, &options, calib_path("once"));
    options.threads = 5;
    fits_make(&fits_capture, 1, &options, calib_path("twice"));
    file_assert_same(calib_path("once"), calib_path("twice"));
}

static void the_shards_of_a_capture_do_not_show(void **unused) {
    (void)unused;
    static const struct calib_cut cuts[] = {
        {.from = 1, .to = 2, .first = 0, .tokens = 100, .type = OSCAR_TENSOR_F32},
        {.from = 0, .to = 1, .first = 0, .tokens = 501, .type = OSCAR_TENSOR_BF16},
        {.from = 1, .to = 2, .first = 100, .tokens = FITS_TOKENS - 100, .type = OSCAR_TENSOR_BF16},
        {.from = 0, .to = 1, .first = 501, .tokens = FITS_TOKENS - 501, .type = OSCAR_TENSOR_F32},
    };
    const struct fit_options options = fits_defaults();
    const char *folder = calib_path("shards");
    assert_int_equal(mkdir(folder, 0777), 0);
    for (size_t i = 0; i < sizeof(cuts) / sizeof(cuts[0]); i++) {
        char name[48];
        (void)snprintf(name, sizeof(name), "shards/%zu.safetensors", i);
        calib_write_capture(calib_path(name), &fits_model, &cuts[i]);
    }
    fits_make(&folder, 1, &options, calib_path("sharded"));
    fits_make(&fits_capture, 1, &options, calib_path("unsharded"));
    fits_assert_same(calib_path("sharded"), calib_path("unsharded"));
}

/* Writes `to` over K's ranks of the two heads, which are `from`. */
static void replace_ranks(const char *path, int32_t from, int32_t to) {
    size_t size;
    uint8_t *bytes = file_read(path, &size);
    uint8_t *at = memmem(bytes, size, (const int32_t[]){from, from}, 2 * sizeof(from));
    assert_non_null(at);
    memcpy(at, (const int32_t[]){to, to}, 2 * sizeof(to));
    file_write(path, bytes, size);
    free(bytes);
}

static void an_interrupted_fit_is_taken_up(void **unused) {
    (void)unused;
    struct oscar_cause cause = {0};
    const struct fit_options base = fits_defaults();
    struct fit_options options = fit_published(false, &base);
    const char *output = calib_path("resumed");
    options.clip_k = 0.9; /* rank 57 */
    fits_make(&fits_capture, 1, &options, calib_path("uninterrupted"));
    /* What is in the way of layer 1's part stands for the interruption. */
    assert_int_equal(mkdir(calib_path("resumed.parts"), 0777), 0);
    assert_int_equal(mkdir(calib_path("resumed.parts/layer-1.safetensors"), 0777), 0);
    assert_int_equal(mkdir(calib_path("resumed.parts/layer-1.safetensors/full"), 0777), 0);
    assert_int_equal(fits_try(&fits_capture, 1, &options, output, &cause), OSCAR_ERR_IO);
    assert_int_equal(access(output, F_OK), -1);
    assert_int_equal(access(calib_path("resumed.parts/layer-0.safetensors"), R_OK), 0);
    assert_int_equal(rmdir(calib_path("resumed.parts/layer-1.safetensors/full")), 0);
    assert_int_equal(rmdir(calib_path("resumed.parts/layer-1.safetensors")), 0);
    /* A mark in the part shows that it is the one that is taken. */
    replace_ranks(calib_path("resumed.parts/layer-0.safetensors"), 57, 31);
    fits_make(&fits_capture, 1, &options, output);
    struct calibration_file file = fits_open(output);
    assert_int_equal(oscar_calibration_head(file.calibration, 0, 0)->rank_k, 31);
    assert_int_equal(oscar_calibration_head(file.calibration, 1, 0)->rank_k, 57);
    calibration_file_close(&file);
    fits_make(&fits_capture, 1, &options, output);
    file_assert_same(output, calib_path("uninterrupted"));
}

/* What a killed fit leaves half written, and parts of layers that are no longer asked for, go with the others. */
static void nothing_is_left_of_a_killed_fit(void **unused) {
    (void)unused;
    const struct fit_options base = fits_defaults();
    const struct fit_options options = fit_published(false, &base);
    static const char *const names[] = {"killed.parts/layer-1.safetensors.k1LLed", "killed.parts/layer-7.safetensors"};
    assert_int_equal(mkdir(calib_path("killed.parts"), 0777), 0);
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        file_write(calib_path(names[i]), NULL, 0);
    fits_make(&fits_capture, 1, &options, calib_path("killed"));
}

static void a_part_of_other_options_or_other_input_is_made_anew(void **unused) {
    (void)unused;
    struct oscar_cause cause = {0};
    const struct fit_options base = fits_defaults();
    struct fit_options options = fit_published(false, &base);
    const char *other = calib_path("other.safetensors");
    calib_write_capture(other, &fits_model, &(struct calib_cut){.to = 2, .tokens = 600, .type = OSCAR_TENSOR_BF16});
    for (unsigned i = 0; i < 2; i++) {
        const char *output = calib_path("anew");
        assert_int_equal(mkdir(calib_path("anew.parts"), 0777), 0);
        assert_int_equal(mkdir(calib_path("anew.parts/layer-1.safetensors"), 0777), 0);
        assert_int_equal(mkdir(calib_path("anew.parts/layer-1.safetensors/full"), 0777), 0);
        options.clip_k = 0.96;
        assert_int_equal(fits_try(&fits_capture, 1, &options, output, &cause), OSCAR_ERR_IO);
        assert_int_equal(access(calib_path("anew.parts/layer-0.safetensors"), R_OK), 0);
        assert_int_equal(rmdir(calib_path("anew.parts/layer-1.safetensors/full")), 0);
        assert_int_equal(rmdir(calib_path("anew.parts/layer-1.safetensors")), 0);
        replace_ranks(calib_path("anew.parts/layer-0.safetensors"), 61, 31);
        options.clip_k = i == 0 ? 0.9 : 0.96;
        fits_make(i == 0 ? &fits_capture : &other, 1, &options, output);
        struct calibration_file file = fits_open(output);
        assert_int_equal(oscar_calibration_head(file.calibration, 0, 0)->rank_k, i == 0 ? 57 : 61);
        calibration_file_close(&file);
    }
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_same_input_gives_the_same_bytes),
        cmocka_unit_test(the_shards_of_a_capture_do_not_show),
        cmocka_unit_test(an_interrupted_fit_is_taken_up),
        cmocka_unit_test(nothing_is_left_of_a_killed_fit),
        cmocka_unit_test(a_part_of_other_options_or_other_input_is_made_anew),
    };
    calib_seed();
    parallel_quiet_blas();
    return cmocka_run_group_tests(tests, fits_setup, NULL);
}
