# SPDX-License-Identifier: Apache-2.0
"""Attention functions for transformers: BF16 K and V, K and V as oscard holds them, and a capture of Q, K and V.

Each is a function of one whole text, from position 0, in one forward pass. Where K and V are packed, a query at position i of
page c (64 tokens) reads as INT2 what the daemon has packed when i tokens are committed: the pages 1 to c - 5. Page 0 is the sink,
and the window is the last four full pages and the running one.
"""

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

import codec

NAME = "oscar-quality"
SINK_PAGES = 1
WINDOW_PAGES = 4  # full pages before the running one

_UNKNOWN = ("sliding_window", "softcap", "s_aux", "position_bias")  # what is more than causal attention


def install(model, function):
    """Puts `function(layer, query, key, value, scale)` in the place of the model's attention.

    query [query heads, tokens, d], key and value [KV heads, tokens, d], float32; it returns [query heads, tokens, d].
    """

    def attention(module, query, key, value, _mask, scaling=None, **options):
        for name in _UNKNOWN:
            if options.get(name) is not None:
                raise SystemExit(f"quality: attention with {name} is not supported")
        scale = scaling or query.shape[-1] ** -0.5
        output = function(module.layer_idx, query[0].float(), key[0].float(), value[0].float(), scale)
        return output.to(query.dtype).transpose(0, 1)[None], None

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, lambda *_arguments, **_options: None)
    model.set_attn_implementation(NAME)


def bf16(_layer, query, key, value, scale):
    """K and V in BF16, everything else as the model has it."""
    key, value = (x.bfloat16().float() for x in (key, value))
    return _causal(query, key, value, 0, scale)


def _causal(query, key, value, first, scale):
    """Queries at positions first, first + 1, ..; keys at 0, 1, .. up to the last query's."""
    rows, count = query.shape[1], key.shape[1]
    seen = torch.arange(count) <= torch.arange(first, first + rows)[:, None]
    return scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=seen, scale=scale, enable_gqa=True
    )[0]


class Capture:
    """Exact attention that keeps Q, K and V of all layers, BF16 [tokens, heads, d]."""

    def __init__(self):
        self.tensors = {}

    def __call__(self, layer, query, key, value, scale):
        for name, rows in (("q", query), ("k", key), ("v", value)):
            self.tensors[f"layers.{layer}.{name}"] = rows.transpose(0, 1).contiguous().bfloat16()
        rows = [
            _causal(query[:, start : start + 512], key[:, : start + 512], value[:, : start + 512], start, scale)
            for start in range(0, query.shape[1], 512)
        ]
        return torch.cat(rows, dim=1)


class Held:
    """K and V in the forms in which oscard holds them: rotated, BF16 in sink and window, packed between them.

    Without windows every full page before the running one is packed, the sink too. Rows come in binary16, as a worker of a float32
    model hands them to the daemon. `packed_row_bytes` is what a token's K and V of one layer and head take, from the bytes held.
    """

    def __init__(self, calibration, windows=True):
        self._calibration = calibration
        self._sink = SINK_PAGES if windows else 0
        self._window = WINDOW_PAGES if windows else 0
        self.packed_row_bytes = None

    def packed_tokens(self, tokens):
        """How many of the first `tokens` are packed when all of them are committed."""
        return max(tokens // codec.PAGE_TOKENS - self._window - self._sink, 0) * codec.PAGE_TOKENS

    def __call__(self, layer, query, key, value, scale):
        heads = [self._calibration.head(layer, head) for head in range(len(key))]
        rotation_k, rotation_v = (
            torch.from_numpy(np.stack([getattr(head, name) for head in heads])) for name in ("rotation_k", "rotation_v")
        )
        group = len(query) // len(key)
        query, key, value = (x.half().float() for x in (query, key, value))
        query = query @ rotation_k.repeat_interleave(group, 0)
        key = (key @ rotation_k).bfloat16().float()
        value = (value @ rotation_v).bfloat16().float()
        output = self._pages(query, key, value, self._read_back(heads, key, value), scale)
        return (output @ rotation_v.mT.repeat_interleave(group, 0)).half().float()

    def _read_back(self, heads, key, value):
        """K and V of the tokens that are packed at the end, as a reader sees them, [KV heads, tokens, d] each."""
        start = self._sink * codec.PAGE_TOKENS
        positions = np.arange(start, start + self.packed_tokens(key.shape[1]))
        found = torch.empty((2, len(heads), len(positions), key.shape[2]))
        for index, head in enumerate(heads):
            k, v = (x[index, positions[0] : positions[-1] + 1].numpy() for x in (key, value))
            centre = np.float32(0)
            if head.centre_static is not None:
                turns = codec.turns(head.omega, positions)
                centre = codec.centre(head.centre_static, head.centre_cos, head.centre_sin, *turns)
            packed_k = codec.pack(k - centre, head.rank_k, head.feedback)
            packed_v = codec.pack(v, head.rank_v)
            self.packed_row_bytes = (packed_k.nbytes + packed_v.nbytes) / len(positions)
            found[0, index] = torch.from_numpy(packed_k.unpack() + centre)
            found[1, index] = torch.from_numpy(packed_v.unpack())
        return found

    def _pages(self, query, key, value, packed, scale):
        page = codec.PAGE_TOKENS
        key, value = key.clone(), value.clone()
        outputs = []
        for first in range(0, query.shape[1], page):
            oldest_dense = first - self._window * page
            newly = slice(max(oldest_dense - page, 0), max(oldest_dense, 0))  # the page that leaves the window
            if newly.start >= self._sink * page and newly.stop > newly.start:
                offset = self._sink * page
                key[:, newly] = packed[0, :, newly.start - offset : newly.stop - offset]
                value[:, newly] = packed[1, :, newly.start - offset : newly.stop - offset]
            end = first + page
            outputs.append(_causal(query[:, first:end], key[:, :end], value[:, :end], first, scale))
        return torch.cat(outputs, dim=1)
