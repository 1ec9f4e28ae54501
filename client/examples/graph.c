/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A step of an engine as a CUDA graph, recorded once and launched for each token: docs/CLIENT.md explains it. It is compiled where
 * CUDA's headers are; an engine brings the rest, and has its own way to record its model's kernels between these calls.
 */
#include "graph.h"

#include <stddef.h>

/* Whatever the layers of the model do before and after attention, into and out of these tensors: device memory of the engine. */
static CUresult record(CUstream native, struct oscar_stream *stream, struct oscar_batch *batch,
                       const struct step_tensors *tensors, uint32_t layers, engine_layer *before, engine_layer *after) {
    CUresult result = cuStreamBeginCapture(native, CU_STREAM_CAPTURE_MODE_GLOBAL);
    for (uint32_t layer = 0; result == CUDA_SUCCESS && layer < layers; layer++) {
        before(native, layer, tensors);
        if (oscar_batch_store(batch, stream, layer, tensors->k, tensors->v) < 0 ||
            oscar_batch_attend(batch, stream, layer, 0, tensors->q, tensors->out, NULL) < 0)
            result = CUDA_ERROR_UNKNOWN; /* oscar_error_detail() says why; the capture is ended all the same */
        else
            after(native, layer, tensors);
    }
    return result;
}

CUresult step_graph_make(CUstream native, struct oscar_stream *stream, struct oscar_batch *batch,
                         const struct step_tensors *tensors, uint32_t layers, engine_layer *before, engine_layer *after,
                         CUgraphExec *ret_graph) {
    CUgraph recorded = NULL;
    CUresult result = record(native, stream, batch, tensors, layers, before, after);
    CUresult ended = cuStreamEndCapture(native, &recorded);
    if (result == CUDA_SUCCESS)
        result = ended;
    if (result == CUDA_SUCCESS)
        result = cuGraphInstantiate(ret_graph, recorded, 0);
    if (recorded != NULL)
        (void)cuGraphDestroy(recorded);
    return result;
}

int step_graph_run(CUgraphExec graph, CUstream native, struct oscar_stream *stream, struct oscar_batch *batch,
                   const struct oscar_batch_entry *entries, uint32_t count) {
    int r = oscar_batch_set(batch, stream, entries, count); /* outside the graph, before each launch */
    if (r == 0 && cuGraphLaunch(graph, native) != CUDA_SUCCESS)
        r = OSCAR_ERR_DEVICE;
    return r;
}
