"""
The code of a frame without a loop, and that of the loop's body (see loops.py).

A loop stays as it is

- in a try statement, whose handlers would not see what the body stores
- if a jump leaves it from within a try or with statement that begins in it
- if a variable may have no value where the body begins or ends, and may be read later
- if it stores variables of closures, or if the function looks at its frame
- if it adds to a list, for which Dynamo would compile each turn
"""

from __future__ import annotations

import copy
import dataclasses
import dis
import functools
import inspect
import operator
import sys
from typing import Any, TYPE_CHECKING

from torch._dynamo.bytecode_analysis import HASLOCAL, JUMP_OPCODES, remove_dead_code
from torch._dynamo.bytecode_transformation import (
    create_call_function,
    create_instruction,
    create_jump_absolute,
    create_swap,
    transform_code_object,
)
from torch._inductor.pygraph.dynamo.flow import is_branch, RETURNS, union
from torch._inductor.pygraph.dynamo.turns import NEXT, NOT_ENTERED
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    import types
    from collections.abc import Iterable

    from torch._dynamo.bytecode_transformation import Instruction
    from torch._inductor.pygraph.dynamo.flow import Flow, Loop


TURNS = "torch._inductor.pygraph.dynamo.turns"

# Functions that look at the variables of the frame that calls them.
FRAME_BUILTINS = frozenset(("dir", "eval", "exec", "locals", "vars"))
FRAME_ATTRIBUTES = frozenset(("_getframe", "currentframe"))

GENERATOR = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

STORES_CELL = ("STORE_DEREF", "DELETE_DEREF", "MAKE_CELL")

# Methods that add to a list or a dictionary: Dynamo guards its length and its keys, and each turn would be compiled.
GROWS = ("append", "appendleft", "extend", "insert", "setdefault")

# Instructions that leave a new container on the stack.
MAKES = ("BUILD_LIST", "BUILD_MAP", "LIST_EXTEND", "BUILD_CONST_KEY_MAP")

# Instructions that add to a container on the stack, and the number of values that they add.
ADDS = {"LIST_APPEND": 1, "SET_ADD": 1, "MAP_ADD": 2}

# Variables of the new code
ITEM, FIRST, CONDITION = "___item", "___first", "___condition"


class StaysError(Exception):
    """Raised with the reason why a loop stays as it is."""


def loops_around(flow: Flow, position: int) -> list[Loop]:
    return [loop for loop in flow.loops() if position in loop.indices or entering_jump(flow, loop) == position]


def entering_jump(flow: Flow, loop: Loop) -> int | None:
    """Return the branch in front of a while loop that decides whether it is entered, if it is the only way in."""
    before = loop.header - 1
    outside = [i for i in flow.predecessors[loop.header] if i not in loop.indices]
    if outside == [before] and is_branch(flow.instructions[before]) and not is_for(flow, loop):
        return before
    return None


def is_for(flow: Flow, loop: Loop) -> bool:
    return flow.instructions[loop.header].opname == "FOR_ITER"


@dataclasses.dataclass
class Exit:
    """
    Attributes:
        target: the instruction that follows the loop
        stored: the variables that the loop stores and that may be read from there on
        height: of the stack at the target, above that of the loop
    """

    target: int
    stored: int
    height: int


class Outlining:
    """
    Makes the code without the loop, and that of its body. Variables are bits, see flow.py.

    Attributes:
        first: the instruction with which the body begins
        inside: the instructions of the body
        ends: the exit for each pair of an instruction and its successor at which a turn ends
        branches: the instructions of ``inside`` with which a turn ends, whatever the value
        state, others: the variables of the body that the loop stores, and others that it reads
    """

    def __init__(self, flow: Flow, loop: Loop) -> None:
        self.flow = flow
        self.header = loop.header
        self.is_for = is_for(flow, loop)
        self.first = loop.header + self.is_for
        self.handler = flow.handlers[loop.header]
        turn = OrderedSet(i for i in loop.indices if i >= 0 and (i != loop.header or not self.is_for))
        self.inside = turn | self._raising(turn)
        self.branch_in = entering_jump(flow, loop)
        self.outside = [i for i in flow.predecessors[loop.header] if i not in loop.indices]
        self._check_code()
        self.branches = OrderedSet(i for i in turn if self._ends_a_turn(i))
        self.targets = self._targets()
        self._set_variables()

    def _raising(self, turn: OrderedSet[int]) -> OrderedSet[int]:
        """Return the instructions that a turn reaches and from which the code only raises, as the ends of handlers."""
        flow = self.flow
        known = flow.returning | turn | OrderedSet([self.header])
        found = OrderedSet[int]()
        ahead = [*turn]
        while ahead:
            i = ahead.pop()
            handler = flow.handlers[i]
            following = flow.successors[i] if handler in (None, self.handler) else [*flow.successors[i], handler]
            new = [s for s in following if s not in known and not self._pops_iterator(s)]
            known.update(new)
            found.update(new)
            ahead += new
        return found

    def _pops_iterator(self, i: int) -> bool:
        """Return whether an instruction takes what the frame has on its stack around the loop, as ``break`` does."""
        depths = self.flow.depths
        return any(depths[s] < depths[self.header] for s in self.flow.successors[i])

    def _check_code(self) -> None:
        flow = self.flow
        code = flow.code
        if code.co_flags & GENERATOR:
            raise StaysError("the function is a generator")
        for inst in flow.instructions:
            if inst.argval in FRAME_BUILTINS and inst.opname == "LOAD_GLOBAL" or inst.argval in FRAME_ATTRIBUTES:
                raise StaysError(f"the function uses {inst.argval}")
        for i in self.inside:
            inst = flow.instructions[i]
            if inst.opname in STORES_CELL:
                raise StaysError(f"{inst.argval} is a variable of a closure")
            if inst.opname.startswith("RETURN"):
                raise StaysError("a handler leaves it")
            if inst.opname in ADDS and flow.depths[i] - ADDS[inst.opname] - inst.arg < flow.depths[self.header]:
                raise StaysError("it is a comprehension")
            grows = inst.opname in ("LOAD_ATTR", "LOAD_METHOD") and inst.argval in GROWS
            if grows and not self._is_made_in_turn(i - 1):
                raise StaysError(f"it calls {inst.argval}, after which each turn would be compiled")

    def _is_made_in_turn(self, i: int) -> bool:
        """Return whether an instruction loads a variable that holds a container made in the same turn."""
        flow = self.flow
        if flow.instructions[i].opname != "LOAD_FAST" or flow.local(i) & flow.live[self.header]:
            return False
        stores = [j for j in self.inside if flow.instructions[j].opname == "STORE_FAST" and flow.local(j) == flow.local(i)]
        return all(flow.instructions[j - 1].opname in MAKES for j in stores)

    # How a turn can end

    def _is_end(self, i: int) -> bool:
        return i == self.header or i not in self.inside

    def _ends_a_turn(self, i: int) -> bool:
        """Return whether a turn ends with a branch, whatever the value."""
        flow = self.flow
        return is_branch(flow.instructions[i]) and all(self._is_end(flow.skip_jumps(s)) for s in flow.successors[i])

    def ends(self, i: int) -> list[int]:
        """Return the instructions outside, or the header, that follow an instruction of the body."""
        successors = self.flow.successors[i]
        if i in self.branches:
            return [self.flow.skip_jumps(s) for s in successors]
        return [s for s in successors if self._is_end(s)]

    def _targets(self) -> dict[int, int]:
        """Return the numbers of the exits by the instructions that follow the loop."""
        flow, header = self.flow, self.header
        targets = {header: NEXT}
        for i in self.inside:
            for s in self.ends(i):
                if flow.blocks[s] != flow.blocks[header] or flow.depths[s] != flow.depths[header]:
                    raise StaysError("a jump leaves it from within a statement")
                is_covered = flow.handlers[i] in (None, self.handler)
                if s != header and not is_covered:
                    raise StaysError("a jump leaves it from within a try statement")
                targets.setdefault(s, len(targets))
        return targets

    # Variables

    def _set_variables(self) -> None:
        flow = self.flow
        inside = [(flow.instructions[i].opname, flow.local(i)) for i in self.inside]
        stored = union(bit for opname, bit in inside if opname in ("STORE_FAST", "DELETE_FAST"))
        read = union(flow.reads(i) for i in self.inside)
        self.state = stored & union(flow.live[target] for target in self.targets)
        self.others = read & ~stored & flow.live[self.first]
        self.entering = self.state & flow.live[self.first]
        bound = functools.reduce(operator.and_, map(flow.bound_after, self.outside), -1)
        if self.header == 0:
            bound &= flow.arguments
        if (missing := (self.entering | self.others) & ~bound) != 0:
            raise StaysError(f"{', '.join(flow.names(missing))} may have no value before it")
        for i in self.inside:
            live = union(flow.live[s] for s in self.ends(i))
            if (missing := self.state & live & ~flow.bound_after(i)) != 0:
                raise StaysError(f"{', '.join(flow.names(missing))} may have no value in it")
        cleared = union(bit for opname, bit in inside if opname == "LOAD_FAST_AND_CLEAR")
        if cleared & (self.state | self.others) != 0:
            raise StaysError("a variable is that of a comprehension")
        names = (self.flow.instructions[i].argval for i in self.inside if i_has_name(self.flow.instructions[i]))
        self.cells = sorted(OrderedSet(name for name in names if name in flow.cells))

    # The body

    def body(self) -> types.CodeType:
        body, _ = transform_code_object(self.flow.code, self._make_body)
        return body

    def _make_body(self, instructions: list[Instruction], options: dict[str, Any]) -> None:
        flow = self.flow
        ends: list[Instruction] = []
        following: dict[int, Instruction] = {}
        for i in self.inside:
            inst = instructions[i]
            self._move_entry(i, inst)
            if i in self.branches:
                end = self._end_of_branch(i)
                if instructions[i - 1].opname == "TO_BOOL":
                    make_nop(instructions[i - 1])
                make_nop(inst)
                following[i] = create_jump_absolute(end[0])
                ends += end
                continue
            for s in self.ends(i):
                end = self._end(i, s)
                ends += end
                if inst.opcode in JUMP_OPCODES and flow.index[flow.instructions[i].target] == s:
                    inst.target = end[0]
                else:
                    following[i] = create_jump_absolute(end[0])
        prefix = []
        if sys.version_info >= (3, 11):
            if self.cells:
                prefix.append(create_instruction("COPY_FREE_VARS", arg=len(self.cells)))
            prefix.append(create_instruction("RESUME", arg=0))
        if self.is_for:
            prefix.append(create_instruction("LOAD_FAST", argval=ITEM))
        prefix.append(create_jump_absolute(instructions[self.first]))
        for inst in (*prefix, *following.values()):
            inst.copy_positions(instructions[self.header])
        new = [*prefix]
        for i, inst in enumerate(instructions):
            new.append(inst)
            if i in following:
                new.append(following[i])
        instructions[:] = remove_dead_code([*new, *ends])
        self._set_options(options)

    def _move_entry(self, i: int, inst: Instruction) -> None:
        """Adapt the exception table to a stack without what the frame has on it."""
        if inst.exn_tab_entry is not None:
            if self.flow.handlers[i] in self.inside:
                inst.exn_tab_entry.depth -= self.flow.depths[self.first] - self.is_for
            else:
                inst.exn_tab_entry = None

    def _end(self, i: int, target: int) -> list[Instruction]:
        number = self.targets[target]
        return self._return(i, create_instruction("LOAD_CONST", argval=True), number, number, self.flow.live[target])

    def _end_of_branch(self, i: int) -> list[Instruction]:
        following, target = map(self.targets.__getitem__, self.ends(i))
        live = union(self.flow.live[s] for s in self.ends(i))
        if "IF_FALSE" in self.flow.instructions[i].opname:
            following, target = target, following
        load = create_instruction("LOAD_FAST", argval=CONDITION)
        store = create_instruction("STORE_FAST", argval=CONDITION)
        store.copy_positions(self.flow.instructions[i])
        return [store, *self._return(i, load, target, following, live)]

    def _return(self, i: int, condition: Instruction, if_true: int, if_false: int, live: int) -> list[Instruction]:
        values = [load_if(name, bool(live & self.flow.bit(name))) for name in self.flow.names(self.state)]
        numbers = [create_instruction("LOAD_CONST", argval=number) for number in (if_true, if_false)]
        new = [condition, *numbers, *values]
        new += [create_instruction("BUILD_TUPLE", arg=len(new)), create_instruction("RETURN_VALUE")]
        for inst in new:
            inst.copy_positions(self.flow.instructions[i])
        return new

    def _set_options(self, options: dict[str, Any]) -> None:
        flow = self.flow
        arguments = [ITEM] * self.is_for + flow.names(self.state) + flow.names(self.others)
        inside = union(flow.local(i) for i in self.inside)
        options.update(
            co_argcount=len(arguments),
            co_posonlyargcount=0,
            co_kwonlyargcount=0,
            co_varnames=tuple(OrderedSet([*arguments, *flow.names(inside), CONDITION])),
            co_cellvars=(),
            co_freevars=tuple(self.cells),
            co_flags=options["co_flags"] & ~(inspect.CO_VARARGS | inspect.CO_VARKEYWORDS),
        )

    # The frame

    def code(self) -> types.CodeType:
        body = self.body()
        code, _ = transform_code_object(self.flow.code, functools.partial(self._make_frame, body))
        return code

    def _make_frame(self, body: types.CodeType, instructions: list[Instruction], options: dict[str, Any]) -> None:
        header = instructions[self.header]
        has_first = self.is_for
        if self.is_for:
            function = "for_each"
            if self.outside == [self.header - 1] and instructions[self.header - 1].opname == "GET_ITER":
                make_nop(instructions[self.header - 1])
        elif self.branch_in is not None:
            has_first = True
            jump = instructions[self.branch_in]
            header.copy_positions(jump)
            function = "while_true" if "IF_FALSE" in jump.opname else "while_false"
            if instructions[self.branch_in - 1].opname == "TO_BOOL":
                make_nop(instructions[self.branch_in - 1])
            make_nop(jump)
        else:
            function = "repeat"
        exits = self._exits()
        call = [*self._call(function, has_first, body, [*exits][:-1])]
        new = call + self._leave([*exits.values()], instructions)
        entry = header.exn_tab_entry
        for inst in new:
            inst.copy_positions(header)
            inst.exn_tab_entry = copy.copy(entry)
        make_nop(header)
        instructions[self.header + 1 : self.header + 1] = new
        instructions[:] = remove_dead_code(instructions)
        options["co_varnames"] = tuple(OrderedSet([*options["co_varnames"], FIRST]))

    def _exits(self) -> dict[int, Exit]:
        flow = self.flow
        base = flow.depths[self.header] - self.is_for
        jump = self.header if self.is_for else self.branch_in
        found = {}
        for target, number in self.targets.items():
            if number != NEXT:
                found[number] = Exit(target, self.state & flow.live[target], flow.depths[target] - base)
        if jump is not None:
            target = flow.index[flow.instructions[jump].target]
            height = flow.depths[target] - base
            found[NOT_ENTERED] = Exit(target, 0, height)
            if self.is_for:
                found[NEXT] = Exit(target, self.state & flow.live[target], height)
        if not found:
            raise StaysError("it has no exit")
        if [*found] == [number := next(iter(found)), NOT_ENTERED] and self._is_one(found[number], found[NOT_ENTERED]):
            del found[NOT_ENTERED]
        return found

    def _is_one(self, left: Exit, not_entered: Exit) -> bool:
        """Return whether the code behind a while loop is the same after no turn and after some turns."""
        flow, a, b = self.flow, left.target, not_entered.target
        if left.stored & ~self.entering or left.height != not_entered.height:
            return False
        # Python copies a short end of a function.
        while (a := flow.skip_jumps(a)) != (b := flow.skip_jumps(b)):
            one, other = flow.instructions[a], flow.instructions[b]
            if (one.opname, one.argval) != (other.opname, other.argval) or one.opcode in JUMP_OPCODES:
                return False
            if one.opname in RETURNS:
                return True
            a, b = a + 1, b + 1
        return True

    def _call(self, function: str, has_first: bool, body: types.CodeType, numbers: list[int]) -> Iterable[Instruction]:
        flow = self.flow
        if has_first:
            yield create_instruction("STORE_FAST", argval=FIRST)
        yield create_instruction("LOAD_CONST", argval=0)
        yield create_instruction("LOAD_CONST", argval=(function,))
        yield create_instruction("IMPORT_NAME", argval=TURNS)
        yield create_instruction("IMPORT_FROM", argval=function)
        yield from create_swap(2)
        yield create_instruction("POP_TOP")
        yield from self._load_function(body)
        if has_first:
            yield create_instruction("LOAD_FAST", argval=FIRST)
            yield create_instruction("DELETE_FAST", argval=FIRST)
        for name in flow.names(self.state):
            yield load_if(name, bool(self.entering & flow.bit(name)))
        yield create_instruction("BUILD_TUPLE", arg=len(flow.names(self.state)))
        for name in flow.names(self.others):
            yield create_instruction("LOAD_FAST", argval=name)
        yield create_instruction("BUILD_TUPLE", arg=len(flow.names(self.others)))
        yield create_instruction("LOAD_CONST", argval=tuple(numbers))
        yield from create_call_function(4 + has_first, True)

    def _load_function(self, body: types.CodeType) -> Iterable[Instruction]:
        flag = 0
        if self.cells:
            flag = 8
            for name in self.cells:
                opname = "LOAD_FAST" if sys.version_info >= (3, 13) else "LOAD_CLOSURE"
                yield create_instruction(opname, argval=name)
            yield create_instruction("BUILD_TUPLE", arg=len(self.cells))
        yield create_instruction("LOAD_CONST", argval=body)
        if sys.version_info < (3, 11):
            yield create_instruction("LOAD_CONST", argval=body.co_name)
        if sys.version_info < (3, 13):
            yield create_instruction("MAKE_FUNCTION", arg=flag)
            return
        yield create_instruction("MAKE_FUNCTION")
        if flag:
            yield create_instruction("SET_FUNCTION_ATTRIBUTE", arg=flag)

    def _leave(self, exits: list[Exit], instructions: list[Instruction]) -> list[Instruction]:
        """Return bytecode that jumps to the exit that was taken. All but the last exit have a flag on the stack."""
        paths = []
        for i, leaving in enumerate(exits):
            flags = max(len(exits) - 2 - i, 0)
            path = [create_instruction("POP_TOP") for _ in range(flags)]
            path += self._store(leaving)
            # Iterators that the target pops
            path += [create_instruction("LOAD_CONST", argval=None) for _ in range(leaving.height)]
            path.append(create_jump_absolute(instructions[leaving.target]))
            paths.append(path)
        opname = "POP_JUMP_FORWARD_IF_TRUE" if sys.version_info[:2] == (3, 11) else "POP_JUMP_IF_TRUE"
        jumps = [create_instruction(opname, target=path[0]) for path in paths[:-1]]
        last, *others = reversed(paths)
        return [create_instruction("UNPACK_SEQUENCE", arg=len(exits)), *jumps, *last, *sum(others, [])]

    def _store(self, leaving: Exit) -> Iterable[Instruction]:
        flow = self.flow
        if not leaving.stored:
            yield create_instruction("POP_TOP")
            return
        names = flow.names(self.state)
        yield create_instruction("UNPACK_SEQUENCE", arg=len(names))
        for name in names:
            if leaving.stored & flow.bit(name):
                yield create_instruction("STORE_FAST", argval=name)
            else:
                yield create_instruction("POP_TOP")


def i_has_name(inst: Instruction) -> bool:
    return inst.opcode in HASLOCAL or inst.opcode in dis.hasfree


def load_if(name: str, is_live: bool) -> Instruction:
    if is_live:
        return create_instruction("LOAD_FAST", argval=name)
    return create_instruction("LOAD_CONST", argval=None)


def make_nop(inst: Instruction) -> None:
    inst.opname, inst.opcode = "NOP", dis.opmap["NOP"]
    inst.arg = inst.target = None
    inst.argval = None
