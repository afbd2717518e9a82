"""Questions about an FX graph that mixes CPU and GPU tensors. Nothing here changes a graph."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, TYPE_CHECKING

import torch
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch._inductor.fx_passes import reinplace
from torch._inductor.fx_utils import draws_random_numbers, get_node_storage
from torch._inductor.pattern_matcher import get_arg_value
from torch._inductor.utils import is_gpu
from torch._prims_common import is_contiguous_or_false
from torch.fx.experimental.symbolic_shapes import free_symbols, statically_known_true, sym_eq
from torch.utils import _pytree as pytree
from torch.utils._ordered_set import OrderedSet


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


aten = torch.ops.aten
prims = torch.ops.prims

# Largest tensor that is delivered: the kernel stores its parameters in less time than a copy engine takes to start.
MAX_DELIVERED_TENSOR_BYTES = 2048

# Largest tensor that is computed at compile time, intermediate results included.
MAX_KNOWN_BYTES = 16 << 20

# Each makes a tensor from arguments that are no tensors.
CONSTRUCTORS = OrderedSet(
    [aten.full.default, aten.scalar_tensor.default, aten.eye.default, aten.eye.m, prims.iota.default]
)

# Each gives the same bits on the CPU and on the GPU, for every dtype.
SAME_ON_EVERY_DEVICE = OrderedSet(
    [
        aten.alias.default,
        aten.clone.default,
        aten.diagonal.default,
        aten.expand.default,
        aten.permute.default,
        aten.reshape.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
    ]
)

# Each gives the same bits on the CPU and on the GPU if all operands are integers or booleans.
SAME_ON_EVERY_DEVICE_FOR_INTEGERS = OrderedSet(
    [
        aten.add.Tensor,
        aten.bitwise_not.default,
        aten.logical_not.default,
        aten.mul.Tensor,
        aten.neg.default,
        aten.sub.Tensor,
        aten.where.self,
        *(
            overload
            for name in "bitwise_and bitwise_or bitwise_xor eq ge gt le lt ne".split()
            for overload in (getattr(aten, name).Scalar, getattr(aten, name).Tensor)
        ),
    ]
)

# Each takes a tensor and returns memory that it does not initialize.
UNINITIALIZED = OrderedSet(
    [aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default, aten.resize.default]
)

INDEX_PUTS = OrderedSet([aten._unsafe_index_put.default, aten.index_put.default, aten.index_put_.default])

# Each works on the GPU and accepts CPU tensors that have dimensions. Other GPU operators accept 0-d CPU tensors only.
TAKES_CPU_TENSORS = INDEX_PUTS | OrderedSet(
    [aten._unsafe_index.Tensor, aten.copy.default, aten.copy_.default, aten.index.Tensor, aten.slice_scatter.default]
)

# Each kernel accepts a CPU learning rate of any dtype, but reads a GPU learning rate as float32.
FUSED_OPTIMIZER_STEPS = OrderedSet(
    [
        op.tensor_lr
        for name in ("adagrad", "adam", "adamw", "sgd")
        for op in (getattr(aten, f"_fused_{name}"), getattr(aten, f"_fused_{name}_"))
    ]
)

# Each takes non_blocking as its third argument.
COPIES = OrderedSet([aten.copy.default, aten.copy_.default, prims.device_put.default])

# Each inlines the graphs that it is given into a kernel. A kernel has no place for copies.
INLINES_GRAPHS = OrderedSet([flex_attention, flex_attention_backward])

# The forward hands the generator's seed and offset to the backward: on the GPU if the forward is captured, else on the
# CPU. The backward expects them by the same rule, see Note [Seed and Offset Device] in attention.cu.
MEMORY_EFFICIENT_ATTENTION = OrderedSet(
    [
        aten._efficient_attention_backward.default,
        aten._efficient_attention_forward.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_efficient_attention_backward.default,
    ]
)


def tensors_of(node: torch.fx.Node) -> list[torch.Tensor]:
    """Return the fake tensors among the results of a node."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return [t for t in leaves if isinstance(t, torch.Tensor)]


def is_on_cpu(node: torch.fx.Node) -> bool:
    """Return whether the result of a node is one CPU tensor."""
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.device.type == "cpu"


def gpu_of(node: torch.fx.Node) -> torch.device | None:
    """Return the GPU that results of a node lie on, None if none does."""
    return next((t.device for t in tensors_of(node) if is_gpu(t.device.type)), None)


def static_nbytes(t: torch.Tensor) -> int | None:
    """Return the size of a tensor, None if it depends on symbols."""
    return None if free_symbols(t.shape) else int(t.numel()) * t.element_size()


def dims_by_stride(val: torch.Tensor) -> list[int]:
    """Return the dimensions, outermost in memory first; those of a copy if the tensor is not dense."""
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
        and not any(t.is_neg() for n in (node, *node.all_input_nodes) for t in tensors_of(n))
        and static_nbytes(val) != 0
        and (is_contiguous_or_false(val) or all(isinstance(n, int) for n in (*val.shape, *val.stride())))
    )


def can_be_delivered(node: torch.fx.Node) -> bool:
    """Return whether a CPU tensor may be a parameter of the kernel of a Deliver."""
    nbytes = static_nbytes(node.meta["val"])
    is_small = nbytes is not None and nbytes <= MAX_DELIVERED_TENSOR_BYTES
    return is_small and can_be_copied(node)


def is_core_op(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and (node.target.namespace in ("aten", "prims"))


def is_constant(node: torch.fx.Node) -> bool:
    """Return whether a node is an attribute of the graph's module, or a copy of one."""
    while node.target is aten.lift_fresh_copy.default:
        node = node.args[0]  # type: ignore[assignment]
    return node.op == "get_attr"


def is_deterministic(node: torch.fx.Node) -> bool:
    """Return whether equal inputs always give equal results."""
    return node.target is operator.getitem or (
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
        return after in (torch.float32, torch.float64) or not (after.is_floating_point or before.is_floating_point)
    return node.target in SAME_ON_EVERY_DEVICE_FOR_INTEGERS and not any(
        dtype.is_floating_point or dtype.is_complex for dtype in dtypes
    )


@dataclasses.dataclass(frozen=True)
class Crossing:
    """A CPU value that a node on the GPU reads."""

    value: torch.fx.Node
    user: torch.fx.Node
    device: torch.device

    @property
    def is_non_blocking(self) -> bool:
        """Whether eager mode does not wait for the copy, if the value is pinned."""
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
    if user.target not in INDEX_PUTS or value is not user.args[2]:
        return False
    # index_put calls masked_fill only if its value is a CPU scalar. With a GPU scalar, it asks the device for the
    # elements of the mask, and the host waits. If the mask is the only index, Inductor lowers both to a fill.
    indices: Any = user.args[1]
    given = [i.meta["val"].dtype for i in indices if i is not None]
    return (
        value.meta["val"].dim() == 0
        and len(indices) > 1
        and given in ([torch.bool], [torch.uint8])
        and not get_arg_value(user, 3, "accumulate")
    )


def known_values(graph: torch.fx.Graph) -> OrderedSet[torch.fx.Node]:
    """Return the CPU values that constants and constructors determine, without large ones."""
    # Computing these at compile time allocates every intermediate result; fused code may not.
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
    """Return the CPU values that the GPU can compute, from constants and what can be delivered, to the same bits."""
    found = OrderedSet[torch.fx.Node]()
    for value in filter(is_on_cpu, graph.nodes):
        if (
            is_constant(value)
            or value.target in CONSTRUCTORS
            or is_same_on_every_device(value)
            and all(n in found or can_be_delivered(n) for n in filter(is_on_cpu, value.all_input_nodes))
        ):
            found.add(value)
    return found


def phases(graph: torch.fx.Graph) -> dict[torch.fx.Node, tuple[int, int]]:
    """
    Return for each node how many transfers from the GPU to the host it depends on, one after the other, and how many
    random draws with inputs precede it. Values of one phase can be delivered together: no value waits for a transfer
    that depends on another one, and no draw for a value that the program computes later.
    """
    draws = 0
    found: dict[torch.fx.Node, tuple[int, int]] = {}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        transfers = max((found[n][0] for n in inputs), default=0)
        found[node] = transfers + (gpu_of(node) is None and any(map(gpu_of, inputs))), draws
        draws += draws_random_numbers(node) and bool(inputs)
    return found


def exposed_storages(graph: torch.fx.Graph) -> OrderedSet[int | None]:
    """
    Return the storages that no other tensor may share: what the graph returns, what a later pass may write to in place,
    and what an operator indexes by storage offset.
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
        or (isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable)
        for n in node.all_input_nodes
    )


def walk_back(
    start: torch.fx.Node, inputs_of: Callable[[torch.fx.Node], Iterable[torch.fx.Node]]
) -> Iterator[torch.fx.Node]:
    """Yield ``start``, its inputs, their inputs, and so on, each once."""
    # A graph may have longer chains of operations than Python has frames.
    seen, todo = OrderedSet([start]), [start]
    while todo:
        node = todo.pop()
        yield node
        inputs = [i for i in inputs_of(node) if i not in seen]
        seen.update(inputs)
        todo += inputs
