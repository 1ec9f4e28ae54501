# SPDX-License-Identifier: Apache-2.0
"""A model's namespace in the cache: geometry, identity, look-ups, leases, and attention over a ragged batch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Items
from ctypes import byref, sizeof
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _abi
from ._handle import Owned
from ._library import library
from .client import Client, Stream, _text, stream_handle, tokens_buffer
from .errors import ErrorCode, check, error_of
from .tensors import BF16, FP16, View, lse_rows, rows

if TYPE_CHECKING:
    from .sequence import Sequence

PAGE_TOKENS = 64
SINK_TOKENS = 64
RECENT_TOKENS = 256
MAX_SEQUENCE_TOKENS = 1 << 22

DTYPES = {"bfloat16": BF16, "float16": FP16}


@dataclass(frozen=True)
class Geometry:
    """The shape of a model's K/V.

    layers       1..512, of this shard
    query_heads  a multiple of kv_heads, at most 64 times it
    kv_heads     1..256, of this shard
    head_dim     64, 128 or 256
    dtype        of q, k, v and outputs: "bfloat16" or "float16"
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"

    def _struct(self) -> _abi.Geometry:
        if self.dtype not in DTYPES:
            raise error_of(ErrorCode.GEOMETRY, f"dtype {self.dtype!r}: bfloat16 or float16")
        geometry = _abi.Geometry()
        library().oscar_geometry_init(
            byref(geometry), self.layers, self.query_heads, self.kv_heads, self.head_dim, DTYPES[self.dtype]
        )
        return geometry


@dataclass(frozen=True)
class ModelInfo:
    """A model as the daemon serves it."""

    model_digest: bytes
    calibration_digest: bytes
    dense_page_bytes: int  # one page, all layers and heads, BF16
    packed_page_bytes: int  # the same in INT2


@dataclass(frozen=True)
class Probe:
    """What of a prompt is cached."""

    hit_tokens: int  # now, a multiple of 64
    in_flight_tokens: int  # once running computations have finished


@dataclass
class Query:
    """Attention of one sequence over one layer.

    q       [rows, query_heads, head_dim]; row i stands at position tokens - rows + i and sees positions up to its own
    out     [rows, query_heads, head_dim], written
    tokens  attend over the first `tokens` tokens, stored ones, committed or not; 0: all committed
    lse     [rows, query_heads] contiguous float32, written: natural log-sum-exp of the scaled scores; or None
    """

    seq: Sequence
    q: Any
    out: Any
    tokens: int = 0
    lse: Any | None = None


class Model(Owned):
    """A namespace of the cache: workers share pages where all of this is equal.

    geometry        shape of the K/V
    weights_digest  32 bytes that name the weights
    rope_digest     32 bytes that name the RoPE parameters
    revision        of the weights, such as "main"
    calibration     name of a file in the daemon's folder, or its hex digest; None: plain Hadamard rotations
    adapter         name of an adapter on the weights; None: "none"
    shard           (rank, size) of a tensor-parallel group

    Raises InvalidError (GEOMETRY, IDENTITY), OscarError (NOT_FOUND or CALIBRATION, LIMIT), NoSpaceError.
    """

    def __init__(
        self,
        client: Client,
        geometry: Geometry,
        *,
        weights_digest: bytes,
        rope_digest: bytes,
        revision: str = "main",
        calibration: str | None = None,
        adapter: str | None = None,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        for name, digest in (("weights_digest", weights_digest), ("rope_digest", rope_digest)):
            if len(digest) != 32:
                raise error_of(ErrorCode.IDENTITY, f"{name} has {len(digest)} bytes, not 32")
        options = _abi.ModelOptions(
            size=sizeof(_abi.ModelOptions),
            geometry=geometry._struct(),
            weights_digest=ctypes.pointer(_abi.Digest(*weights_digest)),
            revision=_text(revision),
            rope_digest=ctypes.pointer(_abi.Digest(*rope_digest)),
            calibration=_text(calibration),
            adapter=_text(adapter),
            shard_rank=shard[0],
            shard_size=shard[1],
        )
        handle = _abi.Handle()
        check(library().oscar_model_open(client.handle, byref(options), byref(handle)))
        super().__init__(handle.value or 0, client, library().oscar_model_close)
        self.client = client
        self.geometry = geometry

    def info(self) -> ModelInfo:
        """Digests, and the sizes of a page."""
        info = _abi.ModelInfo(size=sizeof(_abi.ModelInfo))
        check(library().oscar_model_info(self.handle, byref(info)))
        return ModelInfo(
            model_digest=bytes(info.model_digest),
            calibration_digest=bytes(info.calibration_digest),
            dense_page_bytes=info.dense_page_bytes,
            packed_page_bytes=info.packed_page_bytes,
        )

    def rotation(self, layer: int, kv_head: int, side: str) -> Any:
        """The rotation R of "k" or "v" of a KV head, a numpy array [head_dim, head_dim]: store writes x R."""
        import numpy as np

        matrix = np.empty((self.geometry.head_dim, self.geometry.head_dim), np.float32)
        pointer = matrix.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        check(library().oscar_model_rotation(self.handle, layer, kv_head, "kv".index(side), pointer))
        return matrix

    def probe(self, tokens: Any) -> Probe:
        """How much of `tokens` is cached. Pins nothing."""
        return self._probe(tokens, None)

    def lease(self, tokens: Any) -> Lease:
        """Pins what of `tokens` is cached until the lease is closed or its owner's connection ends."""
        handle = _abi.Handle()
        found = self._probe(tokens, byref(handle))
        return Lease(self, handle.value or 0, found.hit_tokens)

    def adopt_lease(self, secret: bytes) -> Lease:
        """Takes over a lease of another process, of the same user and client group. OscarError NOT_FOUND."""
        if len(secret) != ctypes.sizeof(_abi.Secret):
            raise error_of(ErrorCode.INVALID, f"secret has {len(secret)} bytes, not {ctypes.sizeof(_abi.Secret)}")
        handle, hit = _abi.Handle(), ctypes.c_uint32()
        given = _abi.Secret(*secret)
        check(library().oscar_lease_adopt(self.handle, byref(given), byref(handle), byref(hit)))
        return Lease(self, handle.value or 0, hit.value)

    def _probe(self, tokens: Any, lease: Any) -> Probe:
        buffer, count = tokens_buffer(tokens)
        result = _abi.ProbeResult()
        check(library().oscar_probe(self.handle, buffer, count, byref(result), lease))
        return Probe(result.hit_tokens, result.in_flight_tokens)

    def attend(self, layer: int, queries: Items[Query], *, scale: float = 0.0, stream: Stream | None = None) -> None:
        """Attention of a ragged batch over one layer: decode with one row a sequence, prefill with many.

        scale  of the scores; 0: 1/sqrt(head_dim)
        """
        heads = self.geometry.query_heads
        items = (_abi.AttendQuery * len(queries))()
        for item, query in zip(items, queries):
            q = self._rows(query.q, "q", heads)
            out = self._rows(query.out, "out", heads, q.shape[0])
            item.seq = query.seq.handle
            item.tokens, item.rows = query.tokens, q.shape[0]
            item.q, (item.q_row_stride, item.q_head_stride) = q.address, q.strides[:2]
            item.out, (item.out_row_stride, item.out_head_stride) = out.address, out.strides[:2]
            if query.lse is not None:
                item.lse = self._lse(query.lse, q.shape[0])
        kept = stream_handle(stream, *queries)
        check(library().oscar_attend(self.handle, kept, layer, scale, items, len(queries)))

    def merge(self, out: Any, lse: Any, other_out: Any, other_lse: Any, *, stream: Stream | None = None) -> None:
        """Replaces out and lse by the attention over the tokens of both partial results, which must not overlap.

        Shapes as in Query. So a worker attends over a part of the tokens with a kernel of its own.
        """
        into, count = self._partial(out, lse)
        other, _ = self._partial(other_out, other_lse, count)
        kept = stream_handle(stream, out, lse, other_out, other_lse)
        check(library().oscar_merge(self.handle, kept, count, byref(into), byref(other)))

    def _partial(self, out: Any, lse: Any, count: int | None = None) -> tuple[_abi.Partial, int]:
        found = self._rows(out, "out", self.geometry.query_heads, count)
        return _abi.Partial(found.address, *found.strides[:2], self._lse(lse, found.shape[0])), found.shape[0]

    def _rows(self, tensor: Any, what: str, heads: int, count: int | None = None) -> View:
        """The caller's rows [count, heads, head_dim] of this model's type."""
        shape = self.geometry
        found = rows(tensor, what, heads, shape.head_dim, DTYPES[shape.dtype], self.client.gpu, count)
        if what == "out" and not found.writable:
            raise error_of(ErrorCode.INVALID, "out is read-only")
        return found

    def _lse(self, tensor: Any, count: int) -> int:
        """Address of the caller's log-sum-exp [count, query_heads]."""
        return lse_rows(tensor, "lse", count, self.geometry.query_heads, self.client.gpu).address


class Lease(Owned):
    """Pinned pages of a prefix (Model.lease). Another process of the same user and client group may adopt it."""

    def __init__(self, model: Model, handle: int, hit_tokens: int) -> None:
        super().__init__(handle, model, library().oscar_lease_close)
        self.hit_tokens = hit_tokens

    def secret(self) -> bytes:
        """16 bytes by which another process adopts it: send them by any means."""
        secret = _abi.Secret()
        check(library().oscar_lease_secret(self.handle, byref(secret)))
        return bytes(secret)
