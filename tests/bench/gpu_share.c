/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What several processes do together on one GPU: workers that decode over one prefix in the daemon's memory, beside workers that each
 * have a BF16 cache of their own (PyTorch SDPA); what the daemon's packing costs a worker that decodes meanwhile; how fast a worker
 * attaches to a full cache.
 *
 * usage: gpu_share [--json] [--mps]     --mps: this runs under MPS; rows are named so, and attaching is left out
 */
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/bench/gpu_worker.h"
#include "tests/bench/report.h"
#include "tests/bench/samples.h"
#include "tests/demo/private_daemon.h"

#define WORKERS 4U
#define DECODE_SECONDS 1
#define PACKED_SEQS 8U
#define PACKED_STEPS 320U /* five pages of each sequence */
#define PREFILL_SECONDS 2
#define BESIDE_SECONDS 1
#define NUMBERS 4U       /* at most, of a worker's answer */
#define FILLED_PATHS 17U /* more than 32 GiB in INT2 */
#define PATIENCE_MS 180000
#define GIB ((double)(UINT64_C(1) << 30))

#define PACKED "oscar_pages{form=\"packed\"}"
#define PACKING "oscar_pages_waiting_for_packing"
#define USED "oscar_memory_used_bytes"
#define CHUNKS "oscar_memory_chunk_bytes"

struct share {
    struct private_daemon daemon;
    struct report *report;
    bool mps;
    uint32_t started; /* workers so far */
};

static _Noreturn void fail(struct share *share, const char *what) {
    fprintf(stderr, "gpu_share: %s\n", what);
    private_daemon_end(&share->daemon);
    exit(1);
}

static void row(struct share *share, const char *name, double value, const char *unit) {
    char text[96];
    snprintf(text, sizeof(text), "%s%s", name, share->mps ? "_mps" : "");
    report_row(share->report, text, value, unit);
}

static int64_t metric(struct share *share, const char *name) {
    json_t *stats = private_daemon_stats(&share->daemon);
    int64_t value = stats == NULL ? -1 : private_daemon_metric(stats, name);
    json_decref(stats);
    if (value < 0)
        fail(share, name);
    return value;
}

static void wait_packed(struct share *share) {
    uint64_t deadline = bench_now_ns() + UINT64_C(1000000) * PATIENCE_MS;
    while (metric(share, PACKING) > 0) {
        if (bench_now_ns() > deadline)
            fail(share, "the daemon does not come to an end with packing");
        usleep(20000);
    }
}

/* --- workers ------------------------------------------------------------------------------------------------------ */

static struct worker_process start_worker(struct share *share) {
    struct worker_process worker;
    struct worker_job job = {.number = ++share->started};
    snprintf(job.socket, sizeof(job.socket), "%s", share->daemon.socket);
    if (worker_spawn(&worker, "gpu_share", worker_body, &job, sizeof(job)) < 0)
        fail(share, "a worker cannot be started");
    return worker;
}

__attribute__((format(printf, 3, 4))) static void tell(struct share *share, struct worker_process *worker,
                                                       const char *format, ...) {
    char line[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof(line), format, arguments);
    va_end(arguments);
    if (line_tell(&worker->pipe, "%s", line) < 0)
        fail(share, "a worker is gone");
}

/* The next line, which begins with `word`; up to NUMBERS numbers behind it. */
static void hear(struct share *share, struct worker_process *worker, const char *word, double ret_number[NUMBERS]) {
    char line[LINE_BYTES];
    size_t length = strlen(word);
    int r = line_hear(&worker->pipe, line, sizeof(line), PATIENCE_MS);
    if (r < 0 || strncmp(line, word, length) != 0)
        fail(share, r < 0 ? "a worker does not answer" : line);
    double number[NUMBERS] = {NAN, NAN, NAN, NAN};
    (void)sscanf(line + length, "%lf %lf %lf %lf", &number[0], &number[1], &number[2], &number[3]);
    if (ret_number != NULL)
        memcpy(ret_number, number, sizeof(number));
}

static void end_worker(struct share *share, struct worker_process *worker) {
    int status = -1;
    close(worker->pipe.out);
    worker->pipe.out = -1;
    if (worker_wait(worker, PATIENCE_MS, &status) < 0 || status != 0)
        fail(share, "a worker failed");
    worker_end(worker);
}

/* Workers that have `seqs` sequences over the prefix each. */
static void start_decoders(struct share *share, struct worker_process *ret_worker, uint32_t workers, uint32_t seqs) {
    double opened[NUMBERS];
    for (uint32_t i = 0; i < workers; i++) {
        ret_worker[i] = start_worker(share);
        tell(share, &ret_worker[i], "open %u", seqs);
    }
    for (uint32_t i = 0; i < workers; i++) {
        hear(share, &ret_worker[i], "opened", opened);
        if (opened[0] != WORKER_PATH_TOKENS)
            fail(share, "the prefix is not cached");
        if ((opened[1] != 0) != share->mps)
            fail(share, share->mps ? "this does not run under MPS" : "this runs under MPS: say --mps");
    }
}

/* Tokens a second of all workers together, that answer with a count and seconds. */
static double rate_together(struct share *share, struct worker_process *worker, uint32_t workers, const char *answer) {
    double rate = 0, took[NUMBERS];
    for (uint32_t i = 0; i < workers; i++) {
        hear(share, &worker[i], answer, took);
        rate += took[0] / took[1];
    }
    return rate;
}

/* --- one prefix, several workers ---------------------------------------------------------------------------------- */

static void store_paths(struct share *share, uint32_t first, uint32_t count) {
    struct worker_process worker = start_worker(share);
    for (uint32_t i = 0; i < count; i++) {
        tell(share, &worker, "store %u 1", first + i);
        hear(share, &worker, "stored", NULL);
        wait_packed(share);
    }
    end_worker(share, &worker);
    wait_packed(share);
}

/* Tokens a second of the workers over one prefix in INT2. */
static double bench_shared(struct share *share) {
    struct worker_process worker[WORKERS];
    start_decoders(share, worker, WORKERS, 1);
    tell(share, &worker[0], "decode %d", DECODE_SECONDS);
    row(share, "share_1_worker", rate_together(share, worker, 1, "took"), "tokens/s");
    row(share, "share_memory_4_workers", (double)metric(share, USED) * 1e-9, "GB");
    for (uint32_t i = 0; i < WORKERS; i++)
        tell(share, &worker[i], "decode %d", DECODE_SECONDS);
    double rate = rate_together(share, worker, WORKERS, "took");
    row(share, "share_4_workers", rate, "tokens/s");
    for (uint32_t i = 0; i < WORKERS; i++)
        end_worker(share, &worker[i]);
    return rate;
}

/* The same with a BF16 cache for each process; NaN without PyTorch. */
static double bench_private(struct share *share) {
    struct worker_process python[WORKERS];
    char shape[64], layers[16], choice[LINE_BYTES], line[LINE_BYTES];
    double rate = NAN;
    snprintf(shape, sizeof(shape), "1x%ux%ux%ux%u", WORKER_PATH_TOKENS, WORKER_QUERY_HEADS, WORKER_KV_HEADS,
             WORKER_HEAD_DIM);
    snprintf(layers, sizeof(layers), "%u", WORKER_LAYERS);
    const char *argv[] = {"/usr/bin/env", "python3", BENCH_BASELINES, "--decode", layers, shape, NULL};
    for (uint32_t i = 0; i < WORKERS; i++)
        if (worker_start(&python[i], "gpu_baselines.py", argv) < 0)
            fail(share, "python3 cannot be started");
    /* The first one finds the fastest kernel for all of them, while nobody disturbs it. */
    if (line_tell(&python[0].pipe, "prepare") == 0 &&
        line_hear(&python[0].pipe, choice, sizeof(choice), PATIENCE_MS) == 0 && strncmp(choice, "ready ", 6) == 0) {
        for (uint32_t i = 1; i < WORKERS; i++)
            tell(share, &python[i], "prepare %.200s", choice + 6);
        for (uint32_t i = 1; i < WORKERS; i++)
            hear(share, &python[i], "ready", NULL);
        tell(share, &python[0], "run %d", DECODE_SECONDS);
        row(share, "share_1_private_bf16", rate_together(share, python, 1, "steps"), "tokens/s");
        for (uint32_t i = 0; i < WORKERS; i++)
            tell(share, &python[i], "run %d", DECODE_SECONDS);
        rate = rate_together(share, python, WORKERS, "steps");
    } else {
        fprintf(stderr, "gpu_share: no private caches: python3 with PyTorch is not there, or it failed\n");
        (void)line_hear(&python[0].pipe, line, sizeof(line), 0);
        row(share, "share_1_private_bf16", NAN, "tokens/s");
    }
    for (uint32_t i = 0; i < WORKERS; i++)
        worker_end(&python[i]);
    row(share, "share_4_private_bf16", rate, "tokens/s");
    return rate;
}

static void bench_sharing(struct share *share) {
    const double pages = WORKER_PATH_PAGES - 1; /* page 0 is the sink, and stays BF16 */
    const double token_bytes = 2.0 * 2 * WORKER_LAYERS * WORKER_KV_HEADS * WORKER_HEAD_DIM;
    const double private_bytes = WORKERS * token_bytes * WORKER_PATH_TOKENS;
    store_paths(share, 0, 1);
    row(share, "share_copies", (double)metric(share, PACKED) / pages, "copies");
    double used = (double)metric(share, USED);
    double shared = bench_shared(share);
    double apart = bench_private(share);
    row(share, "share_4_workers_over_private", shared / apart, "x");
    row(share, "share_memory_prefix", used * 1e-9, "GB");
    row(share, "share_memory_4_private_bf16", private_bytes * 1e-9, "GB");
    row(share, "share_memory_private_over_prefix", private_bytes / used, "x");
}

/* --- packing beside decoding -------------------------------------------------------------------------------------- */

/* Seconds of as many steps. */
static double time_steps(struct share *share, struct worker_process *worker, const char *how) {
    double took[NUMBERS];
    tell(share, worker, "%s %u", how, PACKED_STEPS);
    hear(share, worker, "took", took);
    return took[1];
}

/* Steps that are advanced, whose pages the daemon packs as they leave the window, beside steps that nobody is told of. */
static void bench_own_packing(struct share *share, struct worker_process *worker) {
    double before = time_steps(share, worker, "hold"), advanced = time_steps(share, worker, "steps");
    wait_packed(share);
    double held = (before + time_steps(share, worker, "hold")) / 2;
    row(share, "packing_decode_8", PACKED_SEQS * PACKED_STEPS / held, "tokens/s");
    row(share, "packing_cost_own_pages", (advanced / held - 1) * 100, "%");
}

/* Steps a second while another worker prefills, whose pages the daemon packs or not. */
static double rate_beside_prefill(struct share *share, struct worker_process *worker, bool advance) {
    double took[NUMBERS], prefilled[NUMBERS];
    struct worker_process other = start_worker(share);
    tell(share, &other, "prefill %d %d", PREFILL_SECONDS, advance ? 1 : 0);
    hear(share, &other, "going", NULL);
    tell(share, worker, "hold_for %d", BESIDE_SECONDS);
    hear(share, worker, "took", took);
    hear(share, &other, "took", prefilled);
    end_worker(share, &other);
    wait_packed(share);
    if (advance)
        row(share, "packing_beside_prefill", prefilled[0] / prefilled[1], "tokens/s");
    return took[0] / took[1];
}

static void bench_packing(struct share *share) {
    struct worker_process worker;
    start_decoders(share, &worker, 1, PACKED_SEQS);
    bench_own_packing(share, &worker);
    double stored = rate_beside_prefill(share, &worker, false), packed = rate_beside_prefill(share, &worker, true);
    row(share, "packing_cost_beside_prefill", (stored / packed - 1) * 100, "%");
    end_worker(share, &worker);
}

/* --- attaching ---------------------------------------------------------------------------------------------------- */

static void bench_attach(struct share *share) {
    double attached[NUMBERS];
    store_paths(share, 1, FILLED_PATHS - 1);
    struct worker_process worker = start_worker(share);
    int64_t before = metric(share, USED);
    tell(share, &worker, "attach %u", FILLED_PATHS);
    hear(share, &worker, "attached", attached);
    row(share, "attach_mapped", (double)metric(share, CHUNKS) / GIB, "GiB");
    row(share, "attach_32_gib", attached[0], "ms");
    row(share, "attach_connected", attached[1], "ms");
    row(share, "attach_seq_open_100k", attached[2], "ms");
    row(share, "attach_100k_to_attention", attached[3], "ms");
    row(share, "attach_100k_copied", (double)(metric(share, USED) - before), "bytes");
    end_worker(share, &worker);
}

int main(int argc, char **argv) {
    struct share share = {.daemon = {.oscard = BENCH_OSCARD,
                                     .oscarctl = BENCH_OSCARCTL,
                                     .settings = "[device]\nbackend = cuda\n[memory]\nbudget = 64G\nchunk = 1G\n"}};
    bool json = false;
    for (int i = 1; i < argc; i++) {
        json = json || strcmp(argv[i], "--json") == 0;
        share.mps = share.mps || strcmp(argv[i], "--mps") == 0;
        if (strcmp(argv[i], "--json") != 0 && strcmp(argv[i], "--mps") != 0) {
            fprintf(stderr, "usage: gpu_share [--json] [--mps]\n");
            return 2;
        }
    }
    signal(SIGPIPE, SIG_IGN); /* who is gone is told by the write that fails */
    if (private_daemon_start(&share.daemon) < 0) {
        private_daemon_end(&share.daemon);
        return 1;
    }
    share.report = report_new(share.mps ? "processes under MPS" : "processes", json);
    bench_sharing(&share);
    bench_packing(&share);
    if (!share.mps)
        bench_attach(&share);
    int stopped = private_daemon_stop(&share.daemon);
    private_daemon_end(&share.daemon);
    return report_finish(share.report) != 0 || stopped < 0;
}
