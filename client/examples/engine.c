/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An engine in small: two requests share most of a prompt, are decoded a step at a time by a batch, and one of them branches. The
 * manual, docs/CLIENT.md, goes through it. Its "model" is made up; what it does with the cache is what a real one does.
 */
#include <oscar/oscar.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LAYERS = 2, QUERY_HEADS = 8, KV_HEADS = 2, HEAD_DIM = 64, REQUESTS = 2, PROMPT = 500, SHARED = 450, STEPS = 70 };
enum { Q_ROW = QUERY_HEADS * HEAD_DIM, KV_ROW = KV_HEADS * HEAD_DIM, CHUNK = 128 };

static uint16_t q[CHUNK * Q_ROW], out[CHUNK * Q_ROW], k[CHUNK * KV_ROW], v[CHUNK * KV_ROW]; /* BF16 */

static void check(int error) {
    if (error < 0) {
        fprintf(stderr, "%s: %s\n%s\n", oscar_error_text(error), oscar_error_detail(), oscar_error_remedy(error));
        exit(EXIT_FAILURE);
    }
}

/* --- stands for the model ----------------------------------------------------------------------------------------- */

/* A row of Q, K or V of one layer, from the token and its place. */
static void project(uint16_t *row, unsigned values, uint32_t token, uint32_t position, uint32_t seed) {
    uint32_t state = (token + 1) * 2654435761U ^ (position + 1) * 40503U ^ (seed + 1) * 2246822519U;
    for (unsigned i = 0; i < values; i++) {
        state = state * 1664525U + 1013904223U;
        row[i] = (uint16_t)(0x3f00U | (state >> 16 & 0x80ffU)); /* +-(0.5 .. 2) */
    }
}

static void project_tokens(const uint32_t *tokens, uint32_t first, uint32_t count, uint32_t layer, uint32_t at) {
    for (uint32_t i = 0; i < count; i++) {
        project(q + (at + i) * Q_ROW, Q_ROW, tokens[i], first + i, 3 * layer);
        project(k + (at + i) * KV_ROW, KV_ROW, tokens[i], first + i, 3 * layer + 1);
        project(v + (at + i) * KV_ROW, KV_ROW, tokens[i], first + i, 3 * layer + 2);
    }
}

/* From the last layer's output row. */
static uint32_t sample(const uint16_t *row) {
    uint32_t token = 0;
    for (unsigned i = 0; i < Q_ROW; i++)
        token = token * 31 + row[i];
    return token % 32000;
}

/* --- one request -------------------------------------------------------------------------------------------------- */

struct request {
    struct oscar_seq *seq;
    uint32_t prompt[PROMPT];
    uint32_t next; /* the token that was sampled last: it is not stored yet */
};

static struct oscar_seq_info info_of(const struct oscar_seq *seq) {
    struct oscar_seq_info info = OSCAR_INIT(struct oscar_seq_info);
    check(oscar_seq_info(seq, &info));
    return info;
}

/* Finds what is cached of the prompt; where another worker is computing it just now, waits for that. */
static void open_request(struct oscar_model *model, struct request *request) {
    check(oscar_seq_open(model, request->prompt, PROMPT, OSCAR_SEQ_DENSE_TAIL, &request->seq));
    struct oscar_seq_info info = info_of(request->seq);
    if (info.in_flight_tokens > info.hit_tokens) {
        int r = oscar_seq_wait(request->seq, 10000);
        if (r != OSCAR_ERR_TIMEOUT) /* it takes too long: computed here, then */
            check(r);
        info = info_of(request->seq);
    }
    printf("%u of %u tokens were cached\n", info.hit_tokens, (unsigned)PROMPT);
}

/* Room for more tokens. A full cache is no failure: an engine lets other requests end first, or closes one of its own. */
static void reserve(struct oscar_seq *seq, uint32_t tokens) {
    int r;
    for (unsigned tries = 0; (r = oscar_seq_reserve(seq, tokens)) == OSCAR_ERR_NO_SPACE && tries < 100; tries++)
        (void)usleep(10000);
    check(r);
}

/* Computes what was not cached, and the last token of the prompt in any case: its output is what decoding begins with. */
static void prefill(struct oscar_model *model, struct oscar_stream *stream, struct request *request) {
    uint32_t committed = info_of(request->seq).committed_tokens;
    uint32_t first = committed < PROMPT ? committed : PROMPT - 1;
    reserve(request->seq, PROMPT - committed);
    for (uint32_t count; first < PROMPT; first += count) {
        count = PROMPT - first < CHUNK ? PROMPT - first : CHUNK;
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            const struct oscar_tensor k_rows = {k, KV_ROW, HEAD_DIM}, v_rows = {v, KV_ROW, HEAD_DIM};
            project_tokens(request->prompt + first, first, count, layer, 0);
            check(oscar_seq_store(request->seq, stream, layer, first, count, &k_rows, &v_rows));
            const struct oscar_attend_query query = {
                .seq = request->seq,
                .tokens = first + count,
                .rows = count,
                .q = q,
                .q_row_stride = Q_ROW,
                .q_head_stride = HEAD_DIM,
                .out = out,
                .out_row_stride = Q_ROW,
                .out_head_stride = HEAD_DIM,
            };
            check(oscar_attend(model, stream, layer, 0, &query, 1));
        }
        committed = info_of(request->seq).committed_tokens;
        if (first + count > committed)
            check(oscar_seq_advance(request->seq, stream, request->prompt + committed, first + count - committed));
        request->next = sample(out + (count - 1) * Q_ROW);
    }
}

/* --- steps of all requests ---------------------------------------------------------------------------------------- */

/* One token of each: room, the batch, each layer, then the tokens are complete. */
static void step(struct oscar_batch *batch, struct oscar_stream *stream, struct request *requests, uint32_t count) {
    struct oscar_batch_entry entries[REQUESTS];
    for (uint32_t i = 0; i < count; i++) {
        reserve(requests[i].seq, 1);
        entries[i] = (struct oscar_batch_entry){.seq = requests[i].seq, .rows = 1};
    }
    check(oscar_batch_set(batch, stream, entries, count));
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        for (uint32_t i = 0; i < count; i++)
            project_tokens(&requests[i].next, info_of(requests[i].seq).committed_tokens, 1, layer, i);
        check(oscar_batch_store(batch, stream, layer, k, v));
        check(oscar_batch_attend(batch, stream, layer, 0, q, out, NULL));
    }
    for (uint32_t i = 0; i < count; i++) {
        check(oscar_seq_advance(requests[i].seq, stream, &requests[i].next, 1));
        requests[i].next = sample(out + i * Q_ROW);
    }
}

static struct oscar_model *open_model(struct oscar_client *client) {
    static const uint8_t weights[32] = "digest of the engine's weights", rope[32] = "digest of its RoPE parameters";
    struct oscar_model_options options = OSCAR_INIT(struct oscar_model_options);
    oscar_geometry_init(&options.geometry, LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM, OSCAR_BF16);
    options.weights_digest = weights;
    options.revision = "main";
    options.rope_digest = rope;
    options.calibration = NULL; /* or the name of a file that oscar-calib made for these weights */
    struct oscar_model *model;
    check(oscar_model_open(client, &options, &model));
    return model;
}

int main(void) {
    struct oscar_client_options options = OSCAR_INIT(struct oscar_client_options);
    options.name = "engine";
    struct oscar_client *client;
    check(oscar_client_open(&options, &client));
    struct oscar_client_info daemon = OSCAR_INIT(struct oscar_client_info);
    check(oscar_client_info(client, &daemon));
    if (strcmp(daemon.backend, "host") != 0) {
        fprintf(stderr, "the tensors of this example lie in its own memory: start oscard with --backend host\n");
        return EXIT_FAILURE;
    }
    struct oscar_model *model = open_model(client);

    struct oscar_stream_params host = OSCAR_INIT(struct oscar_stream_params);
    host.threads = 2;
    struct oscar_stream *stream;
    check(oscar_stream_open(client, &host, &stream));

    struct oscar_batch_params sizes = OSCAR_INIT(struct oscar_batch_params);
    sizes.max_seqs = REQUESTS;
    sizes.max_rows = 1;
    sizes.max_tokens = (uint64_t)REQUESTS * (PROMPT + STEPS + 1);
    struct oscar_batch *batch;
    check(oscar_batch_open(model, &sizes, &batch));

    static struct request requests[REQUESTS];
    for (uint32_t i = 0; i < REQUESTS; i++) {
        for (uint32_t token = 0; token < PROMPT; token++)
            requests[i].prompt[token] = token < SHARED ? token : token + 1000 * i;
        open_request(model, &requests[i]);
        prefill(model, stream, &requests[i]);
    }
    for (uint32_t i = 0; i < STEPS; i++)
        step(batch, stream, requests, REQUESTS);

    struct request branch = requests[0];
    check(oscar_seq_fork(requests[0].seq, stream, &branch.seq));
    branch.next = (branch.next + 1) % 32000; /* another token than the first one's */
    oscar_seq_close(requests[1].seq);
    requests[1] = branch;
    step(batch, stream, requests, REQUESTS);

    const struct oscar_seq_info info = info_of(branch.seq);
    printf("%u tokens, %u of them read as INT2\n", info.committed_tokens, info.packed_tokens);
    oscar_stream_close(stream);
    oscar_client_close(client); /* its batch, sequences and model too */
    return EXIT_SUCCESS;
}
