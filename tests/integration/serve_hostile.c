/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Records that no client should send, in every state of a connection: the connection ends, its descriptors are closed,
 * one line is logged, and the client beside it does not notice.
 */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tests/support/cmocka_order.h"
#include "tests/support/daemon.h"
#include "tests/support/peer.h"

#define PATIENCE_MS 30000U

struct fixture {
    struct test_daemon *daemon;
    time_t started;
    int bystander;
    unsigned baseline; /* descriptors of the daemon with only the bystander connected */
};

enum stage { NEW, READY };

static int connect_at(const struct fixture *fixture, enum stage stage) {
    int fd =
        stage == NEW ? peer_connect(fixture->daemon->socket) : peer_connect_greeted(fixture->daemon->socket, "hostile");
    assert_true(fd >= 0);
    return fd;
}

/* The daemon ends the connection without a reply, and serves on. */
static void expect_end(const struct fixture *fixture, int fd) {
    struct peer_record record;
    assert_false(peer_receive(fd, &record));
    close(fd);
    assert_true(peer_ping(fixture->bystander));
}

static void expect_error_then_end(const struct fixture *fixture, int fd, uint64_t id, int error) {
    struct peer_record record;
    assert_true(peer_receive(fd, &record));
    assert_int_equal(record.kind, OSCAR_RECORD_REPLY);
    assert_int_equal(record.reply.id, id);
    assert_int_equal(record.reply.error, error);
    assert_true(strlen(record.reply.cause) > 0);
    expect_end(fixture, fd);
}

static void records_of_any_size_that_are_none(void **state) {
    const struct fixture *fixture = *state;
    static uint8_t bytes[100000];
    static const size_t sizes[] = {1, 4, 15, 16, 17, 1000, 65535, 65536, 65537, 100000};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        for (enum stage stage = NEW; stage <= READY; stage++) {
            int fd = connect_at(fixture, stage);
            memset(bytes, (int)i * 37, sizeof(bytes));
            assert_true(peer_send_raw(fd, bytes, sizes[i], NULL, 0));
            expect_end(fixture, fd);
        }
    }
}

/* A good record with one thing wrong in its header, or cut, or with more behind it than it says. */
static void headers_that_lie(void **state) {
    const struct fixture *fixture = *state;
    struct oscar_request request = {.id = 5, .verb = OSCAR_PING};
    uint8_t record[OSCAR_RECORD_HEADER_BYTES + 64];
    size_t payload_bytes;
    assert_int_equal(oscar_request_encode(&request, record + OSCAR_RECORD_HEADER_BYTES, 64, &payload_bytes), 0);
    size_t size = OSCAR_RECORD_HEADER_BYTES + payload_bytes;
    for (size_t byte = 0; byte < OSCAR_RECORD_HEADER_BYTES; byte++) {
        int fd = connect_at(fixture, READY);
        oscar_record_header(record, OSCAR_RECORD_REQUEST, 0, (uint32_t)payload_bytes);
        record[byte] ^= 0x41;
        assert_true(peer_send_raw(fd, record, size, NULL, 0));
        expect_end(fixture, fd);
    }
    oscar_record_header(record, OSCAR_RECORD_REQUEST, 0, (uint32_t)payload_bytes);
    static const int differences[] = {-1, 1};
    for (unsigned i = 0; i < 2; i++) {
        int fd = connect_at(fixture, READY);
        assert_true(peer_send_raw(fd, record, size + (size_t)differences[i], NULL, 0));
        expect_end(fixture, fd);
    }
}

static void replies_and_notices_are_not_a_clients_to_send(void **state) {
    const struct fixture *fixture = *state;
    for (enum stage stage = NEW; stage <= READY; stage++) {
        for (enum oscar_record_kind kind = OSCAR_RECORD_REPLY; kind <= OSCAR_RECORD_NOTICE; kind++) {
            int fd = connect_at(fixture, stage);
            assert_true(peer_send(fd, kind, "", 0, NULL, 0));
            expect_end(fixture, fd);
        }
    }
}

static void payloads_that_are_no_request(void **state) {
    const struct fixture *fixture = *state;
    uint32_t seed = (uint32_t)time(NULL);
    print_message("seed %u\n", seed);
    srand(seed);
    for (unsigned i = 0; i < 40; i++) {
        int fd = connect_at(fixture, i % 2 == 0 ? NEW : READY);
        uint8_t payload[200];
        size_t size = i == 0 ? 0 : (size_t)(rand() % (int)sizeof(payload));
        for (size_t k = 0; k < size; k++)
            payload[k] = (uint8_t)rand();
        payload[0] = 0xff; /* no field has this tag */
        assert_true(peer_send(fd, OSCAR_RECORD_REQUEST, payload, size, NULL, 0));
        expect_end(fixture, fd);
    }
}

static void a_request_without_an_id(void **state) {
    const struct fixture *fixture = *state;
    for (enum stage stage = NEW; stage <= READY; stage++) {
        int fd = connect_at(fixture, stage);
        struct oscar_request request = {.id = 0, .verb = OSCAR_PING};
        assert_true(peer_send_request(fd, &request));
        expect_end(fixture, fd);
    }
}

static void every_verb_before_hello_and_hello_twice(void **state) {
    const struct fixture *fixture = *state;
    for (unsigned verb = OSCAR_MODEL_OPEN; verb < OSCAR_VERBS; verb++) {
        int fd = connect_at(fixture, NEW);
        struct oscar_request request = {.id = verb, .verb = (enum oscar_verb)verb};
        assert_true(peer_send_request(fd, &request));
        expect_error_then_end(fixture, fd, verb, OSCAR_ERR_STATE);
    }
    int fd = connect_at(fixture, READY);
    struct oscar_request request = peer_hello_request(9, "twice");
    assert_true(peer_send_request(fd, &request));
    expect_error_then_end(fixture, fd, 9, OSCAR_ERR_STATE);
}

static void handles_that_are_none_are_answered_and_the_connection_goes_on(void **state) {
    const struct fixture *fixture = *state;
    int fd = connect_at(fixture, READY);
    static const uint64_t handles[] = {0, 1, UINT64_C(1) << 32, UINT64_MAX};
    for (unsigned verb = OSCAR_MODEL_CLOSE; verb <= OSCAR_SEQ_CLOSE; verb++) {
        for (unsigned i = 0; i < 4; i++) {
            struct oscar_request request = {.id = 100 + i, .verb = (enum oscar_verb)verb};
            request.model_close.model = handles[i]; /* the first field of each of these bodies */
            struct oscar_reply reply;
            assert_true(peer_call(fd, &request, &reply));
            assert_true(reply.error < 0);
            assert_true(strlen(reply.cause) > 0);
        }
    }
    assert_true(peer_ping(fd));
    close(fd);
}

static void wait_for_descriptors(const struct test_daemon *daemon, unsigned baseline) {
    for (unsigned i = 0; i < PATIENCE_MS && daemon_descriptors(daemon) > baseline; i++)
        poll(NULL, 0, 1);
    assert_true(daemon_descriptors(daemon) <= baseline);
}

static void descriptors_nobody_asked_for_are_closed(void **state) {
    const struct fixture *fixture = *state;
    int fds[253];
    for (unsigned i = 0; i < 253; i++)
        fds[i] = STDIN_FILENO;
    static const unsigned counts[] = {1, 3, 200, 253};
    struct oscar_request ping = {.id = 5, .verb = OSCAR_PING};
    uint8_t payload[64], zeros[32] = {0};
    size_t size;
    assert_int_equal(oscar_request_encode(&ping, payload, sizeof(payload), &size), 0);
    for (unsigned i = 0; i < 4; i++) {
        for (enum stage stage = NEW; stage <= READY; stage++) {
            /* In a record that counts them, in one that does not, in garbage, and in a record of size 0. */
            int fd = connect_at(fixture, stage);
            if (counts[i] <= OSCAR_MAX_RECORD_FDS)
                assert_true(peer_send(fd, OSCAR_RECORD_REQUEST, payload, size, fds, counts[i]));
            else
                assert_true(peer_send_raw(fd, payload, size, fds, counts[i]));
            expect_end(fixture, fd);
            fd = connect_at(fixture, stage);
            assert_true(peer_send_raw(fd, zeros, sizeof(zeros), fds, counts[i]));
            expect_end(fixture, fd);
            fd = connect_at(fixture, stage);
            assert_true(peer_send_raw(fd, zeros, 0, fds, counts[i]));
            expect_end(fixture, fd);
        }
    }
    wait_for_descriptors(fixture->daemon, fixture->baseline);
}

static void a_flood_of_violations_does_not_flood_the_log(void **state) {
    const struct fixture *fixture = *state;
    for (unsigned i = 0; i < 100; i++) {
        int fd = connect_at(fixture, NEW);
        assert_true(peer_send_raw(fd, "x", 1, NULL, 0));
        expect_end(fixture, fd);
    }
    unsigned lines = daemon_log_count(fixture->daemon, "client broke the protocol");
    unsigned spans = (unsigned)(time(NULL) - fixture->started) / 10 + 2; /* of ten seconds, begun ones among them */
    assert_in_range(lines, 1, spans * 10);                               /* whatever the tests before did */
}

static void who_does_not_read_is_cut_off_and_nobody_else(void **state) {
    const struct fixture *fixture = *state;
    int fd = connect_at(fixture, READY);
    struct oscar_request ping = {.id = 1, .verb = OSCAR_PING};
    unsigned sent = 0;
    while (sent < 100000 && peer_send_request(fd, &ping)) {
        ping.id++;
        sent++;
    }
    assert_true(sent < 100000);
    close(fd);
    assert_true(peer_ping(fixture->bystander));
    daemon_log_wait(fixture->daemon, "queue is full");
}

static int start(void **state) {
    static struct fixture fixture;
    fixture.started = time(NULL);
    fixture.daemon = daemon_start(NULL);
    fixture.bystander = peer_connect_greeted(fixture.daemon->socket, "bystander");
    fixture.baseline = daemon_descriptors(fixture.daemon);
    *state = &fixture;
    return fixture.bystander < 0;
}

static int stop(void **state) {
    struct fixture *fixture = *state;
    close(fixture->bystander);
    daemon_stop(fixture->daemon);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(records_of_any_size_that_are_none),
        cmocka_unit_test(headers_that_lie),
        cmocka_unit_test(replies_and_notices_are_not_a_clients_to_send),
        cmocka_unit_test(payloads_that_are_no_request),
        cmocka_unit_test(a_request_without_an_id),
        cmocka_unit_test(every_verb_before_hello_and_hello_twice),
        cmocka_unit_test(handles_that_are_none_are_answered_and_the_connection_goes_on),
        cmocka_unit_test(descriptors_nobody_asked_for_are_closed),
        cmocka_unit_test(a_flood_of_violations_does_not_flood_the_log),
        cmocka_unit_test(who_does_not_read_is_cut_off_and_nobody_else),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
