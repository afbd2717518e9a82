"""
copy.deepcopy of a plain object, such as the configuration of a model.

Dynamo breaks the graph there. PyGraph copies what Dynamo knows of the object, with guards of all that the copy holds.
Objects are plain if their class has nothing to say about copies, attributes lie in their dictionary, and these are
numbers, texts, dtypes, classes, functions, lists, tuples and dictionaries of them, and plain objects.
"""

from __future__ import annotations

import copy
import copyreg
import inspect
from typing import TYPE_CHECKING

import torch
from torch._dynamo import variables
from torch._dynamo.exc import RestartAnalysis
from torch._dynamo.source import AttrSource, TypeSource
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew, VariableTracker
from torch._dynamo.variables.misc import GetAttrVariable
from torch._inductor.pygraph.dynamo.breaks import broken
from torch._inductor.pygraph.types.reason import Code, Reason


if TYPE_CHECKING:
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._inductor.pygraph.dynamo.breaks import Call


# What a class may define about copies.
COPYING = ("__copy__", "__deepcopy__", "__getnewargs__", "__getnewargs_ex__", "__setstate__")
INHERITED = ("__new__", "__reduce__", "__reduce_ex__", "__getstate__")
ATOMS = (int, float, bool, str, type(None), torch.dtype)
FUNCTIONS = (variables.UserFunctionVariable, variables.UserDefinedClassVariable)


class NotPlainError(Exception):
    pass


class Copies:
    def __init__(self) -> None:
        super().__init__()
        # Objects whose class sets attributes in its own way, and where they were copied.
        self.copies: list[tuple[VariableTracker, InstructionTranslatorBase, int]] = []

    def copy_object(self, tx: InstructionTranslatorBase, call: Call) -> VariableTracker | None:
        """Return what copy.deepcopy returns, or None."""
        is_deepcopy = isinstance(call.fn, variables.BuiltinVariable) and call.fn.fn is copy.deepcopy
        if not is_deepcopy or len(call.values) != 1 or call.kwargs or tx.instruction_pointer in broken(tx.f_code):
            return None
        try:
            return self._copy(tx, call.args[0], set())
        except NotPlainError:
            return None

    def _copy(
        self, tx: InstructionTranslatorBase, value: VariableTracker, seen: set[VariableTracker]
    ) -> VariableTracker:
        value = value.realize()
        if type(value) is variables.ConstantVariable and type(value.value) in ATOMS or isinstance(value, FUNCTIONS):
            return value
        if value in seen:
            # The copies would be one object, too.
            raise NotPlainError
        seen.add(value)
        if type(value) is variables.ListVariable:
            items = [self._copy(tx, item, seen) for item in value.items]
            return variables.ListVariable(items, mutation_type=ValueMutationNew())
        if type(value) is variables.TupleVariable:
            items = [self._copy(tx, item, seen) for item in value.items]
            return value if items == value.items else variables.TupleVariable(items)
        if type(value) is GetAttrVariable and value.name == "__dict__":
            state = self._state(tx, value.obj, seen)
            keys = map(variables.ConstantVariable.create, state)
            return variables.ConstDictVariable(dict(zip(keys, state.values())), mutation_type=ValueMutationNew())
        if type(value) is variables.ConstDictVariable and value.user_cls is dict:
            return variables.ConstDictVariable(self._items(tx, value, seen), mutation_type=ValueMutationNew())
        return self._object(tx, value, seen)

    def _items(
        self, tx: InstructionTranslatorBase, value: variables.ConstDictVariable, seen: set[VariableTracker]
    ) -> dict[VariableTracker, VariableTracker]:
        if value.source is not None:
            value.install_dict_keys_match_guard()
        keys = [key.vt for key in value.items]
        if not all(type(key) is variables.ConstantVariable and type(key.value) in ATOMS for key in keys):
            raise NotPlainError
        return dict(zip(keys, [self._copy(tx, item, seen) for item in value.items.values()]))

    def _object(
        self, tx: InstructionTranslatorBase, value: VariableTracker, seen: set[VariableTracker]
    ) -> VariableTracker:
        state = self._state(tx, value, seen)
        cls = value.value_type
        source = value.mutation_type.cls_source if value.source is None else TypeSource(value.source)
        effects = tx.output.side_effects
        new = effects.track_new_user_defined_object(
            variables.BuiltinVariable(object), variables.UserDefinedClassVariable(cls, source=source), []
        )
        for name, attribute in state.items():
            effects.store_attr(new, name, attribute)
        if cls.__setattr__ is not object.__setattr__:
            self.copies.append((new, tx, tx.instruction_pointer))
        return new

    def _state(
        self, tx: InstructionTranslatorBase, value: VariableTracker, seen: set[VariableTracker]
    ) -> dict[str, VariableTracker]:
        """Return copies of an object's attributes."""
        changed = tx.output.side_effects.store_attr_mutations.get(value, {})
        if type(value) is not variables.UserDefinedObjectVariable or not is_plain(value.value_type):
            raise NotPlainError
        if isinstance(value.mutation_type, AttributeMutationNew):
            attributes = changed
        elif value.source is None or changed:
            raise NotPlainError
        else:
            content = VariableTracker.build(tx, value.value.__dict__, AttrSource(value.source, "__dict__")).realize()
            if type(content) is not variables.ConstDictVariable or not has_no_copier(tx, value):
                raise NotPlainError
            return {key.as_python_constant(): item for key, item in self._items(tx, content, seen).items()}
        if not all(type(v) is not variables.DeletedVariable for v in attributes.values()):
            raise NotPlainError
        return {name: self._copy(tx, attribute, seen) for name, attribute in attributes.items()}

    def check_copies(self, tx: InstructionTranslatorBase) -> None:
        """Raises RestartAnalysis: bytecode would set attributes of a copy by the class."""
        if not self.copies:
            return
        effects = tx.output.side_effects
        # As Dynamo does next.
        local = tx.symbolic_locals
        tx.prune_dead_locals()
        effects.prune_dead_object_new(tx)
        tx.symbolic_locals = local
        alive = list(effects.id_to_variable.values())
        for new, frame, instruction in self.copies:
            if any(new is each for each in alive):
                broken(frame.f_code)[instruction] = Reason.of(Code.NOT_PLAIN)
                raise RestartAnalysis(restart_reason="a copy of an object cannot be made by bytecode")


def is_plain(cls: type) -> bool:
    """Return whether copy.deepcopy makes an object of a class by its dictionary alone."""
    return (
        not any(hasattr(cls, name) for name in COPYING)
        and all(getattr(cls, name, None) is getattr(object, name, None) for name in INHERITED)
        and cls not in copyreg.dispatch_table
        and cls not in copy._deepcopy_dispatch
        and type(cls) is type
        and not any(each.__dict__.get("__slots__") for each in cls.__mro__)
    )


def has_no_copier(tx: InstructionTranslatorBase, value: variables.UserDefinedObjectVariable) -> bool:
    """Return whether an object has no method that copies it, nor a property in place of an attribute."""
    cls = value.value_type
    if any(inspect.isdatadescriptor(inspect.getattr_static(cls, name, None)) for name in value.value.__dict__):
        return False
    if cls.__getattribute__ is object.__getattribute__ and not hasattr(cls, "__getattr__"):
        return True
    # Its own code answers.
    args = [value, variables.ConstantVariable.create("__deepcopy__"), variables.ConstantVariable.create(None)]
    return variables.BuiltinVariable(getattr).call_function(tx, args, {}).is_constant_none()
