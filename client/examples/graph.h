/* SPDX-License-Identifier: Apache-2.0 */
/* A step of an engine as a CUDA graph. */
#ifndef OSCAR_EXAMPLE_GRAPH_H
#define OSCAR_EXAMPLE_GRAPH_H

#include <cuda.h>
#include <oscar/oscar.h>

/* Rows of all sequences of a step, one after another, where the graph finds them each time. */
struct step_tensors {
    void *q, *k, *v, *out;
};

/* Enqueues a part of a layer of the model. */
typedef void engine_layer(CUstream native, uint32_t layer, const struct step_tensors *tensors);

/* Records the step of a batch that has been set. `stream` was opened over `native`. */
CUresult step_graph_make(CUstream native, struct oscar_stream *stream, struct oscar_batch *batch,
                         const struct step_tensors *tensors, uint32_t layers, engine_layer *before, engine_layer *after,
                         CUgraphExec *ret_graph);
/* Enqueues the step of these sequences. 0 or an oscar error. */
int step_graph_run(CUgraphExec graph, CUstream native, struct oscar_stream *stream, struct oscar_batch *batch,
                   const struct oscar_batch_entry *entries, uint32_t count);

#endif
