/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Worker threads for what would block the loop: device work that takes milliseconds. Jobs go in, finished jobs come out; an
 * eventfd says when. The pool owns no job: whoever submits one embeds it in what it is about and gets it back from pool_take.
 */
#ifndef OSCAR_DAEMON_POOL_H
#define OSCAR_DAEMON_POOL_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/cause.h"

#define POOL_MAX_THREADS 64U

struct pool;

struct pool_job {
    void (*run)(struct pool_job *job); /* in a worker thread */
    struct pool_job *next;             /* the pool's while it runs, then a list as pool_take returns it */
};

/* threads 1..POOL_MAX_THREADS. OSCAR_ERR_INVALID, OSCAR_ERR_NO_MEMORY, OSCAR_ERR_LIMIT. */
int pool_open(uint32_t threads, struct pool **ret, struct oscar_cause *cause);
/* Waits for every submitted job; what is finished and not taken stays the submitter's. NULL is fine. */
void pool_close(struct pool *pool);

/* Urgent jobs overtake the others. Never fails. */
void pool_submit(struct pool *pool, struct pool_job *job, bool urgent);
/* All jobs finished since the last call, in the order in which they finished; NULL for none. Clears the event. */
struct pool_job *pool_take(struct pool *pool);
/* Waits until no job is queued or running. */
void pool_wait(struct pool *pool);

/* Readable while finished jobs, or a kick, have not been taken. */
int pool_event_fd(const struct pool *pool);
/* Makes the event readable, so that the loop comes back to work that was put off. */
void pool_kick(struct pool *pool);

#endif
