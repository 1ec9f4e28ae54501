/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/report.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct report {
    bool json;
    unsigned judged, missed;
};

struct report *report_new(const char *title, bool json) {
    struct report *report = calloc(1, sizeof(*report));
    if (report == NULL) {
        fprintf(stderr, "%s: out of memory\n", title);
        exit(1);
    }
    report->json = json;
    if (!json)
        printf("%-44s %14s %-18s %s\n", title, "value", "unit", "goal");
    return report;
}

static const struct report_goal *goal_of(const char *name) {
    for (const struct report_goal *goal = report_goals; goal->name != NULL; goal++)
        if (strcmp(goal->name, name) == 0)
            return goal;
    return NULL;
}

static bool holds(const struct report_goal *goal, double value) {
    return goal->comparison == REPORT_AT_LEAST ? value >= goal->value : value <= goal->value; /* false for NaN */
}

/* Names, units and goals are the programs' own words: letters, digits and signs that JSON takes as they are. */
static void print_json(const char *name, double value, const char *unit, const char *goal, bool held) {
    printf("{\"name\":\"%s\",\"value\":", name);
    if (isfinite(value))
        printf("%.9g", value);
    else
        printf("null");
    printf(",\"unit\":\"%s\"", unit);
    if (goal != NULL)
        printf(",\"goal\":\"%s\",\"holds\":%s}\n", goal, held ? "true" : "false");
    else
        printf(",\"goal\":null,\"holds\":null}\n");
}

void report_row(struct report *report, const char *name, double value, const char *unit) {
    const struct report_goal *goal = goal_of(name);
    char text[48];
    bool held = false;
    if (goal != NULL) {
        held = isfinite(value) && holds(goal, value);
        snprintf(text, sizeof(text), "%s %g", goal->comparison == REPORT_AT_LEAST ? ">=" : "<=", goal->value);
        report->judged++;
        report->missed += held ? 0 : 1;
    }
    if (report->json)
        print_json(name, value, unit, goal != NULL ? text : NULL, held);
    else if (goal != NULL)
        printf("%-44s %14.6g %-18s %s %s\n", name, value, unit, text, held ? "holds" : "MISSED");
    else
        printf("%-44s %14.6g %s\n", name, value, unit);
    fflush(stdout);
}

void report_note(struct report *report, const char *name, const char *text) {
    if (report->json)
        printf("{\"name\":\"%s\",\"value\":\"%s\",\"unit\":\"\",\"goal\":null,\"holds\":null}\n", name, text);
    else
        printf("%-44s %s\n", name, text);
    fflush(stdout);
}

int report_finish(struct report *report) {
    if (!report->json && report->judged > 0)
        printf("%u of %u goals hold\n", report->judged - report->missed, report->judged);
    free(report);
    return 0;
}
