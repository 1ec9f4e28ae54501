/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/replay.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "oscar/error.h"

#include "kernels/number.h"
#include "proto/safetensors.h"

#define MAX_LAYERS 64U
#define MAX_MODEL_LAYERS 1024U

struct layer {
    uint16_t *q, *k, *v;
    float *k_float, *v_float; /* the same rows, for the exact attention */
};

struct replay {
    struct oscar_geometry geometry;
    uint32_t tokens;
    uint32_t *token_ids;
    double rope_base;
    char model[128];
    uint8_t weights[32];
    struct layer layer[MAX_LAYERS];
};

__attribute__((format(printf, 4, 5))) static int refuse(char *ret_why, size_t size, int error, const char *format,
                                                        ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(ret_why, size, format, arguments);
    va_end(arguments);
    return error;
}

static size_t query_row(const struct replay *replay) {
    return (size_t)replay->geometry.query_heads * replay->geometry.head_dim;
}

static size_t kv_row(const struct replay *replay) {
    return (size_t)replay->geometry.kv_heads * replay->geometry.head_dim;
}

static float *to_float(const uint16_t *rows, size_t elements) {
    float *values = malloc(elements * sizeof(*values));
    for (size_t i = 0; values != NULL && i < elements; i++)
        values[i] = oscar_bf16_to_float(rows[i]);
    return values;
}

/* One tensor [tokens][heads][d] of a layer, copied; the first one sets *tokens. */
static int load_rows(const struct oscar_safetensors *file, unsigned layer, char kind, uint32_t *tokens, uint32_t *heads,
                     uint32_t *head_dim, uint16_t **ret, char *ret_why, size_t size) {
    char name[64];
    struct oscar_tensor_view view;
    snprintf(name, sizeof(name), "layers.%u.%c", layer, kind);
    if (oscar_safetensors_find(file, name, &view) < 0)
        return refuse(ret_why, size, OSCAR_ERR_NOT_FOUND, "no tensor %s", name);
    if (view.type != OSCAR_TENSOR_BF16 || view.dims != 3 || view.shape[0] == 0 ||
        view.shape[0] > OSCAR_MAX_SEQUENCE_TOKENS || view.shape[1] == 0 || view.shape[1] > 1024 || view.shape[2] == 0 ||
        view.shape[2] > 256)
        return refuse(ret_why, size, OSCAR_ERR_CORRUPT, "%s is not BF16 [tokens][heads][dims]", name);
    if ((*tokens != 0 && *tokens != view.shape[0]) || (*heads != 0 && *heads != view.shape[1]) ||
        (*head_dim != 0 && *head_dim != view.shape[2]))
        return refuse(ret_why, size, OSCAR_ERR_CORRUPT, "%s has another shape than the rows before it", name);
    *tokens = (uint32_t)view.shape[0];
    *heads = (uint32_t)view.shape[1];
    *head_dim = (uint32_t)view.shape[2];
    *ret = malloc(view.bytes);
    if (*ret == NULL)
        return refuse(ret_why, size, OSCAR_ERR_NO_MEMORY, "no memory for %s", name);
    memcpy(*ret, view.data, view.bytes);
    return 0;
}

static int load_token_ids(struct replay *replay, const struct oscar_safetensors *file, char *ret_why, size_t size) {
    struct oscar_tensor_view view;
    if (oscar_safetensors_find(file, "tokens", &view) < 0 || view.type != OSCAR_TENSOR_I64 ||
        view.elements != replay->tokens)
        return refuse(ret_why, size, OSCAR_ERR_CORRUPT, "no I64 tensor `tokens` of %u elements", replay->tokens);
    replay->token_ids = malloc(sizeof(*replay->token_ids) * replay->tokens);
    if (replay->token_ids == NULL)
        return refuse(ret_why, size, OSCAR_ERR_NO_MEMORY, "no memory for the tokens");
    for (uint32_t i = 0; i < replay->tokens; i++) {
        int64_t id;
        memcpy(&id, (const uint8_t *)view.data + (size_t)i * sizeof(id), sizeof(id));
        replay->token_ids[i] = (uint32_t)id;
    }
    return 0;
}

static int load_metadata(struct replay *replay, const struct oscar_safetensors *file, char *ret_why, size_t size) {
    const char *model = oscar_safetensors_metadata(file, "model");
    const char *digest = oscar_safetensors_metadata(file, "gguf_sha256");
    const char *base = oscar_safetensors_metadata(file, "rope_base");
    const char *pairs = oscar_safetensors_metadata(file, "rope_pairs");
    const char *first = oscar_safetensors_metadata(file, "first_position");
    if (model == NULL || digest == NULL || strlen(digest) != 64 || base == NULL || pairs == NULL || first == NULL)
        return refuse(ret_why, size, OSCAR_ERR_CORRUPT,
                      "the metadata lack model, gguf_sha256, rope_base, rope_pairs or first_position");
    if (strcmp(pairs, "halves") != 0 || strcmp(first, "0") != 0)
        return refuse(ret_why, size, OSCAR_ERR_UNSUPPORTED,
                      "only RoPE pairs in halves, from position 0 on, are replayed");
    replay->rope_base = strtod(base, NULL);
    snprintf(replay->model, sizeof(replay->model), "%s", model);
    for (unsigned i = 0; i < sizeof(replay->weights); i++) {
        unsigned byte;
        if (sscanf(digest + (size_t)2 * i, "%2x", &byte) != 1)
            return refuse(ret_why, size, OSCAR_ERR_CORRUPT, "gguf_sha256 is not a hex digest");
        replay->weights[i] = (uint8_t)byte;
    }
    return 0;
}

/* The file may hold any of the model's layers; they are replayed as layers 0, 1, .. in the model's order. */
static int load_layers(struct replay *replay, const struct oscar_safetensors *file, char *ret_why, size_t size) {
    struct oscar_geometry *geometry = &replay->geometry;
    for (unsigned number = 0; number < MAX_MODEL_LAYERS && geometry->layers < MAX_LAYERS; number++) {
        char name[64];
        struct oscar_tensor_view view;
        snprintf(name, sizeof(name), "layers.%u.q", number);
        if (oscar_safetensors_find(file, name, &view) < 0)
            continue;
        struct layer *layer = &replay->layer[geometry->layers++];
        int r = load_rows(file, number, 'q', &replay->tokens, &geometry->query_heads, &geometry->head_dim, &layer->q,
                          ret_why, size);
        if (r == 0)
            r = load_rows(file, number, 'k', &replay->tokens, &geometry->kv_heads, &geometry->head_dim, &layer->k,
                          ret_why, size);
        if (r == 0)
            r = load_rows(file, number, 'v', &replay->tokens, &geometry->kv_heads, &geometry->head_dim, &layer->v,
                          ret_why, size);
        if (r < 0)
            return r;
        layer->k_float = to_float(layer->k, replay->tokens * kv_row(replay));
        layer->v_float = to_float(layer->v, replay->tokens * kv_row(replay));
        if (layer->k_float == NULL || layer->v_float == NULL)
            return refuse(ret_why, size, OSCAR_ERR_NO_MEMORY, "no memory for layer %u", number);
    }
    if (geometry->layers == 0 || geometry->query_heads % geometry->kv_heads != 0)
        return refuse(ret_why, size, OSCAR_ERR_CORRUPT,
                      "no layers, or query heads that are no multiple of the KV heads");
    return 0;
}

int replay_open(const char *path, struct replay **ret, char *ret_why, size_t size) {
    struct oscar_cause cause = {{0}};
    struct oscar_safetensors *file;
    int r = oscar_safetensors_open(path, &file, &cause);
    if (r < 0)
        return refuse(ret_why, size, r, "%s: %s", path, cause.text);
    struct replay *replay = calloc(1, sizeof(*replay));
    if (replay == NULL) {
        oscar_safetensors_free(file);
        return refuse(ret_why, size, OSCAR_ERR_NO_MEMORY, "no memory");
    }
    replay->geometry.dtype = OSCAR_BF16;
    replay->geometry.page_tokens = OSCAR_PAGE_TOKENS;
    replay->geometry.sink_tokens = OSCAR_SINK_TOKENS;
    replay->geometry.recent_tokens = OSCAR_RECENT_TOKENS;
    r = load_metadata(replay, file, ret_why, size);
    if (r == 0)
        r = load_layers(replay, file, ret_why, size);
    if (r == 0)
        r = load_token_ids(replay, file, ret_why, size);
    oscar_safetensors_free(file);
    if (r < 0)
        replay_free(replay);
    else
        *ret = replay;
    return r;
}

void replay_free(struct replay *replay) {
    if (replay == NULL)
        return;
    for (uint32_t i = 0; i < replay->geometry.layers; i++) {
        struct layer *layer = &replay->layer[i];
        free(layer->q);
        free(layer->k);
        free(layer->v);
        free(layer->k_float);
        free(layer->v_float);
    }
    free(replay->token_ids);
    free(replay);
}

/* Turns one row of heads from where it was computed to `by` positions further on (negative: back). */
static void turn(const struct replay *replay, uint16_t *row, uint32_t heads, int64_t by) {
    uint32_t d = replay->geometry.head_dim, half = d / 2;
    for (uint32_t i = 0; i < half; i++) {
        double angle = (double)by * pow(replay->rope_base, -2.0 * i / d), c = cos(angle), s = sin(angle);
        for (uint32_t h = 0; h < heads; h++) {
            uint16_t *x = row + (size_t)h * d + i, *y = x + half;
            double a = oscar_bf16_to_float(*x), b = oscar_bf16_to_float(*y);
            *x = oscar_bf16_from_float((float)(a * c - b * s));
            *y = oscar_bf16_from_float((float)(b * c + a * s));
        }
    }
}

int replay_branch(struct replay *replay, uint32_t at, uint32_t source) {
    if (at >= source || source >= replay->tokens)
        return OSCAR_ERR_INVALID;
    const struct oscar_geometry *geometry = &replay->geometry;
    uint32_t count = replay->tokens - source;
    size_t wide = query_row(replay), narrow = kv_row(replay);
    for (uint32_t l = 0; l < geometry->layers; l++) {
        struct layer *layer = &replay->layer[l];
        memmove(layer->q + at * wide, layer->q + source * wide, count * wide * sizeof(uint16_t));
        memmove(layer->k + at * narrow, layer->k + source * narrow, count * narrow * sizeof(uint16_t));
        memmove(layer->v + at * narrow, layer->v + source * narrow, count * narrow * sizeof(uint16_t));
        for (uint32_t i = at; i < at + count; i++) {
            turn(replay, layer->q + i * wide, geometry->query_heads, (int64_t)at - source);
            turn(replay, layer->k + i * narrow, geometry->kv_heads, (int64_t)at - source);
        }
        for (size_t i = at * narrow; i < (at + count) * narrow; i++) {
            layer->k_float[i] = oscar_bf16_to_float(layer->k[i]);
            layer->v_float[i] = oscar_bf16_to_float(layer->v[i]);
        }
    }
    memmove(replay->token_ids + at, replay->token_ids + source, count * sizeof(*replay->token_ids));
    replay->tokens = at + count;
    return 0;
}

const struct oscar_geometry *replay_geometry(const struct replay *replay) { return &replay->geometry; }
uint32_t replay_tokens(const struct replay *replay) { return replay->tokens; }
const uint32_t *replay_token_ids(const struct replay *replay) { return replay->token_ids; }
const char *replay_model(const struct replay *replay) { return replay->model; }
const uint8_t *replay_weights_digest(const struct replay *replay) { return replay->weights; }

const uint16_t *replay_q(const struct replay *replay, uint32_t layer, uint32_t position) {
    return replay->layer[layer].q + position * query_row(replay);
}

const uint16_t *replay_k(const struct replay *replay, uint32_t layer, uint32_t position) {
    return replay->layer[layer].k + position * kv_row(replay);
}

const uint16_t *replay_v(const struct replay *replay, uint32_t layer, uint32_t position) {
    return replay->layer[layer].v + position * kv_row(replay);
}

/* Where a replay spends its time: sanitizers, which make these loops several times slower, leave them alone. */
#define HOT __attribute__((no_sanitize("address", "undefined", "thread")))

/* Four sums, so that the compiler may use vectors without being allowed to reorder. d is a multiple of 4. */
HOT static double dot(const double *q, const float *k, uint32_t d) {
    double sum[4] = {0, 0, 0, 0};
    for (uint32_t i = 0; i < d; i += 4)
        for (uint32_t j = 0; j < 4; j++)
            sum[j] += q[i + j] * (double)k[i + j];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* The softmax is taken on the go (a new maximum scales what was summed), so that no row of scores is kept. */
HOT static void exact_head(const double *q, const float *k, const float *v, size_t stride, uint32_t tokens, uint32_t d,
                           double *out) {
    double scale = 1.0 / sqrt((double)d), highest = -INFINITY, total = 0;
    memset(out, 0, sizeof(*out) * d);
    for (uint32_t t = 0; t < tokens; t++, k += stride, v += stride) {
        double score = dot(q, k, d) * scale;
        if (score > highest) {
            double shrink = exp(highest - score);
            total *= shrink;
            for (uint32_t i = 0; i < d; i++)
                out[i] *= shrink;
            highest = score;
        }
        double weight = exp(score - highest);
        total += weight;
        for (uint32_t i = 0; i < d; i++)
            out[i] += weight * (double)v[i];
    }
    for (uint32_t i = 0; i < d; i++)
        out[i] /= total;
}

void replay_exact(const struct replay *replay, uint32_t layer, uint32_t position, double *ret_out) {
    const struct oscar_geometry *geometry = &replay->geometry;
    uint32_t d = geometry->head_dim, group = geometry->query_heads / geometry->kv_heads;
    const uint16_t *q = replay_q(replay, layer, position);
    for (uint32_t h = 0; h < geometry->query_heads; h++) {
        double row[256];
        for (uint32_t i = 0; i < d; i++)
            row[i] = oscar_bf16_to_float(q[(size_t)h * d + i]);
        size_t head = (size_t)(h / group) * d;
        exact_head(row, replay->layer[layer].k_float + head, replay->layer[layer].v_float + head, kv_row(replay),
                   position + 1, d, ret_out + (size_t)h * d);
    }
}

double replay_relative_error(const uint16_t *row, const double *exact, uint32_t dims) {
    double difference = 0, norm = 0;
    for (uint32_t i = 0; i < dims; i++) {
        double delta = (double)oscar_bf16_to_float(row[i]) - exact[i];
        difference += delta * delta;
        norm += exact[i] * exact[i];
    }
    if (isnan(difference))
        return INFINITY; /* so that a maximum does not lose it */
    return norm > 0 ? sqrt(difference / norm) : (difference > 0 ? INFINITY : 0);
}
