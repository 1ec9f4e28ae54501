/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of a fit against closed forms and against plain loops in double. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "calib/attention.h"
#include "calib/centre.h"
#include "calib/feedback.h"
#include "calib/moments.h"
#include "calib/parallel.h"
#include "calib/quantise.h"
#include "calib/rope.h"
#include "calib/rotation.h"
#include "calib_fixture.h"
#include "kernels/codec.h"
#include "kernels/rotate.h"
#include "proto/half.h"

/* Fails for NaN, too. */
static void assert_near(double found, double expected, double tolerance) {
    if (!(fabs(found - expected) <= tolerance))
        fail_msg("found %.17g, expected %.17g within %g", found, expected, tolerance);
}

static double *doubles(size_t count) {
    double *memory = calloc(count, sizeof(*memory));
    assert_non_null(memory);
    return memory;
}

/* A positive definite matrix of a wide spectrum. */
static double *random_covariance(uint32_t d) {
    double *root = doubles((size_t)d * d);
    double *matrix = doubles((size_t)d * d);
    for (size_t i = 0; i < (size_t)d * d; i++)
        root[i] = calib_normal() * exp(2 * calib_uniform());
    for (uint32_t i = 0; i < d; i++)
        for (uint32_t j = 0; j < d; j++)
            for (uint32_t k = 0; k < d; k++)
                matrix[i * d + j] += root[i * d + k] * root[j * d + k] / d;
    free(root);
    return matrix;
}

/* ret = Rᵀ C R */
static double *turned(const double *c, const double *r, uint32_t d) {
    double *half = doubles((size_t)d * d);
    double *ret = doubles((size_t)d * d);
    for (uint32_t i = 0; i < d; i++)
        for (uint32_t j = 0; j < d; j++)
            for (uint32_t k = 0; k < d; k++)
                half[i * d + j] += c[i * d + k] * r[k * d + j];
    for (uint32_t i = 0; i < d; i++)
        for (uint32_t j = 0; j < d; j++)
            for (uint32_t k = 0; k < d; k++)
                ret[i * d + j] += r[k * d + i] * half[k * d + j];
    free(half);
    return ret;
}

/* --- rotation ----------------------------------------------------------------------------------------------------- */

/* H spreads every eigenvector over all columns alike, so the rotated target has one value on its whole diagonal; and turned
 * back by P and H it is the diagonal matrix of the eigenvalues. */
static void a_rotation_spreads_its_target_over_all_dims(void **unused) {
    (void)unused;
    for (uint32_t d = 64; d <= 256; d *= 2) {
        struct oscar_cause cause = {0};
        const size_t size = (size_t)d * d;
        double *c = random_covariance(d);
        double *r = doubles(size);
        double *h = doubles(size);
        double *spread = doubles(size);
        float *rotation = malloc(size * sizeof(*rotation));
        double eigenvalues[256];
        double trace = 0;
        assert_non_null(rotation);
        assert_int_equal(rotation_from_target(c, d, rotation, eigenvalues, &cause), 0);
        for (size_t i = 0; i < size; i++)
            r[i] = (double)rotation[i];
        for (uint32_t i = 0; i < d; i++)
            trace += c[i * (d + 1)];
        for (uint32_t i = 0; i < d; i++)
            for (uint32_t j = 0; j < d; j++) {
                double product = 0;
                for (uint32_t k = 0; k < d; k++)
                    product += r[i * d + k] * r[j * d + k];
                assert_near(product, i == j ? 1 : 0, 1e-6);
            }
        double *m = turned(c, r, d);
        for (uint32_t i = 0; i < d; i++)
            assert_near(m[i * (d + 1)], trace / d, 1e-5 * trace / d);
        /* undo P, then H */
        unsigned bits = (unsigned)__builtin_ctz(d);
        for (uint32_t i = 0; i < d; i++)
            for (uint32_t j = 0; j < d; j++) {
                uint32_t reversed = 0;
                for (unsigned b = 0; b < bits; b++)
                    reversed |= (j >> b & 1U) << (bits - 1 - b);
                spread[i * d + reversed] = r[i * d + j];
            }
        rotation_hadamard(d, h);
        double *u = doubles(size);
        for (uint32_t i = 0; i < d; i++)
            for (uint32_t j = 0; j < d; j++)
                for (uint32_t k = 0; k < d; k++)
                    u[i * d + j] += spread[i * d + k] * h[k * d + j];
        double *diagonal = turned(c, u, d);
        for (uint32_t i = 0; i < d; i++)
            for (uint32_t j = 0; j < d; j++)
                assert_near(diagonal[i * d + j], i == j ? eigenvalues[i] : 0, 1e-5 * eigenvalues[0]);
        for (uint32_t i = 1; i < d; i++)
            assert_true(eigenvalues[i] <= eigenvalues[i - 1]);
        free(c);
        free(r);
        free(h);
        free(u);
        free(m);
        free(spread);
        free(diagonal);
        free(rotation);
    }
}

static void the_rank_of_a_covariance_is_that_of_its_rows(void **unused) {
    (void)unused;
    struct oscar_cause cause = {0};
    const uint32_t d = 64, rank = 23;
    double *rows = doubles((size_t)rank * d);
    double *c = doubles((size_t)d * d);
    double eigenvalues[64];
    for (size_t i = 0; i < (size_t)rank * d; i++)
        rows[i] = calib_normal();
    covariance_add_wide(c, d, rows, rank);
    covariance_finish(c, d, 1.0);
    assert_int_equal(rotation_eigenvalues(c, d, eigenvalues, &cause), 0);
    assert_int_equal(rotation_rank(eigenvalues, d), rank);
    free(rows);
    free(c);
}

/* --- feedback ----------------------------------------------------------------------------------------------------- */

static void feedback_factors_the_rotated_metric(void **unused) {
    (void)unused;
    for (uint32_t d = 64; d <= 256; d *= 2) {
        struct oscar_cause cause = {0};
        const double lambda = 0.02;
        double *c = random_covariance(d);
        double *h = doubles((size_t)d * d);
        float *factor = malloc((size_t)d * d * sizeof(*factor));
        assert_non_null(factor);
        rotation_hadamard(d, h);
        double *m = turned(c, h, d);
        double trace = 0;
        for (uint32_t i = 0; i < d; i++)
            trace += m[i * (d + 1)];
        for (uint32_t i = 0; i < d; i++)
            m[i * (d + 1)] += lambda * trace / d;
        assert_int_equal(feedback_factor(c, h, d, lambda, factor, &cause), 0);
        /* The oracle: L D Lᵀ by elimination, column by column. */
        double diagonal[256];
        double *l = doubles((size_t)d * d);
        for (uint32_t j = 0; j < d; j++) {
            diagonal[j] = m[j * (d + 1)];
            for (uint32_t k = 0; k < j; k++)
                diagonal[j] -= l[j * d + k] * l[j * d + k] * diagonal[k];
            for (uint32_t i = j; i < d; i++) {
                l[i * d + j] = m[i * d + j];
                for (uint32_t k = 0; k < j; k++)
                    l[i * d + j] -= l[i * d + k] * l[j * d + k] * diagonal[k];
                l[i * d + j] /= diagonal[j];
            }
        }
        for (uint32_t i = 0; i < d; i++)
            for (uint32_t j = 0; j < d; j++) {
                assert_near((double)factor[i * d + j], l[i * d + j], 1e-6 * (1 + fabs(l[i * d + j])));
                if (i <= j) /* to the bit: a daemon refuses anything else */
                    assert_true(factor[i * d + j] == (i == j ? 1.0F : 0.0F));
            }
        free(c);
        free(h);
        free(m);
        free(l);
        free(factor);
    }
}

static void without_queries_feedback_is_the_identity_and_an_indefinite_metric_is_refused(void **unused) {
    (void)unused;
    struct oscar_cause cause = {0};
    const uint32_t d = 64;
    double *c = doubles((size_t)d * d);
    double *h = doubles((size_t)d * d);
    float factor[64 * 64];
    rotation_hadamard(d, h);
    assert_int_equal(feedback_factor(c, h, d, 0.02, factor, &cause), 0);
    for (uint32_t i = 0; i < d * d; i++)
        assert_true(factor[i] == (i % (d + 1) == 0 ? 1.0F : 0.0F));
    c[0] = -1;
    c[d + 1] = 2;
    assert_int_equal(feedback_factor(c, h, d, 0.0001, factor, &cause), OSCAR_ERR_CALIBRATION);
    assert_non_null(strstr(cause.text, "singular"));
    free(c);
    free(h);
}

/* --- RoPE and centre ---------------------------------------------------------------------------------------------- */

static void rows_are_turned_back_by_their_position(void **unused) {
    (void)unused;
    for (enum rope_pairing pairing = ROPE_HALVES; pairing <= ROPE_INTERLEAVED; pairing++) {
        struct oscar_cause cause = {0};
        struct rope rope;
        const uint32_t d = 128, dims = 96, rows = 300;
        const uint64_t first = 1000 + (uint64_t)(fabs(calib_uniform()) * 1e6);
        float *turned_rows = malloc((size_t)rows * d * sizeof(*turned_rows));
        double sum[128] = {0};
        double expected[128] = {0};
        assert_non_null(turned_rows);
        assert_int_equal(
            rope_make(&(struct rope_given){.pairing = pairing, .base = 1e4, .dims = dims}, NULL, 0, d, &rope, &cause),
            0);
        assert_int_equal(rope.pairs, dims / 2);
        for (uint32_t row = 0; row < rows; row++) {
            float *to = turned_rows + (size_t)row * d;
            double x[128];
            for (uint32_t i = 0; i < d; i++) {
                x[i] = calib_normal();
                expected[i] += x[i];
                to[i] = (float)x[i];
            }
            for (uint32_t i = 0; i < dims / 2; i++) {
                uint32_t a = pairing == ROPE_HALVES ? i : 2 * i;
                uint32_t b = pairing == ROPE_HALVES ? i + dims / 2 : 2 * i + 1;
                double angle = pow(1e4, -2.0 * i / dims) * (double)(first + row);
                to[a] = (float)(x[a] * cos(angle) - x[b] * sin(angle));
                to[b] = (float)(x[a] * sin(angle) + x[b] * cos(angle));
            }
        }
        rope_add_unturned(&rope, first, turned_rows, rows, d, sum);
        for (uint32_t i = 0; i < d; i++)
            assert_near(sum[i], expected[i], 1e-4);
        free(turned_rows);
    }
}

/* A K that is nothing but its turning mean in some pairs and a constant elsewhere is its centre: nothing is left of it. */
static void the_centre_is_all_of_a_k_without_noise(void **unused) {
    (void)unused;
    struct oscar_cause cause = {0};
    const uint32_t d = 64, tokens = 4096;
    struct rope rope;
    struct moments moments;
    float still[64];
    float cosines[16 * 64];
    float sines[16 * 64];
    int32_t pair[OSCAR_MAX_PAIRS] = {0};
    double mean[64];
    double h[64 * 64];
    assert_int_equal(rope_make(&(struct rope_given){.pairing = ROPE_HALVES, .base = 1e5}, NULL, 0, d, &rope, &cause),
                     0);
    assert_int_equal(moments_init(&moments, d, &cause), 0);
    rotation_hadamard(d, h);
    for (uint32_t i = 0; i < d; i++)
        mean[i] = i % 32 < 12 ? 3 * calib_normal() : 0; /* pairs 0 .. 11 */
    float *rows = malloc((size_t)tokens * d * sizeof(*rows));
    assert_non_null(rows);
    for (uint32_t token = 0; token < tokens; token++)
        for (uint32_t i = 0; i < d / 2; i++) {
            double angle = rope.omega[i] * token;
            rows[token * d + i] = (float)(mean[i] * cos(angle) - mean[i + 32] * sin(angle));
            rows[token * d + i + 32] = (float)(mean[i] * sin(angle) + mean[i + 32] * cos(angle));
        }
    for (size_t i = (size_t)64 * d; i < (size_t)tokens * d; i++)
        moments.turned[i % d] += (double)rows[i];
    rope_add_unturned(&rope, 64, rows + (size_t)64 * d, tokens - 64, d, moments.unturned);
    moments.tokens = tokens - 64;
    uint32_t count = centre_choose(&moments, &rope, 16, pair);
    assert_true(count >= 12);
    centre_fill(pair, count, 16);
    assert_int_equal(centre_make(&moments, &rope, pair, count, 16, d, h, still, cosines, sines, &cause), 0);
    for (uint32_t token = 0; token < tokens; token += 97)
        for (uint32_t j = 0; j < d; j++) {
            double k = 0;
            double centre = (double)still[j];
            for (uint32_t i = 0; i < d; i++)
                k += (double)rows[token * d + i] * h[i * d + j];
            for (uint32_t i = 0; i < 16; i++) {
                double angle = rope.omega[pair[i]] * token;
                centre += cos(angle) * (double)cosines[i * d + j] + sin(angle) * (double)sines[i * d + j];
            }
            assert_near(k, centre, 1e-4);
        }
    free(rows);
    moments_clear(&moments);
}

/* Where K only stands still, a constant takes it all, and no pair is worth its place; where it turns fast, only turning does. */
static void pairs_are_chosen_by_what_they_take_out(void **unused) {
    (void)unused;
    struct oscar_cause cause = {0};
    struct rope rope;
    struct moments moments;
    int32_t pair[OSCAR_MAX_PAIRS] = {0};
    assert_int_equal(
        rope_make(&(struct rope_given){.pairing = ROPE_INTERLEAVED, .base = 1e4}, NULL, 0, 64, &rope, &cause), 0);
    assert_int_equal(moments_init(&moments, 64, &cause), 0);
    moments.tokens = 1000;
    for (uint32_t i = 0; i < 64; i++)
        moments.turned[i] = 5;
    assert_int_equal(centre_choose(&moments, &rope, 16, pair), 0);
    moments.unturned[2 * 7] = 30;
    moments.unturned[2 * 9 + 1] = 40;
    moments.unturned[2 * 3] = 7; /* 49 against 50 */
    assert_int_equal(centre_choose(&moments, &rope, 16, pair), 2);
    assert_int_equal(pair[0], 9);
    assert_int_equal(pair[1], 7);
    assert_int_equal(centre_choose(&moments, &rope, 1, pair), 1);
    pair[0] = 1;
    centre_fill(pair, 1, 4);
    assert_int_equal(pair[1], 0);
    assert_int_equal(pair[2], 2);
    assert_int_equal(pair[3], 3);
    moments_clear(&moments);
}

/* --- attention ---------------------------------------------------------------------------------------------------- */

static void naive_attention(const double *q, const double *k, const double *v, uint32_t keys, uint32_t d, double scale,
                            double *logits, double *weights, double *output) {
    double most = -INFINITY;
    double sum = 0;
    for (uint32_t t = 0; t < keys; t++) {
        logits[t] = 0;
        for (uint32_t i = 0; i < d; i++)
            logits[t] += scale * q[i] * k[t * d + i];
        most = logits[t] > most ? logits[t] : most;
    }
    for (uint32_t t = 0; t < keys; t++)
        sum += weights[t] = exp(logits[t] - most);
    memset(output, 0, d * sizeof(*output));
    for (uint32_t t = 0; t < keys; t++) {
        weights[t] /= sum;
        for (uint32_t i = 0; i < d; i++)
            output[i] += weights[t] * v[t * d + i];
    }
}

static void the_packed_places_are_those_of_the_product(void **unused) {
    (void)unused;
    assert_int_equal(attention_packed_begin(0), 64);
    assert_int_equal(attention_packed_begin(64), 0);
    assert_int_equal(attention_packed_begin(100), 28);
    assert_int_equal(attention_packed_end(0, 0), 64);
    assert_int_equal(attention_packed_end(0, 382), 64);  /* 383 tokens: 127 lie before the last 256 */
    assert_int_equal(attention_packed_end(0, 383), 128); /* 384: page 1 does */
    assert_int_equal(attention_packed_end(0, 446), 128);
    assert_int_equal(attention_packed_end(0, 447), 192);
    assert_int_equal(attention_packed_begin(1000), 24);
    assert_int_equal(attention_packed_end(1000, 200),
                     24); /* 945 positions lie before the last 256: none of our pages */
    assert_int_equal(attention_packed_end(1000, 400), 88); /* 1,145 do: page 16, positions 1,024 to 1,087 */
}

static void a_measured_change_is_that_of_plain_attention(void **unused) {
    (void)unused;
    const uint32_t d = 64, tokens = 600, group = 2;
    const uint32_t at[] = {3, 100, 383, 450, 599};
    const uint32_t queries = 5;
    const double scale = 0.125;
    struct oscar_cause cause = {0};
    double *all = doubles((size_t)6 * tokens * d);
    double *part[6];
    for (unsigned i = 0; i < 6; i++)
        part[i] = all + (size_t)i * tokens * d;
    for (size_t i = 0; i < (size_t)6 * tokens * d; i++)
        all[i] = i < (size_t)2 * tokens * d ? calib_normal() : all[i % ((size_t)2 * tokens * d)] + 0.3 * calib_normal();
    float *q = malloc((size_t)queries * group * d * sizeof(*q));
    assert_non_null(q);
    for (size_t i = 0; i < (size_t)queries * group * d; i++)
        q[i] = (float)(3 * calib_normal());
    struct attention_rows rows = {.first_position = 0, .tokens = tokens, .d = d, .k = part[0], .v = part[1]};
    struct attention_probe probe;
    assert_int_equal(attention_probe(&rows, at, queries, group, q, scale, &probe, &cause), 0);
    /* which of the four changes are made */
    for (unsigned mask = 1; mask < 16; mask++) {
        struct attention_change change = {.k_packed = mask & 1 ? part[2] : NULL,
                                          .v_packed = mask & 2 ? part[3] : NULL,
                                          .k_dense = mask & 4 ? part[4] : NULL,
                                          .v_dense = mask & 8 ? part[5] : NULL};
        struct attention_error found = {0};
        struct attention_error expected = {0};
        attention_measure(&rows, &probe, &change, &found);
        double *k = doubles((size_t)tokens * d);
        double *v = doubles((size_t)tokens * d);
        for (uint32_t row = 0; row < queries * group; row++) {
            double logits[2][600];
            double weights[2][600];
            double output[2][64];
            double query[64];
            uint32_t keys = at[row / group] + 1;
            uint32_t end = keys >= 384 ? (keys - 256) / 64 * 64 : 64;
            for (uint32_t t = 0; t < keys; t++) {
                bool packed = t >= 64 && t < end;
                const double *from_k = packed && change.k_packed != NULL ? change.k_packed : change.k_dense;
                const double *from_v = packed && change.v_packed != NULL ? change.v_packed : change.v_dense;
                memcpy(k + t * d, (from_k != NULL ? from_k : part[0]) + t * d, d * sizeof(*k));
                memcpy(v + t * d, (from_v != NULL ? from_v : part[1]) + t * d, d * sizeof(*v));
            }
            for (uint32_t i = 0; i < d; i++)
                query[i] = (double)q[row * d + i];
            naive_attention(query, part[0], part[1], keys, d, scale, logits[0], weights[0], output[0]);
            naive_attention(query, k, v, keys, d, scale, logits[1], weights[1], output[1]);
            for (uint32_t t = 64; t < end && t < keys; t++)
                expected.logit += (logits[1][t] - logits[0][t]) * (logits[1][t] - logits[0][t]);
            expected.logits += end > 64 ? end - 64 : 0;
            for (uint32_t t = 0; t < keys; t++)
                expected.divergence += weights[0][t] * log(weights[0][t] / weights[1][t]);
            for (uint32_t i = 0; i < d; i++) {
                expected.output += (output[1][i] - output[0][i]) * (output[1][i] - output[0][i]);
                expected.output_norm += output[0][i] * output[0][i];
            }
        }
        assert_near(found.output, expected.output, 1e-9 * (1 + expected.output));
        assert_near(found.output_norm, expected.output_norm, 1e-9 * expected.output_norm);
        if ((mask & 5) != 0) { /* K is changed: the logits are looked at */
            assert_near(found.logit, expected.logit, 1e-9 * (1 + expected.logit));
            assert_near(found.logits, expected.logits, 0);
            assert_near(found.divergence, expected.divergence, 1e-9 * (1 + expected.divergence));
            assert_near(found.queries, queries * group, 0);
        }
        free(k);
        free(v);
    }
    attention_probe_clear(&probe);
    free(all);
    free(q);
}

/* --- what the product makes of rows ------------------------------------------------------------------------------- */

static void packed_rows_are_the_codecs(void **unused) {
    (void)unused;
    const uint32_t d = 64, tokens = 300, pairs = 5;
    const uint64_t first = 100; /* the first whole page begins at 128, row 28 */
    struct oscar_cause cause = {0};
    double omega[32];
    float rotation[64 * 64];
    float still[64];
    float cosines[5 * 64];
    float sines[5 * 64];
    float feedback[64 * 64] = {0};
    static const int32_t pair[5] = {4, 0, 31, 7, 12};
    double eigenvalues[64];
    double *c = random_covariance(d);
    double *h = doubles((size_t)d * d);
    rotation_hadamard(d, h);
    assert_int_equal(rotation_from_target(c, d, rotation, eigenvalues, &cause), 0);
    assert_int_equal(feedback_factor(c, h, d, 0.02, feedback, &cause), 0);
    for (uint32_t i = 0; i < 32; i++)
        omega[i] = pow(1e4, -(double)i / 32);
    for (uint32_t i = 0; i < d; i++)
        still[i] = (float)(4 * calib_normal());
    for (uint32_t i = 0; i < pairs * d; i++) {
        cosines[i] = (float)calib_normal();
        sines[i] = (float)calib_normal();
    }
    struct oscar_head_calibration head = {.rotation_v = rotation,
                                          .feedback = feedback,
                                          .centre_static = still,
                                          .centre_cos = cosines,
                                          .centre_sin = sines,
                                          .centre_pair = pair,
                                          .pairs = pairs,
                                          .rank_k = 60,
                                          .rank_v = 58};
    struct oscar_calibration calibration = {
        .layers = 1, .kv_heads = 1, .head_dim = d, .frequencies = 32, .omega = omega};
    size_t turn_bytes = oscar_turns_bytes(&calibration, 16);
    float *turns = malloc(turn_bytes);
    float *k = malloc(2 * (size_t)tokens * d * sizeof(*k));
    assert_non_null(turns);
    assert_non_null(k);
    float *v = k + (size_t)tokens * d;
    oscar_turns_fill(&calibration, 16, turns);
    assert_int_equal(oscar_calibration_attach_turns(&calibration, turns, turn_bytes, 16), 0);
    for (size_t i = 0; i < 2 * (size_t)tokens * d; i++)
        k[i] = (float)(3 * calib_normal());
    struct quantiser *quantiser = NULL;
    double *found = doubles(4 * (size_t)tokens * d);
    double *k_packed = found, *v_packed = found + (size_t)tokens * d;
    double *k_dense = v_packed + (size_t)tokens * d, *v_dense = k_dense + (size_t)tokens * d;
    for (size_t i = 0; i < 2 * (size_t)tokens * d; i++)
        found[i] = 12345; /* what is not packed must stay as it is */
    assert_int_equal(quantiser_new(&calibration, &head, first, tokens, k, v, &quantiser, &cause), 0);
    quantiser_dense(quantiser, k_dense, v_dense);
    assert_int_equal(quantiser_packed(quantiser, k_packed, v_packed, &cause), 0);
    for (uint32_t token = 0; token < tokens; token++)
        for (unsigned side = 0; side < 2; side++) {
            const float *row = (side == 0 ? k : v) + (size_t)token * d;
            float x[64];
            float centre[64] = {0};
            uint8_t codes[64];
            struct oscar_row_scale scale;
            double rotated[64];
            double dense[64];
            oscar_rotate(HOST_PORTABLE, side == 0 ? NULL : rotation, d, false, 1, row, d, x, d);
            if (side == 0)
                oscar_codec_centre(&calibration, &head, first + token, centre);
            for (uint32_t i = 0; i < d; i++) {
                float stored = oscar_float_from_bfloat(oscar_bfloat_from_float(x[i]));
                dense[i] = (double)stored;
                x[i] = stored - centre[i];
            }
            assert_int_equal(oscar_codec_row(x, d, side == 0 ? 60 : 58, side == 0 ? feedback : NULL, &scale, codes), 0);
            for (uint32_t i = 0; i < d; i++)
                rotated[i] = (double)oscar_float_from_half(scale.scale) *
                                 ((double)codes[i] - (double)oscar_float_from_half(scale.zero)) +
                             (double)centre[i];
            for (uint32_t i = 0; i < d; i++) {
                double back = 0;
                double dense_back = 0;
                for (uint32_t j = 0; j < d; j++) {
                    double r = side == 0 ? h[i * d + j] : (double)rotation[i * d + j];
                    back += rotated[j] * r;
                    dense_back += dense[j] * r;
                }
                bool packed = token >= 28 && token < 28 + 4 * 64;
                assert_near((side == 0 ? k_packed : v_packed)[token * d + i], packed ? back : 12345, 1e-9);
                assert_near((side == 0 ? k_dense : v_dense)[token * d + i], dense_back, 1e-9);
            }
        }
    quantiser_free(quantiser);
    free(found);
    free(turns);
    free(k);
    free(c);
    free(h);
}

/* --- threads ------------------------------------------------------------------------------------------------------ */

static int fail_some(void *argument, uint32_t task, struct oscar_cause *cause) {
    uint32_t *done = argument;
    done[task]++;
    return task == 5 || task == 9 ? oscar_fail(cause, OSCAR_ERR_IO, "task %u", task) : 0;
}

static void a_failed_task_ends_the_others_and_is_the_one_reported(void **unused) {
    (void)unused;
    uint32_t done[12] = {0};
    struct oscar_cause cause = {0};
    assert_int_equal(parallel_run(1, 12, fail_some, done, &cause), OSCAR_ERR_IO);
    assert_string_equal(cause.text, "task 5");
    for (uint32_t i = 0; i < 12; i++)
        assert_int_equal(done[i], i <= 5);
    memset(done, 0, sizeof(done));
    assert_int_equal(parallel_run(64, 5, fail_some, done, &cause), 0);
    for (uint32_t i = 0; i < 5; i++)
        assert_int_equal(done[i], 1);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_rotation_spreads_its_target_over_all_dims),
        cmocka_unit_test(the_rank_of_a_covariance_is_that_of_its_rows),
        cmocka_unit_test(feedback_factors_the_rotated_metric),
        cmocka_unit_test(without_queries_feedback_is_the_identity_and_an_indefinite_metric_is_refused),
        cmocka_unit_test(rows_are_turned_back_by_their_position),
        cmocka_unit_test(the_centre_is_all_of_a_k_without_noise),
        cmocka_unit_test(pairs_are_chosen_by_what_they_take_out),
        cmocka_unit_test(the_packed_places_are_those_of_the_product),
        cmocka_unit_test(a_measured_change_is_that_of_plain_attention),
        cmocka_unit_test(packed_rows_are_the_codecs),
        cmocka_unit_test(a_failed_task_ends_the_others_and_is_the_one_reported),
    };
    calib_seed();
    parallel_quiet_blas();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
