/* SPDX-License-Identifier: Apache-2.0 */
/* The shape of one model's K/V as oscard stores it. */
#ifndef OSCAR_GEOMETRY_H
#define OSCAR_GEOMETRY_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Fixed by the page layout (layout id 1). */
#define OSCAR_PAGE_TOKENS 64U
#define OSCAR_SINK_TOKENS 64U
#define OSCAR_RECENT_TOKENS 256U
#define OSCAR_MAX_SEQUENCE_TOKENS (1U << 22)
#define OSCAR_MAX_SEQUENCE_PAGES (OSCAR_MAX_SEQUENCE_TOKENS / OSCAR_PAGE_TOKENS)

/* Element type of the worker's Q, K, V and output tensors. */
enum oscar_dtype {
    OSCAR_BF16 = 1,
    OSCAR_FP16 = 2,
};

struct oscar_geometry {
    uint32_t layers;        /* 1..512, of this shard */
    uint32_t query_heads;   /* a multiple of kv_heads, at most 64 times it */
    uint32_t kv_heads;      /* 1..256, of this shard */
    uint32_t head_dim;      /* 64, 128 or 256 */
    uint32_t dtype;         /* enum oscar_dtype */
    uint32_t page_tokens;   /* OSCAR_PAGE_TOKENS */
    uint32_t sink_tokens;   /* OSCAR_SINK_TOKENS */
    uint32_t recent_tokens; /* OSCAR_RECENT_TOKENS */
};

#ifdef __cplusplus
}
#endif
#endif
