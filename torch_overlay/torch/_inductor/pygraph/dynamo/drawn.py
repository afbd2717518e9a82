"""
Random numbers that decide which layers run (drops.py). Bytecode draws them in front of the complete graph.

The numbers that the graph reads become inputs of the graph. A call may drop each layer that leads from a parameter to a
result. Bytecode then detaches the parameter in front of the graph, so that it gets no gradient.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any, TYPE_CHECKING

import torch
import torch.fx
from torch._dynamo.bytecode_transformation import create_binary_subscr, create_instruction
from torch._dynamo.source import RandomValueSource
from torch._dynamo.variables.builder import GraphArg
from torch._guards import ChainedSource, dataclass_with_cached_hash
from torch._inductor.pygraph.dynamo.hosts import is_known
from torch._inductor.pygraph.dynamo.joins import requires_grad
from torch._inductor.pygraph.dynamo.operators import is_in_place, is_pure, may_write, storage_of
from torch._inductor.pygraph.dynamo.stores import RefusedError
from torch._inductor.pygraph.dynamo.tangents import Condition, holds, Results
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch._dynamo.codegen import PyCodegen
    from torch._dynamo.output_graph import OutputGraph

ALWAYS: Condition = frozenset([frozenset()])
MAX_ALTERNATIVES = 64

# Elements of an input that torch.where may copy in each call
MAX_COPIED = 2**20


@dataclasses.dataclass
class Gate:
    """
    A branch of which the graph runs both paths.

    Attributes:
        condition: its outcome
        paths: the nodes of each path, by the outcome for which eager mode takes it
        joins: what selects
    """

    condition: torch.fx.Node
    paths: dict[bool, OrderedSet[torch.fx.Node]]
    joins: OrderedSet[torch.fx.Node]


class DrawnInFront:
    """
    Draws in front of a graph. Returns what the graph reads, and whether each group of inputs is detached.

    Attributes:
        index: of its values among those that bytecode draws
    """

    def __init__(self, index: int) -> None:
        self.index = index

    def complete(self, function: Callable[[], Any], gates: Sequence[int], groups: Sequence[Condition]) -> None:
        """
        Args:
            function: draws
            gates: of what it returns, the outcome of each gate
            groups: when the inputs of each group reach a result
        """
        self.function = function
        self.gates = gates

        @functools.lru_cache(maxsize=1024)
        def detached(outcomes: tuple[bool, ...]) -> tuple[bool, ...]:
            return tuple(not holds(group, outcomes) for group in groups)

        self.detached = detached

    def __call__(self) -> tuple[Any, ...]:
        values = self.function()
        return (*values, *self.detached(tuple(bool(values[i]) for i in self.gates)))


@dataclass_with_cached_hash(frozen=True)
class DrawnSource(RandomValueSource):
    """One of the values of DrawnInFront."""

    place: int

    def reconstruct(self, codegen: PyCodegen) -> None:
        super().reconstruct(codegen)
        codegen.append_output(codegen.create_load_const(self.place))
        codegen.append_output(create_binary_subscr())

    @functools.cached_property
    def _name_template(self) -> str:
        return f"random_value_{self.random_call_index}_{self.place}"


@dataclass_with_cached_hash(frozen=True)
class DetachedSource(ChainedSource):
    """A tensor that is detached if a flag is true."""

    flag: DrawnSource

    def reconstruct(self, codegen: PyCodegen) -> None:
        end = create_instruction("NOP")
        opname = "POP_JUMP_FORWARD_IF_FALSE" if sys.version_info[:2] == (3, 11) else "POP_JUMP_IF_FALSE"
        codegen(self.base)
        codegen(self.flag)
        codegen.append_output(create_instruction(opname, target=end))
        codegen.load_method("detach")
        codegen.call_method(0)
        codegen.append_output(end)

    @functools.cached_property
    def _name_template(self) -> str:
        return "{0}.detach()"


def move_in_front(
    output: OutputGraph, gates: Sequence[Gate], known: OrderedSet[torch.fx.Node], in_front: DrawnInFront
) -> Results | None:
    """
    Draw in front of the graph. Return which results lead gradients to inputs, if that depends on the call.

    Args:
        known: nodes that the host computes
        in_front: draws them

    Raises:
        RefusedError: gradients would not be those of eager mode.
    """
    graph = output.graph
    reached = conditions_of(graph, gates, readers_of(graph, is_in_place))
    if reached != conditions_of(graph, gates, readers_of(graph, may_write)):
        raise RefusedError("an operator may write what a path reads")
    by_result = conditions_by_result(graph, gates, reached)
    detach_operands(output, gates)
    groups: dict[Condition, int] = {}
    written = OrderedSet(storage_of(n) for node in graph.nodes for n in may_write(node))
    for node in graph.nodes:
        condition = reached.get(node)
        if node.op in ("placeholder", "get_attr") and condition and condition != ALWAYS:
            if node.op == "get_attr" or storage_of(node) in (None, *written):
                raise RefusedError("what a path reads is written, or no input")
            groups.setdefault(condition, len(groups))
    erase_unread(graph, known)
    read = [n for n in graph.nodes if n in known and any(user not in known for user in n.users)]
    read = [*OrderedSet([*read, *(gate.condition for gate in gates)])]
    function = computation_of(graph, known, read)
    for node in graph.find_nodes(op="placeholder"):
        if (group := groups.get(reached.get(node, ALWAYS))) is not None:
            argument = node.meta["grapharg"]
            # AOTAutograd asks for the variable of the program.
            node._dynamo_source = argument.source
            flag = DrawnSource(in_front.index, len(read) + group)
            argument.source = DetachedSource(argument.source, flag)
    in_front.complete(function, [read.index(gate.condition) for gate in gates], [*groups])
    made = {}
    for place, node in enumerate(read):
        if any(user not in known for user in node.users):
            made[node] = add_input(output, node, DrawnSource(in_front.index, place))
            node.replace_all_uses_with(made[node], delete_user_cb=lambda user: user not in known)
    for node in reversed([n for n in graph.nodes if n in known]):
        graph.erase_node(node)
    return Results([made[gate.condition] for gate in gates], by_result) if by_result else None


def erase_unread(graph: torch.fx.Graph, known: OrderedSet[torch.fx.Node]) -> None:
    """Erase what the analysis of branches has made of the numbers and has not used."""
    for node in reversed([*graph.nodes]):
        of_known = node.all_input_nodes and all(n in known for n in node.all_input_nodes)
        if of_known and not node.users and node not in known and is_pure(node) and is_known(node):
            graph.erase_node(node)


def computation_of(
    graph: torch.fx.Graph, known: OrderedSet[torch.fx.Node], read: Sequence[torch.fx.Node]
) -> Callable[[], Any]:
    """Return what computes ``read`` as the program does."""
    own = torch.fx.Graph()
    inside: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        if node in known:
            inside[node] = own.node_copy(node, inside.__getitem__)
            inside[node].meta.clear()
    own.output(tuple(inside[node] for node in read))
    return torch.fx.GraphModule({}, own).forward


def add_input(output: OutputGraph, node: torch.fx.Node, source: DrawnSource) -> torch.fx.Node:
    """Add an input of the graph for a value that the host computes."""
    fake = node.meta["example_value"]
    example = torch.empty(fake.shape, dtype=fake.dtype)
    first = next(n for n in output.graph.nodes if n.op != "placeholder")
    with output.graph.inserting_before(first):
        made = output.graph.placeholder(f"drawn_{node.name}")
    made.meta["example_value"] = fake
    made.meta["grapharg"] = GraphArg(
        source, example, pass_arg_as_tensor=False, fake_tensor=fake, example_strong_ref=example
    )
    return made


# Gradients


def conditions_of(
    graph: torch.fx.Graph,
    gates: Sequence[Gate],
    readers: dict[torch.fx.Node, list[torch.fx.Node]],
    result: torch.fx.Node | None = None,
) -> dict[torch.fx.Node, Condition]:
    """Return for each node with a gradient in which calls that of a result, or of any, reaches it in eager mode."""
    inside = {n: (i, side) for i, gate in enumerate(gates) for side, path in gate.paths.items() for n in path}
    joining = {n: i for i, gate in enumerate(gates) for n in gate.joins}
    found: dict[torch.fx.Node, Condition] = {}
    for node in reversed(graph.nodes):
        if node.op == "output":
            found[node] = ALWAYS
        elif requires_grad(node) or (is_in_place(node) and any(map(requires_grad, node.all_input_nodes))):
            alternatives: set[frozenset[tuple[int, bool]]] = set()
            for user in readers.get(node, ()):
                if user.op == "output" and result not in (None, node):
                    continue
                taken = set()
                if user in inside and inside.get(node) != inside[user]:
                    taken.add(inside[user])
                if user.op == "output" and node in inside:
                    # Bytecode takes it if the path is taken.
                    taken.add(inside[node])
                if user in joining:
                    taken.add((joining[user], user.args[1] is node))
                alternatives |= {term | taken for term in found.get(user, ())}
                if frozenset() in alternatives:
                    break
            found[node] = simplified(alternatives)
    return found


def conditions_by_result(
    graph: torch.fx.Graph, gates: Sequence[Gate], reached: dict[torch.fx.Node, Condition]
) -> dict[torch.fx.Node, dict[int, Condition]]:
    """
    Return for inputs, and for each result that leads a gradient to them, in which calls it does. These inputs are those
    that all results together reach in more calls than one of them does.

    Raises:
        RefusedError: results may not be those of one node of autograd.
    """
    readers = readers_of(graph, is_in_place)
    inputs = [n for n in graph.find_nodes(op="placeholder") if reached.get(n)]
    by_input: dict[torch.fx.Node, dict[int, Condition]] = {n: {} for n in inputs}
    (output,) = graph.find_nodes(op="output")
    results = output.args[0]
    differentiable = [i for i, n in enumerate(results) if requires_grad(n)]
    for i in differentiable:
        found = conditions_of(graph, gates, readers, results[i])
        for node in inputs:
            if found.get(node):
                by_input[node][i] = found[node]
    different = {n: by for n, by in by_input.items() if any(condition != reached[n] for condition in by.values())}
    given = [storage_of(n) for n in graph.find_nodes(op="placeholder")]
    own = OrderedSet(storage_of(results[i]) for i in differentiable)
    if different and (len(own) < len(differentiable) or any(s in (None, *given) for s in own)):
        raise RefusedError("results that share memory have gradients in different calls")
    return different


def readers_of(
    graph: torch.fx.Graph, writes: Callable[[torch.fx.Node], object]
) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    """Return what reads each node, or what a node that ``writes`` has written."""
    readers: dict[torch.fx.Node, list[torch.fx.Node]] = {n: [*n.users] for n in graph.nodes}
    order = {node: i for i, node in enumerate(graph.nodes)}
    by_storage: dict[int | None, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        by_storage.setdefault(storage_of(node), []).append(node)
    for node in graph.nodes:
        for written in may_write(node) if writes(node) else ():
            same = by_storage[storage_of(written)]
            readers[node] += [user for n in same for user in n.users if order[user] > order[node]]
    return readers


def simplified(alternatives: Iterable[frozenset[tuple[int, bool]]]) -> Condition:
    terms = {term for term in alternatives if not any((i, not side) in term for i, side in term)}
    while True:
        terms = {term for term in terms if not any(other < term for other in terms)}
        merged = {
            term - {(i, side)} for term in terms for i, side in term if (term - {(i, side)}) | {(i, not side)} in terms
        }
        if not merged:
            break
        terms |= merged
    if len(terms) > MAX_ALTERNATIVES:
        raise RefusedError("gradients depend on many branches")
    return frozenset(terms)


def detach_operands(output: OutputGraph, gates: Sequence[Gate]) -> None:
    """Let no gradient leave a path that is not taken."""
    for gate in gates:
        for side, path in gate.paths.items():
            operands = OrderedSet(n for node in path for n in node.all_input_nodes if n not in path)
            for node in operands:
                if requires_grad(node) and not (node.op == "placeholder" and all(u in path for u in node.users)):
                    detach_operand(output, gate.condition, side, node, path)


def detach_operand(
    output: OutputGraph, condition: torch.fx.Node, side: bool, node: torch.fx.Node, path: OrderedSet[torch.fx.Node]
) -> None:
    graph, example = output.graph, node.meta["example_value"]
    if node.op in ("placeholder", "get_attr") and example.numel() > MAX_COPIED:
        raise RefusedError("a large parameter is read outside of the path, too")
    if not isinstance(example, torch.Tensor):
        raise RefusedError("a path reads a list of tensors")
    first = next(n for n in graph.nodes if n in path and node in n.all_input_nodes)
    with graph.inserting_before(first), output.fake_mode:
        detached = graph.call_method("detach", (node,))
        detached.meta["example_value"] = example.detach()
        operands = (node, detached) if side else (detached, node)
        selected = graph.call_function(torch.where, (condition, *operands))
        values = (n.meta["example_value"] for n in (condition, *operands))
        selected.meta["example_value"] = made = torch.where(*values)
    if made.stride() != example.stride():
        raise RefusedError("a path reads a tensor of another layout")
    node.replace_all_uses_with(selected, delete_user_cb=lambda user: user in path)
