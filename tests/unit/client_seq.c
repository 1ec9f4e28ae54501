/* SPDX-License-Identifier: Apache-2.0 */
/* The life of a sequence: what is said to the daemon and when, what is written where, and what the fences tell. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/number.h"
#include "proto/page.h"
#include "tests/unit/client_fixture.h"

#define REF(form, id) oscar_page_ref_make(OSCAR_FORM_##form, id)

static void the_hit_is_told_and_its_pages_are_there(void **state) {
    struct client_world *world = *state;
    fake_oscard_set_hit(world->fake, 256, 256);
    struct oscar_seq *seq;
    assert_ok(oscar_seq_open(world->model, some_tokens(), 300, OSCAR_SEQ_DENSE_TAIL, &seq));
    struct oscar_request open = fake_oscard_last(world->fake, OSCAR_SEQ_OPEN);
    assert_int_equal(open.seq_open.tokens, 300);
    assert_true(open.seq_open.dense_tail);
    assert_memory_equal(fake_oscard_tokens(world->fake, OSCAR_SEQ_OPEN), some_tokens(), 300 * sizeof(uint32_t));
    struct oscar_seq_info info = seq_info(seq);
    assert_int_equal(info.hit_tokens, 256);
    assert_int_equal(info.committed_tokens, 256);
    assert_int_equal(info.packed_tokens, 192);
    uint16_t out[QUERY_HEADS * HEAD_DIM];
    assert_ok(attend_once(world->model, seq, 0, out));
    oscar_seq_close(seq);
    assert_int_equal(fake_oscard_count(world->fake, OSCAR_SEQ_CLOSE), 1);
}

static void arguments_are_checked(void **state) {
    struct client_world *world = *state;
    struct oscar_seq *seq = NULL;
    assert_code(OSCAR_ERR_INVALID, oscar_seq_open(NULL, some_tokens(), 1, 0, &seq));
    assert_code(OSCAR_ERR_INVALID, oscar_seq_open(world->model, NULL, 1, 0, &seq));
    assert_code(OSCAR_ERR_INVALID, oscar_seq_open(world->model, some_tokens(), 1, 8, &seq));
    assert_code(OSCAR_ERR_LIMIT, oscar_seq_open(world->model, some_tokens(), OSCAR_MAX_SEQUENCE_TOKENS + 1, 0, &seq));
    assert_null(seq);
    seq = written_seq(world->model, 128, 0);
    assert_code(OSCAR_ERR_LIMIT, oscar_seq_reserve(seq, OSCAR_MAX_SEQUENCE_TOKENS + 1));
    assert_code(OSCAR_ERR_LIMIT, oscar_seq_reserve(seq, UINT32_MAX));
    assert_code(OSCAR_ERR_INVALID, store_value(seq, NULL, LAYERS, 0, 1, 1.0F));
    assert_code(OSCAR_ERR_NO_SPACE, store_value(seq, NULL, 0, 128, 1, 1.0F));
    assert_code(OSCAR_ERR_NO_SPACE, store_value(seq, NULL, 0, 100, 29, 1.0F));
    assert_code(OSCAR_ERR_INVALID, oscar_seq_advance(seq, NULL, some_tokens(), 129));
    assert_code(OSCAR_ERR_INVALID, oscar_seq_advance(seq, NULL, NULL, 1));
    assert_int_equal(seq_info(seq).committed_tokens, 0);
    oscar_seq_close(NULL);
    oscar_model_close(NULL);
    oscar_client_close(NULL);
    oscar_lease_close(NULL);
    oscar_stream_close(NULL);
}

static void advance_speaks_when_a_page_fills(void **state) {
    struct client_world *world = *state;
    struct oscar_seq *seq = written_seq(world->model, 256, 0);
    for (uint32_t i = 0; i < 63; i++)
        assert_ok(oscar_seq_advance(seq, NULL, some_tokens() + i, 1));
    assert_int_equal(fake_oscard_count(world->fake, OSCAR_SEQ_ADVANCE), 0);
    assert_int_equal(seq_info(seq).committed_tokens, 63);
    assert_ok(oscar_seq_advance(seq, NULL, some_tokens() + 63, 1));
    assert_int_equal(fake_oscard_count(world->fake, OSCAR_SEQ_ADVANCE), 1);
    assert_int_equal(fake_oscard_last(world->fake, OSCAR_SEQ_ADVANCE).seq_advance.tokens, 64);
    assert_memory_equal(fake_oscard_tokens(world->fake, OSCAR_SEQ_ADVANCE), some_tokens(), 64 * sizeof(uint32_t));
    assert_int_equal(seq_info(seq).sealed_tokens, 64);
    fake_oscard_raise_updates(world->fake); /* or when it has something to tell */
    assert_ok(oscar_seq_advance(seq, NULL, some_tokens() + 64, 1));
    assert_int_equal(fake_oscard_count(world->fake, OSCAR_SEQ_ADVANCE), 2);
    assert_ok(oscar_seq_advance(seq, NULL, some_tokens() + 65, 1));
    assert_int_equal(fake_oscard_count(world->fake, OSCAR_SEQ_ADVANCE), 2);
}

static void a_reserve_that_fails_changes_nothing(void **state) {
    struct client_world *world = *state;
    struct oscar_seq *seq = written_seq(world->model, 64, 0);
    fake_oscard_fail(world->fake, OSCAR_SEQ_RESERVE, OSCAR_ERR_NO_SPACE, "all is pinned");
    assert_code(OSCAR_ERR_NO_SPACE, oscar_seq_reserve(seq, 256));
    assert_non_null(strstr(oscar_error_detail(), "all is pinned"));
    assert_int_equal(seq_info(seq).reserved_tokens, 64);
    unsigned asked = fake_oscard_count(world->fake, OSCAR_SEQ_RESERVE);
    assert_ok(oscar_seq_reserve(seq, 64)); /* is there */
    assert_int_equal(fake_oscard_count(world->fake, OSCAR_SEQ_RESERVE), asked);
    fake_oscard_fail(world->fake, OSCAR_SEQ_RESERVE, 0, "");
    assert_ok(oscar_seq_reserve(seq, 256));
    assert_int_equal(seq_info(seq).reserved_tokens, 256);
}

static void reserve_counts_from_tokens_that_were_not_told_yet(void **state) {
    struct client_world *world = *state;
    struct oscar_seq *seq = written_seq(world->model, 64, 40);
    assert_ok(oscar_seq_reserve(seq, 64));
    assert_int_equal(fake_oscard_last(world->fake, OSCAR_SEQ_RESERVE).seq_reserve.tokens, 104);
    assert_int_equal(seq_info(seq).reserved_tokens, 128);
}

static uint16_t first_element(struct client_world *world, uint32_t page, uint32_t row) {
    uint16_t element;
    memcpy(&element, fake_oscard_page(world->fake, REF(DENSE, page)) + (size_t)row * HEAD_DIM * 2, sizeof(element));
    return element;
}

/* A row of one value v has 8 v = v sqrt(64) in its first element once it is rotated by the Hadamard matrix. */
static uint16_t rotated(float value) { return oscar_bf16_from_float(8.0F * value); }

static void committed_rows_are_never_written_again_and_others_are(void **state) {
    struct client_world *world = *state;
    struct oscar_seq *seq = written_seq(world->model, 128, 10);
    assert_ok(store_value(seq, NULL, 0, 0, 20, 2.0F));
    assert_int_equal(first_element(world, 0, 0), rotated(1.0F));
    assert_int_equal(first_element(world, 0, 9), rotated(1.0F));
    assert_int_equal(first_element(world, 0, 10), rotated(2.0F));
    assert_int_equal(first_element(world, 0, 19), rotated(2.0F));
    assert_ok(store_value(seq, NULL, 0, 15, 1, 3.0F)); /* a draft that was rejected */
    assert_int_equal(first_element(world, 0, 15), rotated(3.0F));
    assert_ok(store_value(seq, NULL, 0, 5, 5, 4.0F)); /* nothing of it is uncommitted */
    assert_int_equal(first_element(world, 0, 5), rotated(1.0F));
    assert_ok(store_value(seq, NULL, 0, 60, 10, 5.0F)); /* over the end of a page */
    assert_int_equal(first_element(world, 0, 63), rotated(5.0F));
    assert_int_equal(first_element(world, 1, 5), rotated(5.0F));
}

static void values_out_of_range_are_refused_at_once(void **state) {
    struct client_world *world = *state;
    struct oscar_seq *seq = written_seq(world->model, 64, 0);
    assert_code(OSCAR_ERR_NOT_FINITE, store_value(seq, NULL, 0, 0, 1, 60000.0F));
    assert_ok(store_value(seq, NULL, 0, 0, 1, 1.0F));
}

static void rows_are_the_uncommitted_part_of_a_page(void **state) {
    struct client_world *world = *state;
    struct oscar_seq *seq = written_seq(world->model, 128, 10);
    void *k, *v;
    uint32_t rows;
    assert_ok(oscar_seq_rows(seq, 1, 1, 10, &k, &v, &rows));
    assert_int_equal(rows, 54);
    assert_int_equal((char *)v - (char *)k, 64 * HEAD_DIM * 2);
    memset(k, 0x3f, (size_t)rows * HEAD_DIM * 2);
    const uint8_t *record = fake_oscard_page(world->fake, REF(DENSE, 0)) + 3 * oscar_dense_record_bytes(HEAD_DIM);
    assert_int_equal(record[10 * HEAD_DIM * 2], 0x3f);
    assert_ok(oscar_seq_rows(seq, 0, 0, 64, &k, &v, &rows));
    assert_int_equal(rows, 64);
    assert_code(OSCAR_ERR_INVALID, oscar_seq_rows(seq, 0, 0, 9, &k, &v, &rows));
    assert_code(OSCAR_ERR_NO_SPACE, oscar_seq_rows(seq, 0, 0, 128, &k, &v, &rows));
    assert_code(OSCAR_ERR_INVALID, oscar_seq_rows(seq, 0, KV_HEADS, 64, &k, &v, &rows));
}

static void attend_checks_lengths_before_the_launch(void **state) {
    struct client_world *world = *state;
    uint16_t out[QUERY_HEADS * HEAD_DIM], q[QUERY_HEADS * HEAD_DIM] = {0};
    struct oscar_seq *seq = written_seq(world->model, 128, 10);
    assert_ok(attend_once(world->model, seq, 0, out));
    assert_int_equal(out[0], oscar_bf16_from_float(1.0F)); /* all V are one */
    assert_ok(attend_once(world->model, seq, 128, out));
    assert_code(OSCAR_ERR_INVALID, attend_once(world->model, seq, 129, out));
    struct oscar_attend_query query = {.seq = seq, .tokens = 10, .rows = 11, .q = q, .out = out};
    assert_code(OSCAR_ERR_INVALID, oscar_attend(world->model, NULL, 0, 0, &query, 1));
    query.rows = 1;
    query.q = NULL;
    assert_code(OSCAR_ERR_INVALID, oscar_attend(world->model, NULL, 0, 0, &query, 1));
    query.q = q;
    assert_code(OSCAR_ERR_INVALID, oscar_attend(world->model, NULL, LAYERS, 0, &query, 1));
    assert_code(OSCAR_ERR_INVALID, oscar_attend(world->model, NULL, 0, 0, NULL, 1));
    assert_ok(oscar_attend(world->model, NULL, 0, 0, NULL, 0));
    struct oscar_seq *empty;
    assert_ok(oscar_seq_open(world->model, NULL, 0, 0, &empty));
    assert_code(OSCAR_ERR_INVALID, attend_once(world->model, empty, 0, out));
}

static void attend_takes_updates_over_without_waiting(void **state) {
    struct client_world *world = *state;
    uint16_t out[QUERY_HEADS * HEAD_DIM];
    struct oscar_seq *seq = written_seq(world->model, 512, 448);
    unsigned advances = fake_oscard_count(world->fake, OSCAR_SEQ_ADVANCE);
    fake_oscard_hold(world->fake, OSCAR_SEQ_ADVANCE);
    fake_oscard_queue_update(world->fake, 1, REF(PACKED, 5));
    fake_oscard_raise_updates(world->fake);
    for (unsigned i = 0; i < 5; i++) /* asks once, and does not wait for the answer */
        assert_ok(attend_once(world->model, seq, 0, out));
    assert_true(fake_oscard_wait(world->fake, OSCAR_SEQ_ADVANCE, advances + 1));
    assert_int_equal(fake_oscard_last(world->fake, OSCAR_SEQ_ADVANCE).seq_advance.tokens, 0);
    assert_int_equal(seq_info(seq).packed_tokens, 0);
    fake_oscard_let_go(world->fake, OSCAR_SEQ_ADVANCE);
    assert_ok(oscar_client_ping(world->client)); /* the answer is there */
    assert_ok(attend_once(world->model, seq, 0, out));
    assert_int_equal(seq_info(seq).packed_tokens, 64);
    assert_int_equal(fake_oscard_count(world->fake, OSCAR_SEQ_ADVANCE), advances + 1);
    uint64_t fence = fake_oscard_last(world->fake, OSCAR_SEQ_ADVANCE).seq_advance.fence;
    assert_int_equal(atomic_load(fake_oscard_fence(world->fake, 0)), fence + 1);
}

static void attend_asks_nothing_for_pages_that_cannot_change(void **state) {
    struct client_world *world = *state;
    uint16_t out[QUERY_HEADS * HEAD_DIM];
    struct oscar_seq *seq = written_seq(world->model, 256, 256); /* all of it in the recent window */
    unsigned advances = fake_oscard_count(world->fake, OSCAR_SEQ_ADVANCE);
    fake_oscard_raise_updates(world->fake);
    assert_ok(attend_once(world->model, seq, 0, out));
    assert_ok(oscar_client_ping(world->client));
    assert_int_equal(fake_oscard_count(world->fake, OSCAR_SEQ_ADVANCE), advances);
}

static void fences_are_even_for_requests_and_odd_for_what_was_taken_over(void **state) {
    struct client_world *world = *state;
    struct oscar_seq *seq = written_seq(world->model, 256, 64);
    assert_int_equal(fake_oscard_last(world->fake, OSCAR_SEQ_ADVANCE).seq_advance.fence, 2);
    assert_int_equal(fake_oscard_fence_then(world->fake, OSCAR_SEQ_ADVANCE), 2);
    assert_int_equal(atomic_load(fake_oscard_fence(world->fake, 0)), 3);
    assert_ok(oscar_seq_advance(seq, NULL, NULL, 0));
    assert_int_equal(fake_oscard_last(world->fake, OSCAR_SEQ_ADVANCE).seq_advance.fence, 4);
    assert_int_equal(atomic_load(fake_oscard_fence(world->fake, 0)), 5);
    oscar_seq_close(seq);
    assert_int_equal(fake_oscard_last(world->fake, OSCAR_SEQ_CLOSE).seq_close.fence, 6);
    assert_int_equal(fake_oscard_fence_then(world->fake, OSCAR_SEQ_CLOSE), 6);
}

struct gate {
    _Atomic bool entered, open;
};

static void hold_stream(void *argument) {
    struct gate *gate = argument;
    atomic_store(&gate->entered, true);
    while (!atomic_load(&gate->open)) {
    }
}

static struct oscar_stream *held_stream(struct client_world *world, struct gate *gate) {
    struct oscar_stream_params params = OSCAR_INIT(struct oscar_stream_params);
    struct oscar_stream *stream;
    params.asynchronous = 1;
    assert_ok(oscar_stream_open(world->client, &params, &stream));
    assert_ok(oscar_stream_call(stream, hold_stream, gate));
    return stream;
}

static void on_a_stream_the_fence_follows_the_work(void **state) {
    struct client_world *world = *state;
    struct gate gate = {false, false};
    struct oscar_seq *seq = written_seq(world->model, 128, 0);
    struct oscar_stream *stream = held_stream(world, &gate);
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        assert_ok(store_value(seq, stream, layer, 0, 64, 1.0F));
    assert_ok(oscar_seq_advance(seq, stream, some_tokens(), 64));
    assert_int_equal(fake_oscard_last(world->fake, OSCAR_SEQ_ADVANCE).seq_advance.fence, 2);
    assert_int_equal(fake_oscard_fence_then(world->fake, OSCAR_SEQ_ADVANCE), 0); /* the page is not there yet */
    assert_code(OSCAR_ERR_TIMEOUT, oscar_stream_wait(stream, 1));
    atomic_store(&gate.open, true);
    assert_ok(oscar_stream_wait(stream, LONG_MS));
    assert_int_equal(atomic_load(fake_oscard_fence(world->fake, 0)), 3);
    assert_int_equal(first_element(world, 0, 63), rotated(1.0F));
    oscar_stream_close(stream);
}

static void enqueued_attention_reads_the_page_table_of_its_call(void **state) {
    struct client_world *world = *state;
    struct gate gate = {false, false};
    static uint16_t q[QUERY_HEADS * HEAD_DIM], out[QUERY_HEADS * HEAD_DIM];
    struct oscar_seq *seq = written_seq(world->model, 512, 448);
    struct oscar_stream *stream = held_stream(world, &gate);
    const struct oscar_attend_query query = {
        .seq = seq, .rows = 1, .q = q, .q_head_stride = HEAD_DIM, .out = out, .out_head_stride = HEAD_DIM};
    assert_ok(oscar_attend(world->model, stream, 0, 0, &query, 1));
    /* Meanwhile every page is exchanged for one of zeros. */
    for (uint32_t page = 0; page < 7; page++)
        fake_oscard_queue_update(world->fake, page, page == 0 ? REF(SINK, 9) : REF(PACKED, 9));
    assert_ok(oscar_seq_advance(seq, stream, NULL, 0));
    assert_int_equal(seq_info(seq).packed_tokens, 384);
    assert_int_equal(atomic_load(fake_oscard_fence(world->fake, 0)) % 2, 1); /* of the request before */
    oscar_seq_close(seq);                                                    /* and all is closed */
    oscar_model_close(world->model);
    oscar_client_close(world->client);
    world->client = NULL;
    atomic_store(&gate.open, true);
    assert_ok(oscar_stream_wait(stream, LONG_MS));
    assert_int_equal(out[0], oscar_bf16_from_float(1.0F));
    oscar_stream_close(stream);
}

static void a_fork_shares_what_is_sealed_and_copies_the_tail(void **state) {
    struct client_world *world = *state;
    struct oscar_seq *seq = written_seq(world->model, 128, 70), *child;
    assert_ok(oscar_seq_fork(seq, NULL, &child));
    assert_int_equal(fake_oscard_last(world->fake, OSCAR_SEQ_ADVANCE).seq_advance.tokens, 70); /* all is told before */
    assert_int_equal(seq_info(child).committed_tokens, 70);
    assert_int_equal(first_element(world, 2, 5), rotated(1.0F));         /* the child's tail, page id 2 */
    assert_int_equal(atomic_load(fake_oscard_fence(world->fake, 1)), 1); /* the copies are done */
    assert_ok(oscar_seq_reserve(child, 10));
    assert_ok(store_value(child, NULL, 0, 70, 2, 2.0F));
    assert_int_equal(first_element(world, 2, 6), rotated(2.0F));
    assert_ok(store_value(seq, NULL, 0, 70, 2, 3.0F));
    assert_int_equal(first_element(world, 1, 6), rotated(3.0F));
    assert_int_equal(first_element(world, 2, 6), rotated(2.0F));
    oscar_seq_close(seq);
    assert_ok(oscar_seq_advance(child, NULL, some_tokens(), 2));
}

static bool foreign_copy(struct fake_oscard *fake, const struct oscar_request *request, struct oscar_reply *reply) {
    (void)fake;
    (void)request;
    reply->seq_fork.copy[0].to = REF(SINK, 0);
    return true;
}

static void a_copy_to_a_foreign_page_is_refused(void **state) {
    struct client_world *world = *state;
    struct oscar_seq *seq = written_seq(world->model, 128, 70), *child = NULL;
    fake_oscard_change(world->fake, OSCAR_SEQ_FORK, foreign_copy);
    assert_code(OSCAR_ERR_PROTOCOL, oscar_seq_fork(seq, NULL, &child));
    assert_null(child);
    assert_int_equal(fake_oscard_count(world->fake, OSCAR_SEQ_CLOSE), 1);
    assert_ok(oscar_seq_advance(seq, NULL, some_tokens(), 10)); /* the parent is as it was */
}

static void a_wait_takes_over_what_another_worker_has_computed(void **state) {
    struct client_world *world = *state;
    struct oscar_seq *seq;
    fake_oscard_set_hit(world->fake, 64, 256);
    assert_ok(oscar_seq_open(world->model, some_tokens(), 300, 0, &seq));
    assert_int_equal(seq_info(seq).in_flight_tokens, 256);
    fake_oscard_set_hit(world->fake, 192, 256);
    fake_oscard_fail(world->fake, OSCAR_SEQ_WAIT, OSCAR_ERR_TIMEOUT, "not yet");
    assert_code(OSCAR_ERR_TIMEOUT, oscar_seq_wait(seq, 10)); /* but what is there is taken over */
    assert_int_equal(seq_info(seq).hit_tokens, 192);
    assert_memory_equal(fake_oscard_tokens(world->fake, OSCAR_SEQ_EXTEND), some_tokens(), 300 * sizeof(uint32_t));
    fake_oscard_fail(world->fake, OSCAR_SEQ_WAIT, 0, "");
    fake_oscard_set_hit(world->fake, 256, 256);
    assert_ok(oscar_seq_wait(seq, 1000));
    assert_int_equal(seq_info(seq).hit_tokens, 256);
    assert_int_equal(seq_info(seq).committed_tokens, 256);
    assert_int_equal(seq_info(seq).packed_tokens, 192);
    unsigned waits = fake_oscard_count(world->fake, OSCAR_SEQ_WAIT);
    assert_ok(oscar_seq_wait(seq, 1000)); /* nothing is in flight any more */
    assert_int_equal(fake_oscard_count(world->fake, OSCAR_SEQ_WAIT), waits);
    assert_ok(oscar_seq_reserve(seq, 64));
    assert_ok(store_value(seq, NULL, 0, 256, 1, 1.0F));
    assert_code(OSCAR_ERR_STATE, oscar_seq_wait(seq, 1000));
}

static void a_hit_that_grows_behind_the_callers_back_ends_the_sequence(void **state) {
    struct client_world *world = *state;
    struct oscar_seq *seq, *same;
    fake_oscard_set_hit(world->fake, 64, 256);
    assert_ok(oscar_seq_open(world->model, some_tokens(), 300, 0, &seq));
    assert_ok(oscar_seq_open(world->model, some_tokens(), 300, 0, &same));
    fake_oscard_hold(world->fake, OSCAR_SEQ_EXTEND);
    oscar_client_set_timeout(world->client, SHORT_MS);
    assert_code(OSCAR_ERR_TIMEOUT, oscar_seq_wait(seq, LONG_MS));    /* which is answered at once; the extend is not */
    assert_true(fake_oscard_wait(world->fake, OSCAR_SEQ_EXTEND, 1)); /* it is the next one that is held then */
    fake_oscard_let_go(world->fake, OSCAR_SEQ_EXTEND);
    fake_oscard_hold(world->fake, OSCAR_SEQ_EXTEND);
    oscar_client_set_timeout(world->client, LONG_MS);
    assert_ok(oscar_seq_reserve(seq, 64)); /* nothing was found: the caller's count still holds */

    fake_oscard_set_hit(world->fake, 256, 256);
    oscar_client_set_timeout(world->client, SHORT_MS);
    assert_code(OSCAR_ERR_TIMEOUT, oscar_seq_wait(same, LONG_MS));
    assert_int_equal(seq_info(same).hit_tokens, 64);
    fake_oscard_let_go(world->fake, OSCAR_SEQ_EXTEND);
    oscar_client_set_timeout(world->client, LONG_MS);
    assert_code(OSCAR_ERR_STALE, oscar_seq_reserve(same, 64)); /* the daemon counts from 256 */
    assert_code(OSCAR_ERR_STALE, oscar_seq_advance(same, NULL, some_tokens(), 1));
    oscar_seq_close(same);
}

static void a_wait_for_a_silent_daemon_ends(void **state) {
    struct client_world *world = *state;
    struct oscar_seq *seq;
    fake_oscard_set_hit(world->fake, 64, 256);
    assert_ok(oscar_seq_open(world->model, some_tokens(), 300, 0, &seq));
    fake_oscard_hold(world->fake, OSCAR_SEQ_WAIT);
    oscar_client_set_timeout(world->client, SHORT_MS);
    double start = now_ms();
    assert_code(OSCAR_ERR_TIMEOUT, oscar_seq_wait(seq, SHORT_MS));
    assert_true(now_ms() - start < MARGIN_MS);
    oscar_client_set_timeout(world->client, LONG_MS);
    assert_ok(oscar_seq_reserve(seq, 64)); /* computes it itself */
}

static void leases_have_a_name_where_they_pin_something(void **state) {
    struct client_world *world = *state;
    struct oscar_probe_result result;
    struct oscar_lease *lease, *empty;
    uint8_t secret[OSCAR_LEASE_SECRET];
    assert_ok(oscar_probe(world->model, some_tokens(), 300, &result, &empty));
    assert_int_equal(result.hit_tokens, 0);
    assert_code(OSCAR_ERR_NOT_FOUND, oscar_lease_secret(empty, secret));
    oscar_lease_close(empty);
    assert_int_equal(fake_oscard_count(world->fake, OSCAR_LEASE_CLOSE), 0);
    fake_oscard_set_hit(world->fake, 256, 256);
    assert_ok(oscar_probe(world->model, some_tokens(), 300, &result, &lease));
    assert_int_equal(result.hit_tokens, 256);
    assert_ok(oscar_lease_secret(lease, secret));
    assert_int_equal(secret[15], 0x5a);
    oscar_lease_close(lease);
    assert_int_equal(fake_oscard_count(world->fake, OSCAR_LEASE_CLOSE), 1);
    uint32_t hit;
    assert_ok(oscar_lease_adopt(world->model, secret, &lease, &hit));
    assert_int_equal(hit, 256);
    oscar_model_close(world->model); /* closes it */
    assert_int_equal(fake_oscard_count(world->fake, OSCAR_LEASE_CLOSE), 2);
}

static void a_sequence_that_cannot_be_sealed_can_only_be_closed(void **state) {
    struct client_world *world = *state;
    struct oscar_seq *seq = written_seq(world->model, 128, 0);
    fake_oscard_fail(world->fake, OSCAR_SEQ_ADVANCE, OSCAR_ERR_NOT_FINITE, "page 0 holds NaN");
    assert_code(OSCAR_ERR_NOT_FINITE, oscar_seq_advance(seq, NULL, some_tokens(), 64));
    fake_oscard_fail(world->fake, OSCAR_SEQ_ADVANCE, 0, "");
    assert_code(OSCAR_ERR_NOT_FINITE, oscar_seq_advance(seq, NULL, some_tokens(), 1));
    assert_non_null(strstr(oscar_error_detail(), "page 0 holds NaN"));
    oscar_seq_close(seq);
    assert_int_equal(fake_oscard_count(world->fake, OSCAR_SEQ_CLOSE), 1);
}

static void the_same_model_can_be_open_twice(void **state) {
    struct client_world *world = *state;
    struct oscar_model *again;
    struct oscar_seq *seq = written_seq(world->model, 128, 64);
    uint16_t out[QUERY_HEADS * HEAD_DIM];
    assert_ok(open_model(world->client, &again));
    oscar_model_close(again);
    assert_ok(attend_once(world->model, seq, 0, out));
    assert_ok(oscar_seq_reserve(seq, 256));
    struct oscar_model_info info = OSCAR_INIT(struct oscar_model_info);
    assert_ok(oscar_model_info(world->model, &info));
    assert_int_equal(info.dense_page_bytes, 65536);
    assert_int_equal(info.packed_page_bytes, 10240);
    float matrix[HEAD_DIM * HEAD_DIM];
    assert_ok(oscar_model_rotation(world->model, 0, 0, 0, matrix));
    assert_float_equal(matrix[0], 0.125F, 0);
    assert_float_equal(matrix[HEAD_DIM + 1], -0.125F, 0);
    assert_code(OSCAR_ERR_INVALID, oscar_model_rotation(world->model, LAYERS, 0, 0, matrix));
}

int main(void) {
#define WORLD_TEST(name) cmocka_unit_test_setup_teardown(name, world_setup, world_teardown)
    const struct CMUnitTest tests[] = {
        WORLD_TEST(the_hit_is_told_and_its_pages_are_there),
        WORLD_TEST(arguments_are_checked),
        WORLD_TEST(advance_speaks_when_a_page_fills),
        WORLD_TEST(a_reserve_that_fails_changes_nothing),
        WORLD_TEST(reserve_counts_from_tokens_that_were_not_told_yet),
        WORLD_TEST(committed_rows_are_never_written_again_and_others_are),
        WORLD_TEST(values_out_of_range_are_refused_at_once),
        WORLD_TEST(rows_are_the_uncommitted_part_of_a_page),
        WORLD_TEST(attend_checks_lengths_before_the_launch),
        WORLD_TEST(attend_takes_updates_over_without_waiting),
        WORLD_TEST(attend_asks_nothing_for_pages_that_cannot_change),
        WORLD_TEST(fences_are_even_for_requests_and_odd_for_what_was_taken_over),
        WORLD_TEST(on_a_stream_the_fence_follows_the_work),
        WORLD_TEST(enqueued_attention_reads_the_page_table_of_its_call),
        WORLD_TEST(a_fork_shares_what_is_sealed_and_copies_the_tail),
        WORLD_TEST(a_copy_to_a_foreign_page_is_refused),
        WORLD_TEST(a_wait_takes_over_what_another_worker_has_computed),
        WORLD_TEST(a_hit_that_grows_behind_the_callers_back_ends_the_sequence),
        WORLD_TEST(a_wait_for_a_silent_daemon_ends),
        WORLD_TEST(leases_have_a_name_where_they_pin_something),
        WORLD_TEST(a_sequence_that_cannot_be_sealed_can_only_be_closed),
        WORLD_TEST(the_same_model_can_be_open_twice),
    };
    return cmocka_run_group_tests_name("client_seq", tests, NULL, NULL);
}
