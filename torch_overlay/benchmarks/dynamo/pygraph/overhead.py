"""
What PyGraph costs a program that does not use it: the suite overhead, which needs no GPU.

    python -m pygraph.overhead --output rows.json [--quick] [--cases trace_eager] [--budget 300]

Stock torch, as it is installed, beside the overlay on PYTHONPATH with the flag off; copies of both lie side by side:

import_torch     a process that imports torch and ends
trace_eager      Dynamo traces a model of 24 transformer layers, backend "eager"
trace_aot_eager  the same with backend "aot_eager"

Each case has two numbers:

- how many instructions of bytecode Python executes, without what compiled code does. Two copies of stock
  differ by at most 0.02 %
- instructions in user mode where the machine counts them, or else CPU time. Both builds take turns, sample by
  sample. The ratio is the median over pairs of samples, with its confidence interval of 95 %
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TYPE_CHECKING

from .processes import Answering
from .report import format_table, write_rows
from .timing import Interval, MAX_SLOWDOWN, ratio, Timing


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .report import Row

    Sample = dict[str, Any]
    # The answer to ``sample`` or ``count``.
    Ask = Callable[[str], Sample]


CASES = ("import_torch", "trace_eager", "trace_aot_eager")
BUILDS = ("stock", "flag_off")
# A file in the directory of an overlay.
MARK = ".pygraph-overlay"
# What importing and tracing may take of stock's: instructions of the machine, and of bytecode.
MAX_INSTRUCTIONS = 1.005
MAX_BYTECODES = 1.001
# Pairs of samples. An interval of 95 % needs 6.
MIN_PAIRS, ENOUGH_PAIRS, MAX_PAIRS = 3, 6, 100
# Where objects lie in memory differs from process to process: each of so many pairs of processes
# gets a part of the samples.
PROCESSES = 3
MAX_ANSWER_S = 300.0
# Layers of the model, and seconds for all cases.
FULL = 24, 300.0
QUICK = 4, 120.0


class Failed(Exception):
    """A process did not answer, or ran another build than it should."""


def overlay_on(path: list[str]) -> Path:
    """Return the directory of the overlay. Raises Failed if there is none."""
    for entry in path:
        if entry and Path(entry, MARK).exists() and Path(entry, "torch").exists():
            return Path(entry).resolve()
    raise Failed("no overlay on PYTHONPATH: run scripts/overlay DIRECTORY, and put DIRECTORY on PYTHONPATH")


def installed() -> Path:
    """Return the directory that the installed torch is in."""
    return Path(str(importlib.metadata.distribution("torch").locate_file(""))).resolve()


def copies(overlay: Path, site: Path, folder: Path) -> dict[str, Path]:
    """
    Return a copy of the overlay, and one of what is installed that has the same layout. How deep a
    package lies, which of its directories are links, and where on the path it is decide what importing
    it takes, and would count for one of the builds.
    """
    found = {build: folder / str(i) for i, build in enumerate(BUILDS)}
    shutil.copytree(overlay, found["flag_off"], symlinks=True)

    def in_site(path: str | Path) -> Path:
        return site / Path(path).relative_to(overlay)

    def not_installed(where: str, names: list[str]) -> list[str]:
        return [name for name in names if not (in_site(where) / name).exists()]

    def copy(source: str, target: str) -> None:
        shutil.copy2(in_site(source), target)

    shutil.copytree(overlay, found["stock"], symlinks=True, ignore=not_installed, copy_function=copy)
    return found


def environments(builds: dict[str, Path], overlay: Path, inherited: dict[str, str]) -> dict[str, dict[str, str]]:
    """Return the environment of each build. They differ in the first entry of PYTHONPATH alone."""
    rest = [entry for entry in inherited.get("PYTHONPATH", "").split(os.pathsep) if entry]
    rest = [str(Path(__file__).resolve().parent.parent), *(e for e in rest if Path(e).resolve() != overlay)]
    # Without its bytecode, each patched file would be compiled in each process.
    common = {name: value for name, value in inherited.items() if name != "PYTHONDONTWRITEBYTECODE"}
    common = {name: value for name, value in common.items() if not name.startswith("TORCHINDUCTOR_PYGRAPH")}
    # Threads that wait take CPU time, and the order of a set decides what is traced.
    common |= {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    return {build: {**common, "PYTHONPATH": os.pathsep.join([str(path), *rest])} for build, path in builds.items()}


@contextlib.contextmanager
def running(name: str, layers: int, build: str, environment: dict[str, str]) -> Iterator[Ask]:
    """Give what a process of a build answers. What asks raises Failed."""
    process = Answering([sys.executable, "-m", "pygraph.overhead_run", name, str(layers)], environment)

    def ask(what: str) -> Sample:
        answer = process.ask(what, time.monotonic() + MAX_ANSWER_S)
        if "error" in answer:
            raise Failed(f"{name}, {build}: {answer['error']}")
        if answer.pop("patched") != (build == "flag_off"):
            raise Failed(f"{name}, {build}: the process has another torch")
        return answer

    with contextlib.closing(process):
        yield ask
        # It ends by itself, which takes CPU time too.
        process.process.stdin.close()
        process.process.wait()


@contextlib.contextmanager
def importing(name: str, layers: int, build: str, environment: dict[str, str]) -> Iterator[Ask]:
    """As ``running``, with a new process for each answer, whose CPU time is that of all of the process."""

    def ask(what: str) -> Sample:
        before, start = os.times(), time.perf_counter()
        with running(name, layers, build, environment) as once:
            answer = once(what)
        after = os.times()
        if "cpu_s" in answer:
            # Of children that ended: this one.
            cpu = after.children_user + after.children_system - before.children_user - before.children_system
            answer |= {"cpu_s": cpu, "wall_s": time.perf_counter() - start}
        return answer

    yield ask


class Case:
    """Measures one case; ``start`` is ``running`` or ``importing``, or stands for them in a test."""

    def __init__(
        self,
        name: str,
        start: Callable[[str], contextlib.AbstractContextManager[Ask]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.start, self.clock = name, start, clock
        self.samples: dict[str, list[Sample]] = {build: [] for build in BUILDS}
        self.bytecodes: dict[str, int] = {}

    def measure(self, seconds: float) -> None:
        """Take pairs of samples until the time is over. Raises Failed."""
        begin = self.clock()
        for i in range(PROCESSES):
            if i > 0 and self.clock() - begin >= seconds:
                break
            with contextlib.ExitStack() as stack:
                asks = {build: stack.enter_context(self.start(build)) for build in BUILDS}
                if i == 0:
                    # Fills the caches of files and of bytecode.
                    for ask in asks.values():
                        ask("sample")
                    self.bytecodes = {build: ask("count")["bytecodes"] for build, ask in asks.items()}
                until = begin + seconds * (i + 1) / PROCESSES
                self._pairs(asks, until, MIN_PAIRS if i == 0 else 0)

    def _pairs(self, asks: dict[str, Ask], until: float, least: int) -> None:
        taken = 0
        while taken < MAX_PAIRS // PROCESSES:
            start = self.clock()
            # What one leaves to the next counts for either build as often.
            for build in BUILDS if len(self.samples["stock"]) % 2 == 0 else reversed(BUILDS):
                self.samples[build].append(asks[build]("sample"))
            taken += 1
            now = self.clock()
            if taken >= least and now + (now - start) > until:
                break

    def row(self, layers: int) -> Row:
        counted = all(sample["instructions"] is not None for own in self.samples.values() for sample in own)
        key, unit, scale = ("instructions", "M instructions", 1e-6) if counted else ("cpu_s", "ms CPU", 1e3)
        # Timings of any unit, and of no host.
        timings = {build: Timing.of({i: s[key] * scale for i, s in enumerate(own)}, [0.0]) for build, own in self.samples.items()}
        interval = ratio(timings["flag_off"], timings["stock"])
        pairs = len(self.samples["stock"])
        return {
            "suite": "overhead",
            "name": self.name,
            "unit": unit,
            **{build: round(timing.median_us, 2) for build, timing in timings.items()},
            "spread": {build: round(timing.iqr_us, 2) for build, timing in timings.items()},
            "ratio": [round(value, 4) for value in interval],
            "bytecodes": self.bytecodes,
            "pairs": pairs,
            "model_layers": None if self.name == "import_torch" else layers,
            **{
                f"{build}_{what}": round(statistics.median(sample[what] for sample in own), 4)
                for build, own in self.samples.items()
                for what in ("cpu_s", "wall_s")
                if what in own[0]
            },
            "missed": missed(interval, MAX_INSTRUCTIONS if counted else MAX_SLOWDOWN, self.bytecodes),
            "note": "" if pairs >= ENOUGH_PAIRS else f"{pairs} pairs: the interval is all of their ratios",
        }


def missed(interval: Interval, limit: float, bytecodes: dict[str, int]) -> list[str]:
    """Return what is above its limit. Too noisy an interval is not: the bytecode tells."""
    found = []
    if interval.low > limit:
        found.append(f"{interval.median:.3f} x stock ({interval.low:.3f} to {interval.high:.3f}), more than {limit}")
    executed = bytecodes["flag_off"] / bytecodes["stock"]
    if executed > MAX_BYTECODES:
        found.append(f"{executed:.4f} x stock's bytecode, more than {MAX_BYTECODES}")
    return found


def measure(
    names: list[str],
    overlay: Path,
    layers: int,
    seconds: float,
    on_rows: Callable[[list[Row]], None] = lambda rows: None,
) -> list[Row]:
    """Return the rows of some cases, which ``on_rows`` gets after each case too. Raises Failed."""
    deadline = time.monotonic() + seconds
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        environment = environments(copies(overlay, installed(), Path(folder)), overlay, dict(os.environ))
        for i, name in enumerate(names):
            kind = importing if name == "import_torch" else running
            case = Case(name, lambda build, kind=kind, name=name: kind(name, layers, build, environment[build]))
            case.measure((deadline - time.monotonic()) / (len(names) - i))
            rows.append(case.row(layers))
            on_rows(rows)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="pygraph.overhead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated")
    parser.add_argument("--quick", action="store_true", help="a model of 4 layers, in about two minutes")
    parser.add_argument("--budget", type=float, help="seconds")
    parser.add_argument("--output", type=Path, help="a JSON file for the rows")
    args = parser.parse_args()
    names = args.cases.split(",")
    if unknown := set(names) - {*CASES}:
        parser.error(f"no case {', '.join(sorted(unknown))}")
    layers, budget = QUICK if args.quick else FULL

    def on_rows(rows: list[Row]) -> None:
        if args.output:
            write_rows(args.output, rows)
        print(f"{rows[-1]['name']}: {rows[-1]['pairs']} pairs", flush=True)

    try:
        print(format_table(measure(names, overlay_on(sys.path), layers, args.budget or budget, on_rows)))
    except Failed as failure:
        sys.exit(f"error: {failure}")


if __name__ == "__main__":
    main()
