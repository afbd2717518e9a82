"""
The partitions of a graph for the report: kernels, lines of the program, what cannot be captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._inductor import ir
from torch._inductor.pygraph.compile.upstream import reason_of
from torch._inductor.pygraph.types.reason import Code
from torch._inductor.pygraph.types.report import Blocker, CPU_VALUES, PartitionReport
from torch._inductor.pygraph.types.source import innermost, span
from torch._inductor.scheduler import NopKernelSchedulerNode
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch._inductor.scheduler import BaseSchedulerNode


def describe_partition(
    nodes: Sequence[BaseSchedulerNode], why_not: Callable[[BaseSchedulerNode], str | None]
) -> PartitionReport:
    """
    Args:
        nodes: the partition
        why_not: why a node cannot be captured, None if it can
    """
    kernels = [node for node in nodes if not isinstance(node, NopKernelSchedulerNode)]
    blockers = OrderedSet(
        Blocker(_op(node), reason_of(reason), innermost(next(iter(_traces(node)), "")))
        for node in kernels
        if (reason := why_not(node)) is not None
    )
    return PartitionReport(
        kernels=sum(why_not(node) != Code.BRINGS_CPU_VALUES for node in kernels),
        source=span(trace for node in kernels for trace in _traces(node)),
        blockers=tuple(sorted(blockers, key=lambda b: (b.source, b.op))),
        cpu_values=tuple(
            OrderedSet(
                value for node in kernels for origin in _all_origins(node) for value in origin.meta.get(CPU_VALUES, ())
            )
        ),
    )


def _traces(node: BaseSchedulerNode) -> list[str]:
    "Stack traces of the operators that became a node."
    return [o.stack_trace for o in _origins(node) if o.stack_trace]


def _origins(node: BaseSchedulerNode) -> list[torch.fx.Node]:
    """
    Without the copies to the GPU, which Inductor adds to the origins of what they read, and
    of a copy to the CPU without the origins of what it reads.
    """
    origins = [origin for origin in _all_origins(node) if getattr(origin.target, "namespace", None) != "pygraph"]
    if isinstance(node.node, ir.DeviceCopy):
        put = torch.ops.prims.device_put.default
        origins = [o for o in origins if o.target is put] or origins
    return origins


def _all_origins(node: BaseSchedulerNode) -> Iterator[torch.fx.Node]:
    for part in node.get_nodes():
        if part.node is not None:
            yield from part.node.get_origins()


def _op(node: BaseSchedulerNode) -> str:
    ops = dict.fromkeys(str(origin.target) for origin in _origins(node) if origin.op == "call_function")
    return ", ".join(ops) or type(node.node).__name__
