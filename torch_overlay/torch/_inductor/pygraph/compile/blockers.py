"""What cannot be captured, and why: for Inductor's scheduler, and for the report of each partition."""

from __future__ import annotations

import functools
import logging
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor import config, ir
from torch._inductor.dependencies import WeakDep
from torch._inductor.fx_utils import dropout_of
from torch._inductor.pygraph.compile.analysis import MEMORY_EFFICIENT_ATTENTION
from torch._inductor.pygraph.compile.conditionals import conditional_reason
from torch._inductor.pygraph.compile.lowering import HostCopy, Pack
from torch._inductor.pygraph.compile.upstream import NOT_DESCRIBED, reason_of
from torch._inductor.pygraph.types.reason import Code, first_line
from torch._inductor.pygraph.types.report import Blocker, CPU_VALUES, PartitionReport
from torch._inductor.pygraph.types.source import innermost, span
from torch._inductor.scheduler import NopKernelSchedulerNode, operations_of_subgraphs
from torch._inductor.utils import is_cudagraph_unsafe_op
from torch._inductor.virtualized import V
from torch.utils import _pytree as pytree
from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy.symbol import symbol_is_type, SymT


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch._inductor.scheduler import BaseSchedulerNode

log = logging.getLogger(__name__)


def partition_reason(node: BaseSchedulerNode) -> Code | None:
    """
    Return why a node cannot be captured that the scheduler itself would capture, else None. Copies between CPU and GPU,
    which the scheduler does not capture either, get a reason that names the copy.
    """
    ir_node = node.node
    if isinstance(ir_node, (Pack, HostCopy)):
        return Code.BRINGS_CPU_VALUES
    if not node.is_gpu():
        # The scheduler gives the reason for other CPU nodes.
        return Code.COPIES_TO_CPU if isinstance(ir_node, ir.DeviceCopy) else None
    is_captured = isinstance(ir_node, (ir.Conditional, ir.WhileLoop)) and config.pygraph_conditionals
    if (reason := conditional_reason(ir_node) if is_captured else subgraph_reason(ir_node)) is not None:
        return reason
    if hands_over_seed(ir_node):
        return Code.CPU_SEED
    for dep in node.read_writes.reads:
        if isinstance(dep, WeakDep):
            continue
        buffer = V.graph.try_get_buffer(dep.name)
        if isinstance(buffer, ir.IRNode) and is_cpu_tensor(buffer):
            return Code.READS_CPU_TENSOR
    if isinstance(ir_node, ir.FallbackKernel) and any(
        isinstance(output, ir.IRNode) and is_cpu_tensor(output) for output in pytree.tree_leaves(ir_node.outputs)
    ):
        return Code.GIVES_CPU_TENSOR
    symbols = () if ir_node is None else ir_node.get_free_symbol_uses()
    if any(symbol_is_type(symbol, (SymT.FLOAT, SymT.UNBACKED_FLOAT)) for symbol in symbols):
        return Code.HOST_FLOAT
    return None


def is_cpu_tensor(buffer: ir.IRNode) -> bool:
    """Return whether a buffer is a tensor in CPU memory."""
    device = buffer.get_device()
    if device is None or device.type != "cpu":
        return False
    # An operation that defines a symbol returns no tensor.
    return not (
        isinstance(buffer, ir.Operation)
        and isinstance(getattr(buffer, "layout", None), ir.NoneLayout)
        and buffer.get_unbacked_symbol_defs()
    )


def hands_over_seed(ir_node: object) -> bool:
    """Return whether a node is attention with dropout whose seed is on the GPU only if captured."""
    return (
        isinstance(ir_node, ir.FallbackKernel)
        and ir_node.op_overload in MEMORY_EFFICIENT_ATTENTION
        and ir_node.fx_node is not None
        and bool(dropout_of(ir_node.fx_node))
    )


def subgraph_reason(ir_node: object) -> Code | None:
    """Return why the graphs that a node runs cannot be captured, else None. A replay runs none of their host code."""
    for operation in operations_of_subgraphs(ir_node):
        if isinstance(operation, (Pack, HostCopy)):
            return Code.BRINGS_CPU_VALUES
        device = operation.get_device()
        if isinstance(operation, ir.DeviceCopy) or (device is not None and device.type == "cpu"):
            return Code.SUBGRAPH_ON_CPU
        if (
            isinstance(operation, (ir.Conditional, ir.WhileLoop))
            or is_cudagraph_unsafe_op(operation)
            or hands_over_seed(operation)
        ):
            return Code.SUBGRAPH_NOT_CAPTURABLE
    return None


def or_uncaptured(neutral: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """
    Return a decorator for a function that describes what Inductor generates. If the function raises, PyGraph captures
    nothing of the graph, and the caller gets what ``neutral`` returns for the same arguments.
    """

    def decorate(describe: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(describe)
        def call(*args: Any) -> Any:
            try:
                return describe(*args)
            except Exception as e:
                if config.pygraph_strict:
                    raise
                log.debug("%s failed", describe.__name__, exc_info=True)
                _stays_uncaptured(f"{NOT_DESCRIBED}{type(e).__name__}: {first_line(e)}")
                return neutral(*args)

        return call

    return decorate


def _stays_uncaptured(reason: str) -> None:
    """
    Keep the current graph out of CUDA graphs. If it is a body, of torch.cond for example, this keeps out each graph around it,
    too. A graph that has a reason already keeps it.
    """
    graph = V.graph
    while graph is not None:
        graph.disable_cudagraphs_reason = graph.disable_cudagraphs_reason or reason
        graph = getattr(graph, "parent", None)


@or_uncaptured(lambda nodes, why_not: PartitionReport(0, ""))
def describe_partition(
    nodes: Sequence[BaseSchedulerNode], why_not: Callable[[BaseSchedulerNode], str | None]
) -> PartitionReport:
    """Return the report of a partition. ``why_not`` says why a node cannot be captured, None if it can."""
    kernels = [node for node in nodes if not isinstance(node, NopKernelSchedulerNode)]
    blockers = OrderedSet(
        Blocker(_op(node), reason_of(reason), innermost(next(iter(_traces(node)), "")))
        # A partition may do nothing but allocate a tensor without elements.
        for node in kernels or nodes
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
    """Without copies to the GPU, and, of a copy to the CPU, without the origins of what it reads."""
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
