/* SPDX-License-Identifier: Apache-2.0 */
/* The event loop, each test under io_uring and under epoll. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/loop.h"
#include "tests/support/cmocka_order.h"

#define MILLISECOND UINT64_C(1000000)
#define ENOUGH (200 * MILLISECOND) /* for what is ready, on a busy machine */

struct fixture {
    enum loop_engine engine;
    struct loop *loop;
    unsigned seen; /* what callbacks count up */
};

/* One end in the loop, the other in the test's hand. */
struct end {
    struct fixture *fixture;
    struct loop_link *link;
    int peer;
    unsigned records, garbage, gone;
    char why[128];
    uint8_t last[64];
    uint32_t last_bytes;
    unsigned last_fds;
    void (*on_record)(struct end *end, const struct oscar_record *record);
};

static void end_record(void *arg, const struct oscar_record *record) {
    struct end *end = arg;
    end->records++;
    end->last_bytes = record->payload_bytes;
    end->last_fds = record->fds;
    memcpy(end->last, record->payload,
           record->payload_bytes < sizeof(end->last) ? record->payload_bytes : sizeof(end->last));
    if (end->on_record != NULL)
        end->on_record(end, record);
}

static void end_garbage(void *arg, const struct oscar_cause *cause) {
    struct end *end = arg;
    end->garbage++;
    assert_true(strlen(cause->text) > 0);
}

static void end_gone(void *arg, const char *why) {
    struct end *end = arg;
    end->gone++;
    snprintf(end->why, sizeof(end->why), "%s", why);
    loop_link_close(end->link, false);
    end->link = NULL;
    loop_stop(end->fixture->loop);
}

static const struct loop_link_handlers handlers = {.record = end_record, .garbage = end_garbage, .gone = end_gone};

static void end_open(struct fixture *fixture, struct end *end) {
    int pair[2];
    *end = (struct end){.fixture = fixture};
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    end->peer = pair[1];
    assert_int_equal(loop_link_open(fixture->loop, pair[0], &handlers, end, &end->link), 0);
}

static void end_close(struct end *end) {
    loop_link_close(end->link, false);
    if (end->peer >= 0)
        close(end->peer);
}

/* A record whose payload is one number. */
static void peer_send(int peer, uint32_t number, const int *fd, unsigned fds) {
    uint8_t bytes[OSCAR_RECORD_HEADER_BYTES + sizeof(number)];
    _Alignas(struct cmsghdr) uint8_t control[OSCAR_RECORD_CONTROL_BYTES];
    oscar_record_header(bytes, OSCAR_RECORD_NOTICE, fds, sizeof(number));
    memcpy(bytes + OSCAR_RECORD_HEADER_BYTES, &number, sizeof(number));
    struct iovec iov = {bytes, sizeof(bytes)};
    struct msghdr message;
    oscar_record_message(&message, &iov, 1, control, fd, fds);
    assert_int_equal(sendmsg(peer, &message, MSG_NOSIGNAL), sizeof(bytes));
}

/* The next record at the peer's end, blocking; the number in it, or -1 at the end of the connection. */
static int64_t peer_receive(int peer, int *ret_fd, unsigned *ret_fds) {
    static uint8_t bytes[OSCAR_MAX_RECORD_BYTES];
    _Alignas(struct cmsghdr) uint8_t control[OSCAR_RECORD_CONTROL_BYTES];
    struct iovec iov = {bytes, sizeof(bytes)};
    struct msghdr message = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
    ssize_t length = recvmsg(peer, &message, MSG_CMSG_CLOEXEC);
    if (length <= 0)
        return -1;
    struct oscar_record record;
    assert_int_equal(oscar_record_parse(&message, (size_t)length, &record, NULL), 0);
    uint32_t number;
    assert_true(record.payload_bytes >= sizeof(number));
    memcpy(&number, record.payload, sizeof(number));
    if (ret_fds != NULL) {
        *ret_fds = record.fds;
        memcpy(ret_fd, record.fd, record.fds * sizeof(int));
    } else {
        oscar_record_close_fds(&record);
    }
    return number;
}

static void stop(void *arg) { loop_stop(((struct fixture *)arg)->loop); }

/* Runs the loop for a while: until somebody stops it, or `ns` have passed. */
static void run_for(struct fixture *fixture, uint64_t ns) {
    struct loop_source *timer;
    struct oscar_cause cause = {0};
    assert_int_equal(loop_timer(fixture->loop, stop, fixture, &timer), 0);
    loop_timer_set(fixture->loop, timer, loop_now_ns(fixture->loop) + ns);
    assert_int_equal(loop_run(fixture->loop, &cause), 0);
    loop_remove(fixture->loop, timer);
}

static int set_up(void **state) {
    struct fixture *fixture = *state;
    struct oscar_cause cause = {0};
    fixture->loop = NULL;
    fixture->seen = 0;
    int r = loop_new(fixture->engine, &fixture->loop, &cause);
    if (r == OSCAR_ERR_UNSUPPORTED)
        skip();
    return r;
}

static int tear_down(void **state) {
    struct fixture *fixture = *state;
    loop_free(fixture->loop);
    return 0;
}

/* --- tests --- */

static void stop_at_eight(struct end *end, const struct oscar_record *record) {
    uint32_t number;
    memcpy(&number, record->payload, sizeof(number));
    assert_int_equal(number, end->records - 1);
    if (end->records == 8)
        loop_stop(end->fixture->loop);
}

static void records_come_in_order(void **state) {
    struct fixture *fixture = *state;
    struct end end;
    end_open(fixture, &end);
    end.on_record = stop_at_eight;
    for (uint32_t i = 0; i < 8; i++)
        peer_send(end.peer, i, NULL, 0);
    run_for(fixture, 5000 * MILLISECOND);
    assert_int_equal(end.records, 8);
    end_close(&end);
}

static void records_leave_in_order(void **state) {
    struct fixture *fixture = *state;
    struct end end;
    end_open(fixture, &end);
    for (uint32_t i = 0; i < LOOP_LINK_QUEUE_RECORDS; i++)
        assert_int_equal(loop_link_send(end.link, OSCAR_RECORD_REPLY, &i, sizeof(i), NULL, 0), 0);
    run_for(fixture, ENOUGH);
    for (uint32_t i = 0; i < LOOP_LINK_QUEUE_RECORDS; i++)
        assert_int_equal(peer_receive(end.peer, NULL, NULL), i);
    end_close(&end);
}

/* Large records fill the socket's buffer, so that the rest waits in the queue; the peer reads late. */
static void a_full_socket_keeps_the_order(void **state) {
    struct fixture *fixture = *state;
    struct end end;
    end_open(fixture, &end);
    static uint8_t payload[40000];
    for (uint32_t i = 0; i < 20; i++) {
        memcpy(payload, &i, sizeof(i));
        uint32_t bytes = i % 3 == 0 ? sizeof(payload) : 100;
        assert_int_equal(loop_link_send(end.link, OSCAR_RECORD_REPLY, payload, bytes, NULL, 0), 0);
    }
    run_for(fixture, ENOUGH);
    for (uint32_t i = 0; i < 20; i++) {
        assert_int_equal(peer_receive(end.peer, NULL, NULL), i);
        run_for(fixture, 10 * MILLISECOND);
    }
    end_close(&end);
}

static void a_peer_that_does_not_read_is_cut_off(void **state) {
    struct fixture *fixture = *state;
    struct end end;
    end_open(fixture, &end);
    static uint8_t payload[60000];
    int r = 0;
    unsigned sent = 0;
    while (r == 0 && sent < 1000) {
        r = loop_link_send(end.link, OSCAR_RECORD_REPLY, payload, sizeof(payload), NULL, 0);
        sent += r == 0;
    }
    assert_int_equal(r, OSCAR_ERR_LIMIT);
    assert_true(sent >= LOOP_LINK_QUEUE_RECORDS && sent <= LOOP_LINK_QUEUE_RECORDS + 4);
    assert_int_equal(end.gone, 0); /* not from inside the call */
    run_for(fixture, 5000 * MILLISECOND);
    assert_int_equal(end.gone, 1);
    assert_non_null(strstr(end.why, "queue is full"));
    end_close(&end);
}

static void descriptors_are_passed_and_the_callers_stay(void **state) {
    struct fixture *fixture = *state;
    struct end end;
    end_open(fixture, &end);
    int event = eventfd(7, EFD_CLOEXEC), sent[OSCAR_MAX_RECORD_FDS], got[OSCAR_MAX_RECORD_FDS];
    for (unsigned i = 0; i < OSCAR_MAX_RECORD_FDS; i++)
        sent[i] = event;
    uint32_t number = 9;
    unsigned fds = 0;
    assert_int_equal(loop_link_send(end.link, OSCAR_RECORD_NOTICE, &number, sizeof(number), sent, OSCAR_MAX_RECORD_FDS),
                     0);
    run_for(fixture, ENOUGH);
    assert_int_equal(peer_receive(end.peer, got, &fds), 9);
    assert_int_equal(fds, OSCAR_MAX_RECORD_FDS);
    struct stat ours, theirs;
    assert_int_equal(fstat(event, &ours), 0);
    for (unsigned i = 0; i < fds; i++) {
        assert_int_equal(fstat(got[i], &theirs), 0);
        assert_int_equal(ours.st_ino, theirs.st_ino);
        assert_true(fcntl(got[i], F_GETFD) & FD_CLOEXEC);
        close(got[i]);
    }
    close(event);
    end_close(&end);
}

static int lowest_free_fd(void) {
    int fd = dup(STDIN_FILENO);
    close(fd);
    return fd;
}

static void stop_now(struct end *end, const struct oscar_record *record) {
    (void)record;
    loop_stop(end->fixture->loop);
}

static void received_descriptors_are_closed_and_counted(void **state) {
    struct fixture *fixture = *state;
    struct end end;
    end_open(fixture, &end);
    end.on_record = stop_now;
    int before = lowest_free_fd(), fd[3] = {STDIN_FILENO, STDIN_FILENO, STDIN_FILENO};
    peer_send(end.peer, 1, fd, 3);
    run_for(fixture, 5000 * MILLISECOND);
    assert_int_equal(end.records, 1);
    assert_int_equal(end.last_fds, 3);
    assert_int_equal(lowest_free_fd(), before);
    assert_int_equal(loop_descriptors_received(fixture->loop), 3);
    end_close(&end);
}

static void garbage_ends_the_connection(void **state) {
    struct fixture *fixture = *state;
    static const uint8_t zeros[70000];
    static const size_t sizes[] = {1, 15, 16, 100, 65536, 65537, 70000};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct end end;
        end_open(fixture, &end);
        assert_int_equal(send(end.peer, zeros, sizes[i], MSG_NOSIGNAL), sizes[i]);
        run_for(fixture, 5000 * MILLISECOND);
        assert_int_equal(end.garbage, 1);
        assert_int_equal(end.gone, 1);
        assert_int_equal(end.records, 0);
        assert_int_equal(peer_receive(end.peer, NULL, NULL), -1);
        end_close(&end);
    }
}

static void the_end_of_a_peer_is_told_once(void **state) {
    struct fixture *fixture = *state;
    struct end end;
    end_open(fixture, &end);
    close(end.peer);
    end.peer = -1;
    run_for(fixture, 5000 * MILLISECOND);
    assert_int_equal(end.gone, 1);
    run_for(fixture, 5 * MILLISECOND);
    assert_int_equal(end.gone, 1);
    end_close(&end);
}

static void close_itself(struct end *end, const struct oscar_record *record) {
    (void)record;
    uint32_t number = 77;
    assert_int_equal(loop_link_send(end->link, OSCAR_RECORD_REPLY, &number, sizeof(number), NULL, 0), 0);
    struct loop_link *link = end->link;
    end->link = NULL;
    loop_link_close(link, true);
    loop_link_close(NULL, true);
}

static void a_link_closed_in_its_callback_flushes_and_calls_no_more(void **state) {
    struct fixture *fixture = *state;
    struct end end;
    end_open(fixture, &end);
    end.on_record = close_itself;
    peer_send(end.peer, 1, NULL, 0);
    peer_send(end.peer, 2, NULL, 0);
    run_for(fixture, ENOUGH);
    assert_int_equal(end.records, 1);
    assert_int_equal(end.gone, 0);
    assert_false(loop_links_flushing(fixture->loop));
    assert_int_equal(peer_receive(end.peer, NULL, NULL), 77); /* not ECONNRESET, although record 2 was never read */
    assert_int_equal(peer_receive(end.peer, NULL, NULL), -1);
    end_close(&end);
}

/* The receive is in flight, and a send that cannot complete; then also the loop goes. */
static void close_while_operations_are_in_flight(void **state) {
    struct fixture *fixture = *state;
    static uint8_t payload[60000];
    for (int round = 0; round < 2; round++) {
        struct end end;
        end_open(fixture, &end);
        for (unsigned i = 0; i < 10; i++)
            assert_int_equal(loop_link_send(end.link, OSCAR_RECORD_REPLY, payload, sizeof(payload), NULL, 0), 0);
        run_for(fixture, 5 * MILLISECOND);
        loop_link_close(end.link, round == 1);
        assert_true(loop_links_flushing(fixture->loop) == (round == 1));
        run_for(fixture, 5 * MILLISECOND);
        assert_int_equal(end.gone, 0);
        close(end.peer);
    }
    struct end last[3];
    for (unsigned i = 0; i < 3; i++)
        end_open(fixture, &last[i]);
    for (unsigned i = 0; i < 10; i++)
        assert_int_equal(loop_link_send(last[1].link, OSCAR_RECORD_REPLY, payload, sizeof(payload), NULL, 0), 0);
    run_for(fixture, MILLISECOND);
    /* The loop is freed with a link whose end is pending, one that flushes to nobody, and one with a record not yet
     * sent. */
    close(last[0].peer);
    loop_link_close(last[1].link, true);
    assert_int_equal(loop_link_send(last[2].link, OSCAR_RECORD_REPLY, payload, 4, NULL, 0), 0);
    loop_free(fixture->loop);
    fixture->loop = NULL;
    close(last[1].peer);
    close(last[2].peer);
}

static void a_flush_that_nobody_reads_ends_after_two_seconds(void **state) {
    struct fixture *fixture = *state;
    static uint8_t payload[60000];
    struct end end;
    end_open(fixture, &end);
    for (unsigned i = 0; i < 10; i++)
        assert_int_equal(loop_link_send(end.link, OSCAR_RECORD_REPLY, payload, sizeof(payload), NULL, 0), 0);
    run_for(fixture, 5 * MILLISECOND);
    uint64_t closed = loop_now_ns(fixture->loop);
    loop_link_close(end.link, true);
    end.link = NULL;
    run_for(fixture, 1000 * MILLISECOND);
    assert_true(loop_links_flushing(fixture->loop) || loop_now_ns(fixture->loop) - closed >= 2000 * MILLISECOND);
    run_for(fixture, 1200 * MILLISECOND);
    assert_false(loop_links_flushing(fixture->loop));
    end_close(&end);
}

static void echo(struct end *end, const struct oscar_record *record) {
    assert_int_equal(loop_link_send(end->link, OSCAR_RECORD_REPLY, record->payload, record->payload_bytes, NULL, 0), 0);
    if (++end->fixture->seen == 64 * 10)
        loop_stop(end->fixture->loop);
}

static void sixty_four_links_at_once(void **state) {
    struct fixture *fixture = *state;
    static struct end ends[64];
    for (unsigned i = 0; i < 64; i++) {
        end_open(fixture, &ends[i]);
        ends[i].on_record = echo;
    }
    for (uint32_t k = 0; k < 10; k++)
        for (unsigned i = 0; i < 64; i++)
            peer_send(ends[i].peer, i * 100 + k, NULL, 0);
    run_for(fixture, 10000 * MILLISECOND);
    run_for(fixture, ENOUGH);
    for (unsigned i = 0; i < 64; i++) {
        for (uint32_t k = 0; k < 10; k++)
            assert_int_equal(peer_receive(ends[i].peer, NULL, NULL), i * 100 + k);
        end_close(&ends[i]);
    }
}

struct ticker {
    struct fixture *fixture;
    struct loop_source *timer;
    unsigned number;
    uint64_t due_ns;
};

static void tick(void *arg) {
    struct ticker *ticker = arg;
    assert_true(loop_now_ns(ticker->fixture->loop) >= ticker->due_ns);
    assert_int_equal(ticker->fixture->seen++, ticker->number);
    if (ticker->number == 15)
        loop_stop(ticker->fixture->loop);
}

static void timers_expire_in_order_and_not_early(void **state) {
    struct fixture *fixture = *state;
    struct ticker tickers[16];
    uint64_t now = loop_now_ns(fixture->loop);
    for (unsigned i = 0; i < 16; i++) {
        unsigned number = (i * 7) % 16; /* armed in another order than they are due */
        tickers[i] =
            (struct ticker){.fixture = fixture, .number = number, .due_ns = now + number * MILLISECOND / 2 + 1};
        assert_int_equal(loop_timer(fixture->loop, tick, &tickers[i], &tickers[i].timer), 0);
        loop_timer_set(fixture->loop, tickers[i].timer, now + 1000 * MILLISECOND);
        loop_timer_set(fixture->loop, tickers[i].timer, tickers[i].due_ns);
    }
    struct oscar_cause cause;
    assert_int_equal(loop_run(fixture->loop, &cause), 0);
    assert_int_equal(fixture->seen, 16);
    for (unsigned i = 0; i < 16; i++)
        loop_remove(fixture->loop, tickers[i].timer);
}

static void never(void *arg) {
    (void)arg;
    fail_msg("a disarmed timer or removed source called back");
}

static void a_disarmed_timer_stays_silent(void **state) {
    struct fixture *fixture = *state;
    struct loop_source *one, *other;
    assert_int_equal(loop_timer(fixture->loop, never, NULL, &one), 0);
    assert_int_equal(loop_timer(fixture->loop, never, NULL, &other), 0);
    loop_timer_set(fixture->loop, one, loop_now_ns(fixture->loop) + MILLISECOND);
    loop_timer_set(fixture->loop, other, loop_now_ns(fixture->loop) + MILLISECOND);
    loop_timer_set(fixture->loop, one, 0);
    loop_remove(fixture->loop, other);
    run_for(fixture, 5 * MILLISECOND);
    loop_remove(fixture->loop, one);
    loop_remove(fixture->loop, NULL);
}

static void count_three(void *arg) {
    struct fixture *fixture = arg;
    if (++fixture->seen == 3)
        loop_stop(fixture->loop);
}

static void a_watch_calls_as_long_as_there_is_something_to_read(void **state) {
    struct fixture *fixture = *state;
    int event = eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK); /* and nobody reads it */
    struct loop_source *source;
    assert_int_equal(loop_watch(fixture->loop, event, count_three, fixture, &source), 0);
    run_for(fixture, 5000 * MILLISECOND);
    assert_int_equal(fixture->seen, 3);
    loop_remove(fixture->loop, source);
    run_for(fixture, 2 * MILLISECOND);
    assert_int_equal(fixture->seen, 3);
    close(event);
}

static void a_descriptor_closed_after_its_removal_is_not_watched(void **state) {
    struct fixture *fixture = *state;
    int event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct loop_source *source;
    assert_int_equal(loop_watch(fixture->loop, event, never, NULL, &source), 0);
    loop_remove(fixture->loop, source);
    close(event);
    int again = eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK); /* most likely the same number */
    run_for(fixture, 3 * MILLISECOND);
    close(again);
}

static void count_idle(void *arg) { ((struct fixture *)arg)->seen++; }

/* The descriptor is woken and emptied again between two turns: its watch must still end. */
static void a_watch_ends_although_its_wake_up_came_to_nothing(void **state) {
    struct fixture *fixture = *state;
    for (unsigned i = 0; i < 50; i++) {
        int event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        uint64_t count = 1;
        struct loop_source *source;
        assert_int_equal(loop_watch(fixture->loop, event, never, NULL, &source), 0);
        run_for(fixture, 1000);
        assert_int_equal(write(event, &count, sizeof(count)), sizeof(count));
        assert_int_equal(read(event, &count, sizeof(count)), sizeof(count));
        loop_remove(fixture->loop, source);
        close(event);
    }
    loop_free(fixture->loop); /* hangs if one is still in flight */
    fixture->loop = NULL;
}

static void idle_is_called_once_a_turn(void **state) {
    struct fixture *fixture = *state;
    loop_on_idle(fixture->loop, count_idle, fixture);
    run_for(fixture, MILLISECOND);
    assert_in_range(fixture->seen, 1, 5);
    loop_on_idle(fixture->loop, NULL, NULL);
}

static void stop_from_idle(void *arg) { loop_stop(arg); }

static void a_stop_from_idle_does_not_wait_first(void **state) {
    struct fixture *fixture = *state;
    struct oscar_cause cause;
    loop_on_idle(fixture->loop, stop_from_idle, fixture->loop);
    assert_int_equal(loop_run(fixture->loop, &cause), 0);
    loop_on_idle(fixture->loop, NULL, NULL);
}

static void automatic_takes_an_engine_that_works(void **state) {
    (void)state;
    struct loop *loop;
    struct oscar_cause cause = {0};
    assert_int_equal(loop_new(LOOP_AUTO, &loop, &cause), 0);
    assert_true(strcmp(loop_engine_name(loop), "io_uring") == 0 || strcmp(loop_engine_name(loop), "epoll") == 0);
    loop_free(loop);
    loop_free(NULL);
}

static struct fixture uring = {.engine = LOOP_IO_URING}, epoll = {.engine = LOOP_EPOLL};

#define UNDER(engine, behaviour)                                                                                       \
    { #behaviour " (" #engine ")", behaviour, set_up, tear_down, &engine }
#define UNDER_BOTH(behaviour) UNDER(uring, behaviour), UNDER(epoll, behaviour)

int main(void) {
    const struct CMUnitTest tests[] = {
        UNDER_BOTH(records_come_in_order),
        UNDER_BOTH(records_leave_in_order),
        UNDER_BOTH(a_full_socket_keeps_the_order),
        UNDER_BOTH(a_peer_that_does_not_read_is_cut_off),
        UNDER_BOTH(descriptors_are_passed_and_the_callers_stay),
        UNDER_BOTH(received_descriptors_are_closed_and_counted),
        UNDER_BOTH(garbage_ends_the_connection),
        UNDER_BOTH(the_end_of_a_peer_is_told_once),
        UNDER_BOTH(a_link_closed_in_its_callback_flushes_and_calls_no_more),
        UNDER_BOTH(close_while_operations_are_in_flight),
        UNDER_BOTH(a_flush_that_nobody_reads_ends_after_two_seconds),
        UNDER_BOTH(sixty_four_links_at_once),
        UNDER_BOTH(timers_expire_in_order_and_not_early),
        UNDER_BOTH(a_disarmed_timer_stays_silent),
        UNDER_BOTH(a_watch_calls_as_long_as_there_is_something_to_read),
        UNDER_BOTH(a_descriptor_closed_after_its_removal_is_not_watched),
        UNDER_BOTH(a_watch_ends_although_its_wake_up_came_to_nothing),
        UNDER_BOTH(idle_is_called_once_a_turn),
        UNDER_BOTH(a_stop_from_idle_does_not_wait_first),
        cmocka_unit_test(automatic_takes_an_engine_that_works),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
