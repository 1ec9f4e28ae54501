/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What this process holds of the daemon's device: the backend's device object, the fences, and the queue of calls without a
 * stream. It outlives the client where a stream is still open, because work enqueued there may yet raise fences and read pages:
 * each stream and each mapping counts as a reference.
 *
 * Things that enqueued work may still read are retired instead of freed. They are freed by the next call that sweeps, once
 * the stream has passed the point at which they were retired, or was closed.
 */
#ifndef OSCAR_CLIENT_ATTACHMENT_H
#define OSCAR_CLIENT_ATTACHMENT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "oscar/device.h"
#include "oscar/oscar.h"

struct oscar_retired;

struct oscar_attachment {
    _Atomic unsigned references;
    const struct oscar_device_ops *ops;
    struct oscar_device *device;
    bool host;                     /* work without a stream needs no queue, and runs in the calling thread */
    oscar_fence_slot *fences;      /* [OSCAR_FENCE_SLOTS], shared with the daemon; NULL until they are attached */
    pthread_mutex_t own_lock;      /* held while a call without a stream uses `own` */
    struct oscar_stream_impl *own; /* synchronous; opened by the first of these calls */
    _Atomic(struct oscar_retired *) retired;
};

/* `device` is its name in the daemon's process. Sets the thread's detail. */
int oscar_attachment_new(const char *backend, const char *device, struct oscar_attachment **ret);
/* Takes over a mapping of OSCAR_FENCE_BYTES, in any case. */
int oscar_attachment_set_fences(struct oscar_attachment *attachment, void *memory);
struct oscar_attachment *oscar_attachment_ref(struct oscar_attachment *attachment);
void oscar_attachment_unref(struct oscar_attachment *attachment); /* NULL is fine */

struct oscar_stream {
    _Atomic unsigned references; /* the caller's, and one for each sequence that used it last and each retired thing */
    struct oscar_attachment *attachment;
    struct oscar_stream_impl *impl;
    bool asynchronous;
    _Atomic bool closed;
};

struct oscar_stream *oscar_stream_ref(struct oscar_stream *stream); /* NULL gives NULL */
void oscar_stream_unref(struct oscar_stream *stream);               /* NULL is fine */
/* Whether it is there: one that is closed has passed. */
static inline bool oscar_stream_is_open(const struct oscar_stream *stream) {
    return stream != NULL && !atomic_load_explicit(&stream->closed, memory_order_acquire);
}
/* Whether work may be enqueued there that has not run. */
static inline bool oscar_stream_lags(const struct oscar_stream *stream) {
    return oscar_stream_is_open(stream) && stream->asynchronous;
}

/* The queue for the work of one call, which ends with oscar_queue_end(): the stream's; where that is NULL or closed, the attachment's
 * own, or NULL on the host. Sets the thread's detail. */
int oscar_queue_begin(struct oscar_attachment *attachment, const struct oscar_stream *stream,
                      struct oscar_stream_impl **ret);
void oscar_queue_end(struct oscar_attachment *attachment, const struct oscar_stream_impl *queue);

/* Sets the thread's detail to the failed work's name and its cause, where the backend still knows one; gives `error`. */
__attribute__((format(printf, 3, 4))) int oscar_work_failed(struct oscar_attachment *attachment, int error,
                                                            const char *format, ...);

/* A thing to be freed later. It is made beforehand, so that retiring cannot fail. */
struct oscar_retired {
    void (*free)(void *thing);
    void *thing;
    struct oscar_stream *stream;
    _Atomic bool passed;
    struct oscar_retired *next;
};

/* Frees `thing` now where nothing lags on `stream`, else once the stream has passed. Takes `retired`. */
void oscar_retire(struct oscar_attachment *attachment, struct oscar_stream *stream, struct oscar_retired *retired,
                  void (*free)(void *thing), void *thing);
void oscar_retired_sweep(struct oscar_attachment *attachment);

#endif
