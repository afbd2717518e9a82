"""
A suite: as many cases as fit are compiled at the same time; each is then measured while
nothing else runs; and last, variants are run alone, side by side, for their memory and for
the time until their steady state.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import cgct_run
from .cases import described, SUITES
from .report import coverage, label, PAPER_COVERAGE, present, time_of


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .cases import Case
    from .report import Row


log = logging.getLogger(__name__)

MAX_SLOWDOWN = 1.02
# Of what is left of the budget: compiling that takes longer leaves no time to measure.
COMPILE_SHARE = 0.5
SOLO_SHARE = 0.15
# Of the time for compiling: the last variant that begins to compile must end in it.
PREPARE_SHARE = 0.6
# Nor must one that hangs take the time of later cases.
MAX_COMPILE_S = 300.0
MAX_SOLO_S = 240.0
# Processes at the same time: they also need the host's memory.
MAX_TOGETHER = 16
# Device memory of the variants that run alone at the same time.
SOLO_GIB = 48
# Those whose memory has a place in the row.
MEMORY = {"stock_cg": "stock_reserved_mib", "pygraph": "reserved_mib"}


class Worker:
    """A process that runs one case and answers lines on stdin with lines on stdout."""

    def __init__(self, case: Case, options: Sequence[str], logs: Path, threads: int, cold: bool = False) -> None:
        self.case = case
        # The variant it was last heard to begin with.
        self.variant = ""
        self.caches = tempfile.TemporaryDirectory() if cold else None
        environment = {
            **os.environ,
            "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
            # As torch.profiler does where it knows of CUDA graphs.
            "DISABLE_CUPTI_LAZY_REINIT": "1",
            "TEARDOWN_CUPTI": "0",
        }
        if self.caches:
            environment |= {
                "TORCHINDUCTOR_CACHE_DIR": self.caches.name,
                "TRITON_CACHE_DIR": os.path.join(self.caches.name, "triton"),
            }
        with open(logs / f"{case.name}.log", "a") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __package__, "--suite", case.suite, "--worker", case.name, *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env=environment,
                # Compile workers are children of this process and end with its group.
                start_new_session=True,
            )

    def ask(self, command: str, deadline: float) -> Row:
        """The answer, or a row that says why there is none."""
        self.variant = ""
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), self.kill)
        timer.start()
        try:
            print(command, file=self.process.stdin, flush=True)
            for line in self.process.stdout:
                answer = json.loads(line)
                if "at" not in answer:
                    return answer
                self.variant = answer["at"]
        except (BrokenPipeError, ValueError):
            pass  # it ended, perhaps in the middle of a line
        finally:
            timer.cancel()
        code = self.process.wait()
        late = time.monotonic() >= deadline
        return {"error": "out of time" if late else f"process ended with status {code}"}

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        if self.caches:
            self.caches.cleanup()


def run_suite(
    cases: list[Case],
    *,
    options: Sequence[str],
    logs: Path,
    budget_s: float,
    solo: bool = True,
    on_row: Callable[[Row], None] = lambda row: None,
    start_worker: Callable[..., Worker] = Worker,
) -> tuple[list[Row], list[str]]:
    """The rows, and the names of the cases that the budget left out."""
    return _Run(options, logs, time.monotonic() + budget_s, solo, on_row, start_worker).cases(cases)


@dataclass
class _Run:
    options: Sequence[str]
    logs: Path
    deadline: float
    solo: bool
    on_row: Callable[[Row], None]
    start_worker: Callable[..., Worker]

    def cases(self, cases: list[Case]) -> tuple[list[Row], list[str]]:
        rows: list[Row] = []
        skipped: list[str] = []
        runnable = []
        for case in cases:
            if case.missing:
                rows.append(_without_result(case, {"skipped": f"needs {case.missing}", "missed": []}))
                self.on_row(rows[-1])
            else:
                runnable.append(case)
        waiting = _batches(runnable)
        while waiting:
            batch = waiting.pop(0)
            left = self.deadline - time.monotonic()
            if left <= 0:
                skipped += [case.name for case in batch]
                continue
            done, late = self.batch(batch, left)
            rows += done
            skipped += late
        return rows, skipped

    def batch(self, cases: list[Case], left: float) -> tuple[list[Row], list[str]]:
        """Cases that are prepared at the same time, measured one after the other, and then run alone."""
        start = time.monotonic()
        threads = max(1, 2 * (os.cpu_count() or 1) // len(cases))
        solo = [name for name in SUITES[cases[0].suite].solo if self.solo]
        compiled_by = start + min(COMPILE_SHARE * left, MAX_COMPILE_S)
        measured_by = self.deadline - SOLO_SHARE * left * bool(solo)
        rows, skipped = [], []
        pool = ThreadPoolExecutor(len(cases))
        with pool, _closing([self.start_worker(c, self.options, self.logs, threads) for c in cases]) as workers:
            seconds = PREPARE_SHARE * (compiled_by - start)
            prepared = list(pool.map(lambda w: w.ask(f"prepare {seconds:.0f}", compiled_by), workers))
            log.info("compiled %d cases in %.0f s", len(cases), time.monotonic() - start)
            for worker, ready in zip(workers, prepared):
                if time.monotonic() > measured_by:
                    skipped.append(worker.case.name)
                    continue
                by = min(measured_by, time.monotonic() + SUITES[worker.case.suite].max_case_s)
                row = self.measured(worker, ready, by, threads)
                if "error" in row:
                    row = _without_result(worker.case, row)
                rows.append(row)
                row["missed"] = missed(worker.case, row)
                self.on_row(row)
                worker.close()

        measured = [row for row in rows if "error" not in row]
        if solo and measured:
            by_name = {case.name: case for case in cases}
            self.alone(measured, by_name, solo, threads)
            for row in measured:
                row["missed"] = missed(by_name[row["name"]], row)
        return rows, skipped

    def measured(self, worker: Worker, ready: Row, by: float, threads: int) -> Row:
        """Once again without the variant that ended the process, so that the others have results."""
        row = ready if "error" in ready else worker.ask("measure", by)
        culprit = worker.variant
        if "error" not in row or culprit in ("", "eager", "no_cg") or time.monotonic() > by:
            return row
        worker.close()
        options = [*self.options, "--without", culprit]
        with _closing([self.start_worker(worker.case, options, self.logs, threads)]) as (again,):
            second = again.ask("measure", by)
        if "error" in second:
            return row
        second["failed"][culprit] = row["error"]
        second["equal"] = second["equal"] and culprit not in SUITES[worker.case.suite].must_equal
        return second

    def alone(self, rows: list[Row], cases: dict[str, Case], names: list[str], threads: int) -> None:
        deadline = min(self.deadline, time.monotonic() + MAX_SOLO_S)

        def ask(row: Row, variant: str) -> Row:
            case = cases[row["name"]]
            cold = variant in SUITES[case.suite].cold
            with _closing([self.start_worker(case, self.options, self.logs, threads, cold)]) as (worker,):
                return worker.ask(f"solo {variant}", deadline)

        tasks = [(row, name) for row in rows for name in names if time_of(row, name)]
        heaviest = max(cases[row["name"]].gib for row in rows)
        processes = min(MAX_TOGETHER, max(2, (os.cpu_count() or 2) - 2), max(1, int(SOLO_GIB / heaviest)))
        with ThreadPoolExecutor(processes) as pool:
            answers = list(pool.map(lambda task: ask(*task), tasks))
        for (row, variant), answer in zip(tasks, answers):
            if "error" in answer:
                _note(row, f"{variant} alone: {answer['error']}")
                continue
            if variant in MEMORY:
                row[MEMORY[variant]] = round(answer["reserved_mib"])
                row[f"peak_{MEMORY[variant]}"] = round(answer["peak_reserved_mib"])
            if variant in SUITES[row["suite"]].cold:
                alone = ("compile_s", "warm_up_s", "peak_allocated_mib")
                row.setdefault("alone", {})[variant] = {key: round(answer[key], 2) for key in alone}
            launches = answer.get("launches")
            if launches and "error" in launches:
                _note(row, f"{variant} was not profiled: {launches['error']}")
            elif launches:
                row.setdefault("launches", {})[variant] = launches
            if variant == "pygraph" and answer["choice"] != row["choice"]:
                _note(row, f"ran alone with {answer['choice']}")


def _batches(cases: list[Case]) -> list[list[Case]]:
    """In order, as many as the device's memory holds."""
    batches: list[list[Case]] = []
    for case in cases:
        limit = SUITES[case.suite].gib
        full = batches and (
            len(batches[-1]) == MAX_TOGETHER or sum(other.gib for other in batches[-1]) + case.gib > limit
        )
        if not batches or full:
            batches.append([])
        batches[-1].append(case)
    return batches


def missed(case: Case, row: Row) -> list[str]:
    """What the case must show and does not."""
    if case.suite == "cgct":
        return cgct_run.missed(case, row)
    if "error" in row:
        return [row["error"]]
    found = []
    pygraph, stock = row.get("pygraph_us"), row.get("stock_cg_us")
    # What is wrong is no alternative.
    right = [row.get(f"{name}_us") for name in ("no_cg", "stock_cg") if name not in row.get("failed", ())]
    best = min(filter(None, right), default=None)
    if pygraph is None or best is None:
        found.append("not measured")
    elif pygraph > MAX_SLOWDOWN * best:
        found.append(f"{pygraph} us > {MAX_SLOWDOWN} x {best} us")
    gain = case.min_gain_over_stock
    if gain and pygraph and stock and stock < gain * pygraph:
        found.append(f"{stock / pygraph:.2f} x faster than stock CG, not {gain} x")
    choice = row["choice"] or "undecided"
    if "undecided" in choice:
        found.append("no choice was made")
    elif case.must_capture and "no_graph" in choice:
        found.append("not captured")
    if row["copied_bytes"]:
        found.append(f"copies {row['copied_bytes']} bytes a call")
    if not row["equal"]:
        found.append("results differ")
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


def _without_result(case: Case, row: Row) -> Row:
    empty = dict.fromkeys(("no_cg_us", "stock_cg_us", "pygraph_us", "choice", "max_diff", "note"))
    return {**described(case), **empty, "equal": False, **row}


def _note(row: Row, text: str) -> None:
    row["note"] = "; ".join(filter(None, [row.get("note"), text]))


@contextlib.contextmanager
def _closing(workers: list[Worker]) -> Iterator[list[Worker]]:
    try:
        yield workers
    finally:
        for worker in workers:
            worker.close()
