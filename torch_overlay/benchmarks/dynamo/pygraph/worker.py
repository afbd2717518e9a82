"""
One case in a process of its own: a case that fails, be it with an error of the device,
takes no other with it, and what one case left in memory does not count for the next.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import gc
import importlib
import logging
import math
import time
from pathlib import Path
from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo.utils import counters
from torch._inductor.codecache import PyCodeCache
from torch.utils import _pytree as pytree

from .cases import described, SUITES
from .compare import compare, Difference
from .launches import counting_copies, profiled
from .program import build, clone, HandWritten, in_double_precision, Program, Variant, VARIANTS
from .timing import LoopFailed, time_interleaved


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from .cases import Case, Inputs
    from .report import Row
    from .timing import Timing

    Expected = list[dict[str, Any]]


log = logging.getLogger(__name__)

# Calls until a variant is in its steady state. Selection takes 12 to 20.
SETTLE_CALLS = collections.defaultdict(lambda: 5, no_cg=3, pygraph=30, forced_copy=10, forced_node_update=10)
MAX_SETTLE_CALLS = 90
# As many as stock needs to warm up and to record.
MIN_WARM_UP_CALLS = 5
CHECKS = 4
# Calls that no CUDA graphs gets to differ from itself in, where PyGraph does: atomics
# change an order of additions only now and then.
REPEATS = 24
EAGER_CHECKS = 2
ESSENTIAL = ("no_cg", "stock_cg", "pygraph")
MAX_SUMMARY = 300
# Of a function's report: paths, and numbers that are given in the order of compiling.
OF_ONE_MACHINE = ("source", "compile_id", "number")
MIB = 2**20
# What the results of one time around the ring may take, and those of a step for which
# eager is also run in double precision.
MAX_RING_BYTES = 12 * 2**30
MAX_EXACT_BYTES = 2**30


def adds_with_atomics() -> bool:
    """Whether a kernel compiled by this process has no one result: the order of its additions is open."""
    sources = (Path(module.__file__) for module in PyCodeCache.modules if module.__file__)
    return any("tl.atomic_add(" in source.read_text() for source in sources if source.exists())


class DeviceLost(RuntimeError):
    """Nothing runs on the device any more in this process."""


class CaseRun:
    """What is done with one case; a Row comes out. ``on_variant`` is told what comes next."""

    def __init__(
        self,
        case: Case,
        device: str,
        *,
        small: bool = False,
        variants: dict[str, Variant] | None = None,
        rounds: int | None = None,
        round_s: float = 0.05,
        on_variant: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.case = case
        self.suite = SUITES[case.suite]
        self.device = torch.device(device)
        self.small = small
        if variants is None:
            variants = {name: VARIANTS[name] for name in self.suite.variants}
        self.variants = {name: variant for name, variant in variants.items() if self._applies(variant)}
        self.timing = {"rounds": rounds or self.suite.rounds, "round_s": round_s}
        self.on_variant = on_variant
        # The variants of a case, and the modules of a kind inside it, share code objects.
        torch._dynamo.config.recompile_limit = 64
        self.original = build(case, self.device, small)
        weights = self.original.named_parameters() if case.mode == "training" else ()
        self.state = {n: t.detach().clone() for n, t in [*weights, *self.original.named_buffers()]}
        # Inputs of earlier calls stay alive for a while, so that addresses change.
        self.recent: collections.deque[Inputs] = collections.deque(maxlen=min(4, case.ring))
        self.programs: dict[str, Program] = {}
        self.failed: dict[str, str] = {}
        self.notes: list[str] = []

    def _applies(self, variant: Variant) -> bool:
        if variant.hand_written and not (self.case.capturable and self.device.type == "cuda"):
            return False
        return variant.available

    def prepare(self, seconds: str = "inf") -> None:
        """
        Compiles everything once, while other processes may do the same. The variants that
        measure themselves are only brought into the caches: they start over in a quiet
        machine. Those for which there is no time are left out.
        """
        deadline = time.monotonic() + float(seconds)
        # The selecting ones share what is compiled.
        selecting = [name for name, variant in self.variants.items() if variant.selects]
        others = [name for name, variant in self.variants.items() if not (variant.selects or variant.hand_written)]
        for name in [*selecting, None, *others]:
            if name is None:
                self.programs.clear()
                self._reset()
            elif name not in ESSENTIAL and time.monotonic() > deadline:
                del self.variants[name]
                self.notes.append(f"no time to compile {name}")
            else:
                with self._noting(name):
                    self._step_once(self._program(name))
        self.failed.clear()

    def measure(self) -> Row:
        reset_report()
        counters["pygraph"].clear()
        first = self._inputs()
        size = _size(self._observe("no_cg", first))
        ring = [first]
        while len(ring) < self.case.ring and (len(ring) < 2 or size * (len(ring) + 1) <= MAX_RING_BYTES):
            ring.append(self._inputs())
        expected = [self._observe("no_cg", inputs) for inputs in ring]

        differences: dict[str, Difference] = {}
        timings: dict[str, Timing] = {}
        others = [name for name in self.variants if name not in ("eager", "no_cg")]
        together = [name for name in others if not self.variants[name].alone]
        for name in together:
            with self._noting(name):
                differences[name] = self._settle(name, ring, expected)
        entries, counts = report(), dict(counters["pygraph"])
        names = [name for name in ("eager", "no_cg") if name in self.variants]
        timings |= self._time([*names, *differences], ring)
        measured = [name for name in differences if name in timings]
        checked = self._check(measured)
        repeatable = checked.pop("no_cg").bitwise
        wrong = self._check_with_eager(measured)

        for name in others:
            if not self.variants[name].alone:
                continue
            self._drop("pygraph")
            reset_report()
            with self._noting(name):
                differences[name] = self._settle(name, ring, expected)
                timings |= self._time([name], ring)
                found = self._check([name])
                repeatable = found.pop("no_cg").bitwise and repeatable
                checked |= found
                wrong |= self._check_with_eager([name])
            self._drop(name)

        for name, found in checked.items():
            differences[name] |= found
        held = [name for name in self.suite.must_equal if name in differences]
        difference = Difference()
        for name in held:
            difference |= differences[name]
        if not difference.bitwise:
            repeatable = repeatable and not adds_with_atomics() and self._repeats()
            why = "" if repeatable else ", which no CG need not repeat either"
            self.notes.append(f"differs in {difference.where}{why}")
        for name in timings:
            found = differences.get(name, Difference())
            if name in wrong:
                self.failed.setdefault(name, f"wrong result: {wrong[name]} differs from eager's")
            elif not found.close:
                self.failed.setdefault(name, f"wrong result: {found.where} differs from no CUDA graphs'")
            elif name not in held and repeatable and not found.bitwise:
                self.notes.append(f"{name} is not bitwise equal: {found.where}")
        succeeded = all(name in timings and name not in self.failed for name in self.suite.must_equal)
        return {
            **described(self.case),
            **{f"{name}_us": _median(timings.get(name)) for name in self.variants},
            "spread": {name: round(t.iqr_us, 2) for name, t in timings.items()},
            "host_us": {name: round(t.host_us, 2) for name, t in timings.items()},
            **totals(entries),
            "equal": succeeded and (difference.bitwise or (difference.close and not repeatable)),
            "bitwise": succeeded and difference.bitwise,
            # JSON has no infinity, which stands for results that cannot be subtracted.
            "max_diff": difference.max_diff if math.isfinite(difference.max_diff) else None,
            "repeatable": repeatable,
            "graphs": entries,
            "counters": counts,
            "failed": self.failed,
            "note": "; ".join(self.notes),
        }

    def solo(self, name: str) -> dict[str, Any]:
        """
        What one variant costs a program that has no other: the seconds of its first call
        and from there to its steady state, what the allocator then holds, and what a call
        launches.
        """
        ring = [self._inputs() for _ in range(self.case.ring)]
        reset_report()
        self._synchronize()
        start = time.perf_counter()
        loop = self._program(name).loop(ring)
        loop(1)
        self._synchronize()
        compiled = time.perf_counter()
        calls, settled = 1, None
        while settled is None or self._settling(name, calls):
            loop(1)
            calls += 1
            if (
                settled is None
                and calls >= MIN_WARM_UP_CALLS
                and (calls >= MAX_SETTLE_CALLS or not undecided(report()))
            ):
                self._synchronize()
                settled = time.perf_counter()
        self._synchronize()
        gc.collect()
        return {
            "compile_s": round(compiled - start, 3),
            "warm_up_s": round(settled - compiled, 3),
            "reserved_mib": torch.cuda.memory_reserved() / MIB,
            "peak_reserved_mib": torch.cuda.max_memory_reserved() / MIB,
            "peak_allocated_mib": torch.cuda.max_memory_allocated() / MIB,
            "choice": totals(report())["choice"],
            **({"launches": self._launches(loop)} if self.suite.profile else {}),
        }

    def _program(self, name: str) -> Program:
        if name not in self.programs:
            variant = self.variants[name]
            kind = HandWritten if variant.hand_written else Program
            self.programs[name] = kind(self.case, self.original, variant, self.device.type)
        return self.programs[name]

    def _drop(self, name: str) -> None:
        self.programs.pop(name, None)
        gc.collect()

    def _settling(self, name: str, calls: int) -> bool:
        return calls < SETTLE_CALLS[name] or (undecided(report()) and calls < MAX_SETTLE_CALLS)

    def _settle(self, name: str, ring: list[Inputs], expected: Expected) -> Difference:
        """
        Runs a variant until it has decided. It does so in a loop that goes around the
        ring without waiting for the device, as a program would; the results are compared
        after each time around.
        """
        difference = Difference()
        if self.variants[name].hand_written:
            # Its capture must not count as a step.
            self._step_once(self._program(name))
        calls = 0
        while self._settling(name, calls):
            results = [self._observe(name, inputs) for inputs in ring]
            for reference, result in zip(expected, results):
                difference |= compare(reference, result, self.case.tolerance)
            calls += len(ring)
        return difference

    def _check(self, names: list[str]) -> dict[str, Difference]:
        """New inputs in each call; no CUDA graphs is also compared with itself."""
        return self._compare_all("no_cg", ["no_cg", *names], CHECKS)

    def _check_with_eager(self, names: list[str]) -> dict[str, str]:
        """Where variants are further from eager than other kernels may be."""
        if "eager" not in self.variants or "eager" in self.failed:
            return {}
        if self.case.not_as_eager:
            note = f"not compared with eager: {self.case.not_as_eager}"
            self.notes += [note] if note not in self.notes else []
            return {}
        found: dict[str, Difference] = {}
        with self._noting("eager"):
            found = self._compare_all("eager", ["no_cg", *names], EAGER_CHECKS)
        return {name: difference.where for name, difference in found.items() if not difference.close}

    def _compare_all(self, reference: str, names: list[str], checks: int) -> dict[str, Difference]:
        total = dict.fromkeys(names, Difference())
        for _ in range(checks):
            inputs = self._inputs()
            expected = self._observe(reference, inputs)
            exact = None
            if reference == "eager":
                exact = self._exact(inputs) if _size(expected) <= MAX_EXACT_BYTES else {}
            for name in names:
                if name in self.failed:
                    continue
                with self._noting(name):
                    result = self._observe(name, inputs)
                    total[name] |= compare(expected, result, self.case.tolerance, exact)
        return total

    def _exact(self, inputs: Inputs) -> dict[str, Any]:
        """The results of eager in double precision, as far as it can be had."""
        try:
            case = dataclasses.replace(self.case, dtype=torch.float32)  # no autocast
            program = Program(case, copy.deepcopy(self.original).double(), VARIANTS["eager"], self.device.type)
            state = {name: in_double_precision(value) for name, value in self.state.items()}
            return program.observe(in_double_precision(inputs), state)
        except Exception as error:
            self._look_at_device("double precision", error)
            note = f"no double-precision reference: {summary(error)}"
            if note not in self.notes:
                self.notes.append(note)
            return {}

    def _repeats(self) -> bool:
        for _ in range(REPEATS):
            inputs = self._inputs()
            reference = self._observe("no_cg", inputs)
            if not compare(reference, self._observe("no_cg", inputs), self.case.tolerance).bitwise:
                return False
        return True

    def _observe(self, name: str, inputs: Inputs) -> dict[str, Any]:
        self.recent.append(clone(inputs))
        return self._program(name).observe(self.recent[-1], self.state)

    def _time(self, names: list[str], ring: list[Inputs]) -> dict[str, Timing]:
        self.on_variant(names[0] if len(names) == 1 else "")
        # Of the ring's values, since a case may change its inputs.
        buffers = [clone(inputs) for inputs in ring]
        loops = {name: self._program(name).loop(buffers) for name in names if name not in self.failed}
        graphs = counters["stats"]["unique_graphs"]
        timings = None
        while timings is None:
            try:
                timings = time_interleaved(loops, self._synchronize, **self.timing)
            except LoopFailed as failure:
                self._fail(failure.name, failure.__cause__)
                del loops[failure.name]
        if counters["stats"]["unique_graphs"] != graphs:
            self.notes.append("compiled again while timed")
        return timings

    def _launches(self, loop: Callable[[int], None]) -> dict[str, float]:
        """Per call; the last thing in a process, since the profiler stays attached to the device."""
        try:
            with counting_copies() as sizes:
                loop(1)
            return {"copied_bytes": sum(sizes), **profiled(lambda: loop(1))}
        except Exception as error:
            log.exception("%s was not profiled", self.case.name)
            return {"error": summary(error)}

    def _step_once(self, program: Program) -> None:
        program.loop([self._inputs()])(1)
        self._synchronize()

    def _inputs(self) -> Inputs:
        with self.device:
            return self.case.inputs(self.small)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _reset(self) -> None:
        torch._dynamo.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        """A variant that fails leaves the others their results."""
        self.on_variant(name)
        try:
            yield
        except DeviceLost:
            raise
        except Exception as error:
            self._fail(name, error)

    def _fail(self, name: str, error: BaseException) -> None:
        log.error("%s, %s", self.case.name, name, exc_info=error)
        self.failed[name] = summary(error)
        self._look_at_device(name, error)
        self._drop(name)

    def _look_at_device(self, name: str, error: BaseException) -> None:
        try:
            self._synchronize()
        except Exception:
            # Some errors end all use of the device by the process.
            self.on_variant(name)
            raise DeviceLost(summary(error)) from error
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def summary(error: BaseException) -> str:
    # Dynamo wraps what a backend raises, and what follows the first line is advice.
    error = getattr(error, "inner_exception", error)
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()[:MAX_SUMMARY] if lines else ''}"


def report() -> list[dict[str, Any]]:
    """What PyGraph did with each function since the last reset."""
    pygraph = _pygraph()
    entries = pygraph.report() if pygraph else ()
    return [
        {name: value for name, value in dataclasses.asdict(entry).items() if name not in OF_ONE_MACHINE}
        for entry in entries
    ]


def blockers() -> list[str]:
    """What is left out of the graphs since the last reset, and why."""
    pygraph = _pygraph()
    graphs = pygraph.report().graphs if pygraph else ()
    found = [
        f"{blocker.op}: {blocker.reason}"
        for graph in graphs
        for partition in graph.partitions
        for blocker in partition.blockers
    ]
    skipped = [graph.skip_reason for graph in graphs if graph.skip_reason]
    return sorted({*found, *skipped})


def reset_report() -> None:
    pygraph = _pygraph()
    if pygraph:
        pygraph.reset_report()


def _pygraph() -> ModuleType | None:
    # A stock build has none, and its baselines can still be timed.
    with contextlib.suppress(ImportError):
        return importlib.import_module("torch._inductor.pygraph")
    return None


def _size(tree: Any) -> int:
    return sum(t.numel() * t.element_size() for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor))


def _median(timing: Timing | None) -> float | None:
    return None if timing is None else round(timing.median_us, 2)


def undecided(entries: list[dict[str, Any]]) -> bool:
    return any(entry["choice"] == "undecided" for entry in entries)


def totals(entries: list[dict[str, Any]]) -> dict[str, Any]:
    choices = {
        choice: sum(entry["choice"] == choice for entry in entries)
        for choice in sorted({entry["choice"] for entry in entries})
    }
    if len(choices) > 1:
        choice = " + ".join(f"{count} {name}" for name, count in choices.items())
    else:
        choice = next(iter(choices), None)
    return {
        "choice": choice,
        "copied_bytes": sum(entry["copied_bytes"] for entry in entries),
        "stock_copied_bytes": sum(entry["stock_copied_bytes"] for entry in entries),
    }
