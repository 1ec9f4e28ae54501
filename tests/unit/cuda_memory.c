/* SPDX-License-Identifier: Apache-2.0 */
/* Chunks and ranges of the CUDA backend in both forms, and which form is taken. What only other processes see is in
 * tests/gpu/gpu_memory.c, which runs on this driver too. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/support/fake_cuda.h"
#include "tests/support/kernel_fixture.h"

#define UNIT ((uint64_t)2 << 20)

static const struct oscar_device_ops *ops;
static struct fake_cuda *fake;
static struct oscar_device *device;

static int new_machine(void **state) {
    (void)state;
    ops = oscar_device_cuda();
    fake = fake_cuda_reset();
    return 0;
}

static int open_form(enum oscar_share share, struct oscar_cause *cause) {
    return ops->device_open(&(struct oscar_device_options){.share = share}, &device, cause);
}

static void close_and_check(void) {
    ops->device_close(device);
    assert_int_equal(atomic_load(&fake->live), 0);
    assert_int_equal(atomic_load(&fake->entered), 0);
    assert_int_equal(atomic_load(&fake->unrelaxed), 0);
}

static int open_vmm(void **state) {
    new_machine(state);
    return open_form(OSCAR_SHARE_VMM, NULL);
}

static int open_ipc(void **state) {
    new_machine(state);
    return open_form(OSCAR_SHARE_IPC, NULL);
}

static int close_device(void **state) {
    (void)state;
    close_and_check();
    return 0;
}

/* --- the choice ------------------------------------------------------------------------------------------------------------- */

static void descriptors_are_taken_where_they_work(void **state) {
    (void)state;
    assert_int_equal(open_form(OSCAR_SHARE_AUTO, NULL), 0);
    assert_non_null(strstr(ops->device_summary(device), "shared by descriptors"));
    assert_int_equal(ops->granularity(device), UNIT);
    close_and_check();
}

static void without_descriptors_handles_are_taken_and_the_reason_is_told(void **state) {
    (void)state;
    static const struct {
        CUdevice_attribute attribute; /* that is 0 */
        const char *failing;          /* or a call that fails */
        const char *reason;
    } cases[] = {
        {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, NULL, "no virtual memory management"},
        {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, NULL, "no descriptors of device memory"},
        {0, "cuMemCreate", "cuMemCreate: CUDA_ERROR_NOT_SUPPORTED"},
        {0, "cuMemExportToShareableHandle", "cuMemExportToShareableHandle: CUDA_ERROR_NOT_SUPPORTED"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        new_machine(state);
        if (cases[i].attribute)
            fake->device[0].attribute[cases[i].attribute] = 0;
        fake->failing = cases[i].failing;
        fake->failure = CUDA_ERROR_NOT_SUPPORTED;
        struct oscar_cause cause = {""};
        assert_int_equal(open_form(OSCAR_SHARE_VMM, &cause), OSCAR_ERR_UNSUPPORTED);
        assert_non_null(strstr(cause.text, cases[i].reason));
        assert_non_null(strstr(cause.text, "share by IPC handles (ipc), or use the host backend"));
        if (open_form(OSCAR_SHARE_AUTO, &cause) < 0)
            fail_msg("%s", cause.text);
        const char *summary = ops->device_summary(device);
        assert_non_null(strstr(summary, "shared by IPC handles because "));
        assert_non_null(strstr(summary, cases[i].reason));
        assert_int_equal(ops->self_test(device, NULL), 0);
        close_and_check();
    }
}

static void a_device_that_can_share_in_no_form_is_refused(void **state) {
    (void)state;
    fake->device[0].attribute[CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED] = 0;
    fake->failing = "cuIpcGetMemHandle";
    fake->failure = CUDA_ERROR_NOT_SUPPORTED;
    struct oscar_cause cause = {""};
    assert_int_equal(open_form(OSCAR_SHARE_AUTO, &cause), OSCAR_ERR_UNSUPPORTED);
    assert_non_null(strstr(cause.text, "no virtual memory management"));
    assert_non_null(strstr(cause.text, "cuIpcGetMemHandle"));
    assert_int_equal(atomic_load(&fake->live), 0);
}

static void handles_are_taken_where_they_are_asked_for(void **state) {
    (void)state;
    fake->counting = "cuMemCreate";
    assert_int_equal(open_form(OSCAR_SHARE_IPC, NULL), 0);
    assert_non_null(strstr(ops->device_summary(device), "shared by IPC handles"));
    assert_null(strstr(ops->device_summary(device), "because"));
    assert_int_equal(atomic_load(&fake->counted), 0); /* which may be what does not work here */
    close_and_check();
}

/* --- descriptors ------------------------------------------------------------------------------------------------------------ */

static struct oscar_chunk *make_chunk(uint64_t bytes) {
    struct oscar_chunk *chunk;
    struct oscar_cause cause = {""};
    if (ops->chunk_create(device, bytes, &chunk, &cause) < 0)
        fail_msg("%s", cause.text);
    return chunk;
}

static int export(struct oscar_chunk *chunk) {
    int fd = -1;
    assert_int_equal(ops->chunk_export(chunk, false, &fd, NULL), 0);
    assert_true(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    return fd;
}

static struct oscar_range *make_range(uint64_t bytes) {
    struct oscar_range *range;
    assert_int_equal(ops->range_reserve(device, bytes, &range, NULL), 0);
    return range;
}

static int map_told(struct oscar_range *range, uint64_t offset, uint64_t bytes, int fd, struct oscar_cause *cause) {
    return ops->range_map(range, &(struct oscar_range_chunk){.offset = offset, .bytes = bytes, .fd = fd}, 1, cause);
}

static int map(struct oscar_range *range, uint64_t offset, uint64_t bytes, int fd) {
    return map_told(range, offset, bytes, fd, NULL);
}

static void a_new_chunk_is_zero(void **state) {
    (void)state;
    struct oscar_chunk *chunk = make_chunk(2 * UNIT);
    for (uint64_t i = 0; i < 2 * UNIT; i++)
        assert_int_equal(ops->chunk_address(chunk)[i], 0);
    ops->chunk_free(chunk);
    ops->chunk_free(NULL);
}

static void sizes_are_multiples_of_the_granularity(void **state) {
    (void)state;
    struct oscar_chunk *chunk;
    struct oscar_range *range;
    static const uint64_t wrong[] = {0, 1, UNIT - 1, UNIT + 4096, UINT64_MAX - UNIT + 1};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(*wrong); i++) {
        assert_int_equal(ops->chunk_create(device, wrong[i], &chunk, NULL), OSCAR_ERR_INVALID);
        assert_int_equal(ops->range_reserve(device, wrong[i], &range, NULL), OSCAR_ERR_INVALID);
        assert_int_equal(ops->chunk_adopt(device, -1, wrong[i], &chunk, NULL), OSCAR_ERR_INVALID);
    }
}

static void a_range_maps_whole_chunks_where_it_is_told(void **state) {
    (void)state;
    struct oscar_chunk *first = make_chunk(UNIT), *second = make_chunk(2 * UNIT);
    struct oscar_range *range = make_range(8 * UNIT);
    int fds[] = {export(first), export(second)};
    assert_int_equal(map(range, 4 * UNIT, 2 * UNIT, fds[1]), 0);
    assert_int_equal(map(range, UNIT, UNIT, fds[0]), 0);
    memset(ops->chunk_address(first), 1, UNIT);
    memset(ops->chunk_address(second), 2, 2 * UNIT);
    assert_ptr_equal(ops->range_locate(range, 5 * UNIT), ops->range_address(range) + 5 * UNIT);
    assert_int_equal(ops->range_address(range)[UNIT], 1);
    assert_int_equal(ops->range_address(range)[6 * UNIT - 1], 2);
    /* In the place of another; a part of it cannot stay, and a wrong size is none. */
    assert_int_equal(map(range, 3 * UNIT, 2 * UNIT, fds[1]), OSCAR_ERR_INVALID);
    assert_int_equal(ops->range_unmap(range, 4 * UNIT, UNIT), OSCAR_ERR_INVALID);
    assert_int_equal(map(range, 6 * UNIT, UNIT, fds[1]), OSCAR_ERR_INVALID);
    assert_int_equal(map(range, 6 * UNIT, 2 * UNIT, fds[0]), OSCAR_ERR_INVALID);
    assert_int_equal(ops->range_address(range)[4 * UNIT], 2);
    assert_int_equal(map(range, UNIT, UNIT, fds[0]), 0);
    assert_int_equal(map(range, 7 * UNIT, 2 * UNIT, fds[1]), OSCAR_ERR_INVALID);
    assert_int_equal(map(range, UNIT / 2, UNIT, fds[0]), OSCAR_ERR_INVALID);
    assert_int_equal(map(range, 8 * UNIT, UNIT, fds[0]), OSCAR_ERR_INVALID);
    assert_int_equal(map(range, UINT64_MAX - UNIT + 1, UNIT, fds[0]), OSCAR_ERR_INVALID);
    assert_int_equal(ops->range_unmap(range, 0, 8 * UNIT), 0);
    assert_int_equal(ops->range_unmap(range, 0, 8 * UNIT), 0);
    assert_int_equal(map(range, 0, 2 * UNIT, fds[1]), 0);
    ops->chunk_free(first);
    ops->chunk_free(second);
    assert_int_equal(ops->range_address(range)[0], 2); /* a mapping keeps the memory */
    ops->range_free(range);
    ops->range_free(NULL);
    close(fds[0]);
    close(fds[1]);
}

/* Whether the byte can be read, and written: the kernel tells without a fault. */
static bool readable(const uint8_t *address) {
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    bool done = write(ends[1], address, 1) == 1;
    close(ends[0]);
    close(ends[1]);
    return done;
}

static bool writable(uint8_t *address) {
    int zeros = open("/dev/zero", O_RDONLY | O_CLOEXEC);
    bool done = read(zeros, address, 1) == 1;
    close(zeros);
    return done;
}

static void a_thousand_neighbours_are_made_accessible_by_one_call(void **state) {
    (void)state;
    enum { COUNT = 1000 };
    static struct oscar_range_chunk chunk[COUNT];
    struct oscar_chunk *owned = make_chunk(UNIT);
    struct oscar_range *range = make_range(COUNT * UNIT);
    int fd = export(owned);
    for (uint32_t i = 0; i < COUNT; i++)
        chunk[i] = (struct oscar_range_chunk){.offset = i * UNIT, .bytes = UNIT, .fd = fd};
    fake->counting = "cuMemSetAccess";
    unsigned calls = atomic_load(&fake->calls);
    assert_int_equal(ops->range_map(range, chunk, COUNT, NULL), 0);
    assert_int_equal(atomic_load(&fake->counted), 1);
    /* An import and a mapping each; entering the context is one more. */
    assert_int_equal(atomic_load(&fake->calls) - calls, 2 * COUNT + 2);
    memset(ops->chunk_address(owned), 3, UNIT);
    for (uint32_t i = 0; i < COUNT; i++)
        assert_int_equal(ops->range_address(range)[i * UNIT + i], 3);
    ops->range_free(range);
    ops->chunk_free(owned);
    close(fd);
}

/* Three runs of equal access: two to read, two to write, and one more behind a gap. */
#define RUNS 3
static const struct oscar_range_chunk runs[] = {
    {.offset = UNIT, .bytes = UNIT},
    {.offset = 2 * UNIT, .bytes = UNIT},
    {.offset = 3 * UNIT, .bytes = UNIT, .writable = true},
    {.offset = 4 * UNIT, .bytes = UNIT, .writable = true},
    {.offset = 6 * UNIT, .bytes = UNIT, .writable = true},
};
#define RUN_CHUNKS (sizeof(runs) / sizeof(*runs))

static int map_runs(struct oscar_range *range, int fd) {
    struct oscar_range_chunk chunk[RUN_CHUNKS];
    memcpy(chunk, runs, sizeof(runs));
    for (uint32_t i = 0; i < RUN_CHUNKS; i++)
        chunk[i].fd = fd;
    return ops->range_map(range, chunk, RUN_CHUNKS, NULL);
}

static void each_run_has_an_access_of_its_own(void **state) {
    (void)state;
    struct oscar_chunk *owned = make_chunk(UNIT);
    struct oscar_range *range = make_range(8 * UNIT);
    int fd = export(owned);
    fake->counting = "cuMemSetAccess";
    assert_int_equal(map_runs(range, fd), 0);
    assert_int_equal(atomic_load(&fake->counted), RUNS);
    for (uint32_t i = 0; i < RUN_CHUNKS; i++) {
        uint8_t *memory = ops->range_address(range) + runs[i].offset;
        assert_true(readable(memory) && readable(memory + UNIT - 1));
        assert_int_equal(writable(memory), runs[i].writable);
        assert_int_equal(writable(memory + UNIT - 1), runs[i].writable);
    }
    assert_false(readable(ops->range_address(range) + 5 * UNIT));
    ops->range_free(range);
    ops->chunk_free(owned);
    close(fd);
}

static void a_call_that_fails_in_between_leaves_nothing_mapped(void **state) {
    (void)state;
    struct oscar_chunk *owned = make_chunk(UNIT);
    struct oscar_range *range = make_range(8 * UNIT);
    int fd = export(owned), live = atomic_load(&fake->live);
    fake->failure = CUDA_ERROR_OUT_OF_MEMORY;
    unsigned failures = 0;
    for (;;) {
        fake->fail_at = atomic_load(&fake->calls) + 1 + failures;
        if (map_runs(range, fd) == 0)
            break;
        failures++;
        for (uint64_t offset = 0; offset < 8 * UNIT; offset += UNIT)
            assert_false(readable(ops->range_address(range) + offset));
        assert_int_equal(atomic_load(&fake->live), live);
    }
    assert_int_equal(failures, 1 + 2 * RUN_CHUNKS + RUNS); /* the context, imports and mappings, accesses */
    for (uint32_t i = 0; i < RUN_CHUNKS; i++)
        assert_true(readable(ops->range_address(range) + runs[i].offset));
    ops->range_free(range);
    ops->chunk_free(owned);
    close(fd);
}

static void chunks_that_are_refused_change_nothing(void **state) {
    (void)state;
    struct oscar_chunk *first = make_chunk(UNIT), *second = make_chunk(UNIT);
    struct oscar_range *range = make_range(4 * UNIT);
    int fd = export(first), other = open("/dev/null", O_RDWR | O_CLOEXEC), newer = export(second);
    memset(ops->chunk_address(first), 1, UNIT);
    memset(ops->chunk_address(second), 2, UNIT);
    assert_int_equal(map(range, 0, UNIT, fd), 0);
    const struct oscar_range_chunk wrong[][2] = {
        {{.offset = 0, .bytes = UNIT, .fd = newer}, {.offset = UNIT, .bytes = UNIT, .fd = other}},
        {{.offset = 0, .bytes = UNIT, .fd = newer}, {.offset = 0, .bytes = UNIT, .fd = newer}},
        {{.offset = UNIT, .bytes = UNIT, .fd = newer}, {.offset = 0, .bytes = UNIT, .fd = newer}},
        {{.offset = 0, .bytes = 2 * UNIT, .fd = newer}, {.offset = UNIT, .bytes = UNIT, .fd = newer}},
        {{.offset = 0, .bytes = UNIT, .fd = newer}, {.offset = 4 * UNIT, .bytes = UNIT, .fd = newer}},
    };
    for (size_t i = 0; i < sizeof(wrong) / sizeof(*wrong); i++) {
        assert_int_equal(ops->range_map(range, wrong[i], 2, NULL), OSCAR_ERR_INVALID);
        assert_int_equal(ops->range_address(range)[0], 1);
        assert_false(readable(ops->range_address(range) + UNIT));
    }
    const struct oscar_range_chunk right[] = {{.offset = 0, .bytes = UNIT, .fd = newer},
                                              {.offset = 2 * UNIT, .bytes = UNIT, .fd = fd}};
    assert_int_equal(ops->range_map(range, right, 2, NULL), 0); /* around and in the place of what is there */
    assert_int_equal(map(range, UNIT, UNIT, fd), 0);
    assert_int_equal(ops->range_address(range)[0], 2);
    assert_int_equal(ops->range_address(range)[2 * UNIT], 1);
    assert_int_equal(ops->range_unmap(range, 0, 4 * UNIT), 0);
    close(fd);
    close(other);
    close(newer);
    ops->range_free(range);
    ops->chunk_free(second);
    ops->chunk_free(first);
}

static void any_other_descriptor_is_an_invalid_argument(void **state) {
    (void)state;
    struct oscar_chunk *chunk = make_chunk(UNIT), *adopted;
    struct oscar_range *range = make_range(UNIT);
    int fd = export(chunk);
    assert_int_equal(map(range, 0, UNIT, fd), 0);
    int others[] = {open("/dev/null", O_RDWR), memfd_create("other", 0), -1};
    assert_int_equal(ftruncate(others[1], (off_t)UNIT), 0);
    for (size_t i = 0; i < sizeof(others) / sizeof(*others); i++) {
        assert_int_equal(map(range, 0, UNIT, others[i]), OSCAR_ERR_INVALID);
        assert_int_equal(ops->range_address(range)[0], 0); /* what was mapped still is */
        assert_int_equal(ops->chunk_adopt(device, others[i], UNIT, &adopted, NULL), OSCAR_ERR_INVALID);
        if (others[i] >= 0)
            assert_int_equal(fcntl(others[i], F_GETFD), -1); /* taken */
    }
    close(fd);
    ops->range_free(range);
    ops->chunk_free(chunk);
}

static void a_kept_descriptor_is_adopted_with_its_bytes(void **state) {
    (void)state;
    struct oscar_chunk *chunk = make_chunk(2 * UNIT), *adopted;
    memset(ops->chunk_address(chunk), 7, 2 * UNIT);
    int fd, other;
    assert_int_equal(ops->chunk_descriptor(chunk, &fd, NULL), 0);
    assert_int_equal(ops->chunk_descriptor(chunk, &other, NULL), 0);
    ops->chunk_free(chunk);
    assert_int_equal(ops->chunk_adopt(device, other, UNIT, &adopted, NULL), OSCAR_ERR_INVALID);
    assert_int_equal(ops->chunk_adopt(device, fd, 2 * UNIT, &adopted, NULL), 0);
    assert_int_equal(ops->chunk_address(adopted)[2 * UNIT - 1], 7);
    ops->chunk_address(adopted)[0] = 8;
    struct oscar_range *range = make_range(2 * UNIT);
    fd = export(adopted);
    assert_int_equal(map(range, 0, 2 * UNIT, fd), 0);
    assert_int_equal(ops->range_address(range)[0], 8);
    close(fd);
    ops->range_free(range);
    ops->chunk_free(adopted);
}

static void the_self_test_finds_memory_that_is_not_shared(void **state) {
    (void)state;
    assert_int_equal(ops->self_test(device, NULL), 0);
    fake->failing = "cuMemImportFromShareableHandle";
    fake->failure = CUDA_ERROR_NOT_SUPPORTED;
    struct oscar_cause cause = {""};
    assert_int_equal(ops->self_test(device, &cause), OSCAR_ERR_UNSUPPORTED);
    assert_non_null(strstr(cause.text, "cuMemImportFromShareableHandle"));
    fake->failing = NULL;
    fake->private_imports = true;
    assert_int_equal(ops->self_test(device, &cause), OSCAR_ERR_DEVICE);
    assert_non_null(strstr(cause.text, "does not read as it was written"));
}

static void memory_that_is_out_is_no_space(void **state) {
    (void)state;
    struct oscar_chunk *chunk;
    struct oscar_cause cause = {""};
    fake->failing = "cuMemCreate";
    fake->failure = CUDA_ERROR_OUT_OF_MEMORY;
    assert_int_equal(ops->chunk_create(device, UNIT, &chunk, &cause), OSCAR_ERR_NO_SPACE);
    assert_non_null(strstr(cause.text, "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"));
    fake->failing = NULL;
    ops->chunk_free(make_chunk(UNIT)); /* and nothing else is lost */
    uint64_t available, total;
    assert_int_equal(ops->memory_info(device, &available, &total, NULL), 0);
    assert_int_equal(available, (uint64_t)12 << 30);
    assert_int_equal(total, (uint64_t)16 << 30);
}

/* --- handles ---------------------------------------------------------------------------------------------------------------- */

static void a_handle_travels_in_a_sealed_memfd(void **state) {
    (void)state;
    struct oscar_chunk *chunk = make_chunk(UNIT), *adopted;
    for (uint64_t i = 0; i < UNIT; i++)
        assert_int_equal(ops->chunk_address(chunk)[i], 0);
    int fd = export(chunk), kept = -1;
    assert_int_equal(fcntl(fd, F_GET_SEALS) & (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL),
                     F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL);
    assert_int_equal(pwrite(fd, "x", 1, 0), -1);
    struct oscar_cause cause = {""};
    assert_int_equal(ops->chunk_descriptor(chunk, &kept, &cause), OSCAR_ERR_UNSUPPORTED);
    assert_non_null(strstr(cause.text, "dies with its owner"));
    assert_int_equal(ops->chunk_adopt(device, dup(fd), UNIT, &adopted, &cause), OSCAR_ERR_UNSUPPORTED);
    /* The driver opens no handle in the process that made it. */
    struct oscar_range *range = make_range(UNIT);
    assert_int_equal(map(range, 0, UNIT, fd), OSCAR_ERR_INVALID);
    close(fd);
    ops->range_free(range);
    ops->chunk_free(chunk);
}

static void a_handle_of_another_gpu_or_size_is_refused(void **state) {
    (void)state;
    struct oscar_device *other;
    struct oscar_device_options options = {.id = "GPU-b0b1b2b3-b4b5-b6b7-b8b9-babbbcbdbebf", .share = OSCAR_SHARE_IPC};
    assert_int_equal(ops->device_open(&options, &other, NULL), 0);
    struct oscar_chunk *chunk, *small = make_chunk(UNIT);
    assert_int_equal(ops->chunk_create(other, UNIT, &chunk, NULL), 0);
    int fd = export(chunk), small_fd = export(small);
    struct oscar_range *range = make_range(2 * UNIT);
    struct oscar_cause cause = {""};
    assert_int_equal(map_told(range, 0, UNIT, fd, &cause), OSCAR_ERR_INVALID);
    assert_non_null(strstr(cause.text, "lies on GPU-b0b1b2b3"));
    assert_int_equal(map_told(range, 0, 2 * UNIT, small_fd, &cause), OSCAR_ERR_INVALID);
    assert_non_null(strstr(cause.text, "2097152 bytes where 4194304 are needed"));
    close(fd);
    close(small_fd);
    ops->range_free(range);
    ops->chunk_free(small);
    ops->chunk_free(chunk);
    ops->device_close(other);
}

static void descriptors_are_refused_where_nothing_can_map_them(void **state) {
    (void)state;
    assert_int_equal(open_form(OSCAR_SHARE_VMM, NULL), 0);
    struct oscar_chunk *chunk = make_chunk(UNIT);
    int fd = export(chunk);
    ops->chunk_free(chunk);
    ops->device_close(device);
    fake->device[0].attribute[CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED] = 0;
    assert_int_equal(open_form(OSCAR_SHARE_AUTO, NULL), 0);
    struct oscar_range *range = make_range(UNIT);
    struct oscar_cause cause = {""};
    assert_int_equal(map_told(range, 0, UNIT, fd, &cause), OSCAR_ERR_UNSUPPORTED);
    assert_non_null(strstr(cause.text, "let the daemon share by IPC handles"));
    close(fd);
    ops->range_free(range);
    close_and_check();
}

#define WITH_VMM(test) cmocka_unit_test_setup_teardown(test, open_vmm, close_device)
#define WITH_IPC(test) cmocka_unit_test_setup_teardown(test, open_ipc, close_device)

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(descriptors_are_taken_where_they_work, new_machine),
        cmocka_unit_test_setup(without_descriptors_handles_are_taken_and_the_reason_is_told, new_machine),
        cmocka_unit_test_setup(a_device_that_can_share_in_no_form_is_refused, new_machine),
        cmocka_unit_test_setup(handles_are_taken_where_they_are_asked_for, new_machine),
        cmocka_unit_test_setup(descriptors_are_refused_where_nothing_can_map_them, new_machine),
        WITH_VMM(a_new_chunk_is_zero),
        WITH_VMM(sizes_are_multiples_of_the_granularity),
        WITH_VMM(a_range_maps_whole_chunks_where_it_is_told),
        WITH_VMM(a_thousand_neighbours_are_made_accessible_by_one_call),
        WITH_VMM(each_run_has_an_access_of_its_own),
        WITH_VMM(a_call_that_fails_in_between_leaves_nothing_mapped),
        WITH_VMM(chunks_that_are_refused_change_nothing),
        WITH_VMM(any_other_descriptor_is_an_invalid_argument),
        WITH_VMM(a_kept_descriptor_is_adopted_with_its_bytes),
        WITH_VMM(the_self_test_finds_memory_that_is_not_shared),
        WITH_VMM(memory_that_is_out_is_no_space),
        WITH_IPC(sizes_are_multiples_of_the_granularity),
        WITH_IPC(a_handle_travels_in_a_sealed_memfd),
        WITH_IPC(a_handle_of_another_gpu_or_size_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
