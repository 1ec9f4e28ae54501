/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A backend: one const table of functions that reaches one accelerator's memory, streams and kernels. The daemon, the client
 * and every test run unchanged on each of them. `host` (kernels/host) serves from CPU memory on any Linux machine, `cuda`
 * (kernels/cuda) from the memory of an NVIDIA GPU; its driver is looked for when a device is opened, not before.
 *
 * Conventions. Return values are 0 or a negative oscar error. "Enqueues" means: returns at once; the work runs in stream
 * order; pointers in the arguments, and what they point to, must stay valid until the stream has passed them, unless the
 * field says "copied". A synchronous stream, and on the host a NULL one, runs the work before the call returns. Work that
 * fails is reported once: by the call itself where that does the work (NULL or synchronous stream), else by the stream's next
 * oscar_device_ops.stream_status or stream_wait. Arguments out of range (a calibration that does not fit the geometry, a
 * layer, a position without a turn table) are OSCAR_ERR_INVALID, at once on every stream. OSCAR_ERR_DEVICE from a GPU stays:
 * its context is lost, and with it all that the process can do there.
 * Positions are absolute token positions: page index * 64 + row.
 */
#ifndef OSCAR_DEVICE_H
#define OSCAR_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "oscar/geometry.h"

#include "proto/calibration.h"
#include "proto/cause.h"
#include "proto/page.h"

#define OSCAR_MAX_PACK_ITEMS 4096U    /* pages in one call of pack, or of inspect */
#define OSCAR_MAX_ATTEND_ITEMS 65536U /* sequences in one call of attend */

struct oscar_device;      /* one opened accelerator */
struct oscar_chunk;       /* one allocation (its owner's view) or one imported mapping */
struct oscar_range;       /* a reserved address range in which chunks are mapped at fixed offsets */
struct oscar_stream_impl; /* an in-order queue of work */
struct oscar_batch_impl;  /* a ragged batch prepared for attention: its page tables lie where the kernels read them */

/* How chunks go to other processes. */
enum oscar_share {
    OSCAR_SHARE_AUTO = 0, /* the first of the two that works here */
    OSCAR_SHARE_VMM = 1,  /* a descriptor of the memory itself: read-only mappings, outlives its owner */
    /* cuda: a classic IPC memory handle, in a small memfd in the place of the memory's descriptor. What it costs: readers can
     * write; the memory dies with its owner, so that no keeper can hold it (chunk_descriptor and chunk_adopt are
     * OSCAR_ERR_UNSUPPORTED); nobody chooses where a reader's mapping lies (range_locate tells). */
    OSCAR_SHARE_IPC = 2,
};

struct oscar_device_options {
    const char *id;         /* NULL or "" for the default device; a UUID ("GPU-...") on cuda */
    enum oscar_share share; /* of the chunks made here; the host has one way only and ignores it */
};

/* A chunk of another process, and where a range maps it. */
struct oscar_range_chunk {
    uint64_t offset, bytes; /* in the range */
    int fd;                 /* what its owner exported; not taken */
    bool writable;
};

/* A fence slot: a 64-bit counter in host memory shared by one worker and the daemon. Only the worker's stream raises it. */
typedef _Atomic uint64_t oscar_fence_slot;

struct oscar_stream_options {
    uint32_t threads; /* CPU threads that one call may use on the host backend, >= 1; ignored on a GPU */
    bool
        asynchronous; /* calls return at once (host: work runs in a thread of the stream's own); false: when it is done */
    bool low_priority; /* the daemon's own streams */
    void *native; /* cuda: the caller's CUstream (0 is a stream, too: CU_STREAM_LEGACY), always asynchronous; or NULL */
};

/* K and V of `tokens` consecutive tokens for one layer, as the worker has them: element (token, head, dim) lies at
 * data + token*token_stride + head*head_stride + dim, strides in elements. dtype as in the geometry. */
struct oscar_rows {
    const void *data;
    int64_t token_stride;
    int64_t head_stride;
};

struct oscar_store_args {
    const struct oscar_geometry *geometry;       /* copied */
    const struct oscar_calibration *calibration; /* outlives the stream's work */
    uint32_t layer;
    uint32_t tokens;
    uint32_t first_row;    /* row of the first token in pages[0], 0..63 */
    uint8_t *const *pages; /* copied: addresses of the dense pages that the tokens fall in, in order */
    struct oscar_rows k, v;
};

struct oscar_pack_item {
    const uint8_t *dense; /* one dense page, all layers and heads */
    uint8_t *packed;      /* where the packed page goes */
    uint64_t position;    /* of its row 0: a multiple of 64 */
    int32_t *status; /* written: 0, or OSCAR_ERR_NOT_FINITE (then `packed` is undefined and must not be published) */
};

/* An address space of pages of one form: page id lies at base + id * stride; in a range (not NULL) where
 * oscar_device_ops.range_locate says for id * stride. */
struct oscar_arena_view {
    const uint8_t *base;
    uint64_t stride;
    const struct oscar_range *range;
};

/* One sequence of a ragged batch. Query row i (0..rows-1) stands at position tokens - rows + i and sees positions <= its own
 * (causal); so decode is rows = 1 and prefill is rows = the new tokens. Row i, query head h at
 * q + i*q_row_stride + h*q_head_stride (elements); `out` likewise. */
struct oscar_attend_item {
    const oscar_page_ref *pages; /* page table: entry p holds positions 64p..64p+63; ceil(tokens/64) valid entries */
    uint32_t tokens;             /* attend over the first `tokens` tokens; >= rows; 0 gives out = 0 and lse = -inf */
    uint32_t rows;
    const void *q;
    int64_t q_row_stride, q_head_stride;
    void *out;
    int64_t out_row_stride, out_head_stride;
    float *lse; /* [rows][query_heads] natural-log log-sum-exp of the scaled scores, or NULL */
};

struct oscar_attend_args {
    const struct oscar_geometry *geometry; /* copied */
    const struct oscar_calibration *calibration;
    struct oscar_arena_view arenas[OSCAR_FORMS]; /* by enum oscar_form */
    uint32_t layer;
    float softmax_scale;
    uint32_t items;
    const struct oscar_attend_item *item; /* copied; the page tables are read when the work runs */
};

#define OSCAR_MAX_DECODE_ROWS 16U /* query rows of one item that are decoded; more are prefilled */

/* The most that a batch will ever hold; its memory is made for that once. */
struct oscar_batch_limits {
    uint32_t items;
    uint32_t rows;  /* query rows of one item, >= 1. Up to OSCAR_MAX_DECODE_ROWS no prefill kernel is ever launched */
    uint64_t pages; /* page-table entries of all items together */
};

/* One sequence of a batch: as in struct oscar_attend_item, but for offsets instead of addresses, so that the tensors may be
 * others in each layer. Row i, query head h at args.q + q_offset + i*q_row_stride + h*q_head_stride (elements). */
struct oscar_batch_item {
    const oscar_page_ref *pages; /* copied */
    uint32_t tokens;
    uint32_t rows;
    int64_t q_offset, q_row_stride, q_head_stride;
    int64_t out_offset, out_row_stride, out_head_stride;
    int64_t lse_offset;         /* floats: row i, head h at args.lse + lse_offset + i*query_heads + h */
    int64_t k_offset, v_offset; /* of the first of the `rows` last tokens in batch_store's tensors, in elements */
};

struct oscar_batch_attend_args {
    const struct oscar_calibration *calibration; /* outlives the stream's work */
    uint32_t layer;
    float softmax_scale;
    const void *q; /* NULL: offsets are addresses divided by the size of an element */
    void *out;
    float *lse; /* NULL: none is written */
};

struct oscar_batch_store_args {
    const struct oscar_calibration *calibration; /* outlives the stream's work */
    uint32_t layer;
    struct oscar_rows k, v; /* of each item the `rows` last tokens, from its k_offset (v_offset) on */
};

/* Two partial results over disjoint tokens become one: out and lse are replaced by the result of both. */
struct oscar_merge_args {
    uint32_t rows, heads, head_dim, dtype;
    void *out; /* row i, head h at out + i*out_row_stride + h*out_head_stride (elements) */
    int64_t out_row_stride, out_head_stride;
    float *lse; /* [rows][heads] natural log-sum-exp; -inf: no token */
    const void *other_out;
    int64_t other_row_stride, other_head_stride;
    const float *other_lse; /* [rows][heads] */
};

struct oscar_device_ops {
    const char *name; /* "host", "cuda" */

    /* --- device --- */
    /* `options` NULL: the default device. OSCAR_ERR_UNSUPPORTED (no driver, no device, one that lacks what is needed: the cause
     * says what and what helps), OSCAR_ERR_NOT_FOUND, OSCAR_ERR_DEVICE. */
    int (*device_open)(const struct oscar_device_options *options, struct oscar_device **ret,
                       struct oscar_cause *cause);
    void (*device_close)(struct oscar_device *device);
    /* Printable, stable name that two processes may compare ("host", "GPU-<uuid>"). */
    const char *(*device_id)(const struct oscar_device *device);
    /* One line for logs: what runs here ("host, avx512-vnni, 16 cores"). */
    const char *(*device_summary)(const struct oscar_device *device);
    /* How chunks made here go to other processes: never AUTO; the host's descriptors are VMM. */
    enum oscar_share (*device_share)(const struct oscar_device *device);
    size_t (*granularity)(const struct oscar_device *device); /* chunk sizes are multiples of it */
    /* Memory in bytes: free now, and all of it. */
    int (*memory_info)(struct oscar_device *device, uint64_t *ret_free, uint64_t *ret_total, struct oscar_cause *cause);
    /* Creates, exports, imports and compares a small chunk: whether sharing works here. */
    int (*self_test)(struct oscar_device *device, struct oscar_cause *cause);

    /* --- memory --- */
    /* Daemon: new zeroed memory, mapped read-write at *chunk_address. */
    int (*chunk_create)(struct oscar_device *device, uint64_t bytes, struct oscar_chunk **ret,
                        struct oscar_cause *cause);
    /* A new descriptor for another process; with `writable` false it cannot be mapped for writing where the backend can
     * enforce that (host: a read-only descriptor of a memfd sealed against resizing). Caller closes it. */
    int (*chunk_export)(struct oscar_chunk *chunk, bool writable, int *ret_fd, struct oscar_cause *cause);
    /* A descriptor that carries the memory itself, for a keeper to hold. Caller closes it. */
    int (*chunk_descriptor)(struct oscar_chunk *chunk, int *ret_fd, struct oscar_cause *cause);
    /* Adopts the descriptor of a chunk made by an earlier process (engine restart): mapped read-write. Takes `fd`, also
     * when it fails. `bytes` must be the chunk's. */
    int (*chunk_adopt)(struct oscar_device *device, int fd, uint64_t bytes, struct oscar_chunk **ret,
                       struct oscar_cause *cause);
    uint8_t *(*chunk_address)(const struct oscar_chunk *chunk);
    /* Unmaps and closes; the memory of the chunk, created or adopted, goes back to the system even where others still have
     * it mapped, if the backend can (host: the hole is punched). So an engine that hands its chunks on to the next one
     * exits without freeing them. NULL is fine. */
    void (*chunk_free)(struct oscar_chunk *chunk);

    /* Client: a range for `bytes` bytes of chunks; unmapped parts fault. */
    int (*range_reserve)(struct oscar_device *device, uint64_t bytes, struct oscar_range **ret,
                         struct oscar_cause *cause);
    uint8_t *(*range_address)(const struct oscar_range *range);
    /* Where byte `offset` of the range, which is mapped, lies. Chunks follow each other from range_address on, except where
     * the backend cannot choose the address of an imported one (cuda with OSCAR_SHARE_IPC). */
    uint8_t *(*range_locate)(const struct oscar_range *range, uint64_t offset);
    /* Maps chunks, given by rising offset, in the place of what was there; many in one call, because that is what an attach
     * costs (cuda: neighbours of equal access are made accessible together). All or nothing: after a failure none of them is
     * mapped, and what was there still is only if a place or a descriptor was refused. OSCAR_ERR_INVALID outside the range,
     * where chunks overlap, or where a descriptor has fewer bytes (cuda: other than `bytes`, or where a part of another chunk
     * would stay mapped), OSCAR_ERR_PERMISSION, OSCAR_ERR_UNSUPPORTED, OSCAR_ERR_STALE (an IPC handle whose owner is gone). */
    int (*range_map)(struct oscar_range *range, const struct oscar_range_chunk *chunk, uint32_t chunks,
                     struct oscar_cause *cause);
    int (*range_unmap)(struct oscar_range *range, uint64_t offset, uint64_t bytes);
    void (*range_free)(struct oscar_range *range);

    /* --- calibrations --- */
    /* Makes the calibration, which outlives it, known to the device before its first use in a stream (cuda: a copy in device
     * memory; counted). Work must have passed before it is unloaded. */
    int (*calibration_load)(struct oscar_device *device, const struct oscar_geometry *geometry,
                            const struct oscar_calibration *calibration, struct oscar_cause *cause);
    void (*calibration_unload)(struct oscar_device *device, const struct oscar_calibration *calibration);

    /* --- streams and fences --- */
    /* A synchronous stream is used by one thread at a time; an asynchronous one by any number of them. */
    int (*stream_open)(struct oscar_device *device, const struct oscar_stream_options *options,
                       struct oscar_stream_impl **ret, struct oscar_cause *cause);
    void (*stream_close)(struct oscar_stream_impl *stream); /* waits for its work */
    /* Waits until all enqueued work is done: 0, OSCAR_ERR_TIMEOUT, or the first failure of that work. */
    int (*stream_wait)(struct oscar_stream_impl *stream, uint64_t timeout_ns);
    /* First failure of work done so far, then cleared; never waits. */
    int (*stream_status)(struct oscar_stream_impl *stream);
    /* Enqueues a call of a host function (tests use it to hold a stream up). */
    int (*stream_call)(struct oscar_stream_impl *stream, void (*function)(void *), void *argument);
    /* Memory in which fence slots lie, made known to the device before its first use (cuda: cudaHostRegister). */
    int (*fences_register)(struct oscar_device *device, void *memory, size_t bytes, struct oscar_cause *cause);
    void (*fences_unregister)(struct oscar_device *device, void *memory);
    /* Enqueues: raise *slot to value (release order: all earlier work of the stream is visible to who sees it). */
    int (*fence_signal)(struct oscar_stream_impl *stream, oscar_fence_slot *slot, uint64_t value);

    /* --- work; all enqueue --- */
    /* Between any two places in host and device memory. cuda: where one side is host memory that is not pinned, the call may
     * return only when the copy is done. */
    int (*copy)(struct oscar_stream_impl *stream, void *destination, const void *source, uint64_t bytes);
    /* Rotate rows and write them to dense pages. OSCAR_ERR_NOT_FINITE where a row is out of range
     * (|x| > OSCAR_MAX_ROW_MAGNITUDE after rotation, NaN); all rows are written all the same. */
    int (*store)(struct oscar_stream_impl *stream, const struct oscar_store_args *args);
    /* Checks that dense pages (their addresses: copied) may be sealed: status[i] = 0 or OSCAR_ERR_NOT_FINITE for pages[i]. A
     * page that passed always packs. */
    int (*inspect)(struct oscar_stream_impl *stream, const struct oscar_geometry *geometry, const uint8_t *const *pages,
                   uint32_t count, int32_t *status);
    int (*pack)(struct oscar_stream_impl *stream, const struct oscar_geometry *geometry,
                const struct oscar_calibration *calibration, const struct oscar_pack_item *item, uint32_t items);
    /* May allocate; on a hot path use a batch. */
    int (*attend)(struct oscar_stream_impl *stream, const struct oscar_attend_args *args);
    int (*merge)(struct oscar_stream_impl *stream, const struct oscar_merge_args *args);

    /* --- batches: what changes from step to step lies in the batch; a GPU graph may capture batch_store and batch_attend --- */
    /* A batch belongs to one stream and is used by one thread at a time. */
    int (*batch_open)(struct oscar_device *device, const struct oscar_geometry *geometry,
                      const struct oscar_batch_limits *limits, struct oscar_batch_impl **ret,
                      struct oscar_cause *cause);
    void (*batch_close)(struct oscar_batch_impl *batch); /* the stream has passed its work. NULL is fine */
    /* Enqueues: from here on the batch is these items. Page references are resolved now, all of them must be mapped.
     * OSCAR_ERR_LIMIT beyond the limits. */
    int (*batch_update)(struct oscar_stream_impl *stream, struct oscar_batch_impl *batch,
                        const struct oscar_arena_view arenas[OSCAR_FORMS], const struct oscar_batch_item *item,
                        uint32_t items);
    /* Rotate the last `rows` rows of each item and write them to its pages, which must be writable. OSCAR_ERR_INVALID where one
     * of them is not dense. */
    int (*batch_store)(struct oscar_stream_impl *stream, struct oscar_batch_impl *batch,
                       const struct oscar_batch_store_args *args);
    int (*batch_attend)(struct oscar_stream_impl *stream, struct oscar_batch_impl *batch,
                        const struct oscar_batch_attend_args *args);
};

/* The backends built in; cuda is NULL in a build without it. */
const struct oscar_device_ops *oscar_device_host(void);
const struct oscar_device_ops *oscar_device_cuda(void);
/* By name; NULL or "auto" takes cuda where a GPU can be opened, else host, and then `cause` says why not cuda though the call
 * succeeds. OSCAR_ERR_UNSUPPORTED; for "cuda" also as device_open. */
int oscar_device_find(const char *name, const struct oscar_device_ops **ret, struct oscar_cause *cause);

static inline bool oscar_fence_reached(oscar_fence_slot *slot, uint64_t value) {
    return __atomic_load_n((uint64_t *)slot, __ATOMIC_ACQUIRE) >= value;
}

#endif
