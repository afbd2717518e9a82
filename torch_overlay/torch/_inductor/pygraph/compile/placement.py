"""
Place the CPU values of a GPU graph, so that captured code reads no CPU memory: kernels would keep the values, and
copies the addresses, that they were captured with. Each CPU value that GPU code reads gets a counterpart, a node with
the same value on the GPU, ahead of the captured code:

CPU value                                   counterpart
constant                                    a copy that Inductor makes at compile time
constructor; view, cast, integer operation  the same operation on the GPU
computed from constants and constructors    a constant, computed on the CPU at compile time
at most MAX_DELIVERED_TENSOR_BYTES          delivered, together with other such values
at most MAX_STAGED_BYTES                    staged: copied if it changed since the last call
larger                                      uploaded in every call

A small value that the program copies with non_blocking is staged and not delivered. The CPU values stay on the CPU,
too. GPU code that still reads a CPU tensor is not captured, see blockers.py.
"""

from __future__ import annotations

import logging
import operator
from typing import Any, TYPE_CHECKING

import torch
from torch._dynamo.utils import counters
from torch._inductor.fx_passes.post_grad import ConstructorMoverPass
from torch._inductor.fx_utils import dropout_of, FakeTensorUpdater, get_node_storage
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._inductor.pygraph.compile import analysis
from torch._inductor.pygraph.compile.lowering import DELIVER, STAGE, UPLOAD
from torch._inductor.pygraph.types.reason import Code, first_line, log_line, Reason
from torch._inductor.pygraph.types.report import CPU_VALUES, CpuValue
from torch._inductor.pygraph.types.source import innermost
from torch._inductor.pygraph.values.deliver import MAX_DELIVERED_BYTES, offsets, PIECE_BYTES
from torch._inductor.utils import get_gpu_type
from torch._prims_common import is_contiguous_or_false
from torch.utils import _pytree as pytree
from torch.utils._ordered_set import OrderedSet
from torch.utils._python_dispatch import _disable_current_modes


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


log = logging.getLogger(__name__)

aten = torch.ops.aten
prims = torch.ops.prims

# Largest tensor that is staged: comparing it takes the host as long as launching a few kernels.
MAX_STAGED_BYTES = 1 << 20

# Key in the meta of a subgraph's module: the operators that the subgraph is handed to.
CALLERS = "callers"


def note_callers(gm: torch.fx.GraphModule, name: str) -> None:
    """Note on the submodule ``name`` of ``gm`` to which operators it is handed, for its place_cpu_values."""
    getattr(gm, name).meta[CALLERS] = [
        user.target for node in gm.graph.find_nodes(op="get_attr", target=name) for user in node.users
    ]


def place_cpu_values(graph: torch.fx.Graph) -> None:
    """
    Give GPU code counterparts of the CPU values that it reads. This pass runs last on an aten graph, instead of
    move_constructors_to_gpu with inputs and outputs, which packs 0-d CPU tensors into one dtype and moves CPU outputs.
    """
    # Plain torch.compile runs this pass, too. The pass does not update fake tensors.
    updater = FakeTensorUpdater(graph)
    ConstructorMoverPass(get_gpu_type())(graph)
    updater.incremental_update()
    callers = graph.owning_module.meta.get(CALLERS)
    if callers is not None and not analysis.INLINES_GRAPHS.isdisjoint(callers):
        return
    found = [*analysis.crossings(graph)]
    if not found:
        return
    # Inductor gives the code of a subgraph no constants that a pass adds.
    placement = Placement(graph, found, adds_constants=callers is None)
    placement.run()
    stable_topological_sort(graph)
    # Inductor would run operations that were computed at compile time: not all of them fuse away.
    graph.eliminate_dead_code(lambda node: node not in placement.computed)


def drop_unused_seeds(graph: torch.fx.Graph) -> int:
    """
    Without dropout, let no backward of memory-efficient attention read the forward's seed. The seed is on the CPU unless
    the forward is captured, and a checkpoint refuses a saved tensor that moves. Return the number of changed nodes.
    """
    count = 0
    for op in analysis.MEMORY_EFFICIENT_ATTENTION:
        unused = [i for i, argument in enumerate(op._schema.arguments) if argument.name.startswith("philox")]
        for node in graph.find_nodes(op="call_function", target=op):
            if not unused or dropout_of(node):
                continue
            grad = node.args[0].meta["val"]
            with graph.inserting_before(node):
                empty = graph.call_function(
                    aten.empty.memory_format, ([],), {"dtype": torch.long, "device": grad.device}
                )
            empty.meta["val"] = grad.new_empty((), dtype=torch.long)
            for i in unused:
                node.update_arg(i, empty)
            count += 1
    return count


class Placement:
    """
    The counterparts of the CPU values that GPU code reads, ``found``, which ``run`` inserts. With ``adds_constants``
    values may be computed at compile time.
    """

    def __init__(self, graph: torch.fx.Graph, found: Sequence[analysis.Crossing], *, adds_constants: bool) -> None:
        self.graph = graph
        self.found = found
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.phases = analysis.phases(graph)
        self.recomputable = analysis.recomputable_values(graph)
        self.known = analysis.known_values(graph) if adds_constants else OrderedSet()
        self.exposed = analysis.exposed_storages(graph)
        # Results of nodes that were computed at compile time.
        self.computed: dict[torch.fx.Node, Any] = {}
        self.counterparts: dict[tuple[torch.fx.Node, torch.device], torch.fx.Node] = {}
        # Values that the program copies to a device with non_blocking, and never without.
        self.non_blocking = OrderedSet[tuple[torch.fx.Node, torch.device]]()
        # The first node on the GPU that reads a value. The report shows its line.
        self.first_user: dict[torch.fx.Node, torch.fx.Node] = {}

    def run(self) -> None:
        """Change the graph. Its nodes are not in topological order afterwards."""
        self.find_non_blocking()
        self.deliver()
        for crossing in self.found:
            with self.graph.inserting_before(crossing.user):
                self.replace(crossing)

    def replace(self, crossing: analysis.Crossing) -> None:
        """Make the user of a value read the counterpart, if the value can have one."""
        value, user = crossing.value, crossing.user
        counterpart = self.counterpart(value, crossing.device)
        if counterpart is None:
            return
        if user.target is not prims.device_put.default:
            user.replace_input_with(value, counterpart)
            return
        if get_node_storage(user) in self.exposed:
            # Counterparts may share a buffer, and may be memory that all calls share.
            counterpart = self.call_like(user, aten.clone.default, (counterpart,))
        user.replace_all_uses_with(counterpart)
        self.graph.erase_node(user)

    def find_non_blocking(self) -> None:
        blocking = OrderedSet[tuple[torch.fx.Node, torch.device]]()
        for c in self.found:
            for value in (c.value, *self.values_to_deliver(c.value)):
                # The host computes anything but a view at once, and waits for the value.
                is_view = get_node_storage(value) == get_node_storage(c.value)
                waits = not (c.is_non_blocking and is_view)
                (blocking if waits else self.non_blocking).add((value, c.device))
        self.non_blocking -= blocking

    def values_to_deliver(self, value: torch.fx.Node) -> OrderedSet[torch.fx.Node]:
        """Return the values that the counterpart of a value depends on and that are small."""
        return OrderedSet(
            node
            for node in analysis.walk_back(value, self.inputs_to_recompute)
            if node not in self.recomputable and analysis.can_be_delivered(node) and node not in self.known
        )

    def inputs_to_recompute(self, value: torch.fx.Node) -> list[torch.fx.Node]:
        """Return the CPU inputs that the GPU needs to compute a value, none if it is copied."""
        if value not in self.recomputable or analysis.is_constant(value):
            return []
        return [i for i in value.all_input_nodes if analysis.is_on_cpu(i)]

    def deliver(self) -> None:
        """Insert a delivery for each group of small values that are there together."""
        groups: dict[tuple[tuple[int, int], torch.device], OrderedSet[torch.fx.Node]] = {}
        for c in self.found:
            self.first_user.setdefault(c.value, c.user)
            for value in self.values_to_deliver(c.value):
                self.first_user.setdefault(value, c.user)
                if (value, c.device) in self.non_blocking:
                    # The value is probably pinned, and to deliver it the host would wait.
                    continue
                groups.setdefault((self.phases[value], c.device), OrderedSet()).add(value)
        for (_, device), values in groups.items():
            for launch in launches(sorted(values, key=self.order.__getitem__)):
                self.insert_deliver(launch, device)

    def insert_deliver(self, values: list[torch.fx.Node], device: torch.device) -> None:
        after = values[-1]
        while after.next.op in ("placeholder", "get_attr"):
            after = after.next
        with self.graph.inserting_before(after.next):
            contiguous = [self.contiguous_view(value) for value in values]
            delivered = self.graph.call_function(DELIVER, (contiguous, device))
            for i, value in enumerate(values):
                element = self.graph.call_function(operator.getitem, (delivered, i))
                self.counterparts[value, device] = self.with_strides_of(value, element)
                self.note_cpu_value(delivered, value, "delivered", self.first_user[value])
        counters["pygraph"]["delivered_values"] += len(values)

    def counterpart(self, value: torch.fx.Node, device: torch.device) -> torch.fx.Node | None:
        """Return a node that has the value on the device, None if no copy of its bytes has it."""

        def missing_inputs(node: torch.fx.Node) -> list[torch.fx.Node]:
            inputs = self.inputs_to_recompute(node)
            return [i for i in inputs if (i, device) not in self.counterparts]

        needed = analysis.walk_back(value, missing_inputs)
        for node in sorted(needed, key=self.order.__getitem__):
            if (node, device) not in self.counterparts:
                counterpart = self.new_counterpart(node, device)
                if counterpart is None:
                    return None
                self.counterparts[node, device] = counterpart
        return self.counterparts[value, device]

    def new_counterpart(self, value: torch.fx.Node, device: torch.device) -> torch.fx.Node | None:
        if analysis.is_constant(value):
            return self.call_like(value, prims.device_put.default, (value, device))
        if value in self.recomputable:
            return self.recompute(value, device)
        if not analysis.can_be_copied(value):
            return None
        if value in self.known and (constant := self.constant(value)) is not None:
            copied = self.call_like(value, prims.device_put.default, (constant, device))
            self.note_cpu_value(copied, value, "computed at compile time", value)
        else:
            copied = self.copy_in_each_call(value, device)
        return self.with_strides_of(value, copied)

    def recompute(self, value: torch.fx.Node, device: torch.device) -> torch.fx.Node:
        args, kwargs = pytree.tree_map_only(
            torch.fx.Node,
            lambda n: self.counterparts[n, device] if analysis.is_on_cpu(n) else n,
            (value.args, value.kwargs),
        )
        if value.target not in analysis.CONSTRUCTORS:
            return self.call_like(value, value.target, args, kwargs)
        kwargs = {**kwargs, "device": device}
        constructed = self.call_like(value, value.target, args, kwargs)
        self.note_cpu_value(constructed, value, "made on the GPU", value)
        return constructed

    def copy_in_each_call(self, value: torch.fx.Node, device: torch.device) -> torch.fx.Node:
        nbytes = analysis.static_nbytes(value.meta["val"])
        is_staged = nbytes is not None and nbytes <= MAX_STAGED_BYTES
        how, op = ("staged", STAGE) if is_staged else ("uploaded", UPLOAD)
        counters["pygraph"][f"{how}_tensors"] += 1
        args = (self.contiguous_view(value), device, (value, device) in self.non_blocking)
        copied = self.graph.call_function(op, args)
        self.note_cpu_value(copied, value, how, self.first_user.get(value, value))
        return copied

    def constant(self, value: torch.fx.Node) -> torch.fx.Node | None:
        """Return a constant with a known value, like those of the program, None if eager mode cannot compute it."""
        name = f"_{value.name}_known"
        permutation = analysis.contiguous_permutation(value.meta["val"])

        def contiguous(t: torch.Tensor) -> torch.Tensor:
            return t.permute(permutation).clone(memory_format=torch.contiguous_format)

        # Eager mode rejects some dtypes that compiled code accepts.
        try:
            with _disable_current_modes():
                # lift_fresh_copy would make the constant contiguous without the permutation.
                computed = contiguous(self.compute(value))
            self.graph.owning_module.register_buffer(name, computed)
        except Exception as e:
            reason = Reason.of(Code.NOT_CONSTANT, error=first_line(e))
            log.info("%s", log_line(innermost(value.stack_trace or ""), value.name, "computed in each call", reason))
            return None
        counters["pygraph"]["known_tensors"] += 1
        attribute = self.graph.get_attr(name)
        attribute.meta["val"] = contiguous(value.meta["val"])
        return self.call_like(value, aten.lift_fresh_copy.default, (attribute,))

    def compute(self, value: torch.fx.Node) -> torch.Tensor:
        interpreter = torch.fx.Interpreter(self.graph.owning_module, graph=self.graph)
        interpreter.env = self.computed
        needed = analysis.walk_back(value, lambda node: node.all_input_nodes)
        for node in sorted(needed, key=self.order.__getitem__):
            if node not in self.computed:
                self.computed[node] = interpreter.run_node(node)
        return self.computed[value]

    def call_like(
        self, node: torch.fx.Node, target: Any, args: tuple, kwargs: dict[str, Any] | None = None
    ) -> torch.fx.Node:
        """Insert a call that belongs to the line of the program that ``node`` is from."""
        call = self.graph.call_function(target, args, kwargs)
        if "stack_trace" in node.meta:
            call.meta["stack_trace"] = node.meta["stack_trace"]
        return call

    def contiguous_view(self, value: torch.fx.Node) -> torch.fx.Node:
        """Return the contiguous view of a dense value, else the value, which the host copies."""
        permutation = analysis.contiguous_permutation(value.meta["val"])
        if permutation == sorted(permutation):
            return value
        return self.graph.call_function(aten.permute.default, (value, permutation))

    def with_strides_of(self, value: torch.fx.Node, copied: torch.fx.Node) -> torch.fx.Node:
        """Return a copy of ``contiguous_view(value)`` with the strides of a copy of the value."""
        # as_strided and views as another dtype depend on them.
        val = value.meta["val"]
        if is_contiguous_or_false(val):
            return copied
        order = analysis.dims_by_stride(val)
        inverse = [order.index(dim) for dim in range(val.dim())]
        if not analysis.is_dense(val):
            permuted = self.graph.call_function(aten.permute.default, (copied, order))
            format = {"memory_format": torch.contiguous_format}
            copied = self.graph.call_function(aten.clone.default, (permuted,), format)
        return self.graph.call_function(aten.permute.default, (copied, inverse))

    def note_cpu_value(self, node: torch.fx.Node, value: torch.fx.Node, how: str, at: torch.fx.Node) -> None:
        """Note on ``node``, for the report, that it brings a value, and the line of ``at``."""
        val = value.meta["val"]
        type = f"{str(val.dtype).removeprefix('torch.')}{list(val.shape)}"
        source = innermost(at.meta.get("stack_trace", ""))
        found = CpuValue(value.name, type, how, source)
        node.meta[CPU_VALUES] = (*node.meta.get(CPU_VALUES, ()), found)


def launches(values: Sequence[torch.fx.Node]) -> Iterator[list[torch.fx.Node]]:
    """Split values into groups that one launch can take."""
    group: list[torch.fx.Node] = []
    for value in values:
        sizes = [analysis.static_nbytes(v.meta["val"]) or 0 for v in (*group, value)]
        if offsets(sizes, PIECE_BYTES)[-1] > MAX_DELIVERED_BYTES:
            yield group
            group = []
        group.append(value)
    if group:
        yield group
