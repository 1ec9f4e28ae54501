# SPDX-License-Identifier: Apache-2.0
"""Perplexity, KL against BF16 and next-token agreement, token by token, so that one run gives every shorter context."""

from dataclasses import dataclass

import torch

FIRST_TOKEN = 512  # the first that counts: before it little or nothing is packed
_BLOCK = 256  # rows whose probabilities are compared at a time


@dataclass(frozen=True)
class Scores:
    """One value a token, from FIRST_TOKEN on: tokens whose next one is known."""

    loss: torch.Tensor  # -log p(next token), nats
    kl: torch.Tensor  # KL(BF16 || method), nats
    same: torch.Tensor  # 1 where the likeliest next token is BF16's


def reference_probabilities(model, hidden, tokens):
    """Log probabilities of BF16 of the tokens that count, against which all methods are compared."""
    return torch.cat([model.log_probabilities(block) for block in hidden[FIRST_TOKEN : tokens - 1].split(_BLOCK)])


def compare(model, hidden, reference, ids):
    """Scores of a method's `hidden` rows against `reference`, log probabilities of the tokens that count."""
    targets = ids[FIRST_TOKEN + 1 :]
    parts = []
    for rows, expected, target in zip(*(x.split(_BLOCK) for x in (hidden[FIRST_TOKEN:-1], reference, targets))):
        found = model.log_probabilities(rows)
        loss = -found.gather(1, target[:, None])[:, 0]
        kl = (expected.exp() * (expected - found)).sum(1)
        same = (expected.argmax(1) == found.argmax(1)).float()
        parts.append(torch.stack((loss, kl, same)))
    return Scores(*torch.cat(parts, dim=1).double())


def summary(scores, context):
    """Perplexity, KL and agreement over all documents' tokens below `context`."""
    count = context - 1 - FIRST_TOKEN
    loss, kl, same = (
        torch.cat([getattr(score, name)[:count] for score in scores]).mean().item() for name in ("loss", "kl", "same")
    )
    return {"ppl": float(torch.tensor(loss, dtype=torch.float64).exp()), "kl": kl, "agree": same}
