# SPDX-License-Identifier: Apache-2.0
"""A calibration file (proto/CALIBRATION.md) as numpy arrays a head, and the files that need no capture."""

from dataclasses import dataclass
from typing import Optional

import numpy as np

import tensor_file


@dataclass(frozen=True)
class Head:
    """What the codec needs for one KV head of one layer."""

    rotation_k: np.ndarray  # [d, d]: x' = x R
    rotation_v: np.ndarray
    rank_k: int
    rank_v: int
    centre_static: Optional[np.ndarray]  # [d]
    centre_cos: np.ndarray  # [pairs, d]
    centre_sin: np.ndarray
    omega: np.ndarray  # [pairs] frequencies of the pairs
    feedback: Optional[np.ndarray]  # [d, d]


def hadamard(d):
    """The normalised Sylvester Hadamard matrix [d, d], float32."""
    matrix = np.ones((1, 1))
    while len(matrix) < d:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix / np.sqrt(d)).astype(np.float32)


class Calibration:
    """The heads of a calibration file."""

    def __init__(self, path):
        self._tensors, self._metadata = tensor_file.read(path)
        self._d = int(self._metadata["oscar.head_dim"])

    def head(self, layer, kv_head):
        """The Head of one layer and KV head."""

        def part(name):
            values = self._tensors.get(f"layers.{layer}.{name}")
            return None if values is None else values[0 if len(values) == 1 else kv_head]

        def rotation(side):
            if self._metadata[f"oscar.rotation_{side}"] == "hadamard":
                return hadamard(self._d)
            return part(f"{side}.rotation")

        pairs = part("k.centre.pair")
        none = np.empty((0, self._d), np.float32)
        return Head(
            rotation_k=rotation("k"),
            rotation_v=rotation("v"),
            rank_k=int(part("k.rank")),
            rank_v=int(part("v.rank")),
            centre_static=part("k.centre.static"),
            centre_cos=none if pairs is None else part("k.centre.cos"),
            centre_sin=none if pairs is None else part("k.centre.sin"),
            omega=np.empty(0) if pairs is None else self._tensors["rope.omega"][pairs],
            feedback=part("k.feedback"),
        )


def write_naive(path, model, layers, kv_heads, d):
    """Writes a file with rotations that turn nothing, no clipping, no centre and nearest rounding: plain INT2."""
    from safetensors.numpy import save_file

    tensors = {}
    for layer in range(layers):
        for side in "kv":
            tensors[f"layers.{layer}.{side}.rotation"] = np.eye(d, dtype=np.float32)[None]
            tensors[f"layers.{layer}.{side}.rank"] = np.full(kv_heads, d - 1, np.int32)
    metadata = {
        "oscar.format": "1",
        "oscar.model": model,
        "oscar.method": "no rotation, no clipping, nearest rounding",
        "oscar.layers": str(layers),
        "oscar.kv_heads": str(kv_heads),
        "oscar.head_dim": str(d),
        "oscar.rotation_k": "matrix",
        "oscar.rotation_v": "matrix",
    }
    save_file(tensors, path, metadata)
