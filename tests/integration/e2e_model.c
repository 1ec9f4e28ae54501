/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/integration/e2e_model.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "kernels/codec.h"
#include "kernels/number.h"
#include "kernels/rotate.h"
#include "tests/support/worker_process.h"

#define KEY_LENGTH 8.0F /* of every K row */
#define AIM 6.0F        /* query = AIM * key: its own logit is 48, that of any other key 6 times a normal variate */
#define ROWS 32U        /* of one aimed attend */
#define BOUND 0.02      /* of ||out - row|| / ||row||: BF16 of V, of the output, and what other tokens weigh */
#define MAX_HEAD_DIM 256U
#define SETTLE_MS 30000

static bool in_child;

void e2e_child(void) { in_child = true; }

void e2e_fail(const char *format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    if (!in_child)
        fail_msg("%s", text);
    fprintf(stderr, "child: %s\n", text);
    _exit(1);
}

void e2e_must(int result, const char *call, const char *file, int line) {
    if (result < 0)
        e2e_fail("%s:%d: %s: %s: %s", file, line, call, oscar_error_name(result), oscar_error_detail());
}

void e2e_refused(int result, int error, const char *call, const char *file, int line) {
    if (result != error)
        e2e_fail("%s:%d: %s: %d (%s: %s) instead of %s", file, line, call, result, oscar_error_name(result),
                 oscar_error_detail(), oscar_error_name(error));
    if (oscar_error_detail()[0] == 0)
        e2e_fail("%s:%d: %s: no word about the cause", file, line, call);
}

uint64_t e2e_random(uint64_t *state) {
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

void text_append(struct text *text, uint64_t seed, uint32_t count) {
    uint32_t total = text->count + count;
    text->ids = realloc(text->ids, sizeof(*text->ids) * (total + 1));
    text->chain = realloc(text->chain, sizeof(*text->chain) * (total + 1));
    if (text->ids == NULL || text->chain == NULL)
        e2e_fail("no memory for a text");
    for (uint32_t i = text->count; i < total; i++) {
        text->ids[i] = (uint32_t)e2e_random(&seed) & 0xffffU;
        uint64_t mixed = (i > 0 ? text->chain[i - 1] : 0) ^ ((uint64_t)text->ids[i] << 32) ^ i;
        text->chain[i] = e2e_random(&mixed);
    }
    text->count = total;
}

struct text text_copy(const struct text *text, uint32_t count) {
    struct text copy = {.count = count,
                        .ids = malloc(sizeof(*copy.ids) * (count + 1)),
                        .chain = malloc(sizeof(*copy.chain) * (count + 1))};
    if (count > text->count || copy.ids == NULL || copy.chain == NULL)
        e2e_fail("no copy of %u tokens", count);
    memcpy(copy.ids, text->ids, sizeof(*copy.ids) * count);
    memcpy(copy.chain, text->chain, sizeof(*copy.chain) * count);
    return copy;
}

void text_free(struct text *text) {
    free(text->ids);
    free(text->chain);
    memset(text, 0, sizeof(*text));
}

uint32_t text_common_pages(const struct text *a, const struct text *b) {
    uint32_t i = 0;
    while (i < a->count && i < b->count && a->chain[i] == b->chain[i])
        i++;
    return i / OSCAR_PAGE_TOKENS;
}

struct oscar_geometry e2e_geometry(void) {
    struct oscar_geometry geometry;
    oscar_geometry_init(&geometry, 2, 4, 2, 64, OSCAR_BF16);
    return geometry;
}

struct oscar_model_options e2e_model_options(const struct oscar_geometry *geometry) {
    static const uint8_t weights[32] = "no weights", rope[32] = "no positions";
    struct oscar_model_options options = {.size = sizeof(options),
                                          .geometry = *geometry,
                                          .weights_digest = weights,
                                          .revision = "synthetic",
                                          .rope_digest = rope};
    return options;
}

void e2e_worker_open_geometry(struct e2e_worker *worker, const char *socket, const char *name,
                              const struct oscar_geometry *geometry) {
    struct oscar_client_options client = {
        .size = sizeof(client), .socket = socket, .name = name, .timeout_ms = SETTLE_MS};
    struct oscar_model_options model = e2e_model_options(geometry);
    memset(worker, 0, sizeof(*worker));
    worker->geometry = *geometry;
    MUST(oscar_client_open(&client, &worker->client));
    MUST(oscar_model_open(worker->client, &model, &worker->model));
    MUST(oscar_calibration_default(geometry, &worker->calibration, NULL));
    struct oscar_client_info info = {.size = sizeof(info)};
    MUST(oscar_client_info(worker->client, &info));
    MUST(device_memory_open(info.backend, info.device, &worker->memory));
}

void e2e_worker_open(struct e2e_worker *worker, const char *socket, const char *name) {
    struct oscar_geometry geometry = e2e_geometry();
    e2e_worker_open_geometry(worker, socket, name, &geometry);
}

void e2e_worker_close(struct e2e_worker *worker) {
    oscar_client_close(worker->client);
    oscar_calibration_free(worker->calibration);
    device_memory_close(worker->memory);
    memset(worker, 0, sizeof(*worker));
}

static struct device_buffer *new_buffer(struct e2e_worker *worker, size_t count) {
    struct device_buffer *buffer = device_buffer_new(worker->memory, count * sizeof(uint16_t));
    if (buffer == NULL)
        e2e_fail("no device memory for %zu elements", count);
    return buffer;
}

struct device_buffer *e2e_buffer(struct e2e_worker *worker, const uint16_t *elements, size_t count) {
    struct device_buffer *buffer = new_buffer(worker, count);
    MUST(device_buffer_write(buffer, elements));
    return buffer;
}

struct device_buffer *e2e_buffer_poisoned(struct e2e_worker *worker, size_t count) {
    struct device_buffer *buffer = new_buffer(worker, count);
    void *poison = malloc(buffer->bytes + 1);
    if (poison == NULL)
        e2e_fail("no memory for %zu elements", count);
    memset(poison, 0xff, buffer->bytes); /* BF16 0xffff is a NaN */
    MUST(device_buffer_write(buffer, poison));
    free(poison);
    return buffer;
}

void e2e_buffer_read(const struct device_buffer *buffer, uint16_t *ret_elements) {
    MUST(device_buffer_read(buffer, ret_elements));
}

void e2e_write(struct e2e_worker *worker, void *to, const void *from, size_t bytes) {
    MUST(device_memory_copy(worker->memory, to, from, bytes));
}

struct oscar_seq *e2e_open(struct e2e_worker *worker, const struct text *text, uint32_t count, uint32_t flags) {
    struct oscar_seq *seq = NULL;
    MUST(oscar_seq_open(worker->model, text->ids, count, flags, &seq));
    return seq;
}

struct oscar_seq_info e2e_info(const struct oscar_seq *seq) {
    struct oscar_seq_info info = {.size = sizeof(info)};
    MUST(oscar_seq_info(seq, &info));
    return info;
}

uint32_t e2e_probe(struct e2e_worker *worker, const struct text *text, uint32_t count) {
    struct oscar_probe_result result;
    MUST(oscar_probe(worker->model, text->ids, count, &result, NULL));
    return result.hit_tokens;
}

/* The mean of four uniform bytes: near enough to normal, and cheap. */
static void random_row(uint64_t seed, uint32_t d, float *row) {
    for (uint32_t i = 0; i < d; i += 2) {
        uint64_t bits = e2e_random(&seed);
        for (uint32_t half = 0; half < 2; half++, bits >>= 32) {
            uint32_t sum = (uint32_t)((bits & 255) + ((bits >> 8) & 255) + ((bits >> 16) & 255) + ((bits >> 24) & 255));
            row[i + half] = ((float)sum - 510.0F) / 148.0F;
        }
    }
}

void e2e_row(const struct e2e_worker *worker, const struct text *text, uint32_t layer, uint32_t head, unsigned side,
             uint32_t position, uint16_t *ret_row) {
    uint32_t d = worker->geometry.head_dim;
    float row[MAX_HEAD_DIM], squares = 0;
    random_row(text->chain[position] ^ ((uint64_t)layer << 48) ^ ((uint64_t)head << 40) ^ ((uint64_t)side << 32), d,
               row);
    for (uint32_t i = 0; i < d; i++)
        squares += row[i] * row[i];
    float scale = side == 0 ? KEY_LENGTH / sqrtf(squares) : 1.0F;
    for (uint32_t i = 0; i < d; i++)
        ret_row[i] = oscar_bf16_from_float(row[i] * scale);
}

void e2e_store_layer(struct e2e_worker *worker, struct oscar_seq *seq, struct oscar_stream *stream,
                     const struct text *text, uint32_t layer, uint32_t first, uint32_t count) {
    const struct oscar_geometry *geometry = &worker->geometry;
    size_t token = (size_t)geometry->kv_heads * geometry->head_dim;
    uint16_t *rows = malloc(2 * token * count * sizeof(*rows));
    if (rows == NULL)
        e2e_fail("no memory for rows");
    for (unsigned side = 0; side < 2; side++) {
        for (uint32_t i = 0; i < count; i++) {
            for (uint32_t head = 0; head < geometry->kv_heads; head++)
                e2e_row(worker, text, layer, head, side, first + i,
                        rows + side * token * count + i * token + (size_t)head * geometry->head_dim);
        }
    }
    struct device_buffer *buffer = e2e_buffer(worker, rows, 2 * token * count);
    free(rows);
    const uint16_t *data = buffer->data;
    struct oscar_tensor k = {data, (int64_t)token, geometry->head_dim};
    struct oscar_tensor v = {data + token * count, (int64_t)token, geometry->head_dim};
    MUST(oscar_seq_store(seq, stream, layer, first, count, &k, &v));
    if (stream != NULL)
        MUST(oscar_stream_call(stream, device_buffer_free, buffer));
    else
        device_buffer_free(buffer);
}

void e2e_store(struct e2e_worker *worker, struct oscar_seq *seq, struct oscar_stream *stream, const struct text *text,
               uint32_t first, uint32_t count) {
    for (uint32_t layer = 0; layer < worker->geometry.layers; layer++)
        e2e_store_layer(worker, seq, stream, text, layer, first, count);
}

int e2e_try_extend(struct e2e_worker *worker, struct oscar_seq *seq, const struct text *text, uint32_t to) {
    for (uint32_t first = e2e_info(seq).committed_tokens; first < to;) {
        uint32_t count = to - first < 128 ? to - first : 128;
        int r = oscar_seq_reserve(seq, count);
        if (r == OSCAR_ERR_NO_SPACE)
            return r;
        MUST(r);
        e2e_store(worker, seq, worker->stream, text, first, count);
        MUST(oscar_seq_advance(seq, worker->stream, text->ids + first, count));
        first += count;
    }
    return 0;
}

struct extension {
    struct e2e_worker *worker;
    struct oscar_seq *seq;
    const struct text *text;
    uint32_t to;
    int result;
};

/* The daemon says which it is: writers wait for packing, or nothing more can be evicted (space_take in daemon/store/space.c). */
static bool passes_by_itself(void) { return strstr(oscar_error_detail(), "wait to be packed") != NULL; }

static bool has_extended_or_is_full(void *argument) {
    struct extension *extension = argument;
    extension->result = e2e_try_extend(extension->worker, extension->seq, extension->text, extension->to);
    return extension->result == 0 || !passes_by_itself();
}

int e2e_extend_or_full(struct e2e_worker *worker, struct oscar_seq *seq, const struct text *text, uint32_t to) {
    struct extension extension = {worker, seq, text, to, 0};
    if (!wait_until(has_extended_or_is_full, &extension, SETTLE_MS))
        e2e_fail("pages wait to be packed, however long one waits: %s", oscar_error_detail());
    return extension.result;
}

static bool has_extended(void *argument) {
    const struct extension *extension = argument;
    return e2e_try_extend(extension->worker, extension->seq, extension->text, extension->to) == 0;
}

static bool has_sealed(void *argument) {
    const struct extension *extension = argument;
    MUST(oscar_seq_advance(extension->seq, NULL, NULL, 0));
    return e2e_info(extension->seq).sealed_tokens == extension->to / OSCAR_PAGE_TOKENS * OSCAR_PAGE_TOKENS;
}

void e2e_extend(struct e2e_worker *worker, struct oscar_seq *seq, const struct text *text, uint32_t to) {
    struct extension extension = {worker, seq, text, to, 0};
    if (!wait_until(has_extended, &extension, SETTLE_MS))
        e2e_fail("no space for %u tokens, however long one waits", to);
    if (!wait_until(has_sealed, &extension, SETTLE_MS))
        e2e_fail("%u of %u tokens are sealed", e2e_info(seq).sealed_tokens, to);
}

struct settling {
    struct oscar_seq *seq;
    uint32_t tokens;
};

static bool has_settled(void *argument) {
    const struct settling *settling = argument;
    MUST(oscar_seq_advance(settling->seq, NULL, NULL, 0));
    return e2e_info(settling->seq).packed_tokens == settling->tokens;
}

void e2e_settle(struct oscar_seq *seq, uint32_t tokens) {
    struct settling settling = {seq, tokens};
    if (!wait_until(has_settled, &settling, SETTLE_MS))
        e2e_fail("%u tokens are read as INT2 instead of %u", e2e_info(seq).packed_tokens, tokens);
}

void e2e_aim(const struct e2e_worker *worker, const struct text *text, uint32_t layer, uint32_t query_head,
             uint32_t position, uint16_t *ret_q) {
    const struct oscar_geometry *geometry = &worker->geometry;
    e2e_row(worker, text, layer, query_head / (geometry->query_heads / geometry->kv_heads), 0, position, ret_q);
    for (uint32_t i = 0; i < geometry->head_dim; i++)
        ret_q[i] = oscar_bf16_from_float(oscar_bf16_to_float(ret_q[i]) * AIM);
}

/* What a packed page makes of a V row: rotated, BF16, coded, decoded, rotated back. */
static void through_codec(const struct e2e_worker *worker, uint32_t layer, uint32_t head, const float *v, float *ret) {
    uint32_t d = worker->geometry.head_dim;
    const struct oscar_head_calibration *calibration = oscar_calibration_head(worker->calibration, layer, head);
    float rotated[MAX_HEAD_DIM];
    uint8_t codes[MAX_HEAD_DIM];
    struct oscar_row_scale scale;
    oscar_rotate(HOST_PORTABLE, calibration->rotation_v, d, false, 1, v, d, rotated, d);
    for (uint32_t i = 0; i < d; i++)
        rotated[i] = oscar_bf16_to_float(oscar_bf16_from_float(rotated[i]));
    if (oscar_codec_row(rotated, d, calibration->rank_v, NULL, &scale, codes) < 0)
        e2e_fail("the codec refuses a row");
    for (uint32_t i = 0; i < d; i++)
        rotated[i] = ((float)codes[i] - oscar_fp16_to_float(scale.zero)) * oscar_fp16_to_float(scale.scale);
    oscar_rotate(HOST_PORTABLE, calibration->rotation_v, d, true, 1, rotated, d, ret, d);
}

static double distance(const uint16_t *out, const float *row, uint32_t d) {
    double difference = 0, norm = 0;
    for (uint32_t i = 0; i < d; i++) {
        double delta = (double)oscar_bf16_to_float(out[i]) - (double)row[i];
        difference += delta * delta;
        norm += (double)row[i] * (double)row[i];
    }
    return isnan(difference) ? INFINITY : sqrt(difference / norm);
}

bool e2e_is_int2(const struct e2e_worker *worker, const struct text *text, uint32_t layer, uint32_t query_head,
                 uint32_t position, const uint16_t *out) {
    const struct oscar_geometry *geometry = &worker->geometry;
    uint32_t d = geometry->head_dim, head = query_head / (geometry->query_heads / geometry->kv_heads);
    uint16_t row[MAX_HEAD_DIM];
    float stored[MAX_HEAD_DIM], coded[MAX_HEAD_DIM];
    e2e_row(worker, text, layer, head, 1, position, row);
    for (uint32_t i = 0; i < d; i++)
        stored[i] = oscar_bf16_to_float(row[i]);
    double bf16 = distance(out, stored, d);
    if (bf16 <= BOUND)
        return false;
    through_codec(worker, layer, head, stored, coded);
    double int2 = distance(out, coded, d);
    if (int2 > BOUND)
        e2e_fail("position %u (page %u), layer %u, query head %u: neither its BF16 row (off by %.3f) nor its INT2 row "
                 "(off by %.3f)",
                 position, position / OSCAR_PAGE_TOKENS, layer, query_head, bf16, int2);
    return true;
}

/* Row i of the attend stands at tokens - count + i and may aim at no later position. */
static void check_batch(struct e2e_worker *worker, struct oscar_seq *seq, const struct text *text, uint32_t tokens,
                        const uint32_t *positions, uint32_t count, struct e2e_seen *seen) {
    const struct oscar_geometry *geometry = &worker->geometry;
    size_t head = geometry->head_dim, row = head * geometry->query_heads;
    uint16_t *q = malloc(2 * ROWS * row * sizeof(*q)), *out = q + ROWS * row;
    if (q == NULL)
        e2e_fail("no memory for queries");
    for (uint32_t layer = 0; layer < geometry->layers; layer++) {
        for (uint32_t i = 0; i < count; i++) {
            REQUIRE(positions[i] <= tokens - count + i);
            for (uint32_t h = 0; h < geometry->query_heads; h++)
                e2e_aim(worker, text, layer, h, positions[i], q + i * row + h * head);
        }
        struct device_buffer *queries = e2e_buffer(worker, q, count * row);
        struct device_buffer *outputs = e2e_buffer_poisoned(worker, count * row);
        struct oscar_attend_query query = {.seq = seq,
                                           .tokens = tokens,
                                           .rows = count,
                                           .q = queries->data,
                                           .q_row_stride = (int64_t)row,
                                           .q_head_stride = (int64_t)head,
                                           .out = outputs->data,
                                           .out_row_stride = (int64_t)row,
                                           .out_head_stride = (int64_t)head};
        MUST(oscar_attend(worker->model, worker->stream, layer, 0, &query, 1));
        if (worker->stream != NULL)
            MUST(oscar_stream_wait(worker->stream, SETTLE_MS));
        e2e_buffer_read(outputs, out);
        device_buffer_free(outputs);
        device_buffer_free(queries);
        for (uint32_t i = 0; i < count; i++) {
            for (uint32_t h = 0; h < geometry->query_heads; h++) {
                if (e2e_is_int2(worker, text, layer, h, positions[i], out + i * row + h * head))
                    seen->int2++;
                else
                    seen->bf16++;
            }
        }
    }
    free(q);
}

struct e2e_seen e2e_check_positions(struct e2e_worker *worker, struct oscar_seq *seq, const struct text *text,
                                    uint32_t tokens, const uint32_t *positions, uint32_t count) {
    struct e2e_seen seen = {0, 0};
    for (uint32_t i = 0; i < count; i++)
        check_batch(worker, seq, text, tokens, positions + i, 1, &seen);
    return seen;
}

struct e2e_seen e2e_check_all(struct e2e_worker *worker, struct oscar_seq *seq, const struct text *text,
                              uint32_t tokens) {
    struct e2e_seen seen = {0, 0};
    for (uint32_t first = 0; first < tokens; first += ROWS) {
        uint32_t positions[ROWS], count = tokens - first < ROWS ? tokens - first : ROWS;
        for (uint32_t i = 0; i < count; i++)
            positions[i] = first + i;
        check_batch(worker, seq, text, tokens, positions, count, &seen);
    }
    return seen;
}

struct e2e_seen e2e_check_some(struct e2e_worker *worker, struct oscar_seq *seq, const struct text *text,
                               uint32_t tokens, uint64_t *random, uint32_t count) {
    struct e2e_seen seen = {0, 0};
    for (uint32_t i = 0; i < count && tokens > 0; i++) {
        uint32_t position = (uint32_t)(e2e_random(random) % tokens);
        check_batch(worker, seq, text, tokens, &position, 1, &seen);
    }
    return seen;
}
