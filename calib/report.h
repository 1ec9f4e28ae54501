/* SPDX-License-Identifier: Apache-2.0 */
/* The figures of a report, and the three forms in which it is shown. */
#ifndef OSCAR_CALIB_REPORT_H
#define OSCAR_CALIB_REPORT_H

#include <stddef.h>
#include <stdint.h>

#include "proto/cause.h"

/* The three figures of a (method, layer). */
enum figure { FIGURE_LOGIT, FIGURE_OUTPUT, FIGURE_KL, FIGURES };

struct figure_text {
    const char *title, *key;
};
extern const struct figure_text figure_texts[FIGURES];

struct report {
    const char *model; /* by the capture, or NULL */
    const char *const *method;
    size_t methods;
    const uint32_t *layer;
    size_t layers;
    double *value; /* [layers + 1][methods][FIGURES]; the last: means over the layers */
};

static inline double report_value(const struct report *report, size_t layer, size_t method, enum figure figure) {
    return report->value[(layer * report->methods + method) * FIGURES + figure];
}

void report_print(const struct report *report);
void report_print_json(const struct report *report);
int report_draw(const struct report *report, const char *path, struct oscar_cause *cause);

#endif
