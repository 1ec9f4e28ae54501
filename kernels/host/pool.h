/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A small fork-join pool: one call runs a number of independent tasks on a fixed number of threads, the caller being one of
 * them, and returns when all are done. Which thread takes which task is not fixed, so a result that must repeat bit for bit
 * may depend on the task's number only.
 */
#ifndef OSCAR_KERNELS_HOST_POOL_H
#define OSCAR_KERNELS_HOST_POOL_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/cause.h"

#define HOST_MAX_THREADS 256U

struct host_pool;

/* `worker` is 0..threads-1 and never runs two tasks at once; 0 is the caller of host_pool_run(). */
typedef void host_pool_task(void *argument, uint32_t task, uint32_t worker);

/* threads 1..HOST_MAX_THREADS; with 1 no thread is made. OSCAR_ERR_INVALID, OSCAR_ERR_NO_MEMORY, OSCAR_ERR_LIMIT. */
int host_pool_open(uint32_t threads, struct host_pool **ret, struct oscar_cause *cause);
void host_pool_close(struct host_pool *pool); /* NULL is fine */
uint32_t host_pool_threads(const struct host_pool *pool);

/* Runs task(argument, 0..tasks-1, worker). One call at a time for a pool; a task must not call it for its own pool. */
void host_pool_run(struct host_pool *pool, uint32_t tasks, host_pool_task *task, void *argument);

/* At least `bytes` bytes, 64-byte aligned, of the worker's own; kept for the next call, contents undefined; valid until the
 * worker's next call of it or host_pool_close(). NULL when memory is out. */
void *host_pool_scratch(struct host_pool *pool, uint32_t worker, size_t bytes);

/* Starts a thread with a name, the default rounding and no flush to zero, in which no signal handler of the process runs.
 * Returns 0 or an errno. */
int host_thread_start(pthread_t *ret, const char *name, void *(*function)(void *), void *argument);

#endif
