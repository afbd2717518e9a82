"""
Graphs with collectives.

Every rank has to run each collective as often as the others do, once a call, also in a
call that records:

- The rehearsal leaves collectives out, and so does the replay that has to reproduce it: the
  nodes that they captured are disabled meanwhile (cuGraphNodeSetEnabled). An all-reduce in
  place that is left out is one that changes nothing.
- The nodes of collectives themselves are not bound. What a collective is given lies in the
  graphs' pool, or is an input that does not move, since NCCL may keep addresses where no
  parameter shows them.
- Then the call's inputs are restored, and the whole graph runs once, as the call.

And a collective that is captured needs others that are: NCCL may register the memory of a
captured collective with the other ranks, while it is captured (NCCL_GRAPH_REGISTER), and
then uses other kernels. So ranks agree, by the store of their group, that all of them
capture, and that all of them deploy what they captured.

Ranks time alike only on average, so a function with collectives is not selected by time.
"""

from __future__ import annotations

import datetime
import logging
import weakref
from collections import Counter
from typing import Any, TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._inductor.pygraph.graph.binding import BindingError, graph_nodes
from torch._inductor.pygraph.graph.driver import bindings, check
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._ordered_set import OrderedSet
from torch.utils._python_dispatch import TorchDispatchMode


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._inductor.cudagraph_utils import ModelType, OutputType
    from torch._inductor.utils import InputType


log = logging.getLogger(__name__)

# How long a rank waits for others to come to where it is: they may have more to compile.
PATIENCE = datetime.timedelta(minutes=2)

# Of the operators that wait for other ranks.
NAMESPACES = ("_c10d_functional", "symm_mem")

# Those that return their operand, so that they can be left out.
IN_PLACE = ("all_reduce_", "wait_tensor")

# How often this process has recorded a function: others do so as often.
_recordings: Counter[str] = Counter()

# Functions that not all ranks capture. Where each has sizes of its own, which it records in
# calls that the others do not, it would wait for every one of them.
_not_agreed: weakref.WeakSet[ModelType] = weakref.WeakSet()


def under(mode: TorchDispatchMode, model: ModelType) -> ModelType:
    def run(inputs: list[InputType]) -> OutputType:
        with mode:
            return model(inputs)

    return run


class _Collectives(TorchDispatchMode):
    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace not in NAMESPACES:
            return func(*args, **kwargs)
        if func.overloadpacket.__name__ not in IN_PLACE:
            raise BindingError(f"{func} can not be left out of the proof")
        return self.collective(func, args, kwargs)

    def collective(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        raise NotImplementedError


class LeftOut(_Collectives):
    """
    Returns what a collective is given, and runs none.

    Attributes:
        operands: the storages of what they were given

    Raises:
        BindingError: one cannot be left out. None has run by then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operands: OrderedSet[StorageWeakRef] = OrderedSet()

    def collective(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.operands.add(StorageWeakRef(args[0].untyped_storage()))
        return args[0]


class Captured(_Collectives):
    """
    Lets collectives be captured.

    Args:
        model: the function
        groups: the process groups of its collectives
        name: what it is called, on all ranks alike

    Attributes:
        addresses: of what they were given
        nodes: what they added to the graph
        captures: whether all ranks agreed to capture
    """

    def __init__(
        self, model: ModelType, groups: Sequence[str], name: str, device_index: int
    ) -> None:
        super().__init__()
        self.device_index = device_index
        self.groups = groups
        self.model = model
        _recordings[name] += 1
        name = f"{name}/{_recordings[name]}"
        self.to_agree_on = [f"{name}/capture", f"{name}/deploy"]
        self.captures = False
        self.addresses: OrderedSet[int] = OrderedSet()
        self.nodes: dict[int, Any] = {}

    def collective(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        before = nodes_so_far(self.device_index)
        result = func(*args, **kwargs)
        after = nodes_so_far(self.device_index)
        self.nodes |= {node: after[node] for node in after.keys() - before.keys()}
        self.addresses.add(args[0].data_ptr())
        return result

    def agree(self) -> bool:
        """Whether all ranks take the next step: first to capture, then to deploy."""
        if len(self.groups) != 1 or self.model in _not_agreed:
            # Of several groups, ranks of one may agree and those of the next one may not.
            self.refuse()
            return False
        is_agreed = agree(self.groups[0], self.to_agree_on.pop(0), ready=True)
        if not is_agreed:
            self.to_agree_on.clear()
            if not self.captures:
                _not_agreed.add(self.model)
        self.captures |= is_agreed
        return is_agreed

    def refuse(self) -> None:
        """This rank does not take it."""
        for group in self.groups if self.to_agree_on else ():
            agree(group, self.to_agree_on[0], ready=False)
        self.to_agree_on.clear()

    def enable(self, executable: int, *, enabled: bool) -> None:
        """
        Whether the next launches run them.

        Raises:
            DriverError: a node could not be set.
        """
        cu = bindings()
        kind = cu.CUgraphNodeType
        kinds = (
            kind.CU_GRAPH_NODE_TYPE_KERNEL,
            kind.CU_GRAPH_NODE_TYPE_MEMCPY,
            kind.CU_GRAPH_NODE_TYPE_MEMSET,
        )
        for node in self.nodes.values():
            # The others only order what other streams do.
            if check(cu.cuGraphNodeGetType(node)) in kinds:
                check(
                    cu.cuGraphNodeSetEnabled(
                        cu.CUgraphExec(executable), node, int(enabled)
                    )
                )


def nodes_so_far(device_index: int) -> dict[int, Any]:
    """By address, those of the graph that the current stream is captured in."""
    cu = bindings()
    stream = torch.cuda.current_stream(device_index).cuda_stream
    _, _, graph, *_ = check(cu.cuStreamGetCaptureInfo(cu.CUstream(stream)))
    return {int(node): node for node, _ in graph_nodes(graph)}


def agree(group_name: str, what: str, *, ready: bool) -> bool:
    """
    Whether all ranks of a group are ready for something, which has a name of its own. Waits
    for those that have not come to it, unless this one is not ready.
    """
    try:
        group = dist.distributed_c10d._resolve_process_group(group_name)
        _, store = dist.distributed_c10d._world.pg_map[group]
        return _agree(store, f"pygraph/{what}", group.size(), ready=ready)
    except (KeyError, RuntimeError, ValueError) as e:
        log.info("ranks can not agree: %s", str(e).partition("\n")[0])
        return False


def _agree(store: dist.Store, key: str, size: int, *, ready: bool) -> bool:
    # What is set first holds, for all.
    if not ready:
        store.compare_set(key, "", "no")
    elif store.add(f"{key}/ready", 1) == size:
        store.compare_set(key, "", "yes")
    else:
        try:
            store.wait([key], PATIENCE)
        except RuntimeError:
            # DistStoreError, or of a FileStore no more than this.
            store.compare_set(key, "", "no")
    return store.get(key) == b"yes"
