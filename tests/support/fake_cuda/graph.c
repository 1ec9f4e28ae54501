/* SPDX-License-Identifier: Apache-2.0 */
/* Graphs of the fake driver: the commands of one stream between the beginning and the end of its capture, run in their order. */
#include <stdlib.h>

#include "tests/support/fake_cuda/inside.h"

struct CUgraph_st {
    struct command *first, **last;
    atomic_uint references; /* of it and of what was instantiated of it, which is the same */
};

static void release(CUgraph graph) {
    fake_gone();
    if (atomic_fetch_sub(&graph->references, 1) > 1)
        return;
    for (struct command *next; graph->first; graph->first = next) {
        next = graph->first->next;
        fake_command_free(graph->first);
    }
    free(graph);
}

CUresult fake_graph_add(CUgraph graph, struct command command) {
    struct command *added = malloc(sizeof(*added));
    if (!added)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *added = command;
    *graph->last = added;
    graph->last = &added->next;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
    (void)mode;
    IN_CONTEXT();
    CUgraph graph = calloc(1, sizeof(*graph));
    if (!graph)
        return CUDA_ERROR_OUT_OF_MEMORY;
    graph->last = &graph->first;
    graph->references = 1;
    CUresult result = fake_stream_capture(stream, graph);
    if (result != CUDA_SUCCESS)
        free(graph);
    else
        fake_born();
    return result;
}

EXPORT CUresult cuStreamEndCapture(CUstream stream, CUgraph *ret) {
    IN_CONTEXT();
    *ret = fake_stream_captures(stream);
    return *ret ? fake_stream_capture(stream, NULL) : CUDA_ERROR_ILLEGAL_STATE;
}

EXPORT CUresult cuGraphInstantiate(CUgraphExec *ret, CUgraph graph, unsigned long long flags) {
    (void)flags;
    IN_CONTEXT();
    atomic_fetch_add(&graph->references, 1);
    *ret = (CUgraphExec)graph;
    fake_born();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphExecDestroy(CUgraphExec graph) {
    release((CUgraph)graph);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphDestroy(CUgraph graph) {
    release(graph);
    return CUDA_SUCCESS;
}

static void run_graph(const struct command *command) {
    for (const struct command *of = ((CUgraph)command->to)->first; of; of = of->next)
        of->run(of);
}

/* The graph must be there until it has run. */
EXPORT CUresult cuGraphLaunch(CUgraphExec graph, CUstream stream) {
    IN_CONTEXT();
    return fake_enqueue(stream, (struct command){.run = run_graph, .to = graph});
}
