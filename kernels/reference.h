/* SPDX-License-Identifier: Apache-2.0 */
/* The oracle: what store, pack, attend and merge mean, in plain C with float64 sums; slow, and right by inspection. */
#ifndef OSCAR_KERNELS_REFERENCE_H
#define OSCAR_KERNELS_REFERENCE_H

#include "oscar/device.h"

/* As the functions of the same name in device.h, in the calling thread, without a stream. */
int oscar_reference_store(const struct oscar_store_args *args);
int oscar_reference_pack(const struct oscar_geometry *geometry, const struct oscar_calibration *calibration,
                         const struct oscar_pack_item *item, uint32_t items);
/* Output rows and log-sum-exp in float64: out64 [rows][query_heads][d] and lse64 [rows][query_heads] (either may be NULL) of
 * one item (its q is read in the geometry's dtype; its out and lse are not written). */
int oscar_reference_attend(const struct oscar_attend_args *args, const struct oscar_attend_item *item, double *out64,
                           double *lse64);
/* Exact attention over unrotated rows k, v [tokens][kv_heads][d] as float: the ground truth of the whole system. Query row i
 * (q [rows][query_heads][d]) stands at position tokens - rows + i. All three return 0 or OSCAR_ERR_NO_MEMORY besides. */
int oscar_reference_exact(const struct oscar_geometry *geometry, const float *k, const float *v, uint32_t tokens,
                          const float *q, uint32_t rows, float softmax_scale, double *out64, double *lse64);
/* What merge makes of out and lse, which it leaves alone: out64 [rows][heads][head_dim], lse64 [rows][heads]. */
void oscar_reference_merge(const struct oscar_merge_args *args, double *out64, double *lse64);

#endif
