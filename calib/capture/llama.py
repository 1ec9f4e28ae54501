# SPDX-License-Identifier: Apache-2.0
"""The forward pass of a llama-family model in numpy float32, for one text from position 0.

A GGUF file of a llama keeps RoPE pairs interleaved (dims 2i and 2i+1 turn together). Here the rows of the
query and key weights are put back in the order of the original model, where dims i and i + head_size/2 turn
together ("halves"), so that Q and K come out in that order. Logits do not change by it.
"""

from dataclasses import dataclass

import numpy as np
from gguf.quants import dequantize

from errors import CaptureError

_QUERY_BLOCK = 512  # query rows whose scores are held at a time; bounds memory on long texts
_LOGIT_BLOCK = 256  # rows whose logits over the vocabulary are held at a time


@dataclass(frozen=True)
class Shape:
    """Sizes and constants of the model."""

    layers: int
    width: int
    feed_forward_width: int
    vocabulary: int
    query_heads: int
    kv_heads: int
    head_size: int
    context_tokens: int
    rope_base: float
    norm_epsilon: float

    @classmethod
    def of(cls, field):
        """From GGUF fields; `field(name)` gives a value, or None if the file does not have it."""

        def number(name, default=None):
            value = field(f"llama.{name}")
            value = default if value is None else value
            if not isinstance(value, (int, float)):
                raise CaptureError(f"llama.{name} must be one number in the GGUF file, it is {value!r}")
            return value

        if field("general.architecture") != "llama":
            raise CaptureError(f"unsupported architecture {field('general.architecture')!r} (supported: 'llama')")
        if field("llama.rope.scaling.type") not in (None, "none"):
            raise CaptureError(f"unsupported RoPE scaling {field('llama.rope.scaling.type')!r}")
        query_heads = number("attention.head_count")
        head_size = number("attention.key_length", number("embedding_length") // query_heads)
        if number("rope.dimension_count", head_size) != head_size:
            raise CaptureError("unsupported model: RoPE turns only a part of each head")
        return cls(
            layers=number("block_count"),
            width=number("embedding_length"),
            feed_forward_width=number("feed_forward_length"),
            vocabulary=number("vocab_size"),
            query_heads=query_heads,
            kv_heads=number("attention.head_count_kv", query_heads),
            head_size=head_size,
            context_tokens=number("context_length"),
            rope_base=number("rope.freq_base", 10000.0),
            norm_epsilon=number("attention.layer_norm_rms_epsilon"),
        )

    def layer_weights(self):
        """The shapes of a layer's weights, by name: [out, in] of a matrix, [width] of a norm."""
        q_width, kv_width = self.query_heads * self.head_size, self.kv_heads * self.head_size
        return {
            "attn_norm": (self.width,),
            "attn_q": (q_width, self.width),
            "attn_k": (kv_width, self.width),
            "attn_v": (kv_width, self.width),
            "attn_output": (self.width, q_width),
            "ffn_norm": (self.width,),
            "ffn_gate": (self.feed_forward_width, self.width),
            "ffn_up": (self.feed_forward_width, self.width),
            "ffn_down": (self.width, self.feed_forward_width),
        }

    def weights(self):
        """The shapes of all weights of the model, by their names in the file; output.weight may be absent."""
        shapes = {
            "token_embd.weight": (self.vocabulary, self.width),
            "output_norm.weight": (self.width,),
            "output.weight": (self.vocabulary, self.width),
        }
        for layer in range(self.layers):
            for name, shape in self.layer_weights().items():
                shapes[f"blk.{layer}.{name}.weight"] = shape
        return shapes


def halves_order(weight, heads):
    """Rows of a query or key weight [heads * head_size, width], from interleaved RoPE pairs to halves."""
    rows, width = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(rows, width)


def rms_norm(x, weight, epsilon):
    """Root-mean-square norm of the rows of x [tokens, width], scaled by weight [width]."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(epsilon)) * weight


def rope_tables(tokens, head_size, base):
    """cos and sin of position * base^(-2i/head_size), each float32 [tokens, 1, head_size / 2], made in float64."""
    frequencies = base ** (-2.0 * np.arange(head_size // 2) / head_size)
    angles = np.arange(tokens)[:, None, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(x, cos, sin):
    """RoPE on x [tokens, heads, head_size]: dims i and i + head_size/2 turn together."""
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def attend(q, k, v):
    """Causal attention: q [tokens, query heads, d], k and v [tokens, KV heads, d] to [tokens, query heads * d]."""
    tokens, query_heads, d = q.shape
    kv_heads = k.shape[1]
    group = query_heads // kv_heads
    keys = k.transpose(1, 2, 0)  # [KV heads, d, tokens]
    values = v.transpose(1, 0, 2)  # [KV heads, tokens, d]
    out = np.empty((tokens, query_heads * d), np.float32)
    for start in range(0, tokens, _QUERY_BLOCK):
        end = min(start + _QUERY_BLOCK, tokens)
        queries = q[start:end].reshape(end - start, kv_heads, group, d).transpose(1, 2, 0, 3)
        scores = queries @ keys[:, None, :, :end] * np.float32(d**-0.5)  # [KV heads, group, rows, end]
        future = np.arange(end) > np.arange(start, end)[:, None]
        scores[:, :, future] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed = scores @ values[:, None, :end]  # [KV heads, group, rows, d]
        out[start:end] = mixed.transpose(2, 0, 1, 3).reshape(end - start, query_heads * d)
    return out


class Llama:
    """A model whose weights stay quantised in the file; a layer's are expanded to float32 when it runs."""

    def __init__(self, field, tensors):
        """`field` as for Shape.of; `tensors` is a dict of name to gguf.ReaderTensor."""
        self.shape = Shape.of(field)
        self._tensors = tensors
        shapes = self.shape.weights()
        missing = sorted(shapes.keys() - tensors.keys() - {"output.weight"})
        unused = sorted(tensors.keys() - shapes.keys())
        if missing:
            raise CaptureError(f"the GGUF file lacks the tensor {missing[0]} ({len(missing)} are missing)")
        if unused:
            raise CaptureError(f"unsupported model: tensor {unused[0]} has no place in a plain llama")
        for name, tensor in tensors.items():
            found = tuple(int(size) for size in reversed(tensor.shape))  # GGUF names the fastest axis first
            if found != shapes[name]:
                raise CaptureError(f"tensor {name} is {list(found)} where the fields ask for {list(shapes[name])}")

    def _weight(self, name):
        tensor = self._tensors[name]
        try:
            return dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise CaptureError(f"tensor {name}: {tensor.tensor_type.name} weights cannot be read") from error

    def _layer_weight(self, layer, name):
        return self._weight(f"blk.{layer}.{name}.weight")

    def forward(self, ids, on_layer):
        """Run all layers over the token ids [tokens] and return the final hidden rows, normed, [tokens, width].

        `on_layer(layer, q, k, v)` is called once a layer, in order, with q [tokens, query heads, head size] and
        k [tokens, KV heads, head size] after RoPE, before any scaling, and v, shaped as k, before attention.
        """
        shape, tokens = self.shape, len(ids)
        cos, sin = rope_tables(tokens, shape.head_size, shape.rope_base)
        x = self._weight("token_embd.weight")[ids]
        for layer in range(shape.layers):
            x = x + self._attention(layer, x, cos, sin, on_layer)
            x = x + self._feed_forward(layer, x)
        return rms_norm(x, self._weight("output_norm.weight"), shape.norm_epsilon)

    def _attention(self, layer, x, cos, sin, on_layer):
        shape = self.shape
        normed = rms_norm(x, self._layer_weight(layer, "attn_norm"), shape.norm_epsilon)
        wq = halves_order(self._layer_weight(layer, "attn_q"), shape.query_heads)
        wk = halves_order(self._layer_weight(layer, "attn_k"), shape.kv_heads)
        wv = self._layer_weight(layer, "attn_v")
        q = rotate((normed @ wq.T).reshape(len(x), shape.query_heads, shape.head_size), cos, sin)
        k = rotate((normed @ wk.T).reshape(len(x), shape.kv_heads, shape.head_size), cos, sin)
        v = (normed @ wv.T).reshape(len(x), shape.kv_heads, shape.head_size)
        on_layer(layer, q, k, v)
        return attend(q, k, v) @ self._layer_weight(layer, "attn_output").T

    def _feed_forward(self, layer, x):
        normed = rms_norm(x, self._layer_weight(layer, "ffn_norm"), self.shape.norm_epsilon)
        gate = normed @ self._layer_weight(layer, "ffn_gate").T
        up = normed @ self._layer_weight(layer, "ffn_up").T
        silu = gate / (1 + np.exp(np.minimum(-gate, 80)))  # the bound keeps exp finite in float32
        return (silu * up) @ self._layer_weight(layer, "ffn_down").T

    def perplexity(self, hidden, ids):
        """exp of the mean next-token loss in nats over ids[1:], from the rows that `forward` returned."""
        tied = "output.weight" not in self._tensors
        head = self._weight("token_embd.weight" if tied else "output.weight")
        targets = np.asarray(ids[1:])
        total = 0.0
        for start in range(0, len(targets), _LOGIT_BLOCK):
            block = targets[start : start + _LOGIT_BLOCK]
            logits = hidden[start : start + len(block)] @ head.T
            logits -= logits.max(axis=-1, keepdims=True)
            log_sums = np.log(np.exp(logits).sum(axis=-1, dtype=np.float64))
            total += float((log_sums - logits[np.arange(len(block)), block]).sum())
        return float(np.exp(total / len(targets)))
