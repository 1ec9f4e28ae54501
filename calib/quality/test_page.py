# SPDX-License-Identifier: Apache-2.0
"""Packed records against the words of proto/page.h, code by code. Needs numpy only."""

import os
import random
import sys
import unittest

import numpy as np

import codec
import page
from windows import PAGE_TOKENS

SEED = int(os.environ.get("OSCAR_TEST_SEED", random.randrange(1 << 32)))


def code_of_k(record, d, token, dim):
    """Bits 8k + 2f of word w, or W + w, of lane 4g + t hold dim 16*(W*f + w) + 4t + k of token row g, or g + 8."""
    words, row = d // 64, token % 16
    f, w = divmod(dim // 16, words)
    t, k = divmod(dim % 16, 4)
    word = words * (row // 8) + w
    byte = ((token // 16 * 32 + 4 * (row % 8) + t) * 2 * words + word) * 4 + k
    return record[byte] >> 2 * f & 3


def code_of_v(record, d, token, dim):
    """Bits 2i of half u of word h*W + r of lane 4g + t hold dim 8*(W*i + r) + g of token 8h + 2t + u of the tile."""
    words, row = d // 64, token % 16
    i, r = divmod(dim // 8, words)
    h, t, u = row // 8, row % 8 // 2, row % 2
    byte = 16 * d + ((token // 16 * 32 + 4 * (dim % 8) + t) * 2 * words + h * words + r) * 4 + 2 * u + i // 4
    return record[byte] >> 2 * (i % 4) & 3


def scales(record, d, token):
    """Scale and zero of K and of V."""
    row = token % 16
    start = 32 * d + token // 16 * 128 + row % 8 * 16 + row // 8 * 8
    return record[start : start + 8].view("<f2").tolist()


class Records(unittest.TestCase):
    def test_each_code_and_scale_lies_where_the_layout_says(self):
        print(f"seed {SEED}", file=sys.stderr)
        numbers = np.random.default_rng(SEED)
        for d in (64, 128, 256):
            key, value = (
                codec.pack(numbers.standard_normal((2 * PAGE_TOKENS, d), np.float32), d - 3) for _side in "kv"
            )
            records = page.records(key, value)
            self.assertEqual((records.dtype, records.shape), (np.uint8, (2, 32 * d + 512)))
            k, v = key.unpacked_codes(), value.unpacked_codes()
            for token in range(2 * PAGE_TOKENS):
                record, at = records[token // PAGE_TOKENS], token % PAGE_TOKENS
                self.assertEqual([code_of_k(record, d, at, dim) for dim in range(d)], k[token].tolist())
                self.assertEqual([code_of_v(record, d, at, dim) for dim in range(d)], v[token].tolist())
                expected = [key.scale[token], key.zero[token], value.scale[token], value.zero[token]]
                self.assertEqual(scales(record, d, at), expected)


if __name__ == "__main__":
    unittest.main()
