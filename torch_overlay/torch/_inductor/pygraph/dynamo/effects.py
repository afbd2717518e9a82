"""
Calls of print, loggers and warnings.warn behind the graph.

Dynamo breaks the graph at these calls. PyGraph queues them, and bytecode makes them when the graph has run: in program
order, with the values that the arguments had at the call, and with the file, line and function of the call site. A
graph break is such a point, too. Eager mode cannot be told from this if

- the text of the arguments is that of plain values and of tensors, which nothing but the graph computes. The text of a
  tensor that requires a gradient names its history, which compiled code changes
- the rest of the graph does not raise for the values of its tensors: the text would be lost
- no with statement or handler of exceptions is around the call
- a warning that a filter makes an error finds what it would find: no object was changed before the call, since bytecode
  changes objects last, and no input is written after it
- a filter or a handler of the program's own finds what it would find: no object was changed before the call. What a handler
  changes, the frame may have read before
- the frame does not change how tensors are printed
- behind a call that may raise, the frame draws no number from Python's generator: bytecode draws them in front of the graph

At other calls the graph breaks.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import logging
import random
import types
import warnings
from typing import Any, NoReturn, TYPE_CHECKING

import torch
from torch._dynamo import variables
from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.exc import RestartAnalysis
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew, VariableTracker
from torch._dynamo.variables.ctx_manager import ContextWrappingVariable, GradModeVariable
from torch._dynamo.variables.functions import LocalGeneratorObjectVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import SizeVariable
from torch._dynamo.variables.misc import GetAttrVariable, LoggingLoggerVariable, StringFormatVariable
from torch._inductor.pygraph.dynamo.breaks import Breaks, broken, frames_of, refuse
from torch._inductor.pygraph.dynamo.flow import flow_of
from torch._inductor.pygraph.dynamo.operators import (
    indices_of,
    is_of_input,
    is_total,
    may_write,
    name_of,
    storage_of,
    writes_statistics,
)
from torch._inductor.pygraph.types.reason import Code, Reason
from torch._tensor_str import PRINT_OPTS
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from typing_extensions import Self

    from torch._dynamo.codegen import PyCodegen
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._inductor.pygraph.dynamo.breaks import Call


LOGGERS = (logging.Logger, logging.RootLogger)
METHODS = frozenset(("debug", "info", "warning", "error", "critical"))

# Modules whose handlers and formatters read no state of the program. A handler without a formatter has None, of builtins.
PYTHONS = ("logging", "logging.handlers", "builtins")

# Arguments of print that are no text. With a file, another object gets the text.
OPTIONS = frozenset(("sep", "end", "flush"))

# Instructions of code that handles exceptions, in one of the versions of Python
HANDLERS = ("PUSH_EXC_INFO", "SETUP_FINALLY", "SETUP_WITH")

# Values whose text no program can change.
PLAIN = (int, float, bool, str, type(None))
SEQUENCES = (variables.TupleVariable, variables.ListVariable, SizeVariable)


class FromSource(VariableTracker):
    """A plain value that is read in each call, without a guard of the value."""

    def reconstruct(self, codegen: PyCodegen) -> None:
        codegen(self.source)


class CallSite(VariableTracker):
    """The function of this name, which calls another one from the call site."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def reconstruct(self, codegen: PyCodegen) -> None:
        codegen.append_output(codegen.create_load_global(self.name, add=True))


class Rebuilt(VariableTracker):
    """What the function of this name makes of values."""

    def __init__(self, name: str, values: Sequence[VariableTracker]) -> None:
        super().__init__()
        self.name = name
        self.values = values

    def reconstruct(self, codegen: PyCodegen) -> None:
        codegen.add_push_null(lambda: CallSite(self.name).reconstruct(codegen))
        codegen.foreach(self.values)
        codegen.extend_output(create_call_function(len(self.values), False))


@dataclasses.dataclass
class Written:
    """
    Memory that nodes of the graph behind a queued call write.

    Attributes:
        inputs: whether they write inputs
        unversioned: memory that has an alias with a version of its own, as ``x.data`` is
    """

    inputs: bool
    unversioned: OrderedSet[int | None]


@dataclasses.dataclass
class Text:
    """A tensor whose text is wanted. ``copy`` has its values at the call. Without ``version`` only that is read."""

    tensor: variables.TensorVariable
    copy: variables.TensorVariable
    version: int | None

    @property
    def is_named(self) -> bool:
        """Whether the text names more than values: a copy is no leaf, and no parameter."""
        tensor = self.tensor
        return tensor.source is not None and (tensor.requires_grad or tensor.class_type is not torch.Tensor)

    def value(self, written: Written) -> variables.TensorVariable:
        """Return what has the values of the call behind the graph."""
        tensor = self.tensor
        node = tensor.as_proxy().node
        # Inputs that share memory need not share a version.
        may_differ = written.inputs and (tensor.source is not None or is_of_input(node))
        may_differ |= storage_of(node) in written.unversioned
        return self.copy if may_differ or self.version != version_of(tensor) else tensor


@dataclasses.dataclass
class Effect:
    """
    Attributes:
        code, instruction: where the call is
        last: the graph's last node before the call
        versions: of the graph's inputs at the call
        num_drawn: how many of Python's random numbers the frame had drawn at the call
        values: what bytecode passes, complete when the graph is
        texts: the tensors among the values
        makers: each returns a value, given what was written since the call
    """

    code: types.CodeType
    instruction: int
    last: torch.fx.Node
    versions: int
    num_drawn: int
    may_raise: bool
    values: list[VariableTracker]
    texts: list[Text] = dataclasses.field(default_factory=list)
    makers: list[Callable[[Written], VariableTracker]] = dataclasses.field(default_factory=list)

    @classmethod
    def at(cls, tx: InstructionTranslatorBase, *args: Any, **kwargs: Any) -> Self:
        graph, num_drawn = tx.output.graph, len(tx.output.random_calls)
        return cls(tx.f_code, tx.instruction_pointer, last_node(graph), versions_of(graph), num_drawn, *args, **kwargs)

    def allows(self, node: torch.fx.Node) -> bool:
        """Return whether a node may follow the call in the graph."""
        # Later calls that need the GPU raise if a kernel found an error. So the effect must not read tensors.
        return is_total(node) or not (self.may_raise or self.texts or may_raise(node))

    def undo_draws(self, tx: InstructionTranslatorBase, drawn: Sequence[torch.fx.Node]) -> bool:
        """Let the call set the generator back if it raises: all that bytecode draws follows it. Return whether it does."""
        return False

    def complete(self, tx: InstructionTranslatorBase, copies: OrderedSet[torch.fx.Node]) -> None:
        """Change the complete graph for the call."""


class Effects(Breaks):
    def __init__(self) -> None:
        super().__init__()
        self.queue: list[Effect] = []
        # The graph's last node at the frame's latest call
        self.checked: torch.fx.Node | None = None

    def on_call(self, tx: InstructionTranslatorBase, fn: VariableTracker) -> None:
        """Raises RestartAnalysis: a call cannot be made behind what follows it."""
        super().on_call(tx, fn)
        # What a call made that still runs may be left to a frame of its own.
        if not self.queue or tx is not tx.output.root_tx:
            return
        last = last_node(tx.output.graph)
        for effect in self.queue:
            check_nodes(effect, nodes_until((effect.last, self.checked), last), self._copies())
        self.checked = last

    def _copies(self) -> OrderedSet[torch.fx.Node]:
        return OrderedSet(text.copy.as_proxy().node for effect in self.queue for text in effect.texts)

    def call_behind(self, tx: InstructionTranslatorBase, call: Call) -> VariableTracker | None:
        """Return what the call returns, or None if it cannot be made behind the graph."""
        warns = is_warning(call)
        if not warns and not is_effect(call) or not may_defer(tx, may_raise=warns or runs_own_code(call.fn)):
            return None
        if not all(has_text(tx, value) for value in call.values):
            refuse(tx, Code.NOT_PLAIN)
            return None
        self.call_later(tx, Effect.at(tx, warns, [call.fn]), call_from(tx, call), call.values)
        return variables.ConstantVariable.create(None)

    def call_later(
        self,
        tx: InstructionTranslatorBase,
        effect: Effect,
        call: Callable[..., None],
        values: Sequence[VariableTracker],
    ) -> None:
        """Let bytecode call ``call`` with the effect's values and with these, which it keeps as they are now."""
        output = tx.output
        effect.makers = [self._snapshot(tx, value, effect.texts) for value in values]
        name = output.install_global("__effect", torch._dynamo.disable(call))
        output.root_tx.debug_locals.append((CallSite(name), effect.values))
        self.queue.append(effect)

    def _snapshot(
        self, tx: InstructionTranslatorBase, value: VariableTracker, texts: list[Text]
    ) -> Callable[[Written], VariableTracker]:
        """Keep the text that a value has now."""
        if is_unread(value):
            source = value.source
            install_guard(source.make_guard(GuardBuilder.TYPE_MATCH))
            return lambda written: FromSource(source=source)
        value = value.realize()
        if isinstance(value, variables.TensorVariable):
            is_detached = value.requires_grad and value.source is None
            of_values = value.call_method(tx, "detach", [], {}) if is_detached else value
            copy = of_values.call_method(tx, "clone", [], {})
            text = Text(value, copy, None if is_detached else version_of(value))
            texts.append(text)
            return text.value
        if isinstance(value, StringFormatVariable):
            args = [self._snapshot(tx, v, texts) for v in value.sym_args]
            kwargs = {k: self._snapshot(tx, v, texts) for k, v in value.sym_kwargs.items()}
            return lambda written: StringFormatVariable(
                value.format_string, [make(written) for make in args], {k: make(written) for k, make in kwargs.items()}
            )
        if isinstance(value, Rebuilt):
            parts = [self._snapshot(tx, v, texts) for v in value.values]
            return lambda written: Rebuilt(value.name, [make(written) for make in parts])
        if type(value) in SEQUENCES:
            items = [self._snapshot(tx, v, texts) for v in value.items]
            return lambda written: type(value)([make(written) for make in items])
        return lambda written: value

    def check_effects(self, tx: InstructionTranslatorBase, drawn_in_front: Sequence[torch.fx.Node]) -> None:
        """Decide what bytecode passes. Raises RestartAnalysis: a call cannot be made behind the complete graph."""
        graph = tx.output.graph
        copies = self._copies()
        side_effects = tx.output.side_effects
        options = side_effects.id_to_variable.get(id(PRINT_OPTS))
        changes_options = options is not None and side_effects.is_modified(options)
        for effect in self.queue:
            if changes_options and effect.texts:
                break_before(effect, Reason.of(Code.BEHIND_A_CHANGE))
            written = written_behind(effect, graph)
            if (written.inputs and effect.may_raise) or any(t.is_named and t.value(written) is t.copy for t in effect.texts):
                break_before(effect, Reason.of(Code.BEFORE_A_WRITE))
            following = [*nodes_after(effect.last)]
            check_nodes(effect, following, copies)
            if effect.may_raise and has_changed_objects(tx) and (node := next(filter(may_raise, following), None)):
                # If the operator raises, bytecode does not make these changes. A break at the check puts the operator into a later graph.
                break_before(effect, Reason.of(Code.BEFORE_AN_ERROR, op=name_of(node)))
            # Where the call raises, eager mode has not drawn.
            if effect.may_raise and (number := drawn_by_python(tx, effect)) is not None:
                break_before(effect, Reason.of(Code.BEFORE_AN_ERROR, op=number))
            drawn = [node for node in following if node in drawn_in_front]
            # Where the call raises, eager mode draws no number.
            if effect.may_raise and drawn and (len(drawn) < len(drawn_in_front) or not effect.undo_draws(tx, drawn)):
                break_before(effect, Reason.of(Code.BEFORE_AN_ERROR, op=name_of(drawn[0])))
            effect.values += [make(written) for make in effect.makers]
        for effect in self.queue:
            effect.complete(tx, copies)
        for effect in self.queue:
            written = written_behind(effect, graph)
            for text in effect.texts:
                node = text.copy.as_proxy().node
                if text.value(written) is text.tensor and not node.users:
                    graph.erase_node(node)
        self.queue = []


def may_raise(node: torch.fx.Node) -> bool:
    """Return whether a node may raise on the host. A kernel that finds an index out of bounds raises nothing there."""
    if is_total(node):
        return False
    found = indices_of(node)
    return not found or not all(i.meta["example_value"].is_cuda for i in found)


def check_nodes(effect: Effect, nodes: Iterable[torch.fx.Node], copies: OrderedSet[torch.fx.Node]) -> None:
    """Raises RestartAnalysis: the call cannot be made behind one of the nodes."""
    for node in nodes:
        if node not in copies and not effect.allows(node):
            break_before(effect, Reason.of(Code.BEFORE_AN_ERROR, op=name_of(node) or node.name))


def break_before(effect: Effect, reason: Reason) -> NoReturn:
    broken(effect.code)[effect.instruction] = reason
    raise RestartAnalysis(restart_reason="a call cannot be made behind the graph")


def may_defer(tx: InstructionTranslatorBase, *, may_raise: bool) -> bool:
    """Return whether a call may be made behind the graph, as far as the frame tells."""
    if not is_traced_alone(tx):
        return False
    if (reason := broken(tx.f_code).get(tx.instruction_pointer)) is not None:
        refuse(tx, reason.code, **reason.details)
    elif not is_free(tx):
        refuse(tx, Code.IN_HANDLER)
    elif may_raise and has_changed_objects(tx):
        refuse(tx, Code.BEHIND_A_CHANGE)
    else:
        return True
    return False


def is_effect(call: Call) -> bool:
    fn = call.fn
    if isinstance(fn, variables.BuiltinVariable):
        return fn.fn is print and OPTIONS.issuperset(call.kwargs)
    if isinstance(fn, GetAttrVariable) and isinstance(fn.obj, LoggingLoggerVariable):
        logger = fn.obj.value
        return (
            type(logger) in LOGGERS
            and (fn.name in METHODS or is_once(getattr(logging.Logger, fn.name, None)))
            and fn.name not in logger.__dict__
            and fn.obj.source is not None
            and not call.kwargs
            and not torch._dynamo.config.ignore_logging_functions
        )
    return False


def runs_own_code(fn: VariableTracker) -> bool:
    """Return whether a logger has filters, or handlers or formatters that are not Python's."""
    logger = fn.obj.value if isinstance(fn, GetAttrVariable) else None
    while logger is not None:
        of_handlers = [part for handler in logger.handlers for part in (handler, handler.formatter)]
        filters = [f for owner in (logger, *logger.handlers) for f in owner.filters]
        if filters or any(type(part).__module__ not in PYTHONS for part in of_handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def is_once(method: object) -> bool:
    """Return whether a method of loggers, as transformers adds them, logs what it is given if that is new."""
    wrapped = getattr(method, "__wrapped__", None)
    return (
        type(method) is functools._lru_cache_wrapper
        and isinstance(wrapped, types.FunctionType)
        and wrapped.__closure__ is None
        and len(wrapped.__code__.co_names) == 1
        and METHODS.issuperset(wrapped.__code__.co_names)
        and not any(inst.opname in ("LOAD_GLOBAL", "LOAD_NAME") for inst in dis.get_instructions(wrapped))
    )


def is_warning(call: Call) -> bool:
    """Return whether a call warns with a text and, if at all, a category of Python's."""
    fn = call.fn.realize()
    if not isinstance(fn, variables.SkipFunctionVariable) or fn.value is not warnings.warn:
        return False
    if not call.args or not {"category"}.issuperset(call.kwargs):
        return False
    message, *categories = (value.realize() for value in call.values)
    is_text = isinstance(message, StringFormatVariable) or (
        isinstance(message, variables.ConstantVariable) and type(message.value) is str
    )
    return is_text and all(map(is_category, categories))


def is_category(value: VariableTracker) -> bool:
    return (
        isinstance(value, variables.BuiltinVariable)
        and isinstance(category := value.as_python_constant(), type)
        and issubclass(category, Warning)
    )


def has_changed_objects(tx: InstructionTranslatorBase) -> bool:
    """Return whether bytecode changes objects of the caller behind the graph."""
    side_effects = tx.output.side_effects
    return any(
        side_effects.is_modified(value)
        and not isinstance(value.mutation_type, (AttributeMutationNew, ValueMutationNew))
        and not is_restored(side_effects, value)
        for value in side_effects.id_to_variable.values()
    )


def is_restored(side_effects: SideEffects, item: VariableTracker) -> bool:
    """Return whether the attributes of an object have the values again that they had before. Guards on those."""
    if not isinstance(item, variables.UserDefinedObjectVariable) or item.is_underlying_vt_modified(side_effects):
        return False
    before, now = getattr(item.value, "__dict__", {}), side_effects.store_attr_mutations.get(item, {})
    is_same = item.source is not None and all(
        type(value) is variables.ConstantVariable
        and name in before
        and not hasattr(type(item.value), name)
        and type(before[name]) is type(value.value) in (int, bool, str, type(None))
        and before[name] == value.value
        for name, value in now.items()
    )
    if is_same:
        for name in now:
            install_guard(AttrSource(item.source, name).make_guard(GuardBuilder.CONSTANT_MATCH))
    return is_same


def is_traced_alone(tx: InstructionTranslatorBase) -> bool:
    """Return whether bytecode can call something behind the graph."""
    output = tx.output
    return not (
        output.export
        # Another process would not find the function that bytecode calls.
        or output.package is not None
        or output.current_tracer is not output.root_tracer
        or torch._dynamo.config.nested_graph_breaks
        or torch._C._functorch.peek_interpreter_stack() is not None
        or has_generator(tx)
    )


def has_generator(tx: InstructionTranslatorBase) -> bool:
    """
    Return whether Dynamo may run a generator otherwise than eager mode. Where bytecode has to make a generator, Dynamo runs
    it to its end. Where a loop leaves a generator, Dynamo does not run its ``finally``. At a graph break, stock skips the frame.
    """
    frames = frames_of(tx)
    return tx.output.current_tracer.is_reconstructing_generator or any(handles_in_generator(f) for f in frames)


def handles_in_generator(frame: InstructionTranslatorBase) -> bool:
    """Return whether a frame has a generator that has not ended, and that has a handler of exceptions."""
    found: list[VariableTracker] = []
    VariableTracker.visit(found.append, [frame.stack, frame.symbolic_locals])
    # isinstance would read lazy values.
    tracers = [v.inline_tracer for v in found if issubclass(type(v), LocalGeneratorObjectVariable)]
    return any(
        not tracer.generator_exhausted and (has_handler(tracer.f_code) or handles_in_generator(tracer))
        for tracer in tracers
    )


def has_handler(code: types.CodeType) -> bool:
    return any(inst.opname in HANDLERS for inst in dis.get_instructions(code))


def is_free(tx: InstructionTranslatorBase) -> bool:
    """Return whether no handler of exceptions or context, but for a gradient mode, is around the current instruction."""
    blocks = (block for frame in frames_of(tx) for block in frame.block_stack)
    return all(isinstance(block.with_context, GradModeVariable) for block in blocks) and not is_handled(tx)


def is_handled(tx: InstructionTranslatorBase) -> bool:
    """Return whether code of the program would see an exception that the current instruction raises."""
    return any(map(handles_errors, frames_of(tx)))


def handles_errors(frame: InstructionTranslatorBase) -> bool:
    blocks = frame.block_stack
    if not all(isinstance(block.with_context, ContextWrappingVariable) for block in blocks):
        return True
    # From Python 3.11 on, the blocks are those of with statements only.
    entry = frame.current_instruction.exn_tab_entry
    if entry is None or any(block.target is entry.target for block in blocks):
        return False
    return not flow_of(frame.f_code).is_comprehension(frame.indexof[frame.current_instruction])


def has_text(tx: InstructionTranslatorBase, value: VariableTracker, *, is_formatted: bool = False) -> bool:
    """Return whether the text of a value is that of eager mode, behind the graph as well."""
    if is_unread(value):
        return True
    if isinstance(value, LazyVariableTracker):
        value = value.realize()
    if type(value) is variables.ConstantVariable:
        return type(value.value) in PLAIN
    if isinstance(value, variables.BuiltinVariable):
        return is_category(value)
    if type(value) is variables.SymNodeVariable:
        return isinstance(value.sym_num, torch.SymInt)
    if type(value) is variables.TensorVariable:
        example = value.as_proxy().node.meta.get("example_value")
        if value.class_type is not torch.Tensor and value.source is None or example is None:
            return False
        # Formatted, the element of a tensor is a number.
        return not value.requires_grad or value.source is not None or (is_formatted and example.dim() == 0)
    if isinstance(value, StringFormatVariable):
        parts = (*value.sym_args, *value.sym_kwargs.values())
        return all(has_text(tx, part, is_formatted=True) for part in parts)
    return type(value) in SEQUENCES and all(has_text(tx, item) for item in value.items)


def is_unread(value: VariableTracker) -> bool:
    """Return whether a value is a plain one that the frame did not look at."""
    return (
        isinstance(value, LazyVariableTracker)
        and not value.is_realized()
        and value.source is not None
        and value.peek_type() in PLAIN
    )


def version_of(tensor: variables.TensorVariable) -> int:
    return tensor.as_proxy().node.meta["example_value"]._version


def versions_of(graph: torch.fx.Graph) -> int:
    """Return a number that grows if the graph writes an input."""
    inputs = (node.meta.get("example_value") for node in graph.nodes if node.op == "placeholder")
    versions = (t._version for t in inputs if isinstance(t, torch.Tensor))
    return sum(versions) + sum(map(writes_statistics, graph.nodes))


def written_behind(effect: Effect, graph: torch.fx.Graph) -> Written:
    """Return which memory nodes of the graph behind a queued call write."""
    of_data = OrderedSet(storage_of(node) for node in graph.nodes if name_of(node) == "_get_data_attr")
    if not of_data:
        return Written(versions_of(graph) != effect.versions, OrderedSet())
    memory = OrderedSet(storage_of(operand) for node in nodes_after(effect.last) for operand in may_write(node))
    unversioned = memory & of_data
    inputs = (storage_of(node) for node in graph.nodes if node.op in ("placeholder", "get_attr"))
    return Written(versions_of(graph) != effect.versions or any(i in unversioned for i in inputs), unversioned)


def drawn_by_python(tx: InstructionTranslatorBase, effect: Effect) -> str | None:
    """Return a function of Python's generator that the frame calls behind an effect, by its name, or None."""
    functions = (function for function, *_ in tx.output.random_calls[effect.num_drawn :])
    return next((f.__name__ for f in functions if isinstance(getattr(f, "__self__", None), random.Random)), None)


def last_node(graph: torch.fx.Graph) -> torch.fx.Node:
    return graph._root.prev


def nodes_after(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    while (node := node.next).op != "root":
        yield node


def nodes_until(first: Sequence[torch.fx.Node | None], last: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Yield ``last`` and the nodes before it, down to one of ``first``."""
    while last not in first and last.op != "root":
        yield last
        last = last.prev


def call_from(tx: InstructionTranslatorBase, call: Call) -> Callable[..., None]:
    """Return a function that calls its first argument from the call site."""
    num_args, names = len(call.args), tuple(call.kwargs)

    def call_again(fn: Callable[..., Any], *values: Any) -> None:
        fn(*values[:num_args], **dict(zip(names, values[num_args:])))

    code = tx.f_code
    positions = tx.current_instruction.positions
    line = positions and positions.lineno or tx.lineno
    # The call is in the line below the first one.
    at_site = call_again.__code__.replace(co_filename=code.co_filename, co_name=code.co_name, co_firstlineno=line - 1)
    return types.FunctionType(at_site, tx.f_globals, code.co_name, None, call_again.__closure__)
