/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What V's rotation is fitted to: the covariance of V weighted by attention. With the real causal scores S it is
 * Vᵀ Sᵀ S V, which is the covariance of the attention outputs: chosen queries, evenly spread, stand for all.
 * The same scores tell what K's errors cost. To first order the error e_t of key t moves the output o of a query q by
 * p_t (e_t·q) (v_t − o). Errors of different keys do not know of each other, and those of one head are alike; so their
 * squares add up to w E[(e·q)²], with w = sum of p_t² |v_t − o|². M = sum of w qᵀ q over queries is the metric e M eᵀ.
 */
#ifndef OSCAR_CALIB_VALUE_TARGET_H
#define OSCAR_CALIB_VALUE_TARGET_H

#include "calib/activations.h"

/* The metric M, with w over the tokens that are packed for each query. */
struct query_cost {
    double *sum;           /* M: [d][d], lower triangle */
    double weight, square; /* sums of w and of w² */
};

/* Both add to target[0], of the first three quarters of each sequence, and target[1], of the rest: [d][d], lower
 * triangle. cost[] is of the same parts. */
int value_target_scores(const struct activations *activations, const struct layer_activations *layer, uint32_t kv_head,
                        double softmax_scale, double *const target[2], struct query_cost cost[2],
                        struct oscar_cause *cause);
/* The published code's substitute: sum of w_t v_tᵀ v_t with w_t = k_t C k_tᵀ and C the queries' covariance. */
int value_target_proxy(const struct activations *activations, const struct layer_activations *layer, uint32_t kv_head,
                       const double *covariance, double *const target[2], struct oscar_cause *cause);

#endif
