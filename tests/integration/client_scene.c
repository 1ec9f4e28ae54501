/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/integration/client_scene.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/number.h"

static bool in_child;

void scene_in_child(void) { in_child = true; }

void scene_must(int result, const char *call, const char *file, int line) {
    if (result == 0)
        return;
    fprintf(stderr, "%s:%d: %s: %s: %s\n", file, line, call, oscar_error_name(result), oscar_error_detail());
    if (in_child)
        _Exit(1);
    _fail(file, line);
}

void scene_open(struct scene *scene, const char *socket, const char *calibration) {
    static const uint8_t weights[32] = {7}, rope[32] = {8};
    struct oscar_client_options client = OSCAR_INIT(struct oscar_client_options);
    client.socket = socket;
    client.group = "scene";
    client.timeout_ms = ANSWER_MS;
    MUST(oscar_client_open(&client, &scene->client));
    struct oscar_model_options model = OSCAR_INIT(struct oscar_model_options);
    oscar_geometry_init(&scene->geometry, LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM, OSCAR_BF16);
    model.geometry = scene->geometry;
    model.weights_digest = weights;
    model.revision = "main";
    model.rope_digest = rope;
    model.calibration = calibration;
    MUST(oscar_model_open(scene->client, &model, &scene->model));
}

void scene_close(struct scene *scene) {
    oscar_client_close(scene->client);
    scene->client = NULL;
}

/* --- content ------------------------------------------------------------------------------------------------------ */

static uint64_t mix(uint64_t state) { /* splitmix64 */
    state += UINT64_C(0x9e3779b97f4a7c15);
    state = (state ^ (state >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    state = (state ^ (state >> 27)) * UINT64_C(0x94d049bb133111eb);
    return state ^ (state >> 31);
}

/* One value of a standard normal distribution for each name. */
static float normal(uint64_t name) {
    double u = ((double)(mix(name) >> 11) + 1.0) * 0x1p-53, v = (double)(mix(name ^ UINT64_C(0x5555)) >> 11) * 0x1p-53;
    return (float)(sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v));
}

static float *values(uint64_t name, uint32_t first, uint32_t count, uint32_t elements) {
    float *ret = malloc((size_t)count * elements * sizeof(*ret));
    REQUIRE(ret != NULL);
    for (uint32_t row = 0; row < count; row++)
        for (uint32_t i = 0; i < elements; i++) {
            float value = normal(mix(name) ^ ((uint64_t)(first + row) << 20 | i));
            ret[(size_t)row * elements + i] = oscar_bf16_to_float(oscar_bf16_from_float(value));
        }
    return ret;
}

const uint32_t *scene_tokens(uint32_t seed, uint32_t count) {
    static uint32_t tokens[4096];
    for (uint32_t i = 0; i < count; i++)
        tokens[i] = (uint32_t)mix((uint64_t)seed << 32 | i) % 50000;
    return tokens;
}

float *scene_rows(uint32_t seed, uint32_t layer, unsigned side, uint32_t first, uint32_t count) {
    return values((uint64_t)seed << 32 | layer << 4 | side, first, count, ROW_ELEMENTS);
}

float *scene_queries(uint32_t seed, uint32_t layer, uint32_t first, uint32_t count) {
    return values((uint64_t)seed << 32 | layer << 4 | 2, first, count, QUERY_ELEMENTS);
}

uint16_t *scene_bf16(const float *from, size_t count) {
    uint16_t *ret = malloc(count * sizeof(*ret));
    REQUIRE(ret != NULL);
    for (size_t i = 0; i < count; i++)
        ret[i] = oscar_bf16_from_float(from[i]);
    return ret;
}

/* --- sequences ---------------------------------------------------------------------------------------------------- */

struct oscar_seq *scene_seq(struct scene *scene, uint32_t seed, uint32_t count, uint32_t flags) {
    struct oscar_seq *seq;
    MUST(oscar_seq_open(scene->model, scene_tokens(seed, count), count, flags, &seq));
    return seq;
}

struct oscar_seq_info scene_info(const struct oscar_seq *seq) {
    struct oscar_seq_info info = OSCAR_INIT(struct oscar_seq_info);
    MUST(oscar_seq_info(seq, &info));
    return info;
}

static void store_side_by_side(struct oscar_seq *seq, uint32_t seed, uint32_t layer, uint32_t first, uint32_t count) {
    float *k = scene_rows(seed, layer, 0, first, count), *v = scene_rows(seed, layer, 1, first, count);
    uint16_t *k16 = scene_bf16(k, (size_t)count * ROW_ELEMENTS), *v16 = scene_bf16(v, (size_t)count * ROW_ELEMENTS);
    const struct oscar_tensor tensors[2] = {{k16, ROW_ELEMENTS, HEAD_DIM}, {v16, ROW_ELEMENTS, HEAD_DIM}};
    MUST(oscar_seq_store(seq, NULL, layer, first, count, &tensors[0], &tensors[1]));
    free(k);
    free(v);
    free(k16);
    free(v16);
}

void scene_write(struct scene *scene, struct oscar_seq *seq, uint32_t seed, uint32_t end) {
    (void)scene;
    uint32_t first = scene_info(seq).committed_tokens;
    MUST(oscar_seq_reserve(seq, end - first));
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        store_side_by_side(seq, seed, layer, first, end - first);
    MUST(oscar_seq_advance(seq, NULL, scene_tokens(seed, end) + first, end - first));
}

uint16_t *scene_attend(struct scene *scene, struct oscar_seq *seq, uint32_t seed, uint32_t layer, uint32_t tokens,
                       uint32_t rows) {
    float *queries = scene_queries(seed, layer, tokens - rows, rows);
    uint16_t *q = scene_bf16(queries, (size_t)rows * QUERY_ELEMENTS);
    uint16_t *out = calloc((size_t)rows * QUERY_ELEMENTS, sizeof(*out));
    REQUIRE(out != NULL);
    const struct oscar_attend_query query = {.seq = seq,
                                             .tokens = tokens,
                                             .rows = rows,
                                             .q = q,
                                             .q_row_stride = QUERY_ELEMENTS,
                                             .q_head_stride = HEAD_DIM,
                                             .out = out,
                                             .out_row_stride = QUERY_ELEMENTS,
                                             .out_head_stride = HEAD_DIM};
    MUST(oscar_attend(scene->model, NULL, layer, 0, &query, 1));
    free(queries);
    free(q);
    return out;
}

/* --- waiting for what the daemon does in its own time --------------------------------------------------------------- */

struct expectation {
    struct scene *scene;
    uint32_t seed, count, wanted;
    struct oscar_seq *seq;
};

static bool is_hit(void *argument) {
    struct expectation *expected = argument;
    struct oscar_probe_result result;
    MUST(oscar_probe(expected->scene->model, scene_tokens(expected->seed, expected->count), expected->count, &result,
                     NULL));
    return result.hit_tokens == expected->wanted;
}

void scene_await_hit(struct scene *scene, uint32_t seed, uint32_t count, uint32_t hit) {
    REQUIRE(wait_until(is_hit, &(struct expectation){scene, seed, count, hit, NULL}, ANSWER_MS));
}

static bool is_packed(void *argument) {
    struct expectation *expected = argument;
    struct oscar_seq *seq = scene_seq(expected->scene, expected->seed, expected->count, 0);
    if (scene_info(seq).packed_tokens == expected->wanted) {
        expected->seq = seq;
        return true;
    }
    oscar_seq_close(seq);
    return false;
}

struct oscar_seq *scene_await_packed(struct scene *scene, uint32_t seed, uint32_t count, uint32_t packed) {
    struct expectation expected = {scene, seed, count, packed, NULL};
    REQUIRE(wait_until(is_packed, &expected, ANSWER_MS));
    return expected.seq;
}
