/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "client/src/attachment.h"
#include "client/src/client.h"
#include "client/src/detail.h"
#include "client/src/options.h"
#include "proto/cleanup.h"

int oscar_stream_open(struct oscar_client *client, const struct oscar_stream_params *params,
                      struct oscar_stream **ret_stream) {
    int r = oscar_client_check(client);
    if (r < 0)
        return r;
    struct oscar_stream_params given;
    r = oscar_options_read(params, sizeof(given.size), sizeof(given), "oscar_stream_params", &given);
    if (r < 0)
        return r;
    _cleanup_free_ struct oscar_stream *stream = calloc(1, sizeof(*stream));
    if (stream == NULL)
        return oscar_fail(oscar_detail(), OSCAR_ERR_NO_MEMORY, "no memory for a stream");
    const struct oscar_stream_options options = {.threads = given.threads > 0 ? given.threads : 1,
                                                 .asynchronous = given.asynchronous != 0,
                                                 .native = given.native};
    struct oscar_attachment *attachment = client->attachment;
    r = attachment->ops->stream_open(attachment->device, &options, &stream->impl, oscar_detail());
    if (r < 0)
        return r;
    stream->attachment = oscar_attachment_ref(attachment);
    stream->asynchronous = options.asynchronous || (options.native != NULL && !attachment->host);
    atomic_init(&stream->references, 1);
    *ret_stream = TAKE_PTR(stream);
    return 0;
}

int oscar_stream_wait(struct oscar_stream *stream, uint32_t timeout_ms) {
    if (stream == NULL)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "stream: NULL");
    int r = stream->attachment->ops->stream_wait(stream->impl, timeout_ms * OSCAR_NS_PER_MS);
    if (r == OSCAR_ERR_TIMEOUT)
        return oscar_fail(oscar_detail(), r, "stream: its work is not done in time");
    return r < 0 ? oscar_work_failed(stream->attachment, r, "work enqueued on the stream") : 0;
}

int oscar_stream_call(struct oscar_stream *stream, void (*function)(void *), void *argument) {
    if (stream == NULL || function == NULL)
        return oscar_fail(oscar_detail(), OSCAR_ERR_INVALID, "stream_call: %s is NULL", stream ? "function" : "stream");
    int r = stream->attachment->ops->stream_call(stream->impl, function, argument);
    return r < 0 ? oscar_work_failed(stream->attachment, r, "stream_call") : 0;
}

void oscar_stream_close(struct oscar_stream *stream) {
    if (stream == NULL)
        return;
    struct oscar_attachment *attachment = stream->attachment;
    attachment->ops->stream_close(stream->impl); /* waits */
    atomic_store_explicit(&stream->closed, true, memory_order_release);
    oscar_retired_sweep(attachment);
    oscar_stream_unref(stream);
}

struct oscar_stream *oscar_stream_ref(struct oscar_stream *stream) {
    if (stream != NULL)
        atomic_fetch_add_explicit(&stream->references, 1, memory_order_relaxed);
    return stream;
}

void oscar_stream_unref(struct oscar_stream *stream) {
    if (stream == NULL || atomic_fetch_sub_explicit(&stream->references, 1, memory_order_acq_rel) != 1)
        return;
    oscar_attachment_unref(stream->attachment);
    free(stream);
}
