/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams of the host backend: an in-order queue of commands, run inside the call (synchronous, or no stream at all) or by
 * a thread of the stream's own. stream.c keeps the order; stream_work.c knows what the commands do.
 */
#ifndef OSCAR_KERNELS_HOST_STREAM_H
#define OSCAR_KERNELS_HOST_STREAM_H

#include "oscar/device.h"

#include "kernels/host/level.h"
#include "kernels/host/pool.h"

struct oscar_device {
    enum host_level level;
    char summary[96];
};

/* What a command runs on. */
struct host_runner {
    struct host_pool *pool;
    enum host_level level;
};

/* One piece of work with a copy of its arguments: `function(runner, payload)` returns 0 or an error. */
struct host_command;
typedef int host_command_function(const struct host_runner *runner, void *payload);

/* A command whose payload holds `bytes` bytes, 16-byte aligned, to be filled in; NULL when memory is out. */
struct host_command *host_command_make(host_command_function *function, size_t bytes, void **ret_payload);
/* Enqueues the command and takes it. On a NULL or synchronous stream the command's own result comes back at once; else its
 * failure is kept for stream_status. */
int host_stream_submit(struct oscar_stream_impl *stream, struct host_command *command);
/* Both for a payload that is ready. */
int host_submit(struct oscar_stream_impl *stream, host_command_function *function, const void *payload, size_t bytes);

/* The geometry is one, and the calibration was made for it. */
bool host_calibration_fits(const struct oscar_calibration *calibration, const struct oscar_geometry *geometry);

/* The functions of oscar_device_ops of the same names. */
int host_stream_open(struct oscar_device *device, const struct oscar_stream_options *options,
                     struct oscar_stream_impl **ret, struct oscar_cause *cause);
void host_stream_close(struct oscar_stream_impl *stream);
int host_stream_wait(struct oscar_stream_impl *stream, uint64_t timeout_ns);
int host_stream_status(struct oscar_stream_impl *stream);

int host_stream_call(struct oscar_stream_impl *stream, void (*function)(void *), void *argument);
int host_fence_signal(struct oscar_stream_impl *stream, oscar_fence_slot *slot, uint64_t value);
int host_enqueue_copy(struct oscar_stream_impl *stream, void *destination, const void *source, uint64_t bytes);
int host_enqueue_store(struct oscar_stream_impl *stream, const struct oscar_store_args *args);
int host_enqueue_inspect(struct oscar_stream_impl *stream, const struct oscar_geometry *geometry,
                         const uint8_t *const *pages, uint32_t count, int32_t *status);
int host_enqueue_pack(struct oscar_stream_impl *stream, const struct oscar_geometry *geometry,
                      const struct oscar_calibration *calibration, const struct oscar_pack_item *item, uint32_t items);
int host_enqueue_attend(struct oscar_stream_impl *stream, const struct oscar_attend_args *args);
int host_enqueue_merge(struct oscar_stream_impl *stream, const struct oscar_merge_args *args);

int host_batch_open(struct oscar_device *device, const struct oscar_geometry *geometry,
                    const struct oscar_batch_limits *limits, struct oscar_batch_impl **ret, struct oscar_cause *cause);
void host_batch_close(struct oscar_batch_impl *batch);
int host_batch_update(struct oscar_stream_impl *stream, struct oscar_batch_impl *batch,
                      const struct oscar_arena_view arenas[OSCAR_FORMS], const struct oscar_batch_item *item,
                      uint32_t items);
int host_batch_store(struct oscar_stream_impl *stream, struct oscar_batch_impl *batch,
                     const struct oscar_batch_store_args *args);
int host_batch_attend(struct oscar_stream_impl *stream, struct oscar_batch_impl *batch,
                      const struct oscar_batch_attend_args *args);

#endif
