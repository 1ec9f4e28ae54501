/* SPDX-License-Identifier: Apache-2.0 */
/* A calibration's structure: metadata, tensors, and one view a head. The numbers themselves: calibration_verify.c. */
#include "proto/calibration.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/calibration_verify.h"
#include "proto/cleanup.h"
#include "proto/geometry.h"
#include "proto/page.h"
#include "proto/safetensors.h"

#define FORMAT "1"
#define NAME_MAX_ 80U

_Static_assert(OSCAR_TURN_ROWS == OSCAR_PAGE_TOKENS, "one row of the turn table a token of a page");

/* The tensors of a layer. Size 0 of a dimension stands for one that the tensor itself gives (heads or 1; pairs). */
enum part {
    K_ROTATION,
    V_ROTATION,
    K_RANK,
    V_RANK,
    K_STATIC,
    K_COS,
    K_SIN,
    K_PAIR,
    K_FEEDBACK,
    PARTS,
};

enum extent { NONE, HEADS, HEADS_OR_ONE, PAIRS, DIM };

static const struct {
    const char *name;
    enum oscar_tensor_type type;
    enum extent extent[3];
} parts[PARTS] = {
    [K_ROTATION] = {"k.rotation", OSCAR_TENSOR_F32, {HEADS_OR_ONE, DIM, DIM}},
    [V_ROTATION] = {"v.rotation", OSCAR_TENSOR_F32, {HEADS_OR_ONE, DIM, DIM}},
    [K_RANK] = {"k.rank", OSCAR_TENSOR_I32, {HEADS}},
    [V_RANK] = {"v.rank", OSCAR_TENSOR_I32, {HEADS}},
    [K_STATIC] = {"k.centre.static", OSCAR_TENSOR_F32, {HEADS, DIM}},
    [K_COS] = {"k.centre.cos", OSCAR_TENSOR_F32, {HEADS, PAIRS, DIM}},
    [K_SIN] = {"k.centre.sin", OSCAR_TENSOR_F32, {HEADS, PAIRS, DIM}},
    [K_PAIR] = {"k.centre.pair", OSCAR_TENSOR_I32, {HEADS, PAIRS}},
    [K_FEEDBACK] = {"k.feedback", OSCAR_TENSOR_F32, {HEADS, DIM, DIM}},
};

struct layer {
    struct oscar_tensor_view view[PARTS];
    bool present[PARTS];
    uint32_t index;
    uint32_t pairs;
};

static void part_name(char ret[NAME_MAX_], uint32_t layer, enum part part) {
    (void)snprintf(ret, NAME_MAX_, "layers.%" PRIu32 ".%s", layer, parts[part].name);
}

/* --- metadata --- */

static int required_metadata(const struct oscar_safetensors *file, const char *key, const char **ret,
                             struct oscar_cause *cause) {
    const char *value = oscar_safetensors_metadata(file, key);
    if (value == NULL || value[0] == '\0')
        return oscar_fail(cause, OSCAR_ERR_CALIBRATION, "metadata %s is missing: not a calibration file of oscard",
                          key);
    *ret = value;
    return OSCAR_OK;
}

/* A count is compared as text: one spelling a number, nothing to overflow. */
static int check_count(const struct oscar_safetensors *file, const char *key, uint32_t expected,
                       struct oscar_cause *cause) {
    char text[16];
    const char *value = NULL;
    int r = required_metadata(file, key, &value, cause);
    if (r < 0)
        return r;
    (void)snprintf(text, sizeof(text), "%" PRIu32, expected);
    if (strcmp(value, text) != 0)
        return oscar_fail(cause, OSCAR_ERR_CALIBRATION,
                          "made for another model: metadata %s is %.20s, the model has %s", key, value, text);
    return OSCAR_OK;
}

static int parse_rotation(const struct oscar_safetensors *file, const char *key, enum oscar_rotation *ret,
                          struct oscar_cause *cause) {
    const char *value = NULL;
    int r = required_metadata(file, key, &value, cause);
    if (r < 0)
        return r;
    if (strcmp(value, "matrix") == 0)
        *ret = OSCAR_ROTATION_MATRIX;
    else if (strcmp(value, "hadamard") == 0)
        *ret = OSCAR_ROTATION_HADAMARD;
    else
        return oscar_fail(cause, OSCAR_ERR_CALIBRATION, "metadata %s is %.20s: must be matrix or hadamard", key, value);
    return OSCAR_OK;
}

static int parse_metadata(const struct oscar_safetensors *file, struct oscar_calibration *calibration,
                          struct oscar_cause *cause) {
    const char *value = NULL;
    int r;
    if ((r = required_metadata(file, "oscar.format", &value, cause)) < 0)
        return r;
    if (strcmp(value, FORMAT) != 0)
        return oscar_fail(cause, OSCAR_ERR_CALIBRATION, "metadata oscar.format is %.20s: this version reads %s", value,
                          FORMAT);
    if ((r = required_metadata(file, "oscar.model", &value, cause)) < 0 ||
        (r = required_metadata(file, "oscar.method", &value, cause)) < 0)
        return r;
    if ((r = check_count(file, "oscar.layers", calibration->layers, cause)) < 0 ||
        (r = check_count(file, "oscar.kv_heads", calibration->kv_heads, cause)) < 0 ||
        (r = check_count(file, "oscar.head_dim", calibration->head_dim, cause)) < 0)
        return r;
    if ((r = parse_rotation(file, "oscar.rotation_k", &calibration->rotation_k, cause)) < 0 ||
        (r = parse_rotation(file, "oscar.rotation_v", &calibration->rotation_v, cause)) < 0)
        return r;
    return OSCAR_OK;
}

/* --- tensors --- */

static int fail_shape(const char *name, enum part part, const struct oscar_calibration *calibration,
                      const struct oscar_tensor_view *found, struct oscar_cause *cause) {
    char expected[64] = "", shape[96] = "";
    for (unsigned i = 0, at = 0; i < 3 && parts[part].extent[i] != NONE; i++) {
        const char *comma = i == 0 ? "" : ", ";
        size_t room = sizeof(expected) - at;
        switch (parts[part].extent[i]) {
        case HEADS:
            at += (unsigned)snprintf(expected + at, room, "%s%" PRIu32, comma, calibration->kv_heads);
            break;
        case HEADS_OR_ONE:
            at += (unsigned)snprintf(expected + at, room, "%s%" PRIu32 " or 1", comma, calibration->kv_heads);
            break;
        case PAIRS:
            at += (unsigned)snprintf(expected + at, room, "%s1 to %u", comma, OSCAR_MAX_PAIRS);
            break;
        default:
            at += (unsigned)snprintf(expected + at, room, "%s%" PRIu32, comma, calibration->head_dim);
            break;
        }
    }
    for (unsigned i = 0, at = 0; i < found->dims && i < 4; i++)
        at += (unsigned)snprintf(shape + at, sizeof(shape) - at, "%s%" PRIu64, i == 0 ? "" : ", ", found->shape[i]);
    return oscar_fail(cause, OSCAR_ERR_CALIBRATION, "tensor %s: expected shape [%s], found [%s%s]", name, expected,
                      shape, found->dims > 4 ? ", ..." : "");
}

static bool extent_fits(enum extent extent, const struct oscar_calibration *calibration, uint64_t size) {
    switch (extent) {
    case HEADS:
        return size == calibration->kv_heads;
    case HEADS_OR_ONE:
        return size == calibration->kv_heads || size == 1;
    case PAIRS:
        return size >= 1 && size <= OSCAR_MAX_PAIRS;
    case DIM:
        return size == calibration->head_dim;
    default:
        return false;
    }
}

static int check_type(const char *name, enum oscar_tensor_type type, const struct oscar_tensor_view *view,
                      struct oscar_cause *cause) {
    if (view->type != type)
        return oscar_fail(cause, OSCAR_ERR_CALIBRATION, "tensor %s: expected %s, found %s", name,
                          oscar_tensor_type_name(type), oscar_tensor_type_name(view->type));
    if ((uintptr_t)view->data % oscar_tensor_type_bytes(type) != 0)
        return oscar_fail(cause, OSCAR_ERR_CALIBRATION,
                          "tensor %s: its data is not aligned to %" PRIu32
                          " bytes: write the file again (pad the header, sort tensors by element size)",
                          name, oscar_tensor_type_bytes(type));
    return OSCAR_OK;
}

static int check_part(const char *name, enum part part, const struct oscar_calibration *calibration,
                      const struct oscar_tensor_view *view, struct oscar_cause *cause) {
    int r = check_type(name, parts[part].type, view, cause);
    if (r < 0)
        return r;
    uint32_t dims = 0;
    while (dims < 3 && parts[part].extent[dims] != NONE)
        dims++;
    if (view->dims != dims)
        return fail_shape(name, part, calibration, view, cause);
    for (uint32_t i = 0; i < dims; i++) {
        if (!extent_fits(parts[part].extent[i], calibration, view->shape[i]))
            return fail_shape(name, part, calibration, view, cause);
    }
    return OSCAR_OK;
}

static int check_presence(const struct oscar_calibration *calibration, struct layer *layer, struct oscar_cause *cause) {
    const bool *present = layer->present;
    char name[NAME_MAX_];
    bool expected[PARTS];
    memcpy(expected, present, sizeof(expected)); /* what is optional is expected where it is */
    expected[K_ROTATION] = calibration->rotation_k == OSCAR_ROTATION_MATRIX;
    expected[V_ROTATION] = calibration->rotation_v == OSCAR_ROTATION_MATRIX;
    expected[K_RANK] = expected[V_RANK] = true;
    bool turning = present[K_COS] || present[K_SIN] || present[K_PAIR];
    expected[K_COS] = expected[K_SIN] = expected[K_PAIR] = turning;
    if (turning)
        expected[K_STATIC] = true;
    for (unsigned part = 0; part < PARTS; part++) {
        if (expected[part] == present[part])
            continue;
        part_name(name, layer->index, (enum part)part);
        if (present[part])
            return oscar_fail(cause, OSCAR_ERR_CALIBRATION, "tensor %s: not expected, the metadata says hadamard",
                              name);
        return oscar_fail(cause, OSCAR_ERR_CALIBRATION, "tensor %s: missing%s", name,
                          part == K_RANK || part == V_RANK ? ""
                          : part == K_ROTATION || part == V_ROTATION
                              ? ", the metadata says matrix"
                              : ", the layer has other parts of a turning centre");
    }
    return OSCAR_OK;
}

static int find_parts(const struct oscar_safetensors *file, const struct oscar_calibration *calibration,
                      struct layer *layer, struct oscar_cause *cause) {
    char name[NAME_MAX_];
    int r;
    for (unsigned part = 0; part < PARTS; part++) {
        part_name(name, layer->index, (enum part)part);
        layer->present[part] = oscar_safetensors_find(file, name, &layer->view[part]) == OSCAR_OK;
        if (layer->present[part] && (r = check_part(name, (enum part)part, calibration, &layer->view[part], cause)) < 0)
            return r;
    }
    if ((r = check_presence(calibration, layer, cause)) < 0)
        return r;
    layer->pairs = layer->present[K_PAIR] ? (uint32_t)layer->view[K_PAIR].shape[1] : 0;
    for (unsigned part = K_COS; part <= K_SIN && layer->pairs != 0; part++) {
        if (layer->view[part].shape[1] != layer->pairs) {
            part_name(name, layer->index, (enum part)part);
            return oscar_fail(cause, OSCAR_ERR_CALIBRATION,
                              "tensor %s: %" PRIu64 " pairs a head, its layer's k.centre.pair has %" PRIu32, name,
                              layer->view[part].shape[1], layer->pairs);
        }
    }
    return OSCAR_OK;
}

static int check_rank(const struct oscar_calibration *calibration, const struct layer *layer, enum part part,
                      uint32_t head, uint32_t *ret, struct oscar_cause *cause) {
    int32_t rank = ((const int32_t *)layer->view[part].data)[head];
    if (rank < 0 || (uint32_t)rank >= calibration->head_dim) {
        char name[NAME_MAX_];
        part_name(name, layer->index, part);
        return oscar_fail(cause, OSCAR_ERR_CALIBRATION,
                          "tensor %s: rank of head %" PRIu32 " is %" PRId32 ": must be 0 to %" PRIu32, name, head, rank,
                          calibration->head_dim - 1);
    }
    *ret = (uint32_t)rank;
    return OSCAR_OK;
}

/* Pairs index omega, so they are checked even where the numbers are trusted. */
static int check_pairs(const struct layer *layer, uint32_t head, const int32_t *pair, uint32_t frequencies,
                       struct oscar_cause *cause) {
    char name[NAME_MAX_];
    part_name(name, layer->index, K_PAIR);
    for (uint32_t i = 0; i < layer->pairs; i++) {
        if (pair[i] < 0 || (uint32_t)pair[i] >= frequencies)
            return oscar_fail(cause, OSCAR_ERR_CALIBRATION,
                              "tensor %s: pair %" PRIu32 " of head %" PRIu32 " is %" PRId32
                              ": must be below the %" PRIu32 " frequencies of rope.omega",
                              name, i, head, pair[i], frequencies);
        for (uint32_t j = 0; j < i; j++) {
            if (pair[j] == pair[i])
                return oscar_fail(cause, OSCAR_ERR_CALIBRATION,
                                  "tensor %s: head %" PRIu32 " has pair %" PRId32 " twice", name, head, pair[i]);
        }
    }
    return OSCAR_OK;
}

/* Matrix `index` of a part [n][rows][columns]; a rotation with n = 1 is shared by all heads. */
static const float *slice(const struct layer *layer, enum part part, uint32_t head) {
    const struct oscar_tensor_view *view = &layer->view[part];
    if (!layer->present[part])
        return NULL;
    return (const float *)view->data + (view->shape[0] == 1 ? 0 : head * (view->elements / view->shape[0]));
}

static int fill_layer(const struct oscar_safetensors *file, struct oscar_calibration *calibration, uint32_t index,
                      struct oscar_cause *cause) {
    struct layer layer = {.index = index};
    int r = find_parts(file, calibration, &layer, cause);
    if (r < 0)
        return r;
    for (uint32_t i = 0; i < calibration->kv_heads; i++) {
        struct oscar_head_calibration *head = &calibration->heads[(size_t)index * calibration->kv_heads + i];
        if ((r = check_rank(calibration, &layer, K_RANK, i, &head->rank_k, cause)) < 0 ||
            (r = check_rank(calibration, &layer, V_RANK, i, &head->rank_v, cause)) < 0)
            return r;
        head->rotation_k = slice(&layer, K_ROTATION, i);
        head->rotation_v = slice(&layer, V_ROTATION, i);
        head->feedback = slice(&layer, K_FEEDBACK, i);
        head->centre_static = slice(&layer, K_STATIC, i);
        if (layer.pairs == 0)
            continue;
        head->pairs = layer.pairs;
        head->centre_cos = slice(&layer, K_COS, i);
        head->centre_sin = slice(&layer, K_SIN, i);
        head->centre_pair = (const int32_t *)layer.view[K_PAIR].data + (size_t)i * layer.pairs;
        if ((r = check_pairs(&layer, i, head->centre_pair, calibration->frequencies, cause)) < 0)
            return r;
    }
    return OSCAR_OK;
}

/* rope.omega; without any pair it is left alone, so `frequencies` says whether turn tables are needed. */
static int find_omega(const struct oscar_safetensors *file, struct oscar_calibration *calibration,
                      struct oscar_cause *cause) {
    struct oscar_tensor_view view;
    int r;
    if (oscar_safetensors_find(file, "rope.omega", &view) < 0)
        return OSCAR_OK; /* then every pair is out of range, and is reported so */
    if ((r = check_type("rope.omega", OSCAR_TENSOR_F64, &view, cause)) < 0)
        return r;
    if (view.dims != 1 || view.elements < 1 || view.elements > calibration->head_dim / 2)
        return oscar_fail(cause, OSCAR_ERR_CALIBRATION,
                          "tensor rope.omega: expected shape [1 to %" PRIu32 "], found %" PRIu64 " elements in %" PRIu32
                          " dimensions",
                          calibration->head_dim / 2, view.elements, view.dims);
    calibration->omega = view.data;
    calibration->frequencies = (uint32_t)view.elements;
    return OSCAR_OK;
}

/* A name under our prefixes that means nothing to us is a typing error or a newer format: never to be passed over. */
static int check_name(const struct oscar_calibration *calibration, const char *name, struct oscar_cause *cause) {
    char expected[NAME_MAX_];
    if (strncmp(name, "rope.", 5) == 0 && strcmp(name, "rope.omega") != 0)
        return oscar_fail(cause, OSCAR_ERR_CALIBRATION, "tensor %.80s: unknown", name);
    if (strncmp(name, "layers.", 7) != 0)
        return OSCAR_OK;
    char *end;
    unsigned long layer = strtoul(name + 7, &end, 10);
    for (unsigned part = 0; part < PARTS && layer < calibration->layers; part++) {
        part_name(expected, (uint32_t)layer, (enum part)part);
        if (strcmp(name, expected) == 0)
            return OSCAR_OK;
    }
    if (end != name + 7 && layer >= calibration->layers)
        return oscar_fail(cause, OSCAR_ERR_CALIBRATION, "tensor %.80s: the model has %" PRIu32 " layers", name,
                          calibration->layers);
    return oscar_fail(cause, OSCAR_ERR_CALIBRATION, "tensor %.80s: unknown", name);
}

static void cleanup_calibration(struct oscar_calibration **calibration) { oscar_calibration_free(*calibration); }

static int new_calibration(const struct oscar_geometry *geometry, struct oscar_calibration **ret,
                           struct oscar_cause *cause) {
    int r = oscar_geometry_check(geometry, cause);
    if (r < 0)
        return r;
    _cleanup_(cleanup_calibration) struct oscar_calibration *calibration = calloc(1, sizeof(*calibration));
    if (calibration == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a calibration");
    calibration->layers = geometry->layers;
    calibration->kv_heads = geometry->kv_heads;
    calibration->head_dim = geometry->head_dim;
    calibration->heads = calloc((size_t)geometry->layers * geometry->kv_heads, sizeof(*calibration->heads));
    if (calibration->heads == NULL)
        return oscar_fail(cause, OSCAR_ERR_NO_MEMORY, "no memory for a calibration of %" PRIu32 " layers",
                          geometry->layers);
    *ret = TAKE_PTR(calibration);
    return OSCAR_OK;
}

int oscar_calibration_parse(const void *bytes, size_t size, const struct oscar_geometry *geometry, int verify,
                            struct oscar_calibration **ret, struct oscar_cause *cause) {
    _cleanup_(cleanup_calibration) struct oscar_calibration *calibration = NULL;
    int r;
    if ((r = new_calibration(geometry, &calibration, cause)) < 0)
        return r;
    if ((r = oscar_safetensors_parse(bytes, size, &calibration->file, cause)) < 0)
        return r;
    if ((r = parse_metadata(calibration->file, calibration, cause)) < 0)
        return r;
    const char *name;
    for (size_t i = 0; (name = oscar_safetensors_name(calibration->file, i)) != NULL; i++) {
        if ((r = check_name(calibration, name, cause)) < 0)
            return r;
    }
    if ((r = find_omega(calibration->file, calibration, cause)) < 0)
        return r;
    uint32_t pairs = 0;
    for (uint32_t layer = 0; layer < calibration->layers; layer++) {
        if ((r = fill_layer(calibration->file, calibration, layer, cause)) < 0)
            return r;
        pairs += oscar_calibration_head(calibration, layer, 0)->pairs;
    }
    if (verify != 0 && (r = oscar_calibration_verify(calibration, cause)) < 0)
        return r;
    if (pairs == 0) {
        calibration->frequencies = 0;
        calibration->omega = NULL;
    }
    oscar_content_digest(bytes, size, &calibration->digest);
    *ret = TAKE_PTR(calibration);
    return OSCAR_OK;
}

int oscar_calibration_default(const struct oscar_geometry *geometry, struct oscar_calibration **ret,
                              struct oscar_cause *cause) {
    struct oscar_calibration *calibration = NULL;
    int r = new_calibration(geometry, &calibration, cause);
    if (r < 0)
        return r;
    calibration->rotation_k = calibration->rotation_v = OSCAR_ROTATION_HADAMARD;
    for (size_t i = 0; i < (size_t)geometry->layers * geometry->kv_heads; i++) {
        calibration->heads[i].rank_k = geometry->head_dim * 96 / 100;
        calibration->heads[i].rank_v = geometry->head_dim * 92 / 100;
    }
    static const char text[] = OSCAR_DEFAULT_CALIBRATION_TEXT;
    oscar_content_digest(text, sizeof(text) - 1, &calibration->digest);
    *ret = calibration;
    return OSCAR_OK;
}

void oscar_calibration_free(struct oscar_calibration *calibration) {
    if (calibration == NULL)
        return;
    oscar_safetensors_free(calibration->file);
    free(calibration->heads);
    free(calibration);
}
