"""
The control flow of a code object: where branches meet again, its loops, and its variables.

Instructions are those that Dynamo traces, and are named by their indices. What an exception jumps to is a handler, and
no successor: the target of an exception table's entry, or of SETUP_* up to Python 3.10.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import inspect
import operator
from typing import TYPE_CHECKING

from torch._dynamo.bytecode_analysis import HASLOCAL, JUMP_OPCODES, TERMINAL_OPCODES
from torch._dynamo.bytecode_transformation import cleaned_instructions
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    import types
    from collections.abc import Iterable

    from torch._dynamo.bytecode_transformation import Instruction


RETURNS = ("RETURN_VALUE", "RETURN_CONST")

# Instructions that need a variable's value, and those after which it has none.
READS = ("LOAD_FAST", "LOAD_FAST_CHECK", "DELETE_FAST")
UNBINDS = ("DELETE_FAST", "LOAD_FAST_AND_CLEAR")

# Instructions with which a comprehension gives variables back that it took
GIVES_BACK = ("SWAP", "POP_TOP", "STORE_FAST")


@dataclasses.dataclass
class Loop:
    """
    Attributes:
        header: through which the loop is entered; each turn but the first begins with a jump to it
        indices: of all instructions from which the next turn can follow
    """

    header: int
    indices: OrderedSet[int]


class Flow:
    def __init__(self, code: types.CodeType) -> None:
        self.code = code
        self.instructions = cleaned_instructions(code)
        self.cells = OrderedSet([*code.co_cellvars, *code.co_freevars])
        self.index = {inst: i for i, inst in enumerate(self.instructions)}
        self.successors = [self._successors(i) for i in range(len(self.instructions))]
        self.handlers = [self._handler(inst) for inst in self.instructions]

    def _successors(self, i: int) -> list[int]:
        inst = self.instructions[i]
        found = [] if inst.opcode in TERMINAL_OPCODES else [i + 1]
        if inst.opcode in JUMP_OPCODES and not is_setup(inst):
            found.append(self.index[inst.target])
        return found

    def _handler(self, inst: Instruction) -> int | None:
        if inst.exn_tab_entry is not None:
            return self.index[inst.exn_tab_entry.target]
        return self.index[inst.target] if is_setup(inst) else None

    @property
    def depths(self) -> dict[int, int]:
        return self._stack[0]

    @property
    def blocks(self) -> dict[int, int]:
        return self._stack[1]

    @functools.cached_property
    def _stack(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return the height of the stack and, up to Python 3.10, the number of blocks before each instruction."""
        depths: dict[int, int] = {}
        blocks: dict[int, int] = {}
        ahead = [(0, 0, 0)]
        while ahead:
            i, depth, number = ahead.pop()
            if i in depths:
                continue
            depths[i], blocks[i] = depth, number
            inst = self.instructions[i]
            number += is_setup(inst) - (inst.opname in ("POP_BLOCK", "POP_EXCEPT"))
            if inst.exn_tab_entry is not None:
                entry = inst.exn_tab_entry
                ahead.append((self.index[entry.target], entry.depth + entry.lasti + 1, number))
            elif is_setup(inst):
                ahead.append((self.index[inst.target], depth + effect(inst, jump=True), number))
            for s in self.successors[i]:
                jump = inst.opcode in JUMP_OPCODES and s == self.index[inst.target]
                ahead.append((s, depth + effect(inst, jump=jump), number))
        return depths, blocks

    @functools.cached_property
    def predecessors(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.instructions]
        for i, successors in enumerate(self.successors):
            if i in self.depths:
                for s in successors:
                    found[s].append(i)
                if (handler := self.handlers[i]) is not None:
                    found[handler].append(i)
        return found

    def meeting(self, start: int) -> int | None:
        """
        Return the first instruction that all paths from ``start`` reach, unless they raise: the number of instructions
        if it is the return, and None if all paths raise.
        """
        return self._meetings.get(start)

    @functools.cached_property
    def _meetings(self) -> dict[int, int]:
        import networkx

        end = len(self.instructions)
        backward = networkx.DiGraph()
        backward.add_node(end)
        for i, inst in enumerate(self.instructions):
            backward.add_edges_from((s, i) for s in ([end] if inst.opname in RETURNS else self.successors[i]))
        return networkx.immediate_dominators(backward, end)

    def reached(self, starts: Iterable[int], until: int | None = None) -> OrderedSet[int]:
        """Return the instructions of the paths from ``starts`` on, without handlers, up to ``until``."""
        found = OrderedSet[int]()
        ahead = [*starts]
        while ahead:
            i = ahead.pop()
            if i != until and i not in found:
                found.add(i)
                ahead += self.successors[i]
        return found

    def loops(self) -> list[Loop]:
        """Return the natural loops. Those with the same header are one."""
        sources: dict[int, list[int]] = {}
        for i in self.depths:
            for s in self.successors[i]:
                if s <= i:
                    sources.setdefault(s, []).append(i)
        loops = []
        for header, ends in sources.items():
            indices = OrderedSet([header])
            for end in ends:
                found = self._leading_to([end], OrderedSet([header]))
                # A handler lies behind what follows it, and jumps back without a loop.
                if header == 0 or 0 not in found:
                    indices |= found
            if len(indices) > 1:
                loops.append(Loop(header, indices))
        return loops

    def _leading_to(self, ends: Iterable[int], found: OrderedSet[int]) -> OrderedSet[int]:
        """Add the instructions from which these are reached, by way of none that is in ``found``."""
        ahead = [*ends]
        while ahead:
            i = ahead.pop()
            if i not in found:
                found.add(i)
                ahead.extend(self.predecessors[i])
        return found

    @functools.cached_property
    def returning(self) -> OrderedSet[int]:
        """The instructions that may lead to a return."""
        return self._leading_to((i for i in self.depths if self.instructions[i].opname in RETURNS), OrderedSet())

    def skip_jumps(self, i: int) -> int:
        """Return where an unconditional jump leads to."""
        seen = OrderedSet[int]()
        while i not in seen and (self.instructions[i].opname == "NOP" or is_jump(self.instructions[i])):
            seen.add(i)
            (i,) = self.successors[i]
        return i

    # Local variables, as sets of bits

    def local(self, i: int) -> int:
        """Return the variable, unless it is a cell, that the instruction reads or writes."""
        inst = self.instructions[i]
        return self.bit(inst.argval) if inst.opcode in HASLOCAL and inst.argval not in self.cells else 0

    def bit(self, name: str) -> int:
        return 1 << self.code.co_varnames.index(name)

    def names(self, bits: int) -> list[str]:
        return [name for i, name in enumerate(self.code.co_varnames) if bits >> i & 1]

    def reads(self, i: int) -> int:
        return self.local(i) if self.instructions[i].opname in READS else 0

    @functools.cached_property
    def arguments(self) -> int:
        flags = self.code.co_flags
        number = len(inspect.getargs(self.code).args)
        number += bool(flags & inspect.CO_VARARGS) + bool(flags & inspect.CO_VARKEYWORDS)
        return (1 << number) - 1

    def is_comprehension(self, i: int) -> bool:
        """Return whether an exception only restores variables: from Python 3.12 on, comprehensions have no frame."""
        following = () if (handler := self.handlers[i]) is None else self.instructions[handler:]
        opnames = (inst.opname for inst in following)
        return next((n for n in opnames if n not in GIVES_BACK), None) == "RERAISE"

    @functools.cached_property
    def restored(self) -> OrderedSet[int]:
        """The instructions with which a comprehension gives a variable back."""
        opnames = [inst.opname for inst in self.instructions]
        cleared = union(self.local(i) for i, opname in enumerate(opnames) if opname == "LOAD_FAST_AND_CLEAR")
        found = OrderedSet[int]()
        handlers, is_behind = OrderedSet(self.handlers), False
        for i, opname in enumerate(opnames):
            # Behind the comprehension, or in its handler
            is_behind = opname == "END_FOR" or i in handlers or (is_behind and opname in GIVES_BACK)
            if is_behind and opname == "STORE_FAST" and self.local(i) & cleared:
                found.add(i)
        return found

    @functools.cached_property
    def live(self) -> list[int]:
        """The variables that may be read after an instruction is reached, before they are written."""
        live = [0 for _ in self.instructions]
        changed = True
        while changed:
            changed = False
            for i in reversed(range(len(live))):
                found = union(live[s] for s in self.successors[i])
                if self.instructions[i].opname != "LOAD_FAST_AND_CLEAR" and i not in self.restored:
                    found = found & ~self.local(i) | self.reads(i)
                if (handler := self.handlers[i]) is not None:
                    found |= live[handler]
                changed |= found != live[i]
                live[i] = found
        return live

    @functools.cached_property
    def bound(self) -> dict[int, int]:
        """The variables that are bound for certain where an instruction is reached."""
        bound = {0: self.arguments}
        ahead = [0]

        def merge(i: int, names: int) -> None:
            merged = names & bound.get(i, names)
            if merged != bound.get(i):
                bound[i] = merged
                ahead.append(i)

        while ahead:
            i = ahead.pop()
            after = self.bound_after(i, bound[i])
            if (handler := self.handlers[i]) is not None:
                merge(handler, bound[i] & after)
            for s in self.successors[i]:
                merge(s, after)
        return bound

    def bound_after(self, i: int, before: int | None = None) -> int:
        before = self.bound[i] if before is None else before
        opname = self.instructions[i].opname
        if opname == "STORE_FAST":
            return before | self.local(i)
        return before & ~self.local(i) if opname in UNBINDS else before


@functools.lru_cache(maxsize=64)
def flow_of(code: types.CodeType) -> Flow:
    return Flow(code)


def union(sets: Iterable[int]) -> int:
    return functools.reduce(operator.or_, sets, 0)


def is_setup(inst: Instruction) -> bool:
    return inst.opname in ("SETUP_FINALLY", "SETUP_WITH", "SETUP_ASYNC_WITH")


def is_jump(inst: Instruction) -> bool:
    return inst.opcode in JUMP_OPCODES and inst.opcode in TERMINAL_OPCODES


def is_branch(inst: Instruction) -> bool:
    """Return whether the instruction pops a value, and jumps if it is true, or if it is false."""
    return inst.opname.startswith("POP_JUMP") and inst.opname.endswith(("IF_TRUE", "IF_FALSE"))


def effect(inst: Instruction, *, jump: bool) -> int:
    # Dynamo leaves out arguments that have no effect on the stack.
    arg = 0 if inst.arg is None and inst.opcode >= dis.HAVE_ARGUMENT else inst.arg
    return dis.stack_effect(inst.opcode, arg, jump=jump)
