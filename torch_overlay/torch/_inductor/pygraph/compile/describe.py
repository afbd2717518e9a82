"""Describe code as it is generated, from the scheduler's nodes and the wrapper's lines. See types/partition.py."""

from __future__ import annotations

import dataclasses
from typing import Any, TYPE_CHECKING

import torch
from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput, SavedForBackwardsNoVcCheckAOTOutput
from torch._inductor import config, ir
from torch._inductor.codegen import wrapper as codegen
from torch._inductor.pygraph.capture.collectives import NAMESPACES
from torch._inductor.pygraph.capture.custom import SHIPPED
from torch._inductor.pygraph.compile.blockers import or_uncaptured
from torch._inductor.pygraph.compile.calls import describe_calls
from torch._inductor.pygraph.compile.conditionals import paths_through
from torch._inductor.pygraph.compile.lowering import HostCopy, Launch, PackLine
from torch._inductor.pygraph.compile.sizes import describe_sizes
from torch._inductor.pygraph.types.partition import Collective, DirectCall, GraphInfo, PartitionInfo, PartitionReport
from torch._inductor.pygraph.types.source import span
from torch._inductor.scheduler import ExternKernelSchedulerNode, operations_of_subgraphs
from torch._inductor.utils import LineContext, output_node
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch._inductor.scheduler import BaseSchedulerNode


# Lines that do nothing in a call, or only delete names.
IDLE_LINES = (
    codegen.CommentLine,
    codegen.FreeIfNotReusedLine,
    codegen.FreeLine,
    codegen.KernelDefinitionLine,
    LineContext,
    codegen.NullLine,
)


@or_uncaptured(lambda wrapper: GraphInfo())
def describe_graph(wrapper: codegen.PythonWrapperCodegen) -> GraphInfo:
    """Return what is known of the graph whose code ``wrapper`` has generated."""
    graph = V.graph
    shared = _shared_inputs(wrapper.get_graph_input_names()) if graph.is_backward else None
    if not config.graph_partition:
        function = describe_function(wrapper, graph.scheduler.nodes)
        outputs = output_node(graph.module).all_input_nodes
        report = PartitionReport(_num_kernels(wrapper, graph.scheduler.nodes), span(o.stack_trace for o in outputs))
        functions = (dataclasses.replace(function, report=report),)
        return GraphInfo(functions, shared_input_idxs=shared)
    reports = tuple(graph.partition_reports or ())
    captured = [report for report in reports if not report.blockers]
    functions = tuple(
        dataclasses.replace(function, report=report)
        for function, report in zip(graph.partition_infos, captured, strict=True)
    )
    return GraphInfo(functions, reports, _direct_call(wrapper), shared)


def _shared_inputs(inputs: Sequence[str]) -> tuple[int, ...]:
    """Return the inputs that the graph writes and those whose memory its outputs may share, as negative indices."""
    graph = V.graph
    written = (name for operation in graph.operations for name in operation.get_mutation_names())
    names = [*graph.get_output_names(), *written]
    found: OrderedSet[str] = OrderedSet()
    while names:
        name = names.pop()
        if name not in found:
            found.add(name)
            buffer = graph.try_get_buffer(name)
            names.extend(() if buffer is None else buffer.get_inputs_that_alias_output())
    return tuple(i - len(inputs) for i, name in enumerate(inputs) if name in found)


@or_uncaptured(lambda wrapper, nodes: PartitionInfo(wrapper.launcher_fn_name))
def describe_function(wrapper: codegen.PythonWrapperCodegen, nodes: Sequence[BaseSchedulerNode]) -> PartitionInfo:
    """Return what is known of the function that ``wrapper`` has generated for ``nodes``."""
    placeholders = {node.target: node for node in V.graph.module.graph.find_nodes(op="placeholder")}
    inputs = wrapper.get_graph_input_names()
    if isinstance(wrapper, codegen.SubgraphPythonWrapperCodegen):
        outputs = [node.get_name() for node in wrapper.get_graph_outputs()]
    else:
        outputs = V.graph.get_output_names()
    returned = _returned_names()
    lines = (codegen.ReinterpretLine, codegen.ReuseLine)
    # What lies in the memory of one of these buffers.
    reused = OrderedSet(line.node.get_name() for line in wrapper.lines if isinstance(line, lines))
    # Code may write a result of another partition in ways that no line tells.
    reused |= OrderedSet(i for i in inputs if i not in placeholders and V.graph.try_get_buffer(i) is not None)
    operations = [operation for node in nodes for operation in _operations(node)]
    return PartitionInfo(
        name=wrapper.launcher_fn_name,
        allocator=wrapper.get_allocator_parameter(),
        kernels=tuple(dict.fromkeys(_kernels(wrapper, operations))),
        delivers=tuple(o.pack.deliver_name for o in operations if isinstance(o, Launch)),
        collectives=tuple(map(_collective, filter(_is_collective, operations))),
        calls_custom=any(map(_is_custom, operations)),
        ranks_decide=config.pygraph_ranks,
        saved_input_idxs=tuple(i for i, n in enumerate(inputs) if n in placeholders and is_saved(placeholders[n])),
        returned_output_idxs=tuple(i for i, name in enumerate(outputs) if name in returned),
        reused_input_idxs=tuple(i for i, name in enumerate(inputs) if name in reused),
        sizes=describe_sizes(wrapper, nodes) if config.pygraph_sizes else None,
        calls=describe_calls(wrapper, nodes) if wrapper.notes_calls() else (),
        paths=paths_through(part.node for node in nodes for part in node.get_nodes() if part.node is not None)
        if wrapper.captures_branches()
        else (),
    )


def is_saved(placeholder: torch.fx.Node) -> bool:
    """Return whether the forward computed an input. AOTAutograd describes the joint graph's inputs only."""
    is_tensor = isinstance(placeholder.meta.get("val"), torch.Tensor)
    return V.graph.is_backward and is_tensor and placeholder.meta.get("desc") is None


def _returned_names() -> OrderedSet[str]:
    """Return the names of the outputs that leave the graph, and are not only saved for a backward."""
    names = V.graph.get_output_names()
    descs = output_node(V.graph.module).meta.get("desc", ())
    if len(descs) != len(names):
        # Not from AOTAutograd, or changed since.
        return OrderedSet(names)
    saved = (SavedForBackwardsAOTOutput, SavedForBackwardsNoVcCheckAOTOutput)
    return OrderedSet(name for name, desc in zip(names, descs) if not isinstance(desc, saved))


def _operations(node: BaseSchedulerNode) -> Iterator[ir.Operation]:
    for part in node.get_nodes():
        if part.node is not None:
            yield part.node
            yield from operations_of_subgraphs(part.node)


def _is_custom(operation: Any) -> bool:
    op = getattr(operation, "op_overload", None)
    return isinstance(op, torch._ops.OpOverload) and op.namespace not in SHIPPED


def _is_collective(operation: Any) -> bool:
    op = getattr(operation, "op_overload", None)
    return getattr(op, "namespace", None) in NAMESPACES


def _collective(operation: Any) -> Collective:
    """Describe a collective. Its schema calls the process group group_name."""
    op = operation.op_overload
    group = None
    if isinstance(operation, ir.FallbackKernel):
        args, kwargs = operation.unflatten_args(operation.inputs, operation.constant_args)
        names = [argument.name for argument in op._schema.arguments]
        group = {**dict(zip(names, args)), **kwargs, **operation.kwargs}.get("group_name")
    return Collective(op.overloadpacket.__name__, group if isinstance(group, str) else None)


def _kernels(wrapper: codegen.PythonWrapperCodegen, operations: Iterable[ir.Operation]) -> Iterator[str]:
    """Yield the Triton kernels that a function launches, in nested regions, too."""
    nested = (o.subgraph.graph.wrapper_code for o in operations if isinstance(o, ir.InvokeSubgraph))
    # Equal regions are generated once.
    for generated in (wrapper, *filter(None, nested)):
        for line in generated.lines:
            if isinstance(line, codegen.KernelCallLine) and line.triton:
                yield line.kernel_name


def _num_kernels(wrapper: codegen.PythonWrapperCodegen, nodes: Iterable[BaseSchedulerNode]) -> int:
    """Return how many kernels and operators a function calls."""
    launches = sum(isinstance(line, codegen.KernelCallLine) for line in wrapper.lines)
    externs = (node for node in nodes if isinstance(node, ExternKernelSchedulerNode))
    return launches + sum(not isinstance(node.node, ir.MultiOutput) for node in externs)


def _direct_call(wrapper: codegen.PythonWrapperCodegen) -> DirectCall | None:
    """Return what Runner.call does, None if it is more than DirectCall has room for."""
    args = wrapper.get_graph_input_names()
    # The arguments and what is staged, by name.
    places = {name: i for i, name in enumerate(args)}
    if wrapper.has_other_statements or not args or len(places) != len(args):
        return None
    packs: list[tuple[str, tuple[int, ...]]] = []
    stages: list[tuple[str, int]] = []
    partition: codegen.PartitionCallLine | None = None
    inputs: list[int | None] = []
    num_guards = 0
    for line in wrapper.lines:
        if isinstance(line, IDLE_LINES) or (
            isinstance(line, codegen.UnbackedSymbolDefsLine) and not line.unbacked_bindings
        ):
            continue
        if partition is not None:
            return None
        if isinstance(line, codegen.EnterDeviceContextManagerLine):
            num_guards += 1
        elif isinstance(line, codegen.ExitDeviceContextManagerLine):
            num_guards -= 1
        elif isinstance(line, codegen.MultiOutputLine):
            # Another name for the same tensor, unless it is an element.
            if line.indices or line.arg_name not in places:
                return None
            places[line.result_name] = places[line.arg_name]
        elif num_guards > 0:
            return None
        elif isinstance(line, codegen.PartitionCallLine):
            partition = line
            inputs = [places.get(name) for name in line.get_input_names()]
        elif isinstance(line, PackLine):
            values = [places.get(name, len(args)) for name in line.values]
            if any(i >= len(args) for i in values):
                return None
            packs.append((line.owner, tuple(values)))
        elif isinstance(line, codegen.ExternKernelAllocLine) and isinstance(copy := line.node, HostCopy):
            (value,) = copy.codegen_args()
            place = places.get(value, len(args))
            if copy.how != "stage" or place >= len(args):
                return None
            places[copy.get_name()] = len(args) + len(stages)
            stages.append((copy.owner, place))
        else:
            return None
    if partition is None or None in inputs:
        return None
    produced = partition.get_output_names()
    returned = wrapper.get_output_refs()
    if not produced or not OrderedSet(returned) <= OrderedSet(produced):
        return None
    return DirectCall(
        num_args=len(args),
        packs=tuple(packs),
        stages=tuple(stages),
        inputs=tuple(inputs),  # type: ignore[arg-type]
        num_outputs=len(produced),
        outputs=tuple(map(produced.index, returned)),
    )
