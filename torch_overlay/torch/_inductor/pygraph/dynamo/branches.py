"""
Branches on tensors that do not break the graph.

- Sizes and constants decide (ranges.py): Dynamo traces the path that is taken, and guards on the sizes.
- Values decide that the host knows before the graph runs (hosts.py): the same, with a guard on the outcome.
- Both paths run, and torch.where selects (paths.py, joins.py; drops.py for layers that random numbers drop).
- torch.cond runs one of two graphs (paths.py, conds.py).
- Otherwise the graph breaks.

The graph runs behind the try statements that were traced. A branch in one therefore breaks the graph, unless nothing in
the graph raises for the values of its tensors.

The bool of a tensor, as of ``not x``, ``bool(x)`` or ``x.item()``, stays in the graph until something reads it. So does
a number that is only compared with a constant and branched on, as in ``if x.item() > 0`` or ``if int(n) == 3``.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo import variables
from torch._dynamo.bytecode_transformation import create_instruction
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.misc import GetAttrVariable
from torch._inductor.pygraph.dynamo.breaks import Breaks, broken, frames_of, is_broken, refuse, restart
from torch._inductor.pygraph.dynamo.conds import CondJoiner
from torch._inductor.pygraph.dynamo.drops import DropJoiner, Drops
from torch._inductor.pygraph.dynamo.effects import has_generator, is_handled, last_node, may_raise, nodes_after
from torch._inductor.pygraph.dynamo.flow import flow_of, is_branch
from torch._inductor.pygraph.dynamo.joins import Chosen, IDENTITY, Join, join, Joiner, settle, told_apart
from torch._inductor.pygraph.dynamo.operators import name_of, storage_of
from torch._inductor.pygraph.dynamo.outlining import CONDITION, loops_around
from torch._inductor.pygraph.dynamo.paths import fork_at, Returned, trace, Truth
from torch._inductor.pygraph.dynamo.raising import raising_path
from torch._inductor.pygraph.dynamo.ranges import outcome_of
from torch._inductor.pygraph.dynamo.stores import Choice, is_stored_again, make_store, RefusedError, store, Stores
from torch._inductor.pygraph.types.reason import Code, Reason
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    import types
    from collections.abc import Sequence

    from torch._dynamo.bytecode_transformation import Instruction
    from torch._dynamo.codegen import PyCodegen
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._inductor.pygraph.dynamo.breaks import Call
    from torch._inductor.pygraph.dynamo.paths import Fork, Path
    from torch._inductor.pygraph.dynamo.stores import Slot


# Instructions that read their last two or three operands: Dynamo would compare a bool of a tensor by its variable, or
# could not resume from there.
BINARY = ("BINARY", "BUILD_CONST_KEY_MAP", "COMPARE", "CONTAINS", "DELETE_SUBSCR", "INPLACE", "IS_OP", "SET_ADD")
MAPS = ("BUILD_MAP", "BUILD_SET", "BUILD_SLICE", "MAP_ADD", "STORE_SLICE", "STORE_SUBSCR")
INDEXING = ("BINARY_SLICE", "BINARY_SUBSCR", "BUILD_SLICE", "DELETE_SUBSCR", "STORE_SLICE", "STORE_SUBSCR")
UNARY = ("FORMAT", "GET_ITER", "LOAD_ATTR", "LOAD_METHOD", "UNARY_INVERT", "UNARY_NEGATIVE", "UNARY_POSITIVE")

# Operands that are looked up, or are put into a set or into the keys of a dictionary
KEYS = {
    "BUILD_MAP": lambda stack, inst: stack[len(stack) - 2 * inst.arg :: 2],
    "BUILD_SET": lambda stack, inst: stack[len(stack) - inst.arg :],
    "CONTAINS_OP": lambda stack, inst: stack[-2:-1],
    "MAP_ADD": lambda stack, inst: stack[-2:-1],
    "SET_ADD": lambda stack, inst: stack[-1:],
}
KEYS |= dict.fromkeys(
    ("BINARY_SUBSCR", "DELETE_SUBSCR", "STORE_SUBSCR"),
    lambda stack, inst: [] if stack[-2].is_tensor() else stack[-1:],
)
IDENTIFYING = (getattr, hasattr, hash, id, operator.contains, operator.is_, operator.is_not, set, frozenset, setattr)

# A chain of early returns is nested, too. Each of torch.cond compiles those in it again.
MAX_NESTED = 16

# Types of which float64 and int64 have all values
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Branches(Drops, Breaks):
    def __init__(self) -> None:
        super().__init__()
        # The joins of tensors that existed before a branch
        self.joins: list[Join] = []
        # The code and the instruction of each branch that became torch.cond
        self.conds: list[tuple[Any, int]] = []
        # The code and the instruction where each bool of a tensor was made
        self.truths: OrderedSet[tuple[Any, int]] = OrderedSet()
        # By that of a jump, where the number was made on which it depends
        self.numbers: dict[tuple[Any, int], tuple[Any, int]] = {}
        # The translators that are tracing a path, and the branch of each
        self.forked: list[tuple[InstructionTranslatorBase, tuple[Any, int]]] = []
        # What the paths that are being traced have changed
        self.stores: list[Stores] = []
        # The slots of objects that have a join
        self.choices: list[Chosen] = []
        # The choices that branches left in slots, which the graph does not read
        self.unread: list[tuple[Slot, Choice, tuple[Any, int]]] = []
        # The branches in try statements
        self.in_try: OrderedSet[tuple[Any, int]] = OrderedSet()

    def on_instruction(self, tx: InstructionTranslatorBase, inst: Instruction) -> None:
        super().on_instruction(tx, inst)
        if self.joins and reads_identity(tx, inst, self.joins):
            restart([j.site for j in self.joins], Code.JOIN_IS_SEEN, "it asks for the identity of a tensor")
        if self.truths and reads_truth(tx, inst):
            restart(self.truths, Code.BOOL_IS_READ, inst.opname)

    def may_change(self, tx: InstructionTranslatorBase, item: VariableTracker) -> bool:
        is_path = self.stores and tx.output.current_tracer is tx.output.root_tracer
        return bool(is_path) and self.stores[-1].keep(tx, item)

    def on_load_attr(self, value: VariableTracker) -> None:
        if isinstance(value, Choice) and self.unread:
            sites = [site for *_, site in self.unread]
            restart(sites, Code.BRANCH_STAYS, "the program reads an attribute of which the branch decides")

    def make_store(self, cg: PyCodegen, item: VariableTracker, name: str, value: VariableTracker) -> list[Instruction]:
        return make_store(cg, item, name, value)

    def bool_of_call(self, tx: InstructionTranslatorBase, call: Call) -> VariableTracker | None:
        """Return what bool() of a tensor returns, or None."""
        fn = call.fn
        if self.joins and asks_identity(tx, call, self.joins):
            restart([j.site for j in self.joins], Code.JOIN_IS_SEEN, "a function asks for the identity of a tensor")
        if self.truths and reads_truth_in_call(call):
            restart(self.truths, Code.BOOL_IS_READ, "a builtin function")
        if isinstance(fn, variables.BuiltinVariable) and fn.fn is bool and len(call.args) == 1 and not call.kwargs:
            value = plain_tensor(tx, call.args[0])
            return None if value is None else self.bool_of(tx, value)
        if isinstance(fn, variables.BuiltinVariable) and fn.fn is int and len(call.args) == 1 and not call.kwargs:
            value = plain_tensor(tx, call.args[0])
            is_integer = value is not None and value.as_proxy().node.meta["example_value"].dtype in INTEGERS
            number = self.compared(tx, value) if is_integer else None
            if number is not None:
                self.repair(tx, Reason.of(Code.BOOL_IN_GRAPH))
            return number
        return None

    def item(self, tx: InstructionTranslatorBase, tensor: variables.TensorVariable) -> VariableTracker | None:
        value = plain_tensor(tx, tensor)
        # An index and the bounds of a slice have to be numbers.
        is_index = tx.current_instruction.opname in INDEXING
        if value is not None and not is_index and value.as_proxy().node.meta["example_value"].dtype == torch.bool:
            return self.bool_of(tx, value)
        number = None if value is None else self.compared(tx, value)
        return super().item(tx, tensor) if number is None else number

    def bool_of(self, tx: InstructionTranslatorBase, value: variables.TensorVariable) -> VariableTracker | None:
        """Return the bool of a tensor of one element, or None to break the graph."""
        # step has moved on from the current instruction.
        site = (tx.f_code, tx.indexof[tx.current_instruction])
        outcome, code = self.outcome_of_sizes(tx, value), Code.SIZES_DECIDE
        if outcome is None and is_broken(tx, site):
            outcome, code = self.outcome_at_break(tx, value), Code.HOST_DECIDES
            if outcome is None:
                return None
        if outcome is not None:
            self.repair(tx, Reason.of(code))
            return variables.ConstantVariable.create(outcome)
        self.truths.add(site)
        self.repair(tx, Reason.of(Code.BOOL_IN_GRAPH))
        return Truth(truth_of(tx, value))

    def compared(self, tx: InstructionTranslatorBase, value: variables.TensorVariable) -> VariableTracker | None:
        """Return a tensor that compares as its number, if a branch on a comparison with a constant reads the number."""
        site = (tx.f_code, tx.indexof[tx.current_instruction])
        following = (inst for inst in tx.instructions[site[1] + 1 :] if inst.opname not in ("NOP", "TO_BOOL"))
        number, comparison, jump, *_ = *itertools.islice(following, 3), None, None, None
        if jump is None or (number.opname, comparison.opname) != ("LOAD_CONST", "COMPARE_OP") or not is_branch(jump):
            return None
        dtype, constant = value.as_proxy().node.meta["example_value"].dtype, number.argval
        if dtype in INTEGERS and type(constant) is int and -(2**63) <= constant < 2**63:
            method = "long"
        elif dtype in FLOATS and (type(constant) is float or (type(constant) is int and abs(constant) <= 2**53)):
            method = "double"
        else:
            return None
        if is_broken(tx, site):
            return None
        self.numbers[tx.f_code, tx.indexof[jump]] = site
        return value.call_method(tx, method, [], {})

    def outcome_of_sizes(self, tx: InstructionTranslatorBase, value: variables.TensorVariable) -> bool | None:
        """Return the truth of a value, if sizes and constants tell it. May guard on sizes."""
        node = value.as_proxy().node
        outcome = outcome_of(node)
        if outcome is None:
            return None if is_in_loop(tx) else self.constant(tx, node)
        self.draw_in_front(tx, node)
        return outcome

    def outcome_at_break(self, tx: InstructionTranslatorBase, value: variables.TensorVariable) -> bool | None:
        """Return the truth of a value in this call where the graph breaks otherwise, if a guard can find it."""
        return None if is_in_loop(tx) else self.decide_at_break(tx, value.as_proxy().node)

    def read_bool(self, tx: InstructionTranslatorBase, inst: Instruction) -> None:
        """Let the graph break at a jump as it breaks for a tensor, if a bool or a number of a tensor decides."""
        value = tx.stack[-1]
        number = self.numbers.get((tx.f_code, tx.indexof[inst]))
        if number is not None and is_check(tx, inst):
            # Dynamo puts an assertion of a tensor into the graph, where it raises another exception.
            restart([number], Code.BOOL_IS_READ, inst.opname)
        if isinstance(value, Truth):
            if not inst.opname.startswith("POP_JUMP") or is_check(tx, inst):
                restart(self.truths, Code.BOOL_IS_READ, inst.opname)
            tx.stack[-1] = value.tensor

    def follow_sizes(self, tx: InstructionTranslatorBase, inst: Instruction) -> bool:
        """Trace the path that sizes decide for, if they do."""
        value = condition_of(tx)
        outcome = None if value is None else self.outcome_of_sizes(tx, value)
        if outcome is None:
            return False
        follow(tx, inst, outcome)
        return True

    def branch(self, tx: InstructionTranslatorBase, inst: Instruction) -> Code | None:
        """Trace a branch that sizes do not decide, if that is exact. Return how."""
        value = condition_of(tx)
        if value is None or is_check(tx, inst):
            return None
        outcome = None if isinstance(tx.stack[-1], Truth) else self.decide(tx, value.as_proxy().node)
        if outcome is None and tx.indexof[inst] in broken(tx.f_code):
            outcome = self.outcome_at_break(tx, value)
        if outcome is not None:
            follow(tx, inst, outcome)
            return Code.HOST_DECIDES
        return self.fork(tx, inst, value)

    def fork(self, tx: InstructionTranslatorBase, inst: Instruction, value: variables.TensorVariable) -> Code | None:
        """Trace both paths, if they can be joined."""
        site = (tx.f_code, tx.indexof[inst])
        if self.is_selected(tx, value.as_proxy().node):
            self.selected.add(site)
        if self.is_kept_broken(tx, site) or tx.output.side_effects.tensor_hooks:
            return None
        if len(self.forked) == MAX_NESTED:
            refuse(tx, Code.BRANCH_STAYS, why="branches are nested deeply")
            return None
        if "JUMP" not in inst.opname:
            tx.pop()
            condition = truth_of(tx, value)
            tx.push(Truth(condition.call_method(tx, "logical_not", [], {})))
            self.truths.add(site)
            return Code.BOOL_IN_GRAPH
        try:
            fork = fork_at(tx, inst)
        except RefusedError as e:
            if site in self.selected:
                self.refuse_selection(tx, str(e))
            refuse(tx, Code.BRANCH_STAYS, why=str(e))
            return None
        top = tx.pop()
        self.forked.append((tx, site))
        try:
            condition = truth_of(tx, value)
            paths = []
            for truth in (True, False):
                jumps = truth == ("IF_TRUE" in inst.opname)
                stack = [*tx.stack, top] if jumps and inst.opname.endswith("_OR_POP") else tx.stack
                start = tx.indexof[inst.target] if jumps else tx.indexof[inst] + 1
                paths.append(trace(tx, fork, start, stack))
            joiner, end, joins = join_paths(tx, condition, paths, fork, site)
        except RefusedError as e:
            if any(outer in self.selected for _, outer in self.forked):
                self.refuse_selection(tx, str(e))
            # The graph breaks in each path that has this branch.
            restart([outer for _, outer in self.forked], Code.BRANCH_STAYS, str(e))
        self.forked.pop()
        self.joins += joins
        self.choices += joiner.choices
        for slot, value in end.stores.items():
            store(tx, slot, value)
            if isinstance(value, Choice):
                self.unread.append((slot, value, site))
        if joiner.code is Code.COND_IN_GRAPH:
            self.conds.append(site)
        if joiner.has_truths:
            self.truths.add(site)
        tx.stack[:] = end.stack
        if fork.join is None:
            if any(frame is tx for frame, _ in self.forked):
                raise Returned(end.returned)
            tx.push(end.returned)
            # The graph ends here.
            self.repair(tx, Reason.of(joiner.code))
            leave = create_instruction("RETURN_VALUE")
            leave.copy_positions(inst)
            # Dynamo takes variables for live that the paths read.
            kept = tx.cell_and_freevars()
            tx.symbolic_locals = {name: value for name, value in tx.symbolic_locals.items() if name in kept}
            tx.RETURN_VALUE(leave)
            return joiner.code
        for name in [*tx.symbolic_locals]:
            if name not in end.variables:
                del tx.symbolic_locals[name]
        tx.symbolic_locals.update(end.variables)
        tx.instruction_pointer = tx.start_point = fork.join
        return joiner.code

    def is_kept_broken(self, tx: InstructionTranslatorBase, site: tuple[types.CodeType, int]) -> bool:
        """Return whether the graph has to break at a branch. Raises RestartAnalysis: if both paths are to run."""
        if site not in self.selected:
            return is_broken(tx, site)
        reason = broken(site[0]).get(site[1])
        # Another form was refused before.
        if (reason is not None and reason.code is not Code.BRANCH_STAYS) or tx.output.side_effects.tensor_hooks:
            self.refuse_selection(tx, "the graph breaks at the branch")
        return False

    def break_at_conds(self) -> None:
        """Raises RestartAnalysis: without torch.cond there may be no error."""
        if self.conds:
            restart(self.conds, Code.BRANCH_STAYS, "torch.cond does not compile")

    def settle_stores(self, tx: InstructionTranslatorBase) -> None:
        """Called before bytecode is made. Raises RestartAnalysis: it would add attributes in another order."""
        if changed := [site for slot, value, site in self.unread if is_stored_again(tx, slot, value)]:
            restart(changed, Code.BRANCH_STAYS, "the program stores an attribute again that a path has added")
        # Bytecode reads them.
        self.unread = []
        if self.choices:
            settle(tx, self.choices)

    def breaks_in_try(self, tx: InstructionTranslatorBase) -> bool:
        """Return whether a handler of exceptions could see one that the graph raises behind it, as far as is known."""
        site = (tx.f_code, tx.indexof[tx.current_instruction])
        reason = broken(site[0]).get(site[1])
        is_known = reason is not None and reason.code is Code.ERROR_IN_HANDLER
        if (op := reason.details["why"] if is_known else raising_operator(tx)) is not None:
            refuse(tx, Code.ERROR_IN_HANDLER, why=op)
            return True
        self.in_try.add(site)
        return False

    def check_handlers(self, tx: InstructionTranslatorBase) -> None:
        """Raises RestartAnalysis: the complete graph may raise for the values of its tensors."""
        if self.in_try and (op := raising_operator(tx)) is not None:
            restart(self.in_try, Code.ERROR_IN_HANDLER, op)

    def check_joins(self, tx: InstructionTranslatorBase) -> None:
        """Raises RestartAnalysis: the complete graph tells a join from what it stands for."""
        if self.joins and (told := told_apart(tx.output.graph, self.joins)):
            restart([j.site for j in told], Code.JOIN_IS_SEEN, "it returns, writes or differentiates the tensor")
        if self.joins and tx.output.side_effects.tensor_hooks:
            restart([j.site for j in self.joins], Code.JOIN_IS_SEEN, "it registers a hook")


def join_paths(
    tx: InstructionTranslatorBase, condition: Any, paths: list[Path], fork: Fork, site: tuple[Any, int]
) -> tuple[Joiner, Path, list[Join]]:
    """Join the paths in the first form that is exact. Raises RefusedError: there is none."""
    if tx.output.extension.is_selected(tx, condition.as_proxy().node):
        joiner = DropJoiner(tx, condition, paths)
        return joiner, *join(joiner, fork, site)
    last = last_node(tx.output.graph)
    try:
        joiner = Joiner(tx, condition, paths)
        return joiner, *join(joiner, fork, site)
    except RefusedError:
        for node in reversed([*nodes_after(last)]):
            tx.output.graph.erase_node(node)
        joiner = CondJoiner(tx, condition, paths)
        return joiner, *join(joiner, fork, site)


def raising_operator(tx: InstructionTranslatorBase) -> str | None:
    """Return an operator of the graph that may raise for the values of its tensors, or None."""
    return next((name_of(node) for node in tx.output.graph.nodes if may_raise(node)), None)


def is_in_loop(tx: InstructionTranslatorBase) -> bool:
    """Return whether a frame is in a loop, each turn of which would have two outcomes."""
    return any(
        CONDITION in frame.f_code.co_varnames
        or loops_around(flow_of(frame.f_code), frame.indexof[frame.current_instruction])
        for frame in frames_of(tx)
    )


def reads_truth(tx: InstructionTranslatorBase, inst: Instruction) -> bool:
    """Return whether an instruction needs a bool of a tensor as a value."""
    groups = ((UNARY, 1), (BINARY, 2), (MAPS, 3))
    operands = next((tx.stack[-n:] for names, n in groups if inst.opname.startswith(names)), [])
    if inst.opname == "IS_OP" and any(v.is_constant_none() for v in operands):
        return False
    if any(isinstance(v, Truth) for v in operands):
        return True
    return inst.opname == "CONTAINS_OP" and holds_truth(operands[-1])


def reads_truth_in_call(call: Call) -> bool:
    """
    Return whether a call needs a bool of a tensor as a value, or searches a value in a sequence of them. It reads lazy values,
    so it is asked only where there are such bools.
    """
    fn = call.fn
    if any(isinstance(v, Truth) for v in call.values) and not is_inlined(fn):
        return True
    if isinstance(fn, GetAttrVariable) and fn.name == "__contains__":
        return holds_truth(fn.obj)
    is_contains = isinstance(fn, variables.BuiltinVariable) and fn.fn is operator.contains
    return is_contains and any(map(holds_truth, call.args[:1]))


def holds_truth(value: VariableTracker) -> bool:
    """Return whether a sequence has bools of tensors. Dynamo compares its constants alone with one that it searches."""
    if isinstance(value, LazyVariableTracker) and not value.is_realized():
        return False
    value = value.realize()
    # The items of a text are texts.
    items = () if isinstance(value, variables.ConstantVariable) else getattr(value, "items", ())
    return isinstance(items, (list, tuple)) and any(isinstance(v, Truth) or holds_truth(v) for v in items)


def is_inlined(fn: VariableTracker) -> bool:
    """Return whether a call takes a bool of a tensor as it is."""
    if isinstance(fn, variables.BuiltinVariable):
        return fn.fn is isinstance
    if isinstance(fn, variables.GetAttrVariable):
        return fn.name == "__setattr__"
    return isinstance(fn, (variables.functions.BaseUserFunctionVariable, variables.UserDefinedClassVariable))


def reads_identity(tx: InstructionTranslatorBase, inst: Instruction, joins: list[Join]) -> bool:
    """Return whether an instruction tells a tensor from an equal one."""
    stack = tx.stack
    if inst.opname == "IS_OP":
        one, other = (value.realize() for value in stack[-2:])
        return one is not other and one.is_tensor() and other.is_tensor()
    if inst.opname in KEYS:
        return holds_tensor(KEYS[inst.opname](stack, inst))
    if inst.opname in ("LOAD_ATTR", "LOAD_METHOD"):
        return stack[-1].is_tensor() and is_own(tx, inst.argval, joins)
    return inst.opname in ("STORE_ATTR", "DELETE_ATTR") and stack[-1].is_tensor()


def asks_identity(tx: InstructionTranslatorBase, call: Call, joins: list[Join]) -> bool:
    """Return whether a call tells a tensor from an equal one."""
    fn = call.fn
    if isinstance(fn, GetAttrVariable) and (isinstance(fn.obj, variables.ConstDictVariable) or fn.name == "fromkeys"):
        return holds_tensor(call.args[:1])
    if not isinstance(fn, variables.BuiltinVariable) or fn.fn not in IDENTIFYING:
        return False
    if fn.fn in (getattr, hasattr, setattr):
        names = [value.as_python_constant() for value in call.args[1:2] if value.is_python_constant()]
        is_stored = fn.fn is setattr or not names
        return any(value.is_tensor() for value in call.args[:1]) and (is_stored or is_own(tx, *names, joins))
    return holds_tensor(call.values)


def holds_tensor(values: Sequence[VariableTracker]) -> bool:
    """Return whether a value is a tensor, or has one, as a tuple that is a key."""
    found: list[VariableTracker] = []
    VariableTracker.visit(found.append, values)
    return any(value.is_tensor() for value in found)


def is_own(tx: InstructionTranslatorBase, name: str, joins: list[Join]) -> bool:
    """Return whether an attribute of a tensor may not be that of a join of the tensor."""
    if name in IDENTITY or hasattr(torch.Tensor, name):
        return name in IDENTITY
    output = tx.output
    inputs = [storage_of(node) for node in output.graph.nodes if node.op in ("placeholder", "get_attr")]
    is_given = any(storage_of(join.other) in (None, *inputs) for join in joins)
    # A tensor that the graph made has what the program has set.
    return is_given or any(value.is_tensor() for value in output.side_effects.store_attr_mutations)


def truth_of(tx: InstructionTranslatorBase, value: variables.TensorVariable) -> Any:
    """Return a bool without dimensions. It is new, and stays as it is if the program writes the value."""
    truth = value.call_method(tx, "ne", [variables.ConstantVariable.create(0)], {})
    if value.as_proxy().node.meta["example_value"].dim():
        truth = truth.call_method(tx, "reshape", [variables.TupleVariable([])], {})
    return truth


def condition_of(tx: InstructionTranslatorBase) -> variables.TensorVariable | None:
    """Return the value on top of the stack, if its truth is that of a tensor of one element in Dynamo's graph."""
    value = tx.stack[-1]
    return plain_tensor(tx, value.tensor if isinstance(value, Truth) else value)


def plain_tensor(tx: InstructionTranslatorBase, value: VariableTracker) -> variables.TensorVariable | None:
    """Return a value if its truth is that of a tensor of one element in Dynamo's graph."""
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
        # The host cannot read it.
        and example.device.type != "meta"
        and not (is_handled(tx) and output.extension.breaks_in_try(tx))
        and torch._C._functorch.peek_interpreter_stack() is None
        and not tx.symbolic_torch_function_state.in_torch_function_mode()
        and not has_generator(tx)
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
