/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The loops that attention on packed pages is measured against: the same records, but every element is dequantised to binary32,
 * (code - zero) * scale, once a record for all heads of the group, and multiplied in floating point with the same instruction
 * set. Written as well as we know how: codes come out of their words by a shift and a permutation of a table of four floats, no
 * element is moved to another lane, keys are never stored, the softmax is vectorised, the record after the next is prefetched
 * line by line. KV head by KV head, for the sums of one, in the order of the record's lanes, fill a third of the first cache.
 */
#ifndef OSCAR_TESTS_BENCH_KERNELS_DEQUANT_H
#define OSCAR_TESTS_BENCH_KERNELS_DEQUANT_H

#include "oscar/device.h"

#define DEQUANT_MOST_GROUP 4U

/* One decode row (item 0, one row) over packed pages that are all full; head size 64 or 128, group 1..4, no centre, FP16.
 * q: rotated queries [query_heads][d], already times softmax_scale * log2(e); out: rotated outputs [query_heads][d]. */
void dequant_attend_avx2(const struct oscar_attend_args *args, const float *q, float *out);
void dequant_attend_avx512(const struct oscar_attend_args *args, const float *q, float *out);
/* The same as plain C that the compiler vectorises (kernels_dequant_plain.c). */
void dequant_plain_avx2(const struct oscar_attend_args *args, const float *q, float *out);
void dequant_plain_avx512(const struct oscar_attend_args *args, const float *q, float *out);

#endif
