/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The q, k and v rows of a model on some text, from any number of safetensors files: tensors layers.N.{q,k,v}
 * [token, head, dim], F16, BF16 or F32. Layers may lie in files as they like; what several files hold of one layer is, in the
 * order of the files, either more of the same sequence (a file whose first_position is where the one before ends) or
 * another sequence. Files are mapped and read row by row, so that they may be larger than memory.
 */
#ifndef OSCAR_CALIB_ACTIVATIONS_H
#define OSCAR_CALIB_ACTIVATIONS_H

#include <stddef.h>
#include <stdint.h>

#include "calib/rope.h"
#include "proto/cause.h"
#include "proto/digest.h"
#include "proto/safetensors.h"

enum activation { ACTIVATION_Q, ACTIVATION_K, ACTIVATION_V, ACTIVATION_PARTS };

struct activation_file;

/* What one file holds of a layer. */
struct segment {
    const struct activation_file *file;
    struct oscar_tensor_view view[ACTIVATION_PARTS];
    uint64_t tokens;
    uint64_t first_position;
};

struct sequence {
    uint64_t first_position;
    uint64_t tokens;
    const struct segment *segment;
    size_t segments;
};

struct layer_activations {
    uint32_t layer;
    struct sequence *sequence;
    size_t sequences;
    struct segment *segment;
    size_t segments;
};

struct activations {
    uint32_t query_heads, kv_heads, head_dim;
    uint32_t model_layers;  /* by the metadata; 0: unknown */
    const char *model;      /* by the metadata, or NULL */
    struct rope_given rope; /* by the metadata */
    const double *omega;    /* tensor rope.omega, or NULL */
    uint64_t omegas;
    double softmax_scale;            /* by the metadata; 0: unknown */
    struct layer_activations *layer; /* ascending */
    size_t layers;
    struct activation_file **file; /* in the order of use */
    size_t files;
};

/* Files, and folders, which stand for their *.safetensors files in the order of their names. Errors name the file. */
int activations_open(const char *const *paths, size_t count, struct activations **ret, struct oscar_cause *cause);
void activations_free(struct activations *activations); /* NULL is fine */
void activations_cleanup(struct activations **activations);

const char *activation_file_name(const struct activation_file *file); /* without its folder */
/* Of all its bytes: takes a while for a large file. */
void activation_file_digest(const struct activation_file *file, struct oscar_digest *ret);

/* NULL when it is not there. */
const struct layer_activations *activations_layer(const struct activations *activations, uint32_t layer);

/* Rows of one head, `count` from row `from` of the sequence, to ret[row * stride]. OSCAR_ERR_NOT_FINITE with the place. */
int activations_read(const struct activations *activations, const struct layer_activations *layer,
                     const struct sequence *sequence, enum activation part, uint32_t head, uint64_t from,
                     uint64_t count, float *ret, size_t stride, struct oscar_cause *cause);

/* One past the highest position that the layer's sequences reach, and their tokens altogether. */
uint64_t activations_positions(const struct layer_activations *layer);
uint64_t activations_tokens(const struct layer_activations *layer);

#endif
