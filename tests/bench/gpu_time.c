/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdlib.h>

#include "tests/bench/gpu_bench.h"
#include "tests/bench/samples.h"

#define WARM_RUNS 4U
#define MIN_RUNS 12U
#define MAX_RUNS 200U
#define RUNS_MS 120.0 /* of one measurement: longer ones heat the card up to its power limit */
#define MAX_VARIANTS 64U

struct timed {
    struct gpu_bench *bench;
    gpu_work *work;
    void *argument;
    uint32_t variants;
    CUgraphExec graph[MAX_VARIANTS]; /* NULL: the work is enqueued anew each time */
    CUevent begin[MAX_RUNS], end[MAX_RUNS];
};

static void capture(struct timed *timed) {
    const struct cuda_driver *driver = timed->bench->device->driver;
    for (uint32_t i = 0; i < timed->variants; i++) {
        CUgraph graph;
        gpu_must_driver(driver->cuStreamBeginCapture(timed->bench->native, CU_STREAM_CAPTURE_MODE_RELAXED), "capture");
        gpu_must(timed->work(timed->bench->stream, timed->argument, i), "captured work");
        gpu_must_driver(driver->cuStreamEndCapture(timed->bench->native, &graph), "end of a capture");
        gpu_must_driver(driver->cuGraphInstantiate(&timed->graph[i], graph, 0), "graph");
        gpu_must_driver(driver->cuGraphDestroy(graph), "graph");
    }
}

static void enqueue(struct timed *timed, uint32_t run) {
    uint32_t variant = run % timed->variants;
    if (timed->graph[variant] != NULL)
        gpu_must_driver(timed->bench->device->driver->cuGraphLaunch(timed->graph[variant], timed->bench->native),
                        "launch of a graph");
    else
        gpu_must(timed->work(timed->bench->stream, timed->argument, variant), "timed work");
}

static double timed_ms(const struct timed *timed, uint32_t run) {
    float ms = 0;
    gpu_must_driver(timed->bench->device->driver->cuEventElapsedTime(&ms, timed->begin[run], timed->end[run]), "time");
    return (double)ms;
}

/* All runs are enqueued before the first one is waited for: the device goes from one to the next. */
static void run_all(struct timed *timed, uint32_t first, uint32_t count) {
    const struct cuda_driver *driver = timed->bench->device->driver;
    for (uint32_t run = 0; run < count; run++) {
        gpu_must_driver(driver->cuEventRecord(timed->begin[run], timed->bench->native), "event");
        enqueue(timed, first + run);
        gpu_must_driver(driver->cuEventRecord(timed->end[run], timed->bench->native), "event");
    }
    gpu_wait(timed->bench);
}

static double median_ms(struct timed *timed) {
    const struct cuda_driver *driver = timed->bench->device->driver;
    struct samples samples;
    for (uint32_t run = 0; run < MAX_RUNS; run++) {
        gpu_must_driver(driver->cuEventCreate(&timed->begin[run], CU_EVENT_DEFAULT), "event");
        gpu_must_driver(driver->cuEventCreate(&timed->end[run], CU_EVENT_DEFAULT), "event");
    }
    run_all(timed, 0, WARM_RUNS);
    double wanted = RUNS_MS / fmax(timed_ms(timed, WARM_RUNS - 1), 1e-3);
    uint32_t runs = (uint32_t)fmin(fmax(wanted, MIN_RUNS), MAX_RUNS);
    run_all(timed, WARM_RUNS, runs);
    samples_init(&samples, runs);
    for (uint32_t run = 0; run < runs; run++)
        samples_add(&samples, (uint64_t)(timed_ms(timed, run) * 1e6));
    double ms = samples_percentile_ms(&samples, 50);
    samples_free(&samples);
    for (uint32_t run = 0; run < MAX_RUNS; run++) {
        gpu_must_driver(driver->cuEventDestroy(timed->begin[run]), "event");
        gpu_must_driver(driver->cuEventDestroy(timed->end[run]), "event");
    }
    return ms;
}

static double measure(struct gpu_bench *bench, gpu_work *work, void *argument, uint32_t variants, bool as_graph) {
    struct timed *timed = calloc(1, sizeof(*timed));
    if (timed == NULL || variants < 1 || variants > MAX_VARIANTS)
        gpu_must(OSCAR_ERR_INVALID, "timed work");
    *timed = (struct timed){.bench = bench, .work = work, .argument = argument, .variants = variants};
    gpu_must(work(bench->stream, argument, 0), "timed work"); /* what is made at a first call is not timed */
    gpu_wait(timed->bench);
    if (as_graph)
        capture(timed);
    double ms = median_ms(timed);
    for (uint32_t i = 0; as_graph && i < variants; i++)
        gpu_must_driver(bench->device->driver->cuGraphExecDestroy(timed->graph[i]), "graph");
    free(timed);
    return ms;
}

double gpu_time_graph(struct gpu_bench *bench, gpu_work *work, void *argument, uint32_t variants) {
    return measure(bench, work, argument, variants, true);
}

double gpu_time_calls(struct gpu_bench *bench, gpu_work *work, void *argument, uint32_t variants) {
    return measure(bench, work, argument, variants, false);
}
