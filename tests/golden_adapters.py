"""What goldens.py knows of PyGraph's modules: how a program is drawn, compiled, selected, recorded and reported."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import io
import itertools
import sys
import types
import unittest
from pathlib import Path
from typing import Any, TYPE_CHECKING
from unittest import mock

from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Entry = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent

# By kind of program: how many are drawn, and the features that they must and must not have.
DRAWN = {
    "without_items": (30, (), ("item", "backward")),
    "items": (10, ("item",), ("backward",)),
    "backward": (20, ("backward",), ("item", "backward: CPU")),
}


def module_at(path: str) -> types.ModuleType:
    """A test file, as a module."""
    file = ROOT / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def new_graph_reports() -> Callable[[], list[Any]]:
    """Forget reports, and return a function that lists those of graphs since then."""
    from torch._inductor.pygraph import report, reset_report

    reset_report()
    return lambda: report().graphs


def draw_programs() -> dict[str, dict[str, Any]]:
    """Draw random programs; each kind from a seed of its own."""
    import hypothesis
    from hypothesis.internal.conjecture import providers

    from torch.testing._internal.pygraph_programs import programs

    drawn: dict[str, dict[str, Any]] = {}
    for kind, (count, needed, without) in DRAWN.items():
        found: list[Any] = []
        settings = hypothesis.settings(
            max_examples=40 * count,
            phases=[hypothesis.Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        # Hypothesis also draws constants of the modules that are imported by then.
        constants = mock.patch.object(
            providers, "_get_local_constants", lambda: providers._local_constants, create=True
        )
        with constants:
            hypothesis.seed(0)(settings(hypothesis.given(programs(without, calls=False))(lambda p: found.append(p))))()
        # The first ones are tiny, and the largest ones take long.
        sources = {p.source(check=False): p for p in found if p.features.issuperset(needed)}
        chosen = sorted(sources, key=lambda source: (abs(len(source) - 1500), source))[:count]
        if len(chosen) < count:
            raise RuntimeError(f"{len(chosen)} programs {kind}, not {count}")
        for source in chosen:
            program = sources[source]
            drawn[f"{len(drawn):03}"] = {
                "source": source,
                "backward": program.backward,
                "no_grad": program.no_grad,
            }
    return drawn


class Selecting:
    """
    The selection of one function in simulated time.

    Args:
        mode: "inference", "forward" or "backward"
        how: "selected", "forced" or "remembered"
        uncaptured: runs the function without a graph
        record: called with the way to bind inputs. It returns what replays the recording, or
            None while another thread records
        forget: whether a recording can be dropped now
        around: choices of other functions of the same path, "even" for one that waits
        nodes: how many nodes a replay sets
    """

    def __init__(
        self,
        mode: str,
        how: str,
        uncaptured: Callable[[], None],
        record: Callable[[str], Callable[[], None] | None],
        forget: Callable[[], bool],
        around: Callable[[], list[str]],
        nodes: int,
    ) -> None:
        from torch._dynamo.utils import counters
        from torch._inductor.pygraph.graph.prelude import PAYS_FROM_KERNELS
        from torch._inductor.pygraph.select import store, timing
        from torch._inductor.pygraph.select.selection import Selection
        from torch._inductor.pygraph.types.candidate import NODE_UPDATE, PRELUDE, UNDECIDED
        from torch._inductor.pygraph.types.function import RecordingFacts
        from torch._inductor.pygraph.types.reason import Code, Reason

        self.counters = counters["pygraph"]
        self.counters.clear()
        # A sum of all functions before this one.
        timing.Samples.own_us = 0.0
        self.undecided = UNDECIDED
        self.controller = new_controller(mode)
        self.state = self.controller.state
        self.deployments = 0
        self.deployed: Callable[[list[Any]], Any] | None = None

        def run(candidate: Callable[[], None]) -> Callable[[list[Any]], list[Any]]:
            return lambda inputs: candidate() or []

        def recorded(inputs: list[Any]) -> tuple[Any, list[Any]]:
            before, binding = self.state.id, self.state.binding
            has_prelude = binding == PRELUDE and nodes >= PAYS_FROM_KERNELS
            self.controller.added(f"id {self.state.recordings + 1}")
            replay = record(NODE_UPDATE if binding == PRELUDE and not has_prelude else binding)
            if replay is None:
                self.controller.added(before)
                return None, []
            facts = RecordingFacts(
                has_captured=True, has_prelude=has_prelude, updated_nodes=1 if has_prelude else nodes
            )
            self.controller.recorded(facts)
            return run(replay), []

        def neighbours(id: Any) -> OrderedSet[Any]:
            functions = OrderedSet()
            for choice in around():
                other = new_controller(mode)
                other.waits(choice == "even")
                other.report.choice = UNDECIDED if choice == "even" else choice
                functions.add(other)
            return functions

        measured = Reason.of(Code.FASTER, graph_us=1, uncaptured_us=2)
        self.selection = Selection(
            self.controller,
            run(uncaptured),
            recorded,
            self.deploy,
            lambda id: forget(),
            neighbours,
            is_forced=how == "forced",
            remembered=store.Decision(NODE_UPDATE, [measured], {}) if how == "remembered" else None,
        )
        if how != "selected":
            self.controller.bind_as(NODE_UPDATE)
        if how == "forced":
            self.controller.decide(NODE_UPDATE, Reason.of(Code.FORCED))

    def deploy(self, fn: Callable[[list[Any]], Any]) -> None:
        self.deployments += 1
        self.deployed = fn

    def call(self) -> None:
        (self.deployed or self.selection)([])

    @property
    def is_decided(self) -> bool:
        return self.controller.report.choice != self.undecided

    @property
    def is_deployed(self) -> bool:
        return self.deployed not in (None, self.selection)

    def refuse(self, is_capturable: bool) -> None:
        """What was recorded is not bound, or not captured at all."""
        from torch._inductor.pygraph.types.function import RecordingFacts, Refused
        from torch._inductor.pygraph.types.reason import Code, Reason

        differs = Reason.of(Code.DIFFERS, result="output 0")
        self.controller.refused(mock.Mock(), Refused(differs, is_capturable, RecordingFacts(), rerun=list))

    def copies(self, nbytes: int) -> None:
        """A replay copies so many bytes of inputs."""
        self.controller.copied(nbytes)

    def look(self) -> Entry:
        report = self.controller.report
        return {
            "structure": {
                "choice": report.choice,
                "deployments": self.deployments,
                "recordings": self.state.recordings,
                "timings": {name: round(us, 1) for name, us in sorted(report.timings_us.items())},
                "counters": dict(sorted(self.counters.items())),
            },
            "reasons": codes_of(report),
        }


def new_controller(mode: str) -> Any:
    """The controller of a function whose gradients do not outlive their step, which is known."""
    from torch._inductor.pygraph import FunctionReport
    from torch._inductor.pygraph.select.controller import Controller
    from torch._inductor.pygraph.types.function import FunctionSpec
    from torch._inductor.pygraph.types.partition import PartitionInfo

    spec = FunctionSpec(PartitionInfo("f"), {}, mode, compile_id="", device_index=0, is_distributed=False)
    controller = Controller(spec, FunctionReport("f", mode))
    controller.stepped(outputs_outlive=False)
    return controller


def codes_of(report: Any) -> list[str]:
    return [reason.code.name for reason in report.reasons]


def selecting_simulation() -> types.ModuleType:
    """What has Simulation and NoisySimulation."""
    from torch.testing._internal import pygraph_simulation

    return pygraph_simulation


class Recording:
    """Runs random programs on the modelled device."""

    def __init__(self) -> None:
        self.module = module_at("torch_overlay/test/inductor/test_pygraph_record.py")
        self.steps = self.module.STEPS
        # So that collecting looks at what a program leaves, and not at all modules.
        gc.collect()
        gc.freeze()

    def run(self, force: str | None, times: list[float], steps: list[tuple[str, int, int, bool]]) -> Entry:
        """``times``: of the candidates that are timed, one after the other, if nothing is forced."""
        from torch._dynamo.utils import counters
        from torch._inductor import cudagraph_trees as trees
        from torch._inductor.pygraph import report
        from torch._inductor.pygraph.select import timing

        found: Entry = {}

        class Run(self.module.RecordTestCase):
            def runTest(self) -> None:
                trees.MarkStepBox.mark_step_counter = 0
                program = module.Program(self, force)
                # The values are what the engine's own tests compare, after each step.
                for name, k, j, is_new in steps:
                    if is_new:
                        module.new_generation()
                    getattr(program, name)(k, j)
                program.check()
                functions = [(f.name, f.mode, f.choice, f.kernel_nodes, f.updated_nodes) for f in report()]
                found["structure"] = {
                    "functions": [*zip(program.deployed, functions, strict=True)],
                    "copied_bytes": [[f.stock_copied_bytes, f.copied_bytes] for f in report()],
                    "counters": dict(sorted(counters["pygraph"].items())),
                }
                found["reasons"] = [codes_of(f) for f in report()]

        from torch.testing._internal import modelled_cuda

        module = self.module
        memory: list[Any] = []

        class Block(modelled_cuda.Block):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                # Else the host's allocator decides whether a new weight has the address of an earlier one, and so
                # whether it is recorded.
                memory.append(self.memory)

        costs = (timing.Cost(*[timing.Estimate(us)] * 3) for us in itertools.cycle(times))
        result = unittest.TestResult()
        with (
            # Tests end with their counters.
            contextlib.redirect_stdout(io.StringIO()),
            mock.patch.object(modelled_cuda, "Block", Block),
            mock.patch.multiple(timing, WARMUP_SAMPLES=0, SAMPLES=1, MAX_SAMPLES=1, DEVICE_SAMPLES=1, MAX_DEVICE_SAMPLES=1),
            mock.patch.object(timing.Samples, "cost", lambda samples: next(costs)),
        ):
            unittest.TestSuite([Run()]).run(result)
        for _, message in (*result.errors, *result.failures):
            raise RuntimeError(message)
        return found


@contextlib.contextmanager
def benchmarks() -> Iterator[Any]:
    """The package of the benchmarks' cases."""
    path = str(ROOT / "torch_overlay" / "benchmarks" / "dynamo")
    sys.path.insert(0, path)
    try:
        from pygraph import catalogue as cases, program

        yield types.SimpleNamespace(cases=cases.CASES, program=program)
    finally:
        sys.path.remove(path)
