/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/integration/e2e_graph.h"

#include <stdlib.h>

#include "client/src/client.h"
#include "tests/integration/e2e_model.h"

#ifdef OSCAR_CUDA
#include "kernels/cuda/backend.h"
#endif

struct e2e_graph {
    struct oscar_client *client;
    struct oscar_stream *stream;
    e2e_graph_work *work;
    void *argument;
#ifdef OSCAR_CUDA
    CUstream native; /* NULL on the host */
    CUgraphExec executable;
#endif
};

#ifdef OSCAR_CUDA

static void must(CUresult result, const char *what) {
    if (result != CUDA_SUCCESS)
        e2e_fail("%s: error %d of the driver", what, (int)result);
}

static const struct cuda_driver *enter(const struct e2e_graph *graph) {
    struct oscar_device *device = graph->client->attachment->device;
    MUST(cuda_enter(device, NULL));
    return device->driver;
}

static void leave(const struct e2e_graph *graph) { cuda_leave(graph->client->attachment->device); }

static void open_native(struct e2e_graph *graph) {
    must(enter(graph)->cuStreamCreateWithPriority(&graph->native, CU_STREAM_NON_BLOCKING, 0), "a stream");
    leave(graph);
    const struct oscar_stream_params params = {.size = sizeof(params), .native = graph->native};
    MUST(oscar_stream_open(graph->client, &params, &graph->stream));
}

static void capture(struct e2e_graph *graph) {
    CUgraph recorded;
    const struct cuda_driver *driver = enter(graph);
    must(driver->cuStreamBeginCapture(graph->native, CU_STREAM_CAPTURE_MODE_GLOBAL), "capture");
    graph->work(graph->stream, graph->argument);
    must(driver->cuStreamEndCapture(graph->native, &recorded), "end of capture");
    must(driver->cuGraphInstantiate(&graph->executable, recorded, 0), "a graph");
    must(driver->cuGraphDestroy(recorded), "a recorded graph");
    leave(graph);
}

static void launch(struct e2e_graph *graph) {
    must(enter(graph)->cuGraphLaunch(graph->executable, graph->native), "launch of a graph");
    leave(graph);
}

static void close_native(struct e2e_graph *graph) {
    const struct cuda_driver *driver = enter(graph);
    if (graph->executable != NULL)
        must(driver->cuGraphExecDestroy(graph->executable), "a graph");
    must(driver->cuStreamDestroy(graph->native), "a stream");
    leave(graph);
}

#else

static void open_native(struct e2e_graph *graph) { (void)graph; }
static void capture(struct e2e_graph *graph) { (void)graph; }
static void launch(struct e2e_graph *graph) { (void)graph; }
static void close_native(struct e2e_graph *graph) { (void)graph; }

#endif

struct e2e_graph *e2e_graph_open(struct oscar_client *client, e2e_graph_work *work, void *argument) {
    struct e2e_graph *graph = calloc(1, sizeof(*graph));
    if (graph == NULL)
        e2e_fail("no memory for a graph");
    graph->client = client;
    graph->work = work;
    graph->argument = argument;
    const struct oscar_stream_params params = {.size = sizeof(params), .threads = 1, .asynchronous = 1};
    if (client->attachment->host)
        MUST(oscar_stream_open(client, &params, &graph->stream));
    else
        open_native(graph);
    return graph;
}

struct oscar_stream *e2e_graph_stream(const struct e2e_graph *graph) {
    return graph->stream;
}

void e2e_graph_record(struct e2e_graph *graph) {
    if (!graph->client->attachment->host)
        capture(graph);
}

void e2e_graph_run(struct e2e_graph *graph) {
    if (graph->client->attachment->host)
        graph->work(graph->stream, graph->argument);
    else
        launch(graph);
}

void e2e_graph_close(struct e2e_graph *graph) {
    oscar_stream_close(graph->stream);
    if (!graph->client->attachment->host)
        close_native(graph);
    free(graph);
}
