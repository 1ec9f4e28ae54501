/* SPDX-License-Identifier: Apache-2.0 */
/* Connections: their handles, bounds, leases, and what is left of them when they die. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
/* cmocka needs the headers above */
#include <cmocka.h>

#include "proto/geometry.h"
#include "tests/support/store_rig.h"

#define PAGE OSCAR_PAGE_TOKENS

static struct rig rig;
static struct rig_client *a, *b;
static uint32_t tokens[20 * PAGE];

static int setup(void **state) {
    (void)state;
    rig_open(&rig, &(struct rig_options){.max_sequences = 8, .max_leases = 4});
    a = rig_client_new(&rig, "g");
    b = rig_client_new(&rig, "g");
    rig_tokens(1, 0, 20 * PAGE, tokens);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    if (a)
        rig_client_free(a);
    rig_client_free(b);
    rig_close(&rig);
    return 0;
}

static int request(struct rig_client *client, struct oscar_request body, struct oscar_reply *ret) {
    struct oscar_reply reply = {0};
    int r = rig_request(client, &body, &reply);
    if (ret)
        *ret = reply;
    return r;
}

static struct rig_seq *open_seq(struct rig_client *client, uint32_t count) {
    struct rig_seq *seq = NULL;
    assert_int_equal(rig_seq_open(client, tokens, count, false, &seq), 0);
    return seq;
}

static void stale_and_foreign_handles_are_refused(void **state) {
    (void)state;
    struct rig_seq *seq = open_seq(a, 0);
    uint64_t handle = seq->handle;
    assert_int_equal(request(b, (struct oscar_request){.verb = OSCAR_SEQ_RESERVE, .seq_reserve = {handle, 1}}, NULL),
                     OSCAR_ERR_NOT_FOUND);
    assert_int_equal(request(b, (struct oscar_request){.verb = OSCAR_SEQ_CLOSE, .seq_close = {handle, 2}}, NULL),
                     OSCAR_ERR_NOT_FOUND);
    rig_seq_close(seq, true);
    const struct oscar_request requests[] = {
        {.verb = OSCAR_SEQ_RESERVE, .seq_reserve = {handle, 1}},
        {.verb = OSCAR_SEQ_ADVANCE, .seq_advance = {handle, 0, 8}},
        {.verb = OSCAR_SEQ_EXTEND, .seq_extend = {handle, 0, 8}},
        {.verb = OSCAR_SEQ_FORK, .seq_fork = {handle, 8}},
        {.verb = OSCAR_SEQ_WAIT, .seq_wait = {handle, 1}},
        {.verb = OSCAR_SEQ_CLOSE, .seq_close = {handle, 8}},
    };
    for (size_t i = 0; i < sizeof requests / sizeof *requests; i++)
        assert_int_equal(request(a, requests[i], NULL), OSCAR_ERR_STALE);
    /* The place is used again: the old name stays stale. */
    seq = open_seq(a, 0);
    assert_int_equal((uint32_t)seq->handle, (uint32_t)handle);
    for (size_t i = 0; i < sizeof requests / sizeof *requests; i++)
        assert_int_equal(request(a, requests[i], NULL), OSCAR_ERR_STALE);
    assert_int_equal(request(a, (struct oscar_request){.verb = OSCAR_SEQ_WAIT, .seq_wait = {12345, 1}}, NULL),
                     OSCAR_ERR_NOT_FOUND);
    assert_int_equal(request(a, (struct oscar_request){.verb = OSCAR_SEQ_OPEN, .seq_open = {77, 0, false}}, NULL),
                     OSCAR_ERR_NOT_FOUND);
    assert_int_equal(request(a, (struct oscar_request){.verb = OSCAR_LEASE_CLOSE, .lease_close = {UINT64_MAX}}, NULL),
                     OSCAR_ERR_NOT_FOUND);
    assert_int_equal(request(a, (struct oscar_request){.verb = OSCAR_HELLO}, NULL), OSCAR_ERR_PROTOCOL);
    rig_seq_close(seq, true);
}

static void counts_are_bounded_before_the_window_is_read(void **state) {
    (void)state;
    const uint32_t over = OSCAR_MAX_SEQUENCE_TOKENS + 1;
    struct rig_seq *seq = open_seq(a, 0);
    uint64_t h = seq->handle;
    const struct oscar_request requests[] = {
        {.verb = OSCAR_SEQ_OPEN, .seq_open = {a->model, over, false}},
        {.verb = OSCAR_SEQ_OPEN, .seq_open = {a->model, UINT32_MAX, false}},
        {.verb = OSCAR_PROBE, .probe = {a->model, over, false}},
        {.verb = OSCAR_SEQ_EXTEND, .seq_extend = {h, over, 2}},
        {.verb = OSCAR_SEQ_RESERVE, .seq_reserve = {h, over}},
        {.verb = OSCAR_SEQ_RESERVE, .seq_reserve = {h, UINT32_MAX}},
        {.verb = OSCAR_SEQ_ADVANCE, .seq_advance = {h, over, 2}},
        {.verb = OSCAR_SEQ_ADVANCE, .seq_advance = {h, UINT32_MAX, 2}},
    };
    for (size_t i = 0; i < sizeof requests / sizeof *requests; i++)
        assert_int_equal(request(a, requests[i], NULL), OSCAR_ERR_LIMIT);
    assert_int_equal(rig_seq_reserve(seq, 10), 0);
    assert_int_equal(rig_seq_advance(seq, tokens, 10), 0);
    assert_int_equal(rig_seq_reserve(seq, OSCAR_MAX_SEQUENCE_TOKENS - 9), OSCAR_ERR_LIMIT);
    /* More than is reserved. */
    assert_int_equal(rig_seq_advance(seq, tokens, PAGE - 9), OSCAR_ERR_STATE);
    rig_seq_close(seq, true);
}

static void fences_are_even_and_grow(void **state) {
    (void)state;
    struct rig_seq *seq = open_seq(a, 0);
    uint64_t h = seq->handle;
    assert_int_equal(rig_seq_advance(seq, NULL, 0), 0); /* 2 */
    const uint64_t wrong[] = {0, 1, 2, 3, UINT64_MAX, UINT64_MAX - 1};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_int_equal(
            request(a, (struct oscar_request){.verb = OSCAR_SEQ_ADVANCE, .seq_advance = {h, 0, wrong[i]}}, NULL),
            OSCAR_ERR_PROTOCOL);
        assert_int_equal(request(a, (struct oscar_request){.verb = OSCAR_SEQ_FORK, .seq_fork = {h, wrong[i]}}, NULL),
                         OSCAR_ERR_PROTOCOL);
        assert_int_equal(request(a, (struct oscar_request){.verb = OSCAR_SEQ_CLOSE, .seq_close = {h, wrong[i]}}, NULL),
                         OSCAR_ERR_PROTOCOL);
        assert_int_equal(
            request(a, (struct oscar_request){.verb = OSCAR_SEQ_EXTEND, .seq_extend = {h, 0, wrong[i]}}, NULL),
            OSCAR_ERR_PROTOCOL);
    }
    rig_seq_close(seq, true);
}

static void a_counter_that_is_used_again_begins_at_zero(void **state) {
    (void)state;
    rig.verify = false;
    bool used[OSCAR_FENCE_SLOTS] = {false};
    for (uint32_t i = 0; i < OSCAR_FENCE_SLOTS + 100; i++) {
        struct rig_seq *seq = open_seq(a, 0);                            /* looks at the counter */
        assert_int_equal(used[seq->fence_slot], i >= OSCAR_FENCE_SLOTS); /* a freed one rests for as long as possible */
        used[seq->fence_slot] = true;
        rig_seq_close(seq, true);
        rig_poll(&rig);
    }
    rig.verify = true;
    rig_verify(&rig);
}

static void a_connection_has_so_many_sequences_and_leases(void **state) {
    (void)state;
    struct rig_seq *seq[9] = {NULL};
    for (int i = 0; i < 8; i++)
        seq[i] = open_seq(a, 0);
    assert_int_equal(rig_seq_open(a, tokens, 0, false, &seq[8]), OSCAR_ERR_LIMIT);
    rig_seq_close(seq[0], true);
    seq[0] = open_seq(a, 0);
    for (int i = 0; i < 8; i++)
        rig_seq_close(seq[i], true);
    const struct oscar_request lease = {.verb = OSCAR_PROBE, .probe = {a->model, 0, true}};
    for (int i = 0; i < 4; i++)
        assert_int_equal(request(a, lease, NULL), 0);
    assert_int_equal(request(a, lease, NULL), OSCAR_ERR_LIMIT);
    assert_int_equal(rig_metric(&rig, "oscar_leases", ""), 4);
}

static void a_lease_pins_its_hit_until_it_is_closed(void **state) {
    (void)state;
    rig_cache(a, tokens, 4);
    memcpy(b->window + OSCAR_WINDOW_TOKENS_OFFSET, tokens, sizeof tokens);
    struct oscar_reply reply;
    assert_int_equal(
        request(b, (struct oscar_request){.verb = OSCAR_PROBE, .probe = {b->model, 8 * PAGE, true}}, &reply), 0);
    assert_int_equal(reply.probe.hit_tokens, 4 * PAGE);
    assert_int_equal(rig_metric(&rig, "oscar_pages_evictable", ""), 0);
    assert_int_equal(
        request(a, (struct oscar_request){.verb = OSCAR_LEASE_CLOSE, .lease_close = {reply.probe.lease}}, NULL),
        OSCAR_ERR_NOT_FOUND);
    assert_int_equal(
        request(b, (struct oscar_request){.verb = OSCAR_LEASE_CLOSE, .lease_close = {reply.probe.lease}}, NULL), 0);
    assert_int_equal(
        request(b, (struct oscar_request){.verb = OSCAR_LEASE_CLOSE, .lease_close = {reply.probe.lease}}, NULL),
        OSCAR_ERR_STALE);
    assert_int_equal(rig_metric(&rig, "oscar_pages_evictable", ""), 1);
}

static void a_lease_moves_to_a_client_of_its_group_only(void **state) {
    (void)state;
    rig_cache(a, tokens, 4);
    struct rig_client *other = rig_client_new(&rig, "another");
    memcpy(a->window + OSCAR_WINDOW_TOKENS_OFFSET, tokens, sizeof tokens);
    struct oscar_reply lease, adopted;
    assert_int_equal(
        request(a, (struct oscar_request){.verb = OSCAR_PROBE, .probe = {a->model, 4 * PAGE, true}}, &lease), 0);
    struct oscar_request adopt = {.verb = OSCAR_LEASE_ADOPT, .lease_adopt.model = other->model};
    memcpy(adopt.lease_adopt.secret, lease.probe.secret, OSCAR_LEASE_SECRET_BYTES);
    assert_int_equal(request(other, adopt, NULL), OSCAR_ERR_NOT_FOUND);
    adopt.lease_adopt.secret[3] ^= 1;
    assert_int_equal(request(b, adopt, NULL), OSCAR_ERR_NOT_FOUND);
    adopt.lease_adopt.secret[3] ^= 1;
    assert_int_equal(request(b, adopt, &adopted), 0);
    assert_int_equal(adopted.lease_adopt.hit_tokens, 4 * PAGE);
    assert_int_equal(
        request(a, (struct oscar_request){.verb = OSCAR_LEASE_CLOSE, .lease_close = {lease.probe.lease}}, NULL),
        OSCAR_ERR_STALE);
    /* It lives as long as its new owner's connection. */
    rig_client_free(a);
    a = NULL;
    assert_int_equal(rig_metric(&rig, "oscar_pages_evictable", ""), 0);
    rig_client_gone(b);
    assert_int_equal(rig_metric(&rig, "oscar_pages_evictable", ""), 1);
    rig_client_free(other);
}

static void what_a_dead_writer_may_still_write_is_quarantined_until_it_has_exited(void **state) {
    (void)state;
    struct rig_seq *writer = open_seq(a, 0);
    assert_int_equal(rig_seq_compute(writer, tokens, 2 * PAGE), 0);
    assert_int_equal(rig_seq_reserve(writer, 6 * PAGE), 0);
    assert_int_equal(rig_seq_advance(writer, tokens + 2 * PAGE, 3 * PAGE), 0); /* its kernel is still running */
    uint64_t page = oscar_dense_page_bytes(&rig.identity.geometry);
    rig_client_gone(a);
    rig_settle(&rig);
    assert_int_equal(rig_metric(&rig, "oscar_memory_quarantined_bytes", ""), 6 * page);
    assert_int_equal(rig_probe(b, tokens, 12 * PAGE), 2 * PAGE); /* what it had sealed stays */
    uint64_t chunks = rig_metric(&rig, "oscar_memory_chunk_bytes", "form=\"dense\"");
    rig_seq_check(writer);
    /* Nobody else gets its slots. */
    struct rig_seq *reader = open_seq(b, 12 * PAGE);
    assert_int_equal(reader->committed, 2 * PAGE);
    assert_int_equal(rig_seq_compute(reader, tokens + 2 * PAGE, 8 * PAGE), 0);
    assert_true(rig_metric(&rig, "oscar_memory_chunk_bytes", "form=\"dense\"") > chunks);
    rig_seq_check(writer);
    /* A fence that arrives after all proves nothing: its pages are dropped. */
    rig_seq_signal(writer);
    rig_settle(&rig);
    assert_int_equal(rig_metric(&rig, "oscar_memory_quarantined_bytes", ""), 6 * page);
    rig_seq_forget(writer);
    rig_client_exited(a);
    a = NULL;
    rig_settle(&rig);
    assert_int_equal(rig_metric(&rig, "oscar_memory_quarantined_bytes", ""), 0);
    assert_int_equal(rig_metric(&rig, "oscar_clients", ""), 1);
    rig_seq_check(reader);
    rig_seq_close(reader, true);
    rig_settle(&rig);
    assert_int_equal(rig_metric(&rig, "oscar_memory_used_bytes", "form=\"dense\""), 0);
}

static void what_a_dead_writer_had_finished_is_still_published(void **state) {
    (void)state;
    struct rig_seq *writer = open_seq(a, 0);
    assert_int_equal(rig_seq_reserve(writer, 4 * PAGE), 0);
    assert_int_equal(rig_seq_advance(writer, tokens, 2 * PAGE), 0);
    rig_seq_signal(writer);
    assert_int_equal(rig_seq_advance(writer, tokens + 2 * PAGE, 2 * PAGE), 0);
    rig_seq_forget(writer);
    rig_client_free(a);
    a = NULL;
    rig_settle(&rig);
    assert_int_equal(rig_probe(b, tokens, 4 * PAGE), 2 * PAGE);
    assert_int_equal(rig_metric(&rig, "oscar_pages", "form=\"dense\""), 0);
    assert_int_equal(rig_metric(&rig, "oscar_memory_chunk_bytes", "form=\"dense\""), 0);
    assert_int_equal(rig_metric(&rig, "oscar_clients", ""), 1);
}

static void a_dead_reader_holds_its_pages_until_it_has_exited(void **state) {
    (void)state;
    struct rig_seq *writer = open_seq(a, 0);
    assert_int_equal(rig_seq_compute(writer, tokens, 3 * PAGE), 0);
    struct rig_client *reader_client = rig_client_new(&rig, "g");
    struct rig_seq *reader = open_seq(reader_client, 3 * PAGE);
    rig_client_gone(reader_client);
    rig_seq_close(writer, true);
    rig_settle(&rig);
    /* Out of every window, so they were packed; but the dense ones are still there for the kernel that may run. */
    assert_int_equal(rig_metric(&rig, "oscar_pages", "form=\"dense\""), 0);
    assert_int_equal(rig_metric(&rig, "oscar_memory_used_bytes", "form=\"dense\""),
                     2 * oscar_dense_page_bytes(&rig.identity.geometry));
    rig_seq_check(reader);
    rig_seq_forget(reader);
    rig_client_exited(reader_client);
    assert_int_equal(rig_metric(&rig, "oscar_memory_used_bytes", "form=\"dense\""), 0);
}

static void a_dead_clients_sequences_are_gone_from_every_count(void **state) {
    (void)state;
    for (int i = 0; i < 100; i++) {
        struct rig_client *client = rig_client_new(&rig, "g");
        struct rig_seq *seq = open_seq(client, 12 * PAGE);
        if (i % 2)
            assert_int_equal(rig_seq_reserve(seq, 5 * PAGE), 0);
        if (i % 4 > 1)
            assert_int_equal(rig_seq_advance(seq, tokens + seq->committed, seq->reserved - seq->committed), 0);
        if (i % 8 > 3)
            rig_seq_signal(seq);
        memcpy(client->window + OSCAR_WINDOW_TOKENS_OFFSET, tokens, sizeof tokens);
        assert_int_equal(
            request(client, (struct oscar_request){.verb = OSCAR_PROBE, .probe = {client->model, 0, true}}, NULL), 0);
        rig_seq_forget(seq);
        rig_client_free(client);
        rig_settle(&rig);
        assert_int_equal(rig_metric(&rig, "oscar_clients", ""), 2);
        assert_int_equal(rig_metric(&rig, "oscar_sequences", ""), 0);
        assert_int_equal(rig_metric(&rig, "oscar_leases", ""), 0);
        assert_int_equal(rig_metric(&rig, "oscar_memory_used_bytes", "form=\"dense\""), 0);
        assert_int_equal(rig_metric(&rig, "oscar_memory_quarantined_bytes", ""), 0);
        assert_false(store_poll_pending(rig.store));
    }
}

static void the_counters_of_a_client_that_has_exited_are_not_looked_at(void **state) {
    (void)state;
    struct rig_seq *seq = open_seq(a, 0);
    assert_int_equal(rig_seq_reserve(seq, 3 * PAGE), 0);
    assert_int_equal(rig_seq_advance(seq, tokens, 3 * PAGE), 0);
    rig_seq_signal(seq);
    rig_client_free(a); /* unmapped, before anything was inspected */
    a = NULL;
    rig_seq_forget(seq);
    struct rig_seq *other = open_seq(b, 0);
    assert_int_equal(rig_seq_reserve(other, 12 * PAGE), 0); /* asks what is on its way to be packed */
    rig_seq_close(other, true);
    rig_settle(&rig);
    assert_int_equal(rig_probe(b, tokens, 3 * PAGE), 3 * PAGE);
}

static void nobody_waits_for_ever_on_the_counter_of_a_dead_client(void **state) {
    (void)state;
    struct rig_seq *open = open_seq(a, 0), *behind = open_seq(a, 0), *closed = open_seq(a, 0), *done = open_seq(a, 0);
    assert_int_equal(rig_seq_reserve(behind, 2 * PAGE), 0);
    assert_int_equal(rig_seq_advance(behind, tokens, 2 * PAGE), 0); /* its stream never comes to it */
    uint32_t slot[4] = {open->fence_slot, behind->fence_slot, closed->fence_slot, done->fence_slot};
    uint64_t promised = behind->fence + 1;
    rig_seq_close(closed, false);
    rig_seq_close(done, true);
    rig_settle(&rig);
    rig_client_gone(a);
    rig_settle(&rig);
    assert_int_equal(a->fences[slot[1]], 0); /* it may still be running */
    store_client_exited(rig.store, a->client);
    rig_verify(&rig);
    assert_true(a->fences[slot[0]] >= 1);
    assert_int_equal(a->fences[slot[1]], promised);
    assert_int_equal(a->fences[slot[2]], 2);
    assert_int_equal(a->fences[slot[3]], 2);
    rig_settle(&rig);
    assert_int_equal(rig_probe(b, tokens, 2 * PAGE), 0); /* and nothing is taken for complete by that */
    rig_seq_forget(open);
    rig_seq_forget(behind);
    rig_client_forget(a);
    a = NULL;
}

static void a_model_of_another_identity_is_another_tree(void **state) {
    (void)state;
    rig_cache(a, tokens, 4);
    struct oscar_identity mine = rig.identity;
    const struct {
        size_t offset;
    } fields[] = {
        {offsetof(struct oscar_identity, weights)},    {offsetof(struct oscar_identity, revision)},
        {offsetof(struct oscar_identity, rope)},       {offsetof(struct oscar_identity, calibration)},
        {offsetof(struct oscar_identity, adapter)},    {offsetof(struct oscar_identity, tenant)},
        {offsetof(struct oscar_identity, shard_rank)},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        rig.identity = mine;
        rig.identity.shard_size = fields[i].offset == offsetof(struct oscar_identity, shard_rank) ? 8 : 1;
        ((uint8_t *)&rig.identity)[fields[i].offset] ^= 4;
        struct rig_client *other = rig_client_new(&rig, "g");
        assert_int_equal(rig_probe(other, tokens, 4 * PAGE), 0);
        rig_client_free(other);
    }
    rig.identity = mine;
    assert_int_equal(rig_metric(&rig, "oscar_models", ""), 8);
    assert_int_equal(rig_probe(b, tokens, 4 * PAGE), 4 * PAGE);
}

static void closing_a_model_closes_what_was_opened_through_it(void **state) {
    (void)state;
    struct rig_seq *seq = open_seq(a, 0);
    assert_int_equal(rig_seq_compute(seq, tokens, 2 * PAGE + 5), 0);
    assert_int_equal(request(a, (struct oscar_request){.verb = OSCAR_PROBE, .probe = {a->model, 0, true}}, NULL), 0);
    assert_int_equal(store_model_close(rig.store, a->client, a->model, NULL), 0);
    rig_verify(&rig);
    assert_int_equal(rig_metric(&rig, "oscar_sequences", ""), 0);
    assert_int_equal(rig_metric(&rig, "oscar_leases", ""), 0);
    assert_int_equal(store_model_close(rig.store, a->client, a->model, NULL), OSCAR_ERR_NOT_FOUND);
    rig_settle(&rig);
    assert_int_not_equal(rig_metric(&rig, "oscar_memory_used_bytes", "form=\"dense\""), 0);
    atomic_store(&a->fences[seq->fence_slot], seq->fence + 2);
    rig_settle(&rig);
    assert_int_equal(rig_metric(&rig, "oscar_memory_used_bytes", "form=\"dense\""), 0);
    assert_int_equal(rig_probe(b, tokens, 2 * PAGE), 2 * PAGE);
    rig_seq_forget(seq);
}

static void a_model_that_does_not_fit_the_budget_is_refused(void **state) {
    (void)state;
    struct oscar_identity large = rig.identity;
    large.geometry.layers = 512;
    large.geometry.kv_heads = large.geometry.query_heads = 16;
    struct oscar_calibration *calibration = NULL;
    assert_int_equal(oscar_calibration_default(&large.geometry, &calibration, NULL), 0);
    struct oscar_reply reply = {0};
    struct oscar_cause cause = {0};
    assert_int_equal(rig_model_open(a, &large, calibration, &reply, &cause), OSCAR_ERR_NO_SPACE);
    assert_true(cause.text[0] != 0);
    assert_int_equal(rig_model_open(a, &large, NULL, &reply, &cause), OSCAR_ERR_CALIBRATION);
    rig_verify(&rig);
    assert_int_equal(rig_metric(&rig, "oscar_models", ""), 1);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(stale_and_foreign_handles_are_refused),
        TEST(counts_are_bounded_before_the_window_is_read),
        TEST(fences_are_even_and_grow),
        TEST(a_counter_that_is_used_again_begins_at_zero),
        TEST(a_connection_has_so_many_sequences_and_leases),
        TEST(a_lease_pins_its_hit_until_it_is_closed),
        TEST(a_lease_moves_to_a_client_of_its_group_only),
        TEST(what_a_dead_writer_may_still_write_is_quarantined_until_it_has_exited),
        TEST(what_a_dead_writer_had_finished_is_still_published),
        TEST(a_dead_reader_holds_its_pages_until_it_has_exited),
        TEST(a_dead_clients_sequences_are_gone_from_every_count),
        TEST(the_counters_of_a_client_that_has_exited_are_not_looked_at),
        TEST(nobody_waits_for_ever_on_the_counter_of_a_dead_client),
        TEST(a_model_of_another_identity_is_another_tree),
        TEST(closing_a_model_closes_what_was_opened_through_it),
        TEST(a_model_that_does_not_fit_the_budget_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
