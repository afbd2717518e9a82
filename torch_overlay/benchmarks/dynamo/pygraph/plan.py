"""
A whole record: what belongs to it, what is missing of it, and how long that takes on one GPU.

Times are those of an earlier run in the record. Other times are estimates for an H100 and 16 cores.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import catalogue
from .report import as_table


if TYPE_CHECKING:
    from collections.abc import Iterable

    from .report import Columns, Row

# Suites that are not, or not only, cases of the package's main program.
MODULES = {name: f"pygraph.{name}" for name in ("replay", "bindings", "overhead", "dist")}
# Those that need no GPU or several, or repeat cases of others.
APART = {"quick", "overhead", "tp", "dist"}
PROGRAMS = 3000
# Seconds of what is no case, the longest first, where the record does not say.
OTHERS = {"programs": 450.0, "tests": 270.0, "triton": 270.0, "upstream": 150.0, "bindings": 120.0}
# Seconds of a case, for which it needs a core to compile, the device to be measured, and nothing else beside it
COMPILE_S, MEASURE_S, DEVICE_S = 60.0, 20.0, 10.0
# Of each variant of a case until its row is complete, and how many variants share their kernels
CALLS, VARIANTS = 60, 4
CORES = 16
# Seconds for which variants that run alone compile, and nothing is measured
ALONE_S = 150.0
MEASURED_AT_ONCE = 2
# Seconds of a command, those in which it starts and ends, and seconds of a session of several commands
COMMAND_S, START_S, SESSION_S = 600.0, 75.0, 1800.0


@dataclass(frozen=True)
class Unit:
    """Something with a result of its own; ``name`` if it is a case of a suite, or else empty."""

    kind: str
    name: str = ""

    @property
    def is_module(self) -> bool:
        """Whether it is a case of a program other than the package's."""
        return bool(self.name) and self.kind not in catalogue.SUITES


def names_of(suite: str) -> list[str]:
    if suite in catalogue.SUITES:
        return [case.name for case in catalogue.select(suite)]
    return list(importlib.import_module(MODULES[suite]).CASES)


def suites() -> list[str]:
    return list(dict.fromkeys([*catalogue.SUITES, *MODULES]))


def whole() -> list[Unit]:
    cases = [Unit(suite, name) for suite in suites() if suite not in APART for name in names_of(suite)]
    return [*map(Unit, OTHERS), *cases]


def part(units: list[Unit], index: int, count: int) -> list[Unit]:
    """
    Return one of ``count`` parts that take about as long. It does not depend on the record, so that a part can be
    continued once the record has results of it.
    """
    loads = [0.0] * count
    found = set()
    # A case of a module is compared with other cases of the module, which stay together.
    places: dict[str, int] = {}
    for unit in sorted(units, key=lambda unit: (bool(unit.name), not unit.is_module)):
        place = loads.index(min(loads))
        if unit.is_module:
            place = places.setdefault(unit.kind, place)
        loads[place] += (MEASURE_S if unit.is_module else DEVICE_S) if unit.name else OTHERS[unit.kind]
        if place == index - 1:
            found.add(unit)
    return [unit for unit in units if unit in found]


def results(record: Row, sources: str, device: str | None = None) -> dict[Unit, Row]:
    """Complete results of these sources, on any device or a given one."""

    def is_of_run(entry: Row) -> bool:
        return entry.get("sources") == sources and device in (None, entry.get("device"))

    cases = [case for case in record.get("cases", ()) if not {"error", "skipped"} & case.keys()]
    found = {Unit(case["suite"], case["name"]): case for case in cases if is_of_run(case)}
    for kind in OTHERS:
        entry = record.get(kind, ())
        if kind == "programs":
            runs = [run for run in entry if is_of_run(run)]
            if sum(run.get("programs", 0) for run in runs) >= PROGRAMS:
                found[Unit(kind)] = {"seconds": sum(run.get("seconds", 0.0) for run in runs)}
        elif entry and is_of_run(entry) and all(counts["complete"] for counts in _counted(entry)):
            found[Unit(kind)] = entry
    return found


def _counted(entry: Row) -> list[Row]:
    return [value for value in (entry, *entry.values()) if isinstance(value, dict) and "complete" in value]


def missing(units: Iterable[Unit], record: Row, sources: str, device: str | None = None) -> list[Unit]:
    """Units without a complete result. Cases that failed come last, so that they do not keep others from running."""
    done = results(record, sources, device)
    failed = {(case["suite"], case["name"]) for case in record.get("cases", ()) if case.get("sources") == sources}
    return sorted((unit for unit in units if unit not in done), key=lambda unit: (unit.kind, unit.name) in failed)


def programs_left(record: Row, sources: str) -> int:
    done = sum(run.get("programs", 0) for run in record.get("programs", ()) if run["sources"] == sources)
    return max(0, PROGRAMS - done)


def seconds(units: list[Unit], record: Row, sources: str = "") -> float:
    """How long units take together."""
    cases = {(case["suite"], case["name"]): case for case in record.get("cases", ())}
    total, sums = 0.0, [0.0, 0.0, 0.0]
    for unit in units:
        if unit.name and not unit.is_module:
            sums = [a + b for a, b in zip(sums, _of_case(cases.get((unit.kind, unit.name), {})))]
        elif unit.name:
            total += MEASURE_S
        elif unit.kind == "programs":
            total += OTHERS["programs"] * programs_left(record, sources) / PROGRAMS
        else:
            total += record.get(unit.kind, {}).get("seconds", OTHERS[unit.kind])
    compiled, measured, alone = sums
    if any(map(_runs_alone, units)):
        total += ALONE_S
    return total + max(compiled / CORES, measured / MEASURED_AT_ONCE, alone)


def _runs_alone(unit: Unit) -> bool:
    case = catalogue.CASES.get(unit.name)
    return case is not None and case.alone and case.suite == unit.kind


def _of_case(row: Row) -> tuple[float, float, float]:
    """Seconds of compiling, of measuring, and of timing with nothing beside it."""
    if "seconds" in row:
        return tuple(row["seconds"][key] for key in ("compile", "measure", "device"))
    calls = CALLS * sum(us for key, us in row.items() if key.endswith("_us") and isinstance(us, float)) / 1e6
    cold = row.get("alone", {}).get("stock_cg", {}).get("compile_s")
    return VARIANTS * cold if cold else COMPILE_S, MEASURE_S + calls, DEVICE_S + calls / 2


def commands(seconds: float) -> int:
    return math.ceil(seconds / (COMMAND_S - START_S))


def table(units: list[Unit], record: Row, sources: str, count: int, device: str | None = None) -> str:
    """What is missing, and the minutes it takes."""
    left = missing(units, record, sources, device)
    kinds = list(dict.fromkeys(unit.kind if unit.name else f"{unit.kind} (no cases)" for unit in units))

    def of(kind: str, among: list[Unit]) -> list[Unit]:
        return [unit for unit in among if kind == (unit.kind if unit.name else f"{unit.kind} (no cases)")]

    columns: Columns = {
        "part": lambda line: line["kind"],
        "missing": lambda line: f"{len(of(line['kind'], left))} of {len(of(line['kind'], units))}",
        "minutes": lambda line: f"{seconds(of(line['kind'], left), record, sources) / 60:.1f}",
    }
    lines = [as_table([{"kind": kind} for kind in kinds], columns)]
    total = 0
    for index in range(1, count + 1):
        own = seconds([unit for unit in part(units, index, count) if unit in left], record, sources)
        total += commands(own)
        lines.append(
            f"--part {index}/{count}: {own / 60:.1f} minutes, {commands(own)} commands of {COMMAND_S / 60:g} minutes"
        )
    sessions = math.ceil(total / (SESSION_S // COMMAND_S))
    lines.append(f"In all {total} commands, or {sessions} sessions of {SESSION_S / 60:g} minutes.")
    return "\n".join(lines)
