"""
Where the host's time of a call goes, layer by layer, for stock CUDA graphs and PyGraph.

The suite replay measures them. Each layer is timed with all that lies below it replaced by
what it returned before; the difference between neighbours is what the layer itself takes. In a case that trains, the
layers of forward and backward are timed together, and "aot" holds autograd too. Where compiled
bytecode calls a replay directly, "aot" and "inductor" are not run, and "trees" holds what
stands for them. "compiled" says how many of PyGraph's graphs compiled code replays; Python
replays the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import statistics
import time
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
import torch._dynamo
from torch._inductor.output_code import CompiledFxGraph


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Inputs = tuple[torch.Tensor, ...]

# From the outside in. "inputs" is what stock copies and PyGraph sets in the graph's nodes.
LAYERS = ("dynamo", "aot", "inductor", "trees", "inputs", "launch")

VARIANTS: dict[str, dict[str, Any]] = {
    "no_cg": {},
    "stock_cg": {"triton.cudagraphs": True},
    "pygraph": {"pygraph": True, "pygraph_force": "node_update"},
}

# Calls in a row before the device is waited for, so that its queue is never full.
CALLS = 50
# Compiles, records, and replays once through each path.
WARMUP_CALLS = 6
# Different buffers, in turn: another address in every call.
FRESH_INPUTS = 16


@dataclasses.dataclass(frozen=True)
class Case:
    """
    ``make`` gives a function of ``inputs``; if it ``trains``, a module whose sum of
    outputs is differentiated.
    """

    make: Callable[[str], Callable[..., Any]]
    inputs: Callable[[str], Inputs]
    trains: bool = False


def _mlp(layers: int) -> Callable[[str], Callable[..., Any]]:
    def make(device: str) -> Callable[..., Any]:
        modules = [(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(layers)]
        return torch.nn.Sequential(*itertools.chain(*modules)).to(device)

    return make


def _randn(*shapes: tuple[int, ...]) -> Callable[[str], Inputs]:
    return lambda device: tuple(torch.randn(shape, device=device) for shape in shapes)


def _sum(device: str) -> Callable[..., Any]:
    return lambda *xs: sum(x.sin() for x in xs)


def _three_graphs(device: str) -> Callable[..., Any]:
    first, second, third = (_mlp(1)(device) for _ in range(3))

    def fn(x: torch.Tensor) -> torch.Tensor:
        x = first(x)
        torch._dynamo.graph_break()
        x = second(x)
        torch._dynamo.graph_break()
        return third(x)

    return fn


CASES = {
    "linear_relu": Case(_mlp(1), _randn((8, 64))),
    "pointwise_16x4MiB": Case(_sum, _randn(*[(1 << 20,)] * 16)),
    "pointwise_2x4KiB": Case(_sum, _randn(*[(1 << 10,)] * 2)),
    "mlp_20": Case(_mlp(20), _randn((8, 64))),
    "three_graphs": Case(_three_graphs, _randn((8, 64))),
    "training": Case(_mlp(3), _randn((8, 64)), trains=True),
}


@contextlib.contextmanager
def replaced(target: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute that cannot be deleted, as mock does."""
    original = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, original)


class Layers:
    """One compiled function, called with as many of its layers as wanted."""

    def __init__(self, case: Case, device: str, options: dict[str, Any]) -> None:
        self.is_graph = bool(options) and device == "cuda"
        self.trains = case.trains
        self.inputs = itertools.cycle([case.inputs(device) for _ in range(FRESH_INPUTS)])
        self.fn = case.make(device)
        self.compiled = torch.compile(self.fn, options=options)
        self.call(WARMUP_CALLS)
        self.returned: dict[int, list[Any]] = {}
        original = CompiledFxGraph.__call__

        def remember(graph: CompiledFxGraph, inputs: list[Any]) -> list[Any]:
            outputs = original(graph, inputs)
            self.returned[id(graph)] = [t.detach().clone() if isinstance(t, torch.Tensor) else t for t in outputs]
            self.graphs.append(graph)
            return outputs

        self.graphs: list[CompiledFxGraph] = []
        # Compiled bytecode calls some replays directly, unless each layer is to be seen.
        with (
            mock.patch.object(CompiledFxGraph, "__call__", remember),
            mock.patch.object(torch._inductor.debug, "RECORD_GRAPH_EXECUTION", True),
        ):
            self.call(1)
        self.directs = {id(graph): found for graph in self.graphs for found in self._directs(graph)}

        def stub(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
            with torch.no_grad():
                outputs = gm(*example_inputs)
            return lambda *args: outputs

        self.dynamo_alone = torch.compile(self.fn, backend=stub)
        for _ in range(WARMUP_CALLS):
            self.dynamo_alone(*next(self.inputs))

    @property
    def layers(self) -> tuple[str, ...]:
        return LAYERS if self.is_graph else (*LAYERS[:3], "kernels")

    def compiled_replays(self) -> list[list[Any]]:
        """What replays PyGraph's functions by compiled code, for each function one or several recordings."""
        from torch._inductor.pygraph import native

        found = []
        for runner in (graph.compiled_fn_runner for graph in self.graphs):
            for fn in () if runner is None else runner.partitions:
                recordings = []
                while native.compiled is not None and isinstance(fn, native.compiled.Replay):
                    recordings.append(fn)
                    fn = fn.general
                if recordings:
                    found.append(recordings)
        return found

    @staticmethod
    def _directs(graph: CompiledFxGraph) -> list[Any]:
        """What bytecode calls instead of the layers between it and the replay of the graph."""
        from torch._inductor.pygraph import native

        runner = graph.compiled_fn_runner
        if native.compiled is None or runner is None:
            return []
        return [found for found in gc.get_referrers(runner.partitions) if isinstance(found, native.compiled.Direct)]

    @contextlib.contextmanager
    def _directs_replaced(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for graph in self.graphs:
                if (found := self.directs.get(id(graph))) is not None:
                    stack.enter_context(replaced(found, "slow", lambda *args, graph=graph: self.give(graph)))
                    stack.enter_context(replaced(found, "partitions", []))
            yield

    def call(self, times: int) -> None:
        for _ in range(times):
            outputs = self.compiled(*next(self.inputs))
            if self.trains:
                outputs.sum().backward()
                self.fn.zero_grad()

    def give(self, graph: CompiledFxGraph) -> list[Any]:
        """What the graph returned before. Autograd takes a gradient as it is if nobody else has it."""
        returned = self.returned[id(graph)]
        if not self.trains:
            return list(returned)
        return [t.detach() if isinstance(t, torch.Tensor) else t for t in returned]

    def down_to(self, layer: str) -> contextlib.AbstractContextManager[Callable[[int], None]]:
        """Calls that go through the layers to ``layer``, and no further."""
        return getattr(self, f"_{layer}")()

    @contextlib.contextmanager
    def _dynamo(self) -> Iterator[Callable[[int], None]]:
        if self.directs and all(id(graph) in self.directs for graph in self.graphs):
            with self._directs_replaced():
                yield self.call
            return

        def call(times: int) -> None:
            for _ in range(times):
                self.dynamo_alone(*next(self.inputs))

        yield call

    @contextlib.contextmanager
    def _aot(self) -> Iterator[Callable[[int], None]]:
        # PyGraph's backward goes around __call__.
        with (
            self._inductor() as call,
            mock.patch.object(CompiledFxGraph, "__call__", lambda graph, inputs: self.give(graph)),
        ):
            yield call

    @contextlib.contextmanager
    def _inductor(self) -> Iterator[Callable[[int], None]]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._directs_replaced())
            for graph in self.graphs:
                stack.enter_context(
                    mock.patch.object(graph, "current_callable", lambda inputs, graph=graph: self.give(graph))
                )
            yield self.call

    @contextlib.contextmanager
    def _trees(self) -> Iterator[Callable[[int], None]]:
        from torch._inductor.cudagraph_trees import CUDAGraphNode
        from torch._inductor.pygraph import native
        from torch._inductor.pygraph.graph.binding import NodeUpdateBinding

        with contextlib.ExitStack() as stack:
            # Stock's node; PyGraph's calls it for what it copies, which is nothing.
            stack.enter_context(
                mock.patch.object(CUDAGraphNode, "_copy_inputs_and_remove_from_src", lambda *args: None)
            )
            stack.enter_context(mock.patch.object(NodeUpdateBinding, "update", lambda *args: None))
            for replay in itertools.chain(*self.compiled_replays()):
                no_nodes = native.compiled.Nodes(replay.nodes.pointers, [], None)
                stack.enter_context(replaced(replay, "nodes", no_nodes))
            yield stack.enter_context(self._inputs())

    @contextlib.contextmanager
    def _inputs(self) -> Iterator[Callable[[int], None]]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch.cuda.CUDAGraph, "replay", lambda graph: None))
            for replay in itertools.chain(*self.compiled_replays()):
                stack.enter_context(replaced(replay, "launch", lambda graph: None))
            yield self.call

    @contextlib.contextmanager
    def _launch(self) -> Iterator[Callable[[int], None]]:
        yield self.call

    _kernels = _launch


def _time_layers(
    variants: dict[str, Layers], synchronize: Callable[[], None], rounds: int
) -> dict[str, dict[str, list[float]]]:
    samples: dict[str, dict[str, list[float]]] = {
        name: {key: [] for key in (*layers.layers, "total")} for name, layers in variants.items()
    }
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, variant in variants.items():
                for layer in variant.layers:
                    with variant.down_to(layer) as call:
                        call(3)
                        synchronize()
                        start = time.perf_counter()
                        call(CALLS)
                        samples[name][layer].append((time.perf_counter() - start) / CALLS * 1e6)
                        synchronize()
                samples[name]["total"].append((time.perf_counter() - start) / CALLS * 1e6)
    finally:
        gc.enable()
    return samples


def measure(case: Case, device: str, rounds: int) -> dict[str, dict[str, float]]:
    """
    For each variant the microseconds of each layer, ``host``, their sum, and ``total``,
    with the device; for PyGraph, how many graphs are replayed by ``compiled`` code.
    Medians over rounds in which all variants take turns.
    """
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    torch._dynamo.reset()
    with torch.set_grad_enabled(case.trains):
        variants = {name: Layers(case, device, options) for name, options in VARIANTS.items()}
        samples = _time_layers(variants, synchronize, rounds)
    rows = {}
    for name, of_layers in samples.items():
        medians = {key: statistics.median(values) for key, values in of_layers.items()}
        layers = variants[name].layers
        below = [0.0, *(medians[layer] for layer in layers)]
        rows[name] = {
            **{layer: medians[layer] - before for layer, before in zip(layers, below)},
            "host": medians[layers[-1]],
            "total": medians["total"],
        }
        if variants[name].is_graph and "pygraph" in VARIANTS[name]:
            rows[name]["compiled"] = len(variants[name].compiled_replays())
    return rows
