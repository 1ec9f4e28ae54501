/* SPDX-License-Identifier: Apache-2.0 */
#include "calib/fit_file.h"

#include <dirent.h>
#include <errno.h>
#include <fnmatch.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "calib/progress.h"
#include "calib/tensor_writer.h"
#include "proto/cleanup.h"

/* A matrix must beat Hadamard by this factor: it costs a matrix to read and a slower store. */
#define HADAMARD_TIE 1.2

static const char *const kind_names[FIT_KINDS] = {"matrix", "hadamard"};

/* --- parts -------------------------------------------------------------------------------------------------------- */

static int part_path(const char *folder, uint32_t layer, char **ret, struct oscar_cause *cause) {
    if (asprintf(ret, "%s/layer-%" PRIu32 ".safetensors", folder, layer) >= 0)
        return 0;
    *ret = NULL;
    return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a name");
}

static void add_floats(struct tensor_writer *writer, const char *kind, const char *name, const float *data, uint64_t n,
                       uint64_t rows, uint64_t d) {
    char full[64];
    if (data == NULL)
        return;
    (void)snprintf(full, sizeof(full), "%s.%s", kind, name);
    if (rows == 0)
        tensor_writer_add(writer, full, OSCAR_TENSOR_F32, 2, (uint64_t[]){n, d}, data);
    else
        tensor_writer_add(writer, full, OSCAR_TENSOR_F32, 3, (uint64_t[]){n, rows, d}, data);
}

static void add_ranks(struct tensor_writer *writer, const char *kind, const char *name, const int32_t *ranks,
                      uint64_t heads) {
    char full[64];
    (void)snprintf(full, sizeof(full), "%s.%s", kind, name);
    tensor_writer_add(writer, full, OSCAR_TENSOR_I32, 1, (uint64_t[]){heads}, ranks);
}

int fit_part_save(const char *folder, uint32_t layer, const struct oscar_digest *digest, const struct layer_fit *fit,
                  const struct fit_options *options, struct oscar_cause *cause) {
    _cleanup_(tensor_writer_cleanup) struct tensor_writer *writer = NULL;
    _cleanup_free_ char *path = NULL;
    char hex[2 * OSCAR_DIGEST_BYTES + 1];
    int r = tensor_writer_new(&writer, cause);
    if (r == 0)
        r = part_path(folder, layer, &path, cause);
    if (r < 0)
        return r;
    oscar_digest_hex(digest, hex);
    tensor_writer_metadata(writer, "made_of", "%s", hex);
    for (enum fit_kind kind = 0; kind < FIT_KINDS; kind++) {
        const struct layer_fit_kind *from = &fit->kind[kind];
        char key[32];
        if (!options->kinds[kind])
            continue;
        (void)snprintf(key, sizeof(key), "%s.result", kind_names[kind]);
        tensor_writer_metadata(writer, key, "%.17g %.17g", from->error_k, from->error_v);
        add_ranks(writer, kind_names[kind], "k.rank", from->rank_k, fit->kv_heads);
        add_ranks(writer, kind_names[kind], "v.rank", from->rank_v, fit->kv_heads);
        add_floats(writer, kind_names[kind], "k.centre.static", from->centre_static, fit->kv_heads, 0, fit->d);
        add_floats(writer, kind_names[kind], "k.centre.cos", from->centre_cos, fit->kv_heads, fit->pairs, fit->d);
        add_floats(writer, kind_names[kind], "k.centre.sin", from->centre_sin, fit->kv_heads, fit->pairs, fit->d);
        add_floats(writer, kind_names[kind], "k.feedback", from->feedback, fit->kv_heads, fit->d, fit->d);
    }
    add_floats(writer, kind_names[FIT_MATRIX], "k.rotation", fit->rotation_k, fit->rotations, fit->d, fit->d);
    add_floats(writer, kind_names[FIT_MATRIX], "v.rotation", fit->rotation_v, fit->rotations, fit->d, fit->d);
    if (fit->pair != NULL)
        tensor_writer_add(writer, "k.centre.pair", OSCAR_TENSOR_I32, 2, (uint64_t[]){fit->kv_heads, fit->pairs},
                          fit->pair);
    return tensor_writer_save(writer, path, cause);
}

static void close_tensors(struct oscar_safetensors **file) { oscar_safetensors_free(*file); }

bool fit_part_good(const char *folder, uint32_t layer, const struct oscar_digest *digest) {
    _cleanup_(close_tensors) struct oscar_safetensors *file = NULL;
    _cleanup_free_ char *path = NULL;
    char hex[2 * OSCAR_DIGEST_BYTES + 1];
    if (part_path(folder, layer, &path, NULL) < 0 || oscar_safetensors_open(path, &file, NULL) < 0)
        return false;
    oscar_digest_hex(digest, hex);
    const char *made_of = oscar_safetensors_metadata(file, "made_of");
    return made_of != NULL && strcmp(made_of, hex) == 0;
}

/* Parts, of this fit or an earlier one, and what a fit that was killed had half written of one. */
static int is_part(const struct dirent *entry) { return fnmatch("layer-*.safetensors*", entry->d_name, 0) == 0; }

void fit_parts_remove(const char *folder) {
    struct dirent **entries = NULL;
    int count = scandir(folder, &entries, is_part, NULL);
    for (int i = 0; i < count; i++) {
        _cleanup_free_ char *path = NULL;
        if (asprintf(&path, "%s/%s", folder, entries[i]->d_name) >= 0)
            (void)unlink(path);
        else
            path = NULL;
        free(entries[i]);
    }
    free(entries);
    (void)rmdir(folder); /* what is not ours in it keeps it */
}

/* --- the calibration file ----------------------------------------------------------------------------------------- */

struct assembly {
    const struct fit_summary *summary;
    struct fit_part *part;
    enum fit_kind k, v;
    struct tensor_writer *writer;
};

static int open_part(const char *folder, uint32_t layer, const struct fit_options *options, struct fit_part *ret,
                     struct oscar_cause *cause) {
    _cleanup_free_ char *path = NULL;
    int r = part_path(folder, layer, &path, cause);
    if (r == 0)
        r = oscar_safetensors_open(path, &ret->file, cause);
    for (enum fit_kind kind = 0; r == 0 && kind < FIT_KINDS; kind++) {
        char key[32];
        if (!options->kinds[kind])
            continue;
        (void)snprintf(key, sizeof(key), "%s.result", kind_names[kind]);
        const char *text = oscar_safetensors_metadata(ret->file, key);
        char *at;
        if (text == NULL)
            return oscar_fail(cause, OSCAR_ERR_CORRUPT, "%s: metadata %s is missing: remove the folder", path, key);
        ret->error[kind].error_k = strtod(text, &at);
        ret->error[kind].error_v = strtod(at, &at);
    }
    return r;
}

/* The mean over the layers. */
static double mean_error(const struct assembly *assembly, enum fit_kind kind, bool k) {
    double sum = 0;
    for (uint32_t i = 0; i < assembly->summary->layers; i++)
        sum += k ? assembly->part[i].error[kind].error_k : assembly->part[i].error[kind].error_v;
    return sum / assembly->summary->layers;
}

static enum fit_kind choose(const struct assembly *assembly, bool k) {
    const struct fit_options *options = assembly->summary->fitter->options;
    if (!options->kinds[FIT_MATRIX] || !options->kinds[FIT_HADAMARD])
        return options->kinds[FIT_MATRIX] ? FIT_MATRIX : FIT_HADAMARD;
    double matrix = mean_error(assembly, FIT_MATRIX, k);
    double hadamard = mean_error(assembly, FIT_HADAMARD, k);
    enum fit_kind choice = hadamard <= HADAMARD_TIE * matrix ? FIT_HADAMARD : FIT_MATRIX;
    say("%c: %s (held-out error of the attention output: matrix %.3g, hadamard %.3g)", k ? 'K' : 'V',
        kind_names[choice], matrix, hadamard);
    return choice;
}

/* One tensor of a part, under its name in the file; without one of that name: nothing. */
static void copy_tensor(struct assembly *assembly, uint32_t layer, const char *from, const char *to) {
    struct oscar_tensor_view view;
    char name[64];
    if (oscar_safetensors_find(assembly->part[layer].file, from, &view) < 0)
        return;
    (void)snprintf(name, sizeof(name), "layers.%" PRIu32 ".%s", layer, to);
    tensor_writer_add(assembly->writer, name, view.type, view.dims, view.shape, view.data);
}

static void add_layer(struct assembly *assembly, uint32_t layer) {
    static const char *const tensors[] = {"k.rotation", "k.centre.static", "k.centre.cos", "k.centre.sin",
                                          "k.feedback", "v.rotation",      "k.rank",       "v.rank"};
    char name[64];
    for (size_t i = 0; i < sizeof(tensors) / sizeof(tensors[0]); i++) {
        enum fit_kind kind = tensors[i][0] == 'k' ? assembly->k : assembly->v;
        (void)snprintf(name, sizeof(name), "%s.%s", kind_names[kind], tensors[i]);
        copy_tensor(assembly, layer, name, tensors[i]);
    }
    copy_tensor(assembly, layer, "k.centre.pair", "k.centre.pair");
}

static bool has_pairs(const struct assembly *assembly) {
    struct oscar_tensor_view view;
    for (uint32_t i = 0; i < assembly->summary->layers; i++)
        if (oscar_safetensors_find(assembly->part[i].file, "k.centre.pair", &view) == 0)
            return true;
    return false;
}

static void describe_errors(const struct assembly *assembly, struct tensor_writer *writer) {
    const struct fit_options *options = assembly->summary->fitter->options;
    for (enum fit_kind kind = 0; kind < FIT_KINDS; kind++) {
        char key[48];
        if (!options->kinds[kind] || assembly->part[0].error[kind].error_k < 0)
            continue;
        (void)snprintf(key, sizeof(key), "oscar.held_out_error.%s", kind_names[kind]);
        tensor_writer_metadata(writer, key, "k %.6g v %.6g", mean_error(assembly, kind, true),
                               mean_error(assembly, kind, false));
    }
}

static int describe(const struct assembly *assembly, struct oscar_cause *cause) {
    const struct fit_summary *summary = assembly->summary;
    const struct fit_options *options = summary->fitter->options;
    const struct activations *activations = summary->fitter->activations;
    struct tensor_writer *writer = assembly->writer;
    const bool matrix = assembly->k == FIT_MATRIX || assembly->v == FIT_MATRIX;
    char clip[192] =
        "ranks of each head by a sweep of 80 to 100 percent in steps of 2: of K against its errors weighed by "
        "what they cost the output, of V against held-out attention output error";
    _cleanup_free_ char *layers = NULL;
    size_t layers_size;
    if (options->clip_given)
        (void)snprintf(clip, sizeof(clip), "ratios K %g, V %g", options->clip_k, options->clip_v);
    tensor_writer_metadata(writer, "oscar.format", "1");
    tensor_writer_metadata(writer, "oscar.model", "%s", summary->model);
    tensor_writer_metadata(writer, "oscar.method", "oscar-calib %s, %s%s, %s rounding of K%s", OSCAR_VERSION_STRING,
                           matrix ? "U H P per " : "hadamard",
                           !matrix              ? ""
                           : options->per_layer ? "layer"
                                                : "head",
                           options->feedback ? "feedback" : "nearest",
                           !options->centre      ? ""
                           : has_pairs(assembly) ? ", turning centre"
                                                 : ", constant centre");
    tensor_writer_metadata(writer, "oscar.layers", "%" PRIu32, summary->layers);
    tensor_writer_metadata(writer, "oscar.kv_heads", "%" PRIu32, activations->kv_heads);
    tensor_writer_metadata(writer, "oscar.head_dim", "%" PRIu32, activations->head_dim);
    tensor_writer_metadata(writer, "oscar.rotation_k", "%s", kind_names[assembly->k]);
    tensor_writer_metadata(writer, "oscar.rotation_v", "%s", kind_names[assembly->v]);
    if (matrix)
        tensor_writer_metadata(writer, "oscar.targets", "k qqt, v %s", options->proxy ? "proxy" : "scores");
    tensor_writer_metadata(writer, "oscar.clip", "%s", clip);
    if (options->feedback)
        tensor_writer_metadata(writer, "oscar.lambda", "%g", options->lambda);
    describe_errors(assembly, writer);
    tensor_writer_metadata(writer, "oscar.samples", "%" PRIu64, summary->tokens);
    tensor_writer_metadata(writer, "oscar.positions", "%" PRIu64, summary->positions);
    tensor_writer_metadata(writer, "oscar.context", "%" PRIu64, options->context);
    tensor_writer_metadata(writer, "oscar.sources", "%s", summary->sources);
    if (options->date != NULL)
        tensor_writer_metadata(writer, "oscar.date", "%s", options->date);
    if (!summary->renumbered)
        return 0;
    FILE *stream = open_memstream(&layers, &layers_size);
    if (stream == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for metadata");
    for (uint32_t i = 0; i < summary->layers; i++)
        (void)fprintf(stream, "%s%" PRIu32, i == 0 ? "" : ",", summary->source_layers[i]);
    if (fclose(stream) != 0)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for metadata");
    tensor_writer_metadata(writer, "oscar.source_layers", "%s", layers);
    return 0;
}

static int assemble(struct assembly *assembly, const char *folder, const char *path, struct oscar_cause *cause) {
    const struct fit_summary *summary = assembly->summary;
    const struct rope *rope = &summary->fitter->rope;
    int r = tensor_writer_new(&assembly->writer, cause);
    for (uint32_t i = 0; r == 0 && i < summary->layers; i++)
        r = open_part(folder, i, summary->fitter->options, &assembly->part[i], cause);
    if (r < 0)
        return r;
    assembly->k = choose(assembly, true);
    assembly->v = choose(assembly, false);
    if ((r = describe(assembly, cause)) < 0)
        return r;
    if (has_pairs(assembly))
        tensor_writer_add(assembly->writer, "rope.omega", OSCAR_TENSOR_F64, 1, (uint64_t[]){rope->pairs}, rope->omega);
    for (uint32_t i = 0; i < summary->layers; i++)
        add_layer(assembly, i);
    return tensor_writer_save(assembly->writer, path, cause);
}

int fit_file_save(const char *folder, const char *path, const struct fit_summary *summary, struct oscar_cause *cause) {
    struct assembly assembly = {.summary = summary};
    assembly.part = calloc(summary->layers, sizeof(*assembly.part));
    int r = assembly.part == NULL
                ? oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for %" PRIu32 " layers", summary->layers)
                : assemble(&assembly, folder, path, cause);
    for (uint32_t i = 0; assembly.part != NULL && i < summary->layers; i++)
        oscar_safetensors_free(assembly.part[i].file);
    tensor_writer_free(assembly.writer);
    free(assembly.part);
    return r;
}
