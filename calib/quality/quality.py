#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a packed K/V cache costs a model on held-out text: perplexity, KL against BF16 and next-token agreement."""

import argparse
import functools
import json
import os
import shutil
import sys
import time
from pathlib import Path

import torch

import attention
import evaluation
from calibration import Calibration
from methods import NAMES, Calibrations
from model import LanguageModel, default_path
from oscard import Daemon
from results import Results
from windows import NONE, OSCAR, PAGE_TOKENS

HERE = Path(__file__).resolve().parent
CALIBRATION_TEXT = HERE / "texts/python-topics.txt"
EVALUATION_TEXTS = (HERE.parents[1] / "tests/data/smollm2-135m/text.txt", HERE / "texts/perlrequick.txt")
CALIBRATION_TOKENS = 8192
CONTEXTS = "1024,2048,4096"
QUICK_CALIBRATION_TOKENS = 2048
REFERENCE_ONLY = ("ours-no-windows",)  # no daemon packs the sink, or what an open sequence has in its recent window

_start = time.monotonic()


def progress(message):
    print(f"quality: {time.monotonic() - _start:5.0f} s  {message}", file=sys.stderr, flush=True)


class Reference:
    """Runs a method in the float model: attention.Held, or BF16."""

    def __init__(self, model, calibrations):
        self._model, self._calibrations = model, calibrations

    def run(self, method, ids, contexts):
        """The hidden rows of the text, and bits an element at each context."""
        if method == "bf16":
            attention.install(self._model.model, attention.bf16)
            return self._model.hidden(ids), [16.0] * len(contexts)
        windows = NONE if method == "ours-no-windows" else OSCAR
        held = attention.Held(Calibration(self._calibrations.path(method)), windows)
        attention.install(self._model.model, held)
        hidden = self._model.hidden(ids)

        def bits(context):
            first, end = windows.packed(context)
            packed = end - first
            dense_row_bytes = 2 * 2 * self._model.head_dim
            held_bytes = packed * held.packed_row_bytes + (context - packed) * dense_row_bytes
            return held_bytes * 8 / (context * 2 * self._model.head_dim)

        return hidden, [bits(context) for context in contexts]


def paths(options, model, calibrations):
    """What runs a method; what no daemon does is left to the float model."""
    reference = Reference(model, calibrations)
    if options.via == "reference":
        return lambda _method: reference
    from daemon import ThroughDaemon

    daemon = ThroughDaemon(model, calibrations, options)
    return lambda method: reference if method in REFERENCE_ONLY else daemon


def kept_results(options, model):
    """Results of earlier runs of these programs on this model, by this path."""
    programs = [options.oscard, os.environ.get("OSCAR_LIBRARY")] if options.via == "daemon" else []
    found = [Path(shutil.which(program) or program) for program in programs if program]
    binding = HERE.parents[1] / "client/python/oscar_kv"
    sources = [HERE / "requirements.txt", *sorted(HERE.glob("*.py")), *sorted(binding.rglob("*.py"))]
    return Results(options.work, options.via, model.digest(), *found, *sources)


def study(options, model, calibrations, documents):
    """JSON lines of agree.py or join.py."""
    import agree
    import join

    measure_it = agree.measure if options.agree else join.measure
    methods = [method for method in options.methods if method not in ("bf16", *REFERENCE_ONLY)]
    with Daemon(options.oscard, options.work) as daemon:
        for row in measure_it(model, calibrations, daemon, methods, documents, progress):
            print(json.dumps(row), flush=True)


def measure(model, calibrations, path, results, methods, documents, contexts):
    """A row {method, context, ppl, kl, agree, bits} for each method and context."""
    scores = {method: [] for method in methods}
    bits = {}
    for number, ids in enumerate(documents, 1):

        @functools.cache
        def bf16(ids=ids):
            """Hidden rows, bits, and the probabilities against which all are compared."""
            hidden, bits = path("bf16").run("bf16", ids, contexts)
            return hidden, bits, evaluation.reference_probabilities(model, hidden, len(ids))

        for method in methods:
            key = (method, ids.tolist(), contexts, *([] if method == "bf16" else [calibrations.path(method)]))
            found = results.find(*key)
            if found is None:
                hidden, held, expected = bf16()
                if method != "bf16":
                    hidden, held = path(method).run(method, ids, contexts)
                found = {**vars(evaluation.compare(model, hidden, expected, ids)), "bits": held}
                results.keep(found, *key)
            bits[method] = [float(held) for held in found.pop("bits")]
            scores[method].append(evaluation.Scores(**{name: torch.as_tensor(found[name]) for name in found}))
            told = evaluation.summary(scores[method][-1:], len(ids))
            progress(
                f"document {number} of {len(documents)}, {method}: perplexity {told['ppl']:.2f}, KL {told['kl']:.4f}"
            )
    for method in methods:
        for context, held in zip(contexts, bits[method]):
            yield {"method": method, "context": context, **evaluation.summary(scores[method], context), "bits": held}


def print_table(rows):
    print(f"{'method':<16} {'context':>7} {'perplexity':>10} {'KL':>8} {'same next token':>15} {'bits':>6}")
    for row in rows:
        print(
            f"{row['method']:<16} {row['context']:>7} {row['ppl']:>10.2f} {row['kl']:>8.4f} {row['agree']:>15.1%} "
            f"{row['bits']:>6.2f}"
        )


def parse_arguments():
    parser = argparse.ArgumentParser(prog="./dev quality", description=__doc__)
    parser.add_argument("--model", metavar="PATH", help="folder or GGUF file that transformers can load (SmolLM2-135M)")
    parser.add_argument("--quick", action="store_true", help="one document, one context, a short calibration")
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument(
        "--via", choices=("daemon", "reference"), default="daemon", help="where K and V lie (%(default)s)"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--agree", action="store_true", help="instead: do both paths agree on equal K and V?")
    instead.add_argument("--join", action="store_true", help="instead: KL by distance from where a prefix is joined")
    parser.add_argument("--methods", metavar="LIST", default=",".join(NAMES), help="with commas between (all)")
    parser.add_argument("--contexts", metavar="LIST", default=CONTEXTS, help="in tokens (%(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), metavar="N", help="(%(default)s)")
    parser.add_argument("--oscar-calib", metavar="PROGRAM", default="oscar-calib", help="(%(default)s)")
    parser.add_argument("--oscard", metavar="PROGRAM", default="oscard", help="(%(default)s)")
    parser.add_argument("--oscarctl", metavar="PROGRAM", default="oscarctl", help="(%(default)s)")
    parser.add_argument(
        "--work", metavar="FOLDER", default="build/quality", help="for calibrations and results (%(default)s)"
    )
    options = parser.parse_args()
    options.methods = options.methods.split(",")
    for method in options.methods:
        if method not in NAMES:
            parser.error(f"no method {method!r}: {', '.join(NAMES)}")
    options.contexts = sorted(int(context) for context in options.contexts.split(","))
    if options.contexts[0] < evaluation.FIRST_TOKEN + 2:
        parser.error(f"a context has at least {evaluation.FIRST_TOKEN + 2} tokens")
    if any(context % PAGE_TOKENS for context in options.contexts):
        parser.error(f"a context is whole pages of {PAGE_TOKENS} tokens")
    return options


def main():
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    contexts = options.contexts[:1] if options.quick else options.contexts
    texts = EVALUATION_TEXTS[:1] if options.quick else EVALUATION_TEXTS
    model = LanguageModel(options.model or default_path())
    progress(f"{model.name}: {model.layers} layers, {model.kv_heads} KV heads of {model.head_dim}; {options.via} path")
    documents = [model.ids(text.read_text())[: contexts[-1]] for text in texts]
    shortest = min(map(len, documents))
    if shortest < contexts[-1]:
        contexts = [context for context in contexts if context <= shortest]
        if not contexts:
            raise SystemExit(f"quality: a document has only {shortest} tokens in this model")
        progress(f"a document has only {shortest} tokens in this model: contexts {contexts}")
        documents = [ids[: contexts[-1]] for ids in documents]
    calibrations = Calibrations(
        model,
        options.work,
        options.oscar_calib,
        CALIBRATION_TEXT.read_text(),
        QUICK_CALIBRATION_TOKENS if options.quick else CALIBRATION_TOKENS,
        progress,
    )
    if options.agree or options.join:
        study(options, model, calibrations, documents)
        return
    path, results = paths(options, model, calibrations), kept_results(options, model)
    rows = list(measure(model, calibrations, path, results, options.methods, documents, contexts))
    if options.json:
        for row in rows:
            print(json.dumps(row))
    else:
        print_table(rows)


if __name__ == "__main__":
    main()
