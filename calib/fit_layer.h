/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fit of one layer. The last quarter of every sequence is held out: ranks and a kind of rotation are chosen with all
 * else fitted on the first three quarters. What is returned is fitted on everything.
 */
#ifndef OSCAR_CALIB_FIT_LAYER_H
#define OSCAR_CALIB_FIT_LAYER_H

#include "calib/activations.h"
#include "calib/options.h"

/* Arrays are NULL where the options leave the part out; `owned` holds them all. */
struct layer_fit {
    uint32_t kv_heads, d;
    uint32_t rotations;             /* matrices: kv_heads, or 1 that the heads share */
    uint32_t pairs;                 /* a head */
    float *rotation_k, *rotation_v; /* of FIT_MATRIX: [rotations][d][d] */
    int32_t *pair;                  /* [kv_heads][pairs] */
    struct layer_fit_kind {
        float *centre_static;           /* [kv_heads][d] */
        float *centre_cos, *centre_sin; /* [kv_heads][pairs][d] */
        float *feedback;                /* [kv_heads][d][d] */
        int32_t *rank_k, *rank_v;       /* [kv_heads] */
        /* Of the attention output, when only K or only V is packed: energy of the error over energy of the output.
         * Negative: not measured, as nothing had to be chosen. */
        double error_k, error_v;
    } kind[FIT_KINDS];
    void *owned;
};

/* What does not change from layer to layer. */
struct layer_fitter {
    const struct fit_options *options;
    const struct activations *activations;
    struct rope rope;
    double softmax_scale;
};

int fit_layer(const struct layer_fitter *fitter, const struct layer_activations *layer, struct layer_fit *ret,
              struct oscar_cause *cause);
void layer_fit_clear(struct layer_fit *fit);

#endif
