/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A calibration: what the codec and the kernels need for each (layer, KV head). Read from a safetensors file (format in
 * proto/CALIBRATION.md) or the built-in, data-free Hadamard default. Row-vector convention: x' = x R.
 */
#ifndef OSCAR_PROTO_CALIBRATION_H
#define OSCAR_PROTO_CALIBRATION_H

#include <stddef.h>
#include <stdint.h>

#include "proto/cause.h"
#include "proto/digest.h"

#define OSCAR_MAX_PAIRS 16U              /* rotating RoPE pairs a head */
#define OSCAR_MAX_FREQUENCIES 128U       /* head_dim / 2 at most */
#define OSCAR_MAX_ROW_MAGNITUDE 65000.0F /* of a stored BF16 element: with it no scale or zero can overflow binary16 */
#define OSCAR_MAX_CENTRE_MAGNITUDE 32000.0F /* bound of |c'(p)| for every p: |s'| + sum(|a'| + |b'|), checked at load */

enum oscar_rotation { OSCAR_ROTATION_MATRIX = 1, OSCAR_ROTATION_HADAMARD = 2 };

#define OSCAR_TURN_ROWS 64U /* = OSCAR_PAGE_TOKENS */

/* What the digest of the built-in default names: change the default, change this text. */
#define OSCAR_DEFAULT_CALIBRATION_TEXT                                                                                 \
    "oscard built-in calibration 1: hadamard k v, no centre, nearest, rank k 96 v 92 percent"

/* One (layer, KV head). Pointers lie in the calibration's bytes; d = head_dim. */
struct oscar_head_calibration {
    const float *rotation_k;    /* [d][d] row-major, or NULL for Hadamard (normalised Sylvester) */
    const float *rotation_v;    /* likewise */
    const float *feedback;      /* L [d][d], unit lower triangular, or NULL for nearest rounding of K */
    const float *centre_static; /* s' [d], or NULL: K has no centre */
    const float *centre_cos;    /* a' [pairs][d] */
    const float *centre_sin;    /* b' [pairs][d] */
    const int32_t *centre_pair; /* [pairs]: index into omega, the order of P */
    uint32_t pairs;             /* 0..OSCAR_MAX_PAIRS; 0 when centre_static is NULL */
    uint32_t rank_k, rank_v;    /* clip threshold: element of this rank of |x| ascending, 0..d-1; d-1: no clip */
};

/*
 * Turn tables of the rotating centre, made once by the daemon in double precision so that every process sees the same bytes:
 * page_turn[page][frequency]{cos, sin} of omega * 64 * page rounded to binary32, row_turn[r][frequency]{cos, sin} of omega * r
 * rounded to binary32 and then to binary16 (stored as binary32 values that binary16 can represent).
 */
struct oscar_turns {
    const float *page_turn; /* [pages][frequencies][2] */
    const float *row_turn;  /* [64][frequencies][2] */
    uint32_t pages;
    uint32_t frequencies;
};

struct oscar_calibration {
    struct oscar_digest digest; /* BLAKE2b-256 of the file's bytes, or of the built-in default's canonical text */
    uint32_t layers, kv_heads, head_dim;
    enum oscar_rotation rotation_k, rotation_v;
    uint32_t frequencies;                 /* 0 when no head has pairs */
    const double *omega;                  /* [frequencies] radians a token */
    struct oscar_turns turns;             /* attached by oscar_calibration_attach_turns; zeros when frequencies is 0 */
    struct oscar_head_calibration *heads; /* [layers * kv_heads], index layer * kv_heads + head */
    struct oscar_safetensors *file;       /* NULL for the default */
};

static inline const struct oscar_head_calibration *oscar_calibration_head(const struct oscar_calibration *calibration,
                                                                          uint32_t layer, uint32_t head) {
    return &calibration->heads[(size_t)layer * calibration->kv_heads + head];
}

/* Hadamard for K and V, no centre, nearest rounding, clip ranks int(.96 d) and int(.92 d). */
int oscar_calibration_default(const struct oscar_geometry *geometry, struct oscar_calibration **ret,
                              struct oscar_cause *cause);

/*
 * Parses a file's bytes (aligned to 8, which must outlive the result) for the geometry. Always checked: metadata, names,
 * completeness, types, shapes, alignment, ranks and pair indices, so that nothing in the result points outside the bytes.
 * With `verify` also every number: finite, max|R R^T - I| <= 1e-4, L unit lower triangular, omega, the centre's bound
 * (costly, 0.1 to 2 s: the daemon does it once, off its loop; clients trust the daemon). OSCAR_ERR_CALIBRATION (the tensor
 * and the reason), OSCAR_ERR_CORRUPT (no safetensors file), OSCAR_ERR_GEOMETRY, OSCAR_ERR_NO_MEMORY.
 */
int oscar_calibration_parse(const void *bytes, size_t size, const struct oscar_geometry *geometry, int verify,
                            struct oscar_calibration **ret, struct oscar_cause *cause);
void oscar_calibration_free(struct oscar_calibration *calibration); /* NULL is fine */

/* Bytes of the turn tables for `pages` pages (0 when the calibration has no pairs), and the two ways to get them. In
 * memory: row_turn, then page_turn. */
size_t oscar_turns_bytes(const struct oscar_calibration *calibration, uint32_t pages);
void oscar_turns_fill(const struct oscar_calibration *calibration, uint32_t pages, void *memory);
/* `memory` of oscar_turns_bytes(), filled, outlives the calibration. OSCAR_ERR_INVALID if `bytes` is too small. */
int oscar_calibration_attach_turns(struct oscar_calibration *calibration, const void *memory, size_t bytes,
                                   uint32_t pages);

#endif
