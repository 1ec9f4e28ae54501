/* SPDX-License-Identifier: Apache-2.0 */
/* Streams of the fake driver: threads that run commands in order, each as late as FAKE_CUDA_DELAY_US lets it be; events. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tests/support/fake_cuda/inside.h"

struct CUstream_st {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct command *first, **last;
    uint64_t enqueued, done;
    bool closing;
    CUgraph capturing;            /* NULL: it is not being captured */
    unsigned longest_us, numbers; /* commands are late by so much at most; state of the numbers that say by how much */
};

struct CUevent_st {
    CUstream stream;
    uint64_t after; /* done when the stream has done so many */
};

static void be_late(CUstream stream) {
    if (stream->longest_us == 0)
        return;
    stream->numbers = stream->numbers * 1664525 + 1013904223;
    unsigned late_us = (unsigned)((uint64_t)(stream->numbers >> 8) * (stream->longest_us + 1) >> 24);
    (void)nanosleep(&(struct timespec){.tv_sec = late_us / 1000000, .tv_nsec = late_us % 1000000 * 1000L}, NULL);
}

static void *run_stream(void *argument) {
    CUstream stream = argument;
    pthread_mutex_lock(&stream->lock);
    for (;;) {
        while (!stream->first && !stream->closing)
            pthread_cond_wait(&stream->changed, &stream->lock);
        struct command *command = stream->first;
        if (!command)
            break;
        stream->first = command->next;
        if (!stream->first)
            stream->last = &stream->first;
        pthread_mutex_unlock(&stream->lock);
        be_late(stream);
        command->run(command);
        fake_command_free(command);
        atomic_fetch_sub_explicit(&fake_in_flight, 1, memory_order_release);
        pthread_mutex_lock(&stream->lock);
        stream->done++;
        pthread_cond_broadcast(&stream->changed);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

static CUstream stream_new(void) {
    static atomic_uint made; /* no two streams draw the same numbers */
    CUstream stream = calloc(1, sizeof(*stream));
    if (!stream)
        return NULL;
    stream->last = &stream->first;
    stream->longest_us = (unsigned)fake_given("FAKE_CUDA_DELAY_US", 0);
    stream->numbers = atomic_fetch_add_explicit(&made, 1, memory_order_relaxed) * 2654435761U;
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->changed, NULL);
    if (pthread_create(&stream->thread, NULL, run_stream, stream) == 0)
        return stream;
    free(stream);
    return NULL;
}

/* The default stream, which is always there. */
static CUstream legacy;
static void legacy_make(void) { legacy = stream_new(); }
static CUstream actual(CUstream stream) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (stream != NULL && stream != CU_STREAM_LEGACY)
        return stream;
    pthread_once(&once, legacy_make);
    return legacy;
}

EXPORT CUresult cuStreamCreateWithPriority(CUstream *ret, unsigned int flags, int priority) {
    (void)flags;
    IN_CONTEXT();
    fake_unsafe_in_capture();
    CUstream stream = stream_new();
    if (!stream)
        return CUDA_ERROR_OUT_OF_MEMORY;
    fake_cuda.priority = priority;
    *ret = stream;
    fake_born();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamDestroy(CUstream stream) {
    pthread_mutex_lock(&stream->lock);
    stream->closing = true;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    pthread_join(stream->thread, NULL);
    pthread_mutex_destroy(&stream->lock);
    pthread_cond_destroy(&stream->changed);
    free(stream);
    fake_gone();
    return CUDA_SUCCESS;
}

void fake_command_free(struct command *command) {
    if (command->owns)
        free(command->to);
    free(command);
}

CUresult fake_stream_capture(CUstream stream, CUgraph graph) {
    if (actual(stream)->capturing && graph)
        return CUDA_ERROR_ILLEGAL_STATE;
    actual(stream)->capturing = graph;
    return CUDA_SUCCESS;
}

CUgraph fake_stream_captures(CUstream stream) { return actual(stream)->capturing; }

CUresult fake_enqueue(CUstream to, struct command command) {
    CUstream stream = actual(to);
    if (stream->capturing)
        return fake_graph_add(stream->capturing, command);
    struct command *queued = malloc(sizeof(*queued));
    if (!queued)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *queued = command;
    atomic_fetch_add_explicit(&fake_in_flight, 1, memory_order_relaxed);
    pthread_mutex_lock(&stream->lock);
    *stream->last = queued;
    stream->last = &queued->next;
    stream->enqueued++;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    return CUDA_SUCCESS;
}

static bool has_done(CUstream of, uint64_t count) {
    CUstream stream = actual(of);
    pthread_mutex_lock(&stream->lock);
    bool done = stream->done >= count;
    pthread_mutex_unlock(&stream->lock);
    return done;
}

static uint64_t enqueued(CUstream of) {
    CUstream stream = actual(of);
    pthread_mutex_lock(&stream->lock);
    uint64_t count = stream->enqueued;
    pthread_mutex_unlock(&stream->lock);
    return count;
}

EXPORT CUresult cuStreamQuery(CUstream stream) {
    IN_CONTEXT_ASKING();
    if (fake_cuda.capturing || actual(stream)->capturing)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return has_done(stream, enqueued(stream)) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

EXPORT CUresult cuStreamSynchronize(CUstream stream) {
    while (!has_done(stream, enqueued(stream)))
        usleep(100);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    *status = fake_cuda.capturing || actual(stream)->capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                                                               : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventCreate(CUevent *ret, unsigned int flags) {
    (void)flags;
    IN_CONTEXT();
    *ret = calloc(1, sizeof(**ret));
    if (!*ret)
        return CUDA_ERROR_OUT_OF_MEMORY;
    fake_born();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventDestroy(CUevent event) {
    free(event);
    fake_gone();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventRecord(CUevent event, CUstream stream) {
    IN_CONTEXT();
    if (fake_cuda.capturing || actual(stream)->capturing)
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    event->stream = stream;
    event->after = enqueued(stream);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventQuery(CUevent event) {
    IN_CONTEXT_ASKING();
    fake_unsafe_in_capture();
    return has_done(event->stream, event->after) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

static void run_copy(const struct command *command) { memmove(command->to, command->from, command->bytes); }
static void run_set(const struct command *command) { memset(command->to, (int)command->value, command->bytes); }
static void run_call(const struct command *command) { command->function(command->to); }
void fake_run_write(const struct command *command) {
    if (!fake_is_known(command->to)) {
        fake_cuda.sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
        return;
    }
    __atomic_store_n((uint64_t *)command->to, command->value, __ATOMIC_RELEASE);
}

EXPORT CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    IN_CONTEXT();
    return fake_enqueue(
        stream, (struct command){.run = run_copy, .to = (void *)to, .from = (const void *)from, .bytes = bytes});
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
    IN_CONTEXT();
    return fake_enqueue(stream, (struct command){.run = run_set, .to = (void *)to, .value = value, .bytes = bytes});
}

EXPORT CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *argument) {
    IN_CONTEXT();
    return fake_enqueue(stream, (struct command){.run = run_call, .function = function, .to = argument});
}

EXPORT CUresult cuStreamWriteValue64(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned int flags) {
    (void)flags;
    IN_CONTEXT();
    if (!fake_is_known((void *)address))
        return CUDA_ERROR_INVALID_VALUE;
    return fake_enqueue(stream, (struct command){.run = fake_run_write, .to = (void *)address, .value = value});
}
