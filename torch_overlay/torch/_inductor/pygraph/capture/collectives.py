"""
Graphs with collectives.

Every rank has to run each collective once a call, also in a call that records. So the rehearsal
leaves collectives out: an all-reduce in place that is left out changes nothing. The replay that
has to reproduce the rehearsal runs with their nodes disabled. Then the call's inputs are
restored, and the whole graph runs once, as the call.

Nodes of collectives are not bound: NCCL may keep addresses where no parameter shows them. So
the operand of a collective lies in the graphs' pool, or is an input that does not move.

NCCL may register the operand's memory with the other ranks during capture (NCCL_GRAPH_REGISTER),
and then uses other kernels. So the ranks agree, through the store of their group, that all of
them capture and that all of them deploy their graphs.
"""

from __future__ import annotations

import datetime
import logging
import weakref
from collections import Counter
from typing import Any, TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._inductor.pygraph.graph.binding import graph_nodes
from torch._inductor.pygraph.graph.driver import bindings, check
from torch._inductor.pygraph.graph.edges import capturing_graph
from torch._inductor.pygraph.types.reason import Code, Reason, RefusedError
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._ordered_set import OrderedSet
from torch.utils._python_dispatch import TorchDispatchMode


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._inductor.cudagraph_utils import ModelType, OutputType
    from torch._inductor.pygraph.graph.placeholder import PlaceholderMap
    from torch._inductor.utils import InputType


log = logging.getLogger(__name__)

# How long a rank waits for the others, which may have more to compile.
PATIENCE = datetime.timedelta(minutes=2)

# Namespaces of the operators that wait for other ranks.
NAMESPACES = ("_c10d_functional", "symm_mem")

# Collectives that return their operand, so that they can be left out.
IN_PLACE = ("all_reduce_", "wait_tensor")

# How often this process recorded a function, by name. Other ranks record it as often.
_recordings: Counter[str] = Counter()

# Functions that not all ranks capture. If ranks have sizes of their own, they record in
# different calls, and each rank would wait for every one of the others' sizes.
_not_agreed: weakref.WeakSet[ModelType] = weakref.WeakSet()


class _Mode(TorchDispatchMode):
    """Let ``handle`` run the collectives. Raises RefusedError for one that it cannot."""

    def __init__(self, handle: Callable[..., Any]) -> None:
        super().__init__()
        self.handle = handle

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace not in NAMESPACES:
            return func(*args, **kwargs)
        if func.overloadpacket.__name__ not in IN_PLACE:
            raise RefusedError(Reason.of(Code.COLLECTIVE_NOT_OMITTABLE, op=str(func)))
        return self.handle(func, args, kwargs)


def _under(handle: Callable[..., Any], model: ModelType) -> ModelType:
    def run(inputs: list[InputType]) -> OutputType:
        with _Mode(handle):
            return model(inputs)

    return run


class Collectives:
    """
    The steps of a recording that all ranks take together.

    Args:
        model: the function
        groups: names of the process groups of its collectives
        name: the function's name, the same on all ranks

    Attributes:
        is_retryable: whether the function may be recorded again with another binding
        operands: storages that the graph needs in its pool, once it was rehearsed
        addresses: of the operands that were captured
        nodes: of the captured collectives, by handle
    """

    def __init__(self, model: ModelType, groups: Sequence[str], name: str, device_index: int) -> None:
        self.groups = groups
        self.model = model
        self.device_index = device_index
        _recordings[name] += 1
        self.to_agree_on = [f"{name}/{_recordings[name]}/{step}" for step in ("capture", "deploy")]
        self.is_retryable = True
        self.operands: OrderedSet[StorageWeakRef] = OrderedSet()
        self.addresses: OrderedSet[int] = OrderedSet()
        self.nodes: dict[int, Any] = {}

    def rehearsed(self, model: ModelType) -> ModelType:
        """Return ``model`` without its collectives, which return their operands."""

        def leave_out(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            self.operands.add(StorageWeakRef(args[0].untyped_storage()))
            return args[0]

        return _under(leave_out, model)

    def agree_to_capture(self) -> None:
        """Raises RefusedError if another rank does not capture."""
        if not self._agree():
            _not_agreed.add(self.model)
            raise RefusedError(Reason.of(Code.RANKS_DISAGREE_ON_CAPTURE))
        # Other ranks do not capture it again: this one may not be able to.
        self.is_retryable = False

    def captured(self, model: ModelType) -> ModelType:
        """Return ``model`` for the capture, which notes the nodes of collectives."""

        def note(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            before = nodes_so_far(self.device_index)
            result = func(*args, **kwargs)
            after = nodes_so_far(self.device_index)
            self.nodes |= {node: after[node] for node in after.keys() - before.keys()}
            self.addresses.add(args[0].data_ptr())
            return result

        return _under(note, model)

    def set_aside(self, executable: int, placeholders: PlaceholderMap) -> None:
        """
        Leave collectives out of the next launches, which are compared with the rehearsal.

        Raises:
            RefusedError: a collective's operand is bound.
            DriverError: a node could not be set.
        """
        if any(map(placeholders.find, self.addresses)):
            raise RefusedError(Reason.of(Code.COLLECTIVE_OF_INPUT))
        self._enable(executable, enabled=False)

    def agree_to_deploy(self, executable: int) -> None:
        """
        Run collectives in the next launches again.

        Raises:
            RefusedError: another rank does not deploy its graph.
            DriverError: a node could not be set.
        """
        self._enable(executable, enabled=True)
        if not self._agree():
            raise RefusedError(Reason.of(Code.RANKS_DISAGREE_ON_DEPLOY))

    def refuse(self) -> None:
        """Tell the other ranks that this one does not go on."""
        for group in self.groups if self.to_agree_on else ():
            agree(group, self.to_agree_on[0], ready=False)
        self.to_agree_on.clear()

    def _agree(self) -> bool:
        # Ranks of one group may agree where those of another do not.
        if len(self.groups) != 1 or self.model in _not_agreed:
            self.refuse()
            return False
        is_agreed = agree(self.groups[0], self.to_agree_on.pop(0), ready=True)
        if not is_agreed:
            self.to_agree_on.clear()
        return is_agreed

    def _enable(self, executable: int, *, enabled: bool) -> None:
        cu = bindings()
        kind = cu.CUgraphNodeType
        kinds = (kind.CU_GRAPH_NODE_TYPE_KERNEL, kind.CU_GRAPH_NODE_TYPE_MEMCPY, kind.CU_GRAPH_NODE_TYPE_MEMSET)
        graph = cu.CUgraphExec(executable)
        for node in self.nodes.values():
            # Nodes of other kinds only order the work of streams.
            if check(cu.cuGraphNodeGetType(node)) in kinds:
                check(cu.cuGraphNodeSetEnabled(graph, node, int(enabled)))


def nodes_so_far(device_index: int) -> dict[int, Any]:
    """Return the nodes of the graph that the current stream is captured in, by handle."""
    return {int(node): node for node, _ in graph_nodes(capturing_graph(device_index))}


def agree(group_name: str, what: str, *, ready: bool) -> bool:
    """
    Return whether all ranks of a group are ready for a step.

    Waits for the other ranks, unless this one is not ready.

    Args:
        what: a name that the step has on all ranks and that no other step has
    """
    try:
        group = dist.distributed_c10d._resolve_process_group(group_name)
        _, store = dist.distributed_c10d._world.pg_map[group]
        return _agree(store, f"pygraph/{what}", group.size(), ready=ready)
    except (KeyError, RuntimeError, ValueError) as e:
        log.info("ranks cannot agree on %s: %s", what, str(e).partition("\n")[0])
        return False


def _agree(store: dist.Store, key: str, size: int, *, ready: bool) -> bool:
    # The value that is set first holds for all ranks.
    if not ready:
        store.compare_set(key, "", "no")
    elif store.add(f"{key}/ready", 1) == size:
        store.compare_set(key, "", "yes")
    else:
        try:
            store.wait([key], PATIENCE)
        except RuntimeError:
            # DistStoreError. A FileStore raises nothing more special than this.
            store.compare_set(key, "", "no")
    return store.get(key) == b"yes"
