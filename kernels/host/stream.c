/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/host/stream.h"

#include <errno.h>
#include <fenv.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <time.h>

#define LOW_PRIORITY_NICE 10

struct host_command {
    struct host_command *next;
    host_command_function *function;
    _Alignas(16) unsigned char payload[];
};

struct oscar_stream_impl {
    enum host_level level;
    struct oscar_stream_options options;
    struct host_pool *pool;
    /* The rest is for asynchronous streams, guarded by the mutex. */
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t queued;  /* a command, or the end */
    pthread_cond_t settled; /* a command is done, or the thread has opened its pool */
    struct host_command *first;
    struct host_command **last;
    uint64_t enqueued, done; /* counts of commands */
    int failure;             /* the first one since it was last asked for */
    int opened;              /* 1 while the thread starts, then 0 or an error */
    struct oscar_cause open_cause;
    bool closing;
};

struct host_command *host_command_make(host_command_function *function, size_t bytes, void **ret_payload) {
    struct host_command *command = malloc(sizeof(*command) + bytes);
    if (!command)
        return NULL;
    command->next = NULL;
    command->function = function;
    *ret_payload = command->payload;
    return command;
}

static int command_run(const struct host_runner *runner, struct host_command *command) {
    int r = command->function(runner, command->payload);
    free(command);
    return r;
}

/* In the caller's thread: with the default rounding and no flush to zero, whatever the caller has set for its own sums. */
static int command_run_here(const struct host_runner *runner, struct host_command *command) {
    fenv_t callers;
    fegetenv(&callers);
    fesetenv(FE_DFL_ENV);
    int r = command_run(runner, command);
    fesetenv(&callers);
    return r;
}

static int command_run_without_stream(struct host_command *command) {
    struct host_runner runner;
    int r = host_level_current(&runner.level, NULL);
    if (r == 0)
        r = host_pool_open(1, &runner.pool, NULL);
    if (r < 0) {
        free(command);
        return r;
    }
    r = command_run_here(&runner, command);
    host_pool_close(runner.pool);
    return r;
}

int host_stream_submit(struct oscar_stream_impl *stream, struct host_command *command) {
    if (!stream)
        return command_run_without_stream(command);
    if (!stream->options.asynchronous)
        return command_run_here(&(struct host_runner){.pool = stream->pool, .level = stream->level}, command);
    pthread_mutex_lock(&stream->mutex);
    *stream->last = command;
    stream->last = &command->next;
    stream->enqueued++;
    pthread_cond_signal(&stream->queued);
    pthread_mutex_unlock(&stream->mutex);
    return 0;
}

/* The pool's threads are made here, so that they have this thread's priority. */
static int stream_thread_open(struct oscar_stream_impl *stream) {
    if (stream->options.low_priority)
        (void)setpriority(PRIO_PROCESS, 0, LOW_PRIORITY_NICE); /* on Linux: of the calling thread */
    return host_pool_open(stream->options.threads, &stream->pool, &stream->open_cause);
}

static void *stream_thread(void *argument) {
    struct oscar_stream_impl *stream = argument;
    int opened = stream_thread_open(stream);
    pthread_mutex_lock(&stream->mutex);
    stream->opened = opened;
    pthread_cond_broadcast(&stream->settled);
    struct host_runner runner = {.pool = stream->pool, .level = stream->level};
    while (opened == 0) {
        while (!stream->first && !stream->closing)
            pthread_cond_wait(&stream->queued, &stream->mutex);
        struct host_command *command = stream->first;
        if (!command)
            break;
        stream->first = command->next;
        if (!stream->first)
            stream->last = &stream->first;
        pthread_mutex_unlock(&stream->mutex);
        int r = command_run(&runner, command);
        pthread_mutex_lock(&stream->mutex);
        if (r < 0 && stream->failure == 0)
            stream->failure = r;
        stream->done++;
        pthread_cond_broadcast(&stream->settled);
    }
    pthread_mutex_unlock(&stream->mutex);
    return NULL;
}

static void stream_destroy(struct oscar_stream_impl *stream) {
    host_pool_close(stream->pool);
    pthread_cond_destroy(&stream->settled);
    pthread_cond_destroy(&stream->queued);
    pthread_mutex_destroy(&stream->mutex);
    free(stream);
}

static int stream_start(struct oscar_stream_impl *stream, struct oscar_cause *cause) {
    if (host_thread_start(&stream->thread, "oscar-stream", stream_thread, stream) != 0)
        return oscar_fail(cause, OSCAR_ERR_LIMIT, "a thread for a stream cannot be made");
    pthread_mutex_lock(&stream->mutex);
    while (stream->opened > 0)
        pthread_cond_wait(&stream->settled, &stream->mutex);
    int r = stream->opened;
    pthread_mutex_unlock(&stream->mutex);
    if (r < 0) {
        pthread_join(stream->thread, NULL);
        return oscar_fail(cause, r, "%s", stream->open_cause.text);
    }
    return 0;
}

int host_stream_open(struct oscar_device *device, const struct oscar_stream_options *options,
                     struct oscar_stream_impl **ret, struct oscar_cause *cause) {
    struct oscar_stream_impl *stream = calloc(1, sizeof(*stream));
    if (!stream)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a stream");
    stream->level = device->level;
    stream->options = *options;
    stream->last = &stream->first;
    stream->opened = 1;
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_mutex_init(&stream->mutex, NULL);
    pthread_cond_init(&stream->queued, NULL);
    pthread_cond_init(&stream->settled, &clock);
    pthread_condattr_destroy(&clock);
    int r =
        options->asynchronous ? stream_start(stream, cause) : host_pool_open(options->threads, &stream->pool, cause);
    if (r < 0) {
        stream_destroy(stream);
        return r;
    }
    *ret = stream;
    return 0;
}

void host_stream_close(struct oscar_stream_impl *stream) {
    if (!stream)
        return;
    if (stream->options.asynchronous) {
        pthread_mutex_lock(&stream->mutex);
        stream->closing = true;
        pthread_cond_signal(&stream->queued);
        pthread_mutex_unlock(&stream->mutex);
        pthread_join(stream->thread, NULL);
    }
    stream_destroy(stream);
}

static struct timespec deadline_after(uint64_t timeout_ns) {
    const uint64_t second = 1000000000;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    uint64_t nanoseconds = (uint64_t)now.tv_nsec + timeout_ns % second;
    now.tv_sec += (time_t)(timeout_ns / second + nanoseconds / second); /* 584 years at most: no overflow */
    now.tv_nsec = (long)(nanoseconds % second);
    return now;
}

static int take_failure(struct oscar_stream_impl *stream) {
    int r = stream->failure;
    stream->failure = 0;
    return r;
}

int host_stream_wait(struct oscar_stream_impl *stream, uint64_t timeout_ns) {
    if (!stream || !stream->options.asynchronous)
        return 0;
    struct timespec deadline = deadline_after(timeout_ns);
    pthread_mutex_lock(&stream->mutex);
    uint64_t wanted = stream->enqueued; /* what others enqueue meanwhile does not prolong the wait */
    int timed = 0;
    while (stream->done < wanted && timed != ETIMEDOUT)
        timed = pthread_cond_timedwait(&stream->settled, &stream->mutex, &deadline);
    int r = stream->done < wanted ? OSCAR_ERR_TIMEOUT : take_failure(stream);
    pthread_mutex_unlock(&stream->mutex);
    return r;
}

int host_stream_status(struct oscar_stream_impl *stream) {
    if (!stream || !stream->options.asynchronous)
        return 0;
    pthread_mutex_lock(&stream->mutex);
    int r = take_failure(stream);
    pthread_mutex_unlock(&stream->mutex);
    return r;
}
