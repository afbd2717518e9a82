"""
Schedules on a GPU; run.sh runs all parts.

    probe.py delays PROGRAM [--launches 1000]   each node waits for a random time in each launch: outputs are the chain's
    probe.py memory PROGRAM...                  time and reserved memory, with whole workspaces and less or more memory

The patched torch and torch_overlay/benchmarks/dynamo have to be on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import itertools
import json
import random
import statistics
import time
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
from torch._inductor import cudagraph_trees as trees
from torch._inductor.pygraph import report, reset_report
from torch._inductor.pygraph.graph import prelude
from torch._inductor.pygraph.graph.binding import set_kernel_parameters
from torch._inductor.pygraph.graph.driver import bindings, check
from torch._inductor.pygraph.graph.placeholder import tensor_at
from torch._inductor.pygraph.schedule import lanes, plan, pointers, recording
from torch._inductor.pygraph.types.candidate import CHAIN, DAG


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._inductor.pygraph.schedule.dag import Waits

MIB = 2**20
# The longest delay of a node. The shorter half is as likely as the longer one, and so on.
DELAY_NS = 64_000
SCHEDULES = (DAG, "lanes2", "lanes4")
SETS = 8
WARM_UP, ROUNDS, CALLS = 12, 15, 40

SPIN = r"""
extern "C" __global__ void spin(unsigned long long limit, unsigned long long seed) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    unsigned long long h = (begin ^ seed) * 0x9E3779B97F4A7C15ull;
    h = (h ^ (h >> 29)) * 0xBF58476D1CE4E5B9ull;
    unsigned long long wait = h % (limit >> (h >> 61));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < wait);
}
"""


def program(name: str, small: bool) -> tuple[torch.nn.Module, list[tuple[torch.Tensor, ...]]]:
    """Return a module of the suite ``concurrent`` and sets of its inputs."""
    from pygraph.catalogue import CASES

    case = CASES[name]
    torch.manual_seed(0)
    with torch.device("cuda"):
        module = case.module(small).to(dtype=case.dtype).eval()
        return module, [case.inputs(small)[0] for _ in range(SETS)]


class Asked:
    """What the next recordings are made with. One compiled program serves all of them."""

    schedule = CHAIN
    # Whether each node has a delay, and whether one edge that a call needs is left out.
    has_delays = False
    lacks_edge = False
    # Of the last recording.
    nodes = edges = 0
    spun: Any = None


def asked_order(schedule: str, waits: Waits, times: list[float]) -> Waits:
    if schedule == CHAIN:
        return original_order(schedule, waits, times)
    found = original_order(Asked.schedule, waits, times)
    if Asked.lacks_edge:
        last = max(range(len(found)), key=lambda i: (len(found[i]), i))
        found[last] = {*sorted(found[last])[1:]}
    return found


def apply(self: recording.ScheduledRecording, raw_graph: int, placeholders: Any) -> Any:
    facts = original_apply(self, raw_graph, placeholders)
    if facts is not None and Asked.has_delays:
        delay_nodes(bindings().CUgraph(raw_graph))
    return facts


original_order, original_apply = lanes.order, recording.ScheduledRecording.apply


def spin_kernel() -> Any:
    major, minor = torch.cuda.get_device_capability()
    with mock.patch.object(prelude, "SOURCE", SPIN):
        cubin = prelude.compile_prelude(f"sm_{major}{minor}", sets_nodes=False)
    Asked.module = check(bindings().cuModuleLoadData(cubin))
    return check(bindings().cuModuleGetFunction(Asked.module, b"spin"))


def delay_nodes(graph: Any) -> None:
    """Put a node that waits for a random time in front of each node, behind what the node waits for."""
    cu = bindings()
    _, count = check(cu.cuGraphGetNodes(graph))
    nodes, _ = check(cu.cuGraphGetNodes(graph, count))
    *_, number = check(cu.cuGraphGetEdges(graph))
    before, after, *_ = check(cu.cuGraphGetEdges(graph, number)) if number else ((), ())
    ahead: dict[int, list[Any]] = {int(node): [] for node in nodes}
    for a, b in zip(before, after):
        ahead[int(b)].append(a)
    Asked.nodes, Asked.edges = count, number
    Asked.spun = Asked.spun or spin_kernel()
    params = cu.CUDA_KERNEL_NODE_PARAMS()
    params.func = Asked.spun
    params.gridDimX = params.gridDimY = params.gridDimZ = params.blockDimX = params.blockDimY = params.blockDimZ = 1
    spins = []
    for node in nodes:
        buffers = [ctypes.c_uint64(DELAY_NS), ctypes.c_uint64(random.getrandbits(63))]
        keep = set_kernel_parameters(params, buffers)  # type: ignore[arg-type]
        spins.append(check(cu.cuGraphAddKernelNode(graph, ahead[int(node)], len(ahead[int(node)]), params)))
        del keep
    data = [None] if cu.CUDA_VERSION >= 13000 else []
    check(cu.cuGraphAddDependencies(graph, spins, list(nodes), *data, count))


def bits(outputs: Any) -> list[torch.Tensor]:
    tensors = [outputs] if isinstance(outputs, torch.Tensor) else [*outputs]
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return [t.contiguous().view(integers[t.element_size()]) for t in tensors]


@contextlib.contextmanager
def patched() -> Iterator[None]:
    with (
        mock.patch.object(plan, "order", asked_order),
        mock.patch.object(recording.ScheduledRecording, "apply", apply),
    ):
        yield


def compiled(module: torch.nn.Module, **options: Any) -> Callable[..., Any]:
    """Compile and record anew; kernels come from the caches."""
    torch._dynamo.reset()
    trees.reset_cudagraph_trees()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    reset_report()
    return torch.compile(module, options=options) if options else torch.compile(module, mode="reduce-overhead")


def scheduled(module: torch.nn.Module, schedule: str, force: str = "node_update,dag") -> Callable[..., Any]:
    Asked.schedule = schedule
    return compiled(module, pygraph=True, pygraph_schedules=True, pygraph_force=force)


def delays(name: str, launches: int, schedules: list[str], small: bool) -> None:
    module, inputs = program(name, small)
    expected: list[list[torch.Tensor]] = []
    for schedule, lacks_edge in [(CHAIN, False), *((s, False) for s in schedules), (DAG, True)]:
        Asked.has_delays, Asked.lacks_edge = schedule != CHAIN, lacks_edge
        fn = scheduled(module, schedule)
        for x in inputs[:4]:
            fn(*x)
        choices = [entry.candidate for entry in report()]
        row = {"program": name, "schedule": schedule, "edge removed": lacks_edge, "choice": " + ".join(choices)}
        if not expected:
            # Those of the chain, which has to repeat itself.
            expected = [bits(fn(*x)) for x in inputs]
            expected = [[t.clone() for t in found] for found in expected]
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(launches):
            found = bits(fn(*inputs[i % SETS]))
            differs = [(a != b).any() for a, b in zip(found, expected[i % SETS], strict=True)]
            wrong += torch.stack(differs).any()
        row |= {
            "launches": launches,
            "wrong": wrong.item(),
            "ms": round(1e3 * (time.perf_counter() - start) / launches, 2),
        }
        row |= {"nodes": Asked.nodes, "edges": Asked.edges} if Asked.has_delays else {}
        is_asked = any(entry.schedule == DAG for entry in report())
        row["ok"] = (not is_asked or row["wrong"] > 0) if lacks_edge else (is_asked and not row["wrong"])
        print(json.dumps(row), flush=True)
        del fn


def call_us(fn: Callable[..., Any], inputs: list[tuple[torch.Tensor, ...]]) -> float:
    """Return the median over rounds of the time of a call, which may wait for the device or for the host."""
    ring = itertools.cycle(inputs)
    found = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            fn(*next(ring))
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(found)


class Named:
    """Workspaces that kernels of a captured graph name: (start, bytes), how many calls do, and at which offsets."""

    found: dict[tuple[int, int], tuple[int, list[int]]] = {}

    @staticmethod
    def workspaces(graph: plan.Graph) -> Any:
        found = original_workspaces(graph)
        for (start, end), users in found.items():
            words = {word for i in users for node in graph.units[i].nodes for word in pointers.words_of(node) or ()}
            offsets = sorted(word - start for word in words if start <= word < end)
            Named.found[start, end - start] = len(users), offsets
        return found


original_workspaces, original_used_bytes = plan.Graph.workspaces, recording.used_bytes


def changed_bytes(fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> list[str]:
    """Return how much of each workspace a replay of the chain changes."""
    found = []
    expected = [t.clone() for t in bits(fn(*inputs))]
    for (start, nbytes), (users, offsets) in Named.found.items():
        like = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        memory = tensor_at(start, like, torch.cuda.current_device())
        before = torch.randint(256, (nbytes,), dtype=torch.uint8, device="cuda")
        memory.copy_(before)
        is_equal = all(torch.equal(a, b) for a, b in zip(bits(fn(*inputs)), expected, strict=True))
        changed = (memory != before).nonzero()
        first, last = (int(changed[0]), int(changed[-1]) + 1) if len(changed) else (0, 0)
        found.append(
            f"{users} calls at {offsets[:4]} change {first / MIB:.2f} to {last / MIB:.2f} of {nbytes / MIB:.1f} MiB, "
            f"{len(changed) / MIB:.2f} MiB in all, {'equal' if is_equal else 'DIFFERENT'} results"
        )
    return found


# Constants of schedule/recording.py, and whether matmuls divide a workspace.
SETTINGS: dict[str, tuple[dict[str, float], bool]] = {
    "stock": ({}, False),
    "chain": ({}, False),
    "as is": ({}, True),
    "whole workspaces": ({}, False),
    "chain's memory": ({"MORE_MEMORY": -1.0}, False),
    "all memory": ({"MORE_MEMORY": 100.0}, True),
}


def memory(name: str, small: bool) -> None:
    module, inputs = program(name, small)
    expected: list[list[torch.Tensor]] = []
    for setting, (constants, divides) in SETTINGS.items():
        used: list[str] = []

        def used_bytes(*args: Any, divides: bool = divides, used: list[str] = used) -> int:
            start, end = args[2]
            found = original_used_bytes(*args)
            used.append(f"{found >> 10} of {(end - start) >> 10} KiB by {len(args[1])} kernels")
            return found if divides else end - start

        with (
            mock.patch.multiple(recording, used_bytes=used_bytes, **constants),
            mock.patch.object(plan.Graph, "workspaces", Named.workspaces),
        ):
            Named.found = {}
            is_stock = setting == "stock"
            fn = compiled(module) if is_stock else scheduled(module, DAG, *["node_update"] * (setting == "chain"))
            before = torch.cuda.memory_reserved()
            for x in inputs[:4] + inputs[:WARM_UP]:
                fn(*x)
            us = call_us(fn, inputs)
            torch._C._cuda_clearCublasWorkspaces()
            gc.collect()
            torch.cuda.empty_cache()
            reserved = torch.cuda.memory_reserved()
            row = {"program": name, "memory": setting, "us": round(us, 1), "reserved MiB": round(reserved / MIB, 1)}
            row["before MiB"] = round(before / MIB, 1)
            if not is_stock:
                entry = max(report(), key=lambda entry: entry.calls_us)
                row |= {"choice": entry.candidate, "critical us": entry.critical_us, "calls us": entry.calls_us}
                row["used of workspaces"] = used or "not asked"
                found = [[t.clone() for t in bits(fn(*x))] for x in inputs]
                # The chain's.
                expected = expected or found
                row["equal"] = all(map(torch.equal, itertools.chain(*found), itertools.chain(*expected)))
                del found
            if setting == "chain":
                row["named"] = changed_bytes(fn, inputs[0]) or "none"
            print(json.dumps(row), flush=True)
            del fn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("delays", "memory"))
    parser.add_argument("programs", nargs="+")
    parser.add_argument("--launches", type=int, default=1000)
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    with torch.no_grad(), patched():
        for name in args.programs:
            if args.part == "delays":
                delays(name, args.launches, args.schedules.split(","), args.small)
            else:
                memory(name, args.small)


if __name__ == "__main__":
    main()
