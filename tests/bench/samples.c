/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/samples.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

void samples_init(struct samples *samples, size_t capacity) {
    samples->ns = malloc(capacity * sizeof(*samples->ns));
    if (samples->ns == NULL) {
        fprintf(stderr, "bench: no memory for %zu samples\n", capacity);
        exit(1);
    }
    samples->count = 0;
    samples->capacity = capacity;
}

void samples_add(struct samples *samples, uint64_t ns) {
    assert(samples->count < samples->capacity);
    samples->ns[samples->count++] = ns;
}

static int compare_ns(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

double samples_percentile_ms(struct samples *samples, double percent) {
    assert(samples->count > 0);
    qsort(samples->ns, samples->count, sizeof(*samples->ns), compare_ns);
    size_t rank = (size_t)(percent / 100.0 * (double)(samples->count - 1) + 0.5);
    return (double)samples->ns[rank] * 1e-6;
}

void samples_free(struct samples *samples) {
    free(samples->ns);
    samples->ns = NULL;
}

uint64_t bench_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000U + (uint64_t)now.tv_nsec;
}
