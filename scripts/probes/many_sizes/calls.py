"""
Four questions on calls of varying size, on one GPU, in about two minutes:

1. Does a changed graph wait for its last launch? One executable graph whose grids change, and two in turn.
2. Why do uncaptured calls take longer with PyGraph? Calls with and without it in turns, and a profile of each.
3. Does the matrix product of BERT's pooler give the same bits on another stream, captured, and at other alignments?
4. Why does an output of BERT differ from uncaptured calls in every kind of graph? By length: uncaptured again, captured
   by hand, stock CUDA graphs, and uncaptured code of another compilation.

From the repository's root, with an overlay and torch_overlay/benchmarks/dynamo in PYTHONPATH.
"""

import collections
import cProfile
import pstats
import random
import statistics
import sys
import time

from pygraph.models.language import BertPretraining
from pygraph.models.lengths import PromptedDecoder
from pygraph.models.small import MLP

import torch


CALLS, ROUNDS, LENGTHS = 40, 7, 24
NODES = 40
DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cuda"
IS_SMALL = DEVICE == "cpu"
NO_GRAPH = {"pygraph": True, "pygraph_force": "no_graph"}


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def timed(fn, ring):
    synchronize()
    began = time.perf_counter()
    for x in ring:
        fn(x)
    host = time.perf_counter() - began
    synchronize()
    return host / len(ring) * 1e6, (time.perf_counter() - began) / len(ring) * 1e6


def changed_graphs():
    from cuda.bindings import driver as cu

    def check(result):
        if int(result[0]):
            raise RuntimeError(result[0])
        return result[1:]

    x = torch.randn(4 << 20, device="cuda").mul_(1.0)
    made = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            for _ in range(NODES):
                x.mul_(1.0)
        graph.instantiate()
        raw = cu.CUgraph(graph.raw_cuda_graph())
        nodes, _ = check(cu.cuGraphGetNodes(raw, NODES))
        params = [check(cu.cuGraphKernelNodeGetParams(node))[0] for node in nodes]
        made.append((graph, cu.CUgraphExec(graph.raw_cuda_graph_exec()), nodes, params))
    grid = made[0][3][0].gridDimX
    us = {"set": 0.0, "launch": 0.0}

    def call(k, number, changes):
        graph, executable, nodes, params = made[k % number]
        began = time.perf_counter()
        for node, p in zip(nodes, params) if changes else ():
            p.gridDimX = grid - k // number % 2
            check(cu.cuGraphExecKernelNodeSetParams(executable, node, p))
        middle = time.perf_counter()
        graph.replay()
        us["set"] += (middle - began) / CALLS * 1e6
        us["launch"] += (time.perf_counter() - middle) / CALLS * 1e6

    for name, number, changes in (("unchanged", 1, False), ("one graph", 1, True), ("two in turn", 2, True)):
        for _ in range(2):
            us |= {"set": 0.0, "launch": 0.0}
            host, total = timed(lambda k: call(k, number, changes), range(CALLS))
        spent = ", ".join(f"{part} {value:.1f}" for part, value in us.items())
        print(f"graph of {NODES} nodes, {name:11s} host {host:6.1f} us ({spent}), a call {total:6.1f} us", flush=True)


def profiled(fn, ring):
    profile = cProfile.Profile()
    profile.enable()
    timed(fn, ring)
    profile.disable()
    stats = pstats.Stats(profile).stats
    rows = sorted(stats.items(), key=lambda item: -item[1][2])[:14]
    for (file, line, name), (_, count, own, _, _) in rows:
        print(f"    {own / len(ring) * 1e6:7.1f} us {count / len(ring):6.1f} x  {file.rpartition('/')[2]}:{line} {name}")


def uncaptured(name, module, make, low, high):
    ring = [make(random.randint(low, high)) for _ in range(CALLS)]
    found = collections.defaultdict(list)
    fns = {}
    # A process compiles one after the other: the second of "none" shows what the order does.
    many_sizes = {"pygraph": True, "pygraph_sizes": True}
    variants = {"none": None, "no_graph": NO_GRAPH, "many sizes": many_sizes, "none again": None}
    for variant, options in variants.items():
        torch._dynamo.reset()
        fn = torch.compile(lambda x: module(x), dynamic=True, options=options)
        # A recording for many sizes is chosen after about 100 calls.
        for _ in range(8):
            timed(fn, ring)
        fns[variant] = fn
        found[variant, "alone"] = [timed(fn, ring) for _ in range(ROUNDS)]
        print(f"  {name} {variant}")
        profiled(fn, ring)
    for i in range(ROUNDS):
        for variant, fn in list(fns.items())[:: 1 if i % 2 else -1]:
            found[variant, "in turns"].append(timed(fn, ring))
    for (variant, how), rounds in found.items():
        host, call = (statistics.median(values) for values in zip(*rounds))
        print(f"{name:6s} {variant:10s} {how:8s} host {host:7.1f} us, a call {call:7.1f} us", flush=True)


def by_hand(fn, inputs):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = fn(*inputs)
    graph.replay()
    synchronize()
    return [t.clone() for t in outputs]


def pooler():
    weight, bias = torch.randn(768, 768, device=DEVICE).half(), torch.randn(768, device=DEVICE).half()
    side = torch.cuda.Stream()
    differ = collections.Counter()
    lengths = [*range(16, 257, 8), *range(17, 257, 16)]
    for length in lengths:
        x = torch.randn(4, length, 768, device=DEVICE).half()

        def product(x=x):
            return torch.addmm(bias, x[:, 0], weight.t())

        found = {"again": product()}
        synchronize()
        with torch.cuda.stream(side):
            found["other stream"] = product()
        synchronize()
        (found["captured"],) = by_hand(lambda: (product(),), ())
        memory = x.new_empty(x.numel() + 64)
        for offset in (8, 16, 32):
            moved = memory[offset : offset + x.numel()].view_as(x).copy_(x)
            found[f"{2 * offset} bytes further"] = product(moved)
        differ.update(name for name, result in found.items() if not torch.equal(result, product()))
    print(f"pooler: of {len(lengths)} lengths differ:", dict(differ))


def bits():
    shape = (2, 16) if IS_SMALL else (4, 256)
    module = BertPretraining(100, 64, 1, 2) if IS_SMALL else BertPretraining(1000, 768, 2, 12)
    module = module.to(DEVICE).eval() if IS_SMALL else module.to(DEVICE, torch.float16).eval()
    vocabulary = 100 if IS_SMALL else 1000

    def compiled(**kwargs):
        return torch.compile(lambda tokens, kinds: module(tokens, kinds), dynamic=True, **kwargs)

    fns = {"uncaptured": compiled(), "compiled again": compiled(options=NO_GRAPH), "eager": module}
    fns["stock"] = compiled(options={"triton.cudagraphs": True})
    differ = collections.Counter()
    lengths = sorted(random.sample(range(min(16, shape[1] - 2), shape[1]), min(LENGTHS, shape[1] // 8)))
    for length in lengths:
        inputs = torch.randint(1, vocabulary, (shape[0], length)), torch.randint(3, (shape[0], length))
        inputs = [t.to(DEVICE) for t in inputs]
        expected = [t.clone() for t in fns["uncaptured"](*inputs)]
        found = {name: [t.clone() for _ in range(3) for t in fn(*inputs)][-len(expected) :] for name, fn in fns.items()}
        if DEVICE == "cuda":
            found["by hand"] = by_hand(fns["uncaptured"], inputs)
        for name, outputs in found.items():
            for i, (a, b) in enumerate(zip(expected, outputs)):
                if not torch.equal(a, b):
                    differ[name, i] += 1
                    print(f"  length {length}, output {i}, {name}: {(a - b).abs().max().item():.2g}")
    print(f"bert: of {len(lengths)} lengths differ (variant, output):", dict(differ))


if __name__ == "__main__":
    random.seed(0)
    torch.manual_seed(0)
    if DEVICE == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
    with torch.no_grad():
        if DEVICE == "cuda":
            changed_graphs()
            pooler()
        mlp, half = (MLP(16, 2), torch.float32) if IS_SMALL else (MLP(512, 12), torch.float16)
        width = mlp(torch.zeros(2, 16 if IS_SMALL else 512)).shape[1]
        uncaptured("mlp", mlp.to(DEVICE), lambda n: torch.randn(n, width, device=DEVICE), 2, 512)
        sizes = (100, 64, 1, 4, 128) if IS_SMALL else (1000, 2048, 2, 32, 5632)
        decoder = PromptedDecoder(*sizes).to(DEVICE, half)
        uncaptured("llama", decoder, lambda n: torch.randint(sizes[0], (1, n), device=DEVICE), 16, 512)
        bits()
