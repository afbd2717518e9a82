"""
The code of a path that only raises, as a function of the variables that it reads. Dynamo does not trace such a path.
The function, which is the program's own code, is called behind the graph.
"""

from __future__ import annotations

import dataclasses
import dis
import inspect
import sys
import types
from typing import Any, TYPE_CHECKING

from torch._dynamo.bytecode_analysis import HASLOCAL
from torch._dynamo.bytecode_transformation import create_instruction, transform_code_object
from torch._inductor.pygraph.dynamo.flow import flow_of
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch._dynamo.bytecode_transformation import Instruction
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase


# Instructions at which a path ends without an exception, or that depend on the frame's state.
LEAVES = ("RETURN_VALUE", "RETURN_CONST", "YIELD_VALUE", "RERAISE", "SETUP_FINALLY", "SETUP_WITH", "BEFORE_WITH")
# Attributes of a tensor that its history does not change.
METADATA = ("device", "dim", "dtype", "ndim", "numel", "shape", "size")
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
    flow = flow_of(tx.f_code)
    first = tx.indexof[start]
    handler = flow.handlers[tx.indexof[tx.current_instruction]]
    indices = sorted(flow.reached([first]))
    path = [flow.instructions[i] for i in indices]
    # Behind a chained comparison, the path begins by removing an operand from the frame's stack. The function's stack has none.
    left = next(k for k, inst in enumerate(path) if inst.opname != "POP_TOP")
    least = flow.depths[first] - left
    if (
        tx.f_code.co_flags & GENERATOR
        or indices[0] < first
        or any(inst.opname in LEAVES for inst in path)
        or any(inst.opcode in dis.hasfree and inst.opname != "LOAD_DEREF" for inst in path)
        or not all(flow.handlers[i] == handler or flow.is_comprehension(i) for i in indices)
        or not any(inst.opname == "RAISE_VARARGS" for inst in path)
        or any(flow.depths[s] < least for i in indices[left:] for s in flow.successors[i])
    ):
        return None
    indices, path = indices[left:], path[left:]
    # DELETE_FAST raises if there is no value.
    loads = [inst for inst in path if inst.opname.startswith(("LOAD_", "DELETE_"))]
    variables = OrderedSet(inst.argval for inst in loads if inst.opcode in HASLOCAL)
    cells = OrderedSet(inst.argval for inst in loads if inst.opcode in dis.hasfree)
    return RaisingPath(indices, path, variables, cells)


def uses_of(instructions: Sequence[Instruction], name: str) -> Iterator[Sequence[Instruction]]:
    """Yield the instructions that follow each load of a variable."""
    for i, inst in enumerate(instructions):
        if inst.opname.startswith("LOAD_") and inst.argval == name:
            yield instructions[i + 1 :]


def reads_metadata(instructions: Sequence[Instruction], name: str) -> bool:
    """Return whether only METADATA is read of a variable, which is a tensor."""
    uses = uses_of(instructions, name)
    return all(use[0].opname in ("LOAD_METHOD", "LOAD_ATTR") and use[0].argval in METADATA for use in uses)


def is_number(instructions: Sequence[Instruction], name: str) -> bool:
    """Return whether a variable is only used as a number: formatted, or as item()."""
    return all(map(is_formatted, uses_of(instructions, name)))


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
