/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory runs out at every place where the library asks for some: the call says so, changes nothing, and works when it is tried
 * again. The linker puts the functions below in the place of malloc and its kin (--wrap).
 */
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/client_fixture.h"

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *memory, size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *memory, size_t size);

/* Of this thread only: the fake daemon goes on. The request of that number from now on fails; 0: none. */
static _Thread_local unsigned countdown;
static _Thread_local bool failed;

static bool fails_now(void) {
    if (countdown == 0 || --countdown > 0)
        return false;
    failed = true;
    return true;
}

void *__wrap_malloc(size_t size) { return fails_now() ? NULL : __real_malloc(size); }
void *__wrap_calloc(size_t count, size_t size) { return fails_now() ? NULL : __real_calloc(count, size); }
void *__wrap_realloc(void *memory, size_t size) { return fails_now() ? NULL : __real_realloc(memory, size); }

/* The k-th request of a call fails, for each k that there is; each time the call is tried again with memory at hand. */
#define FIRST_FAIL(k, call)                                                                                            \
    do {                                                                                                               \
        failed = false;                                                                                                \
        countdown = (k);                                                                                               \
        int r_ = (call);                                                                                               \
        countdown = 0;                                                                                                 \
        if (failed)                                                                                                    \
            any = true;                                                                                                \
        if (r_ != 0 && (!failed || r_ != OSCAR_ERR_NO_MEMORY))                                                         \
            fail_msg("%s, request %u: %s (%s)", #call, (k), oscar_error_name(r_), oscar_error_detail());               \
        if (r_ == OSCAR_ERR_NO_MEMORY)                                                                                 \
            assert_ok(call);                                                                                           \
    } while (0)

/* A step of one token by a batch, and its result merged with one over nothing. */
static bool step_by_batch(struct client_world *world, struct oscar_seq *seq, unsigned k) {
    bool any = false;
    static uint16_t q[QUERY_HEADS * HEAD_DIM], out[2][QUERY_HEADS * HEAD_DIM], kv[ROW_ELEMENTS];
    float lse[2][QUERY_HEADS] = {{0}, {-INFINITY, -INFINITY, -INFINITY, -INFINITY}};
    struct oscar_batch_params params = {.size = sizeof(params), .max_seqs = 2, .max_rows = 1, .max_tokens = 4096};
    const struct oscar_batch_entry entry = {.seq = seq, .rows = 1};
    const struct oscar_partial partial[2] = {{out[0], QUERY_HEADS * HEAD_DIM, HEAD_DIM, lse[0]},
                                             {out[1], QUERY_HEADS * HEAD_DIM, HEAD_DIM, lse[1]}};
    struct oscar_batch *batch;
    FIRST_FAIL(k, oscar_batch_open(world->model, &params, &batch));
    FIRST_FAIL(k, oscar_batch_set(batch, NULL, &entry, 1));
    FIRST_FAIL(k, oscar_batch_store(batch, NULL, 0, kv, kv));
    FIRST_FAIL(k, oscar_batch_attend(batch, NULL, 0, 0, q, out[0], lse[0]));
    FIRST_FAIL(k, oscar_merge(world->model, NULL, 1, &partial[0], &partial[1]));
    failed = false;
    countdown = k;
    oscar_batch_close(batch);
    countdown = 0;
    assert_false(failed);
    return any;
}

/* Everything once; true when some request for memory failed. */
static bool live(struct client_world *world, unsigned k) {
    bool any = false;
    uint16_t out[QUERY_HEADS * HEAD_DIM];
    struct oscar_seq *seq, *child;
    struct oscar_lease *lease, *adopted;
    struct oscar_probe_result result;
    struct oscar_stream *stream;
    struct oscar_stream_params params = OSCAR_INIT(struct oscar_stream_params);
    uint8_t secret[OSCAR_LEASE_SECRET] = {0};

    FIRST_FAIL(k, open_client(world->fake, &world->client));
    FIRST_FAIL(k, open_model(world->client, &world->model));
    FIRST_FAIL(k, oscar_stream_open(world->client, &params, &stream));
    FIRST_FAIL(k, oscar_client_ping(world->client));
    fake_oscard_set_hit(world->fake, 64, 128);
    FIRST_FAIL(k, oscar_seq_open(world->model, some_tokens(), 200, 0, &seq));
    fake_oscard_set_hit(world->fake, 128, 128);
    FIRST_FAIL(k, oscar_seq_wait(seq, 10));
    assert_int_equal(seq_info(seq).committed_tokens, 128);
    FIRST_FAIL(k, oscar_seq_reserve(seq, 1200));
    assert_int_equal(seq_info(seq).reserved_tokens, 1344);
    FIRST_FAIL(k, store_value(seq, stream, 0, 128, 1200, 1.0F));
    FIRST_FAIL(k, store_value(seq, NULL, 1, 128, 1200, 1.0F));
    FIRST_FAIL(k, attend_once(world->model, seq, 200, out));
    any = step_by_batch(world, seq, k) || any;
    fake_oscard_queue_update(world->fake, 1, oscar_page_ref_make(OSCAR_FORM_PACKED, 3));
    FIRST_FAIL(k, oscar_seq_advance(seq, stream, some_tokens(), 200));
    assert_int_equal(seq_info(seq).committed_tokens, 328);
    FIRST_FAIL(k, oscar_seq_advance(seq, NULL, NULL, 0));
    assert_int_equal(seq_info(seq).sealed_tokens, 320);
    FIRST_FAIL(k, oscar_seq_fork(seq, stream, &child));
    assert_int_equal(seq_info(child).committed_tokens, 328);
    FIRST_FAIL(k, oscar_probe(world->model, some_tokens(), 200, &result, &lease));
    FIRST_FAIL(k, oscar_lease_adopt(world->model, secret, &adopted, NULL));

    failed = false;
    countdown = k;
    oscar_seq_close(child);
    oscar_lease_close(adopted);
    oscar_model_close(world->model);
    countdown = 0;
    assert_false(failed); /* closing needs no memory */
    oscar_stream_close(stream);
    oscar_client_close(world->client);
    world->client = NULL;
    fake_oscard_settle(world->fake);
    return any;
}

static void every_request_for_memory_may_fail(void **state) {
    unsigned k = 1, before = open_descriptors();
    bool any = true;
    for (; any; k++) {
        struct client_world world = {.fake = fake_oscard_start()};
        any = live(&world, k);
        assert_int_equal(fake_oscard_count(world.fake, OSCAR_SEQ_OPEN) + fake_oscard_count(world.fake, OSCAR_SEQ_FORK),
                         fake_oscard_count(world.fake, OSCAR_SEQ_CLOSE));
        assert_int_equal(fake_oscard_count(world.fake, OSCAR_MODEL_OPEN),
                         fake_oscard_count(world.fake, OSCAR_MODEL_CLOSE));
        fake_oscard_stop(world.fake);
        assert_int_equal(open_descriptors(), before);
    }
    print_message("no call asks for memory more than %u times\n", k - 2);
    assert_true(k > 4);
    (void)state;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(every_request_for_memory_may_fail, tokens_setup),
    };
    return cmocka_run_group_tests_name("client_memory", tests, NULL, NULL);
}
