"""
Measures PyGraph against no CUDA graphs and stock CUDA graphs, in one patched build.

    python -m pygraph --suite paper --output rows.json [--cases a,b] [--budget 420]
    python -m pygraph --suite pi,paper --output rows.json [--cases pi/a,paper/b]
    python -m pygraph --smoke

The suites: pi (small graphs, what parameter indirection must show), cgct (values on the CPU
in programs for the GPU), paper (the 25 workloads of the paper's evaluation), modern (workloads
of today), mend (programs that break the graph), concurrent (kernels side by side), sizes (sizes that vary), scg (graphs of all sizes, every candidate timed), quick (a few of paper and modern).
--smoke needs no GPU: it builds every case in a small size and takes a step of it.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch._dynamo

from . import catalogue, smoke
from .cgct_run import CpuValuesRun
from .program import VARIANTS
from .report import format_table, write_rows
from .suite import Claims, run_suite
from .worker import CaseRun, summary


if TYPE_CHECKING:
    from collections.abc import Callable

    from .report import Row


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="pygraph",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--suite", default="pi", metavar="SUITE,...")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--cases", help="comma-separated; all by default")
    parser.add_argument("--budget", type=float, default=420.0, help="seconds")
    parser.add_argument("--output", type=Path, help="a JSON file for the rows, instead of a table")
    parser.add_argument("--record", type=Path, metavar="FILE", help="of an earlier run, for how long cases take")
    parser.add_argument("--claims", type=Path, metavar="DIRECTORY", help="of cases that one of several processes begins")
    parser.add_argument("--logs", type=Path, default=Path("."))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="shrunk cases")
    parser.add_argument("--worker", metavar="CASE", help=argparse.SUPPRESS)
    parser.add_argument("--variants", help="comma-separated; all of the suite's by default")
    parser.add_argument("--without", help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if args.worker:
        _serve(args)
        return
    if args.smoke:
        sys.exit(smoke.main())
    try:
        selected = catalogue.select_all(args.suite.split(","), args.cases and args.cases.split(","))
    except ValueError as error:
        parser.error(str(error))
    args.logs.mkdir(parents=True, exist_ok=True)

    done: list[Row] = []

    def on_row(row: Row) -> None:
        done.append(row)
        if args.output:
            write_rows(args.output, done)
        print(f"{len(done)}/{len(selected)} {_progress(row)}", flush=True)

    options = ["--device", args.device]
    options += ["--small"] if args.small else []
    options += ["--variants", args.variants] if args.variants else []
    _, skipped = run_suite(
        selected,
        options=options,
        logs=args.logs,
        budget_s=args.budget,
        record=json.loads(args.record.read_text()) if args.record else {},
        alone=args.device == "cuda",
        device_gib=_device_gib() if args.device == "cuda" else math.inf,
        claims=Claims(args.claims),
        on_row=on_row,
    )
    if not args.output:
        print(format_table(done))
    if skipped:
        print(f"out of time, not run: {', '.join(skipped)}")


def _device_gib() -> float:
    import torch

    if not torch.cuda.is_available():
        sys.exit("error: measuring needs a GPU; --smoke needs none")
    return torch.cuda.get_device_properties(0).total_memory / 2**30


def _progress(row: Row) -> str:
    if "error" in row or "skipped" in row:
        return f"{row['name']}: {row.get('error') or row['skipped']}"
    times = [row.get(f"{name}_us") for name in ("no_cg", "stock_cg", "pygraph")]
    return f"{row['name']}: {' / '.join(map(str, times))} us, {row['choice']}"


def _serve(args: argparse.Namespace) -> None:
    """Answers each line of stdin with a line of JSON."""
    # What libraries print must not end up between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(line: Row) -> None:
        print(json.dumps(line, default=str), file=answers, flush=True)

    def be_quiet(begins: bool) -> None:
        send({"quiet": begins})
        if begins:
            sys.stdin.readline()

    def has_time() -> bool:
        send({"asks": "time"})
        return sys.stdin.readline().strip() == "yes"

    run = None
    for line in sys.stdin:
        command, *arguments = line.split()
        try:
            run = run or _run(args, lambda name: send({"at": name}), be_quiet, has_time)
            send(getattr(run, command)(*arguments) or {})
        except Exception as error:
            logging.exception("%s", args.worker)
            send({"error": summary(error)})


def _run(
    args: argparse.Namespace,
    on_variant: Callable[[str], None],
    be_quiet: Callable[[bool], None],
    has_time: Callable[[], bool],
) -> CaseRun:
    # The variants of a case, and the modules of a kind inside it, share code objects.
    torch._dynamo.config.recompile_limit = 64
    (case,) = catalogue.select(args.suite, [args.worker])
    names = args.variants.split(",") if args.variants else catalogue.SUITES[args.suite].variants
    kind = CpuValuesRun if args.suite == "cgct" else CaseRun
    return kind(
        case,
        args.device,
        small=args.small,
        variants={name: VARIANTS[name] for name in names if name != args.without},
        on_variant=on_variant,
        be_quiet=be_quiet,
        has_time=has_time,
    )


if __name__ == "__main__":
    main()
