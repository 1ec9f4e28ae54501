/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/integration/e2e_daemon.h"

#include <dirent.h>
#include <nanomsg/nn.h>
#include <nanomsg/reqrep.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/integration/e2e_model.h"
#include "tests/support/worker_process.h"

#define ADMIN_MS 30000
#define SETTLE_MS 30000

static void remove_flat(const char *path) {
    DIR *directory = opendir(path);
    for (const struct dirent *entry; directory != NULL && (entry = readdir(directory)) != NULL;) {
        if (entry->d_name[0] != '.')
            unlinkat(dirfd(directory), entry->d_name, 0);
    }
    if (directory != NULL)
        closedir(directory);
    rmdir(path);
}

static char calibrations[64], chunk_size[16], budget_size[16];
static const char *const flags[] = {"--memory-chunk",          chunk_size,   "--budget", budget_size,
                                    "--calibration-directory", calibrations, NULL};

unsigned e2e_scale(void) { return strcmp(daemon_backend(), "cuda") == 0 ? 4 : 1; }

int e2e_start(void **state, const char *budget) {
    unsigned scale = e2e_scale(), count;
    char unit;
    if (sscanf(budget, "%u%c", &count, &unit) != 2)
        return -1;
    snprintf(chunk_size, sizeof(chunk_size), "%uM", scale > 1 ? 2 : 1);
    snprintf(budget_size, sizeof(budget_size), "%u%c", scale * count, unit);
    snprintf(calibrations, sizeof(calibrations), "/tmp/oscar-e2e-XXXXXX");
    if (mkdtemp(calibrations) == NULL)
        return -1;
    struct test_daemon *daemon = daemon_start(flags);
    *state = daemon;
    return setenv("OSCAR_SOCKET", daemon->socket, 1);
}

int e2e_stop(void **state) {
    struct test_daemon *daemon = *state;
    e2e_wait_metric(daemon, "oscard_clients", 0);
    e2e_wait_metric(daemon, E2E_ENDING, 0); /* what they had advanced is sealed after their close */
    e2e_flush(daemon);
    e2e_wait_metric(daemon, E2E_USED, 0);
    daemon_stop(daemon);
    remove_flat(calibrations);
    return 0;
}

const char *e2e_socket(const struct test_daemon *daemon) { return daemon->socket; }
const char *e2e_calibrations(void) { return calibrations; }

int64_t e2e_descriptors(const struct test_daemon *daemon) {
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/fd", (int)daemon->pid);
    DIR *directory = opendir(path);
    int64_t count = 0;
    REQUIRE(directory != NULL);
    for (const struct dirent *entry; (entry = readdir(directory)) != NULL;) {
        char target[128] = "";
        if (entry->d_name[0] != '.' && readlinkat(dirfd(directory), entry->d_name, target, sizeof(target) - 1) >= 0)
            count += strstr(target, "memfd:oscar-chunk") == NULL && strncmp(target, "/dev/nvidia", 11) != 0;
    }
    closedir(directory);
    return count;
}

static struct oscar_admin_reply ask(const struct test_daemon *daemon, enum oscar_admin_verb verb) {
    struct oscar_admin_request request = {.id = 1, .verb = verb};
    struct oscar_admin_reply reply;
    struct oscar_cause cause = {{0}};
    char url[128];
    uint8_t *bytes;
    size_t size;
    void *answer = NULL;
    int timeout = ADMIN_MS, socket = nn_socket(AF_SP, NN_REQ);
    snprintf(url, sizeof(url), "ipc://%s", daemon->admin);
    REQUIRE(socket >= 0);
    nn_setsockopt(socket, NN_SOL_SOCKET, NN_RCVTIMEO, &timeout, sizeof(timeout));
    nn_setsockopt(socket, NN_SOL_SOCKET, NN_SNDTIMEO, &timeout, sizeof(timeout));
    REQUIRE(nn_connect(socket, url) >= 0);
    MUST(oscar_admin_request_encode(&request, &bytes, &size));
    REQUIRE(nn_send(socket, bytes, size, 0) == (int)size);
    free(bytes);
    int length = nn_recv(socket, &answer, NN_MSG, 0);
    if (length < 0)
        e2e_fail("no answer from %s: %s", url, nn_strerror(nn_errno()));
    int r = oscar_admin_reply_decode(answer, (size_t)length, &reply, &cause);
    nn_freemsg(answer);
    nn_close(socket);
    if (r < 0 || reply.error != 0)
        e2e_fail("administration: %s", r < 0 ? cause.text : reply.cause);
    return reply;
}

struct oscar_admin_reply e2e_metrics(const struct test_daemon *daemon) {
    return ask(daemon, OSCAR_ADMIN_STATS);
}
struct oscar_admin_reply e2e_flush(const struct test_daemon *daemon) {
    return ask(daemon, OSCAR_ADMIN_FLUSH);
}

int64_t e2e_metric_of(const struct oscar_admin_reply *metrics, const char *name) {
    int64_t sum = 0;
    bool found = false;
    for (uint32_t i = 0; i < metrics->metrics; i++) {
        const struct oscar_metric *metric = &metrics->metric[i];
        char labelled[2 * OSCAR_NAME_BYTES + 3];
        snprintf(labelled, sizeof(labelled), "%s{%s}", metric->name, metric->labels);
        if (strcmp(metric->name, name) == 0 || strcmp(labelled, name) == 0) {
            sum += (int64_t)metric->value;
            found = true;
        }
    }
    if (!found)
        e2e_fail("no metric %s", name);
    return sum;
}

int64_t e2e_metric(const struct test_daemon *daemon, const char *name) {
    struct oscar_admin_reply metrics = e2e_metrics(daemon);
    int64_t value = e2e_metric_of(&metrics, name);
    oscar_admin_reply_free(&metrics);
    return value;
}

struct expected {
    const struct test_daemon *daemon;
    const char *name;
    int64_t value;
};

static bool has_value(void *argument) {
    const struct expected *expected = argument;
    return e2e_metric(expected->daemon, expected->name) == expected->value;
}

void e2e_wait_metric(const struct test_daemon *daemon, const char *name, int64_t value) {
    struct expected expected = {daemon, name, value};
    if (!wait_until(has_value, &expected, SETTLE_MS))
        e2e_fail("%s is %lld and does not become %lld", name, (long long)e2e_metric(daemon, name), (long long)value);
}
