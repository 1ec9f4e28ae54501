/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two processes and a real daemon: what one has stored the other attends over in place. Compared with what the codec's oracle makes
 * of the same rows, and with exact attention where all is BF16.
 */
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/src/seq.h"
#include "kernels/number.h"
#include "kernels/reference.h"
#include "tests/integration/client_scene.h"
#include "tests/support/calibration_file.h"

#define SEED 11U
#define PREFIX 512U
#define ALL 552U
#define PAGES (PREFIX / OSCAR_PAGE_TOKENS)

static char calibrations[64];
static const char *flags[] = {"--memory-chunk", "1M", "--calibration-directory", calibrations, NULL};

static int start(void **state) {
    char path[96];
    (void)snprintf(calibrations, sizeof(calibrations), "/tmp/oscar-client-XXXXXX");
    if (mkdtemp(calibrations) == NULL)
        return -1;
    (void)snprintf(path, sizeof(path), "%s/turning.safetensors", calibrations);
    (void)calibration_file_write(path, 2);
    *state = daemon_start(flags);
    return 0;
}

static int stop(void **state) {
    char path[96];
    daemon_stop(*state);
    (void)snprintf(path, sizeof(path), "%s/turning.safetensors", calibrations);
    (void)unlink(path);
    (void)rmdir(calibrations);
    return 0;
}

/* --- the writer: a process that stores the prefix, says so, and lives until it is told to end ------------------------ */

struct writer {
    const char *socket, *calibration;
    bool keep_open; /* its sequence, so that the recent window stays BF16 */
};

static int write_prefix(struct line_pipe *pipe, void *argument) {
    const struct writer *writer = argument;
    struct scene scene;
    char line[64];
    scene_in_child();
    scene_open(&scene, writer->socket, writer->calibration);
    struct oscar_seq *seq = scene_seq(&scene, SEED, PREFIX, 0);
    REQUIRE(scene_info(seq).hit_tokens == 0);
    scene_write(&scene, seq, SEED, PREFIX);
    if (!writer->keep_open)
        oscar_seq_close(seq);
    if (line_tell(pipe, "stored") < 0 || line_hear(pipe, line, sizeof(line), ANSWER_MS) < 0)
        return 1;
    scene_close(&scene);
    return 0;
}

static void start_writer(struct worker_process *worker, struct writer *writer) {
    char line[64];
    assert_int_equal(worker_fork(worker, "writer", write_prefix, writer), 0);
    assert_int_equal(line_hear(&worker->pipe, line, sizeof(line), ANSWER_MS), 0);
    assert_string_equal(line, "stored");
}

static void end_writer(struct worker_process *worker) {
    int status;
    assert_int_equal(line_tell(&worker->pipe, "end"), 0);
    assert_int_equal(worker_wait(worker, ANSWER_MS, &status), 0);
    assert_int_equal(status, 0);
    worker_end(worker);
}

/* --- what it must come to -------------------------------------------------------------------------------------------- */

/* Pages of its own, made by the oracle, in the forms of a page table. */
struct twin {
    uint8_t *arena[OSCAR_FORMS];
    oscar_page_ref entry[PAGES + 1];
    uint32_t pages;
};

static void twin_make(struct twin *twin, const struct oscar_seq *seq, uint32_t tokens) {
    const struct oscar_geometry *geometry = &seq->model->info.geometry;
    const struct oscar_calibration *calibration = seq->model->memory->calibration;
    const uint64_t bytes[OSCAR_FORMS] = {oscar_dense_page_bytes(geometry), oscar_dense_page_bytes(geometry),
                                         oscar_packed_page_bytes(geometry)};
    twin->pages = oscar_pages_of(tokens);
    for (unsigned form = 0; form < OSCAR_FORMS; form++)
        twin->arena[form] = calloc(twin->pages, bytes[form]);
    uint8_t *address[PAGES + 1];
    for (uint32_t page = 0; page < twin->pages; page++) {
        address[page] = twin->arena[OSCAR_FORM_DENSE] + page * bytes[OSCAR_FORM_DENSE];
        twin->entry[page] = oscar_page_ref_make(oscar_page_ref_form(seq->pages.table->entry[page]), page);
    }
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        float *k = scene_rows(SEED, layer, 0, 0, tokens), *v = scene_rows(SEED, layer, 1, 0, tokens);
        uint16_t *k16 = scene_bf16(k, (size_t)tokens * ROW_ELEMENTS),
                 *v16 = scene_bf16(v, (size_t)tokens * ROW_ELEMENTS);
        const struct oscar_store_args args = {.geometry = geometry,
                                              .calibration = calibration,
                                              .layer = layer,
                                              .tokens = tokens,
                                              .pages = address,
                                              .k = {k16, ROW_ELEMENTS, HEAD_DIM},
                                              .v = {v16, ROW_ELEMENTS, HEAD_DIM}};
        MUST(oscar_reference_store(&args));
        free(k);
        free(v);
        free(k16);
        free(v16);
    }
    memcpy(twin->arena[OSCAR_FORM_SINK], twin->arena[OSCAR_FORM_DENSE], bytes[OSCAR_FORM_DENSE]);
    for (uint32_t page = 0; page < tokens / OSCAR_PAGE_TOKENS; page++) {
        int32_t status = 0;
        const struct oscar_pack_item item = {address[page],
                                             twin->arena[OSCAR_FORM_PACKED] + page * bytes[OSCAR_FORM_PACKED],
                                             (uint64_t)page * OSCAR_PAGE_TOKENS, &status};
        MUST(oscar_reference_pack(geometry, calibration, &item, 1));
    }
}

static void twin_free(struct twin *twin) {
    for (unsigned form = 0; form < OSCAR_FORMS; form++)
        free(twin->arena[form]);
}

/* The largest difference between what the sequence gives for its last `rows` tokens and what the oracle gives over the twin. */
static double distance(struct scene *scene, struct oscar_seq *seq, const struct twin *twin, uint32_t layer,
                       uint32_t tokens, uint32_t rows) {
    uint16_t *out = scene_attend(scene, seq, SEED, layer, tokens, rows);
    float *queries = scene_queries(SEED, layer, tokens - rows, rows);
    uint16_t *q = scene_bf16(queries, (size_t)rows * QUERY_ELEMENTS);
    double *wanted = calloc((size_t)rows * QUERY_ELEMENTS, sizeof(*wanted)), largest = 0;
    const struct oscar_geometry *geometry = &scene->geometry;
    struct oscar_attend_args args = {.geometry = geometry,
                                     .calibration = seq->model->memory->calibration,
                                     .layer = layer,
                                     .softmax_scale = 1.0F / sqrtf((float)HEAD_DIM)};
    for (unsigned form = 0; form < OSCAR_FORMS; form++)
        args.arenas[form] = (struct oscar_arena_view){
            .base = twin->arena[form],
            .stride = form == OSCAR_FORM_PACKED ? oscar_packed_page_bytes(geometry) : oscar_dense_page_bytes(geometry)};
    const struct oscar_attend_item item = {.pages = twin->entry,
                                           .tokens = tokens,
                                           .rows = rows,
                                           .q = q,
                                           .q_row_stride = QUERY_ELEMENTS,
                                           .q_head_stride = HEAD_DIM};
    MUST(oscar_reference_attend(&args, &item, wanted, NULL));
    for (size_t i = 0; i < (size_t)rows * QUERY_ELEMENTS; i++)
        largest = fmax(largest, fabs(wanted[i] - (double)oscar_bf16_to_float(out[i])));
    free(out);
    free(queries);
    free(q);
    free(wanted);
    return largest;
}

/* The same against exact attention over the rows themselves. */
static double distance_from_exact(struct scene *scene, struct oscar_seq *seq, uint32_t layer, uint32_t tokens,
                                  uint32_t rows) {
    uint16_t *out = scene_attend(scene, seq, SEED, layer, tokens, rows);
    float *k = scene_rows(SEED, layer, 0, 0, tokens), *v = scene_rows(SEED, layer, 1, 0, tokens);
    float *q = scene_queries(SEED, layer, tokens - rows, rows);
    double *wanted = calloc((size_t)rows * QUERY_ELEMENTS, sizeof(*wanted)), largest = 0;
    oscar_reference_exact(&scene->geometry, k, v, tokens, q, rows, 1.0F / sqrtf((float)HEAD_DIM), wanted, NULL);
    for (size_t i = 0; i < (size_t)rows * QUERY_ELEMENTS; i++)
        largest = fmax(largest, fabs(wanted[i] - (double)oscar_bf16_to_float(out[i])));
    free(out);
    free(k);
    free(v);
    free(q);
    free(wanted);
    return largest;
}

/* --- tests ----------------------------------------------------------------------------------------------------------- */

static void read_what_a_writer_stored(struct test_daemon *daemon, const char *calibration) {
    struct writer writer = {daemon->socket, calibration, false};
    struct worker_process process;
    struct scene scene;
    struct twin twin;
    start_writer(&process, &writer);
    scene_open(&scene, daemon->socket, calibration);
    struct oscar_seq *seq = scene_await_packed(&scene, SEED, ALL, PREFIX - OSCAR_PAGE_TOKENS);
    assert_int_equal(scene_info(seq).hit_tokens, PREFIX);
    scene_write(&scene, seq, SEED, ALL);
    assert_int_equal(worker_signal(&process, 9), 0); /* the writer is killed, and nobody notices */
    worker_end(&process);

    twin_make(&twin, seq, ALL);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        assert_true(distance(&scene, seq, &twin, layer, ALL, 1) < 1e-2);            /* decode */
        assert_true(distance(&scene, seq, &twin, layer, ALL, ALL - PREFIX) < 1e-2); /* prefill of the rest */
        assert_true(distance(&scene, seq, &twin, layer, PREFIX - 5, 3) < 1e-2);     /* the first tokens only */
        assert_true(distance_from_exact(&scene, seq, layer, ALL, 1) < 0.5);         /* INT2 of noise is coarse */
    }
    twin_free(&twin);
    scene_close(&scene);
}

static void a_reader_sees_what_the_codec_makes_of_the_writers_rows(void **state) {
    read_what_a_writer_stored(*state, NULL);
}

static void a_calibration_file_with_a_turning_centre_gives_the_same(void **state) {
    read_what_a_writer_stored(*state, "turning");
}

static void a_recent_window_is_bf16_while_its_sequence_lives(void **state) {
    struct test_daemon *daemon = *state;
    struct writer writer = {daemon->socket, NULL, true};
    struct worker_process process;
    struct scene scene;
    struct twin twin;
    start_writer(&process, &writer);
    scene_open(&scene, daemon->socket, NULL);
    struct oscar_seq *seq = scene_await_packed(&scene, SEED, PREFIX, PREFIX - OSCAR_RECENT_TOKENS - OSCAR_PAGE_TOKENS);
    twin_make(&twin, seq, PREFIX);
    for (uint32_t page = 0; page < PAGES; page++)
        assert_int_equal(oscar_page_ref_form(twin.entry[page]), page == 0  ? OSCAR_FORM_SINK
                                                                : page < 4 ? OSCAR_FORM_PACKED
                                                                           : OSCAR_FORM_DENSE);
    assert_true(distance(&scene, seq, &twin, 1, PREFIX, 1) < 1e-2);
    twin_free(&twin);
    oscar_seq_close(seq);
    end_writer(&process);

    /* Without it the window is packed, and a dense tail costs its tokens. */
    seq = scene_await_packed(&scene, SEED, PREFIX, PREFIX - OSCAR_PAGE_TOKENS);
    struct oscar_seq *dense = scene_seq(&scene, SEED, PREFIX, OSCAR_SEQ_DENSE_TAIL);
    assert_int_equal(scene_info(dense).hit_tokens, PREFIX - OSCAR_RECENT_TOKENS);
    scene_write(&scene, dense, SEED, PREFIX);
    twin_make(&twin, dense, PREFIX);
    assert_int_equal(oscar_page_ref_form(twin.entry[PAGES - 1]), OSCAR_FORM_DENSE);
    assert_true(distance(&scene, dense, &twin, 0, PREFIX, 1) < 1e-2);
    twin_free(&twin);
    scene_close(&scene);
}

static void in_the_recent_window_attention_is_exact(void **state) {
    struct test_daemon *daemon = *state;
    struct scene scene;
    scene_open(&scene, daemon->socket, NULL);
    struct oscar_seq *seq = scene_seq(&scene, SEED, 0, 0);
    scene_write(&scene, seq, SEED, 200);
    assert_true(distance_from_exact(&scene, seq, 0, 200, 1) < 1e-2);
    assert_true(distance_from_exact(&scene, seq, 1, 200, 200) < 3e-2); /* early rows have few tokens to average over */
    scene_close(&scene);
}

static void a_fork_goes_its_own_way(void **state) {
    struct test_daemon *daemon = *state;
    struct scene scene;
    struct oscar_seq *child;
    scene_open(&scene, daemon->socket, NULL);
    struct oscar_seq *seq = scene_seq(&scene, SEED, 0, 0);
    scene_write(&scene, seq, SEED, 200);
    MUST(oscar_seq_fork(seq, NULL, &child));
    assert_int_equal(scene_info(child).committed_tokens, 200);
    scene_write(&scene, child, SEED + 1, 250);
    scene_write(&scene, seq, SEED, 250);
    assert_true(distance_from_exact(&scene, seq, 0, 250, 1) < 1e-2);
    assert_true(distance_from_exact(&scene, child, 0, 200, 1) < 1e-2);
    assert_true(distance_from_exact(&scene, child, 0, 250, 1) > 1e-2); /* other rows stand there */
    oscar_seq_close(seq);
    assert_true(distance_from_exact(&scene, child, 1, 200, 1) < 1e-2);
    scene_close(&scene);
}

/* --- single flight, leases --------------------------------------------------------------------------------------------- */

static int write_when_told(struct line_pipe *pipe, void *argument) {
    const struct writer *writer = argument;
    struct scene scene;
    char line[64];
    scene_in_child();
    scene_open(&scene, writer->socket, NULL);
    struct oscar_seq *seq = scene_seq(&scene, SEED, PREFIX, 0);
    if (line_tell(pipe, "opened") < 0 || line_hear(pipe, line, sizeof(line), ANSWER_MS) < 0)
        return 1;
    for (uint32_t end = OSCAR_PAGE_TOKENS; end <= PREFIX; end += OSCAR_PAGE_TOKENS)
        scene_write(&scene, seq, SEED, end);
    if (line_hear(pipe, line, sizeof(line), ANSWER_MS) < 0)
        return 1;
    scene_close(&scene);
    return 0;
}

static void the_second_worker_waits_for_the_first(void **state) {
    struct test_daemon *daemon = *state;
    struct writer writer = {daemon->socket, NULL, false};
    struct worker_process process;
    struct scene scene;
    char line[64];
    assert_int_equal(worker_fork(&process, "writer", write_when_told, &writer), 0);
    assert_int_equal(line_hear(&process.pipe, line, sizeof(line), ANSWER_MS), 0);
    scene_open(&scene, daemon->socket, NULL);
    struct oscar_seq *seq = scene_seq(&scene, SEED, PREFIX, 0);
    assert_int_equal(scene_info(seq).hit_tokens, 0);
    assert_int_equal(scene_info(seq).in_flight_tokens, PREFIX);
    assert_int_equal(oscar_seq_wait(seq, 20), OSCAR_ERR_TIMEOUT);
    assert_int_equal(line_tell(&process.pipe, "write"), 0);
    MUST(oscar_seq_wait(seq, ANSWER_MS));
    assert_int_equal(scene_info(seq).hit_tokens, PREFIX);
    assert_int_equal(scene_info(seq).in_flight_tokens, PREFIX);
    end_writer(&process);
    free(scene_attend(&scene, seq, SEED, 0, PREFIX, 1));
    scene_close(&scene);
}

static int lease_prefix(struct line_pipe *pipe, void *argument) {
    const struct writer *writer = argument;
    struct scene scene;
    struct oscar_probe_result result;
    struct oscar_lease *lease;
    uint8_t secret[OSCAR_LEASE_SECRET];
    char line[2 * OSCAR_LEASE_SECRET + 1];
    scene_in_child();
    scene_open(&scene, writer->socket, NULL);
    MUST(oscar_probe(scene.model, scene_tokens(SEED, PREFIX), PREFIX, &result, &lease));
    MUST(oscar_lease_secret(lease, secret));
    for (size_t i = 0; i < sizeof(secret); i++)
        (void)snprintf(line + 2 * i, 3, "%02x", secret[i]);
    if (line_tell(pipe, "%s", line) < 0 || line_hear(pipe, line, sizeof(line), ANSWER_MS) < 0)
        return 1;
    oscar_lease_close(lease); /* the other process has it: that is none of ours any more */
    scene_close(&scene);
    return 0;
}

static void a_lease_is_adopted_by_another_process(void **state) {
    struct test_daemon *daemon = *state;
    struct writer writer = {daemon->socket, NULL, false};
    struct worker_process process;
    struct scene scene;
    struct oscar_lease *lease, *second;
    uint8_t secret[OSCAR_LEASE_SECRET];
    char line[64];
    uint32_t hit;
    start_writer(&process, &writer);
    end_writer(&process);
    scene_open(&scene, daemon->socket, NULL);
    scene_await_hit(&scene, SEED, PREFIX, PREFIX);
    assert_int_equal(worker_fork(&process, "scheduler", lease_prefix, &writer), 0);
    assert_int_equal(line_hear(&process.pipe, line, sizeof(line), ANSWER_MS), 0);
    for (size_t i = 0; i < sizeof(secret); i++) {
        char pair[3] = {line[2 * i], line[2 * i + 1], '\0'};
        secret[i] = (uint8_t)strtoul(pair, NULL, 16);
    }
    MUST(oscar_lease_adopt(scene.model, secret, &lease, &hit));
    assert_int_equal(hit, PREFIX);
    assert_int_equal(oscar_lease_adopt(scene.model, (const uint8_t[OSCAR_LEASE_SECRET]){1}, &second, NULL),
                     OSCAR_ERR_NOT_FOUND);
    end_writer(&process);
    oscar_lease_close(lease);
    scene_close(&scene);
}

int main(void) {
#define SCENE_TEST(name) cmocka_unit_test_setup_teardown(name, start, stop)
    const struct CMUnitTest tests[] = {
        SCENE_TEST(a_reader_sees_what_the_codec_makes_of_the_writers_rows),
        SCENE_TEST(a_calibration_file_with_a_turning_centre_gives_the_same),
        SCENE_TEST(a_recent_window_is_bf16_while_its_sequence_lives),
        SCENE_TEST(in_the_recent_window_attention_is_exact),
        SCENE_TEST(a_fork_goes_its_own_way),
        SCENE_TEST(the_second_worker_waits_for_the_first),
        SCENE_TEST(a_lease_is_adopted_by_another_process),
    };
    return cmocka_run_group_tests_name("client_shared", tests, NULL, NULL);
}
