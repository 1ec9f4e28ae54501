/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/demo/scene.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

#define ANSWER_MS 60000 /* for one line of a worker: generous, for a sanitizer build on a busy machine */
#define SETTLE_MS 20000 /* for packing and taking back */
#define STATS_BYTES (64U << 10)

#define SINK "oscar_pages{form=\"sink\"}"
#define DENSE "oscar_pages{form=\"dense\"}"
#define PACKED "oscar_pages{form=\"packed\"}"
#define DENSE_BYTES "oscar_memory_used_bytes{form=\"dense\"}"
#define PACKED_BYTES "oscar_memory_used_bytes{form=\"packed\"}"

static double now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

static int start_worker(struct scene *scene, struct worker_process *worker, const char *name, const char *branch) {
    const char *argv[12] = {
        scene->worker_program, "--socket", scene->daemon.socket, "--capture", scene->capture, "--name", name};
    unsigned count = 7;
    if (scene->calibration != NULL) {
        argv[count++] = "--calibration";
        argv[count++] = scene->calibration;
    }
    if (branch != NULL) {
        argv[count++] = "--branch";
        argv[count++] = branch;
    }
    int r = worker_start(worker, name, argv);
    if (r < 0)
        fprintf(stderr, "demo: cannot start worker %s: %s\n", name, strerror(-r));
    return r;
}

static volatile sig_atomic_t interrupted;

void scene_interrupt(int signal) {
    (void)signal;
    interrupted = 1;
}

static int hear(struct worker_process *worker, char *line, size_t size) {
    int r = interrupted ? -EINTR : line_hear(&worker->pipe, line, size, ANSWER_MS);
    if (r < 0)
        fprintf(stderr, "demo: worker %s: %s\n", worker->name, r == -EPIPE ? "has ended" : strerror(-r));
    return r;
}

static int misheard(const struct worker_process *worker, const char *line) {
    fprintf(stderr, "demo: worker %s said: %s\n", worker->name, line);
    return -1;
}

static int ask(struct worker_process *worker, const char *question, char *line, size_t size) {
    int r = line_tell(&worker->pipe, "%s", question);
    return r < 0 ? r : hear(worker, line, size);
}

static void add(struct segment *segment, const struct segment *more) {
    segment->rows += more->rows;
    segment->sum += more->sum;
    if (more->max > segment->max)
        segment->max = more->max;
}

/* Hears one line of a run of steps; rows that read some INT2 are `segment`'s. 1: a step, 0: the run is over. */
static int hear_step(struct scene *scene, struct worker_process *worker, enum segment_kind segment) {
    char line[256];
    unsigned tokens;
    struct segment bf16, int2;
    int r = hear(worker, line, sizeof(line));
    if (r < 0)
        return r;
    if (strcmp(line, "done") == 0)
        return 0;
    if (sscanf(line, "step tokens=%u bf16=%" SCNu64 ",%lf,%lf int2=%" SCNu64 ",%lf,%lf", &tokens, &bf16.rows, &bf16.sum,
               &bf16.max, &int2.rows, &int2.sum, &int2.max) != 7)
        return misheard(worker, line);
    add(&scene->segment[ALL_DENSE], &bf16);
    add(&scene->segment[segment], &int2);
    return 1;
}

static int hear_steps(struct scene *scene, struct worker_process *worker, enum segment_kind segment,
                      uint32_t *ret_steps) {
    uint32_t steps = 0;
    int r;
    while ((r = hear_step(scene, worker, segment)) == 1)
        steps++;
    if (r == 0 && ret_steps != NULL)
        *ret_steps = steps;
    return r;
}

static int open_sequence(struct scene *scene, struct worker_process *worker, uint32_t tokens, uint32_t *ret_hit,
                         uint32_t *ret_packed) {
    char question[64], line[256];
    snprintf(question, sizeof(question), "open %u", tokens);
    int r = ask(worker, question, line, sizeof(line));
    if (r < 0)
        return r;
    double us;
    if (sscanf(line, "opened hit=%u packed=%u attach_us=%lf backend=%63s device=%63s", ret_hit, ret_packed, &us,
               scene->backend, scene->device) != 5)
        return misheard(worker, line);
    return 0;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int time_attaches(struct scene *scene, struct worker_process *worker) {
    char question[64], line[LINE_BYTES];
    snprintf(question, sizeof(question), "attach %u %u", PREFIX_TOKENS, ATTACHES);
    int r = ask(worker, question, line, sizeof(line));
    if (r < 0)
        return r;
    const char *at = strncmp(line, "attached", 8) == 0 ? line + 8 : "";
    for (unsigned i = 0; i < ATTACHES; i++) {
        char *end;
        scene->attach_us[i] = strtod(at, &end);
        if (end == at)
            return misheard(worker, line);
        at = end;
    }
    qsort(scene->attach_us, ATTACHES, sizeof(scene->attach_us[0]), ascending);
    return 0;
}

struct expectation {
    struct scene *scene;
    const char *metric;
    int64_t value;
};

static bool metric_has_value(void *argument) {
    const struct expectation *expected = argument;
    json_t *stats = private_daemon_stats(&expected->scene->daemon);
    bool holds = stats != NULL && private_daemon_metric(stats, expected->metric) == expected->value;
    json_decref(stats);
    return holds;
}

static int wait_for(struct scene *scene, const char *metric, int64_t value) {
    struct expectation expected = {scene, metric, value};
    if (wait_until(metric_has_value, &expected, SETTLE_MS))
        return 0;
    fprintf(stderr, "demo: %s does not become %lld\n", metric, (long long)value);
    return -1;
}

static int prefill(struct scene *scene, struct worker_process *worker, uint32_t to, enum segment_kind segment) {
    int r = line_tell(&worker->pipe, "prefill %u %u", to, PREFILL_CHUNK);
    return r < 0 ? r : hear_steps(scene, worker, segment, NULL);
}

/* A: a long prompt. Before its last chunk all is packed that has left the window, so that this chunk reads some INT2 in any case. */
static int a_stores_the_prefix(struct scene *scene) {
    struct worker_process *a = &scene->a;
    char line[256];
    uint32_t packed;
    int r = start_worker(scene, a, "A", NULL);
    if (r == 0)
        r = open_sequence(scene, a, PREFIX_TOKENS, &scene->a_hit, &packed);
    if (r == 0)
        r = prefill(scene, a, PREFIX_TOKENS - PREFILL_CHUNK, A_PREFILL);
    if (r == 0)
        r = wait_for(scene, PACKED, PAGES(PREFIX_TOKENS - PREFILL_CHUNK - OSCAR_RECENT_TOKENS - OSCAR_SINK_TOKENS));
    if (r == 0)
        r = ask(a, "poll", line, sizeof(line));
    return r < 0 ? r : prefill(scene, a, PREFIX_TOKENS, A_PREFILL);
}

/* B finds the prefix and decodes while A does; A stops half-way through a token in the middle of a page. */
static int b_joins(struct scene *scene) {
    struct worker_process *a = &scene->a, *b = &scene->b;
    char branch[32], line[256];
    snprintf(branch, sizeof(branch), "%u:%u", PREFIX_TOKENS, B_BRANCH_SOURCE);
    int r = line_tell(&a->pipe, "decode %u", A_DECODES_TO);
    if (r == 0)
        r = start_worker(scene, b, "B", branch);
    if (r == 0)
        r = time_attaches(scene, b);
    if (r == 0)
        r = open_sequence(scene, b, PREFIX_TOKENS, &scene->b_hit, &scene->b_hit_packed);
    if (r == 0)
        r = line_tell(&b->pipe, "decode %u", B_DECODES_TO);
    if (r == 0)
        r = hear_steps(scene, a, A_DECODE, NULL);
    if (r == 0)
        r = ask(a, "half", line, sizeof(line));
    if (r == 0 && strncmp(line, "half position=", 14) != 0)
        r = misheard(a, line);
    if (r == 0)
        r = hear_steps(scene, b, B_DECODE, NULL);
    return r;
}

/* B is in the middle of its decode when A dies. */
static int a_is_killed(struct scene *scene) {
    struct worker_process *b = &scene->b;
    int status = 0;
    int r = line_tell(&b->pipe, "decode %u", B_ENDS_AT);
    if (r == 0)
        r = hear_step(scene, b, B_AFTER_KILL);
    if (r < 0)
        return r;
    double begin = now_ms();
    r = worker_signal(&scene->a, SIGKILL);
    if (r == 0)
        r = worker_wait(&scene->a, SETTLE_MS, &status);
    scene->a_was_killed = r == 0 && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    if (r == 0)
        r = wait_for(scene, "oscard_clients", 1);
    if (r == 0)
        r = wait_for(scene, "oscar_sequences", 1);
    if (r == 0)
        r = wait_for(scene, "oscar_memory_quarantined_bytes", 0);
    scene->kill_settled_ms = now_ms() - begin;
    if (r == 0)
        r = hear_steps(scene, b, B_AFTER_KILL, &scene->b_steps_after_kill);
    return r;
}

static int c_joins(struct scene *scene) {
    struct worker_process *c = &scene->c;
    /* What A alone had in its window is packed once A is dead: C finds it so. */
    int r = wait_for(scene, PACKED, PACKED_AT_END);
    if (r == 0)
        r = start_worker(scene, c, "C", NULL);
    if (r == 0)
        r = open_sequence(scene, c, C_PROMPT_TOKENS, &scene->c_hit, &scene->c_hit_packed);
    if (r == 0)
        r = prefill(scene, c, C_PROMPT_TOKENS, C_JOINED);
    if (r == 0)
        r = line_tell(&c->pipe, "decode %u", C_ENDS_AT);
    if (r == 0)
        r = hear_steps(scene, c, C_JOINED, NULL);
    return r;
}

/* Places of dense pages in use; their padding together is less than one of them. */
static int64_t dense_slots(const struct scene *scene, const json_t *stats) {
    return private_daemon_metric(stats, DENSE_BYTES) / scene->dense_page_bytes;
}

/* A poll tells a worker what was packed; then its reads of the BF16 copies are over, and the daemon takes them back. */
static bool all_is_packed(void *argument) {
    struct scene *scene = argument;
    char line[256];
    if (ask(&scene->b, "poll", line, sizeof(line)) < 0 || ask(&scene->c, "poll", line, sizeof(line)) < 0)
        return false;
    json_t *stats = private_daemon_stats(&scene->daemon);
    bool packed = stats != NULL && private_daemon_metric(stats, PACKED) == PACKED_AT_END &&
                  dense_slots(scene, stats) == DENSE_AT_END;
    json_decref(stats);
    return packed;
}

static int take_stock(struct scene *scene) {
    bool packed = wait_until(all_is_packed, scene, SETTLE_MS);
    scene->stats_table = malloc(STATS_BYTES);
    json_t *stats = private_daemon_stats(&scene->daemon);
    if (stats == NULL || scene->stats_table == NULL)
        return -1;
    if (!packed) {
        fprintf(stderr, "demo: packing ends with %lld of %u pages packed, and %lld instead of %u dense\n",
                (long long)private_daemon_metric(stats, PACKED), PACKED_AT_END, (long long)dense_slots(scene, stats),
                DENSE_AT_END);
        json_decref(stats);
        return -1;
    }
    scene->pages_sink = private_daemon_metric(stats, SINK);
    scene->pages_dense = private_daemon_metric(stats, DENSE);
    scene->pages_packed = private_daemon_metric(stats, PACKED);
    scene->bytes_packed = private_daemon_metric(stats, PACKED_BYTES);
    scene->bytes_used = private_daemon_metric(stats, "oscar_memory_used_bytes");
    json_decref(stats);
    return private_daemon_ctl(&scene->daemon, "stats", NULL, scene->stats_table, STATS_BYTES);
}

static bool quits(struct worker_process *worker) {
    int status;
    return line_tell(&worker->pipe, "quit") == 0 && worker_wait(worker, SETTLE_MS, &status) == 0 && WIFEXITED(status) &&
           WEXITSTATUS(status) == 0;
}

static int all_leave(struct scene *scene) {
    scene->b_survived = quits(&scene->b);
    scene->c_survived = quits(&scene->c);
    int r = wait_for(scene, "oscard_clients", 0);
    if (r == 0)
        r = wait_for(scene, "oscar_sequences_ending", 0);
    char output[1024];
    if (r == 0)
        r = private_daemon_ctl(&scene->daemon, "flush", "--json", output, sizeof(output));
    /* Pages that are being packed go a moment later. What is there after the longest of them is lost. */
    struct expectation nothing = {scene, "oscar_memory_used_bytes", 0};
    if (r == 0)
        (void)wait_until(metric_has_value, &nothing, SETTLE_MS);
    json_t *stats = r == 0 ? private_daemon_stats(&scene->daemon) : NULL;
    if (stats == NULL)
        return -1;
    scene->leaked_bytes = private_daemon_metric(stats, "oscar_memory_used_bytes");
    json_decref(stats);
    return 0;
}

int scene_play(struct scene *scene) {
    int (*const acts[])(struct scene *) = {a_stores_the_prefix, b_joins, a_is_killed, c_joins, take_stock, all_leave};
    for (size_t i = 0; i < sizeof(acts) / sizeof(acts[0]); i++) {
        if (acts[i](scene) < 0)
            return -1;
    }
    return 0;
}

void scene_end(struct scene *scene) {
    worker_end(&scene->a);
    worker_end(&scene->b);
    worker_end(&scene->c);
}

void scene_free(struct scene *scene) {
    free(scene->stats_table);
    scene->stats_table = NULL;
}
