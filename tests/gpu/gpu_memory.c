/* SPDX-License-Identifier: Apache-2.0 */
/* Chunks and ranges across processes: who reads what, who may write, and what outlives whom. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/gpu/process.h"
#include "tests/gpu/rig.h"

/* --- a process with a device of its own --------------------------------------------------------------------------------------- */

/* It owns chunk 0, maps what it is sent into a range, and answers questions about the bytes. */
static struct {
    struct rig *rig;
    struct oscar_chunk *chunk;
    struct oscar_range *range;
    uint64_t bytes; /* of the chunk, or of what is mapped */
    uint8_t *memory;
} worker;

#define RANGE_BYTES ((uint64_t)1 << 30)

static uint64_t word_at(uint64_t seed, uint64_t i) {
    uint64_t z = (seed ^ (i * UINT64_C(0x9E3779B97F4A7C15))) * UINT64_C(0xBF58476D1CE4E5B9);
    return z ^ (z >> 31);
}

static void fill(struct rig *rig, uint8_t *memory, uint64_t bytes, uint64_t seed) {
    uint64_t *words = malloc(bytes);
    if (!words)
        process_give_up("no memory");
    for (uint64_t i = 0; i < bytes / 8; i++)
        words[i] = word_at(seed, i);
    rig_write(rig, memory, words, bytes);
    free(words);
}

/* Whether the memory holds what fill wrote. */
static bool holds(struct rig *rig, const uint8_t *memory, uint64_t bytes, uint64_t seed) {
    uint64_t *words = malloc(bytes);
    if (!words)
        process_give_up("no memory");
    memset(words, 0, bytes);
    rig_read(rig, words, memory, bytes);
    uint64_t same = 0;
    while (same < bytes / 8 && words[same] == word_at(seed, same))
        same++;
    free(words);
    return same == bytes / 8;
}

static struct process_message answer(const char *word, int64_t value) {
    struct process_message message = {.value = (uint64_t)value, .fd = -1};
    (void)snprintf(message.word, sizeof(message.word), "%s", word);
    return message;
}

/* "own": a chunk of `value` bytes, filled from the seed `more`; its descriptor comes back. */
static struct process_message own(const struct process_message *message) {
    struct oscar_cause cause = {""};
    struct process_message made = answer("own", 0);
    int r = worker.rig->ops->chunk_create(worker.rig->device, message->value, &worker.chunk, &cause);
    if (r == 0)
        r = worker.rig->ops->chunk_export(worker.chunk, false, &made.fd, &cause);
    if (r < 0)
        process_give_up("chunk: %s", cause.text);
    worker.bytes = message->value;
    worker.memory = worker.rig->ops->chunk_address(worker.chunk);
    fill(worker.rig, worker.memory, worker.bytes, message->more);
    return made;
}

static struct process_message export_writable(void) {
    struct process_message made = answer("exported", 0);
    if (worker.rig->ops->chunk_export(worker.chunk, true, &made.fd, NULL) < 0)
        process_give_up("no descriptor for writing");
    return made;
}

/* "map" and "map writable": maps the descriptor, `value` bytes at offset `more` of the range. */
static struct process_message map(const struct process_message *message, bool writable) {
    const struct oscar_device_ops *ops = worker.rig->ops;
    struct oscar_cause cause = {""};
    if (!worker.range && ops->range_reserve(worker.rig->device, RANGE_BYTES, &worker.range, &cause) < 0)
        process_give_up("range: %s", cause.text);
    int r = ops->range_map(worker.range, message->more, message->value, message->fd, writable, &cause);
    if (r < 0) {
        print_message("range_map: %s\n", cause.text);
        return answer("map", r);
    }
    worker.bytes = message->value;
    worker.memory = ops->range_locate(worker.range, message->more);
    return answer("map", 0);
}

static struct process_message serve(const struct process_message *message) {
    const char *word = message->word;
    if (strcmp(word, "own") == 0)
        return own(message);
    if (strcmp(word, "map") == 0 || strcmp(word, "map writable") == 0)
        return map(message, strcmp(word, "map writable") == 0);
    if (strcmp(word, "export writable") == 0)
        return export_writable();
    if (strcmp(word, "holds") == 0) /* the words of the seed `more`? */
        return answer("holds", holds(worker.rig, worker.memory, worker.bytes, message->more));
    if (strcmp(word, "fill") == 0) {
        fill(worker.rig, worker.memory, worker.bytes, message->more);
        return answer("filled", 0);
    }
    if (strcmp(word, "try to write") == 0) { /* ends the process on the host */
        uint64_t *word_written = rig_alloc(worker.rig, sizeof(*word_written));
        int r = worker.rig->ops->copy(worker.rig->synchronous, worker.memory, word_written, sizeof(*word_written));
        print_message("a write where reading is allowed: %d\n", r);
        return answer("wrote", r);
    }
    process_give_up("\"%s\" is no question", word);
}

static int work(void) {
    worker.rig = rig_open();
    int status = process_serve(serve);
    worker.rig->ops->range_free(worker.range);
    worker.rig->ops->chunk_free(worker.chunk);
    rig_close(worker.rig);
    return status;
}

/* --- the parent's view of it ---------------------------------------------------------------------------------------------------- */

#define CHUNK_BYTES ((uint64_t)4 << 20)

static uint64_t ask(const struct process *process, const char *word, uint64_t value, uint64_t more) {
    struct process_message message = {.value = value, .more = more, .fd = -1};
    (void)snprintf(message.word, sizeof(message.word), "%s", word);
    return process_ask(process, message).value;
}

static int ask_to_map(const struct process *process, int fd, uint64_t bytes, uint64_t offset, bool writable) {
    struct process_message message = {.value = bytes, .more = offset, .fd = fd};
    (void)snprintf(message.word, sizeof(message.word), "%s", writable ? "map writable" : "map");
    return (int)(int64_t)process_ask(process, message).value;
}

/* An owner with a chunk, whose descriptor the test holds. */
static struct process start_owner(uint64_t bytes, uint64_t seed, int *ret_fd) {
    struct process owner = process_start("work", NULL);
    struct process_message made =
        process_ask(&owner, (struct process_message){.word = "own", .value = bytes, .more = seed, .fd = -1});
    assert_true(made.fd >= 0);
    *ret_fd = made.fd;
    return owner;
}

static struct process start_reader(int fd, uint64_t bytes, bool writable) {
    struct process reader = process_start("work", NULL);
    assert_int_equal(ask_to_map(&reader, fd, bytes, 0, writable), 0);
    return reader;
}

static struct kernel_random random_state;

static int open_random(void **state) {
    (void)state;
    random_state = kernel_random_open();
    return 0;
}

static void another_process_reads_what_the_owner_writes(void **state) {
    (void)state;
    uint64_t seed = kernel_random_next(&random_state);
    int fd;
    struct process owner = start_owner(CHUNK_BYTES, seed, &fd);
    struct process reader = start_reader(fd, CHUNK_BYTES, false);
    assert_true(ask(&reader, "holds", 0, seed));
    assert_false(ask(&reader, "holds", 0, seed + 1));
    ask(&owner, "fill", 0, seed + 1);
    assert_true(ask(&reader, "holds", 0, seed + 1));
    process_end(&reader);
    process_end(&owner);
    close(fd);
}

static void a_writable_mapping_writes_for_all(void **state) {
    (void)state;
    uint64_t seed = kernel_random_next(&random_state);
    int fd;
    struct process owner = start_owner(CHUNK_BYTES, seed, &fd);
    close(fd);
    /* A reader's descriptor is not one for writing on the host. */
    fd = (int)process_ask(&owner, (struct process_message){.word = "export writable", .fd = -1}).fd;
    struct process writer = start_reader(fd, CHUNK_BYTES, true);
    ask(&writer, "fill", 0, seed + 1);
    assert_true(ask(&owner, "holds", 0, seed + 1));
    process_end(&writer);
    process_end(&owner);
    close(fd);
}

static void a_write_through_a_reading_mapping_harms_its_process_only(void **state) {
    (void)state;
    uint64_t seed = kernel_random_next(&random_state);
    int fd;
    struct process owner = start_owner(CHUNK_BYTES, seed, &fd);
    struct process reader = start_reader(fd, CHUNK_BYTES, false);
    struct process writer = start_reader(fd, CHUNK_BYTES, false);
    process_send(&writer, (struct process_message){.word = "try to write", .fd = -1});
    assert_true(rig_on_gpu() || process_died(&writer));
    if (rig_on_gpu())
        assert_true((int64_t)process_receive(&writer).value < 0);
    assert_true(ask(&owner, "holds", 0, seed));
    assert_true(ask(&reader, "holds", 0, seed));
    process_kill(&writer);
    process_end(&reader);
    process_end(&owner);
    close(fd);
}

static void memory_outlives_its_killed_owner_in_a_reader(void **state) {
    (void)state;
    uint64_t seed = kernel_random_next(&random_state);
    int fd;
    struct process owner = start_owner(CHUNK_BYTES, seed, &fd);
    struct process reader = start_reader(fd, CHUNK_BYTES, false);
    close(fd);
    process_kill(&owner);
    assert_true(ask(&reader, "holds", 0, seed));
    process_end(&reader);
}

static void memory_outlives_its_killed_owner_in_a_descriptor(void **state) {
    (void)state;
    uint64_t seed = kernel_random_next(&random_state);
    int fd;
    struct process owner = start_owner(CHUNK_BYTES, seed, &fd);
    process_kill(&owner);
    struct process reader = start_reader(fd, CHUNK_BYTES, false);
    assert_true(ask(&reader, "holds", 0, seed));
    process_end(&reader);
    close(fd);
}

static void the_self_test_passes(void **state) {
    (void)state;
    struct rig *rig = rig_open();
    struct oscar_cause cause = {""};
    if (rig->ops->self_test(rig->device, &cause) < 0)
        fail_msg("%s", cause.text);
    rig_close(rig);
}

static void rig_memory_is_poison(void **state) {
    (void)state;
    struct rig *rig = rig_open();
    size_t bytes = ((size_t)3 << 20) + 40;
    uint8_t *memory = rig_alloc(rig, bytes);
    uint8_t *read = calloc(1, bytes);
    assert_non_null(read);
    rig_read(rig, read, memory, bytes);
    for (size_t i = 0; i < bytes; i++)
        assert_int_equal(read[i], 0xFF);
    free(read);
    rig_close(rig);
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "work") == 0)
        return work();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_self_test_passes),
        cmocka_unit_test(rig_memory_is_poison),
        cmocka_unit_test(another_process_reads_what_the_owner_writes),
        cmocka_unit_test(a_writable_mapping_writes_for_all),
        cmocka_unit_test(a_write_through_a_reading_mapping_harms_its_process_only),
        cmocka_unit_test(memory_outlives_its_killed_owner_in_a_reader),
        cmocka_unit_test(memory_outlives_its_killed_owner_in_a_descriptor),
    };
    return cmocka_run_group_tests(tests, open_random, NULL);
}
