"""
Branches on tensors that do not break the graph.

Where sizes and constants decide (ranges.py), Dynamo traces the path that is taken, and guards on the sizes. Otherwise
the graph breaks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._dynamo import variables
from torch._inductor.pygraph.dynamo.ranges import outcome_of


if TYPE_CHECKING:
    from torch._dynamo.bytecode_transformation import Instruction
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker


class Branches:
    def on_jump(self, tx: InstructionTranslatorBase, inst: Instruction) -> bool:
        value = tx.stack[-1]
        if not value.is_tensor() or is_assertion(tx, inst):
            return False
        value = value.realize()
        if not is_plain(tx, value):
            return False
        outcome = outcome_of(value.as_proxy().node)
        if outcome is None:
            return False
        follow(tx, inst, outcome)
        return True


def is_plain(tx: InstructionTranslatorBase, value: VariableTracker) -> bool:
    """Return whether the truth of a value is that of a tensor of one element in Dynamo's graph."""
    output = tx.output
    if type(value) is not variables.TensorVariable or output.export or output.current_tracer is not output.root_tracer:
        return False
    example = value.as_proxy().node.meta.get("example_value")
    return (
        value.class_type is torch.Tensor
        and example is not None
        and example.numel() == 1
        and torch._C._functorch.peek_interpreter_stack() is None
        and not tx.symbolic_torch_function_state.in_torch_function_mode()
    )


def is_assertion(tx: InstructionTranslatorBase, inst: Instruction) -> bool:
    return "JUMP" in inst.opname and tx.next_instruction.opname == "LOAD_ASSERTION_ERROR"


def follow(tx: InstructionTranslatorBase, inst: Instruction, outcome: bool) -> None:
    """Trace a jump, or a negation, of a value that is as true as ``outcome``."""
    value = tx.pop()
    if "JUMP" not in inst.opname:
        tx.push(variables.ConstantVariable.create(not outcome))
    elif outcome == ("IF_TRUE" in inst.opname):
        if inst.opname.endswith("_OR_POP"):
            tx.push(value)
        tx.jump(inst)
