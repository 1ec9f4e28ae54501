# SPDX-License-Identifier: Apache-2.0
"""oscard for Python workers: one prefix-shared KV cache for a host, attended over in place.

A thin binding over liboscar: the same objects and calls as in oscar/oscar.h, which is the reference for what they do;
nothing is compiled at install. liboscar.so is found by OSCAR_LIBRARY, beside Python's prefix, or by the system's
loader.

    with Client() as client:
        model = Model(client, Geometry(layers=2, query_heads=8, kv_heads=2, head_dim=64),
                      weights_digest=..., rope_digest=...)
        seq = Sequence(model, prompt)                  # seq.info().hit_tokens of them need no computing
        seq.reserve(count)
        seq.store(layer, first, k, v)                  # each layer
        model.attend(layer, [Query(seq, q, out, tokens=first + count)])
        seq.advance(prompt[first:])                    # once all layers are stored

Tensors are numpy arrays or torch tensors (on a GPU: torch CUDA tensors), taken by address and strides, never copied:
see `oscar_kv.tensors`. On the GPU, `client.torch_stream()` is torch's current stream. Errors are exceptions (OscarError
and its kinds) with code, cause and remedy. `oscar_kv.transformers` puts the cache under an unmodified
`model.generate()`.
"""

from ._library import version
from .client import Client, ClientInfo, Stream
from .errors import (
    ConnectionLostError,
    DeadlineError,
    ErrorCode,
    InvalidError,
    NoSpaceError,
    NotFiniteError,
    OscarError,
    StateError,
)
from .model import (
    MAX_SEQUENCE_TOKENS,
    PAGE_TOKENS,
    RECENT_TOKENS,
    SINK_TOKENS,
    Geometry,
    Lease,
    Model,
    ModelInfo,
    Probe,
    Query,
)
from .sequence import Batch, BatchEntry, Sequence, SequenceInfo
from .tensors import bf16_bits, bf16_values

__all__ = [
    "MAX_SEQUENCE_TOKENS",
    "PAGE_TOKENS",
    "RECENT_TOKENS",
    "SINK_TOKENS",
    "Batch",
    "BatchEntry",
    "Client",
    "ClientInfo",
    "ConnectionLostError",
    "DeadlineError",
    "ErrorCode",
    "Geometry",
    "InvalidError",
    "Lease",
    "Model",
    "ModelInfo",
    "NoSpaceError",
    "NotFiniteError",
    "OscarError",
    "Probe",
    "Query",
    "Sequence",
    "SequenceInfo",
    "StateError",
    "Stream",
    "bf16_bits",
    "bf16_values",
    "version",
]
