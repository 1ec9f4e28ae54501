/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/page.h"

#define LANES 32U

/* Byte of the first of a lane's words: both sides give every lane of a tile 2W words (W = head_dim / 64). */
static uint32_t word_byte(uint32_t words, uint32_t tile, uint32_t lane, uint32_t word) {
    return ((tile * LANES + lane) * 2 * words + word) * 4;
}

struct oscar_code_place oscar_packed_k_place(uint32_t head_dim, uint32_t token, uint32_t dim) {
    uint32_t words = head_dim / 64;
    uint32_t row = token % OSCAR_TILE_TOKENS;
    uint32_t f = dim / 16 / words, w = dim / 16 % words;
    uint32_t t = dim % 16 / 4, k = dim % 4;
    uint32_t lane = 4 * (row % 8) + t;
    uint32_t word = row / 8 * words + w;
    return (struct oscar_code_place){
        .byte = word_byte(words, token / OSCAR_TILE_TOKENS, lane, word) + k,
        .shift = 2 * f,
    };
}

struct oscar_code_place oscar_packed_v_place(uint32_t head_dim, uint32_t token, uint32_t dim) {
    uint32_t words = head_dim / 64;
    uint32_t row = token % OSCAR_TILE_TOKENS;
    uint32_t i = dim / 8 / words, r = dim / 8 % words;
    uint32_t h = row / 8, t = row % 8 / 2, u = row % 2;
    uint32_t lane = 4 * (dim % 8) + t;
    uint32_t word = h * words + r;
    return (struct oscar_code_place){
        .byte = word_byte(words, token / OSCAR_TILE_TOKENS, lane, word) + 2 * u + i / 4,
        .shift = 2 * (i % 4),
    };
}

static struct oscar_code_place place(uint32_t head_dim, unsigned side, uint32_t token, uint32_t dim) {
    if (side == 0)
        return oscar_packed_k_place(head_dim, token, dim);
    struct oscar_code_place result = oscar_packed_v_place(head_dim, token, dim);
    result.byte += (uint32_t)oscar_packed_v_offset(head_dim);
    return result;
}

unsigned oscar_packed_code_get(const uint8_t *record, uint32_t head_dim, unsigned side, uint32_t token, uint32_t dim) {
    struct oscar_code_place at = place(head_dim, side, token, dim);
    return (record[at.byte] >> at.shift) & 3U;
}

void oscar_packed_code_set(uint8_t *record, uint32_t head_dim, unsigned side, uint32_t token, uint32_t dim,
                           unsigned code) {
    struct oscar_code_place at = place(head_dim, side, token, dim);
    record[at.byte] = (uint8_t)((record[at.byte] & ~(3U << at.shift)) | ((code & 3U) << at.shift));
}
