# SPDX-License-Identifier: Apache-2.0
"""Runs a method through oscard: the model's K and V lie in the daemon's pages, and attention reads them there.

The text is given page by page, as decoding would: before each page the daemon has packed what it may
(`OscarCache.settle`), so that a query reads as INT2 exactly what attention.Held says.
"""

import os
import socket
import subprocess
import tempfile
from pathlib import Path

import torch
from oscar_kv.model import PAGE_TOKENS
from oscar_kv.transformers import Worker

_READY_S = 60
_BUDGET = "2G"


class Daemon:
    """An oscard of the host backend in a folder of its own, from `with` to its end."""

    def __init__(self, program, calibrations):
        self._program, self._calibrations = program, Path(calibrations).resolve()

    def __enter__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="oscar-quality-")
        folder = Path(self._folder.name)
        self.socket = str(folder / "worker.sock")
        arguments = ("--runtime-dir", folder, "--backend", "host", "--budget", _BUDGET)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.bind(str(folder / "notify"))
            notify.settimeout(_READY_S)
            with open(folder / "log", "wb") as log:
                self._process = subprocess.Popen(
                    [self._program, *map(str, arguments), "--calibration-directory", self._calibrations],
                    env={**os.environ, "NOTIFY_SOCKET": str(folder / "notify")},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            try:
                while b"READY=1" not in notify.recv(4096):
                    pass
            except OSError:
                said = (folder / "log").read_text(errors="replace")
                self.__exit__()
                raise SystemExit(f"quality: oscard does not become ready\n{said}") from None
        return self

    def __exit__(self, *_error):
        self._process.terminate()
        self._process.wait()
        self._folder.cleanup()


class ThroughDaemon:
    """As quality.Reference, through a daemon."""

    def __init__(self, model, calibrations, daemon):
        self._model, self._calibrations, self._daemon = model, calibrations, daemon

    @torch.no_grad()
    def run(self, method, ids):
        path = self._calibrations.path(method)
        base = self._model.model.base_model
        hidden, bits = [], {}
        with Worker(self._model.model, socket=self._daemon.socket, calibration=path.name) as worker:
            sizes = worker.model.info()
            with worker.cache(ids[None]) as cache:
                if cache.hit_tokens != [0]:
                    raise SystemExit("quality: the daemon knows this text already: its pages are packed too early")
                for chunk in ids.split(PAGE_TOKENS):
                    output = base(input_ids=chunk[None], cache=cache)
                    hidden.append(output.last_hidden_state[0])
                    cache.settle()
                    (info,) = cache.info()
                    bits[info.committed_tokens] = _bits(info, sizes)
        return torch.cat(hidden), bits.__getitem__


def _bits(info, sizes):
    """An element, from the bytes of the sequence's pages in their forms."""
    pages = info.committed_tokens // PAGE_TOKENS
    packed = info.packed_tokens // PAGE_TOKENS
    held = packed * sizes.packed_page_bytes + (pages - packed) * sizes.dense_page_bytes
    return held * 16 / (pages * sizes.dense_page_bytes)
