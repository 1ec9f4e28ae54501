/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/host/pool.h"

#include <fenv.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

struct pool_worker {
    struct host_pool *pool;
    uint32_t index;
    pthread_t thread;
    void *scratch;
    size_t scratch_bytes;
};

struct host_pool {
    uint32_t threads;
    uint32_t started; /* threads made, without the caller */
    pthread_mutex_t mutex;
    pthread_cond_t work;      /* a new run, or the end */
    pthread_cond_t done;      /* the last helper left the run */
    atomic_uint_fast64_t run; /* counts runs; changed under the mutex, like the fields below */
    bool open;                /* helpers may still enter the current run */
    uint32_t inside;          /* helpers that have entered and not left it */
    bool closing;
    host_pool_task *task;
    void *argument;
    uint32_t tasks;
    atomic_uint_fast64_t next; /* the next task to take; 64 bits: it may pass `tasks` by the number of threads */
    struct pool_worker worker[];
};

static void pool_take_tasks(struct host_pool *pool, uint32_t worker) {
    for (;;) {
        uint64_t task = atomic_fetch_add_explicit(&pool->next, 1, memory_order_relaxed);
        if (task >= pool->tasks)
            return;
        pool->task(pool->argument, (uint32_t)task, worker);
    }
}

/* One layer follows another: to look out for the next run for some microseconds is cheaper than to be woken for it. */
#define LOOK_OUTS 1000U

static void look_out(const struct host_pool *pool, uint64_t seen) {
    for (unsigned i = 0; i < LOOK_OUTS && atomic_load_explicit(&pool->run, memory_order_relaxed) == seen; i++) {
#ifdef __x86_64__
        __builtin_ia32_pause();
#endif
    }
}

static void *pool_thread(void *argument) {
    struct pool_worker *self = argument;
    struct host_pool *pool = self->pool;
    uint64_t seen = 0;
    pthread_mutex_lock(&pool->mutex);
    while (!pool->closing) {
        uint64_t run = atomic_load_explicit(&pool->run, memory_order_relaxed);
        if (run == seen) {
            pthread_cond_wait(&pool->work, &pool->mutex);
            continue;
        }
        seen = run;
        if (!pool->open) /* woken too late: the others have done it */
            continue;
        pool->inside++;
        pthread_mutex_unlock(&pool->mutex);
        pool_take_tasks(pool, self->index);
        pthread_mutex_lock(&pool->mutex);
        if (--pool->inside == 0)
            pthread_cond_signal(&pool->done);
        pthread_mutex_unlock(&pool->mutex);
        look_out(pool, seen);
        pthread_mutex_lock(&pool->mutex);
    }
    pthread_mutex_unlock(&pool->mutex);
    return NULL;
}

int host_thread_start(pthread_t *ret, const char *name, void *(*function)(void *), void *argument) {
    /* A thread inherits its creator's signal mask, rounding and flush-to-zero modes. The handlers of a worker's process are
     * for its own threads, and page bytes must not depend on the modes. */
    sigset_t all;
    sigset_t callers_signals;
    fenv_t callers_modes;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &callers_signals);
    fegetenv(&callers_modes);
    fesetenv(FE_DFL_ENV);
    int error = pthread_create(ret, NULL, function, argument);
    fesetenv(&callers_modes);
    pthread_sigmask(SIG_SETMASK, &callers_signals, NULL);
    if (error == 0)
        (void)pthread_setname_np(*ret, name);
    return error;
}

int host_pool_open(uint32_t threads, struct host_pool **ret, struct oscar_cause *cause) {
    if (threads == 0 || threads > HOST_MAX_THREADS)
        return oscar_fail(cause, OSCAR_ERR_INVALID, "%u threads: 1 to %u are possible", threads, HOST_MAX_THREADS);
    struct host_pool *pool = calloc(1, sizeof(*pool) + threads * sizeof(pool->worker[0]));
    if (!pool)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a pool of %u threads", threads);
    pool->threads = threads;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->done, NULL);
    for (uint32_t i = 0; i < threads; i++) {
        pool->worker[i].pool = pool;
        pool->worker[i].index = i;
    }
    for (uint32_t i = 1; i < threads; i++) {
        int error = host_thread_start(&pool->worker[i].thread, "oscar-pool", pool_thread, &pool->worker[i]);
        if (error) {
            host_pool_close(pool);
            return oscar_fail(cause, OSCAR_ERR_LIMIT, "thread %u of %u cannot be made: %s", i, threads,
                              strerror(error));
        }
        pool->started++;
    }
    *ret = pool;
    return 0;
}

void host_pool_close(struct host_pool *pool) {
    if (!pool)
        return;
    pthread_mutex_lock(&pool->mutex);
    pool->closing = true;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->mutex);
    for (uint32_t i = 1; i <= pool->started; i++)
        pthread_join(pool->worker[i].thread, NULL);
    for (uint32_t i = 0; i < pool->threads; i++)
        free(pool->worker[i].scratch);
    pthread_cond_destroy(&pool->done);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->mutex);
    free(pool);
}

uint32_t host_pool_threads(const struct host_pool *pool) { return pool->threads; }

void host_pool_run(struct host_pool *pool, uint32_t tasks, host_pool_task *task, void *argument) {
    if (pool->started == 0 || tasks <= 1) {
        for (uint32_t i = 0; i < tasks; i++)
            task(argument, i, 0);
        return;
    }
    pthread_mutex_lock(&pool->mutex);
    pool->task = task;
    pool->argument = argument;
    pool->tasks = tasks;
    atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
    pool->open = true;
    atomic_fetch_add_explicit(&pool->run, 1, memory_order_relaxed);
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->mutex);
    pool_take_tasks(pool, 0);
    /* Helpers that are inside have to leave before the next run may change what they read; who has not woken up need not come. */
    pthread_mutex_lock(&pool->mutex);
    pool->open = false;
    while (pool->inside != 0)
        pthread_cond_wait(&pool->done, &pool->mutex);
    pthread_mutex_unlock(&pool->mutex);
}

void *host_pool_scratch(struct host_pool *pool, uint32_t worker, size_t bytes) {
    struct pool_worker *owner = &pool->worker[worker];
    if (owner->scratch_bytes < bytes) {
        size_t rounded = (bytes + 4095) & ~(size_t)4095;
        void *memory = aligned_alloc(64, rounded);
        if (!memory)
            return NULL;
        free(owner->scratch);
        owner->scratch = memory;
        owner->scratch_bytes = rounded;
    }
    return owner->scratch;
}
