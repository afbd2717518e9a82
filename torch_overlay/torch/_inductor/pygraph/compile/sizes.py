"""
Describes how a generated function depends on its sizes, from the expressions of the scheduler's nodes and of the
wrapper's lines. The result is in types/sizes.py.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TYPE_CHECKING

import sympy

import torch
from torch._inductor import config, ir
from torch._inductor.codegen import wrapper as codegen
from torch._inductor.codegen.common import WorkspaceArg, WorkspaceZeroMode
from torch._inductor.pygraph.compile.calls import calls_as_text, OPERATOR_LINES, operator_name
from torch._inductor.pygraph.compile.lowering import Launch
from torch._inductor.pygraph.types.reason import Code, first_line, Reason, RefusedError
from torch._inductor.pygraph.types.sizes import (
    AllocationAt,
    DeliverAt,
    KernelAt,
    OperatorAt,
    Pointer,
    SizeInput,
    SizeMap,
    SizeWord,
    TensorAt,
)
from torch._inductor.pygraph.values.sizes import Steps
from torch._inductor.runtime.runtime_utils import is_power_of_2
from torch._inductor.virtualized import V
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import FloorDiv
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.numbers import int_oo


if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch._inductor.pygraph.types.sizes import Operation, Value
    from torch._inductor.scheduler import BaseSchedulerNode


NO_TENSORS = (ir.NonTensorObj, ir.NoneAsConstantBuffer)

# Bytes of an integer in a kernel's signature.
WORDS = {"i32": 4, "u32": 4, "i64": 8, "u64": 8}


def describe_sizes(
    wrapper: codegen.PythonWrapperCodegen, nodes: Iterable[BaseSchedulerNode]
) -> SizeMap | Reason | None:
    """Return how the function depends on its sizes, or why that is not known; None if no input is a size."""
    inputs = wrapper.get_graph_inputs()
    sizes = {name: value for name, value in inputs.items() if isinstance(value, sympy.Symbol)}
    if not sizes:
        return None
    try:
        return _Describer(wrapper, sizes).describe(nodes)
    except RefusedError as error:
        return error.reason
    except Exception as error:  # The function is right without a map.
        return Reason.of(Code.SIZES_NOT_DESCRIBED, error=first_line(repr(error)))


@dataclasses.dataclass(frozen=True)
class _Quotient:
    """A division that gives a float. It is exact below 2**53, so that its floor and ceiling are."""

    left: Value
    right: Value


class _Lowering:
    """What sympy_interp calls for each operation of an expression."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def _add_step(self, operation: Operation, left: Value | _Quotient, right: Value | _Quotient) -> Value:
        if isinstance(left, _Quotient) or isinstance(right, _Quotient):
            raise NotImplementedError(operation)
        return self.steps.add(operation, left, right)

    add = functools.partialmethod(_add_step, "add")
    mul = functools.partialmethod(_add_step, "multiply")
    floordiv = functools.partialmethod(_add_step, "floor_divide")
    mod = functools.partialmethod(_add_step, "modulo")
    python_mod = mod
    minimum = functools.partialmethod(_add_step, "minimum")
    maximum = functools.partialmethod(_add_step, "maximum")

    def constant(self, number: Any, dtype: torch.dtype) -> Value:
        if dtype is not torch.int64:
            raise NotImplementedError(dtype)
        return self.steps.constant(int(number))

    def modular_indexing(self, value: Value, divisor: Value, modulus: Value) -> Value:
        return self.mod(self.floordiv(value, divisor), modulus)

    def identity(self, value: Value) -> Value:
        return value

    def pow_by_natural(self, base: Value, exponent: Value) -> Value:
        times = self.steps.known(exponent)
        if times is None or times < 1:
            raise NotImplementedError(times)
        result = base
        for _ in range(times - 1):
            result = self.mul(result, base)
        return result

    def int_truediv(self, left: Value, right: Value) -> _Quotient:
        return _Quotient(left, right)

    def floor_to_int(self, quotient: Any, dtype: torch.dtype) -> Value:
        if not isinstance(quotient, _Quotient):
            raise NotImplementedError(quotient)
        return self.floordiv(quotient.left, quotient.right)

    def ceil_to_int(self, quotient: Any, dtype: torch.dtype) -> Value:
        if not isinstance(quotient, _Quotient):
            raise NotImplementedError(quotient)
        minus = self.steps.constant(-1)
        return self.mul(self.floordiv(self.mul(quotient.left, minus), quotient.right), minus)


def _floor(fraction: sympy.Expr) -> sympy.Expr:
    """Return the floor of a fraction as a division of integers, which // of two symbols is not."""
    numerator, denominator = sympy.fraction(sympy.together(fraction))
    # Generated code computes with floats, which are exact then.
    if not (denominator.is_Integer and is_power_of_2(int(denominator))):
        raise NotImplementedError(fraction)
    return FloorDiv(numerator, denominator)


class _Describer:
    def __init__(self, wrapper: codegen.PythonWrapperCodegen, sizes: dict[str, sympy.Symbol]) -> None:
        self.wrapper = wrapper
        self.sizes = sizes
        self.symbols = {symbol: i for i, symbol in enumerate(sizes.values())}
        self.steps = Steps(len(sizes))
        self.lowering = _Lowering(self.steps)
        self.values: dict[Any, Value] = {}
        # For each buffer what its memory belongs to, and at which byte of it the buffer begins.
        self.places: dict[str, tuple[str, Value]] = {}
        # For each operator that returns several tensors where they are, and the names that they get.
        self.results: dict[str, list[tuple[list[Any], str]]] = {}

    def describe(self, nodes: Iterable[BaseSchedulerNode]) -> SizeMap:
        if config.memory_planning:
            raise _unknown("config.memory_planning")
        for operation in calls_as_text(self.wrapper, nodes):
            raise _unknown(operator_name(operation))
        calls: list[KernelAt | OperatorAt | DeliverAt] = []
        allocations: list[AllocationAt] = []
        # Workspaces that are zeroed in front of the next launch.
        zeroed: list[TensorAt] = []
        self._place_buffers()
        for line in self.wrapper.lines:
            if isinstance(line, codegen.KernelCallLine):
                calls.append(self._kernel(line, tuple(zeroed)))
                zeroed.clear()
            elif isinstance(line, OPERATOR_LINES):
                calls.append(self._operator(line.node))
            elif isinstance(line, codegen.PartialReductionLine):
                calls.append(self._partial_reduction(line))
            elif isinstance(line, (codegen.AllocateLine, codegen.ReuseLine)):
                buffer = line.node if isinstance(line, codegen.AllocateLine) else line.reused_as
                if isinstance(buffer, WorkspaceArg) and buffer.zero_mode != WorkspaceZeroMode.UNINITIALIZED:
                    zeroed.append(self._named(buffer))
                if isinstance(line, codegen.AllocateLine) and _calls_allocator(line):
                    allocations.append(self._allocation(line.node))
        return SizeMap(
            inputs=tuple(self.wrapper.get_graph_input_names()),
            sizes=tuple(self._sizes()),
            calls=tuple(calls),
            allocations=tuple(allocations),
            outputs=tuple(map(self._output, self.wrapper.get_graph_outputs())),
            # All others add steps.
            steps=tuple(self.steps.steps),
        )

    def _sizes(self) -> Iterable[SizeInput]:
        places = {name: i for i, name in enumerate(self.wrapper.get_graph_input_names())}
        for name, symbol in self.sizes.items():
            upper = V.graph.sizevars.shape_env.bound_sympy(symbol).upper
            yield SizeInput(name, places[name], None if upper in (int_oo, sympy.oo) else int(upper))

    # Expressions

    def value(self, expression: Any) -> Value:
        """Return the value of a size, stride, offset or argument."""
        if isinstance(expression, torch.SymInt):
            expression = expression.node.expr
        if (value := self.values.get(expression)) is None:
            value = self.values[expression] = self._lower(sympy.sympify(expression))
        return value

    def _lower(self, expression: sympy.Expr) -> Value:
        sizevars = V.graph.sizevars
        simplified = sizevars.simplify(sizevars.remove_precomputed_replacements(expression))
        try:
            return sympy_interp(self.lowering, self.symbols, simplified.replace(sympy.floor, _floor))
        # A symbol that is no input, or an operation that sympy_interp or the lowering does not know.
        except (AttributeError, KeyError, NotImplementedError) as error:
            raise RefusedError(Reason.of(Code.SIZE_EXPRESSION, expression=str(simplified))) from error

    def _values(self, expressions: Iterable[Any]) -> tuple[Value, ...]:
        return tuple(map(self.value, expressions))

    def is_known(self, value: Value) -> bool:
        return self.steps.known(value) is not None

    # Memory

    def _place_buffers(self) -> None:
        zero = self.value(0)
        names = (*self.wrapper.get_graph_input_names(), *V.graph.constants)
        self.places.update((name, (name, zero)) for name in names)
        for line in self.wrapper.lines:
            if isinstance(line, codegen.AllocateLine):
                name = line.node.get_name()
                self.places[name] = (name, zero)
            elif isinstance(line, OPERATOR_LINES):
                name = line.node.get_name()
                self.places.setdefault(name, (name, zero))
            elif isinstance(line, codegen.PartialReductionLine):
                self.places[line.buffer_name] = (line.buffer_name, zero)
            elif isinstance(line, codegen.ReuseLine):
                self.places[line.reused_as.get_name()] = self._place(line.node.get_name())
            elif isinstance(line, codegen.ReinterpretLine):
                view = self.tensor(line.layout.view)
                self.places[line.reused_as.get_name()] = (view.owner, view.offset)
            elif isinstance(line, codegen.MultiOutputLine):
                name = line.result_name
                self.places[name] = (name, zero) if line.indices else self._place(line.arg_name)
                self.results.setdefault(line.arg_name, []).append(([i for _, i in line.indices], name))

    def _place(self, name: str) -> tuple[str, Value]:
        name = V.graph.scheduler.mutation_real_name.get(name, name)
        if (place := self.places.get(name)) is None:
            raise _unknown(name)
        return place

    def tensor(self, node: ir.IRNode) -> TensorAt:
        """Return what generated code for a buffer, or for a view of one, gives."""
        while isinstance(node, ir.MutableBox):
            node = node.data
        if not isinstance(node, (ir.Buffer, ir.ReinterpretView)):
            raise _unknown(type(node).__name__)
        owner, offset = self._place(node.get_name())
        if isinstance(node, ir.ReinterpretView):
            buffer = node
            while not isinstance(buffer, ir.Buffer):
                buffer = buffer.data
            if buffer.get_layout().offset != 0:
                # Generated code adds the view's offset to it, or does not.
                raise _unknown(node.get_name())
            nbytes = self.value(buffer.get_dtype().itemsize)
            offset = self.lowering.add(offset, self.lowering.mul(self.value(node.layout.offset), nbytes))
        size, stride = self._values(node.get_size()), self._values(node.get_stride())
        return TensorAt(owner, offset, size, stride, str(node.get_dtype()))

    def _named(self, buffer: codegen.BufferLike) -> TensorAt:
        """Return a buffer, or a workspace, as a whole."""
        owner, offset = self._place(buffer.get_name())
        size, stride = self._values(buffer.get_size()), self._values(buffer.get_stride())
        return TensorAt(owner, offset, size, stride, str(buffer.get_dtype()))

    def _allocation(self, buffer: codegen.BufferLike) -> AllocationAt:
        size, stride = V.graph.get_allocation_size(buffer), buffer.get_stride()
        return AllocationAt(buffer.get_name(), self._values(size), self._values(stride), str(buffer.get_dtype()))

    def _output(self, node: ir.IRNode) -> TensorAt | Value | None:
        if isinstance(node, ir.ShapeAsConstantBuffer):
            return self.value(node.expr)
        if isinstance(node, ir.NoneAsConstantBuffer):
            return None
        return self.tensor(node)

    # Calls

    def _kernel(self, line: codegen.KernelCallLine, zeroed: tuple[TensorAt, ...]) -> KernelAt:
        if not line.triton or line.triton_meta is None:
            raise _unknown(line.kernel_name)
        signature, constants = line.triton_meta["signature"], line.triton_meta["constants"]
        compiled = [name for name, type_ in signature.items() if type_ != "constexpr"]
        parameters = {name: i for i, name in enumerate(compiled)}
        if line.raw_keys is None:
            # An argument that is always 1 is passed, and no parameter.
            names = [name for name, type_ in signature.items() if type_ != "constexpr" or name in constants]
        else:
            # The kernel is the program's own.
            names = [name for name in line.raw_keys if name]
        given = line.call_args if line.raw_args is None else line.raw_args
        if len(given) < len(names):
            raise _unknown(line.kernel_name)
        pointers: list[Pointer] = []
        words: list[SizeWord] = []
        arguments: list[tuple[str, Value]] = []
        for name, argument in zip(names, given):
            type_ = signature.get(name, "constexpr")
            if type_.startswith("*"):
                owner, offset = self._pointer(argument)
                pointers.append(Pointer(parameters[name], owner, offset))
            elif (value := self._number(line.kernel_name, argument)) is not None:
                arguments.append((name, value))
                if not self.is_known(value):
                    if type_ not in WORDS:
                        raise _unknown(line.kernel_name)
                    words.append(SizeWord(parameters[name], WORDS[type_], value))
        grid = [self._number(line.kernel_name, argument) for argument in given[len(names) :]]
        if None in grid:
            raise _unknown(line.kernel_name)
        return KernelAt(
            line.kernel_name, tuple(pointers), tuple(words), tuple(arguments), tuple(grid), zeroed  # type: ignore[arg-type]
        )

    def _pointer(self, argument: str | ir.IRNode) -> tuple[str, Value]:
        if isinstance(argument, str):
            return self._place(argument)
        tensor = self.tensor(argument)
        return tensor.owner, tensor.offset

    def _number(self, kernel: str, argument: Any) -> Value | None:
        """Return the value of an argument; None if it is no integer, and no size is part of it."""
        if isinstance(argument, codegen.SymbolicCallArg):
            argument = argument.inner_expr
        if isinstance(argument, ir.IRNode) or (isinstance(argument, str) and argument not in self.places):
            # A descriptor of a tensor, or code that computes a grid.
            raise _unknown(kernel)
        if isinstance(argument, sympy.Expr) and (argument.is_integer or argument.free_symbols):
            return self.value(argument)
        is_integer = isinstance(argument, int) and not isinstance(argument, bool)
        return self.value(argument) if is_integer else None

    def _operator(self, operation: ir.ExternKernel) -> OperatorAt | DeliverAt:
        given = [operation.inputs, operation.constant_args, operation.kwargs]
        operands: list[TensorAt] = []
        numbers: list[Value] = []
        for argument in pytree.tree_leaves(given, is_leaf=lambda leaf: isinstance(leaf, ir.IRNode)):
            if isinstance(argument, ir.ShapeAsConstantBuffer):
                numbers.append(self.value(argument.expr))
            elif isinstance(argument, (torch.SymInt, sympy.Expr)):
                numbers.append(self.value(argument))
            elif isinstance(argument, ir.IRNode) and not isinstance(argument, NO_TENSORS):
                operands.append(self.tensor(argument))
        # In the order in which the operator returns them.
        results = [V.graph.get_buffer(name) for _, name in sorted(self.results.get(operation.get_name(), ()))]
        if operation.maybe_get_size() is not None:
            results.append(operation)
        made = tuple(map(self.tensor, results))
        if isinstance(operation, Launch):
            return DeliverAt(operation.pack.deliver_name, made)
        return OperatorAt(operator_name(operation), tuple(operands), made, tuple(numbers))

    def _partial_reduction(self, line: codegen.PartialReductionLine) -> OperatorAt:
        owner, offset = self._place(line.workspace_name)
        nbytes = line.index * line.nsplit * line.rnumel * torch.float32.itemsize
        rows, columns, one = self._values((line.nsplit, line.rnumel, 1))
        partial = TensorAt(
            owner, self.lowering.add(offset, self.value(nbytes)), (rows, columns), (columns, one), str(torch.float32)
        )
        result = self.tensor(V.graph.get_buffer(line.buffer_name))
        return OperatorAt(f"aten.{line.reduction_type}", (partial,), (result,), ())


def _calls_allocator(line: codegen.AllocateLine) -> bool:
    return not line.comm_buffer and line.node.get_device_or_error().type == "cuda"


def _unknown(call: str) -> RefusedError:
    return RefusedError(Reason.of(Code.CALL_AT_OTHER_SIZES, call=call))
