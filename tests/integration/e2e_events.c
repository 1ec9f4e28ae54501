/* SPDX-License-Identifier: Apache-2.0 */
/* Subscribers to the daemon's events are guests: whatever they do, the daemon's descriptors and its workers do not notice. */
#include <nanomsg/nn.h>
#include <nanomsg/pubsub.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <cmocka.h>

#include "tests/integration/e2e_daemon.h"
#include "tests/integration/e2e_model.h"
#include "tests/support/worker_process.h"

#define ANSWER_MS 30000
#define GUESTS 40U
#define TEXTS 60U

static int subscribe(const struct test_daemon *daemon) {
    char url[128];
    int socket = nn_socket(AF_SP, NN_SUB), timeout = ANSWER_MS;
    snprintf(url, sizeof(url), "ipc://%s", daemon->events);
    REQUIRE(socket >= 0);
    REQUIRE(nn_setsockopt(socket, NN_SUB, NN_SUB_SUBSCRIBE, "", 0) == 0);
    REQUIRE(nn_setsockopt(socket, NN_SOL_SOCKET, NN_RCVTIMEO, &timeout, sizeof(timeout)) == 0);
    REQUIRE(nn_connect(socket, url) >= 0);
    return socket;
}

/* Makes events, `texts` times some; each text is new. */
static void make_events(struct e2e_worker *worker, uint64_t *seed, unsigned texts) {
    for (unsigned i = 0; i < texts; i++) {
        struct text text = {0};
        text_append(&text, ++*seed, 448);
        struct oscar_seq *seq = e2e_open(worker, &text, text.count, 0);
        e2e_extend(worker, seq, &text, text.count);
        oscar_seq_close(seq);
        text_free(&text);
    }
}

struct guest {
    const struct test_daemon *daemon;
};

static int sit(struct line_pipe *pipe, void *argument) {
    e2e_child();
    subscribe(((const struct guest *)argument)->daemon);
    line_tell(pipe, "here");
    char line[16];
    line_hear(pipe, line, sizeof(line), ANSWER_MS);
    return 0;
}

struct count {
    const struct test_daemon *daemon;
    int64_t descriptors;
};

static bool as_few_descriptors(void *argument) {
    const struct count *count = argument;
    return e2e_descriptors(count->daemon) <= count->descriptors;
}

static void subscribers_that_come_and_go_leave_no_descriptor(void **state) {
    struct e2e_worker worker;
    uint64_t seed = 0;
    e2e_worker_open(&worker, e2e_socket(*state), "worker");
    make_events(&worker, &seed, 20);
    struct count before = {*state, e2e_descriptors(*state)};
    for (unsigned i = 0; i < GUESTS; i++) {
        struct guest guest = {*state};
        struct worker_process process;
        char line[16];
        assert_int_equal(worker_fork(&process, "guest", sit, &guest), 0);
        assert_int_equal(line_hear(&process.pipe, line, sizeof(line), ANSWER_MS), 0);
        if (i % 8 == 0)
            make_events(&worker, &seed, 1);
        worker_end(&process); /* by SIGKILL */
    }
    assert_true(wait_until(as_few_descriptors, &before, ANSWER_MS));
    e2e_worker_close(&worker);
}

static void a_subscriber_that_does_not_read_holds_nobody_up(void **state) {
    struct e2e_worker worker;
    struct guest guest = {*state};
    struct worker_process deaf;
    char line[16];
    uint64_t seed = 1000;
    assert_int_equal(worker_fork(&deaf, "deaf", sit, &guest), 0);
    assert_int_equal(line_hear(&deaf.pipe, line, sizeof(line), ANSWER_MS), 0);
    assert_int_equal(worker_signal(&deaf, SIGSTOP), 0);
    int hearing = subscribe(*state);
    e2e_worker_open(&worker, e2e_socket(*state), "worker");
    make_events(&worker, &seed, TEXTS); /* each of them would fail by its deadline if it were held up */
    MUST(oscar_client_ping(worker.client));
    /* The other one hears them all, or sees by the numbers that it has missed some. */
    uint64_t last = 0;
    for (unsigned i = 0; i < 100; i++) {
        void *bytes = NULL;
        struct oscar_event event;
        struct oscar_cause cause = {{0}};
        int length = nn_recv(hearing, &bytes, NN_MSG, 0);
        assert_true(length > 0);
        assert_int_equal(oscar_event_decode(bytes, (size_t)length, &event, &cause), 0);
        nn_freemsg(bytes);
        assert_true(event.sequence > last);
        last = event.sequence;
    }
    nn_close(hearing);
    worker_end(&deaf);
    e2e_worker_close(&worker);
}

static int start(void **state) { return e2e_start(state, "8M"); }

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(subscribers_that_come_and_go_leave_no_descriptor, start, e2e_stop),
        cmocka_unit_test_setup_teardown(a_subscriber_that_does_not_read_holds_nobody_up, start, e2e_stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
