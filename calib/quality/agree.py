# SPDX-License-Identifier: Apache-2.0
"""`./dev quality --agree`: do both paths agree on equal K and V?

Two whole runs differ however right they are: K and V are rounded to BF16 and to codes, and a change of a last bit,
carried through all layers, ends in other codes. So the text goes through the daemon first, and every row of K and V
is copied where `store` has written it; then the float model runs on those rows instead of its own. Queries, hidden
states and predictions are each path's own. The pages that the float model packs must be those of the daemon, to the
bit: they are looked for in the memory that it shares with its workers.
"""

import ctypes
import re
from pathlib import Path

import numpy as np
import torch
from oscar_kv.transformers import Worker

import attention
import evaluation
import page
from calibration import Calibration
from windows import OSCAR, PAGE_TOKENS

KL_LIMIT = 1e-4  # nats a token
ROWS_LIMIT = 2**-8  # one step of BF16, relative


class StoredRows:
    """The rows of K and V of a cache's sequence, [layers, side, heads, tokens, d], copied before they are committed."""

    def __init__(self, cache, tokens):
        shape = cache.worker.model.geometry
        self.rows = torch.empty(shape.layers, 2, shape.kv_heads, tokens, shape.head_dim)
        self._sequence, self._commit, self._done = cache.sequences[0], cache.commit, 0
        cache.commit = self._copy_and_commit

    def _copy_and_commit(self):
        layers, _, heads, tokens, d = self.rows.shape
        count = min(PAGE_TOKENS, tokens - self._done)
        for layer in range(layers):
            for head in range(heads):
                *addresses, _ = self._sequence.rows(layer, head, self._done)
                for side, address in enumerate(addresses):
                    bits = (ctypes.c_uint16 * (count * d)).from_address(address)
                    rows = torch.frombuffer(bits, dtype=torch.bfloat16).reshape(count, d)
                    self.rows[layer, side, head, self._done : self._done + count] = rows
        self._done += count
        self._commit()


class OnStoredRows(attention.Held):
    """attention.Held on rows that the daemon has stored; it keeps the pages that it packs."""

    def __init__(self, calibration, rows):
        super().__init__(calibration, OSCAR)
        self._rows = rows
        self._records = {}
        self._difference = 0.0

    def _stored(self, layer, key, value, rotation_k, rotation_v):
        own = torch.stack(tuple(super()._stored(layer, key, value, rotation_k, rotation_v)))
        self._difference += (own - self._rows[layer]).double().square().sum().item()
        return self._rows[layer]

    def _packed(self, layer, head, key, value):
        self._records[layer, head] = page.records(key, value)

    def difference(self):
        """Of the rows that this path would have stored, relative to those that it ran on: root of mean squares."""
        return (self._difference / self._rows.double().square().sum().item()) ** 0.5

    def pages(self):
        """The packed pages, as bytes."""
        records = np.concatenate([self._records[place] for place in sorted(self._records)], axis=1)
        return [whole.tobytes() for whole in records]


def _shared_memory():
    """The daemon's chunks of pages that this process has mapped."""
    chunks = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if match := re.match(r"(\w+)-(\w+) r.*/memfd:oscar-chunk", line):
            start, end = (int(address, 16) for address in match.groups())
            chunks.append(ctypes.string_at(start, end - start))
    return chunks


@torch.no_grad()
def _through_daemon(model, daemon, calibration, ids):
    """Hidden rows, stored rows, and the memory that holds the packed pages."""
    base = model.model.base_model
    hidden = []
    with Worker(model.model, socket=daemon.socket, calibration=calibration.name) as worker:
        with worker.cache(ids[None]) as cache:
            if cache.hit_tokens != [0]:
                raise SystemExit("quality: the daemon knows this text already: not all of its rows would be stored")
            stored = StoredRows(cache, len(ids))
            for chunk in ids.split(PAGE_TOKENS):
                hidden.append(base(input_ids=chunk[None], cache=cache).last_hidden_state[0])
                cache.settle()
            return torch.cat(hidden), stored.rows, _shared_memory()


def measure(model, calibrations, daemon, methods, documents, progress):
    """A row {method, context, kl, kl_max, agree, rows, pages} for each method; SystemExit where the paths do not agree.

    kl from the float model's predictions to the daemon's, a token; agree: same likeliest next token; rows: relative
    difference between the rows that each path would store; pages: how many packed pages are equal to the bit.
    """
    wrong = []
    for method in methods:
        path = calibrations.path(method)
        scores, rows, pages, missing = [], [], 0, 0
        for number, ids in enumerate(documents, 1):
            hidden, stored, memory = _through_daemon(model, daemon, path, ids)
            held = OnStoredRows(Calibration(path), stored)
            attention.install(model.model, held)
            expected = evaluation.reference_probabilities(model, model.hidden(ids), len(ids))
            scores.append(evaluation.compare(model, hidden, expected, ids))
            rows.append(held.difference())
            pages += len(held.pages())
            missing += sum(not any(packed in chunk for chunk in memory) for packed in held.pages())
            progress(f"document {number} of {len(documents)}, {method}: KL {scores[-1].kl.mean().item():.1e}")
        found = evaluation.summary(scores, min(map(len, documents)))
        row = {
            "method": method,
            "context": min(map(len, documents)),
            "kl": found["kl"],
            "kl_max": max(score.kl.max().item() for score in scores),
            "agree": found["agree"],
            "rows": max(rows),
            "pages": pages - missing,
        }
        yield row
        if missing:
            wrong.append(f"{method}: {missing} of {pages} packed pages differ")
        if not (row["kl"] <= KL_LIMIT and row["rows"] <= ROWS_LIMIT):
            wrong.append(f"{method}: KL {row['kl']:.1e}, rows {row['rows']:.1e}")
    if wrong:
        raise SystemExit("quality: the paths do not agree: " + "; ".join(wrong))
