# Owner(s): ["module: inductor"]
"""
Random programs, compiled with PyGraph and compared with eager in everything observable.

As a test, a fixed set of programs: generated code without a GPU, results with one. As a
script, on a machine with a GPU, as many as the time allows:

    python test_pygraph_differential.py --programs 2000 --seconds 300 --seed 0 --jobs 8

prints each cause of a difference once, as a shrunk program, and a line that counts.
``--shards i/n`` draws the i-th of n parts of the programs; --jobs draws all in n processes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
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

import torch
import torch._dynamo
import torch._inductor.compile_fx as compile_fx
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
from torch.testing._internal.pygraph_programs import (
    Difference,
    difference,
    FEATURES,
    observe,
    Program,
    programs,
)


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Compile = Callable[[torch.nn.Module], Callable[..., Any]]

# Features of programs that are known to go wrong, and why: programs are drawn without.
KNOWN_GAPS: dict[str, str] = {}
# torch.compile without CUDA graphs does not equal eager in these.
INDUCTORS_OWN = {
    "mutation: float64 scalar": "AOTAutograd, even with aot_eager, loses the mutation",
    "return: view": "of a view of its own tensor, Inductor returns a dense copy",
    "scalar: NumPy promotes": "Dynamo makes a NumPy scalar a 0-d tensor of its own dtype",
}
# Nothing has a value there.
NOT_WITHOUT_A_GPU = {
    "item": "fake tensors have no values to read",
    "backward: CPU": "fake tensors on the CPU take no gradient there",
}
EXCLUDED = KNOWN_GAPS.keys() | INDUCTORS_OWN.keys()

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
        inductors_own: whether that is so without CUDA graphs too; asked once for each cause
        seconds: programs that are drawn later are not checked
    """

    def __init__(
        self,
        strategy: st.SearchStrategy[Program],
        check: Callable[[Program], Difference | None],
        inductors_own: Callable[[Program], bool],
        seconds: float,
        shrink_seconds: float = 60.0,
    ) -> None:
        self.strategy = strategy
        self.check = check
        self.inductors_own = inductors_own
        self.deadline = time.monotonic() + seconds
        self.shrink_seconds = shrink_seconds
        self.results: dict[str, Failure | None] = {}
        self.causes: list[Failure] = []
        self.features: Counter[str] = Counter()
        self.drawn = 0
        self.failed = 0

    @property
    def time_left(self) -> float:
        return self.deadline - time.monotonic()

    def chunk(self, seed: int, count: int) -> None:
        def look(program: Program) -> None:
            if self.time_left < 0 or program.source() in self.results:
                return
            self.drawn += 1
            self.features.update(program.features)
            failure = self.result(program)
            if failure is None:
                return
            self.failed += 1
            if not any(explains(cause.cause, failure.cause) for cause in self.causes):
                shrunk = self.shrink(failure)
                own = self.inductors_own(shrunk.program)
                self.causes.append(dataclasses.replace(shrunk, inductors_own=own))

        settings = hypothesis.settings(
            max_examples=count,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        hypothesis.seed(seed)(settings(hypothesis.given(self.strategy)(look)))()

    def result(self, program: Program) -> Failure | None:
        source = program.source()
        if source not in self.results:
            found = self.check(program)
            self.results[source] = Failure(program, found) if found else None
        return self.results[source]

    def shrink(self, failure: Failure) -> Failure:
        until = min(self.deadline, time.monotonic() + self.shrink_seconds)
        for program in failure.program.simpler():
            if time.monotonic() > until:
                break
            simpler = self.result(program)
            if simpler is not None and simpler.kind == failure.kind:
                return self.shrink(simpler)
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


def search(
    strategy: st.SearchStrategy[Program],
    check: Callable[[Program], Difference | None],
    count: int,
    seconds: float,
    inductors_own: Callable[[Program], bool] = lambda program: False,
) -> Search:
    found = Search(strategy, check, inductors_own, seconds)
    with quiet():
        found.chunk(0, count)
    return found


def pygraphs_own(found: Search) -> list[str]:
    return [str(cause) for cause in found.causes if not cause.inductors_own]


class ProgramsTest(TestCase):
    """The comparison would see a difference, and sees none where there is none."""

    def test_equal(self) -> None:
        found = search(
            programs(without=["layout: alias", *INDUCTORS_OWN]),
            on_cpu("aot_eager"),
            20,
            60.0,
        )
        self.assertEqual(list(map(str, found.causes)), [])
        self.assertGreater(found.drawn, 10)

    @parametrize("name", sorted(WRONG))
    def test_wrong_backend(self, name: str) -> None:
        backend = getattr(WrongBackend, name)
        found = Search(programs(), on_cpu(backend), lambda program: False, 60.0, 0.0)
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
    def arguments(self, **kwargs: Any) -> argparse.Namespace:
        defaults = {"programs": 6, "seconds": 60.0, "seed": 1, "shards": "0/1"}
        return argparse.Namespace(**defaults, **kwargs)

    def test_worker(self) -> None:
        self.addCleanup(gc.unfreeze)
        with (
            tempfile.TemporaryDirectory() as directory,
            mock.patch(f"{__name__}.CHUNK", 5),
        ):
            file = Path(directory, "progress.json")
            self.assertEqual(work(file, self.arguments(check="raises_later")), 0)
            progress = Progress.read(file)
        self.assertTrue(progress.done)
        self.assertGreaterEqual(progress.drawn, 6)
        self.assertGreater(progress.failed, 1)
        text, right = summary([progress, progress], wall=1.0)
        self.assertFalse(right)
        self.assertEqual(text.count("exception: RuntimeError: replay failed: "), 1)
        self.assertRegex(text, r"\n\d+ programs in .* causes: 1 of PyGraph, 0 of Ind")

    def test_worker_that_crashes(self) -> None:
        "A failure of the program that was running, and the next ones still run."
        worker = """
            import json, pathlib, sys
            file = pathlib.Path(sys.argv[sys.argv.index("--worker") + 1])
            chunk = json.loads(file.read_text())["chunk"] if file.exists() else 0
            state = json.loads(file.read_text()) if file.exists() else {}
            state |= {"chunk": chunk + 1, "current": "x = 1", "done": chunk == 2}
            file.write_text(json.dumps(state))
            sys.exit(0 if chunk == 2 else 7)
        """
        with tempfile.TemporaryDirectory() as directory:
            script = Path(directory, "worker.py")
            script.write_text(textwrap.dedent(worker))
            arguments = self.arguments(check="results", jobs=1)
            (progress,) = supervise(Path(directory), arguments, str(script))
        self.assertTrue(progress.done)
        texts = [cause["text"] for cause in progress.causes]
        self.assertEqual(texts, ["ended with 7\n\nx = 1"] * 2)


class GeneratedCodeTest(TestCase):
    """On a machine that need not have a GPU."""

    def test_programs(self) -> None:
        found = search(
            programs(without=EXCLUDED | NOT_WITHOUT_A_GPU.keys(), calls=False),
            check_generated_code,
            25,
            120.0,
            generated_code_differs_without_graphs,
        )
        self.assertEqual(pygraphs_own(found), [])
        self.assertGreater(found.drawn, 12)


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


@dataclasses.dataclass
class Progress:
    """What a worker leaves behind, also if it crashes; it goes on at ``chunk``."""

    chunk: int = 0
    drawn: int = 0
    failed: int = 0
    seconds: float = 0.0
    features: dict[str, int] = dataclasses.field(default_factory=dict)
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


def work(file: Path, args: argparse.Namespace) -> int:
    """Checks this shard's programs, from where ``file`` says."""
    gc.freeze()  # what is collected after each program is quicker with less to look at
    progress = Progress.read(file)
    shard, shards = map(int, args.shards.split("/"))
    check, own = CHECKS[args.check]

    def timed(program: Program) -> Difference | None:
        progress.current = program.source()
        progress.write(file)
        start = time.monotonic()
        try:
            return check(program)
        except DeviceLost:
            progress.write(file)
            os._exit(LOST)
        except InvalidProgram as error:
            progress.add("invalid", program.features, False, f"eager: {error}")
            return None
        finally:
            progress.seconds += time.monotonic() - start

    calls = args.check != "generated"
    strategy = programs(without=WITHOUT.get(args.check, ()), calls=calls)
    drawn, failed = progress.drawn, progress.failed
    found = Search(strategy, timed, own, args.seconds)
    wanted = -(-args.programs // shards)
    features = Counter(progress.features)
    reported = 0
    with quiet():
        while drawn + found.drawn < wanted and found.time_left > 0:
            # A crash goes on with the next one.
            progress.chunk += 1
            progress.write(file)
            found.chunk((args.seed * shards + shard) * 100_003 + progress.chunk, CHUNK)
            for cause in found.causes[reported:]:
                inductors_own = cause.inductors_own
                progress.add(
                    cause.kind, cause.program.features, inductors_own, str(cause)
                )
            reported = len(found.causes)
            progress.drawn, progress.failed = drawn + found.drawn, failed + found.failed
            progress.features = dict(features + found.features)
    progress.done = True
    progress.write(file)
    return 0


def supervise(
    directory: Path, args: argparse.Namespace, script: str = __file__
) -> list[Progress]:
    """Runs the workers, again after a crash, which is a failure of the program it ran."""
    deadline = time.monotonic() + args.seconds
    if args.jobs > 1:
        shards = [f"{i}/{args.jobs}" for i in range(args.jobs)]
    else:
        shards = [args.shards]

    def start(index: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, script, "--worker", str(files[index])]
        command += ["--shards", shards[index], "--programs", str(args.programs)]
        command += ["--seed", str(args.seed), "--check", args.check]
        command += ["--seconds", str(max(0.0, deadline - time.monotonic()))]
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)

    files = [directory / f"{i}.json" for i in range(len(shards))]
    running = {index: start(index) for index in range(len(shards))}
    restarts = Counter[int]()
    try:
        while running:
            time.sleep(0.1)
            for index, process in list(running.items()):
                # Programs are small: one that takes a minute hangs.
                if time.monotonic() > deadline + 60:
                    process.kill()
                    process.wait()
                if (status := process.poll()) is None:
                    continue
                del running[index]
                progress = Progress.read(files[index])
                if progress.done:
                    continue
                how = "lost the device" if status == LOST else f"ended with {status}"
                progress.add(
                    "crash", frozenset(), False, f"{how}\n\n{progress.current}"
                )
                progress.write(files[index])
                restarts[index] += 1
                if time.monotonic() < deadline and restarts[index] < MAX_RESTARTS:
                    running[index] = start(index)
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    return list(map(Progress.read, files))


def summary(
    results: list[Progress], wall: float, expected: frozenset[str] = frozenset()
) -> tuple[str, bool]:
    """
    The causes and a line that counts, and whether PyGraph is right. ``expected``: features
    of which there should have been programs.
    """
    drawn, failed = sum(r.drawn for r in results), sum(r.failed for r in results)
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
    drawn_features = {name for r in results for name in r.features}
    if missing := sorted(expected - drawn_features):
        lines.append(f"never drawn: {', '.join(missing)}")
    each = sum(r.seconds for r in results) / max(1, drawn)
    lines.append(
        f"{drawn} programs in {wall:.0f} s, {each:.2f} s each: {drawn - failed} equal, "
        f"{failed} differ; causes: {len(pygraph)} of PyGraph, {len(own)} of Inductor"
    )
    return "\n".join(lines), not pygraph


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", default="0/1", metavar="I/N")
    parser.add_argument("--jobs", type=int, default=1)
    default = "results" if HAS_CUDA_AND_TRITON else "generated"
    parser.add_argument("--check", choices=CHECKS, default=default)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args.worker, args)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        results = supervise(Path(directory), args)
    # Without a GPU, programs are compiled and not called again.
    called = ("calls", "between", "no_grad")
    expected = frozenset(
        name
        for name in FEATURES.keys() - WITHOUT.get(args.check, ())
        if args.check != "generated" or not name.startswith(called)
    )
    text, right = summary(results, time.monotonic() - start, expected)
    print(text)
    return 0 if right else 1


if __name__ == "__main__":
    if any(
        a.startswith(("--programs", "--seconds", "--check", "--worker"))
        for a in sys.argv
    ):
        sys.exit(main())
    run_tests()
