# SPDX-License-Identifier: Apache-2.0
"""Runs a method through oscard: the model's K and V lie in the daemon's pages, and attention reads them there.

The text is given page by page, as decoding would: before each page the daemon has packed what it may
(`OscarCache.settle`), so that a query reads as INT2 exactly what attention.Held says. For `bf16` it is given at once,
with rotations that turn nothing: nothing is packed before it is committed.
"""

import json
import subprocess
import time
from pathlib import Path

import torch
from oscar_kv.model import PAGE_TOKENS
from oscar_kv.transformers import Worker

from oscard import Daemon

_SETTLE_S = 60


class ThroughDaemon:
    """As quality.Reference, through a daemon, which holds nothing but the text of one run."""

    def __init__(self, model, calibrations, programs):
        self._model, self._calibrations, self._programs = model, calibrations, programs

    @torch.no_grad()
    def run(self, method, ids, contexts):
        path = self._calibrations.path("naive" if method == "bf16" else method)
        with (
            Daemon(self._programs.oscard, path.parent) as daemon,
            Worker(self._model.model, socket=daemon.socket, calibration=path.name) as worker,
            worker.cache(ids[None]) as cache,
        ):
            held = Held(self._programs.oscarctl, daemon, cache)
            if method == "bf16":
                cache.commit = cache.abandon
                hidden = self._step(cache, ids)
                return hidden, [held.bits(len(ids))] * len(contexts)
            hidden, bits = [], []
            for chunk in ids.split(PAGE_TOKENS):
                hidden.append(self._step(cache, chunk))
                cache.settle()
                committed = cache.get_seq_length()
                if committed in contexts:
                    bits.append(held.bits(committed))
            return torch.cat(hidden), bits

    def _step(self, cache, ids):
        return self._model.model.base_model(input_ids=ids[None], cache=cache).last_hidden_state[0]


class Held:
    """What the daemon holds for a cache, the only one that it has."""

    def __init__(self, oscarctl, daemon, cache):
        self._command = (oscarctl, "--runtime-dir", Path(daemon.socket).parent, "--json", "stats")
        self._cache, self._sizes = cache, cache.worker.model.info()

    def bits(self, tokens):
        """An element of K and V of the first `tokens`, from the bytes in use: of these tokens' pages, and no others."""
        (info,) = self._cache.info()
        pages, packed = tokens // PAGE_TOKENS, info.packed_tokens // PAGE_TOKENS
        expected = packed * self._sizes.packed_page_bytes + (pages - packed) * self._sizes.dense_page_bytes
        deadline = time.monotonic() + _SETTLE_S
        while (held := self._used_bytes()) != expected:  # the daemon frees what it has packed a little later
            if time.monotonic() > deadline:
                raise SystemExit(f"quality: oscard holds {held} bytes for {tokens} tokens, not {expected}")
        return held * 16 / (pages * self._sizes.dense_page_bytes)

    def _used_bytes(self):
        said = subprocess.run(self._command, stdout=subprocess.PIPE, check=True).stdout
        return json.loads(said)["oscar_memory_used_bytes"]
