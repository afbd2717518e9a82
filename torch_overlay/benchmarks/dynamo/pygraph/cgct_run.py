"""
A case of suite cgct: checked against eager in everything a caller sees, with other values in
each call, and timed beside the same program with its values on the GPU.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from typing import Any, TYPE_CHECKING

import numpy as np

import torch
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

from .case import described
from .compare import compare, Difference, snapshot
from .program import build, clone, Program, VARIANTS
from .timing import fields, ratio, Timing
from .worker import blockers, CaseRun, report, reset_report, totals


if TYPE_CHECKING:
    from collections.abc import Callable

    from .case import Inputs
    from .cgct import CpuValues
    from .report import Row

# Calls that are compared, and for how many of them what a call returned must stay as it was.
CHECKS = 100
HELD = 4
# How many times as long a program may take with its values on the CPU as with its values on the GPU. If noise may explain that
# it takes longer, it passes.
MAX_COST = 1.3
# What is compared with what: as chosen, and with every graph deployed.
PAIRS = {"pygraph": "gpu", "forced_node_update": "gpu_node_update"}


class OnGpu(Program):
    """Runs with all values on the GPU, where they were before the call."""

    def loop(self, ring: list[Inputs]) -> Callable[[int], None]:
        return super().loop([pytree.tree_map(self._moved, inputs) for inputs in ring])

    def _moved(self, value: Any) -> Any:
        if isinstance(value, (float, np.generic)):
            return torch.as_tensor(value, device=self.device_type)
        return value.to(self.device_type) if isinstance(value, torch.Tensor) else value


def everything(program: Program, inputs: Inputs) -> tuple[Any, dict[str, Any]]:
    """What a call returns, and a copy of all that a caller sees of it."""
    with program.configured():
        outputs = program.step(*inputs)
    tensors = [t for t in pytree.tree_leaves((inputs, outputs)) if isinstance(t, torch.Tensor)]
    storages = [t.untyped_storage().data_ptr() for t in tensors]
    seen = {"outputs": outputs, "inputs": inputs, "aliases": [storages.index(s) for s in storages]}
    return outputs, snapshot(seen)


class CpuValuesRun(CaseRun):
    case: CpuValues

    @functools.cached_property
    def eager(self) -> Program:
        return Program(self.case, self.original, VARIANTS["eager"], self.device.type)

    @functools.cached_property
    def original_on_gpu(self) -> torch.nn.Module:
        case = dataclasses.replace(self.case, module=self.case.on_gpu or self.case.module)
        return build(case, self.device, self.small)

    def _program(self, name: str) -> Program:
        if name in PAIRS.values() and name not in self.programs:
            self.programs[name] = OnGpu(self.case, self.original_on_gpu, self.variants[name], self.device.type)
        return super()._program(name)

    def prepare(self) -> None:
        for name in self.variants:
            with self._noting(name):
                self._step_once(self._program(name))
        self.programs.clear()
        self._reset()
        self.failed.clear()

    def measure(self) -> Row:
        ring = [self._inputs() for _ in range(self.case.ring)]
        graphs: dict[str, list[dict[str, Any]]] = {}
        differences: dict[str, Difference] = {}
        timings: dict[str, Timing] = {}
        host: list[str] = []
        counters["pygraph"].clear()
        # Stock CUDA graphs by themselves: some cases leave them, or the device, unusable.
        others = [name for name in self.variants if name != "stock_cg"]
        for names in (others, [name for name in self.variants if name not in others]):
            for name in names:
                with self._noting(name):
                    graphs[name] = self._decide(name, ring)
                    if name == "pygraph":
                        host = blockers()
                    if name not in PAIRS.values():
                        differences[name] = found = self._compare_with_eager(name)
                        if not found.close:
                            self.failed[name] = f"wrong result: {found.where} differs from eager's"
            timings |= self._time([name for name in names if name not in self.failed], ring)
            self.programs.clear()
            self._reset()
        counts = dict(counters["pygraph"])
        launches = {}
        if self.device.type == "cuda" and "forced_node_update" in timings:
            with self._noting("forced_node_update"):
                self._decide("forced_node_update", ring)
                launches = self._launched(["forced_node_update"], ring)
        held = [name for name in self.suite.must_equal if name in differences]
        difference = Difference()
        for name in held:
            difference |= differences[name]
        return {
            **described(self.case),
            "program": self.case.program,
            **dict.fromkeys(f"{name}_us" for name in self.variants),
            **fields(timings),
            "cost": {
                name: [round(value, 4) for value in ratio(timings[name], timings[on_gpu])]
                for name, on_gpu in PAIRS.items()
                if name in timings and on_gpu in timings
            },
            **totals(graphs.get("pygraph", [])),
            "equal": difference.close and all(name in timings for name in self.suite.must_equal),
            "bitwise": difference.bitwise,
            "max_diff": difference.max_diff if difference.close else None,
            "checked_calls": CHECKS,
            "launches": launches,
            **self._circumstances(),
            "on_the_host": host,
            "graphs": graphs.get("pygraph", []),
            "counters": counts,
            "failed": self.failed,
            "note": "; ".join(self.notes),
        }

    def _decide(self, name: str, ring: list[Inputs]) -> list[dict[str, Any]]:
        """What PyGraph reports of a variant in its steady state."""
        reset_report()
        loop = self._program(name).loop([clone(inputs) for inputs in ring])
        loop(1)
        calls = 1
        quiet = self._quiet() if self.variants[name].selects else contextlib.nullcontext()
        with quiet, self._settling_by(name) as by:
            while self._settling(name, calls, by):
                loop(1)
                calls += 1
            self._synchronize()
        # One that is still undecided is not what later calls run: Dynamo compiled it for the
        # first value alone.
        return [entry for entry in report() if entry["choice"] != "undecided"]

    def _compare_with_eager(self, name: str) -> Difference:
        program = self._program(name)
        must = name in self.suite.must_equal
        kept: collections.deque[tuple[Any, dict[str, Any]]] = collections.deque()
        total = Difference()
        for _ in range(CHECKS if must else HELD):
            inputs = self._inputs()
            _, expected = everything(self.eager, clone(inputs))
            outputs, found = everything(program, inputs)
            total |= compare(expected, found, self.case.tolerance)
            # Stock CUDA graphs overwrite what they returned before.
            if must:
                kept.append((outputs, snapshot({"held": outputs})))
            if len(kept) > HELD:
                outputs, before = kept.popleft()
                total |= compare(before, snapshot({"held": outputs}), 0.0)
        return total


def missed(case: CpuValues, row: Row) -> list[str]:
    """What the case must show and does not."""
    if "error" in row:
        return [row["error"]]
    found = [] if row["equal"] else ["results differ"]
    choice = row["choice"] or "undecided"
    if "undecided" in choice:
        found.append("no choice was made")
    if row["copied_bytes"]:
        found.append(f"copies {row['copied_bytes']} bytes a call")
    for name, on_gpu in PAIRS.items():
        cost = row["cost"].get(name)
        if cost is None:
            found.append(f"{name} or {on_gpu} was not measured")
        elif not case.host and cost[0] > MAX_COST:
            low, median, high = cost
            found.append(f"{name} takes {median:.2f} times ({low:.2f} to {high:.2f}) as long as with values on the GPU")
    launched = row["launches"].get("forced_node_update")
    if launched is None:
        found.append("it is not known what is launched")
    elif launched["graph_launches"] != case.graphs:
        found.append(f"{launched['graph_launches']:g} graphs, not {case.graphs}")
    elif not case.host and launched["kernels_in_graphs"] < launched["kernels"]:
        found.append(f"{launched['kernels'] - launched['kernels_in_graphs']:g} kernels outside of the graph")
    return found
