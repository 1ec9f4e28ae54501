# SPDX-License-Identifier: Apache-2.0
"""Reading safetensors files with numpy alone. BF16 tensors come as float32."""

import json
import struct
from pathlib import Path

import numpy as np

_TYPES = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I32": "<i4", "I64": "<i8", "U8": "u1", "BF16": "<u2"}


def read(path):
    """The tensors by name, and the metadata."""
    raw = Path(path).read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        values = np.frombuffer(raw[8 + length + start : 8 + length + end], _TYPES[entry["dtype"]])
        if entry["dtype"] == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        tensors[name] = values.reshape(entry["shape"])
    return tensors, metadata
