"""
The code of a path that only raises, as a function of the variables that it reads.

Dynamo does not trace such a path. The function is called behind the graph, and is the program's own code: what it
reads from objects and globals, and what it raises, is that of eager mode.
"""

from __future__ import annotations

import dataclasses
import dis
import inspect
import sys
import types
from typing import Any, TYPE_CHECKING

from torch._dynamo.bytecode_analysis import HASLOCAL, JUMP_OPCODES, TERMINAL_OPCODES
from torch._dynamo.bytecode_transformation import create_instruction, transform_code_object
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._dynamo.bytecode_transformation import Instruction
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase


# Instructions at which a path ends without an exception, or that depend on the frame's state.
LEAVES = ("RETURN_VALUE", "RETURN_CONST", "YIELD_VALUE", "RERAISE", "SETUP_FINALLY", "SETUP_WITH", "BEFORE_WITH")
GENERATOR = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


@dataclasses.dataclass
class RaisingPath:
    """
    Attributes:
        indices: of its instructions in the code, in their order
        variables, cells: names that it may read before it writes them
    """

    indices: list[int]
    instructions: Sequence[Instruction]
    variables: OrderedSet[str]
    cells: OrderedSet[str]

    def make_function(self, tx: InstructionTranslatorBase, names: Sequence[str]) -> types.FunctionType:
        """Return the function of the variables ``names``."""

        def keep(instructions: list[Instruction], options: dict[str, Any]) -> None:
            kept = [instructions[i] for i in self.indices]
            for inst in kept:
                inst.exn_tab_entry = None
                if inst.opcode in dis.hasfree:
                    inst.opname, inst.opcode, inst.arg = "LOAD_FAST", dis.opmap["LOAD_FAST"], None
            prefix = [create_instruction("RESUME", arg=0)] if sys.version_info >= (3, 11) else []
            instructions[:] = prefix + kept
            local = (*options["co_varnames"], *self.cells)
            options.update(
                co_argcount=len(names),
                co_posonlyargcount=0,
                co_kwonlyargcount=0,
                co_varnames=(*names, *(name for name in OrderedSet(local) if name not in names)),
                co_cellvars=(),
                co_freevars=(),
                co_flags=options["co_flags"] & ~(inspect.CO_VARARGS | inspect.CO_VARKEYWORDS),
            )

        code, _ = transform_code_object(tx.f_code, keep)
        return types.FunctionType(code, tx.f_globals, code.co_name)


def raising_path(tx: InstructionTranslatorBase, start: Instruction) -> RaisingPath | None:
    """Return the path from ``start`` if it only raises, or None."""
    instructions, index = tx.instructions, tx.indexof
    handler = handler_of(tx.current_instruction)
    if tx.f_code.co_flags & GENERATOR:
        return None
    first = index[start]
    reached = OrderedSet[int]()
    ahead = [first]
    while ahead:
        i = ahead.pop()
        if i in reached:
            continue
        inst = instructions[i]
        if (
            i < first
            or inst.opname in LEAVES
            or not (handler_of(inst) is handler or is_comprehension(inst, instructions, index))
            or inst.opcode in dis.hasfree
            and inst.opname != "LOAD_DEREF"
        ):
            return None
        reached.add(i)
        if inst.opcode in JUMP_OPCODES:
            ahead.append(index[inst.target])
        if inst.opcode not in TERMINAL_OPCODES:
            ahead.append(i + 1)
    indices = sorted(reached)
    path = [instructions[i] for i in indices]
    if not any(inst.opname == "RAISE_VARARGS" for inst in path):
        return None
    loads = [inst for inst in path if inst.opname.startswith("LOAD_")]
    variables = OrderedSet(n for inst in loads if inst.opcode in HASLOCAL for n in names_of(inst))
    cells = OrderedSet(inst.argval for inst in loads if inst.opcode in dis.hasfree)
    return RaisingPath(indices, path, variables, cells)


def is_number(instructions: Sequence[Instruction], name: str) -> bool:
    """Return whether a variable is only used as a number: formatted, or as item()."""
    return all(
        is_formatted(instructions[i + 1 :])
        for i, inst in enumerate(instructions)
        if inst.opname.startswith("LOAD_") and name in names_of(inst)
    )


def is_comprehension(inst: Instruction, instructions: Sequence[Instruction], index: dict[Instruction, int]) -> bool:
    """Return whether an exception at ``inst`` only restores variables: from Python 3.12 on, comprehensions do."""
    if (handler := handler_of(inst)) is None:
        return False
    for each in instructions[index[handler] :]:
        if each.opname not in ("SWAP", "POP_TOP", "STORE_FAST"):
            return each.opname == "RERAISE"
    return False


def handler_of(inst: Instruction) -> Instruction | None:
    return inst.exn_tab_entry and inst.exn_tab_entry.target


def names_of(inst: Instruction) -> tuple[str, ...]:
    return inst.argval if isinstance(inst.argval, tuple) else (inst.argval,)


def is_formatted(following: Sequence[Instruction]) -> bool:
    inst, *rest = following
    if inst.opname in ("LOAD_METHOD", "LOAD_ATTR"):
        return inst.argval == "item"
    if inst.opname == "LOAD_CONST" and rest:
        # How to format it
        inst = rest[0]
    if inst.opname == "FORMAT_VALUE":
        # The lowest bits convert the value to its text first.
        return not inst.arg & 3
    return inst.opname in ("FORMAT_SIMPLE", "FORMAT_WITH_SPEC")
