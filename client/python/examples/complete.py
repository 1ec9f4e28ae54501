#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Completes prompts with a transformers model whose K/V oscard keeps. Run it twice with one long prompt, in two
processes.

    complete.py MODEL --prompt-file manual.txt --prompt 'Question: ...' --tokens 50

A prompt is the text of the file, if there is one, and what follows; with several prompts they are completed one after
another and share the file's K/V. Printed are the text, how many tokens were cached, and the time to the first new
token.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from oscar_kv.transformers import Worker


class FirstToken(BaseStreamer):
    """Notes when the first new token is there: generate() puts the prompt, then each token."""

    def __init__(self):
        self.start = time.perf_counter()
        self.puts = 0
        self.seconds = 0.0

    def put(self, value):
        self.puts += 1
        if self.puts == 2:
            self.seconds = time.perf_counter() - self.start

    def end(self):
        pass


def complete(worker, model, tokenizer, prompt, options):
    """Text that follows the prompt; prints what it took."""
    first_token = FirstToken()
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    with worker.cache(inputs.input_ids, dense_tail=options.dense_tail, wait_ms=options.wait_ms) as cache:
        output = model.generate(
            **inputs, cache=cache, max_new_tokens=options.tokens, do_sample=False, streamer=first_token
        )
        count = inputs.input_ids.shape[1]
        print(
            f"{cache.hit_tokens[0]} of {count} tokens were cached, first token after {first_token.seconds:.2f} s",
            file=sys.stderr,
        )
    return tokenizer.decode(output[0, count:], skip_special_tokens=True)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL", help="a folder that transformers can load")
    parser.add_argument("--gguf", metavar="FILE", help="name of a GGUF file in it")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    parser.add_argument("--prompt-file", metavar="FILE", help="text that comes before each prompt")
    parser.add_argument("--tokens", type=int, default=50, metavar="N", help="new tokens (default: %(default)s)")
    parser.add_argument("--socket", metavar="PATH", help="of the daemon (default: OSCAR_SOCKET, or the usual places)")
    parser.add_argument("--calibration", metavar="NAME", help="a file in the daemon's folder (default: Hadamard)")
    parser.add_argument("--dense-tail", action="store_true", help="recompute the last 256 cached tokens in BF16")
    parser.add_argument(
        "--wait-ms", type=int, default=0, metavar="N", help="for another process that computes the same prefix"
    )
    return parser.parse_args()


def main():
    options = parse_arguments()
    model = AutoModelForCausalLM.from_pretrained(options.model, gguf_file=options.gguf, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(options.model, gguf_file=options.gguf)
    before = Path(options.prompt_file).read_text(encoding="utf-8") if options.prompt_file else ""
    with Worker(model, socket=options.socket, calibration=options.calibration) as worker, torch.no_grad():
        for prompt in options.prompt or [""]:
            print(complete(worker, model, tokenizer, before + prompt, options), flush=True)


if __name__ == "__main__":
    main()
