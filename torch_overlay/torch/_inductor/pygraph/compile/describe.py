"""
Describes generated code as it is generated; see types/partition.py for the result.

The sources are the scheduler's nodes and the lines of the wrapper, which are objects until the
code is assembled. The code itself is not read.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TYPE_CHECKING

import torch
from torch._functorch._aot_autograd.descriptors import (
    SavedForBackwardsAOTOutput,
    SavedForBackwardsNoVcCheckAOTOutput,
    SubclassGetAttrAOTInput,
    TangentAOTInput,
)
from torch._inductor import config, ir
from torch._inductor.codegen import wrapper as codegen
from torch._inductor.dependencies import WeakDep
from torch._inductor.pygraph.capture.collectives import NAMESPACES
from torch._inductor.pygraph.compile.lowering import HostCopy, Launch, PackLine
from torch._inductor.pygraph.types.partition import (
    AllocatorCall,
    Call,
    DirectCall,
    GraphInfo,
    Input,
    PartitionInfo,
    PartitionReport,
)
from torch._inductor.pygraph.types.source import span
from torch._inductor.scheduler import NopKernelSchedulerNode, operations_of_subgraphs
from torch._inductor.utils import LineContext, output_node
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch._inductor.pygraph.types.partition import Origin
    from torch._inductor.scheduler import BaseSchedulerNode


SAVED = (SavedForBackwardsAOTOutput, SavedForBackwardsNoVcCheckAOTOutput)

# Lines that do nothing in a call, or only delete names.
IDLE_LINES = (
    codegen.CommentLine,
    codegen.FreeIfNotReusedLine,
    codegen.FreeLine,
    codegen.KernelDefinitionLine,
    LineContext,
    codegen.NullLine,
)


def describe_graph(wrapper: codegen.PythonWrapperCodegen) -> GraphInfo:
    """Return what is known of the graph whose code ``wrapper`` has generated."""
    graph = V.graph
    if not config.graph_partition:
        function = describe_function(wrapper, graph.scheduler.nodes)
        report = PartitionReport(len(function.calls), span(_output_traces()))
        return GraphInfo((dataclasses.replace(function, report=report),))
    reports = tuple(graph.partition_reports or ())
    captured = [report for report in reports if not report.blockers]
    functions = tuple(
        dataclasses.replace(function, report=report)
        for function, report in zip(graph.partition_infos, captured, strict=True)
    )
    return GraphInfo(functions, reports, _direct_call(wrapper))


def describe_function(wrapper: codegen.PythonWrapperCodegen, nodes: Sequence[BaseSchedulerNode]) -> PartitionInfo:
    """Return what is known of the function that ``wrapper`` has generated for ``nodes``."""
    origins = _origins()
    memory = _Memory(wrapper)
    inputs = tuple(
        Input(name, _origin(name, origins), tuple(memory.buffers_in(name))) for name in wrapper.get_graph_input_names()
    )
    if isinstance(wrapper, codegen.SubgraphPythonWrapperCodegen):
        outputs = tuple(node.get_name() for node in wrapper.get_graph_outputs())
    else:
        outputs = tuple(V.graph.get_output_names())
    returned = _returned_names()
    operations = [operation for node in nodes for operation in _operations(node)]
    return PartitionInfo(
        name=wrapper.launcher_fn_name,
        inputs=inputs,
        outputs=outputs,
        calls=tuple(_calls(wrapper, nodes)),
        allocator=wrapper.get_allocator_parameter(),
        allocations=memory.allocations(),
        delivers=tuple(o.pack.deliver_name for o in operations if isinstance(o, Launch)),
        groups=tuple(dict.fromkeys(g for o in operations for g in _groups(o))),
        has_collectives=any(map(_is_collective, operations)),
        returned_output_idxs=tuple(i for i, name in enumerate(outputs) if name in returned),
        # Code may write a result of another partition in ways that no line tells.
        reused_input_idxs=tuple(i for i, input in enumerate(inputs) if input.origin == "partition" or input.buffers),
    )


def _origins() -> dict[str, Origin]:
    """Return where the graph's inputs come from, by name."""
    return {
        node.target: origin_of(node, is_backward=V.graph.is_backward)
        for node in V.graph.module.graph.find_nodes(op="placeholder")
    }


def origin_of(placeholder: torch.fx.Node, *, is_backward: bool) -> Origin:
    """
    Return where an input of a graph comes from. AOTAutograd describes the joint graph's inputs
    only, so an input of a backward without a description was computed by the forward.
    """
    if not isinstance(placeholder.meta.get("val"), torch.Tensor):
        return "other"
    desc = placeholder.meta.get("desc")
    while isinstance(desc, SubclassGetAttrAOTInput):
        desc = desc.base
    if isinstance(desc, TangentAOTInput):
        return "tangent"
    return "saved" if desc is None and is_backward else "forward"


def _origin(name: str, origins: dict[str, Origin]) -> Origin:
    if name in origins:
        return origins[name]
    return "partition" if V.graph.try_get_buffer(name) is not None else "other"


def _returned_names() -> OrderedSet[str]:
    """
    Return the names of the outputs that leave the graph: all but those that a forward saves for
    its backward. An output that is both leaves it.
    """
    names = V.graph.get_output_names()
    descs = output_node(V.graph.module).meta.get("desc", ())
    if len(descs) != len(names):
        # Not from AOTAutograd, or changed since.
        return OrderedSet(names)
    return OrderedSet(name for name, desc in zip(names, descs) if not isinstance(desc, SAVED))


def _output_traces() -> list[str | None]:
    return [
        output.stack_trace if isinstance(output, torch.fx.Node) else None
        for output in output_node(V.graph.module).args[0]  # type: ignore[union-attr]
    ]


def _operations(node: BaseSchedulerNode) -> Iterator[ir.Operation]:
    for part in node.get_nodes():
        if part.node is not None:
            yield part.node
            yield from operations_of_subgraphs(part.node)


def _is_collective(operation: Any) -> bool:
    op = getattr(operation, "op_overload", None)
    return getattr(op, "namespace", None) in NAMESPACES


def _groups(operation: Any) -> Iterator[str]:
    """Yield the process groups of a collective, which its schema calls group_name."""
    if not _is_collective(operation) or not isinstance(operation, ir.FallbackKernel):
        return
    args, kwargs = operation.unflatten_args(operation.inputs, operation.constant_args)
    names = [argument.name for argument in operation.op_overload._schema.arguments]
    given = {**dict(zip(names, args)), **kwargs, **operation.kwargs}
    if isinstance(group := given.get("group_name"), str):
        yield group


def _calls(wrapper: codegen.PythonWrapperCodegen, nodes: Iterable[BaseSchedulerNode]) -> list[Call]:
    launches: dict[BaseSchedulerNode, list[codegen.KernelCallLine]] = {}
    for line in wrapper.lines:
        if isinstance(line, codegen.KernelCallLine):
            launches.setdefault(line.scheduler_node, []).append(line)
    calls: list[Call] = []
    # The call that gives each buffer, by its place in ``calls``.
    makers: dict[str, int] = {}

    def add_result(node: BaseSchedulerNode, source: str, **changes: Any) -> None:
        """Add to the call that gives ``source`` what ``node`` takes of it without a call."""
        if (maker := makers.get(source)) is not None:
            call = calls[maker]
            calls[maker] = dataclasses.replace(call, writes=(*call.writes, *_writes(node)), **changes)
            makers.update(dict.fromkeys(node.get_buffer_names(), maker))

    for node in nodes:
        operation = node.node
        if isinstance(operation, ir.MultiOutput):
            add_result(node, operation.input_name(0))
            continue
        if isinstance(node, NopKernelSchedulerNode):
            continue
        if node.get_name() in V.graph.scheduler.removed_ops:
            # The last step of a mix-order reduction: a statement behind the kernel's launch
            # adds up what the kernel left in its workspace.
            for dependency in node.read_writes.reads:
                add_result(node, dependency.name, is_declared=False)
            continue
        reads, writes = _reads(node), _writes(node)
        if node in launches:
            for line in launches[node]:
                kind = "triton" if line.triton else "extern"
                kernels = (line.kernel_name,) if line.triton else ()
                makers.update(dict.fromkeys(node.get_buffer_names(), len(calls)))
                calls.append(Call(kind, line.kernel_name, reads, writes, kernels=kernels))
        elif operation is not None:
            makers[operation.get_name()] = len(calls)
            call = _extern_call(operation, reads, writes)
            is_declared = not node.has_side_effects()
            calls.append(dataclasses.replace(call, is_declared=is_declared))
    return calls


def _extern_call(operation: Any, reads: tuple[str, ...], writes: tuple[str, ...]) -> Call:
    if isinstance(operation, Launch):
        return Call("deliver", operation.pack.deliver_name, reads, writes)
    if isinstance(operation, ir.InvokeSubgraph):
        subgraph = operation.subgraph.graph
        kernels = tuple(dict.fromkeys(_kernels_of_subgraph(operation)))
        return Call("subgraph", subgraph.name, reads, writes, kernels=kernels)
    op = getattr(operation, "op_overload", None)
    name = str(op or operation.try_get_kernel_name() or type(operation).__name__)
    kind = "collective" if _is_collective(operation) else "extern"
    return Call(kind, name, reads, writes)


def _kernels_of_subgraph(operation: ir.InvokeSubgraph) -> Iterator[str]:
    graph = operation.subgraph.graph
    # Equal subgraphs are generated once.
    for line in graph.wrapper_code.lines if graph.wrapper_code is not None else ():
        if isinstance(line, codegen.KernelCallLine) and line.triton:
            yield line.kernel_name
    for inner in graph.operations:
        if isinstance(inner, ir.InvokeSubgraph):
            yield from _kernels_of_subgraph(inner)


def _reads(node: BaseSchedulerNode) -> tuple[str, ...]:
    # A WeakDep only orders nodes.
    names = (d.name for d in node.read_writes.reads if not isinstance(d, WeakDep))
    return _buffers(names)


def _writes(node: BaseSchedulerNode) -> tuple[str, ...]:
    return _buffers(node.get_buffer_names())


def _buffers(names: Iterable[str]) -> tuple[str, ...]:
    """Return those that exist, a mutated one by the name of what is mutated."""
    real = V.graph.scheduler.mutation_real_name
    removed = V.graph.removed_buffers
    return tuple(sorted(OrderedSet(real.get(n, n) for n in names if n not in removed)))


class _Memory:
    """Which buffers of a function share memory, as the lines of its wrapper say."""

    def __init__(self, wrapper: codegen.PythonWrapperCodegen) -> None:
        self.wrapper = wrapper
        self.lines: list[codegen.AllocateLine] = []
        # For each buffer all that lie in the same memory. The first one owns it.
        self.sharing: dict[str, list[str]] = {}
        for line in wrapper.lines:
            if isinstance(line, codegen.AllocateLine):
                self.sharing[line.node.get_name()] = [line.node.get_name()]
                if not line.comm_buffer and line.node.get_device().type == "cuda":
                    self.lines.append(line)
            elif isinstance(line, (codegen.ReinterpretLine, codegen.ReuseLine)):
                owner, name = line.node.get_name(), line.reused_as.get_name()
                buffers = self.sharing.setdefault(owner, [owner])
                buffers.append(name)
                self.sharing[name] = buffers

    def buffers_in(self, name: str) -> list[str]:
        """Return the other buffers in memory that a buffer owns."""
        return self.sharing.get(name, [name])[1:]

    def allocations(self) -> tuple[AllocatorCall, ...]:
        """Return the calls of the allocator; none if other code than a line's makes them."""
        if config.memory_planning or config.test_configs.track_memory_lifecycle:
            return ()
        expressions = self.wrapper.codegen_python_sizevar
        return tuple(
            AllocatorCall(
                tuple(map(expressions, V.graph.get_allocation_size(line.node))),
                tuple(map(expressions, line.node.get_stride())),
                str(line.node.get_dtype()),
                tuple(self.sharing[line.node.get_name()]),
            )
            for line in self.lines
        )


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
