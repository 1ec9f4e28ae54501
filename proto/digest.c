/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/digest.h"

#include <inttypes.h>
#include <sodium.h>
#include <string.h>

#include "proto/geometry.h"
#include "proto/page.h"
#include "proto/text.h"

/* Domains: BLAKE2b keys of at least crypto_generichash_KEYBYTES_MIN bytes. A change of an encoding gets a new number. */
static const char model_domain[] = "oscard model digest 1";
static const char chain_domain[] = "oscard chain digest 1";

_Static_assert(sizeof(model_domain) - 1 >= crypto_generichash_KEYBYTES_MIN, "domain too short for a key");
_Static_assert(sizeof(chain_domain) - 1 >= crypto_generichash_KEYBYTES_MIN, "domain too short for a key");
_Static_assert(OSCAR_DIGEST_BYTES == crypto_generichash_BYTES, "a digest is BLAKE2b-256");

/* Field numbers of the canonical encoding: never reused, a new field gets the next one. */
enum field {
    FIELD_FORMAT = 1,
    FIELD_WEIGHTS = 2,
    FIELD_REVISION = 3,
    FIELD_LAYERS = 4,
    FIELD_QUERY_HEADS = 5,
    FIELD_KV_HEADS = 6,
    FIELD_HEAD_DIM = 7,
    FIELD_DTYPE = 8,
    FIELD_PAGE_TOKENS = 9,
    FIELD_SINK_TOKENS = 10,
    FIELD_RECENT_TOKENS = 11,
    FIELD_ROPE = 12,
    FIELD_CALIBRATION = 13,
    FIELD_LAYOUT = 14,
    FIELD_SHARD_RANK = 15,
    FIELD_SHARD_SIZE = 16,
    FIELD_ADAPTER = 17,
    FIELD_TENANT = 18,
};

/* Lets libsodium pick its fastest implementation: once, then a cheap check. */
static void prepare(void) {
    if (sodium_init() < 0)
        return; /* the portable implementation stays and gives the same bytes */
}

static void store_u32(uint8_t *bytes, uint32_t value) {
    bytes[0] = (uint8_t)value;
    bytes[1] = (uint8_t)(value >> 8);
    bytes[2] = (uint8_t)(value >> 16);
    bytes[3] = (uint8_t)(value >> 24);
}

static void add_field(crypto_generichash_state *state, enum field field, const void *bytes, uint32_t size) {
    uint8_t head[5] = {(uint8_t)field};
    store_u32(head + 1, size);
    crypto_generichash_update(state, head, sizeof(head));
    crypto_generichash_update(state, bytes, size);
}

static void add_u32(crypto_generichash_state *state, enum field field, uint32_t value) {
    uint8_t bytes[4];
    store_u32(bytes, value);
    add_field(state, field, bytes, sizeof(bytes));
}

static void add_digest(crypto_generichash_state *state, enum field field, const struct oscar_digest *digest) {
    add_field(state, field, digest->bytes, OSCAR_DIGEST_BYTES);
}

static void add_string(crypto_generichash_state *state, enum field field, const char *string) {
    add_field(state, field, string, (uint32_t)strnlen(string, OSCAR_NAME_BYTES));
}

void oscar_model_digest(const struct oscar_identity *identity, struct oscar_digest *ret) {
    const struct oscar_geometry *geometry = &identity->geometry;
    crypto_generichash_state state;
    prepare();
    crypto_generichash_init(&state, (const uint8_t *)model_domain, sizeof(model_domain) - 1, OSCAR_DIGEST_BYTES);
    add_u32(&state, FIELD_FORMAT, identity->format);
    add_digest(&state, FIELD_WEIGHTS, &identity->weights);
    add_string(&state, FIELD_REVISION, identity->revision);
    add_u32(&state, FIELD_LAYERS, geometry->layers);
    add_u32(&state, FIELD_QUERY_HEADS, geometry->query_heads);
    add_u32(&state, FIELD_KV_HEADS, geometry->kv_heads);
    add_u32(&state, FIELD_HEAD_DIM, geometry->head_dim);
    add_u32(&state, FIELD_DTYPE, geometry->dtype);
    add_u32(&state, FIELD_PAGE_TOKENS, geometry->page_tokens);
    add_u32(&state, FIELD_SINK_TOKENS, geometry->sink_tokens);
    add_u32(&state, FIELD_RECENT_TOKENS, geometry->recent_tokens);
    add_digest(&state, FIELD_ROPE, &identity->rope);
    add_digest(&state, FIELD_CALIBRATION, &identity->calibration);
    add_u32(&state, FIELD_LAYOUT, identity->layout);
    add_u32(&state, FIELD_SHARD_RANK, identity->shard_rank);
    add_u32(&state, FIELD_SHARD_SIZE, identity->shard_size);
    add_string(&state, FIELD_ADAPTER, identity->adapter);
    add_string(&state, FIELD_TENANT, identity->tenant);
    crypto_generichash_final(&state, ret->bytes, OSCAR_DIGEST_BYTES);
}

void oscar_chain_digest(const struct oscar_digest *parent, const uint32_t tokens[OSCAR_PAGE_TOKENS],
                        struct oscar_digest *ret) {
    uint8_t message[OSCAR_DIGEST_BYTES + OSCAR_PAGE_TOKENS * 4];
    memcpy(message, parent->bytes, OSCAR_DIGEST_BYTES);
    for (uint32_t i = 0; i < OSCAR_PAGE_TOKENS; i++)
        store_u32(message + OSCAR_DIGEST_BYTES + (size_t)i * 4, tokens[i]);
    prepare();
    crypto_generichash(ret->bytes, OSCAR_DIGEST_BYTES, message, sizeof(message), (const uint8_t *)chain_domain,
                       sizeof(chain_domain) - 1);
}

void oscar_content_digest(const void *bytes, size_t size, struct oscar_digest *ret) {
    prepare();
    crypto_generichash(ret->bytes, OSCAR_DIGEST_BYTES, bytes, size, NULL, 0);
}

void oscar_digest_hex(const struct oscar_digest *digest, char ret[2 * OSCAR_DIGEST_BYTES + 1]) {
    sodium_bin2hex(ret, 2 * OSCAR_DIGEST_BYTES + 1, digest->bytes, OSCAR_DIGEST_BYTES);
}

static int check_digest(const struct oscar_digest *digest, const char *name, struct oscar_cause *cause) {
    if (sodium_is_zero(digest->bytes, OSCAR_DIGEST_BYTES))
        return oscar_fail(cause, OSCAR_ERR_IDENTITY, "%s digest is missing (all zero)", name);
    return OSCAR_OK;
}

static int check_string(const char *string, const char *name, const char *example, struct oscar_cause *cause) {
    size_t length = strnlen(string, OSCAR_NAME_BYTES);
    if (length == 0)
        return oscar_fail(cause, OSCAR_ERR_IDENTITY, "%s is missing: give one, e.g. \"%s\"", name, example);
    if (length == OSCAR_NAME_BYTES)
        return oscar_fail(cause, OSCAR_ERR_IDENTITY, "%s is longer than %u bytes", name, OSCAR_NAME_BYTES - 1);
    if (!oscar_text_valid(string, length))
        return oscar_fail(cause, OSCAR_ERR_IDENTITY, "%s is not UTF-8 without control characters", name);
    return OSCAR_OK;
}

int oscar_identity_check(const struct oscar_identity *identity, struct oscar_cause *cause) {
    int r;
    if (identity->format != OSCAR_IDENTITY_FORMAT)
        return oscar_fail(cause, OSCAR_ERR_IDENTITY, "identity format is %" PRIu32 ": this version knows %u",
                          identity->format, OSCAR_IDENTITY_FORMAT);
    if ((r = check_digest(&identity->weights, "weights", cause)) < 0)
        return r;
    if ((r = check_string(identity->revision, "revision", "main", cause)) < 0)
        return r;
    if ((r = oscar_geometry_check(&identity->geometry, cause)) < 0)
        return r;
    if ((r = check_digest(&identity->rope, "rope", cause)) < 0)
        return r;
    if ((r = check_digest(&identity->calibration, "calibration", cause)) < 0)
        return r;
    if (identity->layout != OSCAR_LAYOUT_ID)
        return oscar_fail(cause, OSCAR_ERR_IDENTITY, "layout is %" PRIu32 ": this version knows %u", identity->layout,
                          OSCAR_LAYOUT_ID);
    if (identity->shard_size < 1 || identity->shard_size > OSCAR_MAX_SHARDS)
        return oscar_fail(cause, OSCAR_ERR_IDENTITY, "shard_size is %" PRIu32 ": must be 1 to %u", identity->shard_size,
                          OSCAR_MAX_SHARDS);
    if (identity->shard_rank >= identity->shard_size)
        return oscar_fail(cause, OSCAR_ERR_IDENTITY, "shard_rank is %" PRIu32 ": must be below shard_size %" PRIu32,
                          identity->shard_rank, identity->shard_size);
    if ((r = check_string(identity->adapter, "adapter", "none", cause)) < 0)
        return r;
    return check_string(identity->tenant, "tenant", "default", cause);
}
