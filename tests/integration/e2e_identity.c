/* SPDX-License-Identifier: Apache-2.0 */
/* Two models that differ in anything never share a page; two that are the same always do. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

#include "tests/integration/e2e_daemon.h"
#include "tests/integration/e2e_model.h"
#include "tests/support/worker_process.h"

#define ANSWER_MS 30000
#define OTHER_USER 65534U
#define TOKENS 320U

static const uint8_t other_digest[32] = "something else";

static void weights(struct oscar_model_options *options) { options->weights_digest = other_digest; }
static void revision(struct oscar_model_options *options) { options->revision = "awq-4bit"; }
static void rope(struct oscar_model_options *options) { options->rope_digest = other_digest; }
static void adapter(struct oscar_model_options *options) { options->adapter = "lora-1"; }
static void shard_size(struct oscar_model_options *options) { options->shard_size = 2; }
static void shard_rank(struct oscar_model_options *options) { options->shard_size = 2, options->shard_rank = 1; }
static void layers(struct oscar_model_options *options) { options->geometry.layers = 3; }
static void query_heads(struct oscar_model_options *options) { options->geometry.query_heads = 8; }
static void kv_heads(struct oscar_model_options *options) { options->geometry.kv_heads = 4; }
static void head_dim(struct oscar_model_options *options) { options->geometry.head_dim = 128; }
static void dtype(struct oscar_model_options *options) { options->geometry.dtype = OSCAR_FP16; }
/* The strings of two fields, changed over. */
static void revision_as_adapter(struct oscar_model_options *options) {
    options->revision = "none", options->adapter = "synthetic";
}
static void revision_with_the_adapter(struct oscar_model_options *options) { options->revision = "syntheticnone"; }
static void digests_changed_over(struct oscar_model_options *options) {
    const uint8_t *digest = options->weights_digest;
    options->weights_digest = options->rope_digest;
    options->rope_digest = digest;
}

static const struct {
    const char *name;
    void (*change)(struct oscar_model_options *options);
} changes[] = {
    {"weights", weights},
    {"revision", revision},
    {"rope", rope},
    {"adapter", adapter},
    {"shard_size", shard_size},
    {"shard_rank", shard_rank},
    {"layers", layers},
    {"query_heads", query_heads},
    {"kv_heads", kv_heads},
    {"head_dim", head_dim},
    {"dtype", dtype},
    {"revision and adapter changed over", revision_as_adapter},
    {"revision that ends like the adapter", revision_with_the_adapter},
    {"digests changed over", digests_changed_over},
};

static uint32_t hit_of(struct e2e_worker *worker, const struct oscar_model_options *options, const struct text *text,
                       uint8_t ret_digest[32]) {
    struct oscar_model *model;
    struct oscar_model_info info = {.size = sizeof(info)};
    struct oscar_probe_result result;
    MUST(oscar_model_open(worker->client, options, &model));
    MUST(oscar_model_info(model, &info));
    MUST(oscar_probe(model, text->ids, text->count, &result, NULL));
    memcpy(ret_digest, info.model_digest, 32);
    oscar_model_close(model);
    return result.hit_tokens;
}

static void one_other_field_of_the_identity_is_never_a_hit(void **state) {
    struct e2e_worker writer, other;
    struct text text = {0};
    text_append(&text, 1, 320);
    e2e_worker_open(&writer, e2e_socket(*state), "writer");
    e2e_worker_open(&other, e2e_socket(*state), "other");
    struct oscar_seq *seq = e2e_open(&writer, &text, text.count, 0);
    e2e_extend(&writer, seq, &text, text.count);

    struct oscar_model_options same = e2e_model_options(&writer.geometry);
    uint8_t digest[32], changed[32];
    assert_int_equal(hit_of(&other, &same, &text, digest), text.count);
    for (size_t i = 0; i < sizeof(changes) / sizeof(changes[0]); i++) {
        struct oscar_model_options options = same;
        changes[i].change(&options);
        uint32_t hit = hit_of(&other, &options, &text, changed);
        if (hit != 0 || memcmp(digest, changed, 32) == 0)
            fail_msg("another %s: %u tokens hit%s", changes[i].name, hit,
                     memcmp(digest, changed, 32) == 0 ? ", same digest" : "");
    }
    assert_int_equal(hit_of(&other, &same, &text, changed), text.count);
    assert_memory_equal(digest, changed, 32);
    e2e_worker_close(&writer);
    e2e_worker_close(&other);
    text_free(&text);
}

static void a_missing_field_is_refused_in_words(void **state) {
    struct e2e_worker worker;
    struct oscar_model *model;
    e2e_worker_open(&worker, e2e_socket(*state), "careless");
    const struct oscar_model_options good = e2e_model_options(&worker.geometry);
    static const uint8_t zero[32];
    struct oscar_model_options options = good;
    options.weights_digest = zero;
    REFUSED(oscar_model_open(worker.client, &options, &model), OSCAR_ERR_IDENTITY);
    options = good;
    options.rope_digest = zero;
    REFUSED(oscar_model_open(worker.client, &options, &model), OSCAR_ERR_IDENTITY);
    options = good;
    options.revision = "";
    REFUSED(oscar_model_open(worker.client, &options, &model), OSCAR_ERR_IDENTITY);
    options = good;
    options.shard_size = 2;
    options.shard_rank = 2;
    REFUSED(oscar_model_open(worker.client, &options, &model), OSCAR_ERR_IDENTITY);
    MUST(oscar_client_ping(worker.client));
    e2e_worker_close(&worker);
}

/* Another user with the very same model and text. */
static int come_as_another_user(struct line_pipe *pipe, void *argument) {
    const uint64_t *seed = argument;
    e2e_child();
    if (setgid(OTHER_USER) < 0 || setuid(OTHER_USER) < 0)
        return 1;
    struct e2e_worker worker;
    struct text text = {0};
    text_append(&text, *seed, TOKENS);
    e2e_worker_open(&worker, NULL, "stranger");
    line_tell(pipe, "hit %u", e2e_probe(&worker, &text, TOKENS));
    struct oscar_seq *seq = e2e_open(&worker, &text, TOKENS, 0);
    e2e_extend(&worker, seq, &text, TOKENS);
    line_tell(pipe, "hit %u", e2e_probe(&worker, &text, TOKENS));
    e2e_worker_close(&worker);
    text_free(&text);
    return 0;
}

static void another_user_is_another_tenant_whatever_they_say(void **state) {
    if (geteuid() != 0)
        skip();
    struct test_daemon *daemon = *state;
    assert_int_equal(chmod(daemon->base, 0755), 0);
    struct e2e_worker worker;
    struct text text = {0};
    const uint64_t seed = 1;
    text_append(&text, seed, TOKENS);
    e2e_worker_open(&worker, daemon->socket, "owner");
    struct oscar_seq *seq = e2e_open(&worker, &text, text.count, 0);
    e2e_extend(&worker, seq, &text, text.count);
    assert_int_equal(e2e_probe(&worker, &text, text.count), 320);
    struct worker_process process;
    char line[64];
    int status;
    assert_int_equal(worker_spawn(&process, "stranger", come_as_another_user, &seed, sizeof(seed)), 0);
    assert_int_equal(line_hear(&process.pipe, line, sizeof(line), ANSWER_MS), 0);
    assert_string_equal(line, "hit 0");
    assert_int_equal(line_hear(&process.pipe, line, sizeof(line), ANSWER_MS), 0);
    assert_string_equal(line, "hit 320");
    assert_int_equal(worker_wait(&process, ANSWER_MS, &status), 0);
    assert_int_equal(status, 0);
    worker_end(&process);
    e2e_worker_close(&worker);
    text_free(&text);
}

static int start_for_all(void **state) {
    static const char *const flags[] = {"--daemon-socket-mode", "0666", NULL};
    struct test_daemon *daemon = daemon_start(flags);
    *state = daemon;
    return setenv("OSCAR_SOCKET", daemon->socket, 1);
}

static int stop_for_all(void **state) {
    daemon_stop(*state);
    return 0;
}

static int start(void **state) { return e2e_start(state, "64M"); }
static int stop(void **state) { return e2e_stop(state); }

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(one_other_field_of_the_identity_is_never_a_hit, start, stop),
        cmocka_unit_test_setup_teardown(a_missing_field_is_refused_in_words, start, stop),
        cmocka_unit_test_setup_teardown(another_user_is_another_tenant_whatever_they_say, start_for_all, stop_for_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
