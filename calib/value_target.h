/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What V's rotation is fitted to: the covariance of V weighted by attention. With the real causal scores S it is
 * Vᵀ Sᵀ S V, which is the covariance of the attention outputs: chosen queries, evenly spread, stand for all.
 */
#ifndef OSCAR_CALIB_VALUE_TARGET_H
#define OSCAR_CALIB_VALUE_TARGET_H

#include "calib/activations.h"

/* Both add to target[0], of the first three quarters of each sequence, and target[1], of the rest: [d][d], lower triangle. */
int value_target_scores(const struct activations *activations, const struct layer_activations *layer, uint32_t kv_head,
                        double softmax_scale, double *const target[2], struct oscar_cause *cause);
/* The published code's substitute: sum of w_t v_tᵀ v_t with w_t = k_t C k_tᵀ and C the queries' covariance. */
int value_target_proxy(const struct activations *activations, const struct layer_activations *layer, uint32_t kv_head,
                       const double *covariance, double *const target[2], struct oscar_cause *cause);

#endif
