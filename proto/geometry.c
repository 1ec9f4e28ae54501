/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/geometry.h"

#include <inttypes.h>

#include "proto/page.h"

int oscar_geometry_check(const struct oscar_geometry *geometry, struct oscar_cause *cause) {
    if (geometry->layers < 1 || geometry->layers > OSCAR_MAX_LAYERS)
        return oscar_fail(cause, OSCAR_ERR_GEOMETRY, "layers is %" PRIu32 ": must be 1 to %u", geometry->layers,
                          OSCAR_MAX_LAYERS);
    if (geometry->kv_heads < 1 || geometry->kv_heads > OSCAR_MAX_KV_HEADS)
        return oscar_fail(cause, OSCAR_ERR_GEOMETRY, "kv_heads is %" PRIu32 ": must be 1 to %u", geometry->kv_heads,
                          OSCAR_MAX_KV_HEADS);
    if (geometry->query_heads == 0 || geometry->query_heads % geometry->kv_heads != 0 ||
        geometry->query_heads / geometry->kv_heads > OSCAR_MAX_GROUP)
        return oscar_fail(cause, OSCAR_ERR_GEOMETRY,
                          "query_heads is %" PRIu32 ": must be a multiple of kv_heads (%" PRIu32
                          "), at most %u times it",
                          geometry->query_heads, geometry->kv_heads, OSCAR_MAX_GROUP);
    if (geometry->head_dim != 64 && geometry->head_dim != 128 && geometry->head_dim != 256)
        return oscar_fail(cause, OSCAR_ERR_GEOMETRY, "head_dim is %" PRIu32 ": must be 64, 128 or 256",
                          geometry->head_dim);
    if (geometry->dtype != OSCAR_BF16 && geometry->dtype != OSCAR_FP16)
        return oscar_fail(cause, OSCAR_ERR_GEOMETRY, "dtype is %" PRIu32 ": must be %d (BF16) or %d (FP16)",
                          geometry->dtype, OSCAR_BF16, OSCAR_FP16);
    if (geometry->page_tokens != OSCAR_PAGE_TOKENS)
        return oscar_fail(cause, OSCAR_ERR_GEOMETRY, "page_tokens is %" PRIu32 ": layout %u has %u",
                          geometry->page_tokens, OSCAR_LAYOUT_ID, OSCAR_PAGE_TOKENS);
    if (geometry->sink_tokens != OSCAR_SINK_TOKENS)
        return oscar_fail(cause, OSCAR_ERR_GEOMETRY, "sink_tokens is %" PRIu32 ": layout %u has %u",
                          geometry->sink_tokens, OSCAR_LAYOUT_ID, OSCAR_SINK_TOKENS);
    if (geometry->recent_tokens != OSCAR_RECENT_TOKENS)
        return oscar_fail(cause, OSCAR_ERR_GEOMETRY, "recent_tokens is %" PRIu32 ": layout %u has %u",
                          geometry->recent_tokens, OSCAR_LAYOUT_ID, OSCAR_RECENT_TOKENS);
    uint64_t page_bytes = oscar_dense_page_bytes(geometry);
    if (page_bytes > OSCAR_MAX_PAGE_BYTES)
        return oscar_fail(cause, OSCAR_ERR_GEOMETRY,
                          "a dense page of %" PRIu32 " layers, %" PRIu32 " kv_heads and head_dim %" PRIu32
                          " has %" PRIu64 " bytes: at most %" PRIu64 ", shard the model",
                          geometry->layers, geometry->kv_heads, geometry->head_dim, page_bytes, OSCAR_MAX_PAGE_BYTES);
    return OSCAR_OK;
}

uint64_t oscar_dense_page_bytes(const struct oscar_geometry *geometry) {
    return (uint64_t)geometry->layers * geometry->kv_heads * oscar_dense_record_bytes(geometry->head_dim);
}

uint64_t oscar_packed_page_bytes(const struct oscar_geometry *geometry) {
    return (uint64_t)geometry->layers * geometry->kv_heads * oscar_packed_record_bytes(geometry->head_dim);
}
