/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a store reads and writes, on the device under test: models, a worker's tensors and an arena of dense pages, all of
 * it poison before; and what must come of the store. Rows rotated by Hadamard are the host's to the bit; one that a matrix
 * rotated lies within bounds of its float64 value.
 */
#ifndef OSCAR_TESTS_GPU_STORE_SCENE_H
#define OSCAR_TESTS_GPU_STORE_SCENE_H

#include "tests/gpu/rig.h"

/* --- models ----------------------------------------------------------------------------------------------------------------- */

enum store_kind { HADAMARD, MATRIX, MIXED /* K by matrices, V by Hadamard */, STORE_KINDS };

/* Loaded on the device. */
struct kernel_model *store_model_open(struct rig *rig, struct kernel_random *random, uint32_t d, uint32_t layers,
                                      uint32_t kv_heads, uint32_t dtype, enum store_kind kind);
void store_model_close(struct rig *rig, struct kernel_model *model);

/* --- a worker's tensor ------------------------------------------------------------------------------------------------------ */

/* Fused: [token][K heads, gap, V heads], on the host and on the device. */
struct tensor {
    uint16_t *host, *device;
    size_t elements;
    int64_t first_k, first_v; /* elements from the start */
    int64_t token_stride, head_stride;
};

/* Rows of all kinds. `unit`: strides and offsets are multiples of it: 8 for loads of 16 bytes, 2 for those of 4. */
struct tensor tensor_open(struct rig *rig, struct kernel_random *random, const struct oscar_geometry *geometry,
                          uint32_t tokens, uint32_t unit);
void tensor_close(struct rig *rig, struct tensor *tensor);
uint16_t *tensor_row(const struct tensor *tensor, bool is_v, uint32_t head, uint32_t token); /* on the host */
void tensor_upload(struct rig *rig, struct tensor *tensor);                                  /* after a change there */
struct oscar_rows tensor_rows(const struct tensor *tensor, bool is_v);                       /* on the device */

/* --- an arena --------------------------------------------------------------------------------------------------------------- */

/* Of dense pages on the device, and what is expected in it. */
struct arena {
    uint64_t page_bytes;
    uint32_t slots;
    uint8_t *device, *expected;
    uint32_t *order; /* the slots, shuffled */
};

struct arena arena_open(struct rig *rig, struct kernel_random *random, const struct oscar_geometry *geometry,
                        uint32_t slots);
void arena_close(struct rig *rig, struct arena *arena);
void arena_poison(struct rig *rig, struct arena *arena); /* also what is expected there */
uint8_t *arena_page(const struct arena *arena, uint32_t slot);
/* What lies on the device; the caller frees it. */
uint8_t *arena_read(struct rig *rig, const struct arena *arena);

/* Does the store on the host, into what is expected, and returns its result. Rows that a matrix rotated are checked here,
 * as they lie in `found`, and expected as they are. */
int arena_expect(struct rig *rig, struct arena *arena, const uint8_t *found, const struct kernel_model *model,
                 const struct oscar_store_args *args, const struct tensor *tensor);
/* All of it is as expected. */
void arena_check(const struct arena *arena, const uint8_t *found);

#endif
