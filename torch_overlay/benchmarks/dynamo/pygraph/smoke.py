"""Builds cases in a small size on the CPU and takes an eager step of each."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import torch
from torch.utils import _pytree as pytree

from .catalogue import CASES
from .compare import compare, Difference
from .program import build, Program, seed, VARIANTS


if TYPE_CHECKING:
    from .case import Case

CPU = torch.device("cpu")


def one_step(case: Case) -> dict[str, torch.Tensor]:
    """All that a step leaves behind, of a module and inputs from a fixed seed."""
    if case.dtype in (torch.float16, torch.bfloat16):
        # CPUs take their time with these.
        case = dataclasses.replace(case, dtype=torch.float32)
    module = build(case, CPU, small=True)
    seed()
    inputs = pytree.tree_map_only(torch.Tensor, _widened, case.inputs(True))
    return Program(case, module, VARIANTS["eager"], "cpu").observe(inputs, {})


def _widened(t: torch.Tensor) -> torch.Tensor:
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def twice(case: Case) -> Difference:
    """Whether it always builds the same; raises what it raises."""
    return compare(one_step(case), one_step(case), 0.0)


def main() -> int:
    # More wait for each other longer than such sizes compute.
    torch.set_num_threads(1)
    status = 0
    for case in CASES.values():
        start = time.monotonic()
        if case.missing:
            found = f"skipped: needs {case.missing}"
        else:
            try:
                difference = twice(case)
                found = "ok" if difference.bitwise else f"FAILED: {difference.where} differs"
            except Exception as error:
                found = f"FAILED: {type(error).__name__}: {error}"
        status |= found.startswith("FAILED")
        print(f"{case.suite}/{case.name}: {found} ({time.monotonic() - start:.1f} s)", flush=True)
    return status
