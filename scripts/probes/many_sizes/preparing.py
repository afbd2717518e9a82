"""
What preparing a new size takes, on one GPU, in about a minute: microseconds of each part, its calls included, on average over
230 calls of random sizes. Arguments are cases of suite `sizes`; by default bert_lengths and mlp_batches.

The parts of a call contain one another: `captured` is a part of `entries`, which is one of `at_sizes`. Times contain what a
library takes to load a kernel, which an uncaptured call of the size would take, too.

From the repository's root, with an overlay and torch_overlay/benchmarks/dynamo in PYTHONPATH.
"""

import functools
import sys
import time
from collections import Counter

from pygraph.catalogue import select
from pygraph.program import VARIANTS
from pygraph.worker import CaseRun

import torch
from torch._inductor.pygraph import report
from torch._inductor.pygraph.capture import library
from torch._inductor.pygraph.capture.library import Arguments, Memo, Scratch
from torch._inductor.pygraph.capture.sized import SizedRecording
from torch._inductor.pygraph.graph import captured, entry
from torch._inductor.pygraph.graph.sized import Launches
from torch._inductor.pygraph.select.many_sizes import ManySizes
from torch._inductor.pygraph.select.preparation import Preparation


BEFORE, CALLS = 170, 230
PARTS = (
    (ManySizes, ("_trusted", "_replay", "_know")),
    (SizedRecording, ("at_sizes", "_signatures", "is_trusted")),
    (Memo, ("entries", "captured", "_operands", "_entry")),
    (Scratch, ("capture",)),
    (Arguments, ("call",)),
    (library, ("read_graph", "count_nodes", "new_tensors", "capturing_graph")),
    (captured, ("read_node", "_attributes")),
    (entry.Entry, ("compiled",)),
    (entry, ("entry_point",)),
    (Launches, ("begin",)),
    (torch.cuda.CUDAGraph, ("capture_begin", "capture_end")),
)


class Timers:
    def __init__(self):
        self.seconds, self.calls = Counter(), Counter()
        self.is_on = False

    def time(self, owner, name):
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args, **kwargs):
            if not self.is_on:
                return function(*args, **kwargs)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - start
                self.calls[name] += 1

        setattr(owner, name, timed)

    def table(self):
        sizes = self.calls["general"]
        for name, seconds in self.seconds.most_common():
            each = self.calls[name]
            yield f"{name:16}{seconds * 1e6 / sizes:9.1f} us a size{seconds * 1e6 / each:9.1f} us each{each / sizes:7.1f} a size"


def measure(name):
    (case,) = select("sizes", [name])
    run = CaseRun(case, "cuda", variants={name: VARIANTS[name] for name in ("no_cg", "pygraph")})
    run.prepare()
    loop = run._program("pygraph").loop([run._inputs() for _ in range(BEFORE + CALLS)])
    loop(BEFORE)
    timers = Timers()
    for owner, names in PARTS:
        for part in names:
            timers.time(owner, part)
    general = ManySizes.general

    def from_idle(self, inputs, **kwargs):
        torch.cuda.synchronize()
        timers.is_on, start = True, time.perf_counter()
        try:
            return general(self, inputs, **kwargs)
        finally:
            timers.is_on = False
            timers.seconds["general"] += time.perf_counter() - start
            timers.calls["general"] += 1

    # Selection and the budget would leave sizes uncaptured.
    ManySizes.general, Preparation.is_due = from_idle, lambda *args: True
    loop(CALLS)
    torch.cuda.synchronize()
    print(f"== {name}: {[(each.choice, each.calls, each.captured_calls) for each in report()]}")
    print(*timers.table(), sep="\n", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        measure(sys.argv[1])
    else:
        import subprocess

        for name in sys.argv[1:] or ("bert_lengths", "mlp_batches"):
            subprocess.run([sys.executable, __file__, name], check=True)
