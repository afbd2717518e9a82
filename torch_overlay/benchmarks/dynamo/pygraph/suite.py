"""
A suite: every case is compiled at the same time, measured alone, and the memory of its
variants measured last, side by side.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .cases import Case
    from .report import Row


log = logging.getLogger(__name__)

MAX_SLOWDOWN = 1.02
# Of the budget: compiling that takes longer leaves no time to measure.
COMPILE_SHARE = 0.5
MEMORY_SHARE = 0.15
# A case that hangs must not take the time of the others.
MAX_CASE_S = 90
MEMORY_VARIANTS = {"stock_cg": "stock_reserved_mib", "pygraph": "reserved_mib"}


class Worker:
    """A process that runs one case and answers lines on stdin with lines on stdout."""

    def __init__(self, case: Case, options: Sequence[str], logs: Path, threads: int) -> None:
        self.case = case
        with open(logs / f"{case.name}.log", "a") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __package__, "--worker", case.name, *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": str(threads)},
                # Compile workers are children of this process and end with its group.
                start_new_session=True,
            )

    def ask(self, command: str, deadline: float) -> Row:
        """The answer, or a row that says why there is none."""
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), self.kill)
        timer.start()
        try:
            print(command, file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        if answer:
            return json.loads(answer)
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


def run_suite(
    cases: list[Case],
    *,
    options: Sequence[str],
    logs: Path,
    budget_s: float,
    memory: bool = True,
    on_row: Callable[[Row], None] = lambda row: None,
    start_worker: Callable[..., Worker] = Worker,
) -> tuple[list[Row], list[str]]:
    """The rows, and the names of the cases that the budget left out."""
    start = time.monotonic()
    deadline = start + budget_s
    threads = max(1, 2 * (os.cpu_count() or 1) // len(cases))
    pool = ThreadPoolExecutor(len(cases))
    rows, skipped = [], []
    with pool, _closing([start_worker(case, options, logs, threads) for case in cases]) as workers:
        prepared = list(pool.map(lambda w: w.ask("prepare", start + COMPILE_SHARE * budget_s), workers))
        log.info("compiled %d cases in %.0f s", len(cases), time.monotonic() - start)
        # Leaves the end of the budget to the memory of what was measured.
        measured_by = deadline - MEMORY_SHARE * budget_s * memory
        for worker, ready in zip(workers, prepared):
            if time.monotonic() > measured_by:
                skipped.append(worker.case.name)
                continue
            by = min(measured_by, time.monotonic() + MAX_CASE_S)
            row = ready if "error" in ready else worker.ask("measure", by)
            rows.append(_named(worker.case, row))
            on_row(rows[-1])
            worker.close()

    measured = [row for row in rows if "error" not in row]
    by_name = {case.name: case for case in cases}
    if memory and measured:
        _measure_memory(measured, by_name, options, logs, deadline, threads, start_worker)
    for row in rows:
        row["missed"] = missed(by_name[row["name"]], row)
    return rows, skipped


def _measure_memory(
    rows: list[Row],
    cases: dict[str, Case],
    options: Sequence[str],
    logs: Path,
    deadline: float,
    threads: int,
    start_worker: Callable[..., Worker],
) -> None:
    def measure(row: Row, variant: str) -> Row:
        with _closing([start_worker(cases[row["name"]], options, logs, threads)]) as (worker,):
            return worker.ask(f"memory {variant}", deadline)

    tasks = [(row, variant) for row in rows for variant in MEMORY_VARIANTS]
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 2) - 2)) as pool:
        answers = list(pool.map(lambda task: measure(*task), tasks))
    for (row, variant), answer in zip(tasks, answers):
        if "error" in answer:
            _note(row, f"memory of {variant}: {answer['error']}")
            continue
        row[MEMORY_VARIANTS[variant]] = round(answer["reserved_mib"])
        row[f"peak_{MEMORY_VARIANTS[variant]}"] = round(answer["peak_reserved_mib"])
        if variant == "pygraph" and answer["choice"] != row["choice"]:
            _note(row, f"memory measured with {answer['choice']}")


def missed(case: Case, row: Row) -> list[str]:
    """What the case must show and does not."""
    if "error" in row:
        return [row["error"]]
    found = []
    pygraph, stock = row["pygraph_us"], row["stock_cg_us"]
    best = min(filter(None, (row["no_cg_us"], stock)), default=None)
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
    ours, theirs = row.get("reserved_mib"), row.get("stock_reserved_mib")
    if ours is not None and theirs is not None and ours > theirs - case.min_saved_mib:
        found.append(f"reserves {ours} MiB, more than {theirs - case.min_saved_mib:g} MiB")
    return found


def _named(case: Case, row: Row) -> Row:
    if "error" not in row:
        return row
    empty = dict.fromkeys(("no_cg_us", "stock_cg_us", "pygraph_us", "choice", "max_diff", "note"))
    return {"suite": case.suite, "name": case.name, **empty, "equal": False, **row}


def _note(row: Row, text: str) -> None:
    row["note"] = "; ".join(filter(None, [row.get("note"), text]))


@contextlib.contextmanager
def _closing(workers: list[Worker]) -> Iterator[list[Worker]]:
    try:
        yield workers
    finally:
        for worker in workers:
            worker.close()
