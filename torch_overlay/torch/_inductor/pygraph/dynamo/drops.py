"""
Layers that a random number of the CPU drops, as layerdrop does, in one graph.

Both paths of such a branch run, and torch.where selects. The numbers are drawn in front of the graph, in program order
and by the program's own operators. The outcomes are inputs of the graph (drawn.py). Eager mode cannot be told from this:

- No operator of a path raises for values, writes what existed before, or acts outside of the graph.
- A path that is not taken gets a gradient of zeros, from which its operators may make NaN. So torch.where detaches what
  a path reads from before it, if the path is not taken.
- A parameter from which only paths that are not taken lead to results enters the graph detached. It gets no gradient,
  as in eager mode, and not zeros.
- Inductor draws the seeds of dropout in front of the graph, and no number is that of eager mode. Attention draws as eager
  mode does. So a path may call it with dropout only if the graph draws such seeds, too.

The device runs dropped layers, too. Where that takes longer than a graph for each layer takes the host, the loop's body
becomes a function (loops.py).
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, NoReturn, TYPE_CHECKING

import torch
import torch.fx
from torch._dynamo import variables
from torch._dynamo.exc import UnspecializeRestartAnalysis
from torch._inductor.pygraph.dynamo.breaks import frames_of
from torch._inductor.pygraph.dynamo.conds import check_node, is_movable
from torch._inductor.pygraph.dynamo.drawn import DrawnInFront, Gate, move_in_front
from torch._inductor.pygraph.dynamo.hosts import ancestors_of, context, devices_of, Hosts, is_in_order, is_known
from torch._inductor.pygraph.dynamo.joins import is_alike, Join, Joiner, node_of, storage
from torch._inductor.pygraph.dynamo.operators import argument, draws, is_draw, is_total, may_write, name_of, plain_name
from torch._inductor.pygraph.dynamo.stores import RefusedError
from torch.utils._ordered_set import OrderedSet
from torch.utils._pytree import tree_iter


if TYPE_CHECKING:
    import types
    from collections.abc import Iterable, Iterator

    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker
    from torch._inductor.pygraph.dynamo.tangents import Results


# Key in a code object's context: whether the graphs of a frame run dropped layers. None: not tried; a text: why not
SELECTS = "pygraph_selects_layers"

# Devices on which a graph for each layer costs more than the layer
DEVICES = ("cuda",)

# Seconds that the graphs of a layer, one for each direction, take the host with their guards and autograd: an estimate
# from layerdrop_train of suite mend, whose six layers took the host 3.0 ms in all. A device that computes the layer in
# less waits for the host anyway.
HOST = 450e-6

# Seconds that a device may run a larger layer for nothing, on average
MAX_SECONDS = 10e-6

# Of a GPU of today: operations in a second with all bits of float32 and on tensor cores, bytes in a second, and the
# seconds of a small kernel
OPERATIONS, TENSOR_CORE_OPERATIONS, BYTES, KERNEL = 5e13, 2e14, 2e12, 2e-6

# Operators of libraries, which do not fuse. Inductor fuses others to about one kernel for each of these.
MATMULS = frozenset("addmm baddbmm bmm conv1d conv2d conv3d einsum linear matmul mm".split())
ATTENTION = "scaled_dot_product_attention"
MULTI_HEAD = "multi_head_attention_forward"


class Drops(Hosts):
    def __init__(self) -> None:
        super().__init__()
        self.gates: list[Gate] = []
        # The branches of which the graph may run both paths
        self.selected: OrderedSet[tuple[Any, int]] = OrderedSet()
        self.in_front: DrawnInFront | None = None
        self.results: Results | None = None

    def is_selected(self, tx: InstructionTranslatorBase, node: torch.fx.Node) -> bool:
        """Return whether the graph runs both paths of a branch on ``node``."""
        root = tx.output.root_tx
        return root is not None and context(root.f_code).get(SELECTS) is True and is_drawn(node)

    def select_layers(self, tx: InstructionTranslatorBase, node: torch.fx.Node) -> None:
        """Raises RestartAnalysis: the next analysis tries to run both paths of branches on random numbers."""
        output = tx.output
        root = output.root_tx
        examples = [example_of(n) for n in output.graph.nodes]
        is_on_device = any(isinstance(e, torch.Tensor) and e.device.type in DEVICES for e in examples)
        if root is None or output.package is not None or not is_on_device or not is_drawn(node):
            return
        if context(root.f_code).setdefault(SELECTS) is None:
            context(root.f_code)[SELECTS] = True
            raise UnspecializeRestartAnalysis(restart_reason="a random number drops layers")

    def refuse_selection(self, tx: InstructionTranslatorBase, why: str) -> NoReturn:
        # The graph may break in a frame that is inlined. Dynamo compiles each of these alone then.
        for frame in frames_of(tx):
            context(frame.f_code)[SELECTS] = why
        raise UnspecializeRestartAnalysis(restart_reason=why)

    def drawn_in_front(self, tx: InstructionTranslatorBase) -> list[torch.fx.Node]:
        found = OrderedSet(n for gate in self.gates for n in ancestors_of(gate.condition))
        drawn = OrderedSet(super().drawn_in_front(tx))
        return [n for n in tx.output.graph.nodes if n in drawn or (n in found and is_draw(n))]

    def draw(self, tx: InstructionTranslatorBase) -> None:
        if not self.gates:
            super().draw(tx)
            return
        if any(map(is_draw, self.slice)):
            self.refuse_selection(tx, "a guard depends on a random number, too")
        self.in_front = DrawnInFront(len(tx.output.random_calls))
        tx.output.random_calls.append((self.in_front, (), {}))

    def complete_gates(self, tx: InstructionTranslatorBase) -> None:
        """
        Move the draws in front of the complete graph. Their numbers become inputs of the graph.

        Raises:
            RestartAnalysis: eager mode would draw other numbers or have other gradients. The next analysis gives each
                layer its own graph.
        """
        if self.in_front is None:
            return
        drawn = [n for n in self.drawn_in_front(tx) if n in self.certain]
        known = OrderedSet(a for n in (*drawn, *(g.condition for g in self.gates)) for a in ancestors_of(n))
        try:
            if not is_in_order(tx.output.graph, known):
                raise RefusedError("the graph draws from the same generator")
            check_attention(tx.output.graph, self.gates)
            self.results = move_in_front(tx.output, self.gates, known, self.in_front)
        except RefusedError as e:
            self.refuse_selection(tx, str(e))

    @contextlib.contextmanager
    def around_compilation(self, tx: InstructionTranslatorBase) -> Iterator[None]:
        output = tx.output
        backend = output.compiler_fn
        if self.results is not None:
            # Inputs that nothing reads are gone by now.
            output.compiler_fn = self.results.backend(output.graph, backend)
        try:
            with super().around_compilation(tx):
                yield
        finally:
            output.compiler_fn = backend


class DropJoiner(Joiner):
    """Joins what the paths of a branch on a random number leave by torch.where, whatever the paths compute."""

    def can_be_chosen(self, value: VariableTracker) -> bool:
        # The host knows in front of the graph which path gets gradients.
        return type(value) is variables.TensorVariable or super().can_be_chosen(value)

    def select(self, site: tuple[Any, int]) -> list[Join]:
        """Join each pair of tensors. Return the joins of tensors that existed before. Raises RefusedError."""
        tx, graph = self.tx, self.tx.output.graph
        extension = tx.output.extension
        paths = {
            truth: OrderedSet(n for n in path.nodes if is_movable(tx, n))
            for truth, path in zip((True, False), self.paths)
        }
        own = paths[True] | paths[False]
        if not own and not self.pairs:
            return []
        if len(extension.forked) > 1:
            raise RefusedError("it is in a path of another branch")
        before = OrderedSet(storage(n) for n in graph.nodes if n not in own) - OrderedSet([None])
        for node in own:
            check_selected(node)
            # It may have been read for the first time in the path.
            if any(storage(n) is None or storage(n) in before for n in may_write(node)):
                raise RefusedError("a path changes what existed before")
        apart = OrderedSet(node for values in self.apart for node in map(node_of, values) if node is not None)
        self._check_time(paths, apart)
        self.check_names(own)
        # What a path reads may be a copy (drawn.py).
        if any(storage(node) in before for node in apart & own):
            raise RefusedError("a path leaves a view of what existed before")
        before |= OrderedSet(storage(j.node) for j in extension.joins)
        gate = Gate(self.condition.as_proxy().node, paths, OrderedSet())
        joins = []
        for key, (a, b) in self.pairs.items():
            where = variables.TorchInGraphFunctionVariable(torch.where)
            joined = where.call_function(tx, [self.condition, a, b], {})
            if not is_alike(joined, a):
                raise RefusedError("the join has another layout")
            self.joined[key] = joined
            node = joined.as_proxy().node
            gate.joins.add(node)
            joins += [Join(node, n, own | gate.joins, site) for n in key if storage(n) in before]
        extension.gates.append(gate)
        return joins

    def _check_time(self, paths: dict[bool, OrderedSet[torch.fx.Node]], apart: Iterable[torch.fx.Node]) -> None:
        """Raises RefusedError: the device runs long for nothing."""
        devices = OrderedSet(node.meta["example_value"].device.type for node in (*apart, *(a for a, _ in self.pairs)))
        if not devices <= OrderedSet(DEVICES):
            raise RefusedError("a graph for each layer costs less")
        chance = chance_of(self.condition.as_proxy().node)
        if chance is None:
            chance = 0.5
        # A backward takes twice as long as its forward.
        factor = 3 if torch.is_grad_enabled() else 1
        taken, other = (factor * seconds_of(paths[truth]) for truth in (True, False))
        if max(taken, other) > HOST and (1 - chance) * taken + chance * other > MAX_SECONDS:
            raise RefusedError("the device would run long for nothing")


def why_apart(code: types.CodeType) -> str | None:
    """Return why dropped layers do not run in one graph, or None if that was not tried."""
    found = context(code).get(SELECTS)
    return found if isinstance(found, str) else None


def is_drawn(node: torch.fx.Node) -> bool:
    """Return whether a node depends on random numbers of the CPU and on constants alone."""
    found = ancestors_of(node)
    return any(map(is_draw, found)) and all(n.op != "placeholder" and is_known(n) for n in found)


def check_selected(node: torch.fx.Node) -> None:
    """Raises RefusedError: a node may not run for nothing."""
    if name_of(node) != MULTI_HEAD:
        # Its second result may be None.
        check_node(node)
    values = [*tree_iter(node.meta.get("example_value"))]
    is_size = bool(values) and all(isinstance(v, torch.SymInt) for v in values)
    if not is_total(node) and not (is_size and plain_name(node) != "floordiv"):
        raise RefusedError(f"{name_of(node)} in a path")
    if torch._inductor.config.fallback_random and draws(node):
        raise RefusedError(f"{name_of(node)} draws in a path")


def check_attention(graph: torch.fx.Graph, gates: Iterable[Gate]) -> None:
    """Raises RefusedError: attention in a path draws, and no other draw of the graph has a seed of Inductor's."""
    in_paths = OrderedSet(n for gate in gates for path in gate.paths.values() for n in path)
    with_seed = [devices_of(n.all_input_nodes) for n in graph.nodes if has_seed(n)]
    for node in graph.nodes:
        is_attention = name_of(node) in (ATTENTION, MULTI_HEAD) and draws(node)
        if node in in_paths and is_attention and devices_of(node.all_input_nodes) not in with_seed:
            raise RefusedError(f"{name_of(node)} draws in a path")


def has_seed(node: torch.fx.Node) -> bool:
    """Return whether Inductor draws a seed for a node."""
    chance = argument(node, 1, "p", 0.5)
    return name_of(node) == "dropout" and draws(node) and type(chance) is float and chance > 0 and bool(node.users)


# What a path costs


def seconds_of(nodes: Iterable[torch.fx.Node]) -> float:
    """Estimate how long a device computes nodes."""
    return sum(map(seconds_of_node, nodes))


def seconds_of_node(node: torch.fx.Node) -> float:
    results = [v for v in tree_iter(example_of(node)) if isinstance(v, torch.Tensor)]
    operands = [v for v in map(example_of, node.all_input_nodes) if isinstance(v, torch.Tensor)]
    if not results:
        return 0.0
    tensors = [*results[:1], *operands]
    name = plain_name(node)
    is_of_library = name in MATMULS or name in (ATTENTION, MULTI_HEAD)
    seconds = operations_of(name, tensors) / rate_of(name, results[0].dtype) + 2 * KERNEL * is_of_library
    return seconds + sum(size_of(t) * t.element_size() for t in tensors) / BYTES


def example_of(node: torch.fx.Node) -> Any:
    return node.meta.get("example_value")


def size_of(tensor: torch.Tensor) -> int:
    return math.prod(map(length, tensor.shape))


def length(size: int | torch.SymInt) -> int:
    return size if type(size) is int else size.node.hint


def rate_of(name: str, dtype: torch.dtype) -> float:
    """Return how many operations of an operator a device makes in a second."""
    of = torch.backends.cudnn.conv if name.startswith("conv") else torch.backends.cuda.matmul
    is_rounded = dtype == torch.float32 and name not in (ATTENTION, MULTI_HEAD) and of.fp32_precision == "tf32"
    return TENSOR_CORE_OPERATIONS if is_rounded or dtype in (torch.float16, torch.bfloat16) else OPERATIONS


def operations_of(name: str, tensors: list[torch.Tensor]) -> float:
    """Return the operations of an operator from its result and its operands."""
    result, *operands = tensors
    if name == ATTENTION and len(operands) >= 2:
        return 4.0 * size_of(result) * length(operands[1].shape[-2])
    if name == MULTI_HEAD:
        # Four matmuls with the weights, and attention over the first dimension
        return size_of(result) * (8.0 * result.shape[-1] + 4.0 * result.shape[0])
    if name.startswith("conv") and len(operands) >= 2:
        return 2.0 * size_of(result) * size_of(operands[1][0])
    if name in MATMULS and operands:
        # A sum comes first.
        rows = operands[1] if name in ("addmm", "baddbmm") and len(operands) > 1 else operands[0]
        return 2.0 * size_of(result) * length(rows.shape[-1])
    return 0.0


def chance_of(node: torch.fx.Node) -> float | None:
    """Return the chance that a condition holds, or None if it is not known."""
    name = plain_name(node)
    if name in ("ne", "bool", "reshape", "logical_not", "double") and node.all_input_nodes:
        chance = chance_of(node.all_input_nodes[0])
        return 1 - chance if chance is not None and name == "logical_not" else chance
    if len(node.args) == 2 and isinstance(node.args[0], torch.fx.Node) and isinstance(node.args[1], (int, float)):
        if name_of(root_of(node.args[0])) == "rand" and name in ("lt", "le", "gt", "ge"):
            bound = min(max(float(node.args[1]), 0.0), 1.0)
            return bound if name in ("lt", "le") else 1 - bound
    return None


def root_of(node: torch.fx.Node) -> torch.fx.Node:
    while plain_name(node) in ("double", "float", "squeeze", "reshape", "getitem") and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node
