# SPDX-License-Identifier: Apache-2.0
"""Attaching a transformers model to the daemon."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..client import Client, Stream
from ..errors import DeadlineError
from ..model import Model
from ..sequence import Sequence
from ..tensors import torch_gpu
from . import attention
from .cache import OscarCache
from .identity import Path, geometry, rope_digest, text_config, weights_digest


class Worker:
    """A causal language model whose K/V oscard keeps. Sets the model's attention to "oscar" until it is closed.

    model        of full causal attention in every layer, with head size 64, 128 or 256; on the CPU for a daemon of the
                 host backend, on its GPU for one of cuda
    socket       of the daemon; None: as in oscar_kv.Client
    calibration  name of a file in the daemon's folder, or its hex digest; None: plain Hadamard rotations
    dense_tail   of caches where they do not say: the last 256 tokens of a hit are BF16, recomputed where they are
                 packed
    dtype        of stored rows and attention outputs, torch.bfloat16 or torch.float16; None: the model's, float16 for
                 float32
    weights      the model's files, to name the weights by, or a digest that weights_digest() gave; None: by the
                 parameters
    revision     of the weights
    adapter      name of an adapter that is not part of the weights; None: none
    threads      of the host backend; None: as many as torch uses

    Raises ValueError for a model that cannot be served, and the errors of oscar_kv.Client and oscar_kv.Model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        socket: str | None = None,
        name: str | None = None,
        calibration: str | None = None,
        dense_tail: bool = False,
        dtype: torch.dtype | None = None,
        weights: bytes | Path | Iterable[Path] | None = None,
        revision: str = "main",
        adapter: str | None = None,
        threads: int | None = None,
        timeout_ms: int = 0,
    ) -> None:
        shape = geometry(model, dtype)
        rope = rope_digest(text_config(model))
        self.client = Client(socket, name=name, timeout_ms=timeout_ms)
        gpu = torch_gpu(model.device.index) if model.device.type == "cuda" else None
        if self.client.gpu != gpu:
            pages = self.client.gpu or "the host"
            self.client.close()
            raise ValueError(
                f"the model is in memory of {gpu or 'the host'}, the daemon's pages are in that of {pages}"
            )
        self.model = Model(
            self.client,
            shape,
            weights_digest=weights if isinstance(weights, bytes) else weights_digest(model, weights),
            rope_digest=rope,
            revision=revision,
            calibration=calibration,
            adapter=adapter,
        )
        self.dense_tail = dense_tail
        self._dtype = getattr(torch, shape.dtype)
        self._host_stream: Stream | None = None
        if self.client.gpu is None:
            self._host_stream = Stream(self.client, threads=threads or torch.get_num_threads())
        attention.register()
        self._attached = model
        self._own_attention = model.config._attn_implementation
        model.set_attn_implementation(attention.NAME)
        base = model.base_model
        self._hooks: list[RemovableHandle] = [
            base.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            base.register_forward_hook(self._after_forward, with_kwargs=True, always_call=True),
        ]

    def cache(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        dense_tail: bool | None = None,
        wait_ms: int = 0,
    ) -> OscarCache:
        """Opens a sequence for each row of input_ids [batch, columns].

        attention_mask  [batch, columns], 0 for padding on the left, else 1; None: no padding
        wait_ms         how long to wait for another worker that is computing a missing prefix; it is computed here
                        after that
        """
        ids = input_ids.tolist()
        padding = [0] * len(ids) if attention_mask is None else _left_padding(attention_mask)
        prompts = [row[pad:] for row, pad in zip(ids, padding)]
        tail = self.dense_tail if dense_tail is None else dense_tail
        sequences: list[Sequence] = []
        try:
            for prompt in prompts:
                sequence = Sequence(self.model, prompt, dense_tail=tail)
                sequences.append(sequence)
                info = sequence.info()
                if wait_ms > 0 and info.in_flight_tokens > info.hit_tokens:
                    _wait(sequence, wait_ms)
            return OscarCache(self, sequences, prompts, padding)
        except BaseException:
            for sequence in sequences:
                sequence.close()
            raise

    def stream(self) -> Stream:
        """Where this thread's work goes: torch's current stream on a GPU."""
        return self._host_stream or self.client.torch_stream()

    def cast(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in the type of stored rows, heads contiguous; itself if it is so."""
        tensor = tensor.detach().to(self._dtype)
        return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

    def close(self) -> None:
        """Closes caches and connection, and gives the model its own attention back. Again is fine."""
        for hook in self._hooks:
            hook.remove()
        if self._hooks:
            self._attached.set_attn_implementation(self._own_attention)
        self._hooks = []
        self.client.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    # --- hooks of the model ---

    def _own_cache(self, arguments: dict[str, Any]) -> OscarCache | None:
        cache = arguments.get("cache")
        if cache is None:
            cache = arguments.get("past_key_values")
        return cache if isinstance(cache, OscarCache) and cache.worker is self else None

    def _before_forward(
        self, _module: torch.nn.Module, positional: tuple[Any, ...], arguments: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        cache = self._own_cache(arguments)
        if cache is None:
            return None
        ids = arguments["input_ids"] if "input_ids" in arguments else next(iter(positional), None)
        if ids is None:
            raise ValueError("the cache needs token ids: call the model with input_ids, not with inputs_embeds")
        begin, padding = cache.get_seq_length(), cache.padding
        cache.begin(ids)
        end = begin + ids.shape[1]
        mask = arguments.get("attention_mask")
        if mask is not None and (mask.ndim != 2 or mask.shape[1] != end or _left_padding(mask) != cache.padding):
            raise ValueError(f"attention_mask is not that of the cache: {end} columns, padding {cache.padding}")
        if mask is None and any(padding):
            raise ValueError("the cache was opened for padded rows: give the model their attention_mask")
        positions = [[max(column - pad, 0) for column in range(begin, end)] for pad in cache.padding]
        expected = torch.tensor(positions, device=ids.device)
        given = arguments.get("position_ids")
        if given is not None and (given.ndim != 2 or not torch.equal(given.expand_as(expected), expected)):
            raise ValueError("position_ids are not the positions of the tokens: their K cannot be shared")
        # Attention in the daemon's pages is causal by itself: no mask is built.
        return positional, {**arguments, "attention_mask": None, "position_ids": expected}

    def _after_forward(
        self, _module: torch.nn.Module, _positional: tuple[Any, ...], arguments: dict[str, Any], output: Any
    ) -> None:
        cache = self._own_cache(arguments)
        if cache is None:
            return
        if output is None:  # it raised
            cache.abandon()
        else:
            cache.commit()


def _left_padding(attention_mask: torch.Tensor) -> list[int]:
    """How many columns of each row come before its first token. ValueError for zeros elsewhere."""
    mask = attention_mask.bool()
    padding = mask.shape[1] - mask.sum(dim=1)
    if not torch.equal(mask, torch.arange(mask.shape[1], device=mask.device) >= padding[:, None]):
        raise ValueError("attention_mask: a row may be padded on the left only")
    return padding.tolist()


def _wait(sequence: Sequence, wait_ms: int) -> None:
    try:
        sequence.wait(wait_ms)
    except DeadlineError:
        pass  # it is computed here
