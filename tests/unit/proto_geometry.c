/* SPDX-License-Identifier: Apache-2.0 */
/* Geometry: bounds, and sizes in 64 bits. */
#include <string.h>

#include "proto/geometry.h"
#include "proto_test.h"

static const struct oscar_geometry qwen = {
    .layers = 36,
    .query_heads = 32,
    .kv_heads = 8,
    .head_dim = 128,
    .dtype = OSCAR_BF16,
    .page_tokens = OSCAR_PAGE_TOKENS,
    .sink_tokens = OSCAR_SINK_TOKENS,
    .recent_tokens = OSCAR_RECENT_TOKENS,
};

static void a_page_has_the_stated_bytes(void **state) {
    (void)state;
    assert_int_equal(oscar_geometry_check(&qwen, NULL), OSCAR_OK);
    assert_true(oscar_dense_page_bytes(&qwen) == UINT64_C(36) * 8 * 2 * 64 * 128 * 2);
    assert_true(oscar_packed_page_bytes(&qwen) == UINT64_C(36) * 8 * (2 * 64 * 128 / 4 + 512));
}

static void each_bound_names_its_field(void **state) {
    (void)state;
    static const struct {
        const char *field;
        size_t offset;
        uint32_t value;
    } bad[] = {
        {"layers", offsetof(struct oscar_geometry, layers), 0},
        {"layers", offsetof(struct oscar_geometry, layers), OSCAR_MAX_LAYERS + 1},
        {"kv_heads", offsetof(struct oscar_geometry, kv_heads), 0},
        {"kv_heads", offsetof(struct oscar_geometry, kv_heads), OSCAR_MAX_KV_HEADS + 1},
        {"query_heads", offsetof(struct oscar_geometry, query_heads), 0},
        {"query_heads", offsetof(struct oscar_geometry, query_heads), 33},
        {"query_heads", offsetof(struct oscar_geometry, query_heads), 8 * (OSCAR_MAX_GROUP + 1)},
        {"query_heads", offsetof(struct oscar_geometry, query_heads), UINT32_MAX - 7},
        {"head_dim", offsetof(struct oscar_geometry, head_dim), 0},
        {"head_dim", offsetof(struct oscar_geometry, head_dim), 96},
        {"head_dim", offsetof(struct oscar_geometry, head_dim), 512},
        {"head_dim", offsetof(struct oscar_geometry, head_dim), UINT32_MAX},
        {"dtype", offsetof(struct oscar_geometry, dtype), 0},
        {"dtype", offsetof(struct oscar_geometry, dtype), 3},
        {"page_tokens", offsetof(struct oscar_geometry, page_tokens), 16},
        {"sink_tokens", offsetof(struct oscar_geometry, sink_tokens), 0},
        {"recent_tokens", offsetof(struct oscar_geometry, recent_tokens), 0},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct oscar_geometry geometry = qwen;
        struct oscar_cause cause;
        memcpy((char *)&geometry + bad[i].offset, &bad[i].value, sizeof(bad[i].value));
        assert_int_equal(oscar_geometry_check(&geometry, &cause), OSCAR_ERR_GEOMETRY);
        assert_int_equal(strncmp(cause.text, bad[i].field, strlen(bad[i].field)), 0);
    }
}

static void the_largest_page_is_bounded_and_does_not_wrap(void **state) {
    (void)state;
    struct oscar_geometry geometry = qwen;
    struct oscar_cause cause;
    geometry.layers = OSCAR_MAX_LAYERS;
    geometry.kv_heads = geometry.query_heads = OSCAR_MAX_KV_HEADS;
    geometry.head_dim = 256;
    assert_true(oscar_dense_page_bytes(&geometry) == UINT64_C(1) << 33);
    assert_int_equal(oscar_geometry_check(&geometry, &cause), OSCAR_ERR_GEOMETRY);
    assert_non_null(strstr(cause.text, "8589934592"));
    geometry.kv_heads = geometry.query_heads = OSCAR_MAX_KV_HEADS / 4;
    assert_int_equal(oscar_geometry_check(&geometry, &cause), OSCAR_OK);
    assert_true(oscar_dense_page_bytes(&geometry) == OSCAR_MAX_PAGE_BYTES);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_page_has_the_stated_bytes),
        cmocka_unit_test(each_bound_names_its_field),
        cmocka_unit_test(the_largest_page_is_bounded_and_does_not_wrap),
    };
    return cmocka_run_group_tests_name("proto_geometry", tests, NULL, NULL);
}
