/* SPDX-License-Identifier: Apache-2.0 */
/* A worker's calls that are recorded once and run many times: in a CUDA graph, captured from a stream of the worker's own as frameworks
 * do it; on the host the same calls, made again by each run. */
#ifndef OSCAR_TESTS_E2E_GRAPH_H
#define OSCAR_TESTS_E2E_GRAPH_H

#include "oscar/oscar.h"

/* Enqueues to the stream; what fails ends the test. */
typedef void e2e_graph_work(struct oscar_stream *stream, void *argument);

struct e2e_graph;
/* The stream is there from now on. */
struct e2e_graph *e2e_graph_open(struct oscar_client *client, e2e_graph_work *work, void *argument);
struct oscar_stream *e2e_graph_stream(const struct e2e_graph *graph);
void e2e_graph_record(struct e2e_graph *graph);
/* Enqueues one run. */
void e2e_graph_run(struct e2e_graph *graph);
void e2e_graph_close(struct e2e_graph *graph); /* before the client */

#endif
