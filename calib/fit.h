/* SPDX-License-Identifier: Apache-2.0 */
/* Fits a capture, for the verb fit and for the baselines of a report. */
#ifndef OSCAR_CALIB_FIT_H
#define OSCAR_CALIB_FIT_H

#include "calib/activations.h"
#include "calib/options.h"

/* Writes the calibration file `path`, by way of `path`.parts. */
int fit_to_file(const struct fit_options *options, const struct activations *activations, const char *path,
                struct oscar_cause *cause);

/* The published method: a matrix, no centre, rounding to nearest, clip ratios .96 and .92; the rest as in `options`. */
struct fit_options fit_published(bool per_layer, const struct fit_options *options);

#endif
