/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/store_scene.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/number.h"
#include "proto/geometry.h"

#define POISON 0xFF
#define MAX_DIM 256U
#define ROWS_A_TASK 16U

/* |sum - exact| <= SUM_ERROR * sum |x_i R_ij|: R in two 16-bit terms (bf16: 2^-18), fp32 sums that may be cut instead of
 * rounded. */
#define SUM_ERROR 0x1p-16
#define BF16_ERROR 0x1p-8    /* of rounding, relative to the result */
#define LEAST_ERROR 0x1p-133 /* the smallest BF16 */

/* --- models ----------------------------------------------------------------------------------------------------------------- */

struct kernel_model *store_model_open(struct rig *rig, struct kernel_random *random, uint32_t d, uint32_t layers,
                                      uint32_t kv_heads, uint32_t dtype, enum store_kind kind) {
    struct kernel_model *model = kernel_model_open(random, &(struct kernel_model_options){.layers = layers,
                                                                                          .kv_heads = kv_heads,
                                                                                          .head_dim = d,
                                                                                          .dtype = dtype,
                                                                                          .matrix = kind != HADAMARD,
                                                                                          .rank_k = d - 1,
                                                                                          .rank_v = d - 1});
    if (kind == MIXED) {
        model->calibration.rotation_v = OSCAR_ROTATION_HADAMARD;
        for (uint32_t i = 0; i < layers * kv_heads; i++)
            model->calibration.heads[i].rotation_v = NULL;
    }
    rig_calibration_load(rig, &model->geometry, &model->calibration);
    return model;
}

void store_model_close(struct rig *rig, struct kernel_model *model) {
    rig->ops->calibration_unload(rig->device, &model->calibration);
    kernel_model_close(model);
}

/* --- a worker's tensor ------------------------------------------------------------------------------------------------------ */

static uint16_t worker_bits(uint32_t dtype, uint16_t bf16) {
    return dtype == OSCAR_BF16 ? bf16 : oscar_fp16_from_float(oscar_bf16_to_float(bf16));
}

static float worker_float(uint32_t dtype, uint16_t bits) {
    return dtype == OSCAR_BF16 ? oscar_bf16_to_float(bits) : oscar_fp16_to_float(bits);
}

uint16_t *tensor_row(const struct tensor *tensor, bool is_v, uint32_t head, uint32_t token) {
    return tensor->host + (is_v ? tensor->first_v : tensor->first_k) + token * tensor->token_stride +
           head * tensor->head_stride;
}

struct tensor tensor_open(struct rig *rig, struct kernel_random *random, const struct oscar_geometry *geometry,
                          uint32_t tokens, uint32_t unit) {
    uint32_t heads = geometry->kv_heads, d = geometry->head_dim;
    struct tensor tensor = {.first_k = unit * kernel_random_below(random, 8),
                            .head_stride = d + unit * kernel_random_below(random, 4)};
    int64_t side = tensor.head_stride * heads;
    tensor.first_v = tensor.first_k + side + unit * kernel_random_below(random, 4);
    tensor.token_stride = 2 * side + unit * (3 + kernel_random_below(random, 8));
    tensor.elements = (size_t)(tensor.first_v + tensor.token_stride * tokens);
    tensor.host = malloc(tensor.elements * sizeof(uint16_t));
    assert_non_null(tensor.host);
    memset(tensor.host, POISON, tensor.elements * sizeof(uint16_t));
    for (uint32_t token = 0; token < tokens; token++)
        for (uint32_t i = 0; i < 2 * heads; i++) {
            uint16_t *row = tensor_row(&tensor, i % 2 != 0, i / 2, token);
            kernel_row_fill(random, kernel_random_below(random, KERNEL_ROW_KINDS), d, row);
            for (uint32_t j = 0; j < d; j++)
                row[j] = worker_bits(geometry->dtype, row[j]);
        }
    tensor.device = rig_upload(rig, tensor.host, tensor.elements * sizeof(uint16_t));
    return tensor;
}

void tensor_upload(struct rig *rig, struct tensor *tensor) {
    rig_write(rig, tensor->device, tensor->host, tensor->elements * sizeof(uint16_t));
}

void tensor_close(struct rig *rig, struct tensor *tensor) {
    rig_free(rig, tensor->device);
    free(tensor->host);
}

struct oscar_rows tensor_rows(const struct tensor *tensor, bool is_v) {
    return (struct oscar_rows){tensor->device + (is_v ? tensor->first_v : tensor->first_k), tensor->token_stride,
                               tensor->head_stride};
}

/* The same rows on the host. */
static struct oscar_rows on_host(const struct tensor *tensor, const struct oscar_rows *rows) {
    return (struct oscar_rows){tensor->host + ((const uint16_t *)rows->data - tensor->device), rows->token_stride,
                               rows->head_stride};
}

/* --- an arena --------------------------------------------------------------------------------------------------------------- */

struct arena arena_open(struct rig *rig, struct kernel_random *random, const struct oscar_geometry *geometry,
                        uint32_t slots) {
    struct arena arena = {.page_bytes = oscar_dense_page_bytes(geometry), .slots = slots};
    arena.device = rig_alloc(rig, arena.page_bytes * slots);
    arena.expected = malloc(arena.page_bytes * slots);
    arena.order = malloc(slots * sizeof(*arena.order));
    assert_non_null(arena.expected);
    assert_non_null(arena.order);
    memset(arena.expected, POISON, arena.page_bytes * slots);
    for (uint32_t i = 0; i < slots; i++) {
        uint32_t other = kernel_random_below(random, i + 1);
        arena.order[i] = arena.order[other];
        arena.order[other] = i;
    }
    return arena;
}

void arena_close(struct rig *rig, struct arena *arena) {
    rig_free(rig, arena->device);
    free(arena->expected);
    free(arena->order);
}

void arena_poison(struct rig *rig, struct arena *arena) {
    rig_poison(rig, arena->device, arena->page_bytes * arena->slots);
    memset(arena->expected, POISON, arena->page_bytes * arena->slots);
}

uint8_t *arena_page(const struct arena *arena, uint32_t slot) { return arena->device + slot * arena->page_bytes; }

uint8_t *arena_read(struct rig *rig, const struct arena *arena) {
    uint8_t *found = malloc(arena->page_bytes * arena->slots);
    assert_non_null(found);
    rig_read(rig, found, arena->device, arena->page_bytes * arena->slots);
    return found;
}

/* Rows of a store on the host into what is expected, of which those by a matrix are checked as they lie in `found`. */
struct check {
    struct arena *arena;
    const uint8_t *found;
    const struct kernel_model *model;
    const struct oscar_store_args *args;
    atomic_uint wrong; /* the last row that was found to be off, and 1 */
};

/* The first element of a stored row that is off its float64 value, or d. */
static uint32_t wrong_element(const float *matrix, uint32_t d, uint32_t dtype, const uint16_t *from,
                              const uint16_t *found, double *ret_exact, double *ret_magnitude) {
    double exact[MAX_DIM] = {0}, magnitude[MAX_DIM] = {0};
    for (uint32_t i = 0; i < d; i++) {
        double x = worker_float(dtype, from[i]);
        for (uint32_t j = 0; j < d; j++) {
            exact[j] += x * matrix[(size_t)i * d + j];
            magnitude[j] += fabs(x * matrix[(size_t)i * d + j]);
        }
    }
    for (uint32_t j = 0; j < d; j++) {
        double sum_error = SUM_ERROR * magnitude[j];
        double error = fabs(oscar_bf16_to_float(found[j]) - exact[j]);
        if (!(error <= sum_error + BF16_ERROR * (fabs(exact[j]) + sum_error) + LEAST_ERROR)) {
            *ret_exact = exact[j];
            *ret_magnitude = magnitude[j];
            return j;
        }
    }
    return d;
}

/* Row `row` of the store, in the order [token][head][K, V], unless Hadamard rotated it: accepted as it was found. Whether it is right;
 * if not, and `explains`, the test fails here. */
static bool accept_row(struct check *check, uint32_t row, bool explains) {
    const struct oscar_store_args *args = check->args;
    const struct oscar_geometry *geometry = &check->model->geometry;
    uint32_t d = geometry->head_dim, heads = geometry->kv_heads, head = row / 2 % heads, token = row / 2 / heads;
    bool is_v = row % 2 != 0;
    const struct oscar_head_calibration *own = oscar_calibration_head(&check->model->calibration, args->layer, head);
    const float *matrix = is_v ? own->rotation_v : own->rotation_k;
    if (!matrix)
        return true;
    const struct oscar_rows *rows = is_v ? &args->v : &args->k;
    uint32_t in_page = (args->first_row + token) % OSCAR_PAGE_TOKENS + (is_v ? OSCAR_PAGE_TOKENS : 0);
    size_t at = (size_t)(args->pages[(args->first_row + token) / OSCAR_PAGE_TOKENS] - check->arena->expected) +
                ((size_t)args->layer * heads + head) * oscar_dense_record_bytes(d) + (size_t)in_page * 2 * d;
    const uint16_t *found = (const uint16_t *)(check->found + at);
    double exact, magnitude;
    uint32_t j = wrong_element(matrix, d, geometry->dtype,
                               (const uint16_t *)rows->data + token * rows->token_stride + head * rows->head_stride,
                               found, &exact, &magnitude);
    if (j < d && explains)
        fail_msg("d %u, type %u: element %u is %g instead of %g; sum of magnitudes %g", d, geometry->dtype, j,
                 (double)oscar_bf16_to_float(found[j]), exact, magnitude);
    memcpy(check->arena->expected + at, found, (size_t)2 * d);
    return j == d;
}

static void accept_rows(void *argument, uint32_t task, uint32_t worker) {
    struct check *check = argument;
    (void)worker;
    uint32_t end = check->args->tokens * check->model->geometry.kv_heads * 2;
    for (uint32_t row = task * ROWS_A_TASK; row < end && row < (task + 1) * ROWS_A_TASK; row++)
        if (!accept_row(check, row, false))
            atomic_store(&check->wrong, row + 1);
}

int arena_expect(struct rig *rig, struct arena *arena, const uint8_t *found, const struct kernel_model *model,
                 const struct oscar_store_args *args, const struct tensor *tensor) {
    uint32_t count = (args->first_row + args->tokens + OSCAR_PAGE_TOKENS - 1) / OSCAR_PAGE_TOKENS;
    uint8_t **pages = calloc(count + 1, sizeof(*pages));
    assert_non_null(pages);
    for (uint32_t p = 0; p < count; p++)
        pages[p] = arena->expected + (args->pages[p] - arena->device);
    struct oscar_store_args on_this = *args;
    on_this.geometry = &model->geometry;
    on_this.calibration = &model->calibration;
    on_this.pages = pages;
    on_this.k = on_host(tensor, &args->k);
    on_this.v = on_host(tensor, &args->v);
    /* All levels store the same bytes. Where the host is under test, this is the one that its own does not share code with. */
    int r = host_store(rig_pool(rig), rig_on_gpu() ? host_level_best() : HOST_PORTABLE, &on_this);
    struct check check = {.arena = arena, .found = found, .model = model, .args = &on_this};
    uint32_t rows = args->tokens * model->geometry.kv_heads * 2;
    host_pool_run(rig_pool(rig), (rows + ROWS_A_TASK - 1) / ROWS_A_TASK, accept_rows, &check);
    if (check.wrong > 0)
        (void)accept_row(&check, check.wrong - 1, true);
    free(pages);
    return r;
}

void arena_check(const struct arena *arena, const uint8_t *found) {
    assert_memory_equal(found, arena->expected, arena->page_bytes * arena->slots);
}
