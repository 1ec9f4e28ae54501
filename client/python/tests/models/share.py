#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What sharing a prefix gives, and what it changes, with a real model in several processes. Prints JSON lines.

    share.py MODEL [--gguf FILE] --text FILE [--tokens 2048] [--new 200] [--calibration FILE]

Workers, each a process of its own, complete the first tokens of the text greedily: `own` with the model's own cache;
`first` through a daemon that has nothing yet; `joins` through the same one, over the packed prefix; `tail` twice, with
a dense tail; and `private`, alone with a daemon of its own, the same way. OSCARD names the daemon, OSCAR_LIBRARY the
library. Packing is given the time to finish after each token, so that runs repeat.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(PACKAGE), str(PACKAGE / "tests")]


class Watch:
    """A streamer: notes when the first new token comes, and lets packing finish between tokens, so that runs repeat."""

    def __init__(self, start, cache):
        self.start = start
        self.cache = cache
        self.puts = 0
        self.first_token_s = None

    def put(self, _value):
        self.puts += 1
        if self.puts == 2:  # the first is the prompt
            self.first_token_s = time.perf_counter() - self.start
        if self.puts >= 2 and self.cache is not None:
            self.cache.settle()

    def end(self):
        pass


def complete(model, ids, new, open_cache):
    """Greedy completion: tokens, how far the two best logits were apart, and the time to the first token."""
    start = time.perf_counter()
    cache = open_cache(ids) if open_cache else None
    watch = Watch(start, cache)
    output = model.generate(
        ids,
        cache=cache,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        streamer=watch,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = [logits[0].topk(2).values for logits in output.logits]
    found = {
        "hit": cache.hit_tokens[0] if cache else 0,
        "first_token_s": watch.first_token_s,
        "tokens": output.sequences[0, ids.shape[1] :].tolist(),
        "margins": [float(two[0] - two[1]) for two in best],
    }
    if cache is not None:
        cache.settle()
        cache.close()
    return found


def work(options):
    """One worker: what it did, as JSON."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from oscar_kv.transformers import Worker

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(options.model, gguf_file=options.gguf, dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model, gguf_file=options.gguf)
    text = Path(options.text).read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : options.tokens]
    with torch.no_grad():
        complete(model, ids[:, :16], 2, None)  # torch's first calls are slow
        if options.worker == "own":
            print(json.dumps(complete(model, ids, options.new, None)))
            return
        calibration = Path(options.calibration).name if options.calibration else None
        with Worker(model, calibration=calibration) as worker:
            if options.worker == "private":
                complete(model, ids, 1, worker.cache)
            tail = options.worker in ("tail", "private")
            print(json.dumps(complete(model, ids, options.new, lambda given: worker.cache(given, dense_tail=tail))))


def run(options, worker, socket=""):
    """Another process as `worker`; returns what it did."""
    arguments = [options.model, "--text", options.text, "--tokens", str(options.tokens), "--new", str(options.new)]
    for name in ("gguf", "calibration"):
        if getattr(options, name):
            arguments += [f"--{name}", getattr(options, name)]
    done = subprocess.run(
        [sys.executable, __file__, *arguments, "--worker", worker],
        env={**os.environ, "OSCAR_SOCKET": socket},
        stdout=subprocess.PIPE,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"{worker}: {found['hit']} cached, first token after {found['first_token_s']:.3f} s", file=sys.stderr)
    return found


def first_difference(found, expected):
    """Where two completions part, and how far the two best logits were apart there; None where they do not."""
    for index, (one, other) in enumerate(zip(found["tokens"], expected["tokens"], strict=True)):
        if one != other:
            return {"token": index, "margin": round(expected["margins"][index], 4)}
    return None


def measure(options):
    """All workers, one after another."""
    from daemon import Daemon

    folder = str(Path(options.calibration).resolve().parent) if options.calibration else None
    own = run(options, "own")
    with Daemon("2G", calibrations=folder) as daemon:
        first = run(options, "first", daemon.socket)
        joins = run(options, "joins", daemon.socket)
        tails = [run(options, "tail", daemon.socket) for _ in range(2)]
    with Daemon("2G", calibrations=folder) as daemon:
        private = run(options, "private", daemon.socket)
    computed = min(own["first_token_s"], first["first_token_s"])
    print(
        json.dumps(
            {
                "prompt_tokens": options.tokens,
                "hit_tokens": joins["hit"],
                "own_first_token_s": round(own["first_token_s"], 3),
                "computed_first_token_s": round(first["first_token_s"], 3),
                "joined_first_token_s": round(joins["first_token_s"], 3),
                "dense_tail_first_token_s": round(min(tail["first_token_s"] for tail in tails), 3),
                "times_shorter": round(computed / joins["first_token_s"], 2),
            }
        )
    )
    for name, found, expected in (
        ("dense tail, two workers", tails[0], tails[1]),
        ("dense tail, private run", tails[0], private),
        ("dense tail, own cache", tails[0], own),
        ("packed tail, own cache", joins, own),
        ("first, own cache", first, own),
    ):
        print(json.dumps({"compared": name, "new_tokens": options.new, "part_at": first_difference(found, expected)}))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL", help="a folder that transformers can load")
    parser.add_argument("--gguf", metavar="FILE", help="name of a GGUF file in it")
    parser.add_argument("--text", metavar="FILE", required=True, help="its first tokens are the prompt")
    parser.add_argument("--tokens", type=int, default=2048, metavar="N", help="of the prompt (default: %(default)s)")
    parser.add_argument("--new", type=int, default=200, metavar="N", help="new tokens (default: %(default)s)")
    parser.add_argument("--calibration", metavar="FILE", help="of the model (default: Hadamard)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    given = parse_arguments()
    work(given) if given.worker else measure(given)
