/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams, fences and the outcomes of work. What a kernel finds goes to words of pinned memory: to the stream's one word of
 * failure, or to the words of a status, which a host function hands on in stream order.
 */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/cuda/backend.h"

#define STATUS_WORDS OSCAR_MAX_PACK_ITEMS /* of a status made ahead; a larger one is made when it is asked for */
#define STATUSES_AHEAD 4                  /* calls in flight before a stream makes more of them */

struct cuda_status {
    struct cuda_stream_state *state;
    struct cuda_status *next;  /* of the free ones */
    struct cuda_status *other; /* of all */
    uint32_t count, capacity;
    int32_t *words; /* pinned */
    CUdeviceptr address;
    int32_t **target; /* [capacity] */
    bool fails;
};

struct cuda_stream_state {
    pthread_mutex_t lock; /* the driver is never called under it: its thread takes it in `deliver` */
    int failure;          /* the first one since it was last asked for */
    struct cuda_status *free, *all;
    int32_t *word; /* pinned: what kernels report */
    CUdeviceptr word_address;
};

/* --- waiting ---------------------------------------------------------------------------------------------------------------- */

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* Most waits are short: looks without a pause at first, then less and less often. */
static void pause_after(uint64_t waited_ns) {
    const uint64_t longest_ns = 200000;
    if (waited_ns < 20000)
        return;
    uint64_t pause_ns = waited_ns / 8 < longest_ns ? waited_ns / 8 : longest_ns;
    (void)nanosleep(&(struct timespec){.tv_nsec = (long)pause_ns}, NULL);
}

int cuda_event_wait(struct oscar_device *device, CUevent event, uint64_t timeout_ns, struct oscar_cause *cause) {
    uint64_t start = now_ns();
    for (;;) {
        CUresult result = device->driver->cuEventQuery(event);
        if (result != CUDA_ERROR_NOT_READY)
            return cuda_device_result(device, result, "cuEventQuery", cause);
        uint64_t waited = now_ns() - start;
        if (waited >= timeout_ns)
            return oscar_fail(cause, OSCAR_ERR_TIMEOUT, "work of a stream is not done in time");
        pause_after(waited);
    }
}

/* An event, so that what others enqueue meanwhile does not prolong the wait. */
int cuda_wait(struct oscar_device *device, CUstream stream, uint64_t timeout_ns, struct oscar_cause *cause) {
    const struct cuda_driver *driver = device->driver;
    CUevent event;
    int r = cuda_device_result(device, driver->cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate", cause);
    if (r < 0)
        return r;
    r = cuda_device_result(device, driver->cuEventRecord(event, stream), "cuEventRecord", cause);
    if (r == 0)
        r = cuda_event_wait(device, event, timeout_ns, cause);
    (void)driver->cuEventDestroy(event);
    return r;
}

int cuda_settle(struct oscar_device *device, CUstream stream, const char *what, struct oscar_cause *cause) {
    struct oscar_cause why = {""};
    int r = cuda_wait(device, stream, CUDA_PATIENCE_NS, &why);
    if (r == 0)
        return 0;
    if (r != OSCAR_ERR_TIMEOUT) {
        /* It is the waiting that failed: the caller may give back what the work uses all the same. */
        if (!atomic_load(&device->lost))
            (void)device->driver->cuStreamSynchronize(stream);
        return oscar_fail(cause, r, "%s: %s", what, why.text);
    }
    atomic_store(&device->hangs, true);
    atomic_store(&device->lost, true);
    return oscar_fail(cause, OSCAR_ERR_DEVICE, "%s hangs: %s is not done after a minute", device->id, what);
}

/* --- statuses --------------------------------------------------------------------------------------------------------------- */

/* Pinned memory that is zero, and its address for kernels. */
static int pinned_alloc(struct oscar_device *device, size_t bytes, int32_t **ret, CUdeviceptr *ret_address,
                        struct oscar_cause *cause) {
    const struct cuda_driver *driver = device->driver;
    void *memory;
    int r = cuda_device_result(
        device, driver->cuMemHostAlloc(&memory, bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
        "cuMemHostAlloc", cause);
    if (r < 0)
        return r;
    r = cuda_device_result(device, driver->cuMemHostGetDevicePointer(ret_address, memory, 0),
                           "cuMemHostGetDevicePointer", cause);
    if (r < 0) {
        (void)driver->cuMemFreeHost(memory);
        return r;
    }
    memset(memory, 0, bytes);
    *ret = memory;
    return 0;
}

static int status_make(struct oscar_stream_impl *stream, uint32_t capacity, struct cuda_status **ret,
                       struct oscar_cause *cause) {
    struct cuda_status *status = calloc(1, sizeof(*status) + capacity * sizeof(*status->target));
    if (!status)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a status");
    int r = pinned_alloc(stream->device, capacity * sizeof(int32_t), &status->words, &status->address, cause);
    if (r < 0) {
        free(status);
        return r;
    }
    struct cuda_stream_state *state = stream->state;
    status->state = state;
    status->capacity = capacity;
    status->target = (int32_t **)(status + 1);
    pthread_mutex_lock(&state->lock);
    status->other = state->all;
    state->all = status;
    pthread_mutex_unlock(&state->lock);
    *ret = status;
    return 0;
}

static void status_put_back(struct cuda_status *status) {
    pthread_mutex_lock(&status->state->lock);
    status->next = status->state->free;
    status->state->free = status;
    pthread_mutex_unlock(&status->state->lock);
}

static struct cuda_status *status_find(struct cuda_stream_state *state, uint32_t count) {
    struct cuda_status *found = NULL;
    pthread_mutex_lock(&state->lock);
    for (struct cuda_status **at = &state->free; *at && !found;) {
        if ((*at)->capacity >= count) {
            found = *at;
            *at = found->next;
        } else {
            at = &(*at)->next;
        }
    }
    pthread_mutex_unlock(&state->lock);
    return found;
}

int cuda_status_take(struct oscar_stream_impl *stream, uint32_t count, struct cuda_status **ret,
                     CUdeviceptr *ret_words) {
    struct cuda_status *status = status_find(stream->state, count);
    int r = status ? 0 : status_make(stream, count > STATUS_WORDS ? count : STATUS_WORDS, &status, NULL);
    if (r < 0)
        return r;
    memset(status->words, 0, count * sizeof(*status->words));
    status->count = count;
    *ret = status;
    *ret_words = status->address;
    return 0;
}

static void note_failure(struct cuda_stream_state *state, int failure) {
    pthread_mutex_lock(&state->lock);
    if (state->failure == 0)
        state->failure = failure;
    pthread_mutex_unlock(&state->lock);
}

static void deliver(void *argument) {
    struct cuda_status *status = argument;
    int failure = 0;
    for (uint32_t i = 0; i < status->count; i++) {
        if (failure == 0)
            failure = status->words[i];
        if (status->target[i])
            *status->target[i] = status->words[i];
    }
    if (failure != 0 && status->fails)
        note_failure(status->state, failure);
    status_put_back(status);
}

int cuda_status_deliver(struct oscar_stream_impl *stream, struct cuda_status *status, int32_t *const *target,
                        bool fails) {
    for (uint32_t i = 0; i < status->count; i++)
        status->target[i] = target ? target[i] : NULL;
    status->fails = fails;
    int r =
        cuda_device_result(stream->device, stream->device->driver->cuLaunchHostFunc(stream->stream, deliver, status),
                           "cuLaunchHostFunc", NULL);
    if (r < 0)
        status_put_back(status);
    return r;
}

CUdeviceptr cuda_stream_failure(struct oscar_stream_impl *stream) { return stream->state->word_address; }

static int take_failure(struct cuda_stream_state *state) {
    int reported = __atomic_exchange_n(state->word, 0, __ATOMIC_ACQ_REL);
    pthread_mutex_lock(&state->lock);
    int r = state->failure != 0 ? state->failure : reported;
    state->failure = 0;
    pthread_mutex_unlock(&state->lock);
    return r;
}

/* --- streams ---------------------------------------------------------------------------------------------------------------- */

static void state_free(struct oscar_stream_impl *stream) {
    struct cuda_stream_state *state = stream->state;
    const struct cuda_driver *driver = stream->device->driver;
    while (state->all) {
        struct cuda_status *status = state->all;
        state->all = status->other;
        (void)driver->cuMemFreeHost(status->words);
        free(status);
    }
    if (state->word)
        (void)driver->cuMemFreeHost(state->word);
    pthread_mutex_destroy(&state->lock);
    free(state);
}

static int state_make(struct oscar_stream_impl *stream, struct oscar_cause *cause) {
    struct cuda_stream_state *state = stream->state;
    int r = pinned_alloc(stream->device, sizeof(*state->word), &state->word, &state->word_address, cause);
    for (int i = 0; r == 0 && i < STATUSES_AHEAD; i++) {
        struct cuda_status *status;
        r = status_make(stream, STATUS_WORDS, &status, cause);
        if (r == 0)
            status_put_back(status);
    }
    return r;
}

static int stream_make(struct oscar_stream_impl *stream, const struct oscar_stream_options *options,
                       struct oscar_cause *cause) {
    struct oscar_device *device = stream->device;
    stream->state = calloc(1, sizeof(*stream->state));
    if (!stream->state)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a stream");
    pthread_mutex_init(&stream->state->lock, NULL);
    int r = state_make(stream, cause);
    if (r == 0 && !options->native) {
        int priority = options->low_priority ? device->lowest_priority : device->priority;
        r = cuda_device_result(
            device, device->driver->cuStreamCreateWithPriority(&stream->stream, CU_STREAM_NON_BLOCKING, priority),
            "cuStreamCreateWithPriority", cause);
    }
    if (r < 0)
        state_free(stream);
    return r;
}

int cuda_stream_open(struct oscar_device *device, const struct oscar_stream_options *options,
                     struct oscar_stream_impl **ret, struct oscar_cause *cause) {
    int r = cuda_enter(device, cause);
    if (r < 0)
        return r;
    struct oscar_stream_impl *stream = calloc(1, sizeof(*stream));
    if (stream) {
        stream->device = device;
        stream->stream = options->native;
        stream->owned = !options->native;
        stream->synchronous = !options->native && !options->asynchronous;
        r = stream_make(stream, options, cause);
    } else {
        r = oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a stream");
    }
    cuda_leave(device);
    if (r < 0) {
        free(stream);
        return r;
    }
    *ret = stream;
    return 0;
}

/* Where work hangs, it may still write to what the stream owns: that is left to it. */
void cuda_stream_close(struct oscar_stream_impl *stream) {
    if (!stream)
        return;
    struct oscar_device *device = stream->device;
    bool inside = cuda_enter(device, NULL) == 0;
    if (inside)
        (void)cuda_settle(device, stream->stream, "work of a stream", NULL);
    if (!atomic_load(&device->hangs)) {
        cuda_batch_close(stream->batch);
        state_free(stream);
        if (stream->owned)
            (void)device->driver->cuStreamDestroy(stream->stream);
        free(stream);
    }
    if (inside)
        cuda_leave(device);
}

bool cuda_stream_capturing(struct oscar_stream_impl *stream) {
    CUstreamCaptureStatus status;
    return stream->device->driver->cuStreamIsCapturing(stream->stream, &status) == CUDA_SUCCESS &&
           status != CU_STREAM_CAPTURE_STATUS_NONE;
}

int cuda_stream_wait(struct oscar_stream_impl *stream, uint64_t timeout_ns) {
    if (!stream)
        return 0;
    int r = cuda_enter(stream->device, NULL);
    if (r < 0)
        return r;
    r = cuda_stream_capturing(stream) ? OSCAR_ERR_STATE : cuda_wait(stream->device, stream->stream, timeout_ns, NULL);
    cuda_leave(stream->device);
    return r < 0 ? r : take_failure(stream->state);
}

int cuda_stream_status(struct oscar_stream_impl *stream) {
    if (!stream)
        return 0;
    int r = cuda_enter(stream->device, NULL);
    if (r < 0)
        return r;
    if (!cuda_stream_capturing(stream)) {
        CUresult result = stream->device->driver->cuStreamQuery(stream->stream);
        if (result != CUDA_ERROR_NOT_READY)
            r = cuda_device_result(stream->device, result, "cuStreamQuery", NULL);
    }
    cuda_leave(stream->device);
    return r < 0 ? r : take_failure(stream->state);
}

int cuda_work_begin(struct oscar_stream_impl *stream) {
    return stream ? cuda_enter(stream->device, NULL) : OSCAR_ERR_INVALID;
}

int cuda_work_end(struct oscar_stream_impl *stream, int r) {
    if (stream->synchronous && !cuda_stream_capturing(stream)) {
        int settled = cuda_settle(stream->device, stream->stream, "work of a stream", NULL);
        int failure = settled < 0 ? settled : take_failure(stream->state);
        if (r == 0)
            r = failure;
    }
    cuda_leave(stream->device);
    return r;
}

int cuda_stream_call(struct oscar_stream_impl *stream, void (*function)(void *), void *argument) {
    int r = cuda_work_begin(stream);
    if (r < 0)
        return r;
    r = cuda_device_result(stream->device, stream->device->driver->cuLaunchHostFunc(stream->stream, function, argument),
                           "cuLaunchHostFunc", NULL);
    return cuda_work_end(stream, r);
}

int cuda_copy(struct oscar_stream_impl *stream, void *destination, const void *source, uint64_t bytes) {
    int r = cuda_work_begin(stream);
    if (r < 0)
        return r;
    if (bytes > 0)
        r = cuda_device_result(
            stream->device,
            stream->device->driver->cuMemcpyAsync((CUdeviceptr)destination, (CUdeviceptr)source, bytes, stream->stream),
            "cuMemcpyAsync", NULL);
    return cuda_work_end(stream, r);
}

/* --- fences ----------------------------------------------------------------------------------------------------------------- */

int cuda_fences_register(struct oscar_device *device, void *memory, size_t bytes, struct oscar_cause *cause) {
    if (!memory || bytes == 0 || (uintptr_t)memory % _Alignof(oscar_fence_slot) != 0)
        return oscar_fail(cause, OSCAR_ERR_INVALID, "fence slots must be 8-byte aligned");
    int r = cuda_enter(device, cause);
    if (r < 0)
        return r;
    r = cuda_device_result(
        device,
        device->driver->cuMemHostRegister(memory, bytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP),
        "cuMemHostRegister of fences", cause);
    cuda_leave(device);
    return r;
}

void cuda_fences_unregister(struct oscar_device *device, void *memory) {
    bool inside = cuda_enter(device, NULL) == 0;
    (void)device->driver->cuMemHostUnregister(memory);
    if (inside)
        cuda_leave(device);
}

int cuda_fence_signal(struct oscar_stream_impl *stream, oscar_fence_slot *slot, uint64_t value) {
    int r = cuda_work_begin(stream);
    if (r < 0)
        return r;
    const struct cuda_driver *driver = stream->device->driver;
    CUdeviceptr address;
    if (driver->cuMemHostGetDevicePointer(&address, (void *)slot, 0) != CUDA_SUCCESS)
        r = OSCAR_ERR_INVALID; /* nobody registered it */
    else
        /* The default flags put a barrier before the write: who sees the value sees all earlier work. */
        r = cuda_device_result(
            stream->device, driver->cuStreamWriteValue64(stream->stream, address, value, CU_STREAM_WRITE_VALUE_DEFAULT),
            "cuStreamWriteValue64", NULL);
    return cuda_work_end(stream, r);
}
