/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/gpu_worker.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "oscar/oscar.h"

#include "tests/bench/gpu_bench.h"
#include "tests/bench/samples.h"

#define MAX_SEQS 16U
#define STORED_TOKENS 2048U /* of one call of store; a prefill's chunk */
#define PREFILL_RATE 20000U /* tokens a second: about what an 8B model is prefilled with on one GPU */
#define ROOM_TOKENS 64U     /* a page of decoding */
#define WAIT_MS 60000U
#define ROW_ELEMENTS ((uint64_t)WORKER_KV_HEADS * WORKER_HEAD_DIM)
#define QUERY_ELEMENTS ((uint64_t)WORKER_QUERY_HEADS * WORKER_HEAD_DIM)

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        int try_result = (call);                                                                                       \
        if (try_result < 0)                                                                                            \
            give_up(#call, try_result);                                                                                \
    } while (0)

struct worker {
    struct line_pipe *pipe;
    uint32_t number;
    struct gpu_bench gpu;
    struct oscar_client *client;
    double connected_ms; /* what opening it took */
    struct oscar_model *model;
    struct oscar_stream *stream;
    uint16_t *rows;    /* device: K, then V of STORED_TOKENS tokens */
    uint16_t *queries; /* device: of all layers and sequences; outputs follow */
    uint32_t *path;    /* ids of a path's tokens */

    uint32_t seqs;
    struct oscar_seq *seq[MAX_SEQS];
    struct oscar_batch *batch;
    CUgraphExec step; /* store and attention of all layers */
    uint32_t steps;   /* that were advanced */
};

static char order[64]; /* that is being obeyed */

static _Noreturn void give_up(const char *call, int error) {
    fprintf(stderr, "gpu_share: \"%s\": %s: %s: %s\n", order, call, oscar_error_text(error), oscar_error_detail());
    exit(1);
}

static double seconds_since(uint64_t begin_ns) { return (double)(bench_now_ns() - begin_ns) * 1e-9; }

/* --- the worker and its sequences --------------------------------------------------------------------------------- */

static void open_worker(struct worker *worker, const struct worker_job *job) {
    gpu_open(&worker->gpu);
    worker->number = job->number;
    worker->rows = gpu_alloc(&worker->gpu, 2 * STORED_TOKENS * ROW_ELEMENTS * sizeof(uint16_t));
    gpu_fill_normal(&worker->gpu, worker->rows, 2 * STORED_TOKENS * ROW_ELEMENTS, job->number);
    uint64_t queries = WORKER_LAYERS * MAX_SEQS * QUERY_ELEMENTS;
    worker->queries = gpu_alloc(&worker->gpu, 2 * queries * sizeof(uint16_t));
    gpu_fill_normal(&worker->gpu, worker->queries, queries, ~job->number);
    gpu_wait(&worker->gpu);
    worker->path = malloc(WORKER_PATH_TOKENS * sizeof(*worker->path));
    if (worker->path == NULL)
        give_up("malloc", OSCAR_ERR_NO_MEMORY);
    struct oscar_client_options options = {.size = sizeof(options), .socket = job->socket, .timeout_ms = WAIT_MS};
    uint64_t begin = bench_now_ns();
    TRY(oscar_client_open(&options, &worker->client));
    worker->connected_ms = seconds_since(begin) * 1e3;
    struct oscar_stream_params params = {.size = sizeof(params), .native = worker->gpu.native};
    TRY(oscar_stream_open(worker->client, &params, &worker->stream));
}

static void open_model(struct worker *worker) {
    static const uint8_t digest[32] = {1};
    struct oscar_model_options options = {
        .size = sizeof(options), .weights_digest = digest, .rope_digest = digest, .revision = "bench"};
    if (worker->model != NULL)
        return;
    oscar_geometry_init(&options.geometry, WORKER_LAYERS, WORKER_QUERY_HEADS, WORKER_KV_HEADS, WORKER_HEAD_DIM,
                        OSCAR_BF16);
    TRY(oscar_model_open(worker->client, &options, &worker->model));
}

static uint32_t *path_tokens(struct worker *worker, uint32_t path) {
    for (uint32_t i = 0; i < WORKER_PATH_TOKENS; i++)
        worker->path[i] = path * WORKER_PATH_TOKENS + i;
    return worker->path;
}

/* Room for the tokens; the daemon's packing frees room all the time, so "no space" means: not yet. */
static void reserve(struct oscar_seq *seq, struct oscar_stream *stream, uint32_t tokens) {
    uint64_t begin = bench_now_ns();
    for (int r; (r = oscar_seq_reserve(seq, tokens)) < 0; usleep(1000)) {
        if (r != OSCAR_ERR_NO_SPACE || seconds_since(begin) * 1000 > WAIT_MS)
            give_up("oscar_seq_reserve", r);
        TRY(oscar_seq_advance(seq, stream, NULL, 0));
    }
}

static void store_rows(struct worker *worker, struct oscar_seq *seq, uint32_t first, uint32_t count) {
    struct oscar_tensor k = {worker->rows, ROW_ELEMENTS, WORKER_HEAD_DIM}, v = k;
    v.data = worker->rows + STORED_TOKENS * ROW_ELEMENTS;
    for (uint32_t layer = 0; layer < WORKER_LAYERS; layer++)
        TRY(oscar_seq_store(seq, worker->stream, layer, first, count, &k, &v));
}

/* True when the path was there already. */
static bool store_path(struct worker *worker, uint32_t path) {
    struct oscar_seq *seq;
    struct oscar_seq_info info = OSCAR_INIT(struct oscar_seq_info);
    const uint32_t *tokens = path_tokens(worker, path);
    TRY(oscar_seq_open(worker->model, tokens, WORKER_PATH_TOKENS, 0, &seq));
    TRY(oscar_seq_info(seq, &info));
    for (uint32_t done = info.hit_tokens; done < WORKER_PATH_TOKENS; done += STORED_TOKENS) {
        uint32_t count = WORKER_PATH_TOKENS - done < STORED_TOKENS ? WORKER_PATH_TOKENS - done : STORED_TOKENS;
        reserve(seq, worker->stream, count);
        store_rows(worker, seq, done, count);
        TRY(oscar_seq_advance(seq, worker->stream, tokens + done, count));
    }
    TRY(oscar_stream_wait(worker->stream, WAIT_MS));
    oscar_seq_close(seq);
    return info.hit_tokens == WORKER_PATH_TOKENS;
}

/* --- decoding ----------------------------------------------------------------------------------------------------- */

/* The sequences of a step; `held`: how many rows there are beyond what is committed, without this one. */
static void set_batch(struct worker *worker, uint32_t held) {
    struct oscar_batch_entry entry[MAX_SEQS];
    for (uint32_t i = 0; i < worker->seqs; i++) {
        struct oscar_seq_info info = OSCAR_INIT(struct oscar_seq_info);
        TRY(oscar_seq_info(worker->seq[i], &info));
        entry[i] = (struct oscar_batch_entry){worker->seq[i], 1, info.committed_tokens + held + 1};
    }
    TRY(oscar_batch_set(worker->batch, worker->stream, entry, worker->seqs));
}

static void enqueue_layers(struct worker *worker) {
    uint64_t queries = MAX_SEQS * QUERY_ELEMENTS;
    for (uint32_t layer = 0; layer < WORKER_LAYERS; layer++) {
        const uint16_t *k = worker->rows + layer * MAX_SEQS * ROW_ELEMENTS, *q = worker->queries + layer * queries;
        TRY(oscar_batch_store(worker->batch, worker->stream, layer, k, k + STORED_TOKENS * ROW_ELEMENTS));
        TRY(oscar_batch_attend(worker->batch, worker->stream, layer, 0, q,
                               worker->queries + (WORKER_LAYERS + layer) * queries, NULL));
    }
}

static void capture_step(struct worker *worker) {
    const struct cuda_driver *driver = worker->gpu.device->driver;
    CUgraph graph;
    for (uint32_t i = 0; i < worker->seqs; i++)
        reserve(worker->seq[i], worker->stream, ROOM_TOKENS);
    set_batch(worker, 0);
    gpu_must_driver(driver->cuStreamBeginCapture(worker->gpu.native, CU_STREAM_CAPTURE_MODE_RELAXED), "capture");
    enqueue_layers(worker);
    gpu_must_driver(driver->cuStreamEndCapture(worker->gpu.native, &graph), "end of a capture");
    gpu_must_driver(driver->cuGraphInstantiate(&worker->step, graph, 0), "graph");
    gpu_must_driver(driver->cuGraphDestroy(graph), "graph");
}

static void launch_step(struct worker *worker) {
    gpu_must_driver(worker->gpu.device->driver->cuGraphLaunch(worker->step, worker->gpu.native), "launch of a step");
}

/* Another text for each sequence behind the shared prefix: one page of it is there when decoding begins, so that pages that leave the
 * recent window are a sequence's own. */
static void open_seqs(struct worker *worker, uint32_t count) {
    struct oscar_batch_params params = {.size = sizeof(params),
                                        .max_seqs = count,
                                        .max_rows = 1,
                                        .max_tokens = (uint64_t)count * 2 * WORKER_PATH_TOKENS};
    struct oscar_seq_info info = OSCAR_INIT(struct oscar_seq_info);
    uint32_t tail[OSCAR_RECENT_TOKENS + OSCAR_PAGE_TOKENS];
    const uint32_t tail_tokens = sizeof(tail) / sizeof(tail[0]);
    int mps = 0;
    open_model(worker);
    worker->seqs = count;
    for (uint32_t i = 0; i < count; i++) {
        TRY(oscar_seq_open(worker->model, path_tokens(worker, 0), WORKER_PATH_TOKENS, 0, &worker->seq[i]));
        TRY(oscar_seq_info(worker->seq[i], &info));
        for (uint32_t j = 0; j < tail_tokens; j++)
            tail[j] = ~(((worker->number * MAX_SEQS + i) << 12) + j);
        reserve(worker->seq[i], worker->stream, tail_tokens);
        store_rows(worker, worker->seq[i], WORKER_PATH_TOKENS, tail_tokens);
        TRY(oscar_seq_advance(worker->seq[i], worker->stream, tail, tail_tokens));
    }
    TRY(oscar_stream_wait(worker->stream, WAIT_MS));
    TRY(oscar_batch_open(worker->model, &params, &worker->batch));
    capture_step(worker);
    gpu_must_driver(worker->gpu.device->driver->cuDeviceGetAttribute(&mps, CU_DEVICE_ATTRIBUTE_MPS_ENABLED,
                                                                     worker->gpu.device->device),
                    "MPS");
    line_tell(worker->pipe, "opened %u %d", info.hit_tokens, mps);
}

/* A step as an engine makes it: room where it is short, the batch, the graph, the token that comes of it. */
static void advance_step(struct worker *worker) {
    for (uint32_t i = 0; i < worker->seqs && worker->steps % ROOM_TOKENS == 0; i++)
        reserve(worker->seq[i], worker->stream, ROOM_TOKENS);
    set_batch(worker, 0);
    launch_step(worker);
    for (uint32_t i = 0; i < worker->seqs; i++) {
        uint32_t token = (worker->number * MAX_SEQS + i) << 16 | worker->steps;
        TRY(oscar_seq_advance(worker->seq[i], worker->stream, &token, 1));
    }
    TRY(oscar_stream_wait(worker->stream, WAIT_MS));
    worker->steps++;
}

/* The same without an advance: rows are written again and again within one page. */
static void hold_step(struct worker *worker, uint32_t step) {
    for (uint32_t i = 0; i < worker->seqs && step == 0; i++)
        reserve(worker->seq[i], worker->stream, ROOM_TOKENS);
    set_batch(worker, step % ROOM_TOKENS);
    launch_step(worker);
    TRY(oscar_stream_wait(worker->stream, WAIT_MS));
}

static void run_steps(struct worker *worker, bool advance, uint32_t count, double seconds) {
    uint64_t begin = bench_now_ns();
    uint32_t done = 0;
    while (done < count && seconds_since(begin) < seconds) {
        if (advance)
            advance_step(worker);
        else
            hold_step(worker, done);
        done++;
    }
    line_tell(worker->pipe, "took %u %.9f", done, seconds_since(begin));
}

/* --- prefilling --------------------------------------------------------------------------------------------------- */

static void prefill(struct worker *worker, double seconds, bool advance) {
    struct oscar_seq *seq;
    uint32_t tokens[STORED_TOKENS], done = 0;
    open_model(worker);
    TRY(oscar_seq_open(worker->model, NULL, 0, 0, &seq));
    reserve(seq, worker->stream, STORED_TOKENS);
    uint64_t begin = bench_now_ns();
    for (uint32_t chunk = 0; seconds_since(begin) < seconds; chunk++, done += STORED_TOKENS) {
        store_rows(worker, seq, advance ? done : 0, STORED_TOKENS);
        if (advance) {
            for (uint32_t i = 0; i < STORED_TOKENS; i++)
                tokens[i] = (worker->number << 24) + (uint32_t)(begin >> 10) + done + i;
            TRY(oscar_seq_advance(seq, worker->stream, tokens, STORED_TOKENS));
            reserve(seq, worker->stream, STORED_TOKENS);
        }
        TRY(oscar_stream_wait(worker->stream, WAIT_MS));
        if (chunk == 0)
            line_tell(worker->pipe, "going");
        double ahead = (double)(done + STORED_TOKENS) / PREFILL_RATE - seconds_since(begin);
        if (ahead > 0)
            usleep((useconds_t)(ahead * 1e6));
    }
    line_tell(worker->pipe, "took %u %.9f", done, seconds_since(begin));
    oscar_seq_close(seq);
}

/* --- attaching ---------------------------------------------------------------------------------------------------- */

static void attach(struct worker *worker, uint32_t paths) {
    struct samples open, launched;
    struct oscar_batch_params params = {
        .size = sizeof(params), .max_seqs = 1, .max_rows = 1, .max_tokens = WORKER_PATH_TOKENS};
    samples_init(&open, paths);
    samples_init(&launched, paths);
    uint64_t begin = bench_now_ns();
    open_model(worker);
    double model_ms = seconds_since(begin) * 1e3;
    TRY(oscar_batch_open(worker->model, &params, &worker->batch));
    for (uint32_t path = 0; path < paths; path++) {
        struct oscar_seq *seq;
        struct oscar_seq_info info = OSCAR_INIT(struct oscar_seq_info);
        const uint32_t *tokens = path_tokens(worker, path);
        begin = bench_now_ns();
        TRY(oscar_seq_open(worker->model, tokens, WORKER_PATH_TOKENS, 0, &seq));
        samples_add(&open, bench_now_ns() - begin);
        struct oscar_batch_entry entry = {seq, 1, WORKER_PATH_TOKENS};
        TRY(oscar_batch_set(worker->batch, worker->stream, &entry, 1));
        TRY(oscar_batch_attend(worker->batch, worker->stream, 0, 0, worker->queries,
                               worker->queries + WORKER_LAYERS * MAX_SEQS * QUERY_ELEMENTS, NULL));
        samples_add(&launched, bench_now_ns() - begin);
        TRY(oscar_stream_wait(worker->stream, WAIT_MS));
        TRY(oscar_seq_info(seq, &info));
        if (info.hit_tokens != WORKER_PATH_TOKENS)
            give_up("a path that should be cached is not", OSCAR_ERR_NOT_FOUND);
        oscar_seq_close(seq);
    }
    line_tell(worker->pipe, "attached %.9f %.9f %.9f %.9f", model_ms, worker->connected_ms,
              samples_percentile_ms(&open, 50), samples_percentile_ms(&launched, 50));
    samples_free(&open);
    samples_free(&launched);
}

/* --- the conversation --------------------------------------------------------------------------------------------- */

static void obey(struct worker *worker, const char *line) {
    char word[16];
    double first = 0, second = 0;
    snprintf(order, sizeof(order), "%.63s", line);
    int words = sscanf(line, "%15s %lf %lf", word, &first, &second);
    if (words >= 3 && strcmp(word, "store") == 0) {
        uint32_t hits = 0;
        open_model(worker);
        for (uint32_t i = 0; i < (uint32_t)second; i++)
            hits += store_path(worker, (uint32_t)first + i);
        line_tell(worker->pipe, "stored %u", hits);
    } else if (words >= 2 && strcmp(word, "open") == 0) {
        open_seqs(worker, (uint32_t)first);
    } else if (words >= 2 && strcmp(word, "decode") == 0) {
        run_steps(worker, true, UINT32_MAX, first);
    } else if (words >= 2 && strcmp(word, "steps") == 0) {
        run_steps(worker, true, (uint32_t)first, WAIT_MS);
    } else if (words >= 2 && strcmp(word, "hold") == 0) {
        run_steps(worker, false, (uint32_t)first, WAIT_MS);
    } else if (words >= 2 && strcmp(word, "hold_for") == 0) {
        run_steps(worker, false, UINT32_MAX, first);
    } else if (words >= 3 && strcmp(word, "prefill") == 0) {
        prefill(worker, first, second != 0);
    } else if (words >= 2 && strcmp(word, "attach") == 0) {
        attach(worker, (uint32_t)first);
    } else {
        fprintf(stderr, "gpu_share: a worker does not understand: %s\n", line);
        exit(1);
    }
}

int worker_body(struct line_pipe *pipe, void *job) {
    struct worker worker = {.pipe = pipe};
    char line[LINE_BYTES];
    open_worker(&worker, job);
    while (line_hear(pipe, line, sizeof(line), 600000) == 0)
        obey(&worker, line);
    oscar_client_close(worker.client);
    return 0;
}
