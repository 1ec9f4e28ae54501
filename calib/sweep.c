/* SPDX-License-Identifier: Apache-2.0 */
#include "calib/sweep.h"

#include <cblas.h>
#include <inttypes.h>
#include <stdlib.h>

#include "calib/head_rows.h"
#include "calib/parallel.h"
#include "calib/quantise.h"
#include "proto/cleanup.h"

#define QUERIES 96U /* positions, over all sequences */
#define SEQUENCES 12U
#define LEAST_PERCENT 80U /* ratios that are tried: from here to 100 percent */
#define STEP_PERCENT 2U
#define MAX_RANKS ((100U - LEAST_PERCENT) / STEP_PERCENT + 1U)

struct head_errors {
    struct attention_error k[FIT_KINDS][MAX_RANKS], v[FIT_KINDS][MAX_RANKS];
    double metric_k[FIT_KINDS][MAX_RANKS];
};

struct sweep {
    const struct layer_fitter *fitter;
    const struct layer_activations *layer;
    const struct layer_fit *fit;
    const double *metric;                 /* [kv_heads][d][d] */
    struct oscar_calibration calibration; /* head size and turn tables only */
    uint32_t rank_k[MAX_RANKS], rank_v[MAX_RANKS], ranks;
    const struct sequence *sequence[SEQUENCES];
    uint32_t sequences;
    struct head_errors *head;
};

uint32_t sweep_rank(double ratio, uint32_t d) {
    uint32_t rank = (uint32_t)(ratio * d + 1e-9);
    return rank < d ? rank : d - 1;
}

static void list_ranks(struct sweep *sweep) {
    const struct fit_options *options = sweep->fitter->options;
    const uint32_t d = sweep->fit->d;
    if (options->clip_given) {
        sweep->rank_k[0] = sweep_rank(options->clip_k, d);
        sweep->rank_v[0] = sweep_rank(options->clip_v, d);
        sweep->ranks = 1;
        return;
    }
    for (uint32_t percent = LEAST_PERCENT; percent <= 100; percent += STEP_PERCENT) {
        uint32_t rank = sweep_rank(percent / 100.0, d);
        sweep->rank_k[sweep->ranks] = sweep->rank_v[sweep->ranks] = rank;
        sweep->ranks++;
    }
}

/* The first row of the held-out quarter for whose query something is packed; `tokens`: there is none. */
static uint32_t first_query(const struct sequence *sequence) {
    const uint32_t tokens = (uint32_t)sequence->tokens;
    const uint32_t begin = attention_packed_begin(sequence->first_position);
    uint32_t row = (uint32_t)sequence_held_out(sequence);
    while (row < tokens && attention_packed_end(sequence->first_position, row) == begin)
        row++;
    return row;
}

static int choose_sequences(struct sweep *sweep, struct oscar_cause *cause) {
    size_t good = 0;
    for (size_t i = 0; i < sweep->layer->sequences; i++)
        good += first_query(&sweep->layer->sequence[i]) < sweep->layer->sequence[i].tokens;
    if (good == 0)
        return oscar_fail(
            cause, OSCAR_ERR_INVALID,
            "layer %" PRIu32 ": too few samples: no sequence is long enough that anything of it is packed "
            "(384 tokens from position 0), so that ranks and kind of rotation cannot be measured: capture "
            "more, or give --clip and --rotation",
            sweep->layer->layer);
    size_t seen = 0;
    for (size_t i = 0; i < sweep->layer->sequences; i++) {
        const struct sequence *sequence = &sweep->layer->sequence[i];
        if (first_query(sequence) >= sequence->tokens)
            continue;
        /* Every sequence, or SEQUENCES of them evenly spread. */
        if (good <= SEQUENCES || seen * SEQUENCES / good != (seen + 1) * SEQUENCES / good)
            sweep->sequence[sweep->sequences++] = sequence;
        seen++;
    }
    return 0;
}

static void head_of(const struct layer_fit *fit, enum fit_kind kind, uint32_t h, struct oscar_head_calibration *ret) {
    const size_t size = (size_t)fit->d * fit->d;
    const struct layer_fit_kind *from = &fit->kind[kind];
    const size_t at = (size_t)h * fit->pairs;
    *ret = (struct oscar_head_calibration){0};
    if (kind == FIT_MATRIX) {
        ret->rotation_k = fit->rotation_k + (fit->rotations == 1 ? 0 : h) * size;
        ret->rotation_v = fit->rotation_v + (fit->rotations == 1 ? 0 : h) * size;
    }
    if (from->feedback != NULL)
        ret->feedback = from->feedback + h * size;
    if (from->centre_static != NULL)
        ret->centre_static = from->centre_static + (size_t)h * fit->d;
    if (fit->pairs > 0) {
        ret->pairs = fit->pairs;
        ret->centre_pair = fit->pair + at;
        ret->centre_cos = from->centre_cos + at * fit->d;
        ret->centre_sin = from->centre_sin + at * fit->d;
    }
}

/* Sum of e M eᵀ over the errors e of the rows of K that can be packed; `work` [2][tokens][d]. */
static double metric_error(const struct attention_rows *rows, const double *packed, const double *metric,
                           double *work) {
    const size_t begin = attention_packed_begin(rows->first_position);
    if (begin >= rows->tokens)
        return 0;
    const size_t count = rows->tokens - begin;
    const size_t d = rows->d;
    double *error = work;
    double *product = work + count * d;
    for (size_t i = 0; i < count * d; i++)
        error[i] = packed[begin * d + i] - rows->k[begin * d + i];
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)count, (int)d, (int)d, 1.0, error, (int)d, metric,
                (int)d, 0.0, product, (int)d);
    return cblas_ddot((int)(count * d), error, 1, product, 1);
}

static int try_kind(const struct sweep *sweep, const struct head_rows *rows, struct attention_probe *probe,
                    enum fit_kind kind, double *packed, struct head_errors *errors, struct oscar_cause *cause) {
    const size_t elements = (size_t)rows->rows.tokens * rows->rows.d;
    struct oscar_head_calibration head;
    _cleanup_(quantiser_cleanup) struct quantiser *quantiser = NULL;
    head_of(sweep->fit, kind, rows->kv_head, &head);
    int r = quantiser_new(&sweep->calibration, &head, rows->rows.first_position, rows->rows.tokens, rows->k, rows->v,
                          &quantiser, cause);
    for (uint32_t i = 0; r == 0 && i < sweep->ranks; i++) {
        head.rank_k = sweep->rank_k[i];
        head.rank_v = sweep->rank_v[i];
        r = quantiser_packed(quantiser, packed, packed + elements, cause);
        if (r < 0)
            break;
        errors->metric_k[kind][i] +=
            metric_error(&rows->rows, packed, sweep->metric + rows->kv_head * (size_t)rows->rows.d * rows->rows.d,
                         packed + 2 * elements);
        attention_measure(&rows->rows, probe, &(struct attention_change){.k_packed = packed}, &errors->k[kind][i]);
        attention_measure(&rows->rows, probe, &(struct attention_change){.v_packed = packed + elements},
                          &errors->v[kind][i]);
    }
    return r;
}

static int sweep_head(void *argument, uint32_t h, struct oscar_cause *cause) {
    const struct sweep *sweep = argument;
    const struct layer_fitter *fitter = sweep->fitter;
    int r = 0;
    for (uint32_t i = 0; r == 0 && i < sweep->sequences; i++) {
        const struct sequence *sequence = sweep->sequence[i];
        struct head_rows rows = {0};
        struct attention_probe probe = {0};
        _cleanup_free_ double *packed =
            malloc(4 * (size_t)sequence->tokens * fitter->activations->head_dim * sizeof(*packed));
        if (packed == NULL)
            return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the packed rows of a head");
        r = head_rows_read(fitter->activations, sweep->layer, sequence, h, &rows, cause);
        if (r == 0) {
            uint32_t at[QUERIES];
            uint32_t most = head_rows_queries(&rows, (uint32_t)sequence->tokens);
            uint32_t share = (QUERIES + sweep->sequences - 1) / sweep->sequences;
            uint32_t queries =
                spread_queries(first_query(sequence), (uint32_t)sequence->tokens, most < share ? most : share, at);
            r = head_rows_probe(&rows, at, queries, fitter->softmax_scale, &probe, cause);
        }
        for (enum fit_kind kind = 0; r == 0 && kind < FIT_KINDS; kind++)
            if (fitter->options->kinds[kind])
                r = try_kind(sweep, &rows, &probe, kind, packed, &sweep->head[h], cause);
        attention_probe_clear(&probe);
        head_rows_clear(&rows);
    }
    return r;
}

/* Each head's rank with the least error; the error of all heads with these ranks by their output's energy. */
static double best_ranks(const struct sweep *sweep, enum fit_kind kind, bool k, int32_t *ret) {
    struct attention_error sum = {0};
    for (uint32_t h = 0; h < sweep->fit->kv_heads; h++) {
        const struct attention_error *errors = k ? sweep->head[h].k[kind] : sweep->head[h].v[kind];
        const double *metric = sweep->head[h].metric_k[kind];
        uint32_t best = 0;
        for (uint32_t i = 1; i < sweep->ranks; i++)
            if (k ? metric[i] < metric[best] : errors[i].output < errors[best].output)
                best = i;
        attention_error_add(&sum, &errors[best]);
        ret[h] = (int32_t)(k ? sweep->rank_k[best] : sweep->rank_v[best]);
    }
    return sum.output_norm > 0 ? sum.output / sum.output_norm : 0;
}

/* Turn tables for every position of the layer; freed by the caller. */
static int make_turns(struct sweep *sweep, float **ret, struct oscar_cause *cause) {
    const struct rope *rope = &sweep->fitter->rope;
    uint32_t pages = (uint32_t)((activations_positions(sweep->layer) + OSCAR_PAGE_TOKENS - 1) / OSCAR_PAGE_TOKENS);
    sweep->calibration = (struct oscar_calibration){.layers = 1,
                                                    .kv_heads = 1,
                                                    .head_dim = sweep->fit->d,
                                                    .frequencies = sweep->fit->pairs > 0 ? rope->pairs : 0,
                                                    .omega = rope->omega};
    size_t bytes = oscar_turns_bytes(&sweep->calibration, pages);
    float *turns = malloc(bytes + 1);
    if (turns == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for turn tables");
    oscar_turns_fill(&sweep->calibration, pages, turns);
    *ret = turns;
    return oscar_calibration_attach_turns(&sweep->calibration, turns, bytes, pages);
}

int sweep_layer(const struct layer_fitter *fitter, const struct layer_activations *layer, const double *metric,
                struct layer_fit *fit, struct oscar_cause *cause) {
    const struct fit_options *options = fitter->options;
    struct sweep sweep = {.fitter = fitter, .layer = layer, .fit = fit, .metric = metric};
    _cleanup_free_ float *turns = NULL;
    _cleanup_free_ struct head_errors *errors = NULL;
    list_ranks(&sweep);
    for (enum fit_kind kind = 0; kind < FIT_KINDS; kind++) {
        for (uint32_t h = 0; options->kinds[kind] && h < fit->kv_heads; h++) {
            fit->kind[kind].rank_k[h] = (int32_t)sweep.rank_k[0];
            fit->kind[kind].rank_v[h] = (int32_t)sweep.rank_v[0];
        }
        fit->kind[kind].error_k = fit->kind[kind].error_v = -1;
    }
    if (options->clip_given && !(options->kinds[FIT_MATRIX] && options->kinds[FIT_HADAMARD]))
        return 0;
    errors = calloc(fit->kv_heads, sizeof(*errors));
    if (errors == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a sweep");
    sweep.head = errors;
    int r = choose_sequences(&sweep, cause);
    if (r == 0)
        r = make_turns(&sweep, &turns, cause);
    if (r == 0)
        r = parallel_run(options->threads, fit->kv_heads, sweep_head, &sweep, cause);
    for (enum fit_kind kind = 0; r == 0 && kind < FIT_KINDS; kind++)
        if (options->kinds[kind]) {
            fit->kind[kind].error_k = best_ranks(&sweep, kind, true, fit->kind[kind].rank_k);
            fit->kind[kind].error_v = best_ranks(&sweep, kind, false, fit->kind[kind].rank_v);
        }
    return r;
}
