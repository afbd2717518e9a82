"""All suites and their cases. It imports what declares them, and nothing that runs them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from . import cgct, mend, modern, paper, parallel, pi, scg, varying
from .case import CASES, Suite


if TYPE_CHECKING:
    from collections.abc import Callable

    from .case import Case


SUITES: dict[str, Suite] = {
    "pi": pi.SUITE,
    "cgct": cgct.SUITE,
    # The cases of pi with each way to bind inputs.
    "bindings": Suite(
        ("no_cg", "stock_cg", "pygraph", "forced_copy", "forced_node_update", "forced_prelude"),
        optimizer=True,
        dropout=True,
        must_equal=("pygraph", "forced_node_update", "forced_prelude"),
        exhaustive=True,
        selects_in_loop=True,
    ),
    "paper": paper.SUITE,
    "modern": modern.SUITE,
    "scg": scg.SUITE,
    "mend": mend.SUITE,
    "concurrent": parallel.SUITE,
    "sizes": varying.SUITE,
    # A few of paper and modern, in the time of a coffee.
    "quick": Suite(("eager", "no_cg", "stock_cg", "pygraph"), rounds=11),
}

# Suites of cases that other suites declare. Their rows do not replace those of the other suite.
BORROWED: dict[str, Callable[[Case], bool]] = {
    "bindings": lambda case: case.suite == "pi",
    "quick": lambda case: case.quick,
    "mend": lambda case: case.suite == "mend" or case.name in mend.ALSO,
    "concurrent": lambda case: case.suite == "concurrent" or case.name in parallel.ALSO,
}


def select(suite: str, names: list[str] | None = None) -> list[Case]:
    """Return the cases of a suite, or those of them that ``names`` has."""
    if suite in BORROWED:
        borrowed = [case for case in CASES.values() if BORROWED[suite](case)]
        # What runs alone says the same in each suite.
        cases = [replace(case, suite=suite, alone=case.alone and case.suite == suite) for case in borrowed]
    else:
        cases = [case for case in CASES.values() if case.suite == suite]
    if names is None:
        return cases
    unknown = set(names) - {case.name for case in cases}
    if unknown:
        raise ValueError(f"suite {suite} has no case {', '.join(sorted(unknown))}")
    return [case for case in cases if case.name in names]


def select_all(suites: list[str], names: list[str] | None = None) -> list[Case]:
    """Return the cases of suites, or those of them that ``names`` has, as SUITE/NAME where there are several suites."""
    if unknown := ", ".join(suite for suite in suites if suite not in SUITES):
        raise ValueError(f"no suite {unknown}; there are {', '.join(SUITES)}")
    if len(suites) == 1:
        return select(suites[0], names)
    found = [case for suite in suites for case in select(suite)]
    if names is None:
        return found
    by_name = {f"{case.suite}/{case.name}": case for case in found}
    if unknown := ", ".join(name for name in names if name not in by_name):
        raise ValueError(f"no case {unknown}")
    return [by_name[name] for name in names]
