/* SPDX-License-Identifier: Apache-2.0 */
/* oscar-calib fit: captured activations in, a calibration file out. */
#include "calib/fit.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "calib/activations.h"
#include "calib/calibration_file.h"
#include "calib/fit_file.h"
#include "calib/fit_layer.h"
#include "calib/progress.h"
#include "proto/cleanup.h"
#include "proto/geometry.h"

struct fit_options fit_defaults(void) {
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    return (struct fit_options){
        .kinds = {true, true},
        .centre = true,
        .pairs = OSCAR_MAX_PAIRS,
        .feedback = true,
        .lambda = 0.02,
        .context = 8192,
        .threads = processors > 1 ? (uint32_t)processors : 1,
    };
}

struct fit_options fit_published(bool per_layer, const struct fit_options *options) {
    struct fit_options published = *options;
    published.kinds[FIT_MATRIX] = true;
    published.kinds[FIT_HADAMARD] = false;
    published.per_layer = per_layer;
    published.centre = false;
    published.pairs = 0;
    published.feedback = false;
    published.clip_given = true;
    published.clip_k = 0.96;
    published.clip_v = 0.92;
    return published;
}

/* --- which layers ------------------------------------------------------------------------------------------------- */

struct layer_list {
    uint32_t number[OSCAR_MAX_LAYERS];
    uint32_t count;
    bool renumbered;
};

/* All layers of the model: a hole is an error, since a daemon could not serve the file. */
static int all_layers(const struct activations *activations, struct layer_list *ret, struct oscar_cause *cause) {
    uint32_t count = activations->layer[activations->layers - 1].layer + 1;
    count = activations->model_layers > count ? activations->model_layers : count;
    for (uint32_t i = 0; i < count; i++) {
        if (activations_layer(activations, i) == NULL)
            return oscar_fail(cause, OSCAR_ERR_NOT_FOUND,
                              "layer %" PRIu32 " of %" PRIu32 " is missing in the capture: capture all layers, or name "
                              "those that the file is to hold by --layers",
                              i, count);
        ret->number[i] = i;
    }
    ret->count = count;
    return 0;
}

static int listed_layers(const struct activations *activations, const char *text, struct layer_list *ret,
                         struct oscar_cause *cause) {
    ret->renumbered = true;
    for (const char *at = text;; at++) {
        char *end;
        errno = 0;
        unsigned long layer = strtoul(at, &end, 10);
        if (errno != 0 || end == at || *at < '0' || *at > '9' || (*end != ',' && *end != '\0') ||
            ret->count == OSCAR_MAX_LAYERS)
            return oscar_fail(cause, OSCAR_ERR_INVALID, "--layers %s: not a list of layers with commas between", text);
        if (layer >= OSCAR_MAX_LAYERS || activations_layer(activations, (uint32_t)layer) == NULL)
            return oscar_fail(cause, OSCAR_ERR_NOT_FOUND, "--layers %s: layer %lu is missing in the capture", text,
                              layer);
        ret->number[ret->count++] = (uint32_t)layer;
        if (*end == '\0')
            return 0;
        at = end;
    }
}

/* --- what the fit is made of -------------------------------------------------------------------------------------- */

/* "NAME DIGEST" a file; malloced. */
static int list_sources(const struct activations *activations, char **ret, struct oscar_cause *cause) {
    size_t size;
    char *text = NULL;
    FILE *stream = open_memstream(&text, &size);
    if (stream == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the sources");
    for (size_t i = 0; i < activations->files; i++) {
        struct oscar_digest digest;
        char hex[2 * OSCAR_DIGEST_BYTES + 1];
        activation_file_digest(activations->file[i], &digest);
        oscar_digest_hex(&digest, hex);
        (void)fprintf(stream, "%s%s %s", i == 0 ? "" : "\n", activation_file_name(activations->file[i]), hex);
    }
    if (fclose(stream) != 0) {
        free(text);
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for the sources");
    }
    *ret = text;
    return 0;
}

/* Of everything that a layer's result depends on. */
static int digest_of(const struct layer_fitter *fitter, const char *sources, uint32_t source_layer,
                     struct oscar_digest *ret, struct oscar_cause *cause) {
    const struct fit_options *o = fitter->options;
    _cleanup_free_ char *text = NULL;
    size_t size;
    FILE *stream = open_memstream(&text, &size);
    if (stream == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a digest");
    (void)fprintf(stream, "%s\n%s\n", OSCAR_VERSION_STRING, sources);
    (void)fprintf(stream, "layer %" PRIu32 " kinds %d %d per layer %d proxy %d centre %d pairs %" PRIu32 "\n",
                  source_layer, o->kinds[FIT_MATRIX], o->kinds[FIT_HADAMARD], o->per_layer, o->proxy, o->centre,
                  o->pairs);
    (void)fprintf(stream, "feedback %d %a clip %d %a %a softmax %a singular %d\n", o->feedback, o->lambda,
                  o->clip_given, o->clip_k, o->clip_v, fitter->softmax_scale, o->allow_singular);
    (void)fprintf(stream, "rope %d %" PRIu32, fitter->rope.pairing, fitter->rope.pairs);
    for (uint32_t i = 0; i < fitter->rope.pairs; i++)
        (void)fprintf(stream, " %a", fitter->rope.omega[i]);
    if (fclose(stream) != 0)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a digest");
    oscar_content_digest(text, size, ret);
    return 0;
}

static int make_fitter(const struct fit_options *options, const struct activations *activations,
                       struct layer_fitter *ret, struct oscar_cause *cause) {
    struct rope_given given = activations->rope;
    if (options->rope.pairing != ROPE_UNKNOWN)
        given.pairing = options->rope.pairing;
    if (options->rope.base != 0)
        given.base = options->rope.base;
    if (options->rope.dims != 0)
        given.dims = options->rope.dims;
    const double *omega = options->rope.base != 0 ? NULL : activations->omega;
    *ret = (struct layer_fitter){.options = options, .activations = activations};
    ret->softmax_scale = options->softmax_scale != 0       ? options->softmax_scale
                         : activations->softmax_scale != 0 ? activations->softmax_scale
                                                           : 1.0 / sqrt(activations->head_dim);
    int r = rope_make(&given, omega, activations->omegas, activations->head_dim, &ret->rope, cause);
    if (r == 0 && options->centre && options->pairs > 0 && ret->rope.pairs == 0 && given.pairing != ROPE_NONE)
        say("warning: neither the capture nor the options say how RoPE turns K (--rope-base, --rope-pairs): its centre "
            "will be constant");
    return r;
}

/* --- the verb ----------------------------------------------------------------------------------------------------- */

static int make_parts(const struct layer_fitter *fitter, const struct layer_list *layers, const char *sources,
                      const char *folder, struct oscar_cause *cause) {
    struct progress progress;
    uint32_t kept = 0;
    int r = 0;
    progress_begin(&progress, "layer", layers->count);
    for (uint32_t i = 0; r == 0 && i < layers->count; i++) {
        struct oscar_digest digest;
        struct layer_fit fit = {0};
        if ((r = digest_of(fitter, sources, layers->number[i], &digest, cause)) < 0)
            return r;
        bool good = fit_part_good(folder, i, &digest);
        kept += good;
        if (!good)
            r = fit_layer(fitter, activations_layer(fitter->activations, layers->number[i]), &fit, cause);
        if (r == 0 && !good)
            r = fit_part_save(folder, i, &digest, &fit, fitter->options, cause);
        layer_fit_clear(&fit);
        if (r == 0)
            progress_step(&progress, good);
    }
    if (r == 0 && kept > 0)
        say("%" PRIu32 " of %" PRIu32 " layers were there from an earlier run", kept, layers->count);
    return r;
}

/* The file must be one that a daemon takes. */
static int check_file(const char *path, struct oscar_cause *cause) {
    struct calibration_file file = {0};
    int r = calibration_file_open(path, true, &file, cause);
    calibration_file_close(&file);
    return r;
}

int fit_to_file(const struct fit_options *options, const struct activations *activations, const char *path,
                struct oscar_cause *cause) {
    struct layer_fitter fitter;
    struct layer_list layers = {0};
    _cleanup_free_ char *sources = NULL;
    _cleanup_free_ char *folder = NULL;
    int r = make_fitter(options, activations, &fitter, cause);
    if (r == 0)
        r = options->layers != NULL ? listed_layers(activations, options->layers, &layers, cause)
                                    : all_layers(activations, &layers, cause);
    if (r == 0)
        r = list_sources(activations, &sources, cause);
    if (r < 0)
        return r;
    struct fit_summary summary = {.fitter = &fitter,
                                  .model = options->model != NULL       ? options->model
                                           : activations->model != NULL ? activations->model
                                                                        : FIT_UNKNOWN_MODEL,
                                  .layers = layers.count,
                                  .source_layers = layers.number,
                                  .renumbered = layers.renumbered,
                                  .sources = sources,
                                  .tokens = UINT64_MAX,
                                  .positions = UINT64_MAX};
    for (uint32_t i = 0; i < layers.count; i++) {
        const struct layer_activations *layer = activations_layer(activations, layers.number[i]);
        uint64_t tokens = activations_tokens(layer);
        uint64_t positions = activations_positions(layer);
        summary.tokens = tokens < summary.tokens ? tokens : summary.tokens;
        summary.positions = positions < summary.positions ? positions : summary.positions;
    }
    if (summary.positions < options->context)
        say("warning: the capture ends at position %" PRIu64 ", contexts of %" PRIu64
            " tokens are to be served (--context): beyond it K's centre and the queries' covariance are a guess",
            summary.positions, options->context);
    if (asprintf(&folder, "%s.parts", path) < 0) {
        folder = NULL;
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a name");
    }
    if (mkdir(folder, 0777) < 0 && errno != EEXIST)
        return oscar_fail(cause, OSCAR_ERR_IO, "cannot make the folder %s: %m", folder);
    r = make_parts(&fitter, &layers, sources, folder, cause);
    if (r == 0)
        r = fit_file_save(folder, path, &summary, cause);
    if (r == 0)
        r = check_file(path, cause);
    if (r == 0)
        fit_parts_remove(folder);
    else
        (void)rmdir(folder); /* only where no layer was finished */
    return r;
}

int calib_fit(const struct calib_options *options, struct oscar_cause *cause) {
    _cleanup_(activations_cleanup) struct activations *activations = NULL;
    int r = activations_open(options->arguments, options->argument_count, &activations, cause);
    if (r == 0)
        r = fit_to_file(&options->fit, activations, options->output, cause);
    if (r == 0)
        say("wrote %s", options->output);
    return r;
}
