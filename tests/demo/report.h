/* SPDX-License-Identifier: Apache-2.0 */
/* The demo's figures for people and for programs, and the verdict. */
#ifndef OSCAR_TESTS_DEMO_REPORT_H
#define OSCAR_TESTS_DEMO_REPORT_H

#include <stdbool.h>

#include "tests/demo/scene.h"
#include "tests/support/replay.h"

void report_print(const struct scene *scene, const struct replay *replay);
void report_print_json(const struct scene *scene); /* one line */
/* Whether everything went as it must; what did not is reported on standard error. */
bool report_verdict(const struct scene *scene);

#endif
