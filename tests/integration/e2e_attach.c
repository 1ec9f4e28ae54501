/* SPDX-License-Identifier: Apache-2.0 */
/* Attaching to a cache of many chunks, in a process that may have few files open. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/resource.h>
#include <cmocka.h>

#include "tests/integration/e2e_daemon.h"
#include "tests/integration/e2e_model.h"
#include "tests/support/descriptors.h"
#include "tests/support/worker_process.h"

#define ANSWER_MS 30000
#define BUDGET "400M"
#define PATHS 96U        /* each a sink, and each sink a chunk; and as many again when the reader is there */
#define DRIVER_FILES 16U /* a GPU's driver may open some for memory of the reader's own */
#define SPARE_FILES (64U + DRIVER_FILES) /* fewer than chunks, enough for what one record brings */

/* A dense page of 1.25 MiB: one fills a chunk. */
static struct oscar_geometry geometry(void) {
    struct oscar_geometry geometry;
    oscar_geometry_init(&geometry, 5, 8, 8, 128, OSCAR_BF16);
    return geometry;
}

static struct text path(uint32_t number) {
    struct text text = {0};
    text_append(&text, number + 1, OSCAR_SINK_TOKENS);
    return text;
}

/* What their pages hold does not matter. */
static void seal_paths(const struct test_daemon *daemon, struct e2e_worker *writer, uint32_t first) {
    for (uint32_t i = first; i < first + PATHS; i++) {
        struct text text = path(i);
        struct oscar_seq *seq = e2e_open(writer, &text, 0, 0);
        MUST(oscar_seq_reserve(seq, OSCAR_SINK_TOKENS));
        MUST(oscar_seq_advance(seq, NULL, text.ids, OSCAR_SINK_TOKENS));
        oscar_seq_close(seq);
        text_free(&text);
        e2e_wait_metric(daemon, E2E_SINK, i + 1);
    }
}

static void must_hit(struct e2e_worker *reader, uint32_t number) {
    struct text text = path(number);
    struct oscar_seq *seq = e2e_open(reader, &text, OSCAR_SINK_TOKENS, 0);
    REQUIRE(e2e_info(seq).hit_tokens == OSCAR_SINK_TOKENS);
    oscar_seq_close(seq);
    text_free(&text);
}

static int read_with_few_descriptors(struct line_pipe *pipe, void *argument) {
    (void)argument;
    e2e_child();
    struct e2e_worker reader = {.geometry = geometry()};
    struct oscar_client_options client = {.size = sizeof(client), .name = "reader", .timeout_ms = ANSWER_MS};
    struct oscar_model_options model = e2e_model_options(&reader.geometry);
    MUST(oscar_client_open(&client, &reader.client));
    unsigned before = open_descriptors();
    struct rlimit limit;
    REQUIRE(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    limit.rlim_cur = before + SPARE_FILES;
    REQUIRE(setrlimit(RLIMIT_NOFILE, &limit) == 0);

    MUST(oscar_model_open(reader.client, &model, &reader.model));
    REQUIRE(open_descriptors() <= before + DRIVER_FILES);
    must_hit(&reader, 0);
    must_hit(&reader, PATHS - 1);
    line_tell(pipe, "attached");
    char line[64];
    REQUIRE(line_hear(pipe, line, sizeof(line), ANSWER_MS) == 0);
    must_hit(&reader, 2 * PATHS - 1);
    REQUIRE(open_descriptors() <= before + DRIVER_FILES);
    line_tell(pipe, "read");
    oscar_client_close(reader.client);
    return 0;
}

static void hear(struct worker_process *reader, const char *expected) {
    char line[64];
    assert_int_equal(line_hear(&reader->pipe, line, sizeof(line), ANSWER_MS), 0);
    assert_string_equal(line, expected);
}

static void chunks_may_outnumber_the_files_that_a_worker_may_open(void **state) {
    struct e2e_worker writer;
    struct worker_process reader;
    struct oscar_geometry shape = geometry();
    e2e_worker_open_geometry(&writer, e2e_socket(*state), "writer", &shape);
    seal_paths(*state, &writer, 0);
    assert_int_equal(worker_spawn(&reader, "reader", read_with_few_descriptors, NULL, 0), 0);
    hear(&reader, "attached");
    seal_paths(*state, &writer, PATHS);
    assert_int_equal(line_tell(&reader.pipe, "more"), 0);
    hear(&reader, "read");
    worker_end(&reader);
    e2e_worker_close(&writer);
}

static int start(void **state) { return e2e_start(state, BUDGET); }
static int stop(void **state) { return e2e_stop(state); }

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(chunks_may_outnumber_the_files_that_a_worker_may_open, start, stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
