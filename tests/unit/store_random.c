/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random operations by several clients, among them forks, flushes, deaths, late fences, failing device calls and budgets that are too
 * small, compared with what events and replies say: no wrong page, no hole, no page reused under a reader, every counter exact.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
/* cmocka needs the headers above */
#include <cmocka.h>

#include "tests/support/store_oracle.h"

#define PAGE OSCAR_PAGE_TOKENS
#define CLIENTS 4
#define SEQS 24
#define LEASES 8
#define PROMPTS 10
#define MAX_TOKENS (28 * PAGE)
#define CLOSED_SEQS 64

struct expected {
    uint64_t opens, open_hits, queried, hits, probes, forks, no_space, clients, leases, sequences;
};

struct closed {
    struct rig_client *client;
    uint32_t fence_slot;
    uint64_t fence;
};

struct world {
    struct rig rig;
    struct oracle oracle;
    uint64_t random;
    struct rig_client *client[CLIENTS]; /* NULL, or dead[i] until its process has exited */
    bool dead[CLIENTS];
    struct rig_seq *seq[SEQS];
    bool forking[SEQS], failed[SEQS];
    uint64_t fork_id[SEQS];
    uint32_t prompt_of[SEQS];
    struct closed closed[CLOSED_SEQS]; /* their counters have not reached their last fence */
    uint32_t closeds;
    struct {
        struct rig_client *client;
        uint64_t handle;
        uint8_t secret[OSCAR_LEASE_SECRET_BYTES];
        uint32_t prompt, pages;
    } lease[LEASES];
    uint32_t prompt[PROMPTS][MAX_TOKENS], prompt_tokens[PROMPTS];
    bool held;
    uint32_t leaving; /* clients whose process has exited, while an inspection of theirs may still run */
    struct expected expected;
};

static uint32_t below(struct world *world, uint32_t bound) {
    world->random = world->random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)((world->random >> 33) % bound);
}

static bool one_in(struct world *world, uint32_t n) { return below(world, n) == 0; }

/* Most prompts begin as another one does, for a random length. */
static void new_prompt(struct world *world, uint32_t i) {
    uint32_t other = below(world, PROMPTS), shared = below(world, world->prompt_tokens[other] + 1);
    if (one_in(world, 8))
        shared = 0;
    memmove(world->prompt[i], world->prompt[other], shared * sizeof(uint32_t));
    rig_tokens(below(world, 1U << 30), shared, MAX_TOKENS - shared, world->prompt[i] + shared);
    world->prompt_tokens[i] = 1 + below(world, MAX_TOKENS);
}

static void count_error(struct world *world, int r) { world->expected.no_space += r == OSCAR_ERR_NO_SPACE; }

static int free_seq(const struct world *world) {
    for (int i = 0; i < SEQS; i++)
        if (!world->seq[i])
            return i;
    return -1;
}

static int random_seq(struct world *world) {
    int i = (int)below(world, SEQS);
    bool usable = world->seq[i] && !world->forking[i];
    for (int k = 0; k < CLIENTS && usable; k++)
        usable = !(world->dead[k] && world->seq[i]->client == world->client[k]);
    return usable ? i : -1;
}

static int random_client(struct world *world) {
    int i = (int)below(world, CLIENTS);
    return world->client[i] && !world->dead[i] ? i : -1;
}

static void took_fork(struct world *world, int parent, struct rig_seq *child) {
    int i = free_seq(world);
    world->expected.forks++;
    if (i < 0) {
        rig_seq_close(child, true);
        return;
    }
    world->expected.sequences++;
    world->seq[i] = child;
    world->forking[i] = world->failed[i] = false;
    world->prompt_of[i] = world->prompt_of[parent];
}

/* Takes the answers to parked calls. */
static void take_answers(struct world *world) {
    for (int i = 0; i < SEQS; i++) {
        if (!world->seq[i] || !world->forking[i])
            continue;
        const struct oscar_reply *reply = rig_answered(world->seq[i]->client, world->fork_id[i]);
        if (!reply)
            continue;
        world->forking[i] = false;
        count_error(world, reply->error);
        if (reply->error == 0)
            took_fork(world, i, rig_seq_forked(world->seq[i], reply));
        else if (reply->error == OSCAR_ERR_NOT_FINITE)
            world->failed[i] = true;
    }
    for (int i = 0; i < CLIENTS; i++)
        if (world->client[i])
            world->client[i]->answers = 0;
}

static void op_open(struct world *world) {
    int client = random_client(world), i = free_seq(world);
    if (client < 0 || i < 0)
        return;
    uint32_t prompt = below(world, PROMPTS), count = below(world, world->prompt_tokens[prompt] + 1);
    bool dense_tail = one_in(world, 4);
    oracle_follow(&world->oracle, &world->rig);
    uint32_t hit = oracle_hit(&world->oracle, world->prompt[prompt], count / PAGE) * PAGE;
    int r = rig_seq_open(world->client[client], world->prompt[prompt], count, dense_tail, &world->seq[i]);
    assert_int_equal(r, 0);
    struct rig_seq *seq = world->seq[i];
    if (dense_tail && seq->committed != hit)
        assert_int_equal(seq->committed, hit > 4 * PAGE ? hit - 4 * PAGE : 0);
    else
        assert_int_equal(seq->committed, hit);
    if (dense_tail && seq->committed == hit)
        for (uint32_t page = hit / PAGE > 4 ? hit / PAGE - 4 : 1; page < hit / PAGE; page++)
            assert_int_equal(rig_seq_form(seq, page), OSCAR_FORM_DENSE);
    world->forking[i] = world->failed[i] = false;
    world->prompt_of[i] = prompt;
    world->expected.opens++;
    world->expected.open_hits += seq->committed > 0;
    world->expected.queried += count;
    world->expected.hits += seq->committed;
    world->expected.sequences++;
    rig_seq_check(seq);
}

/* The sequence's page will not pass its inspection, if that has not begun: its content is no longer compared. */
static void poison(struct world *world, int i, uint32_t page) {
    struct rig_seq *seq = world->seq[i];
    rig_address(seq->client, seq->page[page])[0] = FAKE_NOT_FINITE;
    world->failed[i] = true;
}

static void op_advance(struct world *world) {
    int i = random_seq(world);
    if (i < 0)
        return;
    struct rig_seq *seq = world->seq[i];
    uint32_t count = one_in(world, 8) ? 0 : one_in(world, 4) ? below(world, 10 * PAGE) : below(world, 100);
    if (seq->committed + count > MAX_TOKENS)
        count = MAX_TOKENS - seq->committed;
    int r = rig_seq_reserve(seq, count + (one_in(world, 4) ? below(world, 100) : 0));
    count_error(world, r);
    if (r == OSCAR_ERR_NOT_FINITE) {
        world->failed[i] = true;
        return;
    }
    if (r < 0) {
        assert_int_equal(r, OSCAR_ERR_NO_SPACE);
        return;
    }
    uint32_t tokens[MAX_TOKENS];
    memcpy(tokens, world->prompt[world->prompt_of[i]] + seq->committed, count * sizeof *tokens);
    if (one_in(world, 6) && count > 0)
        tokens[below(world, count)] ^= 1 + below(world, 100); /* goes its own way */
    uint32_t before = seq->committed;
    r = rig_seq_advance(seq, tokens, count);
    if (r == 0 && one_in(world, 150) && seq->committed / PAGE > before / PAGE)
        poison(world, i, before / PAGE);
    if (r < 0) {
        assert_int_equal(r, OSCAR_ERR_NOT_FINITE);
        world->failed[i] = true;
    }
    if (one_in(world, 2))
        rig_seq_signal(seq);
}

static void op_signal(struct world *world) {
    int i = random_seq(world);
    if (i >= 0)
        rig_seq_signal(world->seq[i]);
    if (world->closeds > 0 && one_in(world, 2)) {
        uint32_t k = below(world, world->closeds);
        struct closed *closed = &world->closed[k];
        atomic_store(&closed->client->fences[closed->fence_slot], closed->fence);
        *closed = world->closed[--world->closeds];
    }
}

static void op_close(struct world *world) {
    int i = random_seq(world);
    if (i < 0)
        return;
    struct rig_seq *seq = world->seq[i];
    bool signal = world->closeds == CLOSED_SEQS || one_in(world, 2);
    if (!signal)
        world->closed[world->closeds++] =
            (struct closed){.client = seq->client, .fence_slot = seq->fence_slot, .fence = seq->fence + 2};
    rig_seq_close(seq, signal);
    world->seq[i] = NULL;
    world->expected.sequences--;
}

static void op_fork(struct world *world) {
    int i = random_seq(world);
    if (i < 0)
        return;
    struct rig_seq *child = NULL;
    int r = rig_seq_fork(world->seq[i], &child);
    count_error(world, r);
    take_answers(world);
    if (r == OSCAR_PARKED) {
        world->forking[i] = true;
        world->fork_id[i] = world->seq[i]->client->request_id;
    } else if (r == 0) {
        took_fork(world, i, child);
    } else if (r == OSCAR_ERR_NOT_FINITE) {
        world->failed[i] = true;
    }
}

static void op_extend(struct world *world) {
    int i = random_seq(world);
    if (i < 0)
        return;
    uint32_t before = world->seq[i]->committed, available;
    const uint32_t *prompt = world->prompt[world->prompt_of[i]];
    for (uint32_t k = 0; k < before; k++)
        if (world->seq[i]->tokens[k] != prompt[k])
            return; /* it went its own way, or the prompt is another one now */
    int r = rig_seq_wait(world->seq[i], below(world, 3), &available);
    assert_true(r == 0 || r == OSCAR_PARKED || r == OSCAR_ERR_STATE || r == OSCAR_ERR_TIMEOUT);
    r = rig_seq_extend(world->seq[i], prompt,
                       world->prompt_tokens[world->prompt_of[i]] > before ? world->prompt_tokens[world->prompt_of[i]]
                                                                          : before);
    assert_true(r == 0 || r == OSCAR_ERR_STATE);
    if (r == 0) {
        assert_true(world->seq[i]->committed >= before);
        world->expected.hits += world->seq[i]->committed - before;
        rig_seq_check(world->seq[i]);
    }
}

static void op_probe(struct world *world) {
    int client = random_client(world), i = (int)below(world, LEASES);
    if (client < 0)
        return;
    uint32_t prompt = below(world, PROMPTS), count = world->prompt_tokens[prompt];
    oracle_follow(&world->oracle, &world->rig);
    uint32_t hit = oracle_hit(&world->oracle, world->prompt[prompt], count / PAGE) * PAGE;
    assert_int_equal(rig_probe(world->client[client], world->prompt[prompt], count), hit);
    world->expected.probes++;
    struct oscar_reply reply = {0};
    if (world->lease[i].client) {
        bool adopt = one_in(world, 2);
        struct oscar_request request = {.verb = OSCAR_LEASE_CLOSE, .lease_close.lease = world->lease[i].handle};
        if (adopt) {
            request =
                (struct oscar_request){.verb = OSCAR_LEASE_ADOPT, .lease_adopt.model = world->client[client]->model};
            memcpy(request.lease_adopt.secret, world->lease[i].secret, OSCAR_LEASE_SECRET_BYTES);
        }
        assert_int_equal(rig_request(adopt ? world->client[client] : world->lease[i].client, &request, &reply), 0);
        if (adopt) {
            world->lease[i].client = world->client[client];
            world->lease[i].handle = reply.lease_adopt.lease;
        } else {
            world->lease[i].client = NULL;
            world->expected.leases--;
        }
        return;
    }
    struct oscar_request request = {.verb = OSCAR_PROBE, .probe = {world->client[client]->model, count, true}};
    assert_int_equal(rig_request(world->client[client], &request, &reply), 0);
    assert_int_equal(reply.probe.hit_tokens, hit);
    world->expected.probes++;
    world->expected.leases++;
    world->lease[i].client = world->client[client];
    world->lease[i].handle = reply.probe.lease;
    memcpy(world->lease[i].secret, reply.probe.secret, OSCAR_LEASE_SECRET_BYTES);
}

static void op_death(struct world *world) {
    int i = (int)below(world, CLIENTS);
    if (!world->client[i]) {
        world->client[i] = rig_client_new(&world->rig, "group");
        world->dead[i] = false;
        world->expected.clients++;
        return;
    }
    if (!world->dead[i]) {
        rig_client_gone(world->client[i]);
        world->dead[i] = true;
        for (int k = 0; k < SEQS; k++)
            if (world->seq[k] && world->seq[k]->client == world->client[i]) {
                world->forking[k] = false;
                world->expected.sequences--;
            }
        for (int k = 0; k < LEASES; k++)
            if (world->lease[k].client == world->client[i]) {
                world->lease[k].client = NULL;
                world->expected.leases--;
            }
        return;
    }
    for (int k = 0; k < SEQS; k++)
        if (world->seq[k] && world->seq[k]->client == world->client[i]) {
            rig_seq_forget(world->seq[k]);
            world->seq[k] = NULL;
        }
    for (uint32_t k = 0; k < world->closeds;)
        if (world->closed[k].client == world->client[i])
            world->closed[k] = world->closed[--world->closeds];
        else
            k++;
    rig_client_exited(world->client[i]);
    world->client[i] = NULL;
    world->leaving++;
}

static void op_flush(struct world *world) {
    struct store_flush flush;
    oracle_follow(&world->oracle, &world->rig);
    uint64_t pages = world->oracle.pages;
    store_flush(world->rig.store, one_in(world, 2) ? NULL : &world->oracle.model, &flush);
    assert_int_equal(flush.pages_freed + flush.pages_deferred, pages);
    rig_verify(&world->rig);
    oracle_follow(&world->oracle, &world->rig);
    assert_int_equal(world->oracle.pages, 0);
}

static void op_device(struct world *world) {
    if (world->held || one_in(world, 2)) {
        world->held = !world->held;
        fake_device_hold(&world->rig.device, world->held);
    } else {
        enum fake_call call = one_in(world, 2) ? FAKE_PACK : FAKE_COPY;
        fake_device_fail(&world->rig.device, call, 1 + below(world, 20), below(world, 4), OSCAR_ERR_DEVICE);
    }
}

static void check_counters(struct world *world) {
    struct rig *rig = &world->rig;
    struct expected *expected = &world->expected;
    oracle_follow(&world->oracle, rig);
    assert_int_equal(rig_metric(rig, "oscar_sequence_opens_total", ""), expected->opens);
    assert_int_equal(rig_metric(rig, "oscar_sequence_open_hits_total", ""), expected->open_hits);
    assert_int_equal(rig_metric(rig, "oscar_prefix_cache_queries_total", ""), expected->queried);
    assert_int_equal(rig_metric(rig, "oscar_prefix_cache_hits_total", ""), expected->hits);
    assert_int_equal(rig_metric(rig, "oscar_probes_total", ""), expected->probes);
    assert_int_equal(rig_metric(rig, "oscar_forks_total", ""), expected->forks);
    assert_int_equal(rig_metric(rig, "oscar_no_space_total", ""), expected->no_space);
    uint64_t clients = rig_metric(rig, "oscar_clients", "");
    assert_in_range(clients, expected->clients - world->leaving, expected->clients);
    world->leaving -= (uint32_t)(expected->clients - clients);
    world->expected.clients = clients;
    assert_true(world->held || rig->store->inspects_running > 0 || world->leaving == 0);
    assert_int_equal(rig_metric(rig, "oscar_leases", ""), expected->leases);
    assert_int_equal(rig_metric(rig, "oscar_sequences", ""), expected->sequences);
    uint64_t deferred = rig_metric(rig, "oscar_pages_deferred", "");
    uint64_t pages = rig_metric(rig, "oscar_pages", "form=\"sink\"") +
                     rig_metric(rig, "oscar_pages", "form=\"dense\"") +
                     rig_metric(rig, "oscar_pages", "form=\"packed\"");
    assert_int_equal(pages - deferred, world->oracle.pages);
    assert_int_equal(rig_metric(rig, "oscar_pages_evicted_total", ""), world->oracle.removed);
    assert_int_equal(rig_metric(rig, "oscar_pages_flushed_total", ""), world->oracle.cleared_pages);
    assert_true(rig_metric(rig, "oscar_pages_sealed_total", "") >= world->oracle.stored);
    assert_true(rig_metric(rig, "oscar_pages_packed_total", "") >= world->oracle.compressed);
    uint64_t chunks = rig_metric(rig, "oscar_memory_chunk_bytes", "form=\"sink\"") +
                      rig_metric(rig, "oscar_memory_chunk_bytes", "form=\"dense\"") +
                      rig_metric(rig, "oscar_memory_chunk_bytes", "form=\"packed\"");
    uint64_t moving = rig_metric(rig, "oscar_memory_moving_bytes", "");
    assert_in_range(fake_device_bytes(&rig->device), chunks, chunks + moving);
    assert_true(chunks + moving <= rig_metric(rig, "oscar_memory_budget_bytes", ""));
}

static void run(uint64_t seed, uint32_t steps, const struct rig_options *options) {
    static struct world worlds;
    struct world *world = &worlds;
    *world = (struct world){.random = seed * 2 + 1};
    rig_open(&world->rig, options);
    for (int i = 0; i < CLIENTS; i++)
        world->client[i] = rig_client_new(&world->rig, "group");
    world->expected.clients = CLIENTS;
    oracle_open(&world->oracle, &world->client[0]->digest);
    for (uint32_t i = 0; i < PROMPTS; i++)
        new_prompt(world, i);

    static const struct {
        uint32_t weight;
        void (*run)(struct world *world);
    } ops[] = {{30, op_advance}, {12, op_open}, {12, op_signal}, {9, op_close}, {4, op_fork},
               {4, op_extend},   {4, op_probe}, {1, op_death},   {1, op_flush}, {2, op_device}};
    for (uint32_t step = 0; step < steps; step++) {
        uint32_t pick = below(world, 79), k = 0;
        while (pick >= ops[k].weight)
            pick -= ops[k++].weight;
        ops[k].run(world);
        take_answers(world);
        world->rig.now_ns += below(world, 2000000);
        if (one_in(world, 2))
            rig_poll(&world->rig);
        else if (!world->held)
            rig_settle(&world->rig);
        take_answers(world);
        if (one_in(world, 40))
            new_prompt(world, below(world, PROMPTS));
        for (int i = 0; i < SEQS; i++)
            if (world->seq[i] && !world->failed[i])
                rig_seq_check(world->seq[i]);
        if (step % 8 == 0)
            check_counters(world);
        if (step % 64 == 0)
            oracle_check_snapshot(&world->oracle, &world->rig, 1 + below(world, 40));
    }

    if (world->held)
        op_device(world);
    for (int i = 0; i < SEQS; i++)
        if (world->seq[i])
            rig_seq_forget(world->seq[i]);
    for (int i = 0; i < CLIENTS; i++)
        if (world->client[i]) {
            rig_client_gone(world->client[i]);
            rig_client_exited(world->client[i]);
        }
    /* Nothing is held any more: every page can be flushed. */
    rig_settle(&world->rig);
    assert_int_equal(rig_metric(&world->rig, "oscar_memory_quarantined_bytes", ""), 0);
    struct store_flush flush;
    store_flush(world->rig.store, NULL, &flush);
    assert_int_equal(flush.pages_deferred, 0);
    assert_int_equal(rig_metric(&world->rig, "oscar_memory_used_bytes", "form=\"dense\""), 0);
    assert_int_equal(rig_metric(&world->rig, "oscar_memory_used_bytes", "form=\"packed\""), 0);
    oracle_close(&world->oracle);
    rig_close(&world->rig);
}

static uint64_t seed_of_run(void) {
    const char *text = getenv("OSCAR_TEST_SEED");
    uint64_t seed = text ? strtoull(text, NULL, 0) : 1;
    print_message("OSCAR_TEST_SEED=%llu\n", (unsigned long long)seed);
    return seed;
}

static void with_plenty_of_memory(void **state) {
    (void)state;
    run(seed_of_run(), 4000, &(struct rig_options){0});
}

static void with_too_little_memory(void **state) {
    (void)state;
    run(seed_of_run() + 1, 8000, &(struct rig_options){.budget_pages = 96, .chunk_pages = 4});
}

static void with_hardly_any_memory(void **state) {
    (void)state;
    run(seed_of_run() + 2, 8000, &(struct rig_options){.budget_pages = 24, .chunk_pages = 2});
}

static void when_every_hash_collides(void **state) {
    (void)state;
    run(seed_of_run() + 3, 2000, &(struct rig_options){.budget_pages = 96, .chunk_pages = 4, .hash_collide = true});
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(with_plenty_of_memory),
        cmocka_unit_test(with_too_little_memory),
        cmocka_unit_test(with_hardly_any_memory),
        cmocka_unit_test(when_every_hash_collides),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
