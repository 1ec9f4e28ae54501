/* SPDX-License-Identifier: Apache-2.0 */
/* oscar-calib report: what a calibration costs on text that it has not seen, beside simpler and published methods. */
#include "calib/report.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "calib/calibration_file.h"
#include "calib/fit.h"
#include "calib/head_rows.h"
#include "calib/parallel.h"
#include "calib/progress.h"
#include "calib/quantise.h"
#include "proto/cleanup.h"
#include "proto/geometry.h"

#define QUERIES 512U /* positions of a layer, over all its sequences */
#define MAX_METHODS (MAX_BASELINES + 6U)

/* One of: dense pages only; rotation by the identity; the built-in default; a file. */
struct method {
    const char *name;
    char own_name[40]; /* of a baseline */
    bool dense_only, identity;
    struct calibration_file file;               /* bytes NULL: none */
    uint32_t source[OSCAR_MAX_LAYERS], sources; /* of a file: the model's number of each of its layers */
};

struct judge {
    const struct calib_options *options;
    const struct activations *activations;
    double softmax_scale;
    struct method method[MAX_METHODS];
    const char *name[MAX_METHODS];
    size_t methods;
    uint32_t layer[OSCAR_MAX_LAYERS];
    size_t layers;
    struct oscar_calibration *fallback; /* the built-in default for one head */
    float *identity;                    /* [d][d] */
    /* of the layer at hand */
    const struct layer_activations *rows;
    struct attention_error *error; /* [heads][methods] */
};

const struct figure_text figure_texts[FIGURES] = {
    [FIGURE_LOGIT] = {"error of packed tokens' logits, root mean square", "logit_error"},
    [FIGURE_OUTPUT] = {"error of the attention output, its energy over the output's", "output_error"},
    [FIGURE_KL] = {"KL of the attention distribution, nats a query", "kl"},
};

/* --- methods ------------------------------------------------------------------------------------------------------ */

/* Which layers of the model a file's layers are: 0, 1, .. unless it says otherwise. */
static int read_sources(struct method *method, struct oscar_cause *cause) {
    const struct oscar_calibration *calibration = method->file.calibration;
    const char *text = oscar_safetensors_metadata(calibration->file, "oscar.source_layers");
    method->sources = calibration->layers;
    for (uint32_t i = 0; i < calibration->layers; i++) {
        char *end;
        method->source[i] = i;
        if (text == NULL)
            continue;
        unsigned long layer = strtoul(text, &end, 10);
        if (end == text || layer >= OSCAR_MAX_LAYERS || *end != (i + 1 < calibration->layers ? ',' : '\0'))
            return oscar_fail(cause, OSCAR_ERR_CALIBRATION,
                              "%s: metadata oscar.source_layers is not a list of its %" PRIu32 " layers", method->name,
                              calibration->layers);
        method->source[i] = (uint32_t)layer;
        text = end + 1;
    }
    return 0;
}

/* Of files and captures that name a model. A file of no capture is made for any. */
static int check_model(const struct judge *judge, const struct method *method, const char *path,
                       struct oscar_cause *cause) {
    const char *of = judge->activations->model, *also = judge->options->fit.model;
    const char *made_for = oscar_safetensors_metadata(method->file.calibration->file, "oscar.model");
    if (of == NULL || made_for == NULL || strcmp(made_for, FIT_ANY_MODEL) == 0 ||
        strcmp(made_for, FIT_UNKNOWN_MODEL) == 0 || strcmp(made_for, of) == 0 ||
        (also != NULL && strcmp(made_for, also) == 0))
        return 0;
    return oscar_fail(cause, OSCAR_ERR_IDENTITY,
                      "%.80s is made for the model %.60s, the capture is of %.60s: where that is the same say so by "
                      "--model",
                      path, made_for, of);
}

static int add_file(struct judge *judge, const char *name, const char *path, struct oscar_cause *cause) {
    struct method *method = &judge->method[judge->methods];
    const struct activations *activations = judge->activations;
    method->name = name;
    int r = calibration_file_open(path, true, &method->file, cause);
    if (r < 0)
        return r;
    judge->name[judge->methods++] = name;
    const struct oscar_calibration *calibration = method->file.calibration;
    if (calibration->kv_heads != activations->kv_heads || calibration->head_dim != activations->head_dim)
        return oscar_fail(
            cause, OSCAR_ERR_GEOMETRY,
            "%s is made for %" PRIu32 " KV heads of %" PRIu32 " dims, the capture has %" PRIu32 " of %" PRIu32, path,
            calibration->kv_heads, calibration->head_dim, activations->kv_heads, activations->head_dim);
    r = check_model(judge, method, path, cause);
    return r < 0 ? r : read_sources(method, cause);
}

static void add_simple(struct judge *judge, const char *name, bool dense_only, bool identity) {
    judge->method[judge->methods] = (struct method){.name = name, .dense_only = dense_only, .identity = identity};
    judge->name[judge->methods++] = name;
}

static int layer_of(const struct method *method, uint32_t layer, struct oscar_cause *cause) {
    for (uint32_t i = 0; i < method->sources; i++)
        if (method->source[i] == layer)
            return (int)i;
    return oscar_fail(cause, OSCAR_ERR_NOT_FOUND, "%s has no layer %" PRIu32 " of the model", method->name, layer);
}

/* The layers that both the capture and the judged file have. */
static int choose_layers(struct judge *judge, const struct method *judged, struct oscar_cause *cause) {
    for (size_t i = 0; i < judge->activations->layers; i++) {
        uint32_t layer = judge->activations->layer[i].layer;
        if (layer_of(judged, layer, NULL) >= 0)
            judge->layer[judge->layers++] = layer;
    }
    return judge->layers > 0 ? 0 : oscar_fail(cause, OSCAR_ERR_NOT_FOUND, "the capture has none of the file's layers");
}

/* Fits the published method on another capture and takes the file that comes of it. */
static int fit_published_method(struct judge *judge, const struct activations *activations, const char *name,
                                bool per_layer, struct oscar_cause *cause) {
    char folder[] = "/tmp/oscar-calib.XXXXXX";
    char list[OSCAR_MAX_LAYERS * 5] = "";
    char path[sizeof(folder) + 16];
    size_t used = 0;
    struct fit_options options = fit_published(per_layer, &judge->options->fit);
    for (size_t i = 0; i < judge->layers; i++)
        used += (size_t)snprintf(list + used, sizeof(list) - used, "%s%" PRIu32, i == 0 ? "" : ",", judge->layer[i]);
    options.layers = list;
    options.context = 1; /* nobody is going to serve it */
    if (mkdtemp(folder) == NULL)
        return oscar_fail(cause, OSCAR_ERR_IO, "cannot make a folder in /tmp: %m");
    (void)snprintf(path, sizeof(path), "%s/fit", folder);
    int r = fit_to_file(&options, activations, path, cause);
    if (r == 0)
        r = add_file(judge, name, path, cause);
    (void)unlink(path);
    (void)rmdir(folder);
    return r;
}

static int add_published(struct judge *judge, struct oscar_cause *cause) {
    _cleanup_(activations_cleanup) struct activations *activations = NULL;
    int r = activations_open(&judge->options->fit_on, 1, &activations, cause);
    if (r == 0)
        r = fit_published_method(judge, activations, "oscar-layer", true, cause);
    if (r == 0)
        r = fit_published_method(judge, activations, "oscar-head", false, cause);
    return r;
}

/* NAME=FILE. The name is copied into the method: it ends where the text's file begins. */
static int add_baseline(struct judge *judge, const char *text, struct oscar_cause *cause) {
    const char *equals = strchr(text, '=');
    if (equals == NULL)
        return oscar_fail(cause, OSCAR_ERR_INVALID, "--baseline %s: expected NAME=FILE", text);
    struct method *method = &judge->method[judge->methods];
    (void)snprintf(method->own_name, sizeof(method->own_name), "%.*s", (int)(equals - text), text);
    return add_file(judge, method->own_name, equals + 1, cause);
}

/* --- measuring ---------------------------------------------------------------------------------------------------- */

/* The head's calibration, and the calibration around it with its turn tables. */
static int find_head(const struct judge *judge, const struct method *method, uint32_t h,
                     const struct oscar_calibration **ret_calibration, struct oscar_head_calibration *ret,
                     struct oscar_cause *cause) {
    if (method->file.bytes != NULL) {
        int layer = layer_of(method, judge->rows->layer, cause);
        if (layer < 0)
            return layer;
        *ret_calibration = method->file.calibration;
        *ret = *oscar_calibration_head(method->file.calibration, (uint32_t)layer, h);
        return 0;
    }
    *ret_calibration = judge->fallback;
    *ret = judge->fallback->heads[0];
    if (method->identity) {
        ret->rotation_k = ret->rotation_v = judge->identity;
        ret->rank_k = ret->rank_v = judge->fallback->head_dim - 1;
    }
    return 0;
}

/* The rows that a method makes: [4][tokens][d] in the order of struct attention_change. */
static int make_rows(const struct judge *judge, const struct method *method, const struct head_rows *rows, double *made,
                     struct oscar_cause *cause) {
    const size_t elements = (size_t)rows->rows.tokens * rows->rows.d;
    const struct oscar_calibration *calibration;
    struct oscar_head_calibration head;
    _cleanup_(quantiser_cleanup) struct quantiser *quantiser = NULL;
    int r = find_head(judge, method, rows->kv_head, &calibration, &head, cause);
    if (r == 0)
        r = quantiser_new(calibration, &head, rows->rows.first_position, rows->rows.tokens, rows->k, rows->v,
                          &quantiser, cause);
    if (r < 0)
        return r;
    quantiser_dense(quantiser, made + elements, made + 3 * elements);
    return method->dense_only ? 0 : quantiser_packed(quantiser, made, made + 2 * elements, cause);
}

static int judge_method(const struct judge *judge, const struct method *method, const struct head_rows *rows,
                        const uint32_t *at, uint32_t queries, double *made, struct attention_error *sum,
                        struct oscar_cause *cause) {
    const size_t elements = (size_t)rows->rows.tokens * rows->rows.d;
    int r = make_rows(judge, method, rows, made, cause);
    struct attention_change change = {.k_packed = method->dense_only ? NULL : made,
                                      .k_dense = made + elements,
                                      .v_packed = method->dense_only ? NULL : made + 2 * elements,
                                      .v_dense = made + 3 * elements};
    for (uint32_t done = 0, count; r == 0 && done < queries; done += count) {
        struct attention_probe probe = {0};
        count = head_rows_queries(rows, at[queries - 1] + 1);
        count = queries - done < count ? queries - done : count;
        r = head_rows_probe(rows, at + done, count, judge->softmax_scale, &probe, cause);
        if (r == 0)
            attention_measure(&rows->rows, &probe, &change, sum);
        attention_probe_clear(&probe);
    }
    return r;
}

static int judge_head(void *argument, uint32_t h, struct oscar_cause *cause) {
    const struct judge *judge = argument;
    const uint64_t tokens = activations_tokens(judge->rows);
    int r = 0;
    for (size_t i = 0; r == 0 && i < judge->rows->sequences; i++) {
        const struct sequence *sequence = &judge->rows->sequence[i];
        const uint32_t begin = attention_packed_begin(sequence->first_position);
        const uint32_t end = (uint32_t)sequence->tokens;
        uint32_t first = 0;
        while (first < end && attention_packed_end(sequence->first_position, first) == begin)
            first++;
        if (first == end)
            continue;
        uint32_t at[QUERIES];
        uint32_t queries =
            spread_queries(first, end, (uint32_t)((QUERIES * sequence->tokens + tokens - 1) / tokens), at);
        struct head_rows rows = {0};
        _cleanup_free_ double *made =
            malloc(4 * (size_t)sequence->tokens * judge->activations->head_dim * sizeof(*made));
        if (made == NULL)
            return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the packed rows of a head");
        r = head_rows_read(judge->activations, judge->rows, sequence, h, &rows, cause);
        for (size_t m = 0; r == 0 && m < judge->methods; m++)
            r = judge_method(judge, &judge->method[m], &rows, at, queries, made, &judge->error[h * judge->methods + m],
                             cause);
        head_rows_clear(&rows);
    }
    return r;
}

static int attach_turns(struct oscar_calibration *calibration, uint32_t pages, struct oscar_cause *cause) {
    size_t bytes = oscar_turns_bytes(calibration, pages);
    float *turns = bytes > 0 ? malloc(bytes) : NULL;
    if (bytes == 0)
        return 0;
    if (turns == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for turn tables");
    oscar_turns_fill(calibration, pages, turns);
    return oscar_calibration_attach_turns(calibration, turns, bytes, pages);
}

static int prepare(struct judge *judge, struct oscar_cause *cause) {
    const uint32_t d = judge->activations->head_dim;
    const struct oscar_geometry geometry = {.layers = 1,
                                            .query_heads = 1,
                                            .kv_heads = 1,
                                            .head_dim = d,
                                            .dtype = OSCAR_BF16,
                                            .page_tokens = OSCAR_PAGE_TOKENS,
                                            .sink_tokens = OSCAR_SINK_TOKENS,
                                            .recent_tokens = OSCAR_RECENT_TOKENS};
    int r = oscar_calibration_default(&geometry, &judge->fallback, cause);
    judge->identity = calloc((size_t)d * d, sizeof(*judge->identity));
    judge->error = calloc(judge->activations->kv_heads * judge->methods, sizeof(*judge->error));
    if (r == 0 && (judge->identity == NULL || judge->error == NULL))
        r = oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a report");
    uint64_t positions = 0;
    for (size_t i = 0; i < judge->layers; i++) {
        uint64_t end = activations_positions(activations_layer(judge->activations, judge->layer[i]));
        positions = end > positions ? end : positions;
    }
    for (uint32_t i = 0; r == 0 && i < d; i++)
        judge->identity[i * (d + 1)] = 1.0F;
    for (size_t m = 0; r == 0 && m < judge->methods; m++)
        if (judge->method[m].file.bytes != NULL)
            r = attach_turns(judge->method[m].file.calibration, (uint32_t)(positions / OSCAR_PAGE_TOKENS + 1), cause);
    return r;
}

static void judge_clear(struct judge *judge) {
    for (size_t m = 0; m < judge->methods; m++) {
        if (judge->method[m].file.bytes != NULL)
            free((void *)judge->method[m].file.calibration->turns.row_turn);
        calibration_file_close(&judge->method[m].file);
    }
    oscar_calibration_free(judge->fallback);
    free(judge->identity);
    free(judge->error);
}

static int measure(struct judge *judge, double *value, struct oscar_cause *cause) {
    const uint32_t heads = judge->activations->kv_heads;
    double *mean = value + judge->layers * judge->methods * FIGURES;
    struct progress progress;
    progress_begin(&progress, "layer", judge->layers);
    for (size_t i = 0; i < judge->layers; i++) {
        judge->rows = activations_layer(judge->activations, judge->layer[i]);
        memset(judge->error, 0, heads * judge->methods * sizeof(*judge->error));
        int r = parallel_run(judge->options->fit.threads, heads, judge_head, judge, cause);
        if (r < 0)
            return r;
        for (size_t m = 0; m < judge->methods; m++) {
            struct attention_error sum = {0};
            for (uint32_t h = 0; h < heads; h++)
                attention_error_add(&sum, &judge->error[h * judge->methods + m]);
            if (sum.queries == 0 || sum.logits == 0)
                return oscar_fail(cause, OSCAR_ERR_INVALID,
                                  "layer %" PRIu32 ": no sequence is long enough that anything of it is packed (384 "
                                  "tokens from position 0)",
                                  judge->layer[i]);
            double *to = value + (i * judge->methods + m) * FIGURES;
            to[FIGURE_LOGIT] = sqrt(sum.logit / sum.logits);
            to[FIGURE_OUTPUT] = sum.output_norm > 0 ? sum.output / sum.output_norm : 0;
            to[FIGURE_KL] = sum.divergence / sum.queries;
            for (enum figure figure = 0; figure < FIGURES; figure++)
                mean[m * FIGURES + figure] += to[figure] / (double)judge->layers;
        }
        progress_step(&progress, 0);
    }
    return 0;
}

/* --- the verb ----------------------------------------------------------------------------------------------------- */

static int judge_capture(struct judge *judge, struct oscar_cause *cause) {
    const struct calib_options *options = judge->options;
    const struct activations *activations = judge->activations;
    struct method judged = {0};
    int r = add_file(judge, "ours", options->calibration, cause);
    if (r < 0)
        return r;
    judged = judge->method[0]; /* shown last */
    judge->methods = 0;
    r = choose_layers(judge, &judged, cause);
    add_simple(judge, "bf16", true, false);
    add_simple(judge, "naive", false, true);
    add_simple(judge, "hadamard", false, false);
    if (r == 0 && options->fit_on != NULL)
        r = add_published(judge, cause);
    for (size_t i = 0; r == 0 && i < options->baselines_given; i++)
        r = add_baseline(judge, options->baselines[i], cause);
    judge->method[judge->methods] = judged;
    judge->name[judge->methods++] = "ours";
    if (r == 0)
        r = prepare(judge, cause);
    if (r < 0)
        return r;
    _cleanup_free_ double *value = calloc((judge->layers + 1) * judge->methods * FIGURES, sizeof(*value));
    if (value == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a report");
    if ((r = measure(judge, value, cause)) < 0)
        return r;
    struct report report = {.model = activations->model,
                            .method = judge->name,
                            .methods = judge->methods,
                            .layer = judge->layer,
                            .layers = judge->layers,
                            .value = value};
    if (options->json)
        report_print_json(&report);
    else
        report_print(&report);
    return options->svg != NULL ? report_draw(&report, options->svg, cause) : 0;
}

int calib_report(const struct calib_options *options, struct oscar_cause *cause) {
    _cleanup_(activations_cleanup) struct activations *activations = NULL;
    _cleanup_free_ struct judge *judge = calloc(1, sizeof(*judge));
    int r = judge == NULL ? oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a report")
                          : activations_open(options->arguments, options->argument_count, &activations, cause);
    if (r == 0) {
        judge->options = options;
        judge->activations = activations;
        judge->softmax_scale = options->fit.softmax_scale != 0   ? options->fit.softmax_scale
                               : activations->softmax_scale != 0 ? activations->softmax_scale
                                                                 : 1.0 / sqrt(activations->head_dim);
        r = judge_capture(judge, cause);
        judge_clear(judge);
    }
    return r;
}
