/* SPDX-License-Identifier: Apache-2.0 */
/* How values are shown, to programs and to people. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/ctl/ctl.h"
#include "proto/cleanup.h"

int ctl_print_json(json_t *value, struct oscar_cause *cause) {
    if (value == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the output");
    _cleanup_free_ char *line = json_dumps(value, JSON_COMPACT);
    json_decref(value);
    if (line == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the output");
    /* Line by line: who reads events wants them when they happen. */
    if (puts(line) < 0 || fflush(stdout) != 0)
        return oscar_fail(cause, OSCAR_ERR_IO, "writing the output: %m");
    return 0;
}

struct scale {
    const char *unit;
    double factor; /* from one name to the next */
    const char *names[6];
};

static const struct scale scales[] = {
    {"bytes", 1024, {"B", "KiB", "MiB", "GiB", "TiB", "PiB"}},
    {"ns", 1000, {"ns", "us", "ms", "s", NULL, NULL}},
};

static void format_count(uint64_t value, char ret[CTL_VALUE_BYTES]) {
    char digits[24];
    int length = snprintf(digits, sizeof(digits), "%" PRIu64, value);
    for (int i = 0; i < length; i++) {
        if (i > 0 && (length - i) % 3 == 0)
            *ret++ = ',';
        *ret++ = digits[i];
    }
    *ret = '\0';
}

void ctl_format_value(uint64_t value, const char *unit, char ret[CTL_VALUE_BYTES]) {
    for (size_t i = 0; i < sizeof(scales) / sizeof(scales[0]); i++) {
        const struct scale *scale = &scales[i];
        if (strcmp(unit, scale->unit) != 0)
            continue;
        double scaled = (double)value;
        size_t step = 0;
        while (scaled >= scale->factor && step + 1 < sizeof(scale->names) / sizeof(scale->names[0]) &&
               scale->names[step + 1] != NULL) {
            scaled /= scale->factor;
            step++;
        }
        (void)snprintf(ret, CTL_VALUE_BYTES, step == 0 ? "%.0f %s" : "%.1f %s", scaled, scale->names[step]);
        return;
    }
    format_count(value, ret);
}
