/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/calibration_file.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/unit/proto_tensor_file.h"

#define LAYERS 2
#define HEADS 2
#define DIM 64
#define FREQUENCIES 32

const struct oscar_geometry calibration_file_geometry = {
    .layers = LAYERS,
    .query_heads = 4,
    .kv_heads = HEADS,
    .head_dim = DIM,
    .dtype = OSCAR_BF16,
    .page_tokens = OSCAR_PAGE_TOKENS,
    .sink_tokens = OSCAR_SINK_TOKENS,
    .recent_tokens = OSCAR_RECENT_TOKENS,
};

static struct tensor_file file;

static void add_layer(int layer, unsigned variant) {
    static const char sides[] = "kv";
    char name[64];
    for (int side = 0; side < 2; side++) {
        (void)snprintf(name, sizeof(name), "layers.%d.%c.rotation", layer, sides[side]);
        float *rotation = tensor_file_add(&file, name, OSCAR_TENSOR_F32, 3, (uint64_t[]){1, DIM, DIM});
        for (uint32_t i = 0; i < DIM * DIM; i++)
            rotation[i] = (__builtin_parity((i / DIM) & (i % DIM)) != 0 ? -1.0F : 1.0F) / 8.0F;
        (void)snprintf(name, sizeof(name), "layers.%d.%c.rank", layer, sides[side]);
        int32_t *rank = tensor_file_add(&file, name, OSCAR_TENSOR_I32, 1, (uint64_t[]){HEADS});
        rank[0] = rank[1] = DIM - 1 - (int32_t)variant;
    }
    (void)snprintf(name, sizeof(name), "layers.%d.k.centre.static", layer);
    (void)tensor_file_add(&file, name, OSCAR_TENSOR_F32, 2, (uint64_t[]){HEADS, DIM});
    (void)snprintf(name, sizeof(name), "layers.%d.k.centre.cos", layer);
    float *cosine = tensor_file_add(&file, name, OSCAR_TENSOR_F32, 3, (uint64_t[]){HEADS, 1, DIM});
    cosine[0] = 1.0F;
    (void)snprintf(name, sizeof(name), "layers.%d.k.centre.sin", layer);
    (void)tensor_file_add(&file, name, OSCAR_TENSOR_F32, 3, (uint64_t[]){HEADS, 1, DIM});
    (void)snprintf(name, sizeof(name), "layers.%d.k.centre.pair", layer);
    (void)tensor_file_add(&file, name, OSCAR_TENSOR_I32, 2, (uint64_t[]){HEADS, 1});
}

static void make(unsigned variant) {
    static const char *const metadata[][2] = {{"oscar.format", "1"},          {"oscar.model", "test"},
                                              {"oscar.method", "none"},       {"oscar.layers", "2"},
                                              {"oscar.kv_heads", "2"},        {"oscar.head_dim", "64"},
                                              {"oscar.rotation_k", "matrix"}, {"oscar.rotation_v", "matrix"}};
    tensor_file_clear(&file);
    for (size_t i = 0; i < sizeof(metadata) / sizeof(metadata[0]); i++)
        tensor_file_metadata(&file, metadata[i][0], metadata[i][1]);
    double *omega = tensor_file_add(&file, "rope.omega", OSCAR_TENSOR_F64, 1, (uint64_t[]){FREQUENCIES});
    for (uint32_t i = 0; i < FREQUENCIES; i++)
        omega[i] = pow(10000.0, -(double)i / FREQUENCIES);
    for (int layer = 0; layer < LAYERS; layer++)
        add_layer(layer, variant);
}

static struct oscar_digest write_to(const char *path) {
    size_t size;
    uint8_t *bytes = tensor_file_write(&file, &size);
    FILE *out = fopen(path, "we");
    if (out == NULL || fwrite(bytes, 1, size, out) != size || fclose(out) != 0) {
        perror(path);
        abort();
    }
    struct oscar_digest digest;
    oscar_content_digest(bytes, size, &digest);
    free(bytes);
    tensor_file_clear(&file);
    return digest;
}

struct oscar_digest calibration_file_write(const char *path, unsigned variant) {
    make(variant);
    return write_to(path);
}

void calibration_file_write_bad(const char *path) {
    make(0);
    ((float *)tensor_file_data(&file, "layers.1.v.rotation"))[5] = 0.5F;
    (void)write_to(path);
}
