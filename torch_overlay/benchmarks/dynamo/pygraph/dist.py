"""
Sharded programs on two ranks: a small Llama-like decoder, trained and run in the ways that shard it.

    python -m pygraph.dist --output rows.json [--cases fsdp,tp] [--budget 420]

Every case and way to run it starts from the same weights and tokens. After STEPS steps its losses and its whole
parameters must equal those without CUDA graphs. Rows are of suite dist.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import logging
import math
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

import torch
from torch import distributed as dist, nn
from torch._dynamo.utils import counters
from torch._inductor import cudagraph_trees
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .compare import compare, Difference, snapshot
from .models.sharded import Block, split_block
from .processes import process_group
from .program import Events, seed, VARIANTS
from .report import bytes_text, write_rows
from .timing import fields, MAX_SLOWDOWN, ratio, time_interleaved
from .tp import add_arguments, command_on_ranks, run_on_rank
from .worker import hardly_called, report, reset_report, summary, totals, undecided


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed.device_mesh import DeviceMesh

    from .report import Row
    from .timing import Timing


log = logging.getLogger(__name__)

RANKS = 2
STEPS = 50
# In which recordings count as late, and for how many seconds at most: stock takes long where it records again and again.
LATE_STEPS, MAX_LATE_S = 20, 3.0
# Until selection ends, in steps and in seconds.
MAX_SETTLE = 440
MAX_SETTLE_S = 20.0
MAX_CASE_S = 100.0
ROUNDS = 7
POLL_S = 0.5
NAMES = ("no_cg", "stock_cg", "pygraph")
# PyGraph's memory to that of stock.
MAX_MEMORY = 1.05
# Different tokens, in turn.
RING = 4


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        about: what is sharded, and how
        shards: "ddp", "fsdp", "tp", "moe", "pipeline"; FSDP and TP on a mesh are "fsdp_tp"
        mesh: ranks in each dimension
        micro_batches: in a step
        recomputes: activations of a block "inside" of the compiled code, or by running the code again, "outside"
        precision: of fully_shard's parameters in computations
        static_graph: of DistributedDataParallel
        whole: the model is compiled, not each block
        width: of a token; with 512 the decoder has 21 M parameters, with 2048 it has 336 M
    """

    about: str
    shards: str
    mesh: tuple[int, ...] = (RANKS,)
    reshards: bool = True
    micro_batches: int = 1
    recomputes: str = ""
    precision: torch.dtype | None = None
    trains: bool = True
    static_graph: bool = False
    whole: bool = False
    width: int = 512
    dtype: torch.dtype = torch.float32


CASES = {
    "ddp": Case("DistributedDataParallel", "ddp"),
    "ddp_accumulates": Case(
        "DistributedDataParallel, no_sync in the first of two micro-batches", "ddp", micro_batches=2
    ),
    "ddp_static": Case("DistributedDataParallel with static_graph", "ddp", static_graph=True),
    "ddp_whole": Case("DistributedDataParallel, compiled as a whole", "ddp", whole=True),
    "ddp_large": Case(
        "DistributedDataParallel, 336 M parameters in bfloat16", "ddp", width=2048, dtype=torch.bfloat16
    ),
    "fsdp": Case("fully_shard of each block", "fsdp"),
    "fsdp_kept": Case("fully_shard without reshard_after_forward", "fsdp", reshards=False),
    "fsdp_accumulates": Case("fully_shard, gradients of two micro-batches reduced together", "fsdp", micro_batches=2),
    "fsdp_mixed": Case("fully_shard, computes in bfloat16", "fsdp", precision=torch.bfloat16),
    "fsdp_checkpointed": Case("fully_shard of checkpointed blocks, compiled with them", "fsdp", recomputes="inside"),
    "fsdp_recomputed": Case("fully_shard, checkpointing around compiled blocks", "fsdp", recomputes="outside"),
    "fsdp_whole": Case("fully_shard of each block, compiled as a whole", "fsdp", whole=True),
    "tp": Case("tensor and sequence parallel", "tp"),
    "tp_inference": Case("tensor parallel inference", "tp", trains=False),
    "fsdp_tp_2x1": Case("fully_shard of tensor-parallel blocks, mesh 2 x 1", "fsdp_tp", mesh=(RANKS, 1)),
    "fsdp_tp_1x2": Case("fully_shard of tensor-parallel blocks, mesh 1 x 2", "fsdp_tp", mesh=(1, RANKS)),
    "moe": Case("experts on ranks, tokens exchanged by all-to-all", "moe"),
    "pipeline": Case("one stage a rank, 1F1B, four micro-batches", "pipeline", micro_batches=4),
    "fsdp_large": Case("fully_shard, 336 M parameters in bfloat16", "fsdp", width=2048, dtype=torch.bfloat16),
    "tp_large": Case(
        "tensor and sequence parallel, 336 M parameters in bfloat16", "tp", width=2048, dtype=torch.bfloat16
    ),
}


class Run:
    """One case in one way, on this rank."""

    def __init__(self, case: Case, device: torch.device, name: str, *, small: bool) -> None:
        self.case, self.device = case, device
        self.width, self.batch, self.length = (128, 4, 16) if small else (case.width, 4, 256)
        names = ("fsdp", "tp") if len(case.mesh) == 2 else ("ranks",)
        mesh = init_device_mesh(device.type, case.mesh, mesh_dim_names=names)
        splits = case.shards.endswith("tp")
        of = (mesh["tp"] if len(case.mesh) == 2 else mesh) if splits else None
        seed()
        with device:
            blocks = [Block(self.width, experts=case.shards == "moe") for _ in range(2 if small else 8)]
        blocks = [block.to(case.dtype) for block in blocks]
        if case.shards == "pipeline":
            blocks = blocks[dist.get_rank() :: RANKS]
        self.model = self.sharded(blocks, mesh, of, VARIANTS[name].compile)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        if case.shards == "pipeline":
            stage = PipelineStage(self.model, dist.get_rank(), RANKS, device)
            self.schedule = Schedule1F1B(stage, case.micro_batches, loss_fn=loss_of)
        # The ranks of a tensor-parallel group have parts of the same tokens, those of a pipeline all of them.
        part = 0 if case.shards == "pipeline" else dist.get_rank() // (1 if of is None else of.size())
        self.ring = []
        for i in range(RING):
            generator = torch.Generator().manual_seed(i + RING * part)
            x = torch.randn(self.batch, self.length, self.width, generator=generator).to(case.dtype)
            self.ring.append((x if of is None else x.chunk(of.size(), 1)[of.get_local_rank()].clone()).to(device))
        self.steps = 0

    def sharded(
        self, blocks: list[Block], mesh: DeviceMesh, of: DeviceMesh | None, options: dict[str, Any] | None
    ) -> nn.Module:
        """Return the model of ``blocks``, each compiled with ``options``. Tensors are split over ``of``."""
        case, parts = self.case, []
        for block in blocks:
            if of is not None:
                split_block(block, of)
            part: nn.Module = checkpoint_wrapper(block) if case.recomputes == "inside" else block
            if options is not None and not case.whole:
                part.compile(**options)
            parts.append(checkpoint_wrapper(part) if case.recomputes == "outside" else part)
        model: nn.Module = nn.Sequential(*parts)
        if case.shards.startswith("fsdp"):
            policy = MixedPrecisionPolicy(param_dtype=case.precision)
            for module in (*parts, model):
                of_data = mesh["fsdp"] if len(case.mesh) == 2 else mesh
                fully_shard(module, mesh=of_data, reshard_after_forward=case.reshards, mp_policy=policy)
        if case.shards == "ddp":
            model = DistributedDataParallel(model, static_graph=case.static_graph)
        if options is not None and case.whole:
            model.compile(**options)
        return model

    def step(self) -> torch.Tensor:
        self.steps += 1
        # Stock CUDA graphs overwrite a block's output in the next block without it.
        torch.compiler.cudagraph_mark_step_begin()
        # Of an embedding, the first block computes a gradient, as the others do.
        x = self.ring[self.steps % RING].detach().requires_grad_(self.case.trains)
        if not self.case.trains:
            with torch.no_grad():
                return _local(self.model(x))
        loss = self.pipelined(x) if self.case.shards == "pipeline" else self.backward(x)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def backward(self, x: torch.Tensor) -> torch.Tensor:
        count = self.case.micro_batches
        for i in range(count):
            with self.synchronized(i == count - 1):
                loss = loss_of(_local(self.model(x)), x.detach())
                loss.backward()
        return loss

    def synchronized(self, condition: bool) -> contextlib.AbstractContextManager[None]:
        """Reduce gradients in the backward of a micro-batch, or leave them to the next one."""
        if isinstance(self.model, DistributedDataParallel):
            return contextlib.nullcontext() if condition else self.model.no_sync()
        if self.case.micro_batches > 1:
            self.model.set_requires_gradient_sync(condition)
        return contextlib.nullcontext()

    def pipelined(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the micro-batches, which the last stage knows."""
        losses: list[torch.Tensor] = []
        inputs = (x,) if dist.get_rank() == 0 else ()
        is_last = dist.get_rank() == RANKS - 1
        self.schedule.step(*inputs, target=x.detach() if is_last else None, losses=losses if is_last else None)
        # The last stage keeps its outputs until its next step. Without this line, outputs of stock CUDA graphs would be
        # alive while other variants are timed.
        self.schedule._stage.clear_runtime_states()
        return torch.stack(losses).mean() if losses else x.new_zeros(())

    def results(self) -> dict[str, Any]:
        """The losses, or outputs, of STEPS steps, and this rank's parameters after them."""
        # A replay overwrites outputs of stock CUDA graphs.
        losses = [self.step().clone() for _ in range(STEPS)]
        return snapshot({"losses": losses, "parameters": [_local(p) for p in self.model.parameters()]})


def loss_of(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (y - x).square().mean()


def _local(t: torch.Tensor) -> torch.Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def everywhere(condition: bool) -> bool:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, condition)
    return all(found)


def largest(number: float) -> float:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, number)
    return max(found)


def counting_recordings() -> list[None]:
    """A list that grows by an element with each recording of any kind."""
    recorded: list[None] = []
    init = cudagraph_trees.CUDAGraphNode.__init__

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        recorded.append(None)
        init(self, *args, **kwargs)

    cudagraph_trees.CUDAGraphNode.__init__ = counted
    return recorded


def by_rank(run: Run) -> list[Row]:
    """Return the choices, the counters of RING steps, and the host's microseconds a step, for each rank."""
    before, began = Counter(counters["pygraph"]), time.perf_counter()
    for _ in range(RING):
        run.step()
    host_us = (time.perf_counter() - began) / RING * 1e6
    counted = Counter(counters["pygraph"]) - before
    own = {"host_us": round(host_us), "choices": [entry["choice"] for entry in report()], "counted": dict(counted)}
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def settle(run: Run) -> None:
    """Run until all ranks have decided on all functions."""
    deadline = time.monotonic() + MAX_SETTLE_S
    while run.steps < MAX_SETTLE:
        # The last stage of a pipeline infers shapes by a call without gradients.
        open_ = undecided([entry for entry in report() if not hardly_called(entry)])
        if everywhere(not open_ or time.monotonic() > deadline):
            return
        for _ in range(RING):
            run.step()


def run_late(run: Run) -> int:
    """Return how many steps were run."""
    before, deadline = run.steps, time.monotonic() + MAX_LATE_S
    while run.steps - before < LATE_STEPS and everywhere(time.monotonic() < deadline):
        for _ in range(RING):
            run.step()
    return run.steps - before


def reserved_mib(device: torch.device) -> tuple[int, int]:
    """Free the allocator's cache. Return the reserved memory in MiB: afterwards, and the peak since the last call."""
    if device.type != "cuda":
        return 0, 0
    most = torch.cuda.max_memory_reserved(device)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_reserved(device) >> 20, most >> 20


def row(name: str, args: argparse.Namespace) -> Row:
    case, device = CASES[name], torch.device(args.device, dist.get_rank() if args.device == "cuda" else None)
    recorded = counting_recordings()
    runs: dict[str, Run] = {}
    failed: dict[str, str] = {}
    late: dict[str, int] = {}
    late_steps: dict[str, int] = {}
    began = time.monotonic()
    seconds: dict[str, list[float]] = {}
    reserved: dict[str, int] = {}
    peak: dict[str, int] = {}
    entries: list[dict[str, Any]] = []
    reference, of_pygraph = None, Difference()
    for variant in args.variants.split(","):
        reset_report()
        clock = [time.monotonic()]
        others, _ = reserved_mib(device)
        clock.append(time.monotonic())
        try:
            run = Run(case, device, variant, small=args.small)
            found = run.results()
            clock.append(time.monotonic())
            settle(run)
            clock.append(time.monotonic())
            before = len(recorded)
            late_steps[variant] = run_late(run)
            reserved[variant], peak[variant] = (mib - others for mib in reserved_mib(device))
        except Exception as error:
            log.exception("%s, %s", name, variant)
            failed[variant] = summary(error)
            continue
        late[variant] = int(largest(len(recorded) - before))
        clock.append(time.monotonic())
        reference = reference or found
        difference = compare(reference, found, 1e-3)
        if not everywhere(difference.close):
            failed[variant] = f"wrong result: {difference.where} by {difference.max_diff:.2g}"
        clock.append(time.monotonic())
        # To free memory, for the first STEPS steps and compilation, until selection ended, for later steps, and to compare results
        seconds[variant] = [round(b - a, 1) for a, b in itertools.pairwise(clock)]
        if variant == "pygraph":
            entries, of_pygraph = report(), difference
        runs[variant] = run

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def loop(run: Run) -> Callable[[int], None]:
        return lambda count: [run.step() for _ in range(count)].clear()

    loops = {variant: loop(run) for variant, run in runs.items()}
    timed = time.monotonic()
    timings = time_interleaved(loops, synchronize, rounds=args.rounds, agree=largest, marks=Events.of(device))
    timing_s = time.monotonic() - timed
    missed = [f"{variant}: {reason}" for variant, reason in failed.items() if variant != "stock_cg"]
    missed += [*misses(timings, reserved, late), *copies(entries)]
    return {
        **described(name, RANKS),
        **fields(timings),
        **totals(entries),
        "graphs": entries,
        "by_rank": by_rank(runs["pygraph"]) if "pygraph" in runs else [],
        "late_recordings": late,
        "late_steps": late_steps,
        "memory_mib": reserved,
        "reserved_mib": reserved.get("pygraph"),
        "stock_reserved_mib": reserved.get("stock_cg"),
        "peak_reserved_mib": peak.get("pygraph"),
        "peak_stock_reserved_mib": peak.get("stock_cg"),
        "seconds": seconds,
        # Of the rounds in which the variants take turns, and of the whole case
        "timing_seconds": round(timing_s, 1),
        "case_seconds": round(time.monotonic() - began, 1),
        "equal": "pygraph" in runs and "pygraph" not in failed,
        "bitwise": "pygraph" in runs and of_pygraph.bitwise,
        "failed": failed,
        "missed": missed,
        "note": staged(entries),
    }


def copies(entries: list[dict[str, Any]]) -> Iterator[str]:
    """Yield how many bytes graphs copy that bind no input."""
    if copied := sum(entry["copied_bytes"] for entry in entries if entry["choice"] == "copy"):
        yield f"copies {copied} bytes a call"


def staged(entries: list[dict[str, Any]]) -> str:
    """Say what bound graphs copy, which are operands of collectives. Stock copies these and the other inputs."""
    bound = [entry for entry in entries if entry["choice"] != "copy" and entry["copied_bytes"]]
    own, of_stock = (bytes_text(sum(entry[name] for entry in bound)) for name in ("copied_bytes", "stock_copied_bytes"))
    return f"copies {own} of inputs for collectives, stock copies {of_stock} in these graphs" if bound else ""


def misses(timings: dict[str, Timing], memory: dict[str, int], late: dict[str, int]) -> list[str]:
    """Where PyGraph is worse than it must be."""
    found = []
    if late.get("pygraph"):
        found.append(f"{late['pygraph']} recordings after warm-up")
    others = {variant: timing for variant, timing in timings.items() if variant != "pygraph"}
    if "pygraph" in timings and others:
        best = min(others, key=lambda variant: others[variant].median_us)
        slower = ratio(timings["pygraph"], others[best])
        if slower.low > MAX_SLOWDOWN:
            found.append(f"{slower.median:.2f} of {best}'s time")
    if "pygraph" in memory and memory["pygraph"] > MAX_MEMORY * memory.get("stock_cg", math.inf):
        found.append(f"{memory['pygraph']} MiB, stock {memory['stock_cg']}")
    return found


def described(name: str, ranks: int) -> Row:
    return {"suite": "dist", "name": name, "case": name, "ranks": ranks, "about": CASES[name].about, "obstacle": ""}


def rows_on_rank(names: list[str], args: argparse.Namespace) -> list[Row]:
    """One after the other, so that what starts a process and a group is done once."""
    rows = []
    for name in names:
        rows.append(row(name, args))
        if dist.get_rank() == 0:
            write_rows(args.output, rows)
        torch._dynamo.reset()
        cudagraph_trees.reset_cudagraph_trees()
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    return rows


def measure(names: list[str], args: argparse.Namespace, deadline: float) -> Iterator[Row]:
    """The ranks are started again for the cases behind one that fails or takes too long."""
    file = args.logs / "rows.json"
    while names and time.monotonic() < deadline:
        file.unlink(missing_ok=True)
        command = command_on_ranks("pygraph.dist", ",".join(names), RANKS, args, file)
        done, since, error = 0, time.monotonic(), ""
        with open(args.logs / f"{names[0]}.log", "w") as output, process_group(command, output) as process:
            while done < len(names) and not error:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    error = f"ended with {process.wait(POLL_S)}"
                found = json.loads(file.read_text()) if file.exists() else []
                if len(found) > done:
                    since, error = time.monotonic(), ""
                elif time.monotonic() > min(deadline, since + MAX_CASE_S):
                    error = f"no result within {time.monotonic() - since:.0f} s"
                yield from found[done:]
                done = len(found)
        names = names[done:]
        if names and time.monotonic() < deadline:
            yield {**described(names[0], RANKS), "equal": False, "error": error, "missed": [error]}
            names = names[1:]
    for name in names:
        print(f"{name}: out of time, not run", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="pygraph.dist", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES))
    add_arguments(parser, NAMES, ROUNDS)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if args.worker:
        run_on_rank(args, lambda: rows_on_rank(args.worker.split(","), args))
        return
    if args.device == "cuda" and torch.cuda.device_count() < RANKS:
        print(f"suite dist needs {RANKS} GPUs")
        return
    # Where scripts/gpu_suite looks for logs.
    args.logs = args.output.parent / "logs" / args.output.stem
    args.logs.mkdir(parents=True, exist_ok=True)
    rows = []
    for measured in measure(args.cases.split(","), args, time.monotonic() + args.budget):
        rows.append(measured)
        write_rows(args.output, rows)
        print(f"{measured['name']}: {measured.get('error') or measured['missed'] or 'right'}", flush=True)


if __name__ == "__main__":
    main()
