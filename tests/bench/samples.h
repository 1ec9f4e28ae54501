/* SPDX-License-Identifier: Apache-2.0 */
/* Latencies of one measured call, and their percentiles. */
#ifndef OSCAR_BENCH_SAMPLES_H
#define OSCAR_BENCH_SAMPLES_H

#include <stddef.h>
#include <stdint.h>

struct samples {
    uint64_t *ns; /* owned */
    size_t count, capacity;
};

void samples_init(struct samples *samples, size_t capacity);           /* exits the program when memory is out */
void samples_add(struct samples *samples, uint64_t ns);                /* at most `capacity` of them */
double samples_percentile_ms(struct samples *samples, double percent); /* sorts in place */
void samples_free(struct samples *samples);

uint64_t bench_now_ns(void); /* CLOCK_MONOTONIC */

#endif
