"""
Graphs with collectives.

Every rank has to run each collective once a call, also in a call that records. So the rehearsal leaves collectives out:
one in place returns its operand, any other one a stand-in, which this rank computes from all of the operand. The proof
runs with the collectives' nodes disabled. Then the whole graph runs once without the stand-ins, as the call.

The operand of a collective does not move, or the graph copies it (config.pygraph_ranks), although the kernels of NCCL
2.28 have addresses among their parameters, up to 4 KiB. A parameter need not be the only place of the address. During
capture NCCL registers memory with a network card, which then reads the operand by itself, and memory that can be
exported, as expandable segments can, with the other ranks of the host. Both sides of a send have to be registered, or
neither (enqueue.cc, addP2pToPlan), and no rank knows the other side. The proof would notice none of this, as it runs no
collective.

The ranks agree that all of them capture, ahead of each collective that they capture, and that all of them deploy their
graphs. The operand of an all-gather is copied to its place in the result, which NCCL does otherwise.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor.pygraph.capture import agreement
from torch._inductor.pygraph.capture.allocation import copy_by_kernel
from torch._inductor.pygraph.graph.binding import graph_nodes
from torch._inductor.pygraph.graph.driver import bindings, check
from torch._inductor.pygraph.graph.edges import capturing_graph, remove_nodes
from torch._inductor.pygraph.types.reason import Code, Reason, RefusedError
from torch._inductor.pygraph.verify.proof import as_bytes
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._ordered_set import OrderedSet
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch._inductor.cudagraph_utils import ModelType, OutputType
    from torch._inductor.pygraph.graph.placeholder import PlaceholderMap
    from torch._inductor.utils import InputType


# Namespaces of the operators that wait for other ranks.
NAMESPACES = ("_c10d_functional", "_dtensor", "symm_mem")

# Collectives that return their operand.
IN_PLACE = ("all_reduce_", "all_reduce_coalesced_", "broadcast_", "wait_tensor")

# Collectives whose results are other tensors, which a stand-in can be for.
WITH_STAND_IN = (
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "all_gather_into_tensor_out",
    "all_to_all_single",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_out",
    "shard_dim_alltoall",
)

# Namespaces of collectives that return when they are done.
WITHOUT_WAIT = ("_dtensor",)

GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
GATHER_INTO = torch.ops._c10d_functional.all_gather_into_tensor_out.default

# Functions that not all ranks capture. Ranks with sizes of their own would wait for every one of the others' sizes.
_not_agreed: weakref.WeakSet[ModelType] = weakref.WeakSet()


class _Mode(TorchDispatchMode):
    """Let ``handle`` run the collectives, which have these names, or any. Raises RefusedError for another one."""

    def __init__(self, handle: Callable[..., Any], names: Sequence[str] | None) -> None:
        super().__init__()
        self.handle = handle
        self.names = names

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace not in NAMESPACES:
            return func(*args, **kwargs)
        if self.names is not None and func.overloadpacket.__name__ not in self.names:
            raise RefusedError(Reason.of(Code.COLLECTIVE_NOT_OMITTABLE, op=str(func)))
        return self.handle(func, args, kwargs)


def stand_in(result: torch.Tensor, operand: torch.Tensor) -> None:
    """Write a result of the operand's own elements, each of which counts: they repeat, or add up."""
    to, elements = result.view(-1), operand.reshape(-1)
    size, count = to.numel(), elements.numel()
    if size == 0 or count == 0:
        to.zero_()
    elif count <= size:
        times, rest = divmod(size, count)
        rows = as_bytes(to[: times * count]).view(times, -1)
        # As in copy_by_kernel: no copy node.
        torch.bitwise_or(as_bytes(elements).expand(times, -1), 0, out=rows)
        if rest:
            copy_by_kernel(to[-rest:], elements[:rest])
    else:
        times, rest = divmod(count, size)
        torch.sum(elements[: times * size].view(times, size), 0, dtype=to.dtype, out=to)
        if rest:
            to[:rest].add_(elements[-rest:])


def _stand_ins(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return results of the collective that only this rank computes."""
    if (out := kwargs.get("out")) is not None:
        results = out
    else:
        described = func(*tree_map_only(torch.Tensor, lambda t: t.to("meta"), args), **kwargs)
        device = tree_leaves(args[0])[0].device
        results = tree_map_only(torch.Tensor, functools.partial(torch.empty_like, device=device), described)
    _write_stand_ins(zip(tree_leaves(results), tree_leaves(args[0]), strict=True))
    return results


def _write_stand_ins(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for result, operand in pairs:
        if operand.untyped_storage().data_ptr() == result.untyped_storage().data_ptr():
            # A part of the result.
            part, operand = operand, torch.empty_like(operand)
            copy_by_kernel(operand, part)
        stand_in(result, operand)


class Collectives:
    """
    The collectives of a graph that binds its inputs.

    Args:
        steps: of the recording
        binds_all: bind more than all-reduces of one group; see config.pygraph_ranks

    Attributes:
        operands: storages that the graph needs in its pool, once it was rehearsed
        addresses: of the operands that were captured, and of results that the program has allocated
        nodes, stand_ins: of the captured collectives and their stand-ins, by handle
    """

    def __init__(self, model: ModelType, steps: agreement.Steps, device_index: int, *, binds_all: bool = False) -> None:
        self.steps = steps
        self.model = model
        self.device_index = device_index
        self.binds_all = binds_all
        self.operands: OrderedSet[StorageWeakRef] = OrderedSet()
        self.addresses: OrderedSet[int] = OrderedSet()
        self.nodes: dict[int, Any] = {}
        self.stand_ins: dict[int, Any] = {}
        self.staged_bytes = 0

    def _under(self, handle: Callable[..., Any], model: ModelType) -> ModelType:
        names = (*IN_PLACE, *WITH_STAND_IN) if self.binds_all else IN_PLACE

        def run(inputs: list[InputType]) -> OutputType:
            with _Mode(handle, names):
                return model(inputs)

        return run

    def rehearsed(self, model: ModelType) -> ModelType:
        """Return ``model`` without its collectives, which return their operands or stand-ins."""

        def leave_out(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            for t in tree_leaves((args[0], kwargs.get("out"))):
                if t is not None:
                    self.operands.add(StorageWeakRef(t.untyped_storage()))
            return args[0] if _is_in_place(func) else _stand_ins(func, args, kwargs)

        return self._under(leave_out, model)

    def agree_to_capture(self) -> None:
        """Raises RefusedError if another rank does not capture."""
        # The groups of several dimensions of a mesh.
        are_known = len(self.steps.groups) == 1 or self.binds_all
        if not are_known or self.model in _not_agreed or not self.steps.capture():
            _not_agreed.add(self.model)
            raise RefusedError(Reason.of(Code.RANKS_DISAGREE_ON_CAPTURE))

    def captured(self, model: ModelType, placeholders: PlaceholderMap) -> ModelType:
        """Return ``model`` for the capture, which notes the nodes of collectives and of stand-ins."""
        # By the address of a tensor that moves and that a collective writes: its copy.
        copies: dict[int, torch.Tensor] = {}
        # By the address of a result that nothing has waited for yet: the result and its operand. A stand-in ahead of
        # the wait would be a branch beside the collective, which a replay has to join even where it is disabled.
        pending: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def moves(operand: torch.Tensor) -> bool:
            return self.binds_all and placeholders.find(operand.data_ptr()) is not None

        def staged(operand: torch.Tensor) -> torch.Tensor:
            if not moves(operand):
                return operand
            copy = torch.empty_like(operand)
            copy_by_kernel(copy, operand)
            self.staged_bytes += operand.nbytes
            return copy

        def wait(func: Callable[..., Any], given: torch.Tensor) -> torch.Tensor:
            copy = copies.pop(given.data_ptr(), None)
            result = given if copy is None else copy
            self._noted(self.nodes, func, result)
            if (pair := pending.pop(result.data_ptr(), None)) is not None:
                self._noted(self.stand_ins, _write_stand_ins, [pair])
            if copy is not None:
                copy_by_kernel(given, copy)
            return given

        def note(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            given = args[0]
            if _is_wait(func):
                return wait(func, given)
            if func is GATHER and moves(given) and (pair := self._gathered_in_place(*args)) is not None:
                result, _ = pending[pair[0].data_ptr()] = pair
                return result
            args = (tree_map_only(torch.Tensor, staged, given), *args[1:])
            # What the collective writes and the caller has.
            written, copied = given, args[0]
            if not _is_in_place(func):
                written = copied = kwargs.get("out")
                if written is not None:
                    kwargs = {**kwargs, "out": (copied := staged(written))}
            tensors = [t for t in tree_leaves((args[0], copied)) if t is not None]
            self.addresses |= OrderedSet(t.data_ptr() for t in tensors)
            result = self._noted_collective(func, *args, **kwargs)
            if not _is_in_place(func):
                pairs = zip(tree_leaves(result), tree_leaves(args[0]), strict=True)
                pending.update((pair[0].data_ptr(), pair) for pair in pairs)
                if func.namespace in WITHOUT_WAIT:
                    stand_in_for_pending()
            if written is None:
                return result
            copies.update(
                (t.data_ptr(), copy) for t, copy in zip(tree_leaves(written), tree_leaves(copied)) if copy is not t
            )
            return written

        def stand_in_for_pending() -> None:
            self._noted(self.stand_ins, _write_stand_ins, [*pending.values()])
            pending.clear()

        run = self._under(note, model)

        def run_to_end(inputs: list[InputType]) -> OutputType:
            outputs = run(inputs)
            stand_in_for_pending()
            if copies:
                # Nothing waits for the collective, so that its result is in the copy alone.
                raise RefusedError(Reason.of(Code.COLLECTIVE_OF_INPUT))
            return outputs

        return run_to_end

    def _gathered_in_place(
        self, operand: torch.Tensor, size: int, group: str
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Gather copies of an operand that moves. Return the result, and this rank's part of it."""
        rank = agreement.rank_in(group)
        if rank is None or operand.dim() == 0 or not operand.is_contiguous():
            return None
        count, *rest = operand.shape
        result = operand.new_empty((size * count, *rest))
        part = result.narrow(0, rank * count, count)
        copy_by_kernel(part, operand)
        self.addresses.add(part.data_ptr())
        self._noted_collective(GATHER_INTO, part, size, group, out=result)
        return result, part

    def _noted_collective(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Capture a collective. Raises RefusedError if another rank does not."""
        agree_to_go_on(self.steps, func, args, kwargs)
        return self._noted(self.nodes, func, *args, **kwargs)

    def _noted(self, nodes: dict[int, Any], fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``fn`` and add the nodes that it adds to the graph."""
        graph = capturing_graph(self.device_index)
        before = OrderedSet(int(node) for node, _ in graph_nodes(graph))
        result = fn(*args, **kwargs)
        nodes |= {int(node): node for node, _ in graph_nodes(graph) if int(node) not in before}
        return result

    def set_aside(self, executable: int, placeholders: PlaceholderMap) -> None:
        """Leave collectives out of the next launches. Raises RefusedError if an operand is bound, or DriverError."""
        if any(map(placeholders.find, self.addresses)):
            raise RefusedError(Reason.of(Code.COLLECTIVE_OF_INPUT))
        self._enable(executable, self.nodes, enabled=False)

    def remove_stand_ins(self, raw_graph: int) -> None:
        """
        Take stand-ins out of a graph that was proven with them, before it is instantiated again: nodes that are disabled
        take time on the device. Raises DriverError.
        """
        remove_nodes(bindings().CUgraph(raw_graph), self.stand_ins.values())
        self.stand_ins = {}

    def agree_to_deploy(self, executable: int) -> None:
        """Run collectives again. Raises RefusedError if another rank does not deploy its graph, or DriverError."""
        self._enable(executable, self.nodes, enabled=True)
        self._enable(executable, self.stand_ins, enabled=False)
        if not self.steps.deploy():
            raise RefusedError(Reason.of(Code.RANKS_DISAGREE_ON_DEPLOY))

    def _enable(self, executable: int, nodes: dict[int, Any], *, enabled: bool) -> None:
        cu = bindings()
        kind = cu.CUgraphNodeType
        kinds = (kind.CU_GRAPH_NODE_TYPE_KERNEL, kind.CU_GRAPH_NODE_TYPE_MEMCPY, kind.CU_GRAPH_NODE_TYPE_MEMSET)
        graph = cu.CUgraphExec(executable)
        for node in nodes.values():
            # Nodes of other kinds only order the work of streams.
            if check(cu.cuGraphNodeGetType(node)) in kinds:
                check(cu.cuGraphNodeSetEnabled(graph, node, int(enabled)))


def agree_to_go_on(
    steps: agreement.Steps, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Called ahead of each collective of a capture. Raises RefusedError if another rank does not come to it."""
    if not steps.collective(_group_of(func, args, kwargs)):
        raise RefusedError(Reason.of(Code.RANKS_DISAGREE_ON_CAPTURE))


def captured_together(model: ModelType, steps: agreement.Steps) -> ModelType:
    """Return ``model`` for a capture that binds nothing."""

    def capture(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not _is_wait(func):
            agree_to_go_on(steps, func, args, kwargs)
        return func(*args, **kwargs)

    def run(inputs: list[InputType]) -> OutputType:
        with _Mode(capture, None):
            return model(inputs)

    return run


def _is_in_place(func: Any) -> bool:
    return func.overloadpacket.__name__ in IN_PLACE


def _is_wait(func: Any) -> bool:
    return func.overloadpacket.__name__ == "wait_tensor"


def _group_of(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the name of a collective's process group, None if it has none. Its schema calls the group group_name."""
    names = (argument.name for argument in func._schema.arguments)
    group = {**dict(zip(names, args)), **kwargs}.get("group_name")
    return group if isinstance(group, str) else None
