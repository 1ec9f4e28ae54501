/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/client_fixture.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/number.h"

#define MAX_TOKENS 4096U

static uint32_t token_ids[MAX_TOKENS]; /* read by any thread after the set-up */

int open_client(const struct fake_oscard *fake, struct oscar_client **ret) {
    struct oscar_client_options options = OSCAR_INIT(struct oscar_client_options);
    options.socket = fake_oscard_socket(fake);
    options.name = "test";
    options.timeout_ms = LONG_MS;
    return oscar_client_open(&options, ret);
}

int open_model(struct oscar_client *client, struct oscar_model **ret) {
    static const uint8_t weights[32] = {1}, rope[32] = {2};
    struct oscar_model_options options = OSCAR_INIT(struct oscar_model_options);
    oscar_geometry_init(&options.geometry, LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM, OSCAR_BF16);
    options.weights_digest = weights;
    options.revision = "main";
    options.rope_digest = rope;
    return oscar_model_open(client, &options, ret);
}

int tokens_setup(void **state) {
    (void)state;
    for (uint32_t i = 0; i < MAX_TOKENS; i++)
        token_ids[i] = 1000 + i;
    return 0;
}

int fake_setup(void **state) {
    (void)tokens_setup(state);
    struct client_world *world = calloc(1, sizeof(*world));
    if (world == NULL)
        return -1;
    world->fake = fake_oscard_start();
    *state = world;
    return 0;
}

int client_setup(void **state) {
    struct client_world *world;
    if (fake_setup(state) < 0)
        return -1;
    world = *state;
    return open_client(world->fake, &world->client);
}

int world_setup(void **state) {
    struct client_world *world;
    if (client_setup(state) < 0)
        return -1;
    world = *state;
    return open_model(world->client, &world->model);
}

int world_teardown(void **state) {
    struct client_world *world = *state;
    oscar_client_close(world->client);
    fake_oscard_stop(world->fake);
    free(world);
    return 0;
}

struct oscar_seq_info seq_info(const struct oscar_seq *seq) {
    struct oscar_seq_info info = OSCAR_INIT(struct oscar_seq_info);
    assert_ok(oscar_seq_info(seq, &info));
    return info;
}

const uint32_t *some_tokens(void) { return token_ids; }

int store_value(struct oscar_seq *seq, struct oscar_stream *stream, uint32_t layer, uint32_t first, uint32_t count,
                float value) {
    static uint16_t rows[MAX_TOKENS * ROW_ELEMENTS];
    for (size_t i = 0; i < (size_t)count * ROW_ELEMENTS; i++)
        rows[i] = oscar_bf16_from_float(value);
    const struct oscar_tensor tensor = {rows, ROW_ELEMENTS, HEAD_DIM};
    return oscar_seq_store(seq, stream, layer, first, count, &tensor, &tensor);
}

struct oscar_seq *written_seq(struct oscar_model *model, uint32_t tokens, uint32_t committed) {
    struct oscar_seq *seq;
    assert_ok(oscar_seq_open(model, NULL, 0, 0, &seq));
    assert_ok(oscar_seq_reserve(seq, tokens));
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        assert_ok(store_value(seq, NULL, layer, 0, committed, 1.0F));
    if (committed > 0)
        assert_ok(oscar_seq_advance(seq, NULL, some_tokens(), committed));
    return seq;
}

int attend_once(struct oscar_model *model, struct oscar_seq *seq, uint32_t tokens, uint16_t *ret_out) {
    static uint16_t q[QUERY_HEADS * HEAD_DIM];
    const struct oscar_attend_query query = {.seq = seq,
                                             .tokens = tokens,
                                             .rows = 1,
                                             .q = q,
                                             .q_row_stride = QUERY_HEADS * HEAD_DIM,
                                             .q_head_stride = HEAD_DIM,
                                             .out = ret_out,
                                             .out_row_stride = QUERY_HEADS * HEAD_DIM,
                                             .out_head_stride = HEAD_DIM};
    return oscar_attend(model, NULL, 0, 0, &query, 1);
}

double now_ms(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}
