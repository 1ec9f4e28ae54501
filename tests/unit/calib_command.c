/* SPDX-License-Identifier: Apache-2.0 */
/* The command line of oscar-calib: exit statuses, what goes to which stream, and that wrong usage is told. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "calib_fixture.h"
#include "tests/support/files.h"

#define TORCH OSCAR_TEST_DATA "/torch"

static char output[8192]; /* of the last command: both streams, or the standard output alone */

enum streams { BOTH, OUTPUT_ONLY, FULL_DISK };

/* In the child: both streams, or one, go to the pipe. */
static void become(char *arguments, enum streams streams, int to) {
    static char program[] = OSCAR_CALIB_PROGRAM;
    char *word[32] = {program};
    char *rest = NULL;
    size_t words = 1;
    for (char *at = strtok_r(arguments, " ", &rest); at != NULL && words < 31; at = strtok_r(NULL, " ", &rest))
        word[words++] = at;
    int nothing = open("/dev/null", O_WRONLY | O_CLOEXEC);
    int full = open("/dev/full", O_WRONLY | O_CLOEXEC);
    if (chdir(calib_folder()) == 0 && dup2(streams == FULL_DISK ? full : to, STDOUT_FILENO) >= 0 &&
        dup2(streams == OUTPUT_ONLY ? nothing : to, STDERR_FILENO) >= 0)
        (void)execv(word[0], word);
    _exit(127);
}

/* Starts oscar-calib in the test's folder; what it writes comes from *ret_end. */
static pid_t start(const char *arguments, enum streams streams, int *ret_end) {
    char copy[512];
    int ends[2];
    (void)snprintf(copy, sizeof(copy), "%s", arguments);
    (void)calib_folder(); /* made, and removed, by this process */
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0)
        become(copy, streams, ends[1]);
    (void)close(ends[1]);
    *ret_end = ends[0];
    return child;
}

/* Runs it to its end; returns its exit status. */
static int run(const char *arguments, enum streams streams) {
    int end;
    int status;
    size_t size = 0;
    pid_t child = start(arguments, streams, &end);
    for (ssize_t got; size + 1 < sizeof(output) && (got = read(end, output + size, sizeof(output) - 1 - size)) > 0;)
        size += (size_t)got;
    output[size] = '\0';
    (void)close(end);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void assert_run(const char *arguments, int status, const char *words) {
    int found = run(arguments, BOTH);
    if (found != status || strstr(output, words) == NULL)
        fail_msg("%s: found %d \"%s\", expected %d \"%s\"", arguments, found, output, status, words);
}

static void wrong_usage_is_told_with_status_2(void **unused) {
    (void)unused;
    static const struct {
        const char *arguments, *words;
    } wrong[] = {
        {"", "usage: oscar-calib VERB"},
        {"frobnicate", "no verb frobnicate"},
        {"fit --output x", "fit takes CAPTURE..."},
        {"fit capture", "fit needs --output FILE"},
        {"report capture", "report needs --calibration FILE"},
        {"verify", "verify takes FILE"},
        {"verify a b", "verify takes FILE"},
        {"verify --output x a", "verify has no --output"},
        {"hadamard --output x --layers 2", "hadamard needs --layers, --kv-heads and --head-dim"},
        {"hadamard --output x --layers two --kv-heads 1 --head-dim 64", "--layers two"},
        {"hadamard --output x --layers 1 --kv-heads 1 --head-dim 64 more", "hadamard takes no arguments"},
        {"fit --output x --rotation round c", "--rotation round: expected"},
        {"fit --output x --pairs 17 c", "--pairs 17: expected"},
        {"fit --output x --pairs -1 c", "--pairs -1: expected"},
        {"fit --output x --clip .96 c", "--clip .96: expected"},
        {"fit --output x --clip .96,1.5 c", "--clip .96,1.5: expected"},
        {"fit --output x --clip nan,.9 c", "--clip nan,.9: expected"},
        {"fit --output x --lambda 0 c", "--lambda 0: expected"},
        {"fit --output x --threads 0 c", "--threads 0: expected"},
        {"fit --output x --per token c", "--per token: expected"},
        {"report --calibration x --baseline y c", "--baseline y: expected"},
        {"import --output x", "import takes a FOLDER that holds both sides, or --k FILE --v FILE"},
        {"import --output x --k a.pt", "import takes a FOLDER"},
        {"import --output x --k a.pt --v b.pt folder", "import takes a FOLDER"},
        {"fit --no-such-option c", "cannot go on"},
    };
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
        assert_run(wrong[i].arguments, 2, wrong[i].words);
}

static void help_and_version_are_no_failure(void **unused) {
    (void)unused;
    assert_run("--help", 0, "options of fit:");
    assert_run("fit --help", 0, "--no-centre");
    assert_run("--version", 0, "oscar-calib ");
}

static void a_file_goes_through_all_verbs(void **unused) {
    (void)unused;
    const struct calib_model model = {
        .layers = 1, .query_heads = 2, .kv_heads = 1, .d = 64, .rope_base = 1e4, .bias = 4};
    calib_write_capture(calib_path("c.safetensors"), &model,
                        &(struct calib_cut){.to = 1, .tokens = 450, .type = OSCAR_TENSOR_BF16});
    assert_run("fit --output f c.safetensors", 0, "warning: the capture ends at position 450, contexts of 8192 tokens");
    assert_int_equal(run("fit --output f --context 450 c.safetensors", OUTPUT_ONLY), 0);
    assert_string_equal(output, ""); /* what it says is no result */
    assert_run("verify f", 0, "1 layers, 1 KV heads, head size 64: complete, finite, orthogonal, triangular");
    assert_run("inspect f", 0, "feedback");
    assert_run("inspect --json f", 0, "{\"layer\":0,\"centre\":true,\"pairs\":");
    assert_run("report --calibration f c.safetensors", 0, "KL of the attention distribution");
    assert_run("hadamard --output h --layers 1 --kv-heads 1 --head-dim 64", 0, "wrote h");
    assert_run("report --calibration f --baseline plain=h c.safetensors", 0, "       plain");
}

/* By SIGKILL, when the first layer is done. Should all be done before the signal comes, there is nothing to take up. */
static void a_killed_fit_is_taken_up(void **unused) {
    (void)unused;
    const struct calib_model model = {
        .layers = 6, .query_heads = 2, .kv_heads = 1, .d = 64, .rope_base = 1e4, .bias = 4};
    const char *part = calib_path("k.parts/layer-0.safetensors");
    int end;
    siginfo_t info = {0};
    calib_write_capture(calib_path("l.safetensors"), &model,
                        &(struct calib_cut){.to = 6, .tokens = 450, .type = OSCAR_TENSOR_BF16});
    assert_run("fit --output u --context 450 l.safetensors", 0, "wrote u");
    pid_t child = start("fit --output k --context 450 l.safetensors", BOTH, &end);
    while (access(part, F_OK) != 0 && info.si_pid == 0) {
        (void)usleep(1000);
        assert_int_equal(waitid(P_PID, (id_t)child, &info, WEXITED | WNOHANG | WNOWAIT), 0);
    }
    assert_int_equal(kill(child, SIGKILL), 0);
    assert_int_equal(waitpid(child, NULL, 0), child);
    (void)close(end);
    bool kept = access(part, F_OK) == 0;
    assert_run("fit --output k --context 450 l.safetensors", 0,
               kept ? " of 6 layers were there from an earlier run" : "wrote k");
    file_assert_same(calib_path("k"), calib_path("u"));
    assert_int_equal(access(calib_path("k.parts"), F_OK), -1);
}

static void a_file_that_was_changed_does_not_verify(void **unused) {
    (void)unused;
    static const float one = 1, more = 1.5F;
    size_t size;
    assert_run("import --model example --output d " TORCH, 0, "wrote d");
    uint8_t *bytes = file_read(calib_path("d"), &size);
    uint8_t *at = memmem(bytes, size, &one, sizeof(one));
    assert_non_null(at);
    memcpy(at, &more, sizeof(more));
    file_write(calib_path("d"), bytes, size);
    free(bytes);
    assert_run("verify d", 1, "oscar-calib verify: calibration not usable: ");
    assert_non_null(strstr(output, "rotation"));
}

/* The commands of docs/CALIBRATION_TOOL.md. */
static void published_rotations_are_imported_and_verified(void **unused) {
    (void)unused;
    assert_run("import --model example --output i " TORCH, 0, "wrote i: 2 layers, 2 KV heads, head size 64");
    assert_run("verify i", 0, "2 layers, 2 KV heads, head size 64: complete, finite, orthogonal, triangular");
    assert_run("import --model example --clip .9,.92 --output i --k " TORCH "/k_rotation_qqt_r_h_pbr.pt --v " TORCH
               "/v_rotation_sst_r_h_pbr.pt",
               0, "wrote i: 2 layers, 2 KV heads, head size 64");
    assert_run("import --output i " TORCH, 1, "these files do not say of which model they are: --model NAME");
}

static void a_failure_is_one_line_with_status_1(void **unused) {
    (void)unused;
    assert_run("verify nowhere", 1, "oscar-calib verify: no such object: cannot read nowhere: No such file");
    assert_run("fit --output f nowhere", 1, "oscar-calib fit: no such object: cannot read nowhere");
    assert_non_null(strchr(output, '\n'));
    assert_string_equal(strchr(output, '\n'), "\n");
    assert_run("fit --output nowhere/f c.safetensors", 1, "cannot make the folder nowhere/f.parts");
    assert_int_equal(run("verify h", FULL_DISK), 1);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(wrong_usage_is_told_with_status_2),
        cmocka_unit_test(help_and_version_are_no_failure),
        cmocka_unit_test(a_file_goes_through_all_verbs),
        cmocka_unit_test(a_killed_fit_is_taken_up),
        cmocka_unit_test(a_file_that_was_changed_does_not_verify),
        cmocka_unit_test(published_rotations_are_imported_and_verified),
        cmocka_unit_test(a_failure_is_one_line_with_status_1),
    };
    calib_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
