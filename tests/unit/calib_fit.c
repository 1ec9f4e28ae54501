/* SPDX-License-Identifier: Apache-2.0 */
/* What a fit of a made-up model makes, held against plain loops, and what it refuses. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "calib/parallel.h"
#include "calib_fits.h"
#include "tests/support/files.h"

/* --- what is fitted ----------------------------------------------------------------------------------------------- */

/* What errors of logits cost the output of the query at row t: sum of p² |v - output|² over what is packed for it. */
static double plain_cost(uint32_t t, const double *weights, double sum, const float *v, const double *output) {
    const uint32_t d = fits_model.d;
    double cost = 0;
    for (uint32_t s = 64; t + 1 >= 256 && s < (t + 1 - 256) / 64 * 64; s++) {
        double distance = 0;
        for (uint32_t i = 0; i < d; i++) {
            double apart = (double)v[(size_t)s * d + i] - output[i];
            distance += apart * apart;
        }
        cost += weights[s] * weights[s] / (sum * sum) * distance;
    }
    return cost;
}

struct plain_costs {
    double sum[64 * 64], weight, square;
};

/* The sum of x xᵀ-products of plain loops: C_Q of a head, the covariance of the attention outputs, and (NULL: not) the
 * queries' by cost. */
static void plain_targets(uint32_t layer, uint32_t h, double *query, double *value, struct plain_costs *costs) {
    const uint32_t d = fits_model.d, group = fits_model.query_heads / fits_model.kv_heads;
    float *rows = malloc((size_t)3 * FITS_TOKENS * d * sizeof(*rows));
    assert_non_null(rows);
    float *k = rows, *v = rows + (size_t)FITS_TOKENS * d, *q = rows + (size_t)2 * FITS_TOKENS * d;
    for (uint32_t t = 0; t < FITS_TOKENS; t++) {
        calib_row(&fits_model, layer, 'k', t, h, k + (size_t)t * d);
        calib_row(&fits_model, layer, 'v', t, h, v + (size_t)t * d);
    }
    for (uint32_t g = 0; g < group; g++) {
        for (uint32_t t = 0; t < FITS_TOKENS; t++)
            calib_row(&fits_model, layer, 'q', t, h * group + g, q + (size_t)t * d);
        for (uint32_t t = 0; t < FITS_TOKENS; t++) {
            double weights[FITS_TOKENS];
            double output[64] = {0};
            double most = -INFINITY;
            double sum = 0;
            const float *x = q + (size_t)t * d;
            for (uint32_t s = 0; s <= t; s++) {
                weights[s] = 0;
                for (uint32_t i = 0; i < d; i++)
                    weights[s] += 0.125 * (double)x[i] * (double)k[(size_t)s * d + i];
                most = weights[s] > most ? weights[s] : most;
            }
            for (uint32_t s = 0; s <= t; s++)
                sum += weights[s] = exp(weights[s] - most);
            for (uint32_t s = 0; s <= t; s++)
                for (uint32_t i = 0; i < d; i++)
                    output[i] += weights[s] / sum * (double)v[(size_t)s * d + i];
            for (uint32_t i = 0; i < d; i++)
                for (uint32_t j = 0; j < d; j++) {
                    query[i * d + j] += (double)x[i] * (double)x[j];
                    value[i * d + j] += output[i] * output[j];
                }
            const double cost = costs != NULL ? plain_cost(t, weights, sum, v, output) : 0;
            if (cost <= 0)
                continue;
            costs->weight += cost;
            costs->square += cost * cost;
            for (uint32_t i = 0; i < d; i++)
                for (uint32_t j = 0; j < d; j++)
                    costs->sum[i * d + j] += cost * (double)x[i] * (double)x[j];
        }
    }
    free(rows);
}

/* With P and H undone the rotation must make the target diagonal, largest first. */
static void assert_diagonalises(const float *rotation, const double *target) {
    const uint32_t d = fits_model.d;
    double u[64 * 64] = {0};
    double half[64 * 64] = {0};
    double last = INFINITY;
    double trace = 0;
    for (uint32_t i = 0; i < d; i++)
        for (uint32_t j = 0; j < d; j++)
            for (uint32_t column = 0; column < d; column++) {
                uint32_t reversed = 0;
                for (unsigned b = 0; b < 6; b++)
                    reversed |= (column >> b & 1U) << (5 - b);
                u[i * d + j] += (double)rotation[i * d + column] * (__builtin_parity(reversed & j) != 0 ? -1 : 1) / 8;
            }
    for (uint32_t i = 0; i < d; i++) {
        trace += target[i * (d + 1)];
        for (uint32_t j = 0; j < d; j++)
            for (uint32_t k = 0; k < d; k++)
                half[i * d + j] += target[i * d + k] * u[k * d + j];
    }
    for (uint32_t i = 0; i < d; i++)
        for (uint32_t j = 0; j < d; j++) {
            double sum = 0;
            for (uint32_t k = 0; k < d; k++)
                sum += u[k * d + i] * half[k * d + j];
            if (i == j) {
                assert_true(sum <= last * (1 + 1e-6));
                last = sum;
            } else if (!(fabs(sum) < 1e-6 * trace)) {
                fail_msg("[%u][%u] is %g of a trace of %g", i, j, sum, trace);
            }
        }
}

static void the_published_method_is_the_published_formulas(void **unused) {
    (void)unused;
    const struct fit_options base = fits_defaults();
    struct fit_options options = fit_published(false, &base);
    const char *output = calib_path("published");
    fits_make(&fits_capture, 1, &options, output);
    struct calibration_file file = fits_open(output);
    double *sums = calloc((size_t)4 * 64 * 64, sizeof(*sums));
    assert_non_null(sums);
    assert_int_equal(file.calibration->rotation_k, OSCAR_ROTATION_MATRIX);
    assert_int_equal(file.calibration->rotation_v, OSCAR_ROTATION_MATRIX);
    for (uint32_t h = 0; h < fits_model.kv_heads; h++) {
        const struct oscar_head_calibration *head = oscar_calibration_head(file.calibration, 1, h);
        memset(sums, 0, (size_t)2 * 64 * 64 * sizeof(*sums));
        plain_targets(1, h, sums, sums + 64 * 64, NULL);
        assert_diagonalises(head->rotation_k, sums);
        assert_diagonalises(head->rotation_v, sums + 64 * 64);
        assert_null(head->feedback);
        assert_null(head->centre_static);
        assert_int_equal(head->rank_k, 61);
        assert_int_equal(head->rank_v, 58);
        for (uint32_t i = 0; i < 2 * 64 * 64; i++) /* for the layer's sums, below */
            sums[2 * 64 * 64 + i] += sums[i];
    }
    calibration_file_close(&file);

    options = fit_published(true, &base);
    fits_make(&fits_capture, 1, &options, output);
    file = fits_open(output);
    const struct oscar_head_calibration *first = oscar_calibration_head(file.calibration, 1, 0);
    assert_ptr_equal(first->rotation_k, oscar_calibration_head(file.calibration, 1, 1)->rotation_k);
    assert_ptr_equal(first->rotation_v, oscar_calibration_head(file.calibration, 1, 1)->rotation_v);
    assert_diagonalises(first->rotation_k, sums + 2 * 64 * 64);
    assert_diagonalises(first->rotation_v, sums + 3 * 64 * 64);
    calibration_file_close(&file);
    free(sums);
}

/* sum of w_t v_tᵀ v_t with w_t = k_t C_Q k_tᵀ */
static void the_proxy_is_the_published_codes(void **unused) {
    (void)unused;
    const struct fit_options base = fits_defaults();
    struct fit_options options = fit_published(false, &base);
    const char *output = calib_path("proxy");
    const uint32_t d = fits_model.d;
    double *sums = calloc((size_t)3 * d * d, sizeof(*sums));
    assert_non_null(sums);
    double *query = sums, *value = sums + (size_t)d * d;
    options.proxy = true;
    fits_make(&fits_capture, 1, &options, output);
    struct calibration_file file = fits_open(output);
    plain_targets(0, 1, query, value, NULL);
    memset(value, 0, (size_t)d * d * sizeof(*value));
    for (uint32_t t = 0; t < FITS_TOKENS; t++) {
        float k[64];
        float v[64];
        double weight = 0;
        calib_row(&fits_model, 0, 'k', t, 1, k);
        calib_row(&fits_model, 0, 'v', t, 1, v);
        for (uint32_t i = 0; i < d; i++)
            for (uint32_t j = 0; j < d; j++)
                weight += (double)k[i] * query[i * d + j] * (double)k[j];
        for (uint32_t i = 0; i < d; i++)
            for (uint32_t j = 0; j < d; j++)
                value[i * d + j] += weight * (double)v[i] * (double)v[j];
    }
    assert_diagonalises(oscar_calibration_head(file.calibration, 0, 1)->rotation_v, value);
    assert_string_equal(fits_metadata(&file, "oscar.targets"), "k qqt, v proxy");
    calibration_file_close(&file);
    free(sums);
}

static double held_out_k(const char *path, const char *kind) {
    struct calibration_file file = fits_open(path);
    char key[64];
    (void)snprintf(key, sizeof(key), "oscar.held_out_error.%s", kind);
    const char *text = fits_metadata(&file, key);
    assert_non_null(text);
    assert_memory_equal(text, "k ", 2);
    double error = strtod(text + 2, NULL);
    calibration_file_close(&file);
    return error;
}

static double hadamard_element(uint32_t i, uint32_t j) { return (__builtin_parity(i & j) != 0 ? -1.0 : 1.0) / 8; }

/* M = Hᵀ C H + lambda tr(M) / d = L D Lᵀ, by plain loops; L is held against the file's. */
static void assert_factor(const float *factor, const double *cost, double lambda) {
    const uint32_t d = fits_model.d;
    double half[64 * 64] = {0};
    double m[64 * 64] = {0};
    double trace = 0;
    for (uint32_t i = 0; i < d; i++)
        for (uint32_t j = 0; j < d; j++)
            for (uint32_t k = 0; k < d; k++)
                half[i * d + j] += cost[i * d + k] * hadamard_element(k, j);
    for (uint32_t i = 0; i < d; i++)
        for (uint32_t j = 0; j < d; j++)
            for (uint32_t k = 0; k < d; k++)
                m[i * d + j] += hadamard_element(k, i) * half[k * d + j];
    for (uint32_t i = 0; i < d; i++)
        trace += m[i * (d + 1)];
    for (uint32_t i = 0; i < d; i++)
        m[i * (d + 1)] += lambda * trace / d;
    for (uint32_t j = 0; j < d; j++)
        for (uint32_t i = j + 1; i < d; i++) {
            const double l = m[i * d + j] / m[j * (d + 1)];
            assert_true(fabs((double)factor[i * d + j] - l) < 1e-4);
            for (uint32_t k = j + 1; k <= i; k++)
                m[i * d + k] -= l * m[k * d + j];
        }
}

static void feedback_weighs_queries_by_what_errors_cost_them(void **unused) {
    (void)unused;
    struct fit_options options = fits_defaults();
    options.kinds[FIT_MATRIX] = false;
    fits_make(&fits_capture, 1, &options, calib_path("costs"));
    struct calibration_file file = fits_open(calib_path("costs"));
    double *query = calloc((size_t)2 * 64 * 64, sizeof(*query));
    struct plain_costs costs = {0};
    double trace[2] = {0};
    assert_non_null(query);
    plain_targets(0, 1, query, query + 64 * 64, &costs);
    for (uint32_t i = 0; i < 64; i++) {
        trace[0] += query[i * 65];
        trace[1] += costs.sum[i * 65];
    }
    /* Of both, with a trace of 1: all queries alike, by the dims over the number of queries that would tell as much. */
    for (uint32_t i = 0; i < 64 * 64; i++)
        query[i] = query[i] / trace[0] * 64 * costs.square / (costs.weight * costs.weight) + costs.sum[i] / trace[1];
    assert_factor(oscar_calibration_head(file.calibration, 0, 1)->feedback, query, options.lambda);
    free(query);
    calibration_file_close(&file);
}

/* K of head 1, rotated: one 3, one -3, else 1 or -1, which four levels hold exactly where nothing is clipped. */
static void few_levels_in_head_1(float *row, uint32_t layer, char part, uint64_t position, uint32_t head, uint32_t d) {
    (void)layer;
    float rotated[64];
    if (part != 'k' || head != 1)
        return;
    for (uint32_t i = 0; i < d; i++)
        rotated[i] = calib_uniform() < 0 ? -1.0F : 1.0F;
    rotated[position % d] = 3.0F;
    rotated[(position + 1 + position / d % (d - 1)) % d] = -3.0F;
    for (uint32_t i = 0; i < d; i++) {
        row[i] = 0;
        for (uint32_t j = 0; j < d; j++)
            row[i] += rotated[j] * (float)hadamard_element(i, j);
    }
}

static void each_head_has_a_rank_of_its_own(void **unused) {
    (void)unused;
    const struct calib_model plain = {.layers = 1, .query_heads = 2, .kv_heads = 2, .d = 64, .rope_base = 1e4};
    const char *path = calib_path("levels.safetensors");
    const struct calib_cut cut = {
        .to = 1, .tokens = FITS_TOKENS, .type = OSCAR_TENSOR_F32, .change = few_levels_in_head_1};
    struct fit_options options = fits_defaults();
    options.kinds[FIT_MATRIX] = options.centre = options.feedback = false;
    calib_write_capture(path, &plain, &cut);
    fits_make(&path, 1, &options, calib_path("levels"));
    struct calibration_file file = fits_open(calib_path("levels"));
    assert_true(oscar_calibration_head(file.calibration, 0, 0)->rank_k <= 61);
    assert_true(oscar_calibration_head(file.calibration, 0, 1)->rank_k >= 62);
    calibration_file_close(&file);
}

static void centre_and_feedback_each_lower_the_error_of_a_biased_model(void **unused) {
    (void)unused;
    struct fit_options options = fits_defaults();
    const char *output = calib_path("lower");
    options.kinds[FIT_MATRIX] = false;
    fits_make(&fits_capture, 1, &options, output);
    double both = held_out_k(output, "hadamard");
    struct calibration_file file = fits_open(output);
    const struct oscar_head_calibration *head = oscar_calibration_head(file.calibration, 0, 0);
    assert_true(head->pairs > 0);
    assert_non_null(head->feedback);
    assert_int_equal(file.calibration->rotation_k, OSCAR_ROTATION_HADAMARD);
    calibration_file_close(&file);
    options.pairs = 0;
    fits_make(&fits_capture, 1, &options, output);
    double constant = held_out_k(output, "hadamard");
    options.centre = false;
    fits_make(&fits_capture, 1, &options, output);
    double feedback = held_out_k(output, "hadamard");
    options.feedback = false;
    fits_make(&fits_capture, 1, &options, output);
    double neither = held_out_k(output, "hadamard");
    printf("held-out error of K: turning centre %g, constant %g, none %g, nearest %g\n", both, constant, feedback,
           neither);
    assert_true(both > 0 && both < 0.7 * constant);
    assert_true(constant < feedback);
    assert_true(feedback < neither);
    assert_true(both < 0.2 * neither);
}

/* The centre is the model's own bias, up to the noise of a mean. */
static void the_centre_is_the_models_bias(void **unused) {
    (void)unused;
    struct fit_options options = fits_defaults();
    const char *output = calib_path("bias");
    const uint32_t d = fits_model.d;
    options.kinds[FIT_MATRIX] = false;
    fits_make(&fits_capture, 1, &options, output);
    struct calibration_file file = fits_open(output);
    const struct oscar_head_calibration *head = oscar_calibration_head(file.calibration, 1, 1);
    for (uint32_t i = 0; i < 8; i++) {
        uint32_t pair = (uint32_t)head->centre_pair[i];
        double turned[2] = {0}; /* the pair's mean before its turn, by plain loops */
        double found[2] = {0};  /* the file's, by H, which is its own inverse */
        double quarter[2] = {0};
        for (uint32_t t = 64; t < FITS_TOKENS; t++) {
            float k[64];
            double angle = pow(fits_model.rope_base, -2.0 * pair / d) * t;
            calib_row(&fits_model, 1, 'k', t, 1, k);
            turned[0] += (cos(angle) * (double)k[pair] + sin(angle) * (double)k[pair + 32]) / (FITS_TOKENS - 64);
            turned[1] += (cos(angle) * (double)k[pair + 32] - sin(angle) * (double)k[pair]) / (FITS_TOKENS - 64);
        }
        for (uint32_t j = 0; j < d; j++)
            for (uint32_t side = 0; side < 2; side++) {
                double h = (__builtin_parity(j & (pair + 32 * side)) != 0 ? -1 : 1) / 8.0;
                found[side] += h * (double)head->centre_cos[i * d + j];
                quarter[side] += h * (double)head->centre_sin[i * d + j];
            }
        for (uint32_t side = 0; side < 2; side++)
            assert_true(fabs(found[side] - turned[side]) < 1e-5);
        assert_true(fabs(quarter[0] + turned[1]) < 1e-5);
        assert_true(fabs(quarter[1] - turned[0]) < 1e-5);
    }
    calibration_file_close(&file);
}

static void the_file_says_how_it_was_made(void **unused) {
    (void)unused;
    struct fit_options options = fits_defaults();
    const char *output = calib_path("says");
    options.model = "a \"model\"\n";
    fits_make(&fits_capture, 1, &options, output);
    struct calibration_file file = fits_open(output);
    struct oscar_digest digest;
    char source[128];
    char hex[2 * OSCAR_DIGEST_BYTES + 1];
    size_t size;
    uint8_t *bytes = file_read(fits_capture, &size);
    oscar_content_digest(bytes, size, &digest);
    oscar_digest_hex(&digest, hex);
    (void)snprintf(source, sizeof(source), "whole.safetensors %s", hex);
    free(bytes);
    assert_string_equal(fits_metadata(&file, "oscar.model"), "a \"model\"\n");
    assert_string_equal(fits_metadata(&file, "oscar.sources"), source);
    assert_string_equal(fits_metadata(&file, "oscar.samples"), "640");
    assert_string_equal(fits_metadata(&file, "oscar.positions"), "640");
    assert_non_null(strstr(fits_metadata(&file, "oscar.clip"), "sweep"));
    assert_non_null(fits_metadata(&file, "oscar.held_out_error.matrix"));
    assert_null(fits_metadata(&file, "oscar.date"));
    assert_null(fits_metadata(&file, "oscar.source_layers"));
    calibration_file_close(&file);
    options.date = "2030-01-02";
    options.model = NULL;
    options.layers = "1";
    fits_make(&fits_capture, 1, &options, output);
    file = fits_open(output);
    assert_string_equal(fits_metadata(&file, "oscar.model"), "made \"up\"");
    assert_string_equal(fits_metadata(&file, "oscar.date"), "2030-01-02");
    assert_string_equal(fits_metadata(&file, "oscar.source_layers"), "1");
    assert_int_equal(file.calibration->layers, 1);
    calibration_file_close(&file);
}

static void a_fit_of_several_sequences_knows_them_all(void **unused) {
    (void)unused;
    const char *paths[] = {fits_capture, calib_path("second.safetensors")};
    const struct fit_options options = fits_defaults();
    calib_write_capture(paths[1], &fits_model, &(struct calib_cut){.to = 2, .tokens = 500, .type = OSCAR_TENSOR_BF16});
    fits_make(paths, 2, &options, calib_path("several"));
    struct calibration_file file = fits_open(calib_path("several"));
    assert_string_equal(fits_metadata(&file, "oscar.samples"), "1140");
    assert_string_equal(fits_metadata(&file, "oscar.positions"), "640");
    assert_non_null(strstr(fits_metadata(&file, "oscar.sources"), "\nsecond.safetensors "));
    calibration_file_close(&file);
}

/* --- what is refused ---------------------------------------------------------------------------------------------- */

static void assert_refused(const char *path, const struct fit_options *options, int error, const char *words) {
    struct oscar_cause cause = {0};
    const char *output = calib_path("refused");
    int r = fits_try(&path, 1, options, output, &cause);
    if (r != error || strstr(cause.text, words) == NULL)
        fail_msg("found %d \"%s\", expected %d \"%s\"", r, cause.text, error, words);
    assert_int_equal(access(output, F_OK), -1);
    assert_int_equal(access(calib_path("refused.parts"), F_OK), -1);
}

static void missing_layers_are_named(void **unused) {
    (void)unused;
    struct fit_options options = fits_defaults();
    const char *path = calib_path("second-layer.safetensors");
    calib_write_capture(path, &fits_model,
                        &(struct calib_cut){.from = 1, .to = 2, .tokens = 9, .type = OSCAR_TENSOR_BF16});
    assert_refused(path, &options, OSCAR_ERR_NOT_FOUND, "layer 0 of 2 is missing");
    calib_write_capture(path, &fits_model,
                        &(struct calib_cut){.from = 0, .to = 1, .tokens = 9, .type = OSCAR_TENSOR_BF16});
    assert_refused(path, &options, OSCAR_ERR_NOT_FOUND, "layer 1 of 2 is missing"); /* by the metadata */
    options.layers = "0,7";
    assert_refused(path, &options, OSCAR_ERR_NOT_FOUND, "layer 7 is missing");
    static const char *const lists[] = {"", "0,", "a", "-1", "0;1", ",0", "99999999999999999999"};
    for (size_t i = 0; i < sizeof(lists) / sizeof(lists[0]); i++) {
        options.layers = lists[i];
        assert_refused(path, &options, OSCAR_ERR_INVALID, "not a list of layers");
    }
}

static void too_few_samples_are_named(void **unused) {
    (void)unused;
    struct fit_options options = fits_defaults();
    const char *path = calib_path("few.safetensors");
    calib_write_capture(path, &fits_model, &(struct calib_cut){.to = 2, .tokens = 319, .type = OSCAR_TENSOR_BF16});
    assert_refused(path, &options, OSCAR_ERR_INVALID, "255 tokens outside the sink for 64 dims, at least 256");
    calib_write_capture(path, &fits_model, &(struct calib_cut){.to = 2, .tokens = 383, .type = OSCAR_TENSOR_BF16});
    assert_refused(path, &options, OSCAR_ERR_INVALID, "no sequence is long enough");
    options = fit_published(false, &options); /* which measures nothing */
    fits_make(&path, 1, &options, calib_path("just-enough"));
}

static void flatten_q(float *row, uint32_t layer, char part, uint64_t position, uint32_t head, uint32_t d) {
    (void)position;
    if (layer == 1 && part == 'q' && head >= 2)
        memset(row + 50, 0, (d - 50) * sizeof(*row));
}

static void flatten_v(float *row, uint32_t layer, char part, uint64_t position, uint32_t head, uint32_t d) {
    (void)position;
    if (layer == 0 && part == 'v' && head == 1)
        memset(row + 60, 0, (d - 60) * sizeof(*row));
}

static void silence(float *row, uint32_t layer, char part, uint64_t position, uint32_t head, uint32_t d) {
    (void)layer;
    (void)part;
    (void)position;
    (void)head;
    memset(row, 0, d * sizeof(*row));
}

static void a_singular_covariance_is_named_and_can_be_allowed(void **unused) {
    (void)unused;
    struct oscar_cause cause = {0};
    struct fit_options options = fits_defaults();
    const char *path = calib_path("flat.safetensors");
    calib_write_capture(
        path, &fits_model,
        &(struct calib_cut){.to = 2, .tokens = FITS_TOKENS, .type = OSCAR_TENSOR_BF16, .change = flatten_q});
    assert_int_equal(fits_try(&path, 1, &options, calib_path("flat"), &cause), OSCAR_ERR_CALIBRATION);
    assert_non_null(strstr(cause.text, "layer 1, KV head 1: the covariance of Q is singular, of rank 50 in 64 dims"));
    options.allow_singular = true;
    fits_make(&path, 1, &options, calib_path("flat"));
    options.allow_singular = false;
    calib_write_capture(
        path, &fits_model,
        &(struct calib_cut){.to = 2, .tokens = FITS_TOKENS, .type = OSCAR_TENSOR_BF16, .change = flatten_v});
    assert_refused(path, &options, OSCAR_ERR_CALIBRATION,
                   "layer 0, KV head 1: the covariance of V is singular, of rank 60 in 64 dims");
    options.allow_singular = true;
    fits_make(&path, 1, &options, calib_path("flat"));
    /* Nothing at all is no reason to crash, either. */
    calib_write_capture(
        path, &fits_model,
        &(struct calib_cut){.to = 2, .tokens = FITS_TOKENS, .type = OSCAR_TENSOR_BF16, .change = silence});
    fits_make(&path, 1, &options, calib_path("silent"));
    options.allow_singular = false;
    assert_refused(path, &options, OSCAR_ERR_CALIBRATION, "is singular, of rank 0");
}

static void spoil(float *row, uint32_t layer, char part, uint64_t position, uint32_t head, uint32_t d) {
    (void)head;
    if (layer == 0 && part == 'v' && position == 600)
        row[d / 2] = NAN;
}

static void a_nan_is_named(void **unused) {
    (void)unused;
    const struct fit_options options = fits_defaults();
    const char *path = calib_path("spoilt.safetensors");
    calib_write_capture(
        path, &fits_model,
        &(struct calib_cut){.to = 2, .tokens = FITS_TOKENS, .type = OSCAR_TENSOR_BF16, .change = spoil});
    assert_refused(path, &options, OSCAR_ERR_NOT_FINITE, "layers.0.v: token 600, head 0");
}

static void rope_that_does_not_fit_is_named(void **unused) {
    (void)unused;
    struct fit_options options = fits_defaults();
    options.rope.dims = 128;
    assert_refused(fits_capture, &options, OSCAR_ERR_INVALID, "RoPE of 128 dims: a head has 64");
    options.rope.dims = 31;
    assert_refused(fits_capture, &options, OSCAR_ERR_INVALID, "RoPE of 31 dims");
}

static void without_rope_the_centre_is_constant(void **unused) {
    (void)unused;
    struct fit_options options = fits_defaults();
    const char *path = calib_path("no-rope.safetensors");
    calib_write_capture(
        path, &fits_model,
        &(struct calib_cut){.to = 2, .tokens = FITS_TOKENS, .type = OSCAR_TENSOR_BF16, .no_rope = true});
    fits_make(&path, 1, &options, calib_path("no-rope"));
    struct calibration_file file = fits_open(calib_path("no-rope"));
    assert_int_equal(oscar_calibration_head(file.calibration, 0, 0)->pairs, 0);
    assert_non_null(oscar_calibration_head(file.calibration, 0, 0)->centre_static);
    calibration_file_close(&file);
    options.rope = (struct rope_given){.pairing = ROPE_HALVES, .base = fits_model.rope_base};
    fits_make(&path, 1, &options, calib_path("no-rope"));
    fits_make(&fits_capture, 1, &options, calib_path("rope"));
    fits_assert_same(calib_path("no-rope"), calib_path("rope"));
}

static void heads_of_all_sizes_are_fitted(void **unused) {
    (void)unused;
    for (uint32_t d = 128; d <= 256; d *= 2) {
        const struct calib_model wide = {
            .layers = 1, .query_heads = 3, .kv_heads = 1, .d = d, .rope_base = 1e4, .bias = 6};
        const char *path = calib_path("wide.safetensors");
        const char *output = calib_path("wide");
        struct fit_options options = fits_defaults();
        calib_write_capture(path, &wide, &(struct calib_cut){.to = 1, .tokens = 4 * d + 64, .type = OSCAR_TENSOR_F16});
        options.kinds[FIT_HADAMARD] = false;
        fits_make(&path, 1, &options, output);
        double ours = held_out_k(output, "matrix");
        options.centre = options.feedback = false;
        fits_make(&path, 1, &options, output);
        double published = held_out_k(output, "matrix");
        printf("%u dims: held-out error of K %g, without centre and feedback %g\n", d, ours, published);
        assert_true(ours > 0 && ours < 0.6 * published);
    }
}

static void the_hadamard_file_is_the_built_in_default(void **unused) {
    (void)unused;
    struct oscar_cause cause = {0};
    const struct calib_options options = {
        .output = calib_path("plain"), .hadamard_layers = 5, .kv_heads = 3, .hadamard_head_dim = 128};
    assert_int_equal(calib_hadamard(&options, &cause), 0);
    struct calibration_file file = fits_open(calib_path("plain"));
    assert_int_equal(file.calibration->layers, 5);
    assert_int_equal(file.calibration->rotation_k, OSCAR_ROTATION_HADAMARD);
    for (uint32_t i = 0; i < 15; i++) {
        assert_int_equal(file.calibration->heads[i].rank_k, 122);
        assert_int_equal(file.calibration->heads[i].rank_v, 117);
        assert_null(file.calibration->heads[i].centre_static);
    }
    calibration_file_close(&file);
    const struct calib_options wrong = {
        .output = calib_path("wrong"), .hadamard_layers = 5, .kv_heads = 3, .hadamard_head_dim = 100};
    assert_int_equal(calib_hadamard(&wrong, &cause), OSCAR_ERR_GEOMETRY);
}

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_published_method_is_the_published_formulas),
        cmocka_unit_test(the_proxy_is_the_published_codes),
        cmocka_unit_test(feedback_weighs_queries_by_what_errors_cost_them),
        cmocka_unit_test(each_head_has_a_rank_of_its_own),
        cmocka_unit_test(centre_and_feedback_each_lower_the_error_of_a_biased_model),
        cmocka_unit_test(the_centre_is_the_models_bias),
        cmocka_unit_test(the_file_says_how_it_was_made),
        cmocka_unit_test(a_fit_of_several_sequences_knows_them_all),
        cmocka_unit_test(missing_layers_are_named),
        cmocka_unit_test(too_few_samples_are_named),
        cmocka_unit_test(a_singular_covariance_is_named_and_can_be_allowed),
        cmocka_unit_test(a_nan_is_named),
        cmocka_unit_test(rope_that_does_not_fit_is_named),
        cmocka_unit_test(without_rope_the_centre_is_constant),
        cmocka_unit_test(heads_of_all_sizes_are_fitted),
        cmocka_unit_test(the_hadamard_file_is_the_built_in_default),
    };
    calib_seed();
    parallel_quiet_blas();
    return cmocka_run_group_tests(tests, fits_setup, NULL);
}
