"""
What stands for the values of both paths of a branch: torch.where of two tensors that the graph computes anyway.

With torch.where both paths run. Eager mode cannot be told from this if

- the paths are few operators, most of them pointwise, that raise for no value
- two tensors that are joined agree in all but their elements, and their gradients reach the same tensors
- under autograd each operator passes a zero on as a zero, whatever its operand: not sqrt, whose derivative may be
  infinite
- where a path leaves a tensor as it was, nothing tells that tensor from the join, which is another one
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo import variables
from torch._dynamo.current_scope_id import current_scope_id
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.misc import NullVariable
from torch._inductor.pygraph.dynamo.effects import versions_of
from torch._inductor.pygraph.dynamo.operators import CONSTRUCTORS, is_of_input, is_pure, name_of, plain_name, VIEWS
from torch._inductor.pygraph.dynamo.paths import Truth
from torch._inductor.pygraph.dynamo.stores import (
    check_order,
    Choice,
    is_container,
    load,
    RefusedError,
    slots_of,
    store,
    Unchanged,
)
from torch._inductor.pygraph.types.reason import Code
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_arg
from torch.utils._ordered_set import OrderedSet
from torch.utils._pytree import tree_iter


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._inductor.pygraph.dynamo.paths import Fork, Path
    from torch._inductor.pygraph.dynamo.stores import Slot


# Of both paths, which fuse. Python copies a short rest of a function into its paths.
MAX_OPERATORS = 16

# Of these, a gradient of zeros gives zeros. Those in SCALING do if the other operand is a finite number.
LINEAR = VIEWS | frozenset(
    "add clamp clamp_max clamp_min clone float double half mean nan_to_num neg relu sub sum to where".split()
)
SCALING = frozenset(("mul", "truediv", "div"))
KEYWORDS = frozenset(("dtype", "device", "min", "max", "approximate", "memory_format"))

# What tells a tensor from an equal one.
IDENTITY = frozenset(
    ("_base", "_is_view", "_version", "data", "data_ptr", "grad", "grad_fn", "is_leaf", "register_hook", "retain_grad")
    + ("storage", "untyped_storage", "is_set_to")
)


@dataclasses.dataclass
class Join:
    """A join, ``node``, of a tensor that existed before, ``other``. The nodes of both paths are the join's ``own``."""

    node: torch.fx.Node
    other: torch.fx.Node
    own: OrderedSet[torch.fx.Node]
    site: tuple[Any, int]
    versions: tuple[int, int, int] = dataclasses.field(init=False)
    # Bytecode takes the join only if it is not for the older tensor.
    is_chosen: bool = False

    def __post_init__(self) -> None:
        self.versions = self.versions_now()

    def versions_now(self) -> tuple[int, int, int]:
        # Inputs that share memory need not share a version.
        of_inputs = versions_of(self.node.graph) if is_of_input(self.other) else 0
        return version(self.node), version(self.other), of_inputs


@dataclasses.dataclass
class Chosen:
    """
    A slot with the join of a tensor that existed before.

    Attributes:
        slot: as it is behind the branch
        value: the join
        choice: what bytecode stores
        joins: of the value
    """

    slot: Slot
    value: variables.TensorVariable
    choice: Choice
    joins: list[Join]


class Joiner:
    """Joins what two paths leave. ``makers`` give the joined values, once it is known that all can be joined."""

    code = Code.BOTH_PATHS_RUN

    def __init__(self, tx: InstructionTranslatorBase, condition: variables.TensorVariable, paths: list[Path]) -> None:
        self.tx = tx
        self.condition = condition
        self.paths = paths
        self.pairs: dict[tuple[torch.fx.Node, torch.fx.Node], tuple[VariableTracker, VariableTracker]] = {}
        self.joined: dict[tuple[torch.fx.Node, torch.fx.Node], VariableTracker] = {}
        self.lists: dict[tuple[int, int], VariableTracker | None] = {}
        self.has_truths = False
        self.choices: list[Chosen] = []
        # What each path leaves in slots of which bytecode chooses the value
        self.apart: tuple[list[VariableTracker], list[VariableTracker]] = ([], [])

    def match(self, a: VariableTracker, b: VariableTracker) -> Callable[[], VariableTracker]:
        """Return what makes the join of two values. Raises RefusedError: there is none."""
        if a is b or (a.source is not None and a.source == b.source and type(a) is type(b)):
            return lambda: a
        a, b = (v.realize() if isinstance(v, LazyVariableTracker) else v for v in (a, b))
        if a is b or (isinstance(a, NullVariable) and isinstance(b, NullVariable)):
            return lambda: a
        if type(a) is type(b) is variables.TensorVariable:
            return self._match_tensors(a, b)
        if type(a) is type(b) in (variables.TupleVariable, variables.ListVariable):
            return self._match_sequences(a, b)
        if is_truth(a) and is_truth(b):
            return self._match_truths(a, b)
        if a.is_python_constant() and b.is_python_constant():
            values = (a.as_python_constant(), b.as_python_constant())
            if values[0] is values[1] or (type(values[0]) is type(values[1]) and repr(values[0]) == repr(values[1])):
                if type(a) is type(b) is variables.ConstantVariable or values[0] is values[1]:
                    return lambda: a
        raise RefusedError(f"the paths leave different {a.python_type_name()}s")

    def match_stored(self, a: VariableTracker, b: VariableTracker, *, is_object: bool) -> Callable[[], VariableTracker]:
        """
        Return what makes the value of a slot (stores.py).

        Raises:
            RefusedError: there is none.
        """
        before = dict(self.pairs), dict(self.lists)
        try:
            if isinstance(a, Unchanged) or isinstance(b, Unchanged):
                raise RefusedError("a path adds an attribute")
            return self.match(a, b)
        except RefusedError:
            if not is_object or not all(map(self.can_be_chosen, (a, b))):
                raise
            self.pairs, self.lists = before
            for values, value in zip(self.apart, (a, b)):
                values.append(value)
            return lambda: Choice(self.condition, (a, b))

    def can_be_chosen(self, value: VariableTracker) -> bool:
        """Return whether bytecode can make a value behind the graph, whichever path ran."""
        if isinstance(value, (LazyVariableTracker, Unchanged, variables.ConstantVariable)):
            return True
        if type(value) is variables.TensorVariable:
            # Eager mode gives parameters that only this value depends on no gradient, and not zeros.
            return not requires_grad(value.as_proxy().node) and self.remains(value.as_proxy().node)
        return value.source is not None

    def choose(self, slot: Slot, value: VariableTracker, left: list[VariableTracker], joins: list[Join]) -> None:
        """Let bytecode store an older tensor instead of the join in a slot."""
        of_value = [j for j in joins if type(value) is variables.TensorVariable and j.node is value.as_proxy().node]
        older = OrderedSet(j.other for j in of_value)
        values = [v.realize() for v in left] if older else []
        inside = OrderedSet(node for path in self.paths for node in path.nodes)
        if not older or not older <= OrderedSet(v.as_proxy().node for v in values) - inside:
            return
        extension = self.tx.output.extension
        known = {c.value: c.choice for c in extension.choices}
        joined = OrderedSet(j.node for j in extension.joins)
        if any(v.as_proxy().node in older & joined and v not in known for v in values):
            return
        a, b = (known.get(v, v) if v.as_proxy().node in older else value for v in values)
        self.choices.append(Chosen(slot, value, Choice(self.condition, (a, b)), of_value))

    def remains(self, node: torch.fx.Node) -> bool:
        """Return whether the graph has the node when the paths are joined."""
        return True

    def check_names(self, own: OrderedSet[torch.fx.Node]) -> None:
        """Raises RefusedError: a program could tell two tensors from one that a path leaves under several names."""
        for i, values in enumerate(self.apart):
            left = OrderedSet(storage(pair[i]) for pair in self.pairs)
            apart = [node for node in map(node_of, values) if node in own]
            if len(left) < len(self.pairs) or not left.isdisjoint(map(storage, apart)):
                raise RefusedError("a path leaves one tensor under several names")

    def _match_tensors(self, a: variables.TensorVariable, b: variables.TensorVariable) -> Callable[[], VariableTracker]:
        key = (a.as_proxy().node, b.as_proxy().node)
        if key[0] is key[1]:
            return lambda: a
        if not is_alike(a, b):
            raise RefusedError("the paths leave tensors of different kinds")
        self.pairs[key] = (a, b)
        return lambda: self.joined[key]

    def _match_sequences(self, a: Any, b: Any) -> Callable[[], VariableTracker]:
        is_new = all(v.source is None for v in (a, b))
        if type(a) is variables.ListVariable:
            scopes = [getattr(v.mutation_type, "scope", 0) for v in (a, b)]
            is_new &= all(scope > current_scope_id() for scope in scopes)
        others = [key for key in self.lists if (key[0] == id(a)) != (key[1] == id(b))]
        if not is_new or others or len(a.items) != len(b.items):
            raise RefusedError("the paths leave different sequences")
        key = (id(a), id(b))
        makers = [self.match(x, y) for x, y in zip(a.items, b.items)]
        # Objects live as long as the paths.
        self.lists.setdefault(key, None)

        def make() -> VariableTracker:
            if self.lists[key] is None:
                items = [maker() for maker in makers]
                is_list = type(a) is variables.ListVariable
                self.lists[key] = type(a)(items, mutation_type=ValueMutationNew()) if is_list else type(a)(items)
            return self.lists[key]

        return make

    def _match_truths(self, a: VariableTracker, b: VariableTracker) -> Callable[[], VariableTracker]:
        condition = self.condition
        values = [v.as_python_constant() if v.is_python_constant() else None for v in (a, b)]
        if None not in values:
            if values[0] == values[1]:
                return lambda: a
            self.has_truths = True
            return lambda: Truth(condition if values[0] else self.call(condition, "logical_not"))

        self.has_truths = True

        def make() -> VariableTracker:
            parts = []
            for value, truth, chosen in zip(values, (a, b), (condition, self.call(condition, "logical_not"))):
                if value is not False:
                    parts.append(chosen if value else self.call(chosen, "logical_and", truth.tensor))
            return Truth(parts[0] if len(parts) == 1 else self.call(parts[0], "logical_or", parts[1]))

        return make

    def call(self, tensor: VariableTracker, name: str, *args: VariableTracker) -> Any:
        return tensor.call_method(self.tx, name, [*args], {})

    def select(self, site: tuple[Any, int]) -> list[Join]:
        """Join each pair of tensors by torch.where. Return the joins of older tensors. Raises RefusedError."""
        own = OrderedSet(node for path in self.paths for node in path.nodes)
        for node in own:
            if not is_selectable(node):
                raise RefusedError(f"{name_of(node)} in a path")
        if count_work(own) > MAX_OPERATORS:
            raise RefusedError("the paths have many operators")
        before = OrderedSet(storage(n) for n in self.tx.output.graph.nodes if n not in own) - OrderedSet([None])
        # A join in a path stands for a tensor that existed before, too.
        before |= OrderedSet(storage(j.node) for j in self.tx.output.extension.joins)
        self.check_names(own)
        joins = []
        for key, (a, b) in self.pairs.items():
            if grad_sources(key[0], own) != grad_sources(key[1], own):
                raise RefusedError("gradients of the paths reach different tensors")
            if a.device != self.condition.device:
                raise RefusedError("the condition is on another device")
            where = variables.TorchInGraphFunctionVariable(torch.where)
            joined = where.call_function(self.tx, [self.condition, a, b], {})
            if not is_alike(joined, a):
                raise RefusedError("the join has another layout")
            self.joined[key] = joined
            node = joined.as_proxy().node
            joins += [Join(node, n, own, site) for n in key if storage(n) in before]
        return joins


def join(joiner: Joiner, fork: Fork, site: tuple[Any, int]) -> tuple[Path, list[Join]]:
    """Return the stack and the variables behind both paths, and joins of older tensors. Raises RefusedError."""
    one, other = joiner.paths
    if len(one.stack) != len(other.stack):
        raise RefusedError("the stacks differ")
    stack = [joiner.match(a, b) for a, b in zip(one.stack, other.stack)]
    names = {}
    for name in OrderedSet([*one.variables, *other.variables]) if fork.join is not None else ():
        a, b = one.variables.get(name), other.variables.get(name)
        if a is None or b is None:
            if name in fork.live:
                raise RefusedError(f"{name} is unbound in a path")
        elif a is b:
            names[name] = lambda a=a: a
        elif name in fork.live:
            names[name] = joiner.match(a, b)
    returned = None
    if fork.join is None:
        returned = joiner.match(one.returned, other.returned)
    check_order(joiner.tx.output.side_effects, (one.stores, other.stores))
    stores = {}
    for slot in OrderedSet([*one.stores, *other.stores]):
        left = [path.stores[slot] if slot in path.stores else load(joiner.tx, slot) for path in joiner.paths]
        stores[slot] = joiner.match_stored(*left, is_object=not is_container(slot[0])), left
    joins = joiner.select(site)
    made = {name: make() for name, make in names.items()}
    stored = {}
    for slot, (make, left) in stores.items():
        stored[slot] = make()
        joiner.choose(slot, stored[slot], left, joins)
    path = type(one)([make() for make in stack], made, [], stored, returned and returned())
    return path, joins


def node_of(value: VariableTracker) -> torch.fx.Node | None:
    return value.as_proxy().node if type(value) is variables.TensorVariable else None


def is_truth(value: VariableTracker) -> bool:
    return isinstance(value, Truth) or (type(value) is variables.ConstantVariable and type(value.value) is bool)


def is_alike(a: VariableTracker, b: VariableTracker) -> bool:
    """Return whether two tensors agree in all but their elements."""
    values = [v.as_proxy().node.meta.get("example_value") for v in (a, b)]
    if any(type(v) is not FakeTensor or v.layout != torch.strided for v in values):
        return False
    if any(v.class_type is not torch.Tensor for v in (a, b)):
        return False
    kinds = [(v.dtype, v.device, v.requires_grad, v.is_conj(), v.is_neg()) for v in values]
    sizes = [[n.node.expr if isinstance(n, torch.SymInt) else n for n in (*v.shape, *v.stride())] for v in values]
    return kinds[0] == kinds[1] and sizes[0] == sizes[1]


def is_selectable(node: torch.fx.Node) -> bool:
    """Return whether a node may run for nothing."""
    example = node.meta.get("example_value")
    name = plain_name(node)
    is_plain = is_pure(node) and KEYWORDS.issuperset(k for k, v in node.kwargs.items() if v)
    if not isinstance(example, torch.Tensor) or not is_plain:
        return False
    if not example.requires_grad:
        return True
    if name in SCALING:
        numbers = [a for a in node.args if not isinstance(a, torch.fx.Node)]
        is_divided = name == "mul" or isinstance(node.args[0], torch.fx.Node)
        return is_divided and len(numbers) == 1 and all(math.isfinite(n) and n for n in numbers)
    return name in LINEAR


def count_work(nodes: Iterable[torch.fx.Node]) -> int:
    """Return how many different nodes compute more than one number."""
    first: dict[Any, torch.fx.Node] = {}
    same: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in nodes:
        args = map_arg((node.args, node.kwargs), lambda n: same.get(n, n))
        same[node] = first.setdefault((node.target, str(args)), node)
    is_scalar = {n: all(m.meta["example_value"].numel() == 1 for m in (n, *n.all_input_nodes)) for n in same.values()}
    return sum(not is_scalar[n] and name_of(n) not in VIEWS | CONSTRUCTORS for n in is_scalar)


def grad_sources(node: torch.fx.Node, own: OrderedSet[torch.fx.Node]) -> OrderedSet[torch.fx.Node]:
    """Return the tensors from before the branch that a gradient of ``node`` reaches."""
    found = ancestors_with_gradient([node], own)
    return OrderedSet(sorted(n for n in found if n not in own))


def ancestors_with_gradient(
    nodes: Iterable[torch.fx.Node], through: OrderedSet[torch.fx.Node] | None = None
) -> OrderedSet[torch.fx.Node]:
    """Return the tensors that a gradient of ``nodes`` reaches, if it only passes ``through`` these."""
    found: OrderedSet[torch.fx.Node] = OrderedSet()
    work = [*nodes]
    while work:
        node = work.pop()
        if node not in found and requires_grad(node):
            found.add(node)
            if through is None or node in through:
                work += node.all_input_nodes
    return found


def requires_grad(node: torch.fx.Node) -> bool:
    return any(getattr(v, "requires_grad", False) for v in tree_iter(node.meta.get("example_value")))


def storage(node: torch.fx.Node) -> int | None:
    example = node.meta.get("example_value")
    return example.untyped_storage()._cdata if type(example) is FakeTensor and example.layout == torch.strided else None


def version(node: torch.fx.Node) -> int:
    return node.meta["example_value"]._version


# The complete graph


def settle(tx: InstructionTranslatorBase, choices: list[Chosen]) -> None:
    """Let bytecode store the chosen values, once everything is traced."""
    effects = tx.output.side_effects
    settled = []
    for c in reversed(choices):
        if slots_of(effects, c.slot[0]).get(c.slot[1]) is c.value:
            store(tx, c.slot, c.choice)
            settled.append(c)
        elif any(c.choice in later.choice.values for later in settled):
            settled.append(c)
    objects = [v for v in effects.id_to_variable.values() if not isinstance(v, variables.TensorVariable)]
    kept = [tx.stack, tx.symbolic_locals, tx.debug_locals, effects.store_attr_mutations, objects]
    found: list[VariableTracker] = []
    VariableTracker.visit(found.append, kept)
    nodes = OrderedSet(v.as_proxy().node for v in found if type(v) is variables.TensorVariable)
    for c in settled:
        for join in c.joins:
            join.is_chosen = join.node not in nodes


def told_apart(graph: torch.fx.Graph, joins: Sequence[Join]) -> list[Join]:
    """Return the joins that a program can tell from the tensors that they stand for."""
    by_storage: dict[int | None, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        by_storage.setdefault(storage(node), []).append(node)
    outputs = OrderedSet(n for node in graph.nodes if node.op == "output" for n in node.all_input_nodes)
    differentiated = ancestors_with_gradient(outputs)

    def stands_for(node: torch.fx.Node) -> Iterable[torch.fx.Node]:
        """Yield what may share memory with a tensor in eager mode."""
        same = by_storage[storage(node)]
        yield from same
        for j in joins:
            if j.node in same:
                yield from stands_for(j.other)

    def is_told(j: Join) -> bool:
        if j.versions != j.versions_now():
            return True
        same, others = by_storage[storage(j.node)], [*stands_for(j.other)]
        users = [user for node in (*same, *others) for user in node.users]
        if any(name_of(user) in ("_get_data_attr", "set_", "requires_grad_", "detach_") for user in users):
            return True
        if not any(node in outputs and not (j.is_chosen and node is j.node) for node in same):
            return False
        if any(node in outputs or node.op in ("placeholder", "get_attr") for node in others):
            return True
        # The gradient of the join would lack that of the other uses.
        own = OrderedSet(n for k in joins for n in (*k.own, k.node))
        return any(user in differentiated and user not in own for node in others for user in node.users)

    return [j for j in joins if is_told(j)]
