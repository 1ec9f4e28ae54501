# SPDX-License-Identifier: Apache-2.0
"""What names a model in the cache: workers share pages only where these are equal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from os import PathLike, stat

import torch
from transformers import PretrainedConfig, PreTrainedModel

from ..model import Geometry

# Frequencies that depend on the length of the sequence: a page's K then differs with what came after it.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}

Path = str | PathLike[str]


def weights_digest(model: PreTrainedModel, files: Path | Iterable[Path] | None = None) -> bytes:
    """32 bytes that name the weights and the type that they compute in.

    files  what the model was loaded from, for one that is too large to be hashed in memory: the bytes count, in the
           order given, not the names. Workers that are to share pages all do it in the same way.

    Without files all parameters in memory are hashed: about a second a gigabyte.
    """
    if files is None:
        return _digest_of_parameters(model)
    if isinstance(files, (str, PathLike)):
        files = [files]
    digest = hashlib.blake2b(digest_size=32, person=b"oscar files")
    digest.update(f"{model.dtype}\n".encode())
    for path in files:
        digest.update(f"{stat(path).st_size}\n".encode())
        with open(path, "rb") as file:
            while chunk := file.read(1 << 22):
                digest.update(chunk)
    return digest.digest()


def _digest_of_parameters(model: PreTrainedModel) -> bytes:
    digest = hashlib.blake2b(digest_size=32, person=b"oscar tensors")
    for name, tensor in sorted(model.base_model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.digest()


def text_config(model: PreTrainedModel) -> PretrainedConfig:
    """The configuration of the decoder."""
    return model.config.get_text_config(decoder=True)


def rope_digest(config: PretrainedConfig) -> bytes:
    """32 bytes that name how positions enter K. ValueError for RoPE that depends on the sequence's length."""
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    kind = parameters.get("rope_type", "default")
    if kind in _LENGTH_DEPENDENT_ROPE:
        raise ValueError(f"RoPE of type {kind!r} depends on the length of a sequence: its prefixes cannot be shared")
    named = {
        "parameters": parameters,
        "head_dim": head_dim(config),
        "partial_rotary_factor": getattr(config, "partial_rotary_factor", None),
        "max_position_embeddings": getattr(config, "max_position_embeddings", None),
    }
    text = json.dumps(named, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=32, person=b"oscar rope").digest()


def head_dim(config: PretrainedConfig) -> int:
    """Size of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def geometry(model: PreTrainedModel, dtype: torch.dtype | None) -> Geometry:
    """The shape of the model's K/V. ValueError where attention is not full causal attention in every layer."""
    config = text_config(model)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(
            f"layers of {', '.join(sorted(kinds))}: only models of full attention in every layer can be served"
        )
    if dtype is None:
        dtype = torch.float16 if model.dtype == torch.float32 else model.dtype
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"dtype {dtype}: K and V are given as torch.bfloat16 or torch.float16")
    return Geometry(
        layers=config.num_hidden_layers,
        query_heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim(config),
        dtype=str(dtype).removeprefix("torch."),
    )
