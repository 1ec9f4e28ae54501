/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/pool.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "proto/cleanup.h"

struct job_list {
    struct pool_job *first, **end;
};

struct pool_thread {
    struct pool *pool;
    pthread_t thread;
    void *context;
    bool memory;      /* the one of that lane */
    uint64_t running; /* number of its job, 0 for none */
};

struct pool {
    pthread_mutex_t mutex;
    pthread_cond_t work, memory_work; /* a job was queued for the threads that wait here, or the pool stops */
    pthread_cond_t idle;              /* nothing is queued or running */
    struct job_list queue[POOL_LANES], finished;
    uint64_t begun; /* jobs so far */
    uint32_t busy;  /* queued or running */
    bool stopping;
    int event_fd;
    uint32_t threads; /* running, the memory thread first */
    struct pool_thread thread[POOL_MAX_THREADS + 1];
};

static void list_clear(struct job_list *list) {
    list->first = NULL;
    list->end = &list->first;
}

static void list_append(struct job_list *list, struct pool_job *job) {
    job->next = NULL;
    *list->end = job;
    list->end = &job->next;
}

static struct pool_job *list_shift(struct job_list *list) {
    struct pool_job *job = list->first;
    if (job && !(list->first = job->next))
        list->end = &list->first;
    return job;
}

static struct pool_job *next_job(struct pool *pool, bool memory) {
    if (memory)
        return list_shift(&pool->queue[POOL_MEMORY]);
    struct pool_job *job = list_shift(&pool->queue[POOL_URGENT]);
    return job ? job : list_shift(&pool->queue[POOL_ORDINARY]);
}

static void *worker(void *arg) {
    struct pool_thread *self = arg;
    struct pool *pool = self->pool;

    (void)pthread_mutex_lock(&pool->mutex);
    for (;;) {
        struct pool_job *job = next_job(pool, self->memory);
        if (!job) {
            if (pool->stopping)
                break;
            (void)pthread_cond_wait(self->memory ? &pool->memory_work : &pool->work, &pool->mutex);
            continue;
        }
        self->running = ++pool->begun;
        (void)pthread_mutex_unlock(&pool->mutex);
        job->run(job, self->context);
        (void)pthread_mutex_lock(&pool->mutex);
        self->running = 0;
        list_append(&pool->finished, job);
        if (--pool->busy == 0)
            (void)pthread_cond_broadcast(&pool->idle);
        pool_kick(pool);
    }
    (void)pthread_mutex_unlock(&pool->mutex);
    return NULL;
}

int pool_open(uint32_t threads, void *const *context, struct pool **ret, struct oscar_cause *cause) {
    if (threads < 1 || threads > POOL_MAX_THREADS)
        return oscar_fail(cause, OSCAR_ERR_INVALID, "%u worker threads: 1 to %u are possible", threads,
                          POOL_MAX_THREADS);

    struct pool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the worker pool");
    pool->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (pool->event_fd < 0) {
        free(pool);
        return oscar_fail(cause, OSCAR_ERR_LIMIT, "no descriptor for the worker pool's event: %s", strerror(errno));
    }
    (void)pthread_mutex_init(&pool->mutex, NULL);
    (void)pthread_cond_init(&pool->work, NULL);
    (void)pthread_cond_init(&pool->memory_work, NULL);
    (void)pthread_cond_init(&pool->idle, NULL);
    for (unsigned lane = 0; lane < POOL_LANES; lane++)
        list_clear(&pool->queue[lane]);
    list_clear(&pool->finished);

    /* Signals belong to the loop's thread. */
    sigset_t all, before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    int failure = 0;
    while (pool->threads <= threads) {
        struct pool_thread *thread = &pool->thread[pool->threads];
        *thread = (struct pool_thread){.pool = pool, .memory = pool->threads == 0};
        if (!thread->memory && context)
            thread->context = context[pool->threads - 1];
        failure = pthread_create(&thread->thread, NULL, worker, thread);
        if (failure != 0)
            break;
        pool->threads++;
    }
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failure != 0) {
        pool_close(pool);
        return oscar_fail(cause, OSCAR_ERR_LIMIT, "cannot start worker thread: %s", strerror(failure));
    }
    *ret = pool;
    return 0;
}

void pool_close(struct pool *pool) {
    if (!pool)
        return;
    (void)pthread_mutex_lock(&pool->mutex);
    pool->stopping = true;
    (void)pthread_cond_broadcast(&pool->work);
    (void)pthread_cond_broadcast(&pool->memory_work);
    (void)pthread_mutex_unlock(&pool->mutex);
    for (uint32_t i = 0; i < pool->threads; i++)
        (void)pthread_join(pool->thread[i].thread, NULL);
    (void)pthread_cond_destroy(&pool->idle);
    (void)pthread_cond_destroy(&pool->memory_work);
    (void)pthread_cond_destroy(&pool->work);
    (void)pthread_mutex_destroy(&pool->mutex);
    (void)close(pool->event_fd);
    free(pool);
}

void pool_submit(struct pool *pool, struct pool_job *job, enum pool_lane lane) {
    (void)pthread_mutex_lock(&pool->mutex);
    list_append(&pool->queue[lane], job);
    pool->busy++;
    (void)pthread_cond_signal(lane == POOL_MEMORY ? &pool->memory_work : &pool->work);
    (void)pthread_mutex_unlock(&pool->mutex);
}

struct pool_job *pool_take(struct pool *pool) {
    uint64_t count;
    /* Cleared before the list is taken: a job that finishes in between sets it again. */
    (void)!read(pool->event_fd, &count, sizeof count);
    (void)pthread_mutex_lock(&pool->mutex);
    struct pool_job *jobs = pool->finished.first;
    list_clear(&pool->finished);
    (void)pthread_mutex_unlock(&pool->mutex);
    return jobs;
}

void pool_wait(struct pool *pool) {
    (void)pthread_mutex_lock(&pool->mutex);
    while (pool->busy > 0)
        (void)pthread_cond_wait(&pool->idle, &pool->mutex);
    (void)pthread_mutex_unlock(&pool->mutex);
}

uint64_t pool_oldest(struct pool *pool) {
    uint64_t oldest = 0;
    (void)pthread_mutex_lock(&pool->mutex);
    for (uint32_t i = 0; i < pool->threads; i++) {
        uint64_t running = pool->thread[i].running;
        if (running != 0 && (oldest == 0 || running < oldest))
            oldest = running;
    }
    if (oldest == 0 && pool->busy > 0)
        oldest = pool->begun + 1;
    (void)pthread_mutex_unlock(&pool->mutex);
    return oldest;
}

int pool_event_fd(const struct pool *pool) { return pool->event_fd; }

void pool_kick(struct pool *pool) {
    /* Fails only when the counter is full: then it is readable already. */
    uint64_t one = 1;
    (void)!write(pool->event_fd, &one, sizeof one);
}
