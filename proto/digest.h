/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Names of models and pages: BLAKE2b-256 (libsodium crypto_generichash, keyed by a domain string) over canonical encodings.
 *
 * Canonical encoding of an identity: for each field, in the order of the struct: a one-byte field number, the field's length
 * as u32 little-endian, its bytes (integers as u32/u64 little-endian; strings without a terminator). So equal bytes in
 * different fields never collide.
 */
#ifndef OSCAR_PROTO_DIGEST_H
#define OSCAR_PROTO_DIGEST_H

#include <stddef.h>
#include <stdint.h>

#include "oscar/geometry.h"

#include "proto/cause.h"

#define OSCAR_DIGEST_BYTES 32U
#define OSCAR_NAME_BYTES 128U
#define OSCAR_IDENTITY_FORMAT 1U
#define OSCAR_MAX_SHARDS 1024U

struct oscar_digest {
    uint8_t bytes[OSCAR_DIGEST_BYTES];
};

/* Everything that must be equal for two workers to share pages. A required field is a non-empty string / a non-zero digest. */
struct oscar_identity {
    uint32_t format;                 /* OSCAR_IDENTITY_FORMAT */
    struct oscar_digest weights;     /* required: digest of the model's weights */
    char revision[OSCAR_NAME_BYTES]; /* required: revision or quantisation of the weights, e.g. "main", "awq-4bit" */
    struct oscar_geometry geometry;  /* required, checked */
    struct oscar_digest rope;        /* required: digest of the RoPE parameters */
    struct oscar_digest calibration; /* required: digest of the calibration in use (the daemon fills it in) */
    uint32_t layout;                 /* OSCAR_LAYOUT_ID */
    uint32_t shard_rank;             /* < shard_size */
    uint32_t shard_size;             /* 1..1024 */
    char adapter[OSCAR_NAME_BYTES];  /* required: "none", or a name or hex digest of the adapter (LoRA) */
    char tenant[OSCAR_NAME_BYTES];   /* required: from the peer's credentials and the daemon's configuration */
};

/* OSCAR_ERR_IDENTITY or OSCAR_ERR_GEOMETRY naming the field. */
int oscar_identity_check(const struct oscar_identity *identity, struct oscar_cause *cause);

void oscar_model_digest(const struct oscar_identity *identity, struct oscar_digest *ret);

/* Chain digest of a page: over (parent = model digest for page 0, else the parent page's chain digest) and its 64 token ids. */
void oscar_chain_digest(const struct oscar_digest *parent, const uint32_t tokens[OSCAR_PAGE_TOKENS],
                        struct oscar_digest *ret);

/* BLAKE2b-256 of plain bytes without a domain, so that `b2sum -l 256 FILE` prints the digest of a calibration file. */
void oscar_content_digest(const void *bytes, size_t size, struct oscar_digest *ret);

/* 64 lower-case hex digits and a terminator. */
void oscar_digest_hex(const struct oscar_digest *digest, char ret[2 * OSCAR_DIGEST_BYTES + 1]);

#endif
