/* SPDX-License-Identifier: Apache-2.0 */
/* Models and sequences over the raw protocol: calibrations, chunks before the replies that need them, parked answers.
 * */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/geometry.h"
#include "proto/window.h"
#include "tests/support/calibration_file.h"
#include "tests/support/cmocka_order.h"
#include "tests/support/raw_worker.h"

static void a_model_opens_with_the_built_in_calibration(void **state) {
    struct raw_worker worker;
    raw_worker_open(*state, &worker);
    struct oscar_request request = raw_worker_model_request("default");
    struct peer_record record;
    raw_worker_call(&worker, &request, &record);
    assert_int_equal(record.reply.error, 0);
    assert_int_equal(record.fds, 0);
    assert_int_equal(record.reply.model_open.calibration_bytes, 0);
    assert_int_equal(record.reply.model_open.arenas[OSCAR_FORM_PACKED].page_bytes,
                     oscar_packed_page_bytes(&request.model_open.identity.geometry));
    uint64_t model = record.reply.model_open.model;
    struct oscar_digest digest = record.reply.model_open.model_digest;
    assert_true(model != 0);
    /* The same identity is the same model; an empty name is the same calibration; another revision is another model. */
    request = raw_worker_model_request("");
    raw_worker_call(&worker, &request, &record);
    assert_int_equal(record.reply.error, 0);
    assert_int_equal(record.reply.model_open.model, model);
    assert_memory_equal(&record.reply.model_open.model_digest, &digest, sizeof(digest));
    snprintf(request.model_open.identity.revision, OSCAR_NAME_BYTES, "other");
    raw_worker_call(&worker, &request, &record);
    assert_int_equal(record.reply.error, 0);
    assert_int_not_equal(record.reply.model_open.model, model);
    raw_worker_close(&worker);
}

static void what_is_wrong_with_a_model_is_named(void **state) {
    struct raw_worker worker;
    raw_worker_open(*state, &worker);
    static const struct {
        const char *calibration;
        int error;
        const char *text;
    } names[] = {{"../etc/passwd", OSCAR_ERR_CALIBRATION, "without a path"},
                 {".hidden", OSCAR_ERR_CALIBRATION, "without a path"},
                 {"/etc/passwd", OSCAR_ERR_CALIBRATION, "without a path"},
                 {"no-such-file", OSCAR_ERR_NOT_FOUND, "no-such-file"},
                 {"00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff", OSCAR_ERR_NOT_FOUND, "digest"}};
    struct peer_record record;
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        struct oscar_request request = raw_worker_model_request(names[i].calibration);
        raw_worker_call(&worker, &request, &record);
        assert_int_equal(record.reply.error, names[i].error);
        assert_non_null(strstr(record.reply.cause, names[i].text));
    }
    struct oscar_request request = raw_worker_model_request("default");
    request.model_open.identity.geometry.head_dim = 96;
    raw_worker_call(&worker, &request, &record);
    assert_int_equal(record.reply.error, OSCAR_ERR_GEOMETRY);
    request = raw_worker_model_request("default");
    request.model_open.identity.revision[0] = '\0';
    raw_worker_call(&worker, &request, &record);
    assert_int_equal(record.reply.error, OSCAR_ERR_IDENTITY);
    assert_true(peer_ping(worker.fd));
    raw_worker_close(&worker);
}

static void a_calibration_file_is_shared_read_only(void **state) {
    (void)state;
    char directory[] = "/tmp/oscard-test-XXXXXX", path[64], hex[2 * OSCAR_DIGEST_BYTES + 1];
    assert_non_null(mkdtemp(directory));
    snprintf(path, sizeof(path), "%s/small.safetensors", directory);
    struct oscar_digest digest = calibration_file_write(path, 0);
    oscar_digest_hex(&digest, hex);
    const char *const args[] = {"--calibration-directory", directory, NULL};
    struct test_daemon *daemon = daemon_start(args);
    const char *const names[] = {"small", "small.safetensors", hex};
    ino_t inode = 0;
    uint64_t model = 0;
    for (unsigned i = 0; i < 3; i++) {
        struct raw_worker worker;
        raw_worker_open(daemon, &worker);
        struct oscar_request request = raw_worker_model_request(names[i]);
        struct peer_record record;
        struct stat status[2];
        raw_worker_call(&worker, &request, &record);
        if (record.reply.error != 0)
            fail_msg("%s", record.reply.cause);
        assert_memory_equal(&record.reply.model_open.calibration_digest, &digest, sizeof(digest));
        assert_int_equal(record.fds, 2);
        const uint64_t bytes[] = {record.reply.model_open.calibration_bytes, record.reply.model_open.turns_bytes};
        for (unsigned k = 0; k < 2; k++) {
            assert_int_equal(fstat(record.fd[k], &status[k]), 0);
            assert_int_equal(status[k].st_size, bytes[k]);
            assert_true(fcntl(record.fd[k], F_GET_SEALS) & F_SEAL_WRITE);
        }
        assert_int_equal(record.reply.model_open.turns_pages, 1048576 / 64);
        if (i > 0) {
            assert_int_equal(status[0].st_ino, inode); /* one copy for all */
            assert_int_equal(record.reply.model_open.model, model);
        }
        inode = status[0].st_ino;
        model = record.reply.model_open.model;
        peer_close_fds(&record);
        raw_worker_close(&worker);
    }
    daemon_stop(daemon);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(rmdir(directory), 0);
}

static void a_budget_too_small_for_a_page_is_said_with_the_size_that_is_needed(void **state) {
    (void)state;
    static const char *const args[] = {"--budget", "1M", "--memory-chunk", "1M", NULL};
    struct test_daemon *daemon = daemon_start(args);
    struct raw_worker worker;
    raw_worker_open(daemon, &worker);
    struct oscar_request request = raw_worker_model_request("default");
    request.model_open.identity.geometry.layers = 64;
    request.model_open.identity.geometry.kv_heads = 8;
    request.model_open.identity.geometry.query_heads = 8;
    struct peer_record record;
    raw_worker_call(&worker, &request, &record);
    assert_int_equal(record.reply.error, OSCAR_ERR_NO_SPACE);
    assert_non_null(strstr(record.reply.cause, "budget"));
    assert_non_null(strstr(record.reply.cause, "1048576")); /* what there is */
    assert_non_null(strstr(record.reply.cause, "8388608")); /* what a chunk of one page needs: 64 x 8 records */
    raw_worker_close(&worker);
    daemon_stop(daemon);
}

static uint64_t chunk_bytes(const struct peer_record *record, enum oscar_form form) {
    const struct oscar_arena_info *arena = &record->reply.model_open.arenas[form];
    return arena->page_bytes * arena->chunk_pages;
}

/* Or a little less, where pages would not fill it without padding. */
static void a_chunk_has_what_it_aims_at(void **state) {
    (void)state;
    const struct {
        const char *chunk;
        uint64_t mib;
    } cases[] = {{"", 64}, {"1M", 12}, {"8G", 192}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const char *const args[] = {"--budget", "12G", "--memory-chunk", cases[i].chunk, NULL};
        struct test_daemon *daemon = daemon_start(args);
        struct raw_worker worker;
        raw_worker_open(daemon, &worker);
        struct oscar_request request = raw_worker_model_request("default");
        struct peer_record record;
        raw_worker_call(&worker, &request, &record);
        assert_int_equal(record.reply.error, 0);
        for (enum oscar_form form = OSCAR_FORM_SINK; form <= OSCAR_FORM_PACKED; form++) {
            uint64_t aim = cases[i].mib << 20;
            assert_in_range(chunk_bytes(&record, form), aim * 3 / 4, aim);
        }
        peer_close_fds(&record);
        raw_worker_close(&worker);
        daemon_stop(daemon);
    }
}

static void what_one_worker_seals_another_finds(void **state) {
    struct raw_worker writer, reader;
    raw_worker_open(*state, &writer);
    raw_worker_open(*state, &reader);
    uint64_t model = raw_worker_open_model(&writer, "default");
    (void)raw_worker_fill(&writer, model, 1000);
    uint64_t same = raw_worker_open_model(&reader, "default");
    assert_int_equal(same, model);
    raw_worker_put_tokens(&reader, 1000, RAW_WORKER_PAGES * 64 + 1);
    struct peer_record record;
    struct oscar_request probe = {.verb = OSCAR_PROBE, .probe = {.model = model, .tokens = RAW_WORKER_PAGES * 64 + 1}};
    raw_worker_call(&reader, &probe, &record);
    assert_int_equal(record.reply.error, 0);
    assert_int_equal(record.reply.probe.hit_tokens, RAW_WORKER_PAGES * 64);
    struct oscar_request open = {.verb = OSCAR_SEQ_OPEN,
                                 .seq_open = {.model = model, .tokens = RAW_WORKER_PAGES * 64 + 1}};
    raw_worker_call(&reader, &open, &record);
    assert_int_equal(record.reply.error, 0);
    assert_int_equal(record.reply.seq_open.hit_tokens, RAW_WORKER_PAGES * 64);
    assert_int_equal(record.reply.seq_open.updates, RAW_WORKER_PAGES);
    assert_true(reader.chunks > 0);
    assert_int_equal(reader.writable, 0);
    raw_worker_close(&writer);
    assert_true(peer_ping(reader.fd));
    raw_worker_close(&reader);
}

static void a_wait_is_answered_when_its_time_is_over_and_others_are_served_meanwhile(void **state) {
    struct raw_worker writer, waiter;
    raw_worker_open(*state, &writer);
    raw_worker_open(*state, &waiter);
    uint64_t model = raw_worker_open_model(&writer, "default");
    assert_int_equal(raw_worker_open_model(&waiter, "default"), model);
    struct peer_record record;
    struct oscar_request open = {.verb = OSCAR_SEQ_OPEN, .seq_open = {.model = model, .tokens = 300}};
    raw_worker_put_tokens(&writer, 50000, 300);
    raw_worker_call(&writer, &open, &record);
    assert_int_equal(record.reply.error, 0);
    raw_worker_put_tokens(&waiter, 50000, 300);
    raw_worker_call(&waiter, &open, &record);
    assert_int_equal(record.reply.error, 0);
    assert_true(record.reply.seq_open.in_flight_tokens > 0);
    struct oscar_request wait = {
        .id = 77, .verb = OSCAR_SEQ_WAIT, .seq_wait = {.seq = record.reply.seq_open.seq, .timeout_ms = 100}};
    assert_true(peer_send_request(waiter.fd, &wait));
    assert_true(peer_receive(waiter.fd, &record));
    assert_int_equal(record.reply.id, 77);
    assert_int_equal(record.reply.verb, OSCAR_SEQ_WAIT);
    assert_int_equal(record.reply.error, OSCAR_ERR_TIMEOUT);
    wait.id = 78;
    wait.seq_wait.timeout_ms = 60000;
    assert_true(peer_send_request(waiter.fd, &wait));
    struct oscar_request ping = {.id = 79, .verb = OSCAR_PING};
    assert_true(peer_send_request(waiter.fd, &ping));
    assert_true(peer_receive(waiter.fd, &record));
    assert_int_equal(record.reply.id, 79);
    assert_true(peer_ping(writer.fd));
    /* Who stops computing lets the others know. */
    raw_worker_close(&writer);
    assert_true(peer_receive(waiter.fd, &record));
    assert_int_equal(record.reply.id, 78);
    raw_worker_close(&waiter);
}

static void who_waits_with_too_many_requests_is_told(void **state) {
    struct raw_worker worker;
    raw_worker_open(*state, &worker);
    struct oscar_request request = raw_worker_model_request("default");
    unsigned answered = 0, refused = 0;
    for (unsigned i = 0; i < 40; i++) {
        request.id = 100 + i;
        assert_true(peer_send_request(worker.fd, &request));
    }
    while (answered + refused < 40) {
        struct peer_record record;
        assert_true(peer_receive(worker.fd, &record));
        peer_close_fds(&record);
        if (record.kind != OSCAR_RECORD_REPLY)
            continue;
        assert_true(record.reply.error == 0 || record.reply.error == OSCAR_ERR_LIMIT);
        answered += record.reply.error == 0;
        refused += record.reply.error != 0;
    }
    assert_true(answered >= 32);
    raw_worker_close(&worker);
}

/* What an ended connection's process may still touch is kept until it exits: a process that does it on and on is stopped. */
static void a_process_that_ends_connections_with_models_for_ever_is_refused(void **state) {
    const struct test_daemon *daemon = *state;
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        unsigned ended = 0;
        for (int error = 0; error == 0 && ended < 300; ended++) {
            struct oscar_request request = raw_worker_model_request("default");
            struct oscar_reply reply;
            int fd = peer_connect_greeted(daemon->socket, "for ever");
            request.id = 2;
            if (fd < 0 || !peer_call(fd, &request, &reply))
                _exit(1);
            error = reply.error;
            if (error != 0 && error != OSCAR_ERR_LIMIT)
                _exit(2);
            close(fd);
        }
        _exit(ended >= 256 && ended < 300 ? 0 : 3);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    struct raw_worker worker; /* its exit has ended it; others never noticed */
    raw_worker_open(daemon, &worker);
    (void)raw_worker_open_model(&worker, "default");
    raw_worker_close(&worker);
}

static void a_killed_daemons_successor_serves_the_same_request_again(void **state) {
    (void)state;
    struct test_daemon *daemon = daemon_start(NULL);
    for (unsigned i = 0; i < 2; i++) {
        struct raw_worker worker;
        raw_worker_open(daemon, &worker);
        (void)raw_worker_fill(&worker, raw_worker_open_model(&worker, "default"), 1);
        raw_worker_close(&worker);
        if (i == 0) {
            daemon_kill(daemon);
            daemon_start_again(daemon);
        }
    }
    daemon_stop(daemon);
}

static int start(void **state) {
    static const char *const args[] = {"--memory-chunk", "1M", NULL};
    *state = daemon_start(args);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_model_opens_with_the_built_in_calibration),
        cmocka_unit_test(what_is_wrong_with_a_model_is_named),
        cmocka_unit_test(a_calibration_file_is_shared_read_only),
        cmocka_unit_test(a_budget_too_small_for_a_page_is_said_with_the_size_that_is_needed),
        cmocka_unit_test(a_chunk_has_what_it_aims_at),
        cmocka_unit_test(what_one_worker_seals_another_finds),
        cmocka_unit_test(a_wait_is_answered_when_its_time_is_over_and_others_are_served_meanwhile),
        cmocka_unit_test(who_waits_with_too_many_requests_is_told),
        cmocka_unit_test(a_process_that_ends_connections_with_models_for_ever_is_refused),
        cmocka_unit_test(a_killed_daemons_successor_serves_the_same_request_again),
    };
    return cmocka_run_group_tests(tests, start, daemon_teardown);
}
