"""
Branches on CPU values that the host knows before the graph runs: ``if torch.rand([]) < layerdrop``, ``if
self.started``.

Dynamo traces the path that is taken, and a guard finds the outcome of each call on a copy of the generator's state.
With another outcome Dynamo compiles another graph. Each graph holds one path, so that all is eager mode's, whatever the
paths contain. torch.cond's paths must be alike, its gradients are zeros, and its backward draws other numbers.

Beyond MAX_GRAPHS graphs, or MAX_DRAWS branches on random numbers in one frame, the graph breaks. In a loop that draws in
each turn, as layerdrop, one graph runs all layers from the second draw on if they are small (drops.py). If they are
large, the body becomes a function (loops.py). Layers that have their own number or cache have their own graphs, so the
first graph of each layer does not count.

Draws that only a branch reads leave the graph: bytecode draws in front of it. A dropped layer then has no graph.

At a branch where the graph would break otherwise, the guard may also read large tensors, and tensors on the GPU: it
waits for the GPU, as the graph break would. What depends on no input, such as the mask of a call that was given none, is
found once, when Dynamo traces the branch.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any, TYPE_CHECKING

import torch
import torch.fx
from torch._dynamo.code_context import code_context
from torch._dynamo.exc import UnspecializeRestartAnalysis
from torch._dynamo.guards import install_guard
from torch._dynamo.source import GlobalStateSource
from torch._guards import Guard
from torch._inductor.pygraph.dynamo.operators import (
    draws,
    indices,
    indices_of,
    is_draw,
    is_in_place,
    is_of_torch,
    is_pure,
    is_total,
    may_be_written,
    may_write,
    name_of,
    plain_name,
    POINTWISE,
    storage_of,
)
from torch._inductor.pygraph.dynamo.outcomes import Decision, guard_on, outcomes_of
from torch._inductor.pygraph.dynamo.outlining import ITEM
from torch._inductor.pygraph.dynamo.ranges import is_untouched, range_of
from torch.utils._ordered_set import OrderedSet
from torch.utils.weak import WeakIdKeyDictionary


if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Iterable, Iterator

    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase


# The graphs of one code object, for all its sizes together.
MAX_GRAPHS = 4

# Branches on random numbers of one frame: n of them have 2^n outcomes.
MAX_DRAWS = 2

# Branches of one frame. Dynamo unrolls a loop that asks a CPU value up to here; beyond, the loop's body becomes a
# function (loops.py).
MAX_BRANCHES = 64

# A guard computes with tensors of at most so many elements, and with these where the graph would break otherwise.
MAX_ELEMENTS = 1024
MAX_ELEMENTS_AT_BREAK = 2**22

# Keys in a code object's context: the number of its graphs, the modules of which it is the body of a loop and that have
# guards, and whether the graph makes draws whose outcome is certain.
GRAPHS = "pygraph_graphs_of_outcomes"
MODULES = "pygraph_modules_of_turns"
IN_GRAPH = "pygraph_draws_in_graph"

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
# Operators that compute elements, or write them in place
WRITING = POINTWISE | {"masked_fill", "pad"}


class Hosts:
    def __init__(self) -> None:
        super().__init__()
        # In program order
        self.decided: list[Decision] = []
        self.slice: OrderedSet[torch.fx.Node] = OrderedSet()
        # What branches read that have the same outcome whatever the numbers drawn
        self.certain: OrderedSet[torch.fx.Node] = OrderedSet()

    def draw_in_front(self, tx: InstructionTranslatorBase, node: torch.fx.Node) -> None:
        """Let bytecode draw what decides nothing. The program finds the generator as eager mode leaves it."""
        root = tx.output.root_tx
        if root is None or torch._inductor.config.fallback_random or context(root.f_code)[IN_GRAPH]:
            return
        ancestors = ancestors_of(node)
        if any(is_draw(n) and is_known(n) for n in ancestors):
            self.certain |= ancestors

    def constant(self, tx: InstructionTranslatorBase, node: torch.fx.Node) -> bool | None:
        """Return the truth of a tensor of one element that depends on no input, or None."""
        if any(n.op == "placeholder" for n in ancestors_of(node)):
            return None
        found = with_writes(node)
        if not all(n.op != "placeholder" and is_known_at_break(n) for n in found) or is_autocast(found):
            return None
        return outcomes_of(found, [], node).finder(tx.output.global_scope)(tx.output.local_scope)

    def decide(self, tx: InstructionTranslatorBase, node: torch.fx.Node) -> bool | None:
        """Return the truth that a tensor of one element has in this call, or None if a graph cannot depend on it."""
        return self._decide(tx, node, ancestors_of(node), is_known)

    def decide_at_break(self, tx: InstructionTranslatorBase, node: torch.fx.Node) -> bool | None:
        """The same, where the graph breaks if it is None."""
        if any(map(is_of_stream, node.graph.nodes)):
            # The program waits until an input is complete. A guard would not.
            return None
        return self._decide(tx, node, with_writes(node), is_known_at_break)

    def _decide(
        self,
        tx: InstructionTranslatorBase,
        node: torch.fx.Node,
        ancestors: OrderedSet[torch.fx.Node],
        is_known: Callable[[torch.fx.Node], bool],
    ) -> bool | None:
        for decision in self.decided:
            if decision.node is node and with_writes(node) <= self.slice:
                return decision.truth
        output = tx.output
        root = output.root_tx
        if (
            root is None
            or output.package is not None
            or torch._dynamo.config.error_on_recompile
            or context(root.f_code)[GRAPHS] >= MAX_GRAPHS
            or not all(map(is_known, ancestors))
            or not is_in_order(output.graph, ancestors | self.slice)
            or (any(n.op == "placeholder" for n in ancestors) and may_be_written(output.graph, devices_of(ancestors)))
            or is_autocast(ancestors)
        ):
            return None
        if sum(any(map(is_draw, ancestors_of(n))) for n in (*(d.node for d in self.decided), node)) > MAX_DRAWS:
            refuse(root.f_code, "too many branches on random numbers")
        if len(self.decided) == MAX_BRANCHES:
            refuse(root.f_code, "too many branches")
        found = ancestors | self.slice
        truth = outcomes_of(found, self.decided, node).finder(output.global_scope)(output.local_scope)
        if truth is not None:
            last = next(n for n in reversed(output.graph.nodes) if n in found)
            self.slice = found
            self.decided.append(Decision(node, last, truth))
        return truth

    def guard_outcomes(self, tx: InstructionTranslatorBase) -> None:
        """Guard on the branches that were decided, and let bytecode draw. Called before bytecode is made."""
        if self.decided:
            *earlier, last = self.decided
            outcomes = outcomes_of(self.slice, earlier, last.node)
            backend = tx.output.compiler_fn if self.is_compiled() else None
            guard = functools.partial(guard_on, outcomes=outcomes, truth=last.truth, backend=backend)
            install_guard(Guard(GlobalStateSource(), guard))
        if (module := first_turn_of(tx)) is not None:
            code = tx.output.root_tx.f_code
            guard = functools.partial(count_turn, code=code, module=weakref.ref(module))
            install_guard(Guard(GlobalStateSource(), guard))
        self.draw(tx)

    def draw(self, tx: InstructionTranslatorBase) -> None:
        """Let bytecode draw in front of the graph."""
        for node in self.drawn_in_front(tx):
            tx.output.random_calls.append((node.target, plain(node.args), plain(node.kwargs)))

    def is_compiled(self) -> bool:
        """Return whether the backend compiles what guards compute: where they wait, and inputs have a single layout."""
        examples = [node.meta["example_value"] for node in self.slice if node.op == "placeholder"]
        is_static = all(type(stride) is int for example in examples for stride in example.stride())
        return is_static and not all(map(is_known, self.slice)) and not any(map(is_draw, self.slice))

    def drawn_in_front(self, tx: InstructionTranslatorBase) -> list[torch.fx.Node]:
        """Return the draws that bytecode makes."""
        found = self.slice | self.certain
        return [node for node in tx.output.graph.nodes if node in found and is_draw(node) and is_known(node)]

    def erase_draws(self, tx: InstructionTranslatorBase) -> None:
        """Raises RestartAnalysis: the complete graph reads a number that decided."""
        graph = tx.output.graph
        for node in reversed(list(graph.nodes)):
            is_read = node.op == "placeholder" or node.users or is_in_place(node)
            if node in self.slice | self.certain and not is_read:
                graph.erase_node(node)
        code = tx.output.root_tx.f_code
        if any(node in self.certain and is_draw(node) for node in graph.nodes):
            context(code)[IN_GRAPH] = True
            raise UnspecializeRestartAnalysis(restart_reason="a random number is read by the graph")
        if any(node in self.slice and is_draw(node) for node in graph.nodes):
            refuse(code, "a random number decides, and is read by the graph")

    @contextlib.contextmanager
    def around_compilation(self, tx: InstructionTranslatorBase) -> Iterator[None]:
        """Count the graph, and leave the generator as the guards that are checked next have to find it."""
        if not self.decided:
            yield
            return
        state = torch.get_rng_state()
        yield
        torch.set_rng_state(state)
        context(tx.output.root_tx.f_code)[GRAPHS] += first_turn_of(tx) is None


def refuse(code: types.CodeType, reason: str) -> None:
    context(code)[GRAPHS] = MAX_GRAPHS
    # Other paths are traced from here on: what was speculated on those before is of no use.
    raise UnspecializeRestartAnalysis(restart_reason=reason)


def context(code: types.CodeType) -> dict[str, Any]:
    found = code_context.get_context(code)
    found.setdefault(GRAPHS, 0)
    found.setdefault(IN_GRAPH, False)
    found.setdefault(MODULES, WeakIdKeyDictionary())
    return found


def first_turn_of(tx: InstructionTranslatorBase) -> torch.nn.Module | None:
    """Return the module that a loop's body (loops.py) runs, if Dynamo compiles the body for it for the first time."""
    code = tx.output.root_tx.f_code
    if code.co_varnames[:1] != (ITEM,):
        return None
    item = tx.output.local_scope[ITEM]
    modules = [v for v in (item if isinstance(item, tuple) else (item,)) if isinstance(v, torch.nn.Module)]
    return modules[0] if modules and modules[0] not in context(code)[MODULES] else None


# Nodes


def ancestors_of(node: torch.fx.Node) -> OrderedSet[torch.fx.Node]:
    found: OrderedSet[torch.fx.Node] = OrderedSet()
    work = [node]
    while work:
        node = work.pop()
        if node not in found:
            found.add(node)
            work += node.all_input_nodes
    return found


def with_writes(node: torch.fx.Node) -> OrderedSet[torch.fx.Node]:
    """Return the ancestors of a node, and what may have written their memory by now."""
    found = ancestors_of(node)
    work = [*found]
    while work:
        memory = OrderedSet(storage_of(n) for n in work) - {None}
        writers = [n for n in node.graph.nodes if any(storage_of(operand) in memory for operand in may_write(n))]
        new = OrderedSet(a for n in writers for a in ancestors_of(n)) - found
        found |= new
        work = [*new]
    return found


def is_known(node: torch.fx.Node) -> bool:
    """Return whether the host can compute a node as the graph would."""
    example = node.meta.get("example_value")
    return (
        isinstance(example, torch.Tensor)
        and example.device.type == "cpu"
        and is_untouched(node, example)
        and is_computed(node, example, MAX_ELEMENTS)
        and (is_pure(node) or is_draw(node) or node.op == "placeholder")
    )


def is_known_at_break(node: torch.fx.Node) -> bool:
    """Return whether the host can compute a node as the graph would, if it waits for the GPU."""
    name, example = plain_name(node), node.meta.get("example_value")
    if name == "setitem":
        # Its operands are among the nodes that are checked.
        return is_fill(node)
    if not isinstance(example, torch.Tensor) or type(example).__name__ != "FakeTensor":
        return False
    if any(name_of(user) in ("set_", "numpy") for user in node.users):
        return False
    if not is_computed(node, example, MAX_ELEMENTS_AT_BREAK):
        return False
    if name in ("to", "cpu") and True in (*node.args, *node.kwargs.values()):
        # The copy may not block.
        return False
    is_row = name == "getitem" and has_bounds(node)
    return is_pure(node) or is_row or node.op == "placeholder" or (name in WRITING and is_total(node))


def is_of_stream(node: torch.fx.Node) -> bool:
    """Return whether a node waits for a stream or an event, or runs on a stream that the program chose."""
    is_method = node.op == "call_method" and node.target in ("query", "synchronize", "wait_event", "wait_stream")
    return is_method or str(node.target).startswith("streams.") or "stream" in node.meta.get("custom", {})


def has_bounds(node: torch.fx.Node) -> bool:
    """Return whether no index of ``getitem`` is out of bounds, on a GPU, where the guard would end the program."""
    if indices_of(node) is None:
        return False
    index = node.args[1]
    shape = [*node.args[0].meta["example_value"].shape]
    for part in index if isinstance(index, tuple) else (index,):
        if part is Ellipsis:
            # What follows may index any dimension.
            shape = [min(shape)] * len(shape)
        elif part is not None:
            size = shape.pop(0)
            if isinstance(part, torch.fx.Node):
                found = range_of(part)
                if found is None or not (bool(found.low >= 0) and bool(found.high < size)):
                    return False
            elif type(part) not in (int, slice):
                return False
    return True


def is_fill(node: torch.fx.Node) -> bool:
    """Return whether a node writes a number to some elements of a tensor, and raises for no value."""
    of, index, number = node.args
    tensors = [i for i in indices(index) if isinstance(i, torch.fx.Node)]
    dtypes = [getattr(i.meta.get("example_value"), "dtype", None) for i in tensors]
    return is_of_torch(node) and type(number) in (int, float, bool) and all(d == torch.bool for d in dtypes)


def is_computed(node: torch.fx.Node, example: torch.Tensor, max_elements: int) -> bool:
    """Return whether a node is a tensor of known size, and an input if it is a placeholder."""
    if (
        example.layout != torch.strided
        or not all(type(size) is int for size in example.shape)
        or example.numel() > max_elements
    ):
        return False
    if node.op == "placeholder":
        argument = node.meta["grapharg"]
        is_tensor = type(argument.example) in (torch.Tensor, torch.nn.Parameter)
        return is_tensor and not argument.pass_arg_as_tensor and argument.source is not None
    return "generator" not in node.kwargs and "out" not in node.kwargs


def devices_of(nodes: Iterable[torch.fx.Node]) -> OrderedSet[str]:
    examples = (node.meta.get("example_value") for node in nodes)
    return OrderedSet(example.device.type for example in examples if isinstance(example, torch.Tensor))


def is_autocast(nodes: Iterable[torch.fx.Node]) -> bool:
    """Return whether autocast may change what nodes compute."""
    nodes = [*nodes]
    enter = torch.amp.autocast_mode._enter_autocast
    return any(map(torch.is_autocast_enabled, devices_of(nodes))) or any(
        n.target is enter for n in nodes[0].graph.nodes
    )


def is_in_order(graph: torch.fx.Graph, drawn_in_front: OrderedSet[torch.fx.Node]) -> bool:
    """Return whether numbers that are drawn in front of the graph are those that the program draws there."""
    if not torch._inductor.config.fallback_random:
        # Inductor draws seeds in front of the graph, and no number is that of eager mode.
        return True
    return not any(
        (draws(node) or name_of(node) in RECURRENT) and node not in drawn_in_front and not is_on_gpu(node)
        for node in graph.nodes
    )


def is_on_gpu(node: torch.fx.Node) -> bool:
    example = node.meta.get("example_value")
    return isinstance(example, torch.Tensor) and example.device.type not in ("cpu", "meta")


def plain(value: Any) -> Any:
    """Return arguments without the types of a graph."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(v) for v in value] if isinstance(value, list) else tuple(plain(v) for v in value)
    return value


# Guards


def count_turn(builder: GuardBuilder, guard: Guard, code: types.CodeType, module: weakref.ref) -> None:
    """
    Keep the first graph of a layer out of config.recompile_limit. Dynamo counts graphs whose guards refer to the same
    object as the frame's variable. These guards refer to the code object instead.
    """
    context(code)[MODULES][module()] = True
    builder.id_matched_objs[ITEM] = weakref.ref(code)
