/* SPDX-License-Identifier: Apache-2.0 */
/* A report as tables for people and as JSON lines for programs. */
#include <inttypes.h>
#include <stdio.h>

#include "calib/print.h"
#include "calib/report.h"

void report_print(const struct report *report) {
    for (enum figure figure = 0; figure < FIGURES; figure++) {
        printf("%s%s\n%5s", figure == 0 ? "" : "\n", figure_texts[figure].title, "layer");
        for (size_t m = 0; m < report->methods; m++)
            printf(" %12.12s", report->method[m]);
        printf("\n");
        for (size_t i = 0; i <= report->layers; i++) {
            if (i < report->layers)
                printf("%5" PRIu32, report->layer[i]);
            else
                printf("%5s", "mean");
            for (size_t m = 0; m < report->methods; m++)
                printf(" %12.3g", report_value(report, i, m, figure));
            printf("\n");
        }
    }
}

void report_print_json(const struct report *report) {
    for (size_t i = 0; i <= report->layers; i++)
        for (size_t m = 0; m < report->methods; m++) {
            printf("{\"method\":");
            print_json_string(stdout, report->method[m]);
            if (i < report->layers)
                printf(",\"layer\":%" PRIu32, report->layer[i]);
            else
                printf(",\"layer\":null");
            for (enum figure figure = 0; figure < FIGURES; figure++)
                printf(",\"%s\":%.6g", figure_texts[figure].key, report_value(report, i, m, figure));
            printf("}\n");
        }
}
