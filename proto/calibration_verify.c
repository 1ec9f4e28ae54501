/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/calibration_verify.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>

#include "proto/half.h"

/* The published files hold fp32 products of orthogonal fp64 matrices: their error is below 1e-6. */
#define ORTHOGONAL_TOLERANCE 1e-4
#define TWO_PI 6.283185307179586

/* Where a number stands, for the text of a refusal. */
struct place {
    const char *part;
    uint32_t layer, head;
};

/* By its bits: it must hold whatever the compiler assumes about arithmetic. */
static bool is_finite(float value) { return (oscar_float_bits(value) & 0x7f800000U) != 0x7f800000U; }

static int check_finite(const float *values, size_t count, const struct place *place, struct oscar_cause *cause) {
    for (size_t i = 0; i < count; i++) {
        if (!is_finite(values[i]))
            return oscar_fail(cause, OSCAR_ERR_CALIBRATION,
                              "tensor layers.%" PRIu32 ".%s: element %zu of head %" PRIu32 " is not finite",
                              place->layer, place->part, i, place->head);
    }
    return OSCAR_OK;
}

/* Four sums, so that one addition need not wait for the one before. */
static double dot(const float *a, const float *b, uint32_t d) {
    double sum[4] = {0};
    for (uint32_t i = 0; i < d; i += 4) {
        for (uint32_t j = 0; j < 4; j++)
            sum[j] += (double)a[i + j] * (double)b[i + j];
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

static int check_rotation(const float *rotation, uint32_t d, const struct place *place, struct oscar_cause *cause) {
    int r;
    if (rotation == NULL)
        return OSCAR_OK;
    if ((r = check_finite(rotation, (size_t)d * d, place, cause)) < 0)
        return r;
    for (uint32_t i = 0; i < d; i++) {
        for (uint32_t j = 0; j <= i; j++) {
            double expected = i == j ? 1.0 : 0.0;
            double found = dot(rotation + (size_t)i * d, rotation + (size_t)j * d, d);
            if (!(fabs(found - expected) <= ORTHOGONAL_TOLERANCE))
                return oscar_fail(cause, OSCAR_ERR_CALIBRATION,
                                  "tensor layers.%" PRIu32 ".%s: head %" PRIu32 " is not orthogonal: rows %" PRIu32
                                  " and %" PRIu32 " have the product %.6g, expected %g within %g",
                                  place->layer, place->part, place->head, i, j, found, expected, ORTHOGONAL_TOLERANCE);
        }
    }
    return OSCAR_OK;
}

static int check_feedback(const float *factor, uint32_t d, const struct place *place, struct oscar_cause *cause) {
    int r;
    if (factor == NULL)
        return OSCAR_OK;
    if ((r = check_finite(factor, (size_t)d * d, place, cause)) < 0)
        return r;
    for (uint32_t i = 0; i < d; i++) {
        for (uint32_t j = i; j < d; j++) {
            float expected = i == j ? 1.0F : 0.0F, found = factor[(size_t)i * d + j];
            if (found != expected)
                return oscar_fail(cause, OSCAR_ERR_CALIBRATION,
                                  "tensor layers.%" PRIu32 ".%s: head %" PRIu32
                                  " is not unit lower triangular: [%" PRIu32 "][%" PRIu32 "] is %.6g, expected %g",
                                  place->layer, place->part, place->head, i, j, (double)found, (double)expected);
        }
    }
    return OSCAR_OK;
}

static int check_centre(const struct oscar_head_calibration *head, uint32_t d, struct place place,
                        struct oscar_cause *cause) {
    int r;
    size_t turning = (size_t)head->pairs * d;
    if (head->centre_static == NULL)
        return OSCAR_OK;
    place.part = "k.centre.static";
    if ((r = check_finite(head->centre_static, d, &place, cause)) < 0)
        return r;
    place.part = "k.centre.cos";
    if ((r = check_finite(head->centre_cos, turning, &place, cause)) < 0)
        return r;
    place.part = "k.centre.sin";
    if ((r = check_finite(head->centre_sin, turning, &place, cause)) < 0)
        return r;
    for (uint32_t i = 0; i < d; i++) {
        double bound = fabs((double)head->centre_static[i]);
        for (size_t j = i; j < turning; j += d)
            bound += fabs((double)head->centre_cos[j]) + fabs((double)head->centre_sin[j]);
        if (bound > (double)OSCAR_MAX_CENTRE_MAGNITUDE)
            return oscar_fail(cause, OSCAR_ERR_CALIBRATION,
                              "tensors layers.%" PRIu32 ".k.centre.*: dim %" PRIu32 " of head %" PRIu32
                              " can reach %.6g, at most %g",
                              place.layer, i, place.head, bound, (double)OSCAR_MAX_CENTRE_MAGNITUDE);
    }
    return OSCAR_OK;
}

static int check_omega(const struct oscar_calibration *calibration, struct oscar_cause *cause) {
    for (uint32_t i = 0; i < calibration->frequencies; i++) {
        double omega = calibration->omega[i];
        if (!(omega >= 0.0 && omega <= TWO_PI)) /* false for a NaN, too */
            return oscar_fail(cause, OSCAR_ERR_CALIBRATION,
                              "tensor rope.omega: element %" PRIu32 " is %.6g radians a token: must be 0 to 2 pi", i,
                              omega);
    }
    return OSCAR_OK;
}

int oscar_calibration_verify(const struct oscar_calibration *calibration, struct oscar_cause *cause) {
    uint32_t d = calibration->head_dim;
    int r = check_omega(calibration, cause);
    if (r < 0)
        return r;
    for (uint32_t layer = 0; layer < calibration->layers; layer++) {
        for (uint32_t i = 0; i < calibration->kv_heads; i++) {
            const struct oscar_head_calibration *head = oscar_calibration_head(calibration, layer, i);
            /* A rotation that the heads of a layer share is checked once. */
            bool shared_k = i > 0 && head->rotation_k == (head - 1)->rotation_k;
            bool shared_v = i > 0 && head->rotation_v == (head - 1)->rotation_v;
            struct place place = {"k.rotation", layer, i};
            if (!shared_k && (r = check_rotation(head->rotation_k, d, &place, cause)) < 0)
                return r;
            place.part = "v.rotation";
            if (!shared_v && (r = check_rotation(head->rotation_v, d, &place, cause)) < 0)
                return r;
            place.part = "k.feedback";
            if ((r = check_feedback(head->feedback, d, &place, cause)) < 0)
                return r;
            if ((r = check_centre(head, d, place, cause)) < 0)
                return r;
        }
    }
    return OSCAR_OK;
}
