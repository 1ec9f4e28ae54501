# SPDX-License-Identifier: Apache-2.0
"""Attention functions for transformers: BF16 K and V, K and V as oscard holds them, and a capture of Q, K and V.

Each is a function of one whole text, from position 0, in one forward pass. A query at position i reads as INT2 what the
daemon has packed when i tokens are committed, which is the same for all queries of a page.
"""

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

import codec
from windows import PAGE_TOKENS

NAME = "oscar-quality"

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
        self.scale = None  # of the scores

    def __call__(self, layer, query, key, value, scale):
        self.scale = scale
        for name, rows in (("q", query), ("k", key), ("v", value)):
            self.tensors[f"layers.{layer}.{name}"] = rows.transpose(0, 1).contiguous().bfloat16()
        rows = [
            _causal(query[:, start : start + 512], key[:, : start + 512], value[:, : start + 512], start, scale)
            for start in range(0, query.shape[1], 512)
        ]
        return torch.cat(rows, dim=1)


class Held:
    """K and V in the forms in which oscard holds them: rotated, BF16 in sink and window, packed between them.

    Rows come in binary16, as a worker of a float32 model hands them to the daemon. `packed_row_bytes` is what a token's
    K and V of one layer and head take, from the bytes held.
    """

    def __init__(self, calibration, windows):
        self._calibration = calibration
        self._windows = windows
        self.packed_row_bytes = None

    def __call__(self, layer, query, key, value, scale):
        heads = [self._calibration.head(layer, head) for head in range(len(key))]
        rotation_k, rotation_v = (
            torch.from_numpy(np.stack([getattr(head, name) for head in heads])) for name in ("rotation_k", "rotation_v")
        )
        group = len(query) // len(key)
        query = query.half().float() @ rotation_k.repeat_interleave(group, 0)
        key, value = self._stored(layer, key, value, rotation_k, rotation_v)
        output = self._pages(layer, query, key, value, heads, scale)
        return (output @ rotation_v.mT.repeat_interleave(group, 0)).half().float()

    def _stored(self, _layer, key, value, rotation_k, rotation_v):
        """Rows of K and V as they are stored."""
        return (
            (rows.half().float() @ rotation).bfloat16().float()
            for rows, rotation in ((key, rotation_k), (value, rotation_v))
        )

    def _packed(self, _layer, _head, key, value):
        """Is told the PackedRows of a head."""
        self.packed_row_bytes = (key.nbytes + value.nbytes) / len(key.codes)

    def _pages(self, layer, query, key, value, heads, scale):
        """Page by page, after the pages that have left the window until then are packed."""
        first, end = self._windows.packed(query.shape[1] - 1)
        packed_key, packed_value = self._read_back(layer, heads, key[:, first:end], value[:, first:end], first)
        key, value = key.clone(), value.clone()
        outputs = []
        done = first
        for start in range(0, query.shape[1], PAGE_TOKENS):
            _, end = self._windows.packed(start)
            key[:, done:end] = packed_key[:, done - first : end - first]
            value[:, done:end] = packed_value[:, done - first : end - first]
            done = end
            stop = start + PAGE_TOKENS
            outputs.append(_causal(query[:, start:stop], key[:, :stop], value[:, :stop], start, scale))
        return torch.cat(outputs, dim=1)

    def _read_back(self, layer, heads, key, value, first):
        """K and V, at positions from `first` on, as a reader of packed pages sees them."""
        positions = np.arange(first, first + key.shape[1])
        read_key, read_value = torch.empty_like(key), torch.empty_like(value)
        for index, head in enumerate(heads):
            centre = np.float32(0)
            if head.centre_static is not None:
                turns = codec.turns(head.omega, positions)
                centre = codec.centre(head.centre_static, head.centre_cos, head.centre_sin, *turns)
            packed_key = codec.pack(key[index].numpy() - centre, head.rank_k, head.feedback)
            packed_value = codec.pack(value[index].numpy(), head.rank_v)
            read_key[index] = torch.from_numpy(packed_key.unpack() + centre)
            read_value[index] = torch.from_numpy(packed_value.unpack())
            self._packed(layer, index, packed_key, packed_value)
        return read_key, read_value
