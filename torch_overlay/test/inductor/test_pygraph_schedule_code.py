# Owner(s): ["module: inductor"]
"""
Calls of generated code side by side: random programs that Inductor compiles, whose nodes run in any order that the
graph allows.

    python test_pygraph_schedule_code.py --programs 500 [--seed 0]
"""

from __future__ import annotations

import collections
import dataclasses
import random
import re
import unittest
from typing import TYPE_CHECKING
from unittest import mock

import torch
from torch._inductor import config, cudagraph_trees as trees
from torch._inductor.pygraph import report, reset_report
from torch._inductor.pygraph.schedule import buffers, plan, recording
from torch._inductor.pygraph.types.candidate import DAG, LANES
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize
from torch.testing._internal.modelled_cuda import modelled_device
from torch.testing._internal.modelled_nodes import cu
from torch.testing._internal.modelled_operators import on_host
from torch.testing._internal.modelled_sizes import (
    compiled,
    CompiledProgram,
    SizedDevice,
    SizedDriver,
    SizedProgram,
)
from torch.testing._internal.pygraph_common import run_programs, wants_programs


if TYPE_CHECKING:
    from collections.abc import Callable


# In a run of the tests, of each schedule.
PROGRAMS = 4

# Replays of a program, each in another order of its nodes.
ORDERS = 20

ROWS, COLUMNS = 12, 8


def halves(a: torch.Tensor, b: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Products that lie in one buffer."""
    return torch.cat((a[: ROWS // 2] @ w, (b[ROWS // 2 :] @ w).sin()))


# What programs do to tensors, a weight, and indices of rows.
STEPS: tuple[Callable[..., torch.Tensor], ...] = (
    lambda a, b, w, i: a.sin(),
    lambda a, b, w, i: a @ w,
    lambda a, b, w, i: a @ w,
    lambda a, b, w, i: (a @ w).relu() + b,
    lambda a, b, w, i: a.softmax(-1),
    lambda a, b, w, i: torch.nn.functional.layer_norm(a, a.shape[-1:]),
    lambda a, b, w, i: a * b.sum(0),
    lambda a, b, w, i: halves(a, b, w),
    lambda a, b, w, i: torch.addmm(b, a, w),
    lambda a, b, w, i: a.t().contiguous().t() + 1,
    lambda a, b, w, i: a[i],
    lambda a, b, w, i: torch.zeros_like(a).index_add(0, i, b),
    lambda a, b, w, i: a.new_zeros(ROWS, COLUMNS).slice_scatter(b[2:5], 0, 1, 4),
    lambda a, b, w, i: torch.nn.functional.dropout(a, 0.3),
    lambda a, b, w, i: a.sin_(),
    lambda a, b, w, i: (a[1:5].mul_(2), a)[1],
    lambda a, b, w, i: (a.t()[2].copy_(b[:, 1]), a)[1],
)


class RandomProgram:
    """A random program of branches, which draws, and writes inputs and views."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.inputs = chance.choice((2, 3, 4))
        count = self.inputs
        self.steps: list[tuple[int, int, int]] = []
        for _ in range(chance.randint(4, 12)):
            # Branches seldom meet.
            a = chance.randrange(count)
            b = chance.randrange(count) if chance.random() < 0.3 else a
            self.steps.append((chance.randrange(len(STEPS)), a, b))
            count += 1
        self.outputs = chance.sample(range(self.inputs, count), min(3, count - self.inputs))

    def __call__(self) -> None:
        def function(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
            values, (w, i) = [*values[:-2]], values[-2:]
            for step, a, b in self.steps:
                values.append(STEPS[step](values[a], values[b], w, i))
            return tuple(values[k] * 2 for k in self.outputs)

        given = [torch.zeros(ROWS, COLUMNS, device="cuda") for _ in range(self.inputs)]
        given += [torch.zeros(COLUMNS, COLUMNS, device="cuda"), torch.zeros(ROWS, dtype=torch.int64, device="cuda")]
        with torch.no_grad():
            torch.compile(function, fullgraph=True)(*given)


@unittest.skipIf(cu is None, "requires cuda-bindings")
class GeneratedProgramsTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.enterContext(config.patch({"pygraph": True, "pygraph_schedules": True}))
        # Each program is given its schedule, whatever that gains.
        for module in (buffers, plan):
            self.enterContext(mock.patch.object(module, "MIN_GAIN", 1.0))

    def compile(self, seed: int) -> CompiledProgram | None:
        torch.manual_seed(seed)
        torch._dynamo.reset()
        (program,) = compiled(RandomProgram(seed), pygraph_schedules=True)
        return program if program.graph.info.functions[0].calls else None

    def check_program(self, program: CompiledProgram, schedule: str, seed: int) -> bool:
        """Run a program in ORDERS orders of its nodes. Return whether some of its calls run side by side."""
        trees.reset_cudagraph_trees()
        reset_report()
        # Every other program is short of memory, so that branches use the same.
        more = mock.patch.object(recording, "MORE_MEMORY", 100.0 * (seed % 2))
        with more, modelled_device(SizedDriver, SizedDevice) as device:
            device.order = random.Random(seed)
            deployed = SizedProgram(device, program, f"node_update,{schedule}")
            # A proof restores all inputs.
            inputs = re.search(r"def partition_0\(.*\n +(.*) = args", program.graph.source)[1]
            deployed.mutated = tuple(range(len(re.findall(r"\w+", inputs))))
            for call in range(ORDERS + 3):
                self.check_call(device, deployed, f"call {call} of seed {seed}, {schedule}")
        (entry,) = report()
        self.assertEqual((entry.choice, entry.schedule), ("node_update", schedule), entry)
        return entry.width > 1

    def run_program(self, schedule: str, seed: int, totals: collections.Counter[str]) -> None:
        totals["programs"] += 1
        if (program := self.compile(seed)) is None:
            totals["in a row"] += 1
        else:
            totals["side by side"] += self.check_program(program, schedule, seed)

    def check_call(self, device: SizedDevice, program: SizedProgram, what: str) -> None:
        """Compare a captured call with an uncaptured one: the results, the inputs, and the next random numbers."""
        (generator,) = torch.cuda.default_generators
        state = generator.get_state()
        given = program.make_inputs({})
        for t in given:
            if not t.is_floating_point():
                on_host(t).copy_(torch.randint(0, ROWS, t.shape))
        copies = [device.clone(t) for t in given]
        found = []
        for inputs, captured in ((copies, False), (given, True)):
            generator.set_state(state)
            outputs = program.call(inputs, captured=captured)
            found.append([*outputs, *(on_host(t).clone() for t in inputs), generator.get_state()])
        self.assertEqual(*found, what, atol=0, rtol=0)

    @parametrize("schedule", (DAG, *LANES))
    def test_random_programs(self, schedule: str) -> None:
        """Each call of a program equals the uncaptured function, in any order of nodes that the graph allows."""
        totals: collections.Counter[str] = collections.Counter()
        for seed in range(PROGRAMS):
            with self.subTest(seed=seed):
                self.run_program(schedule, seed, totals)
        self.assertGreater(totals["side by side"], 0, totals)

    def test_a_write_that_is_not_declared_is_noticed(self) -> None:
        """Some order of nodes gives other results."""
        program = self.compile(1)
        (function,) = program.graph.info.functions
        noticed = 0
        for i, call in enumerate(function.calls):
            for k, operand in enumerate(call.operands):
                if not operand.writes:
                    continue
                operands = (*call.operands[:k], dataclasses.replace(operand, writes=False), *call.operands[k + 1 :])
                calls = (*function.calls[:i], dataclasses.replace(call, operands=operands), *function.calls[i + 1 :])
                info = dataclasses.replace(program.graph.info, functions=(dataclasses.replace(function, calls=calls),))
                graph = dataclasses.replace(program.graph, info=info)
                try:
                    self.check_program(dataclasses.replace(program, graph=graph), DAG, 1)
                except AssertionError:
                    noticed += 1
        # Three are of outputs, or wait for one another anyway.
        self.assertEqual(noticed, 4)


instantiate_parametrized_tests(GeneratedProgramsTest)


def main() -> None:
    test = GeneratedProgramsTest("test_random_programs_schedule_dag")
    schedules = (DAG, *LANES)
    run_programs(test, lambda seed, totals: test.run_program(schedules[seed % len(schedules)], seed, totals))


if __name__ == "__main__":
    if wants_programs():
        main()
    else:
        run_tests()
