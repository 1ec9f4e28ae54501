/* SPDX-License-Identifier: Apache-2.0 */
#include "calib/fit_layer.h"

#include <cblas.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "calib/centre.h"
#include "calib/feedback.h"
#include "calib/head_rows.h"
#include "calib/moments.h"
#include "calib/parallel.h"
#include "calib/rotation.h"
#include "calib/sweep.h"
#include "calib/value_target.h"
#include "proto/cleanup.h"

#define LEAST_SAMPLES_A_DIM 4U

/* What is summed for one head: the first three quarters of the tokens, and the rest. */
enum part { FITTED, HELD_OUT, SUM_PARTS };

struct head_sums {
    struct moments moments[SUM_PARTS];
    double *value[SUM_PARTS]; /* V's target [d][d], lower triangle */
    struct query_cost cost[SUM_PARTS];
};

struct layer_work {
    const struct layer_fitter *fitter;
    const struct layer_activations *layer;
    struct head_sums *head;
    uint32_t kv_heads, d;
};

void layer_fit_clear(struct layer_fit *fit) {
    free(fit->owned);
    *fit = (struct layer_fit){0};
}

/* --- sums --------------------------------------------------------------------------------------------------------- */

static void work_clear(struct layer_work *work) {
    for (uint32_t h = 0; work->head != NULL && h < work->kv_heads; h++)
        for (enum part part = 0; part < SUM_PARTS; part++) {
            moments_clear(&work->head[h].moments[part]);
            free(work->head[h].value[part]);
            free(work->head[h].cost[part].sum);
        }
    free(work->head);
}

static int work_init(struct layer_work *work, struct oscar_cause *cause) {
    work->head = calloc(work->kv_heads, sizeof(*work->head));
    if (work->head == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the sums of a layer");
    for (uint32_t h = 0; h < work->kv_heads; h++)
        for (enum part part = 0; part < SUM_PARTS; part++) {
            int r = moments_init(&work->head[h].moments[part], work->d, cause);
            if (r < 0)
                return r;
            work->head[h].value[part] = calloc((size_t)work->d * work->d, sizeof(double));
            work->head[h].cost[part].sum = calloc((size_t)work->d * work->d, sizeof(double));
            if (work->head[h].value[part] == NULL || work->head[h].cost[part].sum == NULL)
                return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the sums of a layer");
        }
    return 0;
}

/* ret = the covariance, of both parts or the fitted one alone: symmetric, divided by its rows. */
static void query_covariance(const struct head_sums *head, bool all, uint32_t d, double *ret) {
    const size_t size = (size_t)d * d;
    uint64_t rows = head->moments[FITTED].query_rows;
    memcpy(ret, head->moments[FITTED].query, size * sizeof(*ret));
    if (all) {
        cblas_daxpy((int)size, 1.0, head->moments[HELD_OUT].query, 1, ret, 1);
        rows += head->moments[HELD_OUT].query_rows;
    }
    covariance_finish(ret, d, 1.0 / (double)rows);
}

/*
 * The metric of K's errors, up to a factor: the queries by what errors cost them (value_target.h). A few queries may
 * bear most of the cost and say little of others to come: so all queries alike are mixed in, the more, the fewer those
 * are against the dims. Their number is Kish's effective sample size, (sum of w)² / sum of w².
 */
static void cost_metric(const struct head_sums *head, bool all, uint32_t d, double *ret, double *work) {
    const size_t size = (size_t)d * d;
    const struct query_cost *cost = head->cost;
    const double weight = cost[FITTED].weight + (all ? cost[HELD_OUT].weight : 0);
    const double square = cost[FITTED].square + (all ? cost[HELD_OUT].square : 0);
    double trace[2] = {0};
    query_covariance(head, all, d, ret);
    if (!(weight > 0))
        return;
    memcpy(work, cost[FITTED].sum, size * sizeof(*work));
    if (all)
        cblas_daxpy((int)size, 1.0, cost[HELD_OUT].sum, 1, work, 1);
    covariance_finish(work, d, 1.0 / weight);
    for (uint32_t i = 0; i < d; i++) {
        trace[0] += ret[i * (d + 1)];
        trace[1] += work[i * (d + 1)];
    }
    if (!(trace[1] > 0))
        return;
    const double queries = weight * weight / square;
    cblas_dscal((int)size, d / queries, ret, 1);
    cblas_daxpy((int)size, trace[0] / trace[1], work, 1, ret, 1);
}

static int sum_head(void *argument, uint32_t h, struct oscar_cause *cause) {
    struct layer_work *work = argument;
    const struct layer_fitter *fitter = work->fitter;
    struct head_sums *head = &work->head[h];
    for (size_t i = 0; i < work->layer->sequences; i++) {
        const struct sequence *sequence = &work->layer->sequence[i];
        uint64_t middle = sequence_held_out(sequence);
        int r = moments_add(&head->moments[FITTED], fitter->activations, &fitter->rope, work->layer, sequence, h, 0,
                            middle, cause);
        if (r == 0)
            r = moments_add(&head->moments[HELD_OUT], fitter->activations, &fitter->rope, work->layer, sequence, h,
                            middle, sequence->tokens, cause);
        if (r < 0)
            return r;
    }
    int r =
        value_target_scores(fitter->activations, work->layer, h, fitter->softmax_scale, head->value, head->cost, cause);
    if (r < 0 || !fitter->options->kinds[FIT_MATRIX] || !fitter->options->proxy)
        return r;
    for (enum part part = 0; part < SUM_PARTS; part++) /* the proxy takes the place of the scores' target */
        memset(head->value[part], 0, (size_t)work->d * work->d * sizeof(*head->value[part]));
    _cleanup_free_ double *covariance = malloc((size_t)work->d * work->d * sizeof(*covariance));
    if (covariance == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a covariance");
    query_covariance(head, true, work->d, covariance);
    return value_target_proxy(fitter->activations, work->layer, h, covariance, head->value, cause);
}

/* --- checks ------------------------------------------------------------------------------------------------------- */

static int check_rank(const struct layer_work *work, const double *matrix, const char *what, uint32_t h,
                      struct oscar_cause *cause) {
    double eigenvalues[256];
    int r = rotation_eigenvalues(matrix, work->d, eigenvalues, cause);
    if (r < 0)
        return r;
    uint32_t rank = eigenvalues[0] > 0 ? rotation_rank(eigenvalues, work->d) : 0;
    if (rank == work->d)
        return 0;
    return oscar_fail(cause, OSCAR_ERR_CALIBRATION,
                      "layer %" PRIu32 ", KV head %" PRIu32 ": the covariance of %s is singular, of rank %" PRIu32
                      " in %" PRIu32 " dims: capture more varied text, or say --allow-singular",
                      work->layer->layer, h, what, rank, work->d);
}

static int check_sums(const struct layer_work *work, struct oscar_cause *cause) {
    const struct fit_options *options = work->fitter->options;
    const size_t size = (size_t)work->d * work->d;
    const struct head_sums *first = &work->head[0];
    uint64_t tokens = first->moments[FITTED].tokens + first->moments[HELD_OUT].tokens;
    if (tokens < (uint64_t)LEAST_SAMPLES_A_DIM * work->d)
        return oscar_fail(cause, OSCAR_ERR_INVALID,
                          "layer %" PRIu32 ": too few samples: %" PRIu64 " tokens outside the sink for %" PRIu32
                          " dims, at least %" PRIu32 " are needed",
                          work->layer->layer, tokens, work->d, LEAST_SAMPLES_A_DIM * work->d);
    if (options->allow_singular)
        return 0;
    _cleanup_free_ double *matrix = malloc(size * sizeof(*matrix));
    if (matrix == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a covariance");
    int r = 0;
    for (uint32_t h = 0; r == 0 && h < work->kv_heads; h++) {
        query_covariance(&work->head[h], true, work->d, matrix);
        r = check_rank(work, matrix, "Q", h, cause);
        if (r < 0 || !options->kinds[FIT_MATRIX])
            continue;
        memcpy(matrix, work->head[h].value[FITTED], size * sizeof(*matrix));
        cblas_daxpy((int)size, 1.0, work->head[h].value[HELD_OUT], 1, matrix, 1);
        covariance_finish(matrix, work->d, 1.0);
        r = check_rank(work, matrix, "V", h, cause);
    }
    return r;
}

/* --- from sums to a calibration ----------------------------------------------------------------------------------- */

static float *take(float **at, size_t count) {
    float *taken = *at;
    *at += count;
    return taken;
}

static int allocate(const struct layer_work *work, struct layer_fit *fit, struct oscar_cause *cause) {
    const struct fit_options *options = work->fitter->options;
    const size_t d = work->d;
    const size_t heads = work->kv_heads;
    const size_t most =
        (2 + FIT_KINDS) * heads * d * d + FIT_KINDS * heads * d * (1 + (size_t)2 * fit->pairs) +
        heads * (fit->pairs + 2 * FIT_KINDS); /* the integers, of the same size as a float, are at the end */
    float *at = calloc(most, sizeof(*at));
    fit->owned = at;
    if (at == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the fit of a layer");
    if (options->kinds[FIT_MATRIX]) {
        fit->rotation_k = take(&at, fit->rotations * d * d);
        fit->rotation_v = take(&at, fit->rotations * d * d);
    }
    for (enum fit_kind kind = 0; kind < FIT_KINDS; kind++) {
        if (!options->kinds[kind])
            continue;
        if (options->centre)
            fit->kind[kind].centre_static = take(&at, heads * d);
        if (fit->pairs > 0) {
            fit->kind[kind].centre_cos = take(&at, heads * fit->pairs * d);
            fit->kind[kind].centre_sin = take(&at, heads * fit->pairs * d);
        }
        if (options->feedback)
            fit->kind[kind].feedback = take(&at, heads * d * d);
    }
    if (fit->pairs > 0)
        fit->pair = (int32_t *)(void *)take(&at, heads * fit->pairs);
    for (enum fit_kind kind = 0; kind < FIT_KINDS; kind++) {
        if (!options->kinds[kind])
            continue;
        fit->kind[kind].rank_k = (int32_t *)(void *)take(&at, heads);
        fit->kind[kind].rank_v = (int32_t *)(void *)take(&at, heads);
    }
    return 0;
}

/* The rotations of K and V, by the target of each head or by their sum. */
static int make_rotations(const struct layer_work *work, bool all, struct layer_fit *fit, struct oscar_cause *cause) {
    const uint32_t d = work->d;
    const size_t size = (size_t)d * d;
    const uint32_t shared = fit->rotations == 1 ? work->kv_heads : 1; /* heads a rotation */
    double eigenvalues[256];
    _cleanup_free_ double *memory = malloc(3 * size * sizeof(*memory));
    if (memory == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a rotation");
    double *query = memory;
    double *value = memory + size;
    double *one = memory + 2 * size;
    int r = 0;
    for (uint32_t i = 0; r == 0 && i < fit->rotations; i++) {
        memset(query, 0, 2 * size * sizeof(*query));
        for (uint32_t h = i * shared; h < (i + 1) * shared; h++) {
            query_covariance(&work->head[h], all, d, one);
            cblas_daxpy((int)size, 1.0, one, 1, query, 1);
            cblas_daxpy((int)size, 1.0, work->head[h].value[FITTED], 1, value, 1);
            if (all)
                cblas_daxpy((int)size, 1.0, work->head[h].value[HELD_OUT], 1, value, 1);
        }
        covariance_finish(value, d, 1.0);
        r = rotation_from_target(query, d, fit->rotation_k + i * size, eigenvalues, cause);
        if (r == 0)
            r = rotation_from_target(value, d, fit->rotation_v + i * size, eigenvalues, cause);
    }
    return r;
}

static int make_head(const struct layer_work *work, const struct moments *moments, uint32_t h, uint32_t turning,
                     enum fit_kind kind, const double *covariance, double *rotation, struct layer_fit *fit,
                     struct oscar_cause *cause) {
    const struct fit_options *options = work->fitter->options;
    const uint32_t d = work->d;
    const size_t size = (size_t)d * d;
    struct layer_fit_kind *to = &fit->kind[kind];
    if (kind == FIT_HADAMARD)
        rotation_hadamard(d, rotation);
    else
        for (size_t i = 0; i < size; i++)
            rotation[i] = (double)fit->rotation_k[(fit->rotations == 1 ? 0 : h) * size + i];
    int r = 0;
    if (options->centre) {
        size_t at = (size_t)h * fit->pairs;
        float *none = to->centre_static; /* without pairs there is nothing to write */
        r = centre_make(moments, &work->fitter->rope, fit->pairs > 0 ? fit->pair + at : NULL, turning, fit->pairs, d,
                        rotation, to->centre_static + (size_t)h * d, fit->pairs > 0 ? to->centre_cos + at * d : none,
                        fit->pairs > 0 ? to->centre_sin + at * d : none, cause);
    }
    if (r == 0 && options->feedback)
        r = feedback_factor(covariance, rotation, d, options->lambda, to->feedback + h * size, cause);
    return r;
}

/* All but ranks and errors, from everything or from the fitted part. */
static int make_layer(const struct layer_work *work, bool all, struct layer_fit *ret, struct oscar_cause *cause) {
    const struct fit_options *options = work->fitter->options;
    const uint32_t d = work->d;
    const size_t size = (size_t)d * d;
    struct layer_fit fit = {.kv_heads = work->kv_heads, .d = d, .rotations = options->per_layer ? 1 : work->kv_heads};
    _cleanup_free_ double *memory = malloc(2 * size * sizeof(*memory));
    _cleanup_free_ struct moments *moments = calloc(work->kv_heads, sizeof(*moments));
    _cleanup_free_ uint32_t *turning = calloc(work->kv_heads, sizeof(*turning));
    _cleanup_free_ int32_t(*pair)[OSCAR_MAX_PAIRS] = calloc(work->kv_heads, sizeof(*pair));
    if (memory == NULL || moments == NULL || turning == NULL || pair == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the fit of a layer");
    int r = 0;
    for (uint32_t h = 0; r == 0 && h < work->kv_heads; h++) {
        const struct head_sums *head = &work->head[h];
        r = moments_init(&moments[h], d, cause);
        for (enum part part = 0; r == 0 && part < (all ? SUM_PARTS : HELD_OUT); part++)
            moments_join(&moments[h], &head->moments[part], d);
        if (r == 0 && options->centre)
            turning[h] = centre_choose(&moments[h], &work->fitter->rope, options->pairs, pair[h]);
        fit.pairs = turning[h] > fit.pairs ? turning[h] : fit.pairs;
    }
    if (r == 0)
        r = allocate(work, &fit, cause);
    if (r == 0 && options->kinds[FIT_MATRIX])
        r = make_rotations(work, all, &fit, cause);
    for (uint32_t h = 0; r == 0 && h < work->kv_heads; h++) {
        if (fit.pairs > 0) {
            centre_fill(pair[h], turning[h], fit.pairs);
            memcpy(fit.pair + (size_t)h * fit.pairs, pair[h], fit.pairs * sizeof(*fit.pair));
        }
        cost_metric(&work->head[h], all, d, memory, memory + size);
        for (enum fit_kind kind = 0; r == 0 && kind < FIT_KINDS; kind++)
            if (options->kinds[kind])
                r = make_head(work, &moments[h], h, turning[h], kind, memory, memory + size, &fit, cause);
    }
    for (uint32_t h = 0; h < work->kv_heads; h++)
        moments_clear(&moments[h]);
    if (r < 0) {
        layer_fit_clear(&fit);
        return r;
    }
    *ret = fit;
    return 0;
}

int fit_layer(const struct layer_fitter *fitter, const struct layer_activations *layer, struct layer_fit *ret,
              struct oscar_cause *cause) {
    struct layer_work work = {.fitter = fitter,
                              .layer = layer,
                              .kv_heads = fitter->activations->kv_heads,
                              .d = fitter->activations->head_dim};
    struct layer_fit partial = {0};
    struct layer_fit fit = {0};
    const size_t size = (size_t)work.d * work.d;
    _cleanup_free_ double *metric = malloc((work.kv_heads + 1) * size * sizeof(*metric)); /* one to work in */
    int r = metric != NULL ? work_init(&work, cause)
                           : oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the metrics of a layer");
    if (r == 0)
        r = parallel_run(fitter->options->threads, work.kv_heads, sum_head, &work, cause);
    if (r == 0)
        r = check_sums(&work, cause);
    if (r == 0)
        r = make_layer(&work, false, &partial, cause);
    for (uint32_t h = 0; r == 0 && h < work.kv_heads; h++)
        cost_metric(&work.head[h], true, work.d, metric + h * size, metric + work.kv_heads * size);
    if (r == 0)
        r = sweep_layer(fitter, layer, metric, &partial, cause);
    if (r == 0)
        r = make_layer(&work, true, &fit, cause);
    for (enum fit_kind kind = 0; r == 0 && kind < FIT_KINDS; kind++) {
        struct layer_fit_kind *to = &fit.kind[kind];
        const struct layer_fit_kind *from = &partial.kind[kind];
        to->error_k = from->error_k;
        to->error_v = from->error_v;
        if (!fitter->options->kinds[kind])
            continue;
        memcpy(to->rank_k, from->rank_k, work.kv_heads * sizeof(*to->rank_k));
        memcpy(to->rank_v, from->rank_v, work.kv_heads * sizeof(*to->rank_v));
    }
    layer_fit_clear(&partial);
    work_clear(&work);
    if (r == 0)
        *ret = fit;
    return r;
}
