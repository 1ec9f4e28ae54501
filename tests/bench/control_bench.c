/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The control plane, measured through liboscar against the real daemon on the host backend: opens, closes and advances of sequences in
 * a cache of a million pages, beside the bare floor of the same look-up (control_floor.h).
 *
 * usage: control_bench [--json] [--paths N]     N paths of 100,000 tokens are stored first (640: a million pages)
 */
#include <errno.h>
#include <getopt.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "oscar/oscar.h"

#include "tests/bench/control_floor.h"
#include "tests/bench/report.h"
#include "tests/bench/samples.h"
#include "tests/demo/private_daemon.h"

#define PATH_PAGES 1563U /* 100,000 tokens and a little */
#define PATH_TOKENS (PATH_PAGES * OSCAR_PAGE_TOKENS)
#define OPENS 400U
#define ADVANCES 1000U
#define DECODE_PAUSE_US 1000U /* between pages, where a decoding worker would spend 64 steps */
#define ROUND_TRIPS 5000U
#define CLIENTS 64U
#define CLIENTS_SECONDS 4U
#define SHARERS 8U
#define SHARED_TOKENS (64U << 10)

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        int try_result = (call);                                                                                       \
        if (try_result < 0)                                                                                            \
            fail(#call, try_result);                                                                                   \
    } while (0)

static _Noreturn void fail(const char *call, int error) {
    fprintf(stderr, "control_bench: %s: %s: %s\n", call, oscar_error_text(error), oscar_error_detail());
    exit(1);
}

#define PACKED "oscar_pages{form=\"packed\"}"
#define PACKING "oscar_pages_waiting_for_packing"

static int64_t metric(struct private_daemon *daemon, const char *name) {
    json_t *stats = private_daemon_stats(daemon);
    int64_t value = stats == NULL ? -1 : private_daemon_metric(stats, name);
    json_decref(stats);
    if (value < 0)
        fail(name, OSCAR_ERR_NOT_FOUND);
    return value;
}

/* Waits until the metric lies in [low, high]. */
static void wait_metric(struct private_daemon *daemon, const char *name, int64_t low, int64_t high) {
    uint64_t deadline = bench_now_ns() + 60U * UINT64_C(1000000000);
    for (int64_t value; (value = metric(daemon, name)) < low || value > high;) {
        if (bench_now_ns() > deadline)
            fail(name, OSCAR_ERR_TIMEOUT);
        usleep(10000);
    }
}

struct worker {
    struct oscar_client *client;
    struct oscar_model *model;
};

/* Latencies are measured with both processes on one CPU: what counts is the work, not what it costs to wake a CPU that idles, which
 * in a virtual machine is several times as much. Rows named other_cpu show that too. -1: any CPU. */
static void pin(pid_t process, int cpu) {
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    for (int i = 0; i < CPU_SETSIZE; i++)
        if (cpu < 0 || i == cpu)
            CPU_SET(i, &cpus);
    if (sched_setaffinity(process, sizeof(cpus), &cpus) < 0)
        fail("sched_setaffinity", OSCAR_ERR_PERMISSION);
}

/* The smallest geometry: what is measured here does not depend on a page's size. */
static struct worker worker_open(struct private_daemon *daemon, const char *revision) {
    struct worker worker;
    struct oscar_client_options options = {.size = sizeof(options), .socket = daemon->socket, .timeout_ms = 60000};
    TRY(oscar_client_open(&options, &worker.client));
    static const uint8_t digest[32] = {1};
    struct oscar_model_options model = {
        .size = sizeof(model), .weights_digest = digest, .rope_digest = digest, .revision = revision};
    oscar_geometry_init(&model.geometry, 1, 1, 1, 64, OSCAR_BF16);
    TRY(oscar_model_open(worker.client, &model, &worker.model));
    return worker;
}

static void worker_close(struct worker *worker) { oscar_client_close(worker->client); }

/* Room for the tokens; the daemon's packing frees room all the time, so "no space" means: not yet. */
static void reserve_patiently(struct oscar_seq *seq, uint32_t tokens) {
    uint64_t deadline = bench_now_ns() + 60U * UINT64_C(1000000000);
    for (;;) {
        int result = oscar_seq_reserve(seq, tokens);
        if (result == 0)
            return;
        if (result != OSCAR_ERR_NO_SPACE || bench_now_ns() > deadline)
            fail("oscar_seq_reserve", result);
        TRY(oscar_seq_advance(seq, NULL, NULL, 0));
    }
}

/* Stores the pages of a path as they are in fresh memory (zeros): their ids are what counts here. */
static void store_path(struct worker *worker, const uint32_t *tokens, uint32_t count) {
    struct oscar_seq *seq;
    struct oscar_seq_info info = {.size = sizeof(info)};
    TRY(oscar_seq_open(worker->model, tokens, count, 0, &seq));
    TRY(oscar_seq_info(seq, &info));
    const uint32_t step = 128 * OSCAR_PAGE_TOKENS;
    for (uint32_t done = info.hit_tokens; done < count; done += step) {
        uint32_t part = count - done < step ? count - done : step;
        reserve_patiently(seq, part);
        TRY(oscar_seq_advance(seq, NULL, tokens + done, part));
    }
    oscar_seq_close(seq);
}

static void bench_ping(struct report *report, const char *name, struct worker *worker) {
    struct samples ping;
    char row[64];
    samples_init(&ping, ROUND_TRIPS);
    for (uint32_t i = 0; i < ROUND_TRIPS; i++) {
        uint64_t begin = bench_now_ns();
        TRY(oscar_client_ping(worker->client));
        samples_add(&ping, bench_now_ns() - begin);
    }
    snprintf(row, sizeof(row), "round_trip%s_p50", name);
    report_row(report, row, samples_percentile_ms(&ping, 50), "ms");
    snprintf(row, sizeof(row), "round_trip%s_p99", name);
    report_row(report, row, samples_percentile_ms(&ping, 99), "ms");
    samples_free(&ping);
}

static uint32_t *path_tokens(uint32_t path) {
    uint32_t *tokens = malloc(PATH_TOKENS * sizeof(*tokens));
    if (tokens == NULL)
        fail("malloc", OSCAR_ERR_NO_MEMORY);
    control_tokens(path, 0, PATH_PAGES, tokens);
    return tokens;
}

static void store_all(struct private_daemon *daemon, uint32_t paths) {
    struct worker worker = worker_open(daemon, "bench");
    for (uint32_t path = 0; path < paths; path++) {
        uint32_t *tokens = path_tokens(path);
        store_path(&worker, tokens, PATH_TOKENS);
        free(tokens);
        if (path % 16 == 15 || path + 1 == paths)
            fprintf(stderr, "\rstored %u of %u paths of %u tokens", path + 1, paths, PATH_TOKENS);
    }
    fputc('\n', stderr);
    worker_close(&worker);
    wait_metric(daemon, PACKING, 0, 0);
}

/* A page's advance, and one that stays in the client, in ms. */
static void time_advances(struct worker *worker, uint32_t first, struct samples *pages, struct samples *tokens) {
    struct oscar_seq *seq;
    uint32_t ids[OSCAR_PAGE_TOKENS];
    TRY(oscar_seq_open(worker->model, NULL, 0, 0, &seq));
    for (uint32_t i = 0; i < ADVANCES; i++) {
        control_tokens(UINT32_MAX, first + i, 1, ids);
        usleep(DECODE_PAUSE_US);
        reserve_patiently(seq, OSCAR_PAGE_TOKENS);
        TRY(oscar_seq_advance(seq, NULL, ids, 1)); /* takes the updates that the page before has led to */
        uint64_t begin = bench_now_ns();
        TRY(oscar_seq_advance(seq, NULL, ids + 1, 1));
        samples_add(tokens, bench_now_ns() - begin);
        begin = bench_now_ns();
        TRY(oscar_seq_advance(seq, NULL, ids + 2, OSCAR_PAGE_TOKENS - 2));
        samples_add(pages, bench_now_ns() - begin);
    }
    oscar_seq_close(seq);
}

static void bench_opens(struct report *report, struct private_daemon *daemon, uint32_t paths) {
    struct samples open, close, lookup, miss, floor_trip;
    samples_init(&open, OPENS);
    samples_init(&close, OPENS);
    samples_init(&lookup, OPENS);
    samples_init(&miss, OPENS);
    samples_init(&floor_trip, ROUND_TRIPS);
    struct control_floor *floor = control_floor_start(paths, PATH_PAGES);
    struct worker worker = worker_open(daemon, "bench");
    for (uint32_t i = 0; i < OPENS; i++) {
        uint32_t path = i * 37 % paths;
        uint32_t *tokens = path_tokens(path), *unseen = path_tokens(paths + i);
        struct oscar_seq *seq;
        struct oscar_seq_info info = {.size = sizeof(info)};
        uint64_t begin = bench_now_ns();
        TRY(oscar_seq_open(worker.model, tokens, PATH_TOKENS, 0, &seq));
        samples_add(&open, bench_now_ns() - begin);
        TRY(oscar_seq_info(seq, &info));
        if (info.hit_tokens != PATH_TOKENS)
            fail("a path that should be cached is not", OSCAR_ERR_NOT_FOUND);
        begin = bench_now_ns();
        oscar_seq_close(seq);
        samples_add(&close, bench_now_ns() - begin);
        samples_add(&lookup, control_floor_lookup_ns(floor, path));
        begin = bench_now_ns();
        TRY(oscar_seq_open(worker.model, unseen, PATH_TOKENS, 0, &seq));
        samples_add(&miss, bench_now_ns() - begin);
        oscar_seq_close(seq);
        free(tokens);
        free(unseen);
    }
    for (uint32_t i = 0; i < ROUND_TRIPS; i++)
        samples_add(&floor_trip, control_floor_roundtrip_ns(floor));
    control_floor_stop(floor);

    double open_p50 = samples_percentile_ms(&open, 50), floor_p50 = samples_percentile_ms(&lookup, 50);
    report_row(report, "round_trip_floor_p50", samples_percentile_ms(&floor_trip, 50), "ms");
    bench_ping(report, "", &worker);
    if (sysconf(_SC_NPROCESSORS_ONLN) > 1) {
        pin(0, 1);
        bench_ping(report, "_other_cpu", &worker);
        pin(0, 0);
    }
    worker_close(&worker);
    report_row(report, "lookup_floor_100k_p50", floor_p50, "ms");
    report_row(report, "lookup_floor_100k_p99", samples_percentile_ms(&lookup, 99), "ms");
    report_row(report, "seq_open_100k_hit_p50", open_p50, "ms");
    report_row(report, "seq_open_100k_hit_p99", samples_percentile_ms(&open, 99), "ms");
    report_row(report, "seq_open_100k_hit_over_floor", open_p50 / floor_p50, "ratio");
    report_row(report, "seq_open_100k_miss_p50", samples_percentile_ms(&miss, 50), "ms");
    report_row(report, "seq_open_100k_miss_p99", samples_percentile_ms(&miss, 99), "ms");
    report_row(report, "seq_close_100k_p50", samples_percentile_ms(&close, 50), "ms");
    report_row(report, "seq_close_100k_p99", samples_percentile_ms(&close, 99), "ms");
    samples_free(&open);
    samples_free(&close);
    samples_free(&lookup);
    samples_free(&miss);
    samples_free(&floor_trip);
}

/* Advances that fill a page, so that each speaks to the daemon; decode's other 63 of 64 advances do not. */
static void bench_advance(struct report *report, struct private_daemon *daemon) {
    struct worker worker = worker_open(daemon, "bench-advance");
    struct samples advance, token, other;
    samples_init(&advance, ADVANCES);
    samples_init(&token, 2 * ADVANCES);
    samples_init(&other, ADVANCES);
    time_advances(&worker, 0, &advance, &token);
    if (sysconf(_SC_NPROCESSORS_ONLN) > 1) {
        pin(0, 1);
        time_advances(&worker, ADVANCES, &other, &token);
        pin(0, 0);
    }
    worker_close(&worker);
    report_row(report, "seq_advance_page_p50", samples_percentile_ms(&advance, 50), "ms");
    report_row(report, "seq_advance_page_p99", samples_percentile_ms(&advance, 99), "ms");
    report_row(report, "seq_advance_token_p50", samples_percentile_ms(&token, 50), "ms");
    if (other.count > 0)
        report_row(report, "seq_advance_page_other_cpu_p50", samples_percentile_ms(&other, 50), "ms");
    samples_free(&advance);
    samples_free(&token);
    samples_free(&other);
}

struct tally {
    _Atomic uint32_t ready;
    _Atomic bool go, stop;
    _Atomic uint64_t operations;
};

enum crowd_work { CROWD_OPEN, CROWD_ADVANCE };

/* One of many client processes: repeats its work until told to stop. */
static void crowd_member(struct private_daemon *daemon, struct tally *tally, enum crowd_work work, uint32_t member,
                         uint32_t paths) {
    struct worker worker = worker_open(daemon, work == CROWD_OPEN ? "bench" : "bench-crowd");
    uint32_t *tokens = path_tokens(work == CROWD_OPEN ? member * 11 % paths : (1U << 20) + member);
    struct oscar_seq *seq = NULL;
    if (work == CROWD_ADVANCE)
        TRY(oscar_seq_open(worker.model, NULL, 0, 0, &seq));
    tally->ready++;
    while (!tally->go)
        usleep(1000);
    for (uint32_t i = 0; !tally->stop; i++) {
        if (work == CROWD_OPEN) {
            TRY(oscar_seq_open(worker.model, tokens, PATH_TOKENS, 0, &seq));
            oscar_seq_close(seq);
        } else {
            reserve_patiently(seq, OSCAR_PAGE_TOKENS);
            TRY(oscar_seq_advance(seq, NULL, tokens + (size_t)(i % PATH_PAGES) * OSCAR_PAGE_TOKENS, OSCAR_PAGE_TOKENS));
        }
        tally->operations++;
    }
    _exit(0);
}

static double crowd_rate(struct private_daemon *daemon, enum crowd_work work, uint32_t paths) {
    struct tally *tally = mmap(NULL, sizeof(*tally), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (tally == MAP_FAILED)
        fail("mmap", OSCAR_ERR_NO_MEMORY);
    pid_t member[CLIENTS];
    for (uint32_t i = 0; i < CLIENTS; i++) {
        member[i] = fork();
        if (member[i] < 0)
            fail("fork", OSCAR_ERR_LIMIT);
        if (member[i] == 0)
            crowd_member(daemon, tally, work, i, paths);
    }
    while (tally->ready < CLIENTS) {
        if (waitpid(-1, NULL, WNOHANG) > 0)
            fail("a client process has died", OSCAR_ERR_INTERNAL);
        usleep(1000);
    }
    uint64_t begin = bench_now_ns();
    tally->go = true;
    sleep(CLIENTS_SECONDS);
    tally->stop = true;
    double rate = (double)tally->operations * 1e9 / (double)(bench_now_ns() - begin);
    for (uint32_t i = 0; i < CLIENTS; i++) {
        int status;
        if (waitpid(member[i], &status, 0) < 0 || status != 0)
            fail("a client process failed", OSCAR_ERR_INTERNAL);
    }
    munmap(tally, sizeof(*tally));
    return rate;
}

static void bench_crowd(struct report *report, struct private_daemon *daemon, uint32_t paths) {
    report_row(report, "clients_64_seq_open_100k", crowd_rate(daemon, CROWD_OPEN, paths), "opens/s");
    report_row(report, "clients_64_seq_advance_page", crowd_rate(daemon, CROWD_ADVANCE, paths), "advances/s");
}

static void bench_metadata(struct report *report, struct private_daemon *daemon) {
    double pages = (double)metric(daemon, "oscar_pages"), tokens = pages * OSCAR_PAGE_TOKENS;
    report_row(report, "pages_stored", pages, "pages");
    report_row(report, "metadata_per_million_tokens", (double)metric(daemon, "oscar_metadata_bytes") / tokens, "MB");
}

/* Several workers with one prefix: the daemon holds one copy of its pages (page 0 as sink, the others packed). */
static void bench_sharing(struct report *report, struct private_daemon *daemon) {
    const int64_t pages = SHARED_TOKENS / OSCAR_PAGE_TOKENS - 1;
    struct worker worker[SHARERS];
    struct oscar_seq *seq;
    uint32_t *tokens = path_tokens(UINT32_MAX - 1);
    for (uint32_t i = 0; i < SHARERS; i++) {
        worker[i] = worker_open(daemon, "bench-shared");
        store_path(&worker[i], tokens, SHARED_TOKENS);
        wait_metric(daemon, PACKED, pages, INT64_MAX);
        TRY(oscar_seq_open(worker[i].model, tokens, SHARED_TOKENS, 0, &seq));
    }
    report_row(report, "copies_of_64k_prefix_8_workers", (double)metric(daemon, PACKED) / (double)pages, "copies");
    for (uint32_t i = 0; i < SHARERS; i++)
        worker_close(&worker[i]);
    free(tokens);
}

int main(int argc, char **argv) {
    static const struct option options[] = {
        {"json", no_argument, NULL, 'j'}, {"paths", required_argument, NULL, 'p'}, {NULL, 0, NULL, 0}};
    bool json = false;
    uint32_t paths = 640;
    for (int option; (option = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (option == 'j') {
            json = true;
        } else if (option == 'p' && atoi(optarg) > 0) {
            paths = (uint32_t)atoi(optarg);
        } else {
            fprintf(stderr, "usage: control_bench [--json] [--paths N]\n");
            return 2;
        }
    }
    struct private_daemon daemon = {.oscard = BENCH_OSCARD,
                                    .oscarctl = BENCH_OSCARCTL,
                                    .settings = "[memory]\nbudget = 8G\n[limits]\nclients = 128\n"};
    if (private_daemon_start(&daemon) < 0) {
        private_daemon_end(&daemon);
        return 1;
    }
    struct report *report = report_new("control", json);
    bench_sharing(report, &daemon);
    store_all(&daemon, paths);
    bench_metadata(report, &daemon);
    pin(0, 0);
    pin(daemon.process.pid, 0);
    bench_opens(report, &daemon, paths);
    bench_advance(report, &daemon);
    pin(0, -1);
    pin(daemon.process.pid, -1);
    bench_crowd(report, &daemon, paths);
    int stopped = private_daemon_stop(&daemon);
    private_daemon_end(&daemon);
    return report_finish(report) != 0 || stopped < 0;
}
