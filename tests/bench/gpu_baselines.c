/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/gpu_baselines.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/bench/gpu_bench.h"
#include "tests/support/worker_process.h"

#define PATIENCE_MS 300000
#define SHAPES (sizeof(shapes) / sizeof(shapes[0]))

/* Qwen3-8B at the batches and contexts of the goals, and other models' heads. */
static struct shape {
    uint32_t batch, context, query_heads, kv_heads, head_dim;
    double ms; /* of SDPA */
} shapes[] = {
    {1, 32768, 32, 8, 128, NAN},  {1, 102400, 32, 8, 128, NAN},  {8, 102400, 32, 8, 128, NAN},
    {32, 32768, 32, 8, 128, NAN}, {32, 102400, 32, 8, 128, NAN}, {8, 102400, 64, 8, 128, NAN},
    {32, 102400, 9, 3, 64, NAN},  {32, 102400, 8, 1, 256, NAN},
};

double gpu_baseline_ms(uint32_t batch, uint32_t context, uint32_t query_heads, uint32_t kv_heads, uint32_t head_dim) {
    for (size_t i = 0; i < SHAPES; i++) {
        const struct shape *shape = &shapes[i];
        if (shape->batch == batch && shape->context == context && shape->query_heads == query_heads &&
            shape->kv_heads == kv_heads && shape->head_dim == head_dim)
            return shape->ms;
    }
    return NAN;
}

static void shape_name(const struct shape *shape, const char *prefix, char *ret_name, size_t size) {
    snprintf(ret_name, size, "%s_b%u_c%u_h%u_%u_d%u", prefix, shape->batch, shape->context, shape->query_heads,
             shape->kv_heads, shape->head_dim);
}

/* A line of the Python program: a row, and the time of the shape that its name ends with. */
static void take_line(struct report *report, const char *line) {
    json_t *row = json_loads(line, 0, NULL);
    const char *name = json_string_value(json_object_get(row, "name"));
    const char *by = json_string_value(json_object_get(row, "by"));
    const json_t *value = json_object_get(row, "value");
    if (name == NULL || by == NULL || !json_is_number(value)) {
        fprintf(stderr, "gpu_bench: not a baseline: %s\n", line);
        exit(1);
    }
    report_row(report, name, json_number_value(value), "ms");
    char text[128];
    snprintf(text, sizeof(text), "%s_by", name);
    report_note(report, text, by);
    for (size_t i = 0; i < SHAPES; i++) {
        shape_name(&shapes[i], "sdpa_bf16", text, sizeof(text));
        if (strcmp(text, name) == 0)
            shapes[i].ms = json_number_value(value);
    }
    json_decref(row);
}

void gpu_baselines_measure(struct report *report) {
    char shape_text[SHAPES][64], line[LINE_BYTES];
    const char *argv[4 + SHAPES] = {"/usr/bin/env", "python3", BENCH_BASELINES};
    for (size_t i = 0; i < SHAPES; i++) {
        snprintf(shape_text[i], sizeof(shape_text[i]), "%ux%ux%ux%ux%u", shapes[i].batch, shapes[i].context,
                 shapes[i].query_heads, shapes[i].kv_heads, shapes[i].head_dim);
        argv[3 + i] = shape_text[i];
    }
    struct worker_process python;
    int status = -1, r = worker_start(&python, "gpu_baselines.py", argv);
    while (r == 0 && (r = line_hear(&python.pipe, line, sizeof(line), PATIENCE_MS)) == 0)
        take_line(report, line);
    (void)worker_wait(&python, PATIENCE_MS, &status);
    worker_end(&python);
    if (status != 0)
        fprintf(stderr, "gpu_bench: no baselines, or not all: gpu_baselines.py ended with status %#x\n",
                (unsigned)status);
    for (size_t i = 0; i < SHAPES; i++) {
        shape_name(&shapes[i], "sdpa_bf16", line, sizeof(line));
        if (isnan(shapes[i].ms))
            report_row(report, line, NAN, "ms");
    }
}
