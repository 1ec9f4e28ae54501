/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a benchmark found, for people (a table) or for programs (one JSON object a line:
 * {"name","value","unit","goal","holds"}, goal as text like ">= 5", null with `holds` where the row has none).
 *
 * Goals stand in one table, goals.c: a row whose name is in it is judged, whichever program reports it.
 */
#ifndef OSCAR_TESTS_BENCH_REPORT_H
#define OSCAR_TESTS_BENCH_REPORT_H

#include <stdbool.h>
#include <stddef.h>

enum report_comparison { REPORT_AT_LEAST, REPORT_AT_MOST };

struct report_goal {
    const char *name; /* of the row */
    enum report_comparison comparison;
    double value; /* in the row's unit */
};

extern const struct report_goal report_goals[]; /* ends with a NULL name */

struct report;

/* `title` heads the table. Rows are printed as they come, so that a long run shows where it is. */
struct report *report_new(const char *title, bool json);
/* A value that is not finite holds no goal and is null in JSON. */
void report_row(struct report *report, const char *name, double value, const char *unit);
/* What a report is about: a text in the place of the value, without unit and goal. In letters, digits and signs that JSON takes as
 * they are. */
void report_note(struct report *report, const char *name, const char *text);
/* Prints how many goals were missed and frees the report. Returns 0, the program's exit status: a missed goal is a result. */
int report_finish(struct report *report);

#endif
