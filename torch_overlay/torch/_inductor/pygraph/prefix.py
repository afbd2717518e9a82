"""
Whether what comes before a loop that breaks the graph is compiled.

Upstream skips the whole frame: it runs as in eager mode. Compiled up to its last checkpoint,
it goes through what any graph break goes through: side effects come after the graph, which
raises outside of the frame's try statements, and values are made again from what Dynamo knows
of them. So it is compiled where nothing tells the difference, by what is known to be made
again as it was, and skipped as upstream does elsewhere. What still differs: locals that
bytecode does not read are gone for who looks at the frame from outside, and lru_cache counts
no calls.

Frames that upstream compiles are as before.
"""

from __future__ import annotations

import dis
import inspect
import logging
import sys
from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo import variables
from torch._dynamo.code_context import code_context
from torch._dynamo.utils import (
    numpy_attr_wrapper,
    numpy_method_wrapper,
    numpy_operator_wrapper,
    numpy_to_tensor_wrapper,
)
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew
from torch._dynamo.variables.lists import SizeVariable
from torch._dynamo.variables.misc import CellVariable
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    import types
    from collections.abc import Iterator, Sequence

    import torch.fx
    from torch._dynamo.bytecode_transformation import Instruction
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker


log = logging.getLogger(__name__)

# In the context of the code, once it was found to break in a loop.
IS_COMPILED = "pygraph_prefix"

# They find locals by name, change what they are called on without a trace, or return a tuple
# for an iterator.
OPAQUE_NAMES = frozenset(
    ("locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe")
    + ("move_to_end", "reversed")
)

# Values that were not there before the frame, and are made again as they were.
REBUILT = frozenset(
    (
        variables.BuiltinVariable,
        variables.ConstantVariable,
        CellVariable,
        variables.ConstDictVariable,
        variables.ListVariable,
        variables.NNModuleVariable,
        variables.PythonModuleVariable,
        variables.RangeVariable,
        variables.SetVariable,
        SizeVariable,
        variables.SliceVariable,
        variables.SymNodeVariable,
        variables.TensorVariable,
        variables.TorchInGraphFunctionVariable,
        variables.TupleVariable,
        variables.UserDefinedClassVariable,
        variables.UserDefinedObjectVariable,
    )
)


def may_be_compiled(tx: InstructionTranslatorBase) -> bool:
    """Called where a loop breaks the graph. Remembers the answer for is_left_out."""
    root = tx.output.root_tx
    if root is None:
        return False
    if (reason := next(obstacles(root), None)) is not None:
        log.info("%s: not compiled before its loop: %s", root.f_code.co_name, reason)
    code_context.get_context(root.f_code)[IS_COMPILED] = reason is None
    return reason is None


def is_left_out(code: types.CodeType) -> bool:
    """
    Whether a frame that could not be compiled is skipped. Upstream skips it before it tries
    to compile what comes before the loop, and so does not fail.
    """
    return code_context.has_context(code) and code_context.get_context(code).get(
        IS_COMPILED, False
    )


def obstacles(root: InstructionTranslatorBase) -> Iterator[str]:
    """Why a frame is skipped, if it is."""
    yield from of_code(root.f_code, traced(root))
    context = root.output.tracing_context
    for code in context.previously_inlined_functions:
        # Upstream does not compile its frame either, where it is not inlined.
        if code.co_flags & inspect.CO_GENERATOR and handles_exceptions(code):
            yield f"the generator {code.co_name} may handle an exception"
    yield from of_graph(root.output.graph)
    yield from of_values(root.output.side_effects, [*root.symbolic_locals.values()])


def traced(root: InstructionTranslatorBase) -> Sequence[Instruction]:
    """Those up to the last checkpoint, and the rest of a loop that it lies in."""
    checkpoint = root.current_speculation
    end = 0 if checkpoint is None else checkpoint.instruction_pointer
    index = {id(inst): i for i, inst in enumerate(root.instructions)}
    for i, inst in enumerate(root.instructions):
        if inst.target is not None and index[id(inst.target)] <= min(i, end):
            end = max(end, i)
    return root.instructions[:end]


def of_code(
    code: types.CodeType, instructions: Sequence[Instruction]
) -> Iterator[str]:
    for name in OPAQUE_NAMES.intersection(code.co_names):
        yield f"it calls {name}"
    arguments = inspect.getargs(code)
    names = OrderedSet([*arguments.args, arguments.varargs, arguments.varkw])
    for inst in instructions:
        handler = inst.exn_tab_entry
        # SETUP_* up to Python 3.10.
        if inst.opname in ("SETUP_FINALLY", "SETUP_WITH") or (
            handler is not None and handler.target.opname == "PUSH_EXC_INFO"
        ):
            yield "an exception may be handled"
        if inst.opname == "UNPACK_EX":
            # Dynamo makes a tuple of it.
            yield "a starred target is a list"
        if inst.opname == "DELETE_DEREF" or (
            inst.opname == "DELETE_FAST" and inst.argval in names
        ):
            # It would be there again.
            yield f"{inst.argval} is deleted"
        if inst.opname == "INPLACE_MULTIPLY" or (
            inst.opname == "BINARY_OP"
            and dis._nb_ops[inst.arg][0] == "NB_INPLACE_MULTIPLY"  # type: ignore[attr-defined]
        ):
            # A list's is lost.
            yield "something is multiplied in place"


def handles_exceptions(code: types.CodeType) -> bool:
    opname = "SETUP_FINALLY" if sys.version_info < (3, 11) else "PUSH_EXC_INFO"
    return any(inst.opname == opname for inst in dis.get_instructions(code))


def of_graph(graph: torch.fx.Graph) -> Iterator[str]:
    as_numpy = (
        numpy_method_wrapper,
        numpy_operator_wrapper,
        numpy_to_tensor_wrapper,
    )
    for node in graph.nodes:
        if node.target is numpy_attr_wrapper or isinstance(node.target, as_numpy):
            # Its scalars, dtypes, views, warnings and draws are others.
            yield f"{node.name} is NumPy's"
        if node.target is torch._assert_async:
            yield "a tensor is asserted, and raises another exception"


def of_values(
    side_effects: SideEffects, values: list[VariableTracker]
) -> Iterator[str]:
    if side_effects.tensor_hooks:
        yield "a hook is registered"
    for value in side_effects.id_to_variable.values():
        if not side_effects.is_modified(value):
            continue
        if not isinstance(value.mutation_type, (AttributeMutationNew, ValueMutationNew)):
            yield f"a {value.python_type_name()} is changed that was there before"
        values.append(value)
        attributes = side_effects.store_attr_mutations.get(value, {})
        values += attributes.values()
        if type(value) is variables.UserDefinedObjectVariable:
            if not is_plain(value.value_type, attributes):
                name = value.python_type_name()
                yield f"a {name} may do more than to keep what it is given"
    found: list[VariableTracker] = []
    variables.VariableTracker.visit(found.append, values)
    for value in found:
        if isinstance(value, variables.LazyVariableTracker):
            # It was there before, and nobody looked at it.
            continue
        if value.source is None:
            if type(value) not in REBUILT:
                yield f"a {value.python_type_name()} is not made again as it was"
        elif isinstance(value, variables.ConstantVariable):
            if isinstance(value.value, float) and value.value == 0:
                yield f"{value.source.name} is zero, and no guard asks for its sign"


def is_plain(cls: type, attributes: dict[str, Any]) -> bool:
    """Whether setting these of an object of the class has no other effect."""
    return cls.__setattr__ is object.__setattr__ and not any(
        hasattr(inspect.getattr_static(cls, name, None), "__set__")
        for name in attributes
    )
