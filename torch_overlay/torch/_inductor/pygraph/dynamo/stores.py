"""
What the paths of a branch store to objects that existed before: attributes, variables of closures, and items of lists
and dictionaries.

Each path finds the objects as they were before the branch. Behind it, each slot that a path has written is stored once,
with the join of what the paths leave in it (joins.py). A slot that one path leaves as it was has its old value there.

A join is a new tensor, and so the program could tell it from an older one. Behind the graph, bytecode therefore stores
the object that the path has left (Choice): the older tensor itself, or what the graph computed. So it does if the slot
has other values than tensors, as a counter. Bytecode stores nothing if the path that runs leaves an attribute as it was,
and the attribute is none that the frame knows, as that of a cache which its first use adds. A graph that reads such a
slot again breaks at the branch.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TYPE_CHECKING

from torch._dynamo import variables
from torch._dynamo.bytecode_transformation import create_call_function, create_instruction
from torch._dynamo.exc import ObservedException
from torch._dynamo.variables.base import VariableTracker


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch._dynamo.bytecode_transformation import Instruction
    from torch._dynamo.codegen import PyCodegen
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    # An object, and an attribute, a key or an index of it
    Slot = tuple[VariableTracker, Any]


# Objects of which a path may change a slot
OBJECTS = (variables.UserDefinedObjectVariable, variables.UnspecializedNNModuleVariable, variables.CellVariable)
CONTAINERS = (variables.ListVariable, variables.ConstDictVariable)

# Where a module keeps attributes beside its own dictionary
OF_MODULES = ("_parameters", "_buffers", "_modules")


UNCHANGED = object()


class RefusedError(Exception):
    """The paths of a branch cannot be joined."""


class Unchanged(VariableTracker):
    """The value of an attribute that a path leaves as it was, or without a value. Nothing reads it."""

    def python_type(self) -> type:
        return Unchanged

    def reconstruct(self, codegen: PyCodegen) -> None:
        codegen.load_import_from(__name__, "UNCHANGED")


class Choice(VariableTracker):
    """The one of two values that a condition chooses. Bytecode stores it, and nothing reads it before."""

    _nonvar_fields = {"condition", "values", *VariableTracker._nonvar_fields}

    def __init__(self, condition: VariableTracker, values: tuple[VariableTracker, VariableTracker]) -> None:
        super().__init__()
        self.condition = condition
        self.values = values

    def reconstruct(self, codegen: PyCodegen) -> None:
        codegen.add_push_null(lambda: codegen.load_import_from(__name__, "choose"))
        codegen.foreach((self.condition, *self.values))
        codegen.extend_output(create_call_function(3, False))

    def is_stored_always(self) -> bool:
        return not any(isinstance(value, Unchanged) for value in self.values)


def choose(condition: Any, a: Any, b: Any) -> Any:
    return a if condition else b


def store_chosen(store: Callable[[Any, str, Any], None], item: Any, name: str, value: Any) -> None:
    if value is not UNCHANGED:
        store(item, name, value)


def is_stored_again(tx: InstructionTranslatorBase, slot: Slot, value: Choice) -> bool:
    """Return whether an attribute that a path may have added has another value by now, or is deleted."""
    item, name = slot
    stored = tx.output.side_effects.store_attr_mutations.get(item)
    return stored is not None and not value.is_stored_always() and stored.get(name) is not value


def make_store(codegen: PyCodegen, item: VariableTracker, name: str, value: VariableTracker) -> list[Instruction]:
    """Return bytecode that stores an attribute if a path has stored it, or none if bytecode always stores it."""
    if not isinstance(value, Choice) or value.is_stored_always():
        return []
    codegen.add_push_null(lambda: codegen.load_import_from(__name__, "store_chosen"))
    if isinstance(item, variables.UserDefinedObjectVariable) and item.needs_slow_setattr():
        # Dynamo has traced the program's own __setattr__.
        codegen.load_import_from("builtins", "object")
        codegen.load_attr("__setattr__")
    else:
        codegen.load_import_from("builtins", "setattr")
    codegen(item)
    codegen.append_output(codegen.create_load_const(name))
    codegen(value)
    return [*create_call_function(4, False), create_instruction("POP_TOP")]


@dataclasses.dataclass
class Stores:
    """
    What a path stores to objects from before.

    Attributes:
        before: the slots of each object that it has changed, as they were
        modified: whether a container had been changed
    """

    before: dict[VariableTracker, dict[Any, VariableTracker]] = dataclasses.field(default_factory=dict)
    modified: dict[VariableTracker, bool] = dataclasses.field(default_factory=dict)

    def keep(self, tx: InstructionTranslatorBase, item: VariableTracker) -> bool:
        """Keep an object that a path is about to change. Return whether it may."""
        if is_container(item):
            # Methods may have changed it already.
            is_assignment = tx.current_instruction.opname == "STORE_SUBSCR"
            if not is_assignment and item not in self.before:
                return False
        elif type(item) not in OBJECTS:
            return False
        if item not in self.before:
            self.before[item] = slots_of(tx.output.side_effects, item)
            self.modified[item] = getattr(item.mutation_type, "is_modified", False)
        return True

    def take(self, side_effects: SideEffects) -> dict[Slot, VariableTracker]:
        """
        Return what the path has left, and give the objects what they had before.

        Raises:
            RefusedError: a slot is gone, or a container has other slots or another order of them.
        """
        found: dict[Slot, VariableTracker] = {}
        for item, before in self.before.items():
            after = slots_of(side_effects, item)
            if any(isinstance(value, variables.DeletedVariable) for value in after.values()):
                raise RefusedError("a path deletes an attribute")
            if is_container(item) and [*after] != [*before]:
                raise RefusedError(f"a path adds, removes or moves items of a {item.python_type_name()}")
            found |= {(item, slot): value for slot, value in after.items() if before.get(slot) is not value}
            if type(item) is variables.ListVariable:
                item.items[:] = before.values()
            elif type(item) is variables.ConstDictVariable:
                item.items.clear()
                item.items.update(before)
            elif before:
                side_effects.store_attr_mutations[item] = before
            else:
                side_effects.store_attr_mutations.pop(item, None)
            if hasattr(item.mutation_type, "is_modified"):
                item.mutation_type.is_modified = self.modified[item]
        return found


def is_container(item: VariableTracker) -> bool:
    return type(item) in CONTAINERS


def slots_of(side_effects: SideEffects, item: VariableTracker) -> dict[Any, VariableTracker]:
    if type(item) is variables.ListVariable:
        return dict(enumerate(item.items))
    if type(item) is variables.ConstDictVariable:
        return dict(item.items)
    return dict(side_effects.store_attr_mutations.get(item, {}))


def load(tx: InstructionTranslatorBase, slot: Slot) -> VariableTracker:
    """
    Return what a slot holds.

    Raises:
        RefusedError: it is empty, or reading it runs code of the program.
    """
    item, name = slot
    known = slots_of(tx.output.side_effects, item)
    if name in known:
        return known[name]
    if isinstance(item, variables.CellVariable):
        if item.pre_existing_contents is None:
            raise RefusedError("a variable of a closure is unbound in a path")
        return item.pre_existing_contents
    if is_in_object(item, name):
        try:
            return item.var_getattr(tx, name)
        except ObservedException as e:
            raise RefusedError(f"reading {name} raises") from e
    if item.should_skip_descriptor_setter(name):
        raise RefusedError(f"a path sets {name} by a descriptor")
    return Unchanged()


def is_in_object(item: VariableTracker, name: str) -> bool:
    of_object = getattr(getattr(item, "value", None), "__dict__", {})
    places = (of_object, *(of_object.get(place) or {} for place in OF_MODULES))
    return item.source is not None and isinstance(of_object, dict) and any(name in place for place in places)


def check_order(side_effects: SideEffects, paths: Sequence[Iterable[Slot]]) -> None:
    """Raises RefusedError: a program could tell by the order of its attributes which path has run."""
    by_item: dict[VariableTracker, tuple[list[Any], ...]] = {}
    for i, slots in enumerate(paths):
        for item, name in slots:
            if name not in slots_of(side_effects, item) and not is_in_object(item, name):
                by_item.setdefault(item, tuple([] for _ in paths))[i].append(name)
    for added in by_item.values():
        order = [*dict.fromkeys(name for names in added for name in names)]
        if any([name for name in order if name in names] != names for names in added):
            raise RefusedError("the paths add attributes in another order")


def store(tx: InstructionTranslatorBase, slot: Slot, value: VariableTracker) -> None:
    item, name = slot
    if is_container(item):
        tx.output.side_effects.mutation(item)
        item.items[name] = value
    else:
        tx.output.side_effects.store_attr(item, name, value)
