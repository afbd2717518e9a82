"""
A slice with tensor bounds, such as ``x[:n]`` with a tensor ``n``.

Dynamo reads the bounds when it makes the slice, at BUILD_SLICE, where it cannot resume after a graph break. With
PyGraph, it reads them where a tensor is indexed, and resumes there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._dynamo.bytecode_analysis import JUMP_OPCODES
from torch._dynamo.exc import Unsupported
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import ConstantVariable, SliceVariable, TensorVariable, VariableTracker
from torch._inductor.pygraph.dynamo.flow import effect
from torch._inductor.pygraph.dynamo.obstacles import mark_slice, of_graph, Traced


if TYPE_CHECKING:
    import types
    from collections.abc import Sequence

    from torch._dynamo.bytecode_transformation import Instruction
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase


class NotReadError(Unsupported, NotImplementedError):
    """Raised where Dynamo needs a constant slice, or, as NotImplementedError, asks whether a value is constant."""


class SliceOfTensors(SliceVariable):
    """A slice whose bounds stay tensors until it is used, as in eager mode."""

    def __init__(
        self, start: VariableTracker, stop: VariableTracker, step: VariableTracker, code: types.CodeType
    ) -> None:
        VariableTracker.__init__(self)
        self.items = (start, stop, step)
        self.code = code

    def read(self) -> SliceVariable:
        """Raises Unsupported if Tensor.item() breaks the graph."""
        tx = InstructionTranslator.current_tx()
        root = tx.output.root_tx
        # If an inlined function made it, Dynamo resumes after the call without PyGraph, too.
        if root is not None and root.f_code is self.code:
            mark_slice(self.code)
        return SliceVariable(self.items, tx)

    def as_python_constant(self) -> slice:
        try:
            return self.read().as_python_constant()
        except Unsupported as e:
            e.remove_from_stats()
            raise NotReadError(e.msg, e.gb_type or "") from e

    def as_proxy(self) -> slice:
        return self.read().as_proxy()


def make_slice(tx: InstructionTranslatorBase, items: Sequence[VariableTracker], traced: Traced) -> SliceVariable | None:
    """Return the slice of BUILD_SLICE's two or three arguments, or None for Dynamo's own."""
    if (
        not any(item.is_tensor() for item in items)
        or tx.one_graph
        or torch._dynamo.config.capture_scalar_outputs
        or type(indexed(tx)) is not TensorVariable
        # The statement runs eagerly without PyGraph.
        or traced.calls
        or any(of_graph(tx.output.graph))
    ):
        return None
    start, stop, step = (*items, ConstantVariable.create(None))[:3]
    return SliceOfTensors(start, stop, step, tx.f_code)


def indexed(tx: InstructionTranslatorBase) -> VariableTracker | None:
    """Return the value on the stack that the new slice, or a tuple with it, will index, None if that is not known."""
    use = use_of(tx)
    return None if use is None else tx.stack[-1 - use[0]].realize()


def use_of(tx: InstructionTranslatorBase) -> tuple[int, Instruction] | None:
    """
    Return the number of values on the stack that will be in a tuple with the new slice, and the instruction that reads
    the tuple or the slice. None if that is not known.
    """
    # The number of stack entries from the slice on. It is not on tx.stack yet.
    height = 1
    following = tx.instructions[tx.instruction_pointer :]
    for inst, after in zip(following, following[1:]):
        if inst.opname == "BUILD_TUPLE" and inst.arg >= height:
            return inst.arg - height, after
        if inst.opname in ("BINARY_SUBSCR", "STORE_SUBSCR") and height == 1:
            return 0, inst
        if inst.opcode in JUMP_OPCODES:
            return None
        height += effect(inst, jump=False)
        if height < 1:
            return None
    return None
