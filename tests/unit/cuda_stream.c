/* SPDX-License-Identifier: Apache-2.0 */
/* Streams of the CUDA backend: waits, outcomes of work, lost devices, foreign streams and captures. */
#include <semaphore.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "kernels/cuda/backend.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/kernel_fixture.h"

static const uint64_t long_ns = UINT64_C(60) * 1000 * 1000 * 1000; /* nothing here takes as long */

static const struct oscar_device_ops *ops;
static struct fake_cuda *fake;
static struct oscar_device *device;
static struct oscar_stream_impl *stream; /* asynchronous */

static struct oscar_stream_impl *open_stream(struct oscar_stream_options options) {
    struct oscar_stream_impl *opened;
    struct oscar_cause cause = {""};
    if (ops->stream_open(device, &options, &opened, &cause) < 0)
        fail_msg("%s", cause.text);
    return opened;
}

static int open_device(void **state) {
    (void)state;
    ops = oscar_device_cuda();
    fake = fake_cuda_reset();
    int r = ops->device_open(NULL, &device, NULL);
    if (r == 0)
        stream = open_stream((struct oscar_stream_options){.asynchronous = true});
    return r;
}

static int close_device(void **state) {
    (void)state;
    ops->stream_close(stream);
    ops->stream_close(NULL);
    ops->device_close(device);
    return atomic_load(&fake->live) != 0 || atomic_load(&fake->entered) != 0 || atomic_load(&fake->unrelaxed) != 0;
}

/* A host function that holds a stream up until the test lets it through. */
struct gate {
    sem_t reached, open;
};

static void gate_pass(void *argument) {
    struct gate *gate = argument;
    sem_post(&gate->reached);
    while (sem_wait(&gate->open) != 0) {
    }
}

static void gate_hold(struct gate *gate, struct oscar_stream_impl *held) {
    sem_init(&gate->reached, 0, 0);
    sem_init(&gate->open, 0, 0);
    assert_int_equal(ops->stream_call(held, gate_pass, gate), 0);
    while (sem_wait(&gate->reached) != 0) {
    }
}

static void a_wait_ends_at_its_deadline_or_with_the_work(void **state) {
    (void)state;
    struct gate gate;
    gate_hold(&gate, stream);
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    assert_int_equal(ops->stream_wait(stream, 30000000), OSCAR_ERR_TIMEOUT);
    clock_gettime(CLOCK_MONOTONIC, &end);
    assert_true((end.tv_sec - start.tv_sec) * 1000000000 + end.tv_nsec - start.tv_nsec >= 30000000);
    assert_int_equal(ops->stream_wait(stream, 0), OSCAR_ERR_TIMEOUT);
    sem_post(&gate.open);
    assert_int_equal(ops->stream_wait(stream, long_ns), 0);
    assert_int_equal(ops->stream_wait(stream, UINT64_MAX), 0);
}

static void what_others_enqueue_does_not_prolong_a_wait(void **state) {
    (void)state;
    struct gate first, second;
    gate_hold(&first, stream);
    sem_init(&second.reached, 0, 0);
    sem_init(&second.open, 0, 0);
    sem_post(&first.open);
    assert_int_equal(ops->stream_wait(stream, long_ns), 0);
    assert_int_equal(ops->stream_call(stream, gate_pass, &second), 0);
    assert_int_equal(ops->stream_wait(stream, 1000000), OSCAR_ERR_TIMEOUT);
    sem_post(&second.open);
    assert_int_equal(ops->stream_wait(stream, long_ns), 0);
}

static void a_query_that_fails_ends_the_wait(void **state) {
    (void)state;
    uint64_t from = 1, to = 0;
    struct oscar_stream_impl *synchronous = open_stream((struct oscar_stream_options){.threads = 1});
    fake->failing = "cuEventQuery";
    fake->failure = CUDA_ERROR_NOT_PERMITTED;
    assert_int_equal(ops->stream_wait(stream, long_ns), OSCAR_ERR_DEVICE);
    assert_int_equal(ops->copy(synchronous, &to, &from, sizeof(to)), OSCAR_ERR_DEVICE);
    assert_int_equal(to, 1); /* the work does not outlive the call all the same */
    fake->failing = NULL;
    assert_int_equal(ops->stream_wait(stream, long_ns), 0);
    ops->stream_close(synchronous);
}

static void nothing_is_enqueued_without_a_stream(void **state) {
    (void)state;
    uint64_t a = 1, b = 2;
    oscar_fence_slot slot;
    assert_int_equal(ops->copy(NULL, &a, &b, sizeof(a)), OSCAR_ERR_INVALID);
    assert_int_equal(ops->fence_signal(NULL, &slot, 1), OSCAR_ERR_INVALID);
    assert_int_equal(ops->stream_call(NULL, gate_pass, NULL), OSCAR_ERR_INVALID);
    assert_int_equal(a, 1);
}

static void a_fence_needs_registered_memory_and_comes_after_the_work(void **state) {
    (void)state;
    static oscar_fence_slot slots[8], others[2];
    struct gate gate;
    uint64_t from = 42, to = 0;
    assert_int_equal(ops->fences_register(device, NULL, 64, NULL), OSCAR_ERR_INVALID);
    assert_int_equal(ops->fences_register(device, (char *)slots + 4, 8, NULL), OSCAR_ERR_INVALID);
    assert_int_equal(ops->fences_register(device, (void *)slots, sizeof(slots), NULL), 0);
    gate_hold(&gate, stream);
    assert_int_equal(ops->copy(stream, &to, &from, sizeof(to)), 0);
    assert_int_equal(ops->fence_signal(stream, &slots[3], 9), 0);
    assert_false(oscar_fence_reached(&slots[3], 1));
    sem_post(&gate.open);
    while (!oscar_fence_reached(&slots[3], 9))
        usleep(100);
    assert_int_equal(to, 42);
    assert_int_equal(ops->fence_signal(stream, &others[0], 1), OSCAR_ERR_INVALID);
    assert_int_equal(ops->stream_wait(stream, long_ns), 0);
    ops->fences_unregister(device, (void *)slots);
    assert_int_equal(ops->fence_signal(stream, &slots[3], 10), OSCAR_ERR_INVALID);
}

/* --- outcomes --------------------------------------------------------------------------------------------------------------- */

/* As a kernel would write it, in stream order. */
struct finding {
    int32_t *word;
    int32_t value;
};

static void find(void *argument) {
    const struct finding *finding = argument;
    __atomic_store_n(finding->word, finding->value, __ATOMIC_RELEASE);
}

static void what_kernels_find_is_the_streams_status_once(void **state) {
    (void)state;
    struct finding finding = {(int32_t *)cuda_stream_failure(stream), OSCAR_ERR_NOT_FINITE};
    assert_int_equal(ops->stream_call(stream, find, &finding), 0);
    assert_int_equal(ops->stream_wait(stream, long_ns), OSCAR_ERR_NOT_FINITE);
    assert_int_equal(ops->stream_wait(stream, long_ns), 0);
    assert_int_equal(ops->stream_call(stream, find, &finding), 0);
    int r = 0;
    while (r == 0)
        r = ops->stream_status(stream);
    assert_int_equal(r, OSCAR_ERR_NOT_FINITE);
    assert_int_equal(ops->stream_status(stream), 0);
}

static void a_synchronous_call_returns_what_it_found(void **state) {
    (void)state;
    struct oscar_stream_impl *synchronous = open_stream((struct oscar_stream_options){.threads = 1});
    struct finding finding = {(int32_t *)cuda_stream_failure(synchronous), OSCAR_ERR_NOT_FINITE};
    assert_int_equal(ops->stream_call(synchronous, find, &finding), OSCAR_ERR_NOT_FINITE);
    assert_int_equal(ops->stream_status(synchronous), 0);
    assert_int_equal(ops->stream_wait(synchronous, long_ns), 0);
    uint64_t from = 5, to = 0;
    assert_int_equal(ops->copy(synchronous, &to, &from, sizeof(to)), 0);
    assert_int_equal(to, 5);
    ops->stream_close(synchronous);
}

/* One call of work whose kernels find these values. */
static int report(struct oscar_stream_impl *on, const int32_t *values, uint32_t count, int32_t **target, bool fails,
                  struct finding *findings) {
    int r = cuda_work_begin(on);
    struct cuda_status *status;
    CUdeviceptr words;
    if (r == 0)
        r = cuda_status_take(on, count, &status, &words);
    assert_int_equal(r, 0);
    for (uint32_t i = 0; i < count; i++) {
        assert_int_equal(((int32_t *)words)[i], 0);
        findings[i] = (struct finding){(int32_t *)words + i, values[i]};
        assert_int_equal(device->driver->cuLaunchHostFunc(on->stream, find, &findings[i]), CUDA_SUCCESS);
    }
    return cuda_work_end(on, cuda_status_deliver(on, status, target, fails));
}

static void statuses_reach_their_targets_in_stream_order(void **state) {
    (void)state;
    static const int32_t values[] = {0, OSCAR_ERR_NOT_FINITE, 0, OSCAR_ERR_INTERNAL};
    struct finding findings[12][4];
    int32_t got[12][4];
    struct gate gate;
    memset(got, 0x55, sizeof(got));
    gate_hold(&gate, stream);
    for (int i = 0; i < 12; i++) { /* more than are made ahead */
        int32_t *target[] = {&got[i][0], &got[i][1], NULL, &got[i][3]};
        assert_int_equal(report(stream, values, 4, target, i >= 6, findings[i]), 0);
    }
    assert_int_equal(got[0][0], 0x55555555);
    sem_post(&gate.open);
    assert_int_equal(ops->stream_wait(stream, long_ns), OSCAR_ERR_NOT_FINITE);
    assert_int_equal(ops->stream_status(stream), 0);
    for (int i = 0; i < 12; i++) {
        assert_int_equal(got[i][0], 0);
        assert_int_equal(got[i][1], OSCAR_ERR_NOT_FINITE);
        assert_int_equal(got[i][2], 0x55555555);
        assert_int_equal(got[i][3], OSCAR_ERR_INTERNAL);
    }
}

static void a_status_can_have_any_number_of_words(void **state) {
    (void)state;
    uint32_t count = OSCAR_MAX_PACK_ITEMS + 1;
    int32_t *values = calloc(count, sizeof(*values)), *got = calloc(count, sizeof(*got));
    int32_t **target = calloc(count, sizeof(*target));
    struct finding *findings = calloc(count, sizeof(*findings));
    assert_true(values && got && target && findings);
    for (uint32_t i = 0; i < count; i++) {
        values[i] = (int32_t)i;
        target[i] = &got[i];
    }
    for (int round = 0; round < 2; round++) { /* the words of the second one are zero again */
        assert_int_equal(report(stream, values, count, target, false, findings), 0);
        assert_int_equal(ops->stream_wait(stream, long_ns), 0);
        assert_memory_equal(values, got, count * sizeof(*got));
    }
    free(values);
    free(got);
    free(target);
    free(findings);
}

/* --- a lost device ---------------------------------------------------------------------------------------------------------- */

static void an_error_that_stays_loses_the_device(void **state) {
    (void)state;
    static oscar_fence_slot slot;
    uint64_t a = 1, b = 2;
    struct oscar_chunk *chunk;
    struct oscar_cause cause = {""};
    struct oscar_stream_options options = {.threads = 1, .asynchronous = true};
    struct oscar_stream_impl *another;
    fake->sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
    assert_int_equal(ops->stream_status(stream), OSCAR_ERR_DEVICE);
    fake->sticky = CUDA_SUCCESS; /* who asks the driver now would not notice */
    unsigned calls = atomic_load(&fake->calls);
    assert_int_equal(ops->stream_status(stream), OSCAR_ERR_DEVICE);
    assert_int_equal(ops->stream_wait(stream, long_ns), OSCAR_ERR_DEVICE);
    assert_int_equal(ops->copy(stream, &a, &b, sizeof(a)), OSCAR_ERR_DEVICE);
    assert_int_equal(ops->fence_signal(stream, &slot, 1), OSCAR_ERR_DEVICE);
    assert_int_equal(ops->stream_open(device, &options, &another, &cause), OSCAR_ERR_DEVICE);
    assert_non_null(strstr(cause.text, "failed earlier and serves this process no more"));
    assert_int_equal(ops->chunk_create(device, ops->granularity(device), &chunk, &cause), OSCAR_ERR_DEVICE);
    assert_int_equal(ops->self_test(device, &cause), OSCAR_ERR_DEVICE);
    assert_int_equal(atomic_load(&fake->calls), calls);
}

static void an_error_that_passes_does_not(void **state) {
    (void)state;
    uint64_t a = 1, b = 2;
    fake->failing = "cuMemcpyAsync";
    fake->failure = CUDA_ERROR_INVALID_VALUE;
    assert_int_equal(ops->copy(stream, &a, &b, sizeof(a)), OSCAR_ERR_INVALID);
    fake->failing = NULL;
    assert_int_equal(ops->copy(stream, &a, &b, sizeof(a)), 0);
    assert_int_equal(ops->stream_wait(stream, long_ns), 0);
    assert_int_equal(a, 2);
}

/* --- streams of others, and captures ---------------------------------------------------------------------------------------- */

static void a_foreign_stream_is_used_and_left(void **state) {
    (void)state;
    CUstream native;
    assert_int_equal(cuda_enter(device, NULL), 0);
    assert_int_equal(device->driver->cuStreamCreateWithPriority(&native, CU_STREAM_NON_BLOCKING, 0), CUDA_SUCCESS);
    cuda_leave(device);
    struct oscar_stream_impl *wrapped = open_stream((struct oscar_stream_options){.threads = 1, .native = native});
    struct gate gate;
    uint64_t from = 3, to = 0;
    gate_hold(&gate, wrapped); /* returns: a foreign stream is asynchronous */
    assert_int_equal(ops->copy(wrapped, &to, &from, sizeof(to)), 0);
    assert_int_equal(to, 0);
    sem_post(&gate.open);
    assert_int_equal(ops->stream_wait(wrapped, long_ns), 0);
    assert_int_equal(to, 3);
    ops->stream_close(wrapped);
    assert_int_equal(device->driver->cuStreamDestroy(native), CUDA_SUCCESS); /* still there */
}

static void nothing_waits_on_a_stream_that_is_captured(void **state) {
    (void)state;
    static oscar_fence_slot slot;
    struct oscar_stream_impl *synchronous = open_stream((struct oscar_stream_options){.threads = 1});
    uint64_t from = 3, to = 0, another = 0;
    assert_int_equal(ops->fences_register(device, (void *)&slot, sizeof(slot), NULL), 0);
    fake->capturing = true; /* a query or an event on the stream would fail now */
    assert_int_equal(ops->stream_status(stream), 0);
    assert_int_equal(ops->stream_wait(stream, long_ns), OSCAR_ERR_STATE);
    assert_int_equal(ops->copy(stream, &to, &from, sizeof(to)), 0);
    assert_int_equal(ops->copy(synchronous, &another, &from, sizeof(another)), 0);
    assert_int_equal(ops->fence_signal(stream, &slot, 4), 0);
    assert_true(cuda_stream_capturing(stream));
    fake->capturing = false;
    assert_false(cuda_stream_capturing(stream));
    assert_int_equal(ops->stream_wait(stream, long_ns), 0);
    assert_int_equal(ops->stream_wait(synchronous, long_ns), 0);
    assert_int_equal(to, 3);
    assert_int_equal(another, 3);
    ops->fences_unregister(device, (void *)&slot);
    ops->stream_close(synchronous);
}

static void the_daemons_streams_yield_to_the_workers(void **state) {
    (void)state;
    ops->stream_close(open_stream((struct oscar_stream_options){.threads = 1, .low_priority = true}));
    int low = fake->priority;
    ops->stream_close(open_stream((struct oscar_stream_options){.threads = 1}));
    assert_int_equal(low, 0); /* the least urgent */
    assert_true(fake->priority < low);
}

#define ON_DEVICE(test) cmocka_unit_test_setup_teardown(test, open_device, close_device)

int main(void) {
    const struct CMUnitTest tests[] = {
        ON_DEVICE(a_wait_ends_at_its_deadline_or_with_the_work),
        ON_DEVICE(what_others_enqueue_does_not_prolong_a_wait),
        ON_DEVICE(a_query_that_fails_ends_the_wait),
        ON_DEVICE(nothing_is_enqueued_without_a_stream),
        ON_DEVICE(a_fence_needs_registered_memory_and_comes_after_the_work),
        ON_DEVICE(what_kernels_find_is_the_streams_status_once),
        ON_DEVICE(a_synchronous_call_returns_what_it_found),
        ON_DEVICE(statuses_reach_their_targets_in_stream_order),
        ON_DEVICE(a_status_can_have_any_number_of_words),
        ON_DEVICE(an_error_that_stays_loses_the_device),
        ON_DEVICE(an_error_that_passes_does_not),
        ON_DEVICE(a_foreign_stream_is_used_and_left),
        ON_DEVICE(nothing_waits_on_a_stream_that_is_captured),
        ON_DEVICE(the_daemons_streams_yield_to_the_workers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
