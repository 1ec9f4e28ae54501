/* SPDX-License-Identifier: Apache-2.0 */
#include <stdatomic.h>

#include "kernels/host/host.h"
#include "kernels/host/level_code.h"

/* Fewer rows than this are not worth waking another thread for. */
#define ROWS_A_TASK 64U

struct store_work {
    const struct host_level_code *code;
    const struct oscar_store_args *args;
    uint32_t pieces; /* (side, head, page) triples; each lies in one page */
    uint32_t pieces_a_task;
    atomic_bool out_of_range;
};

static uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

/* The tokens of one page, one head of K or V. */
static bool store_piece(const struct store_work *work, uint32_t piece) {
    const struct oscar_store_args *args = work->args;
    const struct oscar_geometry *geometry = args->geometry;
    uint32_t d = geometry->head_dim;
    bool is_v = piece % 2 != 0;
    uint32_t head = piece / 2 % geometry->kv_heads;
    uint32_t page = piece / 2 / geometry->kv_heads;
    uint32_t first_row = page == 0 ? args->first_row : 0;
    uint32_t first_token = page == 0 ? 0 : page * OSCAR_PAGE_TOKENS - args->first_row;
    const struct oscar_rows *from = is_v ? &args->v : &args->k;
    const struct oscar_head_calibration *calibration = oscar_calibration_head(args->calibration, args->layer, head);
    size_t record = ((size_t)args->layer * geometry->kv_heads + head) * oscar_dense_record_bytes(d);
    size_t row = (is_v ? OSCAR_PAGE_TOKENS : 0) + first_row;
    struct host_store_rows rows = {
        .from = (const uint16_t *)from->data + (int64_t)first_token * from->token_stride +
                (int64_t)head * from->head_stride,
        .from_stride = from->token_stride,
        .to = (uint16_t *)(args->pages[page] + record) + row * d,
        .rows = smaller(OSCAR_PAGE_TOKENS - first_row, args->tokens - first_token),
        .d = d,
        .dtype = geometry->dtype,
        .matrix = is_v ? calibration->rotation_v : calibration->rotation_k,
    };
    return work->code->store(&rows);
}

static void store_task(void *argument, uint32_t task, uint32_t worker) {
    struct store_work *work = argument;
    (void)worker;
    uint32_t first = task * work->pieces_a_task;
    for (uint32_t piece = first; piece < smaller(work->pieces, first + work->pieces_a_task); piece++)
        if (!store_piece(work, piece))
            atomic_store_explicit(&work->out_of_range, true, memory_order_relaxed);
}

int host_store(struct host_pool *pool, enum host_level level, const struct oscar_store_args *args) {
    if (args->tokens == 0)
        return 0;
    uint32_t pages = (args->first_row + args->tokens + OSCAR_PAGE_TOKENS - 1) / OSCAR_PAGE_TOKENS;
    struct store_work work = {
        .code = host_level_code(level),
        .args = args,
        .pieces = pages * args->geometry->kv_heads * 2,
        .pieces_a_task = (ROWS_A_TASK + args->tokens - 1) / args->tokens,
    };
    host_pool_run(pool, (work.pieces + work.pieces_a_task - 1) / work.pieces_a_task, store_task, &work);
    return atomic_load_explicit(&work.out_of_range, memory_order_relaxed) ? OSCAR_ERR_NOT_FINITE : 0;
}

struct inspect_work {
    const struct host_level_code *code;
    const uint8_t *dense;
    size_t elements; /* of one layer */
    atomic_bool out_of_range;
};

static void inspect_task(void *argument, uint32_t task, uint32_t worker) {
    struct inspect_work *work = argument;
    (void)worker;
    if (!work->code->inspect((const uint16_t *)work->dense + task * work->elements, work->elements))
        atomic_store_explicit(&work->out_of_range, true, memory_order_relaxed);
}

int host_inspect(struct host_pool *pool, enum host_level level, const struct oscar_geometry *geometry,
                 const uint8_t *dense) {
    struct inspect_work work = {
        .code = host_level_code(level),
        .dense = dense,
        .elements = geometry->kv_heads * oscar_dense_record_bytes(geometry->head_dim) / sizeof(uint16_t),
    };
    host_pool_run(pool, geometry->layers, inspect_task, &work);
    return atomic_load_explicit(&work.out_of_range, memory_order_relaxed) ? OSCAR_ERR_NOT_FINITE : 0;
}
