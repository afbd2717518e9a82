"""Where the paths of a branch join, and which variables are read from there."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from torch._dynamo.bytecode_analysis import HASLOCAL, JUMP_OPCODES, TERMINAL_OPCODES
from torch._inductor.pygraph.dynamo.raising import handler_of, names_of
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._dynamo.bytecode_transformation import Instruction
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase


RETURNS = ("RETURN_VALUE", "RETURN_CONST")

# A path with one of these breaks the graph: it changes what is not in variables, leaves its block, or only raises.
LEAVES = (
    ("ASYNC", "BEFORE", "DELETE", "END_ASYNC", "GET_A", "IMPORT", "LOAD_ASSERTION", "LOAD_BUILD_CLASS", "LOAD_CLOSURE")
    + ("MAKE_CELL", "POP_BLOCK", "POP_EXCEPT", "PUSH_EXC", "RAISE", "RERAISE", "RETURN_GENERATOR", "SEND", "SETUP")
    + ("STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL", "STORE_NAME", "STORE_SLICE", "WITH", "YIELD")
)


class RefusedError(Exception):
    """The paths of a branch cannot be joined."""


@dataclasses.dataclass
class Fork:
    """
    Attributes:
        join: the index of the first instruction behind both paths; None if both return
        region: indices of the paths' instructions
        live: variables that may be read from the join on
    """

    join: int | None
    region: OrderedSet[int]
    live: OrderedSet[str]


def fork_at(tx: InstructionTranslatorBase, inst: Instruction) -> Fork:
    """
    Return how the paths of a conditional jump run.

    Raises:
        RefusedError: they cannot be joined.
    """
    instructions, index = tx.instructions, tx.indexof
    jump = index[inst]
    end = len(instructions)
    after = [successors(instructions, index, i) for i in range(end)]
    join = immediate_postdominator(after, jump)
    if join is None:
        raise RefusedError("the paths do not meet")
    region = reached(after, after[jump], join)
    handler = handler_of(inst)
    for i in region:
        path = instructions[i]
        if i == jump:
            raise RefusedError("a path leads to the next turn of a loop")
        is_return = join != end and path.opname in RETURNS
        if is_return or path.opname.startswith(LEAVES) or handler_of(path) is not handler:
            raise RefusedError(f"a path has {path.opname}")
    if join == end:
        return Fork(None, region, OrderedSet())
    return Fork(join, region, live_at(instructions, index, after, join))


def successors(instructions: Sequence[Instruction], index: dict[Instruction, int], i: int) -> list[int]:
    """Return what may run next; the end of the code if the instruction returns, and nothing if it raises."""
    inst = instructions[i]
    if inst.opname in RETURNS:
        return [len(instructions)]
    found = [] if inst.opcode in TERMINAL_OPCODES else [i + 1]
    if inst.opcode in JUMP_OPCODES:
        found.append(index[inst.target])
    return found


def immediate_postdominator(after: list[list[int]], start: int) -> int | None:
    """Return the first instruction, or the end, that all paths from ``start`` reach, unless they raise."""
    end = len(after)
    everything = (1 << (end + 1)) - 1
    # Bit sets of what each instruction's paths all reach
    common = [everything] * end + [1 << end]
    changed = True
    while changed:
        changed = False
        for i in range(end - 1, -1, -1):
            new = everything
            for j in after[i]:
                new &= common[j]
            new |= 1 << i
            if new != common[i]:
                common[i], changed = new, True
    behind = common[start] & ~(1 << start)
    if common[start] == everything:
        return None
    return next((j for j in range(end + 1) if behind >> j & 1 and common[j] & behind == behind), None)


def reached(after: list[list[int]], starts: Sequence[int], join: int) -> OrderedSet[int]:
    found: OrderedSet[int] = OrderedSet()
    work = list(starts)
    while work:
        i = work.pop()
        if i != join and i < len(after) and i not in found:
            found.add(i)
            work += after[i]
    return found


def live_at(
    instructions: Sequence[Instruction], index: dict[Instruction, int], after: list[list[int]], start: int
) -> OrderedSet[str]:
    """Return the variables that may be read before they are written."""
    live: list[OrderedSet[str]] = [OrderedSet() for _ in range(len(instructions) + 1)]
    changed = True
    while changed:
        changed = False
        for i in range(len(instructions) - 1, -1, -1):
            inst = instructions[i]
            new: OrderedSet[str] = OrderedSet(n for j in after[i] for n in live[j])
            if inst.opcode in HASLOCAL:
                names = names_of(inst)
                if inst.opname.startswith("STORE_") and "LOAD" not in inst.opname:
                    new -= OrderedSet(names)
                else:
                    new |= OrderedSet(names)
            if (handler := handler_of(inst)) is not None:
                new |= live[index[handler]]
            if len(new) != len(live[i]):
                live[i], changed = new, True
    return live[start]
