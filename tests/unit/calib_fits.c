/* SPDX-License-Identifier: Apache-2.0 */
#include "calib_fits.h"

#include <stdio.h>
#include <unistd.h>

#include "calib/activations.h"

const struct calib_model fits_model = {
    .layers = 2, .query_heads = 4, .kv_heads = 2, .d = 64, .rope_base = 1e4, .bias = 6};

const char *fits_capture;

int fits_setup(void **unused) {
    (void)unused;
    static char path[192];
    (void)snprintf(path, sizeof(path), "%s", calib_path("whole.safetensors"));
    fits_capture = path;
    calib_write_capture(path, &fits_model,
                        &(struct calib_cut){.to = 2, .tokens = FITS_TOKENS, .type = OSCAR_TENSOR_BF16});
    return 0;
}

struct fit_options fits_defaults(void) {
    struct fit_options options = fit_defaults();
    options.threads = 1;
    options.context = FITS_TOKENS;
    return options;
}

int fits_try(const char *const *paths, size_t count, const struct fit_options *options, const char *output,
             struct oscar_cause *cause) {
    struct activations *activations = NULL;
    int r = activations_open(paths, count, &activations, cause);
    if (r == 0)
        r = fit_to_file(options, activations, output, cause);
    activations_free(activations);
    return r;
}

void fits_make(const char *const *paths, size_t count, const struct fit_options *options, const char *output) {
    struct oscar_cause cause = {0};
    if (fits_try(paths, count, options, output, &cause) != 0)
        fail_msg("%s", cause.text);
    assert_int_equal(access(output, R_OK), 0);
    char parts[256];
    (void)snprintf(parts, sizeof(parts), "%s.parts", output);
    assert_int_equal(access(parts, F_OK), -1);
}

struct calibration_file fits_open(const char *path) {
    struct oscar_cause cause = {0};
    struct calibration_file file = {0};
    if (calibration_file_open(path, true, &file, &cause) != 0)
        fail_msg("%s", cause.text);
    return file;
}

const char *fits_metadata(const struct calibration_file *file, const char *key) {
    return oscar_safetensors_metadata(file->calibration->file, key);
}

void fits_assert_same(const char *left, const char *right) {
    struct calibration_file a = fits_open(left);
    struct calibration_file b = fits_open(right);
    const char *name;
    size_t count = 0;
    for (; (name = oscar_safetensors_name(a.calibration->file, count)) != NULL; count++) {
        struct oscar_tensor_view x;
        struct oscar_tensor_view y;
        assert_int_equal(oscar_safetensors_find(a.calibration->file, name, &x), 0);
        assert_int_equal(oscar_safetensors_find(b.calibration->file, name, &y), 0);
        assert_int_equal(x.bytes, y.bytes);
        assert_memory_equal(x.data, y.data, x.bytes);
    }
    assert_null(oscar_safetensors_name(b.calibration->file, count));
    assert_true(count > 0);
    calibration_file_close(&a);
    calibration_file_close(&b);
}
