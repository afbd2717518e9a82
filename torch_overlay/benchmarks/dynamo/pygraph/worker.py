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
import logging
import math
from pathlib import Path
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor.codecache import PyCodeCache
from torch.utils import _pytree as pytree

from .compare import compare, Difference, snapshot
from .timing import time_interleaved


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from torch import nn

    from .cases import Case, Inputs
    from .report import Row
    from .timing import Timing

    Expected = list[dict[str, Any]]


log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to compile a case."""

    compile: dict[str, Any]
    # Inductor's configuration while it runs.
    config: dict[str, Any] = dataclasses.field(default_factory=dict)


FORCED = {"pygraph": True, "pygraph_force": "node_update"}

VARIANTS = {
    "no_cg": Variant({}),
    "stock_cg": Variant({"mode": "reduce-overhead"}),
    "pygraph": Variant({"options": {"pygraph": True}}),
    "forced": Variant({"options": FORCED}, FORCED),
}

# Calls until a variant is in its steady state. Selection takes 12 to 20.
SETTLE_CALLS = {"no_cg": 3, "stock_cg": 5, "pygraph": 30, "forced": 10}
MAX_SETTLE_CALLS = 90
CHECKS = 4
# Calls that no CUDA graphs gets to differ from itself in, where PyGraph does: atomics
# change an order of additions only now and then.
REPEATS = 24
MAX_SUMMARY = 300
MIB = 2**20


def adds_with_atomics() -> bool:
    """Whether a kernel compiled by this process has no one result: the order of its additions is open."""
    sources = (Path(module.__file__) for module in PyCodeCache.modules if module.__file__)
    return any("tl.atomic_add(" in source.read_text() for source in sources if source.exists())


class Program:
    """A case compiled in one way, with weights of its own."""

    def __init__(self, case: Case, original: nn.Module, variant: Variant, device_type: str) -> None:
        self.case = case
        self.device_type = device_type
        self.module = copy.deepcopy(original)
        self.compiled = torch.compile(self.module, **variant.compile)
        self.config = variant.config
        self.optimizer = None
        if case.mode == "training":
            self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-3)

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.optimizer is None:
            return self.compiled(*args, **kwargs)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device_type, self.case.dtype, enabled=self.case.autocast):
            out = self.compiled(*args, **kwargs)
        loss = out.float().square().mean() if isinstance(out, torch.Tensor) else out.loss
        loss.backward()
        self.optimizer.step()
        return out

    @contextlib.contextmanager
    def configured(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.config:
                stack.enter_context(torch._inductor.config.patch(self.config))
            stack.enter_context(torch.set_grad_enabled(self.case.mode == "training"))
            yield

    def loop(self, ring: list[Inputs]) -> Callable[[int], None]:
        inputs = itertools.cycle(ring)

        def run(calls: int) -> None:
            with self.configured():
                for args, kwargs in itertools.islice(inputs, calls):
                    self.step(args, kwargs)

        return run

    def observe(self, inputs: Inputs, state: dict[str, torch.Tensor]) -> dict[str, Any]:
        """A copy of all that a step from the given state leaves behind. Does not wait."""
        if self.optimizer:
            with torch.no_grad():
                own = self.module.state_dict(keep_vars=True)
                for name, value in state.items():
                    own[name].copy_(value)
            torch.manual_seed(0)
        with self.configured():
            outputs = self.step(*inputs)
            return snapshot(
                {
                    "outputs": _plain(outputs),
                    "inputs": inputs,
                    "buffers": dict(self.module.named_buffers()),
                    "grads": {n: p.grad for n, p in self.module.named_parameters()} if self.optimizer else {},
                }
            )


class CaseRun:
    """What is done with one case; a Row comes out."""

    def __init__(
        self,
        case: Case,
        device: str,
        *,
        small: bool = False,
        variants: dict[str, Variant] = VARIANTS,
        rounds: int = 21,
        round_s: float = 0.05,
    ) -> None:
        self.case = case
        self.device = torch.device(device)
        self.small = small
        self.variants = variants
        self.timing = {"rounds": rounds, "round_s": round_s}
        # The variants of a case, and the modules of a kind inside it, share code objects.
        torch._dynamo.config.recompile_limit = 64
        torch.manual_seed(0)
        with self.device:
            self.original = case.module(small)
        self.original.train(case.mode == "training")
        if case.mode == "inference":
            self.original.to(case.dtype)
        self.state = {n: t.clone() for n, t in self.original.state_dict().items()}
        # Inputs of earlier calls stay alive for a while, so that addresses change.
        self.recent: collections.deque[Inputs] = collections.deque(maxlen=4)
        self.programs: dict[str, Program] = {}
        self.notes: list[str] = []

    def prepare(self) -> None:
        """
        Compiles everything once, while other processes may do the same. The variants that
        measure themselves are only brought into the caches: they start over in a quiet
        machine.
        """
        for name in ("pygraph", "forced"):
            with self._noting(name):
                self._step_once(self._program(name))
        self.programs.clear()
        self._reset()
        for name in ("no_cg", "stock_cg"):
            with self._noting(name):
                self._step_once(self._program(name))
        self.notes.clear()

    def measure(self) -> Row:
        self._reset_report()
        ring = [self._inputs() for _ in range(self.case.ring)]
        difference = Difference()
        expected = [self._observe("no_cg", inputs) for inputs in ring]
        runnable = []
        for name in ("stock_cg", "pygraph"):
            with self._noting(name):
                found = self._settle(name, ring, expected)
                runnable.append(name)
                if name == "pygraph":
                    difference |= found
        entries = self._report()
        timings = self._time(["no_cg", *runnable], ring)
        checked = self._check(runnable)
        repeatable = checked.pop("no_cg").bitwise
        stock = checked.pop("stock_cg", None)
        if stock is not None and repeatable and not stock.bitwise:
            self.notes.append(f"stock CG is not bitwise equal: {stock.where}")
        difference = difference | checked.get("pygraph", difference)

        # Gradients it holds would keep the next program's functions uncaptured.
        finished = self.programs.pop("pygraph", None)
        if finished is not None:
            finished.module.zero_grad(set_to_none=True)
        self._reset_report()
        with self._noting("forced"):
            forced = self._settle("forced", ring, expected)
            timings |= self._time(["forced"], ring)
            forced = forced | self._check(["forced"])["forced"]
            if not forced.bitwise:
                self.notes.append(f"forced node update differs: {forced.where}")
            difference |= forced
        if not difference.bitwise:
            repeatable = repeatable and not adds_with_atomics() and self._repeats()
            why = "" if repeatable else ", which no CG need not repeat either"
            self.notes.append(f"differs in {difference.where}{why}")
        succeeded = "pygraph" in timings and "forced" in timings
        return {
            "suite": self.case.suite,
            "name": self.case.name,
            "no_cg_us": _median(timings.get("no_cg")),
            "stock_cg_us": _median(timings.get("stock_cg")),
            "pygraph_us": _median(timings.get("pygraph")),
            "forced_node_update_us": _median(timings.get("forced")),
            "spread": {name: round(t.iqr_us, 2) for name, t in timings.items()},
            **_totals(entries),
            "equal": succeeded and (difference.bitwise or (difference.close and not repeatable)),
            "bitwise": succeeded and difference.bitwise,
            # JSON has no infinity, which stands for results that cannot be subtracted.
            "max_diff": difference.max_diff if math.isfinite(difference.max_diff) else None,
            "repeatable": repeatable,
            "graphs": entries,
            "note": "; ".join(self.notes),
        }

    def memory(self, name: str) -> dict[str, Any]:
        """What the allocator holds in the steady state of one variant."""
        ring = [self._inputs() for _ in range(self.case.ring)]
        self._reset_report()
        loop = self._program(name).loop(ring)
        calls = 0
        while calls < SETTLE_CALLS[name] or (_undecided(self._report()) and calls < MAX_SETTLE_CALLS):
            loop(1)
            calls += 1
        torch.cuda.synchronize()
        gc.collect()
        return {
            "reserved_mib": torch.cuda.memory_reserved() / MIB,
            "peak_reserved_mib": torch.cuda.max_memory_reserved() / MIB,
            "choice": _totals(self._report())["choice"],
        }

    def _program(self, name: str) -> Program:
        if name not in self.programs:
            self.programs[name] = Program(self.case, self.original, self.variants[name], self.device.type)
        return self.programs[name]

    def _settle(self, name: str, ring: list[Inputs], expected: Expected) -> Difference:
        """
        Runs a variant until it has decided. It does so in a loop that goes around the
        ring without waiting for the device, as a program would; the results are compared
        after each time around.
        """
        difference = Difference()
        calls = 0
        while calls < SETTLE_CALLS[name] or (_undecided(self._report()) and calls < MAX_SETTLE_CALLS):
            results = [self._observe(name, inputs) for inputs in ring]
            for reference, result in zip(expected, results):
                difference |= compare(reference, result, self.case.tolerance)
            calls += len(ring)
        return difference

    def _check(self, names: list[str]) -> dict[str, Difference]:
        """New inputs in each call; no CUDA graphs is also compared with itself."""
        total = dict.fromkeys(["no_cg", *names], Difference())
        for _ in range(CHECKS):
            inputs = self._inputs()
            reference = self._observe("no_cg", inputs)
            for name in total:
                result = self._observe(name, inputs)
                total[name] |= compare(reference, result, self.case.tolerance)
        return total

    def _repeats(self) -> bool:
        for _ in range(REPEATS):
            inputs = self._inputs()
            reference = self._observe("no_cg", inputs)
            if not compare(reference, self._observe("no_cg", inputs), self.case.tolerance).bitwise:
                return False
        return True

    def _observe(self, name: str, inputs: Inputs) -> dict[str, Any]:
        self.recent.append(_clone(inputs))
        return self._program(name).observe(self.recent[-1], self.state)

    def _time(self, names: list[str], ring: list[Inputs]) -> dict[str, Timing]:
        # Of the ring's values, since a case may change its inputs.
        buffers = _clone(ring)
        loops = {name: self._program(name).loop(buffers) for name in names}
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        timings = time_interleaved(loops, self._synchronize, **self.timing)
        if torch._dynamo.utils.counters["stats"]["unique_graphs"] != graphs:
            self.notes.append("compiled again while timed")
        return timings

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
        try:
            yield
        except Exception as error:
            log.exception("%s, %s", self.case.name, name)
            self.notes.append(f"{name} failed: {summary(error)}")

    def _report(self) -> list[dict[str, Any]]:
        reporter = _reporter()
        return [dataclasses.asdict(entry) for entry in reporter.report()] if reporter else []

    def _reset_report(self) -> None:
        reporter = _reporter()
        if reporter:
            reporter.reset_report()


def summary(error: BaseException) -> str:
    # Dynamo wraps what a backend raises, and what follows the first line is advice.
    error = getattr(error, "inner_exception", error)
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()[:MAX_SUMMARY] if lines else ''}"


def _reporter() -> ModuleType | None:
    # A stock build has none, and its baselines can still be timed.
    with contextlib.suppress(ImportError):
        return importlib.import_module("torch._inductor.pygraph")
    return None


def _clone(tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.clone, tree)


def _plain(outputs: Any) -> Any:
    # Model outputs of transformers are mappings without key paths.
    return dict(outputs) if isinstance(outputs, collections.abc.Mapping) else outputs


def _median(timing: Timing | None) -> float | None:
    return None if timing is None else round(timing.median_us, 2)


def _undecided(entries: list[dict[str, Any]]) -> bool:
    return any(entry["choice"] == "undecided" for entry in entries)


def _totals(entries: list[dict[str, Any]]) -> dict[str, Any]:
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
