# Owner(s): ["module: inductor"]
"""
Random programs with effects and checks: what they return, print, log, raise and change is that of eager mode.

    python test_pygraph_mend.py --programs 2000 [--seed 0] [--device cuda]
"""

from __future__ import annotations

import itertools
import random
import re
import sys
import textwrap
import types
import warnings
from typing import Any, TYPE_CHECKING

import torch
import torch._dynamo
from torch._inductor.test_case import run_tests
from torch.testing._internal.pygraph_common import run_programs, wants_programs
from torch.testing._internal.pygraph_mend import BOX, log, MendTestCase


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

PROGRAMS = 10
NUMBERS = itertools.count()
INPUTS = (
    lambda: torch.arange(1.0, 5.0),
    lambda: torch.arange(4.0) * 3 - 4,
    lambda: torch.full((4,), 30.0),
    lambda: torch.arange(1.0, 5.0),
)

LIMITS = (-3, 0, 2, 5, 20, 60, 200)
CONDITIONS = ("y.sum() > {}", "(y < {} - 10).any()", "y.max() > {}", "y.isnan().any() or y[0] > {}")
ERRORS = (
    'ValueError(f"{y.sum()} {BOX.step}")',
    'KeyError("k", n)',
    "ValueError(y)",
    'RuntimeError(f"{x.sum():.1f} {n}")',
    "IndexError",
)
CHECKS = (
    "if {condition}:\n    raise {error}",
    "if not ({condition}):\n    pass\nelse:\n    raise {error}",
    "if {condition}:\n    print('raising', y)\n    BOX.seen.append(n)\n    raise {error}",
    "assert y.min() > -{limit}, f'{{y.min():.2f}}'",
    "torch._check_tensor_all(y < {limit}, lambda: f'{{y.sum()}} {{n}}')",
    "torch._assert(y.sum() < {limit}, 'text')",
)
MAY_RAISE = "y = y + TABLE[y.long()]"
STATEMENTS = (
    ("y = y * 2", "y = y - 1", "y = y.sin() * 3", "y = y.view(2, 2).t().reshape(4)", "y = y[1:].repeat(2)[:4]"),
    ("y += 1", "y.mul_(2)", "y[0] = 3"),
    ("x.add_(1)", "x *= 2", "z = x.view(2, 2)\nz[1] = 1"),
    ('print("t", y, n)', 'print(f"{y.sum():.1f}", end="~")', 'log.info("s %s", y)', "print([x, (y,)], BOX.step)"),
    ("BOX.step += 1", 'BOX.seen.append("s")', "BOX.step = n", "n += y.shape[0]", "n = n * 2"),
    (MAY_RAISE, "y = y + TABLE[(y > 2).long()]", "y = y + TABLE[y.long().clamp(0, 9)]"),
    ("y = y * WEIGHT", "y = y.detach()", "torch._dynamo.graph_break()", "warnings.warn(f'w {n}')"),
)
WITHOUT_ERRORS = [[text for text in texts if text != MAY_RAISE] for texts in STATEMENTS]
BLOCKS = (
    "for i in range({size}):\n{body}",
    "with torch.no_grad():\n{body}",
    "try:\n{body}\nexcept ValueError as e:\n    print('caught', type(e))\n    y = y + 10",
)
FUNCTION = "def {name}(x, n):\n    y = x\n{body}\n    return y, n\n"


def indent(text: str) -> str:
    return textwrap.indent(text, "    ")


class Program:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.functions: list[str] = []
        self.function("program", 0)
        self.text = "\n".join(self.functions)

    def function(self, name: str, depth: int) -> None:
        body = indent(self.block(depth, self.random.randint(2, 7 - 2 * depth)))
        self.functions.append(FUNCTION.format(name=name, body=body))

    def block(self, depth: int, size: int) -> str:
        return "\n".join(self.statement(depth) for _ in range(size))

    def statement(self, depth: int) -> str:
        choose = self.random.choice
        # There an index out of bounds ends the use of the GPU.
        statements = STATEMENTS if torch.get_default_device().type == "cpu" else WITHOUT_ERRORS
        kind = self.random.random()
        if kind < 0.3:
            limit = choose(LIMITS)
            return choose(CHECKS).format(
                condition=choose(CONDITIONS).format(limit), error=choose(ERRORS), limit=abs(limit)
            )
        if kind < 0.4 and depth < 2:
            name = f"inner{self.random.randrange(10**6)}"
            self.function(name, depth + 1)
            return f"y, n = {name}(y, n)"
        if kind < 0.55 and depth < 2:
            body = indent(self.block(depth + 1, 2))
            return choose(BLOCKS).format(body=body, size=self.random.randint(1, 2))
        return choose(choose(statements))

    def make(self) -> Callable[[torch.Tensor], Any]:
        """Return the program with a state of its own. Dynamo finds globals by the name of their module."""
        module = types.ModuleType(f"{__name__}_program{next(NUMBERS)}")
        sys.modules[module.__name__] = module
        weight = torch.ones(4, requires_grad=True)
        vars(module).update(BOX=BOX, TABLE=torch.arange(10.0), WEIGHT=weight, log=log, torch=torch, warnings=warnings)
        exec(compile(self.text, __file__, "exec"), vars(module))
        return lambda x: module.program(x, 3)


def comparable(observed: list[Any]) -> str:
    # Compiled code has other names in histories and logs.
    text = re.sub(r"grad_fn=<\w+>", "grad_fn", repr(observed))
    return re.sub(r"(?:torch_dynamo_resume_in_)+(\w+?)(?:_at_\d+)+", r"\1", text)


class ProgramTest(MendTestCase):
    def run_programs(self, seeds: Iterable[int]) -> int:
        """Return how many programs stock does not run as eager mode does."""
        wrong = 0
        for seed in seeds:
            program = Program(seed)
            expected = comparable(self.observe(program.make(), INPUTS))
            seen = comparable(self.observe_compiled(program.make(), INPUTS)[0])
            if seen == expected:
                continue
            stock = comparable(self.observe_compiled(program.make(), INPUTS, pygraph_mend=False)[0])
            self.assertNotEqual(stock, expected, f"seed {seed}:\n{program.text}\n{seen}")
            wrong += 1
        return wrong

    def test_programs_of_a_gpu(self):
        programs = [Program(seed).text for seed in range(100)]
        self.assertTrue(any(MAY_RAISE in text for text in programs))
        with torch.device("meta"):
            programs = [Program(seed).text for seed in range(100)]
        self.assertFalse(any(MAY_RAISE in text for text in programs))

    def test_random_programs(self):
        self.assertLess(self.run_programs(range(PROGRAMS)), 0.3 * PROGRAMS)


def main() -> None:
    test = ProgramTest("test_random_programs")
    run_programs(
        test,
        lambda seed, totals: totals.update(programs=1, wrong_in_stock_too=test.run_programs(range(seed, seed + 1))),
    )


if __name__ == "__main__":
    if wants_programs():
        main()
    else:
        run_tests()
