"""
Places CPU values of a GPU graph, so that what is captured reads no CPU memory.

A captured kernel has the values that it was captured with, and Inductor passes 0-d CPU
tensors to kernels by value; a captured copy reads the address that it was captured with.
So each CPU value that GPU code reads is given a GPU home, in front of the code that is
captured and outside of it:

constant     lies on the GPU since the graph was compiled
constructor  made on the GPU, as are the views, casts and integer operations on it whose
             results are the same on both
known        computed from constants and constructors only, on the CPU, when the graph is
             compiled, and a constant since
small        delivered: all that can be at the same time, with one kernel launch
larger       staged or uploaded, as is what the program copies with non_blocking

See deliver.py for the last two. The CPU keeps its own copy of everything: operations on
CPU tensors run where the program has them, ahead of the graph, and CPU outputs stay CPU
tensors. Nothing is packed into another dtype.

What reads CPU tensors nevertheless is not captured; see partition_reason.
"""

from __future__ import annotations

import dataclasses
import logging
import operator
from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo.utils import counters
from torch._inductor import ir
from torch._inductor.codegen.wrapper import SubgraphPythonWrapperCodegen, WrapperLine
from torch._inductor.dependencies import WeakDep
from torch._inductor.fx_utils import FakeTensorUpdater, get_node_storage
from torch._inductor.lowering import register_lowering
from torch._inductor.pattern_matcher import get_arg_value
from torch._inductor.pygraph.report import (
    BRINGS_CPU_VALUES,
    COPIES_TO_CPU,
    CPU_VALUES,
    CpuValue,
    innermost,
)
from torch._inductor.pygraph.values.deliver import (
    MAX_DELIVERED_BYTES,
    offsets,
    PIECE_BYTES,
)
from torch._inductor.utils import (
    get_gpu_type,
    IndentedBuffer,
    is_cudagraph_unsafe_op,
    is_gpu,
)
from torch._inductor.virtualized import V
from torch._prims.rng_prims import graphsafe_run_with_rng_state, run_with_rng_state
from torch._prims_common import is_contiguous_or_false
from torch.fx.experimental.symbolic_shapes import (
    free_symbols,
    statically_known_true,
    sym_eq,
)
from torch.utils import _pytree as pytree
from torch.utils._ordered_set import OrderedSet
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.symbol import symbol_is_type, SymT


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import sympy

    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.scheduler import BaseSchedulerNode, SchedulerBuffer


log = logging.getLogger(__name__)

aten = torch.ops.aten
prims = torch.ops.prims

# What is delivered, half of what one launch can take: to store as many bytes of its
# parameters takes a kernel less time than a copy engine takes to start.
MAX_SMALL_BYTES = 2048

# What is computed when the graph is compiled, and each step towards it: the result stays on
# the GPU and in Inductor's cache.
MAX_KNOWN_BYTES = 16 << 20

# What is staged: memory of this size stays allocated on either side, and the comparison
# takes the host as long as launching a few kernels does. Larger tensors are uploaded.
MAX_STAGED_BYTES = 1 << 20

lib = torch.library.Library("pygraph", "DEF")  # noqa: TOR901
lib.define("deliver(Tensor[] values, Device device) -> Tensor[]")
lib.define("stage(Tensor value, Device device, bool non_blocking) -> Tensor")
lib.define("upload(Tensor value, Device device, bool non_blocking) -> Tensor")


def copied(
    value: torch.Tensor, device: torch.device, non_blocking: bool = False
) -> torch.Tensor:
    "For whoever runs the graph itself, a debugger for one."
    return value.to(
        device,
        non_blocking=non_blocking,
        copy=True,
        memory_format=torch.contiguous_format,
    )


@torch.library.impl(lib, "deliver", "CompositeExplicitAutograd")
def _(values: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    return [copied(v, device) for v in values]


@torch.library.impl(lib, "stage", "CompositeExplicitAutograd")
@torch.library.impl(lib, "upload", "CompositeExplicitAutograd")
def _(value: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
    return copied(value, device, non_blocking)


@torch.library.register_fake("pygraph::deliver", lib=lib)
def _(values: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    return [torch.empty(v.shape, dtype=v.dtype, device=device) for v in values]


@torch.library.register_fake("pygraph::stage", lib=lib)
@torch.library.register_fake("pygraph::upload", lib=lib)
def _(value: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device=device)


def own(wrapper: PythonWrapperCodegen, name: str, type: str, *args: str) -> None:
    """
    Gives the generated module an object of deliver.py. It is called directly: an
    operator's dispatch would take longer than what it does.
    """
    while isinstance(wrapper, SubgraphPythonWrapperCodegen):
        wrapper = wrapper.parent_wrapper
    wrapper.add_import_once(f"from torch._inductor.pygraph.values.deliver import {type}")
    wrapper.header.writeline(f"{name} = {type}({', '.join(args)})")


@dataclasses.dataclass
class PackLine(WrapperLine):
    owner: str
    values: list[str]

    def codegen(self, code: IndentedBuffer) -> None:
        code.writeline(f"{self.owner}.pack([{', '.join(self.values)}])")


class Pack(ir.ExternKernel):
    """
    Reads the CPU values that a Launch gives to the GPU. The Launch may be found to have no
    effect, and be gone.
    """

    def __init__(self, values: Sequence[ir.IRNode], gpu: torch.device) -> None:
        super().__init__(None, ir.NoneLayout(device=torch.device("cpu")), values, ())
        self.gpu = gpu
        self.name = V.graph.register_buffer(self)
        V.graph.register_operation(self)

    def should_allocate(self) -> bool:
        return False

    def has_side_effects(self) -> bool:
        return True

    @property
    def owner(self) -> str:
        return f"deliver_{self.get_name()}"

    def codegen(self, wrapper: PythonWrapperCodegen) -> None:
        values = (f"({v.get_dtype()}, {tuple(map(int, v.get_size()))})" for v in self.inputs)
        own(wrapper, self.owner, "Deliver", str(self.gpu.index), *values)
        wrapper.writeline(PackLine(self.owner, self.codegen_args()))


class Launch(ir.ExternKernel):
    """
    Gives the GPU what ``pack`` read. It reads nothing on the CPU that the capture of a
    graph could freeze; see CapturedValues.
    """

    def __init__(self, pack: Pack) -> None:
        device = pack.gpu
        super().__init__(None, ir.MultiOutputLayout(device=device), [], ())
        self.pack = pack
        self.name = V.graph.register_buffer(self)
        V.graph.register_operation(self)
        V.graph.additional_buffer_deps[self.get_operation_name()].add(pack.get_name())
        self.outputs = [
            ir.MultiOutput(
                ir.FixedLayout(device, value.get_dtype(), value.get_size()),
                self,
                [(list, i)],
                skip_size_stride_alignment_checks=True,
            )
            for i, value in enumerate(pack.inputs)
        ]

    def should_allocate(self) -> bool:
        return False

    def codegen(self, wrapper: PythonWrapperCodegen) -> None:
        wrapper.writeline(f"{self.get_name()} = {self.pack.owner}.launch()")


@register_lowering(torch.ops.pygraph.deliver.default, type_promotion_kind=None)
def lower_deliver(values: list[Any], device: torch.device) -> list[Any]:
    realize = ir.ExternKernel.realize_input
    contiguous = ir.ExternKernel.require_contiguous
    launch = Launch(Pack([realize(contiguous(v)) for v in values], device))
    V.graph.add_device_info(device)
    # Of a graph under capture they are ordinary buffers, else what all calls share.
    V.graph.never_reuse_buffers.update(o.get_name() for o in launch.outputs)
    return [ir.TensorBox.create(o) for o in launch.outputs]


class HostCopy(ir.FallbackKernel):
    """A copy to the GPU that may not be captured: by a Stage or an Upload."""

    @property
    def how(self) -> str:
        return {
            torch.ops.pygraph.stage.default: "stage",
            torch.ops.pygraph.upload.default: "upload",
        }[self.op_overload]

    @property
    def owner(self) -> str:
        return f"{self.how}_{self.get_name()}"

    def codegen(self, wrapper: PythonWrapperCodegen) -> None:
        self.python_kernel_name = f"{self.owner}.{self.how}"
        device, non_blocking = self.constant_args
        args = [str(device.index), *(["True"] if non_blocking else [])]
        own(wrapper, self.owner, self.how.capitalize(), *args)
        super().codegen(wrapper)

    def codegen_args(self) -> list[str]:
        # The object knows the rest.
        return super().codegen_args()[:1]


def _lower_host_copy(op: torch._ops.OpOverload, *, owns_result: bool) -> None:
    @register_lowering(op, type_promotion_kind=None)
    def lowering(value: Any, device: torch.device, non_blocking: bool) -> Any:
        value = ir.ExternKernel.require_contiguous(value)
        output = HostCopy.create(op, value, device, non_blocking)
        output.skip_size_stride_alignment_checks = True
        # Though what it copies may not be, it is allocated here.
        V.graph.unaligned_buffers.discard(output.get_name())
        if owns_result:
            V.graph.never_reuse_buffers.add(output.get_name())
        V.graph.add_device_info(device)
        return ir.TensorBox.create(output)


_lower_host_copy(torch.ops.pygraph.stage.default, owns_result=True)
_lower_host_copy(torch.ops.pygraph.upload.default, owns_result=False)


CONSTRUCTORS = OrderedSet(
    [
        aten.full.default,
        aten.scalar_tensor.default,
        aten.eye.default,
        aten.eye.m,
        prims.iota.default,
    ]
)

# With the same result to the bit wherever they run. Of the arithmetic that is so for
# integers only: GPU code contracts a floating-point multiplication and addition to one.
SAME_ANYWHERE = OrderedSet(
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
SAME_FOR_INTEGERS = OrderedSet(
    [
        aten.add.Tensor,
        aten.bitwise_and.Scalar,
        aten.bitwise_and.Tensor,
        aten.bitwise_not.default,
        aten.bitwise_or.Scalar,
        aten.bitwise_or.Tensor,
        aten.bitwise_xor.Scalar,
        aten.bitwise_xor.Tensor,
        aten.eq.Scalar,
        aten.eq.Tensor,
        aten.ge.Scalar,
        aten.ge.Tensor,
        aten.gt.Scalar,
        aten.gt.Tensor,
        aten.le.Scalar,
        aten.le.Tensor,
        aten.logical_not.default,
        aten.lt.Scalar,
        aten.lt.Tensor,
        aten.mul.Tensor,
        aten.ne.Scalar,
        aten.ne.Tensor,
        aten.neg.default,
        aten.sub.Tensor,
        aten.where.self,
    ]
)

# They take a tensor, and give memory that nothing was written to.
UNINITIALIZED = OrderedSet(
    [
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
        aten.resize.default,
    ]
)

# GPU operations that take CPU tensors of more than no dimension.
TAKES_CPU_TENSORS = OrderedSet(
    [
        aten._unsafe_index.Tensor,
        aten._unsafe_index_put.default,
        aten.copy.default,
        aten.copy_.default,
        aten.index.Tensor,
        aten.index_put.default,
        aten.index_put_.default,
        aten.slice_scatter.default,
    ]
)

INDEX_PUTS = OrderedSet(
    [
        aten._unsafe_index_put.default,
        aten.index_put.default,
        aten.index_put_.default,
    ]
)

# Their kernels take a learning rate on the CPU as it is, and one on the GPU for float32.
FUSED_STEPS = OrderedSet(
    [
        op.tensor_lr
        for name in ("adagrad", "adam", "adamw", "sgd")
        for op in (getattr(aten, f"_fused_{name}"), getattr(aten, f"_fused_{name}_"))
    ]
)

# Each has non_blocking as its third argument.
COPIES = OrderedSet([aten.copy.default, aten.copy_.default, prims.device_put.default])


def tensors(node: torch.fx.Node) -> list[torch.Tensor]:
    return [
        t
        for t in pytree.tree_leaves(node.meta.get("val"))
        if isinstance(t, torch.Tensor)
    ]


# In the meta of a module that is a nested region, a branch or a score: the operators that it
# is given to.
CALLERS = "callers"


def note_callers(gm: torch.fx.GraphModule, name: str) -> None:
    """Of the module of ``gm`` with that name, before passes run on it."""
    getattr(gm, name).meta[CALLERS] = [
        user.target
        for node in gm.graph.find_nodes(op="get_attr", target=name)
        for user in node.users
    ]


# They make what they are given a part of a kernel, which has no place for copies.
INLINING = OrderedSet(
    [
        torch.ops.higher_order.flex_attention,
        torch.ops.higher_order.flex_attention_backward,
    ]
)


def on_cpu(node: torch.fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.device.type == "cpu"


def gpu_of(node: torch.fx.Node) -> torch.device | None:
    "The GPU that a node's results lie on."
    for t in tensors(node):
        if is_gpu(t.device.type):
            return t.device
    return None


def is_core_op(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and (
        node.target.namespace in ("aten", "prims")
    )


def is_constant(node: torch.fx.Node) -> bool:
    if node.target is aten.lift_fresh_copy.default:
        return is_constant(node.args[0])  # type: ignore[arg-type]
    return node.op == "get_attr"


def is_deterministic(node: torch.fx.Node) -> bool:
    """Whether equal inputs give equal results, at any time."""
    if node.target is operator.getitem:
        return True
    return (
        is_core_op(node)
        and not node.target._schema.is_mutable  # type: ignore[union-attr]
        and torch.Tag.nondeterministic_seeded not in node.target.tags  # type: ignore[union-attr]
        and node.target not in UNINITIALIZED
    )


def known_values(graph: torch.fx.Graph) -> OrderedSet[torch.fx.Node]:
    """
    Those on the CPU that depend on nothing that a call brings, and on nothing large:
    compiled code may need no memory for what eager mode does.
    """
    known = OrderedSet[torch.fx.Node]()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        values = tensors(node)
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


def static_nbytes(t: torch.Tensor) -> int | None:
    if free_symbols(t.shape):
        return None
    return int(t.numel()) * t.element_size()


def can_be_copied(node: torch.fx.Node) -> bool:
    """Whether the bytes of a value are all there is to it."""
    val = node.meta["val"]
    return (
        val.layout == torch.strided
        and not val.is_complex()  # it may be a conjugate
        # Nor what has the negative bit, or is made of it: the CPU's code reads the bytes.
        and not any(t.is_neg() for n in (node, *node.all_input_nodes) for t in tensors(n))
        and static_nbytes(val) != 0
        and (
            is_contiguous_or_false(val)
            or all(isinstance(n, int) for n in (*val.shape, *val.stride()))
        )
    )


def order_of(val: torch.Tensor) -> list[int]:
    """
    The dimensions of a tensor of static strides as they lie in memory, or in a copy of it
    where it has gaps or is expanded.
    """
    return sorted(range(val.dim()), key=torch.empty_like(val).stride, reverse=True)


def has_no_gaps(val: torch.Tensor) -> bool:
    return is_contiguous_or_false(val.permute(order_of(val)))


def contiguous_order(val: torch.Tensor) -> list[int]:
    """The dimensions of a value, permuted to be contiguous if it has no gaps."""
    if is_contiguous_or_false(val) or not has_no_gaps(val):
        return [*range(val.dim())]
    return order_of(val)


def is_small(node: torch.fx.Node) -> bool:
    nbytes = static_nbytes(node.meta["val"])
    return nbytes is not None and nbytes <= MAX_SMALL_BYTES and can_be_copied(node)


def is_same_anywhere(node: torch.fx.Node) -> bool:
    if node.target in SAME_ANYWHERE:
        return True
    dtypes = [t.dtype for n in (node, *node.all_input_nodes) for t in tensors(n)]
    if node.target is prims.convert_element_type.default:
        # Rounded at most once, and never out of range.
        after, before = dtypes
        if before.is_floating_point and before.itemsize == 1:
            # Which of them GPU code can read depends on the GPU.
            return False
        return after in (torch.float32, torch.float64) or not (
            after.is_floating_point or before.is_floating_point
        )
    return node.target in SAME_FOR_INTEGERS and not any(
        dtype.is_floating_point or dtype.is_complex for dtype in dtypes
    )


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
        """Whether eager mode copies the value in the order of the stream, if it is pinned."""
        if self.user.target not in COPIES:
            return False
        value, result = self.value.meta["val"], self.user.meta["val"]
        # Else the host converts or expands it first.
        return (
            get_arg_value(self.user, 2, "non_blocking") is True
            and value.dtype == result.dtype
            and statically_known_true(sym_eq(value.shape, result.shape))
        )


def is_read_on_host(value: torch.fx.Node, user: torch.fx.Node) -> bool:
    """Whether ``user``, which is on the GPU, does something else with a value that is too."""
    if user.target in FUSED_STEPS:
        return value.meta["val"].dtype != torch.float32
    return user.target in INDEX_PUTS and value is user.args[2] and fills_by_mask(user)


def fills_by_mask(user: torch.fx.Node) -> bool:
    """
    Whether index_put_ fills by its only mask if the value is a scalar on the CPU. For one on
    the GPU it asks the device for the elements of the mask, and the host waits. By a mask that
    is the only index Inductor fills without it.
    """
    _, indices, value = user.args[:3]
    given = [i.meta["val"].dtype for i in indices if i is not None]  # type: ignore[union-attr]
    return (
        value.meta["val"].dim() == 0  # type: ignore[union-attr]
        and len(indices) > 1  # type: ignore[arg-type]
        and given in ([torch.bool], [torch.uint8])
        and not get_arg_value(user, 3, "accumulate")
    )


def crossings(graph: torch.fx.Graph) -> Iterator[Crossing]:
    for user in graph.nodes:
        if user.op != "call_function" or not is_core_op(user):
            continue
        device = gpu_of(user)
        if device is None:
            continue
        for value in user.all_input_nodes:
            if not on_cpu(value):
                continue
            if user.target is prims.device_put.default:
                # Those of constants are made when the graph is compiled.
                if not is_constant(value):
                    yield Crossing(value, user, device)
            elif is_read_on_host(value, user):
                continue
            elif value.meta["val"].dim() == 0 or user.target in TAKES_CPU_TENSORS:
                yield Crossing(value, user, device)


def known_after(graph: torch.fx.Graph) -> dict[torch.fx.Node, int]:
    """
    How often data went from the GPU to the host before each node can run. Values with the
    same number can be delivered together: none of them waits for what another one feeds.
    """
    level: dict[torch.fx.Node, int] = {}
    for node in graph.nodes:
        level[node] = max((level[n] for n in node.all_input_nodes), default=0)
        if gpu_of(node) is None and any(map(gpu_of, node.all_input_nodes)):
            level[node] += 1
    return level


def made_on_gpu(graph: torch.fx.Graph) -> OrderedSet[torch.fx.Node]:
    """Values on the CPU that take only constants and small values to compute on the GPU."""
    found = OrderedSet[torch.fx.Node]()
    for value in graph.nodes:
        if not on_cpu(value):
            continue
        inputs = filter(on_cpu, value.all_input_nodes)
        if (
            is_constant(value)
            or value.target in CONSTRUCTORS
            or (
                is_same_anywhere(value)
                and all(n in found or is_small(n) for n in inputs)
            )
        ):
            found.add(value)
    return found


def graph_of(node: torch.fx.Node) -> torch.fx.Graph | None:
    """That a node hands to a higher-order operator, if it does."""
    if node.op != "get_attr":
        return None
    module = operator.attrgetter(node.target)(node.graph.owning_module)  # type: ignore[arg-type]
    return module.graph if isinstance(module, torch.fx.GraphModule) else None


def is_seeded(node: torch.fx.Node) -> bool:
    """
    Whether it draws from a generator that others draw from, as attention without dropout
    does not, nor what has a state of its own.
    """
    op = node.target
    if isinstance(op, torch._ops.HigherOrderOperator):
        if op in (run_with_rng_state, graphsafe_run_with_rng_state):
            return False
        return any(
            torch.Tag.nondeterministic_seeded in arg.tags
            for arg in pytree.tree_leaves((node.args, node.kwargs))
            if isinstance(arg, torch._ops.OpOverload)
        ) or any(
            any(map(is_seeded, graph.nodes))
            for arg in node.all_input_nodes
            if (graph := graph_of(arg)) is not None
        )
    if (
        not isinstance(op, torch._ops.OpOverload)
        or torch.Tag.nondeterministic_seeded not in op.tags
    ):
        return False
    dropout = dropout_of(node)
    return dropout is None or bool(dropout)


def dropout_of(node: torch.fx.Node) -> Any:
    """The argument of attention, None of an operator without one."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    if "dropout_p" not in names:
        return None
    return get_arg_value(node, names.index("dropout_p"), "dropout_p") or 0.0


def draws_before(graph: torch.fx.Graph) -> dict[torch.fx.Node, int]:
    """
    How many operators that a delivered value can delay draw before each node. Values with
    the same number can be delivered together: no draw then waits for a value that the
    program computes behind another draw.
    """
    count, before = 0, {}
    for node in graph.nodes:
        before[node] = count
        count += is_seeded(node) and bool(node.all_input_nodes)
    return before


def kept_storages(graph: torch.fx.Graph) -> OrderedSet[int | None]:
    """
    Storages of values that are returned, that a later pass may write to in place, or of which
    a storage offset is taken: a home may be a part of another.
    """
    from torch._inductor.fx_passes import reinplace

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


class Placement:
    """GPU homes of a graph's CPU values."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph = graph
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.level = known_after(graph)
        self.made_on_gpu = made_on_gpu(graph)
        self.draws_before = draws_before(graph)
        callers = graph.owning_module.meta.get(CALLERS)
        self.is_inlined = callers is not None and not INLINING.isdisjoint(callers)
        # Inductor gives a subgraph's code no constants that are made now.
        self.known = OrderedSet() if callers is not None else known_values(graph)
        self.computed: dict[torch.fx.Node, Any] = {}
        self.homes: dict[tuple[torch.fx.Node, torch.device], torch.fx.Node] = {}
        # What the program brings to a device by non_blocking copies only.
        self.non_blocking = OrderedSet[tuple[torch.fx.Node, torch.device]]()
        # For the report: the node on the GPU that first reads a value.
        self.first_user: dict[torch.fx.Node, torch.fx.Node] = {}

    def run(self) -> bool:
        """Whether the graph was changed, and has to be sorted."""
        found = [] if self.is_inlined else list(crossings(self.graph))
        if not found:
            return False
        kept = kept_storages(self.graph)
        self.find_non_blocking(found)
        self.deliver(found)
        for c in found:
            with self.graph.inserting_before(c.user):
                home = self.home(c.value, c.device)
                if home is None:
                    continue
                if not c.is_copy:
                    c.user.replace_input_with(c.value, home)
                    continue
                if get_node_storage(c.user) in kept:
                    home = self.like(c.user, aten.clone.default, (home,))
            c.user.replace_all_uses_with(home)
            self.graph.erase_node(c.user)
        return True

    def like(
        self,
        node: torch.fx.Node,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
    ) -> torch.fx.Node:
        new = self.graph.call_function(target, args, kwargs)
        if "stack_trace" in node.meta:
            new.meta["stack_trace"] = node.meta["stack_trace"]
        return new

    def compute(self, value: torch.fx.Node) -> torch.Tensor:
        "What eager mode gives for a known value."
        needed, todo = OrderedSet([value]), [value]
        while todo:
            inputs = [n for n in todo.pop().all_input_nodes if n not in needed]
            needed.update(inputs)
            todo += inputs
        interpreter = torch.fx.Interpreter(self.graph.owning_module, graph=self.graph)
        interpreter.env = self.computed
        for node in sorted(needed, key=self.order.__getitem__):
            if node not in self.computed:
                self.computed[node] = interpreter.run_node(node)
        return self.computed[value]

    def small_values(self, value: torch.fx.Node) -> OrderedSet[torch.fx.Node]:
        "What has to be delivered for a value."
        found = OrderedSet[torch.fx.Node]()
        todo, seen = [value], OrderedSet([value])
        while todo:
            n = todo.pop()
            if n in self.made_on_gpu:
                inputs = [] if is_constant(n) else n.all_input_nodes
                todo += [i for i in inputs if on_cpu(i) and i not in seen]
                seen.update(inputs)
            elif is_small(n) and n not in self.known:
                found.add(n)
        return found

    def find_non_blocking(self, found: Sequence[Crossing]) -> None:
        blocking = OrderedSet[tuple[torch.fx.Node, torch.device]]()
        for c in found:
            for value in (c.value, *self.small_values(c.value)):
                # To compute anything but a view of it, the host reads it at once.
                is_view = get_node_storage(value) == get_node_storage(c.value)
                waits = not (c.is_non_blocking and is_view)
                (blocking if waits else self.non_blocking).add((value, c.device))
        self.non_blocking -= blocking

    def deliver(self, found: Sequence[Crossing]) -> None:
        groups: dict[tuple[int, int, torch.device], OrderedSet[torch.fx.Node]] = {}
        for c in found:
            self.first_user.setdefault(c.value, c.user)
            for value in self.small_values(c.value):
                self.first_user.setdefault(value, c.user)
                if (value, c.device) in self.non_blocking:
                    # It is likely to be pinned, and then delivering it would wait.
                    continue
                key = (self.level[value], self.draws_before[value], c.device)
                groups.setdefault(key, OrderedSet()).add(value)
        for (*_, device), values in groups.items():
            for launch in launches(sorted(values, key=self.order.__getitem__)):
                self.insert_deliver(launch, device)

    def insert_deliver(self, values: list[torch.fx.Node], device: torch.device) -> None:
        after = values[-1]
        while after.next.op in ("placeholder", "get_attr"):
            after = after.next
        with self.graph.inserting_before(after.next):
            delivered = self.graph.call_function(
                torch.ops.pygraph.deliver.default,
                ([self.in_memory(v) for v in values], device),
            )
            for i, value in enumerate(values):
                delivered_value = self.graph.call_function(
                    operator.getitem, (delivered, i)
                )
                self.homes[value, device] = self.in_order(value, delivered_value)
                self.report(delivered, value, "delivered", self.first_user[value])
        counters["pygraph"]["delivered_values"] += len(values)

    def home(self, value: torch.fx.Node, device: torch.device) -> torch.fx.Node | None:
        "A node that has the value on the device, None if the graph shall stay as it is."
        # Not by recursion: there may be more operations in a row than Python has frames.
        needed, todo = OrderedSet([value]), [value]
        while todo:
            n = todo.pop()
            if n in self.made_on_gpu and not is_constant(n):
                inputs = [
                    i
                    for i in n.all_input_nodes
                    if on_cpu(i) and i not in needed and (i, device) not in self.homes
                ]
                needed.update(inputs)
                todo += inputs
        for n in sorted(needed, key=self.order.__getitem__):
            if (n, device) in self.homes:
                continue
            home = self.new_home(n, device)
            if home is None:
                return None
            self.homes[n, device] = home
        return self.homes[value, device]

    def new_home(
        self, value: torch.fx.Node, device: torch.device
    ) -> torch.fx.Node | None:
        if is_constant(value):
            return self.like(value, prims.device_put.default, (value, device))
        if value in self.made_on_gpu:
            args, kwargs = pytree.tree_map_only(
                torch.fx.Node,
                lambda n: self.homes[n, device] if on_cpu(n) else n,
                (value.args, value.kwargs),
            )
            if value.target not in CONSTRUCTORS:
                return self.like(value, value.target, args, kwargs)
            home = self.like(value, value.target, args, {**kwargs, "device": device})
            self.report(home, value, "made on the GPU", value)
            return home
        if not can_be_copied(value):
            return None
        if value in self.known and (constant := self.constant(value)) is not None:
            home = self.like(value, prims.device_put.default, (constant, device))
            self.report(home, value, "computed at compile time", value)
            return self.in_order(value, home)
        nbytes = static_nbytes(value.meta["val"])
        if nbytes is not None and nbytes <= MAX_STAGED_BYTES:
            counters["pygraph"]["staged_tensors"] += 1
            how, op = "staged", torch.ops.pygraph.stage.default
        else:
            counters["pygraph"]["uploaded_tensors"] += 1
            how, op = "uploaded", torch.ops.pygraph.upload.default
        home = self.graph.call_function(
            op,
            (self.in_memory(value), device, (value, device) in self.non_blocking),
        )
        self.report(home, value, how, self.first_user.get(value, value))
        return self.in_order(value, home)

    def constant(self, value: torch.fx.Node) -> torch.fx.Node | None:
        """
        A constant that has the value, in the form of those that the program has. None if
        eager mode does not do what compiled code does, as with a dtype.
        """
        name = f"_{value.name}_known"
        order = contiguous_order(value.meta["val"])

        def as_home(t: torch.Tensor) -> torch.Tensor:
            return t.permute(order).clone(memory_format=torch.contiguous_format)

        try:
            with _disable_current_modes():
                # As the other homes before in_order: lift_fresh_copy makes it contiguous.
                computed = as_home(self.compute(value))
            self.graph.owning_module.register_buffer(name, computed)
        except Exception as e:
            log.info("%s is computed in each call: %s", value.name, e)
            return None
        counters["pygraph"]["known_tensors"] += 1
        attribute = self.graph.get_attr(name)
        attribute.meta["val"] = as_home(value.meta["val"])
        return self.like(value, aten.lift_fresh_copy.default, (attribute,))

    def in_memory(self, value: torch.fx.Node) -> torch.fx.Node:
        """
        The contiguous view of a value that has no gaps, else the value, of which the host
        makes a contiguous one, as eager mode does.
        """
        order = contiguous_order(value.meta["val"])
        if order == sorted(order):
            return value
        return self.graph.call_function(aten.permute.default, (value, order))

    def in_order(self, value: torch.fx.Node, home: torch.fx.Node) -> torch.fx.Node:
        """
        A home is contiguous; this gives it the order in memory that a copy of the value
        would have, which as_strided and views as another dtype depend on.
        """
        val = value.meta["val"]
        if is_contiguous_or_false(val):
            return home
        order = order_of(val)
        back = [order.index(dim) for dim in range(val.dim())]
        if not has_no_gaps(val):
            permuted = self.graph.call_function(aten.permute.default, (home, order))
            home = self.graph.call_function(
                aten.clone.default,
                (permuted,),
                {"memory_format": torch.contiguous_format},
            )
        return self.graph.call_function(aten.permute.default, (home, back))

    def report(
        self, home: torch.fx.Node, value: torch.fx.Node, how: str, at: torch.fx.Node
    ) -> None:
        val = value.meta["val"]
        type = f"{str(val.dtype).removeprefix('torch.')}{list(val.shape)}"
        source = innermost(at.meta.get("stack_trace", ""))
        found = CpuValue(value.name, type, how, source)
        home.meta[CPU_VALUES] = (*home.meta.get(CPU_VALUES, ()), found)


def launches(values: Sequence[torch.fx.Node]) -> Iterator[list[torch.fx.Node]]:
    "Splits values into groups that one launch can take."
    group: list[torch.fx.Node] = []
    for value in values:
        sizes = [static_nbytes(v.meta["val"]) or 0 for v in (*group, value)]
        if offsets(sizes, PIECE_BYTES)[-1] > MAX_DELIVERED_BYTES:
            yield group
            group = []
        group.append(value)
    if group:
        yield group


def place_cpu_values(graph: torch.fx.Graph) -> None:
    """
    The pass of the module's docstring. Runs last on an aten graph, in place of
    move_constructors_to_gpu of stock CUDA graphs, which packs 0-d CPU tensors into one
    dtype, returns CPU outputs on the GPU, and gives up on a value that a CPU operation or
    a custom operator uses too.
    """
    from torch._inductor.fx_passes.post_grad import ConstructorMoverPass
    from torch._inductor.pattern_matcher import stable_topological_sort

    # As without CUDA graphs. It leaves the devices of what it moved as they were known.
    updater = FakeTensorUpdater(graph)
    ConstructorMoverPass(get_gpu_type())(graph)
    updater.incremental_update()
    placement = Placement(graph)
    if placement.run():
        stable_topological_sort(graph)
        # Inductor would run what is left of how they are computed: not all of it fuses away.
        graph.eliminate_dead_code(lambda node: node not in placement.computed)


def partition_reason(node: BaseSchedulerNode) -> str | None:
    """
    Why a node can not be captured though upstream would capture it, or of a copy between
    CPU and GPU: that it is one. A GPU node can not be if what it reads is on the CPU or
    only known to the host, or if it gives a CPU tensor, which it has to wait for.
    """
    if isinstance(node.node, (Pack, HostCopy)):
        return BRINGS_CPU_VALUES
    if not node.is_gpu():
        # What other nodes on the CPU do, upstream says.
        return COPIES_TO_CPU if isinstance(node.node, ir.DeviceCopy) else None
    ir_node = node.node
    if (reason := subgraph_reason(ir_node)) is not None:
        return reason
    if hands_over_seed(ir_node):
        return "gives or takes a seed that lies on the CPU where it is not captured"
    for dep in node.read_writes.reads:
        if isinstance(dep, WeakDep):
            continue
        buffer = V.graph.try_get_buffer(dep.name)
        if isinstance(buffer, ir.IRNode) and is_cpu_buffer(buffer):
            return f"reads the CPU tensor {dep.name}"
    if isinstance(ir_node, ir.FallbackKernel) and any(
        isinstance(output, ir.IRNode) and is_cpu_buffer(output)
        for output in pytree.tree_leaves(ir_node.outputs)
    ):
        return "gives a CPU tensor"
    if ir_node is not None and any(map(is_float, ir_node.get_free_symbol_uses())):
        return "takes a float from the host"
    return None


# The forward hands the generator's seed and offset to the backward, on the GPU where it is
# captured, else on the CPU, and the backward reads them by the same rule: see Note [Seed and
# Offset Device] in ATen/native/transformers/cuda/attention.cu. But of the two, one may be
# captured without the other.
MEMORY_EFFICIENT_ATTENTION = OrderedSet(
    [
        aten._efficient_attention_backward.default,
        aten._efficient_attention_forward.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_efficient_attention_backward.default,
    ]
)


def hands_over_seed(ir_node: object) -> bool:
    """Whether it is attention with dropout whose seed does not always lie in one place."""
    return (
        isinstance(ir_node, ir.FallbackKernel)
        and ir_node.op_overload in MEMORY_EFFICIENT_ATTENTION
        and ir_node.fx_node is not None
        and bool(dropout_of(ir_node.fx_node))
    )


# Of ir.InvokeSubgraph, ir.Conditional and ir.WhileLoop.
SUBGRAPHS = (
    "subgraph",
    "true_subgraph",
    "false_subgraph",
    "cond_subgraph",
    "body_subgraph",
)


def operations_of_subgraphs(ir_node: object) -> Iterator[ir.Operation]:
    "What an operator runs that is a graph itself: a nested region, a branch, a loop."
    for name in SUBGRAPHS:
        subgraph = getattr(ir_node, name, None)
        if isinstance(subgraph, ir.Subgraph) and subgraph.graph is not None:
            for operation in subgraph.graph.operations:
                yield operation
                yield from operations_of_subgraphs(operation)


def subgraph_reason(ir_node: object) -> str | None:
    """
    Why what runs a graph itself, a nested region, can not be captured: what the host does
    in that graph, a replay does not.
    """
    for operation in operations_of_subgraphs(ir_node):
        if isinstance(operation, (Pack, HostCopy)):
            return BRINGS_CPU_VALUES
        device = operation.get_device()
        if isinstance(operation, ir.DeviceCopy) or (
            device is not None and device.type == "cpu"
        ):
            return "runs a graph that works on the CPU"
        if (
            isinstance(operation, (ir.Conditional, ir.WhileLoop))
            or is_cudagraph_unsafe_op(operation)
            or hands_over_seed(operation)
        ):
            return "runs a graph with what can not be captured"
    return None


def draws(node: BaseSchedulerNode, device_type: str) -> bool:
    """Whether any of a scheduler's node draws from a generator of a device."""
    return any(
        isinstance(operation, ir.ExternKernel)
        # An element of a result.
        and not isinstance(operation, ir.MultiOutput)
        and operation.fx_node is not None
        and is_seeded(operation.fx_node)
        and (device := operation.get_device()) is not None
        and device.type == device_type
        for n in node.get_nodes()
        if n.node is not None
        for operation in (n.node, *operations_of_subgraphs(n.node))
    )


def keeps_draws_in_order(
    before: list[BaseSchedulerNode], after: list[BaseSchedulerNode]
) -> bool:
    """
    Whether what draws from a generator does so in the order of the program, on which the
    numbers depend. No data says so.
    """
    return all(
        [n for n in before if draws(n, device_type)]
        == [n for n in after if draws(n, device_type)]
        for device_type in ("cpu", get_gpu_type())
    )


def is_cpu_buffer(buffer: ir.IRNode) -> bool:
    device = buffer.get_device()
    if device is None or device.type != "cpu":
        return False
    # What binds a symbol is no tensor. Graphs are recorded for each value of an integer.
    return not (
        isinstance(buffer, ir.Operation)
        and isinstance(getattr(buffer, "layout", None), ir.NoneLayout)
        and buffer.get_unbacked_symbol_defs()
    )


def is_float(symbol: sympy.Symbol) -> bool:
    return symbol_is_type(symbol, (SymT.FLOAT, SymT.UNBACKED_FLOAT))


def operator_of(
    node: BaseSchedulerNode, name_to_buf: Mapping[str, SchedulerBuffer]
) -> BaseSchedulerNode | None:
    """What gives the result that this node takes an element of, if it does."""
    if not isinstance(node.node, ir.MultiOutput):
        return None
    return name_to_buf[node.node.inputs[0].get_name()].defining_op


def results_in_one_place(
    nodes: list[BaseSchedulerNode], name_to_buf: Mapping[str, SchedulerBuffer]
) -> list[BaseSchedulerNode]:
    """
    In an order in which elements of results are taken right behind their operators: the
    list that an operator gives can not be handed to a graph.
    """
    # By operator; an element may itself be a list.
    elements: dict[BaseSchedulerNode, list[BaseSchedulerNode]] = {n: [] for n in nodes}
    others = []
    for node in nodes:
        elements.get(operator_of(node, name_to_buf), others).append(node)

    def with_elements(node: BaseSchedulerNode) -> Iterator[BaseSchedulerNode]:
        yield node
        for element in elements[node]:
            yield from with_elements(element)

    return [each for node in others for each in with_elements(node)]


def is_list(buffer: SchedulerBuffer | None) -> bool:
    "Whether it is what an operator gives of which elements are taken."
    return buffer is not None and isinstance(buffer.node.layout, ir.MultiOutputLayout)
