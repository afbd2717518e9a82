"""
A suite: as many cases as fit are compiled at the same time, and variants run alone beside
them, for their memory and for the time until their steady state; each case is then measured
while nothing else runs, after which its row is complete.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import cgct_run
from .case import described
from .catalogue import SUITES
from .processes import Answering
from .report import best_candidate, coverage, label, PAPER_COVERAGE, present, time_of
from .timing import Interval, MAX_SLOWDOWN


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .case import Case
    from .report import Row


log = logging.getLogger(__name__)

# Of what is left of the budget: compiling that takes longer leaves no time to measure.
COMPILE_SHARE = 0.5
# Of the time for compiling: the last variant that begins to compile must end in it.
PREPARE_SHARE = 0.7
# Nor must one that hangs take the time of later cases.
MAX_COMPILE_S = 300.0
# What is left when more cases are begun: less is not enough to compile and measure any.
MIN_BATCH_S = 60.0
# Processes that run a variant alone at the same time.
MAX_ALONE = 8
# Of the device's memory: for the cases of a batch, and for variants that run alone, which
# need about half of what all variants do.
BATCH_SHARE = 0.65
ALONE_SHARE = 0.3
# That compile kernels for a variant that runs alone.
ALONE_THREADS = 2
# Those whose memory has a place in the row.
MEMORY = {"stock_cg": "stock_reserved_mib", "pygraph": "reserved_mib"}


def kept_caches() -> str:
    temporary = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    return os.path.join(os.environ.get("TORCHINDUCTOR_CACHE_DIR", temporary), "benchmarks")


class Worker(Answering):
    """A process that runs one case."""

    def __init__(self, case: Case, options: Sequence[str], logs: Path, threads: int, cold: bool = False) -> None:
        """
        With caches of its own if ``cold``, or else the case's where they are kept: of cases
        that share kernels, one would get what another one tuned meanwhile.
        """
        self.case = case
        self.caches = tempfile.TemporaryDirectory() if cold else None
        self.folder = self.caches.name if self.caches else os.path.join(kept_caches(), case.name)
        environment = {
            **os.environ,
            "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
            # As torch.profiler does where it knows of CUDA graphs.
            "DISABLE_CUPTI_LAZY_REINIT": "1",
            "TEARDOWN_CUPTI": "0",
            "TORCHINDUCTOR_CACHE_DIR": self.folder,
            "TRITON_CACHE_DIR": os.path.join(self.folder, "triton"),
        }
        with open(logs / f"{case.name}.log", "a") as output:
            command = [sys.executable, "-m", __package__, "--suite", case.suite, "--worker", case.name, *options]
            super().__init__(command, environment, output)

    def forget_decisions(self) -> None:
        "Of processes that ran beside others, which compiled."
        shutil.rmtree(os.path.join(self.folder, "pygraph"), ignore_errors=True)

    def close(self) -> None:
        super().close()
        if self.caches:
            self.caches.cleanup()


def run_suite(
    cases: list[Case],
    *,
    options: Sequence[str],
    logs: Path,
    budget_s: float,
    solo: bool = True,
    device_gib: float = math.inf,
    on_row: Callable[[Row], None] = lambda row: None,
    start_worker: Callable[..., Worker] = Worker,
) -> tuple[list[Row], list[str]]:
    """The rows, each given to ``on_row`` once it is known, and the names of the cases that the budget left out."""
    return _Run(options, logs, time.monotonic() + budget_s, solo, device_gib, on_row, start_worker).cases(cases)


class _Room:
    """Waits until there is some."""

    def __init__(self, processes: int, gib: float) -> None:
        self.processes, self.gib, self.limit = processes, gib, gib
        self.changed = threading.Condition()

    @contextlib.contextmanager
    def held(self, gib: float) -> Iterator[None]:
        gib = min(gib, self.limit)
        with self.changed:
            self.changed.wait_for(lambda: self.processes and gib <= self.gib)
            self.processes -= 1
            self.gib -= gib
        try:
            yield
        finally:
            with self.changed:
                self.processes += 1
                self.gib += gib
                self.changed.notify_all()


@dataclass
class _Run:
    options: Sequence[str]
    logs: Path
    deadline: float
    solo: bool
    device_gib: float
    on_row: Callable[[Row], None]
    start_worker: Callable[..., Worker]

    def cases(self, cases: list[Case]) -> tuple[list[Row], list[str]]:
        rows: list[Row] = []
        skipped: list[str] = []
        for case in cases:
            if case.missing:
                rows.append(_without_result(case, {"skipped": f"needs {case.missing}", "missed": []}))
                self.on_row(rows[-1])
        batches = _batches([case for case in cases if not case.missing], BATCH_SHARE * self.device_gib)
        for i, batch in enumerate(batches):
            left = self.deadline - time.monotonic()
            if left <= (MIN_BATCH_S if i else 0.0):
                skipped += [case.name for case in batch]
                continue
            compiling_s = min(COMPILE_SHARE * left, MAX_COMPILE_S)
            if batch is batches[-1]:
                # It takes no time of later cases, and to measure few takes less than half.
                compiling_s = max(compiling_s, left - sum(SUITES[case.suite].max_case_s for case in batch))
            done, late = self.batch(batch, compiling_s)
            rows += done
            skipped += late
        return rows, skipped

    def batch(self, cases: list[Case], compiling_s: float) -> tuple[list[Row], list[str]]:
        """Cases that are prepared at the same time, and measured one after the other."""
        start = time.monotonic()
        threads = max(1, 2 * len(os.sched_getaffinity(0)) // len(cases))
        compiled_by = start + compiling_s
        room = _Room(MAX_ALONE, ALONE_SHARE * self.device_gib)
        # What calls take while others are timed too says little of which graphs are faster.
        settling = threading.Lock()
        tasks = [(case, name) for case in cases for name in SUITES[case.suite].solo if self.solo]
        rows, skipped = [], []
        with closing([self.start_worker(c, self.options, self.logs, threads) for c in cases]) as workers:
            # The threads only wait: for the workers, or for room.
            with ThreadPoolExecutor(len(cases) + max(1, len(tasks))) as pool:
                question = f"prepare {PREPARE_SHARE * compiling_s:.0f}"
                preparing = {w.case.name: pool.submit(w.ask, question, compiled_by) for w in workers}

                def alone(case: Case, variant: str) -> Row:
                    cold = SUITES[case.suite].cold
                    if not cold:
                        preparing[case.name].result()
                    with room.held(case.gib / 2):
                        if time.monotonic() >= compiled_by:
                            return {"error": "out of time"}
                        own = self.start_worker(case, self.options, self.logs, ALONE_THREADS, cold)
                        with closing([own]) as (worker,):
                            row = worker.ask(f"compile_alone {variant}", compiled_by)
                            if "error" not in row:
                                with settling:
                                    row |= worker.ask(f"settle_alone {variant}", compiled_by)
                            return row

                # Submitted in pairs, so that what is compared runs in the same crowd.
                running = {(case.name, name): pool.submit(alone, case, name) for case, name in tasks}
            log.info("compiled %d cases in %.0f s", len(cases), time.monotonic() - start)
            for worker in workers:
                name = worker.case.name
                ready = preparing[name].result()
                if time.monotonic() >= self.deadline or ("late" in ready and len(cases) > 1):
                    skipped.append(name)
                    continue
                by = self.deadline
                if len(cases) > 1:
                    by = min(by, time.monotonic() + SUITES[worker.case.suite].max_case_s)
                is_compiled = "late" not in ready
                row = self.measured(worker, ready, by, threads)
                worker.close()
                if row.pop("late", False) and is_compiled and by == self.deadline:
                    skipped.append(name)
                    continue
                if "error" in row:
                    row = _without_result(worker.case, row)
                else:
                    _add_alone(row, {variant: run.result() for (case, variant), run in running.items() if case == name})
                row["missed"] = missed(worker.case, row)
                rows.append(row)
                self.on_row(row)
        return rows, skipped

    def measured(self, worker: Worker, ready: Row, by: float, threads: int) -> Row:
        """Once again without the variant that ended the process, so that the others have results."""
        worker.forget_decisions()
        row = ready if "error" in ready else worker.ask("measure", by)
        culprit = worker.at
        if "error" not in row or culprit in ("", "eager", "no_cg") or time.monotonic() > by:
            return row
        worker.close()
        options = [*self.options, "--without", culprit]
        with closing([self.start_worker(worker.case, options, self.logs, threads)]) as (again,):
            second = again.ask("measure", by)
        if "error" in second:
            return row
        second["failed"][culprit] = row["error"]
        second["equal"] = second["equal"] and culprit not in SUITES[worker.case.suite].must_equal
        return second


def _add_alone(row: Row, answers: dict[str, Row]) -> None:
    """What variants need that ran alone, of those whose results are right."""
    for variant, answer in answers.items():
        if not time_of(row, variant):
            continue
        if "error" in answer:
            _note(row, f"{variant} alone: {answer['error']}")
            continue
        if variant in MEMORY:
            row[MEMORY[variant]] = round(answer["reserved_mib"])
            row[f"peak_{MEMORY[variant]}"] = round(answer["peak_reserved_mib"])
            row.setdefault("pools_mib", {})[variant] = answer["pools_mib"]
        if SUITES[row["suite"]].cold:
            alone = ("compile_s", "warm_up_s", "peak_allocated_mib")
            row.setdefault("alone", {})[variant] = {key: round(answer[key], 2) for key in alone}
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


def _batches(cases: list[Case], gib: float) -> list[list[Case]]:
    """As few as the limits allow, of like size, each with the small cases first."""
    if not cases:
        return []
    together = SUITES[cases[0].suite].together
    count = max(math.ceil(len(cases) / together), math.ceil(sum(case.gib for case in cases) / gib))
    while True:
        batches: list[list[Case]] = [[] for _ in range(count)]
        for case in sorted(cases, key=lambda case: -case.gib):
            room = [batch for batch in batches if len(batch) < together]
            min(room, key=lambda batch: (sum(other.gib for other in batch), len(batch))).append(case)
        fits = all(len(batch) == 1 or sum(case.gib for case in batch) <= gib for batch in batches if batch)
        if fits or count >= len(cases):
            order = {case.name: i for i, case in enumerate(cases)}
            return [sorted(batch, key=lambda case: (case.gib, order[case.name])) for batch in batches if batch]
        count += 1


def missed(case: Case, row: Row) -> list[str]:
    """What the case must show and does not."""
    if case.suite == "cgct":
        return cgct_run.missed(case, row)
    if "error" in row:
        return [row["error"]]
    found = []
    best, ratios = best_candidate(row), row.get("ratios", {})
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
    if breaks > row.get("stock_breaks", breaks):
        found.append(f"{breaks} graph breaks, stock {row['stock_breaks']}")
    if row["copied_bytes"]:
        found.append(f"copies {row['copied_bytes']} bytes a call")
    if not row["equal"]:
        found.append("results differ")
    if case.suite == "bindings":
        bound = {name: choice for name, choice in row.get("forced", {}).items() if name != "copy"}
        found += [f"{name} copies: {choice}" for name, choice in bound.items() if "copy" in (choice or "copy")]
    if case.suite == "paper" and label(row) in PAPER_COVERAGE:
        found += _missed_coverage(row, PAPER_COVERAGE[label(row)][1])
    ours, theirs = row.get("reserved_mib"), row.get("stock_reserved_mib")
    if ours is not None and theirs is not None and ours > theirs - case.min_saved_mib:
        found.append(f"reserves {ours} MiB, more than {theirs - case.min_saved_mib:g} MiB")
    return found


def _missed_coverage(row: Row, least: float) -> list[str]:
    """``least``: percent of the kernels in CUDA graphs, with every graph deployed or as chosen."""
    found = max(present(coverage(row, name) for name in ("forced_copy", "pygraph")), default=None)
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
