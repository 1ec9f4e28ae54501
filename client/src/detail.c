/* SPDX-License-Identifier: Apache-2.0 */
#include "client/src/detail.h"

#include "oscar/oscar.h"

static _Thread_local struct oscar_cause detail;

struct oscar_cause *oscar_detail(void) {
    return &detail;
}

const char *oscar_error_detail(void) { return detail.text; }

const char *oscar_version(void) { return OSCAR_VERSION_STRING; }
