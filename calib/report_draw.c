/* SPDX-License-Identifier: Apache-2.0 */
/* A report as a picture: one panel a figure, layers from left to right, the figure on a logarithmic scale. */
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>

#include "calib/report.h"

#define WIDTH 1080.0
#define PANEL_HEIGHT 260.0
#define LEFT 70.0
#define RIGHT 150.0 /* for the names */
#define TOP 46.0
#define GAP 30.0

static const char *const colours[] = {"#7f7f7f", "#d62728", "#ff7f0e", "#bcbd22", "#9467bd",
                                      "#1f77b4", "#8c564b", "#e377c2", "#17becf", "#000000"};
#define COLOURS (sizeof(colours) / sizeof(colours[0]))
#define OURS "#2ca02c"

/* The decades that a panel spans; 0 and what lies far below all else is drawn on the floor. */
struct scale {
    int low, high;
};

static struct scale find_scale(const struct report *report, enum figure figure) {
    double least = INFINITY;
    double most = 0;
    for (size_t i = 0; i < report->layers; i++)
        for (size_t m = 0; m < report->methods; m++) {
            double value = report_value(report, i, m, figure);
            most = value > most ? value : most;
            least = value > 0 && value < least ? value : least;
        }
    if (!(most > 0))
        return (struct scale){-1, 0};
    struct scale scale = {(int)floor(log10(least)), (int)ceil(log10(most))};
    if (scale.low >= scale.high)
        scale.low = scale.high - 1;
    return scale;
}

static double x_of(const struct report *report, size_t layer) {
    double width = WIDTH - LEFT - RIGHT;
    return report->layers == 1 ? LEFT + width / 2
                               : LEFT + 14 + (width - 28) * (double)layer / (double)(report->layers - 1);
}

static double y_of(double top, struct scale scale, double value) {
    double at = value > 0 ? (log10(value) - scale.low) / (scale.high - scale.low) : 0;
    at = at < 0 ? 0 : at;
    return top + PANEL_HEIGHT * (1 - at);
}

static const char *colour(const struct report *report, size_t method) {
    return method + 1 == report->methods ? OURS : colours[method % COLOURS];
}

static void draw_axes(FILE *file, const struct report *report, double top, struct scale scale) {
    for (int decade = scale.low; decade <= scale.high; decade++) {
        double y = top + PANEL_HEIGHT * (1 - (double)(decade - scale.low) / (scale.high - scale.low));
        (void)fprintf(file, "<line x1=\"%.0f\" x2=\"%.0f\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\"/>\n", LEFT,
                      WIDTH - RIGHT, y, y);
        (void)fprintf(file,
                      "<text x=\"%.0f\" y=\"%.1f\" text-anchor=\"end\">10<tspan dy=\"-5\" "
                      "font-size=\"9\">%d</tspan></text>\n",
                      LEFT - 8, y + 4, decade);
    }
    size_t step = report->layers / 16 + 1;
    for (size_t i = 0; i < report->layers; i += step)
        (void)fprintf(file, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%" PRIu32 "</text>\n", x_of(report, i),
                      top + PANEL_HEIGHT + 16, report->layer[i]);
}

static void draw_method(FILE *file, const struct report *report, double top, struct scale scale, enum figure figure,
                        size_t method) {
    (void)fprintf(file, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"%s\" points=\"", colour(report, method),
                  method + 1 == report->methods ? "2.5" : "1.5");
    for (size_t i = 0; i < report->layers; i++)
        (void)fprintf(file, "%.1f,%.1f ", x_of(report, i), y_of(top, scale, report_value(report, i, method, figure)));
    (void)fprintf(file, "\"/>\n");
    for (size_t i = 0; i < report->layers; i++)
        (void)fprintf(file, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"2.5\" fill=\"%s\"/>\n", x_of(report, i),
                      y_of(top, scale, report_value(report, i, method, figure)), colour(report, method));
}

static void put_xml(FILE *file, const char *text) {
    for (const unsigned char *at = (const unsigned char *)text; *at != '\0'; at++) {
        if (*at == '<' || *at == '&' || *at < 0x20)
            (void)fprintf(file, "&#%d;", *at < 0x20 ? ' ' : *at);
        else
            (void)fputc(*at, file);
    }
}

static void draw_panel(FILE *file, const struct report *report, double top, enum figure figure) {
    struct scale scale = find_scale(report, figure);
    (void)fprintf(file, "<text x=\"%.0f\" y=\"%.1f\" font-weight=\"bold\">%s</text>\n", LEFT, top - 12,
                  figure_texts[figure].title);
    draw_axes(file, report, top, scale);
    for (size_t m = 0; m < report->methods; m++) {
        double y = top + 12 + 22 * (double)m;
        draw_method(file, report, top, scale, figure, m);
        (void)fprintf(file, "<circle cx=\"%.0f\" cy=\"%.1f\" r=\"5\" fill=\"%s\"/><text x=\"%.0f\" y=\"%.1f\">",
                      WIDTH - RIGHT + 18, y, colour(report, m), WIDTH - RIGHT + 30, y + 4);
        put_xml(file, report->method[m]);
        (void)fprintf(file, "</text>\n");
    }
}

int report_draw(const struct report *report, const char *path, struct oscar_cause *cause) {
    const double panel = TOP + PANEL_HEIGHT + GAP;
    FILE *file = fopen(path, "we");
    if (file == NULL)
        return oscar_fail(cause, OSCAR_ERR_IO, "cannot write %s: %m", path);
    (void)fprintf(file,
                  "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" font-family=\"sans-serif\" "
                  "font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n<text x=\"%.0f\" "
                  "y=\"20\">",
                  WIDTH, FIGURES * panel + 40, LEFT);
    if (report->model != NULL)
        put_xml(file, report->model);
    (void)fprintf(file, "</text>\n");
    for (enum figure figure = 0; figure < FIGURES; figure++)
        draw_panel(file, report, 16 + TOP + panel * figure, figure);
    (void)fprintf(file, "<text x=\"%.0f\" y=\"%.1f\" text-anchor=\"middle\">layer</text>\n</svg>\n",
                  (LEFT + WIDTH - RIGHT) / 2, FIGURES * panel + 28);
    bool good = ferror(file) == 0;
    if (fclose(file) != 0 || !good)
        return oscar_fail(cause, OSCAR_ERR_IO, "cannot write %s: %m", path);
    return 0;
}
