# SPDX-License-Identifier: Apache-2.0
"""Float64 attention, and random rows as the cache takes them."""

import numpy as np

from oscar_kv import bf16_bits, bf16_values


def random_rows(random, tokens, heads, dim):
    """BF16 bits [tokens, heads, dim] of normal numbers, and the numbers that they stand for."""
    bits = bf16_bits(random.standard_normal((tokens, heads, dim)))
    return bits, bf16_values(bits).astype(np.float64)


def attention(q, k, v, scale=None):
    """Output and log-sum-exp of the last rows: q [rows, heads, dim], k and v [tokens, kv_heads, dim]."""
    rows, heads, dim = q.shape
    tokens, kv_heads, _ = k.shape
    k, v = (np.repeat(side, heads // kv_heads, axis=1) for side in (k, v))
    scores = np.einsum("rhd,thd->hrt", q, k) * (dim**-0.5 if scale is None else scale)
    scores[:, np.arange(tokens)[None, :] > np.arange(tokens - rows, tokens)[:, None]] = -np.inf
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    return np.einsum("hrt,thd->rhd", weights / total, v), (np.log(total) + top)[..., 0].T
