"""
``x[i, n:] = number`` with a tensor ``n``, as programs make masks of lengths.

Eager mode reads the bounds, and Dynamo breaks the graph there. With PyGraph, the graph computes from the bounds which
elements they select, and writes the number to those: ``x[i] = torch.where(selected, number, x[i])``. Steps are 1, and
the index consists of integers and slices. The number is a 0-d tensor, or one that the type of ``x`` has.
"""

from __future__ import annotations

import math
import operator
from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo import variables
from torch._dynamo.exc import UnspecializeRestartAnalysis
from torch._dynamo.variables.base import VariableTracker
from torch._inductor.pygraph.dynamo.branches import Branches, FLOATS, INTEGERS, plain_tensor
from torch._inductor.pygraph.dynamo.breaks import broken, is_broken
from torch._inductor.pygraph.dynamo.slices import SliceOfTensors, use_of
from torch._inductor.pygraph.types.reason import Code, Reason


if TYPE_CHECKING:
    import types
    from collections.abc import Sequence

    from torch._dynamo.bytecode_transformation import Instruction
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

DTYPES = (*FLOATS, *INTEGERS, torch.bool)

# The graph reads and writes what a slice without bounds would select.
MAX_ELEMENTS = 2**20

# A bound that is a number is smaller. So its sum with a size does not overflow.
MAX_BOUND = 2**62

CPU = torch.device("cpu")
ADD = variables.BuiltinVariable(operator.add)
GETITEM = variables.BuiltinVariable(operator.getitem)


class Bounds(SliceOfTensors):
    """A slice that is stored to. ``place`` is that of its instruction."""

    def __init__(
        self, start: VariableTracker, stop: VariableTracker, step: VariableTracker, code: types.CodeType, place: int
    ) -> None:
        super().__init__(start, stop, step, code)
        self.place = place


class Fills(Branches):
    def make_slice(self, tx: InstructionTranslatorBase, items: Sequence[VariableTracker]) -> Any:
        if is_filled(tx, items):
            place = tx.indexof[tx.current_instruction]
            if not is_broken(tx, (tx.f_code, place)):
                start, stop, step = (*items, constant(None))[:3]
                return Bounds(start, stop, step, tx.f_code, place)
        return super().make_slice(tx, items)

    def on_instruction(self, tx: InstructionTranslatorBase, inst: Instruction) -> None:
        super().on_instruction(tx, inst)
        if inst.opname != "STORE_SUBSCR":
            return
        key = tx.stack[-1]
        index = key.items if type(key) is variables.TupleVariable else [key]
        if any(type(i) is Bounds for i in index):
            self.fill(tx, index)

    def fill(self, tx: InstructionTranslatorBase, index: Sequence[VariableTracker]) -> None:
        """Let the instruction store to all that slices without bounds select."""
        self.repair(tx, Reason.of(Code.FILLED_IN_GRAPH))
        value, of, _ = (v.realize() for v in tx.stack[-3:])
        dims = [num_dims(i) for i in index]
        if None in dims:
            break_at(index, "another index than integers and slices")
        everything = variables.SliceVariable([constant(None)] * 3, tx)
        indices = [everything if type(i) is Bounds else i for i in index]
        view = GETITEM.call_function(tx, [of, variables.TupleVariable(indices)], {})
        example = example_of(view)
        if not is_small(example):
            break_at(index, "too many elements")
        selected = None
        for i, bounds in enumerate(index):
            if type(bounds) is Bounds:
                dim = example.dim() - sum(dims[i:]) if any(map(is_ellipsis, index[:i])) else sum(dims[:i])
                mask = mask_of(tx, view, dim, bounds)
                selected = mask if selected is None else selected.call_method(tx, "__and__", [mask], {})
        if value.is_tensor() and value.dtype != of.dtype:
            value = value.call_method(tx, "to", [VariableTracker.build(tx, of.dtype)], {})
        elif of.dtype is torch.bool and not value.is_tensor():
            value = constant(bool(value.as_python_constant()))
        filled = call(tx, torch.where, selected, value, view)
        tx.stack[-3:] = [filled, view, constant(...)]


def is_filled(tx: InstructionTranslatorBase, items: Sequence[VariableTracker]) -> bool:
    """Return whether a slice of these bounds will be stored to in a way that the graph can."""
    if not any(item.is_tensor() for item in items) or torch._dynamo.config.capture_scalar_outputs:
        return False
    use = use_of(tx)
    if use is None or use[1].opname != "STORE_SUBSCR":
        return False
    value, of = (v.realize() for v in tx.stack[-2 - use[0] :][:2])
    step = items[2].realize() if len(items) == 3 else constant(None)
    is_step = (
        type(step) is variables.ConstantVariable and type(step.value) in (int, type(None)) and step.value in (1, None)
    )
    return is_step and is_strided(of) and is_number(value, of) and all(is_bound(tx, i, of) for i in items[:2])


def is_bound(tx: InstructionTranslatorBase, item: VariableTracker, of: VariableTracker) -> bool:
    if item.is_tensor():
        tensor = plain_tensor(tx, item)
        if tensor is None:
            return False
        example = example_of(tensor)
        return example.dtype in (*INTEGERS, torch.bool) and example.device in (CPU, example_of(of).device)
    value = item.as_python_constant() if item.is_python_constant() else math.inf
    return value is None or (type(value) is int and abs(value) < MAX_BOUND)


def is_strided(of: VariableTracker) -> bool:
    if type(of) is not variables.TensorVariable or of.class_type not in (torch.Tensor, torch.nn.Parameter):
        return False
    example = example_of(of)
    # Eager mode raises if elements share memory.
    return (
        isinstance(example, torch.Tensor)
        and example.layout is torch.strided
        and example.dtype in DTYPES
        and not any(type(stride) is int and stride == 0 for stride in example.stride())
    )


def is_number(value: VariableTracker, of: VariableTracker) -> bool:
    """Return whether a value is a number that the type of ``of`` has, but for rounding."""
    example = example_of(of)
    if type(value) is variables.TensorVariable:
        number = example_of(value)
        return (
            value.class_type in (torch.Tensor, torch.nn.Parameter)
            and isinstance(number, torch.Tensor)
            and number.layout is torch.strided
            and number.dim() == 0
            and number.device == example.device
            and number.dtype in DTYPES
            and torch.can_cast(number.dtype, example.dtype)
        )
    if type(value) is not variables.ConstantVariable or type(value.value) not in (bool, int, float):
        return False
    number = value.value
    if example.dtype is torch.bool:
        return type(number) is not float
    if example.dtype in FLOATS:
        return not math.isfinite(number) or abs(number) <= torch.finfo(example.dtype).max
    limits = torch.iinfo(example.dtype)
    return type(number) is not float and limits.min <= number <= limits.max


def is_small(example: torch.Tensor) -> bool:
    numel = example.numel()
    hint = numel if type(numel) is int else numel.node.hint
    return hint is not None and hint <= MAX_ELEMENTS


def num_dims(index: VariableTracker) -> int | None:
    """Return how many dimensions of the result an index makes. An ellipsis counts as none."""
    if isinstance(index, variables.SliceVariable):
        return 1
    index = index.realize()
    if type(index) is variables.SymNodeVariable:
        return 0 if isinstance(index.sym_num, torch.SymInt) else None
    if not index.is_python_constant():
        return None
    value = index.as_python_constant()
    return 1 if value is None else 0 if value is ... or type(value) is int else None


def is_ellipsis(index: VariableTracker) -> bool:
    return type(index) is variables.ConstantVariable and index.value is ...


def mask_of(tx: InstructionTranslatorBase, view: Any, dim: int, bounds: Bounds) -> Any:
    """Return the mask of what bounds select of a dimension, in the shape that broadcasts to ``view``."""
    rest = example_of(view).dim() - dim - 1
    size = view.call_method(tx, "size", [constant(dim)], {})
    options = {"device": VariableTracker.build(tx, example_of(view).device)}
    places = call(tx, torch.arange, size, **options)
    mask = None
    for item, compare in zip(bounds.items, ("ge", "lt")):
        if item.is_constant_none():
            continue
        if item.is_tensor():
            bound = item.realize().call_method(tx, "reshape", [constant(())], {})
            # A bound of few bits may not have the sum with the size. A kernel may take one on the CPU as it is.
            zero = call(tx, torch.zeros, constant(1), dtype=VariableTracker.build(tx, torch.int64), **options)
            bound = zero.call_method(tx, "add", [bound], {})
            from_end = bound.call_method(tx, "add", [size], {})
            is_negative = bound.call_method(tx, "lt", [constant(0)], {})
            bound = call(tx, torch.where, is_negative, from_end, bound)
        elif item.as_python_constant() < 0:
            bound = ADD.call_function(tx, [item, size], {})
        else:
            bound = item
        part = places.call_method(tx, compare, [bound], {})
        mask = part if mask is None else mask.call_method(tx, "__and__", [part], {})
    shape = [constant(n) for n in (-1, *[1] * rest)]
    return mask.call_method(tx, "reshape", shape, {})


def call(tx: InstructionTranslatorBase, function: Any, *args: VariableTracker, **kwargs: VariableTracker) -> Any:
    return variables.TorchInGraphFunctionVariable(function).call_function(tx, args, kwargs)


def break_at(index: Sequence[VariableTracker], why: str) -> None:
    """Raises RestartAnalysis: the graph breaks at the slices."""
    for bounds in index:
        if type(bounds) is Bounds:
            broken(bounds.code)[bounds.place] = Reason.of(
                Code.DYNAMO, said=f"a slice with a tensor is stored to: {why}"
            )
    raise UnspecializeRestartAnalysis(restart_reason=why)


def example_of(value: Any) -> Any:
    return value.as_proxy().node.meta.get("example_value")


def constant(value: object) -> VariableTracker:
    return variables.ConstantVariable.create(value)
