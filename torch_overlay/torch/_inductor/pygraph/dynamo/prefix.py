"""
Whether what upstream runs eagerly is compiled: what comes before a loop that breaks the graph,
what follows a slice that does (slices.py), and what breaks the graph in a loop or a try
statement, if it does not with pygraph (items.py).

Upstream skips such a frame. Compiled, it goes through what any graph does: side effects come
after the graph, which raises outside of the frame's try statements, values are made again
from what Dynamo knows of them, and what Dynamo gets wrong elsewhere, it gets wrong here. So it
is compiled where nothing tells the difference: where all that was traced is of a few plain
kinds, and its values are known to be made again as they were. It is skipped as upstream does
elsewhere. What still differs: locals that bytecode does not read are gone for who looks at the
frame from outside, lru_cache counts no calls, and who asks for an error where a frame is
compiled again gets one.

Frames that upstream compiles are as before.
"""

from __future__ import annotations

import dis
import inspect
import logging
import operator
import sys
from typing import Any, TYPE_CHECKING

import torch
import torch.fx
from torch._dynamo import variables
from torch._dynamo.code_context import code_context
from torch._dynamo.exc import SkipFrame
from torch._dynamo.source import NumpyTensorSource
from torch._dynamo.utils import (
    numpy_attr_wrapper,
    numpy_method_wrapper,
    numpy_operator_wrapper,
    numpy_to_tensor_wrapper,
)
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew
from torch._dynamo.variables.dicts import SetVariable
from torch._dynamo.variables.lists import SizeVariable
from torch._dynamo.variables.misc import CellVariable, NullVariable
from torch._dynamo.variables.torch import tracing_state_functions
from torch._dynamo.variables.user_defined import UserDefinedSetVariable
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    import types
    from collections.abc import Iterable, Iterator, Sequence

    from torch._dynamo.bytecode_transformation import Instruction
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker


log = logging.getLogger(__name__)

# In the context of the code, once it was found to break in a loop: upstream skips it.
IS_LEFT_OUT = "pygraph_prefix"

# They find locals by name, tell of a tensor what no guard asks, or change a dictionary without
# a trace.
OPAQUE_NAMES = frozenset(
    ("locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe")
    + ("_base", "_version", "grad_fn", "move_to_end")
)

# Not among them: those that handle exceptions, unpack to a list, merge dictionaries, make sets
# or import.
PLAIN_OPNAMES = frozenset(
    """
    BINARY_ADD BINARY_AND BINARY_FLOOR_DIVIDE BINARY_LSHIFT BINARY_MATRIX_MULTIPLY
    BINARY_MODULO BINARY_MULTIPLY BINARY_OP BINARY_OR BINARY_POWER BINARY_RSHIFT
    BINARY_SLICE BINARY_SUBSCR BINARY_SUBTRACT BINARY_TRUE_DIVIDE BINARY_XOR
    BUILD_CONST_KEY_MAP BUILD_LIST BUILD_MAP BUILD_SLICE BUILD_STRING BUILD_TUPLE
    CACHE CALL CALL_FUNCTION CALL_FUNCTION_EX CALL_FUNCTION_KW CALL_KW CALL_METHOD
    COMPARE_OP CONTAINS_OP COPY COPY_FREE_VARS DELETE_FAST DICT_MERGE DUP_TOP DUP_TOP_TWO
    END_FOR EXTENDED_ARG FORMAT_SIMPLE FORMAT_VALUE FOR_ITER GEN_START GET_ITER INPLACE_ADD
    INPLACE_AND INPLACE_FLOOR_DIVIDE INPLACE_MODULO INPLACE_OR INPLACE_SUBTRACT
    INPLACE_TRUE_DIVIDE IS_OP JUMP_ABSOLUTE JUMP_BACKWARD JUMP_BACKWARD_NO_INTERRUPT
    JUMP_FORWARD JUMP_IF_FALSE_OR_POP JUMP_IF_TRUE_OR_POP KW_NAMES LIST_APPEND LIST_EXTEND
    LIST_TO_TUPLE LOAD_ATTR LOAD_CLOSURE LOAD_CONST LOAD_DEREF LOAD_FAST LOAD_FAST_AND_CLEAR
    LOAD_FAST_CHECK LOAD_FAST_LOAD_FAST LOAD_GLOBAL LOAD_METHOD LOAD_SUPER_ATTR MAKE_CELL
    MAKE_FUNCTION NOP POP_JUMP_BACKWARD_IF_FALSE POP_JUMP_BACKWARD_IF_NONE
    POP_JUMP_BACKWARD_IF_NOT_NONE POP_JUMP_BACKWARD_IF_TRUE POP_JUMP_FORWARD_IF_FALSE
    POP_JUMP_FORWARD_IF_NONE POP_JUMP_FORWARD_IF_NOT_NONE POP_JUMP_FORWARD_IF_TRUE
    POP_JUMP_IF_FALSE POP_JUMP_IF_NONE POP_JUMP_IF_NOT_NONE POP_JUMP_IF_TRUE POP_TOP PRECALL
    PUSH_NULL RESUME RETURN_CONST RETURN_GENERATOR RETURN_VALUE ROT_FOUR ROT_N ROT_THREE
    ROT_TWO SET_FUNCTION_ATTRIBUTE STORE_ATTR STORE_DEREF STORE_FAST
    STORE_FAST_LOAD_FAST STORE_FAST_STORE_FAST STORE_SLICE STORE_SUBSCR SWAP TO_BOOL
    UNARY_INVERT UNARY_NEGATIVE UNARY_NOT UNARY_POSITIVE UNPACK_SEQUENCE YIELD_VALUE
    """.split()
)

# Called for an effect that each call of compiled code has: it writes elements, and bytecode
# sets the gradient mode. Operators have theirs as well.
EFFECTS = (operator.setitem, torch._C._set_grad_enabled)
OPERATORS = (torch._ops.OperatorBase, torch._ops.OpOverloadPacket)

# From Python 3.12 on CALL_INTRINSIC_1 does with these arguments what instructions did:
# UNARY_POSITIVE and LIST_TO_TUPLE.
PLAIN_INTRINSICS = (5, 6)

# A flag of FORMAT_VALUE: what is on top of the stack is the format.
FORMAT_WITH_SPEC = 4

# Python's own functions and types that may be called.
PLAIN_BUILTINS = frozenset(
    (abs, bool, dict, divmod, enumerate, float, getattr, hasattr, int, isinstance, issubclass)
    + (iter, len, list, max, min, range, slice, str.format, super, tuple, type, zip)
)

IN_PLACE = frozenset(
    (operator.iadd, operator.iand, operator.ifloordiv, operator.ilshift, operator.imatmul)
    + (operator.imod, operator.imul, operator.ior, operator.ipow, operator.irshift)
    + (operator.isub, operator.itruediv, operator.ixor, operator.setitem)
)

# They draw by operators of other names.
DRAWING = frozenset(
    (functional.gumbel_softmax, torch.pca_lowrank, torch.svd_lowrank)
    + (functional.fractional_max_pool2d, functional.fractional_max_pool2d_with_indices)
    + (functional.fractional_max_pool3d, functional.fractional_max_pool3d_with_indices)
)

SUMS = "sums of numbers are computed in another order"

# Values that were not there before the frame, and are made again as they were.
REBUILT = frozenset(
    (
        variables.BuiltinVariable,
        variables.ConstantVariable,
        CellVariable,
        variables.ConstDictVariable,
        variables.ListVariable,
        variables.NNModuleVariable,
        NullVariable,
        variables.PythonModuleVariable,
        variables.RangeVariable,
        SizeVariable,
        variables.SymNodeVariable,
        variables.TensorVariable,
        variables.TorchInGraphFunctionVariable,
        variables.TupleVariable,
        variables.UserDefinedClassVariable,
        variables.UserDefinedObjectVariable,
    )
)


def leave_out(tx: InstructionTranslatorBase) -> bool:
    """
    Called where a loop breaks the graph, and upstream skips the frame. Returns whether there
    may be something to compile before the loop, which check is asked about.
    """
    root = tx.output.root_tx
    if root is None:
        return False
    code_context.get_context(root.f_code)[IS_LEFT_OUT] = True
    return True


def is_left_out(code: types.CodeType) -> bool:
    """
    Whether upstream skips the frame: it does not try to compile what comes before the loop,
    and so does not fail.
    """
    return code_context.has_context(code) and code_context.get_context(code).get(
        IS_LEFT_OUT, False
    )


def check(tx: InstructionTranslatorBase) -> None:
    """
    Called where a graph is complete, of what comes before the loop, or of a call for which it
    does not break the graph.

    Raises:
        SkipFrame: upstream skips the frame, and compiled it may differ.
    """
    if is_left_out(tx.f_code):
        skip_if_different(tx)


def skip_if_different(root: InstructionTranslatorBase) -> None:
    """
    Raises:
        SkipFrame: there is an obstacle, which is logged.
    """
    if (reason := next(obstacles(root), None)) is not None:
        log.info("%s: not compiled: %s", root.f_code.co_name, reason)
        raise SkipFrame(f"compiled, it may differ: {reason}")


def obstacles(root: InstructionTranslatorBase) -> Iterator[str]:
    """Why a frame is skipped, if it is, of what was traced by now."""
    output = root.output
    yield from of_code(root)
    for opname, arg, top in output.traced:
        is_plain_intrinsic = opname == "CALL_INTRINSIC_1" and arg in PLAIN_INTRINSICS
        if opname not in PLAIN_OPNAMES and not is_plain_intrinsic:
            yield f"{opname} is traced"
        if opname == "BINARY_OP" and dis._nb_ops[arg][0] == "NB_INPLACE_MULTIPLY":  # type: ignore[attr-defined]
            # A list's is lost.
            yield "something is multiplied in place"
        if opname.startswith("FORMAT") and (
            top is not variables.ConstantVariable or (arg or 0) & FORMAT_WITH_SPEC
        ):
            # The text of a number that varies may be the number.
            yield "a number is formatted"
    yield from of_calls(output.called)
    for code in output.tracing_context.previously_inlined_functions:
        yield from of_names(code)
        # Upstream does not compile its frame either, where it is not inlined.
        if handles_exceptions(code):
            yield f"{code.co_name} may handle an exception"
    yield from of_graph(output.graph)
    values = [*root.symbolic_locals.values(), *root.stack]
    yield from of_values(output.side_effects, values)
    for value in output.variable_tracker_cache.values():
        yield from of_input(value)


def of_calls(called: Sequence[VariableTracker]) -> Iterator[str]:
    for fn in called:
        if isinstance(fn, variables.BuiltinVariable) and fn.fn not in PLAIN_BUILTINS:
            yield f"{fn.fn} is called"
        if isinstance(fn, variables.UserDefinedClassVariable) and (
            type(fn.value) is not type or hasattr(fn.value, "__del__")
        ):
            yield f"a {fn.value.__name__} may be made in another way, or noticed when it dies"
        if isinstance(fn, variables.TorchInGraphFunctionVariable) and (
            tracing_state_functions().get(fn.value)
        ):
            yield "it asks whether it is compiled"


def of_code(root: InstructionTranslatorBase) -> Iterator[str]:
    code = root.f_code
    yield from of_names(code)
    arguments = inspect.getargs(code)
    names = OrderedSet([*arguments.args, arguments.varargs, arguments.varkw])
    for inst in traced(root):
        handler = inst.exn_tab_entry
        # SETUP_* up to Python 3.10.
        if inst.opname in ("SETUP_FINALLY", "SETUP_WITH") or (
            handler is not None and handler.target.opname == "PUSH_EXC_INFO"
        ):
            yield "an exception may be handled"
        if inst.opname == "DELETE_FAST" and inst.argval in names:
            # It would be there again.
            yield f"{inst.argval} is deleted"


def of_names(code: types.CodeType) -> Iterator[str]:
    for name in OPAQUE_NAMES.intersection(code.co_names):
        yield f"it reads {name}"


def traced(root: InstructionTranslatorBase) -> Sequence[Instruction]:
    """Those before the current one, and the rest of a loop that it lies in."""
    pointer = root.instruction_pointer
    end = len(root.instructions) if pointer is None else pointer - 1
    index = {id(inst): i for i, inst in enumerate(root.instructions)}
    for i, inst in enumerate(root.instructions):
        if inst.target is not None and index[id(inst.target)] <= min(i, end):
            end = max(end, i)
    return root.instructions[:end]


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
        argument = node.meta.get("grapharg")
        if (
            node.target is numpy_attr_wrapper
            or isinstance(node.target, as_numpy)
            or isinstance(getattr(argument, "source", None), NumpyTensorSource)
        ):
            # Its scalars, dtypes, views, warnings and draws are others.
            yield f"{node.name} is NumPy's"
        if node.target is torch._assert_async:
            yield "a tensor is asserted, and raises another exception"
        if (
            node.op == "call_function"
            and "example_value" not in node.meta
            and not isinstance(node.target, OPERATORS)
            and node.target not in EFFECTS
        ):
            # Settings have no value. They are made while the graph is compiled, and no more
            # when it is called.
            yield f"{node.name} is called for its effect"
        if draws(node):
            # Inductor draws other numbers than the operator does.
            yield f"{node.name} is random"
        if writes_an_input(node):
            # If the graph raises then, it is not written.
            yield f"{node.name} writes an input"
        value = node.meta.get("example_value")
        if (
            node.op == "call_function"
            and node.target is not torch.sym_float
            and isinstance(value, torch.SymFloat)
        ):
            yield SUMS
        if (
            node.op.startswith("call_")
            and isinstance(value, torch.Tensor)
            and value.requires_grad
        ):
            # The graph has one backward, which is called once, and is not differentiated.
            yield f"{node.name} requires a gradient"


def draws(node: torch.fx.Node) -> bool:
    """Not seen: what draws in another operator, as torch.lstm does with dropout."""
    if not node.op.startswith("call_"):
        return False
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        target = target.overloadpacket
    name = getattr(target, "__name__", str(target))
    if "dropout" in name:
        return argument(node, 2, "training", True) is not False
    if name == "scaled_dot_product_attention":
        return argument(node, 4, "dropout_p", 0.0) != 0
    if name == "multi_head_attention_forward":
        training = argument(node, 13, "training", True)
        return training is not False and argument(node, 10, "dropout_p", 0.0) != 0
    operator = getattr(torch.ops.aten, name, None)
    return target in DRAWING or (
        name not in ("lstm", "gru", "rnn_relu", "rnn_tanh")
        and isinstance(operator, torch._ops.OpOverloadPacket)
        and any(
            torch.Tag.nondeterministic_seeded in getattr(operator, overload).tags
            for overload in operator.overloads()
        )
    )


def argument(node: torch.fx.Node, place: int, name: str, default: Any) -> Any:
    given = node.args[place] if len(node.args) > place else default
    return node.kwargs.get(name, given)


def writes_an_input(node: torch.fx.Node) -> bool:
    """Not seen: a write to a view of one, or of several by a foreach operator."""
    name = getattr(node.target, "__name__", str(node.target))
    written = node.kwargs.get("out", node.args[0] if node.args else None)
    is_write = (
        "out" in node.kwargs
        or (name.endswith("_") and not name.endswith("__"))
        or node.target in IN_PLACE
    )
    return is_write and isinstance(written, torch.fx.Node) and written.op == "placeholder"


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
            yield from of_new(value)
    yield from of_views(
        value.as_proxy().node
        for value in found
        if type(value) is variables.TensorVariable and value.source is None
    )


def of_views(nodes: Iterable[torch.fx.Node]) -> Iterator[str]:
    """Of what the graph computes and returns; see "Found in torch.compile itself"."""
    found: dict[tuple[Any, ...], torch.fx.Node] = {}
    for node in nodes:
        tensor = node.meta.get("example_value")
        if type(tensor) is not FakeTensor or tensor.layout != torch.strided:
            continue
        base = tensor._base
        if base is not None and not base.is_contiguous():
            yield f"{node.name} is a view, and may get other strides"
        numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
        # A SymInt has no hash.
        sizes = [n.node.expr if isinstance(n, torch.SymInt) else n for n in numbers]
        key = (tensor.untyped_storage()._cdata, tensor.dtype, *sizes)
        if found.setdefault(key, node) is not node:
            yield f"{node.name} and {found[key].name} would be one tensor"


def of_new(value: VariableTracker) -> Iterator[str]:
    name = value.python_type_name()
    # A slice of tensors, too.
    if type(value) not in REBUILT and not isinstance(value, variables.SliceVariable):
        yield f"a {name} ({type(value).__name__}) is not made again as it was"
    if isinstance(value, variables.SymNodeVariable) and not isinstance(
        value.sym_num, (int, torch.SymInt, torch.SymBool)
    ):
        yield SUMS


def of_input(value: VariableTracker) -> Iterator[str]:
    """What no guard asks for."""
    if isinstance(value, variables.LazyVariableTracker):
        if not value.is_realized():
            return
        value = value.realize()
    if isinstance(value, (SetVariable, UserDefinedSetVariable)):
        yield "a set has an order"
    keys = value.items if isinstance(value, variables.ConstDictVariable) else ()
    for number in (value, *(key.vt for key in keys)):
        if (
            isinstance(number, variables.ConstantVariable)
            and isinstance(number.value, float)
            and number.value == 0
        ):
            yield "a number is zero, and has a sign"


def is_plain(cls: type, attributes: dict[str, Any]) -> bool:
    """Whether setting these of an object of the class has no other effect."""
    return cls.__setattr__ is object.__setattr__ and not any(
        hasattr(inspect.getattr_static(cls, name, None), "__set__")
        for name in attributes
    )
