/* SPDX-License-Identifier: Apache-2.0 */
/* Administration and events over nanomsg: what an operator and a router see, and what a hostile one can do. */
#include <grp.h>
#include <nanomsg/nn.h>
#include <nanomsg/pubsub.h>
#include <nanomsg/reqrep.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/version.h"
#include "tests/support/cmocka_order.h"
#include "tests/support/raw_worker.h"
#include "tests/support/worker_process.h"

#define SETTLE_MS 30000

static int connect_to(const char *path, int protocol) {
    int fd = nn_socket(AF_SP, protocol), timeout = SETTLE_MS;
    assert_true(fd >= 0);
    char address[128];
    snprintf(address, sizeof(address), "ipc://%s", path);
    assert_int_equal(nn_setsockopt(fd, NN_SOL_SOCKET, NN_RCVTIMEO, &timeout, sizeof(timeout)), 0);
    if (protocol == NN_SUB)
        assert_int_equal(nn_setsockopt(fd, NN_SUB, NN_SUB_SUBSCRIBE, "", 0), 0);
    assert_true(nn_connect(fd, address) >= 0);
    return fd;
}

/* The decoded reply: oscar_admin_reply_free() it. */
static struct oscar_admin_reply ask(int fd, const struct oscar_admin_request *request) {
    uint8_t *buffer;
    size_t bytes;
    assert_int_equal(oscar_admin_request_encode(request, &buffer, &bytes), 0);
    assert_int_equal(nn_send(fd, buffer, bytes, 0), bytes);
    free(buffer);
    uint8_t *answer;
    int length = nn_recv(fd, &answer, NN_MSG, 0);
    assert_true(length > 0);
    struct oscar_admin_reply reply;
    struct oscar_cause cause;
    int r = oscar_admin_reply_decode(answer, (size_t)length, &reply, &cause);
    if (r < 0)
        fail_msg("%s", cause.text);
    nn_freemsg(answer);
    assert_int_equal(reply.id, request->id);
    assert_int_equal(reply.verb, request->verb);
    assert_int_equal(reply.error, 0);
    return reply;
}

static uint64_t metric(int fd, const char *name, const char *labels) {
    struct oscar_admin_reply reply = ask(fd, &(struct oscar_admin_request){.id = 1, .verb = OSCAR_ADMIN_STATS});
    uint64_t value = UINT64_MAX;
    for (uint32_t i = 0; i < reply.metrics; i++)
        if (strcmp(reply.metric[i].name, name) == 0 && strcmp(reply.metric[i].labels, labels) == 0)
            value = reply.metric[i].value;
    oscar_admin_reply_free(&reply);
    if (value == UINT64_MAX)
        fail_msg("no metric %s{%s}", name, labels);
    return value;
}

static void version_says_what_serves(void **state) {
    const struct test_daemon *daemon = *state;
    int fd = connect_to(daemon->admin, NN_REQ);
    struct oscar_admin_reply reply = ask(fd, &(struct oscar_admin_request){.id = 5, .verb = OSCAR_ADMIN_VERSION});
    assert_string_equal(reply.version.version, OSCAR_VERSION_STRING);
    assert_string_equal(reply.version.backend, "host");
    assert_int_equal(reply.version.major, OSCAR_PROTOCOL_MAJOR);
    assert_true(reply.version.incarnation > 0);
    const char *engine = getenv("OSCARD_DAEMON_IO_ENGINE");
    if (engine != NULL)
        assert_string_equal(reply.version.io_engine, engine);
    oscar_admin_reply_free(&reply);
    nn_close(fd);
}

static void counters_count_what_happens(void **state) {
    const struct test_daemon *daemon = *state;
    int fd = connect_to(daemon->admin, NN_REQ);
    uint64_t pings = metric(fd, "oscard_requests_total", "verb=\"ping\""),
             errors = metric(fd, "oscard_protocol_errors_total", ""),
             refused = metric(fd, "oscard_descriptors_refused_total", ""), clients = metric(fd, "oscard_clients", "");
    int peer = peer_connect_greeted(daemon->socket, "counted"), hostile = peer_connect(daemon->socket);
    for (unsigned i = 0; i < 3; i++)
        assert_true(peer_ping(peer));
    int descriptor = STDIN_FILENO;
    struct peer_record record;
    assert_true(peer_send_raw(hostile, "nonsense", 8, &descriptor, 1));
    assert_false(peer_receive(hostile, &record));
    assert_int_equal(metric(fd, "oscard_requests_total", "verb=\"ping\""), pings + 3);
    assert_int_equal(metric(fd, "oscard_protocol_errors_total", ""), errors + 1);
    assert_int_equal(metric(fd, "oscard_descriptors_refused_total", ""), refused + 1);
    assert_int_equal(metric(fd, "oscard_clients", ""), clients + 1);
    close(peer);
    close(hostile);
    nn_close(fd);
}

static void statistics_name_the_device_and_its_memory(void **state) {
    const struct test_daemon *daemon = *state;
    int fd = connect_to(daemon->admin, NN_REQ);
    uint64_t memory = metric(fd, "oscard_device_memory_bytes", "");
    assert_in_range(memory, metric(fd, "oscar_memory_budget_bytes", ""),
                    (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE));
    assert_int_equal(metric(fd, "oscard_device_info", "backend=\"host\",device=\"host\",share=\"vmm\""), 1);
    nn_close(fd);
}

static void metrics_have_unique_names_units_and_help(void **state) {
    const struct test_daemon *daemon = *state;
    int fd = connect_to(daemon->admin, NN_REQ);
    struct oscar_admin_reply reply = ask(fd, &(struct oscar_admin_request){.id = 1, .verb = OSCAR_ADMIN_STATS});
    assert_true(reply.metrics > 20);
    for (uint32_t i = 0; i < reply.metrics; i++) {
        assert_int_equal(strncmp(reply.metric[i].name, "oscar", 5), 0);
        assert_true(strlen(reply.metric[i].help) > 0);
        for (uint32_t k = 0; k < i; k++)
            assert_false(strcmp(reply.metric[i].name, reply.metric[k].name) == 0 &&
                         strcmp(reply.metric[i].labels, reply.metric[k].labels) == 0);
    }
    oscar_admin_reply_free(&reply);
    nn_close(fd);
}

/* The next event, or false when none comes in time. */
static bool next_event(int fd, struct oscar_event *ret) {
    uint8_t bytes[1024];
    int length = nn_recv(fd, bytes, sizeof(bytes), 0);
    if (length < 0)
        return false;
    struct oscar_cause cause;
    if (oscar_event_decode(bytes, (size_t)length, ret, &cause) < 0)
        fail_msg("%s", cause.text);
    return true;
}

static void set_patience(int fd, int timeout_ms) {
    assert_int_equal(nn_setsockopt(fd, NN_SOL_SOCKET, NN_RCVTIMEO, &timeout_ms, sizeof(timeout_ms)), 0);
}

static void flush(int requests) {
    struct oscar_admin_reply reply = ask(requests, &(struct oscar_admin_request){.id = 2, .verb = OSCAR_ADMIN_FLUSH});
    oscar_admin_reply_free(&reply);
}

struct expected {
    int requests;
    const char *name;
    uint64_t value;
};

static bool has_value(void *argument) {
    const struct expected *expected = argument;
    return metric(expected->requests, expected->name, "") == expected->value;
}

static void wait_metric(int requests, const char *name, uint64_t value) {
    struct expected expected = {requests, name, value};
    if (!wait_until(has_value, &expected, SETTLE_MS))
        fail_msg("%s is %llu and does not become %llu", name, (unsigned long long)metric(requests, name, ""),
                 (unsigned long long)value);
}

/* What a fill's open sequence leaves to be packed: all but its recent window. */
#define PACKED_A_FILL (RAW_WORKER_PAGES - OSCAR_RECENT_TOKENS / OSCAR_PAGE_TOKENS)

static void events_are_numbered_and_agree_with_the_snapshot(void **state) {
    const struct test_daemon *daemon = *state;
    int requests = connect_to(daemon->admin, NN_REQ), events = connect_to(daemon->events, NN_SUB);
    struct oscar_admin_reply version =
        ask(requests, &(struct oscar_admin_request){.id = 1, .verb = OSCAR_ADMIN_VERSION});
    struct raw_worker worker;
    raw_worker_open(daemon, &worker);
    uint64_t model = raw_worker_open_model(&worker, "default");
    struct oscar_event event;
    /* A subscriber is not there at once: make events until it hears one. */
    uint32_t fills = 0;
    set_patience(events, 300);
    do
        (void)raw_worker_fill(&worker, model, ++fills * 100000);
    while (!next_event(events, &event) && fills < 50);
    set_patience(events, SETTLE_MS);
    /* Then to the last one that there is: nothing happens any more when all is packed. */
    wait_metric(requests, "oscar_pages_packed_total", (uint64_t)fills * PACKED_A_FILL);
    for (uint64_t end = metric(requests, "oscard_events_total", ""); event.sequence < end;)
        assert_true(next_event(events, &event));
    uint64_t last = event.sequence;

    (void)raw_worker_fill(&worker, model, ++fills * 100000);
    wait_metric(requests, "oscar_pages_packed_total", (uint64_t)fills * PACKED_A_FILL);
    unsigned stored = 0;
    for (uint64_t end = metric(requests, "oscard_events_total", ""); last < end;) {
        assert_true(next_event(events, &event));
        assert_int_equal(event.incarnation, version.version.incarnation);
        assert_int_equal(event.sequence, ++last);
        if (event.kind == OSCAR_EVENT_STORED)
            assert_int_equal(event.depth, stored++);
    }
    assert_int_equal(stored, RAW_WORKER_PAGES);
    unsigned pages = 0;
    uint64_t cursor = 0;
    do {
        struct oscar_admin_request request = {.id = 3, .verb = OSCAR_ADMIN_SNAPSHOT, .cursor = cursor};
        struct oscar_admin_reply snapshot = ask(requests, &request);
        assert_int_equal(snapshot.snapshot.sequence, last);
        assert_int_equal(snapshot.snapshot.incarnation, version.version.incarnation);
        pages += snapshot.events;
        cursor = snapshot.snapshot.next_cursor;
        oscar_admin_reply_free(&snapshot);
    } while (cursor != 0);
    assert_int_equal(pages, fills * RAW_WORKER_PAGES);

    raw_worker_close(&worker);
    wait_metric(requests, "oscar_sequences", 0);
    wait_metric(requests, "oscar_pages_packed_total", (uint64_t)fills * RAW_WORKER_PAGES);
    flush(requests);
    bool cleared = false;
    for (uint64_t end = metric(requests, "oscard_events_total", ""); last < end;) {
        assert_true(next_event(events, &event));
        assert_int_equal(event.sequence, ++last);
        cleared |= event.kind == OSCAR_EVENT_CLEARED && !event.has_model;
    }
    assert_true(cleared);
    oscar_admin_reply_free(&version);
    nn_close(events);
    nn_close(requests);
}

static void nonsense_is_answered_with_an_error_and_too_much_with_nothing(void **state) {
    const struct test_daemon *daemon = *state;
    static const size_t sizes[] = {1, 100, 4000};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        int fd = connect_to(daemon->admin, NN_REQ);
        uint8_t bytes[4000];
        memset(bytes, 0xff, sizeof(bytes));
        assert_int_equal(nn_send(fd, bytes, sizes[i], 0), sizes[i]);
        uint8_t *answer;
        int length = nn_recv(fd, &answer, NN_MSG, 0);
        assert_true(length > 0);
        struct oscar_admin_reply reply;
        struct oscar_cause cause;
        assert_int_equal(oscar_admin_reply_decode(answer, (size_t)length, &reply, &cause), 0);
        assert_int_equal(reply.error, OSCAR_ERR_PROTOCOL);
        assert_true(strlen(reply.cause) > 0);
        oscar_admin_reply_free(&reply);
        nn_freemsg(answer);
        nn_close(fd);
    }
    int fd = connect_to(daemon->admin, NN_REQ), timeout = 100;
    static uint8_t large[1000000];
    assert_int_equal(nn_setsockopt(fd, NN_SOL_SOCKET, NN_RCVTIMEO, &timeout, sizeof(timeout)), 0);
    assert_int_equal(nn_send(fd, large, sizeof(large), 0), sizeof(large));
    uint8_t byte;
    assert_true(nn_recv(fd, &byte, 1, 0) < 0);
    nn_close(fd);
    int peer = peer_connect_greeted(daemon->socket, "beside");
    assert_true(peer_ping(peer));
    close(peer);
}

static void only_owner_and_group_reach_the_sockets(void **state) {
    const struct test_daemon *daemon = *state;
    const char *const paths[] = {daemon->socket, daemon->admin, daemon->events};
    for (unsigned i = 0; i < 3; i++) {
        struct stat status;
        assert_int_equal(stat(paths[i], &status), 0);
        assert_int_equal(status.st_mode & 07777, 0660);
    }
    (void)state;
}

/* Root may write everywhere, so the daemon runs as somebody else. */
static void become_nobody(const struct test_daemon *daemon) {
    char notify[96];
    snprintf(notify, sizeof(notify), "%s/notify", daemon->base);
    if (geteuid() != 0)
        return;
    (void)mkdir(daemon->directory, 0700);
    if (chmod(daemon->base, 0755) < 0 || chmod(notify, 0666) < 0 || chown(daemon->directory, 65534, 65534) < 0 ||
        setgroups(0, NULL) < 0 || setgid(65534) < 0 || setuid(65534) < 0)
        _exit(125);
}

/* nanomsg would abort while it closes a socket there. */
static void a_directory_that_became_read_only_does_not_abort_the_stop(void **state) {
    (void)state;
    struct test_daemon *daemon = daemon_start_prepared(NULL, become_nobody);
    assert_int_equal(chmod(daemon->directory, 0500), 0);
    assert_int_equal(daemon_terminate(daemon), 0);
    assert_int_equal(access(daemon->admin, F_OK), 0); /* it could not remove it */
    assert_int_equal(chmod(daemon->directory, 0700), 0);
    daemon_start_again(daemon);
    daemon_stop(daemon);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(version_says_what_serves),
        cmocka_unit_test(counters_count_what_happens),
        cmocka_unit_test(statistics_name_the_device_and_its_memory),
        cmocka_unit_test(metrics_have_unique_names_units_and_help),
        cmocka_unit_test(events_are_numbered_and_agree_with_the_snapshot),
        cmocka_unit_test(nonsense_is_answered_with_an_error_and_too_much_with_nothing),
        cmocka_unit_test(only_owner_and_group_reach_the_sockets),
        cmocka_unit_test(a_directory_that_became_read_only_does_not_abort_the_stop),
    };
    return cmocka_run_group_tests(tests, daemon_setup, daemon_teardown);
}
