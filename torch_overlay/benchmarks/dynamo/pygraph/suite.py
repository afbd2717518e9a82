"""
A suite: cases are compiled side by side, while cases that are compiled are measured. If a case takes long to compile, each of
its variants compiles in a process of its own, which fills the caches that the measuring process reads. While a process
times something, all others are stopped. Variants of some cases also run alone in a process, from cold caches, for the time
until their steady state and for their memory.
"""

from __future__ import annotations

import contextlib
import getpass
import logging
import math
import os
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TYPE_CHECKING

from . import cgct_run, plan
from .case import described
from .catalogue import SUITES
from .parallel import MAX_MORE_MEMORY, MAX_MORE_MIB, MAX_MORE_OF_A_CHAIN, MIN_GAIN
from .processes import Answering, Machine
from .report import (
    best_other,
    captured_share,
    coverage,
    is_scheduled,
    label,
    MAX_START_UP,
    PAPER_COVERAGE,
    present,
    start_up,
    sweep_gain,
    time_of,
)
from .schedule import Schedule
from .timing import Interval, MAX_SLOWDOWN
from .varying import MIN_CAPTURED


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .case import Case
    from .report import Row
    from .schedule import Begun


log = logging.getLogger(__name__)

# A case hangs if measuring it takes so many times as long as it may have the machine to itself. The time for which the case
# is stopped does not count.
HANGS_AFTER = 3
# The part of the device's memory that cases may claim. The contexts of their processes take the rest. An estimate
DEVICE_SHARE = 0.85
# Variants with every graph deployed
DEPLOYED = ("forced_copy", "forced_node_update")
# Where the memory of variants is in the row that run alone
ALONE = {"pygraph": "reserved_mib", "stock_cg": "stock_reserved_mib"}
ALONE |= {name: f"{name}_reserved_mib" for name in ("no_cg", "largest_size")}


def kept_caches() -> str:
    temporary = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    return os.path.join(os.environ.get("TORCHINDUCTOR_CACHE_DIR", temporary), "benchmarks")


class Worker(Answering):
    """A process that runs one case."""

    def __init__(
        self, case: Case, options: Sequence[str], logs: Path, threads: int, machine: Machine, cold: bool = False
    ) -> None:
        """
        With caches of its own if ``cold``, or else the case's where they are kept: of cases
        that share kernels, one would get what another one tuned meanwhile.
        """
        self.case = case
        self.max_quiet_s = SUITES[case.suite].max_case_s
        self.caches = tempfile.TemporaryDirectory() if cold else None
        self.folder = self.caches.name if self.caches else os.path.join(kept_caches(), case.suite, case.name)
        environment = {
            **os.environ,
            "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
            # As torch.profiler does where it knows of CUDA graphs.
            "DISABLE_CUPTI_LAZY_REINIT": "1",
            "TEARDOWN_CUPTI": "0",
            "TORCHINDUCTOR_CACHE_DIR": self.folder,
            "TRITON_CACHE_DIR": os.path.join(self.folder, "triton"),
        }
        with open(logs / f"{case.suite}-{case.name}.log", "a") as output:
            command = [sys.executable, "-m", __package__, "--suite", case.suite, "--worker", case.name, *options]
            super().__init__(command, environment, output, machine)

    def forget_decisions(self) -> None:
        """Let PyGraph select again, where caches are kept."""
        shutil.rmtree(os.path.join(self.folder, "pygraph"), ignore_errors=True)

    def close(self) -> None:
        super().close()
        if self.caches:
            self.caches.cleanup()


class Claims:
    """
    Which cases have begun, if several processes share the cases of suites. Each process makes a file in ``directory`` for a
    case that it begins. Without a directory there is no other process.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory

    def take(self, case: Case) -> bool:
        """Return whether this process may begin the case: no process has until now."""
        try:
            if self.directory:
                self._of(case, self.directory).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def is_taken(self, case: Case) -> bool:
        return self.directory is not None and self._of(case, self.directory).exists()

    @staticmethod
    def _of(case: Case, directory: Path) -> Path:
        return directory / f"{case.suite}-{case.name}"


def run_suite(
    cases: list[Case],
    *,
    options: Sequence[str],
    logs: Path,
    budget_s: float,
    alone: bool = True,
    device_gib: float = math.inf,
    record: Row | None = None,
    claims: Claims | None = None,
    on_row: Callable[[Row], None] = lambda row: None,
    start_worker: Callable[..., Worker] = Worker,
) -> tuple[list[Row], list[str]]:
    """
    The rows, each given to ``on_row`` once it is known, and the names of the cases that the budget left out. Cases begin in
    the order given, but a case without room lets later ones begin. A case does not begin if it would not end in time: the
    ``record`` of an earlier run says how long cases take. Nor does it if another process has begun it, as ``claims`` tells.
    """
    known = {(row["suite"], row["name"]): row for row in (record or {}).get("cases", ())}
    deadline = time.monotonic() + budget_s
    run = _Run(options, logs, deadline, alone, device_gib, known, claims or Claims(), on_row, start_worker)
    return run.cases(cases)


@dataclass
class _Run:
    options: Sequence[str]
    logs: Path
    deadline: float
    alone: bool
    device_gib: float
    known: dict[tuple[str, str], Row]
    claims: Claims
    on_row: Callable[[Row], None]
    start_worker: Callable[..., Worker]
    machine: Machine = field(default_factory=Machine)
    threads: int = 1

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self.cores = len(os.sched_getaffinity(0))
        gib = DEVICE_SHARE * self.device_gib
        self.schedule = Schedule(self.machine, self.deadline, self.cores, gib, self.work)

    def cases(self, cases: list[Case]) -> tuple[list[Row], list[str]]:
        rows: list[Row] = []
        skipped: list[str] = []
        telling = threading.Lock()

        def tell(case: Case, row: Row | None) -> None:
            with telling:
                if row is None:
                    skipped.append(case.name)
                    return
                rows.append(row)
                self.on_row(row)

        waiting = []
        for case in cases:
            if not (lacks := self.lacks(case)):
                waiting.append(case)
            elif self.claims.take(case):
                tell(case, _without_result(case, {"skipped": f"needs {lacks}", "missed": []}))
        processes = sum(1 + self.more_processes(case) for case in waiting)
        # With one thread, Inductor compiles in the worker itself. With more it starts processes that import torch again.
        self.threads = max(1, self.cores // max(1, processes))
        # Their threads only wait for workers.
        with ThreadPoolExecutor(self.cores) as pool:
            told = []
            while waiting and (begun := self.schedule.next(waiting, self.more_processes)):
                waiting.remove(begun.case)
                if not self.claims.take(begun.case):
                    self.schedule.leave(begun)
                    continue
                self.say(begun.case, "begins")
                told.append(pool.submit(lambda begun: tell(begun.case, self.row(begun)), begun))
            for future in told:
                future.result()
        return rows, skipped + [case.name for case in waiting if not self.claims.is_taken(case)]

    def say(self, case: Case, what: str) -> None:
        log.info("%4.0f s: %s %s", time.monotonic() - self.began, case.name, what)

    def work(self, case: Case) -> plan.Work:
        return plan.work(plan.Unit(case.suite, case.name), self.known.get((case.suite, case.name), {}))

    def more_processes(self, case: Case) -> int:
        return len(self.run_alone_of(case)) + len(self.compiled_apart(case))

    def compiled_apart(self, case: Case) -> tuple[str, ...]:
        """Variants that compile beside the first one. A case that takes less time compiles them one after another."""
        return SUITES[case.suite].compiled[1:] if plan.compiles_apart(self.work(case)) else ()

    def run_alone_of(self, case: Case) -> tuple[str, ...]:
        return SUITES[case.suite].run_alone if case.alone and self.alone else ()

    def lacks(self, case: Case) -> str:
        """What the case needs and the machine does not have."""
        return case.missing or (f"{case.gib:g} GiB" if case.gib > self.device_gib else "")

    def row(self, begun: Begun) -> Row | None:
        """The row, or None if the case is left to the next run."""
        case = begun.case

        def run(process: Callable[..., Any], *args: Any) -> Any:
            try:
                return process(begun, *args)
            finally:
                self.schedule.ended(begun)

        # If not all processes have room, the later ones wait. The case's own process needs the caches that others fill, so
        # those come first. The processes of variants that run alone take the shortest time, so they come last.
        with ThreadPoolExecutor(begun.processes) as pool:
            apart = [pool.submit(run, self.fill_caches, name) for name in self.compiled_apart(case)]
            own = pool.submit(run, self.case, apart)
            alone = {name: pool.submit(run, self.run_alone, name) for name in self.run_alone_of(case)}
        row, answers = own.result(), {name: answer.result() for name, answer in alone.items()}
        if row is None:
            return None
        if "error" in row:
            row = _without_result(case, row)
        elif any(answer.get("late") for answer in answers.values()):
            return None
        else:
            _add_alone(row, answers)
        left_out = row.pop("left_out", [])
        for name in left_out:
            _note(row, f"no time to compile {name}")
        row["missed"] = missed(case, row)
        # What was left out may have shown that more can be captured.
        is_open = "error" not in row and any(name in DEPLOYED for name in left_out) and _missed_coverage(case, row)
        return None if is_open else row

    def fill_caches(self, begun: Begun, variant: str) -> float:
        """Compile a variant into the case's caches, where its own process finds it. Return the seconds that took."""
        own = self.start_worker(begun.case, self.options, self.logs, self.threads, self.machine)
        with closing([own]) as (worker,):
            start = worker.clock()
            # The case's own process will have the same error, and tells of it.
            worker.ask(f"fill_caches {variant}", self.deadline)
            return worker.clock() - start

    def case(self, begun: Begun, apart: Sequence[Future[float]]) -> Row | None:
        """What its own process says once variants were compiled ``apart``, or None if that did not end in time."""
        case = begun.case
        with closing([self.start_worker(case, self.options, self.logs, self.threads, self.machine)]) as (worker,):
            start = worker.clock()
            worker.forget_decisions()
            worker.has_time = lambda: self.schedule.has_time(begun)
            if apart:
                worker.ask(f"fill_caches {SUITES[case.suite].compiled[0]}", self.deadline)
            waits = worker.clock()
            # What the other processes took, less the time for which this one waited.
            more_s = sum(future.result() for future in apart) - (worker.clock() - waits)
            ready = worker.ask("prepare", self.deadline)
            compiled = worker.clock()
            longest = self.machine.clock() - begun.since
            self.schedule.compiled(begun)
            self.say(case, "is compiled")
            with self.schedule.measuring(begun):
                measuring = worker.clock()
                if ready.get("late") or time.monotonic() >= self.deadline:
                    return None
                row = self.measured(worker, ready)
            self.schedule.timed(begun)
            row["seconds"] = {
                "compile": round(compiled - start + more_s, 1),
                "longest": round(longest, 1),
                "measure": round(worker.clock() - measuring, 1),
                "device": round(worker.quiet_s, 1),
            }
        return None if row.pop("late", False) else row

    def run_alone(self, begun: Begun, variant: str) -> Row:
        own = self.start_worker(begun.case, self.options, self.logs, self.threads, self.machine, True)
        with closing([own]) as (worker,):
            start = worker.clock()
            row = worker.ask(f"compile_alone {variant}", self.deadline)
            if "error" not in row:
                row |= worker.ask(f"settle_alone {variant}", self.deadline)
            row["seconds"] = {"compile": worker.clock() - start - worker.quiet_s, "device": worker.quiet_s}
            return row

    def measured(self, worker: Worker, ready: Row) -> Row:
        """Once again without the variant that ended the process, so that the others have results."""
        worker.max_s = HANGS_AFTER * worker.max_quiet_s
        start = worker.clock()
        row = ready if "error" in ready else worker.ask("measure", self.deadline)
        culprit = worker.at
        if row.get("error") == "out of time":
            where = f"with {culprit}" if culprit else "with all variants"
            spent = ", ".join(f"{seconds:.0f} s {at or 'all variants'}" for at, seconds in worker.spent.items())
            alone = f"{worker.quiet_s:.0f} s alone on the device ({spent})"
            _note(row, f"{where} after {alone} and {worker.clock() - start:.0f} s in all")
        if "error" not in row or culprit in ("", "eager", "no_cg") or "late" in row:
            return row
        worker.close()
        options = [*self.options, "--without", culprit]
        again = self.start_worker(worker.case, options, self.logs, self.threads, self.machine)
        with closing([again]) as (again,):
            again.max_s = worker.max_s
            second = again.ask("measure", self.deadline)
            worker.quiet_s += again.quiet_s
        if "error" in second:
            return row
        second["failed"][culprit] = row["error"]
        second["equal"] = second["equal"] and culprit not in SUITES[worker.case.suite].must_equal
        return second


def _add_alone(row: Row, answers: dict[str, Row]) -> None:
    """What variants need that ran alone, of those whose results are right."""
    for variant, answer in answers.items():
        for key, seconds in answer.get("seconds", {}).items():
            row["seconds"][key] = round(row["seconds"][key] + seconds, 1)
        # A variant that only runs alone has no time.
        if f"{variant}_us" in row and not time_of(row, variant):
            continue
        if "error" in answer:
            _note(row, f"{variant} alone: {answer['error']}")
            continue
        row[ALONE[variant]] = round(answer["reserved_mib"])
        row[f"peak_{ALONE[variant]}"] = round(answer["peak_reserved_mib"])
        row.setdefault("pools_mib", {})[variant] = answer["pools_mib"]
        times = ("compile_s", "warm_up_s", "peak_allocated_mib")
        row.setdefault("alone", {})[variant] = {key: round(answer[key], 2) for key in times}
        launches = answer.get("launches")
        if launches and "error" in launches:
            _note(row, f"{variant} was not profiled: {launches['error']}")
        elif launches:
            found = row.setdefault("launches", {})
            # An open choice says less than the one that was timed.
            if variant not in found or "undecided" not in (answer["choice"] or ""):
                found[variant] = launches
        if variant == "pygraph" and answer["choice"] != row["choice"]:
            _note(row, f"ran alone with {answer['choice']}")


def missed(case: Case, row: Row) -> list[str]:
    """What the case must show and does not."""
    if case.suite == "cgct":
        return cgct_run.missed(case, row)
    if "error" in row:
        return [row["error"]]
    found = []
    best, ratios = best_other(row), row.get("ratios", {})
    if case.suite == "sizes":
        # In the ring stock has a recording of each size. _missed_sizes compares with it over other sizes.
        best = "no_cg"
    if row.get("pygraph_us") is None or best not in ratios:
        found.append("not measured")
    else:
        found += _slower(best, ratios[best])
    gain = case.min_gain_over_stock
    if gain and "stock_cg" in ratios and gain * ratios["stock_cg"][0] > 1:
        found.append(f"{1 / ratios['stock_cg'][1]:.2f} x faster than stock CG, not {gain} x")
    choice = row["choice"] or "undecided"
    if "undecided" in choice:
        found.append("no choice was made")
    elif case.must_capture and "no_graph" in choice:
        found.append("not captured")
    breaks, most = row.get("breaks", 0), case.max_breaks
    if most is not None and breaks > most:
        found.append(f"{breaks} graph breaks, not {most}")
    first = row.get("first_breaks", 0)
    if "stock_cg" not in row.get("failed", ()) and first > row.get("stock_first_breaks", first):
        found.append(f"{first} graph breaks in the first call, stock {row['stock_first_breaks']}")
    if row["copied_bytes"]:
        found.append(f"copies {row['copied_bytes']} bytes a call")
    if not row["equal"]:
        found.append("results differ")
    if case.suite == "bindings":
        bound = {name: choice for name, choice in row.get("forced", {}).items() if name != "copy"}
        found += [f"{name} copies: {choice}" for name, choice in bound.items() if "copy" in (choice or "copy")]
    found += _missed_coverage(case, row)
    if case.suite == "concurrent":
        found += _missed_schedule(case, row)
    if case.suite == "sizes":
        found += _missed_sizes(case, row)
    ours, theirs = row.get("reserved_mib"), row.get("stock_reserved_mib")
    if ours is not None and theirs is not None and ours > (most := theirs - case.min_saved_mib + _more_mib(row, theirs)):
        found.append(f"reserves {ours} MiB, more than {most:g} MiB")
    return found


def _more_mib(row: Row, theirs: float) -> float:
    """Return what a program may reserve beyond stock's MiB: more if kernels run side by side."""
    return max(MAX_MORE_MEMORY * theirs, MAX_MORE_MIB) if is_scheduled(row) else MAX_MORE_OF_A_CHAIN * theirs


def _missed_schedule(case: Case, row: Row) -> list[str]:
    """Ratios are PyGraph's time by the variant's."""
    ratios = row.get("ratios", {})
    if "chain" not in ratios:
        return ["not measured without schedules"]
    found = []
    # Where no schedule was chosen, both run the same graphs.
    if is_scheduled(row) and MIN_GAIN * ratios["chain"][0] > 1:
        found.append(f"{1 / ratios['chain'][1]:.3f} x as fast with schedules")
    if (gain := case.min_scheduled_gain) and "stock_cg" in ratios:
        reached = 1 / ratios["stock_cg"][1]
        found += [f"{reached:.2f} x faster than stock CG with schedules, not {gain} x"] * (reached < gain)
    return found


def _missed_sizes(case: Case, row: Row) -> list[str]:
    """Ratios are PyGraph's time by the variant's."""
    ratios = row.get("ratios", {})
    found = []
    least = case.min_sizes_gain or MIN_GAIN
    if "no_cg" in ratios and least * ratios["no_cg"][1] > 1:
        found.append(f"{1 / ratios['no_cg'][1]:.2f} x as fast as no_cg, not {least}")
    # In the ring each size has a recording of stock's. Programs whose sizes vary keep meeting new ones.
    if (gain := sweep_gain(row, "stock_cg")) is not None and gain < least:
        found.append(f"{gain:.2f} x as fast as stock_cg over {row['sweep']['stock_cg']['calls']} random sizes, not {least}")
    if (gain := sweep_gain(row, "no_cg")) is not None and gain < MIN_GAIN:
        found.append(f"{gain:.2f} x as fast as no_cg over {row['sweep']['no_cg']['calls']} random sizes, not {MIN_GAIN}")
    if (share := captured_share(row)) is None or share < MIN_CAPTURED:
        found.append(f"{share or 0:.0%} of the calls captured, not {MIN_CAPTURED:.0%}")
    reasons = filter(None, (f["by_size"] for f in row.get("functions", ())))
    found += [f"a recording for each size: {reason}" for reason in dict.fromkeys(reasons)]
    ours, theirs = (start_up(row, name) for name in ("pygraph", "no_cg"))
    if ours and theirs and ours > MAX_START_UP * theirs:
        found.append(f"start-up {ours:.1f} s, {ours / theirs:.2f} of that without CUDA graphs, not {MAX_START_UP}")
    ours, theirs = row.get("reserved_mib"), row.get("largest_size_reserved_mib")
    if ours is not None and theirs is not None and ours > theirs + max(MAX_MORE_MEMORY * theirs, MAX_MORE_MIB):
        found.append(f"reserves {ours} MiB, a recording of the largest size {theirs} MiB")
    return found


def _missed_coverage(case: Case, row: Row) -> list[str]:
    """Of the kernels, those in CUDA graphs, with every graph deployed or as chosen."""
    if case.suite != "paper" or label(row) not in PAPER_COVERAGE:
        return []
    least = PAPER_COVERAGE[label(row)][1]
    found = max(present(coverage(row, name) for name in (*DEPLOYED, "pygraph")), default=None)
    if found is None:
        return ["it is not known which kernels are in CUDA graphs"]
    # As the paper's numbers are rounded.
    return [f"{found:.2f} % of the kernels in CUDA graphs, not {least} %"] * (round(found, 2) < least)


def _slower(best: str, interval: Sequence[float]) -> list[str]:
    measured = Interval(*interval)
    text = f"{measured.median:.3f} x {best} ({measured.low:.3f} to {measured.high:.3f})"
    if measured.low > MAX_SLOWDOWN:
        return [f"{text}, more than {MAX_SLOWDOWN}"]
    if measured.is_unclear:
        return [f"{text}: too noisy to tell"]
    return []


def _without_result(case: Case, row: Row) -> Row:
    return {**described(case), "equal": False, **row}


def _note(row: Row, text: str) -> None:
    row["note"] = "; ".join(filter(None, [row.get("note"), text]))


@contextlib.contextmanager
def closing(workers: list[Worker]) -> Iterator[list[Worker]]:
    try:
        yield workers
    finally:
        for worker in workers:
            worker.close()
