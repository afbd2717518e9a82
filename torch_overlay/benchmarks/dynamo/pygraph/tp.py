"""
Tensor parallelism with DTensor: each case on 1, 2, ... GPUs of one host (the paper's figure 11).

    python -m pygraph.tp --ranks 1,2,4 --output rows.json [--rows xlnet_x1,xlnet_x2] [--budget 420]

Every case on every number of GPUs is a torchrun of its own, with a time limit: a rank that
fails or decides differently can leave the others waiting. Rows are of suite tp.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import logging
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, TYPE_CHECKING

import torch
from torch import distributed as dist, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module, RowwiseParallel

from .catalogue import CASES
from .compare import compare, Difference, snapshot
from .models.language import CachedDecoder
from .processes import process_group
from .program import Events, seed, VARIANTS
from .report import write_rows
from .timing import fields, LoopFailed, time_interleaved
from .worker import (
    MAX_SETTLE_CALLS,
    reads_cpu_values,
    report,
    reset_report,
    SETTLE_CALLS,
    summary,
    totals,
    undecided,
)


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from .case import Inputs
    from .report import Row


log = logging.getLogger(__name__)

# Three compilations from empty caches, of a minute each for the largest case.
MAX_CASE_S = 330.0
NAMES = ("eager", "no_cg", "stock_cg", "pygraph")


def _tokens(small: bool) -> Inputs:
    return (torch.randint(256 if small else 32000, (2, 16) if small else (128, 512)),), {}


# One sequence or image, as in the paper, but for XLNet.
PARALLEL_CASES = {
    "xlnet": replace(
        CASES["xlnet_cpu_positions"],
        inputs=_tokens,
        ring=2,
        about="own; XLNet's architecture with its CPU position table, batch 128",
    ),
    **{name: replace(CASES[name], ring=4) for name in ("speech_transformer", "dalle2", "llama_decode")},
}


def shard(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Splits the layers that say how; heads that the ranks cannot share evenly stay whole."""
    ranks, rank = mesh.size(), mesh.get_local_rank()
    styles = {"columns": ColwiseParallel, "rows": RowwiseParallel}
    for part in list(module.modules()):
        plan = getattr(part, "tensor_parallel", None)
        counts = getattr(part, "tensor_parallel_counts", ())
        if plan is None or any(getattr(part, name) % ranks for name in counts):
            continue
        parallelize_module(part, mesh, {name: styles[style]() for name, style in plan.items()})
        for name in counts:
            setattr(part, name, getattr(part, name) // ranks)
        for name in getattr(part, "tensor_parallel_rows", ()):
            own = getattr(part, name).detach().chunk(ranks)[rank].clone()
            setattr(part, name, nn.Parameter(own))
    # Its cache is for as many heads as it has now.
    return CachedDecoder(module.decoder, 1) if isinstance(module, CachedDecoder) else module


class ParallelRun:
    """One case on all ranks, which all do the same, in step."""

    def __init__(self, name: str, device_type: str, *, small: bool, names: tuple[str, ...], rounds: int) -> None:
        self.name, self.case, self.small = name, PARALLEL_CASES[name], small
        self.device = torch.device(device_type, dist.get_rank() if device_type == "cuda" else None)
        self.mesh = init_device_mesh(device_type, (dist.get_world_size(),))
        self.names, self.rounds = names, rounds
        self.failed: dict[str, str] = {}

    def row(self) -> Row:
        whole, split = self.build(), self.build()
        seed()
        with self.device:
            split = shard(split, self.mesh).to(self.case.dtype)
            ring = [self.case.inputs(self.small) for _ in range(self.case.ring)]
        # Of the same kernels, and of other ones on one device. Only programs that are
        # compiled alike draw the same random numbers.
        same_kernels = None
        other_kernels = None if self.case.not_as_eager else self.around(whole, whole, ring)
        del whole

        calls: dict[str, Callable[..., Any]] = {}
        entries: list[dict[str, Any]] = []
        of_pygraph = Difference()
        for name in self.names:
            module = copy.deepcopy(split)
            call = module if name == "eager" else torch.compile(module, **VARIANTS[name].compile)
            difference = Difference()
            reset_report()
            try:
                found = self.settle(name, module, call, ring)
                if name != "pygraph" and other_kernels:
                    difference = self.compared(other_kernels, found, {})
                elif same_kernels:
                    difference = self.compared(same_kernels, found)
                    # No CUDA graphs computes some of what PyGraph does on the CPU in compiled code, or on the GPU.
                    if not difference.close and reads_cpu_values():
                        difference = self.compared(other_kernels or same_kernels, found, {})
            except Exception as error:
                log.exception("%s, %s", self.name, name)
                self.failed[name] = summary(error)
                continue
            if not self.everywhere(difference.close):
                self.failed[name] = f"wrong result: {difference.where} by {difference.max_diff:.2g}"
            if name == "no_cg":
                same_kernels = found
            calls[name] = call
            if name == "pygraph":
                entries, of_pygraph = report(), difference
        timings = self.time(calls, ring)
        choices: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(choices, [entry["choice"] for entry in entries])
        missed = [] if all(choice == choices[0] for choice in choices) else ["ranks chose differently"]
        missed += [f"{name}: {reason}" for name, reason in self.failed.items()]
        return {
            **described(self.name, dist.get_world_size()),
            **fields(timings),
            **totals(entries),
            "graphs": entries,
            "choices": choices,
            "equal": "pygraph" in calls and "pygraph" not in self.failed,
            "bitwise": "pygraph" in calls and of_pygraph.bitwise,
            "max_diff": of_pygraph.max_diff if math.isfinite(of_pygraph.max_diff) else None,
            "failed": self.failed,
            "missed": missed,
        }

    def build(self) -> nn.Module:
        seed()
        with self.device:
            return self.case.module(self.small).eval().to(self.case.dtype)

    def around(self, module: nn.Module, call: Callable[..., Any], ring: list[Inputs]) -> list[dict[str, Any]]:
        """The results of one time around the ring, from empty caches."""
        if isinstance(module, CachedDecoder):
            module.clear()
        seed()
        with torch.no_grad():
            return [snapshot({"outputs": call(*args, **kwargs)}) for args, kwargs in ring]

    def settle(
        self, name: str, module: nn.Module, call: Callable[..., Any], ring: list[Inputs]
    ) -> list[dict[str, Any]]:
        count = 0
        while count < SETTLE_CALLS[name] or (count < MAX_SETTLE_CALLS and not self.everywhere(not undecided(report()))):
            found = self.around(module, call, ring)
            count += len(ring)
        return found

    def compared(
        self, expected: list[dict[str, Any]], found: list[dict[str, Any]], exact: dict[str, Any] | None = None
    ) -> Difference:
        """The results of one time around the ring with others; ``exact`` is that of compare."""
        total = Difference()
        for reference, result in zip(expected, found, strict=True):
            total |= compare(reference, result, self.case.tolerance, exact)
        return total

    def time(self, calls: dict[str, Callable[..., Any]], ring: list[Inputs]) -> dict[str, Any]:
        def loop(call: Callable[..., Any]) -> Callable[[int], None]:
            def run(count: int) -> None:
                with torch.no_grad():
                    for i in range(count):
                        args, kwargs = ring[i % len(ring)]
                        call(*args, **kwargs)

            return run

        loops = {name: loop(call) for name, call in calls.items()}
        try:
            marks = Events.of(self.device)
            return time_interleaved(loops, self.synchronize, rounds=self.rounds, agree=self.slowest, marks=marks)
        except LoopFailed as failure:
            # The others wait for this rank: there is nothing to go on with.
            raise RuntimeError(f"{failure.name}: {summary(failure.__cause__)}") from failure

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def slowest(self, seconds: float) -> float:
        found = torch.tensor(seconds, device=self.device, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.item()

    def everywhere(self, condition: bool) -> bool:
        return self.slowest(float(not condition)) == 0


def row_name(name: str, ranks: int) -> str:
    return f"{name}_x{ranks}"


def row_names(ranks: str) -> list[str]:
    return [row_name(name, count) for name in PARALLEL_CASES for count in map(int, ranks.split(","))]


def described(name: str, ranks: int) -> Row:
    about = PARALLEL_CASES[name].about
    return {"suite": "tp", "name": row_name(name, ranks), "case": name, "ranks": ranks, "about": about, "obstacle": ""}


def run_on_rank(args: argparse.Namespace, row: Callable[[], Row | list[Row]]) -> None:
    """On one rank."""
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    # The variants, and the layers of a kind, share code objects.
    torch._dynamo.config.recompile_limit = 64
    measured = row()
    if dist.get_rank() == 0:
        write_rows(args.output, measured)
    dist.barrier()
    dist.destroy_process_group()


def command_on_ranks(module: str, work: str, ranks: int, args: argparse.Namespace, file: Path) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", module, "--worker", work, "--output", str(file)]
    command += ["--device", args.device, "--rounds", str(args.rounds), "--variants", args.variants]
    return command + ["--small"] * args.small


def measure(name: str, ranks: int, args: argparse.Namespace, seconds: float) -> Row:
    log_file, file = args.logs / f"{name}_x{ranks}.log", args.logs / f"{name}_x{ranks}.json"
    file.unlink(missing_ok=True)
    command = command_on_ranks("pygraph.tp", name, ranks, args, file)
    with open(log_file, "w") as output, process_group(command, output) as process:
        try:
            status = process.wait(seconds)
            error = f"ended with {status}"
        except subprocess.TimeoutExpired:
            error = f"no result within {seconds:.0f} s"
    if file.exists():
        # However it ended: DTensor's caches keep the group, and one of gloo's threads that
        # frees a tensor while Python shuts down aborts its rank.
        return json.loads(file.read_text())
    return {**described(name, ranks), "equal": False, "error": error, "missed": [error]}


def add_arguments(parser: argparse.ArgumentParser, variants: Sequence[str], rounds: int = 11) -> None:
    """Add the arguments of a program that runs cases on several ranks. Each rank gets them with ``--worker``."""
    parser.add_argument("--variants", default=",".join(variants))
    parser.add_argument("--budget", type=float, default=420.0, help="seconds")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--worker", help=argparse.SUPPRESS)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="pygraph.tp", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--rows", help="comma-separated; each case on each number of ranks by default")
    parser.add_argument("--logs", type=Path, default=Path("."))
    add_arguments(parser, NAMES)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if args.worker:
        names = tuple(args.variants.split(","))
        run_on_rank(
            args, lambda: ParallelRun(args.worker, args.device, small=args.small, names=names, rounds=args.rounds).row()
        )
        return
    args.logs.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + args.budget
    rows = []
    chosen = args.rows.split(",") if args.rows else row_names(args.ranks)
    for name, ranks in itertools.product(PARALLEL_CASES, map(int, args.ranks.split(","))):
        if row_name(name, ranks) not in chosen:
            continue
        if args.device == "cuda" and ranks > torch.cuda.device_count():
            print(f"{name} on {ranks}: needs {ranks} GPUs", flush=True)
            continue
        left = deadline - time.monotonic()
        row = measure(name, ranks, args, min(left, MAX_CASE_S)) if left > 0 else {"error": ""}
        if "error" in row and time.monotonic() >= deadline:
            # It is no result of the case that the time was over.
            print(f"{name} on {ranks}: out of time, not run", flush=True)
            continue
        rows.append(row)
        write_rows(args.output, rows)
        times = {variant: row.get(f"{variant}_us") for variant in NAMES}
        print(f"{name} on {ranks}: {row.get('error') or times}", flush=True)


if __name__ == "__main__":
    main()
