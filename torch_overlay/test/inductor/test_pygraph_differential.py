# Owner(s): ["module: inductor"]
"""
Random programs, compiled with PyGraph and compared with eager in everything observable.

As a test, a fixed set of programs: generated code without a GPU, results with one. As a
script, on a machine with a GPU, as many as the time allows:

    python test_pygraph_differential.py --programs 2000 --seconds 300 --seed 0

prints how far it is, each cause of a difference once, as a shrunk program, and at last a line
of JSON (see summary). A seed stands for the same programs whatever else is given, so that
runs with different seeds add up.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import hashlib
import json
import logging
import operator
import os
import random
import re
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, TYPE_CHECKING
from unittest import mock

import hypothesis
from hypothesis import HealthCheck, Phase, strategies as st
from hypothesis.internal.conjecture import providers

import torch
import torch._dynamo
import torch._inductor.compile_fx as compile_fx
from torch._dynamo.backends.registry import lookup_backend
from torch._inductor import ir
from torch._inductor.graph import SubgraphLowering
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.scheduler import Scheduler
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.virtualized import V
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.fake_cuda import fake_cuda
from torch.testing._internal.inductor_utils import HAS_CUDA_AND_TRITON
from torch.testing._internal.pygraph_observed import Difference, difference, observe
from torch.testing._internal.pygraph_program import FEATURES, Program
from torch.testing._internal.pygraph_programs import programs


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Compile = Callable[[torch.nn.Module], Callable[..., Any]]

# Features of programs that are known to go wrong, and why: programs are drawn without.
KNOWN_GAPS: dict[str, str] = {}
# torch.compile without CUDA graphs does not equal eager in these.
UPSTREAM_DIFFERENCES = {
    "mutation: float64 scalar": "AOTAutograd, even with aot_eager, loses the mutation",
    "return: view": "of a view of its own tensor, Inductor returns a dense copy",
    "scalar: NumPy promotes": "Dynamo makes a NumPy scalar a 0-d tensor of its own dtype",
}
# Nothing has a value there.
NOT_WITHOUT_A_GPU = {
    "item": "fake tensors have no values to read",
    "backward: CPU": "fake tensors on the CPU take no gradient there",
}
EXCLUDED = KNOWN_GAPS.keys() | UPSTREAM_DIFFERENCES.keys()

# Programs of a hypothesis run. All but the first are mutations of earlier ones.
CHUNK = 25


def explains(known: tuple[str, Any], other: tuple[str, Any]) -> bool:
    """
    Kinds and features of two failures. One of the same kind with all that the known one,
    made simple, takes to fail is of the same cause; so is one of the same message.
    """
    (kind, features), (other_kind, other_features) = known, other
    return kind == other_kind and (
        kind.startswith("exception") or {*features} <= {*other_features}
    )


@dataclasses.dataclass(frozen=True)
class Failure:
    program: Program
    difference: Difference
    inductors_own: bool = False

    @property
    def kind(self) -> str:
        """What failures of one cause have in common, whatever the program."""
        d = self.difference
        if d.kind == "exception":
            message = str(d.actual).strip().splitlines()[0]
            return f"exception: {re.sub(r'0x[0-9a-f]+|[0-9]+', 'N', message)[:120]}"
        return f"{d.kind}: {d.actual}" if d.kind in ("dtype", "device") else d.kind

    @property
    def cause(self) -> tuple[str, frozenset[str]]:
        return self.kind, self.program.features

    def __str__(self) -> str:
        whose = "torch.compile without CUDA graphs" if self.inductors_own else "PyGraph"
        return f"{whose}: {self.difference}\n\n{self.program.source()}"


class Search:
    """
    Draws programs, checks each once, and keeps one failure for each cause, made as simple
    as it still fails. Hypothesis would stop at the first, and a check is too slow for its
    way to shrink.

    Args:
        check: what is wrong with a program
        inductors_own: whether that is so without CUDA graphs too; asked of each cause
        is_over: programs that are drawn later are not checked, nor made simpler; whose fault
            a failure is that is known by then is still asked
    """

    def __init__(
        self,
        strategy: st.SearchStrategy[Program],
        check: Callable[[Program], Difference | None],
        inductors_own: Callable[[Program], bool],
        is_over: Callable[[], bool],
        shrink_seconds: float = 60.0,
    ) -> None:
        self.strategy = strategy
        self.check = check
        self.inductors_own = inductors_own
        self.is_over = is_over
        self.shrink_seconds = shrink_seconds
        self.results: dict[str, Failure | None] = {}
        self.causes: list[Failure] = []
        self.features: Counter[str] = Counter()
        # Of the programs that were drawn, by a hash of their source: whether they differ.
        self.differs: dict[str, bool] = {}

    @property
    def drawn(self) -> int:
        return len(self.differs)

    @property
    def failed(self) -> int:
        return sum(self.differs.values())

    def chunk(self, seed: int, count: int) -> None:
        def look(program: Program) -> None:
            name = hashlib.sha256(program.source().encode()).hexdigest()[:16]
            if self.is_over() or name in self.differs:
                return
            failure = self.result(program)
            self.differs[name] = failure is not None
            self.features.update(program.features)
            if failure is None or any(
                explains(cause.cause, failure.cause) for cause in self.causes
            ):
                return
            # It counts even if there is no time for the rest.
            self.causes.append(failure)
            self.causes[-1] = self.judged(failure)
            self.causes[-1] = self.judged(self.shrink(failure))

        settings = hypothesis.settings(
            max_examples=count,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        # What Hypothesis draws from the sources of local modules, which those of an overlay
        # are: parsing them takes a while, and a seed would mean what was imported.
        with mock.patch.object(
            providers,
            "_get_local_constants",
            lambda: providers._local_constants,
            create=True,
        ):
            hypothesis.seed(seed)(settings(hypothesis.given(self.strategy)(look)))()

    def judged(self, failure: Failure) -> Failure:
        own = self.inductors_own(failure.program)
        return dataclasses.replace(failure, inductors_own=own)

    def result(self, program: Program) -> Failure | None:
        source = program.source()
        if source not in self.results:
            found = self.check(program)
            self.results[source] = Failure(program, found) if found else None
        return self.results[source]

    def shrink(self, failure: Failure) -> Failure:
        until = time.monotonic() + self.shrink_seconds
        simpler: Failure | None = failure
        while simpler is not None:
            failure = simpler
            simpler = next(
                (
                    found
                    for program in failure.program.simpler()
                    if time.monotonic() < until
                    and not self.is_over()
                    and (found := self.result(program)) is not None
                    and found.kind == failure.kind
                ),
                None,
            )
        return failure


def eager(model: torch.nn.Module) -> torch.nn.Module:
    return model


def compiled(**kwargs: Any) -> Callable[[torch.nn.Module], Any]:
    return functools.partial(torch.compile, **kwargs)


class DeviceLost(BaseException):
    """Nothing runs on the device any more in this process. Hypothesis does not handle it."""


class InvalidProgram(Exception):
    """Eager raises: the generator is wrong."""


def compare(program: Program, compile: Compile, **kwargs: Any) -> Difference | None:
    """``kwargs``: of observe."""
    torch._dynamo.reset()
    expected = observe(program, eager, **kwargs)
    if any("exception" in seen.facts for seen in expected):
        raise InvalidProgram(f"{expected[-1].value}\n\n{program.source()}")
    return difference(expected, observe(program, compile, **kwargs))


def check_results(program: Program) -> Difference | None:
    "On the GPU."
    found = compare(program, compiled(options=program.options))
    if found is not None and found.kind == "exception":
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise DeviceLost from None
    gc.collect()  # graphs hold memory of the device
    return found


def differs_without_graphs(program: Program) -> bool:
    return compare(program, compiled()) is not None


def check_generated_code(program: Program, pygraph: bool = True) -> Difference | None:
    "For a GPU, without one: what is returned, and what captured code reads."
    options = program.options if pygraph else {}
    with warnings.catch_warnings(), fake_cuda() as graphs, as_generated() as cpu_inputs:
        warnings.simplefilter("ignore")
        found = compare(program, compiled(options=options), values=False, calls=1)
        if found is None and cpu_inputs:
            return Difference("captured", "partition", "no CPU tensor", cpu_inputs)
        items = [line for graph in graphs for line in captured_items(graph.source)]
        if found is None and pygraph and items:
            return Difference("baked in", "partition", "no .item()", items)
        return found


def generated_code_differs_without_graphs(program: Program) -> bool:
    return check_generated_code(program, pygraph=False) is not None


def captured_items(source: str) -> list[str]:
    """
    Lines that read a value on the host in functions that are captured. Partitions that
    are not are in the body of Runner.call.
    """
    functions = re.findall(
        r"^def partition_\d+\(.*?\):\n((?:[ \t].*\n|\n)*)", source, re.M
    )
    return [
        line.strip()
        for body in functions
        for line in body.splitlines()
        if ".item()" in line
    ]


@contextlib.contextmanager
def as_generated() -> Iterator[list[str]]:
    """
    Inside fake_cuda: compiled graphs return what their generated code does, as far as
    dtypes, devices, sizes and strides go. Yields names of the CPU tensors that captured
    partitions take.
    """
    cpu_inputs: list[str] = []
    generated: list[tuple[Any, ...] | None] = []
    original = (
        Scheduler.codegen,
        Scheduler.graph_partition,
        compile_fx._compile_fx_inner,
    )
    codegen, graph_partition, compile_fx_inner = original

    def layout(output: Any) -> tuple[Any, ...] | None:
        if not isinstance(output, ir.IRNode) or output.maybe_get_layout() is None:
            return None
        hint = V.graph.sizevars.size_hint
        size, stride = (
            tuple(map(hint, e)) for e in (output.get_size(), output.get_stride())
        )
        return output.get_dtype(), output.get_device(), size, stride

    def record_outputs(scheduler: Scheduler) -> Any:
        result = codegen(scheduler)
        if not isinstance(V.graph, SubgraphLowering):
            generated[:] = map(layout, V.graph.graph_outputs)
        return result

    def record_partitions(scheduler: Scheduler) -> Any:
        partitions, signatures = graph_partition(scheduler)
        for signature in signatures:
            if not signature.skip_cudagraph:
                for name, buffer in signature.input_nodes.items():
                    device = buffer.get_device()
                    if device is not None and device.type == "cpu":
                        cpu_inputs.append(name)
        return partitions, signatures

    def compile_and_replace(*args: Any, **kwargs: Any) -> Any:
        generated.clear()
        graph = compile_fx_inner(*args, **kwargs)
        if not isinstance(graph, CompiledFxGraph):
            return graph
        layouts, run = tuple(generated), graph.current_callable

        def call(inputs: list[Any]) -> Any:
            return [
                as_laid_out(output, *to) if to else output
                for output, to in zip(run(inputs), layouts, strict=True)
            ]

        graph.current_callable = call
        return graph

    with (
        mock.patch.object(Scheduler, "codegen", record_outputs),
        mock.patch.object(Scheduler, "graph_partition", record_partitions),
        mock.patch.object(compile_fx, "_compile_fx_inner", compile_and_replace),
    ):
        yield cpu_inputs


def as_laid_out(
    t: torch.Tensor, dtype: torch.dtype, device: torch.device, size: Any, stride: Any
) -> torch.Tensor:
    if (t.dtype, t.device.type, tuple(t.shape)) == (dtype, device.type, size):
        strides = zip(t.stride(), stride, size)
        if all(a == b for a, b, length in strides if length > 1):
            return t
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


class WrongBackend:
    """Dynamo backends that go wrong in the ways a CUDA graph can."""

    @staticmethod
    def drops_mutation(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            own = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
            return gm(*own)

        return run

    @staticmethod
    def changes_dtype(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def widened(t: Any) -> Any:
            return t.double() if isinstance(t, torch.Tensor) else t

        return lambda *args: tuple(map(widened, gm(*args)))

    @staticmethod
    def changes_strides(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def transposed(t: Any) -> Any:
            if isinstance(t, torch.Tensor) and t.dim() == 2:
                return t.t().contiguous().t()
            return t

        return lambda *args: tuple(map(transposed, gm(*args)))

    @staticmethod
    def returns_copies(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        "Of what may be an input, a view of one, or twice the same."
        return lambda *args: tuple(
            t.clone() if isinstance(t, torch.Tensor) else t for t in gm(*args)
        )

    @staticmethod
    def is_stale(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        "The results of the third call are those of all later ones."
        results = []

        def run(*args: Any) -> Any:
            results.append(gm(*args))
            return results[: min(len(results), 3)][-1]

        return run

    @staticmethod
    def bakes_scalars(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        "As a kernel that was captured with a value."
        first: list[Any] = []

        def run(*args: Any) -> Any:
            if not first:
                first.extend(
                    a.clone() if isinstance(a, torch.Tensor) else a for a in args
                )
            scalars = [isinstance(a, torch.Tensor) and a.dim() == 0 for a in args]
            return gm(*(f if s else a for a, f, s in zip(args, first, scalars)))

        return run

    @staticmethod
    def reuses_outputs(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        "Each call overwrites what the call before returned."
        memory: list[Any] = []

        def run(*args: Any) -> Any:
            results = gm(*args)
            if not memory:
                memory.extend(
                    t.clone() if isinstance(t, torch.Tensor) else t for t in results
                )
            for kept, t in zip(memory, results):
                if isinstance(t, torch.Tensor) and kept.shape == t.shape:
                    kept.copy_(t)
            return tuple(memory)

        return run

    @staticmethod
    def raises_later(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        calls = []

        def run(*args: Any) -> Any:
            calls.append(1)
            if len(calls) > 2:
                raise RuntimeError("replay failed")
            return gm(*args)

        return run


WRONG = {
    "drops_mutation": {"value", "written to", "alias", "identity"},
    "changes_dtype": {"dtype", "exception"},
    "changes_strides": {"stride", "exception"},
    "returns_copies": {"alias", "identity"},
    "is_stale": {"value", "alias"},
    "bakes_scalars": {"value"},
    "reuses_outputs": {"held value"},
    "raises_later": {"exception"},
}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    "Graph breaks and recompilations are part of the programs."
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def on_cpu(backend: Any) -> Callable[[Program], Difference | None]:
    """All on the CPU, where what runs is ``backend``."""
    return lambda program: compare(program, compiled(backend=backend), gpu="cpu")


# Seconds for programs of which a number has to be drawn, however busy the machine is.
SLOW = 1200.0


def search(
    strategy: st.SearchStrategy[Program],
    check: Callable[[Program], Difference | None],
    count: int,
    seconds: float,
    inductors_own: Callable[[Program], bool] = lambda program: False,
) -> Search:
    deadline = time.monotonic() + seconds
    found = Search(strategy, check, inductors_own, lambda: time.monotonic() > deadline)
    with quiet():
        found.chunk(0, count)
    return found


def pygraphs_own(found: Search) -> list[str]:
    return [str(cause) for cause in found.causes if not cause.inductors_own]


class ProgramsTest(TestCase):
    """The comparison would see a difference, and sees none where there is none."""

    def test_equal(self) -> None:
        found = search(
            programs(without=["layout: alias", *UPSTREAM_DIFFERENCES]),
            on_cpu("aot_eager"),
            20,
            SLOW,
        )
        self.assertEqual(list(map(str, found.causes)), [])
        self.assertGreater(found.drawn, 10)

    def test_items(self) -> None:
        "Values that Dynamo makes inputs of, and those at which it breaks the graph."

        def check(program: Program) -> Difference | None:
            return compare(program, compiled(options={"pygraph": True}), gpu="cpu")

        aot_eager = lookup_backend("aot_eager")
        reading = programs(without=EXCLUDED).filter(
            lambda program: any(".item()" in line.code for line in program.lines)
        )
        with mock.patch.object(
            torch._TorchCompileInductorWrapper,
            "__call__",
            lambda self, gm, inputs: aot_eager(gm, inputs),
        ):
            found = search(reading, check, 30, SLOW)
        self.assertEqual(list(map(str, found.causes)), [])
        self.assertGreater(found.drawn, 10)

    @parametrize("name", sorted(WRONG))
    def test_wrong_backend(self, name: str) -> None:
        backend = getattr(WrongBackend, name)
        no = lambda *args: False  # noqa: E731
        found = Search(programs(), on_cpu(backend), no, no, 0.0)
        for seed in range(10):
            with quiet():
                found.chunk(seed, 4)
            if WRONG[name] & {cause.difference.kind for cause in found.causes}:
                return
        self.fail(f"not found in {found.drawn} programs: {found.causes}")

    def test_causes_are_simple_and_found_once(self) -> None:
        def swapped(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            for node in gm.graph.find_nodes(op="call_function", target=operator.add):
                node.target = operator.sub
            gm.recompile()
            return gm

        found = search(programs(max_statements=6), on_cpu(swapped), 25, 60.0)
        self.assertGreater(found.failed, len(found.causes))
        self.assertLessEqual(min(len(c.program.lines) for c in found.causes), 2)
        for cause in found.causes:
            self.assertRegex(cause.program.source(), r" = .* \+ ")

    def test_hypothesis_shrinks(self) -> None:
        smallest = hypothesis.find(
            programs(max_statements=4),
            lambda program: "constructor: GPU" in program.features,
            settings=hypothesis.settings(
                max_examples=100, database=None, deadline=None
            ),
            random=random.Random(0),
        )
        self.assertLessEqual(len(smallest.lines), 2)

    def test_excluded_features_do_not_occur(self) -> None:
        without = {
            "return: CPU computed",
            "scalar: argument",
            "item",
            "mutation: argument",
        }
        found = search(programs(without=without), lambda program: None, 50, 30.0)
        self.assertEqual(without & {*found.features}, set())
        with self.assertRaisesRegex(ValueError, "nonsense"):
            search(programs(without=["nonsense"]), lambda program: None, 1, 30.0)

    def test_printed_script(self) -> None:
        def check(program: Program) -> None:
            source = program.source("cpu")
            code = compile(source, "script", "exec")
            for wrong in (False, True):
                shift = (lambda t: t + 1) if wrong else (lambda t: t)
                run = lambda model, options: (  # noqa: E731
                    lambda *args: tuple(map(shift, model(*args)))
                )
                with mock.patch.object(torch, "compile", run):
                    if wrong:
                        with self.assertRaisesRegex(AssertionError, "call 0, thing"):
                            exec(code, {"__name__": "__main__"})
                    else:
                        exec(code, {"__name__": "__main__"})

        strategy = programs(without=["return: scalar"]).filter(lambda p: p.outputs)
        with mock.patch("builtins.print"):
            search(strategy, check, 10, 30.0)


instantiate_parametrized_tests(ProgramsTest)


class RunnerTest(TestCase):
    def arguments(self, check: str = "results", **kwargs: Any) -> argparse.Namespace:
        defaults = {"programs": 6, "seconds": 60.0, "seed": 1, "jobs": 1, "part": "0/1"}
        return argparse.Namespace(**{**defaults, "check": check, **kwargs})

    def test_worker(self) -> None:
        self.addCleanup(gc.unfreeze)
        arguments = self.arguments("raises_later")
        with (
            tempfile.TemporaryDirectory() as directory,
            mock.patch(f"{__name__}.CHUNK", 8),
        ):
            file = Path(directory, "progress.json")
            chunk = Search.chunk

            def once(search: Search, seed: int, count: int) -> None:
                chunk(search, seed, count)
                # What a crash now would leave is all but the last.
                self.assertGreaterEqual(
                    len(Progress.read(file).differs), search.drawn - 1
                )
                file.with_name("stop").touch()

            with mock.patch.object(Search, "chunk", once):
                self.assertEqual(work(file, arguments), 0)
            progress = Progress.read(file)
        self.assertTrue(progress.done)
        self.assertGreater(len(progress.differs), 1)
        self.assertGreater(sum(progress.differs.values()), 1)
        text, right = summary([progress, progress], arguments, wall=1.0)
        self.assertFalse(right)
        self.assertEqual(text.count("exception: RuntimeError: replay failed: "), 1)
        *_, line, counts = text.splitlines()
        self.assertRegex(line, r"^\d+ programs .* causes: 1 of PyGraph, 0 of Inductor")
        counts = json.loads(counts)
        self.assertEqual(counts["programs"], len(progress.differs))
        self.assertEqual(counts["differ"], sum(progress.differs.values()))
        self.assertEqual(counts["causes"], ["exception: RuntimeError: replay failed"])

    def supervised(self, worker: str, **kwargs: Any) -> list[Progress]:
        """``worker`` finds its file in ``file`` and what is in it in ``state``."""
        worker = f"""
            import json, pathlib, sys, time
            file = pathlib.Path(sys.argv[sys.argv.index("--worker") + 1])
            state = json.loads(file.read_text())
            def save(**kwargs):
                state.update(kwargs)
                file.write_text(json.dumps(state))
            {textwrap.indent(textwrap.dedent(worker), " " * 12).strip()}
        """
        with tempfile.TemporaryDirectory() as directory:
            script = Path(directory, "worker.py")
            script.write_text(textwrap.dedent(worker))
            return supervise(Path(directory), self.arguments(**kwargs), str(script))

    def test_worker_that_crashes(self) -> None:
        "A failure of the program that was running, and the next ones still run."
        (progress,) = self.supervised("""
            chunk = state["chunk"]
            save(chunk=chunk + 1, current="x = 1", done=chunk == 2)
            sys.exit(0 if chunk == 2 else 7)
        """)
        self.assertTrue(progress.done)
        texts = [cause["text"] for cause in progress.causes]
        self.assertEqual(texts, ["ended with 7\n\nx = 1"] * 2)

    def test_worker_that_hangs(self) -> None:
        with mock.patch(f"{__name__}.MAX_CHECK_SECONDS", 2.0):
            (progress,) = self.supervised("""
                if state["causes"]:
                    save(done=True)
                else:
                    save(current="x = 1")
                    time.sleep(1000)
            """)
        self.assertTrue(progress.done)
        (cause,) = progress.causes
        self.assertRegex(cause["text"], r"^no result in \d+ s\n\nx = 1$")

    def test_deadline(self) -> None:
        "What was done until then counts, and what was running is nobody's fault."
        start = time.monotonic()
        results = self.supervised(
            """
            save(differs={file.name: False, "both": True}, current="x = 1")
            time.sleep(1000)
            """,
            jobs=2,
            seconds=3.0,
        )
        wall = time.monotonic() - start
        self.assertLess(wall, 30)
        text, right = summary(results, self.arguments(jobs=2), wall)
        self.assertTrue(right)
        counts = json.loads(text.splitlines()[-1])
        self.assertEqual((counts["programs"], counts["differ"]), (3, 1))

    def test_time_to_ask_whose_fault_it_is(self) -> None:
        (progress,) = self.supervised(
            """
            while not file.with_name("stop").exists():
                time.sleep(0.01)
            save(done=True)
            """,
            seconds=5.0,
        )
        self.assertTrue(progress.done)

    def test_failure_that_is_found_late(self) -> None:
        asked = []

        def own(program: Program) -> bool:
            asked.append(program)
            return True

        found = Search(
            programs(), on_cpu(WrongBackend.changes_dtype), own, lambda: bool(found.causes)
        )
        with quiet():
            found.chunk(0, 200)
        (cause,) = found.causes
        self.assertTrue(cause.inductors_own)
        self.assertEqual({p.source() for p in asked}, {cause.program.source()})

    def test_enough_programs(self) -> None:
        (progress,) = self.supervised("""
            save(differs={str(i): False for i in range(6)})
            while not file.with_name("stop").exists():
                time.sleep(0.01)
            save(done=True)
        """)
        self.assertTrue(progress.done)


class GeneratedCodeTest(TestCase):
    """On a machine that need not have a GPU."""

    def test_programs(self) -> None:
        found = search(
            programs(without=EXCLUDED | NOT_WITHOUT_A_GPU.keys(), calls=False),
            check_generated_code,
            18,
            SLOW,
            generated_code_differs_without_graphs,
        )
        self.assertEqual(pygraphs_own(found), [])
        self.assertGreater(found.drawn, 10)


@unittest.skipUnless(HAS_CUDA_AND_TRITON, "requires CUDA and Triton")
class ResultsTest(TestCase):
    def test_programs(self) -> None:
        found = search(
            programs(without=EXCLUDED), check_results, 60, 60.0, differs_without_graphs
        )
        self.assertEqual(pygraphs_own(found), [])


# How a program can be checked, by the name that --check takes.
CHECKS = {
    "results": (check_results, differs_without_graphs),
    "generated": (check_generated_code, generated_code_differs_without_graphs),
    # For tests of what follows.
    **{
        name: (on_cpu(getattr(WrongBackend, name)), lambda program: False)
        for name in WRONG
    },
}
WITHOUT = {
    "results": EXCLUDED,
    "generated": EXCLUDED | NOT_WITHOUT_A_GPU.keys(),
}
# The end of a worker that cannot go on by itself.
LOST = 3
MAX_RESTARTS = 10
# The part of the time after which no more programs are drawn: a failure counts as PyGraph's
# until it is known whose it is.
DRAWING_PART = 0.9
# Programs are small: one that takes longer hangs.
MAX_CHECK_SECONDS = 120.0
# Between lines that say how far it is.
REPORT_SECONDS = 10.0
# What the end of workers that are killed may take.
END_SECONDS = 3.0

# Of the workers, of which there is one for each CPU: what they compile for the CPU is not
# what is tested, and takes twice as long with vector instructions and without knowing them.
WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Where a crash was.
    "PYTHONFAULTHANDLER": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_VEC_ISA_OK": "0",
}


@dataclasses.dataclass
class Progress:
    """
    What a worker has done, written before each check; after a crash, it goes on with the
    chunk after ``chunk``.
    """

    chunk: int = 0
    # See Search.
    differs: dict[str, bool] = dataclasses.field(default_factory=dict)
    features: dict[str, int] = dataclasses.field(default_factory=dict)
    # Of checks.
    seconds: float = 0.0
    # Of each: kind, features, whether it is Inductor's own, text.
    causes: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    # The program being checked.
    current: str = ""
    done: bool = False

    @staticmethod
    def read(file: Path) -> Progress:
        return Progress(**json.loads(file.read_text())) if file.exists() else Progress()

    def write(self, file: Path) -> None:
        new = file.with_suffix(".new")
        new.write_text(json.dumps(dataclasses.asdict(self)))
        new.replace(file)

    def add(self, kind: str, features: frozenset[str], own: bool, text: str) -> None:
        cause = {"kind": kind, "features": sorted(features), "own": own, "text": text}
        self.causes.append(cause)

    def with_search(self, search: Search) -> Progress:
        progress = dataclasses.replace(
            self,
            differs=self.differs | search.differs,
            features=dict(Counter(self.features) + search.features),
            causes=[*self.causes],
        )
        for cause in search.causes:
            progress.add(*cause.cause, cause.inductors_own, str(cause))
        return progress


def work(file: Path, args: argparse.Namespace) -> int:
    """
    Checks the programs of every n-th chunk, from where ``file`` says, until a file "stop"
    is beside it.
    """
    gc.freeze()  # what is collected after each program is quicker with less to look at
    before = Progress.read(file)
    stop = file.with_name("stop")
    index, workers = map(int, args.part.split("/"))

    def save(current: str = "", done: bool = False) -> None:
        before.current, before.done = current, done
        before.with_search(found).write(file)

    def kept(check: Callable[[Program], Any]) -> Callable[[Program], Any]:
        def checked(program: Program) -> Any:
            save(program.source())
            start = time.monotonic()
            try:
                return check(program)
            except DeviceLost:
                os._exit(LOST)
            except InvalidProgram as error:
                before.add("invalid", program.features, False, f"eager: {error}")
                return None
            finally:
                before.seconds += time.monotonic() - start

        return checked

    check, own = map(kept, CHECKS[args.check])
    calls = args.check != "generated"
    strategy = programs(without=WITHOUT.get(args.check, ()), calls=calls)
    found = Search(strategy, check, own, stop.exists)
    with quiet():
        while not stop.exists():
            chunk = before.chunk * workers + index
            before.chunk += 1
            found.chunk(args.seed * 1_000_003 + chunk, CHUNK)
    save(done=True)
    return 0


def supervise(
    directory: Path, args: argparse.Namespace, script: str = __file__
) -> list[Progress]:
    """
    Runs the workers, again after a crash or a hang, which is a failure of the program that
    was running, until there are enough programs. At the deadline they are killed, whatever
    they do.
    """
    start = time.monotonic()
    files = [directory / f"{i}.json" for i in range(args.jobs)]
    stop = directory / "stop"

    def launch(index: int) -> subprocess.Popen[bytes]:
        # How long it is silent counts from here.
        Progress.read(files[index]).write(files[index])
        command = [sys.executable, script, "--worker", str(files[index])]
        command += ["--part", f"{index}/{args.jobs}"]
        command += ["--seed", str(args.seed), "--check", args.check]
        environment = {**os.environ, **WORKER_ENVIRONMENT}
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)

    running = {index: launch(index) for index in range(args.jobs)}
    restarts = Counter[int]()
    next_report = REPORT_SECONDS
    reported: set[str] = set()  # noqa: set_linter
    try:
        while running and (elapsed := time.monotonic() - start) < args.seconds:
            time.sleep(0.2)
            results = [*map(Progress.read, files)]
            differs = drawn(results)
            if len(differs) >= args.programs or elapsed > DRAWING_PART * args.seconds:
                stop.touch()
            if elapsed > next_report:
                next_report += REPORT_SECONDS
                causes = [cause for r in results for cause in r.causes]
                print(
                    f"{elapsed:.0f} s: {len(differs)} programs, {sum(differs.values())} "
                    f"differ, {len(causes)} causes, {len(running)} workers",
                    flush=True,
                )
                for cause in causes:
                    # Again when it is simpler. A run that is stopped has no summary.
                    if cause["text"] not in reported:
                        reported.add(cause["text"])
                        print(cause["text"], flush=True)
            for index, process in list(running.items()):
                status = process.poll()
                how = "lost the device" if status == LOST else f"ended with {status}"
                if status is None:
                    silent = time.time() - files[index].stat().st_mtime
                    if silent < MAX_CHECK_SECONDS:
                        continue
                    process.kill()
                    process.wait()
                    how = f"no result in {silent:.0f} s"
                del running[index]
                progress = Progress.read(files[index])
                if progress.done:
                    continue
                text = f"{how}\n\n{progress.current}"
                progress.add("crash", frozenset(), False, text)
                progress.write(files[index])
                restarts[index] += 1
                if not stop.exists() and restarts[index] < MAX_RESTARTS:
                    running[index] = launch(index)
    finally:
        for process in running.values():
            process.kill()
        end = time.monotonic() + END_SECONDS
        for process in running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
    return [*map(Progress.read, files)]


def drawn(results: list[Progress]) -> dict[str, bool]:
    return {name: differs for r in results for name, differs in r.differs.items()}


def summary(
    results: list[Progress],
    args: argparse.Namespace,
    wall: float,
    expected: frozenset[str] = frozenset(),
) -> tuple[str, bool]:
    """
    The causes, and a line of JSON; and whether PyGraph is right. ``expected``: features of
    which there should have been programs.

    In the line, programs of runs with different seeds can be added; "causes" are kinds.
    """
    causes: list[dict[str, Any]] = []
    found = [cause for r in results for cause in r.causes]
    for cause in sorted(found, key=lambda c: len(c["features"])):
        pairs = ((c["kind"], c["features"]) for c in causes if c["kind"] != "crash")
        if not any(
            explains(known, (cause["kind"], cause["features"])) for known in pairs
        ):
            causes.append(cause)
    own = [c for c in causes if c["own"]]
    pygraph = [c for c in causes if not c["own"]]
    lines = []
    for cause in [*own, *pygraph]:
        lines += ["=" * 88, f"{cause['kind']}: {', '.join(cause['features'])}"]
        lines += [cause["text"], ""]
    missing = sorted(expected - {name for r in results for name in r.features})
    if missing:
        lines.append(f"never drawn: {', '.join(missing)}")
    differs = drawn(results)
    count, failed = len(differs), sum(differs.values())
    each = sum(r.seconds for r in results) / max(1, count)
    lines.append(
        f"{count} programs of seed {args.seed} in {wall:.0f} s, {each:.2f} s each: "
        f"{count - failed} equal, {failed} differ; causes: {len(pygraph)} of PyGraph, "
        f"{len(own)} of Inductor"
    )
    counts = {
        "check": args.check,
        "seed": args.seed,
        "programs": count,
        "wanted": args.programs,
        "equal": count - failed,
        "differ": failed,
        "causes": [c["kind"] for c in pygraph],
        "inductors_causes": [c["kind"] for c in own],
        "never_drawn": missing,
        "jobs": args.jobs,
        "seconds": round(wall, 1),
        "seconds_each": round(each, 2),
    }
    lines.append(json.dumps(counts))
    return "\n".join(lines), not pygraph


def cpus() -> int:
    """That this process may use: of a container, perhaps less than the machine has."""
    count = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        count = min(count, max(1, quota // period))
    return count


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--until", type=float, help="instead: when, since the epoch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=cpus())
    default = "results" if HAS_CUDA_AND_TRITON else "generated"
    parser.add_argument("--check", choices=CHECKS, default=default)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--part", metavar="I/N", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args.worker, args)
    start = time.monotonic()
    if args.until is not None:
        args.seconds = args.until - time.time()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        results = supervise(Path(directory), args)
    # Without a GPU, programs are compiled and not called again.
    called = ("calls", "between", "no_grad")
    expected = frozenset(
        name
        for name in FEATURES.keys() - WITHOUT.get(args.check, ())
        if args.check != "generated" or not name.startswith(called)
    )
    text, right = summary(results, args, time.monotonic() - start, expected)
    print(text, flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    if any(
        a.startswith(("--programs", "--seconds", "--check", "--worker"))
        for a in sys.argv
    ):
        sys.exit(main())
    run_tests()
