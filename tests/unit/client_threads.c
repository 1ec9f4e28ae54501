/* SPDX-License-Identifier: Apache-2.0 */
/* One client in many threads at once: every reply reaches its caller, with and without deadlines that pass. */
#include <pthread.h>
#include <stdlib.h>

#include "tests/unit/client_fixture.h"

#define THREADS 8U
#define ROUNDS 200U

struct worker {
    pthread_t thread;
    struct client_world *world;
    uint32_t number;
    unsigned wrong, timeouts;
};

static void run_in_threads(struct client_world *world, void *(*body)(void *argument), unsigned *ret_wrong,
                           unsigned *ret_timeouts) {
    struct worker workers[THREADS];
    *ret_wrong = *ret_timeouts = 0;
    for (uint32_t i = 0; i < THREADS; i++) {
        workers[i] = (struct worker){.world = world, .number = i};
        assert_int_equal(pthread_create(&workers[i].thread, NULL, body, &workers[i]), 0);
    }
    for (uint32_t i = 0; i < THREADS; i++) {
        pthread_join(workers[i].thread, NULL);
        *ret_wrong += workers[i].wrong;
        *ret_timeouts += workers[i].timeouts;
    }
}

/* Each thread asks for another length, so that a swapped answer is seen. */
static void *ping_and_probe(void *argument) {
    struct worker *worker = argument;
    uint32_t tokens = (worker->number + 1) * OSCAR_PAGE_TOKENS;
    for (unsigned i = 0; i < ROUNDS; i++) {
        struct oscar_probe_result result = {0, 0};
        worker->wrong += oscar_client_ping(worker->world->client) != 0;
        worker->wrong += oscar_probe(worker->world->model, some_tokens(), tokens, &result, NULL) != 0;
        worker->wrong += result.hit_tokens != tokens;
    }
    return NULL;
}

static void every_reply_reaches_its_caller(void **state) {
    struct client_world *world = *state;
    unsigned wrong, timeouts, before = fake_oscard_count(world->fake, OSCAR_PING);
    fake_oscard_set_hit(world->fake, 4096, 4096);
    run_in_threads(world, ping_and_probe, &wrong, &timeouts);
    assert_int_equal(wrong, 0);
    assert_int_equal(fake_oscard_count(world->fake, OSCAR_PING), before + THREADS * ROUNDS);
}

static void *open_and_close(void *argument) {
    struct worker *worker = argument;
    for (unsigned i = 0; i < ROUNDS / 8; i++) {
        struct oscar_seq *seq;
        struct oscar_lease *lease;
        struct oscar_probe_result result;
        uint16_t out[QUERY_HEADS * HEAD_DIM];
        int r = oscar_seq_open(worker->world->model, some_tokens(), 128, 0, &seq);
        worker->wrong += r != 0;
        if (r < 0)
            continue;
        worker->wrong += attend_once(worker->world->model, seq, 0, out) != 0;
        worker->wrong += oscar_probe(worker->world->model, some_tokens(), 128, &result, &lease) != 0;
        oscar_seq_close(seq);
        oscar_lease_close(lease);
    }
    return NULL;
}

static void sequences_and_leases_are_opened_and_closed_by_all(void **state) {
    struct client_world *world = *state;
    unsigned wrong, timeouts;
    fake_oscard_set_hit(world->fake, 128, 128);
    run_in_threads(world, open_and_close, &wrong, &timeouts);
    assert_int_equal(wrong, 0);
    assert_int_equal(fake_oscard_count(world->fake, OSCAR_SEQ_CLOSE), fake_oscard_count(world->fake, OSCAR_SEQ_OPEN));
    assert_int_equal(fake_oscard_count(world->fake, OSCAR_LEASE_CLOSE), fake_oscard_count(world->fake, OSCAR_PROBE));
}

static void *ping_a_silent_daemon(void *argument) {
    struct worker *worker = argument;
    for (unsigned i = 0; i < 5; i++)
        worker->timeouts += oscar_client_ping(worker->world->client) == OSCAR_ERR_TIMEOUT;
    return NULL;
}

static void deadlines_pass_in_all_threads_and_all_goes_on(void **state) {
    struct client_world *world = *state;
    unsigned wrong, timeouts;
    fake_oscard_hold(world->fake, OSCAR_PING);
    oscar_client_set_timeout(world->client, 10);
    run_in_threads(world, ping_a_silent_daemon, &wrong, &timeouts);
    assert_int_equal(timeouts, THREADS * 5);
    oscar_client_set_timeout(world->client, LONG_MS);
    fake_oscard_let_go(world->fake, OSCAR_PING);
    fake_oscard_set_hit(world->fake, 4096, 4096);
    run_in_threads(world, ping_and_probe, &wrong, &timeouts);
    assert_int_equal(wrong, 0);
}

static void *ping_until_lost(void *argument) {
    struct worker *worker = argument;
    int r = 0;
    for (unsigned i = 0; i < ROUNDS && r == 0; i++)
        r = oscar_client_ping(worker->world->client);
    worker->wrong = r != OSCAR_ERR_DISCONNECTED;
    return NULL;
}

static void *probe_once(void *argument) {
    struct worker *worker = argument;
    if (worker->number > 0)
        return ping_until_lost(argument);
    struct oscar_probe_result result;
    worker->wrong = oscar_probe(worker->world->model, some_tokens(), 64, &result, NULL) != OSCAR_ERR_DISCONNECTED;
    return NULL;
}

static void the_end_of_the_daemon_reaches_all_threads(void **state) {
    struct client_world *world = *state;
    unsigned wrong, timeouts;
    fake_oscard_hold(world->fake, OSCAR_PING); /* all of them wait when it dies */
    fake_oscard_die_at(world->fake, OSCAR_PROBE);
    run_in_threads(world, probe_once, &wrong, &timeouts);
    assert_int_equal(wrong, 0);
}

int main(void) {
#define WORLD_TEST(name) cmocka_unit_test_setup_teardown(name, world_setup, world_teardown)
    const struct CMUnitTest tests[] = {
        WORLD_TEST(every_reply_reaches_its_caller),
        WORLD_TEST(sequences_and_leases_are_opened_and_closed_by_all),
        WORLD_TEST(deadlines_pass_in_all_threads_and_all_goes_on),
        WORLD_TEST(the_end_of_the_daemon_reaches_all_threads),
    };
    return cmocka_run_group_tests_name("client_threads", tests, NULL, NULL);
}
