# SPDX-License-Identifier: Apache-2.0
"""The Python binding on the backend that OSCAR_TEST_BACKEND names ("cuda" when it is unset), beside the host's: the
K and V of a real model (the committed capture) go from torch CUDA tensors, on a stream of torch's own, through a
daemon; most of them are packed; attention reads them back. What the GPU makes of them must be what the host makes of
them, and err as much.

On the host backend tensors are numpy's, which proves the program itself where there is no GPU. Exits with 77, as a
skipped program does, where there is no numpy, or no torch that sees a GPU. Needs oscar_kv and its tests in
PYTHONPATH, OSCARD and OSCAR_LIBRARY.
"""

import contextlib
import ctypes
import importlib.util
import json
import os
import sys
import time
import types
import unittest
from pathlib import Path

DATA = Path(__file__).resolve().parents[1] / "data/smollm2-135m"
CALIBRATION = "calibration-0-15-29.safetensors"
BACKEND = os.environ.get("OSCAR_TEST_BACKEND") or "cuda"
CHUNK = 256  # tokens that are stored at a time
QUERIES = (1, 20)  # query rows: one is decoded, twenty are prefilled

ROW_BOUND = 0.02  # how far outputs may lie apart, as a part of a row
MEAN_BOUND = 0.01  # how far mean errors may, as a part of them


def missing():
    """Why this cannot run here, or None."""
    if importlib.util.find_spec("numpy") is None:
        return "no numpy"
    if BACKEND == "host":
        return None
    if importlib.util.find_spec("torch") is None:
        return f"{sys.executable} has no torch"
    import torch

    return None if torch.cuda.is_available() else "torch sees no GPU"


if why := missing():
    print(f"skipped: {why}")
    sys.exit(77)

import numpy as np
from daemon import Daemon
from reference import attention

from oscar_kv import Client, Geometry, Model, Query, Sequence, Stream, bf16_values


def capture():
    """Layers as (q, k, v), BF16 bits [tokens, heads, dims]."""
    raw = (DATA / "capture.safetensors").read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])

    def rows(name):
        first, last = header[name]["data_offsets"]
        return np.frombuffer(raw[end + first : end + last], "<u2").reshape(header[name]["shape"])

    layers = sorted(int(name.split(".")[1]) for name in header if name.endswith(".q"))
    return [tuple(rows(f"layers.{layer}.{side}") for side in "qkv") for layer in layers]


class HostMemory:
    """Tensors of numpy, and a stream of the library's."""

    def __init__(self, client):
        self.stream = Stream(client, asynchronous=True)

    def tensor(self, bits):
        return bits

    def bits(self, tensor):
        return tensor

    def rows(self, address, shape):
        """Memory of the daemon."""
        return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint16)), shape).copy()

    def current(self):
        return contextlib.nullcontext()


class GpuMemory:
    """CUDA tensors of torch on the daemon's GPU, and a stream of torch's that is not its default one."""

    def __init__(self, client):
        import torch

        self._torch = torch
        uuids = [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(torch.cuda.device_count())]
        self._device = torch.device("cuda", uuids.index(client.gpu))
        self._own = torch.cuda.Stream(self._device)
        with self.current():
            self.stream = client.torch_stream()

    def tensor(self, bits):
        if bits.dtype == np.float32:
            return self._torch.from_numpy(bits).to(self._device)
        return self._torch.from_numpy(bits.astype(np.int16)).to(self._device).view(self._torch.bfloat16)

    def bits(self, tensor):
        if tensor.dtype == self._torch.float32:
            return tensor.cpu().numpy()
        return tensor.view(self._torch.int16).cpu().numpy().view(np.uint16)

    def rows(self, address, shape):
        interface = {"data": (address, False), "shape": shape, "typestr": "<i2", "strides": None, "version": 3}
        rows = types.SimpleNamespace(__cuda_array_interface__=interface)
        return self._torch.as_tensor(rows, device=self._device).cpu().numpy().view(np.uint16)

    def current(self):
        return self._torch.cuda.stream(self._own)


def packed(sequence, tokens):
    """Waits until these are."""
    deadline = time.monotonic() + 60
    while sequence.info().packed_tokens < tokens:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{sequence.info().packed_tokens} of {tokens} tokens are packed")
        sequence.advance([])  # asks the daemon


def replay(backend, layers):
    """Outputs [layer, queries] as values and log-sum-exps; and the last page's rows of K and V as they are stored."""
    tokens, kv_heads, dims = layers[0][1].shape
    shape = Geometry(layers=len(layers), query_heads=layers[0][0].shape[1], kv_heads=kv_heads, head_dim=dims)
    ids = list(range(tokens))
    outputs, stored = {}, []
    with Daemon(backend=backend, calibrations=str(DATA)) as daemon, Client(daemon.socket, timeout_ms=30000) as client:
        memory = HostMemory(client) if backend == "host" else GpuMemory(client)
        model = Model(client, shape, weights_digest=b"w" * 32, rope_digest=b"r" * 32, calibration=CALIBRATION)
        sequence = Sequence(model, [])
        sequence.reserve(tokens)
        with memory.current():
            for first in range(0, tokens, CHUNK):
                for layer, (_, k, v) in enumerate(layers):
                    k, v = (memory.tensor(side[first : first + CHUNK]) for side in (k, v))
                    sequence.store(layer, first, k, v, stream=memory.stream)
                if first + CHUNK == tokens:
                    memory.stream.wait()
                    for layer in range(len(layers)):
                        *sides, count = sequence.rows(layer, kv_heads - 1, tokens - 64)
                        stored.append([memory.rows(address, (count, dims)) for address in sides])
                sequence.advance(ids[first : first + CHUNK], stream=memory.stream)
            packed(sequence, tokens - 256 - 64)
            for layer, (q, _, _) in enumerate(layers):
                for rows in QUERIES:
                    out = memory.tensor(np.full((rows, *q.shape[1:]), 0x7FC0, np.uint16))
                    lse = memory.tensor(np.full((rows, q.shape[1]), np.nan, np.float32))
                    query = Query(sequence, memory.tensor(q[-rows:]), out, lse=lse)
                    model.attend(layer, [query], stream=memory.stream)
                    memory.stream.wait()
                    outputs[layer, rows] = bf16_values(memory.bits(out)), memory.bits(lse)
    return outputs, bf16_values(np.array(stored))


def relative(found, expected):
    """Of each row."""
    return np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)


class Replay(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.layers = capture()
        cls.host, cls.host_rows = replay("host", cls.layers)
        cls.found, cls.found_rows = replay(BACKEND, cls.layers)

    def test_stored_rows_are_the_hosts(self):
        largest = np.abs(self.host_rows).max(axis=-1, keepdims=True)  # sums may be rounded otherwise, and cancel out
        bound = np.abs(self.host_rows) * 2.0**-7 + largest * 2.0**-12
        self.assertTrue((np.abs(self.found_rows - self.host_rows) <= bound).all())

    def test_outputs_are_the_hosts(self):
        for place, (out, lse) in self.found.items():
            expected, expected_lse = self.host[place]
            with self.subTest(layer=place[0], rows=place[1]):
                self.assertLessEqual(relative(out, expected).max(), ROW_BOUND)
                np.testing.assert_allclose(lse, expected_lse, atol=ROW_BOUND, rtol=0)

    def test_errors_are_the_hosts(self):
        errors, expected = [], []
        for (layer, rows), (out, _) in self.found.items():
            q, k, v = (bf16_values(side).astype(np.float64) for side in self.layers[layer])
            exact, _ = attention(q[-rows:], k, v)
            errors.append(relative(out, exact).mean())
            expected.append(relative(self.host[layer, rows][0], exact).mean())
            print(f"layer {layer}, {rows} rows: mean error {errors[-1]:.5f}, the host's {expected[-1]:.5f}")
        self.assertGreater(min(expected), 0)
        self.assertLessEqual(abs(np.mean(errors) - np.mean(expected)), MEAN_BOUND * np.mean(expected))


if __name__ == "__main__":
    unittest.main()
