/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Packing in bulk: OSCAR_GPU_PACK_ROWS rows (of K and of V, each as often as calibrations pack it), on a GPU at least
 * 10^8 unless told otherwise, beside the host backend's kernels, which its own tests hold to the oracle. Packed pages
 * are poison before.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/reference.h"
#include "proto/geometry.h"
#include "tests/gpu/pack_cases.h"
#include "tests/gpu/rig.h"

static struct rig *rig;
static struct kernel_random source;

#define BULK_PAGES 32U
#define BULK_ROWS_A_KIND 64U /* drawn well; the rows that are packed are made of them, fast */

struct bulk {
    struct kernel_model *model[PACK_CASES];
    uint16_t *drawn[3]; /* [head size][kind][row][d] */
    uint64_t rows;      /* to do */
    uint64_t taken, packed[3], differing, failures;
};

struct bulk_worker {
    struct bulk *bulk;
    struct kernel_random random;
    struct oscar_stream_impl *stream;
    struct host_pool *pool;
    uint8_t *dense, *packed, *expected; /* BULK_PAGES pages of the largest geometry */
    uint8_t *device_dense, *device_packed, *device_poison;
};

/* A drawn row turned by some dims, with random low bits of the significands, random signs, or both. */
static void bulk_row(struct kernel_random *random, const uint16_t *drawn, uint32_t d, uint16_t *ret_row) {
    static const uint16_t masks[] = {0, 0x0001, 0x0007, 0x007F, 0x8000, 0x8001, 0x800F, 0x807F};
    uint64_t chosen = kernel_random_next(random);
    const uint16_t *from = drawn + (size_t)(chosen % (KERNEL_ROW_KINDS * BULK_ROWS_A_KIND)) * d;
    uint64_t mask = masks[chosen >> 32 & 7] * UINT64_C(0x0001000100010001);
    uint32_t turned = (uint32_t)(chosen >> 40) % d;
    memcpy(ret_row, from + turned, (d - turned) * sizeof(*ret_row));
    memcpy(ret_row + (d - turned), from, turned * sizeof(*ret_row));
    for (uint32_t j = 0; j < d; j += 4) {
        uint64_t four;
        memcpy(&four, ret_row + j, sizeof(four));
        four ^= kernel_random_next(random) & mask;
        memcpy(ret_row + j, &four, sizeof(four));
    }
}

/* By the oracle where the host backend is the one under test. */
static int bulk_expect(struct bulk_worker *worker, const struct kernel_model *model,
                       const struct oscar_pack_item *item) {
    return rig_on_gpu()
               ? host_pack(worker->pool, host_level_best(), &model->geometry, &model->calibration, item, BULK_PAGES)
               : oscar_reference_pack(&model->geometry, &model->calibration, item, BULK_PAGES);
}

static uint32_t size_of(uint32_t d) { return d == 64 ? 0 : d == 128 ? 1 : 2; }

/* The batch that lies on the device, packed by one model and compared; positions are drawn. */
static bool bulk_pack(struct bulk_worker *worker, const struct kernel_model *model) {
    const size_t dense_bytes = oscar_dense_page_bytes(&model->geometry);
    const size_t packed_bytes = oscar_packed_page_bytes(&model->geometry);
    struct oscar_pack_item device[BULK_PAGES], host[BULK_PAGES];
    int32_t status[BULK_PAGES], expected_status[BULK_PAGES];
    for (uint32_t p = 0; p < BULK_PAGES; p++) {
        uint64_t position = (uint64_t)kernel_random_below(&worker->random, 16384) * OSCAR_PAGE_TOKENS;
        device[p] = (struct oscar_pack_item){worker->device_dense + p * dense_bytes,
                                             worker->device_packed + p * packed_bytes, position, &status[p]};
        host[p] = (struct oscar_pack_item){worker->dense + p * dense_bytes, worker->expected + p * packed_bytes,
                                           position, &expected_status[p]};
    }
    const struct oscar_device_ops *ops = rig->ops;
    const size_t bytes = BULK_PAGES * packed_bytes;
    bool done = ops->copy(worker->stream, worker->device_packed, worker->device_poison, bytes) == 0 &&
                ops->pack(worker->stream, &model->geometry, &model->calibration, device, BULK_PAGES) == 0 &&
                bulk_expect(worker, model, host) == 0 &&
                ops->copy(worker->stream, worker->packed, worker->device_packed, bytes) == 0;
    done = ops->stream_wait(worker->stream, UINT64_C(60000000000)) == 0 && done;
    for (uint32_t p = 0; p < BULK_PAGES; p++)
        done = done && status[p] == 0 && expected_status[p] == 0;
    if (!done)
        return false;
    uint64_t differing = 0;
    if (memcmp(worker->packed, worker->expected, bytes) != 0)
        for (size_t at = 0; at < bytes; at++)
            differing += worker->packed[at] != worker->expected[at];
    uint64_t rows = BULK_PAGES * dense_bytes / 2 / model->geometry.head_dim;
    __atomic_fetch_add(&worker->bulk->differing, differing, __ATOMIC_RELAXED);
    __atomic_fetch_add(&worker->bulk->packed[size_of(model->geometry.head_dim)], rows, __ATOMIC_RELAXED);
    return true;
}

/* New rows, packed by every model of their head size. */
static bool bulk_run(struct bulk_worker *worker, uint32_t d) {
    const struct bulk *bulk = worker->bulk;
    const size_t bytes = BULK_PAGES * oscar_dense_page_bytes(&bulk->model[size_of(d)]->geometry);
    for (size_t at = 0; at < bytes; at += (size_t)2 * d)
        bulk_row(&worker->random, bulk->drawn[size_of(d)], d, (uint16_t *)(worker->dense + at));
    bool done = rig->ops->copy(worker->stream, worker->device_dense, worker->dense, bytes) == 0;
    for (size_t i = 0; i < PACK_CASES && done; i++)
        if (bulk->model[i]->geometry.head_dim == d)
            done = bulk_pack(worker, bulk->model[i]);
    return done;
}

static void bulk_work(void *argument, uint32_t task, uint32_t thread) {
    struct bulk_worker *worker =
        (struct bulk_worker *)argument + task; /* the pool may have more threads than there are workers */
    struct bulk *bulk = worker->bulk;
    (void)thread;
    for (;;) {
        uint64_t turn = __atomic_fetch_add(&bulk->taken, 1, __ATOMIC_RELAXED);
        if (bulk->packed[0] + bulk->packed[1] + bulk->packed[2] >= bulk->rows || bulk->failures > 0)
            return;
        if (!bulk_run(worker, 64U << turn % 3))
            __atomic_fetch_add(&bulk->failures, 1, __ATOMIC_RELAXED);
    }
}

static void bulk_worker_open(struct bulk_worker *worker, struct bulk *bulk, size_t dense_bytes, size_t packed_bytes) {
    struct oscar_stream_options options = {.threads = 1, .asynchronous = true};
    *worker = (struct bulk_worker){
        .bulk = bulk,
        .random = {kernel_random_next(&source)},
        .dense = aligned_alloc(64, BULK_PAGES * dense_bytes),
        .packed = aligned_alloc(64, BULK_PAGES * packed_bytes),
        .expected = aligned_alloc(64, BULK_PAGES * packed_bytes),
        .device_dense = rig_alloc(rig, BULK_PAGES * dense_bytes),
        .device_packed = rig_alloc(rig, BULK_PAGES * packed_bytes),
        .device_poison = rig_alloc(rig, BULK_PAGES * packed_bytes),
    };
    assert_true(worker->dense && worker->packed && worker->expected);
    assert_int_equal(host_pool_open(1, &worker->pool, NULL), 0);
    assert_int_equal(rig->ops->stream_open(rig->device, &options, &worker->stream, NULL), 0);
}

static void bulk_worker_close(struct bulk_worker *worker) {
    rig->ops->stream_close(worker->stream);
    host_pool_close(worker->pool);
    rig_free(rig, worker->device_dense);
    rig_free(rig, worker->device_packed);
    rig_free(rig, worker->device_poison);
    free(worker->dense);
    free(worker->packed);
    free(worker->expected);
}

static void bulk_open(struct bulk *bulk) {
    const char *given = getenv("OSCAR_GPU_PACK_ROWS");
    *bulk = (struct bulk){.rows = given          ? strtoull(given, NULL, 0)
                                  : rig_small()  ? 1
                                  : rig_on_gpu() ? 100000000
                                                 : 200000};
    for (size_t i = 0; i < PACK_CASES; i++) {
        bulk->model[i] = pack_case_open(&source, &pack_cases[i]);
        rig_calibration_load(rig, &bulk->model[i]->geometry, &bulk->model[i]->calibration);
    }
    for (uint32_t size = 0; size < 3; size++) {
        const uint32_t d = 64U << size;
        bulk->drawn[size] = malloc(sizeof(uint16_t) * KERNEL_ROW_KINDS * BULK_ROWS_A_KIND * d);
        assert_non_null(bulk->drawn[size]);
        for (uint32_t i = 0; i < KERNEL_ROW_KINDS * BULK_ROWS_A_KIND; i++)
            kernel_row_fill(&source, i / BULK_ROWS_A_KIND, d, bulk->drawn[size] + (size_t)i * d);
    }
}

static void rows_in_bulk_equal_the_host_backends(void **state) {
    (void)state;
    struct bulk bulk;
    bulk_open(&bulk);
    const struct oscar_geometry *largest = &bulk.model[2]->geometry;
    uint32_t threads = host_pool_threads(rig_pool(rig));
    if (rig_small() && threads > 3)
        threads = 3; /* a turn of each head size */
    struct bulk_worker *workers = calloc(threads, sizeof(*workers));
    assert_non_null(workers);
    for (uint32_t i = 0; i < threads; i++)
        bulk_worker_open(&workers[i], &bulk, oscar_dense_page_bytes(largest), oscar_packed_page_bytes(largest));
    host_pool_run(rig_pool(rig), threads, bulk_work, workers);
    for (uint32_t i = 0; i < threads; i++)
        bulk_worker_close(&workers[i]);
    free(workers);
    print_message("rows compared: %" PRIu64 " of 64, %" PRIu64 " of 128, %" PRIu64
                  " of 256 dims; bytes that differ: %" PRIu64 "\n",
                  bulk.packed[0], bulk.packed[1], bulk.packed[2], bulk.differing);
    assert_int_equal(bulk.failures, 0);
    assert_int_equal(bulk.differing, 0);
    assert_true(bulk.packed[0] + bulk.packed[1] + bulk.packed[2] >= bulk.rows);
    for (size_t i = 0; i < PACK_CASES; i++) {
        rig->ops->calibration_unload(rig->device, &bulk.model[i]->calibration);
        kernel_model_close(bulk.model[i]);
    }
    for (uint32_t size = 0; size < 3; size++)
        free(bulk.drawn[size]);
}

int main(void) {
    rig = rig_open();
    source = kernel_random_open();
    const struct CMUnitTest tests[] = {cmocka_unit_test(rows_in_bulk_equal_the_host_backends)};
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    rig_close(rig);
    return failed;
}
