/* SPDX-License-Identifier: Apache-2.0 */
/* Records over a real socket pair: what arrives is exactly what was said, and no descriptor is ever left behind. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "proto/frame.h"
#include "proto_test.h"
#include "tests/support/descriptors.h"

static uint8_t received[OSCAR_MAX_RECORD_BYTES];
static _Alignas(struct cmsghdr) uint8_t control[OSCAR_RECORD_CONTROL_BYTES];
static struct msghdr message;
static struct iovec iov;

/* Receives into a buffer of `capacity` bytes and `control_bytes` of control data. */
static int receive(int socket, size_t capacity, size_t control_bytes, struct oscar_record *ret,
                   struct oscar_cause *cause) {
    iov = (struct iovec){received, capacity};
    message =
        (struct msghdr){.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = control_bytes};
    ssize_t length = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    assert_true(length >= 0);
    return oscar_record_parse(&message, (size_t)length, ret, cause);
}

static void send_raw(int socket, const void *bytes, size_t size, const int *fd, unsigned fds) {
    static _Alignas(struct cmsghdr) uint8_t out[OSCAR_RECORD_CONTROL_BYTES];
    struct iovec data = {(void *)(uintptr_t)bytes, size};
    struct msghdr header;
    oscar_record_message(&header, &data, 1, out, fd, fds);
    assert_int_equal(sendmsg(socket, &header, 0), size);
}

static int pair[2];

static int open_pair(void **state) {
    (void)state;
    return socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair);
}

static int close_pair(void **state) {
    (void)state;
    if (pair[0] >= 0)
        (void)close(pair[0]);
    (void)close(pair[1]);
    return 0;
}

static void a_header_has_the_stated_bytes(void **state) {
    (void)state;
    static const uint8_t expected[OSCAR_RECORD_HEADER_BYTES] = {'O',  'S',  'C', '1', 2, 3, 0, 0,
                                                                0x78, 0x56, 0,   0,   0, 0, 0, 0};
    uint8_t header[OSCAR_RECORD_HEADER_BYTES];
    oscar_record_header(header, OSCAR_RECORD_REPLY, 3, 0x5678);
    assert_memory_equal(header, expected, sizeof(header));
}

static void a_record_arrives_with_its_descriptors_closed_on_exec(void **state) {
    (void)state;
    struct oscar_record record;
    unsigned before = open_descriptors();
    int fds[3];
    for (int i = 0; i < 3; i++) {
        fds[i] = memfd_create("test", MFD_CLOEXEC);
        assert_int_equal(ftruncate(fds[i], 100 + i), 0);
    }
    assert_int_equal(oscar_record_send(pair[0], OSCAR_RECORD_NOTICE, "payload", 7, fds, 3, 1000, NULL), OSCAR_OK);
    assert_int_equal(receive(pair[1], sizeof(received), sizeof(control), &record, NULL), OSCAR_OK);
    assert_int_equal(record.kind, OSCAR_RECORD_NOTICE);
    assert_int_equal(record.payload_bytes, 7);
    assert_memory_equal(record.payload, "payload", 7);
    assert_int_equal(record.fds, 3);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(lseek(record.fd[i], 0, SEEK_END), 100 + i);
        assert_true((fcntl(record.fd[i], F_GETFD) & FD_CLOEXEC) != 0);
        (void)close(fds[i]);
    }
    oscar_record_close_fds(&record);
    assert_int_equal(open_descriptors(), before);
}

static void the_largest_record_makes_the_trip(void **state) {
    (void)state;
    struct oscar_record record;
    int fds[OSCAR_MAX_RECORD_FDS];
    uint8_t *payload = malloc(OSCAR_MAX_RECORD_PAYLOAD_BYTES);
    assert_non_null(payload);
    memset(payload, 0x3c, OSCAR_MAX_RECORD_PAYLOAD_BYTES);
    for (unsigned i = 0; i < OSCAR_MAX_RECORD_FDS; i++)
        fds[i] = pair[1];
    unsigned before = open_descriptors();
    assert_int_equal(oscar_record_send(pair[0], OSCAR_RECORD_REPLY, payload, OSCAR_MAX_RECORD_PAYLOAD_BYTES, fds,
                                       OSCAR_MAX_RECORD_FDS, 1000, NULL),
                     OSCAR_OK);
    assert_int_equal(receive(pair[1], sizeof(received), sizeof(control), &record, NULL), OSCAR_OK);
    assert_int_equal(record.payload_bytes, OSCAR_MAX_RECORD_PAYLOAD_BYTES);
    assert_memory_equal(record.payload, payload, OSCAR_MAX_RECORD_PAYLOAD_BYTES);
    assert_int_equal(record.fds, OSCAR_MAX_RECORD_FDS);
    oscar_record_close_fds(&record);
    assert_int_equal(open_descriptors(), before);
    free(payload);
}

static void more_than_a_record_holds_is_not_sent(void **state) {
    (void)state;
    struct oscar_cause cause;
    assert_int_equal(oscar_record_send(pair[0], OSCAR_RECORD_REQUEST, received, OSCAR_MAX_RECORD_PAYLOAD_BYTES + 1,
                                       NULL, 0, 0, &cause),
                     OSCAR_ERR_LIMIT);
    assert_int_equal(
        oscar_record_send(pair[0], OSCAR_RECORD_REPLY, received, 1, pair, OSCAR_MAX_RECORD_FDS + 1, 0, &cause),
        OSCAR_ERR_LIMIT);
}

static void a_bad_header_is_refused_and_every_descriptor_closed(void **state) {
    (void)state;
    static const struct {
        size_t at;
        uint8_t value;
    } damage[] = {{0, 'X'},
                  {3, '2'},
                  {4, 0},
                  {4, 4},
                  {5, 0},
                  {5, 1},
                  {5, 3},
                  {5, 255},
                  {6, 1},
                  {7, 1},
                  {8, 4},
                  {8, 6},
                  {9, 1},
                  {11, 0x80},
                  {12, 1},
                  {15, 1},
                  {4, OSCAR_RECORD_REQUEST}}; /* the last: a request with descriptors */
    unsigned before = open_descriptors();
    for (size_t i = 0; i < sizeof(damage) / sizeof(damage[0]); i++) {
        uint8_t bytes[OSCAR_RECORD_HEADER_BYTES + 5] = {0};
        struct oscar_record record;
        struct oscar_cause cause = {""};
        oscar_record_header(bytes, OSCAR_RECORD_REPLY, 2, 5);
        bytes[damage[i].at] = damage[i].value;
        send_raw(pair[0], bytes, sizeof(bytes), pair, 2);
        assert_int_equal(receive(pair[1], sizeof(received), sizeof(control), &record, &cause), OSCAR_ERR_PROTOCOL);
        assert_true(cause.text[0] != '\0');
        assert_int_equal(open_descriptors(), before);
    }
}

static void a_record_shorter_than_a_header_is_refused(void **state) {
    (void)state;
    uint8_t bytes[OSCAR_RECORD_HEADER_BYTES];
    oscar_record_header(bytes, OSCAR_RECORD_REPLY, 1, 0);
    unsigned before = open_descriptors();
    for (size_t size = 1; size < sizeof(bytes); size++) {
        struct oscar_record record;
        send_raw(pair[0], bytes, size, pair, 1);
        assert_int_equal(receive(pair[1], sizeof(received), sizeof(control), &record, NULL), OSCAR_ERR_PROTOCOL);
        assert_int_equal(open_descriptors(), before);
    }
    struct oscar_record record;
    send_raw(pair[0], bytes, sizeof(bytes), pair, 1);
    assert_int_equal(receive(pair[1], sizeof(received), sizeof(control), &record, NULL), OSCAR_OK);
    assert_int_equal(record.payload_bytes, 0);
    oscar_record_close_fds(&record);
}

static void a_cut_record_is_refused(void **state) {
    (void)state;
    struct oscar_record record;
    struct oscar_cause cause;
    unsigned before = open_descriptors();
    assert_int_equal(oscar_record_send(pair[0], OSCAR_RECORD_REPLY, "0123456789", 10, pair, 2, 0, NULL), OSCAR_OK);
    assert_int_equal(receive(pair[1], OSCAR_RECORD_HEADER_BYTES + 9, sizeof(control), &record, &cause),
                     OSCAR_ERR_PROTOCOL);
    assert_non_null(strstr(cause.text, "cut"));
    assert_int_equal(open_descriptors(), before);
}

static void cut_control_data_is_refused_and_what_came_closed(void **state) {
    (void)state;
    struct oscar_record record;
    struct oscar_cause cause;
    int fds[8];
    for (int i = 0; i < 8; i++)
        fds[i] = pair[0];
    unsigned before = open_descriptors();
    for (unsigned room = 0; room < 8; room++) {
        assert_int_equal(oscar_record_send(pair[0], OSCAR_RECORD_REPLY, "x", 1, fds, 8, 0, NULL), OSCAR_OK);
        size_t control_bytes = room == 0 ? 0 : CMSG_LEN(room * sizeof(int));
        assert_int_equal(receive(pair[1], sizeof(received), control_bytes, &record, &cause), OSCAR_ERR_PROTOCOL);
        assert_non_null(strstr(cause.text, "control data"));
        assert_int_equal(open_descriptors(), before);
    }
}

static void surplus_descriptors_are_closed(void **state) {
    (void)state;
    struct oscar_record record;
    uint8_t bytes[OSCAR_RECORD_HEADER_BYTES];
    int fds[253];
    for (int i = 0; i < 253; i++)
        fds[i] = pair[0];
    unsigned before = open_descriptors();
    static const unsigned said[] = {0, 1, OSCAR_MAX_RECORD_FDS, 253};
    for (size_t i = 0; i < sizeof(said) / sizeof(said[0]); i++) {
        oscar_record_header(bytes, OSCAR_RECORD_REPLY, said[i], 0);
        send_raw(pair[0], bytes, sizeof(bytes), fds, 253); /* what the kernel lets through at most */
        assert_int_equal(receive(pair[1], sizeof(received), sizeof(control), &record, NULL), OSCAR_ERR_PROTOCOL);
        assert_int_equal(open_descriptors(), before);
    }
}

static void a_record_of_size_zero_is_the_end(void **state) {
    (void)state;
    struct oscar_record record;
    send_raw(pair[0], NULL, 0, NULL, 0);
    assert_int_equal(receive(pair[1], sizeof(received), sizeof(control), &record, NULL), OSCAR_ERR_DISCONNECTED);
    unsigned before = open_descriptors();
    send_raw(pair[0], NULL, 0, pair, 2);
    assert_int_equal(receive(pair[1], sizeof(received), sizeof(control), &record, NULL), OSCAR_ERR_DISCONNECTED);
    assert_int_equal(open_descriptors(), before);
}

static void a_refused_record_leaves_the_result_untouched(void **state) {
    (void)state;
    struct oscar_record record, copy;
    memset(&record, 0x5a, sizeof(record));
    copy = record;
    send_raw(pair[0], "no header of ours", 17, pair, 1);
    assert_int_equal(receive(pair[1], sizeof(received), sizeof(control), &record, NULL), OSCAR_ERR_PROTOCOL);
    assert_memory_equal(&record, &copy, sizeof(record));
}

static void sending_to_a_closed_peer_is_disconnected(void **state) {
    (void)state;
    struct oscar_cause cause;
    (void)close(pair[1]);
    pair[1] = pair[0];
    pair[0] = -1;
    assert_int_equal(oscar_record_send(pair[1], OSCAR_RECORD_REQUEST, "x", 1, NULL, 0, -1, &cause),
                     OSCAR_ERR_DISCONNECTED);
}

static void sending_to_a_peer_that_does_not_read_ends_at_the_deadline(void **state) {
    (void)state;
    struct oscar_cause cause;
    struct timespec begin, end;
    int r;
    int sent = 0;
    do
        r = oscar_record_send(pair[0], OSCAR_RECORD_REQUEST, received, 30000, NULL, 0, 0, &cause);
    while (r == OSCAR_OK && ++sent < 10000);
    assert_int_equal(r, OSCAR_ERR_TIMEOUT);
    (void)clock_gettime(CLOCK_MONOTONIC, &begin);
    assert_int_equal(oscar_record_send(pair[0], OSCAR_RECORD_REQUEST, received, 30000, NULL, 0, 30, &cause),
                     OSCAR_ERR_TIMEOUT);
    (void)clock_gettime(CLOCK_MONOTONIC, &end);
    int64_t waited_ms = (int64_t)(end.tv_sec - begin.tv_sec) * 1000 + (end.tv_nsec - begin.tv_nsec) / 1000000;
    assert_true(waited_ms >= 29);
    assert_non_null(strstr(cause.text, "30 ms"));
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, open_pair, close_pair)

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_header_has_the_stated_bytes),
        TEST(a_record_arrives_with_its_descriptors_closed_on_exec),
        TEST(the_largest_record_makes_the_trip),
        TEST(more_than_a_record_holds_is_not_sent),
        TEST(a_bad_header_is_refused_and_every_descriptor_closed),
        TEST(a_record_shorter_than_a_header_is_refused),
        TEST(a_cut_record_is_refused),
        TEST(cut_control_data_is_refused_and_what_came_closed),
        TEST(surplus_descriptors_are_closed),
        TEST(a_record_of_size_zero_is_the_end),
        TEST(a_refused_record_leaves_the_result_untouched),
        TEST(sending_to_a_closed_peer_is_disconnected),
        TEST(sending_to_a_peer_that_does_not_read_ends_at_the_deadline),
    };
    return cmocka_run_group_tests_name("proto_frame", tests, NULL, NULL);
}
