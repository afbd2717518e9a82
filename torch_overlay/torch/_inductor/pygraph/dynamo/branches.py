"""
Branches on tensors that do not break the graph.

- Sizes and constants decide (ranges.py): Dynamo traces the path that is taken, and guards on the sizes.
- CPU values decide that the host knows before the graph runs (hosts.py): the same, with a guard on the outcome.
- Otherwise the graph breaks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._dynamo import variables
from torch._inductor.pygraph.dynamo.hosts import Hosts
from torch._inductor.pygraph.dynamo.raising import raising_path
from torch._inductor.pygraph.dynamo.ranges import outcome_of


if TYPE_CHECKING:
    from torch._dynamo.bytecode_transformation import Instruction
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker


class Branches(Hosts):
    def follow_sizes(self, tx: InstructionTranslatorBase, inst: Instruction) -> bool:
        """Trace the path that sizes decide for, if they do."""
        value = condition_of(tx)
        outcome = None if value is None else outcome_of(value.as_proxy().node)
        if outcome is not None:
            follow(tx, inst, outcome)
        return outcome is not None

    def branch(self, tx: InstructionTranslatorBase, inst: Instruction) -> bool:
        """Trace a branch that sizes do not decide, if that is exact."""
        value = condition_of(tx)
        if value is None or is_check(tx, inst):
            return False
        outcome = self.decide(tx, value.as_proxy().node)
        if outcome is not None:
            follow(tx, inst, outcome)
        return outcome is not None


def condition_of(tx: InstructionTranslatorBase) -> variables.TensorVariable | None:
    """Return the value on top of the stack, if its truth is that of a tensor of one element in Dynamo's graph."""
    value = tx.stack[-1]
    if not value.is_tensor():
        return None
    value = value.realize()
    return value if is_plain(tx, value) else None


def is_plain(tx: InstructionTranslatorBase, value: VariableTracker) -> bool:
    """Return whether the truth of a value is that of a tensor of one element in Dynamo's graph."""
    output = tx.output
    if type(value) is not variables.TensorVariable or output.export or output.current_tracer is not output.root_tracer:
        return False
    example = value.as_proxy().node.meta.get("example_value")
    return (
        value.class_type in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and example is not None
        and example.numel() == 1
        and torch._C._functorch.peek_interpreter_stack() is None
        and not tx.symbolic_torch_function_state.in_torch_function_mode()
    )


def is_check(tx: InstructionTranslatorBase, inst: Instruction) -> bool:
    """Return whether a path only raises."""
    return "JUMP" in inst.opname and any(raising_path(tx, start) for start in (inst.target, tx.next_instruction))


def follow(tx: InstructionTranslatorBase, inst: Instruction, outcome: bool) -> None:
    """Trace a jump, or a negation, of a value that is as true as ``outcome``."""
    value = tx.pop()
    if "JUMP" not in inst.opname:
        tx.push(variables.ConstantVariable.create(not outcome))
    elif outcome == ("IF_TRUE" in inst.opname):
        if inst.opname.endswith("_OR_POP"):
            tx.push(value)
        tx.jump(inst)
