/* SPDX-License-Identifier: Apache-2.0 */
/* Which device a worker opens, and what becomes of one whose device fails. On the host there is one device, and failing is a signal. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <cmocka.h>

#ifdef OSCAR_CUDA
#include "kernels/cuda/driver.h"
#endif
#include "tests/integration/e2e_daemon.h"
#include "tests/integration/e2e_model.h"
#include "tests/support/worker_process.h"

#define ANSWER_MS 60000
#define TOKENS 500U
#define SEED 1U
#define VISIBLE "CUDA_VISIBLE_DEVICES"
#define MAX_GPUS 16

static bool on_gpu(void) { return strcmp(daemon_backend(), "cuda") == 0; }

struct scene {
    struct test_daemon *daemon;
    struct e2e_worker writer;
    struct text text;
    struct oscar_seq *seq;
};

static void open_scene(struct scene *scene, void *daemon) {
    memset(scene, 0, sizeof(*scene));
    scene->daemon = daemon;
    text_append(&scene->text, SEED, TOKENS);
    e2e_worker_open(&scene->writer, e2e_socket(daemon), "writer");
    scene->seq = e2e_open(&scene->writer, &scene->text, TOKENS, 0);
    e2e_extend(&scene->writer, scene->seq, &scene->text, TOKENS);
}

static void close_scene(struct scene *scene) {
    e2e_check_all(&scene->writer, scene->seq, &scene->text, TOKENS);
    e2e_worker_close(&scene->writer);
    text_free(&scene->text);
}

/* Runs a child whose answer is one line. */
static int ask_child(const char *name, int (*body)(struct line_pipe *pipe, void *argument), char *ret_line,
                     size_t size) {
    struct worker_process process;
    int status;
    assert_int_equal(worker_spawn(&process, name, body, NULL, 0), 0);
    if (line_hear(&process.pipe, ret_line, size, ANSWER_MS) != 0)
        ret_line[0] = 0;
    assert_int_equal(worker_wait(&process, ANSWER_MS, &status), 0);
    worker_end(&process);
    return status;
}

/* --- which device ------------------------------------------------------------------------------------------------- */

static int count_gpus(struct line_pipe *pipe, void *argument) {
    int count = 1;
    (void)argument;
#ifdef OSCAR_CUDA
    const struct cuda_driver *driver;
    if (on_gpu() && (cuda_driver_load(&driver, NULL) < 0 || driver->cuDeviceGetCount(&count) != CUDA_SUCCESS))
        return 1;
#endif
    return line_tell(pipe, "%d", count) < 0;
}

static int read_what_is_there(struct line_pipe *pipe, void *argument) {
    (void)argument;
    e2e_child();
    struct e2e_worker worker;
    struct text text = {0};
    struct oscar_client_info info = {.size = sizeof(info)};
    text_append(&text, SEED, TOKENS);
    e2e_worker_open(&worker, NULL, "reader");
    MUST(oscar_client_info(worker.client, &info));
    struct oscar_seq *seq = e2e_open(&worker, &text, TOKENS, 0);
    uint32_t hit = e2e_info(seq).hit_tokens;
    e2e_check_all(&worker, seq, &text, hit);
    line_tell(pipe, "%s hit %u", info.device, hit);
    e2e_worker_close(&worker);
    text_free(&text);
    return 0;
}

static void must_read_with(const struct scene *scene, const char *visible) {
    struct oscar_client_info info = {.size = sizeof(info)};
    char expected[256], line[256];
    MUST(oscar_client_info(scene->writer.client, &info));
    snprintf(expected, sizeof(expected), "%s hit %u", info.device, TOKENS / OSCAR_PAGE_TOKENS * OSCAR_PAGE_TOKENS);
    setenv(VISIBLE, visible, 1);
    int status = ask_child("reader", read_what_is_there, line, sizeof(line));
    unsetenv(VISIBLE);
    if (status != 0 || strcmp(line, expected) != 0)
        fail_msg(VISIBLE "=%s: status %d, \"%s\" instead of \"%s\"", visible, status, line, expected);
}

static void a_worker_opens_the_daemons_device_whatever_its_number_is(void **state) {
    struct scene scene;
    char line[64], visible[8 * MAX_GPUS];
    open_scene(&scene, *state);
    assert_int_equal(ask_child("counter", count_gpus, line, sizeof(line)), 0);
    int gpus = atoi(line);
    assert_in_range(gpus, 1, MAX_GPUS);
    /* Every rotation of the devices, forwards and backwards: each stands in each place. */
    for (int first = 0; first < gpus; first++) {
        for (int step = 1; step >= -1; step -= 2) {
            int length = 0;
            for (int i = 0; i < gpus; i++)
                length += snprintf(visible + length, sizeof(visible) - (size_t)length, "%s%d", i > 0 ? "," : "",
                                   (first + step * i + gpus) % gpus);
            must_read_with(&scene, visible);
        }
    }
    if (on_gpu()) { /* named, and alone */
        struct oscar_client_info info = {.size = sizeof(info)};
        MUST(oscar_client_info(scene.writer.client, &info));
        must_read_with(&scene, info.device);
    }
    close_scene(&scene);
}

static int connect_only(struct line_pipe *pipe, void *argument) {
    (void)argument;
    struct oscar_client *client;
    int r = oscar_client_open(NULL, &client);
    line_tell(pipe, "%s %s", oscar_error_name(r), oscar_error_detail());
    return 0;
}

static void a_worker_that_does_not_see_the_device_is_told_why(void **state) {
    struct scene scene;
    char line[512];
    open_scene(&scene, *state);
    setenv(VISIBLE, "", 1);
    assert_int_equal(ask_child("blind", connect_only, line, sizeof(line)), 0);
    unsetenv(VISIBLE);
    if (!on_gpu())
        assert_string_equal(line, "OK ");
    else if ((strncmp(line, "NOT_FOUND ", 10) != 0 && strncmp(line, "UNSUPPORTED ", 12) != 0) ||
             strstr(line, VISIBLE) == NULL)
        fail_msg("no word about " VISIBLE ": %s", line);
    e2e_wait_metric(scene.daemon, "oscard_clients", 1);
    close_scene(&scene);
}

/* --- a device that fails ------------------------------------------------------------------------------------------ */

/* Every later call says the same, with the cause. */
static void must_stay_lost(struct e2e_worker *worker, struct oscar_seq *seq, const struct oscar_attend_query *query) {
    struct oscar_stream *stream;
    const struct oscar_stream_params params = {.size = sizeof(params)};
    const struct oscar_tensor tensor = {query->q, 128, 64};
    for (unsigned i = 0; i < 3; i++) {
        REFUSED(oscar_attend(worker->model, NULL, 0, 0, query, 1), OSCAR_ERR_DEVICE);
        REQUIRE(strlen(oscar_error_remedy(OSCAR_ERR_DEVICE)) > 0);
        REFUSED(oscar_seq_store(seq, NULL, 0, TOKENS, 1, &tensor, &tensor), OSCAR_ERR_DEVICE);
        REFUSED(oscar_stream_open(worker->client, &params, &stream), OSCAR_ERR_DEVICE);
        MUST(oscar_client_ping(worker->client));
    }
}

/* A query that lies nowhere. */
static int touch_what_is_not_mapped(struct line_pipe *pipe, void *argument) {
    (void)argument;
    e2e_child();
    struct e2e_worker worker;
    struct text text = {0};
    text_append(&text, SEED, TOKENS);
    e2e_worker_open(&worker, NULL, "stray");
    struct oscar_seq *seq = e2e_open(&worker, &text, TOKENS, 0);
    MUST(oscar_seq_reserve(seq, 2 * TOKENS));
    struct device_buffer *out = e2e_buffer_poisoned(&worker, (size_t)4 * 64);
    const struct oscar_attend_query query = {
        .seq = seq,
        .rows = 1,
        .q = (const void *)(uintptr_t)0x1000, /* NOLINT(performance-no-int-to-ptr) */
        .q_head_stride = 64,
        .out = out->data,
        .out_head_stride = 64};
    REFUSED(oscar_attend(worker.model, NULL, 0, 0, &query, 1), OSCAR_ERR_DEVICE);
    must_stay_lost(&worker, seq, &query);
    line_tell(pipe, "lost");
    oscar_client_close(worker.client);
    return 0;
}

static void a_worker_whose_device_fails_is_told_and_harms_nobody(void **state) {
    struct scene scene;
    char line[64];
    if (getenv("CUDA_MPS_PIPE_DIRECTORY") != NULL) {
        print_message("under MPS a client's illegal access ends the contexts of all clients\n");
        skip();
    }
    open_scene(&scene, *state);
    for (unsigned i = 0; i < 2; i++) {
        int status = ask_child("stray", touch_what_is_not_mapped, line, sizeof(line));
        if (on_gpu()) {
            assert_int_equal(status, 0);
            assert_string_equal(line, "lost");
        } else {
            assert_int_not_equal(status, 0);
        }
        e2e_wait_metric(scene.daemon, "oscard_clients", 1);
        e2e_wait_metric(scene.daemon, E2E_QUARANTINED, 0);
        e2e_check_all(&scene.writer, scene.seq, &scene.text, TOKENS);
    }
    close_scene(&scene);
}

static int start(void **state) { return e2e_start(state, "64M"); }
static int stop(void **state) { return e2e_stop(state); }

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_worker_opens_the_daemons_device_whatever_its_number_is, start, stop),
        cmocka_unit_test_setup_teardown(a_worker_that_does_not_see_the_device_is_told_why, start, stop),
        cmocka_unit_test_setup_teardown(a_worker_whose_device_fails_is_told_and_harms_nobody, start, stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
