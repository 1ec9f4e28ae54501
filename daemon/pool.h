/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads for what would block the loop: device work that takes milliseconds, and device memory. Jobs go in, finished jobs come
 * out; an eventfd says when. The pool owns no job: whoever submits one embeds it in what it is about and gets it back from
 * pool_take. Memory has a thread of its own, so that nobody who needs some waits behind pages that are being packed.
 */
#ifndef OSCAR_DAEMON_POOL_H
#define OSCAR_DAEMON_POOL_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/cause.h"

#define POOL_MAX_THREADS 64U

struct pool;

enum pool_lane {
    POOL_MEMORY,   /* in the memory thread, in order */
    POOL_URGENT,   /* in a worker thread, before ... */
    POOL_ORDINARY, /* ... these */
    POOL_LANES,
};

struct pool_job {
    void (*run)(struct pool_job *job, void *context); /* in a thread, with that thread's context */
    struct pool_job *next; /* the pool's while it runs, then a list as pool_take returns it */
};

/* threads 1..POOL_MAX_THREADS, and the one for memory. context[i] goes to the jobs that worker thread i runs; context NULL: to
 * all of them, as to those of the memory thread, NULL goes. OSCAR_ERR_INVALID, OSCAR_ERR_NO_MEMORY, OSCAR_ERR_LIMIT. */
int pool_open(uint32_t threads, void *const *context, struct pool **ret, struct oscar_cause *cause);
/* Waits for every submitted job; what is finished and not taken stays the submitter's. NULL is fine. */
void pool_close(struct pool *pool);

/* Never fails. */
void pool_submit(struct pool *pool, struct pool_job *job, enum pool_lane lane);
/* All jobs finished since the last call, in the order in which they finished; NULL for none. Clears the event. */
struct pool_job *pool_take(struct pool *pool);
/* Waits until no job is queued or running. */
void pool_wait(struct pool *pool);
/* The number of the job that has been running for longest; where none is, of the queued one that begins next; 0 for none. Jobs are
 * numbered as they begin. Who sees the same number again and again sees a job that does not end. */
uint64_t pool_oldest(struct pool *pool);

/* Readable while finished jobs, or a kick, have not been taken. */
int pool_event_fd(const struct pool *pool);
/* Makes the event readable, so that the loop comes back to work that was put off. */
void pool_kick(struct pool *pool);

#endif
