"""
A whole record: what belongs to it, what is missing of it, and how long that takes on one GPU.

Times are those of an earlier run in the record. Other times are estimates for an H100 and 16 cores, from the calls of an
earlier run where there was one.
"""

from __future__ import annotations

import importlib
import math
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple, TYPE_CHECKING

from . import catalogue
from .report import as_table
from .timing import ENOUGH


if TYPE_CHECKING:
    from collections.abc import Iterable

    from .report import Columns, Row

# Suites that are not, or not only, cases of the package's main program.
MODULES = {name: f"pygraph.{name}" for name in ("replay", "bindings", "overhead", "dist")}
# Those that need no GPU or several, or repeat cases of others.
APART = {"quick", "overhead", "tp", "dist"}
# The GPUs that a case of these suites needs. With --tp, gpu_suite may ask for more.
GPUS = {"dist": 2, "tp": 2}
PROGRAMS = 3000
# Seconds of what is no case, the longest first, where the record does not say.
OTHERS = {"triton": 270.0, "programs": 250.0, "tests": 200.0, "upstream": 150.0, "bindings": 120.0}
# Cores, each of which compiles a case or measures what need not be alone
CORES = 16
# Seconds until the processes that run random programs have imported torch. An estimate
PROGRAMS_START_S = 40.0
# Seconds of a small case and of a workload: to compile, and for which all other processes stop, the latter and for each GiB
# A workload that never ran takes more than APART_S, so that its variants compile side by side.
SMALL_S, WORKLOAD_S, GIB_S = (25.0, 4.0), (250.0, 12.0), 1.0
# Suites whose cases are small
SMALL = {"pi", "cgct", "scg", "bindings"}
# Seconds of a case of another program, beside which nothing runs, and of one of tp. Estimates
MODULE_S, TP_S = 20.0, 90.0
# The part of the cores' time in which cases compile while nothing is timed: late in a command no long case begins. An
# estimate, from simulated commands of one part.
BUSY = 0.4
# Of a case whose calls have been timed: seconds of its other work, and how often it calls each variant
BESIDE_CALLS_S, CALLS = 4.0, 300
# Compiling all variants takes as long as so many from cold caches: they share kernels.
VARIANTS = 4
# If a case takes more seconds to compile, its variants compile side by side: otherwise it might not end within a command.
# The case's own process then reads their code from its caches, which takes this part of the time to compile it. Estimates.
APART_S, OF_CACHES = 240.0, 0.2
# A case gets so many times the memory that it reserved in an earlier run. An estimate
MORE_GIB = 1.1
# The part of that memory that compiling takes, if no run has said so. Recordings, and references in double precision, come
# later. An estimate
COMPILING = 0.5
# Seconds of a command, those in which it starts and ends, and seconds of a session of several commands
COMMAND_S, START_S, SESSION_S = 600.0, 65.0, 1800.0


@dataclass(frozen=True)
class Unit:
    """Something with a result of its own; ``name`` if it is a case of a suite, or else empty."""

    kind: str
    name: str = ""

    @property
    def is_module(self) -> bool:
        """Whether it is a case of a program other than the package's."""
        return bool(self.name) and self.kind not in catalogue.SUITES


class Work(NamedTuple):
    """What a case of a suite takes: seconds, and memory of the device."""

    # Of all of its processes, and until it is compiled
    cores: float
    longest: float
    # For which all other processes stop
    device: float
    # Of the process that measures: in all, and until it is compiled
    gib: float = 2.0
    compiling: float = 2.0


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
    return shares(units, count, {})[index - 1]


def shares(units: list[Unit], count: int, record: Row, sources: str = "") -> list[list[Unit]]:
    """Return ``count`` parts that take about as long."""
    groups: dict[str, list[Unit]] = {}
    for unit in units:
        # A case of a module is compared with other cases of the module, which stay together.
        is_alone = not unit.is_module or unit.kind in GPUS
        groups.setdefault(f"{unit.kind}/{unit.name}" if is_alone else unit.kind, []).append(unit)
    loads = [0.0] * count
    found: list[set[Unit]] = [set() for _ in loads]
    each = {name: seconds(group, record, sources) for name, group in groups.items()}
    for name in sorted(groups, key=lambda name: -each[name]):
        place = loads.index(min(loads))
        loads[place] += each[name]
        found[place] |= {*groups[name]}
    return [[unit for unit in units if unit in own] for own in found]


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
    total = 0.0
    for unit in units:
        if unit.is_module:
            total += TP_S if unit.kind == "tp" else MODULE_S
        elif unit.name:
            needed = work(unit, cases.get((unit.kind, unit.name), {}))
            # What is compiled beside a case stops while that one is timed.
            total += needed.cores / (CORES * BUSY) + needed.device
        elif unit.kind == "programs":
            total += _of_programs(record, sources)
        else:
            total += record.get(unit.kind, {}).get("seconds", OTHERS[unit.kind])
    return total


def longest_first(units: list[Unit], record: Row) -> list[Unit]:
    """
    Return units in the order in which they begin. A command that is over loses the units that it has not finished. So short
    units come last, and workloads that never ran, which may take long, come first.
    """
    cases = {(case["suite"], case["name"]): case for case in record.get("cases", ())}

    def until_end(unit: Unit) -> tuple[bool, float]:
        if unit.is_module or not unit.name:
            return False, seconds([unit], record)
        row = cases.get((unit.kind, unit.name), {})
        needed = work(unit, row)
        return unit.kind not in SMALL and "seconds" not in row, needed.longest + needed.device

    return sorted(units, key=until_end, reverse=True)


def _of_programs(record: Row, sources: str) -> float:
    runs = [run for run in record.get("programs", ()) if run.get("seconds") and run.get("programs")]
    done = sum(run["programs"] for run in runs)
    each = sum(run["seconds"] for run in runs) / done if done else OTHERS["programs"] / PROGRAMS
    return PROGRAMS_START_S + each * programs_left(record, sources)


def work(unit: Unit, row: Row) -> Work:
    """``row``: of an earlier run of the case, or empty."""
    case = catalogue.CASES.get(unit.name)
    found = _times(unit, row)
    gib = MORE_GIB * row["gib"] if "gib" in row else case.gib if case else found.gib
    compiling = MORE_GIB * row["compile_gib"] if "compile_gib" in row else COMPILING * gib
    return found._replace(gib=gib, compiling=compiling)


def _times(unit: Unit, row: Row) -> Work:
    """Return the seconds that a case takes. ``work`` sets the memory."""
    if "seconds" in row:
        taken = row["seconds"]
        cores = taken["compile"] + max(0.0, taken["measure"] - taken["device"])
        alone = sum(times["compile_s"] for times in row.get("alone", {}).values())
        found = _work(cores, alone, taken["device"])
        return found._replace(longest=taken.get("longest", found.longest))
    suite, case = catalogue.SUITES.get(unit.kind), catalogue.CASES.get(unit.name)
    compiled, device = SMALL_S
    if suite and case and unit.kind not in SMALL:
        compiled, device = WORKLOAD_S[0], WORKLOAD_S[1] + GIB_S * case.gib
    if calls := sum(us for key, us in row.items() if key.endswith("_us") and isinstance(us, float)) / 1e6:
        limit = ENOUGH * suite.max_case_s if suite else math.inf
        device = BESIDE_CALLS_S + min(CALLS * calls, limit)
    cold = max((times["compile_s"] for times in row.get("alone", {}).values()), default=compiled / VARIANTS)
    own = len(suite.run_alone) if _runs_alone(unit) else 0
    return _work(cold * (VARIANTS + own), cold * own, device + own)


def compiles_apart(work: Work) -> bool:
    """Return whether the variants of a case compile side by side."""
    return work.cores > APART_S


def _work(cores: float, alone: float, device: float) -> Work:
    """``alone``: the seconds of ``cores`` that variants take which run alone."""
    found = Work(cores, cores - alone, device)
    return found._replace(longest=found.longest * (1 / VARIANTS + OF_CACHES)) if compiles_apart(found) else found


def _runs_alone(unit: Unit) -> bool:
    case = catalogue.CASES.get(unit.name)
    return case is not None and case.alone and case.suite == unit.kind


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
    apart = Counter(case["suite"] for case in record.get("cases", ()) if case["suite"] in APART)
    old = Counter(case["suite"] for case in record["cases"] if case.get("sources") != sources) if apart else {}
    if rows := ", ".join(f"{old[suite]} of {suite}" for suite in apart if old[suite]):
        lines.append(f"No part has these rows of other sources: {rows}.")
    return "\n".join(lines)
