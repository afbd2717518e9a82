"""
Loops that break the graph: the body becomes a function, which Dynamo compiles once.

Without PyGraph, a graph break in a loop skips the frame, and the whole function runs eagerly: what Dynamo resumes at
would call itself in each turn. With PyGraph, Dynamo analyses the frame again as if its code were::

    code before the loop
    *exits, state = for_each(body, items, state, others, numbers)  # see turns.py
    code after the loop

The body is the loop's bytecode as a function of the variables that it reads. It returns the variables that the loop
stores where a turn ends: at a jump to the next turn, and at a jump out of the loop. If a turn ends with a branch on a
value, the body returns the value, and the host reads it as in eager mode. Each instruction of the program runs as
often, and in the same order, as in eager mode. A loop may iterate ``enumerate(layers)``: bytecode makes it for for_each.

A loop stays as it is

- if its bytecode cannot be a function (outlining.py)
- if it adds to a dictionary, for which Dynamo would compile each turn
"""

from __future__ import annotations

import types
from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo import exc, variables
from torch._dynamo.bytecode_analysis import JUMP_OPCODES
from torch._dynamo.bytecode_transformation import (
    create_call_function,
)
from torch._dynamo.capabilities import FrameExtension
from torch._dynamo.code_context import code_context
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.lists import ListIteratorVariable
from torch._inductor.pygraph.dynamo.breaks import add, place_of, refuse
from torch._inductor.pygraph.dynamo.drops import why_apart
from torch._inductor.pygraph.dynamo.flow import flow_of, is_branch
from torch._inductor.pygraph.dynamo.outlining import FIRST, is_for, loops_around, Outlining, StaysError
from torch._inductor.pygraph.types.reason import Code, Reason
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from torch._dynamo.codegen import PyCodegen
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._inductor.pygraph.dynamo.breaks import Call
    from torch._inductor.pygraph.dynamo.flow import Flow


# Graph breaks where the host reads a tensor
READS = ("Data-dependent branching", "Unsupported Tensor.item() call with capture_scalar_outputs=False")


class Enumerate(VariableTracker):
    """enumerate() of what can be iterated again. Dynamo's own is a generator, which no bytecode can make."""

    def __init__(self, args: list[VariableTracker], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.args = args

    def reconstruct(self, codegen: PyCodegen) -> None:
        codegen.add_push_null(lambda: codegen.load_import_from("builtins", "enumerate"))
        codegen.foreach(self.args)
        codegen.extend_output(create_call_function(len(self.args), False))


class Loops(FrameExtension):
    def enumerate_items(self, tx: InstructionTranslatorBase, call: Call) -> VariableTracker | None:
        """Return what the loop of a replaced frame iterates, if a call makes it with enumerate()."""
        following = (inst for inst in tx.instructions[tx.instruction_pointer :] if inst.opname != "NOP")
        if next(following).argval != FIRST or len(call.values) != 1:
            return None
        fn, items = call.fn.realize(), call.values[0].realize()
        is_enumerate = getattr(fn, "fn", None) is enumerate
        return Enumerate([items]) if is_enumerate and has_items(items) else None

    def on_graph_break(self, tx: InstructionTranslatorBase, error: Unsupported) -> None:
        """Raises exc.ReplacedCodeRestartAnalysis: the graph breaks in a loop, whose body can be a function."""
        super().on_graph_break(tx, error)
        is_branched_on = decides(flow_of(tx.f_code), tx.indexof[tx.current_instruction])
        if error.gb_type in READS and is_branched_on and (why := self.outline(tx)) is not None:
            refuse(tx, Code.LOOP_STAYS, why=why)
            add(place_of(tx), Reason.of(Code.LOOP_STAYS, why=why), is_repaired=False)

    def outline(self, tx: InstructionTranslatorBase) -> str | None:
        """Return why a loop around it stays, None if there is none. Raises if its body can be a function."""
        if tx is not tx.output.root_tx:
            return None
        position = tx.indexof[tx.current_instruction]
        found = with_function(tx.f_code, position)
        if isinstance(found, types.CodeType):
            if (name := changed_dictionary(tx, position)) is not None:
                return f"{name} is a dictionary that it changes"
            why = why_apart(tx.f_code)
            reason = Reason.of(Code.BODY_COMPILED) if why is None else Reason.of(Code.LAYER_COMPILED, why=why)
            add(place_of(tx), reason, is_repaired=True)
            raise exc.ReplacedCodeRestartAnalysis(found, restart_reason="a loop breaks the graph")
        return found


def with_function(code: types.CodeType, position: int) -> types.CodeType | str | None:
    """
    Return code that does the same, with a function for the body of the outermost loop around an instruction. If the
    loop stays as it is, return why; None if the instruction is not in a loop.
    """
    cache = code_context.get_context(code).setdefault("pygraph_loops", {})
    if position not in cache:
        cache[position] = rewritten(code, position)
    return cache[position]


def rewritten(code: types.CodeType, position: int) -> types.CodeType | str | None:
    flow = flow_of(code)
    loops = loops_around(flow, position)
    if not loops:
        return None
    try:
        return Outlining(flow, max(loops, key=lambda loop: len(loop.indices))).code()
    except StaysError as e:
        return str(e)


def decides(flow: Flow, position: int) -> bool:
    """Return whether the value that is read at an instruction is only branched on."""
    for inst in flow.instructions[position:]:
        if inst.opcode in JUMP_OPCODES:
            return is_branch(inst)
        if inst.opname.startswith(("STORE", "RETURN", "POP_TOP", "YIELD")):
            return False
    return False


def changed_dictionary(tx: InstructionTranslatorBase, position: int) -> str | None:
    """Return a dictionary to which a loop adds: Dynamo guards its keys, and each turn would be compiled."""
    flow, known = flow_of(tx.f_code), tx.symbolic_locals
    for i in OrderedSet(i for loop in loops_around(flow, position) for i in loop.indices):
        container = flow.instructions[i - 2]
        if flow.instructions[i].opname == "STORE_SUBSCR" and container.opname.startswith("LOAD_FAST"):
            value = known.get(container.argval)
            if value is not None and isinstance(value.realize(), variables.ConstDictVariable):
                return container.argval
    return None


def has_items(value: VariableTracker) -> bool:
    """Return whether iterating a value runs nothing of the program."""
    if isinstance(value, variables.UnspecializedNNModuleVariable):
        return type(value.value) is torch.nn.ModuleList
    return isinstance(value, (variables.BaseListVariable, variables.NNModuleVariable))


def jumps_back(tx: InstructionTranslatorBase) -> bool:
    """Return whether the current instruction is a branch with which the next turn of a loop begins."""
    flow, inst = flow_of(tx.f_code), tx.current_instruction
    position = tx.indexof[inst]
    return is_branch(inst) and any(s <= position for s in flow.successors[position])


def iterates_tensors(tx: InstructionTranslatorBase) -> bool:
    """Return whether the outermost loop around the current instruction is over tensors."""
    flow = flow_of(tx.f_code)
    loops = loops_around(flow, tx.indexof[tx.current_instruction])
    if not loops or not is_for(flow, loop := max(loops, key=lambda loop: len(loop.indices))):
        return False
    iterator = tx.stack[flow.depths[loop.header] - 1]
    return isinstance(iterator, ListIteratorVariable) and all(item.is_tensor() for item in iterator.items)
