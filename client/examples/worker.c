/* SPDX-License-Identifier: Apache-2.0 */
/* The smallest worker: stores the K/V of a prompt that is not cached yet, then attends over all of it. Run it twice. */
#include <oscar/oscar.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 2, QUERY_HEADS = 8, KV_HEADS = 2, HEAD_DIM = 64, PROMPT = 200 };

static uint16_t k[PROMPT][KV_HEADS][HEAD_DIM], v[PROMPT][KV_HEADS][HEAD_DIM]; /* BF16 */
static uint16_t q[QUERY_HEADS][HEAD_DIM], out[QUERY_HEADS][HEAD_DIM];

static void check(int error) {
    if (error < 0) {
        fprintf(stderr, "%s: %s\n%s\n", oscar_error_text(error), oscar_error_detail(), oscar_error_remedy(error));
        exit(EXIT_FAILURE);
    }
}

/* Stands for the model: projects `count` values to BF16. */
static void project(uint16_t *values, size_t count, unsigned seed) {
    for (size_t i = 0; i < count; i++)
        values[i] = (uint16_t)(0x3f00U | ((i * 2654435761U + seed) >> 8 & 0x80ffU)); /* +-(0.5 .. 2) */
}

int main(void) {
    const uint8_t weights[32] = "digest of the weights", rope[32] = "digest of the RoPE parameters";
    uint32_t prompt[PROMPT];
    for (uint32_t i = 0; i < PROMPT; i++)
        prompt[i] = i;

    struct oscar_client *client;
    check(oscar_client_open(NULL, &client));
    struct oscar_client_info daemon = OSCAR_INIT(struct oscar_client_info);
    check(oscar_client_info(client, &daemon));
    if (strcmp(daemon.backend, "host") != 0) { /* its kernels read memory of the GPU */
        fprintf(stderr, "the tensors of this example lie in its own memory: start oscard with --backend host\n");
        return EXIT_FAILURE;
    }

    struct oscar_model_options options = OSCAR_INIT(struct oscar_model_options);
    oscar_geometry_init(&options.geometry, LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM, OSCAR_BF16);
    options.weights_digest = weights;
    options.revision = "main";
    options.rope_digest = rope;
    struct oscar_model *model;
    check(oscar_model_open(client, &options, &model));

    struct oscar_seq *seq;
    struct oscar_seq_info info = OSCAR_INIT(struct oscar_seq_info);
    check(oscar_seq_open(model, prompt, PROMPT, 0, &seq));
    check(oscar_seq_info(seq, &info));
    printf("%u of %u tokens were cached\n", info.hit_tokens, (unsigned)PROMPT);

    const uint32_t first = info.hit_tokens, count = PROMPT - first;
    const struct oscar_tensor k_rows = {k[first], KV_HEADS * HEAD_DIM, HEAD_DIM};
    const struct oscar_tensor v_rows = {v[first], KV_HEADS * HEAD_DIM, HEAD_DIM};
    check(oscar_seq_reserve(seq, count));
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        project(&k[0][0][0], sizeof(k) / 2, 2 * layer);
        project(&v[0][0][0], sizeof(v) / 2, 2 * layer + 1);
        check(oscar_seq_store(seq, NULL, layer, first, count, &k_rows, &v_rows));

        project(&q[0][0], sizeof(q) / 2, layer);
        const struct oscar_attend_query query = {
            .seq = seq,
            .tokens = PROMPT,
            .rows = 1,
            .q = q,
            .q_head_stride = HEAD_DIM,
            .out = out,
            .out_head_stride = HEAD_DIM,
        };
        check(oscar_attend(model, NULL, layer, 0, &query, 1));
    }
    check(oscar_seq_advance(seq, NULL, prompt + first, count));

    oscar_client_close(client); /* and its model and sequence; the pages stay cached */
    return EXIT_SUCCESS;
}
