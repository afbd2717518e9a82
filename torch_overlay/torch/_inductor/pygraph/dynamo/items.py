"""
The value of a 0-d CPU tensor, ``tensor.item()``, as an input of the graph.

Dynamo breaks the graph where the host reads a tensor. But the value of an input on the CPU is known before the graph
runs, unless the graph writes the tensor first. Bytecode reads it in each call and passes it as Dynamo passes a Python
float that varies: as a tensor, which PyGraph delivers to the GPU.

A branch on the value needs a guard, and sympy orders sums and products in its own way. Therefore the value may only be
an operand of arithmetic with tensors. Otherwise Dynamo analyses the frame again and breaks the graph at this item().
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
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._inductor.pygraph.dynamo.obstacles import of_frame, Traced
from torch._inductor.pygraph.dynamo.operators import may_be_written
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import sympy

    from torch._dynamo.symbolic_convert import InstructionTranslatorBase


# The value while it is traced.
HINT = 1.25

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# Operations of a value and a tensor that tensorify_python_scalars turns into operations of tensors.
FUNCTIONS = OrderedSet(
    [operator.add, operator.mul, operator.sub, operator.truediv, torch.add, torch.div, torch.mul, torch.sub]
)
IN_PLACE = OrderedSet([operator.iadd, operator.imul, operator.isub, operator.itruediv])
METHODS = OrderedSet(["add", "div", "mul", "sub"])
IN_PLACE_METHODS = OrderedSet(["add_", "div_", "mul_", "sub_"])


@dataclasses.dataclass
class Item:
    variable: SymNodeVariable
    # All that stand for the value. Dynamo makes two for an item of a float64.
    symbols: OrderedSet[sympy.Symbol]
    # Whether Dynamo breaks the graph here without PyGraph, rather than skip the frame.
    is_break: bool

    @property
    def symbol(self) -> sympy.Symbol:
        return symbol_of(self.variable.sym_num)


class Items(Traced):
    """Makes values of tensors inputs of the graph, by the names of the tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, Item] = {}

    def item(self, tx: InstructionTranslatorBase, tensor: TensorVariable) -> SymNodeVariable | None:
        """Return the value of ``tensor`` as an input, or None if it cannot be one."""
        output = tx.output
        if (
            not is_cpu_float_input(tx, tensor)
            or tensor.source.name in tx.speculation_log.graph_break_on_items
            or may_be_written(output.graph)
        ):
            return None
        root = output.root_tx
        is_break = root is not None and root.should_compile_partial_graph() and not root.maybe_has_backedge()
        if (known := self.by_name.get(tensor.source.name)) is not None:
            known.is_break &= is_break
            return known.variable
        source = CallMethodItemSource(tensor.source)
        variable = VariableBuilder(tx, source).wrap_symfloat(HINT, varies=True)
        if not isinstance(variable, SymNodeVariable):
            return None
        # Tracked floats are guarded not to be NaN, and a guard would read the tensor.
        tracked = output.tracked_fakes
        symbols = OrderedSet(symbol_of(t.fake) for t in tracked if t.source == source)
        tracked[:] = [t for t in tracked if symbol_of(t.fake) not in symbols]
        item = Item(variable, symbols, is_break)
        self.by_name[tensor.source.name] = item
        # Another frame may have had a symbol of this name.
        TensorifyState.force_specializations.discard(item.symbol.name)
        return variable

    def check_graph(self, tx: InstructionTranslatorBase) -> None:
        """Raises RestartAnalysis if the complete graph has a use that a value may not have."""
        if not self.by_name:
            return
        items = self.by_name.items()
        values = {n: i.variable.proxy.node for n, i in items}
        break_at(tx, (n for n, value in values.items() if not is_operand(value)))
        break_at(tx, (n for n, value in values.items() if has_two_backwards(value)))
        skipped = [n for n, i in items if not i.is_break]
        root = tx.output.root_tx
        if skipped and root is not None and any(of_frame(root, self)):
            break_at(tx, skipped)
        self.check_guards(tx)

    def check_guards(self, tx: InstructionTranslatorBase) -> None:
        env = tx.output.shape_env
        guarded = OrderedSet(s for g in env.guards for s in g.expr.free_symbols)
        guarded |= env.replacements.keys()
        break_at(tx, (n for n, i in self.by_name.items() if i.symbols & guarded))

    @contextlib.contextmanager
    def around_backend(self, tx: InstructionTranslatorBase) -> Iterator[None]:
        """Raises RestartAnalysis if the backend used a value as a constant."""
        try:
            yield
        except TensorifyScalarRestartAnalysis:
            specialized = TensorifyState.force_specializations
            items = self.by_name.items()
            break_at(tx, (n for n, i in items if i.symbol.name in specialized))
            raise
        if self.by_name:
            self.check_guards(tx)


def is_cpu_float_input(tx: InstructionTranslatorBase, tensor: TensorVariable) -> bool:
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


def is_operand(value: torch.fx.Node) -> bool:
    """Return whether the graph uses a value only in arithmetic with tensors."""

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
            # Eager mode raises an error. Compiled code would cast the result.
            return False
        return node.target in allowed and bool(operands)

    return all(map(arithmetic, value.users))


def has_two_backwards(value: torch.fx.Node) -> bool:
    """
    Return whether results before the value and after it require gradients. With a graph break at the value a program
    may run two backwards one after the other.
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
    return type(value) is FakeTensor and (value.layout == torch.strided and not value.is_complex())


def symbol_of(fake: object) -> sympy.Symbol | None:
    # expr would be what the symbol was replaced by.
    return fake.node._expr if isinstance(fake, torch.SymFloat) else None


def break_at(tx: InstructionTranslatorBase, names: Iterable[str]) -> None:
    """Let Dynamo analyse the frame again, with graph breaks at these items, if any."""
    names = OrderedSet(names)
    if names:
        tx.speculation_log.graph_break_on_items |= names
        raise RestartAnalysis(restart_reason=f"the value of {', '.join(names)} is not only an operand")
