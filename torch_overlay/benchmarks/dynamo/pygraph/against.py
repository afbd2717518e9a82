"""
Two builds on one GPU, case by case in turns: the suites replay, cgct, scg and bindings.

    python -m pygraph.against --old PATH --new PATH --output FILE --budget 400 [--suites scg [--cases a,b]]

A build is a PYTHONPATH: an overlay, and the benchmarks of the same checkout. The benchmarks of each
build measure that build, because they import modules by names that change. Of the other build this
program uses two command lines alone:

- ``python -m pygraph --suite SUITE --worker CASE --variants A,B``, which answers the lines prepare, measure,
  compile_alone VARIANT and settle_alone VARIANT
- ``python -m pygraph.replay --cases CASE --output FILE``

Each case runs in a process of the old build, one of the new, one of the old, and so on. Processes
are prepared side by side; one at a time measures. FILE has each case as soon as it is measured. A
run that continues another one leaves out what the other one has.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TYPE_CHECKING

from . import layers
from .against_table import BUILDS, is_complete, measured, rows
from .catalogue import select, SUITES
from .processes import process_group
from .report import write_rows
from .suite import closing, kept_caches, Worker


if TYPE_CHECKING:
    from collections.abc import Callable

    from .against_table import Entry
    from .case import Case
    from .report import Row


log = logging.getLogger(__name__)

# The variants that a process measures. The others are stock's, which neither build changes.
VARIANTS = {
    "cgct": ("pygraph", "forced_node_update"),
    "scg": ("no_cg", "pygraph"),
    "bindings": ("no_cg", "pygraph", "forced_node_update", "forced_prelude", "forced_table"),
}
COMPARED = ("replay", *VARIANTS)

# Seconds that must be left when a case is begun: less is not enough to compile and measure it.
MIN_CASE_S = 45.0
# Seconds that a process may take: to compile, and for a case of replay.
MAX_COMPILE_S = 240.0
MAX_REPLAY_S = 120.0
# Of each process that is prepared, as one core has one or two such processes.
COMPILE_THREADS = 2
# Of interleaved timing, for a case of the catalogue. The suite replay has its own number.
ROUNDS = 11


class OutOfTime(Exception):
    """The budget ended while a case was measured."""


def names(suite: str) -> list[str]:
    """Return the cases of a suite that this machine has the libraries for."""
    if suite == "replay":
        return list(layers.CASES)
    return [case.name for case in select(suite) if not case.missing]


@dataclass
class Comparison:
    # PYTHONPATH of each build.
    paths: dict[str, str]
    # Of both command lines.
    options: list[str]
    logs: Path
    deadline: float
    pairs: int = 2
    rounds: int | None = None
    small: bool = False
    # Whether memory is measured, in a process that runs PyGraph alone.
    solo: bool = True
    save: Callable[[dict[str, Entry]], None] = lambda entries: None
    entries: dict[str, Entry] = field(default_factory=dict)
    start_worker: Callable[..., Worker] = Worker

    def __post_init__(self) -> None:
        # What calls take while others are timed too says little of which graphs are faster.
        self.settling = threading.Lock()

    def run(self, suites: list[str], chosen: list[str] | None = None) -> list[str]:
        """Measure what has no complete entry, and return what the budget left out."""
        tasks = [(suite, name) for suite in suites for name in names(suite) if chosen is None or name in chosen]
        left = [task for task in tasks if not self._is_done(*task)]
        while left:
            suite, _ = left[0]
            count = 1 if suite == "replay" else self._together()
            batch = [name for of, name in left[:count] if of == suite]
            if self.deadline - time.monotonic() < MIN_CASE_S:
                break
            try:
                if suite == "replay":
                    self._done("replay", batch[0], self.replay(batch[0]))
                else:
                    self.batch(suite, batch)
            except OutOfTime:
                break
            left = left[len(batch) :]
        return [f"{suite}/{name}" for suite, name in left if not self._is_done(suite, name)]

    def _is_done(self, suite: str, name: str) -> bool:
        entry = self.entries.get(f"{suite}/{name}")
        return entry is not None and is_complete(entry)

    def _done(self, suite: str, name: str, entry: Entry) -> None:
        key = f"{suite}/{name}"
        self.entries[key] = entry
        self.save(self.entries)
        (row, *_) = rows({key: entry})
        flags = f": {'; '.join(row['flags'])}" if row["flags"] else ""
        print(f"{key}: {row['us']['old']} us, then {row['us']['new']} us{flags}", flush=True)

    def _together(self) -> int:
        """Return how many cases are prepared side by side: as many as have a core for each process."""
        return max(1, len(os.sched_getaffinity(0)) // (len(BUILDS) * self.pairs))

    def _caches(self, build: str, suite: str) -> str:
        return os.path.join(kept_caches(), "against", build, suite)

    # cases of the catalogue

    def batch(self, suite: str, chosen: list[str]) -> None:
        """Prepare some cases side by side, and measure one after the other. Raises OutOfTime."""
        cases = select(suite, chosen)
        tasks = [(case, build) for case in cases for build in BUILDS]
        workers = {
            (case.name, build): [self._start(case, build, VARIANTS[suite]) for _ in range(self.pairs)]
            for case, build in tasks
        }
        by = min(self.deadline, time.monotonic() + MAX_COMPILE_S)
        with closing([worker for own in workers.values() for worker in own]):
            with ThreadPoolExecutor(len(tasks)) as pool:
                # What compiles would disturb what is measured: all end before the first measures.
                found = list(pool.map(lambda task: self._prepared(*task, workers[task[0].name, task[1]], by), tasks))
            ready = {(case.name, build): answers for (case, build), answers in zip(tasks, found)}
            for case in cases:
                own = {build: ready[case.name, build] for build in BUILDS}
                self._done(suite, case.name, self._measured(case, own, workers))

    def _start(self, case: Case, build: str, variants: tuple[str, ...]) -> Worker:
        rounds = [] if self.rounds is None else ["--rounds", str(self.rounds)]
        return self.start_worker(
            case,
            [*self.options, *rounds, *["--small"] * self.small, "--variants", ",".join(variants)],
            self.logs,
            COMPILE_THREADS,
            caches=self._caches(build, case.suite),
            variables={"PYTHONPATH": self.paths[build]},
        )

    def _prepared(self, case: Case, build: str, workers: list[Worker], by: float) -> tuple[list[Row], Row]:
        """Return the answers of the processes of one build, which compile one after the other, and the memory."""
        answers = [worker.ask("prepare", by) for worker in workers]
        return answers, self._memory(case, build, by) if self.solo else {}

    def _memory(self, case: Case, build: str, by: float) -> Row:
        with closing([self._start(case, build, ("pygraph",))]) as (worker,):
            worker.forget_decisions()
            row = worker.ask("compile_alone pygraph", by)
            if "error" not in row:
                with self.settling:
                    row = worker.ask("settle_alone pygraph", by)
        if "error" in row:
            return {"error": row["error"]}
        amounts = {name: round(row[name]) for name in ("reserved_mib", "peak_reserved_mib")}
        return {**amounts, "choice": row["choice"]}

    def _measured(
        self, case: Case, ready: dict[str, tuple[list[Row], Row]], workers: dict[tuple[str, str], list[Worker]]
    ) -> Entry:
        entry: Entry = {build: [] for build in BUILDS}
        for i in range(self.pairs):
            for build in BUILDS:
                worker, row = workers[case.name, build][i], ready[build][0][i]
                if "error" not in row:
                    # Processes that ran beside others, and the last one, have decided.
                    worker.forget_decisions()
                    row = worker.ask("measure", min(self.deadline, time.monotonic() + SUITES[case.suite].max_case_s))
                worker.close()
                self._in_time(row)
                entry[build].append(measured(row))
        if self.solo:
            entry["memory"] = {build: ready[build][1] for build in BUILDS}
        return entry

    def _in_time(self, row: Row) -> None:
        if row.get("late") and time.monotonic() >= self.deadline:
            raise OutOfTime

    # the suite replay

    def replay(self, name: str) -> Entry:
        """Raises OutOfTime."""
        entry: Entry = {build: [] for build in BUILDS}
        for _ in range(self.pairs):
            for build in BUILDS:
                row = self._replayed(name, build)
                self._in_time(row)
                entry[build].append(measured(row))
        return entry

    def _replayed(self, name: str, build: str) -> Row:
        caches = os.path.join(self._caches(build, "replay"), name)
        environment = {
            **os.environ,
            "PYTHONPATH": self.paths[build],
            "TORCHINDUCTOR_CACHE_DIR": caches,
            "TRITON_CACHE_DIR": os.path.join(caches, "triton"),
        }
        seconds = min(MAX_REPLAY_S, self.deadline - time.monotonic())
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "rows.json")
            command = [sys.executable, "-m", "pygraph.replay", "--cases", name, "--output", str(file), *self.options]
            with open(self.logs / f"replay_{name}.log", "a") as output:
                with process_group(command, output, environment) as process:
                    try:
                        status = process.wait(max(1.0, seconds))
                    except subprocess.TimeoutExpired:
                        return {"error": "out of time", "late": True}
            found = json.loads(file.read_text()) if file.exists() else []
        row = next((row for row in found if row["name"] == name), None)
        return row or {"error": f"process ended with status {status}"}


def earlier_entries(file: Path | None) -> dict[str, Entry]:
    return json.loads(file.read_text())["cases"] if file else {}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="pygraph.against", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for build in BUILDS:
        parser.add_argument(f"--{build}", required=True, metavar="PATH", help=f"PYTHONPATH of the {build} build")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--earlier", type=Path, metavar="FILE", help="the output of the run that this one continues")
    parser.add_argument("--suites", default=",".join(COMPARED), help="comma-separated")
    parser.add_argument("--cases", help="comma-separated; all by default")
    parser.add_argument("--pairs", type=int, default=2, help="processes of each build for a case")
    parser.add_argument("--budget", type=float, default=400.0, help="seconds")
    parser.add_argument("--logs", type=Path, default=Path("."))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="shrunk cases")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args.logs.mkdir(parents=True, exist_ok=True)

    def save(entries: dict[str, Any]) -> None:
        write_rows(args.output, {"cases": entries, "table": rows(entries)})

    comparison = Comparison(
        {build: getattr(args, build) for build in BUILDS},
        ["--device", args.device],
        args.logs,
        time.monotonic() + args.budget,
        pairs=args.pairs,
        rounds=args.rounds,
        small=args.small,
        solo=args.device == "cuda",
        save=save,
        entries=earlier_entries(args.earlier),
    )
    save(comparison.entries)
    left = comparison.run(args.suites.split(","), args.cases.split(",") if args.cases else None)
    if left:
        print(f"out of time, not run: {', '.join(left)}")


if __name__ == "__main__":
    main()
