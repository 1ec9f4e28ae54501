/* SPDX-License-Identifier: Apache-2.0 */
/* Between the files of the fake driver: machine.c (devices and contexts), memory.c, stream.c, kernel.c, graph.c, and rest.c, which
 * has all that the others do not have. */
#ifndef OSCAR_TESTS_FAKE_CUDA_INSIDE_H
#define OSCAR_TESTS_FAKE_CUDA_INSIDE_H

#include "tests/support/fake_cuda.h"

#define EXPORT __attribute__((visibility("default")))

extern EXPORT struct fake_cuda fake_cuda;

/* A number of the environment. */
int fake_given(const char *variable, int otherwise);

/* At the beginning of a call: whether it is one that was told to fail; in a context also whether there is one. `asking`: not
 * among the calls that are counted. */
CUresult fake_may_fail(const char *name);
CUresult fake_in_context(const char *name);
CUresult fake_in_context_asking(const char *name);

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        CUresult tried_ = (call);                                                                                      \
        if (tried_ != CUDA_SUCCESS)                                                                                    \
            return tried_;                                                                                             \
    } while (0)
#define MAY_FAIL() TRY(fake_may_fail(__func__))
#define IN_CONTEXT() TRY(fake_in_context(__func__))
#define IN_CONTEXT_ASKING() TRY(fake_in_context_asking(__func__))

void fake_unsafe_in_capture(void); /* in what spoils a capture in another thread */
void fake_born(void);              /* one thing more to give back */
void fake_gone(void);

/* Commands of all streams. Counting them orders nothing: what a real driver does not order is a race here too. */
extern atomic_uint fake_in_flight;

/* What a stream does, or, where it is being captured, a graph remembers. */
struct command {
    struct command *next;
    void (*run)(const struct command *command);
    void (*function)(void *);
    void *to;
    const void *from;
    size_t bytes;
    uint64_t value;
    bool owns; /* `to` is freed with the command */
};

CUresult fake_enqueue(CUstream stream, struct command command);
void fake_command_free(struct command *command);
void fake_run_write(const struct command *command); /* `value` to `to` */

/* The graph that a stream's commands go to; NULL: none. */
CUresult fake_stream_capture(CUstream stream, CUgraph graph);
CUgraph fake_stream_captures(CUstream stream);
CUresult fake_graph_add(CUgraph graph, struct command command);

/* Whether memory lies there, of the device or registered. */
bool fake_is_known(const void *address);

#endif
