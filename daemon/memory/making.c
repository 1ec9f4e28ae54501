/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chunks are made and freed in the pool's memory thread: on a GPU each of both may take milliseconds, and both may wait for a
 * device that does not answer. The descriptors for other processes are made along with the chunk, so that the loop never calls
 * the device.
 */
#include <stdlib.h>

#include "daemon/memory/arena.h"
#include "proto/cleanup.h"

static void device_part_free(struct chunk *chunk, const struct oscar_device_ops *ops) {
    oscar_cleanup_close(&chunk->reader_fd);
    oscar_cleanup_close(&chunk->writer_fd);
    ops->chunk_free(chunk->device);
    chunk->device = NULL;
}

static void make_run(struct pool_job *job, void *context) {
    (void)context;
    struct chunk *chunk = (struct chunk *)job;
    const struct memory_options *options = &chunk->memory->options;
    const struct oscar_device_ops *ops = options->ops;
    int r = ops->chunk_create(options->device, chunk->bytes, &chunk->device, &chunk->cause);
    if (r == 0)
        r = ops->chunk_export(chunk->device, false, &chunk->reader_fd, &chunk->cause);
    if (r == 0 && chunk->arena->form == OSCAR_FORM_DENSE)
        r = ops->chunk_export(chunk->device, true, &chunk->writer_fd, &chunk->cause);
    if (r == 0)
        chunk->address = ops->chunk_address(chunk->device);
    else
        device_part_free(chunk, ops);
    chunk->failure = r;
}

static void free_run(struct pool_job *job, void *context) {
    (void)context;
    struct chunk *chunk = (struct chunk *)job;
    device_part_free(chunk, chunk->memory->options.ops);
}

void chunk_make(struct chunk *chunk) {
    struct arena *arena = chunk->arena;
    struct memory *memory = arena->memory;
    chunk->job.run = make_run;
    chunk->memory = memory;
    chunk->reader_fd = chunk->writer_fd = -1;
    arena->making++;
    chunk->share->making++;
    memory->total_bytes += chunk->bytes;
    memory->making_bytes += chunk->bytes;
    LIST_INSERT_HEAD(&memory->making, chunk, in_memory);
    pool_submit(memory->options.pool, &chunk->job, POOL_MEMORY);
}

void chunk_free(struct chunk *chunk) {
    struct memory *memory = chunk->memory;
    chunk->job.run = free_run;
    chunk->arena = NULL;
    chunk->share = NULL;
    memory->freeing_bytes += chunk->bytes;
    LIST_INSERT_HEAD(&memory->freeing, chunk, in_memory);
    pool_submit(memory->options.pool, &chunk->job, POOL_MEMORY);
}

bool memory_is_job(const struct pool_job *job) { return job->run == make_run || job->run == free_run; }

static void discard(struct chunk *chunk) {
    chunk->memory->total_bytes -= chunk->bytes;
    chunk_slots_free(chunk);
    free(chunk);
}

static int made(struct chunk *chunk, struct oscar_cause *cause) {
    struct memory *memory = chunk->memory;
    struct share *share = chunk->share;
    LIST_REMOVE(chunk, in_memory);
    memory->making_bytes -= chunk->bytes;
    chunk->arena->making--;
    if (share)
        share->making--;
    int r = chunk->failure;
    if (r < 0)
        *cause = chunk->cause;
    else if (!share)
        chunk_free(chunk);
    else
        r = arena_chunk_add(chunk, cause);
    if (r < 0 && share && !chunk->ahead) {
        share->failure = r;
        share->cause = *cause;
    }
    if (chunk->failure < 0)
        discard(chunk);
    return r;
}

int memory_finished(struct pool_job *job, struct oscar_cause *cause) {
    struct chunk *chunk = (struct chunk *)job;
    if (job->run == make_run)
        return made(chunk, cause);
    LIST_REMOVE(chunk, in_memory);
    chunk->memory->freeing_bytes -= chunk->bytes;
    discard(chunk);
    return 0;
}
