/* SPDX-License-Identifier: Apache-2.0 */
/* Chunks and ranges of the host backend: who may write, what a resize does, where the memory goes. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/kernel_fixture.h"

#define CHUNK_BYTES ((uint64_t)1 << 20)

static const struct oscar_device_ops *ops;
static struct oscar_device *device;

static int open_device(void **state) {
    (void)state;
    ops = oscar_device_host();
    return ops->device_open(NULL, &device, NULL);
}

static int close_device(void **state) {
    (void)state;
    ops->device_close(device);
    return 0;
}

static struct oscar_chunk *make_chunk(uint64_t bytes) {
    struct oscar_chunk *chunk;
    struct oscar_cause cause = {0};
    if (ops->chunk_create(device, bytes, &chunk, &cause) < 0)
        fail_msg("%s", cause.text);
    return chunk;
}

static int export_chunk(struct oscar_chunk *chunk, bool writable) {
    int fd;
    assert_int_equal(ops->chunk_export(chunk, writable, &fd, NULL), 0);
    return fd;
}

static int map(struct oscar_range *range, uint64_t offset, uint64_t bytes, int fd, bool writable) {
    struct oscar_range_chunk chunk = {.offset = offset, .bytes = bytes, .fd = fd, .writable = writable};
    return ops->range_map(range, &chunk, 1, NULL);
}

/* True when touching the byte kills a process. */
static bool faults(uint8_t *address, bool write) {
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        signal(SIGBUS, SIG_DFL);
        volatile uint8_t *byte = address;
        if (write)
            *byte = 1;
        else
            (void)*byte;
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    return !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void a_new_chunk_is_zero_and_takes_memory_only_where_it_is_written(void **state) {
    (void)state;
    struct oscar_chunk *chunk = make_chunk(64 * CHUNK_BYTES);
    int fd = export_chunk(chunk, false);
    struct stat status;
    assert_int_equal(fstat(fd, &status), 0);
    assert_int_equal(status.st_blocks, 0);
    assert_int_equal(ops->chunk_address(chunk)[40 * CHUNK_BYTES], 0);
    ops->chunk_address(chunk)[40 * CHUNK_BYTES] = 1;
    assert_int_equal(fstat(fd, &status), 0);
    assert_true(status.st_blocks > 0 && status.st_blocks * 512 <= 4 << 20);
    close(fd);
    ops->chunk_free(chunk);
}

static void a_read_only_export_cannot_be_mapped_or_made_writable(void **state) {
    (void)state;
    struct oscar_chunk *chunk = make_chunk(CHUNK_BYTES);
    int fd = export_chunk(chunk, false);
    ops->chunk_address(chunk)[5] = 77;
    assert_ptr_equal(mmap(NULL, CHUNK_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
    assert_int_equal(errno, EACCES);
    uint8_t *mapped = mmap(NULL, CHUNK_BYTES, PROT_READ, MAP_SHARED, fd, 0);
    assert_ptr_not_equal(mapped, MAP_FAILED);
    assert_int_equal(mapped[5], 77);
    assert_int_equal(mprotect(mapped, CHUNK_BYTES, PROT_READ | PROT_WRITE), -1);
    assert_int_equal(pwrite(fd, "x", 1, 0), -1);
    munmap(mapped, CHUNK_BYTES);
    /* Another user's process cannot open the same file again for writing either. */
    struct stat status;
    assert_int_equal(fstat(fd, &status), 0);
    assert_int_equal(status.st_mode & 0777, 0600);
    close(fd);
    ops->chunk_free(chunk);
}

static void nobody_can_resize_a_chunk(void **state) {
    (void)state;
    struct oscar_chunk *chunk = make_chunk(CHUNK_BYTES);
    int fd = export_chunk(chunk, true);
    assert_int_equal(ftruncate(fd, 0), -1);
    assert_int_equal(errno, EPERM);
    assert_int_equal(ftruncate(fd, (off_t)(2 * CHUNK_BYTES)), -1);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), -1);
    close(fd);
    ops->chunk_free(chunk);
}

static void exported_descriptors_do_not_survive_an_exec(void **state) {
    (void)state;
    struct oscar_chunk *chunk = make_chunk(CHUNK_BYTES);
    int fd[3] = {export_chunk(chunk, false), export_chunk(chunk, true), -1};
    assert_int_equal(ops->chunk_descriptor(chunk, &fd[2], NULL), 0);
    for (uint32_t i = 0; i < 3; i++) {
        assert_true(fcntl(fd[i], F_GETFD) & FD_CLOEXEC);
        close(fd[i]);
    }
    ops->chunk_free(chunk);
}

static void writes_of_owner_and_writer_reach_all_readers(void **state) {
    (void)state;
    struct oscar_chunk *chunk = make_chunk(CHUNK_BYTES);
    struct oscar_range *range;
    assert_int_equal(ops->range_reserve(device, 4 * CHUNK_BYTES, &range, NULL), 0);
    int reader = export_chunk(chunk, false);
    int writer = export_chunk(chunk, true);
    assert_int_equal(map(range, 0, CHUNK_BYTES, reader, false), 0);
    assert_int_equal(map(range, 2 * CHUNK_BYTES, CHUNK_BYTES, writer, true), 0);
    close(reader);
    close(writer);
    uint8_t *base = ops->range_address(range);
    ops->chunk_address(chunk)[9] = 1;
    base[2 * CHUNK_BYTES + 10] = 2;
    assert_int_equal(base[9], 1);
    assert_int_equal(base[10], 2);
    assert_int_equal(ops->chunk_address(chunk)[10], 2);
    assert_true(faults(base + 9, true)); /* a buggy reader harms itself only */
    assert_true(faults(base + CHUNK_BYTES, false));
    assert_int_equal(ops->range_unmap(range, 0, CHUNK_BYTES), 0);
    assert_true(faults(base + 9, false));
    ops->range_free(range);
    ops->chunk_free(chunk);
}

static void a_freed_chunk_gives_its_memory_back_under_its_readers(void **state) {
    (void)state;
    struct oscar_chunk *chunk = make_chunk(CHUNK_BYTES);
    int fd = export_chunk(chunk, false);
    uint8_t *mapped = mmap(NULL, CHUNK_BYTES, PROT_READ, MAP_SHARED, fd, 0);
    assert_ptr_not_equal(mapped, MAP_FAILED);
    memset(ops->chunk_address(chunk), 0xEE, CHUNK_BYTES);
    assert_int_equal(mapped[CHUNK_BYTES - 1], 0xEE);
    ops->chunk_free(chunk);
    struct stat status;
    assert_int_equal(fstat(fd, &status), 0);
    assert_int_equal(status.st_blocks, 0);
    assert_int_equal(mapped[CHUNK_BYTES - 1], 0); /* and a late reader sees zeros, not a fault */
    munmap(mapped, CHUNK_BYTES);
    close(fd);
}

static void a_chunk_outlives_its_process_through_its_descriptor(void **state) {
    (void)state;
    struct oscar_chunk *chunk = make_chunk(CHUNK_BYTES);
    int fd;
    assert_int_equal(ops->chunk_descriptor(chunk, &fd, NULL), 0);
    pid_t engine = fork();
    assert_true(engine >= 0);
    if (engine == 0) { /* an engine that writes and is killed */
        memcpy(ops->chunk_address(chunk) + 4096, "sealed", 7);
        raise(SIGKILL);
        _exit(1);
    }
    int status;
    assert_int_equal(waitpid(engine, &status, 0), engine);
    struct oscar_chunk *adopted;
    assert_int_equal(ops->chunk_adopt(device, fd, CHUNK_BYTES, &adopted, NULL), 0);
    assert_string_equal((char *)ops->chunk_address(adopted) + 4096, "sealed");
    ops->chunk_address(adopted)[0] = 5;
    int reader = export_chunk(adopted, false);
    uint8_t byte;
    assert_int_equal(pread(reader, &byte, 1, 0), 1);
    assert_int_equal(byte, 5);
    close(reader);
    ops->chunk_free(adopted);
    ops->chunk_free(chunk);
}

static void what_is_not_a_chunk_is_not_adopted_and_its_descriptor_is_closed(void **state) {
    (void)state;
    struct oscar_chunk *adopted = NULL;
    struct oscar_cause cause = {0};
    int unsealed = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(unsealed, (off_t)CHUNK_BYTES), 0);
    assert_int_equal(ops->chunk_adopt(device, unsealed, CHUNK_BYTES, &adopted, &cause), OSCAR_ERR_INVALID);
    assert_true(cause.text[0] != 0);
    assert_int_equal(fcntl(unsealed, F_GETFD), -1);
    int pipe_ends[2];
    assert_int_equal(pipe(pipe_ends), 0);
    assert_int_equal(ops->chunk_adopt(device, pipe_ends[0], CHUNK_BYTES, &adopted, NULL), OSCAR_ERR_INVALID);
    close(pipe_ends[1]);
    struct oscar_chunk *chunk = make_chunk(CHUNK_BYTES);
    int fd;
    assert_int_equal(ops->chunk_descriptor(chunk, &fd, NULL), 0);
    assert_int_equal(ops->chunk_adopt(device, fd, 2 * CHUNK_BYTES, &adopted, NULL), OSCAR_ERR_INVALID);
    assert_int_equal(ops->chunk_descriptor(chunk, &fd, NULL), 0);
    assert_int_equal(ops->chunk_adopt(device, fd, CHUNK_BYTES / 2, &adopted, NULL), OSCAR_ERR_INVALID);
    assert_int_equal(ops->chunk_adopt(device, export_chunk(chunk, false), CHUNK_BYTES, &adopted, NULL),
                     OSCAR_ERR_PERMISSION);
    assert_null(adopted);
    ops->chunk_free(chunk);
}

static void a_range_refuses_what_would_fault_later(void **state) {
    (void)state;
    struct oscar_range *range;
    struct oscar_chunk *chunk = make_chunk(CHUNK_BYTES);
    int fd = export_chunk(chunk, false);
    size_t page = ops->granularity(device);
    assert_int_equal(ops->range_reserve(device, 4 * CHUNK_BYTES, &range, NULL), 0);
    assert_int_equal(map(range, 0, 2 * CHUNK_BYTES, fd, false), OSCAR_ERR_INVALID); /* would be SIGBUS */
    assert_int_equal(map(range, 4 * CHUNK_BYTES, CHUNK_BYTES, fd, false), OSCAR_ERR_INVALID);
    assert_int_equal(map(range, 4 * CHUNK_BYTES - page, CHUNK_BYTES, fd, false), OSCAR_ERR_INVALID);
    assert_int_equal(map(range, UINT64_MAX - page + 1, CHUNK_BYTES, fd, false), OSCAR_ERR_INVALID);
    assert_int_equal(map(range, page / 2, CHUNK_BYTES, fd, false), OSCAR_ERR_INVALID);
    assert_int_equal(map(range, 0, 0, fd, false), OSCAR_ERR_INVALID);
    assert_int_equal(map(range, 0, page - 1, fd, false), OSCAR_ERR_INVALID);
    assert_int_equal(map(range, 0, CHUNK_BYTES, -1, false), OSCAR_ERR_INVALID);
    assert_int_equal(map(range, 0, CHUNK_BYTES, fd, true), OSCAR_ERR_PERMISSION);
    assert_int_equal(ops->range_unmap(range, 4 * CHUNK_BYTES, page), OSCAR_ERR_INVALID);
    assert_true(faults(ops->range_address(range), false)); /* still reserved after the failures */
    close(fd);
    ops->range_free(range);
    ops->chunk_free(chunk);
}

static void chunks_of_one_call_are_mapped_together_or_not_at_all(void **state) {
    (void)state;
    struct oscar_range *range;
    struct oscar_chunk *chunk = make_chunk(CHUNK_BYTES);
    int reader = export_chunk(chunk, false), writer = export_chunk(chunk, true);
    assert_int_equal(ops->range_reserve(device, 4 * CHUNK_BYTES, &range, NULL), 0);
    uint8_t *base = ops->range_address(range);
    struct oscar_range_chunk both[] = {{.offset = CHUNK_BYTES, .bytes = CHUNK_BYTES, .fd = reader},
                                       {.offset = 2 * CHUNK_BYTES, .bytes = CHUNK_BYTES, .fd = reader}};
    both[1].writable = true; /* which the descriptor does not let through */
    assert_int_equal(ops->range_map(range, both, 2, NULL), OSCAR_ERR_PERMISSION);
    assert_true(faults(base + CHUNK_BYTES, false) && faults(base + 2 * CHUNK_BYTES, false));
    both[1].fd = writer;
    assert_int_equal(ops->range_map(range, both, 2, NULL), 0);
    base[2 * CHUNK_BYTES] = 7;
    assert_int_equal(base[CHUNK_BYTES], 7);
    assert_true(faults(base + CHUNK_BYTES, true));
    const struct oscar_range_chunk falling[] = {both[1], both[0]};
    assert_int_equal(ops->range_map(range, falling, 2, NULL), OSCAR_ERR_INVALID);
    both[1].offset -= ops->granularity(device);
    assert_int_equal(ops->range_map(range, both, 2, NULL), OSCAR_ERR_INVALID);
    assert_int_equal(base[CHUNK_BYTES], 7); /* what was there still is */
    close(reader);
    close(writer);
    ops->range_free(range);
    ops->chunk_free(chunk);
}

static void a_pool_beyond_four_gibibytes_is_addressed_in_full(void **state) {
    (void)state;
    const uint64_t bytes = UINT64_C(6) << 30;
    struct oscar_chunk *chunk = make_chunk(bytes);
    struct oscar_range *range;
    assert_int_equal(ops->range_reserve(device, 2 * bytes, &range, NULL), 0);
    int fd = export_chunk(chunk, true);
    assert_int_equal(map(range, bytes, bytes, fd, true), 0);
    close(fd);
    uint8_t *imported = ops->range_address(range) + bytes;
    const uint64_t far = (UINT64_C(5) << 30) + 123;
    ops->chunk_address(chunk)[far] = 1;
    imported[far - (UINT64_C(1) << 32)] = 2; /* where a 32-bit offset would land */
    assert_int_equal(imported[far], 1);
    assert_int_equal(ops->chunk_address(chunk)[far - (UINT64_C(1) << 32)], 2);
    assert_int_equal(ops->copy(NULL, imported + bytes - 64, imported + far, 1), 0);
    assert_int_equal(ops->chunk_address(chunk)[bytes - 64], 1);
    ops->range_free(range);
    ops->chunk_free(chunk);
}

static void sizes_that_are_not_whole_pages_are_refused_in_words(void **state) {
    (void)state;
    struct oscar_chunk *chunk;
    struct oscar_range *range;
    struct oscar_cause cause = {0};
    assert_int_equal(ops->chunk_create(device, 0, &chunk, &cause), OSCAR_ERR_INVALID);
    assert_int_equal(ops->chunk_create(device, 12345, &chunk, &cause), OSCAR_ERR_INVALID);
    assert_non_null(strstr(cause.text, "12345"));
    assert_int_equal(ops->chunk_create(device, UINT64_MAX & ~(uint64_t)0xFFFF, &chunk, NULL), OSCAR_ERR_INVALID);
    assert_int_equal(ops->range_reserve(device, UINT64_C(1) << 62, &range, &cause), OSCAR_ERR_NO_MEMORY);
    ops->chunk_free(NULL);
    ops->range_free(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_new_chunk_is_zero_and_takes_memory_only_where_it_is_written),
        cmocka_unit_test(a_read_only_export_cannot_be_mapped_or_made_writable),
        cmocka_unit_test(nobody_can_resize_a_chunk),
        cmocka_unit_test(exported_descriptors_do_not_survive_an_exec),
        cmocka_unit_test(writes_of_owner_and_writer_reach_all_readers),
        cmocka_unit_test(a_freed_chunk_gives_its_memory_back_under_its_readers),
        cmocka_unit_test(a_chunk_outlives_its_process_through_its_descriptor),
        cmocka_unit_test(what_is_not_a_chunk_is_not_adopted_and_its_descriptor_is_closed),
        cmocka_unit_test(a_range_refuses_what_would_fault_later),
        cmocka_unit_test(chunks_of_one_call_are_mapped_together_or_not_at_all),
        cmocka_unit_test(a_pool_beyond_four_gibibytes_is_addressed_in_full),
        cmocka_unit_test(sizes_that_are_not_whole_pages_are_refused_in_words),
    };
    return cmocka_run_group_tests(tests, open_device, close_device);
}
