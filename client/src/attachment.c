/* SPDX-License-Identifier: Apache-2.0 */
#include "client/src/attachment.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "client/src/detail.h"
#include "proto/cleanup.h"
#include "proto/window.h"

int oscar_attachment_new(const char *backend, const char *device, struct oscar_attachment **ret) {
    _cleanup_free_ struct oscar_attachment *attachment = calloc(1, sizeof(*attachment));
    if (attachment == NULL)
        return oscar_fail(oscar_detail(), OSCAR_ERR_NO_MEMORY, "no memory for the device");
    int r = oscar_device_find(backend, &attachment->ops, oscar_detail());
    if (r < 0)
        return r;
    r = attachment->ops->device_open(&(struct oscar_device_options){.id = device}, &attachment->device, oscar_detail());
    if (r < 0)
        return r;
    attachment->host = strcmp(attachment->ops->name, oscar_device_host()->name) == 0;
    pthread_mutex_init(&attachment->own_lock, NULL);
    atomic_init(&attachment->references, 1);
    *ret = TAKE_PTR(attachment);
    return 0;
}

int oscar_attachment_set_fences(struct oscar_attachment *attachment, void *memory) {
    int r = attachment->ops->fences_register(attachment->device, memory, OSCAR_FENCE_BYTES, oscar_detail());
    if (r < 0) {
        (void)munmap(memory, OSCAR_FENCE_BYTES);
        return r;
    }
    attachment->fences = memory;
    return 0;
}

struct oscar_attachment *oscar_attachment_ref(struct oscar_attachment *attachment) {
    atomic_fetch_add_explicit(&attachment->references, 1, memory_order_relaxed);
    return attachment;
}

void oscar_attachment_unref(struct oscar_attachment *attachment) {
    if (attachment == NULL || atomic_fetch_sub_explicit(&attachment->references, 1, memory_order_acq_rel) != 1)
        return;
    if (attachment->own != NULL)
        attachment->ops->stream_close(attachment->own);
    if (attachment->fences != NULL) {
        attachment->ops->fences_unregister(attachment->device, attachment->fences);
        (void)munmap(attachment->fences, OSCAR_FENCE_BYTES);
    }
    attachment->ops->device_close(attachment->device);
    pthread_mutex_destroy(&attachment->own_lock);
    free(attachment);
}

/* --- queues ------------------------------------------------------------------------------------------------------- */

int oscar_queue_begin(struct oscar_attachment *attachment, const struct oscar_stream *stream,
                      struct oscar_stream_impl **ret) {
    if (oscar_stream_is_open(stream) || attachment->host) {
        *ret = oscar_stream_is_open(stream) ? stream->impl : NULL;
        return 0;
    }
    pthread_mutex_lock(&attachment->own_lock);
    int r = 0;
    if (attachment->own == NULL)
        r = attachment->ops->stream_open(attachment->device, &(struct oscar_stream_options){.threads = 1},
                                         &attachment->own, oscar_detail());
    if (r < 0)
        pthread_mutex_unlock(&attachment->own_lock);
    else
        *ret = attachment->own;
    return r;
}

void oscar_queue_end(struct oscar_attachment *attachment, const struct oscar_stream_impl *queue) {
    if (queue != NULL && queue == attachment->own)
        pthread_mutex_unlock(&attachment->own_lock);
}

int oscar_work_failed(struct oscar_attachment *attachment, int error, const char *format, ...) {
    char what[sizeof(oscar_detail()->text) / 2];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(what, sizeof(what), format, arguments);
    va_end(arguments);
    /* Calls that enqueue have no place for words. A device that has failed still answers what became of it. */
    struct oscar_cause cause = {{0}};
    uint64_t free_bytes, total_bytes;
    if (error == OSCAR_ERR_DEVICE)
        (void)attachment->ops->memory_info(attachment->device, &free_bytes, &total_bytes, &cause);
    return oscar_fail(oscar_detail(), error, "%s: %s%s%s", what, oscar_error_text(error),
                      cause.text[0] != '\0' ? ": " : "", cause.text);
}

/* --- retired things ----------------------------------------------------------------------------------------------- */

/* Runs in the stream: it must not free, because on a GPU a function called from a stream may not touch the device. */
static void has_passed(void *argument) {
    struct oscar_retired *retired = argument;
    atomic_store_explicit(&retired->passed, true, memory_order_release);
}

static void free_retired(struct oscar_retired *retired) {
    retired->free(retired->thing);
    oscar_stream_unref(retired->stream);
    free(retired);
}

static void push(struct oscar_attachment *attachment, struct oscar_retired *retired) {
    retired->next = atomic_load_explicit(&attachment->retired, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(&attachment->retired, &retired->next, retired, memory_order_release,
                                                  memory_order_relaxed)) {
    }
}

void oscar_retire(struct oscar_attachment *attachment, struct oscar_stream *stream, struct oscar_retired *retired,
                  void (*free)(void *thing), void *thing) {
    *retired = (struct oscar_retired){.free = free, .thing = thing};
    if (!oscar_stream_lags(stream)) {
        free_retired(retired);
        return;
    }
    retired->stream = oscar_stream_ref(stream);
    /* Where the call cannot be enqueued, closing the stream tells as well that it has passed. */
    (void)attachment->ops->stream_call(stream->impl, has_passed, retired);
    push(attachment, retired);
}

void oscar_retired_sweep(struct oscar_attachment *attachment) {
    /* Taken out as a whole, so that two sweeping threads never see the same thing. */
    struct oscar_retired *retired = atomic_exchange_explicit(&attachment->retired, NULL, memory_order_acquire);
    while (retired != NULL) {
        struct oscar_retired *next = retired->next;
        if (atomic_load_explicit(&retired->passed, memory_order_acquire) || !oscar_stream_lags(retired->stream))
            free_retired(retired);
        else
            push(attachment, retired);
        retired = next;
    }
}
