/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One inference worker of the demo: a process on the public client API alone whose "model" is a replay of captured activations.
 * Its Q, K, V and outputs lie in memory of the device. It checks every output row against exact float64 attention over the same
 * K/V and says what it did in lines:
 *
 *     open N             -> opened hit=.. attach_us=.. backend=.. device=..   the first N tokens of the text are its prompt
 *     attach N TIMES     -> attached us us us ...                      opens model and sequence TIMES times, and closes them
 *     prefill TO CHUNK   -> step .. for each chunk, then done          store, attend and advance, CHUNK tokens at a time
 *     decode TO          -> step .. for each token, then done
 *     half               -> half position=..                           stores the next token in some of its layers, and stops there
 *     poll               -> polled committed=.. sealed=.. packed=..
 *     quit               -> (exits)
 *
 *     step tokens=T bf16=ROWS,SUM,MAX int2=ROWS,SUM,MAX
 *
 * A step line speaks of output rows (all layers and query heads) over the first T tokens: how many, the sum and the maximum of their
 * relative errors; apart for those that read nothing but BF16 and for those that read some of it as INT2.
 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "oscar/oscar.h"

#include "tests/support/device_memory.h"
#include "tests/support/replay.h"

#define MAX_CHUNK 256U

struct worker {
    const char *name, *socket;
    const char *calibration; /* its name in the daemon's folder; NULL: the default */
    struct replay *replay;
    struct oscar_client *client;
    struct oscar_model *model;
    struct oscar_seq *seq;
    struct device_memory *memory;
    struct device_buffer *k, *v;                 /* [MAX_CHUNK][kv_heads][head_dim] */
    struct device_buffer *q_device, *out_device; /* [MAX_CHUNK][query_heads][head_dim] */
    uint16_t *out;                               /* its copy */
    double *exact;                               /* [query_heads][head_dim] */
};

struct errors {
    uint32_t rows;
    double sum, max;
};

static int fail(const struct worker *worker, const char *what, int error) {
    fprintf(stderr, "worker %s: %s: %s: %s (%s)\n", worker->name, what, oscar_error_text(error), oscar_error_detail(),
            oscar_error_remedy(error));
    return error;
}

static double now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

static int info_of(const struct worker *worker, struct oscar_seq_info *ret_info) {
    *ret_info = (struct oscar_seq_info){.size = sizeof(*ret_info)};
    int r = oscar_seq_info(worker->seq, ret_info);
    return r < 0 ? fail(worker, "sequence info", r) : 0;
}

static int connect_daemon(struct worker *worker) {
    struct oscar_client_options options = {.size = sizeof(options), .socket = worker->socket, .name = worker->name};
    struct oscar_client_info info = {.size = sizeof(info)};
    int r = oscar_client_open(&options, &worker->client);
    if (r == 0)
        r = oscar_client_info(worker->client, &info);
    if (r < 0)
        return fail(worker, "connect", r);
    return device_memory_open(info.backend, info.device, &worker->memory);
}

/* Tensors of one layer and chunk, and the outputs where they are compared. */
static int make_tensors(struct worker *worker) {
    const struct oscar_geometry *geometry = replay_geometry(worker->replay);
    size_t q_row = (size_t)geometry->query_heads * geometry->head_dim;
    size_t kv_row = (size_t)geometry->kv_heads * geometry->head_dim;
    worker->k = device_buffer_new(worker->memory, MAX_CHUNK * kv_row * sizeof(uint16_t));
    worker->v = device_buffer_new(worker->memory, MAX_CHUNK * kv_row * sizeof(uint16_t));
    worker->q_device = device_buffer_new(worker->memory, MAX_CHUNK * q_row * sizeof(uint16_t));
    worker->out_device = device_buffer_new(worker->memory, MAX_CHUNK * q_row * sizeof(uint16_t));
    worker->out = malloc(MAX_CHUNK * q_row * sizeof(*worker->out));
    worker->exact = malloc(q_row * sizeof(*worker->exact));
    if (worker->k == NULL || worker->v == NULL || worker->q_device == NULL || worker->out_device == NULL ||
        worker->out == NULL || worker->exact == NULL)
        return fail(worker, "start", OSCAR_ERR_NO_MEMORY);
    return 0;
}

static int open_model(struct worker *worker) {
    static const uint8_t rope[32] = "base and pairs as in the capture";
    struct oscar_model_options options = {
        .size = sizeof(options),
        .geometry = *replay_geometry(worker->replay),
        .weights_digest = replay_weights_digest(worker->replay),
        .revision = "captured layers",
        .rope_digest = rope,
        .calibration = worker->calibration,
    };
    int r = oscar_model_open(worker->client, &options, &worker->model);
    return r < 0 ? fail(worker, "open model", r) : 0;
}

/* Model and sequence open: from here on attention over the hit is possible, in place. */
static int attach(struct worker *worker, uint32_t tokens, double *ret_us) {
    double begin = now_us();
    int r = open_model(worker);
    if (r < 0)
        return r;
    r = oscar_seq_open(worker->model, replay_token_ids(worker->replay), tokens, 0, &worker->seq);
    if (r < 0)
        return fail(worker, "open sequence", r);
    *ret_us = now_us() - begin;
    return 0;
}

static int do_open(struct worker *worker, uint32_t tokens) {
    double us;
    struct oscar_client_info client = {.size = sizeof(client)};
    struct oscar_seq_info info;
    int r = attach(worker, tokens, &us);
    if (r == 0)
        r = info_of(worker, &info);
    if (r == 0)
        r = oscar_client_info(worker->client, &client);
    if (r == 0)
        printf("opened hit=%u packed=%u attach_us=%.1f backend=%s device=%s\n", info.hit_tokens, info.packed_tokens, us,
               client.backend, client.device);
    return r;
}

static int do_attach(struct worker *worker, uint32_t tokens, uint32_t times) {
    printf("attached");
    for (uint32_t i = 0; i < times; i++) {
        double us;
        int r = attach(worker, tokens, &us);
        if (r < 0)
            return r;
        printf(" %.1f", us);
        oscar_seq_close(worker->seq);
        oscar_model_close(worker->model);
        worker->seq = NULL;
        worker->model = NULL;
    }
    printf("\n");
    return 0;
}

static int store(struct worker *worker, uint32_t layer, uint32_t first, uint32_t count) {
    const struct oscar_geometry *geometry = replay_geometry(worker->replay);
    int64_t stride = (int64_t)geometry->kv_heads * geometry->head_dim;
    size_t bytes = count * (size_t)stride * sizeof(uint16_t);
    struct oscar_tensor k = {worker->k->data, stride, geometry->head_dim};
    struct oscar_tensor v = {worker->v->data, stride, geometry->head_dim};
    int r = device_memory_copy(worker->memory, worker->k->data, replay_k(worker->replay, layer, first), bytes);
    if (r == 0)
        r = device_memory_copy(worker->memory, worker->v->data, replay_v(worker->replay, layer, first), bytes);
    if (r == 0)
        r = oscar_seq_store(worker->seq, NULL, layer, first, count, &k, &v);
    return r < 0 ? fail(worker, "store", r) : 0;
}

/* Attends with the query rows of positions first .. first + count - 1: the outputs are in worker->out. */
static int attend_rows(struct worker *worker, uint32_t layer, uint32_t first, uint32_t count) {
    const struct oscar_geometry *geometry = replay_geometry(worker->replay);
    int64_t row = (int64_t)geometry->query_heads * geometry->head_dim;
    size_t bytes = count * (size_t)row * sizeof(uint16_t);
    struct oscar_attend_query query = {
        .seq = worker->seq,
        .tokens = first + count,
        .rows = count,
        .q = worker->q_device->data,
        .q_row_stride = row,
        .q_head_stride = geometry->head_dim,
        .out = worker->out_device->data,
        .out_row_stride = row,
        .out_head_stride = geometry->head_dim,
    };
    memset(worker->out, 0xff, bytes); /* NaN, where nothing is written */
    int r = device_memory_copy(worker->memory, worker->out_device->data, worker->out, bytes);
    if (r == 0)
        r = device_memory_copy(worker->memory, worker->q_device->data, replay_q(worker->replay, layer, first), bytes);
    if (r == 0)
        r = oscar_attend(worker->model, NULL, layer, 0, &query, 1);
    if (r == 0)
        r = device_memory_copy(worker->memory, worker->out, worker->out_device->data, bytes);
    return r < 0 ? fail(worker, "attend", r) : 0;
}

/* The same, and compares each row. */
static int attend(struct worker *worker, uint32_t layer, uint32_t first, uint32_t count, struct errors *bf16,
                  struct errors *int2) {
    const struct oscar_geometry *geometry = replay_geometry(worker->replay);
    int64_t row = (int64_t)geometry->query_heads * geometry->head_dim;
    int r = attend_rows(worker, layer, first, count);
    if (r < 0)
        return r;
    struct oscar_seq_info info; /* the page table that was used: it changes in calls only */
    r = info_of(worker, &info);
    if (r < 0)
        return r;
    struct errors *errors = info.packed_tokens == 0 ? bf16 : int2;
    for (uint32_t i = 0; i < count; i++) {
        replay_exact(worker->replay, layer, first + i, worker->exact);
        for (uint32_t h = 0; h < geometry->query_heads; h++) {
            size_t head = (size_t)h * geometry->head_dim;
            double error = replay_relative_error(worker->out + (size_t)i * (size_t)row + head, worker->exact + head,
                                                 geometry->head_dim);
            errors->rows++;
            errors->sum += error;
            if (error > errors->max)
                errors->max = error;
        }
    }
    return 0;
}

/* One step of a model over `count` new tokens: each layer stores its K/V and attends, then the tokens are complete. */
static int step(struct worker *worker, uint32_t first, uint32_t count) {
    struct errors bf16 = {0, 0, 0}, int2 = {0, 0, 0};
    int r = oscar_seq_reserve(worker->seq, count);
    if (r < 0)
        return fail(worker, "reserve", r);
    for (uint32_t layer = 0; r == 0 && layer < replay_geometry(worker->replay)->layers; layer++) {
        r = store(worker, layer, first, count);
        if (r == 0)
            r = attend(worker, layer, first, count, &bf16, &int2);
    }
    if (r < 0)
        return r;
    r = oscar_seq_advance(worker->seq, NULL, replay_token_ids(worker->replay) + first, count);
    if (r < 0)
        return fail(worker, "advance", r);
    printf("step tokens=%u bf16=%u,%.9g,%.9g int2=%u,%.9g,%.9g\n", first + count, bf16.rows, bf16.sum, bf16.max,
           int2.rows, int2.sum, int2.max);
    return 0;
}

static int do_steps(struct worker *worker, uint32_t to, uint32_t chunk) {
    struct oscar_seq_info info;
    int r = info_of(worker, &info);
    if (r < 0)
        return r;
    if (to > replay_tokens(worker->replay) || chunk == 0 || chunk > MAX_CHUNK)
        return fail(worker, "steps", OSCAR_ERR_INVALID);
    for (uint32_t first = info.committed_tokens; first < to; first += chunk) {
        r = step(worker, first, to - first < chunk ? to - first : chunk);
        if (r < 0)
            return r;
        fflush(stdout);
    }
    printf("done\n");
    return 0;
}

/* The state in which a worker is killed: a token's rows are in some layers' pages and not in the others'. */
static int do_half(struct worker *worker) {
    struct oscar_seq_info info;
    int r = info_of(worker, &info);
    if (r < 0)
        return r;
    r = oscar_seq_reserve(worker->seq, 1);
    if (r < 0)
        return fail(worker, "reserve", r);
    for (uint32_t layer = 0; r == 0 && layer < (replay_geometry(worker->replay)->layers + 1) / 2; layer++)
        r = store(worker, layer, info.committed_tokens, 1);
    if (r == 0)
        printf("half position=%u\n", info.committed_tokens);
    return r;
}

static int do_poll(struct worker *worker) {
    struct oscar_seq_info info;
    int r = oscar_seq_advance(worker->seq, NULL, NULL, 0);
    if (r < 0)
        return fail(worker, "advance", r);
    r = info_of(worker, &info);
    if (r == 0)
        printf("polled committed=%u sealed=%u packed=%u\n", info.committed_tokens, info.sealed_tokens,
               info.packed_tokens);
    return r;
}

static int obey(struct worker *worker, const char *line) {
    unsigned a, b;
    if (sscanf(line, "open %u", &a) == 1)
        return do_open(worker, a);
    if (sscanf(line, "attach %u %u", &a, &b) == 2)
        return do_attach(worker, a, b);
    if (sscanf(line, "prefill %u %u", &a, &b) == 2)
        return do_steps(worker, a, b);
    if (sscanf(line, "decode %u", &a) == 1)
        return do_steps(worker, a, 1);
    if (strcmp(line, "half\n") == 0)
        return do_half(worker);
    if (strcmp(line, "poll\n") == 0)
        return do_poll(worker);
    fprintf(stderr, "worker %s: what is: %s", worker->name, line);
    return OSCAR_ERR_INVALID;
}

static int serve(struct worker *worker) {
    int r = connect_daemon(worker);
    if (r == 0)
        r = make_tensors(worker);
    char line[256];
    while (r == 0 && fgets(line, sizeof(line), stdin) != NULL && strcmp(line, "quit\n") != 0) {
        r = obey(worker, line);
        fflush(stdout);
    }
    return r;
}

int main(int argc, char **argv) {
    static const struct option options[] = {
        {"socket", required_argument, NULL, 's'},      {"capture", required_argument, NULL, 'c'},
        {"name", required_argument, NULL, 'n'},        {"branch", required_argument, NULL, 'b'},
        {"calibration", required_argument, NULL, 'f'}, {NULL, 0, NULL, 0}};
    struct worker worker = {.name = "worker"};
    const char *capture = NULL;
    unsigned at = 0, source = 0;
    for (int option; (option = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (option == 's')
            worker.socket = optarg;
        else if (option == 'c')
            capture = optarg;
        else if (option == 'n')
            worker.name = optarg;
        else if (option == 'f')
            worker.calibration = optarg;
        else if (option != 'b' || sscanf(optarg, "%u:%u", &at, &source) != 2)
            return 2;
    }
    char why[256];
    if (capture == NULL || replay_open(capture, &worker.replay, why, sizeof(why)) < 0) {
        fprintf(stderr, "worker %s: %s\n", worker.name, capture == NULL ? "no --capture" : why);
        return 2;
    }
    int r = source != 0 ? replay_branch(worker.replay, at, source) : 0;
    if (r == 0)
        r = serve(&worker);
    oscar_client_close(worker.client);
    device_buffer_free(worker.k);
    device_buffer_free(worker.v);
    device_buffer_free(worker.q_device);
    device_buffer_free(worker.out_device);
    device_memory_close(worker.memory);
    replay_free(worker.replay);
    free(worker.out);
    free(worker.exact);
    return r == 0 ? 0 : 1;
}
