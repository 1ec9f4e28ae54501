/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The host kernels: attention over packed pages at every level beside a loop that dequantises with the same instruction set and
 * beside a plain read of the same bytes; what a rotating centre costs; the error against the oracle; packing and storing.
 *
 * What is compared runs in turn, layer by layer over a cache of random pages that no processor cache holds; medians, of processor
 * time where one thread works, since others may want the machine. "ns" is a token of a KV head: all query heads of its group, K
 * and V.
 *
 * usage: kernels_bench [--json]
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "kernels/host/host.h"
#include "kernels/number.h"
#include "kernels/reference.h"
#include "kernels/rotate.h"
#include "proto/geometry.h"
#include "tests/bench/kernels_cache.h"
#include "tests/bench/kernels_dequant.h"
#include "tests/bench/kernels_pack.h"
#include "tests/bench/report.h"
#include "tests/bench/samples.h"

#define ROUNDS 25U
#define WARM 2U

/* --- attention --- */

struct attend_run {
    struct bench_cache *cache;
    struct host_pool *one, *all;
    const float *q; /* rotated and scaled, for the dequantising loops */
    float *out;
    uint64_t sink;
};

static void must(int result, const char *what) {
    if (result < 0) {
        fprintf(stderr, "kernels_bench: %s: %s\n", what, oscar_error_text(result));
        exit(1);
    }
}

static void run_portable(struct attend_run *run) {
    must(host_attend(run->one, HOST_PORTABLE, &run->cache->args), "attend");
}
static void run_best(struct attend_run *run) {
    must(host_attend(run->one, host_level_best(), &run->cache->args), "attend");
}
static void run_all_cores(struct attend_run *run) {
    must(host_attend(run->all, host_level_best(), &run->cache->args), "attend");
}
static void run_read(struct attend_run *run) { run->sink += bench_cache_read(run->cache, run->cache->args.layer); }
#ifdef BENCH_X86
static void run_avx2(struct attend_run *run) { must(host_attend(run->one, HOST_AVX2, &run->cache->args), "attend"); }
static void run_vnni(struct attend_run *run) { must(host_attend(run->one, HOST_AVX512, &run->cache->args), "attend"); }
static void run_dequant_avx2(struct attend_run *run) { dequant_attend_avx2(&run->cache->args, run->q, run->out); }
static void run_dequant_avx512(struct attend_run *run) { dequant_attend_avx512(&run->cache->args, run->q, run->out); }
static void run_plain_avx2(struct attend_run *run) { dequant_plain_avx2(&run->cache->args, run->q, run->out); }
static void run_plain_avx512(struct attend_run *run) { dequant_plain_avx512(&run->cache->args, run->q, run->out); }
#endif

enum contender_id {
    PORTABLE,
    AVX2,
    AVX2_DEQUANT,
    AVX2_DEQUANT_C,
    VNNI,
    AVX512_DEQUANT,
    AVX512_DEQUANT_C,
    READ,
    ALL_CORES,
    PLAIN,
    PAIRS_8,
    PAIRS_16,
    CONTENDERS
};

struct contender {
    const char *name; /* of its row, after the shape's; NULL: used in ratios only */
    enum host_level level;
    int pairs;
    void (*run)(struct attend_run *run);
    bool dequantises; /* checked against the others before it is timed */
};

static const struct contender contenders[CONTENDERS] = {
    [PORTABLE] = {"portable", HOST_PORTABLE, -1, run_portable, false},
#ifdef BENCH_X86
    [AVX2] = {"avx2", HOST_AVX2, -1, run_avx2, false},
    [AVX2_DEQUANT] = {"avx2_dequant", HOST_AVX2, -1, run_dequant_avx2, true},
    [AVX2_DEQUANT_C] = {"avx2_dequant_c", HOST_AVX2, -1, run_plain_avx2, true},
    [VNNI] = {"vnni", HOST_AVX512, -1, run_vnni, false},
    [AVX512_DEQUANT] = {"avx512_dequant", HOST_AVX512, -1, run_dequant_avx512, true},
    [AVX512_DEQUANT_C] = {"avx512_dequant_c", HOST_AVX512, -1, run_plain_avx512, true},
#endif
    [READ] = {"read", HOST_PORTABLE, -1, run_read, false},
    [ALL_CORES] = {"all_cores", HOST_PORTABLE, -1, run_all_cores, false},
    /* Next to those with a centre, for the same state of the machine. */
    [PLAIN] = {NULL, HOST_PORTABLE, -1, run_best, false},
    [PAIRS_8] = {NULL, HOST_PORTABLE, 8, run_best, false},
    [PAIRS_16] = {NULL, HOST_PORTABLE, 16, run_best, false},
};

static bool runs_here(const struct contender *contender) {
    return contender->run != NULL && host_level_supported(contender->level);
}

static void row(struct report *report, const char *shape, const char *name, double value, const char *unit) {
    char full[64];
    snprintf(full, sizeof(full), "%s_%s", shape, name);
    report_row(report, full, value, unit);
}

/* The queries as the dequantising loops take them. */
static float *rotated_queries(const struct bench_cache *cache) {
    uint32_t d = cache->geometry.head_dim, heads = cache->geometry.query_heads;
    float *q = malloc(sizeof(float) * heads * d);
    if (q == NULL)
        must(OSCAR_ERR_NO_MEMORY, "queries");
    for (uint32_t i = 0; i < heads * d; i++)
        q[i] = oscar_fp16_to_float(((const uint16_t *)cache->item.q)[i]);
    oscar_rotate(host_level_best(), NULL, d, false, heads, q, d, q, d);
    for (uint32_t i = 0; i < heads * d; i++)
        q[i] *= cache->args.softmax_scale * 1.44269504F;
    return q;
}

/* A loop that computes something else would be no comparison. */
static void check_dequant(struct attend_run *run, enum contender_id id) {
    uint32_t d = run->cache->geometry.head_dim, heads = run->cache->geometry.query_heads;
    run->cache->args.layer = 1;
    run_best(run);
    contenders[id].run(run);
    oscar_rotate(host_level_best(), NULL, d, true, heads, run->out, d, run->out, d);
    double largest = 0, error = 0;
    for (uint32_t i = 0; i < heads * d; i++) {
        double expected = oscar_fp16_to_float(((const uint16_t *)run->cache->item.out)[i]);
        largest = fmax(largest, fabs(expected));
        error = fmax(error, fabs(expected - run->out[i]));
    }
    if (!(error <= 2e-3 * largest)) {
        fprintf(stderr, "kernels_bench: %s is off by %g of %g\n", contenders[id].name, error, largest);
        exit(1);
    }
}

static void bench_error(struct report *report, struct bench_cache *cache, struct host_pool *pool, const char *shape) {
    uint32_t d = cache->geometry.head_dim, heads = cache->geometry.query_heads;
    double *expected = malloc(sizeof(double) * heads * d), worst = 0;
    if (expected == NULL)
        must(OSCAR_ERR_NO_MEMORY, "oracle");
    cache->args.layer = 0;
    must(oscar_reference_attend(&cache->args, &cache->item, expected, NULL), "oracle");
    for (int level = HOST_PORTABLE; level < HOST_LEVELS; level++) {
        if (!host_level_supported((enum host_level)level))
            continue;
        must(host_attend(pool, (enum host_level)level, &cache->args), "attend");
        for (uint32_t h = 0; h < heads; h++) {
            double largest = 0, error = 0;
            for (uint32_t i = 0; i < d; i++) {
                double value = expected[(size_t)h * d + i];
                double off = fabs(oscar_fp16_to_float(((const uint16_t *)cache->item.out)[(size_t)h * d + i]) - value);
                largest = fmax(largest, fabs(value));
                error = fmax(error, off - fabs(value) * 0x1p-11); /* without the rounding of the output to FP16 */
            }
            worst = fmax(worst, error / largest);
        }
    }
    free(expected);
    row(report, shape, "attend_error", worst, "of largest output");
}

static uint64_t processor_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

static void bench_shape(struct report *report, const struct bench_shape *shape, uint32_t threads) {
    struct attend_run run = {.cache = bench_cache_open(shape)};
    struct samples samples[CONTENDERS];
    double ns[CONTENDERS];
    must(host_pool_open(1, &run.one, NULL), "pool");
    must(host_pool_open(threads, &run.all, NULL), "pool");
    float *q = rotated_queries(run.cache);
    run.q = q;
    run.out = malloc(sizeof(float) * shape->query_heads * shape->head_dim);
    if (run.out == NULL)
        must(OSCAR_ERR_NO_MEMORY, "outputs");
    bench_error(report, run.cache, run.one, shape->name);
    for (enum contender_id id = 0; id < CONTENDERS; id++) {
        samples_init(&samples[id], ROUNDS);
        if (contenders[id].dequantises && runs_here(&contenders[id]))
            check_dequant(&run, id);
    }
    uint32_t layer = 0;
    for (uint32_t round = 0; round < WARM + ROUNDS; round++)
        for (enum contender_id id = 0; id < CONTENDERS; id++) {
            if (!runs_here(&contenders[id]))
                continue;
            bench_cache_centre(run.cache, contenders[id].pairs);
            layer = (layer + 5) % shape->layers; /* what ran before left another layer in the caches */
            run.cache->args.layer = layer;
            uint64_t before = id == ALL_CORES ? bench_now_ns() : processor_ns();
            contenders[id].run(&run);
            uint64_t after = id == ALL_CORES ? bench_now_ns() : processor_ns();
            if (round >= WARM)
                samples_add(&samples[id], after - before);
        }
    double tokens = (double)shape->tokens * shape->kv_heads;
    for (enum contender_id id = 0; id < CONTENDERS; id++) {
        ns[id] = runs_here(&contenders[id]) ? samples_percentile_ms(&samples[id], 50) * 1e6 / tokens : NAN;
        if (contenders[id].name != NULL && runs_here(&contenders[id]))
            row(report, shape->name, contenders[id].name, ns[id], "ns");
        samples_free(&samples[id]);
    }
    double bytes = (double)bench_cache_step_bytes(run.cache) / tokens; /* bytes a ns are GB/s */
    enum contender_id best = host_level_best() == HOST_AVX512 ? VNNI : host_level_best() == HOST_AVX2 ? AVX2 : PORTABLE;
    row(report, shape->name, "read_rate", bytes / ns[READ], "GB/s");
    row(report, shape->name, "attend_rate", bytes / ns[best], "GB/s");
    row(report, shape->name, "attend_over_read", ns[best] / ns[READ], "x time");
    row(report, shape->name, "all_cores_over_one", ns[best] / ns[ALL_CORES], "x");
    row(report, shape->name, "centre_8_pairs", (ns[PAIRS_8] / ns[PLAIN] - 1) * 100, "% time");
    row(report, shape->name, "centre_16_pairs", (ns[PAIRS_16] / ns[PLAIN] - 1) * 100, "% time");
    if (runs_here(&contenders[AVX2])) {
        row(report, shape->name, "avx2_over_dequant", ns[AVX2_DEQUANT] / ns[AVX2], "x");
        row(report, shape->name, "avx2_over_dequant_c", ns[AVX2_DEQUANT_C] / ns[AVX2], "x");
    }
    if (runs_here(&contenders[VNNI])) {
        row(report, shape->name, "vnni_over_dequant", ns[AVX512_DEQUANT] / ns[VNNI], "x");
        row(report, shape->name, "vnni_over_dequant_c", ns[AVX512_DEQUANT_C] / ns[VNNI], "x");
    }
    free(q);
    free(run.out);
    host_pool_close(run.one);
    host_pool_close(run.all);
    bench_cache_close(run.cache);
    if (run.sink == 42) /* what was read must be used */
        fputc(' ', stderr);
}

int main(int argc, char **argv) {
    bool json = argc == 2 && strcmp(argv[1], "--json") == 0;
    if (argc > 1 && !json) {
        fprintf(stderr, "usage: kernels_bench [--json]\n");
        return 2;
    }
    /* Real models' shapes: Qwen3-8B and SmolLM2-135M. */
    static const struct bench_shape shapes[] = {
        {"d128", 36, 32, 8, 128, 16384},
        {"d64", 30, 9, 3, 64, 16384},
    };
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    uint32_t threads = cores < 1 ? 1 : cores > (long)HOST_MAX_THREADS ? HOST_MAX_THREADS : (uint32_t)cores;
    struct report *report = report_new("kernels", json);
    report_row(report, "cores", threads, "threads");
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++)
        bench_shape(report, &shapes[i], threads);
    bench_pack(report);
    return report_finish(report);
}
