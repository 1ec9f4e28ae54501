/* SPDX-License-Identifier: Apache-2.0 */
/* Streams and fences: order, deadlines, and what a fence promises to another reader. */
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "tests/gpu/rig.h"

static struct rig *rig;

static int open_rig(void **state) {
    (void)state;
    rig = rig_open();
    return 0;
}

static int close_rig(void **state) {
    (void)state;
    rig_close(rig);
    return 0;
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

static void gate_hold(struct gate *gate, struct oscar_stream_impl *stream) {
    sem_init(&gate->reached, 0, 0);
    sem_init(&gate->open, 0, 0);
    assert_int_equal(rig->ops->stream_call(stream, gate_pass, gate), 0);
    while (sem_wait(&gate->reached) != 0) {
    }
}

static const uint64_t second_ns = 1000000000;

static void a_wait_has_a_deadline(void **state) {
    (void)state;
    struct gate gate;
    gate_hold(&gate, rig->asynchronous);
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    assert_int_equal(rig->ops->stream_wait(rig->asynchronous, second_ns / 20), OSCAR_ERR_TIMEOUT);
    clock_gettime(CLOCK_MONOTONIC, &end);
    int64_t waited = (end.tv_sec - start.tv_sec) * (int64_t)second_ns + end.tv_nsec - start.tv_nsec;
    assert_true(waited >= (int64_t)second_ns / 20);
    assert_int_equal(rig->ops->stream_wait(rig->asynchronous, 0), OSCAR_ERR_TIMEOUT);
    assert_int_equal(rig->ops->stream_status(rig->asynchronous), 0);
    sem_post(&gate.open);
    assert_int_equal(rig_wait(rig, rig->asynchronous), 0);
}

/* A memfd, mapped and registered, as the daemon gives it to a worker. */
static oscar_fence_slot *open_fences(size_t bytes) {
    int fd = memfd_create("fences", MFD_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_true(memory != MAP_FAILED);
    close(fd);
    struct oscar_cause cause = {""};
    if (rig->ops->fences_register(rig->device, memory, bytes, &cause) < 0)
        fail_msg("%s", cause.text);
    return memory;
}

static void a_fence_is_raised_after_the_work_before_it(void **state) {
    (void)state;
    oscar_fence_slot *slots = open_fences(4096);
    struct gate gate;
    uint64_t word = 42, read = 0;
    uint64_t *memory = rig_alloc(rig, sizeof(word));
    gate_hold(&gate, rig->asynchronous);
    assert_int_equal(rig->ops->copy(rig->asynchronous, memory, &word, sizeof(word)), 0);
    assert_int_equal(rig->ops->fence_signal(rig->asynchronous, &slots[17], 5), 0);
    assert_int_equal(rig->ops->stream_wait(rig->asynchronous, second_ns / 50), OSCAR_ERR_TIMEOUT);
    assert_false(oscar_fence_reached(&slots[17], 1));
    sem_post(&gate.open);
    assert_int_equal(rig_wait(rig, rig->asynchronous), 0);
    assert_true(oscar_fence_reached(&slots[17], 5));
    assert_false(oscar_fence_reached(&slots[17], 6));
    rig_read(rig, &read, memory, sizeof(read));
    assert_int_equal(read, 42);
    rig->ops->fences_unregister(rig->device, slots);
    munmap(slots, 4096);
    rig_free(rig, memory);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_wait_has_a_deadline),
        cmocka_unit_test(a_fence_is_raised_after_the_work_before_it),
    };
    return cmocka_run_group_tests(tests, open_rig, close_rig);
}
