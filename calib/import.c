/* SPDX-License-Identifier: Apache-2.0 */
/*
 * oscar-calib import: rotations of the published zoo (PyTorch files, a side each, in a folder) as a calibration file. Such a file is
 * a dict with `layers: {id: {rotation}}`; in format 1 a rotation is [d, d], shared by the heads of a layer, in format 2 [heads, d, d].
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "calib/options.h"
#include "calib/progress.h"
#include "calib/rotation_folder.h"
#include "calib/sweep.h"
#include "calib/tensor_writer.h"
#include "calib/torch_file.h"
#include "proto/calibration_verify.h"
#include "proto/cleanup.h"
#include "proto/digest.h"
#include "proto/geometry.h"

#define NAME_BYTES 96U /* of a text of a file that is shown or written */

enum { K, V, SIDES };

static const char side_letter[SIDES] = {'k', 'v'};

/* One side's file. */
struct source {
    char *path;
    void *bytes;
    size_t size;
    struct torch_file *file;
    char model[NAME_BYTES];                              /* as the file says; empty: it does not */
    char objective[NAME_BYTES];                          /* what the rotations were fitted for, likewise */
    const struct pickle_tensor *layer[OSCAR_MAX_LAYERS]; /* by the file's number for it; NULL: it has none */
    bool per_head;                                       /* format 2 */
    uint32_t heads, d;                                   /* rotations a layer: 1 or the model's KV heads */
    float *rotations;                                    /* [layers][heads][d][d] of the calibration */
};

struct import {
    struct source source[SIDES];
    struct oscar_geometry geometry;
    uint32_t number[OSCAR_MAX_LAYERS]; /* of the files' layers, in the order of the calibration's */
    uint32_t layers;
    const char *model;
    int32_t *ranks; /* [SIDES][kv_heads] */
};

/* --- one file ----------------------------------------------------------------------------------------------------- */

static int map_file(struct source *source, struct oscar_cause *cause) {
    struct stat status;
    _cleanup_close_ int fd = open(source->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 || fstat(fd, &status) < 0)
        return oscar_fail(cause, errno == ENOENT ? OSCAR_ERR_NOT_FOUND : OSCAR_ERR_IO, "%m");
    if (!S_ISREG(status.st_mode) || status.st_size == 0)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "empty, or not a regular file");
    void *bytes = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (bytes == MAP_FAILED)
        return oscar_fail(cause, OSCAR_ERR_IO, "mmap: %m");
    source->bytes = bytes;
    source->size = (size_t)status.st_size;
    return 0;
}

static void source_close(struct source *source) {
    torch_file_free(source->file);
    if (source->bytes != NULL)
        (void)munmap(source->bytes, source->size);
    free(source->rotations);
    free(source->path);
}

static int64_t int_of(const struct pickle_value *value, int64_t otherwise) {
    return value != NULL && value->kind == PICKLE_INT ? value->integer : otherwise;
}

/* A text that can be shown, and is empty where there is none. */
static void text_of(const struct pickle_value *value, char ret[NAME_BYTES]) {
    size_t length = 0;
    if (value != NULL && value->kind == PICKLE_TEXT)
        for (; length < NAME_BYTES - 1 && length < value->text.length; length++)
            ret[length] =
                value->text.bytes[length] > 0x20 && value->text.bytes[length] < 0x7f ? value->text.bytes[length] : '?';
    ret[length] = '\0';
}

/* The number of a layer, which is a number or a text; -1 for anything else. */
static int64_t layer_number(const struct pickle_value *key) {
    int64_t number = 0;
    if (key->kind != PICKLE_TEXT)
        return int_of(key, -1);
    if (key->text.length == 0 || key->text.length > 4)
        return -1;
    for (size_t i = 0; i < key->text.length; i++) {
        if (key->text.bytes[i] < '0' || key->text.bytes[i] > '9')
            return -1;
        number = 10 * number + (key->text.bytes[i] - '0');
    }
    return number;
}

/* Its shape must be that of all layers. */
static int take_layer(struct source *source, int64_t number, const struct pickle_value *entry,
                      struct oscar_cause *cause) {
    const struct pickle_value *value = pickle_get(entry, "rotation");
    if (number < 0 || number >= OSCAR_MAX_LAYERS)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "layers: a key that is no layer below %u", OSCAR_MAX_LAYERS);
    if (source->layer[number] != NULL)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "layer %" PRId64 " occurs twice", number);
    if (value == NULL || value->kind != PICKLE_TENSOR)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "layer %" PRId64 " has no tensor `rotation`", number);
    const struct pickle_tensor *tensor = value->tensor;
    const uint32_t dims = tensor->dims;
    if ((dims != 2 && dims != 3) || tensor->shape[dims - 1] != tensor->shape[dims - 2] ||
        tensor->shape[dims - 1] > 256 || (dims == 3 && (tensor->shape[0] < 1 || tensor->shape[0] > OSCAR_MAX_KV_HEADS)))
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "layer %" PRId64 ": rotation is not [d, d] or [heads, d, d]",
                          number);
    const uint32_t heads = dims == 2 ? 1 : (uint32_t)tensor->shape[0], d = (uint32_t)tensor->shape[dims - 1];
    if (source->d != 0 && (source->d != d || source->heads != heads || source->per_head != (dims == 3)))
        return oscar_fail(cause, OSCAR_ERR_CORRUPT,
                          "layer %" PRId64 ": %" PRIu32 " rotations of %" PRIu32 " dims, others have %" PRIu32
                          " of %" PRIu32,
                          number, heads, d, source->heads, source->d);
    source->per_head = dims == 3;
    source->heads = heads;
    source->d = d;
    source->layer[number] = tensor;
    return 0;
}

static int read_layers(struct source *source, struct oscar_cause *cause) {
    const struct pickle_value *root = torch_file_root(source->file), *layers = pickle_get(root, "layers");
    int64_t format = int_of(pickle_get(root, "format_version"), 1);
    text_of(pickle_get(root, "objective"), source->objective);
    if (format != 1 && format != 2)
        return oscar_fail(cause, OSCAR_ERR_UNSUPPORTED, "format_version %" PRId64 ": expected 1 or 2", format);
    if (layers == NULL || layers->kind != PICKLE_DICT || layers->items.count == 0)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "no dict `layers`: not a file of rotations");
    int r = 0;
    for (size_t i = 0; r == 0 && i < layers->items.count; i += 2)
        r = take_layer(source, layer_number(layers->items.at[i]), layers->items.at[i + 1], cause);
    return r;
}

/* The published names of what a rotation is fitted for say of which side it is. */
static int check_side(const struct source *source, unsigned side, struct oscar_cause *cause) {
    static const struct {
        const char *begin;
        unsigned side;
    } targets[] = {{"qqt", K}, {"ktk", K}, {"sst", V}, {"vtv", V}};
    for (size_t i = 0; i < sizeof(targets) / sizeof(targets[0]); i++)
        if (targets[i].side != side && strncmp(source->objective, targets[i].begin, 3) == 0)
            return oscar_fail(cause, OSCAR_ERR_INVALID, "objective %s is of %c alone: name both files by --k and --v",
                              source->objective, targets[i].side == K ? 'K' : 'V');
    return 0;
}

static int open_source(struct source *source, unsigned side, struct oscar_cause *cause) {
    struct oscar_cause inner = {0};
    int r = map_file(source, &inner);
    if (r == 0)
        r = torch_file_parse(source->bytes, source->size, &source->file, &inner);
    if (r == 0)
        r = read_layers(source, &inner);
    if (r == 0)
        r = check_side(source, side, &inner);
    return r < 0 ? oscar_fail(cause, r, "%.80s: %.170s", source->path, inner.text) : 0;
}

/* --- what the calibration is for ------------------------------------------------------------------------------------ */

static bool in_both(const struct import *import, uint32_t number) {
    return import->source[K].layer[number] != NULL && import->source[V].layer[number] != NULL;
}

/* All layers. A hole is an error: who means it (a model some of whose layers have no KV cache) says so by --layers. */
static int all_layers(struct import *import, struct oscar_cause *cause) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < OSCAR_MAX_LAYERS; i++)
        if (import->source[K].layer[i] != NULL || import->source[V].layer[i] != NULL)
            count = i + 1;
    for (uint32_t i = 0; i < count; i++) {
        if (!in_both(import, i))
            return oscar_fail(cause, OSCAR_ERR_NOT_FOUND,
                              "layer %" PRIu32 " of %" PRIu32 " is missing: name those that the file is to hold by "
                              "--layers",
                              i, count);
        import->number[i] = i;
    }
    import->layers = count;
    return 0;
}

static int listed_layers(struct import *import, const char *list, struct oscar_cause *cause) {
    for (const char *at = list;; at++) {
        char *end;
        errno = 0;
        unsigned long number = strtoul(at, &end, 10);
        if (errno != 0 || *at < '0' || *at > '9' || (*end != ',' && *end != '\0') || import->layers == OSCAR_MAX_LAYERS)
            return oscar_fail(cause, OSCAR_ERR_INVALID, "--layers %s: not a list of layers with commas between", list);
        if (number >= OSCAR_MAX_LAYERS || !in_both(import, (uint32_t)number))
            return oscar_fail(cause, OSCAR_ERR_NOT_FOUND, "--layers %s: layer %lu is missing", list, number);
        import->number[import->layers++] = (uint32_t)number;
        if (*end == '\0')
            return 0;
        at = end;
    }
}

/* Rotations of format 1 do not show the number of heads; newer files tell it beside them. */
static int find_heads(struct import *import, uint32_t given, struct oscar_cause *cause) {
    uint32_t heads = given;
    for (unsigned side = 0; side < SIDES; side++) {
        const struct source *source = &import->source[side];
        const struct pickle_value *root = torch_file_root(source->file);
        int64_t told = int_of(pickle_get(pickle_get(root, "calibration"), "global_kv_heads"), 0);
        if (source->per_head)
            told = source->heads;
        if (told < 0 || told > OSCAR_MAX_KV_HEADS || (told > 0 && heads > 0 && told != heads))
            return oscar_fail(cause, OSCAR_ERR_INVALID, "%.80s is of a model with %" PRId64 " KV heads, not %" PRIu32,
                              source->path, told, heads);
        if (told > 0)
            heads = (uint32_t)told;
    }
    if (heads == 0)
        return oscar_fail(cause, OSCAR_ERR_INVALID, "these files do not say how many KV heads there are: --kv-heads N");
    import->geometry.kv_heads = heads;
    return 0;
}

static int find_model(struct import *import, const char *given, struct oscar_cause *cause) {
    for (unsigned side = 0; side < SIDES; side++)
        text_of(pickle_get(pickle_get(torch_file_root(import->source[side].file), "calibration"), "model_path"),
                import->source[side].model);
    const char *k = import->source[K].model, *v = import->source[V].model;
    if (k[0] != '\0' && v[0] != '\0' && strcmp(k, v) != 0)
        return oscar_fail(cause, OSCAR_ERR_INVALID, "K's rotations are of model %s, V's of %s", k, v);
    import->model = given != NULL ? given : k[0] != '\0' ? k : v;
    if (import->model[0] == '\0')
        return oscar_fail(cause, OSCAR_ERR_INVALID, "these files do not say of which model they are: --model NAME");
    return 0;
}

static int find_shape(struct import *import, const struct calib_options *options, struct oscar_cause *cause) {
    const struct source *k = &import->source[K], *v = &import->source[V];
    if (k->d != v->d)
        return oscar_fail(cause, OSCAR_ERR_INVALID, "K has %" PRIu32 " dims, V %" PRIu32, k->d, v->d);
    int r = options->fit.layers != NULL ? listed_layers(import, options->fit.layers, cause) : all_layers(import, cause);
    if (r == 0)
        r = find_heads(import, options->kv_heads, cause);
    if (r == 0)
        r = find_model(import, options->fit.model, cause);
    if (r < 0)
        return r;
    import->geometry = (struct oscar_geometry){.layers = import->layers,
                                               .query_heads = import->geometry.kv_heads,
                                               .kv_heads = import->geometry.kv_heads,
                                               .head_dim = k->d,
                                               .dtype = OSCAR_BF16,
                                               .page_tokens = OSCAR_PAGE_TOKENS,
                                               .sink_tokens = OSCAR_SINK_TOKENS,
                                               .recent_tokens = OSCAR_RECENT_TOKENS};
    return oscar_geometry_check(&import->geometry, cause);
}

/* --- the numbers ---------------------------------------------------------------------------------------------------- */

static int read_rotations(struct import *import, struct source *source, struct oscar_cause *cause) {
    const size_t elements = (size_t)source->heads * source->d * source->d;
    source->rotations = calloc(import->layers, elements * sizeof(*source->rotations));
    if (source->rotations == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for %" PRIu32 " layers", import->layers);
    for (uint32_t i = 0; i < import->layers; i++) {
        struct oscar_cause inner = {0};
        int r = torch_file_read(source->file, source->layer[import->number[i]], source->rotations + i * elements,
                                elements, &inner);
        if (r < 0)
            return oscar_fail(cause, r, "%.80s: layer %" PRIu32 ": %.150s", source->path, import->number[i],
                              inner.text);
    }
    return 0;
}

/* Finite and orthogonal, by the daemon's own check. */
static int verify(const struct import *import, struct oscar_cause *cause) {
    const uint32_t heads = import->geometry.kv_heads, d = import->geometry.head_dim;
    const size_t matrix = (size_t)d * d;
    _cleanup_free_ struct oscar_head_calibration *views = calloc((size_t)import->layers * heads, sizeof(*views));
    if (views == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for %" PRIu32 " layers", import->layers);
    for (uint32_t layer = 0; layer < import->layers; layer++)
        for (uint32_t h = 0; h < heads; h++) {
            const float *rotation[SIDES];
            for (unsigned side = 0; side < SIDES; side++) {
                const struct source *source = &import->source[side];
                rotation[side] =
                    source->rotations + ((size_t)layer * source->heads + (source->heads > 1 ? h : 0)) * matrix;
            }
            views[(size_t)layer * heads + h] =
                (struct oscar_head_calibration){.rotation_k = rotation[K], .rotation_v = rotation[V]};
        }
    return oscar_calibration_verify(&(struct oscar_calibration){.layers = import->layers,
                                                                .kv_heads = heads,
                                                                .head_dim = d,
                                                                .rotation_k = OSCAR_ROTATION_MATRIX,
                                                                .rotation_v = OSCAR_ROTATION_MATRIX,
                                                                .heads = views},
                                    cause);
}

/* --- the file ------------------------------------------------------------------------------------------------------- */

static const char *base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash != NULL ? slash + 1 : path;
}

static void describe(const struct import *import, const struct calib_options *options, double clip_k, double clip_v,
                     struct tensor_writer *writer) {
    const struct source *k = &import->source[K], *v = &import->source[V];
    struct oscar_digest digest;
    char hex[SIDES][2 * OSCAR_DIGEST_BYTES + 1];
    for (unsigned side = 0; side < SIDES; side++) {
        oscar_content_digest(import->source[side].bytes, import->source[side].size, &digest);
        oscar_digest_hex(&digest, hex[side]);
    }
    tensor_writer_metadata(writer, "oscar.format", "1");
    tensor_writer_metadata(writer, "oscar.model", "%s", import->model);
    tensor_writer_metadata(writer, "oscar.method",
                           "oscar-calib %s, imported from PyTorch, K per %s, V per %s, nearest "
                           "rounding of K",
                           OSCAR_VERSION_STRING, k->per_head ? "head" : "layer", v->per_head ? "head" : "layer");
    tensor_writer_metadata(writer, "oscar.layers", "%" PRIu32, import->layers);
    tensor_writer_metadata(writer, "oscar.kv_heads", "%" PRIu32, import->geometry.kv_heads);
    tensor_writer_metadata(writer, "oscar.head_dim", "%" PRIu32, import->geometry.head_dim);
    tensor_writer_metadata(writer, "oscar.rotation_k", "matrix");
    tensor_writer_metadata(writer, "oscar.rotation_v", "matrix");
    tensor_writer_metadata(writer, "oscar.targets", "k %s, v %s", k->objective[0] != '\0' ? k->objective : "unknown",
                           v->objective[0] != '\0' ? v->objective : "unknown");
    tensor_writer_metadata(writer, "oscar.clip", "ratios K %g, V %g", clip_k, clip_v);
    tensor_writer_metadata(writer, "oscar.sources", "%s %s\n%s %s", base_name(k->path), hex[K], base_name(v->path),
                           hex[V]);
    if (options->fit.date != NULL)
        tensor_writer_metadata(writer, "oscar.date", "%s", options->fit.date);
    if (options->fit.layers != NULL)
        tensor_writer_metadata(writer, "oscar.source_layers", "%s", options->fit.layers);
}

static void add_layer(const struct import *import, uint32_t layer, struct tensor_writer *writer) {
    const uint32_t heads = import->geometry.kv_heads;
    for (unsigned side = 0; side < SIDES; side++) {
        const struct source *source = &import->source[side];
        const uint64_t d = source->d;
        char name[64];
        (void)snprintf(name, sizeof(name), "layers.%" PRIu32 ".%c.rotation", layer, side_letter[side]);
        tensor_writer_add(writer, name, OSCAR_TENSOR_F32, 3, (uint64_t[]){source->heads, d, d},
                          source->rotations + (size_t)layer * source->heads * d * d);
        (void)snprintf(name, sizeof(name), "layers.%" PRIu32 ".%c.rank", layer, side_letter[side]);
        tensor_writer_add(writer, name, OSCAR_TENSOR_I32, 1, (uint64_t[]){heads}, import->ranks + (size_t)side * heads);
    }
}

static int save(struct import *import, const struct calib_options *options, struct oscar_cause *cause) {
    const uint32_t heads = import->geometry.kv_heads;
    const double clip_k = options->fit.clip_given ? options->fit.clip_k : 0.96;
    const double clip_v = options->fit.clip_given ? options->fit.clip_v : 0.92;
    _cleanup_(tensor_writer_cleanup) struct tensor_writer *writer = NULL;
    import->ranks = calloc((size_t)SIDES * heads, sizeof(*import->ranks));
    if (import->ranks == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for ranks");
    for (uint32_t h = 0; h < heads; h++) {
        import->ranks[h] = (int32_t)sweep_rank(clip_k, import->geometry.head_dim);
        import->ranks[heads + h] = (int32_t)sweep_rank(clip_v, import->geometry.head_dim);
    }
    int r = tensor_writer_new(&writer, cause);
    if (r < 0)
        return r;
    describe(import, options, clip_k, clip_v, writer);
    for (uint32_t layer = 0; layer < import->layers; layer++)
        add_layer(import, layer, writer);
    return tensor_writer_save(writer, options->output, cause);
}

static void import_free(struct import **import) {
    if (*import == NULL)
        return;
    for (unsigned side = 0; side < SIDES; side++)
        source_close(&(*import)->source[side]);
    free((*import)->ranks);
    free(*import);
}

/* Both sides by --k and --v, a folder that holds a file of each, or one file for both. */
static int find_files(struct import *import, const struct calib_options *options, struct oscar_cause *cause) {
    const char *const given[SIDES] = {options->k_file, options->v_file};
    for (unsigned side = 0; side < SIDES; side++) {
        struct source *source = &import->source[side];
        const char *path = given[side] != NULL ? given[side] : options->arguments[0];
        if (given[side] == NULL && rotation_folder_is(path)) {
            int r = rotation_folder_find(path, side_letter[side], &source->path, cause);
            if (r < 0)
                return r;
        } else if ((source->path = strdup(path)) == NULL) {
            return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a name");
        }
    }
    return 0;
}

int calib_import(const struct calib_options *options, struct oscar_cause *cause) {
    _cleanup_(import_free) struct import *import = calloc(1, sizeof(*import));
    if (import == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for an import");
    int r = find_files(import, options, cause);
    for (unsigned side = 0; r == 0 && side < SIDES; side++)
        r = open_source(&import->source[side], side, cause);
    if (r == 0)
        r = find_shape(import, options, cause);
    for (unsigned side = 0; r == 0 && side < SIDES; side++)
        r = read_rotations(import, &import->source[side], cause);
    if (r == 0)
        r = verify(import, cause);
    if (r == 0)
        r = save(import, options, cause);
    if (r < 0)
        return r;
    say("wrote %s: %" PRIu32 " layers, %" PRIu32 " KV heads, head size %" PRIu32, options->output, import->layers,
        import->geometry.kv_heads, import->geometry.head_dim);
    return 0;
}
