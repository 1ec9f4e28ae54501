# SPDX-License-Identifier: Apache-2.0
"""A transformers Cache whose K/V lies in the daemon: one sequence a row of the batch.

Columns are the positions of transformers' rectangular batch, padding included; position p of row b is column p +
padding[b]. A step is one forward pass: `begin` makes room, each layer stores and attends, `commit` advances or
`abandon` forgets.
"""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from ..client import Stream
from ..model import PAGE_TOKENS, RECENT_TOKENS, SINK_TOKENS, Query
from ..sequence import Sequence, SequenceInfo

if TYPE_CHECKING:
    from .worker import Worker


class OscarLayer(CacheLayerMixin):
    """One layer of an OscarCache: hands K and V to its sequences."""

    def __init__(self, cache: OscarCache, index: int) -> None:
        super().__init__()
        self.cache: OscarCache = weakref.proxy(cache)  # which owns this layer
        self.index = index
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores K and V [batch, kv heads, rows, dim] of the step; returns them, marked for the attention function."""
        self.cache.store(self.index, key_states, value_states)
        keys = key_states.view_as(key_states)
        keys.oscar_cache = self.cache  # type: ignore[attr-defined]
        return keys, value_states

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the sequences are open."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As if there were only the step's rows: the daemon's attention is causal by itself and takes no mask."""
        return query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.get_seq_length()

    def get_max_length(self) -> int:
        return -1


class OscarCache(Cache):
    """Made by `Worker.cache`. A context manager: closing it leaves the pages in the daemon.

    hit_tokens  of each prompt: how many were cached when the sequences were opened
    """

    def __init__(self, worker: Worker, sequences: list[Sequence], prompts: list[list[int]], padding: list[int]) -> None:
        layers = worker.model.geometry.layers
        super().__init__(layers=[OscarLayer(self, index) for index in range(layers)])
        self.worker = worker
        self.sequences = sequences
        self.padding = padding
        self.hit_tokens = [sequence.info().hit_tokens for sequence in sequences]
        self._prompts = prompts
        # All rows start with the same column: the first that any of them misses, and at least one is left to compute.
        columns = len(prompts[0]) + padding[0]
        self._column = min([hit + pad for hit, pad in zip(self.hit_tokens, padding)] + [max(columns - 1, 0)])
        self._step: list[list[int]] | None = None  # ids of the running forward pass
        self._first: list[int] = []  # position of its first row that is no padding
        self._rows: list[int] = []  # how many rows are no padding
        self._stream: Stream | None = None

    # --- a forward pass, in the order of the calls ---

    def begin(self, input_ids: torch.Tensor) -> None:
        """A forward pass over these ids [batch, rows] is about to run: checks them and makes room."""
        ids = input_ids.tolist()
        if len(ids) != len(self.sequences):
            if len(ids) % len(self.sequences):
                raise ValueError(f"a batch of {len(ids)} rows for a cache of {len(self.sequences)}")
            self.batch_repeat_interleave(len(ids) // len(self.sequences))
        count = input_ids.shape[1]
        for row, prompt, padding in zip(ids, self._prompts, self.padding):
            first = self._column - padding
            known = prompt[max(first, 0) : max(first + count, 0)]
            if row[max(-first, 0) :][: len(known)] != known:
                raise ValueError("the model is given other tokens than those that the cache was opened for")
        self._stream = self.worker.stream()
        self._first = [max(self._column - padding, 0) for padding in self.padding]
        self._rows = [min(max(self._column + count - padding, 0), count) for padding in self.padding]
        for sequence, first, rows in zip(self.sequences, self._first, self._rows):
            info = sequence.info()
            end = first + rows
            if end > info.reserved_tokens:
                sequence.reserve(_up_to_page(end) - info.committed_tokens)
        self._step = ids

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes K and V [batch, kv heads, rows, dim] of the step to the sequences' pages."""
        self._check_step(keys)
        keys, values = self.worker.cast(keys), self.worker.cast(values)
        for index, (sequence, first, rows) in enumerate(zip(self.sequences, self._first, self._rows)):
            if rows > 0:
                k, v = (side[index, :, side.shape[2] - rows :].transpose(0, 1) for side in (keys, values))
                sequence.store(layer, first, k, v, stream=self._stream)

    def attend(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of query [batch, query heads, rows, dim]: [batch, rows, query heads, dim]; 0 for padding."""
        self._check_step(query)
        rows = self.worker.cast(query).transpose(1, 2)
        out = torch.zeros(rows.shape, dtype=rows.dtype, device=rows.device)
        queries = [
            Query(sequence, rows[index, -count:], out[index, -count:], tokens=first + count)
            for index, (sequence, first, count) in enumerate(zip(self.sequences, self._first, self._rows))
            if count > 0
        ]
        self.worker.model.attend(layer, queries, scale=scale, stream=self._stream)
        return out.to(query.dtype)

    def commit(self) -> None:
        """The forward pass is complete in all layers."""
        step, self._step = self._step, None
        if step is None:
            return
        self._column += len(step[0])
        for sequence, ids, first, rows in zip(self.sequences, step, self._first, self._rows):
            committed = sequence.info().committed_tokens
            if first + rows > committed:
                sequence.advance(ids[len(ids) - (first + rows - committed) :], stream=self._stream)

    def abandon(self) -> None:
        """The forward pass failed: its tokens may be given again."""
        self._step = None

    def _check_step(self, tensor: torch.Tensor) -> None:
        if self._step is None:
            raise RuntimeError("this cache belongs to another model: Worker.cache makes one for the worker's own")
        if tensor.shape[0] != len(self._step) or tensor.shape[2] != len(self._step[0]):
            raise ValueError(f"{tensor.shape[2]} rows of {tensor.shape[0]} sequences, the tokens are others")

    # --- what transformers asks a cache ---

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that need no computing: cached or computed, padding included."""
        return self._column

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """For the mask, of which there is none: see OscarLayer.get_mask_sizes."""
        return 0

    @property
    def batch_size(self) -> int:
        return len(self.sequences)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row beam_idx[i] is: forks where a row is taken twice, closes what no row is."""
        self._take(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps these rows."""
        self._take(torch.arange(len(self.sequences))[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row."""
        self._take([index for index in range(len(self.sequences)) for _ in range(repeats)])

    def _take(self, chosen: list[int]) -> None:
        before = self.sequences
        self.sequences = [
            before[index].fork(stream=self._stream) if index in chosen[:place] else before[index]
            for place, index in enumerate(chosen)
        ]
        for index in set(range(len(before))) - set(chosen):
            before[index].close()
        self.padding = [self.padding[index] for index in chosen]
        self.hit_tokens = [self.hit_tokens[index] for index in chosen]
        self._prompts = [self._prompts[index] for index in chosen]

    def crop(self, tokens_to_remove: int) -> None:
        """Committed tokens stay: NotImplementedError for any but none."""
        if tokens_to_remove != 0:
            raise NotImplementedError("tokens in the cache are shared and cannot be dropped: open another cache")

    def reset(self) -> None:
        raise NotImplementedError("a cache is of its prompt: open another one")

    # --- for the caller ---

    def info(self) -> list[SequenceInfo]:
        """Lengths of each sequence."""
        return [sequence.info() for sequence in self.sequences]

    def settle(self, timeout_s: float = 60.0) -> None:
        """Waits until attention reads as INT2 what lies between the sink and the recent window of each sequence.

        Packing goes on beside the model; this makes a measurement repeatable. A page stays BF16 while it is in the
        recent window of any other open sequence. TimeoutError.
        """
        deadline = time.monotonic() + timeout_s
        for sequence in self.sequences:
            recent = max(sequence.info().committed_tokens - RECENT_TOKENS, 0)
            wanted = max(recent // PAGE_TOKENS * PAGE_TOKENS - SINK_TOKENS, 0)
            while (packed := sequence.info().packed_tokens) < wanted:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{packed} of {wanted} tokens are packed after {timeout_s} s")
                sequence.advance([])  # asks the daemon
                time.sleep(0.001)

    def close(self) -> None:
        """Closes the sequences; their pages stay cached for others. Again is fine."""
        for sequence in self.sequences:
            sequence.close()

    def __enter__(self) -> OscarCache:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def _up_to_page(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS
