# SPDX-License-Identifier: Apache-2.0
"""What has been measured, kept in a folder: a table that was interrupted goes on where it ended.

A result is looked up by all that it follows from, the programs and this program's own text among it.
"""

import hashlib
from pathlib import Path

import numpy as np


def digest(*parts):
    """A short name for bytes, contents of files (Path), and whatever else as Python writes it."""
    whole = hashlib.sha256()
    for part in parts:
        raw = part if isinstance(part, bytes) else part.read_bytes() if isinstance(part, Path) else repr(part).encode()
        whole.update(hashlib.sha256(raw).digest())
    return whole.hexdigest()[:16]


class Results:
    """Arrays by name, one file for each key; `common` is what all keys of this run have in common."""

    def __init__(self, folder, *common):
        self._folder, self._common = Path(folder), digest(*common)

    def _path(self, key):
        return self._folder / f"result-{digest(self._common, *key)}.npz"

    def find(self, *key):
        """What was kept, or None."""
        path = self._path(key)
        if not path.exists():
            return None
        with np.load(path) as arrays:
            return dict(arrays)

    def keep(self, arrays, *key):
        path = self._path(key)
        part = path.with_suffix(".part")
        with open(part, "wb") as file:
            np.savez(file, **arrays)
        part.rename(path)
