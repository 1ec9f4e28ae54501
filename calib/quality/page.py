# SPDX-License-Identifier: Apache-2.0
"""The bytes of packed pages (proto/page.h) in numpy: where the codec's rows come to lie. Needs numpy only."""

import numpy as np

from windows import PAGE_TOKENS

_TILES = PAGE_TOKENS // 16


def records(key, value):
    """A head's records of all pages, uint8 [pages, bytes], from its codec.PackedRows of K and of V: whole pages."""
    parts = (_keys(key.unpacked_codes()), _values(value.unpacked_codes()), _scales(key, value))
    return np.concatenate([part.reshape(len(key.codes) // PAGE_TOKENS, -1) for part in parts], axis=1)


def _keys(codes):
    """Codes of K: token 16 tile + 8 half + g, dim 16 (words f + w) + 4 t + k, at bits 2 f of byte k of word w."""
    words = codes.shape[1] // 64
    codes = codes.reshape(-1, _TILES, 2, 8, 4, words, 4, 4)  # page, tile, half, g, f, w, t, k
    packed = sum(codes[:, :, :, :, f] << np.uint8(2 * f) for f in range(4))
    return packed.transpose(0, 1, 3, 5, 2, 4, 6)  # page, tile, g, t, half, w, k


def _values(codes):
    """Codes of V: token 16 tile + 8 h + 2 t + u, dim 8 (words i + r) + g, at bits 2 i of half u of word r."""
    words = codes.shape[1] // 64
    codes = codes.astype("<u2").reshape(-1, _TILES, 2, 4, 2, 8, words, 8)  # page, tile, h, t, u, i, r, g
    packed = sum(codes[:, :, :, :, :, i] << np.uint16(2 * i) for i in range(8))
    packed = packed.transpose(0, 1, 6, 3, 2, 5, 4)  # page, tile, g, t, h, r, u
    return np.ascontiguousarray(packed, "<u2").view(np.uint8)


def _scales(key, value):
    """Scale and zero of K and of V, binary16, token rows g and g + 8 of a tile side by side."""
    numbers = np.stack((key.scale, key.zero, value.scale, value.zero), axis=1)
    rows = numbers.reshape(-1, _TILES, 2, 8, 4).transpose(0, 1, 3, 2, 4)  # page, tile, g, half
    return np.ascontiguousarray(rows, "<f2").view(np.uint8)
