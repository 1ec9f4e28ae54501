# SPDX-License-Identifier: Apache-2.0
"""`./dev quality --join`: how quality fades with distance when a worker joins a prefix whose end is packed.

A worker computes a document alone, page by page, with a recent window of its own. Its K and V up to a join are then
stored once more as the prefix of a first worker that has gone on with other text, so that all of the prefix but the
sink is packed. A second worker opens that prefix and goes on with the document. Each join and mode has a namespace
of its own in the daemon, in which nobody has computed what the second worker computes.
"""

import time

import torch
from oscar_kv import Sequence
from oscar_kv.model import PAGE_TOKENS, RECENT_TOKENS, SINK_TOKENS
from oscar_kv.transformers import Worker

import attention

FIRST_JOIN = 1024  # tokens of the shortest prefix
DISTANCE = 384  # how many tokens are judged after a join, and how far joins lie apart
BIN = 32  # tokens whose mean is one row
ELSEWHERE = RECENT_TOKENS + PAGE_TOKENS  # how far the first worker goes on: the prefix has left its recent window
_PACKED_S = 60

MODES = {"joined": False, "joined-dense-tail": True}  # mode: dense_tail


class _StoredStates:
    """K and V of a cache as the model gives them, [kv heads, tokens, d] a layer, in the type that is stored."""

    def __init__(self, cache, layers):
        self._cache, self._store = cache, cache.store
        self._parts = [([], []) for _ in range(layers)]
        cache.store = self._keep_and_store

    def _keep_and_store(self, layer, keys, values):
        for parts, states in zip(self._parts[layer], (keys, values)):
            parts.append(self._cache.worker.cast(states)[0].clone())
        self._store(layer, keys, values)

    def layers(self):
        return [tuple(torch.cat(parts, dim=1) for parts in sides) for sides in self._parts]


def _continue(model, cache, ids):
    """Hidden rows of the tokens that the cache lacks, page by page, packed as the windows say."""
    first = cache.get_seq_length()
    hidden = []
    while first < len(ids):
        stop = min(first // PAGE_TOKENS * PAGE_TOKENS + PAGE_TOKENS, len(ids))
        output = model.model.base_model(input_ids=ids[None, first:stop], cache=cache)
        hidden.append(output.last_hidden_state[0])
        cache.settle()
        first = stop
    return torch.cat(hidden)


def _alone(model, daemon, calibration, ids):
    """Hidden rows of a worker that computes all itself, and its K and V."""
    with Worker(model.model, socket=daemon.socket, calibration=calibration, revision="alone") as worker:
        with worker.cache(ids[None]) as cache:
            if cache.hit_tokens != [0]:
                raise SystemExit("quality: the daemon knows this text already")
            states = _StoredStates(cache, model.layers)
            return _continue(model, cache, ids), states.layers()


def _leave_prefix(worker, ids, states, stop):
    """What a first worker leaves behind that went on with other text from position `stop` on: its prefix is packed."""
    positions = [*range(stop), *range(ELSEWHERE)]
    tokens = ids[:stop].tolist() + ids[stop : stop + ELSEWHERE].flip(0).tolist()
    with Sequence(worker.model, tokens) as sequence:
        sequence.reserve(len(tokens))
        for layer, sides in enumerate(states):
            sequence.store(layer, 0, *(side[:, positions].transpose(0, 1) for side in sides))
        sequence.advance(tokens)
        deadline = time.monotonic() + _PACKED_S
        while sequence.info().packed_tokens < stop - SINK_TOKENS:
            if time.monotonic() > deadline:
                raise SystemExit(f"quality: the prefix is not packed after {_PACKED_S} s")
            sequence.advance([])  # asks the daemon


def _joined(model, daemon, calibration, ids, states, stop, mode):
    """Hidden rows from position stop - 1 on of a worker that joins after `stop` tokens."""
    revision = f"{mode} at {stop}"
    with Worker(model.model, socket=daemon.socket, calibration=calibration, revision=revision) as worker:
        _leave_prefix(worker, ids, states, stop)
        with worker.cache(ids[None, :stop], dense_tail=MODES[mode]) as cache:
            expected = stop - RECENT_TOKENS if MODES[mode] else stop
            if cache.hit_tokens != [expected]:
                raise SystemExit(f"quality: {mode} at {stop}: {cache.hit_tokens[0]} tokens are found, not {expected}")
            return _continue(model, cache, ids[: stop - 1 + DISTANCE])[-DISTANCE:]


def _scores(model, found, expected):
    """KL from the predictions of `expected` to those of `found`, and 1 where their likeliest tokens are equal."""
    found, expected = (model.log_probabilities(rows) for rows in (found, expected))
    kl = (expected.exp() * (expected - found)).sum(1)
    return torch.stack((kl, (found.argmax(1) == expected.argmax(1)).float())).double()


def joins(tokens):
    """Where a document of so many tokens is joined: so many prefixes end there."""
    return range(FIRST_JOIN, tokens - DISTANCE + 1, DISTANCE)


@torch.no_grad()
def measure(model, calibrations, daemon, methods, documents, progress):
    """A row {method, mode, distance, tokens, kl, agree} for each method, mode and bin of BIN tokens.

    distance: of the bin's first token from the last token of the prefix, which is judged too and has the distance 0;
    tokens: whose mean is taken; kl to BF16; agree: same likeliest next token.
    """
    for method in methods:
        path = calibrations.path(method)
        scores = {mode: [] for mode in ("alone", *MODES)}
        for number, ids in enumerate(documents, 1):
            if not joins(len(ids)):
                raise SystemExit(f"quality: to be joined a document needs {FIRST_JOIN + DISTANCE} tokens")
            attention.install(model.model, attention.bf16)
            expected = model.hidden(ids)
            alone, states = _alone(model, daemon, path.name, ids)
            for stop in joins(len(ids)):
                judged = slice(stop - 1, stop - 1 + DISTANCE)
                scores["alone"].append(_scores(model, alone[judged], expected[judged]))
                for mode in MODES:
                    hidden = _joined(model, daemon, path.name, ids, states, stop, mode)
                    scores[mode].append(_scores(model, hidden, expected[judged]))
                first = ", ".join(f"{mode} {found[-1][0, :BIN].mean():.4f}" for mode, found in scores.items())
                progress(f"document {number} of {len(documents)}, {method}, joined at {stop}: first KL: {first}")
        for mode, found in scores.items():
            for first in range(0, DISTANCE, BIN):
                values = torch.stack(found)[:, :, first : first + BIN]
                kl, agree = values.mean(dim=(0, 2)).tolist()
                tokens = values.shape[0] * values.shape[2]
                yield {"method": method, "mode": mode, "distance": first, "tokens": tokens, "kl": kl, "agree": agree}
