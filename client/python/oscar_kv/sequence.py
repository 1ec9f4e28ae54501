# SPDX-License-Identifier: Apache-2.0
"""One worker's view of one token path, and batches of them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Items
from ctypes import byref, sizeof
from dataclasses import dataclass, fields
from typing import Any

from . import _abi
from ._handle import Owned
from ._library import library
from .client import Stream, stream_handle, tokens_buffer
from .errors import ErrorCode, check, error_of
from .model import Model
from .tensors import View

_DENSE_TAIL = 1  # enum oscar_seq_flags


@dataclass(frozen=True)
class SequenceInfo:
    """State of a sequence."""

    hit_tokens: int  # at open or the last wait: positions below need no computing
    in_flight_tokens: int  # > hit_tokens while another worker computes the prefix
    committed_tokens: int  # hit + advanced
    reserved_tokens: int  # room up to this length
    sealed_tokens: int  # published or found: others can hit them
    packed_tokens: int  # how many tokens are read as INT2 now


class Sequence(Owned):
    """Sealed pages that are shared, then an unsealed tail of its own. Used from one thread at a time.

    tokens      ids of the prompt; may be empty
    dense_tail  cut the hit so that the last 256 tokens before its end are BF16: this worker computes them where they
                are packed

    Positions below `hit` need no computing. For the others: reserve, then store each layer, and advance once all layers
    are stored; attend at any time over what is stored. Closing leaves the pages in the cache.
    """

    def __init__(self, model: Model, tokens: Any, *, dense_tail: bool = False) -> None:
        buffer, count = tokens_buffer(tokens)
        handle = _abi.Handle()
        flags = _DENSE_TAIL if dense_tail else 0
        check(library().oscar_seq_open(model.handle, buffer, count, flags, byref(handle)))
        self._own(model, handle)

    def _own(self, model: Model, handle: _abi.Handle) -> None:
        super().__init__(handle.value or 0, model, library().oscar_seq_close)
        self.model = model

    def info(self) -> SequenceInfo:
        """Lengths, in tokens."""
        info = _abi.SeqInfo(size=sizeof(_abi.SeqInfo))
        check(library().oscar_seq_info(self.handle, byref(info)))
        return SequenceInfo(*(getattr(info, field.name) for field in fields(SequenceInfo)))

    def wait(self, timeout_ms: int) -> None:
        """Waits for another worker that computes the missing prefix, and takes over what is there; before the first
        store.

        DeadlineError leaves the sequence usable. The new hit is in `info()`.
        """
        check(library().oscar_seq_wait(self.handle, timeout_ms))

    def reserve(self, tokens: int) -> None:
        """Room for `tokens` more after the committed length, all or nothing. NoSpaceError changes nothing."""
        check(library().oscar_seq_reserve(self.handle, tokens))

    def store(self, layer: int, first: int, k: Any, v: Any, *, stream: Stream | None = None) -> None:
        """Writes K, V of positions first .. first + tokens - 1 of one layer.

        k, v  [tokens, kv_heads, head_dim] with any strides of tokens and heads, read until the stream has passed

        Positions below the committed length are ignored; uncommitted ones may be written again. NoSpaceError beyond the
        reserved length, NotFiniteError (on the host at once).
        """
        heads = self.model.geometry.kv_heads
        keys = self.model._rows(k, "k", heads)
        values = self.model._rows(v, "v", heads, keys.shape[0])
        kept = stream_handle(stream, k, v)
        check(
            library().oscar_seq_store(
                self.handle, kept, layer, first, keys.shape[0], byref(_tensor(keys)), byref(_tensor(values))
            )
        )

    def rows(self, layer: int, kv_head: int, position: int) -> tuple[int, int, int]:
        """Addresses of the rotated BF16 rows of K and of V of an uncommitted position, and how many rows follow there.

        For a worker's own kernel: rows are contiguous by token, head_dim elements each.
        """
        k, v, count = _abi.Handle(), _abi.Handle(), ctypes.c_uint32()
        check(library().oscar_seq_rows(self.handle, layer, kv_head, position, byref(k), byref(v), byref(count)))
        return k.value or 0, v.value or 0, count.value

    def advance(self, tokens: Any, *, stream: Stream | None = None) -> None:
        """These token ids are complete in all layers once the stream has passed this point.

        With no tokens: speaks to the daemon, so that pages which were packed since are taken over. On DeadlineError and
        ConnectionLostError the tokens are committed all the same: do not give them again.
        """
        buffer, count = tokens_buffer(tokens)
        check(library().oscar_seq_advance(self.handle, stream_handle(stream), buffer, count))

    def fork(self, *, stream: Stream | None = None) -> Sequence:
        """A second sequence with the same committed tokens: sealed pages are shared, the unsealed tail is copied."""
        handle = _abi.Handle()
        check(library().oscar_seq_fork(self.handle, stream_handle(stream), byref(handle)))
        branch = Sequence.__new__(Sequence)
        branch._own(self.model, handle)
        return branch


@dataclass(frozen=True)
class BatchEntry:
    """A sequence of a step: `rows` new tokens; `tokens`: length with them, 0: the committed length + rows."""

    seq: Sequence
    rows: int = 1
    tokens: int = 0


class Batch(Owned):
    """What changes from step to step where the kernels read it: a step allocates nothing, and a CUDA graph can capture
    it.

    max_seqs    sequences of one step
    max_rows    new tokens of one sequence in one step
    max_tokens  lengths of all sequences of one step together

    Each step: reserve where room is short, `set`, then `store` and `attend` each layer, then advance each sequence.
    Tensors are contiguous: [rows of all sequences, heads, head_dim], in the order of the entries.
    """

    def __init__(self, model: Model, *, max_seqs: int, max_rows: int, max_tokens: int) -> None:
        params = _abi.BatchParams(
            size=sizeof(_abi.BatchParams), max_seqs=max_seqs, max_rows=max_rows, max_tokens=max_tokens
        )
        handle = _abi.Handle()
        check(library().oscar_batch_open(model.handle, byref(params), byref(handle)))
        super().__init__(handle.value or 0, model, library().oscar_batch_close)
        self.model = model
        self._rows = 0

    def set(self, entries: Items[BatchEntry | Sequence], *, stream: Stream | None = None) -> None:
        """From here on the batch is these sequences; StateError from store and attend once a call overtakes it."""
        given = [BatchEntry(entry) if isinstance(entry, Sequence) else entry for entry in entries]
        items = (_abi.BatchEntry * len(given))(
            *[_abi.BatchEntry(entry.seq.handle, entry.rows, entry.tokens) for entry in given]
        )
        check(library().oscar_batch_set(self.handle, stream_handle(stream), items, len(given)))
        self._rows = sum(entry.rows for entry in given)

    def store(self, layer: int, k: Any, v: Any, *, stream: Stream | None = None) -> None:
        """Writes the step's rows of K and V. All must be uncommitted."""
        heads = self.model.geometry.kv_heads
        keys, values = self._contiguous(k, "k", heads), self._contiguous(v, "v", heads)
        kept = stream_handle(stream, k, v)
        check(library().oscar_batch_store(self.handle, kept, layer, keys.address, values.address))

    def attend(
        self,
        layer: int,
        q: Any,
        out: Any,
        *,
        lse: Any | None = None,
        scale: float = 0.0,
        stream: Stream | None = None,
    ) -> None:
        """Attention of the step's rows; `lse` [rows, query_heads] float32 or None; `scale` 0: 1/sqrt(head_dim)."""
        heads = self.model.geometry.query_heads
        queries, outputs = self._contiguous(q, "q", heads), self._contiguous(out, "out", heads)
        sums = None if lse is None else self.model._lse(lse, self._rows)
        kept = stream_handle(stream, q, out, lse)
        check(library().oscar_batch_attend(self.handle, kept, layer, scale, queries.address, outputs.address, sums))

    def _contiguous(self, tensor: Any, what: str, heads: int) -> View:
        found = self.model._rows(tensor, what, heads, self._rows)
        head_dim = self.model.geometry.head_dim
        spread_heads = heads > 1 and self._rows > 0 and found.strides[1] != head_dim
        if spread_heads or (self._rows > 1 and found.strides[0] != heads * head_dim):
            raise error_of(ErrorCode.INVALID, f"{what} is not contiguous")
        return found


def _tensor(found: View) -> _abi.Tensor:
    return _abi.Tensor(found.address, *found.strides[:2])
