/* SPDX-License-Identifier: Apache-2.0 */
/* Everything that the host side of the CUDA backend does, with each call to the driver failing in turn: an error comes back,
 * and nothing is left behind, neither in the driver nor here. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/support/descriptors.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/kernel_fixture.h"

#define UNIT ((uint64_t)2 << 20)

static const struct oscar_device_ops *ops;
static struct fake_cuda *fake;
static struct kernel_model *model;

/* With one device: a second one would make good for the first. */
static struct fake_cuda *new_machine(void) {
    struct fake_cuda *machine = fake_cuda_reset();
    machine->devices = 1;
    return machine;
}

static int use_chunks(struct oscar_device *device, struct oscar_cause *cause) {
    struct oscar_chunk *chunk = NULL, *adopted = NULL;
    struct oscar_range *range = NULL;
    int fd = -1, kept = -1;
    uint64_t available, total;
    int r = ops->memory_info(device, &available, &total, cause);
    if (r == 0)
        r = ops->chunk_create(device, UNIT, &chunk, cause);
    if (r == 0)
        r = ops->chunk_export(chunk, false, &fd, cause);
    if (r == 0)
        r = ops->range_reserve(device, 4 * UNIT, &range, cause);
    if (r == 0 && ops->chunk_descriptor(chunk, &kept, NULL) == 0) { /* the form that has descriptors */
        const struct oscar_range_chunk reading[] = {{.offset = 0, .bytes = UNIT, .fd = fd},
                                                    {.offset = UNIT, .bytes = UNIT, .fd = fd}};
        const struct oscar_range_chunk writing = {.offset = UNIT, .bytes = UNIT, .fd = fd, .writable = true};
        r = ops->range_map(range, reading, 2, cause);
        if (r == 0)
            r = ops->range_map(range, &writing, 1, cause);
        if (r == 0) {
            r = ops->chunk_adopt(device, kept, UNIT, &adopted, cause);
            kept = -1;
        }
        if (r == 0)
            r = ops->range_unmap(range, 0, 2 * UNIT);
    }
    if (fd >= 0)
        close(fd);
    if (kept >= 0)
        close(kept);
    ops->range_free(range);
    ops->chunk_free(adopted);
    ops->chunk_free(chunk);
    return r;
}

static int use_stream(struct oscar_device *device, bool asynchronous, struct oscar_cause *cause) {
    static oscar_fence_slot slot;
    struct oscar_stream_impl *stream;
    struct oscar_stream_options options = {.threads = 1, .asynchronous = asynchronous};
    uint64_t from = 1, to = 0;
    int r = ops->fences_register(device, (void *)&slot, sizeof(slot), cause);
    if (r < 0)
        return r;
    r = ops->stream_open(device, &options, &stream, cause);
    if (r == 0) {
        r = ops->copy(stream, &to, &from, sizeof(to));
        if (r == 0)
            r = ops->fence_signal(stream, &slot, 1);
        int waited = ops->stream_wait(stream, UINT64_MAX);
        int status = ops->stream_status(stream);
        if (r == 0)
            r = waited < 0 ? waited : status;
        ops->stream_close(stream);
    }
    ops->fences_unregister(device, (void *)&slot);
    return r;
}

static int use_calibration(struct oscar_device *device, struct oscar_cause *cause) {
    int r = ops->calibration_load(device, &model->geometry, &model->calibration, cause);
    if (r == 0)
        ops->calibration_unload(device, &model->calibration);
    return r;
}

static int use_device(enum oscar_share share, struct oscar_cause *cause) {
    struct oscar_device *device;
    int r = ops->device_open(&(struct oscar_device_options){.share = share}, &device, cause);
    if (r < 0)
        return r;
    r = ops->self_test(device, cause);
    if (r == 0)
        r = use_chunks(device, cause);
    if (r == 0)
        r = use_calibration(device, cause);
    if (r == 0)
        r = use_stream(device, false, cause);
    if (r == 0)
        r = use_stream(device, true, cause);
    ops->device_close(device);
    return r;
}

static void nothing_is_left(unsigned descriptors, unsigned call) {
    if (atomic_load(&fake->live) != 0 || atomic_load(&fake->entered) != 0 || open_descriptors() != descriptors)
        fail_msg("after call %u failed (%s): %d things and %d contexts left, %u descriptors instead of %u", call,
                 fake->failed ? fake->failed : "none", atomic_load(&fake->live), atomic_load(&fake->entered),
                 open_descriptors(), descriptors);
}

/* Where something is given back, there is nobody to tell a failure to. */
static bool may_be_swallowed(const char *function) {
    return strncmp(function, "cuCtxPushCurrent", 16) == 0 || strncmp(function, "cuEvent", 7) == 0;
}

/* Each call in turn, until there are no more. The second form needs nothing of the first, and makes good for it. */
static void fail_each_call(enum oscar_share share, CUresult failure) {
    fake = new_machine();
    assert_int_equal(use_device(share, NULL), 0);
    unsigned calls = atomic_load(&fake->calls), descriptors = open_descriptors(), swallowed = 0;
    nothing_is_left(descriptors, 0);
    assert_true(calls > 60);
    for (unsigned call = 1; call <= calls; call++) {
        fake = new_machine();
        fake->fail_at = call;
        fake->failure = failure;
        int r = use_device(share, NULL);
        nothing_is_left(descriptors, call);
        swallowed += r == 0;
        if (r == 0 && share == OSCAR_SHARE_VMM && !may_be_swallowed(fake->failed))
            fail_msg("nobody was told that call %u failed: %s", call, fake->failed);
    }
    print_message("%u of %u failures came back\n", calls - swallowed, calls);
    assert_true(swallowed < calls / 4);
    fake = new_machine();
    assert_int_equal(use_device(share, NULL), 0);
}

static void each_call_may_fail_with_descriptors(void **state) {
    (void)state;
    fail_each_call(OSCAR_SHARE_VMM, CUDA_ERROR_OUT_OF_MEMORY);
}

static void each_call_may_fail_with_handles(void **state) {
    (void)state;
    fail_each_call(OSCAR_SHARE_IPC, CUDA_ERROR_NOT_SUPPORTED);
}

static void each_call_may_fail_with_either(void **state) {
    (void)state;
    fail_each_call(OSCAR_SHARE_AUTO, CUDA_ERROR_NOT_SUPPORTED);
}

static void each_call_may_lose_the_device(void **state) {
    (void)state;
    fail_each_call(OSCAR_SHARE_VMM, CUDA_ERROR_ILLEGAL_ADDRESS);
}

static int open_model(void **state) {
    (void)state;
    struct kernel_random random = kernel_random_open();
    struct kernel_model_options options = {.layers = 2,
                                           .kv_heads = 2,
                                           .head_dim = 64,
                                           .matrix = true,
                                           .feedback = 0.1,
                                           .centre = true,
                                           .centre_size = 1.0,
                                           .pairs = 3,
                                           .turn_pages = 4,
                                           .rank_k = 60,
                                           .rank_v = 60};
    model = kernel_model_open(&random, &options);
    ops = oscar_device_cuda();
    fake = new_machine();
    return use_device(OSCAR_SHARE_AUTO, NULL); /* loads the driver, for good */
}

static int close_model(void **state) {
    (void)state;
    kernel_model_close(model);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_call_may_fail_with_descriptors),
        cmocka_unit_test(each_call_may_fail_with_handles),
        cmocka_unit_test(each_call_may_fail_with_either),
        cmocka_unit_test(each_call_may_lose_the_device),
    };
    return cmocka_run_group_tests(tests, open_model, close_model);
}
