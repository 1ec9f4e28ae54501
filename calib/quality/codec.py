# SPDX-License-Identifier: Apache-2.0
"""The codec of proto/CALIBRATION.md in numpy, over many rows of one head at once, equal to kernels/codec.h to the bit.

Arithmetic is binary32. A fused multiply-add is made of binary64: there the product of two binary32 numbers is exact, so
only the sum needs care. Values that go from one fma to the next are kept as binary64 arrays of binary32 numbers. Sums
that are subnormal in binary32 may be rounded twice; no row of a model comes near them.
"""

import math
from dataclasses import dataclass

import numpy as np

from windows import PAGE_TOKENS

_BLOCK_ROWS = 256  # rows that feedback rounding works on at a time: they stay in the cache
_HALF = 1 << 28  # what a binary64 number has below a binary32 number's last bit when it is half of that bit


def fma(a, b, c):
    """a * b + c with one rounding to binary32. Arguments and result: binary32 numbers in binary64."""
    product = a * b
    total = product + c
    halfway = (total.view(np.int64) & (2 * _HALF - 1)) == _HALF
    if halfway.any():  # rounding it again is wrong where the sum was not exact: move it off the middle
        total[halfway] = _off_middle(*(np.broadcast_to(x, total.shape)[halfway] for x in (product, c)), total[halfway])
    return total.astype(np.float32).astype(np.float64)


def _off_middle(a, b, total):
    part = total - a
    error = (a - (total - part)) + (b - part)  # Knuth's two-sum: exact
    return np.where(error == 0, total, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)))


def _turns(omega, factor):
    """cos and sin of omega * factor in binary64, by libm as the daemon makes them, rounded to binary32."""
    angles = [[float(w) * f for w in omega] for f in factor]
    return tuple(
        np.array([[function(angle) for angle in row] for row in angles], np.float64).astype(np.float32)
        for function in (math.cos, math.sin)
    )


def turns(omega, positions):
    """cos and sin of each position and frequency, [rows, frequencies], from tables of pages and of rows of a page."""
    pages, page = np.unique(positions // PAGE_TOKENS, return_inverse=True)
    page_cos, page_sin = (t[page] for t in _turns(omega, [int(p) * PAGE_TOKENS for p in pages]))
    row = positions % PAGE_TOKENS
    row_cos, row_sin = (
        t.astype(np.float16).astype(np.float64)[row] for t in _turns(omega, list(range(PAGE_TOKENS)))
    )
    rounded = (page_sin * row_sin.astype(np.float32)).astype(np.float64)
    cos = fma(page_cos.astype(np.float64), row_cos, -rounded)
    rounded = (page_cos * row_sin.astype(np.float32)).astype(np.float64)
    return cos, fma(page_sin.astype(np.float64), row_cos, rounded)


def centre(static, cos_rows, sin_rows, cos, sin):
    """c'(position), float32 [rows, d]: static [d], cos_rows and sin_rows [pairs, d], cos and sin [rows, pairs]."""
    total = np.repeat(static[None].astype(np.float64), len(cos), axis=0)
    for pair in range(len(cos_rows)):
        total = fma(cos[:, pair, None], cos_rows[pair].astype(np.float64), total)
        total = fma(sin[:, pair, None], sin_rows[pair].astype(np.float64), total)
    return total.astype(np.float32)


@dataclass(frozen=True)
class PackedRows:
    """Rows of one side of one head as they are held: four codes a byte, scale and zero a row."""

    codes: np.ndarray  # uint8 [rows, d / 4]
    scale: np.ndarray  # float16 [rows]
    zero: np.ndarray  # float16 [rows]

    @property
    def nbytes(self):
        return self.codes.nbytes + self.scale.nbytes + self.zero.nbytes

    def unpacked_codes(self):
        """uint8 [rows, d], 0 to 3."""
        return ((self.codes[:, :, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3).reshape(len(self.codes), -1)

    def unpack(self):
        """What the rows stand for, without the centre, float32 [rows, d]."""
        codes = self.unpacked_codes().astype(np.float32)
        return (codes - self.zero.astype(np.float32)[:, None]) * self.scale.astype(np.float32)[:, None]


def pack(x, rank, feedback=None):
    """Packs float32 rows [rows, d] without their centre; `feedback` is L [d, d], or None for nearest rounding."""
    scale, zero = _scale_and_zero(x, rank)
    codes = _nearest(x, scale[:, None], zero[:, None]) if feedback is None else _feedback(x, scale, zero, feedback)
    packed = codes[:, 0::4] | codes[:, 1::4] << 2 | codes[:, 2::4] << 4 | codes[:, 3::4] << 6
    return PackedRows(packed, scale.astype(np.float16), zero.astype(np.float16))


def _scale_and_zero(x, rank):
    threshold = np.partition(np.abs(x), rank, axis=1)[:, rank]
    low = np.maximum(x.min(axis=1), -threshold) + np.float32(0)
    high = np.minimum(x.max(axis=1), threshold)
    floor = np.maximum(threshold * np.float32(2**-10), np.float32(2**-24))
    with np.errstate(over="ignore"):
        scale = np.maximum((high - low) / np.float32(3), floor).astype(np.float16).astype(np.float32)
    if not np.isfinite(scale).all():
        raise ValueError("a row that is not finite, or too large, cannot be packed")
    return scale, (-low / scale).astype(np.float16).astype(np.float32)


def _nearest(x, scale, zero):
    return np.clip(np.floor((x / scale + zero) + np.float32(0.5)), 0, 3).astype(np.uint8)


def _feedback(x, scale, zero, factor):
    codes = np.empty(x.shape, np.uint8)
    negative = -factor.astype(np.float64)
    for start in range(0, len(x), _BLOCK_ROWS):
        block = slice(start, start + _BLOCK_ROWS)
        wide = np.ascontiguousarray(x[block].T).astype(np.float64)  # [d, rows]
        t = wide.copy()
        for i in reversed(range(len(t))):
            code = _nearest(t[i].astype(np.float32), scale[block], zero[block])
            codes[block, i] = code
            offset = (code.astype(np.float32) - zero[block]).astype(np.float64)
            error = fma(offset, scale[block].astype(np.float64), -wide[i])
            t[:i] = fma(negative[i, :i, None], error, t[:i])
    return codes
