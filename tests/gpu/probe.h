/* SPDX-License-Identifier: Apache-2.0 */
/* Work whose time and place a test chooses: kernels on a GPU, on the host functions that the stream calls. */
#ifndef OSCAR_TESTS_GPU_PROBE_H
#define OSCAR_TESTS_GPU_PROBE_H

#include "tests/gpu/rig.h"

struct probe;
struct probe *probe_open(struct rig *rig);
void probe_close(struct probe *probe); /* the streams have passed its work */

/* Enqueues: *address = value, whether that is allowed or not. */
void probe_write(struct probe *probe, struct oscar_stream_impl *stream, void *address, uint64_t value);
/* Enqueues: waits until probe_release, or for 20 seconds. Returns when the stream has arrived there. */
void probe_hold(struct probe *probe, struct oscar_stream_impl *stream);
void probe_release(struct probe *probe);

#endif
