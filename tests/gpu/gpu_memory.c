/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chunks and ranges across processes, in each form of sharing: who reads what, who may write, and what outlives whom. Every process
 * but this one has a device; this one starts them, passes descriptors on and kills.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "tests/gpu/probe.h"
#include "tests/gpu/process.h"
#include "tests/gpu/rig.h"

#define MIB ((uint64_t)1 << 20)
#define CHUNK_BYTES (4 * MIB)
#define RANGE_BYTES (16 * 1024 * MIB)
#define NEIGHBOURS 8

/* --- a process with a device ------------------------------------------------------------------------------------------------ */

/* It owns a chunk or maps what it is sent, and answers questions about the bytes. */
static struct {
    struct rig *rig;
    struct probe *probe;
    struct oscar_chunk *chunk;
    struct oscar_range *range;
    uint8_t *memory; /* of the chunk, or what was mapped last */
    uint64_t bytes;
} worker;

static uint64_t word_at(uint64_t seed, uint64_t i) {
    uint64_t z = (seed ^ (i * UINT64_C(0x9E3779B97F4A7C15))) * UINT64_C(0xBF58476D1CE4E5B9);
    return z ^ (z >> 31);
}

static void fill(uint64_t seed) {
    uint64_t *words = malloc(worker.bytes);
    if (!words)
        process_give_up("no memory");
    for (uint64_t i = 0; i < worker.bytes / 8; i++)
        words[i] = word_at(seed, i);
    rig_write(worker.rig, worker.memory, words, worker.bytes);
    free(words);
}

/* Whether the memory is as `fill` left it. */
static bool holds(uint64_t seed) {
    uint64_t *words = calloc(1, worker.bytes);
    if (!words)
        process_give_up("no memory");
    rig_read(worker.rig, words, worker.memory, worker.bytes);
    uint64_t same = 0;
    while (same < worker.bytes / 8 && words[same] == word_at(seed, same))
        same++;
    free(words);
    return same == worker.bytes / 8;
}

static struct process_message answer(const char *word, int64_t value) {
    struct process_message message = {.value = (uint64_t)value, .fd = -1};
    (void)snprintf(message.word, sizeof(message.word), "%s", word);
    return message;
}

static struct process_message own(const struct process_message *message) {
    struct oscar_cause cause = {""};
    if (worker.rig->ops->chunk_create(worker.rig->device, message->value, &worker.chunk, &cause) < 0)
        process_give_up("chunk: %s", cause.text);
    worker.bytes = message->value;
    worker.memory = worker.rig->ops->chunk_address(worker.chunk);
    return answer("", 0);
}

static struct process_message export(const struct process_message *message) {
    struct process_message made = answer("", 0);
    struct oscar_cause cause = {""};
    if (worker.rig->ops->chunk_export(worker.chunk, message->value, &made.fd, &cause) < 0)
        process_give_up("descriptor: %s", cause.text);
    return made;
}

/* The last chunk is what is looked at next. */
static struct process_message map_chunks(const struct oscar_range_chunk *chunk, uint32_t chunks) {
    const struct oscar_device_ops *ops = worker.rig->ops;
    struct oscar_cause cause = {""};
    if (!worker.range && ops->range_reserve(worker.rig->device, RANGE_BYTES, &worker.range, &cause) < 0)
        process_give_up("range: %s", cause.text);
    int r = ops->range_map(worker.range, chunk, chunks, &cause);
    if (r < 0)
        print_message("range_map: %s\n", cause.text);
    worker.bytes = chunk[chunks - 1].bytes;
    worker.memory = ops->range_locate(worker.range, chunk[chunks - 1].offset);
    return answer("", r);
}

/* `more` says where, and in bit 0 whether for writing. */
static struct process_message map(const struct process_message *message) {
    const struct oscar_range_chunk chunk = {.offset = message->more & ~(uint64_t)1,
                                            .bytes = message->value,
                                            .fd = message->fd,
                                            .writable = message->more & 1};
    return map_chunks(&chunk, 1);
}

/* The chunk again and again, side by side: half of it for reading, half for writing. */
static struct process_message map_neighbours(const struct process_message *message) {
    struct oscar_range_chunk chunk[NEIGHBOURS];
    for (uint32_t i = 0; i < NEIGHBOURS; i++)
        chunk[i] = (struct oscar_range_chunk){
            .offset = i * message->value, .bytes = message->value, .fd = message->fd, .writable = i >= NEIGHBOURS / 2};
    return map_chunks(chunk, NEIGHBOURS);
}

static struct process_message look_at(const struct process_message *message) {
    worker.memory = worker.rig->ops->range_locate(worker.range, message->value);
    return answer("", 0);
}

static struct process_message adopt(const struct process_message *message) {
    struct oscar_cause cause = {""};
    int r = worker.rig->ops->chunk_adopt(worker.rig->device, fcntl(message->fd, F_DUPFD_CLOEXEC, 0), message->value,
                                         &worker.chunk, &cause);
    if (r < 0) {
        print_message("chunk_adopt: %s\n", cause.text);
        return answer("", r);
    }
    worker.bytes = message->value;
    worker.memory = worker.rig->ops->chunk_address(worker.chunk);
    return answer("", 0);
}

/* By a kernel, at byte `more`: what the device lets through, not what the driver checks. */
static struct process_message write_word(const struct process_message *message) {
    probe_write(worker.probe, worker.rig->asynchronous, worker.memory + message->more, message->value);
    return answer("", rig_wait(worker.rig, worker.rig->asynchronous));
}

static struct process_message read_word(const struct process_message *message) {
    uint64_t word = 0;
    rig_read(worker.rig, &word, worker.memory + message->more, sizeof(word));
    return answer("", (int64_t)word);
}

static struct process_message serve(const struct process_message *message) {
    const char *word = message->word;
    if (strcmp(word, "own") == 0)
        return own(message);
    if (strcmp(word, "export") == 0)
        return export(message);
    if (strcmp(word, "map") == 0)
        return map(message);
    if (strcmp(word, "map neighbours") == 0)
        return map_neighbours(message);
    if (strcmp(word, "look at") == 0)
        return look_at(message);
    if (strcmp(word, "adopt") == 0)
        return adopt(message);
    if (strcmp(word, "write word") == 0)
        return write_word(message);
    if (strcmp(word, "read word") == 0)
        return read_word(message);
    if (strcmp(word, "holds") == 0)
        return answer("", holds(message->value));
    if (strcmp(word, "id") == 0)
        return answer(worker.rig->ops->device_id(worker.rig->device), 0);
    if (strcmp(word, "fill") == 0) {
        fill(message->value);
        return answer("", 0);
    }
    if (strcmp(word, "run a kernel") == 0) { /* that does not end for a while */
        probe_hold(worker.probe, worker.rig->asynchronous);
        return answer("", 0);
    }
    process_give_up("\"%s\" is no question", word);
}

static int work(void) {
    worker.rig = rig_open();
    worker.probe = probe_open(worker.rig);
    int status = process_serve(serve);
    worker.rig->ops->range_free(worker.range);
    worker.rig->ops->chunk_free(worker.chunk);
    probe_close(worker.probe);
    rig_close(worker.rig);
    return status;
}

/* --- this process's view of it ---------------------------------------------------------------------------------------------- */

static struct kernel_random random_state;
static uint64_t seed;
static const char *form; /* variable for the processes: OSCAR_TEST_SHARE */

static int open_vmm(void **state) {
    (void)state;
    form = "OSCAR_TEST_SHARE=vmm";
    seed = kernel_random_next(&random_state);
    return 0;
}

static int open_ipc(void **state) {
    (void)state;
    form = "OSCAR_TEST_SHARE=ipc";
    seed = kernel_random_next(&random_state);
    return 0;
}

static uint64_t ask(const struct process *process, const char *word, uint64_t value, uint64_t more) {
    struct process_message message = {.value = value, .more = more, .fd = -1};
    (void)snprintf(message.word, sizeof(message.word), "%s", word);
    return process_ask(process, message).value;
}

static int pass(const struct process *process, const char *word, int fd, uint64_t bytes, uint64_t more) {
    struct process_message message = {.value = bytes, .more = more, .fd = fd};
    (void)snprintf(message.word, sizeof(message.word), "%s", word);
    return (int)(int64_t)process_ask(process, message).value;
}

static int export_from(const struct process *owner, bool writable) {
    int fd = process_ask(owner, (struct process_message){.word = "export", .value = writable, .fd = -1}).fd;
    assert_true(fd >= 0);
    return fd;
}

/* An owner whose chunk is filled from the seed, and a descriptor of it for reading. */
static struct process start_owner(uint64_t bytes, int *ret_fd) {
    struct process owner = process_start("work", form);
    assert_int_equal(ask(&owner, "own", bytes, 0), 0);
    assert_int_equal(ask(&owner, "fill", seed, 0), 0);
    *ret_fd = export_from(&owner, false);
    return owner;
}

static struct process start_reader(int fd) {
    struct process reader = process_start("work", form);
    assert_int_equal(pass(&reader, "map", fd, CHUNK_BYTES, 0), 0);
    return reader;
}

/* Under MPS a process that faults, or is killed while it has a kernel running, ends the contexts of the others. Their memory
 * stays as it is, in descriptors. */
static bool others_fall_too(void) { return rig_on_gpu() && getenv("CUDA_MPS_PIPE_DIRECTORY"); }

/* --- tests ------------------------------------------------------------------------------------------------------------------ */

static void the_self_test_passes(void **state) {
    (void)state;
    struct rig *rig = rig_open();
    struct oscar_cause cause = {""};
    if (rig->ops->self_test(rig->device, &cause) < 0)
        fail_msg("%s", cause.text);
    rig_close(rig);
}

static void memory_of_the_rig_is_poison(void **state) {
    (void)state;
    struct rig *rig = rig_open();
    size_t bytes = 3 * MIB + 40;
    uint8_t *memory = rig_alloc(rig, bytes), *read = calloc(1, bytes);
    assert_non_null(read);
    assert_int_equal((uintptr_t)memory % 256, 0);
    rig_read(rig, read, memory, bytes);
    for (size_t i = 0; i < bytes; i++)
        assert_int_equal(read[i], 0xFF);
    free(read);
    rig_close(rig);
}

static void another_process_reads_what_the_owner_writes(void **state) {
    (void)state;
    int fd;
    struct process owner = start_owner(CHUNK_BYTES, &fd), reader = start_reader(fd);
    assert_true(ask(&reader, "holds", seed, 0));
    assert_false(ask(&reader, "holds", seed + 1, 0));
    ask(&owner, "fill", seed + 1, 0);
    assert_true(ask(&reader, "holds", seed + 1, 0));
    process_end(&reader);
    process_end(&owner);
    close(fd);
}

static void a_writer_writes_for_all(void **state) {
    (void)state;
    int fd;
    struct process owner = start_owner(CHUNK_BYTES, &fd), reader = start_reader(fd);
    struct process writer = process_start("work", form);
    int writable = export_from(&owner, true);
    assert_int_equal(pass(&writer, "map", writable, CHUNK_BYTES, 1), 0);
    assert_int_equal(ask(&writer, "write word", 77, 4096), 0);
    assert_int_equal(ask(&owner, "read word", 0, 4096), 77);
    assert_int_equal(ask(&reader, "read word", 0, 4096), 77);
    process_end(&writer);
    process_end(&reader);
    process_end(&owner);
    close(writable);
    close(fd);
}

static void neighbours_are_mapped_by_one_call(void **state) {
    (void)state;
    int fd;
    struct process owner = start_owner(CHUNK_BYTES, &fd), mapper = process_start("work", form);
    int writable = export_from(&owner, true);
    assert_int_equal(pass(&mapper, "map neighbours", writable, CHUNK_BYTES, 0), 0);
    for (uint64_t i = 0; i < NEIGHBOURS; i++) {
        ask(&mapper, "look at", i * CHUNK_BYTES, 0);
        assert_true(ask(&mapper, "holds", seed, 0));
    }
    assert_int_equal(ask(&mapper, "write word", 55, CHUNK_BYTES - 8), 0); /* in the last one */
    ask(&mapper, "look at", 0, 0);
    assert_int_equal(ask(&mapper, "read word", 0, CHUNK_BYTES - 8), 55);
    assert_int_equal(ask(&owner, "read word", 0, CHUNK_BYTES - 8), 55);
    process_end(&mapper);
    process_end(&owner);
    close(writable);
    close(fd);
}

static void a_write_through_a_reading_mapping_harms_its_process_only(void **state) {
    (void)state;
    int fd;
    struct process owner = start_owner(CHUNK_BYTES, &fd), reader = start_reader(fd), writer = start_reader(fd);
    process_send(&writer, (struct process_message){.word = "write word", .value = 1, .fd = -1});
    struct process_message told;
    assert_true(process_died(&writer, &told) || (int64_t)told.value < 0);
    process_kill(&writer);
    if (others_fall_too()) {
        process_kill(&owner);
        process_kill(&reader);
        owner = start_reader(fd);
        reader = start_reader(fd);
    }
    assert_true(ask(&owner, "holds", seed, 0));
    assert_true(ask(&reader, "holds", seed, 0));
    process_end(&reader);
    process_end(&owner);
    close(fd);
}

static void a_reader_by_handle_can_write(void **state) {
    (void)state;
    int fd;
    struct process owner = start_owner(CHUNK_BYTES, &fd), reader = start_reader(fd);
    assert_int_equal(ask(&reader, "write word", 99, 8), 0); /* the loss that the documents tell of */
    assert_int_equal(ask(&owner, "read word", 0, 8), 99);
    process_end(&reader);
    process_end(&owner);
    close(fd);
}

static void memory_outlives_its_killed_owner_in_a_reader(void **state) {
    (void)state;
    int fd;
    struct process owner = start_owner(CHUNK_BYTES, &fd), reader = start_reader(fd);
    close(fd);
    process_kill(&owner);
    assert_true(ask(&reader, "holds", seed, 0));
    process_end(&reader);
}

static void memory_outlives_its_killed_owner_in_a_descriptor(void **state) {
    (void)state;
    int fd;
    struct process owner = start_owner(CHUNK_BYTES, &fd);
    int kept = export_from(&owner, true); /* as the keeper holds it, which has no device either */
    process_kill(&owner);
    struct process reader = start_reader(fd), next = process_start("work", form);
    assert_true(ask(&reader, "holds", seed, 0));
    assert_int_equal(pass(&next, "adopt", kept, CHUNK_BYTES, 0), 0);
    assert_true(ask(&next, "holds", seed, 0));
    assert_int_equal(ask(&next, "fill", seed + 1, 0), 0);
    assert_true(ask(&reader, "holds", seed + 1, 0));
    process_end(&next);
    process_end(&reader);
    close(kept);
    close(fd);
}

static void a_handle_dies_with_its_owner(void **state) {
    (void)state;
    int fd;
    struct process owner = start_owner(CHUNK_BYTES, &fd);
    process_kill(&owner);
    struct process reader = process_start("work", form);
    assert_int_equal(pass(&reader, "map", fd, CHUNK_BYTES, 0), OSCAR_ERR_STALE);
    assert_int_equal(pass(&reader, "adopt", fd, CHUNK_BYTES, 0), OSCAR_ERR_UNSUPPORTED);
    assert_int_equal(ask(&reader, "own", CHUNK_BYTES, 0), 0);
    assert_int_equal(ask(&reader, "fill", seed, 0), 0);
    assert_true(ask(&reader, "holds", seed, 0));
    process_end(&reader);
    close(fd);
}

static void a_writer_killed_with_a_kernel_running_leaves_the_memory(void **state) {
    (void)state;
    int fd;
    struct process owner = start_owner(CHUNK_BYTES, &fd), writer = process_start("work", form);
    int writable = export_from(&owner, true);
    assert_int_equal(pass(&writer, "map", writable, CHUNK_BYTES, 1), 0);
    assert_int_equal(ask(&writer, "run a kernel", 0, 0), 0);
    process_kill(&writer); /* returns when the process is gone */
    if (others_fall_too()) {
        process_kill(&owner);
        owner = start_reader(fd);
    }
    assert_true(ask(&owner, "holds", seed, 0));
    struct process reader = start_reader(fd);
    assert_true(ask(&reader, "holds", seed, 0));
    process_end(&reader);
    process_end(&owner);
    close(writable);
    close(fd);
}

static void offsets_go_beyond_32_bits(void **state) {
    (void)state;
    const uint64_t first_bytes = 4096 * MIB + 64 * MIB, second_bytes = 64 * MIB;
    const uint64_t places[] = {
        0, ((uint64_t)1 << 31) - 8, (uint64_t)1 << 31, ((uint64_t)1 << 32) - 8, (uint64_t)1 << 32, first_bytes - 8};
    struct process owner = process_start("work", form), reader = process_start("work", form);
    assert_int_equal(ask(&owner, "own", first_bytes, 0), 0);
    int fd = export_from(&owner, false);
    for (size_t i = 0; i < sizeof(places) / sizeof(*places); i++)
        assert_int_equal(ask(&owner, "write word", seed + i, places[i]), 0);
    assert_int_equal(pass(&reader, "map", fd, first_bytes, 8 * MIB), 0);
    for (size_t i = 0; i < sizeof(places) / sizeof(*places); i++)
        assert_int_equal(ask(&reader, "read word", 0, places[i]), seed + i);
    assert_int_equal(ask(&reader, "read word", 0, 8), 0); /* not where a short offset would have put it */
    close(fd);
    struct process other = process_start("work", form);
    assert_int_equal(ask(&other, "own", second_bytes, 0), 0);
    assert_int_equal(ask(&other, "fill", seed, 0), 0);
    fd = export_from(&other, false);
    assert_int_equal(pass(&reader, "map", fd, second_bytes, 8 * MIB + first_bytes), 0);
    assert_true(ask(&reader, "holds", seed, 0));
    close(fd);
    process_end(&reader);
    process_end(&other);
    process_end(&owner);
}

static void a_device_has_one_name_in_all_processes(void **state) {
    (void)state;
    int fd;
    struct process owner = start_owner(CHUNK_BYTES, &fd);
    struct process_message id = process_ask(&owner, (struct process_message){.word = "id", .fd = -1});
    char visible[128];
    (void)snprintf(visible, sizeof(visible), "CUDA_VISIBLE_DEVICES=%s", id.word);
    const char *of_form = form;
    form = rig_on_gpu() ? visible : of_form; /* its number there is another one where there are several */
    struct process reader = start_reader(fd);
    form = of_form;
    struct process_message same = process_ask(&reader, (struct process_message){.word = "id", .fd = -1});
    assert_string_equal(id.word, same.word);
    assert_true(ask(&reader, "holds", seed, 0));
    process_end(&reader);
    process_end(&owner);
    close(fd);
}

static int open_random(void **state) {
    (void)state;
    random_state = kernel_random_open();
    return 0;
}

#define WITH_VMM(test) cmocka_unit_test_setup(test, open_vmm)
#define WITH_IPC(test)                                                                                                 \
    { #test "[ipc]", test, open_ipc, NULL, NULL }

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "work") == 0)
        return work();
    const struct CMUnitTest descriptors[] = {
        cmocka_unit_test(the_self_test_passes),
        cmocka_unit_test(memory_of_the_rig_is_poison),
        WITH_VMM(another_process_reads_what_the_owner_writes),
        WITH_VMM(a_writer_writes_for_all),
        WITH_VMM(neighbours_are_mapped_by_one_call),
        WITH_VMM(memory_outlives_its_killed_owner_in_a_reader),
        WITH_VMM(memory_outlives_its_killed_owner_in_a_descriptor),
        WITH_VMM(a_writer_killed_with_a_kernel_running_leaves_the_memory),
        WITH_VMM(a_device_has_one_name_in_all_processes),
        WITH_VMM(a_write_through_a_reading_mapping_harms_its_process_only),
    };
    const struct CMUnitTest handles[] = {
        WITH_IPC(another_process_reads_what_the_owner_writes),
        WITH_IPC(a_writer_writes_for_all),
        WITH_IPC(neighbours_are_mapped_by_one_call),
        WITH_IPC(a_reader_by_handle_can_write),
        WITH_IPC(a_handle_dies_with_its_owner),
    };
    const struct CMUnitTest handle_of_a_survivor[] = {
        WITH_IPC(a_writer_killed_with_a_kernel_running_leaves_the_memory),
    };
    const struct CMUnitTest large[] = {WITH_VMM(offsets_go_beyond_32_bits)};
    const struct CMUnitTest large_handles[] = {WITH_IPC(offsets_go_beyond_32_bits)};
    int failed = cmocka_run_group_tests(descriptors, open_random, NULL);
    if (!rig_small())
        failed += cmocka_run_group_tests(large, open_random, NULL);
    if (rig_on_gpu()) /* the host has one form */
        failed += cmocka_run_group_tests(handles, open_random, NULL);
    if (rig_on_gpu() && !others_fall_too())
        failed += cmocka_run_group_tests(handle_of_a_survivor, open_random, NULL);
    if (rig_on_gpu() && !rig_small())
        failed += cmocka_run_group_tests(large_handles, open_random, NULL);
    return failed;
}
