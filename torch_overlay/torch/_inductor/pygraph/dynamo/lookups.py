"""
``x[t]`` with a tensor ``t`` of one integer, as the schedulers of diffusion models look up coefficients of a step.

Eager mode reads the integer and returns a view. Dynamo compiles the program again for each integer, or breaks the graph
if the graph has computed it. With PyGraph, the graph computes a copy of the row, and a guard finds in each call that the
integer is within bounds (hosts.py). This is so if ``x`` and ``t`` are CPU tensors, the row is small, and nothing tells
the copy from the view (joins.py).
"""

from __future__ import annotations

import math
import operator
from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo import variables
from torch._dynamo.exc import unimplemented
from torch._inductor.pygraph.dynamo.branches import Branches
from torch._inductor.pygraph.dynamo.breaks import is_broken
from torch._inductor.pygraph.dynamo.effects import is_traced_alone, last_node, nodes_after
from torch._inductor.pygraph.dynamo.hosts import is_known, MAX_ELEMENTS
from torch._inductor.pygraph.dynamo.joins import Join, requires_grad
from torch._inductor.pygraph.dynamo.operators import INTEGERS
from torch._inductor.pygraph.types.reason import Code, Reason
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from torch._dynamo.bytecode_transformation import Instruction
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker


class Lookups(Branches):
    def on_instruction(self, tx: InstructionTranslatorBase, inst: Instruction) -> None:
        super().on_instruction(tx, inst)
        if inst.opname == "BINARY_SUBSCR" and all(value.is_tensor() for value in tx.stack[-2:]):
            self.look_up(tx, *(value.realize() for value in tx.stack[-2:]))

    def look_up(self, tx: InstructionTranslatorBase, of: Any, index: Any) -> None:
        """Let the instruction index a copy of the row with 0, if that is exact."""
        site = (tx.f_code, tx.indexof[tx.current_instruction])
        # A guard knows the inputs of the frame's own graph alone.
        if not is_traced_alone(tx) or not is_lookup(of, index) or is_broken(tx, site):
            return
        last = last_node(tx.output.graph)
        number = of.as_proxy().node.meta["example_value"].shape[0]
        bounds = [variables.ConstantVariable.create(n) for n in (-number, number - 1)]
        is_within = index.call_method(tx, "clamp", bounds, {}).call_method(tx, "eq", [index], {})
        own = [*nodes_after(last)]
        if not (outcome := self.decide(tx, is_within.as_proxy().node)):
            if outcome is False:
                unimplemented(
                    gb_type="index out of bounds",
                    context=str(of),
                    explanation="The program raises an error here.",
                    hints=[],
                )
            for node in reversed(own):
                tx.output.graph.erase_node(node)
            return
        indices = index.call_method(tx, "reshape", [variables.ConstantVariable.create(1)], {})
        getitem = variables.BuiltinVariable(operator.getitem)
        row = getitem.call_function(tx, [of, indices], {})
        self.joins.append(Join(row.as_proxy().node, of.as_proxy().node, OrderedSet(nodes_after(last)), site))
        self.repair(tx, Reason.of(Code.HOST_LOOKS_UP))
        tx.stack[-2:] = [row, variables.ConstantVariable.create(0)]


def is_lookup(of: VariableTracker, index: VariableTracker) -> bool:
    if not type(of) is type(index) is variables.TensorVariable:
        return False
    nodes = [v.as_proxy().node for v in (of, index)]
    table, number = (node.meta.get("example_value") for node in nodes)
    return (
        isinstance(table, torch.Tensor)
        and is_known(nodes[1])
        and number.dim() == 0
        and number.dtype in INTEGERS
        and table.device.type == "cpu"
        and table.layout == torch.strided
        and table.dim() > 0
        and all(type(size) is int for size in table.shape)
        and 0 < math.prod(table.shape[1:]) <= MAX_ELEMENTS
        and table.shape[0] > 0
        and not requires_grad(nodes[0])
    )
