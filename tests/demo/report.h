/* SPDX-License-Identifier: Apache-2.0 */
/* The demo's figures for people and for programs, and the verdict. */
#ifndef OSCAR_TESTS_DEMO_REPORT_H
#define OSCAR_TESTS_DEMO_REPORT_H

#include <stdbool.h>

#include "tests/demo/scene.h"
#include "tests/support/replay.h"

/* The same story twice: with a calibration that was fitted to the model, and with the default, which needs no file. */
struct result {
    struct scene fitted, hadamard;
    int64_t calibration_bytes; /* of the fitted one's file */
};

void report_print(const struct result *result, const struct replay *replay);
void report_print_json(const struct result *result); /* one line */
/* Whether everything went as it must; what did not is reported on standard error. */
bool report_verdict(const struct result *result);

#endif
