"""
What each way to give a graph new addresses costs, on a GPU.

    python -m pygraph.bindings --output bindings.json --budget 400

The paper's figure 8, redone: a graph of n small kernels, each with an input of its own that moves
in every call, for n from 1 to 256. The time of a call in a row of them, its latency with an idle
device, and the host's part of that.

The suite "bindings" times the small cases with each binding forced.

The ways of figure 8:

replay         nothing moves
copies         stock: the inputs are copied to fixed addresses
node_update    the host sets each node
prelude        the first node takes the addresses by value and sets the others
"""

from __future__ import annotations

import argparse
import functools
import itertools
import logging
import statistics
import time
from pathlib import Path
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
from torch._inductor.pygraph.graph.binding import NodeUpdateBinding
from torch._inductor.pygraph.graph.placeholder import arena, NAN, PlaceholderMap, tensor_at
from torch._inductor.pygraph.graph.prelude import Prelude

from .report import beside_cases, write_rows
from .timing import time_interleaved


if TYPE_CHECKING:
    from collections.abc import Callable


log = logging.getLogger(__name__)

POINTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WAYS = ("replay", "copies", "node_update", "prelude")

ELEMENTS = 1024
# Sets of inputs that calls take in turn.
RING = 4
LATENCIES = 200
ROUNDS = 11


@functools.cache
def _kernel() -> Any:
    """Return Inductor's kernel of x + 1."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    run, kernels = CachingAutotuner.run, []

    def remember(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        kernels.append(kernel)
        return run(kernel, *args, **kwargs)

    torch._dynamo.reset()
    with mock.patch.object(CachingAutotuner, "run", remember):
        torch.compile(lambda x: x + 1)(torch.zeros(ELEMENTS, device="cuda"))
    return kernels[0]


class Way:
    """A graph of n kernels, and what a call does to give it the addresses of a set of inputs."""

    def __init__(self, name: str, n: int) -> None:
        self.kernel = _kernel()
        self.sets = [[torch.rand(ELEMENTS, device="cuda") for _ in range(n)] for _ in range(RING)]
        self.pointers = [[t.data_ptr() for t in inputs] for inputs in self.sets]
        self.outputs = [torch.empty(ELEMENTS, device="cuda") for _ in range(n)]
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)
        self.next = 0
        self.give: Callable[[int], None] = getattr(self, f"_{name}")(n)

    def call(self) -> None:
        self.next = (self.next + 1) % RING
        self.give(self.next)
        self.graph.replay()

    def loop(self, calls: int) -> None:
        for _ in range(calls):
            self.call()

    def is_right(self) -> bool:
        for _ in range(2 * RING):
            self.call()
            if not all(torch.equal(o, x + 1) for o, x in zip(self.outputs, self.sets[self.next])):
                return False
        return True

    def _capture(self, inputs: list[torch.Tensor]) -> None:
        with torch.cuda.graph(self.graph):
            stream = torch.cuda.current_stream().cuda_stream
            for x, out in zip(inputs, self.outputs):
                self.kernel.run(x, out, ELEMENTS, stream=stream)

    def _replay(self, n: int) -> Callable[[int], None]:
        self._capture(self.sets[0])
        self.graph.instantiate()
        self.sets = self.sets[:1] * RING
        return lambda i: None

    def _copies(self, n: int) -> Callable[[int], None]:
        static = [torch.empty_like(x) for x in self.sets[0]]
        self._capture(static)
        self.graph.instantiate()
        return lambda i: torch._foreach_copy_(static, self.sets[i])

    def _bound(self, prelude: Callable[[PlaceholderMap], Prelude | None]) -> Callable[[int], None]:
        placed = arena(0, NAN).place([(4 * ELEMENTS, 16)] * len(self.outputs))
        self._capture([tensor_at(p.address, x, 0) for p, x in zip(placed, self.sets[0])])
        placeholders = PlaceholderMap(placed)
        # Its kernel reads the memory that it keeps.
        self.prelude = prelude(placeholders)
        self.graph.instantiate()
        if self.prelude is not None:
            self.prelude.upload(self.graph.raw_cuda_graph_exec())
        self.binding = NodeUpdateBinding(
            self.graph.raw_cuda_graph(),
            self.graph.raw_cuda_graph_exec(),
            placeholders,
            () if self.prelude is None else self.prelude.nodes,
        )
        update, pointers = self.binding.update, self.pointers
        return lambda i: update(pointers[i])

    def _node_update(self, n: int) -> Callable[[int], None]:
        return self._bound(lambda placeholders: None)

    def _prelude(self, n: int) -> Callable[[int], None]:
        return self._bound(lambda placeholders: Prelude(self.graph.raw_cuda_graph(), placeholders, 0))


def _latency(way: Way) -> float:
    samples = []
    for _ in range(LATENCIES):
        torch.cuda.synchronize()
        start = time.perf_counter()
        way.call()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) * 1e6)
    return statistics.median(samples)


def measure_point(n: int) -> dict[str, Any]:
    """One n: for each way microseconds, or why there are none."""
    ways, point = {}, {"parameters": n, "ways": {}}
    for name in WAYS:
        try:
            way = Way(name, n)
            if way.is_right():
                ways[name] = way
            else:
                point["ways"][name] = {"error": "wrong result"}
        except Exception as e:
            log.exception("%s, %d parameters", name, n)
            point["ways"][name] = {"error": f"{type(e).__name__}: {e}".partition("\n")[0]}
    loops = {name: way.loop for name, way in ways.items()}
    timings = time_interleaved(loops, torch.cuda.synchronize, rounds=ROUNDS)
    for name, timing in timings.items():
        point["ways"][name] = {
            "us": round(timing.median_us, 2),
            "iqr_us": round(timing.iqr_us, 2),
            "host_us": round(timing.host_us, 2),
            "latency_us": round(_latency(ways[name]), 2),
        }
    return point


def crossovers(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    For each pair of bindings and each time, from how many parameters on the first is the
    faster of the two, if from some point on it always is.
    """
    found = []
    for a, b in itertools.permutations(WAYS[1:], 2):
        for time_of in ("us", "host_us", "latency_us"):
            faster = [
                (point["parameters"], point["ways"][a][time_of] < point["ways"][b][time_of])
                for point in points
                if all(time_of in point["ways"].get(way, {}) for way in (a, b))
            ]
            tail = list(itertools.takewhile(lambda entry: entry[1], reversed(faster)))
            if tail and len(tail) < len(faster):
                found.append({"faster": a, "than": b, "by": time_of, "from": tail[-1][0]})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="pygraph.bindings", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="a JSON file")
    parser.add_argument("--budget", type=float, default=400.0, help="seconds")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # Why a node has no device-side update.
    logging.getLogger("torch._inductor.pygraph").setLevel(logging.INFO)
    deadline = time.monotonic() + args.budget
    points: list[dict[str, Any]] = []
    result: dict[str, Any] = {"figure8": points}
    for n in POINTS:
        points.append(measure_point(n))
        result["crossovers"] = crossovers(points)
        write_rows(args.output, result)
        if time.monotonic() > deadline:
            print("out of time", flush=True)
            break
    print("\n\n".join(beside_cases(result)))


if __name__ == "__main__":
    main()
