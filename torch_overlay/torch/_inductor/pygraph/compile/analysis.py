"""
Questions about an FX graph that mixes CPU and GPU tensors. No function here changes a graph.

Crossing, crossings    which CPU values GPU code reads
known_values           which CPU values can be computed at compile time
recomputable_values    which CPU values the GPU can compute itself
transfers_to_host_before, random_draws_before   which CPU values can be copied together
exposed_storages       which results need memory of their own
"""

from __future__ import annotations

import dataclasses
import operator
from typing import TYPE_CHECKING

import torch
from torch._inductor.fx_passes import reinplace
from torch._inductor.fx_utils import draws_random_numbers, get_node_storage
from torch._inductor.pattern_matcher import get_arg_value
from torch._inductor.pygraph.compile.ops import (
    CONSTRUCTORS,
    COPIES,
    FUSED_OPTIMIZER_STEPS,
    INDEX_PUTS,
    SAME_ON_EVERY_DEVICE,
    SAME_ON_EVERY_DEVICE_FOR_INTEGERS,
    TAKES_CPU_TENSORS,
    UNINITIALIZED,
)
from torch._inductor.utils import is_gpu
from torch._prims_common import is_contiguous_or_false
from torch.fx.experimental.symbolic_shapes import (
    free_symbols,
    statically_known_true,
    sym_eq,
)
from torch.utils import _pytree as pytree
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


aten = torch.ops.aten
prims = torch.ops.prims

# Largest tensor that is delivered. One launch takes twice as much. The kernel stores this
# many bytes of its parameters in less time than a copy engine takes to start.
MAX_DELIVERED_TENSOR_BYTES = 2048

# Largest tensor that is computed at compile time, intermediate results included. The result
# stays in GPU memory and in Inductor's cache.
MAX_KNOWN_BYTES = 16 << 20


# Tensors of a node.


def tensors_of(node: torch.fx.Node) -> list[torch.Tensor]:
    """Return the fake tensors among the results of a node."""
    return [
        t
        for t in pytree.tree_leaves(node.meta.get("val"))
        if isinstance(t, torch.Tensor)
    ]


def is_on_cpu(node: torch.fx.Node) -> bool:
    """Return whether the result of a node is one CPU tensor."""
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.device.type == "cpu"


def gpu_of(node: torch.fx.Node) -> torch.device | None:
    """Return the GPU that results of a node lie on, None if none does."""
    for t in tensors_of(node):
        if is_gpu(t.device.type):
            return t.device
    return None


def static_nbytes(t: torch.Tensor) -> int | None:
    """Return the size of a tensor, None if it depends on symbols."""
    if free_symbols(t.shape):
        return None
    return int(t.numel()) * t.element_size()


def dims_by_stride(val: torch.Tensor) -> list[int]:
    """
    Return the dimensions of a tensor with static strides, outermost in memory first.

    If the tensor has gaps or is expanded, the order is the order of a copy.
    """
    return sorted(range(val.dim()), key=torch.empty_like(val).stride, reverse=True)


def is_dense(val: torch.Tensor) -> bool:
    """Return whether some permutation of a tensor is contiguous."""
    return is_contiguous_or_false(val.permute(dims_by_stride(val)))


def contiguous_permutation(val: torch.Tensor) -> list[int]:
    """Return the permutation that makes a dense tensor contiguous, else the identity."""
    if is_contiguous_or_false(val) or not is_dense(val):
        return [*range(val.dim())]
    return dims_by_stride(val)


def can_be_copied(node: torch.fx.Node) -> bool:
    """Return whether copying the bytes of a CPU tensor copies its value."""
    val = node.meta["val"]
    return (
        val.layout == torch.strided
        # A complex tensor may have the conjugate bit.
        and not val.is_complex()
        # Generated CPU code ignores the negative bit of operands.
        and not any(
            t.is_neg() for n in (node, *node.all_input_nodes) for t in tensors_of(n)
        )
        and static_nbytes(val) != 0
        and (
            is_contiguous_or_false(val)
            or all(isinstance(n, int) for n in (*val.shape, *val.stride()))
        )
    )


def can_be_delivered(node: torch.fx.Node) -> bool:
    """Return whether a CPU tensor may be a parameter of the kernel of a Deliver."""
    nbytes = static_nbytes(node.meta["val"])
    return (
        nbytes is not None
        and nbytes <= MAX_DELIVERED_TENSOR_BYTES
        and can_be_copied(node)
    )


# Operators of a node.


def is_core_op(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and (
        node.target.namespace in ("aten", "prims")
    )


def is_constant(node: torch.fx.Node) -> bool:
    """Return whether a node is an attribute of the graph's module, or a copy of one."""
    if node.target is aten.lift_fresh_copy.default:
        return is_constant(node.args[0])  # type: ignore[arg-type]
    return node.op == "get_attr"


def is_deterministic(node: torch.fx.Node) -> bool:
    """Return whether equal inputs always give equal results."""
    if node.target is operator.getitem:
        return True
    return (
        is_core_op(node)
        and not node.target._schema.is_mutable  # type: ignore[union-attr]
        and torch.Tag.nondeterministic_seeded not in node.target.tags  # type: ignore[union-attr]
        and node.target not in UNINITIALIZED
    )


def is_same_on_every_device(node: torch.fx.Node) -> bool:
    """Return whether a CPU operation gives the same bits on the GPU."""
    if node.target in SAME_ON_EVERY_DEVICE:
        return True
    dtypes = [t.dtype for n in (node, *node.all_input_nodes) for t in tensors_of(n)]
    if node.target is prims.convert_element_type.default:
        after, before = dtypes
        if before.is_floating_point and before.itemsize == 1:
            # The GPU's architecture decides which float8 dtypes its code can read.
            return False
        # These conversions round at most once, and no value is out of range.
        return after in (torch.float32, torch.float64) or not (
            after.is_floating_point or before.is_floating_point
        )
    return node.target in SAME_ON_EVERY_DEVICE_FOR_INTEGERS and not any(
        dtype.is_floating_point or dtype.is_complex for dtype in dtypes
    )


# CPU values that GPU code reads.


@dataclasses.dataclass(frozen=True)
class Crossing:
    """A CPU value that a node on the GPU reads."""

    value: torch.fx.Node
    user: torch.fx.Node
    device: torch.device

    @property
    def is_copy(self) -> bool:
        return self.user.target is prims.device_put.default

    @property
    def is_non_blocking(self) -> bool:
        """
        Whether eager mode, if the value is pinned, copies it in the order of the stream
        without waiting.
        """
        if self.user.target not in COPIES:
            return False
        value, result = self.value.meta["val"], self.user.meta["val"]
        # The host converts or expands the value first if the two differ.
        return (
            get_arg_value(self.user, 2, "non_blocking") is True
            and value.dtype == result.dtype
            and statically_known_true(sym_eq(value.shape, result.shape))
        )


def crossings(graph: torch.fx.Graph) -> Iterator[Crossing]:
    """Yield the CPU values that core operators on the GPU read and could read on the GPU."""
    for user in graph.nodes:
        if user.op != "call_function" or not is_core_op(user):
            continue
        device = gpu_of(user)
        if device is None:
            continue
        for value in user.all_input_nodes:
            if not is_on_cpu(value):
                continue
            if user.target is prims.device_put.default:
                # Inductor copies constants to the GPU at compile time.
                if not is_constant(value):
                    yield Crossing(value, user, device)
            elif needs_cpu_value(user, value):
                continue
            elif value.meta["val"].dim() == 0 or user.target in TAKES_CPU_TENSORS:
                yield Crossing(value, user, device)


def needs_cpu_value(user: torch.fx.Node, value: torch.fx.Node) -> bool:
    """Return whether a GPU operation treats a value on the CPU and on the GPU differently."""
    if user.target in FUSED_OPTIMIZER_STEPS:
        return value.meta["val"].dtype != torch.float32
    return user.target in INDEX_PUTS and value is user.args[2] and fills_by_mask(user)


def fills_by_mask(user: torch.fx.Node) -> bool:
    """
    Return whether index_put calls masked_fill only if its value is a CPU scalar.

    With a GPU scalar, index_put asks the device for the elements of the mask, and the host
    waits. If the mask is the only index, Inductor lowers index_put to a fill for both.
    """
    _, indices, value = user.args[:3]
    given = [i.meta["val"].dtype for i in indices if i is not None]  # type: ignore[union-attr]
    return (
        value.meta["val"].dim() == 0  # type: ignore[union-attr]
        and len(indices) > 1  # type: ignore[arg-type]
        and given in ([torch.bool], [torch.uint8])
        and not get_arg_value(user, 3, "accumulate")
    )


# Properties of all nodes of a graph.


def known_values(graph: torch.fx.Graph) -> OrderedSet[torch.fx.Node]:
    """
    Return the CPU values that constants and constructors determine.

    Large values are excluded, and all that depend on them: computing them at compile time
    allocates every intermediate result, and fused code may allocate none.
    """
    known = OrderedSet[torch.fx.Node]()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        values = tensors_of(node)
        if {t.device.type for t in values} != {"cpu"}:
            continue
        sizes = map(static_nbytes, values)
        if all(n is not None and n <= MAX_KNOWN_BYTES for n in sizes) and (
            is_constant(node)
            or (node.target in CONSTRUCTORS and not inputs)
            or (is_deterministic(node) and inputs and all(n in known for n in inputs))
        ):
            known.add(node)
    return known


def recomputable_values(graph: torch.fx.Graph) -> OrderedSet[torch.fx.Node]:
    """
    Return the CPU values that the GPU can compute with the same bits.

    Their inputs are constants, recomputable values, and tensors that can be delivered.
    """
    found = OrderedSet[torch.fx.Node]()
    for value in graph.nodes:
        if not is_on_cpu(value):
            continue
        inputs = filter(is_on_cpu, value.all_input_nodes)
        if (
            is_constant(value)
            or value.target in CONSTRUCTORS
            or (
                is_same_on_every_device(value)
                and all(n in found or can_be_delivered(n) for n in inputs)
            )
        ):
            found.add(value)
    return found


def transfers_to_host_before(graph: torch.fx.Graph) -> dict[torch.fx.Node, int]:
    """
    Return for each node how many transfers from the GPU to the host it depends on, one
    after the other.

    Values with equal numbers can be delivered together: no value waits for a transfer that
    depends on another value.
    """
    count: dict[torch.fx.Node, int] = {}
    for node in graph.nodes:
        count[node] = max((count[n] for n in node.all_input_nodes), default=0)
        if gpu_of(node) is None and any(map(gpu_of, node.all_input_nodes)):
            count[node] += 1
    return count


def random_draws_before(graph: torch.fx.Graph) -> dict[torch.fx.Node, int]:
    """
    Return for each node how many random draws with inputs precede it in the program.

    Values with equal numbers can be delivered together: no draw waits for a value that the
    program computes after another draw. A draw without inputs waits for no value.
    """
    count, before = 0, {}
    for node in graph.nodes:
        before[node] = count
        count += draws_random_numbers(node) and bool(node.all_input_nodes)
    return before


def exposed_storages(graph: torch.fx.Graph) -> OrderedSet[int | None]:
    """
    Return the storages that no other tensor may share: what the graph returns, what a later
    pass may write to in place, and what an operator indexes by storage offset.
    """
    in_place = (
        reinplace.inplaceable_ops.keys()
        | reinplace.inplaceable_foreach_ops.keys()
        | reinplace._SCATTER_OP_TO_VIEW.keys()
    )
    with_offset = (aten.as_strided.default, aten.as_strided_scatter.default)
    return OrderedSet(
        get_node_storage(n)
        for node in graph.nodes
        if node.op == "output"
        or node.target in in_place
        or node.target in with_offset
        or isinstance(node.target, torch._ops.HigherOrderOperator)
        or (
            isinstance(node.target, torch._ops.OpOverload)
            and node.target._schema.is_mutable
        )
        for n in node.all_input_nodes
    )


def walk_back(
    start: torch.fx.Node,
    inputs_of: Callable[[torch.fx.Node], Iterable[torch.fx.Node]],
) -> Iterator[torch.fx.Node]:
    """
    Yield ``start``, its inputs, their inputs, and so on, each once.

    The walk is a loop: a graph may have longer chains of operations than Python has frames.
    """
    seen, todo = OrderedSet([start]), [start]
    while todo:
        node = todo.pop()
        yield node
        inputs = [i for i in inputs_of(node) if i not in seen]
        seen.update(inputs)
        todo += inputs
