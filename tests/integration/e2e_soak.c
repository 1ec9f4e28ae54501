/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Long sessions of agents, in small: several processes, shared prefixes, branches, forks, a cache that is too small, INT2, devices that
 * lag behind, flushes, and now and then a worker that is killed. Every output must be what a worker alone in its own cache would see:
 * the right token's row, as stored or as the codec leaves it.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <cmocka.h>

#include "tests/integration/e2e_daemon.h"
#include "tests/integration/e2e_model.h"
#include "tests/support/worker_process.h"

#define ANSWER_MS 60000
#define BUDGET "8M"
#define WORKERS 3U
#define SESSIONS 4U /* of each worker at a time */
#define OPERATIONS 600U
#define MAX_TOKENS 1200U
#define FLIGHT_MS 20 /* for a prefix that another agent computes */

struct session {
    struct oscar_seq *seq;
    struct text text;
};

struct agent {
    struct e2e_worker worker;
    struct session session[SESSIONS];
    struct oscar_lease *lease;
    uint64_t random;
    uint32_t checked_int2, checked_bf16, refused, hits;
};

struct start {
    uint64_t seed;
    bool asynchronous; /* the agent's device is a stream of its own */
};

static uint32_t below(struct agent *agent, uint32_t bound) { return (uint32_t)(e2e_random(&agent->random) % bound); }

/* One of a few system prompts, one of a few tasks, and then what nobody else has. */
static struct text new_text(struct agent *agent) {
    struct text text = {0};
    text_append(&text, 1 + below(agent, 2), 200 + 64 * below(agent, 3));
    if (below(agent, 3) > 0)
        text_append(&text, 10 + below(agent, 3), 150);
    if (below(agent, 2) > 0)
        text_append(&text, e2e_random(&agent->random), 1 + below(agent, 200));
    return text;
}

static void check(struct agent *agent, struct session *session) {
    uint32_t tokens = e2e_info(session->seq).committed_tokens;
    struct e2e_seen seen = e2e_check_some(&agent->worker, session->seq, &session->text, tokens, &agent->random, 6);
    agent->checked_bf16 += seen.bf16;
    agent->checked_int2 += seen.int2;
}

static void end_session(struct session *session) {
    oscar_seq_close(session->seq);
    text_free(&session->text);
    session->seq = NULL;
}

/* The sequence ends here when there is no space: as a scheduler that preempts. */
static void extend(struct agent *agent, struct session *session) {
    int r = e2e_try_extend(&agent->worker, session->seq, &session->text, session->text.count);
    if (r == OSCAR_ERR_NO_SPACE) {
        agent->refused++;
        end_session(session);
        return;
    }
    check(agent, session);
}

/* As a scheduler does it: what is there stays there until it is opened, or until something else is looked up. */
static void look_up(struct agent *agent, const struct text *text) {
    struct oscar_probe_result result;
    oscar_lease_close(agent->lease);
    MUST(oscar_probe(agent->worker.model, text->ids, text->count, &result, &agent->lease));
}

static void begin_session(struct agent *agent, struct session *session) {
    session->text = new_text(agent);
    if (below(agent, 3) == 0)
        look_up(agent, &session->text);
    uint32_t flags = below(agent, 4) == 0 ? OSCAR_SEQ_DENSE_TAIL : 0;
    session->seq = e2e_open(&agent->worker, &session->text, session->text.count, flags);
    struct oscar_seq_info info = e2e_info(session->seq);
    if (info.in_flight_tokens > info.hit_tokens && below(agent, 2) == 0) {
        int r = oscar_seq_wait(session->seq, FLIGHT_MS);
        if (r != OSCAR_ERR_TIMEOUT)
            MUST(r);
    }
    agent->hits += e2e_info(session->seq).hit_tokens > 0;
    check(agent, session);
    extend(agent, session);
}

static void fork_session(struct agent *agent, struct session *from, struct session *to) {
    if (to->seq != NULL)
        end_session(to);
    int r = oscar_seq_fork(from->seq, agent->worker.stream, &to->seq);
    if (r == OSCAR_ERR_NO_SPACE) {
        to->seq = NULL;
        agent->refused++;
        return;
    }
    MUST(r);
    to->text = text_copy(&from->text, e2e_info(from->seq).committed_tokens);
    text_append(&to->text, e2e_random(&agent->random), 1 + below(agent, 90));
    extend(agent, to);
}

static void operate(struct agent *agent) {
    struct session *session = &agent->session[below(agent, SESSIONS)], *other = &agent->session[below(agent, SESSIONS)];
    if (session->seq == NULL) {
        begin_session(agent, session);
        return;
    }
    switch (below(agent, 6)) {
    case 0:
        end_session(session);
        break;
    case 1:
        if (other != session)
            fork_session(agent, session, other);
        break;
    case 2:
        check(agent, session);
        break;
    default:
        if (session->text.count < MAX_TOKENS)
            text_append(&session->text, e2e_random(&agent->random), 1 + below(agent, 120));
        extend(agent, session);
    }
}

static int play_agent(struct line_pipe *pipe, void *argument) {
    const struct start *start = argument;
    e2e_child();
    struct agent agent = {.random = start->seed};
    e2e_worker_open(&agent.worker, NULL, "agent");
    if (start->asynchronous) {
        struct oscar_stream_params params = {.size = sizeof(params), .asynchronous = 1};
        MUST(oscar_stream_open(agent.worker.client, &params, &agent.worker.stream));
    }
    for (unsigned i = 0; i < OPERATIONS; i++) {
        operate(&agent);
        if (i % 16 == 15 && line_tell(pipe, "going") < 0)
            return 1;
    }
    for (unsigned i = 0; i < SESSIONS; i++) {
        if (agent.session[i].seq != NULL)
            check(&agent, &agent.session[i]), end_session(&agent.session[i]);
    }
    oscar_lease_close(agent.lease);
    oscar_stream_close(agent.worker.stream);
    e2e_worker_close(&agent.worker);
    line_tell(pipe, "done int2=%u bf16=%u refused=%u hits=%u", agent.checked_int2, agent.checked_bf16, agent.refused,
              agent.hits);
    return 0;
}

static uint64_t take_seed(void) {
    const char *given = getenv("OSCAR_TEST_SEED");
    return given != NULL ? strtoull(given, NULL, 0) : (uint64_t)time(NULL);
}

static void agents_that_share_fork_evict_and_die_read_only_their_own_tokens(void **state) {
    struct worker_process process[WORKERS];
    struct start start[WORKERS];
    uint64_t seed = take_seed();
    print_message("seed %llu (OSCAR_TEST_SEED)\n", (unsigned long long)seed);
    for (unsigned i = 0; i < WORKERS; i++) {
        start[i] = (struct start){seed * WORKERS + i, i > 0};
        assert_int_equal(worker_spawn(&process[i], "agent", play_agent, &start[i], sizeof(start[i])), 0);
    }
    /* The last one is killed somewhere on its way, again and again. */
    for (unsigned death = 0; death < 4; death++) {
        char line[128];
        for (unsigned i = 0; i <= death; i++)
            assert_int_equal(line_hear(&process[WORKERS - 1].pipe, line, sizeof(line), ANSWER_MS), 0);
        worker_end(&process[WORKERS - 1]);
        e2e_flush(*state);
        start[WORKERS - 1].seed += 1000003;
        assert_int_equal(
            worker_spawn(&process[WORKERS - 1], "agent", play_agent, &start[WORKERS - 1], sizeof(start[0])), 0);
    }
    uint32_t int2 = 0, bf16 = 0, refused = 0, hits = 0;
    for (unsigned i = 0; i < WORKERS; i++) {
        char line[128];
        int status;
        unsigned value[4];
        do {
            if (line_hear(&process[i].pipe, line, sizeof(line), ANSWER_MS) != 0)
                fail_msg("agent %u has ended, seed %llu", i, (unsigned long long)seed);
        } while (sscanf(line, "done int2=%u bf16=%u refused=%u hits=%u", &value[0], &value[1], &value[2], &value[3]) !=
                 4);
        int2 += value[0], bf16 += value[1], refused += value[2], hits += value[3];
        assert_int_equal(worker_wait(&process[i], ANSWER_MS, &status), 0);
        assert_int_equal(status, 0);
        worker_end(&process[i]);
    }
    print_message("read %u rows as INT2 and %u as BF16, %u hits, %u times no space, %lld evictions\n", int2, bf16, hits,
                  refused, (long long)e2e_metric(*state, "oscar_pages_evicted_total"));
    assert_true(int2 > 0 && bf16 > 0 && hits > 0);
}

static int start_daemon(void **state) { return e2e_start(state, BUDGET); }
static int stop_daemon(void **state) { return e2e_stop(state); }

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(agents_that_share_fork_evict_and_die_read_only_their_own_tokens, start_daemon,
                                        stop_daemon),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
