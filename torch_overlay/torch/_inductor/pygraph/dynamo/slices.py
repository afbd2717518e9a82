"""
A slice that is bounded by values of tensors, ``x[:n]`` with a tensor ``n``.

Dynamo reads the bounds where the slice is made, at BUILD_SLICE. It cannot resume from a break
there: the rest of the function runs eagerly, from the last instruction on before which
nothing was on the stack. It can where a tensor is indexed. So the bounds are read there, and
what comes before it in the same statement, and after it, is captured.
"""

from __future__ import annotations

import dis
from typing import TYPE_CHECKING

import torch
from torch._dynamo.bytecode_analysis import HASLOCAL, JUMP_OPCODES
from torch._dynamo.code_context import code_context
from torch._dynamo.exc import Unsupported
from torch._dynamo.resume_execution import ContinueExecutionCache
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import (
    ConstantVariable,
    SliceVariable,
    TensorVariable,
    VariableTracker,
)
from torch._inductor.pygraph.dynamo import prefix


if TYPE_CHECKING:
    import types
    from collections.abc import Sequence

    from torch._dynamo.symbolic_convert import InstructionTranslatorBase


# In the context of the code, once a slice of it broke the graph where a tensor is indexed.
IS_READ_LATER = "pygraph_slices"


class NotReadError(Unsupported, NotImplementedError):
    """
    Breaks the graph where a constant is needed. Where it is only asked whether something is
    one, such as a tuple that has the slice, it is not.
    """


class SliceOfTensors(SliceVariable):
    """Its bounds stay tensors, as in eager mode. Their values are read when it is used."""

    def __init__(
        self,
        start: VariableTracker,
        stop: VariableTracker,
        step: VariableTracker,
        code: types.CodeType,
    ) -> None:
        VariableTracker.__init__(self)
        self.items = (start, stop, step)
        self.code = code

    def read(self) -> SliceVariable:
        """
        Raises:
            Unsupported: Tensor.item() breaks the graph.
        """
        tx = InstructionTranslator.current_tx()
        root = tx.output.root_tx
        # Upstream goes on behind a call that breaks the graph.
        if root is not None and root.f_code is self.code:
            code_context.get_context(original(self.code))[IS_READ_LATER] = True
        return SliceVariable(self.items, tx)

    def as_python_constant(self) -> slice:
        try:
            return self.read().as_python_constant()
        except Unsupported as e:
            e.remove_from_stats()
            raise NotReadError(e.msg, e.gb_type or "") from e

    def as_proxy(self) -> slice:
        return self.read().as_proxy()


def original(code: types.CodeType) -> types.CodeType:
    """The function's code where ``code`` is what follows a graph break in it, else itself."""
    part = ContinueExecutionCache.generated_code_metadata.get(code)
    return code if part is None else part.code


def is_left_out(code: types.CodeType) -> bool:
    """
    Whether upstream runs it eagerly, since it follows a slice that breaks the graph.
    """
    whole = original(code)
    return (
        whole is not code
        and code_context.has_context(whole)
        and code_context.get_context(whole).get(IS_READ_LATER, False)
    )


def check_rest(tx: InstructionTranslatorBase) -> None:
    """
    Called where a graph is complete.

    Raises:
        SkipFrame: upstream runs what follows a slice eagerly, and compiled it may differ.
    """
    if is_left_out(tx.f_code):
        prefix.skip_if_different(tx)


def make_slice(
    tx: InstructionTranslatorBase, items: Sequence[VariableTracker]
) -> SliceVariable:
    """Of two or three ``items``, which were on the stack, as of the instruction BUILD_SLICE."""
    if (
        tx.one_graph
        or torch._dynamo.config.capture_scalar_outputs
        or type(indexed(tx)) is not TensorVariable
        # Upstream runs the statement eagerly.
        or any(prefix.of_graph(tx.output.graph))
        or any(prefix.of_calls(tx.output.called))
    ):
        return SliceVariable(items, tx)
    start, stop, step = (*items, ConstantVariable.create(None))[:3]
    return SliceOfTensors(start, stop, step, tx.f_code)


def indexed(tx: InstructionTranslatorBase) -> VariableTracker | None:
    """
    What is on the stack to be indexed by the slice that is made now, or by a tuple that has
    it; None if that is not seen.
    """
    # How much of the stack there is from the slice on; the slice is not on tx.stack yet.
    height = 1
    for inst in tx.instructions[tx.instruction_pointer :]:
        arg = inst.arg
        if arg is None and inst.opcode >= dis.HAVE_ARGUMENT:
            # Dynamo splits instructions that load several variables.
            if inst.opcode not in HASLOCAL:
                return None
            arg = 0
        if inst.opname == "BUILD_TUPLE" and arg >= height:
            # It takes what is in front of the slice, too.
            return tx.stack[height - arg - 1].realize()
        if inst.opname in ("BINARY_SUBSCR", "STORE_SUBSCR") and height == 1:
            return tx.stack[-1].realize()
        if inst.opcode in JUMP_OPCODES:
            return None
        height += dis.stack_effect(inst.opcode, arg)
        if height < 1:
            return None
    return None
