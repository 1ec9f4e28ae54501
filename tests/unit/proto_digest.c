/* SPDX-License-Identifier: Apache-2.0 */
/* Names of models and pages: golden digests, and that every field of an identity counts. */
#include <stdio.h>
#include <string.h>

#include "proto/digest.h"
#include "proto/page.h"
#include "proto_golden.h"
#include "proto_test.h"

static struct oscar_digest pattern(unsigned start) {
    struct oscar_digest digest;
    for (unsigned i = 0; i < OSCAR_DIGEST_BYTES; i++)
        digest.bytes[i] = (uint8_t)(start + 7 * i);
    return digest;
}

/* As in tests/data/proto/make_digests.py. */
static struct oscar_identity qwen(void) {
    return (struct oscar_identity){
        .format = OSCAR_IDENTITY_FORMAT,
        .weights = pattern(1),
        .revision = "main",
        .geometry = {36, 32, 8, 128, OSCAR_BF16, OSCAR_PAGE_TOKENS, OSCAR_SINK_TOKENS, OSCAR_RECENT_TOKENS},
        .rope = pattern(2),
        .calibration = pattern(3),
        .layout = OSCAR_LAYOUT_ID,
        .shard_rank = 0,
        .shard_size = 1,
        .adapter = "none",
        .tenant = "default",
    };
}

static struct oscar_digest digest_of(const struct oscar_identity *identity) {
    struct oscar_digest digest;
    oscar_model_digest(identity, &digest);
    return digest;
}

static void model_digests_are_golden(void **state) {
    (void)state;
    struct oscar_identity identity = qwen();
    struct oscar_digest digest = digest_of(&identity);
    assert_golden("model", "qwen", &digest);
    identity.geometry = (struct oscar_geometry){80, 16, 2, 256, OSCAR_FP16, 64, 64, 256};
    identity.shard_rank = 3;
    identity.shard_size = 4;
    strcpy(identity.revision, "awq-4bit");
    strcpy(identity.adapter, "sql-lora");
    strcpy(identity.tenant, "équipe-7");
    digest = digest_of(&identity);
    assert_golden("model", "shard", &digest);
}

static void chain_digests_are_golden(void **state) {
    (void)state;
    struct oscar_identity identity = qwen();
    struct oscar_digest digest = digest_of(&identity);
    uint32_t tokens[OSCAR_PAGE_TOKENS];
    for (uint32_t i = 0; i < OSCAR_PAGE_TOKENS; i++)
        tokens[i] = i;
    oscar_chain_digest(&digest, tokens, &digest); /* parent and result may be one */
    assert_golden("chain", "counting", &digest);
    for (uint32_t i = 0; i < OSCAR_PAGE_TOKENS; i++)
        tokens[i] = 0xffffffffU - 3 * i;
    oscar_chain_digest(&digest, tokens, &digest);
    assert_golden("chain", "large", &digest);
    memset(tokens, 0, sizeof(tokens));
    oscar_chain_digest(&digest, tokens, &digest);
    assert_golden("chain", "zeros", &digest);
}

static void the_default_digest_of_bytes_is_plain_blake2b(void **state) {
    (void)state;
    struct oscar_digest digest;
    char hex[2 * OSCAR_DIGEST_BYTES + 1];
    oscar_content_digest("abc", 3, &digest); /* printf abc | b2sum -l 256 */
    oscar_digest_hex(&digest, hex);
    assert_string_equal(hex, "bddd813c634239723171ef3fee98579b94964e3bb1cb3e427262c8c068d52319");
}

#define FIELD(field)                                                                                                   \
    { #field, offsetof(struct oscar_identity, field) }
static const struct {
    const char *name;
    size_t offset; /* one byte of the field is changed */
} fields[] = {
    FIELD(format),
    FIELD(weights.bytes[0]),
    FIELD(weights.bytes[31]),
    FIELD(revision[0]),
    FIELD(geometry.layers),
    FIELD(geometry.query_heads),
    FIELD(geometry.kv_heads),
    FIELD(geometry.head_dim),
    FIELD(geometry.dtype),
    FIELD(geometry.page_tokens),
    FIELD(geometry.sink_tokens),
    FIELD(geometry.recent_tokens),
    FIELD(rope.bytes[7]),
    FIELD(calibration.bytes[9]),
    FIELD(layout),
    FIELD(shard_rank),
    FIELD(shard_size),
    FIELD(adapter[3]),
    FIELD(tenant[2]),
};
#define FIELDS (sizeof(fields) / sizeof(fields[0]))

static void every_field_changes_the_model_digest(void **state) {
    (void)state;
    struct oscar_digest digests[FIELDS + 1];
    struct oscar_identity base = qwen();
    digests[FIELDS] = digest_of(&base);
    for (size_t i = 0; i < FIELDS; i++) {
        struct oscar_identity identity = base;
        ((uint8_t *)&identity)[fields[i].offset] ^= 1;
        digests[i] = digest_of(&identity);
    }
    for (size_t i = 0; i <= FIELDS; i++) {
        for (size_t j = 0; j < i; j++)
            assert_memory_not_equal(&digests[i], &digests[j], OSCAR_DIGEST_BYTES);
    }
}

static void equal_strings_in_different_fields_never_collide(void **state) {
    (void)state;
    struct oscar_identity base = qwen();
    strcpy(base.revision, "x");
    strcpy(base.adapter, "x");
    strcpy(base.tenant, "x");
    struct oscar_identity swapped[3] = {base, base, base};
    strcpy(swapped[0].revision, "y");
    strcpy(swapped[1].adapter, "y");
    strcpy(swapped[2].tenant, "y");
    struct oscar_digest digests[3];
    for (int i = 0; i < 3; i++)
        digests[i] = digest_of(&swapped[i]);
    assert_memory_not_equal(&digests[0], &digests[1], OSCAR_DIGEST_BYTES);
    assert_memory_not_equal(&digests[0], &digests[2], OSCAR_DIGEST_BYTES);
    assert_memory_not_equal(&digests[1], &digests[2], OSCAR_DIGEST_BYTES);
}

static void characters_cannot_move_between_fields(void **state) {
    (void)state;
    struct oscar_identity left = qwen(), right = qwen();
    strcpy(left.adapter, "ab");
    strcpy(left.tenant, "c");
    strcpy(right.adapter, "a");
    strcpy(right.tenant, "bc");
    struct oscar_digest a = digest_of(&left), b = digest_of(&right);
    assert_memory_not_equal(&a, &b, OSCAR_DIGEST_BYTES);
}

static void bytes_behind_a_terminator_do_not_count(void **state) {
    (void)state;
    struct oscar_identity left = qwen(), right = qwen();
    right.tenant[100] = 'x';
    struct oscar_digest a = digest_of(&left), b = digest_of(&right);
    assert_memory_equal(&a, &b, OSCAR_DIGEST_BYTES);
}

static void models_and_pages_have_separate_domains(void **state) {
    (void)state;
    /* A page whose tokens spell out nothing, under a parent of zeros, is not the digest of the same plain bytes. */
    struct oscar_digest zero = {{0}}, chain, plain;
    uint32_t tokens[OSCAR_PAGE_TOKENS] = {0};
    uint8_t bytes[OSCAR_DIGEST_BYTES + sizeof(tokens)] = {0};
    oscar_chain_digest(&zero, tokens, &chain);
    oscar_content_digest(bytes, sizeof(bytes), &plain);
    assert_memory_not_equal(&chain, &plain, OSCAR_DIGEST_BYTES);
}

static void every_token_changes_the_chain_digest(void **state) {
    (void)state;
    struct oscar_digest parent = pattern(9), base, changed;
    uint32_t tokens[OSCAR_PAGE_TOKENS];
    for (uint32_t i = 0; i < OSCAR_PAGE_TOKENS; i++)
        tokens[i] = 1000 + i;
    oscar_chain_digest(&parent, tokens, &base);
    for (uint32_t i = 0; i < OSCAR_PAGE_TOKENS; i++) {
        tokens[i] ^= 0x80000000U;
        oscar_chain_digest(&parent, tokens, &changed);
        assert_memory_not_equal(&base, &changed, OSCAR_DIGEST_BYTES);
        tokens[i] ^= 0x80000000U;
    }
    parent.bytes[31] ^= 1;
    oscar_chain_digest(&parent, tokens, &changed);
    assert_memory_not_equal(&base, &changed, OSCAR_DIGEST_BYTES);
}

static void an_identity_without_a_field_is_refused_by_its_name(void **state) {
    (void)state;
    static const struct {
        const char *name;
        size_t offset, size;
    } required[] = {
        {"format", offsetof(struct oscar_identity, format), 4},
        {"weights", offsetof(struct oscar_identity, weights), OSCAR_DIGEST_BYTES},
        {"revision", offsetof(struct oscar_identity, revision), OSCAR_NAME_BYTES},
        {"rope", offsetof(struct oscar_identity, rope), OSCAR_DIGEST_BYTES},
        {"calibration", offsetof(struct oscar_identity, calibration), OSCAR_DIGEST_BYTES},
        {"layout", offsetof(struct oscar_identity, layout), 4},
        {"shard_size", offsetof(struct oscar_identity, shard_size), 4},
        {"adapter", offsetof(struct oscar_identity, adapter), OSCAR_NAME_BYTES},
        {"tenant", offsetof(struct oscar_identity, tenant), OSCAR_NAME_BYTES},
    };
    struct oscar_cause cause;
    struct oscar_identity identity = qwen();
    assert_int_equal(oscar_identity_check(&identity, &cause), OSCAR_OK);
    for (size_t i = 0; i < sizeof(required) / sizeof(required[0]); i++) {
        identity = qwen();
        memset((char *)&identity + required[i].offset, 0, required[i].size);
        assert_int_equal(oscar_identity_check(&identity, &cause), OSCAR_ERR_IDENTITY);
        assert_non_null(strstr(cause.text, required[i].name));
    }
    identity = qwen();
    memset(&identity.geometry, 0, sizeof(identity.geometry));
    assert_int_equal(oscar_identity_check(&identity, &cause), OSCAR_ERR_GEOMETRY);
}

static void a_malformed_identity_is_refused(void **state) {
    (void)state;
    struct oscar_cause cause;
    struct oscar_identity identity = qwen();
    identity.shard_rank = identity.shard_size;
    assert_int_equal(oscar_identity_check(&identity, &cause), OSCAR_ERR_IDENTITY);
    identity = qwen();
    identity.shard_size = OSCAR_MAX_SHARDS + 1;
    assert_int_equal(oscar_identity_check(&identity, &cause), OSCAR_ERR_IDENTITY);
    identity = qwen();
    memset(identity.adapter, 'a', sizeof(identity.adapter)); /* no terminator */
    assert_int_equal(oscar_identity_check(&identity, &cause), OSCAR_ERR_IDENTITY);
    identity = qwen();
    strcpy(identity.tenant, "a\nb");
    assert_int_equal(oscar_identity_check(&identity, &cause), OSCAR_ERR_IDENTITY);
    identity = qwen();
    identity.layout = 2;
    assert_int_equal(oscar_identity_check(&identity, &cause), OSCAR_ERR_IDENTITY);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(model_digests_are_golden),
        cmocka_unit_test(chain_digests_are_golden),
        cmocka_unit_test(the_default_digest_of_bytes_is_plain_blake2b),
        cmocka_unit_test(every_field_changes_the_model_digest),
        cmocka_unit_test(equal_strings_in_different_fields_never_collide),
        cmocka_unit_test(characters_cannot_move_between_fields),
        cmocka_unit_test(bytes_behind_a_terminator_do_not_count),
        cmocka_unit_test(models_and_pages_have_separate_domains),
        cmocka_unit_test(every_token_changes_the_chain_digest),
        cmocka_unit_test(an_identity_without_a_field_is_refused_by_its_name),
        cmocka_unit_test(a_malformed_identity_is_refused),
    };
    return cmocka_run_group_tests_name("proto_digest", tests, NULL, NULL);
}
