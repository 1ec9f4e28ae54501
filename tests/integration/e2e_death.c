/* SPDX-License-Identifier: Apache-2.0 */
/* Workers that are killed: at every step of the protocol, and with work in flight. Nothing of theirs stays, nobody else notices. */
#include <errno.h>
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
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

#include "tests/integration/e2e_daemon.h"
#include "tests/integration/e2e_hold.h"
#include "tests/integration/e2e_model.h"
#include "tests/support/worker_process.h"

#define ANSWER_MS 30000
#define BACK_MS 1000     /* from a worker's death to the baseline, mostly */
#define LONGEST_MS 30000 /* the same where the machine stands still meanwhile */
#define KILLS 108U
#define BUSY_PAIRS 20U
#define DENSE_PAGE (64 << 10)

enum step {
    CONNECTED,
    MODEL_OPEN,
    PROBED_WITH_LEASE,
    SEQ_OPEN,
    RESERVED,
    STORED_ONE_LAYER,
    STORED,
    ADVANCED_IN_A_PAGE,
    ADVANCED_OVER_PAGES,
    ADVANCED_INTO_HISTORY,
    FORKED,
    CLOSED_ONE,
    STEPS,
};

struct victim {
    enum step step;
    uint64_t seed;
};

/* A process that begins with a GPU takes its time: there, every step once. */
static unsigned at_most_on_gpu(unsigned count, unsigned on_gpu) {
    return strcmp(daemon_backend(), "cuda") == 0 ? on_gpu : count;
}

static int stop_here(struct line_pipe *pipe) {
    char line[64];
    line_tell(pipe, "here");
    line_hear(pipe, line, sizeof(line), ANSWER_MS);
    return 1; /* the parent was to kill us */
}

/* Goes through the protocol as far as its step and stands there. */
static int walk(struct line_pipe *pipe, void *argument) {
    const struct victim *victim = argument;
    e2e_child();
    struct e2e_worker worker = {.geometry = e2e_geometry()};
    struct text text = {0};
    text_append(&text, 7, 192); /* all victims share a prefix */
    text_append(&text, victim->seed, 448);
    struct oscar_client_options client = {.size = sizeof(client), .name = "victim"};
    MUST(oscar_client_open(&client, &worker.client));
    if (victim->step == CONNECTED)
        return stop_here(pipe);
    oscar_client_close(worker.client);
    e2e_worker_open(&worker, NULL, "victim");
    if (victim->step == MODEL_OPEN)
        return stop_here(pipe);
    struct oscar_lease *lease;
    struct oscar_probe_result probed;
    MUST(oscar_probe(worker.model, text.ids, text.count, &probed, &lease));
    if (victim->step == PROBED_WITH_LEASE)
        return stop_here(pipe);
    struct oscar_seq *seq = e2e_open(&worker, &text, text.count, 0), *fork;
    uint32_t hit = e2e_info(seq).hit_tokens;
    if (victim->step == SEQ_OPEN)
        return stop_here(pipe);
    MUST(oscar_seq_reserve(seq, 100));
    if (victim->step == RESERVED)
        return stop_here(pipe);
    e2e_store_layer(&worker, seq, NULL, &text, 0, hit, 30);
    if (victim->step == STORED_ONE_LAYER)
        return stop_here(pipe);
    e2e_store(&worker, seq, NULL, &text, hit, 30);
    if (victim->step == STORED)
        return stop_here(pipe);
    MUST(oscar_seq_advance(seq, NULL, text.ids + hit, 30));
    if (victim->step == ADVANCED_IN_A_PAGE)
        return stop_here(pipe);
    e2e_extend(&worker, seq, &text, hit + 150);
    if (victim->step == ADVANCED_OVER_PAGES)
        return stop_here(pipe);
    e2e_extend(&worker, seq, &text, text.count - 1);
    if (victim->step == ADVANCED_INTO_HISTORY)
        return stop_here(pipe);
    MUST(oscar_seq_fork(seq, NULL, &fork));
    if (victim->step == FORKED)
        return stop_here(pipe);
    oscar_seq_close(seq);
    return stop_here(pipe);
}

struct baseline {
    const struct test_daemon *daemon;
    int64_t clients, sequences, leases, quarantined;
    int64_t descriptors;
    unsigned deaths, late; /* that it was awaited after, and more than BACK_MS after */
};

static struct baseline take_baseline(const struct test_daemon *daemon) {
    struct oscar_admin_reply metrics = e2e_metrics(daemon);
    struct baseline now = {daemon,
                           e2e_metric_of(&metrics, "oscard_clients"),
                           e2e_metric_of(&metrics, "oscar_sequences"),
                           e2e_metric_of(&metrics, "oscar_leases"),
                           e2e_metric_of(&metrics, E2E_QUARANTINED),
                           e2e_descriptors(daemon),
                           0,
                           0};
    oscar_admin_reply_free(&metrics);
    return now;
}

static bool is_back(void *argument) {
    const struct baseline *was = argument;
    struct baseline now = take_baseline(was->daemon);
    return now.clients == was->clients && now.sequences == was->sequences && now.leases == was->leases &&
           now.quarantined == was->quarantined && now.descriptors <= was->descriptors;
}

static void must_be_back(struct baseline *was, const char *what, unsigned round, unsigned step) {
    was->deaths++;
    if (wait_until(is_back, was, BACK_MS))
        return;
    was->late++;
    if (wait_until(is_back, was, LONGEST_MS))
        return;
    struct baseline now = take_baseline(was->daemon);
    fail_msg("%s %u, killed at step %u: %lld clients, %lld sequences, %lld leases, %lld bytes quarantined, %lld "
             "descriptors (were %lld)",
             what, round, step, (long long)now.clients, (long long)now.sequences, (long long)now.leases,
             (long long)now.quarantined, (long long)now.descriptors, (long long)was->descriptors);
}

/* Most of them: any single one may be late on a busy machine. */
static void must_have_been_back_soon(const struct baseline *was) {
    if (2 * was->late >= was->deaths)
        fail_msg("%u of %u deaths were noticed more than %d ms later", was->late, was->deaths, BACK_MS);
}

static void a_worker_killed_at_any_step_leaves_nothing_behind(void **state) {
    struct e2e_worker witness;
    struct text text = {0};
    text_append(&text, 99, 400);
    e2e_worker_open(&witness, e2e_socket(*state), "witness");
    struct oscar_seq *seq = e2e_open(&witness, &text, text.count, 0);
    e2e_extend(&witness, seq, &text, text.count);
    /* 400 tokens: the sink, one INT2 page, five in BF16 (the last one not full). */
    e2e_settle(seq, 64);
    e2e_wait_metric(*state, E2E_USED_DENSE, 5 * DENSE_PAGE);
    struct baseline baseline = take_baseline(*state);
    int64_t bytes = e2e_metric(*state, E2E_USED);
    unsigned kills = at_most_on_gpu(KILLS, STEPS);
    for (unsigned i = 0; i < kills; i++) {
        struct victim victim = {(enum step)(i % STEPS), 1000 + i};
        struct worker_process process;
        char line[64];
        assert_int_equal(worker_spawn(&process, "victim", walk, &victim, sizeof(victim)), 0);
        if (line_hear(&process.pipe, line, sizeof(line), ANSWER_MS) != 0)
            fail_msg("victim %u has not reached step %u", i, i % STEPS);
        worker_end(&process);
        must_be_back(&baseline, "victim", i, i % STEPS);
        if (i % STEPS == STEPS - 1) {
            /* What they had sealed is cached, for whoever comes; without it the bytes are those of before. */
            e2e_flush(*state);
            e2e_wait_metric(*state, E2E_USED, bytes);
            e2e_check_all(&witness, seq, &text, text.count);
        }
    }
    must_have_been_back_soon(&baseline);
    e2e_worker_close(&witness);
    text_free(&text);
}

/* Waits for a prefix that somebody else has begun to compute. */
static int wait_long(struct line_pipe *pipe, void *argument) {
    const struct victim *victim = argument;
    e2e_child();
    struct e2e_worker worker;
    struct text text = {0};
    text_append(&text, victim->seed, 320);
    e2e_worker_open(&worker, NULL, "waiting");
    oscar_client_set_timeout(worker.client, ANSWER_MS);
    struct oscar_seq *seq = e2e_open(&worker, &text, text.count, 0);
    line_tell(pipe, "in flight %u", e2e_info(seq).in_flight_tokens);
    MUST(oscar_seq_wait(seq, ANSWER_MS));
    return 0;
}

static void a_worker_killed_while_it_waits_leaves_nothing_behind(void **state) {
    struct e2e_worker witness;
    struct text text = {0};
    text_append(&text, 4, 320);
    e2e_worker_open(&witness, e2e_socket(*state), "computing");
    struct oscar_seq *seq = e2e_open(&witness, &text, text.count, 0);
    MUST(oscar_seq_reserve(seq, text.count));
    struct baseline baseline = take_baseline(*state);
    unsigned kills = at_most_on_gpu(10, 2);
    for (unsigned i = 0; i < kills; i++) {
        struct victim victim = {SEQ_OPEN, 4};
        struct worker_process process;
        char line[64];
        assert_int_equal(worker_spawn(&process, "waiting", wait_long, &victim, sizeof(victim)), 0);
        assert_int_equal(line_hear(&process.pipe, line, sizeof(line), ANSWER_MS), 0);
        assert_string_equal(line, "in flight 320");
        e2e_wait_metric(*state, "oscar_flight_waiting", 1);
        worker_end(&process);
        must_be_back(&baseline, "waiting", i, SEQ_OPEN);
        assert_int_equal(e2e_metric(*state, "oscar_flight_waiting"), 0);
    }
    must_have_been_back_soon(&baseline);
    e2e_extend(&witness, seq, &text, text.count);
    e2e_check_all(&witness, seq, &text, text.count);
    e2e_worker_close(&witness);
    text_free(&text);
}

static int begin_and_stay(struct line_pipe *pipe, void *argument) {
    const struct victim *victim = argument;
    e2e_child();
    struct e2e_worker worker;
    struct text text = {0};
    text_append(&text, victim->seed, 320);
    e2e_worker_open(&worker, NULL, "computing");
    struct oscar_seq *seq = e2e_open(&worker, &text, text.count, 0);
    e2e_extend(&worker, seq, &text, 100);
    return stop_here(pipe);
}

static void who_waits_for_a_worker_that_is_killed_is_told_at_once(void **state) {
    struct e2e_worker waiting;
    struct text text = {0};
    struct victim victim = {STORED, 6};
    struct worker_process process;
    char line[64];
    text_append(&text, 6, 320);
    assert_int_equal(worker_spawn(&process, "computing", begin_and_stay, &victim, sizeof(victim)), 0);
    assert_int_equal(line_hear(&process.pipe, line, sizeof(line), ANSWER_MS), 0);
    e2e_worker_open(&waiting, e2e_socket(*state), "waiting");
    oscar_client_set_timeout(waiting.client, ANSWER_MS);
    struct oscar_seq *seq = e2e_open(&waiting, &text, text.count, 0);
    assert_int_equal(e2e_info(seq).hit_tokens, 64);
    assert_int_equal(e2e_info(seq).in_flight_tokens, 320);
    worker_signal(&process, SIGKILL);
    MUST(oscar_seq_wait(seq, ANSWER_MS)); /* not its deadline: that would be OSCAR_ERR_TIMEOUT */
    assert_int_equal(e2e_info(seq).hit_tokens, 64);
    e2e_extend(&waiting, seq, &text, text.count);
    e2e_check_all(&waiting, seq, &text, text.count);
    worker_end(&process);
    e2e_worker_close(&waiting);
    text_free(&text);
}

static int keep_busy(struct line_pipe *pipe, void *argument) {
    const struct victim *victim = argument;
    e2e_child();
    struct e2e_worker worker;
    uint64_t random = victim->seed;
    for (;;) {
        struct text text = {0};
        text_append(&text, 7, 192);
        text_append(&text, e2e_random(&random) % 8, 320);
        e2e_worker_open(&worker, NULL, "busy");
        struct oscar_seq *seq = e2e_open(&worker, &text, text.count, 0);
        e2e_extend(&worker, seq, &text, text.count);
        e2e_check_some(&worker, seq, &text, text.count, &random, 4);
        e2e_worker_close(&worker);
        text_free(&text);
        if (line_tell(pipe, "round") < 0)
            return 0;
    }
}

static void workers_killed_at_random_instants_leave_nothing_behind(void **state) {
    struct baseline baseline = take_baseline(*state);
    uint64_t random = 5;
    unsigned pairs = at_most_on_gpu(BUSY_PAIRS, 3);
    for (unsigned i = 0; i < pairs; i++) {
        struct victim victim = {CONNECTED, i};
        struct worker_process process[2];
        char line[64];
        for (unsigned p = 0; p < 2; p++)
            assert_int_equal(worker_spawn(&process[p], "busy", keep_busy, &victim, sizeof(victim)), 0);
        /* As many rounds as chance has it, and then wherever it happens to be. */
        for (uint64_t rounds = e2e_random(&random) % 4 + 1; rounds > 0; rounds--)
            assert_int_equal(line_hear(&process[rounds % 2].pipe, line, sizeof(line), ANSWER_MS), 0);
        for (unsigned p = 0; p < 2; p++)
            worker_end(&process[p]);
        must_be_back(&baseline, "busy pair", i, 0);
    }
    must_have_been_back_soon(&baseline);
    e2e_flush(*state);
    e2e_wait_metric(*state, E2E_USED, 0);
}

/* Enqueues more than its device can do before it is killed: stores into its own pages, reads of everybody's. */
static int enqueue_much(struct line_pipe *pipe, void *argument) {
    const struct victim *victim = argument;
    e2e_child();
    struct e2e_worker worker;
    struct text text = {0};
    uint64_t random = victim->seed;
    struct oscar_stream_params params = {.size = sizeof(params), .threads = 1, .asynchronous = 1};
    text_append(&text, 99, 400); /* the witness's */
    text_append(&text, victim->seed, 600);
    e2e_worker_open(&worker, NULL, "at work");
    MUST(oscar_stream_open(worker.client, &params, &worker.stream));
    struct oscar_seq *seq = e2e_open(&worker, &text, text.count, 0);
    uint32_t hit = e2e_info(seq).hit_tokens;
    const struct oscar_geometry *geometry = &worker.geometry;
    size_t row = (size_t)geometry->query_heads * geometry->head_dim;
    struct device_buffer *q = e2e_buffer_poisoned(&worker, text.count * row);
    struct device_buffer *out = e2e_buffer_poisoned(&worker, text.count * row);
    MUST(oscar_seq_reserve(seq, text.count - hit));
    for (unsigned round = 0; round < 60; round++) {
        e2e_store(&worker, seq, worker.stream, &text, hit, text.count - hit);
        const struct oscar_attend_query query = {.seq = seq,
                                                 .tokens = text.count,
                                                 .rows = text.count,
                                                 .q = q->data,
                                                 .q_row_stride = (int64_t)row,
                                                 .q_head_stride = geometry->head_dim,
                                                 .out = out->data,
                                                 .out_row_stride = (int64_t)row,
                                                 .out_head_stride = geometry->head_dim};
        for (unsigned repeat = 0; repeat < 20; repeat++)
            MUST(oscar_attend(worker.model, worker.stream, (uint32_t)(e2e_random(&random) % 2), 0, &query, 1));
        if (round == victim->seed % 4)
            line_tell(pipe, "at work");
    }
    return stop_here(pipe);
}

static void a_worker_killed_while_its_device_works_leaves_nothing_behind(void **state) {
    struct e2e_worker witness;
    struct text text = {0};
    text_append(&text, 99, 400);
    e2e_worker_open(&witness, e2e_socket(*state), "witness");
    struct oscar_seq *seq = e2e_open(&witness, &text, text.count, 0);
    e2e_extend(&witness, seq, &text, text.count);
    e2e_settle(seq, 64);
    e2e_wait_metric(*state, E2E_USED_DENSE, 5 * DENSE_PAGE);
    struct baseline baseline = take_baseline(*state);
    unsigned kills = at_most_on_gpu(12, 4);
    for (unsigned i = 0; i < kills; i++) {
        struct victim victim = {STORED, 2000 + i};
        struct worker_process process;
        char line[64];
        assert_int_equal(worker_spawn(&process, "at work", enqueue_much, &victim, sizeof(victim)), 0);
        if (line_hear(&process.pipe, line, sizeof(line), ANSWER_MS) != 0)
            fail_msg("victim %u has nothing to do", i);
        worker_end(&process);
        must_be_back(&baseline, "at work", i, STORED);
        e2e_check_all(&witness, seq, &text, text.count);
    }
    must_have_been_back_soon(&baseline);
    e2e_worker_close(&witness);
    text_free(&text);
}

/* The worker's end of the daemon's socket, among this process's descriptors. */
static int find_connection(const char *socket_path) {
    for (int fd = 3; fd < 1024; fd++) {
        struct sockaddr_un peer;
        socklen_t length = sizeof(peer);
        memset(&peer, 0, sizeof(peer));
        if (getpeername(fd, (struct sockaddr *)&peer, &length) == 0 && peer.sun_family == AF_UNIX &&
            strcmp(peer.sun_path, socket_path) == 0)
            return fd;
    }
    e2e_fail("no connection to %s", socket_path);
}

/* Its socket is closed and its device is not: the writes are still to come. */
static int write_late(struct line_pipe *pipe, void *argument) {
    const struct victim *victim = argument;
    e2e_child();
    struct e2e_worker worker;
    struct e2e_hold hold;
    struct text text = {0};
    char line[64];
    text_append(&text, victim->seed, 640);
    e2e_worker_open(&worker, NULL, "late");
    e2e_hold_open(&hold, worker.client);
    struct oscar_seq *seq = e2e_open(&worker, &text, text.count, 0);
    MUST(oscar_seq_reserve(seq, text.count));
    e2e_hold_up(&hold);
    e2e_store(&worker, seq, hold.stream, &text, 0, text.count);
    shutdown(find_connection(getenv("OSCAR_SOCKET")), SHUT_RDWR);
    line_tell(pipe, "closed");
    if (line_hear(pipe, line, sizeof(line), ANSWER_MS) < 0)
        return 1;
    e2e_hold_release(&hold);
    MUST(oscar_stream_wait(hold.stream, ANSWER_MS));
    line_tell(pipe, "written");
    line_hear(pipe, line, sizeof(line), ANSWER_MS);
    return 0;
}

static void pages_of_a_closed_socket_are_quarantined_until_the_process_exits(void **state) {
    struct victim victim = {STORED, 3};
    struct worker_process process;
    char line[64];
    assert_int_equal(worker_spawn(&process, "late", write_late, &victim, sizeof(victim)), 0);
    assert_int_equal(line_hear(&process.pipe, line, sizeof(line), ANSWER_MS), 0);
    e2e_wait_metric(*state, "oscard_clients", 0);
    assert_true(e2e_metric(*state, E2E_QUARANTINED) >= 640 / OSCAR_PAGE_TOKENS * DENSE_PAGE);

    /* Others use all the rest of the memory; nobody is given a page that is still written to. */
    enum { TEXTS = 40 };
    struct e2e_worker worker;
    struct text text[TEXTS] = {{0}};
    struct oscar_seq *seq[TEXTS];
    unsigned opened = 0;
    e2e_worker_open(&worker, e2e_socket(*state), "others");
    for (; opened < TEXTS; opened++) {
        text_append(&text[opened], 500 + opened, 512);
        seq[opened] = e2e_open(&worker, &text[opened], 512, 0);
        if (e2e_extend_or_full(&worker, seq[opened], &text[opened], 512) < 0)
            break;
    }
    assert_true(opened >= 2 && opened < TEXTS);
    assert_int_equal(line_tell(&process.pipe, "write"), 0);
    assert_int_equal(line_hear(&process.pipe, line, sizeof(line), ANSWER_MS), 0);
    for (unsigned i = 0; i < opened; i++)
        e2e_check_all(&worker, seq[i], &text[i], 512);
    assert_true(e2e_metric(*state, E2E_QUARANTINED) >= 640 / OSCAR_PAGE_TOKENS * DENSE_PAGE);

    worker_end(&process);
    e2e_wait_metric(*state, E2E_QUARANTINED, 0);
    e2e_worker_close(&worker);
    for (unsigned i = 0; i < TEXTS; i++)
        text_free(&text[i]);
}

static int start(void **state) { return e2e_start(state, "64M"); }
static int start_small(void **state) { return e2e_start(state, "3M"); }
static int stop(void **state) { return e2e_stop(state); }

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_worker_killed_at_any_step_leaves_nothing_behind, start, stop),
        cmocka_unit_test_setup_teardown(a_worker_killed_while_it_waits_leaves_nothing_behind, start, stop),
        cmocka_unit_test_setup_teardown(who_waits_for_a_worker_that_is_killed_is_told_at_once, start, stop),
        cmocka_unit_test_setup_teardown(workers_killed_at_random_instants_leave_nothing_behind, start, stop),
        cmocka_unit_test_setup_teardown(a_worker_killed_while_its_device_works_leaves_nothing_behind, start, stop),
        cmocka_unit_test_setup_teardown(pages_of_a_closed_socket_are_quarantined_until_the_process_exits, start_small,
                                        stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
