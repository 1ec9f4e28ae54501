/* SPDX-License-Identifier: Apache-2.0 */
/* A model as a client has it open: its mapped pages, its calibration, its sequences and leases. */
#ifndef OSCAR_CLIENT_MODEL_H
#define OSCAR_CLIENT_MODEL_H

#include <stdatomic.h>
#include <sys/queue.h>

#include "client/src/client.h"
#include "proto/calibration.h"

/* What enqueued work of a model may read: it stays until the last page table that was in use is gone. */
struct oscar_model_memory {
    _Atomic unsigned references;
    struct oscar_mapping *mapping;
    struct oscar_calibration *calibration;
    bool loaded;        /* the calibration, to the device */
    void *file, *turns; /* shared with the daemon, NULL where there is none */
    size_t file_bytes, turns_bytes;
};

struct oscar_model_memory *oscar_model_memory_ref(struct oscar_model_memory *memory);
void oscar_model_memory_unref(struct oscar_model_memory *memory); /* NULL is fine */

struct oscar_model {
    struct oscar_client *client;
    struct oscar_model_info info;
    struct oscar_model_memory *memory;
    uint32_t max_tokens;         /* of a sequence: as far as the turn tables go */
    struct oscar_call *closing;  /* made beforehand, so that closing needs no memory */
    LIST_HEAD(, oscar_seq) seqs; /* all three guarded by the client's lock */
    LIST_HEAD(, oscar_lease) leases;
    LIST_HEAD(, oscar_batch) batches;
    struct oscar_model *next;
};

static inline const struct oscar_device_ops *oscar_model_ops(const struct oscar_model *model) {
    return model->client->attachment->ops;
}

int oscar_model_check(const struct oscar_model *model);
/* Closes its batches, its sequences, its leases and itself, here and, until the deadline, in the daemon. */
void oscar_model_end(struct oscar_model *model, uint64_t deadline);

#endif
