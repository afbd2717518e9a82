"""
Branches of which only one path may run: one torch.cond of two graphs.

Both paths were traced into the graph (paths.py). Here the nodes of each path move into a graph of its own, and tensors
from before the branch become operands. Eager mode cannot be told from this if

- paths change nothing and their results agree in all but their elements, as for torch.where (joins.py)
- gradients of all results reach the same tensors: torch.cond gives zeros where eager mode gives None
- no gradient depends on random numbers or on autocast: the backward runs the path again

On a GPU, torch.cond waits for the device as eager mode does. Without config.pygraph_cond nothing of the graph would be
captured, and a graph break is better.
"""

from __future__ import annotations

import operator
from typing import Any, TYPE_CHECKING

import torch
import torch.fx
from torch._dynamo import variables
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.higher_order_ops import make_attr
from torch._inductor.pygraph.dynamo.effects import last_node, nodes_after
from torch._inductor.pygraph.dynamo.hosts import is_on_gpu
from torch._inductor.pygraph.dynamo.joins import is_alike, Join, Joiner, requires_grad, storage
from torch._inductor.pygraph.dynamo.operators import name_of, writes_statistics
from torch._inductor.pygraph.dynamo.paths import Truth
from torch._inductor.pygraph.dynamo.stores import RefusedError
from torch._inductor.pygraph.types.reason import Code
from torch._ops import HigherOrderOperator
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true
from torch.utils._ordered_set import OrderedSet
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker
    from torch._inductor.pygraph.dynamo.paths import Path


COND = torch.ops.higher_order.cond

# Nodes without a value that a path may have
EFFECTS = (operator.setitem, torch._C._set_grad_enabled)

# Functions that read or write a tensor without a trace in its version
UNTRACED = frozenset(("_get_data_attr", "data", "detach_", "requires_grad_", "resize_", "set_", "set_data"))

# Libraries whose operators act outside of the graph
OUTSIDE = ("_c10d_functional", "c10d", "c10d_functional", "profiler", "symm_mem")

# The most torch.cond in a branch with gradients, the branch itself included. The backward of each torch.cond traces
# the nested ones again.
MAX_CONDS = 3


class CondJoiner(Joiner):
    """Joins what two paths leave by torch.cond."""

    code = Code.COND_IN_GRAPH

    def __init__(self, tx: InstructionTranslatorBase, condition: variables.TensorVariable, paths: list[Path]) -> None:
        super().__init__(tx, condition, paths)
        self.truths: OrderedSet[tuple[torch.fx.Node, torch.fx.Node]] = OrderedSet()

    def remains(self, node: torch.fx.Node) -> bool:
        return not any(node in path.nodes for path in self.paths)

    def _match_truths(self, a: VariableTracker, b: VariableTracker) -> Callable[[], VariableTracker]:
        if all(v.is_python_constant() for v in (a, b)):
            return super()._match_truths(a, b)
        self.has_truths = True
        tensors = [self._tensor_of(v, path) for v, path in zip((a, b), self.paths)]
        key = tuple(t.as_proxy().node for t in tensors)
        if key[0] is key[1]:
            return lambda: a
        if not is_alike(*tensors):
            raise RefusedError("the paths leave bools on different devices")
        self.pairs[key] = tensors
        self.truths.add(key)
        return lambda: Truth(self.joined[key])

    def _tensor_of(self, truth: VariableTracker, path: Path) -> Any:
        if isinstance(truth, Truth):
            return truth.tensor
        last = last_node(self.tx.output.graph)
        options = {"dtype": torch.bool, "device": self.condition.device}
        function = variables.TorchInGraphFunctionVariable(torch.full)
        size, value = variables.TupleVariable([]), variables.ConstantVariable.create(truth.as_python_constant())
        keywords = {name: variables.ConstantVariable.create(v) for name, v in options.items()}
        made = function.call_function(self.tx, [size, value], keywords)
        path.nodes += nodes_after(last)
        return made

    def select(self, site: tuple[Any, int]) -> list[Join]:
        """Join the tensors by torch.cond. Return the joins of tensors that existed before. Raises RefusedError."""
        tx, graph = self.tx, self.tx.output.graph
        own = OrderedSet(node for path in self.paths for node in path.nodes if is_movable(tx, node))
        for node in own:
            check_node(node)
        nodes = (*own, *(n for pair in self.pairs for n in pair), self.condition.as_proxy().node)
        if any(map(is_on_gpu, nodes)) and not torch._inductor.config.pygraph_cond:
            raise RefusedError("config.pygraph_cond is off")
        outside = [n for n in graph.nodes if n not in own]
        before = OrderedSet(map(storage, outside)) - OrderedSet([None])
        self.check_names(own)
        inner = self._inner_joins(own)
        used = OrderedSet(n for node in own for n in node.all_input_nodes)
        used |= OrderedSet(n for pair in self.pairs for n in pair)
        lifted = OrderedSet(n for n in outside if n in used)
        sources = self._grad_sources(lifted)
        bodies = [
            body_of(tx, [n for n in path.nodes if n in own], [*lifted], [pair[i] for pair in self.pairs], before)
            for i, path in enumerate(self.paths)
        ]
        if sources and sum(map(number_of_conds, bodies)) >= MAX_CONDS:
            raise RefusedError("the backward of nested branches takes long to compile")
        seen = observe(tx, bodies, [*lifted])
        if seen.draws and (sources or torch._inductor.config.fallback_random):
            raise RefusedError("a path draws random numbers")
        if sources and any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            raise RefusedError("a gradient depends on autocast")
        call = self._call(bodies, lifted, sources)
        forget(tx, own)
        return self._joins(call, before, inner, site)

    def _grad_sources(self, lifted: Iterable[torch.fx.Node]) -> OrderedSet[torch.fx.Node]:
        """Return the tensors from before the branch that gradients of the results reach."""
        edges = {node: edge_of(node.meta["example_value"]) for node in lifted if requires_grad(node)}
        ends = OrderedSet(edges.values())
        found = [reached([edge_of(n.meta["example_value"])], ends) for k in self.pairs for n in k if requires_grad(n)]
        everything: OrderedSet[Any] = OrderedSet(edge for each in found for edge in each)
        for each in found:
            # A zero is added to the gradient of a leaf that has one anyway.
            if (lacking := everything - each) and not lacking <= reached(each, leaves_of(lacking)):
                raise RefusedError("gradients of the paths reach different tensors")
        return OrderedSet(node for node, edge in edges.items() if edge in everything)

    def _inner_joins(self, own: OrderedSet[torch.fx.Node]) -> list[Join]:
        """Return the joins in the paths of tensors that existed before the path."""
        joins = [j for j in self.tx.output.extension.joins if j.node in own]
        left = OrderedSet(storage(n) for key in self.pairs for n in key)
        for j in joins:
            if j.versions != j.versions_now():
                raise RefusedError("a path writes a join")
            if j.other in own and storage(j.node) in left and storage(j.other) in left:
                raise RefusedError("a path leaves one tensor under several names")
        return joins

    def _call(
        self, bodies: list[torch.fx.GraphModule], lifted: Iterable[torch.fx.Node], sources: OrderedSet[torch.fx.Node]
    ) -> torch.fx.Node:
        """Call torch.cond, and take its results for the joined tensors. Return the call."""
        tx, output = self.tx, self.tx.output
        operands = []
        for node in lifted:
            operand = torch.fx.Proxy(node, output.current_tracer)
            if requires_grad(node) and node not in sources:
                operand = output.create_proxy("call_method", "detach", (operand,), {})
                with tx.fake_mode:
                    operand.node.meta["example_value"] = node.meta["example_value"].detach()
            operands.append(operand)
        names = ("cond_true", "cond_false")
        paths = [make_attr(tx, output.install_subgraph(name, body)) for name, body in zip(names, bodies)]
        results = output.create_proxy("call_function", COND, (self.condition.as_proxy(), *paths, tuple(operands)), {})
        examples = [v.meta["example_value"] for v in outputs_of(bodies[0])]
        results.node.meta["example_value"] = tuple(examples)
        for i, (key, (a, _)) in enumerate(self.pairs.items()):
            proxy = output.create_proxy("call_function", operator.getitem, (results, i), {})
            joined = wrap_fx_proxy(tx, proxy, example_value=examples[i])
            if sources and not requires_grad(key[0]) and a.dtype.is_floating_point:
                joined = joined.call_method(tx, "detach", [], {})
            if not is_alike(joined, a):
                raise RefusedError("the join has another layout")
            self.joined[key] = joined
        return results.node

    def _joins(
        self, call: torch.fx.Node, before: OrderedSet[int | None], inner: list[Join], site: tuple[Any, int]
    ) -> list[Join]:
        """Return the joins of tensors that existed before, and take back those in the paths."""
        extension = self.tx.output.extension
        extension.joins = [j for j in extension.joins if j not in inner]
        differentiable = [node for node, _ in self.pairs if requires_grad(node)]
        own = OrderedSet([call] if len(differentiable) == 1 else [])
        joins = []
        for key, joined in self.joined.items():
            others = [*key, *(j.other for j in inner if storage(j.node) in map(storage, key))]
            if key not in self.truths:
                joins += [Join(joined.as_proxy().node, n, own, site) for n in others if storage(n) in before]
        return joins


def edge_of(tensor: torch.Tensor) -> Any:
    """Return where in autograd's graph the gradient of a tensor that needs one arrives."""
    return tensor if tensor.is_leaf else (tensor.grad_fn, tensor.output_nr)


def leaves_of(edges: Iterable[Any]) -> OrderedSet[Any]:
    return OrderedSet(edge for edge in edges if not isinstance(edge, tuple))


def reached(start: Iterable[Any], ends: OrderedSet[Any]) -> OrderedSet[Any]:
    """Return those of ``ends`` at which gradients from ``start`` arrive first."""
    found: OrderedSet[Any] = OrderedSet()
    seen: OrderedSet[Any] = OrderedSet()
    work = [*start]
    while work:
        edge = work.pop()
        if edge in ends:
            found.add(edge)
        elif edge not in seen and isinstance(edge, tuple):
            seen.add(edge)
            work += [
                (function, number) if (leaf := getattr(function, "variable", None)) is None else leaf
                for function, number in edge[0].next_functions
                if function is not None
            ]
    return found


def is_movable(tx: InstructionTranslatorBase, node: torch.fx.Node) -> bool:
    """Return whether a node is computed in a path: inputs and attributes of the graph are not."""
    if node.op == "get_attr":
        return isinstance(tx.output.nn_modules.get(node.target), torch.fx.GraphModule)
    return node.op != "placeholder"


def check_node(node: torch.fx.Node) -> None:
    """Raises RefusedError: a path may not have the node."""
    if node.op == "get_attr":
        return
    example = node.meta.get("example_value")
    values = [*tree_iter(example)]
    has_value = values and all(isinstance(v, (torch.Tensor, torch.SymInt)) for v in values)
    if name_of(node) in UNTRACED or not (has_value or node.target in EFFECTS) or free_unbacked_symbols(values):
        raise RefusedError(f"{name_of(node)} in a path")
    is_of_other_kind = isinstance(node.target, HigherOrderOperator) and node.target is not COND
    if is_of_other_kind or writes_statistics(node):
        raise RefusedError(f"{name_of(node)} in a path")


def body_of(
    tx: InstructionTranslatorBase,
    nodes: list[torch.fx.Node],
    operands: list[torch.fx.Node],
    results: list[torch.fx.Node],
    before: OrderedSet[int | None],
) -> torch.fx.GraphModule:
    """Return a path as a function of the operands."""
    graph = torch.fx.Graph()
    inside: dict[torch.fx.Node, torch.fx.Node] = {}
    modules = {}
    for node in operands:
        inside[node] = graph.placeholder(node.name)
        inside[node].meta["example_value"] = node.meta["example_value"]
    for node in nodes:
        inside[node] = graph.node_copy(node, inside.__getitem__)
        if node.op == "get_attr":
            modules[node.target] = tx.output.nn_modules[node.target]
    left = []
    for node in results:
        result = inside[node]
        example = node.meta["example_value"]
        size = example.numel() * example.element_size()
        is_whole = is_equal([example.storage_offset(), example.untyped_storage().nbytes()], [0, size])
        if storage(node) in before or not is_whole:
            result = graph.call_method("clone", (result,))
            with tx.fake_mode:
                result.meta["example_value"] = example.clone()
        strides = result.meta["example_value"].stride(), example.stride()
        if not is_equal(*strides) or not is_non_overlapping_and_dense_or_false(example):
            raise RefusedError("the join has another layout")
        left.append(result)
    graph.output(tuple(left))
    return torch.fx.GraphModule(modules, graph)


def number_of_conds(body: torch.fx.GraphModule) -> int:
    calls = body.graph.find_nodes(op="call_function", target=COND)
    return len(calls) + sum(number_of_conds(path) for path in body.children())


def is_equal(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return all(statically_known_true(x == y) for x, y in zip(a, b))


def outputs_of(body: torch.fx.GraphModule) -> tuple[torch.fx.Node, ...]:
    (output,) = body.graph.find_nodes(op="output")
    return output.args[0]


class Operators(TorchDispatchMode):
    """Watches the operators of paths: whether there are ``draws``. They may not write ``outer`` storages."""

    def __init__(self, outer: OrderedSet[int]) -> None:
        super().__init__()
        self.outer = outer
        self.draws = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in OUTSIDE or torch.Tag.data_dependent_output in func.tags:
            raise RefusedError(f"{func} in a path")
        arguments = func._schema.arguments
        given = {a.name: a.default_value for a in arguments if a.has_default_value()}
        given |= {a.name: value for a, value in zip(arguments, args)} | kwargs
        if torch.Tag.nondeterministic_seeded in func.tags and given.get("dropout_p") != 0:
            self.draws = True
        for argument in arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                tensors = [t for t in tree_iter(given[argument.name]) if isinstance(t, torch.Tensor)]
                if any(t.untyped_storage()._cdata in self.outer for t in tensors):
                    raise RefusedError("a path changes what existed before")
        return func(*args, **kwargs)


class Paths(torch.fx.Interpreter):
    """Runs both paths of each torch.cond."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is not COND:
            return super().call_function(target, args, kwargs)
        _, *bodies, operands = args
        return [Paths(body).run(*operands) for body in bodies][0]


def observe(
    tx: InstructionTranslatorBase, bodies: list[torch.fx.GraphModule], operands: list[torch.fx.Node]
) -> Operators:
    """Run the paths on fake tensors. Raises RefusedError: a path acts on what existed before, or outside."""
    examples = [node.meta["example_value"] for node in operands]
    mode = Operators(OrderedSet(t.untyped_storage()._cdata for t in examples if isinstance(t, torch.Tensor)))
    with tx.fake_mode, mode:
        for body in bodies:
            Paths(body).run(*examples)
    return mode


def forget(tx: InstructionTranslatorBase, own: OrderedSet[torch.fx.Node]) -> None:
    """Remove the nodes of the paths from the graph, and the graphs of torch.cond in them."""
    graph = tx.output.graph
    for node in reversed([n for n in graph.nodes if n in own]):
        graph.erase_node(node)
        if node.op == "get_attr":
            del tx.output.nn_modules[node.target]
