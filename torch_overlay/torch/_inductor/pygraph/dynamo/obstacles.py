"""
Frames that run eagerly without PyGraph, and why compiled code may differ there: a frame with a loop that breaks the
graph, and the code after a slice that does. PyGraph compiles them if nobody can tell the difference.

Compiled code differs from eager code in four ways:

- Side effects happen after the graph, and a graph raises outside of the frame's try statements.
- Values that the frame made are rebuilt from what Dynamo knows of them.
- Inductor computes some results in another way: random numbers, strides, sums of floats.
- Dynamo and Inductor have faults, which the frame did not have as long as it ran eagerly.

An obstacle is a construct for which one of these may matter, or that is not known to be safe. The functions below yield
the obstacles of a frame as text for the log.
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
from torch._dynamo import utils, variables
from torch._dynamo.capabilities import FrameExtension
from torch._dynamo.code_context import code_context
from torch._dynamo.exc import SkipFrame
from torch._dynamo.resume_execution import ContinueExecutionCache
from torch._dynamo.source import NumpyTensorSource
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew
from torch._dynamo.variables.dicts import SetVariable
from torch._dynamo.variables.lists import SizeVariable
from torch._dynamo.variables.misc import CellVariable, NullVariable
from torch._dynamo.variables.torch import tracing_state_functions
from torch._dynamo.variables.user_defined import UserDefinedSetVariable
from torch._inductor.pygraph.dynamo.operators import draws, is_in_place
from torch._inductor.pygraph.types.reason import Code, log_line, Reason
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    import types
    from collections.abc import Iterable, Iterator, Sequence

    from torch._dynamo.bytecode_transformation import Instruction
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker


log = logging.getLogger(__name__)

# A loop of the code breaks the graph: without PyGraph, Dynamo skips the frame.
BREAKS_IN_LOOP = "pygraph_breaks_in_loop"

# A frame of the code indexes a tensor by a slice that breaks the graph: without PyGraph, the graph breaks where the slice is
# made, and Dynamo cannot resume there. The value is the offset at which the first such frame begins, as start_of returns it.
BREAKS_AT_SLICE = "pygraph_breaks_at_slice"

# A function that names one of these reads locals by name, reads what no guard of a tensor
# checks, or changes a dictionary without a trace.
OPAQUE_NAMES = frozenset(
    ("locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe")
    + ("_base", "_version", "grad_fn", "move_to_end")
)

# Instructions that are never an obstacle. of_instruction decides on some others. The rest are obstacles: they handle
# exceptions, merge dictionaries, make sets or import.
PLAIN_OPNAMES = frozenset(
    """
    BINARY_ADD BINARY_AND BINARY_FLOOR_DIVIDE BINARY_LSHIFT BINARY_MATRIX_MULTIPLY BINARY_MODULO BINARY_MULTIPLY
    BINARY_OR BINARY_POWER BINARY_RSHIFT BINARY_SLICE BINARY_SUBSCR BINARY_SUBTRACT BINARY_TRUE_DIVIDE BINARY_XOR
    BUILD_CONST_KEY_MAP BUILD_LIST BUILD_MAP BUILD_SLICE BUILD_STRING BUILD_TUPLE CACHE CALL CALL_FUNCTION
    CALL_FUNCTION_EX CALL_FUNCTION_KW CALL_KW CALL_METHOD COMPARE_OP CONTAINS_OP COPY COPY_FREE_VARS DELETE_FAST
    DICT_MERGE DUP_TOP DUP_TOP_TWO END_FOR EXTENDED_ARG FOR_ITER GEN_START GET_ITER INPLACE_ADD INPLACE_AND
    INPLACE_FLOOR_DIVIDE INPLACE_MODULO INPLACE_OR INPLACE_SUBTRACT INPLACE_TRUE_DIVIDE IS_OP JUMP_ABSOLUTE
    JUMP_BACKWARD JUMP_BACKWARD_NO_INTERRUPT JUMP_FORWARD JUMP_IF_FALSE_OR_POP JUMP_IF_TRUE_OR_POP KW_NAMES LIST_APPEND
    LIST_EXTEND LIST_TO_TUPLE LOAD_ATTR LOAD_CLOSURE LOAD_CONST LOAD_DEREF LOAD_FAST LOAD_FAST_AND_CLEAR LOAD_FAST_CHECK
    LOAD_FAST_LOAD_FAST LOAD_GLOBAL LOAD_METHOD LOAD_SUPER_ATTR MAKE_CELL MAKE_FUNCTION NOP POP_JUMP_BACKWARD_IF_FALSE
    POP_JUMP_BACKWARD_IF_NONE POP_JUMP_BACKWARD_IF_NOT_NONE POP_JUMP_BACKWARD_IF_TRUE POP_JUMP_FORWARD_IF_FALSE
    POP_JUMP_FORWARD_IF_NONE POP_JUMP_FORWARD_IF_NOT_NONE POP_JUMP_FORWARD_IF_TRUE POP_JUMP_IF_FALSE POP_JUMP_IF_NONE
    POP_JUMP_IF_NOT_NONE POP_JUMP_IF_TRUE POP_TOP PRECALL PUSH_NULL RESUME RETURN_CONST RETURN_GENERATOR RETURN_VALUE
    ROT_FOUR ROT_N ROT_THREE ROT_TWO SET_FUNCTION_ATTRIBUTE STORE_ATTR STORE_DEREF STORE_FAST STORE_FAST_LOAD_FAST
    STORE_FAST_STORE_FAST STORE_SLICE STORE_SUBSCR SWAP TO_BOOL UNARY_INVERT UNARY_NEGATIVE UNARY_NOT UNARY_POSITIVE
    UNPACK_EX UNPACK_SEQUENCE YIELD_VALUE
    """.split()
)

# The arguments with which CALL_INTRINSIC_1 of Python 3.12 replaces UNARY_POSITIVE and LIST_TO_TUPLE.
PLAIN_INTRINSICS = (5, 6)

# How names of instructions begin that neither call nor compute.
IDLE_OPNAMES = ("CACHE", "LOAD_CONST", "LOAD_FAST", "NOP", "POP_TOP", "STORE_FAST")

# FORMAT_VALUE's flag for a format on top of the stack.
FORMAT_WITH_SPEC = 4

# Builtin functions and types that may be called.
PLAIN_BUILTINS = frozenset(
    (abs, bool, dict, divmod, enumerate, float, getattr, hasattr, int, isinstance, issubclass)
    + (iter, len, list, max, min, range, slice, str.format, super, tuple, type, zip)
)

# Nodes without a value whose effect every call has: compiled code writes elements, and bytecode
# sets the gradient mode. Operators have their effect in every call, too.
EFFECTS = (operator.setitem, torch._C._set_grad_enabled)
OPERATORS = (torch._ops.OperatorBase, torch._ops.OpOverloadPacket)

# Values that did not exist before the frame and that bytecode rebuilds as they were.
REBUILT = frozenset(
    (CellVariable, NullVariable, SizeVariable, variables.BuiltinVariable, variables.ConstantVariable)
    + (variables.ConstDictVariable, variables.ListVariable, variables.NNModuleVariable, variables.PythonModuleVariable)
    + (variables.RangeVariable, variables.SymNodeVariable, variables.TensorVariable, variables.TupleVariable)
    + (variables.TorchInGraphFunctionVariable, variables.UserDefinedClassVariable)
    + (variables.UserDefinedObjectVariable,)
)

SUMS = "a sum of floats is computed in another order"


class Traced(FrameExtension):
    """Keeps the obstacles, as text, that are seen only while Dynamo traces the frame and what it inlines."""

    def __init__(self) -> None:
        super().__init__()
        # As ordered sets
        self.instructions: dict[str, None] = {}
        self.calls: dict[str, None] = {}

    def on_instruction(self, tx: InstructionTranslatorBase, inst: Instruction) -> None:
        if inst.opname not in PLAIN_OPNAMES:
            self.instructions.update(dict.fromkeys(of_instruction(inst, tx.stack)))

    def on_call(self, tx: InstructionTranslatorBase, fn: VariableTracker) -> None:
        self.calls.update(dict.fromkeys(of_call(fn)))

    def on_break_in_loop(self, tx: InstructionTranslatorBase) -> bool:
        """Return whether PyGraph may compile the code before the loop that ``tx`` is in."""
        root = tx.output.root_tx
        if root is not None:
            code_context.get_context(root.f_code)[BREAKS_IN_LOOP] = True
        return root is not None

    def check_subgraph(self, tx: InstructionTranslatorBase) -> None:
        """Raises SkipFrame: the frame runs eagerly without PyGraph, and there is an obstacle."""
        code = tx.f_code
        if is_eager(code) and (obstacle := next(of_frame(tx, self), None)) is not None:
            reason = Reason.of(Code.EAGER, obstacle=obstacle)
            place = f"{code.co_filename}:{code.co_firstlineno}"
            log.info("%s", log_line(place, code.co_name, "runs eagerly", reason))
            raise SkipFrame(reason.text)


def is_eager(code: types.CodeType) -> bool:
    """Return whether a frame of ``code`` runs eagerly without PyGraph."""
    before = marked(original(code), BREAKS_AT_SLICE)
    return marked(code, BREAKS_IN_LOOP) is not None or (before is not None and start_of(code) > before)


def mark_slice(code: types.CodeType) -> None:
    """Note that a frame of ``code`` breaks the graph at a slice. Without PyGraph, code that resumes after it runs eagerly."""
    context = code_context.get_context(original(code))
    start = start_of(code)
    context[BREAKS_AT_SLICE] = min(start, context.get(BREAKS_AT_SLICE, start))


def marked(code: types.CodeType, mark: str) -> Any:
    return code_context.get_context(code).get(mark) if code_context.has_context(code) else None


def start_of(code: types.CodeType) -> int:
    """Return the offset in the function's code at which ``code`` resumes, or -1 for the function's code itself."""
    resumed = ContinueExecutionCache.cache.get(original(code), {})
    return next((offset for (offset, *_), part in resumed.items() if part is code), -1)


def original(code: types.CodeType) -> types.CodeType:
    """Return the function's code if ``code`` follows a graph break in it, else ``code``."""
    part = ContinueExecutionCache.generated_code_metadata.get(code)
    return code if part is None else part.code


def of_frame(root: InstructionTranslatorBase, traced: Traced) -> Iterator[str]:
    """Yield the obstacles of what was traced by now."""
    output = root.output
    if output.compile_subgraph_reason.graph_break and not output.count_calls() and returns_next(root):
        # Each call would check the guards of a frame for which no graph runs.
        yield "it computes nothing before the graph breaks, nor after"
    yield from of_code(root)
    yield from traced.instructions
    yield from traced.calls
    for code in output.tracing_context.previously_inlined_functions:
        yield from of_names(code)
        # Where it is not inlined, its frame runs eagerly without PyGraph, too.
        if handles_exceptions(code):
            yield f"{code.co_name} may handle an exception"
    yield from of_graph(output.graph)
    values = [*root.symbolic_locals.values(), *root.stack]
    yield from of_values(output.side_effects, values)
    for value in output.variable_tracker_cache.values():
        yield from of_input(value)


# Instructions and calls


def of_instruction(inst: Instruction, stack: Sequence[VariableTracker]) -> Iterator[str]:
    """Yield the obstacles of one that is not in PLAIN_OPNAMES."""
    opname, arg = inst.opname, inst.arg
    if opname == "BINARY_OP":
        if dis._nb_ops[arg][0] == "NB_INPLACE_MULTIPLY":  # type: ignore[attr-defined]
            # Dynamo loses the product of a list.
            yield "a value is multiplied in place"
    elif opname in ("FORMAT_SIMPLE", "FORMAT_VALUE"):
        with_spec = (arg or 0) & FORMAT_WITH_SPEC
        if with_spec or type(stack[-1]) is not variables.ConstantVariable:
            # Of a number that varies, the text may have the value of the first call.
            yield "a number is formatted"
    elif not (opname == "CALL_INTRINSIC_1" and arg in PLAIN_INTRINSICS):
        yield f"{opname} is traced"


def of_call(fn: VariableTracker) -> Iterator[str]:
    if isinstance(fn, variables.BuiltinVariable) and fn.fn not in PLAIN_BUILTINS:
        yield f"{fn.fn} is called"
    if isinstance(fn, variables.UserDefinedClassVariable) and (
        type(fn.value) is not type or hasattr(fn.value, "__del__")
    ):
        yield f"{fn.value.__name__} has a metaclass or a finalizer"
    if isinstance(fn, variables.TorchInGraphFunctionVariable) and (tracing_state_functions().get(fn.value)):
        yield f"{fn.value.__name__} tells compiled code from eager code"


# Code


def of_code(root: InstructionTranslatorBase) -> Iterator[str]:
    """Yield the obstacles of the frame's own bytecode, as far as it is compiled."""
    code = root.f_code
    yield from of_names(code)
    arguments = inspect.getargs(code)
    names = OrderedSet([*arguments.args, arguments.varargs, arguments.varkw])
    for inst in compiled_instructions(root):
        handler = inst.exn_tab_entry
        # SETUP_* up to Python 3.10.
        if inst.opname in ("SETUP_FINALLY", "SETUP_WITH") or (
            handler is not None and handler.target.opname == "PUSH_EXC_INFO"
        ):
            yield "an exception may be handled"
        if inst.opname == "DELETE_FAST" and inst.argval in names:
            # The argument would be back after the graph.
            yield f"{inst.argval} is deleted"


def of_names(code: types.CodeType) -> Iterator[str]:
    for name in OPAQUE_NAMES.intersection(code.co_names):
        yield f"{code.co_name} reads {name}"


def compiled_instructions(root: InstructionTranslatorBase) -> Sequence[Instruction]:
    """Return those before the current one, and the rest of the loops around it."""
    pointer = root.instruction_pointer
    end = len(root.instructions) if pointer is None else pointer - 1
    index = {id(inst): i for i, inst in enumerate(root.instructions)}
    for i, inst in enumerate(root.instructions):
        if inst.target is not None and index[id(inst.target)] <= min(i, end):
            end = max(end, i)
    return root.instructions[:end]


def returns_next(root: InstructionTranslatorBase) -> bool:
    """Return whether the frame only returns after the current instruction."""
    following = (inst.opname for inst in root.instructions[root.instruction_pointer :])
    return next((name for name in following if not name.startswith(IDLE_OPNAMES)), "").startswith("RETURN_")


def handles_exceptions(code: types.CodeType) -> bool:
    opname = "SETUP_FINALLY" if sys.version_info < (3, 11) else "PUSH_EXC_INFO"
    return any(inst.opname == opname for inst in dis.get_instructions(code))


# The graph


def of_graph(graph: torch.fx.Graph) -> Iterator[str]:
    for node in graph.nodes:
        value = node.meta.get("example_value")
        is_call = node.op.startswith("call_")
        if is_numpy(node):
            # NumPy's scalars, dtypes, views, warnings and random numbers are others.
            yield f"{node.name} is computed by NumPy"
        if node.target is torch._assert_async:
            # Compiled, it raises another exception.
            yield f"{node.name} asserts a tensor"
        if is_setting(node):
            # It would be made while the graph is compiled, and in no call.
            yield f"{node.name} is called for its effect"
        if draws(node):
            # Inductor draws other numbers than the operator.
            yield f"{node.name} is random"
        if writes_an_input(node):
            # A graph that raises does not write it.
            yield f"{node.name} writes an input"
        if node.op == "call_function" and node.target is not torch.sym_float and isinstance(value, torch.SymFloat):
            yield SUMS
        if is_call and isinstance(value, torch.Tensor) and value.requires_grad:
            # A graph has one backward, which runs once and cannot be differentiated.
            yield f"{node.name} requires a gradient"


def is_numpy(node: torch.fx.Node) -> bool:
    wrappers = (utils.numpy_method_wrapper, utils.numpy_operator_wrapper, utils.numpy_to_tensor_wrapper)
    target, source = node.target, getattr(node.meta.get("grapharg"), "source", None)
    return target is utils.numpy_attr_wrapper or isinstance(target, wrappers) or isinstance(source, NumpyTensorSource)


def is_setting(node: torch.fx.Node) -> bool:
    """Return whether the node only changes a setting. Such a node has no value."""
    return (
        node.op == "call_function"
        and "example_value" not in node.meta
        and not isinstance(node.target, OPERATORS)
        and node.target not in EFFECTS
    )


def writes_an_input(node: torch.fx.Node) -> bool:
    """Return whether the node writes an input in place, but not by a view or by a foreach operator."""
    written = node.kwargs.get("out", node.args[0] if node.args else None)
    return is_in_place(node) and isinstance(written, torch.fx.Node) and written.op == "placeholder"


# Values


def of_values(side_effects: SideEffects, values: list[VariableTracker]) -> Iterator[str]:
    """Yield the obstacles of ``values``, which the frame holds, and of its side effects."""
    if side_effects.tensor_hooks:
        yield "a hook is registered"
    for value in side_effects.id_to_variable.values():
        if not side_effects.is_modified(value):
            continue
        if not isinstance(value.mutation_type, (AttributeMutationNew, ValueMutationNew)):
            yield f"a {value.python_type_name()} of the caller is changed"
        attributes = side_effects.store_attr_mutations.get(value, {})
        # Each new tensor counts as modified, also one that nothing holds any more.
        if attributes or type(value) is not variables.TensorVariable:
            values.append(value)
        values += attributes.values()
        if type(value) is variables.UserDefinedObjectVariable:
            if not is_plain(value.value_type, attributes):
                name = value.python_type_name()
                yield f"setting an attribute of a {name} may have another effect"
    found: list[VariableTracker] = []
    variables.VariableTracker.visit(found.append, values)
    for value in found:
        if isinstance(value, variables.LazyVariableTracker):
            # It existed before the frame, which did not look at it.
            continue
        if value.source is None:
            yield from of_new(value)
    yield from of_views(
        value.as_proxy().node for value in found if type(value) is variables.TensorVariable and value.source is None
    )


def of_views(nodes: Iterable[torch.fx.Node]) -> Iterator[str]:
    """Yield the obstacles of tensors that the graph computes and returns."""
    found: dict[tuple[Any, ...], torch.fx.Node] = {}
    for node in nodes:
        tensor = node.meta.get("example_value")
        if type(tensor) is not FakeTensor or tensor.layout != torch.strided:
            continue
        base = tensor._base
        if base is not None and not base.is_contiguous():
            # Inductor may make the base contiguous.
            yield f"{node.name} is a view that may get other strides"
        numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
        # A SymInt has no hash.
        sizes = [n.node.expr if isinstance(n, torch.SymInt) else n for n in numbers]
        key = (tensor.untyped_storage()._cdata, tensor.dtype, *sizes)
        if found.setdefault(key, node) is not node:
            # AOTAutograd returns one tensor for both.
            yield f"{node.name} and {found[key].name} would be the same tensor"


def of_new(value: VariableTracker) -> Iterator[str]:
    """Yield the obstacles of a value that the frame made."""
    name = value.python_type_name()
    # Slices have a subclass, see slices.py.
    if type(value) not in REBUILT and not isinstance(value, variables.SliceVariable):
        yield f"a {name} ({type(value).__name__}) may not be rebuilt as it was"
    if isinstance(value, variables.SymNodeVariable) and not isinstance(
        value.sym_num, (int, torch.SymInt, torch.SymBool)
    ):
        yield SUMS


def of_input(value: VariableTracker) -> Iterator[str]:
    """Yield what no guard checks of a value that existed before the frame."""
    if isinstance(value, variables.LazyVariableTracker):
        if not value.is_realized():
            return
        value = value.realize()
    if isinstance(value, (SetVariable, UserDefinedSetVariable)):
        yield "the order of a set may differ"
    keys = value.items if isinstance(value, variables.ConstDictVariable) else ()
    for number in (value, *(key.vt for key in keys)):
        if isinstance(number, variables.ConstantVariable) and isinstance(number.value, float) and number.value == 0:
            yield "a float is zero, and may be -0.0"


def is_plain(cls: type, attributes: dict[str, Any]) -> bool:
    """Return whether setting these attributes of an object has no other effect."""
    return cls.__setattr__ is object.__setattr__ and not any(
        hasattr(inspect.getattr_static(cls, name, None), "__set__") for name in attributes
    )
