# SPDX-License-Identifier: Apache-2.0
"""Writing safetensors files: an 8-byte little-endian header length, a JSON header, the raw tensors."""

import json
import os
import struct
import tempfile
from pathlib import Path

import numpy as np

from errors import CaptureError

_LITTLE_ENDIAN = {"BF16": np.dtype("<u2"), "I64": np.dtype("<i8")}


def to_bf16(values):
    """Round float32 to BF16, to nearest with ties to even; the result holds the bits as uint16, same shape.

    NaN and infinities are refused: a capture that holds one is of no use to a calibration.
    """
    if not np.isfinite(values).all():
        raise CaptureError("the model produced a value that is not finite, so nothing was written")
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    lowest_kept_bit = (bits >> 16) & 1
    return ((bits + 0x7FFF + lowest_kept_bit) >> 16).astype(np.uint16)


def write(path, tensors, metadata):
    """Write `tensors`, a dict of name to (dtype, array), in its order, and `metadata`, a dict of str to str.

    dtype is "BF16" (array: uint16 bits) or "I64". The file appears under its name only when it is complete.
    """
    header, blobs, offset = {}, [], 0
    for name, (dtype, array) in tensors.items():
        blob = np.ascontiguousarray(array, dtype=_LITTLE_ENDIAN[dtype]).tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(blob)],
        }
        blobs.append(blob)
        offset += len(blob)
    header["__metadata__"] = metadata
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format asks for tensors that start on a multiple of 8

    path = Path(path)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            file.write(struct.pack("<Q", len(text)))
            file.write(text)
            file.writelines(blobs)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
