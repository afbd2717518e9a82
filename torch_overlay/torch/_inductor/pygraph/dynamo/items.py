"""
The value of a tensor on the CPU, ``s.item()``, as a float that varies.

Dynamo breaks the graph where the host reads a tensor. But what a 0-d input on the CPU has is
known before the graph runs, unless the graph writes to it first: bytecode reads it in each
call, and gives the graph what it gives it for a Python float that varies, a tensor of its
own. That is delivered to the GPU, and the tensor that was read may be written to as soon as
the call returns, whatever a backward needs.

Nothing is compiled for one value: arithmetic of tensors is the same for all of them. The
symbol that stands for the value while Dynamo traces can do more, but not always what Python
does, as sympy orders sums and products anew; and where a program branches on it, or makes
something of it on the host, there would be a guard of it. If the graph turns out to hold
such a use, the frame is analysed again, and breaks at item() as it does without PyGraph.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from typing import TYPE_CHECKING

import torch
from torch._dynamo.exc import RestartAnalysis, TensorifyScalarRestartAnalysis
from torch._dynamo.source import CallMethodItemSource
from torch._dynamo.symbolic_convert import TensorifyState
from torch._inductor.pygraph.dynamo.prefix import obstacles
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import sympy

    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable


# Stands for the value while it is traced.
HINT = 1.25

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# What the value may be an operand of, beside a tensor: arithmetic that
# tensorify_python_scalars makes arithmetic of tensors from.
FUNCTIONS = OrderedSet(
    [
        operator.add,
        operator.mul,
        operator.sub,
        operator.truediv,
        torch.add,
        torch.div,
        torch.mul,
        torch.sub,
    ]
)
IN_PLACE = OrderedSet(
    [operator.iadd, operator.imul, operator.isub, operator.itruediv]
)
METHODS = OrderedSet(["add", "div", "mul", "sub"])
IN_PLACE_METHODS = OrderedSet(["add_", "div_", "mul_", "sub_"])


@dataclasses.dataclass
class Item:
    variable: SymNodeVariable
    # Of the same value; a tensor of float64 has one already.
    symbols: OrderedSet[sympy.Symbol]
    # Whether upstream breaks the graph there, and does not skip the frame.
    is_break: bool

    @property
    def symbol(self) -> sympy.Symbol:
        return symbol_of(self.variable.sym_num)


def wrap_item(
    tx: InstructionTranslatorBase, tensor: TensorVariable
) -> SymNodeVariable | None:
    """The value of ``tensor`` as an input of the graph, None if it can not be one."""
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.tensor import SymNodeVariable

    output = tx.output
    if (
        not is_cpu_float_input(tx, tensor)
        or tensor.source.name in tx.speculation_log.graph_break_on_items
        or may_be_written(output.graph)
    ):
        return None
    root = output.root_tx
    is_break = (
        root is not None
        and root.should_compile_partial_graph()
        and not root.maybe_has_backedge()
    )
    if (known := output.items.get(tensor.source.name)) is not None:
        known.is_break &= is_break
        return known.variable
    source = CallMethodItemSource(tensor.source)
    variable = VariableBuilder(tx, source).wrap_symfloat(HINT)
    if not isinstance(variable, SymNodeVariable):
        return None
    # There shall be no guard, not even that it is no NaN, as of each float that is tracked.
    tracked = output.tracked_fakes
    symbols = OrderedSet(symbol_of(t.fake) for t in tracked if t.source == source)
    tracked[:] = [t for t in tracked if symbol_of(t.fake) not in symbols]
    item = Item(variable, symbols, is_break)
    output.items[tensor.source.name] = item
    # Of another frame's symbol of the same name.
    TensorifyState.force_specializations.discard(item.symbol.name)
    return variable


def is_cpu_float_input(tx: InstructionTranslatorBase, tensor: TensorVariable) -> bool:
    from torch._dynamo.variables.tensor import TensorVariable

    output = tx.output
    if (
        type(tensor) is not TensorVariable
        or tensor.source is None
        or torch._dynamo.config.specialize_float
        or output.export
        or output.current_tracer is not output.root_tracer
        or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        return False
    node = tensor.as_proxy().node
    if node.op != "placeholder" or node.graph is not output.graph:
        return False
    example = node.meta["grapharg"].example
    return (
        type(example) in (torch.Tensor, torch.nn.Parameter, FakeTensor)
        and example.device.type == "cpu"
        and example.layout == torch.strided
        and example.dtype in DTYPES
        and example.dim() == 0
    )


def may_be_written(graph: torch.fx.Graph) -> bool:
    """
    Whether the graph may have written to a tensor on the CPU by now, which may share memory
    with any other. Versions do not tell: x.data has one of its own.
    """

    def only_reads(node: torch.fx.Node) -> bool:
        if "out" in node.kwargs:
            return False
        # As methods are named.
        if node.op == "call_method":
            return not node.target.endswith("_") or not on_cpu(node.args[0])
        if node.target in IN_PLACE:
            return not on_cpu(node.args[0])
        return node.target in FUNCTIONS or node.target is operator.getitem

    return any(
        any(map(on_cpu, node.all_input_nodes))
        and node.op != "output"
        and not only_reads(node)
        for node in graph.nodes
    )


def on_cpu(arg: object) -> bool:
    if not isinstance(arg, torch.fx.Node):
        return False
    value = arg.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def check_uses(tx: InstructionTranslatorBase) -> None:
    """Called when Dynamo's graph is complete."""
    items = tx.output.items.items()
    values = {n: i.variable.proxy.node for n, i in items}
    break_at(tx, (n for n, value in values.items() if not is_operand(value)))
    break_at(tx, (n for n, value in values.items() if has_two_backwards(value)))
    skipped = [n for n, i in items if not i.is_break]
    if skipped and tx.output.root_tx is not None and any(obstacles(tx.output.root_tx)):
        break_at(tx, skipped)
    check_guards(tx)


def check_guards(tx: InstructionTranslatorBase) -> None:
    env, items = tx.output.shape_env, tx.output.items.items()
    guarded = OrderedSet(s for g in env.guards for s in g.expr.free_symbols)
    guarded |= env.replacements.keys()
    break_at(tx, (name for name, item in items if item.symbols & guarded))


def is_operand(value: torch.fx.Node) -> bool:
    """Whether all that is done to a value is arithmetic of tensors."""

    def arithmetic(node: torch.fx.Node) -> bool:
        if node.target is torch.sym_float:
            return is_operand(node)
        if node.kwargs or len(node.args) != 2:
            return False
        if node.op == "call_method":
            allowed = METHODS | IN_PLACE_METHODS
        else:
            allowed = FUNCTIONS | IN_PLACE
        operands = [arg for arg in node.args if is_real_tensor(arg)]
        if node.target in IN_PLACE | IN_PLACE_METHODS and any(
            not arg.meta["example_value"].is_floating_point() for arg in operands
        ):
            # Eager mode raises an error, where compiled code casts the result.
            return False
        return node.target in allowed and bool(operands)

    return all(map(arithmetic, value.users))


def has_two_backwards(value: torch.fx.Node) -> bool:
    """
    Whether gradients go through results in front of it and through others behind it. Of two
    graphs the program may call the one backward after the other, and ask for the gradient of
    what the first one gave.
    """
    *nodes, output = value.graph.nodes
    results = OrderedSet(output.all_input_nodes)
    is_behind = has_result = False
    for node in nodes:
        is_behind |= node is value
        requires_grad = getattr(node.meta.get("example_value"), "requires_grad", False)
        if node in results and node.op.startswith("call_") and requires_grad:
            if is_behind and has_result:
                return True
            has_result |= not is_behind
    return False


def is_real_tensor(arg: object) -> bool:
    if not isinstance(arg, torch.fx.Node):
        return False
    value = arg.meta.get("example_value")
    return type(value) is FakeTensor and (
        value.layout == torch.strided and not value.is_complex()
    )


@contextlib.contextmanager
def checked(tx: InstructionTranslatorBase) -> Iterator[None]:
    """Around the backend: when it is done, nothing may have looked at a value."""
    try:
        yield
    except TensorifyScalarRestartAnalysis:
        items = tx.output.items.items()
        specialized = TensorifyState.force_specializations
        break_at(tx, (n for n, i in items if i.symbol.name in specialized))
        raise
    check_guards(tx)


def symbol_of(fake: object) -> sympy.Symbol | None:
    # Not what it may have been replaced by.
    return fake.node._expr if isinstance(fake, torch.SymFloat) else None


def break_at(tx: InstructionTranslatorBase, names: Iterable[str]) -> None:
    names = OrderedSet(names)
    if names:
        tx.speculation_log.graph_break_on_items |= names
        raise RestartAnalysis(
            restart_reason=f"the value of {', '.join(names)} is no mere operand"
        )
