#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What attention over a BF16 cache costs on this GPU by PyTorch, and by FlashInfer where it is installed: baselines of gpu_bench and
gpu_share.

usage: gpu_baselines.py [BATCHxCONTEXTxQUERY_HEADSxKV_HEADSxHEAD_DIM ...]
       gpu_baselines.py --decode LAYERS BATCHxCONTEXTxQUERY_HEADSxKV_HEADSxHEAD_DIM

Without --decode: one JSON object a line, {"name", "value", "unit", "by"}. A value is the median time of one call in a captured
graph, each replay over another copy of the cache, so that no replay finds it in the L2 cache. Of all kernels and layouts that
PyTorch offers the fastest counts, and "by" names it.

With --decode: a process that decodes over a cache of its own, steered by lines. "prepare [KERNEL LAYOUT GROUP]" makes the cache and
answers "ready KERNEL LAYOUT GROUP"; without a choice the fastest is looked for first. "run SECONDS" decodes token after token, one
graph of all layers each, and answers "steps COUNT SECONDS".
"""
import itertools
import json
import statistics
import sys
import time
import warnings

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention
except ImportError as missing:
    sys.exit(f"gpu_baselines.py: {missing}")

CACHE_BYTES = 1 << 30  # all copies together hold at least this much: many times the L2 cache
MAX_COPIES = 16
WARM_RUNS = 4
MIN_RUNS, MAX_RUNS = 12, 200
RUNS_MS = 120  # of one measurement: longer ones heat the card up to its power limit
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
LAYOUTS = ("by_head", "by_token")  # which of the two is the outer one in memory
GROUPS = ("as_rows", "as_heads")  # how the query heads of one KV head are given


class Shape:
    def __init__(self, text):
        self.batch, self.context, self.query_heads, self.kv_heads, self.head_dim = map(int, text.split("x"))
        self.group = self.query_heads // self.kv_heads
        self.bytes = 2 * 2 * self.batch * self.context * self.kv_heads * self.head_dim
        self.copies = min(CACHE_BYTES // self.bytes + 1, MAX_COPIES)
        self.suffix = f"b{self.batch}_c{self.context}_h{self.query_heads}_{self.kv_heads}_d{self.head_dim}"


def capture(call):
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def replay_times(graphs, runs):
    """All runs are enqueued before the first one is waited for: the GPU goes from one to the next."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
    for run, (begin, end) in enumerate(events):
        begin.record()
        graphs[run % len(graphs)].replay()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def graph_time(call, copies):
    """Median ms of call(i), i over the copies in turn."""
    graphs = [capture(lambda i=i: call(i)) for i in range(copies)]
    estimate = replay_times(graphs, WARM_RUNS)[-1]
    runs = int(min(max(RUNS_MS / max(estimate, 1e-3), MIN_RUNS), MAX_RUNS))
    return statistics.median(replay_times(graphs, runs))


def cache(shape, layout):
    """K or V, [batch, kv_heads, context, head_dim]."""
    if layout == "by_head":
        return torch.empty(shape.batch, shape.kv_heads, shape.context, shape.head_dim, dtype=torch.bfloat16, device="cuda").normal_()
    rows = torch.empty(shape.batch, shape.context, shape.kv_heads, shape.head_dim, dtype=torch.bfloat16, device="cuda")
    return rows.normal_().transpose(1, 2)


def query(shape, group):
    rows = (shape.batch, shape.kv_heads, shape.group, shape.head_dim)
    heads = (shape.batch, shape.query_heads, 1, shape.head_dim)
    return torch.randn(rows if group == "as_rows" else heads, dtype=torch.bfloat16, device="cuda")


def attend(kernel, group, shape, q, k, v):
    with sdpa_kernel(KERNELS[kernel]):
        return scaled_dot_product_attention(q, k, v, enable_gqa=group == "as_heads" and shape.group > 1)


def sdpa(shape):
    """Of all kernels and layouts the fastest: (ms, (kernel, layout, group))."""
    best = (float("inf"), None)
    for layout in LAYOUTS:
        k = [cache(shape, layout) for _ in range(shape.copies)]
        v = [cache(shape, layout) for _ in range(shape.copies)]
        for kernel, group in itertools.product(KERNELS, GROUPS):
            q = query(shape, group)
            try:
                ms = graph_time(lambda i: attend(kernel, group, shape, q, k[i], v[i]), shape.copies)
            except RuntimeError:
                continue  # this kernel does not take this shape
            best = min(best, (ms, (kernel, layout, group)))
        del k, v
        torch.cuda.empty_cache()
    return best


def flashinfer_decode(shape):
    """ms of FlashInfer's paged decode, pages of 16 tokens in random order; None where it is not installed."""
    try:
        import flashinfer
    except ImportError:
        return None
    pages = shape.context // 16
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    indptr = torch.arange(0, shape.batch + 1, dtype=torch.int32, device="cuda") * pages
    indices = torch.randperm(shape.batch * pages, device="cuda").to(torch.int32)
    last = torch.full((shape.batch,), 16, dtype=torch.int32, device="cuda")
    wrapper.plan(indptr, indices, last, shape.query_heads, shape.kv_heads, shape.head_dim, 16, data_type=torch.bfloat16)
    form = (shape.batch * pages, 2, 16, shape.kv_heads, shape.head_dim)
    made = [torch.empty(form, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(shape.copies)]
    q = torch.randn(shape.batch, shape.query_heads, shape.head_dim, dtype=torch.bfloat16, device="cuda")
    return graph_time(lambda i: wrapper.run(q, made[i]), shape.copies)


def row(name, shape, ms, by):
    print(json.dumps({"name": f"{name}_{shape.suffix}", "value": ms, "unit": "ms", "by": by}), flush=True)


def measure(shapes):
    for shape in shapes:
        ms, choice = sdpa(shape)
        if choice is not None:
            row("sdpa_bf16", shape, ms, " ".join(choice))
        ms = flashinfer_decode(shape)
        if ms is not None:
            row("flashinfer_bf16", shape, ms, "paged decode")


class Decoder:
    """One process's own cache of all layers, and the captured step of one token over it."""

    def __init__(self, layers, shape, choice):
        kernel, layout, group = choice or sdpa(shape)[1]
        self.choice = (kernel, layout, group)
        self.k = [cache(shape, layout) for _ in range(layers)]
        self.v = [cache(shape, layout) for _ in range(layers)]
        self.q = [query(shape, group) for _ in range(layers)]
        self.graph = capture(lambda: [attend(kernel, group, shape, *layer) for layer in zip(self.q, self.k, self.v)])

    def run(self, seconds):
        """Each token is waited for, as by a worker that samples it."""
        begin, steps = time.monotonic(), 0
        while time.monotonic() - begin < seconds:
            self.graph.replay()
            torch.cuda.synchronize()
            steps += 1
        return steps, time.monotonic() - begin


def decode(layers, shape):
    decoder = None
    for line in sys.stdin:
        words = line.split()
        if words[0] == "prepare":
            decoder = Decoder(layers, shape, words[1:])
            print("ready", *decoder.choice, flush=True)
        else:
            print("steps", *decoder.run(float(words[1])), flush=True)


def main(arguments):
    warnings.filterwarnings("ignore")  # each kernel says at length why it does not take a shape
    if not torch.cuda.is_available():
        sys.exit("gpu_baselines.py: PyTorch sees no GPU")
    torch.manual_seed(torch.seed() & 0xFFFFFFFF)
    if arguments[:1] == ["--decode"]:
        decode(int(arguments[1]), Shape(arguments[2]))
    else:
        measure([Shape(text) for text in arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
