/* SPDX-License-Identifier: Apache-2.0 */
/* Streams, fences and the pool of the host backend, and how the device is opened. */
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "kernels/number.h"
#include "proto/geometry.h"
#include "tests/support/kernel_fixture.h"

static const uint64_t long_ns = UINT64_C(60) * 1000 * 1000 * 1000; /* nothing here takes as long */

static const struct oscar_device_ops *ops;
static struct oscar_device *device;

static int open_device(void **state) {
    (void)state;
    ops = oscar_device_host();
    return ops->device_open(&(struct oscar_device_options){.id = ""}, &device, NULL);
}

static int close_device(void **state) {
    (void)state;
    ops->device_close(device);
    return 0;
}

static struct oscar_stream_impl *open_stream(bool asynchronous, uint32_t threads, bool low_priority) {
    struct oscar_stream_impl *stream;
    struct oscar_stream_options options = {
        .threads = threads, .asynchronous = asynchronous, .low_priority = low_priority};
    assert_int_equal(ops->stream_open(device, &options, &stream, NULL), 0);
    return stream;
}

/* A gate that holds a stream up until the test lets it through. */
struct gate {
    sem_t reached, open;
};

static void gate_pass(void *argument) {
    struct gate *gate = argument;
    sem_post(&gate->reached);
    while (sem_wait(&gate->open) != 0) {
    }
}

static void gate_hold(struct gate *gate, struct oscar_stream_impl *stream) {
    sem_init(&gate->reached, 0, 0);
    sem_init(&gate->open, 0, 0);
    assert_int_equal(ops->stream_call(stream, gate_pass, gate), 0);
    while (sem_wait(&gate->reached) != 0) {
    }
}

static void gate_release(struct gate *gate) { sem_post(&gate->open); }

static void gate_close(struct gate *gate) {
    sem_destroy(&gate->reached);
    sem_destroy(&gate->open);
}

static void a_fence_is_not_raised_before_the_work_ahead_of_it_is_done(void **state) {
    (void)state;
    struct oscar_stream_impl *stream = open_stream(true, 1, false);
    struct gate gate;
    oscar_fence_slot slot = 0;
    char destination[8] = "before";
    gate_hold(&gate, stream);
    assert_int_equal(ops->copy(stream, destination, "behind", 7), 0);
    assert_int_equal(ops->fence_signal(stream, &slot, 7), 0);
    assert_false(oscar_fence_reached(&slot, 1));
    assert_int_equal(ops->stream_wait(stream, 1000000), OSCAR_ERR_TIMEOUT);
    assert_false(oscar_fence_reached(&slot, 1));
    assert_string_equal(destination, "before");
    gate_release(&gate);
    assert_int_equal(ops->stream_wait(stream, long_ns), 0);
    assert_true(oscar_fence_reached(&slot, 7));
    assert_false(oscar_fence_reached(&slot, 8));
    assert_string_equal(destination, "behind");
    ops->stream_close(stream);
    gate_close(&gate);
}

static void a_fence_never_falls(void **state) {
    (void)state;
    for (uint32_t asynchronous = 0; asynchronous < 2; asynchronous++) {
        struct oscar_stream_impl *stream = open_stream(asynchronous != 0, 1, false);
        oscar_fence_slot slot = 0;
        const uint64_t beyond_32_bits = (UINT64_C(1) << 33) + 1;
        assert_int_equal(ops->fence_signal(stream, &slot, beyond_32_bits), 0);
        assert_int_equal(ops->fence_signal(stream, &slot, 3), 0);
        assert_int_equal(ops->stream_wait(stream, long_ns), 0);
        assert_true(oscar_fence_reached(&slot, beyond_32_bits));
        ops->stream_close(stream);
    }
}

struct order {
    uint32_t next;
    bool broken;
};
struct order_step {
    struct order *order;
    uint32_t number;
};

static void order_take(void *argument) {
    struct order_step *step = argument;
    step->order->broken |= step->order->next != step->number;
    step->order->next++;
}

static void work_runs_in_the_order_of_its_calls(void **state) {
    (void)state;
    struct oscar_stream_impl *stream = open_stream(true, 2, true);
    struct order order = {0};
    struct order_step steps[500];
    for (uint32_t i = 0; i < 500; i++) {
        steps[i] = (struct order_step){&order, i};
        assert_int_equal(ops->stream_call(stream, order_take, &steps[i]), 0);
    }
    assert_int_equal(ops->stream_wait(stream, long_ns), 0);
    assert_int_equal(order.next, 500);
    assert_false(order.broken);
    ops->stream_close(stream);
}

static void closing_a_stream_finishes_its_work(void **state) {
    (void)state;
    struct oscar_stream_impl *stream = open_stream(true, 1, false);
    struct order order = {0};
    struct order_step steps[50];
    for (uint32_t i = 0; i < 50; i++) {
        steps[i] = (struct order_step){&order, i};
        assert_int_equal(ops->stream_call(stream, order_take, &steps[i]), 0);
    }
    ops->stream_close(stream);
    assert_int_equal(order.next, 50);
}

static void a_wait_ends_at_its_deadline_and_not_before(void **state) {
    (void)state;
    struct oscar_stream_impl *stream = open_stream(true, 1, false);
    struct gate gate;
    gate_hold(&gate, stream);
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    assert_int_equal(ops->stream_wait(stream, 20000000), OSCAR_ERR_TIMEOUT);
    clock_gettime(CLOCK_MONOTONIC, &end);
    assert_true((end.tv_sec - start.tv_sec) * 1000000000L + end.tv_nsec - start.tv_nsec >= 20000000);
    assert_int_equal(ops->stream_wait(stream, 0), OSCAR_ERR_TIMEOUT);
    gate_release(&gate);
    assert_int_equal(ops->stream_wait(stream, UINT64_MAX), 0);
    ops->stream_close(stream);
    gate_close(&gate);
}

/* Rows that hold an infinity, so that store fails. */
struct bad_store {
    struct kernel_model *model;
    uint16_t row[64];
    uint8_t *page;
    struct oscar_store_args args;
};

static void bad_store_open(struct bad_store *bad) {
    struct kernel_random random = kernel_random_open();
    bad->model = kernel_model_open(&random, &(struct kernel_model_options){.layers = 1, .kv_heads = 1, .head_dim = 64});
    for (uint32_t j = 0; j < 64; j++)
        bad->row[j] = 0x3F80;
    bad->row[9] = 0x7F80;
    bad->page = malloc(oscar_dense_page_bytes(&bad->model->geometry));
    bad->args = (struct oscar_store_args){.geometry = &bad->model->geometry,
                                          .calibration = &bad->model->calibration,
                                          .tokens = 1,
                                          .pages = &bad->page,
                                          .k = {bad->row, 64, 64},
                                          .v = {bad->row, 64, 64}};
}

static void bad_store_close(struct bad_store *bad) {
    free(bad->page);
    kernel_model_close(bad->model);
}

static void failed_work_is_reported_once(void **state) {
    (void)state;
    struct bad_store bad;
    bad_store_open(&bad);
    assert_int_equal(ops->store(NULL, &bad.args), OSCAR_ERR_NOT_FINITE);

    struct oscar_stream_impl *stream = open_stream(false, 1, false);
    assert_int_equal(ops->store(stream, &bad.args), OSCAR_ERR_NOT_FINITE);
    assert_int_equal(ops->stream_status(stream), 0);
    ops->stream_close(stream);

    stream = open_stream(true, 1, false);
    struct gate gate;
    gate_hold(&gate, stream);
    assert_int_equal(ops->store(stream, &bad.args), 0);
    assert_int_equal(ops->stream_status(stream), 0); /* never waits */
    gate_release(&gate);
    assert_int_equal(ops->stream_wait(stream, long_ns), OSCAR_ERR_NOT_FINITE);
    assert_int_equal(ops->stream_status(stream), 0);
    assert_int_equal(ops->store(stream, &bad.args), 0);
    oscar_fence_slot slot = 0; /* a failure does not hold up what follows */
    assert_int_equal(ops->fence_signal(stream, &slot, 1), 0);
    while (!oscar_fence_reached(&slot, 1)) {
    }
    assert_int_equal(ops->stream_status(stream), OSCAR_ERR_NOT_FINITE);
    assert_int_equal(ops->stream_wait(stream, long_ns), 0);
    ops->stream_close(stream);
    gate_close(&gate);
    bad_store_close(&bad);
}

static void arguments_marked_copied_may_go_once_the_call_returns(void **state) {
    (void)state;
    struct bad_store store;
    bad_store_open(&store);
    store.row[9] = 0x3F80;
    struct oscar_stream_impl *stream = open_stream(true, 1, false);
    struct gate gate;
    gate_hold(&gate, stream);
    struct oscar_geometry geometry = store.model->geometry;
    uint8_t *pages[1] = {store.page};
    store.args.geometry = &geometry;
    store.args.pages = pages;
    memset(store.page, 0, 64 * 2);
    uint8_t packed[32 * 64 + 512];
    int32_t packed_status = 1, dense_status = 1;
    struct oscar_pack_item item = {store.page, packed, 0, &packed_status};
    uint8_t *dense = store.page;
    memset(dense, 0, oscar_dense_page_bytes(&geometry));
    assert_int_equal(ops->store(stream, &store.args), 0);
    const uint8_t *inspected[1] = {dense};
    assert_int_equal(ops->inspect(stream, &geometry, inspected, 1, &dense_status), 0);
    assert_int_equal(ops->pack(stream, &geometry, &store.model->calibration, &item, 1), 0);
    memset(&geometry, 0xFF, sizeof(geometry));
    memset(&store.args, 0xFF, sizeof(store.args));
    memset(&item, 0xFF, sizeof(item));
    pages[0] = NULL;
    inspected[0] = NULL;
    gate_release(&gate);
    assert_int_equal(ops->stream_wait(stream, long_ns), 0);
    assert_int_equal(dense_status, 0);
    assert_int_equal(packed_status, 0);
    assert_int_equal(((uint16_t *)dense)[0], oscar_bf16_from_float(8.0F)); /* 64 ones turned by Hadamard */
    ops->stream_close(stream);
    gate_close(&gate);
    bad_store_close(&store);
}

static void arguments_out_of_range_are_refused_at_once(void **state) {
    (void)state;
    struct bad_store bad;
    bad_store_open(&bad);
    struct oscar_stream_impl *stream = open_stream(true, 1, false);
    struct oscar_store_args args = bad.args;
    args.layer = 1;
    assert_int_equal(ops->store(stream, &args), OSCAR_ERR_INVALID);
    args = bad.args;
    args.first_row = 64;
    assert_int_equal(ops->store(stream, &args), OSCAR_ERR_INVALID);
    args = bad.args;
    args.tokens = UINT32_MAX;
    assert_int_equal(ops->store(stream, &args), OSCAR_ERR_INVALID);
    struct oscar_geometry other = bad.model->geometry;
    other.head_dim = 128;
    args = bad.args;
    args.geometry = &other;
    assert_int_equal(ops->store(stream, &args), OSCAR_ERR_INVALID);
    int32_t status = 1;
    struct oscar_pack_item item = {bad.page, bad.page, 63, &status};
    assert_int_equal(ops->pack(stream, &bad.model->geometry, &bad.model->calibration, &item, 1), OSCAR_ERR_INVALID);
    other = bad.model->geometry;
    other.head_dim = 96;
    const uint8_t *inspected[1] = {bad.page};
    assert_int_equal(ops->inspect(stream, &other, inspected, 1, &status), OSCAR_ERR_INVALID);
    assert_int_equal(ops->inspect(stream, &bad.model->geometry, inspected, OSCAR_MAX_PACK_ITEMS + 1, &status),
                     OSCAR_ERR_INVALID);
    assert_int_equal(ops->stream_wait(stream, long_ns), 0);
    ops->stream_close(stream);
    bad_store_close(&bad);
}

static void a_position_without_a_turn_table_is_refused(void **state) {
    (void)state;
    struct kernel_random random = kernel_random_open();
    struct kernel_model *model = kernel_model_open(&random, &(struct kernel_model_options){.layers = 1,
                                                                                           .kv_heads = 1,
                                                                                           .head_dim = 64,
                                                                                           .centre = true,
                                                                                           .centre_size = 1.0,
                                                                                           .pairs = 2,
                                                                                           .turn_pages = 4,
                                                                                           .rank_k = 61,
                                                                                           .rank_v = 58});
    uint8_t *dense = kernel_dense_page(&random, &model->geometry, false);
    uint8_t *packed = malloc(oscar_packed_page_bytes(&model->geometry));
    int32_t status = 1;
    struct oscar_pack_item item = {dense, packed, UINT64_C(3) * 64, &status};
    assert_int_equal(ops->pack(NULL, &model->geometry, &model->calibration, &item, 1), 0);
    assert_int_equal(status, 0);
    item.position = UINT64_C(4) * 64;
    assert_int_equal(ops->pack(NULL, &model->geometry, &model->calibration, &item, 1), OSCAR_ERR_INVALID);
    free(dense);
    free(packed);
    kernel_model_close(model);
}

/* ---- the pool ---- */

struct tally {
    atomic_uint seen[1000];
    atomic_uint workers_busy[8];
    atomic_bool overlapped;
    struct host_pool *pool;
};

static void tally_task(void *argument, uint32_t task, uint32_t worker) {
    struct tally *tally = argument;
    if (atomic_fetch_add(&tally->workers_busy[worker], 1) != 0)
        atomic_store(&tally->overlapped, true);
    uint8_t *scratch = host_pool_scratch(tally->pool, worker, 1000 + task);
    if (!scratch || (uintptr_t)scratch % 64 != 0)
        atomic_store(&tally->overlapped, true);
    else
        memset(scratch, (int)task, 1000 + task);
    atomic_fetch_add(&tally->seen[task], 1);
    atomic_fetch_sub(&tally->workers_busy[worker], 1);
}

static void a_pool_runs_every_task_once_and_each_worker_one_at_a_time(void **state) {
    (void)state;
    for (uint32_t threads = 1; threads <= 5; threads++) {
        struct tally tally = {0};
        assert_int_equal(host_pool_open(threads, &tally.pool, NULL), 0);
        for (uint32_t run = 1; run <= 20; run++) {
            host_pool_run(tally.pool, 1000, tally_task, &tally);
            for (uint32_t i = 0; i < 1000; i++)
                assert_int_equal(tally.seen[i], run);
        }
        host_pool_run(tally.pool, 0, tally_task, &tally);
        assert_false(tally.overlapped);
        assert_int_equal(host_pool_threads(tally.pool), threads);
        host_pool_close(tally.pool);
    }
    struct host_pool *pool;
    assert_int_equal(host_pool_open(0, &pool, NULL), OSCAR_ERR_INVALID);
    assert_int_equal(host_pool_open(HOST_MAX_THREADS + 1, &pool, NULL), OSCAR_ERR_INVALID);
}

static atomic_uint handled_elsewhere;
static pthread_t test_thread;

static void note_thread(int signal) {
    (void)signal;
    if (!pthread_equal(pthread_self(), test_thread))
        atomic_fetch_add(&handled_elsewhere, 1);
}

struct signal_mask {
    bool all_blocked;
};

static void take_mask(void *argument) {
    struct signal_mask *mask = argument;
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, NULL, &blocked);
    mask->all_blocked =
        sigismember(&blocked, SIGTERM) && sigismember(&blocked, SIGUSR1) && sigismember(&blocked, SIGCHLD);
}

static void signals_of_the_process_are_not_handled_in_our_threads(void **state) {
    (void)state;
    test_thread = pthread_self();
    struct sigaction old, action = {.sa_handler = note_thread};
    sigaction(SIGUSR1, &action, &old);
    struct oscar_stream_impl *stream = open_stream(true, 2, false);
    struct signal_mask mask = {false};
    assert_int_equal(ops->stream_call(stream, take_mask, &mask), 0);
    for (uint32_t i = 0; i < 20; i++)
        kill(getpid(), SIGUSR1);
    assert_int_equal(ops->stream_wait(stream, long_ns), 0);
    ops->stream_close(stream);
    sigaction(SIGUSR1, &old, NULL);
    assert_true(mask.all_blocked);
    assert_int_equal(handled_elsewhere, 0);
}

/* ---- the device ---- */

static void a_level_that_does_not_exist_or_run_here_is_an_error_not_another_level(void **state) {
    (void)state;
    struct oscar_device *other = NULL;
    struct oscar_cause cause = {0};
    setenv("OSCAR_HOST_LEVEL", "sse9", 1);
    assert_int_equal(ops->device_open(NULL, &other, &cause), OSCAR_ERR_CONFIG);
    assert_non_null(strstr(cause.text, "sse9"));
    assert_null(other);
    for (int level = 0; level < HOST_LEVELS; level++) {
        setenv("OSCAR_HOST_LEVEL", host_level_name(level), 1);
        int r = ops->device_open(NULL, &other, &cause);
        assert_int_equal(r, host_level_supported(level) ? 0 : OSCAR_ERR_UNSUPPORTED);
        if (r == 0) {
            assert_non_null(strstr(ops->device_summary(other), host_level_name(level)));
            ops->device_close(other);
        } else {
            assert_non_null(strstr(cause.text, host_level_name(level)));
        }
    }
    unsetenv("OSCAR_HOST_LEVEL");
    assert_int_equal(ops->device_open(NULL, &other, NULL), 0);
    assert_non_null(strstr(ops->device_summary(other), host_level_name(host_level_best())));
    ops->device_close(other);
}

static void backends_and_devices_are_found_by_name(void **state) {
    (void)state;
    const struct oscar_device_ops *found = NULL;
    struct oscar_cause cause = {0};
    assert_int_equal(oscar_device_find(NULL, &found, NULL), 0);
    assert_non_null(found);
    assert_int_equal(oscar_device_find("auto", &found, NULL), 0);
    assert_int_equal(oscar_device_find("host", &found, NULL), 0);
    assert_string_equal(found->name, "host");
    assert_int_equal(oscar_device_find("abacus", &found, &cause), OSCAR_ERR_UNSUPPORTED);
    assert_non_null(strstr(cause.text, "abacus"));
    struct oscar_device *other = NULL;
    assert_int_equal(ops->device_open(&(struct oscar_device_options){.id = "GPU-1"}, &other, &cause),
                     OSCAR_ERR_NOT_FOUND);
    assert_int_equal(ops->device_open(&(struct oscar_device_options){.id = "host"}, &other, NULL), 0);
    assert_string_equal(ops->device_id(other), "host");
    ops->device_close(other);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_fence_is_not_raised_before_the_work_ahead_of_it_is_done),
        cmocka_unit_test(a_fence_never_falls),
        cmocka_unit_test(work_runs_in_the_order_of_its_calls),
        cmocka_unit_test(closing_a_stream_finishes_its_work),
        cmocka_unit_test(a_wait_ends_at_its_deadline_and_not_before),
        cmocka_unit_test(failed_work_is_reported_once),
        cmocka_unit_test(arguments_marked_copied_may_go_once_the_call_returns),
        cmocka_unit_test(arguments_out_of_range_are_refused_at_once),
        cmocka_unit_test(a_position_without_a_turn_table_is_refused),
        cmocka_unit_test(a_pool_runs_every_task_once_and_each_worker_one_at_a_time),
        cmocka_unit_test(signals_of_the_process_are_not_handled_in_our_threads),
        cmocka_unit_test(a_level_that_does_not_exist_or_run_here_is_an_error_not_another_level),
        cmocka_unit_test(backends_and_devices_are_found_by_name),
    };
    return cmocka_run_group_tests(tests, open_device, close_device);
}
