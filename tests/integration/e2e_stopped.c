/* SPDX-License-Identifier: Apache-2.0 */
/* Processes that stand still: a stopped worker holds nobody up, and a stopped daemon holds no worker longer than its deadline. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

#include "proto/frame.h"
#include "tests/integration/e2e_daemon.h"
#include "tests/integration/e2e_model.h"
#include "tests/support/worker_process.h"

#define ANSWER_MS 30000
#define DEADLINE_MS 150U /* of the calls to a stopped daemon */
#define SLACK_MS 10000   /* what a busy machine may add; an unbounded wait is longer */
#define PINGS 200U
#define STOPPED 6U

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* How far a stander comes. 0: connected, 1: the same, 2: hello, 3: model open, 4: a sequence that others wait for. */

static int connect_raw(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0)
        e2e_fail("cannot connect to %s", path);
    return fd;
}

static int come_so_far(struct line_pipe *pipe, void *argument) {
    unsigned how_far = *(const unsigned *)argument;
    e2e_child();
    struct e2e_worker worker;
    struct text text = {0};
    char line[64];
    text_append(&text, 42, 256);
    if (how_far <= 1) {
        connect_raw(getenv("OSCAR_SOCKET"));
    } else if (how_far == 2) {
        struct oscar_client_options client = {.size = sizeof(client)};
        MUST(oscar_client_open(&client, &worker.client));
    } else {
        e2e_worker_open(&worker, NULL, "stander");
        if (how_far == 4) {
            struct oscar_seq *seq = e2e_open(&worker, &text, text.count, 0);
            MUST(oscar_seq_reserve(seq, 64));
        }
    }
    line_tell(pipe, "here");
    line_hear(pipe, line, sizeof(line), ANSWER_MS);
    return 0;
}

static void a_stopped_peer_holds_nobody_up(void **state) {
    struct worker_process process[STOPPED];
    char line[64];
    for (unsigned i = 0; i < STOPPED; i++) {
        unsigned how_far = i % 5;
        assert_int_equal(worker_spawn(&process[i], "stander", come_so_far, &how_far, sizeof(how_far)), 0);
        assert_int_equal(line_hear(&process[i].pipe, line, sizeof(line), ANSWER_MS), 0);
        assert_int_equal(worker_signal(&process[i], SIGSTOP), 0);
    }
    struct e2e_worker worker;
    struct text text = {0};
    text_append(&text, 1, 600);
    e2e_worker_open(&worker, e2e_socket(*state), "others");
    for (unsigned i = 0; i < PINGS; i++) {
        int64_t begin = now_ms();
        MUST(oscar_client_ping(worker.client));
        assert_true(now_ms() - begin < SLACK_MS);
    }
    struct oscar_seq *seq = e2e_open(&worker, &text, text.count, 0);
    e2e_extend(&worker, seq, &text, text.count);
    e2e_check_all(&worker, seq, &text, text.count);
    /* To wait for what a stopped worker computes ends with the deadline. */
    struct text theirs = {0};
    text_append(&theirs, 42, 256);
    struct oscar_seq *waiting = e2e_open(&worker, &theirs, theirs.count, 0);
    if (e2e_info(waiting).in_flight_tokens > 0) {
        int64_t begin = now_ms();
        REFUSED(oscar_seq_wait(waiting, DEADLINE_MS), OSCAR_ERR_TIMEOUT);
        assert_true(now_ms() - begin < DEADLINE_MS + SLACK_MS);
    }
    e2e_extend(&worker, waiting, &theirs, theirs.count); /* and it may compute it itself */
    /* Its death, too, is seen while it stands still. */
    for (unsigned i = 0; i < STOPPED; i++)
        worker_end(&process[i]);
    e2e_wait_metric(*state, "oscard_clients", 1);
    e2e_worker_close(&worker);
    text_free(&text);
    text_free(&theirs);
}

/* A worker that stands still for long keeps what it holds, whatever the others do: references have no clock. */
static void a_silent_worker_keeps_its_sequence(void **state) {
    struct e2e_worker silent, busy;
    struct text text = {0};
    text_append(&text, 1, 512);
    e2e_worker_open(&silent, e2e_socket(*state), "silent");
    e2e_worker_open(&busy, e2e_socket(*state), "busy");
    struct oscar_seq *seq = e2e_open(&silent, &text, text.count, 0);
    e2e_extend(&silent, seq, &text, text.count);
    /* Several times the whole cache goes by. */
    for (unsigned i = 0; i < 60 || e2e_metric(*state, "oscar_pages_evicted_total") < 60; i++) {
        struct text other = {0};
        text_append(&other, 100 + i, 512);
        struct oscar_seq *theirs = e2e_open(&busy, &other, other.count, 0);
        e2e_extend(&busy, theirs, &other, other.count);
        oscar_seq_close(theirs);
        text_free(&other);
    }
    e2e_check_all(&silent, seq, &text, text.count);
    MUST(oscar_client_ping(silent.client));
    e2e_worker_close(&silent);
    e2e_worker_close(&busy);
    text_free(&text);
}

struct calls {
    struct e2e_worker *worker;
    const struct text *text;
    struct oscar_seq *seq;
    const char *socket;
};

static int call_ping(const struct calls *calls) { return oscar_client_ping(calls->worker->client); }

static int call_probe(const struct calls *calls) {
    struct oscar_probe_result result;
    return oscar_probe(calls->worker->model, calls->text->ids, calls->text->count, &result, NULL);
}

static int call_lease(const struct calls *calls) {
    struct oscar_probe_result result;
    struct oscar_lease *lease;
    return oscar_probe(calls->worker->model, calls->text->ids, calls->text->count, &result, &lease);
}

static int call_adopt(const struct calls *calls) {
    const uint8_t secret[OSCAR_LEASE_SECRET] = {1};
    struct oscar_lease *lease;
    uint32_t hit;
    return oscar_lease_adopt(calls->worker->model, secret, &lease, &hit);
}

static int call_model(const struct calls *calls) {
    struct oscar_model_options options = e2e_model_options(&calls->worker->geometry);
    struct oscar_model *model;
    return oscar_model_open(calls->worker->client, &options, &model);
}

static int call_seq(const struct calls *calls) {
    struct oscar_seq *seq;
    return oscar_seq_open(calls->worker->model, calls->text->ids, calls->text->count, 0, &seq);
}

static int call_reserve(const struct calls *calls) { return oscar_seq_reserve(calls->seq, 1024); }

static int call_fork(const struct calls *calls) {
    struct oscar_seq *fork;
    return oscar_seq_fork(calls->seq, NULL, &fork);
}

static int call_connect(const struct calls *calls) {
    struct oscar_client_options options = {.size = sizeof(options), .socket = calls->socket, .timeout_ms = DEADLINE_MS};
    struct oscar_client *client;
    return oscar_client_open(&options, &client);
}

static const struct {
    const char *name;
    int (*call)(const struct calls *calls);
} every_call[] = {
    {"ping", call_ping},       {"probe", call_probe}, {"probe with lease", call_lease},
    {"adopt", call_adopt},     {"model", call_model}, {"open", call_seq},
    {"reserve", call_reserve}, {"fork", call_fork},   {"connect", call_connect},
};

static bool answers(void *argument) { return oscar_client_ping(((const struct calls *)argument)->worker->client) == 0; }

static void a_stopped_daemon_costs_each_call_its_deadline_and_no_more(void **state) {
    struct e2e_worker worker;
    struct text text = {0};
    text_append(&text, 1, 700);
    e2e_worker_open(&worker, e2e_socket(*state), "patient");
    struct oscar_seq *seq = e2e_open(&worker, &text, 320, 0);
    e2e_extend(&worker, seq, &text, 320);
    struct calls calls = {&worker, &text, seq, e2e_socket(*state)};
    oscar_client_set_timeout(worker.client, DEADLINE_MS);
    for (size_t i = 0; i < sizeof(every_call) / sizeof(every_call[0]); i++) {
        daemon_pause(*state);
        int64_t begin = now_ms();
        int r = every_call[i].call(&calls);
        int64_t took = now_ms() - begin;
        /* What is in the pages needs no daemon. */
        e2e_check_some(&worker, seq, &text, 320, &(uint64_t){i}, 8);
        daemon_resume(*state);
        if (r != OSCAR_ERR_TIMEOUT || took > (int64_t)DEADLINE_MS + SLACK_MS)
            fail_msg("%s: %s after %lld ms", every_call[i].name, oscar_error_name(r), (long long)took);
        /* All goes on with the same connection. */
        assert_true(wait_until(answers, &calls, ANSWER_MS));
        e2e_check_all(&worker, seq, &text, 320);
    }
    oscar_client_set_timeout(worker.client, ANSWER_MS);
    e2e_extend(&worker, seq, &text, text.count);
    e2e_check_all(&worker, seq, &text, text.count);
    e2e_worker_close(&worker);
    text_free(&text);
}

/* The answers to questions that were given up arrive when the daemon goes on: none of them may pass for a later one's. */
static void a_late_answer_is_not_taken_for_a_newer_questions(void **state) {
    struct e2e_worker worker;
    struct text text = {0};
    text_append(&text, 1, 640);
    e2e_worker_open(&worker, e2e_socket(*state), "asker");
    struct oscar_seq *seq = e2e_open(&worker, &text, text.count, 0);
    e2e_extend(&worker, seq, &text, text.count);
    for (uint32_t round = 0; round < 5; round++) {
        daemon_pause(*state);
        oscar_client_set_timeout(worker.client, DEADLINE_MS);
        struct oscar_probe_result result;
        REFUSED(oscar_probe(worker.model, text.ids, 640, &result, NULL), OSCAR_ERR_TIMEOUT);
        REFUSED(oscar_probe(worker.model, text.ids, 64, &result, NULL), OSCAR_ERR_TIMEOUT);
        REFUSED(oscar_probe(worker.model, text.ids, 0, &result, NULL), OSCAR_ERR_TIMEOUT);
        daemon_resume(*state);
        oscar_client_set_timeout(worker.client, ANSWER_MS);
        for (uint32_t count = 64; count <= 576; count += 128)
            assert_int_equal(e2e_probe(&worker, &text, count), count);
    }
    e2e_worker_close(&worker);
    text_free(&text);
}

static int start(void **state) { return e2e_start(state, "64M"); }
static int start_small(void **state) { return e2e_start(state, "6M"); }
static int stop(void **state) { return e2e_stop(state); }

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_stopped_peer_holds_nobody_up, start, stop),
        cmocka_unit_test_setup_teardown(a_silent_worker_keeps_its_sequence, start_small, stop),
        cmocka_unit_test_setup_teardown(a_stopped_daemon_costs_each_call_its_deadline_and_no_more, start, stop),
        cmocka_unit_test_setup_teardown(a_late_answer_is_not_taken_for_a_newer_questions, start, stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
