/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How fast oscar-calib takes in a capture, on one thread: BF16 rows from a mapped file to covariances in fp64, with everything
 * that the pass does beside it (checks, conversion, K turned back). Counted as the 2 d² operations a row that a dgemm would
 * take, against the best dgemm of this machine in the same run.
 */
#include <cblas.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "calib/moments.h"
#include "calib/parallel.h"
#include "calib/tensor_writer.h"
#include "proto/half.h"
#include "tests/bench/report.h"

#define ROUNDS 7U
#define DGEMM_SIZE 768U
#define TOKENS 8192U
#define GROUP 4U

static void must(int result, const struct oscar_cause *cause) {
    if (result < 0) {
        fprintf(stderr, "calib_bench: %s: %s\n", oscar_error_text(result), cause->text);
        exit(1);
    }
}

static double seconds(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static float noise(uint64_t *state) {
    *state = *state * UINT64_C(6364136223846793005) + 1442695040888963407U;
    return (float)(*state >> 40) * 0x1p-23F - 1.0F;
}

/* One layer of one KV head, as a file. */
static void write_capture(const char *path, uint32_t d) {
    struct oscar_cause cause = {0};
    struct tensor_writer *writer = NULL;
    const size_t rows = (size_t)TOKENS * d;
    uint64_t state = d;
    uint16_t *data = malloc((GROUP + 2) * rows * sizeof(*data));
    if (data == NULL)
        must(OSCAR_ERR_NO_MEMORY, &cause);
    for (size_t i = 0; i < (GROUP + 2) * rows; i++)
        data[i] = oscar_bfloat_from_float(noise(&state));
    must(tensor_writer_new(&writer, &cause), &cause);
    tensor_writer_metadata(writer, "rope_base", "1e6");
    tensor_writer_metadata(writer, "rope_pairs", "halves");
    tensor_writer_add(writer, "layers.0.q", OSCAR_TENSOR_BF16, 3, (uint64_t[]){TOKENS, GROUP, d}, data);
    tensor_writer_add(writer, "layers.0.k", OSCAR_TENSOR_BF16, 3, (uint64_t[]){TOKENS, 1, d}, data + GROUP * rows);
    tensor_writer_add(writer, "layers.0.v", OSCAR_TENSOR_BF16, 3, (uint64_t[]){TOKENS, 1, d},
                      data + (GROUP + 1) * rows);
    must(tensor_writer_save(writer, path, &cause), &cause);
    tensor_writer_free(writer);
    free(data);
}

static double dgemm_rate(const double *a, const double *b, double *c) {
    const int n = DGEMM_SIZE;
    double start = seconds();
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, n, n, 1.0, a, n, b, n, 0.0, c, n);
    return 2.0 * n * n * n / (seconds() - start);
}

static double covariance_rate(const struct activations *activations, const struct rope *rope) {
    struct oscar_cause cause = {0};
    struct moments moments = {0};
    const uint32_t d = activations->head_dim;
    const struct layer_activations *layer = activations_layer(activations, 0);
    must(moments_init(&moments, d, &cause), &cause);
    double start = seconds();
    must(moments_add(&moments, activations, rope, layer, layer->sequence, 0, 0, TOKENS, &cause), &cause);
    double rate = 2.0 * TOKENS * GROUP * d * d / (seconds() - start);
    moments_clear(&moments);
    return rate;
}

/* The best of interleaved rounds: whatever else runs on the machine only takes away. */
static void measure(struct report *report, const char *path, uint32_t d, double *memory) {
    struct oscar_cause cause = {0};
    struct activations *activations = NULL;
    struct rope rope;
    const size_t size = (size_t)DGEMM_SIZE * DGEMM_SIZE;
    double dgemm = 0;
    double covariance = 0;
    char name[64];
    write_capture(path, d);
    must(activations_open(&path, 1, &activations, &cause), &cause);
    must(rope_make(&activations->rope, NULL, 0, d, &rope, &cause), &cause);
    for (unsigned round = 0; round < ROUNDS; round++) {
        double rate = dgemm_rate(memory, memory + size, memory + 2 * size);
        dgemm = rate > dgemm ? rate : dgemm;
        rate = covariance_rate(activations, &rope);
        covariance = rate > covariance ? rate : covariance;
    }
    activations_free(activations);
    (void)snprintf(name, sizeof(name), "covariance_d%u", d);
    report_row(report, name, covariance * 1e-9, "GFLOP/s");
    (void)snprintf(name, sizeof(name), "covariance_d%u_dgemm", d);
    report_row(report, name, dgemm * 1e-9, "GFLOP/s");
    (void)snprintf(name, sizeof(name), "covariance_d%u_of_dgemm", d);
    report_row(report, name, 100 * covariance / dgemm, "%");
}

int main(int argc, char **argv) {
    struct report *report = report_new("taking in a capture, one thread", argc > 1 && strcmp(argv[1], "--json") == 0);
    char path[] = "/tmp/calib-bench.XXXXXX";
    uint64_t state = 1;
    double *memory = malloc((size_t)3 * DGEMM_SIZE * DGEMM_SIZE * sizeof(*memory));
    int fd = mkstemp(path);
    if (report == NULL || memory == NULL || fd < 0) {
        perror("calib_bench");
        return 1;
    }
    (void)close(fd);
    parallel_quiet_blas();
    for (size_t i = 0; i < (size_t)3 * DGEMM_SIZE * DGEMM_SIZE; i++)
        memory[i] = (double)noise(&state);
    for (uint32_t d = 64; d <= 256; d *= 2)
        measure(report, path, d, memory);
    (void)unlink(path);
    free(memory);
    return report_finish(report);
}
