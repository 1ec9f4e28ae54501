/* SPDX-License-Identifier: Apache-2.0 */
/* Work that is recorded once and run many times: a graph on a GPU, captured from a stream of the caller's as frameworks do; on the
 * host the same calls, made again by each run. */
#ifndef OSCAR_TESTS_GPU_GRAPH_H
#define OSCAR_TESTS_GPU_GRAPH_H

#include "tests/gpu/rig.h"

/* Enqueues to the stream; must not fail. */
typedef void graph_work(struct oscar_stream_impl *stream, void *argument);

struct graph;
struct graph *graph_record(struct rig *rig, graph_work *work, void *argument);
/* The stream that it was recorded from and runs in. */
struct oscar_stream_impl *graph_stream(const struct graph *graph);
/* Enqueues one run. */
void graph_run(struct graph *graph);
void graph_free(struct graph *graph);

#endif
