/* SPDX-License-Identifier: Apache-2.0 */
#include <stdatomic.h>

#include "kernels/host/host.h"
#include "kernels/host/level_code.h"

/* Pages that one task packs for its head: what the head needs (feedback, turns) is fetched once for them. */
#define PAGES_A_TASK 8U

struct pack_work {
    struct host_pool *pool;
    const struct host_level_code *code;
    const struct oscar_geometry *geometry;
    const struct oscar_calibration *calibration;
    const struct oscar_pack_item *item;
    uint32_t items;
    uint32_t batches; /* of PAGES_A_TASK items */
    atomic_bool out_of_memory;
};

static void pack_task(void *argument, uint32_t task, uint32_t worker) {
    struct pack_work *work = argument;
    uint32_t d = work->geometry->head_dim;
    uint32_t first = task % work->batches * PAGES_A_TASK;
    size_t record = task / work->batches; /* layer * kv_heads + head */
    struct host_pack_scratch *scratch = host_pool_scratch(work->pool, worker, work->code->pack_scratch_bytes());
    if (!scratch) {
        atomic_store_explicit(&work->out_of_memory, true, memory_order_relaxed);
        return;
    }
    work->code->pack_begin(scratch, work->calibration, &work->calibration->heads[record]);
    for (uint32_t i = first; i < work->items && i < first + PAGES_A_TASK; i++) {
        const struct oscar_pack_item *item = &work->item[i];
        bool finite = work->code->pack(scratch, item->dense + record * oscar_dense_record_bytes(d), item->position,
                                       item->packed + record * oscar_packed_record_bytes(d));
        if (!finite)
            __atomic_store_n(item->status, OSCAR_ERR_NOT_FINITE, __ATOMIC_RELAXED);
    }
}

int host_pack(struct host_pool *pool, enum host_level level, const struct oscar_geometry *geometry,
              const struct oscar_calibration *calibration, const struct oscar_pack_item *item, uint32_t items) {
    struct pack_work work = {
        .pool = pool,
        .code = host_level_code(level),
        .geometry = geometry,
        .calibration = calibration,
        .item = item,
        .items = items,
        .batches = (items + PAGES_A_TASK - 1) / PAGES_A_TASK,
    };
    for (uint32_t i = 0; i < items; i++)
        *item[i].status = 0;
    host_pool_run(pool, geometry->layers * geometry->kv_heads * work.batches, pack_task, &work);
    return atomic_load_explicit(&work.out_of_memory, memory_order_relaxed) ? OSCAR_ERR_NO_MEMORY : 0;
}
