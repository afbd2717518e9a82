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
import itertools
import json
import logging
import math
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo.utils import counters, get_compilation_metrics
from torch._inductor.codecache import PyCodeCache
from torch.utils import _pytree as pytree

from . import jax_peer
from .case import described
from .catalogue import SUITES
from .compare import compare, Difference
from .frames import Frames
from .launches import counting_copies, profiled
from .program import build, clone, Events, HandWritten, in_double_precision, Program, seed, Variant, VARIANTS
from .report import as_choice
from .timing import ENOUGH, fields, LoopFailed, MAX_NOISE, MAX_ROUNDS_S, ratio, time_interleaved


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    from .case import Case, Inputs
    from .report import Row
    from .timing import Timing

    Expected = list[dict[str, Any]]


log = logging.getLogger(__name__)

# Calls until a variant is in its steady state. Selection takes 20 to 410, and times up to four more candidates whose
# kernels run side by side.
SETTLE_CALLS = collections.defaultdict(lambda: 5, no_cg=3, pygraph=65, chain=65)
SETTLE_CALLS |= dict.fromkeys(("forced_copy", "forced_node_update", "forced_prelude"), 10)
SETTLE_CALLS |= dict.fromkeys(("forced_lanes2", "forced_lanes4", "forced_dag"), 10)
MAX_SETTLE_CALLS = 1500
# For how many seconds all variants that select may settle. A program that draws its path may record in each call. A variant
# may use this part of the time that those before it left, and the last one all of it.
MAX_SETTLE_S, SETTLE_PART = 20.0, 0.7
# As many as stock needs to warm up and to record.
MIN_WARM_UP_CALLS = 5
CALLS_WITHOUT_RECORDING = 20
# More than select.py makes before it gives back what the last decision leaves unused.
CALLS_AFTER_DECISION = 10
CHECKS = 4
# Each has a size of its own.
CHECKS_OF_SIZES = 32
# Calls that no CUDA graphs gets to differ from itself in, where PyGraph does: atomics
# change an order of additions only now and then.
REPEATS = 24
EAGER_CHECKS = 2
FORCED = "forced_"
STOCK = ("stock_cg", "stock_whole")
ESSENTIAL = ("eager", "no_cg", "stock_cg", "pygraph")
# Of whose graph breaks a row tells, and what its fields begin with.
TRACED = {"stock_cg": "stock_", "pygraph": "", "mend_off": "mend_off_"}
MAX_SUMMARY = 300
# Of timing one variant: the seconds that are enough, the rounds that are not too few, and
# the calls of a round of the slowest.
MAX_TIMING_S = 2.0
MIN_ROUNDS = 9
CALLS_OF_ROUND = 9
# Calls of random sizes, the most seconds that they take, and how many a variant makes in its turn.
SWEEP_CALLS = 1000
MAX_SWEEP_S = 5.0
SWEPT = ("no_cg", "stock_cg", "pygraph")
CALLS_OF_SWEEP = 20
# After this part of the time that a case may have the machine to itself, nothing is measured again.
AGAIN = 0.35
# Calls of the loop that shows how fast the host is, and how often it runs
HOST_CALLS, HOST_SAMPLES = 200, 9
# Sets of inputs that JAX gets, by way of a file.
RING_IN_JAX = 8
# Where a step's outputs are, of all that it leaves behind.
OUTPUTS = "['outputs']"
# Of a function's report: paths, and numbers that are given in the order of compiling.
OF_ONE_MACHINE = ("source", "compile_id", "number")
MIB = 2**20
# What the results of one time around the ring may take, and those of a step for which
# eager is also run in double precision.
MAX_RING_BYTES = 12 * 2**30
MAX_EXACT_BYTES = 4 * 2**30


def adds_with_atomics() -> bool:
    """Whether a kernel compiled by this process has no one result: the order of its additions is open."""
    sources = (Path(module.__file__) for module in PyCodeCache.modules if module.__file__)
    return any("tl.atomic_add(" in source.read_text() for source in sources if source.exists())


def memory_of_pools() -> dict[str, tuple[int, int]]:
    """What the pools of CUDA graphs reserve, and what the allocator does besides; of either, what is in use."""
    found = {}
    snapshot = torch.cuda.memory_snapshot(include_traces=False)
    for name, is_of_graphs in (("graphs", True), ("others", False)):
        segments = [segment for segment in snapshot if (segment["segment_pool_id"] != (0, 0)) == is_of_graphs]
        reserved, in_use = (sum(segment[size] for segment in segments) for size in ("total_size", "allocated_size"))
        found[name] = (round(reserved / MIB), round(in_use / MIB))
    return found


class DeviceLost(RuntimeError):
    """Nothing runs on the device any more in this process."""


class CaseRun:
    """
    What is done with one case; a Row comes out. ``on_variant`` is told what comes next. Between ``be_quiet(True)`` and
    ``be_quiet(False)`` nothing else runs. ``has_time`` tells whether the case can end with one more variant.
    """

    def __init__(
        self,
        case: Case,
        device: str,
        *,
        small: bool = False,
        variants: dict[str, Variant] | None = None,
        rounds: int | None = None,
        round_s: float | None = None,
        on_variant: Callable[[str], None] = lambda name: None,
        be_quiet: Callable[[bool], None] = lambda begins: None,
        has_time: Callable[[], bool] = lambda: True,
    ) -> None:
        self.case = case
        self.suite = SUITES[case.suite]
        self.device = torch.device(device)
        self.small = small
        if variants is None:
            variants = {name: VARIANTS[name] for name in self.suite.variants}
        self.variants = {name: variant for name, variant in variants.items() if self._applies(variant)}
        self.rounds, self.round_s = rounds or self.suite.rounds, round_s or self.suite.round_s
        # Seconds of a call without CUDA graphs.
        self.call_s = 0.0
        self.on_variant = on_variant
        self.be_quiet = be_quiet
        self.has_time = has_time
        # Seconds for which all else was stopped
        self.quiet_s = 0.0
        # Of stock CUDA graphs' time between rounds
        self.noise = 0.0
        self.bound = self.recorded_at = 0
        # Seconds that are left to settle
        self.settle_s = MAX_SETTLE_S
        # Of an operator in eager mode, before and after each timing
        self.eager_loop_us: list[float] = []
        if case.without_tf32:
            torch.backends.cudnn.allow_tf32 = False
        if case.without_cudnn_attention:
            torch.backends.cuda.enable_cudnn_sdp(False)
        if self.suite.dynamic:
            # Inductor would time the configurations of a reduction in each compilation. Two variants of a program may then
            # get different configurations, whose results differ in the last place.
            torch._inductor.config.deterministic = True
        self.original = build(case, self.device, small)
        weights = self.original.named_parameters() if case.mode == "training" else ()
        self.state = {n: t.detach().clone() for n, t in [*weights, *self.original.named_buffers()]}
        # Inputs of earlier calls stay alive for a while, so that addresses change.
        self.recent: collections.deque[Inputs] = collections.deque(maxlen=min(4, case.ring))
        self.first_inputs: Inputs | None = None
        self.programs: dict[str, Program] = {}
        # PyGraph's reports of their functions, which change after the compilation, and of their graphs.
        self.reported: dict[str, list[Any]] = {}
        self.reported_graphs: dict[str, list[Any]] = {}
        # What PyGraph counted while they were compiled.
        self.counted: dict[str, collections.Counter[str]] = {}
        # Dynamo's graphs and breaks of each variant, also of those whose program was dropped.
        self.frames: dict[str, Frames] = {}
        # How often each variant breaks the graph in its first call. Variants that make more calls meet more breaks.
        self.first_breaks: dict[str, int] = {}
        # The one that runs alone.
        self.loop_alone: Callable[[int], None] | None = None
        # Whether all comparisons with eager were by results in double precision.
        self.known_exactly = True
        self.failed: dict[str, str] = {}
        # Those that there was no time to compile.
        self.left_out: list[str] = []
        # The most GiB that were reserved until all variants had compiled
        self.compile_gib = 0.0
        self.notes: list[str] = []

    def _applies(self, variant: Variant) -> bool:
        if variant.hand_written and not (self.case.capturable and self.device.type == "cuda"):
            return False
        return not variant.in_jax or jax_peer.available(self.case.name)

    def prepare(self) -> None:
        """
        Compile everything, while other processes may do the same. Variants that select go on in a quiet machine. Variants
        for which there is no time are left out.
        """
        needed = {*ESSENTIAL, *self.suite.must_equal, *self.suite.candidates}
        needed |= {name for name, variant in self.variants.items() if variant.selects}
        # What a row cannot do without is compiled first.
        for name in sorted(self.variants, key=lambda name: name not in needed):
            if self.variants[name].in_jax:
                continue
            if name not in needed and not self.has_time():
                del self.variants[name]
                self.left_out.append(name)
                continue
            with self._noting(name):
                self._compile(name)
        self.failed.clear()
        if self.device.type == "cuda":
            self.compile_gib = _reserved_gib(self.device)
            torch.cuda.empty_cache()

    def fill_caches(self, name: str) -> None:
        """Compile a variant for another process of the case, which has the same caches."""
        if name in self.variants:
            self._compile(name)

    def _compile(self, name: str) -> None:
        reset_report()
        counters["pygraph"].clear()
        self._program(name).warm(self._first_inputs())
        self._synchronize()
        found = _pygraph().report()
        self.reported[name], self.reported_graphs[name] = [*found], [*found.graphs]
        self.counted[name] = collections.Counter(counters["pygraph"])
        self.first_breaks[name] = self.frames[name].breaks

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        self.be_quiet(True)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.quiet_s += time.perf_counter() - start
            self.be_quiet(False)

    def measure(self) -> Row:
        first = self._inputs()
        size = _size(self._observe("no_cg", first))
        ring = [first]
        while len(ring) < self.case.ring and (len(ring) < 2 or size * (len(ring) + 1) <= MAX_RING_BYTES):
            ring.append(self._inputs())
        self._synchronize()
        start = time.perf_counter()
        expected = [self._observe("no_cg", inputs) for inputs in ring]
        self._synchronize()
        self.call_s = (time.perf_counter() - start) / len(ring)

        differences: dict[str, Difference] = {}
        timings: dict[str, Timing] = {}
        others = [name for name in self.variants if name not in ("eager", "no_cg", "jax")]
        alone = [name for name in others if self.variants[name].alone and not self.suite.exhaustive]
        entries: list[dict[str, Any]] = []
        counts: dict[str, int] = {}
        has_cpu_values = False
        of_sizes: list[Any] = []
        for name in others:
            if name in alone:
                continue
            with self._noting(name):
                # A variant that failed may succeed now.
                if name not in self.programs:
                    self._compile(name)
                report_again(self.reported[name], self.reported_graphs[name])
                counters["pygraph"].clear()
                with self._quiet() if self.variants[name].selects else contextlib.nullcontext():
                    differences[name] = self._settle(name, ring, expected)
            if name == "pygraph":
                # With those of sizes that came after the compilation.
                self.reported[name] = [*_pygraph().report()]
                of_sizes = [*map(_sizes, self.reported[name])] if self.suite.dynamic else []
                entries = [entry for entry in report() if not hardly_called(entry)]
                counts = dict(self.counted.get(name, collections.Counter()) + counters["pygraph"])
                has_cpu_values = reads_cpu_values()
        names = [name for name in ("eager", "no_cg") if name in self.variants]
        counters["pygraph"].clear()
        timings |= self._time([*names, *differences], ring)
        # Calls that did not go the short way: inputs staged, or nothing replayed.
        self.notes += [f"while timed: {name} {count}" for name, count in counters["pygraph"].items()]
        ratios = {
            name: ratio(timings["pygraph"], timing)
            for name, timing in timings.items()
            if "pygraph" in timings and name != "pygraph"
        }
        measured = [name for name in differences if name in timings]
        checked = self._check(measured)
        repeatable = checked.pop("no_cg").bitwise
        wrong = self._check_with_eager(measured)

        present = ["pygraph"]
        beside_hand: Timing | None = None
        # The step captured by hand comes first, while PyGraph's program is still there. The two take turns.
        for name in sorted(alone, key=lambda name: not self.variants[name].hand_written):
            if self.quiet_s > ENOUGH * self.suite.max_case_s:
                self.notes.append(f"no time to measure {name}")
                continue
            takes_turns = self.variants[name].hand_written and "pygraph" in timings and self._has_memory_for_more()
            while present and not takes_turns:
                self._drop(present.pop())
            present.append(name)
            reset_report()
            with self._noting(name):
                differences[name] = self._settle(name, ring, expected)
                timed = self._time(present if takes_turns else [name], ring)
                if takes_turns:
                    beside_hand = timed.pop("pygraph", None)
                timings |= timed
                found = self._check([name])
                repeatable = found.pop("no_cg").bitwise and repeatable
                checked |= found
                wrong |= self._check_with_eager([name])

        # What a forced candidate fell back to, if it did.
        forced = {
            name.removeprefix(FORCED): totals(report(self.reported.get(name, ())))["choice"]
            for name in timings
            if name.startswith(FORCED)
        }

        in_jax: dict[str, float] = {}
        if "jax" in self.variants:
            with self._noting("jax"):
                in_jax, found = self._in_jax(ring[:RING_IN_JAX], expected)
                if not found.close:
                    self.failed["jax"] = f"wrong result: {found.where} differs from no CUDA graphs'"

        for name, found in checked.items():
            differences[name] |= found
        held = [name for name in self.suite.must_equal if name in differences]
        difference = Difference()
        for name in held:
            difference |= differences[name]
        if not difference.bitwise:
            repeatable = repeatable and not adds_with_atomics() and self._repeats()
            why = "" if repeatable else ", which no CG need not repeat either"
            if has_cpu_values:
                why += ", where PyGraph computes on the CPU what eager mode does"
            self.notes.append(f"differs in {difference.where}{why}")
        # No CUDA graphs computes some of that in compiled code, or on the GPU, and may round otherwise.
        # Kernels of other graphs, and eager mode's at a graph break that stays, may round otherwise.
        to_the_bit = repeatable and not has_cpu_values and self._has_graphs_of("no_cg", held)
        for name in timings:
            found = differences.get(name, Difference())
            if name in wrong:
                self.failed.setdefault(name, f"wrong result: {wrong[name]} differs from eager's")
            elif not found.close and self.known_exactly and (name in STOCK or not to_the_bit):
                # Stock moves some of what the program computes on the CPU to the GPU, which may round
                # otherwise. And what differs from run to run may be nothing but rounding.
                self.notes.append(f"{name} is hardly further from exact results than eager: {found.where}")
            elif not found.close:
                self.failed.setdefault(name, f"wrong result: {found.where} differs from no CUDA graphs'")
            elif name not in held and to_the_bit and not found.bitwise:
                self.notes.append(f"{name} is not bitwise equal: {found.where}")
        # One for which there was no time, or that was not asked for, says nothing of PyGraph.
        asked = [name for name in self.suite.must_equal if name == "pygraph" or name in self.variants]
        succeeded = all(name in timings and name not in self.failed for name in asked)
        right = [name for name in timings if name in self.programs and name not in self.failed]
        to_profile = self.suite.profiled if self.device.type == "cuda" else ()
        swept = self._sweep([name for name in right if name in SWEPT]) if self.suite.dynamic else {}
        launches = self._launched([name for name in to_profile if name in right], ring[:2])
        times = {
            name: round(timings[name].median_us, 2)
            for name in self.suite.candidates
            if name in timings and name not in self.failed
        }
        best = min(times, key=times.__getitem__, default=None)
        return {
            **described(self.case),
            **dict.fromkeys(f"{name}_us" for name in self.variants if name != "jax"),
            **fields(timings),
            **({"pygraph_beside_hand_us": round(beside_hand.median_us, 2)} if beside_hand else {}),
            "ratios": {name: [round(value, 4) for value in interval] for name, interval in ratios.items()},
            **in_jax,
            **totals(entries),
            **self._traced(),
            **({"candidates_us": times, "best": best and as_choice(best)} if self.suite.exhaustive else {}),
            "equal": succeeded and (difference.bitwise or not to_the_bit or (difference.close and self.case.in_tf32)),
            "bitwise": succeeded and difference.bitwise,
            # JSON has no infinity, which stands for results that cannot be subtracted.
            "max_diff": difference.max_diff if math.isfinite(difference.max_diff) else None,
            "repeatable": repeatable,
            **({"forced": forced} if forced else {}),
            **({"schedules": [*map(_schedule, entries)]} if entries and "chain" in self.variants else {}),
            **({"functions": of_sizes} if of_sizes else {}),
            "graphs": entries,
            "counters": counts,
            **({"sweep": swept} if swept else {}),
            **({"launches": launches} if launches else {}),
            **self._circumstances(),
            "failed": self.failed,
            **({"left_out": self.left_out} if self.left_out else {}),
            "note": "; ".join(self.notes),
        }

    def _circumstances(self) -> Row:
        """How steady the machine was, and what the case needs of it."""
        found: Row = {"eager_loop_us": [round(us, 2) for us in self.eager_loop_us]}
        if self.device.type == "cuda":
            found |= {"gib": _reserved_gib(self.device), "compile_gib": self.compile_gib}
        return found | ({"noise": round(self.noise, 3)} if self.noise > MAX_NOISE else {})

    def compile_alone(self, name: str) -> Row:
        """
        Return the seconds of the CPU that the first call of a variant takes, in a process without other variants. The time on
        the wall says less: other processes compile at the same time, and this one is stopped now and then.
        """
        ring = [self._inputs() for _ in range(self.case.ring)]
        if VARIANTS[name].largest:
            # The others stay in memory.
            self.recent.extend(ring)
            ring = [max(ring, key=_size)]
        reset_report()
        self._synchronize()
        start = _cpu_s()
        self.loop_alone = self._program(name).loop(ring)
        self.loop_alone(1)
        self._synchronize()
        return {"compile_s": _cpu_s() - start}

    def settle_alone(self, name: str) -> dict[str, Any]:
        """
        What the calls from there to its steady state cost it: seconds, what the allocator
        then holds, and what a call launches.
        """
        with self._quiet():
            found = self._settled_alone(name, self.loop_alone)
        return {**found, "launches": self._launches(self.loop_alone)}

    def _settled_alone(self, name: str, loop: Callable[[int], None]) -> dict[str, Any]:
        start = settled = time.perf_counter()
        calls, undecided_before = 1, 0
        with self._settling_by(name) as by:
            while calls < MIN_WARM_UP_CALLS or self._settling(name, calls, by):
                loop(1)
                calls += 1
                # Until the last decision: what is hardly called is never decided.
                count = undecided(report())
                if calls <= max(MIN_WARM_UP_CALLS, self._calls_at_new_sizes(name)) or count != undecided_before:
                    self._synchronize()
                    settled = time.perf_counter()
                undecided_before = count
        loop(CALLS_AFTER_DECISION)
        self._synchronize()
        gc.collect()
        return {
            "warm_up_s": round(settled - start, 3),
            "reserved_mib": torch.cuda.memory_reserved() / MIB,
            "peak_reserved_mib": torch.cuda.max_memory_reserved() / MIB,
            "peak_allocated_mib": torch.cuda.max_memory_allocated() / MIB,
            "pools_mib": memory_of_pools(),
            "choice": totals([entry for entry in report() if not hardly_called(entry)])["choice"],
        }

    def _program(self, name: str) -> Program:
        if name not in self.programs:
            variant = self.variants.get(name) or VARIANTS[name]
            kind = HandWritten if variant.hand_written else Program
            self.programs[name] = kind(self.case, self.original, variant, self.device.type)
            self.frames[name] = self.programs[name].frames
        return self.programs[name]

    def _drop(self, name: str) -> None:
        self.programs.pop(name, None)
        gc.collect()

    @contextlib.contextmanager
    def _settling_by(self, name: str) -> Iterator[float]:
        """A context in which a variant settles. Gives until when it may do so, by ``time.perf_counter``."""
        selecting = [other for other, variant in self.variants.items() if variant.selects]
        start = time.perf_counter()
        try:
            yield start + (SETTLE_PART if name in selecting[:-1] else 1.0) * self.settle_s
        finally:
            if self._selects(name):
                self.settle_s -= time.perf_counter() - start

    def _selects(self, name: str) -> bool:
        return (self.variants.get(name) or VARIANTS[name]).selects

    def _settling(self, name: str, calls: int, by: float) -> bool:
        """
        Return whether a variant is not settled after so many calls. After ``by``, it makes the fewest calls that are enough to
        record it.
        """
        is_late = time.perf_counter() >= by
        least, most = SETTLE_CALLS[name], 0 if is_late else MAX_SETTLE_CALLS
        if is_late and self._selects(name):
            # A program that draws its path may record in each of the SETTLE_CALLS.
            least = MIN_WARM_UP_CALLS
        if at_new_sizes := self._calls_at_new_sizes(name):
            return calls < at_new_sizes
        if self.suite.dynamic and name == "by_size":
            # No size comes often enough for a decision.
            most = 0
        return calls < least or (calls < most and (undecided(report()) or self._records(calls)))

    def _records(self, calls: int) -> bool:
        """Whether one of the last calls was recorded: random numbers lead a program with branches to paths that are new."""
        if (bound := counters["pygraph"]["bound_outputs"]) != self.bound:
            self.bound, self.recorded_at = bound, calls
        return self.suite.breaks_graphs and calls < self.recorded_at + CALLS_WITHOUT_RECORDING

    def _calls_at_new_sizes(self, name: str) -> int:
        """Return for how many calls a variant that decides nothing is not steady, since their sizes are new to it."""
        # Each size warms up, is recorded and replayed. Without graphs a library loads kernels at new sizes.
        rounds = {"stock_cg": 3, "no_cg": 1}.get(name, 0) if self.suite.dynamic else 0
        return rounds * self.case.ring

    def _settle(self, name: str, ring: list[Inputs], expected: Expected) -> Difference:
        """
        Runs a variant until it has decided, in a loop that goes around the ring without waiting for the device, as a program
        would. The results are compared after each time around, for a quarter of the time to settle. Those of a variant that
        selects in the loop that is timed are compared by later calls: see Suite.selects_in_loop.
        """
        difference = Difference()
        if self.variants[name].hand_written:
            # Its capture must not count as a step.
            self._step_once(self._program(name))
        calls = self.recorded_at = self.bound = 0
        in_loop = self.suite.selects_in_loop and self.variants[name].selects
        loop: Callable[[int], None] | None = None
        with self._settling_by(name) as by:
            compared_until = 0.75 * time.perf_counter() + 0.25 * by
            while self._settling(name, calls, by):
                calls += len(ring)
                if in_loop or time.perf_counter() > compared_until:
                    loop = loop or self._program(name).loop([clone(inputs) for inputs in ring])
                    loop(len(ring))
                    continue
                results = [self._observe(name, inputs) for inputs in ring]
                for reference, result in zip(expected, results):
                    difference |= compare(reference, result, self.case.tolerance)
        return difference

    def _check(self, names: list[str]) -> dict[str, Difference]:
        """New inputs in each call; no CUDA graphs is also compared with itself."""
        return self._compare_all("no_cg", ["no_cg", *names], CHECKS_OF_SIZES if self.suite.dynamic else CHECKS)

    def _check_with_eager(self, names: list[str]) -> dict[str, str]:
        """Where variants are further from eager than other kernels may be."""
        found: dict[str, Difference] = {}
        if "eager" not in self.variants or "eager" in self.failed:
            self.known_exactly = False
        elif self.case.not_as_eager:
            self.known_exactly = False
            note = f"the suite does not compare its results with eager mode's: {self.case.not_as_eager}"
            self.notes += [note] if note not in self.notes else []
        else:
            with self._noting("eager"):
                found = self._compare_all("eager", ["no_cg", *names], EAGER_CHECKS)
            self.known_exactly &= bool(found)
        return {name: difference.where for name, difference in found.items() if not difference.close}

    def _compare_all(self, reference: str, names: list[str], checks: int) -> dict[str, Difference]:
        total = dict.fromkeys(names, Difference())
        tolerance = self.case.tolerance_of_eager if reference == "eager" else self.case.tolerance
        for _ in range(checks):
            inputs = self._inputs()
            expected = self._observe(reference, inputs)
            exact = None
            if reference == "eager":
                exact = self._exact(inputs) if _size(expected) <= MAX_EXACT_BYTES else {}
                self.known_exactly &= bool(exact)
            for name in names:
                if name in self.failed:
                    continue
                with self._noting(name):
                    result = self._observe(name, inputs)
                    total[name] |= compare(expected, result, tolerance, exact)
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

    def _in_jax(self, ring: list[Inputs], expected: Expected) -> tuple[dict[str, float], Difference]:
        """Microseconds of its calls, and how far its outputs are from those of no CUDA graphs."""

        def bits(t: torch.Tensor) -> tuple[Any, bool]:
            is_bfloat16 = t.dtype == torch.bfloat16
            return (t.view(torch.uint16) if is_bfloat16 else t).detach().cpu().numpy(), is_bfloat16

        weights = dict(itertools.chain(self.original.named_parameters(), self.original.named_buffers()))
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory, "inputs")
            file.write_bytes(pickle.dumps(pytree.tree_map(bits, (weights, ring))))
            command = [sys.executable, "-m", jax_peer.__name__, self.case.name, str(file), str(self._rounds())]
            # PyTorch holds the rest of the memory.
            environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            with self._quiet():
                done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                raise RuntimeError(f"ended with {done.returncode}, see the log")
            answer = json.loads(done.stdout.splitlines()[-1])
            if (answer["platform"] == "cpu") != (self.device.type == "cpu"):
                raise RuntimeError(f"jax {answer['version']} ran on {answer['platform']}")
            outputs = pickle.loads(file.with_suffix(".out").read_bytes())
        self.notes.append(f"jax {answer['version']}")
        difference = Difference()
        for inputs, own, found in list(zip(ring, expected, outputs))[:EAGER_CHECKS]:
            result = {}
            for name, (values, is_bfloat16) in found.items():
                t = torch.from_numpy(values).to(self.device)
                result[name] = t.view(torch.bfloat16) if is_bfloat16 else t
            reference = {name: value for name, value in own.items() if name.startswith(OUTPUTS)}
            difference |= compare(reference, result, self.case.tolerance, self._exact(inputs))
        return {"jax_us": round(answer["median_us"], 2), "jax_host_us": round(answer["host_us"], 2)}, difference

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
        timings = self._timed(loops)
        if "stock_cg" in timings:
            if (
                timings["stock_cg"].noise > MAX_NOISE
                and not self.suite.dynamic
                and self.quiet_s < AGAIN * self.suite.max_case_s
            ):
                timings = self._timed(loops)
            self.noise = timings["stock_cg"].noise
        if (compiled := counters["stats"]["unique_graphs"] - graphs) > 0:
            reasons = [m.recompile_reason or "new code" for m in get_compilation_metrics()[-compiled:]]
            self.notes.append(f"compiled again while timed ({'; '.join(reasons)})")
        return timings

    def _timed(self, loops: dict[str, Callable[[int], None]]) -> dict[str, Timing]:
        while True:
            try:
                with self._quiet():
                    before = eager_loop_us(self.device)
                    timings = time_interleaved(
                        loops,
                        self._synchronize,
                        rounds=self._rounds(),
                        round_s=self.round_s,
                        fixed_calls=self.case.ring if self.suite.dynamic else None,
                        marks=Events.of(self.device),
                        draw=seed if self.suite.breaks_graphs else None,
                        max_rounds_s=min(MAX_ROUNDS_S, ENOUGH * self.suite.max_case_s - self.quiet_s),
                        is_clear=self._is_clear,
                    )
                    self.eager_loop_us += [before, eager_loop_us(self.device)]
            except LoopFailed as failure:
                self._fail(failure.name, failure.__cause__)
                del loops[failure.name]
            else:
                return timings

    def _has_graphs_of(self, reference: str, names: list[str]) -> bool:
        """
        Whether Dynamo broke the graph of programs as often as the reference's and, in suites that break graphs, made as many
        graphs. In other suites a program may run what Dynamo compiled for another one, and count no graph.
        """
        traced = [self.frames[name] for name in (reference, *names) if name in self.frames]
        has_same_breaks = len({frames.breaks for frames in traced}) == 1
        return has_same_breaks and (not self.suite.breaks_graphs or len({frames.graphs for frames in traced}) == 1)

    def _sweep(self, names: list[str]) -> dict[str, Row]:
        """
        Of variants, after they were timed: ``us`` a call, the mean over ``calls`` whose sizes are drawn anew; of PyGraph's
        functions the calls that were ``captured``, and new ``recordings`` for many sizes. What new sizes cost is part of the
        time, such as stock's recordings, but not the kernels that a library loads once a process. The variants take turns,
        since the host is not equally fast all the time. Stock comes last: each of its recordings empties the allocator's
        cache, and the next variant would allocate anew.
        """
        inputs = [self._inputs() for _ in range(SWEEP_CALLS if self.device.type == "cuda" else CALLS_OF_SWEEP)]
        if "no_cg" in names:
            self._program("no_cg").loop(inputs)(len(inputs))
        before = {name: self._captured(name) for name in names}
        seconds, calls = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
        with self._quiet(), _collecting_what_is_new():
            for group in ([name for name in names if name not in STOCK], [name for name in names if name in STOCK]):
                loops = {name: self._program(name).loop(inputs) for name in group}
                for _ in range(0, len(inputs), CALLS_OF_SWEEP):
                    for name in group:
                        if name in self.failed or seconds[name] > MAX_SWEEP_S:
                            continue
                        # In this variant's turn, the collector is not to visit objects of the others.
                        gc.freeze()
                        with self._noting(name):
                            start = time.perf_counter()
                            loops[name](CALLS_OF_SWEEP)
                            self._synchronize()
                            seconds[name] += time.perf_counter() - start
                            calls[name] += CALLS_OF_SWEEP
        found: dict[str, Row] = {}
        for name in names:
            if name not in self.failed:
                captured, recordings = (b - a for a, b in zip(before[name], self._captured(name)))
                us = round(seconds[name] / calls[name] * 1e6, 2)
                found[name] = {"us": us, "calls": calls[name], "captured": captured, "recordings": recordings}
        return found

    def _captured(self, name: str) -> tuple[int, int]:
        """Return how many calls of a variant's functions were captured, and their recordings for many sizes."""
        functions = self.reported.get(name, ())
        return sum(f.captured_calls for f in functions), sum(len(f.buckets) for f in functions)

    def _traced(self) -> Row:
        """Dynamo's graphs and graph breaks of the programs that were measured."""
        found: Row = {}
        for name, prefix in TRACED.items():
            if name in self.frames:
                frames = self.frames[name]
                found |= {f"{prefix}breaks": frames.breaks, f"{prefix}dynamo_graphs": frames.graphs}
                found[f"{prefix}first_breaks"] = self.first_breaks.get(name, frames.breaks)
        return found

    def _is_clear(self, timings: dict[str, Timing]) -> bool:
        """Whether PyGraph is slower than the fastest of the others."""
        others = [timings[name] for name in self.suite.candidates if name in timings]
        if "pygraph" not in timings or not others:
            return True
        fastest = min(others, key=lambda timing: timing.median_us)
        return not ratio(timings["pygraph"], fastest).is_unclear

    def _has_memory_for_more(self) -> bool:
        """Whether the device has as much free memory as this process reserved at most."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return free > torch.cuda.max_memory_reserved(self.device)

    def _rounds(self) -> int:
        """Fewer where even the shortest round takes long."""
        round_s = self.round_s + CALLS_OF_ROUND * self.call_s
        return min(self.rounds, max(MIN_ROUNDS, int(MAX_TIMING_S / round_s)))

    def _launched(self, names: list[str], ring: list[Inputs]) -> dict[str, dict[str, float]]:
        """What a call of each variant launches. The others have notes."""
        found = {}
        for name in names:
            launches = self._launches(self._program(name).loop([clone(inputs) for inputs in ring]))
            if "error" in launches:
                self.notes.append(f"{name} was not profiled: {launches['error']}")
            else:
                found[name] = launches
        return found

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

    def _first_inputs(self) -> Inputs:
        """
        Return inputs to compile a variant with. Of a dynamic program, they have the same sizes for all variants: by the first
        sizes that come, Inductor chooses how a kernel sums, and so what it rounds.
        """
        if not self.suite.dynamic:
            return self._inputs()
        self.first_inputs = self.first_inputs or self._inputs()
        return clone(self.first_inputs)

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


@contextlib.contextmanager
def _collecting_what_is_new() -> Iterator[None]:
    """
    A context in which Python's collector visits only objects that are made in it. Otherwise the variant that is timed when
    the collector visits the objects of all variants, stock's recordings among them, takes longer by that visit.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _reserved_gib(device: torch.device) -> float:
    """Return the most GiB that this process reserved so far."""
    return round(torch.cuda.max_memory_reserved(device) / 2**30, 2)


def _cpu_s() -> float:
    """Return the seconds of the CPU that this process took, and its children that have ended, such as compilers."""
    return sum(os.times()[:4])


def eager_loop_us(device: torch.device) -> float:
    """Microseconds of an operator in eager mode: of the host, wherever its work is short."""
    t = torch.zeros(1, device=device)
    samples = []
    for _ in range(HOST_SAMPLES):
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            t.add_(1)
        samples.append((time.perf_counter() - start) / HOST_CALLS * 1e6)
        t.item()
    return statistics.median(samples)


def summary(error: BaseException) -> str:
    # Dynamo wraps what a backend raises, and what follows the first line is advice.
    error = getattr(error, "inner_exception", error)
    lines = [line.strip().partition(" Stack trace:")[0] for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:MAX_SUMMARY] if lines else ''}"


def report(earlier: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """What PyGraph did with the functions that were reported ``earlier``, and with those since the last reset."""
    return [
        {name: value for name, value in vars(entry).items() if name not in OF_ONE_MACHINE}
        | {"reasons": [reason.as_json() for reason in entry.reasons]}
        for entry in [*earlier, *_pygraph().report()]
    ]


def blockers() -> list[str]:
    """What is left out of the graphs since the last reset, and why."""
    found = [
        f"{blocker.op}: {blocker.reason.code.name}"
        for graph in _pygraph().report().graphs
        for part in (graph, *graph.partitions)
        for blocker in part.blockers
    ]
    return sorted({*found})


def reads_cpu_values() -> bool:
    """Whether GPU code of a graph since the last reset reads CPU values."""
    return any(graph.cpu_values for graph in _pygraph().report().graphs)


def reset_report() -> None:
    _pygraph().reset_report()


def report_again(functions: list[Any], graphs: list[Any]) -> None:
    """Reset PyGraph's report to these functions and graphs. Functions that are compiled later join them."""
    reset_report()
    journal = importlib.import_module("torch._inductor.pygraph.types.journal")
    journal.functions += functions
    journal.graphs += graphs


def _pygraph() -> ModuleType:
    # scripts/gpu_suite asks for the names of cases, and has torch as it is installed.
    return importlib.import_module("torch._inductor.pygraph")


def _size(tree: Any) -> int:
    return sum(t.numel() * t.element_size() for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor))


def undecided(entries: list[dict[str, Any]]) -> int:
    return sum(entry["choice"] == "undecided" for entry in entries)


def hardly_called(entry: dict[str, Any]) -> bool:
    """Whether it was not even timed once all has settled: the program calls it in its first steps alone."""
    return entry["choice"] == "undecided" and not entry["timings_us"]


def _sizes(entry: Any) -> dict[str, Any]:
    """The sizes of a function that came, the buckets of its recordings, and its calls once it was recorded."""
    keys = "choice", "num_sizes", "buckets", "calls", "captured_calls", "by_size"
    return {key: getattr(entry, key) for key in keys}


def _schedule(entry: dict[str, Any]) -> dict[str, Any]:
    """Return what the report says of a function's schedule: the choice, the times, the critical path, the memory."""
    keys = ("choice", "schedule", "timings_us", "calls_us", "critical_us", "width", "pool_bytes")
    return {key: entry.get(key) for key in keys}


def totals(entries: list[dict[str, Any]]) -> dict[str, Any]:
    choices = sorted(collections.Counter(entry["choice"] for entry in entries).items())
    choice = " + ".join(f"{count} {name}" for name, count in choices)
    if len(choices) < 2:
        choice = choices[0][0] if choices else None
    return {
        "choice": choice,
        "copied_bytes": sum(entry["copied_bytes"] for entry in entries),
        "stock_copied_bytes": sum(entry["stock_copied_bytes"] for entry in entries),
    }
