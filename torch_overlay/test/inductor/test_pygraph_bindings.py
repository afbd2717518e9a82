# Owner(s): ["module: inductor"]
"""
Random programs for each binding, on the modelled device.

    python test_pygraph_bindings.py --programs 2000 [--seed 0]
"""

from __future__ import annotations

import collections
import dataclasses
import random
from typing import Any

import torch
from torch._inductor import cudagraph_trees as trees
from torch._inductor.pygraph import report, reset_report
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize
from torch.testing._internal.pygraph_common import run_programs, wants_programs
from torch.testing._internal.pygraph_functions import RecordTestCase


BINDINGS = ("node_update", "prelude", "copy")

# Of each binding, in a run of the tests.
PROGRAMS = 40

CALLS = 6


@dataclasses.dataclass
class Program:
    """
    A function as Inductor writes it.

    Attributes:
        body: its code
        inputs: number of external inputs
        mutated: inputs that it writes
        returned: number of outputs
    """

    body: str
    inputs: int
    mutated: tuple[int, ...]
    returned: int


def draw_program(draw: random.Random) -> Program:
    """Return a program of up to 40 kernels, whose intermediates reuse memory once they are dead."""
    count = draw.randint(1, 4)
    names = [f"x{i}" for i in range(count)]
    lines = [f"{', '.join(names)}, = args; args.clear()"]
    mutated, alive = set(), list(names)
    for n in range(draw.randint(1, draw.choice((4, 12, 40)))):
        kernel = draw.choice(("sin", "add", "mul"))
        operands = [draw.choice(alive) for _ in range(1 if kernel == "sin" else 2)]
        if draw.random() < 0.15:
            target = draw.choice(alive)
            if target in names:
                mutated.add(names.index(target))
        else:
            target = f"t{n}"
            # An operator allocates what it returns; generated code the rest.
            lines.append(f"{target} = {'empty()' if draw.random() < 0.15 else 'new()'}")
            alive.append(target)
        lines.append(f"launch({', '.join([kernel, target, *operands])})")
        if draw.random() < 0.4 and len(alive) > 1:
            dead = draw.choice([name for name in alive if name not in names] or ["none"])
            if dead in alive:
                alive.remove(dead)
                lines.append(f"del {dead}")
    outputs = draw.sample(alive, min(len(alive), draw.randint(1, 3)))
    if draw.random() < 0.1:
        outputs.append(outputs[0])
    lines.append(f"return ({', '.join(outputs)},)")
    return Program("\n".join(lines), count, tuple(sorted(mutated)), len(outputs))


class BindingProgramsTest(RecordTestCase):
    def draw_inputs(self, draw: random.Random, program: Program) -> list[torch.Tensor]:
        """Return inputs, some of which are the same tensor, views of one, or less aligned."""
        inputs: list[torch.Tensor] = []
        for i in range(program.inputs):
            kind = draw.random()
            if kind < 0.1 and inputs and not program.mutated:
                inputs.append(draw.choice(inputs))
            elif kind < 0.3:
                inputs.append(self.randn(64).as_strided((8,), (1,), draw.choice((0, 4, 8))))
            else:
                inputs.append(self.randn())
        return inputs

    def run_program(self, binding: str, seed: int) -> str:
        """Compare each call with the uncaptured function. Return what was chosen."""
        draw = random.Random(f"{binding} {seed}")
        torch.manual_seed(seed)
        trees.reset_cudagraph_trees()
        reset_report()
        program = draw_program(draw)
        # The nodes of a graph run in any order that their memory allows.
        self.device.order = random.Random(seed) if draw.random() < 0.5 else None
        fn = None
        kept: list[tuple[list[Any], list[Any]]] = []
        for _ in range(CALLS):
            inputs = self.draw_inputs(draw, program)
            if fn is None:
                fn = self.deploy(
                    program.body,
                    inputs,
                    force=binding,
                    mutated=program.mutated,
                    returned=range(program.returned),
                )
            expected = self.expected(fn, inputs)
            outputs = fn(*inputs)
            kept.append(([*outputs, *inputs], expected))
            del outputs, inputs
            for actual, expected in kept:
                for found, wanted in zip(self.values(actual), expected):
                    if not torch.equal(found, wanted):
                        raise AssertionError(f"seed {seed} of {binding}: {found} for {wanted} in\n{program.body}")
            if draw.random() < 0.5:
                kept.clear()
        (entry,) = report()
        return entry.choice

    def run_programs(self, binding: str, seeds: Any) -> collections.Counter[str]:
        """Return how often a binding was chosen. A program that it cannot run has another."""
        return collections.Counter(self.run_program(binding, seed) for seed in seeds)

    @parametrize("binding", BINDINGS)
    def test_random_programs(self, binding):
        "Each call of a bound graph equals the uncaptured function."
        chosen = self.run_programs(binding, range(PROGRAMS))
        self.assertGreater(chosen[binding], 0.5 * PROGRAMS, chosen)


instantiate_parametrized_tests(BindingProgramsTest)


def main() -> None:
    test = BindingProgramsTest()

    def run(seed: int, totals: collections.Counter[str]) -> None:
        binding = BINDINGS[seed % len(BINDINGS)]
        totals[f"{binding}: {test.run_program(binding, seed)}"] += 1

    run_programs(test, run)


if __name__ == "__main__":
    if wants_programs():
        main()
    else:
        run_tests()
