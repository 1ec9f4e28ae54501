/* SPDX-License-Identifier: Apache-2.0 */
/*
 * liboscar: an inference worker's view of oscard, the daemon that keeps one prefix-shared KV cache for a host.
 *
 * The order of calls:
 *
 *     oscar_client_open        connect, once a process
 *     oscar_model_open         name the model: geometry, identity, calibration; its pages are mapped
 *     oscar_seq_open           tokens in, a sequence out: how many of them are cached already (the hit)
 *     oscar_seq_reserve        room for the tokens to come
 *       oscar_seq_store        each layer: rotate K, V of new tokens and write them to the sequence's pages
 *       oscar_attend           each layer: attention over sink, INT2 history and recent window, in place
 *     oscar_seq_advance        these tokens are complete in all layers
 *     oscar_seq_close
 *
 * An engine that steps many sequences at a time, or that captures its steps in a CUDA graph, stores and attends through a batch
 * (oscar_batch_open).
 *
 * Errors. A call returns 0 or a negative code of oscar/error.h; outputs (`ret_*`) are untouched on failure. The exact cause of
 * the last failed call of the calling thread is oscar_error_detail(), with the remedy in oscar_error_remedy(code).
 *
 * Deadlines. A call that speaks to the daemon returns within the client's timeout (options.timeout_ms, oscar_client_set_timeout)
 * with OSCAR_ERR_TIMEOUT at worst (oscar_seq_wait: within its own time and that one); calls that only touch memory or enqueue
 * work do not wait at all. A call that ran out of time may have been carried out all the same; the library finds out with its
 * next call. Once the daemon has gone every call that speaks to it is OSCAR_ERR_DISCONNECTED at once, and attention over the
 * pages that a sequence has goes on working until the client is closed. On a GPU an illegal access, the worker's own or the
 * library's, ends the process's context there: OSCAR_ERR_DEVICE from every later call that touches the device. Other processes
 * are not disturbed, and the daemon takes the worker's pages back when it exits.
 *
 * Threads. A client and a model may be used from any threads at once; a sequence from one thread at a time. The library starts
 * no thread, except for an asynchronous host stream that the caller opens. A forked child may not use its parent's client:
 * OSCAR_ERR_STATE; it opens one of its own.
 *
 * Streams. Calls that touch pages take the worker's stream and return at once; NULL does the work inside the call: on the host in
 * the calling thread, on a GPU in a stream that the library keeps for it. A sequence's calls go to one stream, or the caller
 * orders its streams.
 *
 * Tensors are the caller's: BF16 or FP16 as the geometry says, with row strides in elements, read until the stream has passed. On
 * a GPU they lie in memory that its kernels can access, and so do the rows of oscar_seq_rows().
 *
 * Structs of options begin with `size`: set it to sizeof (OSCAR_INIT does); a later library accepts the older, smaller struct.
 */
#ifndef OSCAR_OSCAR_H
#define OSCAR_OSCAR_H

#include <stddef.h>
#include <stdint.h>

#include "oscar/error.h"
#include "oscar/geometry.h"

#if defined(__GNUC__)
#define OSCAR_API __attribute__((visibility("default")))
#else
#define OSCAR_API
#endif

#ifdef __cplusplus
template <typename type> type oscar_init() {
    type object = type();
    object.size = sizeof(type);
    return object;
}
#endif

#ifdef __cplusplus
extern "C" {
#endif

struct oscar_client;
struct oscar_model;
struct oscar_seq;
struct oscar_lease;
struct oscar_stream;

/* An empty struct of options or information: `struct oscar_client_options options = OSCAR_INIT(struct oscar_client_options);` */
#ifdef __cplusplus
#define OSCAR_INIT(type) (oscar_init<type>())
#else
#define OSCAR_INIT(type) ((type){.size = sizeof(type)})
#endif

/* Library version, "0.1.0". */
OSCAR_API const char *oscar_version(void);
/* Cause of the last failed call of this thread: one line, valid until the thread's next failing call; "" if none. */
OSCAR_API const char *oscar_error_detail(void);

/* --- client ------------------------------------------------------------------------------------------------------ */

struct oscar_client_options {
    size_t size;
    /* Path; NULL: $OSCAR_SOCKET, else $XDG_RUNTIME_DIR/oscard/worker.sock, else /run/oscard/worker.sock. */
    const char *socket;
    const char *name;    /* shown to operators; NULL: the program's name */
    const char *group;   /* workers of one group may adopt each other's leases; NULL: "" */
    uint32_t timeout_ms; /* of every call that speaks to the daemon; 0: 5000 */
};

/* Connects and agrees on a version. OSCAR_ERR_NOT_RUNNING, _VERSION, _PERMISSION, _TIMEOUT, _LIMIT. */
OSCAR_API int oscar_client_open(const struct oscar_client_options *options, struct oscar_client **ret_client);
/* Closes everything that was opened through it; speaks to the daemon within the timeout, and to one that is gone or stopped not at
 * all. Pages stay readable by enqueued work until the daemon has seen its fences. Models, sequences, leases and batches of it are freed:
 * do not use them again. NULL is fine. */
OSCAR_API void oscar_client_close(struct oscar_client *client);
OSCAR_API void oscar_client_set_timeout(struct oscar_client *client, uint32_t timeout_ms);

struct oscar_client_info {
    size_t size;
    uint64_t incarnation; /* of the daemon: another value means that it lost its cache in between */
    uint32_t protocol_major, protocol_minor;
    char backend[128], device[128], tenant[128], daemon_version[128];
};
OSCAR_API int oscar_client_info(const struct oscar_client *client, struct oscar_client_info *ret_info);
/* An empty round trip through the daemon's event loop: a health check. */
OSCAR_API int oscar_client_ping(struct oscar_client *client);

/* --- streams ----------------------------------------------------------------------------------------------------- */

struct oscar_stream_params {
    size_t size;
    uint32_t threads; /* host: CPU threads a call may use; 0: 1 */
    uint32_t
        asynchronous; /* 1: calls return at once (host: the work runs in a thread of the stream); 0: when it is done */
    /* GPU: the worker's own stream (a CUstream; the legacy default one is CU_STREAM_LEGACY), always asynchronous, which must
     * outlive the object; NULL: one that is made here. */
    void *native;
};

OSCAR_API int oscar_stream_open(struct oscar_client *client, const struct oscar_stream_params *params,
                                struct oscar_stream **ret_stream);
/* 0, OSCAR_ERR_TIMEOUT, or the work's first failure. */
OSCAR_API int oscar_stream_wait(struct oscar_stream *stream, uint32_t timeout_ms);
/* Enqueues a call of `function`. */
OSCAR_API int oscar_stream_call(struct oscar_stream *stream, void (*function)(void *), void *argument);
OSCAR_API void oscar_stream_close(struct oscar_stream *stream); /* waits for its work; NULL is fine */

/* --- model ------------------------------------------------------------------------------------------------------- */

struct oscar_model_options {
    size_t size;
    struct oscar_geometry geometry;
    const uint8_t *weights_digest; /* 32 bytes that name the weights: required */
    const char *revision;          /* required, e.g. "main" */
    const uint8_t *rope_digest;    /* 32 bytes that name the RoPE parameters: required */
    const char *calibration; /* name of a file in the daemon's folder, hex digest, or NULL: the default (Hadamard) */
    const char *adapter;     /* NULL: "none" */
    uint32_t shard_rank;
    uint32_t shard_size; /* 0: 1 */
};

/* Fills page, sink and recent sizes of the geometry with the layout's values. */
OSCAR_API void oscar_geometry_init(struct oscar_geometry *geometry, uint32_t layers, uint32_t query_heads,
                                   uint32_t kv_heads, uint32_t head_dim, uint32_t dtype);

/* OSCAR_ERR_GEOMETRY, _IDENTITY, _CALIBRATION, _NO_SPACE (the budget cannot hold one page), _LIMIT. */
OSCAR_API int oscar_model_open(struct oscar_client *client, const struct oscar_model_options *options,
                               struct oscar_model **ret_model);
/* Closes its sequences, leases and batches too. NULL is fine. */
OSCAR_API void oscar_model_close(struct oscar_model *model);

struct oscar_model_info {
    size_t size;
    struct oscar_geometry geometry;
    uint8_t model_digest[32];
    uint8_t calibration_digest[32];
    uint64_t dense_page_bytes;  /* one page, all layers and heads, BF16 */
    uint64_t packed_page_bytes; /* the same in INT2 */
};
OSCAR_API int oscar_model_info(const struct oscar_model *model, struct oscar_model_info *ret_info);

/* The rotation that store applies to K (side 0) or V (side 1) of a KV head, as a matrix R [head_dim][head_dim] row-major, x' = x R:
 * for a worker that writes rotated rows itself (oscar_seq_rows). */
OSCAR_API int oscar_model_rotation(const struct oscar_model *model, uint32_t layer, uint32_t kv_head, unsigned side,
                                   float *ret_matrix);

/* --- probe and lease ---------------------------------------------------------------------------------------------- */

struct oscar_probe_result {
    uint32_t hit_tokens;       /* cached now, a multiple of 64 */
    uint32_t in_flight_tokens; /* >= hit_tokens: what will be there once running computations have finished */
};

/* How much of `tokens` is cached. Pins nothing, unless `ret_lease` is given: then the hit pages stay until the lease is closed
 * or its owner's connection ends. With a hit of 0 the lease pins nothing, and closes all the same. */
OSCAR_API int oscar_probe(struct oscar_model *model, const uint32_t *tokens, uint32_t count,
                          struct oscar_probe_result *ret_result, struct oscar_lease **ret_lease);

#define OSCAR_LEASE_SECRET 16
/* A name by which another process of the same user and client group adopts the lease (send it by any means). */
OSCAR_API int oscar_lease_secret(const struct oscar_lease *lease, uint8_t ret_secret[OSCAR_LEASE_SECRET]);
/* Takes a lease over from another process: from now on it lives as long as this one's connection. OSCAR_ERR_NOT_FOUND. */
OSCAR_API int oscar_lease_adopt(struct oscar_model *model, const uint8_t secret[OSCAR_LEASE_SECRET],
                                struct oscar_lease **ret_lease, uint32_t *ret_hit_tokens);
OSCAR_API void oscar_lease_close(struct oscar_lease *lease); /* NULL is fine */

/* --- sequence ------------------------------------------------------------------------------------------------------ */

enum oscar_seq_flags {
    /* Cut the hit so that the last 256 tokens before its end are BF16: recomputed by this worker where they are packed. */
    OSCAR_SEQ_DENSE_TAIL = 1,
};

struct oscar_seq_info {
    size_t size;
    uint32_t hit_tokens;       /* at open: positions below need no computing */
    uint32_t in_flight_tokens; /* at open or the last wait: > hit_tokens while another worker computes the prefix */
    uint32_t committed_tokens; /* hit + advanced */
    uint32_t reserved_tokens;  /* room up to this length */
    uint32_t sealed_tokens;    /* published or found: others can hit them; behind committed by the tail and by fences */
    uint32_t packed_tokens;    /* of the page table: how many tokens are read as INT2 now */
};

/* `count` may be 0 (an empty prompt). The hit never exceeds `count` rounded down to pages. OSCAR_ERR_LIMIT beyond
 * OSCAR_MAX_SEQUENCE_TOKENS. Tokens are copied. */
OSCAR_API int oscar_seq_open(struct oscar_model *model, const uint32_t *tokens, uint32_t count, uint32_t flags,
                             struct oscar_seq **ret_seq);
/* Where another worker computes the missing prefix: waits until it has sealed it, has given up, or timeout_ms is over, and takes
 * over what is there; only before the first store. The new hit is in oscar_seq_info; OSCAR_ERR_TIMEOUT leaves the sequence usable. */
OSCAR_API int oscar_seq_wait(struct oscar_seq *seq, uint32_t timeout_ms);
OSCAR_API int oscar_seq_info(const struct oscar_seq *seq, struct oscar_seq_info *ret_info);

/* Room for `tokens` more after the committed length, all or nothing: OSCAR_ERR_NO_SPACE changes nothing. */
OSCAR_API int oscar_seq_reserve(struct oscar_seq *seq, uint32_t tokens);

struct oscar_tensor {
    const void *data;     /* element (token, head, dim) at data + token*token_stride + head*head_stride + dim */
    int64_t token_stride; /* in elements */
    int64_t head_stride;
};

/* Writes K, V of positions first .. first + count - 1 of one layer. Positions below the committed length are ignored; uncommitted
 * ones may be written again. OSCAR_ERR_NO_SPACE beyond the reserved length, OSCAR_ERR_NOT_FINITE (host: at once). */
OSCAR_API int oscar_seq_store(struct oscar_seq *seq, struct oscar_stream *stream, uint32_t layer, uint32_t first,
                              uint32_t count, const struct oscar_tensor *k, const struct oscar_tensor *v);

/* Where the rotated BF16 rows of an uncommitted position lie, for a worker's own kernel: K and V rows of `kv_head`, contiguous by
 * token up to the end of the page (`ret_rows` of them from `position` on, head_dim elements each). */
OSCAR_API int oscar_seq_rows(struct oscar_seq *seq, uint32_t layer, uint32_t kv_head, uint32_t position, void **ret_k,
                             void **ret_v, uint32_t *ret_rows);

/* `count` more tokens (their ids) are complete in all layers once `stream` has passed this point. Speaks to the daemon only when a
 * page fills or the daemon has something to tell; with a count of 0, always. OSCAR_ERR_NOT_FINITE: an earlier page could not be
 * sealed; the sequence can only be closed. OSCAR_ERR_TIMEOUT, _DISCONNECTED, and whatever else the daemon answers: the tokens are
 * committed all the same (committed_tokens says so) and are told to the daemon by a later call: do not give them again. Nothing is
 * committed with OSCAR_ERR_INVALID (more than is reserved), _NO_MEMORY and _STATE. */
OSCAR_API int oscar_seq_advance(struct oscar_seq *seq, struct oscar_stream *stream, const uint32_t *tokens,
                                uint32_t count);

/* A second sequence with the same committed tokens: sealed pages are shared, the unsealed tail is copied. */
OSCAR_API int oscar_seq_fork(struct oscar_seq *seq, struct oscar_stream *stream, struct oscar_seq **ret_seq);

/* The sequence may no longer be used; its pages stay cached. Work enqueued on the stream of its last call may still read. NULL is fine. */
OSCAR_API void oscar_seq_close(struct oscar_seq *seq);

/* --- attention ------------------------------------------------------------------------------------------------------ */

struct oscar_attend_query {
    struct oscar_seq *seq;
    uint32_t tokens; /* attend over the first `tokens` tokens (stored ones, committed or not); 0: all committed */
    uint32_t rows;   /* query rows; row i stands at position tokens - rows + i and sees positions up to its own */
    const void *q;   /* element (row, query head, dim) at q + row*q_row_stride + head*q_head_stride + dim */
    int64_t q_row_stride, q_head_stride;
    void *out; /* likewise */
    int64_t out_row_stride, out_head_stride;
    float *lse; /* [rows][query_heads] natural log-sum-exp of the scaled scores, or NULL */
};

/* A ragged batch over one layer, all sequences of `model`: decode with one row a sequence, prefill with many. `softmax_scale` 0:
 * 1/sqrt(head_dim). On a stream the page tables as they are at the time of the call are used. */
OSCAR_API int oscar_attend(struct oscar_model *model, struct oscar_stream *stream, uint32_t layer, float softmax_scale,
                           const struct oscar_attend_query *queries, uint32_t count);

/* A partial result of attention: what oscar_attend and oscar_batch_attend give, or a kernel of the worker's own. */
struct oscar_partial {
    void *
        out; /* element (row, query head, dim) at out + row*row_stride + head*head_stride + dim, of the geometry's type */
    int64_t row_stride, head_stride;
    float *lse; /* [rows][query_heads] natural log-sum-exp of the scaled scores; -inf: over no token */
};

/* Replaces `into` (out and lse) by the attention over the tokens of both, which must not overlap; `other` is only read. So a
 * worker attends over a part of the tokens with a kernel of its own. */
OSCAR_API int oscar_merge(struct oscar_model *model, struct oscar_stream *stream, uint32_t rows,
                          const struct oscar_partial *into, const struct oscar_partial *other);

/* --- batches -------------------------------------------------------------------------------------------------------- */

/*
 * A batch holds what changes from step to step (which sequences, their lengths, their pages) where the kernels read it, so that
 * the calls of a step allocate nothing, look nothing up, and can be captured in a CUDA graph:
 *
 *     oscar_seq_reserve            of each sequence, where room is short
 *     oscar_batch_set              the sequences of this step
 *       oscar_batch_store          each layer  ) or the launch of a graph that captured these calls
 *       oscar_batch_attend         each layer  ) after any earlier oscar_batch_set
 *     oscar_seq_advance            of each sequence
 *
 * oscar_batch_set comes after every other call that takes one of its sequences (oscar_seq_reserve, _wait, _advance, _close,
 * oscar_attend) and before the step's work: those calls may exchange pages, and an advance makes stored rows read-only. A batch
 * that was overtaken so is stale: oscar_batch_store and oscar_batch_attend are OSCAR_ERR_STATE until it is set again. The launch of
 * a graph cannot be checked: that of a stale batch may read and write pages that are no longer the sequence's.
 *
 * A graph holds the addresses of the batch and of the tensors, and the layer: it may be launched until the batch is closed, for
 * any sequences that were set. While a stream is being captured only these two calls and oscar_merge may be made on it. Calls of one
 * batch go to one stream, or the caller orders its streams. A batch, and the sequences that it is set to, are used by one thread at
 * a time.
 */
struct oscar_batch;

struct oscar_batch_params {
    size_t size;
    uint32_t max_seqs;   /* sequences of one step: memory for the largest step is made when the batch is opened */
    uint32_t max_rows;   /* new tokens of one sequence in one step; up to 16 are decoded, more go through prefill */
    uint64_t max_tokens; /* lengths of all sequences of one step together */
    /* Strides of the tensors in elements, in every layer; 0: rows and heads are contiguous, [row][head][dim]. Rows of all sequences
     * follow each other in the order of the entries. */
    int64_t q_row_stride, q_head_stride;
    int64_t out_row_stride, out_head_stride;
    int64_t k_row_stride, k_head_stride;
    int64_t v_row_stride, v_head_stride;
};

OSCAR_API int oscar_batch_open(struct oscar_model *model, const struct oscar_batch_params *params,
                               struct oscar_batch **ret_batch);
/* Enqueued work is still done; graphs that captured its calls may not be launched again. NULL is fine. */
OSCAR_API void oscar_batch_close(struct oscar_batch *batch);

struct oscar_batch_entry {
    struct oscar_seq *seq;
    uint32_t rows;   /* of this step; row i stands at position tokens - rows + i and sees positions up to its own */
    uint32_t tokens; /* length with these rows, of stored tokens, committed or not; 0: the committed length + rows */
};

/* Enqueues: from here on the batch is these sequences. OSCAR_ERR_LIMIT beyond the params, OSCAR_ERR_INVALID beyond the reserved
 * length, and for rows that are committed once the batch has been stored with. */
OSCAR_API int oscar_batch_set(struct oscar_batch *batch, struct oscar_stream *stream,
                              const struct oscar_batch_entry *entries, uint32_t count);
/* Rotates the step's rows of K and V and writes them to the pages of their sequences. All rows must be uncommitted: the last token
 * of a full hit that is computed again goes through oscar_seq_store, which ignores it. OSCAR_ERR_NOT_FINITE as there. */
OSCAR_API int oscar_batch_store(struct oscar_batch *batch, struct oscar_stream *stream, uint32_t layer, const void *k,
                                const void *v);
/* Attention of the step's rows; `softmax_scale` as in oscar_attend; lse [rows of all][query_heads], or NULL. */
OSCAR_API int oscar_batch_attend(struct oscar_batch *batch, struct oscar_stream *stream, uint32_t layer,
                                 float softmax_scale, const void *q, void *out, float *lse);

#ifdef __cplusplus
}
#endif
#endif
