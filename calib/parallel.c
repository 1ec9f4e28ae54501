/* SPDX-License-Identifier: Apache-2.0 */
#include "calib/parallel.h"

#include <cblas.h>
#include <pthread.h>

#define MAX_THREADS 256U

struct crew {
    pthread_mutex_t lock;
    uint32_t next, tasks;
    parallel_task run;
    void *argument;
    uint32_t failed_task;
    int error;
    struct oscar_cause cause;
};

void parallel_quiet_blas(void) { openblas_set_num_threads(1); }

static void *work(void *argument) {
    struct crew *crew = argument;
    for (;;) {
        (void)pthread_mutex_lock(&crew->lock);
        uint32_t task = crew->error == 0 ? crew->next++ : crew->tasks;
        (void)pthread_mutex_unlock(&crew->lock);
        if (task >= crew->tasks)
            return NULL;
        struct oscar_cause cause = {0};
        int r = crew->run(crew->argument, task, &cause);
        if (r == 0)
            continue;
        (void)pthread_mutex_lock(&crew->lock);
        if (crew->error == 0 || task < crew->failed_task) {
            crew->error = r;
            crew->failed_task = task;
            crew->cause = cause;
        }
        (void)pthread_mutex_unlock(&crew->lock);
    }
}

int parallel_run(uint32_t threads, uint32_t tasks, parallel_task run, void *argument, struct oscar_cause *cause) {
    struct crew crew = {.lock = PTHREAD_MUTEX_INITIALIZER, .tasks = tasks, .run = run, .argument = argument};
    pthread_t thread[MAX_THREADS];
    uint32_t started = 0;
    if (threads > tasks)
        threads = tasks;
    if (threads > MAX_THREADS)
        threads = MAX_THREADS;
    while (started + 1 < threads && pthread_create(&thread[started], NULL, work, &crew) == 0)
        started++;
    (void)work(&crew); /* this thread is one of them: where no other can be started, it does all */
    for (uint32_t i = 0; i < started; i++)
        (void)pthread_join(thread[i], NULL);
    if (crew.error != 0 && cause != NULL)
        *cause = crew.cause;
    return crew.error;
}
