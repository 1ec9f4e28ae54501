# SPDX-License-Identifier: Apache-2.0
"""The attention function "oscar": keys that an OscarCache holds are attended in the daemon's pages, others by SDPA."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "oscar"

# Arguments by which models ask for more than causal attention; each must be absent.
_UNKNOWN = ("sliding_window", "softcap", "s_aux", "position_bias")


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers calls it: query [batch, query heads, rows, dim]; returns [batch, rows, query heads, dim]."""
    cache = getattr(key, "oscar_cache", None)
    if cache is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options
        )
    for name in _UNKNOWN:
        if options.get(name) is not None:
            raise ValueError(f"attention with {name} cannot be done in the daemon's pages")
    if dropout or query.requires_grad:
        raise ValueError("the cache is for inference: call the model in eval mode, under torch.no_grad()")
    return cache.attend(module.layer_idx, query, scaling or 0.0), None


def register() -> None:
    """Makes "oscar" known to transformers."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
