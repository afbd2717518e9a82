"""
Describes what generated code calls, in its order, and lets the code note each call, on the line behind it; see
types/calls.py. A recording pairs the nodes that it captures with these calls, and orders them by what they use.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor import ir
from torch._inductor.codegen import wrapper as codegen
from torch._inductor.pygraph.capture.collectives import NAMESPACES
from torch._inductor.pygraph.schedule.dag import Access, Call, dependencies, width
from torch._inductor.pygraph.types.calls import CallInfo, NOTE, Operand, RANDOM
from torch._inductor.scheduler import ExternKernelSchedulerNode
from torch._inductor.virtualized import V
from torch.utils import _pytree as pytree
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from torch._inductor.scheduler import BaseSchedulerNode
    from torch._inductor.utils import IndentedBuffer

OPERATOR_LINES = (
    codegen.ExternKernelAllocLine,
    codegen.ExternKernelOutLine,
    codegen.IndexPutFallbackLine,
    codegen.ScatterFallbackLine,
)
CALL_LINES = (*OPERATOR_LINES, codegen.KernelCallLine, codegen.PartialReductionLine)

# Operators that have no line of their own. One launches nothing, and the other has a KernelCallLine.
WITHOUT_LINES = (ir.MultiOutput, ir.UserDefinedTritonKernel)

# Names of the parameters that Inductor's kernels and the templates of matmul and convolution only read.
READ_PARAMETERS = ("in_ptr", "arg_A", "arg_B", "arg_X", "arg_W")

# aten operators of libraries that may keep an address in device memory, where no parameter shows it.
LIBRARY_PREFIXES = ("linalg_", "_linalg_", "fft_", "_fft_", "sparse_", "_sparse_", "_cslt_", "_cufft_")

# Operators that use cuBLAS's workspace.
MATMULS = ("mm", "addmm", "bias_addmm", "bmm", "baddbmm", "_scaled_mm")

# Kinds of operators whose tensors are all among their arguments and results. Subclasses differ.
OPERATORS = (
    ir.ExternKernelAlloc,
    ir.ExternKernelOut,
    ir.FallbackKernel,
    ir.IndexPutFallback,
    ir.RandomSeeds,
    ir.ScatterFallback,
)
NO_TENSORS = (ir.NoneAsConstantBuffer, ir.ShapeAsConstantBuffer)


@dataclasses.dataclass
class NoteLine(codegen.WrapperLine):
    """Notes the call on the line before."""

    number: int
    buffers: tuple[str, ...]

    def codegen(self, code: IndentedBuffer) -> None:
        arguments = ", ".join((str(self.number), *self.buffers))
        code.writeline(f"if {NOTE} is not None: {NOTE}({arguments})")


@dataclasses.dataclass
class ApartLine(codegen.ReuseLine):
    """Lets a buffer take the place of a dead one, or allocates it where a recording decides which calls share memory."""

    def codegen(self, code: IndentedBuffer) -> None:
        old, new = self.node, self.reused_as
        reuse = self.wrapper.make_buffer_reuse(old, new, self.delete_old)
        allocate = self.wrapper.make_buffer_allocation(new)
        if self.delete_old and old.get_name() not in V.graph.get_output_names():
            allocate = f"{self.wrapper.make_buffer_free(old)}; {allocate}"
        code.writeline(f"if {NOTE} is None or {NOTE}.reuses: {reuse}")
        code.writeline(f"else: {allocate}")


def note_calls(wrapper: codegen.PythonWrapperCodegen) -> None:
    """Add a NoteLine behind each call of a wrapper whose lines are complete, unless all calls depend on one another."""
    places = {name: i for i, name in enumerate(wrapper.get_graph_input_names())}
    lines: list[Any] = []
    calls: list[CallInfo] = []
    # Buffers in the place of dead ones that no call has used.
    new = OrderedSet[str]()
    for line in wrapper.lines:
        # Operators that work in place have such lines, too.
        if type(line) is codegen.ReuseLine and line.reused_as.get_name() not in wrapper.reuses and not line.comm_buffer:
            new.add(line.reused_as.get_name())
            line = ApartLine(wrapper, line.node, line.reused_as, line.delete_old)
        lines.append(line)
        if isinstance(line, CALL_LINES):
            call = _describe(line, places, new)
            new -= OrderedSet(operand.buffer for operand in call.operands)
            lines.append(NoteLine(len(calls), tuple(operand.buffer for operand in call.operands)))
            calls.append(call)
    wrapper.noted_calls = tuple(calls) if _may_overlap(calls) else ()
    if wrapper.noted_calls:
        wrapper.lines = lines


def _may_overlap(calls: Iterable[CallInfo]) -> bool:
    """Return whether some calls may run side by side. Names that share memory count as memory of their own."""
    places: dict[str, int] = {}
    found = []
    for call in calls:
        at = [(places.setdefault(o.buffer, len(places)), o) for o in call.operands]
        accesses = tuple(Access(i, i + 1, o.writes, o.input) for i, o in at)
        found.append(Call(accesses, frozenset(call.resources), is_barrier=not call.is_declared))
    return width(dependencies(found)) > 1


def describe_calls(
    wrapper: codegen.PythonWrapperCodegen, nodes: Iterable[BaseSchedulerNode]
) -> tuple[CallInfo, ...]:
    """Return the calls of the function that ``wrapper`` has generated; none if some of its calls are text."""
    return () if any(calls_as_text(wrapper, nodes)) else wrapper.noted_calls


def calls_as_text(
    wrapper: codegen.PythonWrapperCodegen, nodes: Iterable[BaseSchedulerNode]
) -> Iterator[ir.ExternKernel]:
    """Yield the operators whose call is none of the wrapper's lines, but text."""
    listed = OrderedSet(id(line.node) for line in wrapper.lines if isinstance(line, OPERATOR_LINES))
    for node in nodes:
        if isinstance(node, ExternKernelSchedulerNode) and not isinstance(node.node, WITHOUT_LINES):
            if id(node.node) not in listed:
                yield node.node


def operator_name(operation: ir.ExternKernel) -> str:
    op = getattr(operation, "op_overload", None)
    return str(op or operation.try_get_kernel_name() or type(operation).__name__)


def _describe(line: Any, places: dict[str, int], new: Collection[str]) -> CallInfo:
    if isinstance(line, codegen.KernelCallLine):
        call = _kernel(line)
    elif isinstance(line, codegen.PartialReductionLine):
        operands = Operand(line.workspace_name, writes=False), Operand(line.buffer_name, writes=True)
        call = CallInfo(line.reduction_type, operands)
    else:
        call = _operator(line.node)
    # A kernel may take a buffer twice, to read and to write it.
    writes: dict[str, bool] = {}
    for operand in call.operands:
        writes[operand.buffer] = operand.writes or writes.get(operand.buffer, False)
    operands = tuple(
        Operand(buffer, written, places.get(buffer), begins=buffer in new)
        for buffer, written in writes.items()
    )
    return dataclasses.replace(call, operands=operands)


def _kernel(line: codegen.KernelCallLine) -> CallInfo:
    unknown = CallInfo(line.kernel_name, is_declared=False)
    # A kernel of the program's own may read addresses from memory.
    if not line.triton or line.triton_meta is None or line.raw_keys is not None:
        return unknown
    signature, constants = line.triton_meta["signature"], line.triton_meta["constants"]
    # An argument that is always 1 is passed, and no parameter.
    names = [name for name, type_ in signature.items() if type_ != "constexpr" or name in constants]
    mutated = (line.inductor_meta or {}).get("mutated_arg_names", ())
    operands = []
    for name, argument in zip(names, line.call_args):
        type_ = signature[name]
        if type_.startswith("*"):
            if not isinstance(argument, str):
                return unknown
            is_read = name.startswith(READ_PARAMETERS) and name not in mutated
            operands.append(Operand(argument, writes=not is_read))
        elif "desc" in type_.lower():
            return unknown
    return CallInfo(line.kernel_name, tuple(operands))


def _operator(operation: ir.ExternKernel) -> CallInfo:
    op = getattr(operation, "op_overload", None)
    name = operator_name(operation)
    unknown = CallInfo(name, is_declared=False)
    if not _has_schema(operation, op):
        return unknown
    real_names = V.graph.scheduler.mutation_real_name
    written = OrderedSet(operation.get_mutation_names())
    written |= OrderedSet(name for output in operation.get_outputs() for name in output.get_mutation_names())
    written = OrderedSet(real_names.get(name, name) for name in written)
    operands = []
    try:
        for buffer in _buffers([operation.inputs, operation.constant_args, operation.kwargs]):
            buffer = real_names.get(buffer, buffer)
            operands.append(Operand(buffer, writes=buffer in written))
    except TypeError:
        return unknown
    if not written <= OrderedSet(operand.buffer for operand in operands):
        return unknown
    if not isinstance(operation.layout, ir.NoneLayout):
        operands.append(Operand(operation.get_name(), writes=True))
    has_workspace = (name.partition(".")[2] if op is None else op._opname) in MATMULS
    return CallInfo(name, tuple(operands), tuple(_resources(op)), has_workspace=has_workspace)


def _has_schema(operation: ir.ExternKernel, op: Any) -> bool:
    """Return whether the schema of an operator tells all tensors that it reads and writes."""
    if type(operation) not in OPERATORS:
        return False
    if op is None:
        # Such as extern_kernels.mm, which has none.
        return isinstance(operation, ir.ExternKernelOut)
    if not isinstance(op, torch._ops.OpOverload) or op.namespace in NAMESPACES:
        return False
    return op.namespace != "aten" or not op._opname.startswith(LIBRARY_PREFIXES)


def _buffers(given: Any) -> Iterator[str]:
    """Yield the names of the buffers among an operator's arguments. Raises TypeError: one is another object."""
    for argument in pytree.tree_leaves(given, is_leaf=lambda leaf: isinstance(leaf, ir.IRNode)):
        if not isinstance(argument, ir.IRNode) or isinstance(argument, NO_TENSORS):
            if isinstance(argument, torch.Generator):
                raise TypeError(type(argument).__name__)
            continue
        while isinstance(argument, ir.MutableBox):
            argument = argument.data
        if not isinstance(argument, (ir.Buffer, ir.ReinterpretView)):
            raise TypeError(type(argument).__name__)
        yield argument.get_name()


def _resources(op: torch._ops.OpOverload | None) -> Iterator[str]:
    if op is None:
        return
    if torch.Tag.nondeterministic_seeded in op.tags:
        yield RANDOM
    if op.namespace not in ("aten", "prims"):
        # State that the operators of a custom library share.
        yield op.namespace
