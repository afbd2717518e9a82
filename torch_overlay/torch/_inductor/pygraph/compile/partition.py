"""
What Inductor's scheduler asks when it partitions a graph for CUDA graphs.

partition_reason               why a node cannot be captured
keeps_draws_in_order           whether a new order of nodes draws the same random numbers
operator_of_element,
group_elements_with_operators  how partitions keep outputs with the operator that gives them
is_list_of_outputs             which buffers no partition can take as input
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._inductor import ir
from torch._inductor.dependencies import WeakDep
from torch._inductor.pygraph.compile.analysis import draws_random_numbers, dropout_of
from torch._inductor.pygraph.compile.lowering import HostCopy, Pack
from torch._inductor.pygraph.compile.ops import MEMORY_EFFICIENT_ATTENTION
from torch._inductor.pygraph.types.report import BRINGS_CPU_VALUES, COPIES_TO_CPU
from torch._inductor.utils import get_gpu_type, is_cudagraph_unsafe_op
from torch._inductor.virtualized import V
from torch.utils import _pytree as pytree
from torch.utils._sympy.symbol import symbol_is_type, SymT


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import sympy

    from torch._inductor.scheduler import BaseSchedulerNode, SchedulerBuffer


# Attributes of ir.InvokeSubgraph, ir.Conditional and ir.WhileLoop.
SUBGRAPH_ATTRIBUTES = (
    "subgraph",
    "true_subgraph",
    "false_subgraph",
    "cond_subgraph",
    "body_subgraph",
)


def partition_reason(node: BaseSchedulerNode) -> str | None:
    """
    Return why a node cannot be captured that the scheduler itself would capture, else None.

    A GPU node cannot be captured if it reads CPU memory, takes a value that only the host
    knows, or returns a CPU tensor that the host waits for. Copies between CPU and GPU,
    which the scheduler does not capture either, get a reason that names the copy.
    """
    ir_node = node.node
    if isinstance(ir_node, (Pack, HostCopy)):
        return BRINGS_CPU_VALUES
    if not node.is_gpu():
        # The scheduler gives the reason for other CPU nodes.
        return COPIES_TO_CPU if isinstance(ir_node, ir.DeviceCopy) else None
    if (reason := subgraph_reason(ir_node)) is not None:
        return reason
    if hands_over_seed(ir_node):
        return "gives or takes a seed that lies on the CPU where it is not captured"
    for dep in node.read_writes.reads:
        if isinstance(dep, WeakDep):
            continue
        buffer = V.graph.try_get_buffer(dep.name)
        if isinstance(buffer, ir.IRNode) and is_cpu_tensor(buffer):
            return f"reads the CPU tensor {dep.name}"
    if isinstance(ir_node, ir.FallbackKernel) and any(
        isinstance(output, ir.IRNode) and is_cpu_tensor(output)
        for output in pytree.tree_leaves(ir_node.outputs)
    ):
        return "gives a CPU tensor"
    if ir_node is not None and any(map(is_float, ir_node.get_free_symbol_uses())):
        return "takes a float from the host"
    return None


def is_cpu_tensor(buffer: ir.IRNode) -> bool:
    """Return whether a buffer is a tensor in CPU memory."""
    device = buffer.get_device()
    if device is None or device.type != "cpu":
        return False
    # An operation that defines a symbol returns no tensor. PyGraph records a graph for each
    # value of the symbol.
    return not (
        isinstance(buffer, ir.Operation)
        and isinstance(getattr(buffer, "layout", None), ir.NoneLayout)
        and buffer.get_unbacked_symbol_defs()
    )


def is_float(symbol: sympy.Symbol) -> bool:
    return symbol_is_type(symbol, (SymT.FLOAT, SymT.UNBACKED_FLOAT))


def hands_over_seed(ir_node: object) -> bool:
    """Return whether a node is attention with dropout whose seed is on the GPU only if captured."""
    return (
        isinstance(ir_node, ir.FallbackKernel)
        and ir_node.op_overload in MEMORY_EFFICIENT_ATTENTION
        and ir_node.fx_node is not None
        and bool(dropout_of(ir_node.fx_node))
    )


# Subgraphs: nested regions, branches and loops.


def operations_of_subgraphs(ir_node: object) -> Iterator[ir.Operation]:
    """Yield the operations of all graphs that a node runs."""
    for name in SUBGRAPH_ATTRIBUTES:
        subgraph = getattr(ir_node, name, None)
        if isinstance(subgraph, ir.Subgraph) and subgraph.graph is not None:
            for operation in subgraph.graph.operations:
                yield operation
                yield from operations_of_subgraphs(operation)


def subgraph_reason(ir_node: object) -> str | None:
    """
    Return why the graphs that a node runs cannot be captured, else None.

    A replay runs no host code of a subgraph.
    """
    for operation in operations_of_subgraphs(ir_node):
        if isinstance(operation, (Pack, HostCopy)):
            return BRINGS_CPU_VALUES
        device = operation.get_device()
        if isinstance(operation, ir.DeviceCopy) or (
            device is not None and device.type == "cpu"
        ):
            return "runs a graph that works on the CPU"
        if (
            isinstance(operation, (ir.Conditional, ir.WhileLoop))
            or is_cudagraph_unsafe_op(operation)
            or hands_over_seed(operation)
        ):
            return "runs a graph with what can not be captured"
    return None


# Random draws.


def draws_on(device_type: str, node: BaseSchedulerNode) -> bool:
    """Return whether a node draws random numbers from a generator of a device."""
    return any(
        isinstance(operation, ir.ExternKernel)
        # An element has the FX node of the operator that draws.
        and not isinstance(operation, ir.MultiOutput)
        and operation.fx_node is not None
        and draws_random_numbers(operation.fx_node)
        and (device := operation.get_device()) is not None
        and device.type == device_type
        for n in node.get_nodes()
        if n.node is not None
        for operation in (n.node, *operations_of_subgraphs(n.node))
    )


def keeps_draws_in_order(
    before: list[BaseSchedulerNode], after: list[BaseSchedulerNode]
) -> bool:
    """
    Return whether two orders of nodes draw the same random numbers.

    The order of two draws from one generator is no dependency of Inductor's. Generators of
    different devices are independent.
    """
    return all(
        [n for n in before if draws_on(device_type, n)]
        == [n for n in after if draws_on(device_type, n)]
        for device_type in ("cpu", get_gpu_type())
    )


# Operators with several outputs return a list. An ir.MultiOutput takes an element of it.


def operator_of_element(
    node: BaseSchedulerNode, name_to_buf: Mapping[str, SchedulerBuffer]
) -> BaseSchedulerNode | None:
    """Return the node of the operator whose output a MultiOutput is, None for other nodes."""
    if not isinstance(node.node, ir.MultiOutput):
        return None
    return name_to_buf[node.node.inputs[0].get_name()].defining_op


def group_elements_with_operators(
    nodes: list[BaseSchedulerNode], name_to_buf: Mapping[str, SchedulerBuffer]
) -> list[BaseSchedulerNode]:
    """
    Return the nodes with each operator directly followed by its elements.

    Elements in another partition than their operator would take the list as an input. The
    inputs of a CUDA graph are tensors.
    """
    # An element may be a list and have elements.
    elements: dict[BaseSchedulerNode, list[BaseSchedulerNode]] = {n: [] for n in nodes}
    others = []
    for node in nodes:
        elements.get(operator_of_element(node, name_to_buf), others).append(node)

    def with_elements(node: BaseSchedulerNode) -> Iterator[BaseSchedulerNode]:
        yield node
        for element in elements[node]:
            yield from with_elements(element)

    return [each for node in others for each in with_elements(node)]


def is_list_of_outputs(buffer: SchedulerBuffer | None) -> bool:
    """Return whether a buffer is the list that an operator with several outputs returns."""
    return buffer is not None and isinstance(buffer.node.layout, ir.MultiOutputLayout)
