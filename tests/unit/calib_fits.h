/* SPDX-License-Identifier: Apache-2.0 */
/* Whole fits of one small made-up model. */
#ifndef OSCAR_TESTS_CALIB_FITS_H
#define OSCAR_TESTS_CALIB_FITS_H

#include "calib/calibration_file.h"
#include "calib/fit.h"
#include "calib_fixture.h"

#define FITS_TOKENS 640U

extern const struct calib_model fits_model;
extern const char *fits_capture; /* of all of the model */
int fits_setup(void **unused);   /* cmocka's, for a group: writes the capture */

/* For one thread, and sequences of FITS_TOKENS. */
struct fit_options fits_defaults(void);
int fits_try(const char *const *paths, size_t count, const struct fit_options *options, const char *output,
             struct oscar_cause *cause);
/* It succeeds, and leaves nothing beside its file. */
void fits_make(const char *const *paths, size_t count, const struct fit_options *options, const char *output);

struct calibration_file fits_open(const char *path);
const char *fits_metadata(const struct calibration_file *file, const char *key);
/* All tensors are, whatever the metadata say. */
void fits_assert_same(const char *left, const char *right);

#endif
