/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The page layout, id 1: the bytes of a dense and of a packed page. Every backend writes and reads exactly this.
 *
 * A page is 64 consecutive tokens. It is page-major: records ordered [layer][kv_head], contiguous, no padding.
 *
 * Dense record, 256*d bytes (d = head size): K [64 tokens][d] BF16, then V [64 tokens][d] BF16; rotated values.
 *
 * Packed record, 32*d + 512 bytes: K codes 16*d | V codes 16*d | scales 512. All words little-endian. With W = d/64 and a
 * "lane" 4g + t (g = 0..7, t = 0..3), the lane numbering of the m16n8 matrix instructions, and "tile" = 16 tokens:
 *
 *   K   [tile 0..3][lane][2W words]: word w (0..W-1) belongs to token row g, word W + w to token row g + 8. Bits
 *       8k + 2f .. 8k + 2f + 1 (k, f = 0..3) of it hold the code of dim 16*(W*f + w) + 4t + k.
 *   V   [tile 0..3][lane][2W words]: word h*W + r (h = 0, 1; r = 0..W-1). Its 16-bit half u (0 = low, 1 = high) belongs to
 *       token 8h + 2t + u of the tile; bits 2i .. 2i + 1 (i = 0..7) of the half hold the code of dim 8*(W*i + r) + g.
 *   scales [tile][g][token row g, token row g + 8]{scale K, zero K, scale V, zero V}, IEEE binary16.
 *
 * A code c (0..3) stands for scale * (c - zero).
 */
#ifndef OSCAR_PROTO_PAGE_H
#define OSCAR_PROTO_PAGE_H

#include <stddef.h>
#include <stdint.h>

#include "oscar/geometry.h"

#define OSCAR_LAYOUT_ID 1U
#define OSCAR_TILE_TOKENS 16U
#define OSCAR_SCALES_BYTES 512U

/* The form in which a page table entry's page is stored. */
enum oscar_form {
    OSCAR_FORM_SINK = 0,   /* dense record bytes, in the sink arena, owned by the daemon */
    OSCAR_FORM_DENSE = 1,  /* dense record bytes, in a dense chunk */
    OSCAR_FORM_PACKED = 2, /* packed record bytes */
    OSCAR_FORMS = 3,
};

/* One entry of a page table: 0 is "no page"; else bit 63 set, bits 56..57 the form, bits 0..39 the page id in its arena. */
typedef uint64_t oscar_page_ref;

#define OSCAR_PAGE_ID_MASK ((UINT64_C(1) << 40) - 1)

static inline oscar_page_ref oscar_page_ref_make(enum oscar_form form, uint64_t id) {
    return (UINT64_C(1) << 63) | ((uint64_t)form << 56) | (id & OSCAR_PAGE_ID_MASK);
}
static inline unsigned oscar_page_ref_form(oscar_page_ref ref) { return (unsigned)(ref >> 56) & 3U; }
static inline uint64_t oscar_page_ref_id(oscar_page_ref ref) { return ref & OSCAR_PAGE_ID_MASK; }

static inline size_t oscar_dense_record_bytes(uint32_t head_dim) { return (size_t)256 * head_dim; }
static inline size_t oscar_packed_record_bytes(uint32_t head_dim) { return (size_t)32 * head_dim + OSCAR_SCALES_BYTES; }

/* Byte offsets inside a packed record. */
static inline size_t oscar_packed_v_offset(uint32_t head_dim) { return (size_t)16 * head_dim; }
static inline size_t oscar_packed_scales_offset(uint32_t head_dim) { return (size_t)32 * head_dim; }

/* Offset of token's {scale K, zero K, scale V, zero V} (four binary16) from the start of the scales. */
static inline size_t oscar_packed_scale_offset(uint32_t token) {
    uint32_t tile = token / 16, row = token % 16;
    return (size_t)tile * 128 + (size_t)(row % 8) * 16 + (size_t)(row / 8) * 8;
}

/* Where one code lies: byte offset in the record's K (or V) part and the shift of its two bits in that byte. */
struct oscar_code_place {
    uint32_t byte;
    uint32_t shift;
};
struct oscar_code_place oscar_packed_k_place(uint32_t head_dim, uint32_t token, uint32_t dim);
struct oscar_code_place oscar_packed_v_place(uint32_t head_dim, uint32_t token, uint32_t dim);

/* Plain accessors for tools and tests (`record` is one packed record; side 0 = K, 1 = V). */
unsigned oscar_packed_code_get(const uint8_t *record, uint32_t head_dim, unsigned side, uint32_t token, uint32_t dim);
void oscar_packed_code_set(uint8_t *record, uint32_t head_dim, unsigned side, uint32_t token, uint32_t dim,
                           unsigned code);

#endif
