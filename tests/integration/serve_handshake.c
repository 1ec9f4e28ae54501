/* SPDX-License-Identifier: Apache-2.0 */
/* The first request: versions, what comes with the answer, and the limit of clients. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/version.h"
#include "proto/window.h"
#include "tests/support/cmocka_order.h"
#include "tests/support/daemon.h"
#include "tests/support/peer.h"

static void hello_is_answered_with_who_serves(void **state) {
    const struct test_daemon *daemon = *state;
    int fd = peer_connect(daemon->socket);
    assert_true(fd >= 0);
    struct oscar_request request = peer_hello_request(42, "handshake");
    struct peer_record record;
    assert_true(peer_send_request(fd, &request));
    assert_true(peer_receive(fd, &record));
    assert_int_equal(record.kind, OSCAR_RECORD_REPLY);
    assert_int_equal(record.reply.id, 42);
    assert_int_equal(record.reply.verb, OSCAR_HELLO);
    assert_int_equal(record.reply.error, 0);
    assert_int_equal(record.reply.hello.major, OSCAR_PROTOCOL_MAJOR);
    assert_int_equal(record.reply.hello.minor, OSCAR_PROTOCOL_MINOR);
    assert_true(record.reply.hello.incarnation > 0 && record.reply.hello.incarnation < UINT64_C(1) << 63);
    assert_true(record.reply.hello.session > 0);
    assert_string_equal(record.reply.hello.backend, "host");
    assert_string_equal(record.reply.hello.version, OSCAR_VERSION_STRING);
    char tenant[32];
    snprintf(tenant, sizeof(tenant), "uid-%u", getuid());
    assert_string_equal(record.reply.hello.tenant, tenant);
    assert_int_equal(record.fds, 2);
    peer_close_fds(&record);
    close(fd);
}

static void window_and_fences_are_sealed_shared_memory(void **state) {
    const struct test_daemon *daemon = *state;
    int fd = peer_connect(daemon->socket);
    struct oscar_request request = peer_hello_request(1, "window");
    struct peer_record record;
    assert_true(peer_send_request(fd, &request));
    assert_true(peer_receive(fd, &record));
    assert_int_equal(record.fds, 2);
    static const uint64_t sizes[] = {OSCAR_WINDOW_BYTES, OSCAR_FENCE_BYTES};
    for (unsigned i = 0; i < 2; i++) {
        struct stat status;
        assert_int_equal(fstat(record.fd[i], &status), 0);
        assert_int_equal(status.st_size, sizes[i]);
        assert_true(status.st_blocks * 512 <= 16384); /* sparse */
        assert_int_equal(fcntl(record.fd[i], F_GET_SEALS) & ~0x20 /* noexec */,
                         F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
        assert_int_equal(ftruncate(record.fd[i], 0), -1);
        void *memory = mmap(NULL, sizes[i], PROT_READ | PROT_WRITE, MAP_SHARED, record.fd[i], 0);
        assert_true(memory != MAP_FAILED);
        if (i == 0) {
            const struct oscar_window_header *header = memory;
            assert_int_equal(header->magic, OSCAR_WINDOW_MAGIC);
            assert_int_equal(header->version, OSCAR_WINDOW_VERSION);
        }
        ((volatile uint8_t *)memory)[sizes[i] - 1] = 1;
        assert_int_equal(munmap(memory, sizes[i]), 0);
    }
    assert_int_equal(record.reply.hello.window_bytes, sizes[0]);
    assert_int_equal(record.reply.hello.fence_bytes, sizes[1]);
    peer_close_fds(&record);
    assert_true(peer_ping(fd));
    close(fd);
}

static void a_newer_minor_is_served_with_ours(void **state) {
    const struct test_daemon *daemon = *state;
    int fd = peer_connect(daemon->socket);
    struct oscar_request request = peer_hello_request(1, "newer");
    request.hello.minor = OSCAR_PROTOCOL_MINOR + 7;
    request.hello.features = ~UINT64_C(0);
    struct oscar_reply reply;
    assert_true(peer_call(fd, &request, &reply));
    assert_int_equal(reply.error, 0);
    assert_int_equal(reply.hello.minor, OSCAR_PROTOCOL_MINOR);
    assert_int_equal(reply.hello.features, OSCAR_FEATURES);
    assert_true(peer_ping(fd));
    close(fd);
}

static void another_major_is_refused_in_words_and_closed(void **state) {
    const struct test_daemon *daemon = *state;
    static const uint32_t majors[] = {0, 2, 4000000000};
    for (unsigned i = 0; i < 3; i++) {
        int fd = peer_connect(daemon->socket);
        struct oscar_request request = peer_hello_request(7, "other major");
        request.hello.major = majors[i];
        request.hello.minor = 5;
        struct peer_record record;
        assert_true(peer_send_request(fd, &request));
        /* Unread when the daemon closes, or refused because it has: the answer must still arrive. */
        (void)peer_send_request(fd, &request);
        assert_true(peer_receive(fd, &record));
        assert_int_equal(record.reply.id, 7);
        assert_int_equal(record.reply.error, OSCAR_ERR_VERSION);
        assert_int_equal(record.fds, 0);
        char theirs[32], ours[32];
        snprintf(theirs, sizeof(theirs), "protocol %u.5", majors[i]);
        snprintf(ours, sizeof(ours), "%u.%u", OSCAR_PROTOCOL_MAJOR, OSCAR_PROTOCOL_MINOR);
        assert_non_null(strstr(record.reply.cause, theirs));
        assert_non_null(strstr(record.reply.cause, ours));
        assert_false(peer_receive(fd, &record));
        close(fd);
    }
}

static void every_client_gets_memory_of_its_own(void **state) {
    const struct test_daemon *daemon = *state;
    struct peer_record record[2];
    int fd[2];
    struct stat status[2];
    for (unsigned i = 0; i < 2; i++) {
        fd[i] = peer_connect(daemon->socket);
        struct oscar_request request = peer_hello_request(1, "own");
        assert_true(peer_send_request(fd[i], &request));
        assert_true(peer_receive(fd[i], &record[i]));
        assert_int_equal(fstat(record[i].fd[0], &status[i]), 0);
    }
    assert_int_not_equal(status[0].st_ino, status[1].st_ino);
    assert_int_not_equal(record[0].reply.hello.session, record[1].reply.hello.session);
    assert_int_equal(record[0].reply.hello.incarnation, record[1].reply.hello.incarnation);
    for (unsigned i = 0; i < 2; i++) {
        peer_close_fds(&record[i]);
        close(fd[i]);
    }
}

static void expect_no_place(int fd, uint64_t id) {
    struct oscar_request request = peer_hello_request(id, "one too many");
    struct peer_record record;
    assert_true(peer_send_request(fd, &request));
    assert_true(peer_receive(fd, &record));
    assert_int_equal(record.reply.id, id);
    assert_int_equal(record.reply.error, OSCAR_ERR_LIMIT);
    assert_non_null(strstr(record.reply.cause, "[limits] clients"));
    assert_false(peer_receive(fd, &record));
}

static void one_client_too_many_is_refused_in_words(void **state) {
    (void)state;
    static const char *const args[] = {"--limits-clients", "2", NULL};
    struct test_daemon *daemon = daemon_start(args);
    int first = peer_connect_greeted(daemon->socket, "first"), second = peer_connect_greeted(daemon->socket, "second");
    assert_true(first >= 0 && second >= 0);
    int third = peer_connect(daemon->socket);
    expect_no_place(third, 3);
    close(third);
    assert_true(peer_ping(first));
    close(second);
    /* The place is free as soon as the daemon has seen the end. */
    daemon_log_wait(daemon, "client gone session=2 ");
    second = peer_connect_greeted(daemon->socket, "again");
    assert_true(second >= 0);
    close(second);
    close(first);
    daemon_stop(daemon);
}

#define CROWD 200
#define MORE_CONNECTIONS 64 /* than places: PROTOCOL.md */

static void a_crowd_that_says_nothing_costs_nobody_their_place(void **state) {
    (void)state;
    static const char *const args[] = {"--limits-clients", "2", NULL};
    struct test_daemon *daemon = daemon_start(args);
    int crowd[CROWD];
    for (unsigned i = 0; i < CROWD; i++)
        assert_true((crowd[i] = peer_connect(daemon->socket)) >= 0);
    int first = peer_connect_greeted(daemon->socket, "first"), second = peer_connect_greeted(daemon->socket, "second");
    assert_true(first >= 0 && second >= 0);
    assert_true(peer_ping(first));
    /* Of the crowd those that came last are still there, and may say something. The others went for them. */
    struct peer_record record;
    for (unsigned i = 0; i < CROWD - MORE_CONNECTIONS; i++)
        assert_false(peer_receive(crowd[i], &record));
    for (unsigned i = CROWD - MORE_CONNECTIONS; i < CROWD; i++)
        expect_no_place(crowd[i], 1 + i);
    for (unsigned i = 0; i < CROWD; i++)
        close(crowd[i]);
    assert_true(peer_ping(first));
    assert_true(peer_ping(second));
    close(second);
    close(first);
    daemon_stop(daemon);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hello_is_answered_with_who_serves),
        cmocka_unit_test(window_and_fences_are_sealed_shared_memory),
        cmocka_unit_test(a_newer_minor_is_served_with_ours),
        cmocka_unit_test(another_major_is_refused_in_words_and_closed),
        cmocka_unit_test(every_client_gets_memory_of_its_own),
        cmocka_unit_test(one_client_too_many_is_refused_in_words),
        cmocka_unit_test(a_crowd_that_says_nothing_costs_nobody_their_place),
    };
    return cmocka_run_group_tests(tests, daemon_setup, daemon_teardown);
}
