/* SPDX-License-Identifier: Apache-2.0 */
/* What the daemon says about pages and chunks is checked before it counts: no attention over memory that is not there. */
#include <stdlib.h>
#include <string.h>

#include "tests/unit/client_fixture.h"

#define REF(form, id) oscar_page_ref_make(OSCAR_FORM_##form, id)

static struct oscar_page_update bad_update; /* what the fake says instead */
static struct oscar_page_update *bad_place(struct fake_oscard *fake) { return &fake_oscard_updates(fake)[1]; }

static bool bad_open(struct fake_oscard *fake, const struct oscar_request *request, struct oscar_reply *reply) {
    (void)request;
    (void)reply;
    *bad_place(fake) = bad_update;
    return true;
}

static void a_sequence_with_a_bad_page_is_not_opened(void **state) {
    struct client_world *world = *state;
    const struct oscar_page_update cases[] = {
        {4, 0, REF(PACKED, 1)},                        /* beyond the hit */
        {UINT32_MAX, 0, REF(PACKED, 1)},               /* far beyond */
        {1, 7, REF(PACKED, 1)},                        /* a reserved field */
        {1, 0, 0},                                     /* no page in the hit */
        {1, 0, REF(SINK, 1)},                          /* the sink is page 0 only */
        {1, 0, REF(PACKED, FAKE_MAX_PAGES)},           /* beyond the arena */
        {1, 0, REF(PACKED, OSCAR_PAGE_ID_MASK)},       /* far beyond */
        {1, 0, REF(PACKED, FAKE_CHUNK_PAGES)},         /* in a chunk that was never announced */
        {1, 0, REF(DENSE, 0)},                         /* the same */
        {1, 0, REF(PACKED, 1) | UINT64_C(3) << 56},    /* no such form */
        {1, 0, REF(PACKED, 1) | UINT64_C(1) << 50},    /* bits that mean nothing */
        {1, 0, REF(PACKED, 1) & ~(UINT64_C(1) << 63)}, /* not marked as a page */
        {0, 0, REF(PACKED, 1)},                        /* page 0 packed, and page 1 missing */
    };
    fake_oscard_set_hit(world->fake, 256, 256);
    fake_oscard_change(world->fake, OSCAR_SEQ_OPEN, bad_open);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct oscar_seq *seq = NULL;
        bad_update = cases[i];
        int r = oscar_seq_open(world->model, some_tokens(), 256, 0, &seq);
        if (r != OSCAR_ERR_PROTOCOL || seq != NULL)
            fail_msg("case %zu: %s", i, oscar_error_name(r));
        assert_int_equal(fake_oscard_count(world->fake, OSCAR_SEQ_CLOSE),
                         i + 1); /* what the daemon has opened is closed */
    }
    fake_oscard_change(world->fake, OSCAR_SEQ_OPEN, NULL);
    struct oscar_seq *seq;
    assert_ok(oscar_seq_open(world->model, some_tokens(), 256, 0, &seq));
    assert_int_equal(seq_info(seq).packed_tokens, 192);
}

static uint32_t bad_number;

static bool bad_hit(struct fake_oscard *fake, const struct oscar_request *request, struct oscar_reply *reply) {
    (void)fake;
    (void)request;
    reply->seq_open.hit_tokens = bad_number;
    return true;
}

static bool bad_count(struct fake_oscard *fake, const struct oscar_request *request, struct oscar_reply *reply) {
    (void)fake;
    (void)request;
    reply->seq_open.updates = bad_number;
    return true;
}

static void numbers_out_of_range_are_refused(void **state) {
    struct client_world *world = *state;
    static const struct {
        fake_change *change;
        uint32_t number;
    } cases[] = {{bad_hit, 320}, {bad_hit, 65}, {bad_count, 3}, {bad_count, 0}};
    fake_oscard_set_hit(world->fake, 256, 256);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct oscar_seq *seq;
        bad_number = cases[i].number;
        fake_oscard_change(world->fake, OSCAR_SEQ_OPEN, cases[i].change);
        int r = oscar_seq_open(world->model, some_tokens(), 256, 0, &seq);
        if (r != OSCAR_ERR_PROTOCOL)
            fail_msg("case %zu: %s", i, oscar_error_name(r));
    }
    assert_ok(oscar_client_ping(world->client)); /* a bad sequence is not the end of the connection */
    bad_number = OSCAR_MAX_UPDATES + 1;
    struct oscar_seq *seq;
    assert_code(OSCAR_ERR_PROTOCOL, oscar_seq_open(world->model, some_tokens(), 256, 0, &seq));
    assert_code(OSCAR_ERR_PROTOCOL, oscar_client_ping(world->client)); /* a reply that lies about the window is */
}

static void a_bad_update_ends_the_sequence_and_nothing_else(void **state) {
    struct client_world *world = *state;
    uint16_t out[QUERY_HEADS * HEAD_DIM];
    struct oscar_seq *seq = written_seq(world->model, 256, 64), *other = written_seq(world->model, 64, 0);
    fake_oscard_queue_update(world->fake, 0, REF(SINK, FAKE_CHUNK_PAGES * 2));
    assert_code(OSCAR_ERR_PROTOCOL, oscar_seq_advance(seq, NULL, NULL, 0));
    assert_code(OSCAR_ERR_PROTOCOL, oscar_seq_advance(seq, NULL, NULL, 0)); /* for good, with the same cause */
    assert_non_null(strstr(oscar_error_detail(), "no mapped chunk"));
    assert_ok(attend_once(world->model, other, 1, out));
    oscar_seq_close(seq);
    assert_ok(oscar_client_ping(world->client));
}

static void a_tail_that_is_not_writable_is_refused(void **state) {
    struct client_world *world = *state;
    struct oscar_seq *seq = written_seq(world->model, 256, 0);
    struct oscar_chunk_info foreign = fake_oscard_chunk(world->fake, OSCAR_FORM_DENSE, 2);
    foreign.writable = false;
    fake_oscard_announce(world->fake, &foreign);
    fake_oscard_queue_update(world->fake, 1, REF(DENSE, 2 * FAKE_CHUNK_PAGES));
    assert_code(OSCAR_ERR_PROTOCOL, oscar_seq_advance(seq, NULL, NULL, 0));

    struct oscar_seq *shared = written_seq(world->model, 256, 0);
    assert_ok(store_value(shared, NULL, 0, 0, 128, 1.0F));
    fake_oscard_queue_update(world->fake, 1, REF(DENSE, 2 * FAKE_CHUNK_PAGES)); /* below the tail it may be anybody's */
    assert_ok(oscar_seq_advance(shared, NULL, some_tokens(), 128));
}

static void a_chunk_under_a_page_table_is_not_taken_away(void **state) {
    struct client_world *world = *state;
    uint16_t out[QUERY_HEADS * HEAD_DIM];
    struct oscar_seq *seq = written_seq(world->model, 64, 64);
    struct oscar_chunk_info gone = fake_oscard_chunk(world->fake, OSCAR_FORM_DENSE, 0);
    gone.generation += 10; /* speaks of another one: ignored */
    fake_oscard_gone(world->fake, &gone);
    assert_ok(oscar_client_ping(world->client));
    gone.generation -= 10;
    fake_oscard_gone(world->fake, &gone);
    assert_code(OSCAR_ERR_PROTOCOL, oscar_client_ping(world->client));
    assert_ok(attend_once(world->model, seq, 0, out));
}

static void a_chunk_that_nobody_uses_is_unmapped_and_filled_anew(void **state) {
    struct client_world *world = *state;
    oscar_seq_close(written_seq(world->model, 64, 64));
    struct oscar_chunk_info chunk = fake_oscard_chunk(world->fake, OSCAR_FORM_DENSE, 0);
    fake_oscard_gone(world->fake, &chunk);
    struct oscar_seq *seq;
    assert_ok(oscar_seq_open(world->model, NULL, 0, 0, &seq));
    assert_code(OSCAR_ERR_PROTOCOL, oscar_seq_reserve(seq, 64));
    assert_non_null(strstr(oscar_error_detail(), "no mapped chunk"));
    oscar_seq_close(seq);

    chunk.generation += 5;
    fake_oscard_announce(world->fake, &chunk);
    seq = written_seq(world->model, 64, 64);
    fake_oscard_queue_update(world->fake, 0, REF(DENSE, 0));
    assert_ok(oscar_seq_advance(seq, NULL, NULL, 0));
    const uint8_t *page = fake_oscard_page(world->fake, REF(DENSE, 2));
    assert_memory_equal(page, "\x00\x41", 2); /* a row of ones is rotated to 8 = sqrt(64) and zeros */
}

static void bad_notices_end_the_connection(void **state) {
    struct client_world *world = *state;
    struct oscar_chunk_info good = fake_oscard_chunk(world->fake, OSCAR_FORM_PACKED, 1), bad[6];
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        bad[i] = good;
    bad[0].index = FAKE_MAX_PAGES;
    bad[1].bytes += 4096;
    bad[2].writable = true;
    bad[3].generation = 0;
    bad[4].bytes = 0;
    bad[5].form = OSCAR_FORM_SINK; /* its size is that of another form */
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        unsigned before = open_descriptors();
        fake_oscard_announce(world->fake, &bad[i]);
        if (oscar_client_ping(world->client) != OSCAR_ERR_PROTOCOL)
            fail_msg("notice %zu was taken", i);
        assert_true(open_descriptors() <= before);
        oscar_client_close(world->client);
        world->client = NULL;
        fake_oscard_settle(world->fake);
        assert_ok(open_client(world->fake, &world->client));
        assert_ok(open_model(world->client, &world->model));
    }
    fake_oscard_announce(world->fake, &good);
    assert_ok(oscar_client_ping(world->client));
}

static void notices_of_unknown_models_are_ignored_and_their_descriptors_closed(void **state) {
    struct client_world *world = *state;
    unsigned before = open_descriptors();
    struct oscar_chunk_info chunk = fake_oscard_chunk(world->fake, OSCAR_FORM_PACKED, 1);
    chunk.model++;
    for (unsigned i = 0; i < 10; i++)
        fake_oscard_announce(world->fake, &chunk);
    assert_ok(oscar_client_ping(world->client));
    assert_int_equal(open_descriptors(), before);
}

static void garbage_ends_the_connection_and_leaves_no_descriptor(void **state) {
    struct client_world *world = *state;
    static const struct {
        enum oscar_record_kind kind;
        unsigned fds;
        const char *bytes;
        uint32_t size;
    } cases[] = {{OSCAR_RECORD_REPLY, 0, "\xff\xff\xff", 3},
                 {OSCAR_RECORD_NOTICE, 5, "\xff\xff\xff", 3},
                 {OSCAR_RECORD_REPLY, 200, "\xff\xff\xff", 3},
                 {OSCAR_RECORD_NOTICE, 0, "", 0},
                 {OSCAR_RECORD_REQUEST, 0, "", 0},
                 {OSCAR_RECORD_REQUEST, 3, "", 0},
                 {(enum oscar_record_kind)9, 2, "", 0}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        unsigned before = open_descriptors();
        fake_oscard_send_bytes(world->fake, cases[i].kind, cases[i].bytes, cases[i].size, cases[i].fds);
        if (oscar_client_ping(world->client) != OSCAR_ERR_PROTOCOL)
            fail_msg("record %zu was taken", i);
        assert_true(open_descriptors() <= before);
        oscar_client_close(world->client);
        world->client = NULL;
        fake_oscard_settle(world->fake);
        assert_ok(open_client(world->fake, &world->client));
        assert_ok(open_model(world->client, &world->model));
    }
}

static bool no_arena(struct fake_oscard *fake, const struct oscar_request *request, struct oscar_reply *reply) {
    (void)fake;
    (void)request;
    reply->model_open.arenas[OSCAR_FORM_PACKED].page_bytes = bad_number;
    return true;
}

static bool wrong_calibration(struct fake_oscard *fake, const struct oscar_request *request,
                              struct oscar_reply *reply) {
    (void)fake;
    (void)request;
    reply->model_open.calibration_digest.bytes[0] ^= 1;
    return true;
}

static bool promised_file(struct fake_oscard *fake, const struct oscar_request *request, struct oscar_reply *reply) {
    (void)fake;
    (void)request;
    reply->model_open.calibration_bytes = 4096; /* and no descriptor */
    return true;
}

static void a_wrong_model_reply_is_refused_and_undone(void **state) {
    struct client_world *world = *state;
    fake_change *const changes[] = {no_arena, wrong_calibration, promised_file};
    unsigned closes = fake_oscard_count(world->fake, OSCAR_MODEL_CLOSE);
    oscar_model_close(world->model);
    closes++;
    unsigned before = open_descriptors();
    bad_number = 512;
    for (size_t i = 0; i < sizeof(changes) / sizeof(changes[0]); i++) {
        struct oscar_model *model = NULL;
        fake_oscard_change(world->fake, OSCAR_MODEL_OPEN, changes[i]);
        assert_code(OSCAR_ERR_PROTOCOL, open_model(world->client, &model));
        assert_null(model);
        assert_true(fake_oscard_wait(world->fake, OSCAR_MODEL_CLOSE, ++closes));
        assert_int_equal(open_descriptors(), before);
    }
    fake_oscard_change(world->fake, OSCAR_MODEL_OPEN, NULL);
    assert_ok(open_model(world->client, &world->model));
}

int main(void) {
#define WORLD_TEST(name) cmocka_unit_test_setup_teardown(name, world_setup, world_teardown)
    const struct CMUnitTest tests[] = {
        WORLD_TEST(a_sequence_with_a_bad_page_is_not_opened),
        WORLD_TEST(numbers_out_of_range_are_refused),
        WORLD_TEST(a_bad_update_ends_the_sequence_and_nothing_else),
        WORLD_TEST(a_tail_that_is_not_writable_is_refused),
        WORLD_TEST(a_chunk_under_a_page_table_is_not_taken_away),
        WORLD_TEST(a_chunk_that_nobody_uses_is_unmapped_and_filled_anew),
        WORLD_TEST(bad_notices_end_the_connection),
        WORLD_TEST(notices_of_unknown_models_are_ignored_and_their_descriptors_closed),
        WORLD_TEST(garbage_ends_the_connection_and_leaves_no_descriptor),
        WORLD_TEST(a_wrong_model_reply_is_refused_and_undone),
    };
    return cmocka_run_group_tests_name("client_pages", tests, NULL, NULL);
}
