"""
Checks of a tensor's value behind the graph: assertions, ``if bad: raise``, and functions such as
torch._check_tensor_all.

Dynamo breaks the graph where the host reads the value. PyGraph queues the check with the effects (see effects.py).
Bytecode reads the value when the graph has run, or while it runs (see early.py), and calls the code of the path that
raises. Eager mode cannot be told from this if

- what follows the check in the graph does not raise, writes no input and draws no numbers that the program can expect.
  Bytecode may draw numbers in front of the graph. If the check raises, it sets the generator back to before these draws
- if an index behind the check may be out of bounds, the program has changed no object: where the index raises, bytecode
  would not make the changes
- the path reads what eager mode would: values of the call, and objects that nothing has changed before, or that have
  the values again that they had
- no handler of exceptions is around the check
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
import types
from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo import variables
from torch._dynamo.bytecode_transformation import cleaned_instructions
from torch._dynamo.source import is_from_global_source, is_from_local_source
from torch._dynamo.variables.functions import NestedUserFunctionVariable
from torch._inductor.pygraph.dynamo.breaks import refuse
from torch._inductor.pygraph.dynamo.drawn import DrawnInFront
from torch._inductor.pygraph.dynamo.early import as_tensor, read_early
from torch._inductor.pygraph.dynamo.effects import (
    Effect,
    Effects,
    FromSource,
    has_text,
    may_defer,
    nodes_after,
    Rebuilt,
)
from torch._inductor.pygraph.dynamo.operators import draws, indices_of, is_total
from torch._inductor.pygraph.dynamo.raising import is_number, raising_path, reads_metadata
from torch._inductor.pygraph.types.reason import Code


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._dynamo.bytecode_transformation import Instruction
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker
    from torch._inductor.pygraph.dynamo.breaks import Call
    from torch._inductor.pygraph.dynamo.early import Flag
    from torch._inductor.pygraph.dynamo.raising import RaisingPath
    from torch.utils._ordered_set import OrderedSet

# Functions that raise unless this argument, a tensor, is true.
FUNCTIONS = {torch._assert: "condition", torch._check_tensor_all: "cond", torch._check_tensor_all_with: "cond"}

CPU = torch.device("cpu")


class GeneratorState:
    """Sets the CPU's generator back to where it was in front of the graph, if its context raises."""

    def __init__(self) -> None:
        self.of_call = threading.local()

    def before(self, draw: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that draws, and keeps the state from before."""

        def draw_from_state(*args: Any, **kwargs: Any) -> Any:
            self.of_call.state = torch.get_rng_state()
            return draw(*args, **kwargs)

        return draw_from_state

    def __enter__(self) -> None:
        pass

    def __exit__(self, error: type[BaseException] | None, *args: object) -> None:
        state = self.of_call.__dict__.pop("state", None)
        if error is not None and state is not None:
            torch.set_rng_state(state)


@dataclasses.dataclass
class Check(Effect):
    """
    Attributes:
        raises_if: the truth of the first value with which the call raises
        generator: the call's context
    """

    raises_if: bool = False
    generator: GeneratorState = dataclasses.field(default_factory=GeneratorState)

    def allows(self, node: torch.fx.Node) -> bool:
        if torch._inductor.config.fallback_random and draws(node):
            return False
        if is_total(node):
            return True
        device = self.texts[0].tensor.as_proxy().node.meta["example_value"].device
        found = indices_of(node)
        return found is not None and all(device in (CPU, i.meta["example_value"].device) for i in found)

    def undo_draws(self, tx: InstructionTranslatorBase, drawn: Sequence[torch.fx.Node]) -> bool:
        calls = tx.output.random_calls
        targets = [node.target for node in drawn]
        for i, (draw, args, kwargs) in enumerate(calls):
            if draw in targets or isinstance(draw, DrawnInFront):
                calls[i] = self.generator.before(draw), args, kwargs
                return True
        return False

    def complete(self, tx: InstructionTranslatorBase, copies: OrderedSet[torch.fx.Node]) -> None:
        """Give operators that follow zeros as indices and masks if the check raises: the graph runs to its end then."""
        graph = tx.output.graph
        risky = [node for node in nodes_after(self.last) if node not in copies and not is_total(node)]
        if not risky:
            return
        condition = self.values[0].as_proxy().node
        with graph.inserting_before(risky[0]):
            flag = call(tx, torch.reshape, condition, ())
            passes = call(tx, torch.eq if self.raises_if else torch.ne, flag, 0)
        for node in risky:
            for index in indices_of(node):
                zero = False if index.meta["example_value"].dtype == torch.bool else 0
                with graph.inserting_before(node):
                    safe = call(tx, torch.where, passes, index, zero)
                node.replace_input_with(index, safe)


def call(tx: InstructionTranslatorBase, function: Callable[..., Any], *args: Any) -> torch.fx.Node:
    """Return a new node of the graph."""
    node = tx.output.graph.call_function(function, args)
    with tx.fake_mode:
        node.meta["example_value"] = function(*torch.fx.map_arg(args, lambda arg: arg.meta["example_value"]))
    return node


class Checks(Effects):
    def check_effects(self, tx: InstructionTranslatorBase, drawn_in_front: Sequence[torch.fx.Node]) -> None:
        # The queue is empty afterwards.
        checks = [effect for effect in self.queue if isinstance(effect, Check)]
        super().check_effects(tx, drawn_in_front)
        for check in checks:
            if (flag := read_early(tx, check.values[0].as_proxy().node)) is not None:
                check.values[0] = flag

    def check_at_jump(self, tx: InstructionTranslatorBase, inst: Instruction) -> bool:
        """Queue a jump to a path that only raises, and trace the other path."""
        condition = tx.stack[-1]
        if not inst.opname.startswith("POP_JUMP") or not is_flag(condition):
            return False
        paths = [raising_path(tx, start) for start in (inst.target, tx.next_instruction)]
        if (paths[0] is None) == (paths[1] is None) or not may_defer(tx, may_raise=True):
            return False
        jumps = paths[0] is None
        path = paths[1] if jumps else paths[0]
        values = values_of(tx, path)
        if values is None:
            refuse(tx, Code.NOT_PLAIN)
            return False
        raises_if = ("TRUE" in inst.opname) is not jumps
        raises = path.make_function(tx, [*values])
        check = Check.at(tx, True, [], raises_if=raises_if)
        self.call_later(tx, check, checker(check.generator, raises_if, raises), [condition.realize(), *values.values()])
        tx.pop()
        if jumps:
            tx.jump(inst)
        return True

    def check_behind(self, tx: InstructionTranslatorBase, call: Call) -> VariableTracker | None:
        """Return what a function that checks a tensor returns, or None."""
        function = getattr(call.fn, "value", None)
        if not isinstance(function, types.FunctionType) or function not in FUNCTIONS:
            return None
        if not may_defer(tx, may_raise=True):
            return None
        given = arguments_of(tx, function, call)
        if given is None:
            refuse(tx, Code.NOT_PLAIN)
            return None
        names, flag, others = given
        check = Check.at(tx, True, [])
        self.call_later(tx, check, function_checker(check.generator, function, names), [flag, *others])
        return variables.ConstantVariable.create(None)


def arguments_of(
    tx: InstructionTranslatorBase, function: Callable[..., None], call: Call
) -> tuple[list[str], VariableTracker, list[VariableTracker]] | None:
    """Return names of arguments, the first of which is the flag that a function checks, its value and the others'."""
    try:
        given = inspect.signature(function).bind(*call.args, **call.kwargs).arguments
    except TypeError:
        return None
    name = FUNCTIONS[function]
    tensor = given.pop(name)
    if type(tensor.realize()) is not variables.TensorVariable or tensor.class_type is not torch.Tensor:
        return None
    others = {name: kept(tx, value) for name, value in given.items()}
    if None in others.values():
        return None
    if function is torch._assert:
        flag = tensor if is_flag(tensor) else None
    else:
        flag = tensor.call_method(tx, "_is_all_true", [], {}) if tensor.dtype is torch.bool else None
    return None if flag is None else ([name, *others], flag, [*others.values()])


def is_flag(value: VariableTracker) -> bool:
    """Return whether a value is a tensor of one element, whose truth the host can read."""
    if not value.is_tensor():
        return False
    value = value.realize()
    if type(value) is not variables.TensorVariable or value.class_type not in (torch.Tensor, torch.nn.Parameter):
        return False
    example = value.as_proxy().node.meta.get("example_value")
    return example is not None and type(example.numel()) is int and example.numel() == 1


def values_of(tx: InstructionTranslatorBase, path: RaisingPath) -> dict[str, VariableTracker] | None:
    """Return the variables that a path reads, as bytecode can pass them behind the graph, or None if it cannot."""
    known = tx.symbolic_locals
    found = {name: known[name] for name in path.variables if name in known}
    for name in path.cells:
        contents = contents_of(tx, known.get(name))
        if contents is not None:
            found[name] = contents
    for name, value in [*found.items()]:
        has_history = value.source is None and value.is_tensor() and value.requires_grad
        if has_history and reads_metadata(path.instructions, name):
            # A detached tensor has the same size, dtype and device.
            found[name] = value.call_method(tx, "detach", [], {})
    values = {name: kept(tx, value, is_number=is_number(path.instructions, name)) for name, value in found.items()}
    return None if None in values.values() else values


def contents_of(tx: InstructionTranslatorBase, cell: VariableTracker | None) -> VariableTracker | None:
    """Return what a cell holds now, if anything."""
    effects = tx.output.side_effects
    if not isinstance(cell, variables.CellVariable):
        return None
    if effects.has_pending_mutation_of_attr(cell, "cell_contents"):
        return effects.load_attr(cell, "cell_contents", check=False)
    return cell.pre_existing_contents


def kept(tx: InstructionTranslatorBase, value: VariableTracker, *, is_number: bool = False) -> VariableTracker | None:
    """Return what has the value of now behind the graph, or None. Neither objects nor inputs are changed until then."""
    source = value.source
    if source is not None and (is_from_local_source(source) or is_from_global_source(source)):
        return FromSource(source=source)
    value = value.realize()
    if type(value) is NestedUserFunctionVariable:
        return kept_function(tx, value)
    if isinstance(value, (variables.ConstantVariable, variables.BuiltinVariable, variables.UserDefinedClassVariable)):
        return value
    return value if has_text(tx, value, is_formatted=is_number) else None


def kept_function(tx: InstructionTranslatorBase, function: NestedUserFunctionVariable) -> Rebuilt | None:
    """Return a function that the frame made, with the values that its cells have now."""
    code = function.get_code()
    instructions = cleaned_instructions(code)
    if (
        function.defaults is not None
        or function.kwdefaults is not None
        or any(inst.opname in ("STORE_DEREF", "DELETE_DEREF") for inst in instructions)
    ):
        return None
    cells = () if function.closure is None else function.closure.items
    values = []
    for name, cell in zip(code.co_freevars, cells):
        contents = contents_of(tx, cell)
        value = None if contents is None else kept(tx, contents, is_number=is_number(instructions, name))
        if value is None:
            return None
        values.append(value)
    make = functools.partial(function_of, code, function.f_globals)
    return Rebuilt(tx.output.install_global("__function", torch._dynamo.disable(make)), values)


def function_of(code: types.CodeType, scope: dict[str, Any], *values: Any) -> types.FunctionType:
    return types.FunctionType(code, scope, code.co_name, None, tuple(map(types.CellType, values)))


def function_checker(
    generator: GeneratorState, function: Callable[..., None], names: Sequence[str]
) -> Callable[..., None]:
    grad_mode = torch.is_grad_enabled()

    def call(flag: torch.Tensor | Flag, *values: Any) -> None:
        with generator, torch.set_grad_enabled(grad_mode):
            function(**dict(zip(names, (as_tensor(flag), *values))))

    return call


def checker(generator: GeneratorState, raises_if: bool, raises: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls ``raises`` if its first argument is as true as ``raises_if``."""
    grad_mode = torch.is_grad_enabled()

    def call(condition: torch.Tensor | Flag, *values: Any) -> None:
        with generator:
            if bool(as_tensor(condition)) is raises_if:
                with torch.set_grad_enabled(grad_mode):
                    raises(*values)

    return call
