/* SPDX-License-Identifier: Apache-2.0 */
#include "calib/activations.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "proto/cleanup.h"
#include "proto/geometry.h"
#include "proto/half.h"

struct activation_file {
    char *path;
    void *bytes;
    size_t size;
    struct oscar_safetensors *tensors;
    uint64_t first_position;
};

static const char part_letters[ACTIVATION_PARTS] = {'q', 'k', 'v'};

static void file_free(struct activation_file *file) {
    if (file == NULL)
        return;
    oscar_safetensors_free(file->tensors);
    if (file->bytes != NULL)
        (void)munmap(file->bytes, file->size);
    free(file->path);
    free(file);
}

void activations_free(struct activations *activations) {
    if (activations == NULL)
        return;
    for (size_t i = 0; i < activations->layers; i++) {
        free(activations->layer[i].sequence);
        free(activations->layer[i].segment);
    }
    free(activations->layer);
    for (size_t i = 0; i < activations->files; i++)
        file_free(activations->file[i]);
    free(activations->file);
    free(activations);
}

void activations_cleanup(struct activations **activations) { activations_free(*activations); }

const char *activation_file_name(const struct activation_file *file) {
    const char *slash = strrchr(file->path, '/');
    return slash != NULL ? slash + 1 : file->path;
}

void activation_file_digest(const struct activation_file *file, struct oscar_digest *ret) {
    oscar_content_digest(file->bytes, file->size, ret);
}

/* --- opening files ------------------------------------------------------------------------------------------------ */

static int read_count(const struct activation_file *file, const char *key, uint64_t most, uint64_t *ret,
                      struct oscar_cause *cause) {
    const char *text = oscar_safetensors_metadata(file->tensors, key);
    if (text == NULL)
        return 0;
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || text[0] == '-' || value > most)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT,
                          "%s: metadata %s is \"%.40s\": expected a count of at most %" PRIu64, file->path, key, text,
                          most);
    *ret = value;
    return 0;
}

static int read_number(const struct activation_file *file, const char *key, double *ret, struct oscar_cause *cause) {
    const char *text = oscar_safetensors_metadata(file->tensors, key);
    if (text == NULL)
        return 0;
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end != '\0' || !(value > 0 && value < 1e30))
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "%s: metadata %s is \"%.40s\": expected a positive number",
                          file->path, key, text);
    *ret = value;
    return 0;
}

static int map_file(struct activation_file *file, struct oscar_cause *cause) {
    _cleanup_close_ int fd = open(file->path, O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (fd < 0 || fstat(fd, &status) < 0)
        return oscar_fail(cause, errno == ENOENT ? OSCAR_ERR_NOT_FOUND : OSCAR_ERR_IO, "cannot read %s: %m",
                          file->path);
    if (!S_ISREG(status.st_mode) || status.st_size == 0)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT, "%s: not a safetensors file: %s", file->path,
                          S_ISREG(status.st_mode) ? "it is empty" : "not a regular file");
    void *bytes = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (bytes == MAP_FAILED)
        return oscar_fail(cause, OSCAR_ERR_IO, "cannot map %s: %m", file->path);
    file->bytes = bytes;
    file->size = (size_t)status.st_size;
    return 0;
}

static int open_file(const char *path, struct activation_file **ret, struct oscar_cause *cause) {
    struct oscar_cause inner = {0};
    struct activation_file *file = calloc(1, sizeof(*file));
    if (file == NULL || (file->path = strdup(path)) == NULL) {
        file_free(file);
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for %s", path);
    }
    int r = map_file(file, cause);
    if (r == 0 && (r = oscar_safetensors_parse(file->bytes, file->size, &file->tensors, &inner)) < 0)
        (void)oscar_fail(cause, r, "%s: %s", path, inner.text);
    if (r == 0)
        r = read_count(file, "first_position", OSCAR_MAX_SEQUENCE_TOKENS, &file->first_position, cause);
    if (r < 0) {
        file_free(file);
        return r;
    }
    *ret = file;
    return 0;
}

static int add_file(struct activations *activations, const char *path, struct oscar_cause *cause) {
    struct activation_file **files =
        reallocarray(activations->file, activations->files + 1, sizeof(struct activation_file *));
    if (files == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for %s", path);
    activations->file = files;
    int r = open_file(path, &files[activations->files], cause);
    if (r == 0)
        activations->files++;
    return r;
}

static int is_tensor_file(const struct dirent *entry) {
    static const char suffix[] = ".safetensors";
    size_t length = strlen(entry->d_name);
    return entry->d_name[0] != '.' && length > sizeof(suffix) - 1 &&
           strcmp(entry->d_name + length - (sizeof(suffix) - 1), suffix) == 0;
}

/* By bytes, not by the locale: the order is part of the result. */
static int compare_entries(const struct dirent **left, const struct dirent **right) {
    return strcmp((*left)->d_name, (*right)->d_name);
}

static int add_folder(struct activations *activations, const char *path, struct oscar_cause *cause) {
    struct dirent **entries = NULL;
    int count = scandir(path, &entries, is_tensor_file, compare_entries);
    if (count < 0)
        return oscar_fail(cause, OSCAR_ERR_IO, "cannot read the folder %s: %m", path);
    int r = 0;
    if (count == 0)
        r = oscar_fail(cause, OSCAR_ERR_NOT_FOUND, "the folder %s holds no .safetensors file", path);
    for (int i = 0; i < count; i++) {
        _cleanup_free_ char *file = NULL;
        if (r == 0 && asprintf(&file, "%s/%s", path, entries[i]->d_name) < 0) {
            file = NULL;
            r = oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for %s", path);
        }
        if (r == 0)
            r = add_file(activations, file, cause);
        free(entries[i]);
    }
    free(entries);
    return r;
}

/* --- what the files hold ------------------------------------------------------------------------------------------ */

static int check_tensor(const struct activation_file *file, uint32_t layer, enum activation part,
                        const struct oscar_tensor_view *view, struct oscar_cause *cause) {
    if (view->dims != 3 || view->elements == 0)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT,
                          "%s: tensor layers.%" PRIu32 ".%c: expected the shape [token, head, dim], none of them 0",
                          file->path, layer, part_letters[part]);
    if (view->type != OSCAR_TENSOR_F16 && view->type != OSCAR_TENSOR_BF16 && view->type != OSCAR_TENSOR_F32)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT,
                          "%s: tensor layers.%" PRIu32 ".%c: expected F16, BF16 or F32, found %s", file->path, layer,
                          part_letters[part], oscar_tensor_type_name(view->type));
    return 0;
}

/* The model's shape is that of the first layer found; the others must have it. */
static int check_shape(struct activations *activations, const struct activation_file *file, uint32_t layer,
                       const struct segment *segment, struct oscar_cause *cause) {
    const struct oscar_tensor_view *q = &segment->view[ACTIVATION_Q];
    const struct oscar_tensor_view *k = &segment->view[ACTIVATION_K];
    for (enum activation part = 0; part < ACTIVATION_PARTS; part++) {
        const struct oscar_tensor_view *view = &segment->view[part];
        if (view->shape[0] != k->shape[0] || view->shape[2] != k->shape[2] ||
            (part == ACTIVATION_V && view->shape[1] != k->shape[1]))
            return oscar_fail(cause, OSCAR_ERR_GEOMETRY,
                              "%s: tensor layers.%" PRIu32 ".%c has the shape [%" PRIu64 ", %" PRIu64 ", %" PRIu64
                              "], k has [%" PRIu64 ", %" PRIu64 ", %" PRIu64 "]",
                              file->path, layer, part_letters[part], view->shape[0], view->shape[1], view->shape[2],
                              k->shape[0], k->shape[1], k->shape[2]);
    }
    if (q->shape[1] % k->shape[1] != 0)
        return oscar_fail(cause, OSCAR_ERR_GEOMETRY,
                          "%s: layer %" PRIu32 ": %" PRIu64 " query heads are not a multiple of %" PRIu64 " KV heads",
                          file->path, layer, q->shape[1], k->shape[1]);
    if (activations->head_dim == 0) {
        struct oscar_cause inner = {0};
        struct oscar_geometry geometry = {
            .layers = 1,
            .query_heads = q->shape[1] < UINT32_MAX ? (uint32_t)q->shape[1] : UINT32_MAX,
            .kv_heads = k->shape[1] < UINT32_MAX ? (uint32_t)k->shape[1] : UINT32_MAX,
            .head_dim = k->shape[2] < UINT32_MAX ? (uint32_t)k->shape[2] : UINT32_MAX,
            .dtype = OSCAR_BF16,
            .page_tokens = OSCAR_PAGE_TOKENS,
            .sink_tokens = OSCAR_SINK_TOKENS,
            .recent_tokens = OSCAR_RECENT_TOKENS,
        };
        if (oscar_geometry_check(&geometry, &inner) < 0)
            return oscar_fail(cause, OSCAR_ERR_GEOMETRY, "%s: layer %" PRIu32 ": %s", file->path, layer, inner.text);
        activations->query_heads = geometry.query_heads;
        activations->kv_heads = geometry.kv_heads;
        activations->head_dim = geometry.head_dim;
    }
    if (q->shape[1] != activations->query_heads || k->shape[1] != activations->kv_heads ||
        k->shape[2] != activations->head_dim)
        return oscar_fail(cause, OSCAR_ERR_GEOMETRY,
                          "%s: layer %" PRIu32 " has %" PRIu64 " query heads, %" PRIu64
                          " KV heads and head size %" PRIu64 "; others have %" PRIu32 ", %" PRIu32 " and %" PRIu32,
                          file->path, layer, q->shape[1], k->shape[1], k->shape[2], activations->query_heads,
                          activations->kv_heads, activations->head_dim);
    if (segment->tokens > OSCAR_MAX_SEQUENCE_TOKENS - segment->first_position)
        return oscar_fail(cause, OSCAR_ERR_CORRUPT,
                          "%s: layer %" PRIu32 " has %" PRIu64 " tokens from position %" PRIu64
                          ": a sequence has at most %u",
                          file->path, layer, segment->tokens, segment->first_position, OSCAR_MAX_SEQUENCE_TOKENS);
    return 0;
}

/* Where the layer stands, or is to stand. */
static size_t place_of(const struct activations *activations, uint32_t layer) {
    size_t low = 0;
    size_t high = activations->layers;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (activations->layer[middle].layer < layer)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

const struct layer_activations *activations_layer(const struct activations *activations, uint32_t layer) {
    size_t at = place_of(activations, layer);
    return at < activations->layers && activations->layer[at].layer == layer ? &activations->layer[at] : NULL;
}

static int add_segment(struct activations *activations, uint32_t number, const struct segment *segment,
                       struct oscar_cause *cause) {
    size_t at = place_of(activations, number);
    if (at == activations->layers || activations->layer[at].layer != number) {
        struct layer_activations *layers =
            reallocarray(activations->layer, activations->layers + 1, sizeof(*activations->layer));
        if (layers == NULL)
            return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for %zu layers", activations->layers + 1);
        activations->layer = layers;
        memmove(&layers[at + 1], &layers[at], (activations->layers - at) * sizeof(*layers));
        layers[at] = (struct layer_activations){.layer = number};
        activations->layers++;
    }
    struct layer_activations *layer = &activations->layer[at];
    struct segment *segments = reallocarray(layer->segment, layer->segments + 1, sizeof(*layer->segment));
    if (segments == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for layer %" PRIu32, number);
    layer->segment = segments;
    segments[layer->segments++] = *segment;
    return 0;
}

/* "layers.N.k" and nothing after it: each layer of a file is found once, by its k. */
static bool names_a_layer(const char *name, uint32_t *ret) {
    if (strncmp(name, "layers.", 7) != 0 || name[7] < '0' || name[7] > '9')
        return false;
    char *end;
    unsigned long layer = strtoul(name + 7, &end, 10);
    if (end[0] != '.' || strchr("qkv", end[1]) == NULL || end[1] == '\0' || end[2] != '\0' || layer >= OSCAR_MAX_LAYERS)
        return false;
    *ret = (uint32_t)layer;
    return true;
}

static int take_layer(struct activations *activations, const struct activation_file *file, uint32_t layer,
                      struct oscar_cause *cause) {
    struct segment segment = {.file = file, .first_position = file->first_position};
    int r;
    for (enum activation part = 0; part < ACTIVATION_PARTS; part++) {
        char name[32];
        (void)snprintf(name, sizeof(name), "layers.%" PRIu32 ".%c", layer, part_letters[part]);
        if (oscar_safetensors_find(file->tensors, name, &segment.view[part]) < 0)
            return oscar_fail(cause, OSCAR_ERR_NOT_FOUND,
                              "%s: tensor %s is missing: a file holds q, k and v of each of its layers", file->path,
                              name);
        if ((r = check_tensor(file, layer, part, &segment.view[part], cause)) < 0)
            return r;
    }
    segment.tokens = segment.view[ACTIVATION_K].shape[0];
    r = check_shape(activations, file, layer, &segment, cause);
    return r < 0 ? r : add_segment(activations, layer, &segment, cause);
}

static int take_layers(struct activations *activations, const struct activation_file *file, struct oscar_cause *cause) {
    bool seen[OSCAR_MAX_LAYERS] = {false};
    const char *name;
    int r;
    for (size_t i = 0; (name = oscar_safetensors_name(file->tensors, i)) != NULL; i++) {
        uint32_t layer = 0;
        if (!names_a_layer(name, &layer) || seen[layer])
            continue;
        seen[layer] = true;
        if ((r = take_layer(activations, file, layer, cause)) < 0)
            return r;
    }
    return 0;
}

/* What files say about the model: each key by the first file that has it. */
static int take_metadata(struct activations *activations, const struct activation_file *file,
                         struct oscar_cause *cause) {
    struct oscar_tensor_view omega;
    uint64_t layers = 0;
    uint64_t dims = 0;
    int r;
    if (activations->model == NULL)
        activations->model = oscar_safetensors_metadata(file->tensors, "model");
    if (activations->model_layers == 0) {
        if ((r = read_count(file, "model_layers", OSCAR_MAX_LAYERS, &layers, cause)) < 0)
            return r;
        activations->model_layers = (uint32_t)layers;
    }
    if (activations->softmax_scale == 0 &&
        (r = read_number(file, "softmax_scale", &activations->softmax_scale, cause)) < 0)
        return r;
    if (activations->rope.base == 0 && (r = read_number(file, "rope_base", &activations->rope.base, cause)) < 0)
        return r;
    if (activations->rope.dims == 0) {
        if ((r = read_count(file, "rope_dims", UINT64_C(2) * ROPE_MAX_PAIRS, &dims, cause)) < 0)
            return r;
        activations->rope.dims = (uint32_t)dims;
    }
    const char *pairing = oscar_safetensors_metadata(file->tensors, "rope_pairs");
    if (activations->rope.pairing == ROPE_UNKNOWN && pairing != NULL &&
        !rope_read_pairing(pairing, &activations->rope.pairing))
        return oscar_fail(cause, OSCAR_ERR_CORRUPT,
                          "%s: metadata rope_pairs is \"%.40s\": expected halves, interleaved or none", file->path,
                          pairing);
    if (activations->omega == NULL && oscar_safetensors_find(file->tensors, "rope.omega", &omega) == 0) {
        if (omega.type != OSCAR_TENSOR_F64 || omega.dims != 1 || (uintptr_t)omega.data % sizeof(double) != 0)
            return oscar_fail(cause, OSCAR_ERR_CORRUPT, "%s: tensor rope.omega: expected F64 [pairs], aligned",
                              file->path);
        activations->omega = omega.data;
        activations->omegas = omega.elements;
    }
    return 0;
}

/* Joins segments to sequences. */
static int chain(struct layer_activations *layer, struct oscar_cause *cause) {
    layer->sequence = calloc(layer->segments, sizeof(*layer->sequence));
    if (layer->sequence == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for layer %" PRIu32, layer->layer);
    struct sequence *last = NULL;
    for (size_t i = 0; i < layer->segments; i++) {
        const struct segment *segment = &layer->segment[i];
        if (last == NULL || segment->first_position == 0 ||
            segment->first_position != last->first_position + last->tokens) {
            last = &layer->sequence[layer->sequences++];
            *last = (struct sequence){.first_position = segment->first_position, .segment = segment};
        }
        last->tokens += segment->tokens;
        last->segments++;
    }
    return 0;
}

int activations_open(const char *const *paths, size_t count, struct activations **ret, struct oscar_cause *cause) {
    _cleanup_(activations_cleanup) struct activations *activations = calloc(1, sizeof(*activations));
    struct stat status;
    int r = 0;
    if (activations == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a capture");
    for (size_t i = 0; r == 0 && i < count; i++) {
        bool folder = stat(paths[i], &status) == 0 && S_ISDIR(status.st_mode);
        r = folder ? add_folder(activations, paths[i], cause) : add_file(activations, paths[i], cause);
    }
    for (size_t i = 0; r == 0 && i < activations->files; i++) {
        r = take_metadata(activations, activations->file[i], cause);
        if (r == 0)
            r = take_layers(activations, activations->file[i], cause);
    }
    if (r == 0 && activations->layers == 0)
        r = oscar_fail(cause, OSCAR_ERR_NOT_FOUND, "%s%s: no tensor layers.N.k, so this is no capture",
                       count > 0 ? paths[0] : "", count > 1 ? " and the others" : "");
    for (size_t i = 0; r == 0 && i < activations->layers; i++)
        r = chain(&activations->layer[i], cause);
    if (r < 0)
        return r;
    *ret = TAKE_PTR(activations);
    return 0;
}

uint64_t activations_positions(const struct layer_activations *layer) {
    uint64_t most = 0;
    for (size_t i = 0; i < layer->sequences; i++) {
        uint64_t end = layer->sequence[i].first_position + layer->sequence[i].tokens;
        most = end > most ? end : most;
    }
    return most;
}

uint64_t activations_tokens(const struct layer_activations *layer) {
    uint64_t tokens = 0;
    for (size_t i = 0; i < layer->sequences; i++)
        tokens += layer->sequence[i].tokens;
    return tokens;
}

/* --- reading rows ------------------------------------------------------------------------------------------------- */

#define MAX_DIM 256U

/* Each of these converts a row and returns the largest exponent field in it: all ones are NaN or infinity. The bits decide,
 * whatever the compiler assumes about arithmetic. */
static bool read_bfloats(const void *from, uint32_t d, float *ret) {
    uint16_t bits[MAX_DIM];
    uint16_t most = 0;
    memcpy(bits, from, d * sizeof(bits[0]));
    for (uint32_t i = 0; i < d; i++) {
        uint16_t exponent = bits[i] & 0x7f80U;
        most = exponent > most ? exponent : most;
        ret[i] = oscar_float_from_bfloat(bits[i]);
    }
    return most != 0x7f80U;
}

static bool read_halves(const void *from, uint32_t d, float *ret) {
    uint16_t bits[MAX_DIM];
    uint16_t most = 0;
    memcpy(bits, from, d * sizeof(bits[0]));
    for (uint32_t i = 0; i < d; i++) {
        uint16_t exponent = bits[i] & 0x7c00U;
        most = exponent > most ? exponent : most;
        /* The half's exponent in a float's place is 112 too small; subnormals come out right, too. */
        float magnitude = oscar_bits_float((uint32_t)(bits[i] & 0x7fffU) << 13) * 0x1p112F;
        ret[i] = oscar_bits_float(oscar_float_bits(magnitude) | (uint32_t)(bits[i] & 0x8000U) << 16);
    }
    return most != 0x7c00U;
}

static bool read_floats(const void *from, uint32_t d, float *ret) {
    uint32_t most = 0;
    memcpy(ret, from, d * sizeof(*ret));
    for (uint32_t i = 0; i < d; i++) {
        uint32_t exponent = oscar_float_bits(ret[i]) & 0x7f800000U;
        most = exponent > most ? exponent : most;
    }
    return most != 0x7f800000U;
}

static int not_finite(const struct layer_activations *layer, const struct segment *segment, enum activation part,
                      uint64_t token, uint32_t head, struct oscar_cause *cause) {
    return oscar_fail(cause, OSCAR_ERR_NOT_FINITE,
                      "%s: tensor layers.%" PRIu32 ".%c: token %" PRIu64 ", head %" PRIu32 " holds a NaN or infinity",
                      segment->file->path, layer->layer, part_letters[part], token, head);
}

int activations_read(const struct activations *activations, const struct layer_activations *layer,
                     const struct sequence *sequence, enum activation part, uint32_t head, uint64_t from,
                     uint64_t count, float *ret, size_t stride, struct oscar_cause *cause) {
    const uint32_t d = activations->head_dim;
    const uint32_t heads = part == ACTIVATION_Q ? activations->query_heads : activations->kv_heads;
    const struct segment *segment = sequence->segment;
    uint64_t token = from; /* of the segment */
    for (; token >= segment->tokens; segment++)
        token -= segment->tokens;
    for (uint64_t i = 0; i < count; i++, token++) {
        if (token == segment->tokens) {
            segment++;
            token = 0;
        }
        const struct oscar_tensor_view *view = &segment->view[part];
        const uint8_t *row =
            (const uint8_t *)view->data + (token * heads + head) * d * oscar_tensor_type_bytes(view->type);
        float *to = ret + i * stride;
        bool finite = view->type == OSCAR_TENSOR_BF16  ? read_bfloats(row, d, to)
                      : view->type == OSCAR_TENSOR_F16 ? read_halves(row, d, to)
                                                       : read_floats(row, d, to);
        if (!finite)
            return not_finite(layer, segment, part, token, head, cause);
    }
    return 0;
}
