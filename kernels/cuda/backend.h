/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of the CUDA backend share. The host side is C on the driver's own interface: nothing links to the CUDA runtime
 * or to the driver, whose library is opened by driver.c when a device is. Kernels (*.cu) are compiled to images for each
 * architecture, embedded in the library (cmake/cuda.cmake) and found by name.
 *
 *   driver.c       the driver's functions and its errors in our words
 *   select.c       which device: by UUID, and whether it has what is needed
 *   device.c       an opened device: its primary context (the one that the worker's framework uses too), images of kernels
 *   memory.c       chunks: VMM memory with descriptors      range.c        where importers map them
 *   share.c        which form of sharing works here          share_ipc.c    the second form: classic IPC handles
 *   stream.c       streams, fences, statuses of work
 *   calibration.c  calibrations in device memory
 *   store.c/.cu    rotation and store, inspection            pack.c/.cu     dense pages to INT2
 *   batch.c        batches: what a step's kernels read       attend.c       attention over a batch, or over items given once
 *   decode.c/.cu   attention with few query rows; merge      decode_plan.c  which warp does what of it
 *   prefill.c/.cu  attention with many query rows
 *
 * Every function that calls the driver runs between cuda_enter and cuda_leave: the context is the caller's again afterwards.
 */
#ifndef OSCAR_KERNELS_CUDA_BACKEND_H
#define OSCAR_KERNELS_CUDA_BACKEND_H

#include <cuda.h>
#include <pthread.h>
#include <stdatomic.h>

#include "oscar/device.h"

#include "kernels/cuda/decode_plan.h"
#include "kernels/cuda/driver.h"
#include "kernels/cuda/layout.h"

struct cuda_store;
struct cuda_pack;
struct cuda_decode;
struct cuda_prefill;

/* A calibration in device memory: the device's list of them, by the host one's address. */
struct cuda_calibration {
    const struct oscar_calibration *host;
    struct cuda_calibration_view view; /* passed to kernels by value */
    CUdeviceptr memory;                /* one allocation holds all of it */
    uint32_t references;
    struct cuda_calibration *next;
};

struct oscar_device {
    const struct cuda_driver *driver;
    CUdevice device;
    CUcontext context; /* primary, retained */
    int major, minor;  /* compute capability */
    int processors;    /* multiprocessors */
    int shared_bytes;  /* of shared memory that a block may ask for */
    int l2_bytes;
    enum oscar_share share; /* never AUTO */
    bool vmm;               /* ranges can be reserved, and descriptors of memory mapped in them */
    size_t granularity;
    char id[48], summary[512];
    atomic_bool lost;              /* an error that stays was seen: every later call fails at once */
    atomic_bool hangs;             /* the reason: work that may still be running */
    CUstream service;              /* for what is not a caller's work: zeroing chunks, uploads, the self test */
    int priority, lowest_priority; /* of streams */
    pthread_mutex_t lock;
    struct cuda_calibration *calibrations; /* guarded by the lock */
    /* Each file's module and functions, loaded when the device is opened. */
    struct cuda_store *store;
    struct cuda_pack *pack;
    struct cuda_decode *decode;
    struct cuda_prefill *prefill;
};

/* Makes the device's context the thread's, and calls that a graph capture elsewhere in the process would forbid allowed;
 * cuda_leave undoes both. OSCAR_ERR_DEVICE once the context is lost. */
int cuda_enter(struct oscar_device *device, struct oscar_cause *cause);
void cuda_leave(struct oscar_device *device);

/* As cuda_result, and the device is marked lost where the error stays. */
int cuda_device_result(struct oscar_device *device, CUresult result, const char *what, struct oscar_cause *cause);

/* Waits for an event, at most that long: 0, OSCAR_ERR_TIMEOUT or OSCAR_ERR_DEVICE. Inside cuda_enter. */
int cuda_event_wait(struct oscar_device *device, CUevent event, uint64_t timeout_ns, struct oscar_cause *cause);
/* Waits for all of the stream's work so far, at most that long: 0, OSCAR_ERR_TIMEOUT or OSCAR_ERR_DEVICE. Inside cuda_enter;
 * not on a stream that is being captured. */
int cuda_wait(struct oscar_device *device, CUstream stream, uint64_t timeout_ns, struct oscar_cause *cause);
#define CUDA_PATIENCE_NS                                                                                               \
    (UINT64_C(60) * 1000 * 1000 * 1000) /* work that takes longer hangs: the device counts as lost */
/* cuda_wait with that patience; `what` names the work in the cause. */
int cuda_settle(struct oscar_device *device, CUstream stream, const char *what, struct oscar_cause *cause);

/* Loads an embedded image and looks functions up in it: names[i] into ret_functions[i]. Inside cuda_enter. */
int cuda_image_load(struct oscar_device *device, const void *image, const char *const *names, uint32_t count,
                    CUmodule *ret_module, CUfunction *ret_functions, struct oscar_cause *cause);
/* The most dynamic shared memory that a kernel may be launched with. Inside cuda_enter. */
int cuda_shared_limit(struct oscar_device *device, CUfunction function, const char *name, uint32_t bytes,
                      struct oscar_cause *cause);

/* Open at device_open, close at device_close; NULL is fine for close. Inside cuda_enter. */
int cuda_store_open(struct oscar_device *device, struct oscar_cause *cause);
void cuda_store_close(struct oscar_device *device);
int cuda_pack_open(struct oscar_device *device, struct oscar_cause *cause);
void cuda_pack_close(struct oscar_device *device);
int cuda_decode_open(struct oscar_device *device, struct oscar_cause *cause);
void cuda_decode_close(struct oscar_device *device);
int cuda_prefill_open(struct oscar_device *device, struct oscar_cause *cause);
void cuda_prefill_close(struct oscar_device *device);

/* The loaded calibration that was made from `host`; NULL when none was (OSCAR_ERR_INVALID is the caller's answer). */
const struct cuda_calibration *cuda_calibration_find(struct oscar_device *device, const struct oscar_calibration *host);

/* --- streams (stream.c) ---------------------------------------------------------------------------------------------------- */

struct oscar_stream_impl {
    struct oscar_device *device;
    CUstream stream;
    bool owned;                      /* made here */
    bool synchronous;                /* each call waits for its work */
    struct oscar_batch_impl *batch;  /* of attend, made by its first call, grown by later ones; batch.c */
    struct cuda_stream_state *state; /* stream.c: first failure, words in pinned memory for statuses */
};

/* Around the work of one call: enters the context (OSCAR_ERR_INVALID for a NULL stream, or the context's failure); ends it with
 * the call's result r, waits on a synchronous stream, leaves the context. On a stream that is being captured nothing waits. */
int cuda_work_begin(struct oscar_stream_impl *stream);
int cuda_work_end(struct oscar_stream_impl *stream, int r);
bool cuda_stream_capturing(struct oscar_stream_impl *stream);

/* A word of the stream, in pinned host memory, where kernels write the code of a failure that has no other place (any of those
 * that fail may win): the stream's next status. Also in a graph. */
CUdeviceptr cuda_stream_failure(struct oscar_stream_impl *stream);

/* `count` words of pinned host memory that kernels can write, zeroed; when the stream has passed this point and what is
 * enqueued until cuda_status_deliver, word i goes to *target[i], and the first that is not zero is the stream's failure if
 * `fails` says so. Not on a stream that is being captured. */
struct cuda_status;
int cuda_status_take(struct oscar_stream_impl *stream, uint32_t count, struct cuda_status **ret,
                     CUdeviceptr *ret_words);
int cuda_status_deliver(struct oscar_stream_impl *stream, struct cuda_status *status, int32_t *const *target,
                        bool fails);

/* --- functions of oscar_device_ops, by file ----------------------------------------------------------------------------------- */

/* memory.c, range.c, share.c */
size_t cuda_granularity(const struct oscar_device *device);
int cuda_memory_info(struct oscar_device *device, uint64_t *ret_free, uint64_t *ret_total, struct oscar_cause *cause);
int cuda_self_test(struct oscar_device *device, struct oscar_cause *cause);
int cuda_chunk_create(struct oscar_device *device, uint64_t bytes, struct oscar_chunk **ret, struct oscar_cause *cause);
int cuda_chunk_export(struct oscar_chunk *chunk, bool writable, int *ret_fd, struct oscar_cause *cause);
int cuda_chunk_descriptor(struct oscar_chunk *chunk, int *ret_fd, struct oscar_cause *cause);
int cuda_chunk_adopt(struct oscar_device *device, int fd, uint64_t bytes, struct oscar_chunk **ret,
                     struct oscar_cause *cause);
uint8_t *cuda_chunk_address(const struct oscar_chunk *chunk);
void cuda_chunk_free(struct oscar_chunk *chunk);
int cuda_range_reserve(struct oscar_device *device, uint64_t bytes, struct oscar_range **ret,
                       struct oscar_cause *cause);
uint8_t *cuda_range_address(const struct oscar_range *range);
uint8_t *cuda_range_locate(const struct oscar_range *range, uint64_t offset);
int cuda_range_map(struct oscar_range *range, const struct oscar_range_chunk *chunk, uint32_t chunks,
                   struct oscar_cause *cause);
int cuda_range_unmap(struct oscar_range *range, uint64_t offset, uint64_t bytes);
void cuda_range_free(struct oscar_range *range);

/* calibration.c */
int cuda_calibration_load(struct oscar_device *device, const struct oscar_geometry *geometry,
                          const struct oscar_calibration *calibration, struct oscar_cause *cause);
void cuda_calibration_unload(struct oscar_device *device, const struct oscar_calibration *calibration);

/* stream.c */
int cuda_stream_open(struct oscar_device *device, const struct oscar_stream_options *options,
                     struct oscar_stream_impl **ret, struct oscar_cause *cause);
void cuda_stream_close(struct oscar_stream_impl *stream);
int cuda_stream_wait(struct oscar_stream_impl *stream, uint64_t timeout_ns);
int cuda_stream_status(struct oscar_stream_impl *stream);
int cuda_stream_call(struct oscar_stream_impl *stream, void (*function)(void *), void *argument);
int cuda_fences_register(struct oscar_device *device, void *memory, size_t bytes, struct oscar_cause *cause);
void cuda_fences_unregister(struct oscar_device *device, void *memory);
int cuda_fence_signal(struct oscar_stream_impl *stream, oscar_fence_slot *slot, uint64_t value);
int cuda_copy(struct oscar_stream_impl *stream, void *destination, const void *source, uint64_t bytes);

/* store.c */
int cuda_store(struct oscar_stream_impl *stream, const struct oscar_store_args *args);
int cuda_inspect(struct oscar_stream_impl *stream, const struct oscar_geometry *geometry, const uint8_t *const *pages,
                 uint32_t count, int32_t *status);
int cuda_batch_store(struct oscar_stream_impl *stream, struct oscar_batch_impl *batch,
                     const struct oscar_batch_store_args *args);

/* pack.c */
int cuda_pack(struct oscar_stream_impl *stream, const struct oscar_geometry *geometry,
              const struct oscar_calibration *calibration, const struct oscar_pack_item *item, uint32_t items);

/* batch.c */
int cuda_batch_open(struct oscar_device *device, const struct oscar_geometry *geometry,
                    const struct oscar_batch_limits *limits, struct oscar_batch_impl **ret, struct oscar_cause *cause);
void cuda_batch_close(struct oscar_batch_impl *batch);
int cuda_batch_update(struct oscar_stream_impl *stream, struct oscar_batch_impl *batch,
                      const struct oscar_arena_view arenas[OSCAR_FORMS], const struct oscar_batch_item *item,
                      uint32_t items);
/* Page-table entries of the latest update's longest item. */
uint32_t cuda_batch_longest_pages(const struct oscar_batch_impl *batch);
/* Whether all rows of the latest update lie in dense pages. */
bool cuda_batch_storable(const struct oscar_batch_impl *batch);

/* attend.c */
int cuda_batch_attend(struct oscar_stream_impl *stream, struct oscar_batch_impl *batch,
                      const struct oscar_batch_attend_args *args);
int cuda_attend(struct oscar_stream_impl *stream, const struct oscar_attend_args *args);

/* Attention of one layer is two enqueued parts: decode for items of at most OSCAR_MAX_DECODE_ROWS rows, and, where the batch's
 * limits allow more rows, prefill for the others. Inside cuda_work_begin/end. */
int cuda_decode_enqueue(struct oscar_stream_impl *stream, struct oscar_batch_impl *batch,
                        const struct cuda_calibration *calibration, const struct oscar_batch_attend_args *args);
int cuda_prefill_enqueue(struct oscar_stream_impl *stream, struct oscar_batch_impl *batch,
                         const struct cuda_calibration *calibration, const struct oscar_batch_attend_args *args);

/* decode.c */
int cuda_merge(struct oscar_stream_impl *stream, const struct oscar_merge_args *args);

struct oscar_batch_impl {
    struct oscar_device *device;
    struct oscar_geometry geometry;
    struct oscar_batch_limits limits;
    struct cuda_batch_view view; /* of device memory; passed to kernels by value */
    CUdeviceptr memory;          /* header, plan of decode, items, entries */
    CUdeviceptr decode_scratch;  /* partial results, and counters that are zero between launches */
    struct cuda_decode_shape decode_shape;
    CUdeviceptr decode_plan;      /* in `memory` */
    struct cuda_staging *staging; /* batch.c: pinned copies on their way */
};

/* Sets the batch's decode_shape, from its device, geometry and limits. */
void cuda_decode_prepare(struct oscar_batch_impl *batch);
/* Bytes of device memory that decode needs beside a prepared batch; batch.c allocates them, zeroed. Prefill needs none. */
uint64_t cuda_decode_scratch_bytes(const struct oscar_batch_impl *batch);

#endif
