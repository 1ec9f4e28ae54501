# SPDX-License-Identifier: Apache-2.0
"""The methods under comparison, and the calibration file of each: made by oscar-calib from one capture, once."""

import shutil
import subprocess
from pathlib import Path

from safetensors.torch import save_file

import attention
import calibration
from results import digest

_PUBLISHED = ("--rotation", "matrix", "--no-centre", "--rounding", "nearest", "--clip", ".96,.92")

# method: the arguments of `oscar-calib fit`; None: a calibration that needs no capture
FITS = {
    "naive": None,
    "hadamard": None,
    "oscar-layer": (*_PUBLISHED, "--per", "layer"),
    "oscar-head": _PUBLISHED,
    "ours": (),
}
NAMES = ("bf16", *FITS, "ours-no-windows")


class Calibrations:
    """Calibration files of one model in a folder; a file is made when it is first asked for, and then kept."""

    def __init__(self, model, folder, program, text, tokens, progress):
        self._model, self._folder, self._program, self._progress = model, Path(folder), program, progress
        self._ids = model.ids(text)[:tokens]
        self._folder.mkdir(parents=True, exist_ok=True)
        self._key = digest(model.digest(), self._ids.numpy().tobytes())
        self._program_digest = digest(Path(shutil.which(program) or program))

    def path(self, method):
        """The calibration file of the method."""
        arguments = FITS["ours" if method == "ours-no-windows" else method]
        if arguments is None:
            return self._without_capture(method)
        path = self._folder / f"fit-{digest(self._key, self._program_digest, arguments)}.safetensors"
        if not path.exists():
            capture = self._capture()
            self._progress(f"fitting {method}")
            self._run("fit", *arguments, "--output", path, capture)
        return path

    def _without_capture(self, method):
        model = self._model
        key = digest(self._program_digest, model.name, model.layers, model.kv_heads, model.head_dim)
        path = self._folder / f"{method}-{key}.safetensors"
        if path.exists():
            return path
        if method == "naive":
            calibration.write_naive(path, model.name, model.layers, model.kv_heads, model.head_dim)
        else:
            shape = ("--layers", model.layers, "--kv-heads", model.kv_heads, "--head-dim", model.head_dim)
            self._run("hadamard", *shape, "--model", model.name, "--output", path)
        return path

    def _capture(self):
        path = self._folder / f"capture-{self._key}.safetensors"
        if path.exists():
            return path
        self._progress(f"capturing Q, K and V of {len(self._ids)} tokens")
        capture = attention.Capture()
        attention.install(self._model.model, capture)
        self._model.hidden(self._ids)
        frequencies = self._model.rope_frequencies()
        metadata = {"model": self._model.name, "first_position": "0", "model_layers": str(self._model.layers)}
        if frequencies is None:
            metadata["rope_pairs"] = "none"
        else:
            metadata |= {"rope_pairs": "halves", "rope_dims": str(2 * len(frequencies))}
            capture.tensors["rope.omega"] = frequencies
        metadata["softmax_scale"] = repr(capture.scale)
        part = path.with_suffix(".part")
        save_file(capture.tensors, part, metadata)
        part.rename(path)
        return path

    def _run(self, *arguments):
        status = subprocess.run([self._program, *map(str, arguments)]).returncode
        if status != 0:
            raise SystemExit(f"quality: oscar-calib {arguments[0]} failed ({status})")
