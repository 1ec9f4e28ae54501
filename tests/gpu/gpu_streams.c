/* SPDX-License-Identifier: Apache-2.0 */
/* Streams and fences: order, deadlines, what a fence promises to who sees it, and what a fault leaves behind. */
#include <semaphore.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "tests/gpu/probe.h"
#include "tests/gpu/process.h"
#include "tests/gpu/rig.h"

#define FENCE_BYTES 4096U

static struct rig *rig;
static struct probe *probe;

/* --- deadlines -------------------------------------------------------------------------------------------------------------- */

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

static const int64_t second_ns = 1000000000;

static void assert_waits_in_vain(struct oscar_stream_impl *stream) {
    const int64_t timeout_ns = second_ns / 20;
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    assert_int_equal(rig->ops->stream_wait(stream, (uint64_t)timeout_ns), OSCAR_ERR_TIMEOUT);
    clock_gettime(CLOCK_MONOTONIC, &end);
    assert_true((end.tv_sec - start.tv_sec) * second_ns + end.tv_nsec - start.tv_nsec >= timeout_ns);
    assert_int_equal(rig->ops->stream_wait(stream, 0), OSCAR_ERR_TIMEOUT);
    assert_int_equal(rig->ops->stream_status(stream), 0);
}

static void a_wait_for_a_host_function_has_a_deadline(void **state) {
    (void)state;
    struct gate gate;
    gate_hold(&gate, rig->asynchronous);
    assert_waits_in_vain(rig->asynchronous);
    sem_post(&gate.open);
    assert_int_equal(rig_wait(rig, rig->asynchronous), 0);
}

static void a_wait_for_a_kernel_has_a_deadline(void **state) {
    (void)state;
    probe_hold(probe, rig->asynchronous);
    assert_waits_in_vain(rig->asynchronous);
    probe_release(probe);
    assert_int_equal(rig_wait(rig, rig->asynchronous), 0);
}

/* A stuck stream is nobody else's concern. */
static void other_streams_go_on_while_one_is_held(void **state) {
    (void)state;
    uint64_t from = 7, to = 0;
    uint64_t *memory = rig_alloc(rig, sizeof(*memory));
    probe_hold(probe, rig->asynchronous);
    rig_write(rig, memory, &from, sizeof(from));
    rig_read(rig, &to, memory, sizeof(to));
    assert_int_equal(to, 7);
    struct oscar_chunk *chunk;
    assert_int_equal(rig->ops->chunk_create(rig->device, rig->ops->granularity(rig->device), &chunk, NULL), 0);
    probe_release(probe);
    assert_int_equal(rig_wait(rig, rig->asynchronous), 0);
    rig->ops->chunk_free(chunk);
    rig_free(rig, memory);
}

/* --- fences ----------------------------------------------------------------------------------------------------------------- */

/* Maps and registers a memfd, as a worker does with the one that it is sent. */
static oscar_fence_slot *open_fences(int fd) {
    void *memory = mmap(NULL, FENCE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_true(memory != MAP_FAILED);
    struct oscar_cause cause = {""};
    if (rig->ops->fences_register(rig->device, memory, FENCE_BYTES, &cause) < 0)
        fail_msg("%s", cause.text);
    return memory;
}

static void close_fences(oscar_fence_slot *slots) {
    rig->ops->fences_unregister(rig->device, (void *)slots);
    munmap((void *)slots, FENCE_BYTES);
}

static int make_fences(void) {
    int fd = memfd_create("fences", MFD_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, FENCE_BYTES), 0);
    return fd;
}

static void await_fence(oscar_fence_slot *slot, uint64_t value) {
    for (int i = 0; i < 600000 && !oscar_fence_reached(slot, value); i++)
        usleep(100);
    assert_true(oscar_fence_reached(slot, value));
}

static void a_fence_is_raised_after_a_delayed_kernel_has_written(void **state) {
    (void)state;
    int fd = make_fences();
    oscar_fence_slot *slots = open_fences(fd);
    uint64_t *memory = rig_alloc(rig, sizeof(*memory));
    for (uint64_t round = 1; round <= 20; round++) {
        uint64_t read = 0;
        probe_hold(probe, rig->asynchronous);
        probe_write(probe, rig->asynchronous, memory, round);
        assert_int_equal(rig->ops->fence_signal(rig->asynchronous, &slots[17], round), 0);
        assert_int_equal(rig->ops->stream_wait(rig->asynchronous, 2000000), OSCAR_ERR_TIMEOUT);
        assert_false(oscar_fence_reached(&slots[17], round));
        probe_release(probe);
        await_fence(&slots[17], round);
        rig_read(rig, &read, memory, sizeof(read)); /* in another stream, which waits for nothing */
        assert_int_equal(read, round);
        assert_false(oscar_fence_reached(&slots[17], round + 1));
    }
    assert_int_equal(rig_wait(rig, rig->asynchronous), 0);
    rig_free(rig, memory);
    close_fences(slots);
    close(fd);
}

static void a_fence_is_seen_by_another_process_with_what_it_promises(void **state) {
    (void)state;
    int fd = make_fences();
    oscar_fence_slot *slots = mmap(NULL, FENCE_BYTES, PROT_READ, MAP_SHARED, fd, 0);
    assert_true((void *)slots != MAP_FAILED);
    struct process worker = process_start("raise fences", NULL);
    process_send(&worker, (struct process_message){.word = "raise", .value = 1000, .fd = fd});
    uint64_t last = 0;
    for (int i = 0; i < 600000 && last < 1000; i++) { /* slot 1 is raised before slot 0 is */
        uint64_t promised = atomic_load_explicit(&slots[0], memory_order_acquire);
        uint64_t before = atomic_load_explicit(&slots[1], memory_order_relaxed);
        assert_true(before >= promised);
        assert_true(promised >= last);
        last = promised;
        usleep(20);
    }
    assert_int_equal(last, 1000);
    (void)process_receive(&worker);
    process_end(&worker);
    munmap((void *)slots, FENCE_BYTES);
    close(fd);
}

static struct process_message raise_fences(const struct process_message *message) {
    oscar_fence_slot *slots = open_fences(message->fd);
    for (uint64_t i = 1; i <= message->value; i++)
        if (rig->ops->fence_signal(rig->asynchronous, &slots[1], i) < 0 ||
            rig->ops->fence_signal(rig->asynchronous, &slots[0], i) < 0)
            process_give_up("a fence cannot be raised");
    if (rig_wait(rig, rig->asynchronous) < 0)
        process_give_up("the fences are not raised");
    close_fences(slots);
    return (struct process_message){.word = "raised", .fd = -1};
}

/* --- faults ----------------------------------------------------------------------------------------------------------------- */

/* In a process of its own, which a fault on the host ends. */
static struct process_message fault(const struct process_message *message) {
    probe_write(probe, rig->asynchronous, (void *)(uintptr_t)message->value, 1); /* nobody's address */
    int first = rig_wait(rig, rig->asynchronous);
    uint64_t word = 0, other = 1;
    struct oscar_chunk *chunk;
    bool all =
        first == OSCAR_ERR_DEVICE && rig->ops->stream_status(rig->asynchronous) == OSCAR_ERR_DEVICE &&
        rig->ops->stream_wait(rig->synchronous, 0) == OSCAR_ERR_DEVICE &&
        rig->ops->copy(rig->synchronous, &word, &other, sizeof(word)) == OSCAR_ERR_DEVICE &&
        rig->ops->chunk_create(rig->device, rig->ops->granularity(rig->device), &chunk, NULL) == OSCAR_ERR_DEVICE;
    return (struct process_message){.word = "fault", .value = all, .fd = -1};
}

static void a_fault_is_told_and_every_later_call_fails_at_once(void **state) {
    (void)state;
    struct process worker = process_start("fault", NULL);
    process_send(&worker, (struct process_message){.word = "fault", .value = (uint64_t)1 << 20, .fd = -1});
    struct process_message told;
    bool died = process_died(&worker, &told);
    assert_true(rig_on_gpu() ? !died && told.value : died || told.value);
    process_kill(&worker);
}

/* The default stream of a framework. */
static void the_legacy_stream_can_be_used(void **state) {
    (void)state;
    struct oscar_stream_options options = {.threads = 1, .asynchronous = true, .native = (void *)(uintptr_t)1};
    struct oscar_stream_impl *stream;
    assert_int_equal(rig->ops->stream_open(rig->device, &options, &stream, NULL), 0);
    uint64_t *memory = rig_alloc(rig, sizeof(*memory)), read = 0;
    probe_write(probe, stream, memory, 11);
    assert_int_equal(rig_wait(rig, stream), 0);
    rig_read(rig, &read, memory, sizeof(read));
    assert_int_equal(read, 11);
    rig->ops->stream_close(stream);
    rig_free(rig, memory);
}

static int all_tests(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_wait_for_a_host_function_has_a_deadline),
        cmocka_unit_test(a_wait_for_a_kernel_has_a_deadline),
        cmocka_unit_test(other_streams_go_on_while_one_is_held),
        cmocka_unit_test(a_fence_is_raised_after_a_delayed_kernel_has_written),
        cmocka_unit_test(a_fence_is_seen_by_another_process_with_what_it_promises),
        cmocka_unit_test(the_legacy_stream_can_be_used),
        cmocka_unit_test(a_fault_is_told_and_every_later_call_fails_at_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(int argc, char **argv) {
    rig = rig_open();
    probe = probe_open(rig);
    int status = argc == 1 ? all_tests() : process_serve(strcmp(argv[1], "fault") == 0 ? fault : raise_fences);
    probe_close(probe);
    rig_close(rig);
    return status;
}
