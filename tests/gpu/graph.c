/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/graph.h"

#include <stdlib.h>

#ifdef OSCAR_CUDA
#include "kernels/cuda/backend.h"
#endif

struct graph {
    struct rig *rig;
    struct oscar_stream_impl *stream;
    graph_work *work;
    void *argument;
#ifdef OSCAR_CUDA
    CUstream native;
    CUgraphExec executable; /* NULL on the host */
#endif
};

#ifdef OSCAR_CUDA

static void must(CUresult result, const char *what) {
    if (result != CUDA_SUCCESS)
        fail_msg("%s: error %d", what, (int)result);
}

static void record(struct graph *graph) {
    const struct cuda_driver *driver = graph->rig->device->driver;
    CUgraph recorded;
    assert_int_equal(cuda_enter(graph->rig->device, NULL), 0);
    must(driver->cuStreamCreateWithPriority(&graph->native, CU_STREAM_NON_BLOCKING, 0), "a stream");
    struct oscar_stream_options options = {.native = graph->native};
    assert_int_equal(graph->rig->ops->stream_open(graph->rig->device, &options, &graph->stream, NULL), 0);
    must(driver->cuStreamBeginCapture(graph->native, CU_STREAM_CAPTURE_MODE_GLOBAL), "capture");
    graph->work(graph->stream, graph->argument);
    must(driver->cuStreamEndCapture(graph->native, &recorded), "end of capture");
    must(driver->cuGraphInstantiate(&graph->executable, recorded, 0), "a graph");
    must(driver->cuGraphDestroy(recorded), "a recorded graph");
    cuda_leave(graph->rig->device);
}

static void run(struct graph *graph) {
    assert_int_equal(cuda_enter(graph->rig->device, NULL), 0);
    must(graph->rig->device->driver->cuGraphLaunch(graph->executable, graph->native), "launch of a graph");
    cuda_leave(graph->rig->device);
}

static void release(struct graph *graph) {
    const struct cuda_driver *driver = graph->rig->device->driver;
    assert_int_equal(cuda_enter(graph->rig->device, NULL), 0);
    graph->rig->ops->stream_close(graph->stream);
    must(driver->cuGraphExecDestroy(graph->executable), "a graph");
    must(driver->cuStreamDestroy(graph->native), "a stream");
    cuda_leave(graph->rig->device);
}

#else

static void record(struct graph *graph) { (void)graph; }
static void run(struct graph *graph) { (void)graph; }
static void release(struct graph *graph) { (void)graph; }

#endif

struct graph *graph_record(struct rig *rig, graph_work *work, void *argument) {
    struct graph *graph = calloc(1, sizeof(*graph));
    assert_non_null(graph);
    graph->rig = rig;
    graph->stream = rig->asynchronous;
    graph->work = work;
    graph->argument = argument;
    if (rig_on_gpu())
        record(graph);
    return graph;
}

struct oscar_stream_impl *graph_stream(const struct graph *graph) {
    return graph->stream;
}

void graph_run(struct graph *graph) {
    if (rig_on_gpu())
        run(graph);
    else
        graph->work(graph->stream, graph->argument);
}

void graph_free(struct graph *graph) {
    if (rig_on_gpu())
        release(graph);
    free(graph);
}
